/* SPDX-License-Identifier: Apache-2.0
 *
 * waves.h: tables of projected sinusoids (Transformer-XL), and the way back to the projection.
 *
 * With R_t = [ sin(t w) ; cos(t w) ] and a projection W = [ W_s W_c ], the distances d = -t and
 * d = t share all there is to multiply:
 *
 *   S_t = W_s sin(t w),  C_t = W_c cos(t w),    row(-t) = C_t + S_t,   row(t) = C_t - S_t
 *   dS_t = drow(-t) - drow(t),  dC_t = drow(-t) + drow(t),
 *   dW_s = sum_t dS_t sin(t w)',  dW_c = sum_t dC_t cos(t w)'
 *
 * So a table of both sides costs half of one product with all of its rows.
 */
#ifndef RPI_WAVES_H
#define RPI_WAVES_H

#include "ops/ops.h"

/* Distances at a time: scratch memory does not grow with the table, and weights are packed anew for
 * each (256 took a third longer with AMX). */
#define RPI_WAVE_ROWS 1024

/* Sinusoids that are made on the way. Of t + r with r below so many, the sines and cosines are
 * those of t and of r by the theorem of addition, in double: few calls of sin and cos, and no
 * memory for all distances. With 16,384 of them and a width of 1,024 a table of 64 columns takes 47
 * ms in place of 39 (one core, AVX-512). */
#define RPI_WAVE_NEAR 64

typedef struct rpi_waves {
  int64_t left, right; /* the table's distances are -left to right */
  int64_t heads, head_width, width;
  const real *waves; /* [at least max(left, right) + 1][width]: R_t from t = 0 on; NULL: made */
  int64_t head_stride, row_stride; /* of the table; rows may fall: mirrored, it has -R_t for R_t */
  real *some; /* [2][distances, at most RPI_WAVE_ROWS][heads * head_width], the host's */
  /* where they are made, by frequencies 10000^(-c / (width / 2)): */
  real *made;     /* [RPI_WAVE_ROWS][width] */
  double *angles; /* see rpi_waves_angles */
} rpi_waves;

/* Numbers of `angles`: frequencies, those of the nearest distances, and of the first of every
 * RPI_WAVE_NEAR others. */
static inline int64_t rpi_waves_angles(int64_t width) {
  return (1 + RPI_WAVE_NEAR + RPI_WAVE_ROWS / RPI_WAVE_NEAR) * width;
}

/* Numbers of `some`. */
static inline int64_t rpi_waves_scratch(int64_t heads, int64_t head_width, int64_t left,
                                        int64_t right) {
  return 2 * rpi_min(rpi_max(left, right) + 1, RPI_WAVE_ROWS) * heads * head_width;
}

/* table = the projected rows; weight: [heads * head_width][width]. For the host's operations alone,
 * both of them: the sums are made here. */
rp_status rpi_waves_forward(const rp_ops *ops, const rpi_waves *w, const real *weight, real *table);

/* dweight += what dtable says. */
rp_status rpi_waves_backward(const rp_ops *ops, const rpi_waves *w, const real *dtable,
                             real *dweight);

#endif
