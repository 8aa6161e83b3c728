/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_side.h: a side of backward, KEY or VALUE (attention_backward.c): its operands, dk or dv
 * of a chunk of keys, and what its table is given.
 *
 * For a tile of keys, blocks of queries come in the order right of the band, across it,
 * left of it. While they lie wholly right, the column sums of the tile's dk (dv) are the
 * gradient of the last relation, and dq takes keys with that relation's vector added: no
 * row sums. From the first block wholly left on, the same holds for the first relation, with dk
 * (dv) gathered anew. In blocks across the band, what lies left and right is gathered per
 * row: head and tail. So it is in all blocks of a pair of chunks that the band crosses (at
 * n = 1024 sums of rows take at most 0.6 of what turning its tiles took), where numbers by distance
 * are wanted (bias terms, position_bias), where dk has other parts (query terms), or is a sum of
 * moved queries.
 */
#ifndef RPI_BACKWARD_SIDE_H
#define RPI_BACKWARD_SIDE_H

#include "ops/attention_tiles.h"
#include "ops/attention_words.h"
#include "ops/table_sums.h"

enum { KEY, VALUE, SIDES };

/* Where a block lies, seen from a tile. */
enum { ACROSS, RIGHT, LEFT, PLACES };

/* What dk (dv) of a tile holds so far: nothing; only blocks to the right of the band; any
 * up to those across it; only those to the left; the same, and others were put before. */
enum { TILE_EMPTY, TILE_RIGHT, TILE_MIXED, TILE_LEFT, TILE_LEFT_AGAIN };

/* Rows of a block as both operands, and whether they are: as inner they meet zeros, too. */
typedef struct row_operands {
  operand lines, inner;
  bool lines_fit, inner_fit;
} row_operands;

typedef struct side {
  /* of a chunk of keys */
  real *packed;        /* [tiles][width][TILE]: keys (scaled) or values, transposed */
  real *gradient;      /* [keys][padded]: dk or dv */
  unsigned char *tile; /* [tiles]: TILE_... */
  /* of a block of queries */
  real *copy;    /* [block][padded]: x, where it needs one */
  real *product; /* [block_rows][TILE] of one tile: scores, then p; dp, then ds */
  real *start;   /* [block]: what is left of -lse_i, or -delta_i */
  packed_term table;
  band_e e;
  real *buckets;     /* [bucket_rows][window] */
  real *tail, *head; /* [bucket_rows][LANES] */
  window w;
  dense x;
  dense content; /* what keys meet: x, or for queries moved */
  real *moved;   /* [block + 1][padded]: the same where it is, and the vector */
  /* in bf16, where tiles do not multiply: the same as words */
  real *packed_words;           /* [tiles][inner_of width][TILE] */
  real *row_words, *line_words; /* of content: its rows along inner, and across it */
  real *own_rows, *own_lines;   /* of x, where that is not content */
  dense met;                    /* what products read of content's rows */
  const real *own;              /* and of those of x across inner, for what they meet of a table */
  real *bucket_words;           /* some rows of buckets, or all their columns */
  bool collects; /* some tile lies across the band, and somebody asks what it gathers */
  bool together; /* by distance alone: the rows of all strips share those of the first */
  /* operands of products of whole blocks, and whether they could be packed */
  operand *tile_parts; /* [tiles]: packed */
  bool *tile_fits;
  row_operands x_parts, content_parts;
  operand weights;      /* of a block on a tile, for the gradient */
  operand bucket_parts; /* some rows of buckets, or some columns */
  real *turned;         /* [padded][32] of such columns, times x */
  real *across;         /* [tiles][padded][TILE]: more of the gradient, keys across */
  bool *begun;          /* [tiles]: there is some */
} side;

/* Rows of buckets of a strip along inner, or those of a block across it. */
static real *take_bucket_words(rpi_arena *arena, const bounds *n, int64_t columns) {
  const int64_t along = RPI_STRIP * inner_stride(n->how, columns);
  const int64_t across = inner_of(n->how, n->block) * rpi_round_up(columns, RPI_LANES);
  return rpi_arena_take(arena, rpi_max(along, across), sizeof(real));
}

static void take_side(rpi_arena *arena, const bounds *n, const rp_relation *relations, int parts,
                      int64_t width, int64_t padded, int64_t columns, int64_t packed, bool moved,
                      side *x) {
  const int64_t real_bytes = sizeof(real), window_size = n->block * window_stride(columns);
  const int64_t rows = block_rows(n), tiles = n->keys / RPI_TILE;
  x->packed = rpi_arena_take(arena, n->keys * width, real_bytes);
  x->gradient = rpi_arena_take(arena, n->keys * padded, real_bytes);
  x->tile = rpi_arena_take(arena, tiles, 1);
  x->copy = rpi_arena_take(arena, n->block * padded, real_bytes);
  x->product = rpi_arena_take(arena, rows * RPI_TILE, real_bytes);
  x->start = rpi_arena_take(arena, n->block, real_bytes);
  take_packed(arena, n, relations, packed, padded, parts, &x->table);
  x->e = take_e(arena, rows, columns, rows, 0);
  x->buckets = rpi_arena_take(arena, window_size, real_bytes);
  x->tail = rpi_arena_take(arena, n->block * RPI_LANES, real_bytes);
  x->head = rpi_arena_take(arena, n->block * RPI_LANES, real_bytes);
  if (moved) x->moved = rpi_arena_take(arena, (n->block + 1) * padded, real_bytes);
  if (n->how != RPI_NUMBERS) {
    x->packed_words = take_word_lines(arena, n->how, width, n->keys);
    x->row_words = take_word_rows(arena, n->how, n->block, width);
    x->line_words = take_word_lines(arena, n->how, n->block, padded);
    if (moved) x->own_rows = take_word_rows(arena, n->how, n->block, width);
    if (moved) x->own_lines = take_word_lines(arena, n->how, n->block, padded);
    x->bucket_words = take_bucket_words(arena, n, columns);
  }
  x->tile_fits = rpi_arena_take(arena, tiles, sizeof(bool));
  if (!n->tiles) return;
  x->tile_parts = take_operands(arena, n->tiles, tiles, RPI_TILE, width);
  x->x_parts.lines = take_operand(arena, n->tiles, rows, width);
  x->x_parts.inner = take_operand(arena, n->tiles, padded, rows);
  x->content_parts = x->x_parts;
  if (moved) {
    x->content_parts.lines = take_operand(arena, n->tiles, rows, width);
    x->content_parts.inner = take_operand(arena, n->tiles, padded, rows);
  }
  x->weights = take_operand(arena, n->tiles, RPI_TILE, rows);
  x->bucket_parts = take_operand(arena, n->tiles, RPI_TILED_ROWS, rpi_max(columns, rows));
  x->turned = rpi_arena_take(arena, padded * RPI_TILED_ROWS, real_bytes);
  x->across = rpi_arena_take(arena, tiles * padded * RPI_TILE, real_bytes);
  x->begun = rpi_arena_take(arena, tiles, sizeof(bool));
}

/* One pair of chunks of one head. */
typedef struct backward_item {
  const rpi_attention_backward_args *args;
  rpi_sequence seq;
  sight sees;
  int64_t head, key_head;
  rectangle r;
  bool first_for_queries, first_for_keys;
  bounds n;
  pair_terms pairs;
  const slot *sums;
  int64_t *unmasked; /* [as lse]: keys that a row sees through a dense mask; -1: not counted yet */
  /* of each side */
  term term[SIDES];
  int64_t width[SIDES], padded[SIDES];
  real factor[SIDES];   /* of the packed keys and of E */
  bool by_row[SIDES];   /* ends are always gathered per row */
  table_sums to[SIDES]; /* the band's sums */
} backward_item;

/* A block of queries. */
typedef struct backward_block {
  int64_t row0, rows; /* counted in the sequence */
  bool odd;           /* some row's log-sum-exp is not a number */
  dense keys[PLACES]; /* of the chunk: as they are where a block lies across the band, else moved */
} backward_block;

/* ---- a tile of keys ----------------------------------------------------- */

/* to = factor * from, or to += factor * from. */
RPI_INLINE void put_row(const real *restrict from, int64_t width, real factor, bool overwrite,
                        real *restrict to) {
  int64_t c = 0;
  for (; c + RPI_LANES <= width; c += RPI_LANES) {
    const rpi_register x = factor * rpi_load(from + c);
    rpi_store(to + c, overwrite ? x : rpi_load(to + c) + x);
  }
  for (; c < width; c++) to[c] = overwrite ? factor * from[c] : to[c] + factor * from[c];
}

/* The same for the rows of a gradient. */
static void put_rows(const rp_rows_out *out, int64_t batch, int64_t head, int64_t row0,
                     int64_t count, int64_t width, const real *x, int64_t x_stride, real factor,
                     bool overwrite) {
  for (int64_t i = 0; i < count; i++) {
    real *const to = out_row_of(out, batch, head, row0 + i);
    const real *const from = x + i * x_stride;
    rpi_prefetch_row_to(to, 8 * out->row_stride, width);
    if (overwrite) put_row(from, width, factor, true, to);
    else put_row(from, width, factor, false, to);
  }
}

/* Adds dk (dv) of a tile to its place. */
static void put_tile(const backward_item *item, const side *x, int which, int64_t j,
                     bool overwrite) {
  const rp_attention_gradients *const g = item->args->gradients;
  put_rows(which == KEY ? &g->k : &g->v, item->seq.key_batch, item->key_head,
           item->seq.key_row + item->r.key + j, rpi_min(RPI_TILE, item->r.keys - j),
           item->width[which], x->gradient + j * item->padded[which], item->padded[which],
           which == KEY ? scale_of(item->args->shape) : (real)1, overwrite);
}

/* to[c][w] += from[w][c], for `columns` of c and whole vectors of w. */
static void add_turned(const real *from, int64_t from_stride, int64_t columns, int64_t width,
                       real *to) {
  for (int64_t column = 0; column < columns; column += RPI_LANES) {
    const int64_t count = rpi_min(RPI_LANES, columns - column);
    for (int64_t c = 0; c < width; c += RPI_LANES) {
      rpi_register square[RPI_LANES];
      RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) {
        square[i] = rpi_load(from + (c + i) * from_stride + column);
      }
      rpi_transpose(square);
      real *const at = to + column * width + c;
      if (count < RPI_LANES) {
        for (int64_t i = 0; i < count; i++) {
          rpi_store(at + i * width, rpi_load(at + i * width) + square[i]);
        }
        continue;
      }
      RPI_UNROLL(16) for (int i = 0; i < RPI_LANES; i++) {
        rpi_store(at + i * width, rpi_load(at + i * width) + square[i]);
      }
    }
  }
}

/* Where more of dk (dv) of a tile lies across, to be added to. */
static real *open_across(side *x, int64_t j, int64_t width) {
  real *const across = x->across + j * width;
  if (!x->begun[j / RPI_TILE]) memset(across, 0, (size_t)(width * RPI_TILE) * sizeof *across);
  x->begun[j / RPI_TILE] = true;
  return across;
}

/* Puts what of dk (dv) of a tile lies across to the rest. */
static void turn_gradient(const backward_item *item, side *x, int which, int64_t j) {
  if (!item->n.tiles || !x->begun[j / RPI_TILE]) return;
  const int64_t width = item->padded[which];
  const real *const from = x->across + j * width;
  add_turned(from, RPI_TILE, rpi_min(RPI_TILE, item->r.keys - j), width, x->gradient + j * width);
  x->begun[j / RPI_TILE] = false;
}

/* Adds dk (dv) of a tile, up to now, to a line of the table's gradient. */
RPI_NOINLINE void add_tile(const backward_item *item, const side *x, int which, int64_t j,
                           real *line) {
  const int64_t padded = item->padded[which], rows = rpi_min(RPI_TILE, item->r.keys - j);
  for (int64_t c = 0; c < padded; c += RPI_LANES) {
    const real *const from = x->gradient + j * padded + c;
    rpi_register sum = rpi_load(line + c);
    for (int64_t row = 0; row < rows; row++) sum += rpi_load(from + row * padded);
    rpi_store(line + c, sum);
  }
}

/* Has a pair of chunks keys on both sides of its queries, beyond the band? (Masks are not asked.)
 * Then many a tile would turn twice, for a few blocks each time. */
static bool lies_across(const backward_item *item, int which) {
  const term *const t = &item->term[which];
  const int64_t distance = item->r.key - (item->r.query + item->seq.start);
  return t->ends && distance - (item->r.rows - 1) < t->first &&
         distance + item->r.keys - 1 >= t->last;
}

/* Where a block lies, and what that means for dk (dv) of the tile. */
static int turn_tile(const backward_item *item, side *x, int which, int64_t j, const reach *r) {
  const term *const t = &item->term[which];
  const table_sums *const sums = &item->to[which];
  unsigned char *const state = &x->tile[j / RPI_TILE];
  if (item->by_row[which]) {
    *state = TILE_MIXED;
    return ACROSS;
  }
  if (x->w.tail && r->nearest >= t->last) {
    *state = TILE_RIGHT;
    return RIGHT;
  }
  if (*state == TILE_RIGHT && sums->lines) {
    turn_gradient(item, x, which, j);
    add_tile(item, x, which, j, sums->lines + (t->last - sums->first + 1) * item->padded[which]);
  }
  if (!t->ends || r->farthest >= t->first) {
    *state = TILE_MIXED;
    return ACROSS;
  }
  if ((*state == TILE_RIGHT || *state == TILE_MIXED) && sums->lines) {
    real *const gradient = x->gradient + j * item->padded[which];
    const int64_t keys = rpi_min(RPI_TILE, item->r.keys - j);
    turn_gradient(item, x, which, j);
    put_tile(item, x, which, j, item->first_for_keys);
    memset(gradient, 0, (size_t)(keys * item->padded[which]) * sizeof(real));
    *state = TILE_LEFT_AGAIN;
  } else if (*state == TILE_EMPTY) {
    *state = TILE_LEFT;
  }
  return LEFT;
}

/* ---- a block of queries ------------------------------------------------- */

static void pack_rows(dense x, int64_t count, int64_t width, int64_t padded, row_operands *to) {
  to->lines_fit = pack_operand(x, ROWS_ARE_LINES, count, width, to->lines);
  to->inner_fit =
      to->lines_fit && pack_met_operand(x, ROWS_ARE_INNER_OF_LEFT, padded, count, to->inner);
}

/* Rows of buckets of a block. */
static int64_t bucket_rows(const side *x, int64_t rows) {
  return x->together ? rpi_min(rows, RPI_STRIP) : rows;
}

/* Makes a block ready to walk: x, E, empty buckets. */
static void open_side(const backward_item *item, const backward_block *block, side *x, int which,
                      const real *zeros) {
  const rpi_attention_backward_args *const args = item->args;
  const rp_rows *const from = which == KEY ? &args->q : &args->dout;
  const int64_t count = block->rows, width = item->width[which], padded = item->padded[which];
  const term *const t = &item->term[which];
  const reach r = reach_of(&item->seq, &item->sees, block->row0, count, item->r.key, item->r.keys);
  x->x =
      dense_rows(row_of(from, item->seq.query_batch, item->head, item->seq.query_row + block->row0),
                 from->row_stride, count, width, padded, item->n.tiles, x->copy);
  x->content = x->x;
  const bool moved = which == KEY && item->pairs.moves;
  x->x_parts.lines_fit = x->x_parts.inner_fit = false;
  if (item->n.tiles && (t->vector_count || !moved)) {
    pack_rows(x->x, count, width, padded, &x->x_parts);
  }
  if (moved) {
    x->content = moved_rows(&item->pairs.query, 0, &x->x, count, padded,
                            x->moved + item->n.block * padded, x->moved);
    if (item->n.tiles) pack_rows(x->content, count, width, padded, &x->content_parts);
  } else {
    x->content_parts = x->x_parts;
  }
  dense own = x->x; /* of which E is */
  x->met = x->content;
  if (item->n.how != RPI_NUMBERS) {
    own = x->met = word_rows(item->n.how, x->content, count, width, x->row_words);
    word_lines(item->n.how, x->content, count, padded, x->line_words, padded);
    x->own = x->line_words;
  }
  if (item->n.how != RPI_NUMBERS && moved && t->vector_count) {
    own = word_rows(item->n.how, x->x, count, width, x->own_rows);
    word_lines(item->n.how, x->x, count, padded, x->own_lines, padded);
    x->own = x->own_lines;
  }
  x->w = window_of(t, r.nearest, r.farthest);
  x->collects = false;
  if (window_empty(&x->w)) return;
  const bool one_side = r.farthest < t->first || (x->w.tail && r.nearest >= t->last);
  const table_sums *const sums = &item->to[which];
  const bool wanted = sums->lines || sums->numbers || (which == KEY && t->vector_count);
  x->collects = wanted && (item->by_row[which] || !one_side);
  const block_place at = {.distance = item->r.key - (block->row0 + item->seq.start),
                          .rows = count,
                          .keys = item->r.keys};
  const reach all =
      reach_of(&item->seq, &item->sees, item->r.query, item->r.rows, item->r.key, item->r.keys);
  const window whole = window_of(t, all.nearest, all.farthest);
  const window packed = window_to_pack(&x->table, &x->w, &whole);
  pack_window(t, &packed, item->factor[which], (real)RPI_LOG2_E, padded, &item->n, &x->table);
  begin_strip(&x->table, &x->w);
  band_scores(t, &x->w, &x->table, own, x->x_parts.lines_fit ? &x->x_parts.lines : NULL, &at,
              item->factor[which], zeros, &x->e);
  if (!x->collects) return;
  x->together = !sums->lines && !(which == KEY && t->vector_count);
  const int64_t kept = bucket_rows(x, count);
  memset(x->head, 0, (size_t)(kept * RPI_LANES) * sizeof(real));
  memset(x->tail, 0, (size_t)(kept * RPI_LANES) * sizeof(real));
  memset(x->buckets, 0, (size_t)(kept * window_stride(x->w.columns)) * sizeof(real));
}

/* The sums of a strip that lies wholly in the head or the tail of a block across the band, or NULL:
 * others are added to by collect_strip. */
static real *end_sums(const side *x, int meets, int64_t i) {
  const int64_t at = (x->together ? 0 : i) * RPI_LANES;
  return meets == MEETS_TAIL ? x->tail + at : meets == MEETS_HEAD ? x->head + at : NULL;
}

/* Gathers a strip of ds (p) by relation: (6), for a block across the band. */
static void collect_strip(side *x, const real *weights, int64_t i, int64_t count, int64_t distance,
                          int64_t tile_keys, int64_t columns) {
  const int64_t nearest = distance - (count - 1), farthest = distance + tile_keys - 1;
  if (window_meets(&x->w, nearest, farthest) != MEETS_BAND) return;
  const int64_t row = x->together ? 0 : i;
  real *const head = x->head + row * RPI_LANES, *const tail = x->tail + row * RPI_LANES;
  band_store(&x->w, count, columns, weights, RPI_LANES + distance - x->w.first, x->together,
             x->buckets + row * window_stride(x->w.columns), x->w.tail ? tail : NULL,
             x->w.head && nearest < x->w.first ? head : NULL);
}

/* Some columns (below) by tiles; false where a number has no parts. */
static bool collect_tiled(const side *x, int64_t c, int64_t count, int64_t rows, int64_t padded,
                          const runs *folded, real *sums) {
  const dense buckets = {x->buckets + RPI_LANES + c, window_stride(x->w.columns)};
  real *const lines = x->table.lines;
  if (!pack_met_operand(buckets, ROWS_ARE_INNER, count, rows, x->bucket_parts)) return false;
  multiply_operands(x->x_parts.inner, padded, x->bucket_parts, count, rows, false, x->turned,
                    RPI_TILED_ROWS);
  if (!folded) {
    add_turned(x->turned, RPI_TILED_ROWS, count, padded, sums + c * padded);
    return true;
  }
  memset(lines, 0, (size_t)(count * padded) * sizeof(real));
  add_turned(x->turned, RPI_TILED_ROWS, count, padded, lines);
  runs_add(folded, c, count, padded, lines, sums);
  return true;
}

/* sums[column] += its buckets times x, for every column of the window, and for its head, which is
 * column -1. folded: NULL, or the runs whose lines are in the place of columns. */
static void collect_columns(const backward_item *item, const side *x, int64_t rows, int64_t padded,
                            const runs *folded, const real *zeros, real *sums) {
  const int how = item->n.how;
  const int64_t head = x->w.head ? 1 : 0, columns = folded ? folded->count : x->w.columns;
  const int64_t stride = window_stride(x->w.columns), filled = rpi_round_up(columns, RPI_LANES);
  const bool tiles = x->x_parts.inner_fit, words = how != RPI_NUMBERS;
  const bool together = !tiles && !folded && !words;
  const int64_t step = tiles ? RPI_TILED_ROWS : columns;
  const dense buckets = {x->buckets + RPI_LANES, stride};
  add_transposed(buckets.data - head, stride, head + (together ? columns : 0), x->x.data,
                 x->x.stride, rows, padded, sums - head * padded);
  if (together) return;
  rpi_product product =
      product_across(RPI_NUMBERS, buckets, x->x.data, x->x.stride, rows, sums, padded);
  if (words) {
    word_lines(how, buckets, rows, filled, x->bucket_words, filled);
    product =
        product_across(how, (dense){x->bucket_words, filled}, x->own, padded, rows, sums, padded);
  }
  for (int64_t c = 0; c < columns; c += step) {
    const int64_t count = rpi_min(step, columns - c);
    if (tiles && collect_tiled(x, c, count, rows, padded, folded, sums)) continue;
    rpi_product some = product;
    some.a += c * some.a_row;
    some.c += c * padded;
    if (folded) runs_add_product(folded, some, c, c + count, padded, zeros, x->table.lines, sums);
    else rpi_block_product(RPI_START_LOAD, count, padded / RPI_LANES, some, NULL);
  }
}

/* After a block: its buckets times x go to the table's gradient, times the table to dq. */
static void close_side(const backward_item *item, const backward_block *block, side *x, int which,
                       const real *zeros, real *dq) {
  const table_sums *const sums = &item->to[which];
  const int64_t padded = item->padded[which], columns = x->w.columns;
  const int64_t stride = window_stride(columns);
  if (!x->collects) return;
  const block_place at = {.distance = item->r.key - (block->row0 + item->seq.start),
                          .rows = block->rows,
                          .keys = item->r.keys};
  const int64_t kept = bucket_rows(x, block->rows);
  band_finish(&x->w, kept, x->buckets, x->tail, x->head);
  /* the head is column -1 of the buckets, row -1 of the table, line 0 of the sums */
  const int64_t head = x->w.head ? 1 : 0, first = head ? 0 : x->w.first - sums->first + 1;
  const real *const buckets = x->buckets + RPI_LANES - head;
  const runs *const lines = is_folded(&x->table) ? &x->table.runs : NULL;
  if (sums->numbers) {
    add_columns(buckets, stride, kept, columns + head, sums->numbers + first);
  }
  if (lines && !x->together) {
    runs_gather(lines, columns, block->rows, x->buckets + RPI_LANES, stride);
  }
  if (sums->lines) {
    collect_columns(item, x, block->rows, padded, lines, zeros,
                    sums->lines + (first + head) * padded);
  }
  if (which == KEY && item->term[KEY].vector_count) {
    const bucket_way way =
        bucket_way_of(&x->table, &x->w, item->n.tiles, x->bucket_parts, x->bucket_words);
    const int64_t column = packed_column(&x->table, &x->w);
    const bool alone = head && (way.tiled || way.worded);
    rpi_product product = {.a = buckets,
                           .a_row = stride,
                           .a_inner = 1,
                           .b = x->table.down + (column - head) * padded,
                           .b_stride = padded,
                           .c = dq,
                           .c_stride = padded,
                           .inner = columns + head};
    if (alone) {
      product.inner = 1;
      rpi_block_product(RPI_START_LOAD, block->rows, padded / RPI_LANES, product, NULL);
      product.a++;
      product.b += padded;
      product.inner = columns;
    }
    if (product.inner > 0) {
      for (int64_t i = 0, step = band_step(&way); i < block->rows; i += step) {
        band_product_rows(&product, &at, i, rpi_min(step, block->rows - i), padded, &x->w,
                          alone ? 0 : -head, lines, &x->table, &way);
      }
    }
  }
}

/* ---- a chunk of keys ---------------------------------------------------- */

/* Packs a chunk of keys (values), and empties dk (dv). */
static void open_keys(const backward_item *item, side *x, int which) {
  const rp_rows *const from = which == KEY ? &item->args->k : &item->args->v;
  const int64_t keys = rpi_max(item->r.keys, 0), width = item->width[which];
  memset(x->gradient, 0, (size_t)(keys * item->padded[which]) * sizeof(real));
  const dense rows = {
      row_of(from, item->seq.key_batch, item->key_head, item->seq.key_row + item->r.key),
      from->row_stride};
  for (int64_t j = 0; j < keys; j += RPI_TILE) {
    x->tile[j / RPI_TILE] = TILE_EMPTY;
    if (item->n.tiles) x->begun[j / RPI_TILE] = false;
    x->tile_fits[j / RPI_TILE] =
        pack_tile(&item->n, &item->pairs, rows, j, keys, width, item->factor[which], x->packed,
                  x->packed_words, x->tile_parts);
  }
}

/* Puts dk (dv), and what a tile in the end holds of one relation alone. */
static void close_keys(const backward_item *item, side *x, int which) {
  const int64_t padded = item->padded[which];
  const table_sums *const sums = &item->to[which];
  for (int64_t j = 0; j < item->r.keys; j += RPI_TILE) {
    const int state = x->tile[j / RPI_TILE];
    turn_gradient(item, x, which, j);
    put_tile(item, x, which, j, item->first_for_keys && state != TILE_LEFT_AGAIN);
    if (!sums->lines) continue;
    if (state >= TILE_LEFT) add_tile(item, x, which, j, sums->lines);
    if (state == TILE_RIGHT) {
      add_tile(item, x, which, j,
               sums->lines + (item->term[which].last - sums->first + 1) * padded);
    }
  }
}

#endif
