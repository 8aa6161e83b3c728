/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_tiles.h: weights of 32 queries by a tile of keys as operands (operands.h).
 */
#ifndef RPI_ATTENTION_TILES_H
#define RPI_ATTENTION_TILES_H

#include "ops/attention.h"

#ifdef RPI_TILES

_Static_assert(RPI_TILE % TILES_INNER == 0, "a tile of keys is whole strips");

/* 32 rows of weights by 32 keys, of which a left operand has the rows as lines, a right one as
 * inner: the parts of both are the same. */
RPI_INLINE rpi_register tiles_split_weights(const bool is_left, const bool is_right,
                                            const real *from, uint32_t *left, uint32_t *right) {
  rpi_register odd = {0};
  for (int64_t i = 0; i < RPI_TILE_SIDE; i++) {
    RPI_UNROLL(4) for (int64_t l = 0; l < RPI_TILE_SIDE; l += RPI_LANES) {
      const real *const upper = from + i * RPI_TILE + l;
      const real *const lower = upper + RPI_TILE_SIDE * RPI_TILE;
      const int64_t at = i * RPI_TILE_SIDE + l;
      const tiles_parts a = tiles_parts_of(rpi_load(upper), &odd);
      const tiles_parts b = tiles_parts_of(rpi_load(upper + RPI_TILE_SIDE), &odd);
      const tiles_parts c = tiles_parts_of(rpi_load(lower), &odd);
      const tiles_parts d = tiles_parts_of(rpi_load(lower + RPI_TILE_SIDE), &odd);
      if (is_left) {
        tiles_put(a, b, left + at);
        tiles_put(c, d, left + RPI_TILE_WORDS + at);
      }
      if (is_right) {
        tiles_put(a, c, right + at);
        tiles_put(b, d, right + RPI_TILE_WORDS + at);
      }
    }
  }
  return odd;
}

/* The same in one part. */
RPI_INLINE rpi_register tiles_round_weights(const bool native, const bool is_left,
                                            const bool is_right, const real *from, uint32_t *left,
                                            uint32_t *right) {
  rpi_register odd[2] = {{0}};
  for (int64_t i = 0; i < RPI_TILE_SIDE; i++) {
    RPI_UNROLL(4) for (int64_t l = 0; l < RPI_TILE_SIDE; l += RPI_LANES) {
      const real *const upper = from + i * RPI_TILE + l;
      const real *const lower = upper + RPI_TILE_SIDE * RPI_TILE;
      const int64_t at = i * RPI_TILE_SIDE + l;
      const rpi_register a = rpi_load(upper), b = rpi_load(upper + RPI_TILE_SIDE);
      const rpi_register c = rpi_load(lower), d = rpi_load(lower + RPI_TILE_SIDE);
      odd[0] += oddness(a) + oddness(b);
      odd[1] += oddness(c) + oddness(d);
      if (is_left) {
        tiles_store(left + at, (rpi_words)rpi_words_across(native, a, b));
        tiles_store(left + RPI_TILE_WORDS + at, (rpi_words)rpi_words_across(native, c, d));
      }
      if (is_right) {
        tiles_store(right + at, (rpi_words)rpi_words_across(native, a, c));
        tiles_store(right + RPI_TILE_WORDS + at, (rpi_words)rpi_words_across(native, b, d));
      }
    }
  }
  return odd[0] + odd[1];
}

/* A strip of 32 rows of weights on a tile, so many columns, as the left operand, the right one, or
 * both; false where some number has no parts, or none that may meet zeros. */
RPI_INLINE bool pack_weights(const int parts, const bool native, const bool is_left,
                             const bool is_right, const real *weights, int64_t columns,
                             operand left, operand right) {
  rpi_register odd = {0};
  for (int64_t half = 0; half < columns / TILES_INNER; half++) {
    const real *const from = weights + half * TILES_INNER;
    uint32_t *const to_left = is_left ? left.at + half * parts * TILES_PART : NULL;
    uint32_t *const to_right = is_right ? right.at + half * right.strip : NULL;
    if (parts == 1) odd += tiles_round_weights(native, is_left, is_right, from, to_left, to_right);
    else odd += tiles_split_weights(is_left, is_right, from, to_left, to_right);
  }
  return rpi_total(odd) == 0;
}

#define RPI_PACK_WEIGHTS_AS(name, target, parts, native)                                           \
  target RPI_NOINLINE bool pack_weights_left_##name(const real *weights, int64_t columns,          \
                                                    operand left) {                                \
    return pack_weights(parts, native, true, false, weights, columns, left, (operand){0});         \
  }                                                                                                \
  target RPI_NOINLINE bool pack_weights_right_##name(const real *weights, int64_t columns,         \
                                                     operand right) {                              \
    return pack_weights(parts, native, false, true, weights, columns, (operand){0}, right);        \
  }                                                                                                \
  target RPI_NOINLINE bool pack_weights_both_##name(const real *weights, int64_t columns,          \
                                                    operand left, operand right) {                 \
    return pack_weights(parts, native, true, true, weights, columns, left, right);                 \
  }
RPI_PACK_WEIGHTS_AS(SPLIT, , TILES_PARTS, false)
RPI_PACK_WEIGHTS_AS(TWIN, , 1, false)
#ifdef RPI_BF16_NATIVE
RPI_PACK_WEIGHTS_AS(NATIVE, RPI_BF16_TARGET, 1, true)
#define RPI_PACK_WEIGHTS(which, of, ...)                                                           \
  ((of).parts == TILES_PARTS ? pack_weights_##which##_SPLIT(__VA_ARGS__)                           \
   : rpi_bf16_native()       ? pack_weights_##which##_NATIVE(__VA_ARGS__)                          \
                             : pack_weights_##which##_TWIN(__VA_ARGS__))
#else
#define RPI_PACK_WEIGHTS(which, of, ...)                                                           \
  ((of).parts == TILES_PARTS ? pack_weights_##which##_SPLIT(__VA_ARGS__)                           \
                             : pack_weights_##which##_TWIN(__VA_ARGS__))
#endif

static bool pack_weights_left(const real *weights, int64_t columns, operand left) {
  return RPI_PACK_WEIGHTS(left, left, weights, columns, left);
}
static bool pack_weights_right(const real *weights, int64_t columns, operand right) {
  return RPI_PACK_WEIGHTS(right, right, weights, columns, right);
}
static bool pack_weights_both(const real *weights, int64_t columns, operand left, operand right) {
  return RPI_PACK_WEIGHTS(both, left, weights, columns, left, right);
}

#else

static bool pack_weights_left(const real *weights, int64_t columns, operand left) {
  (void)weights, (void)columns, (void)left;
  return false;
}
static bool pack_weights_right(const real *weights, int64_t columns, operand right) {
  return pack_weights_left(weights, columns, right);
}
static bool pack_weights_both(const real *weights, int64_t columns, operand left, operand right) {
  (void)right;
  return pack_weights_left(weights, columns, left);
}

#endif

#if defined(RPI_TILES) && defined(RPI_BF16_NATIVE)

/* Weights of one part are rounded while they are in registers, where an instruction does that. */
static bool weighs_parts(const bounds *n) { return n->tiles == 1 && rpi_bf16_native(); }

/* Weights (2) in place of scores, of `count` rows from `row` of a strip on, added up as weigh_strip
 * does, and as rows of a left operand; whether all are finite. */
RPI_BF16_TARGET RPI_NOINLINE bool weigh_parts_NATIVE(int64_t row, int64_t count, int64_t columns,
                                                     real *restrict s, real *restrict sum,
                                                     operand left) {
  rpi_register odd = {0};
  for (const int64_t end = row + count; row < end; row++, s += RPI_TILE, sum += RPI_LANES) {
    uint32_t *to = left.at + row * RPI_TILE_SIDE;
    rpi_register all = {0};
    for (int64_t c = 0; c < columns; c += TILES_INNER, to += TILES_PART) {
      const rpi_register first = rpi_exp2_lanes(rpi_load(s + c));
      const rpi_register second = rpi_exp2_lanes(rpi_load(s + c + RPI_LANES));
      rpi_store(s + c, first);
      rpi_store(s + c + RPI_LANES, second);
      tiles_store(to, (rpi_words)rpi_words_across(true, first, second));
      all = all + first + second;
    }
    odd += all * 0;
    rpi_store(sum, rpi_load(sum) + all);
  }
  return rpi_total(odd) == 0;
}

/* Rows of one strip of a left operand of one part are zeros. */
static void clear_parts(int64_t row, int64_t end, int64_t columns, operand left) {
  if (row >= end) return;
  for (int64_t c = 0; c < columns; c += TILES_INNER, left.at += TILES_PART) {
    memset(left.at + row * RPI_TILE_SIDE, 0,
           (size_t)((end - row) * RPI_TILE_SIDE) * sizeof *left.at);
  }
}

#else

static bool weighs_parts(const bounds *n) {
  (void)n;
  return false;
}

static bool weigh_parts_NATIVE(int64_t row, int64_t count, int64_t columns, real *s, real *sum,
                               operand left) {
  (void)row, (void)count, (void)columns, (void)s, (void)sum, (void)left;
  return false;
}

static void clear_parts(int64_t row, int64_t end, int64_t columns, operand left) {
  (void)row, (void)end, (void)columns, (void)left;
}

#endif

/* Rows of a block, with those that fill its operands' last strip. */
static int64_t block_rows(const bounds *n) {
  return n->tiles ? rpi_round_up(n->block, RPI_TILED_ROWS) : n->block;
}

/* Of the rows of one strip those before `first` and from `end` on do not see a tile. */
static void clear_beside(int64_t first, int64_t end, real *weights) {
  memset(weights, 0, (size_t)(first * RPI_TILE) * sizeof(real));
  memset(weights + end * RPI_TILE, 0, (size_t)((RPI_TILED_ROWS - end) * RPI_TILE) * sizeof(real));
}

#endif
