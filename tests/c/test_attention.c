/* SPDX-License-Identifier: Apache-2.0
 *
 * The attention of every table this machine can run, forward and backward, against
 * the formulas of attention.h written down as loops over (query, key) pairs.
 *
 * The loops carry, beside each number, its size: what the error of that number is, in
 * units of roundoff u, if every operation behind it errs in the worst direction. For a
 * sum that is the sum of the absolute terms; the weight exp(s - lse) errs, relative to
 * itself, by what s and lse err by. n roundings of random sign amount to sqrt(n) u
 * size (Higham & Mary 2019); twice that is allowed. It is the coarse sieve: how close
 * to the plain formula the results are is measured by tests/test_attention.py.
 *
 *   - Whatever no kernel may read is NaN: margins of arrays, gaps between rows, rows
 *     beyond a length, the workspace, the outputs of activations.
 *   - Whatever no kernel may write is checked to be untouched, bit by bit. The workspace
 *     is exactly as large as the table says.
 *   - 1, 2, 3 and 8 threads give the same bits.
 */
#define _POSIX_C_SOURCE 200809L

#include <float.h>

#include "base/memory.h"
#include "check.h"
#include "tables.h"

#ifdef RP_REAL_IS_DOUBLE
typedef long double wide;
#define UNIT (DBL_EPSILON / 2)
#define TINY (DBL_MIN * 1e6)
#define EXP expl
#define LOG logl
#else
typedef double wide;
#define UNIT (FLT_EPSILON / 2)
#define TINY (FLT_MIN * 1e6)
#define EXP exp
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

typedef struct band {
  int table;
  int64_t left, right;
  int beyond;
} band;

typedef struct shape {
  int64_t B, H, N, M, D, Dv;
  band key, value;
  bool causal;
  int layout, lengths;
  int64_t start; /* of sequence 0, later ones stand one further; or START_DEFAULT */
  int64_t gap;   /* unused numbers after each row */
  bool tied;
  double scale;
} shape;

#define BOTH(table, left, right, beyond)                                                           \
  {table, left, right, beyond}, { table, left, right, beyond }
#define PLAIN                                                                                      \
  {0}, { 0 }

/* Corners of the code: tiles of 64, strips of 6, blocks of 96, chunks of 128, 512 keys
 * and 1024 queries, vectors of 4 to 16, panels of 2 and 4 vectors. */
static const shape corners[] = {
    /* few rows */
    {1, 1, 1, 1, 1, 1, BOTH(SHARED, 0, 0, CLIP), .start = START_DEFAULT},
    {1, 2, 5, 63, 4, 4, BOTH(SHARED, 2, 2, CLIP), .start = START_DEFAULT},
    {1, 1, 6, 64, 16, 16, BOTH(SHARED, 4, 3, CLIP), .start = START_DEFAULT},
    {1, 1, 7, 65, 17, 15, BOTH(SHARED, 3, 4, CLIP), true, .start = START_DEFAULT},
    {2, 1, 1, 129, 8, 33, BOTH(PER_HEAD, 16, 16, CLIP), true, .start = START_DEFAULT},
    {1, 3, 12, 1, 5, 3, BOTH(SHARED, 2, 2, CLIP), .start = 0},
    {2, 2, 0, 9, 4, 4, BOTH(SHARED, 1, 1, CLIP), .start = START_DEFAULT},
    {2, 2, 9, 0, 4, 4, BOTH(SHARED, 1, 1, CLIP), .start = START_DEFAULT},
    {2, 2, 0, 0, 4, 4, BOTH(SHARED, 1, 1, CLIP), .layout = PACKED, .start = START_DEFAULT},
    /* one tile and its neighbours, every way of the band */
    {1, 2, 63, 63, 12, 20, BOTH(SHARED, 16, 16, CLIP), true, .start = START_DEFAULT},
    {1, 2, 64, 64, 32, 32, BOTH(SHARED, 16, 16, CLIP), .start = START_DEFAULT},
    {1, 2, 65, 65, 33, 31, BOTH(PER_HEAD, 7, 9, NONE), .start = START_DEFAULT},
    {1, 1, 65, 65, 64, 64, PLAIN, .start = START_DEFAULT},
    {1, 1, 65, 64, 80, 80, PLAIN, true, .start = START_DEFAULT},
    {1, 1, 70, 70, 13, 13, BOTH(SHARED, 0, 0, CLIP), .start = START_DEFAULT},
    {1, 1, 70, 70, 13, 13, BOTH(SHARED, 0, 0, NONE), .start = START_DEFAULT},
    {1, 1, 70, 75, 9, 9, BOTH(SHARED, 0, 5, CLIP), .start = START_DEFAULT},
    {1, 1, 75, 70, 9, 9, BOTH(SHARED, 5, 0, CLIP), .start = START_DEFAULT},
    {1, 1, 66, 66, 10, 10, BOTH(SHARED, 200, 200, CLIP), .start = START_DEFAULT},
    {1, 1, 66, 66, 10, 10, BOTH(SHARED, 200, 200, NONE), true, .start = START_DEFAULT},
    {1, 2, 97, 97, 14, 18, {SHARED, 4, 4, CLIP}, {0}, .start = START_DEFAULT},
    {1, 2, 96, 97, 14, 18, {0}, {SHARED, 4, 4, CLIP}, .start = START_DEFAULT},
    {1, 2, 95, 130, 18, 18, {SHARED, 4, 6, NONE}, {PER_HEAD, 30, 2, CLIP}, .start = START_DEFAULT},
    {1, 2, 98, 98, 18, 18, BOTH(SHARED, 5, 6, CLIP), .start = START_DEFAULT, .tied = true},
    /* chunks of 128: few heads */
    {1, 1, 127, 128, 8, 8, BOTH(SHARED, 16, 16, CLIP), true, .start = START_DEFAULT},
    {1, 1, 128, 127, 8, 8, BOTH(SHARED, 3, 3, CLIP), true, .start = START_DEFAULT},
    {1, 1, 129, 129, 8, 8, BOTH(SHARED, 16, 16, NONE), .start = START_DEFAULT},
    {1, 2, 257, 300, 7, 6, BOTH(PER_HEAD, 40, 20, CLIP), .start = START_DEFAULT},
    {1, 1, 300, 257, 6, 7, BOTH(SHARED, 2, 90, CLIP), true, .start = START_DEFAULT},
    {1, 1, 390, 130, 6, 7, BOTH(SHARED, 20, 20, CLIP), .start = 0},
    {1, 1, 130, 390, 6, 7, BOTH(SHARED, 20, 20, CLIP), .start = 0},
    /* positions: keys all to one side, queries before every key */
    {2, 1, 80, 90, 8, 8, BOTH(SHARED, 4, 4, CLIP), true, .start = -30},
    {2, 1, 80, 90, 8, 8, BOTH(SHARED, 4, 4, CLIP), true, .start = -90},
    {1, 1, 80, 90, 8, 8, BOTH(SHARED, 4, 4, CLIP), .start = -200},
    {1, 1, 80, 90, 8, 8, BOTH(SHARED, 4, 4, CLIP), .start = 300},
    {1, 1, 80, 90, 8, 8, BOTH(SHARED, 4, 4, NONE), .start = 300},
    {1, 1, 80, 90, 8, 8, BOTH(SHARED, 0, 0, CLIP), .start = -200},
    {1, 1, 80, 90, 8, 8, {SHARED, 2, 80, CLIP}, {SHARED, 80, 2, CLIP}, .start = -40},
    {1, 1, 200, 200, 8, 8, BOTH(SHARED, 60, 10, CLIP), true, .start = -100},
    /* lengths, packs, layouts */
    {4, 2, 75, 90, 9, 11, BOTH(SHARED, 8, 8, CLIP), true, HEADS_FIRST, RAGGED,
     .start = START_DEFAULT, .gap = 3},
    {4, 2, 75, 90, 9, 11, BOTH(PER_HEAD, 8, 8, NONE), false, ROWS_FIRST, RAGGED,
     .start = START_DEFAULT},
    {4, 2, 75, 90, 16, 16, BOTH(SHARED, 8, 8, CLIP), true, PACKED, RAGGED, .start = START_DEFAULT},
    {3, 1, 150, 140, 16, 16, BOTH(SHARED, 9, 9, CLIP), false, PACKED, RAGGED, .start = -20,
     .gap = 5},
    {1, 4, 100, 100, 32, 32, BOTH(SHARED, 16, 16, CLIP), true, ROWS_FIRST, .start = START_DEFAULT},
    {1, 4, 66, 66, 32, 32, BOTH(SHARED, 6, 6, CLIP), .start = START_DEFAULT, .scale = -0.25},
    {1, 1, 200, 200, 8, 8, BOTH(SHARED, 6, 6, CLIP), .start = START_DEFAULT, .scale = 9},
    /* chunks of 512 keys and 1024 queries: only with many heads */
    {4, 4, 33, 511, 3, 2, BOTH(SHARED, 20, 20, CLIP), .start = 240},
    {4, 4, 33, 512, 2, 3, BOTH(SHARED, 20, 20, CLIP), .start = 495},
    {4, 4, 33, 513, 3, 3, BOTH(PER_HEAD, 20, 20, CLIP), true, .start = START_DEFAULT},
    {4, 4, 513, 1025, 2, 2, BOTH(SHARED, 20, 20, CLIP), true, .start = START_DEFAULT},
    {4, 4, 1023, 70, 2, 3, BOTH(SHARED, 20, 20, CLIP), true, .start = -400},
    {4, 4, 1025, 70, 3, 2, BOTH(SHARED, 20, 20, CLIP), .start = 0},
    {4, 4, 1025, 600, 2, 2, BOTH(SHARED, 30, 700, CLIP), .start = -10},
    {1, 16, 1300, 1100, 2, 1, BOTH(SHARED, 16, 16, CLIP), false, PACKED, .start = START_DEFAULT,
     .gap = 1},
    /* chunks of some size between, and many phases */
    {1, 1, 1025, 1023, 4, 5, BOTH(SHARED, 16, 16, CLIP), true, .start = START_DEFAULT},
    {1, 1, 1023, 1025, 5, 4, BOTH(SHARED, 100, 100, NONE), .start = START_DEFAULT},
    {1, 1, 1100, 200, 4, 4, BOTH(SHARED, 16, 16, CLIP), .start = 0},
    {1, 1, 200, 1100, 4, 4, BOTH(SHARED, 16, 16, CLIP), true, .start = START_DEFAULT},
};

static int64_t pick(const int64_t *from, size_t count) { return from[draw() % count]; }
#define PICK(...)                                                                                  \
  pick((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

static band random_band(int64_t rows) {
  const int64_t wide_band = 2 * rows, left = PICK(0, 1, 2, 3, 7, 16, 31, 64, rows, wide_band);
  return (band){.table = (int)PICK(ABSENT, SHARED, SHARED, PER_HEAD),
                .left = left,
                .right = draw() % 2 ? left : PICK(0, 1, 2, 5, 16, 33, rows),
                .beyond = (int)PICK(CLIP, CLIP, NONE)};
}

static shape random_shape(void) {
  shape s = {.B = PICK(1, 1, 2, 4),
             .H = PICK(1, 1, 2, 3),
             .N = PICK(1, 2, 5, 6, 7, 31, 63, 64, 65, 95, 97, 127, 129, 150, 193),
             .D = PICK(1, 3, 4, 8, 15, 16, 17, 24, 40),
             .Dv = PICK(1, 2, 4, 9, 16, 31, 32, 33, 65)};
  s.M = draw() % 2 ? s.N : PICK(1, 2, 63, 64, 65, 97, 128, 131, 200);
  s.key = random_band(s.N);
  s.value = random_band(s.M);
  s.causal = draw() % 2;
  s.layout = (int)PICK(HEADS_FIRST, HEADS_FIRST, ROWS_FIRST, PACKED);
  s.lengths = (int)PICK(FULL, RAGGED);
  s.start = draw() % 2 ? START_DEFAULT : PICK(-70, -5, 0, 3, 40, 300);
  s.gap = PICK(0, 0, 0, 1, 16);
  return s;
}

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

static array table_create(const shape *s, const band *b, int64_t width, bool output) {
  const int64_t tables = b->table == PER_HEAD ? s->H : b->table == SHARED ? 1 : 0;
  const int64_t wide_row = width + s->gap, rows = b->left + b->right + 1;
  array x = array_create(tables * rows * wide_row, output, output ? CANARY : (real)NAN);
  x.head = b->table == PER_HEAD ? rows * wide_row : 0;
  x.row = wide_row;
  for (int64_t i = 0; i < tables * rows; i++) {
    for (int64_t c = 0; c < width; c++) {
      const int64_t at = i * wide_row + c;
      x.data[at] = number(); /* of a gradient: what was there before */
      if (output) {
        x.expected[BEFORE + at] = x.data[at];
        x.size[BEFORE + at] = fabs((double)x.data[at]);
      }
    }
  }
  return x;
}

static int64_t at(const array *x, int64_t b, int64_t h, int64_t row) {
  return BEFORE + b * x->batch + h * x->head + row * x->row;
}

/* ---- a case ------------------------------------------------------------------ */

typedef struct sequence {
  int64_t b, queries, keys, query_row, key_row, start;
} sequence;

typedef struct attention_case {
  shape s;
  int64_t lengths[MOST_B], key_lengths[MOST_B], starts[MOST_B];
  int64_t offsets[MOST_B + 1], key_offsets[MOST_B + 1];
  array q, k, v, dout, key_table, value_table;          /* inputs */
  array out, lse, dq, dk, dv, dkey_table, dvalue_table; /* outputs */
  double terms;
} attention_case;

enum { OUTPUTS = 7 };
static array *output_of(attention_case *c, int i) {
  return (array *const[]){&c->out, &c->lse,        &c->dq,          &c->dk,
                          &c->dv,  &c->dkey_table, &c->dvalue_table}[i];
}
static const char *const output_names[OUTPUTS] = {
    "out", "lse", "q's gradient", "k's", "v's", "the key table's", "the value table's"};

static sequence sequence_at(const attention_case *c, int64_t b) {
  const bool packed = c->s.layout == PACKED;
  const int64_t queries = c->lengths[b], keys = c->key_lengths[b];
  return (sequence){.b = packed ? 0 : b,
                    .queries = queries,
                    .keys = keys,
                    .query_row = packed ? c->offsets[b] : 0,
                    .key_row = packed ? c->key_offsets[b] : 0,
                    .start = c->s.start == START_DEFAULT ? keys - queries : c->starts[b]};
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

/* ---- the formulas ------------------------------------------------------------ */

static wide plus(wide a, wide b) { return a + b; }
static wide size_of(wide a) { return a < 0 ? -a : a; }

typedef struct dotted {
  wide value, size;
} dotted;

static dotted dot(const real *x, const real *y, int64_t width) {
  dotted d = {0, 0};
  for (int64_t c = 0; x && y && c < width; c++) {
    d.value += (wide)x[c] * y[c];
    d.size += size_of((wide)x[c] * y[c]);
  }
  return d;
}

/* The row of a relation's table for a distance; NULL: there is none. */
static const real *relation(const array *table, const band *b, int64_t h, int64_t distance) {
  if (b->table == ABSENT) return NULL;
  if (b->beyond == NONE && (distance < -b->left || distance > b->right)) return NULL;
  const int64_t clipped = distance < -b->left   ? -b->left
                          : distance > b->right ? b->right
                                                : distance;
  return table->memory + at(table, 0, h, clipped + b->left);
}

/* Row 0, which kernels subtract from the others: it adds to the sizes. */
static const real *first_row(const array *table, const band *b, int64_t h) {
  return b->table == ABSENT || b->beyond == NONE ? NULL : table->memory + at(table, 0, h, 0);
}

static wide element(const real *x, int64_t i) { return x ? (wide)x[i] : 0; }

static void add(array *x, int64_t place, wide value, wide size) {
  x->expected[place] += value;
  x->size[place] += size;
}

typedef struct pair_of {
  wide score, size; /* then: the weight, and its size relative to it */
  const real *key_row, *value_row;
} pair_of;

/* One query: (1) to (9) of attention.h. */
static void expect_query(attention_case *c, const sequence *seq, int64_t h, int64_t i,
                         pair_of *pairs) {
  const shape *const s = &c->s;
  const wide scale = s->scale != 0 ? (wide)s->scale : 1 / (wide)sqrt((double)s->D);
  const int64_t row = seq->query_row + i, position = i + seq->start;
  const real *const q = c->q.memory + at(&c->q, seq->b, h, row);
  const real *const dz = c->dout.memory + at(&c->dout, seq->b, h, row);
  const int64_t out = at(&c->out, seq->b, h, row), dq = at(&c->dq, seq->b, h, row);
  const int64_t lse = at(&c->lse, seq->b, h, row);
  const real *const key0 = first_row(&c->key_table, &s->key, h);
  const real *const value0 = first_row(&c->value_table, &s->value, h);
  const int64_t seen = !s->causal                 ? seq->keys
                       : position + 1 < 0         ? 0
                       : position + 1 < seq->keys ? position + 1
                                                  : seq->keys;
  for (int64_t d = 0; d < s->Dv; d++) c->out.expected[out + d] = 0;
  for (int64_t d = 0; d < s->D; d++) c->dq.expected[dq + d] = 0;
  c->lse.expected[lse] = (wide)-INFINITY;
  if (seen == 0) return;

  wide most = (wide)-INFINITY, sum = 0, sum_size = 0, delta = 0, delta_size = 0;
  for (int64_t j = 0; j < seen; j++) {
    pair_of *const p = &pairs[j];
    p->key_row = relation(&c->key_table, &s->key, h, j - position);
    p->value_row = relation(&c->value_table, &s->value, h, j - position);
    const dotted plain = dot(q, c->k.memory + at(&c->k, seq->b, h, seq->key_row + j), s->D);
    const dotted term = dot(q, p->key_row, s->D);
    p->score = scale * plus(plain.value, term.value);
    p->size = size_of(scale) * (plain.size + term.size + dot(q, key0, s->D).size);
    most = p->score > most ? p->score : most;
  }
  for (int64_t j = 0; j < seen; j++) sum += EXP(pairs[j].score - most);
  for (int64_t j = 0; j < seen; j++) { /* score -> weight (2) */
    pairs[j].score = EXP(pairs[j].score - most) / sum;
    sum_size += pairs[j].score * pairs[j].size;
  }
  c->lse.expected[lse] = most + LOG(sum);
  c->lse.size[lse] = 1 + size_of(c->lse.expected[lse]) + sum_size;

  for (int64_t j = 0; j < seen; j++) { /* (3) */
    pair_of *const p = &pairs[j];
    const real *const v = c->v.memory + at(&c->v, seq->b, h, seq->key_row + j);
    p->size += 1 + sum_size;
    for (int64_t d = 0; d < s->Dv; d++) {
      const wide w = element(p->value_row, d), size = size_of(v[d]) + size_of(w);
      add(&c->out, out + d, p->score * (v[d] + w),
          p->score * p->size * (size + size_of(element(value0, d))));
    }
  }
  for (int64_t d = 0; d < s->Dv; d++) {
    delta += dz[d] * c->out.expected[out + d];
    delta_size += size_of(dz[d]) * c->out.size[out + d];
  }
  for (int64_t j = 0; j < seen; j++) {
    const pair_of *const p = &pairs[j];
    const real *const k = c->k.memory + at(&c->k, seq->b, h, seq->key_row + j);
    const real *const v = c->v.memory + at(&c->v, seq->b, h, seq->key_row + j);
    const int64_t dk = at(&c->dk, seq->b, h, seq->key_row + j);
    const int64_t dv = at(&c->dv, seq->b, h, seq->key_row + j);
    const dotted plain = dot(dz, v, s->Dv), term = dot(dz, p->value_row, s->Dv);
    const wide dp = plain.value + term.value; /* (4) */
    const wide dp_size = plain.size + term.size + dot(dz, value0, s->Dv).size;
    const wide ds = p->score * (dp - delta); /* (5) */
    const wide ds_size = p->score * (p->size * size_of(dp - delta) + dp_size + delta_size);
    for (int64_t d = 0; d < s->D; d++) { /* (7), (8) */
      const wide w = element(p->key_row, d);
      const wide kw = size_of(k[d]) + size_of(w) + size_of(element(key0, d));
      add(&c->dq, dq + d, scale * ds * (k[d] + w), size_of(scale) * ds_size * kw);
      const wide by_q = scale * ds * q[d], by_q_size = size_of(scale) * ds_size * size_of(q[d]);
      add(&c->dk, dk + d, by_q, by_q_size);
      if (p->key_row) {
        add(&c->dkey_table, p->key_row - c->key_table.memory + d, by_q, by_q_size);
      }
    }
    for (int64_t d = 0; d < s->Dv; d++) { /* (9) */
      const wide by_dz = p->score * dz[d], by_dz_size = p->score * p->size * size_of(dz[d]);
      add(&c->dv, dv + d, by_dz, by_dz_size);
      if (p->value_row) {
        array *const to = s->tied ? &c->dkey_table : &c->dvalue_table;
        add(to, p->value_row - c->value_table.memory + d, by_dz, by_dz_size);
      }
    }
  }
}

static void expect_all(attention_case *c) {
  const shape *const s = &c->s;
  pair_of *const pairs = memory_of(s->M, sizeof *pairs);
  expect_padding(c, &c->out, false, s->Dv, 0);
  expect_padding(c, &c->lse, false, 1, (wide)-INFINITY);
  expect_padding(c, &c->dq, false, s->D, 0);
  expect_padding(c, &c->dk, true, s->D, 0);
  expect_padding(c, &c->dv, true, s->Dv, 0);
  for (int64_t b = 0; b < s->B; b++) {
    const sequence seq = sequence_at(c, b);
    for (int64_t h = 0; h < s->H; h++) {
      for (int64_t j = 0; j < seq.keys; j++) {
        const int64_t row = seq.key_row + j;
        for (int64_t d = 0; d < s->D; d++) c->dk.expected[at(&c->dk, seq.b, h, row) + d] = 0;
        for (int64_t d = 0; d < s->Dv; d++) c->dv.expected[at(&c->dv, seq.b, h, row) + d] = 0;
      }
      for (int64_t i = 0; i < seq.queries; i++) expect_query(c, &seq, h, i, pairs);
    }
  }
  free(pairs);
}

static attention_case case_create(const shape *given) {
  attention_case c = {.s = *given};
  const shape *const s = &c.s;
  for (int64_t b = 0; b < s->B; b++) {
    const bool ragged = s->lengths == RAGGED;
    c.lengths[b] = ragged ? s->N * (s->B - b) / s->B - (b == 3 ? s->N / 4 : 0) : s->N;
    c.key_lengths[b] = ragged ? s->M * (b + 1) / (s->B + 1) : s->M;
    c.starts[b] = s->start + b;
    c.offsets[b + 1] = c.offsets[b] + c.lengths[b];
    c.key_offsets[b + 1] = c.key_offsets[b] + c.key_lengths[b];
  }
  const int64_t queries = c.offsets[s->B], keys = c.key_offsets[s->B];
  c.terms = (double)(s->B * s->H * s->N + s->M + s->D + s->Dv);
  c.q = rows_create(s, s->N, queries, s->D, false);
  c.k = rows_create(s, s->M, keys, s->D, false);
  c.v = rows_create(s, s->M, keys, s->Dv, false);
  c.dout = rows_create(s, s->N, queries, s->Dv, false);
  fill_rows(&c, &c.q, false, s->D, 2);
  fill_rows(&c, &c.k, true, s->D, 2);
  fill_rows(&c, &c.v, true, s->Dv, 1);
  fill_rows(&c, &c.dout, false, s->Dv, 1);
  c.key_table = table_create(s, &s->key, s->D, false);
  c.value_table = table_create(s, &s->value, s->Dv, false);
  if (s->tied) {
    array_free(&c.value_table);
    c.value_table = c.key_table;
  }
  c.out = rows_create(s, s->N, queries, s->Dv, true);
  shape lse = *s; /* [B, H, N], or [H, tokens] */
  lse.gap = 0;
  if (s->layout == ROWS_FIRST) lse.layout = HEADS_FIRST;
  c.lse = rows_create(&lse, s->N, queries, 1, true);
  if (s->layout == PACKED) {
    c.lse.head = queries;
    c.lse.row = 1;
  }
  c.dq = rows_create(s, s->N, queries, s->D, true);
  c.dk = rows_create(s, s->M, keys, s->D, true);
  c.dv = rows_create(s, s->M, keys, s->Dv, true);
  c.dkey_table = table_create(s, &s->key, s->D, true);
  c.dvalue_table = table_create(s, s->tied ? &(band){0} : &s->value, s->Dv, true);
  expect_all(&c);
  return c;
}

static void case_free(attention_case *c) {
  if (c->s.tied) c->value_table = (array){0};
  array *const inputs[] = {&c->q, &c->k, &c->v, &c->dout, &c->key_table, &c->value_table};
  for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) array_free(inputs[i]);
  for (int i = 0; i < OUTPUTS; i++) array_free(output_of(c, i));
}

/* ---- running it --------------------------------------------------------------- */

static rp_rows rows_of(const array *x) { return (rp_rows){x->data, x->batch, x->head, x->row}; }
static rp_rows_out rows_out(const array *x) {
  return (rp_rows_out){x->data, x->batch, x->head, x->row};
}

static rp_relation relation_of(const band *b, const array *table) {
  return (rp_relation){.table = b->table == ABSENT ? NULL : table->data,
                       .head_stride = table->head,
                       .row_stride = table->row,
                       .left = b->left,
                       .right = b->right,
                       .beyond = b->beyond};
}

static rp_attention describe(const attention_case *c) {
  rp_attention a = rp_attention_default();
  a.B = c->s.B;
  a.H = c->s.H;
  a.N = c->s.N;
  a.M = c->s.M;
  a.D = c->s.D;
  a.Dv = c->s.Dv;
  if (c->s.layout == PACKED) {
    a.offsets = c->offsets;
    a.key_offsets = c->key_offsets;
  } else if (c->s.lengths == RAGGED) {
    a.lengths = c->lengths;
    a.key_lengths = c->key_lengths;
  }
  if (c->s.start != START_DEFAULT) a.query_start = c->starts;
  a.causal = c->s.causal;
  a.scale = c->s.scale;
  a.key = relation_of(&c->s.key, &c->key_table);
  a.value = relation_of(&c->s.value, &c->value_table);
  return a;
}

/* Exactly `bytes`, all NaN, and a margin behind. */
typedef struct workspace {
  unsigned char *memory;
  int64_t bytes;
} workspace;

static workspace workspace_create(int64_t bytes) {
  void *memory = NULL;
  if (posix_memalign(&memory, RPI_ALIGN, (size_t)bytes + BEHIND) != 0) abort();
  memset(memory, 0xFF, (size_t)bytes + BEHIND);
  return (workspace){memory, bytes};
}

static bool workspace_free(workspace *w) {
  bool untouched = true;
  for (int i = 0; i < BEHIND; i++) untouched = untouched && w->memory[w->bytes + i] == 0xFF;
  free(w->memory);
  return untouched;
}

static bool run(const rp_ops *ops, attention_case *c, bool with_tables) {
  const rp_attention a = describe(c);
  int64_t forward = -1, backward = -1;
  if (!CHECK_INT(ops->attention_workspace(&a, &forward, &backward), RP_OK)) return false;
  workspace w = workspace_create(forward);
  const rpi_attention_args args = {.shape = &a,
                                   .q = rows_of(&c->q),
                                   .k = rows_of(&c->k),
                                   .v = rows_of(&c->v),
                                   .out = rows_out(&c->out),
                                   .lse = c->lse.data,
                                   .workspace = w.memory,
                                   .workspace_bytes = w.bytes};
  bool fine = CHECK_INT(ops->attention_forward(&args), RP_OK);
  fine = CHECK(workspace_free(&w)) && fine;
  w = workspace_create(backward);
  const rp_attention_gradients gradients = {.q = rows_out(&c->dq),
                                            .k = rows_out(&c->dk),
                                            .v = rows_out(&c->dv),
                                            .key_table = with_tables ? c->dkey_table.data : NULL,
                                            .value_table = !with_tables ? NULL
                                                           : c->s.tied  ? c->dkey_table.data
                                                                        : c->dvalue_table.data};
  const rpi_attention_backward_args back = {.shape = &a,
                                            .q = args.q,
                                            .k = args.k,
                                            .v = args.v,
                                            .out = rows_of(&c->out),
                                            .dout = rows_of(&c->dout),
                                            .lse = c->lse.data,
                                            .workspace = w.memory,
                                            .workspace_bytes = w.bytes,
                                            .gradients = &gradients};
  fine = CHECK_INT(ops->attention_backward(&back), RP_OK) && fine;
  return CHECK(workspace_free(&w)) && fine;
}

static void say(const rp_ops *ops, const attention_case *c, const char *what, int output) {
  const shape *const s = &c->s;
  printf(
      "\n  %s: %s: %s; B=%d H=%d N=%d M=%d D=%d Dv=%d key {%d, %d, %d, %d} value {%d, %d, %d, "
      "%d} causal=%d layout=%d lengths=%d start=%d gap=%d tied=%d scale=%g",
      ops->name, output_names[output], what, (int)s->B, (int)s->H, (int)s->N, (int)s->M, (int)s->D,
      (int)s->Dv, s->key.table, (int)s->key.left, (int)s->key.right, s->key.beyond, s->value.table,
      (int)s->value.left, (int)s->value.right, s->value.beyond, s->causal, s->layout, s->lengths,
      (int)s->start, (int)s->gap, s->tied, s->scale);
}

static void compare(const rp_ops *ops, const attention_case *c, const array *x, int output) {
  double worst = 0;
  int64_t place = -1;
  for (int64_t i = 0; i < x->all; i++) {
    const wide got = x->memory[i];
    if (got == x->expected[i]) continue;
    const double error = (double)size_of(got - x->expected[i]);
    const double bound =
        x->size[i] > 0 ? 2 * sqrt(c->terms) * (double)(UNIT * x->size[i]) + TINY : 0;
    const double share = error <= bound ? error / bound : INFINITY; /* a NaN is beyond */
    const double measured = isfinite(error) && bound > 0 ? error / bound : share;
    if (measured > worst) {
      worst = measured;
      place = i;
    }
  }
  if (CHECK(worst <= 1)) return;
  char what[160];
  snprintf(what, sizeof what, "at %lld is %.9g, expected %.9g: %.3g of the allowed error",
           (long long)(place - BEFORE), (double)x->memory[place], (double)x->expected[place],
           worst);
  say(ops, c, what, output);
}

/* What stands in the outputs before a run: canaries, and of tables what they hold. */
static void *bits_of(const array *x) {
  void *const copy = memory_of(x->all, sizeof(real));
  memcpy(copy, x->memory, (size_t)x->all * sizeof(real));
  return copy;
}

static void test_shape(const shape *s) {
  static const int threads[] = {1, 2, 3, 8};
  attention_case c = case_create(s);
  void *before[OUTPUTS], *first[OUTPUTS];
  for (int i = 0; i < OUTPUTS; i++) before[i] = bits_of(output_of(&c, i));
  for (int t = 0; table_at(t) != NULL; t++) {
    const rp_ops *const ops = table_at(t);
    for (int n = 0; n < 5; n++) { /* the last without gradients of tables */
      const bool with_tables = n < 4;
      for (int i = 0; i < OUTPUTS; i++) {
        array *const x = output_of(&c, i);
        memcpy(x->memory, before[i], (size_t)x->all * sizeof(real));
      }
      CHECK_INT(rp_set_threads(threads[n % 4]), RP_OK);
      if (!run(ops, &c, with_tables)) say(ops, &c, "failed", 0);
      for (int i = 0; i < OUTPUTS; i++) {
        const array *const x = output_of(&c, i);
        const size_t bytes = (size_t)x->all * sizeof(real);
        if (n == 0) first[i] = bits_of(x);
        if (n == 0 || (!with_tables && i < 5)) {
          compare(ops, &c, x, i);
        } else if (!CHECK(memcmp(x->memory, with_tables ? first[i] : before[i], bytes) == 0)) {
          say(ops, &c, with_tables ? "the number of threads changes bits" : "not wanted", i);
        }
      }
    }
    for (int i = 0; i < OUTPUTS; i++) free(first[i]);
  }
  for (int i = 0; i < OUTPUTS; i++) free(before[i]);
  case_free(&c);
}

/* ---- other promises of a table ------------------------------------------------- */

/* A workspace one byte short is refused, whatever the threads; lse may be NULL. */
static void test_workspace(const rp_ops *ops) {
  const shape s = {2, 2, 70, 70, 9, 9, BOTH(SHARED, 8, 8, CLIP), true, .start = START_DEFAULT};
  attention_case c = case_create(&s);
  const rp_attention a = describe(&c);
  for (int threads = 1; threads <= 8; threads += 7) {
    CHECK_INT(rp_set_threads(threads), RP_OK);
    int64_t forward = -1, backward = -1, alone = -1;
    CHECK_INT(ops->attention_workspace(&a, &forward, &backward), RP_OK);
    CHECK_INT(ops->attention_workspace(&a, &alone, NULL), RP_OK);
    CHECK_INT(alone, forward);
    CHECK_INT(ops->attention_workspace(&a, NULL, &alone), RP_OK);
    CHECK_INT(alone, backward);
    const int64_t most = forward > backward ? forward : backward;
    workspace w = workspace_create(most);
    rpi_attention_args args = {.shape = &a,
                               .q = rows_of(&c.q),
                               .k = rows_of(&c.k),
                               .v = rows_of(&c.v),
                               .out = rows_out(&c.out),
                               .workspace = w.memory,
                               .workspace_bytes = forward - 1};
    CHECK_INT(ops->attention_forward(&args), RP_ERROR_MEMORY);
    CHECK_TEXT(rp_last_error(), "workspace_bytes");
    args.workspace_bytes = forward;
    CHECK_INT(ops->attention_forward(&args), RP_OK); /* without lse */
    compare(ops, &c, &c.out, 0);
    const rp_attention_gradients gradients = {
        .q = rows_out(&c.dq), .k = rows_out(&c.dk), .v = rows_out(&c.dv)};
    const rpi_attention_backward_args back = {.shape = &a,
                                              .q = args.q,
                                              .k = args.k,
                                              .v = args.v,
                                              .out = rows_of(&c.out),
                                              .dout = rows_of(&c.dout),
                                              .lse = c.lse.data,
                                              .workspace = w.memory,
                                              .workspace_bytes = backward - 1,
                                              .gradients = &gradients};
    CHECK_INT(ops->attention_backward(&back), RP_ERROR_MEMORY);
    CHECK_TEXT(rp_last_error(), "workspace_bytes");
    workspace_free(&w);
  }
  case_free(&c);
}

/* Four times the rows, much the same workspace: between 64 and 128 slots of sums. */
static void test_memory_is_bounded(const rp_ops *ops) {
  CHECK_INT(rp_set_threads(2), RP_OK);
  int64_t before[2] = {0, 0};
  for (int64_t n = 1 << 16; n <= 1 << 18; n *= 4) {
    attention_case c = {
        .s = {1, 1, n, n, 64, 64, BOTH(SHARED, 16, 16, CLIP), .start = START_DEFAULT}};
    rp_attention a = describe(&c);
    static const real table[33 * 64];
    a.key.table = a.value.table = table;
    a.key.row_stride = a.value.row_stride = 64;
    int64_t bytes[2] = {-1, -1};
    CHECK_INT(ops->attention_workspace(&a, &bytes[0], &bytes[1]), RP_OK);
    for (int pass = 0; pass < 2; pass++) {
      CHECK(bytes[pass] > 0 && bytes[pass] < 32 << 20);
      if (before[pass] > 0) CHECK(bytes[pass] < before[pass] + before[pass] / 4);
      before[pass] = bytes[pass];
    }
  }
}

/* An infinite score, and NaN in one query: that row is NaN, the others are not. */
static void test_not_finite(const rp_ops *ops) {
  const shape s = {1, 1, 70, 70, 8, 8, BOTH(SHARED, 4, 4, CLIP), .start = START_DEFAULT};
  attention_case c = case_create(&s);
  c.q.data[3 * c.q.row] = (real)NAN;
  c.q.data[64 * c.q.row + 7] = (real)INFINITY;
  CHECK_INT(rp_set_threads(1), RP_OK);
  run(ops, &c, true);
  for (int64_t i = 0; i < s.N; i++) {
    const bool odd = i == 3 || i == 64;
    bool right = true;
    for (int64_t d = 0; d < s.Dv; d++) {
      right = right && (isfinite(c.out.data[i * c.out.row + d]) == 0) == odd;
    }
    if (!CHECK(right)) printf(" (%s, row %d)", ops->name, (int)i);
  }
  case_free(&c);
}

int main(void) {
  const int64_t most = is_small_run() ? 150000 : INT64_MAX;
  const int drawn = is_small_run() ? 40 : 80;
  for (size_t i = 0; i < sizeof corners / sizeof corners[0]; i++) {
    const shape *const s = &corners[i];
    if (s->B * s->H * s->N * s->M <= most) test_shape(s);
  }
  for (int i = 0; i < drawn; i++) {
    const shape s = random_shape();
    test_shape(&s);
  }
  for (int t = 0; table_at(t) != NULL; t++) {
    test_workspace(table_at(t));
    test_memory_is_bounded(table_at(t));
    test_not_finite(table_at(t));
  }
  rp_set_threads(0);
  return check_report();
}
