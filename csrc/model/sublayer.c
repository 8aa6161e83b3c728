/* SPDX-License-Identifier: Apache-2.0
 *
 * sublayer.c: the linear layers of the sublayers, forward and backward, with their lines in the
 * profile.
 */
#include "model/sublayer.h"

rpi_rounded *rpi_rounded_of(const rp_model *m, int64_t weight) {
  int64_t first = 0, last = m->layout.count - 1; /* places rise */
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    if (m->layout.parameters[middle].at < weight) first = middle + 1;
    else last = middle;
  }
  return m->rounded[first].memory ? &m->rounded[first] : NULL;
}

static rpi_linear layer_of(const rpi_run *run, const rpi_layer_linear *l) {
  return (rpi_linear){.rows = l->rows,
                      .in = l->in,
                      .out = l->out,
                      .x = l->x,
                      .x_stride = l->x_stride,
                      .weight = rpi_weight_at(run->model, l->weight),
                      .bias = rpi_weight_at(run->model, l->bias),
                      .kept = l->kept,
                      .given = l->given,
                      .rounded = rpi_rounded_of(run->model, l->weight)};
}

rp_status rpi_layer_linear_forward(const rpi_run *run, const rpi_layer_linear *l, real *y,
                                   int64_t y_stride) {
  rp_model *const m = run->model;
  const rpi_linear layer = layer_of(run, l);
  const rpi_gemm_args g =
      rpi_linear_forward(&layer, y, y_stride, l->y_element, m->limits.precision);
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->gemm(&g));
  rpi_note_cost(run, l->name, run->again, began, rpi_linear_operations(&layer),
                rpi_linear_numbers(&layer));
  return RP_OK;
}

rp_status rpi_layer_linear_backward(const rpi_run *run, const rpi_layer_linear *l, const real *dy,
                                    int64_t dy_stride, real *dx, bool add) {
  rp_model *const m = run->model;
  const rpi_linear_backward_args args = {.forward = layer_of(run, l),
                                         .dy = dy,
                                         .dy_stride = dy_stride,
                                         .dy_element = l->dy_element,
                                         .dweight = rpi_gradient_at(m, l->weight),
                                         .dbias = l->summed ? NULL : rpi_gradient_at(m, l->bias),
                                         .dx = dx,
                                         .dx_element = l->dx_element,
                                         .add = add,
                                         .precision = m->limits.precision};
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->linear_backward(&args));
  rpi_note_cost(run, l->name, true, began, 2 * rpi_linear_operations(&args.forward),
                2 * rpi_linear_numbers(&args.forward));
  return RP_OK;
}
