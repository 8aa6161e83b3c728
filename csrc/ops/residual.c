/* SPDX-License-Identifier: Apache-2.0
 *
 * residual.c: how a layer adds to the stream, x = base + keep(x); backward df = keep(dx). norm.c
 * begins and ends with it.
 */
#include "ops/dropout.h"

PACKED_FN void residual_piece(const void *args, packed_piece at) {
  const rpi_norm_args *const a = args;
  const int64_t start = at.row * a->columns + at.column;
  const real *const base = a->base.x + start;
  real *const x = a->x + start;
  _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
    x[c] = base[c] + packed_keep(at, c, x[c]);
  }
}

static void residual_block(void *context, int64_t task, int worker) {
  (void)worker;
  packed_rows(context, task, false, residual_piece);
}

static void residual(const rpi_norm_args *args) {
  packed_job job = packed_job_of(args, &args->dropout, args->rows, args->columns, args->columns);
  packed_run_all(&job, args->columns, residual_block);
}

PACKED_FN void residual_backward_piece(const void *args, packed_piece at) {
  const rpi_norm_backward_args *const a = args;
  const int64_t start = at.row * a->columns + at.column;
  const real *const dx = a->dx + start;
  real *const df = a->df + start;
  _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
    df[c] = packed_keep(at, c, dx[c]);
  }
}

static void residual_backward_block(void *context, int64_t task, int worker) {
  (void)worker;
  packed_rows(context, task, false, residual_backward_piece);
}

static void residual_backward(const rpi_norm_backward_args *args) {
  packed_job job = packed_job_of(args, &args->dropout, args->rows, args->columns, args->columns);
  packed_run_all(&job, args->columns, residual_backward_block);
}
