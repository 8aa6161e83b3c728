/* SPDX-License-Identifier: Apache-2.0
 *
 * model_file.h: a model's weights, average and optimizer state in files.
 *
 *   weights, average   the parameters' names; metadata: format, every field of the configuration
 *   optimizer          moment1.NAME, moment2.NAME, and average.NAME where the model keeps one;
 *                      metadata: format, step, attempt
 */
#ifndef RPI_MODEL_FILE_H
#define RPI_MODEL_FILE_H

#include "model/model.h"

/* what: RP_SAVE_... */
rp_status rpi_model_save(rp_model *m, const char *path, int what);
rp_status rpi_model_load(rp_model *m, const char *path, int what);

/* The configuration of a file of weights whose tensors are all there, in the shapes that it says.
 * *config is untouched on failure. */
rp_status rpi_weights_config(const char *path, rp_config *config);

/* A model without training from a file of weights, which are mapped where they can be. */
rp_status rpi_model_open(const char *path, const rp_limits *limits, rp_model **model);

#endif
