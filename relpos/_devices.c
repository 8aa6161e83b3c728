/* SPDX-License-Identifier: Apache-2.0
 *
 * _devices.c: which devices there are.
 */
#include "_core.h"

#include "relpos/device.h"

/* (name, title, memory, memory_free, problem or None), or NULL with an exception. */
static PyObject *device_at(PyObject *module, int index) {
  rp_device device = {.struct_size = sizeof device};
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_device_get(index, &device);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) return raise_status(module, status);
  PyObject *const problem = device.problem != NULL ? text_of(device.problem) : Py_NewRef(Py_None);
  if (problem == NULL) return NULL;
  return Py_BuildValue("(ssLLN)", device.name, device.title, (long long)device.memory,
                       (long long)device.memory_free, problem);
}

PyObject *devices(PyObject *module, PyObject *args) {
  (void)args;
  int count;
  Py_BEGIN_ALLOW_THREADS
  count = rp_device_count();
  Py_END_ALLOW_THREADS
  PyObject *all = PyList_New(0);
  for (int i = 0; all != NULL && i < count; i++) add_item(&all, device_at(module, i));
  return all;
}
