/* SPDX-License-Identifier: Apache-2.0
 *
 * config.h: the fields of rp_config by name (config.c), whole configurations by name (presets.c),
 * and what is a model (config_check.c).
 */
#ifndef RPI_CONFIG_H
#define RPI_CONFIG_H

#include <stdbool.h>

#include "base/error.h"
#include "relpos/model.h"

enum {
  RPI_CONFIG_FIELDS = 90, /* names that rpi_config_field gives */
  RPI_CONFIG_TEXT = 40    /* bytes of the longest text of a field, with its zero */
};

/* *config is a whole configuration, or untouched where the name is unknown. */
rp_status rpi_config_preset(const char *name, rp_config *config);
rp_status rpi_config_set(rp_config *config, const char *name, const char *value);
rp_status rpi_config_get(const rp_config *config, const char *name, char *text, size_t size);

/* Digits alone, an optional sign first; false: it is not such a text, or does not fit. */
bool rpi_read_integer(const char *text, int64_t *value);

/* NULL before the first and after the last. */
const char *rpi_config_field(int index);

/* May a file be without this field, as those written before there was one are? It is 0 then. */
bool rpi_config_may_lack(int index);

const char *rpi_preset_name(int index);

/* Of names that name_at gives, or where that is NULL of `names`, which end with NULL: the first of
 * those with the fewest letters to change. */
const char *rpi_nearest(const char *typed, const char *(*name_at)(int index),
                        const char *const *names);

/* The range of each field alone. */
rp_status rpi_config_check_fields(const rp_config *config);

/* Passed by a configuration whose parameters, counted five times over (gradients, moments,
 * average) in bytes of double, stay below 2^63: sums and products of its sizes do not overflow. */
rp_status rpi_config_check(const rp_config *config);

/* Of checked configurations. */
static inline int64_t rpi_head_width(const rp_config *config) {
  return config->head_width != 0 ? config->head_width : config->width / config->heads;
}

static inline int64_t rpi_key_heads(const rp_config *config) {
  return config->key_heads != 0 ? config->key_heads : config->heads;
}

/* Has every layer, or head, a table of values of its own? keys: has it one of keys? */
static inline bool rpi_values_own(int values, bool keys) {
  return values == RP_VALUES_AS_KEYS ? keys : values == RP_VALUES_OWN;
}

#endif
