/* SPDX-License-Identifier: Apache-2.0
 *
 * test_residual.c: out = x + keep(f) and its derivative, number by number, in every allowed way of
 * sharing memory.
 */
#include "layer.h"

typedef struct layer {
  rpi_residual_args forward;
  rpi_residual_backward_args backward;
} layer;

static void run(const rp_ops *ops, void *context) {
  const layer *const l = context;
  CHECK_INT(ops->residual(&l->forward), RP_OK);
  CHECK_INT(ops->residual_backward(&l->backward), RP_OK);
}

enum { OUT_APART, OUT_IS_X, OUT_IS_F, SHARINGS };

static void test_shape(const rp_ops *ops, layer_shape s, double rate, int sharing) {
  packing p;
  packing_fill(&p, s.rows, rate);
  const int64_t count = s.rows * s.columns;
  array x = array_random("x", count, 2), f = array_random("f", count, 1);
  array given = array_random("dout", count, 1), out = array_of("out", count, (real)NAN);
  array dout = array_copy(&given), df = array_of("df", count, (real)NAN);
  array x_before = array_copy(&x), f_before = array_copy(&f);
  const array to = sharing == OUT_IS_X ? x : sharing == OUT_IS_F ? f : out;
  const array df_to = sharing == OUT_APART ? df : dout;
  layer l = {{s.rows, s.columns, x.data, f.data, p.dropout, to.data},
             {s.rows, s.columns, dout.data, p.dropout, df_to.data, RP_F32}};
  CHECK(has_same_bits(ops, run, &l, (array[]){to, df_to}, 2));
  bool right = true;
  for (int64_t i = 0; i < count; i++) {
    const real factor = keep_factor(&p.dropout, i / s.columns, i % s.columns);
    const long double kept = (long double)factor * f_before.data[i];
    const long double sum = x_before.data[i] + kept;
    const long double allowed = 1.01L * UNIT * (fabsl(kept) + fabsl(sum));
    right = right && is_close(ops, "out", i, to.data[i], sum, allowed);
    right = right && df_to.data[i] == factor * given.data[i];
  }
  CHECK(right);
  array_free(&x);
  array_free(&f);
  array_free(&given);
  array_free(&out);
  array_free(&dout);
  array_free(&df);
  array_free(&x_before);
  array_free(&f_before);
}

/* What a device leaves in bf16 is df rounded. */
static void test_rounded(const rp_ops *ops, layer_shape s, double rate) {
  packing p;
  packing_fill(&p, s.rows, rate);
  const int64_t count = s.rows * s.columns;
  array dout = array_random("dout", count, 1), df = array_of("df", (count + 1) / 2, 0);
  const rpi_residual_backward_args a = {s.rows, s.columns, dout.data, p.dropout, df.data, RP_BF16};
  CHECK_INT(ops->residual_backward(&a), RP_OK);
  bool right = true;
  for (int64_t i = 0; i < count; i++) {
    const real factor = keep_factor(&p.dropout, i / s.columns, i % s.columns);
    right = right && (factor == 0 || has_rounded(df.data, i, factor * dout.data[i]));
    right = right && (factor != 0 || rounded_at(df.data, i) == 0);
  }
  CHECK(right);
  array_free(&dout);
  array_free(&df);
}

/* What is not finite stays where it is kept, and goes where it is dropped. */
static void test_not_finite(const rp_ops *ops) {
  packing p;
  packing_fill(&p, 9, 0.5);
  array x = array_of("x", 9 * 70, 1), f = array_of("f", 9 * 70, (real)INFINITY);
  const rpi_residual_args a = {9, 70, x.data, f.data, p.dropout, f.data};
  CHECK_INT(ops->residual(&a), RP_OK);
  bool right = true;
  for (int64_t i = 0; i < f.count; i++) {
    const bool kept = keep_factor(&p.dropout, i / 70, i % 70) > 0;
    right = right && (kept ? isinf(f.data[i]) != 0 : f.data[i] == 1);
  }
  CHECK(right);
  array_free(&x);
  array_free(&f);
}

int main(void) {
  for (int t = 0; table_at(t) != NULL; t++) {
    for (int i = 0; i < layer_shape_count(); i++) {
      for (int r = 0; r < LAYER_RATES; r++) {
        test_shape(table_at(t), layer_shapes[i], layer_rates[r], (i + r + t) % SHARINGS);
        if (is_device_run()) test_rounded(table_at(t), layer_shapes[i], layer_rates[r]);
      }
    }
    test_not_finite(table_at(t));
  }
  return check_report();
}
