/* SPDX-License-Identifier: Apache-2.0
 *
 * config_metadata.h: a configuration as the metadata of a file of weights.
 *
 * The texts are "format": "relpos 1", then every field of rp_config under its name, as
 * rp_config_get writes it. Loading guesses nothing: a field that is missing is an error, and so is
 * a key that is none. A later version that has another field writes another format.
 */
#ifndef RPI_CONFIG_METADATA_H
#define RPI_CONFIG_METADATA_H

#include "file/safetensors.h"
#include "model/config.h"

#define RPI_FORMAT_KEY "format"
#define RPI_FORMAT "relpos 1"

enum { RPI_CONFIG_PAIRS = RPI_CONFIG_FIELDS + 1 };

typedef struct rpi_config_pairs {
  rpi_text_pair pairs[RPI_CONFIG_PAIRS];
  int64_t count;
  char texts[RPI_CONFIG_FIELDS][RPI_CONFIG_TEXT];
} rpi_config_pairs;

/* The pairs point into *to itself: it is not to be copied. */
rp_status rpi_config_pairs_of(const rp_config *config, rpi_config_pairs *to);

/* The configuration that the file at path carries, checked by itself: the file's tensors may be
 * others (model_file.h). *config is untouched on failure. mark: see safetensors.h, or NULL. */
rp_status rpi_config_load(const char *path, rp_config *config, rpi_header_mark *mark);

#endif
