/* SPDX-License-Identifier: Apache-2.0
 *
 * verdict.h: the end of a step, when losses and gradient are there: the norm of the mean gradient,
 * whether there is an update, and the numbers that Adam takes.
 *
 * Gradients are of the sum of the losses; an update divides by the tokens of all that was
 * accumulated. Where loss or gradient is not finite nothing moves, nor without a label that counts.
 *
 * One source for the host (isa/host.c) and for a device, as schedule.h.
 */
#ifndef RPI_VERDICT_H
#define RPI_VERDICT_H

#include "ops/ops.h"

/* A mean gradient of this size, squared, is what the second moment can hold; beyond, it would be
 * infinite for ever. */
#define RPI_LARGEST_NORM 1e18

/* Of the squares of the mean gradient. NaN: false */
RPI_ANYWHERE bool rpi_is_sound(double squares) {
  return squares <= RPI_LARGEST_NORM * RPI_LARGEST_NORM;
}

/* 1 / (1 - beta^step). Squared step by step: what the C library's pow gives is not the same
 * everywhere. */
RPI_ANYWHERE double rpi_adam_correction(double beta, int64_t step) {
  double power = 1;
  for (; step > 0; step /= 2, beta *= beta) power *= step % 2 != 0 ? beta : 1;
  return 1 / (1 - power);
}

RPI_ANYWHERE void rpi_decide(const rpi_decide_args *args) {
  rpi_ledger *const ledger = args->ledger;
  rpi_outcome *const o = &ledger->outcome;
  const bool counts = ledger->total.tokens > 0;
  const double tokens = (double)ledger->total.tokens, clip = args->clip_norm;
  const double squares = counts ? ledger->squares / (tokens * tokens) : 0;
  o->losses = ledger->total;
  ledger->total.tokens = ledger->total.hits = ledger->total.bad = 0;
  ledger->total.loss = ledger->total.nll = 0;
  o->norm = sqrt(squares);
  o->sound = rpi_is_sound(squares);
  o->bad_gradient = 0;
  o->moves = counts && o->sound && o->losses.bad == 0;
  o->rate = o->scale = o->correction1 = o->correction2 = 0;
  if (!o->moves) return;
  o->step++;
  o->rate = rpi_schedule_rate(&args->schedule, o->step);
  o->scale = (clip != 0 && o->norm > clip ? clip / o->norm : 1) / tokens;
  o->correction1 = rpi_adam_correction(args->beta1, o->step);
  o->correction2 = rpi_adam_correction(args->beta2, o->step);
}

#endif
