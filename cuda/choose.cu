/* SPDX-License-Identifier: Apache-2.0
 *
 * choose.cu: the likeliest classes of every row, and the mean of several models' probabilities.
 *
 * Of a row of logits x with the highest h,
 *
 *   log p_c = (x_c - h) / temperature - log sum_i e^((x_i - h) / temperature)
 *
 * A block has a row. What a search asks for, a few classes, is found one after the other: every
 * thread knows the highest of its own classes, and whose was the highest of all looks for its next.
 * What sampling may ask for, up to all classes, comes from a
 * sort of the row: correct, and made for rarer use. Results go to the host at once.
 */
#include <math.h>

#include "reduce.h"

namespace rpc {
namespace {

constexpr int64_t choose_few = 128; /* classes that are looked for one by one */
constexpr int sort_threads = 1024;
constexpr int64_t sort_tile = 4096;              /* keys that are merged in shared memory */
constexpr int64_t sort_bytes = int64_t{1} << 28; /* of keys that are sorted at once */

struct ChooseRows {
  int64_t classes, stride, most;
  float *logits;
  float factor;                  /* log2(e) / temperature */
  double inverse;                /* 1 / temperature */
  const int64_t *banned_offsets; /* or NULL */
  const int32_t *banned;
  int32_t *tokens;
  double *log_probabilities;
  double *left;     /* or NULL */
  double *log_sums; /* [rows]: of the exponentials; NaN where a logit is not finite */
  float *highest;   /* [rows] */
};

/* sum_c 2^(factor (x_c - highest)), of the whole block, to every thread. */
template <bool wide>
__device__ inline double exponential_sum(const float *x, int64_t classes, float highest,
                                         float factor) {
  __shared__ double shared[row_threads / 32];
  float sum = 0;
  for (int64_t c = 4 * threadIdx.x; c < classes; c += 4 * blockDim.x) {
    const Four four = load_four<wide>(x + c, classes - c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (c + i < classes) sum += exp2f(factor * (four.x[i] - highest));
    }
  }
  return block_sum(static_cast<double>(sum), shared);
}

/* Sums, bans, and what is left. */
template <bool wide>
__global__ void choose_prepare(ChooseRows a) {
  const int64_t row = blockIdx.x;
  float *const x = a.logits + row * a.stride;
  const float highest = highest_of<wide>(x, a.classes, no_limit()).value;
  const double sum = exponential_sum<wide>(x, a.classes, highest, a.factor);
  const bool finite = isfinite(sum);
  double left = finite ? 1 : static_cast<double>(NAN);
  const int64_t banned = a.banned_offsets != nullptr ? a.banned_offsets[row] : 0;
  const int64_t end = a.banned_offsets != nullptr ? a.banned_offsets[row + 1] : 0;
  if (finite && banned < end) {
    __syncthreads();
    for (int64_t i = banned + threadIdx.x; i < end; i += blockDim.x) {
      atomicExch(x + a.banned[i], -INFINITY); /* a class may be there twice */
    }
    __syncthreads();
    if (a.left != nullptr) {
      left = exponential_sum<wide>(x, a.classes, highest, a.factor) / sum;
    }
  }
  if (threadIdx.x != 0) return;
  if (a.left != nullptr) a.left[row] = left;
  a.log_sums[row] = finite ? log(sum) : static_cast<double>(NAN);
  a.highest[row] = highest;
}

/* Puts one class in its place of the result; a logit of -infinity stands for none. */
__device__ inline void choose_put(const ChooseRows &a, int64_t row, int64_t place, float logit,
                                  int32_t token) {
  const double log_sum = a.log_sums[row];
  const bool none = !(logit > -INFINITY) || isnan(log_sum);
  double log_p = isnan(log_sum) ? static_cast<double>(NAN) : -static_cast<double>(INFINITY);
  if (!none) {
    const double behind = static_cast<double>(logit) - static_cast<double>(a.highest[row]);
    log_p = behind * a.inverse - log_sum;
    log_p = log_p < 0 ? log_p : 0;
  }
  a.tokens[row * a.most + place] = none ? -1 : token;
  a.log_probabilities[row * a.most + place] = log_p;
}

template <bool wide>
__global__ void choose_one_by_one(ChooseRows a) {
  const int64_t row = blockIdx.x;
  const float *const x = a.logits + row * a.stride;
  const bool finite = !isnan(a.log_sums[row]);
  Highest own = {-INFINITY, -1};
  if (finite) own = highest_own<wide>(x, a.classes, no_limit());
  for (int64_t place = 0; place < a.most; place++) {
    const Highest next = highest_of_block(own);
    if (threadIdx.x == 0) choose_put(a, row, place, next.value, next.at);
    if (own.value > -INFINITY && own.at == next.at) own = highest_own<wide>(x, a.classes, next);
  }
}

/* A key that falls as the logit rises, and then rises with the class. */
__device__ inline uint64_t sort_key(float x, int64_t c) {
  x = x == 0 ? 0.0f : x; /* one zero */
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t rising = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~rising) << 32 | static_cast<uint64_t>(c);
}

/* One step of bitonic merging over keys[count], of which keys[0] is the row's key `base`: those
 * `apart` from each other change places where their order is not their run's, which rises and falls
 * in turn. */
__device__ inline void sort_step(uint64_t *keys, int64_t count, int64_t base, int64_t run,
                                 int64_t apart) {
  for (int64_t i = threadIdx.x; i < count / 2; i += sort_threads) {
    const int64_t low = 2 * i - (i & (apart - 1)), high = low + apart;
    const uint64_t one = keys[low], other = keys[high];
    if ((one > other) != (((base + low) & run) == 0)) continue;
    keys[low] = other;
    keys[high] = one;
  }
  __syncthreads();
}

/* The steps of runs first_run to last_run whose keys lie within one tile, in shared memory. */
__device__ inline void sort_within_tiles(uint64_t *keys, int64_t size, int64_t first_run,
                                         int64_t last_run) {
  __shared__ uint64_t tile[sort_tile];
  const int64_t count = size < sort_tile ? size : sort_tile;
  for (int64_t base = 0; base < size; base += count) {
    for (int64_t i = threadIdx.x; i < count; i += sort_threads) tile[i] = keys[base + i];
    __syncthreads();
    for (int64_t run = first_run; run <= last_run; run *= 2) {
      for (int64_t apart = (run < count ? run : count) / 2; apart > 0; apart /= 2) {
        sort_step(tile, count, base, run, apart);
      }
    }
    for (int64_t i = threadIdx.x; i < count; i += sort_threads) keys[base + i] = tile[i];
    __syncthreads();
  }
}

/* All classes of a row in order, by bitonic merging: keys[size], size a power of two. */
__global__ void __launch_bounds__(sort_threads)
    choose_sorted(ChooseRows a, int64_t first_row, uint64_t *all_keys, int64_t size) {
  const int64_t row = first_row + blockIdx.x;
  const float *const x = a.logits + row * a.stride;
  uint64_t *const keys = all_keys + blockIdx.x * size;
  for (int64_t c = threadIdx.x; c < size; c += sort_threads) {
    keys[c] = c < a.classes ? sort_key(x[c], c) : ~uint64_t{0};
  }
  __syncthreads();
  sort_within_tiles(keys, size, 2, size < sort_tile ? size : sort_tile);
  for (int64_t run = 2 * sort_tile; run <= size; run *= 2) {
    for (int64_t apart = run / 2; apart >= sort_tile; apart /= 2) {
      sort_step(keys, size, 0, run, apart);
    }
    sort_within_tiles(keys, size, run, run);
  }
  for (int64_t place = threadIdx.x; place < a.most; place += sort_threads) {
    const bool there = place < a.classes;
    const int32_t token = there ? static_cast<int32_t>(keys[place] & 0xffffffffu) : -1;
    choose_put(a, row, place, there ? x[token] : -INFINITY, token);
  }
}

rp_status choose_by_sorting(const ChooseRows &a, int64_t rows) {
  int64_t size = 1;
  while (size < a.classes) size *= 2;
  const int64_t row_bytes = size * static_cast<int64_t>(sizeof(uint64_t));
  const int64_t batch = rpi_min(rows, rpi_max(sort_bytes / row_bytes, 1));
  uint64_t *keys = nullptr;
  RPI_TRY(scratch(batch * size, &keys));
  for (int64_t first = 0; first < rows; first += batch) {
    const int64_t count = rpi_min(rows - first, batch);
    CUDA_TRY(launch(choose_sorted,
                    {dim3(static_cast<unsigned>(count)), dim3(sort_threads), 0, context().stream},
                    a, first, keys, size));
  }
  return RP_OK;
}

/* ---- the mean of several models -------------------------------------------- */

struct MixRows {
  int64_t classes, stride, mean_stride;
  const float *logits;
  float *mean;
  double share;
  bool first;
};

/* log(e^a + e^b). What neither has stays -infinity, NaN stays. */
__device__ inline float mix_add(float a, float b) {
  const float most = a > b ? a : b, least = a > b ? b : a;
  return most + log1pf(exp2f(kLog2E * (a == b ? 0 : least - most)));
}

/* mean may be the logits: a number is read before its place is written, by one thread. */
template <bool wide>
__global__ void mix_row(MixRows a) {
  const float *const x = a.logits + blockIdx.x * a.stride;
  float *const to = a.mean + blockIdx.x * a.mean_stride;
  const float highest = highest_of<wide>(x, a.classes, no_limit()).value;
  const double sum = exponential_sum<wide>(x, a.classes, highest, kLog2E);
  const float log_share = static_cast<float>(log(a.share / sum));
  for (int64_t c = 4 * threadIdx.x; c < a.classes; c += 4 * blockDim.x) {
    const int64_t count = a.classes - c;
    Four four = load_four<wide>(x + c, count), before = four;
    if (!a.first) before = load_four<wide>(to + c, count);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float own = four.x[i] - highest + log_share;
      four.x[i] = a.first ? own : mix_add(before.x[i], own);
    }
    store_four<wide>(to + c, count, four);
  }
}

}  // namespace

rp_status choose(const rpi_choose_args *args) {
  const int64_t rows = args->rows, wanted = rows * args->most;
  if (rows == 0) return RP_OK;
  ChooseRows a = {};
  a.classes = args->classes;
  a.stride = args->stride;
  a.most = args->most;
  a.logits = args->logits;
  a.inverse = 1 / args->temperature;
  /* A factor beyond 2^64 is no different from infinity, and 0 times it stays 0; one below 2^-126 is
   * no different from 0, and times -infinity, what is banned, stays that. */
  const double factor = 1.44269504088896340736 * a.inverse;
  a.factor = static_cast<float>(fmax(fmin(factor, ldexp(1.0, 64)), ldexp(1.0, -126)));
  scratch_begin();
  RPI_TRY(stage(args->banned_offsets, rows + 1, &a.banned_offsets));
  if (args->banned_offsets != nullptr) {
    RPI_TRY(stage(args->banned, args->banned_offsets[rows], &a.banned));
  }
  RPI_TRY(scratch(wanted, &a.log_probabilities));
  RPI_TRY(scratch(wanted, &a.tokens));
  RPI_TRY(scratch(rows, &a.log_sums));
  RPI_TRY(scratch(rows, &a.highest));
  if (args->left != nullptr) RPI_TRY(scratch(rows, &a.left));
  const bool wide = is_wide(a.logits, a.stride);
  const Launch config = {dim3(static_cast<unsigned>(rows)), dim3(threads_of_row(a.classes)), 0,
                         context().stream};
  CUDA_TRY(launch(wide ? choose_prepare<true> : choose_prepare<false>, config, a));
  if (a.most > choose_few) {
    RPI_TRY(choose_by_sorting(a, rows));
  } else if (a.most > 0) {
    CUDA_TRY(launch(wide ? choose_one_by_one<true> : choose_one_by_one<false>, config, a));
  }
  RPI_TRY(read(args->tokens, a.tokens, wanted * static_cast<int64_t>(sizeof *a.tokens)));
  RPI_TRY(read(args->log_probabilities, a.log_probabilities,
               wanted * static_cast<int64_t>(sizeof *a.log_probabilities)));
  if (args->left == nullptr) return RP_OK;
  return read(args->left, a.left, rows * static_cast<int64_t>(sizeof *a.left));
}

rp_status mix(const rpi_mix_args *args) {
  if (args->rows == 0 || args->classes == 0) return RP_OK;
  const MixRows a = {args->classes, args->stride, args->mean_stride, args->logits,
                     args->mean,    args->share,  args->first};
  const bool wide = is_wide(a.logits, a.stride) && is_wide(a.mean, a.mean_stride);
  CUDA_TRY(launch(wide ? mix_row<true> : mix_row<false>,
                  {dim3(static_cast<unsigned>(args->rows)), dim3(threads_of_row(a.classes)), 0,
                   context().stream},
                  a));
  return RP_OK;
}

}  // namespace rpc
