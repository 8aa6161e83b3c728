/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.c: the log of keys and values, the rows that are lists of them, and the pass over one token
 * a row. The layers themselves are model/layers.c's.
 */
#include "decode/cache.h"

#include <string.h>

#include "base/memory.h"

/* A block of the log is about this large: small beside a model, and a page or more for each layer
 * and row. */
#define BLOCK_BYTES ((int64_t)4 << 20)

struct rpi_cache {
  rp_model *model;
  const rp_ops *ops;
  int64_t layers, token; /* of the decoder; numbers from a token to the next in one layer */
  rpi_cache_start start;

  /* the log */
  rpi_room block_list; /* [block_room] pointers */
  int64_t blocks, block_room;
  int64_t block_rows, used; /* tokens of a block; tokens in the log */

  /* the source */
  int64_t sentences, source_rows;
  rpi_room source_offsets; /* [sentences + 1] */
  rpi_room cross;          /* of the device: [layers][source rows][token] */
  rpi_room cross_places;   /* [source rows]: pointers to layer 0 */

  /* tables that are made of parameters (of the device), and the shapes that use them, for each
   * layer */
  rpi_room shapes, tables;

  /* rows; two of each list, since rows that go on are copied from one to the other */
  int64_t rows, list_room;      /* list_room: tokens that a list has place for */
  rpi_room lists[2], counts[2]; /* [most_rows][list_room] pointers, [most_rows] */
  rpi_room owners[2];           /* [most_rows]: sentences */
  int now;                      /* which of the two is */

  /* one step's arguments */
  rpi_room arguments;
  rpi_room attention, seen; /* [most_rows][longest source], of the device; what the host sees of it,
                               where that is another */
  int64_t longest_source;
};

rp_status rpi_room_need(rpi_room *room, int64_t count, int64_t bytes) {
  int64_t wanted = 0;
  RPI_CHECK(rpi_multiply(count, bytes, &wanted), RP_ERROR_SHAPE, "decoder: its memory overflows");
  if (wanted <= room->bytes) return RP_OK;
  void *const memory = rpi_allocate((size_t)wanted);
  RPI_CHECK(memory, RP_ERROR_MEMORY, "decoder: no memory for %lld bytes", (rpi_wide)wanted);
  rpi_release(room->memory);
  *room = (rpi_room){memory, wanted};
  return RP_OK;
}

/* The same, of the device's memory. */
static rp_status need_numbers(const rpi_cache *c, rpi_room *room, int64_t count, int64_t each) {
  int64_t numbers = 0, wanted = 0;
  RPI_CHECK(rpi_multiply(count, each, &numbers) && rpi_multiply(numbers, sizeof(real), &wanted),
            RP_ERROR_SHAPE, "decoder: its memory overflows");
  if (wanted <= room->bytes) return RP_OK;
  void *memory = NULL;
  RPI_TRY_MEMORY(c->ops->allocate(wanted, &memory), "decoder: no memory for %lld bytes on %s",
                 (rpi_wide)wanted, c->model->device);
  c->ops->release(room->memory);
  *room = (rpi_room){memory, wanted};
  return RP_OK;
}

rp_status rpi_cache_create(rp_model *model, rpi_cache **cache) {
  rpi_cache *const c = rpi_allocate(sizeof *c);
  RPI_CHECK(c, RP_ERROR_MEMORY, "decoder: no memory for the decoder");
  memset(c, 0, sizeof *c);
  c->model = model;
  c->ops = model->ops;
  c->layers = model->config.decoder.layers;
  c->token = rpi_kept_stride(model);
  const int64_t token_bytes = c->layers * c->token * (int64_t)sizeof(real);
  c->block_rows = token_bytes < BLOCK_BYTES ? BLOCK_BYTES / token_bytes : 1;
  *cache = c;
  return RP_OK;
}

void rpi_cache_free(rpi_cache *c) {
  if (!c) return;
  const rp_ops *const ops = c->ops;
  real **const blocks = c->block_list.memory;
  for (int64_t b = 0; b < c->blocks; b++) ops->release(blocks[b]);
  ops->release(c->cross.memory);
  ops->release(c->tables.memory);
  ops->release(c->attention.memory);
  rpi_room *const rooms[] = {&c->block_list, &c->source_offsets, &c->cross_places, &c->shapes,
                             &c->lists[0],   &c->lists[1],       &c->counts[0],    &c->counts[1],
                             &c->owners[0],  &c->owners[1],      &c->arguments,    &c->seen};
  for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++) rpi_release(rooms[i]->memory);
  rpi_release(c);
}

/* ---- the log --------------------------------------------------------------- */

static rp_status add_block(rpi_cache *c) {
  if (c->blocks == c->block_room) {
    rpi_room list = {NULL, 0};
    const int64_t wanted = 2 * c->block_room + 16;
    RPI_TRY(rpi_room_need(&list, wanted, sizeof(real *)));
    if (c->blocks != 0) {
      memcpy(list.memory, c->block_list.memory, (size_t)c->blocks * sizeof(real *));
    }
    rpi_release(c->block_list.memory);
    c->block_list = list;
    c->block_room = wanted;
  }
  rpi_room block = {NULL, 0};
  RPI_TRY(need_numbers(c, &block, c->layers * c->block_rows, c->token));
  ((real **)c->block_list.memory)[c->blocks++] = block.memory;
  return RP_OK;
}

/* Where the next `count` tokens go. */
static rp_status take_tokens(rpi_cache *c, int64_t count, real **to) {
  for (int64_t i = 0; i < count; i++, c->used++) {
    const int64_t block = c->used / c->block_rows, row = c->used % c->block_rows;
    if (block == c->blocks) RPI_TRY(add_block(c));
    to[i] = ((real **)c->block_list.memory)[block] + row * c->token;
  }
  return RP_OK;
}

/* ---- rows ------------------------------------------------------------------ */

static real **list_at(const rpi_cache *c, int which, int64_t row) {
  return (real **)c->lists[which].memory + row * c->list_room;
}
static int64_t *counts_at(const rpi_cache *c, int which) { return c->counts[which].memory; }
static int32_t *owners_at(const rpi_cache *c, int which) { return c->owners[which].memory; }

/* Room for one token more in every list. */
static rp_status lengthen(rpi_cache *c) {
  const int64_t *const counts = counts_at(c, c->now);
  int64_t longest = 0;
  for (int64_t r = 0; r < c->rows; r++) longest = rpi_max(longest, counts[r]);
  if (longest < c->list_room) return RP_OK;
  const int64_t wanted = rpi_min(2 * c->list_room, c->start.most_length);
  rpi_room other = {NULL, 0}; /* in place of the list that is not in use */
  const int64_t bytes = wanted * (int64_t)sizeof(real *);
  RPI_TRY(rpi_room_need(&other, c->start.most_rows, bytes));
  for (int64_t r = 0; r < c->rows; r++) {
    memcpy((real **)other.memory + r * wanted, list_at(c, c->now, r),
           (size_t)counts[r] * sizeof(real *));
  }
  rpi_release(c->lists[c->now].memory);
  c->lists[c->now] = other;
  c->list_room = wanted;
  return rpi_room_need(&c->lists[1 - c->now], c->start.most_rows, bytes);
}

/* Rows become those that go on from `parents`. */
static void reorder(rpi_cache *c, int64_t rows, const int32_t *parents) {
  bool same = rows <= c->rows;
  for (int64_t r = 0; parents && same && r < rows; r++) same = parents[r] == r;
  c->rows = rows;
  if (same) return;
  const int from = c->now, to = 1 - from;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t parent = parents[r], count = counts_at(c, from)[parent];
    counts_at(c, to)[r] = count;
    owners_at(c, to)[r] = owners_at(c, from)[parent];
    memcpy(list_at(c, to, r), list_at(c, from, parent), (size_t)count * sizeof(real *));
  }
  c->now = to;
}

/* ---- a step ---------------------------------------------------------------- */

/* Arrays that a step hands to the model, [most_rows] each but for offsets. */
typedef struct arguments {
  int64_t *offsets, *places, *cross_counts;
  real **to, **mean;
  const real *const **self, *const **cross;
} arguments;

static arguments carve(rpi_arena *arena, int64_t rows) {
  return (arguments){.offsets = rpi_arena_take(arena, rows + 1, sizeof(int64_t)),
                     .places = rpi_arena_take(arena, rows, sizeof(int64_t)),
                     .cross_counts = rpi_arena_take(arena, rows, sizeof(int64_t)),
                     .to = rpi_arena_take(arena, rows, sizeof(real *)),
                     .mean = rpi_arena_take(arena, rows, sizeof(real *)),
                     .self = rpi_arena_take(arena, rows, sizeof(real **)),
                     .cross = rpi_arena_take(arena, rows, sizeof(real **))};
}

static arguments arguments_of(const rpi_cache *c) {
  rpi_arena arena = rpi_arena_over(c->arguments.memory, c->arguments.bytes);
  return carve(&arena, c->start.most_rows);
}

static rp_status need_arguments(rpi_cache *c) {
  rpi_arena arena = rpi_arena_counting();
  carve(&arena, c->start.most_rows);
  return rpi_room_need(&c->arguments, arena.used, 1);
}

/* Adds the next token to every list, and says what the model is to meet. */
static rp_status advance(rpi_cache *c, arguments *a) {
  int64_t *const counts = counts_at(c, c->now);
  const int64_t *const source = c->source_offsets.memory;
  real *const attention = c->attention.memory;
  RPI_TRY(lengthen(c));
  RPI_TRY(take_tokens(c, c->rows, a->to));
  for (int64_t r = 0; r < c->rows; r++) {
    const int32_t owner = owners_at(c, c->now)[r];
    a->offsets[r] = r;
    a->places[r] = counts[r];
    list_at(c, c->now, r)[counts[r]++] = a->to[r];
    a->self[r] = (const real *const *)list_at(c, c->now, r);
    a->cross_counts[r] = source[owner + 1] - source[owner];
    if (c->source_rows == 0) continue;
    a->cross[r] = (const real *const *)c->cross_places.memory + source[owner];
    if (c->start.attention) a->mean[r] = attention + r * c->longest_source;
  }
  a->offsets[c->rows] = c->rows;
  return RP_OK;
}

static rp_status step(rpi_cache *c, const int32_t *tokens) {
  arguments a = arguments_of(c);
  RPI_TRY(advance(c, &a));
  const bool attention = c->start.attention && c->source_rows != 0;
  const rpi_kept kept = {.to = a.to,
                         .shift = c->block_rows * c->token,
                         .step = true,
                         .places = a.places,
                         .shapes = c->shapes.memory,
                         .self = a.self,
                         .self_counts = counts_at(c, c->now),
                         .cross = a.cross,
                         .cross_counts = a.cross_counts,
                         .cross_shift = c->source_rows * c->token,
                         .mean = attention ? a.mean : NULL};
  rpi_run run = {.model = c->model, .sentences = c->rows, .kept = &kept};
  run.side[RPI_DECODER] = (rpi_side){.rows = c->rows, .ids = tokens, .offsets = a.offsets};
  RPI_TRY(rpi_stack_forward(&run, RPI_DECODER));
  if (!attention || c->ops->host) return RP_OK;
  return c->ops->read(c->seen.memory, c->attention.memory,
                      c->rows * c->longest_source * (int64_t)sizeof(real));
}

rp_status rpi_cache_step(rpi_cache *c, int64_t rows, const int32_t *parents,
                         const int32_t *tokens) {
  reorder(c, rows, parents);
  return rows == 0 ? RP_OK : step(c, tokens); /* of no sentences nothing was made ready */
}

/* ---- a beginning ----------------------------------------------------------- */

/* Moves a table that was made in the model's scratch, where the next layer's will be, to our own;
 * without `to` it only counts. */
static rp_status move_table(const rp_ops *ops, rp_relation *r, const real *scratch, int64_t count,
                            real *to, int64_t *at) {
  if (!r->table || r->table != scratch) return RP_OK;
  if (to) {
    RPI_TRY(ops->copy(to + *at, scratch, count * (int64_t)sizeof(real)));
    r->table = to + *at;
  }
  *at += count;
  return RP_OK;
}

static rp_status move_tables(const rpi_cache *c, rp_attention *a, real *to, int64_t *count) {
  const rp_ops *const ops = c->ops;
  const rpi_positions *const p = &c->model->stack[RPI_DECODER].positions;
  const int64_t HD = c->model->config.heads * rpi_head_width(&c->model->config);
  *count = 0;
  RPI_TRY(move_table(ops, &a->key[0], p->key, a->key[0].rows * HD, to, count));
  RPI_TRY(move_table(ops, &a->query[0], p->query, a->query[0].rows * HD, to, count));
  return move_table(ops, &a->bias[0], p->bias, a->bias[0].rows * a->H, to, count);
}

/* Every layer's terms, as far as targets will reach. */
static rp_status make_shapes(rpi_cache *c) {
  const int64_t offsets[2] = {0, c->start.most_length};
  rpi_run run = {.model = c->model, .sentences = 1, .stack = RPI_DECODER};
  run.side[RPI_DECODER] = (rpi_side){.rows = offsets[1], .offsets = offsets};
  RPI_TRY(rpi_room_need(&c->shapes, c->layers, sizeof(rp_attention)));
  rp_attention *const shapes = c->shapes.memory;
  for (int64_t l = 0; l < c->layers; l++) {
    RPI_TRY(rpi_attention_of(&run, l, RPI_SELF, &shapes[l]));
    int64_t count = 0;
    RPI_TRY(move_tables(c, &shapes[l], NULL, &count));
    if (l == 0) RPI_TRY(need_numbers(c, &c->tables, c->layers, count));
    if (count == 0) continue; /* then there may be no memory to point into */
    real *const to = (real *)c->tables.memory + l * count;
    RPI_TRY(move_tables(c, &shapes[l], to, &count));
  }
  return RP_OK;
}

static rp_status encode(rpi_cache *c, rpi_run *run) {
  const rpi_side *const source = &run->side[RPI_ENCODER];
  const bool encoder = c->model->stack[RPI_ENCODER].parts != 0;
  c->source_rows = encoder ? source->rows : 0;
  RPI_TRY(rpi_room_need(&c->source_offsets, c->sentences + 1, sizeof(int64_t)));
  int64_t *const offsets = c->source_offsets.memory;
  for (int64_t b = 0; b <= c->sentences; b++) offsets[b] = encoder ? source->offsets[b] : 0;
  c->longest_source = rpi_longest(offsets, c->sentences);
  if (c->start.attention) {
    const int64_t bytes = c->longest_source * (int64_t)sizeof(real);
    RPI_TRY(need_numbers(c, &c->attention, c->start.most_rows, c->longest_source));
    if (!c->ops->host) { /* all of it is read, and nobody writes behind a shorter source */
      const int64_t numbers = c->start.most_rows * c->longest_source;
      RPI_TRY(rpi_room_need(&c->seen, c->start.most_rows, bytes));
      RPI_TRY(c->ops->zero(c->attention.memory, numbers));
    }
  }
  if (c->source_rows == 0) return RP_OK;
  RPI_TRY(need_numbers(c, &c->cross, c->layers * c->source_rows, c->token));
  RPI_TRY(rpi_room_need(&c->cross_places, c->source_rows, sizeof(real *)));
  const real **const places = c->cross_places.memory;
  real *const cross = c->cross.memory;
  for (int64_t r = 0; r < c->source_rows; r++) places[r] = cross + r * c->token;
  RPI_TRY(rpi_stack_forward(run, RPI_ENCODER));
  for (int64_t l = 0; l < c->layers; l++) {
    RPI_TRY(rpi_cross_keys(run, l, cross + l * c->source_rows * c->token));
  }
  return RP_OK;
}

/* What targets begin with: the tokens of each without its last, then the last of all. */
typedef struct beginnings {
  int64_t *offsets; /* [sentences + 1] */
  int32_t *ids;     /* [tokens] */
  real **to;        /* [tokens]: where their keys and values go */
} beginnings;

static beginnings carve_beginnings(rpi_arena *arena, int64_t sentences, int64_t tokens) {
  beginnings all;
  all.offsets = rpi_arena_take(arena, sentences + 1, sizeof *all.offsets);
  all.ids = rpi_arena_take(arena, tokens, sizeof *all.ids);
  all.to = rpi_arena_take(arena, tokens, sizeof *all.to);
  return all;
}

/* Reads all but the last token of every beginning in one pass. */
static rp_status read_ahead(rpi_cache *c, rpi_run *run, const beginnings *all) {
  const rpi_side target = run->side[RPI_DECODER];
  int64_t *const offsets = all->offsets;
  int32_t *const ids = all->ids;
  real **const to = all->to;
  offsets[0] = 0;
  for (int64_t b = 0; b < c->sentences; b++) {
    const int64_t count = target.offsets[b + 1] - target.offsets[b] - 1;
    memcpy(ids + offsets[b], target.ids + target.offsets[b], (size_t)count * sizeof *ids);
    offsets[b + 1] = offsets[b] + count;
  }
  RPI_TRY(take_tokens(c, offsets[c->sentences], to));
  for (int64_t b = 0; b < c->sentences; b++) {
    const int64_t count = offsets[b + 1] - offsets[b];
    memcpy(list_at(c, c->now, b), to + offsets[b], (size_t)count * sizeof *to);
    counts_at(c, c->now)[b] = count;
  }
  const rpi_kept kept = {.to = to,
                         .shift = c->block_rows * c->token,
                         .cross_shift = c->source_rows * c->token,
                         .cross_kv = c->cross.memory};
  rpi_run ahead = *run;
  ahead.kept = &kept;
  ahead.side[RPI_DECODER] =
      (rpi_side){.rows = offsets[c->sentences], .ids = ids, .offsets = offsets};
  RPI_TRY(rpi_model_reserve(&ahead));
  return rpi_stack_forward(&ahead, RPI_DECODER);
}

/* The last tokens of the beginnings, each a row. */
static rp_status read_last(rpi_cache *c, const rpi_side *target, int32_t *ids) {
  for (int64_t b = 0; b < c->sentences; b++) ids[b] = target->ids[target->offsets[b + 1] - 1];
  return step(c, ids);
}

static rp_status read_beginnings(rpi_cache *c, rpi_run *run) {
  const rpi_side *const target = &run->side[RPI_DECODER];
  rpi_arena counting = rpi_arena_counting();
  carve_beginnings(&counting, c->sentences, target->rows);
  void *const memory = rpi_allocate((size_t)counting.used);
  RPI_CHECK(memory, RP_ERROR_MEMORY, "decoder: no memory for %lld bytes of what targets begin with",
            (rpi_wide)counting.used);
  rpi_arena arena = rpi_arena_over(memory, counting.used);
  const beginnings all = carve_beginnings(&arena, c->sentences, target->rows);
  rp_status status = RP_OK;
  if (target->rows > c->sentences) status = read_ahead(c, run, &all);
  if (status == RP_OK) status = read_last(c, target, all.ids);
  rpi_release(memory);
  return status;
}

static rp_status need_rows(rpi_cache *c, const rpi_side *target) {
  const int64_t most = c->start.most_rows;
  c->list_room = rpi_min(rpi_longest(target->offsets, c->sentences) + 64, c->start.most_length);
  for (int i = 0; i < 2; i++) {
    RPI_TRY(rpi_room_need(&c->lists[i], most, c->list_room * (int64_t)sizeof(real *)));
    RPI_TRY(rpi_room_need(&c->counts[i], most, sizeof(int64_t)));
    RPI_TRY(rpi_room_need(&c->owners[i], most, sizeof(int32_t)));
  }
  return need_arguments(c);
}

rp_status rpi_cache_begin(rpi_cache *c, const rpi_run *given, const rpi_cache_start *start) {
  rpi_run run = *given;
  const rpi_side *const target = &run.side[RPI_DECODER];
  RPI_CHECK(start->most_rows <= c->model->limits.tokens, RP_ERROR_SHAPE,
            "decoder: %lld rows a step, at most limits.tokens=%lld are allowed",
            (rpi_wide)start->most_rows, (rpi_wide)c->model->limits.tokens);
  c->start = *start;
  c->sentences = run.sentences;
  c->rows = 0;
  c->used = 0;
  if (run.sentences == 0) return RP_OK;
  RPI_TRY(need_rows(c, target));
  RPI_TRY(rpi_model_reserve(&run));
  RPI_TRY(make_shapes(c));
  RPI_TRY(encode(c, &run));
  c->rows = c->sentences;
  for (int64_t b = 0; b < c->sentences; b++) {
    counts_at(c, c->now)[b] = 0;
    owners_at(c, c->now)[b] = (int32_t)b;
  }
  return read_beginnings(c, &run);
}

/* ---- what came of it ------------------------------------------------------- */

rp_status rpi_cache_logits(rpi_cache *c, int64_t first, int64_t count, real *logits) {
  if (count == 0) return RP_OK;
  rpi_run run = {.model = c->model, .stack = RPI_DECODER, .layer = -1};
  const real *const out = c->model->stack[RPI_DECODER].out;
  return rpi_output_logits(&run, out + first * c->model->config.width, count, logits);
}

int64_t rpi_cache_length(const rpi_cache *c, int64_t row) { return counts_at(c, c->now)[row]; }

const real *rpi_cache_attention(const rpi_cache *c, int64_t row) {
  const rpi_room *const seen = c->ops->host ? &c->attention : &c->seen;
  return (const real *)seen->memory + row * c->longest_source;
}
