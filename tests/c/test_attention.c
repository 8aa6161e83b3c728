/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention.c: the attention of every table this machine can run, forward and
 * backward, on key and value terms with bands: the corners of the code, and shapes drawn
 * at random. All other terms and maps are test_attention_terms.c's; how a shape is
 * checked says attention_run.h.
 */
#include "attention_run.h"

#define BAND(t, l, r, b) {.table = (t), .left = (l), .right = (r), .beyond = (b)}
#define BOTH(table, left, right, beyond)                                                           \
  BAND(table, left, right, beyond), BAND(table, left, right, beyond)
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
    {1, 2, 97, 97, 14, 18, BAND(SHARED, 4, 4, CLIP), {0}, .start = START_DEFAULT},
    {1, 2, 96, 97, 14, 18, {0}, BAND(SHARED, 4, 4, CLIP), .start = START_DEFAULT},
    {1, 2, 95, 130, 18, 18, BAND(SHARED, 4, 6, NONE), BAND(PER_HEAD, 30, 2, CLIP),
     .start = START_DEFAULT},
    {1, 2, 98, 98, 18, 18, BOTH(SHARED, 5, 6, CLIP), .start = START_DEFAULT, .tied = true},
    /* rows of more than one vector of words */
    {1, 1, 97, 130, 100, 97, BOTH(SHARED, 3, 3, CLIP), .start = START_DEFAULT},
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
    {1, 1, 80, 90, 8, 8, BAND(SHARED, 2, 80, CLIP), BAND(SHARED, 80, 2, CLIP), .start = -40},
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

static term random_band(int64_t rows) {
  const int64_t wide_band = 2 * rows, left = PICK(0, 1, 2, 3, 7, 16, 31, 64, rows, wide_band);
  return (term){.table = (int)PICK(ABSENT, SHARED, SHARED, PER_HEAD),
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

/* ---- other promises of a table ------------------------------------------------- */

/* A workspace one byte short is refused, whatever the threads; lse may be NULL. */
static void test_workspace(const rp_ops *ops) {
  const shape s = {2, 2, 70, 70, 9, 9, BOTH(SHARED, 8, 8, CLIP), true, .start = START_DEFAULT};
  attention_case c = case_create(&s);
  const rp_attention a = describe(&c);
  for (int threads = 1; threads <= 8; threads += 7) {
    CHECK_INT(rp_set_threads(threads), RP_OK);
    int64_t forward = -1, backward = -1, alone = -1;
    CHECK_INT(ops->attention_workspace(&a, rp_get_threads(), &forward, &backward), RP_OK);
    CHECK_INT(ops->attention_workspace(&a, rp_get_threads(), &alone, NULL), RP_OK);
    CHECK_INT(alone, forward);
    CHECK_INT(ops->attention_workspace(&a, rp_get_threads(), NULL, &alone), RP_OK);
    CHECK_INT(alone, backward);
    const int64_t most = forward > backward ? forward : backward;
    workspace w = workspace_create(most);
    rpi_attention_args args = {.shape = &a,
                               .q = rows_of(&c.q),
                               .k = rows_of(&c.k),
                               .v = rows_of(&c.v),
                               .out = rows_out(&c.out),
                               .workers = rp_get_threads(),
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
                                              .workers = rp_get_threads(),
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
    a.key[0].table = a.value[0].table = table;
    a.key[0].row_stride = a.value[0].row_stride = 64;
    int64_t bytes[2] = {-1, -1};
    CHECK_INT(ops->attention_workspace(&a, rp_get_threads(), &bytes[0], &bytes[1]), RP_OK);
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

#ifndef RP_REAL_IS_DOUBLE
/* A number that has no parts in bf16 (ops/parts.h), in each array: what meets it is multiplied as
 * without tiles, all else as ever. */
static void test_huge(void) {
  for (int huge = HUGE_Q; huge <= HUGE_VALUES; huge++) {
    for (int causal = 0; causal < 2; causal++) {
      shape s = {1, 2, 100, 200, 40, 33, BOTH(SHARED, 5, 6, CLIP), causal, .start = START_DEFAULT};
      s.scale = 0.69314718; /* keys times 1 */
      s.huge = huge;
      test_shape(&s);
      s.H = 16; /* one chunk of queries, which backward takes by tiles too */
      s.N = 200;
      if (!is_small_run()) test_shape(&s);
    }
  }
}

/* Of 256 queries and keys, causal, with a band, scores of several units: enough for maxima that
 * rise and for tiles. */
static attention_case long_case(bool rounded) {
  const shape s = {1,
                   1,
                   256,
                   256,
                   64,
                   64,
                   BOTH(SHARED, 8, 8, CLIP),
                   true,
                   .start = START_DEFAULT,
                   .scale = 0.75};
  state = 1; /* the same numbers every time */
  attention_case c = case_create(&s);
  c.rounded = rounded;
  return c;
}

/* Backward knows the probabilities that forward had: over the keys they add up to 1, but for what
 * rounding takes of each. dz_i is 1 in column i mod 64 alone. */
static void test_both_ways_know_the_same_scores(const rp_ops *ops) {
  for (int rounded = 0; rounded < 2; rounded++) {
    attention_case c = long_case(rounded);
    const shape *const s = &c.s;
    for (int64_t i = 0; i < s->N; i++) {
      for (int64_t d = 0; d < s->Dv; d++) c.dout.data[i * c.dout.row + d] = i % s->Dv == d;
    }
    run(ops, &c, true);
    double worst = 0;
    for (int64_t d = 0; d < s->Dv; d++) {
      double sum = 0;
      for (int64_t j = 0; j < s->M; j++) sum += (double)c.dv.data[j * c.dv.row + d];
      worst = fmax(worst, fabs(sum / (double)(s->N / s->Dv) - 1));
    }
    if (!CHECK(worst <= (rounded ? BF16_UNIT : 0) + 1e-5)) {
      printf("\n  %s: rounded=%d: %g", ops->name, rounded, worst);
    }
    case_free(&c);
  }
}

/* What is infinite in one row reaches no other number in bf16 than in f32. */
static void test_infinity_stays_where_it_is(const rp_ops *ops) {
  for (int where = 0; where < 4; where++) {
    array f32[ACTIVATIONS] = {{0}};
    for (int rounded = 0; rounded < 2; rounded++) {
      attention_case c = long_case(rounded);
      const array *const inputs[] = {&c.q, &c.k, &c.v, &c.dout};
      inputs[where]->data[40 * inputs[where]->row] = (real)INFINITY;
      run(ops, &c, true);
      int64_t wrong = 0, odd = 0;
      for (int i = 0; i < ACTIVATIONS; i++) {
        array *const x = output_of(&c, i);
        for (int64_t n = 0; rounded && n < x->all; n++) {
          odd += !isfinite(x->memory[n]);
          wrong += !isfinite(x->memory[n]) && isfinite(f32[i].memory[n]);
        }
        if (!rounded) { /* kept */
          f32[i] = *x;
          *x = (array){0};
        }
      }
      if (rounded) CHECK(odd > 0);
      if (!CHECK_INT(wrong, 0)) printf("\n  %s: input %d", ops->name, where);
      case_free(&c);
    }
    for (int i = 0; i < ACTIVATIONS; i++) array_free(&f32[i]);
  }
}
#endif

#ifdef TEST_ONLY
/* A number is three parts, six products; rounded it is one. */
static void test_parts(void) {
  int64_t products[2];
  for (int rounded = 0; rounded < 2; rounded++) {
    attention_case c = long_case(rounded);
    const int64_t before = twin_products();
    run(&TEST_ONLY, &c, true);
    products[rounded] = twin_products() - before;
    case_free(&c);
  }
  CHECK(products[1] > 1000);
  CHECK_INT(products[0], 6 * products[1]);
}
#endif

int main(void) {
  const int64_t most = is_small_run() ? 150000 : INT64_MAX;
  const int drawn = is_tiny_run() ? 15 : is_small_run() ? 40 : 80;
  for (size_t i = 0; i < sizeof corners / sizeof corners[0]; i++) {
    const shape *const s = &corners[i];
    if (s->B * s->H * s->N * s->M <= most) test_shape(s);
  }
  for (int i = 0; i < drawn; i++) {
    const shape s = random_shape();
    test_shape(&s);
  }
#ifndef RP_REAL_IS_DOUBLE
  test_huge();
#endif
#ifdef TEST_ONLY
  CHECK(twin_products() > 100000);
#endif
  for (int t = 0; table_at(t) != NULL; t++) {
    test_workspace(table_at(t));
    test_memory_is_bounded(table_at(t));
    test_not_finite(table_at(t));
#ifndef RP_REAL_IS_DOUBLE
    test_both_ways_know_the_same_scores(table_at(t));
    test_infinity_stays_where_it_is(table_at(t));
#endif
  }
#ifdef TEST_ONLY
  test_parts();
#endif
  rp_set_threads(0);
  return check_report();
}
