/* SPDX-License-Identifier: Apache-2.0
 *
 * linear.c: the way back of a linear layer.
 */
#include <assert.h>

#include "ops/linear.h"

static rp_status linear_backward_by(const rpi_linear_backward_args *args,
                                    rp_status (*product)(const rpi_gemm_args *args)) {
  assert(args->dy_element == RP_F32 && args->dx_element == RP_F32);
  assert(!args->forward.kept && !args->forward.rounded);
  const rpi_linear *const l = &args->forward;
  const rpi_gemm_args to_weight =
      rpi_linear_to_weight(l, args->dy, args->dy_stride, args->dweight, args->precision);
  RPI_TRY(product(&to_weight));
  if (args->dbias) {
    const rpi_column_sums_args sums = {.rows = l->rows,
                                       .columns = l->out,
                                       .x = args->dy,
                                       .x_stride = args->dy_stride,
                                       .sum = args->dbias};
    RPI_TRY(column_sums(&sums));
  }
  if (!args->dx) return RP_OK;
  const rpi_gemm_args to_input = rpi_linear_to_input(l, args->dy, args->dy_stride, args->dx, RP_F32,
                                                     args->add, args->precision);
  return product(&to_input);
}

static rp_status linear_backward(const rpi_linear_backward_args *args) {
  return linear_backward_by(args, gemm);
}

#ifdef RPI_TILES
static rp_status linear_backward_tiles(const rpi_linear_backward_args *args) {
  return linear_backward_by(args, gemm_tiles);
}
#endif
