/* SPDX-License-Identifier: Apache-2.0
 *
 * check.h: what a test program needs and no more.
 *
 *   int main(void) {
 *     CHECK(1 + 1 == 2);
 *     CHECK_INT(rp_set_threads(-1), RP_ERROR_ARGUMENT);
 *     CHECK_TEXT(rp_last_error(), "threads is -1");
 *     return check_report();
 *   }
 *
 * A failed check prints its place and both values, and the program goes on; so a
 * check that later lines rely on is an `if (!CHECK(...)) return ...`. Checks count
 * in one thread: a task notes what it saw and the caller checks it.
 */
#ifndef CHECK_H
#define CHECK_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int check_passed, check_failed;

static inline bool check_count(bool passed, const char *file, int line, const char *text) {
  if (passed) check_passed++;
  else {
    check_failed++;
    printf("\n%s:%d: failed: %s", file, line, text);
  }
  return passed;
}

static inline bool check_int(int64_t got, int64_t expected, const char *file, int line,
                             const char *text) {
  if (check_count(got == expected, file, line, text)) return true;
  printf(" is %lld, expected %lld", (long long)got, (long long)expected);
  return false;
}

static inline bool check_text(const char *got, const char *part, const char *file, int line,
                              const char *text) {
  if (check_count(got != NULL && strstr(got, part) != NULL, file, line, text)) return true;
  printf(" is \"%s\", expected to contain \"%s\"", got != NULL ? got : "(NULL)", part);
  return false;
}

/* Relative to the expected value where that is above 1. A NaN is never near. */
static inline bool check_near(double got, double expected, double tolerance, const char *file,
                              int line, const char *text) {
  const double bound = tolerance * fmax(1.0, fabs(expected));
  if (check_count(fabs(got - expected) <= bound, file, line, text)) return true;
  printf(" is %.17g, expected %.17g within %g", got, expected, bound);
  return false;
}

#define CHECK(condition) check_count((condition), __FILE__, __LINE__, #condition)
#define CHECK_INT(got, expected) check_int((got), (expected), __FILE__, __LINE__, #got)
#define CHECK_TEXT(got, part) check_text((got), (part), __FILE__, __LINE__, #got)
#define CHECK_NEAR(got, expected, tolerance)                                                       \
  check_near((got), (expected), (tolerance), __FILE__, __LINE__, #got)

/* For the end of main: the counts, and the exit code. */
static inline int check_report(void) {
  printf("%s%d passed, %d failed\n", check_failed != 0 ? "\n" : "", check_passed, check_failed);
  return check_failed != 0 || check_passed == 0;
}

#endif
