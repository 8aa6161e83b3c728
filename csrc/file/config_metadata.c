/* SPDX-License-Identifier: Apache-2.0
 *
 * config_metadata.c: a configuration as the metadata of a file of weights, and back.
 */
#include "file/config_metadata.h"

#include <stdbool.h>
#include <string.h>

#define FORMAT_KEY "format"
#define FORMAT "relpos 1"

rp_status rpi_config_pairs_of(const rp_config *config, rpi_config_pairs *to) {
  to->pairs[0] = (rpi_text_pair){FORMAT_KEY, FORMAT};
  for (int i = 0; i < RPI_CONFIG_FIELDS; i++) {
    const char *const name = rpi_config_field(i);
    RPI_TRY(rpi_config_get(config, name, to->texts[i], sizeof to->texts[i]));
    to->pairs[i + 1] = (rpi_text_pair){name, to->texts[i]};
  }
  to->count = RPI_CONFIG_PAIRS;
  return RP_OK;
}

typedef struct loading {
  rp_config config;
  bool refused; /* a pair: what was wrong is not the file's form */
  bool format, seen[RPI_CONFIG_FIELDS];
} loading;

static rp_status take_pair(loading *l, const char *key, const char *value) {
  if (strcmp(key, FORMAT_KEY) == 0) {
    char quoted[RPI_QUOTE];
    RPI_CHECK(strcmp(value, FORMAT) == 0, RP_ERROR_FILE, "its format is %s, must be '" FORMAT "'",
              rpi_quote(value, quoted));
    l->format = true;
    return RP_OK;
  }
  RPI_TRY(rpi_config_set(&l->config, key, value));
  for (int i = 0; i < RPI_CONFIG_FIELDS; i++) {
    if (strcmp(rpi_config_field(i), key) == 0) l->seen[i] = true;
  }
  return RP_OK;
}

static rp_status take_each(void *context, const char *key, const char *value) {
  loading *const l = context;
  const rp_status status = take_pair(l, key, value);
  l->refused = status != RP_OK;
  return status;
}

static rp_status check_complete(const loading *l) {
  RPI_CHECK(l->format, RP_ERROR_FILE,
            "its metadata have no '" FORMAT_KEY "', must have '" FORMAT "'");
  for (int i = 0; i < RPI_CONFIG_FIELDS; i++) {
    RPI_CHECK(l->seen[i], RP_ERROR_FILE, "its metadata lack '%s'", rpi_config_field(i));
  }
  return rpi_config_check(&l->config);
}

rp_status rpi_config_load(const char *path, rp_config *config) {
  loading l;
  memset(&l, 0, sizeof l); /* padding too, as in presets */
  l.config.struct_size = sizeof l.config;
  const rp_status status = rpi_safetensors_metadata(path, take_each, &l);
  if (status != RP_OK && !l.refused) return status; /* the sentence has the path */
  RPI_CHECK(status == RP_OK && check_complete(&l) == RP_OK, RP_ERROR_FILE,
            "cannot read the configuration in '%s': %s", path, rp_last_error());
  *config = l.config;
  return RP_OK;
}
