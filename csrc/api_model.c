/* SPDX-License-Identifier: Apache-2.0
 *
 * api_model.c: the public functions of a model: they check, lock, and call inward.
 */
#include <stdio.h>
#include <string.h>

#include "api_model.h"
#include "file/model_file.h"
#include "isa/devices.h"
#include "train/step.h"

/* ---- limits ---------------------------------------------------------------- */

static rp_status check_limits(const rp_limits *limits) {
  RPI_CHECK(limits, RP_ERROR_ARGUMENT, "model: limits is NULL");
  RPI_CHECK_SET_UP("model: limits.", limits, "start from rp_limits_default()");
  RPI_CHECK(limits->tokens >= 1 && limits->tokens <= INT32_MAX, RP_ERROR_ARGUMENT,
            "model: limits.tokens=%lld, must be from 1 to %d", (rpi_wide)limits->tokens, INT32_MAX);
  RPI_CHECK(limits->sentences >= 1 && limits->sentences <= INT32_MAX, RP_ERROR_ARGUMENT,
            "model: limits.sentences=%lld, must be from 1 to %d", (rpi_wide)limits->sentences,
            INT32_MAX);
  char quoted[RPI_QUOTE];
  RPI_CHECK(!limits->device || strlen(limits->device) < RPI_DEVICE, RP_ERROR_ARGUMENT,
            "model: limits.device=%s is no device; rp_device_get names them",
            rpi_quote(limits->device, quoted));
  RPI_CHECK(limits->precision == RP_F32 || limits->precision == RP_BF16, RP_ERROR_ARGUMENT,
            "model: limits.precision=%d, must be RP_F32 or RP_BF16", limits->precision);
  const rp_ops *ops; /* the device is there */
  RPI_TRY(rpi_device_ops(limits->device, &ops));
  RPI_CHECK(limits->precision == RP_F32 || RPI_REAL_BYTES == 4, RP_ERROR_ARGUMENT,
            "model: limits.precision=RP_BF16, but this library computes in double alone");
  return RP_OK;
}

rp_status rp_model_memory(const rp_config *config, const rp_limits *limits, rp_memory *memory) {
  RPI_TRY(check_limits(limits));
  RPI_TRY(rp_config_check(config));
  RPI_CHECK(memory, RP_ERROR_ARGUMENT, "model: memory is NULL");
  RPI_CHECK_SET_UP("model: memory.", memory, "set it to sizeof(rp_memory)");
  rp_memory told = {.struct_size = sizeof told};
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rpi_model_memory(config, limits, &told);
  rpi_float_leave(caller);
  if (status == RP_OK) *memory = told;
  return status;
}

rp_status rp_model_create(const rp_config *config, const rp_limits *limits, rp_model **model) {
  RPI_CHECK(model, RP_ERROR_ARGUMENT, "model: model is NULL");
  *model = NULL;
  RPI_TRY(check_limits(limits));
  RPI_TRY(rp_config_check(config));
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rpi_model_create(config, limits, model);
  rpi_float_leave(caller);
  return status;
}

rp_status rp_model_open(const char *path, const rp_limits *limits, rp_model **model) {
  RPI_CHECK(model, RP_ERROR_ARGUMENT, "model: model is NULL");
  *model = NULL;
  RPI_CHECK(path, RP_ERROR_ARGUMENT, "model: path is NULL");
  RPI_TRY(check_limits(limits));
  RPI_CHECK(!limits->training, RP_ERROR_ARGUMENT,
            "model: limits.training=%d, must be 0 for a model that is opened; rp_model_create and "
            "rp_model_load make one that trains",
            limits->training);
  const int cancel = rpi_cancel_enter();
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rpi_model_open(path, limits, model);
  rpi_float_leave(caller);
  rpi_cancel_leave(cancel);
  return status;
}

void rp_model_free(rp_model *model) { rpi_model_free(model); }

const rp_config *rp_model_config(const rp_model *model) { return model ? &model->config : NULL; }
const rp_limits *rp_model_limits(const rp_model *model) { return model ? &model->limits : NULL; }

int64_t rp_model_parameter_count(const rp_model *model) { return model ? model->layout.count : 0; }

static rp_status parameter(const rp_model *m, int64_t index, rp_parameter *to) {
  RPI_CHECK(to, RP_ERROR_ARGUMENT, "model: parameter is NULL");
  RPI_CHECK_SET_UP("model: parameter.", to, "set it to sizeof(rp_parameter)");
  RPI_CHECK(index >= 0 && index < m->layout.count, RP_ERROR_ARGUMENT,
            "model: index=%lld, must be from 0 to %lld", (rpi_wide)index,
            (rpi_wide)m->layout.count - 1);
  const rpi_parameter *const p = &m->layout.parameters[index];
  *to = (rp_parameter){.struct_size = sizeof *to,
                       .name = p->name,
                       .dimensions = p->dimensions,
                       .shape = {p->shape[0], p->shape[1], p->shape[2]},
                       .count = p->count};
  if (!m->ops->host) return RP_OK;
  to->data = m->weights + p->at;
  to->gradient = m->gradients ? m->gradients + p->at : NULL;
  to->moment1 = m->moment1 ? m->moment1 + p->at : NULL;
  to->moment2 = m->moment2 ? m->moment2 + p->at : NULL;
  to->average = m->average ? m->average + p->at : NULL;
  return RP_OK;
}

rp_status rp_model_parameter(rp_model *m, int64_t index, rp_parameter *to) {
  RPI_TRY(rpi_model_enter(m)); /* rp_model_forward_average has the average as its weights */
  return rpi_model_leave(m, parameter(m, index, to));
}

/* Where one of a parameter's arrays lies. */
static rp_status array_of(const rp_model *m, int64_t index, int array, real **numbers,
                          int64_t *bytes) {
  RPI_CHECK(index >= 0 && index < m->layout.count, RP_ERROR_ARGUMENT,
            "model: index=%lld, must be from 0 to %lld", (rpi_wide)index,
            (rpi_wide)m->layout.count - 1);
  RPI_CHECK(array >= RP_ARRAY_WEIGHTS && array <= RP_ARRAY_AVERAGE, RP_ERROR_ARGUMENT,
            "model: array=%d, must be from RP_ARRAY_WEIGHTS=0 to RP_ARRAY_AVERAGE=4", array);
  real *const all[] = {m->weights, m->gradients, m->moment1, m->moment2, m->average};
  RPI_CHECK(all[array], RP_ERROR_ORDER, "model: it has no %s",
            array == RP_ARRAY_AVERAGE ? "average; ema is 0, or it was made without training"
                                      : "gradients and moments; it was made without training");
  *numbers = all[array] + m->layout.parameters[index].at;
  *bytes = m->layout.parameters[index].count * (int64_t)sizeof(real);
  return RP_OK;
}

static rp_status read_array(const rp_model *m, int64_t index, int array, rp_real *to) {
  real *numbers = NULL;
  int64_t bytes = 0;
  RPI_TRY(array_of(m, index, array, &numbers, &bytes));
  RPI_CHECK(to, RP_ERROR_ARGUMENT, "model: to is NULL");
  return m->ops->read(to, numbers, bytes);
}

static rp_status write_array(const rp_model *m, int64_t index, int array, const rp_real *from) {
  real *numbers = NULL;
  int64_t bytes = 0;
  RPI_TRY(array_of(m, index, array, &numbers, &bytes));
  RPI_CHECK(from, RP_ERROR_ARGUMENT, "model: from is NULL");
  return m->ops->write(numbers, from, bytes);
}

rp_status rp_model_read(rp_model *m, int64_t index, int array, rp_real *to) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, read_array(m, index, array, to));
}

rp_status rp_model_write(rp_model *m, int64_t index, int array, const rp_real *from) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, write_array(m, index, array, from));
}

static rp_status place_of(const rp_model *m, int64_t index, int array, rp_real **place) {
  int64_t bytes = 0;
  RPI_CHECK(place, RP_ERROR_ARGUMENT, "model: place is NULL");
  *place = NULL;
  return array_of(m, index, array, place, &bytes);
}

rp_status rp_model_place(rp_model *m, int64_t index, int array, rp_real **place) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, place_of(m, index, array, place));
}

/* ---- one call at a time ---------------------------------------------------- */

rp_status rpi_model_enter(rp_model *m) {
  RPI_CHECK(m, RP_ERROR_ARGUMENT, "model: model is NULL");
  RPI_CHECK(!atomic_flag_test_and_set(&m->busy), RP_ERROR_ORDER,
            "model: another call into this model is at work; one model, one call at a time");
  m->cancel = rpi_cancel_enter();
  m->caller = rpi_float_enter(false);
  const rp_ops *ops;
  rpi_model_weights_changed(m); /* who knows by whom, between calls */
  if (m->ops->host) return RP_OK;
  const rp_status status =
      rpi_device_ops(m->device, &ops); /* from here on this thread works there */
  return status == RP_OK ? RP_OK : rpi_model_leave(m, status);
}

rp_status rpi_model_leave(rp_model *m, rp_status status) {
  const int cancel = m->cancel; /* another's, once busy is cleared */
  rpi_float_leave(m->caller);
  atomic_flag_clear(&m->busy);
  rpi_cancel_leave(cancel);
  return status;
}

/* ---- what a call needs ----------------------------------------------------- */

static rp_status check_result(const rp_result *result) {
  if (result) RPI_CHECK_SET_UP("model: result.", result, "set it to sizeof(rp_result)");
  return RP_OK;
}

static rp_status check_training(const rp_model *m) {
  RPI_CHECK(m->limits.training, RP_ERROR_ORDER,
            "model: it was made with limits.training=0 and has no gradients");
  return RP_OK;
}

/* ---- steps ------------------------------------------------------------- */

/* Of all that was accumulated. */
static rp_status update_all(rp_model *m, rp_result *result) {
  RPI_TRY(rpi_step_update(m));
  if (result) return rpi_outcomes_take(m, true, result);
  rpi_outcomes_keep(m);
  return RP_OK;
}

/* What begins or changes weights has no gradients of what was there before. */
static rp_status check_nothing_accumulated(const rp_model *m) {
  RPI_CHECK(m->batches == 0, RP_ERROR_ORDER,
            "model: gradients of %lld batch%s are accumulated; rp_model_update uses them, "
            "rp_model_zero_gradients drops them",
            (rpi_wide)m->batches, m->batches == 1 ? "" : "es");
  return RP_OK;
}

/* Counters beyond these would be saved, and refused when they are read. */
static rp_status check_update(const rp_model *m) {
  RPI_TRY(check_training(m));
  RPI_CHECK(m->attempt < RPI_MOST_STEPS, RP_ERROR_ORDER,
            "model: attempt=%lld, of at most 2^40, has been made; rp_model_set_counters sets it",
            (rpi_wide)m->attempt);
  return RP_OK;
}

/* Of several batches the sentence says which one it is about. */
static rp_status check_one(rp_model *m, const rp_batch *batches, int64_t b, int64_t count,
                           rpi_run *run) {
  const rp_status status = rpi_check_batch(m, &batches[b], true, run);
  if (status == RP_OK || count == 1) return status;
  static const char about[] = "batch: ";
  char said[RPI_SENTENCE];
  snprintf(said, sizeof said, "%s", rp_last_error());
  const size_t from = strncmp(said, about, sizeof about - 1) == 0 ? sizeof about - 1 : 0;
  return rpi_fail(status, "batches[%lld]: %s", (rpi_wide)b, said + from);
}

static rp_status step(rp_model *m, const rp_batch *batches, int64_t count, rp_result *result) {
  RPI_TRY(check_update(m));
  RPI_TRY(check_result(result));
  RPI_CHECK(count >= 1, RP_ERROR_ARGUMENT, "model: count=%lld batches, must be at least 1",
            (rpi_wide)count);
  RPI_CHECK(batches, RP_ERROR_ARGUMENT, "model: batches is NULL");
  RPI_TRY(check_nothing_accumulated(m));
  rpi_run run;
  for (int64_t b = 0; b < count; b++) RPI_TRY(check_one(m, batches, b, count, &run));
  for (int64_t b = 0; b < count; b++) {
    if (count > 1) RPI_TRY(check_one(m, batches, b, count, &run)); /* one run at a time */
    rpi_set_ordinals(&batches[b], m->sentences, &run);
    RPI_TRY(rpi_step_accumulate(&run));
  }
  return update_all(m, result);
}

rp_status rp_model_step(rp_model *m, const rp_batch *batches, int64_t count, rp_result *result) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, step(m, batches, count, result));
}

static rp_status backward(rp_model *m, const rp_batch *batch, rp_result *result) {
  rpi_run run;
  RPI_TRY(check_training(m));
  RPI_TRY(check_result(result));
  RPI_TRY(rpi_check_batch(m, batch, true, &run));
  rpi_set_ordinals(batch, m->sentences, &run);
  RPI_TRY(rpi_step_accumulate(&run));
  return result ? rpi_outcomes_of_pass(m, result) : RP_OK;
}

rp_status rp_model_backward(rp_model *m, const rp_batch *batch, rp_result *result) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, backward(m, batch, result));
}

static rp_status update(rp_model *m, rp_result *result) {
  RPI_TRY(check_update(m));
  RPI_TRY(check_result(result));
  RPI_CHECK(m->batches != 0, RP_ERROR_ORDER,
            "model: nothing is accumulated; rp_model_backward comes before rp_model_update");
  return update_all(m, result);
}

rp_status rp_model_update(rp_model *m, rp_result *result) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, update(m, result));
}

static rp_status result_of(rp_model *m, rp_result *result) {
  RPI_CHECK(result, RP_ERROR_ARGUMENT, "model: result is NULL");
  RPI_TRY(check_result(result));
  RPI_CHECK(m->outcomes.first < m->outcomes.next, RP_ERROR_ORDER,
            "model: there is no result to ask for; a step or an update without one comes before "
            "rp_model_result");
  return rpi_outcomes_take(m, false, result);
}

rp_status rp_model_result(rp_model *m, rp_result *result) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, result_of(m, result));
}

rp_status rp_model_results(rp_model *m, int64_t *begun, int64_t *done) {
  RPI_TRY(rpi_model_enter(m));
  int64_t all, ready;
  rpi_outcomes_count(m, &all, &ready);
  if (begun) *begun = all;
  if (done) *done = ready;
  return rpi_model_leave(m, RP_OK);
}

rp_status rp_model_zero_gradients(rp_model *m) {
  RPI_TRY(rpi_model_enter(m));
  const rp_status status = check_training(m);
  return rpi_model_leave(m, status == RP_OK ? rpi_step_drop(m) : status);
}

rp_status rp_model_counters(rp_model *m, int64_t *steps, int64_t *attempts) {
  RPI_TRY(rpi_model_enter(m));
  const rp_status status = steps ? rpi_model_settle(m) : RP_OK;
  if (steps) *steps = m->step;
  if (attempts) *attempts = m->attempt;
  return rpi_model_leave(m, status);
}

rp_status rp_model_set_counters(rp_model *m, int64_t steps, int64_t attempts) {
  RPI_CHECK(steps >= 0 && attempts >= steps && attempts <= RPI_MOST_STEPS, RP_ERROR_ARGUMENT,
            "model: step=%lld, attempt=%lld, must be 0 <= step <= attempt <= 2^40", (rpi_wide)steps,
            (rpi_wide)attempts);
  RPI_TRY(rpi_model_enter(m));
  const rp_status status = check_nothing_accumulated(m);
  return rpi_model_leave(m, status == RP_OK ? rpi_model_count_from(m, steps, attempts) : status);
}

/* ---- forward alone ----------------------------------------------------- */

/* A pass without gradients, which leaves accumulation as it is. */
static rp_status pass(rp_model *m, const rp_batch *batch, bool labels, bool dropout, rpi_run *run) {
  RPI_TRY(rpi_check_batch(m, batch, labels, run));
  rpi_set_ordinals(batch, 0, run);
  rpi_step_key(m, run);
  run->dropout = dropout;
  return rpi_transformer(run);
}

static rp_status forward(rp_model *m, const rp_batch *batch, int dropout, rp_result *result) {
  rpi_run run;
  RPI_TRY(check_result(result));
  RPI_TRY(pass(m, batch, true, dropout != 0, &run));
  return result ? rpi_outcomes_of_pass(m, result) : RP_OK;
}

rp_status rp_model_forward(rp_model *m, const rp_batch *batch, int dropout, rp_result *result) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, forward(m, batch, dropout, result));
}

static rp_status forward_average(rp_model *m, const rp_batch *batch, rp_result *result) {
  RPI_CHECK(m->average, RP_ERROR_ORDER,
            "model: it keeps no average; ema is 0, or it was made without training");
  rpi_model_swap_average(m);
  const rp_status status = forward(m, batch, 0, result);
  rpi_model_swap_average(m);
  return status;
}

rp_status rp_model_forward_average(rp_model *m, const rp_batch *batch, rp_result *result) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, forward_average(m, batch, result));
}

static rp_status score(rp_model *m, const rp_batch *batch, rp_real *scores, int8_t *hits) {
  rpi_run run;
  RPI_TRY(pass(m, batch, true, false, &run));
  const int64_t rows = run.side[rpi_last_stack(m)].rows;
  RPI_CHECK(scores || rows == 0, RP_ERROR_ARGUMENT, "model: scores is NULL");
  RPI_TRY(m->ops->read(scores, m->scratch.nll, rows * (int64_t)sizeof *scores));
  for (int64_t r = 0; r < rows; r++) scores[r] = run.labels[r] < 0 ? 0 : -scores[r];
  return hits ? m->ops->read(hits, m->scratch.hit, rows) : RP_OK;
}

rp_status rp_model_score(rp_model *m, const rp_batch *batch, rp_real *scores, int8_t *hits) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, score(m, batch, scores, hits));
}

static rp_status hidden(rp_model *m, const rp_batch *batch, rp_real *to) {
  rpi_run run;
  RPI_TRY(pass(m, batch, false, false, &run));
  const int64_t count = run.side[rpi_last_stack(m)].rows * m->config.width;
  RPI_CHECK(to || count == 0, RP_ERROR_ARGUMENT, "model: hidden is NULL");
  return m->ops->read(to, m->stack[rpi_last_stack(m)].out, count * (int64_t)sizeof *to);
}

rp_status rp_model_hidden(rp_model *m, const rp_batch *batch, rp_real *to) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, hidden(m, batch, to));
}

/* ---- files ----------------------------------------------------------------- */

rp_status rp_model_save(rp_model *m, const char *path, int what) {
  RPI_CHECK(path, RP_ERROR_ARGUMENT, "model: path is NULL");
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, rpi_model_save(m, path, what));
}

static rp_status load(rp_model *m, const char *path, int what) {
  RPI_TRY(check_nothing_accumulated(m));
  return rpi_model_load(m, path, what);
}

rp_status rp_model_load(rp_model *m, const char *path, int what) {
  RPI_CHECK(path, RP_ERROR_ARGUMENT, "model: path is NULL");
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, load(m, path, what));
}

/* ---- profile ----------------------------------------------------------- */

/* Lines that a model can have: names of operations a layer, forward and backward. */
static int64_t most_lines(const rp_model *m) {
  return 32 * (m->config.encoder.layers + m->config.decoder.layers) + 32;
}

rp_status rp_model_profile(rp_model *m, int on) {
  RPI_TRY(rpi_model_enter(m));
  rp_status status = RP_OK;
  if (on) status = rpi_profile_start(&m->profile, m->ops, most_lines(m));
  else rpi_profile_stop(&m->profile);
  return rpi_model_leave(m, status);
}

rp_status rp_model_profile_count(rp_model *m, int64_t *count) {
  RPI_CHECK(count, RP_ERROR_ARGUMENT, "model: count is NULL");
  RPI_TRY(rpi_model_enter(m));
  *count = m->profile.count;
  return rpi_model_leave(m, RP_OK);
}

static rp_status profile_line(const rp_model *m, int64_t index, rp_profile_line *line) {
  RPI_CHECK(line, RP_ERROR_ARGUMENT, "model: line is NULL");
  RPI_CHECK_SET_UP("model: line.", line, "set it to sizeof(rp_profile_line)");
  RPI_CHECK(m->profile.count > 0, RP_ERROR_ORDER, "model: nothing has been profiled yet");
  RPI_CHECK(index >= 0 && index < m->profile.count, RP_ERROR_ARGUMENT,
            "model: index=%lld, must be from 0 to %lld", (rpi_wide)index,
            (rpi_wide)m->profile.count - 1);
  const rpi_profile_entry *const e = &m->profile.entries[index];
  *line = (rp_profile_line){.struct_size = sizeof *line,
                            .name = e->name,
                            .backward = e->backward,
                            .calls = e->calls,
                            .seconds = e->seconds,
                            .operations = e->operations,
                            .bytes = e->bytes};
  return RP_OK;
}

rp_status rp_model_profile_line(rp_model *m, int64_t index, rp_profile_line *line) {
  RPI_TRY(rpi_model_enter(m));
  return rpi_model_leave(m, profile_line(m, index, line));
}
