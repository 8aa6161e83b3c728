/* SPDX-License-Identifier: Apache-2.0
 *
 * sums.cu: the sum of every column (a bias's gradient), and what may be done to the numbers on the
 * way; the sum of squares (a gradient's norm), the verdict on a step that follows from it, and
 * setting to zero.
 */
#include <math.h>

#include "gpu.h"
#include "ops/verdict.h"
#include "reduce.h"
#include "rounded.h"

namespace rpc {
namespace {

constexpr int sums_warps = 8;        /* of a block: 128 columns, every eighth row of a piece each */
constexpr int sums_chain = 64;       /* numbers added up in float; these sums in double */
constexpr int sums_resident = 4;     /* blocks on a multiprocessor, for all to be at work */
constexpr int64_t sums_blocks = 512; /* about as many at work */
constexpr int square_threads = 256;

/* What becomes of a number besides: nothing; rounded it is written to `rounded`; what ReLU's
 * backward makes of it is written to `gated` and summed. */
enum class Besides { nothing, rounds, gates };

template <class E>
struct ColumnSums {
  const E *x;
  int64_t x_stride, rows, columns, piece_rows;
  float *partials;
  bf16 *rounded; /* [rows][rounded_stride(columns)] */
  const E *gate; /* ReLU's result where a number has been on its way forward */
  int64_t gate_stride;
  float scale;
  E *gated; /* may be x; rows are x_stride apart */
};

/* Quads of so many rows, from the thread's next one on. */
template <class E, bool wide, bool gates, int quads>
__device__ inline void look_ahead(const ColumnSums<E> &a, int64_t row, int64_t end, int64_t column,
                                  Four (&ahead)[quads], Four (&gate)[quads]) {
  const int64_t left = a.columns - column;
  const E *const x = a.x + row * a.x_stride + column;
  const E *const y = gates ? a.gate + row * a.gate_stride + column : nullptr;
  if (wide && left >= 4 && row + (quads - 1) * sums_warps < end) {
    /* No branch between them: all are on their way at once. */
#pragma unroll
    for (int m = 0; m < quads; m++) {
      ahead[m] = load_four<true>(x + m * sums_warps * a.x_stride, 4);
      if (gates) gate[m] = load_four<true>(y + m * sums_warps * a.gate_stride, 4);
    }
    return;
  }
#pragma unroll
  for (int m = 0; m < quads; m++) {
    const int64_t there = row + m * sums_warps < end ? left : 0;
    ahead[m] = load_four<wide>(x + m * sums_warps * a.x_stride, there);
    if (gates) gate[m] = load_four<wide>(y + m * sums_warps * a.gate_stride, there);
  }
}

/* The quad of dh, as it is read again. */
template <class E>
__device__ inline Four gated_four(const Four &forward, float scale, Four d) {
#pragma unroll
  for (int i = 0; i < 4; i++) d.x[i] = forward.x[i] <= 0 ? 0.0f : __fmul_rn(scale, d.x[i]);
  return sizeof(E) == sizeof(float) ? d : rounded_four(d);
}

/* The sums of one piece of rows over 128 columns. A thread has several rows on their way. */
template <class E, bool wide, Besides besides>
__global__ void __launch_bounds__(32 * sums_warps, sums_resident)
    column_sums_piece(ColumnSums<E> a) {
  __shared__ double sums[sums_warps][4][32];
  const int64_t column = 128 * static_cast<int64_t>(blockIdx.x) + 4 * threadIdx.x;
  const int64_t first = blockIdx.y * a.piece_rows, left = a.columns - column;
  const int64_t end = a.rows - first < a.piece_rows ? a.rows : first + a.piece_rows;
  constexpr bool rounds = besides == Besides::rounds, gates = besides == Besides::gates;
  constexpr int sums_ahead = gates ? 2 : rounds ? 4 : 8; /* are read before they are added */
  const int64_t stride = rounds ? rounded_stride(a.columns) : a.columns;
  double total[4] = {0, 0, 0, 0};
  for (int64_t row = first + threadIdx.y; column < stride && row < end;) {
    Four sum = {{0, 0, 0, 0}};
    for (int n = 0; n < sums_chain && row < end; n += sums_ahead) {
      Four ahead[sums_ahead], forward[sums_ahead];
      look_ahead<E, wide, gates>(a, row, end, column, ahead, forward);
#pragma unroll
      for (int m = 0; m < sums_ahead; m++, row += sums_warps) {
        if (rounds && row < end) store_rounded(a.rounded + row * stride + column, ahead[m]);
        if (gates && row < end) {
          ahead[m] = gated_four<E>(forward[m], a.scale, ahead[m]);
          store_four<wide>(a.gated + row * a.x_stride + column, left, ahead[m]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sum.x[i] += ahead[m].x[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) total[i] += static_cast<double>(sum.x[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sums[threadIdx.y][i][threadIdx.x] = total[i];
  __syncthreads();
  if (threadIdx.y >= 4 || column + threadIdx.y >= a.columns) return;
  double sum = 0;
  for (int warp = 0; warp < sums_warps; warp++) sum += sums[warp][threadIdx.y][threadIdx.x];
  a.partials[blockIdx.y * a.columns + column + threadIdx.y] = static_cast<float>(sum);
}

/* The squares of one block of ops.h. */
template <bool wide>
__global__ void square_sum_block(const float *x, int64_t count, double *sums) {
  __shared__ double shared[square_threads / 32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * RPI_SQUARE_BLOCK;
  const int64_t end = count - first < RPI_SQUARE_BLOCK ? count : first + RPI_SQUARE_BLOCK;
  double sum = 0;
  for (int64_t at = first + 4 * threadIdx.x; at < end; at += 4 * square_threads) {
    const Four one = load_four<wide>(x + at, end - at);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum += static_cast<double>(one.x[i]) * static_cast<double>(one.x[i]);
    }
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

/* *all = the sum of them. */
__global__ void square_sum_all(const double *sums, int64_t blocks, double *all) {
  __shared__ double shared[square_threads / 32];
  double sum = 0;
  for (int64_t b = threadIdx.x; b < blocks; b += square_threads) sum += sums[b];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *all = isfinite(sum) ? sum : static_cast<double>(NAN);
}

/* ---- the verdict ------------------------------------------------------------- */

__global__ void decide_step(rpi_decide_args args) { rpi_decide(&args); }

/* A block looks at one parameter, and at none in a step that is sound. The last parameter that is
 * not is the highest: a maximum of whole numbers is the same in any order. */
__global__ void blame_parameter(rpi_outcome *outcome, const float *gradients,
                                const int64_t *places) {
  __shared__ double shared[square_threads / 32];
  if (outcome->sound != 0 || outcome->losses.bad != 0) return;
  const float *const x = gradients + places[2 * blockIdx.x];
  const int64_t count = places[2 * blockIdx.x + 1];
  double sum = 0;
  for (int64_t at = threadIdx.x; at < count; at += square_threads) {
    sum += static_cast<double>(x[at]) * static_cast<double>(x[at]);
  }
  sum = block_sum(sum, shared);
  const double tokens = static_cast<double>(outcome->losses.tokens);
  if (threadIdx.x == 0 && !rpi_is_sound(sum / (tokens * tokens))) {
    atomicMax(&outcome->bad_gradient, static_cast<int>(blockIdx.x) + 1);
  }
}

/* sum NULL: only what becomes of the numbers is wanted. */
template <class E, Besides besides>
rp_status sum_columns(const rpi_column_sums_args *args, ColumnSums<E> a) {
  const int64_t rows = args->rows, columns = args->columns;
  if (rows == 0 || columns == 0) return RP_OK;
  const int64_t blocks = (columns + 127) / 128;
  /* As many pieces as fill a large device, none of fewer rows than the warps of
   * a block add in a few steps. What fills the device at hand must not count:
   * sums depend on shapes alone. */
  const int64_t wanted = rpi_divide_up(sums_blocks, blocks);
  const int64_t piece_rows =
      rpi_divide_up(rows, rpi_min(rpi_divide_up(rows, 4 * sums_warps), wanted));
  const int64_t pieces = rpi_divide_up(rows, piece_rows);
  a.x = reinterpret_cast<const E *>(args->x);
  a.x_stride = args->x_stride;
  a.rows = rows;
  a.columns = columns;
  a.piece_rows = piece_rows;
  RPI_TRY(scratch(pieces * columns, &a.partials));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(pieces));
  const bool wide =
      is_wide(a.x, a.x_stride) && is_wide(a.gated, a.x_stride) && is_wide(a.gate, a.gate_stride);
  CUDA_TRY(launch(wide ? column_sums_piece<E, true, besides> : column_sums_piece<E, false, besides>,
                  {grid, dim3(32, sums_warps), 0, context().stream}, a));
  if (args->sum == nullptr) return RP_OK;
  return launch_add_partials(a.partials, columns, pieces, columns, {{args->sum}});
}

template <class E>
rp_status sum_behind(const rpi_activation_backward_args *args, const E *gate, int64_t stride,
                     float scale) {
  const rpi_column_sums_args sums = {args->rows, args->columns, args->da, args->columns,
                                     args->dbias};
  ColumnSums<E> a = {};
  a.gate = gate;
  a.gate_stride = stride;
  a.scale = scale;
  a.gated = reinterpret_cast<E *>(args->dh);
  return sum_columns<E, Besides::gates>(&sums, a);
}

}  // namespace

rp_status sum_and_round(const rpi_column_sums_args *args, bf16 *to) {
  ColumnSums<float> a = {};
  a.rounded = to;
  return to != nullptr ? sum_columns<float, Besides::rounds>(args, a)
                       : sum_columns<float, Besides::nothing>(args, a);
}

rp_status sum_rounded(const rpi_column_sums_args *args) {
  return sum_columns<bf16, Besides::nothing>(args, {});
}

rp_status sum_behind_relu(const rpi_activation_backward_args *args, float scale) {
  if (args->element != RP_BF16) return sum_behind<float>(args, args->a, args->columns, scale);
  const RoundedRows a = rounded_rows(args->rounded, args->columns);
  return sum_behind<bf16>(args, a.to, a.stride, scale);
}

rp_status column_sums(const rpi_column_sums_args *args) {
  scratch_begin();
  return sum_and_round(args, nullptr);
}

rp_status square_sum(const real *x, int64_t count, double *workspace, double *sum) {
  const int64_t blocks = rpi_square_blocks(count);
  if (blocks != 0) {
    const dim3 grid(static_cast<unsigned>(blocks));
    CUDA_TRY(launch(is_wide(x, 0) ? square_sum_block<true> : square_sum_block<false>,
                    {grid, dim3(square_threads), 0, context().stream}, x, count, workspace));
  }
  CUDA_TRY(launch(square_sum_all, {dim3(1), dim3(square_threads), 0, context().stream}, workspace,
                  blocks, sum));
  return RP_OK;
}

rp_status decide(const rpi_decide_args *args) {
  CUDA_TRY(launch(decide_step, {dim3(1), dim3(1), 0, context().stream}, *args));
  return RP_OK;
}

rp_status blame(const rpi_blame_args *args) {
  if (args->count == 0) return RP_OK;
  const int64_t *places = nullptr;
  RPI_TRY(stage(args->places, 2 * args->count, &places));
  const dim3 grid(static_cast<unsigned>(args->count));
  CUDA_TRY(launch(blame_parameter, {grid, dim3(square_threads), 0, context().stream}, args->outcome,
                  args->gradients, places));
  return RP_OK;
}

rp_status zero(real *x, int64_t count) {
  if (count == 0) return RP_OK;
  CUDA_TRY(cudaMemsetAsync(x, 0, static_cast<size_t>(count) * sizeof *x, context().stream));
  return RP_OK;
}

}  // namespace rpc
