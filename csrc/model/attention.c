/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.c: the attention of a layer to its own stack or to the encoder's, with the products
 * around it, forward and then backward; and the step of one token a row, which meets what was kept.
 */
#include "model/sublayer.h"

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

/* Decoding keeps keys in f32, and computes in it. */
static int element_of(const rpi_run *run, int part) {
  return run->kept ? RP_F32 : rpi_heads_element(run->model, run->stack, part);
}

rp_status rpi_attention_of(const rpi_run *run, int64_t layer, int part, rp_attention *a) {
  rp_model *const m = run->model;
  const rp_config *const config = &m->config;
  const bool self = part == RPI_SELF;
  *a = rp_attention_default();
  a->B = run->sentences;
  a->H = config->heads;
  a->key_heads = rpi_key_heads(config);
  a->D = a->Dv = rpi_head_width(config);
  a->offsets = run->side[run->stack].offsets;
  a->key_offsets = self ? NULL : run->side[RPI_ENCODER].offsets;
  a->causal = self && rpi_is_causal(run->stack);
  a->dropout = run->dropout ? config->attention_dropout : 0;
  a->dropout_key[0] = run->key[0];
  a->dropout_key[1] = run->key[1];
  a->dropout_site = rpi_site_of(run->stack, layer, self ? RPI_SITE_SELF : RPI_SITE_CROSS);
  a->dropout_ordinals = run->ordinals;
  a->placement = &m->placement[element_of(run, part)];
  if (!self) return RP_OK;
  const rpi_layer_place weights = {
      .at = rpi_layer_params_of(run, layer),
      .relative_embedding = m->layout.stack[run->stack].relative_embedding,
      .numbers = run->shape_only ? NULL : m->weights};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(rpi_positions_forward(m->ops, &m->stack[run->stack].positions, &weights,
                                &run->side[run->stack].graphs, a));
  if (!run->shape_only) profile_positions(run, layer, a, false, began);
  return RP_OK;
}

/* Where the queries of a sublayer lie, and of self-attention its keys and values. */
static real *qkv_at(const rpi_run *run, const rpi_stored *stored) {
  const rp_model *const m = run->model;
  return run->kept && rpi_rounds_operands(m) ? m->scratch.dqkv : stored->qkv;
}

/* Attention's result, unless that is an operand already. */
static real *z_at(const rpi_run *run, const rpi_stored *stored) {
  const rp_model *const m = run->model;
  return run->kept && rpi_rounds_operands(m) ? m->scratch.dz : stored->z;
}

static real *ahead(real *x, int element, int64_t count) {
  return (real *)((char *)x + count * rpi_element_bytes(element));
}

/* Queries, keys and values of a sublayer. */
typedef struct heads {
  rp_rows q, k, v;
} heads;

static heads heads_of(const rpi_run *run, const rpi_stored *stored, int part) {
  const rp_model *const m = run->model;
  const int64_t D = rpi_head_width(&m->config), HD = rpi_head_columns(m), KD = rpi_key_columns(m);
  const int element = element_of(run, part);
  const bool self = part == RPI_SELF;
  real *const q = qkv_at(run, stored);
  const rpi_kept *const kept = run->kept;
  if (!self && kept && kept->cross_kv) { /* made once for all that follows */
    const real *const kv = kept->cross_kv + run->layer * kept->cross_shift;
    const int64_t stride = rpi_kept_stride(m);
    return (heads){.q = {q, 0, D, HD}, .k = {kv, 0, D, stride}, .v = {kv + KD, 0, D, stride}};
  }
  real *const k = self ? ahead(q, element, HD) : stored->kv;
  const int64_t stride = self ? rpi_qkv_columns(m) : 2 * KD;
  return (heads){.q = {q, 0, D, self ? stride : HD},
                 .k = {k, 0, D, stride},
                 .v = {ahead(k, element, KD), 0, D, stride}};
}

/* What attention makes of them: where it is an operand, as its product has that. */
static rp_rows_out z_of(const rpi_run *run, const rpi_stored *stored, int part) {
  const rp_config *const config = &run->model->config;
  const int64_t D = rpi_head_width(config), HD = config->heads * D;
  if (element_of(run, part) == RP_F32) return (rp_rows_out){z_at(run, stored), 0, D, HD};
  return (rp_rows_out){stored->kept_in, 0, D, rpi_operand_stride(HD, config->bias != 0)};
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
  const int64_t rows = run->side[run->stack].rows;
  const int64_t columns = rpi_head_columns(m) + rpi_key_columns(m);
  if (rows == 0) return RP_OK;
  rp_attention a;
  RPI_TRY(rpi_attention_of(run, run->layer, part, &a));
  const double began = rpi_profile_now(&m->profile);
  const heads x = heads_of(run, stored, part);
  const rpi_attention_args args = {.shape = &a,
                                   .q = x.q,
                                   .k = x.k,
                                   .v = x.v,
                                   .out = z_of(run, stored, part),
                                   .ones = element_of(run, part) == RP_BF16 && m->config.bias,
                                   .lse = stored->lse,
                                   .workers = run->workers,
                                   .workspace = m->workspace,
                                   .workspace_bytes = m->workspace_bytes};
  RPI_TRY(m->ops->attention_forward(&args));
  rpi_note_cost(run, part == RPI_SELF ? "attention" : "cross", run->again, began, 4 * pairs_of(&a),
                2 * rows * columns);
  return RP_OK;
}

/* The keys and values of a pass, kept for the steps to come. */
static rp_status keep_keys(const rpi_run *run, const rpi_stored *stored) {
  const rpi_kept *const kept = run->kept;
  const rp_model *const m = run->model;
  const int64_t shift = run->layer * kept->shift;
  const rpi_scatter_args args = {.rows = run->side[run->stack].rows,
                                 .columns = 2 * rpi_key_columns(m),
                                 .x = qkv_at(run, stored) + rpi_head_columns(m),
                                 .x_stride = rpi_qkv_columns(m),
                                 .to = kept->to,
                                 .shift = shift};
  return m->ops->scatter(&args);
}

/* One query a row, with what was kept. */
static rp_status attend_step(const rpi_run *run, const rpi_stored *stored, int part) {
  rp_model *const m = run->model;
  const rpi_kept *const kept = run->kept;
  const int64_t HD = rpi_head_columns(m), layer = run->layer;
  const bool self = part == RPI_SELF;
  const bool last = layer == m->config.decoder.layers - 1;
  rp_attention cross = rp_attention_default();
  cross.H = m->config.heads;
  cross.key_heads = rpi_key_heads(&m->config);
  cross.D = cross.Dv = rpi_head_width(&m->config);
  const rpi_attend_rows_args args = {.shape = self ? &kept->shapes[layer] : &cross,
                                     .rows = run->side[run->stack].rows,
                                     .q = qkv_at(run, stored),
                                     .q_stride = self ? rpi_qkv_columns(m) : HD,
                                     .keys = self ? kept->self : kept->cross,
                                     .counts = self ? kept->self_counts : kept->cross_counts,
                                     .shift = layer * (self ? kept->shift : kept->cross_shift),
                                     .to_value = rpi_key_columns(m),
                                     .out = z_at(run, stored),
                                     .out_stride = HD,
                                     .mean = !self && last ? kept->mean : NULL};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->attend_rows(&args));
  int64_t pairs = 0;
  for (int64_t r = 0; r < args.rows; r++) pairs += args.counts[r];
  rpi_note_cost(run, self ? "attention" : "cross", false, began, 4 * (double)(pairs * HD),
                2 * rpi_key_columns(m) * pairs);
  return RP_OK;
}

/* dq, dk and dv in scratch, laid out as q, k and v; gradients of the positions' parameters. */
static rp_status attend_backward(const rpi_run *run, const rpi_stored *stored, int part,
                                 real *dkv) {
  rp_model *const m = run->model;
  const int64_t rows = run->side[run->stack].rows, HD = rpi_head_columns(m);
  if (run->sentences == 0) return RP_OK;
  rp_attention a;
  RPI_TRY(rpi_attention_of(run, run->layer, part, &a));
  double began = rpi_profile_now(&m->profile);
  const heads x = heads_of(run, stored, part);
  const int element = element_of(run, part);
  real *const dq = m->scratch.dqkv, *const dk = part == RPI_SELF ? ahead(dq, element, HD) : dkv;
  rp_attention_gradients g = {
      .q = {dq, 0, a.D, x.q.row_stride},
      .k = {dk, 0, a.D, x.k.row_stride},
      .v = {ahead(dk, element, rpi_key_columns(m)), 0, a.D, x.v.row_stride}};
  const rp_rows_out z = z_of(run, stored, part);
  const rpi_layer_params *const at = rpi_layer_params_of(run, run->layer);
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
                                            .out = {z.data, 0, a.D, z.row_stride},
                                            .dout = {m->scratch.dz, 0, a.D, HD},
                                            .lse = stored->lse,
                                            .workers = run->workers,
                                            .workspace = m->workspace,
                                            .workspace_bytes = m->workspace_bytes,
                                            .gradients = &g};
  RPI_TRY(m->ops->attention_backward(&args));
  rpi_note_cost(run, part == RPI_SELF ? "attention" : "cross", true, began, 10 * pairs_of(&a),
                4 * rows * (HD + rpi_key_columns(m)));
  if (part != RPI_SELF) return RP_OK;
  began = rpi_profile_now(&m->profile);
  RPI_TRY(rpi_positions_backward(m->ops, positions, &weights, &gradients, &a));
  profile_positions(run, run->layer, &a, true, began);
  return RP_OK;
}

/* What reads a sublayer's normed rows n: queries, with keys and values where it is self-attention.
 */
static rpi_layer_linear reads_of(const rpi_run *run, const rpi_stored *stored, const real *n,
                                 int part) {
  const rpi_layer_params *const at = rpi_layer_params_of(run, run->layer);
  const int64_t C = run->model->config.width;
  const bool self = part == RPI_SELF;
  return (rpi_layer_linear){
      .name = self ? "attention.qkv" : "cross.q",
      .rows = run->side[run->stack].rows,
      .in = C,
      .out = self ? rpi_qkv_columns(run->model) : rpi_head_columns(run->model),
      .weight = self ? at->self.qkv : at->cross.q,
      .bias = self ? at->self.qkv_bias : at->cross.q_bias,
      .x = n,
      .x_stride = C,
      .kept = stored->kept_n,
      .given = rpi_is_given(stored, n),
      .y_element = element_of(run, part),
      .dy_element = element_of(run, part)};
}

static rpi_layer_linear cross_kv_of(const rpi_run *run) {
  const rpi_cross_params *const at = &rpi_layer_params_of(run, run->layer)->cross;
  const rp_model *const m = run->model;
  const rpi_stack_memory *const encoder = &m->stack[RPI_ENCODER];
  const int64_t sublayers = m->config.encoder.layers * encoder->parts;
  void *const kept = encoder->stored[sublayers].kept_n;
  return (rpi_layer_linear){.name = "cross.kv",
                            .rows = run->side[RPI_ENCODER].rows,
                            .in = m->config.width,
                            .out = 2 * rpi_key_columns(m),
                            .weight = at->kv,
                            .bias = at->kv_bias,
                            .x = encoder->out,
                            .x_stride = m->config.width,
                            .kept = kept,
                            .given = kept != NULL,
                            .y_element = element_of(run, RPI_CROSS),
                            .dy_element = element_of(run, RPI_CROSS)};
}

rpi_layer_linear rpi_attention_out_of(const rpi_run *run, const rpi_stored *stored, int part) {
  const rpi_layer_params *const at = rpi_layer_params_of(run, run->layer);
  const int64_t HD = rpi_head_columns(run->model);
  const bool self = part == RPI_SELF;
  return (rpi_layer_linear){.name = self ? "attention.out" : "cross.out",
                            .rows = run->side[run->stack].rows,
                            .in = HD,
                            .out = run->model->config.width,
                            .weight = self ? at->self.out : at->cross.out,
                            .bias = self ? at->self.out_bias : at->cross.out_bias,
                            .summed = true,
                            .x = z_at(run, stored),
                            .x_stride = HD,
                            .kept = stored->kept_in,
                            .given = element_of(run, part) == RP_BF16,
                            .dy_element = rpi_operand_element(run->model),
                            .dx_element = element_of(run, part)};
}

rp_status rpi_cross_keys(rpi_run *run, int64_t layer, real *kv) {
  run->stack = RPI_DECODER;
  run->layer = layer;
  rpi_layer_linear l = cross_kv_of(run);
  l.y_element = RP_F32; /* as decoding has them */
  return rpi_layer_linear_forward(run, &l, kv, rpi_kept_stride(run->model));
}

/* Queries and keys turned to where they stand, or back; nothing without RoPE. */
static rp_status rotate(const rpi_run *run, const int64_t *places, real *qkv, bool back) {
  rp_model *const m = run->model;
  const rpi_side *const side = &run->side[run->stack];
  const rpi_positions *const p = &m->stack[run->stack].positions;
  if (p->pairs == 0) return RP_OK;
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(rpi_positions_rotate(m->ops, p, run->sentences, side->offsets, places, qkv, back));
  const int64_t turned = m->config.heads + rpi_key_heads(&m->config);
  const int64_t numbers = side->rows * turned * 2 * p->pairs;
  rpi_note_cost(run, "attention.rotate", back || run->again, began, 3 * (double)numbers,
                2 * numbers);
  return RP_OK;
}

rp_status rpi_sublayer_attend(rpi_run *run, const rpi_stored *stored, int part, const real *n) {
  rp_model *const m = run->model;
  const int64_t HD = rpi_head_columns(m);
  const bool step = run->kept && run->kept->step;
  real *const to = qkv_at(run, stored);
  if (part == RPI_SELF) {
    const rpi_layer_linear qkv = reads_of(run, stored, n, RPI_SELF);
    RPI_TRY(rpi_layer_linear_forward(run, &qkv, to, rpi_qkv_columns(m)));
    RPI_TRY(rotate(run, step ? run->kept->places : NULL, to, false));
    if (run->kept) RPI_TRY(keep_keys(run, stored));
  } else {
    const rpi_layer_linear q = reads_of(run, stored, n, RPI_CROSS), kv = cross_kv_of(run);
    RPI_TRY(rpi_layer_linear_forward(run, &q, to, HD));
    if (!run->kept) RPI_TRY(rpi_layer_linear_forward(run, &kv, stored->kv, 2 * rpi_key_columns(m)));
  }
  return step ? attend_step(run, stored, part) : attend(run, stored, part);
}

rp_status rpi_sublayer_attend_backward(rpi_run *run, const rpi_stored *stored, int part,
                                       const real *n, const real *df, real *dn, bool add) {
  rp_model *const m = run->model;
  const int64_t C = m->config.width, HD = rpi_head_columns(m), rows = run->side[run->stack].rows;
  const rpi_layer_linear out = rpi_attention_out_of(run, stored, part);
  RPI_TRY(rpi_layer_linear_backward(run, &out, df, C, m->scratch.dz, false));
  real *const dq = m->scratch.dqkv, *const dkv = ahead(dq, element_of(run, part), rows * HD);
  RPI_TRY(attend_backward(run, stored, part, dkv));
  if (part == RPI_SELF) {
    RPI_TRY(rotate(run, NULL, dq, true));
    const rpi_layer_linear qkv = reads_of(run, stored, n, RPI_SELF);
    return rpi_layer_linear_backward(run, &qkv, dq, rpi_qkv_columns(m), dn, add);
  }
  const rpi_layer_linear q = reads_of(run, stored, n, RPI_CROSS), kv = cross_kv_of(run);
  const bool adds = run->layer < m->config.decoder.layers - 1; /* the last comes first */
  const int64_t columns = 2 * rpi_key_columns(m);
  RPI_TRY(rpi_layer_linear_backward(run, &kv, dkv, columns, m->stack[RPI_ENCODER].dstream, adds));
  return rpi_layer_linear_backward(run, &q, dq, HD, dn, add);
}
