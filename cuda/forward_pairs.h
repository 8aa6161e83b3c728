/* SPDX-License-Identifier: Apache-2.0
 *
 * forward_pairs.h: what the pairs of a tile take from relations that are looked up, one by one.
 *
 * A pair costs a product of one row with one row of a table, in f32, unless the block has kept what
 * its queries meet (Kept): then it is one number to be read. A warp works for its 16 rows.
 */
#ifndef RPC_FORWARD_PAIRS_H
#define RPC_FORWARD_PAIRS_H

#include "pairs.h"
#include "tile.h"

namespace rpc {

/* What a lookup term adds to the score of a pair by row `relation` of its table. */
template <class Storage>
__device__ inline float lookup_score(const Call &call, const Lookup &x, const Sequence &seq,
                                     int head, int i, int j, int relation) {
  const float *const w = table_row(x.part, head, relation);
  if (x.kind == KIND_BIAS) return kLog2E * w[0];
  if (x.kind == KIND_KEY) {
    const float *const bias =
        call.position_bias ? call.position_bias + head * call.position_bias_stride : nullptr;
    return call.scale *
           row_product(row_of<Storage>(call.q, seq.query_batch, head, seq.query_row + i), bias, w,
                       call.D);
  }
  const Storage *const k =
      row_of<Storage>(call.k, seq.key_batch, key_head(call, head), seq.key_row + j);
  return call.scale * row_product(k, nullptr, w, call.D);
}

/* Key j meets the query terms that are bands, at distance d. */
template <class Storage>
__device__ inline float query_band_score(const Call &call, const Sequence &seq, int head, int j,
                                         int d) {
  const Storage *const k =
      row_of<Storage>(call.k, seq.key_batch, key_head(call, head), seq.key_row + j);
  float sum = 0;
  for (int p = 0; p < call.query.count; p++) {
    const int relation = part_row(call.query.parts[p], d);
    if (relation < 0) continue;
    sum += row_product(k, nullptr, table_row(call.query.parts[p], head, relation), call.D);
  }
  return call.scale * sum;
}

/* What a block of forward has computed for its queries q0 on and the keys j0 on of a tile. */
struct Kept {
  const unsigned char *shared; /* the block's memory */
  int q0, j0;
  const int32_t *table_at, *table_line; /* of lookups: [queries][line], 0: not kept */
  const float *crossed;                 /* [keys][line] at the diagonals from the last query on */
  int crossed_line, queries;
};

/* What a query meets of row `relation` of a lookup's table. */
template <class Storage>
__device__ inline float relation_score(const Call &call, int n, const Sequence &seq, int head,
                                       int i, int j, int relation, const Kept *kept) {
  const Lookup &x = call.lookups[n];
  if (!kept || kept->table_at[n] == 0) {
    return lookup_score<Storage>(call, x, seq, head, i, j, relation);
  }
  const float *const table = reinterpret_cast<const float *>(kept->shared + kept->table_at[n]);
  return table[(i - kept->q0) * kept->table_line[n] + relation];
}

/* Everything that is taken pair by pair, but edges. kept: or NULL. */
template <class Storage>
__device__ inline float pair_score(const Call &call, const Sequence &seq, int batch, int head,
                                   int i, int j, const Kept *kept) {
  float sum = 0;
  if (kept && kept->crossed) {
    const int column = j - kept->j0 - (i - kept->q0) + kept->queries - 1;
    sum += kept->crossed[(j - kept->j0) * kept->crossed_line + column];
  } else if (call.query.count > 0) {
    sum += query_band_score<Storage>(call, seq, head, j, j - i - seq.start);
  }
  for (int n = 0; n < call.lookup_count; n++) {
    const Lookup &x = call.lookups[n];
    if (x.kind == KIND_VALUE || x.map == MAP_EDGES) continue;
    const int relation = relation_of(x, seq, batch, head, i, j);
    if (relation < 0) continue;
    sum += relation_score<Storage>(call, n, seq, head, i, j, relation, kept);
  }
  return sum;
}

/* The scores of the edges of query i that end in the keys from j0 on are added to its row. */
template <class Storage>
__device__ inline void add_edges(const Call &call, const Sequence &seq, int head, int i, int j0,
                                 int count, float *to, const Kept *kept) {
  for (int n = 0; n < call.lookup_count; n++) {
    const Lookup &x = call.lookups[n];
    if (x.kind == KIND_VALUE || x.map != MAP_EDGES) continue;
    const EdgeRange edges = edges_of(x, seq, i, j0, count);
    for (int64_t at = edges.begin; at < edges.end; at++) {
      const int j = x.edge_keys[at];
      to[j - j0] += relation_score<Storage>(call, n, seq, head, i, j, x.edge_labels[at], kept);
    }
  }
}

/* pairs[r][c], 16 rows `line` apart: the scores of queries i0 on with the keys of a tile. */
template <class Storage, int kKeys>
__device__ inline void score_pairs(const Call &call, const Sequence &seq, int batch, int head,
                                   int i0, const Kept &kept, float *pairs, int line) {
  const int lane = lane_of();
  for (int at = lane; at < 16 * kKeys; at += 32) {
    const int i = i0 + at / kKeys, j = kept.j0 + at % kKeys;
    const bool seen = i < seq.queries && in_sight(seq, i, j);
    pairs[at / kKeys * line + at % kKeys] =
        seen ? pair_score<Storage>(call, seq, batch, head, i, j, &kept) : 0.0f;
  }
  __syncwarp();
  if (lane < 16 && i0 + lane < seq.queries) { /* one lane a row: edges add up in their order */
    add_edges<Storage>(call, seq, head, i0 + lane, kept.j0, kKeys, pairs + lane * line, &kept);
  }
  __syncwarp();
}

/* Calls take(weight, relation) for every pair of query i and a tile's keys that has a relation, in
 * order; those without weight, hidden or dropped, are left out. */
template <int kKeys, class Take>
__device__ inline void for_relations(const Lookup &x, const Sequence &seq, int batch, int head,
                                     int i, int j0, const float *weights, Take take) {
  if (x.map == MAP_EDGES) {
    const EdgeRange edges = edges_of(x, seq, i, j0, kKeys);
    for (int64_t at = edges.begin; at < edges.end; at++) {
      const float weight = weights[x.edge_keys[at] - j0];
      if (weight != 0) take(weight, x.edge_labels[at]);
    }
    return;
  }
  const int count = kKeys < seq.keys - j0 ? kKeys : seq.keys - j0;
  for (int c = 0; c < count; c++) {
    if (weights[c] == 0) continue;
    const int relation = relation_of(x, seq, batch, head, i, j0 + c);
    if (relation >= 0) take(weights[c], relation);
  }
}

/* fetched[r][lane]: what the weights[16][..] of a warp's rows fetch of column `column` of the value
 * terms that are not kept. */
template <int kKeys>
__device__ inline void fetch_pairs(const Call &call, const int32_t *table_at, const Sequence &seq,
                                   int batch, int head, int i0, int j0, int column,
                                   const float *weights, int weights_line, float *fetched,
                                   int fetched_line) {
  for (int r = 0; r < 16; r++) {
    float sum = 0;
    for (int n = 0; i0 + r < seq.queries && n < call.lookup_count; n++) {
      const Lookup &x = call.lookups[n];
      if (x.kind != KIND_VALUE || table_at[n] != 0) continue;
      for_relations<kKeys>(x, seq, batch, head, i0 + r, j0, weights + r * weights_line,
                           [&](float weight, int relation) {
                             const float *const w = table_row(x.part, head, relation);
                             if (column < call.Dv) sum += weight * w[column];
                           });
    }
    fetched[r * fetched_line + lane_of()] = sum;
  }
}

}  // namespace rpc

#endif
