/* SPDX-License-Identifier: Apache-2.0
 *
 * _core.h: what the files of the binding share. Each of them includes it first.
 *
 *   _core.c        the module: its functions, constants and exception
 *   _arrays.c      the one way from an object to memory
 *   _results.c     memory of results
 *   _terms.c       relation terms and masks
 *   _call.c        the arguments that forward and backward share
 *   _attention.c   forward and backward
 *   _maps.c        probabilities, logits and their parts
 *   _rotate.c      rotary positions, sinusoids
 *   _devices.c     which devices there are
 *   _memory.c      memory of a device
 *   _dlpack.c      arrays of other libraries, taken and given
 *   _config.c      configurations as pairs of name and text
 *   _batch.c       a batch of sentences
 *   _model.c       the model, a type: its life, the step, files, the profile
 *   _model_shows.c its parameters, scores, hidden states, attention maps and alignments
 *   _decode.c      the decoder, a type: searches, one token at a time
 *
 * Objects are borrowed from the argument tuple, which the caller holds for as long
 * as the call lasts, also while the GIL is released.
 */
#ifndef RELPOS_CORE_H
#define RELPOS_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define NPY_TARGET_VERSION NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL relpos_numpy_api /* one table for all files */
#ifndef RELPOS_IMPORTS_NUMPY                    /* _core.c does */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <stdint.h>

#include "relpos/decode.h"
#include "relpos/device.h"
#include "relpos/model.h"
#include "relpos/relpos.h"

/* ---- errors: _core.c ---------------------------------------------------------- */

/* Raises the exception for a status of libcore, with libcore's own sentence; what is called
 * otherwise in Python has its name there. Returns NULL. */
void *raise_status(PyObject *module, rp_status status);

/* What a call made, which is the caller's, or NULL with the exception of its status. */
PyObject *made_or_raised(PyObject *module, PyObject *made, rp_status status);

typedef struct renaming {
  const char *from, *to;
} renaming;

/* The same with other names besides, which a call has given. */
void raise_renamed(PyObject *module, rp_status status, const renaming *names, int count);

/* A str of what libcore says, which may quote bytes that are no UTF-8, as in the name of a file,
 * and be cut in the middle of a letter: those become \xff. */
PyObject *text_of(const char *text);

/* ---- what is made one by one: _core.c --------------------------------------------- */

/* Appends an item, which it takes. Without one, or where that fails, the list is let go of and
 * becomes NULL, with the exception. */
void add_item(PyObject **list, PyObject *item);

/* A tuple of what a list has, which it takes; NULL of NULL. */
PyObject *tuple_from(PyObject *list);

/* ---- arrays: _arrays.c --------------------------------------------------------- */

/* Axes are named by letters, and an array's axes by a word of them:
 *
 *   B H N M D   as in relpos.h        E   Dv, the width of values and outputs
 *   K           heads of keys and values: H, or a divisor of it
 *   b h         B or 1, H or 1: an axis of 1 is shared, its stride becomes 0
 *   X Y         tokens of packed queries, of packed keys
 *   T R         rows of a relation table, distances of a band
 *   C S         B + 1 offsets, one start more than there are rows of queries
 *   F G         numbers laid end to end, edges
 *   I J         rows and columns of a map
 *   P W V       rows and columns of a projection, distances of its sinusoids
 *
 * The first array that has an axis fixes its size; the others must agree. */
typedef struct sizes {
  int64_t of['Z' + 1];           /* -1: no array has fixed it yet */
  const rp_placement *placement; /* of the arrays of numbers; NULL: they are NumPy's */
} sizes;

sizes sizes_unknown(void);

enum { /* float32 unless said otherwise */
       TAKE_INT64 = 1,
       TAKE_INT32 = 2,
       TAKE_LABELS = 4, /* int8, int16 or int32 */
       TAKE_MASK = 8,   /* bool or uint8 */
       TAKE_UINT32 = 16,
       TAKE_TYPES = TAKE_INT64 | TAKE_INT32 | TAKE_LABELS | TAKE_MASK | TAKE_UINT32,
       TAKE_WRITE = 32,       /* to be written: writable, and no element twice */
       TAKE_DISTINCT = 64,    /* to be read, but no element twice */
       TAKE_CONTIGUOUS = 128, /* in C order without gaps */
       TAKE_ELEMENT = 256,    /* of the placement's element, where there is one */
       TAKE_HOST = 512,       /* on the host, wherever the others lie */
       TAKE_MAX_AXES = 4
};

/* Where an array lies; strides in elements, 0 for an axis it does not have. */
typedef struct view {
  void *data;
  int64_t batch_stride, head_stride, row_stride;
  int bytes; /* of an element */
} view;

/* Checks that the object is a native, aligned array of the type and the axes asked for,
 * of whole strides forward and a contiguous last axis. Never copies. False, with an
 * exception, where it does not fit. `name` begins the message; its first word is what
 * the message says to convert.
 *
 * The object is an ndarray or, of numbers where there is a placement, the tuple
 *
 *   memory = (address, "float32" or "bfloat16", shape, strides in elements, writable)
 *
 * of which nobody reads what lies at the address. */
int take(PyObject *object, const char *name, const char *axes, int flags, sizes *s, view *to);

/* The same for rows of an operation's numbers. */
int take_rows(PyObject *object, const char *name, const char *axes, sizes *s, rp_rows *to);
int take_rows_out(PyObject *object, const char *name, const char *axes, sizes *s, rp_rows_out *to);

/* None, or integers without gaps: *to NULL, or where they are. */
int take_int64(PyObject *object, const char *name, const char *axes, sizes *s, const int64_t **to);
int take_int32(PyObject *object, const char *name, const char *axes, sizes *s, const int32_t **to);

/* None, or the offsets of sentences that lie end to end, which fix their number; they end
 * where the tokens (along `axis` of an array) end. */
int take_offsets(PyObject *object, const char *name, sizes *s, const int64_t **to);
int offsets_end(const int64_t *offsets, const char *name, const sizes *s, char axis,
                const char *array);

/* How many axes an array, or memory, has; -1: it is neither. */
int axes_of(PyObject *object);

/* Raises "name: problem, got strides (8, 4) in bytes; fix". */
void raise_strides(const char *name, PyObject *array, const char *problem, const char *fix);

/* A new float32 array of these axes, whose sizes are known by now. */
PyObject *array_new(const char *axes, const sizes *s);

/* ---- memory of results: _results.c ------------------------------------------------ */

/* A new float32 array, not filled; its memory may be that of one that is gone. */
PyObject *result_new(int axes, npy_intp *shape);

/* ---- kinds of terms, as Python counts them ------------------------------------------ */

enum { RELPOS_KEY, RELPOS_QUERY, RELPOS_BIAS, RELPOS_VALUE, RELPOS_KINDS };

/* ---- the model ---------------------------------------------------------------------- */

/* _config.c: a tuple of (name, text) as rp_config_set takes them, over the defaults; and the
 * other way, every field of a configuration. */
int take_config(PyObject *module, PyObject *pairs, rp_config *to);

/* (tokens, sentences, training, recompute, device, precision) */
int take_limits(PyObject *object, rp_limits *to);

/* _batch.c: the tuple
 *
 *   batch = (source, source_offsets, target, target_offsets, labels, source_graphs,
 *            target_graphs, ordinals)
 *
 * of which what is not there is None; graphs are (labels end to end, starts). The labels lie
 * beside the target of a model with a decoder, else beside the source: *places of them. */
int take_batch(PyObject *object, int has_decoder, rp_batch *to, int64_t *places);

/* _model.c, _decode.c: a new type of the module. */
PyObject *model_type_new(PyObject *module);
PyObject *decoder_type_new(PyObject *module);

/* _core.c: the type of models. */
PyTypeObject *model_type_of(PyObject *module);

/* ---- functions of the module ------------------------------------------------------ */

PyObject *attention_forward(PyObject *module, PyObject *args);
PyObject *attention_backward(PyObject *module, PyObject *args);
PyObject *attention_map(PyObject *module, PyObject *args);
PyObject *map_sums(PyObject *module, PyObject *args);
PyObject *rotate(PyObject *module, PyObject *args);
PyObject *frequencies(PyObject *module, PyObject *args);
PyObject *sinusoid(PyObject *module, PyObject *args);
PyObject *wave_table(PyObject *module, PyObject *args);
PyObject *wave_gradient(PyObject *module, PyObject *args);
PyObject *devices(PyObject *module, PyObject *args);
PyObject *device_memory(PyObject *module, PyObject *args);
PyObject *device_read(PyObject *module, PyObject *args);
PyObject *device_write(PyObject *module, PyObject *args);
PyObject *device_wait(PyObject *module, PyObject *args);
PyObject *dlpack_take(PyObject *module, PyObject *args);
PyObject *dlpack_give(PyObject *module, PyObject *args);
PyObject *config_default(PyObject *module, PyObject *args);
PyObject *config_preset(PyObject *module, PyObject *args);
PyObject *config_check(PyObject *module, PyObject *args);
PyObject *config_load(PyObject *module, PyObject *args);
PyObject *preset_names(PyObject *module, PyObject *args);
PyObject *learning_rate(PyObject *module, PyObject *args);
PyObject *model_memory(PyObject *module, PyObject *args);
PyObject *search_default(PyObject *module, PyObject *args);

#endif
