/* SPDX-License-Identifier: Apache-2.0
 *
 * 04_translate.c: translates token ids by beam search.
 *
 *   cc 04_translate.c $(pkg-config --cflags --libs relpos) -o translate
 *   ./translate checkpoint/model.safetensors 17 4 93       one sentence
 *   ./translate checkpoint/model.safetensors < ids         a sentence a line
 *
 * It prints the score and the ids of the best translation of each. Ids are those of the tokenizer
 * that the model was trained with, and so are BEGIN and END, which stand before and after every
 * target: 1 and 2 where `relpos train` has made the tokenizer. Without arguments it tries itself: a
 * new model is saved, opened and searched, and its score must be that of the ids it says.
 */
#include <math.h>
#include <relpos/decode.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BEGIN = 1, END = 2, MOST = 4096 };

#define CHECK(call)                                                                                \
  do {                                                                                             \
    if ((call) != RP_OK) {                                                                         \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, rp_last_error());                         \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

/* An id, or the end of the program. */
static int32_t id_of(const char *text, char **rest) {
  const long id = strtol(text, rest, 10);
  if (*rest == text || id < 0 || id > INT32_MAX) {
    fprintf(stderr, "not a token id: %s\n", text);
    exit(1);
  }
  return (int32_t)id;
}

/* Prints and returns the best translation, until the next search; says so where there is none. */
static rp_hypothesis translate(rp_decoder *decoder, const int32_t *source, int64_t count) {
  const int64_t offsets[] = {0, count};
  rp_batch batch = rp_batch_default();
  batch.sentences = 1;
  batch.source = source;
  batch.source_offsets = offsets;
  rp_search search = rp_search_default();
  search.begin = BEGIN;
  search.end = END;
  CHECK(rp_decoder_search(decoder, &batch, &search));

  int64_t results = 0;
  rp_hypothesis best = {.struct_size = sizeof best};
  CHECK(rp_decoder_result_count(decoder, 0, &results));
  if (results != 0) CHECK(rp_decoder_result(decoder, 0, 0, &best));
  else fprintf(stderr, "the model's logits are not finite: no translation\n");
  printf("%.4f", best.score);
  for (int64_t i = 0; i < best.count; i++) printf(" %d", (int)best.tokens[i]);
  printf("\n");
  return best;
}

/* Lines of standard input, an empty one for an empty one. */
static void translate_lines(rp_decoder *decoder) {
  static char line[16 * MOST];
  static int32_t source[MOST];
  while (fgets(line, sizeof line, stdin)) {
    int64_t count = 0;
    char *at = line;
    for (at += strspn(at, " \t\r\n"); *at != '\0' && count < MOST; at += strspn(at, " \t\r\n")) {
      source[count++] = id_of(at, &at);
    }
    if (count == 0) printf("\n");
    else translate(decoder, source, count);
    fflush(stdout);
  }
}

/* A new model, which says something at random. */
static void save_model(const char *path) {
  rp_config config;
  rp_limits limits = rp_limits_default();
  rp_model *model = NULL;
  CHECK(rp_config_preset("tiny", &config));
  config.source_vocabulary = config.target_vocabulary = 100;
  limits.training = 0;
  CHECK(rp_model_create(&config, &limits, &model));
  CHECK(rp_model_save(model, path, RP_SAVE_WEIGHTS));
  rp_model_free(model);
}

/* Is the best translation's log-probability what the model says of these tokens? */
static int is_right(rp_model *model, rp_decoder *decoder, const int32_t *source, int64_t count) {
  static int32_t target[MOST + 1], labels[MOST + 1];
  static rp_real scores[MOST + 1];
  const rp_hypothesis best = translate(decoder, source, count);
  const int64_t places = best.count + (best.finished ? 1 : 0);
  const int64_t source_offsets[] = {0, count}, target_offsets[] = {0, places};
  target[0] = BEGIN;
  for (int64_t i = 0; i < best.count; i++) target[i + 1] = labels[i] = best.tokens[i];
  if (best.finished) labels[best.count] = END;
  rp_batch batch = rp_batch_default();
  batch.sentences = 1;
  batch.source = source;
  batch.source_offsets = source_offsets;
  batch.target = target;
  batch.target_offsets = target_offsets;
  batch.labels = labels;
  CHECK(rp_model_score(model, &batch, scores, NULL));
  double sum = 0;
  for (int64_t i = 0; i < places; i++) sum += (double)scores[i];
  return places > 0 && fabs(sum - best.log_probability) < 1e-4 * (double)places;
}

int main(int count, char **arguments) {
  static int32_t source[MOST] = {17, 4, 93};
  const char *const path = count > 1 ? arguments[1] : "04_translate.safetensors";
  if (count == 1) save_model(path);
  rp_limits limits = rp_limits_default();
  limits.training = 0;
  rp_model *model = NULL;
  rp_decoder *decoder = NULL;
  CHECK(rp_model_open(path, &limits, &model));
  CHECK(rp_decoder_create(&model, 1, &decoder));

  int right = 1;
  char *rest;
  for (int i = 2; i < count && i - 2 < MOST; i++) source[i - 2] = id_of(arguments[i], &rest);
  if (count == 1) right = is_right(model, decoder, source, 3);
  else if (count > 2) translate(decoder, source, count - 2);
  else translate_lines(decoder);
  rp_decoder_free(decoder);
  rp_model_free(model);
  if (count > 1) return 0;
  remove(path);
  printf("%s\n", right ? "all as it should be" : "the score is another");
  return right ? 0 : 1;
}
