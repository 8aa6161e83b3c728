/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout.h: dropout over the rows of packed sentences, for operations that take every number by
 * itself.
 *
 *            64 columns
 *           +-----+-----+---+     a run: up to RPI_STRIP rows of one sentence,
 *     run   |     |     |   |     whose masks keep.h makes a tile at a time
 *           +-----+-----+---+
 *     run   |     |     |   |     a run ends where its sentence does
 *           +-----+-----+---+
 *
 * packed_rows walks a block of rows and hands every row of every tile, with its mask, to a
 * function of the operation, which is inlined. Without dropout a row is one piece, and runs are
 * only found where the operation asks for the place within the sentence.
 */
#ifndef RPI_DROPOUT_H
#define RPI_DROPOUT_H

#include <assert.h>

#include "base/threads.h"
#include "ops/keep.h"
#include "ops/ops.h"

/* Numbers in a block, and below which waking the pool does not pay. */
#define PACKED_BLOCK 24576
#define PACKED_ALONE 32768

/* Masks made at once, 24 KiB: whole rows mostly. Their numbers are then read in long pieces, at the
 * speed of memory; rows of 1024 took a third longer by tiles, or by pieces of 512. */
#define PACKED_TILES 64

/* Consecutive rows of one sentence. */
typedef struct packed_run {
  int64_t row, rows;
  int64_t sentence, place; /* place: of the first row, within the sentence */
} packed_run;

/* A piece of one row. */
typedef struct packed_piece {
  int64_t row, place, column, columns;
  const int8_t *mask; /* NULL: everything is kept */
  real scale;
} packed_piece;

typedef void (*packed_fn)(const void *args, packed_piece at);

/* It goes through a pointer on its way to be inlined, which only an optimiser sees through. */
#ifdef __OPTIMIZE__
#define PACKED_FN RPI_INLINE
#else
#define PACKED_FN static
#endif

typedef struct packed_job {
  const void *args;
  const rpi_dropout *packing;
  dropout d;
  int64_t rows, columns, block;
} packed_job;

/* `columns` may be fewer than `wide`, the numbers that a row takes to compute. */
static packed_job packed_job_of(const void *args, const rpi_dropout *packing, int64_t rows,
                                int64_t columns, int64_t wide) {
  packed_job job = {.args = args, .packing = packing, .rows = rows, .columns = columns};
  if (packing->rate > 0) job.d = dropout_of(packing->rate, packing->key);
  job.block = rpi_round_up(rpi_max(PACKED_BLOCK / rpi_max(wide, 1), 1), RPI_STRIP);
  assert(job.d.threshold == 0 || packing->offsets[packing->sentences] == rows);
  return job;
}

static void packed_run_all(packed_job *job, int64_t wide, rpi_task task) {
  const int64_t blocks = rpi_divide_up(job->rows, job->block);
  const bool alone = job->rows < PACKED_ALONE / rpi_max(wide, 1);
  if (job->columns > 0) rpi_parallel_for(blocks, alone ? 1 : rpi_threads_get(), task, job);
}

/* No rows yet; packed_next finds the first. */
static packed_run packed_begin(const rpi_dropout *packing, int64_t row) {
  int64_t sentence = 0, beyond = packing->sentences;
  while (beyond - sentence > 1) { /* the last that starts at or before `row` */
    const int64_t middle = sentence + (beyond - sentence) / 2;
    if (packing->offsets[middle] <= row) sentence = middle;
    else beyond = middle;
  }
  return (packed_run){.row = row, .sentence = sentence};
}

/* False after the last run before `end`. */
static bool packed_next(const rpi_dropout *packing, int64_t end, packed_run *run) {
  run->row += run->rows;
  if (run->row >= end) return false;
  const int64_t *const offsets = packing->offsets;
  while (offsets[run->sentence + 1] <= run->row) run->sentence++;
  run->place = run->row - offsets[run->sentence];
  run->rows = rpi_min(rpi_min(end, offsets[run->sentence + 1]) - run->row, RPI_STRIP);
  return true;
}

/* The mask of 64 columns of a run. */
static void packed_mask(const packed_job *job, packed_run run, int64_t column, keep_mask *mask) {
  keep_make(&job->d, job->packing->ordinals[run.sentence], job->packing->site, run.place, run.rows,
            column, RPI_TILE, mask);
}

RPI_INLINE real packed_keep(packed_piece at, int64_t c, real x) {
  const real kept = at.scale * x;
  return at.mask == NULL ? x : at.mask[c] < 0 ? kept : (real)0;
}

/* Up to PACKED_TILES tiles of a run. */
RPI_INLINE void packed_tiles(const packed_job *job, packed_run run, int64_t first,
                             const packed_fn fn) {
  keep_mask masks[PACKED_TILES];
  const int64_t end = rpi_min(first + PACKED_TILES * RPI_TILE, job->columns);
  for (int64_t column = first; column < end; column += RPI_TILE) {
    packed_mask(job, run, column, &masks[(column - first) / RPI_TILE]);
  }
  for (int64_t r = 0; r < run.rows; r++) {
    packed_piece at = {.row = run.row + r, .place = run.place + r, .scale = job->d.scale};
    for (at.column = first; at.column < end; at.column += RPI_TILE) {
      at.mask = masks[(at.column - first) / RPI_TILE].of[r];
      if (end - at.column >= RPI_TILE) { /* a length known when compiling */
        at.columns = RPI_TILE;
        fn(job->args, at);
      } else {
        at.columns = end - at.column;
        fn(job->args, at);
      }
    }
  }
}

/* One block. `placed`: the operation asks for places even without dropout. */
RPI_INLINE void packed_rows(const packed_job *job, int64_t task, const bool placed,
                            const packed_fn fn) {
  const int64_t first = task * job->block, end = rpi_min(first + job->block, job->rows);
  if (job->d.threshold == 0 && !placed) {
    for (int64_t row = first; row < end; row++) {
      fn(job->args, (packed_piece){.row = row, .columns = job->columns});
    }
    return;
  }
  packed_run run = packed_begin(job->packing, first);
  while (packed_next(job->packing, end, &run)) {
    if (job->d.threshold == 0) {
      for (int64_t r = 0; r < run.rows; r++) {
        fn(job->args,
           (packed_piece){.row = run.row + r, .place = run.place + r, .columns = job->columns});
      }
      continue;
    }
    for (int64_t column = 0; column < job->columns; column += PACKED_TILES * RPI_TILE) {
      packed_tiles(job, run, column, fn);
    }
  }
}

#endif
