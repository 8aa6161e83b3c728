/* SPDX-License-Identifier: Apache-2.0
 *
 * race.cpp: finds races, accesses out of bounds and reads of what nobody wrote, copies too.
 *
 * Kernels are compiled with -fsanitize=thread and linked without it: the compiler then calls
 * __tsan_readN and __tsan_writeN before every access to memory, and those functions are these. Two
 * accesses to the same two bytes, one of them a write, must be ordered by a barrier of the block or
 * a __syncwarp; the blocks of one launch are never ordered. Order is judged, not outcome: one run
 * in any order is enough, and a correct kernel is not accused.
 */
#include <dlfcn.h>

#include <memory>
#include <unordered_map>

#include "cuda_emu.h"

/* Where this library or program lies: static shared memory is among its variables. */
extern "C" {
extern char __ehdr_start __attribute__((visibility("hidden")));
extern char _end __attribute__((visibility("hidden")));
}

namespace {

using emu::Fiber;

struct Stamp {
  uint32_t block = 0, clock = 0;
  int16_t thread = -1;
  bool atomic = false;
  uint8_t bytes = 3; /* of the cell's two: bit 0 the first, bit 1 the second */
};
struct Cell {
  Stamp writer, readers[2]; /* the last to write; a first and a last reader since */
};
/* Of one allocation; most of a large one is never touched, so cells are made by pages. */
struct Region {
  static constexpr size_t page = 1024;
  const char *base = nullptr;
  size_t size = 0;
  std::vector<std::unique_ptr<Cell[]>> pages;

  Cell &cell(size_t at) {
    std::unique_ptr<Cell[]> &p = pages[at / page];
    if (p == nullptr) p = std::make_unique<Cell[]>(page);
    return p[at % page];
  }
};

std::unordered_map<const void *, Region> regions;
/* Bytes of an allocation that anybody has written. */
std::unordered_map<const void *, std::vector<char>> written;
uint32_t block = 0, first_block = 0; /* numbered over all launches */
uint32_t clocks[1024], at_barrier[1024];
uint32_t seen[32][32][32]; /* [warp][a][b]: lane a comes after b's accesses below it */
const void *accessing;     /* the instruction, where the compiler called */
const char *host_stack;

void start(bool new_launch) {
  if (new_launch) {
    first_block = block + 1;
    host_stack = static_cast<const char *>(__builtin_frame_address(0));
    return;
  }
  block++;
  std::memset(clocks, 0, sizeof clocks);
  std::memset(at_barrier, 0, sizeof at_barrier);
  std::memset(seen, 0, sizeof seen);
}

void sync(int warp, unsigned mask) {
  if (warp < 0) {
    for (int t = 0; t < 1024; t++) at_barrier[t] = ++clocks[t];
    return;
  }
  uint32_t joined[32] = {};
  for (int b = 0; b < 32; b++) {
    if ((mask >> b & 1) == 0) continue;
    for (int x = 0; x < 32; x++) joined[x] = std::max(joined[x], seen[warp][b][x]);
    joined[b] = std::max(joined[b], ++clocks[warp * 32 + b]);
  }
  for (int a = 0; a < 32; a++) {
    if ((mask >> a & 1) != 0) std::memcpy(seen[warp][a], joined, sizeof joined);
  }
}

bool ordered(const Stamp &s, const Fiber &f, bool in_shared) {
  if (s.thread < 0 || s.block < first_block) return true;
  if (s.block != block) return in_shared;
  if (s.thread == f.id || s.clock < at_barrier[s.thread]) return true;
  return s.thread / 32 == f.warp && s.clock < seen[f.warp][f.lane][s.thread % 32];
}

/* "file:line" of an instruction, or nothing where addr2line cannot tell. */
std::string source_of(const void *instruction) {
  Dl_info module;
  if (dladdr(instruction, &module) == 0 || module.dli_fname == nullptr) return "";
  const auto offset = static_cast<size_t>(static_cast<const char *>(instruction) -
                                          static_cast<const char *>(module.dli_fbase));
  char command[4200], line[512] = "";
  std::snprintf(command, sizeof command, "addr2line -s -e '%s' %#zx 2>/dev/null", module.dli_fname,
                offset - 1);
  if (FILE *const pipe = popen(command, "r")) {
    if (std::fgets(line, sizeof line, pipe) == nullptr) line[0] = '\0';
    pclose(pipe);
  }
  std::string text = line;
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

[[noreturn]] void accuse(const std::string &what) {
  const emu::Site &at = emu::current->at;
  if (accessing == nullptr) emu::fault(at.op, at.file, at.line, "checker: " + what);
  const std::string source = source_of(accessing);
  const size_t colon = source.rfind(':');
  if (colon == std::string::npos) emu::fault("an access", "?", 0, "checker: " + what);
  emu::fault("an access", source.substr(0, colon).c_str(), std::atoi(source.c_str() + colon + 1),
             "checker: " + what);
}

struct Place {
  const char *base;
  size_t size;
  bool shared, dynamic;
};

/* Which memory of the device p lies in; false: it is the host's, and need not be checked. */
bool locate(const void *p, Place *place) {
  const char *const q = static_cast<const char *>(p);
  const char *const dynamic = static_cast<const char *>(emu::shared);
  if (q >= dynamic && q < dynamic + emu::shared_size) {
    *place = {dynamic, emu::shared_size, true, true};
  } else if (q >= &__ehdr_start && q < &_end) {
    *place = {&__ehdr_start, static_cast<size_t>(&_end - &__ehdr_start), true, false};
  } else if (emu::find_allocation(p, &place->base, &place->size)) {
    place->shared = place->dynamic = false;
  } else if (q >= host_stack && q < host_stack + (1 << 20)) {
    return false; /* a launch reads the kernel's arguments there */
  } else if (emu::own_memory(p)) {
    return false; /* a thread's own, or what a warp hands to one of its lanes */
  } else {
    char text[64];
    std::snprintf(text, sizeof text, "access outside device memory, address %p", p);
    accuse(text);
  }
  return true;
}

/* For every byte of the device from p on, was it written? NULL: p is the host's. */
char *written_at(const void *p) {
  const char *base;
  size_t size;
  if (!emu::find_allocation(p, &base, &size)) return nullptr;
  return &written[base][static_cast<size_t>(static_cast<const char *>(p) - base)];
}

void fill(const void *p, size_t bytes, bool fresh) {
  if (fresh) written[p].assign(bytes, 0);
  else if (char *const to = bytes > 0 ? written_at(p) : nullptr) std::memset(to, 1, bytes);
}

/* What nobody has written may move within the device, and not come to the host. */
void copy(const void *to, const void *from, size_t bytes) {
  if (bytes == 0) return;
  char *const target = written_at(to), *const source = written_at(from);
  if (source == nullptr) return fill(to, bytes, false);
  if (target != nullptr) {
    std::memmove(target, source, bytes);
  } else if (const void *const gap = std::memchr(source, 0, bytes)) {
    emu::fault("cudaMemcpyAsync", "?", 0,
               "checker: copy of global memory that nobody has written, offset " +
                   std::to_string(static_cast<const char *>(gap) - source));
  }
}

struct Judge {
  const Fiber &fiber;
  const Place &place;
  Stamp now;
  size_t offset;

  void clash(const Stamp &other, const char *what) const {
    if ((other.bytes & now.bytes) == 0) return;
    if ((other.atomic && now.atomic) || ordered(other, fiber, place.shared)) return;
    accuse(std::string(what) + (place.shared ? " in shared memory" : " in global memory") +
           ", offset " + std::to_string(offset) + ", with thread " + std::to_string(other.thread) +
           (other.block != block ? " of another block" : ""));
  }

  void read(Cell &cell) const {
    if (place.dynamic && cell.writer.block != block) {
      accuse("read of shared memory that this block has not written, offset " +
             std::to_string(offset));
    }
    clash(cell.writer, "read-after-write race");
    Stamp *const r = cell.readers;
    const auto free = [&](const Stamp &s) { return s.thread < 0 || ordered(s, fiber, true); };
    if (free(r[0])) r[0] = now;
    else if (free(r[1]) || r[1].thread / 32 == r[0].thread / 32) r[1] = now;
  }

  void write(Cell &cell) const {
    clash(cell.writer, "write-after-write race");
    clash(cell.readers[0], "write-after-read race");
    clash(cell.readers[1], "write-after-read race");
    cell.writer = now;
    cell.readers[0] = cell.readers[1] = Stamp{};
  }
};

void access(const void *p, size_t bytes, emu::Access kind, Fiber *fiber) {
  Place place;
  if (fiber == nullptr || !locate(p, &place)) return;
  const auto at = static_cast<size_t>(static_cast<const char *>(p) - place.base);
  if (at + bytes > place.size) accuse("access beyond the end of an allocation");
  if (!place.shared) {
    char *const own = &written[place.base][at];
    if (kind != emu::write && std::memchr(own, 0, bytes) != nullptr) {
      accuse("read of global memory that nobody has written, offset " + std::to_string(at));
    }
    if (kind != emu::read) std::memset(own, 1, bytes);
    emu::stats.bytes += bytes;
  }
  Region &region = regions[place.base];
  if (region.base != place.base || region.size != place.size) {
    region.base = place.base;
    region.size = place.size;
    region.pages.clear();
    region.pages.resize(place.size / 2 / Region::page + 1);
  }
  for (size_t c = at / 2; c <= (at + bytes - 1) / 2; c++) {
    const int bytes_of_cell = (2 * c >= at ? 1 : 0) | (2 * c + 1 < at + bytes ? 2 : 0);
    const Stamp now{block, clocks[fiber->id], static_cast<int16_t>(fiber->id), kind == emu::atomic,
                    static_cast<uint8_t>(bytes_of_cell)};
    const Judge judge{*fiber, place, now, c * 2};
    if (kind == emu::read) judge.read(region.cell(c));
    else judge.write(region.cell(c));
  }
}

const bool installed = [] {
  emu::access_hook = access;
  emu::sync_hook = sync;
  emu::start_hook = start;
  emu::fill_hook = fill;
  emu::copy_hook = copy;
  return true;
}();

inline void called(const void *p, size_t bytes, emu::Access kind, const void *from) {
  if (!installed || emu::current == nullptr) return;
  accessing = from;
  access(p, bytes, kind, emu::current);
  accessing = nullptr;
}

}  // namespace

#define HOOK(name, bytes, kind)                                                                    \
  void __tsan_##name(void *p) { called(p, bytes, emu::kind, __builtin_return_address(0)); }
#define HOOKS(n)                                                                                   \
  HOOK(read##n, n, read)                                                                           \
  HOOK(write##n, n, write) HOOK(unaligned_read##n, n, read) HOOK(unaligned_write##n, n, write)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
HOOK(read1, 1, read)
HOOK(write1, 1, write)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void *p, size_t bytes) {
  called(p, bytes, emu::read, __builtin_return_address(0));
}
void __tsan_write_range(void *p, size_t bytes) {
  called(p, bytes, emu::write, __builtin_return_address(0));
}
void __tsan_vptr_update(void *, void *) {}
void __tsan_vptr_read(void *) {}
}
