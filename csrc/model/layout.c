/* SPDX-License-Identifier: Apache-2.0
 *
 * layout.c: where each parameter of params.h lies, what it is called and how it begins.
 *
 * The code that declares runs twice, as carving code does: over a counting arena, where it
 * only counts, and over the real one.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/rng.h"
#include "model/positions.h"

/* Parameters begin on cache lines. */
#define ALIGN_NUMBERS (RPI_ALIGN / (int64_t)sizeof(rp_real))

typedef struct builder {
  rpi_layout *layout;
  char group[RPI_PARAMETER_NAME]; /* what the names begin with */
} builder;

static void enter(builder *b, const char *stack, int64_t layer, const char *group) {
  char number[24] = "";
  if (layer >= 0) snprintf(number, sizeof number, ".%lld", (rpi_wide)layer);
  snprintf(b->group, sizeof b->group, "%s%s%s%s", stack, number, *group ? "." : "", group);
}

static int64_t declare(builder *b, const char *name, enum rpi_start start, bool decays,
                       bool present, int64_t leading, int64_t rows, int64_t columns) {
  if (!present) return RPI_ABSENT;
  rpi_layout *const layout = b->layout;
  rpi_parameter p = {.start = start, .decays = decays, .at = layout->numbers};
  snprintf(p.name, sizeof p.name, "%.*s.%s", (int)sizeof b->group / 2, b->group, name);
  if (leading != 0) p.shape[p.dimensions++] = leading;
  if (rows != 0) p.shape[p.dimensions++] = rows;
  p.shape[p.dimensions++] = columns;
  p.count = (leading != 0 ? leading : 1) * (rows != 0 ? rows : 1) * columns;
  if (layout->parameters) layout->parameters[layout->count] = p;
  layout->count++;
  layout->numbers += rpi_round_up(p.count, ALIGN_NUMBERS);
  return p.at;
}

/* One line of params.h: each function below has what its expressions speak of. */
#define FIELD(field, name, start, decays, present, leading, rows_, columns)                        \
  to->field = declare(b, name, start, decays, present, leading, rows_, columns);

static void declare_norm(builder *b, const rp_config *config, rpi_norm_params *to) {
  const int64_t C = config->width;
  RPI_NORM_PARAMETERS(FIELD)
}

static void declare_self(builder *b, const rp_config *config, rpi_self_params *to) {
  const int64_t C = config->width, D = rpi_head_width(config);
  const int64_t HD = config->heads * D, KD = rpi_key_heads(config) * D;
  RPI_SELF_PARAMETERS(FIELD)
}

static void declare_tables(builder *b, const rp_config *config, const rp_stack *stack,
                           const rpi_scheme *has, bool layer, rpi_table_params *to) {
  const int64_t C = config->width, D = rpi_head_width(config), HD = config->heads * D;
  const int64_t heads = has->per_head ? config->heads : 0, rows = has->rows;
  const int64_t value_heads = has->value_per_head ? config->heads : 0;
  const bool own = has->per_layer == layer, own_value = has->value_per_layer == layer;
  RPI_TABLE_PARAMETERS(FIELD)
}

/* What a layer has not is its stack's, if anybody's. */
static void share_tables(const rpi_table_params *shared, rpi_table_params *to) {
#define SHARE(field, ...)                                                                          \
  if (to->field == RPI_ABSENT) to->field = shared->field;
  RPI_TABLE_PARAMETERS(SHARE)
#undef SHARE
}

static void declare_cross(builder *b, const rp_config *config, rpi_cross_params *to) {
  const int64_t C = config->width, D = rpi_head_width(config);
  const int64_t HD = config->heads * D, KD = rpi_key_heads(config) * D;
  RPI_CROSS_PARAMETERS(FIELD)
}

static void declare_feed_forward(builder *b, const rp_config *config, rpi_feed_forward_params *to) {
  const int64_t C = config->width, F = config->feed_forward;
  RPI_FEED_FORWARD_PARAMETERS(FIELD)
}

static void declare_stack(builder *b, const rp_config *config, int number, rpi_arena *arena,
                          rpi_stack_params *to) {
  const rp_stack *const stack = rpi_stack_of(config, number);
  const char *const name = number == RPI_ENCODER ? "encoder" : "decoder";
  const rpi_scheme has = rpi_scheme_of(config, number);
  const int64_t C = config->width;
  to->layers = rpi_arena_take(arena, stack->layers, sizeof *to->layers);
  if (stack->layers == 0) return;
  enter(b, name, -1, "");
  to->positions = declare(b, "positions.weight", RPI_EMBEDDING, true,
                          stack->absolute == RP_ABSOLUTE_LEARNED, 0, config->max_length, C);
  to->relative_embedding =
      declare(b, "relative_embedding.weight", RPI_EMBEDDING, true, has.embedding, 0, has.rows, C);
  rpi_table_params shared;
  enter(b, name, -1, "attention");
  declare_tables(b, config, stack, &has, false, &shared);
  for (int64_t l = 0; l < stack->layers; l++) {
    rpi_layer_params layer;
    enter(b, name, l, "attention.norm");
    declare_norm(b, config, &layer.norm[RPI_SELF]);
    enter(b, name, l, "attention");
    declare_self(b, config, &layer.self);
    declare_tables(b, config, stack, &has, true, &layer.tables);
    share_tables(&shared, &layer.tables);
    if (number == RPI_DECODER && config->encoder.layers != 0) {
      enter(b, name, l, "cross.norm");
      declare_norm(b, config, &layer.norm[RPI_CROSS]);
      enter(b, name, l, "cross");
      declare_cross(b, config, &layer.cross);
    }
    enter(b, name, l, "feed_forward.norm");
    declare_norm(b, config, &layer.norm[RPI_FEED_FORWARD]);
    enter(b, name, l, "feed_forward");
    declare_feed_forward(b, config, &layer.feed_forward);
    if (to->layers) to->layers[l] = layer;
  }
  enter(b, name, -1, "norm");
  if (config->norm == RP_NORM_PRE) declare_norm(b, config, &to->norm);
}

/* Parameters of a decoder come after those of the encoder, embeddings first. */
static void declare_model(builder *b, const rp_config *config, rpi_arena *arena) {
  rpi_layout *const to = b->layout;
  const bool encoder = config->encoder.layers != 0, decoder = config->decoder.layers != 0;
  const int64_t C = config->width;
  const int64_t classes = decoder ? config->target_vocabulary : config->source_vocabulary;
  const bool shared = encoder && decoder && config->share_embeddings;
  enter(b, "source_embedding", -1, "");
  to->source_embedding =
      declare(b, "weight", RPI_EMBEDDING, true, encoder, 0, config->source_vocabulary, C);
  enter(b, "target_embedding", -1, "");
  to->target_embedding = declare(b, "weight", RPI_EMBEDDING, true, decoder && !shared, 0,
                                 config->target_vocabulary, C);
  if (shared) to->target_embedding = to->source_embedding;
  enter(b, "output", -1, "");
  to->output = declare(b, "weight", RPI_EMBEDDING, true, !config->share_output, 0, classes, C);
  if (config->share_output) to->output = decoder ? to->target_embedding : to->source_embedding;
  for (int s = 0; s < RPI_STACKS; s++) declare_stack(b, config, s, arena, &to->stack[s]);
}

void rpi_layout_make(const rp_config *config, rpi_arena *arena, rpi_layout *layout) {
  rpi_arena nowhere = rpi_arena_counting();
  builder b = {.layout = layout};
  *layout = (rpi_layout){.numbers = 0};
  declare_model(&b, config, &nowhere);
  const int64_t count = layout->count;
  rpi_parameter *const parameters = rpi_arena_take(arena, count, sizeof *parameters);
  *layout = (rpi_layout){.parameters = parameters};
  declare_model(&b, config, arena);
}

/* ---- initial weights ------------------------------------------------------- */

/* FNV-1a: names to numbers. */
static uint64_t hash_of(const char *name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (; *name; name++) hash = (hash ^ (unsigned char)*name) * 0x100000001b3u;
  return hash;
}

static void start_one(const rp_config *config, const rpi_parameter *p, rp_real *to) {
  const int64_t columns = p->shape[p->dimensions - 1];
  const int64_t rows = p->dimensions > 1 ? p->shape[p->dimensions - 2] : 1;
  const double bound = sqrt(6.0 / (double)(rows + columns));
  const double deviation = 1 / sqrt((double)config->width);
  const rpi_philox_key key = rpi_philox_step_key(config->seed, hash_of(p->name));
  for (int64_t i = 0; i < p->count; i += 4) {
    const rpi_philox_block bits =
        rpi_philox((rpi_philox_block){{(uint32_t)(i / 4), (uint32_t)((i / 4) >> 32), 0, 0}}, key,
                   RPI_PHILOX_ROUNDS);
    double normals[4] = {0};
    if (p->start == RPI_EMBEDDING) {
      rpi_normal_pair(bits.word[0], bits.word[1], &normals[0], &normals[1]);
      rpi_normal_pair(bits.word[2], bits.word[3], &normals[2], &normals[3]);
    }
    for (int64_t c = 0; c < 4 && i + c < p->count; c++) {
      double value = 0;
      switch (p->start) {
        case RPI_ZEROS: value = 0; break;
        case RPI_ONES: value = 1; break;
        case RPI_LINEAR:
        case RPI_GLOROT: value = bound * (2 * (double)rpi_uniform(bits.word[c]) - 1); break;
        case RPI_EMBEDDING: value = deviation * normals[c]; break;
        case RPI_SLOPES: value = rpi_alibi_slope(i + c, config->heads); break;
      }
      to[i + c] = (rp_real)value;
    }
  }
}

void rpi_layout_start(const rp_config *config, const rpi_layout *layout, rp_real *weights) {
  memset(weights, 0, (size_t)layout->numbers * sizeof *weights);
  for (int64_t p = 0; p < layout->count; p++) {
    start_one(config, &layout->parameters[p], weights + layout->parameters[p].at);
  }
}
