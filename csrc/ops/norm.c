/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.c: layer normalisation of every row,
 *
 *   xhat = (x - mean) * rstd,   y = xhat * gain + shift
 *
 * the variance by a second pass over the row, which lies in the first-level cache. Backward, with
 * g = dy * gain and means over the columns,
 *
 *   dx = dstream + rstd * (g - mean(g) - xhat * mean(g * xhat))
 *   dgain += sum over rows of dy * xhat,   dshift += sum over rows of dy
 *
 * A block of rows has sums of dgain and dshift of its own, in the workspace
 *
 *   [blocks][2][columns, rounded up to whole vectors]
 *
 * which are added in the order of the blocks. What is added to a stream before, and its gradient
 * behind, is a pass over all rows of its own (residual.c).
 */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/threads.h"
#include "ops/ops.h"
#include "ops/tile.h"

#define NORM_ALONE 16384 /* fewer numbers are not worth waking the pool for */
#define NORM_BLOCK 16384 /* numbers in a block of forward */
#define NORM_MOST 64     /* blocks of backward, of at least NORM_ROWS rows */
#define NORM_ROWS 16
#define NORM_COLUMNS 128 /* of a task that adds up the blocks */

RPI_INLINE double norm_lanes(rpi_register sums[4]) {
  const rpi_register sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double lanes[RPI_LANES];
  for (int l = 0; l < RPI_LANES; l++) lanes[l] = (double)sum[l];
  RPI_UNROLL(4) for (int half = RPI_LANES / 2; half > 0; half /= 2) {
    RPI_UNROLL(8) for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

/* The sum of x - centre, or of its squares. */
RPI_INLINE double norm_sum(const real *x, int64_t columns, real centre, const bool squared) {
  rpi_register sums[4] = {{0}};
  int64_t c = 0;
  for (; c + 4 * RPI_LANES <= columns; c += 4 * RPI_LANES) {
    RPI_UNROLL(4) for (int v = 0; v < 4; v++) {
      const rpi_register d = rpi_load(x + c + v * RPI_LANES) - centre;
      sums[v] += squared ? d * d : d;
    }
  }
  double total = 0;
  for (; c < columns; c++) {
    const real d = x[c] - centre;
    total += (double)(squared ? d * d : d);
  }
  return total + norm_lanes(sums);
}

typedef struct norm_job {
  const rpi_norm_args *args;
  int64_t block;
} norm_job;

static void norm_row(const rpi_norm_args *a, int64_t row) {
  const int64_t columns = a->columns;
  const real *const x = a->x + row * columns, *const gain = a->gain, *const shift = a->shift;
  real *const y = a->y + row * columns;
  const real mean = (real)(norm_sum(x, columns, 0, false) / (double)columns);
  const double variance = norm_sum(x, columns, mean, true) / (double)columns;
  const real rstd = (real)(1 / sqrt(variance + a->epsilon));
  if (shift != NULL) {
    _Pragma("omp simd") for (int64_t c = 0; c < columns; c++) {
      y[c] = (x[c] - mean) * rstd * gain[c] + shift[c];
    }
  } else {
    _Pragma("omp simd") for (int64_t c = 0; c < columns; c++) {
      y[c] = (x[c] - mean) * rstd * gain[c];
    }
  }
  if (a->stats != NULL) {
    a->stats[2 * row] = mean;
    a->stats[2 * row + 1] = rstd;
  }
}

static void norm_block(void *context, int64_t task, int worker) {
  (void)worker;
  const norm_job *const job = context;
  const int64_t first = task * job->block;
  const int64_t end = rpi_min(first + job->block, job->args->rows);
  for (int64_t row = first; row < end; row++) norm_row(job->args, row);
}

static rp_status norm(const rpi_norm_args *args) {
  if (args->columns == 0) return RP_OK;
  assert(args->base.stats == NULL);
  if (args->base.x != NULL) residual(args);
  norm_job job = {.args = args, .block = rpi_max(NORM_BLOCK / args->columns, 1)};
  const bool alone = args->rows < NORM_ALONE / args->columns;
  rpi_parallel_for(rpi_divide_up(args->rows, job.block), alone ? 1 : rpi_threads_get(), norm_block,
                   &job);
  return RP_OK;
}

/* ---- backward ----------------------------------------------------------------- */

typedef struct norm_backward_job {
  const rpi_norm_backward_args *args;
  int64_t block, blocks;
  int64_t stride;
} norm_backward_job;

/* The sums of g and of g * xhat. */
RPI_INLINE void norm_backward_sums(const real *x, const real *dy, const real *gain, int64_t columns,
                                   real mean, real rstd, double sums[2]) {
  rpi_register plain[4] = {{0}}, weighted[4] = {{0}};
  int64_t c = 0;
  for (; c + 4 * RPI_LANES <= columns; c += 4 * RPI_LANES) {
    RPI_UNROLL(4) for (int v = 0; v < 4; v++) {
      const int64_t at = c + v * RPI_LANES;
      const rpi_register g = rpi_load(dy + at) * rpi_load(gain + at);
      plain[v] += g;
      weighted[v] += g * ((rpi_load(x + at) - mean) * rstd);
    }
  }
  sums[0] = sums[1] = 0;
  for (; c < columns; c++) {
    const real g = dy[c] * gain[c];
    sums[0] += (double)g;
    sums[1] += (double)(g * ((x[c] - mean) * rstd));
  }
  sums[0] += norm_lanes(plain);
  sums[1] += norm_lanes(weighted);
}

static void norm_backward_row(const rpi_norm_backward_args *a, int64_t row, real *dgain,
                              real *dshift) {
  const int64_t columns = a->columns;
  const real *const x = a->x + row * columns, *const dy = a->dy + row * columns;
  const real *const dstream = a->dstream != NULL ? a->dstream + row * columns : NULL;
  const real *const gain = a->gain;
  const real mean = a->stats[2 * row], rstd = a->stats[2 * row + 1];
  real *const dx = a->dx + row * columns;
  double sums[2];
  norm_backward_sums(x, dy, gain, columns, mean, rstd, sums);
  const real mean_g = (real)(sums[0] / (double)columns);
  const real mean_gx = (real)(sums[1] / (double)columns);
  /* Each number is read before its place is written: dx may be dy or dstream. */
  if (dstream != NULL) {
    _Pragma("omp simd") for (int64_t c = 0; c < columns; c++) {
      const real d = dy[c], xhat = (x[c] - mean) * rstd;
      dgain[c] += d * xhat;
      dshift[c] += d;
      dx[c] = dstream[c] + rstd * (d * gain[c] - mean_g - xhat * mean_gx);
    }
  } else {
    _Pragma("omp simd") for (int64_t c = 0; c < columns; c++) {
      const real d = dy[c], xhat = (x[c] - mean) * rstd;
      dgain[c] += d * xhat;
      dshift[c] += d;
      dx[c] = rstd * (d * gain[c] - mean_g - xhat * mean_gx);
    }
  }
}

static void norm_backward_block(void *context, int64_t task, int worker) {
  (void)worker;
  const norm_backward_job *const job = context;
  const int64_t first = task * job->block;
  const int64_t end = rpi_min(first + job->block, job->args->rows);
  real *const dgain = (real *)job->args->workspace + task * 2 * job->stride;
  real *const dshift = dgain + job->stride;
  memset(dgain, 0, (size_t)(2 * job->stride) * sizeof(real));
  for (int64_t row = first; row < end; row++) norm_backward_row(job->args, row, dgain, dshift);
}

/* Adds the blocks' sums of some columns to the gradients. */
static void norm_backward_columns(void *context, int64_t task, int worker) {
  (void)worker;
  const norm_backward_job *const job = context;
  const rpi_norm_backward_args *const a = job->args;
  const int64_t first = task * NORM_COLUMNS, columns = rpi_min(NORM_COLUMNS, a->columns - first);
  for (int which = 0; which < 2; which++) {
    real *const to = which == 0 ? a->dgain : a->dshift;
    if (to == NULL) continue;
    double sum[NORM_COLUMNS] = {0};
    const real *from = (const real *)a->workspace + which * job->stride + first;
    for (int64_t b = 0; b < job->blocks; b++, from += 2 * job->stride) {
      _Pragma("omp simd") for (int64_t c = 0; c < columns; c++) sum[c] += (double)from[c];
    }
    for (int64_t c = 0; c < columns; c++) to[first + c] += (real)sum[c];
  }
}

static rp_status norm_backward(const rpi_norm_backward_args *args, int64_t *bytes) {
  norm_backward_job job = {.args = args};
  job.block = rpi_max(rpi_divide_up(args->rows, NORM_MOST), NORM_ROWS);
  job.blocks = rpi_divide_up(args->rows, job.block);
  job.stride = rpi_round_up(args->columns, RPI_LANES);
  /* Fewer rows may make more blocks (2,047 rows 64, 2,054 rows 63), so what is asked for is what
   * no fewer rows exceed. */
  const int64_t most = rpi_min(rpi_divide_up(args->rows, NORM_ROWS), NORM_MOST);
  const int64_t needed = most * 2 * job.stride * RPI_REAL_BYTES;
  if (bytes != NULL) {
    *bytes = needed;
    return RP_OK;
  }
  assert(args->workspace_bytes >= needed);
  if (args->columns == 0) return RP_OK;
  const int workers = args->rows < NORM_ALONE / args->columns ? 1 : rpi_threads_get();
  rpi_parallel_for(job.blocks, workers, norm_backward_block, &job);
  rpi_parallel_for(rpi_divide_up(args->columns, NORM_COLUMNS), workers, norm_backward_columns,
                   &job);
  if (args->df != NULL) residual_backward(args);
  if (args->dbias == NULL) return RP_OK;
  return column_sums(&(rpi_column_sums_args){.rows = args->rows,
                                             .columns = args->columns,
                                             .x = args->df != NULL ? args->df : args->dx,
                                             .x_stride = args->columns,
                                             .sum = args->dbias});
}
