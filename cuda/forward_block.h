/* SPDX-License-Identifier: Apache-2.0
 *
 * forward_block.h: what one block of attention_forward.cu does.
 *
 * A thread owns the numbers of two rows, or of four where its warp has 32 (kFolds): those of tile.h
 * for every 16, queries q0 + row + 8 h. The loop over the tiles of keys keeps two of them in shared
 * memory where there is room: one is computed with while the next one is on its way.
 */
#ifndef RPC_FORWARD_BLOCK_H
#define RPC_FORWARD_BLOCK_H

#include "forward_pairs.h"
#include "forward_plan.h"

namespace rpc {

/* The compiler needs more registers where there is no sm_90. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kScarce = 1;
#else
constexpr int kScarce = 0;
#endif

template <class S>
class ForwardBlock {
 protected:
  using Storage = typename S::Storage;
  using Left = LeftRows<Operand<S>, S::kWidth, S::kKept>[S::kFolds];
  static constexpr int kOwn = 4 * S::kFolds;  /* numbers of a thread in eight columns, */
  static constexpr int kRows = 2 * S::kFolds; /* of so many rows */
  using Scores = float[S::kFolds][S::kTiles][4];
  using Sixteen = float[S::kFolds][2][4]; /* the same of sixteen columns */
  using Rows = float[kRows];

 public:
  __device__ ForwardBlock(const Forward &forward, int the_head)
      : f(forward),
        call(forward.call),
        s(*reinterpret_cast<Shared<S> *>(dynamic_smem())),
        lane(lane_of()),
        warp_row(warp_of() * S::kWarpRows),
        row(warp_row + lane_of() / 4),
        t(lane_of() % 4 * 2),
        head(the_head),
        dropout(dropout_at(forward.call, the_head)) {}

  __device__ void run(const Tile &tile) {
    begin_at(tile);
    const int last = (q0 + S::kQueries < seq.queries ? q0 + S::kQueries : seq.queries) - 1;
    begin = q0 + seq.nearest > 0 ? (q0 + seq.nearest) / S::kKeys * S::kKeys : 0;
    end = last + seq.farthest + 1 < seq.keys ? last + seq.farthest + 1 : seq.keys;
    const bool any = q0 < seq.queries && begin < end;
    if (any) open();
    clear();
    if (any) {
      walk();
      close();
    }
    write_rows();
  }

 protected:
  const Forward &f;
  const Call &call;
  Shared<S> &s;
  const int lane, warp_row, row, t; /* the warp's first row; row: of h = 0 */
  const int head;
  int batch, q0;
  int begin, end; /* keys that some query of the tile may see */
  Sequence seq;
  const Storage *key_rows, *value_rows; /* its first */
  const Dropout dropout;

  Left left;
  float out[S::kFolds][S::kOut][4];
  Rows most, sum;
  Rows rescaled;               /* what the last tile multiplied all sums with */
  Rows before_sum, behind_sum; /* weights up to the band's start, and from its end on: those kept */

  /* Of eight columns n and of row e / 2, column_of(n, e). */
  template <class X>
  static __device__ auto &number(X &x, int n, int e) {
    return x[e / 4][n][e % 4];
  }

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

  __device__ void begin_at(const Tile &tile) {
    batch = tile.sequence;
    q0 = tile.row;
    seq = call.sequences[batch];
    const int of_keys = key_head(call, head);
    key_rows = row_of<Storage>(call.k, seq.key_batch, of_keys, seq.key_row);
    value_rows = row_of<Storage>(call.v, seq.key_batch, of_keys, seq.key_row);
    if constexpr (sizeof(Storage) == sizeof(bf16)) {
      if (f.ones && head == call.H - 1) write_ones();
    }
  }

  /* The queries, with position_bias where it is given. */
  __device__ void load_queries(Operand<S> *to, const float *bias) {
    const Storage *const from = row_of<Storage>(call.q, seq.query_batch, head, seq.query_row + q0);
    if (!bias) {
      load_rows<S::kQueries, S::kWidth, S::kThreads>(to, from, call.q.row_stride, seq.queries - q0,
                                                     call.D, aligned());
      return;
    }
#pragma unroll 1
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
#pragma unroll 1
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
    constexpr int kAtOnce = (S::kShort ? 4 : 3) - kScarce; /* so that registers suffice */
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
   * `chunk` is free before and after. active: has the warp any rows? ready() is called once, before
   * x is read. */
  template <class Ready>
  __device__ void multiply_source(const Left &x, const Source &from, Operand<S> *chunk, float scale,
                                  float *to, int line, int first, int step, int count, bool active,
                                  Ready ready) {
    for (int c0 = 0; c0 < count; c0 += S::kChunk) {
      const int columns = count - c0 < S::kChunk ? count - c0 : S::kChunk;
      if (from.count > 0) load_source(chunk, from, first + c0 * step, step, columns);
      if (c0 == 0) ready();
      if (from.count > 0) __syncthreads();
#pragma unroll 1
      for (int k = 0; active && k < columns; k += 16) {
        Sixteen c = {};
        if (from.count > 0) multiply_rows<S::kWidth>(c, x, chunk + k * S::kLine);
#pragma unroll
        for (int n = 0; n < 2; n++) {
          if (k + 8 * n >= columns) continue;
#pragma unroll
          for (int e = 0; e < kOwn; e++) {
            to[(row + 8 * (e / 2)) * line + c0 + k + column_of(n, e)] = number(c, n, e) * scale;
          }
        }
      }
      if (from.count > 0) __syncthreads();
    }
    __syncwarp(); /* the rows of a warp are its own */
  }
  __device__ void multiply_source(const Left &x, const Source &from, Operand<S> *chunk, float scale,
                                  float *to, int line, int first, int step, int count,
                                  bool active = true) {
    multiply_source(x, from, chunk, scale, to, line, first, step, count, active, [] {});
  }

  /* out += weights . source[first + c step], c below count. weigh(w, c): those of sixteen columns
   * from c on; from count on they are 0. From the last to the first: that spares a register. */
  template <class Weigh>
  __device__ void add_source(const Source &from, Operand<S> *chunk, int first, int step, int count,
                             Weigh weigh) {
    __syncwarp(); /* what weights come from was written by other lanes */
    for (int c0 = (count - 1) / S::kChunk * S::kChunk; c0 >= 0; c0 -= S::kChunk) {
      const int columns = count - c0 < S::kChunk ? count - c0 : S::kChunk;
      load_source(chunk, from, first + c0 * step, step, columns);
      __syncthreads();
#pragma unroll 1
      for (int k = (columns - 1) / 16 * 16; k >= 0; k -= 16) {
        Sixteen w;
        weigh(w, c0 + k);
        add_weighted<S::kWidth>(out, w, chunk + k * S::kLine, s.share[warp_of()]);
      }
      __syncthreads();
    }
  }

  __device__ Source key_source() const { return {call.key.parts, call.key.count, call.D, false}; }
  __device__ Source value_source() const {
    return {call.value.parts, call.value.count, call.Dv, false};
  }

  /* What queries meet of the band's ends lies in cells that no key takes. */
  __device__ int first_cell() const { return S::kGeneral && f.tiled ? f.line - 2 : 0; }
  __device__ int last_cell() const { return S::kGeneral && f.tiled ? f.line - 1 : f.high - f.low; }
  __device__ void keep_ends() {
    for (int h = 0; t == 0 && h < kRows; h++) {
      related(h)[first_cell()] = related(h)[0];
      related(h)[last_cell()] = related(h)[1];
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
    const auto queries_come = [&] { read_queries(first, S::kStages == 2); };
    if (f.banded) { /* rows of tables are asked for while all that is on its way */
      multiply_source(left, key_source(), chunk_of(kLast), 1, area<float>(f.related_at), f.line,
                      f.low, step, columns, true, queries_come);
      if (tiled) keep_ends();
    } else {
      queries_come();
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

  __device__ void clear() {
    for (int h = 0; h < kRows; h++) {
      most[h] = -INFINITY;
      sum[h] = before_sum[h] = behind_sum[h] = 0;
      clear_row(h);
    }
  }
  __device__ void clear_row(int h) {
#pragma unroll
    for (int n = 0; n < S::kOut; n++) number(out, n, 2 * h) = number(out, n, 2 * h + 1) = 0;
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
    if constexpr (S::kGeneral) {
      const bool hidden = mask_hides<S::kQueries, S::kKeys>(call, seq, batch, head, q0, j0);
      if (hidden && !fills_cells(d0)) return;
    }
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
    if (!S::kShort && raw() && all_seen && meets != MEETS_BAND && dropout.threshold == 0) {
      take_even_tile(stage, meets);
      return;
    }
    const int first = tiled ? nearest : f.low; /* distance of cell 0 */
    if (S::kGeneral && tiled && meets == MEETS_BAND) {
      open_tile_band(nearest);
    }
    Scores x = {};
    if (meets == MEETS_BAND) begin_scores(x, d0, first);
    multiply_rows<S::kWidth>(x, left, keys(stage));
    float scale = call.scale;
    Rows shift;
    read_shift(shift, meets);
    if (!raw() || (!all_seen && meets != MEETS_BAND)) { /* -inf is not added to what may be inf */
      scale_scores(x, scale, shift);
      if (call.bias.count > 0) add_bias(x, s.bias[stage]);
      if constexpr (S::kGeneral) finish_scores(x, stage, j0);
    }
    if (!all_seen) hide(x, j0);
    Keep keep;
#pragma unroll
    for (int m = 0; m < S::kFolds; m++) {
      keep[m] = dropout.threshold == 0 ? ~0u : keep_bits(m, j0);
    }
    const bool related_values = call.value.count > 0;
    if (related_values && meets == MEETS_BAND) put_cells(x, keep, d0, first);
    Rows added;
    weigh(x, scale, shift, added);
    drop(x, keep);
    if (related_values && nearest <= f.low) sum_before(x, d0);
    if (related_values && farthest >= tail()) sum_behind(x, d0);
    if constexpr (S::kGeneral) {
      if (call.value_lookups) fetch_values(x, j0);
    }
    add_weighted<S::kWidth>(out, x, values(stage), s.share[warp_of()]);
    if (S::kGeneral && tiled && related_values && meets == MEETS_BAND) {
      close_tile_band(nearest, j0);
    }
  }

  /* Do pairs of the block's tile fill cells that last until the end, the hidden ones too? */
  __device__ bool fills_cells(int d0) const {
    const bool crossed = d0 + S::kKeys - 1 > f.low && d0 - (S::kQueries - 1) < f.high;
    return f.banded && !f.tiled && call.value.count > 0 && crossed;
  }

  /* A tile of which all is seen, kept and given one number a row: one run of instructions without a
   * branch but weigh's own, in which exponentials and products overlap. */
  __device__ void take_even_tile(int stage, Meets meets) {
    Rows shift, added;
    read_shift(shift, meets);
    Scores x = {};
    multiply_rows<S::kWidth>(x, left, keys(stage));
    weigh(x, call.scale, shift, added);
    add_weighted<S::kWidth>(out, x, values(stage), s.share[warp_of()]);
    for (int h = 0; h < kRows; h++) {
      if (meets == MEETS_HEAD) before_sum[h] += added[h];
      if (meets == MEETS_TAIL) behind_sum[h] += added[h];
    }
  }

  /* Do products stay what they are until they become weights? So do then the cells. */
  __device__ bool raw() const { return !S::kGeneral && call.scale > 0 && call.bias.count == 0; }

  /* What a row's scores take all the same. */
  __device__ void read_shift(Rows &shift, Meets meets) const {
    for (int h = 0; h < kRows; h++) shift[h] = 0;
    if (meets != MEETS_HEAD && meets != MEETS_TAIL) return;
    const int cell = meets == MEETS_HEAD ? first_cell() : last_cell();
    for (int h = 0; h < kRows; h++) shift[h] = call.scale * related(h)[cell];
  }

  /* The distance of a thread's first column of row h; where its cell would lie. */
  __device__ int distance_of(int h, int d0) const { return d0 + t - (row + 8 * h); }
  __device__ int cell_at(int h, int d) const {
    return f.related_at + ((row + 8 * h) * f.line + d) * 4;
  }
  /* The distance from which on the band is behind. */
  __device__ int tail() const { return f.high > f.low ? f.high : f.low + 1; }

  /* Products come on top of what the band adds to them. */
  __device__ void begin_scores(Scores &x, int d0, int first) const {
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const int at = cell_at(h, distance_of(h, d0) - first);
      const int low = cell_at(h, f.low - first), high = cell_at(h, f.high - first);
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          number(x, n, 2 * h + e) = *area<float>(clamped(at + 32 * n + 4 * e, low, high));
        }
      }
    }
  }

  /* Products to scores in units of log 2. */
  __device__ void scale_scores(Scores &x, float &scale, Rows &shift) const {
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < kOwn; e++) number(x, n, e) = number(x, n, e) * scale + shift[e / 2];
    }
    scale = 1;
    for (int h = 0; h < kRows; h++) shift[h] = 0;
  }

  __device__ void add_bias(Scores &x, const float *bias) {
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < kOwn; e++) {
        number(x, n, e) += bias[column_of(n, e) - (row + e / 2 * 8) + S::kQueries - 1];
      }
    }
  }

  __device__ void hide(Scores &x, int j0) {
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const int i = query_of(h) - j0 - t, keys = seq.keys - j0 - t;
      const int first = seq.nearest + i;
      const int beyond = seq.farthest + i + 1 < keys ? seq.farthest + i + 1 : keys;
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (8 * n + e < first || 8 * n + e >= beyond) number(x, n, 2 * h + e) = -INFINITY;
        }
      }
    }
  }

  /* Bit 4 n + e % 4 of e / 4: is number(x, n, e) one that is kept? */
  using Keep = uint32_t[S::kFolds];
  static __device__ bool kept(const Keep &keep, int n, int e) {
    return keep[e / 4] >> (4 * n + e % 4) & 1;
  }

  /* Of the 16 rows m; the four lanes of a row make a block of sixteen columns each. */
  __device__ uint32_t keep_bits(int m, int j0) {
    uint32_t bits = 0;
#pragma unroll 1
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
          if (is_kept(dropout, word, t % 4 + e)) bits |= 1u << (4 * n + e) << 2 * h;
        }
      }
    }
    return bits;
  }

  /* Scores take the cells of their distances, for close(). */
  __device__ void put_cells(const Scores &x, const Keep &keep, int d0, int first) const {
    for_cells(d0, first, [&](int n, int e, float &cell) { cell = number(x, n, e); });
    if (dropout.threshold == 0) return;
    for_cells(d0, first, [&](int n, int e, float &cell) {
      if (!kept(keep, n, e)) cell = -INFINITY;
    });
  }

  /* Calls put(n, e, cell) for all that lie inside the band. */
  template <class Put>
  __device__ void for_cells(int d0, int first, Put put) const {
    const auto bytes = static_cast<unsigned>(tail() - f.low - 1) * 4;
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const int d = distance_of(h, d0), at = cell_at(h, d - first);
      const int inside = (d - f.low - 1) * 4;
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int further = 32 * n + 4 * e;
          if (static_cast<unsigned>(inside + further) < bytes) {
            put(n, 2 * h + e, *area<float>(at + further));
          }
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
      top[h] = fmaxf(most[h], highest_of(x, h) * scale + shift[h]);
      ahead |= top[h] > most[h] + kAhead;
      rescaled[h] = 1;
    }
    if (__any_sync(~0u, ahead)) rescale(top);
    make_weights(x, scale, shift, added);
  }
  static __device__ float highest_of(Scores &x, int h) {
    float highest = fmaxf(number(x, 0, 2 * h), number(x, 0, 2 * h + 1));
#pragma unroll
    for (int n = 1; n < S::kTiles; n++) {
      highest = fmaxf(highest, fmaxf(number(x, n, 2 * h), number(x, n, 2 * h + 1)));
    }
    return quad_max(highest);
  }
  __device__ void make_weights(Scores &x, float scale, const Rows &shift, Rows &added) {
    for (int h = 0; h < kRows; h++) {
      const float from = shift[h] - base_of(most[h]);
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) {
          number(x, n, e) = exp2_approx(number(x, n, e) * scale + from);
          added[h] = n == 0 && e == 2 * h ? number(x, n, e) : added[h] + number(x, n, e);
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
        number(out, n, 2 * h) *= factor;
        number(out, n, 2 * h + 1) *= factor;
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
        if (!kept(keep, n, e)) number(x, n, e) = 0;
      }
    }
  }

  /* The weights up to the band's start. They are not what the others leave of all: where that is
   * little, the rounding of all would be much of it. */
  __device__ void sum_before(const Scores &x, int d0) {
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const int last = f.low - distance_of(h, d0);
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (8 * n + e <= last) before_sum[h] += number(x, n, 2 * h + e);
        }
      }
    }
  }

  /* The weights from the band's end on. */
  __device__ void sum_behind(const Scores &x, int d0) {
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const int first = tail() - distance_of(h, d0);
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (8 * n + e >= first) behind_sum[h] += number(x, n, 2 * h + e);
        }
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

  /* Weights of sixteen cells from c on: a cell is that of one key, j - i = first + c. */
  __device__ void weigh_cells(Sixteen &w, int c, int first, const Reach (&reach)[kRows]) {
    const float scale = raw() ? call.scale : 1;
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const float base = base_of(most[h]);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int at = c + column_of(e / 2, e), away = first + at;
        const bool there = away >= reach[h].nearest && away < reach[h].end;
        number(w, e / 2, 2 * h + e % 2) = there ? exp2_approx(related(h)[at] * scale - base) : 0.0f;
      }
    }
  }

  __device__ void close() {
    for (int h = 0; h < kRows; h++) sum[h] = quad_sum(sum[h]);
    if constexpr (S::kGeneral) close_tables(chunk_of(0));
    if (call.value.count == 0) return;
    const bool tiled = S::kGeneral && f.tiled; /* then only the ends are left */
    const int step = tiled ? f.high - f.low : 1, last = tiled ? 1 : f.high - f.low;
    Reach reach[kRows];
    for (int h = 0; h < kRows; h++) {
      reach[h] = reach_of(h, 0, tiled ? 0 : seq.keys);
      behind_sum[h] = quad_sum(behind_sum[h]);
    }
    add_source(value_source(), chunk_of(0), f.low, step, last + 1, [&](Sixteen &w, int c) {
      weigh_cells(w, c, f.low + seq.start, reach);
      add_ends(w, c, last);
    });
  }

  /* What the ends of the band weigh. */
  __device__ void add_ends(Sixteen &w, int c, int last) {
    if (c == 0) {
#pragma unroll
      for (int h = 0; h < kRows; h++) {
        const float before = quad_sum(before_sum[h]);
        if (t == 0) number(w, 0, 2 * h) += before;
      }
    }
    if (last - c >= 16) return;
#pragma unroll
    for (int h = 0; h < kRows; h++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (c + column_of(e / 2, e) == last) number(w, e / 2, 2 * h + e % 2) += behind_sum[h];
      }
    }
  }

  /* Divides by the sums; rows that see nothing, and padding, are zeros. */
  __device__ void write_rows() {
    const Sequence place = call.sequences[batch]; /* read again: registers are scarce till here */
    const float my_factor = close_rows(place);
    Storage *const to =
        row_of<Storage>(f.out, place.query_batch, head, place.query_row + query_of(0)) + t;
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const float factor = __shfl_sync(~0u, my_factor, lane / 4 * 4 + h);
      if (query_of(h) < place.query_rows) write_row(h, to + 8 * h * f.out.row_stride, factor);
    }
  }

  /* Of the lanes that share a row each has one row's log-sum-exp to find, and its factor. */
  __device__ float close_rows(const Sequence &place) {
    const int mine = lane % 4 < kRows ? lane % 4 : 0, i = query_of(mine);
    float my_sum = sum[0], my_most = most[0];
#pragma unroll
    for (int h = 1; h < kRows; h++) {
      if (h != mine) continue;
      my_sum = sum[h];
      my_most = most[h];
    }
    const bool live = i < place.queries && my_sum != 0; /* a NaN is not 0 and goes on */
    if (f.lse && mine == lane % 4 && i < place.query_rows) {
      const double log2_sum = static_cast<double>(my_most) + static_cast<double>(log2f(my_sum));
      f.lse[lse_of(call, place, head) + i] =
          live ? static_cast<float>(log2_sum * 0.69314718055994530942) : -INFINITY;
    }
    const unsigned lives = __ballot_sync(~0u, live || mine != lane % 4);
#pragma unroll
    for (int h = 0; lives != ~0u && h < kRows; h++) {
      if ((lives >> (lane / 4 * 4 + h) & 1) == 0) clear_row(h);
    }
    return live ? dropout.scale / my_sum : 0.0f;
  }

  __device__ void write_row(int h, Storage *to, float factor) {
#pragma unroll
    for (int n = 0; n < S::kOut; n++) {
      number(out, n, 2 * h) *= factor;
      number(out, n, 2 * h + 1) *= factor;
    }
    if (call.Dv == S::kWidth && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Storage)) == 0) {
#pragma unroll
      for (int n = 0; n < S::kOut; n++) {
        put_pair(to + 8 * n, number(out, n, 2 * h), number(out, n, 2 * h + 1));
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < S::kOut; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (column_of(n, e) < call.Dv) put_number(to[8 * n + e], number(out, n, 2 * h + e));
      }
    }
  }

  /* Behind the heads of each row: for the parts of a bias, and zeros up to a border. First of all,
   * while there are registers. */
  __device__ void write_ones() {
    const int rows = seq.query_rows - q0 < S::kQueries ? seq.query_rows - q0 : S::kQueries;
    const int64_t width = int64_t{call.H} * call.Dv, count = f.out.row_stride - width;
    for (int r = static_cast<int>(threadIdx.x); r < rows; r += S::kThreads) {
      Storage *const to =
          row_of<Storage>(f.out, seq.query_batch, 0, seq.query_row + q0 + r) + width;
      for (int c = 0; c < count; c++) put_number(to[c], c < RPI_BIAS_PARTS ? 1.0f : 0.0f);
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
      multiply_source(left, x.kind == KIND_KEY ? all : none, chunk, call.scale,
                      area<float>(f.table_at[n]), f.table_line[n], 0, 1, x.rows);
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
        if (paired) number(x, n, e) += pair_row(r)[c];
        if (call.softcap != 0) number(x, n, e) = soft_capped(call.softcap, number(x, n, e));
        if (call.mask && i < seq.queries && j0 + c < seq.keys &&
            !mask_shows(call, seq, batch, head, i, j0 + c)) {
          number(x, n, e) = -INFINITY;
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
                    area<Operand<S>>(f.chunk_at), call.scale, area<float>(f.crossed_at),
                    f.crossed_line, first_diagonal(j0), 1, S::kDiagonals, active);
    __syncthreads(); /* all warps read them */
  }

  /* The weights x go to their relations: to those of short tables as sums for later, of the others
   * out += what they fetch. */
  __device__ void fetch_values(const Scores &x, int j0) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < kOwn; e++) pair_row(row + e / 2 * 8)[column_of(n, e)] = number(x, n, e);
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
          number(out, n, e) += mine[e / 2 * 8 * S::kFetchedLine + n % 4 * 8 + e % 2];
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
      add_source({&x.part, 1, call.Dv, true}, chunk, 0, 1, x.rows, [&](Sixteen &w, int c) {
        for (int e = 0; e < 2 * kOwn; e++) {
          const int r = row + e % kOwn / 2 * 8, at = c + column_of(e / kOwn, e);
          number(w, e / kOwn, e % kOwn) = at < x.rows ? sums[r * line + at] : 0.0f;
        }
      });
    }
  }

  /* The diagonals of one tile, as a band of their own. */
  __device__ void open_tile_band(int first) {
    Operand<S> *const chunk = area<Operand<S>>(f.chunk_at);
    float *const to = area<float>(f.related_at);
    if (!position_bias() || call.key.count == 0) {
      multiply_source(left, key_source(), chunk, 1, to, f.line, first, 1, S::kDiagonals);
      return;
    }
    const bool turns = !S::kKept && f.biased_at == 0;
    if (turns) load_queries(s.queries, position_bias());
    Left biased;
    read_left(biased, turns ? s.queries : area<Operand<S>>(f.biased_at));
    multiply_source(biased, key_source(), chunk, 1, to, f.line, first, 1, S::kDiagonals);
    if (turns) restore_queries(s.queries);
  }

  __device__ void close_tile_band(int first, int j0) {
    const int stop = j0 + S::kKeys < seq.keys ? j0 + S::kKeys : seq.keys;
    Reach reach[kRows];
    for (int h = 0; h < kRows; h++) reach[h] = reach_of(h, j0, stop);
    if (f.fetched_at != 0) __syncthreads(); /* other warps read there what they fetched */
    add_source(value_source(), area<Operand<S>>(f.chunk_at), first, 1, S::kDiagonals,
               [&](Sixteen &w, int c) { weigh_cells(w, c, first + seq.start, reach); });
  }
};

}  // namespace rpc

#endif
