/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_queries.h: a block of queries of the fast path of attention's backward: dq, and
 * what its rows add to the tables of keys, values and biases. Or, where dq is made by turns
 * (backward_turns.h), what pairs that cross the band add to both.
 */
#ifndef RPC_BACKWARD_QUERIES_H
#define RPC_BACKWARD_QUERIES_H

#include "backward_band.h"

namespace rpc {

/* sums[2 h + end] += the weights of row + 8 h, by a product that has ones in column `end`: of the
 * four lanes that share a row the first gets them all. */
template <class Operand, int kTiles>
__device__ inline void add_row_sums(float (&sums)[4], const float (&weights)[kTiles][4], int end) {
  if constexpr (sizeof(Operand) == 2) {
    const uint32_t ones = lane_of() / 4 == end ? 0x3f803f80u : 0u;
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const float(&w0)[4] = weights[n], (&w1)[4] = weights[n + 1];
      mma_bf16(sums,
               {pack_bf16(w0[0], w0[1]), pack_bf16(w0[2], w0[3]), pack_bf16(w1[0], w1[1]),
                pack_bf16(w1[2], w1[3])},
               {ones, ones});
    }
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        sums[e / 2 * 2] += end == 0 ? weights[n][e] : 0.0f;
        sums[e / 2 * 2 + 1] += end == 0 ? 0.0f : weights[n][e];
      }
    }
  }
}

template <class S, bool kInTurns = false>
class QueryBlock : BandBlock<S> {
  using Base = BandBlock<S>;
  using Base::call;
  using Base::cells_of;
  using Base::f;
  using Base::head;
  using Base::lane;
  using Base::row;
  using Base::s;
  using Base::seq;
  using Base::strip;
  using Base::t;
  using Base::table;
  using Base::uncut_from;
  using Base::uncut_to;
  using Base::walk_from;
  using Base::walk_to;
  using Base::warp;
  using typename Base::Left;
  using typename Base::LeftAgain;
  using typename Base::Operand;
  using typename Base::Scores;
  using typename Base::Storage;
  using typename Base::Sums;
  static constexpr int kStrips = S::kStrips;

 public:
  __device__ QueryBlock(const BandBackward &backward, int the_head)
      : Base(backward, the_head, false), slopes(this->cells + 2 * S::kOwn * backward.line) {}

  /* One tile of queries; first: of those whose sums go to the same lines. */
  __device__ void run(const Tile &tile, bool first, float *lines) {
    seq = call.sequences + tile.sequence;
    q0 = tile.row;
    __syncthreads(); /* the tile before is done with */
    Sums dq[kStrips] = {};
    distances = lines && f.bias_columns > 0 ? lines + f.bias_offset : nullptr;
    if (distances && first) {
      for (int x = static_cast<int>(threadIdx.x); x < f.bias_columns; x += S::kThreads) {
        distances[x] = 0;
      }
    }
    bias_low = bias_high = 0;
    if (q0 < seq->queries) {
      find_keys();
      open();
      walk(dq);
      if (distances) add_bias_ends();
      if (f.banded) close(dq, first, lines);
    } else if (f.banded && first && lines) {
      for (int64_t at = threadIdx.x; at < f.bias_offset; at += S::kThreads) lines[at] = 0;
    }
    if constexpr (kInTurns) leave(tile.sequence, dq);
    else write(dq);
  }

 private:
  /* What a row starts with, and sums up. */
  struct Row {
    float lse, delta;
    float key[2], value[2]; /* of the ends: scores in units of log 2, dz . wV */
    float weights[2];       /* their sums beyond the ends */
  };

  /* Those that some of the block's queries see. */
  __device__ void find_keys() {
    const int queries_end = smaller(q0 + S::kOwn, seq->queries);
    const int nearest = q0 + seq->nearest;
    walk_from = nearest > 0 ? nearest / S::kOther * S::kOther : 0;
    walk_to = smaller(queries_end - 1 + seq->farthest, seq->keys - 1);
    const int i = q0 + strip(0), end = i + 16 * kStrips - 1;
    uncut_from = end + seq->nearest;
    uncut_to = smaller(i + seq->farthest + 1, seq->keys) - S::kOther;
    apart = q0 + seq->start;
    if (kInTurns) {
      const Across across = across_band(f.low, f.high, apart);
      walk_from = clamped(across.first, walk_from, walk_to + 1);
      walk_to = smaller(walk_to, across.last + S::kOther - 1);
    }
    this->begin_walk(call.k, call.v, seq->key_batch, key_head(call, head),
                     seq->key_row + walk_from);
  }

  __device__ void open() {
    this->template load_queries<S::kOwn>(s.own[0], s.own[1], q0);
    if (f.held > 0 && !held) this->load_held();
    held = true;
    cp_async_commit();
    loaded = (!f.banded || f.held > 0) && walk_from <= walk_to; /* else vectors come there */
    if (loaded) load_tile(0, walk_from);
    RowNumbers *const numbers = f.c.rows + lse_of(call, *seq, head) + q0 + strip(0) + row;
#pragma unroll
    for (int h = 0; h < Base::kHalves; h++) {
      rows[h] = {INFINITY, 0, {}, {}, {}};
      beyond[h / 2][2 * (h % 2)] = beyond[h / 2][2 * (h % 2) + 1] = 0;
      if (q0 + strip(0) + row + 8 * h >= seq->queries) continue;
      rows[h].lse = numbers[8 * h].lse;
      rows[h].delta = numbers[8 * h].delta;
    }
    cp_async_wait<0>();
    __syncthreads();
    for (int m = 0; m < kStrips; m++) {
      q[m].read(s.own[0] + strip(m) * S::kLine);
      dz[m].read(s.own[1] + strip(m) * S::kLine);
    }
    if (f.banded) open_band(numbers);
  }

  __device__ void open_band(RowNumbers *numbers) {
#pragma unroll 1
    for (int x = 0; x < 2 * kStrips; x++) {
      this->make_cells(x % 2, s.own[x % 2], strip(x / 2), true, cells_of(x % 2, S::kOwn));
    }
    if (f.held > 0) __syncwarp();
    else __syncthreads(); /* tiles come where the vectors were */
#pragma unroll
    for (int h = 0; h < Base::kHalves; h++) {
      if (q0 + strip(0) + row + 8 * h >= seq->queries) continue;
      RowNumbers *const own = numbers + 8 * h;
      const float *const key = cells_of(0, S::kOwn) + (strip(0) + row + 8 * h) * f.line;
      const float *const value = cells_of(1, S::kOwn) + (strip(0) + row + 8 * h) * f.line;
#pragma unroll
      for (int end = 0; end < 2; end++) {
        const int column = end == 0 ? 0 : f.columns - 1;
        rows[h].key[end] = call.scale * key[column];
        rows[h].value[end] = value[column];
      }
      if (t == 0) { /* for the pass over keys */
        own->ends[0] = {rows[h].key[0], rows[h].value[0]};
        own->ends[1] = {rows[h].key[1], rows[h].value[1]};
      }
    }
    __syncwarp(); /* close() writes where the ends were read, and there may be no tile between */
  }

  __device__ void load_tile(int stage, int j) {
    if (S::kStages == 2 && f.c.aligned) this->load_next(stage, call.k, call.v, j);
    else this->template load_keys<S::kOther>(s.other[stage][0], s.other[stage][1], j);
    if (f.biased)
      this->load_bias(s.bias[stage], j - apart - (S::kOwn - 1), S::kOwn + S::kOther - 1);
    cp_async_commit();
  }

  __device__ void walk(Sums (&dq)[kStrips]) {
    int stage = 0;
    for (int j = walk_from; j <= walk_to; j += S::kOther) {
      if (!loaded) {
        if (S::kStages == 1) __syncthreads();
        load_tile(stage, j);
      }
      cp_async_wait<0>();
      __syncthreads();
      loaded = S::kStages == 2 && j + S::kOther <= walk_to;
      if (loaded) load_tile(1 - stage, j + S::kOther);
      tile(stage, j, dq);
      if (S::kStages == 2) stage = 1 - stage;
    }
  }

  __device__ void tile(int stage, int j, Sums (&dq)[kStrips]) {
    Scores p[kStrips] = {}, ds[kStrips] = {};
    multiply_rows<S::kWidth>(p, q, s.other[stage][0]);
    multiply_rows<S::kWidth>(ds, dz, s.other[stage][1]);
    if (call.dropout.threshold) make_keep(j);
    const bool cut = this->is_cut(j);
    const int distance = j - apart - strip(0);
    const Meets meets = this->meets_band(distance - (16 * kStrips - 1), distance + S::kOther - 1);
    const bool plain = this->is_simple() && !cut && meets != MEETS_BAND;
    if (plain && meets == MEETS_NOTHING) {
      differentiate_plain<-1>(p, ds);
    } else if (plain && meets == MEETS_HEAD) {
      differentiate_plain<0>(p, ds);
    } else if (plain) {
      differentiate_plain<1>(p, ds);
    } else if (this->is_simple() && meets == MEETS_BAND) {
      differentiate_band(j, distance, cut, p, ds);
    } else {
#pragma unroll
      for (int m = 0; m < kStrips; m++) {
        differentiate(stage, m, j, distance - 16 * m, cut, p[m], ds[m]);
      }
    }
    if (distances) add_biases(j, ds);
    if (!kInTurns) add_weighted<S::kWidth>(dq, ds, s.other[stage][0], s.share[warp]);
    if (!plain || meets == MEETS_NOTHING) return;
#pragma unroll
    for (int m = 0; m < kStrips; m++) {
      add_row_sums<Operand>(beyond[m], ds[m], meets == MEETS_HEAD ? 0 : 1);
    }
  }

  /* end: of the band, that every pair lies beyond, or -1; the sums of ds there are tile's. */
  template <int end>
  __device__ void differentiate_plain(Scores (&p)[kStrips], Scores (&ds)[kStrips]) {
#pragma unroll
    for (int h = 0; h < Base::kHalves; h++) {
      Row &own = rows[h];
      const float level = end < 0 ? own.lse : own.lse - own.key[end & 1];
      const float delta = end < 0 ? own.delta : own.delta - own.value[end & 1];
#pragma unroll
      for (int x = 0; x < 2 * S::kTiles; x++) {
        float &score = p[h / 2][x / 2][h % 2 * 2 + x % 2];
        float &slope = ds[h / 2][x / 2][h % 2 * 2 + x % 2];
        const float weight = exp2_approx(at_most_zero(call.scale * score - level));
        slope = weight * (slope - delta);
        if (end >= 0) own.weights[end & 1] += weight;
      }
    }
  }

  /* Across the band, where nothing else is in the way: in few instructions, for few tiles run them.
   * Cells are read before any is written, and those of the ends stand for what lies beyond. */
  __device__ void differentiate_band(int j, int distance, bool cut, Scores (&p)[kStrips],
                                     Scores (&ds)[kStrips]) {
    constexpr int kCount = 2 * S::kTiles; /* of a row */
    const int last = f.columns - 1;
#pragma unroll
    for (int h = 0; h < Base::kHalves; h++) {
      Row &own = rows[h];
      float(&ends)[4] = beyond[h / 2];
      float *const key = cells_of(0, S::kOwn) + (strip(0) + row + 8 * h) * f.line;
      float *const value = key + S::kOwn * f.line;
      const int column = distance + t - row - 8 * h - f.low, first = h % 2 * 2;
      int at[kCount];
#pragma unroll
      for (int x = 0; x < kCount; x++) {
        float &score = p[h / 2][x / 2][first + x % 2], &dp = ds[h / 2][x / 2][first + x % 2];
        at[x] = clamped(column + x / 2 * 8 + x % 2, 0, last);
        score = call.scale * score + (call.scale * key[at[x]] - own.lse);
        dp = value[at[x]] + dp;
      }
      if (cut) {
        this->hide(sight_of(q0 + strip(h / 2) - j, seq->keys - 1 - j), h % 2, t, p[h / 2]);
      }
#pragma unroll
      for (int x = 0; x < kCount; x++) {
        float &slope = ds[h / 2][x / 2][first + x % 2];
        const float weight = exp2_approx(at_most_zero(p[h / 2][x / 2][first + x % 2]));
        slope = this->slope_of(weight, slope - own.delta);
        const bool low = at[x] == 0, high = !low && at[x] == last;
        if (low) ends[first] += slope, own.weights[0] += weight;
        if (high) ends[first + 1] += slope, own.weights[1] += weight;
        if (low || high) continue;
        key[at[x]] = slope;
        value[at[x]] = weight;
      }
    }
  }

  /* The same with biases, dropout or hidden keys. Eight keys at a time: few of those of a tile
   * cross the band. */
  __device__ void differentiate(int stage, int m, int j, int distance, bool cut, Scores &p,
                                Scores &ds) {
    Sight sight = {};
    if (cut) sight = sight_of(q0 + strip(m) - j, seq->keys - 1 - j);
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
      if (cut && (n * 8 > sight.last || n * 8 + 7 < sight.first)) {
#pragma unroll
        for (int e = 0; e < 4; e++) ds[n][e] = 0;
        continue;
      }
      differentiate_eight(stage, m, n * 8 + t, distance + n * 8, cut, sight, p[n], ds[n]);
    }
  }

  /* i: the strip's first row, and end: the last key, from the tile's first key on. */
  __device__ Sight sight_of(int i, int end) const {
    const int nearest = i + seq->nearest, farthest = i + seq->farthest;
    Sight sight = {{nearest + row, nearest + row + 8},
                   {farthest + row, farthest + row + 8},
                   nearest,
                   smaller(farthest + 15, end)};
    for (int h = 0; h < 2; h++) sight.to[h] = smaller(sight.to[h], end);
    return sight;
  }

  /* x: the thread's first column; distance: of the first pair. */
  __device__ void differentiate_eight(int stage, int m, int x, int distance, bool cut,
                                      const Sight &sight, float (&p)[4], float (&ds)[4]) {
    const int r = strip(m) + row; /* of the block */
    const Meets meets = this->meets_band(distance - 15, distance + 7);
    const int column = distance + t - row - f.low; /* of e = 0 */
    int at[4];                                     /* of a cell */
    float score[4], dp[4];
    if (meets == MEETS_BAND) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        at[e] = this->cell_at(r + e / 2 * 8, column + e % 2 - e / 2 * 8);
        score[e] = call.scale * cells_of(0, S::kOwn)[at[e]] - rows[2 * m + e / 2].lse;
        dp[e] = cells_of(1, S::kOwn)[at[e]];
      }
    } else {
      const bool tail = meets == MEETS_TAIL;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const Row &own = rows[2 * m + e / 2];
        score[e] = (tail ? own.key[1] : own.key[0]) - own.lse;
        dp[e] = tail ? own.value[1] : own.value[0];
      }
    }
    if (f.biased) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        score[e] += s.bias[stage][x + e % 2 - (r + e / 2 * 8) + S::kOwn - 1];
      }
    }
    this->make_slopes(
        x, score, dp, cut, sight, [&](int e) { return kept(m * 16 + row + e / 2 * 8, x + e % 2); },
        [&](int e) { return rows[2 * m + e / 2].delta; }, p, ds);
    if (meets == MEETS_BAND) leave_in_cells(m, column, at, p, ds);
    else if (meets != MEETS_NOTHING) add_to_end(m, meets == MEETS_TAIL, p, ds);
  }

  /* Across the band: what is between the ends is nobody else's. */
  __device__ void leave_in_cells(int m, int column, const int (&at)[4], const float (&weights)[4],
                                 const float (&ds)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      Row &own = rows[2 * m + e / 2];
      const int own_column = column + e % 2 - e / 2 * 8;
      const bool low = own_column <= 0, high = !low && own_column >= f.columns - 1;
      beyond[m][e / 2 * 2] += low ? ds[e] : 0.0f;
      beyond[m][e / 2 * 2 + 1] += high ? ds[e] : 0.0f;
      own.weights[0] += low ? weights[e] : 0.0f;
      own.weights[1] += high ? weights[e] : 0.0f;
      if (low || high) continue;
      cells_of(0, S::kOwn)[at[e]] = ds[e];
      cells_of(1, S::kOwn)[at[e]] = weights[e];
    }
  }

  __device__ void add_to_end(int m, bool tail, const float (&weights)[4], const float (&ds)[4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      Row &own = rows[2 * m + h];
      const float slope = ds[2 * h] + ds[2 * h + 1], weight = weights[2 * h] + weights[2 * h + 1];
      beyond[m][2 * h] += tail ? 0.0f : slope;
      beyond[m][2 * h + 1] += tail ? slope : 0.0f;
      own.weights[0] += tail ? 0.0f : weight;
      own.weights[1] += tail ? weight : 0.0f;
    }
  }

  /* The rows of the warp, kOther / 16 blocks each. */
  __device__ void make_keep(int j) {
    __syncwarp(); /* what was there has been read */
    for (int at = lane; at < kStrips * S::kOther; at += 32) {
      const int r = at / (S::kOther / 16), block = at % (S::kOther / 16);
      s.keep[warp][at] =
          keep_block(dropout_at(call, head), seq->ordinal, static_cast<uint32_t>(q0 + strip(0) + r),
                     static_cast<uint32_t>(j / 16 + block));
    }
    __syncwarp();
  }
  __device__ float kept(int r, int x) const {
    const auto *const bytes = reinterpret_cast<const unsigned char *>(s.keep[warp]);
    return bytes[r * S::kOther + x] >= call.dropout.threshold ? call.dropout.scale : 0.0f;
  }

  /* The cells become those of the gradient; they go to dq, and to the sums of the tables. */
  __device__ void close(Sums (&dq)[kStrips], bool first, float *lines) {
    float *const key_cells = cells_of(0, S::kOwn), *const value_cells = cells_of(1, S::kOwn);
    __syncwarp(); /* tiles have read the ends, and left zeros where pairs are hidden */
    if (!has_whole_band()) clear_cells();
#pragma unroll
    for (int h = 0; h < Base::kHalves; h++) {
      const int r = strip(0) + row + 8 * h;
      const float slopes_low = quad_sum(beyond[h / 2][2 * (h % 2)]);
      const float slopes_high = quad_sum(beyond[h / 2][2 * (h % 2) + 1]);
      const float weights_low = quad_sum(rows[h].weights[0]);
      const float weights_high = quad_sum(rows[h].weights[1]);
      if (t == 0) {
        const bool one = f.columns == 1; /* both ends are the same relation */
        key_cells[r * f.line] = one ? slopes_low + slopes_high : slopes_low;
        value_cells[r * f.line] = one ? weights_low + weights_high : weights_low;
        if (!one) {
          key_cells[r * f.line + f.columns - 1] = slopes_high;
          value_cells[r * f.line + f.columns - 1] = weights_high;
        }
      }
    }
    __syncwarp();
    if (call.key.count) add_vectors(dq);
    if (!lines) return;
    __syncthreads();
    const int groups = (f.columns + 15) / 16, both = call.value.count ? 2 * groups : groups;
#pragma unroll 1
    for (int group = call.key.count ? warp : groups + warp; group < both; group += S::kWarps) {
      const int which = group < groups ? 0 : 1;
      add_lines((group - which * groups) * 16, cells_of(which, S::kOwn), s.own[which],
                which == 0 ? call.D : call.Dv, first, lines + which * f.value_offset);
    }
  }

  /* Those of no pair. */
  __device__ void clear_cells() {
#pragma unroll 1
    for (int r = strip(0) + row; r < strip(kStrips); r += 8) {
      for (int column = 1 + t / 2; column < f.columns - 1; column += 4) {
        const int j = q0 + r + seq->start + f.low + column;
        if (q0 + r < seq->queries && j >= 0 && in_sight(*seq, q0 + r, j)) continue;
        cells_of(0, S::kOwn)[r * f.line + column] = cells_of(1, S::kOwn)[r * f.line + column] = 0;
      }
    }
  }

  /* Is there a pair in sight for every cell between the ends? */
  __device__ bool has_whole_band() const {
    const int i = q0 + strip(0), end = i + kStrips * 16 - 1;
    const int nearest = seq->start + f.low + 1, farthest = seq->start + f.high - 1; /* of j - i */
    return end < seq->queries && i + nearest >= 0 && end + farthest < seq->keys &&
           nearest >= seq->nearest && farthest <= seq->farthest;
  }

  /* dq += the gradient's cells . vectors */
  __device__ void add_vectors(Sums (&dq)[kStrips]) {
    const float *const own = cells_of(0, S::kOwn) + (strip(0) + row) * f.line;
#pragma unroll 1
    for (int begin = 0; begin < f.columns; begin += S::kOther) {
      const auto *const right = this->vectors(0, begin);
#pragma unroll 1
      for (int x = 0; x < this->vector_count(begin); x += 16) {
        float w[kStrips][2][4];
#pragma unroll
        for (int at = 0; at < kStrips * 8; at++) {
          const int m = at / 8, n = at / 4 % 2, e = at % 4;
          const int column = begin + x + n * 8 + t + e % 2;
          w[m][n][e] = column < f.columns ? own[(m * 16 + e / 2 * 8) * f.line + column] : 0.0f;
        }
        add_weighted<S::kWidth>(dq, w, right + x * S::kLine, s.share[warp]);
      }
    }
  }

  /* lines[column][c] = sum over the rows of cells[row][column] x[row][c], or added to them, for
   * sixteen columns. */
  __device__ void add_lines(int begin, const float *from_cells, const typename S::Operand *x,
                            int width, bool first, float *lines) {
    Sums sums = {};
    if (!first) move_lines<false>(begin, lines, width, sums);
#pragma unroll 1
    for (int done = 0; done < S::kOwn; done += S::kOther) {
      Scores w;
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int column = begin + row + e / 2 * 8, r = done + n * 8 + t + e % 2;
          w[n][e] = column < f.columns ? from_cells[r * f.line + column] : 0.0f;
        }
      }
      add_weighted<S::kWidth>(sums, w, x + done * S::kLine, s.share[warp]);
    }
    move_lines<true>(begin, lines, width, sums);
  }

  /* Sums of sixteen lines, two numbers at once where they lie so: they go there, or come from
   * there.
   */
  template <bool go>
  __device__ void move_lines(int begin, float *lines, int width, Sums &sums) {
    const bool paired = width % 2 == 0 && reinterpret_cast<uintptr_t>(lines) % 8 == 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int column = begin + row + 8 * h;
      if (column >= f.columns) continue;
      float *const line = lines + int64_t{column} * width;
#pragma unroll
      for (int n = 0; n < S::kOut; n++) {
        const int c = n * 8 + t;
        float &x = sums[n][2 * h], &y = sums[n][2 * h + 1];
        if (paired && c < width) {
          float2 &pair = *reinterpret_cast<float2 *>(line + c);
          if (go) pair = make_float2(x, y);
          else x = pair.x, y = pair.y;
        } else if (!paired) {
          if (c < width) go ? line[c] = x : x = line[c];
          if (c + 1 < width) go ? line[c + 1] = y : y = line[c + 1];
        }
      }
    }
  }

  /* ds of a tile by distance, for the gradients of biases: a thread has a diagonal. Diagonals
   * beyond the band are one relation, and one thread's. */
  __device__ void add_biases(int j, const Scores (&ds)[kStrips]) {
    constexpr int kDiagonals = S::kOwn + S::kOther - 1, kRow = S::kOther + 1;
    const Band &band = call.bias;
    const int nearest = j - apart - (S::kOwn - 1), farthest = nearest + kDiagonals - 1;
    if (farthest <= band.low || nearest >= band.high) {
      float sum = 0;
#pragma unroll
      for (int m = 0; m < kStrips; m++) {
#pragma unroll
        for (int n = 0; n < S::kTiles; n++) {
          sum += ds[m][n][0] + ds[m][n][1] + (ds[m][n][2] + ds[m][n][3]);
        }
      }
      bias_low += farthest <= band.low ? sum : 0.0f;
      bias_high += farthest <= band.low ? 0.0f : sum;
      return;
    }
#pragma unroll
    for (int m = 0; m < kStrips; m++) {
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          slopes[(strip(m) + row + e / 2 * 8) * kRow + n * 8 + t + e % 2] = ds[m][n][e];
        }
      }
    }
    __syncthreads();
    float *const sums = slopes + S::kOwn * kRow;
    for (int x = static_cast<int>(threadIdx.x); x < kDiagonals; x += S::kThreads) {
      const int d = nearest + x;
      float sum = 0;
      for (int r = 0; r < S::kOwn; r++) {
        const int column = x - (S::kOwn - 1) + r;
        if (column >= 0 && column < S::kOther) sum += slopes[r * kRow + column];
      }
      sums[x] = sum;
      if (d > band.low && d < band.high) distances[d - band.low] += sum;
    }
    if (nearest > band.low && farthest < band.high) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int y = 0; y < kDiagonals; y++) {
      bias_low += nearest + y <= band.low ? sums[y] : 0.0f;
      bias_high += nearest + y > band.low && nearest + y >= band.high ? sums[y] : 0.0f;
    }
  }

  __device__ void add_bias_ends() {
    const float low = sum_of_lanes(bias_low), high = sum_of_lanes(bias_high);
    __syncthreads();
    if (lane == 0) {
      slopes[2 * warp] = low;
      slopes[2 * warp + 1] = high;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    float sum_low = 0, sum_high = 0;
    for (int x = 0; x < S::kWarps; x++) {
      sum_low += slopes[2 * x];
      sum_high += slopes[2 * x + 1];
    }
    distances[0] += sum_low;
    distances[f.bias_columns - 1] += sum_high;
  }

  __device__ void write(const Sums (&dq)[kStrips]) {
    Storage *const first = row_of<Storage>(f.c.dq, seq->query_batch, head, seq->query_row);
#pragma unroll
    for (int m = 0; m < kStrips; m++) {
      this->put_rows(first, f.c.dq.row_stride, q0 + strip(m), seq->queries, seq->query_rows, call.D,
                     f.c.scale, dq[m]);
    }
  }

  /* In turns: for the blocks of keys. */
  __device__ void leave(int sequence, const Sums (&dq)[kStrips]) {
    const int i = q0 + strip(0);
    if (i >= seq->queries) return;
    const int64_t tile = turn_tile(f.turns, *seq, sequence, head) + i / kTurnRows;
    float *const to = f.turns.partial + tile * kTurnNumbers + lane * 4;
#pragma unroll
    for (int x = 0; x < kStrips * S::kOut; x++) {
      const int m = x / S::kOut, n = x % S::kOut;
      *reinterpret_cast<float4 *>(to + ((n / 2 * kStrips + m) * 2 + n % 2) * 128) =
          make_float4(dq[m][n][0], dq[m][n][1], dq[m][n][2], dq[m][n][3]);
    }
    float *const to_ends = f.turns.ends + tile * kTurnEnds;
    for (int x = lane; x < kTurnEnds; x += 32) to_ends[x] = 0;
  }

  float *const slopes; /* with biases: ds [kOwn][kOther + 1], then of every diagonal its sum */
  Left q[kStrips];
  LeftAgain dz[kStrips];
  Row rows[Base::kHalves];  /* 2 m + h: strip m, row + 8 h */
  float beyond[kStrips][4]; /* of strip m sums of ds beyond the ends, 2 h + end: see add_row_sums */
  int q0, apart;            /* j - apart: the distance from the block's first query to key j */
  bool loaded;              /* the tile that is next */
  bool held = false;        /* are vectors of the band there? Tiles of padding do without */
  float *distances;         /* of the block's lines: sums of ds by distance, or NULL */
  float bias_low, bias_high;
};

}  // namespace rpc

#endif
