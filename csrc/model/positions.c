/* SPDX-License-Identifier: Apache-2.0
 *
 * positions.c: which tables each position scheme of a stack has, and what it makes of its
 * parameters. What is made once is in position_constants.c.
 *
 * Distances are d = j - i, key minus query; row r of a band is d = r - left. Tables whose
 * literature counts i - j keep their own order, and a list of buckets turns it.
 */
#include "model/positions.h"

#include <math.h>

#include "ops/linear.h"
#include "model/waves.h"

rpi_scheme rpi_scheme_of(const rp_config *config, int number) {
  const rp_stack *const stack = rpi_stack_of(config, number);
  const int64_t reach = config->max_length - 1, ahead = rpi_is_causal(number) ? 0 : reach;
  rpi_scheme has = {
      .left = reach,
      .right = ahead,
      .per_layer = stack->per_layer != 0,
      .per_head = stack->per_head != 0,
      .value_per_layer = rpi_values_own(stack->value_per_layer, stack->per_layer != 0),
      .value_per_head = rpi_values_own(stack->value_per_head, stack->per_head != 0)};
  switch (stack->position) {
    case RP_POSITION_SHAW:
      has.left = stack->k;
      has.right = stack->k_right >= 0 ? stack->k_right : stack->k;
      has.rows = has.left + 1 + has.right;
      break;
    case RP_POSITION_TRANSFORMER_XL:
      if (stack->clamp != 0 && stack->clamp < reach) {
        has.left = stack->clamp;
        has.right = rpi_is_causal(number) ? 0 : stack->clamp;
      }
      has.waves = true;
      has.rows = has.left + 1 + has.right;
      break;
    case RP_POSITION_MUSIC: has.rows = has.left + 1 + has.right; break;
    case RP_POSITION_T5:
      has.bias = true;
      has.rows = stack->buckets;
      has.left = rpi_min(stack->max_distance, reach);
      has.right = rpi_is_causal(number) ? 0 : has.left;
      break;
    case RP_POSITION_DEBERTA:
      has.embedding = true;
      has.rows = 2 * (stack->buckets != 0 ? stack->buckets : config->max_length);
      break;
    case RP_POSITION_RELATIVE_KEY:
    case RP_POSITION_RELATIVE_KEY_QUERY:
      has.distance = true;
      has.rows = 2 * reach + 1;
      break;
    case RP_POSITION_ALIBI_LEARNED:
    case RP_POSITION_ALIBI:
      has.slopes = stack->position == RP_POSITION_ALIBI_LEARNED;
      has.rows = has.left + 1 + has.right;
      break;
    default: break;
  }
  if (stack->position == RP_POSITION_SHAW || stack->position == RP_POSITION_MUSIC) {
    has.key = stack->key || (stack->tied && stack->value);
    has.value = stack->value && !stack->tied;
  }
  if (stack->relations != 0) {
    has.relation_key = stack->relation_key || (stack->tied && stack->relation_value);
    has.relation_value = stack->relation_value && !stack->tied;
  }
  return has;
}

void rpi_positions_carve(const rp_config *config, int number, bool training, rpi_arena *small,
                         rpi_arena *constants, rpi_arena *scratch, rpi_positions *p) {
  const rp_stack *const stack = rpi_stack_of(config, number);
  *p = (rpi_positions){.config = config, .stack = number};
  if (stack->layers == 0) return;
  p->has = rpi_scheme_of(config, number);
  const int64_t C = config->width, H = config->heads, D = rpi_head_width(config);
  const int64_t T = p->has.rows, span = p->has.left + 1 + p->has.right;
  const int64_t bytes = sizeof(real);
  if (p->has.bias || p->has.embedding || p->has.distance) {
    p->buckets = rpi_arena_take(small, span, sizeof *p->buckets);
  }
  if (p->has.waves) p->waves = rpi_arena_take(constants, T * C, bytes);
  if (p->has.slopes) p->distances = rpi_arena_take(constants, T, bytes);
  if (stack->position == RP_POSITION_ALIBI) p->fixed = rpi_arena_take(constants, H * T, bytes);
  if (stack->position == RP_POSITION_ROPE) {
    p->pairs = (stack->rope_width != 0 ? stack->rope_width : D) / 2;
    p->frequencies = rpi_arena_take(small, p->pairs, sizeof *p->frequencies);
  }
  if (stack->absolute == RP_ABSOLUTE_SINUSOIDAL) {
    p->absolute = rpi_arena_take(constants, config->max_length * C, bytes);
  }
  if (p->has.waves || p->has.embedding) p->key = rpi_arena_take(scratch, T * H * D, bytes);
  if (p->has.embedding) p->query = rpi_arena_take(scratch, T * H * D, bytes);
  if (p->has.slopes) p->bias = rpi_arena_take(scratch, H * T, bytes);
  if (p->has.waves && p->has.right > 0) {
    p->some = rpi_arena_take(scratch, rpi_waves_scratch(H, D, p->has.left, p->has.right), bytes);
  }
  if (!training) return;
  if (p->has.waves || p->has.embedding) p->dkey = rpi_arena_take(scratch, T * H * D, bytes);
  if (p->has.embedding) p->dquery = rpi_arena_take(scratch, T * H * D, bytes);
  if (p->has.slopes) p->dbias = rpi_arena_take(scratch, H * T, bytes);
}

/* ---- the terms of a layer -------------------------------------------------- */

static real nowhere[1];

static real *place(const rpi_layer_place *in, int64_t at) {
  if (at == RPI_ABSENT) return NULL;
  return in->numbers ? in->numbers + at : nowhere;
}

/* made[rows][H D] = from[rows][C] . weightᵀ (+ bias) */
static rpi_linear projection(const rpi_positions *p, const real *from, int64_t rows,
                             const real *weight, const real *bias) {
  const int64_t C = p->config->width, HD = p->config->heads * rpi_head_width(p->config);
  return (rpi_linear){
      .rows = rows, .in = C, .out = HD, .x = from, .x_stride = C, .weight = weight, .bias = bias};
}

static rp_status project(const rp_ops *ops, const rpi_positions *p, const real *from, int64_t rows,
                         const real *weight, const real *bias, real *made) {
  const rpi_linear l = projection(p, from, rows, weight, bias);
  const rpi_gemm_args g = rpi_linear_forward(&l, made, l.out, RP_F32, RP_F32);
  return ops->gemm(&g);
}

/* The way back: dweight += dmadeᵀ . from, and dfrom += dmade . weight where it is wanted. */
static rp_status project_back(const rp_ops *ops, const rpi_positions *p, const real *from,
                              int64_t rows, const real *weight, const real *dmade, real *dweight,
                              real *dbias, real *dfrom) {
  const rpi_linear l = projection(p, from, rows, weight, NULL);
  const rpi_linear_backward_args args = {.forward = l,
                                         .dy = dmade,
                                         .dy_stride = l.out,
                                         .dweight = dweight,
                                         .dbias = dbias,
                                         .dx = dfrom,
                                         .add = true};
  return ops->linear_backward(&args);
}

/* A term over the distances that the scheme tells apart. */
static rp_relation band(const rpi_positions *p, const real *table, int64_t head_stride,
                        int64_t row_stride) {
  return (rp_relation){.table = table,
                       .head_stride = head_stride,
                       .row_stride = row_stride,
                       .rows = p->has.rows,
                       .left = p->has.left,
                       .right = p->has.right,
                       .buckets = p->buckets};
}

/* A table that is a parameter, [T, D] or [H, T, D]. */
static rp_relation plain_band(const rpi_positions *p, const real *table, bool per_head) {
  const int64_t D = rpi_head_width(p->config);
  return band(p, table, per_head ? p->has.rows * D : 0, D);
}

static void set_shaw(const rpi_positions *p, const rp_stack *stack, const real *key,
                     const real *value, rp_attention *a) {
  const int beyond = stack->position == RP_POSITION_MUSIC ? RP_BEYOND_NONE : stack->beyond;
  if (stack->key) {
    a->key[0] = plain_band(p, key, p->has.per_head);
    a->key[0].beyond = beyond;
  }
  if (stack->value) {
    a->value[0] = plain_band(p, stack->tied ? key : value, p->has.value_per_head);
    a->value[0].beyond = beyond;
  }
}

/* Does the host project sinusoids of both sides? Elsewhere it is one product, of fewer kernels. */
static bool shares_waves(const rp_ops *ops, const rpi_positions *p, const rp_relation *term) {
  return ops->host && p->some && term->left == term->right;
}

/* The table of a term as waves.h has it, from its last row up: the model's sinusoids begin with the
 * farthest key before the query, and those from 0 on are of keys after it. */
static rpi_waves waves_of(const rpi_positions *p, const rp_relation *term) {
  const int64_t C = p->config->width;
  return (rpi_waves){.left = term->right,
                     .right = term->left,
                     .heads = p->config->heads,
                     .head_width = rpi_head_width(p->config),
                     .width = C,
                     .waves = p->waves + p->has.left * C,
                     .head_stride = term->head_stride,
                     .row_stride = -term->row_stride,
                     .some = p->some};
}

/* The sinusoids of the distances that this batch has, projected. */
static rp_status set_waves(const rp_ops *ops, const rpi_positions *p,
                           const rpi_layer_place *weights, rp_attention *a) {
  const rpi_table_params *const at = &weights->at->tables;
  const int64_t C = p->config->width, D = rpi_head_width(p->config), HD = p->config->heads * D;
  const int64_t reach = rpi_max(rpi_longest(a->offsets, a->B) - 1, 0);
  rp_relation term = band(p, weights->numbers ? p->key : nowhere, D, HD);
  term.left = rpi_min(term.left, reach);
  term.right = rpi_min(term.right, reach);
  term.rows = term.left + 1 + term.right;
  const real *const weight = place(weights, at->position);
  if (weights->numbers && shares_waves(ops, p, &term)) {
    const rpi_waves w = waves_of(p, &term);
    RPI_TRY(rpi_waves_forward(ops, &w, weight, p->key + (term.rows - 1) * HD));
  } else if (weights->numbers) {
    RPI_TRY(
        project(ops, p, p->waves + (p->has.left - term.left) * C, term.rows, weight, NULL, p->key));
  }
  a->key[0] = term;
  a->position_bias = place(weights, at->position_bias);
  a->position_bias_stride = D;
  /* the content bias is a relation of every key: one row, whatever the distance */
  a->query[0] = (rp_relation){
      .table = place(weights, at->content_bias), .head_stride = D, .row_stride = D, .rows = 1};
  return RP_OK;
}

static rp_status set_deberta(const rp_ops *ops, const rpi_positions *p, const rp_stack *stack,
                             const rpi_layer_place *weights, rp_attention *a) {
  const int64_t C = p->config->width, D = rpi_head_width(p->config), HD = p->config->heads * D;
  const bool make = weights->numbers != NULL;
  const real *const from = place(weights, weights->relative_embedding);
  a->scale = 1 / sqrt((double)D * (1 + (stack->key != 0) + (stack->value != 0)));
  if (stack->key) a->key[0] = band(p, make ? p->key : nowhere, D, HD);
  if (stack->value) a->query[0] = band(p, make ? p->query : nowhere, D, HD);
  if (!make) return RP_OK;
  const real *const qkv = place(weights, weights->at->self.qkv);
  const real *const bias = place(weights, weights->at->self.qkv_bias);
  if (stack->key) { /* content to position: by the projection of keys */
    RPI_TRY(project(ops, p, from, p->has.rows, qkv + HD * C, bias ? bias + HD : NULL, p->key));
  }
  if (!stack->value) return RP_OK; /* position to content: by that of queries */
  return project(ops, p, from, p->has.rows, qkv, bias, p->query);
}

static rp_status set_slopes(const rp_ops *ops, const rpi_positions *p,
                            const rpi_layer_place *weights, rp_attention *a) {
  const int64_t H = p->config->heads, T = p->has.rows;
  a->bias[0] = band(p, weights->numbers ? p->bias : nowhere, T, 1);
  if (!weights->numbers) return RP_OK;
  const rpi_gemm_args g = {.rows = H,
                           .columns = T,
                           .inner = 1,
                           .a = place(weights, weights->at->tables.slopes),
                           .a_stride = 1,
                           .b = p->distances,
                           .b_stride = T,
                           .c = p->bias,
                           .c_stride = T};
  return ops->gemm(&g);
}

/* Labels stand beside the scheme's own terms. */
static void set_relations(const rpi_positions *p, const rp_stack *stack,
                          const rpi_layer_place *weights, const rp_graphs *graphs,
                          rp_attention *a) {
  const rpi_table_params *const at = &weights->at->tables;
  const int64_t D = rpi_head_width(p->config);
  rp_relation term = {.map = RP_MAP_LABEL,
                      .rows = stack->relations,
                      .row_stride = D,
                      .labels = graphs->labels,
                      .label_bytes = graphs->label_bytes,
                      .label_starts = graphs->starts};
  if (stack->relation_key) {
    term.table = place(weights, at->relation_key);
    term.head_stride = p->has.per_head ? stack->relations * D : 0;
    a->key[a->key[0].table ? 1 : 0] = term;
  }
  if (stack->relation_value) {
    term.table = place(weights, stack->tied ? at->relation_key : at->relation_value);
    term.head_stride = p->has.value_per_head ? stack->relations * D : 0;
    a->value[a->value[0].table ? 1 : 0] = term;
  }
}

rp_status rpi_positions_forward(const rp_ops *ops, const rpi_positions *p,
                                const rpi_layer_place *weights, const rp_graphs *graphs,
                                rp_attention *a) {
  const rp_stack *const stack = rpi_stack_of(p->config, p->stack);
  const rpi_table_params *const at = &weights->at->tables;
  const int64_t T = p->has.rows;
  a->softcap = stack->softcap;
  a->window_left = a->window_right = stack->window;
  switch (stack->position) {
    case RP_POSITION_SHAW:
    case RP_POSITION_MUSIC:
      set_shaw(p, stack, place(weights, at->key), place(weights, at->value), a);
      break;
    case RP_POSITION_TRANSFORMER_XL: RPI_TRY(set_waves(ops, p, weights, a)); break;
    case RP_POSITION_T5:
      a->bias[0] = band(p, place(weights, at->bias), T, 1);
      a->scale = 1;
      break;
    case RP_POSITION_DEBERTA: RPI_TRY(set_deberta(ops, p, stack, weights, a)); break;
    case RP_POSITION_RELATIVE_KEY:
    case RP_POSITION_RELATIVE_KEY_QUERY:
      a->key[0] = plain_band(p, place(weights, at->distance), p->has.per_head);
      if (stack->position == RP_POSITION_RELATIVE_KEY_QUERY) a->query[0] = a->key[0];
      break;
    case RP_POSITION_ALIBI:
      a->bias[0] = band(p, weights->numbers ? p->fixed : nowhere, T, 1);
      break;
    case RP_POSITION_ALIBI_LEARNED: RPI_TRY(set_slopes(ops, p, weights, a)); break;
    default: break;
  }
  if (stack->relations != 0) set_relations(p, stack, weights, graphs, a);
  return RP_OK;
}

rpi_positions_cost rpi_positions_cost_of(const rp_ops *ops, const rpi_positions *p,
                                         const rp_attention *a, bool back) {
  const rp_stack *const stack = rpi_stack_of(p->config, p->stack);
  const double H = (double)p->config->heads, T = (double)p->has.rows, C = (double)p->config->width;
  const double HD = H * (double)rpi_head_width(p->config), number = sizeof(real);
  double products = 1, rows = T, inner = C, columns = HD;
  if (p->has.waves) {
    const bool shares = shares_waves(ops, p, &a->key[0]);
    rows = (double)(shares ? a->key[0].left + 1 : a->key[0].rows);
  } else if (p->has.embedding) {
    products = ((stack->key != 0) + (stack->value != 0)) * (back ? 2 : 1);
  } else if (p->has.slopes) {
    rows = H;
    inner = 1;
    columns = T;
  } else {
    products = 0;
  }
  return (rpi_positions_cost){
      .operations = products * 2 * rows * inner * columns,
      .bytes = products * number * (rows * inner + inner * columns + rows * columns)};
}

/* ---- and back -------------------------------------------------------------- */

/* The gradient of a table that is a parameter is where the table is, in the buffer of gradients;
 * that of a made table in `dmade`, NULL for one that is fixed. */
static real *twin(const rpi_layer_place *weights, const rpi_layer_place *gradients,
                  const real *table, const real *made, real *dmade) {
  if (!table) return NULL;
  return table == made ? dmade : gradients->numbers + (table - weights->numbers);
}

rp_status rpi_positions_gradients(const rp_ops *ops, const rpi_positions *p,
                                  const rpi_layer_place *weights, const rpi_layer_place *gradients,
                                  const rp_attention *a, rp_attention_gradients *g) {
  const int64_t H = p->config->heads, HD = H * rpi_head_width(p->config);
  const real *const made_bias = p->fixed ? p->fixed : p->bias;
  for (int t = 0; t < RP_TERMS; t++) {
    g->key[t] = twin(weights, gradients, a->key[t].table, p->key, p->dkey);
    g->query[t] = twin(weights, gradients, a->query[t].table, p->query, p->dquery);
    g->bias[t] = twin(weights, gradients, a->bias[t].table, made_bias, p->dbias);
    g->value[t] = twin(weights, gradients, a->value[t].table, NULL, NULL);
  }
  g->position_bias = twin(weights, gradients, a->position_bias, NULL, NULL);
  if (g->key[0] && g->key[0] == p->dkey) RPI_TRY(ops->zero(p->dkey, a->key[0].rows * HD));
  if (g->query[0] && g->query[0] == p->dquery) {
    RPI_TRY(ops->zero(p->dquery, a->query[0].rows * HD));
  }
  return p->dbias ? ops->zero(p->dbias, H * p->has.rows) : RP_OK;
}

rp_status rpi_positions_backward(const rp_ops *ops, const rpi_positions *p,
                                 const rpi_layer_place *weights, const rpi_layer_place *gradients,
                                 const rp_attention *a) {
  const rp_stack *const stack = rpi_stack_of(p->config, p->stack);
  const rpi_table_params *const at = &weights->at->tables;
  const int64_t C = p->config->width, H = p->config->heads, T = p->has.rows;
  const int64_t HD = H * rpi_head_width(p->config);
  if (p->has.waves && shares_waves(ops, p, &a->key[0])) {
    const rpi_waves w = waves_of(p, &a->key[0]);
    return rpi_waves_backward(ops, &w, p->dkey + (a->key[0].rows - 1) * HD,
                              place(gradients, at->position));
  }
  if (p->has.waves) {
    const real *const from = p->waves + (p->has.left - a->key[0].left) * C;
    return project_back(ops, p, from, a->key[0].rows, NULL, p->dkey, place(gradients, at->position),
                        NULL, NULL);
  }
  if (p->has.slopes) {
    const rpi_gemm_args g = {.rows = H,
                             .columns = 1,
                             .inner = T,
                             .a = p->dbias,
                             .a_stride = T,
                             .b = p->distances,
                             .b_stride = 1,
                             .c = place(gradients, at->slopes),
                             .c_stride = 1,
                             .accumulate = true};
    return ops->gemm(&g);
  }
  if (!p->has.embedding) return RP_OK;
  const real *const qkv = place(weights, weights->at->self.qkv);
  const real *const from = weights->numbers + weights->relative_embedding;
  real *const dqkv = place(gradients, weights->at->self.qkv);
  real *const dbias = place(gradients, weights->at->self.qkv_bias);
  real *const dfrom = gradients->numbers + weights->relative_embedding;
  if (stack->key) {
    RPI_TRY(project_back(ops, p, from, T, qkv + HD * C, p->dkey, dqkv + HD * C,
                         dbias ? dbias + HD : NULL, dfrom));
  }
  if (stack->value) {
    RPI_TRY(project_back(ops, p, from, T, qkv, p->dquery, dqkv, dbias, dfrom));
  }
  return RP_OK;
}

rp_status rpi_positions_rotate(const rp_ops *ops, const rpi_positions *p, int64_t sentences,
                               const int64_t *offsets, const int64_t *starts, real *qkv,
                               bool back) {
  if (p->pairs == 0) return RP_OK;
  const int64_t H = p->config->heads, K = rpi_key_heads(p->config), D = rpi_head_width(p->config);
  const int64_t row = (H + 2 * K) * D;
  rp_rotation r = rp_rotation_default();
  r.B = sentences;
  r.D = D;
  r.offsets = offsets;
  r.start = starts;
  r.frequencies = p->frequencies;
  r.pairs = p->pairs;
  r.interleaved = rpi_stack_of(p->config, p->stack)->rope_interleaved;
  r.inverse = back;
  for (int part = 0; part < 2; part++) { /* queries, then keys */
    real *const x = qkv + part * H * D;
    r.H = part == 0 ? H : K;
    RPI_TRY(ops->rotate(&r, (rp_rows){x, 0, D, row}, (rp_rows_out){x, 0, D, row}));
  }
  return RP_OK;
}
