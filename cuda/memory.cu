/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.cu: memory of the device, and ways to and from it.
 *
 * The host may change what it wrote as soon as `write` returns. Little is staged, so that nobody
 * waits; of much the caller waits until it is gone. What a letter holds comes back without waiting:
 * into page-locked memory, behind which an event is recorded.
 */
#include <cstdlib>
#include <cstring>

#include "context.h"
#include "library.h"

namespace rpc {

namespace {

constexpr int64_t little = int64_t{64} << 10;

/* What was sent to the host lies here once the event says so. */
struct Letter {
  void *host; /* page-locked */
  cudaEvent_t sent;
};

rp_status make_letter(int64_t bytes, Letter **made) {
  Letter *const letter = static_cast<Letter *>(calloc(1, sizeof(Letter)));
  if (letter == nullptr) return RP_ERROR_MEMORY;
  const cudaError_t error = cudaMallocHost(&letter->host, static_cast<size_t>(bytes));
  const cudaError_t event = error == cudaSuccess
                                ? cudaEventCreateWithFlags(&letter->sent, cudaEventDisableTiming)
                                : error;
  if (event == cudaSuccess) {
    *made = letter;
    return RP_OK;
  }
  if (error == cudaSuccess) (void)cudaFreeHost(letter->host);
  free(letter);
  if (event != cudaErrorMemoryAllocation) CUDA_TRY(event);
  (void)cudaGetLastError(); /* it has been seen */
  return RP_ERROR_MEMORY;
}

}  // namespace

rp_status allocate(int64_t bytes, void **memory) {
  *memory = nullptr;
  const cudaError_t error = cudaMalloc(memory, static_cast<size_t>(bytes > 0 ? bytes : 1));
  if (error == cudaSuccess) return RP_OK;
  if (error != cudaErrorMemoryAllocation) CUDA_TRY(error);
  (void)cudaGetLastError(); /* it has been seen */
  return RP_ERROR_MEMORY;
}

void release(void *memory) {
  const Current current(any_primary());
  (void)cudaFree(memory); /* waits for all streams, whoever's they are */
}

rp_status write(void *to, const void *from, int64_t bytes) {
  if (bytes == 0) return RP_OK;
  const auto size = static_cast<size_t>(bytes);
  if (bytes <= little) {
    const void *staged = nullptr;
    RPI_TRY(stage_bytes(from, from, bytes, &staged));
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

rp_status post(void **letter, const void *from, int64_t bytes) {
  Letter *to = static_cast<Letter *>(*letter);
  if (to == nullptr) {
    RPI_TRY(make_letter(bytes, &to));
    *letter = to;
  }
  CUDA_TRY(cudaMemcpyAsync(to->host, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost,
                           context().stream));
  CUDA_TRY(cudaEventRecord(to->sent, context().stream));
  return RP_OK;
}

rp_status collect(void *letter, void *to, int64_t bytes) {
  const Letter *const from = static_cast<Letter *>(letter);
  RPI_TRY(wait_for(from->sent));
  std::memcpy(to, from->host, static_cast<size_t>(bytes));
  return RP_OK;
}

bool arrived(void *letter) { return has_passed(static_cast<Letter *>(letter)->sent); }

void discard(void *letter) {
  Letter *const own = static_cast<Letter *>(letter);
  if (own == nullptr) return;
  const Current current(any_primary());
  (void)cudaEventSynchronize(own->sent); /* nobody writes to it any more */
  (void)cudaEventDestroy(own->sent);
  (void)cudaFreeHost(own->host);
  free(own);
}

}  // namespace rpc
