/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_backward_single.cu: attention's backward where every sequence is one tile: 32 queries
 * and keys at most, operands bf16.
 *
 * A block takes sequences of a head two by two, and does all of them: s and dp are made once, in
 * the registers of two warps a sequence that have 16 queries each, and so is delta,
 *
 *   delta_i = sum_j p~_ij dp_ij
 *
 * p~ and ds go through shared memory, where v was, to be the left side of the products that sum
 * over queries, and gradients on their way out, where k was. Cells (backward_band.h) become
 * operands where they lie, and each warp sums one half of one table in its registers, until the
 * block's last sequences:
 *
 *   warp   queries, then keys      table
 *   0      0 to 15 of the first    keys, columns 0 to 31
 *   1      16 to 31                values
 *   2      0 to 15 of the second   keys, columns 32 to 63
 *   3      16 to 31                values
 */
#include "backward_single.h"

namespace rpc {
namespace {

constexpr int kRows = kSingleRows, kGroups = kSingleColumns / 16;

/* a: A[m][k] = left[k * line + m]. */
__device__ inline void read_transposed(uint32_t (&a)[4], const bf16 *left, int line) {
  const int lane = lane_of(), matrix = lane / 8;
  ldmatrix_x4_trans(a, left + (matrix / 2 * 8 + lane % 8) * line + matrix % 2 * 8);
}

template <class StorageType, bool kIsBanded>
struct SingleShape : BandShape<bf16, StorageType, kSingleWidth, kSingleRows> {
  static constexpr bool kBanded = kIsBanded;
  static constexpr int kThreads = 128;
};

}  // namespace

/* Of both sequences: q and dz; k and v, which makes room for ds (columns 0 to 31) and p~. */
template <class Storage, bool banded>
struct BandShared<SingleShape<Storage, banded>> {
  bf16 own[2][2][kRows * row_stride<bf16, kSingleWidth>];
  bf16 other[2][2][kRows * row_stride<bf16, kSingleWidth>];
  float bias[2][2 * kRows];
  uint4 keep[4][kRows]; /* bytes of dropout */
  float ends[2][128];   /* of threads: sums of ds beyond either end of a bias */
  Sequence none;        /* where the number of sequences is odd */
};

namespace {

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
  using TableSums = float[S::kOut / 2][4];
  static constexpr int kDiagonals = 2 * kRows - 1, kSlope = kRows + 1;

 public:
  __device__ SingleBlock(const BandBackward &backward, int the_head)
      : Base(backward, the_head, false),
        pair(warp_of() / 2),
        first(warp_of() % 2 * 16),
        shared(s.other[warp_of() / 2][1]) {}

  __device__ void run() {
    const bool biases = f.lines && f.bias_columns > 0;
    for (int x = static_cast<int>(threadIdx.x); biases && x < f.bias_columns; x += S::kThreads) {
      distances()[x] = 0;
    }
    if (threadIdx.x == 0) s.none = {};
    s.ends[0][threadIdx.x] = s.ends[1][threadIdx.x] = 0;
    if (S::kBanded) this->load_held();
    TableSums sums[kGroups] = {};
#pragma unroll 1
    for (int b = own(); 2 * b < call.B; b += f.blocks) {
      __syncthreads(); /* the sequences before are done with */
      load(2 * b);
      Scores p = {}, ds = {};
      weigh(p, ds);
      if (biases) add_biases(ds);
      Sums dq = {};
      sum_queries(p, ds, dq);
      __syncthreads();
      ask_for(2 * (b + f.blocks));
      put(f.c.dq, seq->query_batch, seq->query_row, seq->queries, seq->query_rows, call.D,
          f.c.scale, dq);
      put_keys();
      if (S::kBanded && f.lines) {
#pragma unroll
        for (int g = 0; g < kGroups; g++) {
          if (16 * g < f.columns) add_to_table(16 * g, sums[g]);
        }
      }
    }
    if (S::kBanded && f.lines) write_lines(sums);
    if (biases) add_bias_ends();
  }

 private:
  /* Which of the head's blocks. */
  __device__ int own() const { return static_cast<int>(blockIdx.x) / call.H; }
  __device__ float *lines() const {
    return f.lines + (int64_t{head} * f.blocks + own()) * f.line_numbers;
  }
  /* Sums of ds by distance. */
  __device__ float *distances() const { return lines() + f.bias_offset; }

  /* Sequences b and b + 1, each by the warps that have it. */
  __device__ void load(int b) {
    seq = b + pair < call.B ? call.sequences + b + pair : &s.none;
    const int64_t queries = seq->query_batch, keys = seq->key_batch;
    const int of_keys = key_head(call, head);
    load_half(s.own[pair][0], call.q, queries, head, seq->query_row, seq->queries, call.D);
    load_half(s.own[pair][1], f.c.dout, queries, head, seq->query_row, seq->queries, call.Dv);
    load_half(s.other[pair][0], call.k, keys, of_keys, seq->key_row, seq->keys, call.D);
    load_half(s.other[pair][1], call.v, keys, of_keys, seq->key_row, seq->keys, call.Dv);
    for (int x = static_cast<int>(threadIdx.x) % 64; f.biased && x < kDiagonals; x += 64) {
      s.bias[pair][x] = kLog2E * band_at(call.bias, head, 1 - kRows - seq->start + x, 0);
    }
    cp_async_commit();
    if (call.dropout.threshold) make_keep();
    cp_async_wait<0>();
    __syncthreads();
  }
  __device__ void load_half(bf16 *to, const rp_rows &from, int64_t batch, int of_head,
                            int64_t row_0, int count, int width) const {
    constexpr int kHalf = S::kThreads / 2;
    load_rows<kRows, kSingleWidth, kHalf>(to, row_of<Storage>(from, batch, of_head, row_0),
                                          from.row_stride, count, width, f.c.aligned,
                                          threadIdx.x % kHalf);
  }

  /* The next sequences come as far as the second-level cache: a thread asks for 128 bytes of a row
   * of each array. */
  __device__ void ask_for(int b) const {
    const int x = static_cast<int>(threadIdx.x) / 64, r = static_cast<int>(threadIdx.x) % 32;
    const int at = static_cast<int>(threadIdx.x) / 32 % 2 * (128 / int{sizeof(Storage)});
    if (b + x >= call.B) return;
    const Sequence &coming = call.sequences[b + x];
    const auto ask = [&](const rp_rows &rows, int64_t batch, int of_head, int64_t i, int width) {
      if (at < width) prefetch_line(row_of<Storage>(rows, batch, of_head, i) + at);
    };
    if (r < coming.queries) {
      ask(call.q, coming.query_batch, head, coming.query_row + r, call.D);
      ask(f.c.dout, coming.query_batch, head, coming.query_row + r, call.Dv);
    }
    if (r < coming.keys) {
      const int of_keys = key_head(call, head);
      ask(call.k, coming.key_batch, of_keys, coming.key_row + r, call.D);
      ask(call.v, coming.key_batch, of_keys, coming.key_row + r, call.Dv);
    }
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
    left.read(s.own[pair][0] + first * S::kLine);
    multiply_rows<S::kWidth>(p, left, s.other[pair][0]);
    left.read(s.own[pair][1] + first * S::kLine);
    multiply_rows<S::kWidth>(ds, left, s.other[pair][1]);
    __syncthreads(); /* where v was, ds and p~ may go */
    if (S::kBanded) {
#pragma unroll 1
      for (int which = 0; which < 2; which++) {
        this->make_cells(which, s.own[pair][which], first, true, cells_of(2 * pair + which, kRows));
      }
      __syncwarp();
    }
    if (S::kBanded) add_cells(p, ds);
    float scale = call.scale;
    if (f.biased) {
      each(p, [&](int n, int e, float &x) { x = scale * x + s.bias[pair][bias_at(n, e)]; });
      scale = 1;
    }
    each(p, [&](int, int e, float &x) { x = exp2_approx(at_most_zero(scale * x - level[e / 2])); });
    hide(p, ds);
    if (call.dropout.threshold) {
      each(ds, [&](int n, int e, float &x) { x *= kept(row + e / 2 * 8, n * 8 + t + e % 2); });
    }
    float delta[2] = {};
    each(p, [&](int n, int e, float x) { delta[e / 2] += x * ds[n][e]; });
#pragma unroll
    for (int h = 0; h < 2; h++) delta[h] = quad_sum(delta[h]);
    each(ds, [&](int n, int e, float &x) { x = this->slope_of(p[n][e], x - delta[e / 2]); });
    if (call.dropout.threshold) {
      each(p, [&](int n, int e, float &x) { x *= kept(row + e / 2 * 8, n * 8 + t + e % 2); });
    }
  }

  /* Calls take(n, e, x[n][e]). */
  template <class Take>
  static __device__ void each(Scores &x, Take take) {
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) take(n, e, x[n][e]);
    }
  }
  __device__ int bias_at(int n, int e) const {
    return n * 8 + t + e % 2 - (first + row + e / 2 * 8) + kRows - 1;
  }

  __device__ void add_cells(Scores &p, Scores &ds) const {
    const float *const of_keys = cells_of(2 * pair, kRows);
    const float *const of_values = cells_of(2 * pair + 1, kRows);
    const int origin = origin_of();
    each(p, [&](int n, int e, float &x) {
      const int i = first + row + e / 2 * 8;
      const int at = this->cell_at(i, n * 8 + t + e % 2 - i - origin);
      x += of_keys[at];
      ds[n][e] += of_values[at];
    });
  }

  /* What is not seen has neither weight nor slope. */
  __device__ void hide(Scores &p, Scores &ds) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int i = first + row + 8 * h - t, keys = seq->keys - t;
      const int from = seq->nearest + i;
      const int beyond = seq->farthest + i + 1 < keys ? seq->farthest + i + 1 : keys;
#pragma unroll
      for (int x = 0; x < 2 * S::kTiles; x++) {
        const int column = x / 2 * 8 + x % 2, e = 2 * h + x % 2;
        if (column < from || column >= beyond) p[x / 2][e] = ds[x / 2][e] = 0;
      }
    }
  }

  /* j - i of the band's first column. */
  __device__ int origin_of() const { return seq->start + f.low; }

  /* The cells as operands, in the place of the numbers: rows of 2 f.line. */
  __device__ bf16 *operands(int sequence, int which) const {
    return reinterpret_cast<bf16 *>(cells_of(2 * sequence + which, kRows));
  }

  /* dq; and what both warps are to read of p~ and ds. */
  __device__ void sum_queries(const Scores &p, const Scores &ds, Sums &dq) {
#pragma unroll
    for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        bf16 *const to = shared + (first + row + 8 * h) * S::kLine + n * 8 + t;
        put_pair(to, ds[n][2 * h], ds[n][2 * h + 1]);
        put_pair(to + kRows, p[n][2 * h], p[n][2 * h + 1]);
      }
    }
    if (S::kBanded) fill_cells(ds, p);
    add_weighted<S::kWidth>(dq, ds, s.other[pair][0], nullptr);
    if (S::kBanded) {
#pragma unroll 1
      for (int begin = 0; call.key.count && begin < f.columns; begin += 16) {
        uint32_t a[4];
        read_fragment(a, operands(pair, 0) + first * 2 * f.line + begin, 2 * f.line, 0);
        add_fragment<kSingleWidth>(dq, a, table + begin * S::kLine);
      }
    }
  }

  /* The warp's sixteen rows of a gradient; the keys have been read. */
  __device__ void put(const rp_rows_out &to, int64_t batch, int64_t row_0, int in_use, int there,
                      int width, float factor, const Sums &sums) {
    Storage *const rows = row_of<Storage>(to, batch, head, row_0);
    if constexpr (sizeof(Storage) == sizeof(bf16)) {
      if (f.c.gradients_aligned) {
        put_pieces(rows + first * to.row_stride, to.row_stride, in_use - first, there - first,
                   width, {factor, factor}, sums, s.other[pair][0] + first * S::kLine);
        return;
      }
    }
    this->put_rows(rows, to.row_stride, first, in_use, there, width, factor, sums);
  }

  /* Of the warp's queries ds and p~ by column; what lies beyond the ends is added up. */
  __device__ void fill_cells(const Scores &ds, const Scores &p) {
    const int line = 2 * f.line, apart = kRows * line, last = f.columns - 1;
    bf16 *const rows = operands(pair, 0) + first * line;
    __syncwarp(); /* the numbers have been read */
    for (int x = lane; x < 2 * line; x += 32) {
      reinterpret_cast<uint4 *>(rows)[x] = make_uint4(0, 0, 0, 0);
      reinterpret_cast<uint4 *>(rows + apart)[x] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int column = column_of(h);
      bf16 *const own = rows + (row + 8 * h) * line + column;
#pragma unroll
      for (int x = 0; x < 2 * S::kTiles; x++) {
        const int further = x / 2 * 8 + x % 2, e = 2 * h + x % 2;
        if (column + further <= 0 || column + further >= last) continue;
        put_number(own[further], ds[x / 2][e]);
        put_number(own[apart + further], p[x / 2][e]);
      }
    }
    put_ends(ds, rows);
    put_ends(p, rows + apart);
    __syncwarp();
  }

  /* Of the band, that of a thread's first key in row h. */
  __device__ int column_of(int h) const { return t - (first + row + 8 * h) - origin_of(); }

  /* What lies before the band and behind it; of one column both. */
  __device__ void put_ends(const Scores &x, bf16 *rows) const {
    const int nearest = -(first + 15) - origin_of(), last = f.columns - 1;
    const int behind = last > 0 ? last : 1;
    float low[2] = {}, high[2] = {};
    if (nearest <= 0) {
      for (int h = 0; h < 2; h++) low[h] = sum_columns(x, h, 0, 1 - column_of(h));
    }
    if (nearest + 15 + kRows - 1 >= behind) {
      for (int h = 0; h < 2; h++) high[h] = sum_columns(x, h, behind - column_of(h), kRows);
    }
    if (t != 0) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      bf16 *const start = rows + (row + 8 * h) * 2 * f.line;
      put_number(start[0], last == 0 ? low[h] + high[h] : low[h]);
      if (last > 0) put_number(start[last], high[h]);
    }
  }

  /* sums += of all queries of a sequence: left transposed . right */
  template <int kOut>
  __device__ void add_transposed(float (&sums)[kOut][4], const bf16 *left, int line,
                                 const bf16 *right) {
#pragma unroll
    for (int step = 0; step < kRows / 16; step++) {
      uint32_t a[4];
      read_transposed(a, left + step * 16 * line, line);
      add_fragment<kSingleWidth>(sums, a, right + step * 16 * S::kLine);
    }
  }

  /* Sixteen columns of the band, from both sequences. */
  __device__ void add_to_table(int begin, TableSums &sums) {
    const int which = warp % 2, at = warp / 2 * (kSingleWidth / 2);
#pragma unroll
    for (int x = 0; x < 2; x++) {
      add_transposed(sums, operands(x, which) + begin, 2 * f.line, s.own[x][which] + at);
    }
  }

  /* dk, dv of the warp's sixteen keys. */
  __device__ void put_keys() {
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      Sums sums = {};
      add_transposed(sums, shared + which * kRows + first, S::kLine, s.own[pair][which]);
      const rp_rows_out &to = which == 0 ? f.c.dk : f.c.dv;
      put(to, seq->key_batch, seq->key_row, seq->keys, seq->key_rows, which == 0 ? call.D : call.Dv,
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
    const int x = static_cast<int>(threadIdx.x) % 64, d = x - (kRows - 1) - seq->start;
    float sum = 0;
    for (int r = 0; r < kRows; r++) {
      const int j = x - (kRows - 1) + r;
      if (j >= 0 && j < kRows) sum += slopes[r * kSlope + j];
    }
    const bool low = d <= call.bias.low, high = !low && d >= call.bias.high;
    s.ends[0][threadIdx.x] += low ? sum : 0.0f;
    s.ends[1][threadIdx.x] += high ? sum : 0.0f;
    for (int turn = 0; turn < 2; turn++) { /* both have the same distances, or some of them */
      if (turn == pair && x < kDiagonals && !low && !high) distances()[d - call.bias.low] += sum;
      __syncthreads();
    }
  }

  __device__ void add_bias_ends() {
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int end = 0; end < 2; end++) {
      float sum = 0;
      for (int x = 0; x < S::kThreads; x++) sum += s.ends[end][x];
      distances()[end == 0 ? 0 : f.bias_columns - 1] += sum;
    }
  }

  __device__ void write_lines(const TableSums (&sums)[kGroups]) {
    const bool keys = warp % 2 == 0;
    if ((keys ? call.key.count : call.value.count) == 0) return;
    const int width = keys ? call.D : call.Dv;
    float *const to = lines() + (keys ? 0 : f.value_offset);
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
#pragma unroll
      for (int n = 0; n < S::kOut / 2; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int column = g * 16 + row + e / 2 * 8;
          const int c = (warp / 2 * (S::kOut / 2) + n) * 8 + t + e % 2;
          if (column < f.columns && c < width) to[int64_t{column} * width + c] = sums[g][n][e];
        }
      }
    }
  }

  const int pair, first; /* which of the sequences; the warp's first query, and key */
  bf16 *const shared;    /* ds, p~ */
};

template <class S>
__global__ void __launch_bounds__(S::kThreads, kSingleBlocks[S::kBanded])
    single_kernel(const __grid_constant__ BandBackward f) {
  SingleBlock<S> block(f, static_cast<int>(blockIdx.x) % f.c.call.H);
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
         4 * kRows * single_line(columns) * 4;
}

rp_status single_backward(const BandBackward &f, bool stored_bf16) {
  if (f.blocks == 0) return RP_OK;
  if (stored_bf16) return f.banded ? run<bf16, true>(f) : run<bf16, false>(f);
  return f.banded ? run<float, true>(f) : run<float, false>(f);
}

}  // namespace rpc
