/* SPDX-License-Identifier: Apache-2.0
 *
 * rotate.c: rotary positions (RoPE). Pair c of the row at position p turns by the angle
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
 * A block of rows makes its sines and cosines once for all heads, in stack memory. Angles
 * are double: at position 10^5 a float is off by 0.004.
 */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "base/threads.h"
#include "ops/ops.h"
#include "ops/tile.h"

#define ROTATE_ROWS 32  /* of a block */
#define ROTATE_PAIRS 32 /* turned at once: tables of 8 KiB */

/* Fewer numbers than this are not worth waking the pool for. */
#define ROTATE_ALONE 32768

/* A row of head 0. */
typedef struct rotate_row {
  double position;
  const real *from;
  real *to;
} rotate_row;

typedef struct rotate_tables {
  real cos[ROTATE_ROWS][ROTATE_PAIRS], sin[ROTATE_ROWS][ROTATE_PAIRS];
} rotate_tables;

typedef struct rotate_job {
  const rp_rotation *shape;
  rp_rows x;
  rp_rows_out out;
  int64_t rows;   /* of all sequences, those beyond a length included */
  double fastest; /* the largest |frequency| */
} rotate_job;

#ifndef RP_REAL_IS_DOUBLE

/* x, or -x where the lowest bit of shifted is set. */
RPI_INLINE double rotate_signed(double x, double shifted) {
  uint64_t bits, low;
  memcpy(&bits, &x, sizeof bits);
  memcpy(&low, &shifted, sizeof low);
  bits ^= low << 63;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Up to this angle rotate_turn is as good as its polynomials: n below 2^22 times the 31
 * bits of PI_1 is exact. */
#define ROTATE_FAST_ANGLE 1.3e7

/* sin and cos of an angle below that: angle = n pi + r with n the nearest integer, polynomials
 * in r^2 fitted to the absolute error (2e-10, rounding to float makes it 3e-8), and both
 * change sign with every n. */
RPI_INLINE void rotate_turn(double angle, real *sine, real *cosine) {
  const double pi_1 = 0x1.921fb544p+1, pi_2 = 0x1.0b4611a626331p-33;
  const double magic = 0x1.8p+52; /* adding it rounds to an integer, kept in the low bits */
  const double shifted = angle * 0.31830988618379067 + magic;
  const double n = shifted - magic;
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
  *sine = (real)rotate_signed(r * s, shifted);
  *cosine = (real)rotate_signed(c, shifted);
}

#endif

/* cos and sin of position * frequency[c] for some pairs; sin with the sign of the direction. */
static void rotate_angles(const rotate_job *job, double position, const double *frequencies,
                          int64_t pairs, real *restrict cosines, real *restrict sines) {
  const double p = job->shape->inverse ? -position : position;
#ifndef RP_REAL_IS_DOUBLE
  if (fabs(position) * job->fastest < ROTATE_FAST_ANGLE) {
    _Pragma("omp simd") for (int64_t c = 0; c < pairs; c++) {
      rotate_turn(p * frequencies[c], sines + c, cosines + c);
    }
    return;
  }
#endif
  for (int64_t c = 0; c < pairs; c++) {
    cosines[c] = (real)cos(p * frequencies[c]);
    sines[c] = (real)sin(p * frequencies[c]);
  }
}

/* `to` may be `from`: every pair is read before it is written. */
RPI_NOINLINE void rotate_halves(const real *from, real *to, int64_t pairs, int64_t apart,
                                const real *cosines, const real *sines) {
  _Pragma("omp simd") for (int64_t c = 0; c < pairs; c++) {
    const real x = from[c], y = from[c + apart];
    to[c] = x * cosines[c] - y * sines[c];
    to[c + apart] = x * sines[c] + y * cosines[c];
  }
}

RPI_NOINLINE void rotate_interleaved(const real *from, real *to, int64_t pairs, const real *cosines,
                                     const real *sines) {
  _Pragma("omp simd") for (int64_t c = 0; c < pairs; c++) {
    const real x = from[2 * c], y = from[2 * c + 1];
    to[2 * c] = x * cosines[c] - y * sines[c];
    to[2 * c + 1] = x * sines[c] + y * cosines[c];
  }
}

/* Lists the rows of a block that are in use; the others become zero, where out is not x. */
static int64_t rotate_list(const rotate_job *job, int64_t first, int64_t end, rotate_row *list) {
  const rp_rotation *const s = job->shape;
  int64_t count = 0, b = 0;
  if (s->offsets) { /* the last sequence that starts at or before `first` */
    int64_t beyond = s->B;
    while (beyond - b > 1) {
      const int64_t middle = b + (beyond - b) / 2;
      if (s->offsets[middle] <= first) b = middle;
      else beyond = middle;
    }
  }
  for (int64_t at = first; at < end; at++) {
    while (s->offsets && s->offsets[b + 1] <= at) b++;
    if (!s->offsets) b = at / s->N;
    const int64_t row = s->offsets ? at - s->offsets[b] : at % s->N;
    const int64_t line = s->offsets ? at : row, batch = s->offsets ? 0 : b;
    rotate_row *const one = list + count;
    one->from = job->x.data + batch * job->x.batch_stride + line * job->x.row_stride;
    one->to = job->out.data + batch * job->out.batch_stride + line * job->out.row_stride;
    if (s->lengths && row >= s->lengths[b]) {
      for (int64_t h = 0; h < s->H && job->x.data != job->out.data; h++) {
        memset(one->to + h * job->out.head_stride, 0, (size_t)s->D * sizeof(real));
      }
      continue;
    }
    if (s->positions) one->position = s->positions[s->offsets ? at : b * s->position_stride + row];
    else one->position = (double)(row + (s->start ? s->start[b] : 0));
    count++;
  }
  return count;
}

static void rotate_block(void *context, int64_t task, int worker) {
  (void)worker;
  const rotate_job *const job = context;
  const rp_rotation *const s = job->shape;
  rotate_row list[ROTATE_ROWS];
  const int64_t first = task * ROTATE_ROWS;
  const int64_t rows = rotate_list(job, first, rpi_min(first + ROTATE_ROWS, job->rows), list);
  for (int64_t done = 0; done < s->pairs; done += ROTATE_PAIRS) {
    const int64_t pairs = rpi_min(ROTATE_PAIRS, s->pairs - done);
    rotate_tables t;
    for (int64_t r = 0; r < rows; r++) {
      rotate_angles(job, list[r].position, s->frequencies + done, pairs, t.cos[r], t.sin[r]);
    }
    for (int64_t h = 0; h < s->H; h++) {
      for (int64_t r = 0; r < rows; r++) {
        const real *const from = list[r].from + h * job->x.head_stride;
        real *const to = list[r].to + h * job->out.head_stride;
        if (s->interleaved) {
          rotate_interleaved(from + 2 * done, to + 2 * done, pairs, t.cos[r], t.sin[r]);
        } else {
          rotate_halves(from + done, to + done, pairs, s->pairs, t.cos[r], t.sin[r]);
        }
      }
    }
  }
  const int64_t rest = s->D - 2 * s->pairs;
  for (int64_t h = 0; h < s->H && rest > 0 && job->x.data != job->out.data; h++) {
    for (int64_t r = 0; r < rows; r++) {
      memcpy(list[r].to + h * job->out.head_stride + 2 * s->pairs,
             list[r].from + h * job->x.head_stride + 2 * s->pairs, (size_t)rest * sizeof(real));
    }
  }
}

static rp_status rotate(const rp_rotation *shape, rp_rows x, rp_rows_out out) {
  rotate_job job = {.shape = shape, .x = x, .out = out};
  job.rows = shape->offsets ? shape->offsets[shape->B] : shape->B * shape->N;
  for (int64_t c = 0; c < shape->pairs; c++) {
    const double speed = fabs(shape->frequencies[c]);
    if (speed > job.fastest) job.fastest = speed;
  }
  assert(2 * shape->pairs <= shape->D);
  const bool alone = job.rows * shape->H < ROTATE_ALONE / rpi_max(shape->D, 1);
  rpi_parallel_for(rpi_divide_up(job.rows, ROTATE_ROWS), alone ? 1 : rpi_threads_get(),
                   rotate_block, &job);
  return RP_OK;
}
