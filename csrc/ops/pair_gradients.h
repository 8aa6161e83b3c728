/* SPDX-License-Identifier: Apache-2.0
 *
 * pair_gradients.h: what pairs.h reads, differentiated: tables that are looked up, and "key
 * meets relation".
 *
 *   looked up       buckets of ds (p) by row of the table, per query: dwK += dAᵀ q, dq += dA wK
 *   query terms     sums of ds by relation and key, dB: dwQ += dBᵀ k, dk += dB wQ
 */
#ifndef RPI_PAIR_GRADIENTS_H
#define RPI_PAIR_GRADIENTS_H

#include "ops/table_sums.h"

/* ds of a block and a tile, for query terms on a band: dk += dB . wQ, dwQ += dBᵀ k. And for those
 * that are looked up: into the sums by relation and key. */
static void collect_queries(const pair_terms *p, pair_scratch *w, const slot *to,
                            const rpi_sequence *seq, const pair_rows *rows, int64_t begin,
                            int64_t count, int64_t key, int64_t j, int64_t tile_keys,
                            const real *ds, const dense *keys, real *dk) {
  if (p->query.present) {
    const int64_t width = rpi_round_up(p->query.width, RPI_LANES);
    const table_sums *const sums = &to->sums[SUM_OF_QUERIES];
    const skew_range range = skew_collect(&w->query, key - (rows->row0 + begin + seq->start), count,
                                          ds + begin * RPI_TILE);
    const int64_t columns = range.end - range.begin;
    real *const lines = w->query.products + RPI_TILE;
    if (range.tail)
      add_strip(1, lines + columns * RPI_TILE, NULL, lines + (columns - 1) * RPI_TILE);
    const int64_t first = w->query.w.first + range.begin - sums->first + 1; /* after the head */
    add_transposed(lines, RPI_TILE, tile_keys, w->query.table.down + range.begin * width, width,
                   columns, width, dk);
    if (range.head) {
      add_transposed(w->query.products, RPI_TILE, tile_keys, w->query.table.down - width, width, 1,
                     width, dk);
    }
    const dense at = {keys->data + j * keys->stride, keys->stride};
    if (sums->lines) {
      add_product(lines, RPI_TILE, columns, &at, tile_keys, width, sums->lines + first * width);
    }
    if (sums->lines && range.head) {
      add_product(w->query.products, RPI_TILE, 1, &at, tile_keys, width, sums->lines);
    }
  }
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    if (x->kind != PAIR_QUERY) continue;
    real *const dg = w->list[i].dg + j / RPI_TILE * (x->rows + 1) * RPI_TILE;
    for (int64_t r = begin; r < begin + count; r++) {
      const real *const from = ds + r * RPI_TILE;
      if (x->relation->map == RP_MAP_EDGES) {
        const stretch edges = edges_of(x->relation, p, seq, rows->row0 + r, key, tile_keys);
        for (int64_t at = edges.begin; at < edges.end; at++) {
          const int64_t c = x->relation->edge_keys[at] - key;
          dg[(x->relation->edge_labels[at] + 1) * RPI_TILE + c] += from[c];
        }
        continue;
      }
      const int32_t *const relation = w->list[x->map].relation + r * RPI_TILE;
      for (int64_t c = 0; c < tile_keys; c++) dg[(relation[c] + 1) * RPI_TILE + c] += from[c];
    }
  }
}

/* After a block: the buckets of looked-up terms, as close_side does for bands. */
static void close_pairs(const pair_terms *p, const pair_scratch *w, const slot *to,
                        const pair_rows *q, const pair_rows *dz, real *dq, int64_t width) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    const table_sums *const sums = &to->sums[BAND_SUMS + i];
    if (x->kind == PAIR_QUERY) continue;
    const pair_rows *const from = x->kind == PAIR_VALUE ? dz : q;
    const real *const buckets = w->list[i].buckets + RPI_LANES;
    const int64_t stride = lookup_stride(x), padded = lookup_padded(x);
    if (sums->numbers) add_columns(buckets, stride, q->rows, x->rows, sums->numbers);
    if (sums->lines) {
      add_transposed(buckets, stride, x->rows, from->x, from->x_stride, q->rows, padded,
                     sums->lines);
    }
    if (x->kind == PAIR_KEY) {
      const dense table = {w->list[i].down, padded};
      add_product(buckets, stride, q->rows, &table, x->rows, width, dq);
    }
  }
}

/* After a chunk of keys: what looked-up query terms summed. */
static void close_pair_keys(const pair_terms *p, const pair_scratch *w, const slot *to,
                            int64_t keys, const dense *k, real *dk) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    const table_sums *const sums = &to->sums[BAND_SUMS + i];
    if (x->kind != PAIR_QUERY) continue;
    const int64_t padded = lookup_padded(x);
    for (int64_t j = 0; j < keys; j += RPI_TILE) {
      const real *const dg = w->list[i].dg + (j / RPI_TILE * (x->rows + 1) + 1) * RPI_TILE;
      const int64_t tile_keys = rpi_min(RPI_TILE, keys - j);
      const dense at = {k->data + j * k->stride, k->stride};
      add_transposed(dg, RPI_TILE, tile_keys, w->list[i].down, padded, x->rows, padded,
                     dk + j * padded);
      if (sums->lines) add_product(dg, RPI_TILE, x->rows, &at, tile_keys, padded, sums->lines);
    }
  }
}

#endif
