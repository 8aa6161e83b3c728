/* SPDX-License-Identifier: Apache-2.0
 *
 * runs.h: neighbouring distances that share a vector.
 *
 * Where buckets map distances to rows of a table (DeBERTa's and T5's are logarithmic), a run of
 * distances has one row:
 *
 *   column   0  1  2  3  4  5  6  7  8        a distance each
 *   line     0  1  2  2  3  3  3  4  4        a vector each
 *
 * A product with the vectors is made for lines; its numbers are then spread to columns, or on the
 * way back gathered from them. Both cost a small part of what a product with a column costs.
 */
#ifndef RPI_RUNS_H
#define RPI_RUNS_H

#include <string.h>

#include "ops/strips.h"

typedef struct runs {
  int64_t count;  /* of lines */
  rpi_lane *line; /* [columns, padded]: of each column, the last one repeated; NULL: no runs ever */
  int32_t *begin; /* [count]: its first column */
} runs;

/* Forgets that columns share vectors. */
static void runs_reset(runs *r, int64_t columns, int64_t padded) {
  r->count = columns;
  for (int64_t c = 0; r->line && c < padded; c++) r->line[c] = (rpi_lane)rpi_min(c, columns - 1);
  for (int64_t c = 0; r->line && c < columns; c++) r->begin[c] = (int32_t)c;
}

/* Lane l of the result is lane lanes[l] of `from`. */
RPI_INLINE rpi_register runs_pick(const real *from, rpi_lanes lanes) {
#if defined(__clang__)
  rpi_register to;
  for (int l = 0; l < RPI_LANES; l++) to[l] = from[lanes[l]];
  return to;
#else
  return __builtin_shuffle(rpi_load(from), lanes);
#endif
}

/* to[row][c] = from[row][line[c]] (+ numbers[c]) for the columns begin to end - 1, whole vectors.
 * `from` is readable for a vector beyond the last line, and begins with line `first`. */
RPI_NOINLINE void runs_spread(const runs *r, int64_t rows, const real *from, int64_t from_stride,
                              int64_t first, int64_t begin, int64_t end, const real *numbers,
                              real *to, int64_t to_stride) {
  for (int64_t c = begin; c < end; c += RPI_LANES) {
    /* runs have no gaps: the lines of LANES columns are at most LANES, side by side */
    const rpi_lane base = r->line[c];
    rpi_lanes lanes;
    memcpy(&lanes, r->line + c, sizeof lanes);
    lanes -= base;
    const real *const line = from + (base - first);
    rpi_register more = {0};
    if (numbers) more = rpi_load(numbers + c);
    for (int64_t row = 0; row < rows; row++) {
      rpi_store(to + row * to_stride + c, more + runs_pick(line + row * from_stride, lanes));
    }
  }
}

#define RPI_RUN_ROWS 8 /* that are gathered together: sums of one row wait for each other */

/* x[row][line] = sum of x[row][c] over the columns of the line, in place. */
RPI_NOINLINE void runs_gather(const runs *r, int64_t columns, int64_t rows, real *x,
                              int64_t stride) {
  for (int64_t done = 0; done < rows; done += RPI_RUN_ROWS) {
    const int64_t some = rpi_min(RPI_RUN_ROWS, rows - done);
    real *const own = x + done * stride;
    for (int64_t line = 0; line < r->count; line++) {
      const int64_t end = line + 1 < r->count ? r->begin[line + 1] : columns;
      real sum[RPI_RUN_ROWS] = {0};
      if (some == RPI_RUN_ROWS) { /* a count that the compiler knows */
        for (int64_t c = r->begin[line]; c < end; c++) {
          RPI_UNROLL(8) for (int n = 0; n < RPI_RUN_ROWS; n++) sum[n] += own[n * stride + c];
        }
      } else {
        for (int64_t c = r->begin[line]; c < end; c++) {
          for (int n = 0; n < some; n++) sum[n] += own[n * stride + c];
        }
      }
      for (int n = 0; n < some; n++) own[n * stride + line] = sum[n];
    }
  }
}

/* sums[column of line first + n][width] += x[n], for `count` lines. */
static void runs_add(const runs *r, int64_t first, int64_t count, int64_t width, const real *x,
                     real *sums) {
  for (int64_t n = 0; n < count; n++, x += width) {
    real *const to = sums + r->begin[first + n] * width;
    for (int64_t c = 0; c < width; c++) to[c] += x[c];
  }
}

/* sums[column of the line][width] += a . b, for the lines first to end - 1. product: of the first
 * of them, without c. zeros: TILE of them. some: [TILE][width]. */
static void runs_add_product(const runs *r, rpi_product product, int64_t first, int64_t end,
                             int64_t width, const real *zeros, real *some, real *sums) {
  product.c = some;
  product.c_stride = width;
  for (int64_t done = first; done < end; done += RPI_TILE) {
    const int64_t count = rpi_min(RPI_TILE, end - done);
    rpi_block_product(RPI_START_ROW, count, width / RPI_LANES, product, zeros);
    product.a += count * product.a_row;
    runs_add(r, done, count, width, some, sums);
  }
}

#endif
