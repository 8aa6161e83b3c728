/* SPDX-License-Identifier: Apache-2.0
 *
 * _attention.c: attention, forward and backward. Takes the arrays, releases the GIL, calls
 * libcore and turns its status into an exception. There is no arithmetic here.
 */
#include "_call.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* ---- the call ------------------------------------------------------------------- */

static rp_status workspace_bytes(const job *j, int64_t *bytes) {
  return rp_attention_workspace(&j->attention, j->backward ? NULL : bytes,
                                j->backward ? bytes : NULL);
}

static rp_status compute(const job *j, void *workspace, int64_t bytes) {
  if (j->backward) {
    return rp_attention_backward(&j->attention, j->q, j->k, j->v, j->out_in, j->lse, j->dout,
                                 &j->gradients, workspace, bytes);
  }
  return rp_attention_forward(&j->attention, j->q, j->k, j->v, j->out, j->lse, workspace, bytes);
}

/* A workspace, on the host or from the call's own allocator. */
typedef struct workspace {
  int64_t bytes;   /* -1: there is none yet */
  void *memory;    /* aligned to 64 */
  char *block;     /* of the host, which holds it and begins with its bytes */
  PyObject *owner; /* of memory of the device */
} workspace;

static workspace workspace_in(char *block) {
  int64_t bytes;
  memcpy(&bytes, block, sizeof bytes);
  char *const behind = block + sizeof bytes;
  return (workspace){bytes, behind + (64 - (uintptr_t)behind % 64), block, NULL};
}

/* The block of the last call, for the next: memory that is new to the process costs a fault at
 * every page. Whoever takes it has it alone. */
#define KEPT_MOST ((int64_t)64 << 20)
static _Atomic(char *) kept;

static workspace workspace_take(const job *j) {
  char *const block = j->allocate == NULL ? atomic_exchange(&kept, NULL) : NULL;
  return block != NULL ? workspace_in(block) : (workspace){.bytes = -1};
}

static void workspace_free(workspace *w) {
  free(w->block);
  Py_CLEAR(w->owner);
  *w = (workspace){.bytes = -1};
}

static void workspace_leave(workspace *w) {
  if (w->block != NULL && w->bytes <= KEPT_MOST) w->block = atomic_exchange(&kept, w->block);
  workspace_free(w);
}

/* False, with an exception, where there is no memory. */
static int workspace_new(const job *j, int64_t bytes, workspace *w) {
  workspace_free(w);
  if (j->allocate == NULL) {
    char *const block = malloc((size_t)bytes + sizeof bytes + 64);
    if (block != NULL) {
      memcpy(block, &bytes, sizeof bytes);
      *w = workspace_in(block);
      return 1;
    }
    PyErr_Format(PyExc_MemoryError, "attention: no memory for a workspace of %lld bytes",
                 (long long)bytes);
    return 0;
  }
  if (bytes == 0) { /* to free even one byte is to wait for the device */
    w->bytes = 0;
    return 1;
  }
  unsigned long long address;
  PyObject *owner;
  PyObject *const given = PyObject_CallFunction(j->allocate, "L", (long long)bytes);
  if (given == NULL) return 0;
  if (!PyTuple_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "allocate: expected a tuple (address, owner)");
  } else if (PyArg_ParseTuple(given, "KO:allocate", &address, &owner)) {
    *w = (workspace){bytes, (void *)(uintptr_t)address, NULL, Py_NewRef(owner)};
  }
  Py_DECREF(given);
  return w->owner != NULL;
}

/* Calls libcore without the GIL. False, with an exception, where it fails. Another
 * thread may raise the number of threads between the query of the workspace and
 * the call: then libcore finds it too small, and a second query tells; unless the number
 * has been lowered again by then, so that the call is tried anew some times before
 * other memory is said to lack. */
static int run(PyObject *module, const job *j) {
  int64_t needed = 0;
  int tries = 100;
  workspace w = workspace_take(j);
  rp_status status = RP_ERROR_MEMORY, asked = RP_OK;
  while (status == RP_ERROR_MEMORY) {
    Py_BEGIN_ALLOW_THREADS
    if (w.bytes >= 0) status = compute(j, w.memory, w.bytes);
    if (status == RP_ERROR_MEMORY) asked = workspace_bytes(j, &needed);
    Py_END_ALLOW_THREADS
    if (status != RP_ERROR_MEMORY) break;
    if (asked != RP_OK) status = asked;
    if (asked != RP_OK || (needed <= w.bytes && --tries == 0)) break;
    if (needed <= w.bytes || workspace_new(j, needed, &w)) continue;
    workspace_free(&w);
    return 0;
  }
  if (status != RP_OK) raise_call(module, status, j);
  workspace_leave(&w);
  return status == RP_OK;
}

/* The array that was given for a result or, on the host, a new one. A new reference. */
static PyObject *result_array(const job *j, PyObject *given, const char *name, const char *axes) {
  if (given != Py_None) return Py_NewRef(given);
  if (j->allocate == NULL) return array_new(axes, &j->sizes);
  PyErr_Format(PyExc_TypeError, "%s: expected memory of %s for the result, got None", name,
               j->placement.device);
  return NULL;
}

/* ---- forward ---------------------------------------------------------------------- */

/* attention_forward(q, k, v, out, lse, call) -> (out, lse)
 *
 * out None: a new array in the layout of q. lse False: None is returned; True: a new array. Where
 * the call has a placement out and lse are given, lse or False. */
PyObject *attention_forward(PyObject *module, PyObject *args) {
  PyObject *q, *k, *v, *out, *call, *wanted, *lse = NULL, *result = NULL;
  view lse_view = {0};
  job j = {0};
  if (!PyArg_ParseTuple(args, "OOOOOO!:attention_forward", &q, &k, &v, &out, &wanted, &PyTuple_Type,
                        &call)) {
    return NULL;
  }
  if (!take_call(&j, call, q, k, v)) return NULL;
  out = result_array(&j, out, "out", j.axes.out);
  if (out == NULL) goto done;
  if (!take_rows_out(out, "out", j.axes.out, &j.sizes, &j.out)) goto done;
  const int with_lse = wanted != Py_False;
  if (!with_lse) {
    lse = Py_NewRef(Py_None);
  } else {
    lse = result_array(&j, wanted == Py_True ? Py_None : wanted, "lse", j.axes.lse);
  }
  if (lse == NULL) goto done;
  if (with_lse &&
      !take(lse, "lse", j.axes.lse, TAKE_WRITE | TAKE_CONTIGUOUS, &j.sizes, &lse_view)) {
    goto done;
  }
  j.lse = lse_view.data;
  if (run(module, &j)) result = PyTuple_Pack(2, out, lse);
done:
  Py_XDECREF(out);
  Py_XDECREF(lse);
  return result;
}

/* ---- backward ----------------------------------------------------------------------- */

/* It lies as position_bias does. */
static int take_position_bias_gradient(job *j, PyObject *object) {
  view v = {0};
  if (object == Py_None) return 1;
  if (j->attention.position_bias == NULL) {
    PyErr_SetString(PyExc_ValueError, "dposition_bias: the call has no position_bias");
    return 0;
  }
  if (!take(object, "dposition_bias", "HD", TAKE_WRITE, &j->sizes, &v)) return 0;
  if (v.head_stride != j->attention.position_bias_stride) {
    raise_strides("dposition_bias", object, "must lie in memory as position_bias does", "");
    return 0;
  }
  j->gradients.position_bias = v.data;
  return 1;
}

/* attention_backward(q, k, v, out, lse, dout, table_gradients, dposition_bias, call, dq, dk, dv)
 *   -> (dq, dk, dv)
 *
 * The gradients of the tables, one for each term, and of position_bias are added to the
 * arrays given; None: not computed. The last three may be left out where the call has no
 * placement: new arrays. */
PyObject *attention_backward(PyObject *module, PyObject *args) {
  PyObject *q, *k, *v, *out, *lse, *dout, *table_gradients, *dposition_bias, *call;
  PyObject *dq = Py_None, *dk = Py_None, *dv = Py_None, *result = NULL;
  job j = {.backward = 1};
  rp_attention_gradients *const g = &j.gradients;
  view lse_view = {0};
  if (!PyArg_ParseTuple(args, "OOOOOOOOO!|OOO:attention_backward", &q, &k, &v, &out, &lse, &dout,
                        &table_gradients, &dposition_bias, &PyTuple_Type, &call, &dq, &dk, &dv)) {
    return NULL;
  }
  if (!take_call(&j, call, q, k, v) || !take_rows(out, "out", j.axes.out, &j.sizes, &j.out_in) ||
      !take(lse, "lse", j.axes.lse, TAKE_CONTIGUOUS, &j.sizes, &lse_view) ||
      !take_rows(dout, "dout", j.axes.out, &j.sizes, &j.dout) ||
      !take_table_gradients(&j, table_gradients) ||
      !take_position_bias_gradient(&j, dposition_bias)) {
    return NULL;
  }
  j.lse = lse_view.data;
  dq = result_array(&j, dq, "dq", j.axes.q);
  dk = dq == NULL ? NULL : result_array(&j, dk, "dk", j.axes.k);
  dv = dk == NULL ? NULL : result_array(&j, dv, "dv", j.axes.v);
  if (dq == NULL || dk == NULL || dv == NULL) goto done;
  if (!take_rows_out(dq, "dq", j.axes.q, &j.sizes, &g->q)) goto done;
  if (!take_rows_out(dk, "dk", j.axes.k, &j.sizes, &g->k)) goto done;
  if (!take_rows_out(dv, "dv", j.axes.v, &j.sizes, &g->v)) goto done;
  if (run(module, &j)) result = PyTuple_Pack(3, dq, dk, dv);
done:
  Py_XDECREF(dq);
  Py_XDECREF(dk);
  Py_XDECREF(dv);
  return result;
}
