/* SPDX-License-Identifier: Apache-2.0
 *
 * rounded.h: matrices rounded to bf16 for products, rows on borders of 16 bytes. What lies between
 * the columns and the next row is 0.
 */
#ifndef RPC_ROUNDED_H
#define RPC_ROUNDED_H

#include "four.h"

namespace rpc {

__host__ __device__ inline int64_t rounded_stride(int64_t columns) {
  return (columns + RPI_ROUNDED_BORDER - 1) / RPI_ROUNDED_BORDER * RPI_ROUNDED_BORDER;
}

constexpr int bias_parts = RPI_BIAS_PARTS; /* of 8 bits each, as many as f32 has */

/* Rows as gemm packs them: behind each stand ones for the parts of a bias. */
struct RoundedRows {
  bf16 *to; /* or NULL */
  int64_t columns, stride;
  int ones;
};

inline RoundedRows rounded_rows(const rpi_operand &operand, int64_t columns) {
  const int ones = operand.bias ? bias_parts : 0;
  return {static_cast<bf16 *>(operand.memory), columns, rounded_stride(columns + ones), ones};
}

/* The quad at column c; the last of a row brings what stands behind it. */
__device__ inline void put_rounded(const RoundedRows &rows, int64_t row, int64_t c, Four four) {
  int64_t left = rows.columns - c;
  if (left <= 0) return;
  bf16 *const to = rows.to + row * rows.stride;
  for (const int64_t end = left > 4 ? c + 4 : rows.stride; c < end; c += 4, left -= 4) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i >= left) four.x[i] = i < left + rows.ones ? 1.0f : 0.0f;
    }
    store_rounded(to + c, four);
  }
}

/* The strip at column c. */
__device__ inline Strip<strip_quads> load_rounded_strip(const RoundedRows &rows, int64_t row,
                                                        int64_t c) {
  return load_strip<strip_quads, true>(rows.to + row * rows.stride + c, rows.columns - c);
}

/* column_sums, and x rounded in `to` unless that is NULL, from one look at x. Takes scratch. */
rp_status sum_and_round(const rpi_column_sums_args *args, bf16 *to);

/* column_sums of what is rounded already: args->x points to bf16. Takes scratch. */
rp_status sum_rounded(const rpi_column_sums_args *args);

/* column_sums of numbers that are what `element` says. Takes scratch. */
inline rp_status sum_elements(const rpi_column_sums_args *args, int element) {
  return element == RP_BF16 ? sum_rounded(args) : sum_and_round(args, nullptr);
}

/* ReLU's backward, and the sums of its result, from one look at da: dh = 0 where a <= 0, else
 * scale * da, all bf16 where a was left rounded. scale: dropout's, of what was kept. Takes scratch.
 */
rp_status sum_behind_relu(const rpi_activation_backward_args *args, float scale);

}  // namespace rpc

#endif
