/* SPDX-License-Identifier: Apache-2.0
 *
 * tile.h: the register-blocked product that everything fast here is made of.
 *
 *             columns = panels of up to RPI_VECTORS vectors
 *           +-----------------+
 *   inner   |        B        |   rows of `b_stride`
 *           +-----------------+
 *   +-----+ +-----------------+
 *   |  A  | |        C        |   strips of up to RPI_STRIP rows: C lives in registers
 *   +-----+ +-----------------+
 *
 * A is read one scalar at a time: element (row, inner) at a[row * a_row + inner *
 * a_inner], so it may be transposed. B and C are row-major, their columns a
 * multiple of RPI_LANES (callers pad).
 *
 * An instruction set defines RPI_LANES (reals in a vector) and RPI_VECTORS before it
 * includes this file: RPI_STRIP x RPI_VECTORS accumulators, the vectors of one row of
 * B and one scalar of A must fit its registers. The vector type is GCC's and clang's
 * own, because the same kernel in plain loops reached 105 Gflop/s against 117
 * (one core, AVX-512), and fell to 40 when the row of B was named in a local array.
 */
#ifndef RPI_TILE_H
#define RPI_TILE_H

#include <stdbool.h>

#include "base/integers.h"
#include "ops/real.h"

#define RPI_STRIP 6
#define RPI_TILE 64 /* keys that a strip of attention meets at once, numbers of a row in a mask */

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

/* Asks for a line of memory that may be beyond its array: so no pointer is made of it. */
RPI_INLINE void rpi_prefetch(const real *from, int64_t ahead) {
  __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)ahead * sizeof(real)));
}

/* The same, of one that will be written to. */
RPI_INLINE void rpi_prefetch_to(const real *to, int64_t ahead) {
  __builtin_prefetch((const void *)((uintptr_t)to + (uintptr_t)ahead * sizeof(real)), 1);
}

/* Asks for all lines of a row. */
#define RPI_LINE (64 / RPI_REAL_BYTES)
RPI_INLINE void rpi_prefetch_row(const real *from, int64_t ahead, int64_t width) {
  for (int64_t c = 0; c < width; c += RPI_LINE) rpi_prefetch(from, ahead + c);
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

/* One product C = start + A . B over any number of rows and vectors. */
typedef struct rpi_product {
  const real *a;
  int64_t a_row, a_inner;
  const real *b;
  int64_t b_stride;
  real *c;
  int64_t c_stride;
  int64_t inner;
} rpi_product;

/* What row r has beside its products, added to them in the end: sums that start from a large number
 * round every product as it is rounded. Scores that are mostly relations were off by ten times what
 * is to be expected.
 *   LOAD   from C itself
 *   ROW    row[r] in every column
 *   BAND   row[r] + band[r * band_stride + clamp(band_offset - r + column, 0, band_last)],
 *          the clamp taken per vector: see band.h for the picture */
typedef struct rpi_start {
  const real *row;
  const real *band;
  int64_t band_stride, band_offset, band_last;
} rpi_start;

enum { RPI_START_LOAD, RPI_START_ROW, RPI_START_BAND };

/* Whether no vector of a panel is clamped, as where a bias goes with every distance: clamping 24
 * of them took 7 % of a strip. */
RPI_INLINE bool rpi_band_holds(const rpi_start *start, int rows, int vectors, int64_t column) {
  const int64_t first = start->band_offset + column;
  return first >= rows - 1 && first + (vectors - 1) * RPI_LANES <= start->band_last;
}

/* The kernel: rows and vectors are constants once inlined. column is where this
 * panel begins. */
RPI_INLINE void rpi_strip(const int rows, const int vectors, const int mode, const rpi_product *p,
                          const rpi_start *start, int64_t column) {
  rpi_register c[RPI_STRIP][RPI_VECTORS];
  RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
    RPI_UNROLL(4) for (int v = 0; v < vectors; v++) c[r][v] = (rpi_register){0};
  }
  const real *a = p->a, *b = p->b + column;
  const int64_t a_row = p->a_row, a_inner = p->a_inner, b_stride = p->b_stride;
  for (int64_t k = 0; k < p->inner; k++, a += a_inner, b += b_stride) {
    rpi_register row[RPI_VECTORS];
    RPI_UNROLL(4) for (int v = 0; v < vectors; v++) row[v] = rpi_load(b + v * RPI_LANES);
    RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
      RPI_UNROLL(4) for (int v = 0; v < vectors; v++) c[r][v] += a[r * a_row] * row[v];
    }
  }
  real *const out = p->c + column;
  const int64_t c_stride = p->c_stride;
  const real *from = out;
  if (mode == RPI_START_BAND && rpi_band_holds(start, rows, vectors, column)) {
    const real *band = start->band + start->band_offset + column;
    RPI_UNROLL(8) for (int r = 0; r < rows; r++, band += start->band_stride - 1) {
      RPI_UNROLL(4) for (int v = 0; v < vectors; v++) {
        c[r][v] += start->row[r] + rpi_load(band + v * RPI_LANES);
      }
    }
  } else {
    RPI_UNROLL(8) for (int r = 0; r < rows; r++, from += c_stride) {
      RPI_UNROLL(4) for (int v = 0; v < vectors; v++) {
        if (mode == RPI_START_LOAD) {
          c[r][v] += rpi_load(from + v * RPI_LANES);
        } else if (mode == RPI_START_ROW) {
          c[r][v] += start->row[r];
        } else {
          const int64_t at = start->band_offset - r + column + v * RPI_LANES;
          c[r][v] += start->row[r] + rpi_load(start->band + r * start->band_stride +
                                              rpi_clamp(at, 0, start->band_last));
        }
      }
    }
  }
  real *to = out;
  __asm__("" : "+r"(to)); /* or GCC keeps 24 addresses through the loop, in memory: 0.7 % */
  RPI_UNROLL(8) for (int r = 0; r < rows; r++, to += c_stride) {
    RPI_UNROLL(4) for (int v = 0; v < vectors; v++) rpi_store(to + v * RPI_LANES, c[r][v]);
  }
}

/* Every (rows, vectors) pair its own function: inlined into one they spill, which
 * cost the prototype of this code 13 %. */
typedef void (*rpi_strip_fn)(const rpi_product *p, const rpi_start *start, int64_t column);

#define RPI_STRIP_FN(rows, vectors, mode)                                                          \
  RPI_NOINLINE void rpi_strip_##rows##_##vectors##_##mode(                                         \
      const rpi_product *p, const rpi_start *start, int64_t column) {                              \
    rpi_strip(rows, vectors, RPI_START_##mode, p, start, column);                                  \
  }
#define RPI_STRIP_ROWS(vectors, mode)                                                              \
  RPI_STRIP_FN(1, vectors, mode)                                                                   \
  RPI_STRIP_FN(2, vectors, mode)                                                                   \
  RPI_STRIP_FN(3, vectors, mode)                                                                   \
  RPI_STRIP_FN(4, vectors, mode)                                                                   \
  RPI_STRIP_FN(5, vectors, mode)                                                                   \
  RPI_STRIP_FN(6, vectors, mode)
#define RPI_STRIP_ENTRY(vectors, mode)                                                             \
  {rpi_strip_1_##vectors##_##mode, rpi_strip_2_##vectors##_##mode, rpi_strip_3_##vectors##_##mode, \
   rpi_strip_4_##vectors##_##mode, rpi_strip_5_##vectors##_##mode, rpi_strip_6_##vectors##_##mode}

#if RPI_VECTORS == 4
#define RPI_STRIP_MODE(mode)                                                                       \
  RPI_STRIP_ROWS(1, mode)                                                                          \
  RPI_STRIP_ROWS(2, mode) RPI_STRIP_ROWS(3, mode) RPI_STRIP_ROWS(4, mode)
#define RPI_STRIP_TABLE(mode)                                                                      \
  {RPI_STRIP_ENTRY(1, mode), RPI_STRIP_ENTRY(2, mode), RPI_STRIP_ENTRY(3, mode),                   \
   RPI_STRIP_ENTRY(4, mode)}
#elif RPI_VECTORS == 2
#define RPI_STRIP_MODE(mode) RPI_STRIP_ROWS(1, mode) RPI_STRIP_ROWS(2, mode)
#define RPI_STRIP_TABLE(mode) {RPI_STRIP_ENTRY(1, mode), RPI_STRIP_ENTRY(2, mode)}
#else
#error "RPI_VECTORS must be 2 or 4"
#endif

RPI_STRIP_MODE(LOAD)
RPI_STRIP_MODE(ROW)
RPI_STRIP_MODE(BAND)

static const rpi_strip_fn rpi_strips[3][RPI_VECTORS][RPI_STRIP] = {
    RPI_STRIP_TABLE(LOAD), RPI_STRIP_TABLE(ROW), RPI_STRIP_TABLE(BAND)};

/* One strip of at most RPI_STRIP rows over `vectors` vectors of columns, cut into
 * panels of nearly equal width (5 vectors are 3 + 2: a panel of one vector would
 * wait for its own additions). */
RPI_INLINE void rpi_strip_product(int mode, int64_t rows, int64_t vectors, const rpi_product *p,
                                  const rpi_start *start) {
  int64_t panels = rpi_divide_up(vectors, RPI_VECTORS);
  for (int64_t done = 0; done < vectors; panels--) {
    const int64_t width = rpi_divide_up(vectors - done, panels);
    rpi_strips[mode][width - 1][rows - 1](p, start, done * RPI_LANES);
    done += width;
  }
}

/* All rows of a product, strip by strip. start->row advances with the rows; bands
 * belong to single strips and are not for here. */
RPI_INLINE void rpi_block_product(int mode, int64_t rows, int64_t vectors, rpi_product p,
                                  const real *row) {
  for (int64_t done = 0; done < rows;) {
    const int64_t strip = rpi_min(RPI_STRIP, rows - done);
    const rpi_start start = {.row = mode == RPI_START_ROW ? row + done : row};
    rpi_strip_product(mode, strip, vectors, &p, &start);
    p.a += strip * p.a_row;
    p.c += strip * p.c_stride;
    done += strip;
  }
}

#endif
