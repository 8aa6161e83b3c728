/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_tiles.h: the products of attention that are whole blocks of queries by whole tiles of
 * keys, by tiles of bf16 (parts.h), where there are such.
 *
 * An operand is packed whole: strips of 32 lines (rows of the left one, columns of the right one),
 * all of inner, three parts. Where some number has no parts, or there are no tiles, packing says
 * so, and the product is computed strip by strip, as it is everywhere else.
 */
#ifndef RPI_ATTENTION_TILES_H
#define RPI_ATTENTION_TILES_H

#include "ops/attention.h"

/* `lines` by `inner` numbers in parts. */
typedef struct operand {
  uint32_t *at;
  int64_t strip; /* words from one to the next */
} operand;

/* How numbers lie from which an operand is packed: rows of memory are lines of a left one, or inner
 * of a right one, or of a left one. */
enum { ROWS_ARE_LINES, ROWS_ARE_INNER, ROWS_ARE_INNER_OF_LEFT };

#ifdef RPI_TILES

#include "ops/parts.h"

_Static_assert(RPI_LANES % RPI_TILE_SIDE == 0, "rows of whole vectors are rows of whole tiles");
_Static_assert(RPI_TILED_ROWS == TILES_SIDE && RPI_TILE % TILES_INNER == 0, "strips are whole");

static operand take_operand(rpi_arena *arena, int64_t lines, int64_t inner) {
  const int64_t strip = rpi_divide_up(inner, TILES_INNER) * TILES_STEP;
  const int64_t strips = rpi_divide_up(lines, TILES_SIDE);
  return (operand){rpi_arena_take(arena, strips * strip, sizeof(uint32_t)), strip};
}

/* One like it from a line, and from inner on: whole strips, and whole steps. */
static operand operand_from(operand whole, int64_t line, int64_t inner) {
  whole.at += line / TILES_SIDE * whole.strip + inner / TILES_INNER * TILES_STEP;
  return whole;
}

/* All its numbers are 0. */
static void clear_operand(operand to, int64_t lines) {
  const int64_t words = rpi_divide_up(lines, TILES_SIDE) * to.strip;
  memset(to.at, 0, (size_t)words * sizeof *to.at);
}

/* False where a number has no parts. */
static bool pack_operand(dense from, int how, int64_t lines, int64_t inner, operand to) {
  const tiles_source source = {.at = from.data,
                               .stride = from.stride,
                               .along = how == ROWS_ARE_LINES,
                               .turned = how == ROWS_ARE_INNER_OF_LEFT};
  bool whole = true;
  for (int64_t line = 0; line < lines; line += TILES_SIDE, to.at += to.strip) {
    whole &= tiles_pack_strip(source, line, rpi_min(TILES_SIDE, lines - line), inner, to.at);
  }
  return whole;
}

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

RPI_INLINE bool pack_weights(const bool is_left, const bool is_right, const real *weights,
                             operand left, operand right) {
  rpi_register odd = {0};
  for (int64_t half = 0; half < RPI_TILE / TILES_INNER; half++) {
    odd += tiles_split_weights(is_left, is_right, weights + half * TILES_INNER,
                               is_left ? left.at + half * TILES_STEP : NULL,
                               is_right ? right.at + half * right.strip : NULL);
  }
  return rpi_total(odd) == 0;
}

/* A strip of 32 rows of weights on a tile, as the left operand, the right one, or both. */
RPI_NOINLINE bool pack_weights_left(const real *weights, operand left) {
  return pack_weights(true, false, weights, left, (operand){0});
}
RPI_NOINLINE bool pack_weights_right(const real *weights, operand right) {
  return pack_weights(false, true, weights, (operand){0}, right);
}
RPI_NOINLINE bool pack_weights_both(const real *weights, operand left, operand right) {
  return pack_weights(true, true, weights, left, right);
}

/* to += from, rows of one call of the kernel. */
static void add_block(const real *from, int64_t rows, int64_t columns, real *to, int64_t stride) {
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < columns; c += RPI_LANES) {
      real *const at = to + r * stride + c;
      rpi_store(at, rpi_load(at) + rpi_load(from + r * TILES_SIDE + c));
    }
  }
}

/* c = left . right, or c += that. Rows and columns are rounded up to 16: c has room for them. What
 * is added is summed by itself: sums that began with c would be rounded, at its size, twelve times
 * for every 64 of inner. */
static void multiply_operands(operand left, int64_t rows, operand right, int64_t columns,
                              int64_t inner, bool add, real *c, int64_t c_stride) {
  const int64_t steps = rpi_divide_up(inner, TILES_INNER);
  _Alignas(64) real sums[TILES_SIDE * TILES_SIDE];
  for (int64_t row = 0; row < rows; row += TILES_SIDE, left.at += left.strip) {
    const uint32_t *at = right.at;
    for (int64_t column = 0; column < columns; column += TILES_SIDE, at += right.strip) {
      real *const to = c + row * c_stride + column;
      const int64_t high = rpi_min(rows - row, TILES_SIDE);
      const int64_t wide = rpi_min(columns - column, TILES_SIDE);
      const tiles_product product = {.a = left.at,
                                     .b = at,
                                     .steps = steps,
                                     .c = add ? sums : to,
                                     .c_stride = add ? TILES_SIDE : c_stride};
      tiles_sums[high > RPI_TILE_SIDE][wide > RPI_TILE_SIDE](&product);
      if (add) add_block(sums, high, wide, to, c_stride);
    }
  }
}

#else

static void tiles_begin(void) {}
static void tiles_end(void) {}

static operand take_operand(rpi_arena *arena, int64_t lines, int64_t inner) {
  (void)arena, (void)lines, (void)inner;
  return (operand){0};
}

static operand operand_from(operand whole, int64_t line, int64_t inner) {
  (void)line, (void)inner;
  return whole;
}

static void clear_operand(operand to, int64_t lines) { (void)to, (void)lines; }

static bool pack_operand(dense from, int how, int64_t lines, int64_t inner, operand to) {
  (void)from, (void)how, (void)lines, (void)inner, (void)to;
  return false;
}

static bool pack_weights_left(const real *weights, operand left) {
  (void)weights, (void)left;
  return false;
}
static bool pack_weights_right(const real *weights, operand right) {
  return pack_weights_left(weights, right);
}
static bool pack_weights_both(const real *weights, operand left, operand right) {
  (void)right;
  return pack_weights_left(weights, left);
}

static void multiply_operands(operand left, int64_t rows, operand right, int64_t columns,
                              int64_t inner, bool add, real *c, int64_t c_stride) {
  (void)left, (void)rows, (void)right, (void)columns, (void)inner, (void)add, (void)c;
  (void)c_stride;
}

#endif

static operand *take_operands(rpi_arena *arena, int64_t count, int64_t lines, int64_t inner) {
  operand *const list = rpi_arena_take(arena, count, sizeof *list);
  for (int64_t i = 0; i < count; i++) {
    const operand one = take_operand(arena, lines, inner);
    if (list && !arena->failed) list[i] = one;
  }
  return list;
}

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
