/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_plan.h: how one attention call is cut into work.
 *
 * Each sequence is cut into chunks of queries and chunks of keys. An item is one
 * head of one sequence on one chunk of queries (forward), or on one pair of chunks
 * (backward). All scratch is sized by chunks: memory does not grow with N or M.
 *
 * Backward walks the pairs in phases, like a Latin square:
 *
 *               key chunk          phase 0: a, b, c, d     no two items of a phase
 *               0  1  2  3         phase 1: e, f, g, h     share a chunk of queries
 *   query    0  a  e  i  m         phase 2: i, j, k, l     or of keys, so each adds
 *   chunk    1  p  b  f  j         phase 3: m, n, o, p     to dq, dk and dv directly,
 *            2  k  o  c  g                                 in the order of the phases
 *            3  h  l  n' d                                 whatever the threads do.
 *
 * (n' stands for n: key chunk = (query chunk + phase) mod phases.) There are no
 * partial copies of dk and dv, and no second pass. Only the gradients of tables,
 * which every item touches, are summed per slot: a run of items of one head whose
 * borders depend on shapes alone. Slots are added up in order after each phase.
 */
#ifndef RPI_ATTENTION_PLAN_H
#define RPI_ATTENTION_PLAN_H

#include "base/memory.h"
#include "base/threads.h"
#include "ops/band.h"

#define RPI_CHUNK 512 /* rows of a chunk at most: 128 KiB of keys at D = 64, a quarter of an L2 */
#define RPI_BLOCK 96  /* queries that share a walk over a chunk of keys: a multiple of RPI_STRIP */

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

/* Rows of a chunk. Long sequences are cut at RPI_CHUNK; few sequences finer, down
 * to 128 rows, so that some sixteen items exist for the threads. */
static int64_t chunk_rows(const rp_attention *s, int64_t rows, int64_t step) {
  const int64_t heads = rpi_max(s->B * s->H, 1);
  const int64_t wanted = rpi_min((rows + 127) / 128, (16 + heads - 1) / heads);
  const int64_t count = rpi_max(rpi_max((rows + RPI_CHUNK - 1) / RPI_CHUNK, wanted), 1);
  return rpi_max(rpi_round_up((rows + count - 1) / count, step), step);
}

typedef struct chunks {
  int64_t rows, count; /* count >= 1, also for an empty sequence */
} chunks;

static chunks chunks_of(const rp_attention *s, int64_t rows, int64_t step) {
  const int64_t size = chunk_rows(s, rows, step);
  return (chunks){.rows = size, .count = rpi_max((rows + size - 1) / size, 1)};
}

static chunks query_chunks(const rp_attention *s, const rpi_sequence *seq) {
  return chunks_of(s, seq->queries, RPI_STRIP);
}
static chunks key_chunks(const rp_attention *s, const rpi_sequence *seq) {
  return chunks_of(s, seq->keys, RPI_TILE);
}

/* The first distance any visible pair of the call has. */
static int64_t nearest_distance(const rp_attention *s) {
  int64_t nearest = INT64_MAX;
  for (int64_t b = 0; b < s->B; b++) {
    const rpi_sequence seq = sequence_of(s, b);
    if (seq.queries > 0 && seq.keys > 0) {
      nearest = rpi_min(nearest, -(seq.start + seq.queries - 1));
    }
  }
  return nearest;
}

/* One end of a pair of rectangles: queries [query, query + rows) of a sequence and
 * keys [key, key + keys), with the distances between them. */
typedef struct reach {
  int64_t nearest, farthest;
} reach;

static reach reach_of(const rpi_sequence *seq, bool causal, int64_t query, int64_t rows,
                      int64_t key, int64_t keys) {
  const int64_t farthest = key + keys - 1 - (query + seq->start);
  return (reach){.nearest = key - (query + rows - 1 + seq->start),
                 .farthest = causal ? rpi_min(farthest, 0) : farthest};
}

/* Sizes that bound every chunk and window of a call. */
typedef struct bounds {
  int64_t queries, keys;             /* rows of the largest chunks */
  int64_t block;                     /* rows of the largest block of queries */
  int64_t key_columns, value_columns; /* of the widest window of a block */
  int64_t width, value_width;        /* D and Dv, rounded up to vectors */
} bounds;

static int64_t widest_window(const rp_relation *relation, int64_t rows, int64_t keys) {
  if (!relation->table) return 0;
  return rpi_max(rpi_min(relation->left + relation->right + 1, rows + keys), 1);
}

static bounds bounds_of(const rp_attention *s) {
  int64_t queries = 0, keys = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const rpi_sequence seq = sequence_of(s, b);
    queries = rpi_max(queries, query_chunks(s, &seq).rows);
    keys = rpi_max(keys, key_chunks(s, &seq).rows);
  }
  const int64_t block = rpi_min(RPI_BLOCK, queries);
  return (bounds){
      .queries = queries,
      .keys = keys,
      .block = block,
      .key_columns = widest_window(&s->key, block, keys),
      .value_columns = widest_window(&s->value, block, keys),
      .width = rpi_round_up(s->D, RPI_LANES),
      .value_width = rpi_round_up(s->Dv, RPI_LANES),
  };
}

/* ---- backward: phases and slots ---------------------------------------- */

#define RPI_SLOTS 64 /* slots aimed at in a phase: enough for as many threads */

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
    for (; query_chunk < queries; query_chunk++) {
      const int64_t key_chunk = (query_chunk + phase) % phases;
      if (key_chunk < keys) return (pair){b, query_chunk, key_chunk};
    }
  }
  return (pair){.b = s->B};
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

/* A run of items of one head, and the distances its partial table gradients span.
 * key_first > key_last: the slot meets no column of the key term. */
typedef struct slot {
  int64_t head;
  pair begin; /* items from here ... */
  int64_t items;
  int64_t key_first, key_last, value_first, value_last;
  real *key_sums, *value_sums; /* [columns][width]; values end with one row: the sum of dout */
} slot;

static void widen(const term *t, const reach *r, int64_t *first, int64_t *last) {
  const window w = window_of(t, r->nearest, r->farthest);
  if (w.columns == 0) return;
  if (*first > *last) {
    *first = w.first;
    *last = w.first + w.columns - 1;
  } else {
    *first = rpi_min(*first, w.first);
    *last = rpi_max(*last, w.first + w.columns - 1);
  }
}

static int64_t pair_cost(const rectangle *r) { return rpi_max(r->rows, 0) * rpi_max(r->keys, 0) + 1; }

/* The columns one item can reach, and the lines of a slot's memory. */
static int64_t slot_columns(const bounds *n) { return n->queries + n->keys; }
static int64_t slot_lines(const rp_relation *relation, const bounds *n) {
  return widest_window(relation, n->queries, n->keys) + 1;
}

/* Lists the slots of a phase for one head (slots == NULL: only counts them). A slot
 * ends where it has its share of the work, or where its windows would span more
 * than `columns`. Key and value are the terms of that head: windows
 * are the same for all heads. */
static int64_t list_slots(const rp_attention *s, int64_t phase, const term *key, const term *value,
                          int64_t columns, slot *slots) {
  int64_t total = 0;
  for (pair p = pair_from(s, phase, 0, 0); p.b < s->B; p = pair_from(s, phase, p.b, p.query_chunk + 1)) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const rectangle r = rectangle_of(s, &seq, &p);
    total += pair_cost(&r);
  }
  const int64_t per_head = (RPI_SLOTS + s->H - 1) / s->H;
  const int64_t share = (total + per_head - 1) / per_head;
  int64_t count = 0, cost = 0;
  slot current = {0};
  for (pair p = pair_from(s, phase, 0, 0); p.b < s->B; p = pair_from(s, phase, p.b, p.query_chunk + 1)) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const rectangle r = rectangle_of(s, &seq, &p);
    const reach reached = reach_of(&seq, s->causal, r.query, r.rows, r.key, r.keys);
    slot wider = current;
    if (current.items > 0) {
      widen(key, &reached, &wider.key_first, &wider.key_last);
      widen(value, &reached, &wider.value_first, &wider.value_last);
    }
    if (current.items == 0 || cost + pair_cost(&r) > share ||
        wider.key_last - wider.key_first >= columns ||
        wider.value_last - wider.value_first >= columns) {
      if (current.items > 0 && slots) slots[count - 1] = current;
      count++;
      cost = 0;
      wider = (slot){.begin = p, .key_first = 1, .value_first = 1};
      widen(key, &reached, &wider.key_first, &wider.key_last);
      widen(value, &reached, &wider.value_first, &wider.value_last);
    }
    wider.items++;
    cost += pair_cost(&r);
    current = wider;
  }
  if (current.items > 0 && slots) slots[count - 1] = current;
  return count;
}

#endif
