/* SPDX-License-Identifier: Apache-2.0
 *
 * test_api.c: api.c. Names of statuses, checks of the number of threads, build
 * information for callers of another version.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "relpos/relpos.h"

static void test_status_names(void) {
  CHECK_TEXT(rp_status_name(RP_OK), "RP_OK");
  CHECK_TEXT(rp_status_name(RP_ERROR_ARGUMENT), "RP_ERROR_ARGUMENT");
  CHECK_TEXT(rp_status_name(RP_ERROR_SHAPE), "RP_ERROR_SHAPE");
  CHECK_TEXT(rp_status_name(RP_ERROR_MEMORY), "RP_ERROR_MEMORY");
  CHECK_TEXT(rp_status_name(RP_ERROR_FILE), "RP_ERROR_FILE");
  CHECK_TEXT(rp_status_name(RP_ERROR_ORDER), "RP_ERROR_ORDER");
  CHECK_TEXT(rp_status_name(RP_ERROR_DEVICE), "RP_ERROR_DEVICE");
  CHECK_TEXT(rp_status_name((rp_status)99), "unknown status");
}

static void test_threads(void) {
  const int at_first = rp_get_threads();
  CHECK(at_first >= 1);
  CHECK_INT(rp_set_threads(3), RP_OK);
  CHECK_INT(rp_get_threads(), 3);
  CHECK_INT(rp_set_threads(-1), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "threads is -1, expected 1 to 1024");
  CHECK_INT(rp_set_threads(1025), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_get_threads(), 3);
  CHECK_INT(rp_set_threads(1024), RP_OK);
  CHECK_INT(rp_get_threads(), 1024);
  CHECK_INT(rp_set_threads(0), RP_OK);
  CHECK_INT(rp_get_threads(), at_first);
}

static void test_build_info(void) {
  rp_build_info info = {.struct_size = sizeof info};
  if (!CHECK_INT(rp_build_info_get(&info), RP_OK)) return;
  CHECK_INT((int64_t)info.struct_size, (int64_t)sizeof info);
  CHECK(strcmp(info.version, RP_VERSION) == 0);
  CHECK(strlen(info.compiler) > 0);
  CHECK_TEXT(info.flags, "-ffp-contract=fast");
  CHECK_TEXT(info.isa_available, "portable");
  CHECK_TEXT(info.isa_available, info.isa);
  CHECK(strlen(info.blas) > 0);
  CHECK_INT(info.real_bytes, (int)sizeof(rp_real));
  CHECK_INT(info.threads, rp_get_threads());
}

static void test_build_info_sizes(void) {
  CHECK_INT(rp_build_info_get(NULL), RP_ERROR_ARGUMENT);
  rp_build_info info = {.struct_size = 0, .version = "untouched"};
  CHECK_INT(rp_build_info_get(&info), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "info.struct_size=0, must be");
  info.struct_size = 4097; /* more than any will have: it was never set */
  CHECK_INT(rp_build_info_get(&info), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "struct_size=4097, must be");
  CHECK_TEXT(info.version, "untouched");
  CHECK_TEXT(rp_version(), RP_VERSION);

  /* A caller of a later version: its own fields come back as zero, and nothing
   * behind its struct is touched. */
  struct {
    rp_build_info known;
    char later[16], beyond[16];
  } newer;
  memset(&newer, 7, sizeof newer);
  newer.known.struct_size = sizeof newer.known + sizeof newer.later;
  CHECK_INT(rp_build_info_get(&newer.known), RP_OK);
  CHECK(strcmp(newer.known.version, RP_VERSION) == 0);
  for (size_t i = 0; i < sizeof newer.later; i++) CHECK_INT(newer.later[i], 0);
  for (size_t i = 0; i < sizeof newer.beyond; i++) CHECK_INT(newer.beyond[i], 7);
}

/* Bug reports about a bad RELPOS_ISA need build information most. */
static void test_build_info_with_a_bad_isa(void) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    setenv("RELPOS_ISA", "nonsense", 1);
    rp_build_info info = {.struct_size = sizeof info};
    const bool good = rp_build_info_get(&info) == RP_OK && strcmp(info.isa, "none") == 0 &&
                      strstr(info.isa_available, "portable") != NULL;
    _exit(good ? 0 : 1);
  }
  int status = 1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK_INT(status, 0);
}

int main(void) {
  test_build_info_with_a_bad_isa(); /* first: the choice is made once per process */
  test_status_names();
  test_threads();
  test_build_info();
  test_build_info_sizes();
  return check_report();
}
