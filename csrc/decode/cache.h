/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.h: the decoder of one model, a token at a time.
 *
 * A row is a target that grows. Keys and values of every token are computed once, and lie in a log
 * that is only added to; a row is a list of where its own are, so that rows which share a beginning
 * share its keys and values, and reordering them moves nothing but lists:
 *
 *   log      | step 0: rows 0 1 2 | step 1: rows 0 1 2 | step 2: rows 0 1 2 |
 *   row 0      0                    0                    0
 *   row 1      0                    0                    1      (0 and 1 part at step 2)
 *   row 2      2                    1                    2
 *
 * The log is made of blocks [layers][block_rows][2 K D and a line] (keys, then values;
 * rpi_kept_stride says why a line), so that all layers of a token are at the same distance from
 * each other wherever it lies.
 */
#ifndef RPI_CACHE_H
#define RPI_CACHE_H

#include "model/model.h"

/* Memory that is kept, and grows where a batch needs more than those before. */
typedef struct rpi_room {
  void *memory;
  int64_t bytes;
} rpi_room;

/* Room for `count` things of so many bytes; what was in it may be lost. */
rp_status rpi_room_need(rpi_room *room, int64_t count, int64_t bytes);

typedef struct rpi_cache rpi_cache;

rp_status rpi_cache_create(rp_model *model, rpi_cache **cache);
void rpi_cache_free(rpi_cache *cache); /* takes NULL */

/* What a beginning is told. */
typedef struct rpi_cache_start {
  int64_t most_rows;   /* that a step will have: at most limits.tokens (else RP_ERROR_SHAPE) */
  int64_t most_length; /* that a target will have, its beginning counted: at most max_length */
  bool attention;      /* is rpi_cache_attention wanted? */
} rpi_cache_start;

/* Encodes the sources and reads the beginnings of the targets, at least one token a sentence; then
 * row b is sentence b. `run` is checked. */
rp_status rpi_cache_begin(rpi_cache *cache, const rpi_run *run, const rpi_cache_start *start);

/* rows <= most_rows; parents: rows of the step before, or NULL for the same ones. Tokens are in
 * range, and no row becomes longer than most_length. A step that fails leaves nothing to go on
 * from. */
rp_status rpi_cache_step(rpi_cache *cache, int64_t rows, const int32_t *parents,
                         const int32_t *tokens);

/* Logits of `count` rows from `first` on, after a beginning or a step: [count][classes]. */
rp_status rpi_cache_logits(rpi_cache *cache, int64_t first, int64_t count, real *logits);

/* Of row r after a step (or the last token of a beginning): the tokens it has, and its last token's
 * attention to the source in the last layer, mean over heads [source tokens of the sentence], where
 * that was wanted. */
int64_t rpi_cache_length(const rpi_cache *cache, int64_t row);
const real *rpi_cache_attention(const rpi_cache *cache, int64_t row);

#endif
