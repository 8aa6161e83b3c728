/* SPDX-License-Identifier: Apache-2.0
 *
 * shared_keys.h: the gradients of keys and values that several heads of queries share.
 *
 * Backward's blocks each have a head of queries. So every head has rows of dk and dv of its own in
 * the workspace, and a last pass adds those of the heads that share keys, in order: the same bits
 * every time. That takes H / key_heads times the memory of k and v.
 */
#ifndef RPC_SHARED_KEYS_H
#define RPC_SHARED_KEYS_H

#include "attention_backward.h"

namespace rpc {

/* Bytes of such rows; 0 where every head has keys of its own. */
int64_t shared_keys_bytes(const rp_attention *shape);

/* dk and dv are to go to such rows, at memory, where there are any. */
void own_gradients(const rp_attention *shape, unsigned char *memory, Backward *c);

/* Adds those rows up into what gradients say. */
rp_status add_shared_keys(const rp_attention *shape, const Backward &c,
                          const rp_attention_gradients *gradients);

}  // namespace rpc

#endif
