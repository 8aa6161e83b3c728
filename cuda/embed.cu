/* SPDX-License-Identifier: Apache-2.0
 *
 * embed.cu: out_r = keep( scale * table[id_r] + positions[place of r in its sentence] ).
 *
 * Backward, with d_r = keep(dout_r): dtable[id_r] += scale * d_r and dpositions[place] += d_r. Many
 * rows have the same target. The host sorts them by it, rows of one target in their order, and the
 * sorted rows are cut into pieces of equal length:
 *
 *   target   3 3 3 7 | 7 7 7 7 | 7 9 9 9 | 11 ...
 *            `-----' `---------------' ` ....
 *            a run within a piece is added to its target at once; one that goes on beyond its
 *            piece leaves partial sums, at most two a piece: of the run that came in from the
 *            left, and of the one that goes out to the right
 *
 * and a second pass adds the partial sums of every long run up, in the order of the pieces. Nothing
 * is added by two blocks, and no order depends on time.
 */
#include <stdlib.h>

#include "packing.h"

namespace rpc {
namespace {

struct EmbedRows {
  int64_t rows, columns;
  const int32_t *ids;
  const float *table;
  float scale;
  const float *positions; /* or NULL */
  const int64_t *places;  /* or NULL: as the sentences have it */
  float *out;
  rpi_note note;
};

template <bool wide>
__global__ void embed_rows(EmbedRows e, Packing packing) {
  const int64_t row = row_from_end(e.rows);
  if (row < 0) return; /* a whole warp */
  const Place place = place_of(packing, row);
  const int64_t position = e.places != nullptr ? e.places[row] : place.row;
  const float *const from = e.table + e.ids[row] * e.columns;
  const float *const more = e.positions + (e.positions != nullptr ? position * e.columns : 0);
  for (int64_t c = 0; c < e.columns; c += strip_columns) {
    const int64_t count = e.columns - c;
    Strip<strip_quads> sum = load_strip<strip_quads, wide>(from + c, count), other = {};
    if (e.positions != nullptr) other = load_strip<strip_quads, wide>(more + c, count);
#pragma unroll
    for (int q = 0; q < strip_quads; q++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        sum.quad[q].x[i] = e.scale * sum.quad[q].x[i] + other.quad[q].x[i];
      }
    }
    keep_strip(packing, place, c, sum);
    bool fine = true;
#pragma unroll
    for (int q = 0; q < strip_quads; q++) {
      fine = fine && four_finite(sum.quad[q], count - strip_column(q));
    }
    if (!fine) note_code(e.note, e.note.out);
    store_strip<strip_quads, wide>(e.out + row * e.columns + c, count, sum);
  }
}

/* ---- backward ----------------------------------------------------------------- */

constexpr int64_t embed_piece = 32; /* sorted rows */
constexpr int embed_threads = 128;  /* quads of columns of a block */

/* Sorted rows, and where the sums of their d go. A thread beyond the columns goes along, with
 * nothing: it takes a whole warp to find a row's place. */
struct EmbedSums {
  int64_t rows, columns;
  const int32_t *order, *targets; /* row at each place of the order, and its target */
  const float *dout;
  float scale;
  float *to;       /* [targets][columns] */
  float *partials; /* [pieces][2][columns] */
};

__device__ inline void embed_add(const EmbedSums &e, int64_t target, int64_t c, const Four &sum) {
  float *const to = e.to + target * e.columns + c;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (c + i < e.columns) to[i] += e.scale * sum.x[i];
  }
}

template <bool wide>
__global__ void embed_add_piece(EmbedSums e, Packing packing) {
  const int64_t quad = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, c = 4 * quad;
  const int64_t first = blockIdx.x * embed_piece;
  const int64_t end = e.rows - first < embed_piece ? e.rows : first + embed_piece;
  Four sum = {{0, 0, 0, 0}};
  bool from_left = first > 0 && e.targets[first - 1] == e.targets[first];
  for (int64_t at = first; at < end; at++) {
    const int64_t row = e.order[at];
    const int32_t target = e.targets[at];
    Four d = load_four<wide>(e.dout + row * e.columns + c, e.columns - c);
    keep_four(packing, place_of(packing, row), quad, d);
#pragma unroll
    for (int i = 0; i < 4; i++) sum.x[i] += d.x[i];
    const bool goes_on = at + 1 < e.rows && e.targets[at + 1] == target;
    if (goes_on && at + 1 < end) continue;
    if (from_left || goes_on) {
      const int64_t slot = 2 * static_cast<int64_t>(blockIdx.x) + (from_left ? 0 : 1);
      store_four<wide>(e.partials + slot * e.columns + c, e.columns - c, sum);
    } else {
      embed_add(e, target, c, sum);
    }
    sum = {{0, 0, 0, 0}};
    from_left = false;
  }
}

/* The runs that go out of their piece to the right, each by the piece in which it begins. */
template <bool wide>
__global__ void embed_add_runs(EmbedSums e) {
  const int64_t c = 4 * (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x);
  const int64_t first = blockIdx.x * embed_piece, next = first + embed_piece;
  if (c >= e.columns || next >= e.rows) return;
  const int32_t target = e.targets[next];
  /* It begins here: what comes in from the left is another, or nothing. */
  if (e.targets[next - 1] != target || (first > 0 && e.targets[first - 1] == target)) return;
  const float *from = e.partials + (2 * static_cast<int64_t>(blockIdx.x) + 1) * e.columns + c;
  double sums[4] = {0, 0, 0, 0};
  for (int64_t at = next;; at += embed_piece) {
    const Four one = load_four<wide>(from, e.columns - c);
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] += static_cast<double>(one.x[i]);
    if (at >= e.rows || e.targets[at] != target) break;
    from = e.partials + 2 * (at / embed_piece) * e.columns + c;
  }
  Four sum;
#pragma unroll
  for (int i = 0; i < 4; i++) sum.x[i] = static_cast<float>(sums[i]);
  embed_add(e, target, c, sum);
}

/* order = 0 to count - 1, sorted by target, those of one target as they were; targets with it.
 * Eleven bits a pass, from the lowest; other_...: as long. */
void sort_rows(int64_t count, int32_t *targets, int32_t *order, int32_t *other_targets,
               int32_t *other_order) {
  constexpr int bits = 11;
  int32_t highest = 0;
  for (int64_t i = 0; i < count; i++) {
    order[i] = static_cast<int32_t>(i);
    if (targets[i] > highest) highest = targets[i];
  }
  int32_t *from[2] = {targets, order}, *to[2] = {other_targets, other_order};
  for (int shift = 0; shift < 31 && highest >> shift != 0; shift += bits) {
    int64_t starts[(1 << bits) + 1] = {0};
    const int32_t mask = (1 << bits) - 1;
    for (int64_t i = 0; i < count; i++) starts[(from[0][i] >> shift & mask) + 1]++;
    for (int b = 0; b < 1 << bits; b++) starts[b + 1] += starts[b];
    for (int64_t i = 0; i < count; i++) {
      const int64_t place = starts[from[0][i] >> shift & mask]++;
      to[0][place] = from[0][i];
      to[1][place] = from[1][i];
    }
    for (int k = 0; k < 2; k++) {
      int32_t *const now = to[k];
      to[k] = from[k];
      from[k] = now;
    }
  }
  if (from[0] == targets) return;
  memcpy(targets, other_targets, static_cast<size_t>(count) * sizeof *targets);
  memcpy(order, other_order, static_cast<size_t>(count) * sizeof *order);
}

/* Sorts by `targets`, of which it makes use, stages the order and adds the rows up. lists: four of
 * a number for each row, targets the first. */
rp_status add_sorted(EmbedSums e, int32_t *lists, const Packing &packing) {
  sort_rows(e.rows, lists, lists + e.rows, lists + 2 * e.rows, lists + 3 * e.rows);
  const int32_t *staged = nullptr;
  RPI_TRY(stage(lists, 2 * e.rows, &staged));
  e.targets = staged;
  e.order = staged + e.rows;
  const int64_t pieces = rpi_divide_up(e.rows, embed_piece), quads = (e.columns + 3) / 4;
  unsigned threads = 32;
  while (threads < embed_threads && threads < quads) threads *= 2;
  const dim3 grid(static_cast<unsigned>(pieces), blocks_for(quads, threads));
  RPI_TRY(scratch(pieces * 2 * e.columns, &e.partials));
  const bool wide = is_wide(e.dout, e.columns) && is_wide(e.partials, e.columns);
  CUDA_TRY(launch(wide ? embed_add_piece<true> : embed_add_piece<false>,
                  {grid, dim3(threads), 0, context().stream}, e, packing));
  if (pieces == 1) return RP_OK;
  CUDA_TRY(launch(wide ? embed_add_runs<true> : embed_add_runs<false>,
                  {grid, dim3(threads), 0, context().stream}, e));
  return RP_OK;
}

rp_status embed_backward_with(const rpi_embed_backward_args *args, int32_t *lists) {
  const rpi_embed_args *const f = &args->forward;
  Packing packing;
  RPI_TRY(packing_of(&f->dropout, false, &packing));
  EmbedSums e = {};
  e.rows = f->rows;
  e.columns = f->columns;
  e.dout = args->dout;
  scratch_begin();
  memcpy(lists, f->ids, static_cast<size_t>(f->rows) * sizeof *lists);
  e.scale = f->scale;
  e.to = args->dtable;
  RPI_TRY(add_sorted(e, lists, packing));
  if (args->dpositions == nullptr) return RP_OK;
  const int64_t *const offsets = f->dropout.offsets;
  int64_t sentence = 0;
  for (int64_t row = 0; row < f->rows; row++) {
    while (offsets[sentence + 1] <= row) sentence++;
    lists[row] = static_cast<int32_t>(row - offsets[sentence]);
  }
  e.scale = 1;
  e.to = args->dpositions;
  return add_sorted(e, lists, packing);
}

}  // namespace

rp_status embed(const rpi_embed_args *args) {
  if (args->rows == 0 || args->columns == 0) return RP_OK;
  EmbedRows e = {args->rows,      args->columns, nullptr,   args->table, args->scale,
                 args->positions, nullptr,       args->out, args->note};
  Packing packing;
  const bool placed = args->positions != nullptr && args->places == nullptr;
  RPI_TRY(packing_of(&args->dropout, placed, &packing));
  RPI_TRY(stage(args->ids, args->rows, &e.ids));
  if (args->positions != nullptr) RPI_TRY(stage(args->places, args->rows, &e.places));
  const RowGrid g = strip_grid(e.rows);
  const bool wide =
      is_wide(e.table, e.columns) && is_wide(e.positions, e.columns) && is_wide(e.out, e.columns);
  CUDA_TRY(launch(wide ? embed_rows<true> : embed_rows<false>,
                  {g.grid, g.block, 0, context().stream}, e, packing));
  return RP_OK;
}

rp_status embed_backward(const rpi_embed_backward_args *args) {
  const int64_t rows = args->forward.rows;
  if (rows == 0 || args->forward.columns == 0) return RP_OK;
  int32_t *const lists = static_cast<int32_t *>(malloc(4 * static_cast<size_t>(rows) * 4));
  if (lists == nullptr) {
    return fail(RP_ERROR_MEMORY, "embed: no memory to sort %lld rows", (long long)rows);
  }
  const rp_status status = embed_backward_with(args, lists);
  free(lists);
  return status;
}

}  // namespace rpc
