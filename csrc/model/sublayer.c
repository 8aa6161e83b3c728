/* SPDX-License-Identifier: Apache-2.0
 *
 * sublayer.c: the linear layers of the sublayers, forward and backward, with their lines in the
 * profile.
 */
#include "model/sublayer.h"

/* Those that have a place. */
rp_status rpi_round_weights(rp_model *m) {
  const rpi_layout *const layout = &m->layout;
  for (int64_t i = 0; i < layout->count; i++) {
    const rpi_parameter *const of = &layout->parameters[i];
    if (!m->rounded[i].to) continue;
    const bool has_bias = m->config.bias && of->start == RPI_LINEAR;
    m->rounded[i].weight = m->weights + of->at;
    m->rounded[i].bias = has_bias ? m->weights + of[1].at : NULL;
  }
  RPI_TRY(m->ops->round_weights(m->rounded, layout->count));
  m->is_rounded = true;
  return RP_OK;
}

rp_status rpi_rounded_of(rp_model *m, int64_t weight, const void **rounded) {
  *rounded = NULL;
  if (rpi_rounds_operands(m) && !m->is_rounded) RPI_TRY(rpi_round_weights(m));
  if (!m->is_rounded) return RP_OK;
  int64_t first = 0, last = m->layout.count - 1; /* places rise */
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    if (m->layout.parameters[middle].at < weight) first = middle + 1;
    else last = middle;
  }
  *rounded = m->rounded[first].to;
  return RP_OK;
}

static rp_status layer_of(const rpi_run *run, const rpi_layer_linear *l, rpi_linear *to) {
  *to = (rpi_linear){.rows = l->rows,
                     .in = l->in,
                     .out = l->out,
                     .x = l->x,
                     .x_stride = l->x_stride,
                     .weight = rpi_weight_at(run->model, l->weight),
                     .bias = rpi_weight_at(run->model, l->bias),
                     .kept = l->kept,
                     .given = l->given};
  return rpi_rounded_of(run->model, l->weight, &to->rounded);
}

rp_status rpi_layer_linear_forward(const rpi_run *run, const rpi_layer_linear *l, real *y,
                                   int64_t y_stride) {
  rp_model *const m = run->model;
  const double began = rpi_profile_now(&m->profile);
  rpi_linear layer;
  RPI_TRY(layer_of(run, l, &layer));
  const rpi_gemm_args g =
      rpi_linear_forward(&layer, y, y_stride, l->y_element, m->limits.precision);
  RPI_TRY(m->ops->gemm(&g));
  rpi_note_cost(run, l->name, run->again, began, rpi_linear_operations(&layer),
                rpi_linear_numbers(&layer));
  return RP_OK;
}

rp_status rpi_layer_linear_backward(const rpi_run *run, const rpi_layer_linear *l, const real *dy,
                                    int64_t dy_stride, real *dx, bool add) {
  rp_model *const m = run->model;
  rpi_linear_backward_args args = {.dy = dy,
                                   .dy_stride = dy_stride,
                                   .dy_element = l->dy_element,
                                   .dweight = rpi_gradient_at(m, l->weight),
                                   .dbias = l->summed ? NULL : rpi_gradient_at(m, l->bias),
                                   .dx = dx,
                                   .dx_element = l->dx_element,
                                   .add = add,
                                   .precision = m->limits.precision};
  RPI_TRY(layer_of(run, l, &args.forward));
  const double began = rpi_profile_now(&m->profile);
  RPI_TRY(m->ops->linear_backward(&args));
  rpi_note_cost(run, l->name, true, began, 2 * rpi_linear_operations(&args.forward),
                2 * rpi_linear_numbers(&args.forward));
  return RP_OK;
}
