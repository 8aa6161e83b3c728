/* SPDX-License-Identifier: Apache-2.0
 *
 * linear.cu: the matrix product, by cuBLAS.
 *
 * cuBLAS counts by columns: what we store by rows is the transposed matrix to it. So it computes
 *
 *   C = A . B   as   C' = B' . A'
 *
 * with our B as its first operand, plain where ours is plain, and our strides as its own. A bias is
 * put into C first, and the product added to it.
 *
 * Where operands are to be rounded to bf16, they are packed as such first, rows on borders of 16
 * bytes: each is read and written once, which is little beside a product by tensor cores that
 * finds its operands as it likes them. Sums are f32 in any case, and never TF32.
 */
#include "blas.h"
#include "four.h"

namespace rpc {
namespace {

constexpr int64_t pack_border = 8; /* numbers of 16 bytes in bf16 */

/* One operand as stored: `rows` of `columns` numbers. */
struct Operand {
  const void *data;
  int64_t rows, columns, stride;
  cudaDataType type;
};

/* Every row of C becomes the bias, or has it added. */
template <bool wide>
__global__ void bias_rows(const float *bias, float *c, int64_t c_stride, int64_t rows,
                          int64_t columns, bool accumulate) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  for (int64_t at = 4 * threadIdx.x; at < columns; at += 4 * blockDim.x) {
    Four sum = {{0, 0, 0, 0}};
    if (bias != nullptr) sum = load_four<wide>(bias + at, columns - at);
    float *const to = c + row * c_stride + at;
    if (accumulate) {
      const Four before = load_four<wide>(to, columns - at);
#pragma unroll
      for (int i = 0; i < 4; i++) sum.x[i] += before.x[i];
    }
    store_four<wide>(to, columns - at, sum);
  }
}

/* to[rows][to_stride] = x rounded to bf16; what is beyond the columns becomes 0. */
template <bool wide>
__global__ void pack_rows(const float *x, int64_t stride, int64_t rows, int64_t columns, bf16 *to,
                          int64_t to_stride) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  for (int64_t at = 4 * threadIdx.x; at < to_stride; at += 4 * blockDim.x) {
    const Four four = load_four<wide>(x + row * stride + at, columns - at);
    __nv_bfloat162 *const pairs = reinterpret_cast<__nv_bfloat162 *>(to + row * to_stride + at);
    pairs[0] = __floats2bfloat162_rn(four.x[0], four.x[1]);
    pairs[1] = __floats2bfloat162_rn(four.x[2], four.x[3]);
  }
}

rp_status start_with_bias(const rpi_gemm_args *g) {
  const RowGrid grid = row_grid(g->rows, g->columns);
  const bool wide = is_wide(g->bias, 0) && is_wide(g->c, g->c_stride);
  CUDA_TRY(launch(wide ? bias_rows<true> : bias_rows<false>,
                  {grid.grid, grid.block, 0, context().stream}, g->bias, g->c, g->c_stride, g->rows,
                  g->columns, g->accumulate));
  return RP_OK;
}

/* The operand in bf16, in scratch. */
rp_status pack(Operand *x) {
  const float *const from = static_cast<const float *>(x->data);
  const int64_t stride = (x->columns + pack_border - 1) / pack_border * pack_border;
  bf16 *to = nullptr;
  RPI_TRY(scratch(x->rows * stride, &to));
  const RowGrid g = row_grid(x->rows, stride);
  CUDA_TRY(launch(is_wide(from, x->stride) ? pack_rows<true> : pack_rows<false>,
                  {g.grid, g.block, 0, context().stream}, from, x->stride, x->rows, x->columns, to,
                  stride));
  x->data = to;
  x->stride = stride;
  x->type = CUDA_R_16BF;
  return RP_OK;
}

}  // namespace

rp_status gemm(const rpi_gemm_args *args) {
  const rpi_gemm_args *const g = args;
  if (g->rows == 0 || g->columns == 0) return RP_OK;
  if (g->bias != nullptr || (g->inner == 0 && !g->accumulate)) RPI_TRY(start_with_bias(g));
  if (g->inner == 0) return RP_OK;
  Operand a = {g->a, g->transpose_a ? g->inner : g->rows, g->transpose_a ? g->rows : g->inner,
               g->a_stride, CUDA_R_32F};
  Operand b = {g->b, g->transpose_b ? g->columns : g->inner, g->transpose_b ? g->inner : g->columns,
               g->b_stride, CUDA_R_32F};
  if (g->precision == RP_BF16) {
    scratch_begin();
    RPI_TRY(pack(&a));
    RPI_TRY(pack(&b));
  }
  cublasHandle_t handle = nullptr;
  RPI_TRY(blas_handle(&handle));
  const float one = 1, before = g->accumulate || g->bias != nullptr ? 1.0f : 0.0f;
  CUBLAS_TRY(cublasGemmEx_64(handle, g->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                             g->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, g->columns, g->rows,
                             g->inner, &one, b.data, b.type, b.stride, a.data, a.type, a.stride,
                             &before, g->c, CUDA_R_32F, g->c_stride, CUBLAS_COMPUTE_32F,
                             CUBLAS_GEMM_DEFAULT));
  return RP_OK;
}

}  // namespace rpc
