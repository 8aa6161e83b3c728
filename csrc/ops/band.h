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
 * collect per row, in vectors, what they have beyond it.
 *
 * Nothing is subtracted from the table. (Subtracting row 0 from all of it would make the head
 * free, and did; with a row 0 ten times the others gradients of queries were off by four
 * times what the plain formula is.) With k = 16 the head's relation costs one dot
 * product a query instead of a third vector of columns.
 *
 * Sums. Several terms of one kind, and the numbers of bias terms, are one function of d:
 * their vectors and numbers are added when a window is packed, and cost nothing after.
 *
 * Windows. Only the columns that a block and a run of keys can reach are made, so
 * no buffer here grows with the clip distance: an unclipped table costs rows +
 * keys columns a block, never T.
 */
#ifndef RPI_BAND_H
#define RPI_BAND_H

#include "ops/attention_words.h"
#include "ops/ops.h"
#include "ops/runs.h"

/* One vector of sums, whatever the width: GCC's own reduction over a width it does not
 * know spends more on its tails than on 64 numbers. */
RPI_INLINE real dot(const real *restrict x, const real *restrict y, int64_t width) {
  rpi_register sum = {0};
  int64_t c = 0;
  for (; c + RPI_LANES <= width; c += RPI_LANES) sum += rpi_load(x + c) * rpi_load(y + c);
  real total = rpi_total(sum);
  for (; c < width; c++) total += x[c] * y[c];
  return total;
}

/* The dot products of rows with one vector, times the factor. */
RPI_NOINLINE void dot_rows(const real *x, int64_t x_stride, int64_t rows, const real *vector,
                           int64_t width, real factor, real *to) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, x += 4 * x_stride) {
    rpi_register sum[4] = {{0}};
    int64_t c = 0;
    for (; c + RPI_LANES <= width; c += RPI_LANES) {
      RPI_UNROLL(4) for (int n = 0; n < 4; n++) {
        sum[n] += rpi_load(x + n * x_stride + c) * rpi_load(vector + c);
      }
    }
    real total[4];
    rpi_totals(sum, total);
    for (; c < width; c++) {
      for (int n = 0; n < 4; n++) total[n] += x[n * x_stride + c] * vector[c];
    }
    for (int n = 0; n < 4; n++) to[r + n] = factor * total[n];
  }
  for (; r < rows; r++, x += x_stride) to[r] = factor * dot(x, vector, width);
}

/* Is the relation of a pair to be looked up, or a function of their distance? */
static bool is_looked_up(const rp_relation *r) {
  return r->table && (r->map != RP_MAP_BAND || r->query_positions);
}
static int64_t table_rows(const rp_relation *r) {
  return r->map == RP_MAP_BAND && !r->buckets ? r->left + 1 + r->right : r->rows;
}

/* One table on a band, for one head. */
typedef struct band_part {
  const real *table;
  int64_t stride, left, right;
  const int32_t *buckets;
  bool clip;
} band_part;

static band_part part_of(const rp_relation *r, int64_t head) {
  return (band_part){.table = r->table + head * r->head_stride,
                     .stride = r->row_stride,
                     .left = r->left,
                     .right = r->right,
                     .buckets = r->buckets,
                     .clip = r->beyond == RP_BEYOND_CLIP};
}

/* The row for distance d, or -1. */
static int64_t part_row(const band_part *p, int64_t d) {
  if (!p->clip && (d < -p->left || d > p->right)) return -1;
  const int64_t column = rpi_min(rpi_max(d, -p->left), p->right) + p->left;
  return p->buckets ? p->buckets[column] : column;
}

/* A function of d for one head: a vector, the sum of up to RP_TERMS tables, and a number. */
typedef struct term {
  band_part vectors[RP_TERMS], numbers[RP_TERMS];
  int vector_count, number_count;
  int64_t width;
  const real *position_bias; /* meets the vectors, which gives a number more; or NULL */
  int64_t head_index;        /* of this head: what packed_term remembers */
  int64_t first, last;       /* distances that have a column: first to last */
  bool present;
  bool ends; /* clipped: something is there before first and beyond last */
} term;

static void term_add(term *t, const rp_relation *relation, int64_t head, bool vector) {
  if (!relation->table || is_looked_up(relation)) return;
  const band_part p = part_of(relation, head);
  if (vector) t->vectors[t->vector_count++] = p;
  else t->numbers[t->number_count++] = p;
}

/* Where the columns lie: a clipped part is constant up to -left, and from right on; the
 * others are from -left to right. */
static void term_close(term *t) {
  const int count = t->vector_count + t->number_count;
  t->present = count > 0;
  for (int i = 0; i < count; i++) {
    const band_part *const p =
        i < t->vector_count ? t->vectors + i : t->numbers + i - t->vector_count;
    t->ends = t->ends || p->clip;
  }
  t->first = INT64_MAX;
  t->last = INT64_MIN;
  for (int i = 0; i < count; i++) {
    const band_part *const p =
        i < t->vector_count ? t->vectors + i : t->numbers + i - t->vector_count;
    t->first = rpi_min(t->first, p->clip ? 1 - p->left : -p->left);
    t->last = rpi_max(t->last, p->clip || !t->ends ? p->right : p->right + 1);
  }
  t->first = rpi_min(t->first, t->last); /* a table of one row has a column all the same */
}

/* What the queries meet: vectors of key terms, numbers of bias terms. */
static term key_term(const rp_attention *s, int64_t head) {
  term t = {.width = s->D, .head_index = head};
  for (int i = 0; i < RP_TERMS; i++) {
    term_add(&t, &s->key[i], head, true);
    term_add(&t, &s->bias[i], head, false);
  }
  if (t.vector_count && s->position_bias) {
    t.position_bias = s->position_bias + head * s->position_bias_stride;
  }
  term_close(&t);
  return t;
}

/* What the keys meet. */
static term query_term(const rp_attention *s, int64_t head) {
  term t = {.width = s->D, .head_index = head};
  for (int i = 0; i < RP_TERMS; i++) term_add(&t, &s->query[i], head, true);
  term_close(&t);
  return t;
}

static term value_term(const rp_attention *s, int64_t head) {
  term t = {.width = s->Dv, .head_index = head};
  for (int i = 0; i < RP_TERMS; i++) term_add(&t, &s->value[i], head, true);
  term_close(&t);
  return t;
}

/* The vector at distance d, filled up with zeros. */
static void term_vector(const term *t, int64_t d, int64_t padded, real *to) {
  bool empty = true;
  for (int i = 0; i < t->vector_count; i++) {
    const int64_t at = part_row(&t->vectors[i], d);
    if (at < 0) continue;
    const real *const row = t->vectors[i].table + at * t->vectors[i].stride;
    if (empty) memcpy(to, row, (size_t)t->width * sizeof(real));
    else
      for (int64_t c = 0; c < t->width; c++) to[c] += row[c];
    empty = false;
  }
  for (int64_t c = empty ? 0 : t->width; c < padded; c++) to[c] = 0;
}

/* The numbers at distance d, without what position_bias adds. */
static real term_number(const term *t, int64_t d) {
  real sum = 0;
  for (int i = 0; i < t->number_count; i++) {
    const int64_t at = part_row(&t->numbers[i], d);
    if (at >= 0) sum += t->numbers[i].table[at * t->numbers[i].stride];
  }
  return sum;
}

/* The columns that a block can reach. */
typedef struct window {
  int64_t first, columns; /* distance of column 0 */
  bool head;              /* something is met before the first column */
  bool tail;              /* the last column stands for every distance from there on */
} window;

static window window_of(const term *t, int64_t nearest, int64_t farthest) {
  if (!t->present || farthest < nearest) return (window){0};
  const bool head = t->ends && nearest < t->first;
  if (farthest < t->first) return (window){.first = t->first, .head = head};
  const bool tail = t->ends && farthest >= t->last;
  const int64_t first =
      tail ? rpi_min(t->last, rpi_max(t->first, nearest)) : rpi_max(t->first, nearest);
  const int64_t end = rpi_min(t->last, farthest) + 1;
  return (window){.first = first, .columns = rpi_max(end - first, 0), .head = head, .tail = tail};
}

static bool window_empty(const window *w) { return w->columns == 0 && !w->head; }

static int64_t window_stride(int64_t columns) {
  return rpi_round_up(columns, RPI_LANES) + 2 * RPI_LANES;
}

/* What a strip of queries meets in a tile of keys. */
enum { MEETS_NOTHING, MEETS_HEAD, MEETS_BAND, MEETS_TAIL };

static int window_meets(const window *w, int64_t nearest, int64_t farthest) {
  if (window_empty(w)) return MEETS_NOTHING;
  if (farthest < w->first) return w->head ? MEETS_HEAD : MEETS_NOTHING;
  const int64_t last = w->first + w->columns - 1;
  if (w->tail && nearest >= last) return MEETS_TAIL;
  return nearest > last ? MEETS_NOTHING : MEETS_BAND;
}

/* The columns of a window, ready for both products; kept from block to block while the
 * window stays. Without runs it is that of a chunk of queries, and a block's is a part of it. */
typedef struct packed_term {
  int64_t head_index;
  window w;
  runs runs;        /* columns that share a vector: lines are what has a row below */
  const real *down; /* [lines][width, padded]: the table itself, or the copy; row -1: the head */
  real *across;     /* [width][lines], across_stride apart, times the factor */
  real *copy;
  real *numbers;    /* [columns, padded] */
  real head_number; /* of what is before them */
  real *strip;      /* [STRIP][columns, padded, + LANES]: of lines, where there may be runs */
  real *lines;      /* [TILE][width, padded]: the same */
  /* the same as operands, where memory was taken for them: the right one of E and of buckets times
   * lines; as the left one (skew.h) lines, and lines as inner */
  operand across_parts, down_parts, line_parts, turned_parts;
  bool tiled, across_fits, down_fits; /* packed; all numbers have parts, those of down likewise */
  /* The same in bf16 as words (attention_words.h), where memory was taken: across; down, its rows
   * across inner, and along it, from row -1 on. */
  int how;
  real *across_words, *down_words, *line_words;
  real *end;       /* [2][width, padded]: the vector of an end, times a factor, and its words */
  bool words_meet; /* down_words may stand for down: zeros would meet what is infinite */
} packed_term;

/* From one number of the width to the next, of so many lines: an odd number of cache lines where
 * there are many, for a row each 4 KiB, as n = 1024 would have them, lies in one set of the first
 * cache. */
static int64_t across_stride(int64_t lines) {
  const int64_t filled = rpi_divide_up(lines, RPI_LINE);
  return lines <= RPI_TILE ? rpi_round_up(lines, RPI_LANES) : (filled | 1) * RPI_LINE;
}

/* What is packed for a block: `all` is the window of its chunk of queries. */
static window window_to_pack(const packed_term *packed, const window *block, const window *all) {
  return packed->runs.line ? *block : *all;
}

/* A block's window once its columns are packed: begun where a strip of columns begins there. */
static void begin_strip(const packed_term *packed, window *w) {
  const int64_t more = (w->first - packed->w.first) % RPI_TILED_ROWS;
  if (w->columns <= 1) return; /* no strip, and a vector by itself */
  w->first -= more;
  w->columns += more;
}

/* The column of the packed window where a block's begins. */
static int64_t packed_column(const packed_term *packed, const window *w) {
  return w->first - packed->w.first;
}

/* Have columns been put together? */
static bool is_folded(const packed_term *packed) { return packed->runs.count < packed->w.columns; }

/* Do the columns of a window read one table as it lies? */
static bool is_plain(const band_part *p, int count, const window *w) {
  return count == 1 && !p->buckets && w->first - w->head >= -p->left &&
         w->first + w->columns - 1 <= p->right;
}

static bool same_vectors(const term *t, int64_t d, int64_t other) {
  bool same = true;
  for (int i = 0; i < t->vector_count; i++) {
    same &= part_row(&t->vectors[i], d) == part_row(&t->vectors[i], other);
  }
  return same;
}

/* May distances share a vector, but beyond the ends? */
static bool has_buckets(const term *t) {
  bool buckets = false;
  for (int i = 0; i < t->vector_count; i++) buckets |= t->vectors[i].buckets != NULL;
  return buckets;
}

/* Finds the runs of a window, where there are enough of them to be worth it. */
static void find_runs(const term *t, const window *w, int64_t padded, runs *r) {
  const bool buckets = has_buckets(t);
  r->count = 0;
  for (int64_t c = 0; buckets && r->line && c < w->columns; c++) {
    if (c == 0 || !same_vectors(t, w->first + c, w->first + c - 1)) {
      r->begin[r->count++] = (int32_t)c;
    }
    r->line[c] = (rpi_lane)(r->count - 1);
  }
  if (r->count == 0 || r->count > w->columns - w->columns / 8) {
    runs_reset(r, w->columns, padded);
    return;
  }
  for (int64_t c = w->columns; c < padded; c++) r->line[c] = (rpi_lane)(r->count - 1);
}

/* Of more columns than one: that one is a dot product a row. */
static void pack_parts(packed_term *packed, int64_t width, int64_t padded_width) {
  const int64_t lines = packed->runs.count;
  if (packed->across_parts.at && packed->w.columns > 1) {
    const dense across = {packed->across, across_stride(lines)};
    packed->across_fits = pack_operand(across, ROWS_ARE_INNER, rpi_round_up(lines, RPI_LANES),
                                       width, packed->across_parts);
  }
  const dense down = {packed->down, padded_width};
  packed->down_fits = true;
  if (packed->down_parts.at) {
    packed->down_fits &=
        pack_operand(down, ROWS_ARE_INNER, padded_width, lines, packed->down_parts);
  }
  if (packed->line_parts.at) {
    packed->down_fits &= pack_operand(down, ROWS_ARE_LINES, lines, width, packed->line_parts);
  }
  if (packed->turned_parts.at) {
    packed->down_fits &=
        pack_operand(down, ROWS_ARE_INNER_OF_LEFT, padded_width, lines, packed->turned_parts);
  }
}

/* The same as words. */
static void pack_words(packed_term *packed, int64_t width, int64_t padded_width) {
  const int how = packed->how;
  const int64_t lines = packed->runs.count, stride = across_stride(lines);
  const dense across = {packed->across, stride}, down = {packed->down, padded_width};
  if (packed->across_words && packed->w.columns > 1) {
    word_lines(how, across, width, rpi_round_up(lines, RPI_LANES), packed->across_words, stride);
  }
  if (packed->down_words) {
    packed->words_meet = packed->w.columns > 1 && all_have_one_part(down, lines, width);
    word_lines(how, down, lines, padded_width, packed->down_words, padded_width);
  }
  if (packed->line_words) {
    const int64_t head = packed->w.head ? 1 : 0;
    const dense rows = {packed->down - head * padded_width, padded_width};
    word_rows(how, rows, head + lines, width,
              packed->line_words + (1 - head) * inner_stride(how, width));
  }
}

/* factor: of the vectors' products; number_factor: of the numbers; tiles: operands, too. */
static void pack_window(const term *t, const window *w, real factor, real number_factor,
                        int64_t padded_width, bool tiles, packed_term *packed) {
  if (packed->head_index == t->head_index && packed->w.first == w->first &&
      packed->w.columns == w->columns && packed->w.head >= w->head && packed->tiled >= tiles) {
    return;
  }
  packed->head_index = t->head_index;
  packed->tiled = tiles;
  packed->across_fits = packed->down_fits = false;
  packed->w = *w;
  const int64_t padded = rpi_round_up(w->columns, RPI_LANES);
  find_runs(t, w, padded, &packed->runs);
  const bool folded = is_folded(packed);
  const int64_t lines = packed->runs.count, padded_lines = rpi_round_up(lines, RPI_LANES);
  if (t->vector_count) {
    const band_part *const p = t->vectors;
    if (is_plain(p, t->vector_count, w) && p->stride == padded_width && t->width == padded_width) {
      packed->down = p->table + (w->first + p->left) * p->stride;
    } else {
      real *const copy = packed->copy + padded_width;
      for (int64_t line = w->head ? -1 : 0; line < lines; line++) {
        const int64_t column = folded && line >= 0 ? packed->runs.begin[line] : line;
        term_vector(t, w->first + column, padded_width, copy + line * padded_width);
      }
      packed->down = copy;
    }
    if (packed->across && w->columns > 1) {
      rpi_pack_transposed(packed->down, padded_width, lines, t->width, factor, packed->across,
                          across_stride(lines), padded_lines);
    }
    if (tiles) pack_parts(packed, t->width, padded_width);
    if (packed->how != RPI_NUMBERS) pack_words(packed, t->width, padded_width);
  }
  if (!t->number_count && !t->position_bias) return;
  if (!t->vector_count && is_plain(t->numbers, t->number_count, w)) {
    const band_part *const p = t->numbers;
    const real *const from = p->table + (w->first + p->left) * p->stride;
    for (int64_t c = 0; c < w->columns; c++)
      packed->numbers[c] = number_factor * from[c * p->stride];
  } else {
    for (int64_t c = 0; c < w->columns; c++) {
      packed->numbers[c] = number_factor * term_number(t, w->first + c);
      if (!t->position_bias) continue;
      const int64_t line = folded ? packed->runs.line[c] : c;
      packed->numbers[c] +=
          factor * dot(t->position_bias, packed->down + line * padded_width, t->width);
    }
  }
  for (int64_t c = w->columns; c < padded; c++) packed->numbers[c] = 0;
  if (!w->head) return;
  packed->head_number = number_factor * term_number(t, t->first - 1);
  if (t->position_bias) {
    packed->head_number += factor * dot(t->position_bias, packed->down - padded_width, t->width);
  }
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

static void forget_end(const band_e *e, unsigned char end) {
  if (e->known) *e->known &= (unsigned char)~end;
}

/* What rows meet of one vector, times the factor: as words that is what the columns beside it have,
 * or a pair's score would hang on where its block ends. */
static void vector_scores(const packed_term *packed, const real *vector, int64_t width, dense x,
                          int64_t rows, real factor, real *to) {
  if (packed->how == RPI_NUMBERS) {
    dot_rows(x.data, x.stride, rows, vector, width, factor, to);
    return;
  }
  const dense scaled = {packed->end, width};
  real *const words = packed->end + rpi_round_up(width, RPI_LANES);
  for (int64_t c = 0; c < width; c++) packed->end[c] = factor * vector[c];
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
  if (!w->tail) forget_end(to, BAND_TAIL);
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
  if (across && w->columns != 1) forget_end(to, BAND_TAIL);
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

/* band_store, whose rows are known where it is called. Vector by vector, since most lie wholly in
 * the band, or wholly beyond an end, for all rows of a strip: those are only stored, or only added.
 */
RPI_INLINE void band_store_rows(const window *w, int64_t rows, int64_t columns, const real *x,
                                int64_t offset, bool adds, real *buckets, real *tail, real *head,
                                int64_t sum_stride) {
  const int64_t stride = window_stride(w->columns), last = RPI_LANES + w->columns;
  const int64_t whole = tail ? last - 1 : last; /* wholly beyond, from here on */
  for (int64_t v = 0; v < columns; v += RPI_LANES) {
    const int64_t highest = offset + v, lowest = highest - (rows - 1);
    const real *const from = x + v;
    if (lowest >= RPI_LANES && highest <= whole - RPI_LANES) {
      real *const to = buckets + highest;
      RPI_UNROLL(8) for (int64_t r = 0; r < rows; r++) {
        const rpi_register weight = rpi_load(from + r * RPI_TILE);
        real *const at = to + r * (stride - 1);
        rpi_store(at, adds ? rpi_load(at) + weight : weight);
      }
    } else if (highest <= 0 || lowest >= whole) {
      real *const sum = highest <= 0 ? head : tail;
      if (!sum) continue;
      RPI_UNROLL(8) for (int64_t r = 0; r < rows; r++) {
        rpi_store(sum + r * sum_stride,
                  rpi_load(sum + r * sum_stride) + rpi_load(from + r * RPI_TILE));
      }
    } else {
      RPI_UNROLL(8) for (int64_t r = 0; r < rows; r++) {
        const int64_t at = rpi_clamp(highest - r, 0, last);
        real *const to = buckets + r * stride + at;
        const rpi_register weight = rpi_load(from + r * RPI_TILE);
        rpi_store(to, adds ? rpi_load(to) + weight : weight);
        if (tail && highest > whole - RPI_LANES) {
          real *const sum = tail + r * sum_stride;
          /* lane l is in the tail from column at + l - LANES = w->columns - 1 on */
          rpi_store(sum,
                    rpi_load(sum) + weight * rpi_load(band_step + rpi_max(at - w->columns + 1, 0)));
        }
        if (head && lowest < RPI_LANES) {
          real *const sum = head + r * sum_stride;
          rpi_store(sum, rpi_load(sum) +
                             (weight - weight * rpi_load(band_step + rpi_min(at, RPI_LANES))));
        }
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
 * (adds) adds it to what is there, whose rows are summed in the end: where is then no matter. And
 * adds what lies in the tail to the vectors tail[rows], what lies before the first column to
 * head[rows], each where given and sum_stride apart. offset: as rpi_start's. */
RPI_NOINLINE void band_store(const window *w, int64_t rows, int64_t columns, const real *x,
                             int64_t offset, bool adds, real *buckets, real *tail, real *head,
                             int64_t sum_stride) {
  const int64_t lowest = offset - (RPI_STRIP - 1), end = RPI_LANES + w->columns - (tail ? 1 : 0);
  const bool inside = lowest >= RPI_LANES && offset + RPI_TILE <= end;
  if (adds && inside && rows == RPI_STRIP && columns == RPI_TILE) {
    add_diagonals(x, buckets + lowest);
    return;
  }
  if (rows == RPI_STRIP) {
    band_store_rows(w, RPI_STRIP, columns, x, offset, adds, buckets, tail, head, sum_stride);
    return;
  }
  for (int64_t r = 0; r < rows; r++) {
    band_store_rows(w, 1, columns, x + r * RPI_TILE, offset - r, adds,
                    buckets + r * window_stride(w->columns), tail ? tail + r * sum_stride : NULL,
                    head ? head + r * sum_stride : NULL, sum_stride);
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
                      .worded = several && !tiled && table->how != RPI_NUMBERS && table->words_meet,
                      .parts = parts,
                      .words = words};
}

/* c += buckets . down for a block of rows, by strips and the columns that each can have met.
 * product: of the first row and of the columns first to first + inner - 1, or where there are runs
 * of their lines, in numbers. */
static void band_product(const rpi_product *product, const block_place *at, int64_t width,
                         const window *w, int64_t first, const runs *lines,
                         const packed_term *table, const bucket_way *way) {
  const int64_t step = way->tiled ? RPI_TILED_ROWS : RPI_STRIP;
  const int64_t whole = way->tiled ? RPI_TILED_ROWS : way->worded ? 2 : 1;
  for (int64_t i = 0; i < at->rows; i += step) {
    const int64_t count = rpi_min(step, at->rows - i);
    const int64_t nearest = at->distance - (i + count - 1) - w->first;
    const int64_t farthest = at->distance - i + at->keys - w->first;
    int64_t begin = rpi_min(rpi_max(nearest, first), w->columns - 1) - first;
    int64_t end = rpi_min(rpi_max(farthest, first + 1) - first, product->inner);
    if (lines && begin + first >= 0) begin = lines->line[begin + first] - first;
    if (lines && end + first > 0) end = lines->line[end + first - 1] + 1 - first;
    if (begin >= end) continue;
    const int64_t most = lines ? lines->count - first : product->inner;
    begin &= -whole;
    end = rpi_min((end + whole - 1) & -whole, most);
    rpi_product strip = *product;
    strip.a += i * product->a_row + begin * product->a_inner;
    strip.b += begin * product->b_stride;
    strip.c += i * product->c_stride;
    strip.inner = end - begin;
    const int64_t column = packed_column(table, w) + begin;
    const dense buckets = {strip.a, strip.a_row};
    if (way->tiled && pack_operand(buckets, ROWS_ARE_LINES, count, strip.inner, way->parts)) {
      multiply_operands(way->parts, count, operand_from(table->down_parts, 0, column), width,
                        strip.inner, true, strip.c, strip.c_stride);
      continue;
    }
    if (way->worded) {
      const dense words = word_rows(table->how, buckets, count, strip.inner, way->words);
      strip =
          product_by(table->how, words, table->down_words + inner_of(table->how, column) * width,
                     width, strip.inner, strip.c, strip.c_stride);
    }
    rpi_block_product(RPI_START_LOAD, count, width / RPI_LANES, strip, NULL);
  }
}

/* to[r * stride] = the sum of row r's vector. */
static void put_totals(int64_t rows, const real *sums, real *to, int64_t stride) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4, to += 4 * stride) {
    rpi_register four[4];
    real totals[4];
    RPI_UNROLL(4) for (int n = 0; n < 4; n++) four[n] = rpi_load(sums + (r + n) * RPI_LANES);
    rpi_totals(four, totals);
    RPI_UNROLL(4) for (int n = 0; n < 4; n++) to[n * stride] = totals[n];
  }
  for (; r < rows; r++, to += stride) *to = rpi_total(rpi_load(sums + r * RPI_LANES));
}

/* Puts the tails into the last buckets, and the heads before the first: column -1. */
static void band_finish(const window *w, int64_t rows, real *buckets, const real *tail,
                        const real *head) {
  const int64_t stride = window_stride(w->columns);
  if (w->tail) put_totals(rows, tail, buckets + RPI_LANES + w->columns - 1, stride);
  if (w->head) put_totals(rows, head, buckets + RPI_LANES - 1, stride);
}

#endif
