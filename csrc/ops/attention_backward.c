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
 * (4) has the shape of (1): the same strip kernel, with values for keys, wV for wK and
 * -delta_i for -lse_i. With row 0 of wV subtracted, delta_i is dz_i . (z_i - wV[0]).
 *
 * The weights are computed again from the saved log-sum-exp, tile by tile.
 */
#include "ops/attention.h"
#include "ops/table_sums.h"

typedef struct backward_scratch {
  real *keys, *values;          /* [tiles][D or Dv][TILE], transposed; keys scaled */
  real *key_rows;               /* [keys][width], where they need a copy */
  real *dk, *dv;                /* [keys][width or value width] */
  real *q_rows, *dout_rows;     /* [block][width or value width], where they need a copy */
  real *dq;                     /* [block][width] */
  real *weights, *dscores;      /* [block][TILE]: p and ds of one tile */
  real *score_start, *dp_start; /* [block]: -lse_i and -delta_i */
  packed_term key_table, value_table;
  real *key_e, *value_e;             /* [block][window] */
  real *key_buckets, *value_buckets; /* [block][window]: dS and P */
  real *key_tail, *value_tail;       /* [block][LANES] */
  real *zeros;                       /* [block] */
} backward_scratch;

static backward_scratch *take_backward(rpi_arena *arena, const bounds *n, int64_t D, int64_t Dv) {
  backward_scratch local = {0};
  backward_scratch *const kept = rpi_arena_take(arena, 1, sizeof local);
  const int64_t real_bytes = sizeof(real);
  local.keys = rpi_arena_take(arena, n->keys * D, real_bytes);
  local.values = rpi_arena_take(arena, n->keys * Dv, real_bytes);
  local.key_rows = rpi_arena_take(arena, n->keys * n->width, real_bytes);
  local.dk = rpi_arena_take(arena, n->keys * n->width, real_bytes);
  local.dv = rpi_arena_take(arena, n->keys * n->value_width, real_bytes);
  local.q_rows = rpi_arena_take(arena, n->block * n->width, real_bytes);
  local.dout_rows = rpi_arena_take(arena, n->block * n->value_width, real_bytes);
  local.dq = rpi_arena_take(arena, n->block * n->width, real_bytes);
  local.weights = rpi_arena_take(arena, n->block * RPI_TILE, real_bytes);
  local.dscores = rpi_arena_take(arena, n->block * RPI_TILE, real_bytes);
  local.score_start = rpi_arena_take(arena, n->block, real_bytes);
  local.dp_start = rpi_arena_take(arena, n->block, real_bytes);
  take_packed(arena, n->key_columns, n->width, &local.key_table);
  take_packed(arena, n->value_columns, n->value_width, &local.value_table);
  const int64_t key_window = n->block * window_stride(n->key_columns);
  const int64_t value_window = n->block * window_stride(n->value_columns);
  local.key_e = rpi_arena_take(arena, key_window, real_bytes);
  local.value_e = rpi_arena_take(arena, value_window, real_bytes);
  local.key_buckets = rpi_arena_take(arena, key_window, real_bytes);
  local.value_buckets = rpi_arena_take(arena, value_window, real_bytes);
  local.key_tail = rpi_arena_take(arena, n->block * RPI_LANES, real_bytes);
  local.value_tail = rpi_arena_take(arena, n->block * RPI_LANES, real_bytes);
  local.zeros = rpi_arena_take(arena, n->block, real_bytes);
  if (kept && !arena->failed) {
    *kept = local;
    memset(kept->zeros, 0, (size_t)n->block * sizeof(real));
  }
  return kept;
}

/* One pair of chunks of one head. */
typedef struct backward_item {
  const rpi_attention_backward_args *args;
  rpi_sequence seq;
  int64_t head;
  rectangle r;
  bool first_for_queries, first_for_keys;
  term key, value;
  bounds n;
  const slot *sums;
} backward_item;

/* p and ds of a strip from its scores and dp - delta: (2) and (5). The sums of a
 * strip in the tail of a term are row sums. */
RPI_NOINLINE void differentiate_strip(int64_t count, real *restrict s, real *restrict ds,
                                      real *restrict p_tail, real *restrict ds_tail) {
  _Pragma("omp simd") for (int64_t j = 0; j < count * RPI_TILE; j++) {
    s[j] = rpi_exp2(s[j]);
    ds[j] *= s[j];
  }
  for (int64_t r = 0; p_tail && r < count; r++) {
    real *const sum = p_tail + r * RPI_LANES;
    rpi_store(sum, rpi_load(sum) + sum_row(s + r * RPI_TILE));
  }
  for (int64_t r = 0; ds_tail && r < count; r++) {
    real *const sum = ds_tail + r * RPI_LANES;
    rpi_store(sum, rpi_load(sum) + sum_row(ds + r * RPI_TILE));
  }
}

/* -lse_i and -delta_i of a block. A row that saw no key starts at -inf: its weights
 * are 0 whatever the scores. */
static void start_rows(const backward_item *item, int64_t row0, int64_t count,
                       backward_scratch *w) {
  const rpi_attention_backward_args *const args = item->args;
  const rpi_sequence *const seq = &item->seq;
  const int64_t Dv = args->shape->Dv;
  const real *const lse = args->lse + lse_at(args->shape, seq, item->head) + row0;
  const real *const shift = item->value.table && item->value.shifted ? item->value.table : NULL;
  for (int64_t i = 0; i < count; i++) {
    const int64_t at = seq->query_row + row0 + i;
    const real *const z = row_of(&args->out, seq->query_batch, item->head, at);
    const real *const dz = row_of(&args->dout, seq->query_batch, item->head, at);
    const real delta = dot(dz, z, Dv) - (shift ? dot(dz, shift, Dv) : (real)0);
    w->score_start[i] = lse[i] == (real)-INFINITY ? lse[i] : -lse[i] * LOG2_E;
    w->dp_start[i] = -delta;
  }
}

/* What stays the same while a block of queries walks its chunk of keys. */
typedef struct backward_view {
  int64_t row0, rows; /* the block, counted in the sequence */
  dense q, dout, k;
  window key_window, value_window;
} backward_view;

/* A strip of queries on a tile of keys: p, ds, the buckets, and dq (7). */
static void backward_strip(const backward_item *item, backward_scratch *w,
                           const backward_view *view, int64_t i, int64_t j, int64_t tile_keys) {
  const rp_attention *const s = item->args->shape;
  const int64_t count = rpi_min(RPI_STRIP, view->rows - i);
  const int64_t distance = item->r.key + j - (view->row0 + i + item->seq.start);
  const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
  const window *const kw = &view->key_window, *const vw = &view->value_window;
  const int64_t key_stride = window_stride(kw->columns), value_stride = window_stride(vw->columns);
  real *const p = w->weights + i * RPI_TILE, *const ds = w->dscores + i * RPI_TILE;
  const int key_meets = window_meets(kw, nearest, farthest);
  const int value_meets = window_meets(vw, nearest, farthest);
  const rpi_product scores = {.a = view->q.data + i * view->q.stride,
                              .a_row = view->q.stride,
                              .a_inner = 1,
                              .b = w->keys + j * s->D,
                              .b_stride = RPI_TILE,
                              .c = p,
                              .c_stride = RPI_TILE,
                              .inner = s->D};
  score_strip(kw, key_meets, w->key_e + i * key_stride, distance, count, &scores,
              w->score_start + i);
  const rpi_product slopes = {.a = view->dout.data + i * view->dout.stride,
                              .a_row = view->dout.stride,
                              .a_inner = 1,
                              .b = w->values + j * s->Dv,
                              .b_stride = RPI_TILE,
                              .c = ds,
                              .c_stride = RPI_TILE,
                              .inner = s->Dv};
  score_strip(vw, value_meets, w->value_e + i * value_stride, distance, count, &slopes,
              w->dp_start + i);
  if (tile_keys < RPI_TILE || (s->causal && farthest > 0)) {
    mask_strip(count, 1 - distance, s->causal, tile_keys, p);
  }
  real *const key_tail = w->key_tail + i * RPI_LANES, *const value_tail = w->value_tail + i * RPI_LANES;
  differentiate_strip(count, p, ds, value_meets == MEETS_TAIL ? value_tail : NULL,
                      key_meets == MEETS_TAIL ? key_tail : NULL);
  if (key_meets == MEETS_BAND) {
    band_store(kw, count, ds, RPI_LANES + distance - kw->first, w->key_buckets + i * key_stride,
               key_tail);
  }
  if (value_meets == MEETS_BAND) {
    band_store(vw, count, p, RPI_LANES + distance - vw->first,
               w->value_buckets + i * value_stride, value_tail);
  }
  const rpi_product dq = {.a = ds,
                          .a_row = RPI_TILE,
                          .a_inner = 1,
                          .b = view->k.data + j * view->k.stride,
                          .b_stride = view->k.stride,
                          .c = w->dq + i * item->n.width,
                          .c_stride = item->n.width,
                          .inner = tile_keys};
  rpi_strip_product(RPI_START_LOAD, count, item->n.width / RPI_LANES, &dq, NULL);
}

/* c[columns][width] += bucketsᵀ . x: the table gradients of (8) and (9), and with p
 * or ds of a tile for buckets, dk and dv. */
static void add_transposed(const real *a, int64_t a_stride, int64_t columns, const dense *x,
                           int64_t count, int64_t width, real *c) {
  const rpi_product product = {.a = a,
                               .a_row = 1,
                               .a_inner = a_stride,
                               .b = x->data,
                               .b_stride = x->stride,
                               .c = c,
                               .c_stride = width,
                               .inner = count};
  rpi_block_product(RPI_START_LOAD, columns, width / RPI_LANES, product, NULL);
}

/* After a block: dq from its buckets (7), and the partial table gradients. */
static void backward_buckets(const backward_item *item, backward_scratch *w,
                             const backward_view *view) {
  const window *const kw = &view->key_window, *const vw = &view->value_window;
  const int64_t width = item->n.width, value_width = item->n.value_width;
  if (kw->columns) {
    const int64_t stride = window_stride(kw->columns);
    band_finish(kw, view->rows, w->key_buckets, w->key_tail);
    const rpi_product dq = {.a = w->key_buckets + RPI_LANES,
                            .a_row = stride,
                            .a_inner = 1,
                            .b = w->key_table.down,
                            .b_stride = width,
                            .c = w->dq,
                            .c_stride = width,
                            .inner = kw->columns};
    rpi_block_product(RPI_START_LOAD, view->rows, width / RPI_LANES, dq, NULL);
    const table_sums *const sums = &item->sums->key;
    if (sums->lines) {
      add_transposed(w->key_buckets + RPI_LANES, stride, kw->columns, &view->q, view->rows, width,
                     sums->lines + (kw->first - sums->first) * width);
    }
  }
  const table_sums *const sums = &item->sums->value;
  if (vw->columns && sums->lines) {
    const int64_t stride = window_stride(vw->columns);
    band_finish(vw, view->rows, w->value_buckets, w->value_tail);
    add_transposed(w->value_buckets + RPI_LANES, stride, vw->columns, &view->dout, view->rows,
                   value_width, sums->lines + (vw->first - sums->first) * value_width);
  }
}

/* The sum of dz over the rows that see a key: dwV[0] is that minus all other rows. */
static void add_dout_sum(const backward_item *item, const backward_view *view,
                         const backward_scratch *w) {
  const int64_t value_width = item->n.value_width;
  const table_sums *const sums = &item->sums->value;
  real *const total = sums->lines + columns_of(sums) * value_width;
  for (int64_t i = 0; i < view->rows; i++) {
    if (w->score_start[i] == (real)-INFINITY) continue;
    const real *const dz = view->dout.data + i * view->dout.stride;
    for (int64_t c = 0; c < item->args->shape->Dv; c++) total[c] += dz[c];
  }
}

/* out = factor * x, or out += factor * x, for the rows of a gradient. */
static void put_rows(const rp_rows_out *out, int64_t batch, int64_t head, int64_t row0,
                     int64_t count, int64_t width, const real *x, int64_t x_stride, real factor,
                     bool overwrite) {
  for (int64_t i = 0; i < count; i++) {
    real *const to = out_row_of(out, batch, head, row0 + i);
    const real *const from = x + i * x_stride;
    if (overwrite) {
      for (int64_t c = 0; c < width; c++) to[c] = factor * from[c];
    } else {
      for (int64_t c = 0; c < width; c++) to[c] += factor * from[c];
    }
  }
}

/* A block of queries against the item's chunk of keys. */
static void backward_block(const backward_item *item, backward_scratch *w, int64_t block,
                           dense keys) {
  const rpi_attention_backward_args *const args = item->args;
  const rp_attention *const s = args->shape;
  const rpi_sequence *const seq = &item->seq;
  const int64_t width = item->n.width, value_width = item->n.value_width;
  const int64_t count = rpi_min(item->n.block, item->r.rows - block);
  const int64_t row0 = item->r.query + block, at = seq->query_row + row0;
  const reach r = reach_of(seq, s->causal, row0, count, item->r.key, item->r.keys);
  const backward_view view = {
      .row0 = row0,
      .rows = count,
      .q = dense_rows(row_of(&args->q, seq->query_batch, item->head, at),
                      args->q.row_stride, count, s->D, width, w->q_rows),
      .dout = dense_rows(row_of(&args->dout, seq->query_batch, item->head, at),
                         args->dout.row_stride, count, s->Dv, value_width, w->dout_rows),
      .k = keys,
      .key_window = window_of(&item->key, r.nearest, r.farthest),
      .value_window = window_of(&item->value, r.nearest, r.farthest),
  };
  const window *const kw = &view.key_window, *const vw = &view.value_window;
  start_rows(item, row0, count, w);
  memset(w->dq, 0, (size_t)(count * width) * sizeof(real));
  if (kw->columns) {
    pack_window(&item->key, kw, scale_of(s) * LOG2_E, width, &w->key_table);
    band_scores(&w->key_table, view.q.data, view.q.stride, count, s->D, scale_of(s) * LOG2_E,
                w->zeros, w->key_e);
    memset(w->key_buckets, 0, (size_t)(count * window_stride(kw->columns)) * sizeof(real));
    memset(w->key_tail, 0, (size_t)(count * RPI_LANES) * sizeof(real));
  }
  if (vw->columns) {
    pack_window(&item->value, vw, 1, value_width, &w->value_table);
    band_scores(&w->value_table, view.dout.data, view.dout.stride, count, s->Dv, 1,
                w->zeros, w->value_e);
    memset(w->value_buckets, 0, (size_t)(count * window_stride(vw->columns)) * sizeof(real));
    memset(w->value_tail, 0, (size_t)(count * RPI_LANES) * sizeof(real));
  }
  if (item->first_for_queries && item->sums->value.lines) add_dout_sum(item, &view, w);
  for (int64_t j = 0; j < item->r.keys; j += RPI_TILE) {
    const int64_t tile_keys = rpi_min(RPI_TILE, item->r.keys - j);
    /* the first strip with a query that sees the tile's first key */
    int64_t begin = 0;
    if (s->causal) {
      const int64_t hidden = item->r.key + j - (row0 + seq->start);
      if (hidden >= count) break;
      begin = rpi_max(hidden, 0) / RPI_STRIP * RPI_STRIP;
    }
    for (int64_t i = begin; i < count; i += RPI_STRIP) {
      backward_strip(item, w, &view, i, j, tile_keys);
    }
    const dense q = {view.q.data + begin * view.q.stride, view.q.stride};
    const dense dout = {view.dout.data + begin * view.dout.stride, view.dout.stride};
    add_transposed(w->weights + begin * RPI_TILE, RPI_TILE, tile_keys, &dout, count - begin,
                   value_width, w->dv + j * value_width);
    add_transposed(w->dscores + begin * RPI_TILE, RPI_TILE, tile_keys, &q, count - begin, width,
                   w->dk + j * width);
  }
  backward_buckets(item, w, &view);
  put_rows(&args->gradients->q, seq->query_batch, item->head, at, count, s->D, w->dq, width,
           scale_of(s), item->first_for_queries);
}

static void backward_pair(const backward_item *item, backward_scratch *w) {
  const rpi_attention_backward_args *const args = item->args;
  const rp_attention *const s = args->shape;
  const rpi_sequence *const seq = &item->seq;
  const rectangle *const r = &item->r;
  const int64_t width = item->n.width, value_width = item->n.value_width, key0 = seq->key_row + r->key;
  const rp_rows *const k = &args->k, *const v = &args->v;
  const bool hidden = s->causal && r->key > r->query + r->rows - 1 + seq->start;
  if (hidden && !item->first_for_keys && !item->first_for_queries) return;
  memset(w->dk, 0, (size_t)(rpi_max(r->keys, 0) * width) * sizeof(real));
  memset(w->dv, 0, (size_t)(rpi_max(r->keys, 0) * value_width) * sizeof(real));
  for (int64_t j = 0; !hidden && j < r->keys; j += RPI_TILE) {
    const int64_t present = rpi_min(RPI_TILE, r->keys - j);
    rpi_pack_transposed(row_of(k, seq->key_batch, item->head, key0 + j), k->row_stride, present,
                        s->D, scale_of(s) * LOG2_E, w->keys + j * s->D, RPI_TILE, RPI_TILE);
    rpi_pack_transposed(row_of(v, seq->key_batch, item->head, key0 + j), v->row_stride, present,
                        s->Dv, 1, w->values + j * s->Dv, RPI_TILE, RPI_TILE);
  }
  const dense keys = dense_rows(row_of(k, seq->key_batch, item->head, key0), k->row_stride,
                               rpi_max(r->keys, 0), s->D, width, w->key_rows);
  for (int64_t block = 0; block < r->rows; block += item->n.block) {
    backward_block(item, w, block, keys);
  }
  put_rows(&args->gradients->k, seq->key_batch, item->head, key0, r->keys, s->D, w->dk, width,
           scale_of(s), item->first_for_keys);
  put_rows(&args->gradients->v, seq->key_batch, item->head, key0, r->keys, s->Dv, w->dv,
           value_width, 1, item->first_for_keys);
}

typedef struct backward_call {
  const rpi_attention_backward_args *args;
  bounds n;
  int64_t nearest;
  slot_list list;
  backward_scratch **scratch; /* [workers] */
} backward_call;

/* Rows beyond the lengths of a sequence take no gradient. */
static void clear_padding(const backward_item *item, const pair *p, int64_t query_chunks_count,
                          int64_t key_chunks_count) {
  const rp_attention *const s = item->args->shape;
  const rp_attention_gradients *const g = item->args->gradients;
  const rpi_sequence *const seq = &item->seq;
  if (item->first_for_queries && p->query_chunk == query_chunks_count - 1 && !s->offsets) {
    clear_rows(&g->q, seq->query_batch, item->head, seq->queries, s->N, s->D);
  }
  if (item->first_for_keys && p->key_chunk == key_chunks_count - 1 && !s->offsets &&
      !s->key_offsets) {
    clear_rows(&g->k, seq->key_batch, item->head, seq->keys, s->M, s->D);
    clear_rows(&g->v, seq->key_batch, item->head, seq->keys, s->M, s->Dv);
  }
}

static void backward_task(void *context, int64_t task, int worker) {
  const backward_call *const call = context;
  const rp_attention *const s = call->args->shape;
  const slot *const sums = &call->list.slots[task];
  sums_clear(&sums->key, call->n.width);
  sums_clear(&sums->value, call->n.value_width);
  pair p = sums->begin;
  for (int64_t done = 0; done < sums->items; done++) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const int64_t queries = query_chunks(s, &seq).count, keys = key_chunks(s, &seq).count;
    const backward_item item = {.args = call->args,
                                .seq = seq,
                                .head = sums->head,
                                .r = rectangle_of(s, &seq, &p),
                                .first_for_queries = first_for_queries(&p, keys),
                                .first_for_keys = first_for_keys(&p, queries),
                                .key = term_of(&s->key, sums->head, s->D, call->nearest),
                                .value = term_of(&s->value, sums->head, s->Dv, call->nearest),
                                .n = call->n,
                                .sums = sums};
    backward_pair(&item, call->scratch[worker]);
    clear_padding(&item, &p, queries, keys);
    p = pair_after(s, call->list.phase, &p);
  }
  sums_close(&sums->key, call->n.width);
  sums_close(&sums->value, call->n.value_width);
}

/* The one list of what backward needs, for counting and for carving. */
static void carve_backward(rpi_arena *arena, const rp_attention *s, int workers,
                           backward_call *call) {
  call->list = slots_carve(arena, s, &call->n, call->nearest);
  call->scratch = rpi_arena_take(arena, workers, sizeof *call->scratch);
  for (int worker = 0; worker < workers; worker++) {
    backward_scratch *const scratch = take_backward(arena, &call->n, s->D, s->Dv);
    if (arena->base && !arena->failed) call->scratch[worker] = scratch;
  }
}

static rp_status attention_backward(const rpi_attention_backward_args *args) {
  const rp_attention *const s = args->shape;
  backward_call call = {.args = args, .n = bounds_of(s), .nearest = nearest_distance(s)};
  const int workers = rp_get_threads();
  rpi_arena arena = rpi_arena_over(args->workspace, args->workspace_bytes);
  carve_backward(&arena, s, workers, &call);
  RPI_CHECK(!arena.failed, RP_ERROR_MEMORY,
            "attention: workspace_bytes=%lld is too small for %d threads; ask "
            "rp_attention_workspace again after rp_set_threads",
            (long long)args->workspace_bytes, workers);
  const int64_t phases = phase_count(s);
  for (int64_t phase = 0; phase < phases; phase++) {
    slots_open(&call.list, phase, args->gradients);
    rpi_parallel_for(call.list.per_head * s->H, workers, backward_task, &call);
    slots_reduce(&call.list, args->gradients, workers);
  }
  return RP_OK;
}

static rp_status attention_workspace(const rp_attention *s, int64_t *forward_bytes,
                                     int64_t *backward_bytes) {
  const int workers = rp_get_threads();
  rpi_arena arena = rpi_arena_counting();
  forward_call forward = {.n = bounds_of(s), .nearest = nearest_distance(s)};
  carve_forward(&arena, s, workers, &forward);
  RPI_CHECK(!arena.failed, RP_ERROR_SHAPE, "attention: the workspace's size overflows");
  if (forward_bytes) *forward_bytes = arena.used;
  if (!backward_bytes) return RP_OK;
  arena = rpi_arena_counting();
  backward_call backward = {.n = forward.n, .nearest = forward.nearest};
  carve_backward(&arena, s, workers, &backward);
  RPI_CHECK(!arena.failed, RP_ERROR_SHAPE, "attention: the workspace's size overflows");
  *backward_bytes = arena.used;
  return RP_OK;
}
