/* SPDX-License-Identifier: Apache-2.0
 *
 * vectors.cpp: every function of cuda/ptx.h on fixed numbers, for a GPU and for its twin.
 *
 * Each line of the output is a name and what the function gave, as hexadecimal words. `make
 * gpu-check PART=test` compiles this by nvcc and keeps what a GPU said;
 * tests/test_cuda_vectors.py holds the twins to that.
 */
#include <cstdio>
#include <cstring>

#include "ptx.h"

namespace {

using namespace rpc;

constexpr int lanes = 32, words = 4;

/* Any bits, the same everywhere. */
__host__ __device__ uint32_t mixed(uint32_t x) {
  x = (x ^ 61) ^ (x >> 16);
  x *= 9;
  x ^= x >> 4;
  x *= 0x27d4eb2d;
  return x ^ x >> 15;
}
/* From -4 to 4, with 24 bits. */
__host__ __device__ float number(uint32_t x) {
  return static_cast<float>(static_cast<int>(mixed(x) >> 8) - (1 << 23)) / (1 << 21);
}
__device__ uint32_t bits_of(float x) { return __float_as_uint(x); }

__global__ void multiply(uint32_t *out) {
  const uint32_t lane = threadIdx.x;
  uint32_t a[4], b[2];
  float d[4];
  for (uint32_t r = 0; r < 4; r++) {
    a[r] = pack_bf16(number(lane * 64 + 2 * r), number(lane * 64 + 2 * r + 1));
    d[r] = number(lane * 64 + 32 + r);
  }
  for (uint32_t r = 0; r < 2; r++) {
    b[r] = pack_bf16(number(lane * 64 + 16 + 2 * r), number(lane * 64 + 17 + 2 * r));
  }
  mma_bf16(d, a, b);
  for (uint32_t r = 0; r < words; r++) out[lane * words + r] = bits_of(d[r]);
}

template <int matrices, bool transposed>
__global__ void load(uint32_t *out) {
  bf16 *const rows = reinterpret_cast<bf16 *>(dynamic_smem());
  const uint32_t lane = threadIdx.x;
  for (uint32_t i = lane; i < lanes * 8; i += lanes) {
    rows[i] = bf16(static_cast<float>(mixed(i) % 256));
  }
  __syncwarp();
  const bf16 *const row = rows + lane % (8 * matrices) * 8;
  uint32_t r[matrices];
  if constexpr (matrices == 4 && transposed) ldmatrix_x4_trans(r, row);
  else if constexpr (matrices == 4) ldmatrix_x4(r, row);
  else if constexpr (transposed) ldmatrix_x2_trans(r, row);
  else ldmatrix_x2(r, row);
  for (int q = 0; q < words; q++) {
    out[lane * words + static_cast<uint32_t>(q)] = q < matrices ? r[q % matrices] : 0;
  }
}

/* Every third lane copies nothing and gets zeros. */
__global__ void copy(const uint32_t *from, uint32_t *out) {
  uint32_t *const to = reinterpret_cast<uint32_t *>(dynamic_smem());
  const uint32_t lane = threadIdx.x;
  cp_async16(to + lane * words, from + lane * words, lane % 3 != 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  for (uint32_t r = 0; r < words; r++) out[lane * words + r] = to[(lanes - 1 - lane) * words + r];
}

/* Ties, the largest numbers, subnormal ones, infinities, NaN: then any bits. */
__global__ void pack(uint32_t *out) {
  const uint32_t special[] = {0x3f808000, 0x3f818000, 0x3f80ffff, 0x7f7fffff,
                              0x00000001, 0x807fffff, 0x7f800000, 0xff800000,
                              0x7fc00000, 0x00000000, 0x80000000, 0x3f7fffff};
  const uint32_t lane = threadIdx.x;
  for (uint32_t r = 0; r < words; r++) {
    const uint32_t i = lane * words + r;
    const uint32_t low = i < 12 ? special[i] : mixed(2 * i),
                   high = i < 12 ? mixed(i) : mixed(2 * i + 1);
    out[i] = pack_bf16(__uint_as_float(low), __uint_as_float(high));
  }
}

__global__ void power(uint32_t *out) {
  const float special[] = {0, 1, -1, 0.5f, -126, -127, -149, -200, 127.5f, 128, -1e30f, 1e30f};
  const uint32_t lane = threadIdx.x;
  for (uint32_t r = 0; r < words; r++) {
    const uint32_t i = lane * words + r;
    out[i] = bits_of(exp2_approx(i < 12 ? special[i] : 16 * number(i)));
  }
}

/* 32 lanes put numbers into lines of four, add others, and read what is there. */
__global__ void share(float *shared, uint32_t *out) {
  const uint32_t lane = threadIdx.x;
  float first[words], second[words], sum[words];
  for (uint32_t r = 0; r < words; r++) {
    first[r] = number(lane * words + r);
    second[r] = number(4000 + lane * words + r);
  }
  put_four(shared + lane * words, first);
  add_four(shared + lane * words, second);
  get_four(sum, shared + lane * words);
  for (uint32_t r = 0; r < words; r++) out[lane * words + r] = bits_of(sum[r]);
}

/* A lane passes its turn on as often as the number that it draws says, and once more, and waits for
 * it each time. */
__global__ void take_turns(int32_t *turns, uint32_t *out) {
  if (threadIdx.x == 0) turns[lanes] = 0;
  __syncwarp();
  const int32_t number = draw_number(turns + lanes);
  int32_t *const own = turns + number;
  pass_turn(own, 0);
  for (int32_t i = 0; i <= number; i++) {
    await_turn(own, i, look_at_turn(own));
    pass_turn(own, i + 1);
  }
  const auto now = static_cast<uint32_t>(look_at_turn(own));
  for (uint32_t r = 0; r < words; r++) out[static_cast<uint32_t>(number) * words + r] = now + r;
}

template <class... P, class... A>
bool show(const char *name, void (*kernel)(P...), uint32_t *out, A... arguments) {
  uint32_t said[lanes * words];
  const Launch one = {dim3(1), dim3(lanes), 2048};
  cudaMemset(out, 0, sizeof said);
  const cudaError_t error = launch(kernel, one, arguments..., out);
  if (error != cudaSuccess ||
      cudaMemcpy(said, out, sizeof said, cudaMemcpyDeviceToHost) != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", name, cudaGetErrorString(error));
    return false;
  }
  std::printf("%s", name);
  for (const uint32_t word : said) std::printf(" %08x", word);
  std::printf("\n");
  return true;
}

}  // namespace

int main() {
  uint32_t *from = nullptr, *out = nullptr, given[lanes * words];
  if (cudaMalloc(&from, sizeof given) != cudaSuccess ||
      cudaMalloc(&out, sizeof given) != cudaSuccess) {
    std::fprintf(stderr, "there is no GPU\n");
    return 2;
  }
  for (uint32_t i = 0; i < lanes * words; i++) given[i] = mixed(i + 1000);
  cudaMemcpy(from, given, sizeof given, cudaMemcpyHostToDevice);
  const bool all = show("mma_bf16", multiply, out) && show("ldmatrix_x4", load<4, false>, out) &&
                   show("ldmatrix_x4_trans", load<4, true>, out) &&
                   show("ldmatrix_x2", load<2, false>, out) &&
                   show("ldmatrix_x2_trans", load<2, true>, out) &&
                   show("cp_async16", copy, out, static_cast<const uint32_t *>(from)) &&
                   show("pack_bf16", pack, out) && show("exp2_approx", power, out) &&
                   show("add_four", share, out, reinterpret_cast<float *>(from)) &&
                   show("pass_turn", take_turns, out, reinterpret_cast<int32_t *>(from));
  cudaFree(from);
  cudaFree(out);
  return all ? 0 : 1;
}
