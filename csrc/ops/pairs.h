/* SPDX-License-Identifier: Apache-2.0
 *
 * pairs.h: what a score or a weight takes from its own pair (i, j): relations that must be
 * looked up, "key meets relation", softcap, dense masks, dropout.
 *
 * Plain attention and band terms never come here. For a call that has one of these, a strip of
 * queries on a tile of keys that meets any gets an array of additional scores (strip_more), and its
 * weights are collected after the strip that made them (collect_pairs):
 *
 *   looked up (labels, explicit positions, edges), over the rows of a table that are there
 *     key      E[i][r] = q_i . w_r; a score reads E[i][label_ij], and weights are added to a row
 *              of buckets at the same place
 *     bias     the same with one E for all queries
 *     query    G[r][j] = k_j . w_r for the keys of a chunk or tile
 *     value    buckets, and in backward E of dz
 *   query on a band: see skew.h, for a block at a time; or where it moves queries (moves_queries)
 *              nothing
 *
 * Rows of E and of buckets begin with LANES spare columns; the last of them, column -1, is "no
 * relation": zero, and read or written like the others. Which rows of a table are there, and when
 * there are none and pairs are taken one by one, says lookups.h.
 */
#ifndef RPI_PAIRS_H
#define RPI_PAIRS_H

#include "ops/lookups.h"

/* Sums of a table's gradient (table_sums.h): of one function of d, for the distances first to last;
 * none where first > last. Of a term that is looked up: of its rows. numbers: of ds alone, for bias
 * terms and position_bias. Of a long table whose rows may be met in any order, few of many, there
 * are lines of those alone that were added to: others take neither time nor memory. */
typedef struct table_sums {
  int64_t first, last;
  real *lines;   /* [1 + columns][width, padded]; NULL: not wanted */
  real *numbers; /* [1 + columns]; NULL: not wanted */
  /* [1 + columns]: how many lines there are, then of every row which is its own, counted from 1;
     0: none yet. NULL: lines lie as rows do */
  int32_t *line_of;
} table_sums;

/* The line of a row; -1: none. */
static int64_t line_of_row(const table_sums *sums, int64_t row) {
  const int64_t column = row - sums->first;
  return sums->line_of ? sums->line_of[1 + column] - 1 : column;
}

/* Gives a row the next line, of zeros. */
RPI_NOINLINE int64_t begin_line(const table_sums *sums, int64_t row, int64_t padded) {
  const int64_t line = sums->line_of[0]++;
  sums->line_of[1 + row - sums->first] = sums->line_of[0];
  if (sums->lines) memset(sums->lines + line * padded, 0, (size_t)padded * sizeof(real));
  if (sums->numbers) sums->numbers[line] = 0;
  return line;
}

/* The line of a row that is to be added to. */
RPI_INLINE int64_t line_for_row(const table_sums *sums, int64_t row, int64_t padded) {
  const int64_t line = line_of_row(sums, row);
  return line >= 0 ? line : begin_line(sums, row, padded);
}

/* ---- getting ready ------------------------------------------------------------ */

/* The rows of table i that are there, packed for both directions. */
static void pack_lookup(const pair_terms *p, int i, pair_scratch *w) {
  const lookup *const x = &p->list[i];
  const lookup_scratch *const leader = &w->list[x->way == LOOKUP_MET ? x->map : i];
  lookup_scratch *const at = &w->list[i];
  const int64_t rows = leader->met.columns, columns = lookup_columns(rows);
  const int64_t padded = lookup_padded(x);
  const rp_attention *const s = p->shape;
  if (x->kind == PAIR_BIAS) {
    memset(at->e, 0, RPI_LANES * sizeof(real));
    for (int64_t c = 0; c < columns; c++) {
      const int64_t row = c < rows ? met_row(leader, c) : -1;
      at->e[RPI_LANES + c] =
          row >= 0 ? (real)RPI_LOG2_E * x->table[row * x->relation->row_stride] : 0;
    }
    return;
  }
  pack_met(x, leader, at);
  const real factor = x->kind == PAIR_VALUE ? 1 : scale_of(s) * (real)RPI_LOG2_E;
  if (at->across) {
    rpi_pack_transposed(at->down, padded, rows, x->width, factor, at->across, columns, columns);
  }
  const real *const bias = x->kind == PAIR_KEY && s->position_bias
                               ? s->position_bias + p->head * s->position_bias_stride
                               : NULL;
  for (int64_t c = 0; c < columns; c++) {
    at->numbers[c] = bias && c < rows ? factor * dot(bias, at->down + c * padded, x->width) : 0;
  }
}

/* Whole tables of a head, where they are not there yet. */
static void open_pair_tables(const pair_terms *p, pair_scratch *w) {
  if (w->packed_head == p->head) return;
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    if (x->way != LOOKUP_WHOLE) continue;
    w->list[i].met = (met_rows){.columns = x->rows};
    pack_lookup(p, i, w);
  }
  w->packed_head = p->head;
}

/* What the keys of a tile, packed, meet of a query term's rows. */
static void open_tile_keys(const lookup *x, const lookup_scratch *at, int64_t rows,
                           const real *packed, const real *zeros, real *g) {
  const int64_t padded = lookup_padded(x);
  memset(g, 0, RPI_TILE * sizeof(real));
  for (int64_t done = 0; done < rows; done += RPI_STRIP) { /* zeros has a strip */
    const rpi_product product = {.a = at->down + done * padded,
                                 .a_row = padded,
                                 .a_inner = 1,
                                 .b = packed,
                                 .b_stride = RPI_TILE,
                                 .c = g + (done + 1) * RPI_TILE,
                                 .c_stride = RPI_TILE,
                                 .inner = x->width};
    const rpi_start start = {.row = zeros};
    rpi_strip_product(RPI_START_ROW, rpi_min(RPI_STRIP, rows - done), RPI_TILE / RPI_LANES,
                      &product, &start);
  }
}

/* Before a chunk of keys: what they meet of the query terms whose tables are there whole. What
 * was kept of bands was of other keys. */
static void open_pair_keys(const pair_terms *p, pair_scratch *w, int64_t keys, const real *packed,
                           const real *zeros) {
  if (p->query.present) forget_lines(&w->query, keys);
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    lookup_scratch *const at = &w->list[i];
    if (x->kind != PAIR_QUERY || x->way != LOOKUP_WHOLE) continue;
    const int64_t lines = (x->rows + 1) * RPI_TILE;
    for (int64_t j = 0; j < keys; j += RPI_TILE) {
      open_tile_keys(x, at, x->rows, packed + j * x->width, zeros, at->g + j / RPI_TILE * lines);
    }
    if (at->dg) {
      memset(at->dg, 0, (size_t)(rpi_round_up(keys, RPI_TILE) / RPI_TILE * lines) * sizeof(real));
    }
  }
}

/* For some queries: E and empty buckets of one term. */
static void open_lookup_rows(const lookup *x, const lookup_scratch *at, int64_t rows, int64_t count,
                             const pair_rows *from) {
  const int64_t stride = lookup_stride(rows), columns = lookup_columns(rows);
  if (at->buckets) memset(at->buckets, 0, (size_t)(count * stride) * sizeof(real));
  if (at->folded) memset(at->folded, 0, (size_t)(count * stride) * sizeof(real));
  if (!at->across || !from) return;
  for (int64_t r = 0; r < count; r++) {
    real *const row = at->e + r * stride;
    memset(row, 0, RPI_LANES * sizeof(real));
    memcpy(row + RPI_LANES, at->numbers, (size_t)columns * sizeof(real));
  }
  const rpi_product product = {.a = from->x,
                               .a_row = from->x_stride,
                               .a_inner = 1,
                               .b = at->across,
                               .b_stride = columns,
                               .c = at->e + RPI_LANES,
                               .c_stride = stride,
                               .inner = x->width};
  rpi_block_product(RPI_START_LOAD, count, columns / RPI_LANES, product, NULL);
}

/* The same of all whose tables are there whole. */
static void open_pair_rows(const pair_terms *p, const pair_scratch *w, const pair_rows *q,
                           const pair_rows *dz) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    if (x->way != LOOKUP_WHOLE || x->kind == PAIR_QUERY) continue;
    open_lookup_rows(x, &w->list[i], x->rows, q->rows, x->kind == PAIR_VALUE ? dz : q);
  }
}

/* Queries with position_bias, for a block. */
static void open_biased(const pair_terms *p, const pair_scratch *w, const pair_rows *q) {
  const rp_attention *const s = p->shape;
  const real *const bias = s->position_bias + p->head * s->position_bias_stride;
  const int64_t padded = rpi_round_up(s->D, RPI_LANES);
  for (int64_t r = 0; r < q->rows; r++) {
    for (int64_t c = 0; c < s->D; c++) {
      w->biased[r * padded + c] = q->x[r * q->x_stride + c] + bias[c];
    }
  }
}

/* Before a block walks a chunk of keys: the window of query terms on a band, and of long tables
 * what it meets in the chunk. */
static void open_pair_block(const pair_terms *p, pair_scratch *w, const rpi_sequence *seq,
                            const sight *sees, const pair_rows *q, const pair_rows *dz, int64_t key,
                            int64_t keys, const bounds *n) {
  if (p->query.present) {
    const reach r = reach_of(seq, sees, q->row0, q->rows, key, keys);
    w->query.w = window_of(&p->query, r.nearest, r.farthest);
    pack_window(&p->query, &w->query.w, 1, 0, rpi_round_up(p->query.width, RPI_LANES), n,
                &w->query.table);
  }
  if (p->biased) open_biased(p, w, q);
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    if (x->map == i && x->relation->map == RP_MAP_EDGES) {
      find_edges(x->relation, p, seq, q->row0, q->rows, key, keys, &w->list[i].edges);
    }
    if (x->way != LOOKUP_MET || x->kind == PAIR_QUERY) continue;
    if (x->map == i) meet(x, p, seq, q->row0, q->rows, key, keys, &w->list[i]);
    if (pair_by_pair(x, w)) continue;
    pack_lookup(p, i, w);
    open_lookup_rows(x, &w->list[i], lookup_rows(x, w), q->rows, x->kind == PAIR_VALUE ? dz : q);
  }
}

/* Before a tile: looks up what a block meets in it, each map once, and multiplies what meets a
 * band. */
static void open_pair_tile(const pair_terms *p, pair_scratch *w, const rpi_sequence *seq,
                           const pair_tile *tile, const real *zeros) {
  const int64_t row0 = tile->q.row0, rows = tile->q.rows, key = tile->key, keys = tile->keys;
  w->tile = *tile;
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    lookup_scratch *const at = &w->list[i];
    if (x->map == i && x->relation->map != RP_MAP_EDGES) {
      const bool met = x->way == LOOKUP_MET;
      if (met && x->kind == PAIR_QUERY) meet(x, p, seq, row0, rows, key, keys, at);
      if (x->relation->map == RP_MAP_LABEL) expect_labels(x, p, seq, row0, rows, key, tile->next);
      if (met) look_up_met(x, p, seq, row0, rows, key, keys, at, at->relation);
      else look_up(x, p, seq, row0, rows, key, keys, at->relation);
    }
    if (x->kind != PAIR_QUERY || x->way != LOOKUP_MET || pair_by_pair(x, w)) continue;
    const int64_t met = lookup_rows(x, w);
    pack_lookup(p, i, w);
    open_tile_keys(x, at, met, tile->packed, zeros, at->g);
    if (at->dg) memset(at->dg, 0, (size_t)((met + 1) * RPI_TILE) * sizeof(real));
  }
  if (p->query.present) {
    skew_scores(&p->query, &w->query, key - (row0 + seq->start), rows, tile->j / RPI_TILE,
                w->query.table.how == RPI_NUMBERS ? tile->packed : tile->words, tile->parts, zeros,
                w->scores);
  }
}

/* ---- scores -------------------------------------------------------------------- */

/* to[c] = start + from[relation[c]], or where it is not the first to[c] += that, for a row of
 * `rows` columns, and column -1: the compiler gathers where the machine can. A short row stays in
 * registers, and two exchanges between them give 16 numbers: a gather fetches each by itself, and
 * took four times as long. */
RPI_NOINLINE void gather_row(const real *restrict from, int64_t rows,
                             const int32_t *restrict relation, bool first, real start,
                             real *restrict to) {
#if RPI_HELD > 0
  if (rows < RPI_HELD) {
    rpi_register held[4];
    RPI_UNROLL(4) for (int n = 0; n < 4; n++) held[n] = rpi_load(from - 1 + n * RPI_LANES);
    RPI_UNROLL(4) for (int c = 0; c < RPI_TILE; c += RPI_LANES) {
      rpi_lanes at;
      memcpy(&at, relation + c, sizeof at);
      at += 1; /* modulo twice the lanes */
      const rpi_register more =
          rpi_blend((at & (2 * RPI_LANES)) != 0, __builtin_shuffle(held[2], held[3], at),
                    __builtin_shuffle(held[0], held[1], at));
      rpi_store(to + c, first ? start + more : rpi_load(to + c) + more);
    }
    return;
  }
#endif
  (void)rows;
  if (first) {
    _Pragma("omp simd") for (int c = 0; c < RPI_TILE; c++) to[c] = start + from[relation[c]];
  } else {
    _Pragma("omp simd") for (int c = 0; c < RPI_TILE; c++) to[c] += from[relation[c]];
  }
}

/* The same from the column of each key. */
RPI_NOINLINE void gather_columns(const real *restrict from, const int32_t *restrict relation,
                                 real *restrict to) {
  _Pragma("omp simd") for (int c = 0; c < RPI_TILE; c++) {
    to[c] += from[(relation[c] + 1) * RPI_TILE + c];
  }
}

/* The pairs of a query and a tile that have a relation, to be taken one by one: a map has one row a
 * key, edges come in a list. */
typedef struct pair_walk {
  const int32_t *relation; /* [tile_keys], or NULL: edges */
  const int32_t *edge_keys, *edge_labels;
  int64_t at, end, key;
} pair_walk;

/* Of query r of a block. */
static pair_walk walk_pairs(const lookup *x, const pair_scratch *w, int64_t r) {
  const lookup_scratch *const at = &w->list[x->map];
  if (x->relation->map != RP_MAP_EDGES) {
    return (pair_walk){.relation = at->relation + r * RPI_TILE, .end = w->tile.keys};
  }
  const stretch edges = edges_of(&at->edges, r, w->tile.key);
  return (pair_walk){.edge_keys = x->relation->edge_keys,
                     .edge_labels = x->relation->edge_labels,
                     .at = edges.begin,
                     .end = edges.end,
                     .key = w->tile.key};
}

/* Some of them: key in the tile, row of the table, and weight where there are weights. */
typedef struct pair_list {
  int count;
  int32_t key[RPI_TILE], row[RPI_TILE];
  real weight[RPI_TILE];
} pair_list;

/* The next up to RPI_TILE pairs; false where none is left. weights: of the query's keys, or NULL;
 * pairs without weight are hidden, and left out. */
static bool list_pairs(pair_walk *left, const real *weights, pair_list *to) {
  int count = 0;
  for (; left->at < left->end && count < RPI_TILE; left->at++) {
    const bool listed = left->relation == NULL;
    const int32_t row = listed ? left->edge_labels[left->at] : left->relation[left->at];
    if (row < 0) continue;
    const int64_t key = listed ? left->edge_keys[left->at] - left->key : left->at;
    to->key[count] = (int32_t)key;
    to->row[count] = row;
    to->weight[count] = weights ? weights[key] : 1;
    count += to->weight[count] != 0;
  }
  to->count = count;
  return count > 0;
}

#define RPI_PAIRS 4 /* that are taken together: the sums of one wait for themselves */

/* out[n] = a[n] . b[n]. */
RPI_INLINE void pair_dots(int64_t width, const real *const a[RPI_PAIRS],
                          const real *const b[RPI_PAIRS], real out[RPI_PAIRS]) {
  rpi_register sum[RPI_PAIRS] = {{0}};
  int64_t c = 0;
  for (; c + RPI_LANES <= width; c += RPI_LANES) {
    RPI_UNROLL(4) for (int n = 0; n < RPI_PAIRS; n++) {
      sum[n] += rpi_load(a[n] + c) * rpi_load(b[n] + c);
    }
  }
  rpi_totals(sum, out);
  for (; c < width; c++) {
    for (int n = 0; n < RPI_PAIRS; n++) out[n] += a[n][c] * b[n][c];
  }
}

/* Adds the scores of a strip's pairs one by one. */
static void add_each(const pair_terms *p, const lookup *x, const pair_scratch *w, int64_t i,
                     int64_t count, real *scores) {
  const int64_t stride = x->relation->row_stride, padded = rpi_round_up(x->width, RPI_LANES);
  const pair_rows *const rows = x->kind == PAIR_VALUE ? &w->tile.dz : &w->tile.q;
  const dense *const k = &w->tile.k;
  const real factor = x->kind == PAIR_VALUE ? 1 : scale_of(p->shape) * (real)RPI_LOG2_E;
  for (int64_t r = i; r < i + count; r++) {
    real *const to = scores + (r - i) * RPI_TILE;
    const real *const own =
        x->kind == PAIR_KEY && w->biased ? w->biased + r * padded : rows->x + r * rows->x_stride;
    pair_walk left = walk_pairs(x, w, r);
    for (pair_list l; list_pairs(&left, NULL, &l);) {
      for (int n = 0; x->kind == PAIR_BIAS && n < l.count; n++) {
        to[l.key[n]] += (real)RPI_LOG2_E * x->table[l.row[n] * stride];
      }
      for (int n = 0; x->kind != PAIR_BIAS && n < l.count; n += RPI_PAIRS) {
        const real *a[RPI_PAIRS], *b[RPI_PAIRS];
        real product[RPI_PAIRS];
        for (int m = 0; m < RPI_PAIRS; m++) {
          const int of = n + m < l.count ? n + m : n; /* of the last few some twice */
          a[m] = x->kind == PAIR_QUERY ? k->data + l.key[of] * k->stride : own;
          b[m] = x->table + l.row[of] * stride;
        }
        pair_dots(x->width, a, b, product);
        for (int m = 0; m < RPI_PAIRS && n + m < l.count; m++) {
          to[l.key[n + m]] += factor * product[m];
        }
      }
    }
  }
}

/* to[r][j] = start[r]. */
static void fill_strip(int64_t count, const real *start, real *to) {
  for (int64_t r = 0; r < count; r++, to += RPI_TILE) {
    const rpi_register all = (rpi_register){0} + start[r];
    RPI_UNROLL(4) for (int64_t v = 0; v < RPI_TILE; v += RPI_LANES) rpi_store(to + v, all);
  }
}

/* Adds what a strip from row i of the block on meets of a term; first: to start, there is nothing
 * yet. */
static void add_looked_up(const pair_terms *p, int which, const pair_scratch *w, int64_t i,
                          int64_t count, bool first, const real *start, real *to) {
  const lookup *const x = &p->list[which];
  const lookup_scratch *const at = &w->list[which], *const leader = &w->list[x->map];
  const bool each = pair_by_pair(x, w), edges = x->relation->map == RP_MAP_EDGES;
  const int64_t table = lookup_rows(x, w);
  const int64_t stride = x->kind == PAIR_BIAS ? 0 : lookup_stride(table);
  const real *g = NULL, *e = NULL;
  if (!each && x->kind == PAIR_QUERY) {
    g = at->g;
    if (x->way == LOOKUP_WHOLE) g += w->tile.j / RPI_TILE * (x->rows + 1) * RPI_TILE;
  } else if (!each) {
    e = at->e + (lookup_base(x, w) + i) * stride + RPI_LANES;
  }
  if (e && !edges) {
    for (int64_t r = 0; r < count; r++) {
      gather_row(e + r * stride, table, leader->relation + (i + r) * RPI_TILE, first, start[r],
                 to + r * RPI_TILE);
    }
    return;
  }
  if (first) fill_strip(count, start, to);
  if (each) {
    add_each(p, x, w, i, count, to);
    return;
  }
  for (int64_t r = 0; r < count; r++, to += RPI_TILE) {
    if (!edges) {
      gather_columns(g, leader->relation + (i + r) * RPI_TILE, to);
      continue;
    }
    const stretch own = edges_of(&leader->edges, i + r, w->tile.key);
    for (int64_t n = own.begin; n < own.end; n++) {
      const int64_t c = x->relation->edge_keys[n] - w->tile.key;
      const int32_t label = x->relation->edge_labels[n];
      to[c] += g ? g[(label + 1) * RPI_TILE + c] : e[r * stride + label];
    }
  }
}

/* Has a term a relation in a strip from row i of the block on? */
static bool meets_strip(const lookup *x, const pair_scratch *w, int64_t i, int64_t count) {
  const lookup_scratch *const leader = &w->list[x->map];
  if (x->relation->map == RP_MAP_EDGES) return has_edges(&leader->edges, i, count, w->tile.key);
  const int32_t *const relation = leader->relation + i * RPI_TILE;
  if (relation[0] >= 0) return true; /* mostly */
  uint32_t all = UINT32_MAX;         /* the sign is set where all are negative */
  _Pragma("omp simd reduction(& : all)") for (int64_t c = 1; c < count * RPI_TILE; c++) {
    all &= (uint32_t)relation[c];
  }
  return (int32_t)all >= 0;
}

/* May these terms give a pair more than one number, or are they taken pair by pair? Then they are
 * added up by themselves: begun with -lse in backward and with the maximum in forward, the same sum
 * is rounded in two ways, and the weight of a single key is not 1. */
static bool adds_up(const pair_terms *p, const pair_scratch *w, bool values) {
  int terms = 0;
  bool several = false;
  for (int n = 0; n < p->count; n++) {
    const lookup *const x = &p->list[n];
    if ((x->kind == PAIR_VALUE) != values) continue;
    several |= x->relation->map == RP_MAP_EDGES || pair_by_pair(x, w) || terms++ > 0;
  }
  return several;
}

/* What pairs add to a strip from row i of a block on, for score_strip, in units of log 2; NULL:
 * nothing. values: to its twin in backward. alone: the strip has no product yet, and nothing else
 * but row_start to start from: it is started, and whoever scores it again asks again. Else this is
 * asked for once, and stays until the next strip: it may have cost much. */
static const real *strip_more(const pair_terms *p, const pair_scratch *w, bool values, int64_t i,
                              int64_t count, const real *row_start, const real *zeros, bool alone,
                              real *strip) {
  const bool banded = !values && p->query.present;
  const bool starts = alone && !banded && !adds_up(p, w, values);
  const real *const start = starts ? row_start : zeros;
  real *const to = banded ? w->scores + i * RPI_TILE : starts ? strip : w->more;
  bool first = !banded;
  for (int n = 0; n < p->count; n++) {
    const lookup *const x = &p->list[n];
    if ((x->kind == PAIR_VALUE) != values || !meets_strip(x, w, i, count)) continue;
    add_looked_up(p, n, w, i, count, first, start, to);
    first = false;
  }
  return first ? NULL : to;
}

/* ---- weights ------------------------------------------------------------------- */

/* The buckets of a strip's rows, and what was looked up for them. */
typedef struct pair_buckets {
  int count, list[RPI_LOOKUPS];
  real *rows[RPI_LOOKUPS], *folded[RPI_LOOKUPS]; /* NULL: there are none */
  const int32_t *relation[RPI_LOOKUPS];
  int64_t stride[RPI_LOOKUPS];
} pair_buckets;

/* Those of the terms that gather p (values) or ds (the others), from row i of the block on. */
static void pair_buckets_at(const pair_terms *p, const pair_scratch *w, int64_t i, bool values,
                            pair_buckets *b) {
  b->count = 0;
  for (int n = 0; n < p->count; n++) {
    const lookup *const x = &p->list[n];
    if ((x->kind == PAIR_VALUE) != values || x->kind == PAIR_QUERY) continue;
    const lookup_scratch *const at = &w->list[n];
    const bool each = pair_by_pair(x, w);
    const int64_t stride = lookup_stride(lookup_rows(x, w));
    const int64_t from = (lookup_base(x, w) + i) * stride;
    b->stride[b->count] = stride;
    b->rows[b->count] = each ? NULL : at->buckets + from;
    b->folded[b->count] = at->folded ? at->folded + from : NULL;
    b->relation[b->count] =
        x->relation->map == RP_MAP_EDGES ? NULL : w->list[x->map].relation + i * RPI_TILE;
    b->list[b->count++] = n;
  }
}

/* Where a strip's pairs go that are taken one by one. */
typedef struct pair_ends {
  const real *x; /* the strip's rows of q (dz for values), for the table's gradient */
  int64_t x_stride;
  real *rows; /* its rows of dq, or forward of the output; NULL: nothing to be added there */
  int64_t rows_stride;
  const table_sums *sums; /* of the looked-up terms; NULL: forward */
} pair_ends;

/* to += factor * from. */
RPI_INLINE void add_scaled(int64_t width, real factor, const real *restrict from,
                           real *restrict to) {
  int64_t c = 0;
  for (; c + RPI_LANES <= width; c += RPI_LANES) {
    rpi_store(to + c, rpi_load(to + c) + factor * rpi_load(from + c));
  }
  for (; c < width; c++) to[c] += factor * from[c];
}

/* to += the rows of a table that a list names, times its weights. */
static void add_rows_of(const lookup *x, const pair_list *l, real *restrict to) {
  const int64_t stride = x->relation->row_stride;
  int n = 0;
  for (; n + RPI_PAIRS <= l->count; n += RPI_PAIRS) {
    const real w0 = l->weight[n], *const a = x->table + l->row[n] * stride;
    const real w1 = l->weight[n + 1], *const b = x->table + l->row[n + 1] * stride;
    const real w2 = l->weight[n + 2], *const c = x->table + l->row[n + 2] * stride;
    const real w3 = l->weight[n + 3], *const d = x->table + l->row[n + 3] * stride;
    int64_t i = 0;
    for (; i + RPI_LANES <= x->width; i += RPI_LANES) {
      rpi_store(to + i, rpi_load(to + i) + (w0 * rpi_load(a + i) + w1 * rpi_load(b + i)) +
                            (w2 * rpi_load(c + i) + w3 * rpi_load(d + i)));
    }
    for (; i < x->width; i++) to[i] += (w0 * a[i] + w1 * b[i]) + (w2 * c[i] + w3 * d[i]);
  }
  for (; n < l->count; n++) {
    add_scaled(x->width, l->weight[n], x->table + l->row[n] * stride, to);
  }
}

/* Puts the lines of a list's rows in their place: found together, none waits for the sums of
 * another. */
static void rows_to_lines(const table_sums *sums, int64_t padded, pair_list *l) {
  for (int n = 0; n < l->count; n++) l->row[n] = (int32_t)line_for_row(sums, l->row[n], padded);
}

/* Takes the weights of a strip pair by pair: to rows, and to the sums of a table's gradient. */
static void collect_each(const pair_terms *p, int which, const pair_scratch *w, int64_t i,
                         int64_t count, const real *weights, const pair_ends *ends) {
  const lookup *const x = &p->list[which];
  const int64_t padded = lookup_padded(x);
  const table_sums none = {.first = 0}, *const sums = ends->sums ? &ends->sums[which] : &none;
  for (int64_t r = 0; r < count; r++) {
    real *const to = ends->rows && x->kind != PAIR_BIAS ? ends->rows + r * ends->rows_stride : NULL;
    pair_walk left = walk_pairs(x, w, i + r);
    for (pair_list l; list_pairs(&left, weights + r * RPI_TILE, &l);) {
      if (to) add_rows_of(x, &l, to);
      if (sums->lines || sums->numbers) rows_to_lines(sums, padded, &l);
      for (int n = 0; sums->lines && n < l.count; n++) {
        add_scaled(x->width, l.weight[n], ends->x + r * ends->x_stride,
                   sums->lines + l.row[n] * padded);
      }
      for (int n = 0; sums->numbers && n < l.count; n++) {
        sums->numbers[l.row[n]] += l.weight[n];
      }
    }
  }
}

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "of two numbers the lower half is first");

/* A few weights of a row. */
#define RPI_FEW (RPI_LANES < 4 ? RPI_LANES : 4)
typedef real rpi_few
    __attribute__((vector_size(RPI_FEW * RPI_REAL_BYTES), aligned(RPI_REAL_BYTES), may_alias));

/* buckets[row][relation] += weight, for a whole strip and so many keys. Rows side by side:
 * additions to one bucket wait for each other. A few weights are loaded at once and kept, and
 * relations two by two, the first in the lower half, since loads are what it waits for otherwise: a
 * pair takes 1.1 cycles, with loads of its own 1.35 (Zen 5). */
RPI_NOINLINE void collect_relations(int64_t keys, const int32_t *relation, const real *weights,
                                    real *buckets, int64_t stride) {
  int64_t c = 0;
  for (; c + RPI_FEW <= keys; c += RPI_FEW) {
    rpi_few few[RPI_STRIP];
    RPI_UNROLL(6) for (int64_t r = 0; r < RPI_STRIP; r++) {
      few[r] = *(const rpi_few *)(weights + r * RPI_TILE + c);
      RPI_HOLD(few[r]);
    }
    RPI_UNROLL(4) for (int n = 0; n < RPI_FEW; n += 2) {
      RPI_UNROLL(6) for (int64_t r = 0; r < RPI_STRIP; r++) {
        int64_t two;
        memcpy(&two, relation + r * RPI_TILE + c + n, sizeof two);
        real *const own = buckets + r * stride;
        own[(int32_t)two] += few[r][n];
        own[two >> 32] += few[r][n + 1];
      }
    }
  }
  for (; c < keys; c++) {
    RPI_UNROLL(6) for (int64_t r = 0; r < RPI_STRIP; r++) {
      buckets[r * stride + relation[r * RPI_TILE + c]] += weights[r * RPI_TILE + c];
    }
  }
}

/* Adds a strip of weights, from row i of the block on, to its buckets. */
static void collect_pairs(const pair_terms *p, const pair_buckets *b, const pair_scratch *w,
                          int64_t i, int64_t count, const real *weights, const pair_ends *ends) {
  const int64_t tile_keys = w->tile.keys;
  for (int n = 0; n < b->count; n++) {
    const lookup *const x = &p->list[b->list[n]];
    if (!meets_strip(x, w, i, count)) continue;
    if (!b->rows[n]) {
      collect_each(p, b->list[n], w, i, count, weights, ends);
      continue;
    }
    real *const buckets = b->rows[n] + RPI_LANES;
    const int32_t *const relation = b->relation[n];
    const int64_t stride = b->stride[n];
    if (x->relation->map == RP_MAP_EDGES) {
      for (int64_t r = 0; r < count; r++) {
        const stretch edges = edges_of(&w->list[x->map].edges, i + r, w->tile.key);
        for (int64_t at = edges.begin; at < edges.end; at++) {
          buckets[r * stride + x->relation->edge_labels[at]] +=
              weights[r * RPI_TILE + x->relation->edge_keys[at] - w->tile.key];
        }
      }
    } else if (count == RPI_STRIP) {
      collect_relations(tile_keys, relation, weights, buckets, stride);
    } else {
      for (int64_t r = 0; r < count; r++) {
        for (int64_t c = 0; c < tile_keys; c++) {
          buckets[r * stride + relation[r * RPI_TILE + c]] += weights[r * RPI_TILE + c];
        }
      }
    }
  }
}

/* After a chunk of keys: puts its buckets to those before. A bucket is one number that weights
 * are added to one by one; over all keys of a long sequence it would lose a digit. */
static void fold_pair_buckets(const pair_terms *p, const pair_scratch *w, int64_t rows) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    if (x->kind != PAIR_VALUE || x->way != LOOKUP_WHOLE) continue;
    real *const from = w->list[i].buckets, *const to = w->list[i].folded;
    const int64_t numbers = rows * lookup_stride(x->rows);
    for (int64_t c = 0; c < numbers; c++) to[c] += from[c];
    memset(from, 0, (size_t)numbers * sizeof(real));
  }
}

/* out += buckets . table, where the whole table is there (for all rows kept) or is not (for those
 * of a block that walked a chunk). */
static void add_pair_values(const pair_terms *p, const pair_scratch *w, int way, int64_t rows,
                            int64_t width, real *out) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    if (x->kind != PAIR_VALUE || x->way != way || pair_by_pair(x, w)) continue;
    const real *const buckets = way == LOOKUP_WHOLE ? w->list[i].folded : w->list[i].buckets;
    const int64_t table = lookup_rows(x, w);
    const rpi_product product = {.a = buckets + RPI_LANES,
                                 .a_row = lookup_stride(table),
                                 .a_inner = 1,
                                 .b = w->list[i].down,
                                 .b_stride = width,
                                 .c = out,
                                 .c_stride = width,
                                 .inner = table};
    rpi_block_product(RPI_START_LOAD, rows, width / RPI_LANES, product, NULL);
  }
}

#endif
