/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_tile.h: p~ and ds of 64 queries and 64 keys, with every term, map and mask: (1) to (3)
 * of attention_backward.cu.
 */
#ifndef RPC_BACKWARD_TILE_H
#define RPC_BACKWARD_TILE_H

#include "attention_backward.h"

namespace rpc {

constexpr int kTile = 64, kThreads = 256;
constexpr int kSide = 16;           /* threads of a side: each has every sixteenth row and column */
constexpr int kOwn = kTile / kSide; /* of a tile, so many rows and columns */
constexpr int kStep = 32;           /* numbers of a row that products have in shared memory */
constexpr int kColumns = 128;       /* of a gradient, that a block owns */
constexpr int kOwnColumns = kColumns / kSide;
constexpr int kBuckets = 64; /* rows of a table that a tile's weights are gathered by at once */

struct TileMemory {
  union { /* +1: rows start in different banks */
    struct {
      float x[kTile][kStep + 1], y[kTile][kStep + 1]; /* operands of a product */
    };
    float buckets[kTile][kBuckets + 1]; /* afterwards: backward_tables.h */
  };
  float weights[kTile][kTile + 1]; /* p~ */
  float slopes[kTile][kTile + 1];  /* ds */
  int32_t relation[kTile][kTile + 1];
  uint32_t keep[kTile][kTile / 4];                    /* a byte each */
  float key[kTile], value[kTile], query[kTile], bias; /* of one relation: scores */
  RowNumbers rows[kTile];
};

/* One tile: queries from i, keys from j. */
struct Where {
  Sequence seq;
  int b, head;
  int i, j, rows, keys; /* rows, keys: in use */
  int distance;         /* of the tile's first pair */
};

__device__ inline int thread_row() { return static_cast<int>(threadIdx.x) / kSide; }
__device__ inline int thread_column() { return static_cast<int>(threadIdx.x) % kSide; }
__device__ inline int smaller(int a, int b) { return a < b ? a : b; }
__device__ inline int larger(int a, int b) { return a > b ? a : b; }

/* Which end, or which part of a band a tile meets. */
__device__ inline Meets tile_meets(const Band &band, const Where &w) {
  return band_meets(band, w.distance - (kTile - 1), w.distance + kTile - 1);
}
__device__ inline int end_of(const Band &band, Meets meets) {
  return meets == MEETS_HEAD ? band.low : band.high;
}

/* f(row of the table) for every relation of a pair. */
template <class F>
__device__ inline void each_relation(const Lookup &x, const Where &w, int i, int j, F f) {
  if (x.map == MAP_EDGES) {
    const EdgeRange edges = edges_of(x, w.seq, i, j, 1);
    for (int64_t e = edges.begin; e < edges.end; e++) f(x.edge_labels[e]);
    return;
  }
  const int row = relation_of(x, w.seq, w.b, w.head, i, j);
  if (row >= 0) f(row);
}

/* ---- products --------------------------------------------------------------------- */

template <class E>
struct Operand {
  const E *rows; /* the first of the tile */
  int64_t stride;
  int count; /* in use */
};

template <class E>
__device__ inline Operand<E> query_rows(const rp_rows &x, const Where &w) {
  return {row_of<E>(x, w.seq.query_batch, w.head, w.seq.query_row + w.i), x.row_stride, w.rows};
}
template <class E>
__device__ inline Operand<E> key_rows(const rp_rows &x, const Where &w) {
  return {row_of<E>(x, w.seq.key_batch, w.head, w.seq.key_row + w.j), x.row_stride, w.keys};
}

template <class E>
__device__ inline void load_step(const Operand<E> &from, int column, int width,
                                 float (&to)[kTile][kStep + 1]) {
  for (int at = static_cast<int>(threadIdx.x); at < kTile * kStep; at += kThreads) {
    const int row = at / kStep, c = at % kStep;
    const bool there = row < from.count && column + c < width;
    to[row][c] = there ? static_cast<float>(from.rows[row * from.stride + column + c]) : 0.0f;
  }
}

/* sums = x . y transposed, of the thread's pairs. */
template <class E>
__device__ void product(const Operand<E> &x, const Operand<E> &y, int width, TileMemory &s,
                        float (&sums)[kOwn][kOwn]) {
  const int row = thread_row(), column = thread_column();
  for (int done = 0; done < width; done += kStep) {
    __syncthreads();
    load_step(x, done, width, s.x);
    load_step(y, done, width, s.y);
    __syncthreads();
    const int count = smaller(kStep, width - done);
    for (int c = 0; c < count; c++) {
      float own_x[kOwn], own_y[kOwn];
#pragma unroll
      for (int a = 0; a < kOwn; a++) own_x[a] = s.x[row + kSide * a][c];
#pragma unroll
      for (int a = 0; a < kOwn; a++) own_y[a] = s.y[column + kSide * a][c];
#pragma unroll
      for (int a = 0; a < kOwn; a++) {
#pragma unroll
        for (int b = 0; b < kOwn; b++) sums[a][b] += own_x[a] * own_y[b];
      }
    }
  }
}

/* x . w, with u added to x where there is one. */
template <class E>
__device__ inline float dot_table(const E *x, const float *u, const float *w, int width) {
  float sum = 0;
  for (int c = 0; c < width; c++) sum += (static_cast<float>(x[c]) + (u ? u[c] : 0.0f)) * w[c];
  return sum;
}

/* The same with the vectors of a band at one distance. */
template <class E>
__device__ inline float dot_band(const E *x, const float *u, const Band &band, int head, int d,
                                 int width) {
  float sum = 0;
  for (int p = 0; p < band.count; p++) {
    const int row = part_row(band.parts[p], d);
    if (row >= 0) sum += dot_table(x, u, table_row(band.parts[p], head, row), width);
  }
  return sum;
}

/* ---- p~ and ds of a tile ------------------------------------------------------------ */

__device__ inline const float *position_bias_of(const Call &call, int head) {
  return call.position_bias ? call.position_bias + head * call.position_bias_stride : nullptr;
}

/* Where a tile lies beyond a band: one score for each row of the side that meets it. */
template <class E>
__device__ void band_ends(const Backward &c, const Where &w, TileMemory &s) {
  const Call &call = c.call;
  const Operand<E> q = query_rows<E>(call.q, w), k = key_rows<E>(call.k, w);
  const Operand<E> dz = query_rows<E>(c.dout, w);
  const float *const u = position_bias_of(call, w.head);
  const Meets key = tile_meets(call.key, w), query = tile_meets(call.query, w);
  const Meets value = tile_meets(call.value, w), bias = tile_meets(call.bias, w);
  const int row = static_cast<int>(threadIdx.x) % kTile;
  switch (threadIdx.x / kTile) { /* four groups of threads */
    case 0:
      if ((key == MEETS_HEAD || key == MEETS_TAIL) && row < q.count) {
        s.key[row] =
            dot_band(q.rows + row * q.stride, u, call.key, w.head, end_of(call.key, key), call.D);
      }
      break;
    case 1:
      if ((query == MEETS_HEAD || query == MEETS_TAIL) && row < k.count) {
        s.query[row] = dot_band(k.rows + row * k.stride, static_cast<const float *>(nullptr),
                                call.query, w.head, end_of(call.query, query), call.D);
      }
      break;
    case 2:
      if ((value == MEETS_HEAD || value == MEETS_TAIL) && row < dz.count) {
        s.value[row] = dot_band(dz.rows + row * dz.stride, static_cast<const float *>(nullptr),
                                call.value, w.head, end_of(call.value, value), call.Dv);
      }
      break;
    default:
      if ((bias == MEETS_HEAD || bias == MEETS_TAIL) && row == 0) {
        s.bias = band_at(call.bias, w.head, end_of(call.bias, bias), 0);
      }
  }
}

/* The products of a row with all vectors of a short table that is looked up, or NULL. */
__device__ inline const float *met_numbers(const Backward &c, const Where &w, int lookup, int row,
                                           int column) {
  const Lookup &x = c.call.lookups[lookup];
  const float *const met = c.met[lookup];
  if (!met) return nullptr;
  const int64_t at = x.kind == KIND_QUERY ? key_number(c, w.seq, w.head, w.j + column)
                                          : lse_of(c.call, w.seq, w.head) + w.i + row;
  return met + at * x.rows;
}

/* What terms add to a pair's score, in units of log 2. */
template <class E>
__device__ float term_scores(const Backward &c, const Where &w, const TileMemory &s, int row,
                             int column) {
  const Call &call = c.call;
  const int i = w.i + row, j = w.j + column, d = w.distance + column - row;
  const Operand<E> q = query_rows<E>(call.q, w), k = key_rows<E>(call.k, w);
  const E *const q_row = q.rows + row * q.stride, *const k_row = k.rows + column * k.stride;
  const float *const u = position_bias_of(call, w.head);
  float products = 0, numbers = 0;
  if (call.key.count) {
    products += tile_meets(call.key, w) == MEETS_BAND
                    ? dot_band(q_row, u, call.key, w.head, d, call.D)
                    : s.key[row];
  }
  if (call.query.count) {
    products +=
        tile_meets(call.query, w) == MEETS_BAND
            ? dot_band(k_row, static_cast<const float *>(nullptr), call.query, w.head, d, call.D)
            : s.query[column];
  }
  if (call.bias.count) {
    numbers += tile_meets(call.bias, w) == MEETS_BAND ? band_at(call.bias, w.head, d, 0) : s.bias;
  }
  for (int x = 0; x < call.lookup_count; x++) {
    const Lookup &own = call.lookups[x];
    if (own.kind == KIND_VALUE) continue;
    const float *const met = met_numbers(c, w, x, row, column);
    each_relation(own, w, i, j, [&](int relation) {
      const float *const line = table_row(own.part, w.head, relation);
      if (own.kind == KIND_BIAS) numbers += line[0];
      else if (met) products += met[relation];
      else if (own.kind == KIND_KEY) products += dot_table(q_row, u, line, call.D);
      else products += dot_table(k_row, static_cast<const float *>(nullptr), line, call.D);
    });
  }
  return call.scale * products + kLog2E * numbers;
}

/* dz_i . wV[r] of a pair. */
template <class E>
__device__ float term_values(const Backward &c, const Where &w, const TileMemory &s, int row,
                             int column) {
  const Call &call = c.call;
  const Operand<E> dz = query_rows<E>(c.dout, w);
  const E *const dz_row = dz.rows + row * dz.stride;
  const float *const none = nullptr;
  float sum = 0;
  if (call.value.count) {
    sum += tile_meets(call.value, w) == MEETS_BAND
               ? dot_band(dz_row, none, call.value, w.head, w.distance + column - row, call.Dv)
               : s.value[row];
  }
  for (int x = 0; call.value_lookups && x < call.lookup_count; x++) {
    const Lookup &own = call.lookups[x];
    if (own.kind != KIND_VALUE) continue;
    const float *const met = met_numbers(c, w, x, row, column);
    each_relation(own, w, w.i + row, w.j + column, [&](int relation) {
      sum += met ? met[relation]
                 : dot_table(dz_row, none, table_row(own.part, w.head, relation), call.Dv);
    });
  }
  return sum;
}

/* Bytes of dropout, of all pairs of a tile: a thread makes those of sixteen. */
__device__ inline void make_keep(const Call &call, const Where &w, TileMemory &s) {
  const int row = static_cast<int>(threadIdx.x) / 4, block = static_cast<int>(threadIdx.x) % 4;
  const uint4 bytes =
      keep_block(dropout_at(call, w.head), w.seq.ordinal, static_cast<uint32_t>(w.i + row),
                 static_cast<uint32_t>(w.j / 16 + block));
  s.keep[row][4 * block] = bytes.x;
  s.keep[row][4 * block + 1] = bytes.y;
  s.keep[row][4 * block + 2] = bytes.z;
  s.keep[row][4 * block + 3] = bytes.w;
}

/* (1) to (3): leaves p~ and ds of a tile in shared memory, 0 for what is hidden. */
template <class E>
__device__ void weigh_tile(const Backward &c, const Where &w, TileMemory &s) {
  const Call &call = c.call;
  const int row = thread_row(), column = thread_column();
  float scores[kOwn][kOwn] = {}, dp[kOwn][kOwn] = {};
  __syncthreads(); /* whoever read the tile before is done */
  if (static_cast<int>(threadIdx.x) < w.rows) {
    s.rows[threadIdx.x] = c.rows[lse_of(call, w.seq, w.head) + w.i + threadIdx.x];
  }
  if (call.dropout.threshold) make_keep(call, w, s);
  band_ends<E>(c, w, s);
  product(query_rows<E>(call.q, w), key_rows<E>(call.k, w), call.D, s, scores);
  product(query_rows<E>(c.dout, w), key_rows<E>(call.v, w), call.Dv, s, dp);
  const bool score_terms =
      call.key.count || call.query.count || call.bias.count || call.score_lookups;
  const bool value_terms = call.value.count || call.value_lookups;
  for (int a = 0; a < kOwn; a++) {
    for (int b = 0; b < kOwn; b++) {
      const int i = row + kSide * a, j = column + kSide * b;
      float weight = 0, slope = 0;
      if (i < w.rows && in_sight(w.seq, w.i + i, w.j + j) &&
          (!call.mask || mask_shows(call, w.seq, w.b, w.head, w.i + i, w.j + j))) {
        float score = call.scale * scores[a][b], bend = 1;
        if (score_terms) score += term_scores<E>(c, w, s, i, j);
        if (call.softcap != 0) {
          const float t = tanhf(score / call.softcap);
          score = call.softcap * t;
          bend = 1 - t * t;
        }
        if (value_terms) dp[a][b] += term_values<E>(c, w, s, i, j);
        const float p = exp2f(at_most_zero(score - s.rows[i].lse));
        float keep = 1;
        if (call.dropout.threshold) {
          keep = is_kept(call.dropout, s.keep[i][j / 4], j % 4) ? call.dropout.scale : 0.0f;
        }
        weight = keep * p;
        slope = p > 0 ? p * (keep * dp[a][b] - s.rows[i].delta) * bend : p;
      }
      s.weights[i][j] = weight;
      s.slopes[i][j] = slope;
    }
  }
  __syncthreads();
}

__device__ inline Where place(const Call &call, int b, int head) {
  Where w = {};
  w.seq = call.sequences[b];
  w.b = b;
  w.head = head;
  return w;
}

__device__ inline void at_tile(Where *w, int i, int j) {
  w->i = i;
  w->j = j;
  w->rows = larger(smaller(kTile, w->seq.queries - i), 0);
  w->keys = larger(smaller(kTile, w->seq.keys - j), 0);
  w->distance = j - i - w->seq.start;
}

/* Tiles of keys that some of 64 queries from i see: from first to last, in steps of a tile. */
struct Stretch {
  int first, last;
};
__device__ inline Stretch keys_seen(const Sequence &seq, int i) {
  const int end = smaller(i + kTile, seq.queries);
  if (i >= end) return {0, -1};
  return {larger(i + seq.nearest, 0) / kTile * kTile,
          smaller(end - 1 + seq.farthest, seq.keys - 1)};
}
__device__ inline Stretch queries_that_see(const Sequence &seq, int j) {
  const int end = smaller(j + kTile, seq.keys);
  if (j >= end) return {0, -1};
  return {larger(j - seq.farthest, 0) / kTile * kTile,
          smaller(end - 1 - seq.nearest, seq.queries - 1)};
}

}  // namespace rpc

#endif
