/* SPDX-License-Identifier: Apache-2.0
 *
 * api_attention.h: what the checks of api*.c share.
 */
#ifndef RPI_API_ATTENTION_H
#define RPI_API_ATTENTION_H

#include <stdbool.h>

#include "base/error.h"
#include "ops/ops.h"

/* Sizes, strides and positions stay below this, so that sums of a few of them are safe. */
#define RPI_LIMIT ((int64_t)1 << 40)

/* Rows in use of one sequence; meaningful once lengths and offsets are checked. */
static inline int64_t rpi_queries_of(const rp_attention *a, int64_t b) {
  if (a->offsets) return a->offsets[b + 1] - a->offsets[b];
  return a->lengths ? a->lengths[b] : a->N;
}
static inline int64_t rpi_keys_of(const rp_attention *a, int64_t b) {
  const int64_t *const offsets = a->key_offsets ? a->key_offsets : a->offsets;
  const int64_t *const lengths = a->key_lengths ? a->key_lengths : a->lengths;
  if (offsets) return offsets[b + 1] - offsets[b];
  return lengths ? lengths[b] : a->M;
}

/* A label of 1, 2 or 4 bytes. */
static inline int64_t rpi_label_at(const void *labels, int bytes, int64_t at) {
  if (bytes == 1) return ((const int8_t *)labels)[at];
  if (bytes == 2) return ((const int16_t *)labels)[at];
  return ((const int32_t *)labels)[at];
}

/* [count + 1] offsets begin with 0 and do not fall; [count] lengths are from 0 to `most`, starts
 * within the limit of 0; NULL: there are none. `call` begins the sentence. */
rp_status rpi_check_offsets(const char *call, const char *name, const int64_t *offsets,
                            int64_t count);
rp_status rpi_check_lengths(const char *call, const char *name, const int64_t *lengths,
                            int64_t count, int64_t most, const char *most_name);
rp_status rpi_check_starts(const char *call, const char *name, const int64_t *starts,
                           int64_t count);

/* One axis of an array. */
typedef struct axis {
  int64_t count, stride;
} axis;

/* Where the numbers of an array lie; one that is empty or absent has none. */
typedef struct rpi_array {
  const char *name;
  const void *data;
  axis axes[3];
  int64_t width, element; /* numbers in a row, bytes in a number */
  bool added_to;          /* and may be one with others that are: gradients of tied tables */
} rpi_array;

/* `count` numbers that lie side by side. */
static inline rpi_array rpi_dense(const char *name, const rp_real *data, int64_t count) {
  return (rpi_array){name, data, {{1, 0}, {1, 0}, {1, 0}}, count, (int64_t)sizeof *data, false};
}

/* The array is there, its strides are not negative and its last element can be
 * addressed; rows that are to be written do not overlap. An empty array may be NULL.
 * `call` begins the sentence. */
rp_status rpi_check_rows(const char *call, const rpi_array *x, bool written);

/* Of a number of q, k, v, out and their gradients. */
static inline int64_t rpi_placed_bytes(const rp_placement *placement) {
  return rpi_element_bytes(placement ? placement->element : RP_F32);
}

/* None of the arrays after the inputs, which are written, shares a number with any other. Each is
 * checked already. */
rp_status rpi_check_apart(const char *call, const rpi_array *arrays, int inputs, int count);

/* The tables of all terms and position_bias, or their gradients where `gradients` is not NULL.
 * Returns how many there are: RPI_TABLES at most. */
#define RPI_TABLES (4 * RP_TERMS + 1)
int rpi_tables(const rp_attention *a, const rp_attention_gradients *gradients, rpi_array *to);

/* The operations of where a call's arrays lie; `call` begins the sentence. */
rp_status rpi_placement_ops(const char *call, const rp_placement *placement, const rp_ops **ops);

/* Every term and the mask, as far as a look at lists will do: all but what the matrices
 * of labels and the lists of edges hold. */
rp_status rpi_check_terms(const rp_attention *a);

/* What they hold, which takes a pass over all of it. */
rp_status rpi_check_labels(const rp_attention *a);

/* Is it one of RP_SHOW_...? And what it must be. */
#define RPI_SHOWS                                                                                  \
  "RP_SHOW_PROBABILITIES=0, RP_SHOW_SCORES=1, RP_SHOW_CONTENT=2, or RP_SHOW_KEY=10, "              \
  "RP_SHOW_QUERY=20 or RP_SHOW_BIAS=30, plus 1 for a second term"
bool rpi_is_show(int what);

#endif
