/* SPDX-License-Identifier: Apache-2.0
 *
 * test_model_maps.c: the maps and alignments of a model: which rows go where, what they take in
 * memory, what is refused, and every failed allocation; and what maps come to. What maps hold is
 * tested from Python (tests/test_model_maps.py).
 */
#define _POSIX_C_SOURCE 200809L

#include "faults.h"
#include "ops/real.h"
#include "relpos/decode.h"

enum { SENTENCES = 3, LAYERS = 2, HEADS = 2, MOST = 6 * 6 };

static const int32_t ids[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8};
static const int64_t source_offsets[] = {0, 5, 6, 12}, target_offsets[] = {0, 2, 2, 3};

static rp_batch batch_of(void) {
  rp_batch batch = rp_batch_default();
  batch.sentences = SENTENCES;
  batch.source = batch.target = ids;
  batch.source_offsets = source_offsets;
  batch.target_offsets = target_offsets;
  return batch;
}

static int64_t length_of(const int64_t *offsets, int64_t b) { return offsets[b + 1] - offsets[b]; }

static rp_model *make(const char *position, int64_t encoders, int64_t decoders) {
  rp_config config = rp_config_default();
  config.width = 16;
  config.heads = HEADS;
  config.feed_forward = 24;
  config.max_length = 12;
  config.source_vocabulary = config.target_vocabulary = 300;
  config.encoder.layers = encoders;
  config.decoder.layers = decoders;
  CHECK_INT(rp_config_set(&config, "encoder.position", position), RP_OK);
  CHECK_INT(rp_config_set(&config, "decoder.position", position), RP_OK);
  rp_limits limits = rp_limits_default();
  limits.tokens = 40;
  limits.sentences = 4;
  limits.training = 0;
  rp_model *model = NULL;
  if (!CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK)) exit(1);
  return model;
}

static rp_model_map map_of(int kind, int64_t layer, int64_t head, int64_t sentence, int show,
                           rp_real *to) {
  rp_model_map map = rp_model_map_default();
  map.kind = kind;
  map.layer = layer;
  map.head = head;
  map.sentence = sentence;
  map.show = show;
  map.to = to;
  return map;
}

/* ---- which go where --------------------------------------------------------- */

/* All at once, in no order, against one by one. */
static void test_many_from_one_pass(void) {
  enum { COUNT = 3 * LAYERS * HEADS * SENTENCES };
  static rp_real to[COUNT][MOST], one[MOST];
  rp_model *const model = make("shaw", LAYERS, LAYERS);
  const rp_batch batch = batch_of();
  rp_model_map maps[COUNT];
  memset(to, 0, sizeof to);
  for (int i = 0; i < COUNT; i++) {
    const int n = i * 7 % COUNT;
    maps[i] = map_of(n % 3, n / 3 % LAYERS, n / 3 / LAYERS % HEADS, n / 3 / LAYERS / HEADS,
                     i % 2 ? RP_SHOW_PROBABILITIES : RP_SHOW_CONTENT, to[i]);
  }
  CHECK_INT(rp_model_attention_maps(model, &batch, 0, maps, COUNT), RP_OK);
  int filled = 0;
  for (int i = 0; i < COUNT; i++) {
    const rp_model_map *const m = &maps[i];
    memset(one, 0, sizeof one);
    CHECK_INT(rp_model_attention_map(model, &batch, m->kind, m->layer, m->head, m->sentence,
                                     m->show, one),
              RP_OK);
    CHECK(memcmp(one, to[i], sizeof one) == 0);
    filled += one[0] != 0;
  }
  CHECK_INT(filled, COUNT * 7 / 9); /* all but the decoder's and cross, of the empty target */
  CHECK_INT(rp_model_attention_maps(model, &batch, 0, NULL, 0), RP_OK);
  rp_model_free(model);
}

static void test_some_rows(void) {
  rp_model *const model = make("transformer-xl", LAYERS, 0);
  rp_batch batch = batch_of();
  rp_real whole[MOST], some[MOST];
  batch.target = NULL;
  batch.target_offsets = NULL;
  rp_model_map map = map_of(RP_ATTENTION_ENCODER, 1, 1, 2, RP_SHOW_KEY, whole);
  CHECK_INT(rp_model_attention_maps(model, &batch, 0, &map, 1), RP_OK);
  for (int64_t row = 0; row <= 6; row++) {
    for (int64_t rows = -1; rows <= 6 - row; rows++) {
      const int64_t count = rows < 0 ? 6 - row : rows;
      memset(some, 0, sizeof some);
      map.to = some;
      map.row = row;
      map.rows = rows;
      CHECK_INT(rp_model_attention_maps(model, &batch, 0, &map, 1), RP_OK);
      CHECK(memcmp(some, whole + 6 * row, (size_t)(6 * count) * sizeof *some) == 0);
      for (int64_t i = 6 * count; i < MOST; i++) CHECK(some[i] == 0);
    }
  }
  rp_model_free(model);
}

/* What a decoder's second layer reads of the source does not come from the batch before. */
static void test_each_pass_reads_its_own_source(void) {
  const int32_t others[] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
  rp_model *const model = make("none", LAYERS, LAYERS), *const fresh = make("none", LAYERS, LAYERS);
  rp_batch batch = batch_of(), other = batch_of();
  rp_real hidden[3 * 16], one[4], expected[4];
  other.source = others;
  CHECK_INT(rp_model_hidden(model, &other, hidden), RP_OK);
  CHECK_INT(rp_model_hidden(fresh, &batch, hidden), RP_OK);
  CHECK_INT(
      rp_model_attention_map(model, &batch, RP_ATTENTION_DECODER, 1, 0, 0, RP_SHOW_CONTENT, one),
      RP_OK);
  CHECK_INT(rp_model_attention_map(fresh, &batch, RP_ATTENTION_DECODER, 1, 0, 0, RP_SHOW_CONTENT,
                                   expected),
            RP_OK);
  CHECK(memcmp(one, expected, sizeof one) == 0);
  rp_model_free(model);
  rp_model_free(fresh);
}

/* ---- the parts of logits ---------------------------------------------------- */

static void test_parts(void) {
  static const struct {
    const char *position, *names[3];
    int shows[3];
  } known[] = {
      {"none", {"content"}, {RP_SHOW_CONTENT}},
      {"rope", {"content"}, {RP_SHOW_CONTENT}},
      {"shaw", {"content", "key_table"}, {RP_SHOW_CONTENT, RP_SHOW_KEY}},
      {"t5", {"content", "bias_table"}, {RP_SHOW_CONTENT, RP_SHOW_BIAS}},
      {"alibi", {"content", "slopes"}, {RP_SHOW_CONTENT, RP_SHOW_BIAS}},
      {"deberta",
       {"content", "key_table", "query_table"},
       {RP_SHOW_CONTENT, RP_SHOW_KEY, RP_SHOW_QUERY}},
      {"transformer-xl",
       {"content", "position_weight", "content_bias"},
       {RP_SHOW_CONTENT, RP_SHOW_KEY, RP_SHOW_QUERY}},
  };
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    rp_model *const model = make(known[i].position, 1, 1);
    for (int index = 0; index < 4; index++) {
      int show = -1;
      const char *const name = rp_model_attention_part(model, RP_ATTENTION_DECODER, index, &show);
      if (index == 3 || known[i].names[index] == NULL) {
        CHECK(name == NULL);
        continue;
      }
      CHECK_TEXT(name, known[i].names[index]);
      CHECK_INT(show, known[i].shows[index]);
      CHECK(rp_model_attention_part(model, RP_ATTENTION_DECODER, index, NULL) == name);
    }
    CHECK_TEXT(rp_model_attention_part(model, RP_ATTENTION_CROSS, 0, NULL), "content");
    CHECK(rp_model_attention_part(model, RP_ATTENTION_CROSS, 1, NULL) == NULL);
    rp_model_free(model);
  }
  rp_model *const alone = make("shaw", 0, 1);
  CHECK(rp_model_attention_part(alone, RP_ATTENTION_ENCODER, 0, NULL) == NULL);
  CHECK(rp_model_attention_part(alone, RP_ATTENTION_CROSS, 0, NULL) == NULL);
  CHECK(rp_model_attention_part(alone, 3, 0, NULL) == NULL);
  CHECK(rp_model_attention_part(alone, -1, 0, NULL) == NULL);
  CHECK(rp_model_attention_part(alone, RP_ATTENTION_DECODER, -1, NULL) == NULL);
  CHECK(rp_model_attention_part(NULL, RP_ATTENTION_DECODER, 0, NULL) == NULL);
  rp_model_free(alone);
}

/* ---- memory ----------------------------------------------------------------- */

/* Bytes that are held, by a list of what was allocated. */
static struct {
  void *block[64];
  int64_t bytes[64], held, most;
} ledger;

static void *noted_allocate(void *context, size_t bytes) {
  void *const block = faulty_allocate(context, bytes);
  for (int i = 0; block != NULL && i < 64; i++) {
    if (ledger.block[i] != NULL) continue;
    ledger.block[i] = block;
    ledger.bytes[i] = (int64_t)bytes;
    ledger.held += (int64_t)bytes;
    if (ledger.held > ledger.most) ledger.most = ledger.held;
    break;
  }
  return block;
}

static void noted_release(void *context, void *block) {
  for (int i = 0; block != NULL && i < 64; i++) {
    if (ledger.block[i] != block) continue;
    ledger.block[i] = NULL;
    ledger.held -= ledger.bytes[i];
  }
  faulty_release(context, block);
}

/* Some rows of one head of a long sentence: the model itself grows with its tokens, and nothing
 * with their square. */
static void test_a_long_sentence_takes_no_square(void) {
  enum { N = 4096, ROWS = 16 };
  static const rpi_allocator noted = {noted_allocate, noted_release, NULL};
  const int64_t square = (int64_t)N * N * (int64_t)sizeof(rp_real);
  int32_t *const tokens = malloc(N * sizeof *tokens);
  rp_real *const to = malloc((size_t)N * ROWS * sizeof *to);
  if (!CHECK(tokens != NULL && to != NULL)) exit(1);
  for (int i = 0; i < N; i++) tokens[i] = i % 11;
  rp_config config = rp_config_default();
  config.width = 16;
  config.heads = HEADS;
  config.feed_forward = 16;
  config.max_length = N;
  config.source_vocabulary = 11;
  config.encoder.layers = LAYERS;
  config.decoder.layers = 0;
  rp_limits limits = rp_limits_default();
  limits.tokens = N;
  limits.sentences = 1;
  limits.training = 0;
  const int64_t offsets[] = {0, N};
  rp_batch batch = rp_batch_default();
  batch.sentences = 1;
  batch.source = tokens;
  batch.source_offsets = offsets;
  rp_model *model = NULL;
  reset();
  rpi_set_allocator(&noted);
  if (!CHECK_INT(rp_model_create(&config, &limits, &model), RP_OK)) exit(1);
  CHECK(ledger.held < square / 8);
  const int64_t before = ledger.held;
  ledger.most = before;
  rp_model_map map = map_of(RP_ATTENTION_ENCODER, 1, 1, 0, RP_SHOW_PROBABILITIES, to);
  map.row = 2000;
  map.rows = ROWS;
  CHECK_INT(rp_model_attention_maps(model, &batch, 0, &map, 1), RP_OK);
  CHECK_INT(ledger.held, before);
  CHECK(ledger.most > before); /* the ledger counts */
  printf("one head of %d tokens: %lld bytes beside the model's %lld and the map\n", N,
         (long long)(ledger.most - before), (long long)before);
  CHECK(ledger.most - before < square / 32);
  for (int i = 0; i < ROWS; i++) {
    double sum = 0;
    for (int j = 0; j < N; j++) sum += (double)to[i * N + j];
    CHECK_NEAR(sum, 1, 1e-5);
  }
  rp_model_free(model);
  CHECK_INT(ledger.held, 0);
  rpi_set_allocator(NULL);
  free(tokens);
  free(to);
}

static void test_failed_allocations(void) {
  rp_model *const model = make("deberta", LAYERS, LAYERS);
  const rp_batch batch = batch_of();
  rp_real first[MOST], second[MOST], expected[2][MOST];
  const rp_model_map maps[] = {
      map_of(RP_ATTENTION_CROSS, 1, 0, 0, RP_SHOW_PROBABILITIES, expected[0]),
      map_of(RP_ATTENTION_ENCODER, 0, 1, 2, RP_SHOW_SCORES, expected[1])};
  CHECK_INT(rp_model_attention_maps(model, &batch, 0, maps, 2), RP_OK);
  rp_model_map again[] = {maps[0], maps[1]};
  again[0].to = first;
  again[1].to = second;
  rpi_set_allocator(&faulty_allocator);
  int n = 0;
  do {
    reset();
    memory.fail_at = ++n;
    const rp_status status = rp_model_attention_maps(model, &batch, 0, again, 2);
    CHECK_INT(memory.held, 0);
    if (memory.calls < n) {
      CHECK_INT(status, RP_OK);
      break;
    }
    CHECK_INT(status, RP_ERROR_MEMORY);
    CHECK_TEXT(rp_last_error(), "model: no memory for ");
  } while (n < 100);
  CHECK(n > 1 && n < 100);
  rpi_set_allocator(NULL);
  CHECK(memcmp(first, expected[0], 10 * sizeof *first) == 0);
  CHECK(memcmp(second, expected[1], 36 * sizeof *second) == 0);
  rp_model_free(model);
}

/* ---- alignments ------------------------------------------------------------- */

static void test_alignments_are_means(void) {
  rp_model *const model = make("shaw", LAYERS, LAYERS);
  const rp_batch batch = batch_of();
  const int64_t layers[] = {0, -1, 0}, heads[] = {1};
  rp_real weights[2 * 5 + 1 * 6], map[MOST];
  for (int all = 0; all < 2; all++) {
    CHECK_INT(rp_model_alignments(model, &batch, layers, 3, all ? NULL : heads, 1, weights), RP_OK);
    const rp_real *at = weights;
    for (int64_t b = 0; b < SENTENCES; b++) {
      const int64_t pairs = length_of(target_offsets, b) * length_of(source_offsets, b);
      double mean[MOST] = {0};
      for (int l = 0; l < 3; l++) {
        for (int64_t h = all ? 0 : 1; h < HEADS; h++) {
          CHECK_INT(rp_model_attention_map(model, &batch, RP_ATTENTION_CROSS, layers[l] ? 1 : 0, h,
                                           b, RP_SHOW_PROBABILITIES, map),
                    RP_OK);
          for (int64_t i = 0; i < pairs; i++) mean[i] += (double)map[i] / (all ? 6 : 3);
        }
      }
      for (int64_t i = 0; i < pairs; i++) CHECK_NEAR((double)at[i], mean[i], 1e-6);
      at += pairs;
    }
  }
  rp_model_free(model);
}

/* ---- refusals --------------------------------------------------------------- */

#define REFUSED(call, status, part)                                                                \
  do {                                                                                             \
    CHECK_INT(call, status);                                                                       \
    CHECK_TEXT(rp_last_error(), part);                                                             \
  } while (0)

static void test_maps_refused(void) {
  rp_model *const model = make("shaw", 1, 2), *const alone = make("shaw", 1, 0);
  const rp_batch batch = batch_of();
  rp_real to[2][MOST];
  const rp_model_map good = map_of(RP_ATTENTION_ENCODER, 0, 0, 0, RP_SHOW_SCORES, to[0]);
  const struct {
    rp_model_map map;
    rp_status status;
    const char *part;
  } refused[] = {
      {{.kind = 0}, RP_ERROR_ARGUMENT, "maps[1].struct_size=0, must be"},
      {map_of(3, 0, 0, 0, 0, to[1]), RP_ERROR_ARGUMENT, "maps[1].kind=3, must be"},
      {map_of(-1, 0, 0, 0, 0, to[1]), RP_ERROR_ARGUMENT, "maps[1].kind=-1, must be"},
      {map_of(0, 1, 0, 0, 0, to[1]), RP_ERROR_ARGUMENT, "maps[1].layer=1, must be from 0 to 0"},
      {map_of(1, 2, 0, 0, 0, to[1]), RP_ERROR_ARGUMENT, "maps[1].layer=2, must be from 0 to 1"},
      {map_of(2, -1, 0, 0, 0, to[1]), RP_ERROR_ARGUMENT, "maps[1].layer=-1"},
      {map_of(0, 0, 2, 0, 0, to[1]), RP_ERROR_ARGUMENT, "maps[1].head=2, must be from 0 to 1"},
      {map_of(0, 0, -1, 0, 0, to[1]), RP_ERROR_ARGUMENT, "maps[1].head=-1"},
      {map_of(0, 0, 0, 3, 0, to[1]), RP_ERROR_ARGUMENT, "maps[1].sentence=3"},
      {map_of(0, 0, 0, -1, 0, to[1]), RP_ERROR_ARGUMENT, "maps[1].sentence=-1"},
      {map_of(0, 0, 0, 0, 3, to[1]), RP_ERROR_ARGUMENT,
       "maps[1].show=3, must be RP_SHOW_PROBABILITIES=0"},
      {map_of(0, 0, 0, 0, RP_SHOW_KEY + 2, to[1]), RP_ERROR_ARGUMENT, "maps[1].show=12"},
      {map_of(0, 0, 0, 0, -1, to[1]), RP_ERROR_ARGUMENT, "maps[1].show=-1"},
      {map_of(0, 0, 0, 0, 0, NULL), RP_ERROR_ARGUMENT, "maps[1].to is NULL"},
  };
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
    const rp_model_map maps[] = {good, refused[i].map};
    REFUSED(rp_model_attention_maps(model, &batch, 0, maps, 2), refused[i].status, refused[i].part);
  }
  static const int64_t rows[][2] = {{6, 0}, {5, 1}, {-1, 2}, {0, 6}, {0, -2}, {1, INT64_MAX}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    rp_model_map map = good;
    map.row = rows[i][0];
    map.rows = rows[i][1];
    REFUSED(rp_model_attention_maps(model, &batch, 0, &map, 1), RP_ERROR_SHAPE,
            "but the sentence has 5 queries");
  }
  REFUSED(rp_model_attention_maps(NULL, &batch, 0, &good, 1), RP_ERROR_ARGUMENT, "model is NULL");
  REFUSED(rp_model_attention_maps(model, NULL, 0, &good, 1), RP_ERROR_ARGUMENT, "batch is NULL");
  REFUSED(rp_model_attention_maps(model, &batch, 0, NULL, 1), RP_ERROR_ARGUMENT, "maps is NULL");
  REFUSED(rp_model_attention_maps(model, &batch, 0, &good, -1), RP_ERROR_ARGUMENT, "count=-1");
  REFUSED(rp_model_attention_map(model, &batch, 0, 0, 0, 0, 0, NULL), RP_ERROR_ARGUMENT,
          "model: to is NULL");
  REFUSED(rp_model_attention_map(model, &batch, 0, 4, 0, 0, 0, to[0]), RP_ERROR_ARGUMENT,
          "model: layer=4");
  rp_batch source = batch_of();
  source.target = NULL;
  source.target_offsets = NULL;
  REFUSED(rp_model_attention_map(alone, &source, 1, 0, 0, 0, 0, to[0]), RP_ERROR_ARGUMENT,
          "it has no decoder");
  REFUSED(rp_model_attention_map(alone, &source, 2, 0, 0, 0, 0, to[0]), RP_ERROR_ARGUMENT,
          "it has no attention from a decoder to an encoder");
  rp_model_free(model);
  rp_model_free(alone);
}

/* Sums by hand; rows that come one by one give the same bits; what is NULL is left out. */
static void test_sums(void) {
  enum { QUERIES = 3, KEYS = 4, OFFSETS = QUERIES - 1 + KEYS };
  const rp_real p[QUERIES * KEYS] = {1,
                                     0,
                                     0,
                                     0,
                                     (rp_real)0.5,
                                     0,
                                     0,
                                     (rp_real)0.5,
                                     (rp_real)0.25,
                                     (rp_real)0.25,
                                     (rp_real)0.25,
                                     (rp_real)0.25};
  double mass[OFFSETS] = {0}, entropy[QUERIES], distance = 0;
  CHECK_INT(rp_map_sums(p, QUERIES, KEYS, 0, QUERIES, mass, entropy, &distance), RP_OK);
  const double by_hand[] = {0.25, 0.75, 1.25, 0.25, 0.5, 0};
  for (int i = 0; i < OFFSETS; i++) CHECK_NEAR(mass[i], by_hand[i] / QUERIES, 1e-15);
  CHECK_NEAR(entropy[0], 0, 0);
  CHECK_NEAR(entropy[1], log(2), 1e-15);
  CHECK_NEAR(entropy[2], log(4), 1e-15);
  CHECK_NEAR(distance, (0 + 1.5 + 1) / QUERIES, 1e-15);

  double again[OFFSETS] = {0}, each[QUERIES], far = 0;
  for (int i = 0; i < QUERIES; i++) {
    CHECK_INT(rp_map_sums(p + i * KEYS, QUERIES, KEYS, i, 1, again, each + i, &far), RP_OK);
  }
  CHECK(memcmp(again, mass, sizeof mass) == 0 && memcmp(each, entropy, sizeof each) == 0);
  CHECK(far == distance);
  CHECK_INT(rp_map_sums(p, QUERIES, KEYS, 0, QUERIES, NULL, NULL, NULL), RP_OK);
  CHECK_INT(rp_map_sums(NULL, 0, 0, 0, 0, mass, entropy, &distance), RP_OK);
  CHECK_INT(rp_map_sums(NULL, 2, 0, 0, 2, NULL, entropy, NULL), RP_OK); /* no keys */
  CHECK(entropy[0] == 0 && entropy[1] == 0);
}

static void test_sums_refused(void) {
  const rp_real p[] = {1};
  double sum = 0;
  REFUSED(rp_map_sums(NULL, 1, 1, 0, 1, &sum, NULL, NULL), RP_ERROR_ARGUMENT, "map: p is NULL");
  REFUSED(rp_map_sums(p, -1, 1, 0, 0, &sum, NULL, NULL), RP_ERROR_SHAPE, "queries=-1, keys=1");
  REFUSED(rp_map_sums(p, 1, -1, 0, 1, &sum, NULL, NULL), RP_ERROR_SHAPE, "queries=1, keys=-1");
  const int64_t most = (int64_t)1 << 40;
  REFUSED(rp_map_sums(p, most + 1, 1, 0, 1, &sum, NULL, NULL), RP_ERROR_SHAPE, "are too many");
  REFUSED(rp_map_sums(p, 1, INT64_MAX, 0, 1, &sum, NULL, NULL), RP_ERROR_SHAPE, "are too many");
  REFUSED(rp_map_sums(p, most, most, 0, 1, &sum, NULL, NULL), RP_ERROR_SHAPE, "are too many");
  static const int64_t rows[][2] = {{0, 2}, {1, 1}, {-1, 1}, {2, 0}, {0, -1}, {1, INT64_MAX}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    REFUSED(rp_map_sums(p, 1, 1, rows[i][0], rows[i][1], &sum, NULL, NULL), RP_ERROR_SHAPE,
            "but there are 1 queries");
  }
  CHECK(sum == 0);
}

static void test_alignments_refused(void) {
  rp_model *const model = make("shaw", 1, 2), *const alone = make("shaw", 0, 2);
  const rp_batch batch = batch_of();
  const int64_t one[] = {0}, two[] = {1, 2}, low[] = {-3};
  rp_real weights[MOST];
  REFUSED(rp_model_alignments(model, &batch, NULL, 1, NULL, 0, weights), RP_ERROR_ARGUMENT,
          "layers is NULL");
  REFUSED(rp_model_alignments(model, &batch, one, 0, NULL, 0, weights), RP_ERROR_ARGUMENT,
          "layer_count=0");
  REFUSED(rp_model_alignments(model, &batch, two, 2, NULL, 0, weights), RP_ERROR_ARGUMENT,
          "layers[1]=2, must be from -2 to 1");
  REFUSED(rp_model_alignments(model, &batch, low, 1, NULL, 0, weights), RP_ERROR_ARGUMENT,
          "layers[0]=-3");
  REFUSED(rp_model_alignments(model, &batch, one, 1, one, 0, weights), RP_ERROR_ARGUMENT,
          "head_count=0, must be at least 1");
  REFUSED(rp_model_alignments(model, &batch, one, 1, two, 2, weights), RP_ERROR_ARGUMENT,
          "heads[1]=2, must be from 0 to 1");
  REFUSED(rp_model_alignments(model, &batch, one, 1, low, 1, weights), RP_ERROR_ARGUMENT,
          "heads[0]=-3");
  REFUSED(rp_model_alignments(alone, &batch, one, 1, NULL, 0, weights), RP_ERROR_ARGUMENT,
          "and so no alignments");
  rp_model_free(model);
  rp_model_free(alone);
}

int main(void) {
  test_many_from_one_pass();
  test_some_rows();
  test_each_pass_reads_its_own_source();
  test_parts();
  test_a_long_sentence_takes_no_square();
  test_failed_allocations();
  test_alignments_are_means();
  test_maps_refused();
  test_alignments_refused();
  test_sums();
  test_sums_refused();
  return check_report();
}
