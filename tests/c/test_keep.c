/* SPDX-License-Identifier: Apache-2.0
 *
 * test_keep.c: the dropout mask of ops/keep.h, compiled here for every instruction set,
 * against base/rng.h one number at a time: the same at every place, whatever the width of
 * the vectors. How many are kept, over many places, is within five standard errors.
 */
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "base/cpu.h"
#include "base/rng.h"
#include "check.h"
#include "ops/real.h"

/* tile.h is not what is tested: once, and for any width. */
#define RPI_LANES (16 / RPI_REAL_BYTES)
#define RPI_VECTORS 2
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-variable"
#include "ops/tile.h"

/* Where a strip stands. */
typedef struct place {
  uint32_t key[2], ordinal, site;
  int64_t row, rows, column, columns;
  double rate;
} place;

#define KEEP_COPY plain
#define KEEP_COPY_BYTES 16
#include "keep_copy.h"
#undef KEEP_COPY
#undef KEEP_COPY_BYTES

#if defined(__x86_64__)

#if defined(__clang__)
#define TARGET_BEGIN(name)                                                                         \
  _Pragma(KEEP_TEXT(clang attribute push(__attribute__((target(name))), apply_to = function)))
#define TARGET_END _Pragma("clang attribute pop")
#else
#define TARGET_BEGIN(name) _Pragma("GCC push_options") _Pragma(KEEP_TEXT(GCC target(name)))
#define TARGET_END _Pragma("GCC pop_options")
#endif
#define KEEP_TEXT(...) #__VA_ARGS__

TARGET_BEGIN("avx2,fma")
#define KEEP_COPY avx2
#define KEEP_COPY_BYTES 32
#include "keep_copy.h"
#undef KEEP_COPY
#undef KEEP_COPY_BYTES
TARGET_END

TARGET_BEGIN("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")
#define KEEP_COPY avx512
#define KEEP_COPY_BYTES 64
#include "keep_copy.h"
#undef KEEP_COPY
#undef KEEP_COPY_BYTES
TARGET_END

#endif

typedef void (*factors_fn)(const place *p, real *factor);

static const struct copy {
  int feature;
  factors_fn factors;
} copies[] = {
    {RPI_CPU_PORTABLE, factors_plain}, /* NEON's too: vectors of 16 bytes */
#if defined(__x86_64__)
    {RPI_CPU_AVX2, factors_avx2},
    {RPI_CPU_AVX512, factors_avx512},
#endif
};

static uint32_t state = 1;

static uint32_t draw(void) {
  state = state * 1664525u + 1013904223u;
  return state ^ state >> 15;
}

/* What the number at one place is multiplied by, straight from the definition. */
static real factor_at(const place *p, int64_t row, int64_t column) {
  const int threshold = (int)lround(256 * p->rate);
  const rpi_philox_block counter = {{(uint32_t)(column / 16), (uint32_t)row, p->ordinal, p->site}};
  const rpi_philox_block block =
      rpi_philox(counter, (rpi_philox_key){{p->key[0], p->key[1]}}, RPI_PHILOX_ROUNDS);
  const int b = (int)(column % 16);
  const int byte = (int)(block.word[b / 4] >> (8 * (b % 4)) & 255u);
  return byte >= threshold ? (real)256 / (real)(256 - threshold) : (real)0;
}

static bool is_right(factors_fn factors, const place *p) {
  _Alignas(64) real factor[RPI_STRIP * RPI_TILE];
  factors(p, factor);
  bool right = true;
  for (int64_t i = 0; i < p->rows * RPI_TILE; i++) {
    const int64_t row = i / RPI_TILE, column = i % RPI_TILE;
    const bool within = column < p->columns;
    right &= factor[i] == (within ? factor_at(p, p->row + row, p->column + column) : (real)1);
  }
  return right;
}

static const double rates[] = {0, 1.0 / 256, 26.0 / 256, 0.5, 255.0 / 256, 0.1, 0.999};
enum { RATES = sizeof rates / sizeof rates[0] };

static void test_places(factors_fn factors) {
  for (int i = 0; i < 60 * RATES; i++) {
    place p = {.key = {draw(), draw()},
               .ordinal = draw(),
               .site = draw(),
               .row = draw() % 5000,
               .rows = 1 + i % RPI_STRIP,
               .column = 16 * (int64_t)(draw() % 1000),
               .columns = RPI_TILE - i % 4 * 16,
               .rate = rates[i % RATES]};
    if (p.rate > 255.0 / 256) p.rate = 255.0 / 256; /* what dropout_of makes of it */
    CHECK(is_right(factors, &p));
  }
  /* All bits of every counter. */
  const place far = {{~0u, ~0u},       ~0u,      ~0u, INT64_C(0xFFFFFFFF) - 2, 3,
                     INT64_C(1) << 35, RPI_TILE, 0.3};
  CHECK(is_right(factors, &far));
  const place origin = {{0, 0}, 0, 0, 0, RPI_STRIP, 0, RPI_TILE, 0.3};
  CHECK(is_right(factors, &origin));
}

/* Nearly everything dropped still keeps something. */
static void test_highest_rate(factors_fn factors) {
  real highest[2][RPI_STRIP * RPI_TILE];
  place p = {.rows = RPI_STRIP, .columns = RPI_TILE, .rate = 0.9999};
  factors(&p, highest[0]);
  p.rate = 255.0 / 256;
  factors(&p, highest[1]);
  CHECK(memcmp(highest[0], highest[1], sizeof highest[0]) == 0);
}

/* Five standard errors of the share that is kept, and of that of two neighbours, along
 * columns, rows, ordinals and sites. */
static void test_share(factors_fn factors) {
  enum { STRIPS = 200, COUNT = STRIPS * RPI_STRIP * RPI_TILE };
  static real all[4][STRIPS][RPI_STRIP * RPI_TILE];
  const double rate = 0.25, share = 1 - rate;
  for (int i = 0; i < STRIPS; i++) {
    place p = {.key = {7, 8}, .row = 6 * i, .rows = RPI_STRIP, .columns = RPI_TILE, .rate = rate};
    factors(&p, all[0][i]);
    p.column = 64;
    factors(&p, all[1][i]);
    p.column = 0, p.ordinal = 1;
    factors(&p, all[2][i]);
    p.ordinal = 0, p.site = 1;
    factors(&p, all[3][i]);
  }
  const real *const first = all[0][0];
  for (int other = 0; other < 4; other++) {
    const real *const x = all[other][0];
    double kept = 0, both = 0, beside = 0, below = 0;
    for (int i = 0; i < COUNT; i++) {
      kept += x[i] != 0;
      both += x[i] != 0 && first[i] != 0;
      beside += x[i] != 0 && x[(i + 1) % COUNT] != 0;
      below += x[i] != 0 && x[(i + RPI_TILE) % COUNT] != 0;
    }
    CHECK_NEAR(kept / COUNT, share, 5 * sqrt(share * rate / COUNT));
    const double pairs = 5 * sqrt(share * share * (1 - share * share) * 2 / COUNT);
    CHECK_NEAR(both / COUNT, other == 0 ? kept / COUNT : share * share, pairs);
    CHECK_NEAR(beside / COUNT, share * share, pairs);
    CHECK_NEAR(below / COUNT, share * share, pairs);
  }
}

int main(void) {
  for (size_t i = 0; i < sizeof copies / sizeof copies[0]; i++) {
    if ((rpi_cpu_features() & copies[i].feature) == 0) continue;
    test_places(copies[i].factors);
    test_highest_rate(copies[i].factors);
    test_share(copies[i].factors);
  }
  return check_report();
}
