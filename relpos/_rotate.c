/* SPDX-License-Identifier: Apache-2.0
 *
 * _rotate.c: rotary positions.
 */
#include "_call.h"

/* Angles per position are float64 in every build. */
static int take_frequencies(PyObject *object, rp_rotation *r) {
  PyArrayObject *const array = (PyArrayObject *)object;
  if (!PyArray_Check(object) || PyArray_TYPE(array) != NPY_FLOAT64 || PyArray_NDIM(array) != 1 ||
      !PyArray_ISCARRAY_RO(array)) {
    PyErr_Format(PyExc_TypeError,
                 "frequencies: expected float64 (pairs,) without gaps; use "
                 "np.ascontiguousarray(frequencies, np.float64)");
    return 0;
  }
  r->frequencies = PyArray_DATA(array);
  r->pairs = PyArray_DIM(array, 0);
  return 1;
}

static int take_positions(PyObject *object, sizes *s, rp_rotation *r) {
  view v = {0};
  if (object == Py_None) return 1;
  const char *const axes = r->offsets != NULL ? "X" : "bN";
  if (!take(object, "positions", axes, TAKE_INT32 | TAKE_CONTIGUOUS, s, &v)) return 0;
  r->positions = v.data;
  r->position_stride = v.batch_stride;
  return 1;
}

/* rotate(x, out, layout, offsets, lengths, start, positions, frequencies, interleaved,
 *        inverse, placement) -> out
 *
 * out None: a new array in the layout of x; it may be x itself. The placement may be left out;
 * where there is one, out is given. */
PyObject *rotate(PyObject *module, PyObject *args) {
  PyObject *x, *out, *layout, *offsets, *lengths, *start, *positions, *frequencies;
  PyObject *where = Py_None, *allocate;
  rp_placement placement;
  rp_rotation r = rp_rotation_default();
  axis_words words;
  sizes s = sizes_unknown();
  rp_rows from = {0};
  rp_rows_out to = {0};
  rp_status status;
  if (!PyArg_ParseTuple(args, "OOOOOOOOpp|O:rotate", &x, &out, &layout, &offsets, &lengths, &start,
                        &positions, &frequencies, &r.interleaved, &r.inverse, &where) ||
      !take_placement(where, &placement, &allocate)) {
    return NULL;
  }
  if (where != Py_None) r.placement = s.placement = &placement;
  if (where != Py_None && out == Py_None) {
    PyErr_Format(PyExc_TypeError, "out: expected memory of %s for the result, got None",
                 placement.device);
    return NULL;
  }
  if (!choose_axes(&words, layout, offsets != Py_None, 0) ||
      !take_offsets(offsets, "offsets", &s, &r.offsets) ||
      !take_rows(x, "x", words.q, 0, &s, &from) ||
      !offsets_end(r.offsets, "offsets", &s, 'X', "x") ||
      !take_int64(lengths, "lengths", "B", &s, &r.lengths) ||
      !take_int64(start, "start", "B", &s, &r.start) || !take_positions(positions, &s, &r) ||
      !take_frequencies(frequencies, &r)) {
    return NULL;
  }
  r.B = s.of['B'];
  r.H = s.of['H'];
  r.D = s.of['D'];
  r.N = s.of['N'] >= 0 ? s.of['N'] : 0;
  out = out != Py_None ? Py_NewRef(out) : array_new(words.q, &s);
  if (out == NULL || !take_rows_out(out, "out", words.q, &s, &to)) {
    Py_XDECREF(out);
    return NULL;
  }
  Py_BEGIN_ALLOW_THREADS
  status = rp_rotate(&r, from, to);
  Py_END_ALLOW_THREADS
  if (status == RP_OK) return out;
  raise_status(module, status);
  Py_DECREF(out);
  return NULL;
}
