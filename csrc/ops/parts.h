/* SPDX-License-Identifier: Apache-2.0
 *
 * parts.h: products of f32 by tiles of bf16 (tiles.h), to the precision of f32; or of numbers that
 * are rounded to bf16, in one part.
 *
 * A number of f32 is the sum of three of bf16, exactly: its upper 8 bits, rounded to nearest, the
 * upper 8 of what is left, and the rest.
 *
 *   a b = a1 b1 + (a1 b2 + a2 b1) + (a1 b3 + a2 b2 + a3 b1) + less than 2^-23 of it
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
 * memory runs along the lanes of the tile.
 *
 * What is not finite has no such parts, nor has more than bf16 can hold: who packs a strip is told.
 * One part is what rounding makes of a number (bf16.h), of every number.
 */
#ifndef RPI_PARTS_H
#define RPI_PARTS_H

#include "ops/bf16.h"
#include "ops/tiles.h"

#define TILES_SIDE (2 * RPI_TILE_SIDE)  /* rows and columns of C of one call of the kernel */
#define TILES_INNER (2 * RPI_TILE_SIDE) /* of inner, in one tile */
#define TILES_PART (2 * RPI_TILE_WORDS)
#define TILES_PARTS 3                         /* of f32 */
#define TILES_STEP (TILES_PARTS * TILES_PART) /* words of a strip for TILES_INNER of inner */

/* Of numbers that are multiplied in this precision. */
static int tiles_parts_in(int precision) { return precision == RP_BF16 ? 1 : TILES_PARTS; }

RPI_INLINE void tiles_store(uint32_t *to, rpi_words words) {
  rpi_store((real *)to, (rpi_register)words);
}

/* The three parts of numbers, each in the upper half of a word but for the last, whose lower half
 * is to be left out. The first is the nearest number of bf16, halves away from zero; the second is
 * cut off, which leaves no more than the third can hold. */
typedef struct tiles_parts {
  rpi_words part[3];
} tiles_parts;

RPI_INLINE tiles_parts tiles_parts_of(rpi_register x, rpi_register *odd) {
  const rpi_words first = ((rpi_words)x + 0x8000u) & RPI_BF16_UPPER;
  const rpi_register rest = x - (rpi_register)first;
  const rpi_words second = (rpi_words)rest & RPI_BF16_UPPER;
  const rpi_register last = rest - (rpi_register)second;
  *odd += rest * 0;
  return (tiles_parts){{first, second, (rpi_words)last}};
}

/* Words of pairs, of each part. */
RPI_INLINE void tiles_put(tiles_parts x, tiles_parts y, uint32_t *to) {
  tiles_store(to, x.part[0] >> 16 | y.part[0]);
  tiles_store(to + TILES_PART, x.part[1] >> 16 | y.part[1]);
  tiles_store(to + 2 * TILES_PART, x.part[2] >> 16 | (y.part[2] & RPI_BF16_UPPER));
}

/* Rows of a tile of each part. Row i of it has the numbers from[i * step ...] and, `partner`
 * further, what they are paired with. What is returned has a NaN in it where a number was not
 * finite. */
RPI_INLINE rpi_register tiles_split(const int64_t rows, const real *from, int64_t step,
                                    int64_t partner, int64_t ahead, uint32_t *to) {
  rpi_register odd = {0};
  for (int64_t i = 0; i < rows; i++, from += step) {
    rpi_prefetch(from, ahead);
    rpi_prefetch(from, ahead + partner);
    RPI_UNROLL(4) for (int64_t l = 0; l < RPI_TILE_SIDE; l += RPI_LANES) {
      uint32_t *const row = to + i * RPI_TILE_SIDE + l;
      const tiles_parts x = tiles_parts_of(rpi_load(from + l), &odd);
      tiles_put(x, tiles_parts_of(rpi_load(from + partner + l), &odd), row);
    }
  }
  return odd;
}

/* The same in one part. */
RPI_INLINE void tiles_round(const bool native, const int64_t rows, const real *from, int64_t step,
                            int64_t partner, int64_t ahead, uint32_t *to) {
  for (int64_t i = 0; i < rows; i++, from += step) {
    rpi_prefetch(from, ahead);
    rpi_prefetch(from, ahead + partner);
    RPI_UNROLL(4) for (int64_t l = 0; l < RPI_TILE_SIDE; l += RPI_LANES) {
      const rpi_register x = rpi_load(from + l), y = rpi_load(from + partner + l);
      tiles_store(to + i * RPI_TILE_SIDE + l, (rpi_words)rpi_words_across(native, x, y));
    }
  }
}

/* A tile in one part, whose rows are lanes of memory: words are turned, half as many as numbers.
 * Those are times a factor. */
RPI_INLINE void tiles_round_turned(const bool native, const real *from, int64_t step,
                                   int64_t partner, int64_t ahead, real factor, uint32_t *to) {
  rpi_register line[RPI_TILE_WORDS / RPI_LANES];
  RPI_UNROLL(16) for (int64_t i = 0; i < RPI_TILE_SIDE; i++, from += step) {
    rpi_prefetch(from, ahead);
    rpi_prefetch(from, ahead + partner);
    RPI_UNROLL(4) for (int64_t l = 0; l < RPI_TILE_SIDE; l += RPI_LANES) {
      const rpi_register x = rpi_load(from + l), y = rpi_load(from + partner + l);
      line[(i * RPI_TILE_SIDE + l) / RPI_LANES] = rpi_words_across(native, factor * x, factor * y);
    }
  }
#if RPI_LANES == RPI_TILE_SIDE
  rpi_transpose(line);
  RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) {
    tiles_store(to + i * RPI_LANES, (rpi_words)line[i]);
  }
#else
  _Alignas(64) uint32_t words[RPI_TILE_WORDS];
  for (int64_t i = 0; i < RPI_TILE_WORDS / RPI_LANES; i++) {
    tiles_store(words + i * RPI_LANES, (rpi_words)line[i]);
  }
  for (int64_t i = 0; i < RPI_TILE_WORDS; i++) {
    to[i] = words[i % RPI_TILE_SIDE * RPI_TILE_SIDE + i / RPI_TILE_SIDE];
  }
#endif
}

#define TILES_ROUND_FN(how, target, native)                                                        \
  target RPI_NOINLINE void tiles_round_##how(int64_t rows, const real *from, int64_t step,         \
                                             int64_t partner, int64_t ahead, uint32_t *to) {       \
    tiles_round(native, rows, from, step, partner, ahead, to);                                     \
  }                                                                                                \
  target RPI_NOINLINE void tiles_round_turned_##how(                                               \
      const real *from, int64_t step, int64_t partner, int64_t ahead, real factor, uint32_t *to) { \
    tiles_round_turned(native, from, step, partner, ahead, factor, to);                            \
  }
TILES_ROUND_FN(twin, , false)
#ifdef RPI_BF16_NATIVE
TILES_ROUND_FN(native, RPI_BF16_TARGET, true)
#endif

/* In so many parts. */
RPI_INLINE rpi_register tiles_split_in(int parts, const int64_t rows, const real *from,
                                       int64_t step, int64_t partner, int64_t ahead, uint32_t *to) {
  if (parts == TILES_PARTS) return tiles_split(rows, from, step, partner, ahead, to);
#ifdef RPI_BF16_NATIVE
  if (rpi_bf16_native()) {
    tiles_round_native(rows, from, step, partner, ahead, to);
    return (rpi_register){0};
  }
#endif
  tiles_round_twin(rows, from, step, partner, ahead, to);
  return (rpi_register){0};
}

/* One part, turned. */
RPI_INLINE void tiles_turn_rounded(const real *from, int64_t step, int64_t partner, int64_t ahead,
                                   real factor, uint32_t *to) {
#ifdef RPI_BF16_NATIVE
  if (rpi_bf16_native()) {
    tiles_round_turned_native(from, step, partner, ahead, factor, to);
    return;
  }
#endif
  tiles_round_turned_twin(from, step, partner, ahead, factor, to);
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
  int parts;          /* that are made of it */
  bool along, turned; /* turned: lanes of memory are rows of a tile */
  real factor;        /* that numbers turned in one part are times */
} tiles_source;

/* One tile of each part of a strip, and the memory `ahead` is asked for. */
RPI_NOINLINE void tiles_pack_one(const real *from, int64_t step, int64_t partner, int64_t ahead,
                                 tiles_source s, uint32_t *to, rpi_register *odd) {
  if (s.turned && s.parts == 1) {
    tiles_turn_rounded(from, step, partner, ahead, s.factor, to);
  } else if (s.turned) {
    _Alignas(64) real stage[2 * RPI_TILE_WORDS];
    tiles_turn(from, step, ahead, stage);
    tiles_turn(from + partner, step, ahead, stage + RPI_TILE_WORDS);
    *odd += tiles_split_in(s.parts, RPI_TILE_SIDE, stage, RPI_TILE_SIDE, RPI_TILE_WORDS, 0, to);
  } else {
    *odd += tiles_split_in(s.parts, RPI_TILE_SIDE, from, step, partner, ahead, to);
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
  tiles_pack_one(whole, stride, s.along ? RPI_TILE_SIDE : RPI_TILE_WORDS, 0, s, to, odd);
}

/* A piece: one tile of each part of a strip. How its numbers lie. */
typedef struct tiles_piece {
  const real *from;
  int64_t partner;
  uint32_t *to;
} tiles_piece;

/* Of line `first` and those after it, and of inner from k on; to: the strip. */
static tiles_piece tiles_piece_at(const tiles_source *s, int64_t first, int64_t k, uint32_t *to) {
  return (tiles_piece){
      .from = s->along ? s->at + first * s->stride + k : s->at + k * s->stride + first,
      .partner = s->along ? RPI_TILE_SIDE : RPI_TILE_SIDE * s->stride,
      .to = to + k / TILES_INNER * s->parts * TILES_PART + first % TILES_SIDE * RPI_TILE_SIDE};
}

/* Of rows so far apart, or less, that run along inner the next tile's are asked for, else what is
 * next of the same. */
#define TILES_NEAR 512

/* `across` of its lines, `inner` of inner. */
static void tiles_pack_at(tiles_source s, int64_t first, int64_t across, int64_t k, int64_t inner,
                          uint32_t *to, rpi_register *odd) {
  const tiles_piece p = tiles_piece_at(&s, first, k, to);
  if (across == RPI_TILE_SIDE && inner == TILES_INNER) {
    const bool lines = s.along && s.stride <= TILES_NEAR;
    tiles_pack_one(p.from, s.stride, p.partner, lines ? RPI_TILE_SIDE * s.stride : 2 * p.partner, s,
                   p.to, odd);
  } else {
    tiles_pack_ragged(p.from, s, s.along ? across : inner, s.along ? inner : across, p.to, odd);
  }
}

/* A strip: `lines` rows of A or columns of B, up to TILES_SIDE, from `first` on. Whether it has
 * parts. */
static bool tiles_pack_strip(tiles_source s, int64_t first, int64_t lines, int64_t depth,
                             uint32_t *to) {
  rpi_register odd = {0};
  for (int64_t line = 0; line < lines; line += RPI_TILE_SIDE) {
    for (int64_t k = 0; k < depth; k += TILES_INNER) {
      tiles_pack_at(s, first + line, rpi_min(RPI_TILE_SIDE, lines - line), k,
                    rpi_min(TILES_INNER, depth - k), to, &odd);
    }
  }
  return rpi_total(odd) == 0;
}

/* A strip that is packed slice by slice while others are multiplied: some 50 vector instructions
 * for every four products of tiles are free, if they come no more at once (docs/gemm.md). A slice
 * is TILES_SLICE rows of a piece, or half a piece turned; in one part a piece that is turned. */
#define TILES_SLICE 4
#define TILES_GROUPS 6 /* of four products, in one step of the kernel; of one part 1 */
typedef struct tiles_packing {
  rpi_register odd;
  _Alignas(64) real stage[2 * RPI_TILE_WORDS]; /* a piece, turned */
  tiles_source from;
  int64_t first, lines, depth; /* what of `from` it is */
  int64_t line, k, slice;      /* the next slice: of its lines, of inner, of that piece */
  int64_t pieces;              /* that are left */
  int64_t each, every, credit; /* slices in so many groups of products; those that are due */
  uint32_t *to;
} tiles_packing;

static int64_t tiles_slices(const tiles_source *from) {
  if (from->turned && from->parts == 1) return 1;
  return RPI_TILE_SIDE / TILES_SLICE + (from->turned ? 2 : 0);
}

/* The strip from line `first` on, of `all`: none where there are no more. It is to be done when
 * `steps` of the kernel are. */
static void tiles_pack_begin(tiles_source from, int64_t first, int64_t all, int64_t depth,
                             int64_t steps, uint32_t *to, tiles_packing *x) {
  x->odd = (rpi_register){0};
  x->from = from;
  x->first = first;
  x->lines = rpi_max(rpi_min(TILES_SIDE, all - first), 0);
  x->depth = depth;
  x->line = x->k = x->slice = x->credit = 0;
  x->pieces = rpi_divide_up(x->lines, RPI_TILE_SIDE) * rpi_divide_up(depth, TILES_INNER);
  x->each = x->pieces * tiles_slices(&from);
  x->every = steps * (from.parts == TILES_PARTS ? TILES_GROUPS : 1);
  x->to = to;
}

/* In the order of memory. */
static void tiles_next_piece(tiles_packing *x) {
  x->pieces--;
  x->slice = 0;
  if (x->from.along) {
    x->k += TILES_INNER;
    if (x->k < x->depth) return;
    x->k = 0;
    x->line += RPI_TILE_SIDE;
  } else {
    x->line += RPI_TILE_SIDE;
    if (x->line < x->lines) return;
    x->line = 0;
    x->k += TILES_INNER;
  }
}

/* From the numbers of the piece at work to those of the next, of this strip or the one after it. */
static int64_t tiles_ahead(const tiles_packing *x) {
  const int64_t stride = x->from.stride;
  const bool ends = x->k + TILES_INNER >= x->depth;
  if (x->from.along) return ends ? RPI_TILE_SIDE * stride - x->k : TILES_INNER;
  if (x->line + RPI_TILE_SIDE < TILES_SIDE) return RPI_TILE_SIDE;
  return (ends ? TILES_SIDE - x->k * stride : TILES_INNER * stride) - x->line;
}

RPI_NOINLINE void tiles_pack_slice(tiles_packing *x) {
  if (x->pieces == 0) return;
  const int64_t across = x->lines - x->line, inner = x->depth - x->k;
  if (across < RPI_TILE_SIDE || inner < TILES_INNER) {
    tiles_pack_at(x->from, x->first + x->line, rpi_min(RPI_TILE_SIDE, across), x->k,
                  rpi_min(TILES_INNER, inner), x->to, &x->odd);
    tiles_next_piece(x);
    return;
  }
  const tiles_piece p = tiles_piece_at(&x->from, x->first + x->line, x->k, x->to);
  const int64_t stride = x->from.stride, ahead = tiles_ahead(x), slice = x->slice++;
  if (!x->from.turned) {
    const int64_t row = slice * TILES_SLICE;
    x->odd += tiles_split_in(x->from.parts, TILES_SLICE, p.from + row * stride, stride, p.partner,
                             ahead, p.to + row * RPI_TILE_SIDE);
  } else if (x->from.parts == 1) {
    tiles_turn_rounded(p.from, stride, p.partner, ahead, x->from.factor, p.to);
  } else if (slice < 2) {
    tiles_turn(p.from + slice * p.partner, stride, ahead, x->stage + slice * RPI_TILE_WORDS);
  } else {
    const int64_t at = (slice - 2) * TILES_SLICE * RPI_TILE_SIDE;
    x->odd += tiles_split_in(x->from.parts, TILES_SLICE, x->stage + at, RPI_TILE_SIDE,
                             RPI_TILE_WORDS, 0, p.to + at);
  }
  if (x->slice == tiles_slices(&x->from)) tiles_next_piece(x);
}

/* After a group of products. */
RPI_INLINE void tiles_pack_some(tiles_packing *x) {
  x->credit += x->each;
  for (; x->credit >= x->every; x->credit -= x->every) tiles_pack_slice(x);
}

/* The rest; whether the strip has parts. */
static bool tiles_packed(tiles_packing *x) {
  while (x->pieces > 0) tiles_pack_slice(x);
  return rpi_total(x->odd) == 0;
}

/* One call of the kernel: c = start + A . B, a strip of each. */
typedef struct tiles_product {
  const uint32_t *a, *b;
  int64_t steps;     /* of TILES_INNER of inner */
  const real *start; /* NULL: zeros */
  int64_t start_stride;
  real *c;
  int64_t c_stride;
  const real *next;       /* where the next call writes, rows of c_stride; or NULL */
  tiles_packing *packing; /* a strip to be packed meanwhile, or NULL */
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

RPI_TILES_TARGET RPI_INLINE void tiles_sum(const int parts, const int rows, const int columns,
                                           const bool beside, const tiles_product *t) {
  const uint32_t *a = t->a, *b = t->b;
  const real *const start = t->start;
  real *const c = t->c;
  const int64_t start_stride = t->start_stride, c_stride = t->c_stride;
  if (start == NULL) {
    RPI_TILE_ZERO(0);
    RPI_TILE_ZERO(1);
    RPI_TILE_ZERO(2);
    RPI_TILE_ZERO(3);
  } else {
    TILES_C(RPI_TILE_LOAD, start, start_stride);
  }
  _Alignas(64) uint32_t spare[RPI_TILE_WORDS];
  const int64_t ask =
      rpi_divide_up(TILES_SIDE, t->steps); /* rows of what is next, with every step */
  int64_t asked = 0;
  const int64_t step = parts * TILES_PART;
  for (int64_t i = 0; i < t->steps; i++, a += step, b += step) {
    if (t->next != NULL) {
      for (int64_t n = 0; n < ask; n++, asked++) {
        rpi_prefetch_to(t->next, asked * c_stride);
        rpi_prefetch_to(t->next, asked * c_stride + RPI_TILE_SIDE);
      }
    }
    TILES_LEFT(parts - 1);
    TILES_DOTS_RIGHT(0);
    if (beside) tiles_pack_some(t->packing);
    if (parts == 1) continue;
    TILES_DOTS_LEFT(1);
    if (beside) tiles_pack_some(t->packing);
    TILES_DOTS_RIGHT(1);
    if (beside) tiles_pack_some(t->packing);
    TILES_DOTS_LEFT(0);
    if (beside) tiles_pack_some(t->packing);
    TILES_DOTS_RIGHT(2);
    if (beside) tiles_pack_some(t->packing);
    TILES_DOTS_RIGHT(0);
    if (beside) tiles_pack_some(t->packing);
    const bool stored = i % TILES_STORED == TILES_STORED - 1 && i + 1 < t->steps;
    if (stored) RPI_TILE_STORE(4, spare, 64);
  }
  TILES_C(RPI_TILE_STORE, c, c_stride);
}

typedef void (*tiles_sum_fn)(const tiles_product *t);

#define TILES_SUM_FN(parts, name, rows, columns, beside)                                           \
  RPI_TILES_TARGET RPI_NOINLINE void tiles_sum_##parts##_##name(const tiles_product *t) {          \
    tiles_sum(parts, rows, columns, beside, t);                                                    \
  }
#define TILES_SUM_FNS(parts)                                                                       \
  TILES_SUM_FN(parts, 1_1, 1, 1, false)                                                            \
  TILES_SUM_FN(parts, 1_2, 1, 2, false)                                                            \
  TILES_SUM_FN(parts, 2_1, 2, 1, false)                                                            \
  TILES_SUM_FN(parts, 2_2, 2, 2, false)                                                            \
  TILES_SUM_FN(parts, packing, 2, 2, true)
TILES_SUM_FNS(1)
TILES_SUM_FNS(3)

static const tiles_sum_fn tiles_sums[2][2] = {{tiles_sum_3_1_1, tiles_sum_3_1_2},
                                              {tiles_sum_3_2_1, tiles_sum_3_2_2}};
static const tiles_sum_fn tiles_rounded_sums[2][2] = {{tiles_sum_1_1_1, tiles_sum_1_1_2},
                                                      {tiles_sum_1_2_1, tiles_sum_1_2_2}};

#endif
