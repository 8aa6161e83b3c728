/* SPDX-License-Identifier: Apache-2.0
 *
 * packing.h: ops/dropout.h on the device: where a row lies in its sentence, and dropout of a strip
 * or of four numbers of it.
 */
#ifndef RPC_PACKING_H
#define RPC_PACKING_H

#include "four.h"
#include "philox.h"

namespace rpc {

/* An rpi_dropout whose lists are on the device. */
struct Packing {
  const int64_t *offsets;
  const uint32_t *ordinals;
  int64_t sentences;
  Dropout dropout;
};

/* `placed`: the rows' places are asked for even where nothing is dropped. */
inline rp_status packing_of(const rpi_dropout *from, bool placed, Packing *to) {
  *to = Packing{nullptr, nullptr, from->sentences, dropout_of(from->rate, from->key, from->site)};
  if (placed || to->dropout.threshold != 0) {
    RPI_TRY(stage(from->offsets, from->sentences + 1, &to->offsets));
  }
  if (to->dropout.threshold != 0) RPI_TRY(stage(from->ordinals, from->sentences, &to->ordinals));
  return RP_OK;
}

/* The sentence of a row: the last that starts at or before it. */
__device__ inline int64_t sentence_of(const int64_t *offsets, int64_t sentences, int64_t row) {
  int64_t sentence = 0, beyond = sentences;
  while (beyond - sentence > 1) {
    const int64_t middle = sentence + (beyond - sentence) / 2;
    if (offsets[middle] <= row) sentence = middle;
    else beyond = middle;
  }
  return sentence;
}

/* The same for the one row of a warp, whose lanes look at 32 sentences at a time. */
__device__ inline int64_t warp_sentence_of(const int64_t *offsets, int64_t sentences, int64_t row) {
  int64_t sentence = 0;
  for (int64_t count = sentences; count > 1;) { /* it is one of so many */
    const int64_t apart = (count + 31) / 32, ahead = threadIdx.x % 32 * apart;
    const bool before = ahead < count && offsets[sentence + ahead] <= row;
    const int64_t skipped = (__popc(__ballot_sync(whole_warp, before)) - 1) * apart;
    sentence += skipped;
    count = count - skipped < apart ? count - skipped : apart;
  }
  return sentence;
}

/* A row within its sentence. */
struct Place {
  int64_t row;
  uint32_t ordinal;
};

/* Of the one row of a warp; not read from where nothing is dropped and places were not asked for.
 */
__device__ inline Place place_of(const Packing &p, int64_t row) {
  Place place = {0, 0};
  if (p.offsets == nullptr) return place;
  const int64_t sentence = warp_sentence_of(p.offsets, p.sentences, row);
  place.row = row - p.offsets[sentence];
  if (p.ordinals != nullptr) place.ordinal = p.ordinals[sentence];
  return place;
}

/* What dropout makes of a quad with the word of its columns: 0 (of infinities too), or scale times
 * the number, rounded whatever follows (norm.cu). */
__device__ inline void keep_by_word(const Dropout &d, uint32_t word, Four &four) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    four.x[i] = is_kept(d, word, i) ? __fmul_rn(d.scale, four.x[i]) : 0.0f;
}

__device__ inline void keep_four(const Packing &p, Place place, int64_t quad, Four &four) {
  if (p.dropout.threshold == 0) return;
  const uint4 block = keep_block(p.dropout, place.ordinal, static_cast<uint32_t>(place.row),
                                 static_cast<uint32_t>(quad / 4));
  keep_by_word(p.dropout, keep_word(block, quad), four);
}

/* Words i of four lanes in a row become the four words of lane i. */
__device__ inline void turn_words(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = (threadIdx.x & static_cast<unsigned>(bit)) != 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if ((i & bit) != 0) continue;
      const uint32_t got = __shfl_xor_sync(whole_warp, high ? words[i] : words[i | bit], bit);
      if (high) words[i] = got;
      else words[i | bit] = got;
    }
  }
}

/* The words of this thread's quads in the strip that begins at `column`, a multiple of 16, of the
 * warp's row, or of the one of several warps that have every so many'th 128 columns. A block of
 * random numbers serves one quad of four lanes in a row, so each of the four makes the block of
 * another quad:
 *
 *   lane         0        1        2        3     |    4        5     ...
 *   makes     block 0  block 8  block 16 block 24 | block 1  block 9  ...
 *   has of quad 0, 1, 2, 3 word `lane % 4` of blocks 0, 8, 16, 24 | 1, 9, ...
 *
 * (blocks 8 times as many warps apart) */
struct StripWords {
  uint32_t of[strip_quads];
};
template <int warps = 1>
__device__ inline StripWords strip_words(const Packing &p, Place place, int64_t column) {
  const uint32_t first = static_cast<uint32_t>(column / 16), lane = threadIdx.x;
  const uint4 block = keep_block(p.dropout, place.ordinal, static_cast<uint32_t>(place.row),
                                 first + 8 * warps * (lane % 4) + lane / 4);
  StripWords words = {{block.x, block.y, block.z, block.w}};
  turn_words(words.of);
  return words;
}

__device__ inline void keep_strip(const Packing &p, Place place, int64_t column,
                                  Strip<strip_quads> &strip) {
  if (p.dropout.threshold == 0) return;
  const StripWords words = strip_words(p, place, column);
#pragma unroll
  for (int q = 0; q < strip_quads; q++) keep_by_word(p.dropout, words.of[q], strip.quad[q]);
}

}  // namespace rpc

#endif
