/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_keys.h: a block of keys of the fast path of attention's backward: dk and dv.
 */
#ifndef RPC_BACKWARD_KEYS_H
#define RPC_BACKWARD_KEYS_H

#include "backward_band.h"

namespace rpc {

template <class S>
class KeyBlock : BandBlock<S> {
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
  using Base::uncut_from;
  using Base::uncut_to;
  using Base::walk_from;
  using Base::walk_to;
  using Base::warp;
  using typename Base::Left;
  using typename Base::LeftAgain;
  using typename Base::Scores;
  using typename Base::Storage;
  using typename Base::Sums;
  static constexpr int kStrips = S::kStrips;

 public:
  __device__ KeyBlock(const BandBackward &backward, int the_head)
      : Base(backward, the_head, true) {}

  __device__ void run(const Tile &tile) {
    seq = call.sequences + tile.sequence;
    k0 = tile.row;
    Sums dk[kStrips] = {}, dv[kStrips] = {};
    if (k0 < seq->keys) {
      this->template load_keys<S::kOwn>(s.own[0], s.own[1], k0);
      if (f.held > 0) this->load_held();
      cp_async_commit();
      find_queries();
      if (walk_from <= walk_to) load_tile(0, walk_from);
      cp_async_wait<0>();
      __syncthreads();
      for (int m = 0; m < kStrips; m++) {
        k[m].read(s.own[0] + strip(m) * S::kLine);
        v[m].read(s.own[1] + strip(m) * S::kLine);
      }
      walk(dk, dv);
    }
    write(f.c.dk, call.D, f.c.scale, dk);
    write(f.c.dv, call.Dv, 1, dv);
  }

 private:
  __device__ void load_tile(int stage, int i) {
    if (S::kStages == 2 && f.c.aligned) this->load_next(stage, call.q, f.c.dout, i);
    else this->template load_queries<S::kOther>(s.other[stage][0], s.other[stage][1], i);
    constexpr int kParts = sizeof(RowNumbers) / 16; /* rows of no query may be all 0 */
    for (int x = static_cast<int>(threadIdx.x); x < kParts * S::kOther; x += S::kThreads) {
      cp_async16(reinterpret_cast<float4 *>(s.rows[stage]) + x,
                 reinterpret_cast<const float4 *>(numbers + i) + x, i + x / kParts <= walk_to);
    }
    if (f.biased)
      this->load_bias(s.bias[stage], apart - i - (S::kOther - 1), S::kOwn + S::kOther - 1);
    cp_async_commit();
  }

  /* Those that see some of the block's keys. */
  __device__ void find_queries() {
    const int keys_end = smaller(k0 + S::kOwn, seq->keys);
    const int farthest = k0 - seq->farthest;
    walk_from = farthest > 0 ? farthest / S::kOther * S::kOther : 0;
    walk_to = smaller(keys_end - 1 - seq->nearest, seq->queries - 1);
    const int j = k0 + strip(0), end = j + 16 * kStrips - 1;
    uncut_from = end < seq->keys ? end - seq->farthest : walk_to + 1;
    uncut_to = j - seq->nearest - (S::kOther - 1);
    apart = k0 - seq->start;
    this->begin_walk(call.q, f.c.dout, seq->query_batch, seq->query_row);
    numbers = f.c.rows + lse_of(call, *seq, head);
  }

  __device__ void walk(Sums (&dk)[kStrips], Sums (&dv)[kStrips]) {
    int stage = 0;
    for (int i = walk_from; i <= walk_to; i += S::kOther) {
      if (S::kStages == 1 && i > walk_from) {
        __syncthreads();
        load_tile(0, i);
      }
      cp_async_wait<0>();
      __syncthreads();
      if (S::kStages == 2 && i + S::kOther <= walk_to) load_tile(1 - stage, i + S::kOther);
      tile(stage, i, dk, dv);
      if (S::kStages == 2) stage = 1 - stage;
    }
  }

  __device__ void tile(int stage, int i, Sums (&dk)[kStrips], Sums (&dv)[kStrips]) {
    const int distance = apart - i;
    if (this->meets_band(distance - (S::kOther - 1), distance + S::kOwn - 1) == MEETS_BAND) {
      find_cells(stage);
      __syncthreads();
    }
    Scores p[kStrips] = {}, ds[kStrips] = {};
    multiply_rows<S::kWidth>(p, k, s.other[stage][0]);
    multiply_rows<S::kWidth>(ds, v, s.other[stage][1]);
    if (call.dropout.threshold) make_keep(i);
    const bool cut = this->is_cut(i);
    const int own = distance + strip(0);
    const Meets meets = this->meets_band(own - (S::kOther - 1), own + 16 * kStrips - 1);
    if (!this->is_simple() || (cut && meets != MEETS_BAND)) {
#pragma unroll
      for (int m = 0; m < kStrips; m++) {
        differentiate(stage, m, i, own + 16 * m, cut, p[m], ds[m]);
      }
    } else if (meets == MEETS_BAND) {
      differentiate_band(stage, i, own, cut, p, ds);
    } else if (meets == MEETS_NOTHING) {
      differentiate_plain<false>(stage, false, p, ds);
    } else {
      differentiate_plain<true>(stage, meets == MEETS_TAIL, p, ds);
    }
    add_weighted<S::kWidth>(dv, p, s.other[stage][1], s.share[warp]);
    add_weighted<S::kWidth>(dk, ds, s.other[stage][0], s.share[warp]);
  }

  /* Of the tile's queries. */
  __device__ void find_cells(int stage) {
#pragma unroll 1
    for (int which = 0; which < 2; which++) { /* not by the same warps, where these are more */
      const int begin = (warp + which * S::kWarps / 2) % S::kWarps * 16;
      this->make_cells(which, s.other[stage][which], begin, begin < S::kOther,
                       cells_of(which, S::kOther));
    }
  }

  template <bool banded>
  __device__ void differentiate_plain(int stage, bool tail, Scores (&p)[kStrips],
                                      Scores (&ds)[kStrips]) {
#pragma unroll
    for (int x = 0; x < 2 * S::kTiles; x++) {
      const int n = x / 2, e = x % 2;
      const RowNumbers &own = s.rows[stage][n * 8 + t + e];
      const float level = banded ? own.lse - own.ends[tail].key : own.lse;
      const float delta = banded ? own.delta - own.ends[tail].value : own.delta;
#pragma unroll
      for (int h = 0; h < Base::kHalves; h++) {
        float &weight = p[h / 2][n][e + h % 2 * 2], &slope = ds[h / 2][n][e + h % 2 * 2];
        weight = exp2_approx(at_most_zero(call.scale * weight - level));
        slope = weight * (slope - delta);
      }
    }
  }

  __device__ void differentiate_band(int stage, int i, int distance, bool cut, Scores (&p)[kStrips],
                                     Scores (&ds)[kStrips]) {
#pragma unroll
    for (int x = 0; x < 2 * S::kTiles; x++) {
      const int n = x / 2, e = x % 2, own = n * 8 + t + e;
      const float *const key = cells_of(0, S::kOther) + own * f.line;
      const float *const value = key + S::kOther * f.line;
      const float level = s.rows[stage][own].lse, delta = s.rows[stage][own].delta;
#pragma unroll
      for (int h = 0; h < Base::kHalves; h++) {
        const int at = clamped(distance + row + 8 * h - own - f.low, 0, f.columns - 1);
        float &score = p[h / 2][n][e + h % 2 * 2], &dp = ds[h / 2][n][e + h % 2 * 2];
        score = call.scale * score + (call.scale * key[at] - level);
        dp = value[at] + dp - delta;
      }
    }
    if (cut) {
#pragma unroll
      for (int h = 0; h < Base::kHalves; h++) {
        const int j = k0 + strip(h / 2);
        this->hide(sight_of(j - i, seq->keys - j), h % 2, t, p[h / 2]);
      }
    }
#pragma unroll
    for (int x = 0; x < 4 * S::kTiles * kStrips; x++) {
      float &weight = p[x / 4 % kStrips][x / 4 / kStrips][x % 4];
      float &slope = ds[x / 4 % kStrips][x / 4 / kStrips][x % 4];
      weight = exp2_approx(at_most_zero(weight));
      slope = this->slope_of(weight, slope);
    }
  }

  /* As in QueryBlock, eight queries at a time. */
  __device__ void differentiate(int stage, int m, int i, int distance, bool cut, Scores &p,
                                Scores &ds) {
    Sight sight = {};
    if (cut) sight = sight_of(k0 + strip(m) - i, seq->keys - k0 - strip(m));
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
      if (cut && (n * 8 > sight.last || n * 8 + 7 < sight.first)) {
#pragma unroll
        for (int e = 0; e < 4; e++) p[n][e] = ds[n][e] = 0;
        continue;
      }
      differentiate_eight(stage, m, n * 8 + t, distance - n * 8, cut, sight, p[n], ds[n]);
    }
  }

  /* j: the strip's first key, from the tile's first query on; count: keys there are from it on. */
  __device__ Sight sight_of(int j, int count) const {
    const int nearest = j - seq->farthest, farthest = j - seq->nearest;
    Sight sight = {{nearest + row, nearest + row + 8},
                   {farthest + row, farthest + row + 8},
                   nearest,
                   count > 0 ? farthest + 15 : -1};
    for (int h = 0; h < 2; h++) sight.to[h] = row + 8 * h < count ? sight.to[h] : -1;
    return sight;
  }

  __device__ void differentiate_eight(int stage, int m, int x, int distance, bool cut,
                                      const Sight &sight, float (&p)[4], float (&ds)[4]) {
    const RowNumbers *const rows = s.rows[stage] + x; /* of e = 0 and 1 */
    const Meets meets = this->meets_band(distance - 7, distance + 15);
    float score[4], dp[4];
    if (meets == MEETS_BAND) {
      const int column = distance + row - t - f.low; /* of e = 0 */
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int at = this->cell_at(x + e % 2, column - e % 2 + e / 2 * 8);
        score[e] = call.scale * cells_of(0, S::kOther)[at] - rows[e % 2].lse;
        dp[e] = cells_of(1, S::kOther)[at];
      }
    } else {
      const bool beyond = meets != MEETS_NOTHING, tail = meets == MEETS_TAIL;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        score[e] = (beyond ? rows[e % 2].ends[tail].key : 0.0f) - rows[e % 2].lse;
        dp[e] = beyond ? rows[e % 2].ends[tail].value : 0.0f;
      }
    }
    if (f.biased) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        score[e] += s.bias[stage][strip(m) + row + e / 2 * 8 - (x + e % 2) + S::kOther - 1];
      }
    }
    this->make_slopes(
        x, score, dp, cut, sight, [&](int e) { return kept(m, row + e / 2 * 8, x + e % 2); },
        [&](int e) { return rows[e % 2].delta; }, p, ds);
  }

  /* A block of a strip's sixteen keys for every query. */
  __device__ void make_keep(int i) {
    __syncwarp();
    for (int at = lane; at < kStrips * S::kOther; at += 32) {
      s.keep[warp][at] = keep_block(dropout_at(call, head), seq->ordinal,
                                    static_cast<uint32_t>(i + at % S::kOther),
                                    static_cast<uint32_t>((k0 + strip(at / S::kOther)) / 16));
    }
    __syncwarp();
  }
  __device__ float kept(int m, int r, int x) const {
    const auto *const bytes = reinterpret_cast<const unsigned char *>(s.keep[warp]);
    return bytes[(m * S::kOther + x) * 16 + r] >= call.dropout.threshold ? call.dropout.scale
                                                                         : 0.0f;
  }

  __device__ void write(const rp_rows_out &to, int width, float factor,
                        const Sums (&sums)[kStrips]) {
    Storage *const first = row_of<Storage>(to, seq->key_batch, head, seq->key_row);
#pragma unroll
    for (int m = 0; m < kStrips; m++) {
      this->put_rows(first, to.row_stride, k0 + strip(m), seq->keys, seq->key_rows, width, factor,
                     sums[m]);
    }
  }

  const RowNumbers *numbers; /* of the sequence */
  Left k[kStrips];
  LeftAgain v[kStrips];
  int k0, apart; /* apart - i: the distance from query i to the block's first key */
};

}  // namespace rpc

#endif
