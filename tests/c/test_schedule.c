/* SPDX-License-Identifier: Apache-2.0
 *
 * test_schedule.c: train/schedule.c. Values worked out by hand at the corners of every schedule,
 * and the formulas of model.h, written plainly, in between.
 */
#include "train/schedule.h"

#include <math.h>

#include "check.h"

/* A formula in another order of operations: a few roundings of 2^-53 apart. */
#define ROUNDED 2e-15

static rp_config with(int schedule, double factor, int64_t warmup, int64_t steps, double final) {
  rp_config config = rp_config_default();
  config.schedule = schedule;
  config.learning_rate = factor;
  config.warmup = warmup;
  config.steps = steps;
  config.final_rate = final;
  return config;
}

#define EXACTLY(config, t, expected) CHECK(rp_learning_rate(&(config), (t)) == (expected))
#define NEARLY(config, t, expected)                                                                \
  CHECK_NEAR(rp_learning_rate(&(config), (t)) / (expected), 1, ROUNDED)

static void test_noam(void) {
  rp_config c = with(RP_SCHEDULE_NOAM, 1, 4, 0, 0);
  c.width = 256; /* C^-0.5 = 1/16, w^-1.5 = 1/8 */
  EXACTLY(c, 1, 1.0 / 128);
  EXACTLY(c, 2, 2.0 / 128);
  EXACTLY(c, 3, 3.0 / 128);
  EXACTLY(c, 4, 1.0 / 32);
  EXACTLY(c, 16, 1.0 / 64);
  EXACTLY(c, 64, 1.0 / 128);
  c.learning_rate = 2;
  EXACTLY(c, 64, 2.0 / 128);
  c.warmup = 0; /* t^-0.5 from the first step on */
  EXACTLY(c, 1, 2.0 / 16);
  EXACTLY(c, 4, 1.0 / 16);

  CHECK_INT(rp_config_preset("paper-base", &c), RP_OK);
  NEARLY(c, 4000, 1 / sqrt(512.0 * 4000));
  for (int64_t t = 1; t <= 100000; t = t * 3 / 2 + 1) {
    const double s = (double)t;
    NEARLY(c, t, pow(512, -0.5) * fmin(pow(s, -0.5), s * pow(4000, -1.5)));
  }
}

static void test_inverse_sqrt(void) {
  const rp_config c = with(RP_SCHEDULE_INVERSE_SQRT, 0.5, 4, 0, 0);
  EXACTLY(c, 1, 0.125);
  EXACTLY(c, 3, 0.375);
  EXACTLY(c, 4, 0.5);
  EXACTLY(c, 16, 0.25);
  EXACTLY(c, 64, 0.125);
  for (int64_t t = 1; t < 2000; t = t * 3 / 2 + 1) {
    NEARLY(c, t, 0.5 * fmin((double)t / 4, sqrt(4 / (double)t)));
  }
}

static void test_constant(void) {
  rp_config c = with(RP_SCHEDULE_CONSTANT, 0.5, 4, 0, 0);
  EXACTLY(c, 1, 0.125);
  EXACTLY(c, 4, 0.5);
  EXACTLY(c, INT64_MAX, 0.5);
  c.warmup = 0;
  EXACTLY(c, 1, 0.5);
}

static void test_linear(void) {
  rp_config c = with(RP_SCHEDULE_LINEAR, 0.5, 4, 20, 0.25);
  EXACTLY(c, 1, 0.125);
  EXACTLY(c, 4, 0.5);
  EXACTLY(c, 12, 0.5 * (0.25 + 0.75 / 2));
  EXACTLY(c, 16, 0.5 * (0.25 + 0.75 / 4));
  EXACTLY(c, 20, 0.125);
  EXACTLY(c, 21, 0.125);
  EXACTLY(c, INT64_MAX, 0.125);
  c.final_rate = 0;
  EXACTLY(c, 20, 0.0);
  c.warmup = 20; /* nothing is left of the fall but what comes after it */
  EXACTLY(c, 19, 0.5 * (19.0 / 20));
  EXACTLY(c, 20, 0.5);
  EXACTLY(c, 21, 0.0);
}

static void test_cosine(void) {
  rp_config c = with(RP_SCHEDULE_COSINE, 0.5, 4, 20, 0.25);
  EXACTLY(c, 1, 0.125);
  EXACTLY(c, 4, 0.5);
  NEARLY(c, 8, 0.5 * (0.25 + 0.75 * (0.5 + sqrt(0.125))));
  NEARLY(c, 12, 0.5 * (0.25 + 0.75 / 2));
  EXACTLY(c, 20, 0.125);
  EXACTLY(c, 1000, 0.125);
  c.warmup = 0;
  c.final_rate = 0;
  NEARLY(c, 10, 0.25);
  EXACTLY(c, 20, 0.0);
  double before = 1;
  for (int64_t t = 1; t <= 20; t++) {
    const double rate = rp_learning_rate(&c, t);
    CHECK(rate < before && rate >= 0);
    before = rate;
  }
}

static void test_no_rate(void) {
  rp_config c = with(RP_SCHEDULE_CONSTANT, 1, 0, 0, 0);
  CHECK(isnan(rp_learning_rate(&c, 0)));
  CHECK_TEXT(rp_last_error(), "rp_learning_rate: t=0, must be 1 or more");
  CHECK(isnan(rp_learning_rate(&c, INT64_MIN)));
  CHECK(isnan(rp_learning_rate(NULL, 1)));
  CHECK_TEXT(rp_last_error(), "config is NULL");
  c.schedule = 17;
  CHECK(isnan(rp_learning_rate(&c, 1)));
  CHECK_TEXT(rp_last_error(), "config: schedule=17");
}

int main(void) {
  test_noam();
  test_inverse_sqrt();
  test_constant();
  test_linear();
  test_cosine();
  test_no_rate();
  return check_report();
}
