/* SPDX-License-Identifier: Apache-2.0
 *
 * maps.h: the attention of a model, for the eye: maps, alignments, and what a map comes to. All of
 * checked arguments.
 */
#ifndef RPI_MAPS_H
#define RPI_MAPS_H

#include "model/model.h"

/* ---- kinds of attention: RP_ATTENTION_... ----------------------------------- */

enum { RPI_KINDS = 3 };

static inline int rpi_stack_of_kind(int kind) {
  return kind == RP_ATTENTION_ENCODER ? RPI_ENCODER : RPI_DECODER;
}
static inline int rpi_part_of_kind(int kind) {
  return kind == RP_ATTENTION_CROSS ? RPI_CROSS : RPI_SELF;
}

static inline bool rpi_has_kind(const rp_model *m, int kind) {
  const int stack = rpi_stack_of_kind(kind);
  return kind == RP_ATTENTION_CROSS ? rpi_has_cross(m, stack) : m->stack[stack].parts != 0;
}

/* Queries and keys of a kind in one sentence. */
static inline int64_t rpi_tokens_of(const rpi_run *run, int stack, int64_t sentence) {
  const int64_t *const offsets = run->side[stack].offsets;
  return offsets[sentence + 1] - offsets[sentence];
}
static inline int64_t rpi_map_queries(const rpi_run *run, const rp_model_map *map) {
  return rpi_tokens_of(run, rpi_stack_of_kind(map->kind), map->sentence);
}
static inline int64_t rpi_map_keys(const rpi_run *run, const rp_model_map *map) {
  const int stack = map->kind == RP_ATTENTION_DECODER ? RPI_DECODER : RPI_ENCODER;
  return rpi_tokens_of(run, stack, map->sentence);
}

/* Its rows, where -1 stands for all that follow map->row. */
static inline int64_t rpi_map_rows(const rpi_run *run, const rp_model_map *map) {
  return map->rows >= 0 ? map->rows : rpi_map_queries(run, map) - map->row;
}

/* ---- maps.c ------------------------------------------------------------------ */

/* Runs as far as the maps ask for, and writes them. */
rp_status rpi_maps(const rpi_run *run, const rp_model_map *maps, int64_t count);

/* As rp_model_attention_part, of a kind that the model has. */
const char *rpi_attention_part(const rp_model *m, int kind, int index, int *show);

/* The mean of some layers' and heads' attention to the encoder, sentence after sentence. */
typedef struct rpi_alignments {
  const int64_t *layers; /* [layer_count]; negative: from the last one on */
  const int64_t *heads;  /* [head_count], or NULL: all of them */
  int64_t layer_count, head_count;
  real *weights; /* [rpi_alignment_count], on the host */
} rpi_alignments;

/* Pairs of target and source tokens of all sentences. */
int64_t rpi_alignment_count(const rpi_run *run);

rp_status rpi_align(const rpi_run *run, const rpi_alignments *wanted);

/* As rp_map_sums. */
void rpi_map_sums(const real *p, int64_t queries, int64_t keys, int64_t row, int64_t rows,
                  double *mass, double *entropy, double *distance);

#endif
