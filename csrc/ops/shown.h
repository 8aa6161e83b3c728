/* SPDX-License-Identifier: Apache-2.0
 *
 * shown.h: what a map shows, as a call of its own. For host code of every device.
 */
#ifndef RPI_SHOWN_H
#define RPI_SHOWN_H

#include "ops/ops.h"

/* The call of which one part of the scores is all there is. */
static inline rp_attention rpi_shown_of(const rp_attention *s, int what) {
  rp_attention shown = *s;
  const int kind = what / 10 * 10, place = what % 10;
  const bool whole = what == RP_SHOW_PROBABILITIES || what == RP_SHOW_SCORES;
  for (int i = 0; i < RP_TERMS; i++) {
    shown.value[i].table = NULL;
    if (whole) continue;
    if (kind != RP_SHOW_KEY || i != place) shown.key[i].table = NULL;
    if (kind != RP_SHOW_QUERY || i != place) shown.query[i].table = NULL;
    if (kind != RP_SHOW_BIAS || i != place) shown.bias[i].table = NULL;
  }
  if (!whole) shown.softcap = 0;
  return shown;
}

#endif
