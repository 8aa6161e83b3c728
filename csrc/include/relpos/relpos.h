/* SPDX-License-Identifier: Apache-2.0
 *
 * relpos.h: the public interface of libcore, to be read from top to bottom.
 *
 *   1. status and messages
 *   2. attention in one call
 *   3. attention in full: shapes, layouts, masks, relation terms, gradients
 *   4. threads, instruction sets, build information
 *
 * Dimension letters, the same everywhere (Python too):
 *   B batch, H heads, N queries, M keys, D head width, Dv value width,
 *   T rows of a relation table, k clip distance.
 *
 * Thread safety: every function may be called from any thread at any time.
 * Concurrent calls share one pool of threads: the first one uses it, the others
 * compute on their own thread. Results do not depend on either.
 */
#ifndef RELPOS_RELPOS_H
#define RELPOS_RELPOS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define RP_API __attribute__((visibility("default")))
#else
#define RP_API
#endif

#define RP_VERSION "0.1.0"

/* The scalar type. Double only in libcore_f64, a second build of the same
 * sources that exists to check this code by finite differences. */
#ifdef RP_REAL_IS_DOUBLE
typedef double rp_real;
#else
typedef float rp_real;
#endif

/* ------------------------------------------------------------------------
 * 1. Status and messages
 * ------------------------------------------------------------------------ */

/* What a function returns. The numbers are fixed for ever, grouped in tens. */
typedef enum rp_status {
  RP_OK = 0,
  RP_ERROR_ARGUMENT = 10, /* a value out of its range, a missing pointer */
  RP_ERROR_SHAPE = 11,    /* sizes that do not fit each other, or overflow */
  RP_ERROR_MEMORY = 20,   /* an allocation failed, a workspace is too small */
  RP_ERROR_FILE = 30,     /* a file could not be read or written */
  RP_ERROR_ORDER = 40,    /* calls in the wrong order, an object in use */
  RP_ERROR_DEVICE = 50    /* the device, or the library behind it, failed */
} rp_status;

/* The sentence behind the last failure on this thread: the argument, what came,
 * what is allowed. Never NULL; valid until the next failure on this thread. */
RP_API const char *rp_last_error(void);

/* The name of a status, as "RP_ERROR_SHAPE"; "unknown status" for others. */
RP_API const char *rp_status_name(rp_status status);

/* ------------------------------------------------------------------------
 * 2. Attention in one call
 * ------------------------------------------------------------------------ */

/* Self-attention with Shaw's relative positions over dense [B, H, N, D] arrays:
 *
 *   r(i,j) = clip(j - i, -k, k) + k
 *   out_i  = sum_j softmax_j( (q_i . k_j + q_i . key_table[r]) / sqrt(D) ) (v_j + value_table[r])
 *
 * key_table and value_table are [2k + 1, D], shared by all heads; either may be
 * NULL (no such term). causal != 0 hides the keys after the query. Allocates
 * and frees its own workspace.
 * Fails with RP_ERROR_ARGUMENT, RP_ERROR_SHAPE or RP_ERROR_MEMORY; out is then
 * unspecified. */
RP_API rp_status rp_shaw_attention(int64_t B, int64_t H, int64_t N, int64_t D, int64_t k,
                                   int causal, const rp_real *q, const rp_real *keys,
                                   const rp_real *values, const rp_real *key_table,
                                   const rp_real *value_table, rp_real *out);

/* ------------------------------------------------------------------------
 * 3. Attention in full
 * ------------------------------------------------------------------------ */

/* Rows of numbers for every sequence and head: element (b, h, row, column) lies
 * at data[b * batch_stride + h * head_stride + row * row_stride + column].
 * Strides count elements and are not negative; those of an input may be 0. Both usual
 * layouts are strides, not copies:
 *   [B, H, N, D]   batch H*N*D, head N*D, row D
 *   [B, N, H, D]   batch N*H*D, head D,   row H*D
 *   packed [tokens, H, D] (see offsets below): batch unused, head D, row H*D */
typedef struct rp_rows {
  const rp_real *data;
  int64_t batch_stride, head_stride, row_stride;
} rp_rows;

/* The same, to be written. Rows of different (b, h, row) must not overlap, nor any
 * memory that is written overlap any that the same call reads or writes otherwise. */
typedef struct rp_rows_out {
  rp_real *data;
  int64_t batch_stride, head_stride, row_stride;
} rp_rows_out;

/* What a distance outside [-left, right] means. */
enum {
  RP_BEYOND_CLIP = 0, /* the relation at the nearer end (the paper) */
  RP_BEYOND_NONE = 1  /* no relation: the term is absent for that pair */
};

/* One relation term: a table of T = left + 1 + right vectors and the map that
 * picks one for query i and key j. With d = j - (i + start):
 *
 *   row 0                row left      row T - 1
 *   d = -left (or less)  d = 0         d = right (or more)
 *
 * The table is [T, width] shared by all heads (head_stride 0) or [H, T, width];
 * width is D for the key term and Dv for the value term. table == NULL: the
 * term is absent. */
typedef struct rp_relation {
  const rp_real *table;
  int64_t head_stride; /* elements between two heads' tables; 0: shared */
  int64_t row_stride;  /* elements between two rows, at least the width */
  int64_t left, right; /* >= 0 */
  int beyond;          /* RP_BEYOND_CLIP or RP_BEYOND_NONE */
} rp_relation;

/* One attention call. Obtain it from rp_attention_default(), then set what
 * differs. Query i of sequence b stands at absolute position i + start[b].
 *
 *   s_ij  = scale * ( q_i . k_j + q_i . key.table[r(i,j)] )
 *   p_ij  = softmax over the keys j that i may see
 *   out_i = sum_j p_ij ( v_j + value.table[r'(i,j)] )
 *
 * A query that may see no key gives a row of zeros and takes no gradient, as long as
 * its numbers are finite. Calls fail with RP_ERROR_ARGUMENT or RP_ERROR_SHAPE for what
 * they refuse, with RP_ERROR_MEMORY for a workspace that is too small. */
typedef struct rp_attention {
  size_t struct_size; /* set by rp_attention_default() */
  int64_t B, H;
  int64_t N, M; /* rows of the padded arrays, >= 0; without effect for a side with offsets */
  int64_t D, Dv;

  /* Padded arrays: rows in use, [B] each. NULL: all N, all M. lengths alone
   * serves queries and keys. Rows beyond a length are neither read nor
   * computed: they give zeros, and zero gradients. */
  const int64_t *lengths, *key_lengths;

  /* Packed arrays: sequence b owns the rows offsets[b] to offsets[b + 1] - 1,
   * [B + 1] each, from 0 and never falling. offsets alone serves queries and
   * keys. Excludes lengths for the same side. */
  const int64_t *offsets, *key_offsets;

  /* Absolute position of query 0 of each sequence, key 0 standing at 0; [B].
   * NULL: keys - queries, so that the last query meets the last key. */
  const int64_t *query_start;

  int causal;   /* != 0: query i sees the keys j <= i + start */
  double scale; /* finite; 0 means 1/sqrt(D) */

  rp_relation key;   /* "query meets relation", scores */
  rp_relation value; /* added to the values */
} rp_attention;

/* An rp_attention with every field zero but struct_size: no masks, no terms. */
RP_API rp_attention rp_attention_default(void);

/* Bytes of workspace that forward and backward need for this call with the
 * current number of threads. Either result may be NULL. */
RP_API rp_status rp_attention_workspace(const rp_attention *a, int64_t *forward_bytes,
                                        int64_t *backward_bytes);

/* out_i and, where lse is not NULL, the natural log-sum-exp of each row's scores
 * (-inf where a query sees no key): [B, H, N], or [H, tokens] for packed queries.
 * workspace: at least the bytes asked for, aligned to 64; its content is
 * meaningless before and after. Allocates nothing, but that a process's first call makes
 * the pool of threads. */
RP_API rp_status rp_attention_forward(const rp_attention *a, rp_rows q, rp_rows k, rp_rows v,
                                      rp_rows_out out, rp_real *lse, void *workspace,
                                      int64_t workspace_bytes);

/* Where the gradients go. Those of activations are overwritten; those of tables
 * are added to what is there. A NULL table gradient is not computed. The key
 * and the value term may name the same memory (tied tables). */
typedef struct rp_attention_gradients {
  rp_rows_out q, k, v;
  rp_real *key_table, *value_table; /* laid out as the tables themselves */
} rp_attention_gradients;

/* The gradients of sum(out * dout), from forward's inputs and results; lse is required.
 * workspace: as forward's, of backward's size. */
RP_API rp_status rp_attention_backward(const rp_attention *a, rp_rows q, rp_rows k, rp_rows v,
                                       rp_rows out, const rp_real *lse, rp_rows dout,
                                       const rp_attention_gradients *gradients, void *workspace,
                                       int64_t workspace_bytes);

/* ------------------------------------------------------------------------
 * 4. Threads, instruction sets, build information
 * ------------------------------------------------------------------------ */

/* Threads used by every later call, the caller's included. 0 returns to the
 * default: RELPOS_NUM_THREADS, else OMP_NUM_THREADS, else the cores this process
 * may run on. Results do not depend on it. At most 1024. */
RP_API rp_status rp_set_threads(int threads);
RP_API int rp_get_threads(void);

/* What this library is and what it chose. The strings live as long as it. */
typedef struct rp_build_info {
  size_t struct_size;        /* to be set by the caller to sizeof(rp_build_info) */
  const char *version;       /* RP_VERSION */
  const char *compiler;      /* name and version */
  const char *flags;         /* as compiled */
  const char *isa;           /* the instruction set in use */
  const char *isa_available; /* those this machine can run, separated by spaces */
  const char *blas;          /* "OpenBLAS 0.3.34 Zen", "builtin", ... */
  int real_bytes;            /* 4; 8 in libcore_f64 */
  int threads;               /* rp_get_threads() */
} rp_build_info;

/* Fills info. RELPOS_ISA=portable|avx2|avx512|neon in the environment overrides
 * the choice of instruction set (and of the BLAS core); an unknown or
 * unavailable one is an error of the first call that computes. */
RP_API rp_status rp_build_info_get(rp_build_info *info);

#ifdef __cplusplus
}
#endif

#endif /* RELPOS_RELPOS_H */
