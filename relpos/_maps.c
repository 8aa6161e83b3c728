/* SPDX-License-Identifier: Apache-2.0
 *
 * _maps.c: rows of probabilities, of logits and of their parts.
 */
#include "_call.h"

/* attention_map(q, k, v, what, b, head, row, out, call) -> None
 *
 * The map `what`, one of SHOW_..., of one head and sequence, from `row` on: as many rows as
 * out (rows, keys) has. Columns beyond the keys of the sequence stay as they are. */
PyObject *attention_map(PyObject *module, PyObject *args) {
  PyObject *q, *k, *v, *out, *call;
  int what;
  long long b, head, row;
  view to = {0};
  job j = {0};
  rp_status status;
  if (!PyArg_ParseTuple(args, "OOOiLLLOO!:attention_map", &q, &k, &v, &what, &b, &head, &row, &out,
                        &PyTuple_Type, &call)) {
    return NULL;
  }
  if (!take_call(&j, call, q, k, v) ||
      !take(out, "out", "IJ", TAKE_WRITE | TAKE_CONTIGUOUS | TAKE_HOST, &j.sizes, &to)) {
    return NULL;
  }
  /* libcore refuses a stride below the keys: so what is as wide as it is not overrun. */
  const int64_t rows = j.sizes.of['I'], stride = j.sizes.of['J'];
  Py_BEGIN_ALLOW_THREADS
  status = rp_attention_map(&j.attention, j.q, j.k, what, b, head, row, rows, to.data, stride);
  Py_END_ALLOW_THREADS
  if (status == RP_OK) return Py_NewRef(Py_None);
  raise_status(module, status);
  return NULL;
}
