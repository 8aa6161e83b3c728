/* SPDX-License-Identifier: Apache-2.0
 *
 * library.h: what the door (table.cu) needs of the contexts (context.cu).
 */
#ifndef RPC_LIBRARY_H
#define RPC_LIBRARY_H

#include "current.h"
#include "isa/devices.h"

namespace rpc {

void use(const rpc_host *host);
rp_status select(int device);

/* The primary context of a device that has been selected, the calling thread's if it has one: for
 * calls that need any. NULL: none has been. */
void *any_primary();

/* One entry at a time on a device: stream, staging memory and scratch are shared by all threads.
 * The calling thread has its own choice of a device back at the end. */
class Turn {
 public:
  Turn();
  ~Turn();
  Turn(const Turn &) = delete;
  Turn &operator=(const Turn &) = delete;

 private:
  Current current_;
};

}  // namespace rpc

#endif
