/* SPDX-License-Identifier: Apache-2.0
 *
 * current.h: the GPU that a thread works on for a while.
 *
 * The runtime can make a device the current one, and then another, but each time it opens a context
 * there: half a second, and hundreds of megabytes on a GPU that nobody asked for. The driver can
 * make a context current and take it away again, which leaves the thread as it was.
 */
#ifndef RPC_CURRENT_H
#define RPC_CURRENT_H

#include "gpu.h"
#include "ops/ops.h"

namespace rpc {

/* The context in which the runtime works on this device; it is opened, and stays. */
rp_status open_primary(int device, void **primary);

/* Does this process have one there already? */
bool has_primary(int device);

/* Work on a device until the end of the scope; NULL: on the thread's own. */
class Current {
 public:
  explicit Current(void *primary);
  ~Current();
  Current(const Current &) = delete;
  Current &operator=(const Current &) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace rpc

#endif
