/* SPDX-License-Identifier: Apache-2.0
 *
 * _terms.c: relation terms and masks.
 *
 * A term is a tuple
 *
 *   (name, kind, table, map, left, right, beyond, buckets, query_positions,
 *    key_positions, labels, label_starts, edge_starts, edge_keys, edge_labels)
 *
 * of which what is not there is None. libcore checks what the maps hold; that their
 * arrays are as large as it believes is checked here.
 */
#include "_call.h"

#include <stdio.h>
#include <string.h>

/* "labels of key_table" */
typedef struct part_name {
  char text[96];
} part_name;

static part_name part_of(const char *part, const char *whole) {
  part_name name;
  snprintf(name.text, sizeof name.text, "%s of %.64s", part, whole);
  return name;
}

static int has_axes(PyObject *object, int count) { return axes_of(object) == count; }

/* ---- matrices of pairs: labels and masks ------------------------------------------ */

/* Rows in use of sequence b. 0 for what libcore is going to refuse, before it reads
 * anything that depends on it. */
static int64_t rows_in_use(const int64_t *offsets, const int64_t *lengths, int64_t b,
                           int64_t tokens, int64_t rows) {
  if (offsets != NULL) {
    const int64_t from = offsets[b], to = offsets[b + 1];
    return 0 <= from && from <= to && to <= tokens ? to - from : 0;
  }
  if (lengths == NULL) return rows;
  return 0 <= lengths[b] && lengths[b] <= rows ? lengths[b] : 0;
}

/* Numbers laid end to end are enough for every sequence. */
static int flat_reaches(const job *j, const char *name, const int64_t *starts) {
  const rp_attention *const a = &j->attention;
  const int64_t *const size = j->sizes.of;
  const int64_t *const key_offsets = a->key_offsets != NULL ? a->key_offsets : a->offsets;
  const int64_t *const key_lengths = a->key_lengths != NULL ? a->key_lengths : a->lengths;
  const int64_t key_tokens = size[a->key_offsets != NULL ? 'Y' : 'X'], count = size['F'];
  for (int64_t b = 0; b < size['B']; b++) {
    const int64_t queries = rows_in_use(a->offsets, a->lengths, b, size['X'], size['N']);
    const int64_t keys = rows_in_use(key_offsets, key_lengths, b, key_tokens, size['M']);
    if (queries <= 0 || keys <= 0) continue;
    if (starts[b] < 0 || starts[b] > count || keys > (count - starts[b]) / queries) {
      PyErr_Format(PyExc_ValueError,
                   "%s: sequence %lld needs %lld x %lld from %lld on, but there are %lld", name,
                   (long long)b, (long long)queries, (long long)keys, (long long)starts[b],
                   (long long)count);
      return 0;
    }
  }
  return 1;
}

/* (B, H, N, M), where B and H may be 1, for padded arrays; or flat, (count,) or (H, count), with
 * the place where each sequence starts, its rows as long as it has keys. */
static int take_pairs(job *j, PyObject *object, PyObject *starts, const char *name,
                      const char *starts_name, int flags, view *to, const int64_t **to_starts) {
  sizes *const s = &j->sizes;
  *to_starts = NULL;
  if (starts == Py_None) {
    const rp_attention *const a = &j->attention;
    if (a->offsets != NULL || a->key_offsets != NULL) {
      PyErr_Format(PyExc_ValueError,
                   "%s: packed arrays take a list of one matrix per sequence, or (flat, starts)",
                   name);
      return 0;
    }
    return take(object, name, "bhNM", flags, s, to);
  }
  s->of['F'] = -1;
  return take(object, name, has_axes(object, 2) ? "hF" : "F", flags, s, to) &&
         take_int64(starts, starts_name, "B", s, to_starts) && flat_reaches(j, name, *to_starts);
}

int take_mask(job *j, PyObject *mask) {
  PyObject *starts = Py_None;
  view v = {0};
  rp_mask *const to = &j->attention.mask;
  if (mask == Py_None) return 1;
  if (PyTuple_Check(mask) && !PyArg_ParseTuple(mask, "OO:mask", &mask, &starts)) return 0;
  if (!take_pairs(j, mask, starts, "mask", "starts of mask", TAKE_MASK, &v, &to->starts)) return 0;
  to->data = v.data;
  to->batch_stride = v.batch_stride;
  to->head_stride = v.head_stride;
  to->row_stride = v.row_stride;
  return 1;
}

/* ---- maps -------------------------------------------------------------------------- */

static int take_labels(job *j, const term *t, PyObject *labels, PyObject *starts) {
  rp_relation *const r = t->relation;
  view v = {0};
  if (labels == Py_None) return 1;
  if (!take_pairs(j, labels, starts, part_of("labels", t->name).text,
                  part_of("starts of labels", t->name).text, TAKE_LABELS, &v, &r->label_starts)) {
    return 0;
  }
  r->labels = v.data;
  r->label_bytes = v.bytes;
  r->label_batch_stride = v.batch_stride;
  r->label_head_stride = v.head_stride;
  r->label_row_stride = v.row_stride;
  return 1;
}

/* packed: the axis of tokens, or '\0'. */
static int take_positions(job *j, const term *t, PyObject *object, const char *part, char padded,
                          char packed, const int32_t **to, int64_t *stride) {
  view v = {0};
  if (object == Py_None) return 1;
  const char tokens[] = {packed, '\0'}, shared[] = {padded, '\0'}, each[] = {'B', padded, '\0'};
  const char *const axes = packed != '\0' ? tokens : has_axes(object, 1) ? shared : each;
  if (!take(object, part_of(part, t->name).text, axes, TAKE_INT32, &j->sizes, &v)) return 0;
  *to = v.data;
  *stride = v.batch_stride;
  return 1;
}

static int take_edges(job *j, const term *t, PyObject *starts, PyObject *keys, PyObject *labels) {
  sizes *const s = &j->sizes;
  rp_relation *const r = t->relation;
  const int64_t rows = j->attention.offsets != NULL ? s->of['X'] : s->of['B'] * s->of['N'];
  s->of['S'] = rows + 1;
  s->of['G'] = -1;
  if (!take_int64(starts, part_of("edge_starts", t->name).text, "S", s, &r->edge_starts) ||
      !take_int32(keys, part_of("edge_keys", t->name).text, "G", s, &r->edge_keys) ||
      !take_int32(labels, part_of("edge_labels", t->name).text, "G", s, &r->edge_labels)) {
    return 0;
  }
  if (r->edge_starts == NULL || r->edge_starts[rows] == s->of['G']) return 1;
  PyErr_Format(PyExc_ValueError,
               "edge_starts of %s: the last one is %lld, but there are %lld edges", t->name,
               (long long)r->edge_starts[rows], (long long)(s->of['G'] < 0 ? 0 : s->of['G']));
  return 0;
}

/* The rows that left and right ask for: of buckets where there are some, of the table
 * where not. */
static int take_band(job *j, const term *t, PyObject *buckets) {
  rp_relation *const r = t->relation;
  const long long left = r->left, right = r->right, most = 1LL << 40;
  if (left < 0 || right < 0 || left > most || right > most) {
    PyErr_Format(PyExc_ValueError, "%s: left=%lld and right=%lld must be from 0 to 2^40", t->name,
                 left, right);
    return 0;
  }
  j->sizes.of['R'] = left + 1 + right;
  if (buckets != Py_None) {
    return take_int32(buckets, part_of("buckets", t->name).text, "R", &j->sizes, &r->buckets);
  }
  if (r->rows == left + 1 + right) return 1;
  PyErr_Format(PyExc_ValueError,
               "%s: a band from -%lld to %lld needs left + 1 + right rows, got %lld", t->name, left,
               right, (long long)r->rows);
  return 0;
}

/* ---- terms ----------------------------------------------------------------------- */

/* Its place among the terms of its kind. */
static int place_term(job *j, term *t, int kind, PyObject *table) {
  rp_attention *const a = &j->attention;
  rp_attention_gradients *const g = &j->gradients;
  rp_relation *const relations[RELPOS_KINDS] = {a->key, a->query, a->bias, a->value};
  rp_real **const gradients[RELPOS_KINDS] = {g->key, g->query, g->bias, g->value};
  static const char *const kinds[RELPOS_KINDS] = {"key", "query", "bias", "value"};
  static const char *const shared[RELPOS_KINDS] = {"TD", "TD", "T", "TE"};
  static const char *const per_head[RELPOS_KINDS] = {"HTD", "HTD", "HT", "HTE"};
  if (kind < 0 || kind >= RELPOS_KINDS) {
    PyErr_Format(PyExc_ValueError, "%s: kind is %d, expected _core.KEY, QUERY, BIAS or VALUE",
                 t->name, kind);
    return 0;
  }
  int place = 0;
  while (place < RP_TERMS && relations[kind][place].table != NULL) place++;
  if (place == RP_TERMS) {
    PyErr_Format(PyExc_ValueError, "%s: there are %d %s terms already, which is the most", t->name,
                 RP_TERMS, kinds[kind]);
    return 0;
  }
  t->relation = &relations[kind][place];
  t->gradient = &gradients[kind][place];
  t->axes = has_axes(table, kind == RELPOS_BIAS ? 2 : 3) ? per_head[kind] : shared[kind];
  return 1;
}

static int take_term(job *j, PyObject *object) {
  sizes *const s = &j->sizes;
  const rp_attention *const a = &j->attention;
  term *const t = &j->terms[j->term_count];
  PyObject *table, *buckets, *query_positions, *key_positions, *labels, *label_starts;
  PyObject *edge_starts, *edge_keys, *edge_labels;
  int kind, map, beyond;
  long long left, right;
  view v = {0};
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "terms: expected a tuple of tuples");
    return 0;
  }
  if (!PyArg_ParseTuple(object, "siOiLLiOOOOOOOO:term", &t->name, &kind, &table, &map, &left,
                        &right, &beyond, &buckets, &query_positions, &key_positions, &labels,
                        &label_starts, &edge_starts, &edge_keys, &edge_labels)) {
    return 0;
  }
  if (!place_term(j, t, kind, table)) return 0;
  s->of['T'] = -1;
  if (!take(table, t->name, t->axes, TAKE_DISTINCT, s, &v)) return 0;
  rp_relation *const r = t->relation;
  *r = (rp_relation){.table = v.data,
                     .head_stride = v.head_stride,
                     .row_stride = v.row_stride,
                     .rows = s->of['T'],
                     .map = map,
                     .left = left,
                     .right = right,
                     .beyond = beyond};
  j->term_count++;
  if (map == RP_MAP_LABEL) return take_labels(j, t, labels, label_starts);
  if (map == RP_MAP_EDGES) return take_edges(j, t, edge_starts, edge_keys, edge_labels);
  if (map != RP_MAP_BAND) return 1; /* libcore says what it knows */
  const char queries = a->offsets != NULL ? 'X' : '\0';
  const char keys = a->key_offsets != NULL ? 'Y' : queries;
  return take_band(j, t, buckets) &&
         take_positions(j, t, query_positions, "query_positions", 'N', queries, &r->query_positions,
                        &r->query_position_stride) &&
         take_positions(j, t, key_positions, "key_positions", 'M', keys, &r->key_positions,
                        &r->key_position_stride);
}

int take_terms(job *j, PyObject *terms) {
  if (!PyTuple_Check(terms)) {
    PyErr_SetString(PyExc_TypeError, "terms: expected a tuple of tuples");
    return 0;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(terms); i++) {
    if (j->term_count == MOST_TERMS) {
      PyErr_Format(PyExc_ValueError, "terms: expected at most %d, got %zd", MOST_TERMS,
                   PyTuple_Size(terms));
      return 0;
    }
    if (!take_term(j, PyTuple_GetItem(terms, i))) return 0;
  }
  return 1;
}

/* ---- gradients -------------------------------------------------------------------- */

/* It lies as the table does. */
static int take_table_gradient(job *j, const term *t, PyObject *object) {
  const part_name name = part_of("gradient", t->name);
  view v = {0};
  if (object == Py_None) return 1;
  j->sizes.of['T'] = t->relation->rows;
  if (!take(object, name.text, t->axes, TAKE_WRITE, &j->sizes, &v)) return 0;
  if (v.head_stride != t->relation->head_stride || v.row_stride != t->relation->row_stride) {
    raise_strides(name.text, object, "must lie in memory as its table does", "");
    return 0;
  }
  *t->gradient = v.data;
  return 1;
}

int take_table_gradients(job *j, PyObject *gradients) {
  if (!PyTuple_Check(gradients) || PyTuple_Size(gradients) != j->term_count) {
    PyErr_Format(PyExc_ValueError, "table_gradients: expected a tuple of %d, one for each term",
                 j->term_count);
    return 0;
  }
  for (int i = 0; i < j->term_count; i++) {
    if (!take_table_gradient(j, &j->terms[i], PyTuple_GetItem(gradients, i))) return 0;
  }
  return 1;
}
