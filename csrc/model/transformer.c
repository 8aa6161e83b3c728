/* SPDX-License-Identifier: Apache-2.0
 *
 * transformer.c: the whole model: embeddings, stacks, output projection and loss; then the same
 * backward.
 */
#include <math.h>

#include "model/sublayer.h"

static int64_t sublayers_of(const rp_model *m, int stack) {
  return rpi_stack_of(&m->config, stack)->layers * m->stack[stack].parts;
}

/* ---- embeddings ------------------------------------------------------------ */

/* Where the table of the stack's tokens lies among the parameters. */
static int64_t embedding_at(const rpi_run *run) {
  const rpi_layout *const layout = &run->model->layout;
  return run->stack == RPI_ENCODER ? layout->source_embedding : layout->target_embedding;
}

static rpi_embed_args embed_args(const rpi_run *run) {
  const rp_model *const m = run->model;
  const rp_config *const config = &m->config;
  const rpi_side *const side = &run->side[run->stack];
  const int64_t learned = m->layout.stack[run->stack].positions;
  const rpi_note note = rpi_note_of(run, 0);
  return (rpi_embed_args){.rows = side->rows,
                          .columns = config->width,
                          .ids = side->ids,
                          .table = m->weights + embedding_at(run),
                          .scale = config->scale_embeddings ? (real)sqrt((double)config->width) : 1,
                          .positions = learned != RPI_ABSENT
                                           ? m->weights + learned
                                           : m->stack[run->stack].positions.absolute,
                          .places = run->kept && run->kept->step ? run->kept->places : NULL,
                          .dropout = rpi_dropout_at(run, 0, config->dropout, RPI_SITE_EMBEDDING),
                          .out = m->stack[run->stack].stored[0].stream,
                          .note = {.at = note.at, .out = note.in}};
}

/* For every token a row of the table and one of the stream. */
static void note_embedding(const rpi_run *run, bool backward, double began) {
  const int64_t numbers = run->side[run->stack].rows * run->model->config.width;
  rpi_note_cost(run, "embedding", backward, began, (double)numbers, 2 * numbers);
}

static rp_status embed(rpi_run *run) {
  rp_model *const m = run->model;
  const rpi_embed_args args = embed_args(run);
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->embed(&args));
  note_embedding(run, false, began);
  return RP_OK;
}

static rp_status embed_backward(rpi_run *run) {
  rp_model *const m = run->model;
  const int64_t learned = m->layout.stack[run->stack].positions;
  const rpi_embed_backward_args args = {
      .forward = embed_args(run),
      .dout = m->stack[run->stack].dstream,
      .dtable = m->gradients + embedding_at(run),
      .dpositions = learned != RPI_ABSENT ? m->gradients + learned : NULL};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->embed_backward(&args));
  note_embedding(run, true, began);
  return RP_OK;
}

/* ---- a stack --------------------------------------------------------------- */

rp_status rpi_stack_enter(rpi_run *run, int stack) {
  rp_model *const m = run->model;
  run->stack = stack;
  run->layer = -1;
  run->again = false;
  RPI_TRY(embed(run));
  return rpi_hunt(run, m->stack[stack].stored[0].stream, 0, false);
}

rp_status rpi_stack_leave(rpi_run *run) {
  rp_model *const m = run->model;
  const real *out;
  run->layer = -1;
  return rpi_read_stream(run, sublayers_of(m, run->stack), m->stack[run->stack].out, &out);
}

rp_status rpi_stack_forward(rpi_run *run, int stack) {
  RPI_TRY(rpi_stack_enter(run, stack));
  const int64_t sublayers = sublayers_of(run->model, stack);
  for (int64_t s = 0; s < sublayers; s++) RPI_TRY(rpi_sublayer_forward(run, s, true));
  return rpi_stack_leave(run);
}

/* From the gradient of the stack's result, in dstream, to the embeddings. */
static rp_status stack_backward(rpi_run *run, int stack) {
  rp_model *const m = run->model;
  real *const dstream = m->stack[stack].dstream;
  const int64_t sublayers = sublayers_of(m, stack);
  const int parts = m->stack[stack].parts;
  run->stack = stack;
  run->layer = -1;
  run->again = true;
  RPI_TRY(rpi_read_stream_backward(run, sublayers, dstream, NULL, dstream));
  for (int64_t s = sublayers - 1; s >= 0; s--) {
    /* the end of a layer: what it stored, again; that of the last one is still there */
    for (int i = 0; m->limits.recompute && s % parts == parts - 1 && i < parts; i++) {
      if (s == sublayers - 1) break;
      RPI_TRY(rpi_sublayer_forward(run, s - (parts - 1) + i, i < parts - 1));
    }
    RPI_TRY(rpi_sublayer_backward(run, s));
  }
  run->layer = -1;
  return embed_backward(run);
}

/* ---- output projection and loss -------------------------------------------- */

/* The line of what belongs to no stack. */
static void note_output(rp_model *m, const char *operation, bool backward, double began,
                        double operations, int64_t numbers) {
  rpi_profile_add(&m->profile, -1, -1, operation, backward, began, operations,
                  rpi_bytes_of(numbers));
}

static rp_status output_of(rp_model *m, const real *x, int64_t rows, rpi_linear *to) {
  *to = (rpi_linear){.rows = rows,
                     .in = m->config.width,
                     .out = m->classes,
                     .x = x,
                     .x_stride = m->config.width,
                     .weight = m->weights + m->layout.output};
  return rpi_rounded_of(m, m->layout.output, &to->rounded);
}

/* logits = x . Eᵀ of one block of rows */
static rp_status logits_of(rp_model *m, const rpi_linear *output, real *logits) {
  const rpi_gemm_args g =
      rpi_linear_forward(output, logits, output->out, RP_F32, m->limits.precision);
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->gemm(&g));
  note_output(m, "output", false, began, rpi_linear_operations(output), rpi_linear_numbers(output));
  return RP_OK;
}

rp_status rpi_output_logits(rpi_run *run, const real *x, int64_t rows, real *logits) {
  rpi_linear output;
  RPI_TRY(output_of(run->model, x, rows, &output));
  return logits_of(run->model, &output, logits);
}

/* The same of rows of the last stack's result, which a device has left rounded. */
static rp_status output_of_rows(rp_model *m, int64_t row, int64_t rows, rpi_linear *to) {
  const int stack = rpi_last_stack(m);
  const int64_t C = m->config.width;
  char *const kept = m->stack[stack].stored[sublayers_of(m, stack)].kept_n;
  RPI_TRY(output_of(m, m->stack[stack].out + row * C, rows, to));
  to->given = kept != NULL;
  if (kept) to->kept = kept + row * rpi_operand_stride(C, false) * rpi_element_bytes(RP_BF16);
  return RP_OK;
}

/* Are the gradients of logits in bf16? Who multiplies them would round them, and half of the memory
 * is moved. */
static bool leaves_rounded(const rp_model *m) {
  return rpi_rounds_operands(m) && m->classes % 4 == 0;
}

/* dx = dlogits . E,  dE += dlogitsᵀ . x */
static rp_status block_backward(rp_model *m, const rpi_linear *output, real *dx) {
  const bool rounded = leaves_rounded(m); /* each row from where that of logits starts */
  const rpi_linear_backward_args args = {.forward = *output,
                                         .dy = m->scratch.logits,
                                         .dy_stride = rounded ? 2 * output->out : output->out,
                                         .dy_element = rounded ? RP_BF16 : RP_F32,
                                         .dweight = m->gradients + m->layout.output,
                                         .dx = dx,
                                         .precision = m->limits.precision};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->linear_backward(&args));
  note_output(m, "output", true, began, 2 * rpi_linear_operations(output),
              2 * rpi_linear_numbers(output));
  return RP_OK;
}

/* Loss, score and hit of every row; where gradients are wanted, that of x in dstream. Tokens x
 * classes never exists: a block of rows at a time goes there and back. */
static rp_status loss_of(rpi_run *run) {
  rp_model *const m = run->model;
  const int stack = rpi_last_stack(m);
  const int64_t rows = run->side[stack].rows, C = m->config.width;
  for (int64_t row = 0; row < rows; row += m->loss_rows) {
    const int64_t count = rpi_min(rows - row, m->loss_rows);
    rpi_linear output;
    RPI_TRY(output_of_rows(m, row, count, &output));
    RPI_TRY(logits_of(m, &output, m->scratch.logits));
    const rpi_cross_entropy_args args = {.rows = count,
                                         .classes = m->classes,
                                         .logits = m->scratch.logits,
                                         .stride = m->classes,
                                         .labels = run->labels + row,
                                         .smoothing = m->config.label_smoothing,
                                         .rule = m->config.smoothing,
                                         .gradient = run->backward,
                                         .rounded = leaves_rounded(m),
                                         .loss = m->scratch.loss + row,
                                         .nll = m->scratch.nll + row,
                                         .hit = m->scratch.hit + row};
    const double began = rpi_profile_now(&m->profile);
    RPI_TRY(m->ops->cross_entropy(&args));
    const int64_t numbers = count * m->classes;
    note_output(m, "loss", false, began, 4 * (double)numbers, 2 * numbers);
    if (run->backward) RPI_TRY(block_backward(m, &output, m->stack[stack].dstream + row * C));
  }
  return RP_OK;
}

/* Into the ledger. A host may look at once what has happened; a device has noted it. */
static rp_status losses_of(rpi_run *run) {
  rp_model *const m = run->model;
  rpi_ledger *const ledger = m->ledger;
  const rpi_losses_args args = {.rows = run->side[rpi_last_stack(m)].rows,
                                .labels = run->labels,
                                .loss = m->scratch.loss,
                                .nll = m->scratch.nll,
                                .hit = m->scratch.hit,
                                .note = &ledger->note,
                                .own = &ledger->own,
                                .total = run->backward ? &ledger->total : NULL};
  const bool host = m->ops->host, first = host && ledger->total.bad == 0;
  RPI_TRY(m->ops->losses(&args));
  if (!host || ledger->own.bad == 0) return RP_OK;
  RPI_TRY(rpi_find_bad(run, &ledger->own.bad));
  if (run->backward && first) ledger->total.bad = ledger->own.bad;
  return RP_OK;
}

rp_status rpi_transformer(rpi_run *run) {
  rp_model *const m = run->model;
  const int last = rpi_last_stack(m);
  const bool encoder = m->stack[RPI_ENCODER].parts != 0;
  RPI_TRY(rpi_model_reserve(run));
  if (encoder) RPI_TRY(rpi_stack_forward(run, RPI_ENCODER));
  if (last == RPI_DECODER) RPI_TRY(rpi_stack_forward(run, RPI_DECODER));
  if (!run->labels) return RP_OK;
  RPI_TRY(loss_of(run));
  RPI_TRY(losses_of(run));
  if (!run->backward) return RP_OK;
  if (last == RPI_DECODER) RPI_TRY(stack_backward(run, RPI_DECODER));
  return encoder ? stack_backward(run, RPI_ENCODER) : RP_OK;
}
