/* SPDX-License-Identifier: Apache-2.0
 *
 * tile.h: rows in shared memory, and the products of a warp with them.
 *
 * Operand is the type that products are made of: bf16 (tensor cores) or float (FMA). Either way a
 * warp computes 16 rows, and a thread owns the same numbers of them, those of mma.m16n8k16:
 *
 *   x[n][e]   row  g + 8 (e / 2)            g = lane / 4
 *             column 8 n + t + e % 2        t = 2 (lane % 4)
 *
 * so that whatever happens between two products is written once.
 *
 * Rows in shared memory are `row_stride` apart: 8 rows of 16 bytes then lie in different banks, as
 * ldmatrix wants them.
 */
#ifndef RPC_TILE_H
#define RPC_TILE_H

#include "gpu.h"
#include "ptx.h"

namespace rpc {

template <class Operand, int kWidth>
constexpr int row_stride = kWidth + 16 / int{sizeof(Operand)};

/* By unsigned division, which is a mask or a shift. */
__device__ inline int lane_of() { return static_cast<int>(threadIdx.x % 32); }
__device__ inline int warp_of() { return static_cast<int>(threadIdx.x / 32); }

__device__ inline int clamped(int x, int low, int high) {
  const int raised = x < low ? low : x;
  return raised > high ? high : raised;
}

/* Over the four lanes that share a row. */
__device__ inline float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}
__device__ inline float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
__device__ inline float number_of(float x) { return x; }
__device__ inline float number_of(bf16 x) { return __bfloat162float(x); }
__device__ inline void put_number(float &to, float x) { to = x; }
__device__ inline void put_number(bf16 &to, float x) { to = __float2bfloat16(x); }

/* (x + bias) . w, bias may be NULL. */
template <class Storage>
__device__ inline float row_product(const Storage *x, const float *bias, const float *w,
                                    int width) {
  float sum = 0;
  for (int c = 0; c < width; c++) {
    sum += (number_of(x[c]) + (bias ? bias[c] : 0.0f)) * w[c];
  }
  return sum;
}

/* Two of them at once, aligned to both. */
__device__ inline void put_pair(float *to, float x, float y) {
  *reinterpret_cast<float2 *>(to) = make_float2(x, y);
}
__device__ inline void put_pair(bf16 *to, float x, float y) {
  *reinterpret_cast<uint32_t *>(to) = pack_bf16(x, y);
}

/* Over the four lanes too: of row h those of columns from `from` to before `end`, which are counted
 * from the lane's first. */
template <int kTiles>
__device__ inline float sum_columns(const float (&x)[kTiles][4], int h, int from, int end) {
  float sum = 0;
#pragma unroll
  for (int k = 0; k < 2 * kTiles; k++) {
    const int column = k / 2 * 8 + k % 2;
    if (column >= from && column < end) sum += x[k / 2][2 * h + k % 2];
  }
  return quad_sum(sum);
}

/* ---- rows to shared memory ------------------------------------------------------ */

/* 16 bytes of operands. */
template <class Operand, class Storage>
__device__ inline void load_piece(Operand *to, const Storage *from, bool valid) {
  if constexpr (sizeof(Operand) == sizeof(Storage)) {
    cp_async16(to, from, valid);
  } else { /* eight floats become bf16 */
    float4 low = make_float4(0, 0, 0, 0), high = low;
    if (valid) {
      low = reinterpret_cast<const float4 *>(from)[0];
      high = reinterpret_cast<const float4 *>(from)[1];
    }
    *reinterpret_cast<uint4 *>(to) =
        make_uint4(pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y),
                   pack_bf16(high.z, high.w));
  }
}

/* x += from, as far as `count` goes. */
__device__ inline void add_numbers(float (&x)[8], const float *from, int count) {
  if (count >= 8 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    const float4 low = reinterpret_cast<const float4 *>(from)[0];
    const float4 high = reinterpret_cast<const float4 *>(from)[1];
    const float all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] += all[k];
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; k++) {
    if (k < count) x[k] += from[k];
  }
}

/* x[i] += rows[i], NULL adding nothing. All of it is asked for before any is waited for. */
template <int kRows>
__device__ inline void add_rows(float (&x)[kRows][8], const float *const (&rows)[kRows],
                                int count) {
  bool aligned = count >= 8;
#pragma unroll
  for (int i = 0; i < kRows; i++) aligned &= reinterpret_cast<uintptr_t>(rows[i]) % 16 == 0;
  if (!aligned) {
    for (int i = 0; i < kRows; i++) {
      if (rows[i]) add_numbers(x[i], rows[i], count);
    }
    return;
  }
  float4 all[kRows][2];
#pragma unroll
  for (int i = 0; i < 2 * kRows; i++) {
    const auto row = reinterpret_cast<const float4 *>(rows[i / 2]);
    all[i / 2][i % 2] = row ? row[i % 2] : make_float4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < 2 * kRows; i++) {
    const float4 &four = all[i / 2][i % 2];
    float *const to = x[i / 2] + i % 2 * 4;
    to[0] += four.x;
    to[1] += four.y;
    to[2] += four.z;
    to[3] += four.w;
  }
}

/* Eight numbers become operands. */
__device__ inline void put_numbers(float *to, const float (&x)[8]) {
  reinterpret_cast<float4 *>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
  reinterpret_cast<float4 *>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}
__device__ inline void put_numbers(bf16 *to, const float (&x)[8]) {
  *reinterpret_cast<uint4 *>(to) = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                                              pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

/* kRows rows, the first `valid` of them from memory and the others 0, columns from `width` on 0
 * too. By all threads of the block, or by kThreads of them, `thread` of which the caller is; what
 * is copied is there after cp_async_wait and a barrier. aligned: rows_aligned of the array. */
template <int kRows, int kWidth, int kThreads, class Operand, class Storage>
__device__ inline void load_rows(Operand *to, const Storage *from, int64_t stride, int valid,
                                 int width, bool aligned, unsigned thread = threadIdx.x) {
  constexpr int kLine = row_stride<Operand, kWidth>;
  if (aligned) {
    constexpr int kPiece = 16 / int{sizeof(Operand)}, kPieces = kWidth / kPiece;
    constexpr int kRowStep = kThreads / kPieces; /* a thread's pieces are in one column */
    static_assert(kThreads % kPieces == 0 && kRows % kRowStep == 0, "every thread has as many");
    const int first = static_cast<int>(thread / kPieces);
    const int column = static_cast<int>(thread % kPieces) * kPiece;
    const int count = column < width ? valid - first : 0;
    from += first * stride + column;
#pragma unroll 4
    for (int row = 0; row < kRows; row += kRowStep) {
      load_piece(to + (first + row) * kLine + column, from, row < count);
      from += kRowStep * stride;
    }
    return;
  }
#pragma unroll 1
  for (unsigned i = thread; i < kRows * kWidth; i += kThreads) {
    const int row = static_cast<int>(i / kWidth), column = static_cast<int>(i % kWidth);
    const bool there = row < valid && column < width;
    put_number(to[row * kLine + column], there ? number_of(from[row * stride + column]) : 0.0f);
  }
}

/* load_rows of two arrays: what is read of both is under way at once. */
template <class Storage>
struct RowsFrom {
  const Storage *rows;
  int64_t stride;
  int width;
};
template <int kRows, int kWidth, int kThreads, class Operand, class Storage>
__device__ inline void load_two(Operand *to, const RowsFrom<Storage> &x, Operand *to_too,
                                const RowsFrom<Storage> &y, int valid, bool aligned) {
  if (!aligned) {
    load_rows<kRows, kWidth, kThreads>(to, x.rows, x.stride, valid, x.width, false);
    load_rows<kRows, kWidth, kThreads>(to_too, y.rows, y.stride, valid, y.width, false);
    return;
  }
  constexpr int kLine = row_stride<Operand, kWidth>;
  constexpr int kPiece = 16 / int{sizeof(Operand)}, kPieces = kWidth / kPiece;
  constexpr int kRowStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kRows % kRowStep == 0, "every thread has as many");
  const int first = static_cast<int>(threadIdx.x / kPieces);
  const int column = static_cast<int>(threadIdx.x % kPieces) * kPiece;
  const int x_count = column < x.width ? valid - first : 0;
  const int y_count = column < y.width ? valid - first : 0;
#pragma unroll 4
  for (int row = 0; row < kRows; row += kRowStep) {
    const int at = (first + row) * kLine + column;
    const int64_t i = first + row;
    const bool x_there = row < x_count, y_there = row < y_count;
    load_piece(to + at, x_there ? x.rows + i * x.stride + column : x.rows, x_there);
    load_piece(to_too + at, y_there ? y.rows + i * y.stride + column : y.rows, y_there);
  }
}

/* ---- rows from registers to memory ------------------------------------------------------ */

/* Sixteen rows of a warp's sums, a thread's two multiplied by `factor`, by way of shared memory:
 * `stage` has sixteen rows for the warp alone. Rows from in_use on are zeros, those from `there` on
 * are not written. The array is one of rows_aligned. */
template <int kOut>
__device__ inline void put_pieces(bf16 *to, int64_t stride, int in_use, int there, int width,
                                  const float (&factor)[2], const float (&sums)[kOut][4],
                                  bf16 *stage) {
  constexpr int kLine = row_stride<bf16, 8 * kOut>, kPieces = kOut, kStep = 32 / kPieces;
  const int lane = lane_of();
  __syncwarp(); /* what was there has been read */
#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int n = 0; n < kOut; n++) {
      put_pair(stage + (lane / 4 + 8 * h) * kLine + 8 * n + lane % 4 * 2,
               sums[n][2 * h] * factor[h], sums[n][2 * h + 1] * factor[h]);
    }
  }
  __syncwarp();
  const int row = lane / kPieces, column = lane % kPieces * 8;
  to += row * stride + column;
  stage += row * kLine + column;
  if (column >= width) there = 0;
#pragma unroll
  for (int i = 0; i < 16; i += kStep) {
    uint4 piece = *reinterpret_cast<const uint4 *>(stage + i * kLine);
    if (row + i >= in_use) piece = make_uint4(0, 0, 0, 0);
    if (row + i < there) *reinterpret_cast<uint4 *>(to) = piece;
    to += kStep * stride;
  }
}

/* ---- 16 rows of a warp, the left side of a product ------------------------------------ */

/* Read anew for every product: `rows` is the first of them. */
template <class Operand, int kWidth, bool kKept>
struct LeftRows {
  const Operand *rows;
  __device__ void read(const Operand *from) { rows = from; }
};

__device__ inline void read_fragment(uint32_t (&a)[4], const bf16 *rows, int line, int step) {
  const int lane = lane_of(), matrix = lane / 8;
  ldmatrix_x4(a, rows + (matrix % 2 * 8 + lane % 8) * line + step * 16 + matrix / 2 * 8);
}

/* Kept in registers. */
template <int kWidth>
struct LeftRows<bf16, kWidth, true> {
  uint32_t kept[kWidth / 16][4];
  __device__ void read(const bf16 *from) {
#pragma unroll
    for (int step = 0; step < kWidth / 16; step++) {
      read_fragment(kept[step], from, row_stride<bf16, kWidth>, step);
    }
  }
};

template <int kWidth>
__device__ inline void fragment_of(uint32_t (&a)[4], const LeftRows<bf16, kWidth, true> &left,
                                   int step) {
  for (int r = 0; r < 4; r++) a[r] = left.kept[step][r];
}
template <int kWidth>
__device__ inline void fragment_of(uint32_t (&a)[4], const LeftRows<bf16, kWidth, false> &left,
                                   int step) {
  read_fragment(a, left.rows, row_stride<bf16, kWidth>, step);
}

/* ---- products ------------------------------------------------------------------- */

/* c += left . rightᵀ, `right` having 8 kTiles rows, of which those from 8 tiles on are left out. */
template <int kWidth, int kTiles, bool kKept>
__device__ inline void multiply_rows(float (&c)[kTiles][4],
                                     const LeftRows<bf16, kWidth, kKept> &left, const bf16 *right,
                                     int tiles = kTiles) {
  static_assert(kTiles % 2 == 0, "two tiles a step");
  constexpr int kLine = row_stride<bf16, kWidth>;
  const int lane = lane_of(), matrix = lane / 8;
#pragma unroll
  for (int step = 0; step < kWidth / 16; step++) {
    uint32_t a[4];
    fragment_of(a, left, step);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      if (n >= tiles) continue;
      uint32_t b[4];
      ldmatrix_x4(b,
                  right + ((n + matrix / 2) * 8 + lane % 8) * kLine + step * 16 + matrix % 2 * 8);
      mma_bf16(c[n], a, {b[0], b[1]});
      mma_bf16(c[n + 1], a, {b[2], b[3]});
    }
  }
}

__device__ inline void add_products(float &c, const float4 &a, const float4 &b) {
  c += a.x * b.x;
  c += a.y * b.y;
  c += a.z * b.z;
  c += a.w * b.w;
}

template <int kWidth, int kTiles, bool kKept>
__device__ inline void multiply_rows(float (&c)[kTiles][4],
                                     const LeftRows<float, kWidth, kKept> &left, const float *right,
                                     int tiles = kTiles) {
  constexpr int kLine = row_stride<float, kWidth>;
  const int g = lane_of() / 4, t = lane_of() % 4 * 2;
  for (int k = 0; k < kWidth; k += 4) {
    const float4 a0 = *reinterpret_cast<const float4 *>(left.rows + g * kLine + k);
    const float4 a1 = *reinterpret_cast<const float4 *>(left.rows + (g + 8) * kLine + k);
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      if (n >= tiles) continue;
      const float *const b = right + (n * 8 + t) * kLine + k;
      const float4 b0 = *reinterpret_cast<const float4 *>(b);
      const float4 b1 = *reinterpret_cast<const float4 *>(b + kLine);
      add_products(c[n][0], a0, b0);
      add_products(c[n][1], a0, b1);
      add_products(c[n][2], a1, b0);
      add_products(c[n][3], a1, b1);
    }
  }
}

/* Several times sixteen rows at once: what is read of `right` serves them all. */
template <int kWidth, int kTiles, int kStrips, bool kKept>
__device__ inline void multiply_rows(float (&c)[kStrips][kTiles][4],
                                     const LeftRows<bf16, kWidth, kKept> (&left)[kStrips],
                                     const bf16 *right) {
  constexpr int kLine = row_stride<bf16, kWidth>;
  const int lane = lane_of(), matrix = lane / 8;
#pragma unroll
  for (int step = 0; step < kWidth / 16; step++) {
    uint32_t a[kStrips][4];
#pragma unroll
    for (int m = 0; m < kStrips; m++) fragment_of(a[m], left[m], step);
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b,
                  right + ((n + matrix / 2) * 8 + lane % 8) * kLine + step * 16 + matrix % 2 * 8);
#pragma unroll
      for (int m = 0; m < kStrips; m++) {
        mma_bf16(c[m][n], a[m], {b[0], b[1]});
        mma_bf16(c[m][n + 1], a[m], {b[2], b[3]});
      }
    }
  }
}
template <int kWidth, int kTiles, int kStrips, bool kKept>
__device__ inline void multiply_rows(float (&c)[kStrips][kTiles][4],
                                     const LeftRows<float, kWidth, kKept> (&left)[kStrips],
                                     const float *right) {
  for (int m = 0; m < kStrips; m++) multiply_rows<kWidth>(c[m], left[m], right);
}

/* Numbers that a warp needs to share weights in: none for bf16. */
template <class Operand, int kTiles>
constexpr int shared_weights = sizeof(Operand) == 4 ? 16 * (8 * kTiles + 4) : 0;

/* Weights of 16 columns as the left side of a product. */
__device__ inline void pack_fragment(uint32_t (&a)[4], const float (&w0)[4], const float (&w1)[4]) {
  a[0] = pack_bf16(w0[0], w0[1]);
  a[1] = pack_bf16(w0[2], w0[3]);
  a[2] = pack_bf16(w1[0], w1[1]);
  a[3] = pack_bf16(w1[2], w1[3]);
}

/* out += a . right, right[16][8 kOut] in lines of kWidth. */
template <int kWidth, int kOut>
__device__ inline void add_fragment(float (&out)[kOut][4], const uint32_t (&a)[4],
                                    const bf16 *right) {
  const int lane = lane_of(), matrix = lane / 8;
#pragma unroll
  for (int n = 0; n < kOut; n += 2) {
    uint32_t b[4];
    ldmatrix_x4_trans(
        b, right + (matrix % 2 * 8 + lane % 8) * row_stride<bf16, kWidth> + (n + matrix / 2) * 8);
    mma_bf16(out[n], a, {b[0], b[1]});
    mma_bf16(out[n + 1], a, {b[2], b[3]});
  }
}

/* out += weights . right, right[8 kTiles][kWidth], of which rows from 8 tiles on are left out but
 * for what fills sixteen. share: of the warp, shared_weights numbers. */
template <int kWidth, int kTiles>
__device__ inline void add_weighted(float (&out)[kWidth / 8][4], const float (&weights)[kTiles][4],
                                    const bf16 *right, float *, int tiles = kTiles) {
#pragma unroll
  for (int step = 0; step < kTiles / 2; step++) {
    if (2 * step >= tiles) continue;
    uint32_t a[4];
    pack_fragment(a, weights[2 * step], weights[2 * step + 1]);
    add_fragment<kWidth>(out, a, right + step * 16 * row_stride<bf16, kWidth>);
  }
}

template <int kWidth, int kTiles>
__device__ inline void add_weighted(float (&out)[kWidth / 8][4], const float (&weights)[kTiles][4],
                                    const float *right, float *share, int tiles = kTiles) {
  constexpr int kLine = row_stride<float, kWidth>, kShared = 8 * kTiles + 4;
  const int g = lane_of() / 4, t = lane_of() % 4 * 2;
  __syncwarp(); /* the weights before these have been read */
#pragma unroll
  for (int n = 0; n < kTiles; n++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      share[(g + e / 2 * 8) * kShared + n * 8 + t + e % 2] = weights[n][e];
    }
  }
  __syncwarp();
  for (int k = 0; k < 8 * tiles; k++) {
    const float a0 = share[g * kShared + k], a1 = share[(g + 8) * kShared + k];
#pragma unroll
    for (int n = 0; n < kWidth / 8; n++) {
      const float2 b = *reinterpret_cast<const float2 *>(right + k * kLine + n * 8 + t);
      out[n][0] += a0 * b.x;
      out[n][1] += a0 * b.y;
      out[n][2] += a1 * b.x;
      out[n][3] += a1 * b.y;
    }
  }
}

/* The same for several times sixteen rows. */
template <int kWidth, int kTiles, int kStrips>
__device__ inline void add_weighted(float (&out)[kStrips][kWidth / 8][4],
                                    const float (&weights)[kStrips][kTiles][4], const bf16 *right,
                                    float *) {
  constexpr int kLine = row_stride<bf16, kWidth>;
  const int lane = lane_of(), matrix = lane / 8;
#pragma unroll
  for (int step = 0; step < kTiles / 2; step++) {
    uint32_t a[kStrips][4];
#pragma unroll
    for (int m = 0; m < kStrips; m++) {
      pack_fragment(a[m], weights[m][2 * step], weights[m][2 * step + 1]);
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(
          b, right + (step * 16 + matrix % 2 * 8 + lane % 8) * kLine + (n + matrix / 2) * 8);
#pragma unroll
      for (int m = 0; m < kStrips; m++) {
        mma_bf16(out[m][n], a[m], {b[0], b[1]});
        mma_bf16(out[m][n + 1], a[m], {b[2], b[3]});
      }
    }
  }
}
template <int kWidth, int kTiles, int kStrips>
__device__ inline void add_weighted(float (&out)[kStrips][kWidth / 8][4],
                                    const float (&weights)[kStrips][kTiles][4], const float *right,
                                    float *share) {
  for (int m = 0; m < kStrips; m++) add_weighted<kWidth>(out[m], weights[m], right, share);
}

}  // namespace rpc

#endif
