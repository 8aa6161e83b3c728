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

#include "ops/attention.h"

static const rpi_lane lane_numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* All ones in the lanes whose number has this bit. */
RPI_INLINE rpi_lanes lanes_with(rpi_lane bit) {
  rpi_lanes lanes;
  memcpy(&lanes, lane_numbers, sizeof lanes);
  return (lanes & bit) != 0;
}

/* to[c * to_step], lane l = that of row c + (l / unit) % 4 * direction of `from`, for c from 0 to
 * rows - 1; low and high: the lanes whose l / unit is odd, and is 2 or 3. Rows are `step` numbers
 * apart. Each is loaded once: of four in registers one is new. */
RPI_INLINE void skew_round(const real *from, int64_t step, int64_t rows, int direction,
                           rpi_lanes low, rpi_lanes high, real *to, int64_t to_step) {
  const int64_t ahead = direction * step;
  rpi_register x0 = rpi_load(from), x1 = rpi_load(from + ahead);
  rpi_register x2 = rpi_load(from + 2 * ahead), x3 = rpi_load(from + 3 * ahead);
  const real *next = direction > 0 ? from + 4 * step : from + step;
  for (int64_t c = 0; c < rows; c++, to += to_step, next += step) {
    rpi_store(to, rpi_blend(high, rpi_blend(low, x3, x2), rpi_blend(low, x1, x0)));
    if (direction > 0) {
      x0 = x1, x1 = x2, x2 = x3;
      x3 = rpi_load(next);
    } else {
      x3 = x2, x2 = x1, x1 = x0;
      x0 = rpi_load(next);
    }
  }
}

#define RPI_SKEW_PAD 16 /* rows that either direction may read beyond what is there */

/* to[c] = lane l of from[c + l], for c from 0 to rows - 1: rows of LANES, those of `from` step
 * apart and readable for RPI_SKEW_PAD rows more. direction -1: of from[c - l], and as many rows
 * before. between: [rows + PAD][LANES]. */
RPI_INLINE void skew(const real *from, int64_t step, int64_t rows, int direction, real *between,
                     real *to, int64_t to_stride) {
  const rpi_lanes bit0 = lanes_with(1), bit1 = lanes_with(2);
  const rpi_lanes bit2 = lanes_with(4), bit3 = lanes_with(8);
  /* the second round reads up to 12 rows further, and every fourth row at a time */
  const int64_t more = 12, before = direction < 0 ? more : 0;
  skew_round(from - before * step, step, rows + more, direction, bit0, bit1, between, RPI_LANES);
  for (int64_t c = 0; c < rpi_min(rows, 4); c++) {
    skew_round(between + (c + before) * RPI_LANES, 4 * RPI_LANES, (rows - c + 3) / 4, direction,
               bit2, bit3, to + c * to_stride, 4 * to_stride);
  }
}

RPI_NOINLINE void skew_ahead(const real *from, int64_t step, int64_t rows, real *between, real *to,
                             int64_t to_stride) {
  skew(from, step, rows, 1, between, to, to_stride);
}

RPI_NOINLINE void skew_back(const real *from, int64_t rows, real *between, real *to,
                            int64_t to_stride) {
  skew(from, RPI_LANES, rows, -1, between, to, to_stride);
}

/* Of a tile of keys: what the last block of queries has computed of the distances that the next
 * one meets as well. */
typedef struct kept_lines {
  int64_t first, count; /* distances */
} kept_lines;

#define RPI_KEPT_LINES (RPI_TILE - 1)

/* Scratch for one tile: rows of distances are up to a block and a tile. */
typedef struct skew_scratch {
  packed_term table; /* the window of a block and a chunk of keys, with runs always */
  window w;
  real *products;       /* [1 + lines + 1 + PAD][TILE]: before, the columns' lines, beyond; and with
                           tiles room for what fills a strip on both sides */
  real *rows, *between; /* [PAD + block + LANES + PAD][LANES] */
  real *kept;           /* [tiles of a chunk of keys][KEPT_LINES][TILE] */
  kept_lines *kept_of;
  operand left, right; /* of the products, on the way back: lines, and lines as inner */
  real *words;         /* the same, one after the other */
} skew_scratch;

static void take_skew(rpi_arena *arena, const bounds *n, bool backward, skew_scratch *w) {
  const int64_t block = n->block, columns = n->query_columns, width = n->width;
  const int64_t real_bytes = sizeof(real), most = rpi_min(columns, block + RPI_TILE);
  const int tiles = n->tiles, how = n->how;
  const int64_t more = tiles ? RPI_TILED_ROWS : 0; /* lines, on either side */
  const int64_t padded = rpi_round_up(columns, RPI_LANES);
  const int64_t rows = block + RPI_LANES + 2 * RPI_SKEW_PAD;
  w->table.copy = rpi_arena_take(arena, (columns + 1) * width, real_bytes);
  w->table.numbers = rpi_arena_take(arena, padded, real_bytes);
  w->table.head_index = -1;
  take_runs(arena, columns, width, &w->table);
  const int64_t beyond = rpi_max(more, RPI_SKEW_PAD);
  w->products = rpi_arena_take(arena, (more + most + 2 + beyond) * RPI_TILE, real_bytes);
  if (w->products) w->products += more * RPI_TILE;
  w->rows = rpi_arena_take(arena, rows * RPI_LANES, real_bytes);
  w->between = rpi_arena_take(arena, rows * RPI_LANES, real_bytes);
  const int64_t key_tiles = rpi_divide_up(n->keys, RPI_TILE);
  w->kept = rpi_arena_take(arena, key_tiles * RPI_KEPT_LINES, RPI_TILE * real_bytes);
  w->kept_of = rpi_arena_take(arena, key_tiles, sizeof *w->kept_of);
  if (tiles) {
    w->table.line_parts = take_operand(arena, tiles, columns, width);
    w->table.head_parts = take_operand(arena, tiles, 1, width);
  }
  if (how != RPI_NUMBERS) {
    w->table.line_words = take_word_rows(arena, how, 1 + columns, width);
    if (backward) w->table.down_words = take_word_lines(arena, how, columns, width);
    if (backward) w->words = take_word_rows(arena, how, 2 + most, RPI_TILE);
  }
  if (!tiles || !backward) return;
  w->table.turned_parts = take_operand(arena, tiles, width, columns);
  w->left = take_operand(arena, tiles, more + most + more, RPI_TILE);
  w->right = take_operand(arena, tiles, RPI_TILE, more + most + more);
}

/* The columns of the block's window that a tile meets: begin to end - 1, their lines likewise, and
 * whether it meets what lies before and beyond. distance: from the first query to the tile's first
 * key. */
typedef struct skew_range {
  int64_t begin, end;
  int64_t first, lines;
  bool head, tail;
} skew_range;

static skew_range skew_range_of(const skew_scratch *s, int64_t distance, int64_t rows) {
  const window *const w = &s->w;
  const rpi_lane *const line = s->table.runs.line;
  const int64_t nearest = distance - (rows - 1) - w->first;
  const int64_t farthest = distance + RPI_TILE - w->first;
  /* a tail is the last column: someone beyond it needs it */
  const int64_t most = w->tail ? w->columns - 1 : w->columns;
  const int64_t begin = rpi_min(rpi_max(nearest, 0), rpi_max(most, 0));
  const int64_t end = rpi_max(rpi_min(farthest, w->columns), begin);
  const int64_t first = begin < end ? line[begin] : 0;
  return (skew_range){.begin = begin,
                      .end = end,
                      .first = first,
                      .lines = begin < end ? line[end - 1] + 1 - first : 0,
                      .head = w->head && nearest < 0,
                      .tail = w->tail && farthest > w->columns};
}

/* The line of w->products for a distance, counted from the window's first. */
static int64_t skew_line(const skew_scratch *w, const skew_range *range, int64_t column) {
  if (column < range->begin) return 0;
  if (column >= range->end) return range->lines + 1;
  return w->table.runs.line[column] - range->first + 1;
}

/* Lines that a strip of an operand, or a word, has before those of a range. */
static int64_t skew_before(const skew_range *range, int64_t lines) { return range->first % lines; }

/* Does each distance of a block and a tile have a line of its own? */
static bool lines_apart(const skew_scratch *w, const skew_range *range, int64_t rows) {
  return range->end - range->begin == rows + RPI_TILE - 1 && !is_folded(&w->table);
}

/* Other keys, or other tables. */
static void forget_lines(skew_scratch *w, int64_t keys) {
  memset(w->kept_of, 0, (size_t)rpi_divide_up(keys, RPI_TILE) * sizeof *w->kept_of);
}

/* How many of a range's last lines are kept; of what is kept they are the first. Distances fall
 * from block to block: what a tile has lowest in one block is highest in the next. */
static int64_t lines_kept(const skew_scratch *w, const skew_range *range, int64_t tile) {
  const kept_lines *const kept = &w->kept_of[tile];
  const int64_t begin = w->w.first + range->begin, end = w->w.first + range->end;
  const bool some = kept->first >= begin && kept->first < end && kept->first + kept->count >= end;
  return some ? end - kept->first : 0;
}

/* Not where distances may share lines: in one window they may and in the next not, and kept lines
 * go by distance. */
static void keep_lines(const term *t, skew_scratch *w, const skew_range *range, int64_t tile) {
  if (has_buckets(t)) return;
  const int64_t count = rpi_min(range->lines, RPI_KEPT_LINES);
  w->kept_of[tile] = (kept_lines){.first = w->w.first + range->begin, .count = count};
  memcpy(w->kept + tile * RPI_KEPT_LINES * RPI_TILE, w->products + RPI_TILE,
         (size_t)(count * RPI_TILE) * sizeof(real));
}

/* scores[rows][TILE] = k_j . w(d) for the pairs of a block and tile number `tile` of a chunk.
 * packed: the tile's keys [D][TILE], whose factor the scores take over, in bf16 as words; parts:
 * the same as an operand, or NULL. */
static void skew_scores(const term *t, skew_scratch *w, int64_t distance, int64_t rows,
                        int64_t tile, const real *packed, const operand *parts, const real *zeros,
                        real *scores) {
  const int64_t width = rpi_round_up(t->width, RPI_LANES);
  const skew_range range = skew_range_of(w, distance, rows);
  const int64_t kept = lines_kept(w, &range, tile), lines = range.lines - kept;
  const int how = w->table.how;
  dense table = {w->table.down, width};
  if (how != RPI_NUMBERS) {
    table.stride = inner_stride(how, t->width);
    table.data = w->table.line_words + table.stride;
  }
  const dense own = {table.data + range.first * table.stride, table.stride};
  rpi_product product =
      product_by(how, own, packed, RPI_TILE, t->width, w->products + RPI_TILE, RPI_TILE);
  const bool tiled = parts && w->table.down_fits;
  if (tiled && lines) {
    const int64_t before = skew_before(&range, RPI_TILED_ROWS);
    multiply_operands(operand_from(w->table.line_parts, range.first - before, 0), before + lines,
                      *parts, RPI_TILE, t->width, false, product.c - before * RPI_TILE, RPI_TILE);
  } else {
    rpi_block_product(RPI_START_ROW, lines, RPI_TILE / RPI_LANES, product, zeros);
  }
  memcpy(product.c + lines * RPI_TILE, w->kept + tile * RPI_KEPT_LINES * RPI_TILE,
         (size_t)(kept * RPI_TILE) * sizeof(real));
  keep_lines(t, w, &range, tile);
  real *const beyond = w->products + (range.lines + 1) * RPI_TILE;
  if (range.head && tiled) {
    _Alignas(64) real line[RPI_TILED_ROWS * RPI_TILE]; /* a product is of whole tiles */
    multiply_operands(w->table.head_parts, 1, *parts, RPI_TILE, t->width, false, line, RPI_TILE);
    memcpy(w->products, line, RPI_TILE * sizeof(real));
  } else if (range.head) {
    product.a = table.data - table.stride;
    product.c = w->products;
    rpi_block_product(RPI_START_ROW, 1, RPI_TILE / RPI_LANES, product, zeros);
  } else {
    memset(w->products, 0, RPI_TILE * sizeof(real));
  }
  if (range.tail) memcpy(beyond, beyond - RPI_TILE, RPI_TILE * sizeof(real));
  else memset(beyond, 0, RPI_TILE * sizeof(real));
  const int64_t lowest = distance - (rows - 1) - w->w.first; /* of the last query, key 0 */
  const int64_t nearest = skew_line(w, &range, lowest);
  if (nearest == skew_line(w, &range, lowest + rows + RPI_TILE - 2)) {
    const real *const line = w->products + nearest * RPI_TILE;
    for (int64_t r = 0; r < rows; r++) memcpy(scores + r * RPI_TILE, line, RPI_TILE * sizeof(real));
    return;
  }
  const bool apart = lines_apart(w, &range, rows);
  for (int v = 0; v < RPI_TILE; v += RPI_LANES) {
    real *const last = scores + (rows - 1) * RPI_TILE + v; /* distances fall from query to query */
    if (apart) {
      skew_ahead(w->products + (1 + v) * RPI_TILE + v, RPI_TILE, rows, w->between, last, -RPI_TILE);
      continue;
    }
    for (int64_t c = 0; c < rows + RPI_SKEW_PAD; c++) {
      const real *const line = w->products + skew_line(w, &range, lowest + v + c) * RPI_TILE;
      rpi_store(w->rows + c * RPI_LANES, rpi_load(line + v));
    }
    skew_ahead(w->rows, RPI_LANES, rows, w->between, last, -RPI_TILE);
  }
}

/* Zeros in a vector of each of so many lines. */
static void clear_lanes(real *line, int64_t lines) {
  for (int64_t c = 0; c < lines; c++) rpi_store(line + c * RPI_TILE, (rpi_register){0});
}

/* The way back: w->products[line] = sum of ds over the pairs of that line, key by key. What is met
 * before and beyond is there where the range says so. */
static skew_range skew_collect(skew_scratch *w, int64_t distance, int64_t rows, const real *ds) {
  const skew_range range = skew_range_of(w, distance, rows);
  const int64_t lowest = distance - (rows - 1) - w->w.first;
  const bool apart = lines_apart(w, &range, rows);
  if (!apart) memset(w->products, 0, (size_t)((range.lines + 2) * RPI_TILE) * sizeof(real));
  real *const from = w->rows + RPI_SKEW_PAD * RPI_LANES;
  const size_t padding = RPI_SKEW_PAD * RPI_LANES * sizeof(real);
  for (int v = 0; v < RPI_TILE; v += RPI_LANES) {
    memset(w->rows, 0, padding);
    for (int64_t c = 0; c < rows; c++) {
      rpi_store(from + c * RPI_LANES, rpi_load(ds + (rows - 1 - c) * RPI_TILE + v));
    }
    memset(from + rows * RPI_LANES, 0, padding);
    const int64_t count = rows + RPI_LANES - 1;
    if (apart) {
      real *const to = w->products + RPI_TILE + v;
      skew_back(from, count, w->between, to + v * RPI_TILE, RPI_TILE);
      clear_lanes(to, v);
      clear_lanes(to + (v + count) * RPI_TILE, RPI_TILE - RPI_LANES - v);
      continue;
    }
    skew_back(from, count, w->between, w->rows, RPI_LANES);
    for (int64_t c = 0; c < count; c++) {
      real *const line = w->products + skew_line(w, &range, lowest + v + c) * RPI_TILE + v;
      rpi_store(line, rpi_load(line) + rpi_load(w->rows + c * RPI_LANES));
    }
  }
  return range;
}

#endif
