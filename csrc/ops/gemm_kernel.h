/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_kernel.h: strips of our own product: some rows of C by a panel of B, sums in registers.
 */
#ifndef RPI_GEMM_KERNEL_H
#define RPI_GEMM_KERNEL_H

#include "ops/bf16.h"
#include "ops/gemm_job.h"
#include "ops/linear.h"
#include "ops/tile.h"

/* How the kernels of numbers and of words are called. */
#define GEMM_KERNEL(how) ((how) == RPI_NATIVE ? RPI_NATIVE : RPI_NUMBERS)

static int gemm_how(const rpi_gemm_args *g) { return rpi_how(g->precision); }

/* A weight B that is there as words (round_weights), from a place on: rows `stride` words apart. */
typedef struct gemm_stored {
  const real *at; /* NULL: it is not */
  int64_t stride;
} gemm_stored;

static gemm_stored gemm_stored_at(const rpi_gemm_args *g, int64_t inner, int64_t column) {
  if (gemm_how(g) == RPI_NUMBERS || !g->transpose_b || g->rounded == NULL) {
    return (gemm_stored){NULL, 0};
  }
  const int64_t stride = rpi_operand_stride(g->inner, false) / 2;
  return (gemm_stored){(const real *)g->rounded + column * stride + inner / 2, stride};
}

/* One call of the kernel computes GEMM_STRIP rows of C, GEMM_VECTORS vectors wide: 24 sums in
 * 32 registers, 12 in 16. In 16 registers, 6 x 2 instead of 4 x 3 took 4 % longer. */
#if RPI_VECTORS == 4
#define GEMM_STRIP 6
#define GEMM_VECTORS 4
#else
#define GEMM_STRIP 4
#define GEMM_VECTORS 3
#endif
#define GEMM_WIDTH (GEMM_VECTORS * RPI_LANES)

/* A block is at most GEMM_HEIGHT rows, whole strips, and computed GEMM_DEPTH of inner at a
 * time: that part of A, 528 KiB, stays in the second-level cache beside a panel of B. */
#define GEMM_HEIGHT 264
#define GEMM_DEPTH (2048 / RPI_REAL_BYTES)

/* GEMM_STRIP numbers, by as few instructions as there are: with 6, by a copy of 8. */
#define GEMM_PIECE ((GEMM_STRIP + 2) / 4 * 4)
typedef real gemm_piece
    __attribute__((vector_size(GEMM_PIECE * RPI_REAL_BYTES), aligned(RPI_REAL_BYTES), may_alias));

/* So much of inner has a panel of B that lies on the stack. */
#define GEMM_SMALL_DEPTH (512 / RPI_REAL_BYTES)

/* Memory that is read next, rows of so many elements, and then what `then` names. Packing waits
 * for every line of it that is not near, so it is asked for while sums are computed: a line now and
 * then, since a strip that has to ask for many at once waits as long as packing would have. */
typedef struct gemm_ahead {
  const real *at;
  int64_t stride, rows, elements;
  int64_t asked; /* elements of the row at `at` */
  const struct gemm_ahead *then;
} gemm_ahead;

/* Asks for a line, into the first-level cache, from which it sinks into the second. Lines that were
 * asked into the second at once had left it when they were packed (Zen 4). */
RPI_INLINE void gemm_ask(gemm_ahead *ahead) {
  if (ahead->rows == 0) {
    if (ahead->then == NULL || ahead->then->rows == 0) return;
    *ahead = *ahead->then;
  }
  __builtin_prefetch(ahead->at + ahead->asked, 0, 3);
  ahead->asked += RPI_LINE;
  if (ahead->asked < ahead->elements) return;
  ahead->asked = 0;
  if (--ahead->rows > 0) ahead->at += ahead->stride;
}

static int64_t gemm_lines(const gemm_ahead *ahead) {
  return ahead->rows * rpi_divide_up(ahead->elements, RPI_LINE);
}

/* One call of the kernel: c = start + A . B. Element (row, k) of A, a number or a word, is at
 * a[row * a_row + k * a_inner], and a_strip further in the next strip. start_stride is 0 where
 * every row starts from the same numbers: a bias, or zeros. */
typedef struct gemm_tile {
  int how;
  const real *a;
  int64_t a_row, a_inner, a_strip;
  const real *b;
  int64_t b_stride;
  int64_t inner;
  const real *start;
  int64_t start_stride;
  real *c;
  int64_t c_stride;
  const real *next;  /* where the next call writes, rows of c_stride; or NULL */
  gemm_ahead *ahead; /* so many lines of it are asked for with every GEMM_CHUNK of inner */
  int64_t lines;
} gemm_tile;

#define GEMM_CHUNK 16

/* The sums of an element are added in the order of inner, and rounded alike, wherever inner
 * is cut. With every chunk a row of the next tile of C is asked for, too: storing to lines that are
 * not there took 3 % of a product whose C does not fit the caches. */
RPI_INLINE void gemm_sum(const int how, const int rows, const int vectors, const gemm_tile *t) {
  rpi_register sum[GEMM_STRIP][GEMM_VECTORS];
  const real *a[GEMM_STRIP];
  const real *const start = t->start;
  const int64_t start_stride = t->start_stride, c_stride = t->c_stride;
  RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
    a[r] = t->a + r * t->a_row;
    RPI_UNROLL(4) for (int v = 0; v < vectors; v++) {
      sum[r][v] = rpi_load(start + r * start_stride + v * RPI_LANES);
    }
  }
  const real *b = t->b;
  const int64_t b_stride = t->b_stride, a_inner = t->a_inner, end = t->inner * a_inner;
  int asked = t->next != NULL ? 0 : rows;
  for (int64_t k = 0, chunk; k < end;) {
    chunk = rpi_min(k + GEMM_CHUNK * a_inner, end);
    for (int64_t i = 0; i < t->lines; i++) gemm_ask(t->ahead);
    if (asked < rows) {
      RPI_UNROLL(4) for (int v = 0; v < vectors; v++) {
        rpi_prefetch_to(t->next, asked * c_stride + v * RPI_LANES);
      }
      asked++;
    }
    for (; k < chunk; k += a_inner, b += b_stride) {
      rpi_register row[GEMM_VECTORS];
      RPI_UNROLL(4) for (int v = 0; v < vectors; v++) row[v] = rpi_load(b + v * RPI_LANES);
      RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
        RPI_UNROLL(4) for (int v = 0; v < vectors; v++) {
          sum[r][v] = rpi_add_element(how == RPI_NATIVE, sum[r][v], a[r] + k, row[v]);
        }
      }
    }
  }
  real *const c = t->c;
  RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
    RPI_UNROLL(4) for (int v = 0; v < vectors; v++) {
      rpi_store(c + r * c_stride + v * RPI_LANES, sum[r][v]);
    }
  }
}

/* Each its own function, as tile.h's strips and for the same reason. */
typedef void (*gemm_sum_fn)(const gemm_tile *t);

#define GEMM_SUM_FN(how, target, rows, vectors)                                                    \
  target RPI_NOINLINE void gemm_sum_##how##_##rows##_##vectors(const gemm_tile *t) {               \
    gemm_sum(RPI_##how, rows, vectors, t);                                                         \
  }
#define GEMM_SUM_FOUR(how, target, vectors)                                                        \
  GEMM_SUM_FN(how, target, 1, vectors)                                                             \
  GEMM_SUM_FN(how, target, 2, vectors)                                                             \
  GEMM_SUM_FN(how, target, 3, vectors)                                                             \
  GEMM_SUM_FN(how, target, 4, vectors)
#define GEMM_SUM_NAMES(how, vectors)                                                               \
  gemm_sum_##how##_1_##vectors, gemm_sum_##how##_2_##vectors, gemm_sum_##how##_3_##vectors,        \
      gemm_sum_##how##_4_##vectors
#if RPI_VECTORS == 4
#define GEMM_SUM_FNS(how, target, vectors)                                                         \
  GEMM_SUM_FOUR(how, target, vectors)                                                              \
  GEMM_SUM_FN(how, target, 5, vectors)                                                             \
  GEMM_SUM_FN(how, target, 6, vectors)
#define GEMM_SUMS(how, target)                                                                     \
  GEMM_SUM_FNS(how, target, 1)                                                                     \
  GEMM_SUM_FNS(how, target, 2)                                                                     \
  GEMM_SUM_FNS(how, target, 3)                                                                     \
  GEMM_SUM_FNS(how, target, 4)
#define GEMM_SUM_ENTRY(how, vectors)                                                               \
  {GEMM_SUM_NAMES(how, vectors), gemm_sum_##how##_5_##vectors, gemm_sum_##how##_6_##vectors}
#define GEMM_SUMS_ENTRY(how)                                                                       \
  [RPI_##how] = {GEMM_SUM_ENTRY(how, 1), GEMM_SUM_ENTRY(how, 2), GEMM_SUM_ENTRY(how, 3),           \
                 GEMM_SUM_ENTRY(how, 4)}
#else
#define GEMM_SUMS(how, target)                                                                     \
  GEMM_SUM_FOUR(how, target, 1)                                                                    \
  GEMM_SUM_FOUR(how, target, 2)                                                                    \
  GEMM_SUM_FOUR(how, target, 3)
#define GEMM_SUMS_ENTRY(how)                                                                       \
  [RPI_##how] = {{GEMM_SUM_NAMES(how, 1)}, {GEMM_SUM_NAMES(how, 2)}, {GEMM_SUM_NAMES(how, 3)}}
#endif

GEMM_SUMS(NUMBERS, )
#ifdef RPI_BF16_NATIVE
GEMM_SUMS(NATIVE, RPI_BF16_TARGET)
#endif
static const gemm_sum_fn gemm_sums[][GEMM_VECTORS][GEMM_STRIP] = {
    GEMM_SUMS_ENTRY(NUMBERS),
#ifdef RPI_BF16_NATIVE
    GEMM_SUMS_ENTRY(NATIVE),
#endif
};

/* All rows of a block over one panel of B. `width` columns of C exist; the panel has whole
 * vectors, so a ragged one goes by way of a tile of its own. t.next: where the panel behind it
 * begins in C. */
static void gemm_panel(gemm_tile t, int64_t rows, int64_t width, gemm_ahead ahead) {
  const int64_t vectors = rpi_divide_up(width, RPI_LANES);
  const int64_t strips = rpi_divide_up(rows, GEMM_STRIP);
  const int64_t pauses = strips * rpi_divide_up(t.inner, GEMM_CHUNK);
  const int64_t lines = gemm_lines(&ahead) + (ahead.then != NULL ? gemm_lines(ahead.then) : 0);
  const real *const behind = t.next;
  t.ahead = &ahead;
  t.lines = rpi_divide_up(lines, rpi_max(pauses, 1));
  for (int64_t i = 0; i < strips; i++) {
    const int64_t strip = rpi_min(GEMM_STRIP, rows - i * GEMM_STRIP);
    const gemm_sum_fn sum = gemm_sums[GEMM_KERNEL(t.how)][vectors - 1][strip - 1];
    if (vectors * RPI_LANES == width) {
      t.next = i + 1 < strips ? t.c + GEMM_STRIP * t.c_stride : behind;
      sum(&t);
    } else {
      _Alignas(64) real tile[GEMM_STRIP * GEMM_WIDTH] = {0};
      for (int64_t r = 0; r < strip; r++) {
        for (int64_t j = 0; j < width; j++) {
          tile[r * GEMM_WIDTH + j] = t.start[r * t.start_stride + j];
        }
      }
      gemm_tile part = t;
      part.start = part.c = tile;
      part.start_stride = part.c_stride = GEMM_WIDTH;
      part.next = NULL;
      sum(&part);
      for (int64_t r = 0; r < strip; r++) {
        for (int64_t j = 0; j < width; j++) t.c[r * t.c_stride + j] = tile[r * GEMM_WIDTH + j];
      }
    }
    t.a += t.a_strip;
    t.start += GEMM_STRIP * t.start_stride;
    t.c += GEMM_STRIP * t.c_stride;
  }
}

/* panel[inner][stride] = B, its columns filled up with zeros to whole vectors. */
static void gemm_pack_b(const rpi_gemm_args *g, int64_t inner, int64_t depth, int64_t column,
                        int64_t width, real *panel) {
  const int64_t stride = rpi_round_up(width, RPI_LANES), whole = width / RPI_LANES * RPI_LANES;
  const real *from = gemm_b_at(g, inner, column);
  if (g->transpose_b) {
    rpi_pack_transposed(from, g->b_stride, width, depth, 1, panel, stride, stride);
    return;
  }
  for (int64_t k = 0; k < depth; k++, from += g->b_stride, panel += stride) {
    for (int64_t j = 0; j < whole; j += RPI_LANES) rpi_store(panel + j, rpi_load(from + j));
    if (whole < width) rpi_store(panel + whole, rpi_load_part(from + whole, width - whole));
  }
}

#endif
