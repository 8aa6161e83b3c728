/* SPDX-License-Identifier: Apache-2.0
 *
 * cublas.cpp: the products of cublas_emu.h. Tests multiply matrices far more than anything else, so
 * that both operands are brought into an order that the compiler makes vectors of.
 */
#include "cublas_emu.h"

namespace {

float element(const void *from, cudaDataType type, long long at) {
  return type == CUDA_R_16BF ? static_cast<float>(static_cast<const __nv_bfloat16 *>(from)[at])
                             : static_cast<const float *>(from)[at];
}

uint64_t size_of(cudaDataType type) { return type == CUDA_R_16BF ? 2 : sizeof(float); }

/* Each matrix once, and C twice where it is added to. */
uint64_t bytes_of(uint64_t m, uint64_t n, uint64_t k, cudaDataType operands, cudaDataType result,
                  bool added) {
  return (m + n) * k * size_of(operands) + (added ? 2 : 1) * m * n * size_of(result);
}

/* to[inner][outer] from a column-major operand, `turned`: stored [outer][inner]. */
void unpack(std::vector<float> &to, const void *from, cudaDataType type, long long first,
            int stride, bool turned, int outer, int inner, bool rounded) {
  to.resize(static_cast<size_t>(outer) * static_cast<size_t>(inner));
  for (int l = 0; l < inner; l++) {
    for (int i = 0; i < outer; i++) {
      const long long at =
          turned ? l + static_cast<long long>(i) * stride : i + static_cast<long long>(l) * stride;
      const float x = element(from, type, first + at);
      const size_t place =
          static_cast<size_t>(l) * static_cast<size_t>(outer) + static_cast<size_t>(i);
      to[place] = rounded ? static_cast<float>(__nv_bfloat16(x)) : x;
    }
  }
}

}  // namespace

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t a_turned,
                                          cublasOperation_t b_turned, int m, int n, int k,
                                          const void *alpha, const void *a, cudaDataType a_type,
                                          int a_stride, long long a_batch, const void *b,
                                          cudaDataType b_type, int b_stride, long long b_batch,
                                          const void *beta, void *c, cudaDataType c_type,
                                          int c_stride, long long c_batch, int batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t) {
  const bool a_is_turned = a_turned == CUBLAS_OP_T, b_is_turned = b_turned == CUBLAS_OP_T;
  if (handle == nullptr || m < 0 || n < 0 || k < 0 || batch < 0 ||
      a_stride < std::max(1, a_is_turned ? k : m) || b_stride < std::max(1, b_is_turned ? n : k) ||
      c_stride < std::max(1, m) || a_type != b_type) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const float al = *static_cast<const float *>(alpha), be = *static_cast<const float *>(beta);
  emu::ask([=] {
    const emu::Open open;
    const bool rounded = compute == CUBLAS_COMPUTE_32F_FAST_16BF;
    std::vector<float> x, y, sums(static_cast<size_t>(m));
    emu::stats.bytes +=
        static_cast<uint64_t>(batch) * bytes_of(static_cast<uint64_t>(m), static_cast<uint64_t>(n),
                                                static_cast<uint64_t>(k), a_type, c_type, be != 0);
    for (int z = 0; z < batch; z++) {
      unpack(x, a, a_type, z * a_batch, a_stride, a_is_turned, m, k, rounded);
      unpack(y, b, b_type, z * b_batch, b_stride, !b_is_turned, n, k, rounded);
      for (int j = 0; j < n; j++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int l = 0; l < k; l++) {
          const float factor =
              y[static_cast<size_t>(l) * static_cast<size_t>(n) + static_cast<size_t>(j)];
          const float *const row = &x[static_cast<size_t>(l) * static_cast<size_t>(m)];
          for (int i = 0; i < m; i++) sums[static_cast<size_t>(i)] += row[i] * factor;
        }
        for (int i = 0; i < m; i++) {
          const long long at = z * c_batch + i + static_cast<long long>(j) * c_stride;
          /* beta 0 does not read C */
          const float sum =
              al * sums[static_cast<size_t>(i)] + (be == 0 ? 0 : be * element(c, c_type, at));
          if (c_type == CUDA_R_16BF) static_cast<__nv_bfloat16 *>(c)[at] = sum;
          else static_cast<float *>(c)[at] = sum;
        }
        const auto size = static_cast<long long>(size_of(c_type));
        const long long column = z * c_batch + static_cast<long long>(j) * c_stride;
        if (emu::fill_hook != nullptr) {
          emu::fill_hook(static_cast<char *>(c) + column * size, static_cast<size_t>(m * size),
                         false);
        }
      }
    }
  });
  return CUBLAS_STATUS_SUCCESS;
}
