/* SPDX-License-Identifier: Apache-2.0
 *
 * Scratch memory: pieces are apart, aligned, finite in number, and come back; and a product
 * that gets none has the same bits.
 */
#define _POSIX_C_SOURCE 200809L

#include "base/scratch.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/threads.h"
#include "check.h"
#include "tables.h"

static void *pieces[RPI_SCRATCH_PIECES];

static void take_all(void) {
  for (int i = 0; i < RPI_SCRATCH_PIECES; i++) CHECK((pieces[i] = rpi_scratch_take()) != NULL);
}

static void give_all(void) {
  for (int i = 0; i < RPI_SCRATCH_PIECES; i++) rpi_scratch_give(pieces[i]);
}

static void test_pieces(void) {
  take_all();
  CHECK(rpi_scratch_take() == NULL);
  for (int i = 0; i < RPI_SCRATCH_PIECES; i++) {
    CHECK((uintptr_t)pieces[i] % 4096 == 0);
    memset(pieces[i], i, RPI_SCRATCH_BYTES);
  }
  for (int i = 0; i < RPI_SCRATCH_PIECES; i++) {
    const char *const bytes = pieces[i];
    CHECK_INT(bytes[0], i);
    CHECK_INT(bytes[RPI_SCRATCH_BYTES - 1], i);
  }
  rpi_scratch_give(pieces[40]);
  CHECK(rpi_scratch_take() == pieces[40]);
  CHECK(rpi_scratch_take() == NULL);
  give_all();
  CHECK(rpi_scratch_take() == pieces[0]);
  rpi_scratch_give(pieces[0]);
}

static atomic_int shared;

static void take_and_give(void *context, int64_t task, int worker) {
  (void)context, (void)worker;
  unsigned char *const bytes = rpi_scratch_take();
  if (bytes == NULL) return;
  memset(bytes, (int)(task & 255), 256);
  for (int i = 0; i < 256; i++) shared += bytes[i] != (task & 255);
  rpi_scratch_give(bytes);
}

/* Two tasks never have the same piece. */
static void test_threads(void) {
  rp_set_threads(8);
  rpi_parallel_for(is_small_run() ? 200 : 5000, 8, take_and_give, NULL);
  rp_set_threads(0);
  CHECK_INT(shared, 0);
}

static void test_product(const rp_ops *ops) {
  enum { ROWS = 75, COLUMNS = 131, INNER = 601 };
  static real a[ROWS * INNER], b[COLUMNS * INNER], bias[COLUMNS];
  static real begun[ROWS * COLUMNS], with[ROWS * COLUMNS], without[ROWS * COLUMNS];
  for (int i = 0; i < ROWS * INNER; i++) a[i] = (real)(i * 7 % 1009) / 1009 - (real)0.5;
  for (int i = 0; i < COLUMNS * INNER; i++) b[i] = (real)(i * 11 % 2003) / 2003 - (real)0.5;
  for (int i = 0; i < COLUMNS; i++) bias[i] = (real)i / 7;
  for (int i = 0; i < ROWS * COLUMNS; i++) begun[i] = (real)(i % 17) / 3;
  for (int flags = 0; flags < 16; flags++) {
    rpi_gemm_args g = {.rows = ROWS, .columns = COLUMNS, .inner = INNER, .a = a, .b = b, .c = with};
    g.transpose_a = (flags & 1) != 0;
    g.transpose_b = (flags & 2) != 0;
    g.accumulate = (flags & 4) != 0;
    g.bias = (flags & 8) != 0 ? bias : NULL;
    g.a_stride = g.transpose_a ? ROWS : INNER;
    g.b_stride = g.transpose_b ? INNER : COLUMNS;
    g.c_stride = COLUMNS;
    memcpy(with, begun, sizeof begun);
    memcpy(without, begun, sizeof begun);
    CHECK_INT(ops->gemm(&g), RP_OK);
    take_all();
    g.c = without;
    CHECK_INT(ops->gemm(&g), RP_OK);
    give_all();
    if (!CHECK(memcmp(with, without, sizeof with) == 0)) {
      printf("\n  %s, flags %d: bits differ without scratch memory", ops->name, flags);
    }
  }
}

int main(void) {
  setenv("RELPOS_BLAS", "builtin", 1);
  test_pieces();
  test_threads();
  for (int i = 0; table_at(i) != NULL; i++) test_product(table_at(i));
  return check_report();
}
