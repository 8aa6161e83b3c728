/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_forward.h: what attention_forward.c shares with calls of it and with maps.
 */
#ifndef RPI_ATTENTION_FORWARD_H
#define RPI_ATTENTION_FORWARD_H

#include "ops/attention_words.h"
#include "ops/pairs.h"

/* One head of one sequence, on one chunk of queries. */
typedef struct forward_item {
  const rpi_attention_args *args;
  rpi_sequence seq;
  sight sees;
  int64_t head, key_head;
  int64_t query, count; /* the chunk: first query, number of queries */
  term key, value;
  pair_terms pairs;
  bounds n;
  bool content; /* are queries met? (A map may leave them out.) */
} forward_item;

/* Sums of weights that a row keeps, as vectors. Without dropout those of the keys in the head
 * and in the tail of the value term are kept apart, so that they cost nothing: the row's sum
 * is all three. Under dropout MIDDLE is the whole sum, and the others are what is kept. */
enum {
  SUM_MIDDLE,
  SUM_HEAD,   /* strips wholly in the head */
  SUM_TAIL,   /* strips wholly in the tail */
  SUM_BEFORE, /* what strips across the band have in the head */
  SUM_AFTER,  /* and in the tail */
  SUMS
};

/* What a chunk of queries carries from tile to tile. */
typedef struct running {
  real *max, *negated_max; /* [rows], units of log 2 */
  real *sums;              /* [SUMS][rows][LANES], `plane` numbers from one to the next */
  int64_t plane;
  bool begun[SUMS]; /* what nothing was added to holds no numbers; MIDDLE always does */
  real *out;        /* [rows][value width], and room for whole products by tiles */
  /* what sums and out were of keys before (fold), laid out as they are, where an item folds */
  real *past_sums, *past_out;
  bool folds;
  unsigned char *seen; /* [rows] has the row met a key it may see? */
} running;

typedef struct forward_scratch {
  real *keys;   /* [tiles][D][TILE], scaled */
  real *values; /* [keys][value width], where they need a copy */
  running state;
  packed_term key_table, value_table;
  band_e e;      /* of a block; its ends of a chunk of queries */
  real *buckets; /* [block][window] */
  real *ends;    /* [2][value width]: vectors of the value term's head and tail */
  real *zeros;   /* [block + TILE] */
  real *moved;   /* [block + 1][width], where queries are: and the vector */
  real *strip;   /* [STRIP][TILE], or [TILED_ROWS][TILE] */
  pair_scratch pairs;
  /* Operands of whole blocks. */
  operand *tile_keys, *tile_values; /* [tiles]: a chunk of keys */
  operand queries, weights;         /* a block's content, and its weights on one tile */
  operand related;                  /* the block, where its content is moved */
  operand bucket_parts;             /* rows of buckets */
  bool *keys_fit, *values_fit;      /* [tiles]: have their numbers parts? */
  /* The same in bf16 where tiles do not multiply, as words. */
  real *key_words;                  /* [tiles][inner_of D][TILE] */
  real *value_words;                /* [inner_of keys][value width] */
  real *query_words, *weight_words; /* of a block's content, and of a strip, along inner */
  real *related_words;              /* the block, where its content is moved */
  real *bucket_words;               /* rows of buckets */
} forward_scratch;

/* What stays the same while a block of queries walks a chunk of keys. */
typedef struct forward_view {
  int64_t row0, rows; /* the block, counted in the sequence */
  int64_t block;      /* its first row in the chunk */
  int64_t key;        /* the first key of the chunk of keys */
  const real *q;
  int64_t q_stride;
  dense content; /* what keys meet: q, or moved */
  dense met;     /* what products read of it */
  dense keys;    /* as they lie */
  dense values;
  block_place at;
  band_e e;
  window key_window, value_window;
  int64_t e_stride;
  bool collects; /* some strip lies across the band: there are buckets */
  bool fits;     /* have all queries parts? */
} forward_view;

/* Rows of a block on a tile of keys: a strip of RPI_STRIP, or up to RPI_TILED_ROWS where all that
 * is said of pairs is where they lie. */
typedef struct cell {
  int64_t i, count;     /* its rows, counted in the block */
  int64_t j, tile_keys; /* its keys, counted in the chunk */
  int64_t columns;      /* columns_of_keys */
  real *at;             /* [count][TILE] */
  bool multiplied;      /* the products of its scores are there */
  bool parts;           /* its weights are made parts at once */
  const real *more;     /* scored before: what its pairs add, where that is still there; or NULL */
} cell;

/* ---- what attention_forward.c does ---------------------------------------- */

/* The one list of what a worker needs. */
static forward_scratch *take_forward(rpi_arena *arena, const bounds *n, const rp_attention *s);

/* An item from its first key to its rows of out. */
static void forward_rows(const forward_item *item, forward_scratch *w);

/* The steps of it that a map takes too, each for what the next ones need. */
static void open_rows_of(const forward_item *item, forward_scratch *w);
static void open_keys_of(const forward_item *item, forward_scratch *w, int64_t key, int64_t keys);
static forward_view open_view(const forward_item *item, forward_scratch *w, int64_t block,
                              int64_t key, int64_t keys, dense values, const reach *r);
static void open_tile(const forward_item *item, forward_scratch *w, const forward_view *view,
                      int64_t j, int64_t tile_keys, int64_t next);
RPI_INLINE void forward_scores(const forward_item *item, forward_scratch *w,
                               const forward_view *view, const real *negated_max, cell *x);

#endif
