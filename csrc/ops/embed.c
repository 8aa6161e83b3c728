/* SPDX-License-Identifier: Apache-2.0
 *
 * embed.c: out_r = keep( scale * table[id_r] + positions[place of r in its sentence] ).
 *
 * Backward, with d_r = keep(dout_r): dtable[id_r] += scale * d_r and dpositions[place] += d_r.
 * Many rows have the same id: a task owns 64 columns of both tables and adds all rows to them, in
 * their order.
 */
#include "ops/dropout.h"

PACKED_FN void embed_piece(const void *args, packed_piece at) {
  const rpi_embed_args *const e = args;
  const real scale = e->scale;
  const real *const from = e->table + e->ids[at.row] * e->columns + at.column;
  real *const to = e->out + at.row * e->columns + at.column;
  if (e->positions != NULL) {
    const int64_t place = e->places ? e->places[at.row] : at.place;
    const real *const position = e->positions + place * e->columns + at.column;
    _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
      to[c] = packed_keep(at, c, scale * from[c] + position[c]);
    }
  } else {
    _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
      to[c] = packed_keep(at, c, scale * from[c]);
    }
  }
}

static void embed_block(void *context, int64_t task, int worker) {
  (void)worker;
  const packed_job *const job = context;
  const rpi_embed_args *const e = job->args;
  if (e->positions != NULL) packed_rows(job, task, true, embed_piece);
  else packed_rows(job, task, false, embed_piece);
}

static rp_status embed(const rpi_embed_args *args) {
  packed_job job = packed_job_of(args, &args->dropout, args->rows, args->columns, args->columns);
  packed_run_all(&job, args->columns, embed_block);
  return RP_OK;
}

/* Adds a piece of d_r where forward took table[id_r] and positions[place] from. */
RPI_INLINE void embed_add(const rpi_embed_backward_args *b, packed_piece at) {
  const rpi_embed_args *const e = &b->forward;
  const real scale = e->scale;
  const real *const from = b->dout + at.row * e->columns + at.column;
  real *const to = b->dtable + e->ids[at.row] * e->columns + at.column;
  if (b->dpositions != NULL) {
    real *const position = b->dpositions + at.place * e->columns + at.column;
    _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
      const real d = packed_keep(at, c, from[c]);
      to[c] += scale * d;
      position[c] += d;
    }
  } else {
    _Pragma("omp simd") for (int64_t c = 0; c < at.columns; c++) {
      to[c] += scale * packed_keep(at, c, from[c]);
    }
  }
}

static void embed_backward_columns(void *context, int64_t task, int worker) {
  (void)worker;
  const packed_job *const job = context;
  const int64_t column = task * RPI_TILE, columns = rpi_min(RPI_TILE, job->columns - column);
  packed_run run = packed_begin(job->packing, 0);
  while (packed_next(job->packing, job->rows, &run)) {
    keep_mask mask;
    if (job->d.threshold != 0) packed_mask(job, run, column, &mask);
    for (int64_t r = 0; r < run.rows; r++) {
      packed_piece at = {.row = run.row + r, .place = run.place + r, .column = column};
      at.columns = columns;
      at.scale = job->d.scale;
      if (job->d.threshold != 0) at.mask = mask.of[r];
      if (at.mask == NULL) embed_add(job->args, at);
      else embed_add(job->args, at);
    }
  }
}

static rp_status embed_backward(const rpi_embed_backward_args *args) {
  const rpi_embed_args *const e = &args->forward;
  packed_job job = packed_job_of(args, &e->dropout, e->rows, e->columns, e->columns);
  const bool alone = e->rows < PACKED_ALONE / rpi_max(e->columns, 1);
  rpi_parallel_for(rpi_divide_up(e->columns, RPI_TILE), alone ? 1 : rpi_threads_get(),
                   embed_backward_columns, &job);
  return RP_OK;
}
