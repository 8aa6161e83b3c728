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

#endif

#endif
