/* SPDX-License-Identifier: Apache-2.0
 *
 * layer.h: what the tests of embed.c, residual.c, norm.c, activation.c, cross_entropy.c, sums.c
 * and adam.c share: arrays between canaries, packed sentences, the mask of dropout one number at a
 * time, the same bits for any number of threads, and derivatives by differences.
 */
#ifndef LAYER_H
#define LAYER_H

#include <float.h>
#include <stdlib.h>

#include "base/rng.h"
#include "check.h"
#include "tables.h"

#ifdef RP_REAL_IS_DOUBLE
#define UNIT (DBL_EPSILON / 2)
#define IS_DOUBLE true
#else
#define UNIT (FLT_EPSILON / 2)
#define IS_DOUBLE false
#endif

#define CANARY ((real) - 12345.0)
enum { MARGIN = 80 }; /* numbers on either side: more than any vector, or tile of columns */

static uint32_t random_state = 1;

static inline uint32_t draw(void) {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}

/* Uniform in [-1, 1). */
static inline real number(void) { return (real)draw() / (real)(1 << 23) - 1; }

/* ---- arrays ----------------------------------------------------------------------- */

typedef struct array {
  real *data;
  int64_t count;
  const char *name;
} array;

static inline array array_of(const char *name, int64_t count, real value) {
  real *const block = malloc((size_t)(count + 2 * MARGIN) * sizeof(real));
  if (block == NULL) abort();
  for (int64_t i = 0; i < count + 2 * MARGIN; i++) {
    block[i] = i < MARGIN || i >= count + MARGIN ? CANARY : value;
  }
  return (array){block + MARGIN, count, name};
}

static inline array array_random(const char *name, int64_t count, double scale) {
  const array x = array_of(name, count, 0);
  for (int64_t i = 0; i < count; i++) x.data[i] = (real)scale * number();
  return x;
}

static inline array array_copy(const array *x) {
  const array y = array_of(x->name, x->count, 0);
  for (int64_t i = 0; i < x->count; i++) y.data[i] = x->data[i];
  return y;
}

/* Checks that nothing was written outside. */
static inline void array_free(array *x) {
  bool alive = true;
  for (int64_t i = 0; i < MARGIN; i++) {
    alive = alive && x->data[i - MARGIN] == CANARY && x->data[x->count + i] == CANARY;
  }
  if (!CHECK(alive)) printf(" around %s", x->name);
  free(x->data - MARGIN);
}

/* |got - expected| <= allowed, and both are numbers. Prints the first that is not. */
static inline bool is_close(const rp_ops *ops, const char *what, int64_t at, real got,
                            long double expected, long double allowed) {
  if (fabsl((long double)got - expected) <= allowed) return true;
  printf("\n  %s: %s[%lld] is %.9g, expected %.9Lg within %.3Lg", ops->name, what, (long long)at,
         (double)got, expected, allowed);
  return false;
}

/* ---- rows in bf16, of numbers that are finite --------------------------------------- */

static inline uint16_t rounded(real x) {
  const float number = (float)x;
  uint32_t bits = 0;
  memcpy(&bits, &number, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline void put_rounded(real *row, int64_t c, real x) {
  const uint16_t number = rounded(x);
  memcpy((char *)row + c * 2, &number, sizeof number);
}

static inline real rounded_at(const real *row, int64_t c) {
  uint16_t number = 0;
  memcpy(&number, (const char *)row + c * 2, sizeof number);
  const uint32_t bits = (uint32_t)number << 16;
  float x = 0;
  memcpy(&x, &bits, sizeof x);
  return (real)x;
}

/* Every number becomes one of bf16; and all of them as such. */
static inline void array_round(const array *x) {
  for (int64_t i = 0; i < x->count; i++) {
    real one = 0;
    put_rounded(&one, 0, x->data[i]);
    x->data[i] = rounded_at(&one, 0);
  }
}

static inline array array_rounded(const array *x) {
  const array y = array_of(x->name, (x->count + 1) / 2, 0);
  for (int64_t i = 0; i < x->count; i++) put_rounded(y.data, i, x->data[i]);
  return y;
}

static inline bool has_rounded(const real *row, int64_t c, real x) {
  const uint16_t number = rounded(x);
  return memcmp((const char *)row + c * 2, &number, sizeof number) == 0;
}

/* ---- packed sentences ------------------------------------------------------------- */

enum { MOST_SENTENCES = 512 };

typedef struct packing {
  int64_t offsets[MOST_SENTENCES + 1];
  uint32_t ordinals[MOST_SENTENCES];
  rpi_dropout dropout;
} packing;

/* Sentences of all lengths, empty ones among them, that have `rows` rows together. */
static inline void packing_fill(packing *p, int64_t rows, double rate) {
  static const int64_t lengths[] = {5, 0, 1, 70, 6, 0, 0, 2, 13, 12, 31, 1};
  memset(p, 0, sizeof *p);
  int64_t b = 0;
  for (; b < MOST_SENTENCES - 2 && p->offsets[b] < rows; b++) {
    const int64_t length = lengths[draw() % (sizeof lengths / sizeof lengths[0])];
    const int64_t left = rows - p->offsets[b];
    p->offsets[b + 1] = p->offsets[b] + (length < left ? length : left);
  }
  p->offsets[++b] = rows; /* the rest, or an empty one */
  for (int64_t i = 0; i < b; i++) p->ordinals[i] = (uint32_t)(draw() << 12 ^ draw());
  p->dropout = (rpi_dropout){.rate = rate,
                             .key = {draw(), draw()},
                             .site = draw(),
                             .sentences = b,
                             .offsets = p->offsets,
                             .ordinals = p->ordinals};
}

static inline int64_t sentence_of(const rpi_dropout *d, int64_t row) {
  int64_t b = 0;
  while (d->offsets[b + 1] <= row) b++;
  return b;
}

static inline int64_t place_of(const rpi_dropout *d, int64_t row) {
  return row - d->offsets[sentence_of(d, row)];
}

/* What dropout multiplies the number at (row, column) with, straight from the definition. */
static inline real keep_factor(const rpi_dropout *d, int64_t row, int64_t column) {
  const int threshold = (int)floor(256 * d->rate + 0.5);
  if (threshold == 0) return 1;
  const int64_t b = sentence_of(d, row);
  const rpi_philox_block counter = {
      {(uint32_t)(column / 16), (uint32_t)(row - d->offsets[b]), d->ordinals[b], d->site}};
  const rpi_philox_block block =
      rpi_philox(counter, (rpi_philox_key){{d->key[0], d->key[1]}}, RPI_PHILOX_ROUNDS);
  const int byte = (int)(block.word[column % 16 / 4] >> (8 * (column % 4)) & 255u);
  return byte >= threshold ? (real)256 / (real)(256 - threshold) : (real)0;
}

/* ---- any number of threads -------------------------------------------------------- */

enum { MOST_OUTPUTS = 6 };

/* Runs with 1, 2, 3 and 8 threads from the same arrays, in a small run with 1 and 8, on a device
 * twice; leaves the results of the last. */
static inline bool has_same_bits(const rp_ops *ops, void (*run)(const rp_ops *ops, void *context),
                                 void *context, const array *outputs, int count) {
  static const int threads[] = {1, 8, 2, 3};
  const size_t runs = is_device_run() || is_small_run() ? 2 : sizeof threads / sizeof threads[0];
  array before[MOST_OUTPUTS], first[MOST_OUTPUTS];
  bool same = true;
  for (int i = 0; i < count; i++) before[i] = array_copy(&outputs[i]);
  for (size_t t = 0; t < runs; t++) {
    rp_set_threads(threads[t]);
    for (int i = 0; i < count; i++) {
      memcpy(outputs[i].data, before[i].data, (size_t)outputs[i].count * sizeof(real));
    }
    run(ops, context);
    for (int i = 0; i < count; i++) {
      if (t == 0) first[i] = array_copy(&outputs[i]);
      same = same &&
             memcmp(first[i].data, outputs[i].data, (size_t)outputs[i].count * sizeof(real)) == 0;
    }
  }
  rp_set_threads(0);
  for (int i = 0; i < count; i++) {
    array_free(&before[i]);
    array_free(&first[i]);
  }
  return same;
}

typedef struct layer_shape {
  int64_t rows, columns;
} layer_shape;

/* ---- sums over rows --------------------------------------------------------------- */

/* Are they `before` and the sums of the columns of x[rows][columns], rows `stride` apart? 64 rows
 * are added in `real`, these sums in double, the whole to what is there. */
static inline bool are_sums(const rp_ops *ops, const array *before, const array *sums,
                            const real *x, layer_shape s, int64_t stride) {
  bool right = true;
  for (int64_t c = 0; c < s.columns; c++) {
    long double expected = before->data[c], size = 0;
    for (int64_t row = 0; row < s.rows; row++) {
      const long double one = x[row * stride + c];
      expected += one;
      size += fabsl(one);
    }
    const long double allowed = 1.01L * UNIT * (64 * size + 2 * fabsl(expected) + 1);
    right = right && is_close(ops, sums->name, c, sums->data[c], expected, allowed);
  }
  return right;
}

/* ---- derivatives ------------------------------------------------------------------ */

/* Is gradient[i] the derivative of f by x[i], for every i? By the four-point formula,
 *
 *   f' = (8 (f(+h) - f(-h)) - (f(+2h) - f(-2h))) / 12h
 *
 * with h = 2^-10: its error h^4 f^(5) / 30 is 3e-14 f^(5), rounding makes 1e-12 of f. With float
 * nothing could be seen, and nothing is tried. */
static inline void check_derivative(const rp_ops *ops, const char *what,
                                    double (*f)(const rp_ops *ops, void *context), void *context,
                                    real *x, const real *gradient, int64_t count) {
  const double h = 0x1p-10, offsets[] = {1, -1, 2, -2};
  bool right = true;
  for (int64_t i = 0; IS_DOUBLE && i < count; i++) {
    const real before = x[i];
    double values[4];
    for (int k = 0; k < 4; k++) {
      x[i] = before + (real)(offsets[k] * h);
      values[k] = f(ops, context);
    }
    x[i] = before;
    const double slope = (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * h);
    const double allowed = 1e-9 * fmax(1, fabs(slope));
    right = is_close(ops, what, i, gradient[i], (long double)slope, (long double)allowed) && right;
  }
  CHECK(right);
}

static inline double weighted_sum(const array *x, const array *weights) {
  double sum = 0;
  for (int64_t i = 0; i < x->count; i++) sum += (double)x->data[i] * (double)weights->data[i];
  return sum;
}

/* ---- shapes ----------------------------------------------------------------------- */

/* Empty and odd ones; a small run leaves out the last two, a tiny one three. */
static const layer_shape layer_shapes[] = {
    {0, 5},   {4, 0},    {1, 1},    {1, 64},    {2, 3},    {7, 17},
    {5, 63},  {6, 65},   {13, 80},  {500, 1},   {31, 128}, {9, 513},
    {3, 640}, {5, 1024}, {131, 48}, {200, 200}, {2, 4100}, {411, 513},
};
enum { LAYER_SHAPES = sizeof layer_shapes / sizeof layer_shapes[0] };

static inline int layer_shape_count(void) {
  return LAYER_SHAPES - (is_tiny_run() ? 3 : is_small_run() ? 2 : 0);
}

static const double layer_rates[] = {0, 0.1, 0.001, 0.5};
enum { LAYER_RATES = sizeof layer_rates / sizeof layer_rates[0] };

#endif
