/* SPDX-License-Identifier: Apache-2.0
 *
 * waves.c: see waves.h.
 */
#include "model/waves.h"

#include <math.h>

#include "base/threads.h"

#define WAVE_TASK 8 /* distances of a task */

/* Some distances on their way, those from t on: to a table, or where there is none from its
 * gradient. */
typedef struct wave_job {
  const rpi_waves *w;
  int64_t t, count;
  real *table;
  const real *dtable;
} wave_job;

static real *cosines_of(const rpi_waves *w) {
  return w->some + rpi_waves_scratch(w->heads, w->head_width, w->left, w->right) / 2;
}

/* row(-t) = C_t + S_t, row(t) = C_t - S_t; NULL is a row that is not there. */
static void spread_row(int64_t width, const real *s, const real *c, real *before, real *behind) {
  for (int64_t i = 0; before && i < width; i++) before[i] = c[i] + s[i];
  for (int64_t i = 0; behind && i < width; i++) behind[i] = c[i] - s[i];
}

/* dS_t = drow(-t) - drow(t), dC_t = drow(-t) + drow(t); NULL is a row of zeros. */
static void gather_row(int64_t width, const real *before, const real *behind, real *s, real *c) {
  for (int64_t i = 0; i < width; i++) s[i] = c[i] = before ? before[i] : 0;
  for (int64_t i = 0; behind && i < width; i++) {
    s[i] -= behind[i];
    c[i] += behind[i];
  }
}

static void wave_task(void *context, int64_t task, int worker) {
  (void)worker;
  const wave_job *const job = context;
  const rpi_waves *const w = job->w;
  const int64_t width = w->head_width, HD = w->heads * width, first = task * WAVE_TASK;
  for (int64_t n = first; n < first + WAVE_TASK && n < job->count; n++) {
    const int64_t t = job->t + n;
    const bool left = t <= w->left, right = t > 0 && t <= w->right;
    for (int64_t h = 0; h < w->heads; h++) {
      real *const s = w->some + n * HD + h * width, *const c = cosines_of(w) + n * HD + h * width;
      const int64_t before = h * w->head_stride + (w->left - t) * w->row_stride;
      const int64_t behind = h * w->head_stride + (w->left + t) * w->row_stride;
      if (job->table) {
        spread_row(width, s, c, left ? job->table + before : NULL,
                   right ? job->table + behind : NULL);
      } else {
        gather_row(width, left ? job->dtable + before : NULL, right ? job->dtable + behind : NULL,
                   s, c);
      }
    }
  }
}

static void run(const rpi_waves *w, wave_job *job) {
  const int64_t tasks = rpi_divide_up(job->count, WAVE_TASK);
  const bool alone = job->count * w->heads * w->head_width < 32768; /* not worth waking threads */
  rpi_parallel_for(tasks, alone ? 1 : rpi_threads_get(), wave_task, job);
}

static int64_t distances_of(const rpi_waves *w) { return rpi_max(w->left, w->right) + 1; }

static int64_t rows_from(const rpi_waves *w, int64_t t) {
  const int64_t left = distances_of(w) - t;
  return left < RPI_WAVE_ROWS ? left : RPI_WAVE_ROWS;
}

/* ---- sinusoids that are made on the way ------------------------------------ */

static double *nearest(const rpi_waves *w, int64_t r) { return w->angles + (1 + r) * w->width; }

/* Sines and cosines of one distance, in halves. */
static void turn(const rpi_waves *w, int64_t t, double *to) {
  const int64_t half = w->width / 2;
  for (int64_t c = 0; c < half; c++) {
    to[c] = sin((double)t * w->angles[c]);
    to[half + c] = cos((double)t * w->angles[c]);
  }
}

/* sin(a + b) = sin a cos b + cos a sin b,  cos(a + b) = cos a cos b - sin a sin b. */
static void make_task(void *context, int64_t task, int worker) {
  (void)worker;
  const wave_job *const job = context;
  const rpi_waves *const w = job->w;
  const int64_t half = w->width / 2, first = task * RPI_WAVE_NEAR;
  double *const a = nearest(w, RPI_WAVE_NEAR + task);
  turn(w, job->t + first, a);
  for (int64_t r = 0; r < RPI_WAVE_NEAR && first + r < job->count; r++) {
    const double *const b = nearest(w, r);
    real *const to = w->made + (first + r) * w->width;
    for (int64_t c = 0; c < half; c++) {
      to[c] = (real)(a[c] * b[half + c] + a[half + c] * b[c]);
      to[half + c] = (real)(a[half + c] * b[half + c] - a[c] * b[c]);
    }
  }
}

static void begin_waves(const rpi_waves *w) {
  if (w->waves) return;
  const int64_t half = w->width / 2;
  for (int64_t c = 0; c < half; c++) w->angles[c] = pow(10000, -(double)c / (double)half);
  for (int64_t r = 0; r < RPI_WAVE_NEAR && r < distances_of(w); r++) turn(w, r, nearest(w, r));
}

/* R_t of the distances of a job. */
static const real *waves_at(const rpi_waves *w, wave_job *job) {
  if (w->waves) return w->waves + job->t * w->width;
  const int64_t tasks = rpi_divide_up(job->count, RPI_WAVE_NEAR);
  rpi_parallel_for(tasks, rpi_threads_get(), make_task, job);
  return w->made;
}

/* ---- forward, backward ------------------------------------------------------ */

rp_status rpi_waves_forward(const rp_ops *ops, const rpi_waves *w, const real *weight,
                            real *table) {
  const int64_t half = w->width / 2, HD = w->heads * w->head_width;
  if (HD == 0) return RP_OK;
  begin_waves(w);
  for (int64_t t = 0; t < distances_of(w); t += RPI_WAVE_ROWS) {
    wave_job job = {.w = w, .t = t, .count = rows_from(w, t), .table = table};
    const real *const waves = waves_at(w, &job);
    for (int part = 0; part < 2; part++) { /* sines, cosines */
      const rpi_gemm_args g = {.rows = job.count,
                               .columns = HD,
                               .inner = half,
                               .a = waves + part * half,
                               .a_stride = w->width,
                               .b = half == 0 ? weight : weight + part * half,
                               .b_stride = w->width,
                               .c = part == 0 ? w->some : cosines_of(w),
                               .c_stride = HD,
                               .transpose_b = true};
      RPI_TRY(ops->gemm(&g));
    }
    run(w, &job);
  }
  return RP_OK;
}

rp_status rpi_waves_backward(const rp_ops *ops, const rpi_waves *w, const real *dtable,
                             real *dweight) {
  const int64_t half = w->width / 2, HD = w->heads * w->head_width;
  if (HD == 0 || half == 0) return RP_OK;
  begin_waves(w);
  for (int64_t t = 0; t < distances_of(w); t += RPI_WAVE_ROWS) {
    wave_job job = {.w = w, .t = t, .count = rows_from(w, t), .dtable = dtable};
    const real *const waves = waves_at(w, &job);
    run(w, &job);
    for (int part = 0; part < 2; part++) {
      const rpi_gemm_args g = {.rows = HD,
                               .columns = half,
                               .inner = job.count,
                               .a = part == 0 ? w->some : cosines_of(w),
                               .a_stride = HD,
                               .b = waves + part * half,
                               .b_stride = w->width,
                               .c = dweight + part * half,
                               .c_stride = w->width,
                               .transpose_a = true,
                               .accumulate = true};
      RPI_TRY(ops->gemm(&g));
    }
  }
  return RP_OK;
}
