/* SPDX-License-Identifier: Apache-2.0
 *
 * _batch.c: a batch of sentences on its way from Python to libcore.
 *
 * libcore checks tokens, offsets and labels; how long the arrays are it cannot see, so that is
 * checked here.
 */
#include "_core.h"

/* The matrices of all sentences lie within the labels. Offsets that fall are left to libcore. */
static int graphs_fit(const rp_graphs *graphs, const char *name, const int64_t *offsets,
                      int64_t sentences, int64_t count) {
  if (offsets == NULL || graphs->starts == NULL) return 1;
  for (int64_t b = 0; b < sentences; b++) {
    const int64_t start = graphs->starts[b], n = offsets[b + 1] - offsets[b];
    if (n < 0 || (n == 0 && start >= 0 && start <= count)) continue;
    if (start >= 0 && start <= count && n > 0 && (count - start) / n >= n) continue;
    PyErr_Format(PyExc_ValueError,
                 "%s: the %lld x %lld labels of sentence %lld begin at %lld, but there are %lld",
                 name, (long long)n, (long long)n, (long long)b, (long long)start,
                 (long long)count);
    return 0;
  }
  return 1;
}

static int take_graphs(PyObject *object, const char *name, const char *starts_name,
                       const int64_t *offsets, sizes *s, rp_graphs *to) {
  PyObject *labels, *starts;
  view v = {0};
  if (object == Py_None) return 1;
  if (!PyTuple_Check(object)) {
    PyErr_Format(PyExc_TypeError, "%s: expected a tuple (labels, starts)", name);
    return 0;
  }
  if (!PyArg_ParseTuple(object, "OO:graphs", &labels, &starts)) return 0;
  s->of['F'] = -1;
  if (!take(labels, name, "F", TAKE_LABELS | TAKE_CONTIGUOUS, s, &v) ||
      !take_int64(starts, starts_name, "B", s, &to->starts)) {
    return 0;
  }
  to->labels = v.data;
  to->label_bytes = v.bytes;
  return graphs_fit(to, name, offsets, s->of['B'], s->of['F']);
}

/* Tokens along `axis`, none of them where there is no array. */
static int take_tokens(PyObject *object, const char *name, const char *axis, sizes *s,
                       const int32_t **to) {
  if (!take_int32(object, name, axis, s, to)) return 0;
  if (*to == NULL) s->of[(int)*axis] = 0;
  return 1;
}

int take_batch(PyObject *object, int has_decoder, rp_batch *to, int64_t *places) {
  PyObject *source, *source_offsets, *target, *target_offsets, *labels;
  PyObject *source_graphs, *target_graphs, *ordinals;
  sizes s = sizes_unknown();
  view v = {0};
  *to = rp_batch_default();
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "batch: expected a tuple");
    return 0;
  }
  if (!PyArg_ParseTuple(object, "OOOOOOOO:batch", &source, &source_offsets, &target,
                        &target_offsets, &labels, &source_graphs, &target_graphs, &ordinals)) {
    return 0;
  }
  if (!take_offsets(source_offsets, "source_offsets", &s, &to->source_offsets) ||
      !take_tokens(source, "source", "X", &s, &to->source) ||
      !offsets_end(to->source_offsets, "source_offsets", &s, 'X', "source") ||
      !take_offsets(target_offsets, "target_offsets", &s, &to->target_offsets) ||
      !take_tokens(target, "target", "Y", &s, &to->target) ||
      !offsets_end(to->target_offsets, "target_offsets", &s, 'Y', "target")) {
    return 0;
  }
  /* Where there is nothing to lie beside, libcore says that it is missing. */
  const int is_there = (has_decoder ? to->target : to->source) != NULL;
  const char *const beside = !is_there ? "F" : has_decoder ? "Y" : "X";
  if (!take_int32(labels, "labels", beside, &s, &to->labels)) return 0;
  if (s.of['B'] < 0) s.of['B'] = 0;
  if (!take_graphs(source_graphs, "source_graphs", "source_graphs starts", to->source_offsets, &s,
                   &to->source_graphs) ||
      !take_graphs(target_graphs, "target_graphs", "target_graphs starts", to->target_offsets, &s,
                   &to->target_graphs)) {
    return 0;
  }
  if (ordinals != Py_None &&
      !take(ordinals, "ordinals", "B", TAKE_UINT32 | TAKE_CONTIGUOUS, &s, &v)) {
    return 0;
  }
  to->ordinals = v.data;
  to->sentences = s.of['B'];
  *places = s.of[has_decoder ? 'Y' : 'X'];
  return 1;
}
