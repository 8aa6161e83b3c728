/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_runtime_emu.h: the calls of CUDA's runtime that the project makes. Every one of them is done
 * when it returns, which is an order that a GPU may choose; memory.cpp holds them.
 */
#ifndef EMU_CUDA_RUNTIME_EMU_H
#define EMU_CUDA_RUNTIME_EMU_H

/* The numbers are CUDA's. */
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;
  int major, minor, multiProcessorCount;
};
constexpr unsigned cudaStreamDefault = 0, cudaEventDisableTiming = 2;
#define CUDART_VERSION 13000

typedef struct emu_stream *cudaStream_t;
typedef struct emu_event *cudaEvent_t;

const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }

cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t emu_malloc(void **p, size_t bytes);
cudaError_t emu_malloc_host(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaFreeHost(void *p);
template <class T>
inline cudaError_t cudaMalloc(T **p, size_t bytes) {
  return emu_malloc(reinterpret_cast<void **>(p), bytes);
}
template <class T>
inline cudaError_t cudaMallocHost(T **p, size_t bytes) {
  return emu_malloc_host(reinterpret_cast<void **>(p), bytes);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t = nullptr) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t = nullptr) {
  return cudaMemset(to, value, bytes);
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) {
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  *event = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t = nullptr) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }

template <class... P>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int bytes) {
  emu::set_shared_limit(reinterpret_cast<const void *>(kernel), static_cast<size_t>(bytes));
  return cudaSuccess;
}

namespace emu {

/* A launch as the runtime knows it: a fault is an error, and cudaGetErrorString its sentence. */
cudaError_t launch(dim3 grid, dim3 block, size_t bytes, const void *kernel,
                   std::function<void()> body);

/* Device memory is there for the host only while one of these lives. */
class Open {
 public:
  Open();
  ~Open();
  Open(const Open &) = delete;
  Open &operator=(const Open &) = delete;
};

bool find_allocation(const void *p, const char **base, size_t *size);

}  // namespace emu

#endif
