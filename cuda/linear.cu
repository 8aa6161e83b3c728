/* SPDX-License-Identifier: Apache-2.0
 *
 * linear.cu: the matrix product, by cuBLAS, and the way back of a linear layer, two of them.
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
 * finds its operands as it likes them. The way back packs dy once for both products, and adds up
 * its columns as it passes. Sums are f32 in any case, and never TF32.
 */
#include "blas.h"
#include "ops/linear.h"
#include "rounded.h"

namespace rpc {
namespace {

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

template <bool wide>
__global__ void pack_rows(const float *x, int64_t stride, int64_t rows, int64_t columns, bf16 *to,
                          int64_t to_stride) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  for (int64_t at = 4 * threadIdx.x; at < to_stride; at += 4 * blockDim.x) {
    store_rounded(to + row * to_stride + at, load_four<wide>(x + row * stride + at, columns - at));
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

Operand a_of(const rpi_gemm_args &g) {
  return {g.a, g.transpose_a ? g.inner : g.rows, g.transpose_a ? g.rows : g.inner, g.a_stride,
          CUDA_R_32F};
}

Operand b_of(const rpi_gemm_args &g) {
  return {g.b, g.transpose_b ? g.columns : g.inner, g.transpose_b ? g.inner : g.columns, g.b_stride,
          CUDA_R_32F};
}

/* The operand in bf16, in scratch; with the sums of its columns added to `sum` where that is not
 * NULL. */
rp_status pack(Operand *x, float *sum = nullptr) {
  const float *const from = static_cast<const float *>(x->data);
  const int64_t stride = rounded_stride(x->columns);
  bf16 *to = nullptr;
  RPI_TRY(scratch(x->rows * stride, &to));
  if (sum != nullptr) {
    const rpi_column_sums_args sums = {x->rows, x->columns, from, x->stride, sum};
    RPI_TRY(sum_and_round(&sums, to));
  } else {
    const RowGrid g = row_grid(x->rows, stride);
    CUDA_TRY(launch(is_wide(from, x->stride) ? pack_rows<true> : pack_rows<false>,
                    {g.grid, g.block, 0, context().stream}, from, x->stride, x->rows, x->columns,
                    to, stride));
  }
  *x = {to, x->rows, x->columns, stride, CUDA_R_16BF};
  return RP_OK;
}

/* The product of operands that are what they shall be. */
rp_status multiply(const rpi_gemm_args &g, const Operand &a, const Operand &b) {
  cublasHandle_t handle = nullptr;
  RPI_TRY(blas_handle(&handle));
  const float one = 1, before = g.accumulate || g.bias != nullptr ? 1.0f : 0.0f;
  CUBLAS_TRY(cublasGemmEx_64(handle, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                             g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, g.columns, g.rows, g.inner,
                             &one, b.data, b.type, b.stride, a.data, a.type, a.stride, &before, g.c,
                             CUDA_R_32F, g.c_stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  return RP_OK;
}

}  // namespace

rp_status gemm(const rpi_gemm_args *args) {
  const rpi_gemm_args *const g = args;
  if (g->rows == 0 || g->columns == 0) return RP_OK;
  if (g->bias != nullptr || (g->inner == 0 && !g->accumulate)) RPI_TRY(start_with_bias(g));
  if (g->inner == 0) return RP_OK;
  Operand a = a_of(*g), b = b_of(*g);
  if (g->precision == RP_BF16) {
    scratch_begin();
    RPI_TRY(pack(&a));
    RPI_TRY(pack(&b));
  }
  return multiply(*g, a, b);
}

rp_status linear_backward(const rpi_linear_backward_args *args) {
  const rpi_linear *const l = &args->forward;
  if (l->rows == 0) return RP_OK;
  const rpi_gemm_args to_weight =
      rpi_linear_to_weight(l, args->dy, args->dy_stride, args->dweight, args->precision);
  const rpi_gemm_args to_input =
      rpi_linear_to_input(l, args->dy, args->dy_stride, args->dx, args->add, args->precision);
  Operand dy = a_of(to_weight), x = b_of(to_weight), weight = b_of(to_input);
  scratch_begin();
  if (args->precision == RP_BF16) {
    if (args->rounded) dy = {args->dy, dy.rows, dy.columns, 2 * dy.stride, CUDA_R_16BF};
    else RPI_TRY(pack(&dy, args->dbias));
    RPI_TRY(pack(&x));
  } else if (args->dbias != nullptr) {
    const rpi_column_sums_args sums = {l->rows, l->out, args->dy, args->dy_stride, args->dbias};
    RPI_TRY(sum_and_round(&sums, nullptr));
  }
  RPI_TRY(multiply(to_weight, dy, x));
  if (args->dx == nullptr) return RP_OK;
  if (args->precision == RP_BF16) RPI_TRY(pack(&weight));
  return multiply(to_input, dy, weight);
}

}  // namespace rpc
