/* SPDX-License-Identifier: Apache-2.0
 *
 * _attention.c: attention, forward and backward. Takes the arrays, releases the GIL, calls
 * libcore and turns its status into an exception. There is no arithmetic here.
 */
#include "_call.h"

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

/* Calls libcore without the GIL. False, with an exception, where it fails. Another
 * thread may raise the number of threads between the query of the workspace and
 * the call: then libcore finds it too small, and a second query tells. */
static int run(PyObject *module, const job *j) {
  int64_t bytes = -1, needed = 0;
  char *block = NULL, *workspace = NULL;
  rp_status status = RP_ERROR_MEMORY, asked = RP_OK;
  while (status == RP_ERROR_MEMORY) {
    Py_BEGIN_ALLOW_THREADS
    if (workspace != NULL) status = compute(j, workspace, bytes);
    if (status == RP_ERROR_MEMORY) asked = workspace_bytes(j, &needed);
    Py_END_ALLOW_THREADS
    if (status != RP_ERROR_MEMORY) break;
    if (asked != RP_OK) status = asked;
    if (asked != RP_OK || needed <= bytes) break; /* then it is other memory that lacks */
    bytes = needed;
    PyMem_Free(block);
    block = PyMem_Malloc((size_t)bytes + 64);
    if (block == NULL) {
      PyErr_Format(PyExc_MemoryError, "attention: no memory for a workspace of %lld bytes",
                   (long long)bytes);
      return 0;
    }
    workspace = block + (64 - (uintptr_t)block % 64);
  }
  PyMem_Free(block);
  if (status != RP_OK) raise_status(module, status);
  return status == RP_OK;
}

/* ---- forward ---------------------------------------------------------------------- */

/* attention_forward(q, k, v, out, with_lse, call) -> (out, lse)
 *
 * out None: a new array in the layout of q. lse is None unless asked for. */
PyObject *attention_forward(PyObject *module, PyObject *args) {
  PyObject *q, *k, *v, *out, *call, *lse = NULL, *result = NULL;
  int with_lse = 0;
  view lse_view = {0};
  job j = {0};
  if (!PyArg_ParseTuple(args, "OOOOpO!:attention_forward", &q, &k, &v, &out, &with_lse,
                        &PyTuple_Type, &call)) {
    return NULL;
  }
  if (!take_call(&j, call, q, k, v)) return NULL;
  out = out != Py_None ? Py_NewRef(out) : array_new(j.axes.out, &j.sizes);
  if (out == NULL) goto done;
  if (!take_rows_out(out, "out", j.axes.out, &j.sizes, &j.out)) goto done;
  lse = with_lse ? array_new(j.axes.lse, &j.sizes) : Py_NewRef(Py_None);
  if (lse == NULL) goto done;
  if (with_lse && !take(lse, "lse", j.axes.lse, TAKE_WRITE, &j.sizes, &lse_view)) goto done;
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

/* attention_backward(q, k, v, out, lse, dout, table_gradients, dposition_bias, call)
 *   -> (dq, dk, dv)
 *
 * The gradients of the tables, one for each term, and of position_bias are added to the
 * arrays given; None: not computed. */
PyObject *attention_backward(PyObject *module, PyObject *args) {
  PyObject *q, *k, *v, *out, *lse, *dout, *table_gradients, *dposition_bias, *call;
  PyObject *dq = NULL, *dk = NULL, *dv = NULL, *result = NULL;
  job j = {.backward = 1};
  rp_attention_gradients *const g = &j.gradients;
  view lse_view = {0};
  if (!PyArg_ParseTuple(args, "OOOOOOOOO!:attention_backward", &q, &k, &v, &out, &lse, &dout,
                        &table_gradients, &dposition_bias, &PyTuple_Type, &call)) {
    return NULL;
  }
  if (!take_call(&j, call, q, k, v) || !take_rows(out, "out", j.axes.out, 0, &j.sizes, &j.out_in) ||
      !take(lse, "lse", j.axes.lse, TAKE_CONTIGUOUS, &j.sizes, &lse_view) ||
      !take_rows(dout, "dout", j.axes.out, 0, &j.sizes, &j.dout) ||
      !take_table_gradients(&j, table_gradients) ||
      !take_position_bias_gradient(&j, dposition_bias)) {
    return NULL;
  }
  j.lse = lse_view.data;
  dq = array_new(j.axes.q, &j.sizes);
  dk = array_new(j.axes.k, &j.sizes);
  dv = array_new(j.axes.v, &j.sizes);
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
