/* SPDX-License-Identifier: Apache-2.0
 *
 * keep_copy.h: ops/keep.h once more, for vectors of KEEP_COPY_BYTES bytes, its names
 * ending in KEEP_COPY; test_keep.c includes this once for every instruction set, which
 * it chooses itself. The copy is a function that makes the factors of a strip.
 */
#undef RPI_KEEP_H
#undef RPI_LANES
#undef KEEP_BYTES
#undef KEEP_LANES
#undef KEEP_EVEN
#undef KEEP_ODD
#undef KEEP_COUNT
#undef KEEP_ROW
#define RPI_LANES (KEEP_COPY_BYTES / RPI_REAL_BYTES)

#define KEEP_JOIN_(a, b) a##_##b
#define KEEP_JOIN(a, b) KEEP_JOIN_(a, b)
#define keep_lanes KEEP_JOIN(keep_lanes, KEEP_COPY)
#define keep_bytes KEEP_JOIN(keep_bytes, KEEP_COPY)
#define keep_mask KEEP_JOIN(keep_mask, KEEP_COPY)
#define dropout KEEP_JOIN(dropout, KEEP_COPY)
#define dropout_of KEEP_JOIN(dropout_of, KEEP_COPY)
#define keep_multiply KEEP_JOIN(keep_multiply, KEEP_COPY)
#define keep_make KEEP_JOIN(keep_make, KEEP_COPY)
#define keep_row KEEP_JOIN(keep_row, KEEP_COPY)
#define keep_apply KEEP_JOIN(keep_apply, KEEP_COPY)

#include "ops/keep.h"

/* What keep_apply makes of ones: beyond the columns asked for they stay. */
static void KEEP_JOIN(factors, KEEP_COPY)(const place *p, real *factor) {
  const dropout d = dropout_of(p->rate, p->key);
  keep_mask mask;
  keep_make(&d, p->ordinal, p->site, p->row, p->rows, p->column, p->columns, &mask);
  for (int i = 0; i < RPI_STRIP * RPI_TILE; i++) factor[i] = 1;
  keep_apply(&mask, p->rows, p->columns, d.scale, factor, factor);
}

#undef keep_lanes
#undef keep_bytes
#undef keep_mask
#undef dropout
#undef dropout_of
#undef keep_multiply
#undef keep_make
#undef keep_row
#undef keep_apply
