/* SPDX-License-Identifier: Apache-2.0
 *
 * test_dispatch.c: isa/dispatch.c. The choice is made once per process, so every
 * case is a process of its own, forked before this one has chosen.
 */
#define _POSIX_C_SOURCE 200809L

#include "isa/dispatch.h"

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/cpu.h"
#include "check.h"

/* Runs a case with RELPOS_ISA = isa (NULL: unset) and adds its verdict to ours. */
static void run_case(const char *isa, void (*test)(const char *isa)) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    if (isa != NULL) setenv("RELPOS_ISA", isa, 1);
    else unsetenv("RELPOS_ISA");
    test(isa);
    fflush(stdout);
    _exit(check_failed != 0);
  }
  int status = 1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  if (!CHECK_INT(status, 0)) printf(" (RELPOS_ISA=%s)", isa != NULL ? isa : "");
}

static const char *last_word(const char *words) {
  const char *space = strrchr(words, ' ');
  return space != NULL ? space + 1 : words;
}

static void test_the_best_is_chosen(const char *isa) {
  (void)isa;
  const rp_ops *ops = NULL, *again = NULL;
  if (!CHECK_INT(rpi_ops_get(&ops), RP_OK)) return;
  CHECK(strcmp(ops->name, last_word(rpi_ops_available())) == 0);
  CHECK_INT(strncmp(rpi_ops_available(), "portable", 8), 0);
  CHECK_INT(rpi_ops_get(&again), RP_OK);
  CHECK(again == ops);
}

static void test_the_named_is_chosen(const char *isa) {
  const rp_ops *ops = NULL;
  if (!CHECK_INT(rpi_ops_get(&ops), RP_OK)) return;
  CHECK(strcmp(ops->name, isa) == 0);
  CHECK_TEXT(rpi_ops_available(), isa);
}

static void test_the_unavailable_fails_every_time(const char *isa) {
  for (int i = 0; i < 2; i++) {
    const rp_ops *ops = NULL;
    CHECK_INT(rpi_ops_get(&ops), RP_ERROR_ARGUMENT);
    CHECK(ops == NULL);
    CHECK_TEXT(rp_last_error(), "RELPOS_ISA");
    CHECK_TEXT(rp_last_error(), "cannot run on this machine");
    CHECK_TEXT(rp_last_error(), isa);
    CHECK_TEXT(rp_last_error(), rpi_ops_available());
  }
}

static void test_the_unknown_fails_every_time(const char *isa) {
  (void)isa;
  for (int i = 0; i < 2; i++) {
    const rp_ops *ops = NULL;
    CHECK_INT(rpi_ops_get(&ops), RP_ERROR_ARGUMENT);
    CHECK(ops == NULL);
    CHECK_TEXT(rp_last_error(), "is unknown; available here: portable");
  }
}

static void test_an_unknown_blas_fails_every_time(const char *isa) {
  (void)isa;
  setenv("RELPOS_BLAS", "mkl", 1);
  for (int i = 0; i < 2; i++) {
    const rp_ops *ops = NULL;
    CHECK_INT(rpi_ops_get(&ops), RP_ERROR_ARGUMENT);
    CHECK_TEXT(rp_last_error(), "RELPOS_BLAS: 'mkl' is unknown, must be builtin or openblas");
  }
}

int main(void) {
  static const struct {
    const char *name;
    int feature;
  } tables[] = {{"portable", RPI_CPU_PORTABLE},
                {"avx2", RPI_CPU_AVX2},
                {"avx512", RPI_CPU_AVX512},
                {"amx", RPI_CPU_AMX},
                {"neon", RPI_CPU_NEON}};
  run_case(NULL, test_the_best_is_chosen);
  run_case("", test_the_best_is_chosen);
  for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
    const bool can_run = (rpi_cpu_features() & tables[i].feature) != 0;
    run_case(tables[i].name,
             can_run ? test_the_named_is_chosen : test_the_unavailable_fails_every_time);
  }
  run_case("sse9", test_the_unknown_fails_every_time);
  run_case("AVX2", test_the_unknown_fails_every_time);
  run_case("portable avx2", test_the_unknown_fails_every_time);
  run_case("a-name-longer-than-any-buffer-that-would-be-reasonable-for-it",
           test_the_unknown_fails_every_time);
  run_case(NULL, test_an_unknown_blas_fails_every_time);
  return check_report();
}
