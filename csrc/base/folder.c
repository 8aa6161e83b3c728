/* SPDX-License-Identifier: Apache-2.0
 *
 * folder.c: libcore's own place, as the loader knows it.
 */
#define _GNU_SOURCE

#include "base/folder.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* Written before main, only read after it. */
static char own[PATH_MAX + 1];

__attribute__((constructor)) static void find_own(void) {
  Dl_info self;
  char whole[PATH_MAX];
  if (dladdr(own, &self) == 0 || self.dli_fname == NULL) return;
  const char *name = self.dli_fname;
  if (name[0] != '/') { /* a program by its name alone was found by PATH */
    if (realpath(strchr(name, '/') != NULL ? name : "/proc/self/exe", whole) == NULL) return;
    name = whole;
  }
  const size_t length = (size_t)(strrchr(name, '/') + 1 - name);
  if (length < sizeof own) memcpy(own, name, length);
}

const char *rpi_own_folder(void) { return own; }
