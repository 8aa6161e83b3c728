/* SPDX-License-Identifier: Apache-2.0
 *
 * cross_entropy.cu: the loss of every row against its smoothed label, and its gradient in the
 * logits' place. With x the logits less the highest of them,
 *
 *   y_c = right at the label, wrong elsewhere, adding up to 1
 *   loss = log sum_c e^x_c - wrong sum_c x_c - (right - wrong) x_label
 *   gradient_c = e^x_c / sum - y_c
 *
 * A block has one row at a time. It reads it from memory once, and keeps it in shared memory where
 * that holds it: 32,768 classes are 128 KiB, the rows of all blocks at work more than the
 * second-level cache. Then there is one block a multiprocessor, and the next row comes, in
 * registers, while this one is computed.
 * A thread goes through its own numbers alone. It adds them up in float, the block those of its
 * threads in double.
 */
#include <math.h>

#include "reduce.h"
#include "rounded.h"

namespace rpc {
namespace {

constexpr int64_t kept_beside = 1024; /* bytes of shared memory, for sums, beside a kept row */
constexpr int kept_ahead = 6;         /* quads of a thread on their way */
constexpr int next_quads = 16;        /* of the next row: registers for them */

struct CrossRows {
  int64_t rows, classes, stride;
  float *logits;
  const int32_t *labels;
  double right, wrong;
  bool gradient, rounded;
  float *loss, *nll;
  int8_t *hit;
};

/* A quad of the gradient. Rounded, a row begins where its logits do. */
template <bool wide>
__device__ void store_gradient(const CrossRows &a, float *x, int64_t c, const Four &four) {
  if (a.rounded) store_rounded(reinterpret_cast<bf16 *>(x) + c, four);
  else store_four<wide>(x + c, a.classes - c, four);
}

/* Quads of this thread from its first one, at x, on: `apart` numbers from one to the next, `count`
 * numbers to the row's end. */
template <bool wide, int quads>
__device__ void ask_for_quads(const float *x, int count, int apart, Four (&row)[quads]) {
#pragma unroll
  for (int n = 0; n < quads; n++) row[n] = load_four<wide>(x + n * apart, count - n * apart);
}
template <bool wide, int quads>
__device__ void keep_quads(const Four (&row)[quads], int count, int apart, float *to) {
#pragma unroll
  for (int n = 0; n < quads; n++) store_four<wide>(to + n * apart, count - n * apart, row[n]);
}

/* The numbers that the passes of this thread take from its quad `begin` on, several on their way at
 * once. */
template <bool wide>
__device__ void keep_row(const float *x, int classes, int begin, float *to) {
  const int apart = 4 * static_cast<int>(blockDim.x);
  const int first = 4 * static_cast<int>(threadIdx.x) + begin * apart;
  for (int c = first; c < classes; c += kept_ahead * apart) {
    Four ahead[kept_ahead];
    ask_for_quads<wide>(x + c, classes - c, apart, ahead);
    keep_quads<wide>(ahead, classes - c, apart, to + c);
  }
}

/* Loss and gradient of a row whose logits are in `in`: its own place, or where they are kept. */
template <bool wide, bool kept>
__device__ void cross_entropy_of(const CrossRows &a, int64_t row, const float *in) {
  __shared__ double shared[row_threads / 32];
  const int64_t classes = a.classes, label = a.labels[row];
  float *const x = a.logits + row * a.stride;
  if (label < 0) {
    if (kept) __syncthreads(); /* all have read it */
    const Four none = {{0, 0, 0, 0}};
    for (int64_t c = 4 * threadIdx.x; a.gradient && c < classes; c += 4 * blockDim.x) {
      store_gradient<wide>(a, x, c, none);
    }
    if (threadIdx.x != 0) return;
    a.loss[row] = a.nll[row] = 0;
    a.hit[row] = 0;
    return;
  }
  const Highest highest = highest_of<wide>(in, classes, no_limit());
  float exponentials = 0, distances = 0;
  for (int64_t c = 4 * threadIdx.x; c < classes; c += 4 * blockDim.x) {
    const Four four = load_four<wide>(in + c, classes - c);
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
  for (int64_t first = 0; first < classes; first += 4 * blockDim.x) {
    const int64_t c = first + 4 * threadIdx.x;
    Four four = load_four<wide>(in + c, classes - c);
    /* A rounded row grows half as fast as it is read: it is behind what all have read. */
    if (!kept) __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float e = exp2f(1.44269504088896340736f * (four.x[i] - highest.value));
      four.x[i] = e * inverse - wrong;
      if (c + i == label) four.x[i] = static_cast<float>(static_cast<double>(e) / sum - a.right);
    }
    if (c < classes) store_gradient<wide>(a, x, c, four);
  }
}

template <bool wide, bool kept>
__global__ void __launch_bounds__(row_threads, 2) cross_entropy_row(CrossRows a) {
  const int64_t row = blockIdx.x;
  float *const x = a.logits + row * a.stride;
  float *const in = kept ? reinterpret_cast<float *>(dynamic_smem()) : x;
  if (kept) keep_row<wide>(x, static_cast<int>(a.classes), 0, in);
  cross_entropy_of<wide, kept>(a, row, in);
}

/* Of long rows, of which a multiprocessor keeps one. */
template <bool wide>
__global__ void __launch_bounds__(row_threads, 1) cross_entropy_rows(CrossRows a) {
  float *const in = reinterpret_cast<float *>(dynamic_smem());
  constexpr int apart = 4 * static_cast<int>(row_threads);
  const int classes = static_cast<int>(a.classes), first = 4 * static_cast<int>(threadIdx.x);
  const int count = classes - first;
  Four next[next_quads];
  ask_for_quads<wide>(a.logits + blockIdx.x * a.stride + first, count, apart, next);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float *const x = a.logits + row * a.stride;
    keep_quads<wide>(next, count, apart, in + first);
    keep_row<wide>(x, classes, next_quads, in);
    if (row + gridDim.x < a.rows) {
      ask_for_quads<wide>(x + gridDim.x * a.stride + first, count, apart, next);
    }
    cross_entropy_of<wide, true>(a, row, in);
  }
}

/* ---- what a batch lost --------------------------------------------------------- */

constexpr int losses_threads = 1024;

struct LossRows {
  int64_t rows;
  const int32_t *labels;
  const float *loss, *nll;
  const int8_t *hit;
  int32_t *note;
  rpi_losses *own, *total; /* total: or NULL */
};

/* One block: thread t has the rows t, t + 1024, ... */
__global__ void __launch_bounds__(losses_threads) losses_all(LossRows a) {
  __shared__ double shared[losses_threads / 32];
  __shared__ int64_t counts[losses_threads / 32];
  double loss = 0, nll = 0;
  int64_t tokens = 0, hits = 0;
  for (int64_t row = threadIdx.x; row < a.rows; row += losses_threads) {
    if (a.labels[row] < 0) continue;
    loss += static_cast<double>(a.loss[row]);
    nll += static_cast<double>(a.nll[row]);
    hits += a.hit[row];
    tokens++;
  }
  loss = block_sum(loss, shared);
  nll = block_sum(nll, shared);
  tokens = block_sum(tokens, counts);
  hits = block_sum(hits, counts);
  if (threadIdx.x != 0) return;
  const int32_t noted = *a.note;
  rpi_losses own = {tokens, hits, loss, nll, 0};
  if (!isfinite(loss)) own.bad = noted > 0 ? noted : 1;
  *a.note = 0;
  *a.own = own;
  if (a.total == nullptr) return;
  a.total->tokens += tokens;
  a.total->hits += hits;
  a.total->loss += loss;
  a.total->nll += nll;
  if (a.total->bad == 0) a.total->bad = own.bad;
}

}  // namespace

rp_status cross_entropy(const rpi_cross_entropy_args *args) {
  if (args->rows == 0) return RP_OK;
  const double classes = static_cast<double>(args->classes);
  CrossRows a = {};
  a.rows = args->rows;
  a.classes = args->classes;
  a.stride = args->stride;
  a.logits = args->logits;
  if (args->classes > 1) {
    a.wrong = args->smoothing / (args->rule == RP_SMOOTH_ALL ? classes : classes - 1);
  }
  a.right = 1 - a.wrong * (classes - 1);
  a.gradient = args->gradient;
  a.rounded = args->rounded;
  a.loss = args->loss;
  a.nll = args->nll;
  a.hit = args->hit;
  RPI_TRY(stage(args->labels, args->rows, &a.labels));
  const bool wide = is_wide(a.logits, a.stride);
  const int64_t bytes = args->classes * static_cast<int64_t>(sizeof(float));
  const int64_t most = context().shared_bytes - kept_beside, places = context().multiprocessors;
  Launch config = {dim3(static_cast<unsigned>(args->rows)), dim3(threads_of_row(args->classes)),
                   static_cast<size_t>(bytes), context().stream};
  if (bytes > most) {
    config.shared = 0;
    CUDA_TRY(
        launch(wide ? cross_entropy_row<true, false> : cross_entropy_row<false, false>, config, a));
  } else if (2 * bytes > most && args->rows > places) {
    config.grid = dim3(static_cast<unsigned>(places));
    config.block = dim3(row_threads);
    CUDA_TRY(launch(wide ? cross_entropy_rows<true> : cross_entropy_rows<false>, config, a));
  } else {
    CUDA_TRY(
        launch(wide ? cross_entropy_row<true, true> : cross_entropy_row<false, true>, config, a));
  }
  return RP_OK;
}

rp_status losses(const rpi_losses_args *args) {
  LossRows a = {args->rows, nullptr,    args->loss, args->nll,
                args->hit,  args->note, args->own,  args->total};
  RPI_TRY(stage(args->labels, args->rows, &a.labels));
  CUDA_TRY(launch(losses_all, {dim3(1), dim3(losses_threads), 0, context().stream}, a));
  return RP_OK;
}

}  // namespace rpc
