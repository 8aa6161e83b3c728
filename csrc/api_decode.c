/* SPDX-License-Identifier: Apache-2.0
 *
 * api_decode.c: the public functions of decode.h: they check, lock the models, and call inward.
 */
#include <math.h>

#include "api_model.h"
#include "decode/search.h"
#include "isa/devices.h"

/* ---- a decoder ------------------------------------------------------------- */

static rp_status check_model(rp_model *const *models, int64_t k) {
  const rp_model *const m = models[k], *const first = models[0];
  RPI_CHECK(m, RP_ERROR_ARGUMENT, "decoder: models[%lld] is NULL", (rpi_wide)k);
  for (int64_t i = 0; i < k; i++) {
    RPI_CHECK(models[i] != m, RP_ERROR_ARGUMENT, "decoder: models[%lld] and models[%lld] are one",
              (rpi_wide)i, (rpi_wide)k);
  }
  RPI_CHECK(m->config.decoder.layers != 0, RP_ERROR_ARGUMENT,
            "decoder: models[%lld] has decoder.layers=0: an encoder alone says nothing",
            (rpi_wide)k);
  RPI_CHECK(m->config.decoder.relations == 0, RP_ERROR_ARGUMENT,
            "decoder: models[%lld] has decoder.relations=%lld: what a target's labelled graph will "
            "be is not known while it grows",
            (rpi_wide)k, (rpi_wide)m->config.decoder.relations);
  RPI_CHECK(m->config.target_vocabulary == first->config.target_vocabulary, RP_ERROR_ARGUMENT,
            "decoder: models[%lld] has target_vocabulary=%lld, but models[0] has %lld", (rpi_wide)k,
            (rpi_wide)m->config.target_vocabulary, (rpi_wide)first->config.target_vocabulary);
  const bool encoder = m->config.encoder.layers != 0;
  RPI_CHECK(encoder == (first->config.encoder.layers != 0), RP_ERROR_ARGUMENT,
            "decoder: models[%lld] has encoder.layers=%lld, but models[0] has %lld", (rpi_wide)k,
            (rpi_wide)m->config.encoder.layers, (rpi_wide)first->config.encoder.layers);
  RPI_CHECK(!encoder || m->config.source_vocabulary == first->config.source_vocabulary,
            RP_ERROR_ARGUMENT,
            "decoder: models[%lld] has source_vocabulary=%lld, but models[0] has %lld", (rpi_wide)k,
            (rpi_wide)m->config.source_vocabulary, (rpi_wide)first->config.source_vocabulary);
  RPI_CHECK(m->config.encoder.relations == first->config.encoder.relations, RP_ERROR_ARGUMENT,
            "decoder: models[%lld] has encoder.relations=%lld, but models[0] has %lld", (rpi_wide)k,
            (rpi_wide)m->config.encoder.relations, (rpi_wide)first->config.encoder.relations);
  RPI_CHECK(rpi_device_same(models[k]->device, models[0]->device), RP_ERROR_ARGUMENT,
            "decoder: models[%lld] is on %s, models[0] on %s; they must be on one device",
            (rpi_wide)k, models[k]->device, models[0]->device);
  return RP_OK;
}

rp_status rp_decoder_create(rp_model *const *models, int64_t count, rp_decoder **decoder) {
  RPI_CHECK(decoder, RP_ERROR_ARGUMENT, "decoder: decoder is NULL");
  *decoder = NULL;
  RPI_CHECK(models, RP_ERROR_ARGUMENT, "decoder: models is NULL");
  RPI_CHECK(count >= 1 && count <= INT32_MAX, RP_ERROR_ARGUMENT,
            "decoder: count=%lld models, must be from 1 to %d", (rpi_wide)count, INT32_MAX);
  for (int64_t k = 0; k < count; k++) RPI_TRY(check_model(models, k));
  return rpi_decoder_create(models, count, decoder);
}

void rp_decoder_free(rp_decoder *decoder) { rpi_decoder_free(decoder); }

/* All models of a decoder, or none. */
static rp_status enter(rp_decoder *d) {
  RPI_CHECK(d, RP_ERROR_ARGUMENT, "decoder: decoder is NULL");
  for (int64_t k = 0; k < d->count; k++) {
    const rp_status status = rpi_model_enter(d->models[k]);
    for (int64_t i = k; status != RP_OK && i > 0; i--) rpi_model_leave(d->models[i - 1], status);
    RPI_TRY(status);
  }
  return RP_OK;
}

static rp_status leave(rp_decoder *d, rp_status status) {
  /* the last first: the first to enter knows the caller's floating-point state */
  for (int64_t k = d->count; k > 0; k--) rpi_model_leave(d->models[k - 1], status);
  return status;
}

/* The batch, as every model reads it. */
static rp_status check_batch(rp_decoder *d, const rp_batch *batch) {
  for (int64_t k = 0; k < d->count; k++) {
    RPI_TRY(rpi_check_beginnings(d->models[k], batch, &d->runs[k]));
    rpi_set_ordinals(batch, 0, &d->runs[k]);
  }
  return RP_OK;
}

/* ---- a search -------------------------------------------------------------- */

static rp_status check_token(const char *name, int64_t token, int64_t vocabulary) {
  RPI_CHECK(token >= 0 && token < vocabulary, RP_ERROR_ARGUMENT,
            "search: %s=%lld, must be from 0 to %lld", name, (rpi_wide)token,
            (rpi_wide)vocabulary - 1);
  return RP_OK;
}

static rp_status check_count(const char *name, int64_t value) {
  RPI_CHECK(value >= 0 && value <= RPI_LIMIT, RP_ERROR_ARGUMENT,
            "search: %s=%lld, must be from 0 to 2^40", name, (rpi_wide)value);
  return RP_OK;
}

static rp_status check_number(const char *name, double value) {
  RPI_CHECK(value >= 0 && isfinite(value), RP_ERROR_ARGUMENT,
            "search: %s=%g, must be finite and not negative", name, value);
  return RP_OK;
}

static rp_status check_lengths(const rp_search *q) {
  RPI_TRY(check_count("min_length", q->min_length));
  RPI_TRY(check_count("max_length", q->max_length));
  RPI_TRY(check_count("max_more", q->max_more));
  RPI_CHECK(q->max_length == 0 || q->min_length <= q->max_length, RP_ERROR_ARGUMENT,
            "search: min_length=%lld is more than max_length=%lld", (rpi_wide)q->min_length,
            (rpi_wide)q->max_length);
  return check_count("no_repeat", q->no_repeat);
}

static rp_status check_suppressed(const rp_search *q, int64_t vocabulary) {
  RPI_CHECK(q->suppressed_count >= 0 && q->suppressed_count <= vocabulary, RP_ERROR_ARGUMENT,
            "search: suppressed_count=%lld, must be from 0 to the vocabulary's %lld",
            (rpi_wide)q->suppressed_count, (rpi_wide)vocabulary);
  RPI_CHECK(q->suppressed || q->suppressed_count == 0, RP_ERROR_ARGUMENT,
            "search: suppressed is NULL, but suppressed_count=%lld", (rpi_wide)q->suppressed_count);
  for (int64_t i = 0; i < q->suppressed_count; i++) {
    RPI_CHECK(q->suppressed[i] >= 0 && q->suppressed[i] < vocabulary, RP_ERROR_ARGUMENT,
              "search: suppressed[%lld]=%d, must be from 0 to %lld", (rpi_wide)i, q->suppressed[i],
              (rpi_wide)vocabulary - 1);
  }
  return RP_OK;
}

static rp_status check_beam(const rp_search *q, int64_t vocabulary) {
  RPI_CHECK(q->beam >= 1 && q->beam <= vocabulary, RP_ERROR_ARGUMENT,
            "search: beam=%lld, must be from 1 to the vocabulary's %lld", (rpi_wide)q->beam,
            (rpi_wide)vocabulary);
  RPI_CHECK(q->n_best >= 1 && q->n_best <= q->beam, RP_ERROR_ARGUMENT,
            "search: n_best=%lld, must be from 1 to beam=%lld", (rpi_wide)q->n_best,
            (rpi_wide)q->beam);
  return RP_OK;
}

static rp_status check_sampling(const rp_search *q) {
  RPI_CHECK(q->n_best >= 1 && q->n_best <= INT32_MAX, RP_ERROR_ARGUMENT,
            "search: n_best=%lld draws, must be from 1 to %d", (rpi_wide)q->n_best, INT32_MAX);
  RPI_CHECK(q->temperature > 0 && isfinite(q->temperature), RP_ERROR_ARGUMENT,
            "search: temperature=%g, must be finite and above 0", q->temperature);
  RPI_CHECK(q->top_p > 0 && q->top_p <= 1, RP_ERROR_ARGUMENT,
            "search: top_p=%g, must be above 0 and at most 1", q->top_p);
  return check_count("top_k", q->top_k);
}

static rp_status check_search(const rp_decoder *d, const rp_search *q) {
  const int64_t V = d->vocabulary;
  RPI_CHECK(q, RP_ERROR_ARGUMENT, "search: search is NULL");
  RPI_CHECK_SET_UP("search: ", q, "start from rp_search_default()");
  RPI_TRY(check_token("begin", q->begin, V));
  RPI_TRY(check_token("end", q->end, V));
  RPI_TRY(q->sample ? check_sampling(q) : check_beam(q, V));
  RPI_CHECK(q->penalty >= RP_PENALTY_NONE && q->penalty <= RP_PENALTY_POWER, RP_ERROR_ARGUMENT,
            "search: penalty=%d, must be RP_PENALTY_NONE=0, RP_PENALTY_WU=1 or RP_PENALTY_POWER=2",
            q->penalty);
  RPI_TRY(check_number("alpha", q->alpha));
  RPI_TRY(check_number("coverage", q->coverage));
  RPI_CHECK(q->coverage == 0 || d->models[0]->config.encoder.layers != 0, RP_ERROR_ARGUMENT,
            "search: coverage=%g, but the model has no source to cover", q->coverage);
  for (int64_t k = 0; q->average && k < d->count; k++) {
    RPI_CHECK(d->models[k]->average, RP_ERROR_ORDER,
              "search: average=%d, but models[%lld] keeps none; its ema is 0, or it was made "
              "without training",
              q->average, (rpi_wide)k);
  }
  RPI_TRY(check_lengths(q));
  return check_suppressed(q, V);
}

/* Is there room for as many rows, and for what targets begin with? */
static rp_status check_room(const rp_decoder *d, const rp_search *q) {
  const rpi_run *const run = &d->runs[0];
  const int64_t *const offsets = run->side[RPI_DECODER].offsets;
  const int64_t width = q->sample ? q->n_best : q->beam, sentences = run->sentences;
  RPI_CHECK(sentences * width <= d->most_rows, RP_ERROR_SHAPE,
            "search: %lld sentences of %s=%lld are %lld rows a step, at most limits.tokens=%lld "
            "are allowed",
            (rpi_wide)sentences, q->sample ? "n_best" : "beam", (rpi_wide)width,
            (rpi_wide)(sentences * width), (rpi_wide)d->most_rows);
  for (int64_t b = 0; offsets && b < sentences; b++) {
    const int64_t count = offsets[b + 1] - offsets[b];
    RPI_CHECK(count < d->max_length, RP_ERROR_SHAPE,
              "batch: target sentence %lld has %lld tokens and the one before them, at most "
              "max_length=%lld are allowed together",
              (rpi_wide)b, (rpi_wide)count, (rpi_wide)d->max_length);
  }
  const int64_t tokens = (offsets ? offsets[sentences] : 0) + sentences;
  RPI_CHECK(tokens <= d->most_rows, RP_ERROR_SHAPE,
            "batch: target has %lld tokens with the one before each sentence, at most "
            "limits.tokens=%lld are allowed",
            (rpi_wide)tokens, (rpi_wide)d->most_rows);
  return RP_OK;
}

/* The models have their averages for weights, or what were their weights again. */
static void swap_averages(const rp_decoder *d) {
  for (int64_t k = 0; k < d->count; k++) rpi_model_swap_average(d->models[k]);
}

static rp_status search(rp_decoder *d, const rp_batch *batch, const rp_search *q) {
  RPI_TRY(check_search(d, q));
  RPI_TRY(check_batch(d, batch));
  RPI_TRY(check_room(d, q));
  d->rows = -1; /* what was begun before is over */
  if (q->average) swap_averages(d);
  const rp_status status = rpi_search(d, q);
  if (q->average) swap_averages(d);
  return status;
}

rp_status rp_decoder_search(rp_decoder *d, const rp_batch *batch, const rp_search *q) {
  RPI_TRY(enter(d));
  return leave(d, search(d, batch, q));
}

/* ---- results --------------------------------------------------------------- */

static rp_status check_sentence(const rp_decoder *d, int64_t sentence) {
  RPI_CHECK(d, RP_ERROR_ARGUMENT, "decoder: decoder is NULL");
  RPI_CHECK(sentence >= 0 && sentence < d->results.sentences, RP_ERROR_ARGUMENT,
            "decoder: sentence=%lld, but the last search was of %lld", (rpi_wide)sentence,
            (rpi_wide)d->results.sentences);
  return RP_OK;
}

rp_status rp_decoder_result_count(const rp_decoder *d, int64_t sentence, int64_t *count) {
  RPI_TRY(check_sentence(d, sentence));
  RPI_CHECK(count, RP_ERROR_ARGUMENT, "decoder: count is NULL");
  *count = ((const int64_t *)d->results.counts.memory)[sentence];
  return RP_OK;
}

rp_status rp_decoder_result(const rp_decoder *d, int64_t sentence, int64_t rank,
                            rp_hypothesis *hypothesis) {
  RPI_TRY(check_sentence(d, sentence));
  RPI_CHECK(hypothesis, RP_ERROR_ARGUMENT, "decoder: hypothesis is NULL");
  RPI_CHECK_SET_UP("decoder: hypothesis.", hypothesis, "set it to sizeof(rp_hypothesis)");
  const int64_t count = ((const int64_t *)d->results.counts.memory)[sentence];
  RPI_CHECK(rank >= 0 && rank < count, RP_ERROR_ARGUMENT,
            "decoder: rank=%lld, but sentence %lld has %lld results", (rpi_wide)rank,
            (rpi_wide)sentence, (rpi_wide)count);
  const rp_hypothesis *const found = d->results.found.memory;
  *hypothesis = found[sentence * d->results.n_best + rank];
  return RP_OK;
}

/* ---- one token at a time --------------------------------------------------- */

/* The logits of the rows, for the host. */
static rp_status read_logits(rp_decoder *d, int64_t rows, rp_real *logits) {
  const rp_model *const m = d->models[0];
  if (m->ops->host) return rpi_decoder_logits(d, 0, rows, logits);
  for (int64_t first = 0; first < rows; first += d->block_rows) {
    const int64_t count = rpi_min(rows - first, d->block_rows);
    RPI_TRY(rpi_decoder_logits(d, first, count, m->scratch.logits));
    RPI_TRY(m->ops->read(logits + first * d->vocabulary, m->scratch.logits,
                         count * d->vocabulary * (int64_t)sizeof *logits));
  }
  return RP_OK;
}

static rp_status begin(rp_decoder *d, const rp_batch *batch, int64_t most_rows, rp_real *logits) {
  RPI_TRY(check_batch(d, batch));
  const rpi_side *const target = &d->runs[0].side[RPI_DECODER];
  RPI_CHECK(target->offsets, RP_ERROR_ARGUMENT, "batch: target is NULL");
  for (int64_t b = 0; b < batch->sentences; b++) {
    RPI_CHECK(target->offsets[b + 1] > target->offsets[b], RP_ERROR_SHAPE,
              "batch: target sentence %lld is empty; it must begin with a token", (rpi_wide)b);
  }
  RPI_CHECK(most_rows >= batch->sentences && most_rows <= d->most_rows, RP_ERROR_SHAPE,
            "decoder: most_rows=%lld, must be from the batch's %lld sentences to "
            "limits.tokens=%lld",
            (rpi_wide)most_rows, (rpi_wide)batch->sentences, (rpi_wide)d->most_rows);
  d->rows = -1;
  RPI_TRY(rpi_room_need(&d->parents, most_rows, sizeof(int32_t)));
  const rpi_cache_start start = {.most_rows = most_rows, .most_length = d->max_length};
  for (int64_t k = 0; k < d->count; k++) {
    RPI_TRY(rpi_cache_begin(d->caches[k], &d->runs[k], &start));
  }
  if (logits) RPI_TRY(read_logits(d, batch->sentences, logits));
  d->rows = batch->sentences;
  d->rows_room = most_rows;
  return RP_OK;
}

rp_status rp_decoder_begin(rp_decoder *d, const rp_batch *batch, int64_t most_rows,
                           rp_real *logits) {
  RPI_TRY(enter(d));
  return leave(d, begin(d, batch, most_rows, logits));
}

static rp_status check_step(const rp_decoder *d, int64_t rows, const int64_t *parents,
                            const int32_t *tokens) {
  RPI_CHECK(d->rows >= 0, RP_ERROR_ORDER,
            "decoder: nothing was begun; rp_decoder_begin comes before rp_decoder_step");
  RPI_CHECK(rows >= 0 && rows <= d->rows_room, RP_ERROR_SHAPE,
            "decoder: rows=%lld, must be from 0 to most_rows=%lld", (rpi_wide)rows,
            (rpi_wide)d->rows_room);
  RPI_CHECK(tokens || rows == 0, RP_ERROR_ARGUMENT, "decoder: tokens is NULL");
  RPI_CHECK(parents || rows <= d->rows, RP_ERROR_ARGUMENT,
            "decoder: parents is NULL, but rows=%lld are more than the %lld before", (rpi_wide)rows,
            (rpi_wide)d->rows);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t parent = parents ? parents[r] : r;
    RPI_CHECK(parent >= 0 && parent < d->rows, RP_ERROR_ARGUMENT,
              "decoder: parents[%lld]=%lld, must be one of the %lld rows before", (rpi_wide)r,
              (rpi_wide)parent, (rpi_wide)d->rows);
    RPI_CHECK(tokens[r] >= 0 && tokens[r] < d->vocabulary, RP_ERROR_ARGUMENT,
              "decoder: tokens[%lld]=%d, must be from 0 to %lld", (rpi_wide)r, tokens[r],
              (rpi_wide)d->vocabulary - 1);
    RPI_CHECK(rpi_cache_length(d->caches[0], parent) < d->max_length, RP_ERROR_SHAPE,
              "decoder: row %lld would be longer than max_length=%lld tokens", (rpi_wide)r,
              (rpi_wide)d->max_length);
  }
  return RP_OK;
}

static rp_status step(rp_decoder *d, int64_t rows, const int64_t *parents, const int32_t *tokens,
                      rp_real *logits) {
  RPI_TRY(check_step(d, rows, parents, tokens));
  int32_t *const own = parents ? d->parents.memory : NULL;
  for (int64_t r = 0; parents && r < rows; r++) own[r] = (int32_t)parents[r];
  d->rows = -1; /* a step that fails leaves nothing to go on from */
  for (int64_t k = 0; k < d->count; k++) {
    RPI_TRY(rpi_cache_step(d->caches[k], rows, own, tokens));
  }
  if (logits) RPI_TRY(read_logits(d, rows, logits));
  d->rows = rows;
  return RP_OK;
}

rp_status rp_decoder_step(rp_decoder *d, int64_t rows, const int64_t *parents,
                          const int32_t *tokens, rp_real *logits) {
  RPI_TRY(enter(d));
  return leave(d, step(d, rows, parents, tokens, logits));
}
