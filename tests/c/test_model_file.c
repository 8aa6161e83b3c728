/* SPDX-License-Identifier: Apache-2.0
 *
 * test_model_file.c: a model from a file of weights, mapped or read. What the files have in them is
 * tested from Python (tests/test_model_files.py).
 */
#define _POSIX_C_SOURCE 200809L

#include "file/model_file.h"

#include <limits.h>
#include <pthread.h>

#include "cancelled.h"
#include "faults.h"
#include "file/config_metadata.h"
#include "relpos/model.h"

enum { SENTENCES = 3, TOKENS = 12 };

static const int32_t ids[TOKENS] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8};
static const int64_t source_offsets[] = {0, 5, 6, 12}, target_offsets[] = {0, 2, 9, 12};

/* feed_forward 32: every parameter takes a multiple of 64 bytes; 20: a bias does not. */
static rp_config config_of(int64_t feed_forward) {
  rp_config config = rp_config_default();
  config.width = 16;
  config.heads = 2;
  config.feed_forward = feed_forward;
  config.max_length = 20;
  return config;
}

static rp_limits limits_of(int training) {
  rp_limits limits = rp_limits_default();
  limits.tokens = 40;
  limits.sentences = 4;
  limits.training = training;
  return limits;
}

static rp_batch batch_of(void) {
  rp_batch batch = rp_batch_default();
  batch.sentences = SENTENCES;
  batch.source = batch.target = batch.labels = ids;
  batch.source_offsets = source_offsets;
  batch.target_offsets = target_offsets;
  return batch;
}

/* A model that has learned a little, in the file; NULL where it cannot be. */
static rp_model *saved(int64_t feed_forward) {
  const rp_config config = config_of(feed_forward);
  const rp_limits limits = limits_of(1);
  const rp_batch batch = batch_of();
  rp_model *model = NULL;
  if (!CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK)) return NULL;
  for (int i = 0; i < 2; i++) CHECK_INT(rp_model_step(model, &batch, 1, NULL), RP_OK);
  CHECK_INT(rp_model_save(model, path, RP_SAVE_WEIGHTS), RP_OK);
  return model;
}

static rp_model *opened(rp_status expected) {
  const rp_limits limits = limits_of(0);
  rp_model *model = (rp_model *)&faults; /* to be set to NULL */
  CHECK_INT(rp_model_open(path, &limits, &model), expected);
  CHECK((model != NULL) == (expected == RP_OK));
  CHECK_INT(faults.opened, 0);
  return model;
}

static bool is_mapped(const rp_model *model) { return model->mapping.memory != NULL; }

static void check_same(rp_model *one, rp_model *other) {
  const rp_batch batch = batch_of();
  rp_real scores[2][TOKENS];
  CHECK_INT(rp_model_score(one, &batch, scores[0], NULL), RP_OK);
  CHECK_INT(rp_model_score(other, &batch, scores[1], NULL), RP_OK);
  CHECK(memcmp(scores[0], scores[1], sizeof scores[0]) == 0);
  CHECK(scores[0][0] != scores[0][1]);
  CHECK_INT(rp_model_parameter_count(one), rp_model_parameter_count(other));
  for (int64_t p = 0; p < rp_model_parameter_count(one); p++) {
    rp_parameter a = {.struct_size = sizeof a}, b = {.struct_size = sizeof b};
    CHECK_INT(rp_model_parameter(one, p, &a), RP_OK);
    CHECK_INT(rp_model_parameter(other, p, &b), RP_OK);
    CHECK(memcmp(a.data, b.data, (size_t)a.count * sizeof *a.data) == 0);
    CHECK((uintptr_t)b.data % RPI_ALIGN == 0);
    CHECK(b.gradient == NULL && b.moment1 == NULL && b.average == NULL);
  }
}

/* ---- the same model -------------------------------------------------------- */

static void test_the_same(int64_t feed_forward, bool mapped) {
  reset();
  rp_model *const trained = saved(feed_forward);
  rp_model *const model = opened(RP_OK);
  if (trained && model) {
    CHECK(is_mapped(model) == mapped);
    CHECK_INT(faults.mapped, mapped);
    check_same(trained, model);
  }
  rp_model_free(trained);
  rp_model_free(model);
  CHECK_INT(faults.mapped, 0);
  CHECK_INT(memory.held, 0);
}

/* Interrupted and short reads, before the mapping and instead of it. */
static void test_short_and_interrupted(int64_t feed_forward) {
  reset();
  rp_model *const trained = saved(feed_forward);
  faults.largest = 100;
  faults.interrupt = true;
  rp_model *const model = opened(RP_OK);
  if (trained && model) check_same(trained, model);
  reset();
  rp_model_free(trained);
  rp_model_free(model);
}

/* What is not taken: memory for the weights, neither once nor twice. */
static void test_memory(void) {
  const rp_config config = config_of(32);
  const rp_limits limits = limits_of(0);
  rp_memory told = {.struct_size = sizeof told};
  CHECK_INT(rp_model_memory(&config, &limits, &told), RP_OK);
  reset();
  rp_model_free(saved(32));
  rp_model *const model = opened(RP_OK);
  if (!model) return;
  CHECK(model->own_weights == NULL);
  CHECK_INT(model->numbers_bytes + model->fixed_bytes, told.constants);
  CHECK_INT(model->layout.numbers * (int64_t)sizeof(rp_real), told.parameters);
  rp_model_free(model);
}

/* The same tensors in another order: read, into their places. */
static void test_foreign_order(void) {
  reset();
  rp_model *const trained = saved(32);
  if (!trained) return;
  const int64_t count = trained->layout.count;
  rpi_config_pairs pairs;
  rpi_tensor *const tensors = calloc((size_t)count, sizeof *tensors);
  CHECK_INT(rpi_config_pairs_of(&trained->config, &pairs), RP_OK);
  for (int64_t i = 0; tensors && i < count; i++) {
    const rpi_parameter *const p = &trained->layout.parameters[count - 1 - i];
    tensors[i] = (rpi_tensor){.name = p->name,
                              .dimensions = p->dimensions,
                              .shape = {p->shape[0], p->shape[1], p->shape[2]},
                              .data = trained->weights + p->at};
  }
  CHECK_INT(rpi_safetensors_write(path, pairs.pairs, pairs.count, tensors, count), RP_OK);
  rp_model *const model = opened(RP_OK);
  if (model) {
    CHECK(!is_mapped(model));
    check_same(trained, model);
  }
  free(tensors);
  rp_model_free(trained);
  rp_model_free(model);
}

/* Data that begin at a multiple of 8 bytes alone, as those of other writers do. */
static void test_foreign_alignment(void) {
  reset();
  rp_model *const trained = saved(32);
  size_t bytes = 0;
  char *const content = content_of(&bytes);
  if (!trained || !content) return;
  char *const moved = malloc(bytes + 8);
  uint64_t length = 0;
  memcpy(&length, content, sizeof length);
  const size_t header = 8 + (size_t)length;
  CHECK(header % RPI_ALIGN == 0);
  memcpy(moved, content, header);
  memset(moved + header, ' ', 8);
  memcpy(moved + header + 8, content + header, bytes - header);
  length += 8;
  memcpy(moved, &length, sizeof length);
  put(moved, bytes + 8);
  rp_model *const model = opened(RP_OK);
  if (model) {
    CHECK(!is_mapped(model));
    check_same(trained, model);
  }
  free(moved);
  free(content);
  rp_model_free(trained);
  rp_model_free(model);
}

/* ---- a file that goes its own ways ----------------------------------------- */

/* Weights that are replaced, and removed, and written to. */
static void test_the_file_goes_on(void) {
  reset();
  rp_model *const trained = saved(32), *const model = opened(RP_OK);
  rp_model *later = NULL;
  const rp_batch batch = batch_of();
  if (!trained || !model) return;
  rp_model *const twin = saved(32); /* the same bits, kept in memory */
  CHECK_INT(rp_model_step(trained, &batch, 1, NULL), RP_OK);
  CHECK_INT(rp_model_save(trained, path, RP_SAVE_WEIGHTS), RP_OK);
  check_same(twin, model);
  later = opened(RP_OK);
  check_same(trained, later);
  CHECK(unlink(path) == 0);
  check_same(twin, model);
  check_same(trained, later);
  rp_model_free(later);

  CHECK_INT(rp_model_save(trained, path, RP_SAVE_WEIGHTS), RP_OK);
  later = opened(RP_OK);
  rp_parameter at = {.struct_size = sizeof at};
  CHECK_INT(rp_model_parameter(later, 0, &at), RP_OK);
  at.data[0] += 1;
  rp_model *const untouched = opened(RP_OK);
  check_same(trained, untouched);
  CHECK_INT(rp_model_load(later, path, RP_SAVE_WEIGHTS), RP_OK);
  check_same(trained, later);
  rp_model_free(untouched);
  rp_model_free(later);
  rp_model_free(trained);
  rp_model_free(twin);
  rp_model_free(model);
  CHECK_INT(faults.mapped, 0);
}

/* ---- what is refused ------------------------------------------------------- */

static void test_cut_short_or_too_long(int64_t feed_forward) {
  reset();
  rp_model_free(saved(feed_forward));
  size_t bytes = 0;
  char *const content = content_of(&bytes);
  if (!content) return;
  char *const longer = calloc(1, bytes + 1);
  memcpy(longer, content, bytes);
  const size_t sizes[] = {0, 7, 8, 100, bytes / 2, bytes - 64, bytes - 1, bytes + 1};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    put(longer, sizes[i]);
    opened(RP_ERROR_FILE);
    CHECK_TEXT(rp_last_error(), path);
    CHECK_INT(faults.mapped, 0);
    CHECK_INT(memory.held, 0);
  }
  free(longer);
  free(content);
}

/* A file of some hundred bytes that says how large a model is, and has nothing of it, or names of
 * tensors without numbers, or other shapes. Nothing is allocated for what it says. */
static void says_too_much(const rp_config *config, const rpi_tensor *tensors, int64_t count,
                          const char *sentence) {
  rpi_config_pairs pairs;
  rp_config untouched = config_of(32), loaded = untouched;
  CHECK_INT(rpi_config_pairs_of(config, &pairs), RP_OK);
  CHECK_INT(rpi_safetensors_write(path, pairs.pairs, pairs.count, tensors, count), RP_OK);
  memory.most = 0;
  opened(RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), sentence);
  CHECK_TEXT(rp_last_error(), path);
  CHECK_INT(rp_config_load(path, &loaded), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), sentence);
  CHECK(memcmp(&loaded, &untouched, sizeof loaded) == 0);
  CHECK(memory.most > 0 && memory.most < 1 << 20);
  CHECK_INT(memory.held, 0);
  CHECK_INT(faults.mapped, 0);
}

static void test_sizes_are_not_believed(void) {
  reset();
  rp_config config = config_of(32);
  config.width = 1 << 12; /* its weights would take 2 GB, its activations more */
  config.feed_forward = 1 << 14;
  rp_real numbers[6] = {0};
  const rpi_tensor one = {
      .name = "source_embedding.weight", .dimensions = 2, .shape = {2, 3}, .data = numbers};
  says_too_much(&config, NULL, 0, "tensor 'source_embedding.weight' is missing");
  says_too_much(&config, &one, 1,
                "tensor 'source_embedding.weight' has the shape [2, 3], must be [256, 4096]");
  rpi_tensor other = one;
  other.name = "other";
  says_too_much(&config, &other, 1, "its tensor 'other' is unknown here");
}

/* The names and shapes of all tensors, and offsets of data that are not there. */
static void test_data_that_are_not_there(void) {
  reset();
  rp_model_free(saved(32));
  size_t bytes = 0;
  char *const content = content_of(&bytes);
  if (!content) return;
  uint64_t length = 0;
  memcpy(&length, content, sizeof length);
  put(content, 8 + (size_t)length);
  free(content);
  rp_config config;
  CHECK_INT(rp_config_load(path, &config), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "bytes, where");
  CHECK_INT(faults.mapped, 0);
  CHECK_INT(faults.opened, 0);
  CHECK_INT(memory.held, 0);
}

static void test_optimizer_state(void) {
  reset();
  rp_model *const model = saved(32);
  CHECK_INT(rp_model_save(model, path, RP_SAVE_OPTIMIZER), RP_OK);
  opened(RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "file': it is optimizer state, no weights");
  rp_model_free(model);
  CHECK_INT(memory.held, 0);
}

/* ---- a path that names one file, and then another ---------------------------- */

static char files[2][sizeof path + 16]; /* both are on the path in turn */
static int swaps, on_path;

static void put_on_path(int which) {
  char link_path[sizeof path + 16];
  snprintf(link_path, sizeof link_path, "%s.link", path);
  on_path = which;
  CHECK_INT(link(files[which], link_path), 0);
  CHECK_INT(rename(link_path, path), 0);
}

/* What was opened stays so; the next who opens the path has the other file. */
static int swapping_open(void *context, const char *name, int flags, int mode) {
  const int descriptor = faulty_open(context, name, flags, mode);
  if (swaps > 0 && strcmp(name, path) == 0) {
    swaps--;
    put_on_path(!on_path);
  }
  return descriptor;
}

/* Two models in the files, one on the path. */
static void save_both(int64_t other_feed_forward, int what) {
  for (int i = 0; i < 2; i++) {
    snprintf(files[i], sizeof files[i], "%s.%d", path, i);
    rp_config config = config_of(i == 0 ? 32 : other_feed_forward);
    config.seed = (uint64_t)i + 1;
    const rp_limits limits = limits_of(1);
    const rp_batch batch = batch_of();
    rp_model *model = NULL;
    CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
    for (int n = 0; n <= i; n++) CHECK_INT(rp_model_step(model, &batch, 1, NULL), RP_OK);
    CHECK_INT(rp_model_save(model, files[i], what), RP_OK);
    rp_model_free(model);
  }
  put_on_path(0);
}

static void remove_both(void) {
  for (int i = 0; i < 2; i++) CHECK_INT(unlink(files[i]), 0);
}

/* Weights and configuration are of one file, however often another takes its place meanwhile; and
 * where that never ends, it is said. */
static void test_another_takes_its_place(int64_t other_feed_forward) {
  rpi_io io = faulty_io;
  io.open = swapping_open;
  rpi_set_io(&io);
  save_both(other_feed_forward, RP_SAVE_WEIGHTS);
  const rp_limits limits = limits_of(0);
  for (int times = 0; times < 8; times++) {
    reset();
    swaps = times;
    rp_model *const model = opened(RP_OK);
    rp_model *alone = NULL;
    CHECK_INT(swaps, 0);
    if (!CHECK(model != NULL)) continue;
    const rp_config *const config = rp_model_config(model);
    CHECK_INT(config->feed_forward, config->seed == 1 ? 32 : other_feed_forward);
    CHECK_INT(rp_model_open(files[config->seed - 1], &limits, &alone), RP_OK);
    if (alone) check_same(alone, model);
    rp_model_free(alone);
    rp_model_free(model);
    rp_config read;
    swaps = times;
    CHECK_INT(rp_config_load(path, &read), RP_OK);
    CHECK_INT(read.feed_forward, read.seed == 1 ? 32 : other_feed_forward);
  }
  swaps = INT_MAX;
  opened(RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "another file took its place meanwhile");
  CHECK(INT_MAX - swaps < 100);
  CHECK_INT(memory.held, 0);
  CHECK_INT(faults.mapped, 0);
  swaps = 0;
  remove_both();
  rpi_set_io(&faulty_io);
}

/* Counters and moments are of one file too: the model stays as it was. */
static void test_another_optimizer_takes_its_place(void) {
  reset();
  rpi_io io = faulty_io;
  io.open = swapping_open;
  rpi_set_io(&io);
  save_both(32, RP_SAVE_OPTIMIZER);
  const rp_config config = config_of(32);
  const rp_limits limits = limits_of(1);
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  swaps = 1;
  CHECK_INT(rp_model_load(model, path, RP_SAVE_OPTIMIZER), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "another file took its place meanwhile");
  int64_t step = -1, attempt = -1;
  CHECK_INT(rp_model_counters(model, &step, &attempt), RP_OK);
  CHECK_INT(step, 0);
  CHECK_INT(rp_model_load(model, path, RP_SAVE_OPTIMIZER), RP_OK);
  CHECK_INT(rp_model_counters(model, &step, &attempt), RP_OK);
  CHECK_INT(step, 2); /* of the file that is there now */
  rp_model_free(model);
  remove_both();
  rpi_set_io(&faulty_io);
}

/* ---- a thread that is cancelled ----------------------------------------------- */

__attribute__((noinline)) static int open_both_ways(void) {
  const rp_limits limits = limits_of(0);
  rp_model *model = NULL;
  rp_config config;
  int done = rp_config_load(path, &config) == RP_OK;
  done += rp_model_open(path, &limits, &model) == RP_OK;
  rp_model_free(model);
  return done;
}

/* It is to be cancelled when it calls, and opens and reads: those are no places to end at. Where it
 * ends, it has nothing on its stack that sanitizers watch. */
static void *open_cancelled(void *done) {
  pthread_cancel(pthread_self());
  *(int *)done = open_both_ways();
  pthread_testcancel();
  return NULL;
}

static void test_cancelled(void) {
  reset();
  rp_model_free(saved(32));
  int done = 0;
  check_ends_cancelled(open_cancelled, &done);
  CHECK_INT(done, 2);
  CHECK_INT(faults.opened, 0);
  CHECK_INT(memory.held, 0);
}

static void test_arguments(void) {
  reset();
  rp_model_free(saved(32));
  rp_limits limits = limits_of(1);
  rp_model *model = (rp_model *)&faults;
  CHECK_INT(rp_model_open(path, &limits, &model), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "limits.training=1, must be 0");
  CHECK(model == NULL);
  limits = limits_of(0);
  CHECK_INT(rp_model_open(path, &limits, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_open(NULL, &limits, &model), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_model_open(path, NULL, &model), RP_ERROR_ARGUMENT);
  limits.tokens = 0;
  CHECK_INT(rp_model_open(path, &limits, &model), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "limits.tokens=0");
  limits = limits_of(0);
  CHECK_INT(rp_model_open("/no/such/file", &limits, &model), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "/no/such/file");
  put("{}", 2);
  opened(RP_ERROR_FILE);
}

/* Every call of the seam and every allocation in turn. A file that cannot be mapped is read. */
static void test_faults(int64_t feed_forward, int allocations) {
  reset();
  rp_model *const trained = saved(feed_forward);
  int refused_maps = 0; /* the first is of the check of the tensors, the second of the model */
  int n = 1;
  for (; n < 200; n++) {
    const rp_limits limits = limits_of(0);
    rp_model *model = NULL;
    memset(&faults, 0, sizeof faults);
    faults.fail_at = n;
    faults.error = EIO;
    const rp_status status = rp_model_open(path, &limits, &model);
    const char *const last = faults.last;
    CHECK_INT(faults.opened, 0);
    if (last && strcmp(last, "map") == 0) {
      refused_maps++;
      CHECK(status == RP_OK && is_mapped(model) == (refused_maps == 1 && feed_forward == 32));
    } else if (last && strcmp(last, "close") != 0) {
      CHECK_INT(status, RP_ERROR_FILE);
      CHECK_TEXT(rp_last_error(), strerror(EIO));
    } else {
      CHECK_INT(status, RP_OK);
    }
    CHECK((model != NULL) == (status == RP_OK));
    if (model && trained) check_same(trained, model);
    rp_model_free(model);
    CHECK_INT(faults.mapped, 0);
    if (!last) break;
  }
  CHECK(n > 8 && n < 200);
  CHECK_INT(refused_maps, feed_forward == 32 ? 2 : 1);
  memset(&faults, 0, sizeof faults);
  const int held = memory.held;
  for (n = 1; n < 200; n++) {
    const rp_limits limits = limits_of(0);
    rp_model *model = NULL;
    memory.calls = 0;
    memory.fail_at = n;
    const rp_status status = rp_model_open(path, &limits, &model);
    const bool failed = memory.calls >= n;
    CHECK_INT(status, failed ? RP_ERROR_MEMORY : RP_OK);
    CHECK((model != NULL) == !failed);
    CHECK_INT(faults.opened, 0);
    rp_model_free(model);
    CHECK_INT(memory.held, held);
    CHECK_INT(faults.mapped, 0);
    if (!failed) break;
  }
  CHECK_INT(n - 1, allocations);
  memory.fail_at = 0;
  rp_model_free(trained);
}

int main(void) {
  if (!CHECK(make_folder())) return check_report();
  rpi_set_io(&faulty_io);
  rpi_set_allocator(&faulty_allocator);
  test_the_same(32, true);
  test_the_same(20, false);
  test_short_and_interrupted(32);
  test_short_and_interrupted(20);
  test_memory();
  test_foreign_order();
  test_foreign_alignment();
  test_the_file_goes_on();
  test_cut_short_or_too_long(32);
  test_cut_short_or_too_long(20);
  test_sizes_are_not_believed();
  test_data_that_are_not_there();
  test_optimizer_state();
  test_another_takes_its_place(32);
  test_another_takes_its_place(20);
  test_another_optimizer_takes_its_place();
  test_cancelled();
  test_arguments();
  /* the header; layout, names and tensors, spans, their names, the header; the model, its offsets
   * and four blocks; names and tensors; spans, their names, the header */
  test_faults(32, 18);
  /* and the weights; names and tensors; spans, their names, the header; no second place for the
   * data */
  test_faults(20, 24);
  CHECK(remove_folder());
  return check_report();
}
