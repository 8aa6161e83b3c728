/* SPDX-License-Identifier: Apache-2.0
 *
 * error.c: the sentence behind a failed status.
 *
 * One buffer per thread, so that two threads that fail at once do not mix their
 * sentences. It has a fixed size because failing must not itself need memory: a
 * longer sentence is cut. A sentence may quote the previous one, which is why it
 * is formatted beside the buffer and copied.
 */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char sentence[RPI_SENTENCE] = "no error";

rp_status rpi_fail(rp_status status, const char *format, ...) {
  char fresh[RPI_SENTENCE];
  va_list arguments;
  va_start(arguments, format);
  const int length = vsnprintf(fresh, sizeof fresh, format, arguments);
  va_end(arguments);
  if (length >= 0) memcpy(sentence, fresh, sizeof sentence);
  else strcpy(sentence, "a message could not be formatted");
  return status;
}

const char *rpi_quote(const char *text, char quoted[RPI_QUOTE]) {
  const size_t most = 48;
  size_t length = 0;
  quoted[length++] = '\'';
  for (; *text != '\0' && length <= most; text++) {
    quoted[length++] = (char)(*text >= ' ' && *text <= '~' ? *text : '?');
  }
  strcpy(quoted + length, *text != '\0' ? "...'" : "'");
  return quoted;
}

const char *rp_last_error(void) { return sentence; }
