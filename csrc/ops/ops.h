/* SPDX-License-Identifier: Apache-2.0
 *
 * ops.h: the operation table. Everything above it (model, training, decoding)
 * computes only through these pointers; csrc/isa/ fills one table per instruction
 * set, cuda/ one for all GPUs.
 *
 * Dimension letters: B batch, H heads, N queries, M keys, D head width, Dv value
 * width, T relations, C model width, k clip distance, V vocabulary.
 *
 * Rules of every entry:
 *   - It returns a status, unless nothing can fail, because a device can. On a CPU only attention
 *     does, whose workspace may be too small, or too large for a number, and whoever takes memory.
 *   - Arguments have been checked (api*.c, or the model): entries only assert.
 *   - Parameter gradients accumulate, activation gradients overwrite.
 *   - The caller provides the workspace, sized by the entry's own query; nothing
 *     allocates.
 *   - Work is cut into blocks whose borders depend on shapes alone, and partial
 *     sums are added in block order: any number of threads gives the same bits.
 *   - Arrays of `real`, workspaces, rpi_cross_entropy_args.hit, the ledger of a step and lists
 *     of rows in rpi_attend_rows_args.mean lie in memory of the table (allocate), which on a
 *     device the host cannot read. All else lies on the host: ids, offsets, labels, ordinals,
 *     masks, buckets, frequencies, lists of pointers, and results of other types. A table may
 *     read it until the entry returns, not longer.
 *   - An `element` says what an array holds: RP_F32, or on a device RP_BF16. Its pointer is one to
 *     `real` either way; strides count its elements.
 *   - Entries of a device are done in the order in which they were called, maybe after they
 *     return; read, collect, and entries with results on the host, wait.
 */
#ifndef RPI_OPS_H
#define RPI_OPS_H

#include <stdbool.h>

#include "base/error.h"
#include "base/integers.h"
#include "ops/real.h"
#include "ops/schedule.h"
#include "relpos/device.h"
#include "relpos/model.h"

static inline int64_t rpi_element_bytes(int element) {
  return element == RP_BF16 ? 2 : (int64_t)sizeof(real);
}

/* Rows of a relation's table. */
static inline int64_t rpi_table_rows(const rp_relation *r) {
  return r->map == RP_MAP_BAND && !r->buckets ? r->left + 1 + r->right : r->rows;
}

/* Attention on a CPU takes so many queries and keys at a time; a sequence that is longer is cut
 * into equal chunks, which may be smaller. */
#define RPI_QUERY_CHUNK 1024 /* that one packing of keys serves */
#define RPI_KEY_CHUNK 512    /* 128 KiB packed at D = 64: a part of any second cache */

/* A linear layer's weight [out, in], and on a device its bias, which products in bf16 are to have
 * as they read them. */
typedef struct rpi_rounding {
  int64_t out, in;
  const real *weight;
  const real *bias; /* or NULL */
  void *to;         /* rpi_linear_kept bytes; NULL: nothing is wanted */
} rpi_rounding;

/* Where who makes x writes it as a linear layer's product has it (rpi_linear.kept): on a device, in
 * bf16. memory NULL: it is not wanted. */
typedef struct rpi_operand {
  void *memory;
  bool bias; /* the layer has one */
} rpi_operand;

/* C[rows, columns] = A . B (+ C where accumulate) (+ bias[columns] where given).
 * Row-major. A is [rows, inner], or [inner, rows] where transpose_a; B is [inner,
 * columns], or [columns, inner] where transpose_b (a linear layer's weight). */
typedef struct rpi_gemm_args {
  int64_t rows, columns, inner;
  const real *a;
  int64_t a_stride; /* elements between two stored rows */
  const real *b;
  int64_t b_stride;
  real *c;
  int64_t c_stride;
  int c_element; /* RP_BF16: of a device in bf16, not accumulated */
  const real *bias;
  bool transpose_a, transpose_b, accumulate;
  int precision; /* RP_F32, RP_BF16 */
  void *kept;    /* this and what follows: rpi_linear's */
  bool given;
  const void *rounded;
} rpi_gemm_args;

/* Rows in bf16 of what products are given begin on borders of so many numbers, and have place for
 * the parts of a bias. */
enum { RPI_ROUNDED_BORDER = 8, RPI_BIAS_PARTS = 3 };

/* A linear layer y = x . Wᵀ + b, W being [out, in]. Its products: linear.h. On a device, in bf16,
 * the way there may keep x as it was rounded, and the way back takes that for x. */
typedef struct rpi_linear {
  int64_t rows, in, out;
  const real *x;
  int64_t x_stride;
  const real *weight;
  const real *bias;    /* or NULL */
  void *kept;          /* rpi_linear_kept bytes, or NULL */
  bool given;          /* x was left there, and is not read */
  const void *rounded; /* the weight by round_weights; NULL: it is rounded for every product */
} rpi_linear;

/* Its way back, of which a device reads dy once: dW += dyᵀ . x, db += the sums of dy's columns, and
 * dx (or dx +) = dy . W. */
typedef struct rpi_linear_backward_args {
  rpi_linear forward; /* the bias is not read, nor x where it was kept */
  const real *dy;
  int64_t dy_stride;
  int dy_element; /* RP_BF16: of a device in bf16 */
  real *dweight;
  real *dbias;    /* NULL: there is none */
  real *dx;       /* [rows, in]; NULL: not wanted */
  int dx_element; /* as dy_element; RP_F32 where dx is added to */
  bool add;       /* dx +, else dx */
  int precision;
} rpi_linear_backward_args;

/* One sequence's place in the arrays. */
typedef struct rpi_sequence {
  int64_t query_row, key_row;     /* first row, along row_stride (packed arrays) */
  int64_t query_batch, key_batch; /* along batch_stride (padded arrays) */
  int64_t queries, keys;          /* in use */
  int64_t start;                  /* absolute position of query 0 */
} rpi_sequence;

/* One attention call, checked: what rp_attention says, plus the arrays. */
typedef struct rpi_attention_args {
  const rp_attention *shape;
  rp_rows q, k, v;
  rp_rows_out out;
  bool ones;   /* of a device, in bf16, packed: out is what a linear layer with a bias is given
                  (rpi_linear.kept) */
  real *lse;   /* NULL: not wanted */
  int workers; /* threads, the same for the workspace's size and the call */
  void *workspace;
  int64_t workspace_bytes;
} rpi_attention_args;

typedef struct rpi_attention_backward_args {
  const rp_attention *shape;
  rp_rows q, k, v;
  rp_rows out, dout; /* out and lse are forward's results */
  const real *lse;
  int workers; /* as forward's */
  void *workspace;
  int64_t workspace_bytes;
  const rp_attention_gradients *gradients;
} rpi_attention_backward_args;

/* Rows of one head's scores or probabilities; what: RP_SHOW_...; b: -1 where a workspace is asked
 * for that is large enough for every sequence. */
typedef struct rpi_attention_map_args {
  const rp_attention *shape;
  rp_rows q, k;
  int what;
  int64_t b, head, row, rows;
  real *to; /* [rows][keys of the sequence], on the host */
  int64_t to_stride;
  int workers; /* threads, the same for the workspace's size and the map */
  void *workspace;
  int64_t workspace_bytes;
} rpi_attention_map_args;

/* Which numbers of a packed matrix [rows, columns] dropout drops: row offsets[b] + i is row i of
 * the sentence with ordinal ordinals[b] (base/rng.h). Rows lie where sentences do even where the
 * rate is 0. */
typedef struct rpi_dropout {
  double rate; /* 0: nothing is dropped */
  uint32_t key[2], site;
  int64_t sentences;
  const int64_t *offsets;   /* [sentences + 1] */
  const uint32_t *ordinals; /* [sentences] */
} rpi_dropout;

/* Attention of single queries to keys that lie anywhere: decoding. Row r has the keys at
 * keys[r][0 .. counts[r] - 1] + shift, D numbers for each head of keys, and their values `to_value`
 * numbers further on; its query stands at the last of them. Of the shape H, key_heads, D = Dv, the
 * scale, bands, position_bias, window_left and softcap count. No dropout, no workspace, no
 * backward. */
typedef struct rpi_attend_rows_args {
  const rp_attention *shape;
  int64_t rows;
  const real *q;
  int64_t q_stride;
  const real *const *const *keys;
  const int64_t *counts; /* [rows]; none: a row of zeros */
  int64_t shift, to_value;
  real *out;
  int64_t out_stride;
  real *const *mean; /* [rows][counts]: the probabilities, mean over heads; or NULL */
} rpi_attend_rows_args;

/* The `most` likeliest classes of every row, in falling order, the lower of equals first:
 * log p = logits / temperature - log sum exp of all of them / temperature. Banned classes are not
 * chosen, and keep their share of the probability. Where fewer are left, tokens are -1 and log p is
 * -inf from there on; where a logit of the row is NaN or infinite (but for -inf, probability 0),
 * all tokens are -1 and all log p NaN. */
typedef struct rpi_choose_args {
  int64_t rows, classes;
  real *logits; /* of banned classes they become -inf */
  int64_t stride;
  double temperature;
  const int64_t *banned_offsets; /* [rows + 1] into banned, or NULL: none */
  const int32_t *banned;
  int64_t most;
  int32_t *tokens;           /* [rows][most] */
  double *log_probabilities; /* [rows][most] */
  double *left;              /* [rows]: the probability of all that is not banned; or NULL */
} rpi_choose_args;

/* mean = log(share * softmax(logits)) of every row, or (not `first`) of that and of what there is
 * the log of. mean may be the logits of the first. */
typedef struct rpi_mix_args {
  int64_t rows, classes;
  const real *logits;
  int64_t stride;
  real *mean;
  int64_t mean_stride;
  double share;
  bool first;
} rpi_mix_args;

/* Where a device notes that a number is not finite: to look itself the host would have to wait.
 * *at, in memory of the table, becomes at least `in` where a number that the entry reads as x is
 * not, and at least `out` where one that it gives is not. NULL: nobody asks; with a table of the
 * host nobody does, there rpi_hunt looks. */
typedef struct rpi_note {
  int32_t *at;
  int32_t in, out;
} rpi_note;

/* out_r = keep( scale * table[id_r] + positions[row within the sentence] ), all [rows, columns].
 * Backward: dtable[id] and dpositions add up. */
typedef struct rpi_embed_args {
  int64_t rows, columns;
  const int32_t *ids;
  const real *table;
  real scale;
  const real *positions; /* [longest sentence, columns], or NULL */
  const int64_t *places; /* [rows]: the row of positions, where it is another; forward alone */
  rpi_dropout dropout;
  real *out;
  rpi_note note; /* of out */
} rpi_embed_args;

typedef struct rpi_embed_backward_args {
  rpi_embed_args forward; /* table and out are not read */
  const real *dout;
  real *dtable;
  real *dpositions; /* NULL: not wanted */
} rpi_embed_backward_args;

/* What something is added to: x itself, or, with stats, what a norm has made of x and not left. */
typedef struct rpi_base {
  const real *x;                    /* NULL: there is none */
  const real *stats, *gain, *shift; /* of a device; shift: or NULL */
} rpi_base;

/* y = (x - mean) * rstd * gain + shift, over the columns of each row; with a base, of a stream to
 * which something is added, which lies at x, so that x becomes base + keep(x) first. */
typedef struct rpi_norm_args {
  int64_t rows, columns;
  real *x;
  rpi_base base; /* its x may be y */
  rpi_dropout dropout;
  const real *gain;
  const real *shift; /* or NULL */
  double epsilon;
  real *y;     /* NULL: only rounded is wanted */
  real *stats; /* [rows][2]: mean and 1 / sqrt(variance + epsilon); NULL: not wanted */
  rpi_note note;
  rpi_operand rounded;
} rpi_norm_args;

/* dx = dstream + the gradient through the norm; it is the base's, and df = keep(dx) that of what
 * was added, by a linear layer, whose bias has the sums of df's columns. */
typedef struct rpi_norm_backward_args {
  int64_t rows, columns;
  const real *x, *gain, *stats, *dy;
  const real *dstream; /* or NULL; may be dx */
  real *dx;            /* may be dy */
  rpi_dropout dropout;
  real *df; /* in f32 it may be dy; NULL: it is dx, as nothing is dropped, or not wanted */
  int df_element;
  real *dgain, *dshift, *dbias; /* dshift, dbias: NULL where there is none */
  void *workspace;
  int64_t workspace_bytes;
} rpi_norm_backward_args;

/* a = keep(f(h)). h is [rows, columns]; of SwiGLU [rows, 2 columns], the gate (through
 * x * sigmoid(x)) before what it gates. GELU is the exact one, by erf. a may be h for RELU.
 * Backward: dh from da; RELU reads a (forward's result) and not h, the others h and not a; dh may
 * be da for RELU and GELU. */
typedef struct rpi_activation_args {
  int64_t rows, columns;
  int kind;      /* RP_RELU, RP_GELU, RP_SWIGLU */
  const real *h; /* NULL: it lies where rounded is to be, in bf16; RELU alone */
  rpi_dropout dropout;
  real *a; /* NULL: only rounded is wanted */
  rpi_operand rounded;
} rpi_activation_args;

typedef struct rpi_activation_backward_args {
  int64_t rows, columns;
  int kind;
  const real *h, *a, *da;
  rpi_dropout dropout;
  real *dh;
  int element;         /* of da and dh */
  rpi_operand rounded; /* RELU in bf16: a was left there */
  real *dbias;         /* += the sums of dh's columns; or NULL */
} rpi_activation_backward_args;

/* Of every row: loss = -sum_c y_c log softmax(logits)_c with the smoothed y, nll = -log softmax at
 * the label, hit = 1 where the label has the highest logit (the first of equals), else 0. Rows
 * with label -1 give 0 everywhere. Where gradient is set, logits become softmax - y (0 for rows
 * that do not count), else they are left as they are. Sums run in `real` by vectors. */
typedef struct rpi_cross_entropy_args {
  int64_t rows, classes;
  real *logits;
  int64_t stride; /* between rows */
  const int32_t *labels;
  double smoothing;
  int rule; /* RP_SMOOTH_... */
  bool gradient;
  bool rounded; /* of a device alone, where all rows start on borders of 16 bytes: the gradient is
                   left in bf16 for linear_backward, each row from where its logits start */
  real *loss, *nll; /* [rows] */
  int8_t *hit;      /* [rows] */
} rpi_cross_entropy_args;

/* What batches lost: the sums over the rows whose label counts, in double, in the order of rows.
 * bad: 0 where the loss is finite, else what was noted in the first batch whose loss is not, 1
 * where nothing was. */
typedef struct rpi_losses {
  int64_t tokens, hits;
  double loss, nll;
  int64_t bad;
} rpi_losses;

typedef struct rpi_losses_args {
  int64_t rows;
  const int32_t *labels; /* of -1 none counts */
  const real *loss, *nll;
  const int8_t *hit;
  int32_t *note;     /* what was noted; becomes 0 */
  rpi_losses *own;   /* of these rows */
  rpi_losses *total; /* they are added to it; or NULL */
} rpi_losses_args;

/* ---- the end of a step ------------------------------------------------------ */

/* How an update ended: what Adam goes by, and what the host is told later. */
typedef struct rpi_outcome {
  rpi_losses losses;               /* of all batches */
  double norm;                     /* of the mean gradient, before clipping */
  double rate;                     /* 0 where nothing moves */
  double scale;                    /* of the gradient: 1 / tokens, and what clipping leaves */
  double correction1, correction2; /* 1 / (1 - beta^step) */
  int64_t step;                    /* updates made, with this one */
  int32_t moves;                   /* weights do: all is finite, and labels were counted */
  int32_t sound;                   /* is the norm? */
  int32_t bad_gradient;            /* where not: 1 + the last parameter whose own is not, or 0 */
  int32_t unused;
} rpi_outcome;

/* What a step adds up, in memory of the table. All zeros is where a training begins. */
typedef struct rpi_ledger {
  rpi_losses own, total; /* of the last batch, and since the last update */
  double squares;        /* of the gradient of the sum of the losses */
  rpi_outcome outcome;   /* of the last update; step counts on */
  int32_t note, unused;
} rpi_ledger;

/* The verdict on total and squares: is there an update, of which rate? It fills the outcome, and
 * total begins anew. ops/verdict.h has the rules. */
typedef struct rpi_decide_args {
  rpi_ledger *ledger;
  rpi_schedule schedule;
  double clip_norm, beta1, beta2;
} rpi_decide_args;

/* Finds the parameter for outcome.bad_gradient, where one has to be found. */
typedef struct rpi_blame_args {
  rpi_outcome *outcome;
  const real *gradients;
  const int64_t *places; /* [count][2], on the host: where a parameter begins, and its numbers */
  int64_t count;
  double *workspace; /* as square_sum's, for the largest */
} rpi_blame_args;

/* to[r] + shift becomes row r of x, for decoding: what was computed goes where it is kept. */
typedef struct rpi_scatter_args {
  int64_t rows, columns;
  const real *x;
  int64_t x_stride;
  real *const *to; /* [rows] */
  int64_t shift;
} rpi_scatter_args;

/* sum[columns] += sum over rows of x[rows, columns], rows x_stride apart. */
typedef struct rpi_column_sums_args {
  int64_t rows, columns;
  const real *x;
  int64_t x_stride;
  real *sum;
} rpi_column_sums_args;

/* One step of Adam over `count` numbers, with g = scale * gradient and scale, rate and step those
 * of the outcome, where that moves:
 *
 *   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
 *   w = w - rate * ( m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon) + decay * w )
 *   average = average + (1 - ema) * (w - average)                          where it is not NULL
 *
 * The gradient becomes 0 in any case. */
typedef struct rpi_adam_args {
  int64_t count;
  real *weights, *gradient, *moment1, *moment2, *average;
  const rpi_outcome *outcome;
  double beta1, beta2, epsilon, decay, ema;
} rpi_adam_args;

#define RPI_SQUARE_BLOCK 65536
static inline int64_t rpi_square_blocks(int64_t count) {
  return rpi_divide_up(count, RPI_SQUARE_BLOCK);
}

typedef struct rp_ops {
  const char *name;
  bool host; /* its memory is the host's: whoever allocates may read and write it */

  /* Memory of `bytes`, aligned to RPI_ALIGN, of no particular content; RP_ERROR_MEMORY without a
   * sentence of its own where there is none. release takes NULL. */
  rp_status (*allocate)(int64_t bytes, void **memory);
  void (*release)(void *memory);
  rp_status (*write)(void *to, const void *from, int64_t bytes); /* from the host */
  rp_status (*read)(void *to, const void *from, int64_t bytes);  /* to the host */
  rp_status (*copy)(void *to, const void *from, int64_t bytes);  /* within; no overlap */

  /* To the host without waiting: post begins it, collect waits for the last that was posted in this
   * letter and for nothing behind it. *letter is NULL at first; a letter has one size. discard
   * takes NULL. */
  rp_status (*post)(void **letter, const void *from, int64_t bytes);
  rp_status (*collect)(void *letter, void *to, int64_t bytes);
  bool (*arrived)(void *letter); /* collect would not wait */
  void (*discard)(void *letter);

  rp_status (*round_weights)(const rpi_rounding *list, int64_t count);
  rp_status (*gemm)(const rpi_gemm_args *args);
  rp_status (*linear_backward)(const rpi_linear_backward_args *args);
  rp_status (*attention_workspace)(const rp_attention *shape, int workers, int64_t *forward_bytes,
                                   int64_t *backward_bytes);
  rp_status (*attention_forward)(const rpi_attention_args *args);
  rp_status (*attention_backward)(const rpi_attention_backward_args *args);
  /* bytes given: only says what workspace it needs */
  rp_status (*attention_map)(const rpi_attention_map_args *args, int64_t *bytes);
  rp_status (*rotate)(const rp_rotation *rotation, rp_rows x, rp_rows_out out);
  rp_status (*attend_rows)(const rpi_attend_rows_args *args);
  rp_status (*choose)(const rpi_choose_args *args);
  rp_status (*mix)(const rpi_mix_args *args);
  rp_status (*scatter)(const rpi_scatter_args *args);

  rp_status (*embed)(const rpi_embed_args *args);
  rp_status (*embed_backward)(const rpi_embed_backward_args *args);
  rp_status (*norm)(const rpi_norm_args *args);
  rp_status (*norm_backward)(const rpi_norm_backward_args *args, int64_t *bytes); /* as above */
  rp_status (*activation)(const rpi_activation_args *args);
  rp_status (*activation_backward)(const rpi_activation_backward_args *args);
  rp_status (*cross_entropy)(const rpi_cross_entropy_args *args);
  rp_status (*losses)(const rpi_losses_args *args);
  rp_status (*column_sums)(const rpi_column_sums_args *args); /* of other entries, and of tests */
  /* *sum, in memory of the table = the squares of x[count], added up in double, NaN where one of
   * them is not finite; workspace: [rpi_square_blocks(count)] doubles */
  rp_status (*square_sum)(const real *x, int64_t count, double *workspace, double *sum);
  rp_status (*decide)(const rpi_decide_args *args);
  rp_status (*blame)(const rpi_blame_args *args);
  rp_status (*adam)(const rpi_adam_args *args);
  rp_status (*zero)(real *x, int64_t count);
} rp_ops;

#endif
