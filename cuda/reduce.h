/* SPDX-License-Identifier: Apache-2.0
 *
 * reduce.h: sums over a warp and over a block, and sums over the rows of a matrix in two passes;
 * each in an order that the shapes fix, so that the bits are the same every time.
 */
#ifndef RPC_REDUCE_H
#define RPC_REDUCE_H

#include <math.h>

#include "four.h"

namespace rpc {

/* Of all lanes, to all lanes; float or double. */
template <class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(whole_warp, x, apart);
  return x;
}

/* The highest of all lanes, to all lanes; a NaN is passed over. */
__device__ inline float warp_highest(float x) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    x = fmaxf(x, __shfl_xor_sync(whole_warp, x, apart));
  }
  return x;
}

/* Of all threads of a block of whole warps along x, to all threads. shared: one T for each warp; it
 * may be used again at once. */
template <class T>
__device__ inline T block_sum(T x, T *shared) {
  const unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_sum(x);
  if (warps == 1) return x;
  if (threadIdx.x % 32 == 0) shared[warp] = x;
  __syncthreads();
  T sum = 0;
  for (unsigned w = 0; w < warps; w++) sum += shared[w];
  __syncthreads();
  return sum;
}

/* The highest of all threads, to all threads; a NaN is passed over. */
__device__ inline float block_highest(float x, float *shared) {
  const unsigned warp = threadIdx.x / 32, warps = blockDim.x / 32;
  x = warp_highest(x);
  if (warps == 1) return x;
  if (threadIdx.x % 32 == 0) shared[warp] = x;
  __syncthreads();
  for (unsigned w = 0; w < warps; w++) x = fmaxf(x, shared[w]);
  __syncthreads();
  return x;
}

/* ---- a block that has a row of many classes ----------------------------------- */

constexpr unsigned row_threads = 512; /* at most */

inline unsigned threads_of_row(int64_t classes) {
  unsigned threads = 32;
  while (threads < row_threads && 4 * threads < classes) threads *= 2;
  return threads;
}

/* A number and the first class that has it. */
struct Highest {
  float value;
  int32_t at;
};

/* Before all numbers, infinity too. */
__device__ inline Highest no_limit() { return {INFINITY, -1}; }

__device__ inline Highest higher(Highest a, Highest b) {
  return b.value > a.value || (b.value == a.value && b.at < a.at) ? b : a;
}

/* The highest of this thread's classes of a row behind `limit` (lower, or as high and of a later
 * class); class `classes` where there is none. A NaN is passed over. */
template <bool wide>
__device__ inline Highest highest_own(const float *x, int64_t classes, Highest limit) {
  Highest best = {-INFINITY, static_cast<int32_t>(classes)};
  for (int64_t c = 4 * threadIdx.x; c < classes; c += 4 * blockDim.x) {
    const Four four = load_four<wide>(x + c, classes - c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Highest one = {four.x[i], static_cast<int32_t>(c + i)};
      const bool behind =
          one.value < limit.value || (one.value == limit.value && one.at > limit.at);
      if (c + i < classes && behind) best = higher(best, one);
    }
  }
  return best;
}

/* The highest of all threads, to every thread of the block. */
__device__ inline Highest highest_of_block(Highest best) {
  __shared__ float values[row_threads / 32];
  __shared__ int32_t places[row_threads / 32];
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    best = higher(best, {__shfl_xor_sync(whole_warp, best.value, apart),
                         __shfl_xor_sync(whole_warp, best.at, apart)});
  }
  if (blockDim.x == 32) return best;
  if (threadIdx.x % 32 == 0) {
    values[threadIdx.x / 32] = best.value;
    places[threadIdx.x / 32] = best.at;
  }
  __syncthreads();
  best = {values[0], places[0]};
  for (unsigned w = 1; w < blockDim.x / 32; w++) best = higher(best, {values[w], places[w]});
  __syncthreads();
  return best;
}

template <bool wide>
__device__ inline Highest highest_of(const float *x, int64_t classes, Highest limit) {
  return highest_of_block(highest_own<wide>(x, classes, limit));
}

/* ---- sums over rows --------------------------------------------------------
 *
 * Rows are cut into pieces. The first pass leaves the sums of every piece, [pieces][columns]; the
 * second adds these up in double, in the order of the pieces:
 *
 *            32 columns
 *   pieces   |||||||     8 threads, one below the other, take every eighth piece of a column each;
 *      |     |||||||     their sums are then added from first to last
 */
constexpr int partial_columns = 32, partial_rows = 8;

/* Where sums go whose partial ones lie side by side; NULL: nowhere. */
struct Sums {
  float *to[3];
};

/* to[y][column] += the sum of partials[piece][y][column], y the grid's row, `stride` numbers
 * between two pieces. */
static __global__ void add_partials(const float *partials, int64_t stride, int64_t pieces,
                                    int64_t columns, const __grid_constant__ Sums all) {
  __shared__ double sums[partial_rows][partial_columns];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * partial_columns + threadIdx.x;
  float *const to = all.to[blockIdx.y];
  if (to == nullptr) return;
  partials += blockIdx.y * columns;
  double sum = 0;
  for (int64_t piece = threadIdx.y; column < columns && piece < pieces; piece += partial_rows) {
    sum += static_cast<double>(partials[piece * stride + column]);
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int y = 1; y < partial_rows; y++) sum += sums[y][threadIdx.x];
  to[column] += static_cast<float>(sum);
}

inline rp_status launch_add_partials(const float *partials, int64_t stride, int64_t pieces,
                                     int64_t columns, const Sums &all) {
  unsigned count = 1;
  for (unsigned y = 1; y < sizeof all.to / sizeof all.to[0]; y++) {
    if (all.to[y] != nullptr) count = y + 1;
  }
  CUDA_TRY(launch(add_partials,
                  {dim3(blocks_for(columns, partial_columns), count),
                   dim3(partial_columns, partial_rows), 0, context().stream},
                  partials, stride, pieces, columns, all));
  return RP_OK;
}

}  // namespace rpc

#endif
