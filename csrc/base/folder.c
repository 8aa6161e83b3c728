/* SPDX-License-Identifier: Apache-2.0
 *
 * folder.c: libcore's own place, as the loader knows it.
 */
#define _GNU_SOURCE

#include "base/folder.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Written by find() under pthread_once, only read after it. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char own[PATH_MAX + 1];

/* From the root: the folder that a name has, whichever file it links to; of a program by its name
 * alone, which was found by PATH, that of its file. */
static bool whole_folder(const char *name, char *folder) {
  char part[PATH_MAX];
  const char *const slash = strrchr(name, '/');
  const size_t length = slash != NULL ? (size_t)(slash - name) + 1 : 0;
  if (length >= sizeof part) return false;
  memcpy(part, name, length);
  part[length] = '\0';
  if (realpath(slash != NULL ? part : "/proc/self/exe", folder) == NULL) return false;
  if (slash == NULL) strrchr(folder, '/')[1] = '\0';
  else if (folder[1] != '\0') strcat(folder, "/"); /* that of "/" is there */
  return true;
}

static void find(void) {
  Dl_info self;
  if (dladdr(own, &self) == 0 || self.dli_fname == NULL) return;
  const char *const name = self.dli_fname, *const slash = strrchr(name, '/');
  const size_t length = slash != NULL ? (size_t)(slash - name) + 1 : 0;
  if (name[0] == '/' && length < sizeof own) memcpy(own, name, length);
  else if (name[0] != '/' && !whole_folder(name, own)) own[0] = '\0';
}

/* At once when libcore is loaded, or for whoever calls it before its turn comes. */
__attribute__((constructor)) static void find_early(void) { pthread_once(&once, find); }

const char *rpi_own_folder(void) {
  find_early();
  return own;
}
