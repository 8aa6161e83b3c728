/* SPDX-License-Identifier: Apache-2.0
 *
 * sums.c: the sum of every column (a bias's gradient), the sum of squares (a gradient's norm),
 * whose gradient it is that makes it too large, and setting to zero.
 */
#include <math.h>
#include <string.h>

#include "base/threads.h"
#include "ops/ops.h"
#include "ops/tile.h"
#include "ops/verdict.h"

#define SUMS_COLUMNS 128  /* of a task */
#define SUMS_ROWS 64      /* added up in `real`; these sums in double */
#define SUMS_ALONE 32768  /* fewer numbers are not worth waking the pool for */
#define SUMS_ZEROS 262144 /* set by a task */

/* A task owns some columns and adds the rows in their order. */
static void column_sums_task(void *context, int64_t task, int worker) {
  (void)worker;
  const rpi_column_sums_args *const a = context;
  const int64_t column = task * SUMS_COLUMNS, columns = rpi_min(SUMS_COLUMNS, a->columns - column);
  double total[SUMS_COLUMNS] = {0};
  for (int64_t first = 0; first < a->rows; first += SUMS_ROWS) {
    const int64_t end = rpi_min(first + SUMS_ROWS, a->rows);
    real sum[SUMS_COLUMNS] = {0};
    for (int64_t row = first; row < end; row++) {
      const real *const x = a->x + row * a->x_stride + column;
      _Pragma("omp simd") for (int64_t c = 0; c < columns; c++) sum[c] += x[c];
    }
    for (int64_t c = 0; c < columns; c++) total[c] += (double)sum[c];
  }
  for (int64_t c = 0; c < columns; c++) a->sum[column + c] += (real)total[c];
}

static rp_status column_sums(const rpi_column_sums_args *args) {
  rpi_column_sums_args a = *args;
  const bool alone = a.rows < SUMS_ALONE / rpi_max(a.columns, 1);
  rpi_parallel_for(rpi_divide_up(a.columns, SUMS_COLUMNS), alone ? 1 : rpi_threads_get(),
                   column_sums_task, &a);
  return RP_OK;
}

typedef struct square_job {
  const real *x;
  int64_t count;
  double *sums; /* of the blocks */
} square_job;

static void square_sum_block(void *context, int64_t task, int worker) {
  (void)worker;
  const square_job *const job = context;
  const int64_t first = task * RPI_SQUARE_BLOCK;
  const int64_t end = rpi_min(first + RPI_SQUARE_BLOCK, job->count);
  const real *const x = job->x;
  double sum = 0;
  _Pragma("omp simd reduction(+ : sum)") for (int64_t i = first; i < end; i++) {
    sum += (double)x[i] * (double)x[i];
  }
  job->sums[task] = sum;
}

static rp_status square_sum(const real *x, int64_t count, double *workspace, double *sum) {
  square_job job = {x, count, workspace};
  const int64_t blocks = rpi_square_blocks(count);
  rpi_parallel_for(blocks, rpi_threads_get(), square_sum_block, &job);
  double total = 0;
  for (int64_t b = 0; b < blocks; b++) total += workspace[b];
  *sum = isfinite(total) ? total : (double)NAN;
  return RP_OK;
}

static rp_status blame(const rpi_blame_args *args) {
  rpi_outcome *const o = args->outcome;
  const double tokens = (double)o->losses.tokens;
  if (o->sound || o->losses.bad != 0) return RP_OK;
  for (int64_t p = args->count - 1; p >= 0 && o->bad_gradient == 0; p--) {
    double sum = 0;
    square_sum(args->gradients + args->places[2 * p], args->places[2 * p + 1], args->workspace,
               &sum);
    if (!rpi_is_sound(sum / (tokens * tokens))) o->bad_gradient = (int32_t)(p + 1);
  }
  return RP_OK;
}

typedef struct zero_job {
  real *x;
  int64_t count;
} zero_job;

static void zero_task(void *context, int64_t task, int worker) {
  (void)worker;
  const zero_job *const job = context;
  const int64_t first = task * SUMS_ZEROS;
  const int64_t count = rpi_min(SUMS_ZEROS, job->count - first);
  memset(job->x + first, 0, (size_t)count * sizeof(real));
}

static rp_status zero(real *x, int64_t count) {
  zero_job job = {x, count};
  rpi_parallel_for(rpi_divide_up(count, SUMS_ZEROS), rpi_threads_get(), zero_task, &job);
  return RP_OK;
}
