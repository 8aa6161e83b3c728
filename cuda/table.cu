/* SPDX-License-Identifier: Apache-2.0
 *
 * table.cu: the table of operations, and the library's door, rpc_open.
 */
#include <cstdio>

#include "context.h"
#include "library.h"

namespace rpc {

namespace {

/* An entry of the table: the operation, in its turn. */
template <auto operation>
struct Entry;
template <class Result, class... Arguments, Result (*operation)(Arguments...)>
struct Entry<operation> {
  static Result call(Arguments... arguments) {
    const Turn turn;
    return operation(arguments...);
  }
};

const rp_ops ops = {
    "cuda",
    false,
    Entry<allocate>::call,
    release, /* from any thread, whatever it has selected */
    Entry<write>::call,
    Entry<read>::call,
    Entry<copy>::call,
    Entry<post>::call,
    Entry<collect>::call,
    Entry<arrived>::call,
    discard, /* as release */
    Entry<round_weights>::call,
    Entry<gemm>::call,
    Entry<linear_backward>::call,
    Entry<attention_workspace>::call,
    Entry<attention_forward>::call,
    Entry<attention_backward>::call,
    Entry<attention_map>::call,
    Entry<rotate>::call,
    Entry<attend_rows>::call,
    Entry<choose>::call,
    Entry<mix>::call,
    Entry<scatter>::call,
    Entry<embed>::call,
    Entry<embed_backward>::call,
    Entry<norm>::call,
    Entry<norm_backward>::call,
    Entry<activation>::call,
    Entry<activation_backward>::call,
    Entry<cross_entropy>::call,
    Entry<losses>::call,
    Entry<column_sums>::call,
    Entry<square_sum>::call,
    Entry<decide>::call,
    Entry<blame>::call,
    Entry<adam>::call,
    Entry<zero>::call,
};

/* "13.0" of 13000. */
struct Version {
  char text[16];
  explicit Version(int number) {
    std::snprintf(text, sizeof text, "%d.%d", number / 1000, number % 1000 / 10);
  }
};

rp_status count(int *devices) {
  *devices = 0;
  int driver = 0, needed = 0;
  (void)cudaDriverGetVersion(&driver);
  (void)cudaRuntimeGetVersion(&needed);
  if (driver == 0) return fail(RP_ERROR_DEVICE, "no NVIDIA driver is installed");
  if (driver / 1000 < needed / 1000) {
    return fail(RP_ERROR_DEVICE, "the NVIDIA driver serves CUDA %s, expected %s or later",
                Version(driver).text, Version(needed / 1000 * 1000).text);
  }
  const cudaError_t error = cudaGetDeviceCount(devices);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && *devices == 0)) {
    (void)cudaGetLastError(); /* it has been seen */
    *devices = 0;
    return fail(RP_ERROR_DEVICE, "the NVIDIA driver finds no GPU");
  }
  CUDA_TRY(error);
  if (*devices > RPI_MOST_GPUS) *devices = RPI_MOST_GPUS;
  return RP_OK;
}

/* Fails for a GPU that cannot be used, after it has said what it is. */
rp_status describe(int index, char *title, int64_t title_bytes, int64_t *memory,
                   int64_t *memory_free) {
  cudaDeviceProp properties;
  CUDA_TRY(cudaGetDeviceProperties(&properties, index));
  std::snprintf(title, static_cast<size_t>(title_bytes), "%s", properties.name);
  *memory = static_cast<int64_t>(properties.totalGlobalMem);
  *memory_free = 0;
  RPI_TRY(check_capability(index));
  /* Asking for it would open a context: the driver is asked where there is one. */
  if (!has_primary(index)) return RP_OK;
  void *primary = nullptr;
  RPI_TRY(open_primary(index, &primary));
  const Current current(primary);
  size_t free = 0, total = 0;
  CUDA_TRY(cudaMemGetInfo(&free, &total));
  *memory_free = static_cast<int64_t>(free);
  return RP_OK;
}

rp_status wait() {
  const Turn turn;
  CUDA_TRY(cudaStreamSynchronize(context().stream));
  return RP_OK;
}

/* What relpos.build_info() finds in the file, which it does not load. */
#define RPC_TEXT(...) #__VA_ARGS__
#define RPC_TEXT_OF(...) RPC_TEXT(__VA_ARGS__)
#ifdef __CUDA_ARCH_LIST__
#define RPC_ARCHITECTURES RPC_TEXT_OF(__CUDA_ARCH_LIST__)
#else
#define RPC_ARCHITECTURES "" /* of the emulator */
#endif
[[maybe_unused]] __attribute__((used)) const char about[] =
    "relpos-cuda " RP_VERSION " CUDA " RPC_TEXT_OF(CUDART_VERSION) " for " RPC_ARCHITECTURES ";";

const rpc_door door = {RP_VERSION, RPC_OPS_BYTES, &ops, count, describe, select, wait, use};

}  // namespace

}  // namespace rpc

extern "C" __attribute__((visibility("default"))) const rpc_door *rpc_open(const rpc_host *host) {
  rpc::use(host);
  return &rpc::door;
}
