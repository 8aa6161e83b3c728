/* SPDX-License-Identifier: Apache-2.0
 *
 * pairs.h: one attention call as kernels read it, and what a pair (i, j) takes from it. Shared by
 * forward, backward and maps.
 *
 * A Call is what rp_attention says, in the types of the device: maps, masks and sequences are
 * staged, counts are 32 bits wide (read_call refuses what does not fit), scores are in units of
 * log 2.
 *
 * Terms come in two sorts:
 *
 *   bands     functions of the distance d = j - i - start. All bands of one kind are one function,
 *             constant up to `low` and from `high` on, whatever their tables, buckets and ends:
 *
 *                  ______________
 *                 |              \____/\__________
 *               -inf     low ........ high       inf
 *
 *             A tile of keys wholly before low, or behind high, meets one relation: it costs what
 *             plain attention costs, and one number a row.
 *
 *   lookups   what must be looked up pair by pair: labels, explicit positions, edges
 *
 * Tiles are 64 queries or keys; a list of them (make_tiles) is what the blocks of a pass share.
 */
#ifndef RPC_PAIRS_H
#define RPC_PAIRS_H

#include "context.h"
#include "philox.h"

namespace rpc {

constexpr int64_t kWidest = 256;                /* D and Dv */
constexpr int64_t kMostRows = int64_t{1} << 28; /* of a sequence and of a table: see read_call */
constexpr int64_t kFar = int64_t{1} << 30;      /* beyond any distance between two rows */

/* ---- what a call is ------------------------------------------------------------- */

struct Sequence {
  int64_t query_row, key_row;     /* first row, along row_stride (packed arrays) */
  int64_t query_batch, key_batch; /* along batch_stride (padded arrays) */
  int64_t lse_row;                /* of head 0; head h's is h * Call.lse_head_stride further on */
  int64_t edge_row;               /* of query 0 in edge_starts */
  int32_t queries, keys;          /* in use */
  int32_t query_rows, key_rows;   /* in the arrays: from queries, or keys, on they are padding */
  int32_t start;                  /* absolute position of query 0, cut off at kFar */
  int32_t nearest, farthest;      /* i may see j by position: nearest <= j - i <= farthest */
  uint32_t ordinal;               /* of dropout */
};

/* The table of a term, and how a distance finds a row of it. */
struct Part {
  const float *table;
  int64_t head_stride, row_stride;
  const int32_t *buckets; /* or NULL */
  int32_t left, right;
  bool clip;
};

struct Band {
  int32_t count; /* parts; 0: there is no such term */
  int32_t low, high;
  Part parts[RP_TERMS];
};

enum Kind { KIND_KEY, KIND_QUERY, KIND_BIAS, KIND_VALUE };
enum Map { MAP_POSITIONS, MAP_LABELS, MAP_EDGES };

struct Lookup {
  Part part;
  Kind kind;
  Map map;
  int32_t place; /* which of the terms of its kind */
  int32_t rows;  /* T */

  const int32_t *query_positions, *key_positions;
  int64_t query_position_stride, key_position_stride; /* between sequences; packed: unused */
  bool packed_queries, packed_keys;

  const void *labels;
  int32_t label_bytes;
  int64_t label_batch_stride, label_head_stride, label_row_stride;
  const int64_t *label_starts;

  const int64_t *edge_starts;
  const int32_t *edge_keys, *edge_labels;
};

struct Call {
  rp_rows q, k, v; /* elements as the placement says */
  int32_t B, H, D, Dv;
  int32_t sharers; /* heads of queries that share one of keys */
  const Sequence *sequences;
  int64_t lse_head_stride;
  float scale;   /* of products, log2(e) included */
  float softcap; /* units of log 2; 0: none */

  Band key, query, bias, value;
  Lookup lookups[4 * RP_TERMS];
  int32_t lookup_count;
  bool score_lookups, value_lookups; /* are there any of them? */
  const float *position_bias;        /* or NULL */
  int64_t position_bias_stride;

  const uint8_t *mask; /* or NULL */
  int64_t mask_batch_stride, mask_head_stride, mask_row_stride;
  const int64_t *mask_starts;

  Dropout dropout; /* of head 0; head h has the site h further on */
};

struct Tile {
  int32_t sequence, row; /* first query, or key */
};

/* The tiles of one head, for a pass: what takes long comes first, so that at the end no block is
 * still at it when the others are done. Blocks of several heads go through the list side by side:
 * of as many as the GPU's cache holds. */
struct Tiles {
  const Tile *list;
  int32_t count, heads; /* heads: side by side */
};

/* Sequences and heads have a device's sizes. */
rp_status check_sizes(const rp_attention *shape);

/* The call on the device: checks its sizes, and stages the host's arrays. */
rp_status read_call(const rp_attention *shape, rp_rows q, rp_rows k, rp_rows v, Call *call);

/* Rows of queries, and of keys, of all sequences, those of padding included. */
int64_t all_query_rows(const rp_attention *shape);
int64_t all_key_rows(const rp_attention *shape);

/* What read_call staged for one sequence (the host's own copy of it). */
Sequence sequence_of(const rp_attention *shape, int64_t b);

/* All tiles of `size` queries, or of keys, those of padding included, staged. in_order: those of
 * one sequence by their rows, which where none is longer than one before it they are anyway. */
rp_status make_tiles(const rp_attention *shape, bool keys, int size, Tiles *tiles,
                     bool in_order = false);

/* Heads of queries that share one of keys, side by side. */
int32_t sharers_of(const rp_attention *shape);

/* The placement of a call; default where there is none. */
rp_placement placement_of(const rp_attention *shape);

/* Backward's part of attention_workspace (attention_backward.cu). */
rp_status backward_workspace(const rp_attention *shape, int64_t *bytes);

/* Can rows be read 16 bytes at a time? */
template <class T>
bool rows_aligned(const T &x, int64_t width, int64_t element) {
  const int64_t step = 16 / element;
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && width % step == 0 &&
         x.batch_stride % step == 0 && x.head_stride % step == 0 && x.row_stride % step == 0;
}

/* ---- on the device ----------------------------------------------------------------- */

/* A block's part of a pass in which every head's tiles are dealt to several blocks: to and fro, so
 * that who has the longest of one round has the shortest of the next. */
struct Deal {
  int head, own, round;
  __device__ int tile() const { return round + own; } /* or beyond the list: all are dealt */
  __device__ void next(int blocks) {
    round += blocks;
    own = blocks - 1 - own;
  }
};

/* Called: inlined, its divisions keep registers that tiles of 128 queries lack on sm_80. */
__device__ RPC_CALLED inline Deal deal_at(const Tiles &tiles, int heads, int blocks, int index) {
  const int before = index / (tiles.heads * blocks);
  const int first = before * tiles.heads, rest = index - first * blocks;
  const int together = first + tiles.heads < heads ? tiles.heads : heads - first;
  return {first + rest % together, rest / together, 0};
}
__device__ inline Deal deal_of(const Tiles &tiles, int heads, int blocks) {
  return deal_at(tiles, heads, blocks, static_cast<int>(blockIdx.x));
}

/* Row `row` of a sequence and head; batch and row as in Sequence. */
template <class T>
__device__ inline const T *row_of(const rp_rows &x, int64_t batch, int64_t head, int64_t row) {
  return reinterpret_cast<const T *>(x.data) + batch * x.batch_stride + head * x.head_stride +
         row * x.row_stride;
}
template <class T>
__device__ inline T *row_of(const rp_rows_out &x, int64_t batch, int64_t head, int64_t row) {
  return reinterpret_cast<T *>(x.data) + batch * x.batch_stride + head * x.head_stride +
         row * x.row_stride;
}

/* The head of keys of a head of queries. Called: see deal_at. */
__device__ RPC_CALLED inline int shared_head(int head, int sharers) { return head / sharers; }
__device__ inline int key_head(const Call &call, int head) {
  return call.sharers == 1 ? head : shared_head(head, call.sharers);
}

__device__ inline int64_t lse_of(const Call &call, const Sequence &seq, int64_t head) {
  return seq.lse_row + head * call.lse_head_stride;
}

/* May query i see key j, as far as position and length say? */
__device__ inline bool in_sight(const Sequence &seq, int i, int j) {
  return j < seq.keys && j - i >= seq.nearest && j - i <= seq.farthest;
}

/* The row of the table for distance d, or -1. */
__device__ inline int part_row(const Part &part, int d) {
  if (!part.clip && (d < -part.left || d > part.right)) return -1;
  const int column = (d < -part.left ? -part.left : d > part.right ? part.right : d) + part.left;
  return part.buckets ? part.buckets[column] : column;
}

/* Row `row` of a table for one head. */
__device__ inline const float *table_row(const Part &part, int head, int row) {
  return part.table + head * part.head_stride + row * part.row_stride;
}

/* Number c of the vector at distance d; of bias bands c is 0. */
__device__ inline float band_at(const Band &band, int head, int d, int c) {
  float sum = 0;
  for (int p = 0; p < band.count; p++) {
    const int row = part_row(band.parts[p], d);
    if (row >= 0) sum += table_row(band.parts[p], head, row)[c];
  }
  return sum;
}

/* What some queries and keys meet of a band, by the distances they span. */
enum Meets { MEETS_NOTHING, MEETS_HEAD, MEETS_BAND, MEETS_TAIL };

__device__ inline Meets band_meets(const Band &band, int nearest, int farthest) {
  if (band.count == 0) return MEETS_NOTHING;
  if (farthest <= band.low) return MEETS_HEAD;
  return nearest >= band.high ? MEETS_TAIL : MEETS_BAND;
}

/* Where the matrix of labels, or the mask, of a sequence and head has row i. */
__device__ inline int64_t pair_row(const int64_t *starts, int64_t batch_stride, int64_t head_stride,
                                   int64_t row_stride, int b, int head, int i, int keys) {
  const int64_t from = head * head_stride;
  return starts ? from + starts[b] + int64_t{i} * keys : from + b * batch_stride + i * row_stride;
}

__device__ inline bool mask_shows(const Call &call, const Sequence &seq, int b, int head, int i,
                                  int j) {
  return call.mask[pair_row(call.mask_starts, call.mask_batch_stride, call.mask_head_stride,
                            call.mask_row_stride, b, head, i, seq.keys) +
                   j] != 0;
}

/* Does a dense mask hide every pair of rows x keys pairs from (i, j) on? Such a tile adds nothing.
 * All threads of the block ask, and all are told. */
template <int kRows, int kKeys>
__device__ inline bool mask_hides(const Call &call, const Sequence &seq, int b, int head, int i,
                                  int j) {
  if (!call.mask) return false;
  const int rows = seq.queries - i < kRows ? seq.queries - i : kRows;
  const int keys = seq.keys - j < kKeys ? seq.keys - j : kKeys;
  bool any = false;
  for (int at = static_cast<int>(threadIdx.x); at < kRows * kKeys; at += blockDim.x) {
    const int row = at / kKeys, key = at % kKeys;
    any |= row < rows && key < keys && mask_shows(call, seq, b, head, i + row, j + key);
  }
  return __syncthreads_or(any) == 0;
}

/* The row of the table for a pair, or -1. Not for edges. */
__device__ inline int relation_of(const Lookup &x, const Sequence &seq, int b, int head, int i,
                                  int j) {
  if (x.map == MAP_LABELS) {
    const int64_t at = j + pair_row(x.label_starts, x.label_batch_stride, x.label_head_stride,
                                    x.label_row_stride, b, head, i, seq.keys);
    if (x.label_bytes == 1) return static_cast<const int8_t *>(x.labels)[at];
    if (x.label_bytes == 2) return static_cast<const int16_t *>(x.labels)[at];
    return static_cast<const int32_t *>(x.labels)[at];
  }
  const int64_t query = x.packed_queries ? seq.query_row : b * x.query_position_stride;
  const int64_t key = x.packed_keys ? seq.key_row : b * x.key_position_stride;
  return part_row(x.part, x.key_positions[key + j] - x.query_positions[query + i]);
}

/* The edges of query i that end in the keys from j to j + count - 1: begin to end - 1. */
struct EdgeRange {
  int64_t begin, end;
};
__device__ inline int64_t edge_before(const Lookup &x, int64_t low, int64_t high, int j) {
  while (low < high) { /* the first edge not before j */
    const int64_t middle = low + (high - low) / 2;
    if (x.edge_keys[middle] < j) low = middle + 1;
    else high = middle;
  }
  return low;
}
__device__ inline EdgeRange edges_of(const Lookup &x, const Sequence &seq, int i, int j,
                                     int count) {
  const int64_t first = x.edge_starts[seq.edge_row + i], last = x.edge_starts[seq.edge_row + i + 1];
  const int64_t begin = edge_before(x, first, last, j);
  return {begin, edge_before(x, begin, last, j + count)};
}

__device__ inline Dropout dropout_at(const Call &call, int head) {
  Dropout d = call.dropout;
  d.site += static_cast<uint32_t>(head);
  return d;
}

/* s = cap tanh(s / cap), both in units of log 2. */
__device__ inline float soft_capped(float cap, float s) { return cap * tanhf(s / cap); }

}  // namespace rpc

#endif
