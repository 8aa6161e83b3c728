/* SPDX-License-Identifier: Apache-2.0
 *
 * search.h: a decoder, which is the caches of one model or of several, and the search over them.
 */
#ifndef RPI_SEARCH_H
#define RPI_SEARCH_H

#include "decode/cache.h"
#include "relpos/decode.h"

/* What a search has found. */
typedef struct rpi_results {
  int64_t sentences, n_best;
  rpi_room counts; /* int64_t [sentences] */
  rpi_room found;  /* rp_hypothesis [sentences][n_best] */
  rpi_room tokens; /* int32_t, theirs */
} rpi_results;

struct rp_decoder {
  int64_t count;
  rp_model **models;  /* [count] */
  rpi_cache **caches; /* [count] */
  rpi_run *runs;      /* [count]: what the next search, or beginning, reads */
  int64_t vocabulary, max_length, most_rows; /* the least of all models' */
  int64_t block_rows;                        /* rows that every model has room for logits of */
  rpi_results results, next; /* those of the last search, and of the one that is at work */
  rpi_room work, nodes;      /* of a search */
  int64_t rows, rows_room;   /* one token at a time: rows now, -1: there is no beginning */
  rpi_room parents;          /* int32_t [rows_room] */
};

/* The models are checked: decoders alone, or all with encoders, of one vocabulary. */
rp_status rpi_decoder_create(rp_model *const *models, int64_t count, rp_decoder **decoder);
void rpi_decoder_free(rp_decoder *decoder); /* takes NULL */

/* Searches the sources of decoder->runs, whose targets are what targets begin with (offsets NULL:
 * nothing), search->begin not among it. `search` is checked. After a failure the results are those
 * of the search before. */
rp_status rpi_search(rp_decoder *decoder, const rp_search *search);

/* After a beginning or a step: [count][vocabulary] of rows from `first` on, of an ensemble log of
 * its mean probabilities. */
rp_status rpi_decoder_logits(rp_decoder *decoder, int64_t first, int64_t count, real *logits);

#endif
