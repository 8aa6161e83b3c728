/* SPDX-License-Identifier: Apache-2.0
 *
 * test_memory.c: base/memory.c. Alignment, the seam, arithmetic at its edges, and
 * an arena that counts what it later hands out.
 */
#include "base/memory.h"

#include <stdlib.h>

#include "check.h"

static void test_allocation(void) {
  static const size_t sizes[] = {0, 1, 63, 64, 65, 4096, 1000003};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    char *memory = rpi_allocate(sizes[i]);
    CHECK(memory != NULL);
    CHECK_INT((int64_t)((uintptr_t)memory % RPI_ALIGN), 0);
    if (memory != NULL && sizes[i] > 0) memset(memory, 7, sizes[i]);
    rpi_release(memory);
  }
  rpi_release(NULL);
  /* Rounding up to the alignment must not wrap around to a small block. */
  CHECK(rpi_allocate(SIZE_MAX) == NULL);
  CHECK(rpi_allocate(SIZE_MAX - RPI_ALIGN + 1) == NULL);
}

static void *refuse(void *calls, size_t bytes) {
  (void)bytes;
  ++*(int *)calls;
  return NULL;
}

static void count_release(void *calls, void *memory) {
  *(int *)calls += 10;
  free(memory);
}

static void test_seam(void) {
  int calls = 0;
  const rpi_allocator refusing = {refuse, count_release, &calls};
  rpi_set_allocator(&refusing);
  CHECK(rpi_allocate(1) == NULL);
  rpi_release(NULL);
  CHECK_INT(calls, 11);
  rpi_set_allocator(NULL);
  void *memory = rpi_allocate(1);
  CHECK(memory != NULL);
  rpi_release(memory);
  CHECK_INT(calls, 11);
}

static void test_arithmetic(void) {
  int64_t r = -1;
  CHECK(rpi_multiply(3, 5, &r) && r == 15);
  CHECK(rpi_multiply(0, INT64_MAX, &r) && r == 0);
  CHECK(rpi_multiply(INT64_MAX, 1, &r) && r == INT64_MAX);
  CHECK(rpi_multiply(INT64_C(3037000499), INT64_C(3037000499), &r));
  CHECK(!rpi_multiply(INT64_C(3037000500), INT64_C(3037000500), &r));
  CHECK(!rpi_multiply(INT64_C(1) << 32, INT64_C(1) << 32, &r)); /* 2^64: wraps to 0 */
  CHECK(!rpi_multiply(-1, 1, &r));
  CHECK(!rpi_multiply(-2, -2, &r));
  CHECK(!rpi_multiply(INT64_MIN, -1, &r));
  CHECK(rpi_add(3, 5, &r) && r == 8);
  CHECK(rpi_add(INT64_MAX, 0, &r) && r == INT64_MAX);
  CHECK(!rpi_add(INT64_MAX, 1, &r));
  CHECK(!rpi_add(-1, 5, &r));
}

/* The pattern of every user: one carving function, run twice. */
typedef struct carved {
  float *a;
  char *b;
  double *c;
} carved;

static carved carve(rpi_arena *arena) {
  carved result;
  result.a = rpi_arena_take(arena, 3, sizeof(float));
  result.b = rpi_arena_take(arena, 65, 1);
  result.c = rpi_arena_take(arena, 2, sizeof(double));
  return result;
}

static void test_counting_equals_carving(void) {
  rpi_arena counting = rpi_arena_counting();
  const carved nothing = carve(&counting);
  CHECK(!counting.failed);
  CHECK(nothing.a == NULL && nothing.b == NULL && nothing.c == NULL);
  CHECK_INT(counting.used, 64 + 128 + 16);

  char *memory = rpi_allocate((size_t)counting.used);
  rpi_arena real = rpi_arena_over(memory, counting.used);
  const carved something = carve(&real);
  CHECK(!real.failed);
  CHECK((char *)something.a == memory);
  CHECK(something.b == memory + 64);
  CHECK((char *)something.c == memory + 64 + 128);
  CHECK_INT(real.used, counting.used);

  rpi_arena small = rpi_arena_over(memory, counting.used - 1);
  carve(&small);
  CHECK(small.failed);
  rpi_release(memory);
}

static void test_arena_edges(void) {
  char *memory = rpi_allocate(256);
  rpi_arena arena = rpi_arena_over(memory, 65);
  CHECK(rpi_arena_take(&arena, 64, 1) == memory);
  CHECK(rpi_arena_take(&arena, 0, 8) == memory + 64); /* nothing is a pointer too */
  CHECK(rpi_arena_take(&arena, 1, 1) == memory + 64); /* to the last byte */
  CHECK(!arena.failed);
  CHECK(rpi_arena_take(&arena, 1, 1) == NULL);
  CHECK(arena.failed);
  CHECK(rpi_arena_take(&arena, 0, 1) == NULL); /* failed for good */

  static const int64_t bad[][2] = {
      {INT64_MAX, 2}, {INT64_MAX, 1}, {-1, 1}, {1, -1}, {INT64_C(1) << 32, INT64_C(1) << 32}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    rpi_arena counting = rpi_arena_counting();
    rpi_arena_take(&counting, 1, 1);
    rpi_arena_take(&counting, bad[i][0], bad[i][1]);
    CHECK(counting.failed);
  }
  CHECK(rpi_arena_over(NULL, 100).failed);
  CHECK(rpi_arena_over(memory + 8, 100).failed);
  CHECK(rpi_arena_over(memory, -1).failed);
  CHECK(!rpi_arena_over(memory, 0).failed);
  rpi_release(memory);
}

int main(void) {
  test_allocation();
  test_seam();
  test_arithmetic();
  test_counting_equals_carving();
  test_arena_edges();
  return check_report();
}
