/* SPDX-License-Identifier: Apache-2.0
 *
 * twins.cpp: what the PTX instructions of cuda/ptx.h do, written out.
 *
 * mma adds in order in f32. Tensor cores promise neither order nor rounding of the sum: results of
 * a GPU are compared with these by tolerances.
 */
#include "cuda_emu.h"

namespace emu {

namespace {

inline float half_of(uint32_t pair, int half) {
  return bits<float>(half != 0 ? pair & 0xffff0000u : pair << 16);
}

struct Mma {
  float *d;
  const uint32_t *a, *b;
};
struct Load {
  uint32_t *r;
  const void *row;
};

void copy(const Copy &c) {
  if (c.bytes != 0) {
    touch(c.from, c.bytes, read);
    std::memcpy(c.to, c.from, c.bytes);
  }
  std::memset(static_cast<char *>(c.to) + c.bytes, 0, 16 - c.bytes);
}

/* A source of its own: whether a copy is early shall not change the order of threads. */
bool early() {
  static uint64_t state = 0;
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return seed != 0 && (state >> 33 & 1) != 0;
}

}  // namespace

void mma_m16n8k16(float *d, const uint32_t *a, const uint32_t *b, Site at) {
  Mma mine{d, a, b};
  collective(~0u, mine, at, [](Mma **lanes) {
    typedef float Row __attribute__((vector_size(32))); /* 8 numbers: a row of B or of D */
    float A[16][16];
    Row B[16];
    for (int i = 0; i < 32; i++) {
      const int g = i >> 2, t = (i & 3) * 2;
      for (int h = 0; h < 2; h++) {
        for (int r = 0; r < 4; r++) {
          A[g + (r & 1) * 8][t + (r >> 1) * 8 + h] = half_of(lanes[i]->a[r], h);
        }
        for (int r = 0; r < 2; r++) B[t + r * 8 + h][g] = half_of(lanes[i]->b[r], h);
      }
    }
    for (int r = 0; r < 16; r++) {
      Row sum{};
      for (int k = 0; k < 16; k++) sum += A[r][k] * B[k];
      for (int j = 0; j < 8; j++) {
        lanes[(r & 7) * 4 + j / 2]->d[(r >> 3) * 2 + (j & 1)] += sum[j];
      }
    }
    stats.mma++;
  });
}

void ldmatrix(uint32_t *r, int count, bool transposed, const void *row, Site at) {
  if ((reinterpret_cast<uintptr_t>(row) & 15) != 0) {
    fault(at.op, at.file, at.line, "row address not a multiple of 16");
  }
  Load mine{r, row};
  Fiber *const warp = current - current->lane;
  collective(~0u, mine, at, [=](Load **lanes) {
    for (int q = 0; q < count; q++) {
      int banks[8] = {}, worst = 0;
      for (int i = 0; i < 8; i++) {
        const void *const p = lanes[q * 8 + i]->row;
        touch(p, 16, read, warp + q * 8 + i);
        worst = std::max(worst, ++banks[reinterpret_cast<uintptr_t>(p) >> 4 & 7]);
      }
      stats.bank_conflicts += static_cast<uint64_t>(worst - 1);
      for (int i = 0; i < 32; i++) {
        uint16_t v[2];
        for (int h = 0; h < 2; h++) {
          const int y = transposed ? (i & 3) * 2 + h : i >> 2;
          const int x = transposed ? i >> 2 : (i & 3) * 2 + h;
          std::memcpy(&v[h], static_cast<const uint16_t *>(lanes[q * 8 + y]->row) + x, 2);
        }
        lanes[i]->r[q] = v[0] | static_cast<uint32_t>(v[1]) << 16;
      }
    }
    stats.ldmatrix++;
  });
}

/* Done as late as the hardware may do it, at the wait that covers it; with a seed at times as early
 * too. */
void cp_async(void *to, const void *from, int bytes, bool valid, Site at) {
  const auto source = valid ? reinterpret_cast<uintptr_t>(from) : 0;
  if (((reinterpret_cast<uintptr_t>(to) | source) & 15) != 0) {
    fault(at.op, at.file, at.line, "address not a multiple of 16");
  }
  current->at = at;
  touch(to, static_cast<size_t>(bytes), write);
  stats.async_bytes += static_cast<unsigned>(bytes);
  const Copy c{to, from, valid ? static_cast<unsigned>(bytes) : 0, current->group};
  if (early()) copy(c);
  current->copies.push_back(c);
}

void cp_async_commit() { current->group++; }

void cp_async_wait(int pending) {
  auto &copies = current->copies;
  size_t n = 0;
  for (; n < copies.size() && copies[n].group < current->group - pending; n++) {
    touch(copies[n].to, 16, write);
    copy(copies[n]);
  }
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(n));
}

/* What blocks of one launch share by turns counts as atomic. */
void shared_four(float *to, const float *x, bool adds) {
  if ((reinterpret_cast<uintptr_t>(to) & 15) != 0) {
    fault(adds ? "red" : "st", __FILE__, __LINE__, "address not a multiple of 16");
  }
  touch(to, 16, atomic);
  for (int i = 0; i < 4; i++) to[i] = adds ? to[i] + x[i] : x[i];
}

void get_four(float *x, const float *from) {
  touch(from, 16, atomic);
  std::memcpy(x, from, 16);
}

int32_t look_at_turn(const int32_t *turn) {
  touch(turn, sizeof *turn, atomic);
  return *turn;
}

void await_turn(const int32_t *turn, int32_t own, int32_t now) {
  for (; now != own; now = look_at_turn(turn)) yield();
  stats.turns++;
}

void pass_turn(int32_t *turn, int32_t next) {
  touch(turn, sizeof *turn, atomic);
  *turn = next;
}

}  // namespace emu
