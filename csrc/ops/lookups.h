/* SPDX-License-Identifier: Apache-2.0
 *
 * lookups.h: terms whose relation is looked up (labels, explicit positions, edges): which they
 * are, how a relation is found, and what there is of their tables at a time.
 *
 *   LOOKUP_WHOLE   short tables: all T rows, for a chunk of queries or keys
 *   LOOKUP_MET     long ones: the rows that a block of queries meets in a run of keys,
 *
 *                     positions   distances from the nearest to the farthest, as a band's window
 *                     labels      those that occur, in the order of their first pair
 *
 *                  where these are few beside the pairs. Else the pairs are taken one by one.
 *   LOOKUP_EACH    few edges: one by one too
 *
 * A pair by itself costs a product of one row with one row of the table, some five times what it
 * costs in a product of many; but of nothing that no pair asks for. So the cost follows the pairs;
 * of T there is a number a row, which says where it is (column_of; line_of, pairs.h).
 */
#ifndef RPI_LOOKUPS_H
#define RPI_LOOKUPS_H

#include "ops/attention.h"
#include "ops/keep.h"
#include "ops/skew.h"

enum { PAIR_KEY, PAIR_BIAS, PAIR_QUERY, PAIR_VALUE };

#define RPI_LOOKUPS (4 * RP_TERMS)

/* Numbers of a row of E, column -1 among them, that are read from registers (gather_row); 0: none
 * are. clang has no such exchange. */
#if RPI_LANES == 16 && !defined(__clang__)
#define RPI_HELD (4 * RPI_LANES)
#else
#define RPI_HELD 0
#endif

/* A term whose relation is looked up, for one head. */
typedef struct lookup {
  const rp_relation *relation;
  const real *table; /* of this head */
  int64_t rows, width;
  int kind;  /* PAIR_... */
  int place; /* which of the terms of its kind */
  int way;   /* LOOKUP_... */
  int map;   /* the first lookup with the same map and way: they share what was looked up */
} lookup;

typedef struct pair_terms {
  /* something here; additional scores; looked-up value terms; query terms that do not
   * move queries; queries with position_bias are met pair by pair */
  bool any, scores, values, queries, biased;
  term query; /* on a band; not present where it moves queries */
  bool moves; /* moves_queries: its vector is that of any distance */
  lookup list[RPI_LOOKUPS];
  int count;
  real softcap; /* units of log 2; 0: none */
  const rp_mask *mask;
  dropout dropout;
  uint32_t site, ordinal;
  const rp_attention *shape;
  int64_t head, b;
} pair_terms;

/* The columns that hold so many keys of a tile, in steps of the widest vector and of a block of
 * dropout's mask, or of an operand's strip: what is done number by number is done to no more.
 * Sentences are short. whole: somebody reads all of the tile. */
static int64_t columns_of_keys(const bounds *n, int64_t keys, bool whole) {
  const int64_t step = n->tiles ? RPI_TILED_ROWS : 16;
  return whole ? RPI_TILE : rpi_min(rpi_round_up(keys, step), RPI_TILE);
}

/* Packs the tile at key j of so many keys, turned and times a factor: as numbers, where somebody
 * reads them, as words, and as parts; whether it has these. Read are, with scores of pairs, the
 * columns of a whole tile, else whole vectors that have keys. What has one part, as every number
 * has, tiles multiply: then pairs alone read numbers. */
static bool pack_tile(const bounds *n, const pair_terms *p, dense from, int64_t j, int64_t keys,
                      int64_t width, real factor, real *numbers, real *words,
                      const operand *parts) {
  const int64_t present = rpi_min(RPI_TILE, keys - j);
  const int64_t columns = p->scores ? RPI_TILE : rpi_round_up(present, RPI_LANES);
  const bool rounded = n->tiles == 1;
  from.data += j * from.stride;
  if ((n->how == RPI_NUMBERS && !rounded) || p->queries) {
    rpi_pack_transposed(from.data, from.stride, present, width, factor, numbers + j * width,
                        RPI_TILE, columns);
  }
  if (n->how != RPI_NUMBERS) {
    turn_words(n->how, from, present, width, factor, words + j * inner_of(n->how, width), columns);
  }
  if (!n->tiles) return false;
  const operand *const to = parts + j / RPI_TILE;
  if (present < RPI_TILE) clear_operand(*to, columns_of_keys(n, present, p->any));
  if (!rounded) {
    return pack_operand((dense){numbers + j * width, RPI_TILE}, ROWS_ARE_INNER, present, width,
                        *to);
  }
  pack_rounded_lines(from, present, width, factor, *to);
  return true;
}

/* Do two terms look the same things up? */
static bool same_map(const rp_relation *a, const rp_relation *b) {
  if (a->map != b->map) return false;
  if (a->map == RP_MAP_EDGES) {
    return a->edge_starts == b->edge_starts && a->edge_keys == b->edge_keys;
  }
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

/* And in the same way: what a query term meets is counted tile by tile. */
static bool shares_map(const lookup *x, const rp_relation *r, int way, int kind) {
  return x->way == way && same_map(x->relation, r) &&
         (way != LOOKUP_MET || (x->kind == PAIR_QUERY) == (kind == PAIR_QUERY));
}

static void add_lookups(pair_terms *p, const rp_relation *relations, int kind, int64_t width) {
  for (int i = 0; i < RP_TERMS; i++) {
    const rp_relation *const r = &relations[i];
    if (!is_looked_up(r)) continue;
    const int way = lookup_way(p->shape, r);
    int map = 0;
    while (map < p->count && !shares_map(&p->list[map], r, way, kind)) map++;
    p->list[p->count++] = (lookup){.relation = r,
                                   .table = r->table + p->head * r->head_stride,
                                   .rows = rpi_table_rows(r),
                                   .width = width,
                                   .kind = kind,
                                   .place = i,
                                   .way = way,
                                   .map = map};
    p->values |= kind == PAIR_VALUE;
    p->scores |= kind != PAIR_VALUE;
    p->queries |= kind == PAIR_QUERY;
    p->biased |= kind == PAIR_KEY && way != LOOKUP_WHOLE && p->shape->position_bias;
  }
}

static pair_terms pair_terms_of(const rp_attention *s, int64_t head, int64_t b) {
  pair_terms p = {.shape = s, .head = head, .b = b};
  p.query = query_term(s, head);
  p.moves = moves_queries(s);
  p.query.present &= !p.moves;
  p.scores = p.queries = p.query.present;
  add_lookups(&p, s->key, PAIR_KEY, s->D);
  add_lookups(&p, s->bias, PAIR_BIAS, 1);
  add_lookups(&p, s->query, PAIR_QUERY, s->D);
  add_lookups(&p, s->value, PAIR_VALUE, s->Dv);
  p.any = p.scores || p.values;
  p.softcap = (real)s->softcap * (real)RPI_LOG2_E;
  p.mask = s->mask.data ? &s->mask : NULL;
  p.dropout = dropout_of(s->dropout, s->dropout_key);
  p.site = s->dropout_site + (uint32_t)head;
  p.ordinal = s->dropout_ordinals ? s->dropout_ordinals[b] : s->dropout_first + (uint32_t)b;
  return p;
}

/* ---- looking up ----------------------------------------------------------- */

/* The bytes of a matrix of pairs from some pair on: labels and masks lie alike. */
typedef struct matrix_rows {
  const char *at;
  int64_t stride; /* from one query's to the next's */
} matrix_rows;

/* Of a sequence and head from query i and key j on. */
static matrix_rows matrix_at(const void *matrix, int64_t bytes, const int64_t *starts,
                             int64_t batch_stride, int64_t head_stride, int64_t row_stride,
                             const pair_terms *p, const rpi_sequence *seq, int64_t i, int64_t j) {
  const int64_t from = starts ? starts[p->b] : p->b * batch_stride;
  const int64_t stride = starts ? seq->keys : row_stride;
  return (matrix_rows){
      (const char *)matrix + (from + p->head * head_stride + i * stride + j) * bytes,
      stride * bytes};
}

/* The positions of query i and of key j, and of those after them. */
typedef struct places {
  const int32_t *queries, *keys;
} places;

static places places_of(const rp_relation *r, const rp_attention *s, const rpi_sequence *seq,
                        int64_t b, int64_t i, int64_t j) {
  const bool packed_keys = s->offsets || s->key_offsets;
  const int64_t query = s->offsets ? seq->query_row + i : b * r->query_position_stride + i;
  const int64_t key = packed_keys ? seq->key_row + j : b * r->key_position_stride + j;
  return (places){r->query_positions + query, r->key_positions + key};
}

/* Ends of a band between positions: distances are below 2^31. */
static int32_t nearer_end(int64_t end) { return (int32_t)rpi_min(end, INT32_MAX); }

/* Columns, counted from `first`, of the distances from one position to `count` others; -1: none.
 * first is -left where columns are those of the table. */
static void look_up_distances(const rp_relation *r, int32_t own, const int32_t *from, int64_t count,
                              int32_t first, int32_t *relation) {
  const bool clip = r->beyond == RP_BEYOND_CLIP;
  const int32_t left = nearer_end(r->left), right = nearer_end(r->right);
  for (int64_t c = 0; c < count; c++) {
    const int32_t d = from[c] - own; /* both are below 2^30 */
    const int32_t near = d < -left ? -left : d > right ? right : d;
    relation[c] = clip || near == d ? near - first : -1;
  }
}

static matrix_rows labels_at(const rp_relation *r, const pair_terms *p, const rpi_sequence *seq,
                             int64_t i, int64_t j) {
  return matrix_at(r->labels, r->label_bytes, r->label_starts, r->label_batch_stride,
                   r->label_head_stride, r->label_row_stride, p, seq, i, j);
}

/* `count` labels; a whole tile's is a count that the compiler knows. */
RPI_INLINE void widen_labels(const char *labels, int32_t bytes, int64_t count, int32_t *relation) {
  if (bytes == 1) {
    const int8_t *const from = (const int8_t *)labels;
    for (int64_t c = 0; c < count; c++) relation[c] = from[c];
  } else if (bytes == 2) {
    const int16_t *const from = (const int16_t *)labels;
    for (int64_t c = 0; c < count; c++) relation[c] = from[c];
  } else {
    memcpy(relation, labels, (size_t)count * sizeof *relation);
  }
}

static void look_up_labels(const rp_relation *r, matrix_rows from, int64_t rows, int64_t count,
                           int32_t *relation) {
  for (int64_t i = 0; i < rows; i++, relation += RPI_TILE) {
    const char *const labels = from.at + i * from.stride;
    if (count == RPI_TILE) {
      widen_labels(labels, r->label_bytes, RPI_TILE, relation);
      continue;
    }
    widen_labels(labels, r->label_bytes, count, relation);
    for (int64_t c = count; c < RPI_TILE; c++) relation[c] = -1;
  }
}

/* The relations of `rows` queries from i on with `count` keys from j on; -1: none. Not for edges.
 */
static void look_up(const lookup *x, const pair_terms *p, const rpi_sequence *seq, int64_t i,
                    int64_t rows, int64_t j, int64_t count, int32_t *relation) {
  const rp_relation *const r = x->relation;
  if (r->map == RP_MAP_LABEL) {
    look_up_labels(r, labels_at(r, p, seq, i, j), rows, count, relation);
    return;
  }
  const places at = places_of(r, p->shape, seq, p->b, i, j);
  for (int64_t n = 0; n < rows; n++, relation += RPI_TILE) {
    look_up_distances(r, at.queries[n], at.keys, count, -nearer_end(r->left), relation);
    for (int64_t c = 0; r->buckets && c < count; c++) {
      if (relation[c] >= 0) relation[c] = r->buckets[relation[c]];
    }
    for (int64_t c = count; c < RPI_TILE; c++) relation[c] = -1;
  }
}

/* Asks for the labels of some queries with the tile at key `next`, after that at key j. Rows of a
 * matrix lie too far apart for the processor to foresee: waiting for them, one after the other,
 * took half as long as all else that labels cost. Inline always: GCC takes a function that only
 * asks for one that does nothing. */
RPI_INLINE void expect_labels(const lookup *x, const pair_terms *p, const rpi_sequence *seq,
                              int64_t query, int64_t rows, int64_t j, int64_t next) {
  if (next == j) return;
  const int64_t bytes = rpi_min(seq->keys - next, RPI_TILE) * x->relation->label_bytes;
  const matrix_rows from = labels_at(x->relation, p, seq, query, next);
  for (int64_t i = 0; i < rows; i++) {
    rpi_prefetch_bytes(from.at + i * from.stride, bytes, next > j);
  }
}

/* The distances between some queries and some keys, as far as they have a column: from first to
 * last, none where first > last. */
typedef struct spread {
  int64_t first, last;
} spread;

static spread spread_of(const rp_relation *r, const places *at, int64_t queries, int64_t keys) {
  if (queries <= 0 || keys <= 0) return (spread){1, 0};
  int32_t low = at->queries[0], high = low, key_low = at->keys[0], key_high = key_low;
  for (int64_t i = 1; i < queries; i++) {
    low = at->queries[i] < low ? at->queries[i] : low;
    high = at->queries[i] > high ? at->queries[i] : high;
  }
  for (int64_t j = 1; j < keys; j++) {
    key_low = at->keys[j] < key_low ? at->keys[j] : key_low;
    key_high = at->keys[j] > key_high ? at->keys[j] : key_high;
  }
  const int64_t nearest = (int64_t)key_low - high, farthest = (int64_t)key_high - low;
  if (r->beyond == RP_BEYOND_NONE) {
    return (spread){rpi_max(nearest, -r->left), rpi_min(farthest, r->right)};
  }
  return (spread){rpi_max(rpi_min(nearest, r->right), -r->left),
                  rpi_max(rpi_min(farthest, r->right), -r->left)};
}

/* ---- edges -------------------------------------------------------------------- */

/* Where the edges of a block's queries lie that end in a chunk of keys, tile by tile: found once,
 * since of a sparse graph most strips have none in a tile, and then cost nothing. */
typedef struct edge_index {
  int64_t key, rows; /* the chunk's first key, the block's queries */
  int64_t *from;     /* [tiles + 1][rows]: the first edge of a query that is not before a tile */
} edge_index;

static void take_edges(rpi_arena *arena, const bounds *n, edge_index *to) {
  to->from = rpi_arena_take(arena, (n->keys / RPI_TILE + 1) * n->block, sizeof *to->from);
}

/* The first of some edges that is not before key j. */
static int64_t first_edge(const rp_relation *r, int64_t low, int64_t high, int64_t j) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (r->edge_keys[middle] < j) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* For `rows` queries from `query` on and `keys` keys from `key` on. */
static void find_edges(const rp_relation *r, const pair_terms *p, const rpi_sequence *seq,
                       int64_t query, int64_t rows, int64_t key, int64_t keys, edge_index *to) {
  const int64_t row = (p->shape->offsets ? seq->query_row : p->b * p->shape->N) + query;
  const int64_t numbers = rpi_divide_up(keys, RPI_TILE) * rows;
  to->key = key;
  to->rows = rows;
  memset(to->from, 0, (size_t)(numbers + rows) * sizeof *to->from);
  for (int64_t i = 0; i < rows; i++) {
    const int64_t last = r->edge_starts[row + i + 1];
    int64_t e = first_edge(r, r->edge_starts[row + i], last, key);
    to->from[i] = e;
    while (e < last && r->edge_keys[e] < key + keys) { /* those of a tile at once */
      const int64_t tile = (r->edge_keys[e] - key) / RPI_TILE, end = key + (tile + 1) * RPI_TILE;
      int64_t next = e + 1;
      if (next < last && r->edge_keys[next] < end) next = first_edge(r, next, last, end);
      to->from[(tile + 1) * rows + i] = next - e;
      e = next;
    }
  }
  for (int64_t n = 0; n < numbers; n++) to->from[rows + n] += to->from[n];
}

/* The edges of query i of the block that end in the tile at `key`. */
static stretch edges_of(const edge_index *x, int64_t i, int64_t key) {
  const int64_t *const from = x->from + (key - x->key) / RPI_TILE * x->rows + i;
  return (stretch){from[0], from[x->rows]};
}

/* Have `count` queries from i on any there? */
static bool has_edges(const edge_index *x, int64_t i, int64_t count, int64_t key) {
  bool any = false;
  for (int64_t r = i; r < i + count; r++) {
    const stretch edges = edges_of(x, r, key);
    any |= edges.begin != edges.end;
  }
  return any;
}

/* ---- scratch ---------------------------------------------------------------- */

/* The rows of a long table that a block of queries meets in a run of keys. */
typedef struct met_rows {
  int64_t columns;
  int64_t first; /* of distances: that of column 0 */
  int64_t row;   /* table row of column 0, the others following it; or -1: see list */
  bool each;     /* they are too many: pair by pair */
} met_rows;

typedef struct lookup_scratch {
  real *across;      /* [width][T, padded], scaled: key and value terms */
  real *copy;        /* [T][width, padded] */
  const real *down;  /* the same: the copy, or the table itself */
  real *numbers;     /* [T, padded]: of position_bias, or of a bias term */
  real *e;           /* [queries kept][LANES + T, padded]; of a bias one row */
  real *buckets;     /* the same, of every term */
  real *folded;      /* the same: buckets of the chunks of keys before (values, forward) */
  int32_t *relation; /* [block][TILE]: what was looked up for a tile */
  edge_index edges;  /* of edges, instead: of the first with its map */
  real *g, *dg;      /* [tiles][1 + T][TILE]: query terms; backward's sums of ds */
  /* LOOKUP_MET: T above is the most rows met, g and dg are of one tile; the first with its map: */
  met_rows met;
  int32_t *list;      /* [most met]: table rows, -1: none */
  int32_t *column_of; /* [T]: of labels; -1: not met */
} lookup_scratch;

/* A block of queries (for values in backward: of dz). */
typedef struct pair_rows {
  int64_t row0, rows; /* counted in the sequence */
  const real *x;
  int64_t x_stride;
} pair_rows;

/* A block on a tile of a chunk of keys. */
typedef struct pair_tile {
  pair_rows q, dz;      /* forward has no dz */
  int64_t j, key, keys; /* the first key, in the chunk and in the sequence, and their number */
  int64_t next;         /* that of the tile that comes after it; after the last its own */
  dense k;              /* they themselves, */
  const real *packed;   /* packed, */
  const real *words;    /* that as words, in bf16, */
  const operand *parts; /* and as an operand, or NULL */
} pair_tile;

typedef struct pair_scratch {
  int64_t packed_head; /* whose tables are packed; -1: none */
  int64_t base;        /* the current block's first row in E and buckets of whole tables */
  pair_tile tile;      /* where the block is */
  skew_scratch query;
  lookup_scratch list[RPI_LOOKUPS];
  real *scores; /* [block][TILE]: of query terms on a band */
  real *more;   /* [STRIP][TILE]: all that pairs add to a strip */
  real *biased; /* [block][D, padded]: queries with position_bias */
  real *lines;  /* [TILE][widest, padded]: sums on their way to the rows of a list */
} pair_scratch;

/* Rows met are few while they are less than this many times the queries or keys that each of them
 * is multiplied with: a pair by itself costs five to seven times what it costs among many. */
#define RPI_MET_SHARE 6
#define RPI_MET_MOST 2048 /* ... and not more than this: E and buckets of a block, 768 KiB each */

static int64_t met_limit(const lookup *x, int64_t queries, int64_t keys) {
  const rp_relation *const r = x->relation;
  const int64_t all = r->map == RP_MAP_LABEL ? x->rows : r->left + 1 + r->right;
  const int64_t share = RPI_MET_SHARE * (x->kind == PAIR_QUERY ? queries : keys);
  return rpi_min(all, rpi_min(share, RPI_MET_MOST));
}
static int64_t met_most(const bounds *n, const lookup *x) {
  return met_limit(x, n->block, n->keys);
}

/* Rows of its table that E and buckets have columns for: of all, at most, and now. */
static int64_t kept_rows(const bounds *n, const lookup *x) {
  return x->way == LOOKUP_WHOLE ? x->rows : x->way == LOOKUP_MET ? met_most(n, x) : 0;
}
static bool pair_by_pair(const lookup *x, const pair_scratch *w) {
  return x->way == LOOKUP_EACH || (x->way == LOOKUP_MET && w->list[x->map].met.each);
}
static int64_t lookup_rows(const lookup *x, const pair_scratch *w) {
  return x->way == LOOKUP_WHOLE ? x->rows : pair_by_pair(x, w) ? 0 : w->list[x->map].met.columns;
}
/* The first row of a block in E and buckets. */
static int64_t lookup_base(const lookup *x, const pair_scratch *w) {
  return x->way == LOOKUP_WHOLE ? w->base : 0;
}

static int64_t lookup_columns(int64_t rows) { return rpi_round_up(rows, RPI_LANES); }
static int64_t lookup_stride(int64_t rows) { return lookup_columns(rows) + RPI_LANES; }
static int64_t lookup_padded(const lookup *x) { return rpi_round_up(x->width, RPI_LANES); }

/* Labels are met in the order of their pairs: a table says which were. */
static void take_met(rpi_arena *arena, const bounds *n, const lookup *x, lookup_scratch *w) {
  w->list = rpi_arena_take(arena, met_most(n, x), sizeof *w->list);
  if (x->relation->map != RP_MAP_LABEL) return;
  w->column_of = rpi_arena_take(arena, x->rows, sizeof *w->column_of);
  if (!arena->base || arena->failed) return;
  for (int64_t row = 0; row < x->rows; row++) w->column_of[row] = -1;
}

static void take_lookup(rpi_arena *arena, const bounds *n, const lookup *x, bool backward,
                        int64_t whole, lookup_scratch *w) {
  const int64_t rows = kept_rows(n, x), real_bytes = sizeof(real), stride = lookup_stride(rows);
  const int64_t kept = x->way == LOOKUP_WHOLE ? whole : n->block;
  if (x->way == LOOKUP_EACH) return;
  if (x->relation->map != RP_MAP_EDGES) {
    w->relation = rpi_arena_take(arena, n->block * RPI_TILE, sizeof *w->relation);
  }
  w->numbers = rpi_arena_take(arena, lookup_columns(rows), real_bytes);
  if (x->kind != PAIR_BIAS) w->copy = rpi_arena_take(arena, rows, lookup_padded(x) * real_bytes);
  if (x->kind == PAIR_QUERY) {
    const int64_t tiles = x->way == LOOKUP_WHOLE ? n->keys / RPI_TILE : 1;
    const int64_t lines = tiles * (rows + 1);
    w->g = rpi_arena_take(arena, lines, RPI_TILE * real_bytes);
    if (backward) w->dg = rpi_arena_take(arena, lines, RPI_TILE * real_bytes);
    return;
  }
  if (x->kind == PAIR_KEY || (x->kind == PAIR_VALUE && backward)) {
    w->across = rpi_arena_take(arena, x->width, lookup_columns(rows) * real_bytes);
    w->e = rpi_arena_take(arena, kept * stride + RPI_HELD, real_bytes);
  } else if (x->kind == PAIR_BIAS) {
    w->e = rpi_arena_take(arena, stride + RPI_HELD, real_bytes);
  }
  if (x->kind == PAIR_VALUE || backward) {
    w->buckets = rpi_arena_take(arena, kept, stride * real_bytes);
    if (!backward && x->way == LOOKUP_WHOLE) {
      w->folded = rpi_arena_take(arena, kept, stride * real_bytes);
    }
  }
}

static void take_pairs(rpi_arena *arena, const bounds *n, const rp_attention *s, bool backward,
                       pair_scratch *w) {
  const pair_terms p = pair_terms_of(s, 0, 0);
  const int64_t real_bytes = sizeof(real);
  /* rows of E and buckets of whole tables */
  const int64_t whole = backward ? n->block : n->queries;
  bool met = false;
  w->packed_head = -1;
  if (p.count) w->more = rpi_arena_take(arena, RPI_STRIP * RPI_TILE, real_bytes);
  if (p.query.present) {
    w->scores = rpi_arena_take(arena, n->block * RPI_TILE, real_bytes);
    take_skew(arena, n, backward, &w->query);
  }
  if (p.biased) w->biased = rpi_arena_take(arena, n->block, n->width * real_bytes);
  for (int x = 0; x < p.count; x++) {
    take_lookup(arena, n, &p.list[x], backward, whole, &w->list[x]);
    if (p.list[x].map == x && p.list[x].relation->map == RP_MAP_EDGES) {
      take_edges(arena, n, &w->list[x].edges);
    }
    if (p.list[x].way != LOOKUP_MET) continue;
    if (p.list[x].map == x) take_met(arena, n, &p.list[x], &w->list[x]);
    met = true;
  }
  if (met && backward) {
    w->lines = rpi_arena_take(arena, RPI_TILE, rpi_max(n->width, n->value_width) * real_bytes);
  }
}

/* ---- the rows that are met ---------------------------------------------------- */

/* Lists the labels of some queries and keys; those met before are forgotten. */
static void meet_labels(const lookup *x, const pair_terms *p, const rpi_sequence *seq,
                        int64_t query, int64_t rows, int64_t key, int64_t keys, int64_t most,
                        lookup_scratch *w) {
  for (int64_t c = 0; c < w->met.columns; c++) w->column_of[w->list[c]] = -1;
  w->met = (met_rows){.row = -1};
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < keys; j += RPI_TILE) {
      look_up(x, p, seq, query + i, 1, key + j, rpi_min(RPI_TILE, keys - j), w->relation);
      for (int c = 0; c < RPI_TILE; c++) {
        const int32_t row = w->relation[c];
        if (row < 0 || w->column_of[row] >= 0) continue;
        if (w->met.columns == most) {
          w->met.each = true;
          return;
        }
        w->column_of[row] = (int32_t)w->met.columns;
        w->list[w->met.columns++] = row;
      }
    }
  }
}

static void meet_positions(const lookup *x, const pair_terms *p, const rpi_sequence *seq,
                           int64_t query, int64_t rows, int64_t key, int64_t keys, int64_t most,
                           lookup_scratch *w) {
  const rp_relation *const r = x->relation;
  const places at = places_of(r, p->shape, seq, p->b, query, key);
  const spread d = spread_of(r, &at, rows, keys);
  w->met = (met_rows){.columns = rpi_max(d.last - d.first + 1, 0),
                      .first = d.first,
                      .row = r->buckets ? -1 : d.first + r->left};
  w->met.each = w->met.columns > most;
  for (int64_t c = 0; !w->met.each && r->buckets && c < w->met.columns; c++) {
    w->list[c] = r->buckets[d.first + r->left + c];
  }
}

/* Finds the rows of a table that `rows` queries meet in `keys` keys. */
static void meet(const lookup *x, const pair_terms *p, const rpi_sequence *seq, int64_t query,
                 int64_t rows, int64_t key, int64_t keys, lookup_scratch *w) {
  const int64_t most = met_limit(x, rows, keys);
  if (x->relation->map == RP_MAP_LABEL) meet_labels(x, p, seq, query, rows, key, keys, most, w);
  else meet_positions(x, p, seq, query, rows, key, keys, most, w);
}

/* The table row of a column, or -1. */
static int64_t met_row(const lookup_scratch *w, int64_t column) {
  return w->met.row >= 0 ? w->met.row + column : w->list[column];
}

/* The columns of relations: of the rows met, or where they are too many, of all. */
static void look_up_met(const lookup *x, const pair_terms *p, const rpi_sequence *seq, int64_t i,
                        int64_t rows, int64_t j, int64_t count, const lookup_scratch *w,
                        int32_t *relation) {
  if (w->met.each || x->relation->map == RP_MAP_LABEL) {
    look_up(x, p, seq, i, rows, j, count, relation);
    if (w->met.each) return;
    for (int64_t c = 0; c < rows * RPI_TILE; c++) {
      relation[c] = relation[c] < 0 ? -1 : w->column_of[relation[c]];
    }
    return;
  }
  const places at = places_of(x->relation, p->shape, seq, p->b, i, j);
  for (int64_t n = 0; n < rows; n++, relation += RPI_TILE) {
    look_up_distances(x->relation, at.queries[n], at.keys, count, (int32_t)w->met.first, relation);
    for (int64_t c = count; c < RPI_TILE; c++) relation[c] = -1;
  }
}

/* Makes the rows met a table of their own. */
static void pack_met(const lookup *x, const lookup_scratch *leader, lookup_scratch *w) {
  const int64_t padded = lookup_padded(x), stride = x->relation->row_stride;
  const int64_t columns = leader->met.columns;
  if (leader->met.row >= 0 && stride == padded && x->width == padded) {
    w->down = x->table + leader->met.row * stride;
    return;
  }
  for (int64_t c = 0; c < columns; c++) {
    const int64_t row = met_row(leader, c);
    real *const to = w->copy + c * padded;
    if (row >= 0) memcpy(to, x->table + row * stride, (size_t)x->width * sizeof(real));
    for (int64_t d = row >= 0 ? x->width : 0; d < padded; d++) to[d] = 0;
  }
  w->down = w->copy;
}

#endif
