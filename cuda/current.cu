/* SPDX-License-Identifier: Apache-2.0
 *
 * current.cu: the few calls of the driver, found by way of the runtime: nothing is linked.
 */
#include "current.h"

#include <mutex>

#include "context.h"

namespace rpc {
namespace {

/* As cuda.h has them. What they return are the runtime's numbers. */
struct Driver {
  int (*get)(int *device, int ordinal);
  int (*retain)(void **context, int device);
  int (*state)(int device, unsigned *flags, int *active);
  int (*push)(void *context);
  int (*pop)(void **context);
  bool there;
};

Driver driver;
std::once_flag once;

/* Of the oldest driver there is for the runtime we build with (count in table.cu). A
 * driver refuses to look up what is of a later version than its own, and the compiler's may be
 * later. */
constexpr unsigned oldest_driver = 13000;

template <class Function>
bool find(const char *name, Function *to) {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, oldest_driver, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return false;
  *to = reinterpret_cast<Function>(found);
  return true;
}

const Driver &the_driver() {
  std::call_once(once, [] {
    driver.there = find("cuDeviceGet", &driver.get) &&
                   find("cuDevicePrimaryCtxRetain", &driver.retain) &&
                   find("cuDevicePrimaryCtxGetState", &driver.state) &&
                   find("cuCtxPushCurrent", &driver.push) && find("cuCtxPopCurrent", &driver.pop);
  });
  return driver;
}

cudaError_t error_of(int result) { return static_cast<cudaError_t>(result); }

}  // namespace

rp_status open_primary(int device, void **primary) {
  const Driver &d = the_driver();
  if (!d.there) return fail(RP_ERROR_DEVICE, "the NVIDIA driver does not say how to open a GPU");
  int handle = 0;
  CUDA_TRY(error_of(d.get(&handle, device)));
  CUDA_TRY(error_of(d.retain(primary, handle)));
  return RP_OK;
}

bool has_primary(int device) {
  const Driver &d = the_driver();
  int handle = 0, active = 0;
  unsigned flags = 0;
  return d.there && d.get(&handle, device) == 0 && d.state(handle, &flags, &active) == 0 &&
         active != 0;
}

Current::Current(void *primary) {
  if (primary != nullptr) pushed_ = the_driver().push(primary) == 0;
}

Current::~Current() {
  void *popped = nullptr;
  if (pushed_) (void)the_driver().pop(&popped);
}

}  // namespace rpc
