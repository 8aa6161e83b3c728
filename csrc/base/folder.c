/* SPDX-License-Identifier: Apache-2.0
 *
 * folder.c: libcore's own place, as the loader knows it.
 */
#define _GNU_SOURCE

#include "base/folder.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Written by find() under pthread_once, only read after it. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char own[PATH_MAX + 1];

/* The folder of the name that the loader knows, from the root. A program by its name alone was
 * found by PATH: of it the folder of its file. */
static void find(void) {
  Dl_info self;
  char program[PATH_MAX], folder[PATH_MAX];
  if (dladdr(own, &self) == 0 || self.dli_fname == NULL) return;
  const char *const known = self.dli_fname;
  const char *const name = strchr(known, '/') != NULL ? known : realpath("/proc/self/exe", program);
  const size_t length = name != NULL ? (size_t)(strrchr(name, '/') + 1 - name) : sizeof folder;
  if (length >= sizeof folder) return;
  memcpy(folder, name, length);
  folder[length] = '\0';
  if (folder[0] == '/') strcpy(own, folder);
  else if (realpath(folder, program) != NULL) {
    strcpy(own, program);
    if (own[1] != '\0') strcat(own, "/"); /* that of "/" is there */
  }
}

/* At once when libcore is loaded, or for whoever calls it before its turn comes. */
__attribute__((constructor)) static void find_early(void) { pthread_once(&once, find); }

const char *rpi_own_folder(void) {
  find_early();
  return own;
}
