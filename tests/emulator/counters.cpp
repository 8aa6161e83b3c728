/* SPDX-License-Identifier: Apache-2.0
 *
 * counters.cpp: what the emulator counts, for tests that load the library (tests/device_capi.py).
 */
#include "cuda_emu.h"

/* The numbers of emu::Stats in their order, since the library was loaded. */
extern "C" __attribute__((visibility("default"))) const uint64_t *emu_counters() {
  static_assert(sizeof(emu::Stats) == 12 * sizeof(uint64_t));
  return &emu::stats.warp_ops;
}
