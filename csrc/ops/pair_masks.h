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

/* Of a dense mask. */
static matrix_rows mask_at(const pair_terms *p, const rpi_sequence *seq, int64_t i, int64_t j) {
  const rp_mask *const m = p->mask;
  return matrix_at(m->data, 1, m->starts, m->batch_stride, m->head_stride, m->row_stride, p, seq, i,
                   j);
}

/* Does a dense mask hide every pair of some queries with a tile of keys? Such a tile adds nothing.
 * All of its bytes are read whatever is found, and those of the tile at `next` are asked for,
 * unless there is none: together, where strip by strip they would be waited for. */
static bool mask_hides(const pair_terms *p, const rpi_sequence *seq, int64_t i, int64_t rows,
                       int64_t key, int64_t tile_keys, int64_t next) {
  enum { SOME = sizeof(rpi_lanes) };
  rpi_lanes seen[RPI_TILE / SOME] = {{0}};
  uint8_t any = 0, some[SOME];
  if (!p->mask) return false;
  const int64_t asked = next == key ? 0 : rpi_min(seq->keys - next, RPI_TILE);
  const matrix_rows from = mask_at(p, seq, i, key);
  for (int64_t r = 0; r < rows; r++) {
    const char *const row = from.at + r * from.stride;
    rpi_prefetch_bytes(row + (next - key), asked, next > key);
    for (int n = 0; tile_keys == RPI_TILE && n < RPI_TILE / SOME; n++) {
      rpi_lanes more;
      memcpy(&more, row + n * SOME, SOME);
      seen[n] |= more;
    }
    for (int64_t c = 0; c < tile_keys % RPI_TILE; c++) any |= (uint8_t)row[c];
  }
  for (int n = 0; n < RPI_TILE / SOME; n++) {
    memcpy(some, &seen[n], SOME);
    for (int c = 0; c < SOME; c++) any |= some[c];
  }
  return any == 0;
}

/* How many of the bytes of a mask's row are not 0. As many are counted in bytes as these can count,
 * which compares whole vectors. */
static int64_t mask_count(const char *row, int64_t keys) {
  int64_t count = 0, c = 0;
  while (c + RPI_TILE <= keys) {
    uint8_t seen[RPI_TILE] = {0};
    for (int n = 0; n < UINT8_MAX && c + RPI_TILE <= keys; n++, c += RPI_TILE) {
      for (int k = 0; k < RPI_TILE; k++) seen[k] = (uint8_t)(seen[k] + (row[c + k] != 0));
    }
    for (int k = 0; k < RPI_TILE; k++) count += seen[k];
  }
  for (; c < keys; c++) count += row[c] != 0;
  return count;
}

/* Hides the pairs whose byte of a dense mask is 0. */
static void hide_strip(const pair_terms *p, const rpi_sequence *seq, int64_t i, int64_t count,
                       int64_t key, int64_t tile_keys, real *s) {
  const matrix_rows from = mask_at(p, seq, i, key);
  for (int64_t r = 0; r < count; r++, s += RPI_TILE) {
    const char *const row = from.at + r * from.stride;
    if (tile_keys == RPI_TILE) { /* a count that the compiler knows */
      for (int c = 0; c < RPI_TILE; c++) s[c] = row[c] ? s[c] : (real)-INFINITY;
    }
    for (int64_t c = 0; c < tile_keys % RPI_TILE; c++) {
      s[c] = row[c] ? s[c] : (real)-INFINITY;
    }
  }
}

#endif
