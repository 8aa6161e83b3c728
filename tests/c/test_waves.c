/* SPDX-License-Identifier: Apache-2.0
 *
 * test_waves.c: projected sinusoids and the way back (model/waves.c, rp_wave_table in
 * api_rotate.c).
 *
 * Each number is held against the formula, row by row in long double. A row is two sums of
 * width / 2 products and their sum or difference; a gradient a sum over all distances, of what two
 * rows give: so many roundings of the sum of the magnitudes are allowed, and no more.
 */
#define _POSIX_C_SOURCE 200809L

#include "model/waves.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "faults.h"
#include "layer.h"

typedef struct sides {
  int64_t left, right, H, D, width;
} sides;

static const sides cases[] = {{0, 0, 1, 1, 2},     {5, 0, 2, 3, 6},     {0, 4, 2, 3, 6},
                              {7, 3, 3, 5, 8},     {3, 7, 3, 5, 7},     {2, 2, 1, 4, 1},
                              {300, 0, 2, 8, 6},   {40, 290, 2, 8, 6},  {511, 511, 4, 16, 64},
                              {1100, 30, 1, 4, 6}, {900, 2060, 2, 3, 4}};
enum { CASES = sizeof cases / sizeof cases[0] };

static int64_t rows_of(const sides *s) { return s->left + 1 + s->right; }
static int64_t most_of(const sides *s) { return s->left > s->right ? s->left : s->right; }

typedef struct trial {
  sides s;
  real *waves, *weight, *table, *dtable, *dweight, *some;
} trial;

static real *numbers(int64_t count) {
  real *const made = rpi_allocate((size_t)(count + 1) * sizeof *made);
  if (made == NULL) abort();
  for (int64_t i = 0; i < count; i++) made[i] = number();
  return made;
}

static trial open_trial(const sides *s) {
  const int64_t HD = s->H * s->D;
  return (trial){.s = *s,
                 .waves = numbers((most_of(s) + 1) * s->width),
                 .weight = numbers(HD * s->width),
                 .table = numbers(HD * rows_of(s)),
                 .dtable = numbers(HD * rows_of(s)),
                 .dweight = numbers(HD * s->width),
                 .some = numbers(rpi_waves_scratch(s->H, s->D, s->left, s->right))};
}

static void release(trial *t) {
  real *const all[] = {t->waves, t->weight, t->table, t->dtable, t->dweight, t->some};
  for (int i = 0; i < 6; i++) rpi_release(all[i]);
}

static rpi_waves waves_of(const trial *t) {
  return (rpi_waves){.left = t->s.left,
                     .right = t->s.right,
                     .heads = t->s.H,
                     .head_width = t->s.D,
                     .width = t->s.width,
                     .waves = t->waves,
                     .head_stride = rows_of(&t->s) * t->s.D,
                     .row_stride = t->s.D,
                     .some = t->some};
}

/* Column c of R_t: sines change their sign with t, of an odd width the last column is nothing. */
static long double wave(const trial *t, int64_t distance, int64_t c) {
  const int64_t half = t->s.width / 2, row = distance < 0 ? -distance : distance;
  if (c >= 2 * half) return 0;
  const long double x = t->waves[row * t->s.width + c];
  return c < half && distance < 0 ? -x : x;
}

static void check_table(const trial *t, const real *table) {
  const sides *const s = &t->s;
  for (int64_t h = 0; h < s->H; h++) {
    for (int64_t row = 0; row < rows_of(s); row++) {
      for (int64_t i = 0; i < s->D; i++) {
        long double sum = 0, size = 0;
        for (int64_t c = 0; c < s->width; c++) {
          const long double term =
              wave(t, s->left - row, c) * t->weight[(h * s->D + i) * s->width + c];
          sum += term;
          size += fabsl(term);
        }
        const long double off = fabsl(table[(h * rows_of(s) + row) * s->D + i] - sum);
        CHECK(off <= (long double)(s->width / 2 + 1) * UNIT * size);
      }
    }
  }
}

static void check_gradient(const trial *t, const real *before, const real *dweight) {
  const sides *const s = &t->s;
  for (int64_t at = 0; at < s->H * s->D; at++) {
    const real *const from = t->dtable + at / s->D * rows_of(s) * s->D + at % s->D;
    for (int64_t c = 0; c < s->width; c++) {
      long double sum = before[at * s->width + c], size = fabsl(sum);
      for (int64_t row = 0; row < rows_of(s); row++) {
        const long double term = wave(t, s->left - row, c) * from[row * s->D];
        sum += term;
        size += fabsl(term);
      }
      const long double off = fabsl(dweight[at * s->width + c] - sum);
      CHECK(off <= (long double)(most_of(s) + 4) * UNIT * size);
    }
  }
}

static void test_formula(const rp_ops *ops) {
  for (int i = 0; i < CASES; i++) {
    trial t = open_trial(&cases[i]);
    const int64_t count = t.s.H * t.s.D * t.s.width;
    const rpi_waves w = waves_of(&t);
    CHECK_INT(rpi_waves_forward(ops, &w, t.weight, t.table), RP_OK);
    check_table(&t, t.table);
    real *const before = numbers(count);
    memcpy(before, t.dweight, (size_t)count * sizeof *before);
    CHECK_INT(rpi_waves_backward(ops, &w, t.dtable, t.dweight), RP_OK);
    check_gradient(&t, before, t.dweight);
    rpi_release(before);
    release(&t);
  }
}

/* Rows that fall: the table of the sinusoids of -t. */
static void test_mirrored(const rp_ops *ops) {
  trial t = open_trial(&cases[3]);
  const sides *const s = &t.s;
  rpi_waves w = waves_of(&t);
  CHECK_INT(rpi_waves_forward(ops, &w, t.weight, t.table), RP_OK);
  real *const mirrored = numbers(s->H * rows_of(s) * s->D);
  w.row_stride = -s->D;
  CHECK_INT(rpi_waves_forward(ops, &w, t.weight, mirrored + (rows_of(s) - 1) * s->D), RP_OK);
  for (int64_t h = 0; h < s->H; h++) {
    for (int64_t row = 0; row < rows_of(s); row++) {
      const real *const one = t.table + (h * rows_of(s) + row) * s->D;
      const real *const other = mirrored + (h * rows_of(s) + rows_of(s) - 1 - row) * s->D;
      CHECK(memcmp(one, other, (size_t)s->D * sizeof *one) == 0);
    }
  }
  rpi_release(mirrored);
  release(&t);
}

/* The same bits whatever the threads. */
static void test_threads(const rp_ops *ops) {
  trial t = open_trial(&cases[CASES - 1]);
  const int64_t HD = t.s.H * t.s.D, table = HD * rows_of(&t.s), weight = HD * t.s.width;
  const rpi_waves w = waves_of(&t);
  real *const first = numbers(table), *const gradient = numbers(weight);
  static const int threads[] = {1, 2, 3, 8};
  for (int i = 0; i < 4; i++) {
    CHECK_INT(rp_set_threads(threads[i]), RP_OK);
    memset(t.dweight, 0, (size_t)weight * sizeof *t.dweight);
    CHECK_INT(rpi_waves_forward(ops, &w, t.weight, t.table), RP_OK);
    CHECK_INT(rpi_waves_backward(ops, &w, t.dtable, t.dweight), RP_OK);
    if (i == 0) {
      memcpy(first, t.table, (size_t)table * sizeof *first);
      memcpy(gradient, t.dweight, (size_t)weight * sizeof *gradient);
    }
    CHECK(memcmp(first, t.table, (size_t)table * sizeof *first) == 0);
    CHECK(memcmp(gradient, t.dweight, (size_t)weight * sizeof *gradient) == 0);
  }
  CHECK_INT(rp_set_threads(0), RP_OK);
  rpi_release(first);
  rpi_release(gradient);
  release(&t);
}

/* Not fmax(worst, fabs(...)): gcc 12 for AArch64 stops with an error of its own on that loop. */
static double farther(double worst, real one, real other) {
  const double apart = fabs((double)one - (double)other);
  return apart <= worst ? worst : apart;
}

static double farthest_apart(const real *one, const real *other, int64_t count) {
  double worst = 0;
  for (int64_t i = 0; i < count; i++) worst = farther(worst, one[i], other[i]);
  return worst;
}

/* Sinusoids that are made on the way are those of rp_sinusoid, but for a rounding of theirs and of
 * the angle, at the ends of every run of distances too. Numbers are below 4. */
static void test_made(void) {
  for (int i = 0; i < CASES; i++) {
    trial t = open_trial(&cases[i]);
    const sides *const s = &t.s;
    const int64_t HD = s->H * s->D, pairs = s->width / 2;
    const double wave = 8 * (double)UNIT + (double)most_of(s) * 4e-16;
    double *const frequencies = rpi_allocate((size_t)(pairs + 1) * sizeof *frequencies);
    real *const table = numbers(HD * rows_of(s)), *const dweight = numbers(HD * s->width);
    memcpy(dweight, t.dweight, (size_t)(HD * s->width) * sizeof *dweight);
    CHECK_INT(rp_frequencies(pairs, 10000, RP_FREQUENCIES_OPEN, frequencies), RP_OK);
    CHECK_INT(rp_sinusoid(most_of(s) + 1, s->width, 0, 0, frequencies, t.waves), RP_OK);
    for (int made = 0; made < 2; made++) {
      const real *const waves = made ? NULL : t.waves;
      CHECK_INT(rp_wave_table(s->H, s->D, s->width, s->left, s->right, waves, t.weight,
                              made ? table : t.table),
                RP_OK);
      CHECK_INT(rp_wave_gradient(s->H, s->D, s->width, s->left, s->right, waves, t.dtable,
                                 made ? dweight : t.dweight),
                RP_OK);
    }
    CHECK(farthest_apart(table, t.table, HD * rows_of(s)) <= 4 * (double)s->width * wave);
    CHECK(farthest_apart(dweight, t.dweight, HD * s->width) <= 4 * (double)rows_of(s) * wave);
    rpi_release(table);
    rpi_release(dweight);
    rpi_release(frequencies);
    release(&t);
  }
}

/* One weight of 1 shows the sinusoids themselves, at distances far out. */
static void test_made_far(void) {
  enum { WIDTH = 6, FAR = 200000 };
  double frequencies[WIDTH / 2];
  real weight[WIDTH] = {0};
  real *const table = numbers(FAR + 1), *const waves = numbers((FAR + 1) * WIDTH);
  CHECK_INT(rp_frequencies(WIDTH / 2, 10000, RP_FREQUENCIES_OPEN, frequencies), RP_OK);
  CHECK_INT(rp_sinusoid(FAR + 1, WIDTH, 0, 0, frequencies, waves), RP_OK);
  for (int c = 0; c < WIDTH; c++) {
    memset(weight, 0, sizeof weight);
    weight[c] = 1;
    CHECK_INT(rp_wave_table(1, 1, WIDTH, FAR, 0, NULL, weight, table), RP_OK);
    double worst = 0;
    for (int64_t t = 0; t <= FAR; t++) {
      worst = farther(worst, table[FAR - t], waves[t * WIDTH + c]);
    }
    CHECK(worst <= 2 * (double)UNIT + 1e-10); /* the angle's own rounding: 2e5 x 2^-53 */
  }
  rpi_release(table);
  rpi_release(waves);
}

/* ---- the public functions -------------------------------------------------------------- */

static void *refuse(void *context, size_t bytes) {
  (void)context;
  (void)bytes;
  return NULL;
}
static void keep(void *context, void *block) {
  (void)context;
  (void)block;
}

static void test_public(void) {
  trial t = open_trial(&cases[4]);
  const sides *const s = &t.s;
  const int64_t count = s->H * s->D * s->width;
  CHECK_INT(rp_wave_table(s->H, s->D, s->width, s->left, s->right, t.waves, t.weight, t.table),
            RP_OK);
  check_table(&t, t.table);
  real *const before = numbers(count);
  memcpy(before, t.dweight, (size_t)count * sizeof *before);
  CHECK_INT(rp_wave_gradient(s->H, s->D, s->width, s->left, s->right, t.waves, t.dtable, t.dweight),
            RP_OK);
  check_gradient(&t, before, t.dweight);

  CHECK_INT(rp_wave_table(0, 3, 2, 1, 1, t.waves, NULL, NULL), RP_OK);
  const int64_t most = INT64_C(1) << 40;
  CHECK_INT(rp_wave_table(0, most, 4, most, most, NULL, NULL, NULL), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "overflow");
  CHECK_INT(rp_wave_table(1, 3, -1, 1, 1, t.waves, t.weight, t.table), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "width=-1");
  CHECK_INT(rp_wave_table(1, 3, 2, 1, -2, t.waves, t.weight, t.table), RP_ERROR_SHAPE);
  const int64_t far = INT64_C(1) << 40;
  CHECK_INT(rp_wave_table(far, far, 2, 1, 1, t.waves, t.weight, t.table), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "overflow");
  CHECK_INT(rp_wave_table(1, 3, 2, 1, 1, t.waves, NULL, t.table), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_wave_table(1, 3, 2, 1, 1, t.waves, t.weight, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_wave_gradient(1, 3, 2, 1, 1, t.waves, NULL, t.dweight), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_wave_gradient(1, 3, 2, 1, 1, t.waves, t.dtable, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_wave_table(1, 3, 2, 1, 1, t.waves, t.table + 8, t.table), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "wave table: table shares memory with weight; give it an array");
  CHECK_INT(rp_wave_table(1, 3, 2, 1, 1, t.table, t.weight, t.table), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "wave table: table shares memory with waves");
  CHECK_INT(rp_wave_gradient(1, 3, 2, 1, 1, t.waves, t.dweight, t.dweight), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "wave table: dweight shares memory with dtable");
  CHECK_INT(rp_wave_gradient(1, 3, 2, 1, 1, t.dweight + 5, t.dtable, t.dweight), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "wave table: dweight shares memory with waves");
  CHECK_INT(rp_wave_table(1, 0, 2, 1, 1, t.waves, t.table, t.table), RP_OK); /* no numbers */
  const rpi_allocator none = {.allocate = refuse, .release = keep};
  rpi_set_allocator(&none);
  CHECK_INT(rp_wave_table(1, 3, 2, 1, 1, t.waves, t.weight, t.table), RP_ERROR_MEMORY);
  CHECK_INT(rp_wave_table(1, 3, 2, 1, 1, NULL, t.weight, t.table), RP_ERROR_MEMORY);
  CHECK_INT(rp_wave_gradient(1, 3, 2, 1, 1, t.waves, t.dtable, t.dweight), RP_ERROR_MEMORY);
  rpi_set_allocator(NULL);
  rpi_release(before);
  release(&t);
}

/* Every allocation fails in turn: what there was before it is given back, nothing is written. */
static void test_without_memory(bool gradient, bool made) {
  trial t = open_trial(&cases[4]);
  const sides *const s = &t.s;
  const real *const waves = made ? NULL : t.waves;
  const int64_t count = gradient ? s->H * s->D * s->width : s->H * s->D * rows_of(s);
  real *const to = gradient ? t.dweight : t.table, *const before = numbers(count);
  memcpy(before, to, (size_t)count * sizeof *before);
  rpi_set_allocator(&faulty_allocator);
  int n = 1;
  for (; n < 100; n++) {
    reset();
    memory.fail_at = n;
    const rp_status status =
        gradient ? rp_wave_gradient(s->H, s->D, s->width, s->left, s->right, waves, t.dtable, to)
                 : rp_wave_table(s->H, s->D, s->width, s->left, s->right, waves, t.weight, to);
    CHECK_INT(memory.held, 0);
    if (memory.calls < n) {
      CHECK_INT(status, RP_OK);
      break;
    }
    CHECK_INT(status, RP_ERROR_MEMORY);
    CHECK_TEXT(rp_last_error(), "wave table: no memory for ");
    CHECK(memcmp(to, before, (size_t)count * sizeof *before) == 0);
  }
  CHECK_INT(n, made ? 4 : 2); /* the last finds nothing to fail */
  rpi_set_allocator(NULL);
  rpi_release(before);
  release(&t);
}

int main(void) {
  for (int i = 0; table_at(i) != NULL; i++) {
    test_formula(table_at(i));
    test_mirrored(table_at(i));
    test_threads(table_at(i));
  }
  test_made();
  test_made_far();
  test_public();
  for (int i = 0; i < 4; i++) test_without_memory(i % 2, i / 2);
  return check_report();
}
