/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_backward_single.cu: attention's backward where every sequence is one tile: 32 queries
 * and keys at most, operands bf16.
 *
 * A block takes one sequence of a head after the other, and does all of it: s and dp are made once,
 * in the registers of two warps that have 16 queries each, and so is delta,
 *
 *   delta_i = sum_j p~_ij dp_ij
 *
 * p~ and ds go through shared memory to be the left side of the products that sum over queries.
 * Cells (backward_band.h) become operands where they lie, and warp 0 sums the table of keys in its
 * registers, warp 1 that of values, until the block's last sequence.
 */
#include "backward_single.h"

namespace rpc {
namespace {

constexpr int kRows = kSingleRows, kGroups = kSingleColumns / 16;
constexpr int kShare = kRows + 8; /* of p~ and ds in shared memory: rows in different banks */

/* a: A[m][k] = left[k * line + m]. */
__device__ inline void read_transposed(uint32_t (&a)[4], const bf16 *left, int line) {
  const int lane = lane_of(), matrix = lane / 8;
  ldmatrix_x4_trans(a, left + (matrix / 2 * 8 + lane % 8) * line + matrix % 2 * 8);
}

/* out += a . right[16][kSingleWidth] */
__device__ inline void add_step(float (&out)[kSingleWidth / 8][4], const uint32_t (&a)[4],
                                const bf16 *right) {
  const int lane = lane_of(), matrix = lane / 8;
#pragma unroll
  for (int n = 0; n < kSingleWidth / 8; n += 2) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, right + (matrix % 2 * 8 + lane % 8) * row_stride<bf16, kSingleWidth> +
                             (n + matrix / 2) * 8);
    mma_bf16(out[n], a, {b[0], b[1]});
    mma_bf16(out[n + 1], a, {b[2], b[3]});
  }
}

template <class StorageType, bool kIsBanded>
struct SingleShape : BandShape<bf16, StorageType, kSingleWidth, kSingleRows> {
  static constexpr bool kBanded = kIsBanded;
};

template <class S>
class SingleBlock : BandBlock<S> {
  using Base = BandBlock<S>;
  using Base::call;
  using Base::cells_of;
  using Base::f;
  using Base::head;
  using Base::lane;
  using Base::row;
  using Base::s;
  using Base::seq;
  using Base::t;
  using Base::table;
  using Base::warp;
  using typename Base::Left;
  using typename Base::Scores;
  using typename Base::Storage;
  using typename Base::Sums;
  static constexpr int kDiagonals = 2 * kRows - 1, kSlope = kRows + 1;

 public:
  __device__ SingleBlock(const BandBackward &backward, int the_head, int block)
      : Base(backward, the_head, false),
        own(block),
        shared(reinterpret_cast<bf16 *>(this->cells + 2 * kRows * backward.line)),
        first(warp_of() * 16) {}

  __device__ void run() {
    const bool biases = f.lines && f.bias_columns > 0;
    for (int x = static_cast<int>(threadIdx.x); biases && x < f.bias_columns; x += S::kThreads) {
      distances()[x] = 0;
    }
    if (S::kBanded) this->load_held();
    Sums sums[kGroups] = {};
#pragma unroll 1
    for (int b = own; b < call.B; b += f.blocks) {
      seq = call.sequences + b;
      __syncthreads(); /* the sequence before is done with */
      load();
      Scores p = {}, ds = {};
      weigh(p, ds);
      if (biases) add_biases(ds);
      put_queries(p, ds);
      __syncthreads();
      put_keys();
      if (S::kBanded && f.lines) {
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
          if (16 * g < f.columns)
            add_transposed(sums[g], operands(warp) + 16 * g, 2 * f.line, warp);
        }
      }
    }
    if (S::kBanded && f.lines) write_lines(sums);
    if (biases) add_bias_ends();
  }

 private:
  __device__ float *lines() const {
    return f.lines + (int64_t{head} * f.blocks + own) * f.line_numbers;
  }
  /* Sums of ds by distance. */
  __device__ float *distances() const { return lines() + f.bias_offset; }

  __device__ void load() {
    this->template load_queries<kRows>(s.own[0], s.own[1], 0);
    this->template load_keys<kRows>(s.other[0][0], s.other[0][1], 0);
    if (f.biased) this->load_bias(s.bias[0], 1 - kRows - seq->start, kDiagonals);
    if (call.dropout.threshold) make_keep();
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }

  /* A lane has sixteen keys of a query. */
  __device__ void make_keep() {
    s.keep[warp][lane] =
        keep_block(dropout_at(call, head), seq->ordinal, static_cast<uint32_t>(first + lane / 2),
                   static_cast<uint32_t>(lane % 2));
  }
  __device__ float kept(int r, int x) const {
    const auto *const bytes = reinterpret_cast<const unsigned char *>(s.keep[warp]);
    return bytes[r * kRows + x] >= call.dropout.threshold ? call.dropout.scale : 0.0f;
  }

  /* In units of log 2; +inf for a row that sees no key, or is none. */
  __device__ float level_of(int i) const {
    if (i >= seq->queries) return INFINITY;
    const float lse = f.c.lse[lse_of(call, *seq, head) + i];
    return lse == -INFINITY ? INFINITY
                            : static_cast<float>(static_cast<double>(lse) * 1.4426950408889634074);
  }

  /* p~ and ds of the warp's sixteen queries. */
  __device__ void weigh(Scores &p, Scores &ds) {
    const float level[2] = {level_of(first + row), level_of(first + row + 8)};
    Left left;
    left.read(s.own[0] + first * S::kLine);
    multiply_rows<S::kWidth>(p, left, s.other[0][0]);
    left.read(s.own[1] + first * S::kLine);
    multiply_rows<S::kWidth>(ds, left, s.other[0][1]);
    if (S::kBanded) {
#pragma unroll 1
      for (int which = 0; which < 2; which++) {
        this->make_cells(which, s.own[which], first, true, cells_of(which, kRows));
      }
      __syncwarp();
    }
    const int from = seq->nearest, to = seq->farthest, keys = seq->keys, origin = origin_of();
    float delta[2] = {};
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int h = e / 2, i = first + row + 8 * h, j = n * 8 + t + e % 2;
        float score = -level[h], &weight = p[n][e], &dp = ds[n][e];
        if (S::kBanded) {
          const int at = this->cell_at(i, j - i - origin);
          score += call.scale * cells_of(0, kRows)[at];
          dp += cells_of(1, kRows)[at];
        }
        if (f.biased) score += s.bias[0][j - i + kRows - 1];
        weight = exp2_approx(at_most_zero(call.scale * weight + score));
        if (j >= keys || j - i < from || j - i > to) weight = dp = 0;
        if (call.dropout.threshold) dp *= kept(row + 8 * h, j);
        delta[h] += weight * dp;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) delta[h] = quad_sum(delta[h]);
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        ds[n][e] = this->slope_of(p[n][e], ds[n][e] - delta[e / 2]);
        if (call.dropout.threshold) p[n][e] *= kept(row + e / 2 * 8, n * 8 + t + e % 2);
      }
    }
  }

  /* j - i of the band's first column. */
  __device__ int origin_of() const { return seq->start + f.low; }

  /* The cells as operands, in the place of the numbers: rows of 2 f.line. */
  __device__ bf16 *operands(int which) const {
    return reinterpret_cast<bf16 *>(cells_of(which, kRows));
  }

  /* dq; and what both warps are to read of p~ and ds. */
  __device__ void put_queries(const Scores &p, const Scores &ds) {
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        bf16 *const to = shared + (first + row + 8 * h) * kShare + n * 8 + t;
        put_pair(to, ds[n][2 * h], ds[n][2 * h + 1]);
        put_pair(to + kRows * kShare, p[n][2 * h], p[n][2 * h + 1]);
      }
    }
    Sums dq = {};
    add_weighted<S::kWidth>(dq, ds, s.other[0][0], nullptr);
    if (S::kBanded) {
      fill_cells(ds, p);
#pragma unroll 1
      for (int begin = 0; call.key.count && begin < f.columns; begin += 16) {
        uint32_t a[4];
        read_fragment(a, operands(0) + first * 2 * f.line + begin, 2 * f.line, 0);
        add_step(dq, a, table + begin * S::kLine);
      }
    }
    Storage *const to = row_of<Storage>(f.c.dq, seq->query_batch, head, seq->query_row);
    this->put_rows(to, f.c.dq.row_stride, first, seq->queries, seq->query_rows, call.D, f.c.scale,
                   dq);
  }

  /* Of the warp's queries ds and p~ by column; what lies beyond the ends is added up. */
  __device__ void fill_cells(const Scores &ds, const Scores &p) {
    const int line = 2 * f.line, apart = kRows * line, last = f.columns - 1;
    bf16 *const rows = operands(0) + first * line;
    __syncwarp(); /* the numbers have been read */
    for (int x = lane; x < 2 * line; x += 32) {
      reinterpret_cast<uint4 *>(rows)[x] = make_uint4(0, 0, 0, 0);
      reinterpret_cast<uint4 *>(rows + apart)[x] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    const int origin = origin_of() + first;
    float ends[2][4] = {}; /* of a row: ds before the band and behind it, then p~ */
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int h = e / 2, r = row + 8 * h, column = n * 8 + t + e % 2 - r - origin;
        const bool low = column <= 0, high = !low && column >= last;
        ends[h][0] += low ? ds[n][e] : 0.0f;
        ends[h][1] += high ? ds[n][e] : 0.0f;
        ends[h][2] += low ? p[n][e] : 0.0f;
        ends[h][3] += high ? p[n][e] : 0.0f;
        if (low || high) continue;
        put_number(rows[r * line + column], ds[n][e]);
        put_number(rows[apart + r * line + column], p[n][e]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int x = 0; x < 4; x++) ends[h][x] = quad_sum(ends[h][x]);
      if (t != 0) continue;
      bf16 *const start = rows + (row + 8 * h) * line;
#pragma unroll
      for (int x = 0; x < 4; x += 2) { /* one column: the same relation */
        put_number(start[x / 2 * apart], last == 0 ? ends[h][x] + ends[h][x + 1] : ends[h][x]);
        if (last > 0) put_number(start[x / 2 * apart + last], ends[h][x + 1]);
      }
    }
    __syncwarp();
  }

  /* sums += of all queries: left transposed . q, or dz. */
  __device__ void add_transposed(Sums &sums, const bf16 *left, int line, int which) {
#pragma unroll
    for (int step = 0; step < kRows / 16; step++) {
      uint32_t a[4];
      read_transposed(a, left + step * 16 * line, line);
      add_step(sums, a, s.own[which] + step * 16 * S::kLine);
    }
  }

  /* dk, dv of the warp's sixteen keys. */
  __device__ void put_keys() {
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      Sums sums = {};
      add_transposed(sums, shared + which * kRows * kShare + first, kShare, which);
      const rp_rows_out &to = which == 0 ? f.c.dk : f.c.dv;
      this->put_rows(row_of<Storage>(to, seq->key_batch, head, seq->key_row), to.row_stride, first,
                     seq->keys, seq->key_rows, which == 0 ? call.D : call.Dv,
                     which == 0 ? f.c.scale : 1.0f, sums);
    }
  }

  /* ds by distance, a thread having a diagonal. */
  __device__ void add_biases(const Scores &ds) {
    float *const slopes = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        slopes[(first + row + e / 2 * 8) * kSlope + n * 8 + t + e % 2] = ds[n][e];
      }
    }
    __syncthreads();
    const int x = static_cast<int>(threadIdx.x), d = x - (kRows - 1) - seq->start;
    float sum = 0;
    for (int r = 0; r < kRows; r++) {
      const int j = x - (kRows - 1) + r;
      if (j >= 0 && j < kRows) sum += slopes[r * kSlope + j];
    }
    if (d <= call.bias.low) bias_ends[0] += sum;
    else if (d >= call.bias.high) bias_ends[1] += sum;
    else if (x < kDiagonals) distances()[d - call.bias.low] += sum;
    __syncthreads(); /* p~ and ds go there */
  }

  __device__ void add_bias_ends() {
    float *const ends = reinterpret_cast<float *>(s.keep);
    __syncthreads();
    for (int end = 0; end < 2; end++) {
      const float sum = sum_of_lanes(bias_ends[end]);
      if (lane == 0) ends[2 * end + warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    distances()[0] += ends[0] + ends[1];
    distances()[f.bias_columns - 1] += ends[2] + ends[3];
  }

  /* A warp's table. */
  __device__ void write_lines(const Sums (&sums)[kGroups]) {
    if ((warp == 0 ? call.key.count : call.value.count) == 0) return;
    const int width = warp == 0 ? call.D : call.Dv;
    float *const to = lines() + (warp == 0 ? 0 : f.value_offset);
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
#pragma unroll
      for (int n = 0; n < S::kOut; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int column = g * 16 + row + e / 2 * 8, c = n * 8 + t + e % 2;
          if (column < f.columns && c < width) to[int64_t{column} * width + c] = sums[g][n][e];
        }
      }
    }
  }

  const int own;           /* of the head's blocks */
  bf16 *const shared;      /* [2][kRows][kShare]: ds, p~ */
  const int first;         /* the warp's first query, and key */
  float bias_ends[2] = {}; /* the thread's, beyond either end */
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, kSingleBlocks[S::kBanded])
    single_kernel(const __grid_constant__ BandBackward f) {
  const unsigned heads = static_cast<unsigned>(f.c.call.H);
  SingleBlock<S> block(f, static_cast<int>(blockIdx.x % heads),
                       static_cast<int>(blockIdx.x / heads));
  block.run();
}

template <class Storage, bool banded>
rp_status run(const BandBackward &f) {
  using S = SingleShape<Storage, banded>;
  const dim3 grid(static_cast<unsigned>(int64_t{f.blocks} * f.c.call.H));
  CUDA_TRY(launch(
      single_kernel<S>,
      {grid, dim3(S::kThreads), static_cast<size_t>(single_bytes(f.columns)), context().stream},
      f));
  return RP_OK;
}

}  // namespace

int64_t single_line(int64_t columns) {
  if (columns == 0) return 0;
  return columns > 4 ? (columns + 3) / 8 * 8 + 4 : 12;
}

int64_t single_bytes(int64_t columns) {
  using S = SingleShape<float, true>;
  const int held = static_cast<int>((columns + 15) / 16 * 16);
  return static_cast<int64_t>(sizeof(BandShared<S>)) + vector_bytes<S>(held, false) +
         2 * kRows * (single_line(columns) * 4 + kShare * 2);
}

rp_status single_backward(const BandBackward &f, bool stored_bf16) {
  if (f.blocks == 0) return RP_OK;
  if (stored_bf16) return f.banded ? run<bf16, true>(f) : run<bf16, false>(f);
  return f.banded ? run<float, true>(f) : run<float, false>(f);
}

}  // namespace rpc
