/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch.c: one table of operations for the life of the process.
 *
 * The candidates are listed from the plainest to the best; the last one that can
 * run wins unless RELPOS_ISA names another. Which candidates exist is a matter of
 * the architecture this was compiled for, which of them can run a matter of the
 * processor. The environment is read once: the name is kept, because the sentence
 * of a wrong one is needed at every call and getenv's memory may change.
 */
#define _POSIX_C_SOURCE 200809L

#include "isa/dispatch.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/threads.h"

static const struct candidate {
  const rp_ops *ops;
  int feature;
} candidates[] = {
    {&rpi_ops_portable, RPI_CPU_PORTABLE},
#if defined(__x86_64__)
    {&rpi_ops_avx2, RPI_CPU_AVX2},
    {&rpi_ops_avx512, RPI_CPU_AVX512},
#ifdef RPI_HAS_AMX
    {&rpi_ops_amx, RPI_CPU_AMX},
#endif
#elif defined(__aarch64__)
    {&rpi_ops_neon, RPI_CPU_NEON},
#endif
};

enum { CANDIDATES = sizeof candidates / sizeof candidates[0] };

/* Written by choose() under pthread_once, only read after it. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static const rp_ops *chosen; /* NULL: requested cannot be had */
static const char *narrow;   /* what multiplies bf16 there */
static char requested[32];   /* RELPOS_ISA, cut to fit; "": not set */
static char available[64];
static char blas[32]; /* RELPOS_BLAS, likewise, where it is unknown */

static void choose(void) {
  const char *name = getenv("RELPOS_ISA"), *wish = getenv("RELPOS_BLAS");
  if (name != NULL) snprintf(requested, sizeof requested, "%s", name);
  if (wish != NULL && strcmp(wish, "builtin") != 0 && strcmp(wish, "openblas") != 0) {
    snprintf(blas, sizeof blas, "%s", wish);
  }
  const int features = rpi_cpu_features();
  for (int i = 0; i < CANDIDATES; i++) {
    if ((features & candidates[i].feature) == 0) continue;
    const rp_ops *ops = candidates[i].ops;
    const size_t length = strlen(available);
    snprintf(available + length, sizeof available - length, "%s%s", length != 0 ? " " : "",
             ops->name);
    if (requested[0] == '\0' || strcmp(requested, ops->name) == 0) chosen = ops;
  }
  const char *const found = chosen != NULL ? chosen->name : "none";
  const bool avx512 = strcmp(found, "avx512") == 0 && (features & RPI_CPU_BF16) != 0;
  narrow = strcmp(found, "amx") == 0 ? "AMX" : avx512 ? "AVX512-BF16" : "none";
}

static bool is_known(const char *name) {
  static const char *const names[] = {"portable", "avx2", "avx512", "amx", "neon"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (strcmp(name, names[i]) == 0) return true;
  }
  return false;
}

rp_status rpi_ops_get(const rp_ops **ops) {
  pthread_once(&once, choose);
  RPI_CHECK(chosen != NULL, RP_ERROR_ARGUMENT, "RELPOS_ISA: '%s' %s; available here: %s", requested,
            is_known(requested) ? "cannot run on this machine" : "is unknown", available);
  *ops = chosen;
  RPI_CHECK(blas[0] == '\0', RP_ERROR_ARGUMENT,
            "RELPOS_BLAS: '%s' is unknown, must be builtin or openblas", blas);
  return rpi_threads_check();
}

const char *rpi_ops_bf16(void) {
  pthread_once(&once, choose);
  return narrow;
}

const char *rpi_ops_available(void) {
  pthread_once(&once, choose);
  return available;
}
