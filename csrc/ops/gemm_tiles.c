/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_tiles.c: blocks of a product in f32 by tiles of bf16 (tiles.h), to the precision of f32.
 *
 * A number of f32 is the sum of three of bf16, exactly: its upper 8 bits, rounded to nearest, the
 * upper 8 of what is left, and the rest.
 *
 *   a b = a1 b1 + (a1 b2 + a2 b1) + (a1 b3 + a2 b2 + a3 b1) + less than 2^-24 of it
 *
 * Six products of tiles, exact but for their sums, take 3/8 of the time of the multiply-adds of two
 * AVX-512 units. 32 products of an element are added to it in six roundings, not 32, the small ones
 * first: its error is that of the plain sum or less (docs/numbers.md).
 *
 *          32 of inner
 *          +---------+
 *     32   | 1  2  3 | ...   a strip: 32 rows of A, or columns of B, and for every 32 of inner the
 *          +---------+       three parts, two tiles each
 *
 * The pairs of a tile are numbers k and k + 16 of inner: then no lane changes its place where
 * memory runs along the lanes of the tile. Strips of one operand are kept, as many as the
 * second-level cache holds; those of the other pass by, one at a time.
 *
 * What is not finite has no such parts: two strips of which one holds infinity or NaN, or more than
 * bf16 can, are multiplied as gemm.c does.
 */
#include "ops/tiles.h"

#define TILES_SIDE (2 * RPI_TILE_SIDE)  /* rows and columns of C of one call of the kernel */
#define TILES_INNER (2 * RPI_TILE_SIDE) /* of inner, in one tile */
#define TILES_PART (2 * RPI_TILE_WORDS)
#define TILES_STEP (3 * TILES_PART) /* words of a strip for TILES_INNER of inner */

/* So many rows of A, or columns of B, are kept in parts while the others pass by, and so much of
 * inner at a time: 768 KiB, which stay in the second-level cache. */
#define TILES_DEPTH 512
#define TILES_KEPT_WORDS (256 / TILES_SIDE * TILES_DEPTH / TILES_INNER * TILES_STEP)
#define TILES_KEPT 1024
#define TILES_PASSING_WORDS (2 * TILES_DEPTH / TILES_INNER * TILES_STEP)
#define TILES_SMALL_DEPTH 64

/* Of fewer, the parts cost more than the products save. */
#define TILES_LEAST 32
#define TILES_LEAST_ROWS 48

typedef uint32_t tiles_words __attribute__((vector_size(4 * RPI_LANES)));

RPI_INLINE void tiles_store(uint32_t *to, tiles_words words) {
  rpi_store((real *)to, (rpi_register)words);
}

/* x to the nearest number of bf16; halves away from zero. */
RPI_INLINE tiles_words tiles_upper(rpi_register x) {
  return ((tiles_words)x + 0x8000u) & 0xFFFF0000u;
}

/* A tile of each part. Row i of it has the numbers from[i * step ...] and, `partner` further, what
 * they are paired with. What is returned has a NaN in it where a number was not finite. */
RPI_INLINE rpi_register tiles_split(const real *from, int64_t step, int64_t partner, int64_t ahead,
                                    uint32_t *to) {
  rpi_register odd = {0};
  for (int64_t i = 0; i < RPI_TILE_SIDE; i++, from += step) {
    rpi_prefetch(from, ahead);
    rpi_prefetch(from, ahead + partner);
    RPI_UNROLL(4) for (int64_t l = 0; l < RPI_TILE_SIDE; l += RPI_LANES) {
      uint32_t *const row = to + i * RPI_TILE_SIDE + l;
      const rpi_register x = rpi_load(from + l), y = rpi_load(from + partner + l);
      const tiles_words x1 = tiles_upper(x), y1 = tiles_upper(y);
      const rpi_register less_x = x - (rpi_register)x1, less_y = y - (rpi_register)y1;
      const tiles_words x2 = tiles_upper(less_x), y2 = tiles_upper(less_y);
      const rpi_register x3 = less_x - (rpi_register)x2, y3 = less_y - (rpi_register)y2;
      odd += less_x * 0 + less_y * 0;
      tiles_store(row, x1 >> 16 | y1);
      tiles_store(row + TILES_PART, x2 >> 16 | y2);
      tiles_store(row + 2 * TILES_PART, (tiles_words)x3 >> 16 | ((tiles_words)y3 & 0xFFFF0000u));
    }
  }
  return odd;
}

/* 16 x 16 numbers, rows to columns. */
RPI_INLINE void tiles_turn(const real *from, int64_t step, int64_t ahead, real *to) {
#if RPI_LANES == RPI_TILE_SIDE
  rpi_register line[RPI_LANES];
  RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) {
    line[i] = rpi_load(from + i * step);
    rpi_prefetch(from, i * step + ahead);
  }
  rpi_transpose(line);
  RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) rpi_store(to + i * RPI_LANES, line[i]);
#else
  (void)ahead;
  for (int64_t i = 0; i < RPI_TILE_WORDS; i++) {
    to[i] = from[i % RPI_TILE_SIDE * step + i / RPI_TILE_SIDE];
  }
#endif
}

/* A or B as it lies: rows `stride` apart that run along inner, or across it. */
typedef struct tiles_source {
  const real *at;
  int64_t stride;
  bool along, turned; /* turned: lanes of memory are rows of a tile */
} tiles_source;

/* One tile of each part of a strip, and the memory `ahead` is asked for. */
RPI_NOINLINE void tiles_pack_one(const real *from, int64_t step, int64_t partner, int64_t ahead,
                                 bool turned, uint32_t *to, rpi_register *odd) {
  if (turned) {
    _Alignas(64) real stage[2 * RPI_TILE_WORDS];
    tiles_turn(from, step, ahead, stage);
    tiles_turn(from + partner, step, ahead, stage + RPI_TILE_WORDS);
    *odd += tiles_split(stage, RPI_TILE_SIDE, RPI_TILE_WORDS, 0, to);
  } else {
    *odd += tiles_split(from, step, partner, ahead, to);
  }
}

/* The same of less than whole tiles: `lines` rows of memory, `width` numbers of each. */
static void tiles_pack_ragged(const real *from, tiles_source s, int64_t lines, int64_t width,
                              uint32_t *to, rpi_register *odd) {
  real whole[RPI_TILE_SIDE * TILES_INNER] = {0};
  const int64_t stride = s.along ? TILES_INNER : RPI_TILE_SIDE;
  for (int64_t i = 0; i < lines; i++) {
    memcpy(whole + i * stride, from + i * s.stride, (size_t)width * sizeof(real));
  }
  tiles_pack_one(whole, stride, s.along ? RPI_TILE_SIDE : RPI_TILE_WORDS, 0, s.turned, to, odd);
}

/* One tile of each part of the strip `to`: `across` of its lines from `first` on, `inner` of inner
 * from k on. */
static void tiles_pack_at(tiles_source s, int64_t first, int64_t across, int64_t k, int64_t inner,
                          uint32_t *to, rpi_register *odd) {
  const int64_t partner = s.along ? RPI_TILE_SIDE : RPI_TILE_SIDE * s.stride;
  const real *const from = s.along ? s.at + first * s.stride + k : s.at + k * s.stride + first;
  to += k / TILES_INNER * TILES_STEP + first % TILES_SIDE * RPI_TILE_SIDE;
  if (across == RPI_TILE_SIDE && inner == TILES_INNER) {
    tiles_pack_one(from, s.stride, partner, 2 * partner, s.turned, to, odd);
  } else {
    tiles_pack_ragged(from, s, s.along ? across : inner, s.along ? inner : across, to, odd);
  }
}

/* Strips of `words` each, of `lines` rows of A or columns of B, in the order in which they lie in
 * memory. finite: of each, whether all of it is. */
static void tiles_pack(tiles_source s, int64_t lines, int64_t depth, int64_t words, uint32_t *to,
                       bool *finite) {
  rpi_register odd[TILES_KEPT / TILES_SIDE] = {{0}};
  const int64_t outer = s.along ? lines : depth, inner = s.along ? depth : lines;
  const int64_t outer_step = s.along ? RPI_TILE_SIDE : TILES_INNER;
  const int64_t inner_step = s.along ? TILES_INNER : RPI_TILE_SIDE;
  for (int64_t i = 0; i < outer; i += outer_step) {
    for (int64_t j = 0; j < inner; j += inner_step) {
      const int64_t first = s.along ? i : j, k = s.along ? j : i, strip = first / TILES_SIDE;
      tiles_pack_at(s, first, rpi_min(RPI_TILE_SIDE, lines - first), k,
                    rpi_min(TILES_INNER, depth - k), to + strip * words, &odd[strip]);
    }
  }
  for (int64_t i = 0; i < gemm_parts(lines, TILES_SIDE); i++) finite[i] = rpi_total(odd[i]) == 0;
}

/* One call of the kernel: c = start + A . B, a strip of each. */
typedef struct tiles_product {
  const uint32_t *a, *b;
  int64_t steps; /* of TILES_INNER of inner */
  const real *start;
  int64_t start_stride;
  real *c;
  int64_t c_stride;
  const real *next; /* where the next call writes, rows of c_stride; or NULL */
} tiles_product;

/* After this many steps a tile is stored, for nothing: a store that follows more than 120 products
 * without one takes 300 ns, a fifth of a call (docs/gemm.md). */
#define TILES_STORED 4

/* Tiles 0 to 3 are C, two by two; 4 and 5 a part of A, 6 and 7 one of B. */
#define TILES_LEFT(part)                                                                           \
  RPI_TILE_LOAD(4, a + (part) * TILES_PART, 64);                                                   \
  if (rows > 1) RPI_TILE_LOAD(5, a + (part) * TILES_PART + RPI_TILE_WORDS, 64)
/* Another part of B, or of A, and the products with what there is of the other. */
#define TILES_DOTS_RIGHT(part)                                                                     \
  RPI_TILE_LOAD(6, b + (part) * TILES_PART, 64);                                                   \
  RPI_TILE_DOT(0, 4, 6);                                                                           \
  if (rows > 1) RPI_TILE_DOT(2, 5, 6);                                                             \
  if (columns > 1) RPI_TILE_LOAD(7, b + (part) * TILES_PART + RPI_TILE_WORDS, 64);                 \
  if (columns > 1) RPI_TILE_DOT(1, 4, 7);                                                          \
  if (rows > 1 && columns > 1) RPI_TILE_DOT(3, 5, 7)
#define TILES_DOTS_LEFT(part)                                                                      \
  RPI_TILE_LOAD(4, a + (part) * TILES_PART, 64);                                                   \
  RPI_TILE_DOT(0, 4, 6);                                                                           \
  if (columns > 1) RPI_TILE_DOT(1, 4, 7);                                                          \
  if (rows > 1) RPI_TILE_LOAD(5, a + (part) * TILES_PART + RPI_TILE_WORDS, 64);                    \
  if (rows > 1) RPI_TILE_DOT(2, 5, 6);                                                             \
  if (rows > 1 && columns > 1) RPI_TILE_DOT(3, 5, 7)
#define TILES_C(move, at, stride)                                                                  \
  move(0, at, (stride) * RPI_REAL_BYTES);                                                          \
  if (columns > 1) move(1, (at) + RPI_TILE_SIDE, (stride) * RPI_REAL_BYTES);                       \
  if (rows > 1) move(2, (at) + RPI_TILE_SIDE * (stride), (stride) * RPI_REAL_BYTES);               \
  if (rows > 1 && columns > 1)                                                                     \
  move(3, (at) + RPI_TILE_SIDE * (stride) + RPI_TILE_SIDE, (stride) * RPI_REAL_BYTES)

RPI_TILES_TARGET RPI_INLINE void tiles_sum(const int rows, const int columns,
                                           const tiles_product *t) {
  const uint32_t *a = t->a, *b = t->b;
  const real *const start = t->start;
  real *const c = t->c;
  const int64_t start_stride = t->start_stride, c_stride = t->c_stride;
  TILES_C(RPI_TILE_LOAD, start, start_stride);
  _Alignas(64) uint32_t spare[RPI_TILE_WORDS];
  const int64_t ask = gemm_parts(TILES_SIDE, t->steps); /* rows of what is next, with every step */
  int64_t asked = 0;
  for (int64_t i = 0; i < t->steps; i++, a += TILES_STEP, b += TILES_STEP) {
    if (t->next != NULL) {
      for (int64_t n = 0; n < ask; n++, asked++) {
        rpi_prefetch_to(t->next, asked * c_stride);
        rpi_prefetch_to(t->next, asked * c_stride + RPI_TILE_SIDE);
      }
    }
    TILES_LEFT(2);
    TILES_DOTS_RIGHT(0);
    TILES_DOTS_LEFT(1);
    TILES_DOTS_RIGHT(1);
    TILES_DOTS_LEFT(0);
    TILES_DOTS_RIGHT(2);
    TILES_DOTS_RIGHT(0);
    if (i % TILES_STORED == TILES_STORED - 1) RPI_TILE_STORE(4, spare, 64);
  }
  TILES_C(RPI_TILE_STORE, c, c_stride);
}

typedef void (*tiles_sum_fn)(const tiles_product *t);

#define TILES_SUM_FN(rows, columns)                                                                \
  RPI_TILES_TARGET RPI_NOINLINE void tiles_sum_##rows##_##columns(const tiles_product *t) {        \
    tiles_sum(rows, columns, t);                                                                   \
  }
TILES_SUM_FN(1, 1)
TILES_SUM_FN(1, 2)
TILES_SUM_FN(2, 1)
TILES_SUM_FN(2, 2)

static const tiles_sum_fn tiles_sums[2][2] = {{tiles_sum_1_1, tiles_sum_1_2},
                                              {tiles_sum_2_1, tiles_sum_2_2}};

/* A ragged part of C goes by way of whole tiles. */
static void tiles_multiply(tiles_product t, int64_t rows, int64_t columns) {
  const tiles_sum_fn sum = tiles_sums[rows > RPI_TILE_SIDE][columns > RPI_TILE_SIDE];
  if (rows % RPI_TILE_SIDE == 0 && columns % RPI_TILE_SIDE == 0) {
    sum(&t);
    return;
  }
  _Alignas(64) real whole[TILES_SIDE * TILES_SIDE];
  const size_t bytes = (size_t)columns * sizeof(real);
  memset(whole, 0, sizeof whole);
  for (int64_t r = 0; r < rows; r++) {
    memcpy(whole + r * TILES_SIDE, t.start + r * t.start_stride, bytes);
  }
  tiles_product part = t;
  part.start = part.c = whole;
  part.start_stride = part.c_stride = TILES_SIDE;
  sum(&part);
  for (int64_t r = 0; r < rows; r++) memcpy(t.c + r * t.c_stride, whole + r * TILES_SIDE, bytes);
}

/* `depth` of inner of a part of C that tiles cannot compute. */
static void tiles_forgo(const rpi_gemm_args *g, gemm_block at, int64_t inner, int64_t depth) {
  rpi_gemm_args part = *g;
  part.a = gemm_a_at(g, 0, inner);
  part.b = gemm_b_at(g, inner, 0);
  part.inner = depth;
  if (inner > 0 || g->accumulate) {
    part.accumulate = true;
    part.bias = NULL;
  }
  gemm_small_block(&part, at);
}

static tiles_source tiles_a(const rpi_gemm_args *g, int64_t row, int64_t inner) {
  return (tiles_source){.at = gemm_a_at(g, row, inner),
                        .stride = g->a_stride,
                        .along = !g->transpose_a,
                        .turned = g->transpose_a};
}

static tiles_source tiles_b(const rpi_gemm_args *g, int64_t column, int64_t inner) {
  return (tiles_source){.at = gemm_b_at(g, inner, column),
                        .stride = g->b_stride,
                        .along = g->transpose_b,
                        .turned = g->transpose_b};
}

/* A strip of A by one of B, and where in C that is. */
static void tiles_pair(const rpi_gemm_args *g, gemm_block at, int64_t inner, tiles_product t) {
  static const real zeros[TILES_SIDE];
  t.c = g->c + at.row * g->c_stride + at.column;
  t.start = t.c;
  t.start_stride = t.c_stride = g->c_stride;
  if (inner == 0 && !g->accumulate) {
    t.start = g->bias != NULL ? g->bias + at.column : zeros;
    t.start_stride = 0;
  }
  tiles_multiply(t, at.rows, at.columns);
}

/* The strips of one operand, rows of A or columns of B, are kept in `kept`; those of the other pass
 * by, so many at a time as `passing` has room for; `most` of inner at a time. */
static void tiles_block(const rpi_gemm_args *g, gemm_block at, bool keeps_b, uint32_t *kept,
                        uint32_t *passing, int64_t room, int64_t most) {
  bool finite[TILES_KEPT / TILES_SIDE] = {false}, passes[TILES_KEPT / TILES_SIDE] = {false};
  const int64_t keep = keeps_b ? at.columns : at.rows, pass = keeps_b ? at.rows : at.columns;
  if (g->bias != NULL && g->accumulate) gemm_begin(g, at);
  for (int64_t inner = 0; inner < g->inner; inner += most) {
    const int64_t depth = rpi_min(most, g->inner - inner), steps = gemm_parts(depth, TILES_INNER);
    const int64_t words = steps * TILES_STEP;
    const int64_t group = rpi_min(TILES_KEPT, room / words * TILES_SIDE);
    const tiles_source a = tiles_a(g, at.row, inner), b = tiles_b(g, at.column, inner);
    tiles_pack(keeps_b ? b : a, keep, depth, words, kept, finite);
    for (int64_t line = 0; line < pass; line += TILES_SIDE) {
      const int64_t p = line % group / TILES_SIDE;
      if (p == 0) {
        tiles_pack(keeps_b ? tiles_a(g, at.row + line, inner) : tiles_b(g, at.column + line, inner),
                   rpi_min(group, pass - line), depth, words, passing, passes);
      }
      for (int64_t i = 0; i * TILES_SIDE < keep; i++) {
        const int64_t row = keeps_b ? line : i * TILES_SIDE,
                      column = keeps_b ? i * TILES_SIDE : line;
        const gemm_block part = {at.row + row, rpi_min(TILES_SIDE, at.rows - row),
                                 at.column + column, rpi_min(TILES_SIDE, at.columns - column)};
        if (!finite[i] || !passes[p]) {
          tiles_forgo(g, part, inner, depth);
          continue;
        }
        const uint32_t *const own = kept + i * words, *const other = passing + p * words;
        tiles_product t = {.a = keeps_b ? other : own, .b = keeps_b ? own : other, .steps = steps};
        if ((i + 2) * TILES_SIDE <= keep) {
          t.next = g->c + part.row * g->c_stride + part.column +
                   TILES_SIDE * (keeps_b ? 1 : g->c_stride);
        }
        tiles_pair(g, part, inner, t);
      }
    }
  }
}

typedef struct tiles_scratch {
  uint32_t kept[TILES_KEPT_WORDS];
  uint32_t passing[TILES_PASSING_WORDS];
} tiles_scratch;
_Static_assert(sizeof(tiles_scratch) <= RPI_SCRATCH_BYTES, "the scratch memory is too small");

/* How many rows or columns are kept at most: fewer, the more of inner is. */
static int64_t tiles_kept(const rpi_gemm_args *g) {
  const int64_t steps = gemm_parts(rpi_min(g->inner, TILES_DEPTH), TILES_INNER);
  return rpi_min(TILES_KEPT, TILES_KEPT_WORDS / (steps * TILES_STEP) * TILES_SIDE);
}

/* Without scratch memory: fewer lines and less of inner at a time, the same to the last bit but
 * where a number is not finite. */
static void tiles_small_block(const rpi_gemm_args *g, gemm_block at) {
  enum { WORDS = TILES_SMALL_DEPTH / TILES_INNER * TILES_STEP };
  _Alignas(64) uint32_t kept[WORDS], passing[WORDS];
  for (int64_t row = 0; row < at.rows; row += TILES_SIDE) {
    const gemm_block strip = {at.row + row, rpi_min(TILES_SIDE, at.rows - row), at.column,
                              at.columns};
    tiles_block(g, strip, false, kept, passing, WORDS, TILES_SMALL_DEPTH);
  }
}

static void gemm_tiles_task(void *context, int64_t task, int worker) {
  (void)worker;
  const gemm_job *const job = context;
  const gemm_block at = gemm_block_at(job, task);
  tiles_scratch *const scratch = rpi_scratch_take();
  tiles_begin();
  if (scratch == NULL) tiles_small_block(job->args, at);
  else {
    const bool keeps_b = job->block_columns <= tiles_kept(job->args);
    tiles_block(job->args, at, keeps_b, scratch->kept, scratch->passing, TILES_PASSING_WORDS,
                TILES_DEPTH);
  }
  tiles_end();
  if (scratch != NULL) rpi_scratch_give(scratch);
}

/* One side of a block is kept, the other may be long. */
static void gemm_cut_tiles(gemm_job *job) {
  const rpi_gemm_args *const g = job->args;
  gemm_cut_by(job, (gemm_costs){.for_a = g->transpose_a ? 70 : 35,
                                .for_b = g->transpose_b ? 70 : 35,
                                .alone = 0.5,
                                .rows = 2048,
                                .columns = 2048,
                                .shorter = tiles_kept(g),
                                .row_step = TILES_SIDE,
                                .column_step = TILES_SIDE});
}

static rp_status gemm_tiles(const rpi_gemm_args *args) {
  if (args->rows < TILES_LEAST_ROWS || args->columns < TILES_LEAST || args->inner < TILES_LEAST) {
    return gemm(args);
  }
  return gemm_by(args, gemm_tiles_task, gemm_cut_tiles);
}
