/* SPDX-License-Identifier: Apache-2.0
 *
 * outcomes.c: what updates and passes have to tell, as it comes back from the device.
 */
#include <stdio.h>

#include "model/model.h"

rp_status rpi_outcomes_make(rp_model *m) {
  for (int i = 0; i < RPI_LETTERS; i++) {
    RPI_TRY_MEMORY(
        m->ops->post(&m->outcomes.letter[i], &m->ledger->outcome, sizeof m->ledger->outcome),
        "model: no memory for its results");
  }
  return RP_OK;
}

rp_status rpi_outcomes_add(rp_model *m) {
  rpi_outcomes *const all = &m->outcomes;
  if (all->next - all->first == RPI_LETTERS) all->first++; /* its letter is needed */
  const int64_t slot = all->next % RPI_LETTERS;
  RPI_TRY(m->ops->post(&all->letter[slot], &m->ledger->outcome, sizeof m->ledger->outcome));
  m->behind = true;
  all->attempt[slot] = m->attempt;
  all->next++;
  return RP_OK;
}

void rpi_outcomes_keep(rp_model *m) {
  rpi_outcomes *const all = &m->outcomes;
  while (all->next - all->first > RPI_OUTCOMES) all->first++;
}

static void report(const rp_model *m, const rpi_losses *losses, rp_result *result) {
  const double tokens = losses->tokens > 0 ? (double)losses->tokens : 1;
  const size_t size = result->struct_size;
  *result = (rp_result){.struct_size = size,
                        .tokens = losses->tokens,
                        .loss = losses->loss / tokens,
                        .nll = losses->nll / tokens,
                        .accuracy = (double)losses->hits / tokens,
                        .step = m->step,
                        .attempt = m->attempt,
                        .finite = losses->bad == 0};
  rpi_bad_name(m, losses->bad, result->first_bad);
}

rp_status rpi_outcomes_of_pass(rp_model *m, rp_result *result) {
  rpi_losses own;
  RPI_TRY(rpi_model_settle(m));
  RPI_TRY(m->ops->read(&own, &m->ledger->own, sizeof own));
  report(m, &own, result);
  return RP_OK;
}

/* The outcome of update `number` of the ring. */
static rp_status outcome_of(rp_model *m, int64_t number, rpi_outcome *outcome) {
  RPI_TRY(m->ops->collect(m->outcomes.letter[number % RPI_LETTERS], outcome, sizeof *outcome));
  if (!m->behind || number != m->outcomes.next - 1) return RP_OK;
  m->step = outcome->step;
  m->behind = false;
  return RP_OK;
}

rp_status rpi_model_settle(rp_model *m) {
  rpi_outcome outcome;
  return m->behind ? outcome_of(m, m->outcomes.next - 1, &outcome) : RP_OK;
}

rp_status rpi_outcomes_take(rp_model *m, bool newest, rp_result *result) {
  rpi_outcomes *const all = &m->outcomes;
  const int64_t number = newest ? all->next - 1 : all->first;
  rpi_outcome o;
  RPI_TRY(outcome_of(m, number, &o));
  report(m, &o.losses, result);
  result->step = o.step;
  result->attempt = all->attempt[number % RPI_LETTERS];
  result->gradient_norm = o.norm;
  result->learning_rate = o.rate;
  if (result->finite && !o.sound) {
    const char *const whose =
        o.bad_gradient > 0 ? m->layout.parameters[o.bad_gradient - 1].name : "all parameters";
    result->finite = 0;
    snprintf(result->first_bad, sizeof result->first_bad, "gradient of %.50s", whose);
  }
  if (newest) all->next--;
  else all->first++;
  return RP_OK;
}

void rpi_outcomes_count(const rp_model *m, int64_t *begun, int64_t *done) {
  const rpi_outcomes *const all = &m->outcomes;
  *begun = all->next - all->first;
  *done = 0;
  while (*done < *begun && m->ops->arrived(all->letter[(all->first + *done) % RPI_LETTERS])) {
    ++*done;
  }
}

rp_status rpi_model_count_from(rp_model *m, int64_t step, int64_t attempt) {
  RPI_TRY(m->ops->write(&m->ledger->outcome.step, &step, sizeof step));
  m->step = step;
  m->attempt = attempt;
  m->behind = false;
  return RP_OK;
}
