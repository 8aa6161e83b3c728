/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_keys.h: a block of keys of the fast path of attention's backward: dk and dv, and, by
 * turns, dq (backward_turns.h).
 */
#ifndef RPC_BACKWARD_KEYS_H
#define RPC_BACKWARD_KEYS_H

#include "backward_band.h"

namespace rpc {

template <class S, bool kInTurns = false>
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
  static_assert(!kInTurns || (S::kOwn == kTurnOwn && S::kOther == kTurnRows && S::kStages == 2 &&
                              S::kWidth == kTurnWidth && S::kWarps == kTurnWarps));

 public:
  __device__ KeyBlock(const BandBackward &backward, int the_head)
      : Base(backward, the_head, true, kInTurns ? int{sizeof(TurnShared)} : 0) {}

  /* lines: of the block's warps, in turns; or NULL */
  __device__ void run(const Tile &tile, float *lines = nullptr) {
    seq = call.sequences + tile.sequence;
    k0 = tile.row;
    Sums dk[kStrips] = {}, dv[kStrips] = {};
    if constexpr (kInTurns) begin_turns(tile.sequence, lines);
    if (k0 < seq->keys) {
      this->template load_keys<S::kOwn>(s.own[0], s.own[1], k0);
      if (f.held > 0) this->load_held();
      cp_async_commit();
      find_queries();
      if (walk_from <= walk_to) load_tile(0, first_tile());
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
    if (S::kStages == 2 && f.c.aligned) load_next_tile(stage, i);
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

  __device__ void load_next_tile(int stage, int i) {
    this->load_next(stage, call.q, f.c.dout, i);
    if (kInTurns) this->turn_back(call.q, f.c.dout);
  }

  /* In turns from the last to the first. */
  __device__ int first_tile() const {
    return kInTurns ? walk_to & -S::kOther : walk_from; /* of no queries before the first */
  }
  __device__ int tile_after(int i) const { return kInTurns ? i - S::kOther : i + S::kOther; }
  __device__ bool is_walked(int i) const { return kInTurns ? i >= walk_from : i <= walk_to; }

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
    this->begin_walk(call.q, f.c.dout, seq->query_batch, head, seq->query_row + first_tile());
    numbers = f.c.rows + lse_of(call, *seq, head);
  }

  __device__ void walk(Sums (&dk)[kStrips], Sums (&dv)[kStrips]) {
    int stage = 0;
    for (int i = first_tile(); is_walked(i); i = tile_after(i)) {
      if (S::kStages == 1 && i > walk_from) {
        __syncthreads();
        load_tile(0, i);
      }
      cp_async_wait<0>();
      __syncthreads();
      if (S::kStages == 2 && is_walked(tile_after(i))) load_tile(1 - stage, tile_after(i));
      tile(stage, i, dk, dv);
      if (S::kStages == 2) stage = 1 - stage;
    }
    if constexpr (kInTurns) {
      __syncthreads(); /* slopes have been read, and all is added */
      pass_on();
      come_to(MEETS_NOTHING, dk, dv);
    }
  }

  __device__ void tile(int stage, int i, Sums (&dk)[kStrips], Sums (&dv)[kStrips]) {
    const int distance = apart - i;
    if constexpr (kInTurns) come_to(side_of(i), dk, dv);
    if (this->meets_band(distance - (S::kOther - 1), distance + S::kOwn - 1) == MEETS_BAND) {
      find_cells(stage);
      __syncthreads();
    }
    Scores p[kStrips] = {}, ds[kStrips] = {};
    multiply_rows<S::kWidth>(p, k, s.other[stage][0]);
    multiply_rows<S::kWidth>(ds, v, s.other[stage][1]);
    if constexpr (kInTurns) pass_on();
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
    if constexpr (kInTurns) leave_slopes(ds);
    add_weighted<S::kWidth>(dv, p, s.other[stage][1], s.share[warp]);
    add_weighted<S::kWidth>(dk, ds, s.other[stage][0], s.share[warp]);
    if constexpr (kInTurns) {
      const Turn turn = turn_at(i);
      __syncthreads();
      add_queries(i, turn);
    }
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

  /* ---- in turns ---- */

  static __device__ TurnShared &shared() {
    return *reinterpret_cast<TurnShared *>(dynamic_smem() + sizeof(BandShared<S>));
  }

  __device__ void begin_turns(int sequence, float *lines) {
    if (lane == 0) shared().side[warp] = MEETS_NOTHING;
    if (threadIdx.x == 0) {
      shared().turn = nullptr;
      shared().lines = lines;
      shared().tiles = turn_tile(f.turns, *seq, sequence, head);
      shared().sequence = *seq;
    }
    if (!lines) return;
    for (int x = static_cast<int>(threadIdx.x); x < kTurnWarps * kEndNumbers; x += S::kThreads) {
      lines[x] = 0;
    }
  }

  /* Where the warp's keys lie for all queries of the block that query i is one of. What crosses the
   * band there is that block's. */
  __device__ Meets side_of(int i) const {
    if (!f.banded) return MEETS_NOTHING;
    const Across across = across_band(f.low, f.high, i / kTurnOwn * kTurnOwn + k0 - apart);
    const int j = k0 + strip(0);
    return j < across.first ? MEETS_HEAD : j > across.last ? MEETS_TAIL : MEETS_BAND;
  }

  /* Before the products of a tile, and behind the last one: what was added beyond an end goes to
   * its line. */
  __device__ void come_to(Meets now, const Sums (&dk)[kStrips], const Sums (&dv)[kStrips]) {
    const int side = shared().side[warp];
    if (now == side) return;
    const bool leaves_head = side == MEETS_HEAD, leaves_tail = side == MEETS_TAIL;
    __syncwarp();
    if (lane == 0) shared().side[warp] = now;
    if (!shared().lines || !(leaves_head || leaves_tail || now == MEETS_TAIL)) return;
    for (int which = 0; which < 2; which++) {
      const float2 sum = which == 0 ? sum_columns(dk) : sum_columns(dv);
      float *const own = shared().lines + warp * kEndNumbers + which * kTurnWidth;
      float2 *const line = reinterpret_cast<float2 *>(own) + lane;
      if (leaves_head) line[0] = sum;
      if (now == MEETS_TAIL) line[kTurnWidth] = make_float2(-sum.x, -sum.y);
      if (leaves_tail)
        line[kTurnWidth] = make_float2(line[kTurnWidth].x + sum.x, line[kTurnWidth].y + sum.y);
    }
  }
  /* Of columns 2 lane and 2 lane + 1, over the warp's keys: where their slopes come afterwards. */
  __device__ float2 sum_columns(const Sums (&sums)[kStrips]) const {
    constexpr int kLine = kTurnWidth + 8;
    static_assert(8 * kLine * sizeof(float) <= 16 * kStrips * kSlopeLine * sizeof(bf16));
    float *const own = reinterpret_cast<float *>(shared().slopes + strip(0) * kSlopeLine);
#pragma unroll
    for (int n = 0; n < S::kOut; n++) {
      float two[2] = {};
#pragma unroll
      for (int x = 0; x < 2 * Base::kHalves; x++) two[x % 2] += sums[x / 4][n][x % 4];
      put_pair(own + row * kLine + n * 8 + t, two[0], two[1]);
    }
    __syncwarp();
    float2 sum = make_float2(0, 0);
    for (int r = 0; r < 8; r++) {
      const float2 &two = *reinterpret_cast<const float2 *>(own + r * kLine + 2 * lane);
      sum.x += two.x;
      sum.y += two.y;
    }
    __syncwarp(); /* something else comes there */
    return sum;
  }

  /* For all warps, as operands: of each key those of the tile's queries; and beyond the band of
   * every query their sum over the warp's keys. */
  __device__ void leave_slopes(const Scores (&ds)[kStrips]) {
#pragma unroll
    for (int h = 0; h < Base::kHalves; h++) {
      bf16 *const own = shared().slopes + (strip(0) + row + 8 * h) * kSlopeLine + t;
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
        put_pair(own + n * 8, ds[h / 2][n][h % 2 * 2], ds[h / 2][n][h % 2 * 2 + 1]);
      }
    }
    if (!f.banded) return;
    __syncwarp();
    const int side = shared().side[warp];
    float sums[2][4] = {}; /* of 16 queries: in column `end` */
    if (side == MEETS_HEAD || side == MEETS_TAIL) {
      const uint32_t ones = lane / 4 == (side == MEETS_TAIL) ? 0x3f803f80u : 0u;
#pragma unroll
      for (int x = 0; x < 4; x++) {
        uint32_t a[4];
        read_slopes(a, 2 * warp + x / 2, x % 2);
        mma_bf16(sums[x % 2], a, {ones, ones});
      }
    }
    if (t != 0) return;
#pragma unroll
    for (int end = 0; end < 2; end++) {
      *reinterpret_cast<float4 *>(shared().sums[warp] + (end * 8 + row) * 4) =
          make_float4(sums[0][end], sums[0][2 + end], sums[1][end], sums[1][2 + end]);
    }
  }

  /* Sixteen queries by sixteen keys. */
  __device__ void read_slopes(uint32_t (&a)[4], int keys, int queries) const {
    const int matrix = lane / 8;
    ldmatrix_x4_trans(a, shared().slopes + (keys * 16 + matrix / 2 * 8 + lane % 8) * kSlopeLine +
                             queries * 16 + matrix % 2 * 8);
  }

  /* Whose turn it is at a tile: asked for before the product of dq, wanted behind it. */
  struct Turn {
    int32_t *at;
    int32_t own, now;
    bool is_last;
  };
  __device__ Turn turn_at(int i) const {
    const Walkers walkers = walkers_of(shared().sequence, i);
    const int block = k0 / kTurnOwn;
    Turn turn = {f.turns.turns + shared().tiles + i / kTurnRows, block - walkers.first, 0,
                 block == walkers.last};
    turn.now = look_at_turn(turn.at);
    return turn;
  }

  /* The turn at the tile before. There has been a barrier since all warps have added theirs, which
   * has had time to arrive. */
  __device__ void pass_on() {
    if (threadIdx.x != 0 || !shared().turn) return;
    pass_turn(shared().turn, shared().next);
    shared().turn = nullptr;
  }

  /* The block's share of dq, of which a warp has sixteen columns. */
  __device__ void add_queries(int i, const Turn &turn) {
    float dq[2][2][4] = {};
    const int matrix = lane / 8;
    const auto *const keys =
        s.own[0] + (matrix % 2 * 8 + lane % 8) * S::kLine + warp * 16 + matrix / 2 * 8;
#pragma unroll
    for (int step = 0; step < kTurnOwn / 16; step++) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, keys + step * 16 * S::kLine);
#pragma unroll
      for (int m = 0; m < 2; m++) {
        uint32_t a[4];
        read_slopes(a, step, m);
        mma_bf16(dq[m][0], a, {b[0], b[1]});
        mma_bf16(dq[m][1], a, {b[2], b[3]});
      }
    }
    const int64_t tile = shared().tiles + i / kTurnRows;
    float *const to = f.turns.partial + tile * kTurnNumbers + warp * 512 + lane * 4;
    float *const to_ends = f.turns.ends + tile * kTurnEnds;
    const bool others = turn.own > 0 || f.banded; /* has anybody left a part of it? */
    await_turn(turn.at, turn.own, turn.now); /* by all lanes: by one it took nvcc more registers */
    if (turn.is_last) read_after_turn();
    __syncwarp();
    if (turn.is_last) return finish(i, others, to, to_ends, dq);
#pragma unroll
    for (int x = 0; x < 4; x++) {
      if (others) add_four(to + x * 128, dq[x / 2][x % 2]);
      else put_four(to + x * 128, dq[x / 2][x % 2]);
    }
    if (f.banded && lane < 4) { /* a warp adds four of sixteen times four sums */
      float sums[4];
      sum_ends(sums, warp * 4 + lane);
      add_four(to_ends + (warp * 4 + lane) * 4, sums);
    }
    if (threadIdx.x == 0) {
      shared().turn = turn.at;
      shared().next = turn.own + 1;
    }
  }

  /* x: which of [end][row % 8]: over all warps. */
  __device__ void sum_ends(float (&sums)[4], int x) const {
    for (int y = 0; y < 4; y++) {
      sums[y] = 0;
      for (int w = 0; w < kTurnWarps; w++) sums[y] += shared().sums[w][x * 4 + y];
    }
  }

  /* Writes dq. */
  __device__ void finish(int i, bool others, const float *from, const float *from_ends,
                         float (&dq)[2][2][4]) {
#pragma unroll
    for (int x = 0; others && x < 4; x++) {
      float part[4];
      get_four(part, from + x * 128);
#pragma unroll
      for (int e = 0; e < 4; e++) dq[x / 2][x % 2][e] += part[e];
    }
#pragma unroll 1
    for (int end = 0; f.banded && end < 2; end++) {
      float before[4], sums[4];
      get_four(before, from_ends + (end * 8 + row) * 4);
      sum_ends(sums, end * 8 + row);
      const auto *const vector =
          this->vectors_from(0, end == 0 ? 0 : f.columns - 1) + warp * 16 + t;
#pragma unroll
      for (int x = 0; x < 16; x++) {
        const int m = x / 8, n = x / 4 % 2, e = x % 4;
        dq[m][n][e] +=
            (before[2 * m + e / 2] + sums[2 * m + e / 2]) * number_of(vector[n * 8 + e % 2]);
      }
    }
    Storage *const first = row_of<Storage>(f.c.dq, seq->query_batch, head, seq->query_row);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      this->put_rows(first, f.c.dq.row_stride, i + 16 * m, seq->queries, seq->query_rows, call.D,
                     f.c.scale, dq[m], warp * 16);
    }
  }

  const RowNumbers *numbers; /* of the sequence */
  Left k[kStrips];
  LeftAgain v[kStrips];
  int k0, apart; /* apart - i: the distance from query i to the block's first key */
};

}  // namespace rpc

#endif
