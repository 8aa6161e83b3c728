/* SPDX-License-Identifier: Apache-2.0
 *
 * bf16.h: numbers rounded to bf16, two to a word, and products of such words.
 *
 * A word holds a number in its lower half and the next one in its upper half. Its product with
 * another adds two multiply-adds to a sum of f32, that of the upper halves first: AVX-512's
 * vdpbf16ps does so at once, at the speed of one. `native`: by the instructions, which a processor
 * with AVX-512 may have or not; so who calls them asks, and keeps both. The other, the twin, does
 * the same in plain C, to the same bit where denormal numbers are zeros (base/threads.h).
 *
 * Rounding is to the nearest, halves to even. Denormal numbers become zeros of their sign, as the
 * instruction has it.
 */
#ifndef RPI_BF16_H
#define RPI_BF16_H

#include <string.h>

#include "base/cpu.h"
#include "ops/tile.h"
#include "relpos/device.h"

/* How operands are multiplied: as numbers; rounded, as words, by instructions; rounded, by the
 * twin. */
enum { RPI_NUMBERS, RPI_NATIVE, RPI_TWIN };

#if RPI_REAL_BYTES == 4

#if defined(RPI_HAS_BF16) && defined(__AVX512BW__) && RPI_LANES == 16
#define RPI_BF16_NATIVE
#define RPI_BF16_TARGET __attribute__((target("avx512bf16")))
#endif

/* May what is compiled here be native? */
static bool rpi_bf16_native(void) {
#ifdef RPI_BF16_NATIVE
  return (rpi_cpu_features() & RPI_CPU_BF16) != 0;
#else
  return false;
#endif
}

static int rpi_how(int precision) {
  return precision != RP_BF16 ? RPI_NUMBERS : rpi_bf16_native() ? RPI_NATIVE : RPI_TWIN;
}

typedef uint32_t rpi_words __attribute__((vector_size(4 * RPI_LANES)));

#define RPI_BF16_UPPER 0xFFFF0000u

/* Each lane a number of bf16, in its upper half. A NaN stays one; where denormal numbers are zeros,
 * they compare as such. */
RPI_INLINE rpi_words rpi_bf16_round(rpi_register x) {
  const rpi_words bits = (rpi_words)x, odd = (rpi_words)(x != x), none = (rpi_words)(x == 0);
  const rpi_words near = (bits + 0x7FFFu + (bits >> 16 & 1u)) | odd;
  return near & ~(none & 0x7FFFFFFFu) & RPI_BF16_UPPER;
}

/* The lanes of a, then of b, of even and of odd number. */
#if RPI_LANES == 16
#define RPI_EVEN(a, b)                                                                             \
  RPI_SHUFFLE(rpi_lanes, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define RPI_ODD(a, b)                                                                              \
  RPI_SHUFFLE(rpi_lanes, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#elif RPI_LANES == 8
#define RPI_EVEN(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define RPI_ODD(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#elif RPI_LANES == 4
#define RPI_EVEN(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 0, 2, 4, 6)
#define RPI_ODD(a, b) RPI_SHUFFLE(rpi_lanes, a, b, 1, 3, 5, 7)
#endif

/* Words of numbers that follow each other: of `first`, then of `second`. */
RPI_INLINE rpi_register rpi_words_of(const bool native, rpi_register first, rpi_register second) {
#ifdef RPI_BF16_NATIVE
  if (native) {
    rpi_register words;
    __asm__("vcvtne2ps2bf16 %2, %1, %0" : "=v"(words) : "v"(second), "v"(first));
    return words;
  }
#endif
  (void)native;
  const rpi_words a = rpi_bf16_round(first), b = rpi_bf16_round(second);
  return (rpi_register)(RPI_EVEN(a, b) >> 16 | RPI_ODD(a, b));
}

/* Words of numbers that lie beside each other: lanes of `first` and of `second`. */
RPI_INLINE rpi_register rpi_words_across(const bool native, rpi_register first,
                                         rpi_register second) {
#ifdef RPI_BF16_NATIVE
  if (native) {
    typedef uint16_t halves __attribute__((vector_size(64)));
    static const halves order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    rpi_register words = rpi_words_of(true, first, second);
    __asm__("vpermw %1, %2, %0" : "=v"(words) : "v"(words), "v"(order));
    return words;
  }
#endif
  (void)native;
  return (rpi_register)(rpi_bf16_round(first) >> 16 | rpi_bf16_round(second));
}

/* Words of the numbers in a row from `from` on, times the factor, zeros beyond `count`. */
RPI_INLINE rpi_register rpi_words_at(const bool native, const real factor, const real *from,
                                     int64_t count) {
  if (count >= 2 * RPI_LANES) {
    return rpi_words_of(native, factor * rpi_load(from), factor * rpi_load(from + RPI_LANES));
  }
  real whole[2 * RPI_LANES] = {0};
  for (int64_t i = 0; i < count; i++) whole[i] = factor * from[i];
  return rpi_words_of(native, rpi_load(whole), rpi_load(whole + RPI_LANES));
}

/* A half of every word, as a number. */
RPI_INLINE rpi_register rpi_upper(rpi_register words) {
  return (rpi_register)((rpi_words)words & RPI_BF16_UPPER);
}
RPI_INLINE rpi_register rpi_lower(rpi_register words) {
  return (rpi_register)((rpi_words)words << 16);
}

#ifdef RPI_BF16_NATIVE
/* The word at `at`, in every lane. */
RPI_INLINE rpi_register rpi_word(const real *at) {
  uint32_t bits;
  memcpy(&bits, at, sizeof bits);
  return (rpi_register)((rpi_words){0} + bits);
}

/* sum + a . b, lane by lane. */
RPI_INLINE rpi_register rpi_words_add(rpi_register sum, rpi_register a, rpi_register b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#endif

#else

static int rpi_how(int precision) {
  (void)precision;
  return RPI_NUMBERS;
}

#endif

/* sum + *a times b, lane by lane: of numbers, or of words by instructions. */
RPI_INLINE rpi_register rpi_add_element(const bool native, rpi_register sum, const real *a,
                                        rpi_register b) {
#ifdef RPI_BF16_NATIVE
  if (native) return rpi_words_add(sum, rpi_word(a), b);
#endif
  (void)native;
  return sum + *a * b;
}

#endif
