/* SPDX-License-Identifier: Apache-2.0
 *
 * test_folder.c: base/folder.c. Of a program that libcore is linked into it is the program's,
 * wherever that works meanwhile. tests/test_package.py starts one by names that mean another folder
 * later.
 */
#define _GNU_SOURCE

#include "base/folder.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

static char early[PATH_MAX + 1];

/* Before libcore's own turn has come, whichever that is. */
__attribute__((constructor(101))) static void ask_early(void) { strcpy(early, rpi_own_folder()); }

int main(void) {
  char whole[PATH_MAX], before[PATH_MAX + 1];
  CHECK(realpath("/proc/self/exe", whole) != NULL);
  strrchr(whole, '/')[1] = '\0';
  CHECK_TEXT(early, rpi_own_folder());
  if (realpath(rpi_own_folder(), before) == NULL) return 1;
  strcat(before, "/");
  CHECK_TEXT(before, whole);
  CHECK(rpi_own_folder()[0] == '/' && strrchr(rpi_own_folder(), '/')[1] == '\0');
  CHECK_INT(chdir("/"), 0);
  if (realpath(rpi_own_folder(), before) == NULL) return 1;
  strcat(before, "/");
  CHECK_TEXT(before, whole);
  return check_report();
}
