/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_words.h: operands of attention's products rounded to bf16, two numbers of inner to a
 * word (bf16.h). They lie as numbers do, but that inner is half as long, and go through the same
 * strips. With the twin of the instructions a word is its two numbers again, and inner as long as
 * it was, or by one longer.
 */
#ifndef RPI_ATTENTION_WORDS_H
#define RPI_ATTENTION_WORDS_H

#include "ops/exp2.h"
#include "ops/gemm_words.h"
#include "ops/operands.h"

/* Sums of a strip's rows as vectors, of p and of ds, RPI_LANES from one row to the next: what they
 * add to a head or a tail; or NULL. */
typedef struct strip_sums {
  real *p, *ds;
} strip_sums;

/* Where words of ds go that run along inner, and words of p and of ds across it. */
typedef struct strip_words {
  real *ds, *p_lines, *ds_lines;
} strip_words;

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

/* The keys of a tile, which run along inner, turned across it and times the factor: lines of
 * `columns`, whole vectors, those beyond the keys being zeros. The next ones are asked for: fresh
 * keys lie in no cache. */
#define RPI_TURN_WORDS(how, target)                                                                \
  target RPI_NOINLINE void gemm_scaled_##how(dense from, int64_t keys, int64_t numbers,            \
                                             real factor, real *to) {                              \
    for (int64_t j = 0; j < keys; j += RPI_LANES, from.data += RPI_LANES * from.stride) {          \
      int64_t next = RPI_LANES * from.stride;                                                      \
      for (int i = 0; i < RPI_LANES; i++, next += from.stride) {                                   \
        rpi_prefetch_row(from.data, next, numbers);                                                \
      }                                                                                            \
      gemm_words_turned_of(RPI_##how == RPI_NATIVE, false, factor, from.data, from.stride,         \
                           rpi_min(keys - j, RPI_LANES), numbers, to + j, RPI_TILE);               \
    }                                                                                              \
  }
RPI_TURN_WORDS(TWIN, )
#ifdef RPI_BF16_NATIVE
RPI_TURN_WORDS(NATIVE, RPI_BF16_TARGET)
#endif

static void (*const gemm_scaled[])(dense, int64_t, int64_t, real, real *) = {
    [RPI_TWIN] = gemm_scaled_TWIN,
#ifdef RPI_BF16_NATIVE
    [RPI_NATIVE] = gemm_scaled_NATIVE,
#endif
};

static void turn_words(int how, dense from, int64_t keys, int64_t numbers, real factor, real *to,
                       int64_t columns) {
  gemm_scaled[how](from, keys, numbers, factor, to);
  const int64_t lines = inner_of(how, numbers), filled = rpi_round_up(keys, RPI_LANES);
  for (int64_t line = 0; filled < columns && line < lines; line++, to += RPI_TILE) {
    memset(to + filled, 0, (size_t)(columns - filled) * sizeof *to);
  }
}

/* The dot products of rows, rounded, with rows, times the factor. */
#define RPI_DOTS_ROUNDED(how, target)                                                              \
  target RPI_NOINLINE void dots_rounded_##how(dense x, dense y, int64_t rows, int64_t width,       \
                                              real factor, real *to) {                             \
    for (int64_t r = 0; r < rows; r++, x.data += x.stride, y.data += y.stride) {                   \
      rpi_register sum = {0};                                                                      \
      for (int64_t c = 0; c < width; c += 2 * RPI_LANES) {                                         \
        const int64_t left = width - c, beyond = rpi_max(left - RPI_LANES, 0);                     \
        const rpi_register lower = rpi_load_left(x.data + c, left);                                \
        const rpi_register upper = rpi_load_left(x.data + c + RPI_LANES, beyond);                  \
        const rpi_register words = rpi_words_across(RPI_##how == RPI_NATIVE, lower, upper);        \
        sum += rpi_lower(words) * rpi_load_left(y.data + c, left);                                 \
        sum += rpi_upper(words) * rpi_load_left(y.data + c + RPI_LANES, beyond);                   \
      }                                                                                            \
      to[r] = factor * rpi_total(sum);                                                             \
    }                                                                                              \
  }
RPI_DOTS_ROUNDED(TWIN, )
#ifdef RPI_BF16_NATIVE
RPI_DOTS_ROUNDED(NATIVE, RPI_BF16_TARGET)
#endif

static void dot_rounded_rows(dense x, dense y, int64_t rows, int64_t width, real factor, real *to) {
#ifdef RPI_BF16_NATIVE
  if (rpi_bf16_native()) {
    dots_rounded_NATIVE(x, y, rows, width, factor, to);
    return;
  }
#endif
  dots_rounded_TWIN(x, y, rows, width, factor, to);
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
static void turn_words(int how, dense from, int64_t keys, int64_t numbers, real factor, real *to,
                       int64_t columns) {
  (void)how, (void)from, (void)keys, (void)numbers, (void)factor, (void)to, (void)columns;
}
static void dot_words(int how, dense x, int64_t rows, const real *vector, int64_t numbers,
                      real *to) {
  (void)how, (void)x, (void)rows, (void)vector, (void)numbers, (void)to;
}
static void dot_rounded_rows(dense x, dense y, int64_t rows, int64_t width, real factor, real *to) {
  (void)x, (void)y, (void)rows, (void)width, (void)factor, (void)to;
}
static void round_numbers(real *x, int64_t numbers) { (void)x, (void)numbers; }
static void word_lines(int how, dense from, int64_t numbers, int64_t columns, real *to,
                       int64_t stride) {
  (void)how, (void)from, (void)numbers, (void)columns, (void)to, (void)stride;
}

#endif

/* What words are made of as long as it is in registers: where instructions do that. (The twin's way
 * has too much to keep at once: with AVX2 it took 4 % longer so.) */
#ifdef RPI_BF16_NATIVE

/* Weights (2) of a strip and a whole tile in place of its scores, added to each row's vector of
 * sums as weigh_strip does, and as words along inner. */
RPI_BF16_TARGET RPI_NOINLINE void weigh_words_NATIVE(int64_t count, real *restrict s,
                                                     real *restrict sum, real *restrict words) {
  for (int64_t r = 0; r < count; r++, s += RPI_TILE, sum += RPI_LANES, words += RPI_TILE / 2) {
    rpi_register all = {0};
    RPI_UNROLL(2) for (int64_t v = 0; v < RPI_TILE; v += 2 * RPI_LANES) {
      const rpi_register first = rpi_exp2_lanes(rpi_load(s + v));
      const rpi_register second = rpi_exp2_lanes(rpi_load(s + v + RPI_LANES));
      rpi_store(s + v, first);
      rpi_store(s + v + RPI_LANES, second);
      rpi_store(words + v / 2, rpi_words_of(true, first, second));
      all = all + first + second;
    }
    rpi_store(sum, rpi_load(sum) + all);
  }
}

/* p and ds of one or two rows of a whole tile, as differentiate_rows has them, and as words. rows:
 * a constant once inlined. */
RPI_INLINE void differentiate_two(const int rows, real *restrict s, real *restrict ds,
                                  const real *restrict negated_lse, strip_sums to,
                                  strip_words words) {
  rpi_register p_sum[2] = {{0}}, ds_sum[2] = {{0}};
  RPI_UNROLL(2) for (int64_t v = 0; v < RPI_TILE; v += 2 * RPI_LANES) {
    rpi_register p[2][2] = {{{0}}}, own[2][2] = {{{0}}};
    RPI_UNROLL(2) for (int row = 0; row < rows; row++) {
      RPI_UNROLL(2) for (int half = 0; half < 2; half++) {
        const int64_t at = row * RPI_TILE + v + half * RPI_LANES;
        p[row][half] = rpi_share_lanes(rpi_load(s + at) + negated_lse[row]);
        own[row][half] = p[row][half] * rpi_load(ds + at);
        rpi_store(s + at, p[row][half]);
        rpi_store(ds + at, own[row][half]);
        p_sum[row] += p[row][half];
        ds_sum[row] += own[row][half];
      }
      rpi_store(words.ds + row * (RPI_TILE / 2) + v / 2,
                rpi_words_of(true, own[row][0], own[row][1]));
    }
    RPI_UNROLL(2) for (int half = 0; half < 2; half++) {
      const int64_t at = v + half * RPI_LANES;
      rpi_store(words.p_lines + at, rpi_words_across(true, p[0][half], p[1][half]));
      rpi_store(words.ds_lines + at, rpi_words_across(true, own[0][half], own[1][half]));
    }
  }
  RPI_UNROLL(2) for (int row = 0; row < rows; row++) {
    const int64_t at = row * RPI_LANES;
    if (to.p) rpi_store(to.p + at, rpi_load(to.p + at) + p_sum[row]);
    if (to.ds) rpi_store(to.ds + at, rpi_load(to.ds + at) + ds_sum[row]);
  }
}

/* Those of a strip: two rows at a time, which share words across inner. */
RPI_BF16_TARGET RPI_NOINLINE void differentiate_words_NATIVE(int64_t count, real *s, real *ds,
                                                             const real *negated_lse, strip_sums to,
                                                             strip_words words) {
  for (; count > 1; count -= 2) {
    differentiate_two(2, s, ds, negated_lse, to, words);
    s += 2 * RPI_TILE;
    ds += 2 * RPI_TILE;
    negated_lse += 2;
    if (to.p) to.p += 2 * RPI_LANES;
    if (to.ds) to.ds += 2 * RPI_LANES;
    words = (strip_words){words.ds + RPI_TILE, words.p_lines + RPI_TILE, words.ds_lines + RPI_TILE};
  }
  if (count) differentiate_two(1, s, ds, negated_lse, to, words);
}

#else

static void weigh_words_NATIVE(int64_t count, real *s, real *sum, real *words) {
  (void)count, (void)s, (void)sum, (void)words;
}
static void differentiate_words_NATIVE(int64_t count, real *s, real *ds, const real *negated_lse,
                                       strip_sums to, strip_words words) {
  (void)count, (void)s, (void)ds, (void)negated_lse, (void)to, (void)words;
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
