/* SPDX-License-Identifier: Apache-2.0
 *
 * operands.h: operands of attention's products by tiles of bf16 (parts.h), where there are such.
 *
 * An operand is packed whole: strips of 32 lines (rows of the left one, columns of the right one),
 * all of inner, three parts, or one where numbers are rounded. Where some number has no parts, or
 * there are no tiles, packing says so, and the product is computed strip by strip, as it is
 * everywhere else.
 */
#ifndef RPI_OPERANDS_H
#define RPI_OPERANDS_H

#include "base/memory.h"
#include "ops/strips.h"

#define RPI_TILED_ROWS 32 /* lines of a strip */

/* Rows of numbers that a product can read. */
typedef struct dense {
  const real *data;
  int64_t stride;
} dense;

/* Row r of some, and those after it. */
static dense rows_from(const dense *rows, int64_t r) {
  return (dense){rows->data + r * rows->stride, rows->stride};
}

/* `lines` by `inner` numbers in parts. */
typedef struct operand {
  uint32_t *at;
  int64_t strip; /* words from one to the next */
  int parts;
} operand;

/* How numbers lie from which an operand is packed: rows of memory are lines of a left one, or inner
 * of a right one, or of a left one. */
enum { ROWS_ARE_LINES, ROWS_ARE_INNER, ROWS_ARE_INNER_OF_LEFT };

/* Not a number where x is infinite, or rounded so. */
RPI_INLINE rpi_register oddness(rpi_register x) { return x * (real)(1 + 1.0 / 256) * 0; }

/* Are numbers, so many side by side in each row, those that bf16 has? What is not finite is no less
 * a part than any number, but may meet zeros that are to hide it. */
RPI_NOINLINE bool all_have_one_part(dense from, int64_t rows, int64_t width) {
  rpi_register odd[4] = {{0}}; /* one would wait for itself */
  for (int64_t r = 0; r < rows; r++) {
    const real *const row = from.data + r * from.stride;
    int64_t c = 0;
    for (; c + 4 * RPI_LANES <= width; c += 4 * RPI_LANES) {
      RPI_UNROLL(4)
      for (int i = 0; i < 4; i++) odd[i] += oddness(rpi_load(row + c + i * RPI_LANES));
    }
    for (; c < width; c += RPI_LANES) odd[0] += oddness(rpi_load_left(row + c, width - c));
  }
  return rpi_total((odd[0] + odd[1]) + (odd[2] + odd[3])) == 0;
}

#ifdef RPI_TILES

#include "ops/parts.h"

_Static_assert(RPI_LANES % RPI_TILE_SIDE == 0, "rows of whole vectors are rows of whole tiles");
_Static_assert(RPI_TILED_ROWS == TILES_SIDE, "lines of a strip");

static operand take_operand(rpi_arena *arena, int parts, int64_t lines, int64_t inner) {
  const int64_t strip = rpi_divide_up(inner, TILES_INNER) * parts * TILES_PART;
  const int64_t strips = rpi_divide_up(lines, TILES_SIDE);
  return (operand){rpi_arena_take(arena, strips * strip, sizeof(uint32_t)), strip, parts};
}

/* One like it from a line, and from inner on: whole strips, and whole steps. */
static operand operand_from(operand whole, int64_t line, int64_t inner) {
  whole.at += line / TILES_SIDE * whole.strip + inner / TILES_INNER * whole.parts * TILES_PART;
  return whole;
}

/* All its numbers are 0. */
static void clear_operand(operand to, int64_t lines) {
  const int64_t words = rpi_divide_up(lines, TILES_SIDE) * to.strip;
  memset(to.at, 0, (size_t)words * sizeof *to.at);
}

static bool pack_strips(tiles_source source, int64_t lines, int64_t inner, operand to) {
  bool whole = true;
  for (int64_t line = 0; line < lines; line += TILES_SIDE, to.at += to.strip) {
    whole &= tiles_pack_strip(source, line, rpi_min(TILES_SIDE, lines - line), inner, to.at);
  }
  return whole;
}

/* False where a number has no parts: of three; one part every number has. */
static bool pack_operand(dense from, int how, int64_t lines, int64_t inner, operand to) {
  return pack_strips((tiles_source){.at = from.data,
                                    .stride = from.stride,
                                    .parts = to.parts,
                                    .along = how == ROWS_ARE_LINES,
                                    .turned = how == ROWS_ARE_INNER_OF_LEFT,
                                    .factor = 1},
                     lines, inner, to);
}

/* The same where zeros are met that stand for what is hidden, or not there: what is not finite must
 * not meet them. (Scores of keys meet none: each is a pair's own.) */
static bool pack_met_operand(dense from, int how, int64_t lines, int64_t inner, operand to) {
  if (!pack_operand(from, how, lines, inner, to)) return false;
  if (to.parts != 1) return true;
  return how == ROWS_ARE_LINES ? all_have_one_part(from, lines, inner)
                               : all_have_one_part(from, inner, lines);
}

/* Rows that run along inner, times a factor, as a right operand of one part. */
static void pack_rounded_lines(dense from, int64_t lines, int64_t inner, real factor, operand to) {
  pack_strips((tiles_source){.at = from.data,
                             .stride = from.stride,
                             .parts = 1,
                             .along = true,
                             .turned = true,
                             .factor = factor},
              lines, inner, to);
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

/* c = left . right, whose rows and columns are rounded up to 16: c has room for them. Or c += that,
 * of so many rows alone, and so it is summed by itself but where rows and columns are whole tiles
 * of one part. (Sums of three parts that began with c would be rounded, at its size, twelve times
 * for every 64 of inner; those of one part are twice.) */
static void multiply_operands(operand left, int64_t rows, operand right, int64_t columns,
                              int64_t inner, bool add, real *c, int64_t c_stride) {
  const int64_t steps = rpi_divide_up(inner, TILES_INNER);
  const tiles_sum_fn(*const sums_of)[2] = left.parts == 1 ? tiles_rounded_sums : tiles_sums;
  _Alignas(64) real sums[TILES_SIDE * TILES_SIDE];
  for (int64_t row = 0; row < rows; row += TILES_SIDE, left.at += left.strip) {
    const uint32_t *at = right.at;
    for (int64_t column = 0; column < columns; column += TILES_SIDE, at += right.strip) {
      real *const to = c + row * c_stride + column;
      const int64_t high = rpi_min(rows - row, TILES_SIDE);
      const int64_t wide = rpi_min(columns - column, TILES_SIDE);
      const bool apart = add && (left.parts != 1 || (high | wide) % RPI_TILE_SIDE != 0);
      const tiles_product product = {.a = left.at,
                                     .b = at,
                                     .steps = steps,
                                     .start = add && !apart ? to : NULL,
                                     .start_stride = c_stride,
                                     .c = apart ? sums : to,
                                     .c_stride = apart ? TILES_SIDE : c_stride};
      sums_of[high > RPI_TILE_SIDE][wide > RPI_TILE_SIDE](&product);
      if (apart) add_block(sums, high, wide, to, c_stride);
    }
  }
}

#else

static void tiles_begin(void) {}
static void tiles_end(void) {}

static int tiles_parts_in(int precision) {
  (void)precision;
  return 0;
}

static operand take_operand(rpi_arena *arena, int parts, int64_t lines, int64_t inner) {
  (void)arena, (void)parts, (void)lines, (void)inner;
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

static bool pack_met_operand(dense from, int how, int64_t lines, int64_t inner, operand to) {
  return pack_operand(from, how, lines, inner, to);
}

static void pack_rounded_lines(dense from, int64_t lines, int64_t inner, real factor, operand to) {
  (void)from, (void)lines, (void)inner, (void)factor, (void)to;
}

static void multiply_operands(operand left, int64_t rows, operand right, int64_t columns,
                              int64_t inner, bool add, real *c, int64_t c_stride) {
  (void)left, (void)rows, (void)right, (void)columns, (void)inner, (void)add, (void)c;
  (void)c_stride;
}

#endif

static operand *take_operands(rpi_arena *arena, int parts, int64_t count, int64_t lines,
                              int64_t inner) {
  operand *const list = rpi_arena_take(arena, count, sizeof *list);
  for (int64_t i = 0; i < count; i++) {
    const operand one = take_operand(arena, parts, lines, inner);
    if (list && !arena->failed) list[i] = one;
  }
  return list;
}

#endif
