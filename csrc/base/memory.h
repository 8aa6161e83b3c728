/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.h: the one place where the core allocates, and the arena.
 *
 * The allocator is a seam: a test swaps the two functions, to count allocations
 * and to let the n-th one fail. Everything is aligned to RPI_ALIGN.
 *
 * The arena is a bump allocator over memory somebody else owns:
 *
 *   base                 used                      size
 *   |xxxxxx|xxxx|xxxxxxxx|.........................|
 *
 * An arena over base == NULL only counts: the carving code runs once on a
 * counting arena to learn the size (used), then on the real one. There is no
 * second list of sizes. Overflow and exhaustion are remembered (failed) and every
 * later take returns NULL, so that carving code checks once, at its end.
 */
#ifndef RPI_MEMORY_H
#define RPI_MEMORY_H

#include <stdbool.h>

#include "base/error.h"

#define RPI_ALIGN 64

_Static_assert(sizeof(size_t) >= sizeof(int64_t), "sizes are int64_t: 64-bit machines alone");

typedef struct rpi_allocator {
  void *(*allocate)(void *context, size_t bytes); /* aligned to RPI_ALIGN, NULL: failed */
  void (*release)(void *context, void *memory);   /* takes NULL */
  void *context;
} rpi_allocator;

/* Replaces the allocator of the whole library; NULL restores the default. For
 * tests: not to be called while other calls run, nor between allocating something
 * and releasing it. The struct must live until then. Hidden in libcore.so; tests
 * link the static library. */
void rpi_set_allocator(const rpi_allocator *allocator);

/* NULL when the allocation failed. bytes == 0 gives a pointer that may be freed. */
void *rpi_allocate(size_t bytes);
void rpi_release(void *memory);

/* Memory of the host as the operation table has it (ops/ops.h): the same allocator, and copies. */
rp_status rpi_host_allocate(int64_t bytes, void **memory);
rp_status rpi_host_copy(void *to, const void *from, int64_t bytes);

/* Letters of ops.h: what was posted is there at once. */
rp_status rpi_host_post(void **letter, const void *from, int64_t bytes);
rp_status rpi_host_collect(void *letter, void *to, int64_t bytes);
bool rpi_host_arrived(void *letter);

/* *product = a * b, or false when it overflows int64_t or a factor is negative
 * (product is then unspecified). rpi_add: the same for a + b. */
bool rpi_multiply(int64_t a, int64_t b, int64_t *product);
bool rpi_add(int64_t a, int64_t b, int64_t *sum);

typedef struct rpi_arena {
  char *base;   /* NULL: only count */
  int64_t size; /* bytes at base */
  int64_t used;
  bool failed; /* a take overflowed or did not fit */
} rpi_arena;

rpi_arena rpi_arena_counting(void);

/* Failed from the start where memory is NULL or not aligned to RPI_ALIGN. */
rpi_arena rpi_arena_over(void *memory, int64_t bytes);

/* count elements of `bytes` each, aligned to RPI_ALIGN; none of them is fine. NULL
 * on a counting or a failed arena: never dereference before checking failed. */
void *rpi_arena_take(rpi_arena *arena, int64_t count, int64_t bytes);

#endif
