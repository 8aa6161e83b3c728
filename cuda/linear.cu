/* SPDX-License-Identifier: Apache-2.0
 *
 * linear.cu: the matrix product, by cuBLAS, and the way back of a linear layer, two of them.
 *
 * cuBLAS counts by columns: what we store by rows is the transposed matrix to it. So it computes
 *
 *   C = A . B   as   C' = B' . A'
 *
 * with our B as its first operand, plain where ours is plain, and our strides as its own.
 *
 * A bias of packed operands is part of the product: behind A stand three columns of ones, behind B
 * the bias, as three numbers of bf16 whose sum it is. To write it into C first, and add the
 * product, would move C twice more; that is done where operands are not packed, or lie otherwise.
 *
 * Where operands are to be rounded to bf16, they are packed as such first, rows on borders of 16
 * bytes: each is read and written once, which is little beside a product by tensor cores that
 * finds its operands as it likes them; norms, activations and attention leave their results so
 * (rpi_operand), and a result that only products read is bf16 from the start (c_element).
 * A model's weights are packed once a call, all at once (round_weights), for the way back too,
 * which packs dy once for both products, unless it is bf16 already, and adds up its columns as it
 * passes. Sums are f32 in any case, and never TF32.
 */
#include "blas.h"
#include "ops/linear.h"
#include "rounded.h"

namespace rpc {
namespace {

constexpr int pack_threads = 256, pack_ahead = 4; /* quads that a thread has on their way */
constexpr int most_packs = 48;                    /* of a launch: parameters take 4 KB at most */

/* One operand as stored: `rows` of `columns` numbers. */
struct Operand {
  const void *data;
  int64_t rows, columns, stride;
  cudaDataType type;
};

cudaDataType type_of(int element) { return element == RP_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

/* Every row of C becomes the bias, or has it added. */
template <bool wide>
__global__ void bias_rows(const float *bias, float *c, int64_t c_stride, int64_t rows,
                          int64_t columns, bool accumulate) {
  const int64_t row = row_of_thread();
  if (row >= rows) return;
  for (int64_t at = 4 * threadIdx.x; at < columns; at += 4 * blockDim.x) {
    Four sum = {{0, 0, 0, 0}};
    if (bias != nullptr) sum = load_four<wide>(bias + at, columns - at);
    float *const to = c + row * c_stride + at;
    if (accumulate) {
      const Four before = load_four<wide>(to, columns - at);
#pragma unroll
      for (int i = 0; i < 4; i++) sum.x[i] += before.x[i];
    }
    store_four<wide>(to, columns - at, sum);
  }
}

/* to[rows][to_stride] = x rounded to bf16; what is beyond the columns becomes 0, but for a bias. */
struct Pack {
  const float *x;
  int64_t stride, rows, columns;
  bf16 *to;
  int64_t to_stride;
  unsigned begin, blocks; /* of pack_threads: several rows, or some that threads go along */
  int across;             /* 2 to this power threads have a row, what stands behind it at last */
  bool wide;
  const float *behind; /* [rows], whose parts follow each row's columns; or NULL */
  bool ones;           /* ones follow */
};

/* Their sum is x, and each is one of bf16 without rounding. */
__device__ float part_of(float x, int part) {
  float cut = 0;
  for (int n = 0; n <= part; n++) {
    x -= cut;
    cut = __uint_as_float(__float_as_uint(x) & 0xffff0000u);
  }
  return cut;
}

/* What stands `left` numbers behind the start of this quad. */
__device__ void put_behind(const Pack &p, int64_t row, int64_t left, Four &four) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t part = i - left;
    if (part < 0 || part >= bias_parts) continue;
    four.x[i] = p.ones ? 1 : part_of(p.behind[row], static_cast<int>(part));
  }
}

__device__ void pack_block(const Pack &p) {
  const unsigned down = pack_threads >> p.across, apart = 4u << p.across;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x - p.begin) * pack_ahead * down + (threadIdx.x >> p.across);
  for (int64_t at = 4 * threadIdx.x & (apart - 1); at < p.to_stride; at += apart) {
    const int64_t left = p.columns - at;
    Four ahead[pack_ahead];
#pragma unroll
    for (int m = 0; m < pack_ahead; m++) {
      const int64_t row = first + m * down, there = row < p.rows ? left : 0;
      const float *const x = p.x + row * p.stride + at;
      ahead[m] = p.wide ? load_four<true>(x, there) : load_four<false>(x, there);
    }
#pragma unroll
    for (int m = 0; m < pack_ahead; m++) {
      const int64_t row = first + m * down;
      if (row >= p.rows) break;
      if (left < 4 && (p.ones || p.behind != nullptr)) put_behind(p, row, left, ahead[m]);
      store_rounded(p.to + row * p.to_stride + at, ahead[m]);
    }
  }
}

/* The blocks of one, then those of the other. */
__global__ void __launch_bounds__(pack_threads) pack_rows(Pack first, Pack second) {
  if (blockIdx.x < second.begin) pack_block(first);
  else pack_block(second);
}

/* The blocks of one after the other. */
struct Packs {
  Pack of[most_packs];
  int count;
};
static_assert(sizeof(Packs) <= 4096);

__global__ void __launch_bounds__(pack_threads) pack_all(const __grid_constant__ Packs packs) {
  int first = 0, last = packs.count - 1;
  while (first < last) {
    const int middle = (first + last + 1) / 2;
    if (packs.of[middle].begin <= blockIdx.x) first = middle;
    else last = middle - 1;
  }
  pack_block(packs.of[first]);
}

rp_status start_with_bias(const rpi_gemm_args &g) {
  const RowGrid grid = row_grid(g.rows, g.columns);
  const bool wide = is_wide(g.bias, 0) && is_wide(g.c, g.c_stride);
  CUDA_TRY(launch(wide ? bias_rows<true> : bias_rows<false>,
                  {grid.grid, grid.block, 0, context().stream}, g.bias, g.c, g.c_stride, g.rows,
                  g.columns, g.accumulate));
  return RP_OK;
}

Operand a_of(const rpi_gemm_args &g) {
  return {g.a, g.transpose_a ? g.inner : g.rows, g.transpose_a ? g.rows : g.inner, g.a_stride,
          CUDA_R_32F};
}

Operand b_of(const rpi_gemm_args &g) {
  return {g.b, g.transpose_b ? g.columns : g.inner, g.transpose_b ? g.inner : g.columns, g.b_stride,
          CUDA_R_32F};
}

/* The operand as it lies rounded at `at`, with `more` columns. */
Operand rounded_at(const Operand &x, int more, const void *at) {
  const int64_t stride = rounded_stride(x.columns + more);
  return {at, x.rows, more != 0 ? stride : x.columns, stride, CUDA_R_16BF};
}

/* The operand becomes one in bf16, in `to` or else in scratch, with `more` columns; how to fill
 * that. */
rp_status begin_pack(Operand *x, int more, void *to, Pack *p) {
  p->x = static_cast<const float *>(x->data);
  p->stride = x->stride;
  p->rows = x->rows;
  p->columns = x->columns;
  p->to_stride = rounded_stride(x->columns + more);
  p->wide = is_wide(p->x, p->stride);
  while (4 << p->across < p->columns && 1 << p->across < pack_threads) p->across++;
  const int64_t down = pack_ahead * (pack_threads >> p->across);
  p->blocks = blocks_for(p->rows, down);
  p->to = static_cast<bf16 *>(to);
  if (to == nullptr) RPI_TRY(scratch(p->rows * p->to_stride, &p->to));
  *x = rounded_at(*x, more, p->to);
  return RP_OK;
}

/* What is to be packed, of one operand or two, by one launch. */
rp_status launch_packs(const Pack &first, Pack second) {
  const unsigned blocks = first.blocks + second.blocks;
  second.begin = first.blocks;
  if (blocks == 0) return RP_OK;
  CUDA_TRY(
      launch(pack_rows, {dim3(blocks), dim3(pack_threads), 0, context().stream}, first, second));
  return RP_OK;
}

rp_status pack(Operand *x, Operand *y = nullptr) {
  Pack first = {}, second = {};
  RPI_TRY(begin_pack(x, 0, nullptr, &first));
  if (y != nullptr) RPI_TRY(begin_pack(y, 0, nullptr, &second));
  return launch_packs(first, second);
}

/* Those of a product, as far as they are not there; with a bias they are those of one that has it,
 * and their columns are more. */
rp_status pack_product(const rpi_gemm_args &g, const float *bias, Operand *a, Operand *b) {
  const int more = bias != nullptr ? bias_parts : 0;
  Pack first = {}, second = {};
  first.ones = bias != nullptr;
  second.behind = bias;
  if (g.given) *a = rounded_at(*a, more, g.kept);
  else RPI_TRY(begin_pack(a, more, g.kept, &first));
  if (g.rounded != nullptr) *b = rounded_at(*b, more, g.rounded);
  else RPI_TRY(begin_pack(b, more, nullptr, &second));
  return launch_packs(first, second);
}

/* One, unless it is packed already; and the sums of its columns are added to `sum`. */
rp_status pack_and_sum(Operand *x, float *sum) {
  if (x->type == CUDA_R_16BF) {
    const rpi_column_sums_args sums = {x->rows, x->columns, static_cast<const float *>(x->data),
                                       x->stride, sum};
    return sum_rounded(&sums);
  }
  Pack p = {};
  RPI_TRY(begin_pack(x, 0, nullptr, &p));
  const rpi_column_sums_args sums = {p.rows, p.columns, p.x, p.stride, sum};
  return sum_and_round(&sums, p.to);
}

/* The product of operands that are what they shall be. */
rp_status multiply(const rpi_gemm_args &g, const Operand &a, const Operand &b) {
  cublasHandle_t handle = nullptr;
  RPI_TRY(blas_handle(&handle));
  const float one = 1, before = g.accumulate || g.bias != nullptr ? 1.0f : 0.0f;
  CUBLAS_TRY(cublasGemmEx_64(
      handle, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
      g.columns, g.rows, g.inner, &one, b.data, b.type, b.stride, a.data, a.type, a.stride, &before,
      g.c, type_of(g.c_element), g.c_stride, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  return RP_OK;
}

}  // namespace

rp_status round_weights(const rpi_rounding *list, int64_t count) {
  for (int64_t i = 0; i < count;) {
    Packs packs = {};
    unsigned blocks = 0;
    for (; i < count && packs.count < most_packs; i++) {
      const rpi_rounding &r = list[i];
      if (r.to == nullptr) continue;
      Operand weight = {r.weight, r.out, r.in, r.in, CUDA_R_32F};
      Pack &p = packs.of[packs.count++];
      p.behind = r.bias;
      p.begin = blocks;
      RPI_TRY(begin_pack(&weight, r.bias != nullptr ? bias_parts : 0, r.to, &p));
      blocks += p.blocks;
    }
    if (blocks == 0) continue;
    CUDA_TRY(launch(pack_all, {dim3(blocks), dim3(pack_threads), 0, context().stream}, packs));
  }
  return RP_OK;
}

rp_status gemm(const rpi_gemm_args *args) {
  rpi_gemm_args g = *args;
  if (g.rows == 0 || g.columns == 0) return RP_OK;
  const bool packed = g.precision == RP_BF16 && g.inner != 0;
  const bool within =
      packed && g.bias != nullptr && !g.transpose_a && g.transpose_b && !g.accumulate;
  if (!within && (g.bias != nullptr || (g.inner == 0 && !g.accumulate))) {
    RPI_TRY(start_with_bias(g));
  }
  if (g.inner == 0) return RP_OK;
  Operand a = a_of(g), b = b_of(g);
  if (packed) {
    scratch_begin();
    RPI_TRY(pack_product(g, within ? g.bias : nullptr, &a, &b));
  }
  if (within) {
    g.inner = a.columns;
    g.bias = nullptr;
  }
  return multiply(g, a, b);
}

rp_status linear_backward(const rpi_linear_backward_args *args) {
  const rpi_linear *const l = &args->forward;
  if (l->rows == 0) return RP_OK;
  const rpi_gemm_args to_weight =
      rpi_linear_to_weight(l, args->dy, args->dy_stride, args->dweight, args->precision);
  const rpi_gemm_args to_input = rpi_linear_to_input(l, args->dy, args->dy_stride, args->dx,
                                                     args->dx_element, args->add, args->precision);
  Operand dy = a_of(to_weight), x = b_of(to_weight), weight = b_of(to_input);
  const bool to_x = args->dx != nullptr;
  scratch_begin();
  if (args->precision == RP_BF16) {
    dy.type = type_of(args->dy_element);
    if (args->dbias != nullptr) RPI_TRY(pack_and_sum(&dy, args->dbias));
    else if (dy.type == CUDA_R_32F) RPI_TRY(pack(&dy));
    const int more = l->bias != nullptr ? bias_parts : 0;
    Operand *const other = to_x && l->rounded == nullptr ? &weight : nullptr;
    if (l->rounded != nullptr) weight = rounded_at(weight, more, l->rounded);
    if (l->kept != nullptr) x = rounded_at(x, more, l->kept);
    if (l->kept == nullptr) RPI_TRY(pack(&x, other));
    else if (other != nullptr) RPI_TRY(pack(other));
  } else if (args->dbias != nullptr) {
    const rpi_column_sums_args sums = {l->rows, l->out, args->dy, args->dy_stride, args->dbias};
    RPI_TRY(sum_and_round(&sums, nullptr));
  }
  RPI_TRY(multiply(to_weight, dy, x));
  return to_x ? multiply(to_input, dy, weight) : RP_OK;
}

}  // namespace rpc
