/* SPDX-License-Identifier: Apache-2.0
 *
 * test_sums.c: sums of columns, sums of squares, zeros.
 */
#include "layer.h"

typedef struct columns {
  rpi_column_sums_args args;
} columns;

static void run_columns(const rp_ops *ops, void *context) {
  const columns *const c = context;
  CHECK_INT(ops->column_sums(&c->args), RP_OK);
}

/* 64 rows are added in `real`, these sums in double, the whole to what is there. */
static void test_columns(const rp_ops *ops, layer_shape s, int64_t gap) {
  array x = array_random("x", s.rows * (s.columns + gap), 1);
  array sum = array_random("sum", s.columns, 1), before = array_copy(&sum);
  columns c = {{s.rows, s.columns, x.data, s.columns + gap, sum.data}};
  CHECK(has_same_bits(ops, run_columns, &c, &sum, 1));
  bool right = true;
  for (int64_t j = 0; j < s.columns; j++) {
    long double expected = before.data[j], size = 0;
    for (int64_t row = 0; row < s.rows; row++) {
      const long double one = x.data[row * (s.columns + gap) + j];
      expected += one;
      size += fabsl(one);
    }
    const long double allowed = 1.01L * UNIT * (64 * size + 2 * fabsl(expected) + 1);
    right = right && is_close(ops, "sum", j, sum.data[j], expected, allowed);
  }
  CHECK(right);
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
  }
  return check_report();
}
