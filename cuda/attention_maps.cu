/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_maps.cu: rows of scores and probabilities, on demand, and the scores split by term: the
 * same call with all other terms left out.
 *
 * A block computes one row, a thread every so many of its keys, in f32 whatever the precision of
 * products is; nothing is stored but the row itself. Maps go to the host some rows at a time.
 */
#include "forward_pairs.h"
#include "ops/shown.h"
#include "reduce.h"

namespace rpc {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kNumbers = int64_t{1} << 22; /* of a map that are on the device at a time */

struct MapRows {
  Call call;
  int32_t batch, head, row, what;
  bool content; /* do queries meet keys? */
  float *to;
  int64_t to_stride;
};

/* (q_i + position_bias) . vector of the key bands at distance d. */
template <class Storage>
__device__ float key_band_score(const Call &call, const Sequence &seq, int head, int i, int d) {
  const Storage *const q = row_of<Storage>(call.q, seq.query_batch, head, seq.query_row + i);
  const float *const bias =
      call.position_bias ? call.position_bias + head * call.position_bias_stride : nullptr;
  float sum = 0;
  for (int p = 0; p < call.key.count; p++) {
    const int relation = part_row(call.key.parts[p], d);
    if (relation < 0) continue;
    sum += row_product(q, bias, table_row(call.key.parts[p], head, relation), call.D);
  }
  return call.scale * sum;
}

/* All of a score but edges, softcap and masks, in units of log 2. */
template <class Storage>
__device__ float whole_score(const MapRows &m, const Sequence &seq, int i, int j) {
  const Call &call = m.call;
  const int d = j - i - seq.start;
  float sum = 0;
  if (m.content) {
    const Storage *const q = row_of<Storage>(call.q, seq.query_batch, m.head, seq.query_row + i);
    const Storage *const k =
        row_of<Storage>(call.k, seq.key_batch, key_head(call, m.head), seq.key_row + j);
    for (int c = 0; c < call.D; c++) sum += number_of(q[c]) * number_of(k[c]);
    sum *= call.scale;
  }
  sum += key_band_score<Storage>(call, seq, m.head, i, d);
  if (call.bias.count > 0) sum += kLog2E * band_at(call.bias, m.head, d, 0);
  return sum + pair_score<Storage>(call, seq, m.batch, m.head, i, j, nullptr);
}

/* Scores in units of log 2 to probabilities. */
__device__ void show_probabilities(float *row, int keys) {
  __shared__ float shared[kThreads / 32];
  float top = -INFINITY, sum = 0;
  for (int j = static_cast<int>(threadIdx.x); j < keys; j += kThreads) top = fmaxf(top, row[j]);
  top = block_highest(top, shared);
  if (top == -INFINITY) top = 0; /* nothing seen, or NaN alone, which stays */
  for (int j = static_cast<int>(threadIdx.x); j < keys; j += kThreads) {
    row[j] = exp2_approx(row[j] - top);
    sum += row[j];
  }
  sum = block_sum(sum, shared);
  for (int j = static_cast<int>(threadIdx.x); j < keys; j += kThreads) {
    row[j] = sum == 0 ? 0 : row[j] / sum;
  }
}

template <class Storage>
__global__ void __launch_bounds__(kThreads) map_kernel(const __grid_constant__ MapRows m) {
  const Call &call = m.call;
  const Sequence seq = call.sequences[m.batch];
  const int i = m.row + static_cast<int>(blockIdx.x);
  float *const row = m.to + static_cast<int64_t>(blockIdx.x) * m.to_stride;
  for (int j = static_cast<int>(threadIdx.x); j < seq.keys; j += kThreads) {
    row[j] = in_sight(seq, i, j) ? whole_score<Storage>(m, seq, i, j) : 0.0f;
  }
  __syncthreads();
  if (threadIdx.x == 0) add_edges<Storage>(call, seq, m.head, i, 0, seq.keys, row, nullptr);
  __syncthreads();
  const bool whole = m.what == RP_SHOW_PROBABILITIES || m.what == RP_SHOW_SCORES;
  for (int j = static_cast<int>(threadIdx.x); j < seq.keys; j += kThreads) {
    const bool seen =
        in_sight(seq, i, j) && (!call.mask || mask_shows(call, seq, m.batch, m.head, i, j));
    float score = row[j];
    if (call.softcap != 0) score = soft_capped(call.softcap, score);
    if (m.what != RP_SHOW_PROBABILITIES) score *= kLn2;
    row[j] = seen ? score : whole ? -INFINITY : 0.0f;
  }
  __syncthreads(); /* other threads go on with these numbers */
  if (m.what == RP_SHOW_PROBABILITIES) show_probabilities(row, seq.keys);
}

/* Rows of a map from the device to where the host wants them. */
rp_status to_host(const rpi_attention_map_args *args, const float *from, int64_t first,
                  int64_t rows, int64_t keys) {
  float *const to = args->to + first * args->to_stride;
  const int64_t row_bytes = keys * static_cast<int64_t>(sizeof(float));
  if (args->to_stride == keys) return read(to, from, rows * row_bytes);
  for (int64_t r = 0; r < rows; r++) {
    RPI_TRY(read(to + r * args->to_stride, from + r * keys, row_bytes));
  }
  return RP_OK;
}

}  // namespace

/* bytes given: says that no workspace is needed, and does nothing else. */
rp_status attention_map(const rpi_attention_map_args *args, int64_t *bytes) {
  if (bytes) {
    *bytes = 0;
    return RP_OK;
  }
  if (args->rows == 0) return RP_OK;
  const rp_attention shown = rpi_shown_of(args->shape, args->what);
  const rp_placement placement = placement_of(&shown);
  const OnStream on(placement.stream);
  RPI_TRY(on.status());
  MapRows m = {};
  RPI_TRY(read_call(&shown, args->q, args->k, rp_rows{}, &m.call));
  m.batch = static_cast<int32_t>(args->b);
  m.head = static_cast<int32_t>(args->head);
  m.what = args->what;
  m.content = args->what <= RP_SHOW_CONTENT;
  const int64_t keys = sequence_of(args->shape, args->b).keys;
  if (keys == 0) return RP_OK;
  const int64_t together = rpi_min(rpi_max(kNumbers / keys, 1), args->rows);
  scratch_begin();
  RPI_TRY(scratch(together * keys, &m.to));
  m.to_stride = keys;
  for (int64_t done = 0; done < args->rows; done += together) {
    const int64_t rows = rpi_min(args->rows - done, together);
    m.row = static_cast<int32_t>(args->row + done);
    const Launch launched = {dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0,
                             context().stream};
    if (placement.element == RP_BF16) CUDA_TRY(launch(map_kernel<bf16>, launched, m));
    else CUDA_TRY(launch(map_kernel<float>, launched, m));
    RPI_TRY(to_host(args, m.to, done, rows, keys));
  }
  return RP_OK;
}

}  // namespace rpc
