/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_maps.c: rows of scores and probabilities, on demand, from the kernels that attention
 * itself runs, and the scores split by term: the same call with all other terms left out.
 *
 * One head of one sequence; a task is a block of queries, counted from the first query of the
 * sequence whichever rows are asked for: so the bits of a row do not depend on its neighbours.
 * Strips without a row that is asked for are left out, and nothing else is stored.
 */
#include "base/threads.h"
#include "ops/attention_forward.h"
#include "ops/shown.h"

typedef struct map_call {
  const rpi_attention_map_args *args;
  rp_attention shape; /* with the terms that are shown */
  rpi_attention_args forward;
  bounds n;
  forward_scratch **scratch; /* [workers] */
} map_call;

/* Scores in units of log 2 to what is shown. */
static void show_row(real *row, int64_t keys, int what) {
  const real ln2 = (real)RPI_LN2;
  if (what == RP_SHOW_PROBABILITIES) {
    real most = (real)-INFINITY, sum = 0;
    for (int64_t j = 0; j < keys; j++) most = row[j] > most ? row[j] : most;
    if (most == (real)-INFINITY) most = 0; /* nothing seen, or NaN alone, which stays */
    for (int64_t j = 0; j < keys; j++) {
      row[j] = rpi_exp2(row[j] - most);
      sum += row[j];
    }
    for (int64_t j = 0; j < keys; j++) row[j] = sum == 0 ? 0 : row[j] / sum;
  } else {
    const bool whole = what == RP_SHOW_SCORES;
    for (int64_t j = 0; j < keys; j++) {
      row[j] = !whole && row[j] == (real)-INFINITY ? 0 : row[j] * ln2;
    }
  }
}

static void map_task(void *context, int64_t task, int worker) {
  const map_call *const call = context;
  const rpi_attention_map_args *const args = call->args;
  const rp_attention *const s = &call->shape;
  forward_scratch *const w = call->scratch[worker];
  const rpi_sequence seq = sequence_of(s, args->b);
  if (seq.keys == 0) return; /* rows of no numbers, which may be NULL */
  const int64_t query = (args->row / call->n.block + task) * call->n.block;
  const int64_t rows = rpi_min(call->n.block, seq.queries - query);
  /* of the block: the rows to be shown */
  const int64_t first = rpi_max(args->row - query, 0);
  const int64_t end = rpi_min(args->row + args->rows - query, rows);
  const int what = args->what;
  const bool content = what <= RP_SHOW_CONTENT;
  const forward_item item = {.args = &call->forward,
                             .seq = seq,
                             .sees = sight_of(s),
                             .head = args->head,
                             .key_head = key_head(s, args->head),
                             .query = query,
                             .count = rows,
                             .key = key_term(s, args->head),
                             .value = value_term(s, args->head),
                             .pairs = pair_terms_of(s, args->head, args->b),
                             .n = call->n,
                             .content = content};
  real *const to = args->to + (query + first - args->row) * args->to_stride; /* row first */
  for (int64_t i = 0; i < end - first; i++) {
    for (int64_t j = 0; j < seq.keys; j++) to[i * args->to_stride + j] = (real)-INFINITY;
  }
  open_rows_of(&item, w);
  const stretch seen = keys_seen(&seq, &item.sees, item.query, rows);
  for (int64_t key = seen.begin / RPI_TILE * RPI_TILE; key < seen.end; key += item.n.keys) {
    const int64_t keys = rpi_min(item.n.keys, seen.end - key);
    const reach r = reach_of(&seq, &item.sees, item.query, rows, key, keys);
    if (r.farthest < r.nearest) continue;
    open_keys_of(&item, w, key, keys);
    const forward_view view = open_view(&item, w, 0, key, keys, (dense){0}, &r);
    for (int64_t j = 0; j < keys; j += RPI_TILE) {
      const int64_t tile_keys = rpi_min(RPI_TILE, keys - j);
      open_tile(&item, w, &view, j, tile_keys, j + RPI_TILE < keys ? j + RPI_TILE : j);
      for (int64_t i = first / RPI_STRIP * RPI_STRIP; i < end; i += RPI_STRIP) {
        cell at = {.i = i,
                   .count = rpi_min(RPI_STRIP, rows - i),
                   .j = j,
                   .tile_keys = tile_keys,
                   .columns = RPI_TILE,
                   .at = w->strip};
        forward_scores(&item, w, &view, w->zeros, &at);
        for (int64_t x = rpi_max(i, first); x < rpi_min(i + RPI_STRIP, end); x++) {
          memcpy(to + (x - first) * args->to_stride + key + j, w->strip + (x - i) * RPI_TILE,
                 (size_t)tile_keys * sizeof(real));
        }
      }
    }
  }
  for (int64_t i = 0; i < end - first; i++) show_row(to + i * args->to_stride, seq.keys, what);
}

static void carve_map(rpi_arena *arena, int workers, map_call *call) {
  call->scratch = rpi_arena_take(arena, workers, sizeof *call->scratch);
  for (int worker = 0; worker < workers; worker++) {
    forward_scratch *const scratch = take_forward(arena, &call->n, &call->shape);
    if (arena->base && !arena->failed) call->scratch[worker] = scratch;
  }
}

/* bytes given: counts the workspace, of all sequences where b is -1, and does nothing else. */
static rp_status attention_map(const rpi_attention_map_args *args, int64_t *bytes) {
  map_call call = {.args = args, .shape = rpi_shown_of(args->shape, args->what)};
  /* of its sequence alone: a batch of many has a map for each */
  const bool all = args->b < 0;
  call.n = bounds_between(&call.shape, all ? 0 : args->b, all ? args->shape->B : args->b + 1, false,
                          false);
  call.forward = (rpi_attention_args){.shape = &call.shape, .q = args->q, .k = args->k};
  const int workers = args->workers;
  rpi_arena arena =
      bytes ? rpi_arena_counting() : rpi_arena_over(args->workspace, args->workspace_bytes);
  carve_map(&arena, workers, &call);
  RPI_CHECK(!arena.failed, bytes ? RP_ERROR_SHAPE : RP_ERROR_MEMORY,
            "attention: the workspace of a map %s", bytes ? "overflows" : "is too small");
  if (bytes) {
    *bytes = arena.used;
    return RP_OK;
  }
  const int64_t before = args->row / call.n.block; /* blocks */
  const int64_t behind = rpi_divide_up(args->row + args->rows, call.n.block);
  if (args->rows > 0) rpi_parallel_for(behind - before, workers, map_task, &call);
  return RP_OK;
}
