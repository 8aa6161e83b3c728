/* SPDX-License-Identifier: Apache-2.0
 *
 * table_gradients.h: the gradients of relation tables, summed in a fixed order.
 *
 * Every block of backward adds to the same few rows of a table. So each adds to lines of its own,
 * and a second pass adds the lines of all blocks up, in order:
 *
 *   block 0   lines [T][width] of every term    the blocks of a head follow each other
 *   block 1   lines [T][width] of every term
 *   ...
 *   table gradient += factor * (block 0's, then block 1's, ...)
 *
 * No addition depends on which block comes first, and none is atomic: the same bits every time.
 */
#ifndef RPC_TABLE_GRADIENTS_H
#define RPC_TABLE_GRADIENTS_H

#include "pairs.h"

namespace rpc {

/* What is summed for one term. */
struct Summed {
  Kind kind;
  int32_t place;        /* which of the terms of its kind */
  int32_t part, lookup; /* of the kind's band, or -1; of Call.lookups, or -1 */
  int32_t rows, width;  /* T; D, Dv or 1 */
  int64_t offset;       /* of its lines among the numbers of a block */
  float *gradient;      /* NULL: not wanted */
  int64_t head_stride, row_stride;
};

constexpr int kMostSummed = 4 * RP_TERMS;

/* All terms of a call; and position_bias, whose line follows theirs. */
struct Sums {
  Summed terms[kMostSummed];
  int32_t count;
  int64_t bias_offset, numbers; /* numbers of one block */
  float *bias_gradient;         /* of position_bias, or NULL */
  int64_t bias_stride;
  int32_t blocks; /* of one head */
  bool wanted;    /* is there anything to do? */
  float *lines;   /* [H][blocks][numbers], in the workspace */
};

/* The terms, where their sums lie, and how many blocks at most `items` a head there are; gradients
 * NULL: nothing is wanted, but the sizes are the same. */
Sums sums_of(const rp_attention *shape, int64_t items, const rp_attention_gradients *gradients);

inline int64_t sums_numbers(const rp_attention *shape, const Sums &sums) {
  return shape->H * sums.blocks * sums.numbers;
}

/* The second pass: factor is that of products of queries or keys, position_bias's included. */
rp_status add_sums(const Sums &sums, int32_t heads, float factor);

}  // namespace rpc

#endif
