/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention_maps.c: rp_attention_map against the loops of attention_oracle.h: every map
 * of every head and sequence of a case, hidden pairs exact.
 *
 *   - Around `to`, and between its rows, are canaries; the workspace is all NaN, with a margin
 *     behind that must stay.
 *   - 1, 2, 3 and 8 threads, and rows asked for one by one, give the same bits.
 *   - Every check has a call that fails it; where memory runs out, nothing leaks.
 *
 * The public function runs, so one instruction set at a time: `make isas` goes through all.
 */
#include "attention_run.h"

#include <limits.h>

#define START .start = START_DEFAULT

/* ---- memory that is watched ------------------------------------------------------ */

typedef struct ledger {
  int64_t calls, fail_at, held, bytes; /* bytes: of the largest one */
  bool spoilt;
} ledger;

enum { HEAD = RPI_ALIGN, MARGIN = 64 };

static void *allocate(void *context, size_t bytes) {
  ledger *const l = context;
  if (l->calls++ == l->fail_at) return NULL;
  void *memory = NULL;
  if (posix_memalign(&memory, RPI_ALIGN, HEAD + bytes + MARGIN) != 0) abort();
  memcpy(memory, &bytes, sizeof bytes);
  memset((char *)memory + HEAD, 0xFF, bytes + MARGIN); /* NaN, if it is read */
  l->held++;
  if ((int64_t)bytes > l->bytes) l->bytes = (int64_t)bytes;
  return (char *)memory + HEAD;
}

static void release(void *context, void *memory) {
  ledger *const l = context;
  if (memory == NULL) return;
  unsigned char *const own = memory;
  size_t bytes = 0;
  memcpy(&bytes, own - HEAD, sizeof bytes);
  for (int i = 0; i < MARGIN; i++) l->spoilt = l->spoilt || own[bytes + (size_t)i] != 0xFF;
  l->held--;
  free(own - HEAD);
}

static void watch(ledger *l) {
  static rpi_allocator allocator; /* it must outlive this call */
  allocator = (rpi_allocator){allocate, release, l};
  rpi_set_allocator(&allocator);
}

/* ---- what a map must hold ---------------------------------------------------------- */

static const int whats[] = {RP_SHOW_PROBABILITIES, RP_SHOW_SCORES,  RP_SHOW_CONTENT,
                            RP_SHOW_KEY,           RP_SHOW_KEY + 1, RP_SHOW_QUERY,
                            RP_SHOW_QUERY + 1,     RP_SHOW_BIAS,    RP_SHOW_BIAS + 1};
enum { WHATS = sizeof whats / sizeof whats[0] };

/* One part of the score of a pair that is seen. */
static dotted part_of(const query_of *x, int64_t j, const pair_of *p, int what) {
  const real *const k = key_of(x, j);
  const int64_t D = x->c->s.D;
  const int kind = what / 10 - 1;
  const real one = 1;
  dotted d = {0, 0};
  if (what == RP_SHOW_CONTENT) d = dot(x->q, k, D);
  for (int e = 0; e < p->count; e++) {
    if (what == RP_SHOW_CONTENT || p->relations[e].term != kind * RP_TERMS + what % 10) continue;
    const real *const w = p->relations[e].row;
    for (int64_t c = 0; c < (kind == BIAS ? 1 : D); c++) {
      const wide with = kind == KEY ? biased(x, c) : kind == QUERY ? (wide)k[c] : 1;
      d.value += with * w[c];
      d.size += (kind == KEY ? biased_size(x, c) : size_of(with)) * size_of(w[c]);
    }
  }
  if (kind == KEY) d.size += first_row_size(x->c, KEY, x->h, x->q, D);
  if (kind == KEY && x->bias) d.size += first_row_size(x->c, KEY, x->h, x->bias, D);
  if (kind == QUERY) d.size += first_row_size(x->c, QUERY, x->h, k, D);
  if (kind == BIAS) return (dotted){d.value, d.size + first_row_size(x->c, BIAS, x->h, &one, 1)};
  return (dotted){x->scale * d.value, size_of(x->scale) * d.size};
}

static bool has_term(const attention_case *c, int what) {
  return what < RP_SHOW_KEY ||
         term_of(&c->s, (what / 10 - 1) * RP_TERMS + what % 10)->table != ABSENT;
}

/* Row i of a map: numbers and their sizes. */
static void expect_row(attention_case *c, const query_of *x, int what, pair_of *pairs, wide *to,
                       wide *size) {
  wide sum_size = 0;
  const bool sees = expect_weights(c, x, pairs, &sum_size);
  for (int64_t j = 0; j < x->seq.keys; j++) {
    pair_of *const p = &pairs[j];
    to[j] = what == RP_SHOW_SCORES ? (wide)-INFINITY : 0;
    size[j] = 0;
    if (!p->seen || !sees || !has_term(c, what)) continue;
    dotted d = {p->score, p->score * p->size};
    if (what == RP_SHOW_SCORES) {
      expect_score(x, j, p);
      d = (dotted){p->score, p->size};
    } else if (what != RP_SHOW_PROBABILITIES) {
      d = part_of(x, j, p, what);
    }
    to[j] = d.value;
    size[j] = d.size;
  }
}

/* ---- one map ------------------------------------------------------------------------ */

enum { GAP = 3, BAND = 40 }; /* after each row; before the first and behind the last */

static int64_t map_size(const sequence *seq) { return 2 * BAND + seq->queries * (seq->keys + GAP); }

static void spoil(real *map, int64_t size) {
  for (int64_t i = 0; i < size; i++) map[i] = CANARY;
}

/* Rows row to row + rows - 1, each where it is in a map of all. */
static bool show(const attention_case *c, const sequence *seq, int what, int64_t b, int64_t h,
                 int64_t row, int64_t rows, real *map) {
  const rp_attention a = describe(c);
  const int64_t stride = seq->keys + GAP;
  ledger l = {.fail_at = -1};
  watch(&l);
  const rp_status status = rp_attention_map(&a, rows_of(&c->q), rows_of(&c->k), what, b, h, row,
                                            rows, map + BAND + row * stride, stride);
  rpi_set_allocator(NULL);
  if (CHECK_INT(status, RP_OK) && CHECK(l.held == 0 && !l.spoilt)) return true;
  printf(": %s", rp_last_error());
  return false;
}

/* Every number of a map, and all that is around it. False: some differ. */
static bool is_right(attention_case *c, query_of *x, int what, const real *map, pair_of *pairs,
                     wide *expected, wide *size) {
  const int64_t stride = x->seq.keys + GAP;
  bool right = true;
  for (int64_t i = 0; i < BAND; i++) {
    right = right && map[i] == CANARY && map[map_size(&x->seq) - 1 - i] == CANARY;
  }
  for (x->i = 0; x->i < x->seq.queries; x->i++) {
    x->row = x->seq.query_row + x->i;
    x->q = c->q.memory + at(&c->q, x->seq.b, x->h, x->row);
    expect_row(c, x, what, pairs, expected, size);
    const real *const own = map + BAND + x->i * stride;
    for (int64_t j = 0; j < x->seq.keys; j++) {
      const double error = (double)size_of(own[j] - expected[j]);
      const double bound = 2 * sqrt(c->terms) * (double)(UNIT * size[j]) + TINY;
      const bool near = own[j] == expected[j] || (size[j] > 0 && error <= bound);
      if (!near && right) {
        printf("\n  what=%d b=%d head=%d row=%d key=%d is %.9g, expected %.9g within %.3g", what,
               (int)x->b, (int)x->h, (int)x->i, (int)j, (double)own[j], (double)expected[j], bound);
      }
      right = right && near;
    }
    for (int64_t j = x->seq.keys; j < stride; j++) right = right && own[j] == CANARY;
  }
  return right;
}

/* Rows from here and there, a few together. */
static void check_rows(const attention_case *c, const sequence *seq, int what, int64_t b, int64_t h,
                       const real *whole, real *map) {
  const int64_t size = map_size(seq);
  spoil(map, size);
  for (int64_t row = 0; row < seq->queries;) {
    const int64_t rows = 1 + draw() % 9, left = seq->queries - row;
    show(c, seq, what, b, h, row, rows < left ? rows : left, map);
    row += rows;
  }
  if (!CHECK(memcmp(map, whole, (size_t)size * sizeof(real)) == 0)) {
    printf("\n  what=%d: rows by themselves have other bits than all of them", what);
  }
}

static void test_maps(const shape *s) {
  static const int threads[] = {1, 2, 3, 8};
  attention_case c = case_create(s);
  pair_of *const pairs = memory_of(s->M, sizeof *pairs);
  wide *const expected = memory_of(s->M, sizeof(wide)), *const size = memory_of(s->M, sizeof(wide));
  bool right = true;
  query_of x = {.c = &c, .scale = s->scale != 0 ? (wide)s->scale : 1 / (wide)sqrt((double)s->D)};
  for (x.b = 0; x.b < s->B; x.b++) {
    x.seq = sequence_at(&c, x.b);
    real *const whole = memory_of(map_size(&x.seq), sizeof(real));
    real *const map = memory_of(map_size(&x.seq), sizeof(real));
    for (x.h = 0; x.h < s->H; x.h++) {
      x.bias = s->position_bias ? c.position_bias.data + x.h * c.position_bias.head : NULL;
      for (int w = 0; w < WHATS; w++) {
        for (int n = 0; n < 4; n++) {
          real *const to = n == 0 ? whole : map;
          CHECK_INT(rp_set_threads(threads[n]), RP_OK);
          spoil(to, map_size(&x.seq));
          show(&c, &x.seq, whats[w], x.b, x.h, 0, x.seq.queries, to);
          right = CHECK(n > 0 || is_right(&c, &x, whats[w], to, pairs, expected, size)) && right;
          right = CHECK(memcmp(to, whole, (size_t)map_size(&x.seq) * sizeof(real)) == 0) && right;
        }
        check_rows(&c, &x.seq, whats[w], x.b, x.h, whole, map);
      }
    }
    free(whole);
    free(map);
  }
  if (!right) say(table_at(0), &c, "a map of this case", 0);
  free(pairs);
  free(expected);
  free(size);
  case_free(&c);
}

/* ---- cases --------------------------------------------------------------------------- */

static const term maps[] = {
    {.table = SHARED, .left = 5, .right = 4},
    {.table = PER_HEAD, .left = 150, .right = 130},
    {.table = SHARED, .left = 3, .right = 7, .beyond = NONE},
    {.table = SHARED, .left = 20, .right = 17, .buckets = true, .rows = 9},
    {.table = SHARED, .left = 6, .right = 6, .positions = true},
    {.table = SHARED, .map = RP_MAP_LABEL, .rows = 13, .bytes = 1},
    {.table = PER_HEAD,
     .map = RP_MAP_LABEL,
     .rows = 51,
     .bytes = 2,
     .by_sequence = true,
     .by_head = true},
    {.table = PER_HEAD, .map = RP_MAP_EDGES, .rows = 30},
};
enum { MAPS = sizeof maps / sizeof maps[0] };

static void test_terms(bool small) {
  for (int m = 0; m < MAPS; m += small ? 3 : 1) {
    const term none = {0}, *const other = &maps[(m + 3) % MAPS];
    const shape one = {1,    1, 130, 137, 9, 3, .key = maps[m], .query = *other, .bias2 = maps[m],
                       START};
    shape two = {3,
                 2,
                 40,
                 70,
                 16,
                 5,
                 .key = m % 2 ? none : *other,
                 .key2 = maps[m],
                 .query2 = maps[m],
                 .bias = *other,
                 .value = maps[0],
                 .lengths = RAGGED,
                 START};
    two.layout = m % 3 == 0 ? ROWS_FIRST : m % 3 == 1 ? PACKED : HEADS_FIRST;
    two.causal = m % 2;
    two.gap = m % 4;
    two.softcap = m % 3 ? 0 : 2;
    two.position_bias = m % 2;
    two.mask = m % 4 == 1;
    two.mask_by_head = true;
    two.dropout = 0.5; /* without effect */
    if (!small) test_maps(&one);
    test_maps(&two);
  }
}

static const shape alone[] = {
    {1, 2, 1, 1, 1, 1, START},
    {2, 1, 7, 65, 17, 2, .causal = true, START},
    {1, 1, 65, 64, 8, 8, .causal = true, START}, /* query 0 sees nothing */
    {1, 1, 9, 0, 4, 4, START},
    {2, 1, 0, 9, 4, 4, START},
    {1, 1, 70, 80, 8, 8, .causal = true, .start = -90}, /* nobody does */
    {1, 1, 200, 180, 8, 8, .key = {.table = SHARED, .left = 9, .right = 9}, .window = true,
     .window_left = 20, .window_right = 3, .start = 10},
    {1, 1, 90, 700, 4, 4, .key = {.table = SHARED, .left = 3, .right = 2}, .window = true,
     .window_left = 2, .window_right = -1, .causal = true, .scale = -0.3, START},
    {1, 2, 60, 90, 8, 8, .mask = true, .softcap = 0.3, .scale = 4, START},
};

/* ---- refusals ------------------------------------------------------------------------- */

enum { B = 2, H = 3, N = 5, M = 7, D = 4 };
static real numbers[B * H * M * D], shown[N * M];
static const int8_t labels[N * M] = {[2 * M + 3] = 4};

typedef struct map_of {
  rp_attention a;
  rp_rows q, k;
  int what;
  int64_t b, head, row, rows;
  real *to;
  int64_t to_stride;
} map_of;

static map_of valid(void) {
  map_of m = {.a = rp_attention_default(),
              .q = {numbers, H * N * D, N * D, D},
              .k = {numbers, H * M * D, M * D, D},
              .what = RP_SHOW_SCORES,
              .b = B - 1,
              .head = H - 1,
              .rows = N,
              .to = shown,
              .to_stride = M};
  m.a.B = B, m.a.H = H, m.a.N = N, m.a.M = M, m.a.D = m.a.Dv = D;
  return m;
}

static rp_status call_map(const map_of *m, bool without) {
  return rp_attention_map(without ? NULL : &m->a, m->q, m->k, m->what, m->b, m->head, m->row,
                          m->rows, m->to, m->to_stride);
}

/* Refused, without a number written or memory taken. */
static void refused(const map_of *m, bool without, rp_status status, const char *sentence) {
  ledger l = {.fail_at = -1};
  spoil(shown, N * M);
  watch(&l);
  CHECK_INT(call_map(m, without), status);
  rpi_set_allocator(NULL);
  CHECK_TEXT(rp_last_error(), sentence);
  CHECK_INT(l.calls, 0);
  bool untouched = true;
  for (int i = 0; i < N * M; i++) untouched = untouched && shown[i] == CANARY;
  CHECK(untouched);
}

#define REFUSED(status, sentence, ...)                                                             \
  do {                                                                                             \
    map_of m = valid();                                                                            \
    __VA_ARGS__;                                                                                   \
    refused(&m, false, (status), (sentence));                                                      \
  } while (0)
#define TAKEN(...)                                                                                 \
  do {                                                                                             \
    map_of m = valid();                                                                            \
    __VA_ARGS__;                                                                                   \
    if (!CHECK_INT(call_map(&m, false), RP_OK)) printf(": %s", rp_last_error());                   \
  } while (0)

static void test_refusals(void) {
  const map_of good = valid();
  const int64_t lengths[B] = {N, 2}, key_lengths[B] = {M, 3}, packed[B + 1] = {0, 4, 5};
  refused(&good, true, RP_ERROR_ARGUMENT, "attention: a is NULL");
  REFUSED(RP_ERROR_ARGUMENT, "attention: struct_size=", m.a.struct_size = 8);
  REFUSED(RP_ERROR_SHAPE, "attention: D=0", m.a.D = 0);
  REFUSED(RP_ERROR_ARGUMENT, "attention: softcap=-1", m.a.softcap = -1);
  REFUSED(RP_ERROR_ARGUMENT, "attention: q is NULL", m.q.data = NULL);
  REFUSED(RP_ERROR_ARGUMENT, "attention: k is NULL", m.k.data = NULL);
  REFUSED(RP_ERROR_SHAPE, "attention: q has a stride of -1", m.q.row_stride = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: k: its size overflows", m.k.head_stride = INT64_MAX / 4);
  static const int unknown[] = {-1, -10, 3, 9, 12, 19, 22, 32, 40, 41, INT_MAX, INT_MIN};
  for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
    REFUSED(RP_ERROR_ARGUMENT, "must be RP_SHOW_PROBABILITIES=0, ", m.what = unknown[i]);
  }
  REFUSED(RP_ERROR_ARGUMENT, "attention: what=3,", m.what = 3);
  REFUSED(RP_ERROR_ARGUMENT, "attention: b=2, must be from 0 to 1", m.b = B);
  REFUSED(RP_ERROR_ARGUMENT, "attention: b=-1", m.b = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: B=0 and H=3, must be at least 1", m.b = m.a.B = 0);
  REFUSED(RP_ERROR_ARGUMENT, "attention: head=3, must be from 0 to 2", m.head = H);
  REFUSED(RP_ERROR_ARGUMENT, "attention: head=-1", m.head = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: rows=6 from row=0, but sequence 1 has 5 queries",
          m.rows = N + 1);
  REFUSED(RP_ERROR_SHAPE, "attention: rows=5 from row=1", m.row = 1);
  REFUSED(RP_ERROR_SHAPE, "attention: rows=0 from row=6", m.row = N + 1, m.rows = 0);
  REFUSED(RP_ERROR_SHAPE, "attention: rows=-1", m.rows = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: rows=2 from row=-1", m.row = -1, m.rows = 2);
  REFUSED(RP_ERROR_SHAPE, "from row=1,", m.row = 1, m.rows = INT64_MAX);
  REFUSED(RP_ERROR_SHAPE, "has 2 queries", m.a.lengths = lengths, m.rows = 3);
  REFUSED(RP_ERROR_SHAPE, "has 1 queries", m.a.offsets = packed, m.rows = 2);
  REFUSED(RP_ERROR_ARGUMENT, "attention: to is NULL", m.to = NULL);
  REFUSED(RP_ERROR_SHAPE, "attention: to_stride=6, must be at least the sequence's 7 keys",
          m.to_stride = M - 1);
  REFUSED(RP_ERROR_SHAPE, "attention: to_stride=", m.to_stride = (INT64_C(1) << 40) + 1);
  REFUSED(RP_ERROR_SHAPE, "attention: to: its size overflows", m.q.row_stride = 0,
          m.a.N = m.rows = 1 << 24, m.to_stride = INT64_C(1) << 40);
  REFUSED(RP_ERROR_SHAPE, "at least the sequence's 3 keys", m.a.key_lengths = key_lengths,
          m.to_stride = 2);
  REFUSED(RP_ERROR_ARGUMENT, "attention: to shares memory with q; give it an array of its own",
          m.q.data = m.to);
  REFUSED(RP_ERROR_ARGUMENT, "attention: to shares memory with k",
          m.k.data = m.to + m.rows * M - 1);
  REFUSED(RP_ERROR_ARGUMENT, "attention: to shares memory with key[0].table",
          m.a.key[0] = ((rp_relation){.table = m.to, .row_stride = D}));
  TAKEN(m.a.value[0] = ((rp_relation){.table = m.to, .row_stride = D})); /* which no map reads */
  rp_relation of_labels = {.table = numbers, .row_stride = D, .rows = 4, .map = RP_MAP_LABEL};
  of_labels.labels = labels;
  of_labels.label_bytes = 1;
  of_labels.label_row_stride = M;
  REFUSED(RP_ERROR_ARGUMENT, "key[0]", m.a.key[0] = of_labels); /* label 4 of 4 rows */
  TAKEN(m.a.key[0] = of_labels, m.a.key[0].rows = 5);
  for (int w = 0; w < WHATS; w++) TAKEN(m.what = whats[w]);
  TAKEN(m.row = N, m.rows = 0, m.to = NULL);
  TAKEN(m.a.M = 0, m.to = NULL, m.to_stride = 0, m.k.data = NULL);
  TAKEN(m.a.N = 0, m.rows = 0, m.to = NULL, m.q.data = NULL);
  TAKEN(m.rows = 1, m.to_stride = INT64_C(1) << 40);
  TAKEN(m.a.key_lengths = key_lengths, m.to_stride = 3);
}

/* ---- memory ---------------------------------------------------------------------------- */

static void test_memory_runs_out(void) {
  const map_of m = valid();
  for (int64_t fail_at = 0;; fail_at++) {
    ledger l = {.fail_at = fail_at};
    watch(&l);
    const rp_status status = call_map(&m, false);
    rpi_set_allocator(NULL);
    const bool failed = l.calls > fail_at;
    CHECK_INT(status, failed ? RP_ERROR_MEMORY : RP_OK);
    if (failed) CHECK_TEXT(rp_last_error(), "attention: no memory for a workspace of");
    CHECK(l.held == 0 && !l.spoilt);
    if (!failed) CHECK(l.calls >= 1);
    if (!failed || !CHECK(fail_at < 100)) return;
  }
}

/* The largest block that a map of rows x keys takes. */
static int64_t bytes_for(int64_t rows, int64_t keys) {
  real *const q = memory_of(rows * D, sizeof(real)), *const k = memory_of(keys * D, sizeof(real));
  real *const to = memory_of(rows * keys, sizeof(real));
  memset(q, 0, (size_t)(rows * D) * sizeof(real));
  memset(k, 0, (size_t)(keys * D) * sizeof(real));
  rp_attention a = rp_attention_default();
  a.B = a.H = 1;
  a.N = rows;
  a.M = keys;
  a.D = a.Dv = D;
  a.key[0] = (rp_relation){.table = numbers, .row_stride = D, .left = 3, .right = 3};
  ledger l = {.fail_at = -1};
  watch(&l);
  CHECK_INT(rp_attention_map(&a, (rp_rows){q, 0, 0, D}, (rp_rows){k, 0, 0, D}, RP_SHOW_SCORES, 0, 0,
                             0, rows, to, keys),
            RP_OK);
  rpi_set_allocator(NULL);
  free(q);
  free(k);
  free(to);
  return l.bytes;
}

static void test_memory_is_bounded(void) {
  CHECK_INT(rp_set_threads(2), RP_OK);
  const int64_t rows = bytes_for(64000, 64), keys = bytes_for(64, 64000);
  CHECK(rows > 0 && rows < 2 << 20 && keys > 0 && keys < 2 << 20);
  CHECK(bytes_for(256000, 64) <= rows + rows / 4);
  CHECK(bytes_for(64, 256000) <= keys + keys / 4);
}

int main(void) {
  (void)test_shape; /* attention itself is test_attention_terms.c's */
  const bool small = is_small_run();
  const map_of m = valid();
  if (call_map(&m, false) != RP_OK && strstr(rp_last_error(), "cannot run on this machine")) {
    printf("%s\n", rp_last_error()); /* asked for by RELPOS_ISA: nothing to test */
    return 77;
  }
  test_refusals();
  test_memory_runs_out();
  test_memory_is_bounded();
  test_terms(small);
  for (size_t i = 0; i < sizeof alone / sizeof alone[0]; i++) test_maps(&alone[i]);
  rp_set_threads(0);
  return check_report();
}
