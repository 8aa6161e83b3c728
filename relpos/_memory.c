/* SPDX-License-Identifier: Apache-2.0
 *
 * _memory.c: memory of a device, and ways to and from it.
 */
#include "_core.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory ------------------------------------------------------------------------ */

/* What a capsule owns. */
typedef struct owned {
  void *memory;
  char device[]; /* its name */
} owned;

static const char *const owner_name = "relpos.memory";

/* Nobody hears of a failure here: the memory is gone, or the device is. */
static void let_go(owned *o) {
  Py_BEGIN_ALLOW_THREADS
  rp_device_free(o->device, o->memory);
  Py_END_ALLOW_THREADS
  free(o);
}

static void release(PyObject *owner) { let_go(PyCapsule_GetPointer(owner, owner_name)); }

/* device_memory(device, bytes) -> (address, owner): it is freed with its owner. */
PyObject *device_memory(PyObject *module, PyObject *args) {
  const char *device;
  long long bytes;
  rp_status status;
  if (!PyArg_ParseTuple(args, "sL:device_memory", &device, &bytes)) return NULL;
  const size_t length = strlen(device) + 1;
  owned *const o = malloc(sizeof *o + length);
  if (o == NULL) return PyErr_NoMemory();
  memcpy(o->device, device, length);
  Py_BEGIN_ALLOW_THREADS
  status = rp_device_allocate(o->device, bytes, &o->memory);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) {
    free(o);
    return raise_status(module, status);
  }
  PyObject *const owner = PyCapsule_New(o, owner_name, release);
  if (owner == NULL) {
    let_go(o);
    return NULL;
  }
  return Py_BuildValue("(KN)", (unsigned long long)(uintptr_t)o->memory, owner);
}

/* ---- to and from the host ------------------------------------------------------------ */

/* An array of the host without gaps, of any type. */
static int take_bytes(PyObject *object, int is_written, void **data, int64_t *bytes) {
  PyArrayObject *const array = (PyArrayObject *)object;
  if (!PyArray_Check(object) || !PyArray_IS_C_CONTIGUOUS(array) ||
      (is_written && !PyArray_ISWRITEABLE(array))) {
    PyErr_Format(PyExc_TypeError, "array: expected a %sNumPy array without gaps",
                 is_written ? "writable " : "");
    return 0;
  }
  *data = PyArray_DATA(array);
  *bytes = (int64_t)PyArray_NBYTES(array);
  return 1;
}

/* device_read(device, address, array) -> None: fills the array; waits for the device. */
PyObject *device_read(PyObject *module, PyObject *args) {
  const char *device;
  unsigned long long address;
  PyObject *array;
  void *to;
  int64_t bytes;
  rp_status status;
  if (!PyArg_ParseTuple(args, "sKO:device_read", &device, &address, &array) ||
      !take_bytes(array, 1, &to, &bytes)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  status = rp_device_read(device, to, (const void *)(uintptr_t)address, bytes);
  Py_END_ALLOW_THREADS
  return made_or_raised(module, Py_NewRef(Py_None), status);
}

/* device_write(device, address, array) -> None: what the array holds is there. */
PyObject *device_write(PyObject *module, PyObject *args) {
  const char *device;
  unsigned long long address;
  PyObject *array;
  void *from;
  int64_t bytes;
  rp_status status;
  if (!PyArg_ParseTuple(args, "sKO:device_write", &device, &address, &array) ||
      !take_bytes(array, 0, &from, &bytes)) {
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  status = rp_device_write(device, (void *)(uintptr_t)address, from, bytes);
  Py_END_ALLOW_THREADS
  return made_or_raised(module, Py_NewRef(Py_None), status);
}

/* device_wait(device) -> None: all that libcore has asked of the device is done. */
PyObject *device_wait(PyObject *module, PyObject *args) {
  const char *device;
  rp_status status;
  if (!PyArg_ParseTuple(args, "s:device_wait", &device)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_device_read(device, NULL, NULL, 0);
  Py_END_ALLOW_THREADS
  return made_or_raised(module, Py_NewRef(Py_None), status);
}
