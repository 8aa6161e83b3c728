/* SPDX-License-Identifier: Apache-2.0
 *
 * api_model.h: what the public functions of models and of decoders share: the lock of a model, and
 * the checks of a batch.
 */
#ifndef RPI_API_MODEL_H
#define RPI_API_MODEL_H

#include "api_attention.h"
#include "model/model.h"

/* One call into a model at a time: fails with RP_ERROR_ORDER where another one is at work. */
rp_status rpi_model_enter(rp_model *m);
/* Hands `status` on. */
rp_status rpi_model_leave(rp_model *m, rp_status status);

/* ---- api_batch.c ----------------------------------------------------------- */

/* Both sides of a batch, and its labels where they are wanted. */
rp_status rpi_check_batch(rp_model *m, const rp_batch *batch, bool labels, rpi_run *run);

/* What a search goes on from: targets may be absent (then run->side[RPI_DECODER].offsets is NULL),
 * and labels are not read. */
rp_status rpi_check_beginnings(rp_model *m, const rp_batch *batch, rpi_run *run);

/* The sentences' ordinals, counted from `first` where the batch says nothing. */
void rpi_set_ordinals(const rp_batch *batch, int64_t first, rpi_run *run);

#endif
