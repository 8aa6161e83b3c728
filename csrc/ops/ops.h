/* SPDX-License-Identifier: Apache-2.0
 *
 * ops.h: the operation table. Everything above it (model, training, decoding)
 * computes only through these pointers; csrc/isa/ fills one table per instruction
 * set, cuda/ will fill one per device.
 *
 * Dimension letters: B batch, H heads, N queries, M keys, D head width, Dv value
 * width, T relations, C model width, K clip distance, V vocabulary.
 *
 * Rules of every entry:
 *   - It returns a status, because a device can fail. CPU entries return RP_OK.
 *   - Arguments have been checked (api.c, or the model): entries only assert.
 *   - Parameter gradients accumulate, activation gradients overwrite.
 *   - The caller provides the workspace, sized by the entry's own query; nothing
 *     allocates.
 *   - Work is cut into blocks whose borders depend on shapes alone, and partial
 *     sums are added in block order: any number of threads gives the same bits.
 */
#ifndef RPI_OPS_H
#define RPI_OPS_H

#include <stdbool.h>

#include "base/error.h"
#include "ops/real.h"

/* C[rows, columns] = A . B (+ C where accumulate) (+ bias[columns] where given).
 * Row-major. A is [rows, inner], or [inner, rows] where transpose_a; B is [inner,
 * columns], or [columns, inner] where transpose_b (a linear layer's weight). */
typedef struct rpi_gemm_args {
  int64_t rows, columns, inner;
  const real *a;
  int64_t a_stride; /* elements between two stored rows */
  const real *b;
  int64_t b_stride;
  real *c;
  int64_t c_stride;
  const real *bias;
  bool transpose_a, transpose_b, accumulate;
} rpi_gemm_args;

/* One sequence's place in the arrays. */
typedef struct rpi_sequence {
  int64_t query_row, key_row;     /* first row, along row_stride (packed arrays) */
  int64_t query_batch, key_batch; /* along batch_stride (padded arrays) */
  int64_t queries, keys;          /* in use */
  int64_t start;                  /* absolute position of query 0 */
} rpi_sequence;

/* One attention call, checked: what rp_attention says, plus the arrays. */
typedef struct rpi_attention_args {
  const rp_attention *shape;
  rp_rows q, k, v;
  rp_rows_out out;
  real *lse; /* NULL: not wanted */
  void *workspace;
  int64_t workspace_bytes;
} rpi_attention_args;

typedef struct rpi_attention_backward_args {
  const rp_attention *shape;
  rp_rows q, k, v;
  rp_rows out, dout; /* out and lse are forward's results */
  const real *lse;
  void *workspace;
  int64_t workspace_bytes;
  const rp_attention_gradients *gradients;
} rpi_attention_backward_args;

/* Rows of one head's scores or probabilities; what: RP_SHOW_... */
typedef struct rpi_attention_map_args {
  const rp_attention *shape;
  rp_rows q, k;
  int what;
  int64_t b, head, row, rows;
  real *to; /* [rows][keys of the sequence] */
  int64_t to_stride;
  int workers; /* threads, the same for the workspace's size and the map */
  void *workspace;
  int64_t workspace_bytes;
} rpi_attention_map_args;

typedef struct rp_ops {
  const char *name;
  rp_status (*gemm)(const rpi_gemm_args *args);
  rp_status (*attention_workspace)(const rp_attention *shape, int64_t *forward_bytes,
                                   int64_t *backward_bytes);
  rp_status (*attention_forward)(const rpi_attention_args *args);
  rp_status (*attention_backward)(const rpi_attention_backward_args *args);
  /* bytes given: only says what workspace it needs */
  rp_status (*attention_map)(const rpi_attention_map_args *args, int64_t *bytes);
  rp_status (*rotate)(const rp_rotation *rotation, rp_rows x, rp_rows_out out);
} rp_ops;

#endif
