/* SPDX-License-Identifier: Apache-2.0
 *
 * activation.c: a = keep(f(h)), between the two products of the feed-forward layer.
 *
 *   ReLU     f(x) = max(x, 0)            f'(x) = 1 where x > 0
 *   GELU     f(x) = x P(x)               f'(x) = P(x) + x p(x), the standard normal's P and p
 *   SwiGLU   f(x, y) = x s(x) y          df/dx = s(x) (1 + x (1 - s(x))) y,   df/dy = x s(x)
 *
 * with the logistic function s. ReLU's backward needs no mask: forward's result is positive just
 * where the number was kept and counts.
 */
#include "ops/dropout.h"
#include "ops/exp2.h"

/* The share of the standard normal distribution below x, P(x), and e^(-x^2 / 2). */
typedef struct normal_share {
  real below, bell;
} normal_share;

/* The share beyond |x| is bell * R(|x|), and R by a polynomial of our own fit in t = 1 / (1 + 0.26
 * |x|): 4e-9 of it up to 5, growing to 1e-7 at 10, rounding comes on top. So the share is as good
 * relative to itself, where 1 + erf would cancel. */
RPI_INLINE normal_share normal_below(real x) {
  const real size = x < 0 ? -x : x;
  const real bell = rpi_exp2((real)-0.5 * (real)RPI_LOG2_E * size * size);
#ifdef RP_REAL_IS_DOUBLE
  const real beyond = 0.5 * erfc(size * 0.70710678118654752440);
#else
  const real t = 1 / (1 + 0.26f * size);
  real r = 0.03276637685982288f;
  r = r * t - 0.1639342634262619f;
  r = r * t + 0.27472375175365843f;
  r = r * t - 0.1779323838319997f;
  r = r * t + 0.17993390246670546f;
  r = r * t + 0.04276115847977268f;
  r = r * t + 0.10519954012226267f;
  r = r * t + 0.10270393936820006f;
  r = r * t + 0.10377797941374278f;
  const real beyond = r * t * bell;
#endif
  return (normal_share){x < 0 ? beyond : 1 - beyond, bell};
}

/* By the exponential of something negative: nothing overflows. */
RPI_INLINE real logistic(real x) {
  const real e = rpi_exp2(-(real)RPI_LOG2_E * (x < 0 ? -x : x));
  return (x < 0 ? e : 1) / (1 + e);
}

/* Written so that a NaN stays: the comparisons are false for it. */
PACKED_FN void relu_piece(const void *args, packed_piece at) {
  const rpi_activation_args *const a = args;
  const real *const h = a->h + at.row * a->columns + at.column;
  real *const to = a->a + at.row * a->columns + at.column;
  _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
    to[c] = packed_keep(at, c, h[c] < 0 ? 0 : h[c]);
  }
}

PACKED_FN void gelu_piece(const void *args, packed_piece at) {
  const rpi_activation_args *const a = args;
  const real *const h = a->h + at.row * a->columns + at.column;
  real *const to = a->a + at.row * a->columns + at.column;
  _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
    to[c] = packed_keep(at, c, h[c] * normal_below(h[c]).below);
  }
}

PACKED_FN void swiglu_piece(const void *args, packed_piece at) {
  const rpi_activation_args *const a = args;
  const real *const x = a->h + 2 * at.row * a->columns + at.column, *const y = x + a->columns;
  real *const to = a->a + at.row * a->columns + at.column;
  _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
    to[c] = packed_keep(at, c, x[c] * logistic(x[c]) * y[c]);
  }
}

static void activation_block(void *context, int64_t task, int worker) {
  (void)worker;
  const packed_job *const job = context;
  const rpi_activation_args *const a = job->args;
  switch (a->kind) {
    case RP_RELU: packed_rows(job, task, false, relu_piece); break;
    case RP_GELU: packed_rows(job, task, false, gelu_piece); break;
    default: packed_rows(job, task, false, swiglu_piece); break;
  }
}

static rp_status activation(const rpi_activation_args *args) {
  packed_job job = packed_job_of(args, &args->dropout, args->rows, args->columns, args->columns);
  packed_run_all(&job, args->columns, activation_block);
  return RP_OK;
}

RPI_INLINE void relu_backward_rows(const packed_job *job, int64_t task) {
  const rpi_activation_backward_args *const a = job->args;
  const real scale = job->d.threshold != 0 ? job->d.scale : 1;
  const int64_t first = task * job->block * a->columns;
  const int64_t end = rpi_min((task + 1) * job->block, a->rows) * a->columns;
  const real *const forward = a->a, *const da = a->da;
  real *const dh = a->dh;
  _Pragma("omp simd") for (int64_t i = first; i < end; i++) {
    const real d = scale * da[i];
    dh[i] = forward[i] <= 0 ? 0 : d;
  }
}

PACKED_FN void gelu_backward_piece(const void *args, packed_piece at) {
  const rpi_activation_backward_args *const a = args;
  const int64_t start = at.row * a->columns + at.column;
  const real *const h = a->h + start, *const da = a->da + start;
  real *const dh = a->dh + start;
  _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
    const normal_share n = normal_below(h[c]);
    const real slope = n.below + h[c] * ((real)0.39894228040143267794 * n.bell);
    dh[c] = slope * packed_keep(at, c, da[c]);
  }
}

PACKED_FN void swiglu_backward_piece(const void *args, packed_piece at) {
  const rpi_activation_backward_args *const a = args;
  const int64_t start = 2 * at.row * a->columns + at.column;
  const real *const x = a->h + start, *const y = x + a->columns;
  const real *const da = a->da + at.row * a->columns + at.column;
  real *const dx = a->dh + start, *const dy = dx + a->columns;
  _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
    const real s = logistic(x[c]), d = packed_keep(at, c, da[c]);
    dx[c] = s * (1 + x[c] * (1 - s)) * y[c] * d;
    dy[c] = x[c] * s * d;
  }
}

static void activation_backward_block(void *context, int64_t task, int worker) {
  (void)worker;
  const packed_job *const job = context;
  const rpi_activation_backward_args *const a = job->args;
  switch (a->kind) {
    case RP_RELU: relu_backward_rows(job, task); break;
    case RP_GELU: packed_rows(job, task, false, gelu_backward_piece); break;
    default: packed_rows(job, task, false, swiglu_backward_piece); break;
  }
}

static rp_status activation_backward(const rpi_activation_backward_args *args) {
  packed_job job = packed_job_of(args, &args->dropout, args->rows, args->columns, args->columns);
  packed_run_all(&job, args->columns, activation_backward_block);
  if (args->dbias == NULL) return RP_OK;
  const int64_t columns = args->kind == RP_SWIGLU ? 2 * args->columns : args->columns;
  return column_sums(&(rpi_column_sums_args){.rows = args->rows,
                                             .columns = columns,
                                             .x = args->dh,
                                             .x_stride = columns,
                                             .sum = args->dbias});
}
