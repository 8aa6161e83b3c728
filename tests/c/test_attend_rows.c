/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attend_rows.c: single queries with keys anywhere, against the formula written out. Terms of
 * whole models are test_cache.c's.
 */
#include "layer.h"

enum { ROWS = 9, MOST_KEYS = 700, TOKENS = 900, TABLE = 12, CASES = 60 };

typedef struct layer {
  rpi_attend_rows_args args;
} layer;

static void run(const rp_ops *ops, void *context) {
  CHECK_INT(ops->attend_rows(&((const layer *)context)->args), RP_OK);
}

/* One call: numbers, where they are, and what it is asked for. */
typedef struct call {
  rp_attention shape;
  int32_t buckets[64];
  const real *places[ROWS][MOST_KEYS];
  const real *const *lists[ROWS];
  int64_t counts[ROWS];
  real *means[ROWS];
  array q, log, tables, bias, out, mean;
} call;

static rp_relation relation(const call *c, int64_t D, int64_t *table, bool per_head, bool buckets) {
  const int64_t left = draw() % 6, right = 5 - left;
  rp_relation r = {.table = c->tables.data + (*table)++ * 8 * TABLE * D,
                   .head_stride = per_head ? TABLE * D : 0,
                   .row_stride = D,
                   .rows = buckets ? TABLE : left + 1 + right,
                   .left = left,
                   .right = right,
                   .beyond = draw() % 2 ? RP_BEYOND_CLIP : RP_BEYOND_NONE};
  if (!buckets) return r;
  r.left = 40;
  r.right = 3;
  r.buckets = c->buckets;
  return r;
}

static int64_t key_heads(const rp_attention *a) { return a->key_heads ? a->key_heads : a->H; }

/* Where a head's numbers of a key begin. */
static int64_t key_column(const rp_attention *a, int64_t head) {
  return head * key_heads(a) / a->H * a->D;
}

/* key_heads: 0, or a divisor of H. */
static void make(call *c, int64_t D, int64_t H, int64_t key_heads, bool plain) {
  memset(c, 0, sizeof *c);
  c->shape = rp_attention_default();
  c->shape.H = H;
  c->shape.key_heads = key_heads;
  c->shape.D = c->shape.Dv = D;
  const int64_t token = 2 * (key_heads ? key_heads : H) * D;
  c->q = array_random("q", ROWS * (H * D + 4), 1);
  c->log = array_random("keys and values", TOKENS * token, 1);
  c->tables = array_random("tables", 6 * 8 * TABLE * D, 1);
  c->bias = array_random("position bias", H * (D + 4), 1);
  c->out = array_of("out", ROWS * (H * D + 8), (real)NAN);
  c->mean = array_of("mean", ROWS * MOST_KEYS, (real)NAN);
  for (int i = 0; i < 64; i++) c->buckets[i] = (int32_t)(draw() % (TABLE + 1)) - 1;
  int64_t table = 0;
  for (int t = 0; t < RP_TERMS && !plain; t++) {
    if (draw() % 3) c->shape.key[t] = relation(c, D, &table, draw() % 2, draw() % 2);
    if (draw() % 3 == 0) c->shape.query[t] = relation(c, D, &table, draw() % 2, draw() % 2);
    if (draw() % 3 && table < 6) c->shape.value[t] = relation(c, D, &table, true, draw() % 2);
    if (draw() % 3 == 0) {
      c->shape.bias[t] = relation(c, D, &(int64_t){0}, true, draw() % 2);
      c->shape.bias[t].row_stride = 1;
    }
    if (table >= 4) break;
  }
  if (!plain && draw() % 2) {
    c->shape.position_bias = c->bias.data;
    c->shape.position_bias_stride = D + 4;
  }
  if (!plain && draw() % 4 == 0) c->shape.softcap = 1.5;
  if (!plain && draw() % 3 == 0) c->shape.window_left = draw() % 30;
  static const int64_t counts[] = {1, 0, 2, 13, 64, 255, 256, 257, MOST_KEYS};
  const int64_t aside = 1 + draw() % 2; /* 2: some keys lie on other borders */
  for (int r = 0; r < ROWS; r++) {
    c->counts[r] = counts[draw() % 9];
    for (int64_t j = 0; j < c->counts[r]; j++) {
      c->places[r][j] = c->log.data + draw() % (TOKENS - 1) * token + draw() % aside;
    }
    c->lists[r] = c->places[r];
    c->means[r] = c->mean.data + r * MOST_KEYS;
  }
}

static void release(call *c) {
  array *const all[] = {&c->q, &c->log, &c->tables, &c->bias, &c->out, &c->mean};
  for (int i = 0; i < 6; i++) array_free(all[i]);
}

/* The relation's row for distance d, or NULL. */
static const real *row_of(const rp_relation *r, int64_t head, int64_t d) {
  if (!r->table) return NULL;
  if (r->beyond == RP_BEYOND_NONE && (d < -r->left || d > r->right)) return NULL;
  int64_t row = (d < -r->left ? -r->left : d > r->right ? r->right : d) + r->left;
  if (r->buckets) row = r->buckets[row];
  return row < 0 ? NULL : r->table + head * r->head_stride + row * r->row_stride;
}

/* *size grows by the products' absolute values: what roundings are relative to. */
static long double dot_of(const real *x, const real *y, int64_t D, long double *size) {
  long double sum = 0;
  for (int64_t c = 0; x && y && c < D; c++) {
    sum += (long double)x[c] * y[c];
    *size += fabsl((long double)x[c] * y[c]);
  }
  return sum;
}

typedef struct scores {
  long double p[MOST_KEYS];
  long double error; /* of a score, at most */
} scores;

static void softmax(const call *c, int64_t row, int64_t head, scores *s) {
  const rp_attention *const a = &c->shape;
  const int64_t D = a->D, n = c->counts[row], at = n - 1;
  const real *const q = c->q.data + row * (a->H * D + 4) + head * D;
  long double max = -INFINITY, sum = 0;
  s->error = 0;
  for (int64_t j = 0; j < n; j++) {
    const real *const k = c->places[row][j] + key_column(a, head);
    const int64_t d = j - at;
    const real *const bias = a->position_bias ? a->position_bias + head * (D + 4) : NULL;
    long double size = 0, score = dot_of(q, k, D, &size);
    for (int t = 0; t < RP_TERMS; t++) {
      const real *const relation_of_key = row_of(&a->key[t], head, d);
      score += dot_of(q, relation_of_key, D, &size) + dot_of(bias, relation_of_key, D, &size);
      score += dot_of(k, row_of(&a->query[t], head, d), D, &size);
    }
    score /= sqrtl((long double)D);
    size /= sqrtl((long double)D);
    for (int t = 0; t < RP_TERMS; t++) {
      const real *const number_of = row_of(&a->bias[t], head, d);
      score += number_of ? number_of[0] : 0;
      size += number_of ? fabsl((long double)number_of[0]) : 0;
    }
    if (a->softcap != 0) {
      score = a->softcap * tanhl(score / a->softcap);
      size += 4 * a->softcap; /* tanh is good to 2e-7 */
    }
    if (a->window_left >= 0 && d < -a->window_left) score = -INFINITY;
    s->p[j] = score;
    max = fmaxl(max, score);
    /* a dot product's sums, the scale and the change of units, the difference to the maximum */
    s->error = fmaxl(s->error, (long double)UNIT * ((long double)(D + 12) * size + 8));
  }
  for (int64_t j = 0; j < n; j++) sum += s->p[j] = expl(s->p[j] - max);
  for (int64_t j = 0; j < n; j++) s->p[j] /= sum;
}

static bool check_head(const rp_ops *ops, const call *c, int64_t row, int64_t head,
                       long double *mean, long double *mean_error) {
  const rp_attention *const a = &c->shape;
  const int64_t D = a->D, n = c->counts[row], to_value = key_heads(a) * D;
  static scores s;
  softmax(c, row, head, &s);
  const long double relative = 2 * s.error + (long double)UNIT * (long double)(n + 20);
  bool right = true;
  for (int64_t x = 0; x < D; x++) {
    long double expected = 0, size = 0;
    for (int64_t j = 0; j < n; j++) {
      const real *const v = c->places[row][j] + to_value + key_column(a, head);
      long double value = v[x], all = fabsl((long double)v[x]);
      for (int t = 0; t < RP_TERMS; t++) {
        const real *const w = row_of(&a->value[t], head, j - (n - 1));
        value += w ? w[x] : 0;
        all += w ? fabsl((long double)w[x]) : 0;
      }
      expected += s.p[j] * value;
      size += s.p[j] * all;
    }
    const real got = c->out.data[row * (a->H * D + 8) + head * D + x];
    right = right && is_close(ops, "out", x, got, expected, relative * size);
  }
  for (int64_t j = 0; j < n; j++) {
    mean[j] += s.p[j] / (long double)a->H;
    mean_error[j] += relative * s.p[j] / (long double)a->H;
  }
  return right;
}

static void test_call(const rp_ops *ops, int64_t D, int64_t H, int64_t shared, bool plain,
                      bool with_mean) {
  static call c;
  make(&c, D, H, shared, plain);
  layer l = {{.shape = &c.shape,
              .rows = ROWS,
              .q = c.q.data,
              .q_stride = H * D + 4,
              .keys = c.lists,
              .counts = c.counts,
              .to_value = key_heads(&c.shape) * D,
              .out = c.out.data,
              .out_stride = H * D + 8,
              .mean = with_mean ? c.means : NULL}};
  if (!CHECK(has_same_bits(ops, run, &l, (array[]){c.out, c.mean}, with_mean ? 2 : 1))) return;
  bool right = true;
  for (int64_t r = 0; r < ROWS; r++) {
    long double mean[MOST_KEYS] = {0}, error[MOST_KEYS] = {0};
    for (int64_t h = 0; h < H; h++) right = right && check_head(ops, &c, r, h, mean, error);
    for (int64_t j = 0; with_mean && j < c.counts[r]; j++) {
      right = right && is_close(ops, "mean", j, c.means[r][j], mean[j], error[j]);
    }
  }
  CHECK(right);
  release(&c);
}

/* The same keys in another layer's part of the log. */
static void test_shift(const rp_ops *ops) {
  static call c;
  make(&c, 16, 2, 0, true);
  rpi_attend_rows_args a = {.shape = &c.shape,
                            .rows = ROWS,
                            .q = c.q.data,
                            .q_stride = 35,
                            .keys = c.lists,
                            .counts = c.counts,
                            .to_value = 32,
                            .out = c.out.data,
                            .out_stride = 37};
  CHECK_INT(ops->attend_rows(&a), RP_OK);
  array before = array_copy(&c.out);
  for (int r = 0; r < ROWS; r++) {
    for (int64_t j = 0; j < c.counts[r]; j++) c.places[r][j] -= 7;
  }
  a.shift = 7;
  CHECK_INT(ops->attend_rows(&a), RP_OK);
  for (int64_t r = 0; r < ROWS; r++) {
    CHECK(memcmp(before.data + r * 37, c.out.data + r * 37, 32 * sizeof(real)) == 0);
    CHECK(isnan(c.out.data[r * 37 + 36])); /* between rows nothing is written */
  }
  array_free(&before);
  release(&c);
}

/* A table may hide keys: with -inf for all but the last two, in however many groups they come, a
 * row is what a window leaves; with -inf for all of them it is 0. */
static void test_hiding_table(const rp_ops *ops) {
  static call c;
  make(&c, 8, 1, 0, true);
  c.shape.window_left = 1;
  rpi_attend_rows_args a = {.shape = &c.shape,
                            .rows = ROWS,
                            .q = c.q.data,
                            .q_stride = 12,
                            .keys = c.lists,
                            .counts = c.counts,
                            .to_value = 8,
                            .out = c.out.data,
                            .out_stride = 16,
                            .mean = c.means};
  for (int r = 0; r < ROWS; r++) c.counts[r] = MOST_KEYS;
  for (int r = 0; r < ROWS; r++) {
    for (int j = 0; j < MOST_KEYS; j++) {
      c.places[r][j] = c.log.data + (r * 37 + j * 11) % (TOKENS - 1) * 16;
    }
  }
  CHECK_INT(ops->attend_rows(&a), RP_OK);
  array out = array_copy(&c.out), mean = array_copy(&c.mean);
  c.shape.window_left = -1;
  array table = array_of("table", 3, 0);
  table.data[0] = (real)-INFINITY;
  c.shape.bias[0] = (rp_relation){.table = table.data, .left = 2, .rows = 3, .row_stride = 1};
  CHECK_INT(ops->attend_rows(&a), RP_OK);
  bool right = true;
  for (int64_t r = 0; r < ROWS; r++) {
    for (int64_t x = r * 16; x < r * 16 + 8; x++) {
      right = right && is_close(ops, "out", x, c.out.data[x], out.data[x], 32 * UNIT);
    }
    for (int64_t x = r * MOST_KEYS; x < (r + 1) * MOST_KEYS; x++) {
      right = right && is_close(ops, "mean", x, c.mean.data[x], mean.data[x], 4 * UNIT);
    }
  }
  table.data[1] = table.data[2] = (real)-INFINITY;
  CHECK_INT(ops->attend_rows(&a), RP_OK);
  for (int64_t r = 0; r < ROWS; r++) {
    for (int64_t x = r * 16; x < r * 16 + 8; x++) right = right && c.out.data[x] == 0;
    for (int64_t x = r * MOST_KEYS; x < (r + 1) * MOST_KEYS; x++) {
      right = right && c.mean.data[x] == 0;
    }
  }
  CHECK(right);
  array_free(&out);
  array_free(&mean);
  array_free(&table);
  release(&c);
}

/* A NaN flows to the rows that have its key, and to no other. */
static void test_not_finite(const rp_ops *ops) {
  static call c;
  make(&c, 8, 1, 0, true);
  for (int r = 0; r < ROWS; r++) c.counts[r] = 3;
  for (int r = 0; r < ROWS; r++) {
    for (int j = 0; j < 3; j++) c.places[r][j] = c.log.data + (r * 3 + j) * 16;
  }
  c.log.data[(2 * 3 + 1) * 16] = (real)NAN;
  const rpi_attend_rows_args a = {.shape = &c.shape,
                                  .rows = ROWS,
                                  .q = c.q.data,
                                  .q_stride = 11,
                                  .keys = c.lists,
                                  .counts = c.counts,
                                  .to_value = 8,
                                  .out = c.out.data,
                                  .out_stride = 13};
  CHECK_INT(ops->attend_rows(&a), RP_OK);
  for (int64_t r = 0; r < ROWS; r++) CHECK(isnan(c.out.data[r * 13]) == (r == 2));
  release(&c);
}

/* Rows go where they belong, and what lies between keeps its bits. */
static void test_scatter(const rp_ops *ops) {
  static const int64_t widths[] = {0, 1, 7, 8, 130};
  for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
    const int64_t width = widths[i], apart = width + 5, shift = i % 2 == 0 ? 4 : 3;
    array x = array_random("x", ROWS * (width + 3), 1);
    array log = array_of("log", ROWS * apart + shift, (real)NAN);
    real *to[ROWS];
    for (int64_t r = 0; r < ROWS; r++) to[r] = log.data + (r * 2 % ROWS) * apart;
    const rpi_scatter_args a = {.rows = ROWS,
                                .columns = width,
                                .x = x.data,
                                .x_stride = width + 3,
                                .to = to,
                                .shift = shift};
    CHECK_INT(ops->scatter(&a), RP_OK);
    bool right = true;
    for (int64_t r = 0; r < ROWS; r++) {
      const real *const row = to[r] + shift;
      for (int64_t c = 0; c < width; c++) right = right && row[c] == x.data[r * (width + 3) + c];
      for (int64_t c = width; c < 5 && r * 2 % ROWS + 1 < ROWS; c++) {
        right = right && isnan(row[c]);
      }
    }
    CHECK(right && isnan(log.data[0]));
    array_free(&x);
    array_free(&log);
  }
  CHECK_INT(ops->scatter(&(rpi_scatter_args){.columns = 3}), RP_OK);
}

int main(void) {
  static const int64_t widths[] = {1, 3, 8, 16, 30, 64, 80};
  const rp_ops *ops;
  for (int i = 0; (ops = table_at(i)) != NULL; i++) {
    const int cases = is_small_run() ? 8 : CASES;
    for (int n = 0; n < cases; n++) {
      const int64_t heads = 1 + draw() % 3, sharers = n % 3 == 1 ? 2 + draw() % 2 : 1;
      const int64_t shared = sharers > 1 ? heads : 0; /* heads of keys, if not H */
      test_call(ops, widths[draw() % 7], heads * sharers, shared, n % 5 == 0, n % 2 == 0);
    }
    test_shift(ops);
    test_hiding_table(ops);
    test_not_finite(ops);
    test_scatter(ops);
  }
  return check_report();
}
