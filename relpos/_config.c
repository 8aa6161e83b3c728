/* SPDX-License-Identifier: Apache-2.0
 *
 * _config.c: configurations as pairs of name and text.
 *
 * The one table of fields is libcore's: nothing here knows one of them by name.
 */
#include "_core.h"

enum { TEXT = 64 }; /* room for the text of a field */

/* ---- from pairs and to pairs ------------------------------------------------------- */

int take_config(PyObject *module, PyObject *pairs, rp_config *to) {
  if (!PyTuple_Check(pairs)) {
    PyErr_SetString(PyExc_TypeError, "config: expected a tuple of pairs (name, text)");
    return 0;
  }
  const int64_t count = PyTuple_Size(pairs);
  const char **const texts = PyMem_Calloc((size_t)count + 1, 2 * sizeof *texts);
  rp_status status = RP_OK;
  if (texts == NULL) {
    PyErr_NoMemory();
    return 0;
  }
  for (int64_t i = 0; i < count; i++) {
    PyObject *const pair = PyTuple_GetItem(pairs, (Py_ssize_t)i);
    const char **const text = &texts[2 * i];
    if (!PyTuple_Check(pair)) {
      PyErr_SetString(PyExc_TypeError, "config: expected pairs (name, text)");
    } else {
      (void)PyArg_ParseTuple(pair, "ss:config", &text[0], &text[1]);
    }
    if (PyErr_Occurred() != NULL) {
      PyMem_Free(texts);
      return 0;
    }
  }
  Py_BEGIN_ALLOW_THREADS
  *to = rp_config_default();
  for (int64_t i = 0; i < count && status == RP_OK; i++) {
    status = rp_config_set(to, texts[2 * i], texts[2 * i + 1]);
  }
  if (status == RP_OK) status = rp_config_check(to);
  Py_END_ALLOW_THREADS
  PyMem_Free(texts);
  if (status != RP_OK) raise_status(module, status);
  return status == RP_OK;
}

/* A tuple of (name, text), one for each field. */
static PyObject *pairs_of(PyObject *module, const rp_config *config) {
  PyObject *list = PyList_New(0);
  rp_status status = RP_OK;
  for (int field = 0; list != NULL; field++) {
    const char *name;
    char text[TEXT] = "";
    Py_BEGIN_ALLOW_THREADS
    name = rp_config_field(field);
    if (name != NULL) status = rp_config_get(config, name, text, sizeof text);
    Py_END_ALLOW_THREADS
    if (name == NULL) break;
    add_item(&list,
             status == RP_OK ? Py_BuildValue("(ss)", name, text) : raise_status(module, status));
  }
  return tuple_from(list);
}

static PyObject *pairs_or_error(PyObject *module, rp_status status, const rp_config *config) {
  return status == RP_OK ? pairs_of(module, config) : raise_status(module, status);
}

int take_limits(PyObject *object, rp_limits *to) {
  long long tokens, sentences;
  *to = rp_limits_default();
  if (!PyTuple_Check(object)) {
    PyErr_SetString(PyExc_TypeError,
                    "limits: expected a tuple (tokens, sentences, training, recompute, device, "
                    "precision)");
    return 0;
  }
  if (!PyArg_ParseTuple(object, "LLppsi:limits", &tokens, &sentences, &to->training, &to->recompute,
                        &to->device, &to->precision)) {
    return 0;
  }
  to->tokens = tokens;
  to->sentences = sentences;
  return 1;
}

/* ---- functions of the module ------------------------------------------------------- */

/* config_default() -> pairs */
PyObject *config_default(PyObject *module, PyObject *args) {
  (void)args;
  rp_config config;
  Py_BEGIN_ALLOW_THREADS
  config = rp_config_default();
  Py_END_ALLOW_THREADS
  return pairs_of(module, &config);
}

/* config_preset(name) -> pairs */
PyObject *config_preset(PyObject *module, PyObject *args) {
  const char *name;
  rp_config config;
  rp_status status;
  if (!PyArg_ParseTuple(args, "s:config_preset", &name)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_config_preset(name, &config);
  Py_END_ALLOW_THREADS
  return pairs_or_error(module, status, &config);
}

/* config_check(pairs) -> pairs of a whole and possible configuration */
PyObject *config_check(PyObject *module, PyObject *args) {
  PyObject *pairs;
  rp_config config;
  if (!PyArg_ParseTuple(args, "O:config_check", &pairs)) return NULL;
  return take_config(module, pairs, &config) ? pairs_of(module, &config) : NULL;
}

/* config_load(path) -> pairs */
PyObject *config_load(PyObject *module, PyObject *args) {
  PyObject *path;
  rp_config config;
  rp_status status;
  if (!PyArg_ParseTuple(args, "O&:config_load", PyUnicode_FSConverter, &path)) return NULL;
  const char *const bytes = PyBytes_AsString(path);
  Py_BEGIN_ALLOW_THREADS
  status = rp_config_load(bytes, &config);
  Py_END_ALLOW_THREADS
  Py_DECREF(path);
  return pairs_or_error(module, status, &config);
}

/* preset_names() -> tuple of str */
PyObject *preset_names(PyObject *module, PyObject *args) {
  (void)module, (void)args;
  PyObject *list = PyList_New(0);
  for (int index = 0; list != NULL; index++) {
    const char *name;
    Py_BEGIN_ALLOW_THREADS
    name = rp_preset_name(index);
    Py_END_ALLOW_THREADS
    if (name == NULL) break;
    add_item(&list, PyUnicode_FromString(name));
  }
  return tuple_from(list);
}

/* learning_rate(pairs, step) -> float */
PyObject *learning_rate(PyObject *module, PyObject *args) {
  PyObject *pairs;
  long long step;
  rp_config config;
  double rate;
  if (!PyArg_ParseTuple(args, "OL:learning_rate", &pairs, &step)) return NULL;
  if (step < 1) {
    PyErr_Format(PyExc_ValueError, "step: expected 1 or more, got %lld", step);
    return NULL;
  }
  if (!take_config(module, pairs, &config)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  rate = rp_learning_rate(&config, step);
  Py_END_ALLOW_THREADS
  return PyFloat_FromDouble(rate);
}

/* model_memory(pairs, limits) -> (parameters, gradients, moments, average, constants,
 *                                 activations, workspace, total) */
PyObject *model_memory(PyObject *module, PyObject *args) {
  PyObject *pairs, *bounds;
  rp_config config;
  rp_limits limits;
  rp_memory memory = {.struct_size = sizeof memory};
  rp_status status;
  if (!PyArg_ParseTuple(args, "OO:model_memory", &pairs, &bounds)) return NULL;
  if (!take_config(module, pairs, &config) || !take_limits(bounds, &limits)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_model_memory(&config, &limits, &memory);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) return raise_status(module, status);
  return Py_BuildValue("(LLLLLLLL)", (long long)memory.parameters, (long long)memory.gradients,
                       (long long)memory.moments, (long long)memory.average,
                       (long long)memory.constants, (long long)memory.activations,
                       (long long)memory.workspace, (long long)memory.total);
}
