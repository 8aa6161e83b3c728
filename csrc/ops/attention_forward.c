/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_forward.c: (1) to (3) of attention.h.
 *
 * A chunk of queries keeps running sums while it walks the keys, chunk by chunk. Each
 * chunk of keys is packed once (transposed, scaled); then every block of queries walks
 * its tiles, strip by strip: scores, mask, maximum, weights, buckets, weighted values.
 */
#include "ops/attention_forward.h"
#include "ops/attention_tiles.h"
#include "ops/pair_masks.h"

/* Blocks of the largest chunk of queries. */
static int64_t blocks_of(const bounds *n) {
  return rpi_divide_up(n->queries, rpi_max(n->block, 1));
}

static forward_scratch *take_forward(rpi_arena *arena, const bounds *n, const rp_attention *s) {
  forward_scratch local = {0};
  forward_scratch *const kept = rpi_arena_take(arena, 1, sizeof local);
  const int64_t real_bytes = sizeof(real);
  local.keys = rpi_arena_take(arena, n->keys * s->D, real_bytes);
  local.values = rpi_arena_take(arena, n->keys * n->value_width, real_bytes);
  local.state.max = rpi_arena_take(arena, n->queries, real_bytes);
  local.state.negated_max = rpi_arena_take(arena, n->queries, real_bytes);
  local.state.sums = rpi_arena_take(arena, SUMS * n->queries * RPI_LANES, real_bytes);
  const int64_t out_rows = n->tiles ? rpi_round_up(n->queries, RPI_TILED_ROWS) : n->queries;
  local.state.out = rpi_arena_take(arena, out_rows * n->value_width, real_bytes);
  if (n->folds) {
    local.state.past_sums = rpi_arena_take(arena, SUMS * n->queries * RPI_LANES, real_bytes);
    local.state.past_out = rpi_arena_take(arena, n->queries * n->value_width, real_bytes);
  }
  local.state.seen = rpi_arena_take(arena, n->queries, 1);
  take_packed(arena, n, s->key, n->packed_keys, n->width, PARTS_ACROSS, &local.key_table);
  take_packed(arena, n, NULL, n->packed_values, n->value_width, PARTS_DOWN, &local.value_table);
  local.e = take_e(arena, block_rows(n), n->key_columns, rpi_round_up(n->queries, RPI_TILED_ROWS),
                   blocks_of(n));
  local.buckets = rpi_arena_take(arena, n->block * window_stride(n->value_columns), real_bytes);
  local.ends = rpi_arena_take(arena, 2 * n->value_width, real_bytes);
  local.zeros = rpi_arena_take(arena, n->block + RPI_TILE, real_bytes);
  if (n->moved) local.moved = rpi_arena_take(arena, (n->block + 1) * n->width, real_bytes);
  local.strip =
      rpi_arena_take(arena, (n->tiles ? RPI_TILED_ROWS : RPI_STRIP) * RPI_TILE, real_bytes);
  take_pairs(arena, n, s, false, &local.pairs);
  const int64_t tiles = rpi_divide_up(n->keys, RPI_TILE);
  local.keys_fit = rpi_arena_take(arena, tiles, sizeof(bool));
  if (n->tiles) {
    local.tile_keys = take_operands(arena, n->tiles, tiles, RPI_TILE, s->D);
    local.tile_values = take_operands(arena, n->tiles, tiles, n->value_width, RPI_TILE);
    local.queries = take_operand(arena, n->tiles, block_rows(n), s->D);
    if (n->moved) local.related = take_operand(arena, n->tiles, block_rows(n), s->D);
    local.weights = take_operand(arena, n->tiles, RPI_TILED_ROWS, RPI_TILE);
    local.bucket_parts = take_operand(arena, n->tiles, RPI_TILED_ROWS, n->value_columns);
    local.values_fit = rpi_arena_take(arena, tiles, sizeof(bool));
  }
  if (n->how != RPI_NUMBERS) {
    local.key_words = take_word_lines(arena, n->how, s->D, n->keys);
    local.value_words = take_word_lines(arena, n->how, n->keys, n->value_width);
    local.query_words = take_word_rows(arena, n->how, n->block, s->D);
    local.weight_words = take_word_rows(arena, n->how, RPI_STRIP, RPI_TILE);
    if (n->moved) local.related_words = take_word_rows(arena, n->how, n->block, s->D);
    local.bucket_words = take_word_rows(arena, n->how, RPI_STRIP, n->value_columns);
  }
  if (kept && !arena->failed) {
    *kept = local;
    memset(kept->zeros, 0, (size_t)(n->block + RPI_TILE) * sizeof(real));
  }
  return kept;
}

/* Four running maxima: one would wait four cycles for itself at every vector. */
RPI_NOINLINE real strip_maximum(int64_t count, int64_t columns, const real *s) {
  rpi_register m0 = (rpi_register){0} - (real)INFINITY, m1 = m0, m2 = m0, m3 = m0;
  for (; columns < RPI_TILE && count > 0; count--, s += RPI_TILE) {
    for (int64_t v = 0; v < columns; v += RPI_LANES) m0 = rpi_higher(rpi_load(s + v), m0);
  }
  for (const real *const end = s + count * RPI_TILE; s < end; s += 4 * RPI_LANES) {
    m0 = rpi_higher(rpi_load(s), m0);
    m1 = rpi_higher(rpi_load(s + RPI_LANES), m1);
    m2 = rpi_higher(rpi_load(s + 2 * RPI_LANES), m2);
    m3 = rpi_higher(rpi_load(s + 3 * RPI_LANES), m3);
  }
  m0 = rpi_higher(rpi_higher(m1, m0), rpi_higher(m3, m2));
  const real *const lanes = (const real *)&m0;
  real most = lanes[0];
  _Pragma("omp simd reduction(max : most)") for (int l = 0; l < RPI_LANES; l++) {
    most = lanes[l] > most ? lanes[l] : most;
  }
  return most;
}

/* Scales down what a row holds of all keys before this tile. */
static void scale_row(const running *state, int64_t row, int64_t width, real factor) {
  real *const sums[] = {state->sums, state->past_sums}, *const out[] = {state->out,
                                                                        state->past_out};
  for (int part = 0; part < (state->folds ? 2 : 1); part++) {
    for (int x = 0; x < SUMS; x++) {
      real *const sum = sums[part] + x * state->plane + row * RPI_LANES;
      if (state->begun[x]) rpi_store(sum, factor * rpi_load(sum));
    }
    for (int64_t c = 0; c < width; c++) out[part][row * width + c] *= factor;
  }
}

/* How far above its largest score a row's maximum is set: an integer, so that weights have the
 * digits that they would have, and the more the larger the score. Rounding at that distance is
 * less than the score's own, and what goes on growing is not raised at every step. */
static real margin_above(real most) {
  const real size = most < 0 ? -most : most;
  return size < 4 * RPI_RAISE ? (real)(int)(size / 4) : RPI_RAISE;
}

/* Raises the maximum of the rows from `row` on that need it, told in raised, and scales down what
 * they hold. True where a row's scores were summed from a start so far from them that they are to
 * be summed again: their rounding was at the size of the old maximum, or, in a row's first tile, of
 * what a relation alone gives to all. related: there are relations. */
RPI_NOINLINE bool raise_maximum(int64_t row, int64_t count, int64_t columns, real *s,
                                const running *state, int64_t value_width, real *buckets,
                                int64_t bucket_stride, pair_buckets *pairs, bool related,
                                bool *raised) {
  bool stale = false;
  for (int64_t r = 0; r < count; r++, row++, s += RPI_TILE) {
    const bool seen = state->seen[row];
    const real most = strip_maximum(1, columns, s);
    if (most == (real)-INFINITY || (seen && !(most > RPI_RAISE))) continue;
    const real rise = most + margin_above(state->max[row] + most);
    RPI_EACH_VECTOR(v, columns, { rpi_store(s + v, rpi_load(s + v) - rise); })
    raised[r] = true;
    stale |= (seen || related) && (most > 2 * RPI_RAISE || most < -2 * RPI_RAISE);
    if (seen) {
      const real factor = rpi_exp2(-rise);
      scale_row(state, row, value_width, factor);
      for (int64_t c = 0; c < bucket_stride; c++) buckets[r * bucket_stride + c] *= factor;
      for (int x = 0; x < pairs->count; x++) {
        const int64_t numbers = pairs->stride[x], at = r * numbers;
        for (int64_t c = 0; pairs->rows[x] && c < numbers; c++) pairs->rows[x][at + c] *= factor;
        for (int64_t c = 0; pairs->folded[x] && c < numbers; c++) {
          pairs->folded[x][at + c] *= factor;
        }
      }
    }
    state->seen[row] = 1;
    state->max[row] += rise;
    state->negated_max[row] = -state->max[row];
  }
  return stale;
}

/* Scores of raised rows that were summed again: where they are so large that their rounding alone
 * puts all of a row far below its maximum, the largest is the maximum all the same, or the row
 * would have no weight. */
RPI_NOINLINE void settle_strip(int64_t count, int64_t columns, real *s, const bool *raised) {
  for (int64_t r = 0; r < count; r++) {
    real *const row = s + r * RPI_TILE;
    const real most = raised[r] ? strip_maximum(1, columns, row) : 0;
    if (!(most < -2 * RPI_RAISE) || most == (real)-INFINITY) continue;
    RPI_EACH_VECTOR(v, columns, { rpi_store(row + v, rpi_load(row + v) - most); })
  }
}

/* Weights (2) of a strip in place of its scores, added up into one of the rows' sums. */
RPI_NOINLINE void weigh_strip(int64_t count, int64_t columns, real *restrict s,
                              real *restrict sum) {
  for (int64_t r = 0; r < count; r++) {
    real *const row = s + r * RPI_TILE, *const to = sum + r * RPI_LANES;
    rpi_register all = {0};
    RPI_EACH_VECTOR(v, columns, {
      const rpi_register weights = rpi_exp2_lanes(rpi_load(row + v));
      rpi_store(row + v, weights);
      all += weights;
    })
    rpi_store(to, rpi_load(to) + all);
  }
}

/* One of the sums, of the rows from `row` of the chunk on. */
static real *sum_of(const forward_item *item, running *state, int which, int64_t row) {
  real *const sums = state->sums + which * state->plane;
  if (!state->begun[which]) {
    const size_t bytes = (size_t)(item->count * RPI_LANES) * sizeof(real);
    memset(sums, 0, bytes);
    if (state->folds) memset(state->past_sums + which * state->plane, 0, bytes);
    state->begun[which] = true;
  }
  return sums + row * RPI_LANES;
}

static pair_rows rows_of(const forward_view *view) {
  return (pair_rows){
      .row0 = view->row0, .rows = view->rows, .x = view->q, .x_stride = view->q_stride};
}

/* The products of its scores by tiles of bf16, for all rows of their strip. */
static void forward_products(const forward_item *item, const forward_scratch *w,
                             const forward_view *view, const cell *x) {
  const int64_t row = x->i / RPI_TILED_ROWS * RPI_TILED_ROWS, D = item->args->shape->D;
  const int64_t rows = rpi_min(RPI_TILED_ROWS, view->rows - row);
  multiply_operands(operand_from(w->queries, row, 0), rows, w->tile_keys[x->j / RPI_TILE],
                    x->columns, D, false, x->at - (x->i - row) * RPI_TILE, RPI_TILE);
}

/* The same once more for some of the rows, since their scores took its place. */
RPI_NOINLINE void forward_products_again(const forward_item *item, const forward_scratch *w,
                                         const forward_view *view, const cell *x) {
  _Alignas(64) real all[RPI_TILED_ROWS * RPI_TILE];
  cell own = *x;
  own.at = all + x->i % RPI_TILED_ROWS * RPI_TILE;
  forward_products(item, w, view, &own);
  memcpy(x->at, own.at, (size_t)(x->count * RPI_TILE) * sizeof(real));
}

/* Scores (1) of a strip, less the running maxima of its rows, hidden ones -inf. */
RPI_INLINE void forward_scores(const forward_item *item, forward_scratch *w,
                               const forward_view *view, const real *negated_max, cell *x) {
  const window *const kw = &view->key_window;
  const int64_t i = x->i, count = x->count, j = x->j, tile_keys = x->tile_keys;
  const int64_t columns = x->columns, D = item->args->shape->D;
  const int64_t distance = view->key + j - (view->row0 + i + item->seq.start);
  const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
  const real *const keys = item->n.how != RPI_NUMBERS ? w->key_words : w->keys;
  rpi_product scores =
      product_by(item->n.how, rows_from(&view->met, i), keys + j * inner_of(item->n.how, D),
                 RPI_TILE, D, x->at, RPI_TILE);
  if (!item->content && !item->pairs.moves) scores.inner = 0;
  const bool capped = item->pairs.softcap != 0;
  const real *const start = capped ? w->zeros : negated_max;
  const int meets = window_meets(kw, nearest, farthest);
  if (!x->more) {
    x->more = strip_more(&item->pairs, &w->pairs, false, i, count, start, w->zeros,
                         meets == MEETS_NOTHING && !x->multiplied, x->at);
  }
  score_strip(kw, meets, &view->e, view->e_stride, i, distance, count, tile_keys, columns, &scores,
              start, x->more, x->multiplied);
  if (x->more == x->at) x->more = NULL;
  if (capped) cap_strip(count, columns, item->pairs.softcap, negated_max, x->at);
  if (strip_is_cut(&item->sees, nearest, farthest, tile_keys)) {
    mask_strip(count, -item->sees.left - distance, item->sees.right - distance + 1, tile_keys,
               columns, x->at);
  }
  if (item->pairs.mask) {
    hide_strip(&item->pairs, &item->seq, view->row0 + i, count, view->key + j, tile_keys, x->at);
  }
}

/* Scores (1) and weights (2) of a strip; true where these are words, or parts, already. */
RPI_INLINE bool forward_weights(const forward_item *item, forward_scratch *w,
                                const forward_view *view, cell x) {
  const window *const vw = &view->value_window;
  const int64_t i = x.i, count = x.count, j = x.j, tile_keys = x.tile_keys;
  const int64_t columns = x.columns, width = item->n.value_width, row = view->block + i;
  real *const at = x.at;
  /* from the strip's first query to the tile's first key */
  const int64_t distance = view->key + j - (view->row0 + i + item->seq.start);
  const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
  running *const state = &w->state;
  const int64_t bucket_stride = view->collects ? window_stride(vw->columns) : 0;
  real *const buckets = w->buckets + i * bucket_stride;
  pair_buckets of_pairs;
  pair_buckets_at(&item->pairs, &w->pairs, i, true, &of_pairs);
  const bool related = item->pairs.any || !window_empty(&view->key_window);
  bool again = false, raised[RPI_TILED_ROWS] = {false};
  do {
    if (again && x.multiplied) forward_products_again(item, w, view, &x);
    forward_scores(item, w, view, state->negated_max + row, &x);
    bool unseen = false;
    for (int64_t r = 0; r < count; r++) unseen |= !state->seen[row + r];
    const bool stale = (unseen || strip_maximum(count, columns, at) > RPI_RAISE) &&
                       raise_maximum(row, count, columns, at, state, width, buckets, bucket_stride,
                                     &of_pairs, related, raised);
    if (again) settle_strip(count, columns, at, raised);
    again = stale && !again;
  } while (again);
  const int meets = window_meets(vw, nearest, farthest);
  const int whole = meets == MEETS_HEAD ? SUM_HEAD : meets == MEETS_TAIL ? SUM_TAIL : SUM_MIDDLE;
  const bool dropped = item->pairs.dropout.threshold != 0;
  bool worded = !dropped && makes_words(&item->n, tile_keys);
  if (x.parts) {
    worded = weigh_parts_NATIVE(i % RPI_TILED_ROWS, count, columns, at,
                                sum_of(item, state, whole, row), w->weights);
  } else if (worded) {
    weigh_words_NATIVE(count, at, sum_of(item, state, whole, row), w->weight_words);
  } else if (!dropped) {
    weigh_strip(count, columns, at, sum_of(item, state, whole, row));
  } else {
    weigh_strip(count, columns, at, sum_of(item, state, SUM_MIDDLE, row));
    drop_strip(&item->pairs, view->row0 + i, count, view->key + j, columns, at);
    if (whole != SUM_MIDDLE) {
      add_row_sums(count, columns, at, sum_of(item, state, whole, row));
    }
  }
  if (meets == MEETS_BAND) {
    const bool before = vw->head && nearest < vw->first;
    band_store(vw, count, columns, at, RPI_LANES + distance - vw->first, false, buckets,
               vw->tail ? sum_of(item, state, SUM_AFTER, row) : NULL,
               before ? sum_of(item, state, SUM_BEFORE, row) : NULL);
  }
  if (of_pairs.count) {
    const pair_ends ends = {.rows = state->out + row * width, .rows_stride = width};
    collect_pairs(&item->pairs, &of_pairs, &w->pairs, i, count, at, &ends);
  }
  return worded;
}

/* The weighted values (3) of a strip. worded: its weights are words already. */
RPI_INLINE void forward_values(const forward_item *item, forward_scratch *w,
                               const forward_view *view, const cell *x, bool worded) {
  const int how = item->n.how;
  const int64_t width = item->n.value_width;
  dense weights = {x->at, RPI_TILE}, values = rows_from(&view->values, x->j);
  if (how != RPI_NUMBERS) {
    weights = worded ? (dense){w->weight_words, inner_stride(how, RPI_TILE)}
                     : word_weights(how, x->at, x->count, x->tile_keys, w->weight_words);
    values = (dense){w->value_words + inner_of(how, x->j) * width, width};
  }
  const rpi_product weighted = product_by(how, weights, values.data, values.stride, x->tile_keys,
                                          w->state.out + (view->block + x->i) * width, width);
  rpi_strip_product(RPI_START_LOAD, x->count, width / RPI_LANES, &weighted, NULL);
}

/* The order in which queries meet runs of keys: from where they stand to the first key, and
 * then on to the last. Relations mostly favour the near (ALiBi's scores fall by more than
 * RPI_RAISE from tile to tile), and who meets the near first never raises the maximum again. */
typedef struct walk {
  int64_t begin, size, count, nearest;
} walk;

/* begin is rounded down to a tile. */
static walk walk_of(const forward_item *item, int64_t query, int64_t rows, int64_t begin,
                    int64_t end, int64_t size) {
  const int64_t from = begin / RPI_TILE * RPI_TILE, last = query + rows - 1 + item->seq.start;
  const int64_t stands = item->sees.right <= 0 ? last : last - rows / 2;
  const int64_t count = end > begin ? rpi_divide_up(end - from, size) : 0;
  return (walk){.begin = from,
                .size = size,
                .count = count,
                .nearest = rpi_max(rpi_min((stands - from) / size, count - 1), 0)};
}

static int64_t walk_at(const walk *w, int64_t step) {
  return w->begin + w->size * (step <= w->nearest ? w->nearest - step : step);
}

/* Queries with what all keys meet beside them added. */
static dense moved_queries(const forward_item *item, const forward_scratch *w, const dense *q,
                           int64_t count) {
  const int64_t D = item->args->shape->D, width = item->n.width;
  real *const vector = w->moved + item->n.block * width;
  term_vector(&item->pairs.query, 0, width, vector);
  for (int64_t r = 0; r < count; r++) {
    const real *const from = q->data + r * q->stride;
    real *const to = w->moved + r * width;
    for (int64_t c = 0; c < D; c++) to[c] = (item->content ? from[c] : 0) + vector[c];
  }
  return (dense){w->moved, width};
}

/* Makes a block of queries ready to walk a chunk of keys: windows, E, empty buckets. */
static forward_view open_view(const forward_item *item, forward_scratch *w, int64_t block,
                              int64_t key, int64_t keys, dense values, const reach *r) {
  const rp_attention *const s = item->args->shape;
  const rpi_sequence *const seq = &item->seq;
  const int64_t row0 = item->query + block, count = rpi_min(item->n.block, item->count - block);
  forward_view view = {
      .row0 = row0,
      .rows = count,
      .block = block,
      .key = key,
      .q = row_of(&item->args->q, seq->query_batch, item->head, seq->query_row + row0),
      .q_stride = item->args->q.row_stride,
      .keys = {row_of(&item->args->k, seq->key_batch, item->key_head, seq->key_row + key),
               item->args->k.row_stride},
      .values = values,
      .at = {.distance = key - (row0 + seq->start), .rows = count, .keys = keys},
      .e = {.at = w->e.at,
            .head = w->e.head + block,
            .tail = w->e.tail + block,
            .known = w->e.known + block / item->n.block},
      .key_window = window_of(&item->key, r->nearest, r->farthest),
      .value_window = window_of(&item->value, r->nearest, r->farthest),
  };
  window *const kw = &view.key_window, *const vw = &view.value_window;
  const reach all = reach_of(seq, &item->sees, item->query, item->count, key, keys);
  const dense q = {view.q, view.q_stride};
  const bool apart = item->pairs.moves && item->key.vector_count; /* E is of q as it is */
  const operand *related = &w->queries;
  view.content = q;
  if (item->pairs.moves) view.content = moved_queries(item, w, &q, count);
  view.met = view.content;
  if (item->n.how != RPI_NUMBERS) {
    view.met = word_rows(item->n.how, view.content, count, s->D, w->query_words);
  }
  dense own = apart ? q : view.met;
  if (apart && item->n.how != RPI_NUMBERS) {
    own = word_rows(item->n.how, q, count, s->D, w->related_words);
  }
  if (item->n.tiles) {
    view.fits = pack_operand(view.content, ROWS_ARE_LINES, count, s->D, w->queries);
    if (!view.fits) related = NULL;
    if (apart) {
      related = pack_operand(q, ROWS_ARE_LINES, count, s->D, w->related) ? &w->related : NULL;
    }
  }
  if (!window_empty(kw)) {
    const real factor = scale_of(s) * (real)RPI_LOG2_E;
    const window whole = window_of(&item->key, all.nearest, all.farthest);
    const window packed = window_to_pack(&w->key_table, kw, &whole);
    pack_window(&item->key, &packed, factor, (real)RPI_LOG2_E, item->n.width, &item->n,
                &w->key_table);
    begin_strip(&w->key_table, kw);
    band_scores(&item->key, kw, &w->key_table, own, item->n.tiles ? related : NULL, &view.at,
                factor, w->zeros, &view.e);
  }
  view.e_stride = band_stride(&item->key, kw);
  view.collects = vw->columns && !window_is_tail(vw);
  if (view.collects) {
    const window whole = window_of(&item->value, all.nearest, all.farthest);
    pack_window(&item->value, &whole, 1, 0, item->n.value_width, &item->n, &w->value_table);
    begin_strip(&w->value_table, vw);
    memset(w->buckets, 0, (size_t)(count * window_stride(vw->columns)) * sizeof(real));
  }
  w->pairs.base = block;
  const pair_rows rows = rows_of(&view);
  if (item->pairs.any) {
    open_pair_block(&item->pairs, &w->pairs, seq, &item->sees, &rows, NULL, key, keys, &item->n);
  }
  return view;
}

/* The same for the tile at key j of the chunk, before that at `next`. */
static void open_tile(const forward_item *item, forward_scratch *w, const forward_view *view,
                      int64_t j, int64_t tile_keys, int64_t next) {
  if (!item->pairs.any) return;
  const int64_t D = item->args->shape->D;
  const bool words = item->n.how != RPI_NUMBERS;
  const pair_tile tile = {
      .q = rows_of(view),
      .j = j,
      .key = view->key + j,
      .keys = tile_keys,
      .next = view->key + next,
      .k = rows_from(&view->keys, j),
      .packed = w->keys + j * D,
      .words = words ? w->key_words + j * inner_of(item->n.how, D) : NULL,
      .parts = item->n.tiles && w->keys_fit[j / RPI_TILE] ? &w->tile_keys[j / RPI_TILE] : NULL};
  open_pair_tile(&item->pairs, &w->pairs, &item->seq, &tile, w->zeros);
}

/* While the strip of row i is at work. */
static void ask_forward(const forward_item *item, int64_t i) {
  const rpi_attention_args *const args = item->args;
  const rp_attention *const s = args->shape;
  const rpi_sequence *const seq = &item->seq;
  const int64_t head = item->head, of_keys = item->key_head;
  ask_for_next(&args->q, s, seq->query_batch, head, seq->query_row, i, seq->queries, s->D);
  ask_for_next(&args->k, s, seq->key_batch, of_keys, seq->key_row, i, seq->keys, s->D);
  ask_for_next(&args->v, s, seq->key_batch, of_keys, seq->key_row, i, seq->keys, s->Dv);
}

/* Is every pair of some rows seen, outside of all bands, and nothing else to be said of it? */
static bool lies_plainly(const forward_item *item, const forward_view *view, int64_t i,
                         int64_t count, int64_t j, int64_t tile_keys) {
  const pair_terms *const p = &item->pairs;
  if (p->any || p->mask || p->softcap != 0 || p->dropout.threshold) return false;
  const int64_t distance = view->at.distance + j - i;
  const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
  return !strip_is_cut(&item->sees, nearest, farthest, tile_keys) &&
         window_meets(&view->key_window, nearest, farthest) != MEETS_BAND &&
         window_meets(&view->value_window, nearest, farthest) != MEETS_BAND;
}

/* Rows of a block on a tile of keys, no more than a strip of an operand has: products are all of
 * its strips' at once, and where nothing is to be said of single rows so is everything else. */
static void forward_cell(const forward_item *item, forward_scratch *w, const forward_view *view,
                         int64_t first, int64_t end, int64_t j, int64_t tile_keys, bool asks) {
  const int64_t tile = j / RPI_TILE, width = item->n.value_width;
  const int64_t from = first / RPI_TILED_ROWS * RPI_TILED_ROWS;
  real *const at = w->strip;
  cell x = {.i = first,
            .j = j,
            .tile_keys = tile_keys,
            .columns = columns_of_keys(&item->n, tile_keys, item->pairs.any),
            .at = at + (first - from) * RPI_TILE,
            .multiplied = view->fits && w->keys_fit[tile],
            .parts = weighs_parts(&item->n) && !item->pairs.dropout.threshold};
  if (x.multiplied) forward_products(item, w, view, &x);
  const bool plain = x.multiplied && lies_plainly(item, view, first, end - first, j, tile_keys);
  const int64_t most = plain ? RPI_TILED_ROWS : RPI_STRIP;
  bool fits = true;
  for (; x.i < end; x.i += x.count, x.at += x.count * RPI_TILE) {
    x.count = rpi_min(most, end - x.i);
    for (int64_t i = x.i; asks && i < x.i + x.count; i += RPI_STRIP) ask_forward(item, i);
    fits &= forward_weights(item, w, view, x);
  }
  if (x.parts) {
    clear_parts(0, first - from, x.columns, w->weights);
    clear_parts(end - from, RPI_TILED_ROWS, x.columns, w->weights);
  } else {
    clear_beside(first - from, end - from, at);
    fits = pack_weights_left(at, x.columns, w->weights);
  }
  if (w->values_fit[tile] && fits) {
    multiply_operands(w->weights, end - from, w->tile_values[tile], width, tile_keys, true,
                      w->state.out + (view->block + from) * width, width);
    return;
  }
  for (x.i = first; x.i < end; x.i += x.count) {
    x.count = rpi_min(RPI_STRIP, end - x.i);
    x.at = at + (x.i - from) * RPI_TILE;
    forward_values(item, w, view, &x, false);
  }
}

/* A block of queries against a tile of keys. */
static void forward_tile(const forward_item *item, forward_scratch *w, const forward_view *view,
                         int64_t j, int64_t tile_keys, bool asks) {
  /* the rows of which some see some key of the tile */
  const int64_t distance = view->at.distance + j;
  const int64_t first = rpi_max(distance - item->sees.right, 0) / RPI_STRIP * RPI_STRIP;
  const int64_t end = rpi_min(view->rows, distance + tile_keys + item->sees.left);
  for (int64_t i = first, next; i < end; i = next) {
    if (item->n.tiles) {
      next = rpi_min(i / RPI_TILED_ROWS * RPI_TILED_ROWS + RPI_TILED_ROWS, end);
      forward_cell(item, w, view, i, next, j, tile_keys, asks);
      continue;
    }
    next = i + RPI_STRIP;
    const cell x = {.i = i,
                    .count = rpi_min(RPI_STRIP, view->rows - i),
                    .j = j,
                    .tile_keys = tile_keys,
                    .columns = columns_of_keys(&item->n, tile_keys, item->pairs.any),
                    .at = w->strip};
    if (asks) ask_forward(item, i);
    const bool worded = forward_weights(item, w, view, x);
    forward_values(item, w, view, &x, worded);
  }
}

/* What a block's buckets add to its rows of out; and to its sums, where a strip lay across an end.
 * One after the other, strip by strip: the sums are in no product's way. */
static void add_buckets(const forward_item *item, forward_scratch *w, const forward_view *view) {
  const window *const vw = &view->value_window;
  const int64_t width = item->n.value_width, stride = window_stride(vw->columns);
  const bucket_way way =
      bucket_way_of(&w->value_table, vw, item->n.tiles, w->bucket_parts, w->bucket_words);
  real *const before = vw->head ? sum_of(item, &w->state, SUM_BEFORE, view->block) : NULL;
  real *const after = vw->tail ? sum_of(item, &w->state, SUM_AFTER, view->block) : NULL;
  const rpi_product related = {
      .a = w->buckets + RPI_LANES,
      .a_row = stride,
      .a_inner = 1,
      .b = w->value_table.down + packed_column(&w->value_table, vw) * width,
      .b_stride = width,
      .c = w->state.out + view->block * width,
      .c_stride = width,
      .inner = vw->columns - (vw->tail && !way.tiled)};
  for (int64_t i = 0, count; i < view->rows; i += count) {
    count = rpi_min(band_step(&way), view->rows - i);
    for (int64_t r = i; r < i + count; r++) {
      real *const row = w->buckets + r * stride, *const last = row + RPI_LANES + vw->columns - 1;
      if (before) sum_weights(1, row, before + r * RPI_LANES);
      if (after) sum_weights(1, last, after + r * RPI_LANES);
      if (after && way.tiled) *last = 0; /* tiles take it along, whole steps of inner */
    }
    band_product_rows(&related, &view->at, i, count, width, vw, 0, NULL, &w->value_table, &way);
  }
}

/* A block of queries against one chunk of keys. */
static void forward_block(const forward_item *item, forward_scratch *w, int64_t block, int64_t key,
                          int64_t keys, dense values) {
  const int64_t width = item->n.value_width;
  const int64_t count = rpi_min(item->n.block, item->count - block);
  const reach r = reach_of(&item->seq, &item->sees, item->query + block, count, key, keys);
  if (r.farthest < r.nearest) return;
  const forward_view view = open_view(item, w, block, key, keys, values, &r);
  const stretch seen = keys_seen(&item->seq, &item->sees, view.row0, count);
  const walk tiles = walk_of(item, view.row0, count, rpi_max(seen.begin, key),
                             rpi_min(seen.end, key + keys), RPI_TILE);
  for (int64_t step = 0; step < tiles.count; step++) {
    const int64_t j = walk_at(&tiles, step) - key, tile_keys = rpi_min(RPI_TILE, keys - j);
    const int64_t next = step + 1 < tiles.count ? walk_at(&tiles, step + 1) - key : j;
    if (mask_hides(&item->pairs, &item->seq, view.row0, count, key + j, tile_keys, key + next)) {
      continue;
    }
    open_tile(item, w, &view, j, tile_keys, next);
    forward_tile(item, w, &view, j, tile_keys, step == 0);
  }
  if (item->pairs.values) {
    add_pair_values(&item->pairs, &w->pairs, LOOKUP_MET, count, width,
                    w->state.out + block * width);
  }
  if (view.collects) add_buckets(item, w, &view);
}

/* to = factor * (from + before * head + behind * tail): a vector without a share is not met,
 * whatever is in it. */
RPI_INLINE void finish_row(int64_t width, const real *restrict from, real before,
                           const real *restrict head, real behind, const real *restrict tail,
                           real factor, real *restrict to) {
  int64_t c = 0;
  for (; c + RPI_LANES <= width; c += RPI_LANES) {
    rpi_register x = rpi_load(from + c);
    if (before != 0) x += before * rpi_load(head + c);
    if (behind != 0) x += behind * rpi_load(tail + c);
    rpi_store(to + c, x * factor);
  }
  for (; c < width; c++) {
    real x = from[c];
    if (before != 0) x += before * head[c];
    if (behind != 0) x += behind * tail[c];
    to[c] = x * factor;
  }
}

/* Four rows that are finished at once, or as many as there are: totals of their weights. */
typedef struct finished {
  real sum[4], before[4], behind[4]; /* of all keys, of those in the head, of those in the tail */
} finished;

static void total_weights(const running *state, int64_t row, int64_t last, bool dropped,
                          finished *to) {
  const bool *const begun = state->begun;
  rpi_register all[4], before[4], behind[4];
  RPI_UNROLL(4) for (int n = 0; n < 4; n++) {
    const real *const kept = state->sums + rpi_min(row + n, last) * RPI_LANES;
    const rpi_register none = {0};
    before[n] = begun[SUM_HEAD] ? rpi_load(kept + SUM_HEAD * state->plane) : none;
    behind[n] = begun[SUM_TAIL] ? rpi_load(kept + SUM_TAIL * state->plane) : none;
    all[n] = rpi_load(kept);
    if (!dropped) all[n] += before[n] + behind[n];
    if (begun[SUM_BEFORE]) before[n] += rpi_load(kept + SUM_BEFORE * state->plane);
    if (begun[SUM_AFTER]) behind[n] += rpi_load(kept + SUM_AFTER * state->plane);
  }
  rpi_totals(all, to->sum);
  if (begun[SUM_HEAD] || begun[SUM_BEFORE]) rpi_totals(before, to->before);
  if (begun[SUM_TAIL] || begun[SUM_AFTER]) rpi_totals(behind, to->behind);
}

/* Divides by the sums and writes a chunk's rows: (3). */
static void forward_finish(const forward_item *item, forward_scratch *w) {
  const rpi_attention_args *const args = item->args;
  const rpi_sequence *const seq = &item->seq;
  const running *const state = &w->state;
  const int64_t Dv = args->shape->Dv, width = item->n.value_width;
  const term *const value = &item->value;
  const bool dropped = item->pairs.dropout.threshold != 0;
  real *const lse = args->lse ? args->lse + lse_at(args->shape, seq, item->head) : NULL;
  if (item->pairs.values) {
    add_pair_values(&item->pairs, &w->pairs, LOOKUP_WHOLE, item->count, width, state->out);
  }
  if (value->ends) {
    term_vector(value, value->first - 1, width, w->ends);
    term_vector(value, value->last, width, w->ends + width);
    if (item->n.rounded) round_numbers(w->ends, 2 * width);
  }
  finished rows = {.sum = {0}};
  for (int64_t i = 0; i < item->count; i++) {
    const int64_t n = i % 4;
    if (n == 0) total_weights(state, i, item->count - 1, dropped, &rows);
    const real sum = rows.sum[n];
    const real *const from = state->out + i * width;
    real *const to =
        out_row_of(&args->out, seq->query_batch, item->head, seq->query_row + item->query + i);
    if (sum == 0) { /* the row sees no key; a NaN is not 0 and goes on */
      memset(to, 0, (size_t)Dv * sizeof(real));
    } else {
      finish_row(Dv, from, rows.before[n], w->ends, rows.behind[n], w->ends + width, 1 / sum, to);
    }
    if (lse && sum == 0) {
      lse[item->query + i] = (real)-INFINITY;
    } else if (lse) { /* in double: this one number scales every weight of backward */
      lse[item->query + i] = (real)(((double)state->max[i] + log2((double)sum)) * RPI_LN2);
    }
  }
}

/* Packs a chunk of keys. */
static void open_keys_of(const forward_item *item, forward_scratch *w, int64_t key, int64_t keys) {
  const rpi_sequence *const seq = &item->seq;
  const rp_rows *const k = &item->args->k;
  const int64_t D = item->args->shape->D;
  const real factor = scale_of(item->args->shape) * (real)RPI_LOG2_E;
  const dense from = {row_of(k, seq->key_batch, item->key_head, seq->key_row + key), k->row_stride};
  for (int64_t j = 0; j < keys; j += RPI_TILE) {
    w->keys_fit[j / RPI_TILE] = pack_tile(&item->n, &item->pairs, from, j, keys, D, factor, w->keys,
                                          w->key_words, w->tile_keys);
  }
  open_pair_keys(&item->pairs, &w->pairs, keys, w->keys, w->zeros);
}

/* Its values as operands, or as words. */
static void open_values_of(const forward_item *item, forward_scratch *w, int64_t keys,
                           dense values) {
  const int64_t width = item->n.value_width;
  const int how = item->n.how;
  if (how != RPI_NUMBERS) word_lines(how, values, keys, width, w->value_words, width);
  for (int64_t j = 0; item->n.tiles && j < keys; j += RPI_TILE) {
    w->values_fit[j / RPI_TILE] =
        pack_met_operand(rows_from(&values, j), ROWS_ARE_INNER, width, rpi_min(RPI_TILE, keys - j),
                         w->tile_values[j / RPI_TILE]);
  }
}

/* An item's rows of the terms that are looked up; of the others no end is known yet. */
static void open_rows_of(const forward_item *item, forward_scratch *w) {
  const rp_rows *const q = &item->args->q;
  memset(w->e.known, 0, (size_t)blocks_of(&item->n));
  if (!item->pairs.count) return;
  const pair_rows rows = {
      .row0 = item->query,
      .rows = item->count,
      .x = row_of(q, item->seq.query_batch, item->head, item->seq.query_row + item->query),
      .x_stride = q->row_stride};
  open_pair_tables(&item->pairs, &w->pairs);
  open_pair_rows(&item->pairs, &w->pairs, &rows, NULL);
}

static void add_all(int64_t count, const real *restrict from, real *restrict to) {
  for (int64_t i = 0; i < count; i++) to[i] += from[i];
}

static void add_sums(const running *state, int64_t rows, int64_t width, const real *from_sums,
                     const real *from_out, real *sums, real *out) {
  for (int x = 0; x < SUMS; x++) {
    const int64_t at = x * state->plane;
    if (state->begun[x]) add_all(rows * RPI_LANES, from_sums + at, sums + at);
  }
  add_all(rows * width, from_out, out);
}

/* Adds sums and out to their past, and begins them anew. */
static void fold(const running *state, int64_t rows, int64_t width) {
  add_sums(state, rows, width, state->sums, state->out, state->past_sums, state->past_out);
  for (int x = 0; x < SUMS; x++) {
    real *const sum = state->sums + x * state->plane;
    if (state->begun[x]) memset(sum, 0, (size_t)(rows * RPI_LANES) * sizeof(real));
  }
  memset(state->out, 0, (size_t)(rows * width) * sizeof(real));
}

/* Adds the past to sums and out. */
static void unfold(const running *state, int64_t rows, int64_t width) {
  add_sums(state, rows, width, state->past_sums, state->past_out, state->sums, state->out);
}

static void forward_rows(const forward_item *item, forward_scratch *w) {
  const rp_attention *const s = item->args->shape;
  const rpi_sequence *const seq = &item->seq;
  const int64_t width = item->n.value_width;
  const size_t out_bytes = (size_t)(item->count * width) * sizeof(real);
  running *const state = &w->state;
  memset(state->max, 0, (size_t)item->count * sizeof(real));
  memset(state->negated_max, 0, (size_t)item->count * sizeof(real));
  memset(state->seen, 0, (size_t)item->count);
  const stretch seen = keys_seen(seq, &item->sees, item->query, item->count);
  const walk parts = walk_of(item, item->query, item->count, seen.begin, seen.end, item->n.keys);
  const int64_t together = RPI_FOLDED_KEYS / item->n.keys;
  state->plane = item->n.queries * RPI_LANES;
  state->folds = item->n.folds && parts.count > together;
  memset(state->begun, 0, sizeof state->begun);
  sum_of(item, state, SUM_MIDDLE, 0);
  memset(state->out, 0, out_bytes);
  if (state->folds) memset(state->past_out, 0, out_bytes);
  open_rows_of(item, w);
  for (int64_t step = 0; step < parts.count; step++) {
    const int64_t key = walk_at(&parts, step), keys = rpi_min(item->n.keys, seen.end - key);
    const rp_rows *const v = &item->args->v;
    open_keys_of(item, w, key, keys);
    const dense values = dense_rows(row_of(v, seq->key_batch, item->key_head, seq->key_row + key),
                                    v->row_stride, keys, s->Dv, width, item->n.tiles, w->values);
    open_values_of(item, w, keys, values);
    for (int64_t block = 0; block < item->count; block += item->n.block) {
      forward_block(item, w, block, key, keys, values);
    }
    if (item->pairs.values) fold_pair_buckets(&item->pairs, &w->pairs, item->count);
    if (state->folds && (step + 1) % together == 0) fold(state, item->count, width);
  }
  if (state->folds) unfold(state, item->count, width);
  forward_finish(item, w);
}
