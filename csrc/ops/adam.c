/* SPDX-License-Identifier: Apache-2.0
 *
 * adam.c: one step of Adam, in one pass over weights, gradient, both moments and the average. It
 * waits for memory: 32 bytes a number are read and written, 40 with the average.
 */
#include <math.h>
#include <string.h>

#include "base/threads.h"
#include "ops/ops.h"
#include "ops/tile.h"

#define ADAM_BLOCK 16384

/* The constants of a step, each of them rounded once. */
typedef struct adam_job {
  const rpi_adam_args *args;
  real scale, beta1, rest1, beta2, rest2, correction1, correction2;
  real rate, epsilon, decay, rest;
} adam_job;

RPI_INLINE real adam_sqrt(real x) {
#ifdef RP_REAL_IS_DOUBLE
  return sqrt(x);
#else
  return sqrtf(x);
#endif
}

RPI_INLINE void adam_numbers(const adam_job *job, int64_t first, int64_t end, const bool average) {
  const adam_job j = *job;
  real *const weights = j.args->weights, *const gradient = j.args->gradient;
  real *const moment1 = j.args->moment1, *const moment2 = j.args->moment2;
  real *const averages = j.args->average;
  _Pragma("omp simd") for (int64_t i = first; i < end; i++) {
    const real g = j.scale * gradient[i];
    const real m = j.beta1 * moment1[i] + j.rest1 * g;
    const real v = j.beta2 * moment2[i] + j.rest2 * (g * g);
    const real step = m * j.correction1 / (adam_sqrt(v * j.correction2) + j.epsilon);
    const real w = weights[i] - j.rate * (step + j.decay * weights[i]);
    weights[i] = w;
    gradient[i] = 0;
    moment1[i] = m;
    moment2[i] = v;
    if (average) averages[i] += j.rest * (w - averages[i]);
  }
}

static void adam_block(void *context, int64_t task, int worker) {
  (void)worker;
  const adam_job *const job = context;
  const int64_t first = task * ADAM_BLOCK;
  const int64_t end = rpi_min(first + ADAM_BLOCK, job->args->count);
  if (job->args->average != NULL) adam_numbers(job, first, end, true);
  else adam_numbers(job, first, end, false);
}

static void adam_rest(void *context, int64_t task, int worker) {
  (void)worker;
  const adam_job *const job = context;
  const int64_t first = task * ADAM_BLOCK, left = job->args->count - first;
  memset(job->args->gradient + first, 0, (size_t)rpi_min(ADAM_BLOCK, left) * sizeof(real));
}

static rp_status adam(const rpi_adam_args *args) {
  const rpi_outcome *const o = args->outcome;
  adam_job job = {.args = args,
                  .scale = (real)o->scale,
                  .beta1 = (real)args->beta1,
                  .rest1 = (real)(1 - args->beta1),
                  .beta2 = (real)args->beta2,
                  .rest2 = (real)(1 - args->beta2),
                  .correction1 = (real)o->correction1,
                  .correction2 = (real)o->correction2,
                  .rate = (real)o->rate,
                  .epsilon = (real)args->epsilon,
                  .decay = (real)args->decay,
                  .rest = (real)(1 - args->ema)};
  rpi_parallel_for(rpi_divide_up(args->count, ADAM_BLOCK), rpi_threads_get(),
                   o->moves ? adam_block : adam_rest, &job);
  return RP_OK;
}
