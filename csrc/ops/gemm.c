/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm.c: C[rows, columns] = A . B (+ C) (+ bias), the matrix product of every layer.
 *
 *   rows <= 32, B given as [columns, inner]   dots: our own, B read once and in order
 *   rows <= 16, B given as [inner, columns]   sums in C: our own, B read along its rows
 *   more                                      blocks of our own, or of BLAS (base/blas.h)
 *                                             where that is faster: GEMM_OURS; or of tiles
 *                                             (gemm_tiles.c)
 *
 *        inner  +------------------+      per GEMM_DEPTH of inner and GEMM_WIDTH
 *               |     |panel|      |      of columns, a panel of B is packed
 *               +------------------+      (transposed where needed, filled up to
 *        +----+ +------------------+      whole vectors), or read where it lies;
 *        |    | |     |     |      |      all rows of the block pass over it in
 *        |strip |     |=====|      |      strips of GEMM_STRIP, A read where it
 *        |    | |     |     |      |      lies, or packed too
 *        +----+ +------------------+
 *
 * The cut into blocks, and which of these computes, depend on shapes alone: the
 * number of threads changes no bit. Nothing is allocated; packed parts of A and B
 * are in scratch memory (base/scratch.h).
 */
#include <math.h>

#include "base/blas.h"
#include "base/scratch.h"
#include "base/threads.h"
#include "ops/ops.h"
#include "ops/tile.h"

/* Where our own product was measured to be the faster one: docs/gemm.md. */
#define GEMM_OURS (RPI_REAL_BYTES == 4 && RPI_VECTOR_BYTES >= 32)

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
#define GEMM_SMALL_DEPTH (512 / RPI_REAL_BYTES)

/* A packed strip of A, with room for what its last copy writes beyond it, which also sends
 * the strips, written side by side, to different sets of the first-level cache. */
#define GEMM_STRIP_SIZE (GEMM_DEPTH * GEMM_STRIP + 64 / RPI_REAL_BYTES)

/* Up to this many rows packing B, or letting BLAS pack it, costs more than it saves:
 * with B transposed, whose packing is dearer, and with B as it lies. */
#define GEMM_FEW_ROWS_TRANSPOSED 32
#define GEMM_FEW_ROWS_PLAIN 16

/* The part of C in which few rows are added up: near the first-level cache, and wide
 * enough to read B in long pieces. Half of it cost a quarter at 16 rows. */
#define GEMM_FEW_BYTES 32768

/* Sums held at once by the dots kernel: a whole number of vectors of sums. */
#define GEMM_DOTS (RPI_LANES > 8 ? RPI_LANES : 8)

/* A product of fewer operations than this is not worth waking the pool for. */
#define GEMM_ALONE 200000

typedef struct gemm_job {
  const rpi_gemm_args *args;
  rpi_blas_gemm_fn blas;
  int64_t block_rows, block_columns, blocks_across, blocks;
  int workers; /* at most */
} gemm_job;

/* One block of C: all of inner, some rows and columns. */
typedef struct gemm_block {
  int64_t row, rows, column, columns;
} gemm_block;

static gemm_block gemm_block_at(const gemm_job *job, int64_t task) {
  const rpi_gemm_args *g = job->args;
  const int64_t row = task / job->blocks_across * job->block_rows;
  const int64_t column = task % job->blocks_across * job->block_columns;
  return (gemm_block){row, rpi_min(job->block_rows, g->rows - row), column,
                      rpi_min(job->block_columns, g->columns - column)};
}

static const real *gemm_a_at(const rpi_gemm_args *g, int64_t row, int64_t inner) {
  return g->transpose_a ? g->a + inner * g->a_stride + row : g->a + row * g->a_stride + inner;
}

static const real *gemm_b_at(const rpi_gemm_args *g, int64_t inner, int64_t column) {
  return g->transpose_b ? g->b + column * g->b_stride + inner : g->b + inner * g->b_stride + column;
}

/* The length of nearly equal parts of at most `most`, in whole steps. */
static int64_t gemm_part(int64_t length, int64_t most, int64_t step) {
  return rpi_round_up(rpi_divide_up(length, rpi_divide_up(length, most)), step);
}

/* Whether A, transposed, is packed: its rows are so far apart that those of a block are more
 * pages than a processor knows by heart. */
static bool gemm_packs_a(const rpi_gemm_args *g) {
  return g->transpose_a && g->a_stride * RPI_REAL_BYTES >= 2048;
}

/* Whether B is read where it lies: whole panels of whole lines, close enough. A narrower panel,
 * which shares lines with its neighbour, is better packed: by 3 to 6 %, with AVX2. */
static bool gemm_reads_b(const rpi_gemm_args *g) {
  return !g->transpose_b && GEMM_WIDTH * RPI_REAL_BYTES == 256 &&
         g->b_stride * RPI_REAL_BYTES <= 2048;
}

/* What C holds before the product is added to it. */
static void gemm_begin(const rpi_gemm_args *g, gemm_block at) {
  if (g->accumulate && g->bias == NULL) return;
  const real *const bias = g->bias;
  for (int64_t r = 0; r < at.rows; r++) {
    real *const c = g->c + (at.row + r) * g->c_stride;
    for (int64_t j = at.column; j < at.column + at.columns; j++) {
      c[j] = (g->accumulate ? c[j] : (real)0) + (bias != NULL ? bias[j] : (real)0);
    }
  }
}

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

/* One call of the kernel: c = start + A . B. Element (row, k) of A is at a[row * a_row +
 * k * a_inner], and a_strip further in the next strip. start_stride is 0 where every row starts
 * from the same numbers: a bias, or zeros. */
typedef struct gemm_tile {
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
RPI_INLINE void gemm_sum(const int rows, const int vectors, const gemm_tile *t) {
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
        RPI_UNROLL(4) for (int v = 0; v < vectors; v++) sum[r][v] += a[r][k] * row[v];
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

#define GEMM_SUM_FN(rows, vectors)                                                                 \
  RPI_NOINLINE void gemm_sum_##rows##_##vectors(const gemm_tile *t) { gemm_sum(rows, vectors, t); }
#if RPI_VECTORS == 4
#define GEMM_SUM_FNS(vectors)                                                                      \
  GEMM_SUM_FN(1, vectors)                                                                          \
  GEMM_SUM_FN(2, vectors)                                                                          \
  GEMM_SUM_FN(3, vectors)                                                                          \
  GEMM_SUM_FN(4, vectors)                                                                          \
  GEMM_SUM_FN(5, vectors)                                                                          \
  GEMM_SUM_FN(6, vectors)
#define GEMM_SUM_ENTRY(vectors)                                                                    \
  {gemm_sum_1_##vectors, gemm_sum_2_##vectors, gemm_sum_3_##vectors,                               \
   gemm_sum_4_##vectors, gemm_sum_5_##vectors, gemm_sum_6_##vectors}
#else
#define GEMM_SUM_FNS(vectors)                                                                      \
  GEMM_SUM_FN(1, vectors)                                                                          \
  GEMM_SUM_FN(2, vectors)                                                                          \
  GEMM_SUM_FN(3, vectors)                                                                          \
  GEMM_SUM_FN(4, vectors)
#define GEMM_SUM_ENTRY(vectors)                                                                    \
  {gemm_sum_1_##vectors, gemm_sum_2_##vectors, gemm_sum_3_##vectors, gemm_sum_4_##vectors}
#endif

GEMM_SUM_FNS(1)
GEMM_SUM_FNS(2)
GEMM_SUM_FNS(3)
#if GEMM_VECTORS == 4
GEMM_SUM_FNS(4)
#endif

static const gemm_sum_fn gemm_sums[GEMM_VECTORS][GEMM_STRIP] = {
    GEMM_SUM_ENTRY(1),
    GEMM_SUM_ENTRY(2),
    GEMM_SUM_ENTRY(3),
#if GEMM_VECTORS == 4
    GEMM_SUM_ENTRY(4),
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
    const gemm_sum_fn sum = gemm_sums[vectors - 1][strip - 1];
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

/* GEMM_STRIP numbers, by as few instructions as there are: with 6, by a copy of 8. */
#define GEMM_PIECE ((GEMM_STRIP + 2) / 4 * 4)
typedef real gemm_piece
    __attribute__((vector_size(GEMM_PIECE * RPI_REAL_BYTES), aligned(RPI_REAL_BYTES), may_alias));

/* Strips of a transposed A, each [inner][GEMM_STRIP]. What a piece writes beyond its numbers
 * the next one overwrites. */
static void gemm_pack_a(const rpi_gemm_args *g, int64_t inner, int64_t depth, int64_t row,
                        int64_t rows, real *strips) {
  const real *from = gemm_a_at(g, row, inner);
  for (int64_t k = 0; k < depth; k++, from += g->a_stride, strips += GEMM_STRIP) {
    real *to = strips;
    int64_t r = 0;
    for (; r + GEMM_PIECE <= rows; r += GEMM_STRIP, to += GEMM_STRIP_SIZE) {
      __builtin_prefetch(from + 4 * g->a_stride + r, 0, 3);
      *(gemm_piece *)to = *(const gemm_piece *)(from + r);
    }
    for (; r < rows; r += GEMM_STRIP, to += GEMM_STRIP_SIZE) {
      for (int64_t i = 0; i < rpi_min(GEMM_STRIP, rows - r); i++) to[i] = from[r + i];
    }
  }
}

typedef struct gemm_scratch {
  real a[GEMM_HEIGHT / GEMM_STRIP * GEMM_STRIP_SIZE];
  real b[GEMM_DEPTH * GEMM_WIDTH];
} gemm_scratch;
_Static_assert(sizeof(gemm_scratch) <= RPI_SCRATCH_BYTES, "the scratch memory is too small");
_Static_assert(GEMM_HEIGHT % GEMM_STRIP == 0, "a block is whole strips");

/* Where the kernel finds a block's part of A: packed in scratch memory, or where it lies. */
static void gemm_place_a(const rpi_gemm_args *g, gemm_block at, int64_t inner, const real *packed,
                         gemm_tile *t) {
  const bool plain = packed == NULL;
  t->a = plain ? gemm_a_at(g, at.row, inner) : packed;
  t->a_row = g->transpose_a ? 1 : g->a_stride;
  t->a_inner = !g->transpose_a ? 1 : plain ? g->a_stride : GEMM_STRIP;
  t->a_strip = plain ? GEMM_STRIP * t->a_row : GEMM_STRIP_SIZE;
}

/* `depth` of inner and `columns` of the block, the part of B that is read next: none, where
 * depth is 0. */
static gemm_ahead gemm_ahead_b(const rpi_gemm_args *g, int64_t inner, int64_t depth, int64_t column,
                               int64_t columns) {
  if (depth == 0 || columns == 0) return (gemm_ahead){0};
  return (gemm_ahead){.at = gemm_b_at(g, inner, column),
                      .stride = g->b_stride,
                      .rows = g->transpose_b ? columns : depth,
                      .elements = g->transpose_b ? depth : columns};
}

/* The i-th of so many parts of the rows of A that are packed next. */
static gemm_ahead gemm_ahead_a(const rpi_gemm_args *g, gemm_block at, int64_t inner, int64_t depth,
                               int64_t i, int64_t parts) {
  const int64_t first = depth * i / parts, end = depth * (i + 1) / parts;
  if (first == end) return (gemm_ahead){0};
  return (gemm_ahead){.at = gemm_a_at(g, at.row, inner + first),
                      .stride = g->a_stride,
                      .rows = end - first,
                      .elements = at.rows};
}

/* Without scratch memory `panel` holds `most` of inner, and A is read where it lies: slower, and
 * the same to the last bit. The panels are of nearly equal width, because one of a single vector
 * waits for its own sums. `next`: the block whose first panel is asked for with the last one. */
static void gemm_builtin_block(const rpi_gemm_args *g, gemm_block at, gemm_block next,
                               gemm_scratch *scratch, real *panel, int64_t most) {
  static const real zeros[GEMM_WIDTH];
  real *const packed = scratch != NULL && gemm_packs_a(g) ? scratch->a : NULL;
  const int64_t vectors = rpi_divide_up(at.columns, RPI_LANES);
  const int64_t panels = rpi_divide_up(vectors, GEMM_VECTORS);
  if (g->bias != NULL && g->accumulate) gemm_begin(g, at);
  for (int64_t inner = 0; inner == 0 || inner < g->inner; inner += most) {
    const int64_t depth = rpi_min(most, g->inner - inner), below = inner + depth;
    const int64_t deeper = rpi_min(most, g->inner - below);
    gemm_tile t = {.inner = depth, .c_stride = g->c_stride};
    gemm_place_a(g, at, inner, packed, &t);
    if (packed != NULL) gemm_pack_a(g, inner, depth, at.row, at.rows, packed);
    for (int64_t i = 0; i < panels; i++) {
      const int64_t from = vectors * i / panels * RPI_LANES, column = at.column + from;
      const int64_t to = rpi_min(vectors * (i + 1) / panels * RPI_LANES, at.columns);
      const int64_t left = rpi_min(GEMM_WIDTH, at.columns - to), width = to - from;
      t.b = panel;
      t.b_stride = rpi_round_up(width, RPI_LANES);
      if (gemm_reads_b(g) && width == t.b_stride) {
        t.b = gemm_b_at(g, inner, column);
        t.b_stride = g->b_stride;
      } else {
        gemm_pack_b(g, inner, depth, column, width, panel);
      }
      t.start = t.c = g->c + at.row * g->c_stride + column;
      t.start_stride = g->c_stride;
      if (inner == 0 && !g->accumulate) {
        t.start = g->bias != NULL ? g->bias + column : zeros;
        t.start_stride = 0;
      }
      t.next = left > 0 ? t.c + width : NULL;
      gemm_ahead ahead = gemm_ahead_a(g, at, below, packed != NULL ? deeper : 0, i, panels);
      const gemm_ahead ahead_b =
          left > 0     ? gemm_ahead_b(g, inner, depth, column + width, left)
          : deeper > 0 ? gemm_ahead_b(g, below, deeper, at.column, rpi_min(GEMM_WIDTH, at.columns))
                       : gemm_ahead_b(g, 0, rpi_min(most, g->inner), next.column,
                                      rpi_min(GEMM_WIDTH, next.columns));
      ahead.then = &ahead_b;
      gemm_panel(t, at.rows, width, ahead);
    }
  }
}

static void gemm_small_block(const rpi_gemm_args *g, gemm_block at) {
  _Alignas(64) real panel[GEMM_SMALL_DEPTH * GEMM_WIDTH];
  gemm_builtin_block(g, at, (gemm_block){0}, NULL, panel, GEMM_SMALL_DEPTH);
}

static void gemm_builtin_task(void *context, int64_t task, int worker) {
  (void)worker;
  const gemm_job *const job = context;
  const gemm_block at = gemm_block_at(job, task);
  gemm_scratch *const scratch = rpi_scratch_take();
  if (scratch == NULL) {
    gemm_small_block(job->args, at);
    return;
  }
  const int64_t next = task + job->workers; /* while threads take turns: what is done here next */
  gemm_builtin_block(job->args, at, next < job->blocks ? gemm_block_at(job, next) : (gemm_block){0},
                     scratch, scratch->b, GEMM_DEPTH);
  rpi_scratch_give(scratch);
}

static void gemm_blas_task(void *context, int64_t task, int worker) {
  (void)worker;
  const gemm_job *const job = context;
  const rpi_gemm_args *const g = job->args;
  const gemm_block at = gemm_block_at(job, task);
  if (g->bias != NULL) gemm_begin(g, at);
  job->blas(RPI_BLAS_ROW_MAJOR, g->transpose_a ? RPI_BLAS_TRANSPOSED : RPI_BLAS_PLAIN,
            g->transpose_b ? RPI_BLAS_TRANSPOSED : RPI_BLAS_PLAIN, (int)at.rows, (int)at.columns,
            (int)g->inner, 1, gemm_a_at(g, at.row, 0), (int)g->a_stride, gemm_b_at(g, 0, at.column),
            (int)g->b_stride, g->accumulate || g->bias != NULL,
            g->c + at.row * g->c_stride + at.column, (int)g->c_stride);
}

/* Rows of B that nobody works on yet, asked for meanwhile: one vector of each at
 * every step, into the second-level cache (into the first, whose few sets the rows
 * share, was no help). The processor's own prefetching begins anew with every row of
 * B: 4 rows of A took 127 us for a B of 512 x 512 from memory, with this 62. */
typedef struct gemm_next {
  const real *row;
  int64_t rows;
} gemm_next;

/* rows x columns dot products of `inner` numbers each, rows of A with rows of the
 * transposed B. The sums of one vector each are then transposed, which makes the
 * additions across lanes additions of vectors. */
RPI_INLINE void gemm_dots(const int rows, const int columns, const rpi_gemm_args *g, int64_t row,
                          int64_t column, gemm_next ahead) {
  rpi_register sum[GEMM_DOTS] = {0};
  const real *const a = g->a + row * g->a_stride, *const b = g->b + column * g->b_stride;
  const int64_t a_stride = g->a_stride, b_stride = g->b_stride, inner = g->inner;
  int64_t k = 0;
  for (; k + RPI_LANES <= inner; k += RPI_LANES) {
    for (int64_t i = 0; i < ahead.rows; i++) __builtin_prefetch(ahead.row + i * b_stride + k, 0, 2);
    rpi_register x[4];
    RPI_UNROLL(4) for (int r = 0; r < rows; r++) x[r] = rpi_load(a + r * a_stride + k);
    RPI_UNROLL(16) for (int j = 0; j < columns; j++) {
      const rpi_register y = rpi_load(b + j * b_stride + k);
      RPI_UNROLL(4) for (int r = 0; r < rows; r++) sum[r * columns + j] += x[r] * y;
    }
  }
  if (k < inner) {
    for (int j = 0; j < columns; j++) {
      const rpi_register y = rpi_load_part(b + j * b_stride + k, inner - k);
      for (int r = 0; r < rows; r++) {
        sum[r * columns + j] += y * rpi_load_part(a + r * a_stride + k, inner - k);
      }
    }
  }
  real total[GEMM_DOTS];
  RPI_UNROLL(4) for (int first = 0; first < GEMM_DOTS; first += RPI_LANES) {
    rpi_transpose(sum + first);
    rpi_register all = sum[first];
    RPI_UNROLL(16) for (int i = 1; i < RPI_LANES; i++) all += sum[first + i];
    rpi_store(total + first, all);
  }
  for (int r = 0; r < rows; r++) {
    real *const c = g->c + (row + r) * g->c_stride + column;
    for (int j = 0; j < columns; j++) c[j] += total[r * columns + j];
  }
}

/* Each its own function, as tile.h's strips and for the same reason. */
typedef void (*gemm_dots_fn)(const rpi_gemm_args *g, int64_t row, int64_t column, gemm_next ahead);

#define GEMM_DOTS_FN(name, rows, columns)                                                          \
  RPI_NOINLINE void name(const rpi_gemm_args *g, int64_t row, int64_t column, gemm_next ahead) {   \
    gemm_dots(rows, columns, g, row, column, ahead);                                               \
  }
GEMM_DOTS_FN(gemm_dots_1, 1, GEMM_DOTS)
GEMM_DOTS_FN(gemm_dots_2, 2, GEMM_DOTS / 2)
GEMM_DOTS_FN(gemm_dots_4, 4, GEMM_DOTS / 4)
GEMM_DOTS_FN(gemm_dots_single, 1, 1)

/* All rows of A with the GEMM_DOTS columns from `column` on: `rows` calls, whatever
 * their shapes, so that much of the next columns is asked for in each. */
static void gemm_dots_group(const rpi_gemm_args *g, int64_t column, bool more) {
  const int64_t share = more ? rpi_divide_up(GEMM_DOTS, g->rows) : 0;
  int64_t asked = 0;
  for (int64_t row = 0, rows; row < g->rows; row += rows) {
    const int64_t left = g->rows - row;
    rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const gemm_dots_fn dots = rows == 4 ? gemm_dots_4 : rows == 2 ? gemm_dots_2 : gemm_dots_1;
    for (int64_t j = 0; j < GEMM_DOTS; j += GEMM_DOTS / rows) {
      const int64_t next = column + GEMM_DOTS + asked, count = rpi_min(share, GEMM_DOTS - asked);
      dots(g, row, column + j, (gemm_next){count > 0 ? g->b + next * g->b_stride : NULL, count});
      asked += count;
    }
  }
}

static void gemm_dots_task(void *context, int64_t task, int worker) {
  (void)worker;
  const gemm_job *const job = context;
  const rpi_gemm_args *const g = job->args;
  const gemm_block at = gemm_block_at(job, task);
  const int64_t end = at.column + at.columns;
  gemm_begin(g, at);
  int64_t column = at.column;
  for (; column + GEMM_DOTS <= end; column += GEMM_DOTS) {
    gemm_dots_group(g, column, column + 2 * GEMM_DOTS <= g->columns);
  }
  for (; column < end; column++) {
    for (int64_t row = 0; row < g->rows; row++) {
      gemm_dots_single(g, row, column, (gemm_next){NULL, 0});
    }
  }
}

/* C[rows] += A[rows, depth] . B[depth] over whole vectors of columns: C is loaded and
 * stored once for `depth` rows of B, the numbers of A stay in registers. One row of A
 * took 5.9 ms with tile.h's strips for a B of 512 x 32768, which hop from row to row
 * of B, and 2.5 with this. */
RPI_INLINE void gemm_add(const int rows, const int depth, const rpi_product *p, int64_t vectors,
                         bool ahead) {
  rpi_register x[8][8];
  RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
    RPI_UNROLL(8) for (int k = 0; k < depth; k++) {
      x[r][k] = (rpi_register){0} + p->a[r * p->a_row + k * p->a_inner];
    }
  }
  const real *const b = p->b;
  real *const c = p->c;
  const int64_t b_stride = p->b_stride, c_stride = p->c_stride;
  for (int64_t j = 0; j < vectors * RPI_LANES; j += RPI_LANES) {
    rpi_register y[8];
    RPI_UNROLL(8) for (int k = 0; k < depth; k++) {
      y[k] = rpi_load(b + k * b_stride + j);
      if (ahead) __builtin_prefetch(b + (k + depth) * b_stride + j, 0, 2);
    }
    RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
      rpi_register sum = rpi_load(c + r * c_stride + j);
      RPI_UNROLL(8) for (int k = 0; k < depth; k++) sum += x[r][k] * y[k];
      rpi_store(c + r * c_stride + j, sum);
    }
  }
}

typedef void (*gemm_add_fn)(const rpi_product *p, int64_t vectors, bool ahead);

#define GEMM_ADD_FN(rows, depth)                                                                   \
  RPI_NOINLINE void gemm_add_##rows##_##depth(const rpi_product *p, int64_t vectors, bool ahead) { \
    gemm_add(rows, depth, p, vectors, ahead);                                                      \
  }
GEMM_ADD_FN(1, 1)
GEMM_ADD_FN(2, 1)
GEMM_ADD_FN(4, 1)
GEMM_ADD_FN(1, 4)
GEMM_ADD_FN(2, 4)
GEMM_ADD_FN(4, 4)
GEMM_ADD_FN(1, 8)
GEMM_ADD_FN(2, 8)

/* All of inner, for so few columns that C stays in the cache. B is read along its rows,
 * a few of them side by side, and the first strip asks for the next few. */
static void gemm_add_columns(rpi_product p, int64_t rows, int64_t vectors) {
  static const gemm_add_fn adds[3][3] = {{gemm_add_1_1, gemm_add_2_1, gemm_add_4_1},
                                         {gemm_add_1_4, gemm_add_2_4, gemm_add_4_4},
                                         {gemm_add_1_8, gemm_add_2_8, NULL}};
  const int64_t inner = p.inner, most = rows <= 2 ? 8 : 4;
  for (int64_t k = 0, depth; k < inner; k += depth) {
    depth = inner - k >= most ? most : 1;
    const bool ahead = k + 2 * depth <= inner;
    rpi_product part = p;
    part.b = p.b + k * p.b_stride;
    for (int64_t row = 0, strip; row < rows; row += strip) {
      strip = rows - row >= 4 ? 4 : rows - row >= 2 ? 2 : 1;
      part.a = p.a + row * p.a_row + k * p.a_inner;
      part.c = p.c + row * p.c_stride;
      adds[depth / 4][strip / 2](&part, vectors, ahead && row == 0);
    }
  }
}

/* Few rows times B as it lies: only its last columns, less than a vector, are packed. */
static void gemm_few_rows_task(void *context, int64_t task, int worker) {
  (void)worker;
  const gemm_job *const job = context;
  const rpi_gemm_args *const g = job->args;
  const gemm_block at = gemm_block_at(job, task);
  gemm_begin(g, at);
  rpi_product p = {.a = g->a,
                   .a_row = g->transpose_a ? 1 : g->a_stride,
                   .a_inner = g->transpose_a ? g->a_stride : 1,
                   .b = g->b + at.column,
                   .b_stride = g->b_stride,
                   .c = g->c + at.column,
                   .c_stride = g->c_stride,
                   .inner = g->inner};
  const int64_t whole = at.columns / RPI_LANES * RPI_LANES, rest = at.columns - whole;
  const int64_t span = rpi_round_up(GEMM_FEW_BYTES / RPI_REAL_BYTES / at.rows, RPI_LANES);
  for (int64_t j = 0; j < whole; j += span) {
    rpi_product part = p;
    part.b += j;
    part.c += j;
    gemm_add_columns(part, at.rows, rpi_min(span, whole - j) / RPI_LANES);
  }
  if (rest == 0) return;
  _Alignas(64) real panel[GEMM_SMALL_DEPTH * RPI_LANES];
  real *const c = p.c + whole;
  for (int64_t inner = 0; inner < g->inner; inner += GEMM_SMALL_DEPTH) {
    const int64_t depth = rpi_min(GEMM_SMALL_DEPTH, g->inner - inner);
    gemm_pack_b(g, inner, depth, at.column + whole, rest, panel);
    gemm_panel((gemm_tile){.a = gemm_a_at(g, 0, inner),
                           .a_row = p.a_row,
                           .a_inner = p.a_inner,
                           .a_strip = GEMM_STRIP * p.a_row,
                           .b = panel,
                           .b_stride = RPI_LANES,
                           .inner = depth,
                           .start = c,
                           .start_stride = g->c_stride,
                           .c = c,
                           .c_stride = g->c_stride},
               at.rows, rest, (gemm_ahead){0});
  }
}

/* BLAS counts in int, and has opinions on an empty sum. */
static bool gemm_fits_blas(const rpi_gemm_args *g) {
  const int64_t most = INT32_MAX;
  return g->inner > 0 && g->rows <= most && g->columns <= most && g->inner <= most &&
         g->a_stride <= most && g->b_stride <= most && g->c_stride <= most;
}

/* Blocks for BLAS. Large, because each packs its part of A and B for itself: OpenBLAS loses 5
 * to 10 % in blocks of 264 x 512 against one call, 2 % in twice that. But at least 16, so
 * that threads find work of equal size, down to blocks of 96 x 128. */
static void gemm_cut_blas(gemm_job *job) {
  const rpi_gemm_args *g = job->args;
  int64_t rows = 528, columns = 1024;
  for (;;) {
    job->block_rows = gemm_part(g->rows, rows, 6);
    job->block_columns = gemm_part(g->columns, columns, 64);
    if (rpi_divide_up(g->rows, job->block_rows) * rpi_divide_up(g->columns, job->block_columns) >=
        16) {
      return;
    }
    if (columns > 128 && (job->block_columns >= job->block_rows || rows <= 96)) columns /= 2;
    else if (rows > 96) rows /= 2;
    else return;
  }
}

/* What a cut into blocks costs. Packing or fetching its part of A takes a block as long as for_a of
 * its columns do, packing B as long as for_b of its rows; for the last thread a quarter of a
 * block is waited, where there is but one `alone` of it. The numbers are measured. */
typedef struct gemm_costs {
  double for_a, for_b, alone;
  int64_t rows, columns, shorter; /* at most, and the shorter of the two */
  int64_t row_step, column_step;
} gemm_costs;

/* The blocks that lose least. */
static void gemm_cut_by(gemm_job *job, gemm_costs costs) {
  const rpi_gemm_args *const g = job->args;
  double least = INFINITY;
  for (int64_t rows = costs.rows; rows >= 64; rows /= 2) {
    for (int64_t columns = costs.columns; columns >= 64; columns /= 2) {
      const int64_t block_rows = gemm_part(g->rows, rows, costs.row_step);
      const int64_t block_columns = gemm_part(g->columns, columns, costs.column_step);
      const int64_t blocks =
          rpi_divide_up(g->rows, block_rows) * rpi_divide_up(g->columns, block_columns);
      const double loss = costs.for_a / (double)block_columns + costs.for_b / (double)block_rows +
                          (blocks == 1 ? costs.alone : 0.25 / (double)blocks);
      if (loss >= least || rpi_min(block_rows, block_columns) > costs.shorter) continue;
      least = loss;
      job->block_rows = block_rows;
      job->block_columns = block_columns;
    }
  }
}

/* Blocks for our own product. */
static void gemm_cut_builtin(gemm_job *job) {
  const rpi_gemm_args *const g = job->args;
  const double for_b = gemm_reads_b(g) ? 3 : g->transpose_b ? 7 : 5;
  gemm_cut_by(job, (gemm_costs){.for_a = gemm_packs_a(g) ? 8 : 2,
                                .for_b = for_b,
                                .alone = 0.25,
                                .rows = GEMM_HEIGHT,
                                .columns = 512,
                                .shorter = INT64_MAX,
                                .row_step = GEMM_STRIP,
                                .column_step = GEMM_WIDTH});
}

/* `blocks` computes one of those into which `cut` divides C, where rows are more than few. */
static rp_status gemm_by(const rpi_gemm_args *args, rpi_task blocks, void (*cut)(gemm_job *)) {
  if (args->rows == 0 || args->columns == 0) return RP_OK;
  gemm_job job = {.args = args, .block_rows = args->rows};
  rpi_task task;
  if (args->transpose_b && !args->transpose_a && args->rows <= GEMM_FEW_ROWS_TRANSPOSED) {
    /* A task reads at least 128 KiB of B, some 5 us. */
    const int64_t most = rpi_max(GEMM_WIDTH, 32768 / rpi_max(args->inner, 1));
    task = gemm_dots_task;
    job.block_columns = gemm_part(args->columns, most, GEMM_WIDTH);
  } else if (!args->transpose_b && args->rows <= GEMM_FEW_ROWS_PLAIN) {
    /* B is read along its rows: wide pieces. */
    const int64_t most = rpi_min(1024, rpi_max(256, args->columns / 16));
    task = gemm_few_rows_task;
    job.block_columns = gemm_part(args->columns, most, GEMM_WIDTH);
  } else {
    const bool ours = GEMM_OURS && !rpi_blas_insisted();
    job.blas = !ours && gemm_fits_blas(args) ? rpi_blas_gemm() : NULL;
    task = job.blas != NULL ? gemm_blas_task : blocks;
    if (job.blas != NULL) gemm_cut_blas(&job);
    else cut(&job);
  }
  job.blocks_across = rpi_divide_up(args->columns, job.block_columns);
  job.blocks = job.blocks_across * rpi_divide_up(args->rows, job.block_rows);
  const double work = (double)args->rows * (double)args->columns * (double)args->inner;
  const int64_t most = job.blas != NULL ? RPI_BLAS_CALLERS : INT32_MAX;
  job.workers = work < GEMM_ALONE ? 1 : (int)rpi_min(most, rp_get_threads());
  rpi_parallel_for(job.blocks, job.workers, task, &job);
  return RP_OK;
}

static rp_status gemm(const rpi_gemm_args *args) {
  return gemm_by(args, gemm_builtin_task, gemm_cut_builtin);
}
