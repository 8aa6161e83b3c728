/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu.c: which instruction sets can run here, asked of the processor itself.
 *
 * On x86 a set counts only if the processor has every instruction that core.mk
 * lets the compiler use in that set's file, and the operating system saves the
 * registers (XCR0). CPUID by hand, because the compilers' own query knows
 * different feature names in different versions. On aarch64 NEON is part of the
 * architecture.
 */
#define _GNU_SOURCE

#include "base/cpu.h"

#include <stdatomic.h>
#include <stdbool.h>

#if defined(__x86_64__)

#include <cpuid.h>

static unsigned bit(int number) { return 1u << number; }

static unsigned enabled_registers(void) {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

#if defined(RPI_HAS_AMX)

#include <sys/syscall.h>
#include <unistd.h>

/* Eight tiles of 16 rows of 64 bytes, and the permission to use them: a process of Linux has to ask
 * for the registers' 8 KiB. */
static bool has_tiles(unsigned leaf7_edx, unsigned registers) {
  const unsigned amx = bit(22) | bit(24), tile_registers = bit(17) | bit(18); /* BF16 TILE */
  const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM */
  unsigned eax, ebx, ecx, edx;
  return (leaf7_edx & amx) == amx && (registers & tile_registers) == tile_registers &&
         __get_cpuid_count(0x1D, 1, &eax, &ebx, &ecx, &edx) && eax >> 16 == 1024 &&
         ebx == (8u << 16 | 64u) && (ecx & 0xFFFF) == 16 &&
         syscall(SYS_arch_prctl, request, tile_data) == 0;
}

#else

static bool has_tiles(unsigned leaf7_edx, unsigned registers) {
  (void)leaf7_edx;
  (void)registers;
  return false;
}

#endif

static int ask_features(void) {
  const unsigned leaf1_ecx = bit(12) | bit(27) | bit(28) | bit(29); /* FMA OSXSAVE AVX F16C */
  const unsigned avx2_ebx = bit(3) | bit(5) | bit(8);               /* BMI AVX2 BMI2 */
  const unsigned avx512_ebx = bit(16) | bit(17) | bit(28) | bit(30) | bit(31); /* F DQ CD BW VL */
  const unsigned avx_registers = bit(1) | bit(2);                              /* XMM YMM */
  const unsigned avx512_registers = avx_registers | bit(5) | bit(6) | bit(7);  /* masks ZMM */

  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & leaf1_ecx) != leaf1_ecx) {
    return RPI_CPU_PORTABLE;
  }
  const unsigned registers = enabled_registers(); /* allowed: OSXSAVE was set */
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (ebx & avx2_ebx) != avx2_ebx ||
      (registers & avx_registers) != avx_registers) {
    return RPI_CPU_PORTABLE;
  }
  if ((ebx & avx512_ebx) != avx512_ebx || (registers & avx512_registers) != avx512_registers) {
    return RPI_CPU_PORTABLE | RPI_CPU_AVX2;
  }
  int sets = RPI_CPU_PORTABLE | RPI_CPU_AVX2 | RPI_CPU_AVX512;
  if (has_tiles(edx, registers)) sets |= RPI_CPU_AMX;
#ifdef RPI_HAS_BF16
  const bool more = eax >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx);
  if (more && (eax & bit(5)) != 0) sets |= RPI_CPU_BF16;
#endif
  return sets;
}

#elif defined(__aarch64__)

static int ask_features(void) { return RPI_CPU_PORTABLE | RPI_CPU_NEON; }

#else

static int ask_features(void) { return RPI_CPU_PORTABLE; }

#endif

static atomic_int hidden;

void rpi_cpu_hide(int features) { atomic_store_explicit(&hidden, features, memory_order_relaxed); }

int rpi_cpu_features(void) {
  static atomic_int known; /* by more threads than one maybe, each of the same */
  int features = atomic_load_explicit(&known, memory_order_relaxed);
  if (features == 0) {
    features = ask_features();
    atomic_store_explicit(&known, features, memory_order_relaxed);
  }
  return features & ~atomic_load_explicit(&hidden, memory_order_relaxed);
}
