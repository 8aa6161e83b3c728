/* SPDX-License-Identifier: Apache-2.0
 *
 * header_text.c: the texts and numbers in the header of a safetensors file.
 *
 * A text is decoded where it stands, for it only gets shorter; the zero that ends it takes the
 * place of its closing quote, or one before that.
 */
#include "file/header_text.h"

#include <string.h>

#include "base/memory.h"

/* Bytes of the UTF-8 character at text, which ends before end; 0: it is none. */
static int character_bytes(const char *text, const char *end) {
  const unsigned char *const byte = (const unsigned char *)text;
  const int64_t rest = end - text;
  if (rest < 1) return 0;
  if (byte[0] < 0x80) return 1;
  const int bytes = byte[0] >= 0xF0 ? 4 : byte[0] >= 0xE0 ? 3 : 2;
  if (byte[0] < 0xC2 || byte[0] > 0xF4 || rest < bytes) return 0;
  for (int i = 1; i < bytes; i++) {
    if ((byte[i] & 0xC0) != 0x80) return 0;
  }
  /* longer than need be, a half of a UTF-16 pair, beyond the last character */
  if (byte[0] == 0xE0 && byte[1] < 0xA0) return 0;
  if (byte[0] == 0xED && byte[1] > 0x9F) return 0;
  if (byte[0] == 0xF0 && byte[1] < 0x90) return 0;
  if (byte[0] == 0xF4 && byte[1] > 0x8F) return 0;
  return bytes;
}

bool rpi_is_utf8(const char *text) {
  const char *const end = text + strlen(text);
  while (text < end) {
    const int bytes = character_bytes(text, end);
    if (bytes == 0) return false;
    text += bytes;
  }
  return true;
}

rp_status rpi_header_fail(const rpi_header *r, const char *expected) {
  return rpi_fail(RP_ERROR_FILE,
                  "'%s' is no safetensors file: its header should have %s at byte %lld", r->path,
                  expected, (rpi_wide)(r->at - r->begin));
}

void rpi_header_skip_space(rpi_header *r) {
  while (r->at < r->end && (*r->at == ' ' || *r->at == '\t' || *r->at == '\n' || *r->at == '\r')) {
    r->at++;
  }
}

bool rpi_header_passes(rpi_header *r, char sign) {
  rpi_header_skip_space(r);
  if (r->at == r->end || *r->at != sign) return false;
  r->at++;
  return true;
}

rp_status rpi_header_expect(rpi_header *r, char sign, const char *what) {
  return rpi_header_passes(r, sign) ? RP_OK : rpi_header_fail(r, what);
}

/* The four digits after \u; -1: they are none. */
static int32_t read_unit(rpi_header *r) {
  int32_t unit = 0;
  if (r->end - r->at < 4) return -1;
  for (int i = 0; i < 4; i++, r->at++) {
    const char digit = *r->at;
    const int value = digit >= '0' && digit <= '9'   ? digit - '0'
                      : digit >= 'a' && digit <= 'f' ? digit - 'a' + 10
                      : digit >= 'A' && digit <= 'F' ? digit - 'A' + 10
                                                     : -1;
    if (value < 0) return -1;
    unit = unit * 16 + value;
  }
  return unit;
}

/* The character of one or two \u escapes, the first \u of which was read; -1: it is none, or the
 * zero that would end the text. */
static int32_t read_escaped(rpi_header *r) {
  const int32_t high = read_unit(r);
  if (high < 0xD800 || high > 0xDFFF) return high == 0 ? -1 : high;
  if (high > 0xDBFF || r->end - r->at < 6 || r->at[0] != '\\' || r->at[1] != 'u') return -1;
  r->at += 2;
  const int32_t low = read_unit(r);
  if (low < 0xDC00 || low > 0xDFFF) return -1;
  return 0x10000 + (high - 0xD800) * 0x400 + (low - 0xDC00);
}

static char *put_character(char *to, int32_t character) {
  const int more = character < 0x80 ? 0 : character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
  static const int first[] = {0, 0xC0, 0xE0, 0xF0};
  *to++ = (char)(first[more] | character >> 6 * more);
  for (int i = more - 1; i >= 0; i--) *to++ = (char)(0x80 | (character >> 6 * i & 0x3F));
  return to;
}

/* What a backslash begins, which was read. */
static rp_status read_escape(rpi_header *r, char **to) {
  static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
  const char *const found = r->at < r->end && *r->at != '\0' ? strchr(letters, *r->at) : NULL;
  if (found != NULL) {
    r->at++;
    *(*to)++ = meant[found - letters];
    return RP_OK;
  }
  if (r->at == r->end || *r->at++ != 'u') return rpi_header_fail(r, "an escape of JSON");
  const int32_t character = read_escaped(r);
  if (character < 0) return rpi_header_fail(r, "a character other than \\u0000");
  *to = put_character(*to, character);
  return RP_OK;
}

rp_status rpi_header_text(rpi_header *r, const char **text) {
  RPI_TRY(rpi_header_expect(r, '"', "a text"));
  char *to = r->at;
  *text = to;
  for (;;) {
    const int bytes = character_bytes(r->at, r->end);
    if (bytes == 0 || (unsigned char)*r->at < 0x20) return rpi_header_fail(r, "a text in UTF-8");
    if (*r->at == '"') break;
    if (*r->at == '\\') {
      r->at++;
      RPI_TRY(read_escape(r, &to));
      continue;
    }
    for (int i = 0; i < bytes; i++) *to++ = *r->at++;
  }
  r->at++;
  *to = '\0'; /* at the quote or before it */
  return RP_OK;
}

/* A whole number of JSON, from 0 on: no sign, no zero before others. */
static rp_status read_count(rpi_header *r, int64_t *count) {
  rpi_header_skip_space(r);
  const char *const begin = r->at;
  int64_t sum = 0;
  while (r->at < r->end && *r->at >= '0' && *r->at <= '9') {
    if (!rpi_multiply(sum, 10, &sum) || !rpi_add(sum, *r->at - '0', &sum)) {
      return rpi_header_fail(r, "a number below 2^63");
    }
    r->at++;
  }
  if (r->at == begin || (*begin == '0' && r->at - begin > 1)) {
    return rpi_header_fail(r, "a whole number");
  }
  *count = sum;
  return RP_OK;
}

rp_status rpi_header_counts(rpi_header *r, int64_t *counts, int most, int *found) {
  *found = 0;
  RPI_TRY(rpi_header_expect(r, '[', "a list of numbers"));
  if (rpi_header_passes(r, ']')) return RP_OK;
  do {
    if (*found == most) return rpi_header_fail(r, "the end of a list of numbers");
    RPI_TRY(read_count(r, &counts[(*found)++]));
  } while (rpi_header_passes(r, ','));
  return rpi_header_expect(r, ']', "',' or ']'");
}
