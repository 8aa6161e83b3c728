/* SPDX-License-Identifier: Apache-2.0
 *
 * test_sums.c: sums of columns, sums of squares, the verdict on a step, zeros.
 */
#include "layer.h"
#include "ops/verdict.h"
#include "train/schedule.h"

typedef struct columns {
  rpi_column_sums_args args;
} columns;

static void run_columns(const rp_ops *ops, void *context) {
  const columns *const c = context;
  CHECK_INT(ops->column_sums(&c->args), RP_OK);
}

static void test_columns(const rp_ops *ops, layer_shape s, int64_t gap) {
  array x = array_random("x", s.rows * (s.columns + gap), 1);
  array sum = array_random("sum", s.columns, 1), before = array_copy(&sum);
  columns c = {{s.rows, s.columns, x.data, s.columns + gap, sum.data}};
  CHECK(has_same_bits(ops, run_columns, &c, &sum, 1));
  CHECK(are_sums(ops, &before, &sum, x.data, s, s.columns + gap));
  array_free(&x);
  array_free(&sum);
  array_free(&before);
}

/* Long sums stay good: 100,000 times the same number, whose plain sum in float is off by 1e-3. */
static void test_long_columns(const rp_ops *ops) {
  const int64_t rows = 100000;
  array x = array_of("x", rows, (real)0.1), sum = array_of("sum", 1, 0);
  const rpi_column_sums_args a = {rows, 1, x.data, 1, sum.data};
  CHECK_INT(ops->column_sums(&a), RP_OK);
  const double allowed = 66 * UNIT + (double)rows / 64 * (DBL_EPSILON / 2);
  CHECK_NEAR((double)sum.data[0], (double)(real)0.1 * (double)rows, allowed);
  array_free(&x);
  array_free(&sum);
}

static double square_sum(const rp_ops *ops, const array *x) {
  double workspace[8], sum = -1;
  CHECK(rpi_square_blocks(x->count) <= 8);
  CHECK_INT(ops->square_sum(x->data, x->count, workspace, &sum), RP_OK);
  return sum;
}

/* All is added in double: in a block of 65,536 at least two chains, from floats without rounding.
 */
static void test_squares(const rp_ops *ops, int64_t count) {
  array x = array_random("x", count, 3);
  long double expected = 0;
  for (int64_t i = 0; i < count; i++) expected += (long double)x.data[i] * x.data[i];
  double first = 0;
  for (int threads = 1; threads <= 8; threads++) {
    rp_set_threads(threads);
    const double sum = square_sum(ops, &x);
    if (threads == 1) first = sum;
    CHECK(memcmp(&sum, &first, sizeof sum) == 0);
  }
  rp_set_threads(0);
  const double allowed = (32768 + 8) * (DBL_EPSILON / 2);
  CHECK(fabs(first - (double)expected) <= allowed * (double)expected);
  for (int64_t i = 0; i < count; i += count / 3 + 1) {
    const real before = x.data[i];
    x.data[i] = (real)NAN;
    CHECK(isnan(square_sum(ops, &x)));
    x.data[i] = (real)-INFINITY;
    CHECK(isnan(square_sum(ops, &x)));
    x.data[i] = before;
  }
  array_free(&x);
}

/* What overflows in float does not here. */
static void test_large_squares(const rp_ops *ops) {
  array x = array_of("x", 3, (real)1e30);
  CHECK_NEAR(square_sum(ops, &x) / 3e60, 1, 1e-6);
  array_free(&x);
}

/* ---- the verdict ------------------------------------------------------------------ */

static rpi_ledger ledger_with(int64_t tokens, double squares, int64_t step) {
  return (rpi_ledger){.total = {.tokens = tokens, .hits = 3, .loss = 12, .nll = 10},
                      .squares = squares,
                      .outcome = {.step = step, .bad_gradient = 5}};
}

/* By hand: of 4 tokens and squares of 3600 the norm is 15. */
static void test_verdict(const rp_ops *ops) {
  const rpi_schedule schedule = {.kind = RP_SCHEDULE_CONSTANT, .factor = 0.5};
  rpi_ledger l = ledger_with(4, 3600, 1);
  rpi_decide_args a = {&l, schedule, 0, 0.5, 0.75};
  CHECK_INT(ops->decide(&a), RP_OK);
  const rpi_outcome *const o = &l.outcome;
  CHECK(o->losses.tokens == 4 && o->losses.hits == 3 && o->losses.loss == 12);
  CHECK(o->losses.nll == 10 && o->losses.bad == 0 && o->norm == 15 && o->rate == 0.5);
  CHECK(o->scale == 0.25 && o->step == 2 && o->moves == 1 && o->sound == 1);
  CHECK(o->correction1 == 1 / 0.75 && o->correction2 == 1 / 0.4375 && o->bad_gradient == 0);
  const rpi_losses none = {0};
  CHECK(memcmp(&l.total, &none, sizeof none) == 0);

  l = ledger_with(4, 3600, 1);
  a.clip_norm = 3;
  CHECK_INT(ops->decide(&a), RP_OK);
  CHECK(o->norm == 15 && o->scale == 0.2 / 4);
  l = ledger_with(4, 3600, 1);
  a.clip_norm = 15; /* not more than that */
  CHECK_INT(ops->decide(&a), RP_OK);
  CHECK(o->scale == 0.25);

  struct {
    int64_t tokens, bad;
    double squares;
    int sound;
  } still[] = {{4, 7, 3600, 1},    {4, 0, (double)NAN, 0}, {4, 0, (double)INFINITY, 0},
               {4, 0, 17.0e36, 0}, {0, 0, 0, 1},           {0, 0, (double)NAN, 1}};
  for (size_t i = 0; i < sizeof still / sizeof still[0]; i++) {
    l = ledger_with(still[i].tokens, still[i].squares, 41);
    l.total.bad = still[i].bad;
    CHECK_INT(ops->decide(&a), RP_OK);
    CHECK(o->moves == 0 && o->step == 41 && o->rate == 0 && o->sound == still[i].sound);
    CHECK(o->losses.bad == still[i].bad && l.total.bad == 0 && l.total.tokens == 0);
  }
  l = ledger_with(4, 16.0e36, 41); /* 1e18 is what there may be */
  CHECK_INT(ops->decide(&a), RP_OK);
  CHECK(o->moves == 1 && o->norm == 1e18);
}

/* The table's rate against the one that rp_learning_rate tells: another compiler may round some of
 * its dozen operations otherwise. */
static void test_rates(const rp_ops *ops) {
  rp_config config = rp_config_default();
  config.learning_rate = 0.7;
  config.steps = 5000;
  config.final_rate = 0.1;
  for (config.schedule = 0; config.schedule <= RP_SCHEDULE_LINEAR; config.schedule++) {
    for (config.warmup = 0; config.warmup <= 1000; config.warmup += 1000) {
      for (int64_t t = 1; t < 20000; t = t * 3 / 2 + 1) {
        rpi_ledger l = ledger_with(1, 1, t - 1);
        const rpi_decide_args a = {&l, rpi_schedule_of(&config), 0, 0.9, 0.997};
        CHECK_INT(ops->decide(&a), RP_OK);
        CHECK(l.outcome.moves == 1 && l.outcome.step == t);
        if (config.schedule == RP_SCHEDULE_INVERSE_SQRT && config.warmup == 0) continue; /* none */
        const double expected = rp_learning_rate(&config, t);
        CHECK(fabs(l.outcome.rate - expected) <= 12 * DBL_EPSILON * 0.7);
        const double power = 1 - pow(0.9, (double)t);
        CHECK_NEAR(l.outcome.correction1 * power, 1, 1e-13);
      }
    }
  }
}

/* Of three parameters with gaps between them. */
static void test_blame(const rp_ops *ops) {
  array x = array_random("gradients", 700, 1);
  const int64_t places[] = {0, 5, 64, 600, 690, 10};
  double workspace[1] = {
      0}; /* a device does not write it, and what comes back counts as a result */
  rpi_outcome o = {.losses = {.tokens = 2}};
  const rpi_blame_args a = {&o, x.data, places, 3, workspace};
  const struct {
    int64_t at;
    real value;
    int32_t found;
  } bad[] = {
      {699, (real)NAN, 3}, {663, (real)INFINITY, 2}, {2, (real)3e18, 1}, {2, (real)1.5e18, 0}};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    const real before = x.data[bad[i].at];
    x.data[bad[i].at] = bad[i].value;
    o.bad_gradient = 0;
    CHECK_INT(ops->blame(&a), RP_OK);
    CHECK_INT(o.bad_gradient, bad[i].found);
    x.data[bad[i].at] = before;
  }
  x.data[0] = x.data[100] = (real)NAN; /* of two the last */
  x.data[6] = (real)NAN;               /* of no parameter */
  CHECK_INT(ops->blame(&a), RP_OK);
  CHECK_INT(o.bad_gradient, 2);
  o = (rpi_outcome){.sound = 1};
  CHECK_INT(ops->blame(&a), RP_OK);
  CHECK_INT(o.bad_gradient, 0);
  o = (rpi_outcome){.losses = {.tokens = 2, .bad = 1}}; /* the loss was first */
  CHECK_INT(ops->blame(&a), RP_OK);
  CHECK_INT(o.bad_gradient, 0);
  array_free(&x);
}

static void test_zero(const rp_ops *ops, int64_t count) {
  array x = array_of("x", count, (real)NAN);
  CHECK_INT(ops->zero(x.data, count), RP_OK);
  bool right = true;
  for (int64_t i = 0; i < count; i++) right = right && x.data[i] == 0;
  CHECK(right);
  array_free(&x);
}

int main(void) {
  static const int64_t counts[] = {0, 1, 2, 17, 1000, 65535, 65536, 65537, 300000};
  for (int t = 0; table_at(t) != NULL; t++) {
    const rp_ops *const ops = table_at(t);
    for (int i = 0; i < layer_shape_count(); i++) {
      test_columns(ops, layer_shapes[i], 0);
      test_columns(ops, layer_shapes[i], 7);
    }
    test_long_columns(ops);
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
      test_squares(ops, counts[i]);
      test_zero(ops, counts[i]);
    }
    test_zero(ops, 1000001);
    test_large_squares(ops);
    test_verdict(ops);
    test_rates(ops);
    test_blame(ops);
  }
  return check_report();
}
