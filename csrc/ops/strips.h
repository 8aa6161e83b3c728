/* SPDX-License-Identifier: Apache-2.0
 *
 * strips.h: the register-blocked product that attention is made of.
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
 * multiple of RPI_LANES (callers pad). RPI_STRIP x RPI_VECTORS accumulators, the vectors of one row
 * of B and one scalar of A must fit the registers.
 *
 * Elements of A and B are numbers, or words of two numbers of bf16 (bf16.h), inner then being half.
 */
#ifndef RPI_STRIPS_H
#define RPI_STRIPS_H

#include "ops/bf16.h"
#include "ops/tile.h"

/* One product C = start + A . B over any number of rows and vectors. */
typedef struct rpi_product {
  const real *a;
  int64_t a_row, a_inner;
  const real *b;
  int64_t b_stride;
  real *c;
  int64_t c_stride;
  int64_t inner;
  bool native; /* words, multiplied by instructions */
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

/* The kernel: native, rows and vectors are constants once inlined. column is where this
 * panel begins. */
RPI_INLINE void rpi_strip(const bool native, const int rows, const int vectors, const int mode,
                          const rpi_product *p, const rpi_start *start, int64_t column) {
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
      RPI_UNROLL(4)
      for (int v = 0; v < vectors; v++)
        c[r][v] = rpi_add_element(native, c[r][v], a + r * a_row, row[v]);
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

#define RPI_STRIP_FN(how, target, rows, vectors, mode)                                             \
  target RPI_NOINLINE void rpi_strip_##how##_##rows##_##vectors##_##mode(                          \
      const rpi_product *p, const rpi_start *start, int64_t column) {                              \
    rpi_strip(RPI_##how == RPI_NATIVE, rows, vectors, RPI_START_##mode, p, start, column);         \
  }
#define RPI_STRIP_ROWS(how, target, vectors, mode)                                                 \
  RPI_STRIP_FN(how, target, 1, vectors, mode)                                                      \
  RPI_STRIP_FN(how, target, 2, vectors, mode)                                                      \
  RPI_STRIP_FN(how, target, 3, vectors, mode)                                                      \
  RPI_STRIP_FN(how, target, 4, vectors, mode)                                                      \
  RPI_STRIP_FN(how, target, 5, vectors, mode)                                                      \
  RPI_STRIP_FN(how, target, 6, vectors, mode)
#define RPI_STRIP_ENTRY(how, vectors, mode)                                                        \
  {rpi_strip_##how##_1_##vectors##_##mode, rpi_strip_##how##_2_##vectors##_##mode,                 \
   rpi_strip_##how##_3_##vectors##_##mode, rpi_strip_##how##_4_##vectors##_##mode,                 \
   rpi_strip_##how##_5_##vectors##_##mode, rpi_strip_##how##_6_##vectors##_##mode}

#if RPI_VECTORS == 4
#define RPI_STRIP_MODE(how, target, mode)                                                          \
  RPI_STRIP_ROWS(how, target, 1, mode)                                                             \
  RPI_STRIP_ROWS(how, target, 2, mode)                                                             \
  RPI_STRIP_ROWS(how, target, 3, mode)                                                             \
  RPI_STRIP_ROWS(how, target, 4, mode)
#define RPI_STRIP_TABLE(how, mode)                                                                 \
  {RPI_STRIP_ENTRY(how, 1, mode), RPI_STRIP_ENTRY(how, 2, mode), RPI_STRIP_ENTRY(how, 3, mode),    \
   RPI_STRIP_ENTRY(how, 4, mode)}
#elif RPI_VECTORS == 2
#define RPI_STRIP_MODE(how, target, mode)                                                          \
  RPI_STRIP_ROWS(how, target, 1, mode)                                                             \
  RPI_STRIP_ROWS(how, target, 2, mode)
#define RPI_STRIP_TABLE(how, mode) {RPI_STRIP_ENTRY(how, 1, mode), RPI_STRIP_ENTRY(how, 2, mode)}
#else
#error "RPI_VECTORS must be 2 or 4"
#endif
#define RPI_STRIP_MODES(how, target)                                                               \
  RPI_STRIP_MODE(how, target, LOAD)                                                                \
  RPI_STRIP_MODE(how, target, ROW)                                                                 \
  RPI_STRIP_MODE(how, target, BAND)
#define RPI_STRIP_TABLES(how)                                                                      \
  [RPI_##how] = {RPI_STRIP_TABLE(how, LOAD), RPI_STRIP_TABLE(how, ROW), RPI_STRIP_TABLE(how, BAND)}

RPI_STRIP_MODES(NUMBERS, )
#ifdef RPI_BF16_NATIVE
RPI_STRIP_MODES(NATIVE, RPI_BF16_TARGET)
#endif

static const rpi_strip_fn rpi_strips[][3][RPI_VECTORS][RPI_STRIP] = {
    RPI_STRIP_TABLES(NUMBERS),
#ifdef RPI_BF16_NATIVE
    RPI_STRIP_TABLES(NATIVE),
#endif
};

/* One strip of at most RPI_STRIP rows over `vectors` vectors of columns, cut into
 * panels of nearly equal width (5 vectors are 3 + 2: a panel of one vector would
 * wait for its own additions). */
RPI_INLINE void rpi_strip_product(int mode, int64_t rows, int64_t vectors, const rpi_product *p,
                                  const rpi_start *start) {
  const rpi_strip_fn(*const strips)[RPI_STRIP] =
      rpi_strips[p->native ? RPI_NATIVE : RPI_NUMBERS][mode];
  int64_t panels = rpi_divide_up(vectors, RPI_VECTORS);
  for (int64_t done = 0; done < vectors; panels--) {
    const int64_t left = vectors - done, width = panels == 1 ? left : rpi_divide_up(left, panels);
    strips[width - 1][rows - 1](p, start, done * RPI_LANES);
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
