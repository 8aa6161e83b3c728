/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm.c: C[rows, columns] = A . B (+ C) (+ bias), the matrix product of every layer.
 *
 *   rows <= 32, B given as [columns, inner]   dots: our own, B read once and in order
 *   rows <= 16, B given as [inner, columns]   sums in C: our own, B read along its rows
 *   more                                      BLAS (base/blas.h) on blocks of C, or,
 *                                             without one, blocks of our own:
 *
 *        inner  +------------------+      per GEMM_INNER of inner and GEMM_WIDTH
 *               |     |panel|      |      of columns, a panel of B is packed
 *               +------------------+      (transposed where needed, filled up to
 *        +----+ +------------------+      whole vectors); all rows of the block
 *        |    | |     |     |      |      pass over it in strips of six
 *        |strip |     |=====|      |      (tile.h), A read where it lies
 *        |    | |     |     |      |
 *        +----+ +------------------+
 *
 * The cut into blocks, and which of these computes, depend on shapes alone: the
 * number of threads changes no bit. Nothing is allocated; the panel is on the
 * stack.
 */
#include "base/blas.h"
#include "base/threads.h"
#include "ops/ops.h"
#include "ops/tile.h"

/* The panel: 64 KiB, so that it stays in the second-level cache beside the block of
 * A, and fits the smallest stack a thread may come with (musl: 128 KiB). */
#define GEMM_INNER 256
#define GEMM_WIDTH (256 / RPI_REAL_BYTES)

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
  int64_t block_rows, block_columns, blocks_across;
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

/* C += strip of A . panel of B. `width` columns of C exist; the panel has whole
 * vectors, so a ragged one goes by way of a tile of its own. */
static void gemm_strips(rpi_product p, int64_t rows, int64_t width) {
  const int64_t vectors = (width + RPI_LANES - 1) / RPI_LANES;
  if (vectors * RPI_LANES == width) {
    rpi_block_product(RPI_START_LOAD, rows, vectors, p, NULL);
    return;
  }
  static const real zeros[RPI_STRIP];
  for (int64_t row = 0; row < rows; row += RPI_STRIP) {
    _Alignas(64) real tile[RPI_STRIP * GEMM_WIDTH];
    const int64_t strip = rpi_min(RPI_STRIP, rows - row);
    rpi_product part = p;
    part.a += row * p.a_row;
    part.c = tile;
    part.c_stride = GEMM_WIDTH;
    rpi_block_product(RPI_START_ROW, strip, vectors, part, zeros);
    for (int64_t r = 0; r < strip; r++) {
      real *const c = p.c + (row + r) * p.c_stride;
      for (int64_t j = 0; j < width; j++) c[j] += tile[r * GEMM_WIDTH + j];
    }
  }
}

/* panel[inner][stride] = B, its columns filled up with zeros to the stride. */
static void gemm_pack(const rpi_gemm_args *g, int64_t inner, int64_t depth, int64_t column,
                      int64_t width, real *panel, int64_t stride) {
  const real *const from = gemm_b_at(g, inner, column);
  if (g->transpose_b) {
    rpi_pack_transposed(from, g->b_stride, width, depth, 1, panel, stride, stride);
    return;
  }
  for (int64_t k = 0; k < depth; k++) {
    real *const to = panel + k * stride;
    for (int64_t j = 0; j < width; j++) to[j] = from[k * g->b_stride + j];
    for (int64_t j = width; j < stride; j++) to[j] = 0;
  }
}

static void gemm_builtin_task(void *context, int64_t task, int worker) {
  (void)worker;
  const gemm_job *const job = context;
  const rpi_gemm_args *const g = job->args;
  const gemm_block at = gemm_block_at(job, task);
  _Alignas(64) real panel[GEMM_INNER * GEMM_WIDTH];
  gemm_begin(g, at);
  for (int64_t inner = 0; inner < g->inner; inner += GEMM_INNER) {
    const int64_t depth = rpi_min(GEMM_INNER, g->inner - inner);
    for (int64_t j = 0; j < at.columns; j += GEMM_WIDTH) {
      const int64_t width = rpi_min(GEMM_WIDTH, at.columns - j);
      const int64_t stride = rpi_round_up(width, RPI_LANES);
      gemm_pack(g, inner, depth, at.column + j, width, panel, stride);
      gemm_strips((rpi_product){.a = gemm_a_at(g, at.row, inner),
                                .a_row = g->transpose_a ? 1 : g->a_stride,
                                .a_inner = g->transpose_a ? g->a_stride : 1,
                                .b = panel,
                                .b_stride = stride,
                                .c = g->c + at.row * g->c_stride + at.column + j,
                                .c_stride = g->c_stride,
                                .inner = depth},
                  at.rows, width);
    }
  }
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

/* Loads the first `count` reals, zeros beyond. */
RPI_INLINE rpi_register gemm_load_part(const real *from, int64_t count) {
  real whole[RPI_LANES] = {0};
  for (int64_t i = 0; i < count; i++) whole[i] = from[i];
  return rpi_load(whole);
}

/* Rows of B that nobody works on yet, asked for meanwhile: one vector of each at
 * every step, into the second-level cache (into the first, whose few sets the rows
 * share, was no help). The processor's own prefetching begins anew with every row of
 * B: 4 rows of A took 127 us for a B of 512 x 512 from memory, with this 62. */
typedef struct gemm_ahead {
  const real *row;
  int64_t rows;
} gemm_ahead;

/* rows x columns dot products of `inner` numbers each, rows of A with rows of the
 * transposed B. The sums of one vector each are then transposed, which makes the
 * additions across lanes additions of vectors. */
RPI_INLINE void gemm_dots(const int rows, const int columns, const rpi_gemm_args *g, int64_t row,
                          int64_t column, gemm_ahead ahead) {
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
      const rpi_register y = gemm_load_part(b + j * b_stride + k, inner - k);
      for (int r = 0; r < rows; r++) {
        sum[r * columns + j] += y * gemm_load_part(a + r * a_stride + k, inner - k);
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
typedef void (*gemm_dots_fn)(const rpi_gemm_args *g, int64_t row, int64_t column, gemm_ahead ahead);

#define GEMM_DOTS_FN(name, rows, columns)                                                          \
  RPI_NOINLINE void name(const rpi_gemm_args *g, int64_t row, int64_t column, gemm_ahead ahead) {  \
    gemm_dots(rows, columns, g, row, column, ahead);                                               \
  }
GEMM_DOTS_FN(gemm_dots_1, 1, GEMM_DOTS)
GEMM_DOTS_FN(gemm_dots_2, 2, GEMM_DOTS / 2)
GEMM_DOTS_FN(gemm_dots_4, 4, GEMM_DOTS / 4)
GEMM_DOTS_FN(gemm_dots_single, 1, 1)

/* All rows of A with the GEMM_DOTS columns from `column` on: `rows` calls, whatever
 * their shapes, so that much of the next columns is asked for in each. */
static void gemm_dots_group(const rpi_gemm_args *g, int64_t column, bool more) {
  const int64_t share = more ? (GEMM_DOTS + g->rows - 1) / g->rows : 0;
  int64_t asked = 0;
  for (int64_t row = 0, rows; row < g->rows; row += rows) {
    const int64_t left = g->rows - row;
    rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const gemm_dots_fn dots = rows == 4 ? gemm_dots_4 : rows == 2 ? gemm_dots_2 : gemm_dots_1;
    for (int64_t j = 0; j < GEMM_DOTS; j += GEMM_DOTS / rows) {
      const int64_t next = column + GEMM_DOTS + asked, count = rpi_min(share, GEMM_DOTS - asked);
      dots(g, row, column + j, (gemm_ahead){count > 0 ? g->b + next * g->b_stride : NULL, count});
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
      gemm_dots_single(g, row, column, (gemm_ahead){NULL, 0});
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
  _Alignas(64) real panel[GEMM_INNER * RPI_LANES];
  p.b = panel;
  p.b_stride = RPI_LANES;
  p.c = g->c + at.column + whole;
  for (int64_t inner = 0; inner < g->inner; inner += GEMM_INNER) {
    p.inner = rpi_min(GEMM_INNER, g->inner - inner);
    p.a = gemm_a_at(g, 0, inner);
    gemm_pack(g, inner, p.inner, at.column + whole, rest, panel, RPI_LANES);
    gemm_strips(p, at.rows, rest);
  }
}

static int64_t gemm_parts(int64_t length, int64_t part) { return (length + part - 1) / part; }

/* The length of nearly equal parts of at most `most`, in whole steps. */
static int64_t gemm_part(int64_t length, int64_t most, int64_t step) {
  return rpi_round_up(gemm_parts(length, gemm_parts(length, most)), step);
}

/* BLAS counts in int, and has opinions on an empty sum. */
static bool gemm_fits_blas(const rpi_gemm_args *g) {
  const int64_t most = INT32_MAX;
  return g->inner > 0 && g->rows <= most && g->columns <= most && g->inner <= most &&
         g->a_stride <= most && g->b_stride <= most && g->c_stride <= most;
}

/* Blocks for BLAS or our own product. Large, because each packs its part of B (and BLAS
 * of A) for itself: OpenBLAS loses 5 to 10 % in blocks of 264 x 512 against one call,
 * 2 % in twice that; ours wants its 264 rows of A in the second-level cache. But at
 * least 16, so that threads find work of equal size, down to blocks of 96 x 128. */
static void gemm_cut(gemm_job *job) {
  const rpi_gemm_args *g = job->args;
  int64_t rows = job->blas != NULL ? 528 : 264, columns = job->blas != NULL ? 1024 : 512;
  for (;;) {
    job->block_rows = gemm_part(g->rows, rows, RPI_STRIP);
    job->block_columns = gemm_part(g->columns, columns, GEMM_WIDTH);
    if (gemm_parts(g->rows, job->block_rows) * gemm_parts(g->columns, job->block_columns) >= 16) {
      return;
    }
    if (columns > 128 && (job->block_columns >= job->block_rows || rows <= 96)) columns /= 2;
    else if (rows > 96) rows /= 2;
    else return;
  }
}

static rp_status gemm(const rpi_gemm_args *args) {
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
    job.blas = gemm_fits_blas(args) ? rpi_blas_gemm() : NULL;
    task = job.blas != NULL ? gemm_blas_task : gemm_builtin_task;
    gemm_cut(&job);
  }
  job.blocks_across = gemm_parts(args->columns, job.block_columns);
  const int64_t tasks = job.blocks_across * gemm_parts(args->rows, job.block_rows);
  const double work = (double)args->rows * (double)args->columns * (double)args->inner;
  const int64_t most = job.blas != NULL ? RPI_BLAS_CALLERS : INT32_MAX;
  const int workers = work < GEMM_ALONE ? 1 : (int)rpi_min(most, rp_get_threads());
  rpi_parallel_for(tasks, workers, task, &job);
  return RP_OK;
}
