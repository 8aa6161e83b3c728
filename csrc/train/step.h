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
rp_status rpi_step_accumulate(rpi_run *run);

/* Begins the update from all that was accumulated; where that is not finite, there is none. Its
 * result can be asked for. */
rp_status rpi_step_update(rp_model *m);

/* Forgets what was accumulated. */
rp_status rpi_step_drop(rp_model *m);

#endif
