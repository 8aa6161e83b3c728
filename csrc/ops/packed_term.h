/* SPDX-License-Identifier: Apache-2.0
 *
 * packed_term.h: the columns of a window (terms.h), packed for the products of a band (band.h).
 */
#ifndef RPI_PACKED_TERM_H
#define RPI_PACKED_TERM_H

#include "ops/attention_plan.h"
#include "ops/attention_words.h"
#include "ops/runs.h"
#include "ops/terms.h"

/* One vector of sums, whatever the width: GCC's own reduction over a width it does not
 * know spends more on its tails than on 64 numbers. */
RPI_INLINE real dot(const real *restrict x, const real *restrict y, int64_t width) {
  rpi_register sum = {0};
  int64_t c = 0;
  for (; c + RPI_LANES <= width; c += RPI_LANES) sum += rpi_load(x + c) * rpi_load(y + c);
  real total = rpi_total(sum);
  for (; c < width; c++) total += x[c] * y[c];
  return total;
}

/* The columns of a window, ready for both products; kept from block to block while the
 * window stays. Without runs it is that of a chunk of queries, and a block's is a part of it. */
typedef struct packed_term {
  int64_t head_index;
  window w;
  runs runs;        /* columns that share a vector: lines are what has a row below */
  const real *down; /* [lines][width, padded]: the table itself, or the copy; row -1: the head */
  real *across;     /* [width][lines], across_stride apart, times the factor */
  real *copy;
  real *numbers;    /* [columns, padded] */
  real head_number; /* of what is before them */
  real *strip;      /* [STRIP][columns, padded, + LANES]: of lines, where there may be runs */
  real *lines;      /* [TILE][width, padded]: the same */
  /* the same as operands, where memory was taken for them: the right one of E and of buckets times
   * lines; as the left one (skew.h) lines, the head, and lines as inner */
  operand across_parts, down_parts, line_parts, head_parts, turned_parts;
  bool tiled, across_fits, down_fits; /* packed; all numbers have parts, those of down likewise */
  /* The same in bf16 as words (attention_words.h), where memory was taken: across; down, its rows
   * across inner, and along it, from row -1 on. */
  int how;
  bool rounded; /* dot products with the vector of an end are, too */
  real *across_words, *down_words, *line_words;
  real *end;       /* [2][width, padded]: the vector of an end, times a factor, and its words */
  bool words_meet; /* down_words may stand for down: zeros would meet what is infinite */
} packed_term;

/* From one number of the width to the next, of so many lines: an odd number of cache lines where
 * there are many, for a row each 4 KiB, as n = 1024 would have them, lies in one set of the first
 * cache. */
static int64_t across_stride(int64_t lines) {
  const int64_t filled = rpi_divide_up(lines, RPI_LINE);
  return lines <= RPI_TILE ? rpi_round_up(lines, RPI_LANES) : (filled | 1) * RPI_LINE;
}

/* What is packed for a block: `all` is the window of its chunk of queries. */
static window window_to_pack(const packed_term *packed, const window *block, const window *all) {
  return packed->runs.line ? *block : *all;
}

/* A block's window once its columns are packed: begun where a strip of columns begins there. */
static void begin_strip(const packed_term *packed, window *w) {
  const int64_t more = (w->first - packed->w.first) % RPI_TILED_ROWS;
  if (w->columns <= 1) return; /* no strip, and a vector by itself */
  w->first -= more;
  w->columns += more;
}

/* The column of the packed window where a block's begins. */
static int64_t packed_column(const packed_term *packed, const window *w) {
  return w->first - packed->w.first;
}

/* Have columns been put together? */
static bool is_folded(const packed_term *packed) { return packed->runs.count < packed->w.columns; }

/* Do the columns of a window read one table as it lies? */
static bool is_plain(const band_part *p, int count, const window *w) {
  return count == 1 && !p->buckets && w->first - w->head >= -p->left &&
         w->first + w->columns - 1 <= p->right;
}

static bool same_vectors(const term *t, int64_t d, int64_t other) {
  bool same = true;
  for (int i = 0; i < t->vector_count; i++) {
    same &= part_row(&t->vectors[i], d) == part_row(&t->vectors[i], other);
  }
  return same;
}

/* May distances share a vector, but beyond the ends? */
static bool has_buckets(const term *t) {
  bool buckets = false;
  for (int i = 0; i < t->vector_count; i++) buckets |= t->vectors[i].buckets != NULL;
  return buckets;
}

/* Finds the runs of a window, where there are enough of them to be worth it. */
static void find_runs(const term *t, const window *w, int64_t padded, runs *r) {
  const bool buckets = has_buckets(t);
  r->count = 0;
  for (int64_t c = 0; buckets && r->line && c < w->columns; c++) {
    if (c == 0 || !same_vectors(t, w->first + c, w->first + c - 1)) {
      r->begin[r->count++] = (int32_t)c;
    }
    r->line[c] = (rpi_lane)(r->count - 1);
  }
  if (r->count == 0 || r->count > w->columns - w->columns / 8) {
    runs_reset(r, w->columns, padded);
    return;
  }
  for (int64_t c = w->columns; c < padded; c++) r->line[c] = (rpi_lane)(r->count - 1);
}

/* Of more columns than one: that one is a dot product a row. */
static void pack_parts(packed_term *packed, int64_t width, int64_t padded_width) {
  const int64_t lines = packed->runs.count;
  if (packed->across_parts.at && packed->w.columns > 1) {
    const dense across = {packed->across, across_stride(lines)};
    packed->across_fits = pack_met_operand(across, ROWS_ARE_INNER, rpi_round_up(lines, RPI_LANES),
                                           width, packed->across_parts);
  }
  const dense down = {packed->down, padded_width}, head = {packed->down - padded_width, 0};
  packed->down_fits = !packed->w.head || all_have_one_part(head, 1, width);
  if (packed->down_parts.at) {
    packed->down_fits &=
        pack_met_operand(down, ROWS_ARE_INNER, padded_width, lines, packed->down_parts);
  }
  if (packed->line_parts.at) {
    packed->down_fits &= pack_operand(down, ROWS_ARE_LINES, lines, width, packed->line_parts);
  }
  if (packed->head_parts.at && packed->w.head) {
    packed->down_fits &= pack_operand(head, ROWS_ARE_LINES, 1, width, packed->head_parts);
  }
  if (packed->turned_parts.at) {
    packed->down_fits &=
        pack_met_operand(down, ROWS_ARE_INNER_OF_LEFT, padded_width, lines, packed->turned_parts);
  }
}

/* The same as words. */
static void pack_words(packed_term *packed, int64_t width, int64_t padded_width) {
  const int how = packed->how;
  const int64_t lines = packed->runs.count, stride = across_stride(lines);
  const int64_t head = packed->w.head ? 1 : 0;
  const dense across = {packed->across, stride}, down = {packed->down, padded_width};
  const dense with_head = {packed->down - head * padded_width, padded_width};
  if (packed->across_words && packed->w.columns > 1) {
    word_lines(how, across, width, rpi_round_up(lines, RPI_LANES), packed->across_words, stride);
  }
  if (packed->down_words) {
    packed->words_meet = packed->w.columns > 1 && all_have_one_part(with_head, head + lines, width);
    word_lines(how, down, lines, padded_width, packed->down_words, padded_width);
  }
  if (packed->line_words) {
    word_rows(how, with_head, head + lines, width,
              packed->line_words + (1 - head) * inner_stride(how, width));
  }
}

/* factor: of the vectors' products; number_factor: of the numbers; n: as operands, or words. */
static void pack_window(const term *t, const window *w, real factor, real number_factor,
                        int64_t padded_width, const bounds *n, packed_term *packed) {
  const bool tiles = n->tiles != 0;
  if (packed->head_index == t->head_index && packed->w.first == w->first &&
      packed->w.columns == w->columns && packed->w.head >= w->head && packed->tiled == tiles) {
    return;
  }
  packed->head_index = t->head_index;
  packed->tiled = tiles;
  packed->how = n->how;
  packed->rounded = n->rounded;
  packed->across_fits = packed->down_fits = false;
  packed->w = *w;
  const int64_t padded = rpi_round_up(w->columns, RPI_LANES);
  find_runs(t, w, padded, &packed->runs);
  const bool folded = is_folded(packed);
  const int64_t lines = packed->runs.count, padded_lines = rpi_round_up(lines, RPI_LANES);
  if (t->vector_count) {
    const band_part *const p = t->vectors;
    if (is_plain(p, t->vector_count, w) && p->stride == padded_width && t->width == padded_width) {
      packed->down = p->table + (w->first + p->left) * p->stride;
    } else {
      real *const copy = packed->copy + padded_width;
      for (int64_t line = w->head ? -1 : 0; line < lines; line++) {
        const int64_t column = folded && line >= 0 ? packed->runs.begin[line] : line;
        term_vector(t, w->first + column, padded_width, copy + line * padded_width);
      }
      packed->down = copy;
    }
    if (packed->across && w->columns > 1) {
      rpi_pack_transposed(packed->down, padded_width, lines, t->width, factor, packed->across,
                          across_stride(lines), padded_lines);
    }
    if (tiles) pack_parts(packed, t->width, padded_width);
    if (packed->how != RPI_NUMBERS) pack_words(packed, t->width, padded_width);
  }
  if (!t->number_count && !t->position_bias) return;
  if (!t->vector_count && is_plain(t->numbers, t->number_count, w)) {
    const band_part *const p = t->numbers;
    const real *const from = p->table + (w->first + p->left) * p->stride;
    for (int64_t c = 0; c < w->columns; c++)
      packed->numbers[c] = number_factor * from[c * p->stride];
  } else {
    for (int64_t c = 0; c < w->columns; c++) {
      packed->numbers[c] = number_factor * term_number(t, w->first + c);
      if (!t->position_bias) continue;
      const int64_t line = folded ? packed->runs.line[c] : c;
      packed->numbers[c] +=
          factor * dot(t->position_bias, packed->down + line * padded_width, t->width);
    }
  }
  for (int64_t c = w->columns; c < padded; c++) packed->numbers[c] = 0;
  if (!w->head) return;
  packed->head_number = number_factor * term_number(t, t->first - 1);
  if (t->position_bias) {
    packed->head_number += factor * dot(t->position_bias, packed->down - padded_width, t->width);
  }
}

#endif
