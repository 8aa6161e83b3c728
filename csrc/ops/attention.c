/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.c: relation-aware attention, forward, then backward beneath it.
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
 */
#include "ops/attention_plan.h"

#define RPI_RAISE 8 /* log2 of the factor a score may exceed the running maximum by */

static const real LOG2_E = (real)1.4426950408889634074;
static const real LN_2 = (real)0.69314718055994530942;

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

/* ---- forward ------------------------------------------------------------ */

/* What a chunk of queries carries from tile to tile. L and the tail are kept as
 * vectors of partial sums. */
typedef struct running {
  real *max, *negated_max; /* [rows], units of log 2 */
  real *sum;               /* [rows][LANES] */
  real *out;               /* [rows][value width] */
  unsigned char *seen;     /* [rows] has the row met a key it may see? */
} running;

typedef struct forward_scratch {
  real *keys;   /* [tiles][D][TILE], scaled */
  real *values; /* [keys][value width], where they need a copy */
  running state;
  packed_term key_table, value_table;
  real *e;       /* [block][window] */
  real *buckets; /* [block][window] */
  real *tail;    /* [block][LANES] */
  real *zeros;   /* [block] */
  real *strip;   /* [STRIP][TILE] */
} forward_scratch;

static void take_packed(rpi_arena *arena, int64_t columns, int64_t width, packed_term *packed) {
  const int64_t padded = rpi_round_up(columns, RPI_LANES);
  packed->across = rpi_arena_take(arena, padded * width, sizeof(real));
  packed->down = rpi_arena_take(arena, padded * width, sizeof(real));
}

static forward_scratch *take_forward(rpi_arena *arena, const bounds *n, int64_t D) {
  forward_scratch local = {0};
  forward_scratch *const kept = rpi_arena_take(arena, 1, sizeof local);
  const int64_t real_bytes = sizeof(real);
  local.keys = rpi_arena_take(arena, n->keys * D, real_bytes);
  local.values = rpi_arena_take(arena, n->keys * n->value_width, real_bytes);
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

RPI_NOINLINE real strip_maximum(int64_t count, const real *s) {
  real most = (real)-INFINITY;
  _Pragma("omp simd reduction(max : most)") for (int64_t j = 0; j < count * RPI_TILE; j++) {
    most = s[j] > most ? s[j] : most;
  }
  return most;
}

/* Raises the maximum of the rows that need it, and scales down what they hold. */
RPI_NOINLINE void raise_maximum(int64_t count, real *s, running state, int64_t value_width,
                                real *buckets, int64_t bucket_stride, real *tail) {
  for (int64_t r = 0; r < count; r++) {
    real *const row = s + r * RPI_TILE;
    const real most = strip_maximum(1, row);
    if (most == (real)-INFINITY || (state.seen[r] && !(most > RPI_RAISE))) continue;
    for (int j = 0; j < RPI_TILE; j++) row[j] -= most;
    if (state.seen[r]) {
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
}

/* Weights (2) of a strip in place of its scores, added up into sum, and into tail
 * where the whole strip lies in the tail of the value term. */
RPI_NOINLINE void weigh_strip(int64_t count, real *restrict s, real *restrict sum,
                              real *restrict tail) {
  for (int64_t r = 0; r < count; r++) {
    real *const row = s + r * RPI_TILE;
    _Pragma("omp simd") for (int j = 0; j < RPI_TILE; j++) row[j] = rpi_exp2(row[j]);
    const rpi_register part = sum_row(row);
    rpi_store(sum + r * RPI_LANES, rpi_load(sum + r * RPI_LANES) + part);
    if (tail) rpi_store(tail + r * RPI_LANES, rpi_load(tail + r * RPI_LANES) + part);
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

/* A block of queries against one chunk of keys. */
static void forward_block(const forward_item *item, forward_scratch *w, int64_t block,
                          int64_t block_rows, int64_t key, int64_t keys, dense values) {
  const rp_attention *const s = item->args->shape;
  const rpi_sequence *const seq = &item->seq;
  const int64_t D = s->D, width = item->n.value_width, row0 = item->query + block;
  const reach r = reach_of(seq, s->causal, row0, block_rows, key, keys);
  if (r.farthest < r.nearest) return;
  const window key_window = window_of(&item->key, r.nearest, r.farthest);
  const window value_window = window_of(&item->value, r.nearest, r.farthest);
  const int64_t e_stride = window_stride(key_window.columns);
  const int64_t bucket_stride = value_window.columns ? window_stride(value_window.columns) : 0;
  const int64_t q_stride = item->args->q.row_stride;
  const real *const q =
      row_of(&item->args->q, seq->query_batch, item->head, seq->query_row + row0);
  if (key_window.columns) {
    pack_window(&item->key, &key_window, scale_of(s) * LOG2_E, item->n.width, &w->key_table);
    band_scores(&w->key_table, q, q_stride, block_rows, D, scale_of(s) * LOG2_E, w->zeros, w->e);
  }
  if (value_window.columns) {
    pack_window(&item->value, &value_window, 1, width, &w->value_table);
    memset(w->buckets, 0, (size_t)(block_rows * bucket_stride) * sizeof(real));
    memset(w->tail, 0, (size_t)(block_rows * RPI_LANES) * sizeof(real));
  }
  for (int64_t j = 0; j < keys; j += RPI_TILE) {
    const int64_t tile_keys = rpi_min(RPI_TILE, keys - j);
    const real *const tile = w->keys + j * D;
    for (int64_t i = 0; i < block_rows; i += RPI_STRIP) {
      const int64_t count = rpi_min(RPI_STRIP, block_rows - i);
      /* distance of key j0 from the strip's first query */
      const int64_t distance = key + j - (row0 + i + seq->start);
      const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
      if (s->causal && nearest > 0) continue;
      const running state = running_at(&w->state, block + i, width);
      real *const e = w->e + i * e_stride, *const tail = w->tail + i * RPI_LANES;
      real *const buckets = w->buckets + i * bucket_stride;
      const rpi_product scores = {.a = q + i * q_stride,
                                  .a_row = q_stride,
                                  .a_inner = 1,
                                  .b = tile,
                                  .b_stride = RPI_TILE,
                                  .c = w->strip,
                                  .c_stride = RPI_TILE,
                                  .inner = D};
      score_strip(&key_window, window_meets(&key_window, nearest, farthest), e, distance, count,
                  &scores, state.negated_max);
      if (tile_keys < RPI_TILE || (s->causal && farthest > 0)) {
        mask_strip(count, 1 - distance, s->causal, tile_keys, w->strip);
      }
      bool unseen = false;
      for (int64_t r1 = 0; r1 < count; r1++) unseen |= !state.seen[r1];
      if (unseen || strip_maximum(count, w->strip) > RPI_RAISE) {
        raise_maximum(count, w->strip, state, width, buckets, bucket_stride, tail);
      }
      const int meets = window_meets(&value_window, nearest, farthest);
      weigh_strip(count, w->strip, state.sum, meets == MEETS_TAIL ? tail : NULL);
      if (meets == MEETS_BAND) {
        band_store(&value_window, count, w->strip, RPI_LANES + distance - value_window.first,
                   buckets, tail);
      }
      const rpi_product weighted = {.a = w->strip,
                                    .a_row = RPI_TILE,
                                    .a_inner = 1,
                                    .b = values.data + j * values.stride,
                                    .b_stride = values.stride,
                                    .c = state.out,
                                    .c_stride = width,
                                    .inner = tile_keys};
      rpi_strip_product(RPI_START_LOAD, count, width / RPI_LANES, &weighted, NULL);
    }
  }
  if (value_window.columns) {
    band_finish(&value_window, block_rows, w->buckets, w->tail);
    const rpi_product related = {.a = w->buckets + RPI_LANES,
                                 .a_row = bucket_stride,
                                 .a_inner = 1,
                                 .b = w->value_table.down,
                                 .b_stride = width,
                                 .c = w->state.out + block * width,
                                 .c_stride = width,
                                 .inner = value_window.columns};
    rpi_block_product(RPI_START_LOAD, block_rows, width / RPI_LANES, related, NULL);
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
    if (lse) {
      lse[item->query + i] = sum == 0 ? (real)-INFINITY : (state->max[i] + rpi_log2(sum)) * LN_2;
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
    for (int64_t block = 0; block < item->count; block += item->n.block) {
      forward_block(item, w, block, rpi_min(item->n.block, item->count - block), key, keys,
                    values);
    }
  }
  forward_finish(item, state);
}

/* Rows beyond a sequence's length: zeros, and a log-sum-exp of -inf. */
static void clear_rows(const rp_rows_out *x, int64_t batch, int64_t head, int64_t begin,
                       int64_t end, int64_t width) {
  for (int64_t i = begin; i < end; i++) {
    memset(out_row_of(x, batch, head, i), 0, (size_t)width * sizeof(real));
  }
}

typedef struct forward_call {
  const rpi_attention_args *args;
  bounds n;
  int64_t nearest;
  const int64_t *first_item;  /* [B + 1]: items of the sequences before, over all heads */
  forward_scratch **scratch;  /* [workers] */
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
            "attention_forward: workspace_bytes=%lld is too small for %d threads; ask "
            "rp_attention_workspace again after rp_set_threads",
            (long long)args->workspace_bytes, workers);
  rpi_parallel_for(call.first_item[s->B], workers, forward_task, &call);
  return RP_OK;
}

/* ---- backward ------------------------------------------------------------
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
 */

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
    if (item->sums->key_sums) {
      add_transposed(w->key_buckets + RPI_LANES, stride, kw->columns, &view->q, view->rows, width,
                     item->sums->key_sums + (kw->first - item->sums->key_first) * width);
    }
  }
  if (vw->columns && item->sums->value_sums) {
    const int64_t stride = window_stride(vw->columns);
    band_finish(vw, view->rows, w->value_buckets, w->value_tail);
    add_transposed(w->value_buckets + RPI_LANES, stride, vw->columns, &view->dout, view->rows,
                   value_width,
                   item->sums->value_sums + (vw->first - item->sums->value_first) * value_width);
  }
}

/* The sum of dz over the rows that see a key: dwV[0] is that minus all other rows. */
static void add_dout_sum(const backward_item *item, const backward_view *view,
                         const backward_scratch *w) {
  const int64_t value_width = item->n.value_width;
  real *const total =
      item->sums->value_sums +
      (item->sums->value_last - item->sums->value_first + 1) * value_width;
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
  if (item->first_for_queries && item->sums->value_sums) add_dout_sum(item, &view, w);
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
  int64_t nearest, phase;
  int64_t slots_per_head; /* in this phase; slots of head h follow those of head h - 1 */
  slot *slots;
  backward_scratch **scratch; /* [workers] */
} backward_call;

static int64_t columns_of(int64_t first, int64_t last) { return rpi_max(last - first + 1, 0); }

static void backward_task(void *context, int64_t task, int worker) {
  const backward_call *const call = context;
  const rpi_attention_backward_args *const args = call->args;
  const rp_attention *const s = args->shape;
  const slot *const sums = &call->slots[task];
  if (sums->key_sums) {
    memset(sums->key_sums, 0,
           (size_t)(columns_of(sums->key_first, sums->key_last) * call->n.width) * sizeof(real));
  }
  if (sums->value_sums) {
    const int64_t lines = columns_of(sums->value_first, sums->value_last) + 1;
    memset(sums->value_sums, 0, (size_t)(lines * call->n.value_width) * sizeof(real));
  }
  pair p = sums->begin;
  for (int64_t done = 0; done < sums->items; done++) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const int64_t queries = query_chunks(s, &seq).count, keys = key_chunks(s, &seq).count;
    const backward_item item = {.args = args,
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
    const rp_attention_gradients *const g = args->gradients;
    if (item.first_for_queries && p.query_chunk == queries - 1 && !s->offsets) {
      clear_rows(&g->q, seq.query_batch, sums->head, seq.queries, s->N, s->D);
    }
    if (item.first_for_keys && p.key_chunk == keys - 1 && !s->offsets && !s->key_offsets) {
      clear_rows(&g->k, seq.key_batch, sums->head, seq.keys, s->M, s->D);
      clear_rows(&g->v, seq.key_batch, sums->head, seq.keys, s->M, s->Dv);
    }
    p = pair_from(s, call->phase, p.b, p.query_chunk + 1);
  }
}

/* Adds the slots of a phase to a table's gradient, in order. One task owns
 * RPI_REDUCE table rows of one table; row 0 of a shifted term is minus the sum of
 * all others, plus for values the sum of dz. */
#define RPI_REDUCE 16

typedef struct reduce_call {
  const backward_call *call;
  term t; /* of head 0: maps are the same for all heads */
  bool value;
  int64_t head_stride, tasks_per_table;
  real *gradient;
} reduce_call;

static void add_row(real *to, const real *from, int64_t width, real factor) {
  for (int64_t c = 0; c < width; c++) to[c] += factor * from[c];
}

static void reduce_task(void *context, int64_t task, int worker) {
  (void)worker;
  const reduce_call *const r = context;
  const backward_call *const call = r->call;
  const rp_attention *const s = call->args->shape;
  const int64_t table = task / r->tasks_per_table, part = task % r->tasks_per_table;
  const int64_t padded = r->value ? call->n.value_width : call->n.width;
  const real factor = r->value ? (real)1 : scale_of(s);
  real *const gradient = r->gradient + table * r->head_stride;
  /* table rows of this task; part 0 is row 0 of a shifted term */
  const int64_t begin = (part - 1) * RPI_REDUCE, end = begin + RPI_REDUCE;
  const int64_t slots = call->slots_per_head * (r->head_stride ? 1 : s->H);
  const slot *const from = call->slots + table * call->slots_per_head;
  for (int64_t i = 0; i < slots; i++) {
    const int64_t first = r->value ? from[i].value_first : from[i].key_first;
    const int64_t last = r->value ? from[i].value_last : from[i].key_last;
    const real *const sums = r->value ? from[i].value_sums : from[i].key_sums;
    const int64_t row0 = first + r->t.left, rows = columns_of(first, last);
    if (part > 0) {
      for (int64_t row = rpi_max(begin, row0); row < rpi_min(end, row0 + rows); row++) {
        add_row(gradient + row * r->t.stride, sums + (row - row0) * padded, r->t.width, factor);
      }
    } else if (r->t.shifted) {
      for (int64_t row = 0; row < rows; row++) {
        add_row(gradient, sums + row * padded, r->t.width, -factor);
      }
      if (r->value) add_row(gradient, sums + rows * padded, r->t.width, 1);
    }
  }
}

static void reduce_table(const backward_call *call, bool value, int workers) {
  const rp_attention *const s = call->args->shape;
  const rp_relation *const relation = value ? &s->value : &s->key;
  const rp_attention_gradients *const g = call->args->gradients;
  reduce_call r = {.call = call,
                   .t = term_of(relation, 0, value ? s->Dv : s->D, call->nearest),
                   .value = value,
                   .head_stride = relation->head_stride,
                   .gradient = value ? g->value_table : g->key_table};
  if (!relation->table || !r.gradient) return;
  const int64_t T = relation->left + relation->right + 1;
  r.tasks_per_table = 1 + (T + RPI_REDUCE - 1) / RPI_REDUCE;
  rpi_parallel_for(r.tasks_per_table * (r.head_stride ? s->H : 1), workers, reduce_task, &r);
}

/* The one list of what backward needs, for counting and for carving. Slots of the
 * fullest phase serve all of them. */
typedef struct slot_memory {
  int64_t count; /* per head, in the fullest phase */
  int64_t key_lines, value_lines;
  real *key_sums, *value_sums;
} slot_memory;

static void carve_backward(rpi_arena *arena, const rp_attention *s, int workers,
                           backward_call *call, slot_memory *memory) {
  const term key = term_of(&s->key, 0, s->D, call->nearest);
  const term value = term_of(&s->value, 0, s->Dv, call->nearest);
  const int64_t phases = phase_count(s);
  for (int64_t phase = 0; phase < phases; phase++) {
    memory->count =
        rpi_max(memory->count, list_slots(s, phase, &key, &value, slot_columns(&call->n), NULL));
  }
  memory->key_lines = slot_lines(&s->key, &call->n);
  memory->value_lines = slot_lines(&s->value, &call->n);
  const int64_t slots = memory->count * s->H;
  call->slots = rpi_arena_take(arena, slots, sizeof *call->slots);
  memory->key_sums =
      rpi_arena_take(arena, slots * memory->key_lines, call->n.width * (int64_t)sizeof(real));
  memory->value_sums = rpi_arena_take(arena, slots * memory->value_lines,
                                      call->n.value_width * (int64_t)sizeof(real));
  call->scratch = rpi_arena_take(arena, workers, sizeof *call->scratch);
  for (int worker = 0; worker < workers; worker++) {
    backward_scratch *const scratch = take_backward(arena, &call->n, s->D, s->Dv);
    if (arena->base && !arena->failed) call->scratch[worker] = scratch;
  }
}

/* Lists a phase's slots for every head, and gives each its memory. */
static void open_phase(const rp_attention *s, int64_t phase, const slot_memory *memory,
                       backward_call *call) {
  const term key = term_of(&s->key, 0, s->D, call->nearest);
  const term value = term_of(&s->value, 0, s->Dv, call->nearest);
  const rp_attention_gradients *const g = call->args->gradients;
  call->phase = phase;
  call->slots_per_head = list_slots(s, phase, &key, &value, slot_columns(&call->n), call->slots);
  for (int64_t i = 0; i < call->slots_per_head * s->H; i++) {
    slot *const at = call->slots + i;
    *at = call->slots[i % call->slots_per_head];
    at->head = i / call->slots_per_head;
    at->key_sums = s->key.table && g->key_table
                       ? memory->key_sums + i * memory->key_lines * call->n.width
                       : NULL;
    at->value_sums = s->value.table && g->value_table
                         ? memory->value_sums + i * memory->value_lines * call->n.value_width
                         : NULL;
  }
}

static rp_status attention_backward(const rpi_attention_backward_args *args) {
  const rp_attention *const s = args->shape;
  backward_call call = {.args = args, .n = bounds_of(s), .nearest = nearest_distance(s)};
  slot_memory memory = {0};
  const int workers = rp_get_threads();
  rpi_arena arena = rpi_arena_over(args->workspace, args->workspace_bytes);
  carve_backward(&arena, s, workers, &call, &memory);
  RPI_CHECK(!arena.failed, RP_ERROR_MEMORY,
            "attention_backward: workspace_bytes=%lld is too small for %d threads; ask "
            "rp_attention_workspace again after rp_set_threads",
            (long long)args->workspace_bytes, workers);
  const int64_t phases = phase_count(s);
  for (int64_t phase = 0; phase < phases; phase++) {
    open_phase(s, phase, &memory, &call);
    rpi_parallel_for(call.slots_per_head * s->H, workers, backward_task, &call);
    /* one after the other: tied tables share their gradient */
    reduce_table(&call, false, workers);
    reduce_table(&call, true, workers);
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
  arena = rpi_arena_counting();
  backward_call backward = {.n = forward.n, .nearest = forward.nearest};
  slot_memory memory = {0};
  carve_backward(&arena, s, workers, &backward, &memory);
  RPI_CHECK(!arena.failed, RP_ERROR_SHAPE, "attention: the workspace's size overflows");
  if (backward_bytes) *backward_bytes = arena.used;
  return RP_OK;
}
