/* SPDX-License-Identifier: Apache-2.0
 *
 * sublayer.c: the linear layers of the sublayers, forward and backward, with their lines in the
 * profile.
 */
#include "model/sublayer.h"

/* One product, and its line in the profile. */
static rp_status gemm(const rpi_run *run, const char *name, bool backward, rpi_gemm_args g) {
  rp_model *const m = run->model;
  g.precision = m->placement.precision;
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->gemm(&g));
  const double operations = 2 * (double)g.rows * (double)g.columns * (double)g.inner;
  const int64_t c = g.rows * g.columns * (g.accumulate ? 2 : 1);
  rpi_note_cost(run, name, backward, began, operations, g.rows * g.inner + g.inner * g.columns + c);
  return RP_OK;
}

static rpi_linear products_of(const rpi_run *run, const rpi_layer_linear *l) {
  return (rpi_linear){.rows = l->rows,
                      .in = l->in,
                      .out = l->out,
                      .x = l->x,
                      .x_stride = l->x_stride,
                      .weight = rpi_weight_at(run->model, l->weight),
                      .bias = rpi_weight_at(run->model, l->bias)};
}

rp_status rpi_layer_linear_forward(const rpi_run *run, const rpi_layer_linear *l, real *y,
                                   int64_t y_stride) {
  const rpi_linear products = products_of(run, l);
  const rpi_gemm_args g = rpi_linear_forward(&products, y, y_stride);
  return gemm(run, l->name, run->again, g);
}

rp_status rpi_layer_linear_backward(const rpi_run *run, const rpi_layer_linear *l, const real *dy,
                                    int64_t dy_stride, real *dx, bool add) {
  rp_model *const m = run->model;
  const rpi_linear products = products_of(run, l);
  const rpi_gemm_args to_weight =
      rpi_linear_to_weight(&products, dy, dy_stride, rpi_gradient_at(m, l->weight));
  RPI_TRY(gemm(run, l->name, true, to_weight));
  if (l->bias != RPI_ABSENT) {
    const rpi_column_sums_args sums = {.rows = l->rows,
                                       .columns = l->out,
                                       .x = dy,
                                       .x_stride = dy_stride,
                                       .sum = rpi_gradient_at(m, l->bias)};
    const double began = rpi_profile_now(&m->profile);
    RPI_TRY(m->ops->column_sums(&sums));
    rpi_note_cost(run, "biases", true, began, (double)(l->rows * l->out), l->rows * l->out);
  }
  const rpi_gemm_args to_x = rpi_linear_to_input(&products, dy, dy_stride, dx, add);
  return gemm(run, l->name, true, to_x);
}
