/* SPDX-License-Identifier: Apache-2.0
 *
 * _results.c: memory of results, some of which is kept for the next ones.
 *
 * The C library gives a few megabytes back to the system as soon as they are free, and the next
 * result finds each of its pages anew, cleared by the system: of a backward call of 8 x 8 heads of
 * 64 queries that was half of the time. So what arrays free is kept, for arrays of the same size:
 * at most KEPT_BLOCKS and KEPT_MOST bytes of it, the oldest going first. NumPy asks for memory
 * through a handler, which each array remembers; to everybody else these are arrays like others.
 */
#include "_core.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
  KEPT_BLOCKS = 16,
  KEPT_LEAST = 1 << 16, /* bytes; the C library keeps smaller ones itself */
  KEPT_MOST = 1 << 26,  /* of all together */
  ALIGNMENT = 64
};

typedef struct block {
  void *memory;
  size_t size;
} block;

static struct {
  pthread_mutex_t lock;
  int count;
  size_t bytes;
  block of[KEPT_BLOCKS]; /* from old to new */
} kept = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Takes one out. */
static block kept_take(int i) {
  const block taken = kept.of[i];
  kept.count--;
  kept.bytes -= taken.size;
  memmove(&kept.of[i], &kept.of[i + 1], (size_t)(kept.count - i) * sizeof kept.of[0]);
  return taken;
}

static void *result_malloc(void *context, size_t size) {
  void *memory = NULL;
  (void)context;
  if (size < KEPT_LEAST) return malloc(size > 0 ? size : 1);
  pthread_mutex_lock(&kept.lock);
  for (int i = kept.count - 1; i >= 0 && memory == NULL; i--) {
    if (kept.of[i].size == size) memory = kept_take(i).memory;
  }
  pthread_mutex_unlock(&kept.lock);
  if (memory != NULL || size > PTRDIFF_MAX) return memory;
  return aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

static void result_free(void *context, void *memory, size_t size) {
  block gone[KEPT_BLOCKS + 1];
  int count = 0;
  (void)context;
  if (memory == NULL) return;
  pthread_mutex_lock(&kept.lock);
  if (size < KEPT_LEAST || size > KEPT_MOST) {
    gone[count++].memory = memory;
  } else {
    while (kept.count == KEPT_BLOCKS || kept.bytes + size > KEPT_MOST) gone[count++] = kept_take(0);
    kept.of[kept.count++] = (block){memory, size};
    kept.bytes += size;
  }
  pthread_mutex_unlock(&kept.lock);
  while (count > 0) free(gone[--count].memory);
}

static void *result_calloc(void *context, size_t count, size_t size) {
  if (size > 0 && count > PTRDIFF_MAX / size) return NULL;
  void *const memory = result_malloc(context, count * size);
  return memory != NULL ? memset(memory, 0, count * size) : NULL;
}

static void *result_realloc(void *context, void *memory, size_t size) {
  (void)context;
  return realloc(memory, size > 0 ? size : 1);
}

static PyDataMem_Handler handler = {
    .name = "relpos_results",
    .version = 1,
    .allocator = {NULL, result_malloc, result_calloc, result_realloc, result_free},
};

/* Where this fails for want of memory, Python may have set it all the same. */
static int handler_set(PyObject *to) {
  PyObject *const last = PyDataMem_SetHandler(to);
  Py_XDECREF(last);
  return last != NULL;
}

/* Once more, if need be: else all arrays of this thread would come from here, for ever. */
static int handler_set_back(PyObject *to) {
  if (handler_set(to)) return 1;
  PyErr_Clear();
  return handler_set(to);
}

PyObject *result_new(int axes, npy_intp *shape) {
  PyObject *type, *value, *trace;
  PyObject *const before = PyDataMem_GetHandler();
  if (before == NULL) return NULL;
  PyObject *const own = PyCapsule_New(&handler, "mem_handler", NULL);
  if (own == NULL) {
    Py_DECREF(before);
    return NULL;
  }
  PyObject *result = handler_set(own) ? PyArray_SimpleNew(axes, shape, NPY_FLOAT32) : NULL;
  Py_DECREF(own);
  PyErr_Fetch(&type, &value, &trace);
  if (!handler_set_back(before)) Py_CLEAR(result);
  if (type != NULL) PyErr_Restore(type, value, trace);
  Py_DECREF(before);
  return result;
}
