/* SPDX-License-Identifier: Apache-2.0
 *
 * keep.h: which numbers dropout keeps, made again wherever they are needed.
 *
 * The number at (ordinal of its sequence, row, column) of a site is kept if its byte,
 *
 *   byte column % 16 of Philox4x32-7(key; column / 16, row, ordinal, site)
 *
 * counted in the little-endian order of the block's four words, is at least threshold =
 * round(256 rate); what is kept is multiplied by scale = 256 / (256 - threshold).
 *
 * A tile is a strip of up to RPI_STRIP rows and RPI_TILE columns: four blocks a row. Two
 * rows are made at once, their blocks alternating in the 64-bit lanes of a vector,
 *
 *   lane    0        1        2        3        ...       (blocks 0 to 3 of row and row + 1)
 *           row, 0   row+1, 0 row, 1   row+1, 1
 *
 * each of the four words in the low half of a lane of its own: the widening product of low
 * halves is then one instruction, garbage in the high halves harms nothing, and
 * interleaving the finished lanes gives the 16 bytes of each block in order.
 */
#ifndef RPI_KEEP_H
#define RPI_KEEP_H

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "base/rng.h"
#include "ops/tile.h"

#define KEEP_BYTES (RPI_LANES * RPI_REAL_BYTES) /* of a vector */
#define KEEP_LANES (KEEP_BYTES / 8)

typedef uint64_t keep_lanes __attribute__((vector_size(KEEP_BYTES)));
typedef uint8_t keep_bytes __attribute__((vector_size(KEEP_BYTES)));

/* -1 (all bits) for what is kept, 0 for what is dropped. */
typedef struct keep_mask {
  _Alignas(64) int8_t of[RPI_STRIP][RPI_TILE];
} keep_mask;

typedef struct dropout {
  uint64_t key[RPI_PHILOX_ROUNDS][2]; /* of every round, wide: vectors start from memory */
  uint32_t threshold;                 /* 0: everything is kept */
  real scale;
} dropout;

/* At least one byte in 256 is kept, whatever the rate. */
static dropout dropout_of(double rate, const uint32_t key[2]) {
  const int threshold = (int)(256 * rate + 0.5);
  dropout d = {.threshold = threshold < 255 ? (uint32_t)threshold : 255};
  d.scale = (real)256 / (real)(256 - d.threshold);
  rpi_philox_key words = {{key[0], key[1]}};
  for (int round = 0; round < RPI_PHILOX_ROUNDS; round++) {
    d.key[round][0] = words.word[0];
    d.key[round][1] = words.word[1];
    words = rpi_philox_next_key(words);
  }
  return d;
}

/* The products of the low halves of the lanes. In plain words gcc 12 multiplies whole lanes:
 * a mask then takes 0.39 ns a number with AVX2, not 0.11, and 0.70 with SSE2, not 0.24
 * (Zen 4; with AVX-512 it is one instruction too, of three steps on Intel). */
RPI_INLINE keep_lanes keep_multiply(keep_lanes a, keep_lanes b) {
#if defined(__AVX512F__) && KEEP_BYTES == 64
  return (keep_lanes)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__x86_64__) && KEEP_BYTES == 32
  return (keep_lanes)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__) && KEEP_BYTES == 16
  return (keep_lanes)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__) && KEEP_BYTES == 16
  return (keep_lanes)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

#if KEEP_LANES == 8
#define KEEP_EVEN(a, b) RPI_SHUFFLE(keep_lanes, a, b, 0, 8, 2, 10, 4, 12, 6, 14)
#define KEEP_ODD(a, b) RPI_SHUFFLE(keep_lanes, a, b, 1, 9, 3, 11, 5, 13, 7, 15)
#define KEEP_COUNT {0, 0, 1, 1, 2, 2, 3, 3}
#define KEEP_ROW {0, 1, 0, 1, 0, 1, 0, 1}
#elif KEEP_LANES == 4
#define KEEP_EVEN(a, b) RPI_SHUFFLE(keep_lanes, a, b, 0, 4, 2, 6)
#define KEEP_ODD(a, b) RPI_SHUFFLE(keep_lanes, a, b, 1, 5, 3, 7)
#define KEEP_COUNT {0, 0, 1, 1}
#define KEEP_ROW {0, 1, 0, 1}
#else
#define KEEP_EVEN(a, b) RPI_SHUFFLE(keep_lanes, a, b, 0, 2)
#define KEEP_ODD(a, b) RPI_SHUFFLE(keep_lanes, a, b, 1, 3)
#define KEEP_COUNT {0, 0}
#define KEEP_ROW {0, 1}
#endif

/* The mask of `rows` rows from `row` and up to RPI_TILE columns from `column`, a multiple of 16.
 * An odd row count makes one row more of it than asked for. */
RPI_NOINLINE void keep_make(const dropout *d, uint32_t ordinal, uint32_t site, int64_t row,
                            int64_t rows, int64_t column, int64_t columns, keep_mask *mask) {
  const keep_lanes m0 = (keep_lanes){0} + 0xD2511F53u, m1 = (keep_lanes){0} + 0xCD9E8D57u;
  const keep_lanes low = (keep_lanes){0} + 0xFFFFFFFFu;
  const keep_bytes threshold = (keep_bytes){0} + (uint8_t)d->threshold;
  const keep_lanes block0 = (keep_lanes)KEEP_COUNT + (uint64_t)(column / 16);
  const keep_lanes row0 = (keep_lanes)KEEP_ROW + (uint64_t)row;
  const int64_t steps = rpi_divide_up(columns, KEEP_BYTES);
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t step = 0; step < steps; step++) {
      keep_lanes word0 = block0 + (uint64_t)(step * (KEEP_LANES / 2)), word1 = row0 + (uint64_t)r;
      keep_lanes word2 = (keep_lanes){0} + ordinal, word3 = (keep_lanes){0} + site;
      RPI_UNROLL(8) for (int round = 0; round < RPI_PHILOX_ROUNDS; round++) {
        const keep_lanes product0 = keep_multiply(m0, word0), product1 = keep_multiply(m1, word2);
        word0 = product1 >> 32 ^ word1 ^ d->key[round][0];
        word1 = product1;
        word2 = product0 >> 32 ^ word3 ^ d->key[round][1];
        word3 = product0;
      }
      const keep_lanes first = (word0 & low) | word1 << 32, second = (word2 & low) | word3 << 32;
      const keep_bytes even = (keep_bytes)KEEP_EVEN(first, second);
      const keep_bytes odd = (keep_bytes)KEEP_ODD(first, second);
      int8_t *const to = mask->of[r] + step * KEEP_BYTES;
      *(keep_bytes *)to = (keep_bytes)(even >= threshold);
      *(keep_bytes *)(to + RPI_TILE) = (keep_bytes)(odd >= threshold);
    }
  }
}

/* One row of a tile: to = factor * from where the mask keeps, 0 (of infinities too) where it drops.
 * `to` may be `from`. In plain C, because gcc 12 widens a vector of bytes one by one. */
RPI_INLINE void keep_row(const int8_t *mask, real factor, int64_t columns, const real *from,
                         real *to) {
  _Pragma("omp simd") for (int64_t c = 0; c < columns; c++) {
    const real kept = factor * from[c];
    to[c] = mask[c] < 0 ? kept : (real)0;
  }
}

/* The same for `rows` rows, RPI_TILE apart in `from` and `to`. */
RPI_INLINE void keep_apply(const keep_mask *mask, int64_t rows, int64_t columns, real factor,
                           const real *from, real *to) {
  for (int64_t r = 0; r < rows; r++, from += RPI_TILE, to += RPI_TILE) {
    RPI_COLUMNS(columns, keep_row(mask->of[r], factor, COLUMNS, from, to))
  }
}

#endif
