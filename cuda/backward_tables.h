/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_tables.h: what the vectors of bands and tables add to gradients of rows, (4) and (5) of
 * attention_backward.cu, and what a tile's p~ and ds add to the gradients of tables, (6).
 *
 * Tables that are looked up have few rows mostly: then the weights of every line (a query; a key,
 * of query terms) are gathered by relation first, in buckets, and these are the weights of products
 * with the rows of the table, or with the lines. Of a band the weights are diagonals of the tile.
 * Longer tables are visited pair by pair.
 */
#ifndef RPC_BACKWARD_TABLES_H
#define RPC_BACKWARD_TABLES_H

#include "backward_tile.h"

namespace rpc {

constexpr int kBuckets = 64;   /* rows of a table that a tile's weights are gathered by at once */
constexpr int kGathered = 512; /* rows of the longest table that weights are gathered by */

template <class S>
__device__ inline const float (&weights_of(const TileMemory<S> &s, Kind kind))[kTile][kLine] {
  return kind == KIND_VALUE ? s.weights : s.slopes;
}

/* The weight of line `own` of a tile at distance `x` - 63 from its first pair's: a pair's, or 0. */
__device__ inline float diagonal_weight(const float (&weights)[kTile][kLine], bool keys, int own,
                                        int x) {
  const int other = keys ? own - (x - kTile + 1) : own + x - kTile + 1;
  if (other < 0 || other >= kTile) return 0;
  return keys ? weights[other][own] : weights[own][other];
}

/* ---- relations ---------------------------------------------------------------------------- */

/* Relations of a tile, in shared memory: what every thread is to look at. */
template <class S>
__device__ RPC_CALLED void fill_relations(const Lookup &x, const Where &w, TileMemory<S> &s) {
  __syncthreads();
  for (int at = static_cast<int>(threadIdx.x); at < kTile * kTile; at += kThreads) {
    const int i = at / kTile, j = at % kTile;
    const bool there = i < w.rows && j < w.keys;
    s.relation[i][j] = there ? relation_of(x, w.seq, w.b, w.head, w.i + i, w.j + j) : -1;
  }
  __syncthreads();
}

/* The weights of every line by relation, for those from `first` on: four threads have a line, and
 * each a quarter of the relations. Of labels and positions relations are filled. */
template <class S>
__device__ RPC_CALLED void fill_buckets(const Lookup &x, const Where &w, TileMemory<S> &s,
                                        int first) {
  const auto &weights = weights_of(s, x.kind);
  const int k = static_cast<int>(threadIdx.x) / 4, rank = static_cast<int>(threadIdx.x) % 4;
  const bool keys = x.kind == KIND_QUERY;
  const auto add = [&](int i, int j, int relation) {
    const int r = relation - first;
    if (r >= 0 && r < kBuckets && r % 4 == rank) s.buckets[k][r] += weights[i][j];
  };
  __syncthreads();
  for (int r = rank; r < kBuckets; r += 4) s.buckets[k][r] = 0;
  if (x.map != MAP_EDGES) {
    for (int other = 0; other < kTile; other++) {
      const int i = keys ? other : k, j = keys ? k : other;
      add(i, j, s.relation[i][j]);
    }
  } else if (keys) {
    for (int i = 0; k < w.keys && i < w.rows; i++) {
      each_relation(x, w, w.i + i, w.j + k, [&](int relation) { add(i, k, relation); });
    }
  } else if (k < w.rows) {
    const EdgeRange edges = edges_of(x, w.seq, w.i + k, w.j, w.keys);
    for (int64_t e = edges.begin; e < edges.end; e++) {
      add(k, x.edge_keys[e] - w.j, x.edge_labels[e]);
    }
  }
  __syncthreads();
}

/* gathered(first) for every 64 relations of a table, when the buckets are those from `first` on. */
template <class S, class Gathered>
__device__ void each_bucket(const Lookup &x, const Where &w, TileMemory<S> &s, Gathered gathered) {
  if (x.map != MAP_EDGES) fill_relations(x, w, s);
  for (int first = 0; first < x.rows; first += kBuckets) {
    fill_buckets(x, w, s, first);
    gathered(first);
  }
}

/* ---- (4) and (5): what terms add to gradients of queries (key terms), or keys (query terms)
 * -------- */

/* What the thread's two rows have met in tiles beyond a band, before it and behind it: sums of ds,
 * the same in all threads of a row. */
struct Ends {
  float sums[2][2];
  bool met[2]; /* is there such a tile? The same in all threads */
};

template <class S>
__device__ void add_band_rows(const Where &w, const Band &band, bool keys, int column, int width,
                              TileMemory<S> &s, Ends &ends, Sums64 &sums) {
  const Meets meets = tile_meets(band, w);
  if (meets == MEETS_NOTHING) return;
  if (meets == MEETS_BAND) {
    for (int first = 0; first < kDiagonals; first += kTile) {
      add_weighted_rows<S>(
          s, column, width,
          [&](int own, int x) { return diagonal_weight(s.slopes, keys, own, first + x); },
          BandRows<S>{band, w.head, w.distance - kTile + 1 + first, width}, sums);
    }
    return;
  }
  ends.met[meets == MEETS_HEAD ? 0 : 1] = true;
  const Place own = own_place();
#pragma unroll
  for (int a = 0; a < 2; a++) {
    const int row = own.row + 8 * a;
    float sum = 0;
    for (int other = lane_of() % 4; other < kTile; other += 4) {
      sum += keys ? s.slopes[other][row] : s.slopes[row][other];
    }
    sum = quad_sum(sum);
    ends.sums[0][a] += meets == MEETS_HEAD ? sum : 0.0f;
    ends.sums[1][a] += meets == MEETS_HEAD ? 0.0f : sum;
  }
}

/* After the last tile: one product for all that were beyond the band. */
template <class S>
__device__ void add_ends(const Where &w, const Band &band, int column, int width, TileMemory<S> &s,
                         const Ends &ends, Sums64 &sums) {
  if (band.count == 0) return;
  const Place own = own_place();
  __syncthreads();
  if (warp_of() % 2 == 0 && lane_of() % 4 == 0) {
#pragma unroll
    for (int a = 0; a < 2; a++) {
      s.totals[own.row + 8 * a] = ends.sums[0][a];
      s.totals[kTile + own.row + 8 * a] = ends.sums[1][a];
    }
  }
  add_weighted_rows<S>(
      s, column, width,
      [&](int row, int end) { return end < 2 ? s.totals[end * kTile + row] : 0.0f; },
      EndRows<S>{band, ends.met, w.head, width}, sums);
}

/* Of a table that is too long for buckets: pair by pair. */
template <class S>
__device__ void add_long_rows(const Where &w, const Lookup &x, int column, int width,
                              const TileMemory<S> &s, Sums64 &sums) {
  const bool keys = x.kind == KIND_QUERY;
  const Place own = own_place();
#pragma unroll 1
  for (int pair = 0; pair < 2 * kTile; pair++) {
    const int half = pair / kTile, other = pair % kTile, row = own.row + 8 * half;
    const int i = keys ? other : row, j = keys ? row : other;
    const float ds = s.slopes[i][j];
    if (ds == 0) continue;
    each_relation(x, w, w.i + i, w.j + j, [&](int relation) {
      const float *const line = table_row(x.part, w.head, relation);
      each_sum(column, width, [&](int piece, int n, int e, int at) {
        sums[piece][n][e] += e / 2 == half ? ds * line[at] : 0.0f;
      });
    });
  }
}

template <class S>
__device__ void add_terms(const Call &call, const Where &w, Kind kind, int column, TileMemory<S> &s,
                          Ends &ends, Sums64 &sums) {
  const bool keys = kind == KIND_QUERY;
  add_band_rows<S>(w, keys ? call.query : call.key, keys, column, call.D, s, ends, sums);
  for (int n = 0; call.score_lookups && n < call.lookup_count; n++) {
    const Lookup &x = call.lookups[n];
    if (x.kind != kind) continue;
    if (x.rows > kGathered) {
      add_long_rows<S>(w, x, column, call.D, s, sums);
      continue;
    }
    each_bucket<S>(x, w, s, [&](int first) {
      add_weighted_rows<S>(
          s, column, call.D, [&](int own, int r) { return s.buckets[own][r]; },
          TableRows<S>{x.part, w.head, first, x.rows, call.D}, sums);
    });
  }
}

/* ---- (6): gradients of tables ------------------------------------------------------ */

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
template <class S>
__device__ inline float met_number(const Backward &c, const Where &w, Kind kind, int i, int j,
                                   int at) {
  if (kind == KIND_BIAS) return 1;
  const ArrayRows<S> rows = rows_that_meet<S>(c, kind, w);
  return number_of(rows.rows[(kind == KIND_QUERY ? j : i) * rows.stride + at]) +
         (rows.bias ? rows.bias[at] : 0.0f);
}

/* One table row: what each line has in s.totals, times what it met. */
template <class S>
__device__ void sum_row(const Backward &c, const Where &w, const TileMemory<S> &s,
                        const Summed &term, int row, float *lines) {
  const int met = term.kind == KIND_QUERY ? w.keys : w.rows;
  for (int at = static_cast<int>(threadIdx.x); at < term.width; at += kThreads) {
    float sum = 0;
    for (int k = 0; k < met; k++) {
      if (s.totals[k] != 0) sum += s.totals[k] * met_number<S>(c, w, term.kind, k, k, at);
    }
    lines[term.offset + int64_t{row} * term.width + at] += sum;
  }
}

/* s.totals[k] = sum of f(k, other) over the others, k below kTile. Four lanes have a k. */
template <class S, class Number>
__device__ void total(TileMemory<S> &s, Number number) {
  const int k = static_cast<int>(threadIdx.x) / 4;
  float sum = 0;
  __syncthreads();
  for (int other = static_cast<int>(threadIdx.x) % 4; other < kTile; other += 4) {
    sum += number(k, other);
  }
  sum = quad_sum(sum);
  if (threadIdx.x % 4 == 0) s.totals[k] = sum;
  __syncthreads();
}

/* A diagonal each, of the tile's 127: s.totals[x]. */
template <class S>
__device__ void total_diagonals(TileMemory<S> &s) {
  __syncthreads();
  const int x = static_cast<int>(threadIdx.x);
  if (x < kDiagonals) {
    float sum = 0;
    for (int i = 0; i < kTile; i++) sum += diagonal_weight(s.slopes, false, i, x);
    s.totals[x] = sum;
  }
  __syncthreads();
}

/* Of a thread: the sums of distances that meet one row after each other. */
template <class Number>
__device__ void fold_distances(const Part &part, int nearest, int count, int rank, int classes,
                               int64_t width, float *lines, Number number) {
  float sum = 0;
  int last = -1;
  for (int x = 0; x < count; x++) {
    const int row = part_row(part, nearest + x);
    if (row < 0 || row % classes != rank) continue;
    if (row != last && last >= 0) {
      lines[last * width] += sum;
      sum = 0;
    }
    last = row;
    sum += number(x);
  }
  if (last >= 0) lines[last * width] += sum;
}

/* A band's part. The sums of 64 distances, 64 columns of each, lie in s.buckets before they go to
 * the rows that the distances meet. */
template <class S>
__device__ void sum_band(const Backward &c, const Where &w, TileMemory<S> &s, const Summed &term,
                         const Part &part, const Band &band, float *lines) {
  const Meets meets = tile_meets(band, w);
  const auto &weights = weights_of(s, term.kind);
  const bool keys = term.kind == KIND_QUERY;
  const int nearest = w.distance - kTile + 1, thread = static_cast<int>(threadIdx.x);
  float *const own_lines = lines + term.offset;
  if (meets != MEETS_BAND) {
    const int row = part_row(part, end_of(band, meets));
    if (row < 0) return;
    total(s, [&](int k, int other) { return keys ? weights[other][k] : weights[k][other]; });
    sum_row<S>(c, w, s, term, row, lines);
    return;
  }
  if (term.kind == KIND_BIAS) {
    total_diagonals(s);
    fold_distances(part, nearest, kDiagonals, thread, kThreads, 1, own_lines,
                   [&](int x) { return s.totals[x]; });
    return;
  }
  const ArrayRows<S> rows = rows_that_meet<S>(c, term.kind, w);
  const Place own = own_place();
  for (int first = 0; first < kDiagonals; first += kTile) {
    for (int column = 0; column < term.width; column += kTile) {
      Scores sums = {};
      add_piece<S>(
          s, column,
          [&](int x, int line) { return diagonal_weight(weights, keys, line, first + x); }, rows,
          sums);
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) s.buckets[own.row_of(e)][own.column_of(n, e)] = sums[n][e];
      }
      __syncthreads();
      const int at = column + thread % kTile;
      if (at < term.width) {
        fold_distances(part, nearest + first, kTile, thread / kTile, kThreads / kTile, term.width,
                       own_lines + at, [&](int x) { return s.buckets[x][thread % kTile]; });
      }
    }
  }
}

/* A short table's: buckets are weights of lines. */
template <class S>
__device__ void sum_gathered(const Backward &c, const Where &w, TileMemory<S> &s,
                             const Summed &term, const Lookup &x, float *lines) {
  if (term.kind == KIND_BIAS) {
    each_bucket<S>(x, w, s, [&](int first) {
      total(s, [&](int r, int line) { return s.buckets[line][r]; });
      const int r = static_cast<int>(threadIdx.x);
      if (r < kBuckets && first + r < x.rows) lines[term.offset + first + r] += s.totals[r];
    });
    return;
  }
  const ArrayRows<S> rows = rows_that_meet<S>(c, term.kind, w);
  const Place own = own_place();
  each_bucket<S>(x, w, s, [&](int first) {
    for (int column = 0; column < term.width; column += kColumns) {
      Sums64 sums = {};
      add_weighted_rows<S>(
          s, column, term.width, [&](int r, int line) { return s.buckets[line][r]; }, rows, sums);
      each_sum(column, term.width, [&](int piece, int n, int e, int at) {
        const int row = first + own.row_of(e);
        if (row >= x.rows) return;
        lines[term.offset + int64_t{row} * term.width + at] += sums[piece][n][e];
      });
    }
  });
}

template <class S>
__device__ void sum_lookup(const Backward &c, const Where &w, TileMemory<S> &s, const Summed &term,
                           const Lookup &x, float *lines) {
  if (x.rows <= kGathered) {
    sum_gathered<S>(c, w, s, term, x, lines);
    return;
  }
  const Share own = share_of(term.width);
  const auto &weights = weights_of(s, term.kind);
  if (x.map != MAP_EDGES) fill_relations(x, w, s);
  const auto add = [&](int i, int j, int row) {
    if (row < 0 || row % own.classes != own.rank || weights[i][j] == 0) return;
    for (int at = own.column; at < term.width; at += own.step) {
      lines[term.offset + int64_t{row} * term.width + at] +=
          weights[i][j] * met_number<S>(c, w, term.kind, i, j, at);
    }
  };
  for (int i = 0; i < w.rows; i++) {
    if (x.map == MAP_EDGES) {
      const EdgeRange edges = edges_of(x, w.seq, w.i + i, w.j, w.keys);
      for (int64_t e = edges.begin; e < edges.end; e++) {
        add(i, x.edge_keys[e] - w.j, x.edge_labels[e]);
      }
    } else {
      for (int j = 0; j < w.keys; j++) add(i, j, s.relation[i][j]);
    }
  }
}

/* du: the vectors of all pairs, each by the sum of ds that meets it. A thread has a column. */
template <class S>
__device__ void sum_bias(const Call &call, const Where &w, TileMemory<S> &s, float *line) {
  const int first = static_cast<int>(threadIdx.x);
  const Meets meets = tile_meets(call.key, w);
  if (meets != MEETS_NOTHING) total_diagonals(s);
  for (int at = first; meets != MEETS_NOTHING && at < call.D; at += kThreads) {
    float sum = 0;
    for (int x = 0; x < kDiagonals - 1; x++) {
      if (s.totals[x] == 0) continue;
      const int d = meets == MEETS_BAND ? w.distance + x - kTile + 1 : end_of(call.key, meets);
      sum += s.totals[x] * band_at(call.key, w.head, d, at);
    }
    line[at] += sum;
  }
  for (int n = 0; call.score_lookups && n < call.lookup_count; n++) {
    const Lookup &x = call.lookups[n];
    if (x.kind != KIND_KEY) continue;
    if (x.rows <= kGathered) {
      each_bucket<S>(x, w, s, [&](int bucket) {
        total(s, [&](int r, int own) { return s.buckets[own][r]; });
        const int count = smaller(kBuckets, x.rows - bucket);
        for (int at = first; at < call.D; at += kThreads) {
          float sum = 0;
          for (int r = 0; r < count; r++) {
            if (s.totals[r] == 0) continue;
            sum += s.totals[r] * table_row(x.part, w.head, bucket + r)[at];
          }
          line[at] += sum;
        }
      });
      continue;
    }
    for (int at = first; at < call.D; at += kThreads) {
      float sum = 0;
      for (int i = 0; i < w.rows; i++) {
        for (int j = 0; j < w.keys; j++) {
          const float ds = s.slopes[i][j];
          if (ds == 0) continue;
          each_relation(x, w, w.i + i, w.j + j,
                        [&](int row) { sum += ds * table_row(x.part, w.head, row)[at]; });
        }
      }
      line[at] += sum;
    }
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
