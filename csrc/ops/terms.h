/* SPDX-License-Identifier: Apache-2.0
 *
 * terms.h: terms that are a function of the distance (band.h), and the distances that a block of
 * queries and a run of keys can meet.
 *
 * Sums. Several terms of one kind, and the numbers of bias terms, are one function of d:
 * their vectors and numbers are added when a window is packed (packed_term.h), and cost nothing
 * after.
 *
 * Windows. Only the columns that a block and a run of keys can reach are made, so
 * no buffer here grows with the clip distance: an unclipped table costs rows +
 * keys columns a block, never T.
 */
#ifndef RPI_TERMS_H
#define RPI_TERMS_H

#include <string.h>

#include "ops/ops.h"
#include "ops/tile.h"

/* Is the relation of a pair to be looked up, or a function of their distance? */
static bool is_looked_up(const rp_relation *r) {
  return r->table && (r->map != RP_MAP_BAND || r->query_positions);
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
  t->present = true;
  t->ends = t->ends || p.clip;
}

/* Where the columns lie: a clipped part is constant up to -left, and from right on; the
 * others are from -left to right. */
static void term_close(term *t) {
  const int count = t->vector_count + t->number_count;
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

/* Do all pairs that are seen lie in the tail, or in the head? */
static bool window_is_tail(const window *w) { return w->tail && w->columns == 1 && !w->head; }
static bool window_is_head(const window *w) { return w->head && w->columns == 0; }

static int64_t window_stride(int64_t columns) {
  return rpi_round_up(columns, RPI_LANES) + 2 * RPI_LANES;
}

/* What a strip of queries meets in a tile of keys. */
enum { MEETS_NOTHING, MEETS_HEAD, MEETS_BAND, MEETS_TAIL };

/* nearest, farthest: with pairs that are hidden, which may be taken for others. */
static int window_meets(const window *w, int64_t nearest, int64_t farthest) {
  if (window_empty(w)) return MEETS_NOTHING;
  if (window_is_head(w)) return MEETS_HEAD;
  if (window_is_tail(w)) return MEETS_TAIL;
  if (farthest < w->first) return w->head ? MEETS_HEAD : MEETS_NOTHING;
  const int64_t last = w->first + w->columns - 1;
  if (w->tail && nearest >= last) return MEETS_TAIL;
  return nearest > last ? MEETS_NOTHING : MEETS_BAND;
}

#endif
