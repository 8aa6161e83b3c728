/* SPDX-License-Identifier: Apache-2.0
 *
 * test_rng.c: base/rng.h and rng.c against known answers. Those of Philox are the
 * published ones of Random123 (its kat_vectors file); those of the step key were
 * computed by a separate implementation in Python integers.
 */
#include "base/rng.h"

#include "check.h"

static const struct known_answer {
  int rounds;
  uint32_t counter[4], key[2], expected[4];
} known_answers[] = {
    {7, {0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
    {7,
     {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
    {7,
     {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
    {10, {0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {10,
     {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {10,
     {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

static void test_known_answers(void) {
  for (size_t i = 0; i < sizeof known_answers / sizeof known_answers[0]; i++) {
    const struct known_answer *kat = &known_answers[i];
    rpi_philox_block counter;
    rpi_philox_key key;
    memcpy(counter.word, kat->counter, sizeof counter.word);
    memcpy(key.word, kat->key, sizeof key.word);
    const rpi_philox_block block = rpi_philox(counter, key, kat->rounds);
    for (int w = 0; w < 4; w++) CHECK_INT(block.word[w], kat->expected[w]);
  }
}

static void test_step_key(void) {
  CHECK_INT(rpi_philox_step_key(0, 0).word[0], 0x6627e8d5);
  CHECK_INT(rpi_philox_step_key(0, 0).word[1], 0xe169c58d);
  CHECK_INT(rpi_philox_step_key(42, 5).word[0], 0x5099d809);
  CHECK_INT(rpi_philox_step_key(42, 5).word[1], 0x4b20b5d2);
  /* All four halves count, each in its place. */
  const rpi_philox_key key =
      rpi_philox_step_key(UINT64_C(0x0123456789abcdef), UINT64_C(0xfedcba9876543210));
  CHECK_INT(key.word[0], 0x2c03a599);
  CHECK_INT(key.word[1], 0xd8a290fc);
}

static void test_uniform(void) {
  CHECK(rpi_uniform(0) == 0.0f);
  CHECK(rpi_uniform(0xff) == 0.0f); /* the lowest eight bits are not used */
  CHECK(rpi_uniform(0x100) == 0x1p-24f);
  CHECK(rpi_uniform(0x80000000) == 0.5f);
  CHECK(rpi_uniform(0xffffffff) == 1.0f - 0x1p-24f);
}

static void test_normal_edges(void) {
  double a, b;
  rpi_normal_pair(0xffffffff, 0, &a, &b);
  CHECK(a == 0.0 && b == 0.0);
  rpi_normal_pair(0, 0, &a, &b); /* the largest there is: sqrt(-2 log 2^-32) */
  CHECK_NEAR(a, 6.660436889261, 1e-12);
  CHECK(b == 0.0);
  rpi_normal_pair(0x7fffffff, 0x40000000, &a, &b); /* radius sqrt(2 log 2), a right angle */
  CHECK_NEAR(a, 0.0, 1e-15);
  CHECK_NEAR(b, 1.1774100225, 1e-9);
}

/* Mean, variance, fourth moment and correlation of 2 n normals, each within five
 * standard errors; and of n uniforms. The numbers are fixed, so is the verdict. */
static void test_moments(void) {
  enum { n = 20000 };
  const rpi_philox_key key = rpi_philox_step_key(1, 2);
  double sum = 0, squares = 0, fourths = 0, products = 0, uniforms = 0;
  for (uint32_t i = 0; i < n; i++) {
    const rpi_philox_block block =
        rpi_philox((rpi_philox_block){{i, 0, 0, 0}}, key, RPI_PHILOX_ROUNDS);
    double a, b;
    rpi_normal_pair(block.word[0], block.word[1], &a, &b);
    sum += a + b;
    squares += a * a + b * b;
    fourths += a * a * a * a + b * b * b * b;
    products += a * b;
    uniforms += (double)rpi_uniform(block.word[2]);
  }
  CHECK_NEAR(sum / (2 * n), 0.0, 5 * sqrt(1.0 / (2 * n)));
  CHECK_NEAR(squares / (2 * n) - 1.0, 0.0, 5 * sqrt(2.0 / (2 * n)));
  CHECK_NEAR(fourths / (2 * n) - 3.0, 0.0, 5 * sqrt(96.0 / (2 * n)));
  CHECK_NEAR(products / n, 0.0, 5 * sqrt(1.0 / n));
  CHECK_NEAR(uniforms / n - 0.5, 0.0, 5 * sqrt(1.0 / 12 / n));
}

int main(void) {
  test_known_answers();
  test_step_key();
  test_uniform();
  test_normal_edges();
  test_moments();
  return check_report();
}
