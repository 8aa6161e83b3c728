/* SPDX-License-Identifier: Apache-2.0
 *
 * test_cross_entropy.c: loss, log-likelihood, hits and gradients of every row, against sums in long
 * double; known values; rows that do not count; logits that are not finite.
 *
 * Tolerances. A sum over the classes runs in parts of 1024 numbers, in at least two chains, which
 * are added in double: L = min(classes, 1024) / 2 + 3 additions for each number.
 */
#include "layer.h"

typedef struct layer {
  rpi_cross_entropy_args args;
  array logits, loss, nll;
  int32_t *labels;
  int8_t *hit;
} layer;

static void run(const rp_ops *ops, void *context) {
  const layer *const l = context;
  CHECK_INT(ops->cross_entropy(&l->args), RP_OK);
}

/* Sums of losses, without gradient: logits stay. */
static double value(const rp_ops *ops, void *context) {
  const layer *const l = context;
  rpi_cross_entropy_args a = l->args;
  a.gradient = false;
  ops->cross_entropy(&a);
  double sum = 0;
  for (int64_t row = 0; row < a.rows; row++) sum += (double)a.loss[row];
  return sum;
}

static void layer_create(layer *l, int64_t rows, int64_t classes, double scale, double smoothing,
                         int rule) {
  const int64_t stride = classes + 8;
  l->logits = array_random("logits", rows * stride, scale);
  l->loss = array_of("loss", rows, (real)NAN);
  l->nll = array_of("nll", rows, (real)NAN);
  l->labels = malloc((size_t)(rows + 1) * sizeof(int32_t));
  l->hit = malloc((size_t)(rows + 1));
  if (l->labels == NULL || l->hit == NULL) abort();
  for (int64_t row = 0; row < rows; row++) {
    l->labels[row] = row % 5 == 3 ? -1 : (int32_t)(draw() % (uint32_t)classes);
    if (row % 7 == 4) l->labels[row] = (int32_t)classes - 1;
    l->hit[row] = -9;
    if (row % 3 == 0 && l->labels[row] >= 0) { /* a hit, in every other row of these by a tie */
      l->logits.data[row * stride + l->labels[row]] = (real)scale;
      if (row % 2 == 0) l->logits.data[row * stride + draw() % (uint32_t)classes] = (real)scale;
    }
  }
  l->hit[rows] = -9;
  for (int64_t i = 0; i < l->logits.count; i++) {
    if (i % stride >= classes) l->logits.data[i] = CANARY;
  }
  l->args = (rpi_cross_entropy_args){.rows = rows,
                                     .classes = classes,
                                     .logits = l->logits.data,
                                     .stride = stride,
                                     .labels = l->labels,
                                     .smoothing = smoothing,
                                     .rule = rule,
                                     .loss = l->loss.data,
                                     .nll = l->nll.data,
                                     .hit = l->hit};
}

static void layer_free(layer *l) {
  array_free(&l->logits);
  array_free(&l->loss);
  array_free(&l->nll);
  free(l->labels);
  free(l->hit);
}

/* The smoothed label. One class alone is certain. */
static long double target(const rpi_cross_entropy_args *a, int64_t label, int64_t c) {
  const long double V = (long double)a->classes, smoothing = (long double)a->smoothing;
  if (a->classes == 1) return 1;
  if (a->rule == RP_SMOOTH_ALL) return (c == label ? 1 - smoothing : 0) + smoothing / V;
  return c == label ? 1 - smoothing : smoothing / (V - 1);
}

/* The first class with the highest logit. */
static int64_t best(const real *x, int64_t classes) {
  int64_t at = 0;
  for (int64_t c = 1; c < classes; c++) at = x[c] > x[at] ? c : at;
  return at;
}

/* x: the logits as they were. e^(x - highest) has a relative error of u (3 + 2.5 |x - highest|). */
static bool is_row_right(const rp_ops *ops, const layer *l, const real *x, int64_t row) {
  const rpi_cross_entropy_args *const a = &l->args;
  const int64_t V = a->classes, label = a->labels[row], top = best(x, V);
  const long double u = 1.01L * UNIT, L = (long double)(V < 1024 ? V : 1024) / 2 + 3;
  long double sum = 0, sum_error = 0, loss = 0, spread = 0;
  for (int64_t c = 0; c < V; c++) {
    const long double d = (long double)x[c] - x[top];
    sum += expl(d);
    sum_error += expl(d) * u * (3 + 2.5L * fabsl(d));
  }
  sum_error += u * L * sum;
  for (int64_t c = 0; c < V; c++) {
    const long double d = (long double)x[c] - x[top];
    loss -= target(a, label, c) * (d - logl(sum));
    spread += target(a, label, c) * fabsl(d);
  }
  const long double nll = logl(sum) - ((long double)x[label] - x[top]);
  const long double log_error = sum_error / sum;
  bool right = a->hit[row] == (top == label) &&
               is_close(ops, "loss", row, a->loss[row], loss,
                        log_error + u * (L + 3) * spread + u * fabsl(loss)) &&
               is_close(ops, "nll", row, a->nll[row], nll,
                        log_error + u * (fabsl(nll) + fabsl((long double)x[label] - x[top])));
  for (int64_t c = 0; a->gradient && c < V && right; c++) {
    const long double d = (long double)x[c] - x[top], p = expl(d) / sum;
    const long double allowed =
        p * (u * (6 + 2.5L * fabsl(d)) + log_error) + 2 * u * target(a, label, c);
    right = is_close(ops, "gradient", row * a->stride + c, a->logits[row * a->stride + c],
                     p - target(a, label, c), allowed + FLT_MIN);
  }
  return right;
}

static bool is_right(const rp_ops *ops, const layer *l, const array *before) {
  const rpi_cross_entropy_args *const a = &l->args;
  bool right = a->hit[a->rows] == -9;
  for (int64_t row = 0; row < a->rows && right; row++) {
    const real *const x = before->data + row * a->stride, *const now = a->logits + row * a->stride;
    const bool counts = a->labels[row] >= 0;
    if (counts) right = is_row_right(ops, l, x, row);
    else right = a->loss[row] == 0 && a->nll[row] == 0 && a->hit[row] == 0;
    for (int64_t c = 0; c < a->stride && right; c++) {
      if (c < a->classes && !counts && a->gradient) right = now[c] == 0;
      else if (c >= a->classes || !a->gradient) right = now[c] == x[c];
    }
  }
  return right;
}

static void test_shape(const rp_ops *ops, int64_t rows, int64_t classes, double scale,
                       double smoothing, int rule, bool gradient) {
  layer l;
  layer_create(&l, rows, classes, scale, smoothing, rule);
  l.args.gradient = gradient;
  array before = array_copy(&l.logits);
  CHECK(has_same_bits(ops, run, &l, (array[]){l.logits, l.loss, l.nll}, 3));
  if (!CHECK(is_right(ops, &l, &before))) {
    printf("\n  %s: %lld x %lld, scale %g, smoothing %g, rule %d", ops->name, (long long)rows,
           (long long)classes, scale, smoothing, rule);
  }
  array_free(&before);
  layer_free(&l);
}

static void test_shapes(const rp_ops *ops) {
  static const int64_t all[] = {1, 2, 3, 17, 64, 80, 513, 1025, 2048, 5000, 32768};
  static const double scales[] = {1, 20, 100};
  const int sizes = (int)(sizeof all / sizeof all[0]) - (is_tiny_run()    ? 3
                                                         : is_small_run() ? 2
                                                                          : 0);
  for (int i = 0; i < sizes; i++) {
    for (int flags = 0; flags < 8; flags++) {
      const int64_t many = is_tiny_run() ? 6 : all[i] < 100 ? 70 : 11;
      const int64_t rows = flags == 5 ? 0 : flags == 6 ? 1 : many;
      test_shape(ops, rows, all[i], scales[(i + flags) % 3], (flags & 1) != 0 ? 0.1 : 0,
                 (flags & 2) != 0 ? RP_SMOOTH_ALL : RP_SMOOTH_OTHERS, (flags & 4) == 0);
    }
  }
}

/* What a device leaves in bf16 is the gradient rounded, of rows that it keeps and of longer ones.
 */
static void test_rounded(const rp_ops *ops, int64_t rows, int64_t classes) {
  layer l;
  layer_create(&l, rows, classes, 3, 0.1, RP_SMOOTH_ALL);
  array logits = array_copy(&l.logits);
  l.args.gradient = true;
  run(ops, &l);
  rpi_cross_entropy_args a = l.args;
  a.logits = logits.data;
  a.rounded = true;
  CHECK_INT(ops->cross_entropy(&a), RP_OK);
  bool right = true;
  for (int64_t row = 0; row < rows; row++) {
    const real *const x = l.logits.data + row * a.stride, *const to = logits.data + row * a.stride;
    for (int64_t c = 0; c < classes; c++) right = right && has_rounded(to, c, x[c]);
    for (int64_t c = classes; c < a.stride; c++) right = right && to[c] == CANARY;
  }
  CHECK(right);
  array_free(&logits);
  layer_free(&l);
}

static void test_derivatives(const rp_ops *ops, double smoothing, int rule) {
  for (int64_t classes = 1; classes <= 23; classes += 22) {
    layer l;
    layer_create(&l, 4, classes, 2, smoothing, rule);
    array x = array_copy(&l.logits);
    l.args.gradient = true;
    run(ops, &l);
    array gradient = array_copy(&l.logits);
    l.args.logits = x.data;
    for (int64_t row = 0; row < 4; row++) {
      const int64_t start = row * l.args.stride;
      check_derivative(ops, "gradient", value, &l, x.data + start, gradient.data + start, classes);
    }
    array_free(&x);
    array_free(&gradient);
    layer_free(&l);
  }
}

/* Rows without smoothing, each with the same label. */
static void rows_create(layer *l, int64_t rows, int64_t classes, int32_t label) {
  layer_create(l, rows, classes, 1, 0, RP_SMOOTH_ALL);
  for (int64_t row = 0; row < rows; row++) l->labels[row] = label;
}

/* A uniform row costs log V whatever the smoothing, far away from 0 too. */
static void test_values(const rp_ops *ops, int64_t rows) {
  for (int rule = 0; rule < 2; rule++) {
    layer l;
    rows_create(&l, rows, 32768, rule == 0 ? 0 : 700);
    rpi_cross_entropy_args *const a = &l.args;
    for (int64_t i = 0; i < l.logits.count; i++) l.logits.data[i] = 1000;
    a->smoothing = 0.1;
    a->rule = rule;
    a->gradient = true;
    CHECK_INT(ops->cross_entropy(a), RP_OK);
    for (int64_t row = 0; row < rows; row++) {
      CHECK_NEAR((double)a->loss[row], log(32768), 2 * UNIT);
      CHECK_NEAR((double)a->nll[row], log(32768), 2 * UNIT);
      CHECK_INT(a->hit[row], rule == 0); /* the first of equals */
      long double sum = 0;
      for (int i = 0; i < 32768; i++) sum += a->logits[row * a->stride + i];
      CHECK_NEAR((double)sum, 0, 4 * UNIT); /* of probabilities and targets, each rounded twice */
    }
    layer_free(&l);
  }
}

/* No loss is made up where there is none: NaN or infinity, which hit nothing, though the label's
 * logit is the highest number beside a NaN. A class with
 * -infinity is out of the game where it weighs nothing. */
static void test_not_finite(const rp_ops *ops, int64_t rows, int64_t classes) {
  for (int what = 0; what < 4; what++) {
    for (int gradient = 0; gradient < 2; gradient++) {
      layer l;
      rows_create(&l, rows, classes, 2);
      l.args.gradient = gradient != 0;
      for (int64_t row = 0; row < rows; row++) {
        real *const x = l.logits.data + row * l.args.stride;
        l.labels[row] = (int32_t)classes - 1;
        for (int64_t c = 0; c < classes; c++) {
          x[c] = what == 2 ? (real)-INFINITY : (real)c / (real)classes;
        }
        if (what == 0) x[classes - 4] = (real)NAN;
        if (what == 1) x[3] = (real)INFINITY;
        if (what == 3) x[3] = (real)-INFINITY;
      }
      CHECK_INT(ops->cross_entropy(&l.args), RP_OK);
      for (int64_t row = 0; row < rows; row++) {
        const real *const x = l.logits.data + row * l.args.stride;
        const real loss = l.args.loss[row], nll = l.args.nll[row];
        CHECK_INT(l.hit[row], what == 3);
        if (what == 3) {
          CHECK(isfinite(loss) && isfinite(nll));
          if (gradient != 0) CHECK(x[3] == 0 && isfinite(x[0]));
        } else {
          CHECK(isnan(loss) && isnan(nll));
          if (gradient != 0) CHECK(isnan(x[0]) && isnan(x[classes - 1]));
        }
      }
      layer_free(&l);
    }
  }
}

/* Sums over the rows that count, in double. */
static void test_losses(const rp_ops *ops) {
  static const int64_t rows[] = {0, 1, 31, 3000};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const int64_t n = rows[i];
    array loss = array_random("loss", n, 5), nll = array_random("nll", n, 5);
    int32_t *const labels = malloc((size_t)(n + 1) * sizeof(int32_t));
    int8_t *const hit = malloc((size_t)(n + 1));
    if (labels == NULL || hit == NULL) abort();
    rpi_losses expected = {0};
    double sizes[2] = {0};
    for (int64_t r = 0; r < n; r++) {
      labels[r] = r % 4 == 2 ? -1 : (int32_t)(draw() % 100);
      hit[r] = draw() % 3 == 0;
      if (labels[r] < 0) {
        loss.data[r] = (real)NAN; /* not read */
        continue;
      }
      expected.tokens++;
      expected.hits += hit[r];
      expected.loss += (double)loss.data[r];
      expected.nll += (double)nll.data[r];
      sizes[0] += fabs((double)loss.data[r]);
      sizes[1] += fabs((double)nll.data[r]);
    }
    rpi_losses own = {.bad = 9}, total = {0};
    int32_t note = 5;
    rpi_losses_args a = {n, labels, loss.data, nll.data, hit, &note, &own, &total};
    CHECK_INT(ops->losses(&a), RP_OK);
    CHECK_INT(own.tokens, expected.tokens);
    CHECK_INT(own.hits, expected.hits);
    CHECK_INT(own.bad, 0);
    CHECK_INT(note, 0);
    const double u = (double)(n + 1) * DBL_EPSILON;
    CHECK(fabs(own.loss - expected.loss) <= u * sizes[0]);
    CHECK(fabs(own.nll - expected.nll) <= u * sizes[1]);
    CHECK(memcmp(&own, &total, sizeof own) == 0); /* 0 + x is x */
    CHECK_INT(ops->losses(&a), RP_OK);
    CHECK(total.tokens == 2 * own.tokens && total.hits == 2 * own.hits);
    CHECK(total.loss == 2 * own.loss && total.nll == 2 * own.nll && total.bad == 0);
    if (n > 0) { /* row 0 counts */
      const rpi_losses before = total;
      loss.data[0] = (real)INFINITY;
      note = 77;
      a.total = NULL;
      CHECK_INT(ops->losses(&a), RP_OK);
      CHECK(own.bad == 77 && note == 0 && memcmp(&before, &total, sizeof total) == 0);
      a.total = &total;
      CHECK_INT(ops->losses(&a), RP_OK);
      CHECK(own.bad == 1 && total.bad == 1 && total.loss == (double)INFINITY);
      note = 3;
      CHECK_INT(ops->losses(&a), RP_OK);
      CHECK(own.bad == 3 && total.bad == 1); /* the first batch is the one that is told */
    }
    array_free(&loss);
    array_free(&nll);
    free(labels);
    free(hit);
  }
}

/* Rows, more than the device has multiprocessors: the emulated one has 4. */
static int64_t many_rows(void) {
  rp_device device = {.struct_size = sizeof device};
  CHECK_INT(rp_device_get(1, &device), RP_OK);
  return strcmp(device.title, "Emulated GPU") == 0 ? 9 : 200;
}

/* A multiprocessor has one of them at a time: of quads that are whole, of others, and longer than
 * registers hold. */
static void test_long_rows(const rp_ops *ops) {
  const int64_t rows = many_rows();
  test_shape(ops, 150, 30001, 3, 0.1, RP_SMOOTH_ALL, true);
  test_shape(ops, rows, 30004, 20, 0.1, RP_SMOOTH_OTHERS, true);
  test_shape(ops, rows, 32768, 3, 0.1, RP_SMOOTH_ALL, true);
  test_shape(ops, rows, 32768, 100, 0, RP_SMOOTH_ALL, false);
  test_rounded(ops, rows, 30004);
  test_rounded(ops, rows, 32768);
  test_rounded(ops, rows, 40004);
  test_values(ops, rows);
  test_not_finite(ops, rows, 29004);
}

int main(void) {
  for (int t = 0; table_at(t) != NULL; t++) {
    const rp_ops *const ops = table_at(t);
    test_shapes(ops);
    test_derivatives(ops, 0, RP_SMOOTH_ALL);
    test_derivatives(ops, 0.1, RP_SMOOTH_ALL);
    test_derivatives(ops, 0.3, RP_SMOOTH_OTHERS);
    if (is_device_run()) {
      test_shape(ops, 2, 12288, 3, 0.1, RP_SMOOTH_ALL, true); /* 48 KiB: a kernel's first time */
      test_rounded(ops, 9, 40);
      test_rounded(ops, 5, 2100);
      test_rounded(ops, 2, 60000);
      test_long_rows(ops);
    }
    test_values(ops, 1);
    test_not_finite(ops, 1, 70);
    test_losses(ops);
  }
  return check_report();
}
