/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_forward.c: (1) to (3) of attention.h.
 *
 * A chunk of queries keeps running sums while it walks the keys, chunk by chunk. Each
 * chunk of keys is packed once (transposed, scaled); then every block of queries walks
 * its tiles, strip by strip: scores, mask, maximum, weights, buckets, weighted values.
 */
#include "ops/attention.h"

/* What a chunk of queries carries from tile to tile. L and the tail are kept as
 * vectors of partial sums. */
typedef struct running {
  real *max, *negated_max; /* [rows], units of log 2 */
  real *sum;               /* [rows][LANES] */
  real *out;               /* [rows][value width] */
  unsigned char *seen;     /* [rows] has the row met a key it may see? */
} running;

typedef struct forward_scratch {
  real *keys;        /* [tiles][D][TILE], scaled */
  real *values;      /* [keys][value width], where they need a copy */
  real *tail_values; /* the same, with the last relation's vector added */
  running state;
  packed_term key_table, value_table;
  real *e;       /* [block][window] */
  real *buckets; /* [block][window] */
  real *tail;    /* [block][LANES] */
  real *zeros;   /* [block] */
  real *strip;   /* [STRIP][TILE] */
} forward_scratch;

static forward_scratch *take_forward(rpi_arena *arena, const bounds *n, int64_t D) {
  forward_scratch local = {0};
  forward_scratch *const kept = rpi_arena_take(arena, 1, sizeof local);
  const int64_t real_bytes = sizeof(real);
  local.keys = rpi_arena_take(arena, n->keys * D, real_bytes);
  local.values = rpi_arena_take(arena, n->keys * n->value_width, real_bytes);
  local.tail_values = rpi_arena_take(arena, n->keys * n->value_width, real_bytes);
  local.state.max = rpi_arena_take(arena, n->queries, real_bytes);
  local.state.negated_max = rpi_arena_take(arena, n->queries, real_bytes);
  local.state.sum = rpi_arena_take(arena, n->queries * RPI_LANES, real_bytes);
  local.state.out = rpi_arena_take(arena, n->queries * n->value_width, real_bytes);
  local.state.seen = rpi_arena_take(arena, n->queries, 1);
  take_packed(arena, n->key_columns, n->width, &local.key_table);
  take_packed(arena, n->value_columns, n->value_width, &local.value_table);
  local.e = rpi_arena_take(arena, n->block * window_stride(n->key_columns), real_bytes);
  local.buckets = rpi_arena_take(arena, n->block * window_stride(n->value_columns), real_bytes);
  local.tail = rpi_arena_take(arena, n->block * RPI_LANES, real_bytes);
  local.zeros = rpi_arena_take(arena, n->block, real_bytes);
  local.strip = rpi_arena_take(arena, RPI_STRIP * RPI_TILE, real_bytes);
  if (kept && !arena->failed) {
    *kept = local;
    memset(kept->zeros, 0, (size_t)n->block * sizeof(real));
  }
  return kept;
}

/* Four running maxima: one would wait four cycles for itself at every vector. */
RPI_NOINLINE real strip_maximum(int64_t count, const real *s) {
  const int64_t quarter = count * (RPI_TILE / 4);
  real m0 = (real)-INFINITY, m1 = m0, m2 = m0, m3 = m0;
  _Pragma("omp simd reduction(max : m0, m1, m2, m3)") for (int64_t j = 0; j < quarter; j++) {
    m0 = s[j] > m0 ? s[j] : m0;
    m1 = s[j + quarter] > m1 ? s[j + quarter] : m1;
    m2 = s[j + 2 * quarter] > m2 ? s[j + 2 * quarter] : m2;
    m3 = s[j + 3 * quarter] > m3 ? s[j + 3 * quarter] : m3;
  }
  m0 = m1 > m0 ? m1 : m0;
  m2 = m3 > m2 ? m3 : m2;
  return m2 > m0 ? m2 : m0;
}

/* Raises the maximum of the rows that need it, and scales down what they hold. True where
 * a row's scores were summed from a start so far below them that they are to be summed
 * again: their rounding was at the size of the old maximum. */
RPI_NOINLINE bool raise_maximum(int64_t count, real *s, running state, int64_t value_width,
                                real *buckets, int64_t bucket_stride, real *tail) {
  bool stale = false;
  for (int64_t r = 0; r < count; r++) {
    real *const row = s + r * RPI_TILE;
    const real most = strip_maximum(1, row);
    if (most == (real)-INFINITY || (state.seen[r] && !(most > RPI_RAISE))) continue;
    for (int j = 0; j < RPI_TILE; j++) row[j] -= most;
    if (state.seen[r]) {
      stale |= most > 2 * RPI_RAISE;
      const real factor = rpi_exp2(-most);
      for (int l = 0; l < RPI_LANES; l++) state.sum[r * RPI_LANES + l] *= factor;
      for (int64_t c = 0; c < value_width; c++) state.out[r * value_width + c] *= factor;
      for (int64_t c = 0; c < bucket_stride; c++) buckets[r * bucket_stride + c] *= factor;
      if (bucket_stride) {
        for (int l = 0; l < RPI_LANES; l++) tail[r * RPI_LANES + l] *= factor;
      }
    }
    state.seen[r] = 1;
    state.max[r] += most;
    state.negated_max[r] = -state.max[r];
  }
  return stale;
}

/* Weights (2) of a strip in place of its scores, added up into sum. */
RPI_NOINLINE void weigh_strip(int64_t count, real *restrict s, real *restrict sum) {
  for (int64_t r = 0; r < count; r++) {
    real *const row = s + r * RPI_TILE;
    _Pragma("omp simd") for (int j = 0; j < RPI_TILE; j++) row[j] = rpi_exp2(row[j]);
    rpi_store(sum + r * RPI_LANES, rpi_load(sum + r * RPI_LANES) + sum_row(row));
  }
}

/* One head of one sequence, on one chunk of queries. */
typedef struct forward_item {
  const rpi_attention_args *args;
  rpi_sequence seq;
  int64_t head, query, count; /* the chunk: first query, number of queries */
  term key, value;
  bounds n;
} forward_item;

static running running_at(const running *state, int64_t row, int64_t value_width) {
  return (running){.max = state->max + row,
                   .negated_max = state->negated_max + row,
                   .sum = state->sum + row * RPI_LANES,
                   .out = state->out + row * value_width,
                   .seen = state->seen + row};
}

/* What stays the same while a block of queries walks a chunk of keys. */
typedef struct forward_view {
  int64_t row0, rows; /* the block, counted in the sequence */
  int64_t block;      /* its first row in the chunk */
  int64_t key;        /* the first key of the chunk of keys */
  const real *q;
  int64_t q_stride;
  dense values, tail_values; /* the latter for strips in the tail of the value term */
  window key_window, value_window;
  bool collects; /* some strip lies across the band: there are buckets */
} forward_view;

/* A strip of queries on a tile of keys: scores (1), weights (2), weighted values (3). */
static void forward_strip(const forward_item *item, forward_scratch *w, const forward_view *view,
                          int64_t i, int64_t j, int64_t tile_keys) {
  const rp_attention *const s = item->args->shape;
  const window *const kw = &view->key_window, *const vw = &view->value_window;
  const int64_t count = rpi_min(RPI_STRIP, view->rows - i), width = item->n.value_width;
  /* from the strip's first query to the tile's first key */
  const int64_t distance = view->key + j - (view->row0 + i + item->seq.start);
  const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
  if (s->causal && nearest > 0) return;
  const running state = running_at(&w->state, view->block + i, width);
  const int64_t bucket_stride = view->collects ? window_stride(vw->columns) : 0;
  real *const tail = w->tail + i * RPI_LANES, *const buckets = w->buckets + i * bucket_stride;
  const rpi_product scores = {.a = view->q + i * view->q_stride,
                              .a_row = view->q_stride,
                              .a_inner = 1,
                              .b = w->keys + j * s->D,
                              .b_stride = RPI_TILE,
                              .c = w->strip,
                              .c_stride = RPI_TILE,
                              .inner = s->D};
  const int key_meets = window_meets(kw, nearest, farthest);
  const real *const e = w->e + i * window_stride(kw->columns);
  bool again = false;
  do {
    score_strip(kw, key_meets, e, distance, count, &scores, state.negated_max);
    if (tile_keys < RPI_TILE || (s->causal && farthest > 0)) {
      mask_strip(count, 1 - distance, s->causal, tile_keys, w->strip);
    }
    bool unseen = false;
    for (int64_t r = 0; r < count; r++) unseen |= !state.seen[r];
    const bool stale = (unseen || strip_maximum(count, w->strip) > RPI_RAISE) &&
                       raise_maximum(count, w->strip, state, width, buckets, bucket_stride, tail);
    again = stale && !again;
  } while (again);
  const int meets = window_meets(vw, nearest, farthest);
  weigh_strip(count, w->strip, state.sum);
  if (meets == MEETS_BAND) {
    band_store(vw, count, w->strip, RPI_LANES + distance - vw->first, buckets, tail, NULL);
  }
  const dense *const values = meets == MEETS_TAIL ? &view->tail_values : &view->values;
  const rpi_product weighted = {.a = w->strip,
                                .a_row = RPI_TILE,
                                .a_inner = 1,
                                .b = values->data + j * values->stride,
                                .b_stride = values->stride,
                                .c = state.out,
                                .c_stride = width,
                                .inner = tile_keys};
  rpi_strip_product(RPI_START_LOAD, count, width / RPI_LANES, &weighted, NULL);
}

/* A block of queries against one chunk of keys. */
static void forward_block(const forward_item *item, forward_scratch *w, int64_t block, int64_t key,
                          int64_t keys, dense values, dense tail_values) {
  const rp_attention *const s = item->args->shape;
  const rpi_sequence *const seq = &item->seq;
  const int64_t width = item->n.value_width, row0 = item->query + block;
  const int64_t count = rpi_min(item->n.block, item->count - block);
  const reach r = reach_of(seq, s->causal, row0, count, key, keys);
  if (r.farthest < r.nearest) return;
  const window value_window = window_of(&item->value, r.nearest, r.farthest);
  const forward_view view = {
      .row0 = row0,
      .rows = count,
      .block = block,
      .key = key,
      .q = row_of(&item->args->q, seq->query_batch, item->head, seq->query_row + row0),
      .q_stride = item->args->q.row_stride,
      .values = values,
      .tail_values = tail_values,
      .key_window = window_of(&item->key, r.nearest, r.farthest),
      .value_window = value_window,
      .collects = value_window.columns && !(value_window.tail && r.nearest >= item->value.last),
  };
  const window *const kw = &view.key_window, *const vw = &view.value_window;
  const int64_t bucket_stride = window_stride(vw->columns);
  if (kw->columns) {
    const real factor = scale_of(s) * LOG2_E;
    pack_window(&item->key, kw, factor, item->n.width, &w->key_table);
    band_scores(&w->key_table, view.q, view.q_stride, count, s->D, factor, w->zeros, w->e);
  }
  if (view.collects) {
    pack_window(&item->value, vw, 1, width, &w->value_table);
    memset(w->buckets, 0, (size_t)(count * bucket_stride) * sizeof(real));
    memset(w->tail, 0, (size_t)(count * RPI_LANES) * sizeof(real));
  }
  for (int64_t j = 0; j < keys; j += RPI_TILE) {
    for (int64_t i = 0; i < count; i += RPI_STRIP) {
      forward_strip(item, w, &view, i, j, rpi_min(RPI_TILE, keys - j));
    }
  }
  if (view.collects) {
    band_finish(vw, count, w->buckets, w->tail);
    const rpi_product related = {.a = w->buckets + RPI_LANES,
                                 .a_row = bucket_stride,
                                 .a_inner = 1,
                                 .b = w->value_table.down,
                                 .b_stride = width,
                                 .c = w->state.out + block * width,
                                 .c_stride = width,
                                 .inner = vw->columns};
    rpi_block_product(RPI_START_LOAD, count, width / RPI_LANES, related, NULL);
  }
}

/* Divides by the sums and writes a chunk's rows: (3). */
static void forward_finish(const forward_item *item, const running *state) {
  const rpi_attention_args *const args = item->args;
  const rpi_sequence *const seq = &item->seq;
  const int64_t Dv = args->shape->Dv, width = item->n.value_width;
  const real *const row0 = item->value.table && item->value.shifted ? item->value.table : NULL;
  real *const lse = args->lse ? args->lse + lse_at(args->shape, seq, item->head) : NULL;
  for (int64_t i = 0; i < item->count; i++) {
    const real sum = sum_lanes(state->sum + i * RPI_LANES);
    const real *const from = state->out + i * width;
    real *const to =
        out_row_of(&args->out, seq->query_batch, item->head, seq->query_row + item->query + i);
    if (sum == 0) { /* the row sees no key; a NaN is not 0 and goes on */
      memset(to, 0, (size_t)Dv * sizeof(real));
    } else {
      const real inverse = 1 / sum;
      if (row0) {
        for (int64_t c = 0; c < Dv; c++) to[c] = from[c] * inverse + row0[c];
      } else {
        for (int64_t c = 0; c < Dv; c++) to[c] = from[c] * inverse;
      }
    }
    if (lse && sum == 0) {
      lse[item->query + i] = (real)-INFINITY;
    } else if (lse) { /* of the scores as they are: with the row that band.h subtracts */
      const real *const q =
          row_of(&args->q, seq->query_batch, item->head, seq->query_row + item->query + i);
      /* in double: this one number scales every weight of backward */
      const double own = ((double)state->max[i] + log2((double)sum)) * 0.69314718055994530942;
      lse[item->query + i] = (real)(own + (double)score_shift(args->shape, &item->key, q));
    }
  }
}

static void forward_rows(const forward_item *item, forward_scratch *w) {
  const rp_attention *const s = item->args->shape;
  const rpi_sequence *const seq = &item->seq;
  const int64_t D = s->D, width = item->n.value_width;
  const running *const state = &w->state;
  memset(state->max, 0, (size_t)item->count * sizeof(real));
  memset(state->negated_max, 0, (size_t)item->count * sizeof(real));
  memset(state->sum, 0, (size_t)(item->count * RPI_LANES) * sizeof(real));
  memset(state->out, 0, (size_t)(item->count * width) * sizeof(real));
  memset(state->seen, 0, (size_t)item->count);
  const int64_t visible = keys_visible(s, seq, item->query + item->count - 1);
  for (int64_t key = 0; key < visible; key += item->n.keys) {
    const int64_t keys = rpi_min(item->n.keys, visible - key);
    const rp_rows *const k = &item->args->k, *const v = &item->args->v;
    for (int64_t j = 0; j < keys; j += RPI_TILE) {
      rpi_pack_transposed(row_of(k, seq->key_batch, item->head, seq->key_row + key + j),
                          k->row_stride, rpi_min(RPI_TILE, keys - j), D, scale_of(s) * LOG2_E,
                          w->keys + j * D, RPI_TILE, RPI_TILE);
    }
    const dense values = dense_rows(row_of(v, seq->key_batch, item->head, seq->key_row + key),
                                    v->row_stride, keys, s->Dv, width, w->values);
    dense tail_values = {0};
    if (reaches_tail(&item->value, seq, item->query, key, keys)) {
      tail_values = tail_rows(&item->value, &values, keys, width, w->tail_values);
    }
    for (int64_t block = 0; block < item->count; block += item->n.block) {
      forward_block(item, w, block, key, keys, values, tail_values);
    }
  }
  forward_finish(item, state);
}

typedef struct forward_call {
  const rpi_attention_args *args;
  bounds n;
  int64_t nearest;
  const int64_t *first_item; /* [B + 1]: items of the sequences before, over all heads */
  forward_scratch **scratch; /* [workers] */
} forward_call;

static void forward_task(void *context, int64_t task, int worker) {
  const forward_call *const call = context;
  const rp_attention *const s = call->args->shape;
  int64_t low = 0, high = s->B - 1; /* the last b with first_item[b] <= task */
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (call->first_item[middle] <= task) low = middle;
    else high = middle - 1;
  }
  const rpi_sequence seq = sequence_of(s, low);
  const chunks cut = query_chunks(s, &seq);
  const int64_t local = task - call->first_item[low];
  /* last chunk first: under a causal mask it is the longest */
  const int64_t head = local / cut.count, chunk = cut.count - 1 - local % cut.count;
  const int64_t query = chunk * cut.rows;
  const forward_item item = {.args = call->args,
                             .seq = seq,
                             .head = head,
                             .query = query,
                             .count = rpi_min(cut.rows, seq.queries - query),
                             .key = term_of(&s->key, head, s->D, call->nearest),
                             .value = term_of(&s->value, head, s->Dv, call->nearest),
                             .n = call->n};
  if (item.count > 0) forward_rows(&item, call->scratch[worker]);
  if (chunk == cut.count - 1 && !s->offsets) {
    clear_rows(&call->args->out, seq.query_batch, head, seq.queries, s->N, s->Dv);
    real *const lse = call->args->lse ? call->args->lse + lse_at(s, &seq, head) : NULL;
    for (int64_t i = seq.queries; lse && i < s->N; i++) lse[i] = (real)-INFINITY;
  }
}

/* The one list of what forward needs, for counting and for carving. */
static void carve_forward(rpi_arena *arena, const rp_attention *s, int workers,
                          forward_call *call) {
  int64_t *const first_item = rpi_arena_take(arena, s->B + 1, sizeof *first_item);
  call->scratch = rpi_arena_take(arena, workers, sizeof *call->scratch);
  for (int worker = 0; worker < workers; worker++) {
    forward_scratch *const scratch = take_forward(arena, &call->n, s->D);
    if (arena->base && !arena->failed) call->scratch[worker] = scratch;
  }
  call->first_item = first_item;
  if (!arena->base || arena->failed) return;
  first_item[0] = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const rpi_sequence seq = sequence_of(s, b);
    first_item[b + 1] = first_item[b] + s->H * query_chunks(s, &seq).count;
  }
}

static rp_status attention_forward(const rpi_attention_args *args) {
  const rp_attention *const s = args->shape;
  forward_call call = {.args = args, .n = bounds_of(s), .nearest = nearest_distance(s)};
  const int workers = rp_get_threads();
  rpi_arena arena = rpi_arena_over(args->workspace, args->workspace_bytes);
  carve_forward(&arena, s, workers, &call);
  RPI_CHECK(!arena.failed, RP_ERROR_MEMORY,
            "attention: workspace_bytes=%lld is too small for %d threads; ask "
            "rp_attention_workspace again after rp_set_threads",
            (long long)args->workspace_bytes, workers);
  rpi_parallel_for(call.first_item[s->B], workers, forward_task, &call);
  return RP_OK;
}
