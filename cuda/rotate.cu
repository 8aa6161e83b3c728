/* SPDX-License-Identifier: Apache-2.0
 *
 * rotate.cu: rotary positions (RoPE). Pair c of the row at position p turns by the angle
 * p frequencies[c],
 *
 *   (x, y)  ->  (x cos - y sin, x sin + y cos)
 *
 *   pairs of halves      x x x x y y y y . .     columns c and pairs + c
 *   interleaved          x y x y x y x y . .     columns 2c and 2c + 1
 *
 * and the columns beyond 2 pairs stay. It is its own derivative but for the sign of the angle
 * (inverse): dz turns back.
 *
 * A thread has a pair of a row and turns it in all heads: one sine and cosine for all of them.
 * Angles are double: at position 10^5 a float is off by 0.004. Rows are float or, where the
 * placement says so, bfloat16; the arithmetic is float.
 */
#include <math.h>

#include "packing.h"

namespace rpc {
namespace {

struct RotateRows {
  int64_t B, H, N, D, rows, pairs;
  rp_rows x;
  rp_rows_out out;
  const int64_t *lengths, *offsets, *start; /* or NULL */
  const int32_t *positions;                 /* or NULL */
  int64_t position_stride;
  const double *frequencies;
  bool interleaved, inverse;
};

/* Up to this angle rotate_turn is as good as its polynomials: n below 2^22 times the 31 bits of
 * pi_1 is exact. */
constexpr double rotate_fast_angle = 1.3e7;

/* sin and cos as ops/rotate.c has them: angle = n pi + r with n the nearest integer, polynomials in
 * r^2, and both change sign with every n. */
__device__ inline void rotate_turn(double angle, float *sine, float *cosine) {
  if (!(fabs(angle) < rotate_fast_angle)) {
    *sine = static_cast<float>(sin(angle));
    *cosine = static_cast<float>(cos(angle));
    return;
  }
  const double pi_1 = 0x1.921fb544p+1, pi_2 = 0x1.0b4611a626331p-33;
  const double n = rint(angle * 0.31830988618379067);
  const double r = (angle - n * pi_1) - n * pi_2, u = r * r;
  double s = -2.379487189243095e-08, c = -2.6051495121134865e-07;
  s = s * u + 2.751886704299237e-06;
  c = c * u + 2.4760161358718603e-05;
  s = s * u - 0.00019840703167170307;
  c = c * u - 0.0013888361400734247;
  s = s * u + 0.008333329268130248;
  c = c * u + 0.04166663625815323;
  s = s * u - 0.16666666541630715;
  c = c * u - 0.4999999935847695;
  s = s * u + 0.9999999998901703;
  c = c * u + 0.9999999997806601;
  const double sign = static_cast<int64_t>(n) % 2 != 0 ? -1.0 : 1.0;
  *sine = static_cast<float>(sign * (r * s));
  *cosine = static_cast<float>(sign * c);
}

__device__ inline float rotate_number(float x) { return x; }
__device__ inline float rotate_number(bf16 x) { return __bfloat162float(x); }
__device__ inline void rotate_put(float *to, float x) { *to = x; }
__device__ inline void rotate_put(bf16 *to, float x) { *to = __float2bfloat16(x); }

/* One row of head 0. */
template <class Number>
struct RotateRow {
  const Number *from;
  Number *to;
  double position;
  bool in_use;
};

template <class Number>
__device__ inline RotateRow<Number> rotate_row_of(const RotateRows &a, int64_t at) {
  const int64_t b = a.offsets != nullptr ? sentence_of(a.offsets, a.B, at) : at / a.N;
  const int64_t row = a.offsets != nullptr ? at - a.offsets[b] : at % a.N;
  const int64_t line = a.offsets != nullptr ? at : row, batch = a.offsets != nullptr ? 0 : b;
  const auto *const from = reinterpret_cast<const Number *>(a.x.data);
  auto *const to = reinterpret_cast<Number *>(a.out.data);
  RotateRow<Number> r = {from + batch * a.x.batch_stride + line * a.x.row_stride,
                         to + batch * a.out.batch_stride + line * a.out.row_stride, 0,
                         a.lengths == nullptr || row < a.lengths[b]};
  if (!r.in_use) return r;
  if (a.positions != nullptr) {
    r.position = a.positions[a.offsets != nullptr ? at : b * a.position_stride + row];
  } else {
    r.position = static_cast<double>(row + (a.start != nullptr ? a.start[b] : 0));
  }
  return r;
}

/* out may be x: a pair is read before it is written, by one thread. What it does not turn is not
 * touched then. */
template <class Number>
__global__ void rotate_rows(RotateRows a) {
  const int64_t at = row_of_thread();
  if (at >= a.rows) return;
  const RotateRow<Number> r = rotate_row_of<Number>(a, at);
  const bool in_place = a.x.data == a.out.data;
  for (int64_t c = threadIdx.x; r.in_use && c < a.pairs; c += blockDim.x) {
    float sine, cosine;
    rotate_turn((a.inverse ? -r.position : r.position) * a.frequencies[c], &sine, &cosine);
    const int64_t first = a.interleaved ? 2 * c : c;
    const int64_t second = a.interleaved ? 2 * c + 1 : a.pairs + c;
    for (int64_t h = 0; h < a.H; h++) {
      const Number *const from = r.from + h * a.x.head_stride;
      Number *const to = r.to + h * a.out.head_stride;
      const float x = rotate_number(from[first]), y = rotate_number(from[second]);
      rotate_put(to + first, x * cosine - y * sine);
      rotate_put(to + second, x * sine + y * cosine);
    }
  }
  if (in_place) return;
  for (int64_t c = (r.in_use ? 2 * a.pairs : 0) + threadIdx.x; c < a.D; c += blockDim.x) {
    for (int64_t h = 0; h < a.H; h++) {
      Number *const to = r.to + h * a.out.head_stride + c;
      if (r.in_use) *to = r.from[h * a.x.head_stride + c];
      if (!r.in_use) rotate_put(to, 0);
    }
  }
}

}  // namespace

rp_status rotate(const rp_rotation *s, rp_rows x, rp_rows_out out) {
  RotateRows a = {};
  a.B = s->B;
  a.H = s->H;
  a.N = s->N;
  a.D = s->D;
  a.rows = s->offsets != nullptr ? s->offsets[s->B] : s->B * s->N;
  a.pairs = s->pairs;
  a.x = x;
  a.out = out;
  a.position_stride = s->position_stride;
  a.interleaved = s->interleaved != 0;
  a.inverse = s->inverse != 0;
  if (a.rows == 0 || a.H == 0) return RP_OK;
  const rp_placement placement = s->placement != nullptr ? *s->placement : rp_placement_default();
  const OnStream on(placement.stream);
  RPI_TRY(on.status());
  const int64_t positions = s->offsets != nullptr ? a.rows : (a.B - 1) * a.position_stride + a.N;
  RPI_TRY(stage(s->lengths, a.B, &a.lengths));
  RPI_TRY(stage(s->offsets, a.B + 1, &a.offsets));
  RPI_TRY(stage(s->start, a.B, &a.start));
  RPI_TRY(stage(s->positions, positions, &a.positions));
  RPI_TRY(stage(s->frequencies, a.pairs, &a.frequencies));
  const unsigned across = 32, down = 8;
  const dim3 grid(blocks_for(a.rows, down));
  const auto kernel = placement.element == RP_BF16 ? rotate_rows<bf16> : rotate_rows<float>;
  CUDA_TRY(launch(kernel, {grid, dim3(across, down), 0, context().stream}, a));
  return RP_OK;
}

}  // namespace rpc
