/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_calls.c: forward and backward over all of a call: forward's items, backward's phases,
 * slots and items (attention_plan.h, table_sums.h); the workspace of both; the table's entries.
 */
#include "base/threads.h"
#include "ops/attention_backward.h"
#include "ops/attention_forward.h"
#include "ops/table_sums.h"

/* Was the caller's workspace large enough? */
static rp_status check_carved(const rpi_arena *arena, int workers) {
  RPI_CHECK(!arena->failed, RP_ERROR_MEMORY,
            "attention: workspace_bytes=%lld is too small for %d threads; ask "
            "rp_attention_workspace again after rp_set_threads",
            (long long)arena->size, workers);
  return RP_OK;
}

/* Rows beyond a sequence's length are zeros. */
static void clear_rows(const rp_rows_out *x, int64_t batch, int64_t head, int64_t begin,
                       int64_t end, int64_t width) {
  for (int64_t i = begin; i < end; i++) {
    memset(out_row_of(x, batch, head, i), 0, (size_t)width * sizeof(real));
  }
}

/* ---- forward ------------------------------------------------------------ */

typedef struct forward_call {
  const rpi_attention_args *args;
  bounds n;
  const int64_t *first_item; /* [B + 1]: items of one head, of the sequences before */
  forward_scratch **scratch; /* [workers] */
} forward_call;

/* Head by head, since all sequences of one length meet the same window of a head's tables. */
static void forward_task(void *context, int64_t number, int worker) {
  const forward_call *const call = context;
  const rp_attention *const s = call->args->shape;
  const int64_t items = call->first_item[s->B], head = number / items, task = number % items;
  int64_t low = 0, high = s->B - 1; /* the last b with first_item[b] <= task */
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (call->first_item[middle] <= task) low = middle;
    else high = middle - 1;
  }
  const rpi_sequence seq = sequence_of(s, low);
  const chunks cut = query_chunks(s, &seq);
  /* last chunk first: under a causal mask it is the longest */
  const int64_t chunk = cut.count - 1 - (task - call->first_item[low]);
  const int64_t query = chunk * cut.rows;
  forward_item item = {.args = call->args,
                       .seq = seq,
                       .sees = sight_of(s),
                       .head = head,
                       .key_head = key_head(s, head),
                       .query = query,
                       .count = rpi_min(cut.rows, seq.queries - query),
                       .key = key_term(s, head),
                       .value = value_term(s, head),
                       .pairs = pair_terms_of(s, head, low),
                       .n = call->n,
                       .content = true};
  choose_tiles(&item.n, item.count, seq.keys, false);
  if (item.n.tiles) tiles_begin();
  if (item.count > 0) forward_rows(&item, call->scratch[worker]);
  if (item.n.tiles) tiles_end();
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
    forward_scratch *const scratch = take_forward(arena, &call->n, s);
    if (arena->base && !arena->failed) call->scratch[worker] = scratch;
  }
  call->first_item = first_item;
  if (!arena->base || arena->failed) return;
  first_item[0] = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const rpi_sequence seq = sequence_of(s, b);
    first_item[b + 1] = first_item[b] + query_chunks(s, &seq).count;
  }
}

static rp_status attention_forward_by(const rpi_attention_args *args, bool tiles) {
  const rp_attention *const s = args->shape;
  forward_call call = {.args = args, .n = bounds_of(s, false, tiles)};
  const int workers = args->workers;
  rpi_arena arena = rpi_arena_over(args->workspace, args->workspace_bytes);
  carve_forward(&arena, s, workers, &call);
  RPI_TRY(check_carved(&arena, workers));
  rpi_parallel_for(s->H * call.first_item[s->B], workers, forward_task, &call);
  return RP_OK;
}

/* ---- backward ----------------------------------------------------------- */

typedef struct backward_call {
  const rpi_attention_backward_args *args;
  bounds n;
  slot_list list;
  int64_t sharer;    /* which of the heads that share keys: they add to dk and dv in turn */
  int64_t *unmasked; /* backward_item */
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
    clear_rows(&g->k, seq->key_batch, item->key_head, seq->keys, s->M, s->D);
    clear_rows(&g->v, seq->key_batch, item->key_head, seq->keys, s->M, s->Dv);
  }
}

static void backward_task(void *context, int64_t task, int worker) {
  const backward_call *const call = context;
  const rp_attention *const s = call->args->shape;
  const slot *const at = &call->list.slots[task];
  for (int i = 0; i < RPI_SUMMED; i++) sums_clear(&at->sums[i], call->list.width[i]);
  const bool numbers = at->sums[SUM_OF_KEYS].numbers != NULL;
  pair p = at->begin;
  for (int64_t done = 0, items = 1; done < at->items; done += items) {
    items = rpi_min(idle_items(s, call->list.phase, &p), at->items - done);
    if (items > 0) {
      p = pair_after(s, call->list.phase, &p, items);
      continue;
    }
    items = 1;
    const rpi_sequence seq = sequence_of(s, p.b);
    const int64_t queries = query_chunks(s, &seq).count, keys = key_chunks(s, &seq).count;
    backward_item item = {
        .args = call->args,
        .seq = seq,
        .sees = sight_of(s),
        .head = at->head,
        .key_head = key_head(s, at->head),
        .r = rectangle_of(s, &seq, &p),
        .first_for_queries = first_for_queries(&p, keys),
        .first_for_keys = call->sharer == 0 && first_for_keys(&p, queries),
        .n = call->n,
        .pairs = pair_terms_of(s, at->head, p.b),
        .sums = at,
        .unmasked = call->unmasked,
        .term = {key_term(s, at->head), value_term(s, at->head)},
        .width = {s->D, s->Dv},
        .padded = {call->n.width, call->n.value_width},
        .factor = {scale_of(s) * (real)RPI_LOG2_E, 1},
        .to = {at->sums[SUM_OF_KEYS], at->sums[SUM_OF_VALUES]},
    };
    for (int which = 0; which < SIDES; which++) item.by_row[which] = lies_across(&item, which);
    /* dk has other parts then, or is of moved queries, and dq is to be ds . k */
    item.by_row[KEY] |= numbers || item.pairs.queries || item.pairs.moves;
    choose_tiles(&item.n, item.r.rows, item.r.keys, true);
    if (item.n.tiles) tiles_begin();
    backward_pair(&item, call->scratch[worker]);
    if (item.n.tiles) tiles_end();
    clear_padding(&item, &p, queries, keys);
    p = pair_after(s, call->list.phase, &p, 1);
  }
}

/* Rows of a call that have a number for its mask; -1, which no arena takes, where they overflow. */
static int64_t masked_rows(const rp_attention *s) {
  int64_t rows = s->offsets ? s->offsets[s->B] : 0;
  if (!s->mask.data) return 0;
  if (!s->offsets && !rpi_multiply(s->B, s->N, &rows)) return -1;
  return rpi_multiply(s->H, rows, &rows) ? rows : -1;
}

/* The one list of what backward needs, for counting and for carving. */
static void carve_backward(rpi_arena *arena, const rp_attention *s, int workers,
                           backward_call *call) {
  call->list = slots_carve(arena, s, &call->n);
  call->unmasked = rpi_arena_take(arena, masked_rows(s), sizeof *call->unmasked);
  call->scratch = rpi_arena_take(arena, workers, sizeof *call->scratch);
  for (int worker = 0; worker < workers; worker++) {
    backward_scratch *const scratch = take_backward(arena, &call->n, s);
    if (arena->base && !arena->failed) call->scratch[worker] = scratch;
  }
}

static rp_status attention_backward_by(const rpi_attention_backward_args *args, bool tiles) {
  const rp_attention *const s = args->shape;
  backward_call call = {.args = args, .n = bounds_of(s, true, tiles)};
  const int workers = args->workers;
  rpi_arena arena = rpi_arena_over(args->workspace, args->workspace_bytes);
  carve_backward(&arena, s, workers, &call);
  RPI_TRY(check_carved(&arena, workers));
  for (int64_t i = 0; i < masked_rows(s); i++) call.unmasked[i] = -1;
  const int64_t phases = phase_count(s), sharers = heads_sharing(s);
  for (int64_t phase = 0; phase < phases; phase++) {
    slots_open(&call.list, phase, args->gradients);
    for (call.sharer = 0; call.sharer < sharers; call.sharer++) {
      if (call.sharer > 0) slots_next(&call.list);
      rpi_parallel_for(call.list.per_head * call.list.heads, workers, backward_task, &call);
      slots_reduce(&call.list, args->gradients, workers);
    }
  }
  return RP_OK;
}

/* ---- both --------------------------------------------------------------- */

static rp_status attention_workspace_by(const rp_attention *s, int workers, bool tiles,
                                        int64_t *forward_bytes, int64_t *backward_bytes) {
  rpi_arena forward_arena = rpi_arena_counting(), backward_arena = rpi_arena_counting();
  if (forward_bytes) {
    forward_call forward = {.n = bounds_of(s, false, tiles)};
    carve_forward(&forward_arena, s, workers, &forward);
  }
  if (backward_bytes) {
    backward_call backward = {.n = bounds_of(s, true, tiles)};
    carve_backward(&backward_arena, s, workers, &backward);
  }
  RPI_CHECK(!forward_arena.failed && !backward_arena.failed, RP_ERROR_SHAPE,
            "attention: the workspace's size overflows");
  if (forward_bytes) *forward_bytes = forward_arena.used;
  if (backward_bytes) *backward_bytes = backward_arena.used;
  return RP_OK;
}

static rp_status attention_forward(const rpi_attention_args *args) {
  return attention_forward_by(args, false);
}
static rp_status attention_backward(const rpi_attention_backward_args *args) {
  return attention_backward_by(args, false);
}
static rp_status attention_workspace(const rp_attention *s, int workers, int64_t *forward_bytes,
                                     int64_t *backward_bytes) {
  return attention_workspace_by(s, workers, false, forward_bytes, backward_bytes);
}

#ifdef RPI_TILES
static rp_status attention_forward_tiles(const rpi_attention_args *args) {
  return attention_forward_by(args, true);
}
static rp_status attention_backward_tiles(const rpi_attention_backward_args *args) {
  return attention_backward_by(args, true);
}
static rp_status attention_workspace_tiles(const rp_attention *s, int workers,
                                           int64_t *forward_bytes, int64_t *backward_bytes) {
  return attention_workspace_by(s, workers, true, forward_bytes, backward_bytes);
}
#endif
