/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_cuda.c: a librelpos_cuda.so of another version or of a table of another size, for
 * test_devices.py.
 */
#include "isa/devices.h"

#ifndef FAKE_VERSION
#define FAKE_VERSION RP_VERSION
#endif
#ifndef FAKE_OPS_BYTES
#define FAKE_OPS_BYTES RPC_OPS_BYTES
#endif

static const rpc_door door = {.version = FAKE_VERSION, .ops_bytes = FAKE_OPS_BYTES};

const rpc_door *rpc_open(const rpc_host *host);
const rpc_door *rpc_open(const rpc_host *host) {
  (void)host;
  return &door;
}
