/* SPDX-License-Identifier: Apache-2.0
 *
 * tiles.h: the eight tiles of AMX, and the same in plain C.
 *
 * A tile is 16 rows of 16 words of 32 bits. RPI_TILE_DOT takes the words of the right two as pairs
 * of bf16, and adds to the left, 16 x 16 numbers of f32, the 16 x 32 x 16 products: row r of the
 * one, pair by pair, with column c of the other. The order of the additions is the instruction's
 * and that of the twin below, to the bit (tests/c/test_tiles.c): sums of the first and of the
 * second of each pair apart, begun at nothing, added to each other, and that to what was there. So
 * 32 products are rounded like two sums of 16. Denormal numbers are zeros, as operands and as
 * results.
 *
 * The twin is chosen by RPI_TILES_TWIN, and runs anywhere; only tests compile it.
 */
#ifndef RPI_TILES_H
#define RPI_TILES_H

#include <string.h>

#include "ops/tile.h"

#define RPI_TILE_SIDE 16
#define RPI_TILE_WORDS (RPI_TILE_SIDE * RPI_TILE_SIDE)

#ifndef RPI_TILES_TWIN

/* Instructions by their names, because the compilers' functions for them do not say which memory
 * they read: gcc 12 leaves out what was to be written there before. */
#define RPI_TILES_TARGET __attribute__((target("amx-tile,amx-bf16")))

/* Whole tiles, all eight: palette 1, in the layout that the instruction reads. */
RPI_TILES_TARGET static void tiles_begin(void) {
  struct {
    uint8_t palette, start_row, zero[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } all = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    all.row_bytes[i] = 4 * RPI_TILE_SIDE;
    all.rows[i] = RPI_TILE_SIDE;
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(all));
}

/* A thread that has no tiles is switched from and to in less time. */
RPI_TILES_TARGET static void tiles_end(void) { __asm__ volatile("tilerelease"); }

/* Rows are `bytes` apart; tiles are named by digits. */
#define RPI_TILE_LOAD(tile, from, bytes)                                                           \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile                                              \
                   :                                                                               \
                   : "r"(from), "r"((int64_t)(bytes))                                              \
                   : "memory")
#define RPI_TILE_STORE(tile, to, bytes)                                                            \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)"                                          \
                   :                                                                               \
                   : "r"(to), "r"((int64_t)(bytes))                                                \
                   : "memory")
#define RPI_TILE_ZERO(tile) __asm__ volatile("tilezero %tmm" #tile)
#define RPI_TILE_DOT(sum, left, right)                                                             \
  __asm__ volatile("tdpbf16ps %tmm" #right ", %tmm" #left ", %tmm" #sum)

#else

#include <float.h>
#include <math.h>

#define RPI_TILES_TARGET

static _Thread_local float tile_words[8][RPI_TILE_SIDE][RPI_TILE_SIDE];
static int64_t tile_products; /* by all threads: tests see to it that there are some */

static void tiles_begin(void) { memset(tile_words, 0, sizeof tile_words); }
static void tiles_end(void) { memset(tile_words, 0xFF, sizeof tile_words); }

static void tile_load(int tile, const void *from, int64_t bytes) {
  for (int r = 0; r < RPI_TILE_SIDE; r++) {
    memcpy(tile_words[tile][r], (const char *)from + r * bytes, sizeof tile_words[tile][r]);
  }
}

static void tile_store(int tile, void *to, int64_t bytes) {
  for (int r = 0; r < RPI_TILE_SIDE; r++) {
    memcpy((char *)to + r * bytes, tile_words[tile][r], sizeof tile_words[tile][r]);
  }
}

static float tile_flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

/* The upper or the lower half of a word. */
static float tile_half(float word, bool upper) {
  uint32_t bits;
  memcpy(&bits, &word, sizeof bits);
  bits = upper ? bits & 0xFFFF0000u : bits << 16;
  float half;
  memcpy(&half, &bits, sizeof half);
  return tile_flushed(half);
}

/* sum + a b, rounded once: numbers of bf16 have exact products but for the smallest. */
static float tile_add(float sum, float a, float b) {
  const float product = a * b;
  return tile_flushed(fabsf(product) < FLT_MIN ? fmaf(a, b, sum) : sum + product);
}

typedef float tile_halves[2][RPI_TILE_SIDE][RPI_TILE_SIDE];

static void tile_split(int tile, tile_halves to) {
  for (int i = 0; i < RPI_TILE_WORDS; i++) {
    const int r = i / RPI_TILE_SIDE, c = i % RPI_TILE_SIDE;
    to[0][r][c] = tile_half(tile_words[tile][r][c], false);
    to[1][r][c] = tile_half(tile_words[tile][r][c], true);
  }
}

/* Columns at once, as vectors that every machine has: a compiler that checks indices makes none. */
#define TILE_COLUMNS 4
typedef float tile_columns __attribute__((vector_size(4 * TILE_COLUMNS)));
typedef int32_t tile_bits __attribute__((vector_size(4 * TILE_COLUMNS)));

/* Sums of a row's products with columns from c on. Quickly they are right unless a number among
 * them is tiny, but not 0: then false. */
static bool tile_row_quickly(const float *a, float b[RPI_TILE_SIDE][RPI_TILE_SIDE], int c,
                             float *to) {
  const int32_t size = INT32_MAX, least = 1 << (FLT_MANT_DIG - 1); /* the bits of FLT_MIN */
  tile_columns sum = {0};
  tile_bits tiny = {0};
  for (int k = 0; k < RPI_TILE_SIDE; k++) {
    const float left = a[k];
    tile_columns right;
    memcpy(&right, b[k] + c, sizeof right);
    const tile_columns product = left * right;
    sum += product;
    const tile_bits next = (tile_bits)sum & size;
    if (left != 0) tiny |= (((tile_bits)product & size) < least) & (right != 0);
    tiny |= (next < least) & (next > 0);
  }
  memcpy(to + c, &sum, sizeof sum);
  return (tiny[0] | tiny[1] | tiny[2] | tiny[3]) == 0;
}

static void tile_row(const float *a, float b[RPI_TILE_SIDE][RPI_TILE_SIDE], float *to) {
  for (int first = 0; first < RPI_TILE_SIDE; first += TILE_COLUMNS) {
    if (tile_row_quickly(a, b, first, to)) continue;
    for (int c = first; c < first + TILE_COLUMNS; c++) {
      to[c] = 0;
      for (int k = 0; k < RPI_TILE_SIDE; k++) to[c] = tile_add(to[c], a[k], b[k][c]);
    }
  }
}

static void tile_dot(int sum, int left, int right) {
  tile_halves a, b;
  __atomic_add_fetch(&tile_products, 1, __ATOMIC_RELAXED);
  tile_split(left, a);
  tile_split(right, b);
  for (int r = 0; r < RPI_TILE_SIDE; r++) {
    float first[RPI_TILE_SIDE], second[RPI_TILE_SIDE];
    tile_row(a[0][r], b[0], first);
    tile_row(a[1][r], b[1], second);
    for (int c = 0; c < RPI_TILE_SIDE; c++) {
      const float before = tile_flushed(tile_words[sum][r][c]);
      tile_words[sum][r][c] = tile_flushed(before + tile_flushed(first[c] + second[c]));
    }
  }
}

#define RPI_TILE_LOAD(tile, from, bytes) tile_load(tile, from, bytes)
#define RPI_TILE_STORE(tile, to, bytes) tile_store(tile, to, bytes)
#define RPI_TILE_ZERO(tile) memset(tile_words[tile], 0, sizeof tile_words[tile])
#define RPI_TILE_DOT(sum, left, right) tile_dot(sum, left, right)

#endif

#endif
