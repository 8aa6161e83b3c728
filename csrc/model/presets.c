/* SPDX-License-Identifier: Apache-2.0
 *
 * presets.c: whole configurations by name.
 *
 * docs/presets.md has every number and where it comes from; tests/test_presets.py compares.
 */
#include <stdbool.h>
#include <string.h>

#include "model/config.h"

/* How a preset is trained. */
typedef enum recipe { OURS, PAPER, T2T } recipe;

typedef struct preset {
  const char *name;
  int64_t layers, width, heads, feed_forward, vocabulary, max_length;
  int64_t k;
  int per_head;
  bool relative; /* else: sinusoidal positions and plain attention */
  bool language; /* a decoder alone */
  double dropout;
  recipe recipe;
  int64_t warmup, steps;
} preset;

static const preset presets[] = {
    /* layers, C, H, FF, V, length, k, per head, relative, language, dropout, recipe, ... */
    {"tiny", 2, 64, 4, 128, 256, 128, 4, 1, true, false, 0.1, OURS, 200, 5000},
    {"tiny-language", 2, 64, 4, 128, 256, 128, 4, 1, true, true, 0.1, OURS, 200, 5000},
    {"small", 2, 128, 4, 256, 8000, 256, 16, 1, true, false, 0.1, OURS, 1000, 20000},
    {"small-language", 2, 128, 4, 256, 8000, 256, 16, 1, true, true, 0.1, OURS, 1000, 20000},
    {"paper-base", 6, 512, 8, 1024, 32768, 512, 16, 1, true, false, 0.1, PAPER, 4000, 100000},
    {"paper-big", 6, 1024, 16, 4096, 32768, 512, 8, 0, true, false, 0.3, PAPER, 4000, 300000},
    {"paper-big-enfr", 6, 1024, 16, 4096, 32768, 512, 8, 0, true, false, 0.1, PAPER, 4000, 300000},
    {"paper-base-absolute", 6, 512, 8, 1024, 32768, 512, 16, 1, false, false, 0.1, PAPER, 4000,
     100000},
    {"paper-big-absolute", 6, 1024, 16, 4096, 32768, 512, 8, 0, false, false, 0.3, PAPER, 4000,
     300000},
    {"paper-big-enfr-absolute", 6, 1024, 16, 4096, 32768, 512, 8, 0, false, false, 0.1, PAPER, 4000,
     300000},
    {"t2t-relative", 6, 512, 8, 2048, 32768, 512, 20, 0, true, false, 0.1, T2T, 8000, 250000},
};

enum { PRESETS = sizeof presets / sizeof presets[0] };

const char *rpi_preset_name(int index) {
  return index >= 0 && index < PRESETS ? presets[index].name : NULL;
}

/* What a position is not asked for has values too, so that choosing another works at once. */
static rp_stack stack_of(const preset *p) {
  return (rp_stack){.layers = p->layers,
                    .absolute = p->relative ? RP_ABSOLUTE_NONE : RP_ABSOLUTE_SINUSOIDAL,
                    .sinusoid_interleaved = 1,
                    .sinusoid_rule = RP_FREQUENCIES_OPEN,
                    .position = p->relative ? RP_POSITION_SHAW : RP_POSITION_NONE,
                    .k = p->k,
                    .k_right = -1,
                    .beyond = RP_BEYOND_CLIP,
                    .key = 1,
                    .value = 1,
                    .per_layer = 1,
                    .per_head = p->per_head,
                    .relation_key = 1,
                    .relation_value = 1,
                    .buckets = 32,
                    .max_distance = 128,
                    .rope_base = 10000,
                    .rope_rule = RP_ROPE_LINEAR,
                    .rope_scaling = 1,
                    .window = -1};
}

static void train_as(rp_config *config, recipe how) {
  switch (how) {
    case OURS:
      config->norm = RP_NORM_PRE;
      config->schedule = RP_SCHEDULE_INVERSE_SQRT;
      config->learning_rate = 0.002;
      config->clip_norm = 1;
      break;
    case PAPER:
      config->norm = RP_NORM_POST;
      config->schedule = RP_SCHEDULE_NOAM;
      config->learning_rate = 1;
      break;
    case T2T:
      config->norm = RP_NORM_PRE;
      config->attention_dropout = config->activation_dropout = 0.1;
      config->smoothing = RP_SMOOTH_OTHERS;
      config->schedule = RP_SCHEDULE_NOAM;
      config->learning_rate = 2;
      config->beta2 = 0.997;
      break;
  }
}

static rp_config config_of(const preset *p) {
  rp_config config;
  memset(&config, 0, sizeof config); /* padding too: equal presets have equal bytes */
  config.struct_size = sizeof config;
  config.width = p->width;
  config.heads = p->heads;
  config.feed_forward = p->feed_forward;
  config.source_vocabulary = config.target_vocabulary = p->vocabulary;
  config.share_embeddings = config.share_output = config.scale_embeddings = 1;
  config.max_length = p->max_length;
  config.norm_epsilon = 1e-6;
  config.bias = 1;
  config.activation = RP_RELU;
  config.encoder = config.decoder = stack_of(p);
  if (p->language) config.encoder.layers = 0;
  config.dropout = p->dropout;
  config.label_smoothing = 0.1;
  config.smoothing = RP_SMOOTH_ALL;
  config.warmup = p->warmup;
  config.steps = p->steps;
  config.beta1 = 0.9;
  config.beta2 = 0.98;
  config.adam_epsilon = 1e-9;
  config.seed = 1;
  train_as(&config, p->recipe);
  return config;
}

rp_status rpi_config_preset(const char *name, rp_config *config) {
  for (int i = 0; i < PRESETS; i++) {
    if (strcmp(presets[i].name, name) != 0) continue;
    *config = config_of(&presets[i]);
    return RP_OK;
  }
  char typed[RPI_QUOTE];
  return rpi_fail(RP_ERROR_ARGUMENT, "config: there is no preset %s; the nearest is '%s'",
                  rpi_quote(name, typed), rpi_nearest(name, rpi_preset_name, NULL));
}
