/* SPDX-License-Identifier: Apache-2.0
 *
 * gpu.h: the front door of device code. Under nvcc it is CUDA; under a plain C++ compiler the same
 * sources run on the CPU, by tests/emulator.
 *
 * Only this header, ptx.h and blas.h know which of the two it is.
 */
#ifndef RPC_GPU_H
#define RPC_GPU_H

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#else
#include "cuda_emu.h"
#endif

#include <cstddef>
#include <cstdint>

/* A function that stays one: where many places call what is large, nvcc takes minutes to inline it.
 */
#ifdef __CUDACC__
#define RPC_CALLED __noinline__
#else
#define RPC_CALLED __attribute__((noinline)) /* libstdc++ uses the other word */
#endif

/* csrc/ops/schedule.h and verdict.h: compiled for the host and for kernels. */
#define RPI_ANYWHERE static __host__ __device__ inline

namespace rpc {

using bf16 = __nv_bfloat16;

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Launch {
  dim3 grid, block;
  size_t shared = 0; /* bytes of dynamic shared memory */
  cudaStream_t stream = nullptr;
};

/* Dynamic shared memory that takes no leave: of 48 KiB what static memory leaves, whose most beside
 * it is 8 KiB (tests/test_cuda_build.py). */
constexpr size_t shared_without_leave = size_t{40} << 10;

/* launch(kernel<64, true>, {grid, block, shared, stream}, arguments...): arguments become what the
 * kernel's parameters are, and the limit of shared memory is raised where that is needed. To be
 * called within CUDA_TRY. A kernel that fails while it runs is reported here by the emulator, and
 * by the next call that waits on a GPU. */
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), const Launch &l, A... arguments) {
  if (l.shared > shared_without_leave) {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(l.shared));
    if (error != cudaSuccess) return error;
  }
#ifdef __CUDACC__
  /* Its own error: what cudaGetLastError says may be that of a call before, and not ours. */
  cudaLaunchConfig_t config = {};
  config.gridDim = l.grid;
  config.blockDim = l.block;
  config.dynamicSmemBytes = l.shared;
  config.stream = l.stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
#else
  std::tuple<P...> converted(static_cast<P>(arguments)...);
  /* The threads read their parameters from the stack of whoever runs them, maybe later. */
  const auto threads = [=](const emu::Runner &run) {
    const std::tuple<P...> parameters = converted;
    void (*const entry)(P...) = kernel;
    run([&] { std::apply(entry, parameters); });
  };
  return emu::launch(l.grid, l.block, l.shared, reinterpret_cast<const void *>(kernel), threads);
#endif
}

/* The dynamic shared memory of the block: `extern __shared__` is not C++. */
__device__ inline unsigned char *dynamic_smem() {
#ifdef __CUDACC__
  extern __shared__ __align__(1024) unsigned char rpc_shared[];
  return rpc_shared;
#else
  return static_cast<unsigned char *>(emu::shared);
#endif
}

}  // namespace rpc

#endif
