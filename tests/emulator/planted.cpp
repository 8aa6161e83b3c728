/* SPDX-License-Identifier: Apache-2.0
 *
 * planted.cpp: kernels with a fault each, and what the emulator says of them.
 *
 *   planted NAME    runs one; prints its result, or the sentence of the fault
 *
 * tests/test_cuda_emulator.py runs them in the plain build, in that of the race checker and in that
 * of ASan and UBSan.
 */
#include <cstdio>
#include <cstring>

#include "ptx.h"

namespace {

using namespace rpc;

constexpr int threads = 64;

struct Smem {
  float numbers[threads];
  bf16 rows[32 * 72];
};
__device__ Smem &smem() { return *reinterpret_cast<Smem *>(dynamic_smem()); }

/* ---- barriers ---- */

__global__ void turn_round(float *x) {
  Smem &s = smem();
  s.numbers[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s.numbers[threads - 1 - threadIdx.x];
}
__global__ void missing_barrier(float *x) {
  Smem &s = smem();
  s.numbers[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s.numbers[threads - 1 - threadIdx.x];
}
__global__ void early_return(float *x) {
  if (threadIdx.x < 3) return;
  __syncthreads();
  x[0] = 1;
}
__global__ void divergent_barrier(float *x) {
  if (threadIdx.x < 32) __syncthreads();
  else __syncthreads();
  x[0] = 1;
}

__global__ void votes(float *x) {
  const int i = static_cast<int>(threadIdx.x);
  const bool one = __syncthreads_or(i == 41) != 0, none = __syncthreads_or(0) != 0;
  const bool other = __syncthreads_or(i == 3) != 0, last = __syncthreads_or(i < 0) != 0;
  x[i] = one && !none && other && !last;
}
__global__ void divergent_vote(float *x) {
  if (threadIdx.x < 32) x[0] = static_cast<float>(__syncthreads_or(1));
  else __syncthreads();
}

/* ---- warps ---- */

__global__ void lying_mask(float *x) { x[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0); }
__global__ void half_a_warp(float *x) {
  if (threadIdx.x % 2 != 0) x[0] = __shfl_sync(~0u, 1.0f, 0);
}
__global__ void two_operations(float *x) {
  if (threadIdx.x % 2 != 0) x[0] = __shfl_sync(~0u, 1.0f, 0);
  else __syncwarp();
}
__global__ void halves(float *x) {
  float v;
  if (threadIdx.x % 32 < 16) v = __shfl_xor_sync(0xffffu, static_cast<float>(threadIdx.x), 1);
  else v = __shfl_xor_sync(0xffff0000u, -1.0f, 1);
  x[threadIdx.x] = v;
}

/* ---- memory ---- */

__global__ void store_beyond_shared(float *x) {
  float *const past = reinterpret_cast<float *>(dynamic_smem() + sizeof(Smem));
  past[threadIdx.x % 4] = x[threadIdx.x];
}
__global__ void store_beyond_global(float *x) { x[threadIdx.x + 1] = 1; }
__global__ void store_beyond_member(float *x) {
  smem().numbers[threadIdx.x + static_cast<unsigned>(x[0])] = 1;
}
__global__ void read_of_nothing(float *x) { x[threadIdx.x] = smem().numbers[threadIdx.x]; }
__global__ void half_written(float *x, float *fresh) {
  if (threadIdx.x % 2 != 0) fresh[threadIdx.x] = 1;
  __syncthreads();
  x[threadIdx.x] = fresh[threadIdx.x];
}
__global__ void blocks_meet(float *x) { x[threadIdx.x] = static_cast<float>(blockIdx.x); }
__global__ void reads_the_host(const float *host, float *x) { x[threadIdx.x] = host[threadIdx.x]; }

/* ---- copies ---- */

__global__ void copied(float *x, bool waits) {
  Smem &s = smem();
  if (threadIdx.x < threads / 4) {
    cp_async16(s.numbers + 4 * threadIdx.x, x + 4 * threadIdx.x, true);
    cp_async_commit();
    if (waits) cp_async_wait<0>();
  }
  __syncthreads();
  x[threadIdx.x] = 2 * s.numbers[threadIdx.x];
}

/* ---- the twins of PTX ---- */

__global__ void unaligned(float *) {
  uint32_t r[4];
  ldmatrix_x4(r, smem().rows + threadIdx.x);
}

/* Rows of 64 or of 72 numbers: the padding spreads them over the banks. */
__global__ void load_rows(float *x, int stride) {
  Smem &s = smem();
  for (int i = static_cast<int>(threadIdx.x); i < 32 * 72; i += threads) {
    s.rows[i] = bf16(static_cast<float>(i % 128));
  }
  __syncthreads();
  uint32_t r[4];
  ldmatrix_x4(r, s.rows + static_cast<int>(threadIdx.x % 32) * stride);
  x[threadIdx.x] = __uint_as_float(r[threadIdx.x % 4]);
}

/* A[i][k] = (3 i + k) mod 7, B[k][j] = (k + 2 j) mod 5, and D their product: exact in bf16. */
__device__ float a_at(int i, int k) { return static_cast<float>((3 * i + k) % 7); }
__device__ float b_at(int k, int j) { return static_cast<float>((k + 2 * j) % 5); }
__global__ void multiply(float *x) {
  const int g = static_cast<int>(threadIdx.x % 32) / 4, t = static_cast<int>(threadIdx.x % 4) * 2;
  uint32_t a[4], b[2];
  float d[4] = {};
  for (int r = 0; r < 4; r++) {
    const int i = g + 8 * (r & 1), k = t + 8 * (r >> 1);
    a[r] = pack_bf16(a_at(i, k), a_at(i, k + 1));
  }
  for (int r = 0; r < 2; r++) b[r] = pack_bf16(b_at(t + 8 * r, g), b_at(t + 8 * r + 1, g));
  mma_bf16(d, a, b);
  float wrong = 0;
  for (int r = 0; r < 4; r++) {
    const int i = g + 8 * (r >> 1), j = t + (r & 1);
    float sum = 0;
    for (int k = 0; k < 16; k++) sum += a_at(i, k) * b_at(k, j);
    wrong += d[r] == sum ? 0.0f : 1.0f;
  }
  x[threadIdx.x] = wrong;
}

/* ---- order ---- */

/* The order in which threads pass: another one for another seed. */
__global__ void pass(float *x, int *passed) {
  const int at = atomicAdd(passed, 1);
  x[at % threads] = static_cast<float>(threadIdx.x);
}

/* ---- blocks that wait for each other ---- */

/* Of six: each makes 2 x + its number of every x, in the order of their numbers. */
__global__ void turns(float *x, int *count, bool waits, bool passes) {
  int *const shared = reinterpret_cast<int *>(dynamic_smem());
  if (threadIdx.x == 0) *shared = draw_number(count);
  __syncthreads();
  const int own = *shared;
  if (threadIdx.x < threads / 4) {
    if (waits) await_turn(count + 1, own, look_at_turn(count + 1));
    float four[4];
    get_four(four, x + 4 * threadIdx.x);
    for (float &number : four) number = 2 * number + static_cast<float>(own);
    put_four(x + 4 * threadIdx.x, four);
  }
  __syncthreads();
  if (threadIdx.x == 0 && passes) pass_turn(count + 1, own + 1);
}

/* ---- running ---- */

struct Run {
  float *x, *fresh;
  int *count;
  float host[threads];
};

cudaError_t copy(float *to, const float *from, cudaMemcpyKind kind) {
  return cudaMemcpy(to, from, threads * sizeof(float), kind);
}

cudaError_t start(const char *name, Run &run) {
  const Launch one = {dim3(1), dim3(threads), sizeof(Smem)};
  const auto is = [name](const char *other) { return std::strcmp(name, other) == 0; };
  const struct {
    const char *name;
    void (*kernel)(float *);
  } plain[] = {
      {"turn_round", turn_round},
      {"missing_barrier", missing_barrier},
      {"early_return", early_return},
      {"divergent_barrier", divergent_barrier},
      {"votes", votes},
      {"divergent_vote", divergent_vote},
      {"lying_mask", lying_mask},
      {"half_a_warp", half_a_warp},
      {"two_operations", two_operations},
      {"halves", halves},
      {"store_beyond_shared", store_beyond_shared},
      {"store_beyond_global", store_beyond_global},
      {"store_beyond_member", store_beyond_member},
      {"read_of_nothing", read_of_nothing},
      {"unaligned", unaligned},
      {"multiply", multiply},
  };
  for (const auto &p : plain) {
    if (is(p.name)) return launch(p.kernel, one, run.x);
  }
  if (is("blocks_meet")) return launch(blocks_meet, {dim3(2), dim3(threads)}, run.x);
  if (is("reads_the_host")) {
    const std::vector<float> outside(threads);
    return launch(reads_the_host, one, outside.data(), run.x);
  }
  if (is("half_written")) return launch(half_written, one, run.x, run.fresh);
  if (is("copied")) return launch(copied, one, run.x, true);
  if (is("missing_wait")) return launch(copied, one, run.x, false);
  if (is("load_rows_64")) return launch(load_rows, one, run.x, 64);
  if (is("load_rows_72")) return launch(load_rows, one, run.x, 72);
  if (is("copy_to_host")) return copy(run.x, run.fresh, cudaMemcpyDeviceToHost);
  if (is("copy_to_device")) return copy(run.host, run.host, cudaMemcpyHostToDevice);
  if (is("copy_within")) return copy(run.x, run.host, cudaMemcpyDeviceToDevice);
  if (is("copy_of_any_kind")) return copy(run.x, run.host, cudaMemcpyDefault);
  if (is("copy_of_nothing")) return copy(run.host, run.fresh, cudaMemcpyDeviceToHost);
  const Launch six = {dim3(6), dim3(threads), sizeof(Smem)};
  if (is("turns")) return launch(turns, six, run.x, run.count, true, true);
  if (is("turns_not_awaited")) return launch(turns, six, run.x, run.count, false, true);
  if (is("turns_not_passed")) return launch(turns, six, run.x, run.count, true, false);
  if (is("pass")) return launch(pass, one, run.x, run.count);
  if (is("wide_block")) return launch(turn_round, {dim3(1), dim3(1056), sizeof(Smem)}, run.x);
  if (is("empty_block")) return launch(turn_round, {dim3(1), dim3(0), sizeof(Smem)}, run.x);
  if (is("high_grid")) return launch(turn_round, {dim3(1, 70000), dim3(1)}, run.x);
  if (is("much_shared")) return launch(turn_round, {dim3(1), dim3(threads), 100 << 10}, run.x);
  if (is("too_much_shared")) return launch(turn_round, {dim3(1), dim3(threads), 228 << 10}, run.x);
  std::fprintf(stderr, "there is no %s\n", name);
  std::exit(2);
}

}  // namespace

int main(int, char **arguments) {
  const char *const name = arguments[1];
  Run run{};
  for (int i = 0; i < threads; i++) run.host[i] = static_cast<float>(i + 1);
  const int zero[2] = {};
  if (cudaMalloc(&run.x, sizeof run.host) != cudaSuccess ||
      cudaMalloc(&run.fresh, sizeof run.host) != cudaSuccess ||
      cudaMalloc(&run.count, sizeof zero) != cudaSuccess) {
    return 2;
  }
  cudaMemcpy(run.x, run.host, sizeof run.host, cudaMemcpyHostToDevice);
  cudaMemcpy(run.count, zero, sizeof zero, cudaMemcpyHostToDevice);
  if (std::strcmp(name, "the_host_reads") == 0) {
    std::printf("x[0] = %g\n", static_cast<double>(*static_cast<volatile float *>(run.x)));
    return 0;
  }
  const cudaError_t error = start(name, run);
  if (error != cudaSuccess) {
    std::printf("fault: %s\n", cudaGetErrorString(error));
    return 1;
  }
  cudaMemcpy(run.host, run.x, sizeof run.host, cudaMemcpyDeviceToHost);
  for (const float x : run.host) std::printf("%g ", static_cast<double>(x));
  std::printf("\nmma %llu, ldmatrix %llu, bank conflicts %llu, bytes copied %llu\n",
              static_cast<unsigned long long>(emu::stats.mma),
              static_cast<unsigned long long>(emu::stats.ldmatrix),
              static_cast<unsigned long long>(emu::stats.bank_conflicts),
              static_cast<unsigned long long>(emu::stats.async_bytes));
  cudaFree(run.x);
  cudaFree(run.fresh);
  cudaFree(run.count);
  return 0;
}
