/* SPDX-License-Identifier: Apache-2.0
 *
 * philox.h: the random numbers of base/rng.h on the device, and which numbers dropout keeps: bit
 * for bit what ops/keep.h keeps.
 *
 * The number at (ordinal of its sequence, row, column) of a site is kept if its byte,
 *
 *   byte column % 16 of Philox4x32-7(key; column / 16, row, ordinal, site)
 *
 * counted in the little-endian order of the block's four words, is at least threshold; what is kept
 * is multiplied by scale. So four columns from a multiple of four have one word, and sixteen from a
 * multiple of sixteen one block:
 *
 *   column   0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12 13 14 15
 *   word     x          | y          | z          | w
 *   byte     0  1  2  3   0  1  2  3   0  1  2  3   0  1  2  3
 */
#ifndef RPC_PHILOX_H
#define RPC_PHILOX_H

#include <stdint.h>

#include "gpu.h"

namespace rpc {

/* One block. 7 rounds are the core's; 10 those of the published vectors and of step keys. */
template <int rounds>
__device__ inline uint4 philox(uint4 counter, uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < rounds; round++) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * counter.x;
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * counter.z;
    counter = make_uint4(
        static_cast<uint32_t>(product1 >> 32) ^ counter.y ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter.w ^ key1, static_cast<uint32_t>(product0));
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

/* What dropout does at one site. threshold 0: everything is kept, and nothing needs to be asked. */
struct Dropout {
  uint32_t key[2];
  uint32_t site;
  uint32_t threshold;
  float scale;
};

/* Of a rate from 0 to below 1, as keep.h rounds it: at least one byte in 256 is kept. */
inline Dropout dropout_of(double rate, const uint32_t key[2], uint32_t site) {
  Dropout d = {{key[0], key[1]}, site, 0, 1};
  if (rate > 0) {
    const int threshold = static_cast<int>(256 * rate + 0.5);
    d.threshold = static_cast<uint32_t>(threshold < 255 ? threshold : 255);
    d.scale = 256.0f / static_cast<float>(256 - d.threshold);
  }
  return d;
}

/* The bytes of sixteen columns, 16 block to 16 block + 15, of one row. */
__device__ inline uint4 keep_block(const Dropout &d, uint32_t ordinal, uint32_t row,
                                   uint32_t block) {
  return philox<7>(make_uint4(block, row, ordinal, d.site), d.key[0], d.key[1]);
}

/* The word of the four columns from 4 (quad % 4) on of a block. */
__device__ inline uint32_t keep_word(uint4 block, int64_t quad) {
  const uint32_t low = (quad & 1) != 0 ? block.y : block.x;
  const uint32_t high = (quad & 1) != 0 ? block.w : block.z;
  return (quad & 2) != 0 ? high : low;
}

/* Is column 4 quad + i of the word's quad kept? */
__device__ inline bool is_kept(const Dropout &d, uint32_t word, int i) {
  return (word >> (8 * i) & 255u) >= d.threshold;
}

/* What one number is multiplied by: 0 or scale. For many numbers of a row take blocks. */
__device__ inline float keep_factor(const Dropout &d, uint32_t ordinal, uint32_t row,
                                    uint32_t column) {
  const uint4 block = keep_block(d, ordinal, row, column / 16);
  return is_kept(d, keep_word(block, column / 4), static_cast<int>(column % 4)) ? d.scale : 0.0f;
}

}  // namespace rpc

#endif
