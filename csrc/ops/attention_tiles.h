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
static void tiles_round_weights(const real *from, uint32_t *left, uint32_t *right) {
  const int64_t below = TILES_SIDE / 2 * RPI_TILE;
  for (int half = 0; half < 2; half++) {
    if (left) {
      tiles_split_in(1, RPI_TILE_SIDE, from + half * below, RPI_TILE, RPI_TILE_SIDE, 0,
                     left + half * RPI_TILE_WORDS);
    }
    if (right) {
      tiles_split_in(1, RPI_TILE_SIDE, from + half * RPI_TILE_SIDE, RPI_TILE, below, 0,
                     right + half * RPI_TILE_WORDS);
    }
  }
}

RPI_INLINE bool pack_weights(const bool is_left, const bool is_right, const real *weights,
                             int64_t columns, operand left, operand right) {
  rpi_register odd = {0};
  const int parts = is_left ? left.parts : right.parts;
  if (parts == 1 && !all_have_one_part((dense){weights, RPI_TILE}, TILES_SIDE, columns)) {
    return false;
  }
  for (int64_t half = 0; half < columns / TILES_INNER; half++) {
    const real *const from = weights + half * TILES_INNER;
    uint32_t *const to_left = is_left ? left.at + half * parts * TILES_PART : NULL;
    uint32_t *const to_right = is_right ? right.at + half * right.strip : NULL;
    if (parts == 1) tiles_round_weights(from, to_left, to_right);
    else odd += tiles_split_weights(is_left, is_right, from, to_left, to_right);
  }
  return rpi_total(odd) == 0;
}

/* A strip of 32 rows of weights on a tile, so many columns, as the left operand, the right one, or
 * both. */
RPI_NOINLINE bool pack_weights_left(const real *weights, int64_t columns, operand left) {
  return pack_weights(true, false, weights, columns, left, (operand){0});
}
RPI_NOINLINE bool pack_weights_right(const real *weights, int64_t columns, operand right) {
  return pack_weights(false, true, weights, columns, (operand){0}, right);
}
RPI_NOINLINE bool pack_weights_both(const real *weights, int64_t columns, operand left,
                                    operand right) {
  return pack_weights(true, true, weights, columns, left, right);
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
