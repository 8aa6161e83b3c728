/* SPDX-License-Identifier: Apache-2.0
 *
 * tables.h: the operation tables that this machine can run, for tests that call them
 * directly, and what tests know about how they were built.
 */
#ifndef TABLES_H
#define TABLES_H

#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "isa/dispatch.h"
#ifndef RP_REAL_IS_DOUBLE
#include "device_table.h"
#endif

#ifdef TEST_ONLY
extern const rp_ops TEST_ONLY;
int64_t twin_products(void); /* that tiles have computed (twin_table.c) */
#endif

/* Under a sanitizer, under an emulator, with a twin: the same checks on fewer and smaller shapes.
 */
static inline bool is_small_run(void) {
#ifdef TEST_ONLY
  return true;
#else
  return getenv("RELPOS_TEST_SMALL") != NULL;
#endif
}

/* Under the checker of races, who needs to see every kind of block once, and with a twin under a
 * sanitizer: fewer still. */
static inline bool is_tiny_run(void) {
  const char *const small = getenv("RELPOS_TEST_SMALL");
#ifdef TEST_ONLY
  return small != NULL;
#else
  return small != NULL && strcmp(small, "tiny") == 0;
#endif
}

/* Is the table that of a device, and not of this processor? */
static inline bool is_device_run(void) { return getenv("RELPOS_TEST_DEVICE") != NULL; }

/* Are some products of a table instructions of bf16, as it is, and the twin's where those are
 * hidden (rpi_cpu_hide)? */
static inline bool has_twin(const rp_ops *ops) {
#if defined(RPI_HAS_BF16) && !defined(TEST_ONLY)
  if ((rpi_cpu_features() & RPI_CPU_BF16) == 0) return false;
  return strcmp(ops->name, "avx512") == 0 || strcmp(ops->name, "amx") == 0;
#else
  (void)ops;
  return false;
#endif
}

/* The i-th table that can run here, the plainest first; NULL beyond the last. On a device there is
 * one, and where a test has a table of its own; for the checker of races the best, as threads share
 * nothing there that they do not share on others. */
static inline const rp_ops *table_at(int i) {
#ifdef TEST_ONLY
  return i == 0 ? &TEST_ONLY : NULL;
#else
#ifndef RP_REAL_IS_DOUBLE
  if (is_device_run()) return i == 0 ? device_table() : NULL;
#endif
  static const struct {
    int feature;
    const rp_ops *ops;
  } tables[] = {
      {RPI_CPU_PORTABLE, &rpi_ops_portable},
#if defined(__x86_64__)
      {RPI_CPU_AVX2, &rpi_ops_avx2},
      {RPI_CPU_AVX512, &rpi_ops_avx512},
#ifdef RPI_HAS_AMX
      {RPI_CPU_AMX, &rpi_ops_amx},
#endif
#elif defined(__aarch64__)
      {RPI_CPU_NEON, &rpi_ops_neon},
#endif
  };
  const rp_ops *last = NULL;
  for (size_t t = 0; t < sizeof tables / sizeof tables[0]; t++) {
    if ((rpi_cpu_features() & tables[t].feature) == 0) continue;
    last = tables[t].ops;
    if (!is_tiny_run() && i-- == 0) return last;
  }
  return is_tiny_run() && i == 0 ? last : NULL;
#endif
}

#endif
