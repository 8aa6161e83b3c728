/* SPDX-License-Identifier: Apache-2.0
 *
 * cross_entropy.cu: the loss of every row against its smoothed label, and its gradient in the
 * logits' place. With x the logits less the highest of them,
 *
 *   y_c = right at the label, wrong elsewhere, adding up to 1
 *   loss = log sum_c e^x_c - wrong sum_c x_c - (right - wrong) x_label
 *   gradient_c = e^x_c / sum - y_c
 *
 * A block has a row. It reads it from memory once: the passes after the one that finds the highest
 * find it in the second-level cache, which holds the rows of all blocks at work. A thread adds its
 * numbers up in float, the block those of its threads in double.
 */
#include <math.h>

#include "reduce.h"

namespace rpc {
namespace {

struct CrossRows {
  int64_t classes, stride;
  float *logits;
  const int32_t *labels;
  double right, wrong;
  bool gradient;
  float *loss, *nll;
  int8_t *hit;
};

template <bool wide>
__global__ void cross_entropy_row(CrossRows a) {
  __shared__ double shared[row_threads / 32];
  const int64_t row = blockIdx.x, classes = a.classes, label = a.labels[row];
  float *const x = a.logits + row * a.stride;
  if (label < 0) {
    const Four none = {{0, 0, 0, 0}};
    for (int64_t c = 4 * threadIdx.x; a.gradient && c < classes; c += 4 * blockDim.x) {
      store_four<wide>(x + c, classes - c, none);
    }
    if (threadIdx.x != 0) return;
    a.loss[row] = a.nll[row] = 0;
    a.hit[row] = 0;
    return;
  }
  const Highest highest = highest_of<wide>(x, classes, no_limit());
  float exponentials = 0, distances = 0;
  for (int64_t c = 4 * threadIdx.x; c < classes; c += 4 * blockDim.x) {
    const Four four = load_four<wide>(x + c, classes - c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (c + i >= classes) continue;
      const float d = four.x[i] - highest.value;
      exponentials += exp2f(1.44269504088896340736f * d);
      distances += d;
    }
  }
  const double sum = block_sum(static_cast<double>(exponentials), shared);
  const double far = block_sum(static_cast<double>(distances), shared);
  /* Every thread has read the label's logit before one writes its gradient below. */
  const float d_label = x[label] - highest.value;
  __syncthreads();
  const double x_label = static_cast<double>(d_label);
  if (threadIdx.x == 0) {
    const double log_sum = log(sum), more = a.right - a.wrong;
    double loss = log_sum;
    /* Where a class has no weight, its logit may be -infinity. */
    if (a.wrong != 0) loss -= a.wrong * far;
    if (more != 0) loss -= more * x_label;
    a.loss[row] = static_cast<float>(loss);
    a.nll[row] = static_cast<float>(log_sum - x_label);
    a.hit[row] = highest.at == label;
  }
  if (!a.gradient) return;
  const float inverse = static_cast<float>(1 / sum), wrong = static_cast<float>(a.wrong);
  for (int64_t c = 4 * threadIdx.x; c < classes; c += 4 * blockDim.x) {
    Four four = load_four<wide>(x + c, classes - c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float e = exp2f(1.44269504088896340736f * (four.x[i] - highest.value));
      four.x[i] = e * inverse - wrong;
      if (c + i == label) four.x[i] = static_cast<float>(static_cast<double>(e) / sum - a.right);
    }
    store_four<wide>(x + c, classes - c, four);
  }
}

/* ---- what a batch lost --------------------------------------------------------- */

constexpr int losses_threads = 1024;

/* One block: thread t has the rows t, t + 1024, ... */
__global__ void losses_all(int64_t rows, const int32_t *labels, const float *loss, const float *nll,
                           const int8_t *hit, rpi_losses *sums) {
  __shared__ double shared[losses_threads / 32];
  __shared__ int64_t counts[losses_threads / 32];
  double loss_sum = 0, nll_sum = 0;
  int64_t tokens = 0, hits = 0;
  for (int64_t row = threadIdx.x; row < rows; row += losses_threads) {
    if (labels[row] < 0) continue;
    loss_sum += static_cast<double>(loss[row]);
    nll_sum += static_cast<double>(nll[row]);
    hits += hit[row];
    tokens++;
  }
  loss_sum = block_sum(loss_sum, shared);
  nll_sum = block_sum(nll_sum, shared);
  tokens = block_sum(tokens, counts);
  hits = block_sum(hits, counts);
  if (threadIdx.x != 0) return;
  sums->tokens = tokens;
  sums->hits = hits;
  sums->loss = loss_sum;
  sums->nll = nll_sum;
}

}  // namespace

rp_status cross_entropy(const rpi_cross_entropy_args *args) {
  if (args->rows == 0) return RP_OK;
  const double classes = static_cast<double>(args->classes);
  CrossRows a = {};
  a.classes = args->classes;
  a.stride = args->stride;
  a.logits = args->logits;
  if (args->classes > 1) {
    a.wrong = args->smoothing / (args->rule == RP_SMOOTH_ALL ? classes : classes - 1);
  }
  a.right = 1 - a.wrong * (classes - 1);
  a.gradient = args->gradient;
  a.loss = args->loss;
  a.nll = args->nll;
  a.hit = args->hit;
  RPI_TRY(stage(args->labels, args->rows, &a.labels));
  const dim3 grid(static_cast<unsigned>(args->rows));
  const bool wide = is_wide(a.logits, a.stride);
  CUDA_TRY(launch(wide ? cross_entropy_row<true> : cross_entropy_row<false>,
                  {grid, dim3(threads_of_row(args->classes)), 0, context().stream}, a));
  return RP_OK;
}

rp_status losses(const rpi_losses_args *args, rpi_losses *sums) {
  *sums = rpi_losses{};
  if (args->rows == 0) return RP_OK;
  const int32_t *labels = nullptr;
  rpi_losses *all = nullptr;
  scratch_begin();
  RPI_TRY(scratch(1, &all));
  RPI_TRY(stage(args->labels, args->rows, &labels));
  CUDA_TRY(launch(losses_all, {dim3(1), dim3(losses_threads), 0, context().stream}, args->rows,
                  labels, args->loss, args->nll, args->hit, all));
  return read(sums, all, sizeof *sums);
}

}  // namespace rpc
