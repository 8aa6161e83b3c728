/* SPDX-License-Identifier: Apache-2.0
 *
 * _call.c: the arguments that forward and backward share. They come as one tuple, which
 * Python's context keeps.
 */
#include "_call.h"

#include <stdio.h>

int choose_axes(axis_words *w, PyObject *layout, int packed, int packed_keys) {
  const int bhnd = PyUnicode_Check(layout) && PyUnicode_CompareWithASCIIString(layout, "bhnd") == 0;
  const int bnhd = PyUnicode_Check(layout) && PyUnicode_CompareWithASCIIString(layout, "bnhd") == 0;
  if (!bhnd && !bnhd) {
    PyErr_Format(PyExc_ValueError, "layout: expected 'bhnd' or 'bnhd', got %R", layout);
    return 0;
  }
  w->q = bhnd ? "BHND" : "BNHD", w->out = bhnd ? "BHNE" : "BNHE", w->lse = "BHN";
  w->k = bhnd ? "BKMD" : "BMKD", w->v = bhnd ? "BKME" : "BMKE";
  if (packed) w->q = "XHD", w->out = "XHE", w->lse = "HX", w->k = "XKD", w->v = "XKE";
  if (packed_keys) w->k = "YKD", w->v = "YKE";
  return 1;
}

int take_offsets(PyObject *object, const char *name, sizes *s, const int64_t **to) {
  if (!take_int64(object, name, "C", s, to)) return 0;
  if (*to == NULL) return 1;
  if (s->of['C'] == 0) {
    PyErr_Format(PyExc_ValueError,
                 "%s: expected B + 1 numbers from 0 to the number of tokens, got none", name);
    return 0;
  }
  s->of['B'] = s->of['C'] - 1;
  return 1;
}

int offsets_end(const int64_t *offsets, const char *name, const sizes *s, char axis,
                const char *array) {
  if (offsets == NULL || offsets[s->of['B']] == s->of[(int)axis]) return 1;
  PyErr_Format(PyExc_ValueError, "%s: the last one is %lld, but %s has %lld tokens", name,
               (long long)offsets[s->of['B']], array, (long long)s->of[(int)axis]);
  return 0;
}

static int take_position_bias(job *j, PyObject *object) {
  view v = {0};
  if (object == Py_None) return 1;
  if (!take(object, "position_bias", "HD", TAKE_DISTINCT, &j->sizes, &v)) return 0;
  j->attention.position_bias = v.data;
  j->attention.position_bias_stride = v.head_stride;
  return 1;
}

static int take_window(rp_attention *a, PyObject *object) {
  long long left, right;
  if (object == Py_None) return 1;
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "window: expected a tuple (left, right)");
    return 0;
  }
  if (!PyArg_ParseTuple(object, "LL:window", &left, &right)) return 0;
  a->window_left = left;
  a->window_right = right;
  return 1;
}

static int take_dropout(rp_attention *a, PyObject *object) {
  long long words[4];
  if (object == Py_None) return 1;
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "dropout: expected a tuple (rate, key0, key1, site, first)");
    return 0;
  }
  if (!PyArg_ParseTuple(object, "dLLLL:dropout", &a->dropout, &words[0], &words[1], &words[2],
                        &words[3])) {
    return 0;
  }
  for (int i = 0; i < 4; i++) {
    if (words[i] >= 0 && words[i] <= UINT32_MAX) continue;
    PyErr_Format(PyExc_ValueError,
                 "dropout: key0, key1, site and first must be from 0 to 2^32 - 1, got %lld",
                 words[i]);
    return 0;
  }
  a->dropout_key[0] = (uint32_t)words[0];
  a->dropout_key[1] = (uint32_t)words[1];
  a->dropout_site = (uint32_t)words[2];
  a->dropout_first = (uint32_t)words[3];
  return 1;
}

int take_placement(PyObject *object, rp_placement *to, PyObject **allocate) {
  unsigned long long stream;
  *to = rp_placement_default();
  *allocate = NULL;
  if (object == Py_None) return 1;
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError,
                    "placement: expected a tuple (device, stream, element, precision, allocate)");
    return 0;
  }
  if (!PyArg_ParseTuple(object, "sKiiO:placement", &to->device, &stream, &to->element,
                        &to->precision, allocate)) {
    return 0;
  }
  if (*allocate == Py_None) *allocate = NULL;
  to->stream = (void *)(uintptr_t)stream;
  return 1;
}

int take_call(job *j, PyObject *call, PyObject *q, PyObject *k, PyObject *v) {
  PyObject *layout, *lengths, *key_lengths, *offsets, *key_offsets, *query_start;
  PyObject *terms, *position_bias, *window, *mask, *dropout, *placement = Py_None;
  rp_attention *const a = &j->attention;
  sizes *const s = &j->sizes;
  *a = rp_attention_default();
  *s = sizes_unknown();
  if (!PyArg_ParseTuple(call, "OpdOOOOOOOOOdO|O:call", &layout, &a->causal, &a->scale, &lengths,
                        &key_lengths, &offsets, &key_offsets, &query_start, &terms, &position_bias,
                        &window, &mask, &a->softcap, &dropout, &placement) ||
      !take_placement(placement, &j->placement, &j->allocate)) {
    return 0;
  }
  if (placement != Py_None) a->placement = &j->placement;
  if (j->allocate != NULL) s->placement = a->placement; /* else all arrays are NumPy's */
  if (!choose_axes(&j->axes, layout, offsets != Py_None, key_offsets != Py_None) ||
      !take_offsets(offsets, "offsets", s, &a->offsets) ||
      !take_offsets(key_offsets, "key_offsets", s, &a->key_offsets) ||
      !take_rows(q, "q", j->axes.q, s, &j->q) || !offsets_end(a->offsets, "offsets", s, 'X', "q") ||
      !take_rows(k, "k", j->axes.k, s, &j->k) ||
      !offsets_end(a->key_offsets, "key_offsets", s, 'Y', "k") ||
      !take_rows(v, "v", j->axes.v, s, &j->v) ||
      !take_int64(lengths, "lengths", "B", s, &a->lengths) ||
      !take_int64(key_lengths, "key_lengths", "B", s, &a->key_lengths) ||
      !take_int64(query_start, "query_start", "B", s, &a->query_start)) {
    return 0;
  }
  a->B = s->of['B'];
  a->H = s->of['H'];
  a->key_heads = s->of['K'];
  a->D = s->of['D'];
  a->Dv = s->of['E'];
  a->N = s->of['N'] >= 0 ? s->of['N'] : 0;
  a->M = s->of['M'] >= 0 ? s->of['M'] : 0;
  return take_terms(j, terms) && take_position_bias(j, position_bias) && take_window(a, window) &&
         take_mask(j, mask) && take_dropout(a, dropout);
}

void raise_call(PyObject *module, rp_status status, const job *j) {
  static const char *const kinds[RELPOS_KINDS] = {"key", "query", "bias", "value"};
  _Static_assert(RP_TERMS == 2, "a relation is the first or the second of its kind");
  const rp_attention *const a = &j->attention;
  const rp_relation *const relations[RELPOS_KINDS] = {a->key, a->query, a->bias, a->value};
  char places[2 * MOST_TERMS][32];
  renaming names[2 * MOST_TERMS]; /* of each the table, and then the term */
  for (int i = 0; i < j->term_count; i++) {
    const rp_relation *const r = j->terms[i].relation;
    int kind = 0;
    while (r != relations[kind] && r != relations[kind] + 1) kind++;
    const int place = (int)(r - relations[kind]), at = 2 * i;
    snprintf(places[at], sizeof places[at], "%s[%d].table", kinds[kind], place);
    snprintf(places[at + 1], sizeof places[at + 1], "%s[%d]", kinds[kind], place);
    names[at] = (renaming){places[at], j->terms[i].name};
    names[at + 1] = (renaming){places[at + 1], j->terms[i].name};
  }
  raise_renamed(module, status, names, 2 * j->term_count);
}
