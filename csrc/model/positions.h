/* SPDX-License-Identifier: Apache-2.0
 *
 * positions.h: from a stack's position scheme to the relation terms of its attention, and back.
 *
 * A scheme is a few tables. Some are parameters as they are (Shaw, Music Transformer, T5), others
 * are made of parameters by one matrix product, again in every layer and every batch:
 *
 *   transformer-xl   key table [T, H D]   = waves [T, C] . position.weightᵀ, of both sides of the
 *                                           query half of that where the host computes (waves.h)
 *   deberta          key table [T, H D]   = relative_embedding [T, C] . (key projection)ᵀ
 *                    query table          = the same by the query projection
 *   alibi-learned    bias table [H, T]    = slopes [H, 1] . (-|distance|) [1, T]
 *
 * What is made lies in scratch memory, one layer's at a time, and so does its gradient on the way
 * back to the parameters. Everything a scheme computes once (buckets, waves, frequencies) is made
 * with the model.
 */
#ifndef RPI_POSITIONS_H
#define RPI_POSITIONS_H

#include "model/params.h"
#include "ops/ops.h"

/* Which parameters a stack's scheme has. */
typedef struct rpi_scheme {
  bool key, value, distance, bias, slopes, waves, embedding, relation_key, relation_value;
  bool per_layer, per_head;             /* of every table but those of values */
  bool value_per_layer, value_per_head; /* of value and relation_value */
  int64_t left, right;                  /* the distances it tells apart */
  int64_t rows;                         /* T of its tables; 0: it has none */
} rpi_scheme;

/* Does no query of the stack see a later key of its own sequence? */
static inline bool rpi_is_causal(int stack) { return stack == RPI_DECODER; }

rpi_scheme rpi_scheme_of(const rp_config *config, int stack);

/* What one stack computes once. */
typedef struct rpi_positions {
  const rp_config *config;
  int stack;
  rpi_scheme has;
  int32_t *buckets;    /* [left + 1 + right]: t5, deberta, relative-key */
  real *waves;         /* [T][C]: transformer-xl */
  real *distances;     /* [T], negative: alibi */
  real *fixed;         /* [H][T]: alibi with the published slopes */
  double *frequencies; /* [pairs]: rope */
  int64_t pairs;
  real *absolute; /* [max_length][C]: sinusoids */
  /* scratch, one layer's at a time */
  real *key, *query, *bias;    /* made tables */
  real *dkey, *dquery, *dbias; /* their gradients; NULL without training */
  real *some;                  /* of waves.h; NULL: keys lie on one side alone */
} rpi_positions;

/* Small constants, on which attention's sizes depend, large ones and scratch, each from an arena of
 * its own. */
void rpi_positions_carve(const rp_config *config, int stack, bool training, rpi_arena *small,
                         rpi_arena *constants, rpi_arena *scratch, rpi_positions *p);

/* ---- position_constants.c ---------------------------------------------------- */

/* The published slopes of ALiBi. */
double rpi_alibi_slope(int64_t head, int64_t heads);

/* Computes the small constants, and the large ones, which are where `ops` computes. */
void rpi_positions_fill(const rpi_positions *p);
rp_status rpi_positions_make(const rp_ops *ops, const rpi_positions *p);

/* ---- the terms of a layer ----------------------------------------------------- */

/* One layer's parameters or their gradients: where the numbers are. NULL: only shapes are asked
 * for; tables then point nowhere in particular. */
typedef struct rpi_layer_place {
  const rpi_layer_params *at;
  int64_t relative_embedding;
  real *numbers; /* the flat buffer */
} rpi_layer_place;

/* Makes the tables of a layer and sets the terms of `a`, which has its shape. */
rp_status rpi_positions_forward(const rp_ops *ops, const rpi_positions *p,
                                const rpi_layer_place *weights, const rp_graphs *graphs,
                                rp_attention *a);

/* What one of the products costs that make the tables of `a`, all of them together: operations and
 * bytes; 0 where nothing is made. On the way back deberta has two for each. */
typedef struct rpi_positions_cost {
  double operations, bytes;
} rpi_positions_cost;

rpi_positions_cost rpi_positions_cost_of(const rp_ops *ops, const rpi_positions *p,
                                         const rp_attention *a, bool back);

/* Where attention's backward puts the gradients of the tables of `a`; what is made is zeroed. */
rp_status rpi_positions_gradients(const rp_ops *ops, const rpi_positions *p,
                                  const rpi_layer_place *weights, const rpi_layer_place *gradients,
                                  const rp_attention *a, rp_attention_gradients *g);

/* From the gradients of made tables to those of the parameters. */
rp_status rpi_positions_backward(const rp_ops *ops, const rpi_positions *p,
                                 const rpi_layer_place *weights, const rpi_layer_place *gradients,
                                 const rp_attention *a);

/* rope: turns the queries and keys of qkv [tokens][H D + 2 K D], or their gradients back. starts:
 * the positions of the sentences' first tokens, or NULL: 0. */
rp_status rpi_positions_rotate(const rp_ops *ops, const rpi_positions *p, int64_t sentences,
                               const int64_t *offsets, const int64_t *starts, real *qkv, bool back);

#endif
