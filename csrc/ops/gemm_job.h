/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_job.h: a product as a job: blocks of C, where they lie, and the cut into them.
 */
#ifndef RPI_GEMM_JOB_H
#define RPI_GEMM_JOB_H

#include <math.h>

#include "base/blas.h"
#include "base/threads.h"
#include "ops/ops.h"

/* A product, and the blocks into which C is cut. */
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

/* ---- the cut into blocks ------------------------------------------------ */

/* The length of nearly equal parts of at most `most`, in whole steps. */
static int64_t gemm_part(int64_t length, int64_t most, int64_t step) {
  return rpi_round_up(rpi_divide_up(length, rpi_divide_up(length, most)), step);
}

/* What a cut into blocks costs. Packing or fetching its part of A takes a block as long as for_a of
 * its columns do, packing B as long as for_b of its rows; for the last thread a quarter of a
 * block is waited, where there is but one `alone` of it. Fitted to the shapes in docs/gemm.md. */
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

/* ---- what gemm.c has for tiles ------------------------------------------ */

/* A block of our own product, without scratch memory. */
static void gemm_small_block(const rpi_gemm_args *g, gemm_block at);

/* `blocks` computes one of those into which `cut` divides C, where rows are more than few. */
static rp_status gemm_by(const rpi_gemm_args *args, rpi_task blocks, void (*cut)(gemm_job *));

static rp_status gemm(const rpi_gemm_args *args);

#endif
