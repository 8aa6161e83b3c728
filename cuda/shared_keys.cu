/* SPDX-License-Identifier: Apache-2.0
 *
 * shared_keys.cu: what shared_keys.h says.
 */
#include "shared_keys.h"

#include "tile.h"

namespace rpc {
namespace {

constexpr int kThreads = 256;

int64_t element_of(const rp_attention *s) { return placement_of(s).element == RP_BF16 ? 2 : 4; }

/* Sequences and rows of the arrays of keys: packed ones are of one sequence. */
struct KeyRows {
  int64_t batches, rows;
};
KeyRows key_rows_of(const rp_attention *s) {
  const int64_t *const offsets = s->key_offsets ? s->key_offsets : s->offsets;
  return offsets ? KeyRows{1, offsets[s->B]} : KeyRows{s->B, s->M};
}

int64_t bytes_of(const rp_attention *s, int64_t width) {
  const KeyRows keys = key_rows_of(s);
  return rounded(keys.batches * keys.rows * s->H * width * element_of(s));
}

/* [batches][rows][H][width] */
rp_rows_out rows_at(const rp_attention *s, unsigned char *memory, int64_t width) {
  return {reinterpret_cast<float *>(memory), key_rows_of(s).rows * s->H * width, width,
          s->H * width};
}

/* A thread has a number of the sum. */
template <class Storage>
__global__ void __launch_bounds__(kThreads)
    add_kernel(rp_rows_out from, rp_rows_out to, int64_t numbers, int64_t rows, int32_t heads,
               int32_t sharers, int32_t width) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= numbers) return;
  const int64_t column = at % width, head = at / width % heads;
  const int64_t row = at / width / heads, batch = row / rows;
  float sum = 0;
  for (int x = 0; x < sharers; x++) {
    const Storage *const own = row_of<Storage>(from, batch, head * sharers + x, row % rows);
    sum += number_of(own[column]);
  }
  put_number(row_of<Storage>(to, batch, head, row % rows)[column], sum);
}

rp_status add(const rp_attention *s, const rp_rows_out &from, const rp_rows_out &to,
              int64_t width) {
  const KeyRows keys = key_rows_of(s);
  const int64_t numbers = keys.batches * keys.rows * s->key_heads * width;
  if (numbers == 0) return RP_OK;
  const unsigned blocks = blocks_for(numbers, kThreads);
  CUDA_TRY(launch(element_of(s) == 2 ? add_kernel<bf16> : add_kernel<float>,
                  {dim3(blocks), dim3(kThreads), 0, context().stream}, from, to, numbers, keys.rows,
                  static_cast<int32_t>(s->key_heads), sharers_of(s), static_cast<int32_t>(width)));
  return RP_OK;
}

}  // namespace

int64_t shared_keys_bytes(const rp_attention *s) {
  return sharers_of(s) == 1 ? 0 : bytes_of(s, s->D) + bytes_of(s, s->Dv);
}

void own_gradients(const rp_attention *s, unsigned char *memory, Backward *c) {
  if (sharers_of(s) == 1) return;
  c->dk = rows_at(s, memory, s->D);
  c->dv = rows_at(s, memory + bytes_of(s, s->D), s->Dv);
}

rp_status add_shared_keys(const rp_attention *s, const Backward &c,
                          const rp_attention_gradients *g) {
  if (sharers_of(s) == 1) return RP_OK;
  RPI_TRY(add(s, c.dk, g->k, s->D));
  return add(s, c.dv, g->v, s->Dv);
}

}  // namespace rpc
