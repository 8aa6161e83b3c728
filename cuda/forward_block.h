/* SPDX-License-Identifier: Apache-2.0
 *
 * forward_block.h: what one block of attention_forward.cu does.
 *
 * A thread owns the numbers of two rows, or of four where its warp has 32 (kFolds): queries q0 +
 * row
 * + 8 h, those of tile.h for every 16. The loop over the tiles of keys keeps two of them in shared
 * memory where there is room: one is computed with while the next one is on its way.
 */
#ifndef RPC_FORWARD_BLOCK_H
#define RPC_FORWARD_BLOCK_H

#include "forward_pairs.h"
#include "forward_plan.h"

namespace rpc {

template <class S>
class ForwardBlock {
  using Storage = typename S::Storage;
  using Left = LeftRows<Operand<S>, S::kWidth, S::kKept>[S::kFolds];
  static constexpr int kOwn = 4 * S::kFolds;  /* numbers of a thread in eight columns, */
  static constexpr int kRows = 2 * S::kFolds; /* of so many rows */
  using Scores = float[S::kTiles][kOwn];
  using Rows = float[kRows];

 public:
  __device__ explicit ForwardBlock(const Forward &forward)
      : f(forward),
        call(forward.call),
        s(*reinterpret_cast<Shared<S> *>(dynamic_smem())),
        lane(lane_of()),
        warp_row(warp_of() * S::kWarpRows),
        row(warp_row + lane_of() / 4),
        t(lane_of() % 4 * 2) {
    const int index = static_cast<int>(blockIdx.x);
    const Tile tile = f.tiles[index % f.tile_count];
    head = index / f.tile_count;
    batch = tile.sequence;
    q0 = tile.row;
    seq = call.sequences[batch];
    key_rows = row_of<Storage>(call.k, seq.key_batch, head, seq.key_row);
    value_rows = row_of<Storage>(call.v, seq.key_batch, head, seq.key_row);
    dropout = dropout_at(call, head);
    for (int h = 0; h < kRows; h++) most[h] = -INFINITY;
  }

  __device__ void run() {
    if (q0 < seq.queries) {
      const int last = (q0 + S::kQueries < seq.queries ? q0 + S::kQueries : seq.queries) - 1;
      begin = q0 + seq.nearest > 0 ? (q0 + seq.nearest) / S::kKeys * S::kKeys : 0;
      end = last + seq.farthest + 1 < seq.keys ? last + seq.farthest + 1 : seq.keys;
      if (begin < end) {
        open();
        walk();
        close();
      }
    }
    write_rows();
  }

 private:
  const Forward &f;
  const Call &call;
  Shared<S> &s;
  const int lane, warp_row, row, t; /* the warp's first row; row: of h = 0 */
  int head, batch, q0;
  int begin, end; /* keys that some query of the tile may see */
  Sequence seq;
  const Storage *key_rows, *value_rows; /* its first */
  Dropout dropout;

  Left left;
  float out[S::kOut][kOwn] = {};
  Rows most, sum = {};
  Rows rescaled;                         /* what the last tile multiplied all sums with */
  Rows before = {}, behind = {};         /* scores of the ends of the band */
  Rows before_sum = {}, behind_sum = {}; /* weights there */

  template <class T>
  __device__ T *area(int32_t at) const {
    return reinterpret_cast<T *>(dynamic_smem() + at);
  }
  __device__ bool aligned() const { return S::kTall || S::kShort || f.aligned; }
  __device__ Operand<S> *keys(int stage) const { return s.tiles[stage]; }
  __device__ Operand<S> *values(int stage) const { return s.tiles[stage] + S::kKeys * S::kLine; }
  /* kChunk rows of tables lie where values are, or where both are. */
  __device__ Operand<S> *chunk_of(int stage) const {
    return S::kChunk > S::kKeys ? keys(stage) : values(stage);
  }
  __device__ float *related(int h) const {
    return area<float>(f.related_at) + (row + 8 * h) * f.line;
  }
  __device__ int query_of(int h) const { return q0 + row + 8 * h; }
  __device__ int column_of(int n, int e) const { return n * 8 + t + e % 2; }

  /* ---- getting ready -------------------------------------------------------------- */

  /* The queries, with position_bias where it is given. */
  __device__ void load_queries(Operand<S> *to, const float *bias) {
    const Storage *const from = row_of<Storage>(call.q, seq.query_batch, head, seq.query_row + q0);
    if (!bias) {
      load_rows<S::kQueries, S::kWidth, S::kThreads>(to, from, call.q.row_stride, seq.queries - q0,
                                                     call.D, aligned());
      return;
    }
    for (int i = static_cast<int>(threadIdx.x); i < S::kQueries * S::kWidth; i += S::kThreads) {
      const int r = i / S::kWidth, c = i % S::kWidth;
      const bool there = r < seq.queries - q0 && c < call.D;
      const float x = there ? number_of(from[r * call.q.row_stride + c]) + bias[c] : 0.0f;
      put_number(to[r * S::kLine + c], x);
    }
  }

  /* Tile j0 of keys and values, and the bias of its diagonals. */
  __device__ void load_tile(int stage, int j0) {
    load_rows<S::kKeys, S::kWidth, S::kThreads>(keys(stage), key_rows + j0 * call.k.row_stride,
                                                call.k.row_stride, seq.keys - j0, call.D,
                                                aligned());
    load_rows<S::kKeys, S::kWidth, S::kThreads>(values(stage), value_rows + j0 * call.v.row_stride,
                                                call.v.row_stride, seq.keys - j0, call.Dv,
                                                aligned());
    if (call.bias.count > 0) {
      const int first = first_diagonal(j0);
      for (int c = static_cast<int>(threadIdx.x); c < S::kDiagonals; c += S::kThreads) {
        s.bias[stage][c] = kLog2E * band_at(call.bias, head, first + c, 0);
      }
    }
    cp_async_commit();
  }

  /* The distance of the tile's last query and first key. */
  __device__ int first_diagonal(int j0) const { return j0 - (q0 + S::kQueries - 1) - seq.start; }

  /* Rows first, first + step, ... of a source become operands; `count` of kChunk. */
  __device__ void load_source(Operand<S> *to, const Source &from, int first, int step, int count) {
    constexpr int kPieces = S::kWidth / 8, kStep = S::kThreads / kPieces;
    constexpr int kAtOnce = S::kShort ? 4 : 3; /* so that registers suffice */
    const int c = static_cast<int>(threadIdx.x % kPieces) * 8;
    const int rows = (count + 15) / 16 * 16; /* products read no more */
    for (int r = static_cast<int>(threadIdx.x / kPieces); r < rows; r += kAtOnce * kStep) {
      float x[kAtOnce][8] = {};
      for (int p = 0; p < from.count; p++) {
        const Part &part = from.parts[p];
        const float *row_at[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          const int own = r + i * kStep, d = first + own * step;
          const int at = own >= count ? -1 : from.whole ? d : part_row(part, d);
          row_at[i] = at < 0 ? nullptr : table_row(part, head, at) + c;
        }
        add_rows(x, row_at, from.width - c);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        if (r + i * kStep < rows) put_numbers(to + (r + i * kStep) * S::kLine + c, x[i]);
      }
    }
  }

  /* to[r][c] = scale x_r . source[first + c step] for the rows r of this warp and c below count.
   * `chunk` is free before and after; loaded: but its first rows are there. active: has the warp
   * any rows? */
  __device__ void multiply_source(const Left &x, const Source &from, Operand<S> *chunk, float *to,
                                  int line, int first, int step, int count, bool active = true,
                                  bool loaded = false) {
    for (int c0 = 0; c0 < count; c0 += S::kChunk) {
      const int columns = count - c0 < S::kChunk ? count - c0 : S::kChunk;
      const int tiles = (columns + 7) / 8;
      float c[S::kChunk / 8][kOwn] = {};
      if (from.count > 0) {
        if (!loaded || c0 > 0) load_source(chunk, from, first + c0 * step, step, columns);
        __syncthreads();
        if (active) multiply_folds<S::kWidth>(c, x, chunk, tiles);
        __syncthreads();
      }
#pragma unroll
      for (int n = 0; n < S::kChunk / 8; n++) {
        if (n >= tiles || !active) continue;
#pragma unroll
        for (int e = 0; e < kOwn; e++) {
          to[(row + 8 * (e / 2)) * line + c0 + column_of(n, e)] = c[n][e] * call.scale;
        }
      }
    }
    __syncwarp(); /* the rows of a warp are its own */
  }

  /* out += weight(h, c) source[first + c step], c below count; from count on it is 0. */
  template <class Weight>
  __device__ void add_source(const Source &from, Operand<S> *chunk, int first, int step, int count,
                             Weight weight) {
    __syncwarp(); /* what weights come from was written by other lanes */
    for (int c0 = 0; c0 < count; c0 += S::kChunk) {
      const int columns = count - c0 < S::kChunk ? count - c0 : S::kChunk;
      load_source(chunk, from, first + c0 * step, step, columns);
      __syncthreads();
      for (int k = 0; k < columns; k += 16) {
        float w[2][kOwn];
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int e = 0; e < kOwn; e++) {
            const int c = c0 + k + column_of(n, e);
            w[n][e] = weight(e / 2, c);
          }
        }
        add_folds<S::kWidth>(out, w, chunk + k * S::kLine, s.share[warp_of()]);
      }
      __syncthreads();
    }
  }

  __device__ Source key_source() const { return {call.key.parts, call.key.count, call.D, false}; }
  __device__ Source value_source() const {
    return {call.value.parts, call.value.count, call.Dv, false};
  }

  __device__ void read_ends(int last) {
    for (int h = 0; h < kRows; h++) {
      before[h] = related(h)[0];
      behind[h] = related(h)[last];
    }
    __syncwarp();
  }

  __device__ const float *position_bias() const {
    return call.position_bias ? call.position_bias + head * call.position_bias_stride : nullptr;
  }

  /* The queries are there, and products find them; the first tile of keys may be on its way. */
  __device__ void read_queries(const Operand<S> *from, bool tile_follows) {
    if (tile_follows) cp_async_wait<1>();
    else cp_async_wait<0>();
    __syncthreads();
    read_left(left, from);
  }
  __device__ void read_left(Left &to, const Operand<S> *from) const {
    for (int m = 0; m < S::kFolds; m++) to[m].read(from + (warp_row + 16 * m) * S::kLine);
  }

  /* The queries as they are, where others were that nobody reads any more. */
  __device__ void restore_queries(Operand<S> *queries) {
    load_queries(queries, nullptr);
    cp_async_commit();
    read_queries(queries, false);
  }

  /* Queries, and what they meet of the band. */
  __device__ void open() {
    constexpr int kLast = S::kStages - 1;
    Operand<S> *const queries = S::kKept ? keys(kLast) : s.queries;
    const bool tiled = S::kGeneral && f.tiled;
    const bool first_biased = position_bias() && meets_rows();
    Operand<S> *const first = tiled && f.biased_at != 0 ? area<Operand<S>>(f.biased_at) : queries;
    load_queries(first, first_biased ? position_bias() : nullptr);
    cp_async_commit();
    if (S::kStages == 2) load_tile(0, begin);
    const int columns = !f.banded ? 0 : tiled ? 2 : f.high - f.low + 1;
    const int step = tiled ? f.high - f.low : 1;
    const bool related_keys = call.key.count > 0;
    if (related_keys) { /* while all that is on its way */
      load_source(chunk_of(kLast), key_source(), f.low, step,
                  columns < S::kChunk ? columns : S::kChunk);
    }
    read_queries(first, S::kStages == 2);
    if (f.banded) {
      multiply_source(left, key_source(), chunk_of(kLast), area<float>(f.related_at), f.line, f.low,
                      step, columns, true, related_keys);
      read_ends(columns - 1);
    }
    if constexpr (S::kGeneral) open_tables(chunk_of(kLast));
    __syncthreads(); /* the next to be loaded goes to where queries and tables came */
    if (!first_biased) return;
    restore_queries(queries);
    __syncthreads();
  }

  /* Do queries meet rows of tables in products? */
  __device__ bool meets_rows() const {
    bool any = call.key.count > 0;
    for (int n = 0; S::kGeneral && n < call.lookup_count; n++) {
      any = any || (f.table_at[n] != 0 && call.lookups[n].kind == KIND_KEY);
    }
    return any;
  }

  /* ---- the walk over the keys --------------------------------------------------------- */

  __device__ void walk() {
    if (S::kStages == 1) load_tile(0, begin);
    int stage = 0;
    for (int j0 = begin; j0 < end; j0 += S::kKeys) {
      cp_async_wait<0>();
      __syncthreads(); /* this tile is there, and nobody reads the last one */
      const int next = j0 + S::kKeys;
      if (S::kStages == 2 && next < end) load_tile(1 - stage, next);
      take_tile(stage, j0);
      if (S::kStages == 2) {
        stage = 1 - stage;
      } else if (next < end) {
        __syncthreads();
        load_tile(0, next);
      }
    }
    __syncthreads(); /* close() uses the memory of a tile */
  }

  __device__ void take_tile(int stage, int j0) {
    const int d0 = j0 - q0 - seq.start; /* of row 0 and column 0 */
    const bool tiled = S::kGeneral && f.tiled;
    /* What is met, and seen, is the warp's own affair; diagonals of a tile are the block's. */
    const int top = tiled ? 0 : warp_row, bottom = top + (tiled ? S::kQueries : S::kWarpRows) - 1;
    const int nearest = d0 - bottom, farthest = d0 + S::kKeys - 1 - top;
    const bool nothing = farthest + seq.start < seq.nearest || nearest + seq.start > seq.farthest;
    if (!S::kGeneral && (nothing || q0 + warp_row >= seq.queries)) return;
    Meets meets = MEETS_NOTHING;
    if (f.banded) {
      meets = farthest <= f.low ? MEETS_HEAD : nearest >= f.high ? MEETS_TAIL : MEETS_BAND;
    }
    const bool all_seen = j0 + S::kKeys <= seq.keys && nearest + seq.start >= seq.nearest &&
                          farthest + seq.start <= seq.farthest;
    if (!S::kGeneral && !S::kShort && all_seen && meets != MEETS_BAND && call.scale > 0 &&
        call.bias.count == 0 && dropout.threshold == 0) {
      take_even_tile(stage, meets);
      return;
    }
    const int first = tiled ? nearest : f.low; /* distance of cell 0 */
    if (S::kGeneral && tiled && meets == MEETS_BAND) {
      open_tile_band(nearest);
    }
    Scores x = {};
    multiply_folds<S::kWidth>(x, left, keys(stage));
    Strips strips[S::kFolds];
    for (int m = 0; m < S::kFolds; m++) strips[m] = strips_of(m, meets, d0);
    add_relations(x, strips, d0, first);
    if (call.bias.count > 0) add_bias(x, s.bias[stage]);
    if constexpr (S::kGeneral) finish_scores(x, stage, j0);
    if (!all_seen) hide(x, j0);
    Keep keep;
#pragma unroll
    for (int m = 0; m < S::kFolds; m++) {
      keep[m] = dropout.threshold == 0 ? ~0u : keep_bits(m, j0);
    }
    const bool related_values = call.value.count > 0;
    if (related_values && meets == MEETS_BAND) put_cells(x, keep, strips, d0, first);
    const Rows none = {};
    Rows added;
    weigh(x, 1, none, added);
    drop(x, keep);
    if (related_values) sum_ends(x, strips, d0);
    if constexpr (S::kGeneral) {
      if (call.value_lookups) fetch_values(x, j0);
    }
    add_folds<S::kWidth>(out, x, values(stage), s.share[warp_of()]);
    if (S::kGeneral && tiled && related_values && meets == MEETS_BAND) {
      close_tile_band(nearest, j0);
    }
  }

  /* A tile of which all is seen, kept and given one number a row: one run of instructions without a
   * branch but weigh's own, in which exponentials and products overlap. */
  __device__ void take_even_tile(int stage, Meets meets) {
    Scores x = {};
    multiply_folds<S::kWidth>(x, left, keys(stage));
    Rows shift, added;
    for (int h = 0; h < kRows; h++) {
      shift[h] = meets == MEETS_HEAD ? before[h] : meets == MEETS_TAIL ? behind[h] : 0;
    }
    weigh(x, call.scale, shift, added);
    for (int h = 0; h < kRows; h++) {
      before_sum[h] += meets == MEETS_HEAD ? added[h] : 0;
      behind_sum[h] += meets == MEETS_TAIL ? added[h] : 0;
    }
    add_folds<S::kWidth>(out, x, values(stage), s.share[warp_of()]);
  }

  /* A band crosses few strips of eight columns and 16 rows of a warp: those before `begin` are
   * wholly before it, those from `end` on behind it. */
  struct Strips {
    int begin, end;
    __device__ bool crosses(int n) const { return n >= begin && n < end; }
  };

  __device__ Strips strips_of(int m, Meets meets, int d0) const {
    if (meets == MEETS_TAIL) return {0, 0};
    if (meets != MEETS_BAND) return {S::kTiles, S::kTiles};
    const int d = d0 - (warp_row + 16 * m);
    return {(f.low + 1 - d) >> 3, (f.high + 22 - d) >> 3};
  }
  __device__ int distance_of(int n, int e, int d0) const {
    return d0 + column_of(n, e) - (row + e / 2 * 8);
  }

  /* Products to scores in units of log 2, with what the band adds. */
  __device__ void add_relations(Scores &x, const Strips (&strips)[S::kFolds], int d0, int first) {
#pragma unroll
    for (int at = 0; at < S::kTiles * S::kFolds; at++) {
      const int n = at / S::kFolds, m = at % S::kFolds;
      if (strips[m].crosses(n)) {
#pragma unroll
        for (int e = 4 * m; e < 4 * m + 4; e++) {
          const int cell = clamped(distance_of(n, e, d0), f.low, f.high) - first;
          x[n][e] = x[n][e] * call.scale + related(e / 2)[cell];
        }
        continue;
      }
#pragma unroll
      for (int e = 4 * m; e < 4 * m + 4; e++) {
        const float relation = n < strips[m].begin ? before[e / 2] : behind[e / 2];
        x[n][e] = x[n][e] * call.scale + relation;
      }
    }
  }

  __device__ void add_bias(Scores &x, const float *bias) {
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < kOwn; e++) {
        x[n][e] += bias[column_of(n, e) - (row + e / 2 * 8) + S::kQueries - 1];
      }
    }
  }

  __device__ void hide(Scores &x, int j0) {
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < kOwn; e++) {
        if (!in_sight(seq, query_of(e / 2), j0 + column_of(n, e))) x[n][e] = -INFINITY;
      }
    }
  }

  /* Bit 4 n + e % 4 of e / 4: is x[n][e] kept? */
  using Keep = uint32_t[S::kFolds];
  static __device__ bool kept(const Keep &keep, int n, int e) {
    return keep[e / 4] >> (4 * n + e % 4) & 1;
  }

  /* Of the 16 rows m; the four lanes of a row make a block of sixteen columns each. */
  __device__ uint32_t keep_bits(int m, int j0) {
    uint32_t bits = 0;
    for (int h = 0; h < 2; h++) {
      const auto i = static_cast<uint32_t>(query_of(2 * m + h));
      const uint4 mine =
          keep_block(dropout, seq.ordinal, i, static_cast<uint32_t>(j0 / 16 + lane % 4));
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
        const int owner = lane / 4 * 4 + n / 2;
        const uint32_t low = __shfl_sync(~0u, n % 2 == 0 ? mine.x : mine.z, owner);
        const uint32_t high = __shfl_sync(~0u, n % 2 == 0 ? mine.y : mine.w, owner);
        const uint32_t word = t < 4 ? low : high;
        for (int e = 0; e < 2; e++) {
          if (is_kept(dropout, word, t % 4 + e)) bits |= 1u << (4 * n + 2 * h + e);
        }
      }
    }
    return bits;
  }

  /* Scores take the cells of their distances, for close_band. */
  __device__ void put_cells(const Scores &x, const Keep &keep, const Strips (&strips)[S::kFolds],
                            int d0, int first) {
#pragma unroll
    for (int at = 0; at < S::kTiles * S::kFolds; at++) {
      const int n = at / S::kFolds, m = at % S::kFolds;
      if (!strips[m].crosses(n)) continue;
#pragma unroll
      for (int e = 4 * m; e < 4 * m + 4; e++) {
        const int d = distance_of(n, e, d0);
        if (d > f.low && d < f.high) {
          related(e / 2)[d - first] = kept(keep, n, e) ? x[n][e] : -INFINITY;
        }
      }
    }
  }

  /* The scores x scale + shift to weights, which are measured from `most`; added: their sums.
   * `most` follows the maximum only where that has left it behind by kAhead: till then weights are
   * at most 2^kAhead, and nothing has to be multiplied anew. */
  __device__ void weigh(Scores &x, float scale, const Rows &shift, Rows &added) {
    constexpr float kAhead = 8;
    Rows top;
    bool ahead = false;
    for (int h = 0; h < kRows; h++) {
      float highest = -INFINITY;
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
        highest = fmaxf(highest, fmaxf(x[n][2 * h], x[n][2 * h + 1]));
      }
      top[h] = fmaxf(most[h], quad_max(highest) * scale + shift[h]);
      ahead |= top[h] > most[h] + kAhead;
      rescaled[h] = 1;
    }
    if (__any_sync(~0u, ahead)) rescale(top);
    for (int h = 0; h < kRows; h++) {
      const float from = shift[h] - base_of(most[h]);
      added[h] = 0;
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) {
          x[n][e] = exp2_approx(x[n][e] * scale + from);
          added[h] += x[n][e];
        }
      }
      sum[h] += added[h];
    }
  }

  /* All sums are measured from `top`. */
  __device__ void rescale(const Rows &top) {
    for (int h = 0; h < kRows; h++) {
      const float factor = exp2_approx(most[h] - base_of(top[h]));
      most[h] = top[h];
      rescaled[h] = factor;
      before_sum[h] *= factor;
      behind_sum[h] *= factor;
      sum[h] *= factor;
#pragma unroll
      for (int n = 0; n < S::kOut; n++) {
        out[n][2 * h] *= factor;
        out[n][2 * h + 1] *= factor;
      }
    }
  }

  /* What scores are measured from: not -inf, where a row has seen nothing yet. */
  static __device__ float base_of(float top) { return top == -INFINITY ? 0.0f : top; }

  __device__ void drop(Scores &x, const Keep &keep) {
    if (dropout.threshold == 0) return;
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < kOwn; e++) {
        if (!kept(keep, n, e)) x[n][e] = 0;
      }
    }
  }

  /* The weights that lie in the ends of the band. */
  __device__ void sum_ends(const Scores &x, const Strips (&strips)[S::kFolds], int d0) {
    const int tail = f.high > f.low ? f.high : f.low + 1;
#pragma unroll
    for (int at = 0; at < S::kTiles * S::kFolds; at++) {
      const int n = at / S::kFolds, m = at % S::kFolds;
      if (strips[m].crosses(n)) {
#pragma unroll
        for (int e = 4 * m; e < 4 * m + 4; e++) {
          const int d = distance_of(n, e, d0);
          before_sum[e / 2] += d <= f.low ? x[n][e] : 0.0f;
          behind_sum[e / 2] += d >= tail ? x[n][e] : 0.0f;
        }
        continue;
      }
      const bool first = n < strips[m].begin;
#pragma unroll
      for (int h = 2 * m; h < 2 * m + 2; h++) {
        const float both = x[n][2 * h] + x[n][2 * h + 1];
        before_sum[h] += first ? both : 0.0f;
        behind_sum[h] += first ? 0.0f : both;
      }
    }
  }

  /* ---- the end ---------------------------------------------------------------------- */

  /* Keys of a row i by j - i: from nearest to end - 1. */
  struct Reach {
    int nearest, end;
  };

  /* Those that have cells inside the band, and that the row sees. */
  __device__ Reach reach_of(int h, int j_begin, int j_end) const {
    const int i = query_of(h);
    Reach x = {f.low + seq.start + 1, f.high + seq.start};
    if (x.nearest < seq.nearest) x.nearest = seq.nearest;
    if (x.nearest < j_begin - i) x.nearest = j_begin - i;
    if (x.end > seq.farthest + 1) x.end = seq.farthest + 1;
    if (x.end > j_end - i) x.end = j_end - i;
    return x;
  }

  /* The weight of cell c of a row, that of its one key: j - i = away. */
  __device__ float cell_weight(int h, int c, int away, const Reach &reach) const {
    const bool there = away >= reach.nearest && away < reach.end;
    return there ? exp2_approx(related(h)[c] - base_of(most[h])) : 0.0f;
  }

  __device__ void close() {
    for (int h = 0; h < kRows; h++) {
      sum[h] = quad_sum(sum[h]);
      before_sum[h] = quad_sum(before_sum[h]);
      behind_sum[h] = quad_sum(behind_sum[h]);
    }
    if constexpr (S::kGeneral) close_tables(chunk_of(0));
    if (call.value.count == 0) return;
    const bool tiled = S::kGeneral && f.tiled; /* then only the ends are left */
    const int step = tiled ? f.high - f.low : 1, last = tiled ? 1 : f.high - f.low;
    Reach reach[kRows];
    for (int h = 0; h < kRows; h++) reach[h] = reach_of(h, 0, seq.keys);
    add_source(value_source(), chunk_of(0), f.low, step, last + 1, [&](int h, int c) {
      float w = tiled ? 0 : cell_weight(h, c, f.low + seq.start + c, reach[h]);
      if (c == 0) w += before_sum[h];
      if (c == last) w += behind_sum[h];
      return w;
    });
  }

  /* Divides by the sums; rows that see nothing, and padding, are zeros. Of the lanes that share a
   * row each has one row's factor and log-sum-exp to find. */
  __device__ void write_rows() {
    const Sequence place = call.sequences[batch]; /* read again: registers are scarce till here */
    const int mine = lane % 4 < kRows ? lane % 4 : 0, i = query_of(mine);
    float my_sum = sum[0], my_most = most[0];
#pragma unroll
    for (int h = 1; h < kRows; h++) {
      if (h != mine) continue;
      my_sum = sum[h];
      my_most = most[h];
    }
    const bool live = i < place.queries && my_sum != 0; /* a NaN is not 0 and goes on */
    const float my_factor = live ? dropout.scale / my_sum : 0.0f;
    if (f.lse && mine == lane % 4 && i < place.query_rows) {
      const double log2_sum = static_cast<double>(my_most) + static_cast<double>(log2f(my_sum));
      f.lse[lse_of(call, place, head) + i] =
          live ? static_cast<float>(log2_sum * 0.69314718055994530942) : -INFINITY;
    }
    const unsigned lives = __ballot_sync(~0u, live);
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const float factor = __shfl_sync(~0u, my_factor, lane / 4 * 4 + h);
      write_row(h, place, factor, lives >> (lane / 4 * 4 + h) & 1);
    }
  }

  __device__ void write_row(int h, const Sequence &place, float factor, bool live) {
    const int i = query_of(h);
    if (i >= place.query_rows) return;
#pragma unroll
    for (int n = 0; n < S::kOut; n++) {
#pragma unroll
      for (int e = 2 * h; e < 2 * h + 2; e++) out[n][e] = live ? out[n][e] * factor : 0.0f;
    }
    Storage *const to = row_of<Storage>(f.out, place.query_batch, head, place.query_row + i) + t;
    if (call.Dv == S::kWidth && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Storage)) == 0) {
#pragma unroll
      for (int n = 0; n < S::kOut; n++) put_pair(to + 8 * n, out[n][2 * h], out[n][2 * h + 1]);
      return;
    }
#pragma unroll
    for (int n = 0; n < S::kOut; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (column_of(n, e) < call.Dv) put_number(to[8 * n + e], out[n][2 * h + e]);
      }
    }
  }

  /* ---- what plain attention and short bands do without ---------------------------------- */

  __device__ float *pair_row(int r) const { return area<float>(f.pairs_at) + r * S::kPairLine; }

  /* The rows of the tables that are looked up, as far as they are kept: what queries meet of them,
   * or no weights yet. */
  __device__ void open_tables(Operand<S> *chunk) {
    for (int n = 0; n < call.lookup_count; n++) {
      const Lookup &x = call.lookups[n];
      if (f.table_at[n] == 0) continue;
      const Source none = {nullptr, 0, 0, true}, all = {&x.part, 1, call.D, true};
      multiply_source(left, x.kind == KIND_KEY ? all : none, chunk, area<float>(f.table_at[n]),
                      f.table_line[n], 0, 1, x.rows);
    }
  }

  /* Softcap, mask, and what pairs add. */
  __device__ void finish_scores(Scores &x, int stage, int j0) {
    const bool paired = call.score_lookups || call.query.count > 0;
    if (f.crossed_at != 0) cross_keys(stage, j0);
    if (paired) {
      const Kept kept = {
          dynamic_smem(), q0,           j0,
          f.table_at,     f.table_line, f.crossed_at != 0 ? area<float>(f.crossed_at) : nullptr,
          f.crossed_line, S::kQueries};
      score_pairs<Storage, S::kKeys>(call, seq, batch, head, q0 + warp_row, kept,
                                     pair_row(warp_row), S::kPairLine);
    }
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < kOwn; e++) {
        const int r = row + e / 2 * 8, c = column_of(n, e), i = q0 + r;
        if (paired) x[n][e] += pair_row(r)[c];
        if (call.softcap != 0) x[n][e] = soft_capped(call.softcap, x[n][e]);
        if (call.mask && i < seq.queries && j0 + c < seq.keys &&
            !mask_shows(call, seq, batch, head, i, j0 + c)) {
          x[n][e] = -INFINITY;
        }
      }
    }
  }

  /* What the keys of a tile meet of the query bands at its diagonals. */
  __device__ void cross_keys(int stage, int j0) {
    constexpr int kKeyWarps = S::kKeys / 16; /* warps that have keys */
    const bool active = warp_of() < kKeyWarps;
    Left rows;
    rows[0].read(keys(stage) + (active ? warp_row : 0) * S::kLine);
    multiply_source(rows, {call.query.parts, call.query.count, call.D, false},
                    area<Operand<S>>(f.chunk_at), area<float>(f.crossed_at), f.crossed_line,
                    first_diagonal(j0), 1, S::kDiagonals, active);
    __syncthreads(); /* all warps read them */
  }

  /* The weights x go to their relations: to those of short tables as sums for later, of the others
   * out += what they fetch. */
  __device__ void fetch_values(const Scores &x, int j0) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < kOwn; e++) pair_row(row + e / 2 * 8)[column_of(n, e)] = x[n][e];
    }
    __syncwarp();
    bool fetch = false;
    for (int n = 0; n < call.lookup_count; n++) {
      if (call.lookups[n].kind != KIND_VALUE) continue;
      if (f.table_at[n] == 0) fetch = true;
      else collect_weights(n, j0);
    }
    if (fetch) fetch_rows(j0);
    __syncwarp();
  }

  __device__ void collect_weights(int n, int j0) {
    const int first = warp_row, line = f.table_line[n];
    float *const sums = area<float>(f.table_at[n]) + first * line;
    for (int r = 0; r < 16; r++) {
      const float factor = __shfl_sync(~0u, r < 8 ? rescaled[0] : rescaled[1], r % 8 * 4);
      for (int c = lane; factor != 1 && c < call.lookups[n].rows; c += 32) {
        sums[r * line + c] *= factor;
      }
    }
    __syncwarp();
    if (lane < 16 &&
        q0 + first + lane < seq.queries) { /* one lane a row: weights add up in order */
      for_relations<S::kKeys>(
          call.lookups[n], seq, batch, head, q0 + first + lane, j0, pair_row(first + lane),
          [&](float weight, int relation) { sums[lane * line + relation] += weight; });
    }
    __syncwarp();
  }

  __device__ void fetch_rows(int j0) {
    const int first = warp_row;
    float *const fetched = area<float>(f.fetched_at) + first * S::kFetchedLine;
    const float *const mine = fetched + (row - first) * S::kFetchedLine + t;
    for (int c0 = 0; c0 < call.Dv; c0 += 32) {
      fetch_pairs<S::kKeys>(call, f.table_at, seq, batch, head, q0 + first, j0, c0 + lane,
                            pair_row(first), S::kPairLine, fetched, S::kFetchedLine);
      __syncwarp();
#pragma unroll
      for (int n = 0; n < S::kOut; n++) {
        if (n / 4 != c0 / 32) continue;
#pragma unroll
        for (int e = 0; e < kOwn; e++) {
          out[n][e] += mine[e / 2 * 8 * S::kFetchedLine + n % 4 * 8 + e % 2];
        }
      }
      __syncwarp();
    }
  }

  /* What the sums of weights are for. */
  __device__ void close_tables(Operand<S> *chunk) {
    for (int n = 0; n < call.lookup_count; n++) {
      const Lookup &x = call.lookups[n];
      if (f.table_at[n] == 0 || x.kind != KIND_VALUE) continue;
      const float *const sums = area<float>(f.table_at[n]);
      const int line = f.table_line[n];
      add_source({&x.part, 1, call.Dv, true}, chunk, 0, 1, x.rows,
                 [&](int h, int c) { return c < x.rows ? sums[(row + 8 * h) * line + c] : 0.0f; });
    }
  }

  /* The diagonals of one tile, as a band of their own. */
  __device__ void open_tile_band(int first) {
    Operand<S> *const chunk = area<Operand<S>>(f.chunk_at);
    float *const to = area<float>(f.related_at);
    if (!position_bias() || call.key.count == 0) {
      multiply_source(left, key_source(), chunk, to, f.line, first, 1, S::kDiagonals);
      return;
    }
    const bool turns = !S::kKept && f.biased_at == 0;
    if (turns) load_queries(s.queries, position_bias());
    Left biased;
    read_left(biased, turns ? s.queries : area<Operand<S>>(f.biased_at));
    multiply_source(biased, key_source(), chunk, to, f.line, first, 1, S::kDiagonals);
    if (turns) restore_queries(s.queries);
  }

  __device__ void close_tile_band(int first, int j0) {
    const int stop = j0 + S::kKeys < seq.keys ? j0 + S::kKeys : seq.keys;
    Reach reach[kRows];
    for (int h = 0; h < kRows; h++) reach[h] = reach_of(h, j0, stop);
    if (f.fetched_at != 0) __syncthreads(); /* other warps read there what they fetched */
    add_source(value_source(), area<Operand<S>>(f.chunk_at), first, 1, S::kDiagonals,
               [&](int h, int c) { return cell_weight(h, c, first + seq.start + c, reach[h]); });
  }
};

}  // namespace rpc

#endif
