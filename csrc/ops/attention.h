/* SPDX-License-Identifier: Apache-2.0
 *
 * attention.h: what forward and backward of relation-aware attention share.
 *
 *   (1)  s_ij = scale * ( q_i . k_j + q_i . wK[r(i,j)] + ... )  (docs/math.md has all terms)
 *   (2)  p_ij = exp(s_ij - lse_i),  lse_i = log sum_j exp(s_ij)  over the keys i may see
 *   (3)  z_i  = sum_j p_ij v_j + sum_r P_i[r] wV[r],  P_i[r] = sum of p_ij over { j : r(i,j) = r }
 *
 * Nothing of size N x M or N x M x D exists. A block of queries walks the keys in
 * tiles of 64; a strip of 6 queries and a tile is the unit of work:
 *
 *          keys  j0 ........ j0+63
 *   strip  +----------------------+   scores start from the bias of the strip (band.h):
 *   of 6   |  head | band |  tail |   one number per row before the band and after it,
 *   rows   +----------------------+   one shifted load per vector inside
 *
 * so a strip outside the band costs what plain attention costs. Scores are kept in
 * units of log 2, the scale folded into the packed keys and tables.
 *
 * The maximum is lazy: the running maximum m_i of a row starts its accumulators (as
 * -m_i), and is raised only when a score exceeds it by RPI_RAISE; then to a little above
 * that score. Sums stay below 2^8 times the number of keys, far from overflow, and the
 * usual strip neither takes a row maximum nor rescales.
 *
 * Where things are:
 *
 *   attention_forward.c    the passes, each statement and its derivative under one equation
 *   attention_backward.c   number; attention_calls.c runs them over all of a call
 *   backward_side.h        what backward does with keys and with values alike
 *   attention_maps.c       scores and probabilities on demand
 *   terms.h, band.h        terms that are a function of the distance; packed_term.h: packed
 *   pairs.h, skew.h        those that are not: looked up (lookups.h), or between keys and
 *                          relations
 *   pair_masks.h, keep.h   softcap, masks, dropout
 *   attention_plan.h       the division of work
 *   operands.h             products by AMX (parts.h), of 32 rows of a block and a tile, or a band's
 *                          columns, at once; attention_tiles.h has their weights
 *   table_sums.h           gradients of tables; pair_gradients.h those of pairs.h
 */
#ifndef RPI_ATTENTION_H
#define RPI_ATTENTION_H

#include "ops/attention_plan.h"
#include "ops/band.h"
#include "ops/exp2.h"

#define RPI_RAISE 8 /* log2 of the factor a score may exceed the running maximum by */

/* Rows for a product: their own memory where that is dense and whole, aligned vectors, else a
 * padded copy. Copying pays by itself: 64 rows at a stride of 2 KiB share 8 sets of the first
 * cache, and every vector that lies across two lines is read twice (5 % of forward; NumPy's arrays
 * begin at multiples of 16 bytes). Not where rows are read once, to be packed for tiles. */
static dense dense_rows(const real *data, int64_t stride, int64_t count, int64_t width,
                        int64_t padded, bool tiles, real *copy) {
  const bool aligned = (uintptr_t)data % sizeof(rpi_register) == 0;
  if (width == padded && (tiles || (stride == width && aligned))) return (dense){data, stride};
  for (int64_t r = 0; r < count; r++) {
    memcpy(copy + r * padded, data + r * stride, (size_t)width * sizeof(real));
    for (int64_t c = width; c < padded; c++) copy[r * padded + c] = 0;
  }
  return (dense){copy, padded};
}

/* Keys all of one relation (before the band, or from its last column on) are keys with that
 * relation's vector added: what dq takes from a tile wholly there. */
static dense moved_rows(const term *t, int64_t distance, const dense *from, int64_t count,
                        int64_t padded, real *vector, real *to) {
  term_vector(t, distance, padded, vector);
  for (int64_t r = 0; r < count; r++) {
    const real *const row = from->data + r * from->stride;
    for (int64_t c = 0; c < padded; c++) to[r * padded + c] = row[c] + vector[c];
  }
  return (dense){to, padded};
}

/* Rows of no numbers may be NULL, and NULL plus anything is undefined. */
static const real *row_of(const rp_rows *x, int64_t batch, int64_t head, int64_t row) {
  if (x->data == NULL) return NULL;
  return x->data + batch * x->batch_stride + head * x->head_stride + row * x->row_stride;
}
static real *out_row_of(const rp_rows_out *x, int64_t batch, int64_t head, int64_t row) {
  if (x->data == NULL) return NULL;
  return x->data + batch * x->batch_stride + head * x->head_stride + row * x->row_stride;
}

/* Asks for what the next sequence has in place of a strip's rows, from `row` on, of `rows` in a
 * sequence that begins at row0. Strip by strip, for who asks for all at once waits for all of it;
 * and where it is much, for the second cache, for it takes room in the first: with 4 KiB of each of
 * five arrays the attention of a step took 6 % less time, with 8 KiB 5 % more. */
#define RPI_ASKED_NEAR 4096 /* bytes */
#define RPI_ASKED_FAR (64 << 10)
static void ask_for_next(const rp_rows *x, const rp_attention *s, int64_t batch, int64_t head,
                         int64_t row0, int64_t row, int64_t rows, int64_t width) {
  const int64_t bytes = rows * width * RPI_REAL_BYTES;
  if (bytes > RPI_ASKED_FAR || (!s->offsets && batch + 1 == s->B)) return;
  const int64_t next = s->offsets ? rows * x->row_stride : x->batch_stride;
  for (int64_t i = row; i < rpi_min(row + RPI_STRIP, rows); i++) {
    const real *const from = row_of(x, batch, head, row0 + i);
    if (bytes <= RPI_ASKED_NEAR) rpi_prefetch_row(from, next, width);
    else rpi_prefetch_row_far(from, next, width);
  }
}

/* Where row 0 of a sequence's log-sum-exp lies: [B, H, N], or [H, tokens] packed. */
static int64_t lse_at(const rp_attention *s, const rpi_sequence *seq, int64_t head) {
  if (s->offsets) return head * s->offsets[s->B] + seq->query_row;
  return (seq->query_batch * s->H + head) * s->N;
}

/* The keys that some of these queries may see, begin to end - 1. */
typedef struct stretch {
  int64_t begin, end;
} stretch;

static stretch keys_seen(const rpi_sequence *seq, const sight *sees, int64_t query, int64_t rows) {
  const int64_t first = query + seq->start, last = first + rows - 1;
  return (stretch){.begin = rpi_max(first - sees->left, 0),
                   .end = rpi_min(last + sees->right + 1, seq->keys)};
}

static real scale_of(const rp_attention *s) {
  return (real)(s->scale == 0 ? 1 / sqrt((double)s->D) : s->scale);
}

/* ---- one strip ---------------------------------------------------------- */

/* May weights of a tile be made words at once (attention_words.h)? */
static bool makes_words(const bounds *n, int64_t tile_keys) {
  return n->how == RPI_NATIVE && tile_keys == RPI_TILE;
}

/* to += from. */
RPI_NOINLINE void add_strip(int64_t count, const real *from, real *to) {
  for (int64_t c = 0; c < count * RPI_TILE; c++) to[c] += from[c];
}

/* What a strip has beside its product: start, as rpi_start has it, its band where there is one, and
 * `more`, what its pairs add, or NULL. multiplied: the product is in `to` already, and is added
 * last. */
RPI_NOINLINE void start_strip(int64_t count, const rpi_start *start, const real *more,
                              bool multiplied, real *to) {
  for (int64_t r = 0; r < count; r++) {
    const real *const band = start->band ? start->band + r * start->band_stride : NULL;
    RPI_UNROLL(4) for (int64_t v = 0; v < RPI_TILE; v += RPI_LANES) {
      rpi_register sum = (rpi_register){0} + start->row[r];
      if (band) {
        sum += rpi_load(band + rpi_clamp(start->band_offset - r + v, 0, start->band_last));
      }
      if (more) sum += rpi_load(more + r * RPI_TILE + v);
      if (multiplied) sum += rpi_load(to + r * RPI_TILE + v);
      rpi_store(to + r * RPI_TILE + v, sum);
    }
  }
}

/* Scores (1) of a strip, or their twin in backward, x . yᵀ plus the term's bias:
 * row_start[r] + x_r . y_j + E[r, d] + more[r][j]. i: the strip's first row of E. more: NULL, or
 * what the pairs add; product->c itself where that holds row_start and this, and there is no more.
 * multiplied: product->c holds the products already. Vectors without a key are 0 up to `columns`,
 * or what they start from. What is not a product is put together first: large numbers of it that
 * cancel (a relation's score against the running maximum) shall not meet the product's roundings.
 */
static void score_strip(const window *w, int meets, const band_e *e, int64_t e_stride, int64_t i,
                        int64_t distance, int64_t count, int64_t keys, int64_t columns,
                        const rpi_product *product, const real *row_start, const real *more,
                        bool multiplied) {
  const int64_t vectors = rpi_divide_up(keys, RPI_LANES);
  real moved[RPI_TILED_ROWS];
  rpi_start start = {.row = row_start};
  if (meets == MEETS_BAND) {
    start.band = e->at + i * e_stride;
    start.band_stride = e_stride;
    start.band_offset = RPI_LANES + distance - w->first;
    start.band_last = RPI_LANES + w->columns;
  } else if (meets != MEETS_NOTHING) {
    const real *const end = (meets == MEETS_HEAD ? e->head : e->tail) + i;
    for (int64_t r = 0; r < count; r++) moved[r] = row_start[r] + end[r];
    start.row = moved;
  }
  if (multiplied || (more && more != product->c)) {
    start_strip(count, &start, more, multiplied, product->c);
  }
  const int mode = more ? RPI_START_LOAD : start.band ? RPI_START_BAND : RPI_START_ROW;
  if (!multiplied) rpi_strip_product(mode, count, vectors, product, &start);
  for (int64_t r = 0; vectors * RPI_LANES < columns && r < count; r++) {
    real *const row = product->c + r * product->c_stride;
    for (int64_t v = vectors * RPI_LANES; v < columns; v += RPI_LANES) {
      rpi_store(row + v, (rpi_register){0});
    }
  }
}

/* Adds the rows of a strip up: vector r of sums += those of x[r]. */
RPI_NOINLINE void add_row_sums(int64_t count, int64_t columns, const real *x, real *sums) {
  for (int64_t r = 0; r < count; r++, x += RPI_TILE, sums += RPI_LANES) {
    rpi_register sum = {0};
    RPI_EACH_VECTOR(v, columns, { sum += rpi_load(x + v); })
    rpi_store(sums, rpi_load(sums) + sum);
  }
}

/* Hides all of a row but its keys from `from` to `to` - 1. */
RPI_INLINE void mask_columns(int64_t columns, int from, int to, real *s) {
  for (int j = 0; j < (int)columns; j++) s[j] = j >= from && j < to ? s[j] : (real)-INFINITY;
}

/* Hides what a strip may not see: row r sees the keys from begin + r to end + r - 1 of the
 * tile, and none from `keys` on. */
RPI_NOINLINE void mask_strip(int64_t count, int64_t begin, int64_t end, int64_t keys,
                             int64_t columns, real *s) {
  for (int64_t r = 0; r < count; r++, s += RPI_TILE) {
    const int from = (int)rpi_clamp(begin + r, 0, RPI_TILE);
    const int to = (int)rpi_clamp(end + r, 0, keys);
    RPI_COLUMNS(columns, mask_columns(COLUMNS, from, to, s))
  }
}

/* Is anything hidden in a strip whose pairs span these distances? */
static bool strip_is_cut(const sight *sees, int64_t nearest, int64_t farthest, int64_t keys) {
  return keys < RPI_TILE || farthest > sees->right || nearest < -sees->left;
}

/* ---- products ----------------------------------------------------------- */

/* c[columns][width] += aᵀ . x: (8) and (9), for keys and for table rows alike. */
static void add_transposed(const real *a, int64_t a_stride, int64_t columns, const real *x,
                           int64_t x_stride, int64_t count, int64_t width, real *c) {
  const rpi_product product =
      product_across(RPI_NUMBERS, (dense){a, a_stride}, x, x_stride, count, c, width);
  rpi_block_product(RPI_START_LOAD, columns, width / RPI_LANES, product, NULL);
}

/* c[rows][width] += a . x, a being dense in its columns. */
static void add_product(const real *a, int64_t a_stride, int64_t rows, const dense *x,
                        int64_t inner, int64_t width, real *c) {
  const rpi_product product =
      product_by(RPI_NUMBERS, (dense){a, a_stride}, x->data, x->stride, inner, c, width);
  rpi_block_product(RPI_START_LOAD, rows, width / RPI_LANES, product, NULL);
}

/* to[c] += sum of the rows' column c. */
static void add_columns(const real *from, int64_t stride, int64_t rows, int64_t columns, real *to) {
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t c = 0; c < columns; c++) to[c] += from[r * stride + c];
  }
}

/* ---- memory ------------------------------------------------------------- */

/* May neighbouring distances share a vector? */
static bool has_runs(const rp_relation *relations) {
  bool found = false;
  for (int i = 0; i < RP_TERMS; i++) {
    found |= relations[i].table && !is_looked_up(&relations[i]) && relations[i].buckets;
  }
  return found;
}

static void take_runs(rpi_arena *arena, int64_t columns, int64_t width, packed_term *packed) {
  const int64_t padded = rpi_round_up(columns, RPI_LANES);
  packed->runs.line = rpi_arena_take(arena, padded, sizeof *packed->runs.line);
  packed->runs.begin = rpi_arena_take(arena, columns, sizeof *packed->runs.begin);
  packed->lines = rpi_arena_take(arena, RPI_TILE * width, sizeof(real));
}

/* Which operands a packed term has room for, where there are tiles, and words in bf16. */
enum { PARTS_ACROSS = 1, PARTS_DOWN = 2 };

/* relations: those of the term, or NULL where there is no E, and runs do not matter; columns: of
 * what is packed. */
static void take_packed(rpi_arena *arena, const bounds *n, const rp_relation *relations,
                        int64_t columns, int64_t width, int parts, packed_term *packed) {
  const int64_t padded = rpi_round_up(columns, RPI_LANES);
  const int tiles = n->tiles, how = n->how;
  if (relations && has_runs(relations)) {
    const int64_t rows = tiles ? RPI_TILED_ROWS : RPI_STRIP;
    take_runs(arena, columns, width, packed);
    packed->strip = rpi_arena_take(arena, rows * (padded + RPI_LANES), sizeof(real));
  }
  if (relations) {
    packed->across = rpi_arena_take(arena, across_stride(columns) * width, sizeof(real));
  }
  packed->copy = rpi_arena_take(arena, (columns + 1) * width, sizeof(real));
  packed->numbers = rpi_arena_take(arena, padded + RPI_LANES, sizeof(real));
  if (tiles && (parts & PARTS_ACROSS)) {
    packed->across_parts = take_operand(arena, tiles, columns, width);
  }
  if (tiles && (parts & PARTS_DOWN)) {
    packed->down_parts = take_operand(arena, tiles, width, columns);
  }
  if (how != RPI_NUMBERS && (parts & PARTS_ACROSS)) {
    packed->across_words = take_word_lines(arena, how, width, across_stride(columns));
    packed->end = rpi_arena_take(arena, width + inner_stride(how, width), sizeof(real));
  }
  if (how != RPI_NUMBERS && (parts & PARTS_DOWN)) {
    packed->down_words = take_word_lines(arena, how, columns, width);
  }
  packed->head_index = -1;
}

/* rows: of a block, or of its whole strips; ends: as many, or rows whose ends are kept, with
 * `known` for so many blocks of theirs. */
static band_e take_e(rpi_arena *arena, int64_t rows, int64_t columns, int64_t ends,
                     int64_t blocks) {
  const int64_t real_bytes = sizeof(real);
  return (band_e){.at = rpi_arena_take(arena, rows * window_stride(columns), real_bytes),
                  .head = rpi_arena_take(arena, ends, real_bytes),
                  .tail = rpi_arena_take(arena, ends, real_bytes),
                  .known = blocks ? rpi_arena_take(arena, blocks, 1) : NULL};
}

#endif
