/* SPDX-License-Identifier: Apache-2.0
 *
 * choose.c: the likeliest classes of every row, and the mean of several models' probabilities.
 *
 * Of a row of logits x with the highest h,
 *
 *   log p_c = (x_c - h) / temperature - log sum_i e^((x_i - h) / temperature)
 *
 * The chosen are kept in a heap whose first is the one furthest behind, in the place of the result
 * itself. A block of classes is looked at one by one only where its highest is ahead of that first:
 * after some thousands of classes hardly any block is. Classes are met in rising order, so that the
 * first of equals is never replaced. Where all are asked for they are put in order by parts. Sums
 * run over CHOOSE_PART numbers in vectors of `real`, and over the parts in double.
 */
#include <math.h>

#include "base/threads.h"
#include "ops/exp2.h"
#include "ops/highest.h"
#include "ops/ops.h"
#include "ops/tile.h"

#define CHOOSE_PART 1024
#define CHOOSE_LOOK 256   /* classes whose highest is compared with the heap */
#define CHOOSE_FEW 16     /* entries that are put in order one by one */
#define CHOOSE_BLOCK 8192 /* numbers in a block of rows */
#define CHOOSE_ALONE 8192 /* fewer are not worth waking the pool for */

static int64_t choose_rows_of(int64_t classes) {
  return rpi_max(CHOOSE_BLOCK / rpi_max(classes, 1), 1);
}

static void choose_run(int64_t rows, int64_t classes, rpi_task task, void *context) {
  const int64_t block = choose_rows_of(classes);
  const bool alone = rows < CHOOSE_ALONE / rpi_max(classes, 1);
  rpi_parallel_for(rpi_divide_up(rows, block), alone ? 1 : rpi_threads_get(), task, context);
}

/* sum_c 2^(factor (x_c - highest)) */
RPI_NOINLINE double choose_sum(const real *x, int64_t classes, real highest, real factor) {
  double sum = 0;
  for (int64_t first = 0; first < classes; first += CHOOSE_PART) {
    const int64_t end = rpi_min(first + CHOOSE_PART, classes);
    real part = 0;
    _Pragma("omp simd reduction(+ : part)") for (int64_t c = first; c < end; c++) {
      part += rpi_exp2(factor * (x[c] - highest));
    }
    sum += (double)part;
  }
  return sum;
}

/* ---- the likeliest --------------------------------------------------------- */

/* A heap of (logit, class); logits are kept where log-probabilities will be. */
typedef struct choose_heap {
  double *logits;
  int32_t *tokens;
} choose_heap;

/* The entry (logit, token) takes the first place, and sinks to where it belongs. */
static void choose_sink(choose_heap h, int64_t count, double logit, int32_t token) {
  int64_t at = 0;
  for (;;) {
    int64_t child = 2 * at + 1;
    if (child >= count) break;
    const int64_t other = child + 1;
    if (other < count &&
        (h.logits[other] < h.logits[child] ||
         (h.logits[other] == h.logits[child] && h.tokens[other] > h.tokens[child])))
      child = other;
    if (logit < h.logits[child] || (logit == h.logits[child] && token > h.tokens[child])) break;
    h.logits[at] = h.logits[child];
    h.tokens[at] = h.tokens[child];
    at = child;
  }
  h.logits[at] = logit;
  h.tokens[at] = token;
}

/* ---- in order -------------------------------------------------------------- */

RPI_INLINE bool choose_before(double logit, int32_t token, double other, int32_t other_token) {
  return logit > other || (logit == other && token < other_token);
}

/* Falling order, the lower class of equals first; no two entries may be equal. Those before one of
 * them and those behind it are ordered by themselves, the fewer first, so that calls do not pile
 * up: a third of the time of a heap. Which one looks like chance, so that no order that occurs is a
 * bad one. All are written where they may belong, and what says whether they do moves a place: a
 * processor that had to guess would be wrong every other time. */
static void choose_order(choose_heap h, int64_t count) {
  while (count > CHOOSE_FEW) {
    const uint64_t chance = (uint64_t)count * 0x9E3779B97F4A7C15u >> 32;
    const int64_t chosen = (int64_t)(chance % (uint64_t)count);
    const double logit = h.logits[chosen];
    const int32_t token = h.tokens[chosen];
    h.logits[chosen] = h.logits[0];
    h.tokens[chosen] = h.tokens[0];
    int64_t before = 0; /* entries from 1 on that are before the chosen one */
    for (int64_t i = 1; i < count; i++) {
      const double own = h.logits[i];
      const int32_t own_token = h.tokens[i];
      h.logits[i] = h.logits[before + 1];
      h.tokens[i] = h.tokens[before + 1];
      h.logits[before + 1] = own;
      h.tokens[before + 1] = own_token;
      before += (own > logit) | ((own == logit) & (own_token < token));
    }
    h.logits[0] = h.logits[before];
    h.tokens[0] = h.tokens[before];
    h.logits[before] = logit;
    h.tokens[before] = token;
    const int64_t behind = count - before - 1;
    const choose_heap rest = {h.logits + before + 1, h.tokens + before + 1};
    if (before < behind) {
      choose_order(h, before);
      h = rest;
      count = behind;
    } else {
      choose_order(rest, behind);
      count = before;
    }
  }
  for (int64_t i = 1; i < count; i++) {
    const double logit = h.logits[i];
    const int32_t token = h.tokens[i];
    int64_t at = i;
    for (; at > 0 && choose_before(logit, token, h.logits[at - 1], h.tokens[at - 1]); at--) {
      h.logits[at] = h.logits[at - 1];
      h.tokens[at] = h.tokens[at - 1];
    }
    h.logits[at] = logit;
    h.tokens[at] = token;
  }
}

/* Every class that has a probability. */
static void choose_all(const real *x, int64_t classes, choose_heap to) {
  int64_t count = 0;
  for (int64_t c = 0; c < classes; c++) {
    if (!(x[c] > (real)-INFINITY)) continue;
    to.logits[count] = (double)x[c];
    to.tokens[count++] = (int32_t)c;
  }
  choose_order(to, count);
}

static void choose_some(const real *x, int64_t classes, choose_heap to, int64_t most) {
  for (int64_t first = 0; first < classes && most > 0; first += CHOOSE_LOOK) {
    const int64_t end = rpi_min(first + CHOOSE_LOOK, classes);
    if (!((double)highest_of(x + first, end - first) > to.logits[0])) continue;
    for (int64_t c = first; c < end; c++) {
      if ((double)x[c] > to.logits[0]) choose_sink(to, most, (double)x[c], (int32_t)c);
    }
  }
  int64_t count = 0; /* fewer than `most` where no more have a probability */
  for (int64_t i = 0; i < most; i++) {
    const double logit = to.logits[i];
    const int32_t token = to.tokens[i];
    if (token < 0) continue;
    to.logits[i] = -INFINITY;
    to.tokens[i] = -1;
    to.logits[count] = logit;
    to.tokens[count++] = token;
  }
  choose_order(to, count);
}

static void choose_row(const rpi_choose_args *a, int64_t row) {
  real *const x = a->logits + row * a->stride;
  const choose_heap heap = {a->log_probabilities + row * a->most, a->tokens + row * a->most};
  const double inverse = 1 / a->temperature;
  /* A factor beyond 2^64 is no different from infinity, and 0 times it stays 0; one below 2^-126 is
   * no different from 0, and times -infinity, what is banned, stays that. */
  const real factor = (real)fmax(fmin(RPI_LOG2_E * inverse, 0x1p64), 0x1p-126);
  const real highest = highest_of(x, a->classes);
  const double sum = choose_sum(x, a->classes, highest, factor);
  for (int64_t i = 0; i < a->most; i++) {
    heap.logits[i] = isfinite(sum) ? -INFINITY : NAN;
    heap.tokens[i] = -1;
  }
  if (a->left) a->left[row] = isfinite(sum) ? 1 : NAN;
  if (!isfinite(sum)) return;
  const int64_t banned = a->banned_offsets ? a->banned_offsets[row] : 0;
  const int64_t banned_end = a->banned_offsets ? a->banned_offsets[row + 1] : 0;
  for (int64_t i = banned; i < banned_end; i++) x[a->banned[i]] = (real)-INFINITY;
  if (a->left && banned < banned_end) {
    a->left[row] = choose_sum(x, a->classes, highest, factor) / sum;
  }
  if (a->most == a->classes) choose_all(x, a->classes, heap);
  else choose_some(x, a->classes, heap, a->most);
  const double log_sum = log(sum);
  for (int64_t i = 0; i < a->most && heap.tokens[i] >= 0; i++) {
    const double log_p = (heap.logits[i] - (double)highest) * inverse - log_sum;
    heap.logits[i] = log_p < 0 ? log_p : 0;
  }
}

static void choose_block(void *context, int64_t task, int worker) {
  (void)worker;
  const rpi_choose_args *const a = context;
  const int64_t block = choose_rows_of(a->classes);
  const int64_t end = rpi_min((task + 1) * block, a->rows);
  for (int64_t row = task * block; row < end; row++) choose_row(a, row);
}

static rp_status choose(const rpi_choose_args *args) {
  rpi_choose_args own = *args;
  choose_run(own.rows, own.classes, choose_block, &own);
  return RP_OK;
}

/* ---- the mean of several models -------------------------------------------- */

#ifdef RP_REAL_IS_DOUBLE

RPI_INLINE real mix_log(real x) { return log(x); }

#else

/* log of x from 1 to 2, in plain C that vectorises. x = 2^n m with m from sqrt(1/2) to sqrt(2), log
 * m by its series in (m - 1) / (m + 1). */
RPI_INLINE real mix_log(real x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int32_t n = (int32_t)(bits - 0x3F3504F3u) >> 23;
  bits -= (uint32_t)n << 23;
  float m;
  memcpy(&m, &bits, sizeof m);
  const float s = (m - 1) / (m + 1), ss = s * s;
  float series = 0.2222222222f;
  series = series * ss + 0.2857142857f;
  series = series * ss + 0.4f;
  series = series * ss + 0.6666666667f;
  const float value = series * ss * s + 2 * s + (float)RPI_LN2 * (float)n;
  return x == x ? value : x;
}

#endif

/* log(e^a + e^b). What neither has stays -infinity, NaN stays. */
RPI_INLINE real mix_add(real a, real b) {
  const real most = a > b ? a : b, least = a > b ? b : a;
  const real apart = a == b ? 0 : least - most;
  return most + mix_log(1 + rpi_exp2((real)RPI_LOG2_E * apart));
}

/* In logarithms: a probability that a float cannot hold would be lost, and may be all that is left
 * where what is more likely is banned. */
static void mix_row(const rpi_mix_args *a, int64_t row) {
  const real *const x = a->logits + row * a->stride;
  real *const to = a->mean + row * a->mean_stride;
  const real factor = (real)RPI_LOG2_E, highest = highest_of(x, a->classes);
  const real log_share = (real)log(a->share / choose_sum(x, a->classes, highest, factor));
  if (a->first) {
    _Pragma("omp simd") for (int64_t c = 0; c < a->classes; c++) {
      to[c] = x[c] - highest + log_share;
    }
  } else {
    _Pragma("omp simd") for (int64_t c = 0; c < a->classes; c++) {
      to[c] = mix_add(to[c], x[c] - highest + log_share);
    }
  }
}

static void mix_block(void *context, int64_t task, int worker) {
  (void)worker;
  const rpi_mix_args *const a = context;
  const int64_t block = choose_rows_of(a->classes);
  const int64_t end = rpi_min((task + 1) * block, a->rows);
  for (int64_t row = task * block; row < end; row++) mix_row(a, row);
}

static rp_status mix(const rpi_mix_args *args) {
  rpi_mix_args own = *args;
  choose_run(own.rows, own.classes, mix_block, &own);
  return RP_OK;
}
