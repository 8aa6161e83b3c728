/* SPDX-License-Identifier: Apache-2.0
 *
 * test_config.c: model/config.c and the public functions of api_config.c. Fields by name, text
 * that reads back, presets, and what is not a model.
 */
#include "model/config.h"

#include <fenv.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>

#include "base/rng.h"
#include "check.h"

static rp_config tiny(void) { return rp_config_default(); }

/* ---- names --------------------------------------------------------------- */

/* Every byte of rp_config is a field's, but for the size at its start and padding: a field that
 * the table forgets leaves a hole of its own size. */
static void test_every_field_is_there(void) {
  rp_config config = tiny();
  unsigned char touched[sizeof config];
  memset(touched, 0, sizeof touched);
  for (int i = 0; rp_config_field(i) != NULL; i++) {
    const char *const name = rp_config_field(i);
    char text[64];
    if (!CHECK_INT(rp_config_get(&config, name, text, sizeof text), RP_OK)) continue;
    /* two settings that differ in every byte would be needed to see all: a marked struct instead */
    rp_config low, high;
    memset(&low, 0, sizeof low);
    memset(&high, 0xFF, sizeof high);
    low.struct_size = high.struct_size = sizeof low;
    CHECK_INT(rp_config_set(&low, name, text), RP_OK);
    CHECK_INT(rp_config_set(&high, name, text), RP_OK);
    const unsigned char *const a = (const unsigned char *)&low;
    const unsigned char *const b = (const unsigned char *)&high;
    for (size_t byte = sizeof low.struct_size; byte < sizeof low; byte++) {
      if (a[byte] != b[byte]) continue;
      CHECK_INT(touched[byte], 0);
      touched[byte] = 1;
    }
  }
  const size_t expected[] = {offsetof(rp_config, width), offsetof(rp_config, seed)};
  CHECK(touched[expected[0]] && touched[expected[1]]);
  size_t hole = 0;
  for (size_t byte = sizeof config.struct_size; byte < sizeof config; byte++) {
    hole = touched[byte] ? 0 : hole + 1;
    CHECK(hole <= 4); /* an int before something that is aligned to 8 */
    if (hole == 4) CHECK(byte % 8 == 7);
  }
}

static void test_names(void) {
  CHECK(rp_config_field(-1) == NULL);
  CHECK(rp_config_field(RPI_CONFIG_FIELDS) == NULL);
  CHECK(rp_config_field(1 << 30) == NULL);
  for (int i = 0; i < RPI_CONFIG_FIELDS; i++) {
    for (int j = 0; j < i; j++) CHECK(strcmp(rp_config_field(i), rp_config_field(j)) != 0);
  }
  CHECK_TEXT(rp_config_field(0), "width");
  CHECK_TEXT(rp_config_field(RPI_CONFIG_FIELDS - 1), "seed");
}

static void test_unknown_names(void) {
  static const char *const pairs[][2] = {
      {"enocder.k", "encoder.k"},
      {"k", "encoder.k"},
      {"widht", "width"},
      {"Dropout", "dropout"},
      {"atention_dropout", "attention_dropout"},
      {"decoder.per-head", "decoder.per_head"},
      {"", "k"},
      {"encoder.k ", "encoder.k"},
      {"warmup_steps", "warmup"},
      {"clip", "'clip_norm'"},
      {"grad_clip", "'clip_norm'"},
      {"vocab", "_vocabulary'"},
      {"encoder.Relation", "'encoder.relations'"},
  };
  rp_config config = tiny(), before = config;
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
    char sentence[128], text[64] = "untouched";
    snprintf(sentence, sizeof sentence, "there is no field '%s'; the nearest is '", pairs[i][0]);
    CHECK_INT(rp_config_set(&config, pairs[i][0], "1"), RP_ERROR_ARGUMENT);
    CHECK_TEXT(rp_last_error(), sentence);
    CHECK_TEXT(rp_last_error(), pairs[i][1]);
    CHECK_INT(rp_config_get(&config, pairs[i][0], text, sizeof text), RP_ERROR_ARGUMENT);
    CHECK_TEXT(rp_last_error(), sentence);
    CHECK_TEXT(text, "untouched");
  }
  char long_name[5000];
  memset(long_name, '\xff', sizeof long_name);
  long_name[sizeof long_name - 1] = '\0';
  CHECK_INT(rp_config_set(&config, long_name, "1"), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "no field '????????");
  CHECK_TEXT(rp_last_error(), "?...'; the nearest is '");
  CHECK(memcmp(&config, &before, sizeof config) == 0);
}

/* ---- values -------------------------------------------------------------- */

static void set_to(const char *name, const char *value, const char *expected) {
  rp_config config = tiny();
  char text[64];
  if (!CHECK_INT(rp_config_set(&config, name, value), RP_OK)) printf(": %s", rp_last_error());
  CHECK_INT(rp_config_get(&config, name, text, sizeof text), RP_OK);
  if (!CHECK(strcmp(text, expected) == 0)) printf(": %s is %s, not %s", name, text, expected);
}

static void set_refused(const char *name, const char *value, const char *sentence) {
  rp_config config = tiny(), before = config;
  if (!CHECK_INT(rp_config_set(&config, name, value), RP_ERROR_ARGUMENT)) {
    printf(": %s took '%s'", name, value);
  }
  CHECK_TEXT(rp_last_error(), name);
  CHECK_TEXT(rp_last_error(), sentence);
  CHECK(memcmp(&config, &before, sizeof config) == 0);
}

static void test_integers(void) {
  set_to("encoder.k", "16", "16");
  set_to("encoder.k", "0", "0");
  set_to("encoder.k_right", "-1", "-1");
  set_to("decoder.k", "0016", "16");
  set_to("steps", "1099511627776", "1099511627776");
  set_to("seed", "18446744073709551615", "18446744073709551615");
  static const char *const no_numbers[] = {"",   "-",  "+1", " 1",   "1 ",   "1.0", "1e3",
                                           "0x", "1_", "٣",  "12a4", "1\n2", "--1", "1,000"};
  for (size_t i = 0; i < sizeof no_numbers / sizeof no_numbers[0]; i++) {
    set_refused("encoder.k", no_numbers[i], "must be a whole number from 0 to 1048576");
    set_refused("seed", no_numbers[i], "must be a whole number from 0 to 18446744073709551615");
  }
  set_refused("seed", "-1", "'-1', must be");
  set_refused("seed", "18446744073709551616", "'18446744073709551616', must be");
  set_refused("seed", "99999999999999999999", "must be");
  set_refused("encoder.k", "9223372036854775807", "must be");
  set_refused("encoder.k", "9223372036854775808", "must be");
  set_refused("encoder.k", "-9223372036854775808", "must be");
  set_refused("encoder.k", "-9223372036854775809", "must be");
  set_refused("encoder.k", "18446744073709551617", "must be"); /* 2^64 + 1 */
  set_refused("encoder.k", "1048577", "'1048577', must be a whole number from 0 to 1048576");
  set_refused("encoder.k_right", "-2", "must be a whole number from -1 to 1048576");
}

static void test_numbers(void) {
  set_to("dropout", "0.1", "0.1");
  set_to("dropout", ".25", "0.25");
  set_to("dropout", "0.", "0");
  set_to("dropout", "-0", "-0");
  set_to("dropout", "1e-1", "0.1");
  set_to("dropout", "10E-2", "0.1");
  set_to("dropout", "0.0001", "0.0001");
  set_to("dropout", "0.00001", "1e-05");
  set_to("adam_epsilon", "1e-9", "1e-09");
  set_to("adam_epsilon", "0.000000001", "1e-09");
  set_to("learning_rate", "123456.75", "123456.75");
  set_to("learning_rate", "1e+5", "100000");
  set_to("learning_rate", "0.1000000000000000055511151231257827", "0.1");
  set_to("learning_rate", "0.30000000000000004", "0.30000000000000004");
  set_to("learning_rate", "1e-99999999", "0");
  set_to("clip_norm", "1e16", "1e+16");
  set_to("clip_norm", "1234567890123456", "1234567890123456");
  set_to("clip_norm", "12345678901234567", "1.2345678901234568e+16");
  static const char *const no_numbers[] = {"",      "-",
                                           ".",     "e5",
                                           "1e",    "1e+",
                                           "1e+-1", "1.2.3",
                                           " 1",    "1 ",
                                           "+1",    "0x1p3",
                                           "1,5",   "nan",
                                           "NaN",   "inf",
                                           "-inf",  "infinity",
                                           "1f",    "1e5.0",
                                           "1d3",   "1e99999999999999999999"};
  for (size_t i = 0; i < sizeof no_numbers / sizeof no_numbers[0]; i++) {
    set_refused("learning_rate", no_numbers[i], "must be a number from 0 to 1e+06");
  }
  set_refused("learning_rate", "1e400", "must be a number from 0");
  set_refused("learning_rate", "-0.001", "must be a number from 0");
  set_refused("dropout", "1", "'1', must be a number from 0 to below 1");
  set_refused("final_rate", "1.5", "must be a number from 0 to 1");
  char digits[300];
  memset(digits, '0', sizeof digits);
  digits[sizeof digits - 1] = '\0';
  set_refused("learning_rate", digits, "'000000000000000000000000000000000000000000000000...'");
}

/* Every double reads back as itself, with no digit too many. */
static void test_numbers_read_back(void) {
  rp_config config = tiny();
  int checked = 0;
  for (uint32_t i = 0; i < 20000; i++) {
    const rpi_philox_block random =
        rpi_philox((rpi_philox_block){{i}}, (rpi_philox_key){{1, 2}}, 7);
    const uint64_t bits = (uint64_t)random.word[0] << 32 | random.word[1];
    double value;
    memcpy(&value, &bits, sizeof value);
    if (i % 2 == 0) value = (double)(random.word[0] % 100000) / pow(10, random.word[1] % 9);
    value = fabs(value);
    if (!(value <= 1e30)) continue;
    config.clip_norm = value;
    char text[64];
    if (!CHECK_INT(rp_config_get(&config, "clip_norm", text, sizeof text), RP_OK)) return;
    config.clip_norm = -1;
    CHECK_INT(rp_config_set(&config, "clip_norm", text), RP_OK);
    if (!CHECK(memcmp(&config.clip_norm, &value, sizeof value) == 0)) {
      printf(": %.17g became %s", value, text);
    }
    CHECK(strlen(text) < RPI_CONFIG_TEXT - 1);
    char shorter[64]; /* one digit fewer says another number */
    int digits = 0;
    for (const char *letter = text; *letter != '\0' && *letter != 'e'; letter++) {
      if (digits > 0 || (*letter >= '1' && *letter <= '9')) digits += *letter != '.';
    }
    const char *const exponent = strchr(text, 'e');
    if (digits > 1 && digits <= 17 && (exponent != NULL || strchr(text, '.') != NULL)) {
      snprintf(shorter, sizeof shorter, "%.*e", digits - 2, value);
      CHECK(strtod(shorter, NULL) != value);
      checked++;
    }
  }
  CHECK(checked > 5000);
}

/* The caller's rounding changes neither what is read and written nor a rate, and is his own again.
 */
static void test_rounding(void) {
  static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  rp_config config = tiny();
  CHECK_INT(rp_config_set(&config, "schedule", "noam"), RP_OK);
  const double rate = rp_learning_rate(&config, 7);
  for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
    fesetround(modes[i]);
    const rp_status set = rp_config_set(&config, "beta2", "0.98");
    char text[64];
    const rp_status got = rp_config_get(&config, "beta2", text, sizeof text);
    const double same = rp_learning_rate(&config, 7);
    const int mode = fegetround();
    fesetround(FE_TONEAREST);
    CHECK_INT(set, RP_OK);
    CHECK_INT(got, RP_OK);
    CHECK(config.beta2 == 0.98);
    CHECK_TEXT(text, "0.98");
    CHECK(same == rate);
    CHECK_INT(mode, modes[i]);
  }
}

/* A caller who traps on an invalid operation is not trapped by ours. */
static void test_no_exception_is_the_callers(void) {
  rp_config config = tiny();
  config.learning_rate = NAN;
  feclearexcept(FE_ALL_EXCEPT);
  const rp_status status = rp_config_check(&config);
  CHECK_INT(fetestexcept(FE_ALL_EXCEPT), 0);
  CHECK_INT(status, RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "learning_rate=nan");
}

/* A comma in the user's locale changes nothing. */
static void test_locale(void) {
  static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "de_DE"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (setlocale(LC_ALL, names[i]) != NULL) break;
  }
  test_numbers();
  setlocale(LC_ALL, "C");
}

static void test_switches(void) {
  set_to("bias", "true", "true");
  set_to("bias", "1", "true");
  set_to("bias", "false", "false");
  set_to("encoder.tied", "0", "false");
  set_refused("bias", "True", "bias='True', must be true, false, 1 or 0");
  set_refused("bias", "yes", "must be true, false, 1 or 0");
  set_refused("bias", "", "must be true, false, 1 or 0");
  set_refused("bias", "10", "must be true, false, 1 or 0");
}

static void test_choices(void) {
  static const struct {
    const char *field, *names[12];
  } choices[] = {
      {"decoder.position",
       {"none", "shaw", "transformer-xl", "music", "t5", "deberta", "relative-key",
        "relative-key-query", "alibi", "alibi-learned", "rope"}},
      {"encoder.absolute", {"none", "sinusoidal", "learned"}},
      {"encoder.sinusoid_rule", {"open", "closed"}},
      {"encoder.beyond", {"clip", "none"}},
      {"encoder.rope_rule", {"linear", "ntk"}},
      {"norm", {"pre", "post"}},
      {"activation", {"relu", "gelu", "swiglu"}},
      {"smoothing", {"all", "others"}},
      {"schedule", {"constant", "noam", "inverse-sqrt", "cosine", "linear"}},
  };
  for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++) {
    for (size_t j = 0; choices[i].names[j] != NULL; j++) {
      set_to(choices[i].field, choices[i].names[j], choices[i].names[j]);
    }
    set_refused(choices[i].field, "", "must be one of ");
    set_refused(choices[i].field, "0", "the nearest is '");
  }
  rp_config config = tiny(); /* by the numbers of the header */
  CHECK_INT(rp_config_set(&config, "decoder.position", "rope"), RP_OK);
  CHECK_INT(config.decoder.position, RP_POSITION_ROPE);
  CHECK_INT(config.encoder.position, RP_POSITION_SHAW);
  CHECK_INT(rp_config_set(&config, "schedule", "linear"), RP_OK);
  CHECK_INT(config.schedule, RP_SCHEDULE_LINEAR);
  CHECK_INT(rp_config_set(&config, "encoder.beyond", "none"), RP_OK);
  CHECK_INT(config.encoder.beyond, RP_BEYOND_NONE);
  CHECK_INT(rp_config_set(&config, "encoder.sinusoid_rule", "closed"), RP_OK);
  CHECK_INT(config.encoder.sinusoid_rule, RP_FREQUENCIES_CLOSED);
  set_refused("activation", "gleu", "must be one of relu, gelu, swiglu; the nearest is 'gelu'");
  set_refused("activation", "GELU",
              "activation='GELU', must be one of relu, gelu, swiglu; the "
              "nearest is 'gelu'");
  set_refused("schedule", "inverse_sqrt", "the nearest is 'inverse-sqrt'");
  set_refused("encoder.position", "Shaw", "the nearest is 'shaw'");
}

static void test_text_is_cut(void) {
  const rp_config config = tiny();
  char text[8] = "abcdefg";
  CHECK_INT(rp_config_get(&config, "encoder.position", text, 4), RP_OK);
  CHECK(memcmp(text, "sha\0efg", 8) == 0);
  CHECK_INT(rp_config_get(&config, "encoder.position", text, 1), RP_OK);
  CHECK(memcmp(text, "\0ha\0efg", 8) == 0);
  CHECK_INT(rp_config_get(&config, "encoder.position", NULL, 0), RP_OK);
}

/* ---- presets ----------------------------------------------------------------------------------
 */

static void test_presets(void) {
  static const char *const names[] = {"tiny",
                                      "tiny-language",
                                      "small",
                                      "small-language",
                                      "paper-base",
                                      "paper-big",
                                      "paper-big-enfr",
                                      "paper-base-absolute",
                                      "paper-big-absolute",
                                      "paper-big-enfr-absolute",
                                      "t2t-relative"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    CHECK(strcmp(rp_preset_name((int)i), names[i]) == 0);
    rp_config config;
    CHECK_INT(rp_config_preset(names[i], &config), RP_OK);
    if (!CHECK_INT(rp_config_check(&config), RP_OK)) printf(": %s", rp_last_error());
    /* all of it by text: every field of every preset reads back */
    rp_config copy;
    memset(&copy, 0, sizeof copy);
    copy.struct_size = sizeof copy;
    for (int f = 0; rp_config_field(f) != NULL; f++) {
      char text[64];
      CHECK_INT(rp_config_get(&config, rp_config_field(f), text, sizeof text), RP_OK);
      CHECK_INT(rp_config_set(&copy, rp_config_field(f), text), RP_OK);
    }
    CHECK(memcmp(&copy, &config, sizeof copy) == 0);
  }
  CHECK(rp_preset_name(sizeof names / sizeof names[0]) == NULL);
  CHECK(rp_preset_name(-1) == NULL);
  const rp_config first = rp_config_default();
  rp_config config;
  CHECK_INT(rp_config_preset("tiny", &config), RP_OK);
  CHECK(memcmp(&first, &config, sizeof first) == 0);
  CHECK_INT(rp_config_preset("paper-bsae", &config), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "there is no preset 'paper-bsae'; the nearest is 'paper-base'");
  CHECK_INT(rp_config_preset("PAPER_BIG", &config), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "the nearest is 'paper-big'");
  CHECK_INT(rp_config_preset("base", &config), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "the nearest is 'paper-base'");
  CHECK_INT(rp_config_preset("absolute", &config), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "-absolute'");
  CHECK(memcmp(&first, &config, sizeof first) == 0);
}

/* What the paper says, once more by hand. */
static void test_the_paper(void) {
  rp_config c;
  CHECK_INT(rp_config_preset("paper-base", &c), RP_OK);
  CHECK_INT(c.width, 512);
  CHECK_INT(c.heads, 8);
  CHECK_INT(rpi_head_width(&c), 64);
  CHECK_INT(c.feed_forward, 1024);
  CHECK(c.encoder.layers == 6 && c.decoder.layers == 6);
  CHECK(c.encoder.k == 16 && c.encoder.per_layer && c.encoder.per_head && c.decoder.k == 16);
  CHECK_INT(c.encoder.absolute, RP_ABSOLUTE_NONE);
  CHECK(c.dropout == 0.1 && c.beta2 == 0.98 && c.warmup == 4000);
  CHECK_INT(rp_config_preset("paper-big", &c), RP_OK);
  CHECK(c.width == 1024 && c.heads == 16 && c.feed_forward == 4096 && c.dropout == 0.3);
  CHECK(c.encoder.k == 8 && c.encoder.per_layer && !c.encoder.per_head);
  CHECK_INT(rpi_head_width(&c), 64);
  CHECK_INT(rp_config_preset("paper-big-enfr", &c), RP_OK);
  CHECK(c.dropout == 0.1);
  CHECK_INT(rp_config_preset("paper-base-absolute", &c), RP_OK);
  CHECK(c.encoder.position == RP_POSITION_NONE && c.decoder.absolute == RP_ABSOLUTE_SINUSOIDAL);
  CHECK_INT(rp_config_preset("t2t-relative", &c), RP_OK);
  CHECK(c.encoder.k == 20 && !c.decoder.per_head && c.beta2 == 0.997 && c.learning_rate == 2);
  CHECK_INT(rp_config_preset("small-language", &c), RP_OK);
  CHECK(c.encoder.layers == 0 && c.decoder.layers == 2 && c.width == 128);
}

/* ---- what is no model ---------------------------------------------------- */

static void refused(const rp_config *config, rp_status status, const char *sentence) {
  CHECK_INT(rp_config_check(config), status);
  CHECK_TEXT(rp_last_error(), sentence);
}

#define REFUSED(status, sentence, ...)                                                             \
  do {                                                                                             \
    rp_config c = tiny();                                                                          \
    __VA_ARGS__;                                                                                   \
    refused(&c, (status), (sentence));                                                             \
  } while (0)
#define TAKEN(...)                                                                                 \
  do {                                                                                             \
    rp_config c = tiny();                                                                          \
    __VA_ARGS__;                                                                                   \
    if (!CHECK_INT(rp_config_check(&c), RP_OK)) printf(": %s", rp_last_error());                   \
  } while (0)

static void test_ranges(void) {
  REFUSED(RP_ERROR_SHAPE, "config: width=0, must be a whole number from 1 to 65536", c.width = 0);
  REFUSED(RP_ERROR_SHAPE, "config: width=-64,", c.width = -64);
  REFUSED(RP_ERROR_SHAPE, "config: heads=4611686018427387904,", c.heads = INT64_C(1) << 62);
  REFUSED(RP_ERROR_SHAPE, "config: encoder.k=-1, must be a whole number from 0", c.encoder.k = -1);
  REFUSED(RP_ERROR_SHAPE, "config: decoder.k_right=-2", c.decoder.k_right = -2);
  REFUSED(RP_ERROR_SHAPE, "config: decoder.window=-2, must be a whole number from -1",
          c.decoder.window = -2);
  REFUSED(RP_ERROR_SHAPE, "config: max_length=0", c.max_length = 0);
  REFUSED(RP_ERROR_ARGUMENT, "config: dropout=1, must be a number from 0 to below 1",
          c.dropout = 1);
  REFUSED(RP_ERROR_ARGUMENT, "config: dropout=nan", c.dropout = NAN);
  REFUSED(RP_ERROR_ARGUMENT, "config: learning_rate=inf", c.learning_rate = INFINITY);
  REFUSED(RP_ERROR_ARGUMENT, "config: adam_epsilon=0, must be a number from 1e-18",
          c.adam_epsilon = 0);
  REFUSED(RP_ERROR_ARGUMENT, "config: bias=2, must be true, false, 1 or 0", c.bias = 2);
  REFUSED(RP_ERROR_ARGUMENT, "config: norm=2, must be one of pre, post", c.norm = 2);
  REFUSED(RP_ERROR_ARGUMENT, "config: encoder.position=11, must be one of none, shaw",
          c.encoder.position = 11);
  REFUSED(RP_ERROR_ARGUMENT, "config: encoder.position=-1", c.encoder.position = -1);
  REFUSED(RP_ERROR_ARGUMENT, "config: schedule=5, must be one of constant, noam", c.schedule = 5);
  REFUSED(RP_ERROR_ARGUMENT, "config: encoder.softcap=1e-31, must be 0 (none) or from 1e-30",
          c.encoder.softcap = 1e-31);
  TAKEN(c.encoder.softcap = 30);
  char text[32];
  rp_config c = tiny();
  c.encoder.position = 11;
  CHECK_INT(rp_config_get(&c, "encoder.position", text, sizeof text), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "config: encoder.position=11, must be one of");
}

static void test_tables_of_values(void) {
  set_to("encoder.value_per_head", "false", "false");
  set_to("decoder.value_per_layer", "true", "true");
  set_to("decoder.value_per_layer", "as-keys", "as-keys");
  set_refused("encoder.value_per_head", "1", "must be one of as-keys, false, true");
  TAKEN(c.encoder.value_per_head = RP_VALUES_SHARED);
  TAKEN(c.encoder.tied = 1; c.encoder.value_per_head = RP_VALUES_OWN);
  REFUSED(RP_ERROR_ARGUMENT, "config: encoder.value_per_head=3", c.encoder.value_per_head = 3);
  REFUSED(RP_ERROR_ARGUMENT,
          "config: encoder.value_per_head=false with encoder.tied=true, must be as-keys or "
          "encoder.per_head's: keys and values have one table",
          c.encoder.tied = 1;
          c.encoder.value_per_head = RP_VALUES_SHARED);
  REFUSED(RP_ERROR_ARGUMENT, "config: decoder.value_per_layer=true with decoder.tied=true",
          c.decoder.tied = 1;
          c.decoder.per_layer = 0; c.decoder.value_per_layer = RP_VALUES_OWN);
  TAKEN(c.decoder.position = RP_POSITION_T5; c.decoder.tied = 1;
        c.decoder.value_per_head = RP_VALUES_SHARED); /* it has no such table */
  REFUSED(RP_ERROR_ARGUMENT, "config: decoder.value_per_head=false with decoder.tied=true",
          c.decoder.position = RP_POSITION_T5;
          c.decoder.tied = 1; c.decoder.relations = 2; c.decoder.value_per_head = RP_VALUES_SHARED);
}

static void test_sizes_together(void) {
  REFUSED(RP_ERROR_SHAPE, "width=64, must be a multiple of heads=5, or head_width be given",
          c.heads = 5);
  TAKEN(c.heads = 5; c.head_width = 7);
  TAKEN(c.heads = 4; c.key_heads = 4);
  TAKEN(c.heads = 4; c.key_heads = 1);
  REFUSED(RP_ERROR_SHAPE, "config: key_heads=3, must be 0 or divide heads=4", c.heads = 4;
          c.key_heads = 3);
  REFUSED(RP_ERROR_SHAPE, "config: key_heads=8, must be 0 or divide heads=4", c.heads = 4;
          c.key_heads = 8);
  TAKEN(c.heads = c.key_heads = 4; c.decoder.position = RP_POSITION_DEBERTA);
  TAKEN(c.heads = 4; c.key_heads = 2; c.decoder.position = RP_POSITION_DEBERTA; c.decoder.key = 0);
  REFUSED(RP_ERROR_ARGUMENT,
          "config: key_heads=2 with decoder.position=deberta and decoder.key=true, must be 0 or "
          "heads=4",
          c.heads = 4;
          c.key_heads = 2; c.decoder.position = RP_POSITION_DEBERTA);
  REFUSED(RP_ERROR_ARGUMENT, "config: key_heads=1 with encoder.position=deberta", c.heads = 4;
          c.key_heads = 1; c.encoder.position = RP_POSITION_DEBERTA);
  REFUSED(RP_ERROR_SHAPE, "encoder.layers=0 and decoder.layers=0", c.encoder.layers = 0;
          c.decoder.layers = 0);
  REFUSED(RP_ERROR_SHAPE,
          "share_embeddings=true with source_vocabulary=256 and target_vocabulary=300, must be "
          "equal",
          c.target_vocabulary = 300);
  TAKEN(c.target_vocabulary = 300; c.share_embeddings = 0);
  REFUSED(RP_ERROR_SHAPE, "source_vocabulary=0, must be 1 or more with encoder.layers=2",
          c.source_vocabulary = 0);
  REFUSED(RP_ERROR_SHAPE, "target_vocabulary=0, must be 1 or more with decoder.layers=2",
          c.target_vocabulary = 0);
  TAKEN(c.source_vocabulary = 0; c.encoder.layers = 0); /* a language model */
  TAKEN(c.target_vocabulary = 0; c.decoder.layers = 0);
  TAKEN(c.target_vocabulary = 300; c.encoder.layers = 0);
}

static void test_positions_together(void) {
  REFUSED(RP_ERROR_ARGUMENT, "encoder.key=false and encoder.value=false, one of them must be true",
          c.encoder.key = 0;
          c.encoder.value = 0);
  REFUSED(RP_ERROR_ARGUMENT, "with position deberta", c.decoder.position = RP_POSITION_DEBERTA;
          c.decoder.key = c.decoder.value = 0);
  TAKEN(c.decoder.position = RP_POSITION_DEBERTA; c.decoder.value = 0; c.decoder.tied = 1);
  TAKEN(c.encoder.key = 0);
  TAKEN(c.encoder.value = 0; c.decoder.k = 0);
  REFUSED(RP_ERROR_ARGUMENT, "encoder.tied=true, must be false unless encoder.key and",
          c.encoder.tied = 1;
          c.encoder.value = 0);
  TAKEN(c.encoder.tied = 1);
  /* a stack that is left out may say anything that has a name */
  TAKEN(c.encoder.layers = 0; c.encoder.key = c.encoder.value = 0);

  REFUSED(RP_ERROR_SHAPE, "encoder.buckets=31, must be even, 4 or more with position t5",
          c.encoder.position = RP_POSITION_T5;
          c.encoder.buckets = 31);
  REFUSED(RP_ERROR_SHAPE, "encoder.buckets=2, must be even, 4 or more",
          c.encoder.position = RP_POSITION_T5;
          c.encoder.buckets = 2);
  REFUSED(RP_ERROR_SHAPE, "decoder.buckets=1, must be 2 or more", c.decoder.buckets = 1;
          c.decoder.position = RP_POSITION_T5);
  REFUSED(RP_ERROR_SHAPE, "encoder.max_distance=8, must be above 8: so many near distances",
          c.encoder.position = RP_POSITION_T5;
          c.encoder.max_distance = 8);
  TAKEN(c.encoder.position = RP_POSITION_T5; c.encoder.max_distance = 9);
  REFUSED(RP_ERROR_SHAPE, "decoder.max_distance=16, must be above 16",
          c.decoder.position = RP_POSITION_T5;
          c.decoder.max_distance = 16);
  TAKEN(c.decoder.position = RP_POSITION_T5; c.decoder.buckets = 31);
  REFUSED(RP_ERROR_SHAPE, "encoder.buckets=1, must be 0 (none) or 2 or more with position deberta",
          c.encoder.position = RP_POSITION_DEBERTA;
          c.encoder.buckets = 1);
  REFUSED(RP_ERROR_SHAPE, "encoder.max_distance=17, must be at least buckets / 2 + 2 = 18",
          c.encoder.position = RP_POSITION_DEBERTA;
          c.encoder.max_distance = 17);
  TAKEN(c.encoder.position = RP_POSITION_DEBERTA; c.encoder.buckets = 0;
        c.encoder.max_distance = 0);
  REFUSED(RP_ERROR_SHAPE, "width=63, must be even with decoder.position=transformer-xl",
          c.decoder.position = RP_POSITION_TRANSFORMER_XL;
          c.width = 63; c.head_width = 8);
}

static void test_rope_together(void) {
  REFUSED(RP_ERROR_SHAPE, "encoder.rope_width=18, must not exceed the head width 16",
          c.encoder.position = RP_POSITION_ROPE;
          c.encoder.rope_width = 18);
  REFUSED(RP_ERROR_SHAPE, "turns 7 columns, must be an even number",
          c.encoder.position = RP_POSITION_ROPE;
          c.encoder.rope_width = 7);
  REFUSED(RP_ERROR_SHAPE, "turns 15 columns, must be an even number",
          c.encoder.position = RP_POSITION_ROPE;
          c.head_width = 15);
  TAKEN(c.encoder.position = RP_POSITION_ROPE; c.head_width = 15; c.encoder.rope_width = 14);
  REFUSED(RP_ERROR_SHAPE, "encoder.rope_rule=ntk turns 2 columns, must be 4 or more",
          c.encoder.position = RP_POSITION_ROPE;
          c.encoder.rope_rule = RP_ROPE_NTK; c.encoder.rope_width = 2);
  TAKEN(c.encoder.rope_width = 18; c.encoder.rope_rule = RP_ROPE_NTK); /* shaw: without effect */
}

static void test_relations_together(void) {
  TAKEN(c.encoder.relations = 5);
  REFUSED(RP_ERROR_ARGUMENT, "encoder.relation_key=false and encoder.relation_value=false",
          c.encoder.relations = 5;
          c.encoder.relation_key = c.encoder.relation_value = 0);
  REFUSED(RP_ERROR_ARGUMENT,
          "decoder.tied=true with decoder.relations=5, must be false unless decoder.relation_key",
          c.decoder.relations = 5;
          c.decoder.tied = 1; c.decoder.relation_value = 0);
  REFUSED(RP_ERROR_ARGUMENT, "encoder.relation_key=true with encoder.position=rope, must be false",
          c.encoder.relations = 5;
          c.encoder.position = RP_POSITION_ROPE);
  REFUSED(RP_ERROR_ARGUMENT, "encoder.position=transformer-xl, must be false",
          c.encoder.relations = 5;
          c.encoder.position = RP_POSITION_TRANSFORMER_XL);
  TAKEN(c.encoder.relations = 5; c.encoder.position = RP_POSITION_ROPE; c.encoder.relation_key = 0);
  TAKEN(c.encoder.relation_key = c.encoder.relation_value = 0);
}

static void test_training_together(void) {
  REFUSED(RP_ERROR_SHAPE,
          "smoothing=others spreads over the other classes, but target_vocabulary=1",
          c.smoothing = RP_SMOOTH_OTHERS;
          c.target_vocabulary = c.source_vocabulary = 1);
  REFUSED(RP_ERROR_SHAPE, "but source_vocabulary=1", c.smoothing = RP_SMOOTH_OTHERS;
          c.decoder.layers = 0; c.source_vocabulary = 1);
  TAKEN(c.target_vocabulary = c.source_vocabulary = 1);
  REFUSED(RP_ERROR_ARGUMENT, "warmup=0, must be 1 or more with schedule=inverse-sqrt",
          c.schedule = RP_SCHEDULE_INVERSE_SQRT;
          c.warmup = 0);
  TAKEN(c.schedule = RP_SCHEDULE_NOAM; c.warmup = 0);
  TAKEN(c.schedule = RP_SCHEDULE_CONSTANT; c.warmup = 0; c.steps = 0);
  REFUSED(RP_ERROR_ARGUMENT, "steps=0, must be 1 or more with schedule=cosine",
          c.schedule = RP_SCHEDULE_COSINE;
          c.warmup = c.steps = 0);
  REFUSED(RP_ERROR_ARGUMENT, "warmup=11, must not exceed steps=10 with schedule=linear",
          c.schedule = RP_SCHEDULE_LINEAR;
          c.warmup = 11; c.steps = 10);
  TAKEN(c.schedule = RP_SCHEDULE_LINEAR; c.warmup = c.steps = 10);
}

/* The largest model that passes: what it counts fits an int64_t, as config.h promises. */
static void test_sizes_do_not_overflow(void) {
  rp_config c = tiny();
  c.width = 1 << 16;
  c.heads = 1 << 10;
  c.head_width = 1 << 12;
  c.feed_forward = c.max_length = 1 << 20;
  c.source_vocabulary = c.target_vocabulary = 1 << 24;
  c.encoder.layers = c.decoder.layers = 1 << 10;
  c.encoder.k = c.decoder.k = c.encoder.relations = c.decoder.relations = 1 << 20;
  CHECK_INT(rp_config_check(&c), RP_OK);
  const double heads = (double)c.heads * (double)c.head_width, C = (double)c.width;
  const double layers = 2 * (double)c.encoder.layers;
  const double tables = 2 * heads * (2 * (double)c.encoder.k + 1 + (double)c.encoder.relations);
  const double layer = 8 * C * heads + 3 * C * (double)c.feed_forward + tables;
  const double all = layers * layer + 3 * (double)c.target_vocabulary * C + 2e6 * C;
  CHECK(all * 5 * sizeof(double) < 9.2e18);
}

static void test_struct_size_and_null(void) {
  REFUSED(RP_ERROR_ARGUMENT, "config: struct_size=0, must be", c.struct_size = 0);
  char text[32];
  rp_config c = tiny();
  c.struct_size -= 8;
  CHECK_INT(rp_config_set(&c, "width", "64"), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "start from rp_config_default() or a preset");
  CHECK_INT(rp_config_get(&c, "width", text, sizeof text), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "config: struct_size=");
  c = tiny();
  CHECK_INT(rp_config_preset(NULL, &c), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "rp_config_preset: name is NULL");
  CHECK_INT(rp_config_preset("tiny", NULL), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "rp_config_preset: config is NULL");
  CHECK_INT(rp_config_set(NULL, "width", "1"), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_config_set(&c, NULL, "1"), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_config_set(&c, "width", NULL), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "rp_config_set: value is NULL");
  CHECK_INT(rp_config_get(NULL, "width", text, sizeof text), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_config_get(&c, NULL, text, sizeof text), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_config_get(&c, "width", NULL, 1), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "rp_config_get: text is NULL");
  CHECK_INT(rp_config_check(NULL), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "rp_config_check: config is NULL");
}

int main(void) {
  test_every_field_is_there();
  test_names();
  test_unknown_names();
  test_integers();
  test_numbers();
  test_numbers_read_back();
  test_rounding();
  test_no_exception_is_the_callers();
  test_locale();
  test_switches();
  test_choices();
  test_text_is_cut();
  test_presets();
  test_the_paper();
  test_ranges();
  test_tables_of_values();
  test_sizes_together();
  test_positions_together();
  test_rope_together();
  test_relations_together();
  test_training_together();
  test_sizes_do_not_overflow();
  test_struct_size_and_null();
  return check_report();
}
