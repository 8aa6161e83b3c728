/* SPDX-License-Identifier: Apache-2.0
 *
 * pair_masks.h: what happens to a strip of scores or weights pair by pair: softcap, dropout,
 * dense masks. In this order: scores, softcap, masks, softmax, dropout.
 */
#ifndef RPI_PAIR_MASKS_H
#define RPI_PAIR_MASKS_H

#include "ops/pairs.h"

/* A row: s = cap tanh(s / divisor) + start. */
RPI_INLINE void cap_row(int64_t columns, real cap, real divisor, real start, real *s) {
  const real inverse = 1 / divisor;
  for (int64_t c = 0; c < columns; c++) s[c] = cap * rpi_tanh(s[c] * inverse) + start;
}

/* s = cap tanh(s / cap) + start. */
RPI_NOINLINE void cap_strip(int64_t count, int64_t columns, real cap, const real *start, real *s) {
  for (int64_t r = 0; r < count; r++, s += RPI_TILE) {
    RPI_COLUMNS(columns, cap_row(COLUMNS, cap, cap, start[r], s))
  }
}

/* s = tanh(s / cap): backward wants the slope too, 1 - tanh^2, exactly 0 where tanh is 1. */
RPI_NOINLINE void tanh_strip(int64_t count, int64_t columns, real cap, real *s) {
  for (int64_t r = 0; r < count; r++, s += RPI_TILE) {
    RPI_COLUMNS(columns, cap_row(COLUMNS, 1, cap, 0, s))
  }
}

/* Drops weights, and scales up what is kept. */
static void drop_strip(const pair_terms *p, int64_t i, int64_t count, int64_t key, int64_t columns,
                       real *weights) {
  keep_mask mask;
  keep_make(&p->dropout, p->ordinal, p->site, i, count, key, columns, &mask);
  keep_apply(&mask, count, columns, p->dropout.scale, weights, weights);
}

/* The row of a dense mask for query i. */
static const uint8_t *mask_row(const pair_terms *p, const rpi_sequence *seq, int64_t i) {
  const rp_mask *const m = p->mask;
  return m->data + pair_row(m->starts, m->batch_stride, m->head_stride, m->row_stride, p, seq, i);
}

/* Hides the pairs whose byte of a dense mask is 0. */
static void hide_strip(const pair_terms *p, const rpi_sequence *seq, int64_t i, int64_t count,
                       int64_t key, int64_t tile_keys, real *s) {
  for (int64_t r = 0; r < count; r++) {
    const uint8_t *const seen = mask_row(p, seq, i + r) + key;
    real *const row = s + r * RPI_TILE;
    if (tile_keys == RPI_TILE) { /* a count that the compiler knows */
      for (int c = 0; c < RPI_TILE; c++) row[c] = seen[c] ? row[c] : (real)-INFINITY;
    }
    for (int64_t c = 0; c < tile_keys % RPI_TILE; c++) {
      row[c] = seen[c] ? row[c] : (real)-INFINITY;
    }
  }
}

#endif
