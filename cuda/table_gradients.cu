/* SPDX-License-Identifier: Apache-2.0
 *
 * table_gradients.cu: where the sums of table gradients lie, and the pass that adds them up.
 */
#include "table_gradients.h"

namespace rpc {
namespace {

constexpr int64_t kMostNumbers = int64_t{1} << 24; /* of all blocks: 64 MiB, but for one a head */
constexpr int kThreads = 256;

/* The sums of one term: a thread has one number of the table, and adds the blocks in order. */
__global__ void __launch_bounds__(kThreads)
    add_term_kernel(Summed term, const float *lines, int64_t numbers, int32_t blocks, int32_t heads,
                    float factor) {
  const int64_t size = int64_t{term.rows} * term.width;
  const int64_t tables = term.head_stride != 0 ? heads : 1;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= tables * size) return;
  const int64_t table = at / size, number = at % size;
  const int64_t from = table * blocks, count = tables > 1 ? blocks : int64_t{heads} * blocks;
  float sum = 0;
  for (int64_t block = 0; block < count; block++) {
    sum += lines[(from + block) * numbers + term.offset + number];
  }
  float *const to = term.gradient + table * term.head_stride +
                    number / term.width * term.row_stride + number % term.width;
  *to += factor * sum;
}

/* The same for position_bias: a block has a head, a thread columns. */
__global__ void __launch_bounds__(kThreads)
    add_bias_kernel(const float *lines, int64_t numbers, int64_t offset, int32_t blocks,
                    int32_t width, float *gradient, int64_t stride, float factor) {
  const int64_t head = blockIdx.x;
  for (int c = static_cast<int>(threadIdx.x); c < width; c += kThreads) {
    float sum = 0;
    for (int64_t block = 0; block < blocks; block++) {
      sum += lines[(head * blocks + block) * numbers + offset + c];
    }
    gradient[head * stride + c] += factor * sum;
  }
}

const rp_relation *terms_of(const rp_attention *s, Kind kind) {
  const rp_relation *const all[] = {s->key, s->query, s->bias, s->value};
  return all[kind];
}

float *gradient_of(const rp_attention_gradients *g, Kind kind, int place) {
  if (!g) return nullptr;
  float *const *const all[] = {g->key, g->query, g->bias, g->value};
  return all[kind][place];
}

}  // namespace

Sums sums_of(const rp_attention *s, int64_t items, const rp_attention_gradients *g) {
  Sums sums = {};
  int32_t lookups = 0;
  for (const Kind kind : {KIND_KEY, KIND_QUERY, KIND_BIAS, KIND_VALUE}) {
    int32_t parts = 0;
    for (int place = 0; place < RP_TERMS; place++) {
      const rp_relation *const r = terms_of(s, kind) + place;
      if (!r->table) continue;
      const bool band = r->map == RP_MAP_BAND, looked_up = !band || r->query_positions;
      Summed *const term = &sums.terms[sums.count++];
      term->kind = kind;
      term->place = place;
      term->part = looked_up ? -1 : parts++;
      term->lookup = looked_up ? lookups++ : -1;
      term->rows = static_cast<int32_t>(rpi_table_rows(r));
      term->width = kind == KIND_BIAS ? 1 : static_cast<int32_t>(kind == KIND_VALUE ? s->Dv : s->D);
      term->offset = sums.numbers;
      term->gradient = gradient_of(g, kind, place);
      term->head_stride = r->head_stride;
      term->row_stride = r->row_stride;
      sums.numbers += int64_t{term->rows} * term->width;
      sums.wanted |= term->gradient != nullptr;
    }
  }
  sums.bias_offset = sums.numbers;
  if (s->position_bias) {
    sums.numbers += s->D;
    sums.bias_gradient = g ? g->position_bias : nullptr;
    sums.bias_stride = s->position_bias_stride;
    sums.wanted |= sums.bias_gradient != nullptr;
  }
  if (sums.numbers == 0 || s->H == 0) return sums;
  const int64_t fit = kMostNumbers / sums.numbers / s->H;
  const int64_t blocks = fit < items ? fit : items;
  sums.blocks = static_cast<int32_t>(blocks > 1 ? blocks : 1);
  return sums;
}

/* One term after the other: tied tables share their gradient. */
rp_status add_sums(const Sums &sums, int32_t heads, float factor) {
  cudaStream_t const stream = context().stream;
  if (heads == 0) return RP_OK;
  for (int i = 0; i < sums.count; i++) {
    const Summed &term = sums.terms[i];
    const int64_t tables = term.head_stride != 0 ? heads : 1;
    const int64_t size = tables * term.rows * term.width;
    if (!term.gradient || size == 0) continue;
    const bool scaled = term.kind == KIND_KEY || term.kind == KIND_QUERY;
    CUDA_TRY(launch(add_term_kernel, {dim3(blocks_for(size, kThreads)), dim3(kThreads), 0, stream},
                    term, sums.lines, sums.numbers, sums.blocks, heads, scaled ? factor : 1.0f));
  }
  if (!sums.bias_gradient) return RP_OK;
  const int32_t width = static_cast<int32_t>(sums.numbers - sums.bias_offset);
  CUDA_TRY(launch(add_bias_kernel, {dim3(static_cast<unsigned>(heads)), dim3(kThreads), 0, stream},
                  sums.lines, sums.numbers, sums.bias_offset, sums.blocks, width,
                  sums.bias_gradient, sums.bias_stride, factor));
  return RP_OK;
}

}  // namespace rpc
