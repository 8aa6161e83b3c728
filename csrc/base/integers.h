/* SPDX-License-Identifier: Apache-2.0
 *
 * integers.h: the smaller and the larger of two sizes, sizes in whole steps, and the longest of the
 * sequences between offsets.
 */
#ifndef RPI_INTEGERS_H
#define RPI_INTEGERS_H

#include <stdint.h>

static inline int64_t rpi_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t rpi_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* How many steps n takes, and how far they reach. */
static inline int64_t rpi_divide_up(int64_t n, int64_t step) { return (n + step - 1) / step; }
static inline int64_t rpi_round_up(int64_t n, int64_t step) {
  return rpi_divide_up(n, step) * step;
}

static inline int64_t rpi_longest(const int64_t *offsets, int64_t count) {
  int64_t longest = 0;
  for (int64_t i = 0; i < count; i++) longest = rpi_max(longest, offsets[i + 1] - offsets[i]);
  return longest;
}

#endif
