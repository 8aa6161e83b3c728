/* SPDX-License-Identifier: Apache-2.0
 *
 * test_api_relation.c: api_relation.c. Every check of a term, a map or the mask has a call
 * that fails it, with a sentence that names the place; what lies outside the rows in use
 * may be anything.
 */
#include "call.h"

#include <stdlib.h>

static rp_real query_table[H * T * D], bias_table[H * T];

/* What a look at all labels or edges tells: forward and backward refuse it. */
static void content_refused(const rp_attention *a, const char *sentence) {
  call c = valid();
  c.a = *a;
  CHECK_INT(forward(&c), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), sentence);
  CHECK_INT(backward(&c), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), sentence);
}

#define CONTENT_REFUSED(sentence, ...)                                                             \
  do {                                                                                             \
    rp_attention a = valid().a;                                                                    \
    __VA_ARGS__;                                                                                   \
    content_refused(&a, (sentence));                                                               \
  } while (0)

/* ---- tables and bands -------------------------------------------------------------- */

static void test_tables(void) {
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].map=3, must be RP_MAP_BAND", a.key[0].map = 3);
  REFUSED(RP_ERROR_ARGUMENT, "attention: value[0].map=-1", a.value[0].map = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].row_stride=3, must be at least the row's width 4",
          a.key[0].row_stride = D - 1);
  REFUSED(RP_ERROR_SHAPE, "attention: value[0].row_stride=5, must be at least the row's width 6",
          a.value[0].row_stride = DV - 1);
  REFUSED(RP_ERROR_SHAPE, "attention: query[1].row_stride=3, must be at least the row's width 4",
          a.query[1].table = query_table, a.query[1].row_stride = D - 1);
  REFUSED(RP_ERROR_SHAPE, "attention: bias[1].row_stride=0, must be at least the row's width 1",
          a.bias[1].table = bias_table);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].row_stride=", a.key[0].row_stride = BEYOND);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0]: ", a.key[0].left = BEYOND - 1,
          a.key[0].row_stride = INT64_C(1) << 30);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].head_stride=15", a.key[0].head_stride = T * D - 1);
  REFUSED(RP_ERROR_SHAPE, "attention: value[0].head_stride=-1", a.value[0].head_stride = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].head_stride=", a.key[0].head_stride = HUGE_STRIDE);
  /* Without a table nothing else of a term is looked at, and there is no gradient. */
  call c = valid();
  c.a.key[0] = (rp_relation){NULL, .head_stride = -1, .left = -1, .beyond = 77, .map = 9};
  c.g.key[0] = c.g.bias[1] = c.g.position_bias = (rp_real *)16;
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
  /* The last row of a table may end with its width. */
  TAKEN(a.value[0].row_stride = DV + 1, a.value[0].left = a.value[0].right = 1, a.value[0].rows = 3,
        a.value[0].head_stride = 2 * (DV + 1) + DV);
}

static void test_bands(void) {
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].left=-1", a.key[0].left = -1);
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].left=", a.key[0].left = BEYOND);
  REFUSED(RP_ERROR_ARGUMENT, "right=-1", a.key[0].right = -1);
  REFUSED(RP_ERROR_ARGUMENT, "attention: value[0].left=", a.value[0].right = BEYOND);
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].beyond=2", a.key[0].beyond = 2);
  REFUSED(RP_ERROR_ARGUMENT, "attention: value[0].beyond=-1", a.value[0].beyond = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].rows=5, must be left + 1 + right = 4",
          a.key[0].rows = 5);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].rows=-1", a.key[0].rows = -1);
  TAKEN(a.key[0].rows = T);
  TAKEN(a.key[0].rows = 0);
}

static void test_buckets(void) {
  static const int32_t good[] = {-1, 0, 3, 3, 1, 0}, low[] = {0, 0, -2, 0, 0, 0},
                       high[] = {0, 1, 2, 3, 3, 4};
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].rows=0, must be from 1 to 2^40",
          a.key[0].buckets = good);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].rows=", a.key[0].buckets = good,
          a.key[0].rows = BEYOND);
  REFUSED(RP_ERROR_ARGUMENT,
          "attention: key[0].buckets[2]=-2, must be from -1 (none) to rows - 1 = 3",
          a.key[0].buckets = low, a.key[0].rows = T);
  REFUSED(RP_ERROR_ARGUMENT, "attention: value[0].buckets[5]=4", a.value[0].buckets = high,
          a.value[0].left = 5, a.value[0].right = 0);
  TAKEN(a.key[0].buckets = good, a.key[0].rows = T, a.key[0].left = 5, a.key[0].right = 0);
  TAKEN(a.key[0].buckets = high, a.key[0].rows = T); /* the last two are beyond the band */
}

static void test_positions(void) {
  static int32_t queries[B * (N + 1)], keys[B * M];
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].query_positions is NULL, but key_positions",
          a.key[0].key_positions = keys);
  REFUSED(RP_ERROR_ARGUMENT, "attention: value[0].key_positions is NULL, but query_positions",
          a.value[0].query_positions = queries);
#define POSITIONS                                                                                  \
  a.key[0].query_positions = queries, a.key[0].key_positions = keys,                               \
  a.key[0].query_position_stride = N + 1, a.key[0].key_position_stride = M
  TAKEN(POSITIONS);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].query_positions has a stride of -1", POSITIONS,
          a.key[0].query_position_stride = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].key_positions: its size overflows", POSITIONS,
          a.key[0].key_position_stride = HUGE_STRIDE);
  queries[N + 1 + 3] = 1 << 30;
  REFUSED(RP_ERROR_ARGUMENT,
          "attention: key[0].query_positions=1073741824 at row 3 of sequence 1, must be below 2^30",
          POSITIONS);
  TAKEN(POSITIONS, a.key[0].query_position_stride = 0);
  const int64_t lengths[B] = {5, 3}; /* not in use: not looked at */
  TAKEN(POSITIONS, a.lengths = lengths);
  queries[N + 1 + 3] = 1;
  queries[N] = INT32_MIN; /* between two rows */
  TAKEN(POSITIONS);
  keys[0] = INT32_MIN;
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].key_positions=-2147483648 at row 0 of sequence 0",
          POSITIONS);
  keys[0] = (1 << 30) - 1;
  TAKEN(POSITIONS);
  const int64_t packed[B + 1] = {0, 2, 5};
  queries[N] = 0;
  queries[4] = -(1 << 30);
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].query_positions=-1073741824 at row 2 of sequence 1",
          POSITIONS, a.offsets = packed, a.key[0].key_position_stride = -9);
  queries[4] = 0;
  queries[5] = INT32_MIN; /* behind the last token */
  TAKEN(POSITIONS, a.offsets = packed);
}

/* ---- masks ------------------------------------------------------------------------- */

static uint8_t mask[B * H * N * M];

static void set_mask(rp_attention *a) { a->mask = (rp_mask){mask, H * N * M, N * M, M, NULL}; }

static void test_masks(void) {
  const int64_t starts[B] = {0, N * M}, low[B] = {0, -1}, high[B] = {BEYOND, 0};
  for (int i = 0; i < B * H * N * M; i++) mask[i] = (uint8_t)(i % 3 != 0);
  TAKEN(set_mask(&a));
  TAKEN(set_mask(&a), a.mask.batch_stride = a.mask.head_stride = a.mask.row_stride = 0);
  TAKEN(a.mask = (rp_mask){NULL, -1, -1, -1, low});
  REFUSED(RP_ERROR_SHAPE, "attention: mask has a stride of -1", set_mask(&a),
          a.mask.batch_stride = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: mask has a stride of -2", set_mask(&a),
          a.mask.head_stride = -2);
  REFUSED(RP_ERROR_SHAPE, "attention: mask has a stride of -7", set_mask(&a),
          a.mask.row_stride = -M);
  REFUSED(RP_ERROR_SHAPE, "attention: mask: its size overflows", set_mask(&a),
          a.mask.row_stride = HUGE_STRIDE);
  REFUSED(RP_ERROR_SHAPE, "attention: mask: start -1 of sequence 1", set_mask(&a),
          a.mask.starts = low);
  REFUSED(RP_ERROR_SHAPE, "attention: mask: start 1099511627777 of sequence 0", set_mask(&a),
          a.mask.starts = high);
  TAKEN(set_mask(&a), a.mask.starts = starts, a.mask.batch_stride = a.mask.row_stride = -1,
        a.mask.head_stride = 0);
}

/* ---- labels ------------------------------------------------------------------------ */

enum { LABELS = B * H * N * M };
static int32_t labels[LABELS];
static int8_t labels_1[LABELS];
static int16_t labels_2[LABELS];

#define LABEL(bytes, of)                                                                           \
  a.key[0].map = RP_MAP_LABEL, a.key[0].rows = T, a.key[0].label_bytes = (bytes),                  \
  a.key[0].labels = (of), a.key[0].label_batch_stride = H * N * M,                                 \
  a.key[0].label_head_stride = N * M, a.key[0].label_row_stride = M

static void test_label_matrices(void) {
  const int64_t low[B] = {-1, 0};
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].label_bytes=0, must be 1, 2 or 4",
          LABEL(0, labels));
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].label_bytes=8", LABEL(8, labels));
  REFUSED(RP_ERROR_ARGUMENT, "must be aligned to label_bytes=2",
          LABEL(2, (const char *)labels + 1));
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].rows=0, must be from 1", LABEL(4, labels),
          a.key[0].rows = 0);
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].labels is NULL", LABEL(4, NULL));
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].labels has a stride of -1", LABEL(4, labels),
          a.key[0].label_head_stride = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].labels: its size overflows", LABEL(4, labels),
          a.key[0].label_batch_stride = HUGE_STRIDE);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].labels: start -1 of sequence 0", LABEL(4, labels),
          a.key[0].label_starts = low);
  TAKEN(LABEL(4, NULL), a.M = 0); /* no pair, no label */
}

/* Bad values of every width, at the first, the last and some place between. */
static void test_bad_labels(void) {
  static const int places[] = {0, N * M + 2 * M + 5, LABELS - 1};
  static const int32_t bad[] = {-2, T, 100, -128, 127};
  for (size_t p = 0; p < sizeof places / sizeof places[0]; p++) {
    for (size_t v = 0; v < sizeof bad / sizeof bad[0]; v++) {
      const int at = places[p];
      labels[at] = labels_1[at] = (int8_t)bad[v];
      labels_2[at] = (int16_t)bad[v];
      char sentence[160];
      snprintf(sentence, sizeof sentence,
               "attention: key[0]: label %d of sequence %d, head %d, query %d, key %d; labels must "
               "be from -1 (none) to rows - 1 = 3",
               bad[v], at / (H * N * M), at / (N * M) % H, at / M % N, at % M);
      CONTENT_REFUSED(sentence, LABEL(1, labels_1));
      CONTENT_REFUSED(sentence, LABEL(2, labels_2));
      CONTENT_REFUSED(sentence, LABEL(4, labels));
      labels[at] = labels_1[at] = 0;
      labels_2[at] = 0;
    }
  }
}

/* Tables as high as the labels' type, and higher. */
static void test_high_tables(void) {
  static rp_real table[70000 * D];
  call c = valid();
  c.a.key[0] = (rp_relation){.table = table, .row_stride = D, .map = RP_MAP_LABEL};
  rp_relation *const r = &c.a.key[0];
  static const struct {
    int bytes;
    int64_t rows;
    int32_t label;
    bool fine;
  } cases[] = {
      {1, 128, 127, true},      {1, 70000, 127, true},        {1, 127, 127, false},
      {1, 70000, -128, false},  {2, 32768, 32767, true},      {2, 70000, 32767, true},
      {2, 32767, 32767, false}, {2, 70000, -2, false},        {4, 70000, 69999, true},
      {4, 70000, 70000, false}, {4, 70000, INT32_MAX, false}, {4, 70000, INT32_MIN, false},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const int32_t label = cases[i].label;
    const int8_t one = (int8_t)label;
    const int16_t two = (int16_t)label;
    r->label_bytes = cases[i].bytes;
    r->labels = r->label_bytes == 1   ? (const void *)&one
                : r->label_bytes == 2 ? (const void *)&two
                                      : &label;
    r->rows = cases[i].rows;
    call one_pair = c;
    one_pair.a.N = one_pair.a.M = 1;
    if (cases[i].fine) {
      taken(&one_pair.a);
    } else {
      CHECK_INT(forward(&one_pair), RP_ERROR_ARGUMENT);
      CHECK_TEXT(rp_last_error(), "attention: key[0]: label ");
    }
  }
}

/* Shared matrices, lengths, packs: what is in use is looked at, and nothing else. */
static void test_labels_in_use(void) {
  const int64_t queries[B] = {2, 4}, keys[B] = {6, 3};
#define RAGGED a.lengths = queries, a.key_lengths = keys
#define SHARED LABEL(4, labels), a.key[0].label_batch_stride = a.key[0].label_head_stride = 0
  TAKEN(SHARED);
  labels[1 * M + 5] = 99; /* of sequence 0 alone */
  CONTENT_REFUSED("label 99 of sequence 0, head 0, query 1, key 5", SHARED, RAGGED);
  labels[1 * M + 5] = 0;
  labels[3 * M + 2] = -7; /* of sequence 1 alone */
  CONTENT_REFUSED("label -7 of sequence 1, head 0, query 3, key 2", SHARED, RAGGED);
  labels[3 * M + 2] = 0;
  labels[2 * M + 5] = labels[1 * M + 6] = labels[4 * M] = labels[3 * M + 3] = 99; /* of none */
  TAKEN(SHARED, RAGGED);
  memset(labels, 0, sizeof labels);
  /* Flat: sequence 1 before sequence 0, something between. */
  const int64_t offsets[B + 1] = {0, 2, 5}, key_offsets[B + 1] = {0, 3, 7}, starts[B] = {14, 0};
#define FLAT                                                                                       \
  LABEL(4, labels), a.key[0].label_starts = starts, a.offsets = offsets,                           \
                    a.key_offsets = key_offsets, a.key[0].label_head_stride = 0
  labels[12] = labels[13] = labels[20] = 99;
  TAKEN(FLAT);
  labels[14 + 1 * 3 + 2] = 4;
  CONTENT_REFUSED("label 4 of sequence 0, head 0, query 1, key 2", FLAT);
  labels[14 + 1 * 3 + 2] = 0;
  labels[2 * 4 + 3] = 5;
  CONTENT_REFUSED("label 5 of sequence 1, head 0, query 2, key 3", FLAT);
  memset(labels, 0, sizeof labels);
}

/* One matrix for two terms: the lower table decides, wherever it stands. */
static void test_shared_labels(void) {
  for (int low = 0; low < 2; low++) {
    call c = valid();
    rp_relation *const key = &c.a.key[0], *const value = &c.a.value[0];
    key->map = value->map = RP_MAP_LABEL;
    key->labels = value->labels = labels_1;
    key->label_bytes = value->label_bytes = 1;
    key->rows = low == 0 ? T - 1 : T;
    value->rows = low == 1 ? T - 1 : T;
    CHECK_INT(forward(&c), RP_OK);
    labels_1[3] = T - 1;
    CHECK_INT(forward(&c), RP_ERROR_ARGUMENT);
    CHECK_TEXT(rp_last_error(), low == 0 ? "key[0]: label 3" : "value[0]: label 3");
    labels_1[3] = 0;
  }
}

/* Many blocks of rows, on some threads. */
static void test_long_labels(void) {
  enum { LONG = 1500 };
  int8_t *const many = calloc((size_t)LONG * LONG, 1);
  rp_real *const data = calloc((size_t)LONG * 2, sizeof *data);
  if (!CHECK(many != NULL && data != NULL)) return;
  rp_attention a = rp_attention_default();
  a.B = a.H = a.D = a.Dv = 1;
  a.N = a.M = LONG;
  a.bias[1] = (rp_relation){.table = bias_table,
                            .row_stride = 1,
                            .rows = T,
                            .map = RP_MAP_LABEL,
                            .labels = many,
                            .label_bytes = 1,
                            .label_row_stride = LONG};
  int64_t bytes = 0;
  CHECK_INT(rp_attention_workspace(&a, &bytes, NULL), RP_OK);
  void *const memory = rpi_allocate((size_t)bytes);
  const rp_rows x = {data, 0, 0, 1};
  const rp_rows_out out = {data + LONG, 0, 0, 1};
  CHECK_INT(rp_attention_forward(&a, x, x, x, out, NULL, memory, bytes), RP_OK);
  for (int64_t at = 7; at < (int64_t)LONG * LONG; at += 123457) {
    many[at] = 77;
    CHECK_INT(rp_attention_forward(&a, x, x, x, out, NULL, memory, bytes), RP_ERROR_ARGUMENT);
    char sentence[96];
    snprintf(sentence, sizeof sentence,
             "bias[1]: label 77 of sequence 0, head 0, query %d, key %d;", (int)(at / LONG),
             (int)(at % LONG));
    CHECK_TEXT(rp_last_error(), sentence);
    many[at] = -1;
  }
  rpi_release(memory);
  free(data);
  free(many);
}

/* ---- edges ------------------------------------------------------------------------- */

static void test_edges(void) {
  enum { ROWS = B * N };
  static const int64_t starts[ROWS + 1] = {0, 2, 2, 5, 5, 5, 6, 6, 6, 6, 8};
  static const int32_t keys[] = {0, 6, 3, 3, 4, 0, 1, 2}, to[] = {0, 3, 1, 2, 0, 0, 1, 3};
  int64_t s[ROWS + 1];
  int32_t k[8], l[8];
#define EDGES                                                                                      \
  memcpy(s, starts, sizeof s), memcpy(k, keys, sizeof k), memcpy(l, to, sizeof l),                 \
      a.key[0].map = RP_MAP_EDGES, a.key[0].rows = T, a.key[0].edge_starts = s,                    \
      a.key[0].edge_keys = k, a.key[0].edge_labels = l
  TAKEN(EDGES);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].rows=0", EDGES, a.key[0].rows = 0);
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].edge_starts is NULL", EDGES,
          a.key[0].edge_starts = NULL);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].edge_starts[0]=1, must be 0", EDGES, s[0] = 1);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].edge_starts[4]=4 after 5, must not fall", EDGES,
          s[4] = 4);
  REFUSED(RP_ERROR_SHAPE, "attention: key[0].edge_starts[10]=1099511627777", EDGES,
          s[ROWS] = BEYOND);
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].edge_keys is NULL", EDGES,
          a.key[0].edge_keys = NULL);
  REFUSED(RP_ERROR_ARGUMENT, "attention: key[0].edge_labels is NULL", EDGES,
          a.key[0].edge_labels = NULL);
  CONTENT_REFUSED("attention: key[0].edge_keys[1]=7 of sequence 0, query 0, which has 7 keys",
                  EDGES, k[1] = 7);
  CONTENT_REFUSED("attention: key[0].edge_keys[7]=-1 of sequence 1, query 4", EDGES, k[7] = -1);
  CONTENT_REFUSED(
      "attention: key[0].edge_keys[4]=2 after 3, of sequence 0, query 2; keys must not "
      "fall",
      EDGES, k[4] = 2);
  CONTENT_REFUSED(
      "attention: key[0].edge_labels[2]=4 of sequence 0, query 2, key 3; labels of edges "
      "must be from 0 to rows - 1 = 3",
      EDGES, l[2] = T);
  CONTENT_REFUSED("attention: key[0].edge_labels[5]=-1 of sequence 1, query 0", EDGES, l[5] = -1);
  /* Rows beyond a length, and what they hold, are no query's. */
  const int64_t lengths[B] = {2, 1}, short_keys[B] = {7, 1};
  TAKEN(EDGES, a.lengths = lengths, a.key_lengths = short_keys, k[3] = 99, l[6] = 99);
  CONTENT_REFUSED("attention: key[0].edge_keys[5]=1 of sequence 1, query 0, which has 1 keys",
                  EDGES, k[5] = 1, a.lengths = lengths, a.key_lengths = short_keys);
  /* No edges: nothing to point at. */
  TAKEN(EDGES, memset(s, 0, sizeof s), a.key[0].edge_keys = NULL, a.key[0].edge_labels = NULL);
  TAKEN(EDGES, a.key[0].edge_starts = NULL, a.N = 0);
  /* Packed: counted by tokens. */
  const int64_t offsets[B + 1] = {0, 3, 5}, key_offsets[B + 1] = {0, 7, 7};
  TAKEN(EDGES, a.offsets = offsets, a.key_offsets = key_offsets);
  const int64_t earlier[B + 1] = {0, 2, 5};
  CONTENT_REFUSED("attention: key[0].edge_keys[2]=3 of sequence 1, query 0, which has 0 keys",
                  EDGES, a.offsets = earlier, a.key_offsets = key_offsets);
  REFUSED(RP_ERROR_SHAPE, "edge_starts, must not exceed 2^40", EDGES, a.N = BEYOND - 1);
}

/* Two terms of each kind, of every map, at once. */
static void test_all_together(void) {
  static rp_real tables[4][2][T * DV];
  static const int64_t starts[B * N + 1] = {0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2};
  static const int32_t keys[] = {0, 6}, to[] = {3, 0};
  call c = valid();
  rp_relation *const relations[] = {c.a.key, c.a.query, c.a.bias, c.a.value};
  rp_real **const gradients[] = {c.g.key, c.g.query, c.g.bias, c.g.value};
  static rp_real sums[4][2][T * DV];
  for (int kind = 0; kind < 4; kind++) {
    for (int i = 0; i < 2; i++) {
      relations[kind][i] = (rp_relation){.table = tables[kind][i],
                                         .row_stride = kind == 2 ? 1 : DV,
                                         .rows = T,
                                         .map = (kind + i) % 3,
                                         .left = LEFT,
                                         .right = RIGHT,
                                         .labels = labels_1,
                                         .label_bytes = 1,
                                         .edge_starts = starts,
                                         .edge_keys = keys,
                                         .edge_labels = to};
      gradients[kind][i] = sums[kind][i];
    }
  }
  int64_t f = 0, b = 0;
  CHECK_INT(rp_attention_workspace(&c.a, &f, &b), RP_OK);
  c.workspace_bytes = f > b ? f : b;
  c.workspace = rpi_allocate((size_t)c.workspace_bytes);
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
  c.a.value[1].left = -1; /* value[1] is a band: 3 + 1 */
  c.a.query[1].rows = -1;
  CHECK_INT(forward(&c), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "attention: query[1].rows=-1");
  rpi_release(c.workspace);
}

int main(void) {
  const int code = call_begin();
  if (code != 0) return code;
  test_tables();
  test_bands();
  test_buckets();
  test_positions();
  test_masks();
  test_label_matrices();
  test_bad_labels();
  test_high_tables();
  test_labels_in_use();
  test_shared_labels();
  test_long_labels();
  test_edges();
  test_all_together();
  return call_end();
}
