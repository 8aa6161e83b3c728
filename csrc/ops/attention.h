/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.h: what forward and backward of relation-aware attention share.
 *
 *   (1)  s_ij = scale * ( q_i . k_j + q_i . wK[r(i,j)] )
 *   (2)  p_ij = exp(s_ij - lse_i),  lse_i = log sum_j exp(s_ij)  over the keys i may see
 *   (3)  z_i  = sum_j p_ij v_j + sum_r P_i[r] wV[r],  P_i[r] = sum of p_ij over { j : r(i,j) = r }
 *
 * Nothing of size N x M or N x M x D exists. A block of queries walks the keys in
 * tiles of 64; a strip of 6 queries and a tile is the unit of work:
 *
 *          keys  j0 ........ j0+63
 *   strip  +----------------------+   scores start from the bias of the strip (band.h):
 *   of 6   |  left | band | right |   nothing left of the band, one shifted load per
 *   rows   +----------------------+   vector inside, one number per row right of it
 *
 * so a strip outside the band costs what plain attention costs. Scores are kept in
 * units of log 2, the scale folded into the packed keys and tables.
 *
 * The maximum is lazy: the running maximum m_i of a row starts its accumulators (as
 * -m_i), and is raised only when a score exceeds it by RPI_RAISE. Sums then stay
 * below 2^8 times the number of keys, far from overflow, and the usual strip neither
 * takes a row maximum nor rescales.
 *
 * The other terms of the one formula (docs/math.md) have their places: a score term
 * joins in score_strip, a mask in mask_strip, softcap between them, dropout where the
 * weights are stored.
 *
 * attention_forward.c and attention_backward.c hold the two passes, each statement
 * and its derivative under one equation number; band.h holds the relation terms,
 * attention_plan.h the division of work, table_sums.h the gradients of the tables.
 */
#ifndef RPI_ATTENTION_H
#define RPI_ATTENTION_H

#include "ops/attention_plan.h"

#define RPI_RAISE 8 /* log2 of the factor a score may exceed the running maximum by */

static const real LOG2_E = (real)1.4426950408889634074;

/* Rows of numbers that a product can read: their own memory where that is dense and
 * a multiple of vectors wide, else a padded copy. Copying rows that are far apart
 * pays by itself: 64 rows at a stride of 2 KiB share 8 sets of the first cache. */
typedef struct dense {
  const real *data;
  int64_t stride;
} dense;

static dense dense_rows(const real *data, int64_t stride, int64_t count, int64_t width,
                        int64_t padded, real *copy) {
  if (stride == width && width == padded) return (dense){data, stride};
  for (int64_t r = 0; r < count; r++) {
    memcpy(copy + r * padded, data + r * stride, (size_t)width * sizeof(real));
    for (int64_t c = width; c < padded; c++) copy[r * padded + c] = 0;
  }
  return (dense){copy, padded};
}

/* A strip wholly in the tail of a term meets one relation only: it is plain attention
 * with that relation's vector added to every key (value). */
static dense tail_rows(const term *t, const dense *from, int64_t count, int64_t padded, real *to) {
  const real *const last = t->table + (t->last + t->left) * t->stride;
  const real *const row0 = t->shifted ? t->table : NULL;
  for (int64_t r = 0; r < count; r++) {
    const real *const row = from->data + r * from->stride;
    for (int64_t c = 0; c < t->width; c++) {
      to[r * padded + c] = row[c] + (row0 ? last[c] - row0[c] : last[c]);
    }
    for (int64_t c = t->width; c < padded; c++) to[r * padded + c] = 0;
  }
  return (dense){to, padded};
}

/* Does any strip of queries from `query` on lie wholly in the tail? */
static bool reaches_tail(const term *t, const rpi_sequence *seq, int64_t query, int64_t key,
                         int64_t keys) {
  if (!t->table || !t->clip || keys <= 0 || t->last < t->first) return false;
  const int64_t last_tile = key + (keys - 1) / RPI_TILE * RPI_TILE;
  return last_tile - (query + seq->start) >= t->last;
}

static const real *row_of(const rp_rows *x, int64_t batch, int64_t head, int64_t row) {
  return x->data + batch * x->batch_stride + head * x->head_stride + row * x->row_stride;
}
static real *out_row_of(const rp_rows_out *x, int64_t batch, int64_t head, int64_t row) {
  return x->data + batch * x->batch_stride + head * x->head_stride + row * x->row_stride;
}

/* Where row 0 of a sequence's log-sum-exp lies: [B, H, N], or [H, tokens] packed. */
static int64_t lse_at(const rp_attention *s, const rpi_sequence *seq, int64_t head) {
  if (s->offsets) return head * s->offsets[s->B] + seq->query_row;
  return (seq->query_batch * s->H + head) * s->N;
}

static int64_t keys_visible(const rp_attention *s, const rpi_sequence *seq, int64_t last_query) {
  if (!s->causal) return seq->keys;
  return rpi_min(rpi_max(last_query + seq->start + 1, 0), seq->keys);
}

static real scale_of(const rp_attention *s) {
  return (real)(s->scale == 0 ? 1 / sqrt((double)s->D) : s->scale);
}

/* What subtracting row 0 of the key table takes from every score of this query. */
static real score_shift(const rp_attention *s, const term *key, const real *q) {
  return key->table && key->shifted ? scale_of(s) * dot(q, key->table, s->D) : (real)0;
}

/* ---- one strip ---------------------------------------------------------- */

/* Scores (1) of a strip, or their twin in backward, x . yᵀ plus the term's bias:
 * row_start[r] + x_r . y_j + E[r, d]. e: the strip's first row of E. */
static void score_strip(const window *w, int meets, const real *e, int64_t distance, int64_t count,
                        const rpi_product *product, const real *row_start) {
  if (meets == MEETS_BAND) {
    const rpi_start start = {.row = row_start,
                             .band = e,
                             .band_stride = window_stride(w->columns),
                             .band_offset = RPI_LANES + distance - w->first,
                             .band_last = RPI_LANES + w->columns};
    rpi_strip_product(RPI_START_BAND, count, RPI_TILE / RPI_LANES, product, &start);
    return;
  }
  real moved[RPI_STRIP];
  rpi_start start = {.row = row_start};
  if (meets == MEETS_TAIL) {
    const int64_t stride = window_stride(w->columns);
    for (int64_t r = 0; r < count; r++) {
      moved[r] = row_start[r] + e[r * stride + RPI_LANES + w->columns - 1];
    }
    start.row = moved;
  }
  rpi_strip_product(RPI_START_ROW, count, RPI_TILE / RPI_LANES, product, &start);
}

/* A row of a tile, added up into one vector. */
RPI_INLINE rpi_register sum_row(const real *row) {
  rpi_register sum = rpi_load(row);
  _Pragma("GCC unroll 16") for (int v = RPI_LANES; v < RPI_TILE; v += RPI_LANES) {
    sum += rpi_load(row + v);
  }
  return sum;
}

/* Hides the keys from limit[r] on: row r of a causal strip sees one more than r - 1. */
RPI_NOINLINE void mask_strip(int64_t count, int64_t limit, bool causal, int64_t keys, real *s) {
  for (int64_t r = 0; r < count; r++) {
    const int end = (int)rpi_min(keys, causal ? rpi_max(limit + r, 0) : keys);
    real *const row = s + r * RPI_TILE;
    for (int j = 0; j < RPI_TILE; j++) row[j] = j < end ? row[j] : (real)-INFINITY;
  }
}

/* ---- memory ------------------------------------------------------------- */

static void take_packed(rpi_arena *arena, int64_t columns, int64_t width, packed_term *packed) {
  const int64_t padded = rpi_round_up(columns, RPI_LANES);
  packed->across = rpi_arena_take(arena, padded * width, sizeof(real));
  packed->down = rpi_arena_take(arena, padded * width, sizeof(real));
}

/* Rows beyond a sequence's length are zeros. */
static void clear_rows(const rp_rows_out *x, int64_t batch, int64_t head, int64_t begin,
                       int64_t end, int64_t width) {
  for (int64_t i = begin; i < end; i++) {
    memset(out_row_of(x, batch, head, i), 0, (size_t)width * sizeof(real));
  }
}

#endif
