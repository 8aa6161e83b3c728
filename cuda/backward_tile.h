/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_tile.h: p~ and ds of 64 queries and 64 keys, with every term, map and mask: (1) to (3)
 * of attention_backward.cu.
 *
 * In a tile that a band crosses every query meets the vectors of 127 distances: one product, of
 * which each pair takes its number from a diagonal.
 *
 *   met[row][x]     x = distance - that of the tile's last query and first key
 *
 *   pair (i, j)     met[i][j - i + 63]     key and value terms
 *                   met[j][j - i + 63]     query terms, whose rows are keys
 */
#ifndef RPC_BACKWARD_TILE_H
#define RPC_BACKWARD_TILE_H

#include "backward_products.h"

namespace rpc {

/* ---- bands ------------------------------------------------------------------------------- */

/* Where a tile lies beyond a band: what each row meets at its end. Four lanes have a row. */
template <class S>
__device__ inline void meet_end(const Backward &c, const Where &w, Kind kind, const Band &band,
                                float (&to)[kTile]) {
  const Meets meets = tile_meets(band, w);
  if (meets != MEETS_HEAD && meets != MEETS_TAIL) return;
  const ArrayRows<S> rows = rows_that_meet<S>(c, kind, w);
  const int row = static_cast<int>(threadIdx.x) / 4;
  float sum = 0;
  if (row < rows.count) {
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) % 4; at < rows.width; at += 4) {
      const float x = number_of(rows.rows[row * rows.stride + at]);
      sum +=
          (x + (rows.bias ? rows.bias[at] : 0.0f)) * band_at(band, w.head, end_of(band, meets), at);
    }
  }
  sum = quad_sum(sum);
  if (threadIdx.x % 4 == 0) to[row] = sum;
}

/* s.met: the tile's rows with the vectors of the band at its distances. */
template <class S>
__device__ RPC_CALLED void meet_diagonals(const Backward &c, const Where &w, Kind kind,
                                          const Band &band, TileMemory<S> &s) {
  const ArrayRows<S> rows = rows_that_meet<S>(c, kind, w);
  const Place own = own_place();
  for (int half = 0; half < 2; half++) {
    const int nearest = w.distance + (half - 1) * kTile + 1;
    Scores sums = {};
    add_product<S>(rows.width, s, rows, BandRows<S>{band, w.head, nearest, rows.width}, sums);
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        s.met[own.row_of(e)][half * kTile + own.column_of(n, e)] = sums[n][e];
      }
    }
  }
  __syncthreads();
}

/* A band's share of the thread's pairs. ends: what rows meet beyond it. */
template <class S>
__device__ void add_band(const Backward &c, const Where &w, Kind kind, const Band &band,
                         const float (&ends)[kTile], TileMemory<S> &s, Scores &sums) {
  if (band.count == 0) return;
  const bool keys = kind == KIND_QUERY, crossed = tile_meets(band, w) == MEETS_BAND;
  if (crossed) meet_diagonals<S>(c, w, kind, band, s);
  const Place own = own_place();
#pragma unroll
  for (int n = 0; n < kTiles; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int i = own.row_of(e), j = own.column_of(n, e), row = keys ? j : i;
      sums[n][e] += crossed ? s.met[row][j - i + kTile - 1] : ends[row];
    }
  }
}

/* ---- lookups ----------------------------------------------------------------------------- */

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

/* What a pair takes from the lookups: of values, or of scores: products, and numbers of biases. */
template <class S>
__device__ RPC_CALLED void add_lookups(const Backward &c, const Where &w, bool values, int row,
                                       int column, float *products, float *numbers) {
  for (int n = 0; n < c.call.lookup_count; n++) {
    const Lookup &x = c.call.lookups[n];
    if ((x.kind == KIND_VALUE) != values) continue;
    const float *const met = met_numbers(c, w, n, row, column);
    each_relation(x, w, w.i + row, w.j + column, [&](int relation) {
      const float *const line = table_row(x.part, w.head, relation);
      if (x.kind == KIND_BIAS) {
        *numbers += line[0];
      } else if (met) {
        *products += met[relation];
      } else {
        const ArrayRows<S> rows = rows_that_meet<S>(c, x.kind, w);
        const int own = x.kind == KIND_QUERY ? column : row;
        *products += row_product(rows.rows + own * rows.stride, rows.bias, line, rows.width);
      }
    });
  }
}

/* ---- p~ and ds of a tile -------------------------------------------------------------------- */

/* Bytes of dropout, of all pairs of a tile: a thread makes those of sixteen. */
template <class S>
__device__ inline void make_keep(const Call &call, const Where &w, TileMemory<S> &s) {
  const int row = static_cast<int>(threadIdx.x) / 4, block = static_cast<int>(threadIdx.x) % 4;
  const uint4 bytes =
      keep_block(dropout_at(call, w.head), w.seq.ordinal, static_cast<uint32_t>(w.i + row),
                 static_cast<uint32_t>(w.j / 16 + block));
  s.keep[row][4 * block] = bytes.x;
  s.keep[row][4 * block + 1] = bytes.y;
  s.keep[row][4 * block + 2] = bytes.z;
  s.keep[row][4 * block + 3] = bytes.w;
}

/* One pair, by what all terms but biases and lookups have added up. */
template <class S>
__device__ inline void weigh_pair(const Backward &c, const Where &w, const TileMemory<S> &s, int i,
                                  int j, float product, float dp, float *weight, float *slope) {
  const Call &call = c.call;
  const Meets bias = tile_meets(call.bias, w);
  float number = 0, bend = 1, keep = 1;
  if (bias == MEETS_BAND) number = band_at(call.bias, w.head, w.distance + j - i, 0);
  else if (bias != MEETS_NOTHING) number = s.bias;
  if (call.score_lookups) add_lookups<S>(c, w, false, i, j, &product, &number);
  if (call.value_lookups) add_lookups<S>(c, w, true, i, j, &dp, nullptr);
  float score = call.scale * product + kLog2E * number;
  if (call.softcap != 0) {
    const float t = tanhf(score / call.softcap);
    score = call.softcap * t;
    bend = 1 - t * t;
  }
  const float p = exp2f(at_most_zero(score - s.rows[i].lse));
  if (call.dropout.threshold) {
    keep = is_kept(call.dropout, s.keep[i][j / 4], j % 4) ? call.dropout.scale : 0.0f;
  }
  *weight = keep * p;
  *slope = p > 0 ? p * (keep * dp - s.rows[i].delta) * bend : p;
}

/* (1) to (3): leaves p~ and ds of a tile in shared memory, 0 for what is hidden. A function that is
 * called: inlined into three kernels it took nvcc five times as long, and all their registers. */
template <class S>
__device__ RPC_CALLED void weigh_tile(const Backward &c, const Where &w, TileMemory<S> &s) {
  const Call &call = c.call;
  Scores products = {}, dp = {};
  __syncthreads(); /* whoever read the tile before is done */
  if (static_cast<int>(threadIdx.x) < w.rows) {
    s.rows[threadIdx.x] = c.rows[lse_of(call, w.seq, w.head) + w.i + threadIdx.x];
  }
  if (call.dropout.threshold) make_keep(call, w, s);
  meet_end<S>(c, w, KIND_KEY, call.key, s.key);
  meet_end<S>(c, w, KIND_QUERY, call.query, s.query);
  meet_end<S>(c, w, KIND_VALUE, call.value, s.value);
  const Meets bias = tile_meets(call.bias, w);
  if (threadIdx.x == 0 && (bias == MEETS_HEAD || bias == MEETS_TAIL)) {
    s.bias = band_at(call.bias, w.head, end_of(call.bias, bias), 0);
  }
  add_product<S>(call.D, s, query_rows<S>(c, call.q, call.D, w), key_rows<S>(c, call.k, call.D, w),
                 products);
  add_product<S>(call.Dv, s, query_rows<S>(c, c.dout, call.Dv, w),
                 key_rows<S>(c, call.v, call.Dv, w), dp);
  add_band<S>(c, w, KIND_KEY, call.key, s.key, s, products);
  add_band<S>(c, w, KIND_QUERY, call.query, s.query, s, products);
  add_band<S>(c, w, KIND_VALUE, call.value, s.value, s, dp);
  const Place own = own_place();
#pragma unroll
  for (int n = 0; n < kTiles; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      s.weights[own.row_of(e)][own.column_of(n, e)] = products[n][e];
      s.slopes[own.row_of(e)][own.column_of(n, e)] = dp[n][e];
    }
  }
#pragma unroll 1
  for (int number = 0; number < 4 * kTiles; number++) { /* its own again; the code is there once */
    const int i = own.row_of(number % 4), j = own.column_of(number / 4, number % 4);
    float weight = 0, slope = 0;
    if (i < w.rows && in_sight(w.seq, w.i + i, w.j + j) &&
        (!call.mask || mask_shows(call, w.seq, w.b, w.head, w.i + i, w.j + j))) {
      weigh_pair<S>(c, w, s, i, j, s.weights[i][j], s.slopes[i][j], &weight, &slope);
    }
    s.weights[i][j] = weight;
    s.slopes[i][j] = slope;
  }
  __syncthreads();
}

}  // namespace rpc

#endif
