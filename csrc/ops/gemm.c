/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm.c: C[rows, columns] = A . B (+ C) (+ bias), the matrix product of every layer.
 *
 *   rows <= 5, B given as [columns, inner]    stream: our own, B is one stream of memory
 *   rows <= 32, the same                      dots: our own, B read once and in order
 *   rows <= 16, B given as [inner, columns]   sums in C: our own, B read along its rows; not in
 *                                             bf16 (all three: gemm_few.h)
 *   more                                      blocks of our own (gemm_kernel.h), or of BLAS
 *                                             (base/blas.h) where that is faster: GEMM_OURS;
 *                                             or of tiles (gemm_tiles.c)
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
#include "base/blas.h"
#include "base/scratch.h"
#include "base/threads.h"
#include "ops/gemm_few.h"
#include "ops/gemm_job.h"
#include "ops/gemm_kernel.h"
#include "ops/gemm_words.h"

/* ---- a block of our own ------------------------------------------------- */

/* A packed strip of A, with room for what its last copy writes beyond it, which also sends
 * the strips, written side by side, to different sets of the first-level cache. */
#define GEMM_STRIP_SIZE (GEMM_DEPTH * GEMM_STRIP + 64 / RPI_REAL_BYTES)

/* Whether A is packed: as words, or transposed, where its rows are so far apart that those of a
 * block are more pages than a processor knows by heart. */
static bool gemm_packs_a(const rpi_gemm_args *g) {
  return gemm_how(g) != RPI_NUMBERS || (g->transpose_a && g->a_stride * RPI_REAL_BYTES >= 2048);
}

/* Whether B is read where it lies: whole panels of whole lines, close enough. A narrower panel,
 * which shares lines with its neighbour, is better packed: by 3 to 6 %, with AVX2. */
static bool gemm_reads_b(const rpi_gemm_args *g) {
  return gemm_how(g) == RPI_NUMBERS && !g->transpose_b && GEMM_WIDTH * RPI_REAL_BYTES == 256 &&
         g->b_stride * RPI_REAL_BYTES <= 2048;
}

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

/* A packed row of A, of numbers, or of half as many words. */
#define GEMM_ROW_SIZE (GEMM_DEPTH + 2)
static int64_t gemm_row_size(int how) {
  return how == RPI_NATIVE ? GEMM_DEPTH / 2 + 2 : GEMM_ROW_SIZE;
}

/* A block's part of A, to where gemm_place_a has it. */
static void gemm_pack_block_a(const rpi_gemm_args *g, gemm_block at, int64_t inner, int64_t depth,
                              real *packed) {
  const int how = gemm_how(g);
  if (how == RPI_NUMBERS) {
    gemm_pack_a(g, inner, depth, at.row, at.rows, packed);
    return;
  }
#if RPI_REAL_BYTES == 4
  gemm_words[how][g->transpose_a ? GEMM_STRIPS : GEMM_ROWS](
      gemm_a_at(g, at.row, inner), g->a_stride, at.rows, depth, packed,
      g->transpose_a ? GEMM_STRIP_SIZE : gemm_row_size(how));
#endif
}

/* A panel of B. */
static void gemm_pack_panel_b(const rpi_gemm_args *g, int64_t inner, int64_t depth, int64_t column,
                              int64_t width, real *panel) {
  const int how = gemm_how(g);
  if (how == RPI_NUMBERS) {
    gemm_pack_b(g, inner, depth, column, width, panel);
    return;
  }
#if RPI_REAL_BYTES == 4
  const gemm_words_fn *const by = gemm_words[how];
  const int64_t stride = rpi_round_up(width, RPI_LANES);
  const gemm_stored words = gemm_stored_at(g, inner, column);
  if (words.at != NULL) by[GEMM_STORED](words.at, words.stride, width, depth, panel, stride);
  else {
    by[g->transpose_b ? GEMM_TURNED : GEMM_PANEL](gemm_b_at(g, inner, column), g->b_stride, width,
                                                  depth, panel, stride);
  }
#endif
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
  t->a_row = g->transpose_a ? 1 : plain ? g->a_stride : gemm_row_size(t->how);
  t->a_inner = !g->transpose_a ? 1 : plain ? g->a_stride : GEMM_STRIP;
  t->a_strip = !plain && g->transpose_a ? GEMM_STRIP_SIZE : GEMM_STRIP * t->a_row;
}

/* `depth` of inner and `columns` of the block, the part of B that is read next: none, where
 * depth is 0. */
static gemm_ahead gemm_ahead_b(const rpi_gemm_args *g, int64_t inner, int64_t depth, int64_t column,
                               int64_t columns) {
  if (depth == 0 || columns == 0) return (gemm_ahead){0};
  const gemm_stored words = gemm_stored_at(g, inner, column);
  if (words.at != NULL) {
    return (gemm_ahead){words.at, words.stride, columns, rpi_divide_up(depth, 2), 0, NULL};
  }
  return (gemm_ahead){.at = gemm_b_at(g, inner, column),
                      .stride = g->b_stride,
                      .rows = g->transpose_b ? columns : depth,
                      .elements = g->transpose_b ? depth : columns};
}

/* The i-th of so many parts of the rows of A that are packed next. */
static gemm_ahead gemm_ahead_a(const rpi_gemm_args *g, gemm_block at, int64_t inner, int64_t depth,
                               int64_t i, int64_t parts) {
  const int64_t lines = depth == 0 ? 0 : g->transpose_a ? depth : at.rows;
  const int64_t first = lines * i / parts, end = lines * (i + 1) / parts;
  if (first == end) return (gemm_ahead){0};
  return (gemm_ahead){.at = g->transpose_a ? gemm_a_at(g, at.row, inner + first)
                                           : gemm_a_at(g, at.row + first, inner),
                      .stride = g->a_stride,
                      .rows = end - first,
                      .elements = g->transpose_a ? at.rows : depth};
}

/* `panel` and `packed` hold `most` numbers of inner, or the words of these. Without `packed` A is
 * read where it lies, as numbers may be: slower, and the same to the last bit. The panels are of
 * nearly equal width, because one of a single vector waits for its own sums. `next`: the block
 * whose first panel is asked for with the last one. */
static void gemm_builtin_block(const rpi_gemm_args *g, gemm_block at, gemm_block next, real *packed,
                               real *panel, int64_t most) {
  static const real zeros[GEMM_WIDTH];
  const int how = gemm_how(g), word = how == RPI_NATIVE ? 2 : 1;
  const int even = how == RPI_NUMBERS ? 1 : 2; /* words are whole */
  const int64_t vectors = rpi_divide_up(at.columns, RPI_LANES);
  const int64_t panels = rpi_divide_up(vectors, GEMM_VECTORS);
  if (g->bias != NULL && g->accumulate) gemm_begin(g, at);
  for (int64_t inner = 0; inner == 0 || inner < g->inner; inner += most) {
    const int64_t depth = rpi_min(most, g->inner - inner), below = inner + depth;
    const int64_t deeper = rpi_min(most, g->inner - below);
    gemm_tile t = {.how = how, .inner = rpi_round_up(depth, even) / word, .c_stride = g->c_stride};
    gemm_place_a(g, at, inner, packed, &t);
    if (packed != NULL) gemm_pack_block_a(g, at, inner, depth, packed);
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
        gemm_pack_panel_b(g, inner, depth, column, width, panel);
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

/* Without scratch memory. */
static void gemm_small_block(const rpi_gemm_args *g, gemm_block at) {
  _Alignas(64) real panel[GEMM_SMALL_DEPTH * GEMM_WIDTH];
  if (gemm_how(g) == RPI_NUMBERS) {
    gemm_builtin_block(g, at, (gemm_block){0}, NULL, panel, GEMM_SMALL_DEPTH);
    return;
  }
  _Alignas(64) real packed[GEMM_STRIP * GEMM_ROW_SIZE + RPI_LANES]; /* words are always packed */
  for (int64_t row = 0; row < at.rows; row += GEMM_STRIP) {
    const gemm_block strip = {at.row + row, rpi_min(GEMM_STRIP, at.rows - row), at.column,
                              at.columns};
    gemm_builtin_block(g, strip, (gemm_block){0}, packed, panel, GEMM_SMALL_DEPTH);
  }
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
                     gemm_packs_a(job->args) ? scratch->a : NULL, scratch->b, GEMM_DEPTH);
  rpi_scratch_give(scratch);
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

/* ---- a block by BLAS ---------------------------------------------------- */

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

/* BLAS counts in int, and has opinions on an empty sum. */
static bool gemm_fits_blas(const rpi_gemm_args *g) {
  const int64_t most = INT32_MAX;
  return g->inner > 0 && g->rows <= most && g->columns <= most && g->inner <= most &&
         g->a_stride <= most && g->b_stride <= most && g->c_stride <= most;
}

/* Blocks for BLAS. Large, because each packs its part of A and B for itself: OpenBLAS loses 5
 * to 10 % in blocks of 264 x 512 against one call, 2 % in twice that (docs/gemm.md). But at least
 * 16, so that threads find work of equal size, down to blocks of 96 x 128. */
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

/* ---- a product ---------------------------------------------------------- */

/* Where our own product was measured to be the faster one: docs/gemm.md. */
#define GEMM_OURS (RPI_REAL_BYTES == 4 && RPI_VECTOR_BYTES >= 32)

/* A product of fewer operations than this is not worth waking the pool for. */
#define GEMM_ALONE 200000

/* `blocks` computes one of those into which `cut` divides C, where rows are more than few. */
static rp_status gemm_by(const rpi_gemm_args *args, rpi_task blocks, void (*cut)(gemm_job *)) {
  if (args->rows == 0 || args->columns == 0) return RP_OK;
  gemm_job job = {.args = args, .block_rows = args->rows};
  const bool numbers = gemm_how(args) == RPI_NUMBERS;
  rpi_task task;
  if (args->transpose_b && !args->transpose_a && args->rows <= GEMM_FEW_ROWS_TRANSPOSED) {
    /* A task reads at least 128 KiB of B, some 5 us. */
    const int64_t most = rpi_max(GEMM_WIDTH, 32768 / rpi_max(args->inner, 1));
    task = gemm_dots_task;
    job.block_columns = gemm_part(args->columns, most, GEMM_WIDTH);
  } else if (numbers && !args->transpose_b && args->rows <= GEMM_FEW_ROWS_PLAIN) {
    /* B is read along its rows: wide pieces. */
    const int64_t most = rpi_min(1024, rpi_max(256, args->columns / 16));
    task = gemm_few_rows_task;
    job.block_columns = gemm_part(args->columns, most, GEMM_WIDTH);
  } else {
    const bool ours = !numbers || (GEMM_OURS && !rpi_blas_insisted());
    job.blas = !ours && gemm_fits_blas(args) ? rpi_blas_gemm() : NULL;
    task = job.blas != NULL ? gemm_blas_task : blocks;
    if (job.blas != NULL) gemm_cut_blas(&job);
    else cut(&job);
  }
  job.blocks_across = rpi_divide_up(args->columns, job.block_columns);
  job.blocks = job.blocks_across * rpi_divide_up(args->rows, job.block_rows);
  const double work = (double)args->rows * (double)args->columns * (double)args->inner;
  const int64_t most = job.blas != NULL ? RPI_BLAS_CALLERS : INT32_MAX;
  job.workers = work < GEMM_ALONE ? 1 : (int)rpi_min(most, rpi_threads_get());
  rpi_parallel_for(job.blocks, job.workers, task, &job);
  return RP_OK;
}

static rp_status gemm(const rpi_gemm_args *args) {
  return gemm_by(args, gemm_builtin_task, gemm_cut_builtin);
}
