/* SPDX-License-Identifier: Apache-2.0
 *
 * skew.h: "key meets relation" on a band, for one block of queries and one tile of keys.
 *
 * With G[c][j] = k_j . w_c, c counting distances, query i needs from key j the column
 * c = j - position(i): a diagonal of G.
 *
 *            j  0 1 2 3                        j  0 1 2 3
 *     c  0      a . . .                  i  3     a b c d      i counts down: the next
 *        1      . b . .      skewed         2     . . . .      query is one distance
 *        2      . . c .      ----->         1     . . . .      nearer to every key
 *        3      . . . d
 *
 * So lane l of a vector moves up by l rows. Four rows at a time, and then every fourth: two
 * rounds of blends, eight loads a vector, no gather. Backward takes the same way back.
 */
#ifndef RPI_SKEW_H
#define RPI_SKEW_H

#include "ops/band.h"

static const rpi_lane lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* All ones in the lanes whose number has this bit. */
RPI_INLINE rpi_lanes lanes_with(rpi_lane bit) {
  rpi_lanes lanes;
  memcpy(&lanes, lane_numbers, sizeof lanes);
  return (lanes & bit) != 0;
}

/* Lane l of four rows, `step` rows apart: from row (l / unit) % 4. */
RPI_INLINE rpi_register blend4(const real *row, int64_t step, rpi_lanes low, rpi_lanes high) {
  const rpi_register first = rpi_blend(low, rpi_load(row + step), rpi_load(row));
  const rpi_register second = rpi_blend(low, rpi_load(row + 3 * step), rpi_load(row + 2 * step));
  return rpi_blend(high, second, first);
}

#define RPI_SKEW_PAD 16 /* rows that either direction may read beyond what is there */

/* to[c] = lane l of from[c + l], for c from 0 to rows - 1: rows of LANES, `from` readable for
 * RPI_SKEW_PAD rows more. direction -1: of from[c - l], and as many rows before. between:
 * as large as from. */
RPI_NOINLINE void skew(const real *from, int64_t rows, int direction, real *between, real *to,
                       int64_t to_stride) {
  const rpi_lanes bit0 = lanes_with(1), bit1 = lanes_with(2);
  const rpi_lanes bit2 = lanes_with(4), bit3 = lanes_with(8);
  const int64_t step = direction * RPI_LANES;
  /* the second round reads up to 12 rows further */
  const int64_t before = direction < 0 ? RPI_SKEW_PAD - 4 : 0;
  for (int64_t c = 0; c < rows + RPI_SKEW_PAD - 4; c++) {
    const real *const row = from + (c - before) * RPI_LANES;
    rpi_store(between + c * RPI_LANES, blend4(row, step, bit0, bit1));
  }
  for (int64_t c = 0; c < rows; c++) {
    const real *const row = between + (c + before) * RPI_LANES;
    rpi_store(to + c * to_stride, blend4(row, 4 * step, bit2, bit3));
  }
}

/* Scratch for one tile: rows of distances are up to a block and a tile. */
typedef struct skew_scratch {
  packed_term table; /* the window of a block and a chunk of keys */
  window w;
  real *products;       /* [1 + columns + 1][TILE]: before, the columns, beyond */
  real *rows, *between; /* [PAD + block + LANES + PAD][LANES] */
} skew_scratch;

static void take_skew(rpi_arena *arena, int64_t block, int64_t columns, int64_t width,
                      skew_scratch *w) {
  const int64_t real_bytes = sizeof(real), most = rpi_min(columns, block + RPI_TILE);
  const int64_t padded = rpi_round_up(columns, RPI_LANES);
  const int64_t rows = block + RPI_LANES + 2 * RPI_SKEW_PAD;
  w->table.copy = rpi_arena_take(arena, (columns + 1) * width, real_bytes);
  w->table.numbers = rpi_arena_take(arena, padded + 1, real_bytes);
  w->table.head_index = -1;
  w->products = rpi_arena_take(arena, (most + 2) * RPI_TILE, real_bytes);
  w->rows = rpi_arena_take(arena, rows * RPI_LANES, real_bytes);
  w->between = rpi_arena_take(arena, rows * RPI_LANES, real_bytes);
}

/* The columns of the block's window that a tile meets: begin to end - 1, and whether it
 * meets what lies before and beyond. distance: from the first query to the tile's first key. */
typedef struct skew_range {
  int64_t begin, end;
  bool head, tail;
} skew_range;

static skew_range skew_range_of(const window *w, int64_t distance, int64_t rows) {
  const int64_t nearest = distance - (rows - 1) - w->first;
  const int64_t farthest = distance + RPI_TILE - w->first;
  /* a tail is the last column: someone beyond it needs it */
  const int64_t most = w->tail ? w->columns - 1 : w->columns;
  const int64_t begin = rpi_min(rpi_max(nearest, 0), rpi_max(most, 0));
  return (skew_range){.begin = begin,
                      .end = rpi_max(rpi_min(farthest, w->columns), begin),
                      .head = w->head && nearest < 0,
                      .tail = w->tail && farthest > w->columns};
}

/* The line of w->products for a distance, counted from the window's first. */
static int64_t skew_line(const skew_range *range, int64_t column) {
  return rpi_min(rpi_max(column - range->begin + 1, 0), range->end - range->begin + 1);
}

/* scores[rows][TILE] = k_j . w(d) for the pairs of a block and a tile. packed: the tile's keys
 * [D][TILE], whose factor the scores take over. */
static void skew_scores(const term *t, skew_scratch *w, int64_t distance, int64_t rows,
                        const real *packed, const real *zeros, real *scores) {
  const int64_t width = rpi_round_up(t->width, RPI_LANES);
  const skew_range range = skew_range_of(&w->w, distance, rows);
  const int64_t columns = range.end - range.begin;
  rpi_product product = {.a = w->table.down + range.begin * width,
                         .a_row = width,
                         .a_inner = 1,
                         .b = packed,
                         .b_stride = RPI_TILE,
                         .c = w->products + RPI_TILE,
                         .c_stride = RPI_TILE,
                         .inner = t->width};
  rpi_block_product(RPI_START_ROW, columns, RPI_TILE / RPI_LANES, product, zeros);
  real *const beyond = w->products + (columns + 1) * RPI_TILE;
  if (range.head) {
    product.a = w->table.down - width;
    product.c = w->products;
    rpi_block_product(RPI_START_ROW, 1, RPI_TILE / RPI_LANES, product, zeros);
  } else {
    memset(w->products, 0, RPI_TILE * sizeof(real));
  }
  if (range.tail) memcpy(beyond, beyond - RPI_TILE, RPI_TILE * sizeof(real));
  else memset(beyond, 0, RPI_TILE * sizeof(real));
  const int64_t lowest = distance - (rows - 1) - w->w.first; /* of the last query, key 0 */
  if (skew_line(&range, lowest) == skew_line(&range, lowest + rows + RPI_TILE - 2)) {
    const real *const line = w->products + skew_line(&range, lowest) * RPI_TILE;
    for (int64_t r = 0; r < rows; r++) memcpy(scores + r * RPI_TILE, line, RPI_TILE * sizeof(real));
    return;
  }
  for (int v = 0; v < RPI_TILE; v += RPI_LANES) {
    for (int64_t c = 0; c < rows + RPI_SKEW_PAD; c++) {
      const real *const line = w->products + skew_line(&range, lowest + v + c) * RPI_TILE;
      rpi_store(w->rows + c * RPI_LANES, rpi_load(line + v));
    }
    /* distances fall from query to query */
    skew(w->rows, rows, 1, w->between, scores + (rows - 1) * RPI_TILE + v, -RPI_TILE);
  }
}

/* The way back: w->products[line] = sum of ds over the pairs of that line, key by key. */
static skew_range skew_collect(skew_scratch *w, int64_t distance, int64_t rows, const real *ds) {
  const skew_range range = skew_range_of(&w->w, distance, rows);
  const int64_t columns = range.end - range.begin;
  const int64_t lowest = distance - (rows - 1) - w->w.first;
  memset(w->products, 0, (size_t)((columns + 2) * RPI_TILE) * sizeof(real));
  real *const from = w->rows + RPI_SKEW_PAD * RPI_LANES;
  const size_t padding = RPI_SKEW_PAD * RPI_LANES * sizeof(real);
  for (int v = 0; v < RPI_TILE; v += RPI_LANES) {
    memset(w->rows, 0, padding);
    for (int64_t c = 0; c < rows; c++) {
      rpi_store(from + c * RPI_LANES, rpi_load(ds + (rows - 1 - c) * RPI_TILE + v));
    }
    memset(from + rows * RPI_LANES, 0, padding);
    const int64_t count = rows + RPI_LANES - 1;
    skew(from, count, -1, w->between, w->rows, RPI_LANES);
    for (int64_t c = 0; c < count; c++) {
      real *const line = w->products + skew_line(&range, lowest + v + c) * RPI_TILE + v;
      rpi_store(line, rpi_load(line) + rpi_load(w->rows + c * RPI_LANES));
    }
  }
  return range;
}

#endif
