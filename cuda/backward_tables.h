/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_tables.h: what a tile's p~ and ds add to the gradients of tables, (6) of
 * attention_backward.cu.
 *
 * Tables that are looked up have few rows mostly: then the weights of every query are gathered by
 * relation first, in buckets, and these are multiplied with the queries. Of a band every distance
 * is a sum over one diagonal of the tile.
 */
#ifndef RPC_BACKWARD_TABLES_H
#define RPC_BACKWARD_TABLES_H

#include "backward_tile.h"

namespace rpc {

constexpr int kGathered = 512; /* rows of the longest table that weights are gathered by */

/* Who adds to which number of a term's lines: a thread has one column, of several that a wide
 * table has, and of the rows those of one class, modulo the number of classes. So no two threads
 * share a number, and each adds in the order of the pairs. */
struct Share {
  int column, step; /* the first column, and how far the next is */
  int rank, classes;
};

__device__ inline Share share_of(int width) {
  int step = 1;
  while (step < width && step < kThreads) step *= 2;
  const int thread = static_cast<int>(threadIdx.x);
  return {thread % step, step, thread / step, kThreads / step};
}

/* What a weight of a term is multiplied with: column `at` of the query, or the key, or 1. */
template <class E>
__device__ inline float met_number(const Backward &c, const Where &w, Kind kind, int i, int j,
                                   int at) {
  const Call &call = c.call;
  if (kind == KIND_BIAS) return 1;
  if (kind == KIND_QUERY) return key_rows<E>(call.k, w).rows[j * call.k.row_stride + at];
  if (kind == KIND_VALUE) return query_rows<E>(c.dout, w).rows[i * c.dout.row_stride + at];
  const float *const u = position_bias_of(call, w.head);
  return static_cast<float>(query_rows<E>(call.q, w).rows[i * call.q.row_stride + at]) +
         (u ? u[at] : 0.0f);
}

__device__ inline const float (&weights_of(const TileMemory &s, Kind kind))[kTile][kTile + 1] {
  return kind == KIND_VALUE ? s.weights : s.slopes;
}

/* s.buckets[k][r] times what line k met, summed over the lines: into table row first + r. Lines are
 * queries, or keys of query terms. */
template <class E>
__device__ void sum_buckets(const Backward &c, const Where &w, const TileMemory &s,
                            const Summed &term, int first, int count, float *lines) {
  const Share own = share_of(term.width);
  const int met = term.kind == KIND_QUERY ? w.keys : w.rows;
  for (int r = own.rank; r < count; r += own.classes) {
    for (int at = own.column; at < term.width; at += own.step) {
      float sum = 0;
      for (int k = 0; k < met; k++) {
        if (s.buckets[k][r] != 0) sum += s.buckets[k][r] * met_number<E>(c, w, term.kind, k, k, at);
      }
      lines[term.offset + int64_t{first + r} * term.width + at] += sum;
    }
  }
}

/* A tile beyond the band of a term: one relation, and of every line one sum. */
template <class E>
__device__ void sum_end(const Backward &c, const Where &w, TileMemory &s, const Summed &term,
                        int row, float *lines) {
  const auto &weights = weights_of(s, term.kind);
  const bool keys = term.kind == KIND_QUERY;
  const int k = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (k < kTile) {
    float sum = 0;
    for (int other = 0; other < kTile; other++) {
      sum += keys ? weights[other][k] : weights[k][other];
    }
    s.buckets[k][0] = sum;
  }
  __syncthreads();
  sum_buckets<E>(c, w, s, term, row, 1, lines);
}

/* A band's part: distance by distance. */
template <class E>
__device__ void sum_band(const Backward &c, const Where &w, TileMemory &s, const Summed &term,
                         const Part &part, const Band &band, float *lines) {
  const Meets meets = tile_meets(band, w);
  if (meets != MEETS_BAND) {
    const int row = part_row(part, end_of(band, meets));
    if (row >= 0) sum_end<E>(c, w, s, term, row, lines);
    return;
  }
  const Share own = share_of(term.width);
  const auto &weights = weights_of(s, term.kind);
  for (int x = 1 - kTile; x < kTile; x++) {
    const int row = part_row(part, w.distance + x);
    if (row < 0 || row % own.classes != own.rank) continue;
    const int first = larger(-x, 0), end = smaller(w.rows, w.keys - x);
    for (int at = own.column; at < term.width; at += own.step) {
      float sum = 0;
      for (int i = first; i < end; i++) {
        if (weights[i][i + x] == 0) continue;
        sum += weights[i][i + x] * met_number<E>(c, w, term.kind, i, i + x, at);
      }
      lines[term.offset + int64_t{row} * term.width + at] += sum;
    }
  }
}

/* Relations of a tile, in shared memory: what every thread is to look at. */
__device__ inline void fill_relations(const Lookup &x, const Where &w, TileMemory &s) {
  __syncthreads();
  for (int at = static_cast<int>(threadIdx.x); at < kTile * kTile; at += kThreads) {
    const int i = at / kTile, j = at % kTile;
    const bool there = i < w.rows && j < w.keys;
    s.relation[i][j] = there ? relation_of(x, w.seq, w.b, w.head, w.i + i, w.j + j) : -1;
  }
  __syncthreads();
}

/* The weights of every line by relation, for those from `first` on: four threads have a line, and
 * each a quarter of the relations. */
__device__ inline void fill_buckets(TileMemory &s, Kind kind, int first) {
  const auto &weights = weights_of(s, kind);
  const int k = static_cast<int>(threadIdx.x) / 4, rank = static_cast<int>(threadIdx.x) % 4;
  __syncthreads();
  for (int r = rank; r < kBuckets; r += 4) s.buckets[k][r] = 0;
  for (int other = 0; other < kTile; other++) {
    const int i = kind == KIND_QUERY ? other : k, j = kind == KIND_QUERY ? k : other;
    const int r = s.relation[i][j] - first;
    if (r >= 0 && r < kBuckets && r % 4 == rank) s.buckets[k][r] += weights[i][j];
  }
  __syncthreads();
}

template <class E>
__device__ void sum_lookup(const Backward &c, const Where &w, TileMemory &s, const Summed &term,
                           const Lookup &x, float *lines) {
  const Share own = share_of(term.width);
  const auto &weights = weights_of(s, term.kind);
  const auto add = [&](int i, int j, int row) {
    if (row % own.classes != own.rank) return;
    for (int at = own.column; at < term.width; at += own.step) {
      lines[term.offset + int64_t{row} * term.width + at] +=
          weights[i][j] * met_number<E>(c, w, term.kind, i, j, at);
    }
  };
  if (x.map == MAP_EDGES) {
    for (int i = 0; i < w.rows; i++) {
      const EdgeRange edges = edges_of(x, w.seq, w.i + i, w.j, w.keys);
      for (int64_t e = edges.begin; e < edges.end; e++) {
        const int j = x.edge_keys[e] - w.j;
        if (weights[i][j] != 0) add(i, j, x.edge_labels[e]);
      }
    }
    return;
  }
  fill_relations(x, w, s);
  if (x.rows <= kGathered) {
    for (int first = 0; first < x.rows; first += kBuckets) {
      fill_buckets(s, term.kind, first);
      sum_buckets<E>(c, w, s, term, first, smaller(kBuckets, x.rows - first), lines);
    }
    return;
  }
  for (int i = 0; i < w.rows; i++) {
    for (int j = 0; j < w.keys; j++) {
      if (s.relation[i][j] >= 0 && weights[i][j] != 0) add(i, j, s.relation[i][j]);
    }
  }
}

/* du: a thread has a column. */
__device__ inline void sum_bias(const Call &call, const Where &w, const TileMemory &s,
                                float *line) {
  const Meets meets = tile_meets(call.key, w);
  for (int at = static_cast<int>(threadIdx.x); at < call.D; at += kThreads) {
    float sum = 0, all = 0;
    for (int i = 0; i < w.rows; i++) {
      for (int j = 0; j < w.keys; j++) {
        const float ds = s.slopes[i][j];
        if (ds == 0) continue;
        all += ds;
        if (meets == MEETS_BAND) sum += ds * band_at(call.key, w.head, w.distance + j - i, at);
        for (int x = 0; call.score_lookups && x < call.lookup_count; x++) {
          const Lookup &term = call.lookups[x];
          if (term.kind != KIND_KEY) continue;
          each_relation(term, w, w.i + i, w.j + j,
                        [&](int row) { sum += ds * table_row(term.part, w.head, row)[at]; });
        }
      }
    }
    if (meets == MEETS_HEAD || meets == MEETS_TAIL) {
      sum += all * band_at(call.key, w.head, end_of(call.key, meets), at);
    }
    line[at] += sum;
  }
}

__device__ inline const Band &band_of(const Call &call, Kind kind) {
  return kind == KIND_KEY     ? call.key
         : kind == KIND_QUERY ? call.query
         : kind == KIND_BIAS  ? call.bias
                              : call.value;
}

}  // namespace rpc

#endif
