/* SPDX-License-Identifier: Apache-2.0
 *
 * _model.h: the type relpos._core.Model.
 *
 * It refers to no other Python object. That two threads do not meet in it is libcore's to see
 * to.
 */
#ifndef RELPOS_MODEL_TYPE_H
#define RELPOS_MODEL_TYPE_H

#include "_core.h"

typedef struct model {
  PyObject_HEAD rp_model *core;
  int64_t width;
  int has_decoder; /* then labels lie beside the target */
} model;

static inline rp_model *core_of(PyObject *self) { return ((model *)self)->core; }

/* Raises the exception for a status; returns NULL. */
void *raise_from(PyObject *self, rp_status status);

/* made_or_raised, of a method. */
PyObject *made_or_raised_from(PyObject *self, PyObject *made, rp_status status);

/* take_batch, for this model. */
int batch_of(PyObject *self, PyObject *object, rp_batch *to, int64_t *places);

/* Methods: _model_shows.c */
PyObject *model_parameters(PyObject *self, PyObject *args);
PyObject *model_read(PyObject *self, PyObject *args);
PyObject *model_place(PyObject *self, PyObject *args);
PyObject *model_write(PyObject *self, PyObject *args);
PyObject *model_score(PyObject *self, PyObject *object);
PyObject *model_hidden(PyObject *self, PyObject *object);
PyObject *model_attention_map(PyObject *self, PyObject *args);
PyObject *model_attention_maps(PyObject *self, PyObject *args);
PyObject *model_attention_parts(PyObject *self, PyObject *args);
PyObject *model_alignments(PyObject *self, PyObject *args);

#endif
