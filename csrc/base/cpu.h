/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu.h: which instruction sets this processor and operating system can run.
 *
 * One bit per table in csrc/isa/. AVX2 here means Haswell's set (AVX2, FMA, BMI
 * and F16C), AVX-512 means Skylake-X's (F, VL, BW, DQ, CD), AMX that and tiles of bf16, each with
 * the registers saved by the operating system. BF16 is no table of its own: it is what the tables
 * of AVX-512 have beside it, with the same results (ops/bf16.h).
 */
#ifndef RPI_CPU_H
#define RPI_CPU_H

enum {
  RPI_CPU_PORTABLE = 1,
  RPI_CPU_AVX2 = 2,
  RPI_CPU_AVX512 = 4,
  RPI_CPU_NEON = 8,
  RPI_CPU_AMX = 16,
  RPI_CPU_BF16 = 32
};

/* Whether the compiler knows tiles, and numbers are those that they are made for. */
#if defined(__x86_64__) && defined(__linux__) && !defined(RP_REAL_IS_DOUBLE) &&                    \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define RPI_HAS_AMX
#endif

/* Whether the compiler knows AVX-512's instructions for bf16. */
#if defined(__x86_64__) && !defined(RP_REAL_IS_DOUBLE) &&                                          \
    (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10)
#define RPI_HAS_BF16
#endif

/* Asked once: the answer does not change, and a virtual machine takes long to give it. */
int rpi_cpu_features(void);

/* For tests: from now on as if these were not there; 0: as it is. */
void rpi_cpu_hide(int features);

#endif
