/* SPDX-License-Identifier: Apache-2.0
 *
 * schedule.h: the learning rate as a function of the step.
 */
#ifndef RPI_TRAIN_SCHEDULE_H
#define RPI_TRAIN_SCHEDULE_H

#include "ops/schedule.h"

rpi_schedule rpi_schedule_of(const rp_config *config);

/* Of a checked configuration, at the t-th update, t >= 1. */
double rpi_learning_rate(const rp_config *config, int64_t t);

#endif
