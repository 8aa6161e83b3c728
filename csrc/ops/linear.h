/* SPDX-License-Identifier: Apache-2.0
 *
 * linear.h: the three products of a linear layer y = x . Wᵀ + b, W being [out, in]:
 *
 *   forward     y            = x . Wᵀ + b
 *   to weight   dW          += dyᵀ . x
 *   to input    dx (or dx +) = dy . W
 *
 * One source for the host and for cuda/, where every field has to be given.
 */
#ifndef RPI_LINEAR_H
#define RPI_LINEAR_H

#include "ops/ops.h"

static inline rpi_gemm_args rpi_linear_forward(const rpi_linear *l, real *y, int64_t y_stride,
                                               int y_element, int precision) {
  return (rpi_gemm_args){.rows = l->rows,
                         .columns = l->out,
                         .inner = l->in,
                         .a = l->x,
                         .a_stride = l->x_stride,
                         .b = l->weight,
                         .b_stride = l->in,
                         .c = y,
                         .c_stride = y_stride,
                         .c_element = y_element,
                         .bias = l->bias,
                         .transpose_a = false,
                         .transpose_b = true,
                         .accumulate = false,
                         .precision = precision,
                         .kept = l->kept,
                         .given = l->given,
                         .rounded = l->rounded};
}

static inline rpi_gemm_args rpi_linear_to_weight(const rpi_linear *l, const real *dy,
                                                 int64_t dy_stride, real *dweight, int precision) {
  return (rpi_gemm_args){.rows = l->out,
                         .columns = l->in,
                         .inner = l->rows,
                         .a = dy,
                         .a_stride = dy_stride,
                         .b = l->x,
                         .b_stride = l->x_stride,
                         .c = dweight,
                         .c_stride = l->in,
                         .c_element = RP_F32,
                         .bias = NULL,
                         .transpose_a = true,
                         .transpose_b = false,
                         .accumulate = true,
                         .precision = precision,
                         .kept = NULL,
                         .given = false,
                         .rounded = NULL};
}

static inline rpi_gemm_args rpi_linear_to_input(const rpi_linear *l, const real *dy,
                                                int64_t dy_stride, real *dx, int dx_element,
                                                bool add, int precision) {
  return (rpi_gemm_args){.rows = l->rows,
                         .columns = l->in,
                         .inner = l->out,
                         .a = dy,
                         .a_stride = dy_stride,
                         .b = l->weight,
                         .b_stride = l->in,
                         .c = dx,
                         .c_stride = l->in,
                         .c_element = dx_element,
                         .bias = NULL,
                         .transpose_a = false,
                         .transpose_b = false,
                         .accumulate = add,
                         .precision = precision,
                         .kept = NULL,
                         .given = false,
                         .rounded = NULL};
}

/* x, or a weight, in bf16: rows on borders of 16 bytes, with place for a bias where the layer has
 * one (cuda/linear.cu). */
static inline int64_t rpi_operand_stride(int64_t in, bool bias) {
  return rpi_round_up(in + (bias ? RPI_BIAS_PARTS : 0), RPI_ROUNDED_BORDER);
}
static inline int64_t rpi_linear_kept(int64_t rows, int64_t in) {
  return rows * rpi_operand_stride(in, true) * 2;
}

/* Of each of them, for the profile. */
static inline double rpi_linear_operations(const rpi_linear *l) {
  return 2 * (double)l->rows * (double)l->in * (double)l->out;
}
static inline int64_t rpi_linear_numbers(const rpi_linear *l) {
  return l->rows * l->in + l->in * l->out + l->rows * l->out;
}

#endif
