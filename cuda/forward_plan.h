/* SPDX-License-Identifier: Apache-2.0
 *
 * forward_plan.h: what forward's kernels are told, their sizes, and what lies in a block's shared
 * memory.
 */
#ifndef RPC_FORWARD_PLAN_H
#define RPC_FORWARD_PLAN_H

#include "pairs.h"
#include "tile.h"

namespace rpc {

constexpr int64_t kShortBand = 192;  /* columns of a band that a block keeps whole */
constexpr int64_t kShortTable = 256; /* rows of a table that is looked up, the same */
constexpr int64_t kSingleBand = 64;  /* columns of a band that a block keeps as operands */

struct Forward {
  Call call;
  rp_rows_out out;
  bool ones;  /* behind the heads of its rows */
  float *lse; /* or NULL */
  Tiles tiles;
  int32_t blocks; /* that share the tiles of a head */
  bool aligned;   /* q, k and v: see load_rows */
  bool out_aligned;

  /* The bands of keys and values, as one: constant up to low, and from high on. */
  bool banded;
  bool tiled; /* met tile by tile (general) */
  int32_t low, high;

  /* Dynamic shared memory: bytes from its beginning; 0 where the call has no such thing. */
  int32_t related_at, line;         /* [queries][line]: scores or cells; single: [rows][operands] */
  int32_t chunk_at;                 /* [keys][operands]: rows of tables, while tiles are walked */
  int32_t biased_at;                /* [queries][operands]: queries with position_bias, or 0: they
                                       take turns with the others in Shared<S> */
  int32_t pairs_at;                 /* [queries][kPairLine]: scores of pairs, then weights */
  int32_t fetched_at;               /* [queries][kFetchedLine]: 32 columns that weights fetch; may
                                       be chunk_at */
  int32_t crossed_at, crossed_line; /* [keys][line]: what keys meet of the query bands */
  int32_t table_at[4 * RP_TERMS];   /* [queries][line]: scores or weights of all rows of ... */
  int32_t table_line[4 * RP_TERMS]; /* ... a lookup's table */
  int64_t shared_bytes;
};

inline void read_band(Forward *f) {
  const Band &key = f->call.key, &value = f->call.value;
  f->banded = key.count > 0 || value.count > 0;
  if (!f->banded) return;
  const Band &one = key.count > 0 ? key : value, &other = value.count > 0 ? value : key;
  f->low = one.low < other.low ? one.low : other.low;
  f->high = one.high > other.high ? one.high : other.high;
}

/* Where rows of vectors come from: bands by distance, or a table's own rows (whole). */
struct Source {
  const Part *parts;
  int32_t count, width;
  bool whole;
};

/* What a block takes: 64 queries, or fewer where rows are wide; or 128 of a long sequence, 32 rows
 * a warp: what it reads of keys and values serves twice as many products; or 32 of a short one, and
 * tiles of 32 keys: less is padding; or, one after the other, all of several sequences that are no
 * longer than that (forward_single.h). The latter three are for rows that are aligned. */
enum Size { SIZE_TILE, SIZE_TALL, SIZE_SHORT, SIZE_SINGLE };

/* Sizes of an instantiation. kGeneral: everything that is not plain attention, short bands, bias
 * bands and dropout. */
template <class OperandType, class StorageType, int kTheWidth, bool kIsGeneral,
          Size kTheSize = SIZE_TILE>
struct Shape {
  using Operand = OperandType;
  using Storage = StorageType;
  static constexpr bool kBf16 = sizeof(Operand) == 2, kGeneral = kIsGeneral;
  static constexpr int kWidth = kTheWidth; /* of keys and of values, padded */
  static constexpr bool kTall = kTheSize == SIZE_TALL, kSingle = kTheSize == SIZE_SINGLE;
  static constexpr bool kShort = kTheSize == SIZE_SHORT || kSingle;
  /* so that every term fits into 99 KiB */
  static constexpr int kKeys =
      kBf16 && !kShort ? (kWidth <= (kGeneral ? 64 : 128) ? 64 : 32) : (kWidth <= 64 ? 32 : 16);
  static constexpr int kWarps = kBf16 && !kShort && kWidth <= (kGeneral ? 64 : 128) ? 4 : 2;
  static constexpr int kFolds = kTall ? 2 : 1, kWarpRows = 16 * kFolds;
  static constexpr int kQueries = kWarpRows * kWarps, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kTall ? 2 : kShort ? 8 : !kGeneral && kWidth <= 64 ? 3 : 1;
  static constexpr int kStages =
      kBf16 && !kGeneral && !kSingle ? 2 : 1; /* tiles of keys in memory */
  static constexpr bool kKept =               /* queries in registers */
      kBf16 && (kTheSize == SIZE_TILE || kSingle) && kWidth <= (kGeneral ? 64 : 128);
  static constexpr int kLine = row_stride<Operand, kWidth>;
  static constexpr int kTiles = kKeys / 8, kOut = kWidth / 8; /* of eight columns */
  static constexpr int kChunk = kShort ? 64 : kKeys;          /* rows of a table at a time */
  static constexpr int kDiagonals = kQueries + kKeys - 1;
  static constexpr int kPairLine = kKeys + 4, kFetchedLine = 36;
};

template <class S>
using Operand = typename S::Operand;

template <class S>
struct Shared {
  Operand<S> tiles[S::kStages][2 * S::kKeys * S::kLine]; /* of keys, and of values */
  Operand<S> queries[S::kKept && !S::kSingle ? 16 : S::kQueries * S::kLine];
  float bias[S::kStages][S::kDiagonals + 1];
  float share[S::kWarps][shared_weights<Operand<S>, S::kTiles> + 4];
};

/* A line of scores: eight columns are written at a time, and the same column of eight rows and four
 * neighbours lie in different banks. */
inline int64_t line_of(int64_t columns) { return ((columns + 7) / 8 * 8 + 6) / 16 * 16 + 9; }

/* Finds room behind Shared<S>. */
class Room {
 public:
  Room(int64_t used, int64_t most) : used_(used), most_(most) {}
  int32_t take(int64_t rows, int64_t row_bytes) {
    const int64_t at = used_;
    used_ += (rows * row_bytes + 15) / 16 * 16;
    return static_cast<int32_t>(at);
  }
  /* Beside `other` bytes. */
  bool fits(int64_t rows, int64_t row_bytes, int64_t other) const {
    return used_ + rows * row_bytes + other + 32 <= most_;
  }
  int64_t used() const { return used_; }

 private:
  int64_t used_, most_;
};

/* What makes pairs cheap where there is room for it: all rows of short tables that are looked up,
 * and the diagonals of query bands. Without it pairs are computed one by one. */
template <class S>
void lay_out_pairs(Forward *f, Room *room, int64_t operands) {
  static_assert(S::kQueries * S::kFetchedLine * 4 <= S::kKeys * S::kLine * sizeof(Operand<S>),
                "what is fetched fits into a chunk");
  const Call &call = f->call;
  if (call.lookup_count == 0 && call.query.count == 0) return;
  f->pairs_at = room->take(S::kQueries, S::kPairLine * 4);
  const int64_t fetched = call.value_lookups ? S::kQueries * S::kFetchedLine * 4 : 0;
  const int64_t crossed = line_of(S::kDiagonals) * 4;
  if (call.query.count > 0 && room->fits(S::kKeys, crossed + operands, fetched)) {
    f->crossed_line = static_cast<int32_t>(line_of(S::kDiagonals));
    f->crossed_at = room->take(S::kKeys, crossed);
    if (f->chunk_at == 0) f->chunk_at = room->take(S::kKeys, operands);
  }
  for (int n = 0; n < call.lookup_count; n++) {
    const Lookup &x = call.lookups[n];
    const int64_t line = line_of(x.rows);
    if (x.kind == KIND_BIAS || x.kind == KIND_QUERY) continue;
    if (x.rows <= kShortTable && room->fits(S::kQueries, line * 4, fetched)) {
      f->table_line[n] = static_cast<int32_t>(line);
      f->table_at[n] = room->take(S::kQueries, line * 4);
    } else if (x.kind == KIND_VALUE && f->fetched_at == 0) {
      f->fetched_at = f->chunk_at != 0 ? f->chunk_at : room->take(S::kQueries, S::kFetchedLine * 4);
    }
  }
}

/* Rows of operands that blocks of single sequences keep: the vectors of keys, and behind them those
 * of values, up to whole products of the latter. */
__host__ __device__ inline int single_values(const Forward &f) {
  return f.call.key.count > 0 && f.call.value.count > 0 ? f.high - f.low + 1 : 0;
}
__host__ __device__ inline int single_whole(const Forward &f) {
  return (f.high - f.low + 16) / 16 * 16;
}
inline int64_t single_rows(const Forward &f) { return single_values(f) + single_whole(f); }

/* Where everything lies; false where that is too much. */
template <class S>
bool lay_out(Forward *f, int64_t most) {
  const Call &call = f->call;
  Room room(static_cast<int64_t>(sizeof(Shared<S>)), most);
  const int64_t operands = S::kLine * static_cast<int64_t>(sizeof(Operand<S>));
  const bool paired = call.lookup_count > 0 || call.query.count > 0;
  if constexpr (S::kSingle) {
    f->related_at = room.take(f->banded ? single_rows(*f) : 0, operands);
    f->shared_bytes = room.used();
    return room.used() <= most;
  }
  const int64_t pairs = paired ? S::kQueries * (S::kPairLine + S::kFetchedLine) * 4 : 0;
  if (f->banded) {
    int64_t columns = int64_t{f->high} - f->low + 1;
    const bool room_for_all = room.fits(S::kQueries, line_of(columns) * 4, pairs);
    f->tiled = columns > kShortBand || (columns > S::kDiagonals && !room_for_all);
    if (f->tiled) {
      columns = S::kDiagonals;
      f->chunk_at = room.take(S::kKeys, operands);
      const int64_t others = S::kQueries * line_of(columns) * 4 + pairs;
      const bool apart = S::kKept || room.fits(S::kQueries, operands, others);
      const bool biased = call.position_bias && call.key.count > 0;
      f->biased_at = biased && apart ? room.take(S::kQueries, operands) : 0;
    }
    f->line = static_cast<int32_t>(line_of(columns));
    f->related_at = room.take(S::kQueries, line_of(columns) * 4);
  }
  if constexpr (S::kGeneral) lay_out_pairs<S>(f, &room, operands);
  f->shared_bytes = room.used();
  return room.used() <= most;
}

}  // namespace rpc

#endif
