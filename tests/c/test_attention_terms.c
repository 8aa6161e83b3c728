/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention_terms.c: the attention of every table this machine can run with every
 * kind of term and every map, with masks, windows, softcap and dropout: each alone, then
 * drawn at random together. How a shape is checked says attention_run.h.
 */
#include "attention_run.h"

#define START .start = START_DEFAULT

static const term band = {.table = SHARED, .left = 5, .right = 4};
static const term high = {.table = PER_HEAD, .left = 150, .right = 130};
static const term sharp = {.table = SHARED, .left = 3, .right = 7, .beyond = NONE};
static const term bucket = {.table = SHARED, .left = 20, .right = 17, .buckets = true, .rows = 9};
static const term place = {.table = SHARED, .left = 6, .right = 6, .positions = true};
static const term label_1 = {.table = SHARED, .map = RP_MAP_LABEL, .rows = 13, .bytes = 1};
static const term label_2 = {.table = PER_HEAD,
                             .map = RP_MAP_LABEL,
                             .rows = 51,
                             .bytes = 2,
                             .by_sequence = true,
                             .by_head = true};
static const term label_4 = {
    .table = SHARED, .map = RP_MAP_LABEL, .rows = 70, .bytes = 4, .by_sequence = true};
/* Long tables: few rows met by a block, or too many; see ops/lookups.h. */
static const term long_place = {.table = SHARED, .left = 300, .right = 200, .positions = true};
static const term long_bucket = {.table = SHARED,
                                 .left = 300,
                                 .right = 200,
                                 .positions = true,
                                 .buckets = true,
                                 .rows = 270,
                                 .beyond = NONE};
static const term far_place = {
    .table = PER_HEAD, .left = 900, .right = 3000, .positions = true, .far = true};
static const term long_label = {
    .table = SHARED, .map = RP_MAP_LABEL, .rows = 300, .bytes = 2, .by_sequence = true};
static const term many_label = {.table = PER_HEAD, .map = RP_MAP_LABEL, .rows = 9000, .bytes = 4};
static const term few_edges = {.table = SHARED, .map = RP_MAP_EDGES, .rows = 2};
static const term edges = {.table = SHARED, .map = RP_MAP_EDGES, .rows = 7};
static const term edges_of_heads = {.table = PER_HEAD, .map = RP_MAP_EDGES, .rows = 300};

/* Every map, for a walk over all of them. */
static const term *const maps[] = {&band,        &high,           &sharp,      &bucket,
                                   &place,       &label_1,        &label_2,    &label_4,
                                   &edges,       &edges_of_heads, &few_edges,  &long_place,
                                   &long_bucket, &far_place,      &long_label, &many_label};
enum { MAPS = sizeof maps / sizeof maps[0] };

static term *place_of(shape *s, int t) {
  term *const terms[TERMS] = {&s->key,  &s->key2,  &s->query, &s->query2,
                              &s->bias, &s->bias2, &s->value, &s->value2};
  return terms[t];
}

/* One term: every kind with every map, a few tiles and a ragged batch. */
static void test_one_term(int64_t most) {
  for (int kind = 0; kind < 4; kind++) {
    for (int m = 0; m < MAPS; m++) {
      shape s = {.B = 1, .H = 2, .N = 130, .M = 137, .D = 9, .Dv = 12, START};
      *place_of(&s, kind * RP_TERMS) = *maps[m];
      if (s.B * s.H * s.N * s.M <= most) test_shape(&s);
      shape ragged = {.B = 3, .H = 2, .N = 40, .M = 70, .D = 16, .Dv = 5, START};
      ragged.layout = m % 3 == 0 ? ROWS_FIRST : m % 3 == 1 ? PACKED : HEADS_FIRST;
      ragged.lengths = RAGGED;
      ragged.causal = m % 2;
      ragged.gap = m % 4;
      *place_of(&ragged, kind * RP_TERMS + 1) = *maps[m]; /* and the first one absent */
      test_shape(&ragged);
    }
  }
}

static const shape alone[] = {
    {1, 2, 100, 100, 8, 8, .position_bias = true, START}, /* nothing meets it */
    {1, 2, 100, 110, 8, 8, .position_bias = true, .key = {.table = SHARED, .left = 9, .right = 9},
     START},
    {1, 2, 65, 70, 8, 8, .position_bias = true, .gap = 3,
     .key = {.table = PER_HEAD, .left = 90, .right = 90}, .causal = true, START},
    {1, 1, 200, 200, 8, 8, .window = true, .window_left = 10, .window_right = -1, START},
    {1, 1, 200, 200, 8, 8, .window = true, .window_left = -1, .window_right = 0, START},
    {1, 1, 200, 200, 8, 8, .window = true, .window_left = 0, .window_right = 0, START},
    {1, 1, 300, 280, 8, 8, .window = true, .window_left = 64, .window_right = 5, .start = 40,
     .key = {.table = SHARED, .left = 9, .right = 70}},
    {2, 1, 90, 200, 8, 8, .window = true, .window_left = 3, .window_right = 100, .causal = true,
     .layout = PACKED, .lengths = RAGGED, START},
    {1, 1, 90, 90, 8, 8, .window = true, .window_left = 3, .window_right = 2, .start = 500},
    {1, 2, 80, 90, 8, 8, .mask = true, START},
    {2, 2, 80, 90, 8, 8, .mask = true, .mask_by_head = true, .causal = true, .lengths = RAGGED,
     START},
    {3, 2, 80, 90, 8, 8, .mask = true, .mask_by_head = true, .layout = PACKED, .lengths = RAGGED,
     START},
    {1, 2, 80, 90, 8, 8, .softcap = 2, START},
    {1, 2, 80, 90, 8, 8, .softcap = 0.3, .scale = 4, .key = {.table = SHARED, .left = 2}, START},
    {1, 2, 80, 90, 8, 8, .softcap = 50, .scale = 0.01, START},
    {1, 2, 80, 150, 8, 8, .dropout = 0.1, START},
    {2, 3, 80, 150, 8, 8, .dropout = 0.9, .causal = true, .layout = PACKED, .lengths = RAGGED,
     .value = {.table = SHARED, .left = 4, .right = 4}, START},
    {3, 2, 80, 150, 8, 8, .dropout = 0.4, .ordinals = true, .lengths = RAGGED, START},
    {1, 1, 80, 150, 8, 8, .dropout = 0.001, START}, /* nothing is dropped */
    /* one vector of a query term for all pairs: queries are moved by it */
    {2, 2, 130, 140, 40, 33, .query = {.table = PER_HEAD}, START},
    {1, 2, 130, 140, 17, 9, .query = {.table = SHARED}, .query2 = {.table = PER_HEAD},
     .key = {.table = PER_HEAD, .left = 600, .right = 600}, .position_bias = true, START},
    {3, 2, 90, 70, 40, 16, .query2 = {.table = PER_HEAD}, .causal = true, .layout = PACKED,
     .lengths = RAGGED, .gap = 3, .value = {.table = SHARED, .left = 4, .right = 4}, START},
    {1, 1, 100, 150, 16, 16, .query = {.table = SHARED}, .softcap = 2, .dropout = 0.3, .mask = true,
     .bias = {.table = SHARED, .left = 3, .right = 200}, START},
    /* the same beside what is not one vector, or is looked up */
    {1, 2, 100, 90, 16, 8, .query = {.table = SHARED}, .query2 = {.table = SHARED, .left = 1},
     START},
    {1, 2, 100, 90, 16, 8, .query = {.table = SHARED},
     .key = {.table = SHARED, .map = RP_MAP_EDGES, .rows = 2}, START},
    {1, 2, 100, 90, 16, 8, .query = {.table = SHARED, .beyond = NONE}, START},
    /* windows that begin within those of their chunk */
    {1, 1, 500, 530, 24, 20, .key = {.table = SHARED, .left = 700, .right = 700},
     .value = {.table = SHARED, .left = 800, .right = 90}, START},
    {1, 2, 400, 420, 16, 16, .key = {.table = PER_HEAD, .left = 150, .right = 130, .beyond = NONE},
     .value = {.table = SHARED, .left = 33, .right = 250}, .causal = true, START},
    {1, 1, 420, 300, 16, 16, .window = true, .window_left = 100, .window_right = 90,
     .key = {.table = SHARED, .left = 500, .right = 80}, .value = {.table = SHARED, .left = 40},
     START},
    /* windows that most pairs of chunks lie beyond: those have nothing to do (attention_plan.h) */
    {1, 1, 1100, 1090, 8, 8, .window = true, .window_left = 30, .window_right = 3,
     .key = {.table = SHARED, .left = 1100, .right = 1100}, .query = {.table = SHARED, .left = 9},
     .bias = {.table = SHARED, .left = 5, .right = 5}, .value = {.table = SHARED, .right = 900},
     START},
    {2, 1, 1000, 300, 8, 8, .window = true, .window_left = 70, .window_right = 0, .start = -200,
     .key = {.table = SHARED, .left = 20, .right = 20}, .position_bias = true, .lengths = RAGGED},
    {1, 1, 200, 1000, 8, 8, .window = true, .window_left = 3, .window_right = 40, .start = 600,
     .value = {.table = SHARED, .left = 900, .right = 900}},
    /* with many heads chunks of more than a block: the last begins some strips further on */
    {2, 8, 230, 240, 9, 12, .key = {.table = SHARED, .left = 500, .right = 480},
     .value = {.table = SHARED, .left = 490, .right = 200}, .position_bias = true, START},
    {4, 4, 220, 200, 17, 9, .key = {.table = SHARED, .left = 300, .right = 300, .beyond = NONE},
     .value = {.table = SHARED, .left = 300, .right = 30, .beyond = NONE}, .causal = true, START},
};

static term random_term(int64_t rows) {
  static const int bytes[] = {1, 2, 4};
  term t = {.table = (int)PICK(ABSENT, SHARED, PER_HEAD),
            .left = PICK(0, 1, 2, 3, 7, 16, 31, 64, rows, 500),
            .right = PICK(0, 1, 2, 5, 16, 33, rows),
            .beyond = (int)PICK(CLIP, CLIP, NONE),
            .map = (int)PICK(RP_MAP_BAND, RP_MAP_BAND, RP_MAP_LABEL, RP_MAP_EDGES),
            .rows = PICK(1, 2, 5, 16, 51, 64, 300, 4000),
            .buckets = draw() % 3 == 0,
            .positions = draw() % 3 == 0,
            .far = draw() % 3 == 0,
            .bytes = bytes[draw() % 3],
            .by_sequence = draw() % 2,
            .by_head = draw() % 2};
  if (t.bytes == 1 && t.rows > 127) t.bytes = 2;
  return t;
}

static shape random_shape(void) {
  shape s = {.B = PICK(1, 1, 2, 4),
             .H = PICK(1, 1, 2, 3),
             .N = PICK(1, 2, 5, 6, 7, 31, 63, 64, 65, 95, 97, 129, 150),
             .D = PICK(1, 3, 4, 8, 15, 16, 17, 24, 40),
             .Dv = PICK(1, 2, 4, 9, 16, 31, 32, 33)};
  s.M = draw() % 2 ? s.N : PICK(1, 2, 63, 64, 65, 97, 128, 131);
  for (int t = 0; t < TERMS; t++) {
    if (draw() % 3 == 0) *place_of(&s, t) = random_term(s.M);
  }
  s.causal = draw() % 2;
  s.layout = (int)PICK(HEADS_FIRST, HEADS_FIRST, ROWS_FIRST, PACKED);
  s.lengths = (int)PICK(FULL, RAGGED);
  s.start = draw() % 2 ? START_DEFAULT : PICK(-70, -5, 0, 3, 40);
  s.gap = PICK(0, 0, 0, 1, 16);
  s.position_bias = draw() % 4 == 0;
  s.window = draw() % 4 == 0;
  s.window_left = PICK(-1, 0, 3, 20, 64, 100);
  s.window_right = PICK(-1, 0, 2, 33);
  s.mask = draw() % 4 == 0;
  s.mask_by_head = draw() % 2;
  if (draw() % 4 == 0) s.softcap = draw() % 2 ? 3 : 20;
  if (draw() % 4 == 0) s.dropout = draw() % 2 ? 0.1 : 0.5;
  s.ordinals = draw() % 2;
  return s;
}

int main(void) {
  const int64_t most = is_small_run() ? 20000 : INT64_MAX;
  const int drawn = is_tiny_run() ? 15 : is_small_run() ? 40 : 150;
  test_one_term(most);
  for (size_t i = 0; i < sizeof alone / sizeof alone[0]; i++) test_shape(&alone[i]);
  for (int i = 0; i < drawn; i++) {
    const shape s = random_shape();
    test_shape(&s);
  }
  rp_set_threads(0);
  return check_report();
}
