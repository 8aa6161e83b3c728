/* SPDX-License-Identifier: Apache-2.0
 *
 * api_maps.c: the attention of a model, shown: maps and alignments.
 *
 * One pass over a batch serves all that is asked for. It stops behind every attention, where the
 * queries and keys of that layer lie: those of the next may take their place. What comes behind
 * the last attention that is wanted is not computed.
 */
#include <stdio.h>
#include <string.h>

#include "api_model.h"
#include "relpos/decode.h"
#include "train/step.h"

enum { KINDS = 3 }; /* of attention */

static int stack_of(int kind) { return kind == RP_ATTENTION_ENCODER ? RPI_ENCODER : RPI_DECODER; }
static int part_of(int kind) { return kind == RP_ATTENTION_CROSS ? RPI_CROSS : RPI_SELF; }

static bool has_attention(const rp_model *m, int kind) {
  const int stack = stack_of(kind);
  return part_of(kind) == RPI_CROSS ? rpi_has_cross(m, stack) : m->stack[stack].parts != 0;
}

/* ---- a pass that stops ----------------------------------------------------- */

typedef struct tour tour;
struct tour {
  rpi_run run;
  int64_t last[KINDS]; /* the layer after which nothing of a kind is looked at; -1: nothing is */
  rp_status (*look)(tour *t, int64_t s); /* behind sublayer s of the stack that run is in */
  const void *wanted;
  void *workspace; /* of attention_map */
  int64_t workspace_bytes;
};

static int kind_of(const tour *t, int64_t s) {
  if (t->run.stack == RPI_ENCODER) return RP_ATTENTION_ENCODER;
  const int parts = t->run.model->stack[RPI_DECODER].parts;
  return rpi_part_of(parts, s) == RPI_CROSS ? RP_ATTENTION_CROSS : RP_ATTENTION_DECODER;
}

/* Gives a map that is about to be made what it works with. */
static rp_status lend(tour *t, rpi_attention_map_args *args) {
  int64_t bytes = 0;
  RPI_TRY(t->run.model->ops->attention_map(args, &bytes));
  if (bytes > t->workspace_bytes) {
    const rp_ops *const ops = t->run.model->ops;
    ops->release(t->workspace);
    t->workspace = NULL;
    t->workspace_bytes = 0;
    RPI_CHECK(ops->allocate(bytes, &t->workspace) == RP_OK, RP_ERROR_MEMORY,
              "model: no memory for %lld bytes that attention maps are made with", (wide)bytes);
    t->workspace_bytes = bytes;
  }
  args->workspace = t->workspace;
  args->workspace_bytes = t->workspace_bytes;
  return RP_OK;
}

/* Sublayers up to `last`; what follows of it only where the stack goes on. */
static rp_status tour_stack(tour *t, int stack, int64_t last, bool goes_on) {
  const int parts = t->run.model->stack[stack].parts;
  RPI_TRY(rpi_stack_enter(&t->run, stack));
  for (int64_t s = 0; s <= last; s++) {
    RPI_TRY(rpi_sublayer_forward(&t->run, s, goes_on || s < last));
    if (rpi_part_of(parts, s) != RPI_FEED_FORWARD) RPI_TRY(t->look(t, s));
  }
  return RP_OK;
}

static rp_status make_tour(tour *t) {
  const rp_model *const m = t->run.model;
  int64_t last[RPI_STACKS] = {-1, -1}; /* sublayers */
  for (int kind = 0; kind < KINDS; kind++) {
    const int stack = stack_of(kind);
    const int64_t s = t->last[kind] * m->stack[stack].parts + part_of(kind);
    if (t->last[kind] >= 0 && s > last[stack]) last[stack] = s;
  }
  RPI_TRY(rpi_model_reserve(&t->run));
  const bool reads_source = rpi_has_cross(m, RPI_DECODER) && last[RPI_DECODER] >= RPI_CROSS;
  if (reads_source) {
    last[RPI_ENCODER] = m->config.encoder.layers * m->stack[RPI_ENCODER].parts - 1;
  }
  if (last[RPI_ENCODER] >= 0) {
    RPI_TRY(tour_stack(t, RPI_ENCODER, last[RPI_ENCODER], reads_source));
  }
  if (reads_source) RPI_TRY(rpi_stack_leave(&t->run));
  return last[RPI_DECODER] < 0 ? RP_OK : tour_stack(t, RPI_DECODER, last[RPI_DECODER], false);
}

static rp_status tour_of(tour *t) {
  const rp_status status = make_tour(t);
  t->run.model->ops->release(t->workspace);
  return status;
}

/* ---- maps ------------------------------------------------------------------ */

typedef struct wanted_maps {
  const rp_model_map *maps;
  int64_t count;
} wanted_maps;

/* Where the queries and the keys of a kind begin, sentence by sentence. */
static const int64_t *queries_of(const rpi_run *run, int kind) {
  return run->side[stack_of(kind)].offsets;
}
static const int64_t *keys_of(const rpi_run *run, int kind) {
  return run->side[kind == RP_ATTENTION_DECODER ? RPI_DECODER : RPI_ENCODER].offsets;
}
static int64_t count_of(const int64_t *offsets, int64_t sentence) {
  return offsets[sentence + 1] - offsets[sentence];
}

static int64_t rows_of(const rpi_run *run, const rp_model_map *map) {
  if (map->rows >= 0) return map->rows;
  return count_of(queries_of(run, map->kind), map->sentence) - map->row;
}

/* Where it is: what does not depend on the batch. `name` stands before the fields. */
static rp_status check_place(const rp_model *m, const char *name, const rp_model_map *map) {
  RPI_CHECK(map->kind >= RP_ATTENTION_ENCODER && map->kind <= RP_ATTENTION_CROSS, RP_ERROR_ARGUMENT,
            "model: %skind=%d, must be RP_ATTENTION_ENCODER=0, RP_ATTENTION_DECODER=1 or "
            "RP_ATTENTION_CROSS=2",
            name, map->kind);
  RPI_CHECK(has_attention(m, map->kind), RP_ERROR_ARGUMENT, "model: %skind=%d, but it has no %s",
            name, map->kind,
            map->kind == RP_ATTENTION_ENCODER   ? "encoder"
            : map->kind == RP_ATTENTION_DECODER ? "decoder"
                                                : "attention from a decoder to an encoder");
  const int64_t layers = rpi_stack_of(&m->config, stack_of(map->kind))->layers;
  RPI_CHECK(map->layer >= 0 && map->layer < layers, RP_ERROR_ARGUMENT,
            "model: %slayer=%lld, must be from 0 to %lld", name, (wide)map->layer,
            (wide)layers - 1);
  RPI_CHECK(map->head >= 0 && map->head < m->config.heads, RP_ERROR_ARGUMENT,
            "model: %shead=%lld, must be from 0 to %lld", name, (wide)map->head,
            (wide)m->config.heads - 1);
  RPI_CHECK(rpi_is_show(map->show), RP_ERROR_ARGUMENT,
            "model: %sshow=%d, must be one of RP_SHOW_...", name, map->show);
  return RP_OK;
}

static rp_status check_map(const rpi_run *run, const char *name, const rp_model_map *map) {
  RPI_TRY(check_place(run->model, name, map));
  RPI_CHECK(map->sentence >= 0 && map->sentence < run->sentences, RP_ERROR_ARGUMENT,
            "model: %ssentence=%lld, must be below the batch's %lld sentences and not negative",
            name, (wide)map->sentence, (wide)run->sentences);
  const int64_t queries = count_of(queries_of(run, map->kind), map->sentence);
  RPI_CHECK(
      map->row >= 0 && map->row <= queries && map->rows >= -1 && map->rows <= queries - map->row,
      RP_ERROR_SHAPE, "model: %srows=%lld from row=%lld, but the sentence has %lld queries", name,
      (wide)map->rows, (wide)map->row, (wide)queries);
  const bool empty =
      rows_of(run, map) == 0 || count_of(keys_of(run, map->kind), map->sentence) == 0;
  RPI_CHECK(map->to || empty, RP_ERROR_ARGUMENT, "model: %sto is NULL", name);
  return RP_OK;
}

static rp_status draw(tour *t, const rp_attention *a, rp_rows q, rp_rows k,
                      const rp_model_map *map) {
  rpi_attention_map_args args = {.shape = a,
                                 .q = q,
                                 .k = k,
                                 .what = map->show,
                                 .b = map->sentence,
                                 .head = map->head,
                                 .row = map->row,
                                 .rows = rows_of(&t->run, map),
                                 .to = map->to,
                                 .to_stride = count_of(keys_of(&t->run, map->kind), map->sentence),
                                 .workers = t->run.workers};
  if (args.rows == 0 || args.to_stride == 0) return RP_OK;
  RPI_TRY(lend(t, &args));
  return t->run.model->ops->attention_map(&args, NULL);
}

static rp_status look_for_maps(tour *t, int64_t s) {
  const wanted_maps *const wanted = t->wanted;
  const int kind = kind_of(t, s);
  rp_attention a;
  rp_rows q, k;
  bool known = false;
  for (int64_t i = 0; i < wanted->count; i++) {
    const rp_model_map *const map = &wanted->maps[i];
    if (map->kind != kind || map->layer != t->run.layer) continue;
    if (!known) RPI_TRY(rpi_stored_heads(&t->run, s, &a, &q, &k));
    known = true;
    RPI_TRY(draw(t, &a, q, k, map));
  }
  return RP_OK;
}

/* `listed`: maps are called by their number in errors. */
static rp_status show(rp_model *m, const rp_batch *batch, int dropout, const rp_model_map *maps,
                      int64_t count, bool listed) {
  const wanted_maps wanted = {maps, count};
  tour t = {.last = {-1, -1, -1}, .look = look_for_maps, .wanted = &wanted};
  RPI_CHECK(count >= 0, RP_ERROR_ARGUMENT, "model: count=%lld maps, must not be negative",
            (wide)count);
  RPI_CHECK(maps || count == 0, RP_ERROR_ARGUMENT, "model: maps is NULL");
  RPI_TRY(rpi_check_batch(m, batch, false, &t.run));
  for (int64_t i = 0; i < count; i++) {
    char name[32] = "";
    if (listed) snprintf(name, sizeof name, "maps[%lld].", (wide)i);
    RPI_CHECK(maps[i].struct_size == sizeof maps[i], RP_ERROR_ARGUMENT,
              "model: %sstruct_size=%zu, must be %zu: start from rp_model_map_default()", name,
              maps[i].struct_size, sizeof maps[i]);
    RPI_TRY(check_map(&t.run, name, &maps[i]));
    if (maps[i].layer > t.last[maps[i].kind]) t.last[maps[i].kind] = maps[i].layer;
  }
  rpi_set_ordinals(batch, m->sentences, &t.run);
  rpi_step_key(m, &t.run);
  t.run.dropout = dropout != 0;
  return tour_of(&t);
}

rp_status rp_model_attention_maps(rp_model *m, const rp_batch *batch, int dropout,
                                  const rp_model_map *maps, int64_t count) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, show(m, batch, dropout, maps, count, true));
}

rp_status rp_model_attention_map(rp_model *m, const rp_batch *batch, int kind, int64_t layer,
                                 int64_t head, int64_t sentence, int what, rp_real *to) {
  rp_model_map map = rp_model_map_default();
  map.kind = kind;
  map.layer = layer;
  map.head = head;
  map.sentence = sentence;
  map.show = what;
  map.to = to;
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, show(m, batch, 0, &map, 1, false));
}

rp_status rp_map_sums(const rp_real *p, int64_t queries, int64_t keys, int64_t row, int64_t rows,
                      double *mass, double *entropy, double *distance) {
  RPI_CHECK(queries >= 0 && keys >= 0, RP_ERROR_SHAPE,
            "map: queries=%lld, keys=%lld, must not be negative", (wide)queries, (wide)keys);
  RPI_CHECK(row >= 0 && row <= queries && rows >= 0 && rows <= queries - row, RP_ERROR_SHAPE,
            "map: rows=%lld from row=%lld, but there are %lld queries", (wide)rows, (wide)row,
            (wide)queries);
  RPI_CHECK(p || rows == 0 || keys == 0, RP_ERROR_ARGUMENT, "map: p is NULL");
  rpi_map_sums(p, queries, keys, row, rows, mass, entropy, distance);
  return RP_OK;
}

/* ---- what logits consist of ------------------------------------------------ */

/* Terms are called as the parameters are that their tables come from; where one parameter is the
 * table of two terms, the kind of term is added. */
static const char *name_of(const rp_stack *stack, int show, const rp_relation *term) {
  if (term->map == RP_MAP_LABEL) return "relation_key_table";
  switch (stack->position) {
    case RP_POSITION_TRANSFORMER_XL:
      return show == RP_SHOW_KEY ? "position_weight" : "content_bias";
    case RP_POSITION_DEBERTA: return show == RP_SHOW_KEY ? "key_table" : "query_table";
    case RP_POSITION_RELATIVE_KEY: return "distance_table";
    case RP_POSITION_RELATIVE_KEY_QUERY:
      return show == RP_SHOW_KEY ? "distance_table_key" : "distance_table_query";
    case RP_POSITION_T5: return "bias_table";
    case RP_POSITION_ALIBI:
    case RP_POSITION_ALIBI_LEARNED: return "slopes";
    default: return "key_table"; /* shaw, music */
  }
}

const char *rp_model_attention_part(const rp_model *m, int kind, int index, int *show) {
  if (!m || kind < 0 || kind >= KINDS || index < 0 || !has_attention(m, kind)) return NULL;
  rp_attention a;
  const rpi_run run = {.model = (rp_model *)m, .stack = stack_of(kind), .shape_only = true};
  if (rpi_attention_of(&run, 0, part_of(kind), &a) != RP_OK) return NULL;
  if (index == 0) {
    if (show) *show = RP_SHOW_CONTENT;
    return "content";
  }
  const struct {
    int show;
    const rp_relation *terms;
  } kinds[] = {{RP_SHOW_KEY, a.key}, {RP_SHOW_QUERY, a.query}, {RP_SHOW_BIAS, a.bias}};
  for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
    for (int t = 0; t < RP_TERMS; t++) {
      if (!kinds[i].terms[t].table || --index != 0) continue;
      if (show) *show = kinds[i].show + t;
      return name_of(rpi_stack_of(&m->config, run.stack), kinds[i].show, &kinds[i].terms[t]);
    }
  }
  return NULL;
}

/* ---- alignments ------------------------------------------------------------ */

typedef struct wanted_means {
  const int64_t *layers, *heads; /* NULL: all heads; layers may be negative */
  int64_t layer_count, head_count;
  real *weights;
  real *one; /* one head's, of the sentence that has most pairs */
} wanted_means;

static int64_t pairs_of(const rpi_run *run, int64_t b) {
  return count_of(run->side[RPI_DECODER].offsets, b) * count_of(run->side[RPI_ENCODER].offsets, b);
}

/* How often a layer is listed. */
static int64_t times_listed(const wanted_means *w, int64_t layer, int64_t layers) {
  int64_t times = 0;
  for (int64_t i = 0; i < w->layer_count; i++) {
    times += (w->layers[i] < 0 ? w->layers[i] + layers : w->layers[i]) == layer;
  }
  return times;
}

/* Adds the share of one layer, of every sentence. */
static rp_status look_for_means(tour *t, int64_t s) {
  const wanted_means *const w = t->wanted;
  const rp_model *const m = t->run.model;
  if (kind_of(t, s) != RP_ATTENTION_CROSS) return RP_OK;
  const int64_t times = times_listed(w, t->run.layer, m->config.decoder.layers);
  if (times == 0) return RP_OK;
  rp_attention a;
  rpi_attention_map_args args = {
      .shape = &a, .what = RP_SHOW_PROBABILITIES, .workers = t->run.workers};
  RPI_TRY(rpi_stored_heads(&t->run, s, &a, &args.q, &args.k));
  RPI_TRY(lend(t, &args));
  args.to = w->one;
  const real share = (real)times / (real)(w->layer_count * w->head_count);
  real *to = w->weights;
  for (args.b = 0; args.b < t->run.sentences; args.b++) {
    const int64_t pairs = pairs_of(&t->run, args.b);
    if (pairs == 0) continue;
    args.rows = count_of(t->run.side[RPI_DECODER].offsets, args.b);
    args.to_stride = count_of(t->run.side[RPI_ENCODER].offsets, args.b);
    for (int64_t h = 0; h < w->head_count; h++) {
      args.head = w->heads ? w->heads[h] : h;
      RPI_TRY(m->ops->attention_map(&args, NULL));
      for (int64_t i = 0; i < pairs; i++) to[i] += share * w->one[i];
    }
    to += pairs;
  }
  return RP_OK;
}

static rp_status check_means(const rp_model *m, const wanted_means *w) {
  const int64_t layers = m->config.decoder.layers, heads = m->config.heads;
  RPI_CHECK(has_attention(m, RP_ATTENTION_CROSS), RP_ERROR_ARGUMENT,
            "model: it has no attention from a decoder to an encoder, and so no alignments");
  RPI_CHECK(w->layers && w->layer_count >= 1, RP_ERROR_ARGUMENT,
            "model: layers is %s, layer_count=%lld, must be at least one",
            w->layers ? "there" : "NULL", (wide)w->layer_count);
  for (int64_t i = 0; i < w->layer_count; i++) {
    RPI_CHECK(w->layers[i] >= -layers && w->layers[i] < layers, RP_ERROR_ARGUMENT,
              "model: layers[%lld]=%lld, must be from %lld to %lld", (wide)i, (wide)w->layers[i],
              (wide)-layers, (wide)layers - 1);
  }
  RPI_CHECK(w->head_count >= 1, RP_ERROR_ARGUMENT, "model: head_count=%lld, must be at least 1",
            (wide)w->head_count);
  for (int64_t i = 0; w->heads && i < w->head_count; i++) {
    RPI_CHECK(w->heads[i] >= 0 && w->heads[i] < heads, RP_ERROR_ARGUMENT,
              "model: heads[%lld]=%lld, must be from 0 to %lld", (wide)i, (wide)w->heads[i],
              (wide)heads - 1);
  }
  return RP_OK;
}

static rp_status align(rp_model *m, const rp_batch *batch, wanted_means *w) {
  tour t = {.last = {-1, -1, -1}, .look = look_for_means, .wanted = w};
  if (!w->heads) w->head_count = m->config.heads;
  RPI_TRY(check_means(m, w));
  RPI_TRY(rpi_check_batch(m, batch, false, &t.run));
  rpi_set_ordinals(batch, 0, &t.run);
  int64_t all = 0, most = 0;
  for (int64_t b = 0; b < t.run.sentences; b++) {
    const int64_t pairs = pairs_of(&t.run, b);
    all += pairs;
    most = pairs > most ? pairs : most;
  }
  if (all == 0) return RP_OK;
  RPI_CHECK(w->weights, RP_ERROR_ARGUMENT, "model: weights is NULL");
  memset(w->weights, 0, (size_t)all * sizeof *w->weights);
  for (int64_t l = 0; l < m->config.decoder.layers; l++) {
    if (times_listed(w, l, m->config.decoder.layers) != 0) t.last[RP_ATTENTION_CROSS] = l;
  }
  w->one = rpi_allocate((size_t)most * sizeof *w->one);
  RPI_CHECK(w->one, RP_ERROR_MEMORY, "model: no memory for a map of %lld numbers", (wide)most);
  const rp_status status = tour_of(&t);
  rpi_release(w->one);
  return status;
}

rp_status rp_model_alignments(rp_model *m, const rp_batch *batch, const int64_t *layers,
                              int64_t layer_count, const int64_t *heads, int64_t head_count,
                              rp_real *weights) {
  wanted_means wanted = {.layers = layers,
                         .heads = heads,
                         .layer_count = layer_count,
                         .head_count = head_count,
                         .weights = weights};
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, align(m, batch, &wanted));
}
