/* SPDX-License-Identifier: Apache-2.0
 *
 * _model_shows.c: what a model shows of itself: its parameters, scores, hidden states and
 * attention maps.
 *
 * Arrays of parameters are views of the model's memory. Their base is the model, which so
 * lives as long as the last of them.
 */
#include "_model.h"

/* ---- parameters --------------------------------------------------------------------- */

static PyObject *view_or_none(PyObject *self, const rp_parameter *p, rp_real *data, int flags) {
  npy_intp shape[3];
  if (data == NULL) return Py_NewRef(Py_None);
  for (int i = 0; i < p->dimensions; i++) shape[i] = (npy_intp)p->shape[i];
  PyObject *const array =
      PyArray_New(&PyArray_Type, p->dimensions, shape, NPY_FLOAT32, NULL, data, 0, flags, NULL);
  if (array == NULL) return NULL;
  if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(self)) < 0) {
    Py_DECREF(array);
    return NULL;
  }
  return array;
}

/* (name, weights, gradient, moment1, moment2, average) */
static PyObject *views_of(PyObject *self, const rp_parameter *p) {
  const int writable = NPY_ARRAY_CARRAY, only_read = NPY_ARRAY_CARRAY_RO;
  PyObject *const views[5] = {
      view_or_none(self, p, p->data, writable),     view_or_none(self, p, p->gradient, writable),
      view_or_none(self, p, p->moment1, only_read), view_or_none(self, p, p->moment2, only_read),
      view_or_none(self, p, p->average, only_read),
  };
  PyObject *row = NULL;
  if (views[0] && views[1] && views[2] && views[3] && views[4]) {
    row = Py_BuildValue("(sOOOOO)", p->name, views[0], views[1], views[2], views[3], views[4]);
  }
  for (int i = 0; i < 5; i++) Py_XDECREF(views[i]);
  return row;
}

/* parameters() -> a tuple with one row for each */
PyObject *model_parameters(PyObject *self, PyObject *args) {
  (void)args;
  rp_model *const core = core_of(self);
  int64_t count;
  Py_BEGIN_ALLOW_THREADS
  count = rp_model_parameter_count(core);
  Py_END_ALLOW_THREADS
  PyObject *const rows = PyTuple_New((Py_ssize_t)count);
  for (int64_t i = 0; rows != NULL && i < count; i++) {
    rp_parameter parameter = {.struct_size = sizeof parameter};
    rp_status status;
    Py_BEGIN_ALLOW_THREADS
    status = rp_model_parameter(core, i, &parameter);
    Py_END_ALLOW_THREADS
    PyObject *const row = status == RP_OK ? views_of(self, &parameter) : raise_from(self, status);
    if (row == NULL || PyTuple_SetItem(rows, (Py_ssize_t)i, row) < 0) {
      Py_DECREF(rows);
      return NULL;
    }
  }
  return rows;
}

/* ---- what it computed ---------------------------------------------------------------------- */

/* A new array that a call has filled, or its failure. */
static PyObject *array_or_error(PyObject *self, rp_status status, PyObject *array) {
  if (status == RP_OK) return array;
  Py_DECREF(array);
  return raise_from(self, status);
}

/* score(batch) -> float32 (places,), bool (places,) */
PyObject *model_score(PyObject *self, PyObject *object) {
  rp_model *const core = core_of(self);
  rp_batch batch;
  rp_status status;
  int64_t places;
  if (!batch_of(self, object, &batch, &places)) return NULL;
  npy_intp shape[1] = {(npy_intp)places};
  PyObject *const scores = PyArray_SimpleNew(1, shape, NPY_FLOAT32);
  PyObject *const hits = PyArray_SimpleNew(1, shape, NPY_BOOL);
  PyObject *const both = scores != NULL && hits != NULL ? PyTuple_Pack(2, scores, hits) : NULL;
  Py_XDECREF(scores);
  Py_XDECREF(hits);
  if (both == NULL) return NULL;
  rp_real *const to = PyArray_DATA((PyArrayObject *)scores);
  int8_t *const hit = PyArray_DATA((PyArrayObject *)hits);
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_score(core, &batch, to, hit);
  Py_END_ALLOW_THREADS
  return array_or_error(self, status, both);
}

/* hidden(batch) -> float32 (places, C) */
PyObject *model_hidden(PyObject *self, PyObject *object) {
  rp_model *const core = core_of(self);
  rp_batch batch;
  rp_status status;
  int64_t places;
  if (!batch_of(self, object, &batch, &places)) return NULL;
  npy_intp shape[2] = {(npy_intp)places, (npy_intp)((model *)self)->width};
  PyObject *const hidden = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
  if (hidden == NULL) return NULL;
  rp_real *const to = PyArray_DATA((PyArrayObject *)hidden);
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_hidden(core, &batch, to);
  Py_END_ALLOW_THREADS
  return array_or_error(self, status, hidden);
}

/* The tokens of a sentence on one side; what cannot be is libcore's to refuse. */
static npy_intp tokens_of(const int64_t *offsets, int64_t sentence) {
  const int64_t n = offsets == NULL ? 0 : offsets[sentence + 1] - offsets[sentence];
  return n > 0 ? (npy_intp)n : 0;
}

/* attention_map(batch, kind, layer, head, sentence, show) -> float32 (queries, keys) */
PyObject *model_attention_map(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  PyObject *object;
  rp_batch batch;
  rp_status status;
  int kind, show;
  long long layer, head, sentence;
  int64_t places;
  if (!PyArg_ParseTuple(args, "OiLLLi:attention_map", &object, &kind, &layer, &head, &sentence,
                        &show)) {
    return NULL;
  }
  if (!batch_of(self, object, &batch, &places)) return NULL;
  if (sentence < 0 || sentence >= batch.sentences) {
    PyErr_Format(PyExc_ValueError, "sentence: expected 0 to below %lld, got %lld",
                 (long long)batch.sentences, sentence);
    return NULL;
  }
  const int64_t *const queries =
      kind == RP_ATTENTION_ENCODER ? batch.source_offsets : batch.target_offsets;
  const int64_t *const keys =
      kind == RP_ATTENTION_DECODER ? batch.target_offsets : batch.source_offsets;
  npy_intp shape[2] = {tokens_of(queries, sentence), tokens_of(keys, sentence)};
  PyObject *const map = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
  if (map == NULL) return NULL;
  rp_real *const to = PyArray_DATA((PyArrayObject *)map);
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_attention_map(core, &batch, kind, layer, head, sentence, show, to);
  Py_END_ALLOW_THREADS
  return array_or_error(self, status, map);
}
