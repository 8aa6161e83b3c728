/* SPDX-License-Identifier: Apache-2.0
 *
 * _core.c: libcore for Python.
 *
 * Each function parses its arguments, checks the arrays, releases the GIL, calls
 * libcore and turns its status into an exception. There is no arithmetic here and
 * no conversion. _core.h says which file holds what.
 */
#define RELPOS_IMPORTS_NUMPY
#include "_core.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

/* ---- errors ---------------------------------------------------------------------- */

typedef struct module_state {
  PyObject *device_error;
  PyObject *model_type;
} module_state;

/* What libcore says in words of C, as Python has it; the longer ones first. */
static const renaming in_python[] = {
    {"rp_model_create and rp_model_load make", "without open they make"},
    {"rp_model_memory", "relpos.model_memory"},
    {"rp_model_backward", "backward"},
    {"rp_model_update", "update"},
    {"rp_model_zero_gradients", "zero_gradients"},
    {"rp_model_result", "result"},
    {"rp_decoder_begin", "begin"},
    {"rp_decoder_step", "step"},
    {"rp_set_threads: ", ""},
    {"rp_device_allocate: ", ""},
    {"rp_device_get names them", "relpos.devices names them"},
    {"limits.training=0", "training=False"},
    {"limits.", "the model's "},
    {"=RP_BF16", "='bf16'"},
    {" RP_F32", " 'f32'"},
    {" is NULL", " is None"},
};

/* The sentence with every `from` replaced. Takes the reference; NULL, with an exception. */
static PyObject *renamed(PyObject *sentence, const renaming *names, int count) {
  for (int i = 0; i < count && sentence != NULL; i++) {
    PyObject *const next =
        PyObject_CallMethod(sentence, "replace", "ss", names[i].from, names[i].to);
    Py_DECREF(sentence);
    sentence = next;
  }
  return sentence;
}

void *raise_status(PyObject *module, rp_status status) {
  raise_renamed(module, status, NULL, 0);
  return NULL;
}

PyObject *made_or_raised(PyObject *module, PyObject *made, rp_status status) {
  if (status == RP_OK) return made;
  Py_DECREF(made);
  return raise_status(module, status);
}

void raise_renamed(PyObject *module, rp_status status, const renaming *names, int count) {
  const module_state *state = PyModule_GetState(module);
  PyObject *type = PyExc_SystemError;
  switch (status) {
    case RP_OK: break;
    case RP_ERROR_ARGUMENT:
    case RP_ERROR_SHAPE: type = PyExc_ValueError; break;
    case RP_ERROR_MEMORY: type = PyExc_MemoryError; break;
    case RP_ERROR_FILE: type = PyExc_OSError; break;
    case RP_ERROR_ORDER: type = PyExc_RuntimeError; break;
    case RP_ERROR_DEVICE: type = state->device_error; break;
  }
  /* its errno is in the sentence alone */
  const bool missing = status == RP_ERROR_FILE && strstr(rp_last_error(), strerror(ENOENT));
  if (missing) type = PyExc_FileNotFoundError;
  PyObject *sentence = renamed(text_of(rp_last_error()), names, count);
  if (status != RP_ERROR_FILE) { /* those quote paths */
    sentence = renamed(sentence, in_python, sizeof in_python / sizeof in_python[0]);
  }
  if (sentence == NULL) return;
  PyErr_SetObject(type, sentence);
  Py_DECREF(sentence);
}

PyObject *text_of(const char *text) {
  return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
}

void add_item(PyObject **list, PyObject *item) {
  if (item == NULL || PyList_Append(*list, item) < 0) Py_CLEAR(*list);
  Py_XDECREF(item);
}

PyObject *tuple_from(PyObject *list) {
  PyObject *const tuple = list != NULL ? PyList_AsTuple(list) : NULL;
  Py_XDECREF(list);
  return tuple;
}

PyTypeObject *model_type_of(PyObject *module) {
  const module_state *state = PyModule_GetState(module);
  return (PyTypeObject *)state->model_type;
}

/* ---- threads and build information ---------------------------------------------------- */

static PyObject *set_threads(PyObject *module, PyObject *args) {
  int threads = 0;
  rp_status status;
  if (!PyArg_ParseTuple(args, "i:set_threads", &threads)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_set_threads(threads);
  Py_END_ALLOW_THREADS
  return made_or_raised(module, Py_NewRef(Py_None), status);
}

static PyObject *get_threads(PyObject *module, PyObject *args) {
  (void)module, (void)args;
  int threads;
  Py_BEGIN_ALLOW_THREADS
  threads = rp_get_threads();
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(threads);
}

static PyObject *build_info(PyObject *module, PyObject *args) {
  (void)args;
  rp_build_info info = {.struct_size = sizeof info};
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_build_info_get(&info);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) return raise_status(module, status);
  return Py_BuildValue("{s:s,s:s,s:s,s:s,s:s,s:s,s:s,s:i}", "version", info.version, "compiler",
                       info.compiler, "flags", info.flags, "isa", info.isa, "isa_available",
                       info.isa_available, "bf16", info.bf16, "blas", info.blas, "threads",
                       info.threads);
}

/* ---- the module ------------------------------------------------------------------ */

/* The loader may have been told to take another libcore. */
static int check_core(void) {
  if (strcmp(rp_version(), RP_VERSION) == 0) return 0;
  PyErr_Format(PyExc_ImportError, "libcore's version is %s, expected relpos's own, %s",
               rp_version(), RP_VERSION);
  return -1;
}

static int module_exec(PyObject *module) {
  if (check_core() < 0) return -1;
  if (PyArray_ImportNumPyAPI() < 0) return -1;
  module_state *state = PyModule_GetState(module);
  state->device_error = PyErr_NewExceptionWithDoc("relpos.DeviceError",
                                                  "The device, or the library behind it, failed.",
                                                  PyExc_RuntimeError, NULL);
  if (state->device_error == NULL) return -1;
  if (PyModule_AddObjectRef(module, "DeviceError", state->device_error) < 0) return -1;
  state->model_type = model_type_new(module);
  if (state->model_type == NULL) return -1;
  if (PyModule_AddObjectRef(module, "Model", state->model_type) < 0) return -1;
  PyObject *const decoder_type = decoder_type_new(module);
  if (decoder_type == NULL) return -1;
  const int added = PyModule_AddObjectRef(module, "Decoder", decoder_type);
  Py_DECREF(decoder_type);
  if (added < 0) return -1;
  static const struct {
    const char *name;
    int value;
  } constants[] = {
      {"KEY", RELPOS_KEY},
      {"QUERY", RELPOS_QUERY},
      {"BIAS", RELPOS_BIAS},
      {"VALUE", RELPOS_VALUE},
      {"MAP_BAND", RP_MAP_BAND},
      {"MAP_LABEL", RP_MAP_LABEL},
      {"MAP_EDGES", RP_MAP_EDGES},
      {"BEYOND_CLIP", RP_BEYOND_CLIP},
      {"BEYOND_NONE", RP_BEYOND_NONE},
      {"TERMS", RP_TERMS},
      {"SHOW_PROBABILITIES", RP_SHOW_PROBABILITIES},
      {"SHOW_SCORES", RP_SHOW_SCORES},
      {"SHOW_CONTENT", RP_SHOW_CONTENT},
      {"SHOW_KEY", RP_SHOW_KEY},
      {"SHOW_QUERY", RP_SHOW_QUERY},
      {"SHOW_BIAS", RP_SHOW_BIAS},
      {"ATTENTION_ENCODER", RP_ATTENTION_ENCODER},
      {"ATTENTION_DECODER", RP_ATTENTION_DECODER},
      {"ATTENTION_CROSS", RP_ATTENTION_CROSS},
      {"SAVE_WEIGHTS", RP_SAVE_WEIGHTS},
      {"SAVE_AVERAGE", RP_SAVE_AVERAGE},
      {"SAVE_OPTIMIZER", RP_SAVE_OPTIMIZER},
      {"F32", RP_F32},
      {"BF16", RP_BF16},
  };
  for (size_t i = 0; i < sizeof constants / sizeof constants[0]; i++) {
    if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) return -1;
  }
  return PyModule_AddStringConstant(module, "VERSION", RP_VERSION);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  const module_state *state = PyModule_GetState(module);
  if (state != NULL) {
    Py_VISIT(state->device_error);
    Py_VISIT(state->model_type);
  }
  return 0;
}

static int module_clear(PyObject *module) {
  module_state *state = PyModule_GetState(module);
  if (state != NULL) {
    Py_CLEAR(state->device_error);
    Py_CLEAR(state->model_type);
  }
  return 0;
}

static void module_free(void *module) { (void)module_clear((PyObject *)module); }

static PyMethodDef methods[] = {
    {"attention_forward", attention_forward, METH_VARARGS, NULL},
    {"attention_backward", attention_backward, METH_VARARGS, NULL},
    {"attention_map", attention_map, METH_VARARGS, NULL},
    {"map_sums", map_sums, METH_VARARGS, NULL},
    {"rotate", rotate, METH_VARARGS, NULL},
    {"frequencies", frequencies, METH_VARARGS, NULL},
    {"sinusoid", sinusoid, METH_VARARGS, NULL},
    {"wave_table", wave_table, METH_VARARGS, NULL},
    {"wave_gradient", wave_gradient, METH_VARARGS, NULL},
    {"set_threads", set_threads, METH_VARARGS, NULL},
    {"get_threads", get_threads, METH_NOARGS, NULL},
    {"build_info", build_info, METH_NOARGS, NULL},
    {"devices", devices, METH_NOARGS, NULL},
    {"device_memory", device_memory, METH_VARARGS, NULL},
    {"device_read", device_read, METH_VARARGS, NULL},
    {"device_write", device_write, METH_VARARGS, NULL},
    {"device_wait", device_wait, METH_VARARGS, NULL},
    {"dlpack_take", dlpack_take, METH_VARARGS, NULL},
    {"dlpack_give", dlpack_give, METH_VARARGS, NULL},
    {"config_default", config_default, METH_NOARGS, NULL},
    {"config_preset", config_preset, METH_VARARGS, NULL},
    {"config_check", config_check, METH_VARARGS, NULL},
    {"config_load", config_load, METH_VARARGS, NULL},
    {"preset_names", preset_names, METH_NOARGS, NULL},
    {"learning_rate", learning_rate, METH_VARARGS, NULL},
    {"model_memory", model_memory, METH_VARARGS, NULL},
    {"search_default", search_default, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,   .m_name = "relpos._core", .m_size = sizeof(module_state),
    .m_methods = methods,    .m_slots = slots,         .m_traverse = module_traverse,
    .m_clear = module_clear, .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
