/* SPDX-License-Identifier: Apache-2.0
 *
 * api_config.c: the public functions about configurations. They refuse NULL and call inward.
 */
#include <math.h>

#include "base/threads.h"
#include "file/model_file.h"
#include "model/config.h"
#include "train/schedule.h"

static rp_status check_given(const char *call, const char *name, const void *argument) {
  RPI_CHECK(argument, RP_ERROR_ARGUMENT, "%s: %s is NULL", call, name);
  return RP_OK;
}

rp_config rp_config_default(void) {
  rp_config config;
  memset(&config, 0, sizeof config);
  rpi_config_preset("tiny", &config);
  return config;
}

rp_status rp_config_preset(const char *name, rp_config *config) {
  RPI_TRY(check_given("rp_config_preset", "name", name));
  RPI_TRY(check_given("rp_config_preset", "config", config));
  return rpi_config_preset(name, config);
}

const char *rp_preset_name(int index) { return rpi_preset_name(index); }

rp_status rp_config_set(rp_config *config, const char *name, const char *value) {
  RPI_TRY(check_given("rp_config_set", "config", config));
  RPI_TRY(check_given("rp_config_set", "name", name));
  RPI_TRY(check_given("rp_config_set", "value", value));
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rpi_config_set(config, name, value);
  rpi_float_leave(caller);
  return status;
}

rp_status rp_config_get(const rp_config *config, const char *name, char *text, size_t size) {
  RPI_TRY(check_given("rp_config_get", "config", config));
  RPI_TRY(check_given("rp_config_get", "name", name));
  if (size > 0) RPI_TRY(check_given("rp_config_get", "text", text));
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rpi_config_get(config, name, text, size);
  rpi_float_leave(caller);
  return status;
}

const char *rp_config_field(int index) { return rpi_config_field(index); }

rp_status rp_config_check(const rp_config *config) {
  RPI_TRY(check_given("rp_config_check", "config", config));
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rpi_config_check(config);
  rpi_float_leave(caller);
  return status;
}

rp_status rp_config_load(const char *path, rp_config *config) {
  RPI_TRY(check_given("rp_config_load", "path", path));
  RPI_TRY(check_given("rp_config_load", "config", config));
  const int cancel = rpi_cancel_enter();
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rpi_weights_config(path, config);
  rpi_float_leave(caller);
  rpi_cancel_leave(cancel);
  return status;
}

/* A rate has no status beside it: NaN says that there is none, and the sentence why. */
double rp_learning_rate(const rp_config *config, int64_t t) {
  if (rp_config_check(config) != RP_OK) return NAN;
  if (t < 1) {
    rpi_fail(RP_ERROR_ARGUMENT, "rp_learning_rate: t=%lld, must be 1 or more", (rpi_wide)t);
    return NAN;
  }
  const rpi_float_state caller = rpi_float_enter(false);
  const double rate = rpi_learning_rate(config, t);
  rpi_float_leave(caller);
  return rate;
}
