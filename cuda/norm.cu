/* SPDX-License-Identifier: Apache-2.0
 *
 * norm.cu: layer normalisation of every row, of a stream after what a layer adds to it,
 *
 *   x = base + keep(x),   xhat = (x - mean) * rstd,   y = xhat * gain + shift
 *
 * the variance by a second pass over the row. A row of up to norm_narrow numbers stays in
 * registers, of a warp, or of two where it has more than 512; a block has a wider one, which then
 * lies in the first-level cache. Backward, with g = dy * gain and means over the columns,
 *
 *   dx = dstream + rstd * (g - mean(g) - xhat * mean(g * xhat)),   df = keep(dx)
 *   dgain, dshift, dbias += sums over rows of dy * xhat, of dy, and of df
 *
 * A piece is every so many'th row, so that all pieces go through the rows together, from the last
 * to the first (four.h). It has sums of its own, in the workspace [pieces][3][columns], which are
 * added in the order of the pieces. dx may be dy or dstream, y base, df dy: every number is read
 * before its place is written. What is added to wider rows is residual.cu's.
 *
 * Where a sum follows a product, it is written whether the two are one operation: a compiler that
 * chooses does so for each kernel, and the bits would depend on where arrays begin.
 */
#include "packing.h"
#include "reduce.h"
#include "residual.h"
#include "rounded.h"

namespace rpc {
namespace {

constexpr int64_t norm_narrow = 1024; /* columns that stay in registers */
constexpr int norm_threads = 256;     /* of a block */
constexpr int norm_warps = norm_threads / 32;
constexpr int64_t norm_most = 256; /* pieces of backward, of about norm_rows rows or more */
constexpr int64_t norm_rows = 16;
constexpr int norm_sums = 3; /* of a column: dgain, dshift, dbias */

/* Of a whole block of norm_threads. */
__device__ inline float team_sum(float x) {
  __shared__ float shared[norm_warps];
  return block_sum(x, shared);
}

__device__ inline float four_sum(const Four &four) {
  return (four.x[0] + four.x[1]) + (four.x[2] + four.x[3]);
}

__device__ inline float mean_over(float sum, int64_t columns) {
  return static_cast<float>(static_cast<double>(sum) / static_cast<double>(columns));
}

/* ---- rows that `warps` warps of a block have together -------------------------
 *
 * whole: a row fills the quads of its threads, all of 16 bytes. So nothing asks how many numbers
 * are there, and all loads of a row are on their way before one is waited for.
 */

/* Where a thread's quad q of a row begins: the warps lie side by side, 128 columns each. */
template <int warps>
__device__ inline int64_t shared_column(int q) {
  const int64_t first = 128 * (threadIdx.y % warps) + 4 * threadIdx.x;
  return first + 128 * warps * q;
}

template <bool whole>
__device__ inline int64_t count_of(int64_t columns, int64_t c) {
  return whole ? 4 : columns - c;
}

template <int quads, int warps, bool wide, bool whole>
__device__ inline Strip<quads> load_shared(const float *from, int64_t columns) {
  Strip<quads> strip;
#pragma unroll
  for (int q = 0; q < quads; q++) {
    const int64_t c = shared_column<warps>(q);
    strip.quad[q] = load_four<wide>(from + c, count_of<whole>(columns, c));
  }
  return strip;
}

template <int warps>
__device__ inline StripWords shared_words(const Packing &p, int64_t row) {
  if (p.dropout.threshold == 0) return {};
  return strip_words<warps>(p, place_of(p, row), shared_column<warps>(0) - 4 * threadIdx.x);
}

/* The sums of a row's warps, to all of their threads. turn: 0 and 1 by turns, so that what is read
 * is not yet written again. */
template <int warps, int count>
__device__ inline void sum_shared(float (&sums)[count], int turn) {
  for (float &sum : sums) sum = warp_sum(sum);
  if constexpr (warps > 1) {
    __shared__ float shared[2][norm_warps][count];
    const int own = static_cast<int>(threadIdx.y), first = own / warps * warps;
#pragma unroll
    for (int i = 0; i < count; i++) {
      if (threadIdx.x == 0) shared[turn][own][i] = sums[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < count; i++) {
      sums[i] = 0;
#pragma unroll
      for (int warp = 0; warp < warps; warp++) sums[i] += shared[turn][first + warp][i];
    }
  }
}

/* ---- forward ------------------------------------------------------------------ */

struct NormRows {
  int64_t rows, columns;
  float *x;
  rpi_base base;
  const float *gain, *shift; /* shift: or NULL */
  double epsilon;
  float *y, *stats; /* or NULL, each */
  RoundedRows rounded;
  rpi_note note;
  Packing packing;
};

/* 1 / sqrt(variance + epsilon), of the sum of the squares. */
__device__ inline float rstd_of(const NormRows &a, float squares) {
  const double variance = static_cast<double>(squares) / static_cast<double>(a.columns);
  return static_cast<float>(1 / sqrt(variance + a.epsilon));
}

/* sum of (x - mean)^2 of the first `count` of them */
__device__ inline float four_squares(Four d, float mean, int64_t count) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    d.x[i] -= mean;
    d.x[i] = i < count ? __fmul_rn(d.x[i], d.x[i]) : 0.0f;
  }
  return four_sum(d);
}

/* What a thread knows of its row. */
struct NormRow {
  float mean, rstd;
  bool fine_x, fine_y; /* all that was finite so far */
};

/* y of the quad at column c, of which `count` numbers are there. inner: another one follows. */
template <bool wide>
__device__ inline void put_normed(const NormRows &a, int64_t row, int64_t c, int64_t count,
                                  bool inner, const Four &x, NormRow *known) {
  const Four gain = load_four<wide>(a.gain + c, count);
  Four shift = {{0, 0, 0, 0}};
  if (a.shift != nullptr) shift = load_four<wide>(a.shift + c, count);
  const Four y = normed_four(x, known->mean, known->rstd, gain, shift);
  known->fine_x = known->fine_x && four_finite(x, count);
  known->fine_y = known->fine_y && four_finite(y, count);
  if (a.y != nullptr) store_four<wide>(a.y + row * a.columns + c, count, y);
  if (a.rounded.to == nullptr) return;
  if (inner) store_rounded(a.rounded.to + row * a.rounded.stride + c, y);
  else put_rounded(a.rounded, row, c, y);
}

template <int warps>
__device__ inline void put_known(const NormRows &a, int64_t row, const NormRow &known) {
  if (!known.fine_x || !known.fine_y) note_code(a.note, known.fine_x ? a.note.out : a.note.in);
  if (a.stats == nullptr || threadIdx.x != 0 || threadIdx.y % warps != 0) return;
  a.stats[2 * row] = known.mean;
  a.stats[2 * row + 1] = known.rstd;
}

/* Adds what the stream is to get, and leaves the sum there. */
template <int quads, int warps, bool wide, bool whole>
__device__ inline void add_row(const NormRows &a, int64_t row, Strip<quads> *x) {
  const int64_t start = row * a.columns;
  const Strip<quads> base = load_shared<quads, warps, wide, whole>(a.base.x + start, a.columns);
  const BaseRow known = base_row(a.base, row);
  const StripWords words = shared_words<warps>(a.packing, row);
#pragma unroll
  for (int q = 0; q < quads; q++) {
    Four &own = x->quad[q];
    if (a.packing.dropout.threshold != 0) keep_by_word(a.packing.dropout, words.of[q], own);
    const int64_t c = shared_column<warps>(q), count = count_of<whole>(a.columns, c);
    add_four(own, base_four<wide>(a.base, known, c, count, base.quad[q]));
    store_four<wide>(a.x + start + c, count, own);
  }
}

/* What is added was written from the first row to the last. */
template <int quads, int warps, bool wide, bool whole, bool adds>
__global__ void norm_narrow_row(NormRows a) {
  constexpr int teams = norm_warps / warps;
  const int64_t team = static_cast<int64_t>(blockIdx.x) * teams + threadIdx.y / warps;
  const int64_t row = adds ? a.rows - 1 - team : team, columns = a.columns;
  const bool there = team < a.rows; /* the same for a whole warp */
  if (warps == 1 && !there) return;
  Strip<quads> x = {};
  if (there) x = load_shared<quads, warps, wide, whole>(a.x + row * columns, columns);
  if (there && adds) add_row<quads, warps, wide, whole>(a, row, &x);
  float sum[] = {0};
#pragma unroll
  for (int q = 0; q < quads; q++) sum[0] += four_sum(x.quad[q]);
  sum_shared<warps>(sum, 0);
  NormRow known = {mean_over(sum[0], columns), 0, true, true};
  sum[0] = 0;
#pragma unroll
  for (int q = 0; q < quads; q++) {
    const int64_t count = count_of<whole>(columns, shared_column<warps>(q));
    sum[0] += four_squares(x.quad[q], known.mean, count);
  }
  sum_shared<warps>(sum, 1);
  if (!there) return;
  known.rstd = rstd_of(a, sum[0]);
#pragma unroll
  for (int q = 0; q < quads; q++) {
    const int64_t c = shared_column<warps>(q);
    const bool inner = whole && q < quads - 1;
    put_normed<wide>(a, row, c, count_of<whole>(columns, c), inner, x.quad[q], &known);
  }
  put_known<warps>(a, row, known);
}

/* Of wider rows a block has one, and reads it three times. */
template <bool wide>
__global__ void norm_broad_row(NormRows a) {
  constexpr int team = norm_threads;
  const int64_t row = blockIdx.x, columns = a.columns;
  const float *const x = a.x + row * columns;
  float sum = 0;
  for (int64_t c = 4 * threadIdx.x; c < columns; c += 4 * team) {
    sum += four_sum(load_four<wide>(x + c, columns - c));
  }
  NormRow known = {mean_over(team_sum(sum), columns), 0, true, true};
  sum = 0;
  for (int64_t c = 4 * threadIdx.x; c < columns; c += 4 * team) {
    sum += four_squares(load_four<wide>(x + c, columns - c), known.mean, columns - c);
  }
  known.rstd = rstd_of(a, team_sum(sum));
  for (int64_t c = 4 * threadIdx.x; c < columns; c += 4 * team) {
    put_normed<wide>(a, row, c, columns - c, false, load_four<wide>(x + c, columns - c), &known);
  }
  put_known<1>(a, row, known);
}

template <int quads, int warps, bool wide, bool adds>
rp_status launch_quads(const NormRows &a) {
  auto kernel = norm_narrow_row<quads, warps, wide, false, adds>;
  if (wide && a.columns == 128 * quads * warps) {
    kernel = norm_narrow_row<quads, warps, wide, wide, adds>;
  }
  const RowGrid g = strip_grid(warps * a.rows);
  CUDA_TRY(launch(kernel, {g.grid, g.block, 0, context().stream}, a));
  return RP_OK;
}

template <bool wide, bool adds>
rp_status launch_narrow(const NormRows &a) {
  if (a.columns <= 128) return launch_quads<1, 1, wide, adds>(a);
  if (a.columns <= 256) return launch_quads<2, 1, wide, adds>(a);
  if (a.columns <= 512) return launch_quads<4, 1, wide, adds>(a);
  return launch_quads<4, 2, wide, adds>(a);
}

template <bool wide>
rp_status norm_of(const NormRows &a) {
  if (a.columns <= norm_narrow) {
    return a.base.x != nullptr ? launch_narrow<wide, true>(a) : launch_narrow<wide, false>(a);
  }
  CUDA_TRY(launch(norm_broad_row<wide>,
                  {dim3(static_cast<unsigned>(a.rows)), dim3(norm_threads), 0, context().stream},
                  a));
  return RP_OK;
}

/* ---- backward ----------------------------------------------------------------- */

struct NormBackwardRows {
  int64_t rows, columns;
  const float *x, *gain, *stats, *dy, *dstream; /* dstream: or NULL */
  float *dx, *partials;
  void *df;           /* or NULL */
  bool rounded, sums; /* df is bf16; dbias is wanted */
  Packing packing;    /* of df */
};

/* Sums over a block's rows in shared memory: of each thread's quads, 128 columns of a warp. */
template <int quads>
struct BlockSums {
  alignas(16) float of[quads][norm_warps][128];

  __device__ float *own(int q) { return &of[q][threadIdx.y][4 * threadIdx.x]; }
};

/* Adds up, in their order, the warps that have the same columns: the piece's sums of one kind.
 * column: of the block's first. */
template <int quads, int warps>
__device__ inline void put_partials(const NormBackwardRows &a, int64_t piece, int kind,
                                    int64_t column, const BlockSums<quads> &sums) {
  constexpr int most = 128 * quads * warps;
  float *const to = a.partials + (norm_sums * piece + kind) * a.columns + column;
  const int count = static_cast<int>(a.columns - column < most ? a.columns - column : most);
  __syncthreads();
  for (int c = static_cast<int>(32 * threadIdx.y + threadIdx.x); c < count; c += norm_threads) {
    const int strip = c / 128;
    float sum = 0;
    for (int warp = strip % warps; warp < norm_warps; warp += warps) {
      sum += sums.of[strip / warps][warp][c % 128];
    }
    to[c] = sum;
  }
}

/* To a thread's own place in shared memory. */
__device__ inline void add_shared(float *to, const Four &four) {
  Four sum = load_four<true>(to, 4);
  add_four(sum, four);
  store_four<true>(to, 4, sum);
}

__device__ inline float inner_of(float g, float xhat, float mean_g, float mean_gx) {
  return fmaf(-xhat, mean_gx, g - mean_g);
}

/* df of a quad of dx, as it is read again. */
template <bool wide>
__device__ inline Four put_added(const NormBackwardRows &a, int64_t at, int64_t count,
                                 uint32_t word, Four d) {
  if (a.packing.dropout.threshold != 0) keep_by_word(a.packing.dropout, word, d);
  if (a.rounded) {
    d = rounded_four(d);
    store_four<wide>(static_cast<bf16 *>(a.df) + at, count, d);
  } else if (a.df != nullptr) {
    store_four<wide>(static_cast<float *>(a.df) + at, count, d);
  }
  return d;
}

/* One piece of narrow rows, read once: `warps` warps have every so many'th row, a thread `quads` of
 * its quads and their sums over the rows. Two warps share rows of more than 512 numbers, because
 * what one had to keep of them would leave room for one block alone. */
template <int quads, int warps, bool wide, bool whole>
__global__ void __launch_bounds__(norm_threads, 2) norm_backward_narrow(NormBackwardRows a) {
  constexpr int teams = norm_warps / warps;
  const int64_t columns = a.columns, apart = teams * gridDim.x;
  __shared__ BlockSums<quads> dshift, dbias; /* in registers they would be too many */
  Four dgain[quads] = {};
#pragma unroll
  for (int q = 0; q < quads; q++) {
    store_four<true>(dshift.own(q), 4, {});
    store_four<true>(dbias.own(q), 4, {});
  }
  for (int64_t done = teams * blockIdx.x, turn = 0; done < a.rows; done += apart, turn ^= 1) {
    const int64_t row = a.rows - 1 - done - threadIdx.y / warps, start = row * columns;
    const bool there = row >= 0; /* else all numbers are 0 */
    if (warps == 1 && !there) break;
    __syncwarp(); /* else nvcc keeps the sums in registers after all */
    Strip<quads> xhat = {}, g = {}, dx = {};
    StripWords words = {};
    float mean = 0, rstd = 0;
    if (there) {
      xhat = load_shared<quads, warps, wide, whole>(a.x + start, columns);
      g = load_shared<quads, warps, wide, whole>(a.dy + start, columns);
      if (a.dstream != nullptr) {
        dx = load_shared<quads, warps, wide, whole>(a.dstream + start, columns);
      }
      mean = a.stats[2 * row];
      rstd = a.stats[2 * row + 1];
      words = shared_words<warps>(a.packing, row);
    }
    float sums[] = {0, 0}; /* of g, of g * xhat */
#pragma unroll
    for (int q = 0; q < quads; q++) {
      const int64_t c = shared_column<warps>(q);
      const Four gain = load_four<wide>(a.gain + c, count_of<whole>(columns, c));
      Four &own_x = xhat.quad[q], &own_g = g.quad[q], gx;
      add_shared(dshift.own(q), own_g);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        own_x.x[i] = (own_x.x[i] - mean) * rstd;
        dgain[q].x[i] = fmaf(own_g.x[i], own_x.x[i], dgain[q].x[i]);
        own_g.x[i] = __fmul_rn(own_g.x[i], gain.x[i]);
        gx.x[i] = __fmul_rn(own_g.x[i], own_x.x[i]);
      }
      sums[0] += four_sum(own_g);
      sums[1] += four_sum(gx);
    }
    sum_shared<warps>(sums, static_cast<int>(turn));
    if (!there) break; /* the last turn */
    const float mean_g = mean_over(sums[0], columns), mean_gx = mean_over(sums[1], columns);
#pragma unroll
    for (int q = 0; q < quads; q++) {
      const int64_t c = shared_column<warps>(q), count = count_of<whole>(columns, c);
      Four &to = dx.quad[q];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        to.x[i] = fmaf(rstd, inner_of(g.quad[q].x[i], xhat.quad[q].x[i], mean_g, mean_gx), to.x[i]);
      }
      store_four<wide>(a.dx + start + c, count, to);
      add_shared(dbias.own(q), put_added<wide>(a, start + c, count, words.of[q], to));
    }
  }
  put_partials<quads, warps>(a, blockIdx.x, 1, 0, dshift);
  if (a.sums) put_partials<quads, warps>(a, blockIdx.x, 2, 0, dbias);
  __syncthreads();
#pragma unroll
  for (int q = 0; q < quads; q++) store_four<true>(dshift.own(q), 4, dgain[q]);
  put_partials<quads, warps>(a, blockIdx.x, 0, 0, dshift);
}

/* Of wider rows, what one piece adds to dgain and dshift of 128 columns. */
template <bool wide>
__global__ void norm_backward_piece(NormBackwardRows a) {
  const int64_t columns = a.columns;
  const int64_t column = 128 * static_cast<int64_t>(blockIdx.x) + 4 * threadIdx.x;
  const int64_t apart = norm_warps * gridDim.y;
  Four dgain = {{0, 0, 0, 0}}, dshift = {{0, 0, 0, 0}};
  for (int64_t row = norm_warps * blockIdx.y + threadIdx.y; column < columns && row < a.rows;
       row += apart) {
    const float mean = a.stats[2 * row], rstd = a.stats[2 * row + 1];
    const Four x = load_four<wide>(a.x + row * columns + column, columns - column);
    const Four d = load_four<wide>(a.dy + row * columns + column, columns - column);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      dgain.x[i] = fmaf(d.x[i], (x.x[i] - mean) * rstd, dgain.x[i]);
      dshift.x[i] += d.x[i];
    }
  }
  __shared__ BlockSums<1> sums[2];
  store_four<true>(sums[0].own(0), 4, dgain);
  store_four<true>(sums[1].own(0), 4, dshift);
  const int64_t first = 128 * static_cast<int64_t>(blockIdx.x);
  for (int kind = 0; kind < 2; kind++) {
    put_partials<1, 1>(a, blockIdx.y, kind, first, sums[kind]);
  }
}

/* And its dx: a block has a row. */
template <bool wide>
__global__ void norm_backward_row(NormBackwardRows a) {
  constexpr int team = norm_threads;
  const int64_t row = blockIdx.x, columns = a.columns;
  const float *const x = a.x + row * columns, *const dy = a.dy + row * columns;
  const float mean = a.stats[2 * row], rstd = a.stats[2 * row + 1];
  float plain = 0, weighted = 0;
  for (int64_t c = 4 * threadIdx.x; c < columns; c += 4 * team) {
    const Four one = load_four<wide>(x + c, columns - c), d = load_four<wide>(dy + c, columns - c);
    Four g = load_four<wide>(a.gain + c, columns - c), gx;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      g.x[i] = __fmul_rn(g.x[i], d.x[i]);
      gx.x[i] = __fmul_rn(g.x[i], (one.x[i] - mean) * rstd);
    }
    plain += four_sum(g);
    weighted += four_sum(gx);
  }
  const float mean_g = mean_over(team_sum(plain), columns);
  const float mean_gx = mean_over(team_sum(weighted), columns);
  for (int64_t c = 4 * threadIdx.x; c < columns; c += 4 * team) {
    const Four one = load_four<wide>(x + c, columns - c);
    const Four gain = load_four<wide>(a.gain + c, columns - c);
    Four d = load_four<wide>(dy + c, columns - c), stream = {{0, 0, 0, 0}};
    if (a.dstream != nullptr) stream = load_four<wide>(a.dstream + row * columns + c, columns - c);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float xhat = (one.x[i] - mean) * rstd, g = __fmul_rn(d.x[i], gain.x[i]);
      d.x[i] = fmaf(rstd, inner_of(g, xhat, mean_g, mean_gx), stream.x[i]);
    }
    store_four<wide>(a.dx + row * columns + c, columns - c, d);
  }
}

template <int quads, int warps, bool wide>
rp_status launch_backward_quads(const NormBackwardRows &a, int64_t pieces) {
  auto kernel = norm_backward_narrow<quads, warps, wide, false>;
  if (wide && a.columns == 128 * quads * warps) {
    kernel = norm_backward_narrow<quads, warps, wide, wide>;
  }
  const dim3 grid(static_cast<unsigned>(pieces));
  CUDA_TRY(launch(kernel, {grid, dim3(32, norm_warps), 0, context().stream}, a));
  return RP_OK;
}

template <bool wide>
rp_status launch_backward_narrow(const NormBackwardRows &a, int64_t pieces) {
  if (a.columns <= 128) return launch_backward_quads<1, 1, wide>(a, pieces);
  if (a.columns <= 256) return launch_backward_quads<2, 1, wide>(a, pieces);
  if (a.columns <= 512) return launch_backward_quads<4, 1, wide>(a, pieces);
  return launch_backward_quads<4, 2, wide>(a, pieces);
}

/* dx comes last: it may be dy. */
template <bool wide>
rp_status launch_backward_broad(const NormBackwardRows &a, int64_t pieces) {
  const dim3 grid(blocks_for(a.columns, 128), static_cast<unsigned>(pieces));
  CUDA_TRY(launch(norm_backward_piece<wide>, {grid, dim3(32, norm_warps), 0, context().stream}, a));
  CUDA_TRY(launch(norm_backward_row<wide>,
                  {dim3(static_cast<unsigned>(a.rows)), dim3(norm_threads), 0, context().stream},
                  a));
  return RP_OK;
}

template <bool wide>
rp_status launch_backward(const NormBackwardRows &a, int64_t pieces) {
  return a.columns <= norm_narrow ? launch_backward_narrow<wide>(a, pieces)
                                  : launch_backward_broad<wide>(a, pieces);
}

}  // namespace

rp_status norm(const rpi_norm_args *args) {
  const int64_t rows = args->rows, columns = args->columns;
  if (rows == 0 || columns == 0) return RP_OK;
  NormRows a = {rows,          columns,
                args->x,       args->base,
                args->gain,    args->shift,
                args->epsilon, args->y,
                args->stats,   rounded_rows(args->rounded, columns),
                args->note,    {}};
  if (args->base.x != nullptr) {
    if (columns > norm_narrow) RPI_TRY(residual(args));
    else RPI_TRY(packing_of(&args->dropout, false, &a.packing));
  }
  const bool wide = is_wide(a.x, columns) && is_wide(a.base, columns) && is_wide(a.gain, 0) &&
                    is_wide(a.shift, 0) && is_wide(a.y, columns);
  return wide ? norm_of<true>(a) : norm_of<false>(a);
}

rp_status norm_backward(const rpi_norm_backward_args *args, int64_t *bytes) {
  const int64_t rows = args->rows, columns = args->columns;
  const int64_t pieces = rpi_min(rpi_divide_up(rows, norm_rows), norm_most);
  if (bytes != nullptr) {
    *bytes = pieces * norm_sums * columns * static_cast<int64_t>(sizeof(float));
    return RP_OK;
  }
  if (rows == 0 || columns == 0) return RP_OK;
  NormBackwardRows a = {};
  a.rows = rows;
  a.columns = columns;
  a.x = args->x;
  a.gain = args->gain;
  a.stats = args->stats;
  a.dy = args->dy;
  a.dstream = args->dstream;
  a.dx = args->dx;
  a.partials = static_cast<float *>(args->workspace);
  const bool narrow = columns <= norm_narrow;
  if (narrow && (args->df != nullptr || args->dbias != nullptr)) {
    a.df = args->df;
    a.rounded = args->df != nullptr && args->df_element == RP_BF16;
    a.sums = args->dbias != nullptr;
    RPI_TRY(packing_of(&args->dropout, false, &a.packing));
  }
  const bool wide = is_wide(a.x, columns) && is_wide(a.gain, 0) && is_wide(a.dy, columns) &&
                    is_wide(a.dstream, columns) && is_wide(a.dx, columns) &&
                    is_wide(static_cast<float *>(a.df), columns);
  RPI_TRY(wide ? launch_backward<true>(a, pieces) : launch_backward<false>(a, pieces));
  const Sums sums = {{args->dgain, args->dshift, a.sums ? args->dbias : nullptr}};
  RPI_TRY(launch_add_partials(a.partials, norm_sums * columns, pieces, columns, sums));
  if (narrow) return RP_OK;
  scratch_begin();
  return residual_backward(args);
}

}  // namespace rpc
