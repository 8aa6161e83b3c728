/* SPDX-License-Identifier: Apache-2.0
 *
 * linear.h: the three products of a linear layer y = x . Wᵀ + b, W being [out, in]:
 *
 *   forward     y            = x . Wᵀ + b
 *   to weight   dW          += dyᵀ . x
 *   to input    dx (or dx +) = dy . W
 */
#ifndef RPI_LINEAR_H
#define RPI_LINEAR_H

#include "ops/ops.h"

typedef struct rpi_linear {
  int64_t rows, in, out;
  const real *x;
  int64_t x_stride;
  const real *weight;
  const real *bias; /* or NULL */
} rpi_linear;

static inline rpi_gemm_args rpi_linear_forward(const rpi_linear *l, real *y, int64_t y_stride) {
  return (rpi_gemm_args){.rows = l->rows,
                         .columns = l->out,
                         .inner = l->in,
                         .a = l->x,
                         .a_stride = l->x_stride,
                         .b = l->weight,
                         .b_stride = l->in,
                         .c = y,
                         .c_stride = y_stride,
                         .bias = l->bias,
                         .transpose_b = true};
}

static inline rpi_gemm_args rpi_linear_to_weight(const rpi_linear *l, const real *dy,
                                                 int64_t dy_stride, real *dweight) {
  return (rpi_gemm_args){.rows = l->out,
                         .columns = l->in,
                         .inner = l->rows,
                         .a = dy,
                         .a_stride = dy_stride,
                         .b = l->x,
                         .b_stride = l->x_stride,
                         .c = dweight,
                         .c_stride = l->in,
                         .transpose_a = true,
                         .accumulate = true};
}

static inline rpi_gemm_args rpi_linear_to_input(const rpi_linear *l, const real *dy,
                                                int64_t dy_stride, real *dx, bool add) {
  return (rpi_gemm_args){.rows = l->rows,
                         .columns = l->in,
                         .inner = l->out,
                         .a = dy,
                         .a_stride = dy_stride,
                         .b = l->weight,
                         .b_stride = l->in,
                         .c = dx,
                         .c_stride = l->in,
                         .accumulate = add};
}

#endif
