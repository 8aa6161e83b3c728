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
 * second-level cache. Where it holds no two, there is one block a multiprocessor, and the next row
 * comes while this one is computed:
 *
 *   up to 32,768 classes   this row in registers (cross_entropy_held), the next to shared memory
 *   more                   this row in shared memory (cross_entropy_rows), the next to registers
 *
 * (A row between borders of 16 bytes comes to registers from memory, its lines to the second-level
 * cache ahead.) These add up in orders of their own: the bits of a row go by how many there are,
 * more than multiprocessors or not.
 *
 * A thread goes through its own numbers alone. It adds them up in float, the block those of its
 * threads, or warps, in double.
 */
#include <math.h>

#include "reduce.h"
#include "rounded.h"

namespace rpc {
namespace {

constexpr int64_t kept_beside = 1024; /* bytes of shared memory, for sums, beside a kept row */
constexpr int kept_ahead = 6;         /* quads of a thread on their way */
constexpr int next_quads = 16;        /* of the next row: registers for them */

constexpr unsigned held_threads = 1024;
constexpr int held_warps = held_threads / 32;
constexpr int held_quads = 8;                /* of a thread, one at least: registers for them */
constexpr int held_apart = 4 * held_threads; /* numbers from one to the next */
constexpr int held_classes = held_quads * held_apart; /* at most */

struct CrossRows {
  int64_t rows, classes, stride;
  float *logits;
  const int32_t *labels;
  double right, wrong;
  bool gradient, rounded;
  float *loss, *nll;
  int8_t *hit;
};

/* A quad of the gradient, at c, where the row has `count` more numbers. Rounded, a row begins where
 * its logits do. */
template <bool wide>
__device__ void store_gradient(const CrossRows &a, float *x, int64_t c, int64_t count,
                               const Four &four) {
  if (a.rounded) store_rounded(reinterpret_cast<bf16 *>(x) + c, four);
  else store_four<wide>(x + c, count, four);
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

/* By one thread. d_label: the label's logit less the highest. */
__device__ void store_loss(const CrossRows &a, int64_t row, double sum, double far, float d_label,
                           bool hit) {
  const double log_sum = log(sum), x_label = static_cast<double>(d_label), more = a.right - a.wrong;
  double loss = log_sum;
  /* Where a class has no weight, its logit may be -infinity. */
  if (a.wrong != 0) loss -= a.wrong * far;
  if (more != 0) loss -= more * x_label;
  a.loss[row] = static_cast<float>(loss);
  a.nll[row] = static_cast<float>(log_sum - x_label);
  a.hit[row] = hit && isfinite(sum); /* NaN hits nothing */
}

/* Of a row that does not count. */
template <bool wide>
__device__ void store_none(const CrossRows &a, int64_t row) {
  const Four none = {{0, 0, 0, 0}};
  for (int64_t c = 4 * threadIdx.x; a.gradient && c < a.classes; c += 4 * blockDim.x) {
    store_gradient<wide>(a, a.logits + row * a.stride, c, a.classes - c, none);
  }
  if (threadIdx.x != 0) return;
  a.loss[row] = a.nll[row] = 0;
  a.hit[row] = 0;
}

__device__ float gradient_of_label(const CrossRows &a, float e, double sum) {
  return static_cast<float>(static_cast<double>(e) / sum - a.right);
}

/* Loss and gradient of a row whose logits are in `in`: its own place, or where they are kept. */
template <bool wide, bool kept>
__device__ void cross_entropy_of(const CrossRows &a, int64_t row, const float *in) {
  __shared__ double shared[row_threads / 32];
  const int64_t classes = a.classes, label = a.labels[row];
  float *const x = a.logits + row * a.stride;
  if (label < 0) {
    if (kept) __syncthreads(); /* all have read it */
    store_none<wide>(a, row);
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
      exponentials += exp2f(kLog2E * d);
      distances += d;
    }
  }
  const double sum = block_sum(static_cast<double>(exponentials), shared);
  const double far = block_sum(static_cast<double>(distances), shared);
  /* Every thread has read the label's logit before one writes its gradient below. */
  const float d_label = x[label] - highest.value;
  __syncthreads();
  if (threadIdx.x == 0) store_loss(a, row, sum, far, d_label, highest.at == label);
  if (!a.gradient) return;
  const float inverse = static_cast<float>(1 / sum), wrong = static_cast<float>(a.wrong);
  for (int64_t first = 0; first < classes; first += 4 * blockDim.x) {
    const int64_t c = first + 4 * threadIdx.x;
    Four four = load_four<wide>(in + c, classes - c);
    /* A rounded row grows half as fast as it is read: it is behind what all have read. */
    if (!kept) __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float e = exp2f(kLog2E * (four.x[i] - highest.value));
      four.x[i] = e * inverse - wrong;
      if (c + i == label) four.x[i] = gradient_of_label(a, e, sum);
    }
    if (c < classes) store_gradient<wide>(a, x, c, classes - c, four);
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

/* ---- rows that the registers of a block hold ------------------------------------ */

/* A row is to come to `to`, a thread's quads by its own hand: nobody else needs them. Where quads
 * lie on no borders of 16 bytes, or are not whole, its lines are to come nearer. */
template <bool wide>
__device__ void ask_for_row(const float *x, int classes, float *to) {
#pragma unroll 1
  for (int c = 4 * static_cast<int>(threadIdx.x); c < classes; c += held_apart) {
    if (wide) cp_async16(to + c, x + c, true);
    else if (c % 32 == 0) prefetch_line(x + c);
  }
  cp_async_commit();
}

/* This thread's quads from `from` on, where the row has `count` more numbers; the highest of them.
 * In place of a quad that is not there stands the first one, of a number -infinity. */
template <bool wide>
__device__ float hold_row(const float *from, int count, Four (&row)[held_quads]) {
  float highest = -INFINITY;
#pragma unroll
  for (int n = 0; n < held_quads; n++) {
    const int left = count - n * held_apart;
    const float *const quad = left > 0 ? from + n * held_apart : from;
    if (wide) row[n] = load_four<wide>(quad, 4);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!wide) row[n].x[i] = i < left ? quad[i] : -INFINITY;
      highest = fmaxf(highest, row[n].x[i]);
    }
  }
  return highest;
}

/* The number that lies `at` numbers behind this thread's first one. Registers have no addresses. */
__device__ float held_at(const Four (&row)[held_quads], int at) {
  float x = 0;
#pragma unroll
  for (int n = 0; n < held_quads; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (n * held_apart + i == at) x = row[n].x[i];
    }
  }
  return x;
}

/* The first of this thread's classes that has `value`, counted from its first one; `none` where
 * there is none. */
__device__ int first_with(const Four (&row)[held_quads], float value, int none) {
  int first = none;
#pragma unroll
  for (int n = held_quads - 1; n >= 0; n--) {
#pragma unroll
    for (int i = 3; i >= 0; i--) {
      if (row[n].x[i] == value) first = n * held_apart + i;
    }
  }
  return first;
}

struct HeldSums {
  float exponentials, distances;
};

/* Every number x becomes e^(x - highest). */
template <bool wide>
__device__ HeldSums exponentials_of(Four (&row)[held_quads], int count, float highest) {
  HeldSums sums = {0, 0};
#pragma unroll
  for (int n = 0; n < held_quads; n++) {
    const int left = count - n * held_apart;
    float d[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      d[i] = row[n].x[i] - highest;
      row[n].x[i] = exp2_approx(kLog2E * d[i]);
      if (!wide && i >= left) d[i] = 0;
    }
    if (left <= 0) continue;
    sums.exponentials += (row[n].x[0] + row[n].x[1]) + (row[n].x[2] + row[n].x[3]);
    sums.distances += (d[0] + d[1]) + (d[2] + d[3]);
  }
  return sums;
}

/* first: this thread's first class, from which on the row has `count` numbers. */
template <bool wide>
__device__ void store_held(const CrossRows &a, float *x, unsigned first, int count,
                           const Four (&row)[held_quads], float inverse) {
  const float wrong = static_cast<float>(a.wrong);
#pragma unroll
  for (int n = 0; n < held_quads; n++) {
    const int left = count - n * held_apart;
    Four four;
#pragma unroll
    for (int i = 0; i < 4; i++) four.x[i] = fmaf(row[n].x[i], inverse, -wrong);
    if (left > 0) store_gradient<wide>(a, x, first + n * held_apart, wide ? 4 : left, four);
  }
}

struct HeldShared {
  float highest[held_warps], exponentials[held_warps], distances[held_warps], x_label;
  int32_t best;
};
static_assert(sizeof(HeldShared) <= kept_beside);

/* Two barriers a row: what is shared is written in front of one of them and read behind it. */
template <bool wide>
__global__ void __launch_bounds__(held_threads, 1) cross_entropy_held(CrossRows a) {
  static_assert(held_warps == 32, "a lane reads what a warp leaves");
  __shared__ HeldShared shared;
  float *const next = reinterpret_cast<float *>(dynamic_smem());
  const int classes = static_cast<int>(a.classes), rows = static_cast<int>(a.rows);
  const int blocks = static_cast<int>(gridDim.x);
  const unsigned t = threadIdx.x, warp = t / 32, lane = t % 32, first = 4 * t;
  const int count = classes - static_cast<int>(first);
  ask_for_row<wide>(a.logits + blockIdx.x * a.stride, classes, next);
  for (int row = static_cast<int>(blockIdx.x); row < rows; row += blocks) {
    float *const x = a.logits + row * a.stride;
    const int label = a.labels[row];
    cp_async_wait<0>();
    Four held[held_quads];
    const float highest_own = hold_row<wide>((wide ? next : x) + first, count, held);
    if (row + blocks < rows) ask_for_row<wide>(x + blocks * a.stride, classes, next);
    if (label < 0) {
      __syncthreads(); /* all have read it */
      store_none<wide>(a, row);
      continue;
    }
    const bool has_label = static_cast<unsigned>(label) / 4 % held_threads == t;
    const float of_warp = warp_highest(highest_own);
    if (lane == 0) shared.highest[warp] = of_warp;
    if (has_label) shared.x_label = held_at(held, label - static_cast<int>(first));
    if (t == 0) shared.best = classes;
    __syncthreads();
    const float highest = warp_highest(shared.highest[lane]), d_label = shared.x_label - highest;
    if (highest_own == highest) {
      atomicMin(&shared.best, static_cast<int32_t>(first) + first_with(held, highest, count));
    }
    const HeldSums sums = exponentials_of<wide>(held, count, highest);
    const float exponentials = warp_sum(sums.exponentials), distances = warp_sum(sums.distances);
    if (lane == 0) {
      shared.exponentials[warp] = exponentials;
      shared.distances[warp] = distances;
    }
    __syncthreads();
    const double sum = warp_sum(static_cast<double>(shared.exponentials[lane]));
    if (a.gradient) store_held<wide>(a, x, first, count, held, static_cast<float>(1 / sum));
    if (a.gradient && has_label) {
      const float gradient = gradient_of_label(a, exp2_approx(kLog2E * d_label), sum);
      if (a.rounded) reinterpret_cast<bf16 *>(x)[label] = __float2bfloat16(gradient);
      else x[label] = gradient;
    }
    if (warp != 0) continue;
    const double far = warp_sum(static_cast<double>(shared.distances[lane]));
    if (lane == 0) store_loss(a, row, sum, far, d_label, shared.best == label);
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
    const bool held = args->classes >= held_apart && args->classes <= held_classes;
    const bool whole = wide && args->classes % 4 == 0;
    config.grid = dim3(static_cast<unsigned>(places));
    config.block = dim3(held ? held_threads : row_threads);
    if (held && !whole) config.shared = 0;
    CUDA_TRY(launch(held ? (whole ? cross_entropy_held<true> : cross_entropy_held<false>)
                         : (wide ? cross_entropy_rows<true> : cross_entropy_rows<false>),
                    config, a));
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
