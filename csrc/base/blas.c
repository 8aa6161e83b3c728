/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.c: finding and loading the BLAS that blas.h describes.
 *
 * The library is never closed: tasks may be inside it at any time.
 */
#define _GNU_SOURCE

#include "base/blas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __APPLE__
#include <crt_externs.h>
#define environ (*_NSGetEnviron())
#endif

#include "base/folder.h"

#if !defined(RPI_BLAS_LIBRARY) && !defined(RPI_BLAS_BUILTIN)
#define LOOK_BESIDE_US
#if defined(__APPLE__)
#define RPI_BLAS_LIBRARY "libscipy_openblas.dylib"
#else
#define RPI_BLAS_LIBRARY "libscipy_openblas.so"
#endif
#define RPI_BLAS_PREFIX "scipy_"
#endif

#ifndef RPI_BLAS_PREFIX
#define RPI_BLAS_PREFIX ""
#endif

#ifdef RP_REAL_IS_DOUBLE
#define GEMM RPI_BLAS_PREFIX "cblas_dgemm"
#else
#define GEMM RPI_BLAS_PREFIX "cblas_sgemm"
#endif

/* Written by find() under pthread_once, only read after it. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static rpi_blas_gemm_fn gemm;
static bool insisted;
static char description[128] = "builtin";

#ifndef RPI_BLAS_BUILTIN

typedef void (*any_fn)(void);

/* ISO C has no cast from dlsym's object pointer to a function; POSIX has both of
 * one size. */
static any_fn symbol(void *library, const char *name) {
  void *const found = dlsym(library, name);
  any_fn function;
  memcpy(&function, &found, sizeof function);
  return function;
}

/* there: whether the file is, loaded or not. */
static void *open_library(bool *there) {
#ifdef LOOK_BESIDE_US
  static const char *const places[] = {"", "../lib/"};
  const char *const folder = rpi_own_folder();
  for (size_t i = 0; folder[0] != '\0' && i < sizeof places / sizeof places[0]; i++) {
    char path[4096];
    const int length = snprintf(path, sizeof path, "%s%s%s", folder, places[i], RPI_BLAS_LIBRARY);
    if (length < 0 || (size_t)length >= sizeof path) continue;
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library != NULL) return library;
    *there |= access(path, F_OK) == 0;
  }
#else
  *there = access(RPI_BLAS_LIBRARY, F_OK) == 0;
#endif
  return dlopen(RPI_BLAS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
}

#define CORE(name) "OPENBLAS_CORETYPE=" name

/* The kernels of OpenBLAS that use what a table of ours uses, by the names that its
 * DYNAMIC_ARCH builds know. NULL: let it choose. */
static const char *core_for_isa(const char *isa) {
  static const char *const cores[][2] = {
      {"avx2", CORE("Haswell")},   {"avx512", CORE("SkylakeX")},
      {"amx", CORE("SkylakeX")},   {"neon", CORE("ARMV8")},
#if defined(__aarch64__)
      {"portable", CORE("ARMV8")},
#else
      {"portable", CORE("Prescott")},
#endif
  };
  for (size_t i = 0; isa != NULL && i < sizeof cores / sizeof cores[0]; i++) {
    if (strcmp(isa, cores[i][0]) == 0) return cores[i][1];
  }
  return NULL;
}

/* OpenBLAS reads its environment while it is loaded, and starts its threads there. setenv would
 * move what getenv of another thread reads, so a copy stands in meanwhile; static, since such a
 * reader may be in it still. More variables than fit: loaded without. */
static void *open_pinned(bool *there) {
  static const char *copy[4096];
  const size_t most = sizeof copy / sizeof copy[0] - 1;
  const char *const core = core_for_isa(getenv("RELPOS_ISA"));
  size_t count = 0;
  copy[count++] = "OPENBLAS_NUM_THREADS=1"; /* of one name the first counts */
  if (core != NULL && getenv("OPENBLAS_CORETYPE") == NULL) copy[count++] = core;
  char **const given = environ;
  char **one = given;
  while (one != NULL && *one != NULL && count < most) copy[count++] = *one++;
  if (one != NULL && *one != NULL) return open_library(there);
  char **pinned = (char **)copy;
  __atomic_store_n(&environ, pinned, __ATOMIC_SEQ_CST);
  void *const library = open_library(there);
  /* another thread's setenv has left a copy of its own there */
  __atomic_compare_exchange_n(&environ, &pinned, given, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return library;
}

/* "OpenBLAS 0.3.34.481.3 DYNAMIC_ARCH ..." and the core, in short. */
static void describe(void *library) {
  const any_fn config = symbol(library, RPI_BLAS_PREFIX "openblas_get_config");
  const any_fn core = symbol(library, RPI_BLAS_PREFIX "openblas_get_corename");
  if (config == NULL || core == NULL) {
    snprintf(description, sizeof description, "%s", RPI_BLAS_LIBRARY);
    return;
  }
  const char *const text = ((char *(*)(void))config)();
  const char *const space = strchr(text, ' ');
  const int words = space == NULL ? 0 : (int)(space - text) + 1 + (int)strcspn(space + 1, " ");
  snprintf(description, sizeof description, "%.*s %s", words, text, ((char *(*)(void))core)());
}

static void find(void) {
  const char *const wish = getenv("RELPOS_BLAS");
  if (wish != NULL && strcmp(wish, "builtin") == 0) return;
#ifdef LOOK_BESIDE_US
  insisted = wish != NULL && strcmp(wish, "openblas") == 0;
#else
  insisted = true;
#endif
  bool there = false;
  void *const library = open_pinned(&there);
  if (library == NULL) {
    snprintf(description, sizeof description, "builtin (%s %s)", RPI_BLAS_LIBRARY,
             there ? "cannot be loaded" : "not found");
    return;
  }
  gemm = (rpi_blas_gemm_fn)symbol(library, GEMM);
  if (gemm == NULL) {
    snprintf(description, sizeof description, "builtin (%s has no %s)", RPI_BLAS_LIBRARY, GEMM);
    return;
  }
  const any_fn threads = symbol(library, RPI_BLAS_PREFIX "openblas_set_num_threads");
  if (threads != NULL) ((void (*)(int))threads)(1);
  describe(library);
}

#else

static void find(void) {}

#endif

rpi_blas_gemm_fn rpi_blas_gemm(void) {
  pthread_once(&once, find);
  return gemm;
}

bool rpi_blas_insisted(void) {
  pthread_once(&once, find);
  return insisted;
}

const char *rpi_blas_description(void) {
  pthread_once(&once, find);
  return description;
}
