/* SPDX-License-Identifier: Apache-2.0
 *
 * band.h: a relation term on one block of queries and one run of keys.
 *
 * With d = j - position(i), the score of the key term depends on j only through d:
 *
 *   bias      ______________                  clip: constant beyond both ends
 *            |              \____/\__________ none: zero beyond both ends
 *   d      -inf     first ............ last
 *                   |<--- columns --->|
 *
 * So a block of queries needs one number per (query, column): E = q . tableᵀ, a
 * small product. A row of E, with a vector of padding on both sides,
 *
 *   [ 0 ... 0 | E_first ... E_last | t ... t ]     t = E_last (clip) or 0 (none)
 *
 * gives the bias of any LANES keys in a row by one load at a clamped offset: no
 * gather and no mask. The same offset serves the opposite direction: weights are
 * *stored* into a row of buckets, one key per column, and what falls beyond the
 * ends lands in the padding.
 *
 * The ends. With clip, every d before the first column meets one relation (the head), and
 * every d from the last column on another (the tail). A strip of queries wholly there is
 * plain attention with one constant per row: for scores a start of the accumulators, for
 * values and for dq a sum of weights times that relation's vector. Strips across an end
 * collect per row what they have beyond it, in vectors, and of vectors across it in the padding.
 *
 * Nothing is subtracted from the table. (Subtracting row 0 from all of it would make the head
 * free, and did; with a row 0 ten times the others gradients of queries were off by four
 * times what the plain formula is.) With k = 16 the head's relation costs one dot
 * product a query instead of a third vector of columns.
 */
#ifndef RPI_BAND_H
#define RPI_BAND_H

#include "ops/packed_term.h"

/* The dot products of rows with rows, times the factor. */
RPI_NOINLINE void dot_rows(dense x, dense y, int64_t rows, int64_t width, real factor, real *to) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const dense a = rows_from(&x, r), b = rows_from(&y, r);
    rpi_register sum[4] = {{0}};
    int64_t c = 0;
    for (; c + RPI_LANES <= width; c += RPI_LANES) {
      RPI_UNROLL(4) for (int n = 0; n < 4; n++) {
        sum[n] += rpi_load(a.data + n * a.stride + c) * rpi_load(b.data + n * b.stride + c);
      }
    }
    real total[4];
    rpi_totals(sum, total);
    for (; c < width; c++) {
      for (int n = 0; n < 4; n++) total[n] += a.data[n * a.stride + c] * b.data[n * b.stride + c];
    }
    for (int n = 0; n < 4; n++) to[r + n] = factor * total[n];
  }
  for (; r < rows; r++) to[r] = factor * dot(rows_from(&x, r).data, rows_from(&y, r).data, width);
}

/* A term without vectors gives every query the same numbers: its E is one row. */
static int64_t band_stride(const term *t, const window *w) {
  return t->vector_count ? window_stride(w->columns) : 0;
}

/* Where a block of queries lies before a run of keys. */
typedef struct block_place {
  int64_t distance; /* from the first query to the first key */
  int64_t rows, keys;
} block_place;

/* E of a block. */
typedef struct band_e {
  real *at;             /* [block][window], rows band_stride apart */
  real *head, *tail;    /* [block]: what is before the first column, and from the last on */
  unsigned char *known; /* BAND_...: which of both hold from another run of keys; NULL: none ever */
} band_e;

enum { BAND_HEAD = 1, BAND_TAIL = 2 };

/* Is an end of E there already? From now on it is. */
static bool known_end(const band_e *e, unsigned char end) {
  const bool known = e->known && (*e->known & end);
  if (e->known) *e->known |= end;
  return known;
}

static void forget_tail(const band_e *e) {
  if (e->known) *e->known &= (unsigned char)~BAND_TAIL;
}

/* What rows meet of one vector, times the factor: as words that is what the columns beside it have,
 * or a pair's score would hang on where its block ends. */
static void vector_scores(const packed_term *packed, const real *vector, int64_t width, dense x,
                          int64_t rows, real factor, real *to) {
  if (!packed->rounded) {
    dot_rows(x, (dense){vector, 0}, rows, width, factor, to);
    return;
  }
  const int64_t padded = rpi_round_up(width, RPI_LANES);
  const dense scaled = {packed->end, width};
  real *const words = packed->end + padded;
  for (int64_t c = 0; c < width; c++) packed->end[c] = factor * vector[c];
  if (packed->how == RPI_NUMBERS) {
    for (int64_t c = width; c < padded; c++) packed->end[c] = 0;
    round_numbers(packed->end, padded);
    dot_rounded_rows(x, (dense){packed->end, 0}, rows, width, 1, to);
    return;
  }
  word_rows(packed->how, scaled, 1, width, words);
  dot_words(packed->how, x, rows, words, width, to);
}

/* E of a window of one column, without its padding: a dot product a row. right: all pairs lie in
 * the tail. */
static void column_scores(const term *t, const window *w, const packed_term *packed,
                          const real *numbers, dense x, int64_t rows, real factor, bool right,
                          const band_e *to) {
  const int64_t stride = window_stride(1), padded_width = rpi_round_up(t->width, RPI_LANES);
  const real *const vector = packed->down + packed_column(packed, w) * padded_width;
  if (!w->tail) forget_tail(to);
  if (!w->tail || !known_end(to, BAND_TAIL)) {
    vector_scores(packed, vector, t->width, x, rows, factor, to->tail);
    for (int64_t r = 0; numbers && r < rows; r++) to->tail[r] += numbers[0];
  }
  for (int64_t r = 0; !right && r < rows; r++) to->at[r * stride + RPI_LANES] = to->tail[r];
}

/* E of `count` rows from i on, in the columns that they can meet: of a wide window no more than the
 * keys are. Where no columns share vectors, E holds the numbers already. */
static void strip_scores(const term *t, const window *w, const packed_term *packed,
                         const real *numbers, dense x, const operand *parts, const block_place *at,
                         const real *zeros, int64_t i, int64_t count, real *e) {
  const int64_t columns = w->columns, stride = window_stride(columns);
  const int64_t shift = packed_column(packed, w);
  const int64_t whole = parts ? RPI_TILED_ROWS : RPI_LANES; /* columns that begin a product */
  const runs *const lines = &packed->runs;
  const int64_t nearest = at->distance - (i + count - 1) - w->first;
  const int64_t farthest = at->distance - i + rpi_round_up(at->keys, RPI_TILE) - w->first;
  /* strips wholly in the tail need the last column */
  const int64_t begin = rpi_min(rpi_max(nearest, 0), columns - 1) & -whole;
  const int64_t end = rpi_round_up(rpi_min(rpi_max(farthest, 0), columns), RPI_LANES);
  if (begin >= end) return;
  const rpi_start start = {.row = zeros};
  const real *const across = packed->how == RPI_NUMBERS ? packed->across : packed->across_words;
  const dense own = {x.data + i * x.stride, x.stride};
  rpi_product product =
      product_by(packed->how, own, across + shift + begin, across_stride(lines->count), t->width,
                 e + i * stride + RPI_LANES + begin, stride);
  if (!is_folded(packed)) {
    if (parts) {
      multiply_operands(operand_from(*parts, i, 0), count,
                        operand_from(packed->across_parts, shift + begin, 0), end - begin, t->width,
                        numbers != NULL, product.c, stride);
      return;
    }
    rpi_strip_product(numbers ? RPI_START_LOAD : RPI_START_ROW, count, (end - begin) / RPI_LANES,
                      &product, &start);
    return;
  }
  const int64_t first = lines->line[begin] & -whole;
  const int64_t last = rpi_round_up(lines->line[end - 1] + 1, RPI_LANES);
  product.b = across + first;
  product.c = packed->strip;
  product.c_stride = rpi_round_up(columns, RPI_LANES) + RPI_LANES;
  if (parts) {
    multiply_operands(operand_from(*parts, i, 0), count,
                      operand_from(packed->across_parts, first, 0), last - first, t->width, false,
                      product.c, product.c_stride);
  } else {
    rpi_strip_product(RPI_START_ROW, count, (last - first) / RPI_LANES, &product, &start);
  }
  runs_spread(lines, count, packed->strip, product.c_stride, first, begin, end, numbers,
              e + i * stride + RPI_LANES, stride);
}

/* The ends of E, and where pairs lie across them its padding. */
static void close_scores(const term *t, const window *w, const packed_term *packed, bool numbers,
                         dense x, int64_t block, real factor, bool across, const band_e *to) {
  const int64_t rows = t->vector_count ? block : 1, stride = window_stride(w->columns);
  const bool head = w->head && !(t->vector_count && known_end(to, BAND_HEAD));
  if (head && t->vector_count) {
    const int64_t padded_width = rpi_round_up(t->width, RPI_LANES);
    vector_scores(packed, packed->down - padded_width, t->width, x, rows, factor, to->head);
  }
  for (int64_t r = 0; head && numbers && r < rows; r++) {
    to->head[r] = (t->vector_count ? to->head[r] : 0) + packed->head_number;
  }
  /* the last column, of a strip that does not come near it maybe nothing */
  if (across && w->columns != 1) forget_tail(to);
  for (int64_t r = 0; across && r < rows; r++) {
    real *const row = to->at + r * stride, *const end = row + RPI_LANES + w->columns;
    const real before = w->head ? to->head[r] : 0, beyond = w->tail ? end[-1] : (real)0;
    for (int l = 0; l < RPI_LANES; l++) row[l] = before;
    for (int l = 0; l < RPI_LANES; l++) end[l] = beyond;
    to->tail[r] = beyond;
  }
  for (int64_t r = rows; r < block; r++) { /* one row for all */
    to->head[r] = w->head ? to->head[0] : 0;
    to->tail[r] = w->tail ? to->tail[0] : 0;
  }
}

/* E = x . vectorsᵀ + numbers for a block of rows, padded as drawn above, strip by strip. x: as
 * products read it, numbers or words. zeros: rows zeros. parts: the rows as a left operand, or
 * NULL. E is the first to meet the rows, six at once, a number at a time: no processor foresees
 * that, so they are asked for two strips before (from the last cache E took twice its time). */
static void band_scores(const term *t, const window *w, const packed_term *packed, dense x,
                        const operand *parts, const block_place *at, real factor, const real *zeros,
                        const band_e *to) {
  const int64_t columns = w->columns, rows = t->vector_count ? at->rows : 1;
  const bool adds = t->number_count || t->position_bias;
  const real *const numbers = adds ? packed->numbers + packed_column(packed, w) : NULL;
  /* Do all pairs, those that are hidden too, lie on one side? So it is in most blocks of long N. */
  const bool right = w->tail && at->distance - (at->rows - 1) >= w->first + columns - 1;
  const bool left = at->distance + rpi_round_up(at->keys, RPI_TILE) <= w->first;
  if (columns == 1 && t->vector_count) {
    column_scores(t, w, packed, numbers, x, rows, factor, right, to);
  } else if (columns) {
    const operand *const left_parts = packed->across_fits ? parts : NULL;
    const int64_t step = left_parts ? RPI_TILED_ROWS : RPI_STRIP;
    const size_t bytes = (size_t)rpi_round_up(columns, RPI_LANES) * sizeof(real);
    for (int64_t r = 0; numbers && !is_folded(packed) && r < rows; r++) {
      memcpy(to->at + r * window_stride(columns) + RPI_LANES, numbers, bytes);
    }
    for (int64_t i = 0, asked = 0; t->vector_count && i < rows; i += step) {
      for (; !left_parts && asked < rpi_min(i + 3 * step, rows); asked++) {
        rpi_prefetch_row(x.data + asked * x.stride, 0, inner_of(packed->how, t->width));
      }
      strip_scores(t, w, packed, numbers, x, left_parts, at, zeros, i, rpi_min(step, rows - i),
                   to->at);
    }
  }
  const bool across = !(left || right) || !t->vector_count;
  close_scores(t, w, packed, adds, x, at->rows, factor, across, to);
}

/* A vector of each row of a strip into its bucket; to: that of the first, from row to row one less
 * far. */
RPI_INLINE void put_weights(int64_t rows, const real *from, bool adds, int64_t stride, real *to) {
  RPI_UNROLL(8) for (int64_t r = 0; r < rows; r++, to += stride - 1) {
    const rpi_register weights = rpi_load(from + r * RPI_TILE);
    rpi_store(to, adds ? rpi_load(to) + weights : weights);
  }
}
/* ... and into the sum of its row. */
RPI_INLINE void sum_weights(int64_t rows, const real *from, real *sums) {
  RPI_UNROLL(8) for (int64_t r = 0; r < rows; r++, sums += RPI_LANES) {
    rpi_store(sums, rpi_load(sums) + rpi_load(from + r * RPI_TILE));
  }
}

/* band_store, whose rows are known where it is called. Vector by vector, since most lie wholly
 * beyond an end, or not at all, for all rows of a strip. */
RPI_INLINE void band_store_rows(const window *w, int64_t rows, int64_t columns, const real *x,
                                int64_t offset, bool adds, real *buckets, real *tail, real *head) {
  const int64_t stride = window_stride(w->columns);
  const int64_t end = RPI_LANES + w->columns - (tail ? 1 : 0); /* from here on wholly beyond */
  for (int64_t v = 0; v < columns; v += RPI_LANES) {
    const int64_t highest = offset + v, lowest = highest - (rows - 1);
    if (lowest > 0 && highest < end) {
      put_weights(rows, x + v, adds, stride, buckets + highest);
    } else if (highest <= 0 || lowest >= end) {
      real *const sums = highest <= 0 ? head : tail;
      if (sums) sum_weights(rows, x + v, sums);
    } else {
      for (int64_t r = 0; r < rows; r++) {
        const int64_t at = highest - r;
        const real *const from = x + r * RPI_TILE + v;
        real *const sums = at <= 0 ? head : tail;
        if (at > 0 && at < end) put_weights(1, from, adds, stride, buckets + r * stride + at);
        else if (sums) sum_weights(1, from, sums + r * RPI_LANES);
      }
    }
  }
}

/* to[c] += the sum of x[r][c + r - (STRIP - 1)] over the rows of a strip and a tile: by distance.
 * From row to row the sums so far go up by a lane; BEYOND take what leaves the tile, and zeros up
 * to their ends, which a row of buckets has room for. */
RPI_NOINLINE void add_diagonals(const real *x, real *to) {
  enum { VECTORS = RPI_TILE / RPI_LANES };
  enum { BEYOND = (RPI_STRIP - 1 + RPI_LANES - 1) / RPI_LANES };
  rpi_register sums[VECTORS + BEYOND] = {{0}};
  for (int64_t r = 0; r < RPI_STRIP; r++, x += RPI_TILE) {
    RPI_UNROLL(40) for (int v = VECTORS + BEYOND - 1; v > 0; v--) {
      sums[v] = RPI_UP(sums[v - 1], sums[v]);
    }
    sums[0] = RPI_UP((rpi_register){0}, sums[0]);
    RPI_UNROLL(40) for (int v = 0; v < VECTORS; v++) sums[v] += rpi_load(x + v * RPI_LANES);
  }
  RPI_UNROLL(40) for (int v = 0; v < VECTORS + BEYOND; v++) {
    rpi_store(to + v * RPI_LANES, rpi_load(to + v * RPI_LANES) + sums[v]);
  }
}

/* Stores a strip of weights x[rows][RPI_TILE], so many columns of it, into the rows of buckets, or
 * (adds) adds it to what is there, whose rows are summed in the end: where is then no matter. A key
 * has a place of its own in its row, also beside the columns, where a vector lies across an end.
 * Vectors wholly in the tail are added to the vectors tail[rows], those wholly before the first
 * column to head[rows], each where given. offset: as rpi_start's. */
RPI_NOINLINE void band_store(const window *w, int64_t rows, int64_t columns, const real *x,
                             int64_t offset, bool adds, real *buckets, real *tail, real *head) {
  const int64_t lowest = offset - (RPI_STRIP - 1), end = RPI_LANES + w->columns - (tail ? 1 : 0);
  const bool inside = lowest >= RPI_LANES && offset + RPI_TILE <= end;
  if (adds && inside && rows == RPI_STRIP && columns == RPI_TILE) {
    add_diagonals(x, buckets + lowest);
    return;
  }
  if (rows == RPI_STRIP) {
    band_store_rows(w, RPI_STRIP, columns, x, offset, adds, buckets, tail, head);
    return;
  }
  for (int64_t r = 0; r < rows; r++) {
    band_store_rows(w, 1, columns, x + r * RPI_TILE, offset - r, adds,
                    buckets + r * window_stride(w->columns), tail ? tail + r * RPI_LANES : NULL,
                    head ? head + r * RPI_LANES : NULL);
  }
}

/* How buckets meet the rows of a table: as numbers, or as operands or words that both are packed
 * as; with room for one strip of buckets. */
typedef struct bucket_way {
  bool tiled, worded;
  operand parts;
  real *words;
} bucket_way;

static bucket_way bucket_way_of(const packed_term *table, const window *w, bool tiles,
                                operand parts, real *words) {
  const bool several = w->columns > 1, tiled = several && tiles && table->down_fits;
  return (bucket_way){.tiled = tiled,
                      .worded = several && table->how != RPI_NUMBERS && table->words_meet,
                      .parts = parts,
                      .words = words};
}

/* c += buckets . down for `count` rows of a block from i on, and the columns that they can have
 * met. product: of the first row and of the columns first to first + inner - 1, or where there are
 * runs of their lines, in numbers. False: some bucket has no parts. */
RPI_INLINE bool band_product_some(const rpi_product *product, const block_place *at, int64_t i,
                                  int64_t count, int64_t width, const window *w, int64_t first,
                                  const runs *lines, const packed_term *table,
                                  const bucket_way *way) {
  const int64_t whole = way->tiled ? RPI_TILED_ROWS : way->worded ? 2 : 1;
  const int64_t nearest = at->distance - (i + count - 1) - w->first;
  const int64_t farthest = at->distance - i + at->keys - w->first;
  int64_t begin = rpi_min(rpi_max(nearest, first), w->columns - 1) - first;
  int64_t end = rpi_min(rpi_max(farthest, first + 1) - first, product->inner);
  if (lines && begin + first >= 0) begin = lines->line[begin + first] - first;
  if (lines && end + first > 0) end = lines->line[end + first - 1] + 1 - first;
  if (begin >= end) return true;
  const int64_t most = lines ? lines->count - first : product->inner;
  begin &= -whole;
  end = rpi_min(way->tiled ? (end + whole - 1) & -whole : end, most);
  rpi_product strip = *product;
  strip.a += i * product->a_row + begin * product->a_inner;
  strip.b += begin * product->b_stride;
  strip.c += i * product->c_stride;
  strip.inner = end - begin;
  const int64_t column = packed_column(table, w) + begin;
  const dense buckets = {strip.a, strip.a_row};
  if (way->tiled) {
    if (!pack_met_operand(buckets, ROWS_ARE_LINES, count, strip.inner, way->parts)) return false;
    multiply_operands(way->parts, count, operand_from(table->down_parts, 0, column), width,
                      strip.inner, true, strip.c, strip.c_stride);
    return true;
  }
  if (way->worded) {
    const dense words = word_rows(table->how, buckets, count, strip.inner, way->words);
    strip = product_by(table->how, words, table->down_words + inner_of(table->how, column) * width,
                       width, strip.inner, strip.c, strip.c_stride);
  }
  rpi_block_product(RPI_START_LOAD, count, width / RPI_LANES, strip, NULL);
  return true;
}

/* The same whatever is in the buckets: what is not finite row by row, for a bucket of a row where
 * it has no key may be no number. */
RPI_INLINE void band_product_rows(const rpi_product *product, const block_place *at, int64_t i,
                                  int64_t count, int64_t width, const window *w, int64_t first,
                                  const runs *lines, const packed_term *table,
                                  const bucket_way *way) {
  const bucket_way alone = {.tiled = false};
  if (band_product_some(product, at, i, count, width, w, first, lines, table, way)) return;
  for (int64_t row = i; row < i + count; row++) {
    band_product_some(product, at, row, 1, width, w, first, lines, table, &alone);
  }
}

/* Rows that it has at once. */
static int64_t band_step(const bucket_way *way) { return way->tiled ? RPI_TILED_ROWS : RPI_STRIP; }

/* to[r * stride] = the total of row r's sums, and of the bucket's vector. */
static void put_totals(int64_t rows, const real *sums, const real *beside, real *to,
                       int64_t stride) {
  for (int64_t r = 0; r < rows; r += 4) {
    rpi_register four[4];
    real totals[4];
    RPI_UNROLL(4) for (int64_t n = 0; n < 4; n++) {
      const int64_t row = rpi_min(r + n, rows - 1);
      four[n] = rpi_load(sums + row * RPI_LANES) + rpi_load(beside + row * stride);
    }
    rpi_totals(four, totals);
    for (int64_t n = 0; n < rpi_min(4, rows - r); n++) to[(r + n) * stride] = totals[n];
  }
}

/* Puts the tails into the last buckets, and the heads before the first: column -1. */
static void band_finish(const window *w, int64_t rows, real *buckets, const real *tail,
                        const real *head) {
  const int64_t stride = window_stride(w->columns);
  real *const last = buckets + RPI_LANES + w->columns - 1;
  if (w->tail) put_totals(rows, tail, last, last, stride);
  if (w->head) put_totals(rows, head, buckets, buckets + RPI_LANES - 1, stride);
}

#endif
