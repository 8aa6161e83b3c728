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
#include <cstring>
#include <mutex>

#include "blas.h"
#include "isa/devices.h"
#include "library.h"

namespace rpc {

namespace {

constexpr int64_t segment_bytes = int64_t{8} << 20, large_bytes = int64_t{256} << 10;
constexpr int64_t first_scratch = int64_t{4} << 20, alignment = 256;
constexpr int segments = 4, remembered = 64, most_large = 64, most_chunks = 16;

/* What the host had at `from` lies at `place`, on both sides. */
struct Staged {
  const void *from;
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
  bool ready;
  int64_t entries;   /* of the table, that were called */
  cudaEvent_t order; /* between streams */
  Staging staging;
  Scratch scratch;
};

thread_local const rpc_host *host;
State states[most_devices];
thread_local State *selected;

int64_t rounded(int64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

rp_status prepare(State &s, int device) {
  int value = 0;
  s.context.device = device;
  CUDA_TRY(cudaSetDevice(device));
  CUDA_TRY(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device));
  s.context.multiprocessors = value;
  CUDA_TRY(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  s.context.shared_bytes = value;
  /* in step with the default stream, which is where callers that name none work */
  CUDA_TRY(cudaStreamCreateWithFlags(&s.context.stream, cudaStreamDefault));
  CUDA_TRY(cudaEventCreateWithFlags(&s.order, cudaEventDisableTiming));
  s.ready = true;
  return RP_OK;
}

/* The caller's device stays the current one. */
rp_status make_ready(State &s, int device) {
  int before = 0;
  CUDA_TRY(cudaGetDevice(&before));
  const rp_status status = prepare(s, device);
  CUDA_TRY(cudaSetDevice(before));
  return status;
}

/* Both sides of a piece of staging memory. */
rp_status allocate_both(int64_t bytes, char **on_host, char **on_device) {
  const auto size = static_cast<size_t>(bytes);
  if (cudaMallocHost(on_host, size) != cudaSuccess) {
    (void)cudaGetLastError();
    return fail(RP_ERROR_MEMORY, "%lld bytes of page-locked memory cannot be had",
                static_cast<long long>(bytes));
  }
  if (cudaMalloc(on_device, size) == cudaSuccess) return RP_OK;
  (void)cudaGetLastError();
  cudaFreeHost(*on_host);
  *on_host = nullptr;
  return fail(RP_ERROR_MEMORY, "%lld bytes of device memory cannot be had",
              static_cast<long long>(bytes));
}

rp_status begin_staging(Staging &s) {
  if (s.host != nullptr) return RP_OK;
  for (cudaEvent_t &event : s.left) {
    if (event == nullptr) CUDA_TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  return allocate_both(segments * segment_bytes, &s.host, &s.device);
}

bool holds(const Staged &staged, const void *from, int64_t bytes) {
  return staged.from == from && staged.bytes == bytes &&
         std::memcmp(staged.host, from, static_cast<size_t>(bytes)) == 0;
}

/* Fills `staged` from the host and sends it to the device. */
rp_status send(Staged &staged, const void *from, int64_t bytes) {
  staged.from = nullptr; /* until it is there */
  std::memcpy(staged.host, from, static_cast<size_t>(bytes));
  CUDA_TRY(cudaMemcpyAsync(staged.device, staged.host, static_cast<size_t>(bytes),
                           cudaMemcpyHostToDevice, context().stream));
  staged.from = from;
  staged.bytes = bytes;
  return RP_OK;
}

/* To the next segment, whose content nobody remembers from here on. */
rp_status next_segment(Staging &s) {
  CUDA_TRY(cudaEventRecord(s.left[s.segment], context().stream));
  s.segment = (s.segment + 1) % segments;
  s.at = 0;
  CUDA_TRY(cudaEventSynchronize(s.left[s.segment]));
  const char *const begin = s.host + s.segment * segment_bytes;
  for (Staged &staged : s.memory) {
    if (staged.host >= begin && staged.host < begin + segment_bytes) staged.from = nullptr;
  }
  return RP_OK;
}

rp_status stage_small(Staging &s, const void *from, int64_t bytes, const void **to) {
  RPI_TRY(begin_staging(s));
  for (const Staged &staged : s.memory) {
    if (!holds(staged, from, bytes)) continue;
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
  return send(staged, from, bytes);
}

/* A block for `bytes` that this entry does not use already: one that came from the same place, or
 * was not asked for during as many calls as no entry makes, or a new one. */
rp_status find_block(Staging &s, const void *from, int64_t bytes, Block **found) {
  Block *oldest = nullptr;
  for (int i = 0; i < s.blocks; i++) {
    Block &block = s.large[i];
    const bool free = block.entry != selected->entries;
    const bool same = free && block.holds.from == from && block.capacity >= bytes;
    const bool idle = s.calls - block.used > remembered;
    if (same || (idle && block.capacity >= bytes && block.capacity / 2 <= bytes)) {
      *found = &block;
      CUDA_TRY(cudaEventSynchronize(block.copied));
      return RP_OK;
    }
    if (idle && (oldest == nullptr || block.used < oldest->used)) oldest = &block;
  }
  Block fresh{};
  fresh.capacity = rounded(bytes);
  if (oldest != nullptr) { /* of another size */
    CUDA_TRY(cudaStreamSynchronize(context().stream));
    cudaFreeHost(oldest->host);
    CUDA_TRY(cudaFree(oldest->device));
    fresh.copied = oldest->copied;
    *oldest = s.large[--s.blocks];
  } else {
    if (s.blocks == most_large) {
      return fail(RP_ERROR_MEMORY, "one operation was given more than %d large arrays", most_large);
    }
    CUDA_TRY(cudaEventCreateWithFlags(&fresh.copied, cudaEventDisableTiming));
  }
  RPI_TRY(allocate_both(fresh.capacity, &fresh.host, &fresh.device));
  s.large[s.blocks] = fresh;
  *found = &s.large[s.blocks++];
  return RP_OK;
}

rp_status stage_large(Staging &s, const void *from, int64_t bytes, const void **to) {
  for (int i = 0; i < s.blocks; i++) {
    Block &block = s.large[i];
    if (!holds(block.holds, from, bytes)) continue;
    block.used = s.calls;
    block.entry = selected->entries;
    *to = block.device;
    return RP_OK;
  }
  Block *block = nullptr;
  RPI_TRY(find_block(s, from, bytes, &block));
  block->used = s.calls;
  block->entry = selected->entries;
  block->holds.host = block->host;
  block->holds.device = block->device;
  RPI_TRY(send(block->holds, from, bytes));
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
  return fail(RP_ERROR_DEVICE, "cuBLAS: %s (%.*s, %s:%d)", cublasGetStatusString(status),
              static_cast<int>(std::strcspn(what, "(")), what, slash != nullptr ? slash + 1 : file,
              line);
}

rp_status blas_handle(cublasHandle_t *handle) {
  Context &c = context();
  if (c.cublas == nullptr) {
    cublasHandle_t fresh;
    CUBLAS_TRY(cublasCreate(&fresh));
    c.cublas = fresh;
  }
  *handle = static_cast<cublasHandle_t>(c.cublas);
  CUBLAS_TRY(cublasSetStream(*handle, c.stream));
  return RP_OK;
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

Turn::Turn() {
  selected->turn.lock();
  selected->entries++;
  if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
  if (before_ != selected->context.device) (void)cudaSetDevice(selected->context.device);
}

Turn::~Turn() {
  if (before_ >= 0 && before_ != selected->context.device) (void)cudaSetDevice(before_);
  selected->turn.unlock();
}

/* What was asked for before comes first, on either stream. */
static void follow(cudaStream_t after, cudaStream_t before) {
  if (cudaEventRecord(selected->order, before) != cudaSuccess ||
      cudaStreamWaitEvent(after, selected->order, 0) != cudaSuccess) {
    (void)cudaGetLastError();
    (void)cudaStreamSynchronize(before);
  }
}

OnStream::OnStream(void *stream) : before_(context().stream) {
  if (stream == nullptr || stream == before_) return;
  context().stream = static_cast<cudaStream_t>(stream);
  follow(context().stream, before_);
}

OnStream::~OnStream() {
  if (context().stream == before_) return;
  follow(before_, context().stream);
  context().stream = before_;
}

rp_status stage_bytes(const void *from, int64_t bytes, const void **to) {
  *to = nullptr;
  if (from == nullptr) return RP_OK;
  Staging &s = selected->staging;
  s.calls++;
  if (bytes == 0) { /* not NULL: the array is there, and empty */
    RPI_TRY(begin_staging(s));
    *to = s.device;
    return RP_OK;
  }
  return bytes < large_bytes ? stage_small(s, from, bytes, to) : stage_large(s, from, bytes, to);
}

/* Chunks that an earlier entry was given in pieces become one: next time it is enough. */
void scratch_begin() {
  Scratch &s = selected->scratch;
  s.at = 0;
  if (s.chunks < 2) return;
  int64_t all = 0;
  for (int i = 0; i < s.chunks; i++) {
    all += s.bytes[i];
    (void)cudaFree(s.chunk[i]); /* waits for those who use it */
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
    if (s.chunks == most_chunks ||
        cudaMalloc(&s.chunk[s.chunks], static_cast<size_t>(size)) != cudaSuccess) {
      (void)cudaGetLastError();
      return fail(RP_ERROR_MEMORY, "%lld bytes of device memory cannot be had for scratch",
                  static_cast<long long>(size));
    }
    s.bytes[s.chunks++] = size;
    s.at = 0;
  }
  *memory = s.chunk[s.chunks - 1] + s.at;
  s.at += need;
  return RP_OK;
}

}  // namespace rpc
