/* SPDX-License-Identifier: Apache-2.0
 *
 * _maps.c: rows of probabilities, of logits and of their parts, and what they come to.
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
  raise_call(module, status, &j);
  return NULL;
}

/* map_sums(p, what) -> float64
 *
 * Of a whole map p (queries, keys): what = "mass" (queries - 1 + keys,), or (0,) without either;
 * "entropy" (queries,); "distance" (1,). */
PyObject *map_sums(PyObject *module, PyObject *args) {
  PyObject *map;
  const char *what;
  view p = {0};
  sizes s = sizes_unknown();
  rp_status status;
  if (!PyArg_ParseTuple(args, "Os:map_sums", &map, &what) ||
      !take(map, "p", "IJ", TAKE_CONTIGUOUS | TAKE_HOST, &s, &p)) {
    return NULL;
  }
  const int64_t queries = s.of['I'], keys = s.of['J'];
  const int mass = strcmp(what, "mass") == 0, entropy = strcmp(what, "entropy") == 0;
  if (!mass && !entropy && strcmp(what, "distance") != 0) {
    return PyErr_Format(PyExc_ValueError, "what: expected mass, entropy or distance, got %s", what);
  }
  npy_intp count = mass ? queries - 1 + keys : entropy ? queries : 1;
  if (count < 0) count = 0;
  PyObject *const sums = PyArray_ZEROS(1, &count, NPY_FLOAT64, 0);
  if (sums == NULL) return NULL;
  double *const to = PyArray_DATA((PyArrayObject *)sums);
  Py_BEGIN_ALLOW_THREADS
  status = rp_map_sums(p.data, queries, keys, 0, queries, mass ? to : NULL, entropy ? to : NULL,
                       mass || entropy ? NULL : to);
  Py_END_ALLOW_THREADS
  return made_or_raised(module, sums, status);
}
