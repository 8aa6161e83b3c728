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
 * One relation fewer. With clip, subtracting table row 0 from every row changes no
 * softmax (each row of scores moves by one constant), and makes the far left plain
 * attention: its bias is 0. What is left are T - 1 columns (32 for k = 16: two
 * vectors, not three). For the values the same subtraction is undone by adding row
 * 0 once, because weights sum to 1. It is done where some visible pair lies beyond the
 * left end: else row 0 is a column like any other, and a row that nobody reaches gets a
 * gradient of exactly zero.
 *
 * The tail. With clip, every d >= last shares the last column. A strip of queries wholly
 * there is plain attention again, with one constant per row and the last relation's vector
 * added to every key (value): see tail_rows. What strips across the band have in the tail
 * is collected per row, in vectors, and put into the last bucket at the end; so is, where
 * backward asks for it, what they have before the first column (head).
 *
 * Windows. Only the columns that a block and a run of keys can reach are made, so
 * no buffer here grows with the clip distance: an unclipped table costs rows +
 * keys columns a block, never T.
 */
#ifndef RPI_BAND_H
#define RPI_BAND_H

#include "ops/exp2.h"
#include "ops/ops.h"
#include "ops/tile.h"

#define RPI_TILE 64 /* keys in a tile */

/* One term, for one head. */
typedef struct term {
  const real *table; /* row of distance d at table + (d + left) * stride; NULL: no term */
  int64_t stride, width;
  int64_t left, first, last; /* distances that have a column: first to last */
  bool clip, shifted;        /* shifted: row 0 is subtracted from every row */
} term;

/* nearest: the smallest distance any visible pair of the call has. */
static term term_of(const rp_relation *relation, int64_t head, int64_t width, int64_t nearest) {
  const bool clip = relation->beyond == RP_BEYOND_CLIP;
  /* k = 0, clipped: every distance is row 0, none has a column. */
  const bool one = clip && relation->left + relation->right == 0;
  const bool shifted = one || (clip && nearest < -relation->left);
  return (term){
      .table = relation->table ? relation->table + head * relation->head_stride : NULL,
      .stride = relation->row_stride,
      .width = width,
      .left = relation->left,
      .first = one       ? INT64_MAX
               : shifted ? 1 - relation->left
                         : -relation->left,
      .last = relation->right,
      .clip = clip,
      .shifted = shifted,
  };
}

/* The columns that a block can reach. */
typedef struct window {
  int64_t first, columns; /* distance of column 0; 0 columns: nothing to do */
  bool tail;              /* the last column stands for every distance from there on */
} window;

static window window_of(const term *t, int64_t nearest, int64_t farthest) {
  if (!t->table || farthest < nearest || t->last < t->first) return (window){0};
  const bool tail = t->clip && farthest >= t->last;
  const int64_t first =
      tail ? rpi_min(t->last, rpi_max(t->first, nearest)) : rpi_max(t->first, nearest);
  const int64_t end = rpi_min(t->last, farthest) + 1;
  if (end <= first) return (window){0};
  return (window){.first = first, .columns = end - first, .tail = tail};
}

static int64_t window_stride(int64_t columns) {
  return rpi_round_up(columns, RPI_LANES) + 2 * RPI_LANES;
}

/* What a strip of queries meets in a tile of keys. */
enum { MEETS_NOTHING, MEETS_BAND, MEETS_TAIL };

static int window_meets(const window *w, int64_t nearest, int64_t farthest) {
  if (w->columns == 0 || farthest < w->first) return MEETS_NOTHING;
  const int64_t last = w->first + w->columns - 1;
  if (w->tail && nearest >= last) return MEETS_TAIL;
  return nearest > last ? MEETS_NOTHING : MEETS_BAND;
}

/* The rows of a window, packed for both products; kept from block to block while
 * the window stays. across: [width][columns, padded]; down: [columns][width, padded]. */
typedef struct packed_term {
  const real *table;
  window w;
  real *across, *down;
} packed_term;

static void pack_window(const term *t, const window *w, real factor, int64_t padded_width,
                        packed_term *packed) {
  if (packed->table == t->table && packed->w.first == w->first && packed->w.columns == w->columns) {
    return;
  }
  packed->table = t->table;
  packed->w = *w;
  const real *const from = t->table + (w->first + t->left) * t->stride;
  for (int64_t column = 0; column < w->columns; column++) {
    real *const to = packed->down + column * padded_width;
    const real *const row = from + column * t->stride;
    for (int64_t c = 0; c < t->width; c++) to[c] = row[c] - (t->shifted ? t->table[c] : (real)0);
    for (int64_t c = t->width; c < padded_width; c++) to[c] = 0;
  }
  if (w->columns == 1) return; /* band_scores reads it as it is */
  const int64_t padded = rpi_round_up(w->columns, RPI_LANES);
  rpi_pack_transposed(packed->down, padded_width, w->columns, t->width, factor, packed->across,
                      padded, padded);
}

RPI_INLINE real sum_lanes(const real *lanes) {
  real sum = 0;
  _Pragma("omp simd reduction(+ : sum)") for (int l = 0; l < RPI_LANES; l++) sum += lanes[l];
  return sum;
}

/* One vector of sums, whatever the width: GCC's own reduction over a width it does not
 * know spends more on its tails than on 64 numbers. */
RPI_INLINE real dot(const real *restrict x, const real *restrict y, int64_t width) {
  rpi_register sum = {0};
  int64_t c = 0;
  for (; c + RPI_LANES <= width; c += RPI_LANES) sum += rpi_load(x + c) * rpi_load(y + c);
  real total = sum_lanes((const real *)&sum);
  for (; c < width; c++) total += x[c] * y[c];
  return total;
}

/* E = x . tableᵀ for a block of rows, padded as drawn above. zeros: rows zeros. */
static void band_scores(const packed_term *packed, const real *x, int64_t x_stride, int64_t rows,
                        int64_t width, real factor, const real *zeros, real *e) {
  const int64_t columns = packed->w.columns, stride = window_stride(columns);
  const int64_t padded = rpi_round_up(columns, RPI_LANES);
  if (columns == 1) { /* most blocks right of the band: half of all work at long N */
    for (int64_t r = 0; r < rows; r++) {
      const real score = factor * dot(x + r * x_stride, packed->down, width);
      real *const row = e + r * stride;
      for (int l = 0; l < RPI_LANES; l++) row[l] = 0;
      row[RPI_LANES] = score;
      for (int l = 1; l <= RPI_LANES; l++) row[RPI_LANES + l] = packed->w.tail ? score : (real)0;
    }
    return;
  }
  const rpi_product product = {.a = x,
                               .a_row = x_stride,
                               .a_inner = 1,
                               .b = packed->across,
                               .b_stride = padded,
                               .c = e + RPI_LANES,
                               .c_stride = stride,
                               .inner = width};
  rpi_block_product(RPI_START_ROW, rows, padded / RPI_LANES, product, zeros);
  for (int64_t r = 0; r < rows; r++) {
    real *const row = e + r * stride, *const end = row + RPI_LANES + columns;
    const real beyond = packed->w.tail ? end[-1] : (real)0;
    for (int l = 0; l < RPI_LANES; l++) row[l] = 0;
    for (int l = 0; l < RPI_LANES; l++) end[l] = beyond;
  }
}

/* Zeros, then ones: a load at LANES - n has n zeros, then ones. */
static const real band_step[2 * RPI_LANES + 1] = {
#define RPI_ONE(l) [RPI_LANES + (l)] = 1
    RPI_ONE(0),  RPI_ONE(1),  RPI_ONE(2),
#if RPI_LANES >= 4
    RPI_ONE(3),  RPI_ONE(4),
#endif
#if RPI_LANES >= 8
    RPI_ONE(5),  RPI_ONE(6),  RPI_ONE(7),  RPI_ONE(8),
#endif
#if RPI_LANES >= 16
    RPI_ONE(9),  RPI_ONE(10), RPI_ONE(11), RPI_ONE(12),
    RPI_ONE(13), RPI_ONE(14), RPI_ONE(15), RPI_ONE(16),
#endif
};

/* Stores a strip of weights x[rows][RPI_TILE] into the rows of buckets, adds what
 * belongs to the tail to tail[rows][RPI_LANES], and where head is given what lies
 * before the first column to head[rows][RPI_LANES]. offset: as rpi_start's. */
RPI_NOINLINE void band_store(const window *w, int64_t rows, const real *restrict x, int64_t offset,
                             real *restrict buckets, real *restrict tail, real *restrict head) {
  const int64_t stride = window_stride(w->columns), last = RPI_LANES + w->columns;
  for (int64_t r = 0; r < rows; r++) {
    real *const row = buckets + r * stride, *const end = tail + r * RPI_LANES;
    rpi_register after = rpi_load(end), before = {0};
    _Pragma("GCC unroll 4") for (int v = 0; v < RPI_TILE; v += RPI_LANES) {
      const int64_t at = rpi_min(rpi_max(offset - r + v, 0), last);
      const rpi_register weight = rpi_load(x + r * RPI_TILE + v);
      rpi_store(row + at, weight);
      /* lane l is in the tail from column at + l - LANES = columns - 1 on */
      after += weight * rpi_load(band_step + rpi_max(at - w->columns + 1, 0));
      if (head) before += weight - weight * rpi_load(band_step + rpi_min(at, RPI_LANES));
    }
    if (w->tail) rpi_store(end, after);
    if (head) {
      real *const begin = head + r * RPI_LANES;
      rpi_store(begin, rpi_load(begin) + before);
    }
  }
}

/* Puts the tails into the last buckets: they are complete then. */
static void band_finish(const window *w, int64_t rows, real *buckets, const real *tail) {
  if (!w->tail) return;
  const int64_t stride = window_stride(w->columns);
  for (int64_t r = 0; r < rows; r++) {
    buckets[r * stride + RPI_LANES + w->columns - 1] = sum_lanes(tail + r * RPI_LANES);
  }
}

#endif
