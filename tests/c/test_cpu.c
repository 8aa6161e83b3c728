/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cpu.c: base/cpu.c. What it claims agrees with a second opinion (the compiler's run-time
 * query; of tiles, which not every compiler knows, the system's) and with itself.
 */
#include "base/cpu.h"

#include <stdbool.h>
#include <string.h>

#include "check.h"

#if defined(RPI_HAS_AMX) || defined(RPI_HAS_BF16)

/* Whether a word is among the flags of /proc/cpuinfo. */
static bool system_names(const char *feature) {
  FILE *const file = fopen("/proc/cpuinfo", "r");
  char word[256];
  bool found = false;
  CHECK(file != NULL);
  while (file != NULL && !found && fscanf(file, "%255s", word) == 1) {
    found = strcmp(word, feature) == 0;
  }
  if (file != NULL) fclose(file);
  return found;
}

#endif

int main(void) {
  const int features = rpi_cpu_features();
  CHECK((features & RPI_CPU_PORTABLE) != 0);
  CHECK_INT(features & ~(RPI_CPU_PORTABLE | RPI_CPU_AVX2 | RPI_CPU_AVX512 | RPI_CPU_NEON |
                         RPI_CPU_AMX | RPI_CPU_BF16),
            0);
  CHECK_INT(rpi_cpu_features(), features);
  rpi_cpu_hide(RPI_CPU_PORTABLE | RPI_CPU_BF16);
  CHECK_INT(rpi_cpu_features(), features & ~(RPI_CPU_PORTABLE | RPI_CPU_BF16));
  rpi_cpu_hide(0);
  CHECK_INT(rpi_cpu_features(), features);
#if defined(__x86_64__)
  CHECK_INT(features & RPI_CPU_NEON, 0);
  if ((features & RPI_CPU_AVX512) != 0) CHECK((features & RPI_CPU_AVX2) != 0);
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512cd");
  CHECK_INT((features & RPI_CPU_AVX2) != 0, avx2);
  CHECK_INT((features & RPI_CPU_AVX512) != 0, avx2 && avx512);
#ifdef RPI_HAS_AMX
  /* The system may refuse what the processor has, but not give what it has not. */
  const bool amx = system_names("amx_tile") && system_names("amx_bf16");
  if ((features & RPI_CPU_AMX) != 0) CHECK(amx && avx512);
#else
  CHECK_INT(features & RPI_CPU_AMX, 0);
#endif
#ifdef RPI_HAS_BF16
  const bool bf16 = system_names("avx512_bf16");
#else
  const bool bf16 = false;
#endif
  CHECK_INT((features & RPI_CPU_BF16) != 0, (features & RPI_CPU_AVX512) != 0 && bf16);
#elif defined(__aarch64__)
  CHECK_INT(features, RPI_CPU_PORTABLE | RPI_CPU_NEON);
#else
  CHECK_INT(features, RPI_CPU_PORTABLE);
#endif
  return check_report();
}
