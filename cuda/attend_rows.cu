/* SPDX-License-Identifier: Apache-2.0
 *
 * attend_rows.cu: (1) to (3) of ops/attention.h for single queries whose keys lie anywhere, and the
 * way of keys and values to where they lie.
 *
 * A block has one head of one row, or the whole row where its mean probabilities are wanted. Keys
 * come in groups of as many as the block has threads:
 *
 *   scores     eight threads share a key; the scores of a group are in shared memory
 *   weights    a thread has the score of one key; a larger maximum rescales what is there
 *   values     threads are laid over quads of columns and slices of the keys; every slice has
 *              sums of its own, which are added in their order at the end
 *
 * A step has few rows and few keys: what a block takes is how often it waits for memory. So threads
 * are few, and what one reads of several keys is on its way at once.
 */
#include <math.h>
#include <stdlib.h>

#include "pairs.h"
#include "reduce.h"

namespace rpc {
namespace {

constexpr int attend_threads = 128;  /* of a block, and keys of a group */
constexpr int attend_lanes = 8;      /* threads that share a key */
constexpr int attend_once = 4;       /* keys whose numbers a thread reads at once */
constexpr int64_t most_down = 65535; /* blocks along a grid's y */

/* One table on a band; that of head h lies h head_strides further on. */
struct AttendPart {
  const float *table;
  int64_t head_stride, stride, left, right;
  const int32_t *buckets; /* or NULL */
  bool clip;
};

struct AttendParts {
  AttendPart of[RP_TERMS];
  int count;
};

struct AttendRows {
  AttendParts key, query, bias, value;
  const float *position_bias; /* or NULL */
  int64_t position_bias_stride;
  int64_t H, D, rows;
  int64_t sharers; /* heads of queries that share one of keys */
  int64_t left;    /* distances that are seen: from -left on; below 0: all */
  float scale, softcap;
  const float *q;
  int64_t q_stride;
  const int64_t *starts;    /* [rows + 1] into keys */
  const float *const *keys; /* of all rows, end to end */
  int64_t shift, to_value;
  float *out;
  int64_t out_stride;
  float *const *mean; /* or NULL */
};

/* The vector, or number, of a part for distance d; NULL: none. */
__device__ inline const float *part_at(const AttendPart &p, int64_t head, int64_t d) {
  if (!p.clip && (d < -p.left || d > p.right)) return nullptr;
  const int64_t inside = d < -p.left ? -p.left : d > p.right ? p.right : d;
  int64_t row = inside + p.left;
  if (p.buckets != nullptr) row = p.buckets[row];
  return row < 0 ? nullptr : p.table + head * p.head_stride + row * p.stride;
}

/* sum of x_i y_i */
__device__ inline float dot_four(const Four &x, const Four &y) {
  return (x.x[0] * y.x[0] + x.x[1] * y.x[1]) + (x.x[2] * y.x[2] + x.x[3] * y.x[3]);
}

/* One row of the call, for one head. */
struct AttendHead {
  int64_t head, at; /* at: of the query */
  const float *q;
  const float *const *keys;
};

/* A group of keys. */
struct AttendGroup {
  int64_t first;
  int count;
  const float *const *keys; /* [count], in shared memory, of the head */
};

/* of[n] = the vector of a part for the key `apart` n behind key j, four numbers from column c on.
 */
template <bool wide>
__device__ inline void load_vectors(const AttendPart &p, const AttendHead &h, const AttendGroup &g,
                                    int j, int apart, int64_t c, int64_t count, Four *of) {
#pragma unroll
  for (int n = 0; n < attend_once; n++) {
    const int at = j + n * apart;
    const float *const vector = at < g.count ? part_at(p, h.head, g.first + at - h.at) : nullptr;
    of[n] = vector != nullptr ? load_four<wide>(vector + c, count) : Four{{0, 0, 0, 0}};
  }
}

/* The same of what lies `shift` numbers behind where a key lies. */
template <bool wide>
__device__ inline void load_keys(const AttendGroup &g, int64_t shift, int j, int apart,
                                 int64_t count, Four *of) {
#pragma unroll
  for (int n = 0; n < attend_once; n++) {
    const int at = j + n * apart;
    of[n] = at < g.count ? load_four<wide>(g.keys[at] + shift, count) : Four{{0, 0, 0, 0}};
  }
}

/* This thread's share of the products of keys that lie `apart` behind each other: its quads of the
 * columns. */
template <bool wide>
__device__ inline void attend_products(const AttendRows &a, const AttendHead &h,
                                       const AttendGroup &g, int j, int apart, float *sum) {
  for (int64_t c = 4 * (threadIdx.x % attend_lanes); c < a.D; c += 4 * attend_lanes) {
    const int64_t count = a.D - c;
    Four query = load_four<wide>(h.q + c, count), key[attend_once], vector[attend_once];
    load_keys<wide>(g, c, j, apart, count, key);
#pragma unroll
    for (int n = 0; n < attend_once; n++) sum[n] += dot_four(query, key[n]);
    for (int t = 0; t < a.query.count; t++) {
      load_vectors<wide>(a.query.of[t], h, g, j, apart, c, count, vector);
#pragma unroll
      for (int n = 0; n < attend_once; n++) sum[n] += dot_four(key[n], vector[n]);
    }
    if (a.position_bias != nullptr) {
      const float *const bias = a.position_bias + h.head * a.position_bias_stride;
      const Four more = load_four<wide>(bias + c, count);
#pragma unroll
      for (int i = 0; i < 4; i++) query.x[i] += more.x[i];
    }
    for (int t = 0; t < a.key.count; t++) {
      load_vectors<wide>(a.key.of[t], h, g, j, apart, c, count, vector);
#pragma unroll
      for (int n = 0; n < attend_once; n++) sum[n] += dot_four(query, vector[n]);
    }
  }
}

/* The score of a key whose product is known, in units of log 2. */
__device__ inline float attend_score(const AttendRows &a, const AttendHead &h, int64_t j,
                                     float product) {
  float sum = product * a.scale;
  for (int t = 0; t < a.bias.count; t++) {
    const float *const number = part_at(a.bias.of[t], h.head, j - h.at);
    if (number != nullptr) sum += *number;
  }
  if (a.softcap != 0) sum = a.softcap * tanhf(sum / a.softcap);
  return sum * kLog2E;
}

/* scores[0 .. count - 1] of a group that begins at key `first`, and the group. */
template <bool wide>
__device__ inline AttendGroup attend_scores(const AttendRows &a, const AttendHead &h, int64_t first,
                                            float *scores) {
  __shared__ const float *keys[attend_threads];
  const int64_t left = h.at + 1 - first;
  const int own = static_cast<int>(threadIdx.x), octet = own / attend_lanes;
  const AttendGroup g = {first, static_cast<int>(left < attend_threads ? left : attend_threads),
                         keys};
  if (own < g.count) keys[own] = h.keys[first + own] + a.shift + h.head / a.sharers * a.D;
  __syncthreads();
  constexpr int apart = attend_threads / attend_lanes;
  for (int base = 0; base < g.count; base += attend_once * apart) {
    float sum[attend_once] = {};
    attend_products<wide>(a, h, g, base + octet, apart, sum);
#pragma unroll
    for (int n = 0; n < attend_once; n++) {
#pragma unroll
      for (int far = attend_lanes / 2; far > 0; far /= 2) {
        sum[n] += __shfl_xor_sync(whole_warp, sum[n], far);
      }
      const int j = base + octet + n * apart;
      if (j < g.count && own % attend_lanes == n) {
        scores[j] = attend_score(a, h, first + j, sum[n]);
      }
    }
  }
  __syncthreads();
  return g;
}

/* How threads are laid over quads of columns and slices of keys: so many slices. */
__host__ __device__ inline int attend_slices(int64_t D) {
  int across = 1;
  while (across < attend_threads && 4 * across < D) across *= 2;
  return attend_threads / across;
}

/* sums[slice][D, in quads] = shrink * what is there + the weighted values of the slice's keys. */
template <bool wide>
__device__ inline void attend_values(const AttendRows &a, const AttendHead &h, const AttendGroup &g,
                                     const float *weights, float shrink, bool begin, Four *sums) {
  const int slices = attend_slices(a.D), across = attend_threads / slices;
  const int slice = static_cast<int>(threadIdx.x) / across;
  const int64_t quads = (a.D + 3) / 4;
  for (int64_t quad = static_cast<int>(threadIdx.x) % across; quad < quads; quad += across) {
    const int64_t c = 4 * quad, width = a.D - c;
    Four sum = {{0, 0, 0, 0}}, value[attend_once], vector[attend_once];
    for (int j = slice; j < g.count; j += attend_once * slices) {
      load_keys<wide>(g, a.to_value + c, j, slices, width, value);
      for (int t = 0; t < a.value.count; t++) {
        load_vectors<wide>(a.value.of[t], h, g, j, slices, c, width, vector);
#pragma unroll
        for (int n = 0; n < attend_once; n++) {
#pragma unroll
          for (int i = 0; i < 4; i++) value[n].x[i] += vector[n].x[i];
        }
      }
#pragma unroll
      for (int n = 0; n < attend_once; n++) {
        const int at = j + n * slices;
        const float weight = at < g.count ? weights[at] : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) sum.x[i] += weight * value[n].x[i];
      }
    }
    Four *const to = sums + slice * quads + quad;
    if (!begin) {
#pragma unroll
      for (int i = 0; i < 4; i++) sum.x[i] += shrink * to->x[i];
    }
    *to = sum;
  }
}

/* What a head's row has: maximum and sum of its weights. */
struct AttendSums {
  float highest, sum;
};

template <bool wide>
__device__ inline AttendSums attend_one(const AttendRows &a, const AttendHead &h, int64_t begin,
                                        float *scores, float *shared, Four *sums, float *out) {
  AttendSums all = {-INFINITY, 0};
  const int64_t keys = h.at + 1, quads = (a.D + 3) / 4;
  for (int64_t first = begin; first < keys; first += attend_threads) {
    const AttendGroup g = attend_scores<wide>(a, h, first, scores);
    const int j = static_cast<int>(threadIdx.x);
    const float score = j < g.count ? scores[j] : -INFINITY;
    const float highest = block_highest(fmaxf(all.highest, score), shared);
    const float shrink = all.sum == 0 ? 0.0f : exp2f(all.highest - highest);
    /* keys that a table hides weigh 0, where there are no others too */
    const float from = highest == -INFINITY ? 0.0f : highest;
    const float weight = j < g.count ? exp2f(score - from) : 0.0f;
    if (j < g.count) scores[j] = weight;
    all.highest = highest;
    all.sum = all.sum * shrink + block_sum(weight, shared);
    attend_values<wide>(a, h, g, scores, shrink, first == begin, sums);
    __syncthreads();
  }
  const float share = all.sum == 0 ? 0.0f : 1 / all.sum;
  for (int64_t quad = threadIdx.x; quad < quads; quad += attend_threads) {
    Four sum = {{0, 0, 0, 0}};
    for (int slice = 0; keys > 0 && slice < attend_slices(a.D); slice++) {
      const Four one = sums[slice * quads + quad];
#pragma unroll
      for (int i = 0; i < 4; i++) sum.x[i] += one.x[i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sum.x[i] *= share;
    store_four<wide>(out + 4 * quad, a.D - 4 * quad, sum);
  }
  __syncthreads();
  return all;
}

/* mean += probabilities / heads; head 0 begins it. */
template <bool wide>
__device__ inline void attend_add_mean(const AttendRows &a, const AttendHead &h, int64_t begin,
                                       AttendSums all, float *scores, float *mean) {
  const bool blind = all.sum == 0;
  const float share = blind ? 0.0f : 1 / (all.sum * static_cast<float>(a.H));
  const int64_t keys = h.at + 1;
  for (int64_t j = threadIdx.x; h.head == 0 && j < begin; j += attend_threads) mean[j] = 0;
  for (int64_t first = begin; first < keys; first += attend_threads) {
    const AttendGroup g = attend_scores<wide>(a, h, first, scores);
    const int j = static_cast<int>(threadIdx.x);
    if (j < g.count) {
      const float p = blind ? 0.0f : share * exp2f(scores[j] - all.highest);
      mean[first + j] = h.head == 0 ? p : mean[first + j] + p;
    }
    __syncthreads();
  }
}

template <bool wide>
__global__ void attend_row(AttendRows a) {
  __shared__ float scores[attend_threads];
  __shared__ float shared[attend_threads / 32];
  Four *const sums = reinterpret_cast<Four *>(dynamic_smem());
  const int64_t row = blockIdx.x, keys = a.starts[row + 1] - a.starts[row];
  for (int64_t head = blockIdx.y; head < a.H; head += gridDim.y) {
    const AttendHead h = {head, keys - 1, a.q + row * a.q_stride + head * a.D,
                          a.keys + a.starts[row]};
    const int64_t begin = a.left >= 0 && h.at > a.left ? h.at - a.left : 0;
    float *const out = a.out + row * a.out_stride + head * a.D;
    const AttendSums all = attend_one<wide>(a, h, begin, scores, shared, sums, out);
    if (a.mean != nullptr && keys > 0) {
      attend_add_mean<wide>(a, h, begin, all, scores, a.mean[row]);
    }
  }
}

/* ---- the host's side ------------------------------------------------------------ */

/* wide: goes on only where every vector starts on a border of 16 bytes. */
rp_status parts_of(const rp_relation *relations, AttendParts *parts, bool *wide) {
  parts->count = 0;
  for (int t = 0; t < RP_TERMS; t++) {
    const rp_relation *const r = &relations[t];
    if (r->table == nullptr) continue;
    AttendPart *const p = &parts->of[parts->count++];
    *p = AttendPart{r->table,
                    r->head_stride,
                    r->row_stride,
                    r->left,
                    r->right,
                    nullptr,
                    r->beyond == RP_BEYOND_CLIP};
    RPI_TRY(stage(r->buckets, r->left + 1 + r->right, &p->buckets));
    *wide = *wide && is_wide(r->table, r->row_stride) && r->head_stride % 4 == 0;
  }
  return RP_OK;
}

/* The lists of all rows, end to end behind their starts, in one piece of the host's memory: one
 * copy for all layers, whose lists are the same, those of self-attention beside those of cross. */
rp_status stage_lists(const rpi_attend_rows_args *args, AttendRows *a, bool *wide) {
  int64_t total = 0;
  for (int64_t r = 0; r < args->rows; r++) total += args->counts[r];
  const size_t bytes = static_cast<size_t>(args->rows + 1 + total) * sizeof(int64_t);
  static_assert(sizeof(int64_t) == sizeof(float *), "starts and pointers share their memory");
  int64_t *const list = static_cast<int64_t *>(malloc(bytes));
  if (list == nullptr) {
    return fail(RP_ERROR_MEMORY, "attend_rows: no memory for lists of %lld keys", (long long)total);
  }
  uintptr_t borders = 0;
  int64_t at = 0;
  for (int64_t r = 0; r < args->rows; r++) {
    list[r] = at;
    for (int64_t j = 0; j < args->counts[r]; j++) {
      const uintptr_t key = reinterpret_cast<uintptr_t>(args->keys[r][j]);
      borders |= key;
      list[args->rows + 1 + at++] = static_cast<int64_t>(key);
    }
  }
  list[args->rows] = at;
  const int64_t *staged = nullptr;
  const rp_status status = stage(list, args->rows + 1 + total, &staged, args->keys);
  free(list);
  RPI_TRY(status);
  a->starts = staged;
  a->keys = reinterpret_cast<const float *const *>(staged + args->rows + 1);
  *wide = *wide && borders % 16 == 0;
  return RP_OK;
}

/* ---- scatter -------------------------------------------------------------------- */

template <bool wide>
__global__ void scatter_rows(const float *x, int64_t x_stride, int64_t rows, int64_t columns,
                             float *const *to, int64_t shift) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  for (int64_t c = 4 * threadIdx.x; c < columns; c += 4 * blockDim.x) {
    const Four four = load_four<wide>(x + row * x_stride + c, columns - c);
    store_four<wide>(to[row] + shift + c, columns - c, four);
  }
}

}  // namespace

rp_status attend_rows(const rpi_attend_rows_args *args) {
  const rp_attention *const s = args->shape;
  if (args->rows == 0 || s->H == 0) return RP_OK;
  AttendRows a = {};
  a.position_bias = s->position_bias;
  a.position_bias_stride = s->position_bias_stride;
  a.H = s->H;
  a.sharers = sharers_of(s);
  a.D = s->D;
  a.rows = args->rows;
  a.left = s->window_left;
  const double scale = s->scale == 0 ? 1 / sqrt(static_cast<double>(s->D)) : s->scale;
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(s->softcap);
  a.q = args->q;
  a.q_stride = args->q_stride;
  a.shift = args->shift;
  a.to_value = args->to_value;
  a.out = args->out;
  a.out_stride = args->out_stride;
  bool wide = a.D % 4 == 0 && a.shift % 4 == 0 && a.to_value % 4 == 0 && is_wide(a.q, a.q_stride) &&
              is_wide(a.out, a.out_stride) && is_wide(a.position_bias, a.position_bias_stride);
  bool any = true; /* numbers are read one by one */
  RPI_TRY(parts_of(s->key, &a.key, &wide));
  RPI_TRY(parts_of(s->query, &a.query, &wide));
  RPI_TRY(parts_of(s->bias, &a.bias, &any));
  RPI_TRY(parts_of(s->value, &a.value, &wide));
  RPI_TRY(stage_lists(args, &a, &wide));
  RPI_TRY(stage(args->mean, args->rows, &a.mean));
  const int64_t heads = a.H < most_down ? a.H : most_down; /* a block goes on to others */
  const dim3 grid(static_cast<unsigned>(a.rows),
                  a.mean != nullptr ? 1u : static_cast<unsigned>(heads));
  const size_t shared = static_cast<size_t>(attend_slices(a.D) * ((a.D + 3) / 4)) * sizeof(Four);
  CUDA_TRY(launch(wide ? attend_row<true> : attend_row<false>,
                  {grid, dim3(attend_threads), shared, context().stream}, a));
  return RP_OK;
}

rp_status scatter(const rpi_scatter_args *args) {
  if (args->rows == 0 || args->columns == 0) return RP_OK;
  uintptr_t borders = 0;
  for (int64_t r = 0; r < args->rows; r++) borders |= reinterpret_cast<uintptr_t>(args->to[r]);
  float *const *to = nullptr;
  RPI_TRY(stage(args->to, args->rows, &to));
  const bool wide = borders % 16 == 0 && args->shift % 4 == 0 && is_wide(args->x, args->x_stride);
  const RowGrid g = row_grid(args->rows, args->columns);
  CUDA_TRY(launch(wide ? scatter_rows<true> : scatter_rows<false>,
                  {g.grid, g.block, 0, context().stream}, args->x, args->x_stride, args->rows,
                  args->columns, to, args->shift));
  return RP_OK;
}

}  // namespace rpc
