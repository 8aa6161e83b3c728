/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu.h: which instruction sets this processor and operating system can run.
 *
 * One bit per table in csrc/isa/. AVX2 here means Haswell's set (AVX2, FMA, BMI
 * and F16C), AVX-512 means Skylake-X's (F, VL, BW, DQ, CD), each with the registers
 * saved by the operating system.
 */
#ifndef RPI_CPU_H
#define RPI_CPU_H

enum { RPI_CPU_PORTABLE = 1, RPI_CPU_AVX2 = 2, RPI_CPU_AVX512 = 4, RPI_CPU_NEON = 8 };

int rpi_cpu_features(void);

#endif
