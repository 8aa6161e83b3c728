/* SPDX-License-Identifier: Apache-2.0
 *
 * products.h: matrix products of random numbers, and how far each element may be off: by what
 * the plain loop may (test_gemm.c).
 */
#ifndef PRODUCTS_H
#define PRODUCTS_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ops/ops.h"

#ifdef RP_REAL_IS_DOUBLE
#define UNIT (DBL_EPSILON / 2)
#else
#define UNIT (FLT_EPSILON / 2)
#endif

#define CANARY ((real) - 12345.0)

static uint32_t state = 1;

static inline uint32_t draw(void) {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

static inline real number(void) { return (real)draw() / (real)(1 << 23) - 1; }

static inline real *numbers(int64_t count) {
  real *const all = malloc((size_t)(count + 1) * sizeof(real));
  if (all == NULL) abort();
  for (int64_t i = 0; i < count; i++) all[i] = number();
  return all;
}

typedef struct product {
  rpi_gemm_args args;
  real *a, *b, *c, *bias, *before;
  int64_t c_size;
} product;

/* A product of random numbers whose rows are `extra` wider than they need be. C has a
 * row more above and below, and so do the margins hold canaries. */
static inline product product_create(int64_t rows, int64_t columns, int64_t inner, int flags,
                                     int64_t extra) {
  product p = {.args = {.rows = rows, .columns = columns, .inner = inner}};
  rpi_gemm_args *const g = &p.args;
  g->transpose_a = (flags & 1) != 0;
  g->transpose_b = (flags & 2) != 0;
  g->accumulate = (flags & 4) != 0;
  g->a_stride = (g->transpose_a ? rows : inner) + extra + 1;
  g->b_stride = (g->transpose_b ? inner : columns) + 2 * extra + 1;
  g->c_stride = columns + 3 * extra + 1;
  p.a = numbers((g->transpose_a ? inner : rows) * g->a_stride);
  p.b = numbers((g->transpose_b ? columns : inner) * g->b_stride);
  p.bias = numbers(columns);
  p.c_size = (rows + 2) * g->c_stride;
  p.c = numbers(p.c_size);
  for (int64_t i = 0; i < p.c_size; i++) {
    const int64_t row = i / g->c_stride - 1, column = i % g->c_stride;
    if (row < 0 || row >= rows || column >= columns) p.c[i] = CANARY;
    else if (!g->accumulate) p.c[i] = (real)NAN; /* must be overwritten, not added to */
  }
  p.before = malloc((size_t)p.c_size * sizeof(real));
  if (p.before == NULL) abort();
  memcpy(p.before, p.c, (size_t)p.c_size * sizeof(real));
  g->a = p.a;
  g->b = p.b;
  g->c = p.c + g->c_stride;
  g->bias = (flags & 8) != 0 ? p.bias : NULL;
  g->precision = (flags & 16) != 0 ? RP_BF16 : RP_F32;
  return p;
}

static inline void product_free(product *p) {
  free(p->a);
  free(p->b);
  free(p->c);
  free(p->bias);
  free(p->before);
}

/* C as this leaves it, to be freed; p's own is as before. */
static inline real *product_result(product *p, rp_status (*by)(const rpi_gemm_args *args)) {
  const size_t bytes = (size_t)p->c_size * sizeof(real);
  real *const result = malloc(bytes);
  if (result == NULL || by(&p->args) != RP_OK) abort();
  memcpy(result, p->c, bytes);
  memcpy(p->c, p->before, bytes);
  return result;
}

/* Is C now the same, to the bit? */
static inline bool product_is(const product *p, const real *result) {
  return memcmp(p->c, result, (size_t)p->c_size * sizeof(real)) == 0;
}

static inline bool canaries_alive(const product *p) {
  const rpi_gemm_args *const g = &p->args;
  for (int64_t i = 0; i < p->c_size; i++) {
    const int64_t row = i / g->c_stride - 1, column = i % g->c_stride;
    if ((row < 0 || row >= g->rows || column >= g->columns) && p->c[i] != CANARY) return false;
  }
  return true;
}

/* Rounded to bf16, halves to even, where the product's precision is that. */
static inline real rounded(const rpi_gemm_args *g, real x) {
  if (g->precision != RP_BF16) return x;
  const float number = (float)x;
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  bits = (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
  float value;
  memcpy(&value, &bits, sizeof value);
  return (real)value;
}

static inline real element_a(const rpi_gemm_args *g, int64_t row, int64_t k) {
  const real x = g->transpose_a ? g->a[k * g->a_stride + row] : g->a[row * g->a_stride + k];
  return rounded(g, x);
}

static inline real element_b(const rpi_gemm_args *g, int64_t k, int64_t column) {
  const real x = g->transpose_b ? g->b[column * g->b_stride + k] : g->b[k * g->b_stride + column];
  return rounded(g, x);
}

/* The largest error, as a share of what is allowed. tiny: what a factor or a sum may lose beside
 * its roundings, where denormal numbers count as zero. */
static inline double worst_element(const product *p, double tiny) {
  const rpi_gemm_args *const g = &p->args;
  const double n = (double)g->inner + 3, gamma = n * UNIT / (1 - n * UNIT);
  double worst = 0;
  for (int64_t row = 0; row < g->rows; row++) {
    for (int64_t column = 0; column < g->columns; column++) {
      const int64_t at = row * g->c_stride + column;
      long double sum = g->accumulate ? p->before[g->c_stride + at] : 0, size = fabsl(sum);
      double lost = tiny;
      if (g->bias != NULL) {
        sum += g->bias[column];
        size += fabsl((long double)g->bias[column]);
      }
      for (int64_t k = 0; k < g->inner; k++) {
        const long double x = element_a(g, row, k), y = element_b(g, k, column);
        sum += x * y;
        size += fabsl(x * y);
        lost += tiny * (double)(2 + fabsl(x) + fabsl(y));
      }
      const double error = (double)fabsl(g->c[at] - sum);
      const double allowed = gamma * (double)size + lost;
      if (isnan(error)) return INFINITY;
      if (error > 0) worst = fmax(worst, allowed > 0 ? error / allowed : INFINITY);
    }
  }
  return worst;
}

#endif
