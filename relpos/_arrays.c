/* SPDX-License-Identifier: Apache-2.0
 *
 * _arrays.c: the one way from an object to memory.
 *
 * There is no conversion: an array is used where it lies or refused with the fix. What libcore
 * cannot see is checked here (types, sizes, strides); what it can see is left to it.
 *
 * The object is an ndarray or, where the call has a placement, a tuple that says where an array
 * of numbers lies on the device. Either is read into a header, and every check is about that.
 */
#include "_core.h"

#include <stdio.h>
#include <string.h>

sizes sizes_unknown(void) {
  sizes s = {.placement = NULL};
  for (size_t i = 0; i < sizeof s.of / sizeof s.of[0]; i++) s.of[i] = -1;
  return s;
}

/* ---- headers --------------------------------------------------------------------- */

/* What an array says of itself. */
typedef struct header {
  void *data;
  int axes;
  int64_t shape[TAKE_MAX_AXES], strides[TAKE_MAX_AXES]; /* strides in bytes */
  int64_t bytes;                                        /* of an element */
  int is_of_type, is_aligned, is_writable;
} header;

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

static void read_array(PyArrayObject *array, int flags, header *h) {
  *h = (header){.data = PyArray_DATA(array),
                .axes = PyArray_NDIM(array),
                .bytes = PyArray_ITEMSIZE(array),
                .is_of_type = is_of_type(array, flags),
                .is_aligned = PyArray_ISALIGNED(array),
                .is_writable = PyArray_ISWRITEABLE(array)};
  for (int i = 0; i < h->axes && i < TAKE_MAX_AXES; i++) {
    h->shape[i] = PyArray_DIM(array, i);
    h->strides[i] = PyArray_STRIDE(array, i);
  }
}

/* Numbers that lie on the device, which are float32 or, of the placement's element, bfloat16. */
static int is_on_device(int flags, const sizes *s) {
  return s->placement != NULL && (flags & (TAKE_TYPES | TAKE_HOST)) == 0;
}

static int is_bfloat16(int flags, const sizes *s) {
  return is_on_device(flags, s) && (flags & TAKE_ELEMENT) != 0 && s->placement->element == RP_BF16;
}

/* Memory of a device: (address, type, shape, strides in elements, writable). False, with an
 * exception, for another tuple. */
static int read_memory(PyObject *object, const char *name, int flags, const sizes *s, header *h) {
  unsigned long long address;
  const char *type;
  PyObject *shape, *strides;
  *h = (header){.bytes = is_bfloat16(flags, s) ? 2 : 4};
  if (!PyArg_ParseTuple(object, "KsO!O!p:memory", &address, &type, &PyTuple_Type, &shape,
                        &PyTuple_Type, &strides, &h->is_writable)) {
    return 0;
  }
  if (PyTuple_Size(shape) != PyTuple_Size(strides) || PyTuple_Size(shape) > INT8_MAX) {
    PyErr_Format(PyExc_ValueError, "%s: a shape of %zd axes with %zd strides", name,
                 PyTuple_Size(shape), PyTuple_Size(strides));
    return 0;
  }
  h->data = (void *)(uintptr_t)address;
  h->axes = (int)PyTuple_Size(shape);
  h->is_of_type = strcmp(type, is_bfloat16(flags, s) ? "bfloat16" : "float32") == 0;
  h->is_aligned = address % (unsigned long long)h->bytes == 0;
  for (int i = 0; i < h->axes && i < TAKE_MAX_AXES; i++) {
    h->shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    const int64_t stride = PyLong_AsLongLong(PyTuple_GetItem(strides, i));
    if (PyErr_Occurred()) return 0;
    const int64_t n = h->shape[i], farthest = INT64_MAX / 64 / (n > 1 ? n : 1);
    if (n < 0 || stride > farthest || stride < -farthest) {
      PyErr_Format(PyExc_ValueError, "%s: axis %d of %lld with a stride of %lld is out of range",
                   name, i, (long long)n, (long long)stride);
      return 0;
    }
    h->strides[i] = stride * h->bytes;
  }
  return 1;
}

int axes_of(PyObject *object) {
  if (PyArray_Check(object)) return PyArray_NDIM((PyArrayObject *)object);
  if (!PyTuple_Check(object) || PyTuple_Size(object) < 3) return -1;
  PyObject *const shape = PyTuple_GetItem(object, 2);
  return PyTuple_Check(shape) ? (int)PyTuple_Size(shape) : -1;
}

/* Is there an axis without an element? */
static int is_empty(const header *h) {
  for (int i = 0; i < h->axes; i++) {
    if (h->shape[i] == 0) return 1;
  }
  return 0;
}

/* ---- messages ------------------------------------------------------------------- */

/* What is asked for, as messages say it, and as NumPy would make it. */
typedef struct type_words {
  const char *expected, *fix;
} type_words;

static type_words words_of(int flags, const sizes *s) {
  switch (flags & TAKE_TYPES) {
    case TAKE_INT64: return (type_words){"int64", "np.int64"};
    case TAKE_INT32: return (type_words){"int32", "np.int32"};
    case TAKE_LABELS: return (type_words){"int8, int16 or int32", "np.int32"};
    case TAKE_MASK: return (type_words){"bool or uint8", "bool"};
    case TAKE_UINT32: return (type_words){"uint32", "np.uint32"};
    default: return (type_words){is_bfloat16(flags, s) ? "bfloat16" : "float32", "np.float32"};
  }
}

/* The length of the first word: "labels" of "labels of key_table". */
static int first_word(const char *name) { return (int)strcspn(name, " "); }

static char upper(char axis) { return axis == 'b' ? 'B' : axis == 'h' ? 'H' : axis; }

/* "(B=2, H=8 or 1, N, D=64)": the axes with the sizes known so far. */
static void shape_text(char *text, size_t room, const char *axes, const sizes *s) {
  size_t used = 0;
  for (const char *axis = axes; *axis != '\0'; axis++) {
    const int divides = *axis == 'K' && s->of['K'] < 0;
    const int apart = *axis == 'K' && !divides && s->of['K'] != s->of['H'];
    const char letter[2] = {*axis == 'K' ? 'H' : upper(*axis), '\0'};
    const char *name = apart ? "heads of k" : letter;
    switch (*axis) {
      case 'E': name = "Dv"; break;
      case 'X':
      case 'Y': name = "tokens"; break;
      case 'C': name = "B + 1"; break;
      case 'R': name = "left + 1 + right"; break;
      case 'S': name = "rows + 1"; break;
      case 'F': name = "count"; break;
      case 'G': name = "edges"; break;
      case 'P': name = "H * D"; break;
      case 'W': name = "d_model"; break;
      case 'V': name = "distances"; break;
      default: break;
    }
    char size[24] = "";
    const int64_t known = s->of[divides ? 'H' : (int)upper(*axis)];
    if (known >= 0) snprintf(size, sizeof size, "=%lld", (long long)known);
    const char *const others = upper(*axis) != *axis ? " or 1" : divides ? " or a divisor" : "";
    used += (size_t)snprintf(text + used, room - used, "%s%s%s%s", axis == axes ? "(" : ", ", name,
                             size, others);
  }
  snprintf(text + used, room - used, axes[1] == '\0' ? ",)" : ")");
}

/* "float64 (2, 4, 7)" of an array, the type's name of anything else. A new reference, or NULL. */
static PyObject *what_came(PyObject *object, int is_memory) {
  if (is_memory) {
    return PyUnicode_FromFormat("%S %S", PyTuple_GetItem(object, 1), PyTuple_GetItem(object, 2));
  }
  if (!PyArray_Check(object)) {
    return PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__name__");
  }
  PyObject *const shape = PyObject_GetAttrString(object, "shape");
  if (shape == NULL) return NULL;
  PyObject *const text =
      PyUnicode_FromFormat("%S %S", PyArray_DESCR((PyArrayObject *)object), shape);
  Py_DECREF(shape);
  return text;
}

/* Raises "name: expected float32 (B, H, N, D), got float64 (2, 4, 7); fix". */
static void raise_expected(PyObject *error, const char *name, const char *axes, int flags,
                           const sizes *s, PyObject *object, const char *fix) {
  char expected[200];
  shape_text(expected, sizeof expected, axes, s);
  const int is_memory = is_on_device(flags, s) && PyTuple_Check(object);
  PyObject *const got = what_came(object, is_memory);
  if (got == NULL) return;
  PyErr_Format(error, "%s: expected %s %s, got %S%s", name, words_of(flags, s).expected, expected,
               got, fix);
  Py_DECREF(got);
}

void raise_strides(const char *name, PyObject *array, const char *problem, const char *fix) {
  if (PyTuple_Check(array)) {
    PyErr_Format(PyExc_ValueError, "%s: %s, got strides %S in elements%s", name, problem,
                 PyTuple_GetItem(array, 3), fix);
    return;
  }
  PyObject *strides = PyObject_GetAttrString(array, "strides");
  if (strides == NULL) return;
  PyErr_Format(PyExc_ValueError, "%s: %s, got strides %S in bytes%s", name, problem, strides, fix);
  Py_DECREF(strides);
}

/* What to do about an array, the end of a message. */
typedef struct fix {
  char text[96];
} fix;

/* For one of another type. What is no array at all is a mistake that no conversion mends. */
static fix convert(const char *name, int flags, const sizes *s, PyObject *object) {
  fix f = {""};
  if (object == Py_None || PyUnicode_Check(object) || PyBytes_Check(object) ||
      PyLong_Check(object) || PyFloat_Check(object)) {
    return f;
  }
  if (is_on_device(flags, s)) {
    snprintf(f.text, sizeof f.text, "; convert %.*s first", first_word(name), name);
  } else if ((flags & TAKE_WRITE) == 0) {
    snprintf(f.text, sizeof f.text, "; use np.ascontiguousarray(%.*s, %s)", first_word(name), name,
             words_of(flags, s).fix);
  }
  return f;
}

/* For one that does not lie as it must. */
static fix copy(const char *name, int flags, const sizes *s) {
  fix f;
  if (is_on_device(flags, s)) {
    snprintf(f.text, sizeof f.text, "; make %.*s contiguous first", first_word(name), name);
  } else if ((flags & TAKE_WRITE) != 0) {
    snprintf(f.text, sizeof f.text, "; give a new array, as np.empty makes it");
  } else {
    snprintf(f.text, sizeof f.text, "; use %.*s.copy()", first_word(name), name);
  }
  return f;
}

/* ---- checks ---------------------------------------------------------------------- */

/* An axis may have its own size, be an optional one of 1, or K, which divides H. */
static int fits(const header *h, const char *axes, const sizes *s) {
  const int count = (int)strlen(axes);
  if (h->axes != count) return 0;
  for (int i = 0; i < count; i++) {
    const int64_t known = s->of[(int)upper(axes[i])], got = h->shape[i];
    if (known >= 0 && known != got && (upper(axes[i]) == axes[i] || got != 1)) return 0;
    const int64_t heads = axes[i] == 'K' && known < 0 ? s->of['H'] : got;
    if (got != heads && (got == 0 || heads == 0 || heads % got != 0)) return 0;
  }
  return 1;
}

/* Elements from one index to the next along every axis. An axis of one element, and an array of
 * none, have no strides of their own: they get those of C order (of axes that are empty, as if they
 * had one element). NULL, or what is wrong with strides that libcore does not take. */
static const char *take_strides(const header *h, int flags, int64_t strides[TAKE_MAX_AXES]) {
  const int axes = h->axes, empty = is_empty(h);
  int64_t natural = 1;
  for (int i = axes - 1; i >= 0; i--) {
    const int64_t n = h->shape[i], bytes = h->strides[i];
    strides[i] = n > 1 && !empty ? bytes / h->bytes : natural;
    if (empty) {
      if (n > 1 && natural <= INT64_MAX / n) natural *= n;
      continue;
    }
    if (n <= 1) continue;
    if (bytes < 0 || bytes % h->bytes != 0) return "strides must be whole elements forward";
    if (i == axes - 1 && bytes != h->bytes) return "the last axis must be contiguous";
    if ((flags & TAKE_CONTIGUOUS) != 0 && strides[i] != natural) {
      return "expected C order without gaps";
    }
    natural = strides[i] * n;
  }
  return NULL;
}

/* From the smallest stride to the largest: each must step over all that the ones before
 * it span. */
static int is_distinct(const header *h, const int64_t strides[TAKE_MAX_AXES]) {
  const int axes = h->axes;
  int64_t span = 1;
  int met[TAKE_MAX_AXES] = {0};
  for (int round = 0; round < axes && !is_empty(h); round++) {
    int next = -1;
    for (int i = 0; i < axes; i++) {
      if (!met[i] && (next < 0 || strides[i] < strides[next])) next = i;
    }
    met[next] = 1;
    if (h->shape[next] < 2) continue;
    if (strides[next] < span) return 0;
    span += strides[next] * (h->shape[next] - 1);
  }
  return 1;
}

/* The header of an array of the type and the axes asked for. False, with an exception. */
static int read_header(PyObject *object, const char *name, const char *axes, int flags,
                       const sizes *s, header *h) {
  const int on_device = is_on_device(flags, s);
  if (on_device && PyArray_Check(object)) {
    PyErr_Format(PyExc_TypeError, "%s: lies on the host, but the call is on %s; move it there",
                 name, s->placement->device);
    return 0;
  }
  const int readable = on_device ? PyTuple_Check(object) : PyArray_Check(object);
  if (readable && on_device && !read_memory(object, name, flags, s, h)) return 0;
  if (readable && !on_device) read_array((PyArrayObject *)object, flags, h);
  if (!readable || !h->is_of_type) {
    raise_expected(PyExc_TypeError, name, axes, flags, s, object,
                   convert(name, flags, s, object).text);
    return 0;
  }
  if (fits(h, axes, s)) return 1;
  raise_expected(PyExc_ValueError, name, axes, flags, s, object, "");
  return 0;
}

int take(PyObject *object, const char *name, const char *axes, int flags, sizes *s, view *to) {
  header h;
  if (!read_header(object, name, axes, flags, s, &h)) return 0;
  if (!h.is_aligned) {
    PyErr_Format(PyExc_ValueError, "%s: the array is not aligned to its elements%s", name,
                 copy(name, flags, s).text);
    return 0;
  }
  if ((flags & TAKE_WRITE) != 0 && !h.is_writable) {
    PyErr_Format(PyExc_ValueError, "%s: the array is read-only; give a writable one", name);
    return 0;
  }
  int64_t strides[TAKE_MAX_AXES] = {0};
  const char *problem = take_strides(&h, flags, strides);
  if (problem == NULL && (flags & (TAKE_WRITE | TAKE_DISTINCT)) != 0 && !is_distinct(&h, strides)) {
    problem = "elements share memory";
  }
  if (problem != NULL) {
    raise_strides(name, object, problem, copy(name, flags, s).text);
    return 0;
  }

  *to = (view){.data = h.data, .bytes = (int)h.bytes};
  int rows = 0;
  for (int i = 0; axes[i] != '\0'; i++) {
    const int is_shared = upper(axes[i]) != axes[i] && h.shape[i] == 1;
    const int64_t stride = is_shared ? 0 : strides[i];
    if (upper(axes[i]) == axes[i]) s->of[(int)axes[i]] = h.shape[i];
    if (upper(axes[i]) == 'B') to->batch_stride = stride;
    if (upper(axes[i]) == 'H' || axes[i] == 'K') to->head_stride = stride;
    if (strchr("NMXYT", axes[i]) != NULL && rows++ == 0) to->row_stride = stride;
  }
  return 1;
}

int take_rows(PyObject *object, const char *name, const char *axes, sizes *s, rp_rows *to) {
  view v = {0};
  if (!take(object, name, axes, TAKE_ELEMENT, s, &v)) return 0;
  *to = (rp_rows){v.data, v.batch_stride, v.head_stride, v.row_stride};
  return 1;
}

int take_rows_out(PyObject *object, const char *name, const char *axes, sizes *s, rp_rows_out *to) {
  view v = {0};
  if (!take(object, name, axes, TAKE_WRITE | TAKE_ELEMENT, s, &v)) return 0;
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
  for (int i = 0; axes[i] != '\0'; i++) shape[i] = (npy_intp)s->of[(int)axes[i]];
  return result_new((int)strlen(axes), shape);
}
