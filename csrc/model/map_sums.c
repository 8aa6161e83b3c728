/* SPDX-License-Identifier: Apache-2.0
 *
 * map_sums.c: what rows of probabilities come to: attention by offset, entropy, mean distance.
 *
 * Sums are in double, in the order of the queries: rows that come in several calls give the bits of
 * one call.
 */
#include <math.h>

#include "model/model.h"

void rpi_map_sums(const real *p, int64_t queries, int64_t keys, int64_t row, int64_t rows,
                  double *mass, double *entropy, double *distance) {
  const double share = 1 / (double)(queries > 0 ? queries : 1);
  for (int64_t i = 0; i < rows; i++) {
    const real *const of_row = keys > 0 ? p + i * keys : NULL; /* p may be NULL, without keys */
    const int64_t query = row + i;
    double looks = 0, apart = 0;
    for (int64_t j = 0; j < keys; j++) {
      const double own = (double)of_row[j];
      if (mass) mass[queries - 1 + j - query] += share * own;
      if (entropy && !(own <= 0)) looks -= own * log(own); /* NaN stays */
      if (distance) apart += own * (double)(j < query ? query - j : j - query);
    }
    if (entropy) entropy[i] = looks;
    if (distance) *distance += share * apart;
  }
}
