/* SPDX-License-Identifier: Apache-2.0
 *
 * attend_rows.c: (1) to (3) of attention.h for single queries, whose keys lie anywhere.
 *
 * With one query nothing is shared between rows of a tile, and packing keys would cost more than
 * they are used for. So the formula is taken as it stands: a dot product a key, one with the
 * vector of its relation, and one of both kinds of vectors for the sum of values. Keys of one
 * relation mostly stand side by side (beyond the band they all do); what depends on the relation
 * alone is computed once for as many.
 *
 * A task is some heads of some rows, about ATTEND_PAIRS pairs of query and key (smaller ones are
 * not worth handing out), or whole rows where their mean probabilities are wanted. Keys come in
 * groups, whose scores are on the stack; a larger maximum rescales what is there. Keys lie
 * anywhere, so that the processor cannot guess the next one: those of the next head are asked for
 * while this one's are met. Two keys ahead came too late for memory: that is left for heads of so
 * many keys that they displace each other.
 */
#include <string.h>

#include "base/threads.h"
#include "ops/attention.h"

#define ATTEND_GROUP 256
#define ATTEND_PAIRS 1024
#define ATTEND_AHEAD 2 /* keys */
/* Numbers of one head's keys and values up to which the next head's are asked for, and, of
 * ATTEND_ROWS rows, up to which these take turns. With more both were slower, at 100 keys already.
 */
#define ATTEND_NEAR (32768 / RPI_REAL_BYTES)
#define ATTEND_CLOSE (65536 / RPI_REAL_BYTES)
#define ATTEND_VECTORS 4 /* of a value, added up in registers */
#define ATTEND_ROWS 4    /* side by side, likely of one sentence: a head meets all their keys */

/* One head's parts of the formula. */
typedef struct attend_head {
  band_part key[RP_TERMS], query[RP_TERMS], bias[RP_TERMS], value[RP_TERMS];
  int keys, queries, biases, values;
  int64_t D;
  real scale, softcap;
  const real *position_bias; /* or NULL */
  int64_t left;              /* distances that are seen: from -left on */
} attend_head;

static int attend_parts(const rp_relation *relations, int64_t head, band_part *to) {
  int count = 0;
  for (int t = 0; t < RP_TERMS; t++) {
    if (relations[t].table) to[count++] = part_of(&relations[t], head);
  }
  return count;
}

static attend_head attend_head_of(const rp_attention *s, int64_t head) {
  attend_head h = {
      .D = s->D, .scale = scale_of(s), .softcap = (real)s->softcap, .left = sight_of(s).left};
  h.keys = attend_parts(s->key, head, h.key);
  h.queries = attend_parts(s->query, head, h.query);
  h.biases = attend_parts(s->bias, head, h.bias);
  h.values = attend_parts(s->value, head, h.value);
  if (s->position_bias) h.position_bias = s->position_bias + head * s->position_bias_stride;
  return h;
}

/* A dot product before its lanes are added up. */
RPI_INLINE rpi_register attend_products(const real *x, const real *y, int64_t width) {
  rpi_register sum = {0};
  int64_t c = 0;
  for (; c + RPI_LANES <= width; c += RPI_LANES) sum += rpi_load(x + c) * rpi_load(y + c);
  if (c < width) sum += rpi_load_part(x + c, width - c) * rpi_load_part(y + c, width - c);
  return sum;
}

/* What the query adds to the score of a key at distance d, by its key terms. `last`: the rows of
 * the key before, and what they gave. */
typedef struct attend_last {
  int64_t row[RP_TERMS];
  rpi_register score[RP_TERMS];
} attend_last;

static rpi_register attend_relation(const attend_head *h, const real *q, int64_t d,
                                    attend_last *last) {
  rpi_register sum = {0};
  for (int t = 0; t < h->keys; t++) {
    const int64_t row = part_row(&h->key[t], d);
    if (row != last->row[t]) {
      const real *const vector = h->key[t].table + row * h->key[t].stride;
      last->row[t] = row;
      last->score[t] = row < 0 ? (rpi_register){0} : attend_products(q, vector, h->D);
      if (row >= 0 && h->position_bias) {
        last->score[t] += attend_products(h->position_bias, vector, h->D);
      }
    }
    sum += last->score[t];
  }
  return sum;
}

/* Asks for a key and its value: for one head a few lines each. */
RPI_INLINE void attend_ask(const real *k, int64_t to_value, int64_t D) {
  for (int64_t c = 0; c < D; c += 64 / RPI_REAL_BYTES) {
    __builtin_prefetch(k + c, 0, 3);
    __builtin_prefetch(k + to_value + c, 0, 3);
  }
}

/* The keys that will likely be met next, asked for one by one while others are met. */
typedef struct attend_next {
  const real *const *keys;
  int64_t shift, count;
} attend_next;

/* Scores of keys first to first + count - 1, in units of log 2; the query is at `at`. s has room
 * for whole vectors: the lanes of as many products are added up at once. */
static void attend_scores(const attend_head *h, const real *q, const real *const *keys,
                          int64_t shift, int64_t to_value, int64_t at, int64_t first, int64_t count,
                          attend_next next, real *s) {
  attend_last last = {.row = {-1, -1}}; /* no relation, which gives 0 */
  for (int64_t done = 0; done < count; done += RPI_LANES) {
    rpi_register sum[RPI_LANES];
    const int64_t end = rpi_min(done + RPI_LANES, count);
    for (int64_t j = end - done; j < RPI_LANES; j++) sum[j] = (rpi_register){0};
    for (int64_t j = done; j < end; j++) {
      const real *const k = keys[first + j] + shift;
      const int64_t d = first + j - at;
      if (first + j < next.count) {
        attend_ask(next.keys[first + j] + next.shift, to_value, h->D);
      }
      rpi_register own = attend_products(q, k, h->D);
      if (h->keys != 0) own += attend_relation(h, q, d, &last);
      for (int t = 0; t < h->queries; t++) {
        const int64_t row = part_row(&h->query[t], d);
        if (row < 0) continue;
        own += attend_products(k, h->query[t].table + row * h->query[t].stride, h->D);
      }
      sum[j - done] = own;
    }
    rpi_transpose(sum);
    rpi_register all = sum[0];
    RPI_UNROLL(16) for (int i = 1; i < RPI_LANES; i++) all += sum[i];
    rpi_store(s + done, h->scale * all);
  }
  for (int t = 0; t < h->biases; t++) {
    for (int64_t j = 0; j < count; j++) {
      const int64_t row = part_row(&h->bias[t], first + j - at);
      if (row >= 0) s[j] += h->bias[t].table[row * h->bias[t].stride];
    }
  }
  if (h->softcap != 0) {
    for (int64_t j = 0; j < count; j++) s[j] = h->softcap * rpi_tanh(s[j] / h->softcap);
  }
  for (int64_t j = 0; j < count; j++) s[j] *= (real)RPI_LOG2_E;
}

/* So many vectors of `to` += sum of weights * what lies at[...] + shift. */
RPI_INLINE void attend_add(const int vectors, const real *const *at, int64_t shift,
                           const real *weights, int64_t count, real *to) {
  rpi_register sum[ATTEND_VECTORS];
  RPI_UNROLL(4) for (int v = 0; v < vectors; v++) sum[v] = rpi_load(to + v * RPI_LANES);
  for (int64_t j = 0; j < count; j++) {
    const real *const x = at[j] + shift;
    RPI_UNROLL(4)
    for (int v = 0; v < vectors; v++) sum[v] += weights[j] * rpi_load(x + v * RPI_LANES);
  }
  RPI_UNROLL(4) for (int v = 0; v < vectors; v++) rpi_store(to + v * RPI_LANES, sum[v]);
}

static void attend_add_all(const real *const *at, int64_t shift, const real *weights, int64_t count,
                           int64_t width, real *to) {
  int64_t c = 0;
  for (; c + ATTEND_VECTORS * RPI_LANES <= width; c += ATTEND_VECTORS * RPI_LANES) {
    attend_add(ATTEND_VECTORS, at, shift + c, weights, count, to + c);
  }
  for (; c + RPI_LANES <= width; c += RPI_LANES) {
    attend_add(1, at, shift + c, weights, count, to + c);
  }
  for (; c < width; c++) {
    for (int64_t j = 0; j < count; j++) to[c] += weights[j] * at[j][shift + c];
  }
}

/* out += sum of weights * (values + vectors of their relations). */
static void attend_values(const attend_head *h, const real *const *keys, int64_t shift, int64_t at,
                          int64_t first, int64_t count, const real *weights, real *out) {
  attend_add_all(keys + first, shift, weights, count, h->D, out);
  for (int t = 0; t < h->values; t++) {
    const band_part *const value = &h->value[t];
    const real *vectors[ATTEND_GROUP];
    real sums[ATTEND_GROUP];
    int64_t met = 0;
    for (int64_t j = 0, before = -1; j < count; j++) {
      const int64_t row = part_row(value, first + j - at);
      if (row < 0) continue;
      if (row != before) {
        vectors[met] = value->table + row * value->stride;
        sums[met++] = 0;
        before = row;
      }
      sums[met - 1] += weights[j];
    }
    attend_add_all(vectors, 0, sums, met, h->D, out);
  }
}

/* Maximum and sum of the weights that a head's row has. */
typedef struct attend_sums {
  real max, sum;
} attend_sums;

/* The next head of this row; behind the last one the first of a row further on. Of so many keys
 * that they would be gone again until then, the next but one of the same head. */
static attend_next attend_next_of(const rpi_attend_rows_args *a, int64_t row, int64_t head,
                                  int64_t group) {
  const rp_attention *const s = a->shape;
  const int64_t D = s->D, keys = a->counts[row], own = key_head(s, head);
  if (keys * 2 * D > ATTEND_NEAR) {
    return (attend_next){a->keys[row] + ATTEND_AHEAD, a->shift + own * D, keys - ATTEND_AHEAD};
  }
  if (head + 1 < s->H) {
    const int64_t next = key_head(s, head + 1);
    return (attend_next){a->keys[row], a->shift + next * D, next == own ? 0 : keys};
  }
  if (row + group >= a->rows) return (attend_next){0};
  return (attend_next){a->keys[row + group], a->shift, a->counts[row + group]};
}

static attend_sums attend_one(const rpi_attend_rows_args *a, const attend_head *h, int64_t row,
                              int64_t head, int64_t group) {
  const attend_next next = attend_next_of(a, row, head, group);
  const int64_t D = h->D, keys = a->counts[row], at = keys - 1;
  const int64_t column = key_head(a->shape, head) * D;
  const real *const q = a->q + row * a->q_stride + head * D;
  real *const out = a->out + row * a->out_stride + head * D;
  attend_sums all = {.max = (real)-INFINITY};
  memset(out, 0, (size_t)D * sizeof *out);
  for (int64_t first = rpi_max(at - h->left, 0), count; first < keys; first += count) {
    real s[ATTEND_GROUP];
    count = rpi_min(ATTEND_GROUP, keys - first);
    attend_scores(h, q, a->keys[row], a->shift + column, a->to_value, at, first, count, next, s);
    real max = all.max;
    for (int64_t j = 0; j < count; j++) max = s[j] > max ? s[j] : max;
    if (max > all.max) {
      const real shrink = all.sum == 0 ? 0 : rpi_exp2(all.max - max);
      all.max = max;
      all.sum *= shrink;
      for (int64_t c = 0; c < D; c++) out[c] *= shrink;
    }
    if (max == (real)-INFINITY) max = 0; /* a table hides these keys: they weigh 0 */
    real sum = 0;
    _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < count; j++) {
      s[j] = rpi_exp2(s[j] - max);
      sum += s[j];
    }
    all.sum += sum;
    attend_values(h, a->keys[row], a->shift + a->to_value + column, at, first, count, s, out);
  }
  const real share = all.sum == 0 ? 0 : 1 / all.sum;
  for (int64_t c = 0; c < D; c++) out[c] *= share;
  return all;
}

/* mean += probabilities / heads */
static void attend_add_mean(const rpi_attend_rows_args *a, const attend_head *h, int64_t row,
                            int64_t head, attend_sums all) {
  const int64_t keys = a->counts[row], at = keys - 1, column = key_head(a->shape, head) * h->D;
  const real *const q = a->q + row * a->q_stride + head * h->D;
  if (all.sum == 0) return; /* it sees nothing */
  const real share = 1 / (all.sum * (real)a->shape->H);
  for (int64_t first = rpi_max(at - h->left, 0), count; first < keys; first += count) {
    real s[ATTEND_GROUP];
    count = rpi_min(ATTEND_GROUP, keys - first);
    attend_scores(h, q, a->keys[row], a->shift + column, a->to_value, at, first, count,
                  (attend_next){0}, s);
    for (int64_t j = 0; j < count; j++) a->mean[row][first + j] += share * rpi_exp2(s[j] - all.max);
  }
}

/* One call, how many heads of rows, or rows, a task has, and of how many rows the heads come side
 * by side. */
typedef struct attend_job {
  rpi_attend_rows_args args;
  int64_t items, each, group;
} attend_job;

static void attend_heads_task(void *context, int64_t task, int worker) {
  (void)worker;
  const attend_job *const job = context;
  const rpi_attend_rows_args *const a = &job->args;
  const int64_t H = a->shape->H, end = rpi_min((task + 1) * job->each, job->items);
  const int64_t group = job->group;
  attend_head h = {.D = 0};
  for (int64_t item = task * job->each, before = -1; item < end; item++) {
    const int64_t first = item / (group * H) * group, within = item - first * H;
    const int64_t rows = rpi_min(group, a->rows - first), head = within / rows;
    if (head != before) h = attend_head_of(a->shape, head);
    before = head;
    attend_one(a, &h, first + within % rows, head, group);
  }
}

static void attend_mean_task(void *context, int64_t task, int worker) {
  (void)worker;
  const attend_job *const job = context;
  const rpi_attend_rows_args *const a = &job->args;
  const int64_t end = rpi_min((task + 1) * job->each, job->items);
  for (int64_t row = task * job->each; row < end; row++) {
    for (int64_t j = 0; j < a->counts[row]; j++) a->mean[row][j] = 0;
    for (int64_t head = 0; head < a->shape->H; head++) {
      const attend_head h = attend_head_of(a->shape, head);
      attend_add_mean(a, &h, row, head, attend_one(a, &h, row, head, 1));
    }
  }
}

static rp_status attend_rows(const rpi_attend_rows_args *args) {
  const bool mean = args->mean != NULL;
  attend_job job = {.args = *args, .items = mean ? args->rows : args->rows * args->shape->H};
  int64_t pairs = 0;
  for (int64_t r = 0; r < args->rows; r++) pairs += args->counts[r] * args->shape->H;
  job.each = rpi_max(job.items * ATTEND_PAIRS / rpi_max(pairs, 1), 1);
  job.group =
      pairs * 2 * args->shape->D * ATTEND_ROWS <= job.items * ATTEND_CLOSE ? ATTEND_ROWS : 1;
  const int64_t tasks = rpi_divide_up(job.items, job.each);
  rpi_parallel_for(tasks, rpi_threads_get(), mean ? attend_mean_task : attend_heads_task, &job);
  return RP_OK;
}

static rp_status scatter(const rpi_scatter_args *args) {
  for (int64_t r = 0; r < args->rows; r++) {
    memcpy(args->to[r] + args->shift, args->x + r * args->x_stride,
           (size_t)args->columns * sizeof(real));
  }
  return RP_OK;
}
