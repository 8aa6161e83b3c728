/* SPDX-License-Identifier: Apache-2.0
 *
 * cublas_emu.h: the calls of cuBLAS and cuBLASLt that the project makes, on the CPU: column-major,
 * f32 or bf16, sums in f32. CUBLAS_COMPUTE_32F_FAST_16BF rounds f32 operands to bf16, as cuBLAS
 * may.
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

/* ---- cuBLASLt: a product and ReLU of it ------------------------------------------ */

typedef struct emu_cublas_lt *cublasLtHandle_t;
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_RELU = 2 };
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA = 3,
  CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};
struct cublasLtMatmulDescOpaque_t {
  cublasOperation_t a, b;
  cublasLtEpilogue_t epilogue;
};
struct cublasLtMatrixLayoutOpaque_t {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t stride;
};
struct cublasLtMatmulPreferenceOpaque_t {
  uint32_t borders[4]; /* of A, B, C, D */
};
typedef cublasLtMatmulDescOpaque_t *cublasLtMatmulDesc_t;
typedef cublasLtMatrixLayoutOpaque_t *cublasLtMatrixLayout_t;
typedef cublasLtMatmulPreferenceOpaque_t *cublasLtMatmulPreference_t;
struct cublasLtMatmulAlgo_t {
  uint32_t borders[4]; /* that it counts on */
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
};

inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t of, cublasComputeType_t,
                                             cudaDataType) {
  *of = {CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t of,
                                              cublasLtMatmulDescAttributes_t what,
                                              const void *value, size_t size);
inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t of, cudaDataType type,
                                               uint64_t rows, uint64_t columns, int64_t stride) {
  *of = {type, rows, columns, stride};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t of) {
  *of = {{256, 256, 256, 256}};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t of,
                                                    cublasLtMatmulPreferenceAttributes_t what,
                                                    const void *value, size_t size);
/* One way, for bf16 on borders of 16 bytes, and sums of 16 at least: where there is none is to be
 * tried, too. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t wish, int most,
                                              cublasLtMatmulHeuristicResult_t *ways, int *count);
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                              const void *alpha, const void *a, cublasLtMatrixLayout_t a_layout,
                              const void *b, cublasLtMatrixLayout_t b_layout, const void *beta,
                              const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo,
                              void *workspace, size_t workspace_size, cudaStream_t stream);

#endif
