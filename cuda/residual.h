/* SPDX-License-Identifier: Apache-2.0
 *
 * residual.h: how a layer adds to the stream, row by row for norm.cu, and for rows that it does not
 * keep in registers.
 */
#ifndef RPC_RESIDUAL_H
#define RPC_RESIDUAL_H

#include "packing.h"

namespace rpc {

struct BaseRow {
  float mean, rstd; /* of a norm that has not left its result */
};

__device__ inline BaseRow base_row(const rpi_base &base, int64_t row) {
  if (base.stats == nullptr) return {0, 1};
  return {base.stats[2 * row], base.stats[2 * row + 1]};
}

/* What a norm makes of a quad. */
__device__ inline Four normed_four(Four x, float mean, float rstd, const Four &gain,
                                   const Four &shift) {
#pragma unroll
  for (int i = 0; i < 4; i++) x.x[i] = fmaf((x.x[i] - mean) * rstd, gain.x[i], shift.x[i]);
  return x;
}

/* The quad of the base at column c, of which x was read. */
template <bool wide>
__device__ inline Four base_four(const rpi_base &base, const BaseRow &row, int64_t c, int64_t count,
                                 const Four &x) {
  if (base.stats == nullptr) return x;
  Four shift = {{0, 0, 0, 0}};
  if (base.shift != nullptr) shift = load_four<wide>(base.shift + c, count);
  return normed_four(x, row.mean, row.rstd, load_four<wide>(base.gain + c, count), shift);
}

/* Do all that is read of it lie on borders of 16 bytes? */
inline bool is_wide(const rpi_base &base, int64_t columns) {
  return is_wide(base.x, columns) && is_wide(base.gain, 0) && is_wide(base.shift, 0);
}

/* x = base + keep(x) */
rp_status residual(const rpi_norm_args *args);

/* df = keep(dx), unless that is dx itself, and the bias's sums. Takes scratch. */
rp_status residual_backward(const rpi_norm_backward_args *args);

}  // namespace rpc

#endif
