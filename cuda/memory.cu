/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.cu: memory of the device, and ways to and from it.
 *
 * The host may change what it wrote as soon as `write` returns. Little is staged, so that nobody
 * waits; of much the caller waits until it is gone.
 */
#include "context.h"

namespace rpc {

constexpr int64_t little = int64_t{64} << 10;

rp_status allocate(int64_t bytes, void **memory) {
  *memory = nullptr;
  const cudaError_t error = cudaMalloc(memory, static_cast<size_t>(bytes > 0 ? bytes : 1));
  if (error == cudaSuccess) return RP_OK;
  if (error != cudaErrorMemoryAllocation) CUDA_TRY(error);
  (void)cudaGetLastError(); /* it has been seen */
  return RP_ERROR_MEMORY;
}

void release(void *memory) { (void)cudaFree(memory); }

rp_status write(void *to, const void *from, int64_t bytes) {
  if (bytes == 0) return RP_OK;
  const auto size = static_cast<size_t>(bytes);
  if (bytes <= little) {
    const void *staged = nullptr;
    RPI_TRY(stage_bytes(from, bytes, &staged));
    CUDA_TRY(cudaMemcpyAsync(to, staged, size, cudaMemcpyDeviceToDevice, context().stream));
    return RP_OK;
  }
  CUDA_TRY(cudaMemcpyAsync(to, from, size, cudaMemcpyHostToDevice, context().stream));
  CUDA_TRY(cudaStreamSynchronize(context().stream));
  return RP_OK;
}

rp_status read(void *to, const void *from, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  if (bytes != 0) {
    CUDA_TRY(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToHost, context().stream));
  }
  CUDA_TRY(cudaStreamSynchronize(context().stream));
  return RP_OK;
}

rp_status copy(void *to, const void *from, int64_t bytes) {
  if (bytes == 0) return RP_OK;
  const auto size = static_cast<size_t>(bytes);
  CUDA_TRY(cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, context().stream));
  return RP_OK;
}

}  // namespace rpc
