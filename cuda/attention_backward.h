/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_backward.h: what the kernels of attention's backward share: the call and its
 * gradients, the numbers of a row, tiles of p~ and ds.
 */
#ifndef RPC_ATTENTION_BACKWARD_H
#define RPC_ATTENTION_BACKWARD_H

#include "pairs.h"
#include "table_gradients.h"

namespace rpc {

/* Of one query. A row that sees no key has an lse of +inf here: its weights are 0. */
struct alignas(16) RowNumbers {
  float lse, delta; /* log-sum-exp in units of log 2; dz_i . z_i */
  struct {
    float key, value;
  } ends[2]; /* of the fast path: what it meets at the ends of the band, see there */
};

/* Parts of the workspace begin at multiples of 256 bytes. */
inline int64_t rounded(int64_t bytes) { return rpi_round_up(bytes, 256); }

struct Backward {
  Call call;
  rp_rows out, dout;
  rp_rows_out dq, dk, dv;
  const float *lse; /* natural, as forward left it */
  RowNumbers *rows; /* laid out as lse */
  Tiles query_tiles, key_tiles;
  int32_t tile;           /* rows of one of them */
  float scale;            /* of products, natural */
  bool aligned;           /* q, k, v and dout: see load_rows */
  bool gradients_aligned; /* dq, dk and dv: see put_pieces */

  float *met[4 * RP_TERMS]; /* of Call.lookups: [rows][T], products of a row of queries (of keys for
                               query terms) with a short table; or NULL */
  int64_t key_rows;         /* of all sequences */
};

/* The number of a row of keys among those of all sequences and heads. */
__device__ inline int64_t key_number(const Backward &c, const Sequence &seq, int head, int row) {
  return head * c.key_rows + seq.key_batch * seq.key_rows + seq.key_row + row;
}

/* What a score is above the log-sum-exp of its row, which may be too coarse for it: at most 0, so
 * that no weight is more than 1. A NaN stays. */
__device__ inline float at_most_zero(float x) { return x > 0.0f ? 0.0f : x; }

__device__ inline int smaller(int a, int b) { return a < b ? a : b; }

/* Over all lanes of a warp, or as many of them together. */
template <int kLanes = 32>
__device__ inline float sum_of_lanes(float x) {
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/* ---- the fast path: attention_backward_band.cu -------------------------------------- */

/* Does it serve this shape? Bands of keys and values, short enough, and bands of bias; no masks,
 * no softcap, no position_bias, nothing looked up. */
bool band_serves(const rp_attention *shape);

/* The rows of its tiles: 64, or 32 where sequences are short, or 128 where they are long. */
int band_tile(const rp_attention *shape);

/* Does it walk tiles, and read c.rows? Not where every sequence is one tile. */
bool band_walks(const rp_attention *shape);

/* Do its blocks of keys take turns? Then their tiles are in the order of their rows. */
bool band_in_turns(const rp_attention *shape);

/* Its workspace, behind the rows. */
int64_t band_bytes(const rp_attention *shape);

/* dq, dk, dv, and the gradients of the tables of keys and values. c.rows and tiles are there, if it
 * walks. */
rp_status band_backward(const rp_attention *shape, const Backward &c,
                        const rp_attention_gradients *gradients, void *workspace);

}  // namespace rpc

#endif
