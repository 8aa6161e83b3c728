/* SPDX-License-Identifier: Apache-2.0
 *
 * cross_entropy.c: the loss of every row against its smoothed label, and its gradient in the
 * logits' place. With x the logits less the highest of them,
 *
 *   y_c = right at the label, wrong elsewhere, adding up to 1
 *   loss = log sum_c e^x_c - wrong sum_c x_c - (right - wrong) x_label
 *   gradient_c = e^x_c / sum - y_c
 *
 * A row is read from memory once: the passes after the one that finds the highest find it in the
 * second-level cache. Sums run over CROSS_PART numbers in vectors of `real`, and over the parts in
 * double.
 */
#include <assert.h>
#include <math.h>

#include "base/threads.h"
#include "ops/exp2.h"
#include "ops/highest.h"
#include "ops/ops.h"
#include "ops/tile.h"

#define CROSS_PART 1024
#define CROSS_BLOCK 65536 /* numbers in a block of rows */
#define CROSS_ALONE 8192  /* fewer are not worth waking the pool for */

typedef struct cross_job {
  const rpi_cross_entropy_args *args;
  int64_t block;
  double right, wrong;
} cross_job;

typedef struct cross_sums {
  double exponentials, distances; /* sums of e^x and of x */
} cross_sums;

/* Leaves the exponentials in the logits' place where `replace`. */
RPI_INLINE cross_sums cross_sum(real *logits, int64_t classes, real highest, const bool replace) {
  cross_sums sums = {0, 0};
  for (int64_t first = 0; first < classes; first += CROSS_PART) {
    const int64_t end = rpi_min(first + CROSS_PART, classes);
    real exponentials = 0, distances = 0;
    _Pragma("omp simd reduction(+ : exponentials, distances)") for (int64_t c = first; c < end;
                                                                    c++) {
      const real x = logits[c] - highest;
      const real e = rpi_exp2((real)RPI_LOG2_E * x);
      exponentials += e;
      distances += x;
      if (replace) logits[c] = e;
    }
    sums.exponentials += (double)exponentials;
    sums.distances += (double)distances;
  }
  return sums;
}

RPI_NOINLINE cross_sums cross_sum_keep(real *logits, int64_t classes, real highest) {
  return cross_sum(logits, classes, highest, false);
}

RPI_NOINLINE cross_sums cross_sum_replace(real *logits, int64_t classes, real highest) {
  return cross_sum(logits, classes, highest, true);
}

/* Is the label the first class with the highest logit, which passes over NaN? Without an early end
 * the loop over those before it is made of vectors. */
RPI_NOINLINE bool cross_hit(const real *logits, int64_t label, real highest) {
  if (!(logits[label] == highest)) return false;
  int32_t before = 0;
  _Pragma("omp simd reduction(+ : before)") for (int64_t c = 0; c < label; c++) {
    before += logits[c] == highest;
  }
  return before == 0;
}

static void cross_entropy_row(const cross_job *job, int64_t row) {
  const rpi_cross_entropy_args *const a = job->args;
  const int64_t classes = a->classes, label = a->labels[row];
  real *const logits = a->logits + row * a->stride;
  if (label < 0) {
    a->loss[row] = a->nll[row] = 0;
    a->hit[row] = 0;
    for (int64_t c = 0; a->gradient && c < classes; c++) logits[c] = 0;
    return;
  }
  const real highest = highest_of(logits, classes);
  const double x_label = (double)(logits[label] - highest);
  const bool hit = cross_hit(logits, label, highest);
  const cross_sums sums = a->gradient ? cross_sum_replace(logits, classes, highest)
                                      : cross_sum_keep(logits, classes, highest);
  a->hit[row] = hit && isfinite(sums.exponentials); /* as for choosing: NaN hits nothing */
  const double log_sum = log(sums.exponentials), more = job->right - job->wrong;
  double loss = log_sum;
  /* Where a class has no weight, its logit may be -infinity. */
  if (job->wrong != 0) loss -= job->wrong * sums.distances;
  if (more != 0) loss -= more * x_label;
  a->loss[row] = (real)loss;
  a->nll[row] = (real)(log_sum - x_label);
  if (!a->gradient) return;
  const real inverse = (real)(1 / sums.exponentials), wrong = (real)job->wrong;
  const real at_label = (real)((double)logits[label] / sums.exponentials - job->right);
  _Pragma("omp simd") for (int64_t c = 0; c < classes; c++) {
    logits[c] = logits[c] * inverse - wrong;
  }
  logits[label] = at_label;
}

static void cross_entropy_block(void *context, int64_t task, int worker) {
  (void)worker;
  const cross_job *const job = context;
  const int64_t first = task * job->block;
  const int64_t end = rpi_min(first + job->block, job->args->rows);
  for (int64_t row = first; row < end; row++) cross_entropy_row(job, row);
}

static rp_status cross_entropy(const rpi_cross_entropy_args *args) {
  assert(!args->rounded);
  const double classes = (double)args->classes;
  cross_job job = {.args = args, .block = rpi_max(CROSS_BLOCK / rpi_max(args->classes, 1), 1)};
  if (args->classes > 1) {
    job.wrong = args->smoothing / (args->rule == RP_SMOOTH_ALL ? classes : classes - 1);
  }
  job.right = 1 - job.wrong * (classes - 1);
  const bool alone = args->rows < CROSS_ALONE / rpi_max(args->classes, 1);
  rpi_parallel_for(rpi_divide_up(args->rows, job.block), alone ? 1 : rpi_threads_get(),
                   cross_entropy_block, &job);
  return RP_OK;
}

static rp_status losses(const rpi_losses_args *args) {
  rpi_losses own = {.tokens = 0};
  for (int64_t r = 0; r < args->rows; r++) {
    if (args->labels[r] < 0) continue;
    own.tokens++;
    own.hits += args->hit[r];
    own.loss += (double)args->loss[r];
    own.nll += (double)args->nll[r];
  }
  own.bad = isfinite(own.loss) ? 0 : rpi_max(*args->note, 1);
  *args->note = 0;
  *args->own = own;
  rpi_losses *const total = args->total;
  if (total == NULL) return RP_OK;
  total->tokens += own.tokens;
  total->hits += own.hits;
  total->loss += own.loss;
  total->nll += own.nll;
  if (total->bad == 0) total->bad = own.bad;
  return RP_OK;
}
