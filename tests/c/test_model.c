/* SPDX-License-Identifier: Apache-2.0
 *
 * test_model.c: memory of a model: told before it is taken, taken once, and every failure of it
 * harmless. Steps, gradients and files are tested from Python (tests/test_model*.py).
 */
#include "base/memory.h"
#include "check.h"
#include "file/model_file.h"
#include "relpos/decode.h"
#include "relpos/model.h"
#include "tables.h"

#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>

/* An allocator that counts, and fails at one call. */
typedef struct ledger {
  int64_t calls, fail_at; /* -1: never */
  int64_t held;           /* bytes not yet released */
  int64_t most;           /* the most there were */
} ledger;

/* The size stands before the memory. */
static void *allocate(void *context, size_t bytes) {
  ledger *const l = context;
  if (l->calls++ == l->fail_at) return NULL;
  char *const memory = aligned_alloc(RPI_ALIGN, (bytes / RPI_ALIGN + 2) * RPI_ALIGN);
  if (!memory) return NULL;
  *(int64_t *)memory = (int64_t)bytes;
  l->held += (int64_t)bytes;
  if (l->held > l->most) l->most = l->held;
  return memory + RPI_ALIGN;
}

static void release(void *context, void *memory) {
  ledger *const l = context;
  if (!memory) return;
  l->held -= *(int64_t *)((char *)memory - RPI_ALIGN);
  free((char *)memory - RPI_ALIGN);
}

/* ---- one small model and its batch ------------------------------------------ */

enum { SENTENCES = 3, TOKENS = 12 };

static const int32_t ids[TOKENS] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8};
static const int64_t source_offsets[] = {0, 5, 6, 12}, target_offsets[] = {0, 2, 9, 12};

static rp_batch batch_of(void) {
  rp_batch batch = rp_batch_default();
  batch.sentences = SENTENCES;
  batch.source = batch.target = batch.labels = ids;
  batch.source_offsets = source_offsets;
  batch.target_offsets = target_offsets;
  return batch;
}

static rp_config config_of(const char *position) {
  rp_config config = rp_config_default();
  config.width = 16;
  config.heads = 2;
  config.feed_forward = 24;
  config.max_length = 20;
  config.ema = 0.5;
  CHECK_INT(rp_config_set(&config, "encoder.position", position), RP_OK);
  CHECK_INT(rp_config_set(&config, "decoder.position", position), RP_OK);
  return config;
}

static rp_limits limits_of(int recompute) {
  rp_limits limits = rp_limits_default();
  limits.tokens = 40;
  limits.sentences = 4;
  limits.recompute = recompute;
  return limits;
}

/* The weights, one after the other, as a number that any change of a bit changes. */
static uint64_t digest(rp_model *model) {
  uint64_t hash = 1469598103934665603u;
  for (int64_t p = 0; p < rp_model_parameter_count(model); p++) {
    rp_parameter at = {.struct_size = sizeof at};
    CHECK_INT(rp_model_parameter(model, p, &at), RP_OK);
    const rp_real *const arrays[] = {at.data, at.moment1, at.moment2, at.average};
    for (int a = 0; a < 4; a++) {
      const unsigned char *const bytes = (const unsigned char *)arrays[a];
      for (size_t i = 0; i < (size_t)at.count * sizeof(rp_real); i++) {
        hash = (hash ^ bytes[i]) * 1099511628211u;
      }
    }
  }
  return hash;
}

static void step(rp_model *model, rp_status expected) {
  const rp_batch batch = batch_of();
  rp_result result = {.struct_size = sizeof result};
  CHECK_INT(rp_model_step(model, &batch, 1, &result), expected);
}

/* ---- told, and taken --------------------------------------------------------- */

static void test_memory_is_what_was_told(const char *position, int recompute, int training) {
  const rp_config config = config_of(position);
  rp_limits limits = limits_of(recompute);
  limits.training = training;
  rp_memory told = {.struct_size = sizeof told};
  CHECK_INT(rp_model_memory(&config, &limits, &told), RP_OK);
  ledger l = {.fail_at = -1};
  const rpi_allocator allocator = {allocate, release, &l};
  rpi_set_allocator(&allocator);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  const int64_t taken = l.held;
  /* but for the struct itself */
  CHECK(taken >= told.total);
  CHECK(taken <= told.total + (int64_t)sizeof(struct rp_model));
  CHECK_INT(told.total, told.parameters + told.gradients + told.moments + told.average +
                            told.constants + told.activations + told.workspace);
  CHECK((told.gradients == 0) == !training);
  CHECK((told.moments == 0) == !training);
  rp_model_free(model);
  CHECK_INT(l.held, 0);
  rpi_set_allocator(NULL);
}

/* Steps allocate nothing, not even the first of a shape that was planned for. */
static void test_steps_allocate_nothing(void) {
  const rp_config config = config_of("shaw");
  const rp_limits limits = limits_of(0);
  ledger l = {.fail_at = -1};
  const rpi_allocator allocator = {allocate, release, &l};
  rpi_set_allocator(&allocator);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  step(model, RP_OK);
  const int64_t calls = l.calls;
  for (int i = 0; i < 3; i++) step(model, RP_OK);
  const rp_batch batch = batch_of();
  rp_real scores[TOKENS];
  CHECK_INT(rp_model_forward(model, &batch, 0, NULL), RP_OK);
  CHECK_INT(rp_model_score(model, &batch, scores, NULL), RP_OK);
  CHECK_INT(l.calls, calls);
  rp_model_free(model);
  CHECK_INT(l.held, 0);
  rpi_set_allocator(NULL);
}

static uint32_t drawn = 1;
static int64_t draw(int64_t below) {
  drawn = drawn * 1664525u + 1013904223u;
  return (int64_t)((uint64_t)drawn * (uint64_t)below >> 32);
}

/* Offsets of sentences of any lengths that the limits allow: short and long ones, all in one, none.
 */
static void draw_offsets(const rp_config *config, const rp_limits *limits, int64_t sentences,
                         int64_t *offsets) {
  const int64_t kind = draw(5), whole = config->max_length;
  offsets[0] = 0;
  for (int64_t b = 0; b < sentences; b++) {
    int64_t length = draw(whole + 1);
    if (kind == 0) length = whole;
    if (kind == 1) length = draw(2);
    if (kind == 2) length = b == 0 ? whole : draw(3);
    if (kind == 3) length = b + 1 == sentences ? whole : 0;
    if (length > whole) length = whole;
    const int64_t left = limits->tokens - offsets[b];
    offsets[b + 1] = offsets[b] + (length < left ? length : left);
  }
}

/* No step within the limits allocates, whatever the lengths: all was planned. */
static void test_no_batch_allocates(const char *position, double softcap, double dropout) {
  enum { MOST = 300, MOST_SENTENCES = 40 };
  static int32_t tokens[MOST];
  rp_config config = config_of(position);
  config.max_length = 1 + draw(200);
  config.encoder.softcap = config.decoder.softcap = softcap;
  config.attention_dropout = dropout;
  rp_limits limits = limits_of(0);
  limits.tokens = 1 + draw(MOST);
  limits.sentences = 1 + draw(MOST_SENTENCES);
  ledger l = {.fail_at = -1};
  const rpi_allocator allocator = {allocate, release, &l};
  rpi_set_allocator(&allocator);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  const int64_t calls = l.calls;
  for (int i = 0; i < (is_small_run() ? 3 : 12); i++) {
    int64_t source[MOST_SENTENCES + 1], target[MOST_SENTENCES + 1];
    rp_batch batch = batch_of();
    batch.sentences = 1 + draw(limits.sentences);
    draw_offsets(&config, &limits, batch.sentences, source);
    draw_offsets(&config, &limits, batch.sentences, target);
    batch.source = batch.target = batch.labels = tokens;
    batch.source_offsets = source;
    batch.target_offsets = target;
    rp_result result = {.struct_size = sizeof result};
    CHECK_INT(rp_model_step(model, &batch, 1, &result), RP_OK);
    if (!CHECK_INT(l.calls, calls)) fprintf(stderr, "%s\n", position);
  }
  rp_model_free(model);
  rpi_set_allocator(NULL);
}

/* A sentence that fills a chunk of attention's takes more than a longer one, cut in two. */
static void test_no_chunk_allocates(void) {
  enum { FULL = 8 };
  static int32_t tokens[FULL * 1024];
  for (int64_t length = 512; length <= (is_small_run() ? 512 : 1024); length *= 2) {
    rp_config config = config_of("none");
    config.max_length = length + 52;
    rp_limits limits = limits_of(0);
    limits.tokens = FULL * length;
    limits.sentences = FULL;
    ledger l = {.fail_at = -1};
    const rpi_allocator allocator = {allocate, release, &l};
    rpi_set_allocator(&allocator);
    rp_model *model = NULL;
    CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
    const int64_t calls = l.calls;
    int64_t offsets[FULL + 1];
    for (int64_t b = 0; b <= FULL; b++) offsets[b] = b * length;
    rp_batch batch = batch_of();
    batch.sentences = FULL;
    batch.source = batch.target = batch.labels = tokens;
    batch.source_offsets = batch.target_offsets = offsets;
    rp_result result = {.struct_size = sizeof result};
    CHECK_INT(rp_model_step(model, &batch, 1, &result), RP_OK);
    CHECK_INT(l.calls, calls);
    rp_model_free(model);
    rpi_set_allocator(NULL);
  }
}

/* ---- every allocation failing in turn ---------------------------------------- */

static void test_create_without_memory(void) {
  const rp_config config = config_of("transformer-xl");
  const rp_limits limits = limits_of(0);
  for (int64_t fail_at = 0;; fail_at++) {
    ledger l = {.fail_at = fail_at};
    const rpi_allocator allocator = {allocate, release, &l};
    rpi_set_allocator(&allocator);
    rp_model *model = (rp_model *)&l; /* to be set to NULL */
    const rp_status status = rp_model_create(&config, &limits, &model);
    const bool failed = l.calls > fail_at;
    CHECK_INT(status, failed ? RP_ERROR_MEMORY : RP_OK);
    if (failed) {
      CHECK_TEXT(rp_last_error(), "no memory");
      CHECK(model == NULL);
    }
    rp_model_free(model);
    CHECK_INT(l.held, 0);
    rpi_set_allocator(NULL);
    if (!failed) {
      CHECK(fail_at >= 5); /* there were so many to fail */
      break;
    }
    if (!CHECK(fail_at < 100)) break;
  }
}

/* A step that needs more workspace than was planned, because there are more threads now, fails
 * without a trace; the next one is as if it had never been. */
static void test_step_without_memory(void) {
  const rp_config config = config_of("shaw");
  const rp_limits limits = limits_of(0);
  rp_model *model = NULL, *other = NULL;
  rp_set_threads(1);
  ledger l = {.fail_at = -1};
  const rpi_allocator allocator = {allocate, release, &l};
  rpi_set_allocator(&allocator);
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  CHECK_INT(rp_model_create(&config, &limits, &other), RP_OK);
  step(model, RP_OK);
  step(other, RP_OK);
  const uint64_t before = digest(model);
  rp_set_threads(8);
  l.fail_at = l.calls;
  step(model, RP_ERROR_MEMORY);
  CHECK_TEXT(rp_last_error(), "no memory for attention's workspace");
  CHECK(digest(model) == before);
  l.fail_at = -1;
  step(model, RP_OK);
  step(other, RP_OK);
  CHECK(digest(model) == digest(other));
  CHECK(digest(model) != before);
  rp_model_free(model);
  rp_model_free(other);
  CHECK_INT(l.held, 0);
  rpi_set_allocator(NULL);
  rp_set_threads(0);
}

/* Two batches of which the second takes more workspace than the first. */
static void growing(rp_batch batches[2]) {
  static const int32_t tokens[40] = {3, 1, 4, 1, 5, 9, 2, 6};
  static const int64_t offsets[] = {0, 20, 33, 40};
  batches[0] = batches[1] = batch_of();
  batches[0].sentences = 2;
  batches[1].source = batches[1].target = batches[1].labels = tokens;
  batches[1].source_offsets = batches[1].target_offsets = offsets;
}

static rp_status step_both(rp_model *model) {
  rp_batch batches[2];
  rp_result result = {.struct_size = sizeof result};
  growing(batches);
  return rp_model_step(model, batches, 2, &result);
}

static rp_status backward_both(rp_model *model) {
  rp_batch batches[2];
  growing(batches);
  const rp_status status = rp_model_backward(model, &batches[0], NULL);
  return status == RP_OK ? rp_model_backward(model, &batches[1], NULL) : status;
}

/* With one thread; more of them, set afterwards, take more workspace than was planned. */
static rp_model *stepped(const char *position, int recompute) {
  rp_config config = config_of(position);
  const rp_limits limits = limits_of(recompute);
  rp_model *model = NULL;
  config.dropout = config.attention_dropout = 0.1; /* masks tell of an attempt that was counted */
  rp_set_threads(1);
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  step(model, RP_OK);
  rp_set_threads(8);
  return model;
}

/* Whichever allocation fails, of the first batch or the second: weights stay, what was accumulated
 * is dropped, and the next step is as if the call had never been. */
static void test_no_call_without_memory(const char *position, int recompute,
                                        rp_status (*call)(rp_model *)) {
  for (int64_t fail_at = 0;; fail_at++) {
    ledger l = {.fail_at = -1};
    const rpi_allocator allocator = {allocate, release, &l};
    rpi_set_allocator(&allocator);
    rp_model *const model = stepped(position, recompute);
    rp_model *const other = stepped(position, recompute);
    const uint64_t before = digest(model);
    l.fail_at = l.calls + fail_at;
    const rp_status status = call(model);
    const bool failed = l.calls > l.fail_at;
    CHECK_INT(status, failed ? RP_ERROR_MEMORY : RP_OK);
    if (failed) {
      CHECK_TEXT(rp_last_error(), "no memory for attention's workspace");
      CHECK(digest(model) == before);
      CHECK_INT(rp_model_update(model, NULL), RP_ERROR_ORDER);
      l.fail_at = -1;
      const int64_t calls = l.calls;
      CHECK_INT(step_both(model), RP_OK);
      CHECK(l.calls > calls); /* it asks again for what it did not get */
      CHECK_INT(step_both(other), RP_OK);
      CHECK(digest(model) == digest(other));
      CHECK(digest(model) != before);
    }
    rp_model_free(model);
    rp_model_free(other);
    CHECK_INT(l.held, 0);
    rpi_set_allocator(NULL);
    if (!failed) {
      CHECK_INT(fail_at, 2); /* one of each batch */
      break;
    }
    if (!CHECK(fail_at < 100)) break;
  }
  rp_set_threads(0);
}

static void test_files_without_memory(void) {
  const rp_config config = config_of("shaw");
  const rp_limits limits = limits_of(0);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  const uint64_t before = digest(model);
  char path[] = "test_model.safetensors";
  CHECK_INT(rp_model_save(model, path, RP_SAVE_OPTIMIZER), RP_OK);
  for (int64_t fail_at = 0; fail_at < 50; fail_at++) {
    ledger l = {.fail_at = fail_at};
    const rpi_allocator allocator = {allocate, release, &l};
    rpi_set_allocator(&allocator);
    const rp_status loaded = rp_model_load(model, path, RP_SAVE_OPTIMIZER);
    const bool load_failed = l.calls > fail_at;
    CHECK_INT(loaded, load_failed ? RP_ERROR_MEMORY : RP_OK);
    l.calls = 0;
    const rp_status saved = rp_model_save(model, path, RP_SAVE_OPTIMIZER);
    const bool save_failed = l.calls > fail_at;
    CHECK_INT(saved, save_failed ? RP_ERROR_MEMORY : RP_OK);
    CHECK_INT(l.held, 0);
    rpi_set_allocator(NULL);
    CHECK(digest(model) == before);
    if (!load_failed && !save_failed) break;
    CHECK(fail_at < 49);
  }
  remove(path);
  rp_model_free(model);
}

/* Sizes near the limits are told at once, or refused with a sentence. */
static void test_huge(void) {
  rp_config config = config_of("transformer-xl");
  rp_limits limits = limits_of(0);
  rp_memory told = {.struct_size = sizeof told};
  limits.tokens = limits.sentences = INT32_MAX;
  CHECK_INT(rp_model_memory(&config, &limits, &told), RP_OK);
  CHECK(told.total > (int64_t)1 << 36);
  config.encoder.absolute = config.decoder.absolute = RP_ABSOLUTE_SINUSOIDAL;
  config.max_length = 1 << 15;
  config.width = 1 << 16;
  CHECK_INT(rp_model_memory(&config, &limits, &told), RP_OK);
  CHECK(told.constants > (int64_t)1 << 32);
  config = config_of("shaw");
  config.width = 65536;
  config.head_width = 4096;
  config.feed_forward = 1 << 19;
  config.activation = RP_SWIGLU;
  config.encoder.layers = 1024;
  CHECK_INT(rp_model_memory(&config, &limits, &told), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "its memory overflows; limits.tokens=2147483647");
}

/* ---- arguments that no other test can give ------------------------------------ */

static void test_null(void) {
  rp_config config = rp_config_default();
  rp_limits limits = rp_limits_default();
  rp_memory memory = {.struct_size = 1};
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, NULL, &model), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_create(NULL, &limits, &model), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_create(&config, &limits, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_memory(&config, &limits, &memory), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "memory.struct_size=1");
  CHECK_INT(rp_model_memory(&config, &limits, NULL), RP_ERROR_ARGUMENT);
  limits.tokens = 0;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "limits.tokens=0");
  limits = rp_limits_default();
  limits.struct_size = 3;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "limits.struct_size=3");
  CHECK(model == NULL);
  CHECK_INT(rp_model_step(NULL, NULL, 1, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_parameter_count(NULL), 0);
  CHECK(rp_model_config(NULL) == NULL);
  rp_model_free(NULL);
}

static void test_arguments(void) {
  const rp_config config = config_of("shaw");
  const rp_limits limits = limits_of(0);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  rp_batch batch = batch_of();
  rp_result result = {.struct_size = 5};
  CHECK_INT(rp_model_step(model, &batch, 1, &result), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "result.struct_size=5");
  CHECK_INT(rp_model_step(model, &batch, 0, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_step(model, NULL, 1, NULL), RP_ERROR_ARGUMENT);
  batch.struct_size = 0;
  CHECK_INT(rp_model_step(model, &batch, 1, NULL), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "start from rp_batch_default()");
  batch = batch_of();
  const int64_t falling[] = {0, 5, 4, 12}, late[] = {1, 5, 6, 12};
  batch.source_offsets = falling;
  CHECK_INT(rp_model_forward(model, &batch, 0, NULL), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "source_offsets[2]=4 after 5");
  batch.source_offsets = late;
  CHECK_INT(rp_model_forward(model, &batch, 0, NULL), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "source_offsets[0]=1");
  batch = batch_of();
  batch.target_graphs.labels = ids;
  CHECK_INT(rp_model_forward(model, &batch, 0, NULL), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "target_graphs are given, but the model has relations=0");
  batch = batch_of();
  CHECK_INT(rp_model_score(model, &batch, NULL, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_hidden(model, &batch, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_set_counters(model, 3, 2), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_save(model, NULL, RP_SAVE_WEIGHTS), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_save(model, "x", 7), RP_ERROR_ARGUMENT);
  rp_parameter parameter = {.struct_size = sizeof parameter};
  CHECK_INT(rp_model_parameter(model, -1, &parameter), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_parameter(model, 1, &parameter), RP_OK);
  rp_real *place = NULL;
  CHECK_INT(rp_model_place(model, 1, RP_ARRAY_WEIGHTS, &place), RP_OK);
  CHECK(place == parameter.data);
  CHECK_INT(rp_model_place(model, 1, RP_ARRAY_AVERAGE, &place), RP_OK);
  CHECK(place == parameter.average);
  CHECK_INT(rp_model_place(model, -1, RP_ARRAY_WEIGHTS, &place), RP_ERROR_ARGUMENT);
  CHECK(place == NULL);
  CHECK_INT(rp_model_place(model, 1, RP_ARRAY_WEIGHTS, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_forward(model, &batch, 0, NULL), RP_OK);
  rp_model_free(model);
}

/* Of steps that nobody waits for the last eight are kept; one whose result is asked for at once
 * takes none of them away. */
static void test_results_that_are_kept(void) {
  const rp_config config = config_of("shaw");
  const rp_limits limits = limits_of(0);
  const rp_batch batch = batch_of();
  rp_model *model = NULL;
  rp_result result = {.struct_size = sizeof result};
  int64_t begun = 0, ready = 0;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  for (int64_t steps = 1; steps <= 30; steps++) {
    const bool waits = steps % 10 == 0;
    CHECK_INT(rp_model_step(model, &batch, 1, waits ? &result : NULL), RP_OK);
    if (waits) CHECK_INT(result.attempt, steps);
    CHECK_INT(rp_model_results(model, &begun, &ready), RP_OK);
    CHECK_INT(begun, steps < 8 ? steps : 8);
    CHECK_INT(ready, begun);
  }
  for (int64_t attempt = 22; attempt <= 29; attempt++) {
    CHECK_INT(rp_model_result(model, &result), RP_OK);
    CHECK_INT(result.attempt, attempt);
    CHECK_INT(result.step, attempt);
  }
  CHECK_INT(rp_model_result(model, &result), RP_ERROR_ORDER);
  rp_model_free(model);
}

/* With the average: other figures, the same weights, also after a batch that is refused. */
static void test_forward_average(void) {
  rp_config config = config_of("shaw");
  const rp_limits limits = limits_of(0);
  rp_model *model = NULL;
  rp_batch batch = batch_of();
  rp_result own = {.struct_size = sizeof own}, average = own, again = own;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  for (int i = 0; i < 3; i++) step(model, RP_OK);
  const uint64_t before = digest(model);
  CHECK_INT(rp_model_forward(model, &batch, 0, &own), RP_OK);
  CHECK_INT(rp_model_forward_average(model, &batch, &average), RP_OK);
  CHECK(average.loss != own.loss && average.tokens == own.tokens);
  batch.struct_size = 1;
  CHECK_INT(rp_model_forward_average(model, &batch, &again), RP_ERROR_ARGUMENT);
  batch = batch_of();
  CHECK(digest(model) == before);
  CHECK_INT(rp_model_forward(model, &batch, 0, &again), RP_OK);
  CHECK(again.loss == own.loss);
  rp_model_free(model);
  config.ema = 0;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  CHECK_INT(rp_model_forward_average(model, &batch, &again), RP_ERROR_ORDER);
  CHECK_TEXT(rp_last_error(), "it keeps no average");
  rp_real number, *place = &number;
  CHECK_INT(rp_model_place(model, 0, RP_ARRAY_AVERAGE, &place), RP_ERROR_ORDER);
  CHECK(place == NULL);
  CHECK_INT(rp_model_forward(model, &batch, 0, &again), RP_OK);
  CHECK_INT(rp_model_forward_average(NULL, &batch, &again), RP_ERROR_ARGUMENT);
  rp_model_free(model);
}

static int64_t lines_of(rp_model *model) {
  int64_t count = -1;
  CHECK_INT(rp_model_profile_count(model, &count), RP_OK);
  return count;
}

/* Weights and counters do not change under gradients that wait for their update. */
static void test_gradients_are_of_these_weights(void) {
  const rp_config config = config_of("shaw");
  const rp_limits limits = limits_of(0);
  const rp_batch batch = batch_of();
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  CHECK_INT(rp_model_save(model, "held.safetensors", RP_SAVE_WEIGHTS), RP_OK);
  CHECK_INT(rp_model_backward(model, &batch, NULL), RP_OK);
  const uint64_t before = digest(model);
  CHECK_INT(rp_model_load(model, "held.safetensors", RP_SAVE_WEIGHTS), RP_ERROR_ORDER);
  CHECK_TEXT(rp_last_error(), "gradients of 1 batch are accumulated; rp_model_update uses them");
  CHECK_INT(rp_model_set_counters(model, 3, 3), RP_ERROR_ORDER);
  CHECK(digest(model) == before);
  CHECK_INT(rp_model_zero_gradients(model), RP_OK);
  CHECK_INT(rp_model_load(model, "held.safetensors", RP_SAVE_WEIGHTS), RP_OK);
  CHECK_INT(rp_model_set_counters(model, 3, 3), RP_OK);
  rp_model_free(model);
  remove("held.safetensors");
}

static void *save_cancelled(void *model) {
  pthread_cancel(pthread_self());
  const rp_status status = rp_model_save(model, "cancelled.safetensors", RP_SAVE_WEIGHTS);
  remove("cancelled.safetensors");
  return status == RP_OK ? model : NULL; /* not cancelled: nothing here asks */
}

/* A thread that is cancelled within a call ends the call, and the model serves others. */
static void test_cancelled_call(void) {
  const rp_config config = config_of("shaw");
  const rp_limits limits = limits_of(0);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  pthread_t caller;
  void *ended = NULL;
  CHECK_INT(pthread_create(&caller, NULL, save_cancelled, model), 0);
  CHECK_INT(pthread_join(caller, &ended), 0);
  CHECK(ended == model);
  CHECK_INT(rp_model_zero_gradients(model), RP_OK);
  rp_model_free(model);
}

/* A model that is made, trained and searched, rounding as the caller does when it calls. */
static uint64_t rounded(int mode, rp_result *result) {
  rp_config config = config_of("transformer-xl");
  config.dropout = config.attention_dropout = 0.1;
  config.decoder.absolute = RP_ABSOLUTE_SINUSOIDAL;
  const rp_limits limits = limits_of(0);
  const rp_batch batch = batch_of();
  rp_model *model = NULL;
  fesetround(mode);
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  for (int i = 0; i < 3; i++) CHECK_INT(rp_model_step(model, &batch, 1, result), RP_OK);
  CHECK_INT(fegetround(), mode);
  rp_model *const models[] = {model};
  rp_decoder *decoder = NULL;
  CHECK_INT(rp_decoder_create(models, 1, &decoder), RP_OK);
  rp_search search = rp_search_default();
  search.beam = 2;
  CHECK_INT(rp_decoder_search(decoder, &batch, &search), RP_OK);
  CHECK_INT(fegetround(), mode);
  fesetround(FE_TONEAREST);
  rp_decoder_free(decoder);
  const uint64_t bits = digest(model);
  rp_model_free(model);
  return bits;
}

static void test_the_callers_rounding_changes_nothing(void) {
  rp_result nearest = {.struct_size = sizeof nearest}, upward = nearest, down = nearest;
  const uint64_t bits = rounded(FE_TONEAREST, &nearest);
  CHECK(rounded(FE_UPWARD, &upward) == bits);
  CHECK(rounded(FE_DOWNWARD, &down) == bits);
  CHECK(upward.loss == nearest.loss && down.loss == nearest.loss);
  CHECK(upward.gradient_norm == nearest.gradient_norm);
}

static void test_profile(void) {
  const rp_config config = config_of("shaw");
  const rp_limits limits = limits_of(0);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  step(model, RP_OK);
  CHECK_INT(lines_of(model), 0);
  rp_profile_line line = {.struct_size = sizeof line};
  CHECK_INT(rp_model_profile_line(model, 0, &line), RP_ERROR_ORDER);
  CHECK_TEXT(rp_last_error(), "nothing has been profiled yet");
  CHECK_INT(rp_model_profile(model, 1), RP_OK);
  for (int i = 0; i < 3; i++) step(model, RP_OK);
  bool found = false;
  for (int64_t i = 0; i < lines_of(model); i++) {
    CHECK_INT(rp_model_profile_line(model, i, &line), RP_OK);
    CHECK(line.calls > 0 && line.seconds >= 0 && line.bytes > 0);
    if (strcmp(line.name, "decoder.1.cross.kv") != 0 || line.backward) continue;
    found = true;
    CHECK_INT(line.calls, 3);
    CHECK_NEAR(line.operations, 3 * 2.0 * TOKENS * 16 * 32, 0);
  }
  CHECK(found);
  CHECK_INT(rp_model_profile_line(model, lines_of(model), &line), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_profile(model, 0), RP_OK);
  const int64_t lines = lines_of(model);
  step(model, RP_OK); /* adds nothing now */
  CHECK_INT(lines_of(model), lines);
  CHECK_INT(rp_model_profile_line(model, 0, &line), RP_OK);
  CHECK_INT(line.calls, 3);
  CHECK_INT(rp_model_profile(model, 1), RP_OK);
  CHECK_INT(lines_of(model), 0);
  rp_model_free(model);
}

/* The products that make tables have lines of their own, and count what they do: once forward, and
 * in backward once more for the table and then for its gradients. */
static void test_profile_of_positions(const char *position, double forward, double backward) {
  rp_config config = config_of(position);
  const rp_limits limits = limits_of(0);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  CHECK_INT(rp_model_profile(model, 1), RP_OK);
  step(model, RP_OK);
  double found[2] = {0, 0};
  rp_profile_line line = {.struct_size = sizeof line};
  for (int64_t i = 0; i < lines_of(model); i++) {
    CHECK_INT(rp_model_profile_line(model, i, &line), RP_OK);
    if (strcmp(line.name, "encoder.1.attention.positions") != 0) continue;
    CHECK(line.calls > 0 && line.seconds >= 0 && line.bytes > 0);
    found[line.backward != 0] += line.operations;
  }
  CHECK_NEAR(found[0], forward, 0);
  CHECK_NEAR(found[1], backward, 0);
  rp_model_free(model);
}

static void test_profile_of_rope(void) {
  const rp_config config = config_of("rope");
  const rp_limits limits = limits_of(0);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  CHECK_INT(rp_model_profile(model, 1), RP_OK);
  step(model, RP_OK);
  int found = 0;
  rp_profile_line line = {.struct_size = sizeof line};
  for (int64_t i = 0; i < lines_of(model); i++) {
    CHECK_INT(rp_model_profile_line(model, i, &line), RP_OK);
    if (strcmp(line.name, "encoder.0.attention.rotate") != 0) continue;
    found++;
    CHECK_NEAR(line.operations, 3.0 * 2 * TOKENS * 16, 0); /* three a number of queries and keys */
  }
  CHECK_INT(found, 2); /* forward and backward */
  rp_model_free(model);
}

int main(void) {
  static const char *const positions[] = {"none", "shaw",          "transformer-xl",    "music",
                                          "t5",   "deberta",       "relative-key",      "alibi",
                                          "rope", "alibi-learned", "relative-key-query"};
  for (size_t p = 0; p < sizeof positions / sizeof positions[0]; p++) {
    test_memory_is_what_was_told(positions[p], 0, 1);
    test_memory_is_what_was_told(positions[p], 1, 1);
    test_memory_is_what_was_told(positions[p], 0, 0);
  }
  test_steps_allocate_nothing();
  for (size_t p = 0; p < sizeof positions / sizeof positions[0]; p++) {
    for (size_t i = is_small_run() ? 3 - p % 4 : 0; i < 4; i += is_small_run() ? 4 : 1) {
      test_no_batch_allocates(positions[p], i & 1 ? 5 : 0, i & 2 ? 0.1 : 0);
    }
  }
  test_no_chunk_allocates();
  test_gradients_are_of_these_weights();
  test_cancelled_call();
  test_the_callers_rounding_changes_nothing();
  test_huge();
  test_create_without_memory();
  test_step_without_memory();
  for (int i = 0; i < 4; i++) {
    const char *const position = i < 2 ? "shaw" : "transformer-xl";
    test_no_call_without_memory(position, i % 2, step_both);
    test_no_call_without_memory(position, i % 2, backward_both);
  }
  test_files_without_memory();
  test_null();
  test_arguments();
  test_results_that_are_kept();
  test_forward_average();
  test_profile();
  test_profile_of_rope();
  const double product = 2.0 * 16 * 16; /* C and H D, for each row of a table */
  const double deberta = 2 * 64;        /* two tables, two rows to each of 32 buckets */
  test_profile_of_positions("shaw", 0, 0);
  /* the longest source has 6 tokens: there are 11 distances, and 6 products for both signs */
  test_profile_of_positions("transformer-xl", 6 * product, 2 * 6 * product);
  test_profile_of_positions("deberta", deberta * product, 3 * deberta * product);
  test_profile_of_positions("alibi-learned", 2 * 2 * 39, 2 * 2 * 2 * 39);
  return check_report();
}
