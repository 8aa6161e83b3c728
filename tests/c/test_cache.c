/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cache.c: targets read token by token, in one pass, or both in turn, are what the whole pass
 * of training says, for every position scheme; and so are rows that part and are reordered.
 */
#include "decode/cache.h"

#include "layer.h"

enum { SENTENCES = 3, MOST = 14, ROWS = 24 };

static const int64_t source_offsets[] = {0, 6, 6, 11};
static const int64_t target_offsets[] = {0, 9, 20, 24}; /* of whole targets */
static int32_t source[11], target[24];

typedef struct variant {
  const char *position;
  const char *fields[8]; /* name, value, ... of further ones */
} variant;

static const variant variants[] = {
    {"none", {"decoder.absolute", "sinusoidal"}},
    {"none", {"decoder.absolute", "learned", "norm", "post", "activation", "gelu"}},
    {"shaw", {"decoder.k", "3"}},
    {"shaw", {"decoder.k", "0", "bias", "false", "activation", "swiglu"}},
    {"shaw", {"decoder.k", "2", "decoder.beyond", "none", "decoder.per_head", "false"}},
    {"shaw", {"decoder.k", "4", "decoder.tied", "true", "decoder.per_layer", "false"}},
    {"shaw", {"decoder.value_per_layer", "false", "decoder.value_per_head", "false"}},
    {"shaw", {"decoder.per_layer", "false", "decoder.value_per_layer", "true"}},
    {"shaw", {"decoder.k", "13", "decoder.value", "false", "norm", "post"}},
    {"shaw", {"decoder.k", "5", "decoder.key", "false", "decoder.window", "4"}},
    {"transformer-xl", {"decoder.softcap", "2"}},
    {"transformer-xl", {"decoder.clamp", "4"}},
    {"music", {NULL}},
    {"t5", {"decoder.buckets", "8", "decoder.max_distance", "9"}},
    {"deberta", {"decoder.buckets", "6", "decoder.max_distance", "9"}},
    {"deberta", {"decoder.buckets", "0", "decoder.key", "false"}},
    {"relative-key", {NULL}},
    {"relative-key-query", {"decoder.window", "3"}},
    {"alibi", {NULL}},
    {"alibi-learned", {"norm", "post"}},
    {"rope", {NULL}},
    {"rope", {"decoder.rope_width", "4", "decoder.rope_interleaved", "true"}},
    {"shaw", {"key_heads", "1"}},
    {"rope", {"heads", "4", "key_heads", "2"}},
    {"transformer-xl", {"heads", "6", "key_heads", "2", "norm", "post"}},
    {"shaw", {"encoder.layers", "0"}},
    {"rope", {"encoder.layers", "0", "norm", "post"}},
};

static rp_model *make(const variant *v) {
  rp_config config = rp_config_default();
  config.width = 24;
  config.heads = 3;
  config.feed_forward = 20;
  config.source_vocabulary = config.target_vocabulary = 17;
  config.max_length = MOST;
  config.decoder.layers = 2;
  CHECK_INT(rp_config_set(&config, "decoder.position", v->position), RP_OK);
  for (int i = 0; i < 8 && v->fields[i]; i += 2) {
    CHECK_INT(rp_config_set(&config, v->fields[i], v->fields[i + 1]), RP_OK);
  }
  rp_limits limits = rp_limits_default();
  limits.tokens = ROWS;
  limits.sentences = SENTENCES;
  limits.training = 0;
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  for (int64_t p = 0; model && p < rp_model_parameter_count(model); p++) {
    rp_parameter at = {.struct_size = sizeof at};
    CHECK_INT(rp_model_parameter(model, p, &at), RP_OK);
    for (int64_t i = 0; i < at.count; i++) at.data[i] += (real)0.3 * number();
  }
  return model;
}

static rp_batch batch_of(const rp_model *model) {
  rp_batch batch = rp_batch_default();
  batch.sentences = SENTENCES;
  batch.target = target;
  batch.target_offsets = target_offsets;
  if (model->config.encoder.layers != 0) {
    batch.source = source;
    batch.source_offsets = source_offsets;
  }
  return batch;
}

/* Sums of some hundred products in a row, through 2 layers and norms that may enlarge them; the
 * double build holds the same bound with its own roundings. */
static const double bound = 3000 * UNIT;

static void check_row(const char *what, const variant *v, const rp_model *model, int64_t row,
                      const real *expected) {
  const int64_t C = model->config.width;
  const real *const out = model->stack[RPI_DECODER].out + row * C;
  for (int64_t c = 0; c < C; c++) {
    const double difference = fabs((double)out[c] - (double)expected[c]);
    if (!(difference <= bound)) {
      printf("%s, %s: row %lld column %lld off by %g\n", v->position, what, (long long)row,
             (long long)c, difference);
    }
    CHECK(difference <= bound);
  }
}

/* What every place of the targets gives in one pass. */
static void whole_pass(rp_model *model, real *hidden) {
  const rp_batch batch = batch_of(model);
  CHECK_INT(rp_model_hidden(model, &batch, hidden), RP_OK);
}

static rpi_run run_of(rp_model *model, const int32_t *ids, const int64_t *offsets) {
  rpi_run run = {.model = model, .sentences = SENTENCES};
  if (model->config.encoder.layers != 0) {
    run.side[RPI_ENCODER] =
        (rpi_side){.rows = source_offsets[SENTENCES], .ids = source, .offsets = source_offsets};
  }
  run.side[RPI_DECODER] = (rpi_side){.rows = offsets[SENTENCES], .ids = ids, .offsets = offsets};
  return run;
}

/* Begins with the first `first` tokens of every target (fewer where that has no more). */
static void begin(rpi_cache *cache, rp_model *model, int64_t first, int64_t *at) {
  int32_t ids[ROWS];
  int64_t offsets[SENTENCES + 1] = {0};
  for (int b = 0; b < SENTENCES; b++) {
    const int64_t length = target_offsets[b + 1] - target_offsets[b];
    at[b] = first < length ? first : length;
    for (int64_t i = 0; i < at[b]; i++) ids[offsets[b] + i] = target[target_offsets[b] + i];
    offsets[b + 1] = offsets[b] + at[b];
  }
  const rpi_run run = run_of(model, ids, offsets);
  const rpi_cache_start start = {.most_rows = ROWS, .most_length = MOST, .attention = true};
  CHECK_INT(rpi_cache_begin(cache, &run, &start), RP_OK);
}

/* Attention of a row's last token to the source, against the maps of the whole pass. */
static void check_attention(const variant *v, rpi_cache *cache, rp_model *model, int64_t row,
                            int sentence, int64_t place) {
  const int64_t keys = source_offsets[sentence + 1] - source_offsets[sentence];
  if (model->config.encoder.layers == 0 || keys == 0) return;
  real mean[MOST], map[MOST * MOST], expected[MOST] = {0};
  memcpy(mean, rpi_cache_attention(cache, row), (size_t)keys * sizeof *mean);
  const rp_batch batch = batch_of(model);
  for (int64_t h = 0; h < model->config.heads; h++) {
    CHECK_INT(rp_model_attention_map(model, &batch, RP_ATTENTION_CROSS, 1, h, sentence,
                                     RP_SHOW_PROBABILITIES, map),
              RP_OK);
    for (int64_t j = 0; j < keys; j++)
      expected[j] += map[place * keys + j] / (real)model->config.heads;
  }
  for (int64_t j = 0; j < keys; j++) {
    const double difference = fabs((double)mean[j] - (double)expected[j]);
    if (!(difference <= bound)) printf("%s: attention off by %g\n", v->position, difference);
    CHECK(difference <= bound);
  }
}

/* From `first` tokens on one at a time, rows being turned around at every step. */
static void test_steps(const variant *v, rp_model *model, rpi_cache *cache, const real *hidden,
                       int64_t first) {
  const int64_t C = model->config.width;
  int64_t at[SENTENCES];
  begin(cache, model, first, at);
  int64_t rows = SENTENCES;
  int32_t owner[SENTENCES] = {0, 1, 2};
  for (;;) {
    for (int64_t r = 0; r < rows; r++) {
      CHECK_INT(rpi_cache_length(cache, r), at[owner[r]]);
      check_row("token by token", v, model, r,
                hidden + (target_offsets[owner[r]] + at[owner[r]] - 1) * C);
    }
    int64_t left = 0;
    int32_t parents[SENTENCES], tokens[SENTENCES], next[SENTENCES];
    for (int64_t r = rows - 1; r >= 0; r--) { /* those that go on, from last to first */
      const int32_t b = owner[r];
      if (at[b] == target_offsets[b + 1] - target_offsets[b]) continue;
      parents[left] = (int32_t)r;
      next[left] = b;
      tokens[left++] = target[target_offsets[b] + at[b]++];
    }
    if (left == 0) break;
    rows = left;
    memcpy(owner, next, sizeof owner);
    CHECK_INT(rpi_cache_step(cache, rows, parents, tokens), RP_OK);
  }
  const int last = owner[rows - 1];
  if (rows > 0) check_attention(v, cache, model, rows - 1, last, at[last] - 1);
}

/* Two rows of one sentence that part, one of them the target itself, and come back in turn. */
static void test_rows_part(const variant *v, rp_model *model, rpi_cache *cache,
                           const real *hidden) {
  const int64_t C = model->config.width;
  int64_t at[SENTENCES];
  begin(cache, model, 2, at);
  const int64_t length = target_offsets[2] - target_offsets[1];
  int32_t parents[] = {1, 1, 0}, tokens[3];
  for (int64_t i = 2; i < length; i++) {
    const int own = (int)(i % 2); /* the row of the target itself */
    tokens[own] = target[target_offsets[1] + i];
    tokens[1 - own] = (target[target_offsets[1] + i] + 5) % 17;
    tokens[2] = 3;
    if (i > 2) {
      parents[own] = 1 - own; /* where it was */
      parents[1 - own] = i % 3 == 0 ? 1 - own : own;
      parents[2] = 2;
    }
    CHECK_INT(rpi_cache_step(cache, i < 6 ? 3 : 2, parents, tokens), RP_OK);
    check_row("rows that part", v, model, own, hidden + (target_offsets[1] + i) * C);
  }
}

static void test_variant(const variant *v) {
  rp_model *const model = make(v);
  rpi_cache *cache = NULL;
  real hidden[ROWS * 24];
  if (!model || rpi_cache_create(model, &cache) != RP_OK) return;
  const int64_t numbers = 2 * rpi_key_heads(&model->config) * rpi_head_width(&model->config);
  CHECK(rpi_kept_stride(model) < numbers + 32); /* what a token takes: heads that share keys less */
  whole_pass(model, hidden);
  const int64_t first[] = {1, 2, 5, 11, 1};
  for (int i = 0; i < 5; i++) test_steps(v, model, cache, hidden, first[i]);
  test_rows_part(v, model, cache, hidden);
  rpi_cache_free(cache);
  rp_model_free(model);
}

static void test_no_sentences(void) {
  rp_model *const model = make(&variants[2]);
  rpi_cache *cache = NULL;
  CHECK_INT(rpi_cache_create(model, &cache), RP_OK);
  const int64_t offsets[] = {0};
  rpi_run run = {.model = model};
  run.side[RPI_ENCODER].offsets = run.side[RPI_DECODER].offsets = offsets;
  const rpi_cache_start start = {.most_rows = 4, .most_length = MOST};
  CHECK_INT(rpi_cache_begin(cache, &run, &start), RP_OK);
  const rpi_cache_start wide = {.most_rows = ROWS + 1, .most_length = MOST};
  CHECK_INT(rpi_cache_begin(cache, &run, &wide), RP_ERROR_SHAPE);
  CHECK(strstr(rp_last_error(), "25 rows") != NULL);
  rpi_cache_free(cache);
  rpi_cache_free(NULL);
  rp_model_free(model);
}

int main(void) {
  for (int i = 0; i < 11; i++) source[i] = (int32_t)(draw() % 17);
  for (int i = 0; i < 24; i++) target[i] = (int32_t)(draw() % 17);
  for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) test_variant(&variants[i]);
  test_no_sentences();
  return check_report();
}
