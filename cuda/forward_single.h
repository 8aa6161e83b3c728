/* SPDX-License-Identifier: Apache-2.0
 *
 * forward_single.h: attention_forward.cu where every sequence is one tile: 32 queries and keys at
 * most, operands bf16.
 *
 * A block takes one sequence of a head after the other, and keeps the vectors of both bands all the
 * time. All keys are there at once: weights are final when they are made. So what queries meet of
 * the band is added to products, and weights become cells, operands, as soon as they are known. A
 * warp meets 47 distances at most, and takes products with those of the band only: columns `first`
 * and on, sixteen at a time. Both lie where the queries or the keys were:
 *
 *   numbers   [16][kNumbers]   f32, products with vectors of keys, till scores have them
 *   cells     [16][operands]   then: weights by column, those beyond the band at its ends
 */
#ifndef RPC_FORWARD_SINGLE_H
#define RPC_FORWARD_SINGLE_H

#include "forward_block.h"

namespace rpc {

template <class S>
class SingleForward : ForwardBlock<S> {
  using Base = ForwardBlock<S>;
  using Base::call;
  using Base::dropout;
  using Base::f;
  using Base::head;
  using Base::keys;
  using Base::lane;
  using Base::left;
  using Base::most;
  using Base::number;
  using Base::out;
  using Base::s;
  using Base::seq;
  using Base::sum;
  using Base::t;
  using Base::tail;
  using Base::values;
  using Base::warp_row;
  using typename Base::Keep;
  using typename Base::Rows;
  using typename Base::Scores;
  using typename Base::Sixteen;
  using typename Base::Storage;
  static constexpr int kRows = Base::kRows, kNumbers = 56; /* from row to row: few share a bank */
  static_assert(16 * kNumbers * 4 <= S::kKeys * S::kLine * 2, "numbers fit where keys were");

 public:
  __device__ SingleForward(const Forward &forward, int the_head) : Base(forward, the_head) {
    if (!f.banded) return;
    this->load_source(vectors(), this->key_source(), f.low, 1, columns());
    __syncthreads(); /* zeros behind them make room for the others */
    if (call.value.count == 0) return;
    this->load_source(value_vectors(), this->value_source(), f.low, 1, columns());
  }

  __device__ void run(const Tile &tile, const Tile *next) {
    __syncthreads(); /* nobody reads what the sequence before was made of */
    this->begin_at(tile);
    this->load_queries(s.queries, nullptr);
    this->load_tile(0, 0);
    if (next) ask_for(call.sequences[next->sequence]);
    this->clear();
    cp_async_wait<0>();
    __syncthreads();
    Scores x = {};
    const bool active = warp_row < seq.queries;
    if (active) {
      this->read_left(left, s.queries);
      multiply_rows<S::kWidth>(x, left, keys(0));
    }
    if (f.banded) __syncthreads(); /* numbers and cells come to where queries and keys were */
    if (active) attend(x);
    if constexpr (sizeof(Storage) == sizeof(bf16)) {
      if (f.out_aligned) {
        write_pieces();
        return;
      }
    }
    this->write_rows();
  }

 private:
  int nearest, farthest; /* distances that the warp meets */
  int first, sixteen;    /* columns of the band from which on it takes so many times sixteen */

  __device__ int columns() const { return f.high - f.low + 1; }
  __device__ bf16 *vectors() const { return this->template area<bf16>(f.related_at); }
  __device__ bf16 *value_vectors() const { return vectors() + single_values(f) * S::kLine; }
  __device__ bf16 *cells() const { return warp_row == 0 ? keys(0) : s.queries; }
  __device__ float *numbers() const { return reinterpret_cast<float *>(cells()); }

  /* The second-level cache is to have the next sequence: a warp asks for k or for v, and for its
   * rows of q. */
  __device__ void ask_for(const Sequence &coming) const {
    const bool of_keys = warp_row == 0;
    if (lane < coming.keys) {
      const rp_rows &x = of_keys ? call.k : call.v;
      ask_for_row(row_of<Storage>(x, coming.key_batch, key_head(call, head), coming.key_row + lane),
                  of_keys ? call.D : call.Dv);
    }
    const int i = warp_row + lane;
    if (lane < S::kWarpRows && i < coming.queries) {
      ask_for_row(row_of<Storage>(call.q, coming.query_batch, head, coming.query_row + i), call.D);
    }
  }
  __device__ void ask_for_row(const Storage *from, int width) const {
#pragma unroll
    for (int c = 0; c < S::kWidth; c += 128 / int{sizeof(Storage)}) {
      if (c < width) prefetch_line(from + c);
    }
  }

  /* From products to sums. */
  __device__ void attend(Scores &x) {
    if (f.banded) find_columns();
    if (f.banded && call.key.count > 0) add_numbers(x);
    float scale = call.scale;
    Rows shift = {}, added;
    if (!this->raw()) {
      this->scale_scores(x, scale, shift);
      if (call.bias.count > 0) this->add_bias(x, s.bias[0]);
    }
    this->hide(x, 0);
    for (int h = 0; h < kRows; h++) most[h] = this->highest_of(x, h) * scale;
    this->make_weights(x, scale, shift, added);
    for (int h = 0; h < kRows; h++) sum[h] = quad_sum(sum[h]);
    if (dropout.threshold != 0) {
      const Keep keep = {this->keep_bits(0, 0)};
      this->drop(x, keep);
    }
    add_weighted<S::kWidth>(out, x, values(0), nullptr);
    if (call.value.count > 0) add_values(x);
  }

  __device__ void find_columns() {
    nearest = -(warp_row + S::kWarpRows - 1) - seq.start;
    farthest = S::kKeys - 1 - warp_row - seq.start;
    first = clamped(nearest, f.low, f.high) - f.low;
    sixteen = (clamped(farthest, f.low, f.high) - f.low - first) / 16 + 1;
    const int latest = single_whole(f) - 16 * sixteen;
    first = first < latest ? first : latest;
  }

  /* What queries meet of the band comes to scores. */
  __device__ void add_numbers(Scores &x) {
    float *const to = numbers() + lane / 4 * kNumbers;
#pragma unroll 1
    for (int k = 0; k < sixteen; k++) {
      Sixteen met = {};
      multiply_rows<S::kWidth>(met, left, vectors() + (first + 16 * k) * S::kLine);
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int h = 0; h < kRows; h++) {
          put_pair(to + 8 * h * kNumbers + 16 * k + 8 * n + t, number(met, n, 2 * h),
                   number(met, n, 2 * h + 1));
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const float *const from = to + 8 * h * kNumbers - first;
      const int at = this->distance_of(h, -seq.start) - f.low;
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          number(x, n, 2 * h + e) += from[clamped(at + 8 * n + e, 0, f.high - f.low)];
        }
      }
    }
    __syncwarp();
  }

  /* What weights fetch of the band. */
  __device__ void add_values(const Scores &x) {
    put_cells(x);
#pragma unroll 1
    for (int k = 0; k < sixteen; k++) {
      uint32_t a[4];
      read_fragment(a, cells(), S::kLine, k);
      add_fragment<S::kWidth>(out[0], a, value_vectors() + (first + 16 * k) * S::kLine);
    }
  }

  __device__ void put_cells(const Scores &x) {
#pragma unroll 1
    for (int k = 0; k < sixteen; k++) {
      bf16 *const to = cells() + lane / 2 * S::kLine + 16 * k + lane % 2 * 8;
      *reinterpret_cast<uint4 *>(to) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    const auto inside = static_cast<unsigned>(tail() - f.low - 1);
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      const int at = this->distance_of(h, -seq.start) - f.low;
      bf16 *const own = cells() + (lane / 4 + 8 * h) * S::kLine - first; /* column 0 of the band */
#pragma unroll
      for (int n = 0; n < S::kTiles; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int column = at + 8 * n + e;
          if (static_cast<unsigned>(column - 1) < inside) {
            put_number(own[column], number(x, n, 2 * h + e));
          }
        }
      }
    }
    put_ends(x);
    __syncwarp();
  }

  /* A band of one column has both ends there. */
  __device__ void put_ends(const Scores &x) const {
    const int last = f.high - f.low;
    Rows before = {}, behind = {};
    if (nearest <= f.low) {
      for (int h = 0; h < kRows; h++) {
        before[h] = sum_columns(x[0], h, 0, f.low + 1 - this->distance_of(h, -seq.start));
      }
    }
    if (farthest >= tail()) {
      for (int h = 0; h < kRows; h++) {
        behind[h] = sum_columns(x[0], h, tail() - this->distance_of(h, -seq.start), S::kKeys);
      }
    }
    if (t != 0) return;
#pragma unroll
    for (int h = 0; h < kRows; h++) {
      bf16 *const own = cells() + (lane / 4 + 8 * h) * S::kLine - first;
      const float start = last == 0 ? before[h] + behind[h] : before[h];
      if (nearest <= f.low || last == 0) put_number(own[0], start);
      if (farthest >= tail() && last > 0) put_number(own[last], behind[h]);
    }
  }

  /* write_rows, 16 bytes at a time: by way of shared memory of which no other warp reads. */
  __device__ void write_pieces() {
    const float my_factor = this->close_rows(seq);
    const float factor[2] = {__shfl_sync(~0u, my_factor, lane / 4 * 4),
                             __shfl_sync(~0u, my_factor, lane / 4 * 4 + 1)};
    const int there = seq.query_rows - warp_row;
    put_pieces(row_of<bf16>(f.out, seq.query_batch, head, seq.query_row + warp_row),
               f.out.row_stride, there, there, call.Dv, factor, out[0],
               f.banded ? cells() : s.queries + warp_row * S::kLine);
  }
};

}  // namespace rpc

#endif
