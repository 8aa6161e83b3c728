/* SPDX-License-Identifier: Apache-2.0
 *
 * position_constants.c: what a position scheme has made once, with the model: buckets, slopes,
 * frequencies and sinusoids. Row r of a band is the distance r - left, key minus query.
 */
#include <math.h>

#include "model/positions.h"

/* The published slopes of ALiBi: 2^(-8 (t + 1) / h) for h a power of two; for other counts those
 * of the power below, then every second one of the power above. */
double rpi_alibi_slope(int64_t head, int64_t heads) {
  int64_t below = 1;
  while (below * 2 <= heads) below *= 2;
  if (head < below) return pow(2, -8.0 * (double)(head + 1) / (double)below);
  return pow(2, -8.0 * (double)(2 * (head - below) + 1) / (double)(2 * below));
}

/* More than those of logarithms: a whole number of buckets shall not be lost to them. */
#define ROUNDINGS 1e-13

/* T5: exact up to half of a side's buckets, then logarithmic up to max_distance. */
static int32_t t5_bucket(int64_t d, int64_t buckets, int64_t max_distance, bool causal) {
  const int64_t side = causal ? buckets : buckets / 2, exact = side / 2;
  const int64_t base = !causal && d > 0 ? side : 0;
  const int64_t x = causal ? (d < 0 ? -d : 0) : (d < 0 ? -d : d);
  if (x < exact) return (int32_t)(base + x);
  const double share = log((double)x / (double)exact) / log((double)max_distance / (double)exact);
  const int64_t far = exact + (int64_t)(share * (double)(side - exact) * (1 + ROUNDINGS));
  return (int32_t)(base + (far < side - 1 ? far : side - 1));
}

/* DeBERTa's g(x), x = i - j: exact up to the middle, then logarithmic. */
static int64_t deberta_bucket(int64_t x, int64_t buckets, int64_t max_distance) {
  const int64_t middle = buckets / 2, size = x < 0 ? -x : x;
  if (buckets == 0 || size <= middle) return x;
  const double share =
      log((double)size / (double)middle) / log((double)(max_distance - 1) / (double)middle);
  const int64_t far = (int64_t)ceil(share * (double)(middle - 1) * (1 - ROUNDINGS)) + middle;
  return x < 0 ? -far : far;
}

static int32_t bucket_of(const rpi_positions *p, int64_t d) {
  const rp_stack *const stack = rpi_stack_of(p->config, p->stack);
  if (p->has.bias) {
    return t5_bucket(d, stack->buckets, stack->max_distance, rpi_is_causal(p->stack));
  }
  if (p->has.distance) return (int32_t)(p->config->max_length - 1 - d);
  const int64_t row = deberta_bucket(-d, stack->buckets, stack->max_distance) + p->has.rows / 2;
  return (int32_t)rpi_min(rpi_max(row, 0), p->has.rows - 1);
}

static double frequency(int64_t c, double base, double steps) {
  return steps > 0 ? pow(base, -(double)c / steps) : 1;
}

static void fill_rope(const rpi_positions *p, const rp_stack *stack) {
  double base = stack->rope_base, slower = 1;
  if (stack->rope_rule == RP_ROPE_LINEAR) slower = stack->rope_scaling;
  else if (p->pairs > 1) {
    base *= pow(stack->rope_scaling, (double)p->pairs / (double)(p->pairs - 1));
  }
  for (int64_t c = 0; c < p->pairs; c++) {
    p->frequencies[c] = frequency(c, base, (double)p->pairs) / slower;
  }
}

/* to[r] = sines and cosines of (first + step * r) * frequencies, some frequencies at a time. Of an
 * odd width the last column is one more sine where they are interleaved, else zero. */
static void fill_sinusoids(int64_t width, double steps, int64_t rows, int64_t first, int64_t step,
                           bool interleaved, real *to) {
  double some[64];
  const int64_t half = width / 2, sines = interleaved ? (width + 1) / 2 : half;
  for (int64_t begin = 0; begin < sines; begin += 64) {
    const int64_t count = sines - begin < 64 ? sines - begin : 64;
    for (int64_t c = 0; c < count; c++) some[c] = frequency(begin + c, 10000, steps);
    for (int64_t r = 0; r < rows; r++) {
      for (int64_t c = 0; c < count; c++) {
        const double angle = (double)(first + step * r) * some[c];
        const int64_t at = begin + c;
        to[r * width + (interleaved ? 2 * at : at)] = (real)sin(angle);
        if (at < half) to[r * width + (interleaved ? 2 * at + 1 : half + at)] = (real)cos(angle);
      }
    }
  }
  for (int64_t r = 0; !interleaved && width % 2 != 0 && r < rows; r++) {
    to[(r + 1) * width - 1] = 0;
  }
}

static int64_t span_of(const rpi_positions *p) { return p->has.left + 1 + p->has.right; }

void rpi_positions_fill(const rpi_positions *p) {
  const rp_stack *const stack = rpi_stack_of(p->config, p->stack);
  const int64_t left = p->has.left, span = span_of(p);
  for (int64_t r = 0; p->buckets && r < span; r++) p->buckets[r] = bucket_of(p, r - left);
  if (p->frequencies) fill_rope(p, stack);
}

static void make_distances(const rpi_positions *p, real *to) {
  const int64_t left = p->has.left, span = span_of(p);
  for (int64_t r = 0; r < span; r++) to[r] = (real)(r < left ? r - left : left - r);
}

static void make_fixed(const rpi_positions *p, real *to) {
  const int64_t left = p->has.left, span = span_of(p);
  for (int64_t h = 0; h < p->config->heads; h++) {
    const double slope = rpi_alibi_slope(h, p->config->heads);
    for (int64_t r = 0; r < span; r++) {
      to[h * span + r] = (real)(slope * (double)(r < left ? r - left : left - r));
    }
  }
}

static void make_waves(const rpi_positions *p, real *to) {
  const int64_t C = p->config->width;
  fill_sinusoids(C, (double)(C / 2), span_of(p), p->has.left, -1, false, to);
}

static void make_absolute(const rpi_positions *p, real *to) {
  const rp_stack *const stack = rpi_stack_of(p->config, p->stack);
  const int64_t C = p->config->width;
  const bool closed = stack->sinusoid_rule == RP_FREQUENCIES_CLOSED;
  const int64_t last = C / 2 > 1 ? C / 2 - 1 : 1; /* width 3 has two frequencies, interleaved */
  const double steps = closed ? (double)last : (double)C / 2;
  fill_sinusoids(C, steps, p->config->max_length, stack->sinusoid_first, 1,
                 stack->sinusoid_interleaved != 0, to);
}

/* Made where it is to be, or where the host may write and then moved there. */
static rp_status make_constant(const rp_ops *ops, const rpi_positions *p, int64_t count, real *to,
                               void (*make)(const rpi_positions *p, real *to)) {
  if (!to) return RP_OK;
  if (ops->host) {
    make(p, to);
    return RP_OK;
  }
  const int64_t bytes = count * (int64_t)sizeof *to;
  real *const made = rpi_allocate((size_t)bytes);
  RPI_CHECK(made, RP_ERROR_MEMORY, "model: no memory for %lld bytes of positions", (rpi_wide)bytes);
  make(p, made);
  const rp_status status = ops->write(to, made, bytes);
  rpi_release(made);
  return status;
}

rp_status rpi_positions_make(const rp_ops *ops, const rpi_positions *p) {
  const int64_t span = span_of(p), C = p->config->width;
  RPI_TRY(make_constant(ops, p, span, p->distances, make_distances));
  RPI_TRY(make_constant(ops, p, p->config->heads * span, p->fixed, make_fixed));
  RPI_TRY(make_constant(ops, p, span * C, p->waves, make_waves));
  return make_constant(ops, p, p->config->max_length * C, p->absolute, make_absolute);
}
