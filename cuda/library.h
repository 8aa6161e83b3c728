/* SPDX-License-Identifier: Apache-2.0
 *
 * library.h: what the door (table.cu) needs of the contexts (context.cu).
 */
#ifndef RPC_LIBRARY_H
#define RPC_LIBRARY_H

#include "isa/devices.h"

namespace rpc {

constexpr int most_devices = 64;

void use(const rpc_host *host);
rp_status select(int device);

/* One entry at a time on a device: stream, staging memory and scratch are shared by all threads.
 * The calling thread's own choice of a device is given back at the end. */
class Turn {
 public:
  Turn();
  ~Turn();
  Turn(const Turn &) = delete;
  Turn &operator=(const Turn &) = delete;

 private:
  int before_ = -1;
};

}  // namespace rpc

#endif
