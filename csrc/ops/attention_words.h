/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_words.h: operands of attention's products rounded to bf16, two numbers of inner to a
 * word (bf16.h). They lie as numbers do, but that inner is half as long, and go through the same
 * strips. With the twin of the instructions a word is its two numbers again, and inner as long as
 * it was, or by one longer.
 */
#ifndef RPI_ATTENTION_WORDS_H
#define RPI_ATTENTION_WORDS_H

#include "ops/gemm_words.h"
#include "ops/operands.h"

/* So much of inner, of so many numbers. */
static int64_t inner_of(int how, int64_t numbers) {
  if (how == RPI_NUMBERS) return numbers;
  return rpi_round_up(numbers, 2) / (how == RPI_NATIVE ? 2 : 1);
}

/* From one row that runs along inner to the next. */
static int64_t inner_stride(int how, int64_t numbers) {
  return inner_of(how, rpi_round_up(numbers, 2 * RPI_LANES));
}

/* Room for rows that run along inner, and for rows across it. */
static real *take_word_rows(rpi_arena *arena, int how, int64_t rows, int64_t numbers) {
  return rpi_arena_take(arena, rows * inner_stride(how, numbers), sizeof(real));
}
static real *take_word_lines(rpi_arena *arena, int how, int64_t numbers, int64_t width) {
  return rpi_arena_take(arena, inner_of(how, numbers) * width, sizeof(real));
}

#if RPI_REAL_BYTES == 4

/* Rows that run along inner. */
static dense word_rows(int how, dense from, int64_t rows, int64_t numbers, real *to) {
  const int64_t stride = inner_stride(how, numbers);
  gemm_words[how][GEMM_ROWS](from.data, from.stride, rows, numbers, to, stride);
  return (dense){to, stride};
}

/* `numbers` rows across inner: lines of so many columns, whole vectors, `stride` apart. */
static void word_lines(int how, dense from, int64_t numbers, int64_t columns, real *to,
                       int64_t stride) {
  gemm_words[how][GEMM_PANEL](from.data, from.stride, columns, numbers, to, stride);
}

/* x . y, x rounded. */
RPI_NOINLINE real dot_rounded(const real *x, const real *y, int64_t width) {
  rpi_register sum = {0};
  for (int64_t c = 0; c < width; c += RPI_LANES) {
    const rpi_register a = rpi_load_left(x + c, width - c);
    sum += (rpi_register)rpi_bf16_round(a) * rpi_load_left(y + c, width - c);
  }
  return rpi_total(sum);
}

/* Rounds whole vectors of numbers. */
static void round_numbers(real *x, int64_t numbers) {
  for (int64_t c = 0; c < numbers; c += RPI_LANES) {
    rpi_store(x + c, (rpi_register)rpi_bf16_round(rpi_load(x + c)));
  }
}

/* Dot products of rows that run along inner with one more, in one order for both ways. */
RPI_NOINLINE void dot_words(int how, dense x, int64_t rows, const real *vector, int64_t numbers,
                            real *to) {
  const int64_t end = inner_stride(how, numbers), step = how == RPI_NATIVE ? 1 : 2;
  for (int64_t r = 0; r < rows; r++) {
    const real *const row = x.data + r * x.stride;
    rpi_register sum = {0};
    for (int64_t k = 0; k < end; k += step * RPI_LANES) {
      const rpi_register a = rpi_load(row + k), b = rpi_load(vector + k);
      if (how == RPI_NATIVE) {
        sum += rpi_upper(a) * rpi_upper(b);
        sum += rpi_lower(a) * rpi_lower(b);
      } else {
        const rpi_register c = rpi_load(row + k + RPI_LANES), d = rpi_load(vector + k + RPI_LANES);
        sum += RPI_EVEN(a, c) * RPI_EVEN(b, d);
        sum += RPI_ODD(a, c) * RPI_ODD(b, d);
      }
    }
    to[r] = rpi_total(sum);
  }
}

#else

static dense word_rows(int how, dense from, int64_t rows, int64_t numbers, real *to) {
  (void)how, (void)rows, (void)numbers, (void)to;
  return from;
}
static void dot_words(int how, dense x, int64_t rows, const real *vector, int64_t numbers,
                      real *to) {
  (void)how, (void)x, (void)rows, (void)vector, (void)numbers, (void)to;
}
static real dot_rounded(const real *x, const real *y, int64_t width) {
  (void)x, (void)y, (void)width;
  return 0;
}
static void round_numbers(real *x, int64_t numbers) { (void)x, (void)numbers; }
static void word_lines(int how, dense from, int64_t numbers, int64_t columns, real *to,
                       int64_t stride) {
  (void)how, (void)from, (void)numbers, (void)columns, (void)to, (void)stride;
}

#endif

/* Weights of a strip that meet so many keys, along inner. Of those behind them the first would be a
 * half of the last word, and may be no number. */
static dense word_weights(int how, const real *weights, int64_t rows, int64_t keys, real *to) {
  const int64_t whole = rpi_min(rpi_round_up(keys, 2 * RPI_LANES), RPI_TILE);
  return word_rows(how, (dense){weights, RPI_TILE}, rows, keys % 2 ? keys : whole, to);
}

/* c += a . b in that way: rows of a, lines of b, so many numbers of inner. Of numbers as of words.
 */
static rpi_product product_by(int how, dense a, const real *b, int64_t b_stride, int64_t numbers,
                              real *c, int64_t c_stride) {
  return (rpi_product){.a = a.data,
                       .a_row = a.stride,
                       .a_inner = 1,
                       .b = b,
                       .b_stride = b_stride,
                       .c = c,
                       .c_stride = c_stride,
                       .inner = inner_of(how, numbers),
                       .native = how == RPI_NATIVE};
}

/* c += aᵀ . b: lines of a likewise. */
static rpi_product product_across(int how, dense a, const real *b, int64_t b_stride,
                                  int64_t numbers, real *c, int64_t c_stride) {
  rpi_product product = product_by(how, (dense){a.data, 1}, b, b_stride, numbers, c, c_stride);
  product.a_inner = a.stride;
  return product;
}

#endif
