/* SPDX-License-Identifier: Apache-2.0
 *
 * _arrays.c: the one way from an object to memory.
 *
 * There is no conversion: an array is used where it lies or refused with the fix. What
 * libcore cannot see is checked here (types, sizes, strides); what it can see is left to
 * it.
 */
#include "_core.h"

#include <stdio.h>
#include <string.h>

sizes sizes_unknown(void) {
  sizes s;
  for (size_t i = 0; i < sizeof s.of / sizeof s.of[0]; i++) s.of[i] = -1;
  return s;
}

/* ---- messages ------------------------------------------------------------------- */

/* What is asked for, as messages say it, and as NumPy would make it. */
typedef struct type_words {
  const char *expected, *fix;
} type_words;

static type_words words_of(int flags) {
  switch (flags & TAKE_TYPES) {
    case TAKE_INT64: return (type_words){"int64", "np.int64"};
    case TAKE_INT32: return (type_words){"int32", "np.int32"};
    case TAKE_LABELS: return (type_words){"int8, int16 or int32", "np.int32"};
    case TAKE_MASK: return (type_words){"bool or uint8", "bool"};
    case TAKE_UINT32: return (type_words){"uint32", "np.uint32"};
    default: return (type_words){"float32", "np.float32"};
  }
}

/* The length of the first word: "labels" of "labels of key_table". */
static int first_word(const char *name) { return (int)strcspn(name, " "); }

static char upper(char axis) { return axis == 'b' ? 'B' : axis == 'h' ? 'H' : axis; }

/* "(B=2, H=8 or 1, N, D=64)": the axes with the sizes known so far. */
static void shape_text(char *text, size_t room, const char *axes, const sizes *s) {
  size_t used = 0;
  for (const char *axis = axes; *axis != '\0'; axis++) {
    const char letter[2] = {upper(*axis), '\0'};
    const char *name = letter;
    switch (*axis) {
      case 'E': name = "Dv"; break;
      case 'X':
      case 'Y': name = "tokens"; break;
      case 'C': name = "B + 1"; break;
      case 'R': name = "left + 1 + right"; break;
      case 'S': name = "rows + 1"; break;
      case 'F': name = "count"; break;
      case 'G': name = "edges"; break;
      default: break;
    }
    char size[24] = "";
    const int64_t known = s->of[(int)upper(*axis)];
    if (known >= 0) snprintf(size, sizeof size, "=%lld", (long long)known);
    const int n = snprintf(text + used, room - used, "%s%s%s%s", axis == axes ? "(" : ", ", name,
                           size, upper(*axis) != *axis ? " or 1" : "");
    used += (size_t)n;
  }
  snprintf(text + used, room - used, axes[1] == '\0' ? ",)" : ")");
}

/* Raises "name: expected float32 (B, H, N, D), got float64 (2, 4, 7); fix". */
static void raise_expected(PyObject *error, const char *name, const char *axes, int flags,
                           const sizes *s, PyObject *object, const char *fix) {
  char expected[200];
  shape_text(expected, sizeof expected, axes, s);
  const char *const type = words_of(flags).expected;
  if (!PyArray_Check(object)) {
    PyObject *got = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__name__");
    if (got != NULL) {
      PyErr_Format(error, "%s: expected %s %s, got %S%s", name, type, expected, got, fix);
      Py_DECREF(got);
    }
    return;
  }
  PyObject *shape = PyObject_GetAttrString(object, "shape");
  if (shape != NULL) {
    PyErr_Format(error, "%s: expected %s %s, got %S %S%s", name, type, expected,
                 PyArray_DESCR((PyArrayObject *)object), shape, fix);
    Py_DECREF(shape);
  }
}

void raise_strides(const char *name, PyObject *array, const char *problem, const char *fix) {
  PyObject *strides = PyObject_GetAttrString(array, "strides");
  if (strides == NULL) return;
  PyErr_Format(PyExc_ValueError, "%s: %s, got strides %S in bytes%s", name, problem, strides, fix);
  Py_DECREF(strides);
}

/* ---- checks ---------------------------------------------------------------------- */

static int is_of_type(PyArrayObject *array, int flags) {
  const int type = PyArray_TYPE(array);
  if (!PyArray_ISNOTSWAPPED(array)) return 0;
  switch (flags & TAKE_TYPES) {
    case TAKE_INT64: return type == NPY_INT64;
    case TAKE_INT32: return type == NPY_INT32;
    case TAKE_LABELS: return type == NPY_INT8 || type == NPY_INT16 || type == NPY_INT32;
    case TAKE_MASK: return type == NPY_BOOL || type == NPY_UINT8;
    case TAKE_UINT32: return type == NPY_UINT32;
    default: return type == NPY_FLOAT32;
  }
}

/* An axis may have its own size, or be an optional one of 1. */
static int fits(PyArrayObject *array, const char *axes, const sizes *s) {
  const int count = (int)strlen(axes);
  if (PyArray_NDIM(array) != count) return 0;
  for (int i = 0; i < count; i++) {
    const int64_t known = s->of[(int)upper(axes[i])], got = PyArray_DIM(array, i);
    const int is_shared = upper(axes[i]) != axes[i] && got == 1;
    if (known >= 0 && known != got && !is_shared) return 0;
  }
  return 1;
}

/* Elements from one index to the next along every axis. An axis of one element, and
 * an array of none, have no strides of their own: they get those of C order. False,
 * with an exception, for strides that libcore does not take. */
static int take_strides(PyArrayObject *array, const char *name, int flags, const char *fix,
                        int64_t strides[TAKE_MAX_AXES]) {
  const int axes = PyArray_NDIM(array), empty = PyArray_SIZE(array) == 0;
  const int64_t size = PyArray_ITEMSIZE(array);
  PyObject *const object = (PyObject *)array;
  int64_t natural = 1;
  for (int i = axes - 1; i >= 0; i--) {
    const int64_t n = empty ? 1 : PyArray_DIM(array, i), bytes = PyArray_STRIDE(array, i);
    strides[i] = n > 1 ? bytes / size : natural;
    if (n > 1 && (bytes < 0 || bytes % size != 0)) {
      raise_strides(name, object, "strides must be whole elements forward", fix);
      return 0;
    }
    if (n > 1 && i == axes - 1 && bytes != size) {
      raise_strides(name, object, "the last axis must be contiguous", fix);
      return 0;
    }
    if (n > 1) natural = strides[i] * n;
  }
  if ((flags & TAKE_CONTIGUOUS) != 0 && !PyArray_IS_C_CONTIGUOUS(array)) {
    raise_strides(name, object, "expected C order without gaps", fix);
    return 0;
  }
  return 1;
}

/* From the smallest stride to the largest: each must step over all that the ones before
 * it span. */
static int is_distinct(PyArrayObject *array, const int64_t strides[TAKE_MAX_AXES]) {
  const int axes = PyArray_NDIM(array);
  int64_t span = 1;
  int met[TAKE_MAX_AXES] = {0};
  for (int round = 0; round < axes && PyArray_SIZE(array) > 0; round++) {
    int next = -1;
    for (int i = 0; i < axes; i++) {
      if (!met[i] && (next < 0 || strides[i] < strides[next])) next = i;
    }
    met[next] = 1;
    if (PyArray_DIM(array, next) < 2) continue;
    if (strides[next] < span) return 0;
    span += strides[next] * (PyArray_DIM(array, next) - 1);
  }
  return 1;
}

int take(PyObject *object, const char *name, const char *axes, int flags, sizes *s, view *to) {
  char fix[96] = "";
  if ((flags & TAKE_WRITE) == 0) {
    snprintf(fix, sizeof fix, "; use np.ascontiguousarray(%.*s, %s)", first_word(name), name,
             words_of(flags).fix);
  }
  PyArrayObject *array = (PyArrayObject *)object;
  if (!PyArray_Check(object) || !is_of_type(array, flags)) {
    raise_expected(PyExc_TypeError, name, axes, flags, s, object, fix);
    return 0;
  }
  if (!fits(array, axes, s)) {
    raise_expected(PyExc_ValueError, name, axes, flags, s, object, "");
    return 0;
  }
  if ((flags & TAKE_WRITE) != 0) {
    snprintf(fix, sizeof fix, "; give a new array, as np.empty makes it");
  } else {
    snprintf(fix, sizeof fix, "; use %.*s.copy()", first_word(name), name);
  }
  if (!PyArray_ISALIGNED(array)) {
    PyErr_Format(PyExc_ValueError, "%s: the array is not aligned to its elements%s", name, fix);
    return 0;
  }
  if ((flags & TAKE_WRITE) != 0 && !PyArray_ISWRITEABLE(array)) {
    PyErr_Format(PyExc_ValueError, "%s: the array is read-only; give a writable one", name);
    return 0;
  }
  int64_t strides[TAKE_MAX_AXES] = {0};
  if (!take_strides(array, name, flags, fix, strides)) return 0;
  if ((flags & (TAKE_WRITE | TAKE_DISTINCT)) != 0 && !is_distinct(array, strides)) {
    raise_strides(name, object, "elements share memory", fix);
    return 0;
  }

  *to = (view){.data = PyArray_DATA(array), .bytes = (int)PyArray_ITEMSIZE(array)};
  int rows = 0;
  for (int i = 0; axes[i] != '\0'; i++) {
    const int is_shared = upper(axes[i]) != axes[i] && PyArray_DIM(array, i) == 1;
    const int64_t stride = is_shared ? 0 : strides[i];
    if (upper(axes[i]) == axes[i]) s->of[(int)axes[i]] = PyArray_DIM(array, i);
    if (upper(axes[i]) == 'B') to->batch_stride = stride;
    if (upper(axes[i]) == 'H') to->head_stride = stride;
    if (strchr("NMXYT", axes[i]) != NULL && rows++ == 0) to->row_stride = stride;
  }
  return 1;
}

int take_rows(PyObject *object, const char *name, const char *axes, int flags, sizes *s,
              rp_rows *to) {
  view v = {0};
  if (!take(object, name, axes, flags, s, &v)) return 0;
  *to = (rp_rows){v.data, v.batch_stride, v.head_stride, v.row_stride};
  return 1;
}

int take_rows_out(PyObject *object, const char *name, const char *axes, sizes *s, rp_rows_out *to) {
  view v = {0};
  if (!take(object, name, axes, TAKE_WRITE, s, &v)) return 0;
  *to = (rp_rows_out){v.data, v.batch_stride, v.head_stride, v.row_stride};
  return 1;
}

int take_int64(PyObject *object, const char *name, const char *axes, sizes *s, const int64_t **to) {
  view v = {0};
  *to = NULL;
  if (object == Py_None) return 1;
  if (!take(object, name, axes, TAKE_INT64 | TAKE_CONTIGUOUS, s, &v)) return 0;
  *to = v.data;
  return 1;
}

int take_int32(PyObject *object, const char *name, const char *axes, sizes *s, const int32_t **to) {
  view v = {0};
  *to = NULL;
  if (object == Py_None) return 1;
  if (!take(object, name, axes, TAKE_INT32 | TAKE_CONTIGUOUS, s, &v)) return 0;
  *to = v.data;
  return 1;
}

PyObject *array_new(const char *axes, const sizes *s) {
  npy_intp shape[TAKE_MAX_AXES];
  const int count = (int)strlen(axes);
  for (int i = 0; i < count; i++) shape[i] = (npy_intp)s->of[(int)axes[i]];
  return PyArray_SimpleNew(count, shape, NPY_FLOAT32);
}
