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

#include "ops/real.h"

#ifdef RP_REAL_IS_DOUBLE

static inline real rpi_exp2(real x) { return exp2(x); }
static inline real rpi_tanh(real x) { return tanh(x); }

#else

static inline real rpi_exp2(real x) {
  /* Written so that a NaN stays: the comparison is false for it. */
  x = x < -127.0f ? -127.0f : x;
  const float magic =
      12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, kept in the low bits */
  const float shifted = x + magic;
  const float f = x - (shifted - magic);
  float power = 0.0001534581206788414f;
  power = power * f + 0.0013399931290767053f;
  power = power * f + 0.009618488957492224f;
  power = power * f + 0.055503287767885094f;
  power = power * f + 0.24022646890624821f;
  power = power * f + 0.6931472057373496f;
  power = power * f + 1.0f;
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
  const float e = rpi_exp2(-2.8853900817779268f * size); /* e^(-2 size) */
  const float far = (1.0f - e) / (1.0f + e);
  const float value = size < 0.625f ? near : far;
  return x < 0 ? -value : value;
}

#endif

#endif
