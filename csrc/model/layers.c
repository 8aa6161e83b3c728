/* SPDX-License-Identifier: Apache-2.0
 *
 * layers.c: the sublayers of a Transformer, each forward with its backward beneath it, as lists of
 * operations. u, n, f and the two orders of norms: model.h.
 */
#include <math.h>
#include <string.h>

#include "model/linear.h"
#include "model/model.h"

/* Bytes of so many numbers, for the profile. */
static double bytes_of(int64_t numbers) { return (double)numbers * (double)sizeof(real); }

/* ---- what is called everywhere --------------------------------------------- */

static int64_t head_columns(const rp_model *m) {
  return m->config.heads * rpi_head_width(&m->config);
}

static const real *weight(const rp_model *m, int64_t at) {
  return at == RPI_ABSENT ? NULL : m->weights + at;
}
static real *gradient(const rp_model *m, int64_t at) {
  return at == RPI_ABSENT ? NULL : m->gradients + at;
}

static const rpi_layer_params *layer_params(const rpi_run *run, int64_t layer) {
  return &run->model->layout.stack[run->stack].layers[layer];
}

static rpi_dropout dropout_at(const rpi_run *run, double rate, enum rpi_site kind) {
  return (rpi_dropout){.rate = run->dropout ? rate : 0,
                       .key = {run->key[0], run->key[1]},
                       .site = rpi_site_of(run->stack, run->layer, kind),
                       .sentences = run->sentences,
                       .offsets = run->side[run->stack].offsets,
                       .ordinals = run->ordinals};
}

/* One product, and its line in the profile. */
static rp_status gemm(const rpi_run *run, const char *name, bool backward, rpi_gemm_args g) {
  rp_model *const m = run->model;
  g.precision = m->placement.precision;
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->gemm(&g));
  const double operations = 2 * (double)g.rows * (double)g.columns * (double)g.inner;
  const int64_t c = g.rows * g.columns * (g.accumulate ? 2 : 1);
  rpi_profile_add(&m->profile, run->stack, run->layer, name, backward, began, operations,
                  bytes_of(g.rows * g.inner + g.inner * g.columns + c));
  return RP_OK;
}

/* A linear layer, y = x . Wᵀ + b, by where its parameters lie. */
typedef struct linear {
  const char *name;
  int64_t rows, in, out;
  int64_t weight, bias;
  const real *x;
  int64_t x_stride;
} linear;

static rpi_linear products_of(const rpi_run *run, const linear *l) {
  return (rpi_linear){.rows = l->rows,
                      .in = l->in,
                      .out = l->out,
                      .x = l->x,
                      .x_stride = l->x_stride,
                      .weight = weight(run->model, l->weight),
                      .bias = weight(run->model, l->bias)};
}

static rp_status linear_forward(const rpi_run *run, const linear *l, real *y, int64_t y_stride) {
  const rpi_linear products = products_of(run, l);
  const rpi_gemm_args g = rpi_linear_forward(&products, y, y_stride);
  return gemm(run, l->name, run->again, g);
}

/* dW += dyᵀ . x, db += sums of dy, and dx = dy . W (added to what is there where `add`). */
static rp_status linear_backward(const rpi_run *run, const linear *l, const real *dy,
                                 int64_t dy_stride, real *dx, bool add) {
  rp_model *const m = run->model;
  const rpi_linear products = products_of(run, l);
  const rpi_gemm_args to_weight =
      rpi_linear_to_weight(&products, dy, dy_stride, gradient(m, l->weight));
  RPI_TRY(gemm(run, l->name, true, to_weight));
  if (l->bias != RPI_ABSENT) {
    const rpi_column_sums_args sums = {.rows = l->rows,
                                       .columns = l->out,
                                       .x = dy,
                                       .x_stride = dy_stride,
                                       .sum = gradient(m, l->bias)};
    const double began = rpi_profile_now(&m->profile);
    RPI_TRY(m->ops->column_sums(&sums));
    rpi_profile_add(&m->profile, run->stack, run->layer, "biases", true, began,
                    (double)(l->rows * l->out), bytes_of(l->rows * l->out));
  }
  const rpi_gemm_args to_x = rpi_linear_to_input(&products, dy, dy_stride, dx, add);
  return gemm(run, l->name, true, to_x);
}

/* ---- norms between streams and sublayers ----------------------------------- */

/* The norm that reads stream s, or NULL. */
static const rpi_norm_params *norm_of(const rpi_run *run, int64_t s) {
  const rp_model *const m = run->model;
  const rpi_stack_params *const stack = &m->layout.stack[run->stack];
  const int parts = m->stack[run->stack].parts;
  const int64_t sublayers = rpi_stack_of(&m->config, run->stack)->layers * parts;
  if (m->config.norm == RP_NORM_PRE && s == sublayers) return &stack->norm;
  if (m->config.norm == RP_NORM_POST && s-- == 0) return NULL;
  return &stack->layers[s / parts].norm[rpi_part_of(parts, s)];
}

rp_status rpi_read_stream(rpi_run *run, int64_t s, real *to, const real **n) {
  rp_model *const m = run->model;
  const rpi_norm_params *const norm = norm_of(run, s);
  const rpi_stored *const stored = &m->stack[run->stack].stored[s];
  *n = norm ? to : stored->stream;
  if (!norm) return RP_OK;
  const int64_t rows = run->side[run->stack].rows, C = m->config.width;
  const rpi_norm_args args = {.rows = rows,
                              .columns = C,
                              .x = stored->stream,
                              .gain = weight(m, norm->gain),
                              .shift = weight(m, norm->shift),
                              .epsilon = m->config.norm_epsilon,
                              .y = to,
                              .stats = stored->stats,
                              .note = rpi_note_of(run, s)};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->norm(&args));
  rpi_profile_add(&m->profile, run->stack, run->layer, "norm", run->again, began,
                  8 * (double)(rows * C), bytes_of(2 * rows * C));
  return rpi_hunt(run, to, s, true);
}

rp_status rpi_read_stream_backward(rpi_run *run, int64_t s, const real *dn, const real *dstream,
                                   real *to) {
  rp_model *const m = run->model;
  const rpi_norm_params *const norm = norm_of(run, s);
  const rpi_stored *const stored = &m->stack[run->stack].stored[s];
  const int64_t rows = run->side[run->stack].rows, C = m->config.width;
  const rpi_norm_backward_args args = {.rows = rows,
                                       .columns = C,
                                       .x = stored->stream,
                                       .gain = weight(m, norm->gain),
                                       .stats = stored->stats,
                                       .dy = dn,
                                       .dstream = dstream,
                                       .dx = to,
                                       .dgain = gradient(m, norm->gain),
                                       .dshift = gradient(m, norm->shift),
                                       .workspace = m->scratch.norm,
                                       .workspace_bytes = m->scratch.norm_bytes};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->norm_backward(&args, NULL));
  rpi_profile_add(&m->profile, run->stack, run->layer, "norm", true, began, 12 * (double)(rows * C),
                  bytes_of(4 * rows * C));
  return RP_OK;
}

/* u_{s+1} = base + keep(f), f being where u_{s+1} shall be. */
static rp_status add_to_stream(rpi_run *run, enum rpi_site site, const real *base, real *next) {
  rp_model *const m = run->model;
  const int64_t rows = run->side[run->stack].rows, C = m->config.width;
  const rpi_residual_args args = {.rows = rows,
                                  .columns = C,
                                  .x = base,
                                  .f = next,
                                  .dropout = dropout_at(run, m->config.dropout, site),
                                  .out = next};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->residual(&args));
  rpi_profile_add(&m->profile, run->stack, run->layer, "add", run->again, began,
                  2 * (double)(rows * C), bytes_of(3 * rows * C));
  return RP_OK;
}

/* df of what was added; *df is the stream's gradient itself where nothing was dropped. */
static rp_status add_to_stream_backward(rpi_run *run, enum rpi_site site, const real **df) {
  rp_model *const m = run->model;
  const int64_t rows = run->side[run->stack].rows, C = m->config.width;
  const rpi_residual_backward_args args = {.rows = rows,
                                           .columns = C,
                                           .dout = m->stack[run->stack].dstream,
                                           .dropout = dropout_at(run, m->config.dropout, site),
                                           .df = m->scratch.df};
  *df = args.dout;
  if (args.dropout.rate == 0) return RP_OK;
  *df = m->scratch.df;
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->residual_backward(&args));
  rpi_profile_add(&m->profile, run->stack, run->layer, "add", true, began, (double)(rows * C),
                  bytes_of(2 * rows * C));
  return RP_OK;
}

/* ---- attention ------------------------------------------------------------- */

/* The line of what the scheme of a stack makes of its parameters, where it makes something. */
static void profile_positions(const rpi_run *run, int64_t layer, const rp_attention *a, bool back,
                              double began) {
  rp_model *const m = run->model;
  const rpi_positions_cost cost =
      rpi_positions_cost_of(m->ops, &m->stack[run->stack].positions, a, back);
  if (cost.operations == 0) return;
  rpi_profile_add(&m->profile, run->stack, layer, "attention.positions", back || run->again, began,
                  cost.operations, cost.bytes);
}

rp_status rpi_attention_of(const rpi_run *run, int64_t layer, int part, rp_attention *a) {
  rp_model *const m = run->model;
  const rp_config *const config = &m->config;
  const bool self = part == RPI_SELF;
  *a = rp_attention_default();
  a->B = run->sentences;
  a->H = config->heads;
  a->D = a->Dv = rpi_head_width(config);
  a->offsets = run->side[run->stack].offsets;
  a->key_offsets = self ? NULL : run->side[RPI_ENCODER].offsets;
  a->causal = self && run->stack == RPI_DECODER;
  a->dropout = run->dropout ? config->attention_dropout : 0;
  a->dropout_key[0] = run->key[0];
  a->dropout_key[1] = run->key[1];
  a->dropout_site = rpi_site_of(run->stack, layer, self ? RPI_SITE_SELF : RPI_SITE_CROSS);
  a->dropout_ordinals = run->ordinals;
  a->placement = &m->placement;
  if (!self) return RP_OK;
  const rpi_layer_place weights = {
      .at = layer_params(run, layer),
      .relative_embedding = m->layout.stack[run->stack].relative_embedding,
      .numbers = run->shape_only ? NULL : m->weights};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(rpi_positions_forward(m->ops, &m->stack[run->stack].positions, &weights,
                                &run->side[run->stack].graphs, a));
  if (!run->shape_only) profile_positions(run, layer, a, false, began);
  return RP_OK;
}

/* Queries, keys and values of a sublayer, where they are stored. */
typedef struct heads {
  rp_rows q, k, v;
} heads;

static heads heads_of(const rpi_run *run, const rpi_stored *stored, int part) {
  const int64_t D = rpi_head_width(&run->model->config), HD = head_columns(run->model);
  if (part == RPI_SELF) {
    return (heads){.q = {stored->qkv, 0, D, 3 * HD},
                   .k = {stored->qkv + HD, 0, D, 3 * HD},
                   .v = {stored->qkv + 2 * HD, 0, D, 3 * HD}};
  }
  const rpi_kept *const kept = run->kept;
  const bool made = kept && kept->cross_kv; /* once for all that follows */
  const real *const kv = made ? kept->cross_kv + run->layer * kept->cross_shift : stored->kv;
  const int64_t stride = made ? rpi_kept_stride(run->model) : 2 * HD;
  return (heads){
      .q = {stored->qkv, 0, D, HD}, .k = {kv, 0, D, stride}, .v = {kv + HD, 0, D, stride}};
}

rp_status rpi_stored_heads(const rpi_run *run, int64_t s, rp_attention *a, rp_rows *q, rp_rows *k) {
  const rpi_stack_memory *const stack = &run->model->stack[run->stack];
  const int part = rpi_part_of(stack->parts, s);
  const heads x = heads_of(run, &stack->stored[s], part);
  *q = x.q;
  *k = x.k;
  return rpi_attention_of(run, s / stack->parts, part, a);
}

/* Pairs of queries and keys that are met, for the profile. */
static double pairs_of(const rp_attention *a) {
  const int64_t *const keys = a->key_offsets ? a->key_offsets : a->offsets;
  double pairs = 0;
  for (int64_t b = 0; b < a->B; b++) {
    const double n = (double)(a->offsets[b + 1] - a->offsets[b]);
    pairs += n * (double)(keys[b + 1] - keys[b]) * (a->causal ? 0.5 : 1);
  }
  return pairs * (double)a->H * (double)a->D;
}

static rp_status attend(const rpi_run *run, const rpi_stored *stored, int part) {
  rp_model *const m = run->model;
  const int64_t rows = run->side[run->stack].rows, HD = head_columns(m);
  if (rows == 0) return RP_OK;
  rp_attention a;
  RPI_TRY(rpi_attention_of(run, run->layer, part, &a));
  const double began = rpi_profile_now(&m->profile);
  const heads x = heads_of(run, stored, part);
  const rpi_attention_args args = {.shape = &a,
                                   .q = x.q,
                                   .k = x.k,
                                   .v = x.v,
                                   .out = {stored->z, 0, a.D, HD},
                                   .lse = stored->lse,
                                   .workers = run->workers,
                                   .workspace = m->workspace,
                                   .workspace_bytes = m->workspace_bytes};
  RPI_TRY(m->ops->attention_forward(&args));
  rpi_profile_add(&m->profile, run->stack, run->layer, part == RPI_SELF ? "attention" : "cross",
                  run->again, began, 4 * pairs_of(&a), bytes_of(4 * rows * HD));
  return RP_OK;
}

/* The keys and values of a pass, kept for the steps to come. */
static rp_status keep_keys(const rpi_run *run, const rpi_stored *stored) {
  const rpi_kept *const kept = run->kept;
  const int64_t HD = head_columns(run->model), shift = run->layer * kept->shift;
  const rpi_scatter_args args = {.rows = run->side[run->stack].rows,
                                 .columns = 2 * HD,
                                 .x = stored->qkv + HD,
                                 .x_stride = 3 * HD,
                                 .to = kept->to,
                                 .shift = shift};
  return run->model->ops->scatter(&args);
}

/* One query a row, with what was kept. */
static rp_status attend_step(const rpi_run *run, const rpi_stored *stored, int part) {
  rp_model *const m = run->model;
  const rpi_kept *const kept = run->kept;
  const int64_t HD = head_columns(m), layer = run->layer;
  const bool self = part == RPI_SELF;
  const bool last = layer == m->config.decoder.layers - 1;
  rp_attention cross = rp_attention_default();
  cross.H = m->config.heads;
  cross.D = cross.Dv = rpi_head_width(&m->config);
  const rpi_attend_rows_args args = {.shape = self ? &kept->shapes[layer] : &cross,
                                     .rows = run->side[run->stack].rows,
                                     .q = stored->qkv,
                                     .q_stride = self ? 3 * HD : HD,
                                     .keys = self ? kept->self : kept->cross,
                                     .counts = self ? kept->self_counts : kept->cross_counts,
                                     .shift = layer * (self ? kept->shift : kept->cross_shift),
                                     .to_value = HD,
                                     .out = stored->z,
                                     .out_stride = HD,
                                     .mean = !self && last ? kept->mean : NULL};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->attend_rows(&args));
  double pairs = 0;
  for (int64_t r = 0; r < args.rows; r++) pairs += (double)args.counts[r];
  rpi_profile_add(&m->profile, run->stack, layer, self ? "attention" : "cross", false, began,
                  4 * pairs * (double)HD, bytes_of(2 * HD) * pairs);
  return RP_OK;
}

/* dq, dk and dv in scratch, laid out as q, k and v; gradients of the positions' parameters. */
static rp_status attend_backward(const rpi_run *run, const rpi_stored *stored, int part,
                                 real *dkv) {
  rp_model *const m = run->model;
  const int64_t rows = run->side[run->stack].rows, HD = head_columns(m);
  if (run->sentences == 0) return RP_OK;
  rp_attention a;
  RPI_TRY(rpi_attention_of(run, run->layer, part, &a));
  double began = rpi_profile_now(&m->profile);
  const heads x = heads_of(run, stored, part);
  real *const dq = m->scratch.dqkv;
  rp_attention_gradients g = {
      .q = {dq, 0, a.D, x.q.row_stride},
      .k = {part == RPI_SELF ? dq + HD : dkv, 0, a.D, x.k.row_stride},
      .v = {part == RPI_SELF ? dq + 2 * HD : dkv + HD, 0, a.D, x.v.row_stride}};
  const rpi_layer_params *const at = layer_params(run, run->layer);
  const int64_t embedding = m->layout.stack[run->stack].relative_embedding;
  const rpi_layer_place weights = {at, embedding, m->weights};
  const rpi_layer_place gradients = {at, embedding, m->gradients};
  const rpi_positions *const positions = &m->stack[run->stack].positions;
  if (part == RPI_SELF) {
    RPI_TRY(rpi_positions_gradients(m->ops, positions, &weights, &gradients, &a, &g));
  }
  const rpi_attention_backward_args args = {.shape = &a,
                                            .q = x.q,
                                            .k = x.k,
                                            .v = x.v,
                                            .out = {stored->z, 0, a.D, HD},
                                            .dout = {m->scratch.dz, 0, a.D, HD},
                                            .lse = stored->lse,
                                            .workers = run->workers,
                                            .workspace = m->workspace,
                                            .workspace_bytes = m->workspace_bytes,
                                            .gradients = &g};
  RPI_TRY(m->ops->attention_backward(&args));
  rpi_profile_add(&m->profile, run->stack, run->layer, part == RPI_SELF ? "attention" : "cross",
                  true, began, 10 * pairs_of(&a), bytes_of(8 * rows * HD));
  if (part != RPI_SELF) return RP_OK;
  began = rpi_profile_now(&m->profile);
  RPI_TRY(rpi_positions_backward(m->ops, positions, &weights, &gradients, &a));
  profile_positions(run, run->layer, &a, true, began);
  return RP_OK;
}

static linear qkv_of(const rpi_run *run, const real *n) {
  const rpi_self_params *const at = &layer_params(run, run->layer)->self;
  const int64_t C = run->model->config.width;
  return (linear){.name = "attention.qkv",
                  .rows = run->side[run->stack].rows,
                  .in = C,
                  .out = 3 * head_columns(run->model),
                  .weight = at->qkv,
                  .bias = at->qkv_bias,
                  .x = n,
                  .x_stride = C};
}

static linear cross_q_of(const rpi_run *run, const real *n) {
  const rpi_cross_params *const at = &layer_params(run, run->layer)->cross;
  const int64_t C = run->model->config.width;
  return (linear){.name = "cross.q",
                  .rows = run->side[run->stack].rows,
                  .in = C,
                  .out = head_columns(run->model),
                  .weight = at->q,
                  .bias = at->q_bias,
                  .x = n,
                  .x_stride = C};
}

static linear cross_kv_of(const rpi_run *run) {
  const rpi_cross_params *const at = &layer_params(run, run->layer)->cross;
  const rp_model *const m = run->model;
  return (linear){.name = "cross.kv",
                  .rows = run->side[RPI_ENCODER].rows,
                  .in = m->config.width,
                  .out = 2 * head_columns(m),
                  .weight = at->kv,
                  .bias = at->kv_bias,
                  .x = m->stack[RPI_ENCODER].out,
                  .x_stride = m->config.width};
}

static linear attention_out_of(const rpi_run *run, const rpi_stored *stored, int part) {
  const rpi_layer_params *const at = layer_params(run, run->layer);
  const int64_t HD = head_columns(run->model);
  const bool self = part == RPI_SELF;
  return (linear){.name = self ? "attention.out" : "cross.out",
                  .rows = run->side[run->stack].rows,
                  .in = HD,
                  .out = run->model->config.width,
                  .weight = self ? at->self.out : at->cross.out,
                  .bias = self ? at->self.out_bias : at->cross.out_bias,
                  .x = stored->z,
                  .x_stride = HD};
}

rp_status rpi_cross_keys(rpi_run *run, int64_t layer, real *kv) {
  run->stack = RPI_DECODER;
  run->layer = layer;
  const linear l = cross_kv_of(run);
  return linear_forward(run, &l, kv, rpi_kept_stride(run->model));
}

/* The queries, keys and values of n, and what attention makes of them, up to z. */
static rp_status attention_forward(rpi_run *run, const rpi_stored *stored, int part,
                                   const real *n) {
  rp_model *const m = run->model;
  const int64_t HD = head_columns(m);
  const bool step = run->kept && run->kept->step;
  if (part == RPI_SELF) {
    const linear qkv = qkv_of(run, n);
    RPI_TRY(linear_forward(run, &qkv, stored->qkv, 3 * HD));
    RPI_TRY(rpi_positions_rotate(m->ops, &m->stack[run->stack].positions, run->sentences,
                                 run->side[run->stack].offsets, step ? run->kept->places : NULL,
                                 stored->qkv, false));
    if (run->kept) RPI_TRY(keep_keys(run, stored));
  } else {
    const linear q = cross_q_of(run, n), kv = cross_kv_of(run);
    RPI_TRY(linear_forward(run, &q, stored->qkv, HD));
    if (!run->kept) RPI_TRY(linear_forward(run, &kv, stored->kv, 2 * HD));
  }
  return step ? attend_step(run, stored, part) : attend(run, stored, part);
}

/* From df to the gradient of n, in `dn` (added to what is there where `add`). */
static rp_status attention_backward(rpi_run *run, const rpi_stored *stored, int part, const real *n,
                                    const real *df, real *dn, bool add) {
  rp_model *const m = run->model;
  const int64_t C = m->config.width, HD = head_columns(m), rows = run->side[run->stack].rows;
  const linear out = attention_out_of(run, stored, part);
  RPI_TRY(linear_backward(run, &out, df, C, m->scratch.dz, false));
  real *const dq = m->scratch.dqkv, *const dkv = dq + rows * HD;
  RPI_TRY(attend_backward(run, stored, part, dkv));
  if (part == RPI_SELF) {
    RPI_TRY(rpi_positions_rotate(m->ops, &m->stack[run->stack].positions, run->sentences,
                                 run->side[run->stack].offsets, NULL, dq, true));
    const linear qkv = qkv_of(run, n);
    return linear_backward(run, &qkv, dq, 3 * HD, dn, add);
  }
  const linear q = cross_q_of(run, n), kv = cross_kv_of(run);
  RPI_TRY(linear_backward(run, &kv, dkv, 2 * HD, m->stack[RPI_ENCODER].dstream, true));
  return linear_backward(run, &q, dq, HD, dn, add);
}

/* ---- feed-forward ---------------------------------------------------------- */

static linear hidden_of(const rpi_run *run, const real *n) {
  const rpi_feed_forward_params *const at = &layer_params(run, run->layer)->feed_forward;
  const rp_config *const config = &run->model->config;
  return (linear){.name = "feed_forward.in",
                  .rows = run->side[run->stack].rows,
                  .in = config->width,
                  .out = rpi_hidden(config),
                  .weight = at->in,
                  .bias = at->in_bias,
                  .x = n,
                  .x_stride = config->width};
}

static linear feed_forward_out_of(const rpi_run *run, const real *act) {
  const rpi_feed_forward_params *const at = &layer_params(run, run->layer)->feed_forward;
  const rp_config *const config = &run->model->config;
  return (linear){.name = "feed_forward.out",
                  .rows = run->side[run->stack].rows,
                  .in = config->feed_forward,
                  .out = config->width,
                  .weight = at->out,
                  .bias = at->out_bias,
                  .x = act,
                  .x_stride = config->feed_forward};
}

/* RELU works in place: its result says all that backward asks. The others keep h. */
static real *act_of(const rp_model *m, const rpi_stored *stored) {
  return m->config.activation == RP_RELU ? stored->hidden : m->scratch.act;
}

static rp_status activate(rpi_run *run, const rpi_stored *stored) {
  rp_model *const m = run->model;
  const int64_t rows = run->side[run->stack].rows, F = m->config.feed_forward;
  const rpi_activation_args args = {
      .rows = rows,
      .columns = F,
      .kind = m->config.activation,
      .h = stored->hidden,
      .dropout = dropout_at(run, m->config.activation_dropout, RPI_SITE_ACTIVATION),
      .a = act_of(m, stored)};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->activation(&args));
  rpi_profile_add(&m->profile, run->stack, run->layer, "activation", run->again, began,
                  (double)(rows * F), bytes_of(2 * rows * F));
  return RP_OK;
}

static rp_status feed_forward_backward(rpi_run *run, const rpi_stored *stored, const real *n,
                                       const real *df, real *dn, bool add) {
  rp_model *const m = run->model;
  const rp_config *const config = &m->config;
  const int64_t rows = run->side[run->stack].rows, F = config->feed_forward;
  if (config->activation != RP_RELU) RPI_TRY(activate(run, stored)); /* act again */
  const linear out = feed_forward_out_of(run, act_of(m, stored));
  RPI_TRY(linear_backward(run, &out, df, config->width, m->scratch.dact, false));
  const rpi_activation_backward_args args = {
      .rows = rows,
      .columns = F,
      .kind = config->activation,
      .h = stored->hidden,
      .a = act_of(m, stored),
      .da = m->scratch.dact,
      .dropout = dropout_at(run, config->activation_dropout, RPI_SITE_ACTIVATION),
      .dh = m->scratch.dhidden};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->activation_backward(&args));
  rpi_profile_add(&m->profile, run->stack, run->layer, "activation", true, began,
                  (double)(rows * F), bytes_of(3 * rows * F));
  const linear hidden = hidden_of(run, n);
  return linear_backward(run, &hidden, m->scratch.dhidden, hidden.out, dn, add);
}

/* ---- a sublayer ------------------------------------------------------------ */

static const enum rpi_site ADDED[] = {RPI_SITE_SELF_ADDED, RPI_SITE_CROSS_ADDED,
                                      RPI_SITE_FEED_FORWARD_ADDED};

rp_status rpi_sublayer_forward(rpi_run *run, int64_t s, bool last) {
  rp_model *const m = run->model;
  const rpi_stack_memory *const stack = &m->stack[run->stack];
  const rpi_stored *const stored = &stack->stored[s];
  const int part = rpi_part_of(stack->parts, s);
  const real *n;
  run->layer = s / stack->parts;
  RPI_TRY(rpi_read_stream(run, s, m->scratch.normed, &n));
  linear out;
  if (part == RPI_FEED_FORWARD) {
    const linear hidden = hidden_of(run, n);
    RPI_TRY(linear_forward(run, &hidden, stored->hidden, hidden.out));
    RPI_TRY(activate(run, stored));
    out = feed_forward_out_of(run, act_of(m, stored));
  } else {
    RPI_TRY(attention_forward(run, stored, part, n));
    out = attention_out_of(run, stored, part);
  }
  if (!last) return RP_OK;
  real *const next = stack->stored[s + 1].stream;
  RPI_TRY(linear_forward(run, &out, next, m->config.width));
  const real *const base = m->config.norm == RP_NORM_PRE ? stored->stream : n;
  RPI_TRY(add_to_stream(run, ADDED[part], base, next));
  return rpi_hunt(run, next, s + 1, false);
}

/* Norm before: du_s = du_{s+1} + norm'(dn). Norm after: n takes both, du_s = norm'(du_{s+1} + dn),
 * so that dn is added to the stream's gradient where that lies. */
rp_status rpi_sublayer_backward(rpi_run *run, int64_t s) {
  rp_model *const m = run->model;
  const rpi_stack_memory *const stack = &m->stack[run->stack];
  const rpi_stored *const stored = &stack->stored[s];
  const int part = rpi_part_of(stack->parts, s);
  const bool before = m->config.norm == RP_NORM_PRE;
  real *const dn = before ? m->scratch.df : stack->dstream;
  const real *n, *df;
  run->layer = s / stack->parts;
  RPI_TRY(rpi_read_stream(run, s, m->scratch.normed, &n));
  RPI_TRY(add_to_stream_backward(run, ADDED[part], &df));
  if (part == RPI_FEED_FORWARD) {
    RPI_TRY(feed_forward_backward(run, stored, n, df, dn, !before));
  } else {
    RPI_TRY(attention_backward(run, stored, part, n, df, dn, !before));
  }
  if (before) return rpi_read_stream_backward(run, s, dn, stack->dstream, stack->dstream);
  if (s == 0) return RP_OK; /* the embeddings have no norm */
  return rpi_read_stream_backward(run, s, dn, NULL, stack->dstream);
}
