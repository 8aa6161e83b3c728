/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.cpp: the memory of the emulated GPU, and the calls of the runtime.
 *
 * All of it lies in one range of addresses that the host may neither read nor write but while a
 * kernel or a copy is at work (Open): a host that reaches into device memory dies where it does so.
 * EMU_OPEN=1 leaves it open. New memory is all ones, which is NaN; between two allocations there
 * are bytes that nobody owns, which ASan knows.
 */
#include <sys/mman.h>

#include <map>
#include <mutex>

#include "cuda_emu.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define __asan_poison_memory_region(p, bytes) (void)0
#define __asan_unpoison_memory_region(p, bytes) (void)0
#endif

namespace emu {

namespace {

constexpr size_t range = size_t{64} << 30, alignment = 256, page = 4096;

size_t setting(const char *name, size_t otherwise) {
  const char *const text = std::getenv(name);
  return text != nullptr ? static_cast<size_t>(std::atoll(text)) : otherwise;
}

struct Memory {
  char *base = nullptr;
  size_t top = 0;                      /* what was ever handed out ends here, in whole pages */
  std::map<size_t, size_t> used, gaps; /* place and size; gaps lie below `end` */
  size_t end = 0, bytes = 0;
};
Memory memory;
std::recursive_mutex turn; /* one thread of the system at a time */
int opened = 0;
std::string last_fault;
cudaError_t last_error = cudaSuccess;
thread_local int device = 0;

bool protects() {
  static const bool value = setting("EMU_OPEN", 0) == 0;
  return value;
}

void protect(int allowed) {
  if (!protects() || memory.top == 0) return;
  if (mprotect(memory.base, memory.top, allowed) != 0) std::abort();
}

bool reserve() {
  if (memory.base != nullptr) return true;
  void *const p =
      mmap(nullptr, range, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return false;
  memory.base = static_cast<char *>(p);
  (void)madvise(p, range, MADV_HUGEPAGE); /* else it is protected page by page: slow */
  return true;
}

/* Every allocation takes its own bytes and at least `alignment` that nobody owns. */
size_t room(size_t bytes) { return (bytes + alignment - 1) / alignment * alignment + alignment; }

bool find_gap(size_t need, size_t *place) {
  for (auto gap = memory.gaps.begin(); gap != memory.gaps.end(); ++gap) {
    if (gap->second < need) continue;
    *place = gap->first;
    const size_t rest = gap->second - need;
    memory.gaps.erase(gap);
    if (rest != 0) memory.gaps[*place + need] = rest;
    return true;
  }
  return false;
}

bool extend(size_t need, size_t *place) {
  const size_t end = memory.end + need, top = (end + page - 1) / page * page;
  if (top > range) return false;
  if (top > memory.top) {
    if (mprotect(memory.base + memory.top, top - memory.top, PROT_READ | PROT_WRITE) != 0) {
      return false;
    }
    __asan_poison_memory_region(memory.base + memory.top, top - memory.top);
    memory.top = top;
  }
  *place = memory.end;
  memory.end = end;
  return true;
}

void give_back(size_t place, size_t bytes) {
  auto after = memory.gaps.lower_bound(place);
  if (after != memory.gaps.end() && after->first == place + bytes) {
    bytes += after->second;
    after = memory.gaps.erase(after);
  }
  if (after != memory.gaps.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == place) {
      before->second += bytes;
      return;
    }
  }
  memory.gaps[place] = bytes;
}

}  // namespace

Open::Open() {
  turn.lock();
  if (opened++ == 0) protect(PROT_READ | PROT_WRITE);
}

Open::~Open() {
  if (--opened == 0) protect(PROT_NONE);
  turn.unlock();
}

bool find_allocation(const void *p, const char **base, size_t *size) {
  if (p < memory.base || p >= memory.base + memory.end) return false;
  const auto place = static_cast<size_t>(static_cast<const char *>(p) - memory.base);
  auto found = memory.used.upper_bound(place);
  if (found == memory.used.begin()) return false;
  --found;
  *base = memory.base + found->first;
  *size = found->second;
  return place < found->first + found->second;
}

cudaError_t launch(dim3 grid, dim3 block, size_t bytes, const void *kernel,
                   std::function<void()> body) {
  try {
    run(grid, block, bytes, kernel, std::move(body));
    return cudaSuccess;
  } catch (const Fault &f) {
    last_fault = f.what();
    return last_error = cudaErrorLaunchFailure;
  }
}

}  // namespace emu

using emu::memory, emu::setting;

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorLaunchFailure: return emu::last_fault.c_str();
    default: return "invalid argument";
  }
}

cudaError_t cudaGetLastError() { return std::exchange(emu::last_error, cudaSuccess); }

cudaError_t cudaDriverGetVersion(int *version) {
  *version = static_cast<int>(setting("EMU_DRIVER", CUDART_VERSION));
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 0;
  if (setting("EMU_DRIVER", CUDART_VERSION) < CUDART_VERSION) return cudaErrorInsufficientDriver;
  *count = static_cast<int>(setting("EMU_DEVICES", 1));
  return *count != 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int *device) {
  *device = emu::device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  int count;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return error;
  if (device < 0 || device >= count) return cudaErrorInvalidDevice;
  emu::device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Emulated GPU");
  properties->totalGlobalMem = setting("EMU_MEMORY", size_t{8} << 30);
  properties->major = static_cast<int>(setting("EMU_CAPABILITY", 90)) / 10;
  properties->minor = static_cast<int>(setting("EMU_CAPABILITY", 90)) % 10;
  properties->multiProcessorCount = 4;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, device);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(setting("EMU_SHARED", 227 << 10));
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *total = setting("EMU_MEMORY", size_t{8} << 30);
  *free = *total - std::min(*total, memory.bytes);
  return cudaSuccess;
}

cudaError_t emu_malloc(void **p, size_t bytes) {
  const emu::Open open;
  *p = nullptr;
  size_t place, free, total;
  cudaMemGetInfo(&free, &total);
  if (bytes > free || !emu::reserve()) return cudaErrorMemoryAllocation;
  const size_t need = emu::room(bytes);
  if (!emu::find_gap(need, &place) && !emu::extend(need, &place)) return cudaErrorMemoryAllocation;
  *p = memory.base + place;
  memory.used[place] = bytes;
  memory.bytes += bytes;
  __asan_unpoison_memory_region(*p, bytes);
  std::memset(*p, 0xff, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
  if (p == nullptr) return cudaSuccess;
  const emu::Open open;
  const auto place = static_cast<size_t>(static_cast<char *>(p) - memory.base);
  const auto found = memory.used.find(place);
  if (found == memory.used.end()) return cudaErrorInvalidValue;
  __asan_poison_memory_region(p, found->second);
  memory.bytes -= found->second;
  emu::give_back(place, emu::room(found->second));
  memory.used.erase(found);
  return cudaSuccess;
}

cudaError_t emu_malloc_host(void **p, size_t bytes) {
  *p = std::malloc(bytes != 0 ? bytes : 1);
  return *p != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void *p) {
  std::free(p);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  const emu::Open open;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  const emu::Open open;
  std::memset(to, value, bytes);
  return cudaSuccess;
}
