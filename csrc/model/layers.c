/* SPDX-License-Identifier: Apache-2.0
 *
 * layers.c: the sublayers of a Transformer, each forward with its backward beneath it, as lists of
 * operations; what attention does is in attention.c. u, n, f and the two orders of norms: model.h.
 */
#include "model/sublayer.h"

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

/* Of what sublayer s adds to the stream. */
static rpi_dropout added_by(const rpi_run *run, int64_t s) {
  static const enum rpi_site sites[] = {RPI_SITE_SELF_ADDED, RPI_SITE_CROSS_ADDED,
                                        RPI_SITE_FEED_FORWARD_ADDED};
  const int parts = run->model->stack[run->stack].parts;
  return rpi_dropout_at(run, s / parts, run->model->config.dropout, sites[rpi_part_of(parts, s)]);
}

static rpi_dropout activation_dropout(const rpi_run *run) {
  return rpi_dropout_at(run, run->layer, run->model->config.activation_dropout,
                        RPI_SITE_ACTIVATION);
}

/* The bias of the layer that makes what sublayer s adds. */
static int64_t out_bias_of(const rpi_run *run, int64_t s) {
  const int parts = run->model->stack[run->stack].parts;
  const rpi_layer_params *const at = rpi_layer_params_of(run, s / parts);
  switch (rpi_part_of(parts, s)) {
    case RPI_SELF: return at->self.out_bias;
    case RPI_CROSS: return at->cross.out_bias;
    default: return at->feed_forward.out_bias;
  }
}

/* Has a device left n rounded alone, of which products are all that reads it? The result of a stack
 * is read by others. */
static bool is_rounded_alone(const rp_model *m, const rpi_stored *stored, const real *to) {
  return stored->kept_n && to == m->scratch.normed;
}

/* Where n of stream s is left rounded. Of those who are given one, the output projection alone has
 * no bias. */
static rpi_operand operand_of(const rpi_run *run, int64_t s) {
  const rp_model *const m = run->model;
  const rpi_stack_memory *const stack = &m->stack[run->stack];
  const bool last = s == rpi_stack_of(&m->config, run->stack)->layers * stack->parts;
  rpi_operand operand = rpi_operand_at(m, stack->stored[s].kept_n);
  if (last && run->stack == rpi_last_stack(m)) operand.bias = false;
  return operand;
}

/* What sublayer s adds to, n being what it read. */
static rpi_base base_of(const rpi_run *run, int64_t s, const real *n) {
  const rp_model *const m = run->model;
  const rpi_norm_params *const norm = norm_of(run, s);
  const rpi_stored *const stored = &m->stack[run->stack].stored[s];
  if (m->config.norm == RP_NORM_PRE) return (rpi_base){.x = stored->stream};
  if (!norm || !is_rounded_alone(m, stored, n)) return (rpi_base){.x = n};
  return (rpi_base){.x = stored->stream,
                    .stats = stored->stats,
                    .gain = rpi_weight_at(m, norm->gain),
                    .shift = rpi_weight_at(m, norm->shift)};
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
                              .base = run->base,
                              .dropout = run->added,
                              .gain = rpi_weight_at(m, norm->gain),
                              .shift = rpi_weight_at(m, norm->shift),
                              .epsilon = m->config.norm_epsilon,
                              .y = is_rounded_alone(m, stored, to) ? NULL : to,
                              .rounded = operand_of(run, s),
                              .stats = stored->stats,
                              .note = rpi_note_of(run, s)};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->norm(&args));
  run->base = (rpi_base){.x = NULL};
  const bool adds = args.base.x != NULL;
  rpi_note_cost(run, "norm", run->again, began, (adds ? 10 : 8) * (double)(rows * C),
                (adds ? 4 : 2) * rows * C);
  if (adds) RPI_TRY(rpi_hunt(run, stored->stream, s, false));
  return rpi_hunt(run, to, s, true);
}

/* What sublayers add is an operand of products backward. NULL: its gradient is the stream's itself,
 * as nothing was dropped and nothing is rounded. */
static real *df_of(const rpi_run *run) {
  const rp_model *const m = run->model;
  const bool drops = run->dropout && m->config.dropout != 0;
  return drops || rpi_operand_element(m) != RP_F32 ? m->scratch.df : NULL;
}

rp_status rpi_read_stream_backward(rpi_run *run, int64_t s, const real *dn, const real *dstream,
                                   real *to) {
  rp_model *const m = run->model;
  const rpi_norm_params *const norm = norm_of(run, s);
  const rpi_stored *const stored = &m->stack[run->stack].stored[s];
  const int64_t rows = run->side[run->stack].rows, C = m->config.width;
  rpi_norm_backward_args args = {.rows = rows,
                                 .columns = C,
                                 .x = stored->stream,
                                 .gain = rpi_weight_at(m, norm->gain),
                                 .stats = stored->stats,
                                 .dy = dn,
                                 .dstream = dstream,
                                 .dx = to,
                                 .dgain = rpi_gradient_at(m, norm->gain),
                                 .dshift = rpi_gradient_at(m, norm->shift),
                                 .workspace = m->scratch.norm,
                                 .workspace_bytes = m->scratch.norm_bytes};
  if (s > 0) {
    args.dropout = added_by(run, s - 1);
    args.df = df_of(run);
    args.df_element = rpi_operand_element(m);
    args.dbias = rpi_gradient_at(m, out_bias_of(run, s - 1));
  }
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->norm_backward(&args, NULL));
  rpi_note_cost(run, "norm", true, began, (args.df ? 13 : 12) * (double)(rows * C),
                (args.df ? 5 : 4) * rows * C);
  return RP_OK;
}

/* ---- feed-forward ---------------------------------------------------------- */

static rpi_layer_linear hidden_of(const rpi_run *run, const rpi_stored *stored, const real *n) {
  const rpi_feed_forward_params *const at = &rpi_layer_params_of(run, run->layer)->feed_forward;
  const rp_model *const m = run->model;
  const rp_config *const config = &m->config;
  return (rpi_layer_linear){.name = "feed_forward.in",
                            .rows = run->side[run->stack].rows,
                            .in = config->width,
                            .out = rpi_hidden(config),
                            .weight = at->in,
                            .bias = at->in_bias,
                            .summed = true,
                            .x = n,
                            .x_stride = config->width,
                            .kept = stored->kept_n,
                            .given = rpi_is_given(stored, n),
                            .y_element = stored->hidden ? RP_F32 : RP_BF16,
                            .dy_element = rpi_operand_element(m)};
}

/* RELU works in place: its result says all that backward asks. The others keep h, of which they are
 * a function that is computed in f32. */
static real *act_of(const rp_model *m, const rpi_stored *stored) {
  return m->config.activation == RP_RELU ? stored->hidden : m->scratch.act;
}

static rpi_layer_linear feed_forward_out_of(const rpi_run *run, const rpi_stored *stored) {
  const rpi_feed_forward_params *const at = &rpi_layer_params_of(run, run->layer)->feed_forward;
  const rp_config *const config = &run->model->config;
  return (rpi_layer_linear){.name = "feed_forward.out",
                            .rows = run->side[run->stack].rows,
                            .in = config->feed_forward,
                            .out = config->width,
                            .weight = at->out,
                            .bias = at->out_bias,
                            .summed = true,
                            .x = act_of(run->model, stored),
                            .x_stride = config->feed_forward,
                            .kept = stored->kept_in,
                            .given = stored->kept_in != NULL,
                            .dy_element = rpi_operand_element(run->model),
                            .dx_element = rpi_operand_element(run->model)};
}

static rp_status activate(rpi_run *run, const rpi_stored *stored) {
  rp_model *const m = run->model;
  const int64_t rows = run->side[run->stack].rows, F = m->config.feed_forward;
  const rpi_activation_args args = {.rows = rows,
                                    .columns = F,
                                    .kind = m->config.activation,
                                    .h = stored->hidden,
                                    .dropout = activation_dropout(run),
                                    .a = stored->kept_in ? NULL : act_of(m, stored),
                                    .rounded = rpi_operand_at(m, stored->kept_in)};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->activation(&args));
  rpi_note_cost(run, "activation", run->again, began, (double)(rows * F), 2 * rows * F);
  return RP_OK;
}

static rp_status feed_forward(rpi_run *run, const rpi_stored *stored, const real *n) {
  const rp_config *const config = &run->model->config;
  const rpi_layer_linear hidden = hidden_of(run, stored, n);
  real *const to = stored->hidden ? stored->hidden : stored->kept_in;
  const int64_t stride =
      stored->hidden ? hidden.out : rpi_operand_stride(hidden.out, config->bias != 0);
  RPI_TRY(rpi_layer_linear_forward(run, &hidden, to, stride));
  return activate(run, stored);
}

static rp_status feed_forward_backward(rpi_run *run, const rpi_stored *stored, const real *n,
                                       const real *df, real *dn, bool add) {
  rp_model *const m = run->model;
  const rp_config *const config = &m->config;
  const int64_t rows = run->side[run->stack].rows, F = config->feed_forward;
  if (config->activation != RP_RELU && !stored->kept_in) {
    RPI_TRY(activate(run, stored)); /* act again */
  }
  const rpi_layer_linear out = feed_forward_out_of(run, stored);
  RPI_TRY(rpi_layer_linear_backward(run, &out, df, config->width, m->scratch.dact, false));
  const rpi_activation_backward_args args = {
      .rows = rows,
      .columns = F,
      .kind = config->activation,
      .h = stored->hidden,
      .a = act_of(m, stored),
      .rounded = rpi_operand_at(m, stored->kept_in),
      .da = m->scratch.dact,
      .dropout = activation_dropout(run),
      .dh = m->scratch.dhidden,
      .element = rpi_operand_element(m),
      .dbias = rpi_gradient_at(m, rpi_layer_params_of(run, run->layer)->feed_forward.in_bias)};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->activation_backward(&args));
  rpi_note_cost(run, "activation", true, began, (double)(rows * F), 3 * rows * F);
  const rpi_layer_linear hidden = hidden_of(run, stored, n);
  return rpi_layer_linear_backward(run, &hidden, m->scratch.dhidden, hidden.out, dn, add);
}

/* ---- a sublayer ------------------------------------------------------------ */

rp_status rpi_sublayer_forward(rpi_run *run, int64_t s, bool last) {
  rp_model *const m = run->model;
  const rpi_stack_memory *const stack = &m->stack[run->stack];
  const rpi_stored *const stored = &stack->stored[s];
  const int part = rpi_part_of(stack->parts, s);
  const real *n;
  run->layer = s / stack->parts;
  RPI_TRY(rpi_read_stream(run, s, m->scratch.normed, &n));
  rpi_layer_linear out;
  if (part == RPI_FEED_FORWARD) {
    RPI_TRY(feed_forward(run, stored, n));
    out = feed_forward_out_of(run, stored);
  } else {
    RPI_TRY(rpi_sublayer_attend(run, stored, part, n));
    out = rpi_attention_out_of(run, stored, part);
  }
  if (!last) return RP_OK;
  run->base = base_of(run, s, n);
  run->added = added_by(run, s);
  return rpi_layer_linear_forward(run, &out, stack->stored[s + 1].stream, m->config.width);
}

/* Norm before: du_s = du_{s+1} + norm'(dn). Norm after: n takes both, du_s = norm'(du_{s+1} + dn),
 * so that dn is added to the stream's gradient where that lies. */
rp_status rpi_sublayer_backward(rpi_run *run, int64_t s) {
  rp_model *const m = run->model;
  const rpi_stack_memory *const stack = &m->stack[run->stack];
  const rpi_stored *const stored = &stack->stored[s];
  const int part = rpi_part_of(stack->parts, s);
  const bool before = m->config.norm == RP_NORM_PRE;
  real *const dn = before ? m->scratch.dn : stack->dstream;
  const real *const df = df_of(run) ? df_of(run) : stack->dstream;
  const real *n = NULL;
  run->layer = s / stack->parts;
  if (!stored->kept_n) RPI_TRY(rpi_read_stream(run, s, m->scratch.normed, &n));
  if (part == RPI_FEED_FORWARD) {
    RPI_TRY(feed_forward_backward(run, stored, n, df, dn, !before));
  } else {
    RPI_TRY(rpi_sublayer_attend_backward(run, stored, part, n, df, dn, !before));
  }
  if (before) return rpi_read_stream_backward(run, s, dn, stack->dstream, stack->dstream);
  if (s == 0) return RP_OK; /* the embeddings have no norm */
  return rpi_read_stream_backward(run, s, dn, NULL, stack->dstream);
}
