/* SPDX-License-Identifier: Apache-2.0
 *
 * test_choose.c: the likeliest classes of every row against a look at all of them, ties, banned
 * classes, temperatures and rows that are not finite; the mean of several models' probabilities
 * against sums in long double.
 *
 * Tolerances. e^x has a relative error of u (3 + 2.5 |x|), a sum of L numbers one of u L more
 * (test_cross_entropy.c), and log p is as wrong as the sum relative to itself.
 */
#include "layer.h"

typedef struct choice {
  rpi_choose_args args;
  array logits;
  double *log_probabilities, *left;
  int32_t *tokens, *banned;
  int64_t *offsets;
} choice;

static void choice_create(choice *c, int64_t rows, int64_t classes, int64_t most, double scale) {
  const int64_t stride = classes + 3, wanted = rows * most;
  c->logits = array_random("logits", rows * stride, scale);
  c->tokens = malloc((size_t)(wanted + 1) * sizeof *c->tokens);
  c->log_probabilities = malloc((size_t)(wanted + 1) * sizeof(double));
  c->left = malloc((size_t)(rows + 1) * sizeof(double));
  c->offsets = malloc((size_t)(rows + 1) * sizeof(int64_t));
  c->banned = malloc((size_t)(rows * 9 + 1) * sizeof *c->banned);
  if (!c->tokens || !c->log_probabilities || !c->left || !c->offsets || !c->banned) abort();
  c->tokens[wanted] = -9;
  c->log_probabilities[wanted] = c->left[rows] = -9;
  c->offsets[0] = 0;
  for (int64_t row = 0; row < rows; row++) {
    real *const x = c->logits.data + row * stride;
    for (int64_t i = 0; i < 6; i++) { /* ties, of the highest in every other row */
      const real value = row % 2 == 0 ? (real)scale : x[0];
      x[draw() % (uint32_t)classes] = value;
    }
    if (classes > 1 && row % 5 == 1) x[draw() % (uint32_t)classes] = (real)-INFINITY;
    for (int64_t i = classes; i < stride; i++) x[i] = CANARY;
    const int64_t count = row % 3 == 0 ? 0 : row % 9;
    for (int64_t i = 0; i < count; i++) {
      c->banned[c->offsets[row] + i] = (int32_t)(draw() % (uint32_t)classes);
    }
    c->offsets[row + 1] = c->offsets[row] + count;
  }
  c->args = (rpi_choose_args){.rows = rows,
                              .classes = classes,
                              .logits = c->logits.data,
                              .stride = stride,
                              .temperature = 1,
                              .banned_offsets = c->offsets,
                              .banned = c->banned,
                              .most = most,
                              .tokens = c->tokens,
                              .log_probabilities = c->log_probabilities,
                              .left = c->left};
}

static void choice_free(choice *c) {
  array_free(&c->logits);
  free(c->tokens);
  free(c->log_probabilities);
  free(c->left);
  free(c->offsets);
  free(c->banned);
}

static bool is_banned(const rpi_choose_args *a, int64_t row, int64_t class) {
  for (int64_t i = a->banned_offsets[row]; i < a->banned_offsets[row + 1]; i++) {
    if (a->banned[i] == class) return true;
  }
  return false;
}

/* x: the logits as they were. Looks for the best of those left `most` times. */
static bool is_row_right(const rp_ops *ops, const rpi_choose_args *a, const real *x, int64_t row) {
  const int64_t V = a->classes;
  const long double T = (long double)a->temperature, u = 1.01L * UNIT;
  const long double L = (long double)(V < 1024 ? V : 1024) / 2 + 3;
  const int32_t *const tokens = a->tokens + row * a->most;
  const double *const log_p = a->log_probabilities + row * a->most;
  long double highest = -INFINITY, sum = 0, error = 0, left = 0;
  for (int64_t c = 0; c < V; c++) highest = x[c] > highest ? x[c] : highest;
  for (int64_t c = 0; c < V; c++) {
    if (x[c] == -INFINITY) continue;
    const long double d = (x[c] - highest) / T, e = expl(d);
    sum += e;
    error += e * u * (4 + 2.5L * fabsl(d));
    if (!is_banned(a, row, c)) left += e;
  }
  error = (error + u * L * sum) / sum;
  const real got_left = (real)a->left[row];
  if (!is_close(ops, "left", row, got_left, left / sum, 3 * error + 2 * u)) return false;
  bool *const used = calloc((size_t)V, sizeof *used);
  if (used == NULL) abort();
  bool right = true;
  for (int64_t i = 0; i < a->most && right; i++) {
    int64_t best = -1;
    for (int64_t c = 0; c < V; c++) {
      if (used[c] || is_banned(a, row, c) || x[c] == -INFINITY) continue;
      if (best < 0 || x[c] > x[best]) best = c;
    }
    right = tokens[i] == best;
    if (best < 0) {
      right = right && log_p[i] == -INFINITY;
      continue;
    }
    used[best] = true;
    const long double expected = (x[best] - highest) / T - logl(sum);
    right = right && log_p[i] <= 0 &&
            fabsl(log_p[i] - expected) <= error + 4 * (long double)DBL_EPSILON * fabsl(expected);
    if (!right) {
      printf("\n  %s: row %lld, place %lld: token %d, expected %lld; log p %.17g, expected %.17Lg",
             ops->name, (long long)row, (long long)i, tokens[i], (long long)best, log_p[i],
             expected);
    }
  }
  free(used);
  return right;
}

/* Only the banned have changed. */
static bool is_untouched(const rpi_choose_args *a, const real *x, int64_t row) {
  const real *const now = a->logits + row * a->stride;
  for (int64_t c = 0; c < a->stride; c++) {
    const real expected = c < a->classes && is_banned(a, row, c) ? (real)-INFINITY : x[c];
    if (memcmp(&now[c], &expected, sizeof expected) != 0) return false;
  }
  return true;
}

static void test_shape(const rp_ops *ops, int64_t rows, int64_t classes, int64_t most, double scale,
                       double temperature) {
  static const int threads[] = {1, 2, 3};
  choice c;
  choice_create(&c, rows, classes, most, scale);
  c.args.temperature = temperature;
  array before = array_copy(&c.logits);
  const size_t count = (size_t)(rows * most);
  double *const first = malloc((count + 1) * sizeof *first);
  if (first == NULL) abort();
  const size_t runs = is_device_run() ? 1 : sizeof threads / sizeof threads[0];
  for (size_t t = 0; t < runs; t++) {
    rp_set_threads(threads[t]);
    memcpy(c.logits.data, before.data, (size_t)c.logits.count * sizeof(real));
    CHECK_INT(ops->choose(&c.args), RP_OK);
    bool right = c.tokens[count] == -9 && c.log_probabilities[count] == -9 && c.left[rows] == -9;
    if (t == 0) memcpy(first, c.log_probabilities, count * sizeof *first);
    right = right && memcmp(first, c.log_probabilities, count * sizeof *first) == 0;
    for (int64_t row = 0; row < rows && right; row++) {
      const real *const x = before.data + row * c.args.stride;
      right = is_untouched(&c.args, x, row) && is_row_right(ops, &c.args, x, row);
    }
    if (!CHECK(right)) {
      printf("\n  %s: %lld x %lld, most %lld, temperature %g", ops->name, (long long)rows,
             (long long)classes, (long long)most, temperature);
    }
  }
  rp_set_threads(0);
  free(first);
  array_free(&before);
  choice_free(&c);
}

static void test_shapes(const rp_ops *ops) {
  static const int64_t classes[] = {1, 2, 3, 17, 64, 80, 255, 257, 513, 1025, 5000, 32768};
  static const double temperatures[] = {1, 0.5, 3, 0.01};
  const int sizes = (int)(sizeof classes / sizeof classes[0]) - (is_tiny_run()    ? 4
                                                                 : is_small_run() ? 2
                                                                                  : 0);
  for (int i = 0; i < sizes; i++) {
    for (int k = 0; k < 4; k++) {
      const int64_t V = classes[i], many = is_small_run() ? 100 : 300;
      const int64_t rows = k == 3 ? 1 : is_tiny_run() ? 3 : V < 100 && !is_small_run() ? 70 : 11;
      const int64_t most[] = {1, 4, V < many ? V : 40, 0};
      test_shape(ops, rows, V, most[k], k == 1 ? 20 : 3, temperatures[(i + k) % 4]);
    }
  }
  test_shape(ops, 0, 7, 3, 1, 1);
}

/* All that there is, in order: every class once. */
static void test_whole_order(const rp_ops *ops) {
  const int64_t classes = is_small_run() ? 300 : 1500;
  test_shape(ops, 3, classes, classes, 5, 1);
  if (!is_tiny_run()) test_shape(ops, 2, 20000, 150, 5, 1); /* many of very many */
}

/* Rows that are in order already, in the opposite one, in both, or all the same. */
static void test_whole_order_of_ordered_rows(const rp_ops *ops) {
  enum { CLASSES = 700 };
  for (int what = 0; what < 5; what++) {
    real x[CLASSES];
    int32_t tokens[CLASSES];
    double log_p[CLASSES], left;
    const int64_t none[] = {0, 0};
    for (int i = 0; i < CLASSES; i++) {
      const int steps[] = {i, CLASSES - i, i < CLASSES - i ? i : CLASSES - i, 0, i % 7};
      x[i] = (real)steps[what] / 64;
    }
    rpi_choose_args args = {.rows = 1,
                            .classes = CLASSES,
                            .logits = x,
                            .stride = CLASSES,
                            .temperature = 1,
                            .banned_offsets = none,
                            .most = CLASSES,
                            .tokens = tokens,
                            .log_probabilities = log_p,
                            .left = &left};
    CHECK_INT(ops->choose(&args), RP_OK);
    CHECK(is_row_right(ops, &args, x, 0));
  }
}

static void test_not_finite(const rp_ops *ops, int64_t most) {
  enum { MOST = 200 };
  for (int what = 0; what < 5; what++) {
    real x[3 * 70];
    int32_t tokens[3 * MOST];
    double log_p[3 * MOST], left[3];
    for (int i = 0; i < 3 * 70; i++) x[i] = (real)(i % 70) / 70;
    if (what == 0) x[70 + 66] = (real)NAN;
    if (what == 1) x[70 + 3] = (real)INFINITY;
    for (int i = 0; what == 2 && i < 70; i++) x[70 + i] = (real)-INFINITY;
    for (int i = 1; what == 3 && i < 70; i++) x[70 + i] = (real)-INFINITY;
    int32_t banned[70];
    for (int i = 0; i < 70; i++) banned[i] = i;
    const int64_t offsets[] = {0, 0, 70, 70};
    const rpi_choose_args a = {.rows = 3,
                               .classes = 70,
                               .logits = x,
                               .stride = 70,
                               .temperature = 1,
                               .banned_offsets = what == 4 ? offsets : NULL,
                               .banned = banned,
                               .most = most,
                               .tokens = tokens,
                               .log_probabilities = log_p,
                               .left = left};
    CHECK_INT(ops->choose(&a), RP_OK);
    const int32_t *const token = tokens + most, *const last = tokens + 2 * most;
    const double *const p = log_p + most;
    CHECK(tokens[0] == 69 && tokens[1] == 68 && last[0] == 69 && last[1] == 68);
    CHECK(most < 71 || (tokens[69] == 0 && tokens[70] == -1 && log_p[70] == -INFINITY));
    CHECK(left[0] == 1 && left[2] == 1);
    CHECK(token[1] == -1 && token[most - 1] == -1);
    if (what < 3) {
      CHECK(token[0] == -1 && isnan(p[0]) && isnan(p[most - 1]) && isnan(left[1]));
    } else if (what == 3) { /* one class alone is certain */
      CHECK(token[0] == 0 && p[0] == 0 && p[1] == -INFINITY && left[1] == 1);
    } else {
      CHECK(token[0] == -1 && p[0] == -INFINITY && p[most - 1] == -INFINITY && left[1] == 0);
    }
  }
}

/* There is one zero: classes of 0 and -0 tie. */
static void test_zeros(const rp_ops *ops, int64_t most) {
  enum { CLASSES = 9, MOST = 200 };
  real x[CLASSES];
  int32_t tokens[MOST];
  double log_p[MOST];
  for (int i = 0; i < CLASSES; i++) x[i] = i % 2 == 0 ? (real)-0.0 : (real)0;
  const rpi_choose_args a = {.rows = 1,
                             .classes = CLASSES,
                             .logits = x,
                             .stride = CLASSES,
                             .temperature = 1,
                             .most = most,
                             .tokens = tokens,
                             .log_probabilities = log_p};
  CHECK_INT(ops->choose(&a), RP_OK);
  for (int i = 0; i < CLASSES; i++) CHECK_INT(tokens[i], i);
}

/* A temperature of next to nothing is no trap. */
static void test_cold(const rp_ops *ops) {
  real x[] = {1, 3, 2, 3};
  int32_t tokens[4];
  double log_p[4];
  const rpi_choose_args a = {.rows = 1,
                             .classes = 4,
                             .logits = x,
                             .stride = 4,
                             .temperature = 1e-300,
                             .most = 4,
                             .tokens = tokens,
                             .log_probabilities = log_p};
  CHECK_INT(ops->choose(&a), RP_OK);
  CHECK(tokens[0] == 1 && tokens[1] == 3 && tokens[2] == 2 && tokens[3] == 0);
  CHECK_NEAR(log_p[0], -log(2), 1e-7);
  CHECK_NEAR(log_p[1], -log(2), 1e-7);
  CHECK(log_p[2] <= -1e299 && log_p[3] <= log_p[2]);
}

/* Nor is one without end: all are equal, and what is banned stays so. */
static void test_hot(const rp_ops *ops) {
  real x[] = {1, 3, 2, 3};
  const int64_t banned_offsets[] = {0, 1};
  const int32_t banned[] = {1};
  int32_t tokens[4];
  double log_p[4], left;
  const rpi_choose_args a = {.rows = 1,
                             .classes = 4,
                             .logits = x,
                             .stride = 4,
                             .temperature = 1e300,
                             .banned_offsets = banned_offsets,
                             .banned = banned,
                             .most = 4,
                             .tokens = tokens,
                             .log_probabilities = log_p,
                             .left = &left};
  CHECK_INT(ops->choose(&a), RP_OK);
  CHECK(tokens[0] == 3 && tokens[1] == 2 && tokens[2] == 0 && tokens[3] == -1);
  for (int i = 0; i < 3; i++) CHECK_NEAR(log_p[i], -log(4), 1e-7);
  CHECK_NEAR(left, 0.75, 1e-7);
}

/* ---- means ------------------------------------------------------------------------- */

enum { MODELS = 3 };

typedef struct mixture {
  rpi_mix_args args[MODELS];
  array logits[MODELS];
} mixture;

static void run_mixture(const rp_ops *ops, void *context) {
  const mixture *const m = context;
  for (int k = 0; k < MODELS; k++) CHECK_INT(ops->mix(&m->args[k]), RP_OK);
}

/* The first model's logits are where the mean goes. */
static void test_mix(const rp_ops *ops, int64_t rows, int64_t classes, double scale) {
  mixture m;
  array before[MODELS];
  const int64_t stride = classes + 7;
  for (int k = 0; k < MODELS; k++) {
    m.logits[k] = array_random("logits", rows * stride, scale);
    before[k] = array_copy(&m.logits[k]);
    m.args[k] = (rpi_mix_args){.rows = rows,
                               .classes = classes,
                               .logits = m.logits[k].data,
                               .stride = stride,
                               .mean = m.logits[0].data,
                               .mean_stride = stride,
                               .share = 1.0 / MODELS,
                               .first = k == 0};
  }
  CHECK(has_same_bits(ops, run_mixture, &m, m.logits, MODELS));
  const long double u = 1.01L * UNIT, L = (long double)(classes < 1024 ? classes : 1024) / 2 + 3;
  bool right = true;
  for (int64_t row = 0; row < rows && right; row++) {
    long double sums[MODELS] = {0};
    for (int k = 0; k < MODELS; k++) {
      for (int64_t c = 0; c < classes; c++) sums[k] += expl(before[k].data[row * stride + c]);
    }
    for (int64_t c = 0; c < classes && right; c++) {
      long double mean = 0;
      for (int k = 0; k < MODELS; k++) {
        mean += expl(before[k].data[row * stride + c]) / sums[k] / MODELS;
      }
      /* every term is as wrong as two exponentials, of at most 2 scale, and a sum */
      const long double wrong = u * (2 * (3 + 5 * (long double)scale) + L + 8);
      right = is_close(ops, "mean", row * stride + c, m.logits[0].data[row * stride + c],
                       logl(mean), wrong + 4 * u * fabsl(logl(mean)));
    }
    for (int64_t c = classes; c < stride && right; c++) {
      right = m.logits[0].data[row * stride + c] == before[0].data[row * stride + c];
    }
  }
  CHECK(right);
  for (int k = 0; k < MODELS; k++) {
    array_free(&m.logits[k]);
    array_free(&before[k]);
  }
}

/* A row of logits into the mean of as many models as `share` says. */
static void mix_row(const rp_ops *ops, real *logits, int64_t classes, double share, real *mean) {
  const rpi_mix_args a = {.rows = 1,
                          .classes = classes,
                          .logits = logits,
                          .stride = classes,
                          .mean = mean,
                          .mean_stride = classes,
                          .share = share,
                          .first = mean == logits};
  CHECK_INT(ops->mix(&a), RP_OK);
}

/* What has no probability in any model has none; NaN stays where it is. */
static void test_mix_values(const rp_ops *ops) {
  real one[] = {0, (real)-INFINITY, (real)-INFINITY, 0}, two[] = {0, (real)-INFINITY, 0, 0};
  mix_row(ops, one, 4, 0.5, one);
  mix_row(ops, two, 4, 0.5, one);
  CHECK_NEAR((double)one[0], log((0.5 + 1.0 / 3) / 2), 8 * UNIT);
  CHECK(one[1] == -INFINITY);
  CHECK_NEAR((double)one[2], log(1.0 / 6), 8 * UNIT);
  /* probabilities that no float can hold, of one model and of two */
  real far[] = {0, -95, -300}, near[] = {-200, 0, -301};
  mix_row(ops, far, 3, 0.5, far);
  mix_row(ops, near, 3, 0.5, far);
  CHECK_NEAR((double)far[0], log(0.5), 8 * UNIT);
  CHECK_NEAR((double)far[1], log(0.5), 8 * UNIT);
  CHECK_NEAR((double)far[2], -300 + log((1 + exp(-1)) / 2), 8 * 300 * UNIT);
  real bad[] = {0, (real)NAN, 1, (real)INFINITY};
  for (int at = 1; at < 4; at += 2) {
    real x[] = {0, 1, 2, 3};
    x[at] = bad[at];
    mix_row(ops, x, 4, 0.5, x);
    CHECK(isnan(x[at]));
    real sound[] = {0, 1, 2, 3};
    mix_row(ops, sound, 4, 0.5, x);
    CHECK(isnan(x[at]));
  }
}

int main(void) {
  for (int t = 0; table_at(t) != NULL; t++) {
    const rp_ops *const ops = table_at(t);
    test_shapes(ops);
    test_whole_order(ops);
    test_whole_order_of_ordered_rows(ops);
    for (int64_t most = 2; most <= 200; most += 198) { /* a few, and more than there are */
      test_not_finite(ops, most);
      test_zeros(ops, most < 9 ? 9 : most);
    }
    test_cold(ops);
    test_hot(ops);
    test_mix(ops, 11, 513, 3);
    test_mix(ops, 70, 17, 10);
    test_mix(ops, 1, 1, 1);
    test_mix(ops, 0, 5, 1);
    test_mix(ops, 3, 4100, 30);
    test_mix_values(ops);
  }
  return check_report();
}
