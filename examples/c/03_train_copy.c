/* SPDX-License-Identifier: Apache-2.0
 *
 * 03_train_copy.c: trains a Transformer with relative positions to repeat a sentence backwards.
 *
 *   cc 03_train_copy.c $(pkg-config --cflags --libs relpos) -o train_copy && ./train_copy
 *
 * Sentences are random words; the decoder reads BEGIN and the sentence backwards and predicts each
 * next word. There are no absolute positions: what is where is known from distances alone. The
 * program ends well once 20 batches that it has never seen are predicted without a mistake.
 */
#include <relpos/model.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 1500, SENTENCES = 64, LONGEST = 10, WORDS = 32, BEGIN = 0, END = 1, FIRST_WORD = 2 };

#define CHECK(call)                                                                                \
  do {                                                                                             \
    if ((call) != RP_OK) {                                                                         \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, rp_last_error());                         \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

/* One batch and the memory it points into. */
typedef struct task {
  int64_t source_offsets[SENTENCES + 1], target_offsets[SENTENCES + 1];
  int32_t source[SENTENCES * LONGEST];
  int32_t target[SENTENCES * (LONGEST + 1)], labels[SENTENCES * (LONGEST + 1)];
} task;

/* Numbers from 0 to below `most`, the same in every run. */
static uint32_t draw(uint32_t *state, uint32_t most) {
  *state = *state * 1664525u + 1013904223u;
  return (uint32_t)(((uint64_t)*state * most) >> 32);
}

static rp_batch make_batch(task *t, uint32_t *state) {
  int64_t from = 0, to = 0;
  t->source_offsets[0] = t->target_offsets[0] = 0;
  for (int b = 0; b < SENTENCES; b++) {
    const int length = 1 + (int)draw(state, LONGEST);
    for (int i = 0; i < length; i++) {
      t->source[from + i] = FIRST_WORD + (int32_t)draw(state, WORDS - FIRST_WORD);
    }
    t->target[to] = BEGIN;
    for (int i = 0; i < length; i++) {
      t->target[to + 1 + i] = t->labels[to + i] = t->source[from + length - 1 - i];
    }
    t->labels[to + length] = END;
    t->source_offsets[b + 1] = from += length;
    t->target_offsets[b + 1] = to += length + 1;
  }
  rp_batch batch = rp_batch_default();
  batch.sentences = SENTENCES;
  batch.source = t->source;
  batch.source_offsets = t->source_offsets;
  batch.target = t->target;
  batch.target_offsets = t->target_offsets;
  batch.labels = t->labels;
  return batch;
}

/* The share of words predicted right in batches that training has not seen. */
static double test(rp_model *model, int batches) {
  static task t;
  uint32_t state = 4711;
  double right = 0, words = 0;
  for (int i = 0; i < batches; i++) {
    const rp_batch batch = make_batch(&t, &state);
    rp_result result = {.struct_size = sizeof result};
    CHECK(rp_model_forward(model, &batch, 0, &result));
    right += result.accuracy * (double)result.tokens;
    words += (double)result.tokens;
  }
  return right / words;
}

int main(void) {
  rp_config config;
  CHECK(rp_config_preset("tiny", &config));
  config.source_vocabulary = config.target_vocabulary = WORDS;
  config.encoder.k = config.decoder.k = LONGEST;
  config.max_length = LONGEST + 1;
  config.dropout = config.attention_dropout = config.activation_dropout = 0;
  config.label_smoothing = 0;
  config.schedule = RP_SCHEDULE_COSINE;
  config.learning_rate = 3e-3;
  config.warmup = 100;
  config.steps = STEPS;

  rp_limits limits = rp_limits_default();
  limits.tokens = SENTENCES * (LONGEST + 1);
  limits.sentences = SENTENCES;
  rp_memory memory = {.struct_size = sizeof memory};
  CHECK(rp_model_memory(&config, &limits, &memory));
  printf("the model takes %.1f MiB\n", (double)memory.total / (1 << 20));
  rp_model *model = NULL;
  CHECK(rp_model_create(&config, &limits, &model));

  static task t;
  uint32_t state = 1;
  double share = 0;
  for (int step = 1; step <= STEPS && share < 1; step++) {
    const rp_batch batch = make_batch(&t, &state);
    rp_result result = {.struct_size = sizeof result};
    CHECK(rp_model_step(model, &batch, 1, &result));
    if (step % 100 != 0) continue;
    printf("step %4d: loss %.4f, %5.1f %% right\n", step, result.loss, 100 * result.accuracy);
    if (result.accuracy == 1) share = test(model, 20);
  }
  printf("new sentences: %.2f %% right\n", 100 * share);
  rp_model_free(model);
  printf("%s\n", share == 1 ? "all as it should be" : "it has not learned");
  return share == 1 ? 0 : 1;
}
