/* SPDX-License-Identifier: Apache-2.0
 *
 * rounded.h: matrices rounded to bf16 for products, rows on borders of 16 bytes. What lies between
 * the columns and the next row is 0.
 */
#ifndef RPC_ROUNDED_H
#define RPC_ROUNDED_H

#include "four.h"
#include "ptx.h"

namespace rpc {

constexpr int64_t rounded_border = 8; /* numbers of 16 bytes */

__host__ __device__ inline int64_t rounded_stride(int64_t columns) {
  return (columns + rounded_border - 1) / rounded_border * rounded_border;
}

/* One store: of a pair nvcc makes two at times. */
__device__ inline void store_rounded(bf16 *to, const Four &four) {
  const uint64_t low = pack_bf16(four.x[0], four.x[1]), high = pack_bf16(four.x[2], four.x[3]);
  *reinterpret_cast<uint64_t *>(to) = low | high << 32;
}

/* column_sums, and x rounded in `to` unless that is NULL, from one look at x. Takes scratch. */
rp_status sum_and_round(const rpi_column_sums_args *args, bf16 *to);

}  // namespace rpc

#endif
