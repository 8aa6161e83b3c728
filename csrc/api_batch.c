/* SPDX-License-Identifier: Apache-2.0
 *
 * api_batch.c: the checks of a batch, for models and decoders.
 */
#include <stdio.h>

#include "api_model.h"

/* `name` is that of the side. */
static rp_status check_offsets(const rp_model *m, const char *name, const int64_t *offsets,
                               int64_t sentences) {
  char of_side[24];
  snprintf(of_side, sizeof of_side, "%s_offsets", name);
  RPI_CHECK(offsets, RP_ERROR_ARGUMENT, "batch: %s is NULL", of_side);
  RPI_TRY(rpi_check_offsets("batch", of_side, offsets, sentences));
  for (int64_t b = 0; b < sentences; b++) {
    const int64_t to = offsets[b + 1], count = to - offsets[b];
    RPI_CHECK(count <= m->config.max_length, RP_ERROR_SHAPE,
              "batch: %s sentence %lld has %lld tokens, at most max_length=%lld are allowed", name,
              (rpi_wide)b, (rpi_wide)count, (rpi_wide)m->config.max_length);
    RPI_CHECK(to <= m->limits.tokens, RP_ERROR_SHAPE,
              "batch: more than limits.tokens=%lld %s tokens, %lld with sentence %lld",
              (rpi_wide)m->limits.tokens, name, (rpi_wide)to, (rpi_wide)b);
  }
  return RP_OK;
}

static rp_status check_ids(const char *name, const int32_t *ids, const int64_t *offsets,
                           int64_t sentences, int64_t least, int64_t vocabulary) {
  RPI_CHECK(ids || offsets[sentences] == 0, RP_ERROR_ARGUMENT, "batch: %s is NULL", name);
  for (int64_t b = 0; b < sentences; b++) {
    for (int64_t i = offsets[b]; i < offsets[b + 1]; i++) {
      RPI_CHECK(ids[i] >= least && ids[i] < vocabulary, RP_ERROR_ARGUMENT,
                "batch: %s[%lld]=%d (token %lld of sentence %lld), must be from %lld to %lld", name,
                (rpi_wide)i, ids[i], (rpi_wide)(i - offsets[b]), (rpi_wide)b, (rpi_wide)least,
                (rpi_wide)vocabulary - 1);
    }
  }
  return RP_OK;
}

static rp_status check_graphs(const char *name, const rp_stack *stack, const rp_graphs *graphs,
                              const int64_t *offsets, int64_t sentences) {
  RPI_CHECK(!graphs->labels || stack->relations != 0, RP_ERROR_ARGUMENT,
            "batch: %s_graphs are given, but the model has relations=0 there", name);
  if (stack->relations == 0 || offsets[sentences] == 0) return RP_OK;
  RPI_CHECK(graphs->labels && graphs->starts, RP_ERROR_ARGUMENT,
            "batch: %s_graphs.%s is NULL; the model has relations=%lld there", name,
            graphs->labels ? "starts" : "labels", (rpi_wide)stack->relations);
  const int bytes = graphs->label_bytes;
  RPI_CHECK(bytes == 1 || bytes == 2 || bytes == 4, RP_ERROR_ARGUMENT,
            "batch: %s_graphs.label_bytes=%d, must be 1, 2 or 4", name, bytes);
  RPI_CHECK((uintptr_t)graphs->labels % (unsigned)bytes == 0, RP_ERROR_ARGUMENT,
            "batch: %s_graphs.labels=%p, must be aligned to label_bytes=%d", name, graphs->labels,
            bytes);
  for (int64_t b = 0; b < sentences; b++) {
    const int64_t n = offsets[b + 1] - offsets[b], start = graphs->starts[b];
    RPI_CHECK(start >= 0 && start <= RPI_LIMIT, RP_ERROR_SHAPE,
              "batch: %s_graphs.starts[%lld]=%lld, must be from 0 to 2^40", name, (rpi_wide)b,
              (rpi_wide)start);
    for (int64_t at = 0; at < n * n; at++) {
      const int64_t label = rpi_label_at(graphs->labels, bytes, start + at);
      RPI_CHECK(label >= -1 && label < stack->relations, RP_ERROR_ARGUMENT,
                "batch: %s_graphs has label %lld at (%lld, %lld) of sentence %lld, must be from -1 "
                "to %lld",
                name, (rpi_wide)label, (rpi_wide)(at / n), (rpi_wide)(at % n), (rpi_wide)b,
                (rpi_wide)stack->relations - 1);
    }
  }
  return RP_OK;
}

/* One side, or nothing where the model has no such stack. */
static rp_status check_side(const rp_model *m, int stack, const rp_batch *batch, rpi_side *side) {
  const bool encoder = stack == RPI_ENCODER;
  const char *const name = encoder ? "source" : "target";
  const rp_config *const config = &m->config;
  const int32_t *const ids = encoder ? batch->source : batch->target;
  const int64_t *const offsets = encoder ? batch->source_offsets : batch->target_offsets;
  const rp_graphs *const graphs = encoder ? &batch->source_graphs : &batch->target_graphs;
  *side = (rpi_side){.rows = 0};
  if (m->stack[stack].parts == 0) {
    RPI_CHECK(!ids && !offsets && !graphs->labels, RP_ERROR_ARGUMENT,
              "batch: %s is given, but the model has no %s", name, encoder ? "encoder" : "decoder");
    return RP_OK;
  }
  RPI_TRY(check_offsets(m, name, offsets, batch->sentences));
  RPI_TRY(check_ids(name, ids, offsets, batch->sentences, 0,
                    encoder ? config->source_vocabulary : config->target_vocabulary));
  RPI_TRY(check_graphs(name, rpi_stack_of(config, stack), graphs, offsets, batch->sentences));
  *side = (rpi_side){.rows = offsets[batch->sentences], .ids = ids, .offsets = offsets};
  side->graphs = *graphs;
  return RP_OK;
}

/* What does not depend on sides. */
static rp_status check_head(rp_model *m, const rp_batch *batch, rpi_run *run) {
  RPI_CHECK(batch, RP_ERROR_ARGUMENT, "batch: batch is NULL");
  RPI_CHECK_SET_UP("batch: ", batch, "start from rp_batch_default()");
  RPI_CHECK(batch->sentences >= 0 && batch->sentences <= m->limits.sentences, RP_ERROR_SHAPE,
            "batch: sentences=%lld, must be from 0 to limits.sentences=%lld",
            (rpi_wide)batch->sentences, (rpi_wide)m->limits.sentences);
  *run = (rpi_run){.model = m, .sentences = batch->sentences};
  return RP_OK;
}

rp_status rpi_check_batch(rp_model *m, const rp_batch *batch, bool labels, rpi_run *run) {
  RPI_TRY(check_head(m, batch, run));
  for (int s = 0; s < RPI_STACKS; s++) RPI_TRY(check_side(m, s, batch, &run->side[s]));
  if (!labels) return RP_OK;
  const int64_t *const offsets = run->side[rpi_last_stack(m)].offsets;
  RPI_TRY(check_ids("labels", batch->labels, offsets, batch->sentences, -1, m->classes));
  static const int32_t none[1] = {-1};
  run->labels = batch->labels ? batch->labels : none;
  return RP_OK;
}

rp_status rpi_check_beginnings(rp_model *m, const rp_batch *batch, rpi_run *run) {
  RPI_TRY(check_head(m, batch, run));
  RPI_TRY(check_side(m, RPI_ENCODER, batch, &run->side[RPI_ENCODER]));
  if (!batch->target && !batch->target_offsets && !batch->target_graphs.labels) return RP_OK;
  return check_side(m, RPI_DECODER, batch, &run->side[RPI_DECODER]);
}

void rpi_set_ordinals(const rp_batch *batch, int64_t first, rpi_run *run) {
  uint32_t *const own = run->model->scratch.ordinals;
  for (int64_t b = 0; b < batch->sentences; b++) {
    own[b] = batch->ordinals ? batch->ordinals[b] : (uint32_t)(first + b);
  }
  run->ordinals = own;
}
