/* SPDX-License-Identifier: Apache-2.0
 *
 * plan.c: the memory of a model, told in advance, made and released.
 *
 * What streams and sublayers store:
 *
 *   training             everything, each its own
 *   training, recompute  the stream before every layer is its own; what lies within a layer is
 *                        shared by all layers, and made again in backward
 *   no training          two streams in turn, and one layer's store
 */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "base/integers.h"
#include "base/threads.h"
#include "isa/devices.h"
#include "model/model.h"
#include "ops/linear.h"

/* Logits of a block of rows take about this many numbers: enough rows that reading the output
 * projection for every block is cheap beside the product. */
#define LOGITS ((int64_t)1 << 23)
#define DEVICE_LOGITS ((int64_t)1 << 27) /* of a device, which reads much faster than it begins */

typedef struct plan {
  rpi_arena fixed; /* small, and needed to ask attention for sizes */
  rpi_arena numbers, step;
  rpi_arena rounded; /* may be there or not */
} plan;

static real *matrix_of(int element, rpi_arena *arena, int64_t rows, int64_t columns) {
  int64_t count = 0;
  if (!rpi_multiply(rows, columns, &count)) arena->failed = true;
  return rpi_arena_take(arena, count, rpi_element_bytes(element));
}

static real *matrix(rpi_arena *arena, int64_t rows, int64_t columns) {
  return matrix_of(RP_F32, arena, rows, columns);
}

/* Numbers of a product's operand as it was rounded. A device writes and reads half of what it would
 * round again. */
static void *kept(rpi_arena *arena, int64_t rows, int64_t columns) {
  return rpi_arena_take(arena, rows, rpi_linear_kept(1, columns));
}

/* What one sublayer stores but for its stream. */
static void carve_sublayer(const rp_model *m, int stack, int part, rpi_arena *arena,
                           rpi_stored *to) {
  const rp_config *const config = &m->config;
  const int64_t rows = m->limits.tokens, HD = rpi_head_columns(m);
  to->stats = matrix(arena, rows, 2);
  if (rpi_rounds_operands(m)) {
    to->kept_n = kept(arena, rows, config->width);
    to->kept_in = kept(arena, rows, part == RPI_FEED_FORWARD ? config->feed_forward : HD);
  }
  if (part == RPI_FEED_FORWARD) {
    const bool in_place = rpi_rounds_operands(m) && config->activation == RP_RELU;
    if (!in_place) to->hidden = matrix(arena, rows, rpi_hidden(config));
    return;
  }
  const int element = rpi_heads_element(m, stack, part);
  to->qkv = matrix_of(element, arena, rows, part == RPI_SELF ? rpi_qkv_columns(m) : HD);
  if (part == RPI_CROSS) to->kv = matrix_of(element, arena, rows, 2 * rpi_key_columns(m));
  if (element == RP_F32) to->z = matrix(arena, rows, HD);
  to->lse = m->limits.training ? matrix(arena, config->heads, rows) : NULL;
}

static void carve_stack(rp_model *m, int number, plan *p) {
  const rp_config *const config = &m->config;
  rpi_stack_memory *const to = &m->stack[number];
  const int64_t layers = rpi_stack_of(config, number)->layers;
  const int64_t rows = m->limits.tokens, C = config->width;
  const bool training = m->limits.training != 0, all = training && !m->limits.recompute;
  rpi_positions_carve(&m->config, number, training, &p->fixed, &p->numbers, &p->step,
                      &to->positions);
  if (layers == 0) return;
  to->parts = number == RPI_DECODER && config->encoder.layers != 0 ? RPI_PARTS : RPI_PARTS - 1;
  const int64_t sublayers = layers * to->parts;
  to->stored = rpi_arena_take(&p->fixed, sublayers + 1, sizeof *to->stored);
  rpi_stored shared[RPI_PARTS] = {{0}};
  real *pair[2] = {NULL, NULL};
  for (int i = 0; i < RPI_PARTS && !all; i++) {
    const int part = i < to->parts ? rpi_part_of(to->parts, i) : RPI_PARTS;
    if (part == RPI_PARTS) continue;
    carve_sublayer(m, number, part, &p->step, &shared[part]);
    if (training && i > 0) shared[part].stream = matrix(&p->step, rows, C);
  }
  for (int i = 0; i < 2 && !training; i++) pair[i] = matrix(&p->step, rows, C);
  for (int64_t s = 0; s <= sublayers; s++) {
    const int part = rpi_part_of(to->parts, s);
    rpi_stored stored = shared[part];
    if (s == sublayers) {
      stored = (rpi_stored){.stats = matrix(&p->step, rows, 2)};
      if (rpi_rounds_operands(m)) stored.kept_n = kept(&p->step, rows, C);
    } else if (all) {
      carve_sublayer(m, number, part, &p->step, &stored);
    }
    if (!training) stored.stream = pair[s % 2];
    else if (all || s % to->parts == 0) stored.stream = matrix(&p->step, rows, C);
    if (to->stored) to->stored[s] = stored;
  }
  to->out = matrix(&p->step, rows, C);
  if (training) to->dstream = matrix(&p->step, rows, C);
}

static void carve_scratch(rp_model *m, plan *p) {
  const rp_config *const config = &m->config;
  rpi_scratch *const to = &m->scratch;
  rpi_arena *const arena = &p->step;
  const int64_t rows = m->limits.tokens, C = config->width, F = config->feed_forward;
  const int64_t HD = rpi_head_columns(m), hidden = rpi_hidden(config);
  const bool relu = config->activation == RP_RELU;
  to->normed = matrix(arena, rows, C);
  if (!relu && !rpi_rounds_operands(m)) to->act = matrix(arena, rows, F);
  to->logits = matrix(arena, m->loss_rows, m->classes);
  to->loss = matrix(arena, rows, 1);
  to->nll = matrix(arena, rows, 1);
  to->hit = rpi_arena_take(arena, rows, 1);
  m->ledger = rpi_arena_take(arena, 1, sizeof *m->ledger);
  m->places = rpi_arena_take(&p->fixed, 2 * m->layout.count, sizeof *m->places);
  to->ordinals = rpi_arena_take(&p->fixed, m->limits.sentences, sizeof *to->ordinals);
  const int64_t most = m->layout.numbers > rows * C ? m->layout.numbers : rows * C;
  to->squares = rpi_arena_take(arena, rpi_square_blocks(most), sizeof(double));
  if (m->limits.training || rpi_rounds_operands(m)) {
    to->dz = matrix(arena, rows, HD);
    to->dqkv = matrix(arena, rows, rpi_qkv_columns(m));
  }
  if (!m->limits.training) return;
  const int element = rpi_operand_element(m);
  to->df = matrix_of(element, arena, rows, C);
  to->dn = to->df;
  if (element != RP_F32 && config->norm == RP_NORM_PRE) to->dn = matrix(arena, rows, C);
  to->dhidden = matrix_of(element, arena, rows, hidden);
  to->dact = config->activation == RP_SWIGLU ? matrix_of(element, arena, rows, F) : to->dhidden;
  const rpi_norm_backward_args norm = {.rows = rows, .columns = C};
  if (m->ops->norm_backward(&norm, &to->norm_bytes) != RP_OK) arena->failed = true;
  to->norm = rpi_arena_take(arena, to->norm_bytes, 1);
}

/* Is it the weight of a linear layer, or the output projection's? */
static bool is_multiplied(const rpi_layout *layout, const rpi_parameter *p) {
  return p->start == RPI_LINEAR || p->at == layout->output;
}

/* Is it kept rounded? A host does so while it searches, with what every word asks for: the
 * decoder's and the output projection. */
static bool is_kept_rounded(const rp_model *m, const rpi_parameter *p) {
  const rpi_layout *const layout = &m->layout;
  if (m->limits.precision != RP_BF16 || !is_multiplied(layout, p)) return false;
  if (!m->ops->host) return true;
  if (m->limits.training || m->config.decoder.layers == 0) return false;
  return p->at == layout->output || p->at >= layout->stack[RPI_DECODER].layers[0].self.qkv;
}

/* Shapes are known once the layout is there, after the first count. */
static void carve_rounded(rp_model *m, plan *p) {
  const rpi_layout *const layout = &m->layout;
  m->rounded = rpi_arena_take(&p->fixed, layout->count, sizeof *m->rounded);
  for (int64_t i = 0; m->rounded && i < layout->count; i++) {
    const rpi_parameter *const of = &layout->parameters[i];
    m->rounded[i] = (rpi_rounding){.to = NULL};
    if (!is_kept_rounded(m, of)) continue;
    m->rounded[i].out = of->shape[0];
    m->rounded[i].in = of->shape[1];
    m->rounded[i].to = kept(&p->rounded, of->shape[0], of->shape[1]);
  }
}

/* Everything, from arenas that may only count; bytes as they are known by then. */
static void carve(rp_model *m, plan *p, rp_memory *memory) {
  const bool training = m->limits.training != 0, average = training && m->config.ema != 0;
  const int64_t bytes = sizeof(real);
  rpi_layout_make(&m->config, &p->fixed, &m->layout);
  const int64_t count = m->layout.numbers;
  m->weights = m->bare ? NULL : rpi_arena_take(&p->numbers, count, bytes);
  m->gradients = training ? rpi_arena_take(&p->numbers, count, bytes) : NULL;
  m->moment1 = training ? rpi_arena_take(&p->numbers, count, bytes) : NULL;
  m->moment2 = training ? rpi_arena_take(&p->numbers, count, bytes) : NULL;
  m->average = average ? rpi_arena_take(&p->numbers, count, bytes) : NULL;
  const int64_t before = p->numbers.used;
  for (int s = 0; s < RPI_STACKS; s++) carve_stack(m, s, p);
  carve_scratch(m, p);
  carve_rounded(m, p);
  memory->parameters = count * bytes;
  memory->gradients = training ? count * bytes : 0;
  memory->moments = training ? 2 * count * bytes : 0;
  memory->average = average ? count * bytes : 0;
  const int64_t letters = training ? RPI_LETTERS * (int64_t)sizeof(rpi_outcome) : 0;
  memory->constants = p->fixed.used + p->numbers.used - before + p->rounded.used + letters;
  memory->activations = p->step.used;
}

/* ---- attention's workspace ------------------------------------------------- */

/* The most that the attentions of a batch of this shape ask for. Every layer of a stack asks for
 * the same. */
static rp_status workspace_of(const rpi_run *run, int64_t *most) {
  const rp_model *const m = run->model;
  if (run->sentences == 0) return RP_OK;
  rpi_run at = *run;
  at.shape_only = true;
  for (int s = 0; s < RPI_STACKS; s++) {
    at.stack = s;
    if (m->stack[s].parts == 0) continue;
    for (int part = RPI_SELF; part <= (rpi_has_cross(m, s) ? RPI_CROSS : RPI_SELF); part++) {
      rp_attention a;
      int64_t forward = 0, backward = 0;
      RPI_TRY(rpi_attention_of(&at, 0, part, &a));
      RPI_TRY(m->ops->attention_workspace(&a, run->workers, &forward,
                                          run->backward ? &backward : NULL));
      if (forward > *most) *most = forward;
      if (backward > *most) *most = backward;
    }
  }
  return RP_OK;
}

/* The most that is planned for (or one sentence, where that is longer): asking attention for sizes
 * takes a time that grows with a batch. Larger batches take more workspace when they come
 * (rpi_model_reserve). */
#define PLANNED_SENTENCES ((int64_t)1 << 13)
#define PLANNED_TOKENS ((int64_t)1 << 16)
/* Attention cuts fewer sentences than these finer, which takes less of each worker. */
#define UNCUT_SENTENCES 16

/* What a batch takes does not only grow with it: of 400 with lengths drawn at random, nine took
 * more than any of those planned, by up to 4 %. So a part of this size is spare. */
#define SPARE 16

static int64_t planned_sentences(const rp_model *m) {
  return rpi_min(rpi_max(m->limits.sentences, UNCUT_SENTENCES), PLANNED_SENTENCES);
}
static int64_t planned_tokens(const rp_model *m) {
  const int64_t longest = m->config.max_length;
  return rpi_min(m->limits.tokens, rpi_max(longest, PLANNED_TOKENS));
}

/* A batch as large as the limits allow, of sentences of `length` tokens on either side behind one
 * of `first`: a long one makes every worker's scratch large, many short ones make many sums. */
static rp_status plan_behind(rp_model *m, int64_t first, int64_t length, int64_t *offsets,
                             int64_t *most) {
  const int64_t tokens = planned_tokens(m) + first;
  int64_t sentences = 1;
  offsets[0] = 0;
  offsets[1] = first;
  while (sentences <= planned_sentences(m)) { /* empty ones in the end: work of their own, too */
    const int64_t begin = offsets[sentences++];
    offsets[sentences] = begin + rpi_min(length, tokens - begin);
  }
  rpi_run run = {.model = m,
                 .sentences = sentences,
                 .workers = rpi_threads_get(),
                 .dropout = m->limits.training != 0,
                 .backward = m->limits.training != 0};
  for (int s = 0; s < RPI_STACKS; s++) {
    run.side[s] = (rpi_side){.rows = offsets[sentences], .offsets = offsets};
  }
  return workspace_of(&run, most);
}

/* Such batches behind the longest sentence, and alone: sums are shared out in whole sentences, and
 * one more may make fewer shares. */
static rp_status plan_length(rp_model *m, int64_t length, int64_t *offsets, int64_t *most) {
  RPI_TRY(plan_behind(m, rpi_min(m->config.max_length, planned_tokens(m)), length, offsets, most));
  return plan_behind(m, 0, length, offsets, most);
}

/* The longest sentences, those that fill attention's chunks, since a longer one is cut into smaller
 * ones, and ever shorter ones down to those that fill a batch. */
static rp_status plan_workspace(rp_model *m, int64_t *most) {
  const int64_t sentences = planned_sentences(m);
  int64_t *const offsets = rpi_allocate((size_t)(sentences + 2) * sizeof *offsets);
  RPI_CHECK(offsets, RP_ERROR_MEMORY, "model: no memory for %lld offsets", (rpi_wide)sentences + 2);
  *most = 0;
  rp_status status = RP_OK;
  static const int64_t chunks[] = {RPI_QUERY_CHUNK, RPI_KEY_CHUNK};
  for (int i = 0; i < 2 && status == RP_OK; i++) {
    if (chunks[i] < m->config.max_length) status = plan_length(m, chunks[i], offsets, most);
  }
  for (int64_t length = m->config.max_length; status == RP_OK; length -= (length + 3) / 4) {
    status = plan_length(m, length, offsets, most);
    if (length == 1 || length * sentences < planned_tokens(m)) break;
  }
  *most += rpi_round_up(*most / SPARE, RPI_ALIGN);
  rpi_release(offsets);
  return status;
}

rp_status rpi_model_reserve(rpi_run *run) {
  rp_model *const m = run->model;
  run->workers = rpi_threads_get(); /* asked once: another thread may change it */
  int64_t bytes = 0;
  RPI_TRY(workspace_of(run, &bytes));
  if (bytes <= m->workspace_bytes) return RP_OK;
  void *workspace = NULL;
  RPI_TRY_MEMORY(m->ops->allocate(bytes, &workspace),
                 "model: no memory for attention's workspace of %lld bytes on %s", (rpi_wide)bytes,
                 m->device);
  m->ops->release(m->workspace);
  m->workspace = workspace;
  m->workspace_bytes = bytes;
  return RP_OK;
}

/* ---- life ------------------------------------------------------------------ */

/* The sum of the parts, and whether there is one. */
static bool add_up(rp_memory *memory) {
  const int64_t parts[] = {memory->parameters, memory->gradients, memory->moments,
                           memory->average,    memory->constants, memory->activations,
                           memory->workspace};
  memory->total = 0;
  for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
    if (!rpi_add(memory->total, parts[i], &memory->total)) return false;
  }
  return true;
}

/* The small part that attention's sizes depend on, and with it the sizes of all others. */
static rp_status make_fixed(rp_model *m, rp_memory *memory) {
  plan p = {rpi_arena_counting(), rpi_arena_counting(), rpi_arena_counting(), rpi_arena_counting()};
  m->classes =
      m->config.decoder.layers != 0 ? m->config.target_vocabulary : m->config.source_vocabulary;
  const int64_t logits = m->ops->host ? LOGITS : DEVICE_LOGITS;
  m->loss_rows = rpi_min(rpi_max(logits / m->classes, 16), m->limits.tokens);
  carve(m, &p, memory);
  const bool fits = !p.fixed.failed && !p.numbers.failed && !p.step.failed && add_up(memory);
  RPI_CHECK(fits, RP_ERROR_SHAPE,
            "model: its memory overflows; limits.tokens=%lld, max_length=%lld",
            (rpi_wide)m->limits.tokens, (rpi_wide)m->config.max_length);
  m->fixed_bytes = p.fixed.used;
  m->numbers_bytes = p.numbers.used;
  m->fixed = rpi_allocate((size_t)m->fixed_bytes);
  RPI_CHECK(m->fixed, RP_ERROR_MEMORY, "model: no memory for %lld bytes of its layout",
            (rpi_wide)m->fixed_bytes);
  plan again = {rpi_arena_over(m->fixed, m->fixed_bytes), rpi_arena_counting(),
                rpi_arena_counting(), rpi_arena_counting()};
  carve(m, &again, memory);
  m->rounded_bytes = again.rounded.used;
  for (int s = 0; s < RPI_STACKS; s++) rpi_positions_fill(&m->stack[s].positions);
  RPI_TRY(plan_workspace(m, &memory->workspace));
  RPI_CHECK(add_up(memory), RP_ERROR_SHAPE, "model: its memory overflows; limits.tokens=%lld",
            (rpi_wide)m->limits.tokens);
  return RP_OK;
}

static void start(rp_model *m, const rp_config *config, const rp_limits *limits) {
  memset(m, 0, sizeof *m);
  atomic_flag_clear(&m->busy);
  m->config = *config;
  m->limits = *limits;
  snprintf(m->device, sizeof m->device, "%s", limits->device ? limits->device : "cpu");
  m->limits.device = m->device;
  for (int element = RP_F32; element <= RP_BF16; element++) {
    m->placement[element] = rp_placement_default();
    m->placement[element].device = m->device;
    m->placement[element].precision = limits->precision;
    m->placement[element].element = element;
  }
}

rp_status rpi_model_memory(const rp_config *config, const rp_limits *limits, rp_memory *memory) {
  rp_model m;
  start(&m, config, limits);
  RPI_TRY(rpi_device_ops(m.device, &m.ops));
  const rp_status status = make_fixed(&m, memory);
  rpi_release(m.fixed);
  return status;
}

/* Initial weights, which are also where the average begins. */
static rp_status set_weights(rp_model *m) {
  const int64_t bytes = m->layout.numbers * (int64_t)sizeof(real);
  real *const weights = m->ops->host ? m->weights : rpi_allocate((size_t)bytes);
  RPI_CHECK(weights, RP_ERROR_MEMORY, "model: no memory for %lld bytes of initial weights",
            (rpi_wide)bytes);
  rpi_layout_start(&m->config, &m->layout, weights);
  rp_status status = RP_OK;
  if (!m->ops->host) {
    status = m->ops->write(m->weights, weights, bytes);
    rpi_release(weights);
  }
  return status == RP_OK && m->average ? m->ops->copy(m->average, m->weights, bytes) : status;
}

/* Nothing is accumulated and no update made. */
static rp_status make_ledger(rp_model *m) {
  const rpi_ledger empty = {.note = 0};
  RPI_TRY(m->ops->write(m->ledger, &empty, sizeof empty));
  for (int64_t p = 0; p < m->layout.count; p++) {
    m->places[2 * p] = m->layout.parameters[p].at;
    m->places[2 * p + 1] = m->layout.parameters[p].count;
  }
  return m->limits.training ? rpi_outcomes_make(m) : RP_OK;
}

static rp_status allocate_all(rp_model *m, const rp_memory *memory) {
  RPI_TRY(m->ops->allocate(m->numbers_bytes, &m->numbers));
  RPI_TRY(m->ops->allocate(memory->activations, &m->step_memory));
  return m->ops->allocate(memory->workspace, &m->workspace);
}

static rp_status make(rp_model *m) {
  RPI_TRY(rpi_device_ops(m->device, &m->ops));
  rp_memory memory = {.struct_size = sizeof memory};
  RPI_TRY(make_fixed(m, &memory));
  m->workspace_bytes = memory.workspace;
  RPI_TRY_MEMORY(allocate_all(m, &memory),
                 "model: no memory for %lld bytes on %s; rp_model_memory says what they are for",
                 (rpi_wide)memory.total, m->device);
  if (m->rounded_bytes != 0) {
    const rp_status status = m->ops->allocate(m->rounded_bytes, &m->rounded_memory);
    if (status != RP_OK && status != RP_ERROR_MEMORY) return status;
  }
  plan p = {rpi_arena_over(m->fixed, m->fixed_bytes), rpi_arena_over(m->numbers, m->numbers_bytes),
            rpi_arena_over(m->step_memory, memory.activations),
            rpi_arena_over(m->rounded_memory, m->rounded_bytes)};
  carve(m, &p, &memory);
  RPI_CHECK(!p.fixed.failed && !p.numbers.failed && !p.step.failed, RP_ERROR_MEMORY,
            "model: its memory was carved otherwise than planned");
  RPI_TRY(m->ops->zero(m->numbers, m->numbers_bytes / (int64_t)sizeof(real)));
  for (int s = 0; s < RPI_STACKS; s++) {
    rpi_positions_fill(&m->stack[s].positions);
    RPI_TRY(rpi_positions_make(m->ops, &m->stack[s].positions));
  }
  RPI_TRY(make_ledger(m));
  return m->bare ? RP_OK : set_weights(m);
}

static rp_status create(const rp_config *config, const rp_limits *limits, bool bare,
                        rp_model **model) {
  rp_model *const m = rpi_allocate(sizeof *m);
  RPI_CHECK(m, RP_ERROR_MEMORY, "model: no memory for the model");
  start(m, config, limits);
  m->bare = bare;
  const rp_status status = make(m);
  if (status == RP_OK) *model = m;
  else rpi_model_free(m);
  return status;
}

rp_status rpi_model_create(const rp_config *config, const rp_limits *limits, rp_model **model) {
  return create(config, limits, false, model);
}

rp_status rpi_model_create_bare(const rp_config *config, const rp_limits *limits,
                                rp_model **model) {
  assert(!limits->training); /* else the average would begin as nothing */
  return create(config, limits, true, model);
}

rp_status rpi_model_own_weights(rp_model *m) {
  const int64_t bytes = m->layout.numbers * (int64_t)sizeof(real);
  void *memory = NULL;
  RPI_TRY_MEMORY(m->ops->allocate(bytes, &memory),
                 "model: no memory for %lld bytes of weights on %s", (rpi_wide)bytes, m->device);
  m->weights = m->own_weights = memory;
  return m->ops->zero(m->weights, m->layout.numbers);
}

void rpi_model_free(rp_model *m) {
  if (!m) return;
  rpi_profile_free(&m->profile);
  rpi_file_unmap(&m->mapping);
  rpi_release(m->fixed);
  if (m->ops) {
    for (int i = 0; i < RPI_LETTERS; i++) m->ops->discard(m->outcomes.letter[i]);
    m->ops->release(m->own_weights);
    m->ops->release(m->numbers);
    m->ops->release(m->step_memory);
    m->ops->release(m->workspace);
    m->ops->release(m->rounded_memory);
  }
  rpi_release(m);
}
