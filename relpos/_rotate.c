/* SPDX-License-Identifier: Apache-2.0
 *
 * _rotate.c: rotary positions; frequencies, sinusoids and their projections.
 */
#include "_call.h"

#include <string.h>

/* Angles per position are float64 in every build. */
static int take_frequencies(PyObject *object, const double **to, int64_t *pairs) {
  PyArrayObject *const array = (PyArrayObject *)object;
  if (!PyArray_Check(object) || PyArray_TYPE(array) != NPY_FLOAT64 || PyArray_NDIM(array) != 1 ||
      !PyArray_ISCARRAY_RO(array)) {
    PyErr_Format(PyExc_TypeError,
                 "frequencies: expected float64 (pairs,) without gaps; use "
                 "np.ascontiguousarray(frequencies, np.float64)");
    return 0;
  }
  *to = PyArray_DATA(array);
  *pairs = PyArray_DIM(array, 0);
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
 *        inverse, placement, name of x) -> out
 *
 * out None: a new array in the layout of x; it may be x itself. The last two may be left out;
 * where there is a placement, out is given. */
PyObject *rotate(PyObject *module, PyObject *args) {
  PyObject *x, *out, *layout, *offsets, *lengths, *start, *positions, *angles;
  PyObject *where = Py_None, *allocate;
  const char *name = "x";
  rp_placement placement;
  rp_rotation r = rp_rotation_default();
  axis_words words;
  sizes s = sizes_unknown();
  rp_rows from = {0};
  rp_rows_out to = {0};
  rp_status status;
  if (!PyArg_ParseTuple(args, "OOOOOOOOpp|Os:rotate", &x, &out, &layout, &offsets, &lengths, &start,
                        &positions, &angles, &r.interleaved, &r.inverse, &where, &name) ||
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
      !take_rows(x, name, words.q, &s, &from) ||
      !offsets_end(r.offsets, "offsets", &s, 'X', name) ||
      !take_int64(lengths, "lengths", "B", &s, &r.lengths) ||
      !take_int64(start, "start", "B", &s, &r.start) || !take_positions(positions, &s, &r) ||
      !take_frequencies(angles, &r.frequencies, &r.pairs)) {
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
  return made_or_raised(module, out, status);
}

/* ---- frequencies, sinusoids -------------------------------------------------------- */

static int check_count(const char *name, long long count) {
  if (count >= 0) return 1;
  PyErr_Format(PyExc_ValueError, "%s: expected 0 or more, got %lld", name, count);
  return 0;
}

/* frequencies(pairs, base, closed) -> float64 (pairs,) */
PyObject *frequencies(PyObject *module, PyObject *args) {
  long long pairs;
  double base;
  int closed;
  if (!PyArg_ParseTuple(args, "Ldp:frequencies", &pairs, &base, &closed) ||
      !check_count("pairs", pairs)) {
    return NULL;
  }
  npy_intp shape[1] = {(npy_intp)pairs};
  PyObject *const made = PyArray_SimpleNew(1, shape, NPY_FLOAT64);
  if (made == NULL) return NULL;
  double *const to = PyArray_DATA((PyArrayObject *)made);
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_frequencies(pairs, base, closed ? RP_FREQUENCIES_CLOSED : RP_FREQUENCIES_OPEN, to);
  Py_END_ALLOW_THREADS
  return made_or_raised(module, made, status);
}

/* sinusoid(rows, width, first, interleaved, frequencies) -> float32 (rows, width) */
PyObject *sinusoid(PyObject *module, PyObject *args) {
  long long rows, width, first;
  int interleaved;
  PyObject *object;
  const double *angles;
  int64_t pairs;
  rp_status status;
  if (!PyArg_ParseTuple(args, "LLLpO:sinusoid", &rows, &width, &first, &interleaved, &object) ||
      !check_count("rows", rows) || !check_count("width", width) ||
      !take_frequencies(object, &angles, &pairs)) {
    return NULL;
  }
  if (pairs < width / 2) {
    PyErr_Format(PyExc_ValueError, "frequencies: expected width // 2 = %lld or more, got %lld",
                 width / 2, (long long)pairs);
    return NULL;
  }
  npy_intp shape[2] = {(npy_intp)rows, (npy_intp)width};
  PyObject *const made = PyArray_SimpleNew(2, shape, NPY_FLOAT32);
  if (made == NULL) return NULL;
  rp_real *const to = PyArray_DATA((PyArrayObject *)made);
  Py_BEGIN_ALLOW_THREADS
  status = rp_sinusoid(rows, width, first, interleaved, angles, to);
  Py_END_ALLOW_THREADS
  return made_or_raised(module, made, status);
}

/* What the next two share: the sinusoids reach as far as the distances; or their width alone, for
 * which the core makes them. */
static int take_waves(PyObject *object, long long left, long long right, sizes *s, view *to) {
  const long long limit = 1LL << 40; /* relpos.h */
  if (!check_count("left", left) || !check_count("right", right)) return 0;
  if (left > limit || right > limit) {
    PyErr_Format(PyExc_ValueError, "%s: expected at most 2^40, got %lld",
                 left > limit ? "left" : "right", left > limit ? left : right);
    return 0;
  }
  if (PyLong_Check(object)) {
    const long long width = PyLong_AsLongLong(object);
    if (width == -1 && PyErr_Occurred()) return 0;
    if (!check_count("waves", width)) return 0;
    if (s->of['W'] < 0) s->of['W'] = width;
    if (s->of['W'] == width) return 1;
    PyErr_Format(PyExc_ValueError, "waves: expected the weight's width %lld, got %lld",
                 (long long)s->of['W'], width);
    return 0;
  }
  if (!take(object, "waves", "VW", TAKE_CONTIGUOUS, s, to)) {
    return 0;
  }
  const long long most = left > right ? left : right;
  if (s->of['V'] > most) return 1;
  PyErr_Format(PyExc_ValueError, "waves: expected rows for the distances up to %lld, got %lld",
               most, (long long)s->of['V']);
  return 0;
}

/* wave_table(weight, waves or width, heads, left, right)
 * -> float32 (heads, left + 1 + right, D) */
PyObject *wave_table(PyObject *module, PyObject *args) {
  long long heads, left, right;
  PyObject *weight, *waves;
  sizes s = sizes_unknown();
  view of_weight = {0}, of_waves = {0};
  rp_status status;
  if (!PyArg_ParseTuple(args, "OOLLL:wave_table", &weight, &waves, &heads, &left, &right) ||
      !take(weight, "weight", "PW", TAKE_CONTIGUOUS, &s, &of_weight) ||
      !take_waves(waves, left, right, &s, &of_waves)) {
    return NULL;
  }
  if (heads < 1 || s.of['P'] % heads != 0) {
    PyErr_Format(PyExc_ValueError, "heads: expected a divisor of the weight's %lld rows, got %lld",
                 (long long)s.of['P'], heads);
    return NULL;
  }
  s.of['H'] = heads;
  s.of['R'] = left + 1 + right;
  s.of['D'] = s.of['P'] / heads;
  PyObject *const made = array_new("HRD", &s);
  if (made == NULL) return NULL;
  rp_real *const to = PyArray_DATA((PyArrayObject *)made);
  Py_BEGIN_ALLOW_THREADS
  status =
      rp_wave_table(heads, s.of['D'], s.of['W'], left, right, of_waves.data, of_weight.data, to);
  Py_END_ALLOW_THREADS
  return made_or_raised(module, made, status);
}

/* wave_gradient(dtable, waves or width, left, right) -> float32 (heads * D, d_model) */
PyObject *wave_gradient(PyObject *module, PyObject *args) {
  long long left, right;
  PyObject *dtable, *waves;
  sizes s = sizes_unknown();
  view of_table = {0}, of_waves = {0};
  rp_status status;
  if (!PyArg_ParseTuple(args, "OOLL:wave_gradient", &dtable, &waves, &left, &right) ||
      !take_waves(waves, left, right, &s, &of_waves)) {
    return NULL;
  }
  s.of['R'] = left + 1 + right;
  if (!take(dtable, "dtable", "HRD", TAKE_CONTIGUOUS, &s, &of_table)) return NULL;
  s.of['P'] = s.of['H'] * s.of['D'];
  PyObject *const made = array_new("PW", &s);
  if (made == NULL) return NULL;
  rp_real *const to = PyArray_DATA((PyArrayObject *)made);
  memset(to, 0, (size_t)PyArray_NBYTES((PyArrayObject *)made));
  Py_BEGIN_ALLOW_THREADS
  status = rp_wave_gradient(s.of['H'], s.of['D'], s.of['W'], left, right, of_waves.data,
                            of_table.data, to);
  Py_END_ALLOW_THREADS
  return made_or_raised(module, made, status);
}
