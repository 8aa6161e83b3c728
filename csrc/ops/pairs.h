/* SPDX-License-Identifier: Apache-2.0
 *
 * pairs.h: what a score or a weight takes from its own pair (i, j): relations that must be
 * looked up, "key meets relation", softcap, dense masks, dropout.
 *
 * Plain attention and band terms never come here. For a call that has one of these, a block
 * of queries and a tile of keys get an array of additional scores [rows][TILE], and weights are
 * collected after the strip that made them:
 *
 *   looked up (labels, explicit positions, edges)
 *     key      E[i][r] = q_i . w_r for all T rows; a score reads E[i][label_ij], and weights
 *              are added to a row of buckets at the same place
 *     bias     the same with one E for all queries
 *     query    G[r][j] = k_j . w_r for all T rows and the keys of a chunk
 *     value    buckets, and in backward E of dz
 *   query on a band: see skew.h
 *
 * Rows of E and of buckets begin with LANES spare columns; the last of them, column -1, is "no
 * relation": zero, and read or written like the others.
 */
#ifndef RPI_PAIRS_H
#define RPI_PAIRS_H

#include "ops/attention.h"
#include "ops/keep.h"
#include "ops/skew.h"

enum { PAIR_KEY, PAIR_BIAS, PAIR_QUERY, PAIR_VALUE };

#define RPI_LOOKUPS (4 * RP_TERMS)

/* A term whose relation is looked up, for one head. */
typedef struct lookup {
  const rp_relation *relation;
  const real *table; /* of this head */
  int64_t rows, width;
  int kind;  /* PAIR_... */
  int place; /* which of the terms of its kind */
  int map;   /* the first lookup with the same map: they share what was looked up */
} lookup;

typedef struct pair_terms {
  /* something here; additional scores; looked-up value terms; any query terms */
  bool any, scores, values, queries;
  term query; /* on a band */
  lookup list[RPI_LOOKUPS];
  int count;
  real softcap; /* units of log 2; 0: none */
  const rp_mask *mask;
  dropout dropout;
  uint32_t site, ordinal;
  const rp_attention *shape;
  int64_t head, b;
} pair_terms;

/* Do two terms look the same things up? */
static bool same_map(const rp_relation *a, const rp_relation *b) {
  if (a->map != b->map || a->map == RP_MAP_EDGES) return false;
  if (a->map == RP_MAP_LABEL) {
    return a->labels == b->labels && a->label_bytes == b->label_bytes &&
           a->label_batch_stride == b->label_batch_stride &&
           a->label_head_stride == b->label_head_stride &&
           a->label_row_stride == b->label_row_stride && a->label_starts == b->label_starts;
  }
  return a->query_positions == b->query_positions && a->key_positions == b->key_positions &&
         a->query_position_stride == b->query_position_stride &&
         a->key_position_stride == b->key_position_stride && a->left == b->left &&
         a->right == b->right && a->beyond == b->beyond && a->buckets == b->buckets;
}

static void add_lookups(pair_terms *p, const rp_relation *relations, int kind, int64_t width) {
  for (int i = 0; i < RP_TERMS; i++) {
    const rp_relation *const r = &relations[i];
    if (!is_looked_up(r)) continue;
    int map = 0;
    while (map < p->count && !same_map(p->list[map].relation, r)) map++;
    p->list[p->count++] = (lookup){.relation = r,
                                   .table = r->table + p->head * r->head_stride,
                                   .rows = table_rows(r),
                                   .width = width,
                                   .kind = kind,
                                   .place = i,
                                   .map = map};
    p->values |= kind == PAIR_VALUE;
    p->scores |= kind != PAIR_VALUE;
    p->queries |= kind == PAIR_QUERY;
  }
}

static pair_terms pair_terms_of(const rp_attention *s, int64_t head, int64_t b) {
  pair_terms p = {.shape = s, .head = head, .b = b};
  p.query = query_term(s, head);
  p.scores = p.queries = p.query.present;
  add_lookups(&p, s->key, PAIR_KEY, s->D);
  add_lookups(&p, s->bias, PAIR_BIAS, 1);
  add_lookups(&p, s->query, PAIR_QUERY, s->D);
  add_lookups(&p, s->value, PAIR_VALUE, s->Dv);
  p.any = p.scores || p.values;
  p.softcap = (real)s->softcap * LOG2_E;
  p.mask = s->mask.data ? &s->mask : NULL;
  p.dropout = dropout_of(s->dropout, s->dropout_key);
  p.site = s->dropout_site + (uint32_t)head;
  p.ordinal = s->dropout_ordinals ? s->dropout_ordinals[b] : s->dropout_first + (uint32_t)b;
  return p;
}

/* ---- looking up ----------------------------------------------------------- */

/* Where the matrix of a sequence and head has row i: labels and masks lie alike. */
static int64_t pair_row(const int64_t *starts, int64_t batch_stride, int64_t head_stride,
                        int64_t row_stride, const pair_terms *p, const rpi_sequence *seq,
                        int64_t i) {
  const int64_t from = p->head * head_stride;
  return starts ? from + starts[p->b] + i * seq->keys : from + p->b * batch_stride + i * row_stride;
}

/* The relations of query i with `count` keys from j on; -1: none. Not for edges. */
static void look_up(const lookup *x, const pair_terms *p, const rpi_sequence *seq, int64_t i,
                    int64_t j, int64_t count, int32_t *relation) {
  const rp_relation *const r = x->relation;
  if (r->map == RP_MAP_LABEL) {
    const int64_t at = j + pair_row(r->label_starts, r->label_batch_stride, r->label_head_stride,
                                    r->label_row_stride, p, seq, i);
    if (r->label_bytes == 1) {
      const int8_t *const from = (const int8_t *)r->labels + at;
      if (count == RPI_TILE) { /* a count that the compiler knows */
        for (int c = 0; c < RPI_TILE; c++) relation[c] = from[c];
      }
      for (int64_t c = 0; c < count % RPI_TILE; c++) relation[c] = from[c];
    } else if (r->label_bytes == 2) {
      const int16_t *const from = (const int16_t *)r->labels + at;
      if (count == RPI_TILE) {
        for (int c = 0; c < RPI_TILE; c++) relation[c] = from[c];
      }
      for (int64_t c = 0; c < count % RPI_TILE; c++) relation[c] = from[c];
    } else {
      memcpy(relation, (const int32_t *)r->labels + at, (size_t)count * sizeof *relation);
    }
  } else {
    const bool packed = p->shape->offsets != NULL;
    const bool packed_keys = packed || p->shape->key_offsets != NULL;
    const int64_t query = packed ? seq->query_row + i : p->b * r->query_position_stride + i;
    const int64_t key = packed_keys ? seq->key_row + j : p->b * r->key_position_stride + j;
    const int32_t own = r->query_positions[query];
    const int32_t *const from = r->key_positions + key;
    const bool clip = r->beyond == RP_BEYOND_CLIP;
    const int64_t far = (int64_t)1 << 31;
    const int32_t left = (int32_t)rpi_min(r->left, far - 1);
    const int32_t right = (int32_t)rpi_min(r->right, far - 1);
    for (int64_t c = 0; c < count; c++) {
      const int32_t d = from[c] - own; /* both are below 2^30 */
      const int32_t near = d < -left ? -left : d > right ? right : d;
      relation[c] = clip || near == d ? near + left : -1;
    }
    for (int64_t c = 0; r->buckets && c < count; c++) {
      if (relation[c] >= 0) relation[c] = r->buckets[relation[c]];
    }
  }
  for (int64_t c = count; c < RPI_TILE; c++) relation[c] = -1;
}

/* The edges of query i that end in the keys from j to j + count - 1. */
static stretch edges_of(const rp_relation *r, const pair_terms *p, const rpi_sequence *seq,
                        int64_t i, int64_t j, int64_t count) {
  const int64_t row = p->shape->offsets ? seq->query_row + i : p->b * p->shape->N + i;
  int64_t low = r->edge_starts[row], high = r->edge_starts[row + 1];
  const int64_t last = high;
  while (low < high) { /* the first edge not before j */
    const int64_t middle = low + (high - low) / 2;
    if (r->edge_keys[middle] < j) low = middle + 1;
    else high = middle;
  }
  int64_t end = low;
  while (end < last && r->edge_keys[end] < j + count) end++;
  return (stretch){low, end};
}

/* ---- scratch ---------------------------------------------------------------- */

typedef struct lookup_scratch {
  real *across;      /* [width][T, padded], scaled: key and value terms */
  real *down;        /* [T][width, padded] */
  real *numbers;     /* [T, padded]: of position_bias, or of a bias term */
  real *e;           /* [queries kept][LANES + T, padded]; of a bias one row */
  real *buckets;     /* the same, of every term */
  real *folded;      /* the same: buckets of the chunks of keys before (values, forward) */
  int32_t *relation; /* [block][TILE]: what was looked up for a tile */
  real *g, *dg;      /* [tiles][1 + T][TILE]: query terms; backward's sums of ds */
} lookup_scratch;

typedef struct pair_scratch {
  int64_t packed_head; /* whose tables are packed; -1: none */
  int64_t kept;        /* rows of E and buckets: a chunk of queries (forward), or a block */
  int64_t base;        /* the current block's first row among them */
  skew_scratch query;
  lookup_scratch list[RPI_LOOKUPS];
  real *scores; /* [block][TILE] */
  real *values; /* [block][TILE]: dz . w, backward only */
} pair_scratch;

static int64_t lookup_columns(const lookup *x) { return rpi_round_up(x->rows, RPI_LANES); }
static int64_t lookup_stride(const lookup *x) { return lookup_columns(x) + RPI_LANES; }
static int64_t lookup_padded(const lookup *x) { return rpi_round_up(x->width, RPI_LANES); }

static void take_lookup(rpi_arena *arena, const bounds *n, const lookup *x, bool backward,
                        int64_t kept, lookup_scratch *w) {
  const int64_t real_bytes = sizeof(real), stride = lookup_stride(x);
  w->relation = rpi_arena_take(arena, n->block * RPI_TILE, sizeof *w->relation);
  w->numbers = rpi_arena_take(arena, lookup_columns(x), real_bytes);
  if (x->kind != PAIR_BIAS) {
    w->down = rpi_arena_take(arena, x->rows, lookup_padded(x) * real_bytes);
  }
  if (x->kind == PAIR_QUERY) {
    const int64_t lines = n->keys / RPI_TILE * (x->rows + 1);
    w->g = rpi_arena_take(arena, lines, RPI_TILE * real_bytes);
    if (backward) w->dg = rpi_arena_take(arena, lines, RPI_TILE * real_bytes);
    return;
  }
  if (x->kind == PAIR_KEY || (x->kind == PAIR_VALUE && backward)) {
    w->across = rpi_arena_take(arena, x->width, lookup_columns(x) * real_bytes);
    w->e = rpi_arena_take(arena, kept, stride * real_bytes);
  } else if (x->kind == PAIR_BIAS) {
    w->e = rpi_arena_take(arena, 1, stride * real_bytes);
  }
  if (x->kind == PAIR_VALUE || backward) {
    w->buckets = rpi_arena_take(arena, kept, stride * real_bytes);
    if (!backward) w->folded = rpi_arena_take(arena, kept, stride * real_bytes);
  }
}

static void take_pairs(rpi_arena *arena, const bounds *n, const rp_attention *s, bool backward,
                       pair_scratch *w) {
  const pair_terms p = pair_terms_of(s, 0, 0);
  const int64_t real_bytes = sizeof(real);
  w->packed_head = -1;
  w->kept = backward ? n->block : n->queries;
  if (p.scores) w->scores = rpi_arena_take(arena, n->block * RPI_TILE, real_bytes);
  if (p.values && backward) w->values = rpi_arena_take(arena, n->block * RPI_TILE, real_bytes);
  if (p.query.present) take_skew(arena, n->block, n->query_columns, n->width, &w->query);
  for (int x = 0; x < p.count; x++) {
    take_lookup(arena, n, &p.list[x], backward, w->kept, &w->list[x]);
  }
}

/* ---- getting ready ------------------------------------------------------------ */

/* The tables of a head, packed for both directions. */
static void pack_lookup(const lookup *x, const pair_terms *p, real factor, lookup_scratch *w) {
  const int64_t columns = lookup_columns(x), padded = lookup_padded(x);
  const int64_t stride = x->relation->row_stride;
  const rp_attention *const s = p->shape;
  if (x->kind == PAIR_BIAS) {
    memset(w->e, 0, RPI_LANES * sizeof(real));
    for (int64_t r = 0; r < columns; r++) {
      w->e[RPI_LANES + r] = r < x->rows ? LOG2_E * x->table[r * stride] : 0;
    }
    return;
  }
  for (int64_t r = 0; r < x->rows; r++) {
    memcpy(w->down + r * padded, x->table + r * stride, (size_t)x->width * sizeof(real));
    for (int64_t c = x->width; c < padded; c++) w->down[r * padded + c] = 0;
  }
  if (w->across) {
    rpi_pack_transposed(w->down, padded, x->rows, x->width, factor, w->across, columns, columns);
  }
  const real *const bias = x->kind == PAIR_KEY && s->position_bias
                               ? s->position_bias + p->head * s->position_bias_stride
                               : NULL;
  for (int64_t r = 0; r < columns; r++) {
    w->numbers[r] = bias && r < x->rows ? factor * dot(bias, w->down + r * padded, x->width) : 0;
  }
}

/* Tables of a head, where they are not there yet. */
static void open_pair_tables(const pair_terms *p, pair_scratch *w) {
  const real factor = scale_of(p->shape) * LOG2_E;
  if (w->packed_head == p->head) return;
  for (int i = 0; i < p->count; i++) {
    pack_lookup(&p->list[i], p, p->list[i].kind == PAIR_VALUE ? 1 : factor, &w->list[i]);
  }
  w->packed_head = p->head;
}

/* Before a chunk of keys: what they meet of the query terms. */
static void open_pair_keys(const pair_terms *p, pair_scratch *w, int64_t keys, const real *packed,
                           const real *zeros) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    lookup_scratch *const at = &w->list[i];
    if (x->kind != PAIR_QUERY) continue;
    const int64_t lines = (x->rows + 1) * RPI_TILE, padded = lookup_padded(x);
    for (int64_t j = 0; j < keys; j += RPI_TILE) {
      real *const g = at->g + j / RPI_TILE * lines;
      memset(g, 0, RPI_TILE * sizeof(real));
      for (int64_t done = 0; done < x->rows; done += RPI_STRIP) { /* zeros has a strip */
        const rpi_product product = {.a = at->down + done * padded,
                                     .a_row = padded,
                                     .a_inner = 1,
                                     .b = packed + j * x->width,
                                     .b_stride = RPI_TILE,
                                     .c = g + (done + 1) * RPI_TILE,
                                     .c_stride = RPI_TILE,
                                     .inner = x->width};
        const rpi_start start = {.row = zeros};
        rpi_strip_product(RPI_START_ROW, rpi_min(RPI_STRIP, x->rows - done), RPI_TILE / RPI_LANES,
                          &product, &start);
      }
    }
    if (at->dg) {
      memset(at->dg, 0, (size_t)(rpi_round_up(keys, RPI_TILE) / RPI_TILE * lines) * sizeof(real));
    }
  }
}

/* A block of queries (for values in backward: of dz). */
typedef struct pair_rows {
  int64_t row0, rows; /* counted in the sequence */
  const real *x;
  int64_t x_stride;
} pair_rows;

/* For some queries: E and empty buckets. */
static void open_pair_rows(const pair_terms *p, const pair_scratch *w, const pair_rows *q,
                           const pair_rows *dz) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    const lookup_scratch *const at = &w->list[i];
    const pair_rows *const from = x->kind == PAIR_VALUE ? dz : q;
    const int64_t stride = lookup_stride(x), columns = lookup_columns(x);
    if (at->buckets) memset(at->buckets, 0, (size_t)(q->rows * stride) * sizeof(real));
    if (at->folded) memset(at->folded, 0, (size_t)(q->rows * stride) * sizeof(real));
    if (!at->across || !from) continue;
    for (int64_t r = 0; r < q->rows; r++) {
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
    rpi_block_product(RPI_START_LOAD, q->rows, columns / RPI_LANES, product, NULL);
  }
}

/* Before a block walks a chunk of keys: the window of query terms on a band. */
static void open_pair_block(const pair_terms *p, pair_scratch *w, const rpi_sequence *seq,
                            const sight *sees, const pair_rows *q, int64_t key, int64_t keys) {
  if (!p->query.present) return;
  const reach r = reach_of(seq, sees, q->row0, q->rows, key, keys);
  w->query.w = window_of(&p->query, r.nearest, r.farthest);
  pack_window(&p->query, &w->query.w, 1, 0, rpi_round_up(p->query.width, RPI_LANES),
              &w->query.table);
}

/* Before a tile: looks up what a block meets in it, each map once. */
static void open_pair_tile(const pair_terms *p, const pair_scratch *w, const rpi_sequence *seq,
                           const pair_rows *rows, int64_t key, int64_t tile_keys) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    if (x->map != i || x->relation->map == RP_MAP_EDGES) continue;
    for (int64_t r = 0; r < rows->rows; r++) {
      look_up(x, p, seq, rows->row0 + r, key, tile_keys, w->list[i].relation + r * RPI_TILE);
    }
  }
}

/* ---- scores -------------------------------------------------------------------- */

/* to[c] (+)= from[relation[c]]: the compiler gathers where the machine can. */
RPI_NOINLINE void gather_row(const real *restrict from, const int32_t *restrict relation,
                             bool first, real *restrict to) {
  if (first) {
    _Pragma("omp simd") for (int c = 0; c < RPI_TILE; c++) to[c] = from[relation[c]];
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

/* Adds E of the looked-up relations of a block and a tile; first: there is nothing yet. */
static void add_looked_up(int which, const pair_scratch *w, const pair_terms *p,
                          const rpi_sequence *seq, const pair_rows *rows, int64_t key, int64_t j,
                          int64_t tile_keys, bool first, real *scores) {
  const lookup *const x = &p->list[which];
  const lookup_scratch *const at = &w->list[which];
  const int64_t stride = x->kind == PAIR_BIAS ? 0 : lookup_stride(x);
  const real *const g =
      x->kind == PAIR_QUERY ? at->g + j / RPI_TILE * (x->rows + 1) * RPI_TILE : NULL;
  if (first && (g || x->relation->map == RP_MAP_EDGES)) {
    memset(scores, 0, (size_t)(rows->rows * RPI_TILE) * sizeof(real));
  }
  for (int64_t r = 0; r < rows->rows; r++) {
    real *const to = scores + r * RPI_TILE;
    const real *const e = g ? g : at->e + (w->base + r) * stride + RPI_LANES;
    if (x->relation->map == RP_MAP_EDGES) {
      const stretch edges = edges_of(x->relation, p, seq, rows->row0 + r, key + j, tile_keys);
      for (int64_t n = edges.begin; n < edges.end; n++) {
        const int64_t c = x->relation->edge_keys[n] - (key + j);
        const int32_t label = x->relation->edge_labels[n];
        to[c] += g ? g[(label + 1) * RPI_TILE + c] : e[label];
      }
      continue;
    }
    const int32_t *const relation = w->list[x->map].relation + r * RPI_TILE;
    if (g) gather_columns(g, relation, to);
    else gather_row(e, relation, first, to);
  }
}

/* The additional scores of a block and the tile j of a chunk, in units of log 2.
 * keys: the packed chunk. */
static void pair_scores(const pair_terms *p, pair_scratch *w, const rpi_sequence *seq,
                        const pair_rows *rows, int64_t key, int64_t j, int64_t tile_keys,
                        const real *keys, const real *zeros) {
  if (p->query.present) {
    skew_scores(&p->query, &w->query, key + j - (rows->row0 + seq->start), rows->rows,
                keys + j * p->query.width, zeros, w->scores);
  }
  bool first = !p->query.present;
  for (int i = 0; i < p->count; i++) {
    if (p->list[i].kind == PAIR_VALUE) continue;
    add_looked_up(i, w, p, seq, rows, key, j, tile_keys, first, w->scores);
    first = false;
  }
}

/* dz_i . w of the looked-up value terms: their twin in backward. */
static void pair_value_scores(const pair_terms *p, pair_scratch *w, const rpi_sequence *seq,
                              const pair_rows *rows, int64_t key, int64_t j, int64_t tile_keys) {
  bool first = true;
  for (int i = 0; i < p->count; i++) {
    if (p->list[i].kind != PAIR_VALUE) continue;
    add_looked_up(i, w, p, seq, rows, key, j, tile_keys, first, w->values);
    first = false;
  }
}

/* ---- weights ------------------------------------------------------------------- */

/* The buckets of a strip's rows, and what was looked up for them. */
typedef struct pair_buckets {
  int count, list[RPI_LOOKUPS];
  real *rows[RPI_LOOKUPS], *folded[RPI_LOOKUPS];
  const int32_t *relation[RPI_LOOKUPS];
  int64_t stride[RPI_LOOKUPS];
} pair_buckets;

/* Those of the terms that gather p (values) or ds (the others), from row i of the block on. */
static pair_buckets pair_buckets_at(const pair_terms *p, const pair_scratch *w, int64_t i,
                                    bool values) {
  pair_buckets b;
  b.count = 0;
  for (int x = 0; x < p->count; x++) {
    if ((p->list[x].kind == PAIR_VALUE) != values || p->list[x].kind == PAIR_QUERY) continue;
    b.stride[b.count] = lookup_stride(&p->list[x]);
    b.rows[b.count] = w->list[x].buckets + (w->base + i) * b.stride[b.count];
    b.folded[b.count] =
        w->list[x].folded ? w->list[x].folded + (w->base + i) * b.stride[b.count] : NULL;
    b.relation[b.count] = w->list[p->list[x].map].relation + i * RPI_TILE;
    b.list[b.count++] = x;
  }
  return b;
}

/* Adds a strip of weights to its buckets. Rows side by side: additions to one bucket wait for
 * each other. */
static void collect_pairs(const pair_terms *p, const pair_buckets *b, const rpi_sequence *seq,
                          int64_t i, int64_t count, int64_t key, int64_t tile_keys,
                          const real *weights) {
  for (int n = 0; n < b->count; n++) {
    const lookup *const x = &p->list[b->list[n]];
    real *const buckets = b->rows[n] + RPI_LANES;
    const int32_t *const relation = b->relation[n];
    const int64_t stride = b->stride[n];
    if (x->relation->map == RP_MAP_EDGES) {
      for (int64_t r = 0; r < count; r++) {
        const stretch edges = edges_of(x->relation, p, seq, i + r, key, tile_keys);
        for (int64_t at = edges.begin; at < edges.end; at++) {
          buckets[r * stride + x->relation->edge_labels[at]] +=
              weights[r * RPI_TILE + x->relation->edge_keys[at] - key];
        }
      }
    } else if (count == RPI_STRIP) {
      for (int64_t c = 0; c < tile_keys; c++) {
        RPI_UNROLL(6) for (int64_t r = 0; r < RPI_STRIP; r++) {
          buckets[r * stride + relation[r * RPI_TILE + c]] += weights[r * RPI_TILE + c];
        }
      }
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
    if (p->list[i].kind != PAIR_VALUE) continue;
    real *const from = w->list[i].buckets, *const to = w->list[i].folded;
    const int64_t numbers = rows * lookup_stride(&p->list[i]);
    for (int64_t c = 0; c < numbers; c++) to[c] += from[c];
    memset(from, 0, (size_t)numbers * sizeof(real));
  }
}

/* out += buckets . table for all rows kept. */
static void add_pair_values(const pair_terms *p, const pair_scratch *w, int64_t rows, int64_t width,
                            real *out) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    if (x->kind != PAIR_VALUE) continue;
    const rpi_product product = {.a = w->list[i].folded + RPI_LANES,
                                 .a_row = lookup_stride(x),
                                 .a_inner = 1,
                                 .b = w->list[i].down,
                                 .b_stride = width,
                                 .c = out,
                                 .c_stride = width,
                                 .inner = x->rows};
    rpi_block_product(RPI_START_LOAD, rows, width / RPI_LANES, product, NULL);
  }
}

#endif
