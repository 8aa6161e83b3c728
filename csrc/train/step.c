/* SPDX-License-Identifier: Apache-2.0
 *
 * step.c: the training step around forward and backward.
 *
 * Gradients are accumulated of the sum of the losses; the update divides by the tokens of the whole
 * accumulation, so that the cut into batches does not matter. Where loss or gradient is not
 * finite nothing changes but the number of attempts, and with it dropout's masks.
 */
#include "train/step.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "train/schedule.h"

void rpi_step_report(const rp_model *m, const rpi_sums *sums, rp_result *result) {
  const double tokens = sums->tokens > 0 ? (double)sums->tokens : 1;
  const size_t size = result->struct_size;
  *result = (rp_result){.struct_size = size,
                        .tokens = sums->tokens,
                        .loss = sums->loss / tokens,
                        .nll = sums->nll / tokens,
                        .accuracy = (double)sums->hits / tokens,
                        .step = m->step,
                        .attempt = m->attempt,
                        .finite = sums->first_bad[0] == '\0'};
  memcpy(result->first_bad, sums->first_bad, sizeof result->first_bad);
}

rp_status rpi_step_drop(rp_model *m) {
  m->sums = (rpi_sums){0};
  return m->gradients ? m->ops->zero(m->gradients, m->layout.numbers) : RP_OK;
}

static void add_sums(const rpi_sums *from, rpi_sums *to) {
  to->batches += from->batches;
  to->sentences += from->sentences;
  to->tokens += from->tokens;
  to->hits += from->hits;
  to->loss += from->loss;
  to->nll += from->nll;
  if (to->first_bad[0] == '\0') memcpy(to->first_bad, from->first_bad, sizeof to->first_bad);
}

void rpi_step_key(const rp_model *m, rpi_run *run) {
  const rpi_philox_key key = rpi_philox_step_key(m->config.seed, (uint64_t)m->attempt);
  run->key[0] = key.word[0];
  run->key[1] = key.word[1];
}

rp_status rpi_step_accumulate(rpi_run *run, rpi_sums *own) {
  rp_model *const m = run->model;
  rpi_step_key(m, run);
  run->dropout = run->backward = true;
  const rp_status status = rpi_transformer(run, own);
  if (status == RP_OK) add_sums(own, &m->sums);
  else (void)rpi_step_drop(m);
  return status;
}

/* ---- the update ------------------------------------------------------------ */

/* A mean gradient of this size, squared, is what the second moment can hold; beyond, it would be
 * infinite for ever. */
#define LARGEST 1e18

static bool is_sound(double squares) { return squares <= LARGEST * LARGEST; } /* NaN: false */

/* The parameter, in the order of backward, whose gradient is the first that is not sound. */
static void find_bad_gradient(const rp_model *m, double tokens, char *name, size_t size) {
  for (int64_t p = m->layout.count - 1; p >= 0; p--) {
    const rpi_parameter *const parameter = &m->layout.parameters[p];
    double sum = 0;
    const rp_status status = m->ops->square_sum(m->gradients + parameter->at, parameter->count,
                                                m->scratch.squares, &sum);
    if (status == RP_OK && is_sound(sum / (tokens * tokens))) continue;
    snprintf(name, size, "gradient of %.50s", parameter->name);
    return;
  }
}

/* Adam over the numbers from `from` to `to`, all of one decay. */
static rp_status update_part(const rp_model *m, double rate, double gradient_scale, bool decays,
                             int64_t from, int64_t to) {
  const rp_config *const config = &m->config;
  const rpi_adam_args args = {.count = to - from,
                              .step = m->step + 1,
                              .weights = m->weights + from,
                              .gradient = m->gradients + from,
                              .moment1 = m->moment1 + from,
                              .moment2 = m->moment2 + from,
                              .average = m->average ? m->average + from : NULL,
                              .rate = rate,
                              .beta1 = config->beta1,
                              .beta2 = config->beta2,
                              .epsilon = config->adam_epsilon,
                              .decay = decays ? config->weight_decay : 0,
                              .gradient_scale = gradient_scale,
                              .ema = config->ema};
  return m->ops->adam(&args);
}

static rp_status update_weights(rp_model *m, double rate, double gradient_scale) {
  const rpi_layout *const layout = &m->layout;
  const double began = rpi_profile_now(&m->profile);
  int64_t from = 0;
  for (int64_t p = 1; p <= layout->count; p++) {
    const bool last = p == layout->count, decays = layout->parameters[p - 1].decays;
    const bool same =
        m->config.weight_decay == 0 || (!last && layout->parameters[p].decays == decays);
    if (same && !last) continue;
    const int64_t to = last ? layout->numbers : layout->parameters[p].at;
    RPI_TRY(update_part(m, rate, gradient_scale, decays, from, to));
    from = to;
  }
  rpi_profile_add(&m->profile, -1, -1, "update", true, began, 12 * (double)layout->numbers,
                  7 * (double)layout->numbers * (double)sizeof(real));
  return RP_OK;
}

rp_status rpi_step_update(rp_model *m, rp_result *result) {
  const double tokens = (double)m->sums.tokens;
  double squares = 0;
  if (m->sums.tokens > 0) {
    RPI_TRY(m->ops->square_sum(m->gradients, m->layout.numbers, m->scratch.squares, &squares));
    squares /= tokens * tokens;
  }
  const double norm = sqrt(squares), clip = m->config.clip_norm;
  if (m->sums.first_bad[0] == '\0' && !is_sound(squares)) {
    find_bad_gradient(m, tokens, m->sums.first_bad, sizeof m->sums.first_bad);
  }
  m->attempt++;
  rpi_step_report(m, &m->sums, result);
  result->gradient_norm = norm;
  if (!result->finite || m->sums.tokens == 0) return rpi_step_drop(m);
  result->learning_rate = rpi_learning_rate(&m->config, m->step + 1);
  const double clipped = clip != 0 && norm > clip ? clip / norm : 1;
  RPI_TRY(update_weights(m, result->learning_rate, clipped / tokens));
  m->sums = (rpi_sums){0};
  result->step = ++m->step;
  return RP_OK;
}
