/* SPDX-License-Identifier: Apache-2.0
 *
 * _call.h: one call of attention on its way from Python to libcore.
 */
#ifndef RELPOS_CALL_H
#define RELPOS_CALL_H

#include "_core.h"

/* The axes of every array of a call, by layout. */
typedef struct axis_words {
  const char *q, *k, *v, *out, *lse;
} axis_words;

/* A term and where its gradient goes. */
typedef struct term {
  const char *name; /* of the table, in messages */
  const char *axes; /* of the table */
  rp_relation *relation;
  rp_real **gradient;
} term;

enum { MOST_TERMS = 4 * RP_TERMS };

typedef struct job {
  int backward; /* which of the two it is */
  rp_attention attention;
  rp_attention_gradients gradients;
  rp_rows q, k, v, dout, out_in; /* out_in: backward's, which reads it */
  rp_rows_out out;
  rp_real *lse;
  sizes sizes;
  axis_words axes;
  rp_placement placement; /* of the call, where it has one */
  PyObject *allocate;     /* gives memory of the device; NULL: the workspace is on the host */
  term terms[MOST_TERMS];
  int term_count;
} job;

/* Axes by the layout, "bhnd" or "bnhd", and by what is packed. */
int choose_axes(axis_words *w, PyObject *layout, int packed, int packed_keys);

/* Reads the arguments and the arrays that forward and backward share: the tuple
 *
 *   call = (layout, causal, scale or 0, lengths, key_lengths, offsets, key_offsets,
 *           query_start, terms, position_bias, window, mask, softcap, dropout, placement)
 *
 * of which what is not there is None. window is (left, right), dropout (rate, key0,
 * key1, site, first); _terms.c says what terms and mask are. The job must stay where it is from
 * here on: libcore's arguments point into it. */
int take_call(job *j, PyObject *call, PyObject *q, PyObject *k, PyObject *v);

/* None, or where arrays of numbers lie and what computes:
 *
 *   placement = (device, stream, element, precision, allocate)
 *
 * with rp_placement's words, and a function from a number of bytes to (address, owner): memory of
 * the device, aligned to 64, that lives as long as its owner. The default placement where None. */
int take_placement(PyObject *object, rp_placement *to, PyObject **allocate);

/* _terms.c: a tuple of terms; a mask. The arrays of the call are known by now. */
int take_terms(job *j, PyObject *terms);
int take_mask(job *j, PyObject *mask);

/* Raises what libcore said of a call, terms by the names of their tables. */
void raise_call(PyObject *module, rp_status status, const job *j);

/* Where the gradients of the tables go: a tuple with an array, or None, for each term. */
int take_table_gradients(job *j, PyObject *gradients);

#endif
