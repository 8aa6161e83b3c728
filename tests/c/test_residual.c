/* SPDX-License-Identifier: Apache-2.0
 *
 * test_residual.c: x = base + keep(x) before a norm, df = keep(dx) behind its backward, number by
 * number, in every allowed way of sharing memory; and the sums of df's columns.
 */
#include "layer.h"

typedef struct layer {
  rpi_norm_args forward;
  rpi_norm_backward_args backward;
} layer;

static void run(const rp_ops *ops, void *context) {
  const layer *const l = context;
  CHECK_INT(ops->norm(&l->forward), RP_OK);
  CHECK_INT(ops->norm_backward(&l->backward, NULL), RP_OK);
}

/* y is base, df is dy; and with dx in place of df, where nothing is dropped. */
enum { ALL_APART, Y_IS_BASE, DF_IS_DY, NO_DF, SHARINGS };

static void test_shape(const rp_ops *ops, layer_shape s, double rate, int sharing, int element) {
  packing p;
  packing_fill(&p, s.rows, sharing == NO_DF ? 0 : rate);
  const int64_t count = s.rows * s.columns;
  array x = array_random("x", count, 2), base = array_random("base", count, 1);
  array gain = array_random("gain", s.columns, 1), y = array_of("y", count, (real)NAN);
  array stats = array_of("stats", 2 * s.rows, (real)NAN), dy = array_random("dy", count, 1);
  array dx = array_of("dx", count, (real)NAN), df = array_of("df", count, (real)NAN);
  array dgain = array_random("dgain", s.columns, 1), dbias = array_random("dbias", s.columns, 1);
  array f = array_copy(&x), before = array_copy(&base), sums = array_copy(&dbias);
  layer l = {.forward = {.rows = s.rows,
                         .columns = s.columns,
                         .x = x.data,
                         .base = {.x = base.data},
                         .dropout = p.dropout,
                         .gain = gain.data,
                         .epsilon = 1e-3,
                         .y = sharing == Y_IS_BASE ? base.data : y.data,
                         .stats = stats.data},
             .backward = {.rows = s.rows,
                          .columns = s.columns,
                          .x = x.data,
                          .gain = gain.data,
                          .stats = stats.data,
                          .dy = dy.data,
                          .dx = dx.data,
                          .dropout = p.dropout,
                          .df = sharing == NO_DF      ? NULL
                                : sharing == DF_IS_DY ? dy.data
                                                      : df.data,
                          .df_element = element,
                          .dgain = dgain.data,
                          .dbias = dbias.data}};
  int64_t bytes = -1;
  CHECK_INT(ops->norm_backward(&l.backward, &bytes), RP_OK);
  array workspace = array_of("workspace", bytes / (int64_t)sizeof(real), (real)NAN);
  l.backward.workspace = workspace.data;
  l.backward.workspace_bytes = bytes;
  CHECK(has_same_bits(ops, run, &l, (array[]){x, base, dy, dx, df, dbias}, 6));
  const real *const made = l.backward.df != NULL ? l.backward.df : dx.data;
  array kept = array_of("kept", count, 0); /* df in f32 */
  bool right = true;
  for (int64_t i = 0; i < count; i++) {
    const real factor = keep_factor(&p.dropout, i / s.columns, i % s.columns);
    const long double added = (long double)factor * f.data[i], sum = before.data[i] + added;
    const long double allowed = 1.01L * UNIT * (fabsl(added) + fabsl(sum));
    right = right && is_close(ops, "x", i, x.data[i], sum, allowed);
    kept.data[i] = factor == 0 ? 0 : factor * dx.data[i];
    right =
        right && (element == RP_F32 ? made[i] == kept.data[i] : has_rounded(made, i, kept.data[i]));
  }
  if (element != RP_F32) array_round(&kept);
  right = right && are_sums(ops, &sums, &dbias, kept.data, s, s.columns);
  if (!CHECK(right)) printf("\n  %lld columns, sharing %d", (long long)s.columns, sharing);
  array *const all[] = {&x,     &base,  &gain, &y,      &stats, &dy,        &dx,  &df,
                        &dgain, &dbias, &f,    &before, &sums,  &workspace, &kept};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

/* On a device: a base that is made again of what a norm has read is what it has made. It is rounded
 * three times behind rstd. */
static void test_base_again(const rp_ops *ops, layer_shape s, bool shifted) {
  packing p;
  packing_fill(&p, s.rows, 0.1);
  const int64_t count = s.rows * s.columns;
  array u = array_random("u", count, 2), y = array_of("y", count, 0);
  array gain = array_random("gain", s.columns, 1), shift = array_random("shift", s.columns, 1);
  array stats = array_of("stats", 2 * s.rows, 0), stats_next = array_copy(&stats);
  array x = array_random("x", count, 1), again = array_copy(&x), next = array_of("next", count, 0);
  rpi_norm_args a = {.rows = s.rows,
                     .columns = s.columns,
                     .x = u.data,
                     .dropout = p.dropout,
                     .gain = gain.data,
                     .shift = shifted ? shift.data : NULL,
                     .epsilon = 1e-3,
                     .y = y.data,
                     .stats = stats.data};
  CHECK_INT(ops->norm(&a), RP_OK);
  a.stats = stats_next.data;
  a.y = next.data;
  a.x = x.data;
  a.base.x = y.data;
  CHECK_INT(ops->norm(&a), RP_OK);
  a.x = again.data;
  a.base = (rpi_base){u.data, stats.data, gain.data, a.shift};
  CHECK_INT(ops->norm(&a), RP_OK);
  bool right = true;
  for (int64_t i = 0; i < count; i++) {
    const long double behind = shifted ? fabsl((long double)shift.data[i % s.columns]) : 0;
    const long double size = fabsl((long double)y.data[i]) + behind;
    const long double allowed = 1.01L * UNIT * (4 * size + fabsl((long double)x.data[i]));
    right = right && is_close(ops, "x again", i, again.data[i], x.data[i], allowed);
  }
  if (!CHECK(right)) printf("\n  %lld columns", (long long)s.columns);
  array *const all[] = {&u, &y, &gain, &shift, &stats, &stats_next, &x, &again, &next};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

/* What is not finite stays where it is kept, and goes where it is dropped. */
static void test_not_finite(const rp_ops *ops) {
  packing p;
  packing_fill(&p, 9, 0.5);
  array base = array_of("base", 9 * 70, 1), x = array_of("x", 9 * 70, (real)INFINITY);
  array gain = array_of("gain", 70, 1), y = array_of("y", 9 * 70, 0);
  const rpi_norm_args a = {.rows = 9,
                           .columns = 70,
                           .x = x.data,
                           .base = {.x = base.data},
                           .dropout = p.dropout,
                           .gain = gain.data,
                           .epsilon = 1,
                           .y = y.data};
  CHECK_INT(ops->norm(&a), RP_OK);
  bool right = true;
  for (int64_t i = 0; i < x.count; i++) {
    const bool kept = keep_factor(&p.dropout, i / 70, i % 70) > 0;
    right = right && (kept ? isinf(x.data[i]) != 0 : x.data[i] == 1);
  }
  CHECK(right);
  array *const all[] = {&base, &x, &gain, &y};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

int main(void) {
  for (int t = 0; table_at(t) != NULL; t++) {
    const rp_ops *const ops = table_at(t);
    for (int i = 0; i < layer_shape_count(); i++) {
      for (int r = 0; r < LAYER_RATES; r++) {
        test_shape(ops, layer_shapes[i], layer_rates[r], (i + r + t) % SHARINGS, RP_F32);
        if (!is_device_run()) continue;
        test_shape(ops, layer_shapes[i], layer_rates[r], (i + r) % 2, RP_BF16);
      }
    }
    for (int i = 0; is_device_run() && i < layer_shape_count(); i++) {
      test_base_again(ops, layer_shapes[i], i % 2 == 0);
    }
    /* The widths of models, which a device may take in ways of their own. */
    const layer_shape wide[] = {{20, 512}, {18, 1024}};
    for (int i = 0; i < 2; i++) {
      test_shape(ops, wide[i], 0.1, i == 0 ? Y_IS_BASE : DF_IS_DY, RP_F32);
      if (!is_device_run()) continue;
      test_shape(ops, wide[i], 0.1, ALL_APART, RP_BF16);
      test_base_again(ops, wide[i], i == 0);
    }
    test_not_finite(ops);
  }
  return check_report();
}
