/* SPDX-License-Identifier: Apache-2.0
 *
 * test_linear.c: the way back of a linear layer has the bits of the two products and the sums that
 * it stands for (test_gemm.c, test_sums.c), in f32 and rounded to bf16.
 */
#include "layer.h"
#include "ops/linear.h"

typedef struct layer {
  array x, weight, dy, dweight, dbias, dx;
} layer;

static layer layer_create(int64_t rows, int64_t in, int64_t out, int64_t gap) {
  return (layer){.x = array_random("x", rows * (in + gap), 1),
                 .weight = array_random("weight", in * out, 1),
                 .dy = array_random("dy", rows * (out + gap), 1),
                 .dweight = array_random("dweight", in * out, 1),
                 .dbias = array_random("dbias", out, 1),
                 .dx = array_random("dx", rows * in, 1)};
}

static bool same(const rp_ops *ops, const array *got, const array *expected) {
  if (memcmp(got->data, expected->data, (size_t)got->count * sizeof(real)) == 0) return true;
  printf("\n  %s: %s is another", ops->name, got->name);
  return false;
}

/* flags: 1 a bias, 2 dx is wanted, 4 it is added to, 8 bf16. */
static void test_backward(const rp_ops *ops, int64_t rows, int64_t in, int64_t out, int64_t gap,
                          int flags) {
  layer l = layer_create(rows, in, out, gap);
  array dweight = array_copy(&l.dweight), dbias = array_copy(&l.dbias), dx = array_copy(&l.dx);
  const rpi_linear_backward_args a = {
      .forward = {rows, in, out, l.x.data, in + gap, l.weight.data, NULL, NULL, false, NULL},
      .dy = l.dy.data,
      .dy_stride = out + gap,
      .dweight = l.dweight.data,
      .dbias = (flags & 1) != 0 ? l.dbias.data : NULL,
      .dx = (flags & 2) != 0 ? l.dx.data : NULL,
      .add = (flags & 4) != 0,
      .precision = (flags & 8) != 0 ? RP_BF16 : RP_F32};
  CHECK_INT(ops->linear_backward(&a), RP_OK);
  const rpi_gemm_args to_weight =
      rpi_linear_to_weight(&a.forward, a.dy, a.dy_stride, dweight.data, a.precision);
  const rpi_gemm_args to_input =
      rpi_linear_to_input(&a.forward, a.dy, a.dy_stride, dx.data, RP_F32, a.add, a.precision);
  const rpi_column_sums_args sums = {rows, out, a.dy, a.dy_stride, dbias.data};
  CHECK_INT(ops->gemm(&to_weight), RP_OK);
  if (a.dbias) CHECK_INT(ops->column_sums(&sums), RP_OK);
  if (a.dx) CHECK_INT(ops->gemm(&to_input), RP_OK);
  CHECK(same(ops, &l.dweight, &dweight));
  CHECK(same(ops, &l.dbias, &dbias));
  CHECK(same(ops, &l.dx, &dx));
  array *const all[] = {&l.x, &l.weight, &l.dy, &l.dweight, &l.dbias, &l.dx, &dweight, &dbias, &dx};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

/* The same products of `terms` numbers of at most 1, which cuBLAS may add up in another order where
 * rows lie further apart. */
static bool near(const rp_ops *ops, const array *got, const array *expected, int64_t terms) {
  const long double allowed = 2 * UNIT * (long double)((terms + 1) * (terms + 1));
  bool right = true;
  for (int64_t i = 0; i < got->count; i++) {
    right = right && is_close(ops, got->name, i, got->data[i], expected->data[i], allowed);
  }
  return right;
}

/* dy that is in bf16 already, rows where wider ones would start, is as good as dy that is not. */
static void test_rounded(const rp_ops *ops, int64_t rows, int64_t in, int64_t out) {
  layer l = layer_create(rows, in, out, 4);
  array dweight = array_copy(&l.dweight), dx = array_copy(&l.dx);
  rpi_linear_backward_args a = {
      .forward = {rows, in, out, l.x.data, in + 4, l.weight.data, NULL, NULL, false, NULL},
      .dy = l.dy.data,
      .dy_stride = out + 4,
      .dweight = l.dweight.data,
      .dx = l.dx.data,
      .precision = RP_BF16};
  CHECK_INT(ops->linear_backward(&a), RP_OK);
  for (int64_t row = 0; row < rows; row++) {
    real *const dy = l.dy.data + row * a.dy_stride;
    for (int64_t c = 0; c < out; c++) put_rounded(dy, c, dy[c]);
  }
  a.dy_element = RP_BF16;
  a.dy_stride *= 2;
  a.dweight = dweight.data;
  a.dx = dx.data;
  CHECK_INT(ops->linear_backward(&a), RP_OK);
  CHECK(near(ops, &l.dweight, &dweight, rows));
  CHECK(near(ops, &l.dx, &dx, out));
  array *const all[] = {&l.x, &l.weight, &l.dy, &l.dweight, &l.dbias, &l.dx, &dweight, &dx};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

/* As near in bf16. */
static bool near_rounded(const rp_ops *ops, const array *got, const array *expected,
                         int64_t terms) {
  const long double allowed = 2 * UNIT * (long double)((terms + 1) * (terms + 1));
  bool right = true;
  for (int64_t i = 0; i < expected->count; i++) {
    const long double x = expected->data[i], rounding = ldexpl(fabsl(x) + allowed, -8);
    right = right && is_close(ops, got->name, i, rounded_at(got->data, i), x, allowed + rounding);
  }
  return right;
}

/* y, dy and dx in bf16: the same products of the same numbers, and their sums to the bit. */
static void test_in_bf16(const rp_ops *ops, int64_t rows, int64_t in, int64_t out) {
  layer l = layer_create(rows, in, out, 0);
  array_round(&l.dy);
  array bias = array_random("bias", out, 1), y = array_of("y", rows * out, 0);
  array dweight = array_copy(&l.dweight), dbias = array_copy(&l.dbias);
  array dy = array_rounded(&l.dy), dx = array_rounded(&l.dx), rounded_y = array_rounded(&y);
  rpi_linear_backward_args a = {
      .forward = {rows, in, out, l.x.data, in, l.weight.data, bias.data, NULL, false, NULL},
      .dy = l.dy.data,
      .dy_stride = out,
      .dweight = l.dweight.data,
      .dbias = l.dbias.data,
      .dx = l.dx.data,
      .precision = RP_BF16};
  rpi_gemm_args g = rpi_linear_forward(&a.forward, y.data, out, RP_F32, RP_BF16);
  CHECK_INT(ops->gemm(&g), RP_OK);
  CHECK_INT(ops->linear_backward(&a), RP_OK);
  g = rpi_linear_forward(&a.forward, rounded_y.data, out, RP_BF16, RP_BF16);
  a.dy = dy.data;
  a.dx = dx.data;
  a.dy_element = a.dx_element = RP_BF16;
  a.dweight = dweight.data;
  a.dbias = dbias.data;
  CHECK_INT(ops->gemm(&g), RP_OK);
  CHECK_INT(ops->linear_backward(&a), RP_OK);
  CHECK(near_rounded(ops, &rounded_y, &y, in));
  CHECK(near(ops, &dweight, &l.dweight, rows));
  CHECK(near_rounded(ops, &dx, &l.dx, out));
  CHECK(same(ops, &dbias, &l.dbias));
  array *const all[] = {&l.x, &l.weight, &l.dy,  &l.dweight, &l.dbias, &l.dx,     &bias,
                        &y,   &dweight,  &dbias, &dy,        &dx,      &rounded_y};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

/* What the way there kept of x is x to the way back, with a bias and without. */
static void test_kept(const rp_ops *ops, int64_t rows, int64_t in, int64_t out, bool bias) {
  layer l = layer_create(rows, in, out, 0);
  array dweight = array_copy(&l.dweight), y = array_of("y", rows * out, 0);
  rpi_linear_backward_args a = {.forward = {rows, in, out, l.x.data, in, l.weight.data,
                                            bias ? l.dbias.data : NULL, NULL, false, NULL},
                                .dy = l.dy.data,
                                .dy_stride = out,
                                .dweight = dweight.data,
                                .precision = RP_BF16};
  CHECK_INT(ops->linear_backward(&a), RP_OK);
  a.forward.kept = calloc((size_t)rpi_linear_kept(rows, in), 1);
  if (a.forward.kept == NULL) abort();
  const rpi_gemm_args g = rpi_linear_forward(&a.forward, y.data, out, RP_F32, RP_BF16);
  CHECK_INT(ops->gemm(&g), RP_OK);
  a.forward.x = NULL;
  a.dweight = l.dweight.data;
  CHECK_INT(ops->linear_backward(&a), RP_OK);
  CHECK(near(ops, &l.dweight, &dweight, rows));
  free(a.forward.kept);
  array *const all[] = {&l.x, &l.weight, &l.dy, &l.dweight, &l.dbias, &l.dx, &dweight, &y};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

/* Weights of all shapes, more than one launch takes. */
enum { WEIGHTS = 60 };

static array array_kept(int64_t rows, int64_t in) {
  return array_of("rounded", (rpi_linear_kept(rows, in) + 3) / 4, 0);
}

/* A product finds what it would have rounded itself: the same bits, but where rows lie further
 * apart, on the way back of a layer with a bias. */
static void test_rounded_weight(const rp_ops *ops, const rpi_rounding *weight) {
  enum { ROWS = 3 };
  const int64_t in = weight->in, out = weight->out;
  array x = array_random("x", ROWS * in, 1), dy = array_random("dy", ROWS * out, 1);
  array dweight = array_of("dweight", in * out, 0);
  array y[2], dx[2];
  for (int i = 0; i < 2; i++) {
    y[i] = array_of("y", ROWS * out, 0);
    dx[i] = array_of("dx", ROWS * in, 0);
    const rpi_linear_backward_args a = {
        .forward = {ROWS, in, out, x.data, in, i == 0 ? weight->weight : NULL, weight->bias, NULL,
                    false, i == 0 ? NULL : weight->to},
        .dy = dy.data,
        .dy_stride = out,
        .dweight = dweight.data,
        .dx = dx[i].data,
        .precision = RP_BF16};
    const rpi_gemm_args g = rpi_linear_forward(&a.forward, y[i].data, out, RP_F32, RP_BF16);
    CHECK_INT(ops->gemm(&g), RP_OK);
    CHECK_INT(ops->linear_backward(&a), RP_OK);
  }
  CHECK(same(ops, &y[1], &y[0]));
  CHECK(near(ops, &dx[1], &dx[0], out));
  array *const all[] = {&x, &dy, &dweight, &y[0], &y[1], &dx[0], &dx[1]};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

static void test_rounded_weights(const rp_ops *ops) {
  static const int64_t shapes[][2] = {{1, 1},  {96, 32},  {13, 7}, {130, 64},
                                      {70, 9}, {5, 1040}, {33, 20}};
  const int count = (int)(sizeof shapes / sizeof shapes[0]);
  rpi_rounding list[WEIGHTS] = {{0}};
  array weight[WEIGHTS], bias[WEIGHTS], to[WEIGHTS];
  for (int i = 0; i < WEIGHTS; i++) {
    const int64_t out = shapes[i % count][0], in = shapes[i % count][1];
    weight[i] = array_random("weight", out * in, 1);
    bias[i] = array_random("bias", out, 1);
    to[i] = array_kept(out, in);
    list[i] = (rpi_rounding){out, in, weight[i].data, i % 2 == 0 ? bias[i].data : NULL,
                             i % 5 != 4 ? to[i].data : NULL};
  }
  CHECK_INT(ops->round_weights(list, WEIGHTS), RP_OK);
  for (int i = 0; i < WEIGHTS; i++) {
    const bool first = i < 2 * count; /* all shapes, with a bias and without */
    if (list[i].to != NULL && (first || i >= WEIGHTS - count)) test_rounded_weight(ops, &list[i]);
  }
  for (int i = 0; i < WEIGHTS; i++) {
    array_free(&weight[i]);
    array_free(&bias[i]);
    array_free(&to[i]);
  }
}

int main(void) {
  static const int64_t shapes[][4] = {{0, 3, 5, 0},    {1, 1, 1, 0},     {7, 8, 12, 0},
                                      {70, 20, 9, 4},  {33, 17, 130, 3}, {600, 5, 40, 0},
                                      {90, 64, 256, 8}};
  const int count = (int)(sizeof shapes / sizeof shapes[0]);
  for (int t = 0; table_at(t) != NULL; t++) {
    if (is_device_run()) {
      test_rounded(table_at(t), 37, 24, 60);
      test_rounded(table_at(t), 9, 7, 128);
      test_in_bf16(table_at(t), 37, 24, 64);
      test_in_bf16(table_at(t), 300, 7, 13);
      test_kept(table_at(t), 37, 24, 10, true);
      test_kept(table_at(t), 9, 6, 10, false);
      test_rounded_weights(table_at(t));
    }
    for (int i = 0; i < count; i++) {
      const int64_t *const s = shapes[i];
      for (int flags = 0; flags < (RPI_REAL_BYTES == 4 ? 16 : 8); flags++) {
        test_backward(table_at(t), s[0], s[1], s[2], s[3], flags);
      }
    }
  }
  return check_report();
}
