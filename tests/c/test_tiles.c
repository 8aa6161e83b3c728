/* SPDX-License-Identifier: Apache-2.0
 *
 * test_tiles.c: products by tiles (ops/gemm_tiles.c), which few machines have, by the twin of
 * the tiles in plain C, which all have; and where there are tiles, those against the twin, bit
 * for bit.
 *
 * Each element may be off by what the plain sum may: gamma_n sum |a||b| (test_gemm.c). Of a
 * product less than 2 u |a||b| is left out, of 32 products on their way to the sum no more than
 * 16 + 1 + 6 additions are rounded: 2 + 23 and so of n >= 32 no more than n.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>

#include "base/cpu.h"
#include "check.h"
#include "isa/dispatch.h"

#define RPI_VECTOR_BYTES 16
#define RPI_VECTORS 2
#define RPI_LANES (RPI_VECTOR_BYTES / RPI_REAL_BYTES)
#define RPI_TILES_TWIN
#pragma GCC diagnostic ignored "-Wunused-function"
#include "ops/gemm.c"
#include "ops/gemm_tiles.c"

#include "products.h" /* behind them: its names are short */

/* Of product_create: in f32 by three parts, rounded to bf16 by one. */
enum { FLAGS = 32 };

/* What numbers look like. */
typedef enum kind {
  PLAIN,  /* uniform in (-1, 1) */
  WIDE,   /* of sizes from 2^-30 to 2^30 */
  HALVES, /* between two numbers of bf16, or next to that; few bits; zeros */
  TINY,   /* whose parts are denormal numbers */
  KINDS
} kind;

static float number_of(kind of) {
  const float x = number();
  switch (of) {
    case WIDE: return ldexpf(x, (int)(draw() % 61) - 30);
    case HALVES: {
      uint32_t bits;
      if (x == 0) return 0; /* of which the number before, by bits, is none */
      memcpy(&bits, &x, sizeof bits);
      bits = (bits & 0xFFFF0000u) + (draw() % 4 == 0 ? 0 : 0x8000u) + draw() % 3 - 1;
      float y;
      memcpy(&y, &bits, sizeof y);
      return draw() % 8 == 0 ? 0 : y;
    }
    case TINY: return ldexpf(x, -(int)(draw() % 30) - 100);
    default: return x;
  }
}

static void refill(float *all, int64_t count, kind of) {
  for (int64_t i = 0; i < count; i++) all[i] = number_of(of);
}

static product create(int64_t rows, int64_t columns, int64_t inner, int flags, kind of) {
  product p = product_create(rows, columns, inner, flags, 3);
  const rpi_gemm_args *const g = &p.args;
  if (of == PLAIN) return p;
  refill(p.a, (g->transpose_a ? inner : rows) * g->a_stride, of);
  if (of != TINY) refill(p.b, (g->transpose_b ? columns : inner) * g->b_stride, of);
  refill(p.bias, columns, of);
  for (int64_t i = 0; g->accumulate && i < p.c_size; i++) {
    if (p.c[i] != CANARY) p.c[i] = p.before[i] = number_of(of);
  }
  return p;
}

static void report(const product *p, kind of, const char *what, double worst) {
  const rpi_gemm_args *const g = &p->args;
  printf("\n  %lld x %lld x %lld, A %s, B %s%s%s, kind %d: %s %.3g", (long long)g->rows,
         (long long)g->columns, (long long)g->inner, g->transpose_a ? "T" : "N",
         g->transpose_b ? "T" : "N", g->accumulate ? ", added" : "",
         g->bias != NULL ? ", bias" : "", (int)of, what, worst);
}

/* The product by the tiles of this processor, where it has them: the same bits. */
static void compare_with_tiles(const product *p, kind of) {
#ifdef RPI_HAS_AMX
  if ((rpi_cpu_features() & RPI_CPU_AMX) == 0) return;
  const size_t bytes = (size_t)p->c_size * sizeof(float);
  float *const c = malloc(bytes);
  if (c == NULL) abort();
  memcpy(c, p->before, bytes);
  rpi_gemm_args args = p->args;
  args.c = c + (p->args.c - p->c);
  CHECK_INT(rpi_ops_amx.gemm(&args), RP_OK);
  if (!CHECK(memcmp(c, p->c, bytes) == 0)) report(p, of, "tiles and their twin differ", 0);
  free(c);
#else
  (void)p;
  (void)of;
#endif
}

static void one(int64_t rows, int64_t columns, int64_t inner, int flags, kind of) {
  product p = create(rows, columns, inner, flags, of);
  CHECK_INT(gemm_tiles(&p.args), RP_OK);
  const double worst = worst_element(&p, FLT_MIN);
  if (!CHECK(worst <= 1)) report(&p, of, "error", worst);
  if (!CHECK(canaries_alive(&p))) report(&p, of, "wrote beyond C", worst);
  compare_with_tiles(&p, of);
  product_free(&p);
}

/* Whole tiles and ragged ones, two by two and fewer; inner of one tile, of many, cut at
 * TILES_DEPTH; what is kept A, and B; several blocks. */
static void test_shapes(void) {
  static const int64_t shapes[][3] = {{48, 32, 32},   {49, 33, 33},   {64, 64, 64},  {63, 47, 95},
                                      {50, 290, 40},  {290, 50, 40},  {97, 65, 530}, {80, 48, 1030},
                                      {170, 150, 64}, {1100, 70, 33}, {70, 1100, 33}};
  const int count = getenv("RELPOS_TEST_SMALL") != NULL ? 6 : sizeof shapes / sizeof shapes[0];
  for (int i = 0; i < count; i++) {
    for (int flags = 0; flags < FLAGS; flags++) {
      one(shapes[i][0], shapes[i][1], shapes[i][2], flags, (kind)((i + flags) % KINDS));
    }
  }
}

/* A cut into smaller pieces, as when no scratch memory is left, changes no bit. */
static void test_small_blocks(void) {
  for (int flags = 0; flags < FLAGS; flags++) {
    product p = create(130, 75, 300, flags, PLAIN);
    const size_t bytes = (size_t)p.c_size * sizeof(float);
    CHECK_INT(gemm_tiles(&p.args), RP_OK);
    float *const whole = malloc(bytes);
    if (whole == NULL) abort();
    memcpy(whole, p.c, bytes);
    memcpy(p.c, p.before, bytes);
    tiles_begin();
    tiles_small_block(&p.args, (gemm_block){0, 130, 0, 75});
    tiles_end();
    if (!CHECK(memcmp(whole, p.c, bytes) == 0)) report(&p, PLAIN, "bits differ", 0);
    free(whole);
    product_free(&p);
  }
}

/* Infinity, NaN, and what bf16 cannot hold: where they belong, and nowhere else. The latter is
 * multiplied by zeros and ones, so that the sum is known. */
static void test_not_finite(void) {
  for (int flags = 0; flags < FLAGS; flags++) {
    product p = create(70, 60, 90, flags, PLAIN);
    const rpi_gemm_args *const g = &p.args;
    *(float *)(uintptr_t)gemm_a_at(g, 5, 80) = INFINITY;
    *(float *)(uintptr_t)gemm_a_at(g, 40, 3) = NAN;
    CHECK_INT(gemm_tiles(g), RP_OK);
    bool right = true;
    for (int64_t row = 0; row < g->rows; row++) {
      for (int64_t j = 0; j < g->columns; j++) {
        const float c = g->c[row * g->c_stride + j];
        right &= row == 5 ? isinf(c) != 0 : row == 40 ? isnan(c) != 0 : isfinite(c) != 0;
      }
    }
    if (!CHECK(right)) report(&p, PLAIN, "not finite", 0);
    product_free(&p);
    if (g->precision == RP_BF16) continue; /* what it cannot hold is infinite there */

    p = create(64, 64, 64, flags & 3, PLAIN);
    for (int64_t k = 0; k < 64; k++) {
      for (int64_t j = 0; j < 64; j++) *(float *)(uintptr_t)gemm_b_at(g, k, j) = k == j ? 1 : 0;
    }
    *(float *)(uintptr_t)gemm_a_at(g, 9, 33) = -FLT_MAX;
    CHECK_INT(gemm_tiles(g), RP_OK);
    right = true;
    for (int64_t i = 0; i < 64 * 64; i++) {
      right &= g->c[i / 64 * g->c_stride + i % 64] == *gemm_a_at(g, i / 64, i % 64);
    }
    if (!CHECK(right)) report(&p, PLAIN, "times one", 0);
    product_free(&p);
  }
}

int main(void) {
  /* gemm.c's blocks of 16-byte vectors would leave it to BLAS */
  setenv("RELPOS_BLAS", "builtin", 1);
  test_shapes();
  test_small_blocks();
  test_not_finite();
#ifdef RPI_HAS_AMX
  printf("%s: ", (rpi_cpu_features() & RPI_CPU_AMX) != 0 ? "tiles and their twin" : "the twin");
#endif
  return check_report();
}
