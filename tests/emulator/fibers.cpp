/* SPDX-License-Identifier: Apache-2.0
 *
 * fibers.cpp: the threads of a block, and in which order they run. Never built with
 * -fsanitize=thread: race.cpp gives that instrumentation its meaning.
 *
 * The last fiber that became ready goes on first, so that one warp runs ahead of the others as far
 * as it can: that order shows missing barriers, where a fair one keeps all warps level and hides
 * them.
 *
 * A block runs from its beginning to its end, but where blocks wait for each other: those that have
 * drawn a number (cuda/ptx.h) are left where they wait, and with a seed at barriers too, for
 * others.
 */
#include <sys/mman.h>

#include <map>
#include <memory>
#include <numeric>

#include "cuda_emu.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define EMU_ASAN 1
#else
#define EMU_ASAN 0
#endif

/* Saves the callee-saved registers on the old stack, its pointer in *from, and goes on with the
 * stack `to`. swapcontext does the same in 223 ns, with a call of the system; this takes 10. */
extern "C" void emu_switch(void **from, void *to);
#if defined(__x86_64__)
asm(R"(.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
constexpr int return_slot = 6, frame_words = 8;
#elif defined(__aarch64__)
asm(R"(.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,%function
emu_switch:
  sub sp, sp, #176
  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x9, sp; str x9, [x0]; mov sp, x1
  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #176
  ret
)");
constexpr int return_slot = 11, frame_words = 22;
#endif

namespace emu {

Fiber *current = nullptr;
uint3 block_index{};
dim3 block_size, grid_size;
void *shared = nullptr;
size_t shared_size = 0;
unsigned seed = [] {
  const char *text = std::getenv("EMU_SEED");
  return text != nullptr ? static_cast<unsigned>(std::atoi(text)) : 0u;
}();
static const size_t most_blocks = [] {
  const char *text = std::getenv("EMU_BLOCKS");
  return text != nullptr ? static_cast<size_t>(std::max(std::atoi(text), 1)) : size_t{1};
}();
Stats stats{};
void (*access_hook)(const void *, size_t, Access, Fiber *) = nullptr;
void (*sync_hook)(int, unsigned) = nullptr;
void (*start_hook)(bool) = nullptr;
void (*fill_hook)(const void *, size_t, bool) = nullptr;
void (*copy_hook)(const void *, const void *, size_t) = nullptr;

namespace {

constexpr size_t stack_bytes = EMU_ASAN ? 256 << 10 : 64 << 10, page = 4096;
constexpr size_t guard = EMU_ASAN ? 0 : 1024; /* around dynamic shared memory; ASan has its own */
constexpr char guard_byte = '\xa5';
/* A card allows 48 KiB with what is static, which is not known here: cuda/gpu.h leaves it 8. */
constexpr size_t default_shared = 40 << 10, most_shared = 227 << 10;

struct Barrier {
  int arrived = 0, expected = 0;
  bool any = false;
  Site at{};
  std::vector<Fiber *> waiting;
};

/* One that is at work. Kept for others: its fibers have stacks. */
struct Block {
  uint3 index{};
  std::unique_ptr<char, void (*)(void *)> memory{nullptr, std::free}; /* shared, with its guards */
  std::vector<Fiber> fibers;
  std::vector<Fiber *> ready;
  std::vector<unsigned> parked; /* of every warp: lanes that wait in a collective */
  Barrier barriers[16];
  int done = 0;
  bool numbered = false; /* has it drawn a number? */
  uint64_t mma = 0;
};

std::vector<std::unique_ptr<Block>> places_of_blocks; /* EMU_BLOCKS of them */
Block *now = nullptr;
Fiber host;
std::function<void()> body;
std::string failure;
int threads = 0, spins = 0;
uint64_t random_state = 1;
std::map<const void *, size_t> shared_limits;
#if EMU_ASAN
const void *host_bottom = nullptr;
size_t host_size = 0;
#endif

unsigned draw(size_t below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<unsigned>(random_state % below);
}

void go(Fiber *to) {
  Fiber *const me = current != nullptr ? current : &host;
  current = to == &host ? nullptr : to;
#if EMU_ASAN
  const bool ends = me->wait == Wait::done;
  __sanitizer_start_switch_fiber(ends ? nullptr : &me->asan_fake,
                                 to == &host ? host_bottom : to->stack,
                                 to == &host ? host_size : stack_bytes);
#endif
  emu_switch(&me->stack_pointer, to->stack_pointer);
#if EMU_ASAN
  __sanitizer_finish_switch_fiber(me->asan_fake, nullptr, nullptr);
#endif
}

std::string who(const Fiber &f) {
  return "thread " + std::to_string(f.id) + " of block (" + std::to_string(block_index.x) + "," +
         std::to_string(block_index.y) + "," + std::to_string(block_index.z) + ")";
}
std::string place(const Site &at) {
  return std::string(at.op) + " at " + at.file + ":" + std::to_string(at.line);
}

/* Who waits where, at most four of them, when nobody can go on. */
std::string deadlock() {
  std::string why = "deadlock:";
  int shown = 0;
  const Fiber *last = nullptr;
  for (const Fiber &f : now->fibers) {
    if (f.id >= threads) continue;
    const bool same = last != nullptr && last->wait == f.wait &&
                      (f.wait == Wait::done || last->at.line == f.at.line);
    if (same) continue;
    if (shown++ == 4) break;
    why += (shown > 1 ? "; " : " ") + who(f);
    why += f.wait == Wait::done ? " has returned" : " waits in " + place(f.at);
    last = &f;
  }
  return why;
}

/* Leaves the current fiber, which has noted what it waits for. */
void next() {
  std::vector<Fiber *> &ready = now->ready;
  if (ready.empty()) {
    if (now->done != threads) failure = deadlock();
    go(&host);
  }
  const bool cut_in = seed != 0 && seed % 2 == 0 && draw(32) == 0;
  if (cut_in) std::swap(ready[draw(ready.size())], ready.back());
  Fiber *const f = ready.back();
  ready.pop_back();
  if (f != current) go(f);
}

void entry() {
#if EMU_ASAN
  const void *bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
  if (host_bottom == nullptr) host_bottom = bottom, host_size = size;
#endif
  body();
  if (!current->copies.empty()) fault("return", __FILE__, __LINE__, "cp.async still in flight");
  current->wait = Wait::done;
  now->done++;
  next();
  std::abort(); /* nobody goes on with a fiber that is done */
}

void prepare(Fiber &f, int id) {
  if (f.stack == nullptr) {
    void *const memory = mmap(nullptr, stack_bytes + page, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, page, PROT_NONE);
    f.stack = static_cast<char *>(memory) + page;
  }
  const auto i = static_cast<unsigned>(id);
  f.id = id;
  f.lane = id % 32;
  f.warp = id / 32;
  f.place = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
  f.wait = Wait::none;
  f.group = 0;
  f.copies.clear();
#if EMU_ASAN /* the frames of entry() and go() never returned: their red zones are still there */
  __asan_unpoison_memory_region(f.stack + stack_bytes - (16 << 10), 16 << 10);
#endif
  void **const frame = reinterpret_cast<void **>(f.stack + stack_bytes) - frame_words;
  std::fill_n(frame, frame_words, nullptr);
  frame[return_slot] = reinterpret_cast<void *>(&entry);
  f.stack_pointer = frame;
}

void wake(Fiber *f) {
  f->wait = Wait::none;
  now->ready.push_back(f);
}

/* Of those woken last: warps in another order, and lanes. */
void shuffle_ready(size_t from) {
  if (seed == 0) return;
  std::vector<Fiber *> &ready = now->ready;
  for (size_t i = ready.size(); i > from + 1; i--) {
    std::swap(ready[i - 1], ready[from + draw(i - from)]);
  }
  const auto salt = static_cast<uint32_t>(random_state | 1);
  const auto key = [salt](const Fiber *f) {
    return (static_cast<uint32_t>(f->warp) + 1) * 2654435761u * salt;
  };
  std::stable_sort(ready.begin() + static_cast<std::ptrdiff_t>(from), ready.end(),
                   [&](const Fiber *a, const Fiber *b) { return key(a) < key(b); });
}

void begin(Block *block, uint3 index) {
  now = block;
  now->index = index;
  now->done = 0;
  now->numbered = false;
  now->mma = 0;
  now->ready.clear();
  now->parked.assign(32, 0);
  for (Barrier &b : now->barriers) b = Barrier{};
  void *memory = nullptr;
  const size_t bytes = shared_size + 2 * guard + (shared_size == 0);
  if (posix_memalign(&memory, 1024, bytes) != 0) throw std::bad_alloc();
  now->memory.reset(static_cast<char *>(std::memset(memory, guard_byte, bytes)));
  if (shared_size != 0) std::memset(now->memory.get() + guard, 0xff, shared_size); /* NaN */
  if (now->fibers.size() < static_cast<size_t>(threads)) {
    now->fibers.resize(static_cast<size_t>(threads));
  }
  block_index = index;
  for (int i = threads; i-- > 0;) {
    Fiber &f = now->fibers[static_cast<size_t>(i)];
    prepare(f, i);
    now->ready.push_back(&f);
  }
  shuffle_ready(0);
  shared = now->memory.get() + guard;
  if (start_hook != nullptr) start_hook(false);
}

/* Until it ends, waits for another block, or fails. True: it has ended. */
bool go_on(Block *block) {
  now = block;
  block_index = block->index;
  shared = block->memory.get() + guard;
  const uint64_t before = stats.mma;
  next();
  block->mma += stats.mma - before;
  if (!failure.empty() || block->done != threads) return false;
  const auto clean = [](const char *p) {
    return std::all_of(p, p + guard, [](char c) { return c == guard_byte; });
  };
  if (!clean(block->memory.get()) || !clean(block->memory.get() + guard + shared_size)) {
    failure = "a store outside the dynamic shared memory";
  }
  block->memory.reset();
  return true;
}

/* Leaves the block, which goes on with any of its fibers. */
void leave_block() {
  now->ready.insert(now->ready.begin(), current);
  go(&host);
}

}  // namespace

void fault(const char *op, const char *file, int line, const std::string &what) {
  failure = what + " (" + (current != nullptr ? who(*current) + ", " : "") +
            place({op, file, line}) + ")";
  if (current == nullptr) throw Fault(failure);
  go(&host); /* the fiber is left as it is: a fiber cannot be unwound */
  std::abort();
}

bool own_memory(const void *p) {
  const auto in = [&](const Fiber &f) { return p >= f.stack && p < f.stack + stack_bytes; };
  const std::vector<Fiber> &fibers = now->fibers;
  if (in(*current) || (p >= fibers.data() && p < fibers.data() + fibers.size())) return true;
  return std::any_of(fibers.begin(), fibers.end(), in);
}

void check_launch(dim3 grid, dim3 block, size_t bytes, const void *kernel) {
  if (current != nullptr) throw Fault("launch from a kernel");
  const size_t size = static_cast<size_t>(block.x) * block.y * block.z;
  if (size < 1 || size > 1024 || block.z > 64) {
    throw Fault("launch of " + std::to_string(size) + " threads in a block, expected 1 to 1024");
  }
  const auto below = [](unsigned n, unsigned most) { return n >= 1 && n <= most; };
  if (!below(grid.x, 0x7fffffff) || !below(grid.y, 65535) || !below(grid.z, 65535)) {
    throw Fault("launch of a grid of " + std::to_string(grid.x) + " x " + std::to_string(grid.y) +
                " x " + std::to_string(grid.z) + " blocks, expected 1 to 2^31 - 1, 65535, 65535");
  }
  const auto known = shared_limits.find(kernel);
  const size_t limit = known != shared_limits.end() ? known->second : default_shared;
  if (bytes > limit || bytes > most_shared) {
    throw Fault("launch with " + std::to_string(bytes) + " bytes of dynamic shared memory, of " +
                std::to_string(std::min(limit, most_shared)) +
                " allowed; see cudaFuncSetAttribute");
  }
}

void set_shared_limit(const void *kernel, size_t bytes) { shared_limits[kernel] = bytes; }

void run(dim3 grid, dim3 block, size_t bytes, std::function<void()> kernel_body) {
  const Open open;
  stats.launches++;
  threads = static_cast<int>(block.x * block.y * block.z);
  body = std::move(kernel_body);
  block_size = block;
  grid_size = grid;
  shared_size = bytes;
  failure.clear();
#if EMU_ASAN
  host_bottom = nullptr; /* another thread of the system may have launched the last one */
#endif
  random_state = seed * 0x9e3779b97f4a7c15ull + 1;
  spins = 0;
  while (places_of_blocks.size() < most_blocks) {
    places_of_blocks.push_back(std::make_unique<Block>());
  }
  if (start_hook != nullptr) start_hook(true);
  const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y * grid.z;
  uint64_t step = 1, at = 0, begun = 0;
  if (seed != 0 && blocks > 1) { /* every block once, in another order */
    do step = 1 + draw(blocks - 1);
    while (std::gcd(step, blocks) != 1);
    at = draw(blocks);
  }
  uint64_t busy[places] = {};
  std::vector<Block *> free, at_work;
  for (const auto &place : places_of_blocks) free.push_back(place.get());
  if (access_hook != nullptr) free.resize(1); /* the race checker has one clock */
  while (failure.empty() && (begun < blocks || !at_work.empty())) {
    if (begun < blocks && !free.empty()) {
      at_work.push_back(free.back());
      free.pop_back();
      begin(at_work.back(),
            {static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
             static_cast<unsigned>(at / grid.x / grid.y)});
      at = (at + step) % blocks;
      begun++;
    } else {
      const size_t other = seed == 0 ? 0 : draw(at_work.size());
      std::rotate(at_work.begin(), at_work.begin() + static_cast<std::ptrdiff_t>(other) + 1,
                  at_work.end());
    }
    if (!go_on(at_work.back())) continue;
    *std::min_element(busy, busy + places) += at_work.back()->mma;
    free.push_back(at_work.back());
    at_work.pop_back();
  }
  stats.busiest += *std::max_element(busy, busy + places);
  shared = nullptr;
  if (failure.empty()) return;
#if EMU_ASAN /* the fibers that were left have their red zones still */
  for (const auto &place : places_of_blocks) {
    for (const Fiber &f : place->fibers) {
      if (f.stack != nullptr) __asan_unpoison_memory_region(f.stack, stack_bytes);
    }
  }
#endif
  throw Fault(failure);
}

bool barrier(int id, int expected, bool wait, Site at, bool says) {
  Barrier &b = now->barriers[id];
  if (expected == 0) expected = threads;
  if (b.arrived != 0 && b.expected != expected) {
    fault(at.op, at.file, at.line, "barrier with two numbers of threads");
  }
  if (id == 0 && b.arrived != 0 && b.at.line != at.line) {
    fault(at.op, at.file, at.line, "divergent barrier: other threads wait in " + place(b.at));
  }
  b.expected = expected;
  b.at = at;
  current->at = at;
  b.any = b.any || says;
  if (++b.arrived == expected) {
    stats.barriers++;
    if (sync_hook != nullptr) sync_hook(-1, 0);
    const auto all = std::move(b.waiting);
    current->any = b.any;
    b = Barrier{};
    const size_t from = now->ready.size();
    for (size_t i = all.size(); i-- > 0;) {
      all[i]->any = current->any;
      wake(all[i]);
    }
    shuffle_ready(from);
    if (now->numbered && seed != 0 && draw(4) == 0) leave_block();
  } else if (wait) {
    current->wait = Wait::block;
    b.waiting.push_back(current);
    spins = 0;
    next();
  }
  return current->any;
}

void yield() {
  if (++spins > 1000000) fault("yield", __FILE__, __LINE__, "spins without an end");
  leave_block();
}

int32_t draw_number(int32_t *numbers) {
  now->numbered = true;
  return atomicAdd(numbers, 1);
}

bool arrive(unsigned mask, void *argument, Site at, void **all) {
  Fiber *const me = current;
  const unsigned bit = 1u << me->lane;
  if ((mask & bit) == 0) fault(at.op, at.file, at.line, "the calling lane is not in its mask");
  me->mask = mask;
  me->argument = argument;
  me->at = at;
  unsigned &here = now->parked[static_cast<size_t>(me->warp)];
  here |= bit;
  if ((here & mask) != mask) {
    me->wait = Wait::warp;
    next();
    return false;
  }
  for (int i = 0; i < 32; i++) {
    all[i] = nullptr;
    if ((mask >> i & 1) == 0) continue;
    const Fiber &f = now->fibers[static_cast<size_t>(me->warp * 32 + i)];
    if (f.mask != mask || std::strcmp(f.at.op, at.op) != 0) {
      fault(at.op, at.file, at.line,
            "lane " + std::to_string(i) + " waits elsewhere, in " + place(f.at));
    }
    all[i] = f.argument;
  }
  stats.warp_ops++;
  return true;
}

void release(unsigned mask) {
  now->parked[static_cast<size_t>(current->warp)] &= ~mask;
  for (int i = 31; i >= 0; i--) {
    if ((mask >> i & 1) == 0 || i == current->lane) continue;
    wake(&now->fibers[static_cast<size_t>(current->warp * 32 + i)]);
  }
}

}  // namespace emu
