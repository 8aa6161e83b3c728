/* SPDX-License-Identifier: Apache-2.0
 *
 * model_file.c: which arrays of a model go into which file, under which names.
 */
#include "file/model_file.h"

#include <stdio.h>
#include <string.h>

#include "file/config_metadata.h"

/* The tensors of one file, and the memory of their names. */
typedef struct listing {
  int64_t count;
  rpi_tensor *tensors;
  char (*names)[RPI_NAME];
} listing;

static void add_all(const rpi_layout *layout, const char *prefix, real *numbers, listing *to) {
  for (int64_t p = 0; p < layout->count; p++) {
    const rpi_parameter *const from = &layout->parameters[p];
    snprintf(to->names[to->count], RPI_NAME, "%s%s", prefix, from->name);
    to->tensors[to->count] = (rpi_tensor){.name = to->names[to->count],
                                          .dimensions = from->dimensions,
                                          .shape = {from->shape[0], from->shape[1], from->shape[2]},
                                          .data = numbers ? numbers + from->at : NULL,
                                          .place = from->at};
    to->count++;
  }
}

static void release(listing *l) {
  rpi_release(l->tensors);
  rpi_release(l->names);
}

static rp_status make_room(int64_t most, listing *to) {
  *to = (listing){.tensors = rpi_allocate((size_t)most * sizeof *to->tensors),
                  .names = rpi_allocate((size_t)most * sizeof *to->names)};
  if (to->tensors && to->names) return RP_OK;
  release(to);
  return rpi_fail(RP_ERROR_MEMORY, "model: no memory for the names of %lld tensors",
                  (rpi_wide)most);
}

static rp_status list(const rp_model *m, int what, listing *to) {
  RPI_CHECK(what >= RP_SAVE_WEIGHTS && what <= RP_SAVE_OPTIMIZER, RP_ERROR_ARGUMENT,
            "model: what=%d, must be RP_SAVE_WEIGHTS=0, RP_SAVE_AVERAGE=1 or RP_SAVE_OPTIMIZER=2",
            what);
  RPI_CHECK(what != RP_SAVE_AVERAGE || m->average, RP_ERROR_ORDER,
            "model: it keeps no average; ema is 0, or it was made without training");
  RPI_CHECK(what != RP_SAVE_OPTIMIZER || m->moment1, RP_ERROR_ORDER,
            "model: it was made with limits.training=0 and has no moments");
  const rpi_layout *const layout = &m->layout;
  RPI_TRY(make_room(3 * layout->count, to));
  if (what == RP_SAVE_WEIGHTS) add_all(layout, "", m->weights, to);
  if (what == RP_SAVE_AVERAGE) add_all(layout, "", m->average, to);
  if (what != RP_SAVE_OPTIMIZER) return RP_OK;
  add_all(layout, "moment1.", m->moment1, to);
  add_all(layout, "moment2.", m->moment2, to);
  if (m->average) add_all(layout, "average.", m->average, to);
  return RP_OK;
}

static rp_status save_weights(const rp_model *m, const char *path, const listing *l) {
  rpi_config_pairs pairs;
  RPI_TRY(rpi_config_pairs_of(&m->config, &pairs));
  return rpi_safetensors_write(path, pairs.pairs, pairs.count, l->tensors, l->count);
}

static rp_status save_optimizer(rp_model *m, const char *path, const listing *l) {
  char step[24], attempt[24];
  RPI_TRY(rpi_model_settle(m));
  snprintf(step, sizeof step, "%lld", (rpi_wide)m->step);
  snprintf(attempt, sizeof attempt, "%lld", (rpi_wide)m->attempt);
  const rpi_text_pair pairs[] = {
      {RPI_FORMAT_KEY, RPI_FORMAT}, {"step", step}, {"attempt", attempt}};
  return rpi_safetensors_write(path, pairs, 3, l->tensors, l->count);
}

/* Has the tensors of a listing point to memory of the host: one copy of each array of numbers that
 * they are in. Nothing is to be done where the host sees the model's own. */
typedef struct mirror {
  real *of[3]; /* of weights or average; of both moments and the average */
  real *from[3];
  int count;
} mirror;

static void mirror_release(mirror *x) {
  for (int i = 0; i < x->count; i++) rpi_release(x->of[i]);
}

static rp_status mirror_make(const rp_model *m, int what, listing *l, mirror *x) {
  *x = (mirror){.count = 0};
  if (m->ops->host) return RP_OK;
  real *const all[] = {m->moment1, m->moment2, m->average};
  if (what == RP_SAVE_OPTIMIZER) memcpy(x->from, all, sizeof all);
  else x->from[0] = what == RP_SAVE_WEIGHTS ? m->weights : m->average;
  const int64_t bytes = m->layout.numbers * (int64_t)sizeof(real);
  for (int64_t first = 0; first < l->count; first += m->layout.count) {
    real *const copy = rpi_allocate((size_t)bytes);
    if (!copy) {
      mirror_release(x);
      return rpi_fail(RP_ERROR_MEMORY, "model: no memory for %lld bytes beside those on %s",
                      (rpi_wide)bytes, m->device);
    }
    x->of[x->count++] = copy;
    for (int64_t p = 0; p < m->layout.count; p++) {
      l->tensors[first + p].data = copy + m->layout.parameters[p].at;
    }
  }
  return RP_OK;
}

static rp_status mirror_read(const rp_model *m, const mirror *x) {
  for (int i = 0; i < x->count; i++) {
    RPI_TRY(m->ops->read(x->of[i], x->from[i], m->layout.numbers * (int64_t)sizeof(real)));
  }
  return RP_OK;
}

static rp_status mirror_write(const rp_model *m, const mirror *x) {
  for (int i = 0; i < x->count; i++) {
    RPI_TRY(m->ops->write(x->from[i], x->of[i], m->layout.numbers * (int64_t)sizeof(real)));
  }
  return RP_OK;
}

static rp_status save(rp_model *m, const char *path, int what, listing *l) {
  mirror x;
  RPI_TRY(mirror_make(m, what, l, &x));
  rp_status status = mirror_read(m, &x);
  if (status == RP_OK && what == RP_SAVE_OPTIMIZER) status = save_optimizer(m, path, l);
  else if (status == RP_OK) status = save_weights(m, path, l);
  mirror_release(&x);
  return status;
}

rp_status rpi_model_save(rp_model *m, const char *path, int what) {
  listing l = {.count = 0};
  RPI_TRY(list(m, what, &l));
  const rp_status status = save(m, path, what, &l);
  release(&l);
  return status;
}

/* ---- and back -------------------------------------------------------------- */

typedef struct counters {
  const char *path;
  int64_t step, attempt; /* -1: not met */
} counters;

static rp_status read_counter(const char *path, const char *key, const char *value, int64_t *to) {
  RPI_CHECK(rpi_read_integer(value, to) && *to >= 0 && *to <= RPI_MOST_STEPS, RP_ERROR_FILE,
            "model: %s has %s='%.40s', expected a whole number from 0 to 2^40", path, key, value);
  return RP_OK;
}

static rp_status see_pair(void *context, const char *key, const char *value) {
  counters *const found = context;
  if (strcmp(key, "step") == 0) return read_counter(found->path, key, value, &found->step);
  if (strcmp(key, "attempt") == 0) {
    return read_counter(found->path, key, value, &found->attempt);
  }
  return RP_OK;
}

/* is_new: a model that nobody has yet. Only then may a failure leave a part of the file in it. */
static rp_status read_tensors(rp_model *m, const char *path, int what, listing *l, bool is_new,
                              rpi_header_mark *mark) {
  mirror x;
  RPI_TRY(mirror_make(m, what, l, &x));
  rp_status status = mirror_read(m, &x); /* what lies between the tensors stays as it is */
  if (status == RP_OK)
    status = rpi_safetensors_read(path, l->tensors, l->count, is_new || x.count > 0, mark);
  if (status == RP_OK) status = mirror_write(m, &x);
  mirror_release(&x);
  return status;
}

static rp_status load(rp_model *m, const char *path, int what, listing *l, bool is_new,
                      rpi_header_mark *mark) {
  counters found = {path, -1, -1};
  if (what == RP_SAVE_OPTIMIZER) {
    RPI_TRY(rpi_safetensors_metadata(path, see_pair, &found, mark));
    RPI_CHECK(found.step >= 0 && found.attempt >= found.step, RP_ERROR_FILE,
              "model: %s has step %lld and attempt %lld (-1: none), so it is no optimizer state",
              path, (rpi_wide)found.step, (rpi_wide)found.attempt);
  }
  RPI_TRY(read_tensors(m, path, what, l, is_new, mark));
  if (what == RP_SAVE_WEIGHTS && m->average) {
    const int64_t bytes = m->layout.numbers * (int64_t)sizeof(real);
    RPI_TRY(m->ops->copy(m->average, m->weights, bytes));
  }
  if (what != RP_SAVE_OPTIMIZER) return RP_OK;
  return rpi_model_count_from(m, found.step, found.attempt);
}

static rp_status load_listed(rp_model *m, const char *path, int what, bool is_new,
                             rpi_header_mark *mark) {
  listing l = {.count = 0};
  RPI_TRY(list(m, what, &l));
  const rp_status status = load(m, path, what, &l, is_new, mark);
  release(&l);
  return status;
}

rp_status rpi_model_load(rp_model *m, const char *path, int what) {
  rpi_header_mark mark = {0};
  return load_listed(m, path, what, false, &mark);
}

/* ---- a model from a file --------------------------------------------------- */

static rp_status check_tensors(const char *path, const rpi_layout *layout, rpi_header_mark *mark) {
  listing l = {.count = 0};
  RPI_TRY(make_room(layout->count, &l));
  add_all(layout, "", NULL, &l);
  const rp_status status = rpi_safetensors_check(path, l.tensors, l.count, mark);
  release(&l);
  return status;
}

/* Has the file the tensors of its configuration? Whoever makes a model of it allocates what the
 * configuration says, which may be anything; so the tensors, which must be there, are asked first.
 * Names and shapes of 2,048 layers take 11 MB. */
static rp_status check_weights(const char *path, const rp_config *config, rpi_header_mark *mark) {
  rpi_layout layout;
  rpi_arena counting = rpi_arena_counting();
  rpi_layout_make(config, &counting, &layout);
  void *const memory = rpi_allocate((size_t)counting.used);
  RPI_CHECK(memory, RP_ERROR_MEMORY, "model: no memory for %lld bytes of its layout",
            (rpi_wide)counting.used);
  rpi_arena arena = rpi_arena_over(memory, counting.used);
  rpi_layout_make(config, &arena, &layout);
  const rp_status status = check_tensors(path, &layout, mark);
  rpi_release(memory);
  return status;
}

static rp_status weights_config(const char *path, rp_config *config, rpi_header_mark *mark) {
  RPI_TRY(rpi_config_load(path, config, mark));
  return check_weights(path, config, mark);
}

static rp_status map_weights(rp_model *m, const char *path, rpi_header_mark *mark) {
  listing l = {.count = 0};
  RPI_TRY(list(m, RP_SAVE_WEIGHTS, &l));
  const rp_status status =
      rpi_safetensors_map(path, l.tensors, l.count, mark, &m->mapping, &m->weights);
  release(&l);
  return status;
}

/* Mapped, or else read into memory of their own. */
static rp_status take_weights(rp_model *m, const char *path, rpi_header_mark *mark) {
  if (m->ops->host) RPI_TRY(map_weights(m, path, mark));
  if (m->weights) return RP_OK;
  RPI_TRY(rpi_model_own_weights(m));
  return load_listed(m, path, RP_SAVE_WEIGHTS, true, mark);
}

/* The configuration; and the model, where one is wanted. */
static rp_status open_once(const char *path, const rp_limits *limits, rp_config *config,
                           rp_model **model, rpi_header_mark *mark) {
  RPI_TRY(weights_config(path, config, mark));
  if (!model) return RP_OK;
  rp_model *m = NULL;
  RPI_TRY(rpi_model_create_bare(config, limits, &m));
  const rp_status status = take_weights(m, path, mark);
  if (status == RP_OK) *model = m;
  else rpi_model_free(m);
  return status;
}

/* A path is opened for its configuration, and again for its tensors. Where another file takes its
 * place in between, as training replaces them, it is begun anew. */
enum { TRIES = 16 };

static rp_status open_weights(const char *path, const rp_limits *limits, rp_config *config,
                              rp_model **model) {
  rp_status status = RP_OK;
  for (int i = 0; i < TRIES; i++) {
    rpi_header_mark mark = {0};
    status = open_once(path, limits, config, model, &mark);
    if (!mark.changed) break;
  }
  return status;
}

rp_status rpi_weights_config(const char *path, rp_config *config) {
  rp_config found;
  RPI_TRY(open_weights(path, NULL, &found, NULL));
  *config = found;
  return RP_OK;
}

rp_status rpi_model_open(const char *path, const rp_limits *limits, rp_model **model) {
  rp_config config;
  return open_weights(path, limits, &config, model);
}
