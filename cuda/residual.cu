/* SPDX-License-Identifier: Apache-2.0
 *
 * residual.cu: out = x + keep(f), how a layer adds to the stream; backward df = keep(dout).
 */
#include "packing.h"

namespace rpc {
namespace {

/* Every number is read before its place is written: out may be x or f. */
template <bool wide>
__global__ void residual_rows(const float *x, const float *f, float *out, int64_t rows,
                              int64_t columns, Packing packing) {
  const int64_t row = row_from_end(rows);
  if (row < 0) return; /* a whole warp */
  const Place place = place_of(packing, row);
  for (int64_t c = 0; c < columns; c += strip_columns) {
    const int64_t start = row * columns + c, count = columns - c;
    const Strip<strip_quads> left = load_strip<strip_quads, wide>(x + start, count);
    Strip<strip_quads> sum = load_strip<strip_quads, wide>(f + start, count);
    keep_strip(packing, place, c, sum);
#pragma unroll
    for (int q = 0; q < strip_quads; q++) {
#pragma unroll
      for (int i = 0; i < 4; i++) sum.quad[q].x[i] += left.quad[q].x[i];
    }
    store_strip<strip_quads, wide>(out + start, count, sum);
  }
}

template <class E, bool wide>
__global__ void residual_backward_rows(const float *dout, E *df, int64_t rows, int64_t columns,
                                       Packing packing) {
  const int64_t row = row_of_thread(); /* the norm's backward wrote the first ones last */
  if (row >= rows) return;
  const Place place = place_of(packing, row);
  for (int64_t c = 0; c < columns; c += strip_columns) {
    const int64_t start = row * columns + c, count = columns - c;
    Strip<strip_quads> d = load_strip<strip_quads, wide>(dout + start, count);
    keep_strip(packing, place, c, d);
    store_strip<strip_quads, wide>(df + start, count, d);
  }
}

template <class E>
rp_status backward_of(const rpi_residual_backward_args *args, const Packing &packing) {
  E *const df = reinterpret_cast<E *>(args->df);
  const RowGrid g = strip_grid(args->rows);
  const bool wide = is_wide(args->dout, args->columns) && is_wide(df, args->columns);
  CUDA_TRY(launch(wide ? residual_backward_rows<E, true> : residual_backward_rows<E, false>,
                  {g.grid, g.block, 0, context().stream}, args->dout, df, args->rows, args->columns,
                  packing));
  return RP_OK;
}

}  // namespace

rp_status residual(const rpi_residual_args *args) {
  const int64_t rows = args->rows, columns = args->columns;
  if (rows == 0 || columns == 0) return RP_OK;
  Packing packing;
  RPI_TRY(packing_of(&args->dropout, false, &packing));
  const RowGrid g = strip_grid(rows);
  const bool wide =
      is_wide(args->x, columns) && is_wide(args->f, columns) && is_wide(args->out, columns);
  CUDA_TRY(launch(wide ? residual_rows<true> : residual_rows<false>,
                  {g.grid, g.block, 0, context().stream}, args->x, args->f, args->out, rows,
                  columns, packing));
  return RP_OK;
}

rp_status residual_backward(const rpi_residual_backward_args *args) {
  Packing packing;
  RPI_TRY(packing_of(&args->dropout, false, &packing));
  const bool same = packing.dropout.threshold == 0 && args->df == args->dout;
  if (args->rows == 0 || args->columns == 0 || same) return RP_OK;
  return args->df_element == RP_BF16 ? backward_of<bf16>(args, packing)
                                     : backward_of<float>(args, packing);
}

}  // namespace rpc
