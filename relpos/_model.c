/* SPDX-License-Identifier: Apache-2.0
 *
 * _model.c: the model, as a type of Python: its life, the step, files, the profile. What it
 * shows of itself is in _model_shows.c.
 *
 * Methods take the batch, release the GIL, call libcore and turn its status into an
 * exception. There is no arithmetic here.
 */
#include "_model.h"

void *raise_from(PyObject *self, rp_status status) {
  return raise_status(PyType_GetModule(Py_TYPE(self)), status);
}

PyObject *made_or_raised_from(PyObject *self, PyObject *made, rp_status status) {
  return made_or_raised(PyType_GetModule(Py_TYPE(self)), made, status);
}

int batch_of(PyObject *self, PyObject *object, rp_batch *to, int64_t *places) {
  return take_batch(object, ((model *)self)->has_decoder, to, places);
}

/* In the order of relpos.StepResult. */
static PyObject *result_or_error(PyObject *self, rp_status status, const rp_result *r) {
  if (status != RP_OK) return raise_from(self, status);
  return Py_BuildValue("(ddLdddLLNs)", r->loss, r->nll, (long long)r->tokens, r->accuracy,
                       r->gradient_norm, r->learning_rate, (long long)r->step,
                       (long long)r->attempt, PyBool_FromLong(r->finite), r->first_bad);
}

/* ---- life -------------------------------------------------------------------------- */

/* The object for a model that was made, which it owns from now on. */
static PyObject *object_or_error(PyTypeObject *type, rp_status status, rp_model *core) {
  if (status != RP_OK) return raise_status(PyType_GetModule(type), status);
  model *const self = (model *)PyType_GenericAlloc(type, 0);
  if (self == NULL) {
    Py_BEGIN_ALLOW_THREADS
    rp_model_free(core);
    Py_END_ALLOW_THREADS
    return NULL;
  }
  const rp_config *const config = rp_model_config(core);
  self->core = core;
  self->width = config->width;
  self->has_decoder = config->decoder.layers > 0;
  return (PyObject *)self;
}

/* Model(pairs, limits) */
static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  PyObject *pairs, *bounds;
  rp_config config;
  rp_limits limits;
  rp_model *core = NULL;
  rp_status status;
  static char *none[] = {"", "", NULL};
  if (!PyArg_ParseTupleAndKeywords(args, names, "OO:Model", none, &pairs, &bounds)) return NULL;
  if (!take_config(PyType_GetModule(type), pairs, &config)) return NULL;
  if (!take_limits(bounds, &limits)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_create(&config, &limits, &core);
  Py_END_ALLOW_THREADS
  return object_or_error(type, status, core);
}

/* Model.open(limits, path) */
static PyObject *model_open(PyObject *type, PyObject *args) {
  PyObject *path, *bounds;
  rp_limits limits;
  rp_model *core = NULL;
  rp_status status;
  if (!PyArg_ParseTuple(args, "OO&:open", &bounds, PyUnicode_FSConverter, &path)) return NULL;
  if (!take_limits(bounds, &limits)) {
    Py_DECREF(path);
    return NULL;
  }
  const char *const bytes = PyBytes_AsString(path);
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_open(bytes, &limits, &core);
  Py_END_ALLOW_THREADS
  Py_DECREF(path);
  return object_or_error((PyTypeObject *)type, status, core);
}

static int model_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  return 0;
}

static void model_dealloc(PyObject *self) {
  PyTypeObject *const type = Py_TYPE(self);
  rp_model *const core = core_of(self);
  PyObject_GC_UnTrack(self);
  Py_BEGIN_ALLOW_THREADS
  rp_model_free(core);
  Py_END_ALLOW_THREADS
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

/* limits() -> (tokens, sentences, training, device, precision) */
static PyObject *model_limits(PyObject *self, PyObject *args) {
  (void)args;
  const rp_limits *const limits = rp_model_limits(core_of(self));
  return Py_BuildValue("(LLOsi)", (long long)limits->tokens, (long long)limits->sentences,
                       limits->training ? Py_True : Py_False, limits->device, limits->precision);
}

/* ---- the step and its parts ------------------------------------------------------------- */

/* result_or_error, or None of a call that did not wait for its result. */
static PyObject *result_if(PyObject *self, rp_status status, int wait, const rp_result *r) {
  return wait || status != RP_OK ? result_or_error(self, status, r) : Py_NewRef(Py_None);
}

/* step((batch, ...), wait=True) -> result or None */
static PyObject *model_step(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  PyObject *batches, *done = NULL;
  rp_result result = {.struct_size = sizeof result};
  rp_status status;
  int64_t places;
  int wait = 1;
  if (!PyArg_ParseTuple(args, "O!|p:step", &PyTuple_Type, &batches, &wait)) return NULL;
  const int64_t count = PyTuple_Size(batches);
  rp_batch *const list = PyMem_Calloc((size_t)count + 1, sizeof *list);
  if (list == NULL) return PyErr_NoMemory();
  for (int64_t i = 0; i < count; i++) {
    if (!batch_of(self, PyTuple_GetItem(batches, (Py_ssize_t)i), &list[i], &places)) goto done;
  }
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_step(core, list, count, wait ? &result : NULL);
  Py_END_ALLOW_THREADS
  done = result_if(self, status, wait, &result);
done:
  PyMem_Free(list);
  return done;
}

/* forward(batch, dropout, average) -> result; not both */
static PyObject *model_forward(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  PyObject *object;
  rp_batch batch;
  rp_result result = {.struct_size = sizeof result};
  rp_status status;
  int dropout, average;
  int64_t places;
  if (!PyArg_ParseTuple(args, "Opp:forward", &object, &dropout, &average)) return NULL;
  if (!batch_of(self, object, &batch, &places)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  if (average) status = rp_model_forward_average(core, &batch, &result);
  else status = rp_model_forward(core, &batch, dropout, &result);
  Py_END_ALLOW_THREADS
  return result_or_error(self, status, &result);
}

/* backward(batch, wait=True) -> result or None */
static PyObject *model_backward(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  PyObject *object;
  rp_batch batch;
  rp_result result = {.struct_size = sizeof result};
  rp_status status;
  int64_t places;
  int wait = 1;
  if (!PyArg_ParseTuple(args, "O|p:backward", &object, &wait)) return NULL;
  if (!batch_of(self, object, &batch, &places)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_backward(core, &batch, wait ? &result : NULL);
  Py_END_ALLOW_THREADS
  return result_if(self, status, wait, &result);
}

/* update(wait=True) -> result or None */
static PyObject *model_update(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  rp_result result = {.struct_size = sizeof result};
  rp_status status;
  int wait = 1;
  if (!PyArg_ParseTuple(args, "|p:update", &wait)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_update(core, wait ? &result : NULL);
  Py_END_ALLOW_THREADS
  return result_if(self, status, wait, &result);
}

/* result() -> result */
static PyObject *model_result(PyObject *self, PyObject *args) {
  (void)args;
  rp_model *const core = core_of(self);
  rp_result result = {.struct_size = sizeof result};
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_result(core, &result);
  Py_END_ALLOW_THREADS
  return result_or_error(self, status, &result);
}

/* results() -> (begun, done) */
static PyObject *model_results(PyObject *self, PyObject *args) {
  (void)args;
  rp_model *const core = core_of(self);
  int64_t begun = 0, done = 0;
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_results(core, &begun, &done);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) return raise_from(self, status);
  return Py_BuildValue("(LL)", (long long)begun, (long long)done);
}

static PyObject *model_zero_gradients(PyObject *self, PyObject *args) {
  (void)args;
  rp_model *const core = core_of(self);
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_zero_gradients(core);
  Py_END_ALLOW_THREADS
  return made_or_raised_from(self, Py_NewRef(Py_None), status);
}

/* counters() -> (step, attempt) */
static PyObject *model_counters(PyObject *self, PyObject *args) {
  (void)args;
  rp_model *const core = core_of(self);
  int64_t step = 0, attempt = 0;
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_counters(core, &step, &attempt);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) return raise_from(self, status);
  return Py_BuildValue("(LL)", (long long)step, (long long)attempt);
}

static PyObject *model_set_counters(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  long long step, attempt;
  rp_status status;
  if (!PyArg_ParseTuple(args, "LL:set_counters", &step, &attempt)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_set_counters(core, step, attempt);
  Py_END_ALLOW_THREADS
  return made_or_raised_from(self, Py_NewRef(Py_None), status);
}

/* ---- files -------------------------------------------------------------------------------- */

/* (path, what), what one of SAVE_..., for rp_model_save or rp_model_load */
static PyObject *with_file(PyObject *self, PyObject *args, const char *format,
                           rp_status (*rp_file_call)(rp_model *, const char *, int)) {
  rp_model *const core = core_of(self);
  PyObject *path;
  int what;
  rp_status status;
  if (!PyArg_ParseTuple(args, format, PyUnicode_FSConverter, &path, &what)) return NULL;
  const char *const bytes = PyBytes_AsString(path);
  Py_BEGIN_ALLOW_THREADS
  status = rp_file_call(core, bytes, what);
  Py_END_ALLOW_THREADS
  Py_DECREF(path);
  return made_or_raised_from(self, Py_NewRef(Py_None), status);
}

/* save(path, what) */
static PyObject *model_save(PyObject *self, PyObject *args) {
  return with_file(self, args, "O&i:save", rp_model_save);
}

/* load(path, what) */
static PyObject *model_load(PyObject *self, PyObject *args) {
  return with_file(self, args, "O&i:load", rp_model_load);
}

/* ---- profile ------------------------------------------------------------------------------ */

/* profile(on) */
static PyObject *model_profile(PyObject *self, PyObject *args) {
  rp_model *const core = core_of(self);
  int on;
  rp_status status;
  if (!PyArg_ParseTuple(args, "p:profile", &on)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_profile(core, on);
  Py_END_ALLOW_THREADS
  return made_or_raised_from(self, Py_NewRef(Py_None), status);
}

static PyObject *profile_line(PyObject *self, int64_t index) {
  rp_model *const core = core_of(self);
  rp_profile_line line = {.struct_size = sizeof line};
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_profile_line(core, index, &line);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) return raise_from(self, status);
  return Py_BuildValue("(sNLddd)", line.name, PyBool_FromLong(line.backward), (long long)line.calls,
                       line.seconds, line.operations, line.bytes);
}

/* profile_lines() -> ((name, backward, calls, seconds, operations, bytes), ...) */
static PyObject *model_profile_lines(PyObject *self, PyObject *args) {
  (void)args;
  rp_model *const core = core_of(self);
  int64_t count = 0;
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_profile_count(core, &count);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) return raise_from(self, status);
  PyObject *lines = PyList_New(0);
  for (int64_t i = 0; lines != NULL && i < count; i++) add_item(&lines, profile_line(self, i));
  return tuple_from(lines);
}

/* ---- the type ------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"open", model_open, METH_VARARGS | METH_CLASS, NULL},
    {"limits", model_limits, METH_NOARGS, NULL},
    {"read", model_read, METH_VARARGS, NULL},
    {"place", model_place, METH_VARARGS, NULL},
    {"write", model_write, METH_VARARGS, NULL},
    {"parameters", model_parameters, METH_NOARGS, NULL},
    {"step", model_step, METH_VARARGS, NULL},
    {"forward", model_forward, METH_VARARGS, NULL},
    {"backward", model_backward, METH_VARARGS, NULL},
    {"update", model_update, METH_VARARGS, NULL},
    {"result", model_result, METH_NOARGS, NULL},
    {"results", model_results, METH_NOARGS, NULL},
    {"zero_gradients", model_zero_gradients, METH_NOARGS, NULL},
    {"counters", model_counters, METH_NOARGS, NULL},
    {"set_counters", model_set_counters, METH_VARARGS, NULL},
    {"score", model_score, METH_O, NULL},
    {"hidden", model_hidden, METH_O, NULL},
    {"attention_map", model_attention_map, METH_VARARGS, NULL},
    {"attention_maps", model_attention_maps, METH_VARARGS, NULL},
    {"attention_parts", model_attention_parts, METH_VARARGS, NULL},
    {"alignments", model_alignments, METH_VARARGS, NULL},
    {"save", model_save, METH_VARARGS, NULL},
    {"load", model_load, METH_VARARGS, NULL},
    {"profile", model_profile, METH_VARARGS, NULL},
    {"profile_lines", model_profile_lines, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)model_new},
    {Py_tp_dealloc, (void *)model_dealloc},
    {Py_tp_traverse, (void *)model_traverse},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "relpos._core.Model",
    .basicsize = sizeof(model),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

PyObject *model_type_new(PyObject *module) { return PyType_FromModuleAndSpec(module, &spec, NULL); }
