/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_runtime_emu.h: the calls of CUDA's runtime that the project makes. Every one of them is done
 * when it returns, or with EMU_LATE=1 when the host waits for it; a GPU may choose either.
 * memory.cpp holds them.
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
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;
  int major, minor, multiProcessorCount;
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
constexpr unsigned cudaStreamDefault = 0, cudaEventDisableTiming = 2;
#define CUDART_VERSION 13020 /* later than the driver, as the same major version may be */

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
cudaError_t cudaDeviceSynchronize();

/* The calls of the driver that there are: cuDeviceGet, cuDevicePrimaryCtxRetain,
 * cuDevicePrimaryCtxGetState, cuCtxPushCurrent, cuCtxPopCurrent. */
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1
};
constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *result);

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
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream = nullptr);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
/* EMU_CAPTURES=n: the stream with the address n is being captured. */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) {
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);

template <class... P>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int bytes) {
  emu::set_shared_limit(reinterpret_cast<const void *>(kernel), static_cast<size_t>(bytes));
  return cudaSuccess;
}

namespace emu {

/* A launch as the runtime knows it: a fault is an error, and cudaGetErrorString its sentence.
 * `body` hands what a thread does to the one who runs threads. */
using Runner = std::function<void(std::function<void()>)>;
cudaError_t launch(dim3 grid, dim3 block, size_t bytes, const void *kernel,
                   std::function<void(const Runner &)> body);

/* Work for the device: at once, or with EMU_LATE=1 when the host waits. All streams are one. */
void ask(std::function<void()> work);

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
