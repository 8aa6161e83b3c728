/* SPDX-License-Identifier: Apache-2.0
 *
 * test_norm.c: layer normalisation and its gradients, against sums in long double.
 *
 * Tolerances. A sum over columns runs in at least eight chains (four vectors of two), so that a
 * number goes through L = columns / 8 + 3 additions; the chains are added in double.
 */
#include "layer.h"
#include "ops/linear.h"

typedef struct layer {
  rpi_norm_args forward;
  rpi_norm_backward_args backward;
  array x, gain, shift, y, stats, dy, dstream, dx, dgain, dshift, workspace;
  bool in_place; /* dx is dy, and holds it again before every run */
} layer;

static void run(const rp_ops *ops, void *context) {
  const layer *const l = context;
  CHECK_INT(ops->norm(&l->forward), RP_OK);
  CHECK_INT(ops->norm_backward(&l->backward, NULL), RP_OK);
}

static double value(const rp_ops *ops, void *context) {
  const layer *const l = context;
  ops->norm(&l->forward);
  double sum = weighted_sum(&l->y, &l->dy);
  if (l->backward.dstream != NULL) sum += weighted_sum(&l->x, &l->dstream);
  return sum;
}

enum { WITH_SHIFT = 1, WITH_STREAM = 2, DX_IS_DY = 4, DX_IS_STREAM = 8, OPTIONS = 16 };

static void layer_create(const rp_ops *ops, layer *l, layer_shape s, int options, double centre) {
  const int64_t count = s.rows * s.columns;
  l->x = array_random("x", count, 1);
  for (int64_t i = 0; i < count; i++) l->x.data[i] += (real)centre;
  l->gain = array_random("gain", s.columns, 1);
  l->shift = array_random("shift", s.columns, 1);
  l->y = array_of("y", count, (real)NAN);
  l->stats = array_of("stats", 2 * s.rows, (real)NAN);
  l->dy = array_random("dy", count, 1);
  l->dstream = array_random("dstream", count, 1);
  l->dx = array_of("dx", count, (real)NAN);
  l->dgain = array_random("dgain", s.columns, 1);
  l->dshift = array_random("dshift", s.columns, 1);
  const bool shift = (options & WITH_SHIFT) != 0, stream = (options & WITH_STREAM) != 0;
  l->forward = (rpi_norm_args){.rows = s.rows,
                               .columns = s.columns,
                               .x = l->x.data,
                               .gain = l->gain.data,
                               .shift = shift ? l->shift.data : NULL,
                               .epsilon = 1e-3,
                               .y = l->y.data,
                               .stats = l->stats.data};
  l->backward = (rpi_norm_backward_args){.rows = s.rows,
                                         .columns = s.columns,
                                         .x = l->x.data,
                                         .gain = l->gain.data,
                                         .stats = l->stats.data,
                                         .dy = l->dy.data,
                                         .dstream = stream ? l->dstream.data : NULL,
                                         .dx = l->dx.data,
                                         .dgain = l->dgain.data,
                                         .dshift = shift ? l->dshift.data : NULL};
  if ((options & DX_IS_DY) != 0) l->backward.dx = l->dy.data;
  else if (stream && (options & DX_IS_STREAM) != 0) l->backward.dx = l->dstream.data;
  int64_t bytes = -1;
  CHECK_INT(ops->norm_backward(&l->backward, &bytes), RP_OK);
  CHECK(bytes >= 0 && bytes % (int64_t)sizeof(real) == 0);
  l->workspace = array_of("workspace", bytes / (int64_t)sizeof(real), (real)NAN);
  l->backward.workspace = l->workspace.data;
  l->backward.workspace_bytes = bytes;
}

static void layer_free(layer *l) {
  array *const all[] = {&l->x,       &l->gain, &l->shift, &l->y,      &l->stats,    &l->dy,
                        &l->dstream, &l->dx,   &l->dgain, &l->dshift, &l->workspace};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

static long double chain(const layer *l) { return (long double)l->forward.columns / 8 + 3; }

/* Of the mean: L additions of sums no larger than the mean size, and its own rounding. */
static bool is_forward_right(const rp_ops *ops, const layer *l, int64_t row) {
  const rpi_norm_args *const a = &l->forward;
  const real *const x = a->x + row * a->columns;
  const long double n = (long double)a->columns, u = 1.01L * UNIT, L = chain(l);
  long double mean = 0, size = 0, variance = 0;
  for (int64_t c = 0; c < a->columns; c++) {
    mean += x[c] / n;
    size += fabsl((long double)x[c]) / n;
  }
  for (int64_t c = 0; c < a->columns; c++) variance += (x[c] - mean) * (x[c] - mean) / n;
  const long double rstd = 1 / sqrtl(variance + (long double)a->epsilon);
  const long double mean_error = u * (L * size + fabsl(mean));
  /* Errors of single distances: the shared one adds its square alone, as they add up to 0. */
  const long double variance_error = mean_error * mean_error + u * (L + 4) * variance;
  const long double rstd_error = rstd * (variance_error * rstd * rstd / 2 + 2 * u);
  bool right = is_close(ops, "mean", row, a->stats[2 * row], mean, mean_error) &&
               is_close(ops, "rstd", row, a->stats[2 * row + 1], rstd, rstd_error);
  for (int64_t c = 0; c < a->columns; c++) {
    const long double d = x[c] - mean, gain = a->gain[c];
    const long double expected = d * rstd * gain + (a->shift != NULL ? a->shift[c] : 0);
    const long double allowed = fabsl(gain) * rstd * (mean_error + 3 * u * fabsl(d)) +
                                fabsl(gain * d) * rstd_error + u * fabsl(expected);
    right = right &&
            is_close(ops, "y", row * a->columns + c, a->y[row * a->columns + c], expected, allowed);
  }
  return right;
}

/* From forward's statistics as they are. xhat has two roundings, g one. */
static bool is_dx_right(const rp_ops *ops, const layer *l, const array *dy, const array *dstream,
                        int64_t row) {
  const rpi_norm_backward_args *const a = &l->backward;
  const int64_t start = row * a->columns;
  const long double n = (long double)a->columns, u = 1.01L * UNIT, L = chain(l);
  const long double mean = a->stats[2 * row], rstd = a->stats[2 * row + 1];
  long double mean_g = 0, size_g = 0, mean_gx = 0, size_gx = 0;
  for (int64_t c = 0; c < a->columns; c++) {
    const long double g = (long double)dy->data[start + c] * a->gain[c];
    const long double xhat = (a->x[start + c] - mean) * rstd;
    mean_g += g / n;
    size_g += fabsl(g) / n;
    mean_gx += g * xhat / n;
    size_gx += fabsl(g * xhat) / n;
  }
  bool right = true;
  for (int64_t c = 0; c < a->columns && right; c++) {
    const long double g = (long double)dy->data[start + c] * a->gain[c];
    const long double xhat = (a->x[start + c] - mean) * rstd;
    const long double stream = a->dstream != NULL ? dstream->data[start + c] : 0;
    const long double inner = g - mean_g - xhat * mean_gx;
    const long double allowed =
        rstd * u * ((L + 2) * size_g + fabsl(xhat) * (L + 8) * size_gx + 4 * fabsl(g)) +
        rstd * u * 3 * (fabsl(mean_g) + fabsl(inner)) + u * fabsl(stream + rstd * inner);
    right = is_close(ops, "dx", start + c, a->dx[start + c], stream + rstd * inner, allowed);
  }
  return right;
}

/* Sums over the rows of a block (16, or a 64th of all) in `real`, over blocks in double. */
static bool are_parameters_right(const rp_ops *ops, const layer *l, const array *dy,
                                 const array *dgain, const array *dshift) {
  const rpi_norm_backward_args *const a = &l->backward;
  const long double terms = fmaxl(16, (long double)a->rows / 64 + 1) + 6;
  bool right = true;
  for (int64_t c = 0; c < a->columns && right; c++) {
    long double sum[2] = {0}, size[2] = {0};
    for (int64_t row = 0; row < a->rows; row++) {
      const long double d = dy->data[row * a->columns + c];
      const long double xhat =
          ((long double)a->x[row * a->columns + c] - a->stats[2 * row]) * a->stats[2 * row + 1];
      sum[0] += d * xhat;
      size[0] += fabsl(d * xhat);
      sum[1] += d;
      size[1] += fabsl(d);
    }
    for (int which = 0; which < 2; which++) {
      const array *const before = which == 0 ? dgain : dshift;
      const array *const after = which == 0 ? &l->dgain : &l->dshift;
      const bool added = which == 0 || a->dshift != NULL;
      const long double start = before->data[c], expected = start + (added ? sum[which] : 0);
      const long double allowed =
          added ? 1.01L * UNIT * (terms * size[which] + 2 * fabsl(expected)) : 0;
      right = right && is_close(ops, after->name, c, after->data[c], expected, allowed);
    }
  }
  return right;
}

static void test_shape(const rp_ops *ops, layer_shape s, int options, double centre) {
  layer l;
  layer_create(ops, &l, s, options, centre);
  array dy = array_copy(&l.dy), dstream = array_copy(&l.dstream);
  array dgain = array_copy(&l.dgain), dshift = array_copy(&l.dshift);
  CHECK(has_same_bits(ops, run, &l, (array[]){l.y, l.dx, l.dy, l.dstream, l.dgain, l.dshift}, 6));
  bool right = true;
  for (int64_t row = 0; row < s.rows && s.columns > 0; row++) {
    right = right && is_forward_right(ops, &l, row) && is_dx_right(ops, &l, &dy, &dstream, row);
  }
  right = right && are_parameters_right(ops, &l, &dy, &dgain, &dshift);
  if (!CHECK(right)) printf("\n  rows %lld, options %d", (long long)s.rows, options);
  array_free(&dy);
  array_free(&dstream);
  array_free(&dgain);
  array_free(&dshift);
  layer_free(&l);
}

static void test_derivatives(const rp_ops *ops, int options) {
  layer l;
  layer_create(ops, &l, (layer_shape){5, 19}, options, 0.5);
  memset(l.dgain.data, 0, (size_t)l.dgain.count * sizeof(real));
  memset(l.dshift.data, 0, (size_t)l.dshift.count * sizeof(real));
  run(ops, &l);
  check_derivative(ops, "dx", value, &l, l.x.data, l.dx.data, l.x.count);
  check_derivative(ops, "dgain", value, &l, l.gain.data, l.dgain.data, l.gain.count);
  if (l.forward.shift != NULL) {
    check_derivative(ops, "dshift", value, &l, l.shift.data, l.dshift.data, l.shift.count);
  }
  layer_free(&l);
}

/* A row of equal numbers has no variance: its result is the shift. One that is not finite gives
 * NaN to its own row. */
static void test_values(const rp_ops *ops) {
  real x[3][4] = {{1, 2, 3, 6}, {7, 7, 7, 7}, {0, 0, (real)INFINITY, 0}}, y[3][4];
  const real gain[4] = {1, 1, 1, 2}, shift[4] = {0, 0, 0, 1};
  const rpi_norm_args a = {
      .rows = 3, .columns = 4, .x = x[0], .gain = gain, .shift = shift, .epsilon = 0.5, .y = y[0]};
  CHECK_INT(ops->norm(&a), RP_OK); /* mean 3, variance 3.5 */
  CHECK(y[0][0] == -1 && y[0][1] == (real)-0.5 && y[0][2] == 0 && y[0][3] == 4);
  CHECK(y[1][0] == 0 && y[1][1] == 0 && y[1][2] == 0 && y[1][3] == 1);
  CHECK(isnan(y[2][0]) && isnan(y[2][2]));
}

/* A device notes what is not finite: of what is read before what is given, and the highest stays.
 */
static void test_notes(const rp_ops *ops, int64_t columns) {
  array x = array_random("x", 3 * columns, 1), y = array_of("y", 3 * columns, 0);
  array gain = array_of("gain", columns, 1), shift = array_of("shift", columns, 0);
  int32_t note = 0;
  const rpi_norm_args a = {.rows = 3,
                           .columns = columns,
                           .x = x.data,
                           .gain = gain.data,
                           .shift = shift.data,
                           .epsilon = 1e-5,
                           .y = y.data,
                           .note = {&note, 9, 8}};
  CHECK_INT(ops->norm(&a), RP_OK);
  CHECK_INT(note, 0);
  shift.data[columns - 1] = (real)-INFINITY;
  CHECK_INT(ops->norm(&a), RP_OK);
  CHECK_INT(note, 8);
  x.data[2 * columns] = (real)NAN;
  CHECK_INT(ops->norm(&a), RP_OK);
  CHECK_INT(note, 9);
  note = 12;
  CHECK_INT(ops->norm(&a), RP_OK);
  CHECK_INT(note, 12);
  array *const all[] = {&x, &y, &gain, &shift};
  for (int i = 0; i < 4; i++) array_free(all[i]);
}

/* On a device: what a product is to read, with ones behind each row where a bias goes. */
static void test_rounded(const rp_ops *ops, layer_shape s, bool bias) {
  array x = array_random("x", s.rows * s.columns, 1), y = array_of("y", s.rows * s.columns, 0);
  array gain = array_random("gain", s.columns, 1);
  array kept = array_of("kept", rpi_linear_kept(s.rows, s.columns) / (int64_t)sizeof(real), 0);
  const rpi_norm_args a = {.rows = s.rows,
                           .columns = s.columns,
                           .x = x.data,
                           .gain = gain.data,
                           .epsilon = 1e-5,
                           .y = y.data,
                           .rounded = {kept.data, bias}};
  CHECK_INT(ops->norm(&a), RP_OK);
  const int64_t stride = rpi_operand_stride(s.columns, bias);
  bool right = true;
  for (int64_t i = 0; i < s.rows * stride; i++) {
    const int64_t row = i / stride, c = i % stride;
    const real behind = bias && c < s.columns + RPI_BIAS_PARTS ? 1 : 0;
    right =
        right && has_rounded(kept.data, i, c < s.columns ? y.data[row * s.columns + c] : behind);
  }
  if (!CHECK(right)) printf("\n  rounded, %lld columns", (long long)s.columns);
  array *const all[] = {&x, &y, &gain, &kept};
  for (int i = 0; i < 4; i++) array_free(all[i]);
}

/* A workspace planned for the most rows serves fewer, which may make more blocks. */
static void test_planned_workspace(const rp_ops *ops) {
  const int64_t most = 2054, rows = 2047;
  int64_t planned = 0, before = 0;
  rpi_norm_backward_args a = {.columns = 1};
  for (a.rows = 1; a.rows <= most; a.rows++) {
    CHECK_INT(ops->norm_backward(&a, &planned), RP_OK);
    CHECK(planned >= before);
    before = planned;
  }
  array x = array_of("x", rows, 1), stats = array_of("stats", 2 * rows, 1);
  array dx = array_of("dx", rows, 0), dgain = array_of("dgain", 1, 0),
        gain = array_of("gain", 1, 1);
  array workspace = array_of("workspace", planned / (int64_t)sizeof(real), (real)NAN);
  a.rows = rows;
  a.x = a.dy = x.data;
  a.gain = gain.data;
  a.stats = stats.data;
  a.dx = dx.data;
  a.dgain = dgain.data;
  a.workspace = workspace.data;
  a.workspace_bytes = planned;
  CHECK_INT(ops->norm_backward(&a, NULL), RP_OK);
  array *const all[] = {&x, &stats, &dx, &dgain, &gain, &workspace};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) array_free(all[i]);
}

int main(void) {
  for (int t = 0; table_at(t) != NULL; t++) {
    const rp_ops *const ops = table_at(t);
    for (int i = 0; i < layer_shape_count(); i++) {
      for (int options = i % 3; options < OPTIONS; options += 3) {
        test_shape(ops, layer_shapes[i], options, i % 4 == 0 ? 100 : 0);
      }
    }
    test_shape(ops, (layer_shape){is_small_run() ? 70 : 1500, 35}, WITH_SHIFT, 0);
    /* The widths of models, which a device may take in ways of their own, and wider. */
    test_shape(ops, (layer_shape){20, 512}, WITH_SHIFT | WITH_STREAM | DX_IS_STREAM, 0);
    test_shape(ops, (layer_shape){18, 1024}, WITH_STREAM | DX_IS_DY, 0);
    test_shape(ops, (layer_shape){37, 1100}, WITH_SHIFT | WITH_STREAM | DX_IS_DY, 0);
    test_derivatives(ops, 0);
    test_derivatives(ops, WITH_SHIFT | WITH_STREAM);
    if (is_device_run()) {
      test_notes(ops, 8);
      test_notes(ops, 1024);
      test_notes(ops, 1031);
      test_rounded(ops, (layer_shape){20, 512}, true);
      test_rounded(ops, (layer_shape){18, 1024}, false);
      for (int i = 0; i < layer_shape_count(); i++) test_rounded(ops, layer_shapes[i], i % 2 == 0);
    }
    test_values(ops);
    test_planned_workspace(ops);
  }
  return check_report();
}
