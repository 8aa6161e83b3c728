/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_band.h: what blocks of the fast path of attention's backward share: terms on bands of
 * keys and values, short enough for a block to keep them whole.
 *
 * A block owns 64 rows, 16 of them a warp: queries (QueryBlock, backward_queries.h: dq and the sums
 * of tables) or keys (KeyBlock, backward_keys.h: dk and dv), and walks the tiles of the other side.
 * p and ds are made in the registers that products leave their sums in (tile.h), and are the left
 * side of the next products there. Where sequences are short, blocks own 32 rows and more of them
 * share a multiprocessor. Where they are long, blocks own 128: a warp has two strips of 16, and
 * what it reads of a tile serves both.
 *
 * Both bands are one: constant up to `low` and from `high` on, with a column for every distance
 * from low to high. q . wK and dz . wV of a block of queries are cells, one a row and column:
 *
 *   column   0        1 ... columns - 2        columns - 1
 *            ends     one pair each            ends
 *
 * A cell between the ends belongs to one pair of a query and a key. So QueryBlock reads it once,
 * and leaves ds, or p~, in its place: after the last tile the cells are the gradient's, but for the
 * ends, which are sums that the registers of a row hold. A tile beyond the band knows none of this:
 * one number a row more is added to its scores, as the log-sum-exp is.
 */
#ifndef RPC_BACKWARD_BAND_H
#define RPC_BACKWARD_BAND_H

#include "attention_backward.h"
#include "backward_turns.h"
#include "tile.h"

namespace rpc {

/* The call, and what the fast path has beside it. */
struct BandBackward {
  Backward c;
  bool banded, biased;              /* are there bands of keys or values; of bias */
  int32_t low, high, columns, line; /* line: numbers from one row of cells to the next */
  const void *tables; /* operands [H][2][table_rows][width]: vectors of keys, of values */
  int32_t table_rows;
  int32_t held; /* rows of each table that a block keeps in shared memory, all there are; or 0 */
  float *lines; /* [H][blocks][line_numbers]: sums of a block; NULL: not wanted */
  int64_t line_numbers, value_offset; /* of one block, and where its values' are */
  int64_t bias_offset;                /* where its sums of ds by distance are */
  int32_t bias_columns;               /* from call.bias.low to high; 0: not wanted */
  int32_t blocks;                     /* of a head, in the pass over queries */
  Turns turns;                        /* of the pass over keys */
};

template <class OperandType, class StorageType, int kTheWidth, int kRows = 64>
struct BandShape {
  using Operand = OperandType;
  using Storage = StorageType;
  static constexpr bool kBf16 = sizeof(Operand) == 2;
  static constexpr int kWidth = kTheWidth, kOwn = kRows, kWarps = kRows == 32 ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps, kStrips = kOwn / 16 / kWarps; /* of a warp */
  /* registers are scarce, and in f32 shared memory is */
  static constexpr int kOther = kRows == 64 && kWidth <= (kBf16 ? 64 : 32) ? 64 : 32;
  static constexpr int kStages = kBf16 && kRows > 32 ? 2 : 1; /* a short sequence is one tile */
  static constexpr int kBlocks = kRows == 32 ? 5 : 1;         /* at least, of a multiprocessor */
  static constexpr bool kKept = kBf16 && kWidth <= 32;        /* own rows, in registers */
  static constexpr int kLine = row_stride<Operand, kWidth>;
  static constexpr int kTiles = kOther / 8, kOut = kWidth / 8;     /* of eight columns */
  static constexpr int kMostHeld = kBf16 && kWidth <= 64 ? 64 : 0; /* columns: see held */
};

/* Of the vectors that a block has: both tables, or a piece of one. A block of queries has pieces
 * where its tiles are. */
template <class S>
__host__ __device__ inline int vector_bytes(int held, bool of_keys) {
  const int rows = held > 0 ? 2 * held : of_keys ? S::kOther : 0;
  return rows * S::kLine * int{sizeof(typename S::Operand)};
}

/* Then come vectors of the band (vector_bytes), and cells. */
template <class S>
struct BandShared {
  typename S::Operand own[2][S::kOwn * S::kLine];
  typename S::Operand other[S::kStages][2][S::kOther * S::kLine];
  RowNumbers rows[S::kStages][S::kOther]; /* of queries that KeyBlock walks */
  float bias[S::kStages][S::kOwn + S::kOther];
  uint4 keep[S::kWarps][S::kStrips * S::kOther]; /* bytes of dropout */
  float share[S::kWarps][shared_weights<typename S::Operand, S::kTiles> + 4];
};

/* Of a tile's columns those that a thread's rows see, or are seen by: from[h] to to[h], and of the
 * warp's sixteen rows together first to last. */
struct Sight {
  int from[2], to[2], first, last;
};

/* What both kinds of block are made of. */
template <class S>
class BandBlock {
 protected:
  using Operand = typename S::Operand;
  using Storage = typename S::Storage;
  using Left = LeftRows<Operand, S::kWidth, S::kKept>;
  using LeftAgain = LeftRows<Operand, S::kWidth, false>; /* not both: registers are scarce */
  using Scores = float[S::kTiles][4];
  using Sums = float[S::kOut][4];
  static constexpr int kPiece = 16 / int{sizeof(Operand)},
                       kPieces = S::kWidth / kPiece; /* a row's */
  static constexpr int kHalves = 2 * S::kStrips; /* of strips: rows that a thread has numbers of */

  /* between: bytes behind BandShared that are somebody else's */
  __device__ BandBlock(const BandBackward &backward, int the_head, bool of_keys, int between = 0)
      : f(backward),
        call(backward.c.call),
        s(*reinterpret_cast<BandShared<S> *>(dynamic_smem())),
        table(of_keys || backward.held > 0
                  ? reinterpret_cast<Operand *>(dynamic_smem() + sizeof(BandShared<S>) + between)
                  : s.other[0][0]),
        cells(reinterpret_cast<float *>(dynamic_smem() + sizeof(BandShared<S>) + between +
                                        vector_bytes<S>(backward.held, of_keys))),
        lane(lane_of()),
        warp(warp_of()),
        row(lane_of() / 4),
        t(lane_of() % 4 * 2),
        head(the_head) {}

  /* Starts to load kRows rows, or as many as there are, of two arrays. */
  template <int kRows>
  __device__ void load(Operand *x, Operand *y, const rp_rows &x_from, const rp_rows &y_from,
                       int64_t batch, int of_head, int64_t first, int count) {
    load_two<kRows, S::kWidth, S::kThreads>(
        x,
        RowsFrom<Storage>{row_of<Storage>(x_from, batch, of_head, first), x_from.row_stride,
                          call.D},
        y,
        RowsFrom<Storage>{row_of<Storage>(y_from, batch, of_head, first), y_from.row_stride,
                          call.Dv},
        count > kRows ? kRows : count, f.c.aligned);
  }
  template <int kRows>
  __device__ void load_queries(Operand *q, Operand *dz, int first) {
    load<kRows>(q, dz, call.q, f.c.dout, seq->query_batch, head, seq->query_row + first,
                seq->queries - first);
  }
  template <int kRows>
  __device__ void load_keys(Operand *k, Operand *v, int first) {
    load<kRows>(k, v, call.k, call.v, seq->key_batch, key_head(call, head), seq->key_row + first,
                seq->keys - first);
  }

  /* The same of the tiles that are walked, one after the other: a thread keeps where its pieces of
   * the next one are, but not of one stage, whose walks are short or memory scarce. */
  __device__ void begin_walk(const rp_rows &x, const rp_rows &y, int64_t batch, int of_head,
                             int64_t from) {
    const int64_t first = from + static_cast<int>(threadIdx.x / kPieces);
    const int column = static_cast<int>(threadIdx.x % kPieces) * kPiece;
    next[0] = row_of<Storage>(x, batch, of_head, first) + column;
    next[1] = row_of<Storage>(y, batch, of_head, first) + column;
  }
  __device__ void load_next(int stage, const rp_rows &x, const rp_rows &y, int from) {
    constexpr int kRowStep = S::kThreads / kPieces;
    const int first = static_cast<int>(threadIdx.x / kPieces);
    const int column = static_cast<int>(threadIdx.x % kPieces) * kPiece;
    const int at = first * S::kLine + column, count = walk_to + 1 - from - first;
    const bool in_x = column < call.D, in_y = column < call.Dv;
#pragma unroll 4
    for (int step = 0; step < S::kOther; step += kRowStep) {
      load_piece(s.other[stage][0] + at + step * S::kLine, next[0], in_x && step < count);
      load_piece(s.other[stage][1] + at + step * S::kLine, next[1], in_y && step < count);
      next[0] += kRowStep * x.row_stride;
      next[1] += kRowStep * y.row_stride;
    }
  }
  /* The next one is not behind this one, but before it. */
  __device__ void turn_back(const rp_rows &x, const rp_rows &y) {
    next[0] -= 2 * S::kOther * x.row_stride;
    next[1] -= 2 * S::kOther * y.row_stride;
  }

  /* The numbers of a bias band for a tile whose first pair is at `distance`, in units of log 2:
   * number x is that of distance - (kOwn or kOther rows) + x. */
  __device__ void load_bias(float *to, int nearest, int count) {
    for (int x = static_cast<int>(threadIdx.x); x < count; x += S::kThreads) {
      to[x] = kLog2E * band_at(call.bias, head, nearest + x, 0);
    }
  }

  __device__ const Operand *vectors_from(int which, int first) const {
    return static_cast<const Operand *>(f.tables) +
           ((int64_t{head} * 2 + which) * f.table_rows + first) * S::kWidth;
  }

  /* Starts to load what is held. */
  __device__ void load_held() {
    const int column = static_cast<int>(threadIdx.x % kPieces) * kPiece;
    for (int which = 0; which < 2; which++) {
      const Operand *const from = vectors_from(which, 0) + column;
      Operand *const to = table + which * f.held * S::kLine + column;
      for (int r = static_cast<int>(threadIdx.x / kPieces); r < f.held;
           r += S::kThreads / kPieces) {
        load_piece(to + r * S::kLine, from + r * S::kWidth, true);
      }
    }
  }

  /* Vectors of a band from column `first` on, kOther of them or as many as there are. */
  __device__ const Operand *vectors(int which, int first) {
    if (f.held > 0) return table + (which * f.held + first) * S::kLine;
    __syncthreads(); /* those before have been read */
    load_rows<S::kOther, S::kWidth, S::kThreads>(table, vectors_from(which, first), S::kWidth,
                                                 S::kOther, S::kWidth, true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    return table;
  }
  /* How many columns they are. */
  __device__ int vector_count(int first) const { return smaller(f.columns - first, S::kOther); }

  /* Cells of sixteen rows of queries from `begin` on, if the warp is to make them: products of q,
   * or dz, with the vectors of a band. Sixteen columns at a time, in few instructions: code that
   * runs once is as slow as it is long. */
  __device__ void make_cells(int which, const Operand *queries, int begin, bool wanted, float *to) {
    LeftAgain left;
    left.read(queries + begin * S::kLine);
    float *const own = to + (begin + row) * f.line;
#pragma unroll 1
    for (int first = 0; first < f.columns; first += S::kOther) {
      const Operand *const right = vectors(which, first);
      const int count = wanted ? vector_count(first) : 0;
#pragma unroll 1
      for (int x = 0; x < count; x += 16) {
        float c[2][4] = {};
        multiply_rows<S::kWidth>(c, left, right + x * S::kLine);
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const int column = first + x + n * 8 + t;
          if (column >= f.line) continue;
          put_pair(own + column, c[n][0], c[n][1]);
          put_pair(own + 8 * f.line + column, c[n][2], c[n][3]);
        }
      }
    }
  }

  /* A strip's rows of a gradient, the first of them row `begin` of the sequence: factor * sums,
   * and zeros for padding, which is from `in_use` on. Whatever depends on the row alone is read
   * before the first number is written: nvcc reads again what a store might have changed. column:
   * the first of the sums. */
  template <int kCount>
  __device__ void put_rows(Storage *rows, int64_t stride, int begin, int in_use, int there,
                           int width, float factor, const float (&sums)[kCount][4],
                           int column = 0) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = begin + row + 8 * h;
      if (i >= there) continue;
      Storage *const to = rows + i * stride;
      const bool paired = reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Storage)) == 0;
#pragma unroll
      for (int n = 0; n < kCount; n++) {
        const int c = column + n * 8 + t;
        const float x = i < in_use ? factor * sums[n][2 * h] : 0.0f;
        const float y = i < in_use ? factor * sums[n][2 * h + 1] : 0.0f;
        if (paired && c + 1 < width) {
          put_pair(to + c, x, y);
        } else {
          if (c < width) put_number(to[c], x);
          if (c + 1 < width) put_number(to[c + 1], y);
        }
      }
    }
  }

  /* A pair of weight 0 has no slope, whatever it meets. */
  static __device__ float slope_of(float weight, float slope) {
    return weight > 0 ? weight * slope : weight;
  }

  /* p and ds of two rows and of columns x and x + 1, from products and what terms add to these.
   * cut: is not all in sight? kept, delta: of a pair. */
  template <class Kept, class Delta>
  __device__ void make_slopes(int x, const float (&score)[4], const float (&dp)[4], bool cut,
                              const Sight &sight, Kept kept, Delta delta, float (&p)[4],
                              float (&ds)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; e++) p[e] = exp2_approx(at_most_zero(call.scale * p[e] + score[e]));
    if (cut) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (x + e % 2 < sight.from[e / 2] || x + e % 2 > sight.to[e / 2]) p[e] = 0;
      }
    }
    if (call.dropout.threshold) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float keep = kept(e);
        ds[e] = slope_of(p[e], keep * (dp[e] + ds[e]) - delta(e));
        p[e] *= keep;
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) ds[e] = slope_of(p[e], dp[e] + ds[e] - delta(e));
    }
  }

  __device__ Meets meets_band(int nearest, int farthest) const {
    if (!f.banded) return MEETS_NOTHING;
    return farthest <= f.low ? MEETS_HEAD : nearest >= f.high ? MEETS_TAIL : MEETS_BAND;
  }

  /* Nothing but products and the band makes weights and slopes. */
  __device__ bool is_simple() const { return !f.biased && !call.dropout.threshold; }

  /* What row h of a thread does not see has no weight; column: of the thread's first. */
  static __device__ void hide(const Sight &sight, int h, int column, Scores &scores) {
#pragma unroll
    for (int x = 0; x < 2 * S::kTiles; x++) {
      const int own = column + x / 2 * 8 + x % 2;
      if (own < sight.from[h] || own > sight.to[h]) scores[x / 2][2 * h + x % 2] = -INFINITY;
    }
  }

  /* Is anything of a tile hidden from the warp's rows? Rows of no query have a weight of 0 anyway.
   */
  __device__ bool is_cut(int tile) const { return tile < uncut_from || tile > uncut_to; }

  /* The first of the block's rows in strip m of the warp. */
  __device__ int strip(int m) const { return (warp * S::kStrips + m) * 16; }

  __device__ float *cells_of(int which, int rows) const { return cells + which * rows * f.line; }

  /* Where a row's cells have a column; those beyond the ends are the ends'. */
  __device__ int cell_at(int of_row, int column) const {
    const int last = f.columns - 1, at = column < last ? column : last;
    return of_row * f.line + (at > 0 ? at : 0);
  }

  const BandBackward &f;
  const Call &call;
  BandShared<S> &s;
  Operand *const table;         /* vectors of the band */
  float *const cells;           /* [2][rows][line] */
  const int lane, warp, row, t; /* row: of a strip's sixteen, the thread's first; and 8 more */
  const int head;
  const Sequence *seq;      /* read where it is wanted, which is not in every tile: */
  int walk_from, walk_to;   /* rows whose tiles are walked */
  const Storage *next[2];   /* see begin_walk */
  int uncut_from, uncut_to; /* tiles that begin there: see is_cut */
};

}  // namespace rpc

#endif
