/* SPDX-License-Identifier: Apache-2.0
 *
 * _core.c: libcore for Python.
 *
 * Each function parses its arguments, checks the arrays, releases the GIL, calls
 * libcore and turns its status into an exception. There is no arithmetic here and
 * no conversion: an array is used where it lies or refused with the fix.
 *
 * Axes are named by letters, and an array's axes by a word of them:
 *
 *   B H N M D   as in relpos.h        E   Dv, the width of values and outputs
 *   X Y         tokens of packed queries, of packed keys
 *   T U         rows of the key table, of the value table
 *   C           B + 1 offsets
 *
 * The first array that has an axis fixes its size (struct sizes); the others must
 * agree. What libcore cannot see is checked here (sizes of arrays, strides, and
 * that offsets end where the tokens end), what it can see is left to it.
 *
 * The arguments that forward and backward share come as one tuple, `call`, which
 * Python's context keeps: (layout, causal, scale, lengths, key_lengths, offsets,
 * key_offsets, query_start, key_relation, value_relation), a relation being None or
 * (table, left, right, beyond).
 *
 * Objects are borrowed from the argument tuple, which the caller holds for as long
 * as the call lasts, also while the GIL is released.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "relpos/relpos.h"

/* ------------------------------------------------------------------------
 * Errors
 * ------------------------------------------------------------------------ */

typedef struct module_state {
  PyObject *device_error;
} module_state;

/* Raises the exception for a status of libcore, with libcore's own sentence. */
static void raise_status(PyObject *module, rp_status status) {
  const module_state *state = PyModule_GetState(module);
  PyObject *type = PyExc_SystemError;
  switch (status) {
    case RP_OK: break;
    case RP_ERROR_ARGUMENT:
    case RP_ERROR_SHAPE: type = PyExc_ValueError; break;
    case RP_ERROR_MEMORY: type = PyExc_MemoryError; break;
    case RP_ERROR_FILE: type = PyExc_OSError; break;
    case RP_ERROR_ORDER: type = PyExc_RuntimeError; break;
    case RP_ERROR_DEVICE: type = state->device_error; break;
  }
  PyErr_SetString(type, rp_last_error());
}

/* ------------------------------------------------------------------------
 * Arrays
 * ------------------------------------------------------------------------ */

/* The size of each axis letter; -1 where no array has fixed it yet. */
typedef struct sizes {
  int64_t of['Z' + 1];
} sizes;

static sizes sizes_unknown(void) {
  sizes s;
  for (size_t i = 0; i < sizeof s.of / sizeof s.of[0]; i++) s.of[i] = -1;
  return s;
}

enum {
  TAKE_INT64 = 1,      /* int64 rather than float32 */
  TAKE_WRITE = 2,      /* to be written: writable, and no element twice */
  TAKE_DISTINCT = 4,   /* to be read, but no element twice */
  TAKE_CONTIGUOUS = 8, /* in C order without gaps */
  TAKE_MAX_AXES = 4
};

/* "(B=2, H=8, N, D=64)": the axes with the sizes known so far. */
static void shape_text(char *text, size_t room, const char *axes, const sizes *s) {
  size_t used = 0;
  for (const char *axis = axes; *axis != '\0'; axis++) {
    const char letter[2] = {*axis, '\0'};
    const char *name = letter;
    if (*axis == 'E') name = "Dv";
    if (*axis == 'X' || *axis == 'Y') name = "tokens";
    if (*axis == 'U') name = "T";
    if (*axis == 'C') name = "B + 1";
    char size[24] = "";
    if (s->of[(int)*axis] >= 0) snprintf(size, sizeof size, "=%lld", (long long)s->of[(int)*axis]);
    const int n =
        snprintf(text + used, room - used, "%s%s%s", axis == axes ? "(" : ", ", name, size);
    used += (size_t)n;
  }
  snprintf(text + used, room - used, axes[1] == '\0' ? ",)" : ")");
}

/* Raises "name: expected float32 (B, H, N, D), got float64 (2, 4, 7); fix". */
static void raise_expected(PyObject *error, const char *name, const char *axes, int flags,
                           const sizes *s, PyObject *object, const char *fix) {
  char expected[160];
  shape_text(expected, sizeof expected, axes, s);
  const char *type = (flags & TAKE_INT64) != 0 ? "int64" : "float32";
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

/* Raises "name: problem, got strides (8, 4); fix". */
static void raise_strides(const char *name, PyArrayObject *array, const char *problem,
                          const char *fix) {
  PyObject *strides = PyObject_GetAttrString((PyObject *)array, "strides");
  if (strides == NULL) return;
  PyErr_Format(PyExc_ValueError, "%s: %s, got strides %S in bytes%s", name, problem, strides, fix);
  Py_DECREF(strides);
}

/* Elements from one index to the next along every axis. An axis of one element, and
 * an array of none, have no strides of their own: they get those of C order. False,
 * with an exception, for strides that libcore does not take. */
static int take_strides(PyArrayObject *array, const char *name, int flags,
                        int64_t strides[TAKE_MAX_AXES]) {
  const int axes = PyArray_NDIM(array);
  const int64_t size = PyArray_ITEMSIZE(array);
  char fix[96];
  if ((flags & TAKE_WRITE) != 0) {
    snprintf(fix, sizeof fix, "; give a new array, as np.empty makes it");
  } else {
    snprintf(fix, sizeof fix, "; use %s.copy()", name);
  }

  const int empty = PyArray_SIZE(array) == 0;
  int64_t natural = 1;
  for (int i = axes - 1; i >= 0; i--) {
    const int64_t n = empty ? 1 : PyArray_DIM(array, i), bytes = PyArray_STRIDE(array, i);
    strides[i] = n > 1 ? bytes / size : natural;
    if (n > 1 && (bytes < 0 || bytes % size != 0)) {
      raise_strides(name, array, "strides must be whole elements forward", fix);
      return 0;
    }
    if (n > 1 && i == axes - 1 && bytes != size) {
      raise_strides(name, array, "the last axis must be contiguous", fix);
      return 0;
    }
    if (n > 1) natural = strides[i] * n;
  }

  if ((flags & TAKE_CONTIGUOUS) != 0 && !PyArray_IS_C_CONTIGUOUS(array)) {
    raise_strides(name, array, "expected C order without gaps", fix);
    return 0;
  }
  if ((flags & (TAKE_WRITE | TAKE_DISTINCT)) != 0 && !empty) {
    /* From the smallest stride to the largest: each steps over all that the ones
     * before it span. */
    int64_t span = 1;
    int met[TAKE_MAX_AXES] = {0};
    for (int round = 0; round < axes; round++) {
      int next = -1;
      for (int i = 0; i < axes; i++) {
        if (!met[i] && (next < 0 || strides[i] < strides[next])) next = i;
      }
      met[next] = 1;
      if (PyArray_DIM(array, next) < 2) continue;
      if (strides[next] < span) {
        raise_strides(name, array, "elements share memory", fix);
        return 0;
      }
      span += strides[next] * (PyArray_DIM(array, next) - 1);
    }
  }
  return 1;
}

/* The one way from an object to memory: checks that it is a native, aligned array
 * of the type and the axes asked for and fills rows by the axes' letters. Never
 * copies. False, with an exception, where it does not fit. */
static int take(PyObject *object, const char *name, const char *axes, int flags, sizes *s,
                rp_rows_out *rows) {
  const int wants = (flags & TAKE_INT64) != 0 ? NPY_INT64 : NPY_FLOAT32;
  const int count = (int)strlen(axes);
  char fix[96] = "";
  if ((flags & TAKE_WRITE) == 0) {
    snprintf(fix, sizeof fix, "; use np.ascontiguousarray(%s, np.%s)", name,
             wants == NPY_INT64 ? "int64" : "float32");
  }
  PyArrayObject *array = (PyArrayObject *)object;
  if (!PyArray_Check(object) || PyArray_TYPE(array) != wants || !PyArray_ISNOTSWAPPED(array)) {
    raise_expected(PyExc_TypeError, name, axes, flags, s, object, fix);
    return 0;
  }
  int fits = PyArray_NDIM(array) == count;
  for (int i = 0; fits && i < count; i++) {
    const int64_t known = s->of[(int)axes[i]];
    fits = known < 0 || known == PyArray_DIM(array, i);
  }
  if (!fits) {
    raise_expected(PyExc_ValueError, name, axes, flags, s, object, "");
    return 0;
  }
  if (!PyArray_ISALIGNED(array)) {
    PyErr_Format(PyExc_ValueError, "%s: the array is not aligned to its elements; use %s.copy()",
                 name, name);
    return 0;
  }
  if ((flags & TAKE_WRITE) != 0 && !PyArray_ISWRITEABLE(array)) {
    PyErr_Format(PyExc_ValueError, "%s: the array is read-only; give a writable one", name);
    return 0;
  }
  int64_t strides[TAKE_MAX_AXES] = {0};
  if (!take_strides(array, name, flags, strides)) return 0;

  *rows = (rp_rows_out){.data = PyArray_DATA(array)};
  for (int i = 0; i < count; i++) {
    s->of[(int)axes[i]] = PyArray_DIM(array, i);
    if (axes[i] == 'B') rows->batch_stride = strides[i];
    if (axes[i] == 'H') rows->head_stride = strides[i];
    if (strchr("NMXYTU", axes[i]) != NULL) rows->row_stride = strides[i];
  }
  return 1;
}

static rp_rows readable(rp_rows_out rows) {
  return (rp_rows){rows.data, rows.batch_stride, rows.head_stride, rows.row_stride};
}

/* A new float32 array of these axes, whose sizes are known by now. */
static PyObject *array_new(const char *axes, const sizes *s) {
  npy_intp shape[TAKE_MAX_AXES];
  const int count = (int)strlen(axes);
  for (int i = 0; i < count; i++) shape[i] = (npy_intp)s->of[(int)axes[i]];
  return PyArray_SimpleNew(count, shape, NPY_FLOAT32);
}

/* ------------------------------------------------------------------------
 * Attention
 * ------------------------------------------------------------------------ */

/* The axes of every array of a call, by layout. */
typedef struct axis_words {
  const char *q, *k, *v, *out, *lse;
} axis_words;

/* One call on its way to libcore. gradients NULL: forward. */
typedef struct job {
  rp_attention attention;
  rp_rows_out q, k, v, out, lse, dout;
  rp_attention_gradients gradients;
  int backward;
  sizes sizes;
  axis_words axes;
  PyObject *layout, *key_relation, *value_relation;
  PyObject *lengths, *key_lengths, *offsets, *key_offsets, *query_start;
} job;

static int choose_axes(job *j) {
  const int bhnd =
      PyUnicode_Check(j->layout) && PyUnicode_CompareWithASCIIString(j->layout, "bhnd") == 0;
  const int bnhd =
      PyUnicode_Check(j->layout) && PyUnicode_CompareWithASCIIString(j->layout, "bnhd") == 0;
  if (!bhnd && !bnhd) {
    PyErr_Format(PyExc_ValueError, "layout: expected 'bhnd' or 'bnhd', got %R", j->layout);
    return 0;
  }
  axis_words *w = &j->axes;
  w->q = bhnd ? "BHND" : "BNHD", w->out = bhnd ? "BHNE" : "BNHE", w->lse = "BHN";
  w->k = bhnd ? "BHMD" : "BMHD", w->v = bhnd ? "BHME" : "BMHE";
  if (j->offsets != Py_None)
    w->q = "XHD", w->out = "XHE", w->lse = "HX", w->k = "XHD", w->v = "XHE";
  if (j->key_offsets != Py_None) w->k = "YHD", w->v = "YHE";
  return 1;
}

/* One integer per sequence, or None. */
static int take_integers(PyObject *object, const char *name, const char *axes, sizes *s,
                         const int64_t **to) {
  rp_rows_out rows = {0};
  *to = NULL;
  if (object == Py_None) return 1;
  if (!take(object, name, axes, TAKE_INT64 | TAKE_CONTIGUOUS, s, &rows)) return 0;
  *to = (const int64_t *)(const void *)rows.data;
  return 1;
}

/* Offsets fix the number of sequences. */
static int take_offsets(PyObject *object, const char *name, sizes *s, const int64_t **to) {
  if (!take_integers(object, name, "C", s, to)) return 0;
  if (*to == NULL) return 1;
  if (s->of['C'] == 0) {
    PyErr_Format(PyExc_ValueError,
                 "%s: expected B + 1 numbers from 0 to the number of tokens, got none", name);
    return 0;
  }
  s->of['B'] = s->of['C'] - 1;
  return 1;
}

static int offsets_end(const int64_t *offsets, const char *name, const sizes *s, char axis,
                       const char *array) {
  if (offsets == NULL || offsets[s->of['B']] == s->of[(int)axis]) return 1;
  PyErr_Format(PyExc_ValueError, "%s: the last one is %lld, but %s has %lld tokens", name,
               (long long)offsets[s->of['B']], array, (long long)s->of[(int)axis]);
  return 0;
}

/* A relation: None or (table, left, right, beyond). */
static int take_relation(PyObject *object, const char *name, char rows_axis, char width_axis,
                         sizes *s, rp_relation *to) {
  memset(to, 0, sizeof *to);
  if (object == Py_None) return 1;
  PyObject *table = NULL;
  long long left = 0, right = 0;
  if (!PyTuple_Check(object)) {
    PyErr_Format(PyExc_TypeError, "%s: expected a tuple (table, left, right, beyond)", name);
    return 0;
  }
  if (!PyArg_ParseTuple(object, "OLLi:relation", &table, &left, &right, &to->beyond)) return 0;
  const char shared[] = {rows_axis, width_axis, '\0'};
  const char per_head[] = {'H', rows_axis, width_axis, '\0'};
  const int is_per_head = PyArray_Check(table) && PyArray_NDIM((PyArrayObject *)table) == 3;
  rp_rows_out rows = {0};
  if (!take(table, name, is_per_head ? per_head : shared, TAKE_DISTINCT, s, &rows)) return 0;
  const int64_t last = s->of[(int)rows_axis] - 1;
  if (left < 0 || right < 0 || left > last || right != last - left) {
    PyErr_Format(PyExc_ValueError,
                 "%s: a band from -%lld to %lld needs left + 1 + right rows, got %lld", name, left,
                 right, (long long)(last + 1));
    return 0;
  }
  to->table = rows.data;
  to->head_stride = rows.head_stride;
  to->row_stride = rows.row_stride;
  to->left = left;
  to->right = right;
  return 1;
}

/* Reads the shared arguments and the arrays that forward and backward share. */
static int take_call(job *j, PyObject *call, PyObject *q, PyObject *k, PyObject *v) {
  rp_attention *a = &j->attention;
  sizes *s = &j->sizes;
  *a = rp_attention_default();
  *s = sizes_unknown();
  if (!PyArg_ParseTuple(call, "OpdOOOOOOO:call", &j->layout, &a->causal, &a->scale, &j->lengths,
                        &j->key_lengths, &j->offsets, &j->key_offsets, &j->query_start,
                        &j->key_relation, &j->value_relation)) {
    return 0;
  }
  if (!choose_axes(j)) return 0;
  if (!take_offsets(j->offsets, "offsets", s, &a->offsets)) return 0;
  if (!take_offsets(j->key_offsets, "key_offsets", s, &a->key_offsets)) return 0;
  if (!take(q, "q", j->axes.q, 0, s, &j->q)) return 0;
  if (!offsets_end(a->offsets, "offsets", s, 'X', "q")) return 0;
  if (!take(k, "k", j->axes.k, 0, s, &j->k)) return 0;
  if (!offsets_end(a->key_offsets, "key_offsets", s, 'Y', "k")) return 0;
  if (!take(v, "v", j->axes.v, 0, s, &j->v)) return 0;
  if (!take_integers(j->lengths, "lengths", "B", s, &a->lengths)) return 0;
  if (!take_integers(j->key_lengths, "key_lengths", "B", s, &a->key_lengths)) return 0;
  if (!take_integers(j->query_start, "query_start", "B", s, &a->query_start)) return 0;
  if (!take_relation(j->key_relation, "key_table", 'T', 'D', s, &a->key)) return 0;
  if (!take_relation(j->value_relation, "value_table", 'U', 'E', s, &a->value)) return 0;
  a->B = s->of['B'];
  a->H = s->of['H'];
  a->D = s->of['D'];
  a->Dv = s->of['E'];
  a->N = s->of['N'] >= 0 ? s->of['N'] : 0;
  a->M = s->of['M'] >= 0 ? s->of['M'] : 0;
  return 1;
}

/* Where a table's gradient goes: None, or an array that lies as the table does. */
static int take_table_gradient(PyObject *object, const char *name, char rows_axis, char width_axis,
                               const rp_relation *relation, PyObject *table_tuple, sizes *s,
                               rp_real **to) {
  *to = NULL;
  if (object == Py_None) return 1;
  if (relation->table == NULL) {
    PyErr_Format(PyExc_ValueError, "%s: the call has no such table", name);
    return 0;
  }
  PyObject *table = PyTuple_GetItem(table_tuple, 0);
  const char shared[] = {rows_axis, width_axis, '\0'};
  const char per_head[] = {'H', rows_axis, width_axis, '\0'};
  rp_rows_out rows = {0};
  if (!take(object, name, PyArray_NDIM((PyArrayObject *)table) == 3 ? per_head : shared, TAKE_WRITE,
            s, &rows)) {
    return 0;
  }
  if (rows.head_stride != relation->head_stride || rows.row_stride != relation->row_stride) {
    raise_strides(name, (PyArrayObject *)object, "must lie in memory as its table does", "");
    return 0;
  }
  *to = rows.data;
  return 1;
}

static rp_status workspace_bytes(const job *j, int64_t *bytes) {
  return rp_attention_workspace(&j->attention, j->backward ? NULL : bytes,
                                j->backward ? bytes : NULL);
}

/* Calls libcore without the GIL. False, with an exception, where it fails. Another
 * thread may raise the number of threads between the query of the workspace and
 * the call: then libcore finds it too small, and a second query tells. */
static int run(PyObject *module, const job *j) {
  int64_t bytes = -1, needed = 0;
  void *block = NULL;
  rp_status status = workspace_bytes(j, &needed);
  while (status == RP_OK && needed > bytes) {
    bytes = needed;
    PyMem_Free(block);
    block = PyMem_Malloc((size_t)bytes + 64);
    if (block == NULL) {
      PyErr_Format(PyExc_MemoryError, "attention: no memory for a workspace of %lld bytes",
                   (long long)bytes);
      return 0;
    }
    void *workspace = (char *)block + (64 - (uintptr_t)block % 64);
    Py_BEGIN_ALLOW_THREADS
    status = j->backward
                 ? rp_attention_backward(&j->attention, readable(j->q), readable(j->k),
                                         readable(j->v), readable(j->out), j->lse.data,
                                         readable(j->dout), &j->gradients, workspace, bytes)
                 : rp_attention_forward(&j->attention, readable(j->q), readable(j->k),
                                        readable(j->v), j->out, j->lse.data, workspace, bytes);
    Py_END_ALLOW_THREADS
    if (status == RP_OK) break;
    if (status == RP_ERROR_MEMORY && workspace_bytes(j, &needed) == RP_OK && needed > bytes) {
      status = RP_OK;
    }
  }
  PyMem_Free(block);
  if (status != RP_OK) raise_status(module, status);
  return status == RP_OK;
}

/* attention_forward(q, k, v, out, with_lse, call) -> (out, lse)
 *
 * out None: a new array in the layout of q. lse is None unless asked for. */
static PyObject *attention_forward(PyObject *module, PyObject *args) {
  PyObject *q, *k, *v, *out, *call, *lse = NULL, *result = NULL;
  int with_lse = 0;
  job j = {0};
  if (!PyArg_ParseTuple(args, "OOOOpO!:attention_forward", &q, &k, &v, &out, &with_lse,
                        &PyTuple_Type, &call)) {
    return NULL;
  }
  if (!take_call(&j, call, q, k, v)) return NULL;
  out = out != Py_None ? Py_NewRef(out) : array_new(j.axes.out, &j.sizes);
  if (out == NULL) goto done;
  if (!take(out, "out", j.axes.out, TAKE_WRITE, &j.sizes, &j.out)) goto done;
  lse = with_lse ? array_new(j.axes.lse, &j.sizes) : Py_NewRef(Py_None);
  if (lse == NULL) goto done;
  if (with_lse && !take(lse, "lse", j.axes.lse, TAKE_WRITE, &j.sizes, &j.lse)) goto done;
  if (run(module, &j)) result = PyTuple_Pack(2, out, lse);
done:
  Py_XDECREF(out);
  Py_XDECREF(lse);
  return result;
}

/* attention_backward(q, k, v, out, lse, dout, dkey_table, dvalue_table, call)
 *   -> (dq, dk, dv)
 *
 * The gradients of the tables are added to the arrays given; None: not computed. */
static PyObject *attention_backward(PyObject *module, PyObject *args) {
  PyObject *q, *k, *v, *out, *lse, *dout, *dkey_table, *dvalue_table, *call;
  PyObject *dq = NULL, *dk = NULL, *dv = NULL, *result = NULL;
  job j = {.backward = 1};
  if (!PyArg_ParseTuple(args, "OOOOOOOOO!:attention_backward", &q, &k, &v, &out, &lse, &dout,
                        &dkey_table, &dvalue_table, &PyTuple_Type, &call)) {
    return NULL;
  }
  if (!take_call(&j, call, q, k, v)) return NULL;
  const rp_attention *a = &j.attention;
  rp_attention_gradients *g = &j.gradients;
  if (!take(out, "out", j.axes.out, 0, &j.sizes, &j.out)) return NULL;
  if (!take(lse, "lse", j.axes.lse, TAKE_CONTIGUOUS, &j.sizes, &j.lse)) return NULL;
  if (!take(dout, "dout", j.axes.out, 0, &j.sizes, &j.dout)) return NULL;
  if (!take_table_gradient(dkey_table, "dkey_table", 'T', 'D', &a->key, j.key_relation, &j.sizes,
                           &g->key_table) ||
      !take_table_gradient(dvalue_table, "dvalue_table", 'U', 'E', &a->value, j.value_relation,
                           &j.sizes, &g->value_table)) {
    return NULL;
  }
  dq = array_new(j.axes.q, &j.sizes);
  dk = array_new(j.axes.k, &j.sizes);
  dv = array_new(j.axes.v, &j.sizes);
  if (dq == NULL || dk == NULL || dv == NULL) goto done;
  if (!take(dq, "dq", j.axes.q, TAKE_WRITE, &j.sizes, &g->q)) goto done;
  if (!take(dk, "dk", j.axes.k, TAKE_WRITE, &j.sizes, &g->k)) goto done;
  if (!take(dv, "dv", j.axes.v, TAKE_WRITE, &j.sizes, &g->v)) goto done;
  if (run(module, &j)) result = PyTuple_Pack(3, dq, dk, dv);
done:
  Py_XDECREF(dq);
  Py_XDECREF(dk);
  Py_XDECREF(dv);
  return result;
}

/* ------------------------------------------------------------------------
 * Threads and build information
 * ------------------------------------------------------------------------ */

static PyObject *set_threads(PyObject *module, PyObject *args) {
  int threads = 0;
  rp_status status;
  if (!PyArg_ParseTuple(args, "i:set_threads", &threads)) return NULL;
  Py_BEGIN_ALLOW_THREADS
  status = rp_set_threads(threads);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) {
    raise_status(module, status);
    return NULL;
  }
  return Py_NewRef(Py_None);
}

static PyObject *get_threads(PyObject *module, PyObject *args) {
  (void)module, (void)args;
  int threads;
  Py_BEGIN_ALLOW_THREADS
  threads = rp_get_threads();
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(threads);
}

static PyObject *build_info(PyObject *module, PyObject *args) {
  (void)args;
  rp_build_info info = {.struct_size = sizeof info};
  rp_status status;
  Py_BEGIN_ALLOW_THREADS
  status = rp_build_info_get(&info);
  Py_END_ALLOW_THREADS
  if (status != RP_OK) {
    raise_status(module, status);
    return NULL;
  }
  return Py_BuildValue("{s:s,s:s,s:s,s:s,s:s,s:s,s:i}", "version", info.version, "compiler",
                       info.compiler, "flags", info.flags, "isa", info.isa, "isa_available",
                       info.isa_available, "blas", info.blas, "threads", info.threads);
}

/* ------------------------------------------------------------------------
 * The module
 * ------------------------------------------------------------------------ */

static int module_exec(PyObject *module) {
  if (PyArray_ImportNumPyAPI() < 0) return -1;
  module_state *state = PyModule_GetState(module);
  state->device_error = PyErr_NewExceptionWithDoc("relpos.DeviceError",
                                                  "The device, or the library behind it, failed.",
                                                  PyExc_RuntimeError, NULL);
  if (state->device_error == NULL) return -1;
  if (PyModule_AddObjectRef(module, "DeviceError", state->device_error) < 0) return -1;
  if (PyModule_AddIntConstant(module, "BEYOND_CLIP", RP_BEYOND_CLIP) < 0) return -1;
  if (PyModule_AddIntConstant(module, "BEYOND_NONE", RP_BEYOND_NONE) < 0) return -1;
  return PyModule_AddStringConstant(module, "VERSION", RP_VERSION);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
  const module_state *state = PyModule_GetState(module);
  if (state != NULL) Py_VISIT(state->device_error);
  return 0;
}

static int module_clear(PyObject *module) {
  module_state *state = PyModule_GetState(module);
  if (state != NULL) Py_CLEAR(state->device_error);
  return 0;
}

static void module_free(void *module) { (void)module_clear((PyObject *)module); }

static PyMethodDef methods[] = {
    {"attention_forward", attention_forward, METH_VARARGS, NULL},
    {"attention_backward", attention_backward, METH_VARARGS, NULL},
    {"set_threads", set_threads, METH_VARARGS, NULL},
    {"get_threads", get_threads, METH_NOARGS, NULL},
    {"build_info", build_info, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,   .m_name = "relpos._core", .m_size = sizeof(module_state),
    .m_methods = methods,    .m_slots = slots,         .m_traverse = module_traverse,
    .m_clear = module_clear, .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
