/* SPDX-License-Identifier: Apache-2.0
 *
 * residual.cu: what residual.h says.
 */
#include "residual.h"

#include "rounded.h"

namespace rpc {
namespace {

template <bool wide>
__global__ void residual_rows(rpi_base base, float *x, int64_t rows, int64_t columns,
                              Packing packing) {
  const int64_t row = row_from_end(rows);
  if (row < 0) return; /* a whole warp */
  const Place place = place_of(packing, row);
  const BaseRow known = base_row(base, row);
  for (int64_t c = 0; c < columns; c += strip_columns) {
    const int64_t start = row * columns + c, count = columns - c;
    const Strip<strip_quads> left = load_strip<strip_quads, wide>(base.x + start, count);
    Strip<strip_quads> sum = load_strip<strip_quads, wide>(x + start, count);
    keep_strip(packing, place, c, sum);
#pragma unroll
    for (int q = 0; q < strip_quads; q++) {
      const int64_t at = c + strip_column(q);
      add_four(sum.quad[q], base_four<wide>(base, known, at, columns - at, left.quad[q]));
    }
    store_strip<strip_quads, wide>(x + start, count, sum);
  }
}

template <class E, bool wide>
__global__ void residual_backward_rows(const float *dx, E *df, int64_t rows, int64_t columns,
                                       Packing packing) {
  const int64_t row = row_of_thread(); /* the norm's backward wrote the first ones last */
  if (row >= rows) return;
  const Place place = place_of(packing, row);
  for (int64_t c = 0; c < columns; c += strip_columns) {
    const int64_t start = row * columns + c, count = columns - c;
    Strip<strip_quads> d = load_strip<strip_quads, wide>(dx + start, count);
    keep_strip(packing, place, c, d);
    store_strip<strip_quads, wide>(df + start, count, d);
  }
}

template <class E>
rp_status backward_of(const rpi_norm_backward_args *args, const Packing &packing) {
  E *const df = reinterpret_cast<E *>(args->df);
  const RowGrid g = strip_grid(args->rows);
  const bool wide = is_wide(args->dx, args->columns) && is_wide(df, args->columns);
  CUDA_TRY(launch(wide ? residual_backward_rows<E, true> : residual_backward_rows<E, false>,
                  {g.grid, g.block, 0, context().stream}, args->dx, df, args->rows, args->columns,
                  packing));
  return RP_OK;
}

}  // namespace

rp_status residual(const rpi_norm_args *args) {
  Packing packing;
  RPI_TRY(packing_of(&args->dropout, false, &packing));
  const RowGrid g = strip_grid(args->rows);
  const bool wide = is_wide(args->x, args->columns) && is_wide(args->base, args->columns);
  CUDA_TRY(launch(wide ? residual_rows<true> : residual_rows<false>,
                  {g.grid, g.block, 0, context().stream}, args->base, args->x, args->rows,
                  args->columns, packing));
  return RP_OK;
}

rp_status residual_backward(const rpi_norm_backward_args *args) {
  rpi_column_sums_args sums = {args->rows, args->columns, args->dx, args->columns, args->dbias};
  int element = RP_F32;
  if (args->df != nullptr) {
    sums.x = args->df;
    element = args->df_element;
    Packing packing;
    RPI_TRY(packing_of(&args->dropout, false, &packing));
    RPI_TRY(element == RP_BF16 ? backward_of<bf16>(args, packing)
                               : backward_of<float>(args, packing));
  }
  return args->dbias != nullptr ? sum_elements(&sums, element) : RP_OK;
}

}  // namespace rpc
