/* SPDX-License-Identifier: Apache-2.0
 *
 * schedule.c: a configuration's learning rate; ops/schedule.h has the formulas.
 */
#include "train/schedule.h"

#include <assert.h>

rpi_schedule rpi_schedule_of(const rp_config *config) {
  return (rpi_schedule){.kind = config->schedule,
                        .factor = config->learning_rate,
                        .width = (double)config->width,
                        .warmup = (double)config->warmup,
                        .steps = (double)config->steps,
                        .final_rate = config->final_rate};
}

double rpi_learning_rate(const rp_config *config, int64_t step) {
  assert(step >= 1);
  const rpi_schedule schedule = rpi_schedule_of(config);
  return rpi_schedule_rate(&schedule, step);
}
