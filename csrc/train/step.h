/* SPDX-License-Identifier: Apache-2.0
 *
 * step.h: one training step: accumulate gradients, clip, update.
 */
#ifndef RPI_STEP_H
#define RPI_STEP_H

#include "model/model.h"

/* The key of dropout at the present attempt. */
void rpi_step_key(const rp_model *m, rpi_run *run);

/* Forward with dropout and backward of a checked batch. `run` has the batch; this sets the rest.
 * On failure everything that was accumulated is dropped. */
rp_status rpi_step_accumulate(rpi_run *run, rpi_sums *own);

/* The update from all that was accumulated, or, where that is not finite, none. */
rp_status rpi_step_update(rp_model *m, rp_result *result);

/* Forgets what was accumulated. */
rp_status rpi_step_drop(rp_model *m);

/* What a result says of sums. */
void rpi_step_report(const rp_model *m, const rpi_sums *sums, rp_result *result);

#endif
