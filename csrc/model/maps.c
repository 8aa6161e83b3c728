/* SPDX-License-Identifier: Apache-2.0
 *
 * maps.c: maps and alignments from a pass that stops.
 *
 * One pass over a batch serves all that is asked for. It stops behind every attention, where the
 * queries and keys of that layer lie: those of the next may take their place. What comes behind
 * the last attention that is wanted is not computed.
 */
#include "model/maps.h"

#include <math.h>
#include <string.h>

/* ---- a pass that stops ----------------------------------------------------- */

typedef struct tour tour;
struct tour {
  rpi_run run;
  int64_t last[RPI_KINDS]; /* layers after which nothing of a kind is looked at; -1: nothing is */
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
    RPI_TRY_MEMORY(ops->allocate(bytes, &t->workspace),
                   "model: no memory for %lld bytes that attention maps are made with",
                   (rpi_wide)bytes);
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
  for (int kind = 0; kind < RPI_KINDS; kind++) {
    const int stack = rpi_stack_of_kind(kind);
    const int64_t s = t->last[kind] * m->stack[stack].parts + rpi_part_of_kind(kind);
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

static rp_status draw(tour *t, const rp_attention *a, rp_rows q, rp_rows k,
                      const rp_model_map *map) {
  rpi_attention_map_args args = {.shape = a,
                                 .q = q,
                                 .k = k,
                                 .what = map->show,
                                 .b = map->sentence,
                                 .head = map->head,
                                 .row = map->row,
                                 .rows = rpi_map_rows(&t->run, map),
                                 .to = map->to,
                                 .to_stride = rpi_map_keys(&t->run, map),
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

rp_status rpi_maps(const rpi_run *run, const rp_model_map *maps, int64_t count) {
  const wanted_maps wanted = {maps, count};
  tour t = {.run = *run, .last = {-1, -1, -1}, .look = look_for_maps, .wanted = &wanted};
  for (int64_t i = 0; i < count; i++) {
    if (maps[i].layer > t.last[maps[i].kind]) t.last[maps[i].kind] = maps[i].layer;
  }
  return tour_of(&t);
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

const char *rpi_attention_part(const rp_model *m, int kind, int index, int *show) {
  rp_attention a;
  const rpi_run run = {
      .model = (rp_model *)m, .stack = rpi_stack_of_kind(kind), .shape_only = true};
  if (rpi_attention_of(&run, 0, rpi_part_of_kind(kind), &a) != RP_OK) return NULL;
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
  const rpi_alignments *mean;
  real *one; /* one head's, of the sentence that has most pairs */
} wanted_means;

static int64_t pairs_of(const rpi_run *run, int64_t b) {
  return rpi_tokens_of(run, RPI_DECODER, b) * rpi_tokens_of(run, RPI_ENCODER, b);
}

/* How often a layer is listed. */
static int64_t times_listed(const rpi_alignments *w, int64_t layer, int64_t layers) {
  int64_t times = 0;
  for (int64_t i = 0; i < w->layer_count; i++) {
    times += (w->layers[i] < 0 ? w->layers[i] + layers : w->layers[i]) == layer;
  }
  return times;
}

/* Adds the share of one layer, of every sentence. */
static rp_status look_for_means(tour *t, int64_t s) {
  const wanted_means *const wanted = t->wanted;
  const rpi_alignments *const w = wanted->mean;
  const rp_model *const m = t->run.model;
  if (kind_of(t, s) != RP_ATTENTION_CROSS) return RP_OK;
  const int64_t times = times_listed(w, t->run.layer, m->config.decoder.layers);
  if (times == 0) return RP_OK;
  rp_attention a;
  rpi_attention_map_args args = {
      .shape = &a, .what = RP_SHOW_PROBABILITIES, .b = -1, .workers = t->run.workers};
  RPI_TRY(rpi_stored_heads(&t->run, s, &a, &args.q, &args.k));
  RPI_TRY(lend(t, &args));
  args.to = wanted->one;
  const real share = (real)times / (real)(w->layer_count * w->head_count);
  real *to = w->weights;
  for (args.b = 0; args.b < t->run.sentences; args.b++) {
    const int64_t pairs = pairs_of(&t->run, args.b);
    if (pairs == 0) continue;
    args.rows = rpi_tokens_of(&t->run, RPI_DECODER, args.b);
    args.to_stride = rpi_tokens_of(&t->run, RPI_ENCODER, args.b);
    for (int64_t h = 0; h < w->head_count; h++) {
      args.head = w->heads ? w->heads[h] : h;
      RPI_TRY(m->ops->attention_map(&args, NULL));
      for (int64_t i = 0; i < pairs; i++) to[i] += share * wanted->one[i];
    }
    to += pairs;
  }
  return RP_OK;
}

int64_t rpi_alignment_count(const rpi_run *run) {
  int64_t all = 0;
  for (int64_t b = 0; b < run->sentences; b++) all += pairs_of(run, b);
  return all;
}

rp_status rpi_align(const rpi_run *run, const rpi_alignments *mean) {
  const int64_t layers = run->model->config.decoder.layers;
  wanted_means wanted = {.mean = mean};
  tour t = {.run = *run, .last = {-1, -1, -1}, .look = look_for_means, .wanted = &wanted};
  int64_t most = 0;
  for (int64_t b = 0; b < run->sentences; b++) {
    if (pairs_of(run, b) > most) most = pairs_of(run, b);
  }
  memset(mean->weights, 0, (size_t)rpi_alignment_count(run) * sizeof *mean->weights);
  for (int64_t l = 0; l < layers; l++) {
    if (times_listed(mean, l, layers) != 0) t.last[RP_ATTENTION_CROSS] = l;
  }
  wanted.one = rpi_allocate((size_t)most * sizeof *wanted.one);
  RPI_CHECK(wanted.one, RP_ERROR_MEMORY, "model: no memory for a map of %lld numbers",
            (rpi_wide)most);
  const rp_status status = tour_of(&t);
  rpi_release(wanted.one);
  return status;
}

/* ---- what a map of probabilities comes to ----------------------------------- */

/* Sums are in double, in the order of the queries: rows that come in several calls give the bits of
 * one call. */
void rpi_map_sums(const real *p, int64_t queries, int64_t keys, int64_t row, int64_t rows,
                  double *mass, double *entropy, double *distance) {
  const double share = 1 / (double)(queries > 0 ? queries : 1);
  for (int64_t i = 0; i < rows; i++) {
    const real *const of_row = keys > 0 ? p + i * keys : NULL; /* p may be NULL, without keys */
    const int64_t query = row + i;
    double looks = 0, apart = 0;
    for (int64_t j = 0; j < keys; j++) {
      const double own = (double)of_row[j];
      if (mass) mass[queries - 1 + j - query] += share * own;
      if (entropy && !(own <= 0)) looks -= own * log(own); /* NaN stays */
      if (distance) apart += own * (double)(j < query ? query - j : j - query);
    }
    if (entropy) entropy[i] = looks;
    if (distance) *distance += share * apart;
  }
}
