/* SPDX-License-Identifier: Apache-2.0
 *
 * test_adam.c: steps of Adam against the formula in long double, its first step by hand, and what
 * must stay as it is.
 */
#include "layer.h"
#include "ops/verdict.h"

typedef struct layer {
  rpi_adam_args args;
  rpi_outcome outcome;
  array weights, gradient, moment1, moment2, average;
} layer;

static void run(const rp_ops *ops, void *context) {
  const layer *const l = context;
  CHECK_INT(ops->adam(&l->args), RP_OK);
}

/* What the verdict on a step says. */
static rpi_outcome outcome_at(int64_t step, double rate, double scale, double beta1, double beta2) {
  return (rpi_outcome){.rate = rate,
                       .scale = scale,
                       .correction1 = rpi_adam_correction(beta1, step),
                       .correction2 = rpi_adam_correction(beta2, step),
                       .step = step,
                       .moves = 1,
                       .sound = 1};
}

static void layer_create(layer *l, int64_t count, int64_t step, bool average) {
  l->weights = array_random("weights", count, 1);
  l->gradient = array_random("gradient", count, 30);
  l->moment1 = array_random("moment1", count, step > 1 ? 0.1 : 0);
  l->moment2 = array_random("moment2", count, step > 1 ? 0.1 : 0);
  for (int64_t i = 0; i < count; i++) {
    if (l->moment2.data[i] < 0) l->moment2.data[i] = -l->moment2.data[i];
  }
  l->average = array_random("average", count, 1);
  l->outcome = outcome_at(step, 1e-2, 0.01, 0.9, 0.98);
  l->args = (rpi_adam_args){.count = count,
                            .weights = l->weights.data,
                            .gradient = l->gradient.data,
                            .moment1 = l->moment1.data,
                            .moment2 = l->moment2.data,
                            .average = average ? l->average.data : NULL,
                            .outcome = &l->outcome,
                            .beta1 = 0.9,
                            .beta2 = 0.98,
                            .epsilon = 1e-6,
                            .decay = 0.1,
                            .ema = 0.9};
}

static void layer_free(layer *l) {
  array_free(&l->weights);
  array_free(&l->gradient);
  array_free(&l->moment1);
  array_free(&l->moment2);
  array_free(&l->average);
}

/* Each constant and each operation is rounded once. */
static bool is_right(const rp_ops *ops, const layer *before, const layer *after) {
  const rpi_adam_args *const a = &before->args;
  const long double u = 1.01L * UNIT, t = (long double)a->outcome->step;
  const long double beta1 = (long double)a->beta1, beta2 = (long double)a->beta2;
  const long double rate = (long double)a->outcome->rate, decay = (long double)a->decay;
  const long double ema = (long double)a->ema;
  bool right = true;
  for (int64_t i = 0; i < a->count && right; i++) {
    const long double w = before->weights.data[i];
    const long double g = (long double)a->outcome->scale * before->gradient.data[i];
    const long double old1 = beta1 * before->moment1.data[i];
    const long double m = old1 + (1 - beta1) * g;
    const long double v = beta2 * before->moment2.data[i] + (1 - beta2) * g * g;
    const long double m_error = u * (2 * fabsl(old1) + 4 * fabsl((1 - beta1) * g) + fabsl(m));
    const long double root = sqrtl(v / (1 - powl(beta2, t))) + (long double)a->epsilon;
    const long double factor = 1 / (1 - powl(beta1, t)) / root, step = m * factor;
    const long double now = w - rate * (step + decay * w);
    const long double moved = fabsl(rate * step) + fabsl(rate * decay * w);
    const long double error = rate * factor * m_error + u * (12 * moved + fabsl(now));
    right = is_close(ops, "moment1", i, after->moment1.data[i], m, m_error) &&
            is_close(ops, "moment2", i, after->moment2.data[i], v, 8 * u * v) &&
            is_close(ops, "weights", i, after->weights.data[i], now, error) &&
            after->gradient.data[i] == 0;
    const long double old = before->average.data[i];
    if (a->average == NULL) right = right && after->average.data[i] == before->average.data[i];
    else {
      const long double expected = ema * old + (1 - ema) * now;
      right = right && is_close(ops, "average", i, after->average.data[i], expected,
                                error + 3 * u * (fabsl(ema * old) + fabsl((1 - ema) * now)));
    }
  }
  return right;
}

static void test_steps(const rp_ops *ops, int64_t count, int64_t step, bool average) {
  layer l, before;
  layer_create(&l, count, step, average);
  before = l;
  before.args.outcome = &before.outcome;
  before.weights = array_copy(&l.weights);
  before.gradient = array_copy(&l.gradient);
  before.moment1 = array_copy(&l.moment1);
  before.moment2 = array_copy(&l.moment2);
  before.average = array_copy(&l.average);
  const array all[] = {l.weights, l.gradient, l.moment1, l.moment2, l.average};
  CHECK(has_same_bits(ops, run, &l, all, 5));
  CHECK(is_right(ops, &before, &l));
  layer_free(&before);
  layer_free(&l);
}

/* The first step moves every weight by the rate, against its gradient, however small that is. */
static void test_first_step(const rp_ops *ops) {
  real w[5] = {0, 0, 0, 0, 0}, g[5] = {1, -1000, (real)1e-6, 0, -8}, m[5] = {0}, v[5] = {0};
  const rpi_outcome first = outcome_at(1, 0.25, 1, 0.9, 0.997);
  const rpi_adam_args a = {.count = 5,
                           .weights = w,
                           .gradient = g,
                           .moment1 = m,
                           .moment2 = v,
                           .outcome = &first,
                           .beta1 = 0.9,
                           .beta2 = 0.997,
                           .epsilon = 1e-12};
  CHECK_INT(ops->adam(&a), RP_OK);
  static const double expected[5] = {-0.25, 0.25, -0.25, 0, 0.25};
  for (int i = 0; i < 5; i++) CHECK_NEAR((double)w[i], expected[i], 2e-6);
  CHECK(w[3] == 0 && m[3] == 0 && v[3] == 0);
}

/* No gradient yet and no decay: weights keep their bits, very small ones too. */
static void test_rest(const rp_ops *ops) {
  layer l;
  layer_create(&l, 1001, 1, false);
  memset(l.gradient.data, 0, (size_t)l.gradient.count * sizeof(real));
  l.args.decay = 0;
  l.weights.data[7] = (real)FLT_MIN;
  l.weights.data[8] = 0;
  array before = array_copy(&l.weights);
  for (int step = 1; step < 4; step++) {
    l.outcome = outcome_at(step, 1e-2, 0.01, 0.9, 0.98);
    run(ops, &l);
  }
  CHECK(memcmp(before.data, l.weights.data, (size_t)before.count * sizeof(real)) == 0);
  array_free(&before);
  layer_free(&l);
}

/* Where the verdict says no, the gradient is gone and no other bit has changed, whatever the
 * gradient was. */
static void test_no_update(const rp_ops *ops, int64_t count) {
  layer l;
  layer_create(&l, count, 7, true);
  l.outcome.moves = 0;
  l.outcome.rate = l.outcome.scale = l.outcome.correction1 = (double)NAN;
  for (int64_t i = 0; i < count; i += 3) l.gradient.data[i] = i % 2 == 0 ? (real)NAN : INFINITY;
  array *const arrays[] = {&l.weights, &l.moment1, &l.moment2, &l.average};
  array before[4];
  for (int i = 0; i < 4; i++) before[i] = array_copy(arrays[i]);
  run(ops, &l);
  for (int i = 0; i < 4; i++) {
    CHECK(memcmp(before[i].data, arrays[i]->data, (size_t)count * sizeof(real)) == 0);
    array_free(&before[i]);
  }
  bool zero = true;
  for (int64_t i = 0; i < count; i++) zero = zero && l.gradient.data[i] == 0;
  CHECK(zero);
  layer_free(&l);
}

int main(void) {
  static const int64_t counts[] = {0, 1, 3, 17, 64, 1000, 16384, 50001};
  static const int64_t steps[] = {1, 2, 1000, 1000000};
  for (int t = 0; table_at(t) != NULL; t++) {
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
      for (size_t s = 0; s < sizeof steps / sizeof steps[0]; s++) {
        test_steps(table_at(t), counts[i], steps[s], (i + s) % 2 == 0);
      }
    }
    test_first_step(table_at(t));
    test_rest(table_at(t));
    test_no_update(table_at(t), 17);
    test_no_update(table_at(t), 50001);
  }
  return check_report();
}
