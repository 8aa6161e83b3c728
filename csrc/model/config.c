/* SPDX-License-Identifier: Apache-2.0
 *
 * config.c: the fields of rp_config by name.
 *
 * One table says of every field its name, kind, place and range. Setting, getting, naming and the
 * check of ranges walk that table.
 *
 * Numbers are read and written without their decimal point, as digits and a power of ten, because
 * the C library writes and expects the point of the user's locale.
 */
#include "model/config.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the table of fields ------------------------------------------------- */

typedef enum kind { INTEGER, NUMBER, SWITCH, UNSIGNED, CHOICE } kind;

typedef struct field {
  const char *name;
  kind kind;
  size_t offset;
  int64_t least, most;        /* INTEGER */
  double low, high;           /* NUMBER */
  bool below;                 /* NUMBER: high itself is not allowed */
  const char *const *choices; /* CHOICE: names of 0, 1, ..., then NULL */
  bool late;                  /* files from before there was such a field mean 0 */
} field;

static const char *const positions[] = {
    "none",  "shaw",          "transformer-xl", "music",
    "t5",    "deberta",       "relative-key",   "relative-key-query",
    "alibi", "alibi-learned", "rope",           NULL};
static const char *const absolutes[] = {"none", "sinusoidal", "learned", NULL};
static const char *const frequency_rules[] = {"open", "closed", NULL};
static const char *const beyonds[] = {"clip", "none", NULL};
static const char *const rope_rules[] = {"linear", "ntk", NULL};
static const char *const values_own[] = {"as-keys", "false", "true", NULL};
static const char *const norms[] = {"pre", "post", NULL};
static const char *const activations[] = {"relu", "gelu", "swiglu", NULL};
static const char *const smoothings[] = {"all", "others", NULL};
static const char *const schedules[] = {"constant", "noam",   "inverse-sqrt",
                                        "cosine",   "linear", NULL};

#define PLACE(member) .name = #member, .offset = offsetof(rp_config, member)
#define COUNT(member, from, to) {PLACE(member), .kind = INTEGER, .least = (from), .most = (to)}
#define DECIMAL(member, from, to) {PLACE(member), .kind = NUMBER, .low = (from), .high = (to)}
#define SHARE(member) {PLACE(member), .kind = NUMBER, .low = 0, .high = 1, .below = true}
#define FLAG(member) {PLACE(member), .kind = SWITCH}
#define NAMED(member, names) {PLACE(member), .kind = CHOICE, .choices = (names)}
#define LATE(member, names) {PLACE(member), .kind = CHOICE, .choices = (names), .late = true}
#define LATE_COUNT(member, to) {PLACE(member), .kind = INTEGER, .most = (to), .late = true}

/* The sizes that multiply: 4 tables (keys and values of two stacks) x layers x heads x rows x head
 * width is below 2^56, as a length or k allows 2^21 rows. Everything else is smaller. */
#define LAYERS (1 << 10)
#define HEADS (1 << 10)
#define HEAD_WIDTH (1 << 12)
#define LENGTH (1 << 20)
#define WIDTH (1 << 16)
#define FEED_FORWARD (1 << 20)
#define VOCABULARY (1 << 24)
#define STEPS ((int64_t)1 << 40)

#define STACK(side)                                                                                \
  COUNT(side.layers, 0, LAYERS), NAMED(side.absolute, absolutes), FLAG(side.sinusoid_interleaved), \
      NAMED(side.sinusoid_rule, frequency_rules), COUNT(side.sinusoid_first, -LENGTH, LENGTH),     \
      NAMED(side.position, positions), COUNT(side.k, 0, LENGTH), COUNT(side.k_right, -1, LENGTH),  \
      NAMED(side.beyond, beyonds), FLAG(side.key), FLAG(side.value), FLAG(side.tied),              \
      FLAG(side.per_layer), FLAG(side.per_head), LATE(side.value_per_layer, values_own),           \
      LATE(side.value_per_head, values_own), COUNT(side.relations, 0, LENGTH),                     \
      FLAG(side.relation_key), FLAG(side.relation_value), COUNT(side.buckets, 0, LENGTH),          \
      COUNT(side.max_distance, 0, LENGTH), COUNT(side.clamp, 0, LENGTH),                           \
      DECIMAL(side.rope_base, 1e-3, 1e12), FLAG(side.rope_interleaved),                            \
      COUNT(side.rope_width, 0, HEAD_WIDTH), NAMED(side.rope_rule, rope_rules),                    \
      DECIMAL(side.rope_scaling, 1e-6, 1e6), COUNT(side.window, -1, LENGTH),                       \
      DECIMAL(side.softcap, 0, 1e30)

static const field fields[] = {
    COUNT(width, 1, WIDTH),
    COUNT(heads, 1, HEADS),
    COUNT(head_width, 0, HEAD_WIDTH),
    LATE_COUNT(key_heads, HEADS),
    COUNT(feed_forward, 1, FEED_FORWARD),
    COUNT(source_vocabulary, 0, VOCABULARY),
    COUNT(target_vocabulary, 0, VOCABULARY),
    FLAG(share_embeddings),
    FLAG(share_output),
    FLAG(scale_embeddings),
    COUNT(max_length, 1, LENGTH),
    NAMED(norm, norms),
    DECIMAL(norm_epsilon, 1e-30, 1),
    FLAG(bias),
    NAMED(activation, activations),
    STACK(encoder),
    STACK(decoder),
    SHARE(dropout),
    SHARE(attention_dropout),
    SHARE(activation_dropout),
    SHARE(label_smoothing),
    NAMED(smoothing, smoothings),
    NAMED(schedule, schedules),
    DECIMAL(learning_rate, 0, 1e6),
    COUNT(warmup, 0, STEPS),
    COUNT(steps, 0, STEPS),
    DECIMAL(final_rate, 0, 1),
    SHARE(beta1),
    SHARE(beta2),
    DECIMAL(adam_epsilon, 1e-18, 1),
    DECIMAL(weight_decay, 0, 1e3),
    DECIMAL(clip_norm, 0, 1e30),
    SHARE(ema),
    {PLACE(seed), .kind = UNSIGNED},
};

enum { FIELDS = sizeof fields / sizeof fields[0] };
_Static_assert((int)FIELDS == (int)RPI_CONFIG_FIELDS, "the table and config.h count alike");

const char *rpi_config_field(int index) {
  return index >= 0 && index < FIELDS ? fields[index].name : NULL;
}

bool rpi_config_may_lack(int index) { return fields[index].late; }

/* ---- names that are nearly right ----------------------------------------- */

enum { LONGEST_NAME = 40, COMPARED = 64 };

static char small_letter(char letter) {
  return letter >= 'A' && letter <= 'Z' ? (char)(letter - 'A' + 'a') : letter;
}

/* Letters to insert, delete or replace (Levenshtein), of the first letters of what was typed. */
static int distance_between(const char *typed, const char *name) {
  int row[LONGEST_NAME + 1]; /* from what was typed so far to the first j letters of name */
  const int length = (int)strlen(name);
  for (int j = 0; j <= length; j++) row[j] = j;
  for (int i = 0; i < COMPARED && typed[i] != '\0'; i++) {
    int corner = row[0];
    row[0] = i + 1;
    for (int j = 0; j < length; j++) {
      const int replaced = corner + (small_letter(typed[i]) != small_letter(name[j]));
      corner = row[j + 1];
      const int other = (row[j] < row[j + 1] ? row[j] : row[j + 1]) + 1;
      row[j + 1] = replaced < other ? replaced : other;
    }
  }
  return row[length];
}

/* A stack's field may have been meant by its last word alone: "k" is near to "encoder.k". */
static int distance_to_field(const char *typed, const char *name) {
  const char *const point = strchr(name, '.');
  const int whole = distance_between(typed, name);
  const int word = point != NULL ? distance_between(typed, point + 1) + 1 : whole;
  return word < whole ? word : whole;
}

/* Is a word of what was typed, of three letters or more, a part of this name? "clip" is of
 * "clip_norm", "base" of "paper-base". */
static bool shares_a_word(const char *typed, const char *name) {
  static const char between[] = ".-_ ";
  for (const char *word = typed; *word != '\0'; word += strspn(word, between)) {
    const size_t length = strcspn(word, between);
    for (const char *at = name; length >= 3 && strlen(at) >= length; at++) {
      size_t same = 0;
      while (same < length && small_letter(word[same]) == small_letter(at[same])) same++;
      if (same == length) return true;
    }
    word += length;
  }
  return false;
}

const char *rpi_nearest(const char *typed, const char *(*name_at)(int), const char *const *names) {
  enum { APART = LONGEST_NAME + COMPARED }; /* more than any distance */
  const char *best = NULL;
  int least = 0;
  for (int i = 0;; i++) {
    const char *const name = name_at != NULL ? name_at(i) : names[i];
    if (name == NULL) return best;
    const int distance = distance_to_field(typed, name) + (shares_a_word(typed, name) ? 0 : APART);
    if (best == NULL || distance < least) {
      best = name;
      least = distance;
    }
  }
}

static rp_status find_field(const char *name, const field **found) {
  for (int i = 0; i < FIELDS; i++) {
    if (strcmp(fields[i].name, name) != 0) continue;
    *found = &fields[i];
    return RP_OK;
  }
  char typed[RPI_QUOTE];
  return rpi_fail(RP_ERROR_ARGUMENT, "config: there is no field %s; the nearest is '%s'",
                  rpi_quote(name, typed), rpi_nearest(name, rpi_config_field, NULL));
}

/* ---- numbers as text ----------------------------------------------------- */

enum { DIGITS = 17, NUMBER_TEXT = 100 }; /* 17 significant digits tell any two doubles apart */

bool rpi_read_integer(const char *text, int64_t *value) {
  const bool negative = text[0] == '-';
  const char *digit = text + negative;
  int64_t sum = 0; /* negative: there is one more of those */
  if (*digit == '\0') return false;
  for (; *digit != '\0'; digit++) {
    if (*digit < '0' || *digit > '9') return false;
    if (__builtin_mul_overflow(sum, 10, &sum)) return false;
    if (__builtin_sub_overflow(sum, *digit - '0', &sum)) return false;
  }
  if (!negative && sum == INT64_MIN) return false;
  *value = negative ? sum : -sum;
  return true;
}

static bool read_unsigned(const char *text, uint64_t *value) {
  uint64_t sum = 0;
  if (*text == '\0') return false;
  for (; *text != '\0'; text++) {
    if (*text < '0' || *text > '9') return false;
    if (__builtin_mul_overflow(sum, 10u, &sum)) return false;
    if (__builtin_add_overflow(sum, (uint64_t)(*text - '0'), &sum)) return false;
  }
  *value = sum;
  return true;
}

/* [-]digits[.digits][e[+-]digits], or no digits on one side of the point. */
static bool read_number(const char *text, double *value) {
  char plain[NUMBER_TEXT + 16]; /* without the point */
  int length = 0, fraction = 0;
  bool digits = false, point = false;
  if (strlen(text) > NUMBER_TEXT) return false;
  if (*text == '-') plain[length++] = *text++;
  for (; (*text >= '0' && *text <= '9') || (*text == '.' && !point); text++) {
    if (*text == '.') {
      point = true;
      continue;
    }
    plain[length++] = *text;
    fraction += point;
    digits = true;
  }
  int64_t power = 0;
  if (digits && (*text == 'e' || *text == 'E')) {
    text += text[1] == '+' && text[2] != '-' ? 2 : 1;
    if (!rpi_read_integer(text, &power)) return false;
    text += strlen(text);
  }
  if (!digits || *text != '\0') return false;
  /* nothing changes beyond: NUMBER_TEXT digits cannot make up for it */
  power = power > 9999 ? 9999 : power < -9999 ? -9999 : power;
  snprintf(plain + length, sizeof plain - (size_t)length, "e%lld", (rpi_wide)power - fraction);
  *value = strtod(plain, NULL); /* infinite where it is too large: no range has that */
  return true;
}

/* The digits and the power of ten of the first: 0.025 is "25" and -2. */
static int digits_of(double value, int count, char digits[DIGITS + 1]) {
  char text[64];
  int length = 0;
  snprintf(text, sizeof text, "%.*e", count - 1, value);
  const char *letter = text;
  for (; *letter != 'e'; letter++) {
    if (*letter >= '0' && *letter <= '9') digits[length++] = *letter;
  }
  digits[length] = '\0';
  return atoi(letter + 1);
}

/* With the fewest digits that read back as the same number. */
static void write_number(double value, char text[RPI_CONFIG_TEXT]) {
  char digits[DIGITS + 1], plain[64];
  int count = 0, power;
  double back;
  do {
    power = digits_of(value, ++count, digits);
    snprintf(plain, sizeof plain, "%se%d", digits, power - (count - 1));
    back = strtod(plain, NULL);
  } while (back != fabs(value) && count < DIGITS);
  const char *const sign = signbit(value) ? "-" : "";
  const size_t size = RPI_CONFIG_TEXT;
  if (power < -4 || power >= DIGITS - 1) {
    snprintf(text, size, "%s%.1s%s%se%+03d", sign, digits, count > 1 ? "." : "", digits + 1, power);
  } else if (power < 0) {
    snprintf(text, size, "%s0.%.*s%s", sign, -power - 1, "0000", digits);
  } else if (count > power + 1) {
    snprintf(text, size, "%s%.*s.%s", sign, power + 1, digits, digits + power + 1);
  } else {
    snprintf(text, size, "%s%s%.*s", sign, digits, power + 1 - count, "0000000000000000");
  }
}

/* ---- one field ----------------------------------------------------------- */

/* What fits a field; which member is said by its kind. */
typedef union content {
  int64_t integer;
  double number;
  uint64_t natural;
  int choice; /* SWITCH too */
} content;

static size_t size_of(const field *f) {
  return f->kind == SWITCH || f->kind == CHOICE ? sizeof(int) : sizeof(int64_t);
}

static content load(const rp_config *config, const field *f) {
  content value;
  memset(&value, 0, sizeof value);
  memcpy(&value, (const char *)config + f->offset, size_of(f));
  return value;
}

static bool is_allowed(const field *f, content value) {
  int count = 2;
  switch (f->kind) {
    case INTEGER: return value.integer >= f->least && value.integer <= f->most;
    case NUMBER:
      return value.number >= f->low &&
             (f->below ? value.number < f->high : value.number <= f->high);
    case UNSIGNED: return true;
    case SWITCH: break;
    case CHOICE:
      for (count = 0; f->choices[count] != NULL;) count++;
  }
  return value.choice >= 0 && value.choice < count;
}

/* What may stand there, to follow "must be ". */
static const char *allowed(const field *f, char *text, size_t size) {
  int length = 0;
  switch (f->kind) {
    case INTEGER:
      snprintf(text, size, "a whole number from %lld to %lld", (rpi_wide)f->least,
               (rpi_wide)f->most);
      break;
    case NUMBER:
      snprintf(text, size, "a number from %g to %s%g", f->low, f->below ? "below " : "", f->high);
      break;
    case UNSIGNED:
      snprintf(text, size, "a whole number from 0 to %llu", (unsigned long long)UINT64_MAX);
      break;
    case SWITCH: return "true, false, 1 or 0";
    case CHOICE:
      for (int i = 0; f->choices[i] != NULL && (size_t)length < size; i++) {
        length += snprintf(text + length, size - (size_t)length, "%s%s", i == 0 ? "one of " : ", ",
                           f->choices[i]);
      }
  }
  return text;
}

static void write_field(const field *f, content value, char text[RPI_CONFIG_TEXT]) {
  const size_t size = RPI_CONFIG_TEXT;
  switch (f->kind) {
    case INTEGER: snprintf(text, size, "%lld", (rpi_wide)value.integer); break;
    case NUMBER: write_number(value.number, text); break;
    case UNSIGNED: snprintf(text, size, "%llu", (unsigned long long)value.natural); break;
    case SWITCH: snprintf(text, size, "%s", value.choice != 0 ? "true" : "false"); break;
    case CHOICE: snprintf(text, size, "%s", f->choices[value.choice]); break;
  }
}

/* False: the text is not of the field's kind. It may still be out of range. */
static bool read_field(const field *f, const char *text, content *value) {
  memset(value, 0, sizeof *value);
  switch (f->kind) {
    case INTEGER: return rpi_read_integer(text, &value->integer);
    case NUMBER: return read_number(text, &value->number);
    case UNSIGNED: return read_unsigned(text, &value->natural);
    case SWITCH:
      value->choice = strcmp(text, "true") == 0 || strcmp(text, "1") == 0;
      return value->choice || strcmp(text, "false") == 0 || strcmp(text, "0") == 0;
    case CHOICE:
      while (f->choices[value->choice] != NULL && strcmp(text, f->choices[value->choice]) != 0) {
        value->choice++;
      }
  }
  return true;
}

/* Of the field's value as it stands in the configuration. */
static rp_status check_field(const rp_config *config, const field *f) {
  const content value = load(config, f);
  if (is_allowed(f, value)) return RP_OK;
  char came[RPI_CONFIG_TEXT], may_be[256];
  if (f->kind == INTEGER) snprintf(came, sizeof came, "%lld", (rpi_wide)value.integer);
  else if (f->kind == NUMBER) snprintf(came, sizeof came, "%.9g", value.number);
  else snprintf(came, sizeof came, "%d", value.choice);
  return rpi_fail(f->kind == INTEGER ? RP_ERROR_SHAPE : RP_ERROR_ARGUMENT,
                  "config: %s=%s, must be %s", f->name, came, allowed(f, may_be, sizeof may_be));
}

static rp_status check_size(const rp_config *config) {
  RPI_CHECK_SET_UP("config: ", config, "start from rp_config_default() or a preset");
  return RP_OK;
}

rp_status rpi_config_set(rp_config *config, const char *name, const char *value) {
  RPI_TRY(check_size(config));
  const field *f = NULL;
  RPI_TRY(find_field(name, &f));
  content read;
  if (read_field(f, value, &read) && is_allowed(f, read)) {
    memcpy((char *)config + f->offset, &read, size_of(f));
    return RP_OK;
  }
  char typed[RPI_QUOTE], may_be[256];
  const char *const text = allowed(f, may_be, sizeof may_be);
  const bool choice = f->kind == CHOICE;
  return rpi_fail(RP_ERROR_ARGUMENT, "config: %s=%s, must be %s%s%s%s", f->name,
                  rpi_quote(value, typed), text, choice ? "; the nearest is '" : "",
                  choice ? rpi_nearest(value, NULL, f->choices) : "", choice ? "'" : "");
}

rp_status rpi_config_get(const rp_config *config, const char *name, char *text, size_t size) {
  RPI_TRY(check_size(config));
  const field *f = NULL;
  RPI_TRY(find_field(name, &f));
  RPI_TRY(check_field(config, f)); /* a choice out of range has no name */
  char whole[RPI_CONFIG_TEXT];
  write_field(f, load(config, f), whole);
  snprintf(text, size, "%s", whole);
  return RP_OK;
}

rp_status rpi_config_check_fields(const rp_config *config) {
  RPI_TRY(check_size(config));
  for (int i = 0; i < FIELDS; i++) RPI_TRY(check_field(config, &fields[i]));
  return RP_OK;
}
