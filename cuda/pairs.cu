/* SPDX-License-Identifier: Apache-2.0
 *
 * pairs.cu: reads an attention call for the device: what pairs.h says it is.
 */
#include "pairs.h"

#include <math.h>
#include <stdlib.h>

#include <algorithm>
#include <memory>

namespace rpc {
namespace {

int32_t cut(int64_t x) { return static_cast<int32_t>(rpi_max(rpi_min(x, kFar), -kFar)); }

const int64_t *key_offsets_of(const rp_attention *s) {
  return s->key_offsets ? s->key_offsets : s->offsets;
}

/* Rows of the arrays of one side. */
int64_t array_rows(const rp_attention *s, int64_t b, bool keys) {
  const int64_t *const offsets = keys ? key_offsets_of(s) : s->offsets;
  return offsets ? offsets[b + 1] - offsets[b] : keys ? s->M : s->N;
}

struct Free {
  void operator()(void *memory) const { free(memory); }
};

/* An array of the host until it is staged; NULL where there is no memory. */
template <class T>
std::unique_ptr<T[], Free> array_of(int64_t count) {
  return std::unique_ptr<T[], Free>(
      static_cast<T *>(malloc(static_cast<size_t>(rpi_max(count, 1)) * sizeof(T))));
}

rp_status no_memory(const char *what, int64_t count) {
  return fail(RP_ERROR_MEMORY, "attention: no memory on the host for a list of %lld %s",
              static_cast<long long>(count), what);
}

rp_status stage_sequences(const rp_attention *s, Call *call) {
  const auto list = array_of<Sequence>(s->B);
  if (!list) return no_memory("sequences", s->B);
  for (int64_t b = 0; b < s->B; b++) list[static_cast<size_t>(b)] = sequence_of(s, b);
  return stage(list.get(), s->B, &call->sequences);
}

/* Numbers that a matrix of pairs spans: labels or mask. */
int64_t pairs_span(const rp_attention *s, int64_t batch_stride, int64_t head_stride,
                   int64_t row_stride, const int64_t *starts) {
  int64_t span = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const Sequence seq = sequence_of(s, b);
    if (seq.queries == 0 || seq.keys == 0) continue;
    const int64_t first = (starts ? starts[b] : b * batch_stride) + (s->H - 1) * head_stride;
    const int64_t step = starts ? seq.keys : row_stride;
    span = rpi_max(span, first + (seq.queries - 1) * step + seq.keys);
  }
  return span;
}

/* Positions of all sequences. */
int64_t positions_span(const rp_attention *s, bool keys, int64_t stride) {
  const int64_t *const offsets = keys ? key_offsets_of(s) : s->offsets;
  if (offsets) return offsets[s->B];
  int64_t span = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const Sequence seq = sequence_of(s, b);
    span = rpi_max(span, b * stride + (keys ? seq.keys : seq.queries));
  }
  return span;
}

rp_status read_part(const rp_relation *r, const char *kind, int place, Part *part) {
  const bool band = r->map == RP_MAP_BAND;
  const int64_t distances = band ? r->left + 1 + r->right : 0;
  const int64_t rows = band && !r->buckets ? distances : r->rows;
  if (rows > kMostRows || distances > kMostRows) {
    return fail(RP_ERROR_SHAPE,
                "attention: %s[%d] has %lld rows and %lld distances; a GPU takes at most 2^28",
                kind, place, static_cast<long long>(rows), static_cast<long long>(distances));
  }
  *part = {};
  part->table = r->table;
  part->head_stride = r->head_stride;
  part->row_stride = r->row_stride;
  if (!band) return RP_OK;
  part->left = static_cast<int32_t>(r->left);
  part->right = static_cast<int32_t>(r->right);
  part->clip = r->beyond == RP_BEYOND_CLIP;
  return stage(r->buckets, r->buckets ? distances : 0, &part->buckets);
}

rp_status read_lookup(const rp_attention *s, const rp_relation *r, Lookup *x) {
  x->rows = static_cast<int32_t>(rpi_table_rows(r));
  x->packed_queries = s->offsets != nullptr;
  x->packed_keys = key_offsets_of(s) != nullptr;
  if (r->map == RP_MAP_BAND) {
    x->map = MAP_POSITIONS;
    x->query_position_stride = r->query_position_stride;
    x->key_position_stride = r->key_position_stride;
    RPI_TRY(stage(r->query_positions, positions_span(s, false, r->query_position_stride),
                  &x->query_positions));
    return stage(r->key_positions, positions_span(s, true, r->key_position_stride),
                 &x->key_positions);
  }
  if (r->map == RP_MAP_LABEL) {
    x->map = MAP_LABELS;
    x->label_bytes = r->label_bytes;
    x->label_batch_stride = r->label_batch_stride;
    x->label_head_stride = r->label_head_stride;
    x->label_row_stride = r->label_row_stride;
    const int64_t span = pairs_span(s, r->label_batch_stride, r->label_head_stride,
                                    r->label_row_stride, r->label_starts);
    RPI_TRY(stage(r->label_starts, r->label_starts ? s->B : 0, &x->label_starts));
    return stage_bytes(r->labels, r->labels, span * r->label_bytes, &x->labels);
  }
  x->map = MAP_EDGES;
  const int64_t queries = all_query_rows(s);
  const int64_t edges = r->edge_starts[queries];
  RPI_TRY(stage(r->edge_starts, queries + 1, &x->edge_starts));
  RPI_TRY(stage(r->edge_keys, edges, &x->edge_keys));
  return stage(r->edge_labels, edges, &x->edge_labels);
}

/* The terms of one kind: to its band, or to the lookups. */
rp_status read_terms(const rp_attention *s, const rp_relation *relations, Kind kind, Band *band,
                     Call *call) {
  static const char *const names[] = {"key", "query", "bias", "value"};
  int64_t low = kFar, high = -kFar;
  for (int i = 0; i < RP_TERMS; i++) {
    const rp_relation *const r = relations + i;
    if (!r->table) continue;
    Part part;
    RPI_TRY(read_part(r, names[kind], i, &part));
    if (r->map == RP_MAP_BAND && !r->query_positions) {
      const int outside = part.clip ? 0 : 1; /* a column for no relation */
      low = rpi_min(low, -int64_t{part.left} - outside);
      high = rpi_max(high, int64_t{part.right} + outside);
      band->parts[band->count++] = part;
      continue;
    }
    Lookup *const x = &call->lookups[call->lookup_count++];
    x->part = part;
    x->kind = kind;
    x->place = i;
    (kind == KIND_VALUE ? call->value_lookups : call->score_lookups) = true;
    RPI_TRY(read_lookup(s, r, x));
  }
  if (band->count > 0) {
    band->low = static_cast<int32_t>(low);
    band->high = static_cast<int32_t>(high);
  }
  return RP_OK;
}

rp_status read_mask(const rp_attention *s, Call *call) {
  const rp_mask *const m = &s->mask;
  if (!m->data) return RP_OK;
  call->mask_batch_stride = m->batch_stride;
  call->mask_head_stride = m->head_stride;
  call->mask_row_stride = m->row_stride;
  RPI_TRY(stage(m->starts, m->starts ? s->B : 0, &call->mask_starts));
  return stage(m->data, pairs_span(s, m->batch_stride, m->head_stride, m->row_stride, m->starts),
               &call->mask);
}

struct MetTile {
  Tile tile;
  int32_t met;
};

/* How many rows of the other side a tile meets, by position and length, in units of 32: so long is
 * a block at it. */
int32_t rows_met(const Sequence &seq, bool keys, int32_t row, int size) {
  const int64_t rows = keys ? seq.keys : seq.queries, others = keys ? seq.queries : seq.keys;
  const int64_t last = rpi_min(int64_t{row} + size, rows) - 1;
  const int64_t from = rpi_max(keys ? row - seq.farthest : row + seq.nearest, 0);
  const int64_t to = rpi_min(keys ? last - seq.nearest : last + seq.farthest, others - 1);
  return row > last || from > to ? 0 : static_cast<int32_t>((to - from) / 32 + 1);
}

void longest_first(MetTile *from, MetTile *end) {
  const auto longer = [](const MetTile &a, const MetTile &b) { return a.met > b.met; };
  if (!std::is_sorted(from, end, longer)) std::stable_sort(from, end, longer);
}

}  // namespace

Sequence sequence_of(const rp_attention *s, int64_t b) {
  const int64_t *const key_offsets = key_offsets_of(s);
  const int64_t *const key_lengths = s->key_lengths ? s->key_lengths : s->lengths;
  Sequence seq = {};
  const int64_t query_rows = array_rows(s, b, false), key_rows = array_rows(s, b, true);
  seq.query_row = s->offsets ? s->offsets[b] : 0;
  seq.query_batch = s->offsets ? 0 : b;
  seq.key_row = key_offsets ? key_offsets[b] : 0;
  seq.key_batch = key_offsets ? 0 : b;
  seq.edge_row = s->offsets ? s->offsets[b] : b * s->N;
  seq.lse_row = s->offsets ? s->offsets[b] : b * s->H * s->N;
  const int64_t queries = s->lengths && !s->offsets ? s->lengths[b] : query_rows;
  const int64_t keys = key_lengths && !key_offsets ? key_lengths[b] : key_rows;
  const int64_t start = s->query_start ? s->query_start[b] : keys - queries;
  const int64_t unbounded = int64_t{1} << 44;
  const int64_t left = s->window_left < 0 ? unbounded : s->window_left;
  const int64_t window_right = s->window_right < 0 ? unbounded : s->window_right;
  const int64_t right = s->causal ? rpi_min(window_right, 0) : window_right;
  seq.query_rows = static_cast<int32_t>(query_rows);
  seq.key_rows = static_cast<int32_t>(key_rows);
  seq.queries = static_cast<int32_t>(queries);
  seq.keys = static_cast<int32_t>(keys);
  seq.start = cut(start);
  seq.nearest = cut(start - left);
  seq.farthest = cut(start + right);
  seq.ordinal =
      s->dropout_ordinals ? s->dropout_ordinals[b] : s->dropout_first + static_cast<uint32_t>(b);
  return seq;
}

int32_t sharers_of(const rp_attention *s) {
  return s->key_heads > 0 ? static_cast<int32_t>(s->H / s->key_heads) : 1;
}

int64_t all_query_rows(const rp_attention *s) {
  return s->offsets ? s->offsets[s->B] : s->B * s->N;
}

int64_t all_key_rows(const rp_attention *s) {
  const int64_t *const offsets = key_offsets_of(s);
  return offsets ? offsets[s->B] : s->B * s->M;
}

rp_placement placement_of(const rp_attention *s) {
  return s->placement ? *s->placement : rp_placement_default();
}

rp_status check_sizes(const rp_attention *s) {
  for (int64_t b = 0; b < s->B; b++) {
    const int64_t rows = rpi_max(array_rows(s, b, false), array_rows(s, b, true));
    if (rows <= kMostRows) continue;
    return fail(RP_ERROR_SHAPE, "attention: sequence %lld has %lld rows; a GPU takes at most 2^28",
                static_cast<long long>(b), static_cast<long long>(rows));
  }
  if (s->B > kMostRows || s->H > kMostRows) {
    return fail(RP_ERROR_SHAPE, "attention: B=%lld, H=%lld; a GPU takes at most 2^28",
                static_cast<long long>(s->B), static_cast<long long>(s->H));
  }
  if (s->D > kWidest || s->Dv > kWidest) {
    return fail(RP_ERROR_SHAPE,
                "attention: D=%lld, Dv=%lld (of a model: its head_width); a GPU takes at most %lld",
                static_cast<long long>(s->D), static_cast<long long>(s->Dv),
                static_cast<long long>(kWidest));
  }
  return RP_OK;
}

rp_status read_call(const rp_attention *s, rp_rows q, rp_rows k, rp_rows v, Call *call) {
  *call = {};
  RPI_TRY(check_sizes(s));
  call->q = q;
  call->k = k;
  call->v = v;
  call->B = static_cast<int32_t>(s->B);
  call->H = static_cast<int32_t>(s->H);
  call->sharers = sharers_of(s);
  call->D = static_cast<int32_t>(s->D);
  call->Dv = static_cast<int32_t>(s->Dv);
  call->lse_head_stride = s->offsets ? s->offsets[s->B] : s->N;
  const double scale = s->scale == 0 ? 1 / sqrt(static_cast<double>(s->D)) : s->scale;
  call->scale = static_cast<float>(scale) * kLog2E;
  call->softcap = static_cast<float>(s->softcap) * kLog2E;
  call->position_bias = s->position_bias;
  call->position_bias_stride = s->position_bias_stride;
  RPI_TRY(stage_sequences(s, call));
  RPI_TRY(read_terms(s, s->key, KIND_KEY, &call->key, call));
  RPI_TRY(read_terms(s, s->query, KIND_QUERY, &call->query, call));
  RPI_TRY(read_terms(s, s->bias, KIND_BIAS, &call->bias, call));
  RPI_TRY(read_terms(s, s->value, KIND_VALUE, &call->value, call));
  call->dropout = dropout_of(s->dropout, s->dropout_key, s->dropout_site);
  return read_mask(s, call);
}

rp_status make_tiles(const rp_attention *s, bool keys, int size, Tiles *tiles, bool in_order) {
  int64_t all = 0, rows = 0;
  for (int64_t b = 0; b < s->B; b++) {
    all += rpi_divide_up(array_rows(s, b, keys), size);
    rows += array_rows(s, b, !keys);
  }
  if (all * s->H > INT32_MAX) {
    return fail(RP_ERROR_SHAPE,
                "attention: %lld tiles in H=%lld heads; a GPU takes at most 2^31 - 1",
                static_cast<long long>(all), static_cast<long long>(s->H));
  }
  const auto met = array_of<MetTile>(all);
  const auto list = array_of<Tile>(all);
  if (!met || !list) return no_memory("tiles", all);
  const int64_t element = placement_of(s).element == RP_BF16 ? 2 : 4;
  const int64_t most_rows = context().cache_bytes / 3 / (rpi_max(s->D + s->Dv, 1) * element);
  MetTile *const begin = met.get(), *end = begin, *from = begin;
  int64_t held = 0; /* rows that the tiles from `from` on meet */
  for (int64_t b = 0; b < s->B; b++) {
    const Sequence seq = sequence_of(s, b);
    const int64_t more = keys ? seq.query_rows : seq.key_rows;
    if (held + more > most_rows) {
      longest_first(from, end);
      from = end;
      held = 0;
    }
    held += more;
    const int32_t own = keys ? seq.key_rows : seq.query_rows;
    for (int32_t row = 0; row < own; row += size) {
      *end++ = {{static_cast<int32_t>(b), row}, rows_met(seq, keys, row, size)};
    }
  }
  longest_first(from, end);
  for (int64_t i = 0; i < all; i++) list[static_cast<size_t>(i)] = begin[i].tile;
  if (in_order) {
    const auto next = array_of<int32_t>(s->B);
    if (!next) return no_memory("sequences", s->B);
    std::fill_n(next.get(), s->B, 0);
    for (int64_t i = 0; i < all; i++) {
      Tile &tile = list[static_cast<size_t>(i)];
      int32_t &row = next[static_cast<size_t>(tile.sequence)];
      tile.row = row;
      row += size;
    }
  }
  tiles->count = static_cast<int32_t>(all);
  tiles->heads = static_cast<int32_t>(rpi_max(rpi_min(most_rows / rpi_max(rows, 1), s->H), 1));
  return stage(list.get(), all, &tiles->list);
}

}  // namespace rpc
