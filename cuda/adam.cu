/* SPDX-License-Identifier: Apache-2.0
 *
 * adam.cu: one step of Adam, in one pass over weights, gradient, both moments and the average. It
 * waits for memory: 32 bytes a number are read and written, 40 with the average.
 */
#include "four.h"

namespace rpc {
namespace {

constexpr int adam_threads = 256;

/* The constants, each of them rounded once; those that the verdict on this step decides are read
 * from the outcome. */
struct AdamStep {
  float beta1, rest1, beta2, rest2, epsilon, decay, rest;
};

struct AdamArrays {
  float *weights, *gradient, *moment1, *moment2, *average; /* average: or NULL */
};

template <bool wide>
__global__ void adam_numbers(AdamArrays arrays, int64_t count, AdamStep step,
                             const rpi_outcome *outcome) {
  const int64_t start = 4 * (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (start >= count) return;
  const int64_t left = count - start;
  float *const w_at = arrays.weights + start, *const g_at = arrays.gradient + start;
  if (outcome->moves == 0) { /* nothing else is touched */
    const Four none = {{0, 0, 0, 0}};
    store_four<wide>(g_at, left, none);
    return;
  }
  const float scale = static_cast<float>(outcome->scale), rate = static_cast<float>(outcome->rate);
  const float correction1 = static_cast<float>(outcome->correction1);
  const float correction2 = static_cast<float>(outcome->correction2);
  float *const m_at = arrays.moment1 + start, *const v_at = arrays.moment2 + start;
  Four w = load_four<wide>(w_at, left), g = load_four<wide>(g_at, left);
  Four m = load_four<wide>(m_at, left), v = load_four<wide>(v_at, left);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float gradient = scale * g.x[i];
    m.x[i] = step.beta1 * m.x[i] + step.rest1 * gradient;
    v.x[i] = step.beta2 * v.x[i] + step.rest2 * (gradient * gradient);
    const float move = m.x[i] * correction1 / (sqrtf(v.x[i] * correction2) + step.epsilon);
    w.x[i] = w.x[i] - rate * (move + step.decay * w.x[i]);
    g.x[i] = 0;
  }
  store_four<wide>(w_at, left, w);
  store_four<wide>(g_at, left, g);
  store_four<wide>(m_at, left, m);
  store_four<wide>(v_at, left, v);
  if (arrays.average == nullptr) return;
  float *const average_at = arrays.average + start;
  Four average = load_four<wide>(average_at, left);
#pragma unroll
  for (int i = 0; i < 4; i++) average.x[i] += step.rest * (w.x[i] - average.x[i]);
  store_four<wide>(average_at, left, average);
}

}  // namespace

rp_status adam(const rpi_adam_args *args) {
  if (args->count == 0) return RP_OK;
  const AdamArrays arrays = {args->weights, args->gradient, args->moment1, args->moment2,
                             args->average};
  const AdamStep step = {static_cast<float>(args->beta1),   static_cast<float>(1 - args->beta1),
                         static_cast<float>(args->beta2),   static_cast<float>(1 - args->beta2),
                         static_cast<float>(args->epsilon), static_cast<float>(args->decay),
                         static_cast<float>(1 - args->ema)};
  const bool wide = is_wide(arrays.weights, 0) && is_wide(arrays.gradient, 0) &&
                    is_wide(arrays.moment1, 0) && is_wide(arrays.moment2, 0) &&
                    is_wide(arrays.average, 0);
  const int64_t quads = (args->count + 3) / 4;
  const dim3 grid(blocks_for(quads, adam_threads));
  CUDA_TRY(launch(wide ? adam_numbers<true> : adam_numbers<false>,
                  {grid, dim3(adam_threads), 0, context().stream}, arrays, args->count, step,
                  args->outcome));
  return RP_OK;
}

}  // namespace rpc
