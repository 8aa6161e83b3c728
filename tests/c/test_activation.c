/* SPDX-License-Identifier: Apache-2.0
 *
 * test_activation.c: ReLU, GELU and SwiGLU with dropout, forward and backward, against the formulas
 * in long double.
 *
 * Tolerances. An exponential of x has a relative error of 3 u (ops/exp2.h says 8e-8) and that of
 * its argument, 1.5 u |x|. The share of the normal distribution beyond x has that of e^(-x^2 / 2),
 * of its polynomial, 8 u, and 2e-7 beyond 5, where the share is below 3e-7.
 */
#include "layer.h"
#include "ops/linear.h"

typedef struct layer {
  rpi_activation_args forward;
  rpi_activation_backward_args backward;
  array h, a, da, dh, dbias;
  packing p;
} layer;

static void run(const rp_ops *ops, void *context) {
  const layer *const l = context;
  CHECK_INT(ops->activation(&l->forward), RP_OK);
  CHECK_INT(ops->activation_backward(&l->backward), RP_OK);
}

static double value(const rp_ops *ops, void *context) {
  const layer *const l = context;
  ops->activation(&l->forward);
  return weighted_sum(&l->a, &l->da);
}

static void layer_create(layer *l, layer_shape s, int kind, double rate, double scale) {
  const int64_t count = s.rows * s.columns, wide = kind == RP_SWIGLU ? 2 * count : count;
  packing_fill(&l->p, s.rows, rate);
  l->h = array_random("h", wide, scale);
  l->a = array_of("a", count, (real)NAN);
  l->da = array_random("da", count, 1);
  l->dh = array_of("dh", wide, (real)NAN);
  l->dbias = array_random("dbias", kind == RP_SWIGLU ? 2 * s.columns : s.columns, 1);
  l->forward = (rpi_activation_args){s.rows,       s.columns, kind,         l->h.data,
                                     l->p.dropout, l->a.data, {NULL, false}};
  l->backward = (rpi_activation_backward_args){.rows = s.rows,
                                               .columns = s.columns,
                                               .kind = kind,
                                               .h = kind == RP_RELU ? NULL : l->h.data,
                                               .a = kind == RP_RELU ? l->a.data : NULL,
                                               .da = l->da.data,
                                               .dropout = l->p.dropout,
                                               .dh = l->dh.data,
                                               .dbias = l->dbias.data};
}

static void layer_free(layer *l) {
  array_free(&l->h);
  array_free(&l->a);
  array_free(&l->da);
  array_free(&l->dh);
  array_free(&l->dbias);
}

/* f, its derivatives, and the error that each may have. */
typedef struct expected {
  long double f, f_error, slope[2], slope_error[2];
} expected;

static expected expected_gelu(long double x) {
  const long double u = 1.01L * UNIT, size = fabsl(x);
  const long double bell = expl(-x * x / 2), beyond = erfcl(size / sqrtl(2)) / 2;
  const long double density = bell * 0.398942280401432677939946L;
  const long double bell_error = bell * u * (3 + 1.5L * x * x);
  const long double beyond_error = beyond * (u * (11 + 1.5L * x * x) + (size > 5 ? 2e-7L : 4e-9L));
  const long double below = x < 0 ? beyond : 1 - beyond;
  const long double below_error = beyond_error + u * below;
  return (expected){.f = x * below,
                    .f_error = size * (below_error + u * below),
                    .slope = {below + x * density},
                    .slope_error = {below_error + u * fabsl(below + x * density) +
                                    size * (0.4L * bell_error + 3 * u * density)}};
}

static expected expected_swiglu(long double x, long double y) {
  const long double u = 1.01L * UNIT, s = 1 / (1 + expl(-x));
  /* e = e^-|x|: s is 1 / (1 + e) or e / (1 + e), 1 - s the other */
  const long double e_error = u * (3 + 1.5L * fabsl(x)), s_error = s * (e_error + 3 * u);
  const long double rest_error = s_error + u;
  const long double bracket = 1 + x * (1 - s), bracket_size = 1 + fabsl(x) * (1 - s);
  const long double bracket_error = fabsl(x) * rest_error + 3 * u * bracket_size;
  return (expected){
      .f = x * s * y,
      .f_error = fabsl(x * y) * (s_error + 3 * u * s),
      .slope = {s * bracket * y, x * s},
      .slope_error = {fabsl(y) * (s * bracket_error + fabsl(bracket) * (s_error + 3 * u * s)),
                      fabsl(x) * (s_error + 2 * u * s)}};
}

static expected expected_at(const layer *l, const array *h, int64_t row, int64_t column) {
  const int64_t columns = l->forward.columns;
  if (l->forward.kind == RP_SWIGLU) {
    const real *const gate = h->data + 2 * row * columns + column;
    return expected_swiglu(gate[0], gate[columns]);
  }
  const real x = h->data[row * columns + column];
  if (l->forward.kind == RP_GELU) return expected_gelu(x);
  return (expected){.f = x > 0 ? x : 0, .slope = {x > 0}};
}

static bool is_right(const rp_ops *ops, const layer *l, const array *h, const array *da) {
  const int64_t columns = l->forward.columns;
  const long double u = 1.01L * UNIT;
  bool right = true;
  for (int64_t i = 0; i < da->count && right; i++) {
    const int64_t row = i / columns, column = i % columns;
    const expected e = expected_at(l, h, row, column);
    const long double factor = keep_factor(&l->p.dropout, row, column);
    const long double d = factor * da->data[i];
    right =
        is_close(ops, "a", i, l->forward.a[i], factor * e.f, factor * (e.f_error + u * fabsl(e.f)));
    const bool two = l->forward.kind == RP_SWIGLU;
    for (int k = 0; k < (two ? 2 : 1); k++) {
      const int64_t at = two ? 2 * row * columns + k * columns + column : i;
      right =
          right && is_close(ops, "dh", at, l->backward.dh[at], e.slope[k] * d,
                            fabsl(d) * (e.slope_error[k] + 3 * u * fabsl(e.slope[k])) + FLT_MIN);
    }
  }
  return right;
}

/* in_place: a is h (ReLU), dh is da (ReLU, GELU). */
static void test_shape(const rp_ops *ops, layer_shape s, int kind, double rate, bool in_place) {
  layer l;
  layer_create(&l, s, kind, rate, 6);
  const layer_shape wide = {s.rows, l.dbias.count};
  array h = array_copy(&l.h), da = array_copy(&l.da), dbias = array_copy(&l.dbias);
  if (in_place && kind == RP_RELU) l.backward.a = l.forward.a = l.h.data;
  if (in_place && kind != RP_SWIGLU) l.backward.dh = l.da.data;
  CHECK(has_same_bits(ops, run, &l, (array[]){l.h, l.a, l.da, l.dh, l.dbias}, 5));
  CHECK(are_sums(ops, &dbias, &l.dbias, l.backward.dh, wide, wide.columns));
  if (!CHECK(is_right(ops, &l, &h, &da))) {
    printf("\n  kind %d, %lld x %lld, rate %g", kind, (long long)s.rows, (long long)s.columns,
           rate);
  }
  array_free(&h);
  array_free(&da);
  array_free(&dbias);
  layer_free(&l);
}

/* On a device: ReLU in place of what a product left in bf16, and gradients in bf16 are what f32
 * makes of the same numbers, rounded. */
static void test_rounded(const rp_ops *ops, layer_shape s, int kind, double rate, bool bias) {
  layer l;
  layer_create(&l, s, kind, rate, 3);
  array_round(&l.h);
  array_round(&l.da);
  run(ops, &l);
  array da = array_rounded(&l.da), wide = array_rounded(&l.dh);
  const array dh = kind == RP_SWIGLU ? wide : da;
  const int64_t stride = rpi_operand_stride(s.columns, bias);
  array kept = array_of("kept", rpi_linear_kept(s.rows, s.columns) / (int64_t)sizeof(real), 0);
  real *const row = kept.data;
  for (int64_t i = 0; i < l.a.count && kind == RP_RELU; i++) {
    put_rounded(row, i / s.columns * stride + i % s.columns, l.h.data[i]);
  }
  l.forward.h = kind == RP_RELU ? NULL : l.h.data;
  l.forward.a = NULL;
  l.forward.rounded = l.backward.rounded = (rpi_operand){kept.data, bias};
  l.backward.a = NULL;
  l.backward.da = da.data;
  l.backward.dh = dh.data;
  l.backward.element = RP_BF16;
  array before = array_copy(&l.dh), dbias = array_copy(&l.dbias);
  run(ops, &l);
  bool right = true;
  for (int64_t i = 0; i < l.a.count; i++) {
    right = right && has_rounded(row, i / s.columns * stride + i % s.columns, l.a.data[i]);
  }
  for (int64_t i = 0; i < s.rows && bias && s.columns > 0; i++) {
    for (int64_t c = s.columns; c < stride; c++) {
      right = right && has_rounded(row, i * stride + c, c < s.columns + RPI_BIAS_PARTS ? 1 : 0);
    }
  }
  for (int64_t i = 0; i < before.count; i++) {
    right = right && has_rounded(dh.data, i, before.data[i]);
  }
  array_round(&before);
  right = right && are_sums(ops, &dbias, &l.dbias, before.data,
                            (layer_shape){s.rows, l.dbias.count}, l.dbias.count);
  if (!CHECK(right)) printf("\n  kind %d in bf16, %lld columns", kind, (long long)s.columns);
  array *const all[] = {&da, &wide, &kept, &before, &dbias};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
  layer_free(&l);
}

static void test_derivatives(const rp_ops *ops, int kind) {
  layer l;
  layer_create(&l, (layer_shape){7, 19}, kind, 0.25, 3);
  for (int64_t i = 0; i < l.h.count; i++) { /* clear of ReLU's corner */
    if (fabs((double)l.h.data[i]) < 0.01) l.h.data[i] = (real)0.5;
  }
  run(ops, &l);
  check_derivative(ops, "dh", value, &l, l.h.data, l.dh.data, l.h.count);
  layer_free(&l);
}

/* From tables of the functions. Then every argument there is, more or less. */
static void test_values(const rp_ops *ops) {
  static const double xs[] = {0, 1, -1, 3, -3, 0.5, -7};
  static const double gelus[] = {0,
                                 0.84134474606854293,
                                 -0.15865525393145707,
                                 2.9959503059051097,
                                 -0.0040496940948902836,
                                 0.34573123063700656,
                                 -8.9586878072008450e-12};
  static const double silus[] = {0,
                                 0.73105857863000488,
                                 -0.26894142136999512,
                                 2.8577223804672999,
                                 -0.14227761953270035,
                                 0.31122966560092726,
                                 -0.0063773583608045175};
  enum { COUNT = sizeof xs / sizeof xs[0] };
  real h[2 * COUNT], a[COUNT];
  for (int i = 0; i < COUNT; i++) {
    h[i] = (real)xs[i];
    h[COUNT + i] = 1;
  }
  const rpi_dropout none = {.rate = 0};
  const rpi_activation_args gelu = {1, COUNT, RP_GELU, h, none, a, {NULL, false}};
  CHECK_INT(ops->activation(&gelu), RP_OK);
  for (int i = 0; i < COUNT; i++) {
    CHECK_NEAR((double)a[i], gelus[i], 1e-13 + 4 * UNIT);
    /* small results too, as good relative to themselves */
    CHECK_NEAR((double)a[i] / fmax(fabs(gelus[i]), 1e-300), gelus[i] < 0 ? -1 : gelus[i] > 0,
               1e-12 + 90 * UNIT);
  }
  const rpi_activation_args swiglu = {1, COUNT, RP_SWIGLU, h, none, a, {NULL, false}};
  CHECK_INT(ops->activation(&swiglu), RP_OK);
  for (int i = 0; i < COUNT; i++) CHECK_NEAR((double)a[i], silus[i], 1e-13 + 4 * UNIT);
}

static void test_not_finite(const rp_ops *ops) {
  const rpi_dropout none = {.rate = 0};
  for (int kind = 0; kind < 3; kind++) {
    real h[6] = {(real)NAN, (real)INFINITY, 2, 1, 1, 1}, a[3] = {0}, dh[6] = {0};
    const real da[3] = {1, 1, (real)NAN};
    const rpi_activation_args forward = {1, 3, kind, h, none, a, {NULL, false}};
    const rpi_activation_backward_args backward = {1,  3,      kind,          h,   a, da, none,
                                                   dh, RP_F32, {NULL, false}, NULL};
    CHECK_INT(ops->activation(&forward), RP_OK);
    CHECK(isnan(a[0]) && isinf(a[1]) && isfinite(a[2]));
    CHECK_INT(ops->activation_backward(&backward), RP_OK);
    CHECK((kind == RP_RELU || isnan(dh[0])) && isnan(dh[2]));
  }
}

int main(void) {
  for (int t = 0; table_at(t) != NULL; t++) {
    const rp_ops *const ops = table_at(t);
    for (int kind = 0; kind < 3; kind++) {
      for (int i = 0; i < layer_shape_count(); i++) {
        for (int r = 0; r < LAYER_RATES; r++) {
          test_shape(ops, layer_shapes[i], kind, layer_rates[r], (i + r) % 2 == 0);
          if (is_device_run()) {
            test_rounded(ops, layer_shapes[i], kind, layer_rates[r], (i + r) % 2 == 0);
          }
        }
      }
      test_derivatives(ops, kind);
    }
    test_values(ops);
    test_not_finite(ops);
  }
  return check_report();
}
