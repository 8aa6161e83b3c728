/* SPDX-License-Identifier: Apache-2.0
 *
 * exp2.h: 2 to the power x, as softmax needs it, in plain C that vectorises.
 *
 * x = n + f with n the nearest integer and |f| <= 1/2; 2^f by a polynomial of
 * degree 6 fitted to the relative error (1.9e-9; rounding makes it 8e-8), 2^n by
 * its exponent bits. Softmax only meets x <= RPI_RAISE, and wants these limits:
 *
 *   x < -126.5, -inf    exactly 0, so that a masked key weighs exactly nothing
 *   NaN                 NaN
 */
#ifndef RPI_EXP2_H
#define RPI_EXP2_H

#include <math.h>
#include <string.h>

#include "ops/tile.h"

#if defined(__AVX512DQ__) && RPI_LANES == 16
#include <immintrin.h>
#endif

#ifdef RP_REAL_IS_DOUBLE

static inline real rpi_exp2(real x) { return exp2(x); }
static inline real rpi_tanh(real x) { return tanh(x); }

#else

/* power = 2^f, numbers or vectors of them. */
#define RPI_EXP2_POWER(power, f)                                                                   \
  power = 0.0001534581206788414f * f + 0.0013399931290767053f;                                     \
  power = power * f + 0.009618488957492224f;                                                       \
  power = power * f + 0.055503287767885094f;                                                       \
  power = power * f + 0.24022646890624821f;                                                        \
  power = power * f + 0.6931472057373496f;                                                         \
  power = power * f + 1.0f

static inline real rpi_exp2(real x) {
  /* Written so that a NaN stays: the comparison is false for it. */
  x = x < -127.0f ? -127.0f : x;
  const float magic =
      12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, kept in the low bits */
  const float shifted = x + magic;
  const float f = x - (shifted - magic);
  float power;
  RPI_EXP2_POWER(power, f);
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3F800000u; /* n = -127 gives the bits of 0 */
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return power * scale;
}

/* tanh, to 2e-7: small arguments by a polynomial in x^2 of our own fit (4e-9), because the
 * quotient below loses what they are about; the others by exp2 of something negative. */
static inline real rpi_tanh(real x) {
  const float size = x < 0 ? -x : x, xx = x * x;
  float near = -0.0057050011304633835f;
  near = near * xx + 0.020639108183846226f;
  near = near * xx - 0.05373972515371819f;
  near = near * xx + 0.13331442377685934f;
  near = near * xx - 0.33333281950269694f;
  near = near * xx * size + size;
  const float e = rpi_exp2(-2 * (float)RPI_LOG2_E * size); /* e^(-2 size) */
  const float far = (1.0f - e) / (1.0f + e);
  const float value = size < 0.625f ? near : far;
  return x < 0 ? -value : value;
}

#endif

/* Lane by lane. AVX-512 has instructions for the nearest integer and for times 2^n: the same
 * bits, and the weights of a strip take 41 ns instead of 47 (two FMA units). */
RPI_INLINE rpi_register rpi_exp2_lanes(rpi_register x) {
#if defined(__AVX512DQ__) && RPI_LANES == 16
  const __m512 all = (__m512)x, n = _mm512_roundscale_ps(all, _MM_FROUND_NO_EXC);
  const __mmask16 some = _mm512_cmp_ps_mask(all, _mm512_set1_ps(-126.5f), _CMP_NLT_UQ);
  const rpi_register f = x - (rpi_register)n;
  rpi_register power;
  RPI_EXP2_POWER(power, f);
  return (rpi_register)_mm512_maskz_scalef_ps(some, (__m512)power, n);
#else
  rpi_register y = x;
  _Pragma("omp simd") for (int l = 0; l < RPI_LANES; l++) y[l] = rpi_exp2(x[l]);
  return y;
#endif
}

/* The weight of a pair from what its score is above the log-sum-exp of its row: never more than 1,
 * not even where a float's log-sum-exp is too coarse for its row (at 1e9 by 64). A NaN stays. */
static inline real rpi_share(real x) { return rpi_exp2(x > 0 ? 0 : x); }

RPI_INLINE rpi_register rpi_share_lanes(rpi_register x) {
#if defined(__AVX512DQ__) && RPI_LANES == 16
  return rpi_exp2_lanes((rpi_register)_mm512_min_ps(_mm512_setzero_ps(), (__m512)x));
#else
  rpi_register y = x;
  _Pragma("omp simd") for (int l = 0; l < RPI_LANES; l++) y[l] = rpi_share(x[l]);
  return y;
#endif
}

#endif
