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
 * With row 0 of wV subtracted, delta_i is dz_i . (z_i - wV[0]).
 *
 * The weights are computed again from the saved log-sum-exp, tile by tile.
 *
 * Two sides of one shape. (4) is (1) with dz for q, values for keys, wV for wK and
 * -delta_i for -lse_i; (9) is (8) with dz for q and p for ds. So everything below is
 * written once for a side, KEY (x = q) or VALUE (x = dz).
 *
 * For a tile of keys, blocks of queries come in the order right of the band, across it,
 * left of it. While they lie wholly right, the column sums of the tile's dk (dv) are the
 * gradient of the last relation, and dq takes keys with that relation's vector added: no
 * row sums. From the first block wholly left on, dk (dv) is gathered anew, and its column
 * sums are the gradient of table row 0, which has no column where it is subtracted
 * (band.h). (From the others' it would be as wrong as all of them together.) In blocks
 * across the band, what lies left and right is gathered per row: head and tail.
 */
#include "ops/attention.h"
#include "ops/table_sums.h"

enum { KEY, VALUE, SIDES };

/* Where a block lies, seen from a tile. */
enum { RIGHT, ACROSS, LEFT };

/* What dk (dv) of a tile holds so far: nothing; only blocks to the right of the band; any
 * up to those across it; only those to the left; the same, and others were put before. */
enum { TILE_EMPTY, TILE_RIGHT, TILE_MIXED, TILE_LEFT, TILE_LEFT_AGAIN };

typedef struct side {
  /* of a chunk of keys */
  real *packed;        /* [tiles][width][TILE]: keys (scaled) or values, transposed */
  real *gradient;      /* [keys][padded]: dk or dv */
  unsigned char *tile; /* [tiles]: TILE_... */
  /* of a block of queries */
  real *copy;    /* [block][padded]: x, where it needs one */
  real *product; /* [block][TILE] of one tile: scores, then p; dp, then ds */
  real *start;   /* [block]: -lse_i or -delta_i */
  packed_term table;
  real *e, *buckets; /* [block][window] */
  real *tail, *head; /* [block][LANES] */
  window w;
  dense x;
  bool collects; /* some tile lies across the band: there are buckets */
} side;

typedef struct backward_scratch {
  side side[SIDES];
  real *key_rows;      /* [keys][padded], where they need a copy */
  real *tail_key_rows; /* the same, with the last relation's vector added */
  real *dq;            /* [block][padded] */
  real *zeros;         /* [block] */
} backward_scratch;

static void take_side(rpi_arena *arena, const bounds *n, int64_t width, int64_t padded,
                      int64_t columns, side *x) {
  const int64_t real_bytes = sizeof(real), window_size = n->block * window_stride(columns);
  x->packed = rpi_arena_take(arena, n->keys * width, real_bytes);
  x->gradient = rpi_arena_take(arena, n->keys * padded, real_bytes);
  x->tile = rpi_arena_take(arena, n->keys / RPI_TILE, 1);
  x->copy = rpi_arena_take(arena, n->block * padded, real_bytes);
  x->product = rpi_arena_take(arena, n->block * RPI_TILE, real_bytes);
  x->start = rpi_arena_take(arena, n->block, real_bytes);
  take_packed(arena, columns, padded, &x->table);
  x->e = rpi_arena_take(arena, window_size, real_bytes);
  x->buckets = rpi_arena_take(arena, window_size, real_bytes);
  x->tail = rpi_arena_take(arena, n->block * RPI_LANES, real_bytes);
  x->head = rpi_arena_take(arena, n->block * RPI_LANES, real_bytes);
}

static backward_scratch *take_backward(rpi_arena *arena, const bounds *n, int64_t D, int64_t Dv) {
  backward_scratch local = {0};
  backward_scratch *const kept = rpi_arena_take(arena, 1, sizeof local);
  const int64_t real_bytes = sizeof(real);
  take_side(arena, n, D, n->width, n->key_columns, &local.side[KEY]);
  take_side(arena, n, Dv, n->value_width, n->value_columns, &local.side[VALUE]);
  local.key_rows = rpi_arena_take(arena, n->keys * n->width, real_bytes);
  local.tail_key_rows = rpi_arena_take(arena, n->keys * n->width, real_bytes);
  local.dq = rpi_arena_take(arena, n->block * n->width, real_bytes);
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
  bounds n;
  /* of each side */
  term term[SIDES];
  int64_t width[SIDES], padded[SIDES];
  real factor[SIDES]; /* of the packed keys and of E */
  const table_sums *sums[SIDES];
} backward_item;

/* A block of queries. */
typedef struct backward_block {
  int64_t row0, rows;    /* counted in the sequence */
  dense keys, tail_keys; /* of the chunk */
} backward_block;

/* Is the gradient of table row 0 gathered here? */
static bool wants_head(const backward_item *item, int x) {
  return item->term[x].table && item->term[x].shifted && item->sums[x]->lines;
}
static real *head_line(const table_sums *sums, int64_t padded) {
  return sums->lines + columns_of(sums) * padded;
}

/* Adds dk (dv) of a tile, up to now, to a line of the table's gradient. */
static void add_tile(const backward_item *item, const side *x, int which, int64_t j, real *line) {
  const int64_t padded = item->padded[which], end = rpi_min(j + RPI_TILE, item->r.keys);
  for (int64_t row = j; row < end; row++) {
    for (int64_t c = 0; c < padded; c++) line[c] += x->gradient[row * padded + c];
  }
}

/* ---- a strip ------------------------------------------------------------- */

/* p and ds of a strip from its scores and dp - delta: (2) and (5). -lse_i is added
 * here, to the finished score: accumulators that started from it would round each of
 * their D steps at its size, eleven times the error of the plain formula where scores
 * are small. */
RPI_NOINLINE void differentiate_strip(int64_t count, real *restrict s, real *restrict ds,
                                      const real *restrict negated_lse) {
  for (int64_t r = 0; r < count; r++, s += RPI_TILE, ds += RPI_TILE) {
    const real start = negated_lse[r];
    _Pragma("omp simd") for (int j = 0; j < RPI_TILE; j++) {
      s[j] = rpi_exp2(s[j] + start);
      ds[j] *= s[j];
    }
  }
}

RPI_NOINLINE void add_row_sums(int64_t count, const real *x, real *sums) {
  for (int64_t r = 0; r < count; r++, sums += RPI_LANES) {
    rpi_store(sums, rpi_load(sums) + sum_row(x + r * RPI_TILE));
  }
}

/* Gathers a strip of ds (p) by relation: (6), for a block across the band. */
static void collect_strip(const backward_item *item, side *x, int which, const real *weights,
                          int64_t i, int64_t count, int64_t distance, int64_t tile_keys) {
  const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
  const int meets = window_meets(&x->w, nearest, farthest);
  real *const head = wants_head(item, which) ? x->head + i * RPI_LANES : NULL;
  real *const tail = x->tail + i * RPI_LANES;
  if (meets == MEETS_BAND) {
    band_store(&x->w, count, weights, RPI_LANES + distance - x->w.first,
               x->buckets + i * window_stride(x->w.columns), tail, head);
  } else if (meets == MEETS_TAIL) {
    add_row_sums(count, weights, tail);
  } else if (head) {
    add_row_sums(count, weights, head);
  }
}

/* A strip of queries on a tile of keys: p, ds, what they add to buckets, and dq (7). */
static void backward_strip(const backward_item *item, backward_scratch *w,
                           const backward_block *block, const int *lies, int64_t i, int64_t j,
                           int64_t tile_keys) {
  const int64_t count = rpi_min(RPI_STRIP, block->rows - i);
  const int64_t distance = item->r.key + j - (block->row0 + i + item->seq.start);
  const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
  for (int which = 0; which < SIDES; which++) {
    side *const x = &w->side[which];
    const rpi_product product = {.a = x->x.data + i * x->x.stride,
                                 .a_row = x->x.stride,
                                 .a_inner = 1,
                                 .b = x->packed + j * item->width[which],
                                 .b_stride = RPI_TILE,
                                 .c = x->product + i * RPI_TILE,
                                 .c_stride = RPI_TILE,
                                 .inner = item->width[which]};
    score_strip(&x->w, window_meets(&x->w, nearest, farthest),
                x->e + i * window_stride(x->w.columns), distance, count, &product,
                which == KEY ? w->zeros : x->start + i);
  }
  real *const p = w->side[KEY].product + i * RPI_TILE;
  real *const ds = w->side[VALUE].product + i * RPI_TILE;
  const bool causal = item->args->shape->causal;
  if (tile_keys < RPI_TILE || (causal && farthest > 0)) {
    mask_strip(count, 1 - distance, causal, tile_keys, p);
  }
  differentiate_strip(count, p, ds, w->side[KEY].start + i);
  if (lies[KEY] == ACROSS) {
    collect_strip(item, &w->side[KEY], KEY, ds, i, count, distance, tile_keys);
  }
  if (lies[VALUE] == ACROSS) {
    collect_strip(item, &w->side[VALUE], VALUE, p, i, count, distance, tile_keys);
  }
  const dense *const keys = lies[KEY] == RIGHT ? &block->tail_keys : &block->keys;
  const int64_t width = item->padded[KEY];
  const rpi_product dq = {.a = ds,
                          .a_row = RPI_TILE,
                          .a_inner = 1,
                          .b = keys->data + j * keys->stride,
                          .b_stride = keys->stride,
                          .c = w->dq + i * width,
                          .c_stride = width,
                          .inner = tile_keys};
  rpi_strip_product(RPI_START_LOAD, count, width / RPI_LANES, &dq, NULL);
}

/* ---- a block ------------------------------------------------------------- */

/* c[columns][width] += aᵀ . x: (8) and (9), for keys and for table rows alike. */
static void add_transposed(const real *a, int64_t a_stride, int64_t columns, const real *x,
                           int64_t x_stride, int64_t count, int64_t width, real *c) {
  const rpi_product product = {.a = a,
                               .a_row = 1,
                               .a_inner = a_stride,
                               .b = x,
                               .b_stride = x_stride,
                               .c = c,
                               .c_stride = width,
                               .inner = count};
  rpi_block_product(RPI_START_LOAD, columns, width / RPI_LANES, product, NULL);
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

/* Adds dk (dv) of a tile to its place. */
static void put_tile(const backward_item *item, const side *x, int which, int64_t j,
                     bool overwrite) {
  const rp_attention_gradients *const g = item->args->gradients;
  put_rows(which == KEY ? &g->k : &g->v, item->seq.key_batch, item->head,
           item->seq.key_row + item->r.key + j, rpi_min(RPI_TILE, item->r.keys - j),
           item->width[which], x->gradient + j * item->padded[which], item->padded[which],
           which == KEY ? scale_of(item->args->shape) : (real)1, overwrite);
}

/* Where a block lies, and what that means for dk (dv) of the tile. */
static int turn_tile(const backward_item *item, side *x, int which, int64_t j, const reach *r) {
  const term *const t = &item->term[which];
  const table_sums *const sums = item->sums[which];
  unsigned char *const state = &x->tile[j / RPI_TILE];
  if (x->w.tail && r->nearest >= t->last) {
    *state = TILE_RIGHT;
    return RIGHT;
  }
  if (*state == TILE_RIGHT && sums->lines) {
    add_tile(item, x, which, j, sums->lines + (t->last - sums->first) * item->padded[which]);
  }
  if (!wants_head(item, which) || r->farthest >= t->first) {
    *state = TILE_MIXED;
    return ACROSS;
  }
  if (*state == TILE_RIGHT || *state == TILE_MIXED) {
    real *const gradient = x->gradient + j * item->padded[which];
    const int64_t keys = rpi_min(RPI_TILE, item->r.keys - j);
    put_tile(item, x, which, j, item->first_for_keys);
    memset(gradient, 0, (size_t)(keys * item->padded[which]) * sizeof(real));
    *state = TILE_LEFT_AGAIN;
  } else if (*state == TILE_EMPTY) {
    *state = TILE_LEFT;
  }
  return LEFT;
}

/* dz . (z - wV[0]): the difference first, it is small where weights lie on row 0. */
static real dot_shifted(const real *restrict dz, const real *restrict z, const real *restrict shift,
                        int64_t width) {
  rpi_register sum = {0};
  int64_t c = 0;
  for (; c + RPI_LANES <= width; c += RPI_LANES) {
    sum += rpi_load(dz + c) * (rpi_load(z + c) - rpi_load(shift + c));
  }
  real total = sum_lanes((const real *)&sum);
  for (; c < width; c++) total += dz[c] * (z[c] - shift[c]);
  return total;
}

/* -lse_i and -delta_i of a block. A row that saw no key starts at -inf: its weights
 * are 0 whatever the scores. */
static void start_rows(const backward_item *item, const backward_block *block,
                       backward_scratch *w) {
  const rpi_attention_backward_args *const args = item->args;
  const rpi_sequence *const seq = &item->seq;
  const int64_t Dv = args->shape->Dv;
  const real *const lse = args->lse + lse_at(args->shape, seq, item->head) + block->row0;
  const term *const value = &item->term[VALUE];
  const real *const shift = value->table && value->shifted ? value->table : NULL;
  for (int64_t i = 0; i < block->rows; i++) {
    const int64_t at = seq->query_row + block->row0 + i;
    const real *const q = row_of(&args->q, seq->query_batch, item->head, at);
    const real *const z = row_of(&args->out, seq->query_batch, item->head, at);
    const real *const dz = row_of(&args->dout, seq->query_batch, item->head, at);
    const double own = (double)score_shift(args->shape, &item->term[KEY], q) - (double)lse[i];
    w->side[KEY].start[i] =
        lse[i] == (real)-INFINITY ? lse[i] : (real)(own * 1.4426950408889634074);
    w->side[VALUE].start[i] = -(shift ? dot_shifted(dz, z, shift, Dv) : dot(dz, z, Dv));
  }
}

/* Makes a block ready to walk: x, E, empty buckets. */
static void open_side(const backward_item *item, const backward_block *block, side *x, int which,
                      const real *zeros) {
  const rpi_attention_backward_args *const args = item->args;
  const rp_rows *const from = which == KEY ? &args->q : &args->dout;
  const int64_t count = block->rows, width = item->width[which], padded = item->padded[which];
  const reach r =
      reach_of(&item->seq, args->shape->causal, block->row0, count, item->r.key, item->r.keys);
  x->x =
      dense_rows(row_of(from, item->seq.query_batch, item->head, item->seq.query_row + block->row0),
                 from->row_stride, count, width, padded, x->copy);
  x->w = window_of(&item->term[which], r.nearest, r.farthest);
  const term *const t = &item->term[which];
  const bool one_side = r.farthest < t->first || (x->w.tail && r.nearest >= t->last);
  x->collects = t->table && !one_side;
  if (x->collects) memset(x->head, 0, (size_t)(count * RPI_LANES) * sizeof(real));
  if (x->w.columns == 0) return;
  pack_window(&item->term[which], &x->w, item->factor[which], padded, &x->table);
  band_scores(&x->table, x->x.data, x->x.stride, count, width, item->factor[which], zeros, x->e);
  if (!x->collects) return;
  memset(x->buckets, 0, (size_t)(count * window_stride(x->w.columns)) * sizeof(real));
  memset(x->tail, 0, (size_t)(count * RPI_LANES) * sizeof(real));
}

/* After a block: its buckets times x go to the table's gradient. */
static void close_side(const backward_item *item, const backward_block *block, side *x, int which) {
  const table_sums *const sums = item->sums[which];
  const int64_t padded = item->padded[which], stride = window_stride(x->w.columns);
  if (!x->collects) return;
  if (x->w.columns) band_finish(&x->w, block->rows, x->buckets, x->tail);
  if (x->w.columns && sums->lines) {
    add_transposed(x->buckets + RPI_LANES, stride, x->w.columns, x->x.data, x->x.stride,
                   block->rows, padded, sums->lines + (x->w.first - sums->first) * padded);
  }
  if (!wants_head(item, which)) return;
  real *const line = head_line(sums, padded);
  for (int64_t i = 0; i < block->rows; i++) {
    const real head = sum_lanes(x->head + i * RPI_LANES);
    if (head == 0) continue; /* most rows have none; a NaN is not 0 */
    const real *const row = x->x.data + i * x->x.stride;
    for (int64_t c = 0; c < padded; c++) line[c] += head * row[c];
  }
}

/* A block of queries against the item's chunk of keys. */
static void backward_rows(const backward_item *item, backward_scratch *w,
                          const backward_block *block) {
  const rp_attention *const s = item->args->shape;
  const int64_t count = block->rows, width = item->padded[KEY];
  start_rows(item, block, w);
  for (int which = 0; which < SIDES; which++) {
    open_side(item, block, &w->side[which], which, w->zeros);
  }
  memset(w->dq, 0, (size_t)(count * width) * sizeof(real));
  for (int64_t j = 0; j < item->r.keys; j += RPI_TILE) {
    const int64_t tile_keys = rpi_min(RPI_TILE, item->r.keys - j);
    const reach r = reach_of(&item->seq, s->causal, block->row0, count, item->r.key + j, tile_keys);
    if (r.farthest < r.nearest) break; /* causal, and all hidden from here on */
    /* the first strip with a query that sees the tile's first key */
    const int64_t hidden = item->r.key + j - (block->row0 + item->seq.start);
    const int64_t begin = s->causal ? rpi_max(hidden, 0) / RPI_STRIP * RPI_STRIP : 0;
    int lies[SIDES];
    for (int which = 0; which < SIDES; which++) {
      lies[which] = turn_tile(item, &w->side[which], which, j, &r);
    }
    for (int64_t i = begin; i < count; i += RPI_STRIP) {
      backward_strip(item, w, block, lies, i, j, tile_keys);
    }
    for (int which = 0; which < SIDES; which++) {
      const side *const x = &w->side[which];
      const real *const weights = w->side[which == KEY ? VALUE : KEY].product; /* ds, p */
      add_transposed(weights + begin * RPI_TILE, RPI_TILE, tile_keys,
                     x->x.data + begin * x->x.stride, x->x.stride, count - begin,
                     item->padded[which], x->gradient + j * item->padded[which]);
    }
  }
  for (int which = 0; which < SIDES; which++) {
    close_side(item, block, &w->side[which], which);
  }
  const side *const key = &w->side[KEY];
  if (key->collects && key->w.columns) {
    const rpi_product dq = {.a = key->buckets + RPI_LANES,
                            .a_row = window_stride(key->w.columns),
                            .a_inner = 1,
                            .b = key->table.down,
                            .b_stride = width,
                            .c = w->dq,
                            .c_stride = width,
                            .inner = key->w.columns};
    rpi_block_product(RPI_START_LOAD, count, width / RPI_LANES, dq, NULL);
  }
  put_rows(&item->args->gradients->q, item->seq.query_batch, item->head,
           item->seq.query_row + block->row0, count, s->D, w->dq, width, scale_of(s),
           item->first_for_queries);
}

/* ---- a pair of chunks ---------------------------------------------------- */

static void open_keys(const backward_item *item, side *x, int which) {
  const rp_rows *const from = which == KEY ? &item->args->k : &item->args->v;
  const int64_t keys = rpi_max(item->r.keys, 0), width = item->width[which];
  memset(x->gradient, 0, (size_t)(keys * item->padded[which]) * sizeof(real));
  for (int64_t j = 0; j < keys; j += RPI_TILE) {
    x->tile[j / RPI_TILE] = TILE_EMPTY;
    rpi_pack_transposed(
        row_of(from, item->seq.key_batch, item->head, item->seq.key_row + item->r.key + j),
        from->row_stride, rpi_min(RPI_TILE, keys - j), width, item->factor[which],
        x->packed + j * width, RPI_TILE, RPI_TILE);
  }
}

/* Puts dk (dv), and what a tile in the end holds of one relation alone. */
static void close_keys(const backward_item *item, side *x, int which) {
  const int64_t padded = item->padded[which];
  const table_sums *const sums = item->sums[which];
  for (int64_t j = 0; j < item->r.keys; j += RPI_TILE) {
    const int state = x->tile[j / RPI_TILE];
    put_tile(item, x, which, j, item->first_for_keys && state != TILE_LEFT_AGAIN);
    if (state >= TILE_LEFT) add_tile(item, x, which, j, head_line(sums, padded));
    if (state == TILE_RIGHT && sums->lines) {
      add_tile(item, x, which, j, sums->lines + (item->term[which].last - sums->first) * padded);
    }
  }
}

static void backward_pair(const backward_item *item, backward_scratch *w) {
  const rp_attention *const s = item->args->shape;
  const rectangle *const r = &item->r;
  const bool hidden = s->causal && r->key > r->query + r->rows - 1 + item->seq.start;
  if (hidden && !item->first_for_keys && !item->first_for_queries) return;
  for (int which = 0; which < SIDES; which++) open_keys(item, &w->side[which], which);
  const rp_rows *const k = &item->args->k;
  const dense keys =
      dense_rows(row_of(k, item->seq.key_batch, item->head, item->seq.key_row + r->key),
                 k->row_stride, rpi_max(r->keys, 0), s->D, item->padded[KEY], w->key_rows);
  dense tail_keys = {0};
  if (reaches_tail(&item->term[KEY], &item->seq, r->query, r->key, r->keys)) {
    tail_keys = tail_rows(&item->term[KEY], &keys, r->keys, item->padded[KEY], w->tail_key_rows);
  }
  for (int64_t done = 0; done < r->rows; done += item->n.block) {
    const backward_block block = {.row0 = r->query + done,
                                  .rows = rpi_min(item->n.block, r->rows - done),
                                  .keys = keys,
                                  .tail_keys = tail_keys};
    backward_rows(item, w, &block);
  }
  for (int which = 0; which < SIDES; which++) close_keys(item, &w->side[which], which);
}

/* ---- the call ------------------------------------------------------------ */

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
  const slot *const at = &call->list.slots[task];
  sums_clear(&at->key, call->n.width);
  sums_clear(&at->value, call->n.value_width);
  pair p = at->begin;
  for (int64_t done = 0; done < at->items; done++) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const int64_t queries = query_chunks(s, &seq).count, keys = key_chunks(s, &seq).count;
    const backward_item item = {
        .args = call->args,
        .seq = seq,
        .head = at->head,
        .r = rectangle_of(s, &seq, &p),
        .first_for_queries = first_for_queries(&p, keys),
        .first_for_keys = first_for_keys(&p, queries),
        .n = call->n,
        .term = {term_of(&s->key, at->head, s->D, call->nearest),
                 term_of(&s->value, at->head, s->Dv, call->nearest)},
        .width = {s->D, s->Dv},
        .padded = {call->n.width, call->n.value_width},
        .factor = {scale_of(s) * LOG2_E, 1},
        .sums = {&at->key, &at->value},
    };
    backward_pair(&item, call->scratch[worker]);
    clear_padding(&item, &p, queries, keys);
    p = pair_after(s, call->list.phase, &p);
  }
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
