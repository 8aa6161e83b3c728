/* SPDX-License-Identifier: Apache-2.0
 *
 * highest.h: the highest of a row of numbers. A NaN is passed over, and found by the sums that come
 * after.
 */
#ifndef RPI_HIGHEST_H
#define RPI_HIGHEST_H

#include <math.h>

#include "ops/tile.h"

RPI_NOINLINE real highest_of(const real *x, int64_t count) {
  const int64_t step = 4 * RPI_LANES, whole = count / step * step;
  rpi_register m0 = (rpi_register){0} - (real)INFINITY, m1 = m0, m2 = m0, m3 = m0;
  for (int64_t c = 0; c < whole; c += step) {
    m0 = rpi_higher(rpi_load(x + c), m0);
    m1 = rpi_higher(rpi_load(x + c + RPI_LANES), m1);
    m2 = rpi_higher(rpi_load(x + c + 2 * RPI_LANES), m2);
    m3 = rpi_higher(rpi_load(x + c + 3 * RPI_LANES), m3);
  }
  m0 = rpi_higher(rpi_higher(m1, m0), rpi_higher(m3, m2));
  real most = m0[0];
  for (int l = 1; l < RPI_LANES; l++) most = m0[l] > most ? m0[l] : most;
  for (int64_t c = whole; c < count; c++) most = x[c] > most ? x[c] : most;
  return most;
}

#endif
