/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_case.h: one call of attention as tests of the kernels draw it: a shape, its
 * arrays with margins, and what is expected of every number (attention_oracle.h).
 *
 * Whatever no kernel may read is NaN, a bad label or a bad position; whatever no kernel
 * may write is a canary.
 */
#ifndef ATTENTION_CASE_H
#define ATTENTION_CASE_H

#define _POSIX_C_SOURCE 200809L

#include <float.h>

#include "base/memory.h"
#include "base/rng.h"
#include "check.h"
#include "tables.h"

#define BF16_UNIT (1.0 / 256) /* half an ulp of 8 bits */
#ifdef RP_REAL_IS_DOUBLE
typedef long double wide;
#define UNIT (DBL_EPSILON / 2)
#define TINY (DBL_MIN * 1e6)
#define EXP expl
#define TANH tanhl
#define LOG logl
#else
typedef double wide;
#define UNIT (FLT_EPSILON / 2)
#define TINY (FLT_MIN * 1e6)
#define EXP exp
#define TANH tanh
#define LOG log
#endif

/* ---- numbers ---------------------------------------------------------------- */

static uint32_t state = 1;

static uint32_t draw(void) {
  state = state * 1664525u + 1013904223u;
  return state >> 8;
}

static real number(void) { return (real)draw() / (real)(1 << 23) - 1; }

static void *memory_of(int64_t count, size_t bytes) {
  void *const memory = malloc((size_t)(count + 1) * bytes);
  if (memory == NULL) abort();
  return memory;
}

/* ---- shapes ----------------------------------------------------------------- */

enum { ABSENT, SHARED, PER_HEAD }; /* a table */
enum { CLIP = RP_BEYOND_CLIP, NONE = RP_BEYOND_NONE };
enum { HEADS_FIRST, ROWS_FIRST, PACKED }; /* a layout */
enum { FULL, RAGGED };                    /* lengths */
enum { MOST_B = 4, START_DEFAULT = -100000 };
enum { KEY, QUERY, BIAS, VALUE, TERMS = 4 * RP_TERMS }; /* a kind: the place / RP_TERMS */

typedef struct term {
  int table;
  int64_t left, right;
  int beyond;
  int map;      /* RP_MAP_... */
  int64_t rows; /* of tables with labels, edges or buckets */
  bool buckets, positions;
  bool far;  /* positions far apart, in no order */
  int bytes; /* of a label */
  bool by_sequence, by_head;
} term;

enum { HUGE_NOWHERE, HUGE_Q, HUGE_K, HUGE_V, HUGE_DOUT, HUGE_KEYS, HUGE_VALUES };

typedef struct shape {
  int64_t B, H, N, M, D, Dv;
  term key, value;
  bool causal;
  int layout, lengths;
  int64_t start; /* of sequence 0, later ones stand one further; or START_DEFAULT */
  int64_t gap;   /* unused numbers after each row */
  bool tied;     /* value's table is key's */
  double scale;
  term key2, query, query2, bias, bias2, value2;
  bool position_bias, window;
  int64_t window_left, window_right;
  bool mask, mask_by_head;
  double softcap, dropout;
  bool ordinals; /* of the sequences, in no order */
  int huge;      /* where a number is too large for bf16, of HUGE_... */
} shape;

static inline const term *term_of(const shape *s, int t) {
  const term *const terms[TERMS] = {&s->key,  &s->key2,  &s->query, &s->query2,
                                    &s->bias, &s->bias2, &s->value, &s->value2};
  return terms[t];
}
static inline int64_t width_of(const shape *s, int t) {
  return t / RP_TERMS == BIAS ? 1 : t / RP_TERMS == VALUE ? s->Dv : s->D;
}
static inline int64_t table_rows(const term *t) {
  return t->map == RP_MAP_BAND && !t->buckets ? t->left + t->right + 1 : t->rows;
}

static inline int64_t pick(const int64_t *from, size_t count) { return from[draw() % count]; }
#define PICK(...)                                                                                  \
  pick((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

/* ---- arrays ------------------------------------------------------------------ */

#define CANARY ((real) - 12345.0)

/* No margin behind arrays under AddressSanitizer: it watches the end better. */
#if defined(__SANITIZE_ADDRESS__)
enum { BEFORE = 17, BEHIND = 0 };
#else
enum { BEFORE = 17, BEHIND = 64 }; /* odd: no kernel may count on alignment */
#endif

typedef struct array {
  real *memory; /* `all` numbers, margins included */
  real *data;
  int64_t all, batch, head, row;
  wide *expected, *size; /* of each number in memory; NULL for inputs */
} array;

static array array_create(int64_t count, bool output, real fill) {
  array x = {.all = BEFORE + count + BEHIND};
  x.memory = malloc((size_t)x.all * sizeof(real)); /* not a number more: ASan sees the end */
  if (x.memory == NULL) abort();
  x.data = x.memory + BEFORE;
  for (int64_t i = 0; i < x.all; i++) x.memory[i] = fill;
  if (!output) return x;
  x.expected = memory_of(x.all, sizeof(wide));
  x.size = memory_of(x.all, sizeof(wide));
  for (int64_t i = 0; i < x.all; i++) {
    x.expected[i] = fill;
    x.size[i] = 0;
  }
  return x;
}

static void array_free(array *x) {
  free(x->memory);
  free(x->expected);
  free(x->size);
}

/* Rows of one side of a shape; packed ones have `tokens` rows. */
static array rows_create(const shape *s, int64_t rows, int64_t tokens, int64_t width, bool output) {
  const int64_t wide_row = width + s->gap;
  const int64_t count = s->layout == PACKED ? tokens * s->H : s->B * s->H * rows;
  array x = array_create(count * wide_row, output, output ? CANARY : (real)NAN);
  if (s->layout == HEADS_FIRST) {
    x.batch = s->H * rows * wide_row;
    x.head = rows * wide_row;
    x.row = wide_row;
  } else {
    x.batch = s->layout == PACKED ? 0 : s->H * rows * wide_row;
    x.head = wide_row;
    x.row = s->H * wide_row;
  }
  return x;
}

/* Random numbers; of an output: what was there before. */
static void fill_number_row(array *x, int64_t at, int64_t width) {
  for (int64_t c = 0; c < width; c++) {
    x->data[at + c] = number();
    if (!x->expected) continue;
    x->expected[BEFORE + at + c] = x->data[at + c];
    x->size[BEFORE + at + c] = fabs((double)x->data[at + c]);
  }
}

static array table_create(const shape *s, int t, bool output) {
  const term *const own = term_of(s, t);
  const int64_t width = width_of(s, t), rows = table_rows(own);
  const int64_t tables = own->table == PER_HEAD ? s->H : own->table == SHARED ? 1 : 0;
  const int64_t wide_row = width + s->gap;
  array x = array_create(tables * rows * wide_row, output, output ? CANARY : (real)NAN);
  x.head = own->table == PER_HEAD ? rows * wide_row : 0;
  x.row = wide_row;
  for (int64_t i = 0; i < tables * rows; i++) fill_number_row(&x, i * wide_row, width);
  return x;
}

static int64_t at(const array *x, int64_t b, int64_t h, int64_t row) {
  return BEFORE + b * x->batch + h * x->head + row * x->row;
}

/* ---- a case ------------------------------------------------------------------ */

typedef struct sequence {
  int64_t b, queries, keys, query_row, key_row, start, number;
} sequence;

/* What a map reads. */
typedef struct map_data {
  void *labels;
  int64_t label_starts[MOST_B], label_head, label_batch;
  int64_t *edge_starts;
  int32_t *edge_keys, *edge_labels;
  int32_t *buckets, *query_positions, *key_positions;
} map_data;

typedef struct attention_case {
  shape s;
  int64_t lengths[MOST_B], key_lengths[MOST_B], starts[MOST_B];
  int64_t offsets[MOST_B + 1], key_offsets[MOST_B + 1];
  uint32_t ordinals[MOST_B];
  array q, k, v, dout, table[TERMS], position_bias; /* inputs */
  map_data map[TERMS];
  uint8_t *mask;
  int64_t mask_starts[MOST_B], mask_head, mask_batch;
  array out, lse, dq, dk, dv, dtable[TERMS], dposition_bias; /* outputs */
  double terms;
  bool rounded; /* operands are, to bf16 */
} attention_case;

enum { ACTIVATIONS = 5, OUTPUTS = ACTIVATIONS + TERMS + 1 };
static inline array *output_of(attention_case *c, int i) {
  array *const first[] = {&c->out, &c->lse, &c->dq, &c->dk, &c->dv};
  if (i < ACTIVATIONS) return first[i];
  return i < ACTIVATIONS + TERMS ? &c->dtable[i - ACTIVATIONS] : &c->dposition_bias;
}
static const char *const output_names[OUTPUTS] = {"out",          "lse",
                                                  "q's gradient", "k's",
                                                  "v's",          "key[0]'s",
                                                  "key[1]'s",     "query[0]'s",
                                                  "query[1]'s",   "bias[0]'s",
                                                  "bias[1]'s",    "value[0]'s",
                                                  "value[1]'s",   "the position bias's"};

static sequence sequence_at(const attention_case *c, int64_t b) {
  const bool packed = c->s.layout == PACKED;
  const int64_t queries = c->lengths[b], keys = c->key_lengths[b];
  return (sequence){.b = packed ? 0 : b,
                    .queries = queries,
                    .keys = keys,
                    .query_row = packed ? c->offsets[b] : 0,
                    .key_row = packed ? c->key_offsets[b] : 0,
                    .start = c->s.start == START_DEFAULT ? keys - queries : c->starts[b],
                    .number = packed ? c->offsets[b] : b * c->s.N};
}

static void fill_rows(const attention_case *c, array *x, bool keys, int64_t width, real factor) {
  for (int64_t b = 0; b < c->s.B; b++) {
    const sequence q = sequence_at(c, b);
    for (int64_t h = 0; h < c->s.H; h++) {
      for (int64_t i = 0; i < (keys ? q.keys : q.queries); i++) {
        real *const row = x->memory + at(x, q.b, h, (keys ? q.key_row : q.query_row) + i);
        for (int64_t d = 0; d < width; d++) row[d] = factor * number();
      }
    }
  }
}

/* Column 1 of all rows; or one number of it, which is beyond what tiles of bf16 can hold. */
static void set_column(const attention_case *c, array *x, bool keys, bool huge) {
  for (int64_t b = 0; b < c->s.B; b++) {
    const sequence q = sequence_at(c, b);
    for (int64_t h = 0; h < c->s.H; h++) {
      for (int64_t i = 0; i < (keys ? q.keys : q.queries); i++) {
        real *const row = x->memory + at(x, q.b, h, (keys ? q.key_row : q.query_row) + i);
        if (!huge) row[1] = 0;
        else if (i == 70 && h == 0) row[1] = (real)3.4e38;
      }
    }
  }
}

/* The same in the row of a table that distance 0 alone has. The gradients of scores are far
 * below 1: times the huge number they are queries' gradients. */
static void make_huge_row(attention_case *c) {
  const bool keys = c->s.huge == HUGE_KEYS;
  array *const table = &c->table[(keys ? KEY : VALUE) * RP_TERMS];
  const int64_t left = keys ? c->s.key.left : c->s.value.left;
  set_column(c, keys ? &c->q : &c->dout, false, false);
  if (keys) fill_rows(c, &c->dout, false, c->s.Dv, (real)(1.0 / 64));
  else fill_rows(c, &c->q, false, c->s.D, 0);
  table->memory[BEFORE + left * table->row + 1] = (real)3.4e38;
}

/* One huge number, and zeros for all that meets it in a dot product. In values: all scores are 0,
 * for a weight above 1, as there are before the division by their sum, would make it infinite. */
static void make_huge(attention_case *c) {
  if (c->s.huge >= HUGE_KEYS) {
    make_huge_row(c);
    return;
  }
  array *const of[] = {
      [HUGE_Q] = &c->q, [HUGE_K] = &c->k, [HUGE_V] = &c->v, [HUGE_DOUT] = &c->dout};
  static const int meets[] = {
      [HUGE_Q] = HUGE_K, [HUGE_K] = HUGE_Q, [HUGE_V] = HUGE_DOUT, [HUGE_DOUT] = HUGE_V};
  const int where = c->s.huge, with = meets[where];
  set_column(c, of[where], where == HUGE_K || where == HUGE_V, true);
  set_column(c, of[with], with == HUGE_K || with == HUGE_V, false);
  if (where == HUGE_V) fill_rows(c, &c->q, false, c->s.D, 0);
  const int t = where == HUGE_Q ? KEY * RP_TERMS : where == HUGE_DOUT ? VALUE * RP_TERMS : -1;
  if (t < 0) return;
  array *const table = &c->table[t];
  for (int64_t i = BEFORE + 1; i < table->all - BEHIND; i += table->row) table->memory[i] = 0;
}

/* What is expected of rows beyond a length. */
static void expect_padding(const attention_case *c, array *x, bool keys, int64_t width,
                           wide value) {
  if (c->s.layout == PACKED) return;
  for (int64_t b = 0; b < c->s.B; b++) {
    const sequence q = sequence_at(c, b);
    for (int64_t h = 0; h < c->s.H; h++) {
      for (int64_t i = keys ? q.keys : q.queries; i < (keys ? c->s.M : c->s.N); i++) {
        for (int64_t d = 0; d < width; d++) x->expected[at(x, q.b, h, i) + d] = value;
      }
    }
  }
}

/* ---- maps -------------------------------------------------------------------- */

enum { BAD = 77 }; /* a label of no table */

/* Where the matrices of pairs lie: dense, or end to end where the arrays are packed. */
static void place_pairs(const attention_case *c, bool by_sequence, bool by_head, int64_t *starts,
                        int64_t *batch, int64_t *head, int64_t *count) {
  const shape *const s = &c->s;
  int64_t all = 0;
  for (int64_t b = 0; b < s->B; b++) {
    starts[b] = all;
    all += c->lengths[b] * c->key_lengths[b];
  }
  *head = s->layout == PACKED ? all : s->N * s->M;
  *batch = by_sequence ? (by_head ? s->H : 1) * s->N * s->M : 0;
  *count = s->layout == PACKED ? all * (by_head ? s->H : 1)
                               : (by_sequence ? s->B : 1) * (by_head ? s->H : 1) * s->N * s->M;
  if (!by_head) *head = 0;
}

static int64_t pair_at(const attention_case *c, const int64_t *starts, int64_t batch, int64_t head,
                       int64_t b, int64_t h, int64_t i, int64_t j) {
  if (c->s.layout == PACKED) return starts[b] + h * head + i * c->key_lengths[b] + j;
  return b * batch + h * head + i * c->s.M + j;
}

static int64_t label_get(const term *t, const map_data *m, int64_t at) {
  if (t->bytes == 1) return ((const int8_t *)m->labels)[at];
  if (t->bytes == 2) return ((const int16_t *)m->labels)[at];
  return ((const int32_t *)m->labels)[at];
}
static void label_set(const term *t, map_data *m, int64_t at, int64_t label) {
  if (t->bytes == 1) ((int8_t *)m->labels)[at] = (int8_t)label;
  else if (t->bytes == 2) ((int16_t *)m->labels)[at] = (int16_t)label;
  else ((int32_t *)m->labels)[at] = (int32_t)label;
}

static void *exactly(int64_t count, size_t bytes) { /* ASan sees the end */
  void *const memory = malloc(count > 0 ? (size_t)count * bytes : 1);
  if (memory == NULL) abort();
  return memory;
}

/* Labels of pairs in use; bad ones elsewhere. One in three is -1. */
static void make_labels(attention_case *c, const term *t, map_data *m) {
  int64_t count = 0;
  place_pairs(c, t->by_sequence, t->by_head, m->label_starts, &m->label_batch, &m->label_head,
              &count);
  m->labels = exactly(count, (size_t)t->bytes);
  for (int64_t at = 0; at < count; at++) label_set(t, m, at, BAD);
  for (int64_t b = 0; b < c->s.B; b++) {
    for (int64_t h = 0; h < c->s.H; h++) {
      for (int64_t i = 0; i < c->lengths[b]; i++) {
        for (int64_t j = 0; j < c->key_lengths[b]; j++) {
          const int64_t at = pair_at(c, m->label_starts, m->label_batch, m->label_head, b, h, i, j);
          const int64_t label = draw() % 3 ? (int64_t)(draw() % (uint32_t)t->rows) : -1;
          label_set(t, m, at, label);
        }
      }
    }
  }
}

/* A few edges a query, some twice; bad ones of rows beyond a length. */
static void make_edges(attention_case *c, const term *t, map_data *m) {
  enum { MOST = 5 };
  const shape *const s = &c->s;
  const int64_t rows = s->layout == PACKED ? c->offsets[s->B] : s->B * s->N;
  m->edge_starts = exactly(rows + 1, sizeof *m->edge_starts);
  m->edge_keys = exactly(rows * MOST, sizeof *m->edge_keys);
  m->edge_labels = exactly(rows * MOST, sizeof *m->edge_labels);
  int64_t e = 0, row = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const int64_t keys = c->key_lengths[b];
    for (int64_t i = 0; i < (s->layout == PACKED ? c->lengths[b] : s->N); i++, row++) {
      const bool used = i < c->lengths[b];
      int64_t key = keys > 0 ? (int64_t)(draw() % (uint32_t)keys) : 0;
      m->edge_starts[row] = e;
      for (int64_t n = used && keys == 0 ? 0 : draw() % (MOST + 1); n > 0; n--) {
        m->edge_keys[e] = used ? (int32_t)key : INT32_MAX;
        m->edge_labels[e++] = used ? (int32_t)(draw() % (uint32_t)t->rows) : BAD;
        key += draw() % 3 ? (int64_t)(draw() % 90) : 0;
        if (key >= keys) key = keys - 1;
      }
    }
  }
  m->edge_starts[row] = e;
}

/* In use within 40 of half their number, with jumps, or anywhere in the band and beyond it;
 * elsewhere out of any range. */
static int32_t *make_positions(const attention_case *c, const term *t, bool keys) {
  const shape *const s = &c->s;
  const bool packed = s->layout == PACKED;
  const int64_t rows = keys ? s->M : s->N;
  const int64_t *const offsets = keys ? c->key_offsets : c->offsets;
  const int64_t *const lengths = keys ? c->key_lengths : c->lengths;
  const int64_t count = packed ? offsets[s->B] : s->B * rows;
  int32_t *const positions = exactly(count, sizeof *positions);
  for (int64_t i = 0; i < count; i++) positions[i] = INT32_MAX;
  for (int64_t b = 0; b < s->B; b++) {
    for (int64_t i = 0; i < lengths[b]; i++) {
      const int64_t near = i / 2 - draw() % 40, far = draw() % (uint32_t)(t->left + t->right + 9);
      positions[(packed ? offsets[b] : b * rows) + i] = (int32_t)(t->far ? far : near);
    }
  }
  return positions;
}

static void make_map(attention_case *c, int t) {
  const term *const own = term_of(&c->s, t);
  map_data *const m = &c->map[t];
  if (own->table == ABSENT) return;
  if (own->map == RP_MAP_LABEL) make_labels(c, own, m);
  if (own->map == RP_MAP_EDGES) make_edges(c, own, m);
  if (own->map == RP_MAP_BAND && own->buckets) {
    const int64_t distances = own->left + own->right + 1;
    m->buckets = exactly(distances, sizeof *m->buckets);
    const bool runs = draw() % 2 == 0; /* neighbours share rows, as of logarithmic buckets */
    for (int64_t i = 0; i < distances; i++) {
      const bool again = runs && i > 0 && draw() % 3 != 0;
      m->buckets[i] = again ? m->buckets[i - 1] : (int32_t)(draw() % ((uint32_t)own->rows + 1)) - 1;
    }
  }
  if (own->map == RP_MAP_BAND && own->positions) {
    m->query_positions = make_positions(c, own, false);
    m->key_positions = make_positions(c, own, true);
  }
}

static void make_mask(attention_case *c) {
  int64_t count = 0;
  place_pairs(c, true, c->s.mask_by_head, c->mask_starts, &c->mask_batch, &c->mask_head, &count);
  c->mask = exactly(count, 1);
  for (int64_t i = 0; i < count; i++) c->mask[i] = (uint8_t)(draw() % 3);
  for (int64_t b = 0; b < c->s.B; b++) { /* a row that sees nothing */
    for (int64_t j = 0; c->lengths[b] > 0 && j < c->key_lengths[b]; j++) {
      c->mask[pair_at(c, c->mask_starts, c->mask_batch, c->mask_head, b, 0, 0, j)] = 0;
    }
  }
}

static void map_free(map_data *m) {
  void *const all[] = {m->labels,  m->edge_starts,     m->edge_keys,    m->edge_labels,
                       m->buckets, m->query_positions, m->key_positions};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

#endif
