/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_few.h: products of few rows, where packing B would cost more than it saves.
 */
#ifndef RPI_GEMM_FEW_H
#define RPI_GEMM_FEW_H

#include "ops/gemm_words.h"
#include "ops/strips.h"

/* Up to this many rows packing B, or letting BLAS pack it, costs more than it saves:
 * with B transposed, whose packing is dearer, and with B as it lies. */
#define GEMM_FEW_ROWS_TRANSPOSED 32
#define GEMM_FEW_ROWS_PLAIN 16

/* A in bf16 is rows of words by then, in whole vectors, and B becomes words as it is read, or is
 * stored as such: */
enum { RPI_NATIVE_STORED = RPI_TWIN + 1, RPI_TWIN_STORED };

static int gemm_few_how(const rpi_gemm_args *g) {
  const int how = gemm_how(g);
  if (gemm_stored_at(g, 0, 0).at == NULL) return how;
  return how == RPI_NATIVE ? RPI_NATIVE_STORED : RPI_TWIN_STORED;
}

/* FUNCTIONS(how, target) of each, and ENTRY(how) of each, of a table that is indexed by it. */
#if RPI_REAL_BYTES != 4
#define GEMM_FOR_EACH(FUNCTIONS) FUNCTIONS(NUMBERS, )
#define GEMM_ENTRIES(ENTRY) ENTRY(NUMBERS)
#else
#define GEMM_FOR_EACH_TWIN(FUNCTIONS)                                                              \
  FUNCTIONS(NUMBERS, )                                                                             \
  FUNCTIONS(TWIN, )                                                                                \
  FUNCTIONS(TWIN_STORED, )
#define GEMM_ENTRIES_TWIN(ENTRY) ENTRY(NUMBERS), ENTRY(TWIN), ENTRY(TWIN_STORED)
#ifdef RPI_BF16_NATIVE
#define GEMM_FOR_EACH(FUNCTIONS)                                                                   \
  GEMM_FOR_EACH_TWIN(FUNCTIONS)                                                                    \
  FUNCTIONS(NATIVE, RPI_BF16_TARGET)                                                               \
  FUNCTIONS(NATIVE_STORED, RPI_BF16_TARGET)
#define GEMM_ENTRIES(ENTRY) GEMM_ENTRIES_TWIN(ENTRY), ENTRY(NATIVE), ENTRY(NATIVE_STORED)
#else
#define GEMM_FOR_EACH GEMM_FOR_EACH_TWIN
#define GEMM_ENTRIES GEMM_ENTRIES_TWIN
#endif
#endif

#define GEMM_IS_NATIVE(how) ((how) == RPI_NATIVE || (how) == RPI_NATIVE_STORED)
#define GEMM_IS_STORED(how) ((how) > RPI_TWIN)

/* Numbers of inner that are met at once, and of B in what is read there as one. */
#define GEMM_STEP(how) ((how) == RPI_NUMBERS ? RPI_LANES : 2 * RPI_LANES)
#define GEMM_PER_B(how) (GEMM_IS_STORED(how) ? 2 : 1)

/* What one step reads of a row: numbers, or words, or of these the upper and the lower halves. */
typedef struct gemm_read {
  rpi_register first, second;
} gemm_read;

RPI_INLINE gemm_read gemm_read_words(const int how, rpi_register words) {
#if RPI_REAL_BYTES == 4
  if (!GEMM_IS_NATIVE(how)) return (gemm_read){rpi_upper(words), rpi_lower(words)};
#endif
  (void)how;
  return (gemm_read){words, (rpi_register){0}};
}

RPI_INLINE gemm_read gemm_read_numbers(const real *from, int64_t left) {
  const rpi_register x = rpi_load_left(from, left);
  return (gemm_read){x, (rpi_register){0}};
}

/* Of a row of B, from number k on, of which `left` are left. */
RPI_INLINE gemm_read gemm_few_b(const int how, const real *row, int64_t k, int64_t left) {
#if RPI_REAL_BYTES == 4
  if (how != RPI_NUMBERS) {
    const bool native = GEMM_IS_NATIVE(how), stored = GEMM_IS_STORED(how);
    return gemm_read_words(how, gemm_words_from(native, stored, 1, row, k, left));
  }
#endif
  (void)how;
  return gemm_read_numbers(row + k, left);
}

/* The same of A. */
RPI_INLINE gemm_read gemm_few_a(const int how, const real *row, int64_t k, int64_t left) {
  if (how == RPI_NUMBERS) return gemm_read_numbers(row + k, left);
  return gemm_read_words(how, rpi_load(row + k / 2));
}

RPI_INLINE rpi_register gemm_few_add(const int how, rpi_register sum, gemm_read a, gemm_read b) {
#ifdef RPI_BF16_NATIVE
  if (GEMM_IS_NATIVE(how)) return rpi_words_add(sum, a.first, b.first);
#endif
  sum += a.first * b.first;
  if (how != RPI_NUMBERS) sum += a.second * b.second;
  return sum;
}

/* ---- streams: B as [columns, inner], very few rows ----------------------- */

/* Up to so many rows of A meet one column after the other: B, which comes from memory and is all
 * the work there is, is read from its first byte to its last. With a B of 32768 x 512 from memory
 * one row took 1.4 times as long by dots, which have many columns at once, four rows 1.2 to 1.3
 * times (Zen 5). Of six rows and more the sums are the work. */
#define GEMM_STREAM_ROWS 5

/* B is asked for so many numbers ahead; half and twice as many are as good, none 1.1 times as
 * long. */
#define GEMM_STREAM_AHEAD (8192 / RPI_REAL_BYTES)

/* The products of all rows of A with one column, lane by lane, to sum[row * RPI_LANES]. */
RPI_INLINE void gemm_stream_column(const int how, const int rows, const rpi_gemm_args *g,
                                   const real *b, int64_t ahead, rpi_register *sum) {
  const real *const a = g->a;
  const int64_t a_stride = g->a_stride, inner = g->inner, step = GEMM_STEP(how);
  rpi_register s[GEMM_STREAM_ROWS] = {0};
  int64_t k = 0;
  for (; k + step <= inner; k += step) {
    for (int64_t i = 0; i < step / GEMM_PER_B(how); i += RPI_LANES) {
      __builtin_prefetch(b + ahead + k / GEMM_PER_B(how) + i, 0, 3);
    }
    const gemm_read y = gemm_few_b(how, b, k, step);
    RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
      s[r] = gemm_few_add(how, s[r], gemm_few_a(how, a + r * a_stride, k, step), y);
    }
  }
  if (k < inner) {
    const gemm_read y = gemm_few_b(how, b, k, inner - k);
    RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
      s[r] = gemm_few_add(how, s[r], gemm_few_a(how, a + r * a_stride, k, inner - k), y);
    }
  }
  RPI_UNROLL(8) for (int r = 0; r < rows; r++) sum[r * RPI_LANES] = s[r];
}

/* A vector of columns, whose sums are transposed, which makes the additions across lanes additions
 * of vectors. ahead: as far as B is asked for beyond a column. */
RPI_INLINE void gemm_stream(const int how, const int rows, const rpi_gemm_args *g, int64_t column,
                            int64_t ahead) {
  rpi_register sum[GEMM_STREAM_ROWS * RPI_LANES];
  const real *b = g->b + column * g->b_stride;
  for (int j = 0; j < RPI_LANES; j++, b += g->b_stride) {
    gemm_stream_column(how, rows, g, b, ahead, sum + j);
  }
  for (int r = 0; r < rows; r++) {
    rpi_register *const lanes = sum + r * RPI_LANES;
    rpi_transpose(lanes);
    rpi_register all = lanes[0];
    RPI_UNROLL(16) for (int i = 1; i < RPI_LANES; i++) all += lanes[i];
    real *const c = g->c + r * g->c_stride + column;
    rpi_store(c, rpi_load(c) + all);
  }
}

typedef void (*gemm_stream_fn)(const rpi_gemm_args *g, int64_t column, int64_t ahead);

#define GEMM_STREAM_FN(how, target, rows)                                                          \
  target RPI_NOINLINE void gemm_stream_##how##_##rows(const rpi_gemm_args *g, int64_t column,      \
                                                      int64_t ahead) {                             \
    gemm_stream(RPI_##how, rows, g, column, ahead);                                                \
  }
#define GEMM_STREAM_FNS(how, target)                                                               \
  GEMM_STREAM_FN(how, target, 1)                                                                   \
  GEMM_STREAM_FN(how, target, 2)                                                                   \
  GEMM_STREAM_FN(how, target, 3)                                                                   \
  GEMM_STREAM_FN(how, target, 4)                                                                   \
  GEMM_STREAM_FN(how, target, 5)
#define GEMM_STREAM_ENTRY(how)                                                                     \
  [RPI_##how] = {gemm_stream_##how##_1, gemm_stream_##how##_2, gemm_stream_##how##_3,              \
                 gemm_stream_##how##_4, gemm_stream_##how##_5}

GEMM_FOR_EACH(GEMM_STREAM_FNS)
static const gemm_stream_fn gemm_streams[][GEMM_STREAM_ROWS] = {GEMM_ENTRIES(GEMM_STREAM_ENTRY)};

/* The whole vectors of columns of a block; where they end. */
static int64_t gemm_stream_block(const rpi_gemm_args *g, gemm_block at) {
  const gemm_stream_fn by_rows = gemm_streams[gemm_few_how(g)][g->rows - 1];
  const int64_t columns_ahead = rpi_max(GEMM_STREAM_AHEAD / rpi_max(g->inner, 1), 1);
  const int64_t end = at.column + at.columns;
  int64_t column = at.column;
  for (; column + RPI_LANES <= end; column += RPI_LANES) {
    const bool more = column + RPI_LANES + columns_ahead <= g->columns;
    by_rows(g, column, more ? columns_ahead * g->b_stride : 0);
  }
  return column;
}

/* ---- dots: B as [columns, inner] ---------------------------------------- */

/* Sums held at once by the dots kernel: a whole number of vectors of sums. */
#define GEMM_DOTS (RPI_LANES > 8 ? RPI_LANES : 8)

/* Rows of B that nobody works on yet, asked for meanwhile: one vector of each at
 * every step, into the second-level cache (into the first, whose few sets the rows
 * share, was no help). The processor's own prefetching begins anew with every row of
 * B: 4 rows of A took 127 us for a B of 512 x 512 from memory, with this 62. */
typedef struct gemm_next {
  const real *row;
  int64_t rows;
} gemm_next;

/* rows x columns dot products of `inner` numbers each, rows of A with rows of the
 * transposed B. The sums of one vector each are then transposed, which makes the
 * additions across lanes additions of vectors. */
RPI_INLINE void gemm_dots(const int how, const int rows, const int columns, const rpi_gemm_args *g,
                          int64_t row, int64_t column, gemm_next ahead) {
  rpi_register sum[GEMM_DOTS] = {0};
  const real *const a = g->a + row * g->a_stride, *const b = g->b + column * g->b_stride;
  const int64_t a_stride = g->a_stride, b_stride = g->b_stride, inner = g->inner;
  const int64_t step = GEMM_STEP(how);
  int64_t k = 0;
  for (; k + step <= inner; k += step) {
    for (int64_t i = 0; i < ahead.rows; i++) {
      const real *const next = ahead.row + i * b_stride + k / GEMM_PER_B(how);
      for (int64_t n = 0; n < step / GEMM_PER_B(how); n += RPI_LANES) {
        __builtin_prefetch(next + n, 0, 2);
      }
    }
    gemm_read x[4];
    RPI_UNROLL(4) for (int r = 0; r < rows; r++) x[r] = gemm_few_a(how, a + r * a_stride, k, step);
    RPI_UNROLL(16) for (int j = 0; j < columns; j++) {
      const gemm_read y = gemm_few_b(how, b + j * b_stride, k, step);
      RPI_UNROLL(4) for (int r = 0; r < rows; r++) {
        rpi_register *const to = &sum[r * columns + j];
        *to = gemm_few_add(how, *to, x[r], y);
      }
    }
  }
  if (k < inner) {
    for (int j = 0; j < columns; j++) {
      const gemm_read y = gemm_few_b(how, b + j * b_stride, k, inner - k);
      for (int r = 0; r < rows; r++) {
        rpi_register *const to = &sum[r * columns + j];
        *to = gemm_few_add(how, *to, gemm_few_a(how, a + r * a_stride, k, inner - k), y);
      }
    }
  }
  real total[GEMM_DOTS];
  RPI_UNROLL(4) for (int first = 0; first < GEMM_DOTS; first += RPI_LANES) {
    rpi_transpose(sum + first);
    rpi_register all = sum[first];
    RPI_UNROLL(16) for (int i = 1; i < RPI_LANES; i++) all += sum[first + i];
    rpi_store(total + first, all);
  }
  for (int r = 0; r < rows; r++) {
    real *const c = g->c + (row + r) * g->c_stride + column;
    for (int j = 0; j < columns; j++) c[j] += total[r * columns + j];
  }
}

/* Each its own function, as tile.h's strips and for the same reason. */
typedef void (*gemm_dots_fn)(const rpi_gemm_args *g, int64_t row, int64_t column, gemm_next ahead);

#define GEMM_DOTS_FN(how, target, name, rows, columns)                                             \
  target RPI_NOINLINE void gemm_dots_##how##_##name(const rpi_gemm_args *g, int64_t row,           \
                                                    int64_t column, gemm_next ahead) {             \
    gemm_dots(RPI_##how, rows, columns, g, row, column, ahead);                                    \
  }
enum { GEMM_DOTS_1, GEMM_DOTS_2, GEMM_DOTS_4, GEMM_DOTS_SINGLE };
#define GEMM_DOTS_FNS(how, target)                                                                 \
  GEMM_DOTS_FN(how, target, 1, 1, GEMM_DOTS)                                                       \
  GEMM_DOTS_FN(how, target, 2, 2, GEMM_DOTS / 2)                                                   \
  GEMM_DOTS_FN(how, target, 4, 4, GEMM_DOTS / 4)                                                   \
  GEMM_DOTS_FN(how, target, single, 1, 1)
#define GEMM_DOTS_ENTRY(how)                                                                       \
  [RPI_##how] = {gemm_dots_##how##_1, gemm_dots_##how##_2, gemm_dots_##how##_4,                    \
                 gemm_dots_##how##_single}

GEMM_FOR_EACH(GEMM_DOTS_FNS)
static const gemm_dots_fn gemm_dots_by[][GEMM_DOTS_SINGLE + 1] = {GEMM_ENTRIES(GEMM_DOTS_ENTRY)};

/* All rows of A with the GEMM_DOTS columns from `column` on: `rows` calls, whatever
 * their shapes, so that much of the next columns is asked for in each. */
static void gemm_dots_group(const rpi_gemm_args *g, int64_t column, bool more) {
  const gemm_dots_fn *const by = gemm_dots_by[gemm_few_how(g)];
  const int64_t share = more ? rpi_divide_up(GEMM_DOTS, g->rows) : 0;
  int64_t asked = 0;
  for (int64_t row = 0, rows; row < g->rows; row += rows) {
    const int64_t left = g->rows - row;
    rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const gemm_dots_fn dots = by[rows / 2];
    for (int64_t j = 0; j < GEMM_DOTS; j += GEMM_DOTS / rows) {
      const int64_t next = column + GEMM_DOTS + asked, count = rpi_min(share, GEMM_DOTS - asked);
      dots(g, row, column + j, (gemm_next){count > 0 ? g->b + next * g->b_stride : NULL, count});
      asked += count;
    }
  }
}

/* A block's columns, from what is there of inner, added to C. */
static void gemm_dots_block(const rpi_gemm_args *g, gemm_block at) {
  const int64_t end = at.column + at.columns;
  int64_t column = g->rows <= GEMM_STREAM_ROWS ? gemm_stream_block(g, at) : at.column;
  for (; column + GEMM_DOTS <= end; column += GEMM_DOTS) {
    gemm_dots_group(g, column, column + 2 * GEMM_DOTS <= g->columns);
  }
  const gemm_dots_fn single = gemm_dots_by[gemm_few_how(g)][GEMM_DOTS_SINGLE];
  for (; column < end; column++) {
    for (int64_t row = 0; row < g->rows; row++) single(g, row, column, (gemm_next){NULL, 0});
  }
}

/* All rows of A as words, so much of inner at a time as 32 KiB hold. */
#define GEMM_FEW_WORDS 8192

static void gemm_dots_words(const rpi_gemm_args *g, gemm_block at) {
#if RPI_REAL_BYTES == 4
  _Alignas(64) real words[GEMM_FEW_WORDS];
  const gemm_words_fn pack = gemm_words[gemm_how(g)][GEMM_WORD_ROWS];
  const int64_t most = GEMM_FEW_WORDS / RPI_LANES / g->rows * 2 * RPI_LANES;
  for (int64_t inner = 0; inner < g->inner; inner += most) {
    rpi_gemm_args part = *g;
    part.inner = rpi_min(most, g->inner - inner);
    part.a = words;
    part.a_stride = rpi_round_up(part.inner, 2 * RPI_LANES) / 2;
    const gemm_stored stored = gemm_stored_at(g, inner, 0);
    part.b = stored.at != NULL ? stored.at : gemm_b_at(g, inner, 0);
    if (stored.at != NULL) part.b_stride = stored.stride;
    pack(gemm_a_at(g, 0, inner), g->a_stride, g->rows, part.inner, words, part.a_stride);
    gemm_dots_block(&part, at);
  }
#else
  (void)g, (void)at;
#endif
}

static void gemm_dots_task(void *context, int64_t task, int worker) {
  (void)worker;
  const gemm_job *const job = context;
  const rpi_gemm_args *const g = job->args;
  const gemm_block at = gemm_block_at(job, task);
  gemm_begin(g, at);
  if (gemm_how(g) == RPI_NUMBERS) gemm_dots_block(g, at);
  else gemm_dots_words(g, at);
}

/* ---- sums in C: B as [inner, columns] ----------------------------------- */

/* The part of C in which few rows are added up: near the first-level cache, and wide
 * enough to read B in long pieces. Half of it cost a quarter at 16 rows. */
#define GEMM_FEW_BYTES 32768

/* C[rows] += A[rows, depth] . B[depth] over whole vectors of columns: C is loaded and
 * stored once for `depth` rows of B, the numbers of A stay in registers. One row of A
 * took 5.9 ms with tile.h's strips for a B of 512 x 32768, which hop from row to row
 * of B, and 2.5 with this. */
RPI_INLINE void gemm_add(const int rows, const int depth, const rpi_product *p, int64_t vectors,
                         bool ahead) {
  rpi_register x[8][8];
  RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
    RPI_UNROLL(8) for (int k = 0; k < depth; k++) {
      x[r][k] = (rpi_register){0} + p->a[r * p->a_row + k * p->a_inner];
    }
  }
  const real *const b = p->b;
  real *const c = p->c;
  const int64_t b_stride = p->b_stride, c_stride = p->c_stride;
  for (int64_t j = 0; j < vectors * RPI_LANES; j += RPI_LANES) {
    rpi_register y[8];
    RPI_UNROLL(8) for (int k = 0; k < depth; k++) {
      y[k] = rpi_load(b + k * b_stride + j);
      if (ahead) __builtin_prefetch(b + (k + depth) * b_stride + j, 0, 2);
    }
    RPI_UNROLL(8) for (int r = 0; r < rows; r++) {
      rpi_register sum = rpi_load(c + r * c_stride + j);
      RPI_UNROLL(8) for (int k = 0; k < depth; k++) sum += x[r][k] * y[k];
      rpi_store(c + r * c_stride + j, sum);
    }
  }
}

typedef void (*gemm_add_fn)(const rpi_product *p, int64_t vectors, bool ahead);

#define GEMM_ADD_FN(rows, depth)                                                                   \
  RPI_NOINLINE void gemm_add_##rows##_##depth(const rpi_product *p, int64_t vectors, bool ahead) { \
    gemm_add(rows, depth, p, vectors, ahead);                                                      \
  }
GEMM_ADD_FN(1, 1)
GEMM_ADD_FN(2, 1)
GEMM_ADD_FN(4, 1)
GEMM_ADD_FN(1, 4)
GEMM_ADD_FN(2, 4)
GEMM_ADD_FN(4, 4)
GEMM_ADD_FN(1, 8)
GEMM_ADD_FN(2, 8)

/* All of inner, for so few columns that C stays in the cache. B is read along its rows,
 * a few of them side by side, and the first strip asks for the next few. */
static void gemm_add_columns(rpi_product p, int64_t rows, int64_t vectors) {
  static const gemm_add_fn adds[3][3] = {{gemm_add_1_1, gemm_add_2_1, gemm_add_4_1},
                                         {gemm_add_1_4, gemm_add_2_4, gemm_add_4_4},
                                         {gemm_add_1_8, gemm_add_2_8, NULL}};
  const int64_t inner = p.inner, most = rows <= 2 ? 8 : 4;
  for (int64_t k = 0, depth; k < inner; k += depth) {
    depth = inner - k >= most ? most : 1;
    const bool ahead = k + 2 * depth <= inner;
    rpi_product part = p;
    part.b = p.b + k * p.b_stride;
    for (int64_t row = 0, strip; row < rows; row += strip) {
      strip = rows - row >= 4 ? 4 : rows - row >= 2 ? 2 : 1;
      part.a = p.a + row * p.a_row + k * p.a_inner;
      part.c = p.c + row * p.c_stride;
      adds[depth / 4][strip / 2](&part, vectors, ahead && row == 0);
    }
  }
}

/* Few rows times B as it lies: only its last columns, less than a vector, are packed. */
static void gemm_few_rows_task(void *context, int64_t task, int worker) {
  (void)worker;
  const gemm_job *const job = context;
  const rpi_gemm_args *const g = job->args;
  const gemm_block at = gemm_block_at(job, task);
  gemm_begin(g, at);
  rpi_product p = {.a = g->a,
                   .a_row = g->transpose_a ? 1 : g->a_stride,
                   .a_inner = g->transpose_a ? g->a_stride : 1,
                   .b = g->b + at.column,
                   .b_stride = g->b_stride,
                   .c = g->c + at.column,
                   .c_stride = g->c_stride,
                   .inner = g->inner};
  const int64_t whole = at.columns / RPI_LANES * RPI_LANES, rest = at.columns - whole;
  const int64_t span = rpi_round_up(GEMM_FEW_BYTES / RPI_REAL_BYTES / at.rows, RPI_LANES);
  for (int64_t j = 0; j < whole; j += span) {
    rpi_product part = p;
    part.b += j;
    part.c += j;
    gemm_add_columns(part, at.rows, rpi_min(span, whole - j) / RPI_LANES);
  }
  if (rest == 0) return;
  _Alignas(64) real panel[GEMM_SMALL_DEPTH * RPI_LANES];
  real *const c = p.c + whole;
  for (int64_t inner = 0; inner < g->inner; inner += GEMM_SMALL_DEPTH) {
    const int64_t depth = rpi_min(GEMM_SMALL_DEPTH, g->inner - inner);
    gemm_pack_b(g, inner, depth, at.column + whole, rest, panel);
    gemm_panel((gemm_tile){.a = gemm_a_at(g, 0, inner),
                           .a_row = p.a_row,
                           .a_inner = p.a_inner,
                           .a_strip = GEMM_STRIP * p.a_row,
                           .b = panel,
                           .b_stride = RPI_LANES,
                           .inner = depth,
                           .start = c,
                           .start_stride = g->c_stride,
                           .c = c,
                           .c_stride = g->c_stride},
               at.rows, rest, (gemm_ahead){0});
  }
}

#endif
