/* SPDX-License-Identifier: Apache-2.0
 *
 * model.h: a Transformer in memory, and what computes it.
 *
 * A stack is a row of sublayers, each adding to a stream [rows][C]; a norm stands before each of
 * them and one after the last:
 *
 *   norm before:   n = norm_s(u_s)         u_{s+1} = u_s + keep(f_s(n))     out = norm(u_K)
 *   norm after:    n = norm_{s-1}(u_s)     u_{s+1} = n + keep(f_s(n))       out = norm_{K-1}(u_K)
 *
 * (norm after: u_0 has no norm, n = u_0). So the two differ in which norm reads a stream, and in
 * what f_s is added to. The streams u_s are stored; n is computed again in backward from u_s and
 * its stored mean and deviation.
 *
 * Five blocks of memory, all but workspace carved by one function over counting and then real
 * arenas. The first is the host's, the others are the device's, which the host must not touch:
 *
 *   fixed        layout | buckets and frequencies of the positions | ordinals
 *   numbers      weights | gradients | moments | average | sinusoids and the like; the weights of
 *                a model that was opened lie in its file, mapped, or in a block of their own
 *   step         streams and what sublayers store | scratch | losses | ledger
 *   workspace    of attention: grows where a batch needs more than was planned
 *   rounded      in bf16: weights as products have them, on a device made by the first in a call,
 *                on a host by a search; where there is no memory, each product rounds its own
 */
#ifndef RPI_MODEL_H
#define RPI_MODEL_H

#include <stdatomic.h>

#include "base/file.h"
#include "base/memory.h"
#include "base/threads.h"
#include "model/params.h"
#include "model/positions.h"
#include "model/profile.h"
#include "ops/ops.h"

/* What a sublayer stores for backward. */
typedef struct rpi_stored {
  real *stream;  /* u_s [rows][C] */
  real *stats;   /* of the norm that reads it [rows][2] */
  real *qkv;     /* self: [rows][H D + 2 K D], K: heads of keys; cross: the queries [rows][H D]
                    (rpi_heads_element) */
  real *kv;      /* cross: [encoder's rows][2 K D] */
  real *z, *lse; /* attention's results [rows][H D], [H][rows]; z NULL: it is kept_in */
  real *hidden;  /* feed-forward before the activation [rows][F or 2 F]; RELU: after it; NULL: in
                    kept_in, in place */
  void *kept_n;  /* n as its product had it (rpi_linear), which is then not made again; or NULL; of
                    a stack's last: out as its decoder's layers have it, or the output projection */
  void *kept_in; /* so what makes f: z, or the activation; there where kept_n is */
} rpi_stored;

typedef struct rpi_stack_memory {
  int parts;          /* sublayers a layer */
  rpi_stored *stored; /* [layers * parts], and one more: the last stream and its norm */
  real *out;          /* after the last norm [rows][C] */
  real *dstream;      /* the gradient of out, then of the streams; NULL without training */
  rpi_positions positions;
} rpi_stack_memory;

typedef struct rpi_scratch {
  real *normed;     /* n [rows][C] */
  real *df;         /* of what a sublayer adds [rows][C], in bf16 where products are */
  real *dn;         /* norm before: of n [rows][C]; df itself where that is f32 */
  real *dz;         /* [rows][H D], as z; decoding's z where a device rounds */
  real *dqkv;       /* [rows][H D + 2 K D]; cross: dq, then dkv; as qkv; decoding's qkv, as z */
  real *act;        /* after the activation [rows][F]; RELU, or where it is kept_in: not there */
  real *dact;       /* its gradient; RELU: dhidden itself; both in bf16 where products are */
  real *dhidden;    /* [rows][F or 2 F] */
  real *logits;     /* [loss_rows][classes] */
  real *loss, *nll; /* [rows] */
  int8_t *hit;
  double *squares; /* partial sums of the norm */
  void *norm;      /* workspace of the norm's backward */
  int64_t norm_bytes;
  uint32_t *ordinals; /* [sentences], on the host */
} rpi_scratch;

/* The results of steps that nobody has asked for yet: a ring. A caller that never asks loses the
 * oldest. */
#define RPI_OUTCOMES 8
#define RPI_LETTERS (RPI_OUTCOMES + 1) /* and that of a step whose caller waits for it */
typedef struct rpi_outcomes {
  void *letter[RPI_LETTERS]; /* the outcome of step n is in letter n % RPI_LETTERS */
  int64_t attempt[RPI_LETTERS];
  int64_t first, next; /* results `first` to before `next` may be asked for */
} rpi_outcomes;

#define RPI_DEVICE 16 /* bytes of a device's name */
#define RPI_MOST_STEPS ((int64_t)1 << 40)

struct rp_model {
  rp_config config;
  rp_limits limits;          /* device points to the next */
  char device[RPI_DEVICE];   /* "cpu", "cuda:0", ... */
  const rp_ops *ops;         /* of the device; memory is its, but for `fixed` */
  rp_placement placement[2]; /* what its attention says of it, by what its arrays hold */
  rpi_float_state caller;    /* while a call is at work */
  int cancel;                /* the caller's too: whether it may be cancelled */
  atomic_flag busy;
  rpi_layout layout;
  real *weights, *gradients, *moment1, *moment2, *average; /* layout.numbers each, or NULL */
  rpi_stack_memory stack[RPI_STACKS];
  rpi_scratch scratch;
  int64_t loss_rows, classes;
  bool bare;           /* its weights lie elsewhere: in the mapping, or in own_weights */
  rpi_mapping mapping; /* of the file that they lie in */
  real *own_weights;
  rpi_rounding *rounded; /* of the parameters; to NULL: of none such */
  bool is_rounded;       /* all of them, of weights that have not changed since */
  void *fixed, *numbers, *step_memory, *workspace, *rounded_memory;
  int64_t fixed_bytes, numbers_bytes, workspace_bytes, rounded_bytes;
  int64_t step, attempt;      /* step: see rpi_model_settle */
  bool behind;                /* the device may have made more updates than `step` says */
  int64_t batches, sentences; /* accumulated since the last update */
  rpi_ledger *ledger;         /* what is accumulated, and the last outcome; on the device */
  int64_t *places;            /* of the parameters, for ops->blame */
  rpi_outcomes outcomes;
  rpi_profile profile;
};

/* One side of a batch. */
typedef struct rpi_side {
  int64_t rows;
  const int32_t *ids;
  const int64_t *offsets;
  rp_graphs graphs;
} rpi_side;

/* Targets that grow a token at a time (decode/cache.h): where keys and values of self-attention are
 * kept, and, in a step of one token a row, those that it meets. */
typedef struct rpi_kept {
  real *const *to;                 /* [rows]: where a row's key and value [2 K D] go in layer 0 */
  int64_t shift;                   /* from a layer to the next */
  bool step;                       /* every row is one token; else only `to`, the shifts and
                                      cross_kv count */
  const int64_t *places;           /* [rows] of the token in its target */
  const rp_attention *shapes;      /* [layers], with the tables of their positions */
  const real *const *const *self;  /* [rows][counts]: the keys of layer 0, the own one last */
  const int64_t *self_counts;      /* [rows] */
  const real *const *const *cross; /* the same, of the source */
  const int64_t *cross_counts;
  int64_t cross_shift;
  const real *cross_kv; /* of a pass: of the source's rows, in layer 0 */
  real *const *mean; /* [rows][cross_counts]: attention to the source in the last layer, or NULL */
} rpi_kept;

/* Numbers in a row of queries; of keys, and of values; of all three side by side. */
static inline int64_t rpi_head_columns(const rp_model *m) {
  return m->config.heads * rpi_head_width(&m->config);
}
static inline int64_t rpi_key_columns(const rp_model *m) {
  return rpi_key_heads(&m->config) * rpi_head_width(&m->config);
}
static inline int64_t rpi_qkv_columns(const rp_model *m) {
  return rpi_head_columns(m) + 2 * rpi_key_columns(m);
}

/* Numbers from what is kept of a token, its keys and values, to what is kept of the next: a line
 * more. Widths are mostly powers of two, and at such distances a head's keys would lie in few sets
 * of a cache, and drive each other out. */
static inline int64_t rpi_kept_stride(const rp_model *m) {
  return 2 * rpi_key_columns(m) + RPI_ALIGN / (int64_t)sizeof(real);
}

/* One pass over one batch, checked. */
typedef struct rpi_run {
  rp_model *model;
  int64_t sentences;
  int workers;               /* threads of attention */
  rpi_side side[RPI_STACKS]; /* of a stack that is not there: no rows */
  const int32_t *labels;     /* NULL: no loss is wanted */
  const uint32_t *ordinals;
  uint32_t key[2];
  bool dropout;         /* numbers are dropped */
  bool backward;        /* gradients are wanted */
  bool shape_only;      /* tables are named, not made */
  const rpi_kept *kept; /* NULL but in decoding */
  int64_t *hunt;        /* where the first number that is not finite shall be told; or NULL */
  rpi_base base;        /* stream s + 1, which comes next, is still to become this and what sublayer
                           s adds, which lies there; none: it is whole */
  rpi_dropout added;    /* of what is added */
  bool again;           /* what was computed before: backward's share of the profile */
  int stack;            /* where it is, for the profile and dropout's sites */
  int64_t layer;
} rpi_run;

/* Which part sublayer s is, in layers of so many. */
static inline int rpi_part_of(int parts, int64_t s) {
  const int at = (int)(s % parts);
  if (at == parts - 1) return RPI_FEED_FORWARD;
  return at == 0 ? RPI_SELF : RPI_CROSS;
}

/* Does a device round to bf16 what its products are given? */
static inline bool rpi_rounds_operands(const rp_model *m) {
  return !m->ops->host && m->limits.precision == RP_BF16;
}

/* What arrays hold that only products read, or what works on them number by number before these. */
static inline int rpi_operand_element(const rp_model *m) {
  return rpi_rounds_operands(m) ? RP_BF16 : RP_F32;
}

/* What queries, keys and values hold, attention's result and their gradients: what products alone
 * read, unless the scheme turns or moves them in f32 first. */
static inline int rpi_heads_element(const rp_model *m, int stack, int part) {
  const int position = rpi_stack_of(&m->config, stack)->position;
  const bool moved = position == RP_POSITION_ROPE || position == RP_POSITION_TRANSFORMER_XL;
  return part == RPI_SELF && moved ? RP_F32 : rpi_operand_element(m);
}

/* Has a stack attention to the encoder's? */
static inline bool rpi_has_cross(const rp_model *m, int stack) {
  return m->stack[stack].parts == RPI_PARTS;
}

/* ---- plan.c ---------------------------------------------------------------- */

/* What a model takes, without making it. */
rp_status rpi_model_memory(const rp_config *config, const rp_limits *limits, rp_memory *memory);
rp_status rpi_model_create(const rp_config *config, const rp_limits *limits, rp_model **model);
/* One without weights, which the caller puts into m->weights: from m->mapping, or by the second. */
rp_status rpi_model_create_bare(const rp_config *config, const rp_limits *limits, rp_model **model);
rp_status rpi_model_own_weights(rp_model *m);
void rpi_model_free(rp_model *model);

/* From here on weights may be others: none is rounded yet. */
static inline void rpi_model_weights_changed(rp_model *m) { m->is_rounded = false; }

/* The average of the weights serves for them, or, a second time, no longer. */
static inline void rpi_model_swap_average(rp_model *m) {
  real *const weights = m->weights;
  m->weights = m->average;
  m->average = weights;
}

/* Makes attention's workspace as large as this batch needs it. */
rp_status rpi_model_reserve(rpi_run *run);

/* ---- attention.c ----------------------------------------------------------- */

/* The shape of one attention call, and the terms of its layer. */
rp_status rpi_attention_of(const rpi_run *run, int64_t layer, int part, rp_attention *a);

/* The attention of sublayer s, whose queries and keys are stored. */
rp_status rpi_stored_heads(const rpi_run *run, int64_t s, rp_attention *a, rp_rows *q, rp_rows *k);

/* Keys and values that a decoder's layer makes of the source's rows, rpi_kept_stride apart. */
rp_status rpi_cross_keys(rpi_run *run, int64_t layer, real *kv);

/* ---- layers.c: one sublayer, forward and backward -------------------------- */

/* Everything of sublayer s from its stream to what it adds to the next, which it is added to when
 * that is read; without `last` it stops before what only the next stream needs. */
rp_status rpi_sublayer_forward(rpi_run *run, int64_t s, bool last);
/* From the gradient of stream s + 1 to that of stream s, both in dstream. */
rp_status rpi_sublayer_backward(rpi_run *run, int64_t s);

/* n of stream s: the stored stream itself where it has no norm, else in `to`. Backward, to the
 * gradient of the stream, in `to`, and of what sublayer s - 1 added to it. */
rp_status rpi_read_stream(rpi_run *run, int64_t s, real *to, const real **n);
rp_status rpi_read_stream_backward(rpi_run *run, int64_t s, const real *dn, const real *dstream,
                                   real *to);

/* ---- transformer.c --------------------------------------------------------- */

/* Forward, loss where labels are given, and backward where it is wanted. What was lost is in the
 * ledger: `own`, and where it is accumulated `total`. */
rp_status rpi_transformer(rpi_run *run);

/* Forward of one stack: from its embeddings to the first stream; then its sublayers; then what the
 * last norm gives, in m->stack[stack].out. */
rp_status rpi_stack_enter(rpi_run *run, int stack);
rp_status rpi_stack_leave(rpi_run *run);
rp_status rpi_stack_forward(rpi_run *run, int stack);

/* The output projection of some rows of x: [rows][classes]. */
rp_status rpi_output_logits(rpi_run *run, const real *x, int64_t rows, real *logits);

/* What the output projection reads: [rows][C] of the last stack. */
static inline int rpi_last_stack(const rp_model *model) {
  return model->config.decoder.layers != 0 ? RPI_DECODER : RPI_ENCODER;
}

/* ---- outcomes.c: what the device has to tell --------------------------------- */

/* Makes the letters of a model that trains. */
rp_status rpi_outcomes_make(rp_model *m);

/* Posts the outcome in the ledger as the result of an update. */
rp_status rpi_outcomes_add(rp_model *m);

/* Nobody waits for the newest: the oldest is lost where there are too many. */
void rpi_outcomes_keep(rp_model *m);

/* The result of the oldest update that can be asked for, or of the newest: waits for it, and it can
 * be asked for no more. There is one. */
rp_status rpi_outcomes_take(rp_model *m, bool newest, rp_result *result);

/* How many results can be asked for, and how many of them, from the oldest on, without waiting. */
void rpi_outcomes_count(const rp_model *m, int64_t *begun, int64_t *done);

/* What the last pass lost; waits for it. */
rp_status rpi_outcomes_of_pass(rp_model *m, rp_result *result);

/* From here on m->step is true: waits for all updates. */
rp_status rpi_model_settle(rp_model *m);

/* Sets both counters, on the device too. */
rp_status rpi_model_count_from(rp_model *m, int64_t step, int64_t attempt);

/* ---- finite.c: where the first number that is not finite arose ---------------
 *
 * A place is a stream, or what the norm that reads it gives. Its code is the higher the earlier a
 * pass comes by, so that of several the highest is kept. On a device the entries that make streams
 * and norms note codes as they go; on the host a pass whose loss is not finite is run again, with a
 * look at every place (the hunt). */

#define RPI_BAD_NAME 64 /* bytes of a name */

/* For the norm that reads stream s. */
rpi_note rpi_note_of(const rpi_run *run, int64_t s);

/* Is stream s, or what its norm gave, finite? Only in a hunt. */
rp_status rpi_hunt(const rpi_run *run, const real *x, int64_t s, bool norm);

/* The code of a pass whose loss is not finite. */
rp_status rpi_find_bad(const rpi_run *run, int64_t *code);

/* The name for a code of rpi_losses.bad, "" of 0. */
void rpi_bad_name(const rp_model *m, int64_t code, char *name);

/* ---- dropout --------------------------------------------------------------- */

/* Where dropout's masks of one place begin: 4096 heads fit between two of them. */
enum rpi_site {
  RPI_SITE_EMBEDDING,
  RPI_SITE_SELF,
  RPI_SITE_SELF_ADDED,
  RPI_SITE_CROSS,
  RPI_SITE_CROSS_ADDED,
  RPI_SITE_ACTIVATION,
  RPI_SITE_FEED_FORWARD_ADDED
};

static inline uint32_t rpi_site_of(int stack, int64_t layer, enum rpi_site kind) {
  return ((uint32_t)stack << 15 | (uint32_t)layer << 3 | (uint32_t)kind) << 12;
}

#endif
