/* SPDX-License-Identifier: Apache-2.0
 *
 * step.c: the training step around forward and backward.
 *
 * Gradients are accumulated of the sum of the losses; the update divides by the tokens of the whole
 * accumulation, so that the cut into batches does not matter. Where loss or gradient is not
 * finite nothing changes but the number of attempts, and with it dropout's masks.
 *
 * Nothing here waits for a device. What is lost adds up in the ledger, which lies there; the
 * verdict is made there, and Adam goes by it; and the outcome is posted, to be read when somebody
 * asks. So how many updates were made is known to the device first, the attempts to the host.
 *
 *   host      batches | begins update 1 | batches | begins update 2 | asks for result 1 | ...
 *   device            losses, gradients, verdict, Adam, letter 1 | losses, gradients, ...
 */
#include "train/step.h"

#include "base/rng.h"
#include "train/schedule.h"

/* ---- accumulation ---------------------------------------------------------- */

rp_status rpi_step_drop(rp_model *m) {
  static const rpi_losses none = {.tokens = 0};
  static const int32_t nothing = 0;
  m->batches = m->sentences = 0;
  RPI_TRY(m->ops->write(&m->ledger->total, &none, sizeof none));
  RPI_TRY(m->ops->write(&m->ledger->note, &nothing, sizeof nothing));
  return m->gradients ? m->ops->zero(m->gradients, m->layout.numbers) : RP_OK;
}

void rpi_step_key(const rp_model *m, rpi_run *run) {
  const rpi_philox_key key = rpi_philox_step_key(m->config.seed, (uint64_t)m->attempt);
  run->key[0] = key.word[0];
  run->key[1] = key.word[1];
}

rp_status rpi_step_accumulate(rpi_run *run) {
  rp_model *const m = run->model;
  rpi_step_key(m, run);
  run->dropout = run->backward = true;
  const rp_status status = rpi_transformer(run);
  if (status != RP_OK) {
    (void)rpi_step_drop(m);
    return status;
  }
  m->batches++;
  m->sentences += run->sentences;
  return RP_OK;
}

/* ---- the update ------------------------------------------------------------ */

/* Adam over the numbers from `from` to `to`, all of one decay. */
static rp_status update_part(const rp_model *m, bool decays, int64_t from, int64_t to) {
  const rp_config *const config = &m->config;
  const rpi_adam_args args = {.count = to - from,
                              .weights = m->weights + from,
                              .gradient = m->gradients + from,
                              .moment1 = m->moment1 + from,
                              .moment2 = m->moment2 + from,
                              .average = m->average ? m->average + from : NULL,
                              .outcome = &m->ledger->outcome,
                              .beta1 = config->beta1,
                              .beta2 = config->beta2,
                              .epsilon = config->adam_epsilon,
                              .decay = decays ? config->weight_decay : 0,
                              .ema = config->ema};
  return m->ops->adam(&args);
}

static rp_status update_weights(rp_model *m) {
  const rpi_layout *const layout = &m->layout;
  const double began = rpi_profile_now(&m->profile);
  int64_t from = 0;
  for (int64_t p = 1; p <= layout->count; p++) {
    const bool last = p == layout->count, decays = layout->parameters[p - 1].decays;
    const bool same =
        m->config.weight_decay == 0 || (!last && layout->parameters[p].decays == decays);
    if (same && !last) continue;
    const int64_t to = last ? layout->numbers : layout->parameters[p].at;
    RPI_TRY(update_part(m, decays, from, to));
    from = to;
  }
  rpi_model_weights_changed(m);
  rpi_profile_add(&m->profile, -1, -1, "update", true, began, 12 * (double)layout->numbers,
                  7 * (double)layout->numbers * (double)sizeof(real));
  return RP_OK;
}

/* The verdict: from the squares of the gradient to the outcome. */
static rp_status decide(rp_model *m) {
  rpi_ledger *const ledger = m->ledger;
  const rpi_decide_args args = {.ledger = ledger,
                                .schedule = rpi_schedule_of(&m->config),
                                .clip_norm = m->config.clip_norm,
                                .beta1 = m->config.beta1,
                                .beta2 = m->config.beta2};
  const rpi_blame_args blame = {.outcome = &ledger->outcome,
                                .gradients = m->gradients,
                                .places = m->places,
                                .count = m->layout.count,
                                .workspace = m->scratch.squares};
  RPI_TRY(
      m->ops->square_sum(m->gradients, m->layout.numbers, m->scratch.squares, &ledger->squares));
  RPI_TRY(m->ops->decide(&args));
  return m->ops->blame(&blame);
}

rp_status rpi_step_update(rp_model *m) {
  m->batches = m->sentences = 0;
  m->attempt++;
  RPI_TRY(decide(m));
  RPI_TRY(update_weights(m));
  return rpi_outcomes_add(m);
}
