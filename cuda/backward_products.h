/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_products.h: the products of a tile of 64 queries and 64 keys, by a block of eight warps.
 *
 * Every product has 64 rows on its left and comes in two sorts. A warp has 16 rows and 32 columns
 * of the result, a thread the numbers of them that tile.h draws (Place):
 *
 *   add_product    rows . rows     64 x 64     s += x y^T      scores; what rows meet of a table
 *   add_weighted   weights . rows  64 x 128    g += W y        gradients: of queries, keys, tables
 *
 * The weights W of the second are a function of (own, other) that reads shared memory. So what a
 * band or a table adds to a gradient is the same product with other weights:
 *
 *   ds itself            with keys (or, transposed, with queries)
 *   ds, a diagonal a     with the vectors of the band at 64 distances: row i and distance x name
 *   column               the pair (i, i + x)
 *   ds by relation       with the rows of a table that is looked up
 *
 * Operand is bf16 (tensor cores) or float (FMA), Storage what the arrays hold.
 */
#ifndef RPC_BACKWARD_PRODUCTS_H
#define RPC_BACKWARD_PRODUCTS_H

#include "attention_backward.h"
#include "tile.h"

namespace rpc {

constexpr int kTile = 64, kThreads = 256;
constexpr int kStep = 32;         /* columns of a row that are in shared memory at once */
constexpr int kLine = kTile + 4;  /* of weights: rows start in different banks */
constexpr int kTiles = kStep / 8; /* of eight columns, that a warp has of a product */
constexpr int kColumns = 128;     /* of a gradient, that a block owns: two pieces of 64 */
constexpr int kPieces = kColumns / kTile;
constexpr int kDiagonals = 2 * kTile; /* of a tile; the last of them is empty */

using Scores = float[kTiles][4];
using Sums64 = float[kPieces][kTiles][4];

template <class OperandType, class StorageType>
struct TileShape {
  using Operand = OperandType;
  using Storage = StorageType;
  static constexpr int kRow = row_stride<Operand, kStep>;
};

template <class S>
struct TileMemory {
  typename S::Operand x[kTile * S::kRow], y[kTile * S::kRow]; /* operands of a product */
  float weights[kTile][kLine];                                /* p~ */
  float slopes[kTile][kLine];                                 /* ds */
  union {
    float met[kTile][kDiagonals + 4]; /* while scores are made: rows with the band's vectors */
    struct {                          /* afterwards: */
      float buckets[kTile][kLine];    /* weights of a row by relation */
      int32_t relation[kTile][kTile + 1];
    };
  };
  uint32_t keep[kTile][kTile / 4];                    /* a byte each */
  float key[kTile], value[kTile], query[kTile], bias; /* of one relation: scores */
  float totals[kDiagonals];
  RowNumbers rows[kTile];
};

/* One tile: queries from i, keys from j. */
struct Where {
  Sequence seq;
  int b, head;
  int i, j, rows, keys; /* rows, keys: in use */
  int distance;         /* of the tile's first pair */
};

__device__ inline int larger(int a, int b) { return a > b ? a : b; }

/* Where a thread's numbers [n][e] lie among 64 x 64. */
struct Place {
  int row, column;
  __device__ int row_of(int e) const { return row + e / 2 * 8; }
  __device__ int column_of(int n, int e) const { return column + n * 8 + e % 2; }
};
__device__ inline Place own_place() {
  return {warp_of() / 2 * 16 + lane_of() / 4, warp_of() % 2 * kStep + lane_of() % 4 * 2};
}

/* ---- rows: each puts 64 to shared memory, columns from `column` on -----------------
 *
 * By functions that are called: products are many, and nvcc takes minutes to inline them all. */

/* Of an array; `bias`, where there is one, is added to each. */
template <class S>
struct ArrayRows {
  const typename S::Storage *rows; /* the first of the tile */
  int64_t stride;
  int count, width; /* in use: what lies beyond is 0 */
  bool aligned;
  const float *bias;

  __device__ RPC_CALLED void operator()(typename S::Operand *to, int column) const {
    if (!bias) {
      load_rows<kTile, kStep, kThreads>(to, rows + column, stride, count, width - column, aligned);
      return;
    }
#pragma unroll 2
    for (int at = static_cast<int>(threadIdx.x); at < kTile * kStep; at += kThreads) {
      const int row = at / kStep, c = column + at % kStep;
      const bool there = row < count && c < width;
      put_number(to[row * S::kRow + at % kStep],
                 there ? number_of(rows[row * stride + c]) + bias[c] : 0.0f);
    }
  }
};

__device__ inline const float *position_bias_of(const Call &call, int head) {
  return call.position_bias ? call.position_bias + head * call.position_bias_stride : nullptr;
}

template <class S>
__device__ inline ArrayRows<S> query_rows(const Backward &c, const rp_rows &x, int width,
                                          const Where &w) {
  return {row_of<typename S::Storage>(x, w.seq.query_batch, w.head, w.seq.query_row + w.i),
          x.row_stride,
          w.rows,
          width,
          c.aligned,
          nullptr};
}
template <class S>
__device__ inline ArrayRows<S> key_rows(const Backward &c, const rp_rows &x, int width,
                                        const Where &w) {
  return {row_of<typename S::Storage>(x, w.seq.key_batch, key_head(c.call, w.head),
                                      w.seq.key_row + w.j),
          x.row_stride,
          w.keys,
          width,
          c.aligned,
          nullptr};
}

/* What the vectors of a term of this kind are multiplied with: queries, keys or dz. */
template <class S>
__device__ inline ArrayRows<S> rows_that_meet(const Backward &c, Kind kind, const Where &w) {
  const Call &call = c.call;
  if (kind == KIND_QUERY) return key_rows<S>(c, call.k, call.D, w);
  if (kind == KIND_VALUE) return query_rows<S>(c, c.dout, call.Dv, w);
  ArrayRows<S> rows = query_rows<S>(c, call.q, call.D, w);
  rows.bias = position_bias_of(call, w.head);
  return rows;
}

/* The vectors of a band at 64 distances. */
template <class S>
struct BandRows {
  const Band &band;
  int head, nearest, width;
  __device__ RPC_CALLED void operator()(typename S::Operand *to, int column) const {
#pragma unroll 2
    for (int at = static_cast<int>(threadIdx.x); at < kTile * kStep; at += kThreads) {
      const int row = at / kStep, c = column + at % kStep;
      put_number(to[row * S::kRow + at % kStep],
                 c < width ? band_at(band, head, nearest + row, c) : 0.0f);
    }
  }
};

/* The two vectors that a band ends in; met: whether any tile has met them. */
template <class S>
struct EndRows {
  const Band &band;
  const bool *met;
  int head, width;
  __device__ RPC_CALLED void operator()(typename S::Operand *to, int column) const {
    for (int at = static_cast<int>(threadIdx.x); at < kTile * kStep; at += kThreads) {
      const int row = at / kStep, c = column + at % kStep;
      float number = 0;
      if (row < 2 && met[row] && c < width)
        number = band_at(band, head, row == 0 ? band.low : band.high, c);
      put_number(to[row * S::kRow + at % kStep], number);
    }
  }
};

/* 64 rows of a table. */
template <class S>
struct TableRows {
  const Part &part;
  int head, first, rows, width;
  __device__ RPC_CALLED void operator()(typename S::Operand *to, int column) const {
    for (int at = static_cast<int>(threadIdx.x); at < kTile * kStep; at += kThreads) {
      const int row = first + at / kStep, c = column + at % kStep;
      const bool there = row < rows && c < width;
      put_number(to[at / kStep * S::kRow + at % kStep],
                 there ? table_row(part, head, row)[c] : 0.0f);
    }
  }
};

/* ---- products ---------------------------------------------------------------------------- */

/* sums += x . y transposed. Nobody may be reading s.x or s.y but this. */
template <class S, class X, class Y>
__device__ void add_product(int width, TileMemory<S> &s, const X &x, const Y &y, Scores &sums) {
  for (int done = 0; done < width; done += kStep) {
    __syncthreads();
    x(s.x, done);
    y(s.y, done);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    LeftRows<typename S::Operand, kStep, false> left;
    left.read(s.x + warp_of() / 2 * 16 * S::kRow);
    multiply_rows<kStep>(sums, left, s.y + warp_of() % 2 * kStep * S::kRow);
  }
}

/* sums += weights . right, of the warp: right has 64 rows of 32 columns. */
template <class Weight>
__device__ inline void multiply_weights(Scores &sums, const Weight &weight, const bf16 *right) {
  const int row = warp_of() / 2 * 16 + lane_of() / 4, t = lane_of() % 4 * 2;
#pragma unroll 2
  for (int step = 0; step < kTile; step += 16) {
    float weights[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        weights[n][e] = weight(row + e / 2 * 8, step + n * 8 + t + e % 2);
      }
    }
    add_weighted<kStep>(sums, weights, right + step * row_stride<bf16, kStep>, nullptr);
  }
}
template <class Weight>
__device__ inline void multiply_weights(Scores &sums, const Weight &weight, const float *right) {
  const int row = warp_of() / 2 * 16 + lane_of() / 4, t = lane_of() % 4 * 2;
  for (int other = 0; other < kTile; other++) {
    const float a0 = weight(row, other), a1 = weight(row + 8, other);
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      const float2 b =
          *reinterpret_cast<const float2 *>(right + other * row_stride<float, kStep> + n * 8 + t);
      sums[n][0] += a0 * b.x;
      sums[n][1] += a0 * b.y;
      sums[n][2] += a1 * b.x;
      sums[n][3] += a1 * b.y;
    }
  }
}

/* sums += weights . rows: 64 columns from `column` on, a half for each of two warps. */
template <class S, class Weight, class Rows>
__device__ void add_piece(TileMemory<S> &s, int column, const Weight &weight, const Rows &rows,
                          Scores &sums) {
  __syncthreads();
  rows(s.x, column);
  rows(s.y, column + kStep);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  multiply_weights(sums, weight, warp_of() % 2 == 0 ? s.x : s.y);
}

/* The same with all columns of a block, as far as there are. */
template <class S, class Weight, class Rows>
__device__ void add_weighted_rows(TileMemory<S> &s, int column, int width, const Weight &weight,
                                  const Rows &rows, Sums64 &sums) {
#pragma unroll
  for (int piece = 0; piece < kPieces; piece++) {
    if (column + piece * kTile < width) {
      add_piece<S>(s, column + piece * kTile, weight, rows, sums[piece]);
    }
  }
}

/* f(piece, n, e, column) for the thread's numbers of such sums. */
template <class F>
__device__ inline void each_sum(int column, int width, F f) {
  const Place own = own_place();
#pragma unroll
  for (int piece = 0; piece < kPieces; piece++) {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int at = column + piece * kTile + own.column_of(n, e);
        if (at < width) f(piece, n, e, at);
      }
    }
  }
}

/* ---- where a tile lies ---------------------------------------------------------------------- */

/* Which end, or which part of a band a tile meets. */
__device__ inline Meets tile_meets(const Band &band, const Where &w) {
  return band_meets(band, w.distance - (kTile - 1), w.distance + kTile - 1);
}
__device__ inline int end_of(const Band &band, Meets meets) {
  return meets == MEETS_HEAD ? band.low : band.high;
}

/* The edges from query i to key j, and the relation of another map; called, as rows are. */
__device__ RPC_CALLED inline EdgeRange edges_between(const Lookup &x, const Where &w, int i,
                                                     int j) {
  return edges_of(x, w.seq, i, j, 1);
}
__device__ RPC_CALLED inline int relation_between(const Lookup &x, const Where &w, int i, int j) {
  return relation_of(x, w.seq, w.b, w.head, i, j);
}

/* f(row of the table) for every relation of a pair. */
template <class F>
__device__ inline void each_relation(const Lookup &x, const Where &w, int i, int j, F f) {
  EdgeRange edges = {0, 1};
  if (x.map == MAP_EDGES) edges = edges_between(x, w, i, j);
  for (int64_t e = edges.begin; e < edges.end; e++) {
    const int row = x.map == MAP_EDGES ? x.edge_labels[e] : relation_between(x, w, i, j);
    if (row >= 0) f(row);
  }
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
