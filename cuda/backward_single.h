/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_single.h: the fast path of attention's backward where every sequence is one tile
 * (attention_backward_single.cu).
 */
#ifndef RPC_BACKWARD_SINGLE_H
#define RPC_BACKWARD_SINGLE_H

#include "backward_band.h"

namespace rpc {

constexpr int kSingleRows = 32;    /* queries, and keys, of the longest sequence */
constexpr int kSingleColumns = 48; /* of the band */
constexpr int kSingleWidth = 64;   /* of the tables of vectors; D and Dv are this at most */

/* Blocks that registers let a multiprocessor have at once: without bands, and with them. */
constexpr int kSingleBlocks[] = {4, 3};

/* From one row of cells to the next: room for operands of whole steps of 16 columns. */
int64_t single_line(int64_t columns);

/* Shared memory of a block. */
int64_t single_bytes(int64_t columns);

/* dq, dk, dv and the lines; c.rows are not read. */
rp_status single_backward(const BandBackward &f, bool stored_bf16);

}  // namespace rpc

#endif
