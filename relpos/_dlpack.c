/* SPDX-License-Identifier: Apache-2.0
 *
 * _dlpack.c: arrays of other libraries, taken and given without a copy.
 *
 * DLPack hands an array over as a capsule with a description of it and a deleter, which whoever
 * takes the array calls in the end. There are two descriptions: that of DLPack 1 begins with a
 * version and has flags, the older one has neither. The structures below are laid out as the
 * protocol says.
 */
#include "_core.h"

#include <stdlib.h>
#include <string.h>

typedef struct dl_device {
  int32_t type, index;
} dl_device;

typedef struct dl_type {
  uint8_t kind, bits;
  uint16_t lanes;
} dl_type;

typedef struct dl_tensor {
  void *data;
  dl_device device;
  int32_t axes;
  dl_type type;
  int64_t *shape, *strides; /* in elements; no strides: C order */
  uint64_t byte_offset;
} dl_tensor;

typedef struct dl_plain {
  dl_tensor tensor;
  void *context;
  void (*deleter)(struct dl_plain *self);
} dl_plain;

typedef struct dl_versioned {
  uint32_t major, minor;
  void *context;
  void (*deleter)(struct dl_versioned *self);
  uint64_t flags;
  dl_tensor tensor;
} dl_versioned;

enum { DL_MAJOR = 1, DL_READ_ONLY = 1, DL_FLOAT = 2, DL_BFLOAT = 4 };

/* Names of capsules: before they are taken, after it, and of what owns the array then. */
static const char plain_name[] = "dltensor", versioned_name[] = "dltensor_versioned";
static const char plain_owner[] = "relpos.dltensor",
                  versioned_owner[] = "relpos.dltensor_versioned";

/* ---- taking -------------------------------------------------------------------------- */

/* An array may be let go while an exception is on its way up; a deleter that is written in Python
 * cannot run in its sight. */
static void delete_array(PyObject *owner) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (PyCapsule_IsValid(owner, versioned_owner)) {
    dl_versioned *const array = PyCapsule_GetPointer(owner, versioned_owner);
    if (array->deleter != NULL) array->deleter(array);
  } else {
    dl_plain *const array = PyCapsule_GetPointer(owner, plain_owner);
    if (array->deleter != NULL) array->deleter(array);
  }
  PyErr_Restore(type, value, trace);
}

/* "float32", "int64", "bfloat16"; of several lanes "float32x4". */
static PyObject *type_text(dl_type type) {
  static const char *const kinds[] = {"int",    "uint",    "float", "opaque",
                                      "bfloat", "complex", "bool"};
  const char *const kind =
      type.kind < sizeof kinds / sizeof kinds[0] ? kinds[type.kind] : "unknown";
  if (type.lanes == 1) return PyUnicode_FromFormat("%s%d", kind, (int)type.bits);
  return PyUnicode_FromFormat("%s%dx%d", kind, (int)type.bits, (int)type.lanes);
}

/* A tuple of integers; where there are no strides, those of C order. */
static PyObject *strides_or_shape(const dl_tensor *t, int is_shape) {
  PyObject *const tuple = PyTuple_New(t->axes);
  int64_t natural = 1;
  for (int i = t->axes - 1; tuple != NULL && i >= 0; i--) {
    const int64_t number = is_shape ? t->shape[i] : t->strides != NULL ? t->strides[i] : natural;
    if (t->strides == NULL && t->shape[i] > 0 && natural <= INT64_MAX / t->shape[i]) {
      natural *= t->shape[i];
    }
    PyObject *const item = PyLong_FromLongLong((long long)number);
    if (item == NULL || PyTuple_SetItem(tuple, i, item) < 0) {
      Py_DECREF(tuple);
      return NULL;
    }
  }
  return tuple;
}

/* (owner, device type, device index, address, type, shape, strides, writable); takes the owner. */
static PyObject *description(PyObject *owner, const dl_tensor *t, int is_writable) {
  if (t->axes < 0) {
    PyErr_Format(PyExc_BufferError, "DLPack: expected 0 axes or more, got %d", (int)t->axes);
    Py_DECREF(owner);
    return NULL;
  }
  const unsigned long long address = (uintptr_t)t->data + t->byte_offset;
  PyObject *const type = type_text(t->type), *const shape = strides_or_shape(t, 1);
  PyObject *const strides = strides_or_shape(t, 0);
  if (type != NULL && shape != NULL && strides != NULL) {
    return Py_BuildValue("(NiiKNNNO)", owner, (int)t->device.type, (int)t->device.index, address,
                         type, shape, strides, is_writable ? Py_True : Py_False);
  }
  Py_XDECREF(type);
  Py_XDECREF(shape);
  Py_XDECREF(strides);
  Py_DECREF(owner);
  return NULL;
}

/* What owns the capsule's array from here on; NULL, with an exception, where it was not taken. */
static PyObject *owner_of(PyObject *capsule, void *array, const char *name, const char *used) {
  PyObject *const owner = array != NULL ? PyCapsule_New(array, name, delete_array) : NULL;
  if (owner == NULL || PyCapsule_SetName(capsule, used) == 0) return owner;
  PyCapsule_SetDestructor(owner, NULL); /* it was not taken */
  Py_DECREF(owner);
  return NULL;
}

static PyObject *take_plain(PyObject *capsule) {
  dl_plain *const array = PyCapsule_GetPointer(capsule, plain_name);
  PyObject *const owner = owner_of(capsule, array, plain_owner, "used_dltensor");
  return owner != NULL ? description(owner, &array->tensor, 1) : NULL;
}

static PyObject *take_versioned(PyObject *capsule) {
  dl_versioned *const array = PyCapsule_GetPointer(capsule, versioned_name);
  if (array == NULL) return NULL;
  if (array->major != DL_MAJOR) {
    return PyErr_Format(PyExc_BufferError, "DLPack: version %u.%u, expected %d",
                        (unsigned)array->major, (unsigned)array->minor, DL_MAJOR);
  }
  PyObject *const owner = owner_of(capsule, array, versioned_owner, "used_dltensor_versioned");
  if (owner == NULL) return NULL;
  return description(owner, &array->tensor, (array->flags & DL_READ_ONLY) == 0);
}

/* dlpack_take(capsule)
 *   -> (owner, device type, device index, address, type, shape, strides in elements, writable)
 *
 * The capsule of __dlpack__ is used up; the array is there as long as the owner. */
PyObject *dlpack_take(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *capsule;
  if (!PyArg_ParseTuple(args, "O:dlpack_take", &capsule)) return NULL;
  if (PyCapsule_IsValid(capsule, versioned_name)) return take_versioned(capsule);
  if (PyCapsule_IsValid(capsule, plain_name)) return take_plain(capsule);
  PyErr_SetString(PyExc_BufferError, "DLPack: expected a capsule that nobody has taken yet");
  return NULL;
}

/* ---- giving --------------------------------------------------------------------------- */

enum { MOST_AXES = 8 };

/* An array on its way, with either description. */
typedef struct given {
  union {
    dl_plain plain;
    dl_versioned versioned;
  } as;
  PyObject *owner;
  int64_t shape[MOST_AXES], strides[MOST_AXES];
} given;

/* Called by anybody, on any thread, with the GIL or without. */
static void let_go(given *g) {
  if (Py_IsInitialized()) {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(g->owner);
    PyGILState_Release(state);
  }
  free(g);
}

static void let_plain_go(dl_plain *self) { let_go(self->context); }

static void let_versioned_go(dl_versioned *self) { let_go(self->context); }

/* Of capsules that nobody took: one that was taken has another name. */
static void drop_plain(PyObject *capsule) {
  if (!PyCapsule_IsValid(capsule, plain_name)) return;
  let_plain_go(PyCapsule_GetPointer(capsule, plain_name));
}

static void drop_versioned(PyObject *capsule) {
  if (!PyCapsule_IsValid(capsule, versioned_name)) return;
  let_versioned_go(PyCapsule_GetPointer(capsule, versioned_name));
}

static int take_numbers(PyObject *tuple, const char *name, int64_t *to) {
  if (PyTuple_Size(tuple) > MOST_AXES) {
    PyErr_Format(PyExc_BufferError, "%s: expected at most %d axes, got %zd", name, MOST_AXES,
                 PyTuple_Size(tuple));
    return 0;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
    to[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
  }
  return !PyErr_Occurred();
}

static PyObject *capsule_of(given *g, dl_tensor tensor, int is_versioned, int is_writable) {
  if (is_versioned) {
    g->as.versioned = (dl_versioned){.major = DL_MAJOR,
                                     .context = g,
                                     .deleter = let_versioned_go,
                                     .flags = is_writable ? 0 : DL_READ_ONLY,
                                     .tensor = tensor};
    return PyCapsule_New(&g->as.versioned, versioned_name, drop_versioned);
  }
  g->as.plain = (dl_plain){.tensor = tensor, .context = g, .deleter = let_plain_go};
  return PyCapsule_New(&g->as.plain, plain_name, drop_plain);
}

/* dlpack_give(owner, device type, device index, address, type, shape, strides, writable, versioned)
 *   -> capsule
 *
 * for __dlpack__; the owner lives until whoever takes the capsule lets go. An array that is
 * read-only can be given with a version alone: nothing else says so. */
PyObject *dlpack_give(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *owner, *shape, *strides;
  dl_device device;
  unsigned long long address;
  const char *type;
  int is_writable, is_versioned;
  if (!PyArg_ParseTuple(args, "OiiKsO!O!pp:dlpack_give", &owner, &device.type, &device.index,
                        &address, &type, &PyTuple_Type, &shape, &PyTuple_Type, &strides,
                        &is_writable, &is_versioned)) {
    return NULL;
  }
  const int is_bfloat16 = strcmp(type, "bfloat16") == 0;
  if ((!is_bfloat16 && strcmp(type, "float32") != 0) ||
      PyTuple_Size(shape) != PyTuple_Size(strides)) {
    PyErr_SetString(PyExc_ValueError,
                    "dlpack_give: expected float32 or bfloat16, and a stride for "
                    "every axis");
    return NULL;
  }
  if (!is_writable && !is_versioned) {
    PyErr_SetString(PyExc_BufferError, "the array is read-only, which takes DLPack 1 to say");
    return NULL;
  }
  given *const g = calloc(1, sizeof *g);
  if (g == NULL) return PyErr_NoMemory();
  if (!take_numbers(shape, "shape", g->shape) || !take_numbers(strides, "strides", g->strides)) {
    free(g);
    return NULL;
  }
  const dl_tensor tensor = {
      .data = (void *)(uintptr_t)address,
      .device = device,
      .axes = (int32_t)PyTuple_Size(shape),
      .type = {is_bfloat16 ? DL_BFLOAT : DL_FLOAT, is_bfloat16 ? 16 : 32, 1},
      .shape = g->shape,
      .strides = g->strides,
  };
  g->owner = owner;
  PyObject *const capsule = capsule_of(g, tensor, is_versioned, is_writable);
  if (capsule == NULL) {
    free(g);
    return NULL;
  }
  Py_INCREF(owner);
  return capsule;
}
