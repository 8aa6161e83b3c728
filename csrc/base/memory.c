/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c: the allocator seam, checked arithmetic on sizes, and the arena.
 *
 * Invariants of an arena: 0 <= used, every pointer handed out is a multiple of
 * RPI_ALIGN away from base, and base itself is aligned (rpi_arena_over sees to
 * it). Starts are aligned rather than ends, so that a block may end exactly where
 * the memory does. After the first failure nothing but failed is meaningful.
 */
#include "base/memory.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static void *system_allocate(void *context, size_t bytes) {
  (void)context;
  if (bytes > SIZE_MAX - RPI_ALIGN) return NULL;
  /* aligned_alloc wants a multiple of the alignment, and not zero of them. */
  const size_t rounded = (bytes + RPI_ALIGN - 1) / RPI_ALIGN * RPI_ALIGN;
  return aligned_alloc(RPI_ALIGN, rounded != 0 ? rounded : RPI_ALIGN);
}

static void system_release(void *context, void *memory) {
  (void)context;
  free(memory);
}

static const rpi_allocator system_allocator = {system_allocate, system_release, NULL};
static const rpi_allocator *current = &system_allocator;

void rpi_set_allocator(const rpi_allocator *allocator) {
  current = allocator != NULL ? allocator : &system_allocator;
}

void *rpi_allocate(size_t bytes) { return current->allocate(current->context, bytes); }

void rpi_release(void *memory) { current->release(current->context, memory); }

rp_status rpi_host_allocate(int64_t bytes, void **memory) {
  *memory = rpi_allocate((size_t)bytes);
  return *memory ? RP_OK : RP_ERROR_MEMORY;
}

rp_status rpi_host_copy(void *to, const void *from, int64_t bytes) {
  if (bytes != 0) memcpy(to, from, (size_t)bytes);
  return RP_OK;
}

rp_status rpi_host_post(void **letter, const void *from, int64_t bytes) {
  if (*letter == NULL) RPI_TRY(rpi_host_allocate(bytes, letter));
  return rpi_host_copy(*letter, from, bytes);
}

rp_status rpi_host_collect(void *letter, void *to, int64_t bytes) {
  return rpi_host_copy(to, letter, bytes);
}

bool rpi_host_arrived(void *letter) {
  (void)letter;
  return true;
}

bool rpi_multiply(int64_t a, int64_t b, int64_t *product) {
  return a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, product);
}

bool rpi_add(int64_t a, int64_t b, int64_t *sum) {
  return a >= 0 && b >= 0 && !__builtin_add_overflow(a, b, sum);
}

rpi_arena rpi_arena_counting(void) {
  return (rpi_arena){.base = NULL, .size = 0, .used = 0, .failed = false};
}

rpi_arena rpi_arena_over(void *memory, int64_t bytes) {
  const bool usable = memory != NULL && (uintptr_t)memory % RPI_ALIGN == 0 && bytes >= 0;
  /* Unusable memory must not turn into a counting arena: carving would succeed. */
  return (rpi_arena){.base = memory, .size = usable ? bytes : 0, .used = 0, .failed = !usable};
}

void *rpi_arena_take(rpi_arena *arena, int64_t count, int64_t bytes) {
  if (arena->failed) return NULL;
  int64_t length, start, end;
  const bool fits_int64 = rpi_multiply(count, bytes, &length) &&
                          rpi_add(arena->used, RPI_ALIGN - 1, &start) &&
                          rpi_add(start -= start % RPI_ALIGN, length, &end);
  if (!fits_int64 || (arena->base != NULL && end > arena->size)) {
    arena->failed = true;
    return NULL;
  }
  arena->used = end;
  return arena->base != NULL ? arena->base + start : NULL;
}
