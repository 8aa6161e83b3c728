/* SPDX-License-Identifier: Apache-2.0
 *
 * config_metadata.c: a configuration as the metadata of a file of weights, and back.
 */
#include "file/config_metadata.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

rp_status rpi_config_pairs_of(const rp_config *config, rpi_config_pairs *to) {
  to->pairs[0] = (rpi_text_pair){RPI_FORMAT_KEY, RPI_FORMAT};
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
  bool seen[RPI_CONFIG_FIELDS];
  char format[RPI_QUOTE];     /* in quotes; empty: none was met */
  int counters;               /* of the two that optimizer state has */
  char problem[RPI_SENTENCE]; /* of the first pair that is no field; empty: there is none */
} loading;

/* Fails of no pair: what the file is comes first, and may be said by the last. */
static rp_status take_pair(void *context, const char *key, const char *value) {
  loading *const l = context;
  if (strcmp(key, RPI_FORMAT_KEY) == 0) {
    rpi_quote(value, l->format);
    return RP_OK;
  }
  if (strcmp(key, "step") == 0 || strcmp(key, "attempt") == 0) l->counters++;
  if (!l->problem[0] && rpi_config_set(&l->config, key, value) != RP_OK) {
    snprintf(l->problem, sizeof l->problem, "%s", rp_last_error());
  }
  for (int i = 0; i < RPI_CONFIG_FIELDS; i++) {
    if (strcmp(rpi_config_field(i), key) == 0) l->seen[i] = true;
  }
  return RP_OK;
}

static rp_status check_complete(const loading *l) {
  RPI_CHECK(l->format[0], RP_ERROR_FILE,
            "its metadata have no '" RPI_FORMAT_KEY "', must have '" RPI_FORMAT "'");
  RPI_CHECK(strcmp(l->format, "'" RPI_FORMAT "'") == 0, RP_ERROR_FILE,
            "its format is %s, must be '" RPI_FORMAT "'", l->format);
  RPI_CHECK(l->counters < 2, RP_ERROR_FILE, "it is optimizer state, no weights");
  RPI_CHECK(!l->problem[0], RP_ERROR_FILE, "%s", l->problem);
  for (int i = 0; i < RPI_CONFIG_FIELDS; i++) {
    RPI_CHECK(l->seen[i] || rpi_config_may_lack(i), RP_ERROR_FILE, "its metadata lack '%s'",
              rpi_config_field(i));
  }
  return rpi_config_check(&l->config);
}

rp_status rpi_config_load(const char *path, rp_config *config, rpi_header_mark *mark) {
  loading l;
  memset(&l, 0, sizeof l); /* padding too, as in presets */
  l.config.struct_size = sizeof l.config;
  RPI_TRY(rpi_safetensors_metadata(path, take_pair, &l, mark)); /* the sentence has the path */
  RPI_CHECK(check_complete(&l) == RP_OK, RP_ERROR_FILE, "cannot read the configuration in '%s': %s",
            path, rp_last_error());
  *config = l.config;
  return RP_OK;
}
