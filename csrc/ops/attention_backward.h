/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_backward.h: what attention_backward.c shares with calls of it.
 */
#ifndef RPI_ATTENTION_BACKWARD_H
#define RPI_ATTENTION_BACKWARD_H

#include "ops/backward_side.h"

/* Of an operand that is packed when it is met. */
enum { OPERAND_UNKNOWN, OPERAND_FITS, OPERAND_HAS_NONE };

typedef struct backward_scratch {
  side side[SIDES];
  real *key_rows;                      /* [keys][padded], where they need a copy */
  real *head_key_rows, *tail_key_rows; /* the same, with an end's vector added */
  real *vector;                        /* [padded] */
  real *dq;                            /* [block_rows][padded] */
  real *zeros;                         /* [block + TILE] */
  real *level;                         /* [block]: where scores start */
  pair_scratch pairs;
  operand *key_parts[PLACES]; /* [tiles], of keys, and of those with an end's vector added */
  real *key_words[PLACES];    /* the same as words: lines across inner */
  /* [tiles]: packed when they are met */
  unsigned char *key_state[PLACES];
  bool *key_worded[PLACES];
  operand ds;                /* of some rows on a tile */
  real *ds_words;            /* of a strip, along inner */
  real *weight_words[SIDES]; /* of a block, ds and p, across it */
} backward_scratch;

/* The one list of what a worker needs. */
static backward_scratch *take_backward(rpi_arena *arena, const bounds *n, const rp_attention *s);

/* An item: its part of dq, dk, dv and of the tables' sums. */
static void backward_pair(const backward_item *item, backward_scratch *w);

#endif
