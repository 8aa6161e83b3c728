/* SPDX-License-Identifier: Apache-2.0
 *
 * packing.h: ops/dropout.h on the device: where a row lies in its sentence, and dropout of four
 * numbers of it.
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

/* A row within its sentence. */
struct Place {
  int64_t row;
  uint32_t ordinal;
};

/* Not read from where nothing is dropped and places were not asked for. */
__device__ inline Place place_of(const Packing &p, int64_t row) {
  Place place = {0, 0};
  if (p.offsets == nullptr) return place;
  const int64_t sentence = sentence_of(p.offsets, p.sentences, row);
  place.row = row - p.offsets[sentence];
  if (p.ordinals != nullptr) place.ordinal = p.ordinals[sentence];
  return place;
}

/* What dropout makes of a quad: 0 (of infinities too), or scale times the number. */
__device__ inline void keep_four(const Packing &p, Place place, int64_t quad, Four &four) {
  if (p.dropout.threshold == 0) return;
  const uint4 block = keep_block(p.dropout, place.ordinal, static_cast<uint32_t>(place.row),
                                 static_cast<uint32_t>(quad / 4));
  const uint32_t word = keep_word(block, quad);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    four.x[i] = is_kept(p.dropout, word, i) ? p.dropout.scale * four.x[i] : 0.0f;
  }
}

}  // namespace rpc

#endif
