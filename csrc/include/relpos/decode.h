/* SPDX-License-Identifier: Apache-2.0
 *
 * decode.h: what a trained model says. Translation by beam search, greedy search and
 * sampling, and the same one token at a time.
 *
 *   1  A search in one call
 *   2  Its results
 *   3  One token at a time
 *   4  Alignments
 *
 * A decoder belongs to one thread at a time, and to the models it was made of, which must outlive
 * it; while it is at work no other call into those models is allowed (RP_ERROR_ORDER).
 * examples/c/04_translate.c is a whole program.
 */
#ifndef RELPOS_DECODE_H
#define RELPOS_DECODE_H

#include "relpos/model.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------
 * 1. A search in one call
 * ------------------------------------------------------------------------ */

/* What a target's log-probability is divided by; L counts its tokens, forced ones, and its end. */
enum {
  RP_PENALTY_NONE = 0, /* none: 1 */
  RP_PENALTY_WU = 1,   /* wu: ((5 + L) / 6)^alpha */
  RP_PENALTY_POWER = 2 /* power: L^alpha */
};

/* How to search. Start from rp_search_default(). */
typedef struct rp_search {
  size_t struct_size;
  int32_t begin, end; /* tokens: before the first, after the last */

  /* Hypotheses of a sentence, at most the vocabulary's size: each step takes so many of the
   * likeliest continuations, those that say the end among them. 1: greedy. */
  int64_t beam;
  int64_t n_best; /* results of a sentence, at most beam; when sampling, the number of draws */
  int penalty;    /* RP_PENALTY_... */
  double alpha;   /* >= 0 */
  /* Added to the score: coverage times sum_i log(min(sum_j a_ji, 1)), a_ji being what target place
   * j pays to source place i in the last layer, mean over its heads. >= 0; 0: none. */
  double coverage;

  int64_t min_length; /* tokens before the end, at least */
  /* Tokens at most, and never more than the model's max_length: a target that has so many is cut
   * off, without its end. 0: source tokens + max_more (without a source, forced tokens +
   * max_more), or min_length, if that is more. What is forced is never cut. */
  int64_t max_length;
  int64_t max_more;

  /* What these rule out keeps its share: probabilities of the rest then sum to less than 1. */
  int64_t no_repeat;         /* no n-gram of so many tokens comes twice in a target; 0: they may */
  const int32_t *suppressed; /* tokens that are never said, [suppressed_count], or NULL */
  int64_t suppressed_count;

  int sample;         /* != 0: n_best independent draws a sentence, and no beam */
  double temperature; /* > 0; logits are divided by it */
  int64_t top_k;      /* draws from so many most likely tokens; 0: from all */
  double top_p;       /* and from the fewest that have this share together; 1: all */
  uint64_t seed;      /* a draw depends on it, on its number and the sentence's ordinal alone */

  /* != 0: search with the average of the weights, which models made for training with an ema keep;
   * RP_ERROR_ORDER where one of them keeps none */
  int average;
} rp_search;

static inline rp_search rp_search_default(void) {
  rp_search search;
  memset(&search, 0, sizeof search);
  search.struct_size = sizeof search;
  search.begin = 1;
  search.end = 2;
  search.beam = 4;
  search.n_best = 1;
  search.penalty = RP_PENALTY_WU;
  search.alpha = 0.6;
  search.max_more = 50;
  search.temperature = 1;
  search.top_p = 1;
  return search;
}

typedef struct rp_decoder rp_decoder;

/* One model, or an ensemble, whose probabilities are averaged: models of one vocabulary, on one
 * device, each once, all with an encoder or all without; decoder.relations is 0. *decoder is NULL
 * where it fails. */
RP_API rp_status rp_decoder_create(rp_model *const *models, int64_t count, rp_decoder **decoder);
RP_API void rp_decoder_free(rp_decoder *decoder); /* takes NULL */

/* Searches the targets of a batch of sources, within the models' limits: sentences times beam (or
 * draws) are at most limits.tokens. batch->target, if given, is what every target begins with,
 * without search->begin (a decoder alone, a language model, goes on from it); labels are not read.
 * Results replace those of the search before. Except for rounding, a sentence's do not depend on
 * what else is in the batch. A sentence's search ends when none of its unfinished hypotheses can
 * win. One whose logits are not finite has no results; the others are not affected. After a failure
 * the results are those of the search before. */
RP_API rp_status rp_decoder_search(rp_decoder *decoder, const rp_batch *batch,
                                   const rp_search *search);

/* ------------------------------------------------------------------------
 * 2. Its results
 * ------------------------------------------------------------------------ */

/* One target. */
typedef struct rp_hypothesis {
  size_t struct_size;     /* to be set by the caller */
  int64_t count;          /* tokens, with what was forced, without begin and end */
  const int32_t *tokens;  /* [count], until the next search */
  double log_probability; /* of the tokens that were searched, the end among them */
  double score;           /* after penalties: results are in falling order of it */
  int finished;           /* 0: it was cut off at max_length */
} rp_hypothesis;

/* Of a sentence: 0 to n_best, fewer where there are no more, none where logits were not finite. */
RP_API rp_status rp_decoder_result_count(const rp_decoder *decoder, int64_t sentence,
                                         int64_t *count);
RP_API rp_status rp_decoder_result(const rp_decoder *decoder, int64_t sentence, int64_t rank,
                                   rp_hypothesis *hypothesis);

/* ------------------------------------------------------------------------
 * 3. One token at a time
 * ------------------------------------------------------------------------ */

/* Encodes the sources of a batch, and reads what the targets begin with (batch->target, at least
 * one token each) in one pass; each sentence is then one row of the next step. logits, or NULL:
 * [sentences][vocabulary], of what comes next. most_rows: the most rows a step will have. */
RP_API rp_status rp_decoder_begin(rp_decoder *decoder, const rp_batch *batch, int64_t most_rows,
                                  rp_real *logits);

/* Row r continues row parents[r] of the step before (NULL: row r) with tokens[r]. Any number of
 * rows, or none, may continue the same one. logits, or NULL: [rows][vocabulary] of what comes next;
 * of an ensemble, the log of its mean probabilities. Fails with RP_ERROR_SHAPE where a target
 * would be longer than the model's max_length. */
RP_API rp_status rp_decoder_step(rp_decoder *decoder, int64_t rows, const int64_t *parents,
                                 const int32_t *tokens, rp_real *logits);

/* ------------------------------------------------------------------------
 * 4. Alignments
 * ------------------------------------------------------------------------ */

/* Attention from targets to sources, the mean over the given layers (negative ones count from the
 * last, -1) and heads (NULL: all). weights: for each sentence [target tokens][source tokens], one
 * sentence right behind the other. Targets are read as in training. */
RP_API rp_status rp_model_alignments(rp_model *model, const rp_batch *batch, const int64_t *layers,
                                     int64_t layer_count, const int64_t *heads, int64_t head_count,
                                     rp_real *weights);

#ifdef __cplusplus
}
#endif

#endif /* RELPOS_DECODE_H */
