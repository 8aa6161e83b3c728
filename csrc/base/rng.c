/* SPDX-License-Identifier: Apache-2.0
 *
 * rng.c: the key of a step, and uniform and normal numbers for initialisers.
 *
 * The step's key is made with the full ten rounds: it is computed once a step,
 * and its inputs (small seeds, consecutive attempts) are as regular as can be.
 * Uniform numbers are exact everywhere. Normal ones go through log, sqrt, cos and
 * sin of the C library, in double, and are then rounded to float by their users.
 */
#include "base/rng.h"

#include <math.h>

rpi_philox_key rpi_philox_step_key(uint64_t seed, uint64_t attempt) {
  const rpi_philox_key key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
  const rpi_philox_block counter = {{(uint32_t)attempt, (uint32_t)(attempt >> 32), 0, 0}};
  const rpi_philox_block block = rpi_philox(counter, key, 10);
  return (rpi_philox_key){{block.word[0], block.word[1]}};
}

float rpi_uniform(uint32_t bits) { return (float)(bits >> 8) * 0x1p-24f; }

void rpi_normal_pair(uint32_t bits0, uint32_t bits1, double *normal0, double *normal1) {
  /* (0, 1] and never 0: the logarithm stays finite, the largest value is 6.66. */
  const double uniform0 = ((double)bits0 + 1.0) * 0x1p-32;
  const double angle = (double)bits1 * (0x1p-32 * 6.283185307179586476925);
  const double radius = sqrt(-2.0 * log(uniform0));
  *normal0 = radius * cos(angle);
  *normal1 = radius * sin(angle);
}
