/* SPDX-License-Identifier: Apache-2.0
 *
 * relpos.h: the public interface of libcore, to be read from top to bottom.
 *
 *   1. status and messages
 *   2. attention in one call
 *   3. attention in full: shapes, layouts, masks, relation terms, gradients
 *   4. rotary positions and sinusoids
 *   5. threads, instruction sets, build information
 *
 * Dimension letters, the same everywhere (Python too):
 *   B batch, H heads, N queries, M keys, D head width, Dv value width,
 *   T rows of a relation table, k clip distance.
 *
 * Thread safety: every function may be called from any thread at any time. There is one pool of
 * threads: of concurrent calls the first uses it, and each other computes on its own thread alone.
 * Results are the same either way. A thread inside a call must not be cancelled asynchronously.
 */
#ifndef RELPOS_RELPOS_H
#define RELPOS_RELPOS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
 * key_table and value_table are [2k + 1, D], shared by all heads; either may be NULL: no such term.
 * causal != 0 hides keys after the query. out overlaps no other array. Allocates a workspace. Fails
 * with RP_ERROR_ARGUMENT, RP_ERROR_SHAPE or RP_ERROR_MEMORY; out is then unspecified. */
RP_API rp_status rp_shaw_attention(int64_t B, int64_t H, int64_t N, int64_t D, int64_t k,
                                   int causal, const rp_real *q, const rp_real *keys,
                                   const rp_real *values, const rp_real *key_table,
                                   const rp_real *value_table, rp_real *out);

/* ------------------------------------------------------------------------
 * 3. Attention in full
 * ------------------------------------------------------------------------ */

/* Rows of numbers for every sequence and head: element (b, h, row, column) lies at
 * data[b * batch_stride + h * head_stride + row * row_stride + column]. Strides count elements and
 * are not negative; those of an input may be 0. Both usual layouts are strides, not copies:
 *   [B, H, N, D]   batch H*N*D, head N*D, row D
 *   [B, N, H, D]   batch N*H*D, head D,   row H*D
 *   packed [tokens, H, D] (see offsets below): batch unused, head D, row H*D */
typedef struct rp_rows {
  const rp_real *data;
  int64_t batch_stride, head_stride, row_stride;
} rp_rows;

/* The same, to be written. Rows of different (b, h, row) must not overlap, and memory
 * that a call writes must not overlap any other that it reads or writes. */
typedef struct rp_rows_out {
  rp_real *data;
  int64_t batch_stride, head_stride, row_stride;
} rp_rows_out;

/* What a distance outside [-left, right] means: the relation at the nearer end (the paper), or
 * none, and the term is absent for that pair. */
enum { RP_BEYOND_CLIP = 0, RP_BEYOND_NONE = 1 };

/* How a term finds the row of its table for query i and key j. */
enum {
  RP_MAP_BAND = 0,  /* from a distance: see left, right, beyond, buckets, positions */
  RP_MAP_LABEL = 1, /* from a matrix of labels, one per pair */
  RP_MAP_EDGES = 2  /* from a list of labelled edges; most pairs have none */
};

/* One relation term: a table of T vectors and the map that picks one, or none, for
 * query i and key j. table == NULL: the term is absent.
 *
 * The table is [T, width] shared by all heads (head_stride 0) or [H, T, width]. width
 * is D for key and query terms, Dv for value terms, 1 for bias terms.
 *
 * RP_MAP_BAND: with d = j - (i + start) the row is r = clip(d, -left, right) + left,
 *
 *   r = 0                left       left + right
 *   d = -left (or less)  0          right (or more)
 *
 * or, where buckets is given, buckets[r]: a table row, or -1 for no relation. Without buckets
 * T = left + 1 + right. Where positions are given, d = key_positions[j] - query_positions[i].
 *
 * RP_MAP_LABEL: labels of 1, 2 or 4 signed bytes, from 0 to T - 1, or -1: no relation (the pair
 * itself stays visible). The matrix of sequence b and head h has one row per query in use and lies
 * at labels + (b * label_batch_stride + h * label_head_stride) labels, rows label_row_stride apart;
 * a stride of 0 shares it. Maps are checked, then read again: do not change them during a call.
 *
 * RP_MAP_EDGES: the edges of query i (counted over the rows of the padded array, b * N + i,
 * or the tokens of the packed one) are edge_starts[i] to edge_starts[i + 1] - 1, from
 * edge_starts[0] = 0, each a key of the sequence and a label from 0 to T - 1, keys not falling
 * within a query. Several edges of one pair add up. All heads share them. */
typedef struct rp_relation {
  const rp_real *table;
  int64_t head_stride; /* elements between two heads' tables; 0: shared */
  int64_t row_stride;  /* elements between two rows, at least the width */
  int64_t rows;        /* T; for a band without buckets 0 will do */
  int map;             /* RP_MAP_... */

  int64_t left, right;    /* >= 0 */
  int beyond;             /* RP_BEYOND_CLIP or RP_BEYOND_NONE */
  const int32_t *buckets; /* [left + 1 + right] or NULL */

  /* Positions of queries [B, N] or [tokens] and of keys [B, M] or [tokens], below 2^30 in
   * magnitude; both or neither. A stride of 0 gives every sequence the same ones. */
  const int32_t *query_positions, *key_positions;
  int64_t query_position_stride, key_position_stride; /* between sequences; not if packed */

  const void *labels;
  int label_bytes; /* 1, 2 or 4; labels are aligned to it */
  int64_t label_batch_stride, label_head_stride, label_row_stride;
  const int64_t *label_starts; /* [B]: where sequence b begins, used instead of
                                  b * label_batch_stride; rows are then as many labels apart as
                                  the sequence has keys; the head stride still counts. Or NULL */

  const int64_t *edge_starts; /* [B * N + 1] or [tokens + 1] */
  const int32_t *edge_keys, *edge_labels;
} rp_relation;

#define RP_TERMS 2 /* terms of one kind: enough for rows and columns of a plane */

/* Boolean masks, one byte a pair, 0: hidden. Laid out as labels are. */
typedef struct rp_mask {
  const uint8_t *data; /* NULL: no mask */
  int64_t batch_stride, head_stride, row_stride;
  const int64_t *starts; /* as label_starts */
} rp_mask;

/* One attention call. Obtain it from rp_attention_default(), then set what
 * differs. Query i of sequence b stands at absolute position i + start[b].
 *
 *   s_ij  = scale * ( q_i . k_j + (q_i + position_bias) . key.table[a(i,j)]
 *                               + k_j . query.table[b(i,j)] ) + bias.table[t(i,j)]
 *   s_ij  = softcap * tanh(s_ij / softcap)            where softcap is not 0
 *   p_ij  = softmax over the keys j that i may see;   p~ = p after dropout
 *   out_i = sum_j p~_ij ( v_j + value.table[v(i,j)] )
 *
 * where each term may be there up to RP_TERMS times, added up.
 *
 * A query that may see no key gives a row of zeros and takes no gradient, as long as
 * its numbers are finite. Calls fail with RP_ERROR_ARGUMENT or RP_ERROR_SHAPE for what
 * they refuse, with RP_ERROR_MEMORY for a workspace that is too small. */
typedef struct rp_attention {
  size_t struct_size; /* set by rp_attention_default() */
  int64_t B, H;
  int64_t N, M; /* rows of the padded arrays; with offsets any number >= 0 */
  int64_t D, Dv;

  /* Padded arrays: rows in use, [B] each. NULL: all N, all M. lengths alone serves queries and
   * keys. Rows beyond a length are not read or computed: they give zeros, and zero gradients. */
  const int64_t *lengths, *key_lengths;

  /* Packed arrays: sequence b owns the rows offsets[b] to offsets[b + 1] - 1, [B + 1] each, from 0
   * and never falling. offsets alone serves queries and keys. A packed side has no lengths. */
  const int64_t *offsets, *key_offsets;

  /* Absolute position of query 0 of each sequence, key 0 standing at 0; [B].
   * NULL: keys - queries, so that the last query meets the last key. */
  const int64_t *query_start;

  int causal;   /* != 0: query i sees the keys j <= i + start */
  double scale; /* within 1e30 of 0, no denormal; 0 means 1/sqrt(D) */

  /* Relation terms, by what is multiplied with a row of their table. */
  rp_relation key[RP_TERMS];   /* A: q_i, since the row acts as a key */
  rp_relation query[RP_TERMS]; /* B: k_j, since the row acts as a query */
  rp_relation bias[RP_TERMS];  /* c: nothing, a number per head and relation, not scaled */
  rp_relation value[RP_TERMS]; /* added to the values */

  /* Added to every query before it meets the key terms (not the keys): [H, D] with
   * this many elements, at least D, from head to head; or NULL. */
  const rp_real *position_bias;
  int64_t position_bias_stride;

  /* A sliding window: query i sees the keys from i + start - window_left to i + start +
   * window_right; -1: no bound on that side. Default: -1, -1. */
  int64_t window_left, window_right;

  rp_mask mask;
  double softcap; /* 0: none; from 1e-30 to 1e30 */

  /* A probability is dropped (set to 0) at this rate, the others are scaled up. The mask is a
   * function of dropout_key, dropout_site, the sequence's ordinal, head, query and key alone:
   * backward makes it again. A rate is rounded to a multiple of 1/256, halves up, and is at
   * most 255/256. Head h has the masks of site dropout_site + h: give layers sites H apart. */
  double dropout; /* from 0 to below 1 */
  uint32_t dropout_key[2];
  uint32_t dropout_site;
  uint32_t dropout_first; /* sequence b has the ordinal dropout_first + b among all of this key */
  const uint32_t *dropout_ordinals; /* [B]: each sequence's, instead of dropout_first; or NULL */
  const struct rp_placement *placement; /* where arrays lie (device.h); NULL: on the host, f32 */
  /* Heads of k, v and their gradients; each serves H / key_heads heads of queries, which lie side
   * by side. 0: H of them. Tables, position_bias, masks and maps have H heads in any case. */
  int64_t key_heads;
} rp_attention;

/* An rp_attention that says nothing yet: no masks, no terms. Inline, so that struct_size is that of
 * the header a program was compiled with: libcore takes older, shorter ones. */
static inline rp_attention rp_attention_default(void) {
  rp_attention a;
  memset(&a, 0, sizeof a);
  a.struct_size = sizeof a;
  a.window_left = a.window_right = -1;
  return a;
}

/* Bytes of workspace that forward and backward need for this call. They depend, too, on positions,
 * edge_starts, which arrays terms share, and the number of threads. Either result may be NULL. */
RP_API rp_status rp_attention_workspace(const rp_attention *a, int64_t *forward_bytes,
                                        int64_t *backward_bytes);

/* out_i and, where lse is not NULL, the natural log-sum-exp of each row's scores
 * (-inf where a query sees no key): [B, H, N], or [H, tokens] for packed queries. workspace: at
 * least the bytes that rp_attention_workspace tells, aligned to 64; its content is meaningless
 * before and after. Allocates nothing, except that a process's first call makes the thread pool. */
RP_API rp_status rp_attention_forward(const rp_attention *a, rp_rows q, rp_rows k, rp_rows v,
                                      rp_rows_out out, rp_real *lse, void *workspace,
                                      int64_t workspace_bytes);

/* Where the gradients go. Those of q, k and v are required, and overwritten. Those of tables and
 * position_bias are laid out as these, and added to what is there; where NULL they are not
 * computed. Terms may name the same memory (tied tables). Fields not set must be 0, as in
 * rp_attention_gradients g = {.q = ..., .k = ..., .v = ...}. */
typedef struct rp_attention_gradients {
  rp_rows_out q, k, v;
  rp_real *key[RP_TERMS], *query[RP_TERMS], *bias[RP_TERMS], *value[RP_TERMS];
  rp_real *position_bias;
} rp_attention_gradients;

/* The gradients of sum(out * dout), from forward's inputs and results; lse is required.
 * workspace: as forward's, of backward's size. */
RP_API rp_status rp_attention_backward(const rp_attention *a, rp_rows q, rp_rows k, rp_rows v,
                                       rp_rows out, const rp_real *lse, rp_rows dout,
                                       const rp_attention_gradients *gradients, void *workspace,
                                       int64_t workspace_bytes);

/* What rp_attention_map shows. The parts (from CONTENT on) are those of the score before
 * softcap and masks, and add up to it; RP_SHOW_KEY + 1 is key[1]. */
enum {
  RP_SHOW_PROBABILITIES = 0, /* p, before dropout; 0 where hidden */
  RP_SHOW_SCORES = 1,        /* s, after softcap; -inf where hidden */
  RP_SHOW_CONTENT = 2,       /* scale * q_i . k_j; a part is 0 where hidden, or itself -inf */
  RP_SHOW_KEY = 10,
  RP_SHOW_QUERY = 20,
  RP_SHOW_BIAS = 30
};

/* Rows `row` to row + rows - 1 of one head's map in sequence b, computed again by the kernels of
 * attention: to[rows][keys of the sequence], on the host, rows to_stride apart. A term that the
 * call does not have shows zeros. Allocates a workspace, which does not grow with the map.
 * Fails with RP_ERROR_ARGUMENT, RP_ERROR_SHAPE or RP_ERROR_MEMORY; to is then unspecified. */
RP_API rp_status rp_attention_map(const rp_attention *a, rp_rows q, rp_rows k, int what, int64_t b,
                                  int64_t head, int64_t row, int64_t rows, rp_real *to,
                                  int64_t to_stride);

/* ------------------------------------------------------------------------
 * 4. Rotary positions and sinusoids
 * ------------------------------------------------------------------------ */

/* Rotary positions (RoPE): pair c of the numbers of the row at position p is turned by the
 * angle t = p * frequencies[c], (x, y) -> (x cos t - y sin t, x sin t + y cos t). The
 * numbers after the first 2 * pairs stay. Apply it to queries and keys alike; the
 * gradient with respect to x is the gradient with respect to out, turned back (inverse).
 * Obtain it from rp_rotation_default(), then set what differs. */
typedef struct rp_rotation {
  size_t struct_size;     /* set by rp_rotation_default() */
  int64_t B, H, N, D;     /* as in rp_attention; so are lengths and offsets */
  const int64_t *lengths; /* rows beyond: not read, written as zeros; where out is x, left alone */
  const int64_t *offsets;

  /* Row i of sequence b stands at start[b] + i, start being [B], or at i where start is NULL; or
   * at its explicit position, [B, N] or [tokens], and start is NULL. Positions are within 2^40 of
   * 0. A stride of 0 gives every sequence the same ones. */
  const int64_t *start;
  const int32_t *positions;
  int64_t position_stride; /* between sequences; not if packed */

  const double *frequencies; /* [pairs], finite, radians a position; see rp_frequencies */
  int64_t pairs;             /* from 0 to D / 2 */
  int interleaved;           /* 0: pair c is columns c and pairs + c; else 2c and 2c + 1 */
  int inverse;               /* != 0: turn back */
  const struct rp_placement *placement; /* as in rp_attention */
} rp_rotation;
static inline rp_rotation rp_rotation_default(void) {
  rp_rotation r;
  memset(&r, 0, sizeof r);
  r.struct_size = sizeof r;
  return r;
}

/* Turns x into out, which may be x itself (same data and strides) but not overlap it otherwise.
 * Angles are doubles. Allocates nothing. Fails with RP_ERROR_ARGUMENT or RP_ERROR_SHAPE. */
RP_API rp_status rp_rotate(const rp_rotation *r, rp_rows x, rp_rows_out out);

/* How frequencies fall with c. */
enum {
  RP_FREQUENCIES_OPEN = 0,  /* base^(-c / pairs): RoPE, Vaswani et al., Transformer-XL */
  RP_FREQUENCIES_CLOSED = 1 /* base^(-c / (pairs - 1)): Tensor2Tensor; the last is 1 / base */
};

/* frequencies[c] for c below pairs. base > 0, 10000 in the literature. To scale by f: NTK, give
 * base * f^(pairs / (pairs - 1)); linear, divide all results by f. Fails as rp_rotate does. */
RP_API rp_status rp_frequencies(int64_t pairs, double base, int rule, double *frequencies);

/* Sinusoidal positions: row r of table[rows][width] has sin t and cos t, with t = (first + r) *
 * frequencies[c] for c below width / 2: the sines in one half and the cosines in the other, or
 * interleaved, sine first. The last column of an odd width is zero. Fails as rp_rotate does. */
RP_API rp_status rp_sinusoid(int64_t rows, int64_t width, int64_t first, int interleaved,
                             const double *frequencies, rp_real *table);

/* Transformer-XL's relations: row left - t of table[H][left + 1 + right][D] is weight[H D][width]
 * times the sinusoid of t, sines, then cosines; the last column of an odd width counts for nothing.
 * waves: sinusoids of 0 to the longest distance; NULL: of base 10000, made some at a time.
 * rp_wave_gradient adds to dweight. Both fail as rp_rotate does, or with RP_ERROR_MEMORY. */
RP_API rp_status rp_wave_table(int64_t H, int64_t D, int64_t width, int64_t left, int64_t right,
                               const rp_real *waves, const rp_real *weight, rp_real *table);
RP_API rp_status rp_wave_gradient(int64_t H, int64_t D, int64_t width, int64_t left, int64_t right,
                                  const rp_real *waves, const rp_real *dtable, rp_real *dweight);

/* ------------------------------------------------------------------------
 * 5. Threads, instruction sets, build information
 * ------------------------------------------------------------------------ */

/* Threads used by every later call, the caller's included, at most 1024; results do not depend on
 * it. 0 returns to the default: RELPOS_NUM_THREADS (if it is wrong, calls that compute fail),
 * else OMP_NUM_THREADS, else the cores this process may run on. */
RP_API rp_status rp_set_threads(int threads);
RP_API int rp_get_threads(void);
RP_API const char *rp_version(void); /* RP_VERSION of the library that runs */

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
  const char *bf16;          /* what multiplies it: "AVX512-BF16", "AMX", or "none" */
} rp_build_info;

/* Fills info. RELPOS_ISA=portable|avx2|avx512|amx|neon in the environment chooses the instruction
 * set (and the BLAS core); if it is not there, the first call that computes fails. */
RP_API rp_status rp_build_info_get(rp_build_info *info);

#ifdef __cplusplus
}
#endif
#endif /* RELPOS_RELPOS_H */
