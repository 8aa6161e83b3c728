/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_emu.h: CUDA's execution model on a CPU, so that kernels are tested without a GPU. C++17, GCC
 * or clang, x86-64 or AArch64.
 *
 * Blocks run one after another, but for such as wait for each other (EMU_BLOCKS); the threads of a
 * block are fibers on one thread of the system. In a *warp collective* (shuffle, vote, mma,
 * ldmatrix) each lane parks its argument, and the last one to arrive does the work of all 32. What
 * a GPU would leave undefined is a fault: a barrier that not all reach, a mask that lies, an
 * address that is not aligned, a copy nobody waits for.
 *
 * The environment:
 *   EMU_SEED=n         0, the default: threads in order. Else in an order drawn from n: warps and
 *                      lanes shuffled at every barrier, blocks in another order; if n is even,
 *                      other threads also cut in
 *   EMU_BLOCKS=n       blocks that are at work at once, where blocks wait for each other (1)
 *   EMU_OPEN=1         leaves device memory open to the host (see memory.cpp)
 *   EMU_LATE=1         what is asked of the device is done no sooner than the host waits for it
 *   EMU_CAPTURES=n     the stream with this address is being captured in a CUDA graph
 *   EMU_DEVICES=n      how many GPUs there are (1)
 *   EMU_DRIVER=n       the CUDA that the driver serves (13000); 0: there is no driver
 *   EMU_FAULT=1        whoever asks for memory is told that a kernel before has failed
 *   EMU_MEMORY=n       bytes of every GPU (8 GiB)
 *   EMU_CAPABILITY=n   its compute capability (90)
 *   EMU_CACHE=n        bytes of its cache (50 MiB), which changes nothing but how kernels use it
 *   EMU_SHARED=n       bytes of shared memory that it says a block may have (227 KiB)
 */
#ifndef EMU_CUDA_EMU_H
#define EMU_CUDA_EMU_H

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda_types.h"

#define EMU_NOT_CHECKED __attribute__((no_sanitize("thread")))

namespace emu {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Site {
  const char *op;
  const char *file;
  int line;
};
#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

enum class Wait : uint8_t { none, warp, block, done };

/* A cp.async in flight: 16 bytes, those beyond `bytes` zeros. */
struct Copy {
  void *to;
  const void *from;
  unsigned bytes;
  int group;
};

struct Fiber {
  void *stack_pointer = nullptr;
  char *stack = nullptr;
  void *asan_fake = nullptr;
  uint3 place{};
  int id = 0, lane = 0, warp = 0;
  Wait wait = Wait::none;
  bool any = false; /* what the last barrier was told */
  Site at{};
  unsigned mask = 0;
  void *argument = nullptr;
  std::vector<Copy> copies;
  int group = 0;
};

/* Counted over all launches; tests pin what speed depends on. */
struct Stats {
  uint64_t warp_ops, mma, ldmatrix, bank_conflicts, async_bytes, barriers, launches;
  uint64_t waits;    /* calls in which the host waits for the device */
  uint64_t contexts; /* bit i: one was opened on GPU i */
  /* Blocks are handed out in order, each to the first of `places` that is free: mma of the one that
   * had most to do, of all launches. */
  uint64_t busiest;
  uint64_t bytes; /* of global memory that kernels read and write, under the race checker alone;
                     and of the matrices of products */
  uint64_t turns; /* that threads waited for */
};

extern Fiber *current; /* the running thread, or NULL on the host */
extern uint3 block_index;
extern dim3 block_size, grid_size;
extern void *shared; /* dynamic shared memory of the block */
extern size_t shared_size;
extern unsigned seed;
extern Stats stats;
constexpr size_t places = 8;

/* What race.cpp hangs itself into. */
enum Access { read, write, atomic };
extern void (*access_hook)(const void *, size_t, Access, Fiber *);
extern void (*sync_hook)(int warp, unsigned mask); /* warp < 0: the whole block */
extern void (*start_hook)(bool new_launch);
extern void (*fill_hook)(const void *, size_t, bool fresh); /* fresh: allocated, else written */
extern void (*copy_hook)(const void *to, const void *from, size_t);

[[noreturn]] void fault(const char *op, const char *file, int line, const std::string &what);
void check_launch(dim3 grid, dim3 block, size_t bytes, const void *kernel);
void run(dim3 grid, dim3 block, size_t bytes, std::function<void()> body);
void set_shared_limit(const void *kernel, size_t bytes);
/* says: true where any thread says so, to those that wait */
bool barrier(int id, int threads, bool wait, Site at, bool says = false);
void yield();                                                    /* for loops that spin */
bool arrive(unsigned mask, void *argument, Site at, void **all); /* the last lane: true ... */
void release(unsigned mask);                                     /* ... and it calls this */
bool own_memory(const void *p);                                  /* of a thread: its stack */
inline void touch(const void *p, size_t bytes, Access kind, Fiber *fiber = current) {
  if (access_hook != nullptr) access_hook(p, bytes, kind, fiber);
}

/* Lanes of `mask` meet; the last one runs f(all), where all[i] points at lane i's `mine`. */
template <class T, class F>
inline void collective(unsigned mask, T &mine, Site at, F &&f) {
  void *all[32];
  if (!arrive(mask, &mine, at, all)) return;
  f(reinterpret_cast<T **>(all));
  release(mask);
}

template <class T>
struct Shuffle {
  T value, result;
  int source;
};
template <class T>
inline T shuffle(unsigned mask, T value, int source, Site at) {
  Shuffle<T> mine{value, value, source};
  collective(mask, mine, at, [&](Shuffle<T> **all) {
    for (int i = 0; i < 32; i++) {
      if ((mask >> i & 1) == 0) continue;
      const int j = all[i]->source;
      if ((mask >> j & 1) == 0) {
        fault(at.op, at.file, at.line, "reads lane " + std::to_string(j) + ", not in the mask");
      }
      all[i]->result = all[j]->value;
    }
  });
  return mine.result;
}

struct Vote {
  bool says;
  unsigned all;
};
inline unsigned vote(unsigned mask, bool says, Site at) {
  Vote mine{says, 0};
  collective(mask, mine, at, [&](Vote **all) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) {
      if ((mask >> i & 1) != 0) result |= static_cast<unsigned>(all[i]->says) << i;
    }
    for (int i = 0; i < 32; i++) {
      if ((mask >> i & 1) != 0) all[i]->all = result;
    }
  });
  return mine.all;
}

/* The twins of PTX instructions; cuda/ptx.h has the layouts. */
void mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, Site at);
void ldmatrix(uint32_t *r, int count, bool transposed, const void *row, Site at);
void cp_async(void *to, const void *from, int bytes, bool valid, Site at);
void cp_async_commit();
void cp_async_wait(int pending);
int32_t draw_number(int32_t *numbers);
void shared_four(float *to, const float *x, bool adds);
void get_four(float *x, const float *from);
int32_t look_at_turn(const int32_t *turn);
void await_turn(const int32_t *turn, int32_t own, int32_t now);
void pass_turn(int32_t *turn, int32_t next);

}  // namespace emu

#define threadIdx (emu::current->place)
#define blockIdx (emu::block_index)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)
constexpr int warpSize = 32;

inline void __syncthreads(EMU_SITE) { emu::barrier(0, 0, true, {"__syncthreads", file, line}); }
inline int __syncthreads_or(int says, EMU_SITE) {
  return emu::barrier(0, 0, true, {"__syncthreads_or", file, line}, says != 0);
}
inline void __syncwarp(unsigned mask = ~0u, EMU_SITE) {
  int none = 0;
  emu::collective(mask, none, {"__syncwarp", file, line}, [&](int **) {
    if (emu::sync_hook != nullptr) emu::sync_hook(emu::current->warp, mask);
  });
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_SITE) {
  const int lane = emu::current->lane;
  const int from = (lane & ~(width - 1)) | (source & (width - 1));
  return emu::shuffle(mask, value, from, {"__shfl_sync", file, line});
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, EMU_SITE) {
  const int lane = emu::current->lane, other = lane ^ lanes;
  const int from = (other & ~(width - 1)) > (lane & ~(width - 1)) ? lane : other;
  return emu::shuffle(mask, value, from, {"__shfl_xor_sync", file, line});
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, int lanes, int width = 32, EMU_SITE) {
  const int lane = emu::current->lane;
  const int from = (lane & (width - 1)) + lanes < width ? lane + lanes : lane;
  return emu::shuffle(mask, value, from, {"__shfl_down_sync", file, line});
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, int lanes, int width = 32, EMU_SITE) {
  const int lane = emu::current->lane;
  const int from = (lane & (width - 1)) >= lanes ? lane - lanes : lane;
  return emu::shuffle(mask, value, from, {"__shfl_up_sync", file, line});
}
inline unsigned __ballot_sync(unsigned mask, int says, EMU_SITE) {
  return emu::vote(mask, says != 0, {"__ballot_sync", file, line});
}
inline int __any_sync(unsigned mask, int says, EMU_SITE) {
  return emu::vote(mask, says != 0, {"__any_sync", file, line}) != 0;
}
inline int __all_sync(unsigned mask, int says, EMU_SITE) {
  return emu::vote(mask, says != 0, {"__all_sync", file, line}) == mask;
}

/* One thread of the system runs all fibers, so that a plain read, change and write is atomic. */
#define EMU_ATOMIC(name, after)                                                                    \
  template <class T>                                                                               \
  EMU_NOT_CHECKED inline T name(T *p, std::common_type_t<T> v) {                                   \
    emu::touch(p, sizeof(T), emu::atomic);                                                         \
    const T o = *p;                                                                                \
    *p = (after);                                                                                  \
    return o;                                                                                      \
  }
EMU_ATOMIC(atomicAdd, o + v)
EMU_ATOMIC(atomicSub, o - v)
EMU_ATOMIC(atomicExch, v)
EMU_ATOMIC(atomicMax, o < v ? v : o)
EMU_ATOMIC(atomicMin, v < o ? v : o)
EMU_ATOMIC(atomicOr, (o | v))
EMU_ATOMIC(atomicAnd, (o & v))
#undef EMU_ATOMIC
template <class T>
EMU_NOT_CHECKED inline T atomicCAS(T *p, std::common_type_t<T> compare, std::common_type_t<T> v) {
  emu::touch(p, sizeof(T), emu::atomic);
  const T o = *p;
  if (o == compare) *p = v;
  return o;
}

#include "cuda_runtime_emu.h"

#endif
