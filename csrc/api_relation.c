/* SPDX-License-Identifier: Apache-2.0
 *
 * api_relation.c: the checks of relation terms and of the mask: that a table is as
 * large as its map can ask for, and that the map asks for nothing else.
 *
 * Labels are many, one for each pair, and every call looks at all of them. Where terms,
 * heads or sequences share a matrix it is looked at once; a row costs one maximum,
 * which the compiler makes vectors of; the rows are spread over the threads. Only when
 * a bad label is known to be there is it searched for, in order, to be named.
 */
#include "api_attention.h"

#include <stdatomic.h>
#include <stdio.h>

#include "base/memory.h"
#include "base/threads.h"

#define POSITION_LIMIT ((int32_t)1 << 30)
#define SCAN_LABELS 65536 /* of one task: some microseconds */

/* A term that is there, and what messages call it, its table and the table's gradient. */
typedef struct term {
  const rp_relation *relation;
  int64_t width; /* of a row of its table */
  const char *name, *table, *gradient;
} term;

enum { TERMS = 4 * RP_TERMS };

static term term_at(const rp_attention *a, int i) {
#define NAMES(name) {name, name ".table", "gradients." name}
  static const char *const names[TERMS][3] = {
      NAMES("key[0]"),  NAMES("key[1]"),  NAMES("query[0]"), NAMES("query[1]"),
      NAMES("bias[0]"), NAMES("bias[1]"), NAMES("value[0]"), NAMES("value[1]")};
#undef NAMES
  const rp_relation *const relations[] = {a->key, a->query, a->bias, a->value};
  const int64_t widths[] = {a->D, a->D, 1, a->Dv};
  const int kind = i / RP_TERMS;
  return (term){.relation = relations[kind] + i % RP_TERMS,
                .width = widths[kind],
                .name = names[i][0],
                .table = names[i][1],
                .gradient = names[i][2]};
}

/* ---- tables ------------------------------------------------------------------ */

static rp_status check_table(const rp_attention *a, const term *t, int64_t T) {
  const rp_relation *const r = t->relation;
  RPI_CHECK(r->row_stride >= t->width && r->row_stride <= RPI_LIMIT, RP_ERROR_SHAPE,
            "attention: %s.row_stride=%lld, must be at least the row's width %lld", t->name,
            (rpi_wide)r->row_stride, (rpi_wide)t->width);
  int64_t table = 0, all = 0;
  RPI_CHECK(rpi_multiply(T, r->row_stride, &table) && table <= INT64_MAX / 16, RP_ERROR_SHAPE,
            "attention: %s: %lld rows of %lld numbers overflow", t->name, (rpi_wide)T,
            (rpi_wide)r->row_stride);
  const int64_t least = table - r->row_stride + t->width;
  RPI_CHECK(
      r->head_stride == 0 || (r->head_stride >= least && rpi_multiply(r->head_stride, a->H, &all) &&
                              all <= INT64_MAX / 16),
      RP_ERROR_SHAPE,
      "attention: %s.head_stride=%lld, must be 0 (shared) or at least the table's %lld "
      "numbers",
      t->name, (rpi_wide)r->head_stride, (rpi_wide)least);
  return RP_OK;
}

static const rp_real *gradient_at(const rp_attention_gradients *g, int i) {
  rp_real *const *const kinds[] = {g->key, g->query, g->bias, g->value};
  return kinds[i / RP_TERMS][i % RP_TERMS];
}

int rpi_tables(const rp_attention *a, const rp_attention_gradients *g, rpi_array *to) {
  int count = 0;
  for (int i = 0; i < TERMS; i++) {
    const term t = term_at(a, i);
    const rp_relation *const r = t.relation;
    if (!r->table) continue;
    to[count++] = (rpi_array){.name = g ? t.gradient : t.table,
                              .data = g ? gradient_at(g, i) : r->table,
                              .axes = {{1, 0},
                                       {r->head_stride ? a->H : 1, r->head_stride},
                                       {rpi_table_rows(r), r->row_stride}},
                              .width = t.width,
                              .element = (int64_t)sizeof *r->table,
                              .added_to = g != NULL};
  }
  if (a->position_bias) {
    to[count++] = (rpi_array){.name = g ? "gradients.position_bias" : "position_bias",
                              .data = g ? g->position_bias : a->position_bias,
                              .axes = {{1, 0}, {a->H, a->position_bias_stride}, {1, 0}},
                              .width = a->D,
                              .element = (int64_t)sizeof *a->position_bias,
                              .added_to = g != NULL};
  }
  return count;
}

/* ---- bands --------------------------------------------------------------------- */

/* Of a sequence, or of all that are packed end to end. */
static rp_status check_position_row(const term *t, const char *what, const int32_t *positions,
                                    int64_t b, int64_t count) {
  int32_t least = 0, most = 0;
  for (int64_t i = 0; i < count; i++) {
    least = positions[i] < least ? positions[i] : least;
    most = positions[i] > most ? positions[i] : most;
  }
  if (least > -POSITION_LIMIT && most < POSITION_LIMIT) return RP_OK;
  int64_t i = 0;
  while (positions[i] > -POSITION_LIMIT && positions[i] < POSITION_LIMIT) i++;
  return rpi_fail(RP_ERROR_ARGUMENT,
                  "attention: %s.%s=%d at row %lld of sequence %lld, must be below 2^30 in "
                  "magnitude",
                  t->name, what, positions[i], (rpi_wide)i, (rpi_wide)b);
}

static rp_status check_positions(const rp_attention *a, const term *t, bool keys) {
  const rp_relation *const r = t->relation;
  const char *const what = keys ? "key_positions" : "query_positions";
  const int32_t *const positions = keys ? r->key_positions : r->query_positions;
  const int64_t stride = keys ? r->key_position_stride : r->query_position_stride;
  const int64_t *const offsets = !keys || !a->key_offsets ? a->offsets : a->key_offsets;
  int64_t most = 0;
  for (int64_t b = 0; b < a->B; b++) {
    const int64_t rows = keys ? rpi_keys_of(a, b) : rpi_queries_of(a, b);
    if (offsets) RPI_TRY(check_position_row(t, what, positions + offsets[b], b, rows));
    most = rpi_max(rows, most);
  }
  if (offsets) return RP_OK;
  char name[48];
  snprintf(name, sizeof name, "%s.%s", t->name, what);
  const rpi_array array = {
      .name = name, .data = positions, .axes = {{a->B, stride}, {1, 0}, {most, 1}}, .width = 1};
  RPI_TRY(rpi_check_rows("attention", &array, false));
  if (stride == 0) return check_position_row(t, what, positions, 0, most);
  for (int64_t b = 0; b < a->B; b++) {
    const int64_t rows = keys ? rpi_keys_of(a, b) : rpi_queries_of(a, b);
    RPI_TRY(check_position_row(t, what, positions + b * stride, b, rows));
  }
  return RP_OK;
}

/* T of a band: given, or what its distances need. */
static rp_status check_band(const rp_attention *a, const term *t, int64_t *T) {
  const rp_relation *const r = t->relation;
  RPI_CHECK(r->left >= 0 && r->left <= RPI_LIMIT && r->right >= 0 && r->right <= RPI_LIMIT,
            RP_ERROR_ARGUMENT, "attention: %s.left=%lld and right=%lld must be from 0 to 2^40",
            t->name, (rpi_wide)r->left, (rpi_wide)r->right);
  RPI_CHECK(r->beyond == RP_BEYOND_CLIP || r->beyond == RP_BEYOND_NONE, RP_ERROR_ARGUMENT,
            "attention: %s.beyond=%d, must be RP_BEYOND_CLIP (0) or RP_BEYOND_NONE (1)", t->name,
            r->beyond);
  const int64_t distances = r->left + 1 + r->right;
  if (!r->buckets) {
    RPI_CHECK(r->rows == 0 || r->rows == distances, RP_ERROR_SHAPE,
              "attention: %s.rows=%lld, must be left + 1 + right = %lld where there are no buckets "
              "(or 0)",
              t->name, (rpi_wide)r->rows, (rpi_wide)distances);
    *T = distances;
  }
  for (int64_t i = 0; r->buckets && i < distances; i++) {
    RPI_CHECK(r->buckets[i] >= -1 && r->buckets[i] < *T, RP_ERROR_ARGUMENT,
              "attention: %s.buckets[%lld]=%d, must be from -1 (none) to rows - 1 = %lld", t->name,
              (rpi_wide)i, r->buckets[i], (rpi_wide)(*T - 1));
  }
  RPI_CHECK(!r->query_positions == !r->key_positions, RP_ERROR_ARGUMENT,
            "attention: %s.%s is NULL, but %s are given; both or neither", t->name,
            r->query_positions ? "key_positions" : "query_positions",
            r->query_positions ? "query_positions" : "key_positions");
  if (!r->query_positions) return RP_OK;
  RPI_TRY(check_positions(a, t, false));
  return check_positions(a, t, true);
}

/* ---- matrices of pairs: labels and masks ---------------------------------------- */

/* strides: of sequences, heads and rows; where there are starts, rows lie end to end. */
static rp_status check_matrix(const rp_attention *a, const char *name, const void *data,
                              const int64_t *strides, const int64_t *starts) {
  int64_t queries = 0, keys = 0;
  for (int64_t b = 0; b < a->B; b++) {
    const int64_t rows = rpi_queries_of(a, b), columns = rpi_keys_of(a, b);
    if (rows == 0 || columns == 0) continue;
    queries = rpi_max(rows, queries);
    keys = rpi_max(columns, keys);
    if (!starts) continue;
    int64_t all = 0;
    RPI_CHECK(starts[b] >= 0 && starts[b] <= RPI_LIMIT, RP_ERROR_SHAPE,
              "attention: %s: start %lld of sequence %lld, must be from 0 to 2^40", name,
              (rpi_wide)starts[b], (rpi_wide)b);
    RPI_CHECK(rpi_multiply(rows, columns, &all) && all <= INT64_MAX / 32, RP_ERROR_SHAPE,
              "attention: %s: its size overflows", name);
  }
  const rpi_array array = {.name = name,
                           .data = data,
                           .axes = {{a->B, starts ? 0 : strides[0]},
                                    {a->H, strides[1]},
                                    {queries, starts ? keys : strides[2]}},
                           .width = keys};
  return rpi_check_rows("attention", &array, false);
}

static rp_status check_mask(const rp_attention *a) {
  const rp_mask *const m = &a->mask;
  if (!m->data) return RP_OK;
  const int64_t strides[] = {m->batch_stride, m->head_stride, m->row_stride};
  return check_matrix(a, "mask", m->data, strides, m->starts);
}

static rp_status check_label_matrix(const rp_attention *a, const term *t) {
  const rp_relation *const r = t->relation;
  char name[32];
  snprintf(name, sizeof name, "%s.labels", t->name);
  RPI_CHECK(r->label_bytes == 1 || r->label_bytes == 2 || r->label_bytes == 4, RP_ERROR_ARGUMENT,
            "attention: %s.label_bytes=%d, must be 1, 2 or 4", t->name, r->label_bytes);
  RPI_CHECK((uintptr_t)r->labels % (unsigned)r->label_bytes == 0, RP_ERROR_ARGUMENT,
            "attention: %s=%p, must be aligned to label_bytes=%d", name, r->labels, r->label_bytes);
  const int64_t strides[] = {r->label_batch_stride, r->label_head_stride, r->label_row_stride};
  return check_matrix(a, name, r->labels, strides, r->label_starts);
}

/* The first label of query i, counted from r->labels. */
static int64_t label_row(const rp_attention *a, const rp_relation *r, int64_t b, int64_t h,
                         int64_t i) {
  const int64_t head = h * r->label_head_stride;
  if (r->label_starts) return r->label_starts[b] + head + i * rpi_keys_of(a, b);
  return b * r->label_batch_stride + head + i * r->label_row_stride;
}

/* Is a label out of -1 to T - 1? Plus one and without sign, those are 0 to T, and the
 * others are larger: one maximum tells. */
static bool bad_1(const int8_t *labels, int64_t count, int64_t T) {
  uint8_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < count; j++) {
    const uint8_t up = (uint8_t)(labels[j] + 1);
    most = up > most ? up : most;
  }
  return most > (T < 128 ? T : 128);
}

static bool bad_2(const int16_t *labels, int64_t count, int64_t T) {
  uint16_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < count; j++) {
    const uint16_t up = (uint16_t)(labels[j] + 1);
    most = up > most ? up : most;
  }
  return most > (T < 32768 ? T : 32768);
}

static bool bad_4(const int32_t *labels, int64_t count, int64_t T) {
  uint32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < count; j++) {
    const uint32_t up = (uint32_t)labels[j] + 1;
    most = up > most ? up : most;
  }
  return most > (T < INT64_C(1) << 31 ? T : INT64_C(1) << 31);
}

static bool bad_labels(const rp_relation *r, int64_t first, int64_t count) {
  const char *const labels = (const char *)r->labels + first * r->label_bytes;
  if (r->label_bytes == 1) return bad_1((const int8_t *)(const void *)labels, count, r->rows);
  if (r->label_bytes == 2) return bad_2((const int16_t *)(const void *)labels, count, r->rows);
  return bad_4((const int32_t *)(const void *)labels, count, r->rows);
}

/* A scan of all labels of a term that are in use, by blocks of rows. */
typedef struct scan {
  const rp_attention *a;
  const rp_relation *relation;
  int64_t sequences, heads; /* matrices: 1 where they are shared */
  int64_t blocks, rows;     /* blocks of a matrix, rows of a block */
  atomic_bool bad;
} scan;

/* Labels in use in row i; where all sequences share the matrix, by any of them. */
static int64_t labels_in_use(const scan *s, int64_t b, int64_t i) {
  const int64_t end = s->sequences == 1 ? s->a->B : b + 1;
  int64_t most = 0;
  for (; b < end; b++) {
    if (i < rpi_queries_of(s->a, b)) most = rpi_max(rpi_keys_of(s->a, b), most);
  }
  return most;
}

static void scan_block(void *context, int64_t task, int worker) {
  (void)worker;
  scan *const s = context;
  const int64_t block = task % s->blocks, matrix = task / s->blocks;
  const int64_t h = matrix % s->heads, b = matrix / s->heads;
  for (int64_t i = block * s->rows; i < (block + 1) * s->rows; i++) {
    const int64_t count = labels_in_use(s, b, i);
    if (count == 0) continue;
    if (bad_labels(s->relation, label_row(s->a, s->relation, b, h, i), count)) {
      atomic_store_explicit(&s->bad, true, memory_order_relaxed);
    }
  }
}

/* Names the first label that is out of range. */
static rp_status fail_label(const rp_attention *a, const term *t) {
  const rp_relation *const r = t->relation;
  for (int64_t b = 0; b < a->B; b++) {
    for (int64_t h = 0; h < a->H; h++) {
      for (int64_t i = 0; i < rpi_queries_of(a, b); i++) {
        for (int64_t j = 0; j < rpi_keys_of(a, b); j++) {
          const int64_t label =
              rpi_label_at(r->labels, r->label_bytes, label_row(a, r, b, h, i) + j);
          RPI_CHECK(label >= -1 && label < r->rows, RP_ERROR_ARGUMENT,
                    "attention: %s: label %lld of sequence %lld, head %lld, query %lld, key %lld; "
                    "labels must be from -1 (none) to rows - 1 = %lld",
                    t->name, (rpi_wide)label, (rpi_wide)b, (rpi_wide)h, (rpi_wide)i, (rpi_wide)j,
                    (rpi_wide)(r->rows - 1));
        }
      }
    }
  }
  return RP_OK; /* somebody corrected it meanwhile */
}

static rp_status check_labels(const rp_attention *a, const term *t) {
  const rp_relation *const r = t->relation;
  int64_t queries = 0, keys = 1;
  for (int64_t b = 0; b < a->B; b++) {
    queries = rpi_max(rpi_queries_of(a, b), queries);
    keys = rpi_max(rpi_keys_of(a, b), keys);
  }
  const int64_t rows = rpi_max(SCAN_LABELS / keys, 1);
  scan s = {.a = a,
            .relation = r,
            .sequences = r->label_starts || r->label_batch_stride ? a->B : 1,
            .heads = r->label_head_stride ? a->H : 1,
            .blocks = rpi_divide_up(queries, rows),
            .rows = rows};
  rpi_parallel_for(s.sequences * s.heads * s.blocks, rpi_threads_get(), scan_block, &s);
  return atomic_load(&s.bad) ? fail_label(a, t) : RP_OK;
}

/* ---- edges ----------------------------------------------------------------------- */

static rp_status check_edge_starts(const rp_attention *a, const term *t) {
  const rp_relation *const r = t->relation;
  int64_t rows = a->offsets ? a->offsets[a->B] : 0;
  RPI_CHECK(a->offsets || (rpi_multiply(a->B, a->N, &rows) && rows <= RPI_LIMIT), RP_ERROR_SHAPE,
            "attention: %s: B=%lld times N=%lld edge_starts, must not exceed 2^40", t->name,
            (rpi_wide)a->B, (rpi_wide)a->N);
  if (rows == 0) return RP_OK;
  const int64_t *const starts = r->edge_starts;
  RPI_CHECK(starts, RP_ERROR_ARGUMENT, "attention: %s.edge_starts is NULL", t->name);
  char name[32];
  snprintf(name, sizeof name, "%s.edge_starts", t->name);
  RPI_TRY(rpi_check_offsets("attention", name, starts, rows));
  if (starts[rows] == 0) return RP_OK;
  RPI_CHECK(r->edge_keys, RP_ERROR_ARGUMENT, "attention: %s.edge_keys is NULL", t->name);
  RPI_CHECK(r->edge_labels, RP_ERROR_ARGUMENT, "attention: %s.edge_labels is NULL", t->name);
  return RP_OK;
}

/* The edges of one query, `row` of all, in a sequence of `keys` keys. */
static rp_status check_edges_of(const term *t, int64_t b, int64_t i, int64_t row, int64_t keys) {
  const rp_relation *const r = t->relation;
  int32_t before = 0;
  for (int64_t e = r->edge_starts[row]; e < r->edge_starts[row + 1]; e++) {
    const int32_t key = r->edge_keys[e], label = r->edge_labels[e];
    RPI_CHECK(key >= 0 && key < keys, RP_ERROR_ARGUMENT,
              "attention: %s.edge_keys[%lld]=%d of sequence %lld, query %lld, which has %lld keys",
              t->name, (rpi_wide)e, key, (rpi_wide)b, (rpi_wide)i, (rpi_wide)keys);
    RPI_CHECK(key >= before, RP_ERROR_ARGUMENT,
              "attention: %s.edge_keys[%lld]=%d after %d, of sequence %lld, query %lld; keys must "
              "not fall within a query",
              t->name, (rpi_wide)e, key, before, (rpi_wide)b, (rpi_wide)i);
    RPI_CHECK(label >= 0 && label < r->rows, RP_ERROR_ARGUMENT,
              "attention: %s.edge_labels[%lld]=%d of sequence %lld, query %lld, key %d; labels of "
              "edges must be from 0 to rows - 1 = %lld",
              t->name, (rpi_wide)e, label, (rpi_wide)b, (rpi_wide)i, key, (rpi_wide)(r->rows - 1));
    before = key;
  }
  return RP_OK;
}

static rp_status check_edges(const rp_attention *a, const term *t) {
  for (int64_t b = 0; b < a->B; b++) {
    const int64_t first = a->offsets ? a->offsets[b] : b * a->N, keys = rpi_keys_of(a, b);
    for (int64_t i = 0; i < rpi_queries_of(a, b); i++) {
      RPI_TRY(check_edges_of(t, b, i, first + i, keys));
    }
  }
  return RP_OK;
}

/* ---- all of them ------------------------------------------------------------------ */

static rp_status check_term(const rp_attention *a, const term *t) {
  const rp_relation *const r = t->relation;
  RPI_CHECK(r->map == RP_MAP_BAND || r->map == RP_MAP_LABEL || r->map == RP_MAP_EDGES,
            RP_ERROR_ARGUMENT,
            "attention: %s.map=%d, must be RP_MAP_BAND (0), RP_MAP_LABEL (1) or RP_MAP_EDGES (2)",
            t->name, r->map);
  int64_t T = r->rows;
  RPI_CHECK((T >= 1 && T <= RPI_LIMIT) || (r->map == RP_MAP_BAND && !r->buckets), RP_ERROR_SHAPE,
            "attention: %s.rows=%lld, must be from 1 to 2^40", t->name, (rpi_wide)T);
  if (r->map == RP_MAP_BAND) RPI_TRY(check_band(a, t, &T));
  if (r->map == RP_MAP_LABEL) RPI_TRY(check_label_matrix(a, t));
  if (r->map == RP_MAP_EDGES) RPI_TRY(check_edge_starts(a, t));
  return check_table(a, t, T);
}

rp_status rpi_check_terms(const rp_attention *a) {
  for (int i = 0; i < TERMS; i++) {
    const term t = term_at(a, i);
    if (t.relation->table) RPI_TRY(check_term(a, &t));
  }
  return check_mask(a);
}

/* Has a term before this one the same matrix, for a table that is not higher? Key and
 * value terms often do. */
static bool is_checked(const rp_attention *a, int i) {
  const rp_relation *const r = term_at(a, i).relation;
  while (--i >= 0) {
    const rp_relation *const s = term_at(a, i).relation;
    if (s->table && s->map == RP_MAP_LABEL && s->rows <= r->rows && s->labels == r->labels &&
        s->label_bytes == r->label_bytes && s->label_starts == r->label_starts &&
        s->label_batch_stride == r->label_batch_stride &&
        s->label_head_stride == r->label_head_stride &&
        s->label_row_stride == r->label_row_stride) {
      return true;
    }
  }
  return false;
}

rp_status rpi_check_labels(const rp_attention *a) {
  for (int i = 0; i < TERMS; i++) {
    const term t = term_at(a, i);
    if (!t.relation->table) continue;
    if (t.relation->map == RP_MAP_LABEL && !is_checked(a, i)) RPI_TRY(check_labels(a, &t));
    if (t.relation->map == RP_MAP_EDGES) RPI_TRY(check_edges(a, &t));
  }
  return RP_OK;
}
