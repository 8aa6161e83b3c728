/* SPDX-License-Identifier: Apache-2.0
 *
 * _decode.c: the decoder, as a type of Python: searches, and the same one token at a time.
 *
 * A decoder holds its models, so that they live as long as it does. That two threads do not meet
 * in it is seen to here: results lie in the decoder until they have been copied.
 */
#include "_model.h"

#include <stdatomic.h>
#include <string.h>

typedef struct decoder {
  PyObject_HEAD rp_decoder *core;
  PyObject *models; /* a tuple */
  int64_t vocabulary;
  atomic_flag busy;
} decoder;

/* By RP_PENALTY_..., as relpos.Search names them. */
static const char *const penalties[] = {"none", "wu", "power"};
enum { PENALTIES = sizeof penalties / sizeof penalties[0] };

/* ---- one thread at a time ---------------------------------------------------------- */

static int enter(PyObject *self) {
  if (!atomic_flag_test_and_set(&((decoder *)self)->busy)) return 1;
  PyErr_SetString(PyExc_RuntimeError, "decoder: is at work in another thread");
  return 0;
}

static void leave(PyObject *self) { atomic_flag_clear(&((decoder *)self)->busy); }

/* ---- life -------------------------------------------------------------------------- */

/* Decoder(models) */
static PyObject *decoder_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  PyObject *const module = PyType_GetModule(type);
  PyObject *models;
  rp_decoder *core = NULL;
  rp_status status;
  static char *none[] = {"", NULL};
  if (!PyArg_ParseTupleAndKeywords(args, names, "O!:Decoder", none, &PyTuple_Type, &models)) {
    return NULL;
  }
  const int64_t count = PyTuple_Size(models);
  rp_model **const cores = PyMem_Calloc((size_t)count + 1, sizeof *cores);
  if (cores == NULL) return PyErr_NoMemory();
  for (int64_t i = 0; i < count; i++) {
    PyObject *const each = PyTuple_GetItem(models, (Py_ssize_t)i);
    if (!PyObject_TypeCheck(each, model_type_of(module))) {
      PyErr_Format(PyExc_TypeError, "models[%lld]: expected relpos._core.Model", (long long)i);
      PyMem_Free(cores);
      return NULL;
    }
    cores[i] = core_of(each);
  }
  Py_BEGIN_ALLOW_THREADS
  status = rp_decoder_create(cores, count, &core);
  Py_END_ALLOW_THREADS
  PyMem_Free(cores);
  if (status != RP_OK) return raise_status(module, status);
  decoder *const self = (decoder *)PyType_GenericAlloc(type, 0);
  if (self == NULL) {
    Py_BEGIN_ALLOW_THREADS
    rp_decoder_free(core);
    Py_END_ALLOW_THREADS
    return NULL;
  }
  self->core = core;
  self->models = Py_NewRef(models);
  self->vocabulary = rp_model_config(core_of(PyTuple_GetItem(models, 0)))->target_vocabulary;
  atomic_flag_clear(&self->busy);
  return (PyObject *)self;
}

static int decoder_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((decoder *)self)->models);
  return 0;
}

/* There is no clear: models refer to nothing, so that no cycle goes through a decoder; and it
 * needs them to the end. */
static void decoder_dealloc(PyObject *self) {
  PyTypeObject *const type = Py_TYPE(self);
  rp_decoder *const core = ((decoder *)self)->core;
  PyObject_GC_UnTrack(self);
  Py_BEGIN_ALLOW_THREADS
  rp_decoder_free(core);
  Py_END_ALLOW_THREADS
  Py_XDECREF(((decoder *)self)->models);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

/* ---- a search ----------------------------------------------------------------------- */

/* search_default() -> {name: value}, the fields of rp_search as relpos.Search has them */
PyObject *search_default(PyObject *module, PyObject *args) {
  (void)module, (void)args;
  const rp_search s = rp_search_default();
  return Py_BuildValue(
      "{s:i,s:i,s:L,s:L,s:s,s:d,s:d,s:L,s:L,s:L,s:L,s:(),s:N,s:d,s:L,s:d,s:K,s:N}", "begin",
      (int)s.begin, "end", (int)s.end, "beam", (long long)s.beam, "n_best", (long long)s.n_best,
      "penalty", penalties[s.penalty], "alpha", s.alpha, "coverage", s.coverage, "min_length",
      (long long)s.min_length, "max_length", (long long)s.max_length, "max_more",
      (long long)s.max_more, "no_repeat", (long long)s.no_repeat, "suppressed", "sample",
      PyBool_FromLong(s.sample), "temperature", s.temperature, "top_k", (long long)s.top_k, "top_p",
      s.top_p, "seed", (unsigned long long)s.seed, "average", PyBool_FromLong(s.average));
}

/* The tuple of the fields in the order above; suppressed: an array, or None. */
static int take_search(PyObject *object, rp_search *to) {
  const char *penalty;
  PyObject *suppressed;
  long long beam, n_best, min_length, max_length, max_more, no_repeat, top_k;
  unsigned long long seed;
  int begin, end;
  sizes s = sizes_unknown();
  *to = rp_search_default();
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError, "search: expected a tuple");
    return 0;
  }
  if (!PyArg_ParseTuple(object, "iiLLsddLLLLOpdLdKp:search", &begin, &end, &beam, &n_best, &penalty,
                        &to->alpha, &to->coverage, &min_length, &max_length, &max_more, &no_repeat,
                        &suppressed, &to->sample, &to->temperature, &top_k, &to->top_p, &seed,
                        &to->average)) {
    return 0;
  }
  to->penalty = 0;
  while (to->penalty < PENALTIES && strcmp(penalty, penalties[to->penalty]) != 0) to->penalty++;
  if (to->penalty == PENALTIES) {
    PyErr_Format(PyExc_ValueError, "penalty: expected none, wu or power, got %s", penalty);
    return 0;
  }
  if (!take_int32(suppressed, "suppressed", "X", &s, &to->suppressed)) return 0;
  to->suppressed_count = to->suppressed == NULL ? 0 : s.of['X'];
  to->begin = begin;
  to->end = end;
  to->beam = beam;
  to->n_best = n_best;
  to->min_length = min_length;
  to->max_length = max_length;
  to->max_more = max_more;
  to->no_repeat = no_repeat;
  to->top_k = top_k;
  to->seed = seed;
  return 1;
}

/* (tokens, score, log_probability, finished) */
static PyObject *hypothesis_of(PyObject *self, int64_t sentence, int64_t rank) {
  rp_hypothesis found = {.struct_size = sizeof found};
  const rp_status status = rp_decoder_result(((decoder *)self)->core, sentence, rank, &found);
  if (status != RP_OK) return raise_from(self, status);
  npy_intp shape[1] = {(npy_intp)found.count};
  PyObject *const tokens = PyArray_SimpleNew(1, shape, NPY_INT32);
  if (tokens == NULL) return NULL;
  if (found.count > 0) {
    memcpy(PyArray_DATA((PyArrayObject *)tokens), found.tokens,
           (size_t)found.count * sizeof *found.tokens);
  }
  return Py_BuildValue("(NddN)", tokens, found.score, found.log_probability,
                       PyBool_FromLong(found.finished));
}

/* The results of a sentence, best first. */
static PyObject *sentence_results(PyObject *self, int64_t sentence) {
  int64_t count = 0;
  const rp_status status = rp_decoder_result_count(((decoder *)self)->core, sentence, &count);
  if (status != RP_OK) return raise_from(self, status);
  PyObject *list = PyList_New(0);
  for (int64_t rank = 0; list != NULL && rank < count; rank++) {
    add_item(&list, hypothesis_of(self, sentence, rank));
  }
  return list;
}

static PyObject *all_results(PyObject *self, int64_t sentences) {
  PyObject *list = PyList_New(0);
  for (int64_t b = 0; list != NULL && b < sentences; b++) {
    add_item(&list, sentence_results(self, b));
  }
  return list;
}

/* search(batch, search) -> [[(tokens, score, log_probability, finished), ...], ...] */
static PyObject *decoder_search(PyObject *self, PyObject *args) {
  rp_decoder *const core = ((decoder *)self)->core;
  PyObject *object, *how, *results = NULL;
  rp_batch batch;
  rp_search search;
  rp_status status;
  int64_t places;
  if (!PyArg_ParseTuple(args, "OO:search", &object, &how)) return NULL;
  if (!take_batch(object, 1, &batch, &places) || !take_search(how, &search)) return NULL;
  if (!enter(self)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_decoder_search(core, &batch, &search);
  Py_END_ALLOW_THREADS
  results = status == RP_OK ? all_results(self, batch.sentences) : raise_from(self, status);
  leave(self);
  return results;
}

/* ---- one token at a time -------------------------------------------------------------- */

static PyObject *logits_new(PyObject *self, int64_t rows) {
  npy_intp shape[2] = {(npy_intp)rows, (npy_intp)((decoder *)self)->vocabulary};
  return PyArray_SimpleNew(2, shape, NPY_FLOAT32);
}

/* begin(batch, most_rows) -> float32 (sentences, vocabulary) */
static PyObject *decoder_begin(PyObject *self, PyObject *args) {
  rp_decoder *const core = ((decoder *)self)->core;
  PyObject *object;
  rp_batch batch;
  rp_status status;
  long long most_rows;
  int64_t places;
  if (!PyArg_ParseTuple(args, "OL:begin", &object, &most_rows)) return NULL;
  if (!take_batch(object, 1, &batch, &places)) return NULL;
  PyObject *const logits = logits_new(self, batch.sentences);
  if (logits == NULL) return NULL;
  if (!enter(self)) {
    Py_DECREF(logits);
    return NULL;
  }
  rp_real *const to = PyArray_DATA((PyArrayObject *)logits);
  Py_BEGIN_ALLOW_THREADS
  status = rp_decoder_begin(core, &batch, most_rows, to);
  Py_END_ALLOW_THREADS
  leave(self);
  return made_or_raised_from(self, logits, status);
}

/* step(parents or None, tokens) -> float32 (rows, vocabulary) */
static PyObject *decoder_step(PyObject *self, PyObject *args) {
  rp_decoder *const core = ((decoder *)self)->core;
  PyObject *from, *said;
  const int64_t *parents;
  const int32_t *tokens;
  rp_status status;
  sizes s = sizes_unknown();
  if (!PyArg_ParseTuple(args, "OO:step", &from, &said)) return NULL;
  if (!take_int32(said, "tokens", "X", &s, &tokens)) return NULL;
  if (tokens == NULL) {
    PyErr_SetString(PyExc_TypeError, "tokens: expected int32 (rows,), got None");
    return NULL;
  }
  if (!take_int64(from, "parents", "X", &s, &parents)) return NULL;
  const int64_t rows = s.of['X'];
  PyObject *const logits = logits_new(self, rows);
  if (logits == NULL) return NULL;
  if (!enter(self)) {
    Py_DECREF(logits);
    return NULL;
  }
  rp_real *const to = PyArray_DATA((PyArrayObject *)logits);
  Py_BEGIN_ALLOW_THREADS
  status = rp_decoder_step(core, rows, parents, tokens, to);
  Py_END_ALLOW_THREADS
  leave(self);
  return made_or_raised_from(self, logits, status);
}

/* ---- the type ------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"search", decoder_search, METH_VARARGS, NULL},
    {"begin", decoder_begin, METH_VARARGS, NULL},
    {"step", decoder_step, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)decoder_new},
    {Py_tp_dealloc, (void *)decoder_dealloc},
    {Py_tp_traverse, (void *)decoder_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "relpos._core.Decoder",
    .basicsize = sizeof(decoder),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

PyObject *decoder_type_new(PyObject *module) {
  return PyType_FromModuleAndSpec(module, &spec, NULL);
}
