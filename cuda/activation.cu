/* SPDX-License-Identifier: Apache-2.0
 *
 * activation.cu: a = keep(f(h)), between the two products of the feed-forward layer.
 *
 *   ReLU     f(x) = max(x, 0)            f'(x) = 1 where x > 0
 *   GELU     f(x) = x P(x)               f'(x) = P(x) + x p(x), the standard normal's P and p
 *   SwiGLU   f(x, y) = x s(x) y          df/dx = s(x) (1 + x (1 - s(x))) y,   df/dy = x s(x)
 *
 * with the logistic function s. ReLU's backward needs no mask: forward's result is positive just
 * where the number was kept and counts; sums.cu does it on the way to the sums.
 */
#include <math.h>

#include "packing.h"
#include "rounded.h"

namespace rpc {
namespace {

/* The share of the standard normal distribution below x, P(x), and e^(-x^2 / 2). */
struct NormalShare {
  float below, bell;
};

/* The polynomial of ops/activation.c, where it is derived. */
__device__ inline NormalShare normal_below(float x) {
  const float size = fabsf(x);
  const float bell = exp2f(-0.72134752044448170368f * size * size);
  const float t = 1.0f / (1.0f + 0.26f * size);
  float r = 0.03276637685982288f;
  r = r * t - 0.1639342634262619f;
  r = r * t + 0.27472375175365843f;
  r = r * t - 0.1779323838319997f;
  r = r * t + 0.17993390246670546f;
  r = r * t + 0.04276115847977268f;
  r = r * t + 0.10519954012226267f;
  r = r * t + 0.10270393936820006f;
  r = r * t + 0.10377797941374278f;
  const float beyond = r * t * bell;
  return {x < 0 ? beyond : 1.0f - beyond, bell};
}

/* By the exponential of something negative: nothing overflows. */
__device__ inline float logistic(float x) {
  const float e = exp2f(-kLog2E * fabsf(x));
  return (x < 0 ? e : 1.0f) / (1.0f + e);
}

/* f(h), or f(x, y) of SwiGLU. Written so that a NaN stays: comparisons are false for it. */
template <int kind>
__device__ inline float activated(float x, float y) {
  if (kind == RP_RELU) return x < 0 ? 0.0f : x;
  if (kind == RP_GELU) return x * normal_below(x).below;
  return x * logistic(x) * y;
}

/* a may be h for ReLU: every number is read before its place is written, and so is what lies where
 * rounded is to be, where h is NULL. a is NULL where all that is wanted is rounded. */
template <int kind, bool wide>
__global__ void activation_rows(const float *h, float *a, int64_t rows, int64_t columns,
                                Packing packing, RoundedRows rounded) {
  const int64_t row = row_from_end(rows);
  if (row < 0) return; /* a whole warp */
  const Place place = place_of(packing, row);
  const float *const from = h + row * columns * (kind == RP_SWIGLU ? 2 : 1);
  for (int64_t c = 0; c < columns; c += strip_columns) {
    const int64_t count = columns - c;
    const bool there = kind == RP_RELU && h == nullptr;
    Strip<strip_quads> x = there ? load_rounded_strip(rounded, row, c)
                                 : load_strip<strip_quads, wide>(from + c, count);
    Strip<strip_quads> y = x;
    if (kind == RP_SWIGLU) y = load_strip<strip_quads, wide>(from + columns + c, count);
#pragma unroll
    for (int q = 0; q < strip_quads; q++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        x.quad[q].x[i] = activated<kind>(x.quad[q].x[i], y.quad[q].x[i]);
      }
    }
    keep_strip(packing, place, c, x);
    if (a != nullptr) store_strip<strip_quads, wide>(a + row * columns + c, count, x);
    if (rounded.to == nullptr) continue;
#pragma unroll
    for (int q = 0; q < strip_quads; q++) {
      put_rounded(rounded, row, c + strip_column(q), x.quad[q]);
    }
  }
}

template <class E, bool wide>
__global__ void gelu_backward_rows(const float *h, const E *da, E *dh, int64_t rows,
                                   int64_t columns, Packing packing) {
  const int64_t row = row_from_end(rows);
  if (row < 0) return;
  const Place place = place_of(packing, row);
  for (int64_t c = 0; c < columns; c += strip_columns) {
    const int64_t start = row * columns + c, count = columns - c;
    const Strip<strip_quads> x = load_strip<strip_quads, wide>(h + start, count);
    Strip<strip_quads> d = load_strip<strip_quads, wide>(da + start, count);
    keep_strip(packing, place, c, d);
#pragma unroll
    for (int q = 0; q < strip_quads; q++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float one = x.quad[q].x[i];
        const NormalShare n = normal_below(one);
        d.quad[q].x[i] *= n.below + one * (0.39894228040143267794f * n.bell);
      }
    }
    store_strip<strip_quads, wide>(dh + start, count, d);
  }
}

template <class E, bool wide>
__global__ void swiglu_backward_rows(const float *h, const E *da, E *dh, int64_t rows,
                                     int64_t columns, Packing packing) {
  const int64_t row = row_from_end(rows);
  if (row < 0) return;
  const Place place = place_of(packing, row);
  for (int64_t c = 0; c < columns; c += strip_columns) {
    const int64_t start = 2 * row * columns + c, count = columns - c;
    Strip<strip_quads> x = load_strip<strip_quads, wide>(h + start, count);
    const Strip<strip_quads> y = load_strip<strip_quads, wide>(h + start + columns, count);
    Strip<strip_quads> d = load_strip<strip_quads, wide>(da + row * columns + c, count);
    keep_strip(packing, place, c, d);
#pragma unroll
    for (int q = 0; q < strip_quads; q++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float one = x.quad[q].x[i], s = logistic(one), dy = d.quad[q].x[i];
        x.quad[q].x[i] = s * (1.0f + one * (1.0f - s)) * y.quad[q].x[i] * dy;
        d.quad[q].x[i] = dy * (one * s);
      }
    }
    store_strip<strip_quads, wide>(dh + start, count, x);
    store_strip<strip_quads, wide>(dh + start + columns, count, d);
  }
}

template <bool wide>
rp_status forward_of(const rpi_activation_args *a, const RowGrid &g, const Packing &packing) {
  auto kernel = activation_rows<RP_SWIGLU, wide>;
  if (a->kind == RP_RELU) kernel = activation_rows<RP_RELU, wide>;
  if (a->kind == RP_GELU) kernel = activation_rows<RP_GELU, wide>;
  CUDA_TRY(launch(kernel, {g.grid, g.block, 0, context().stream}, a->h, a->a, a->rows, a->columns,
                  packing, rounded_rows(a->rounded, a->columns)));
  return RP_OK;
}

template <class E, bool wide>
rp_status backward_as(const rpi_activation_backward_args *a, const Packing &packing) {
  const RowGrid g = strip_grid(a->rows);
  const Launch over = {g.grid, g.block, 0, context().stream};
  const E *const da = reinterpret_cast<const E *>(a->da);
  E *const dh = reinterpret_cast<E *>(a->dh);
  CUDA_TRY(launch(a->kind == RP_GELU ? gelu_backward_rows<E, wide> : swiglu_backward_rows<E, wide>,
                  over, a->h, da, dh, a->rows, a->columns, packing));
  return RP_OK;
}

template <class E>
rp_status backward_of(const rpi_activation_backward_args *a, const Packing &packing) {
  const int64_t columns = a->columns;
  const bool wide = is_wide(a->h, columns) &&
                    is_wide(reinterpret_cast<const E *>(a->da), columns) &&
                    is_wide(reinterpret_cast<const E *>(a->dh), columns);
  return wide ? backward_as<E, true>(a, packing) : backward_as<E, false>(a, packing);
}

}  // namespace

rp_status activation(const rpi_activation_args *args) {
  const int64_t rows = args->rows, columns = args->columns;
  if (rows == 0 || columns == 0) return RP_OK;
  Packing packing;
  RPI_TRY(packing_of(&args->dropout, false, &packing));
  const bool wide = is_wide(args->h, columns) && is_wide(args->a, columns);
  const RowGrid g = strip_grid(rows);
  return wide ? forward_of<true>(args, g, packing) : forward_of<false>(args, g, packing);
}

rp_status activation_backward(const rpi_activation_backward_args *args) {
  if (args->rows == 0 || args->columns == 0) return RP_OK;
  Packing packing;
  RPI_TRY(packing_of(&args->dropout, false, &packing));
  scratch_begin();
  if (args->kind == RP_RELU) return sum_behind_relu(args, packing.dropout.scale);
  RPI_TRY(args->element == RP_BF16 ? backward_of<bf16>(args, packing)
                                   : backward_of<float>(args, packing));
  if (args->dbias == nullptr) return RP_OK;
  const int64_t columns = args->kind == RP_SWIGLU ? 2 * args->columns : args->columns;
  const rpi_column_sums_args sums = {args->rows, columns, args->dh, columns, args->dbias};
  return sum_elements(&sums, args->element);
}

}  // namespace rpc
