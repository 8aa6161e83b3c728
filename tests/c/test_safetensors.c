/* SPDX-License-Identifier: Apache-2.0
 *
 * test_safetensors.c: file/safetensors.c. Files written and read back; files that somebody else
 * could have written; files that nobody should, down to every byte of one cut off or changed; every
 * call of the system and every allocation failing in turn. Whatever fails leaves the old file and
 * the tensors as they were.
 */
#define _POSIX_C_SOURCE 200809L

#include "file/safetensors.h"

#include "base/rng.h"
#include "check.h"
#include "faults.h"

#ifdef RP_REAL_IS_DOUBLE
#define TYPE "F64"
#define TYPE_DIGITS "64"
#define OTHER_TYPE "F32"
#define TWO "16" /* bytes of two numbers */
#define FOUR "32"
#define SIX "48"
#define EIGHT "64"
#else
#define TYPE "F32"
#define TYPE_DIGITS "32"
#define OTHER_TYPE "F64"
#define TWO "8"
#define FOUR "16"
#define SIX "24"
#define EIGHT "32"
#endif

/* ---- two small tensors, and files made by hand --------------------------- */

#define SENTINEL ((rp_real) - 77)

static rp_real pair_data[2], matrix_data[4];

/* "pair" [2] and "matrix" [2, 2] with these numbers, or waiting to be read. */
static void two(rpi_tensor tensors[2], bool filled) {
  for (int i = 0; i < 2; i++) pair_data[i] = filled ? (rp_real)(i + 1) : SENTINEL;
  for (int i = 0; i < 4; i++) matrix_data[i] = filled ? (rp_real)(10 * (i + 1)) : SENTINEL;
  tensors[0] = (rpi_tensor){.name = "pair", .dimensions = 1, .shape = {2}, .data = pair_data};
  tensors[1] =
      (rpi_tensor){.name = "matrix", .dimensions = 2, .shape = {2, 2}, .data = matrix_data};
}

static bool two_are(bool filled) {
  bool same = true;
  for (int i = 0; i < 2; i++) same &= pair_data[i] == (filled ? (rp_real)(i + 1) : SENTINEL);
  for (int i = 0; i < 4; i++) {
    same &= matrix_data[i] == (filled ? (rp_real)(10 * (i + 1)) : SENTINEL);
  }
  return same;
}

static const rp_real two_in_order[6] = {1, 2, 10, 20, 30, 40};

/* A file in memory: prefix, header, then so many bytes of data. */
static char made[4096];
static size_t made_bytes;

static void make(const char *header, const void *data, size_t data_bytes) {
  const size_t length = strlen(header);
  for (int i = 0; i < 8; i++) made[i] = (char)(length >> 8 * i & 0xFF);
  memcpy(made + 8, header, length);
  if (data_bytes > 0) memcpy(made + 8 + length, data, data_bytes);
  made_bytes = 8 + length + data_bytes;
}

/* The seam over that memory: many files are read in the tests below. */
static struct {
  int64_t position;
} in_memory;

static int memory_open(void *context, const char *name, int flags, int mode) {
  (void)context, (void)name, (void)flags, (void)mode;
  in_memory.position = 0;
  return 3;
}

static int64_t memory_read(void *context, int descriptor, void *buffer, int64_t bytes) {
  (void)context, (void)descriptor;
  const int64_t rest = (int64_t)made_bytes - in_memory.position;
  const int64_t part = bytes < rest ? bytes : rest;
  memcpy(buffer, made + in_memory.position, (size_t)part);
  in_memory.position += part;
  return part;
}

static int memory_close(void *context, int descriptor) {
  (void)context, (void)descriptor;
  return 0;
}

static const rpi_io memory_io = {.open = memory_open, .read = memory_read, .close = memory_close};

/* Reads the two from the file made; they must have come, or be untouched. In place the same comes,
 * or fails. */
static rp_status read_two(void) {
  rpi_tensor tensors[2];
  rp_real found[4];
  rpi_set_io(&memory_io);
  two(tensors, false);
  const rp_status in_place = rpi_safetensors_read("made", tensors, 2, true, NULL);
  memcpy(found, matrix_data, sizeof found);
  CHECK_INT(memory.held, 0);
  two(tensors, false);
  reset();
  const rp_status status = rpi_safetensors_read("made", tensors, 2, false, NULL);
  rpi_set_io(&faulty_io);
  CHECK_INT(in_place, status);
  CHECK(status != RP_OK || memcmp(found, matrix_data, sizeof found) == 0);
  CHECK_INT(memory.held, 0);
  return status;
}

static void taken(const char *header) {
  make(header, two_in_order, sizeof two_in_order);
  if (!CHECK_INT(read_two(), RP_OK)) printf(": %s", rp_last_error());
  CHECK(two_are(true));
}

static void refused(const char *header, const char *sentence) {
  make(header, two_in_order, sizeof two_in_order);
  if (!CHECK_INT(read_two(), RP_ERROR_FILE)) printf(" for %s", header);
  CHECK_TEXT(rp_last_error(), "'made'");
  if (sentence != NULL) CHECK_TEXT(rp_last_error(), sentence);
  CHECK(two_are(false));
}

#define PAIR "\"pair\":{\"dtype\":\"" TYPE "\",\"shape\":[2],\"data_offsets\":[0," TWO "]}"
#define MATRIX                                                                                     \
  "\"matrix\":{\"dtype\":\"" TYPE "\",\"shape\":[2,2],\"data_offsets\":[" TWO "," SIX "]}"
#define ENTRY(name, type, shape, offsets)                                                          \
  "\"" name "\":{\"dtype\":\"" type "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

/* ---- what is written ----------------------------------------------------- */

static void test_every_byte_of_a_file(void) {
  static const char header[] =
      "{\"__metadata__\":{\"a\":\"b\",\"quote\\\"\\\\\\u000a\":\"\xc3\xa9\"}," PAIR "," MATRIX "}";
  const rpi_text_pair metadata[] = {{"a", "b"}, {"quote\"\\\n", "\xc3\xa9"}};
  rpi_tensor tensors[2];
  two(tensors, true);
  reset();
  CHECK_INT(rpi_safetensors_write(path, metadata, 2, tensors, 2), RP_OK);
  CHECK_INT(memory.held, 0);
  CHECK_INT(count_entries(), 1);
  char padded[512];
  snprintf(padded, sizeof padded, "%s%63s", header, "");
  padded[(8 + strlen(header) + 63) / 64 * 64 - 8] = '\0'; /* the data begin at a multiple of 64 */
  make(padded, two_in_order, sizeof two_in_order);
  CHECK(file_is(made, made_bytes));
}

typedef struct seen {
  char keys[8][40], values[8][40];
  int count, fail_at;
} seen;

static rp_status note(void *context, const char *key, const char *value) {
  seen *const s = context;
  snprintf(s->keys[s->count], sizeof s->keys[0], "%s", key);
  snprintf(s->values[s->count], sizeof s->values[0], "%s", value);
  if (++s->count == s->fail_at) return rpi_fail(RP_ERROR_ORDER, "enough");
  return RP_OK;
}

/* Shapes of every number of dimensions, empty ones among them; read in another order. */
static void test_round_trip(void) {
  enum { COUNT = 7 };
  static const struct {
    const char *name;
    int dimensions;
    int64_t shape[3], count;
  } shapes[COUNT] = {
      {"scalar", 0, {0}, 1},        {"empty", 1, {0}, 0},
      {"vector", 1, {5}, 5},        {"matrix \"\\\x01/\xe2\x82\xac", 2, {3, 4}, 12},
      {"no columns", 2, {7, 0}, 0}, {"cube", 3, {2, 3, 5}, 30},
      {"", 3, {1, 1, 1}, 1},
  };
  static const rpi_text_pair metadata[] = {
      {"format", "relpos 1"}, {"", ""}, {"\x01\x1f \"\\/", "tab\t, newline\n, \xf0\x9f\x98\x80"}};
  rp_real numbers[COUNT][32], back[COUNT][32];
  char empty[65];
  rpi_tensor tensors[COUNT], reading[COUNT];
  for (int i = 0; i < COUNT; i++) {
    for (int j = 0; j < 32; j++) numbers[i][j] = (rp_real)(100 * i + j) / 3, back[i][j] = SENTINEL;
    tensors[i] = (rpi_tensor){.name = shapes[i].name,
                              .dimensions = shapes[i].dimensions,
                              .data = shapes[i].count > 0 ? numbers[i] : NULL};
    memcpy(tensors[i].shape, shapes[i].shape, sizeof shapes[i].shape);
    reading[COUNT - 1 - i] = tensors[i];
    reading[COUNT - 1 - i].data = shapes[i].count > 0 ? back[i] : NULL;
  }
  reset();
  CHECK_INT(rpi_safetensors_write(path, metadata, 3, tensors, COUNT), RP_OK);
  if (!CHECK_INT(rpi_safetensors_read(path, reading, COUNT, false, NULL), RP_OK))
    printf(": %s", rp_last_error());
  for (int i = 0; i < COUNT; i++) {
    for (int j = 0; j < 32; j++) {
      CHECK(back[i][j] == (j < shapes[i].count ? numbers[i][j] : SENTINEL));
    }
  }
  seen s = {.count = 0};
  CHECK_INT(rpi_safetensors_metadata(path, note, &s, NULL), RP_OK);
  CHECK_INT(s.count, 3);
  for (int i = 0; i < 3; i++) {
    CHECK(strcmp(s.keys[i], metadata[i].key) == 0);
    CHECK(strcmp(s.values[i], metadata[i].value) == 0);
  }
  s = (seen){.fail_at = 2};
  CHECK_INT(rpi_safetensors_metadata(path, note, &s, NULL), RP_ERROR_ORDER);
  CHECK_TEXT(rp_last_error(), "enough");
  CHECK_INT(s.count, 2);
  CHECK_INT(memory.held, 0);
  CHECK_INT(faults.opened, 0);

  CHECK_INT(rpi_safetensors_write(path, NULL, 0, NULL, 0), RP_OK);
  snprintf(empty, sizeof empty, "8%7s{}%54s", "", "");
  memcpy(empty, "\x38\0\0\0\0\0\0", 8);
  CHECK(file_is(empty, 64));
  CHECK_INT(rpi_safetensors_read(path, NULL, 0, false, NULL), RP_OK);
  s = (seen){.count = 0};
  CHECK_INT(rpi_safetensors_metadata(path, note, &s, NULL), RP_OK);
  CHECK_INT(s.count, 0);
}

static void not_written(const rpi_text_pair *metadata, int64_t pairs, const rpi_tensor *tensors,
                        int64_t count, rp_status status, const char *sentence) {
  reset();
  put("old", 3);
  CHECK_INT(rpi_safetensors_write(path, metadata, pairs, tensors, count), status);
  CHECK_TEXT(rp_last_error(), sentence);
  CHECK_INT(faults.calls, 0);
  CHECK(file_is("old", 3));
}

static void test_what_is_not_written(void) {
  rpi_tensor t[2];
  two(t, true);
  const rpi_text_pair twice[] = {{"a", "1"}, {"b", "1"}, {"a", "2"}}, broken[] = {{"a", "\xff"}};
  not_written(twice, 3, t, 2, RP_ERROR_ARGUMENT, "metadata 'a' is given twice");
  not_written(broken, 1, t, 2, RP_ERROR_ARGUMENT, "metadata 'a' is not UTF-8");
  t[1].name = "pair";
  not_written(NULL, 0, t, 2, RP_ERROR_ARGUMENT, "tensor 'pair' is given twice");
  t[1].name = "__metadata__";
  not_written(NULL, 0, t, 2, RP_ERROR_ARGUMENT, "a tensor cannot be called '__metadata__'");
  static const char *const no_utf8[] = {"\x80",
                                        "\xc0\x80",
                                        "\xc3",
                                        "\xc3(",
                                        "\xe0\x9f\x80",
                                        "\xe2\x82",
                                        "\xed\xa0\x80",
                                        "\xf0\x8f\x80\x80",
                                        "\xf4\x90\x80\x80",
                                        "\xf5\x80\x80\x80",
                                        "\xf0\x9f\x98"};
  for (size_t i = 0; i < sizeof no_utf8 / sizeof no_utf8[0]; i++) {
    t[1].name = no_utf8[i];
    not_written(NULL, 0, t, 2, RP_ERROR_ARGUMENT, "a tensor cannot be called '?");
  }
  two(t, true);
  t[1].shape[0] = -1;
  not_written(NULL, 0, t, 2, RP_ERROR_SHAPE, "the size of tensor 'matrix' is negative");
  t[1].shape[0] = INT64_C(1) << 61;
  not_written(NULL, 0, t, 2, RP_ERROR_SHAPE,
              "the size of tensor 'matrix' is negative or overflows");
  t[0].shape[0] = t[1].shape[0] = INT64_MAX / (int64_t)sizeof(rp_real);
  t[1].dimensions = 1;
  not_written(NULL, 0, t, 2, RP_ERROR_SHAPE,
              "the size of tensor 'matrix' is negative or overflows");
}

/* ---- what is read -------------------------------------------------------- */

static void test_what_others_write(void) {
  taken("{" PAIR "," MATRIX "}");
  taken("{" MATRIX "," PAIR "}");
  taken("{" PAIR "," MATRIX "}        ");
  taken("{" PAIR ",\"__metadata__\":{}," MATRIX "}");
  taken("{\"__metadata__\":{\"format\":\"pt\"}," PAIR "," MATRIX "}");
  taken("{ \"pair\"\t:\n{ \"shape\" : [ 2 ] , \"data_offsets\" : [ 0 , " TWO
        " ] ,\r\"dtype\" : \"" TYPE "\" } , " MATRIX " }\n");
  taken("{\"p\\u0061\\u0069\\u0072\":{\"d\\u0074ype\":\"\\u0046" TYPE_DIGITS
        "\",\"shape\":[2],\"data_offsets\":[0," TWO "]}," MATRIX "}");
}

/* Every escape of JSON, and characters of one to four bytes, both ways. */
static void test_texts(void) {
  static const char header[] =
      "{\"__metadata__\":{\"\\\"\\\\\\/\\b\\f\\n\\r\\t\":\"\\u0041\\u00e9\\u20AC\\uD83D\\ude00\","
      "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\x7f\":\"\"}}";
  make(header, NULL, 0);
  rpi_set_io(&memory_io);
  seen s = {.count = 0};
  CHECK_INT(rpi_safetensors_metadata("made", note, &s, NULL), RP_OK);
  rpi_set_io(&faulty_io);
  CHECK_INT(s.count, 2);
  CHECK(strcmp(s.keys[0], "\"\\/\b\f\n\r\t") == 0);
  CHECK(strcmp(s.values[0], "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80") == 0);
  CHECK(strcmp(s.keys[1], "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\x7f") == 0);
  CHECK(strcmp(s.values[1], "") == 0);
}

static void test_other_tensors(void) {
  refused("{" PAIR "}", "tensor 'matrix' is missing");
  refused("{" MATRIX "}", "tensor 'pair' is missing");
  refused("{}", "tensor 'pair' is missing");
  refused("{" PAIR "," MATRIX "," ENTRY("more", TYPE, "[0]", "[" SIX "," SIX "]") "}",
          "its tensor 'more' is unknown here");
  refused("{" PAIR "," PAIR "," MATRIX "}", "tensor 'pair' is there twice");
  refused("{" PAIR "," ENTRY("matrix", OTHER_TYPE, "[2,2]", "[" TWO "," SIX "]") "}",
          "tensor 'matrix' is of type '" OTHER_TYPE "', must be '" TYPE "'");
  refused("{" PAIR "," ENTRY("matrix", "\\u0000", "[2,2]", "[" TWO "," SIX "]") "}", NULL);
  static const char *const shapes[] = {"[4]",
                                       "[2,3]",
                                       "[2,2,1]",
                                       "[]",
                                       "[2,2,1,1,1,1,1,1]",
                                       "[9223372036854775807,9223372036854775807]"};
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
    char header[512];
    snprintf(header, sizeof header,
             "{" PAIR "," ENTRY("matrix", TYPE, "%s", "[" TWO "," SIX "]") "}", shapes[i]);
    refused(header, "tensor 'matrix' has the shape [");
    CHECK_TEXT(rp_last_error(), ", must be [2, 2]");
  }
}

static void test_offsets(void) {
  static const char *const offsets[] = {"[0," FOUR "]", /* over the pair */
                                        "[" SIX "," SIX "]",
                                        "[0,0]",
                                        "[" TWO "," TWO "]",
                                        "[4," SIX "]",
                                        "[" TWO ",25]",
                                        "[0,9223372036854775807]",
                                        "[9223372036854775800,9223372036854775807]"};
  for (size_t i = 0; i < sizeof offsets / sizeof offsets[0]; i++) {
    char header[512];
    snprintf(header, sizeof header, "{" PAIR "," ENTRY("matrix", TYPE, "[2,2]", "%s") "}",
             offsets[i]);
    refused(header, "tensor 'matrix' ");
  }
  refused("{" PAIR "," ENTRY("matrix", TYPE, "[2,2]", "[0," FOUR "]") "}",
          "tensor 'matrix' begins at byte 0 of the data, must be " TWO);
  /* a hole at the end, and one at the beginning */
  refused("{" PAIR "," ENTRY("matrix", TYPE, "[2,2]", "[" FOUR "," EIGHT "]") "}",
          "tensor 'matrix' begins at byte " FOUR " of the data, must be " TWO);
  refused("{" ENTRY("pair", TYPE, "[2]", "[" TWO "," FOUR "]") "," ENTRY(
              "matrix", TYPE, "[2,2]", "[" FOUR "," EIGHT "]") "}",
          "tensor 'pair' begins at byte " TWO " of the data, must be 0");
}

static void test_no_headers(void) {
  static const char *const headers[] = {"",
                                        " ",
                                        "{",
                                        "}",
                                        "[]",
                                        "null",
                                        " {}",
                                        "{}x",
                                        "{},",
                                        "{}\x01",
                                        "{,}",
                                        "{" PAIR "," MATRIX,
                                        "{" PAIR "," MATRIX ",}",
                                        "{" PAIR " " MATRIX "}",
                                        "{" PAIR "," MATRIX "}}",
                                        "{" PAIR ",,",
                                        "{pair:{}}",
                                        "{'pair':{}}",
                                        "{\"pair\"}",
                                        "{\"pair\":}",
                                        "{\"pair\":1}",
                                        "{\"pair\":[]}",
                                        "{\"pair\":{}}",
                                        "{\"pair\":{\"dtype\":\"" TYPE "\"}}",
                                        "{\"pair\":{\"dtype\":" TYPE "}}",
                                        "{\"pair\":{\"dtype\":null}}",
                                        "{\"pair\":{\"dtype\":\"" TYPE "\",\"dtype\":\"" TYPE
                                        "\"}}",
                                        "{\"pair\":{\"more\":1}}",
                                        "{\"pair\":{\"shape\":{}}}",
                                        "{\"pair\":{\"shape\":[2}}",
                                        "{\"pair\":{\"shape\":[2,]}}",
                                        "{\"pair\":{\"shape\":[,2]}}",
                                        "{\"pair\":{\"shape\":[[2]]}}",
                                        "{\"pair\":{\"shape\":[-2]}}",
                                        "{\"pair\":{\"shape\":[2.0]}}",
                                        "{\"pair\":{\"shape\":[2e0]}}",
                                        "{\"pair\":{\"shape\":[02]}}",
                                        "{\"pair\":{\"shape\":[+2]}}",
                                        "{\"pair\":{\"shape\":[2",
                                        "{\"pair\":{\"shape\":[9223372036854775808]}}",
                                        "{\"pair\":{\"shape\":[99999999999999999999999999]}}",
                                        "{\"pair\":{\"shape\":[1,1,1,1,1,1,1,1,1]}}",
                                        "{\"pair\":{\"data_offsets\":[0]}}",
                                        "{\"pair\":{\"data_offsets\":[0,1,2]}}",
                                        "{\"pair\":{\"data_offsets\":[]}}",
                                        "{\"pair\":{\"data_offsets\":[8,0]}}",
                                        "{\"pair\":{\"data_offsets\":[0,8],}}",
                                        "{\"__metadata__\":[]}",
                                        "{\"__metadata__\":{\"a\":1}}",
                                        "{\"__metadata__\":{\"a\":{}}}",
                                        "{\"__metadata__\":{\"a\":\"b\",}}",
                                        "{\"__metadata__\":{\"a\":\"b\",\"a\":\"c\"}}",
                                        "{\"__metadata__\":{},\"__metadata__\":{}}",
                                        "{\"__metadata__\":{\"a\":\"b\"",
                                        "{\"a",
                                        "{\"a\\",
                                        "{\"a\\\"",
                                        "{\"\\x41\":",
                                        "{\"\\u004\":",
                                        "{\"\\u00g1\":",
                                        "{\"\\u0000\":",
                                        "{\"\\ud800\":",
                                        "{\"\\ud800\\u0041\":",
                                        "{\"\\ud800\\ud800\":",
                                        "{\"\\udc00\":",
                                        "{\"\\ud83d\\u",
                                        "{\"\n\":",
                                        "{\"\x1f\":",
                                        "{\"\xff\":",
                                        "{\"\xc0\xaf\":",
                                        "{\"\xed\xa0\x80\":",
                                        "{\"\xe2\x82",
                                        "{\"\xf4\x90\x80\x80\":"};
  for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
    refused(headers[i], "'made' is no safetensors file: its header should have ");
    rpi_set_io(&memory_io);
    seen s = {.count = 0};
    CHECK_INT(rpi_safetensors_metadata("made", note, &s, NULL), RP_ERROR_FILE);
    CHECK_INT(s.count, 0);
    rpi_set_io(&faulty_io);
  }
  refused("{\"pair\":7}", "its header should have '{' at byte 8");
}

/* One thing wrong each, and that is what the sentence says. */
static void test_what_is_wrong_with_a_header(void) {
  static const char *const headers[][2] = {
      {"{" ENTRY("pair", TYPE, "[02]", "[0," TWO "]") "," MATRIX "}", "a whole number at byte"},
      {"{" ENTRY("pair", TYPE, "[2]", "[0,0" TWO "]") "," MATRIX "}", "a whole number at byte"},
      {"{" ENTRY("pair", TYPE, "[2]", "[" TWO ",0]") "," MATRIX "}",
       "two offsets that do not fall"},
      {"{" ENTRY("pair", TYPE "\",\"dtype\":\"" TYPE, "[2]", "[0," TWO "]") "," MATRIX "}",
       "dtype, shape and data_offsets once each"},
      {"{" ENTRY("pair", TYPE "\",\"more\":\"", "[2]", "[0," TWO "]") "," MATRIX "}",
       "dtype, shape and data_offsets once each"},
      {"{\"__metadata__\":{\"a\":\"\\u0000\"}," PAIR "," MATRIX "}", "a character other than"},
      {"{\"__metadata__\":{\"a\":\"\\ud800\\ue000\"}," PAIR "," MATRIX "}",
       "a character other than"},
      {"{\"__metadata__\":{\"a\":\"\\ud800\\udbff\"}," PAIR "," MATRIX "}",
       "a character other than"},
      {"{\"__metadata__\":{\"a\":\"\\udc00\\udc00\"}," PAIR "," MATRIX "}",
       "a character other than"},
      {"{\"__metadata__\":{\"a\":\"\\ud800x\\udc00\"}," PAIR "," MATRIX "}",
       "a character other than"},
      {"{\"__metadata__\":{\"a\":\"\\a\"}," PAIR "," MATRIX "}", "an escape of JSON"},
      {"{\"__metadata__\":{\"a\":\"\x1f\"}," PAIR "," MATRIX "}", "a text in UTF-8"},
      {"{\"__metadata__\":{\"a\":\"b\",\"c\":\"\",\"a\":\"b\"}," PAIR "," MATRIX "}",
       "every key once"},
      {"{\"__metadata__\":{}," PAIR ",\"__metadata__\":{}," MATRIX "}", "__metadata__ once"},
      {"{" PAIR "," MATRIX "} x", "its end at byte"},
  };
  for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
    refused(headers[i][0], headers[i][1]);
  }
}

/* Deep and wide ones: nothing nests, nothing is counted beyond its bound. */
static void test_large_headers(void) {
  static char header[4000];
  memset(header, '{', sizeof header - 1);
  refused(header, "its header should have a text at byte 1");
  memset(header, '[', sizeof header - 1);
  refused(header, "its header should have '{' at byte 0");
  memset(header, ' ', sizeof header - 1);
  memcpy(header, "{" PAIR "," MATRIX "}", strlen("{" PAIR "," MATRIX "}"));
  taken(header);

  enum { PAIRS = RPI_MOST_PAIRS + 1 };
  static char keys[PAIRS][12];
  static rpi_text_pair metadata[PAIRS];
  for (int i = 0; i < PAIRS; i++) {
    snprintf(keys[i], sizeof keys[i], "%d", i);
    metadata[i] = (rpi_text_pair){keys[i], ""};
  }
  reset();
  CHECK_INT(rpi_safetensors_write(path, metadata, RPI_MOST_PAIRS, NULL, 0), RP_OK);
  CHECK_INT(rpi_safetensors_read(path, NULL, 0, false, NULL), RP_OK);
  char *content = malloc(20000); /* one more, behind the 8 bytes of the length */
  int used = 8 + snprintf(content + 8, 20000 - 8, "{\"__metadata__\":{");
  for (int i = 0; i < PAIRS; i++) {
    used += snprintf(content + used, (size_t)(20000 - used), "%s\"%d\":\"\"", i == 0 ? "" : ",", i);
  }
  used += snprintf(content + used, (size_t)(20000 - used), "}}");
  for (int i = 0; i < 8; i++) content[i] = (char)((used - 8) >> (i < 4 ? 8 * i : 31) & 0xFF);
  put(content, (size_t)used);
  CHECK_INT(rpi_safetensors_read(path, NULL, 0, false, NULL), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "no more than 1024 texts of metadata");
  free(content);
}

static void test_lengths(void) {
  make("{" PAIR "," MATRIX "}", two_in_order, sizeof two_in_order);
  made[made_bytes++] = 0;
  CHECK_INT(read_two(), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "it goes on after the ");
  CHECK(two_are(false));
  static const unsigned char prefixes[][8] = {{0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF},
                                              {0, 0, 0, 0, 0, 0, 0, 0x80},
                                              {1, 0xE1, 0xF5, 5, 0, 0, 0, 0}}; /* 10^8 + 1 */
  for (size_t i = 0; i < 3; i++) {
    memcpy(made, prefixes[i], 8);
    CHECK_INT(read_two(), RP_ERROR_FILE);
    CHECK_TEXT(rp_last_error(), "must not exceed 100000000");
    CHECK_INT(memory.calls, 2); /* the spans and names: nothing for such a header */
  }
  const unsigned char most[8] = {0, 0xE1, 0xF5, 5, 0, 0, 0, 0};
  memcpy(made, most, 8);
  CHECK_INT(read_two(), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "more were expected");
}

/* Every length that a file can be cut to, and every byte changed to every other: it is refused, or
 * what is read is what is there. */
static void test_every_byte_cut_or_changed(void) {
  static const char header[] =
      "{\"__metadata__\":{\"k\\u00e9\":\"\xc3\xa9\"}," MATRIX "," PAIR "}  ";
  make(header, two_in_order, sizeof two_in_order);
  const size_t whole = made_bytes, data = 8 + strlen(header);
  CHECK_INT(read_two(), RP_OK);
  for (made_bytes = 0; made_bytes < whole; made_bytes++) {
    CHECK_INT(read_two(), RP_ERROR_FILE);
    CHECK(two_are(false));
  }
  int read = 0;
  for (size_t byte = 0; byte < whole; byte++) {
    const char before = made[byte];
    for (int change = 1; change < 256; change++) {
      made[byte] = (char)(before ^ change);
      const rp_status status = read_two();
      if (byte >= data) {
        CHECK_INT(status, RP_OK);
        CHECK(memcmp(pair_data, made + data, sizeof pair_data) == 0);
        CHECK(memcmp(matrix_data, made + data + sizeof pair_data, sizeof matrix_data) == 0);
      } else if (status == RP_OK) { /* of metadata or space */
        CHECK(two_are(true));
        read++;
      } else {
        CHECK_INT(status, RP_ERROR_FILE);
        CHECK(two_are(false));
      }
    }
    made[byte] = before;
  }
  CHECK(read > 100);
}

/* Several bytes changed at once, drawn from what headers are made of. */
static void test_random_changes(void) {
  static const char alphabet[] = "{}[]:,\"\\ u0123456789e-adtypeshF\xff\xc3\xa9\x01";
  make("{\"__metadata__\":{\"k\":\"v\"}," PAIR "," MATRIX "}", two_in_order, sizeof two_in_order);
  const size_t whole = made_bytes, length = whole - 8 - sizeof two_in_order;
  char original[512];
  memcpy(original, made, whole);
  const uint32_t rounds = getenv("RELPOS_TEST_SMALL") != NULL ? 5000 : 50000;
  for (uint32_t i = 0; i < rounds; i++) {
    const rpi_philox_block random =
        rpi_philox((rpi_philox_block){{i}}, (rpi_philox_key){{5, 6}}, 7);
    memcpy(made, original, whole);
    for (uint32_t j = 0; j <= random.word[3] % 3; j++) {
      made[8 + random.word[j] % length] = alphabet[(random.word[j] >> 16) % (sizeof alphabet - 1)];
    }
    const rp_status status = read_two();
    CHECK(status == RP_OK ? two_are(true) : status == RP_ERROR_FILE && two_are(false));
  }
}

/* ---- faults -------------------------------------------------------------- */

static void test_every_call_of_write_fails(void) {
  rpi_tensor t[2];
  two(t, true);
  const rpi_text_pair metadata[] = {{"a", "b"}};
  reset();
  CHECK_INT(rpi_safetensors_write(path, metadata, 1, t, 2), RP_OK);
  char new_content[512];
  FILE *file = fopen(path, "rb");
  if (!CHECK(file != NULL)) return;
  const size_t bytes = fread(new_content, 1, sizeof new_content, file);
  fclose(file);
  int n = 1;
  for (; n < 100; n++) {
    reset();
    put("old", 3);
    faults.fail_at = n;
    faults.error = ENOSPC;
    faults.largest = 100;
    const rp_status status = rpi_safetensors_write(path, metadata, 1, t, 2);
    CHECK_INT(faults.opened, 0);
    CHECK_INT(memory.held, 0);
    CHECK_INT(count_entries(), 1);
    if (faults.last == NULL) break;
    const bool in_place = status == RP_OK || strstr(rp_last_error(), "sync the folder") != NULL;
    CHECK(in_place ? file_is(new_content, bytes) : file_is("old", 3));
    if (status != RP_OK) CHECK_TEXT(rp_last_error(), strerror(ENOSPC));
  }
  CHECK(n > 10);
  for (n = 1; n < 100; n++) {
    reset();
    put("old", 3);
    memory.fail_at = n;
    const rp_status status = rpi_safetensors_write(path, metadata, 1, t, 2);
    CHECK_INT(memory.held, 0);
    CHECK_INT(count_entries(), 1);
    if (memory.calls < n) break;
    CHECK_INT(status, RP_ERROR_MEMORY);
    CHECK(file_is("old", 3));
  }
  CHECK_INT(n, 4); /* the names; the header and the list of parts; the temporary name */
}

/* What read_two does, with the file on disk and the n-th call or allocation failing. */
static rp_status read_with_faults(int call, int allocation) {
  rpi_tensor tensors[2];
  two(tensors, false);
  reset();
  faults.fail_at = call;
  faults.error = EIO;
  faults.largest = 20;
  memory.fail_at = allocation;
  const rp_status status = rpi_safetensors_read(path, tensors, 2, false, NULL);
  CHECK_INT(faults.opened, 0);
  CHECK_INT(memory.held, 0);
  CHECK(two_are(status == RP_OK));
  return status;
}

/* Names that differ in a digit, written from the last to the first. */
static void test_many(void) {
  enum { MANY = 5000 };
  static char names[MANY][24];
  static rp_real numbers[MANY], read[MANY];
  static rpi_tensor written[MANY], wanted[MANY];
  for (int i = 0; i < MANY; i++) {
    snprintf(names[i], sizeof names[i], "layer%d.bias", i);
    numbers[i] = (rp_real)i;
    wanted[i] = (rpi_tensor){.name = names[i], .data = &read[i]};
    written[MANY - 1 - i] = (rpi_tensor){.name = names[i], .data = &numbers[i]};
  }
  reset();
  CHECK_INT(rpi_safetensors_write(path, NULL, 0, written, MANY), RP_OK);
  CHECK_INT(rpi_safetensors_read(path, wanted, MANY, false, NULL), RP_OK);
  CHECK(memcmp(read, numbers, sizeof read) == 0);
  CHECK_INT(rpi_safetensors_read(path, wanted, MANY - 1, false, NULL), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "its tensor 'layer4999.bias' is unknown here");
  written[7].name = names[3];
  CHECK_INT(rpi_safetensors_write(path, NULL, 0, written, MANY), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "tensor 'layer3.bias' is given twice");
  CHECK_INT(memory.held, 0);
}

static void test_every_call_of_read_fails(void) {
  make("{" PAIR "," MATRIX "}", two_in_order, sizeof two_in_order);
  put(made, made_bytes);
  int n = 1;
  for (; n < 100; n++) {
    const rp_status status = read_with_faults(n, 0);
    if (faults.last == NULL) break;
    CHECK_INT(status, strcmp(faults.last, "close") == 0 ? RP_OK : RP_ERROR_FILE);
    if (status != RP_OK) CHECK_TEXT(rp_last_error(), strerror(EIO));
  }
  CHECK(n > 10);
  for (n = 1; n < 100; n++) {
    const rp_status status = read_with_faults(0, n);
    if (memory.calls < n) break;
    CHECK_INT(status, RP_ERROR_MEMORY);
  }
  CHECK_INT(n, 5); /* the spans, the names, the header, the data */
  for (n = 1; n < 100; n++) {
    reset();
    faults.fail_at = n;
    faults.error = EIO;
    seen s = {.count = 0};
    const rp_status status = rpi_safetensors_metadata(path, note, &s, NULL);
    CHECK_INT(faults.opened, 0);
    CHECK_INT(memory.held, 0);
    if (faults.last == NULL) break;
    CHECK_INT(status, strcmp(faults.last, "close") == 0 ? RP_OK : RP_ERROR_FILE);
  }
  reset();
  memory.fail_at = 1;
  seen s = {.count = 0};
  CHECK_INT(rpi_safetensors_metadata(path, note, &s, NULL), RP_ERROR_MEMORY);
  CHECK_INT(faults.opened, 0);
}

static void test_paths(void) {
  reset();
  CHECK_INT(rpi_safetensors_read("/no/such/file", NULL, 0, false, NULL), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "cannot open '/no/such/file': No such file");
  CHECK_INT(rpi_safetensors_read(folder, NULL, 0, false, NULL), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "directory");
  CHECK_INT(rpi_safetensors_metadata("/no/such/file", note, NULL, NULL), RP_ERROR_FILE);
  CHECK_INT(rpi_safetensors_write("/no/such/file", NULL, 0, NULL, 0), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "/no/such/file");
  CHECK_INT(memory.held, 0);
}

int main(void) {
  if (!CHECK(make_folder())) return check_report();
  rpi_set_io(&faulty_io);
  rpi_set_allocator(&faulty_allocator);
  test_every_byte_of_a_file();
  test_round_trip();
  test_what_is_not_written();
  test_what_others_write();
  test_texts();
  test_other_tensors();
  test_offsets();
  test_no_headers();
  test_what_is_wrong_with_a_header();
  test_large_headers();
  test_lengths();
  test_every_byte_cut_or_changed();
  test_random_changes();
  test_every_call_of_write_fails();
  test_many();
  test_every_call_of_read_fails();
  test_paths();
  CHECK(remove_folder());
  return check_report();
}
