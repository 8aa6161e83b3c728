/* SPDX-License-Identifier: Apache-2.0
 *
 * test_error.c: base/error.c. The sentence of a failure: kept, cut, quoted, and
 * each thread's own.
 */
#define _POSIX_C_SOURCE 200809L

#include "base/error.h"

#include <pthread.h>

#include "check.h"

static void test_sentence(void) {
  CHECK_TEXT(rp_last_error(), "no error");
  CHECK_INT(rpi_fail(RP_ERROR_SHAPE, "k has M=%d keys but mask has %d", 12, 10), RP_ERROR_SHAPE);
  CHECK(strcmp(rp_last_error(), "k has M=12 keys but mask has 10") == 0);
}

static void test_sentence_is_cut(void) {
  char text[2 * RPI_SENTENCE];
  memset(text, 'x', sizeof text);
  text[sizeof text - 1] = '\0';
  rpi_fail(RP_ERROR_FILE, "%s", text);
  CHECK_INT((int64_t)strlen(rp_last_error()), RPI_SENTENCE - 1);
  text[4095] = '\0'; /* as long as a path may be */
  rpi_fail(RP_ERROR_FILE, "cannot open '%s': %s", text, "No such file or directory");
  CHECK_TEXT(rp_last_error(), "xxx': No such file or directory");
}

static void test_sentence_quotes_the_previous(void) {
  rpi_fail(RP_ERROR_FILE, "inner");
  rpi_fail(RP_ERROR_FILE, "outer: %s", rp_last_error());
  CHECK(strcmp(rp_last_error(), "outer: inner") == 0);
}

static void test_quote(void) {
  char quoted[RPI_QUOTE], text[60];
  CHECK(strcmp(rpi_quote("", quoted), "''") == 0);
  CHECK(rpi_quote("plain text", quoted) == quoted);
  CHECK(strcmp(quoted, "'plain text'") == 0);
  CHECK(strcmp(rpi_quote("tab\t\x7f\xc3\xa9~", quoted), "'tab????~'") == 0);
  memset(text, 'x', sizeof text);
  text[48] = '\0';
  CHECK_INT((int64_t)strlen(rpi_quote(text, quoted)), 50);
  CHECK(quoted[48] == 'x' && quoted[49] == '\'');
  text[48] = 'x';
  text[49] = '\0';
  CHECK_INT((int64_t)strlen(rpi_quote(text, quoted)), 53);
  CHECK(strcmp(quoted + 48, "x...'") == 0);
}

static int evaluations;

static rp_status count_and_give(rp_status status) {
  evaluations++;
  return status == RP_OK ? RP_OK : rpi_fail(status, "given");
}

static rp_status macros(int check, rp_status tried) {
  RPI_CHECK(check == 1, RP_ERROR_ARGUMENT, "check is %d, expected 1", check);
  RPI_TRY(count_and_give(tried));
  return RP_OK;
}

static void test_macros(void) {
  CHECK_INT(macros(1, RP_OK), RP_OK);
  CHECK_INT(evaluations, 1);
  CHECK_INT(macros(0, RP_OK), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "check is 0, expected 1");
  CHECK_INT(evaluations, 1);
  CHECK_INT(macros(1, RP_ERROR_MEMORY), RP_ERROR_MEMORY);
  CHECK_TEXT(rp_last_error(), "given");
  CHECK_INT(evaluations, 2);
}

static void *other_thread(void *seen_at_first) {
  strcpy(seen_at_first, rp_last_error());
  rpi_fail(RP_ERROR_FILE, "theirs");
  return NULL;
}

static void test_each_thread_has_its_own(void) {
  rpi_fail(RP_ERROR_FILE, "mine");
  char seen[512] = "";
  pthread_t thread;
  if (!CHECK_INT(pthread_create(&thread, NULL, other_thread, seen), 0)) return;
  pthread_join(thread, NULL);
  CHECK_TEXT(seen, "no error");
  CHECK(strcmp(rp_last_error(), "mine") == 0);
}

int main(void) {
  test_sentence();
  test_sentence_is_cut();
  test_sentence_quotes_the_previous();
  test_quote();
  test_macros();
  test_each_thread_has_its_own();
  return check_report();
}
