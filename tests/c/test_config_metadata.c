/* SPDX-License-Identifier: Apache-2.0
 *
 * test_config_metadata.c: file/config_metadata.c. Every preset and every field through a file and
 * back; metadata that are no configuration.
 */
#define _POSIX_C_SOURCE 200809L

#include "file/config_metadata.h"

#include "check.h"
#include "faults.h"

static rpi_config_pairs written; /* large, and it must not move */
static rpi_text_pair more[RPI_CONFIG_PAIRS + 1];

static void test_presets_come_back(void) {
  for (int i = 0; rp_preset_name(i) != NULL; i++) {
    rp_config config, back;
    CHECK_INT(rp_config_preset(rp_preset_name(i), &config), RP_OK);
    config.seed = UINT64_MAX - (uint64_t)i; /* not what any preset has */
    config.adam_epsilon = 1.0 / 3;
    config.decoder.k_right = 3;
    memset(&back, 7, sizeof back);
    reset();
    CHECK_INT(rpi_config_pairs_of(&config, &written), RP_OK);
    CHECK_INT(written.count, RPI_CONFIG_PAIRS);
    CHECK_INT(rpi_safetensors_write(path, written.pairs, written.count, NULL, 0), RP_OK);
    if (!CHECK_INT(rpi_config_load(path, &back, NULL), RP_OK)) printf(": %s", rp_last_error());
    CHECK(memcmp(&config, &back, sizeof config) == 0);
    CHECK_INT(memory.held, 0);
    CHECK_INT(faults.opened, 0);
  }
}

/* What files of before lack is as it was. */
static void test_a_file_from_before(void) {
  const rp_config config = rp_config_default();
  rp_config back;
  reset();
  CHECK_INT(rpi_config_pairs_of(&config, &written), RP_OK);
  int64_t kept = 0, lacking = 0;
  for (int64_t i = 0; i < written.count; i++) {
    const char *const key = written.pairs[i].key;
    const bool late = strstr(key, ".value_per_") || strcmp(key, "key_heads") == 0;
    CHECK_INT(late, i > 0 && rpi_config_may_lack((int)i - 1));
    lacking += late;
    if (!late) more[kept++] = written.pairs[i];
  }
  CHECK_INT(lacking, 5);
  CHECK_INT(rpi_safetensors_write(path, more, kept, NULL, 0), RP_OK);
  if (!CHECK_INT(rpi_config_load(path, &back, NULL), RP_OK)) printf(": %s", rp_last_error());
  CHECK(memcmp(&config, &back, sizeof config) == 0);
}

static void pairs_refused(const rpi_text_pair *pairs, int64_t count, const char *sentence) {
  rp_config config = rp_config_default(), before = config;
  CHECK_INT(rpi_safetensors_write(path, pairs, count, NULL, 0), RP_OK);
  CHECK_INT(rpi_config_load(path, &config, NULL), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), sentence);
  CHECK_TEXT(rp_last_error(), path);
  CHECK(memcmp(&config, &before, sizeof config) == 0);
  CHECK_INT(memory.held, 0);
}

static void load_refused(const char *sentence) {
  pairs_refused(written.pairs, written.count, sentence);
}

static void fill(void) {
  const rp_config config = rp_config_default();
  reset();
  CHECK_INT(rpi_config_pairs_of(&config, &written), RP_OK);
}

static void test_what_is_no_configuration(void) {
  for (int i = 0; i < RPI_CONFIG_PAIRS; i++) { /* each missing in turn */
    char sentence[96];
    if (i > 0 && rpi_config_may_lack(i - 1)) continue;
    fill();
    if (i == 0) snprintf(sentence, sizeof sentence, "its metadata have no 'format'");
    else snprintf(sentence, sizeof sentence, "its metadata lack '%s'", written.pairs[i].key);
    written.pairs[i] = written.pairs[--written.count];
    load_refused(sentence);
  }
  fill();
  written.pairs[0].value = "relpos 2";
  load_refused("cannot read the configuration in '");
  CHECK_TEXT(rp_last_error(), "its format is 'relpos 2', must be 'relpos 1'");
  fill();
  memcpy(more, written.pairs, sizeof written.pairs);
  more[RPI_CONFIG_PAIRS] = (rpi_text_pair){"encoder.kk", "1"};
  pairs_refused(more, RPI_CONFIG_PAIRS + 1,
                "there is no field 'encoder.kk'; the nearest is 'encoder.k'");
  fill();
  written.pairs[1].value = "wide";
  load_refused("config: width='wide', must be a whole number from 1");
  fill();
  written.pairs[1].value = "63"; /* a number, but no model: 4 heads */
  load_refused("config: width=63, must be a multiple of heads=4");
  const rpi_text_pair foreign[] = {{"made_by", "x"}, {"width", "wide"}};
  pairs_refused(foreign, 2, "its metadata have no 'format', must have 'relpos 1'");
  const rpi_text_pair later[] = {{"mode", "x"}, {"format", "relpos 2"}};
  pairs_refused(later, 2, "its format is 'relpos 2', must be 'relpos 1'");
  written.count = 0;
  load_refused("its metadata have no 'format', must have 'relpos 1'");
}

static void test_what_is_no_file(void) {
  rp_config config = rp_config_default(), before = config;
  CHECK_INT(rp_config_load(NULL, &config), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "rp_config_load: path is NULL");
  CHECK_INT(rp_config_load(path, NULL), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "rp_config_load: config is NULL");
  CHECK_INT(rp_config_load("/no/such/file", &config), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "cannot open '/no/such/file'");
  put("{}", 2);
  CHECK_INT(rp_config_load(path, &config), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "it ends after 2 bytes");
  CHECK(memcmp(&config, &before, sizeof config) == 0);
  config.norm = 9; /* has no name to be written */
  CHECK_INT(rpi_config_pairs_of(&config, &written), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "config: norm=9, must be one of pre, post");
}

int main(void) {
  if (!CHECK(make_folder())) return check_report();
  rpi_set_io(&faulty_io);
  rpi_set_allocator(&faulty_allocator);
  test_presets_come_back();
  test_a_file_from_before();
  test_what_is_no_configuration();
  test_what_is_no_file();
  CHECK(remove_folder());
  return check_report();
}
