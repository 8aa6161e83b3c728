/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_backward_band.cu: the fast path of attention's backward (backward_band.h): passes over
 * queries and over keys, and the way of their sums into the gradients of tables.
 *
 *   vectors_kernel   the vectors of the bands, distance by distance, as operands of products
 *   queries_kernel   dq, and of every block the sums for each distance, in lines of its own
 *   keys_kernel      dk, dv
 *   turns_kernel     dk, dv and dq where sequences are long (backward_turns.h)
 *   across_kernel    before it, where there are bands: queries_kernel of tiles across them
 *   unseen_kernel    zeros in rows of dq that turns_kernel does not come to
 *   totals_kernel    the lines of a head's blocks, added up in order
 *   rows_kernel      table gradient[r] += sum of the distances that meet row r, in order, of all
 *                    tables at once
 */
#include "backward_keys.h"
#include "backward_queries.h"
#include "backward_single.h"

namespace rpc {
namespace {

constexpr int64_t kMostColumns = 131; /* 129 distances, and a column for none at both ends */
constexpr int64_t kMostBlocks = 1024; /* that have lines, of all heads; and their numbers: */
constexpr int64_t kMostNumbers = int64_t{1} << 24;
constexpr int kThreads = 256;
constexpr int kStrips = 4, kEndStrips = 16; /* ends have a line of every warp: these are many */

bool on_band(const rp_relation &r) { return r.map == RP_MAP_BAND && !r.query_positions; }

/* Sizes that the shape and the device alone decide. */
struct Sizes {
  int width, tile; /* tile: rows of queries or keys that a block owns */
  bool bf16, single;
  int64_t low, high, columns, table_rows; /* columns 0: no band of keys or values */
  int64_t bias_low, bias_high, bias_columns;
  int64_t blocks, value_offset, bias_offset, numbers; /* of a block's lines */
  bool turns;                                         /* is dq made in the pass over keys? Then: */
  int64_t turn_tiles;                                 /* of a head */
  int64_t table_bytes, line_bytes, total_bytes, turn_bytes;
};

bool has_table(const rp_relation *terms) { return terms[0].table || terms[1].table; }

/* Widens low and high, as read_call does, by the bands among some terms. */
void read_ends(const rp_relation *terms, int64_t *low, int64_t *high, int64_t *columns) {
  for (int i = 0; i < RP_TERMS; i++) {
    const rp_relation &r = terms[i];
    if (!r.table || !on_band(r)) continue;
    const int64_t outside = r.beyond == RP_BEYOND_CLIP ? 0 : 1; /* a column for no relation */
    const int64_t first = -r.left - outside, last = r.right + outside;
    *low = *columns == 0 || first < *low ? first : *low;
    *high = *columns == 0 || last > *high ? last : *high;
    *columns = *high - *low + 1;
  }
}

/* ---- shared memory --------------------------------------------------------------------- */

/* ds of a tile and the sums of its diagonals: add_biases. */
template <class S>
int64_t slope_numbers(const Sizes &sizes) {
  return sizes.bias_columns > 0 ? S::kOwn * (S::kOther + 1) + S::kOwn + S::kOther : 0;
}

/* From one row of cells to the next: 4 modulo 8, so that no more than two of a warp's pairs are in
 * one bank, whichever way it goes through them. */
int64_t line_of(int64_t columns) { return columns > 0 ? rpi_round_up(columns - 4, 8) + 4 : 0; }

/* Rows of a table that stay in shared memory: BandBackward. */
template <class S>
int held(const Sizes &sizes) {
  return sizes.columns <= S::kMostHeld ? static_cast<int>(rpi_round_up(sizes.columns, 16)) : 0;
}

/* Shared memory of a block of queries, and of one of keys. */
template <class S>
int64_t query_bytes(const Sizes &sizes) {
  const int64_t cells = 2 * S::kOwn * line_of(sizes.columns);
  return static_cast<int64_t>(sizeof(BandShared<S>)) + vector_bytes<S>(held<S>(sizes), false) +
         (cells + slope_numbers<S>(sizes)) * 4;
}
template <class S>
int64_t key_bytes(const Sizes &sizes) {
  const int64_t cells = 2 * S::kOther * line_of(sizes.columns);
  return static_cast<int64_t>(sizeof(BandShared<S>)) + vector_bytes<S>(held<S>(sizes), true) +
         cells * 4;
}

/* And of one that adds to dq by turns. */
template <class S>
int64_t turn_bytes(const Sizes &sizes) {
  return key_bytes<S>(sizes) + int64_t{sizeof(TurnShared)};
}

template <class S>
int64_t most_bytes(const Sizes &sizes) {
  const int64_t queries = query_bytes<S>(sizes), keys = key_bytes<S>(sizes);
  return queries > keys ? queries : keys;
}

template <class Operand>
int64_t shared_needed(const Sizes &sizes) {
  return sizes.width == 32   ? most_bytes<BandShape<Operand, float, 32>>(sizes)
         : sizes.width == 64 ? most_bytes<BandShape<Operand, float, 64>>(sizes)
                             : most_bytes<BandShape<Operand, float, 128>>(sizes);
}

/* ---- sizes ------------------------------------------------------------------------------- */

constexpr int kTileRows[] = {32, 64, 128};
enum { SMALL, WHOLE, LARGE, TILES };

/* Tiles of queries that a call has, and their pairs with tiles of keys, of each size; and the rows
 * of its longest sequence. */
struct Work {
  int64_t tiles[TILES], pairs[TILES];
  int64_t key_blocks; /* of 128 */
  int longest;
};
Work work_of(const rp_attention *s) {
  Work work = {};
  for (int64_t b = 0; b < s->B; b++) {
    const Sequence seq = sequence_of(s, b);
    for (int x = 0; x < TILES; x++) {
      const int rows = kTileRows[x], more = rows - 1;
      work.tiles[x] += (seq.query_rows + more) / rows;
      work.pairs[x] += int64_t{(seq.queries + more) / rows} * ((seq.keys + more) / rows);
    }
    work.key_blocks += rpi_divide_up(seq.key_rows, kTurnOwn);
    for (const int rows : {seq.query_rows, seq.key_rows}) {
      work.longest = rows > work.longest ? rows : work.longest;
    }
  }
  return work;
}

/* Which size a call has: small ones in bf16 for heads of 33 to 64 where sequences are short, taking
 * a pair of them for three eighths of a pair of whole ones; and large ones there where they
 * waste an eighth at most, are as many as fill the device, and two of their blocks fit a
 * multiprocessor (which keeps 1 KiB of each for itself). */
int size_of(const rp_attention *s, const Sizes &sizes, const Work &work) {
  if (!sizes.bf16 || sizes.width != 64) return WHOLE;
  if (3 * work.pairs[SMALL] < 8 * work.pairs[WHOLE]) return SMALL;
  using Large = BandShape<bf16, float, 64, 128>;
  const int64_t in_turns = sizes.bias_columns > 0 ? 0 : turn_bytes<Large>(sizes);
  const int64_t passes = most_bytes<Large>(sizes);
  const int64_t bytes = (in_turns > passes ? in_turns : passes) + 1024;
  const bool large = 8 * 4 * work.pairs[LARGE] <= 9 * work.pairs[WHOLE] &&
                     s->H * work.tiles[LARGE] >= 2 * context().multiprocessors &&
                     2 * bytes <= context().shared_bytes + 1024;
  return large ? LARGE : WHOLE;
}

/* Is every sequence one tile, of which a block does all? */
bool is_single(const Sizes &sizes, const Work &work) {
  return sizes.bf16 && sizes.width <= kSingleWidth && work.longest <= kSingleRows &&
         sizes.columns <= kSingleColumns && single_bytes(sizes.columns) <= context().shared_bytes;
}

/* That a multiprocessor has at once, of those of short sequences. */
int64_t blocks_at_once(const Sizes &sizes) {
  if (!sizes.single) return BandShape<bf16, float, 64, 32>::kBlocks;
  const int64_t fit = (context().shared_bytes + 1024) / (single_bytes(sizes.columns) + 1024);
  const int64_t most = kSingleBlocks[sizes.columns > 0];
  return fit < most ? fit : most;
}

/* That have lines. Blocks of short sequences are done with a tile soon, and all alike: as many as a
 * device holds at once. */
int64_t most_blocks(const Sizes &sizes) {
  if (sizes.tile != 32) return kMostBlocks;
  const int64_t held_at_once = context().multiprocessors * blocks_at_once(sizes);
  return held_at_once < kMostBlocks ? held_at_once : kMostBlocks;
}

/* Without what depends on the sequences, which may be many. */
Sizes shape_of(const rp_attention *s) {
  Sizes sizes = {};
  const int64_t widest = s->D > s->Dv ? s->D : s->Dv;
  sizes.width = widest <= 32 ? 32 : widest <= 64 ? 64 : 128;
  sizes.bf16 = placement_of(s).precision == RP_BF16;
  read_ends(s->key, &sizes.low, &sizes.high, &sizes.columns);
  read_ends(s->value, &sizes.low, &sizes.high, &sizes.columns);
  read_ends(s->bias, &sizes.bias_low, &sizes.bias_high, &sizes.bias_columns);
  return sizes;
}

Sizes sizes_of(const rp_attention *s) {
  Sizes sizes = shape_of(s);
  const Work work = work_of(s);
  sizes.single = is_single(sizes, work);
  if (sizes.single) sizes.width = kSingleWidth;
  const int size = sizes.single ? SMALL : size_of(s, sizes, work);
  sizes.tile = kTileRows[size];
  sizes.turns = size == LARGE && sizes.bias_columns == 0;
  sizes.blocks = sizes.single ? rpi_divide_up(s->B, 2) : work.tiles[size];
  sizes.table_rows = rpi_round_up(sizes.columns, 64);
  sizes.value_offset = has_table(s->key) ? sizes.columns * s->D : 0;
  sizes.bias_offset = sizes.value_offset + (has_table(s->value) ? sizes.columns * s->Dv : 0);
  sizes.numbers = sizes.bias_offset + sizes.bias_columns;
  if (sizes.turns) {
    sizes.turn_tiles = all_query_rows(s) / kTurnRows + s->B;
    const int64_t lines = sizes.columns > 0 ? work.key_blocks * kTurnWarps + 1 : 0;
    const int64_t of_tile = kTurnNumbers + kTurnEnds + 1;
    sizes.turn_bytes = rounded(s->H * (sizes.turn_tiles * of_tile + lines * kEndNumbers) * 4 + 256);
  }
  if (sizes.numbers == 0) return sizes;
  const int64_t most = rpi_min(most_blocks(sizes), kMostNumbers / sizes.numbers);
  sizes.blocks = rpi_min(sizes.blocks, rpi_max(most / rpi_max(s->H, 1), 1));
  const int64_t element = sizes.bf16 ? 2 : 4;
  sizes.table_bytes = rounded(s->H * 2 * sizes.table_rows * sizes.width * element);
  sizes.line_bytes = rounded(s->H * sizes.blocks * sizes.numbers * 4);
  sizes.total_bytes = rounded(s->H * sizes.numbers * 4);
  return sizes;
}

/* ---- tables ------------------------------------------------------------------------ */

/* Row x of head h's table of keys (or values) is the vector of distance low + x. */
template <class Operand>
__global__ void __launch_bounds__(kThreads)
    vectors_kernel(const __grid_constant__ BandBackward f, int width, Operand *to) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int column = static_cast<int>(at % width);
  const int64_t row = at / width, table = row / f.table_rows;
  const int x = static_cast<int>(row % f.table_rows), head = static_cast<int>(table / 2);
  if (head >= f.c.call.H) return;
  const bool values = table % 2 != 0;
  const Band &band = values ? f.c.call.value : f.c.call.key;
  const int there = values ? f.c.call.Dv : f.c.call.D;
  float number = 0;
  if (x < f.columns && column < there) number = band_at(band, head, f.low + x, column);
  put_number(to[at], number);
}

/* A thread adds every kApart-th line's number, then one of them the strips' sums. */
template <int kApart>
__global__ void __launch_bounds__(kThreads)
    totals_kernel(const float *lines, int64_t numbers, int32_t blocks, float *totals) {
  constexpr int kSumNumbers = kThreads / kApart;
  __shared__ float strips[kApart][kSumNumbers];
  const int own = static_cast<int>(threadIdx.x) % kSumNumbers;
  const int strip = static_cast<int>(threadIdx.x) / kSumNumbers;
  const int64_t number = int64_t{blockIdx.x} * kSumNumbers + own, head = blockIdx.y;
  float sum = 0;
  if (number < numbers) {
    for (int64_t block = strip; block < blocks; block += kApart) {
      sum += lines[(head * blocks + block) * numbers + number];
    }
  }
  strips[strip][own] = sum;
  __syncthreads();
  if (strip != 0 || number >= numbers) return;
  for (int other = 1; other < kApart; other++) sum += strips[other][own];
  totals[head * numbers + number] = sum;
}

/* The gradient of one term's tables, and where the totals of its kind lie. */
struct Term {
  Part part;
  const float *totals;
  const float *ends; /* of head 0, [H][kEndNumbers]: what is to be added to the ends; or NULL */
  int32_t low, columns, rows, width;
  float factor;
  float *gradient;

  __host__ __device__ int64_t tables(int32_t heads) const {
    return part.head_stride != 0 ? heads : 1;
  }
  __host__ __device__ int64_t size(int32_t heads) const { return tables(heads) * rows * width; }
  /* Behind the last number. */
  const float *end(int32_t heads) const {
    return gradient + (tables(heads) - 1) * part.head_stride + (rows - 1) * part.row_stride + width;
  }
};

struct Terms {
  Term of[3 * RP_TERMS];
  int32_t count;
};

/* A thread has one number of the tables of a term, which is the grid's y. */
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ Terms terms, int64_t numbers, int32_t heads) {
  const Term &t = terms.of[blockIdx.y];
  const Part &part = t.part;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at >= t.size(heads)) return;
  const int64_t tables = t.tables(heads), table = at / (int64_t{t.rows} * t.width);
  const int row = static_cast<int>(at / t.width % t.rows), number = static_cast<int>(at % t.width);
  const int64_t first = table, end = tables > 1 ? table + 1 : heads;
  float sum = 0;
  int begin = 0, stop = t.columns;
  if (!part.buckets) { /* distance and row go together, but for what an end stands for */
    if (row > 0) begin = row - part.left - t.low;
    if (row < t.rows - 1) stop = row - part.left - t.low + 1;
  }
  for (int column = begin; column < stop; column++) {
    if (part_row(part, t.low + column) != row) continue;
    for (int64_t head = first; head < end; head++) {
      sum += t.totals[head * numbers + int64_t{column} * t.width + number];
      const float *const ends = t.ends + head * kEndNumbers + number;
      if (t.ends && column == 0) sum += ends[0];
      if (t.ends && column == t.columns - 1) sum += ends[2 * kTurnWidth];
    }
  }
  t.gradient[table * part.head_stride + row * part.row_stride + number] += t.factor * sum;
}

/* ---- passes -------------------------------------------------------------------------- */

/* A block's share of the tiles of queries. */
template <class S, bool kInTurns>
__device__ void run_queries(const BandBackward &f) {
  const Tiles &tiles = f.c.query_tiles;
  Deal deal = deal_of(tiles, f.c.call.H, f.blocks);
  QueryBlock<S, kInTurns> block(f, deal.head);
  const int64_t line = int64_t{deal.head} * f.blocks + deal.own;
  float *const lines = f.lines ? f.lines + line * f.line_numbers : nullptr;
  for (; deal.tile() < tiles.count; deal.next(f.blocks)) {
    block.run(tiles.list[deal.tile()], deal.round == 0, lines);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    queries_kernel(const __grid_constant__ BandBackward f) {
  run_queries<S, false>(f);
}
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    across_kernel(const __grid_constant__ BandBackward f) {
  run_queries<S, true>(f);
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    keys_kernel(const __grid_constant__ BandBackward f) {
  const Tiles &tiles = f.c.key_tiles;
  const Deal deal = deal_of(tiles, f.c.call.H, tiles.count);
  KeyBlock<S> block(f, deal.head);
  block.run(tiles.list[deal.own]);
}

/* A block's place is that of the number it draws: those before it have begun. */
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    turns_kernel(const __grid_constant__ BandBackward f) {
  auto *const number = reinterpret_cast<int32_t *>(dynamic_smem());
  if (threadIdx.x == 0) *number = draw_number(f.turns.begun);
  __syncthreads();
  const Tiles &tiles = f.c.key_tiles;
  const Deal deal = deal_at(tiles, f.c.call.H, tiles.count, *number);
  __syncthreads(); /* keys come where it lies */
  KeyBlock<S, true> block(f, deal.head);
  const int64_t line = (int64_t{deal.head} * tiles.count + deal.own) * kTurnWarps * kEndNumbers;
  block.run(tiles.list[deal.own], f.turns.lines ? f.turns.lines + line : nullptr);
}

template <class Storage>
__global__ void __launch_bounds__(kThreads) unseen_kernel(const __grid_constant__ Backward c) {
  const Call &call = c.call;
  const Deal deal = deal_of(c.query_tiles, call.H, c.query_tiles.count);
  const Tile tile = c.query_tiles.list[deal.own];
  const Sequence seq = call.sequences[tile.sequence];
  for (int row = 0; row < c.tile; row += kTurnRows) {
    const int i = tile.row + row;
    if (i < seq.queries && walkers_of(seq, i).any) continue;
    const int count = smaller(seq.query_rows - i, kTurnRows);
    for (int x = static_cast<int>(threadIdx.x); x < count * call.D; x += kThreads) {
      Storage *const to =
          row_of<Storage>(c.dq, seq.query_batch, deal.head, seq.query_row + i + x / call.D);
      put_number(to[x % call.D], 0);
    }
  }
}

/* Are there such rows? */
bool leaves_rows(const rp_attention *s) {
  for (int64_t b = 0; b < s->B; b++) {
    const Sequence seq = sequence_of(s, b);
    const int last = (seq.queries - 1) / kTurnRows * kTurnRows;
    if (seq.query_rows == 0) continue;
    if (seq.queries == 0 || seq.query_rows > last + kTurnRows) return true;
    if (!walkers_of(seq, 0).any || !walkers_of(seq, last).any) return true;
  }
  return false;
}

template <class Operand>
rp_status make_vectors(const BandBackward &f, int width) {
  if (!f.banded) return RP_OK;
  const auto to = static_cast<Operand *>(const_cast<void *>(f.tables)); /* ours, in the workspace */
  const int64_t numbers = int64_t{f.c.call.H} * 2 * f.table_rows * width;
  const dim3 grid(blocks_for(numbers, kThreads));
  CUDA_TRY(
      launch(vectors_kernel<Operand>, {grid, dim3(kThreads), 0, context().stream}, f, width, to));
  return RP_OK;
}

/* Sequences of one tile. */
rp_status run_single(BandBackward f, const Sizes &sizes, bool stored_bf16) {
  f.line = static_cast<int32_t>(single_line(sizes.columns));
  f.held = static_cast<int32_t>(rpi_round_up(sizes.columns, 16));
  RPI_TRY(make_vectors<bf16>(f, sizes.width));
  return single_backward(f, stored_bf16);
}

template <class S>
rp_status run(BandBackward f, const Sizes &sizes) {
  cudaStream_t const stream = context().stream;
  const int64_t heads = f.c.call.H;
  f.held = held<S>(sizes);
  const auto grid = [](int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); };
  RPI_TRY(make_vectors<typename S::Operand>(f, S::kWidth));
  if (f.c.query_tiles.count > 0) {
    const auto shared = static_cast<size_t>(query_bytes<S>(sizes));
    CUDA_TRY(
        launch(queries_kernel<S>, {grid(heads * f.blocks), dim3(S::kThreads), shared, stream}, f));
  }
  if (f.c.key_tiles.count > 0) {
    const auto shared = static_cast<size_t>(key_bytes<S>(sizes));
    CUDA_TRY(launch(keys_kernel<S>,
                    {grid(heads * f.c.key_tiles.count), dim3(S::kThreads), shared, stream}, f));
  }
  return RP_OK;
}

/* The same where dq is made in the pass over keys. */
template <class S>
rp_status run_in_turns(const rp_attention *s, BandBackward f, const Sizes &sizes) {
  cudaStream_t const stream = context().stream;
  const int64_t heads = f.c.call.H;
  f.held = held<S>(sizes);
  const auto grid = [](int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); };
  RPI_TRY(make_vectors<typename S::Operand>(f, S::kWidth));
  const int64_t query_blocks = heads * f.c.query_tiles.count;
  const int64_t key_blocks = heads * f.c.key_tiles.count;
  if (f.banded) {
    CUDA_TRY(launch(across_kernel<S>,
                    {grid(heads * f.blocks), dim3(S::kThreads),
                     static_cast<size_t>(query_bytes<S>(sizes)), stream},
                    f));
  }
  if (leaves_rows(s)) {
    CUDA_TRY(launch(unseen_kernel<typename S::Storage>,
                    {grid(query_blocks), dim3(kThreads), 0, stream}, f.c));
  }
  const auto numbers = static_cast<size_t>(heads * f.turns.tiles + 1);
  CUDA_TRY(cudaMemsetAsync(f.turns.turns, 0, numbers * sizeof(int32_t), stream));
  if (key_blocks == 0) return RP_OK;
  CUDA_TRY(launch(
      turns_kernel<S>,
      {grid(key_blocks), dim3(S::kThreads), static_cast<size_t>(turn_bytes<S>(sizes)), stream}, f));
  return RP_OK;
}

template <class Operand, class Storage>
rp_status run_width(const rp_attention *s, const BandBackward &f, const Sizes &sizes) {
  if constexpr (sizeof(Operand) == 2) {
    if (sizes.turns) return run_in_turns<BandShape<Operand, Storage, 64, 128>>(s, f, sizes);
    if (sizes.tile == 32) return run<BandShape<Operand, Storage, 64, 32>>(f, sizes);
    if (sizes.tile == 128) return run<BandShape<Operand, Storage, 64, 128>>(f, sizes);
  }
  if (sizes.width == 32) return run<BandShape<Operand, Storage, 32>>(f, sizes);
  if (sizes.width == 64) return run<BandShape<Operand, Storage, 64>>(f, sizes);
  return run<BandShape<Operand, Storage, 128>>(f, sizes);
}

/* The totals into the gradients of all these terms, of which there are none then. */
rp_status add_terms(Terms *terms, const BandBackward &f) {
  const int32_t heads = f.c.call.H;
  int64_t most = 0;
  for (int i = 0; i < terms->count; i++) {
    const int64_t size = terms->of[i].size(heads);
    most = size > most ? size : most;
  }
  const dim3 grid(blocks_for(most, kThreads), static_cast<unsigned>(terms->count));
  if (most > 0) {
    CUDA_TRY(launch(rows_kernel, {grid, dim3(kThreads), 0, context().stream}, *terms,
                    f.line_numbers, heads));
  }
  terms->count = 0;
  return RP_OK;
}

/* Terms of one kind, which are like `term`. Tied tables share their gradient: one of them comes
 * after the other. */
rp_status take_terms(const rp_relation *relations, float *const *gradients, const Band &band,
                     Term term, const BandBackward &f, Terms *terms) {
  const int32_t heads = f.c.call.H;
  int parts = 0;
  for (int i = 0; i < RP_TERMS; i++) {
    const rp_relation &r = relations[i];
    if (!r.table) continue;
    term.part = band.parts[parts++];
    term.rows = static_cast<int32_t>(r.buckets ? r.rows : r.left + 1 + r.right);
    term.gradient = gradients[i];
    if (!term.gradient || term.size(heads) == 0) continue;
    for (int j = 0; j < terms->count; j++) {
      const Term &other = terms->of[j];
      if (term.gradient >= other.end(heads) || other.gradient >= term.end(heads)) continue;
      RPI_TRY(add_terms(terms, f));
    }
    terms->of[terms->count++] = term;
  }
  return RP_OK;
}

template <int kApart>
rp_status add_up(const float *lines, int64_t numbers, int64_t blocks, int64_t heads,
                 float *totals) {
  const dim3 grid(blocks_for(numbers * kApart, kThreads), static_cast<unsigned>(heads));
  CUDA_TRY(launch(totals_kernel<kApart>, {grid, dim3(kThreads), 0, context().stream}, lines,
                  numbers, static_cast<int32_t>(blocks), totals));
  return RP_OK;
}

rp_status add_lines(const rp_attention *s, const BandBackward &f, float *totals,
                    const rp_attention_gradients *g) {
  const Call &call = f.c.call;
  RPI_TRY(add_up<kStrips>(f.lines, f.line_numbers, f.blocks, s->H, totals));
  const int64_t end_lines = int64_t{f.c.key_tiles.count} * kTurnWarps;
  float *const ends = f.turns.lines ? f.turns.lines + s->H * end_lines * kEndNumbers : nullptr;
  if (ends) RPI_TRY(add_up<kEndStrips>(f.turns.lines, kEndNumbers, end_lines, s->H, ends));
  const float *const value_ends = ends ? ends + kTurnWidth : nullptr;
  const Term key = {{}, totals, ends, f.low, f.columns, 0, call.D, f.c.scale, nullptr};
  const Term value = {{},     totals + f.value_offset, value_ends, f.low, f.columns, 0, call.Dv, 1,
                      nullptr};
  const Term bias = {
      {}, totals + f.bias_offset, nullptr, call.bias.low, f.bias_columns, 0, 1, 1, nullptr};
  Terms terms = {};
  RPI_TRY(take_terms(s->key, g->key, call.key, key, f, &terms));
  RPI_TRY(take_terms(s->bias, g->bias, call.bias, bias, f, &terms));
  RPI_TRY(take_terms(s->value, g->value, call.value, value, f, &terms));
  return add_terms(&terms, f);
}

}  // namespace

bool band_serves(const rp_attention *s) {
  if (s->mask.data || s->softcap != 0 || s->position_bias || s->D > 128 || s->Dv > 128) {
    return false;
  }
  for (int i = 0; i < RP_TERMS; i++) {
    if (s->query[i].table) return false;
    for (const rp_relation *r : {&s->key[i], &s->bias[i], &s->value[i]}) {
      if (r->table && !on_band(*r)) return false;
    }
  }
  const Sizes sizes = shape_of(s);
  return sizes.columns <= kMostColumns && s->H <= 65535 &&
         (sizes.bf16 ? shared_needed<bf16>(sizes) : shared_needed<float>(sizes)) <=
             context().shared_bytes;
}

int band_tile(const rp_attention *s) { return sizes_of(s).tile; }

bool band_walks(const rp_attention *s) { return !sizes_of(s).single; }

int64_t band_bytes(const rp_attention *s) {
  const Sizes sizes = sizes_of(s);
  return sizes.table_bytes + sizes.line_bytes + sizes.total_bytes + sizes.turn_bytes;
}

bool band_in_turns(const rp_attention *s) { return sizes_of(s).turns; }

rp_status band_backward(const rp_attention *s, const Backward &c, const rp_attention_gradients *g,
                        void *workspace) {
  const Sizes sizes = sizes_of(s);
  unsigned char *const memory = static_cast<unsigned char *>(workspace);
  BandBackward f = {};
  f.c = c;
  f.banded = sizes.columns > 0;
  f.biased = c.call.bias.count > 0;
  f.blocks = static_cast<int32_t>(sizes.blocks);
  if (f.banded) {
    f.low = static_cast<int32_t>(sizes.low);
    f.high = static_cast<int32_t>(sizes.high);
    f.columns = static_cast<int32_t>(sizes.columns);
    f.line = static_cast<int32_t>(line_of(sizes.columns));
    f.tables = memory;
    f.table_rows = static_cast<int32_t>(sizes.table_rows);
  }
  f.value_offset = sizes.value_offset;
  f.bias_offset = sizes.bias_offset;
  bool wanted = false;
  for (int i = 0; i < RP_TERMS; i++) {
    wanted |= s->key[i].table && g->key[i];
    wanted |= s->value[i].table && g->value[i];
    if (s->bias[i].table && g->bias[i]) f.bias_columns = static_cast<int32_t>(sizes.bias_columns);
  }
  f.line_numbers = f.bias_columns > 0 ? sizes.numbers : sizes.bias_offset;
  if ((wanted || f.bias_columns > 0) && sizes.blocks > 0) {
    f.lines = reinterpret_cast<float *>(memory + sizes.table_bytes);
  }
  if (sizes.turns) {
    const int64_t tiles = s->H * sizes.turn_tiles;
    f.turns.tiles = sizes.turn_tiles;
    f.turns.partial = reinterpret_cast<float *>(memory + sizes.table_bytes + sizes.line_bytes +
                                                sizes.total_bytes);
    f.turns.ends = f.turns.partial + tiles * kTurnNumbers;
    float *const lines = f.turns.ends + tiles * kTurnEnds;
    if (f.banded && f.lines) f.turns.lines = lines;
    const int64_t end_lines = f.banded ? int64_t{c.key_tiles.count} * kTurnWarps + 1 : 0;
    f.turns.turns = reinterpret_cast<int32_t *>(lines + s->H * end_lines * kEndNumbers);
    f.turns.begun = f.turns.turns + tiles;
  }
  const int64_t element = placement_of(s).element == RP_BF16 ? 2 : 4;
  if (s->H == 0) return RP_OK;
  if (sizes.single) RPI_TRY(run_single(f, sizes, element == 2));
  else if (element == 2) RPI_TRY((run_width<bf16, bf16>(s, f, sizes)));
  else if (sizes.bf16) RPI_TRY((run_width<bf16, float>(s, f, sizes)));
  else RPI_TRY((run_width<float, float>(s, f, sizes)));
  if (!f.lines) return RP_OK;
  float *const totals = reinterpret_cast<float *>(memory + sizes.table_bytes + sizes.line_bytes);
  return add_lines(s, f, totals, g);
}

}  // namespace rpc
