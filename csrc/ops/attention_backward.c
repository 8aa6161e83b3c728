/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_backward.c: the gradients of (1) to (3) of attention.h.
 *
 * With dz the gradient of z, each line beside the statement it differentiates:
 *
 *   (4)  dp_ij = dz_i . v_j + dz_i . wV[r]          (3)
 *   (5)  ds_ij = p_ij (dp_ij - delta_i),  delta_i = dz_i . z_i          (2)
 *   (6)  dS_i[r] = sum of ds_ij over { j : r(i,j) = r }                 (1), like P_i[r]
 *   (7)  dq_i = scale ( sum_j ds_ij k_j + sum_r dS_i[r] wK[r] )         (1)
 *   (8)  dk_j = scale sum_i ds_ij q_i,    dwK[r] = scale sum_i dS_i[r] q_i
 *   (9)  dv_j = sum_i p_ij dz_i,          dwV[r] = sum_i P_i[r] dz_i    (3)
 *
 * The weights are computed again from the saved log-sum-exp, tile by tile.
 *
 * Two sides of one shape. (4) is (1) with dz for q, values for keys, wV for wK and
 * -delta_i for -lse_i; (9) is (8) with dz for q and p for ds. So all of it is written once for a
 * side, KEY (x = q) or VALUE (x = dz): backward_side.h.
 */
#include "ops/attention_backward.h"
#include "ops/attention_tiles.h"
#include "ops/pair_gradients.h"
#include "ops/pair_masks.h"

static backward_scratch *take_backward(rpi_arena *arena, const bounds *n, const rp_attention *s) {
  backward_scratch local = {0};
  backward_scratch *const kept = rpi_arena_take(arena, 1, sizeof local);
  const int64_t real_bytes = sizeof(real);
  take_side(arena, n, s->key, PARTS_ACROSS | PARTS_DOWN, s->D, n->width, n->key_columns,
            n->packed_keys, n->moved, &local.side[KEY]);
  take_side(arena, n, s->value, PARTS_ACROSS, s->Dv, n->value_width, n->value_columns,
            n->packed_values, false, &local.side[VALUE]);
  local.key_rows = rpi_arena_take(arena, n->keys * n->width, real_bytes);
  local.head_key_rows = rpi_arena_take(arena, n->keys * n->width, real_bytes);
  local.tail_key_rows = rpi_arena_take(arena, n->keys * n->width, real_bytes);
  local.vector = rpi_arena_take(arena, n->width, real_bytes);
  local.dq = rpi_arena_take(arena, block_rows(n) * n->width, real_bytes);
  local.zeros = rpi_arena_take(arena, n->block + RPI_TILE, real_bytes);
  local.level = rpi_arena_take(arena, n->block, real_bytes);
  take_pairs(arena, n, s, true, &local.pairs);
  for (int i = 0; i < PLACES; i++) {
    local.key_state[i] = rpi_arena_take(arena, n->keys / RPI_TILE, 1);
    local.key_worded[i] = rpi_arena_take(arena, n->keys / RPI_TILE, sizeof(bool));
    if (n->tiles) {
      local.key_parts[i] = take_operands(arena, n->tiles, n->keys / RPI_TILE, n->width, RPI_TILE);
    }
    if (n->how != RPI_NUMBERS) {
      local.key_words[i] = take_word_lines(arena, n->how, n->keys, n->width);
    }
  }
  if (n->tiles) local.ds = take_operand(arena, n->tiles, RPI_TILED_ROWS, RPI_TILE);
  if (n->how != RPI_NUMBERS) {
    local.ds_words = take_word_rows(arena, n->how, RPI_STRIP, RPI_TILE);
    for (int which = 0; which < SIDES; which++) {
      local.weight_words[which] = take_word_lines(arena, n->how, n->block, RPI_TILE);
    }
  }
  if (kept && !arena->failed) {
    *kept = local;
    memset(kept->zeros, 0, (size_t)(n->block + RPI_TILE) * sizeof(real));
  }
  return kept;
}

/* ---- a strip ------------------------------------------------------------- */

RPI_INLINE void differentiate_rows(int64_t count, int64_t columns, real *restrict s,
                                   real *restrict ds, const real *restrict negated_lse, bool sums,
                                   strip_sums to) {
  for (int64_t r = 0; r < count; r++, s += RPI_TILE, ds += RPI_TILE) {
    const real start = negated_lse[r];
    rpi_register all = {0}, slopes = {0};
    RPI_EACH_VECTOR(v, columns, {
      const rpi_register weights = rpi_share_lanes(rpi_load(s + v) + start);
      const rpi_register own = weights * rpi_load(ds + v);
      rpi_store(s + v, weights);
      rpi_store(ds + v, own);
      if (sums) all += weights;
      if (sums) slopes += own;
    })
    if (sums && to.p) rpi_store(to.p + r * RPI_LANES, rpi_load(to.p + r * RPI_LANES) + all);
    if (sums && to.ds) rpi_store(to.ds + r * RPI_LANES, rpi_load(to.ds + r * RPI_LANES) + slopes);
  }
}

/* p and ds of a strip from its scores and dp - delta: (2) and (5), and their sums. The rest of
 * -lse_i is added here, to the finished score: see start_rows. */
RPI_NOINLINE void differentiate_strip(int64_t count, int64_t columns, real *s, real *ds,
                                      const real *negated_lse, strip_sums to) {
  if (to.p || to.ds) differentiate_rows(count, columns, s, ds, negated_lse, true, to);
  else differentiate_rows(count, columns, s, ds, negated_lse, false, to);
}

/* A row of differentiate_pairs. capped: known where it is called, as `columns` mostly is. */
RPI_INLINE void differentiate_row(int64_t columns, bool capped, real cap, const int8_t *keep,
                                  real scale, real start, real delta, real *restrict s,
                                  real *restrict ds) {
  _Pragma("omp simd") for (int64_t j = 0; j < columns; j++) {
    const real weight = rpi_share(capped ? cap * s[j] + start : s[j] + start);
    const real kept = keep[j] < 0 ? scale : (real)0;
    /* a hidden score is -inf, its slope is no number, and its weight is 0 */
    const real slope = capped && weight > 0 ? 1 - s[j] * s[j] : 1;
    ds[j] = weight * (kept * ds[j] + delta) * slope;
    s[j] = kept * weight;
  }
}

/* The same where the score of a pair is capped or its weight may be dropped:
 *
 *   s' = cap tanh(s / cap),  p~ = keep p,  ds = p (keep dp - delta) (1 - tanh(s / cap)^2)
 *
 * ds holds dp alone, s the tanh where there is a cap. */
static void differentiate_pairs(const pair_terms *p, int64_t row, int64_t key, int64_t count,
                                int64_t columns, real *s, real *ds, const real *negated_lse,
                                const real *negated_delta) {
  keep_mask mask;
  if (p->dropout.threshold) {
    keep_make(&p->dropout, p->ordinal, p->site, row, count, key, columns, &mask);
  } else {
    memset(&mask, -1, sizeof mask);
  }
  const real scale = p->dropout.scale, cap = p->softcap;
  for (int64_t r = 0; r < count; r++, s += RPI_TILE, ds += RPI_TILE) {
    const int8_t *const keep = mask.of[r];
    const real start = negated_lse[r], delta = negated_delta[r];
    if (cap != 0) {
      differentiate_row(columns, true, cap, keep, scale, start, delta, s, ds);
    } else {
      RPI_COLUMNS(columns, differentiate_row(COLUMNS, false, 1, keep, scale, start, delta, s, ds))
    }
  }
}

/* Are p and ds differentiate_pairs' matter? */
static bool is_special(const pair_terms *p, const backward_block *block) {
  return p->softcap != 0 || p->dropout.threshold || block->odd;
}

/* Rows whose log-sum-exp is NaN start at NaN, and so are all their weights but those of pairs that
 * nobody sees, which are 0: so is what these would add to gradients of tables. */
RPI_NOINLINE void clear_unseen(int64_t count, int64_t columns, const real *level, const real *p,
                               real *ds) {
  for (int64_t r = 0; r < count; r++, p += RPI_TILE, ds += RPI_TILE) {
    for (int64_t c = 0; level[r] != level[r] && c < columns; c++) {
      if (p[c] == 0) ds[c] = 0;
    }
  }
}

static int64_t columns_worked(const backward_item *item, int64_t keys) {
  return columns_of_keys(&item->n, keys, item->pairs.any);
}

/* p and ds of a strip of queries on a tile of keys: (1), (2), (4), (5), and what they add to heads
 * and tails. multiplied: which of their products are there already. as: where they go as words,
 * too; or NULL. */
static void backward_weights(const backward_item *item, backward_scratch *w,
                             const backward_block *block, const int *lies, const bool *multiplied,
                             int64_t i, int64_t count, int64_t j, int64_t tile_keys,
                             const strip_words *as) {
  const pair_terms *const pairs = &item->pairs;
  const int64_t distance = item->r.key + j - (block->row0 + i + item->seq.start);
  const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
  const bool special = is_special(pairs, block);
  const int64_t columns = columns_worked(item, tile_keys);
  const bool words = item->n.how != RPI_NUMBERS;
  real *sums[SIDES];
  for (int which = 0; which < SIDES; which++) {
    side *const x = &w->side[which];
    const int64_t width = item->width[which];
    const real *const packed = words ? x->packed_words : x->packed;
    const rpi_product product =
        product_by(item->n.how, rows_from(&x->met, i), packed + j * inner_of(item->n.how, width),
                   RPI_TILE, width, x->product + i * RPI_TILE, RPI_TILE);
    const int64_t e_stride = band_stride(&item->term[which], &x->w);
    const real *const start = which == KEY ? w->level + i : special ? w->zeros : x->start + i;
    const int meets = window_meets(&x->w, nearest, farthest);
    sums[which] = lies[which] == ACROSS && x->collects ? end_sums(x, meets, i) : NULL;
    const real *const more =
        strip_more(pairs, &w->pairs, which == VALUE, i, count, start, w->zeros,
                   meets == MEETS_NOTHING && !multiplied[which], x->product + i * RPI_TILE);
    score_strip(&x->w, meets, &x->e, e_stride, i, distance, count, tile_keys, columns, &product,
                start, more, multiplied[which]);
  }
  real *const p = w->side[KEY].product + i * RPI_TILE;
  real *const ds = w->side[VALUE].product + i * RPI_TILE;
  if (pairs->softcap != 0) tanh_strip(count, columns, pairs->softcap, p);
  if (strip_is_cut(&item->sees, nearest, farthest, tile_keys)) {
    mask_strip(count, -item->sees.left - distance, item->sees.right - distance + 1, tile_keys,
               columns, p);
  }
  if (pairs->mask) {
    hide_strip(pairs, &item->seq, block->row0 + i, count, item->r.key + j, tile_keys, p);
  }
  if (special) {
    differentiate_pairs(pairs, block->row0 + i, item->r.key + j, count, columns, p, ds,
                        w->side[KEY].start + i, w->side[VALUE].start + i);
    if (block->odd) clear_unseen(count, columns, w->level + i, p, ds);
    if (sums[KEY]) add_row_sums(count, columns, ds, sums[KEY]);
    if (sums[VALUE]) add_row_sums(count, columns, p, sums[VALUE]);
  } else {
    const strip_sums to = {.p = sums[VALUE], .ds = sums[KEY]};
    const real *const start = w->side[KEY].start + i;
    if (as) differentiate_words_NATIVE(count, p, ds, start, to, *as);
    else differentiate_strip(count, columns, p, ds, start, to);
  }
}

/* A strip of queries on a tile of keys: p, ds, what they add to buckets. */
static void backward_strip(const backward_item *item, backward_scratch *w,
                           const backward_block *block, const int *lies, const bool *multiplied,
                           int64_t i, int64_t count, int64_t j, int64_t tile_keys,
                           const strip_words *as) {
  const int64_t distance = item->r.key + j - (block->row0 + i + item->seq.start);
  backward_weights(item, w, block, lies, multiplied, i, count, j, tile_keys, as);
  const real *const p = w->side[KEY].product + i * RPI_TILE;
  const real *const ds = w->side[VALUE].product + i * RPI_TILE;
  for (int which = 0; which < SIDES; which++) {
    side *const x = &w->side[which];
    if (lies[which] != ACROSS || !x->collects) continue;
    collect_strip(x, which == KEY ? ds : p, i, count, distance, tile_keys,
                  columns_worked(item, tile_keys));
  }
  if (item->pairs.count) {
    for (int values = 0; values < 2; values++) {
      pair_buckets buckets;
      pair_buckets_at(&item->pairs, &w->pairs, i, values, &buckets);
      const dense *const x = &w->side[values ? VALUE : KEY].x;
      const pair_ends ends = {.x = x->data + i * x->stride,
                              .x_stride = x->stride,
                              .rows = values ? NULL : w->dq + i * item->padded[KEY],
                              .rows_stride = item->padded[KEY],
                              .sums = item->sums->sums + BAND_SUMS};
      collect_pairs(&item->pairs, &buckets, &w->pairs, i, count, values ? p : ds, &ends);
    }
  }
}

/* The keys of a tile as lines of words, in the place where a block lies. */
static dense words_of_place(const backward_item *item, backward_scratch *w,
                            const backward_block *block, int place, int64_t j, int64_t tile_keys) {
  const int64_t width = item->padded[KEY];
  real *const words = w->key_words[place] + inner_of(item->n.how, j) * width;
  bool *const worded = &w->key_worded[place][j / RPI_TILE];
  if (!*worded) {
    word_lines(item->n.how, rows_from(&block->keys[place], j), tile_keys, width, words, width);
    *worded = true;
  }
  return (dense){words, width};
}

/* What a strip adds to dq (7). moved: which keys it meets; worded: its ds are words already. */
static void backward_queries(const backward_item *item, backward_scratch *w,
                             const backward_block *block, int moved, int64_t i, int64_t count,
                             int64_t j, int64_t tile_keys, bool worded) {
  const int how = item->n.how;
  const int64_t width = item->padded[KEY];
  dense keys = rows_from(&block->keys[moved], j),
        ds = {w->side[VALUE].product + i * RPI_TILE, RPI_TILE};
  if (how != RPI_NUMBERS) {
    keys = words_of_place(item, w, block, moved, j, tile_keys);
    ds = worded ? (dense){w->ds_words, inner_stride(how, RPI_TILE)}
                : word_weights(how, ds.data, count, tile_keys, w->ds_words);
  }
  const rpi_product dq =
      product_by(how, ds, keys.data, keys.stride, tile_keys, w->dq + i * width, width);
  rpi_strip_product(RPI_START_LOAD, count, width / RPI_LANES, &dq, NULL);
}

/* ---- a block ------------------------------------------------------------- */

/* The keys that query i sees. Through a mask they are counted once, by the first item that has its
 * chunk of queries: no two have it in one phase. */
static int64_t keys_of_row(const backward_item *item, int64_t i) {
  const stretch seen = keys_seen(&item->seq, &item->sees, i, 1);
  if (!item->pairs.mask || seen.begin >= seen.end) return seen.end - seen.begin;
  int64_t *const known = item->unmasked + lse_at(item->args->shape, &item->seq, item->head) + i;
  if (*known < 0) {
    *known = mask_count(mask_at(&item->pairs, &item->seq, i, seen.begin).at, seen.end - seen.begin);
  }
  return *known;
}

/* -lse_i and -delta_i of a block. A row that saw no key starts at -inf: its weights
 * are 0 whatever the scores.
 *
 * Accumulators round each of their D steps at the size that they have then. From -lse_i they
 * would start log(keys) below the usual score: eleven times the error of the plain formula
 * where scores are small. From 0 they would round at the size of a relation that gives large
 * scores to all of a row. So they start where a score of the average weight, one over the
 * keys seen, ends at 0, and the rest, the log of their number, comes last. */
static void start_rows(const backward_item *item, backward_block *block, backward_scratch *w) {
  const rpi_attention_backward_args *const args = item->args;
  const rpi_sequence *const seq = &item->seq;
  const int64_t Dv = args->shape->Dv, first = seq->query_row + block->row0;
  const dense z = {row_of(&args->out, seq->query_batch, item->head, first), args->out.row_stride};
  const dense dz = {row_of(&args->dout, seq->query_batch, item->head, first),
                    args->dout.row_stride};
  real *const slopes = w->side[VALUE].start;
  const real *const lse = args->lse + lse_at(args->shape, seq, item->head) + block->row0;
  /* dp is of rounded dz then: what a row has in common goes there */
  if (item->n.rounded) dot_rounded_rows(dz, z, block->rows, Dv, -1, slopes);
  else dot_rows(dz, z, block->rows, Dv, -1, slopes);
  int64_t known = 1; /* number of keys, and its log */
  double rest = 0;
  for (int64_t i = 0; i < block->rows; i++) {
    const double own = -(double)lse[i] * RPI_LOG2_E;
    const int64_t keys = rpi_max(keys_of_row(item, block->row0 + i), 1);
    if (keys != known) rest = log2((double)keys);
    known = keys;
    const bool whole = lse[i] == (real)-INFINITY || item->pairs.softcap != 0;
    const bool odd = lse[i] != lse[i];
    const real level = odd ? lse[i] : whole ? 0 : (real)(own + rest);
    block->odd |= odd;
    w->level[i] = level;
    w->side[KEY].start[i] = lse[i] == (real)-INFINITY ? lse[i] : (real)(own - (double)level);
    if (odd) w->side[KEY].start[i] = 0;
  }
}

/* While the strip of row i is at work. */
static void ask_backward(const backward_item *item, int64_t i) {
  const rpi_attention_backward_args *const args = item->args;
  const rp_attention *const s = args->shape;
  const rpi_sequence *const seq = &item->seq;
  const int64_t head = item->head, of_keys = item->key_head;
  const int64_t queries = seq->queries, keys = seq->keys;
  ask_for_next(&args->q, s, seq->query_batch, head, seq->query_row, i, queries, s->D);
  ask_for_next(&args->out, s, seq->query_batch, head, seq->query_row, i, queries, s->Dv);
  ask_for_next(&args->dout, s, seq->query_batch, head, seq->query_row, i, queries, s->Dv);
  ask_for_next(&args->k, s, seq->key_batch, of_keys, seq->key_row, i, keys, s->D);
  ask_for_next(&args->v, s, seq->key_batch, of_keys, seq->key_row, i, keys, s->Dv);
}

/* ---- a block and a tile --------------------------------------------------- */

/* The keys of a tile as an operand, in the place where a block lies; NULL: they have no parts. */
static const operand *keys_of_place(const backward_item *item, backward_scratch *w,
                                    const backward_block *block, int place, int64_t j,
                                    int64_t tile_keys) {
  const operand *const parts = &w->key_parts[place][j / RPI_TILE];
  unsigned char *const state = &w->key_state[place][j / RPI_TILE];
  if (*state == OPERAND_UNKNOWN) {
    const dense keys = rows_from(&block->keys[place], j);
    const bool fits = pack_met_operand(keys, ROWS_ARE_INNER, item->padded[KEY], tile_keys, *parts);
    *state = fits ? OPERAND_FITS : OPERAND_HAS_NONE;
  }
  return *state == OPERAND_FITS ? parts : NULL;
}

/* Rows of a block, as many as make a strip of an operand, on a tile: p and ds, dq (7), and p and ds
 * as operands of (8) and (9); fits: whether they are. */
static void backward_cell(const backward_item *item, backward_scratch *w,
                          const backward_block *block, const int *lies, int64_t first, int64_t end,
                          int64_t j, int64_t tile_keys, bool *fits) {
  const int64_t from = first / RPI_TILED_ROWS * RPI_TILED_ROWS, width = item->padded[KEY];
  const int64_t columns = columns_worked(item, tile_keys);
  side *const k = &w->side[KEY], *const v = &w->side[VALUE];
  bool multiplied[SIDES];
  for (int which = 0; which < SIDES; which++) {
    side *const x = &w->side[which];
    multiplied[which] = x->content_parts.lines_fit && x->tile_fits[j / RPI_TILE];
    if (!multiplied[which]) continue;
    multiply_operands(operand_from(x->content_parts.lines, from, 0),
                      rpi_min(RPI_TILED_ROWS, block->rows - from), x->tile_parts[j / RPI_TILE],
                      columns, item->width[which], false, x->product + from * RPI_TILE, RPI_TILE);
  }
  for (int64_t i = first; i < end; i += RPI_STRIP) {
    if (j == 0) ask_backward(item, i);
    backward_strip(item, w, block, lies, multiplied, i, rpi_min(RPI_STRIP, end - i), j, tile_keys,
                   NULL);
  }
  real *const p = k->product + from * RPI_TILE, *const ds = v->product + from * RPI_TILE;
  clear_beside(first - from, end - from, p);
  clear_beside(first - from, end - from, ds);
  const bool ds_fits = pack_weights_both(ds, columns, w->ds, operand_from(k->weights, 0, from));
  fits[KEY] &= ds_fits;
  fits[VALUE] &= pack_weights_right(p, columns, operand_from(v->weights, 0, from));
  const operand *const keys = keys_of_place(item, w, block, lies[KEY], j, tile_keys);
  if (ds_fits && keys) {
    multiply_operands(w->ds, end - from, *keys, width, tile_keys, true, w->dq + from * width,
                      width);
    return;
  }
  for (int64_t i = first; i < end; i += RPI_STRIP) {
    backward_queries(item, w, block, lies[KEY], i, rpi_min(RPI_STRIP, end - i), j, tile_keys,
                     false);
  }
}

/* The rows from first to end - 1 of a block on a tile. */
static void backward_strips(const backward_item *item, backward_scratch *w,
                            const backward_block *block, const int *lies, int64_t first,
                            int64_t end, int64_t j, int64_t tile_keys) {
  const bool tiles = item->n.tiles;
  const int how = item->n.how;
  const int64_t step = tiles ? RPI_TILED_ROWS : RPI_STRIP;
  bool fits[SIDES] = {tiles && w->side[KEY].content_parts.inner_fit,
                      tiles && w->side[VALUE].content_parts.inner_fit};
  /* p and ds of a whole tile become words as they are made; others once they are there */
  const bool worded = !is_special(&item->pairs, block) && makes_words(&item->n, tile_keys);
  for (int64_t i = first, next; i < end; i = next) {
    next = rpi_min(i / step * step + step, end);
    if (tiles) {
      backward_cell(item, w, block, lies, i, next, j, tile_keys, fits);
      continue;
    }
    if (j == 0) ask_backward(item, i);
    strip_words as = {0};
    if (worded) {
      const int64_t line = inner_of(how, i - first) * RPI_TILE;
      as = (strip_words){.ds = w->ds_words,
                         .p_lines = w->weight_words[VALUE] + line,
                         .ds_lines = w->weight_words[KEY] + line};
    }
    backward_strip(item, w, block, lies, fits, i, next - i, j, tile_keys, worded ? &as : NULL);
    backward_queries(item, w, block, lies[KEY], i, next - i, j, tile_keys, worded);
  }
  for (int which = 0; which < SIDES; which++) {
    const side *const x = &w->side[which];
    const int64_t width = item->padded[which], from = first / step * step;
    if (fits[which]) { /* turned: then weights are packed as they lie */
      bool *const begun = &x->begun[j / RPI_TILE];
      multiply_operands(operand_from(x->content_parts.inner, 0, from), width,
                        operand_from(x->weights, 0, from), columns_worked(item, tile_keys),
                        end - from, *begun, x->across + j * width, RPI_TILE);
      *begun = true;
      continue;
    }
    const real *const weights = w->side[which == KEY ? VALUE : KEY].product; /* ds, p */
    const dense own = {weights + first * RPI_TILE, RPI_TILE};
    if (how != RPI_NUMBERS) {
      const int64_t columns = rpi_round_up(tile_keys, RPI_LANES);
      const dense words = {w->weight_words[which], RPI_TILE};
      if (!worded) word_lines(how, own, end - first, columns, w->weight_words[which], RPI_TILE);
      const rpi_product product =
          product_across(how, words, x->line_words + inner_of(how, first) * width, width,
                         end - first, x->gradient + j * width, width);
      rpi_block_product(RPI_START_LOAD, tile_keys, width / RPI_LANES, product, NULL);
      continue;
    }
    add_transposed(own.data, own.stride, tile_keys, x->content.data + first * x->content.stride,
                   x->content.stride, end - first, width, x->gradient + j * width);
  }
}

/* A block of queries against the tile of keys at j, before that at next_j. */
static void backward_tile(const backward_item *item, backward_scratch *w,
                          const backward_block *block, const pair_rows *of_q,
                          const pair_rows *of_dz, int64_t j, int64_t next_j) {
  const pair_terms *const pairs = &item->pairs;
  const int64_t count = block->rows, width = item->padded[KEY];
  const int64_t tile_keys = rpi_min(RPI_TILE, item->r.keys - j), key = item->r.key + j;
  const int64_t next = item->r.key + next_j;
  if (mask_hides(pairs, &item->seq, block->row0, count, key, tile_keys, next)) return;
  const reach r = reach_of(&item->seq, &item->sees, block->row0, count, key, tile_keys);
  /* the strips of which some query sees some key of the tile */
  const int64_t distance = key - (block->row0 + item->seq.start);
  const int64_t first = rpi_max(distance - item->sees.right, 0) / RPI_STRIP * RPI_STRIP;
  const int64_t last = rpi_min(count, distance + tile_keys + item->sees.left);
  side *const k = &w->side[KEY];
  int lies[SIDES];
  for (int which = 0; which < SIDES; which++) {
    lies[which] = turn_tile(item, &w->side[which], which, j, &r);
  }
  const bool words = item->n.how != RPI_NUMBERS;
  if (pairs->any) {
    const pair_tile tile = {
        .q = *of_q,
        .dz = *of_dz,
        .j = j,
        .key = key,
        .keys = tile_keys,
        .next = next,
        .k = rows_from(&block->keys[ACROSS], j),
        .packed = k->packed + j * item->width[KEY],
        .words = words ? k->packed_words + j * inner_of(item->n.how, item->width[KEY]) : NULL,
        .parts = item->n.tiles && k->tile_fits[j / RPI_TILE] ? &k->tile_parts[j / RPI_TILE] : NULL};
    open_pair_tile(pairs, &w->pairs, &item->seq, &tile, w->zeros);
  }
  if (first >= last) return;
  const int64_t rows = rpi_min(rpi_round_up(last, RPI_STRIP), count) - first;
  backward_strips(item, w, block, lies, first, first + rows, j, tile_keys);
  if (pairs->queries) {
    const operand *const parts =
        item->n.tiles ? keys_of_place(item, w, block, ACROSS, j, tile_keys) : NULL;
    const key_sums to = {.dk = k->gradient + j * width,
                         .parts = parts,
                         .across = parts ? open_across(k, j, width) : NULL,
                         .words = words && pairs->query.present
                                      ? words_of_place(item, w, block, ACROSS, j, tile_keys).data
                                      : NULL};
    collect_queries(pairs, &w->pairs, item->sums, &item->seq, first, rows, w->side[VALUE].product,
                    w->zeros, &to);
  }
}

/* A block of queries against the item's chunk of keys. */
static void backward_rows(const backward_item *item, backward_scratch *w, backward_block *block) {
  const rp_attention *const s = item->args->shape;
  const int64_t count = block->rows, width = item->padded[KEY];
  start_rows(item, block, w);
  for (int which = 0; which < SIDES; which++) {
    open_side(item, block, &w->side[which], which, w->zeros);
  }
  memset(w->dq, 0, (size_t)(count * width) * sizeof(real));
  const dense *const q = &w->side[KEY].x, *const dz = &w->side[VALUE].x;
  const pair_rows of_q = {block->row0, count, q->data, q->stride};
  const pair_rows of_dz = {block->row0, count, dz->data, dz->stride};
  const pair_terms *const pairs = &item->pairs;
  if (pairs->any) {
    open_pair_rows(pairs, &w->pairs, &of_q, &of_dz);
    open_pair_block(pairs, &w->pairs, &item->seq, &item->sees, &of_q, &of_dz, item->r.key,
                    item->r.keys, &item->n);
  }
  const stretch seen = keys_seen(&item->seq, &item->sees, block->row0, count);
  const int64_t end = rpi_min(item->r.keys, seen.end - item->r.key);
  for (int64_t j = rpi_max(seen.begin - item->r.key, 0) / RPI_TILE * RPI_TILE; j < end;
       j += RPI_TILE) {
    const int64_t next = j + RPI_TILE < end ? j + RPI_TILE : j;
    backward_tile(item, w, block, &of_q, &of_dz, j, next);
  }
  if (pairs->moves && item->sums->sums[SUM_OF_QUERIES].lines) { /* up to here dq is ds . k */
    add_columns(w->dq, width, count, s->D, item->sums->sums[SUM_OF_QUERIES].lines);
  }
  for (int which = 0; which < SIDES; which++) {
    close_side(item, block, &w->side[which], which, w->zeros, w->dq);
  }
  if (pairs->count) close_pairs(pairs, &w->pairs, item->sums, &of_q, &of_dz, w->dq, width);
  put_rows(&item->args->gradients->q, item->seq.query_batch, item->head,
           item->seq.query_row + block->row0, count, s->D, w->dq, width, scale_of(s),
           item->first_for_queries);
}

/* ---- a pair of chunks ---------------------------------------------------- */

/* Keys with an end's vector added, of the tiles that some block lies wholly LEFT or RIGHT of: the
 * last block then, or the first one. */
static dense moved_keys(const backward_item *item, const dense *keys, int place, real *vector,
                        real *to) {
  const rectangle *const r = &item->r;
  const term *const t = &item->term[KEY];
  const int64_t padded = item->padded[KEY], block = item->n.block;
  const int64_t first = place == LEFT ? rpi_max(r->rows - 1, 0) / block * block : 0;
  const int64_t rows = rpi_min(block, r->rows - first);
  for (int64_t j = 0; j < r->keys; j += RPI_TILE) {
    const int64_t count = rpi_min(RPI_TILE, r->keys - j);
    const reach seen = reach_of(&item->seq, &item->sees, r->query + first, rows, r->key + j, count);
    if (place == LEFT ? seen.farthest >= t->first : seen.nearest < t->last) continue;
    const dense tile = rows_from(keys, j);
    moved_rows(t, place == LEFT ? t->first - 1 : t->last, &tile, count, padded, vector,
               to + j * padded);
  }
  return (dense){to, padded};
}

static void backward_pair(const backward_item *item, backward_scratch *w) {
  const rp_attention *const s = item->args->shape;
  const rectangle *const r = &item->r;
  const reach seen = reach_of(&item->seq, &item->sees, r->query, r->rows, r->key, r->keys);
  const bool hidden = seen.farthest < seen.nearest;
  if (hidden && !item->first_for_keys && !item->first_for_queries) return;
  for (int which = 0; which < SIDES; which++) open_keys(item, &w->side[which], which);
  const rp_rows *const k = &item->args->k;
  const int64_t padded = item->padded[KEY], count = rpi_max(r->keys, 0);
  dense keys[PLACES] = {
      [ACROSS] =
          dense_rows(row_of(k, item->seq.key_batch, item->key_head, item->seq.key_row + r->key),
                     k->row_stride, count, s->D, padded, item->n.tiles, w->key_rows)};
  if (item->term[KEY].ends && !item->by_row[KEY]) {
    keys[LEFT] = moved_keys(item, &keys[ACROSS], LEFT, w->vector, w->head_key_rows);
    keys[RIGHT] = moved_keys(item, &keys[ACROSS], RIGHT, w->vector, w->tail_key_rows);
  }
  for (int place = 0; place < PLACES; place++) {
    const size_t tiles = (size_t)rpi_divide_up(count, RPI_TILE);
    memset(w->key_state[place], OPERAND_UNKNOWN, tiles);
    memset(w->key_worded[place], false, tiles);
  }
  if (item->pairs.count) open_pair_tables(&item->pairs, &w->pairs);
  open_pair_keys(&item->pairs, &w->pairs, count, w->side[KEY].packed, w->zeros);
  for (int64_t done = 0; done < r->rows; done += item->n.block) {
    backward_block block = {
        .row0 = r->query + done,
        .rows = rpi_min(item->n.block, r->rows - done),
        .keys = {[ACROSS] = keys[ACROSS], [RIGHT] = keys[RIGHT], [LEFT] = keys[LEFT]}};
    backward_rows(item, w, &block);
  }
  if (item->pairs.count) {
    close_pair_keys(&item->pairs, &w->pairs, item->sums, count, &keys[ACROSS],
                    w->side[KEY].gradient);
  }
  for (int which = 0; which < SIDES; which++) close_keys(item, &w->side[which], which);
}
