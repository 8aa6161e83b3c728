/* SPDX-License-Identifier: Apache-2.0
 *
 * rng.h: counter-based random numbers, Philox4x32 (Salmon et al. 2011).
 *
 * A number is a pure function of a key and a counter: nothing is stored, and
 * neither tiling nor packing nor threads nor devices change it.
 *
 *   key      two words of Philox4x32-10(seed; attempt number of the step)
 *   counter  (column / 16, row within the sentence, ordinal of the sentence,
 *             site = layer, kind, head)
 *   result   sixteen bytes, one per column
 */
#ifndef RPI_RNG_H
#define RPI_RNG_H

#include <stdint.h>

typedef struct rpi_philox_key {
  uint32_t word[2];
} rpi_philox_key;

typedef struct rpi_philox_block {
  uint32_t word[4];
} rpi_philox_block;

#define RPI_PHILOX_ROUNDS 7 /* the fewest that pass BigCrush, by the paper */

/* The key of the next round. */
static inline rpi_philox_key rpi_philox_next_key(rpi_philox_key key) {
  return (rpi_philox_key){{key.word[0] + 0x9E3779B9u, key.word[1] + 0xBB67AE85u}};
}

/* One block. rounds: RPI_PHILOX_ROUNDS, but 10 for the key of a step (rng.c) and for the
 * published known-answer vectors. Inlined, so that a loop over counters vectorises. */
static inline rpi_philox_block rpi_philox(rpi_philox_block counter, rpi_philox_key key,
                                          int rounds) {
  for (int round = 0; round < rounds; round++) {
    const uint64_t product0 = (uint64_t)0xD2511F53u * counter.word[0];
    const uint64_t product1 = (uint64_t)0xCD9E8D57u * counter.word[2];
    const rpi_philox_block next = {{
        (uint32_t)(product1 >> 32) ^ counter.word[1] ^ key.word[0],
        (uint32_t)product1,
        (uint32_t)(product0 >> 32) ^ counter.word[3] ^ key.word[1],
        (uint32_t)product0,
    }};
    counter = next;
    key = rpi_philox_next_key(key);
  }
  return counter;
}

/* The key of one attempt at one step: the first two words of Philox4x32-10 with
 * key = (seed low, seed high) and counter = (attempt low, attempt high, 0, 0). */
rpi_philox_key rpi_philox_step_key(uint64_t seed, uint64_t attempt);

/* Uniform in [0, 1) from 32 bits (24 of them), and standard normals in pairs
 * (Box-Muller, bits0 the radius, bits1 the angle), for initialisers. */
float rpi_uniform(uint32_t bits);
void rpi_normal_pair(uint32_t bits0, uint32_t bits1, double *normal0, double *normal1);

#endif
