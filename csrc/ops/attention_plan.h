/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_plan.h: how one attention call is cut into work.
 *
 * Each sequence is cut into chunks of queries and chunks of keys. An item is one
 * head of one sequence on one chunk of queries (forward), or on one pair of chunks
 * (backward). All scratch is sized by chunks: a worker's memory does not grow with N or M.
 * Two things do: sums of a long table, of which backward keeps those of one phase, about one item
 * a query chunk, and fewer the more rows of the table an item can meet (table_sums.h); and where
 * there is a dense mask a number a row, how many keys it shows.
 *
 * Backward walks the pairs in phases, like a Latin square:
 *
 *                 key chunk
 *                 0  1  2  3     the number is the phase: key chunk = (query chunk +
 *   query    0    0  1  2  3     phase) mod phases. No two items of a phase share a
 *   chunk    1    3  0  1  2     chunk of queries or of keys, so each adds to dq, dk
 *            2    2  3  0  1     and dv directly, in the order of the phases, whatever
 *            3    1  2  3  0     the threads do.
 *
 * Of heads of queries that share keys one after the other has a phase's items. So there are no
 * partial copies of dk and dv, and no second pass. Only the gradients of tables, which every item
 * touches, are summed apart (table_sums.h).
 */
#ifndef RPI_ATTENTION_PLAN_H
#define RPI_ATTENTION_PLAN_H

#include "base/memory.h"
#include "ops/operands.h"
#include "ops/terms.h"

#define RPI_UNCUT 64 /* rows that are one chunk: of short sequences the plan of an item is felt */
#define RPI_BLOCK 96 /* queries that share a walk over a chunk of keys: a multiple of RPI_STRIP */
/* The same where keys meet relations: a tile meets 63 distances more than a block has queries, and
 * keeps their products for the next block (skew.h), but on the way back multiplies them twice. */
#define RPI_SKEW_BLOCK 192
/* Forward adds up so many keys' weights and values by themselves: of 65,536, one tile after the
 * other, results were off by up to eight times what NumPy's are. */
#define RPI_FOLDED_KEYS (4 * RPI_KEY_CHUNK)
/* How a table is looked up (lookups.h): whole up to so many rows, of labels up to so many times the
 * keys of a chunk; and an edge by itself costs about what so many rows of a whole table do. */
#define RPI_LOOKUP_SHORT 256
#define RPI_LOOKUP_CHUNKS 2
#define RPI_LOOKUP_EDGES 8
#define RPI_LOOKUP_NUMBERS (1 << 19) /* that a chunk of queries keeps of a whole table */
/* Of narrower heads, or fewer queries and keys, tiles of bf16 save less than their parts cost.
 * (Tests of their arithmetic see to it that all are large enough: tests/c/twin_table.c.) */
#ifndef RPI_TILED_LEAST
#define RPI_TILED_LEAST(number) (number)
#endif
#define RPI_TILED_WIDTH RPI_TILED_LEAST(32)
#define RPI_TILED_QUERIES RPI_TILED_LEAST(96)
#define RPI_TILED_KEYS RPI_TILED_LEAST(128)
#define RPI_TILED_BACKWARD RPI_TILED_LEAST(192)
#define RPI_TILED_ROUNDED RPI_TILED_LEAST(32) /* of one part, whatever the way */
_Static_assert(RPI_BLOCK % RPI_TILED_ROWS == 0 && RPI_SKEW_BLOCK % RPI_TILED_ROWS == 0,
               "only the last block of a chunk may end within a product");

static rpi_sequence sequence_of(const rp_attention *s, int64_t b) {
  const int64_t *const key_offsets = s->key_offsets ? s->key_offsets : s->offsets;
  const int64_t *const key_lengths = s->key_lengths ? s->key_lengths : s->lengths;
  rpi_sequence seq = {0};
  if (s->offsets) {
    seq.query_row = s->offsets[b];
    seq.queries = s->offsets[b + 1] - s->offsets[b];
  } else {
    seq.query_batch = b;
    seq.queries = s->lengths ? s->lengths[b] : s->N;
  }
  if (key_offsets) {
    seq.key_row = key_offsets[b];
    seq.keys = key_offsets[b + 1] - key_offsets[b];
  } else {
    seq.key_batch = b;
    seq.keys = key_lengths ? key_lengths[b] : s->M;
  }
  seq.start = s->query_start ? s->query_start[b] : seq.keys - seq.queries;
  return seq;
}

/* Query heads that share a head of keys and values, side by side. */
static int64_t heads_sharing(const rp_attention *s) {
  return s->key_heads > 0 ? s->H / s->key_heads : 1;
}
static int64_t key_head(const rp_attention *s, int64_t head) { return head / heads_sharing(s); }

/* Rows of a chunk. Long sequences are cut at `most`; few sequences finer, down to 128 rows, so that
 * some sixteen items exist for the threads at a time; and where heads share keys, which takes items
 * from each other, down to 64 before there are fewer than four. */
static int64_t chunk_rows(const rp_attention *s, int64_t rows, int64_t step, int64_t most) {
  if (rows <= RPI_UNCUT) return rpi_max(rpi_round_up(rows, step), step);
  const int64_t sharers = heads_sharing(s), heads = rpi_max(s->B * (s->H / sharers), 1);
  const int64_t least = sharers > 1 && heads * rpi_divide_up(rows, 128) < 4 ? 64 : 128;
  const int64_t wanted = rpi_min(rpi_divide_up(rows, least), rpi_divide_up(16, heads));
  const int64_t count = rpi_max(rpi_max(rpi_divide_up(rows, most), wanted), 1);
  return rpi_max(rpi_round_up(rpi_divide_up(rows, count), step), step);
}

typedef struct chunks {
  int64_t rows, count; /* count >= 1, also for an empty sequence */
} chunks;

static chunks chunks_of(const rp_attention *s, int64_t rows, int64_t step, int64_t most) {
  const int64_t size = chunk_rows(s, rows, step, most);
  return (chunks){.rows = size, .count = rows <= size ? 1 : rpi_divide_up(rows, size)};
}

/* How a term is looked up: see lookups.h. */
enum { LOOKUP_WHOLE, LOOKUP_MET, LOOKUP_EACH };

/* Queries of all sequences, and edges of all of them. */
static int64_t query_count(const rp_attention *s) {
  return s->offsets ? s->offsets[s->B] : s->B * s->N;
}
static int64_t edge_count(const rp_attention *s, const rp_relation *r) {
  const int64_t queries = query_count(s);
  return queries > 0 ? r->edge_starts[queries] : 0;
}

static int lookup_way(const rp_attention *s, const rp_relation *r) {
  const int64_t T = rpi_table_rows(r);
  if (r->map == RP_MAP_BAND) return T > RPI_LOOKUP_SHORT ? LOOKUP_MET : LOOKUP_WHOLE;
  if (r->map == RP_MAP_LABEL) {
    const int64_t *const offsets = s->key_offsets ? s->key_offsets : s->offsets;
    const int64_t keys = offsets ? offsets[s->B] / rpi_max(s->B, 1) : s->M; /* on average */
    const int64_t few = RPI_LOOKUP_CHUNKS * chunk_rows(s, keys, RPI_TILE, RPI_KEY_CHUNK);
    return T > few ? LOOKUP_MET : LOOKUP_WHOLE;
  }
  const double edges = (double)edge_count(s, r), queries = (double)query_count(s);
  return edges * RPI_LOOKUP_EDGES <= queries * (double)T ? LOOKUP_EACH : LOOKUP_WHOLE;
}

/* Rows of the largest table that is there whole: forward keeps so many numbers a query. */
static int64_t whole_rows(const rp_attention *s) {
  int64_t most = 0;
  for (int i = 0; i < RP_TERMS; i++) {
    const rp_relation *const list[] = {&s->key[i], &s->bias[i], &s->query[i], &s->value[i]};
    for (int x = 0; x < 4; x++) {
      if (is_looked_up(list[x]) && lookup_way(s, list[x]) == LOOKUP_WHOLE) {
        most = rpi_max(most, rpi_table_rows(list[x]));
      }
    }
  }
  return most;
}

static chunks query_chunks(const rp_attention *s, const rpi_sequence *seq) {
  const int64_t fit =
      seq->queries <= RPI_UNCUT ? 0 : RPI_LOOKUP_NUMBERS / rpi_max(whole_rows(s), 1);
  return chunks_of(s, seq->queries, RPI_STRIP, rpi_max(rpi_min(fit, RPI_QUERY_CHUNK), RPI_BLOCK));
}
static chunks key_chunks(const rp_attention *s, const rpi_sequence *seq) {
  return chunks_of(s, seq->keys, RPI_TILE, RPI_KEY_CHUNK);
}

/* Which keys a query at absolute position x may see by position alone: those from x - left
 * to x + right. A causal mask is right = 0. */
typedef struct sight {
  int64_t left, right;
} sight;

#define RPI_FAR ((int64_t)1 << 44) /* beyond any distance of two positions */

static sight sight_of(const rp_attention *s) {
  const int64_t right = s->window_right < 0 ? RPI_FAR : s->window_right;
  return (sight){.left = s->window_left < 0 ? RPI_FAR : s->window_left,
                 .right = s->causal ? rpi_min(right, 0) : right};
}

/* The distances that the visible pairs of some queries and keys span; none where
 * farthest < nearest. */
typedef struct reach {
  int64_t nearest, farthest;
} reach;

static reach reach_of(const rpi_sequence *seq, const sight *sees, int64_t query, int64_t rows,
                      int64_t key, int64_t keys) {
  return (reach){.nearest = rpi_max(key - (query + rows - 1 + seq->start), -sees->left),
                 .farthest = rpi_min(key + keys - 1 - (query + seq->start), sees->right)};
}

/* Sizes that bound every chunk and window of a call. */
typedef struct bounds {
  int64_t queries, keys; /* rows of the largest chunks */
  int64_t block;         /* rows of the largest block of queries */
  /* of the widest window of a block, and of a chunk of queries */
  int64_t key_columns, value_columns, query_columns;
  int64_t packed_keys, packed_values;
  int64_t width, value_width; /* D and Dv, rounded up to vectors */
  int tiles;    /* parts of a number, where tiles of bf16 multiply; 0: they do not pay */
  int how;      /* strips multiply (bf16.h): all, or what tiles do not */
  bool rounded; /* products are of rounded numbers: by words or tiles, of what is finite by these */
  bool moved;   /* moves_queries */
  bool folds;   /* some sequence has more than RPI_FOLDED_KEYS */
} bounds;

static int64_t widest_window(const term *t, int64_t rows, int64_t keys) {
  if (!t->present) return 0;
  return rpi_max(rpi_min(t->last - t->first + 1, rows + keys), 1);
}

/* Has one of these terms a long table, looked up? */
static bool looks_up_long(const rp_attention *s, const rp_relation *terms) {
  bool found = false;
  for (int i = 0; i < RP_TERMS; i++) {
    found |= is_looked_up(&terms[i]) && lookup_way(s, &terms[i]) == LOOKUP_MET;
  }
  return found;
}

/* Keys that a block of forward walks at a time. Chunks of keys are items of backward alone, and
 * the fewer they are the more of a long table's rows does a block meet once. */
static int64_t keys_walked(const rp_attention *s, const rpi_sequence *seq) {
  const bool once =
      looks_up_long(s, s->key) || looks_up_long(s, s->bias) || looks_up_long(s, s->value);
  const int64_t rows = key_chunks(s, seq).rows;
  return once ? rpi_max(rows, rpi_min(rpi_round_up(seq->keys, RPI_TILE), RPI_KEY_CHUNK)) : rows;
}

/* Do all pairs meet the same vectors of the query terms, and is nothing looked up? Those are added
 * to the queries then, once, and not to the scores of every pair: (q_i + u) . k_j. */
static bool moves_queries(const rp_attention *s) {
  bool moves = false;
  for (int i = 0; i < RP_TERMS; i++) {
    const rp_relation *const r = &s->query[i];
    if (is_looked_up(&s->key[i]) || is_looked_up(&s->bias[i]) || is_looked_up(r) ||
        is_looked_up(&s->value[i])) {
      return false;
    }
    if (!r->table) continue;
    if (r->left != 0 || r->right != 0 || r->beyond != RP_BEYOND_CLIP) return false;
    moves = true;
  }
  return moves;
}

/* Of products' operands. */
static int precision_of(const rp_attention *s) {
  return s->placement ? s->placement->precision : RP_F32;
}

static bool tiles_pay(int64_t queries, int64_t keys, bool backward, bool rounded) {
  const int64_t least = rpi_min(queries, keys);
  if (rounded) return least >= RPI_TILED_ROUNDED;
  if (backward) return least >= RPI_TILED_BACKWARD;
  return queries >= RPI_TILED_QUERIES && keys >= RPI_TILED_KEYS;
}

/* Whether tiles multiply in an item of so many queries and keys. What they do not, the rest of a
 * block that is not finite, strips multiply as it is. */
static void choose_tiles(bounds *n, int64_t queries, int64_t keys, bool backward) {
  if (!tiles_pay(queries, keys, backward, n->rounded)) n->tiles = 0;
  if (n->tiles) n->how = RPI_NUMBERS;
}

/* What the sequences from `first` to before `end` need. tiles: there are such as multiply bf16. */
static bounds bounds_between(const rp_attention *s, int64_t first, int64_t end, bool backward,
                             bool tiles) {
  int64_t queries = 0, keys = 0;
  bool folds = false;
  for (int64_t b = first; b < end; b++) {
    const rpi_sequence seq = sequence_of(s, b);
    folds |= seq.keys > RPI_FOLDED_KEYS;
    queries = rpi_max(queries, query_chunks(s, &seq).rows);
    keys = rpi_max(keys, backward ? key_chunks(s, &seq).rows : keys_walked(s, &seq));
  }
  const term key = key_term(s, 0), value = value_term(s, 0), query = query_term(s, 0);
  const bool moved = moves_queries(s), skewed = query.present && !moved;
  const bool wide = skewed || looks_up_long(s, s->query); /* met tile by tile */
  const int64_t block = rpi_min(wide ? RPI_SKEW_BLOCK : RPI_BLOCK, queries);
  const int64_t before = RPI_TILED_ROWS; /* that a block's window may begin earlier (begin_strip) */
  const int precision = precision_of(s);
  const bool rounded = rpi_how(precision) != RPI_NUMBERS;
  const bool tiled = tiles && rpi_min(s->D, s->Dv) >= RPI_TILED_WIDTH &&
                     tiles_pay(queries, keys, backward, rounded);
  return (bounds){
      .queries = queries,
      .keys = keys,
      .block = block,
      .key_columns = widest_window(&key, block + before, keys),
      .value_columns = widest_window(&value, block + before, keys),
      .query_columns = skewed ? widest_window(&query, block, keys) : 0,
      .packed_keys = widest_window(&key, queries, keys),
      .packed_values = widest_window(&value, queries, keys),
      .width = rpi_round_up(s->D, RPI_LANES),
      .value_width = rpi_round_up(s->Dv, RPI_LANES),
      .tiles = tiled ? tiles_parts_in(precision) : 0,
      .how = rpi_how(precision),
      .rounded = rounded,
      .moved = moved,
      .folds = folds,
  };
}

static bounds bounds_of(const rp_attention *s, bool backward, bool tiles) {
  return bounds_between(s, 0, s->B, backward, tiles);
}

/* ---- backward: phases ---------------------------------------------------- */

/* One item of a phase. */
typedef struct pair {
  int64_t b, query_chunk, key_chunk;
} pair;

static int64_t phases_of(const rp_attention *s, const rpi_sequence *seq) {
  return rpi_max(query_chunks(s, seq).count, key_chunks(s, seq).count);
}

static int64_t phase_count(const rp_attention *s) {
  int64_t most = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const rpi_sequence seq = sequence_of(s, b);
    most = rpi_max(most, phases_of(s, &seq));
  }
  return most;
}

/* The item at or after (b, query_chunk) in this phase, or b == B. */
static pair pair_from(const rp_attention *s, int64_t phase, int64_t b, int64_t query_chunk) {
  for (; b < s->B; b++, query_chunk = 0) {
    const rpi_sequence seq = sequence_of(s, b);
    const int64_t phases = phases_of(s, &seq);
    if (phase >= phases) continue;
    const int64_t queries = query_chunks(s, &seq).count, keys = key_chunks(s, &seq).count;
    int64_t key_chunk = (query_chunk + phase) % phases;
    if (key_chunk >= keys) { /* no such chunk, up to where key chunk 0 comes again */
      query_chunk += phases - key_chunk;
      key_chunk = 0;
    }
    if (query_chunk < queries) return (pair){b, query_chunk, key_chunk};
  }
  return (pair){.b = s->B};
}

/* How many items from this one on, a query chunk after the other, see nothing, are none of the
 * first (below), and have chunks of full size. Of a long sequence with a window that is nearly all
 * of them, and whoever walks the items steps over them at once.
 *
 * With r_q and r_k rows a chunk, key 0 of an item lies g = key_chunk r_k - query_chunk r_q - start
 * beyond its query 0, and from an item to the next g grows by r_k - r_q. Nothing is seen while
 * g - (r_q - 1) > right, or g + (r_k - 1) < -left. */
static int64_t idle_items(const rp_attention *s, int64_t phase, const pair *p) {
  if (phase == 0 || p->key_chunk == 0) return 0;
  const rpi_sequence seq = sequence_of(s, p->b);
  const chunks q = query_chunks(s, &seq), k = key_chunks(s, &seq);
  const sight sees = sight_of(s);
  const int64_t step = k.rows - q.rows;
  const int64_t nearest = p->key_chunk * k.rows - p->query_chunk * q.rows - seq.start - q.rows + 1;
  const int64_t farthest = nearest + q.rows + k.rows - 2;
  int64_t idle = rpi_min(q.count - 1 - p->query_chunk, k.count - 1 - p->key_chunk);
  if (nearest > sees.right) {
    if (step < 0) idle = rpi_min(idle, rpi_divide_up(nearest - sees.right, -step));
  } else if (farthest < -sees.left) {
    if (step > 0) idle = rpi_min(idle, rpi_divide_up(-sees.left - farthest, step));
  } else {
    idle = 0;
  }
  return rpi_max(idle, 0);
}

/* The item `count` after this one. */
static pair pair_after(const rp_attention *s, int64_t phase, const pair *p, int64_t count) {
  return pair_from(s, phase, p->b, p->query_chunk + count);
}

/* Does this item meet its chunk of queries (keys) before any other item does? It
 * overwrites the gradients there, later ones add. */
static bool first_for_queries(const pair *p, int64_t key_count) {
  return p->key_chunk == (p->query_chunk < key_count ? p->query_chunk : 0);
}
static bool first_for_keys(const pair *p, int64_t query_count) {
  return p->query_chunk == rpi_min(p->key_chunk, query_count - 1);
}

/* The rectangle of an item. */
typedef struct rectangle {
  int64_t query, rows, key, keys;
} rectangle;

static rectangle rectangle_of(const rp_attention *s, const rpi_sequence *seq, const pair *p) {
  const chunks q = query_chunks(s, seq), k = key_chunks(s, seq);
  const int64_t query = p->query_chunk * q.rows, key = p->key_chunk * k.rows;
  return (rectangle){.query = query,
                     .rows = rpi_min(q.rows, seq->queries - query),
                     .key = key,
                     .keys = rpi_min(k.rows, seq->keys - key)};
}

#endif
