/* SPDX-License-Identifier: Apache-2.0
 *
 * sublayer.h: what layers.c, attention.c and transformer.c share: where the parameters of a layer
 * lie, linear layers by these places, dropout's masks, and the lines of the profile.
 */
#ifndef RPI_SUBLAYER_H
#define RPI_SUBLAYER_H

#include "ops/linear.h"
#include "model/model.h"

/* ---- the profile ----------------------------------------------------------- */

/* Bytes of so many numbers. */
static inline double rpi_bytes_of(int64_t numbers) {
  return (double)numbers * (double)sizeof(real);
}

/* The line of an operation that began at `began`, where the run is, and the numbers it moved. */
static inline void rpi_note_cost(const rpi_run *run, const char *operation, bool backward,
                                 double began, double operations, int64_t numbers) {
  rpi_profile_add(&run->model->profile, run->stack, run->layer, operation, backward, began,
                  operations, rpi_bytes_of(numbers));
}

/* ---- parameters ------------------------------------------------------------ */

static inline const real *rpi_weight_at(const rp_model *m, int64_t at) {
  return at == RPI_ABSENT ? NULL : m->weights + at;
}
static inline real *rpi_gradient_at(const rp_model *m, int64_t at) {
  return at == RPI_ABSENT ? NULL : m->gradients + at;
}

static inline const rpi_layer_params *rpi_layer_params_of(const rpi_run *run, int64_t layer) {
  return &run->model->layout.stack[run->stack].layers[layer];
}

static inline rpi_dropout rpi_dropout_at(const rpi_run *run, int64_t layer, double rate,
                                         enum rpi_site kind) {
  return (rpi_dropout){.rate = run->dropout ? rate : 0,
                       .key = {run->key[0], run->key[1]},
                       .site = rpi_site_of(run->stack, layer, kind),
                       .sentences = run->sentences,
                       .offsets = run->side[run->stack].offsets,
                       .ordinals = run->ordinals};
}

/* ---- linear layers: sublayer.c --------------------------------------------- */

/* All weights that are kept rounded. A host, whose products round what they are given as they read
 * it, has them from here until the call ends: for a search, which reads them many times. */
rp_status rpi_round_weights(rp_model *m);

/* *rounded = the weight that lies there as products have it, or NULL. On a device all are rounded
 * at once where they may have changed. */
rp_status rpi_rounded_of(rp_model *m, int64_t weight, const void **rounded);

/* One of a layer, y = x . Wᵀ + b, by where its parameters lie. */
typedef struct rpi_layer_linear {
  const char *name;
  int64_t rows, in, out;
  int64_t weight, bias;
  const real *x;
  int64_t x_stride;
  void *kept;
  bool given;
  bool summed; /* who made dy has added its columns to the bias's gradient */
  int y_element, dy_element, dx_element; /* RP_F32, unless said */
} rpi_layer_linear;

/* Where a device leaves what a layer is given, rounded, or nowhere. */
static inline rpi_operand rpi_operand_at(const rp_model *m, void *kept) {
  return (rpi_operand){.memory = kept, .bias = m->config.bias != 0};
}

/* Has the norm left n rounded? */
static inline bool rpi_is_given(const rpi_stored *stored, const real *n) {
  return stored->kept_n && n != stored->stream;
}

rp_status rpi_layer_linear_forward(const rpi_run *run, const rpi_layer_linear *l, real *y,
                                   int64_t y_stride);

/* dW += dyᵀ . x, db += sums of dy unless they are there (summed), and dx = dy . W (added to what is
 * there where `add`). */
rp_status rpi_layer_linear_backward(const rpi_run *run, const rpi_layer_linear *l, const real *dy,
                                    int64_t dy_stride, real *dx, bool add);

/* ---- attention.c ----------------------------------------------------------- */

/* What makes f of z, attention's result. */
rpi_layer_linear rpi_attention_out_of(const rpi_run *run, const rpi_stored *stored, int part);

/* The queries, keys and values of n, and what attention makes of them, up to z. */
rp_status rpi_sublayer_attend(rpi_run *run, const rpi_stored *stored, int part, const real *n);

/* From df to the gradient of n, in `dn` (added to what is there where `add`). */
rp_status rpi_sublayer_attend_backward(rpi_run *run, const rpi_stored *stored, int part,
                                       const real *n, const real *df, real *dn, bool add);

#endif
