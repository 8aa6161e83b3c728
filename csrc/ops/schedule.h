/* SPDX-License-Identifier: Apache-2.0
 *
 * schedule.h: the learning rate as a function of the step, with f the factor, w the warm-up, S the
 * steps of the whole training and r the share of the rate left at the end.
 *
 *   noam          f C^-0.5 min(t^-0.5, t w^-1.5)         the two meet at t = w
 *   inverse-sqrt  f min(t / w, sqrt(w / t))
 *   constant      f min(1, t / w)
 *   linear        f t / w up to t = w, then f (r + (1 - r) (1 - p)),  p = (t - w) / (S - w)
 *   cosine        likewise, f (r + (1 - r) (1 + cos(pi p)) / 2)
 *
 * p stays 1 after S. Without warm-up (w = 0) only what follows it is there.
 *
 * One source for the host and for a device, which alone knows its step while the host runs ahead.
 */
#ifndef RPI_SCHEDULE_H
#define RPI_SCHEDULE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "relpos/model.h"

/* What compiles this for a device says so before it. */
#ifndef RPI_ANYWHERE
#define RPI_ANYWHERE static inline
#endif

typedef struct rpi_schedule {
  int kind; /* RP_SCHEDULE_... */
  double factor, width, warmup, steps, final_rate;
} rpi_schedule;

/* 0 at the end of the warm-up, 1 from the last step on. */
RPI_ANYWHERE double rpi_schedule_progress(const rpi_schedule *s, double t) {
  const double w = s->warmup, S = s->steps;
  if (t <= w) return 0;
  return t < S ? (t - w) / (S - w) : 1;
}

/* At step t >= 1. */
RPI_ANYWHERE double rpi_schedule_rate(const rpi_schedule *s, int64_t step) {
  const double pi = 3.14159265358979323846;
  const double f = s->factor, r = s->final_rate;
  const double t = (double)step, w = s->warmup;
  const bool warming = t < w;
  switch (s->kind) {
    case RP_SCHEDULE_NOAM: {
      const double peak = f / sqrt(s->width);
      return warming ? peak * (t / (w * sqrt(w))) : peak / sqrt(t);
    }
    case RP_SCHEDULE_INVERSE_SQRT: return warming ? f * (t / w) : f * sqrt(w / t);
    case RP_SCHEDULE_COSINE:
      if (warming) return f * (t / w);
      return f * (r + (1 - r) * 0.5 * (1 + cos(pi * rpi_schedule_progress(s, t))));
    case RP_SCHEDULE_LINEAR:
      if (warming) return f * (t / w);
      return f * (r + (1 - r) * (1 - rpi_schedule_progress(s, t)));
    default: return warming ? f * (t / w) : f;
  }
}

#endif
