/* SPDX-License-Identifier: Apache-2.0
 *
 * tile.h: vectors, and what is done with them.
 *
 * An instruction set defines RPI_LANES (reals in a vector) and RPI_VECTORS (of them in a row of
 * what a product holds in registers) before it includes this file. The vector type is GCC's and
 * clang's own, because a product (strips.h) in plain loops reached 105 Gflop/s against 117
 * (one core, AVX-512), and fell to 40 when a row was named in a local array.
 */
#ifndef RPI_TILE_H
#define RPI_TILE_H

#include <stdbool.h>

#include "base/integers.h"
#include "ops/real.h"

#define RPI_STRIP 6
#define RPI_TILE 64 /* keys that a strip of attention meets at once, numbers of a row in a mask */
#define RPI_CACHE_LINE 64 /* bytes, on most machines */

#define RPI_INLINE static inline __attribute__((always_inline))
#define RPI_NOINLINE static __attribute__((noinline))

/* A loop of at most n rounds, known when compiling, without the loop. clang takes GCC's word
 * for it, but unrolls no loop whose rounds are not a multiple of n: sums then lay in memory, and
 * a product took four to eight times as long. */
#if defined(__clang__)
#define RPI_UNROLL(n) _Pragma("clang loop unroll(full)")
#else
#define RPI_TEXT(words) #words
#define RPI_PRAGMA(words) _Pragma(RPI_TEXT(words))
#define RPI_UNROLL(n) RPI_PRAGMA(GCC unroll n)
#endif

/* A statement for every vector v of a row of so many columns: of a whole tile without the loop. */
#define RPI_EACH_VECTOR(v, columns, ...)                                                           \
  if ((columns) == RPI_TILE) {                                                                     \
    RPI_UNROLL(16) for (int64_t v = 0; v < RPI_TILE; v += RPI_LANES) __VA_ARGS__                   \
  } else {                                                                                         \
    for (int64_t v = 0; v < (columns); v += RPI_LANES) __VA_ARGS__                                 \
  }

/* A call of an inline function on so many columns, COLUMNS: compiled once more for a whole tile. */
#define RPI_COLUMNS(columns, ...)                                                                  \
  if ((columns) == RPI_TILE) {                                                                     \
    enum { COLUMNS = RPI_TILE };                                                                   \
    __VA_ARGS__;                                                                                   \
  } else {                                                                                         \
    const int64_t COLUMNS = (columns);                                                             \
    __VA_ARGS__;                                                                                   \
  }

/* Aligned to one element: loads and stores are the unaligned kind, which costs
 * nothing on aligned data. */
typedef real rpi_vector
    __attribute__((vector_size(RPI_LANES * RPI_REAL_BYTES), aligned(RPI_REAL_BYTES), may_alias));
typedef real rpi_register __attribute__((vector_size(RPI_LANES * RPI_REAL_BYTES)));

RPI_INLINE rpi_register rpi_load(const real *from) { return *(const rpi_vector *)from; }
RPI_INLINE void rpi_store(real *to, rpi_register value) { *(rpi_vector *)to = value; }

/* Loads the first `count` reals, zeros beyond. */
RPI_INLINE rpi_register rpi_load_part(const real *from, int64_t count) {
  real whole[RPI_LANES] = {0};
  for (int64_t i = 0; i < count; i++) whole[i] = from[i];
  return rpi_load(whole);
}

/* A vector of what is left of a row, with zeros behind it. */
RPI_INLINE rpi_register rpi_load_left(const real *from, int64_t left) {
  return left >= RPI_LANES ? rpi_load(from) : rpi_load_part(from, left);
}

/* Asks for a line of memory that may be beyond its array: so no pointer is made of it. */
RPI_INLINE void rpi_prefetch(const real *from, int64_t ahead) {
  __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)ahead * sizeof(real)));
}

/* The same, of one that will be written to. */
RPI_INLINE void rpi_prefetch_to(const real *to, int64_t ahead) {
  __builtin_prefetch((const void *)((uintptr_t)to + (uintptr_t)ahead * sizeof(real)), 1);
}

/* The same, of one that the second cache is to have. */
RPI_INLINE void rpi_prefetch_far(const real *from, int64_t ahead) {
  __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)ahead * sizeof(real)), 0, 2);
}

/* Asks for so many bytes of a row of a matrix, wherever a line begins: for those first that lie
 * farthest from what was read before, to their left or (rises) right. The second cache is to have
 * them: rows are often so far apart that the first has few places for all. */
RPI_INLINE void rpi_prefetch_bytes(const void *from, int64_t bytes, bool rises) {
  const uintptr_t at = (uintptr_t)from + (uintptr_t)(rises ? bytes - 1 : 0);
  for (int64_t byte = 0; byte < bytes; byte += RPI_CACHE_LINE) {
    __builtin_prefetch((const void *)(at + (uintptr_t)(rises ? -byte : byte)), 0, 2);
  }
}

/* Asks for all lines of a row. */
#define RPI_LINE (RPI_CACHE_LINE / RPI_REAL_BYTES)
RPI_INLINE void rpi_prefetch_row(const real *from, int64_t ahead, int64_t width) {
  for (int64_t c = 0; c < width; c += RPI_LINE) rpi_prefetch(from, ahead + c);
}
RPI_INLINE void rpi_prefetch_row_far(const real *from, int64_t ahead, int64_t width) {
  for (int64_t c = 0; c < width; c += RPI_LINE) rpi_prefetch_far(from, ahead + c);
}
RPI_INLINE void rpi_prefetch_row_to(const real *to, int64_t ahead, int64_t width) {
  for (int64_t c = 0; c < width; c += RPI_LINE) rpi_prefetch_to(to, ahead + c);
}

/* x between low and high, in general registers: gcc 12 takes vector instructions for it, which
 * wait for those that multiply (bands: 1 to 3 % of attention, two FMA units). */
RPI_INLINE int64_t rpi_clamp(int64_t x, int64_t low, int64_t high) {
  x = rpi_max(x, low);
  __asm__("" : "+r"(x));
  return rpi_min(x, high);
}

/* Has a vector stay in a register: lanes of one that was just loaded gcc loads once more, each by
 * itself. */
#if defined(__x86_64__)
#define RPI_HOLD(vector) __asm__("" : "+x"(vector))
#elif defined(__aarch64__)
#define RPI_HOLD(vector) __asm__("" : "+w"(vector))
#else
#define RPI_HOLD(vector) ((void)0)
#endif

#if RPI_REAL_BYTES == 8
typedef int64_t rpi_lane;
#else
typedef int32_t rpi_lane;
#endif
typedef rpi_lane rpi_lanes __attribute__((vector_size(RPI_LANES * RPI_REAL_BYTES)));

RPI_INLINE rpi_register rpi_blend(rpi_lanes mask, rpi_register with, rpi_register without) {
  return (rpi_register)(((rpi_lanes)with & mask) | ((rpi_lanes)without & ~mask));
}

/* Lane by lane the larger one, b where a is no number. GCC makes one instruction of the loop;
 * clang of the blend, whose maxima of plain loops are vectors only where NaN does not matter. */
RPI_INLINE rpi_register rpi_higher(rpi_register a, rpi_register b) {
#if defined(__clang__)
  return rpi_blend((rpi_lanes)(a > b), a, b);
#else
  rpi_register c;
  for (int l = 0; l < RPI_LANES; l++) c[l] = a[l] > b[l] ? a[l] : b[l];
  return c;
#endif
}

/* Lanes of two vectors by their numbers, in a vector of integers for gcc before 12. */
#if defined(__clang__) || __GNUC__ >= 12
#define RPI_SHUFFLE(integers, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define RPI_SHUFFLE(integers, a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
#endif

/* Interleave the lower and the upper halves of two vectors: a0 b0 a1 b1 ... */
#if RPI_LANES == 16
#define RPI_LOW(a, b)                                                                              \
  RPI_SHUFFLE(rpi_lanes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define RPI_HIGH(a, b)                                                                             \
  RPI_SHUFFLE(rpi_lanes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif RPI_LANES == 8
#define RPI_LOW(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define RPI_HIGH(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#elif RPI_LANES == 4
#define RPI_LOW(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 0, 4, 1, 5)
#define RPI_HIGH(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 2, 6, 3, 7)
#elif RPI_LANES == 2
#define RPI_LOW(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 0, 2)
#define RPI_HIGH(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 1, 3)
#endif

/* The lanes of b one further up, the last of a before them. */
#if RPI_LANES == 16
#define RPI_UP(a, b)                                                                               \
  RPI_SHUFFLE(rpi_lanes, a, b, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30)
#elif RPI_LANES == 8
#define RPI_UP(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 7, 8, 9, 10, 11, 12, 13, 14)
#elif RPI_LANES == 4
#define RPI_UP(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 3, 4, 5, 6)
#elif RPI_LANES == 2
#define RPI_UP(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 1, 2)
#endif

/* The sum of the lanes, by halves: one after the other they would wait for each other. */
RPI_INLINE real rpi_total(rpi_register x) {
  RPI_UNROLL(4) for (int round = 1; round < RPI_LANES; round *= 2) {
    x = RPI_LOW(x, x) + RPI_HIGH(x, x);
  }
  return x[0];
}

/* The sums of the lanes of four, in fewer steps than one by one. */
RPI_INLINE void rpi_totals(const rpi_register x[4], real to[4]) {
#if RPI_LANES >= 4
  const rpi_register even = RPI_LOW(x[0], x[2]) + RPI_HIGH(x[0], x[2]);
  const rpi_register odd = RPI_LOW(x[1], x[3]) + RPI_HIGH(x[1], x[3]);
  rpi_register all = RPI_LOW(even, odd) + RPI_HIGH(even, odd); /* four sums a quarter */
#if RPI_LANES == 16
  all += RPI_SHUFFLE(rpi_lanes, all, all, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  all += RPI_SHUFFLE(rpi_lanes, all, all, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15);
#elif RPI_LANES == 8
  all += RPI_SHUFFLE(rpi_lanes, all, all, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
  RPI_UNROLL(4) for (int n = 0; n < 4; n++) to[n] = all[n];
#else
  RPI_UNROLL(4) for (int n = 0; n < 4; n++) to[n] = rpi_total(x[n]);
#endif
}

/* Transposes a square of RPI_LANES vectors: log2(lanes) rounds of interleaving
 * row i with row i + lanes / 2. */
RPI_INLINE void rpi_transpose(rpi_register row[RPI_LANES]) {
  RPI_UNROLL(4) for (int round = 1; round < RPI_LANES; round *= 2) {
    rpi_register next[RPI_LANES];
    RPI_UNROLL(8) for (int i = 0; i < RPI_LANES / 2; i++) {
      next[2 * i] = RPI_LOW(row[i], row[i + RPI_LANES / 2]);
      next[2 * i + 1] = RPI_HIGH(row[i], row[i + RPI_LANES / 2]);
    }
    RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) row[i] = next[i];
  }
}

/* to[column][row] = factor * from[row][column] for rows x columns numbers, rows
 * filled up with zeros to padded_rows, a multiple of RPI_LANES. */
RPI_NOINLINE void rpi_pack_transposed(const real *from, int64_t from_stride, int64_t rows,
                                      int64_t columns, real factor, real *to, int64_t to_stride,
                                      int64_t padded_rows) {
  for (int64_t row = 0; row < padded_rows; row += RPI_LANES) {
    const int64_t present = rpi_min(rows - row, RPI_LANES);
    if (present <= 0) {
      for (int64_t c = 0; c < columns; c++) rpi_store(to + c * to_stride + row, (rpi_register){0});
      continue;
    }
    const real *const corner = from + row * from_stride;
    int64_t column = 0;
    for (; column + RPI_LANES <= columns; column += RPI_LANES) {
      rpi_register square[RPI_LANES];
      if (present == RPI_LANES) {
        RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) {
          const real *const at = corner + i * from_stride + column;
          rpi_prefetch(at, RPI_LANES * from_stride); /* fresh keys: 3 % of forward at n = 256 */
          square[i] = factor * rpi_load(at);
        }
      } else {
        for (int i = 0; i < RPI_LANES; i++) {
          const bool there = i < present;
          square[i] =
              there ? factor * rpi_load(corner + i * from_stride + column) : (rpi_register){0};
        }
      }
      rpi_transpose(square);
      RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) {
        rpi_store(to + (column + i) * to_stride + row, square[i]);
      }
    }
    for (; column < columns; column++) {
      real *const line = to + column * to_stride + row;
      for (int64_t i = 0; i < RPI_LANES; i++) {
        line[i] = i < present ? factor * corner[i * from_stride + column] : (real)0;
      }
    }
  }
}

#endif
