/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.h: cuBLAS, or its shim in tests/emulator; and the context's handle.
 */
#ifndef RPC_BLAS_H
#define RPC_BLAS_H

#ifdef __CUDACC__
#include <cublas_v2.h>
#else
#include "cublas_emu.h"
#endif

#include "context.h"

namespace rpc {

/* The context's handle, on its stream; made at the first product. */
rp_status blas_handle(cublasHandle_t *handle);

/* RP_OK, or RP_ERROR_DEVICE with cuBLAS's text and the place. */
rp_status check_blas(cublasStatus_t status, const char *what, const char *file, int line);
#define CUBLAS_TRY(call)                                                                           \
  do {                                                                                             \
    const rp_status rpc_status = rpc::check_blas((call), #call, __FILE__, __LINE__);               \
    if (rpc_status != RP_OK) return rpc_status;                                                    \
  } while (0)

}  // namespace rpc

#endif
