/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_tiles.c: blocks of a product by tiles, in three parts (parts.h), in bf16 in one.
 *
 * Strips of one operand are kept, as many as the second-level cache holds; those of the other pass
 * by, one at a time, and the next is packed meanwhile. Two strips of which one holds what has no
 * parts are multiplied as gemm.c does.
 */
#include "base/scratch.h"
#include "ops/gemm_job.h"
#include "ops/parts.h"

/* So many rows of A, or columns of B, are kept in parts while the others pass by, and so much of
 * inner at a time: 768 KiB, which stay in the second-level cache. */
#define TILES_DEPTH 512
#define TILES_KEPT_WORDS (256 / TILES_SIDE * TILES_DEPTH / TILES_INNER * TILES_STEP)
#define TILES_KEPT 1024
#define TILES_PASSING_WORDS (2 * TILES_DEPTH / TILES_INNER * TILES_STEP)
#define TILES_SMALL_DEPTH 64
#define TILES_FEW 128

/* Of fewer, the parts cost more than the products save. */
#define TILES_LEAST 32
#define TILES_LEAST_ROWS 48

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
  for (int64_t i = 0; i < rpi_divide_up(lines, TILES_SIDE); i++) finite[i] = rpi_total(odd[i]) == 0;
}

/* A ragged part of C goes by way of whole tiles. */
static void tiles_multiply(const tiles_product *t, int parts, int64_t rows, int64_t columns) {
  const int tall = rows > RPI_TILE_SIDE, wide = columns > RPI_TILE_SIDE;
  const tiles_sum_fn sum = parts == 1 ? tiles_rounded_sums[tall][wide] : tiles_sums[tall][wide];
  if (t->packing != NULL && rows == TILES_SIDE && columns == TILES_SIDE) {
    if (parts == 1) tiles_sum_1_packing(t);
    else tiles_sum_3_packing(t);
    return;
  }
  if (rows % RPI_TILE_SIDE == 0 && columns % RPI_TILE_SIDE == 0) {
    sum(t);
    return;
  }
  _Alignas(64) real whole[TILES_SIDE * TILES_SIDE];
  const size_t bytes = (size_t)columns * sizeof(real);
  memset(whole, 0, sizeof whole);
  for (int64_t r = 0; t->start != NULL && r < rows; r++) {
    memcpy(whole + r * TILES_SIDE, t->start + r * t->start_stride, bytes);
  }
  tiles_product part = *t;
  part.start = part.c = whole;
  part.start_stride = part.c_stride = TILES_SIDE;
  sum(&part);
  for (int64_t r = 0; r < rows; r++) memcpy(t->c + r * t->c_stride, whole + r * TILES_SIDE, bytes);
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
                        .parts = tiles_parts_in(g->precision),
                        .along = !g->transpose_a,
                        .turned = g->transpose_a,
                        .factor = 1};
}

static tiles_source tiles_b(const rpi_gemm_args *g, int64_t column, int64_t inner) {
  return (tiles_source){.at = gemm_b_at(g, inner, column),
                        .stride = g->b_stride,
                        .parts = tiles_parts_in(g->precision),
                        .along = g->transpose_b,
                        .turned = g->transpose_b,
                        .factor = 1};
}

/* Where the next call of the kernel writes: beside the one of `line` and the strip that is kept
 * before `next`, or where the next line begins. NULL: in less than whole strips. */
static const real *tiles_next(const rpi_gemm_args *g, gemm_block at, bool keeps_b, int64_t line,
                              int64_t next) {
  const int64_t keep = keeps_b ? at.columns : at.rows, pass = keeps_b ? at.rows : at.columns;
  if (next >= keep) {
    next = 0;
    line += TILES_SIDE;
  }
  if (next + TILES_SIDE > keep || line + TILES_SIDE > pass) return NULL;
  const int64_t row = keeps_b ? line : next, column = keeps_b ? next : line;
  return g->c + (at.row + row) * g->c_stride + at.column + column;
}

/* A block, `depth` of inner from `inner` on: the strips of one operand, rows of A or columns of B,
 * are kept, those of the other pass by. */
typedef struct tiles_part {
  const rpi_gemm_args *g;
  gemm_block at;
  bool keeps_b;
  int64_t inner, depth, words; /* words: of a strip */
  uint32_t *kept, *passing;
  bool finite[TILES_KEPT / TILES_SIDE]; /* of what is kept */
} tiles_part;

static int64_t tiles_lines_kept(const tiles_part *x) {
  return x->keeps_b ? x->at.columns : x->at.rows;
}

static int64_t tiles_lines_passing(const tiles_part *x) {
  return x->keeps_b ? x->at.rows : x->at.columns;
}

/* A strip that passes by, `line` of its operand's, by all that are kept. */
static void tiles_pass(const tiles_part *x, int64_t line, const uint32_t *strip, bool fits,
                       tiles_packing *packing) {
  const gemm_block at = x->at;
  for (int64_t i = 0; i * TILES_SIDE < tiles_lines_kept(x); i++) {
    const int64_t row = x->keeps_b ? line : i * TILES_SIDE,
                  column = x->keeps_b ? i * TILES_SIDE : line;
    const gemm_block part = {at.row + row, rpi_min(TILES_SIDE, at.rows - row), at.column + column,
                             rpi_min(TILES_SIDE, at.columns - column)};
    if (!x->finite[i] || !fits) {
      tiles_forgo(x->g, part, x->inner, x->depth);
      continue;
    }
    const uint32_t *const own = x->kept + i * x->words;
    const rpi_gemm_args *const g = x->g;
    real *const c = g->c + part.row * g->c_stride + part.column;
    const bool begins = x->inner == 0 && !g->accumulate;
    /* Never copied: a copy waits for the stores of C before it (docs/gemm.md). */
    const tiles_product t = {.a = x->keeps_b ? strip : own,
                             .b = x->keeps_b ? own : strip,
                             .steps = rpi_divide_up(x->depth, TILES_INNER),
                             .start = !begins           ? c
                                      : g->bias != NULL ? g->bias + part.column
                                                        : NULL,
                             .start_stride = begins ? 0 : g->c_stride,
                             .c = c,
                             .c_stride = g->c_stride,
                             .next = tiles_next(g, at, x->keeps_b, line, (i + 1) * TILES_SIDE),
                             .packing = packing};
    tiles_multiply(&t, tiles_parts_in(g->precision), part.rows, part.columns);
  }
}

/* While a strip passes by the next is packed, in the other half of `passing`. */
static void tiles_pass_ahead(const tiles_part *x, tiles_source from) {
  const int64_t lines = tiles_lines_passing(x);
  const int64_t steps =
      rpi_divide_up(tiles_lines_kept(x), TILES_SIDE) * rpi_divide_up(x->depth, TILES_INNER);
  tiles_packing next;
  tiles_pack_begin(from, 0, lines, x->depth, steps, x->passing, &next);
  for (int64_t line = 0; line < lines; line += TILES_SIDE) {
    uint32_t *const strip = next.to;
    const bool fits = tiles_packed(&next);
    tiles_pack_begin(from, line + TILES_SIDE, lines, x->depth, steps,
                     strip == x->passing ? x->passing + x->words : x->passing, &next);
    tiles_pass(x, line, strip, fits, &next);
  }
}

/* Strips that are to be turned, by more than TILES_FEW lines that are kept: what could be hidden is
 * a small share then, and rows of memory are better read whole. As many at once as there is room
 * for. */
static void tiles_pass_turned(const tiles_part *x, tiles_source from, int64_t room) {
  bool fits[TILES_KEPT / TILES_SIDE];
  const int64_t lines = tiles_lines_passing(x);
  const int64_t group = rpi_min(TILES_KEPT, room / x->words * TILES_SIDE);
  for (int64_t line = 0; line < lines; line += TILES_SIDE) {
    const int64_t n = line % group / TILES_SIDE;
    if (n == 0) {
      tiles_source some = from;
      some.at += line * (from.along ? from.stride : 1);
      tiles_pack(some, rpi_min(group, lines - line), x->depth, x->words, x->passing, fits);
    }
    tiles_pass(x, line, x->passing + n * x->words, fits[n], NULL);
  }
}

/* `most` of inner at a time; room: words that `passing` holds. */
static void tiles_block(const rpi_gemm_args *g, gemm_block at, bool keeps_b, uint32_t *kept,
                        uint32_t *passing, int64_t room, int64_t most) {
  if (g->bias != NULL && g->accumulate) gemm_begin(g, at);
  for (int64_t inner = 0; inner < g->inner; inner += most) {
    const int64_t depth = rpi_min(most, g->inner - inner);
    tiles_part x = {
        .g = g,
        .at = at,
        .keeps_b = keeps_b,
        .inner = inner,
        .depth = depth,
        .words = rpi_divide_up(depth, TILES_INNER) * tiles_parts_in(g->precision) * TILES_PART,
        .kept = kept,
        .passing = passing};
    const tiles_source a = tiles_a(g, at.row, inner), b = tiles_b(g, at.column, inner);
    const tiles_source passes = keeps_b ? a : b;
    tiles_pack(keeps_b ? b : a, tiles_lines_kept(&x), depth, x.words, kept, x.finite);
    if (passes.turned && tiles_lines_kept(&x) > TILES_FEW) tiles_pass_turned(&x, passes, room);
    else tiles_pass_ahead(&x, passes);
  }
}

typedef struct tiles_scratch {
  uint32_t kept[TILES_KEPT_WORDS];
  uint32_t passing[TILES_PASSING_WORDS];
} tiles_scratch;
_Static_assert(sizeof(tiles_scratch) <= RPI_SCRATCH_BYTES, "the scratch memory is too small");

/* How many rows or columns are kept at most: fewer, the more of inner is. */
static int64_t tiles_kept(const rpi_gemm_args *g) {
  const int64_t steps = rpi_divide_up(rpi_min(g->inner, TILES_DEPTH), TILES_INNER);
  const int64_t strip = steps * tiles_parts_in(g->precision) * TILES_PART;
  return rpi_min(TILES_KEPT, TILES_KEPT_WORDS / strip * TILES_SIDE);
}

/* Without scratch memory: fewer lines and less of inner at a time, the same to the last bit but
 * where a number is not finite. */
static void tiles_small_block(const rpi_gemm_args *g, gemm_block at) {
  enum { WORDS = TILES_SMALL_DEPTH / TILES_INNER * TILES_STEP };
  _Alignas(64) uint32_t kept[WORDS], passing[2 * WORDS];
  for (int64_t row = 0; row < at.rows; row += TILES_SIDE) {
    const gemm_block strip = {at.row + row, rpi_min(TILES_SIDE, at.rows - row), at.column,
                              at.columns};
    tiles_block(g, strip, false, kept, passing, 2 * WORDS, TILES_SMALL_DEPTH);
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

/* One side of a block is kept, the other may be long. In one part products take a sixth, and
 * packing maybe half: unmeasured. */
static void gemm_cut_tiles(gemm_job *job) {
  const rpi_gemm_args *const g = job->args;
  const double dear = tiles_parts_in(g->precision) == 1 ? 3 : 1;
  gemm_cut_by(job, (gemm_costs){.for_a = dear * (g->transpose_a ? 70 : 35),
                                .for_b = dear * (g->transpose_b ? 70 : 35),
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
