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

#include <deque>
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

constexpr size_t driver_version = 13000;

/* What asking for memory tells of work that was asked for before. */
cudaError_t fault_before() {
  return setting("EMU_FAULT", 0) != 0 ? cudaErrorLaunchFailure : cudaSuccess;
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
cudaError_t last_error = cudaSuccess, failed = cudaSuccess; /* failed: nobody was told yet */
thread_local int device = 0;
thread_local std::vector<int> pushed; /* devices whose contexts were made current */

/* With EMU_LATE=1: what was asked for and is not done, and how much was, since the beginning. */
std::deque<std::function<void()>> asked;
uint64_t asked_for = 0, done = 0;
std::map<const char *, size_t> locked; /* page-locked memory of the host */

bool is_late() {
  static const bool value = setting("EMU_LATE", 0) != 0;
  return value;
}

/* Does what was asked for, up to that much. */
void catch_up(uint64_t much) {
  while (done < much && !asked.empty()) {
    const auto work = std::move(asked.front());
    asked.pop_front();
    done++;
    try {
      work();
    } catch (const Fault &f) {
      last_fault = f.what();
      last_error = failed = cudaErrorLaunchFailure;
    }
  }
}

int current_device() { return pushed.empty() ? device : pushed.back(); }

/* What the runtime does in every call that needs a context. */
void open_context(int which) { stats.contexts |= uint64_t{1} << which; }

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

void ask(std::function<void()> work) {
  open_context(current_device());
  const std::lock_guard<std::recursive_mutex> lock(turn);
  asked_for++;
  asked.push_back(std::move(work));
  if (!is_late()) catch_up(asked_for);
}

cudaError_t launch(dim3 grid, dim3 block, size_t bytes, const void *kernel,
                   std::function<void(const Runner &)> body) {
  try { /* before it is asked for, as the limits may be others later */
    check_launch(grid, block, bytes, kernel);
  } catch (const Fault &f) {
    last_fault = f.what();
    return last_error = cudaErrorLaunchFailure;
  }
  ask([=] {
    body([&](std::function<void()> thread) { run(grid, block, bytes, std::move(thread)); });
  });
  return std::exchange(failed, cudaSuccess);
}

static bool is_device(const void *p) {
  const std::lock_guard<std::recursive_mutex> lock(turn);
  return memory.base != nullptr && p >= memory.base && p < memory.base + range;
}

static bool is_locked(const void *p) {
  const std::lock_guard<std::recursive_mutex> lock(turn);
  const auto *const at = static_cast<const char *>(p);
  const auto after = locked.upper_bound(at);
  if (after == locked.begin()) return false;
  const auto found = std::prev(after);
  return at < found->first + found->second;
}

/* The host waits for what was asked for; what failed on the way is told here. */
static cudaError_t wait(uint64_t much) {
  const std::lock_guard<std::recursive_mutex> lock(turn);
  stats.waits++;
  catch_up(much);
  return std::exchange(failed, cudaSuccess);
}

}  // namespace emu

using emu::memory, emu::setting;

struct emu_event {
  uint64_t much; /* had been asked for when it was recorded */
};

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
  *version = static_cast<int>(setting("EMU_DRIVER", emu::driver_version));
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 0;
  const auto driver = setting("EMU_DRIVER", emu::driver_version);
  if (driver / 1000 < CUDART_VERSION / 1000) return cudaErrorInsufficientDriver;
  *count = static_cast<int>(setting("EMU_DEVICES", 1));
  return *count != 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int *device) {
  *device = emu::current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  int count;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return error;
  if (device < 0 || device >= count) return cudaErrorInvalidDevice;
  (emu::pushed.empty() ? emu::device : emu::pushed.back()) = device;
  emu::open_context(device);
  return cudaSuccess;
}

/* ---- the driver: a context is the number of its device, from 1 --------------- */

static int emu_device_get(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

static int emu_primary_retain(void **context, int device) {
  *context = reinterpret_cast<void *>(static_cast<uintptr_t>(device) + 1);
  emu::open_context(device);
  return 0;
}

static int emu_primary_state(int device, unsigned *, int *active) {
  *active = (emu::stats.contexts >> device & 1) != 0;
  return 0;
}

static int emu_push(void *context) {
  emu::pushed.push_back(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1);
  return 0;
}

static int emu_pop(void **) {
  if (emu::pushed.empty()) return cudaErrorInvalidValue;
  emu::pushed.pop_back();
  return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  static const std::map<std::string, void *> known = {
      {"cuDeviceGet", reinterpret_cast<void *>(emu_device_get)},
      {"cuDevicePrimaryCtxRetain", reinterpret_cast<void *>(emu_primary_retain)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void *>(emu_primary_state)},
      {"cuCtxPushCurrent", reinterpret_cast<void *>(emu_push)},
      {"cuCtxPopCurrent", reinterpret_cast<void *>(emu_pop)}};
  if (version > setting("EMU_DRIVER", emu::driver_version)) return cudaErrorInvalidValue;
  const auto found = known.find(name);
  *function = found != known.end() ? found->second : nullptr;
  *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
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
    case cudaDevAttrL2CacheSize: *value = static_cast<int>(setting("EMU_CACHE", 50 << 20)); break;
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(setting("EMU_SHARED", 227 << 10));
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  emu::open_context(emu::current_device());
  *total = setting("EMU_MEMORY", size_t{8} << 30);
  *free = *total - std::min(*total, memory.bytes);
  return cudaSuccess;
}

cudaError_t emu_malloc(void **p, size_t bytes) {
  const emu::Open open;
  *p = nullptr;
  if (const cudaError_t before = emu::fault_before()) return before;
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
  if (emu::fill_hook != nullptr) emu::fill_hook(*p, bytes, true);
  return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
  if (p == nullptr) return cudaSuccess;
  emu::open_context(emu::current_device());
  (void)emu::wait(emu::asked_for); /* as CUDA does */
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
  emu::open_context(emu::current_device());
  *p = nullptr;
  if (const cudaError_t before = emu::fault_before()) return before;
  *p = std::malloc(bytes != 0 ? bytes : 1);
  if (*p == nullptr) return cudaErrorMemoryAllocation;
  const std::lock_guard<std::recursive_mutex> lock(emu::turn);
  emu::locked[static_cast<char *>(*p)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void *p) {
  emu::open_context(emu::current_device());
  (void)emu::wait(emu::asked_for);
  const std::lock_guard<std::recursive_mutex> lock(emu::turn);
  emu::locked.erase(static_cast<char *>(p));
  std::free(p);
  return cudaSuccess;
}

/* Is a copy one of its kind? CUDA does not say what becomes of others. */
static bool is_directed(const void *to, const void *from, cudaMemcpyKind kind) {
  if (kind == cudaMemcpyDefault) return true;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  return emu::is_device(to) == to_device && emu::is_device(from) == from_device;
}

/* Memory that may be paged out is copied while the host waits. */
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  if (!is_directed(to, from, kind)) return cudaErrorInvalidValue;
  emu::ask([=] {
    const emu::Open open;
    std::memcpy(to, from, bytes);
    if (emu::copy_hook != nullptr) emu::copy_hook(to, from, bytes);
  });
  const bool waits = (kind == cudaMemcpyDeviceToHost && !emu::is_locked(to)) ||
                     (kind == cudaMemcpyHostToDevice && !emu::is_locked(from));
  return waits ? emu::wait(emu::asked_for) : cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
  emu::ask([=] {
    const emu::Open open;
    std::memset(to, value, bytes);
    if (emu::fill_hook != nullptr) emu::fill_hook(to, bytes, false);
  });
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind);
  return error != cudaSuccess ? error : cudaDeviceSynchronize();
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes);
}

cudaError_t cudaDeviceSynchronize() { return emu::wait(emu::asked_for); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return emu::wait(emu::asked_for); }

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
  const bool captured = reinterpret_cast<uintptr_t>(stream) == setting("EMU_CAPTURES", 0);
  *status = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
  emu::open_context(emu::current_device());
  *stream = nullptr;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
  emu::open_context(emu::current_device());
  *event = new emu_event{0};
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  const std::lock_guard<std::recursive_mutex> lock(emu::turn);
  event->much = emu::asked_for;
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) { return emu::wait(event->much); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard<std::recursive_mutex> lock(emu::turn);
  return emu::done >= event->much ? cudaSuccess : cudaErrorNotReady;
}
