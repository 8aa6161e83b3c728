/* SPDX-License-Identifier: Apache-2.0
 *
 * four.h: rows of numbers read and written four at a time, and how a grid is laid over them.
 *
 *            quad 0       quad 1            last
 *           +-----------+-----------+-----+------+     a thread has a quad of a row: one load of
 *     row   | 0  1  2  3| 4  5  6  7| ... | n    |     16 bytes where rows lie on such borders
 *           +-----------+-----------+-----+------+     (wide), else up to four of 4 bytes; of bf16
 *                                                      half of all that
 *
 * Four columns from a multiple of four have one word of dropout's numbers (philox.h).
 *
 * Where a warp has a row it takes it by strips, in which a thread has several quads, 32 apart: so
 * many loads are on their way at once.
 */
#ifndef RPC_FOUR_H
#define RPC_FOUR_H

#include <math.h>

#include "context.h"
#include "gpu.h"
#include "ptx.h"

namespace rpc {

constexpr unsigned whole_warp = 0xffffffffu;

struct Four {
  float x[4];
};

/* Do rows that start at `data`, `stride` numbers apart, start on borders of 16 bytes? NULL, which
 * is not read, does. */
template <class E>
bool is_wide(const E *data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % (4 * sizeof(E)) == 0 && stride % 4 == 0;
}

/* Two numbers of bf16, the first in the lower half. */
__device__ inline float low_half(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline Four load_rounded(const bf16 *from) {
  const uint2 pairs = *reinterpret_cast<const uint2 *>(from);
  return {{low_half(pairs.x), high_half(pairs.x), low_half(pairs.y), high_half(pairs.y)}};
}

/* One store: of a pair nvcc makes two at times. */
__device__ inline void store_rounded(bf16 *to, const Four &four) {
  const uint64_t low = pack_bf16(four.x[0], four.x[1]), high = pack_bf16(four.x[2], four.x[3]);
  *reinterpret_cast<uint64_t *>(to) = low | high << 32;
}

/* The quad that starts at `from`, of which `count` numbers are there; the others become 0. */
template <bool wide>
__device__ inline Four load_four(const float *from, int64_t count) {
  Four four;
  if (wide && count >= 4) {
    const float4 all = *reinterpret_cast<const float4 *>(from);
    four.x[0] = all.x;
    four.x[1] = all.y;
    four.x[2] = all.z;
    four.x[3] = all.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) four.x[i] = i < count ? from[i] : 0.0f;
  }
  return four;
}

template <bool wide>
__device__ inline Four load_four(const bf16 *from, int64_t count) {
  if (wide && count >= 4) return load_rounded(from);
  Four four;
#pragma unroll
  for (int i = 0; i < 4; i++) four.x[i] = i < count ? static_cast<float>(from[i]) : 0.0f;
  return four;
}

template <bool wide>
__device__ inline void store_four(float *to, int64_t count, const Four &four) {
  if (wide && count >= 4) {
    *reinterpret_cast<float4 *>(to) = make_float4(four.x[0], four.x[1], four.x[2], four.x[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < count) to[i] = four.x[i];
    }
  }
}

template <bool wide>
__device__ inline void store_four(bf16 *to, int64_t count, const Four &four) {
  if (wide && count >= 4) return store_rounded(to, four);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (i < count) to[i] = __float2bfloat16(four.x[i]);
  }
}

/* ---- strips of a warp: blocks are (32, strip_warps) ------------------------------ */

constexpr int strip_warps = 8, strip_quads = 4;
constexpr int64_t strip_columns = 128 * strip_quads;

template <int quads>
struct Strip {
  Four quad[quads];
};

/* The column of a strip where this thread's quad q begins. */
__device__ inline int64_t strip_column(int q) { return 128 * q + 4 * threadIdx.x; }

/* The strip that starts at `from`, of which `count` numbers are there; the others become 0. */
template <int quads, bool wide, class E>
__device__ inline Strip<quads> load_strip(const E *from, int64_t count) {
  Strip<quads> strip;
  if (wide && count >= 128 * quads) {
#pragma unroll
    for (int q = 0; q < quads; q++) strip.quad[q] = load_four<wide>(from + strip_column(q), 4);
  } else {
#pragma unroll
    for (int q = 0; q < quads; q++) {
      strip.quad[q] = load_four<wide>(from + strip_column(q), count - strip_column(q));
    }
  }
  return strip;
}

template <int quads, bool wide, class E>
__device__ inline void store_strip(E *to, int64_t count, const Strip<quads> &strip) {
  if (wide && count >= 128 * quads) {
#pragma unroll
    for (int q = 0; q < quads; q++) store_four<wide>(to + strip_column(q), 4, strip.quad[q]);
  } else {
#pragma unroll
    for (int q = 0; q < quads; q++) {
      store_four<wide>(to + strip_column(q), count - strip_column(q), strip.quad[q]);
    }
  }
}

__device__ inline void add_four(Four &to, const Four &four) {
#pragma unroll
  for (int i = 0; i < 4; i++) to.x[i] += four.x[i];
}

/* What bf16 makes of it. */
__device__ inline Four rounded_four(const Four &four) {
  const uint32_t low = pack_bf16(four.x[0], four.x[1]), high = pack_bf16(four.x[2], four.x[3]);
  return {{low_half(low), high_half(low), low_half(high), high_half(high)}};
}

/* Are the first `count` of them finite? */
__device__ inline bool four_finite(const Four &four, int64_t count) {
  bool fine = true;
#pragma unroll
  for (int i = 0; i < 4; i++) fine = fine && (i >= count || isfinite(four.x[i]));
  return fine;
}

/* Of the codes that are noted the highest stays, which is the same in any order. */
__device__ inline void note_code(const rpi_note &note, int32_t code) {
  if (note.at != nullptr) atomicMax(note.at, code);
}

/* Blocks of 256 threads, x over the quads of a row and y over rows; the grid's x over rows, and a
 * thread goes on to the quad blockDim.x further. */
struct RowGrid {
  dim3 grid, block;
};

inline RowGrid row_grid(int64_t rows, int64_t columns) {
  const int64_t quads = (columns + 3) / 4;
  unsigned across = 1;
  while (across < 256 && across < quads) across *= 2;
  const unsigned down = 256 / across;
  return {dim3(blocks_for(rows, down)), dim3(across, down)};
}

/* A warp for every row. */
inline RowGrid strip_grid(int64_t rows) {
  return {dim3(blocks_for(rows, strip_warps)), dim3(32, strip_warps)};
}

/* The row of this thread; it may be beyond the last. */
__device__ inline int64_t row_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

/* From the last to the first, and then below 0. Rows that were written last may still lie in the
 * second-level cache, and who reads the results from the first row on finds that there. */
__device__ inline int64_t row_from_end(int64_t rows) { return rows - 1 - row_of_thread(); }

}  // namespace rpc

#endif
