/* SPDX-License-Identifier: Apache-2.0
 *
 * _model_shows.c: what a model shows of itself: its parameters, scores, hidden states, attention
 * maps and alignments.
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
  PyObject *rows = PyList_New(0);
  for (int64_t i = 0; rows != NULL && i < count; i++) {
    rp_parameter parameter = {.struct_size = sizeof parameter};
    rp_status status;
    Py_BEGIN_ALLOW_THREADS
    status = rp_model_parameter(core, i, &parameter);
    Py_END_ALLOW_THREADS
    add_item(&rows, status == RP_OK ? views_of(self, &parameter) : raise_from(self, status));
  }
  return tuple_from(rows);
}

/* ---- what it computed ---------------------------------------------------------------------- */

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
  return made_or_raised_from(self, both, status);
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
  return made_or_raised_from(self, hidden, status);
}

/* One parameter as libcore describes it; false, with an exception, where there is none. */
static int describe(PyObject *self, long long index, rp_parameter *to) {
  rp_model *const core = core_of(self);
  rp_status status;
  *to = (rp_parameter){.struct_size = sizeof *to};
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_parameter(core, index, to);
  Py_END_ALLOW_THREADS
  if (status == RP_OK) return 1;
  raise_from(self, status);
  return 0;
}

/* The arguments (index, array) of a parameter's array, and its shape; -1 with an exception, or how
 * many axes it has. */
static int array_asked_for(PyObject *self, PyObject *args, const char *format, long long *index,
                           int *array, npy_intp shape[3]) {
  rp_parameter parameter;
  if (!PyArg_ParseTuple(args, format, index, array) || !describe(self, *index, &parameter)) {
    return -1;
  }
  for (int i = 0; i < parameter.dimensions; i++) shape[i] = (npy_intp)parameter.shape[i];
  return parameter.dimensions;
}

/* read(index, array) -> a copy, float32 in the parameter's shape; array one of RP_ARRAY_... */
PyObject *model_read(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  rp_status status;
  long long index;
  int array;
  npy_intp shape[3];
  const int axes = array_asked_for(self, args, "Li:read", &index, &array, shape);
  if (axes < 0) return NULL;
  PyObject *const copy = PyArray_SimpleNew(axes, shape, NPY_FLOAT32);
  if (copy == NULL) return NULL;
  rp_real *const to = PyArray_DATA((PyArrayObject *)copy);
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_read(core, index, array, to);
  Py_END_ALLOW_THREADS
  return made_or_raised_from(self, copy, status);
}

/* place(index, array) -> (address, shape): where it lies itself, on a GPU too */
PyObject *model_place(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  rp_status status;
  long long index;
  int array;
  npy_intp shape[3];
  rp_real *place;
  const int axes = array_asked_for(self, args, "Li:place", &index, &array, shape);
  if (axes < 0) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_place(core, index, array, &place);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) return raise_from(self, status);
  return Py_BuildValue("(KN)", (unsigned long long)(uintptr_t)place,
                       PyArray_IntTupleFromIntp(axes, shape));
}

/* write(index, array, values), float32 in the parameter's shape */
PyObject *model_write(PyObject *self, PyObject *args) {
  static const char *const axes[] = {"", "I", "IJ", "HIJ"};
  rp_model *const core = core_of(self);
  rp_parameter parameter;
  PyObject *values;
  rp_status status;
  long long index;
  int array;
  view from = {0};
  sizes s = sizes_unknown();
  if (!PyArg_ParseTuple(args, "LiO:write", &index, &array, &values) ||
      !describe(self, index, &parameter)) {
    return NULL;
  }
  const char *const own = axes[parameter.dimensions];
  for (int i = 0; i < parameter.dimensions; i++) s.of[(int)own[i]] = parameter.shape[i];
  if (!take(values, "values", own, TAKE_CONTIGUOUS, &s, &from)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_write(core, index, array, from.data);
  Py_END_ALLOW_THREADS
  return made_or_raised_from(self, Py_NewRef(Py_None), status);
}

/* ---- attention maps ------------------------------------------------------------------------ */

/* The tokens of a sentence on one side; what cannot be is libcore's to refuse. */
static int64_t tokens_of(const int64_t *offsets, int64_t sentence, int64_t sentences) {
  if (offsets == NULL || offsets[sentence] < 0 || offsets[sentence + 1] > offsets[sentences]) {
    return 0;
  }
  const int64_t n = offsets[sentence + 1] - offsets[sentence];
  return n > 0 ? n : 0;
}

/* Rows and columns of a map of one sentence. */
static int map_shape(const rp_batch *batch, int kind, long long sentence, npy_intp *rows,
                     npy_intp *columns) {
  const int64_t *const queries =
      kind == RP_ATTENTION_ENCODER ? batch->source_offsets : batch->target_offsets;
  const int64_t *const keys =
      kind == RP_ATTENTION_DECODER ? batch->target_offsets : batch->source_offsets;
  if (sentence < 0 || sentence >= batch->sentences) {
    PyErr_Format(PyExc_ValueError, "sentence: expected 0 to below %lld, got %lld",
                 (long long)batch->sentences, sentence);
    return 0;
  }
  *rows = (npy_intp)tokens_of(queries, sentence, batch->sentences);
  *columns = (npy_intp)tokens_of(keys, sentence, batch->sentences);
  return 1;
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
  npy_intp shape[2];
  if (!PyArg_ParseTuple(args, "OiLLLi:attention_map", &object, &kind, &layer, &head, &sentence,
                        &show)) {
    return NULL;
  }
  if (!batch_of(self, object, &batch, &places) ||
      !map_shape(&batch, kind, sentence, &shape[0], &shape[1])) {
    return NULL;
  }
  PyObject *const map = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
  if (map == NULL) return NULL;
  rp_real *const to = PyArray_DATA((PyArrayObject *)map);
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_attention_map(core, &batch, kind, layer, head, sentence, show, to);
  Py_END_ALLOW_THREADS
  return made_or_raised_from(self, map, status);
}

typedef struct map_list {
  rp_model_map *maps; /* to be freed */
  int64_t count;
} map_list;

/* Integers (count,), which None is not. */
static int take_list(PyObject *object, const char *name, const char *axis, sizes *s,
                     const int64_t **to) {
  if (!take_int64(object, name, axis, s, to)) return 0;
  if (*to != NULL) return 1;
  PyErr_Format(PyExc_TypeError, "%s: expected int64, got None", name);
  return 0;
}

/* The array for one item of `wanted`, and the maps that fill it. */
static PyObject *room_for(const rp_batch *batch, PyObject *item, map_list *list) {
  PyObject *layers, *heads;
  int kind, show;
  long long sentence;
  sizes s = sizes_unknown();
  const int64_t *layer = NULL, *head = NULL;
  npy_intp shape[4];
  if (!PyTuple_Check(item)) {
    PyErr_SetString(PyExc_TypeError, "wanted: expected tuples");
    return NULL;
  }
  if (!PyArg_ParseTuple(item, "iiLOO:wanted", &kind, &show, &sentence, &layers, &heads) ||
      !take_list(layers, "layers", "I", &s, &layer) || !take_list(heads, "heads", "J", &s, &head) ||
      !map_shape(batch, kind, sentence, &shape[2], &shape[3])) {
    return NULL;
  }
  shape[0] = (npy_intp)s.of['I'];
  shape[1] = (npy_intp)s.of['J'];
  PyObject *const array = PyArray_SimpleNew(4, shape, NPY_FLOAT32);
  if (array == NULL) return NULL;
  const size_t more = (size_t)(shape[0] * shape[1]);
  rp_model_map *const maps =
      PyMem_Realloc(list->maps, ((size_t)list->count + more + 1) * sizeof *maps);
  if (maps == NULL) {
    Py_DECREF(array);
    return PyErr_NoMemory();
  }
  list->maps = maps;
  rp_real *to = PyArray_DATA((PyArrayObject *)array);
  for (npy_intp i = 0; i < shape[0] * shape[1]; i++, to += shape[2] * shape[3]) {
    rp_model_map *const map = &maps[list->count++];
    *map = rp_model_map_default();
    map->kind = kind;
    map->show = show;
    map->sentence = sentence;
    map->layer = layer[i / shape[1]];
    map->head = head[i % shape[1]];
    map->to = to;
  }
  return array;
}

/* attention_maps(batch, dropout, wanted) -> float32 (layers, heads, queries, keys) for each of
 * wanted, a tuple of (kind, show, sentence, layers, heads) with int64 arrays of layers and heads */
PyObject *model_attention_maps(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  PyObject *object, *wanted;
  rp_batch batch;
  rp_status status;
  int dropout;
  int64_t places;
  map_list list = {NULL, 0};
  if (!PyArg_ParseTuple(args, "OpO!:attention_maps", &object, &dropout, &PyTuple_Type, &wanted) ||
      !batch_of(self, object, &batch, &places)) {
    return NULL;
  }
  const Py_ssize_t count = PyTuple_Size(wanted);
  PyObject *arrays = PyList_New(0);
  for (Py_ssize_t i = 0; arrays != NULL && i < count; i++) {
    add_item(&arrays, room_for(&batch, PyTuple_GetItem(wanted, i), &list));
  }
  PyObject *const found = tuple_from(arrays);
  if (found == NULL) {
    PyMem_Free(list.maps);
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_attention_maps(core, &batch, dropout, list.maps, list.count);
  Py_END_ALLOW_THREADS
  PyMem_Free(list.maps);
  return made_or_raised_from(self, found, status);
}

/* attention_parts(kind) -> ((name, show), ...), none where the model has no such attention */
PyObject *model_attention_parts(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  int kind, show = 0;
  if (!PyArg_ParseTuple(args, "i:attention_parts", &kind)) return NULL;
  PyObject *parts = PyList_New(0);
  for (int i = 0; parts != NULL; i++) {
    const char *name;
    Py_BEGIN_ALLOW_THREADS
    name = rp_model_attention_part(core, kind, i, &show);
    Py_END_ALLOW_THREADS
    if (name == NULL) break;
    add_item(&parts, Py_BuildValue("(si)", name, show));
  }
  return tuple_from(parts);
}

/* ---- alignments ---------------------------------------------------------------------------- */

/* alignments(batch, layers, heads) -> float32 (all of them,); heads None: all */
PyObject *model_alignments(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  PyObject *object, *layers, *heads;
  rp_batch batch;
  rp_status status;
  sizes s = sizes_unknown();
  const int64_t *layer = NULL, *head = NULL;
  int64_t places, count = 0;
  if (!PyArg_ParseTuple(args, "OOO:alignments", &object, &layers, &heads) ||
      !take_list(layers, "layers", "I", &s, &layer) ||
      !take_int64(heads, "heads", "J", &s, &head) || !batch_of(self, object, &batch, &places)) {
    return NULL;
  }
  for (int64_t b = 0; b < batch.sentences; b++) {
    count += tokens_of(batch.target_offsets, b, batch.sentences) *
             tokens_of(batch.source_offsets, b, batch.sentences);
  }
  npy_intp shape[1] = {(npy_intp)count};
  PyObject *const weights = PyArray_SimpleNew(1, shape, NPY_FLOAT32);
  if (weights == NULL) return NULL;
  rp_real *const to = PyArray_DATA((PyArrayObject *)weights);
  const int64_t layer_count = s.of['I'], head_count = head == NULL ? 0 : s.of['J'];
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_alignments(core, &batch, layer, layer_count, head, head_count, to);
  Py_END_ALLOW_THREADS
  return made_or_raised_from(self, weights, status);
}
