/* SPDX-License-Identifier: Apache-2.0
 *
 * residual.c: out = x + keep(f), how a layer adds to the stream; backward df = keep(dout).
 */
#include <string.h>

#include "ops/dropout.h"

PACKED_FN void residual_piece(const void *args, packed_piece at) {
  const rpi_residual_args *const a = args;
  const int64_t start = at.row * a->columns + at.column;
  const real *const x = a->x + start, *const f = a->f + start;
  real *const out = a->out + start;
  _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
    out[c] = x[c] + packed_keep(at, c, f[c]);
  }
}

static void residual_block(void *context, int64_t task, int worker) {
  (void)worker;
  packed_rows(context, task, false, residual_piece);
}

static rp_status residual(const rpi_residual_args *args) {
  packed_job job = packed_job_of(args, &args->dropout, args->rows, args->columns, args->columns);
  packed_run_all(&job, args->columns, residual_block);
  return RP_OK;
}

PACKED_FN void residual_backward_piece(const void *args, packed_piece at) {
  const rpi_residual_backward_args *const a = args;
  const int64_t start = at.row * a->columns + at.column;
  const real *const dout = a->dout + start;
  real *const df = a->df + start;
  _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
    df[c] = packed_keep(at, c, dout[c]);
  }
}

static void residual_backward_block(void *context, int64_t task, int worker) {
  (void)worker;
  packed_rows(context, task, false, residual_backward_piece);
}

static rp_status residual_backward(const rpi_residual_backward_args *args) {
  packed_job job = packed_job_of(args, &args->dropout, args->rows, args->columns, args->columns);
  if (job.d.threshold == 0 && args->df == args->dout) return RP_OK;
  packed_run_all(&job, args->columns, residual_backward_block);
  return RP_OK;
}
