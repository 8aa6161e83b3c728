/* SPDX-License-Identifier: Apache-2.0
 *
 * test_decode.c: decoders and searches where something is missing: memory, arguments, or the model
 * itself, which is at work elsewhere. What searches find is tested from Python (test_decode.py).
 */
#define _POSIX_C_SOURCE 200809L

#include "decode/search.h"
#include "faults.h"
#include "model/sublayer.h"

enum { SENTENCES = 3, BEAM = 4, LONGEST = 9 };

static const int32_t ids[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8};
static const int64_t source_offsets[] = {0, 5, 6, 12}, target_offsets[] = {0, 2, 2, 3};

static rp_batch batch_of(void) {
  rp_batch batch = rp_batch_default();
  batch.sentences = SENTENCES;
  batch.source = ids;
  batch.source_offsets = source_offsets;
  return batch;
}

static rp_search search_of(int kind) {
  rp_search search = rp_search_default();
  search.max_length = LONGEST;
  search.n_best = 3;
  search.no_repeat = 2;
  if (kind == 1) search.coverage = 0.2;
  if (kind == 2) search.sample = 1;
  return search;
}
enum { KINDS = 3 };

static rp_model *make_in(int precision, uint64_t seed) {
  rp_config config = rp_config_default();
  config.width = 16;
  config.heads = 2;
  config.feed_forward = 24;
  config.max_length = 12;
  config.source_vocabulary = config.target_vocabulary = 300;
  config.seed = seed;
  rp_limits limits = rp_limits_default();
  limits.tokens = 40;
  limits.sentences = 4;
  limits.training = 0;
  limits.precision = precision;
  rp_model *model = NULL;
  CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK);
  return model;
}

static rp_model *make(uint64_t seed) { return make_in(RP_F32, seed); }

static rp_decoder *decoder_of(rp_model *const *models, int64_t count) {
  rp_decoder *decoder = NULL;
  if (!CHECK_INT(rp_decoder_create(models, count, &decoder), RP_OK)) exit(1);
  return decoder;
}

/* ---- what was found --------------------------------------------------------- */

typedef struct found {
  int64_t counts[SENTENCES];
  rp_hypothesis results[SENTENCES][BEAM];
  int32_t tokens[SENTENCES][BEAM][LONGEST];
} found;

static found read_results(const rp_decoder *decoder) {
  found f;
  memset(&f, 0, sizeof f);
  for (int64_t b = 0; b < SENTENCES; b++) {
    CHECK_INT(rp_decoder_result_count(decoder, b, &f.counts[b]), RP_OK);
    for (int64_t i = 0; i < f.counts[b]; i++) {
      rp_hypothesis *const h = &f.results[b][i];
      h->struct_size = sizeof *h;
      CHECK_INT(rp_decoder_result(decoder, b, i, h), RP_OK);
      memcpy(f.tokens[b][i], h->tokens, (size_t)h->count * sizeof(int32_t));
      h->tokens = NULL;
    }
  }
  return f;
}

static bool is_same(const found *a, const found *b) {
  bool same = memcmp(a->counts, b->counts, sizeof a->counts) == 0 &&
              memcmp(a->tokens, b->tokens, sizeof a->tokens) == 0;
  for (int s = 0; s < SENTENCES && same; s++) {
    for (int i = 0; i < a->counts[s] && same; i++) {
      const rp_hypothesis *const x = &a->results[s][i], *const y = &b->results[s][i];
      same = x->count == y->count && x->finished == y->finished && x->score == y->score &&
             x->log_probability == y->log_probability;
    }
  }
  return same;
}

static found search(rp_decoder *decoder, int kind) {
  const rp_batch batch = batch_of();
  const rp_search options = search_of(kind);
  CHECK_INT(rp_decoder_search(decoder, &batch, &options), RP_OK);
  const found f = read_results(decoder);
  CHECK_INT(f.counts[0], 3);
  return f;
}

/* ---- logits in blocks ------------------------------------------------------- */

static void test_blocks_of_logits(void) {
  rp_model *const models[] = {make(1), make(2)};
  for (int count = 1; count <= 2; count++) {
    for (int kind = 0; kind < KINDS; kind++) {
      rp_decoder *const decoder = decoder_of(models, count);
      const found whole = search(decoder, kind);
      for (int64_t rows = 1; rows <= 7; rows += 3) {
        decoder->block_rows = rows;
        const found cut = search(decoder, kind);
        CHECK(memcmp(whole.tokens, cut.tokens, sizeof cut.tokens) == 0);
      }
      rp_decoder_free(decoder);
    }
  }
  rp_model_free(models[0]);
  rp_model_free(models[1]);
}

/* ---- weights that are kept rounded ------------------------------------------- */

/* Is there a product of the decoder's that would be given its weight so? */
static bool keeps_rounded(rp_model *m) {
  const void *rounded = NULL;
  CHECK_INT(rpi_rounded_of(m, m->layout.stack[RPI_DECODER].layers[0].self.qkv, &rounded), RP_OK);
  return rounded != NULL;
}

/* A search of a few words keeps them, of a model in bf16 alone, and no longer than it takes. */
static void test_kept_while_it_searches(void) {
  const int most = RPI_REAL_BYTES == 4 ? RP_BF16 : RP_F32; /* double is never rounded */
  for (int precision = RP_F32; precision <= most; precision++) {
    rp_model *const m = make_in(precision, 1);
    rp_decoder *const decoder = decoder_of(&m, 1);
    CHECK(!keeps_rounded(m));
    search(decoder, 0);
    CHECK_INT(keeps_rounded(m), precision == RP_BF16); /* until the next call begins */
    int64_t step;
    CHECK_INT(rp_model_counters(m, &step, NULL), RP_OK);
    CHECK(!keeps_rounded(m));
    const rp_batch batch = batch_of();
    rp_search options = search_of(0);
    options.max_length = 1;
    CHECK_INT(rp_decoder_search(decoder, &batch, &options), RP_OK);
    CHECK(!keeps_rounded(m));
    rp_decoder_free(decoder);
    rp_model_free(m);
  }
}

/* ---- no memory -------------------------------------------------------------- */

static void test_create_without_memory(void) {
  rp_model *const models[] = {make(1), make(2)};
  rpi_set_allocator(&faulty_allocator);
  for (int n = 1;; n++) {
    reset();
    memory.fail_at = n;
    rp_decoder *decoder = NULL;
    const rp_status status = rp_decoder_create(models, 2, &decoder);
    if (status == RP_OK) {
      CHECK(n > 3);
      rp_decoder_free(decoder);
      CHECK_INT(memory.held, 0);
      break;
    }
    CHECK_INT(status, RP_ERROR_MEMORY);
    CHECK(decoder == NULL);
    CHECK_INT(memory.held, 0);
  }
  rpi_set_allocator(NULL);
  rp_model_free(models[0]);
  rp_model_free(models[1]);
}

/* Each allocation of a decoder's first search of a kind fails in turn; then it finds what another
 * finds, and what was found before is there until then. */
static void test_search_without_memory(int kind) {
  rp_model *const models[] = {make(1), make(2)};
  rp_decoder *const other = decoder_of(models, 2);
  const found expected = search(other, kind);
  rp_decoder_free(other);
  const rp_batch batch = batch_of();
  const rp_search options = search_of(kind);
  rpi_set_allocator(&faulty_allocator);
  reset();
  rp_decoder *const decoder = decoder_of(models, 2);
  const rp_search first_options = search_of(KINDS);
  rp_batch first = batch_of();
  const int64_t none[] = {0, 0, 0, 1};
  first.source_offsets = none;
  CHECK_INT(rp_decoder_search(decoder, &first, &first_options), RP_OK);
  const found before = read_results(decoder);
  int n = 1;
  for (; n < 1000; n++) {
    memory.calls = 0;
    memory.fail_at = n;
    const rp_status status = rp_decoder_search(decoder, &batch, &options);
    if (status == RP_OK) break;
    CHECK_INT(status, RP_ERROR_MEMORY);
    CHECK_TEXT(rp_last_error(), "no memory for");
    const found now = read_results(decoder);
    CHECK(is_same(&before, &now));
  }
  CHECK(n > 3 && n < 1000);
  const found now = read_results(decoder);
  CHECK(is_same(&expected, &now));
  memory.fail_at = 0;
  rp_decoder_free(decoder);
  CHECK_INT(memory.held, 0);
  rpi_set_allocator(NULL);
  rp_model_free(models[0]);
  rp_model_free(models[1]);
}

static rp_batch pairs_of(void) {
  rp_batch batch = batch_of();
  batch.target = ids;
  batch.target_offsets = target_offsets;
  return batch;
}

static void test_alignments_without_memory(void) {
  rp_model *const model = make(1);
  const rp_batch batch = pairs_of();
  const int64_t last[] = {-1};
  rp_real weights[2 * 5 + 1 * 6], expected[2 * 5 + 1 * 6];
  CHECK_INT(rp_model_alignments(model, &batch, last, 1, NULL, 0, expected), RP_OK);
  rpi_set_allocator(&faulty_allocator);
  for (int n = 1; n <= 2; n++) { /* a head's map, and what it is made with */
    reset();
    memory.fail_at = n;
    CHECK_INT(rp_model_alignments(model, &batch, last, 1, NULL, 0, weights), RP_ERROR_MEMORY);
    CHECK_INT(memory.held, 0);
  }
  reset();
  CHECK_INT(rp_model_alignments(model, &batch, last, 1, NULL, 0, weights), RP_OK);
  CHECK_INT(memory.calls, 2);
  CHECK_INT(memory.held, 0);
  rpi_set_allocator(NULL);
  CHECK(memcmp(weights, expected, sizeof weights) == 0);
  CHECK_INT(rp_model_alignments(model, &batch, last, 1, NULL, 0, NULL), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "weights is NULL");
  rp_model_free(model);
}

static void test_steps_without_memory(void) {
  rp_model *const models[] = {make(1)};
  rp_batch batch = batch_of();
  const int64_t begins[] = {0, 1, 2, 3};
  batch.target = ids;
  batch.target_offsets = begins;
  rp_decoder *const other = decoder_of(models, 1);
  static rp_real logits[SENTENCES * 300], expected[SENTENCES * 300];
  CHECK_INT(rp_decoder_begin(other, &batch, 5, NULL), RP_OK);
  CHECK_INT(rp_decoder_step(other, 3, NULL, ids, expected), RP_OK);
  rp_decoder_free(other);
  rpi_set_allocator(&faulty_allocator);
  reset();
  rp_decoder *const decoder = decoder_of(models, 1);
  for (int n = 1; n < 1000; n++) {
    memory.calls = 0;
    memory.fail_at = n;
    const rp_status status = rp_decoder_begin(decoder, &batch, 5, logits);
    if (status == RP_OK) break;
    CHECK_INT(status, RP_ERROR_MEMORY);
    CHECK_INT(rp_decoder_step(decoder, 3, NULL, ids, logits), RP_ERROR_ORDER);
  }
  memory.fail_at = 0;
  CHECK_INT(rp_decoder_step(decoder, 3, NULL, ids, logits), RP_OK);
  CHECK(memcmp(logits, expected, sizeof logits) == 0);
  rp_decoder_free(decoder);
  CHECK_INT(memory.held, 0);
  rpi_set_allocator(NULL);
  rp_model_free(models[0]);
}

/* ---- arguments -------------------------------------------------------------- */

#define REFUSED(call, status, sentence)                                                            \
  do {                                                                                             \
    CHECK_INT((call), (status));                                                                   \
    CHECK_TEXT(rp_last_error(), (sentence));                                                       \
  } while (0)

static void test_arguments(void) {
  rp_model *const models[] = {make(1), NULL};
  rp_decoder *decoder = (rp_decoder *)&check_passed;
  REFUSED(rp_decoder_create(models, 1, NULL), RP_ERROR_ARGUMENT, "decoder: decoder is NULL");
  REFUSED(rp_decoder_create(NULL, 1, &decoder), RP_ERROR_ARGUMENT, "decoder: models is NULL");
  CHECK(decoder == NULL);
  REFUSED(rp_decoder_create(models, 0, &decoder), RP_ERROR_ARGUMENT, "decoder: count=0 models");
  REFUSED(rp_decoder_create(models, 2, &decoder), RP_ERROR_ARGUMENT, "decoder: models[1] is NULL");
  rp_decoder_free(NULL);
  decoder = decoder_of(models, 1);
  const rp_batch good_batch = batch_of();
  const rp_search good = search_of(0);
  rp_batch batch = good_batch;
  rp_search options = good;
  int64_t count;
  rp_hypothesis h = {.struct_size = 7};
  REFUSED(rp_decoder_search(NULL, &batch, &good), RP_ERROR_ARGUMENT, "decoder: decoder is NULL");
  REFUSED(rp_decoder_search(decoder, NULL, &good), RP_ERROR_ARGUMENT, "batch: batch is NULL");
  REFUSED(rp_decoder_search(decoder, &batch, NULL), RP_ERROR_ARGUMENT, "search: search is NULL");
  options.struct_size = 8;
  REFUSED(rp_decoder_search(decoder, &batch, &options), RP_ERROR_ARGUMENT,
          "search: struct_size=8, must be");
  options = good;
  options.suppressed_count = 2;
  REFUSED(rp_decoder_search(decoder, &batch, &options), RP_ERROR_ARGUMENT,
          "search: suppressed is NULL, but suppressed_count=2");
  batch.struct_size = 8;
  REFUSED(rp_decoder_search(decoder, &batch, &good), RP_ERROR_ARGUMENT, "batch: struct_size=8");
  batch = good_batch;
  batch.target = ids;
  REFUSED(rp_decoder_search(decoder, &batch, &good), RP_ERROR_ARGUMENT,
          "batch: target_offsets is NULL");
  CHECK_INT(rp_decoder_search(decoder, &good_batch, &good), RP_OK);
  REFUSED(rp_decoder_result_count(NULL, 0, &count), RP_ERROR_ARGUMENT, "decoder is NULL");
  REFUSED(rp_decoder_result_count(decoder, 0, NULL), RP_ERROR_ARGUMENT, "count is NULL");
  REFUSED(rp_decoder_result_count(decoder, -1, &count), RP_ERROR_ARGUMENT, "sentence=-1");
  REFUSED(rp_decoder_result_count(decoder, 3, &count), RP_ERROR_ARGUMENT,
          "sentence=3, but the last search was of 3");
  REFUSED(rp_decoder_result(decoder, 0, 0, NULL), RP_ERROR_ARGUMENT, "hypothesis is NULL");
  REFUSED(rp_decoder_result(decoder, 0, 0, &h), RP_ERROR_ARGUMENT, "struct_size=7");
  h.struct_size = sizeof h;
  REFUSED(rp_decoder_result(decoder, 0, 3, &h), RP_ERROR_ARGUMENT,
          "rank=3, but sentence 0 has 3 results");
  REFUSED(rp_decoder_begin(NULL, &batch, 4, NULL), RP_ERROR_ARGUMENT, "decoder is NULL");
  REFUSED(rp_decoder_step(NULL, 1, NULL, ids, NULL), RP_ERROR_ARGUMENT, "decoder is NULL");
  batch = pairs_of();
  const int64_t begins[] = {0, 1, 2, 3};
  batch.target_offsets = begins;
  CHECK_INT(rp_decoder_begin(decoder, &batch, 4, NULL), RP_OK);
  REFUSED(rp_decoder_step(decoder, 1, NULL, NULL, NULL), RP_ERROR_ARGUMENT, "tokens is NULL");
  CHECK_INT(rp_decoder_search(decoder, &good_batch, &good), RP_OK);
  REFUSED(rp_decoder_step(decoder, 1, NULL, ids, NULL), RP_ERROR_ORDER, "nothing was begun");
  REFUSED(rp_model_alignments(NULL, &batch, NULL, 0, NULL, 0, NULL), RP_ERROR_ARGUMENT,
          "model is NULL");
  rp_decoder_free(decoder);
  rp_model_free(models[0]);
}

/* A model that is at work elsewhere, and the others of its ensemble. */
static void test_busy(void) {
  rp_model *const models[] = {make(1), make(2)};
  rp_decoder *const decoder = decoder_of(models, 2);
  const rp_batch batch = batch_of();
  const rp_search options = search_of(0);
  for (int k = 0; k < 2; k++) {
    CHECK(!atomic_flag_test_and_set(&models[k]->busy));
    REFUSED(rp_decoder_search(decoder, &batch, &options), RP_ERROR_ORDER, "is at work");
    REFUSED(rp_decoder_begin(decoder, &batch, 4, NULL), RP_ERROR_ORDER, "is at work");
    REFUSED(rp_decoder_step(decoder, 1, NULL, ids, NULL), RP_ERROR_ORDER, "is at work");
    int64_t step;
    CHECK_INT(rp_model_counters(models[1 - k], &step, NULL), RP_OK);
    atomic_flag_clear(&models[k]->busy);
  }
  search(decoder, 0);
  rp_decoder_free(decoder);
  rp_model_free(models[0]);
  rp_model_free(models[1]);
}

int main(void) {
  test_blocks_of_logits();
  test_kept_while_it_searches();
  test_create_without_memory();
  for (int kind = 0; kind < KINDS; kind++) test_search_without_memory(kind);
  test_alignments_without_memory();
  test_steps_without_memory();
  test_arguments();
  test_busy();
  return check_report();
}
