/* SPDX-License-Identifier: Apache-2.0
 *
 * context.cu: streams, staging memory, scratch, and the sentences of failures.
 *
 * Staging memory is a ring of four segments of page-locked memory, with as much on the device. What
 * is staged is copied into the segment in use and from there to the same place on the device, on
 * the stream, so that device memory is written only after all earlier work has read it. A segment
 * of the host is written again when its copies are done, which the event says that was recorded
 * when the ring left it: three segments ago, so nobody waits. An entry must not stage more than
 * three segments: what is large has a block of its own (`large`).
 *
 *   host    |ids|offsets|lab..|.........|.........|.........|
 *             |     |      |    copies
 *   device  |ids|offsets|lab..|.........|.........|.........|
 */
#include "context.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "blas.h"
#include "isa/devices.h"
#include "library.h"

namespace rpc {

namespace {

constexpr int64_t segment_bytes = int64_t{8} << 20, large_bytes = int64_t{256} << 10;
constexpr int64_t first_scratch = int64_t{4} << 20, alignment = 256;
constexpr int64_t most_large_bytes = int64_t{256} << 20; /* but for what one entry needs */
constexpr int segments = 4, remembered = 64, most_large = 64, most_chunks = 16;

/* What the host gave under a key lies here, on both sides. */
struct Staged {
  const void *key;
  int64_t bytes;
  char *host, *device;
};

struct Block {
  char *host, *device;
  int64_t capacity;
  int64_t used;  /* the call of stage_bytes that used it last */
  int64_t entry; /* and the entry that did */
  Staged holds;
  cudaEvent_t copied;
};

struct Staging {
  char *host, *device;
  int segment;
  int64_t at; /* within the segment */
  cudaEvent_t left[segments];
  Staged memory[remembered];
  int next; /* of memory */
  Block large[most_large];
  int blocks;
  int64_t large_bytes; /* of all of them */
  int64_t calls;
};

struct Scratch {
  char *chunk[most_chunks];
  int64_t bytes[most_chunks];
  int chunks;
  int64_t at; /* within the last chunk */
};

struct State {
  Context context;
  std::mutex turn;
  void *primary; /* the driver's context */
  bool ready;
  int64_t entries;   /* of the table, that were called */
  cudaEvent_t order; /* between streams */
  Staging staging;
  Scratch scratch;
};

thread_local const rpc_host *host;
State states[RPI_MOST_GPUS];
thread_local State *selected;

int64_t rounded(int64_t bytes) { return rpi_round_up(bytes, alignment); }

constexpr int least_major = 8; /* cp.async, and mma.sync with bf16 */

/* As on a device of as few as are wished for: what is chosen by it for large calls alone, small
 * tests choose then too (docs/cuda.md). */
int fewer_multiprocessors(int there) {
  const char *const wish = std::getenv("RELPOS_CUDA_MULTIPROCESSORS");
  const int wished = wish ? std::atoi(wish) : 0;
  return wished > 0 && wished < there ? wished : there;
}

rp_status make_ready(State &s, int device) {
  int value = 0;
  RPI_TRY(check_capability(device));
  s.context.device = device;
  CUDA_TRY(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device));
  s.context.multiprocessors = fewer_multiprocessors(value);
  CUDA_TRY(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  s.context.shared_bytes = value;
  CUDA_TRY(cudaDeviceGetAttribute(&value, cudaDevAttrL2CacheSize, device));
  s.context.cache_bytes = value;
  RPI_TRY(open_primary(device, &s.primary));
  const Current current(s.primary);
  /* in step with the default stream, which is where callers that name none work */
  CUDA_TRY(cudaStreamCreateWithFlags(&s.context.stream, cudaStreamDefault));
  CUDA_TRY(cudaEventCreateWithFlags(&s.order, cudaEventDisableTiming));
  s.ready = true;
  return RP_OK;
}

/* Why memory was not given: there is too little, or something went wrong before, which it tells. */
rp_status not_given(cudaError_t error, int64_t bytes, const char *what) {
  if (error != cudaErrorMemoryAllocation) CUDA_TRY(error);
  (void)cudaGetLastError(); /* it has been seen */
  return fail(RP_ERROR_MEMORY, "cuda:%d: %lld bytes of %s cannot be had", context().device,
              static_cast<long long>(bytes), what);
}

/* Both sides of a piece of staging memory. */
rp_status allocate_both(int64_t bytes, char **on_host, char **on_device) {
  const auto size = static_cast<size_t>(bytes);
  cudaError_t error = cudaMallocHost(on_host, size);
  if (error != cudaSuccess) return not_given(error, bytes, "page-locked memory for staging");
  error = cudaMalloc(on_device, size);
  if (error == cudaSuccess) return RP_OK;
  cudaFreeHost(*on_host);
  *on_host = nullptr;
  return not_given(error, bytes, "device memory for staging");
}

rp_status begin_staging(Staging &s) {
  if (s.host != nullptr) return RP_OK;
  for (cudaEvent_t &event : s.left) {
    if (event == nullptr) CUDA_TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  return allocate_both(segments * segment_bytes, &s.host, &s.device);
}

bool holds(const Staged &staged, const void *key, const void *from, int64_t bytes) {
  return staged.key == key && staged.bytes == bytes &&
         std::memcmp(staged.host, from, static_cast<size_t>(bytes)) == 0;
}

/* Fills `staged` from the host and sends it to the device. */
rp_status send(Staged &staged, const void *key, const void *from, int64_t bytes) {
  staged.key = nullptr; /* until it is there */
  std::memcpy(staged.host, from, static_cast<size_t>(bytes));
  CUDA_TRY(cudaMemcpyAsync(staged.device, staged.host, static_cast<size_t>(bytes),
                           cudaMemcpyHostToDevice, context().stream));
  staged.key = key;
  staged.bytes = bytes;
  return RP_OK;
}

/* To the next segment, whose content nobody remembers from here on. */
rp_status next_segment(Staging &s) {
  CUDA_TRY(cudaEventRecord(s.left[s.segment], context().stream));
  s.segment = (s.segment + 1) % segments;
  s.at = 0;
  RPI_TRY(wait_for(s.left[s.segment]));
  const char *const begin = s.host + s.segment * segment_bytes;
  for (Staged &staged : s.memory) {
    if (staged.host >= begin && staged.host < begin + segment_bytes) staged.key = nullptr;
  }
  return RP_OK;
}

rp_status stage_small(Staging &s, const void *key, const void *from, int64_t bytes,
                      const void **to) {
  RPI_TRY(begin_staging(s));
  for (const Staged &staged : s.memory) {
    if (!holds(staged, key, from, bytes)) continue;
    *to = staged.device;
    return RP_OK;
  }
  if (s.at + bytes > segment_bytes) RPI_TRY(next_segment(s));
  Staged &staged = s.memory[s.next];
  s.next = (s.next + 1) % remembered;
  const int64_t place = s.segment * segment_bytes + s.at;
  s.at += rounded(bytes);
  staged.host = s.host + place;
  staged.device = s.device + place;
  *to = staged.device;
  return send(staged, key, from, bytes);
}

bool fits(const Block &block, int64_t bytes) {
  return block.capacity >= bytes && block.capacity / 2 <= bytes;
}

/* May `bytes` under this key go into a block that this entry does not use? It had this key before,
 * or nobody asked for it during as many calls as no entry makes. */
bool suits(const Staging &s, const Block &block, const void *key, int64_t bytes) {
  if (block.entry == selected->entries || block.capacity < bytes) return false;
  const bool idle = s.calls - block.used > remembered;
  return block.holds.key == key || (idle && fits(block, bytes));
}

void release_block(Staging &s, Block *block) {
  (void)cudaStreamSynchronize(context().stream); /* what reads or writes it was asked for before */
  (void)cudaFree(block->device);
  (void)cudaFreeHost(block->host);
  (void)cudaEventDestroy(block->copied);
  s.large_bytes -= block->capacity;
  *block = s.large[--s.blocks];
}

/* Of those that this entry does not use the one that was used longest ago; NULL: there is none. */
Block *find_oldest(Staging &s) {
  Block *oldest = nullptr;
  for (int i = 0; i < s.blocks; i++) {
    Block &block = s.large[i];
    if (block.entry == selected->entries) continue;
    if (oldest == nullptr || block.used < oldest->used) oldest = &block;
  }
  return oldest;
}

bool is_full(const Staging &s, int64_t bytes) {
  return s.blocks == most_large || s.large_bytes + rounded(bytes) > most_large_bytes;
}

/* One whose copy is done, or a new one, so that nobody waits. Where there are many already, one
 * that is not done; or the one that was used longest ago, whatever its key, or a new one in its
 * place. */
rp_status find_block(Staging &s, const void *key, int64_t bytes, Block **found) {
  Block *busy = nullptr;
  for (int i = 0; i < s.blocks; i++) {
    Block &block = s.large[i];
    if (!suits(s, block, key, bytes)) continue;
    *found = &block;
    if (has_passed(block.copied)) return RP_OK;
    if (busy == nullptr || block.used < busy->used) busy = &block;
  }
  if (busy != nullptr && is_full(s, bytes)) {
    *found = busy;
    return wait_for(busy->copied);
  }
  while (is_full(s, bytes)) {
    Block *const oldest = find_oldest(s);
    if (oldest == nullptr) break; /* this entry needs all of them */
    if (fits(*oldest, bytes)) {
      *found = oldest;
      return wait_for(oldest->copied);
    }
    release_block(s, oldest);
  }
  if (s.blocks == most_large) {
    return fail(RP_ERROR_MEMORY, "one operation was given more than %d large arrays", most_large);
  }
  Block fresh{};
  fresh.capacity = rounded(bytes);
  RPI_TRY(allocate_both(fresh.capacity, &fresh.host, &fresh.device));
  const cudaError_t error = cudaEventCreateWithFlags(&fresh.copied, cudaEventDisableTiming);
  s.large[s.blocks] = fresh;
  s.large_bytes += fresh.capacity;
  *found = &s.large[s.blocks++];
  if (error != cudaSuccess) release_block(s, *found);
  CUDA_TRY(error);
  return RP_OK;
}

rp_status stage_large(Staging &s, const void *key, const void *from, int64_t bytes,
                      const void **to) {
  for (int i = 0; i < s.blocks; i++) {
    Block &block = s.large[i];
    if (!holds(block.holds, key, from, bytes)) continue;
    block.used = s.calls;
    block.entry = selected->entries;
    *to = block.device;
    return RP_OK;
  }
  Block *block = nullptr;
  RPI_TRY(find_block(s, key, bytes, &block));
  block->used = s.calls;
  block->entry = selected->entries;
  block->holds.host = block->host;
  block->holds.device = block->device;
  RPI_TRY(send(block->holds, key, from, bytes));
  CUDA_TRY(cudaEventRecord(block->copied, context().stream));
  *to = block->device;
  return RP_OK;
}

}  // namespace

rp_status fail(rp_status status, const char *format, ...) {
  char sentence[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  return host->fail(status, "%s", sentence);
}

rp_status check(cudaError_t error, const char *what, const char *file, int line) {
  if (error == cudaSuccess) return RP_OK;
  (void)cudaGetLastError(); /* it has been seen */
  const char *const slash = std::strrchr(file, '/');
  /* the call's name alone: arguments make no better sentence */
  return fail(error == cudaErrorMemoryAllocation ? RP_ERROR_MEMORY : RP_ERROR_DEVICE,
              "CUDA: %s (%.*s, %s:%d)", cudaGetErrorString(error),
              static_cast<int>(std::strcspn(what, "(<")), what, slash != nullptr ? slash + 1 : file,
              line);
}

rp_status check_blas(cublasStatus_t status, const char *what, const char *file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return RP_OK;
  const char *const slash = std::strrchr(file, '/');
  const bool memory = status == CUBLAS_STATUS_ALLOC_FAILED;
  return fail(memory ? RP_ERROR_MEMORY : RP_ERROR_DEVICE, "cuBLAS: %s (%.*s, %s:%d)",
              cublasGetStatusString(status), static_cast<int>(std::strcspn(what, "(")), what,
              slash != nullptr ? slash + 1 : file, line);
}

rp_status blas_handle(cublasHandle_t *handle) {
  Context &c = context();
  if (c.cublas == nullptr) {
    cublasHandle_t fresh;
    CUBLAS_TRY(cublasCreate(&fresh));
    c.cublas = fresh;
    /* Parts of a sum are added in f32 where the result is bf16, too. */
    CUBLAS_TRY(cublasSetMathMode(fresh, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
  }
  *handle = static_cast<cublasHandle_t>(c.cublas);
  CUBLAS_TRY(cublasSetStream(*handle, c.stream));
  return RP_OK;
}

rp_status check_capability(int device) {
  int major = 0, minor = 0;
  CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major >= least_major) return RP_OK;
  return fail(RP_ERROR_DEVICE, "its compute capability is %d.%d, expected %d.0 or more", major,
              minor, least_major);
}

void use(const rpc_host *given) { host = given; }

rp_status select(int device) {
  State &s = states[device];
  const std::lock_guard<std::mutex> lock(s.turn);
  if (!s.ready) RPI_TRY(make_ready(s, device));
  selected = &s;
  return RP_OK;
}

Context &context() { return selected->context; }

void *any_primary() {
  if (selected != nullptr) return selected->primary;
  for (State &s : states) {
    const std::lock_guard<std::mutex> lock(s.turn);
    if (s.ready) return s.primary;
  }
  return nullptr;
}

Turn::Turn() : current_((selected->turn.lock(), selected->primary)) { selected->entries++; }

Turn::~Turn() { selected->turn.unlock(); }

/* What was asked for before comes first, on either stream. */
static void follow(cudaStream_t after, cudaStream_t before) {
  if (cudaEventRecord(selected->order, before) != cudaSuccess ||
      cudaStreamWaitEvent(after, selected->order, 0) != cudaSuccess) {
    (void)cudaGetLastError();
    (void)cudaStreamSynchronize(before);
  }
}

static rp_status check_capture(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CUDA_TRY(cudaStreamIsCapturing(stream, &capture));
  if (capture == cudaStreamCaptureStatusNone) return RP_OK;
  return fail(RP_ERROR_DEVICE,
              "the stream is being captured in a CUDA graph, and what the host "
              "gives to this call would not be there when it is replayed");
}

OnStream::OnStream(void *stream) : before_(context().stream) {
  if (stream == nullptr || stream == before_) return;
  status_ = check_capture(static_cast<cudaStream_t>(stream));
  if (status_ != RP_OK) return;
  context().stream = static_cast<cudaStream_t>(stream);
  follow(context().stream, before_);
}

OnStream::~OnStream() {
  if (context().stream == before_) return;
  follow(before_, context().stream);
  context().stream = before_;
}

bool has_passed(cudaEvent_t event) {
  const cudaError_t error = cudaEventQuery(event);
  if (error == cudaErrorNotReady) (void)cudaGetLastError(); /* no error */
  return error == cudaSuccess;
}

rp_status wait_for(cudaEvent_t event) {
  if (!has_passed(event)) CUDA_TRY(cudaEventSynchronize(event));
  return RP_OK;
}

rp_status stage_bytes(const void *key, const void *from, int64_t bytes, const void **to) {
  *to = nullptr;
  if (from == nullptr) return RP_OK;
  Staging &s = selected->staging;
  s.calls++;
  if (bytes == 0) { /* not NULL: the array is there, and empty */
    RPI_TRY(begin_staging(s));
    *to = s.device;
    return RP_OK;
  }
  return bytes < large_bytes ? stage_small(s, key, from, bytes, to)
                             : stage_large(s, key, from, bytes, to);
}

/* Chunks that an earlier entry was given in pieces become one: next time it is enough. */
void scratch_begin() {
  Scratch &s = selected->scratch;
  s.at = 0;
  if (s.chunks < 2) return;
  (void)cudaStreamSynchronize(context().stream); /* for those who use them */
  int64_t all = 0;
  for (int i = 0; i < s.chunks; i++) {
    all += s.bytes[i];
    (void)cudaFree(s.chunk[i]);
  }
  s.chunks = 0;
  if (cudaMalloc(&s.chunk[0], static_cast<size_t>(all)) != cudaSuccess) {
    (void)cudaGetLastError();
    return; /* whoever asks next is told */
  }
  s.bytes[0] = all;
  s.chunks = 1;
}

rp_status scratch_bytes(int64_t bytes, void **memory) {
  Scratch &s = selected->scratch;
  const int64_t need = rounded(bytes);
  if (s.chunks == 0 || s.at + need > s.bytes[s.chunks - 1]) {
    const int64_t size = need > first_scratch ? need : first_scratch;
    const cudaError_t error = s.chunks == most_chunks
                                  ? cudaErrorMemoryAllocation
                                  : cudaMalloc(&s.chunk[s.chunks], static_cast<size_t>(size));
    if (error != cudaSuccess) return not_given(error, size, "device memory for scratch");
    s.bytes[s.chunks++] = size;
    s.at = 0;
  }
  *memory = s.chunk[s.chunks - 1] + s.at;
  s.at += need;
  return RP_OK;
}

}  // namespace rpc
