/* SPDX-License-Identifier: Apache-2.0
 *
 * api_maps.c: the public functions that show a model's attention: they check, lock, and call
 * inward.
 */
#include <stdio.h>

#include "api_attention.h"
#include "api_model.h"
#include "base/memory.h"
#include "base/threads.h"
#include "model/maps.h"
#include "relpos/decode.h"
#include "train/step.h"

/* ---- maps ------------------------------------------------------------------ */

/* Where it is: what does not depend on the batch. `name` stands before the fields. */
static rp_status check_place(const rp_model *m, const char *name, const rp_model_map *map) {
  RPI_CHECK(map->kind >= RP_ATTENTION_ENCODER && map->kind <= RP_ATTENTION_CROSS, RP_ERROR_ARGUMENT,
            "model: %skind=%d, must be RP_ATTENTION_ENCODER=0, RP_ATTENTION_DECODER=1 or "
            "RP_ATTENTION_CROSS=2",
            name, map->kind);
  RPI_CHECK(rpi_has_kind(m, map->kind), RP_ERROR_ARGUMENT, "model: %skind=%d, but it has no %s",
            name, map->kind,
            map->kind == RP_ATTENTION_ENCODER   ? "encoder"
            : map->kind == RP_ATTENTION_DECODER ? "decoder"
                                                : "attention from a decoder to an encoder");
  const int64_t layers = rpi_stack_of(&m->config, rpi_stack_of_kind(map->kind))->layers;
  RPI_CHECK(map->layer >= 0 && map->layer < layers, RP_ERROR_ARGUMENT,
            "model: %slayer=%lld, must be from 0 to %lld", name, (rpi_wide)map->layer,
            (rpi_wide)layers - 1);
  RPI_CHECK(map->head >= 0 && map->head < m->config.heads, RP_ERROR_ARGUMENT,
            "model: %shead=%lld, must be from 0 to %lld", name, (rpi_wide)map->head,
            (rpi_wide)m->config.heads - 1);
  RPI_CHECK(rpi_is_show(map->show), RP_ERROR_ARGUMENT, "model: %sshow=%d, must be " RPI_SHOWS, name,
            map->show);
  return RP_OK;
}

static rp_status check_map(const rpi_run *run, const char *name, const rp_model_map *map) {
  RPI_TRY(check_place(run->model, name, map));
  RPI_CHECK(map->sentence >= 0 && map->sentence < run->sentences, RP_ERROR_ARGUMENT,
            "model: %ssentence=%lld, must be below the batch's %lld sentences and not negative",
            name, (rpi_wide)map->sentence, (rpi_wide)run->sentences);
  const int64_t queries = rpi_map_queries(run, map);
  RPI_CHECK(
      map->row >= 0 && map->row <= queries && map->rows >= -1 && map->rows <= queries - map->row,
      RP_ERROR_SHAPE, "model: %srows=%lld from row=%lld, but the sentence has %lld queries", name,
      (rpi_wide)map->rows, (rpi_wide)map->row, (rpi_wide)queries);
  const bool empty = rpi_map_rows(run, map) == 0 || rpi_map_keys(run, map) == 0;
  RPI_CHECK(map->to || empty, RP_ERROR_ARGUMENT, "model: %sto is NULL", name);
  return RP_OK;
}

/* `listed`: maps are called by their number in errors. */
static rp_status show(rp_model *m, const rp_batch *batch, int dropout, const rp_model_map *maps,
                      int64_t count, bool listed) {
  rpi_run run;
  RPI_CHECK(count >= 0, RP_ERROR_ARGUMENT, "model: count=%lld maps, must not be negative",
            (rpi_wide)count);
  RPI_CHECK(maps || count == 0, RP_ERROR_ARGUMENT, "model: maps is NULL");
  RPI_TRY(rpi_check_batch(m, batch, false, &run));
  for (int64_t i = 0; i < count; i++) {
    char name[32] = "";
    if (listed) snprintf(name, sizeof name, "maps[%lld].", (rpi_wide)i);
    RPI_CHECK(maps[i].struct_size == sizeof maps[i], RP_ERROR_ARGUMENT,
              "model: %sstruct_size=%zu, must be %zu: start from rp_model_map_default()", name,
              maps[i].struct_size, sizeof maps[i]);
    RPI_TRY(check_map(&run, name, &maps[i]));
  }
  rpi_set_ordinals(batch, m->sentences, &run);
  rpi_step_key(m, &run);
  run.dropout = dropout != 0;
  return rpi_maps(&run, maps, count);
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
  int64_t numbers;
  RPI_CHECK(queries >= 0 && keys >= 0, RP_ERROR_SHAPE,
            "map: queries=%lld, keys=%lld, must not be negative", (rpi_wide)queries,
            (rpi_wide)keys);
  RPI_CHECK(rpi_multiply(queries, keys, &numbers) && numbers <= INT64_MAX / (int64_t)sizeof *p &&
                queries <= RPI_LIMIT && keys <= RPI_LIMIT,
            RP_ERROR_SHAPE, "map: queries=%lld, keys=%lld, are too many", (rpi_wide)queries,
            (rpi_wide)keys);
  RPI_CHECK(row >= 0 && row <= queries && rows >= 0 && rows <= queries - row, RP_ERROR_SHAPE,
            "map: rows=%lld from row=%lld, but there are %lld queries", (rpi_wide)rows,
            (rpi_wide)row, (rpi_wide)queries);
  RPI_CHECK(p || rows == 0 || keys == 0, RP_ERROR_ARGUMENT, "map: p is NULL");
  const rpi_float_state caller = rpi_float_enter(false);
  rpi_map_sums(p, queries, keys, row, rows, mass, entropy, distance);
  rpi_float_leave(caller);
  return RP_OK;
}

/* ---- what logits consist of ------------------------------------------------ */

const char *rp_model_attention_part(const rp_model *m, int kind, int index, int *show) {
  if (!m || kind < 0 || kind >= RPI_KINDS || index < 0 || !rpi_has_kind(m, kind)) return NULL;
  return rpi_attention_part(m, kind, index, show);
}

/* ---- alignments ------------------------------------------------------------ */

static rp_status check_means(const rp_model *m, const rpi_alignments *w) {
  const int64_t layers = m->config.decoder.layers, heads = m->config.heads;
  RPI_CHECK(rpi_has_kind(m, RP_ATTENTION_CROSS), RP_ERROR_ARGUMENT,
            "model: it has no attention from a decoder to an encoder, and so no alignments");
  RPI_CHECK(w->layers && w->layer_count >= 1, RP_ERROR_ARGUMENT,
            "model: layers is %s, layer_count=%lld, must be at least one",
            w->layers ? "there" : "NULL", (rpi_wide)w->layer_count);
  for (int64_t i = 0; i < w->layer_count; i++) {
    RPI_CHECK(w->layers[i] >= -layers && w->layers[i] < layers, RP_ERROR_ARGUMENT,
              "model: layers[%lld]=%lld, must be from %lld to %lld", (rpi_wide)i,
              (rpi_wide)w->layers[i], (rpi_wide)-layers, (rpi_wide)layers - 1);
  }
  RPI_CHECK(w->head_count >= 1, RP_ERROR_ARGUMENT, "model: head_count=%lld, must be at least 1",
            (rpi_wide)w->head_count);
  for (int64_t i = 0; w->heads && i < w->head_count; i++) {
    RPI_CHECK(w->heads[i] >= 0 && w->heads[i] < heads, RP_ERROR_ARGUMENT,
              "model: heads[%lld]=%lld, must be from 0 to %lld", (rpi_wide)i, (rpi_wide)w->heads[i],
              (rpi_wide)heads - 1);
  }
  return RP_OK;
}

static rp_status align(rp_model *m, const rp_batch *batch, rpi_alignments *w) {
  rpi_run run;
  if (!w->heads) w->head_count = m->config.heads;
  RPI_TRY(check_means(m, w));
  RPI_TRY(rpi_check_batch(m, batch, false, &run));
  rpi_set_ordinals(batch, 0, &run);
  if (rpi_alignment_count(&run) == 0) return RP_OK;
  RPI_CHECK(w->weights, RP_ERROR_ARGUMENT, "model: weights is NULL");
  return rpi_align(&run, w);
}

rp_status rp_model_alignments(rp_model *m, const rp_batch *batch, const int64_t *layers,
                              int64_t layer_count, const int64_t *heads, int64_t head_count,
                              rp_real *weights) {
  rpi_alignments wanted = {.layers = layers,
                           .heads = heads,
                           .layer_count = layer_count,
                           .head_count = head_count,
                           .weights = weights};
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, align(m, batch, &wanted));
}
