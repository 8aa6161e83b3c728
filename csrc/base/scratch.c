/* SPDX-License-Identifier: Apache-2.0
 *
 * scratch.c: the pieces of scratch.h and who has them.
 */
#include "base/scratch.h"

#include <stdatomic.h>
#include <stdint.h>

static _Alignas(4096) char pieces[RPI_SCRATCH_PIECES][RPI_SCRATCH_BYTES];
static _Atomic(uint64_t) lent; /* a bit for each piece */

_Static_assert(RPI_SCRATCH_PIECES == 64, "one bit for each piece");

/* The lowest that is free: few threads touch few pieces. */
void *rpi_scratch_take(void) {
  uint64_t now = atomic_load_explicit(&lent, memory_order_relaxed);
  while (now != UINT64_MAX) {
    const int piece = __builtin_ctzll(~now);
    if (atomic_compare_exchange_weak_explicit(&lent, &now, now | (uint64_t)1 << piece,
                                              memory_order_acquire, memory_order_relaxed)) {
      return pieces[piece];
    }
  }
  return (void *)0;
}

void rpi_scratch_give(void *piece) {
  const uint64_t bit = (uint64_t)1 << (((char *)piece - pieces[0]) / RPI_SCRATCH_BYTES);
  atomic_fetch_and_explicit(&lent, ~bit, memory_order_release);
}
