/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_words.h: operands of a product in bf16, packed as words (bf16.h). A word is two numbers of
 * inner, so that what is packed looks like operands of half of inner: the kernel of gemm_kernel.h
 * has one multiplication that is another. Where the processor has no instruction for that, a word
 * is packed as its two numbers, the upper half first: for the kernel that multiplies numbers, and
 * with the same sums.
 */
#ifndef RPI_GEMM_WORDS_H
#define RPI_GEMM_WORDS_H

#include "ops/gemm_kernel.h"

#if RPI_REAL_BYTES == 4

/* Row `at` of words, of rows `stride` apart: natively as it is, else as two rows of numbers. */
RPI_INLINE void gemm_put(const bool native, rpi_register words, real *to, int64_t at,
                         int64_t stride) {
  if (native) {
    rpi_store(to + at * stride, words);
  } else {
    rpi_store(to + 2 * at * stride, rpi_upper(words));
    rpi_store(to + (2 * at + 1) * stride, rpi_lower(words));
  }
}

/* to[row][stride] = rows of A that run along inner. What is written beyond the words of a row, less
 * than a vector, or two, the next row overwrites. */
RPI_INLINE void gemm_words_rows(const bool native, const real *from, int64_t from_stride,
                                int64_t rows, int64_t depth, real *to, int64_t stride) {
  for (int64_t r = 0; r < rows; r++, from += from_stride, to += stride) {
    for (int64_t k = 0; k < depth; k += 2 * RPI_LANES) {
      const rpi_register words = rpi_words_at(native, 1, from + k, depth - k);
      if (native) {
        rpi_store(to + k / 2, words);
      } else {
        rpi_store(to + k, RPI_LOW(rpi_upper(words), rpi_lower(words)));
        rpi_store(to + k + RPI_LANES, RPI_HIGH(rpi_upper(words), rpi_lower(words)));
      }
    }
  }
}

/* to[row][stride] = rows as words whoever multiplies them, and zeros up to whole rows, which may be
 * the last in memory. */
RPI_INLINE void gemm_words_word_rows(const bool native, const real *from, int64_t from_stride,
                                     int64_t rows, int64_t depth, real *to, int64_t stride) {
  for (int64_t r = 0; r < rows; r++, from += from_stride, to += stride) {
    for (int64_t k = 0; k < depth; k += 2 * RPI_LANES) {
      const rpi_register words = rpi_words_at(native, 1, from + k, depth - k);
      const int64_t left = stride - k / 2;
      if (left >= RPI_LANES) rpi_store(to + k / 2, words);
      else memcpy(to + k / 2, &words, (size_t)left * sizeof(real));
    }
  }
}

/* The words of two rows of inner; the second is not there where inner ends. */
RPI_INLINE rpi_register gemm_words_pair(const bool native, const real *from, int64_t stride,
                                        int64_t count, bool both) {
  const bool whole = count >= RPI_LANES;
  const rpi_register first = whole ? rpi_load(from) : rpi_load_part(from, count);
  const rpi_register second = !both   ? (rpi_register){0}
                              : whole ? rpi_load(from + stride)
                                      : rpi_load_part(from + stride, count);
  return rpi_words_across(native, first, second);
}

/* Strips of a transposed A, each [words or numbers][GEMM_STRIP], `size` apart (gemm_pack_a). */
RPI_INLINE void gemm_words_strips(const bool native, const real *from, int64_t from_stride,
                                  int64_t rows, int64_t depth, real *strips, int64_t size) {
  enum { LINE = GEMM_HEIGHT + RPI_LANES };
  _Alignas(64) real lines[2 * LINE];
  for (int64_t k = 0; k < depth; k += 2, from += 2 * from_stride) {
    for (int64_t r = 0; r < rows; r += RPI_LANES) {
      rpi_prefetch(from, 4 * from_stride + r);
      rpi_prefetch(from, 5 * from_stride + r);
      gemm_put(native, gemm_words_pair(native, from + r, from_stride, rows - r, k + 1 < depth),
               lines + r, 0, LINE);
    }
    for (int line = 0; line < (native ? 1 : 2); line++, strips += GEMM_STRIP) {
      real *to = strips;
      for (int64_t r = 0; r < rows; r += GEMM_STRIP, to += size) {
        *(gemm_piece *)to = *(const gemm_piece *)(lines + line * LINE + r);
      }
    }
  }
}

/* Words of a row from number k on, of which there are so many: of numbers, times the factor, or of
 * words. */
RPI_INLINE rpi_register gemm_words_from(const bool native, const bool stored, const real factor,
                                        const real *row, int64_t k, int64_t count) {
  if (!stored) return rpi_words_at(native, factor, row + k, count);
  const int64_t words = rpi_divide_up(count, 2);
  return rpi_load_left(row + k / 2, words);
}

/* panel[words or numbers][stride] = B given as [columns, inner], times the factor, its columns
 * filled up with zeros to whole vectors. */
RPI_INLINE void gemm_words_turned_of(const bool native, const bool stored, const real factor,
                                     const real *from, int64_t from_stride, int64_t width,
                                     int64_t depth, real *panel, int64_t stride) {
  const int64_t words = rpi_divide_up(depth, 2);
  for (int64_t j = 0; j < width; j += RPI_LANES, from += RPI_LANES * from_stride) {
    const int64_t present = rpi_min(width - j, RPI_LANES);
    for (int64_t k = 0; k < depth; k += 2 * RPI_LANES) {
      rpi_register square[RPI_LANES];
      if (present == RPI_LANES && k + 2 * RPI_LANES <= depth) {
        RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) {
          const real *const row = from + i * from_stride;
          square[i] = gemm_words_from(native, stored, factor, row, k, 2 * RPI_LANES);
        }
      } else {
        for (int i = 0; i < RPI_LANES; i++) {
          const real *const row = from + i * from_stride;
          square[i] = i < present ? gemm_words_from(native, stored, factor, row, k, depth - k)
                                  : (rpi_register){0};
        }
      }
      rpi_transpose(square);
      const int64_t left = rpi_min(words - k / 2, RPI_LANES);
      real *const to = panel + (native ? k / 2 : k) * stride + j;
      if (left == RPI_LANES) {
        RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) {
          gemm_put(native, square[i], to, i, stride);
        }
      } else {
        for (int64_t i = 0; i < left; i++) gemm_put(native, square[i], to, i, stride);
      }
    }
  }
}

RPI_INLINE void gemm_words_turned(const bool native, const real *from, int64_t from_stride,
                                  int64_t width, int64_t depth, real *panel, int64_t stride) {
  gemm_words_turned_of(native, false, 1, from, from_stride, width, depth, panel, stride);
}
RPI_INLINE void gemm_words_stored(const bool native, const real *from, int64_t from_stride,
                                  int64_t width, int64_t depth, real *panel, int64_t stride) {
  gemm_words_turned_of(native, true, 1, from, from_stride, width, depth, panel, stride);
}

/* The same of B as it lies. */
RPI_INLINE void gemm_words_panel(const bool native, const real *from, int64_t from_stride,
                                 int64_t width, int64_t depth, real *panel, int64_t stride) {
  for (int64_t k = 0; k < depth; k += 2, from += 2 * from_stride) {
    for (int64_t j = 0; j < width; j += RPI_LANES) {
      gemm_put(native, gemm_words_pair(native, from + j, from_stride, width - j, k + 1 < depth),
               panel + j, k / 2, stride);
    }
  }
}

/* Each by instructions, and without. */
enum { GEMM_ROWS, GEMM_WORD_ROWS, GEMM_TURNED, GEMM_STORED, GEMM_STRIPS, GEMM_PANEL, GEMM_WAYS };
typedef void (*gemm_words_fn)(const real *from, int64_t from_stride, int64_t lines, int64_t depth,
                              real *to, int64_t stride);
#define GEMM_WORDS_FN(how, target, name)                                                           \
  target RPI_NOINLINE void gemm_##name##_##how(const real *from, int64_t from_stride,              \
                                               int64_t lines, int64_t depth, real *to,             \
                                               int64_t stride) {                                   \
    gemm_words_##name(RPI_##how == RPI_NATIVE, from, from_stride, lines, depth, to, stride);       \
  }
#define GEMM_WORDS_FNS(how, target)                                                                \
  GEMM_WORDS_FN(how, target, rows)                                                                 \
  GEMM_WORDS_FN(how, target, word_rows)                                                            \
  GEMM_WORDS_FN(how, target, turned)                                                               \
  GEMM_WORDS_FN(how, target, stored)                                                               \
  GEMM_WORDS_FN(how, target, strips)                                                               \
  GEMM_WORDS_FN(how, target, panel)
#define GEMM_WORDS_ENTRY(how)                                                                      \
  [RPI_##how] = {gemm_rows_##how,   gemm_word_rows_##how, gemm_turned_##how,                       \
                 gemm_stored_##how, gemm_strips_##how,    gemm_panel_##how}

GEMM_WORDS_FNS(TWIN, )
#ifdef RPI_BF16_NATIVE
GEMM_WORDS_FNS(NATIVE, RPI_BF16_TARGET)
#endif
static const gemm_words_fn gemm_words[][GEMM_WAYS] = {
    GEMM_WORDS_ENTRY(TWIN),
#ifdef RPI_BF16_NATIVE
    GEMM_WORDS_ENTRY(NATIVE),
#endif
};

#endif

#endif
