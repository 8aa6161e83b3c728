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

#include "ops/attention_tiles.h"
#include "ops/table_sums.h"

/* ---- from the rows that are there to those of the table ------------------------- */

/* c += a . b for the columns of a lookup, where c is the sums of its table: product without c. */
static void add_lines(const lookup *x, const pair_scratch *w, const rpi_product *product,
                      int64_t columns, int64_t padded, const table_sums *sums) {
  const lookup_scratch *const leader = &w->list[x->map];
  rpi_product part = *product;
  part.c_stride = padded;
  if (x->way == LOOKUP_WHOLE || leader->met.row >= 0) {
    const int64_t row = x->way == LOOKUP_WHOLE ? 0 : leader->met.row;
    part.c = sums->lines + (row - sums->first) * padded;
    rpi_block_product(RPI_START_LOAD, columns, padded / RPI_LANES, part, NULL);
    return;
  }
  for (int64_t done = 0; done < columns; done += RPI_TILE) {
    const int64_t count = rpi_min(RPI_TILE, columns - done);
    memset(w->lines, 0, (size_t)(count * padded) * sizeof(real));
    part.a = product->a + done * product->a_row;
    part.c = w->lines;
    rpi_block_product(RPI_START_LOAD, count, padded / RPI_LANES, part, NULL);
    for (int64_t c = 0; c < count; c++) {
      const int64_t row = leader->list[done + c];
      if (row < 0) continue;
      add_scaled(padded, 1, w->lines + c * padded,
                 sums->lines + line_for_row(sums, row, padded) * padded);
    }
  }
}

/* The sums of buckets themselves. */
static void add_numbers(const lookup *x, const pair_scratch *w, const real *buckets, int64_t stride,
                        int64_t rows, int64_t columns, const table_sums *sums) {
  const lookup_scratch *const leader = &w->list[x->map];
  if (x->way == LOOKUP_WHOLE || leader->met.row >= 0) {
    const int64_t row = x->way == LOOKUP_WHOLE ? 0 : leader->met.row;
    add_columns(buckets, stride, rows, columns, sums->numbers + row - sums->first);
    return;
  }
  for (int64_t c = 0; c < columns; c++) {
    if (leader->list[c] < 0) continue;
    const int64_t line = line_for_row(sums, leader->list[c], lookup_padded(x));
    add_columns(buckets + c, stride, rows, 1, sums->numbers + line);
  }
}

/* ---- query terms ----------------------------------------------------------------- */

/* ds of some rows, from row i of the block on, into a tile's sums by relation and key. */
static void collect_key_sums(const lookup *x, const pair_scratch *w, int64_t i, int64_t count,
                             const real *ds, real *dg) {
  const lookup_scratch *const leader = &w->list[x->map];
  for (int64_t r = i; r < i + count; r++) {
    const real *const from = ds + r * RPI_TILE;
    if (x->relation->map == RP_MAP_EDGES) {
      const stretch edges = edges_of(&leader->edges, r, w->tile.key);
      for (int64_t at = edges.begin; at < edges.end; at++) {
        const int64_t c = x->relation->edge_keys[at] - w->tile.key;
        dg[(x->relation->edge_labels[at] + 1) * RPI_TILE + c] += from[c];
      }
      continue;
    }
    const int32_t *const own = leader->relation + r * RPI_TILE;
    for (int64_t c = 0; c < w->tile.keys; c++) dg[(own[c] + 1) * RPI_TILE + c] += from[c];
  }
}

/* The same pair by pair: dk_j += ds w, and the table's gradient ds k_j. */
static void collect_keys_each(const pair_terms *p, int which, const pair_scratch *w, const slot *to,
                              int64_t i, int64_t count, const real *ds, real *dk) {
  const lookup *const x = &p->list[which];
  const table_sums *const sums = &to->sums[BAND_SUMS + which];
  const int64_t stride = x->relation->row_stride, padded = lookup_padded(x);
  const dense *const k = &w->tile.k;
  for (int64_t r = i; r < i + count; r++) {
    pair_walk left = walk_pairs(x, w, r);
    for (pair_list l; list_pairs(&left, ds + r * RPI_TILE, &l);) {
      for (int n = 0; n < l.count; n++) {
        add_scaled(x->width, l.weight[n], x->table + l.row[n] * stride, dk + l.key[n] * padded);
      }
      if (sums->lines) rows_to_lines(sums, padded, &l);
      for (int n = 0; sums->lines && n < l.count; n++) {
        add_scaled(x->width, l.weight[n], k->data + l.key[n] * k->stride,
                   sums->lines + l.row[n] * padded);
      }
    }
  }
}

/* What a tile of keys summed: dk += dB . wQ, dwQ += dBᵀ k. dg: of the tile, "no relation" first. */
static void close_tile_keys(const pair_terms *p, int which, const pair_scratch *w, const slot *to,
                            int64_t tile_keys, const real *dg, const dense *k, real *dk) {
  const lookup *const x = &p->list[which];
  const table_sums *const sums = &to->sums[BAND_SUMS + which];
  const int64_t rows = lookup_rows(x, w), padded = lookup_padded(x);
  add_transposed(dg + RPI_TILE, RPI_TILE, tile_keys, w->list[which].down, padded, rows, padded, dk);
  if (!sums->lines) return;
  const rpi_product product = {.a = dg + RPI_TILE,
                               .a_row = RPI_TILE,
                               .a_inner = 1,
                               .b = k->data,
                               .b_stride = k->stride,
                               .inner = tile_keys};
  add_lines(x, w, &product, rows, padded, sums);
}

/* Where dk of a tile of keys is summed, and what products of whole strips need: its keys as an
 * operand, NULL where they have no parts, and the sums that lie across; and its keys as words. */
typedef struct key_sums {
  real *dk;
  const operand *parts;
  real *across;
  const real *words;
} key_sums;

/* dk += dB . wQ, dwQ += dBᵀ k of a band, by tiles; lines: the sums of the window's column 0, or
 * NULL. False: some number has no parts. */
static bool close_skew_tiles(skew_scratch *w, const skew_range *range, int64_t width,
                             int64_t tile_keys, const key_sums *to, real *lines) {
  const packed_term *const table = &w->table;
  const int64_t before = skew_before(range, RPI_TILED_ROWS), first = range->first - before;
  const int64_t count = before + range->lines, more = -count & (RPI_TILED_ROWS - 1);
  real *const sums = w->products + (1 - before) * RPI_TILE;
  if (!to->parts || !table->down_fits) return false;
  memset(sums, 0, (size_t)(before * RPI_TILE) * sizeof(real));
  memset(sums + count * RPI_TILE, 0, (size_t)(more * RPI_TILE) * sizeof(real));
  for (int64_t line = 0; line < count; line += RPI_TILED_ROWS) {
    if (!pack_weights_both(sums + line * RPI_TILE, RPI_TILE, operand_from(w->left, line, 0),
                           operand_from(w->right, 0, line))) {
      return false;
    }
  }
  multiply_operands(operand_from(table->turned_parts, 0, first), width, w->right, RPI_TILE, count,
                    true, to->across, RPI_TILE);
  if (lines && !is_folded(table)) {
    multiply_operands(w->left, count, *to->parts, width, tile_keys, true, lines + first * width,
                      width);
  }
  for (int64_t line = 0; lines && is_folded(table) && line < count; line += RPI_TILED_ROWS) {
    const int64_t some = rpi_min(RPI_TILED_ROWS, count - line);
    multiply_operands(operand_from(w->left, line, 0), some, *to->parts, width, tile_keys, false,
                      table->lines, width);
    runs_add(&table->runs, first + line, some, width, table->lines, lines);
  }
  return true;
}

/* dk += dB . wQ of a band, by strips. What lies before its lines is no longer needed. */
static void add_skew_keys(skew_scratch *w, const skew_range *range, int64_t width,
                          int64_t tile_keys, real *dk) {
  const packed_term *const table = &w->table;
  const bool words = table->how != RPI_NUMBERS && table->words_meet;
  const int how = words ? table->how : RPI_NUMBERS;
  const int64_t before = words ? skew_before(range, 2) : 0, first = range->first - before;
  const int64_t count = before + range->lines;
  real *const sums = w->products + (1 - before) * RPI_TILE;
  dense weights = {sums, RPI_TILE};
  const real *down = table->down + first * width;
  if (words) {
    memset(sums, 0, (size_t)(before * RPI_TILE) * sizeof(real));
    word_lines(how, weights, count, RPI_TILE, w->words, RPI_TILE);
    weights.data = w->words;
    down = table->down_words + inner_of(how, first) * width;
  }
  const rpi_product product = product_across(how, weights, down, width, count, dk, width);
  rpi_block_product(RPI_START_LOAD, tile_keys, width / RPI_LANES, product, NULL);
}

/* ds of a block and a tile, for query terms on a band: dk += dB . wQ, dwQ += dBᵀ k. */
static void collect_skew(const term *query, skew_scratch *w, const table_sums *sums,
                         int64_t distance, int64_t count, int64_t tile_keys, const real *ds,
                         const dense *keys, const real *zeros, const key_sums *to) {
  const int64_t width = rpi_round_up(query->width, RPI_LANES);
  const skew_range range = skew_collect(w, distance, count, ds);
  const packed_term *const table = &w->table;
  const int how = table->how;
  real *const lines = w->products + RPI_TILE;
  if (range.tail) {
    add_strip(1, lines + range.lines * RPI_TILE, lines + (range.lines - 1) * RPI_TILE);
  }
  if (range.head) {
    add_transposed(w->products, RPI_TILE, tile_keys, table->down - width, width, 1, width, to->dk);
  }
  if (sums->lines && range.head) {
    add_product(w->products, RPI_TILE, 1, keys, tile_keys, width, sums->lines);
  }
  const int64_t first = w->w.first - sums->first + 1; /* column 0, after the head */
  real *const own = sums->lines ? sums->lines + first * width : NULL;
  if (range.lines == 0 || close_skew_tiles(w, &range, width, tile_keys, to, own)) return;
  add_skew_keys(w, &range, width, tile_keys, to->dk);
  if (!sums->lines) return;
  const dense weights = {lines, RPI_TILE};
  rpi_product product =
      product_by(RPI_NUMBERS, weights, keys->data, keys->stride, tile_keys, NULL, width);
  if (how != RPI_NUMBERS) {
    const dense words = word_weights(how, lines, range.lines, tile_keys, w->words);
    product = product_by(how, words, to->words, width, tile_keys, NULL, width);
  }
  if (is_folded(table)) {
    runs_add_product(&table->runs, product, range.first, range.first + range.lines, width, zeros,
                     table->lines, own);
    return;
  }
  product.c = own + range.begin * width;
  rpi_block_product(RPI_START_LOAD, range.lines, width / RPI_LANES, product, NULL);
}

/* The same for the rows of the block from i on, and for those that are looked up: into the sums by
 * relation and key. */
static void collect_queries(const pair_terms *p, pair_scratch *w, const slot *to,
                            const rpi_sequence *seq, int64_t i, int64_t count, const real *ds,
                            const real *zeros, const key_sums *own) {
  const pair_tile *const tile = &w->tile;
  if (p->query.present) {
    collect_skew(&p->query, &w->query, &to->sums[SUM_OF_QUERIES],
                 tile->key - (tile->q.row0 + i + seq->start), count, tile->keys, ds + i * RPI_TILE,
                 &tile->k, zeros, own);
  }
  for (int n = 0; n < p->count; n++) {
    const lookup *const x = &p->list[n];
    if (x->kind != PAIR_QUERY) continue;
    if (pair_by_pair(x, w)) {
      collect_keys_each(p, n, w, to, i, count, ds, own->dk);
      continue;
    }
    const bool whole = x->way == LOOKUP_WHOLE;
    real *const dg = w->list[n].dg + (whole ? tile->j / RPI_TILE * (x->rows + 1) * RPI_TILE : 0);
    collect_key_sums(x, w, i, count, ds, dg);
    if (!whole) close_tile_keys(p, n, w, to, tile->keys, dg, &tile->k, own->dk);
  }
}

/* After a block: the buckets of looked-up terms, as close_side does for bands. */
static void close_pairs(const pair_terms *p, const pair_scratch *w, const slot *to,
                        const pair_rows *q, const pair_rows *dz, real *dq, int64_t width) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    const table_sums *const sums = &to->sums[BAND_SUMS + i];
    if (x->kind == PAIR_QUERY || pair_by_pair(x, w)) continue;
    const pair_rows *const from = x->kind == PAIR_VALUE ? dz : q;
    const real *const buckets = w->list[i].buckets + RPI_LANES;
    const int64_t rows = lookup_rows(x, w), stride = lookup_stride(rows);
    const int64_t padded = lookup_padded(x);
    if (sums->numbers) add_numbers(x, w, buckets, stride, q->rows, rows, sums);
    if (sums->lines) {
      const rpi_product product = {.a = buckets,
                                   .a_row = 1,
                                   .a_inner = stride,
                                   .b = from->x,
                                   .b_stride = from->x_stride,
                                   .inner = q->rows};
      add_lines(x, w, &product, rows, padded, sums);
    }
    if (x->kind == PAIR_KEY) {
      const dense table = {w->list[i].down, padded};
      add_product(buckets, stride, q->rows, &table, rows, width, dq);
    }
  }
}

/* After a chunk of keys: what query terms summed whose tables are there whole. */
static void close_pair_keys(const pair_terms *p, const pair_scratch *w, const slot *to,
                            int64_t keys, const dense *k, real *dk) {
  for (int i = 0; i < p->count; i++) {
    const lookup *const x = &p->list[i];
    if (x->kind != PAIR_QUERY || x->way != LOOKUP_WHOLE) continue;
    for (int64_t j = 0; j < keys; j += RPI_TILE) {
      const dense at = rows_from(k, j);
      close_tile_keys(p, i, w, to, rpi_min(RPI_TILE, keys - j),
                      w->list[i].dg + j / RPI_TILE * (x->rows + 1) * RPI_TILE, &at,
                      dk + j * lookup_padded(x));
    }
  }
}

#endif
