/* SPDX-License-Identifier: Apache-2.0
 *
 * backward_turns.h: dq on the way of the pass over keys, for long sequences: five products of a
 * tile where two passes make seven.
 *
 * A block of keys has the slopes ds of every tile of queries that it walks, and with them its share
 * of dq. The blocks of a sequence and head add their shares in turn, those of the first keys first:
 * a sum has one order, whichever block is fast.
 *
 *   turns[tile]     how many blocks have added theirs to 32 queries
 *   partial[tile]   dq / scale so far, as products leave it (tile.h), four numbers a lane; a warp
 *                   has 16 columns: [warp][strip][eight columns][lane][4]
 *   ends[tile]      of every row the sums of ds beyond the band: [end][row % 8][row / 8]
 *
 * Blocks walk from the last queries to the first: under a causal mask all begin at the same tile,
 * and whoever is before is ahead ever after. Whose turn is last writes dq.
 *
 * Where there is a band, blocks of queries come first: they visit the tiles that cross it, for the
 * gradients of its vectors, and leave in `partial` what these vectors add to dq. What pairs beyond
 * it add to the vectors of its ends are sums of dk and dv, which grow by one end's pairs alone
 * while a warp is beyond it:
 *
 *   queries   last ..................................... first
 *   pairs     head of the band | across it | tail of it
 *   dk, dv    0 .......... sum of the head .......... tail begins .......... sum of all
 */
#ifndef RPC_BACKWARD_TURNS_H
#define RPC_BACKWARD_TURNS_H

#include "attention_backward.h"

namespace rpc {

constexpr int kTurnOwn = 128, kTurnRows = 32;        /* keys of a block; queries of a tile */
constexpr int kTurnWarps = 4, kTurnWidth = 64;       /* of a block; of a head, at most */
constexpr int kTurnNumbers = kTurnRows * kTurnWidth; /* of `partial` for a tile */
constexpr int kTurnEnds = 2 * kTurnRows;             /* of `ends` */
constexpr int kEndNumbers = 2 * 2 * kTurnWidth;      /* of `lines`: [end][dk, dv][column] */
constexpr int kSlopeLine = kTurnRows + 8;            /* from one key's slopes to the next's */
constexpr int kSlopeNumbers = kTurnOwn * kSlopeLine;

/* In shared memory, behind BandShared, as what is read once a tile is: registers are scarce. */
struct TurnShared {
  alignas(16) __nv_bfloat16 slopes[kSlopeNumbers]; /* [keys][kSlopeLine]: ds of a tile */
  float sums[kTurnWarps][kTurnEnds];               /* of a warp's keys, laid out as `ends` */
  float *lines;                                    /* of the block, or NULL */
  int64_t tiles;                                   /* the sequence's first */
  Sequence sequence;
  int32_t side[kTurnWarps]; /* of the band, where a warp's last tile was */
  int32_t next;             /* who adds to the last tile behind this block, and where */
  int32_t *turn;            /* that is to be said; or NULL */
};

/* In the workspace. partial NULL: dq has a pass of its own. */
struct Turns {
  float *partial, *ends;
  int32_t *turns, *begun; /* begun: how many blocks have */
  float *lines;           /* [H][blocks of keys][warp][kEndNumbers], or NULL: not wanted */
  int64_t tiles;          /* of a head */
};

/* The first tile of a sequence: no two share one. */
__device__ inline int64_t turn_tile(const Turns &x, const Sequence &seq, int sequence, int head) {
  const int64_t rows = seq.query_row + seq.query_batch * seq.query_rows;
  return head * x.tiles + rows / kTurnRows + sequence;
}

/* The blocks of keys that walk the tile of query i, counted in the sequence; is there one? */
struct Walkers {
  int first, last;
  bool any;
};
__host__ __device__ inline Walkers walkers_of(const Sequence &seq, int i) {
  const int nearest = i + seq.nearest, farthest = i + kTurnRows - 1 + seq.farthest;
  const int key = farthest < seq.keys ? farthest : seq.keys - 1;
  return {nearest > 0 ? nearest / kTurnOwn : 0, key / kTurnOwn, nearest < seq.keys && key >= 0};
}

/* The first key of the first tile that some of a block's queries cross the band in, and of the last
 * one. apart: j - apart is the distance from the block's first query. */
struct Across {
  int first, last;
};
__device__ inline Across across_band(int low, int high, int apart) {
  return {(apart + low + 1) & -kTurnRows, (apart + high + kTurnOwn - 2) & -kTurnRows};
}

}  // namespace rpc

#endif
