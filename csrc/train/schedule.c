/* SPDX-License-Identifier: Apache-2.0
 *
 * schedule.c: the learning rate as a function of the step, with f the factor, w the warm-up, S the
 * steps of the whole training and r the share of the rate left at the end.
 *
 *   noam          f C^-0.5 min(t^-0.5, t w^-1.5)         the two meet at t = w
 *   inverse-sqrt  f min(t / w, sqrt(w / t))
 *   constant      f min(1, t / w)
 *   linear        f t / w up to t = w, then f (r + (1 - r) (1 - p)),  p = (t - w) / (S - w)
 *   cosine        likewise, f (r + (1 - r) (1 + cos(pi p)) / 2)
 *
 * p stays 1 after S. Without warm-up (w = 0) only what follows it is there.
 */
#include "train/schedule.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>

/* 0 at the end of the warm-up, 1 from the last step on. */
static double progress(const rp_config *config, double t) {
  const double w = (double)config->warmup, S = (double)config->steps;
  if (t <= w) return 0;
  return t < S ? (t - w) / (S - w) : 1;
}

double rpi_learning_rate(const rp_config *config, int64_t step) {
  assert(step >= 1);
  const double pi = 3.14159265358979323846;
  const double f = config->learning_rate, r = config->final_rate;
  const double t = (double)step, w = (double)config->warmup;
  const bool warming = t < w;
  switch (config->schedule) {
    case RP_SCHEDULE_NOAM: {
      const double peak = f / sqrt((double)config->width);
      return warming ? peak * (t / (w * sqrt(w))) : peak / sqrt(t);
    }
    case RP_SCHEDULE_INVERSE_SQRT: return warming ? f * (t / w) : f * sqrt(w / t);
    case RP_SCHEDULE_COSINE:
      if (warming) return f * (t / w);
      return f * (r + (1 - r) * 0.5 * (1 + cos(pi * progress(config, t))));
    case RP_SCHEDULE_LINEAR:
      if (warming) return f * (t / w);
      return f * (r + (1 - r) * (1 - progress(config, t)));
    default: return warming ? f * (t / w) : f;
  }
}
