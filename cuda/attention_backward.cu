/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_backward.cu: the gradients of relation-aware attention, for every term and map.
 *
 * With dz the gradient of z and keep_ij the factor of dropout:
 *
 *   (1)  p_ij  = exp(s_ij - lse_i),  p~_ij = keep_ij p_ij
 *   (2)  dp_ij = dz_i . (v_j + wV[r]),  delta_i = dz_i . z_i
 *   (3)  ds_ij = p_ij (keep_ij dp_ij - delta_i) (1 - tanh^2)
 *   (4)  dq_i  = scale sum_j ds_ij (k_j + wK[r])
 *   (5)  dk_j  = scale sum_i ds_ij (q_i + wQ[r]),     dv_j = sum_i p~_ij dz_i
 *   (6)  dwK[r] = scale sum of ds_ij (q_i + u),       dwV[r] = sum of p~_ij dz_i
 *        dwQ[r] = scale sum of ds_ij k_j,             dc[r] = sum of ds_ij        where r(i,j) = r
 *        du = scale sum of ds_ij wK[r]
 *
 * Three passes walk tiles of 64 queries x 64 keys, and each computes the weights of a tile again
 * from the saved log-sum-exp, so that no pass waits for another and none adds to what another
 * writes:
 *
 *               keys                   a block of queries_kernel owns queries: (4), a row of tiles;
 *            +---+---+---+             of keys_kernel keys: (5), a column of tiles;
 *   queries  | > | > | > | (4), (6)    of tables_kernel several rows of tiles: (6), into lines of
 *            +---+---+---+             its own, see table_gradients.h.
 *            | v |
 *            +---+ (5)
 *
 * A tile wholly beyond the band of a term has one relation: its score is one number a row, and its
 * part of (4) to (6) a sum of ds over the row. Nothing is as large as queries x keys.
 *
 * Bands of keys and values that are short, and biases, go another and faster way
 * (attention_backward_band.cu).
 *
 *   backward_products.h   products of a tile: on tensor cores for bf16
 *   backward_tile.h       (1) to (3): p~ and ds of a tile
 *   backward_tables.h     what terms add to (4) and (5); (6), what a tile adds
 */
#include "backward_tables.h"
#include "shared_keys.h"

namespace rpc {
namespace {

/* ---- rows of numbers ------------------------------------------------------------------ */

/* Eight lanes have a row, so that a warp waits for four of them at once. */
template <class E>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Backward c) {
  const Call &call = c.call;
  const Deal deal = deal_of(c.query_tiles, call.H, c.query_tiles.count);
  const Tile tile = c.query_tiles.list[deal.own];
  const int head = deal.head;
  const Sequence seq = call.sequences[tile.sequence];
  constexpr int kLanes = 8;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  for (int row = static_cast<int>(threadIdx.x) / kLanes; row < c.tile; row += kThreads / kLanes) {
    const int i = tile.row + row, width = i < seq.queries ? call.Dv : 0;
    const E *const z = row_of<E>(c.out, seq.query_batch, head, seq.query_row + i);
    const E *const dz = row_of<E>(c.dout, seq.query_batch, head, seq.query_row + i);
    float sum = 0;
#pragma unroll 8
    for (int column = lane; column < width; column += kLanes) {
      sum += static_cast<float>(z[column]) * static_cast<float>(dz[column]);
    }
    sum = sum_of_lanes<kLanes>(sum);
    const int64_t at = lse_of(call, seq, head) + i;
    if (lane == 0 && i < seq.queries) {
      const float lse = c.lse[at];
      const double base2 = static_cast<double>(lse) * 1.4426950408889634074;
      /* all of it, since it is read as a whole */
      c.rows[at] = {lse == -INFINITY ? INFINITY : static_cast<float>(base2), sum, {}};
    }
  }
}

/* Products of 64 rows with the vectors of a short table that is looked up: what pairs then find
 * there. */
template <class S>
__global__ void __launch_bounds__(kThreads)
    meet_kernel(const __grid_constant__ Backward c, int lookup) {
  TileMemory<S> &s = *reinterpret_cast<TileMemory<S> *>(dynamic_smem());
  const Call &call = c.call;
  const Lookup &x = call.lookups[lookup];
  const bool keys = x.kind == KIND_QUERY;
  const Tiles &tiles = keys ? c.key_tiles : c.query_tiles;
  const Deal deal = deal_of(tiles, call.H, tiles.count);
  const Tile tile = tiles.list[deal.own];
  Where w = place(call, tile.sequence, deal.head);
  at_tile(&w, keys ? 0 : tile.row, keys ? tile.row : 0);
  const ArrayRows<S> rows = rows_that_meet<S>(c, x.kind, w);
  const int64_t to =
      keys ? key_number(c, w.seq, w.head, tile.row) : lse_of(call, w.seq, w.head) + tile.row;
  const Place own = own_place();
  for (int first = 0; first < x.rows; first += kTile) {
    Scores sums = {};
    add_product<S>(rows.width, s, rows, TableRows<S>{x.part, w.head, first, x.rows, rows.width},
                   sums);
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = own.row_of(e), relation = first + own.column_of(n, e);
        if (row < rows.count && relation < x.rows) {
          c.met[lookup][(to + row) * x.rows + relation] = sums[n][e];
        }
      }
    }
  }
}

/* Is the whole tile hidden by a dense mask? */
__device__ inline bool tile_hidden(const Call &call, const Where &w) {
  return mask_hides<kTile, kTile>(call, w.seq, w.b, w.head, w.i, w.j);
}

/* ---- (4) -------------------------------------------------------------------------------- */

/* A gradient's rows of a tile: factor * sums, zeros for padding. */
template <class Storage>
__device__ void put_rows(const rp_rows_out &to, int64_t batch, int head, int64_t first, int in_use,
                         int there, int column, int width, float factor, const Sums64 &sums) {
  const Place own = own_place();
  each_sum(column, width, [&](int piece, int n, int e, int at) {
    const int row = own.row_of(e);
    if (row >= there) return;
    put_number(row_of<Storage>(to, batch, head, first + row)[at],
               row < in_use ? factor * sums[piece][n][e] : 0.0f);
  });
}

template <class S>
__global__ void __launch_bounds__(kThreads) queries_kernel(const __grid_constant__ Backward c) {
  TileMemory<S> &s = *reinterpret_cast<TileMemory<S> *>(dynamic_smem());
  const Call &call = c.call;
  const Deal deal = deal_of(c.query_tiles, call.H, c.query_tiles.count);
  const Tile tile = c.query_tiles.list[deal.own];
  Where w = place(call, tile.sequence, deal.head);
  const int column = static_cast<int>(blockIdx.y) * kColumns;
  const Stretch seen = keys_seen(w.seq, tile.row);
  Sums64 dq = {};
  Ends ends = {};
  for (int j = seen.first; j <= seen.last; j += kTile) {
    at_tile(&w, tile.row, j);
    if (tile_hidden(call, w)) continue;
    weigh_tile<S>(c, w, s);
    add_weighted_rows<S>(
        s, column, call.D, [&](int i, int key) { return s.slopes[i][key]; },
        key_rows<S>(c, call.k, call.D, w), dq);
    add_terms<S>(call, w, KIND_KEY, column, s, ends, dq);
  }
  at_tile(&w, tile.row, 0);
  add_ends<S>(w, call.key, column, call.D, s, ends, dq);
  put_rows<typename S::Storage>(c.dq, w.seq.query_batch, w.head, w.seq.query_row + tile.row, w.rows,
                                smaller(kTile, w.seq.query_rows - tile.row), column, call.D,
                                c.scale, dq);
}

/* ---- (5) --------------------------------------------------------------------------------- */

template <class S>
__global__ void __launch_bounds__(kThreads, 2) keys_kernel(const __grid_constant__ Backward c) {
  TileMemory<S> &s = *reinterpret_cast<TileMemory<S> *>(dynamic_smem());
  const Call &call = c.call;
  const Deal deal = deal_of(c.key_tiles, call.H, c.key_tiles.count);
  const Tile tile = c.key_tiles.list[deal.own];
  Where w = place(call, tile.sequence, deal.head);
  const int column = static_cast<int>(blockIdx.y) * kColumns;
  const Stretch seen = queries_that_see(w.seq, tile.row);
  Sums64 dk = {}, dv = {};
  Ends ends = {};
  for (int i = seen.first; i <= seen.last; i += kTile) {
    at_tile(&w, i, tile.row);
    if (tile_hidden(call, w)) continue;
    weigh_tile<S>(c, w, s);
    add_weighted_rows<S>(
        s, column, call.D, [&](int key, int query) { return s.slopes[query][key]; },
        query_rows<S>(c, call.q, call.D, w), dk);
    add_weighted_rows<S>(
        s, column, call.Dv, [&](int key, int query) { return s.weights[query][key]; },
        query_rows<S>(c, c.dout, call.Dv, w), dv);
    add_terms<S>(call, w, KIND_QUERY, column, s, ends, dk);
  }
  at_tile(&w, 0, tile.row);
  add_ends<S>(w, call.query, column, call.D, s, ends, dk);
  const int there = smaller(kTile, w.seq.key_rows - tile.row);
  const int64_t row = w.seq.key_row + tile.row;
  put_rows<typename S::Storage>(c.dk, w.seq.key_batch, w.head, row, w.keys, there, column, call.D,
                                c.scale, dk);
  put_rows<typename S::Storage>(c.dv, w.seq.key_batch, w.head, row, w.keys, there, column, call.Dv,
                                1.0f, dv);
}

/* ---- (6) --------------------------------------------------------------------------------- */

template <class S>
__global__ void __launch_bounds__(kThreads)
    tables_kernel(const __grid_constant__ Backward c, const __grid_constant__ Sums sums) {
  TileMemory<S> &s = *reinterpret_cast<TileMemory<S> *>(dynamic_smem());
  const Call &call = c.call;
  Deal deal = deal_of(c.query_tiles, call.H, sums.blocks);
  float *const lines = sums.lines + (int64_t{deal.head} * sums.blocks + deal.own) * sums.numbers;
  for (int64_t at = threadIdx.x; at < sums.numbers; at += kThreads) lines[at] = 0;
  for (; deal.tile() < c.query_tiles.count; deal.next(sums.blocks)) {
    const Tile tile = c.query_tiles.list[deal.tile()];
    Where w = place(call, tile.sequence, deal.head);
    const Stretch seen = keys_seen(w.seq, tile.row);
    for (int j = seen.first; j <= seen.last; j += kTile) {
      at_tile(&w, tile.row, j);
      if (tile_hidden(call, w)) continue;
      weigh_tile<S>(c, w, s); /* waits for the zeros too */
      for (int x = 0; x < sums.count; x++) {
        const Summed &term = sums.terms[x];
        if (!term.gradient) continue;
        if (term.lookup >= 0) {
          sum_lookup<S>(c, w, s, term, call.lookups[term.lookup], lines);
        } else {
          const Band &band = band_of(call, term.kind);
          sum_band<S>(c, w, s, term, band.parts[term.part], band, lines);
        }
      }
      if (sums.bias_gradient) sum_bias<S>(call, w, s, lines + sums.bias_offset);
    }
  }
}

/* ---- the whole ----------------------------------------------------------------------------- */

constexpr int kMeeting = 128; /* rows of the longest table whose products are kept */

int64_t tile_count(const rp_attention *s, bool keys) {
  int64_t count = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const Sequence seq = sequence_of(s, b);
    count += rpi_divide_up(keys ? seq.key_rows : seq.query_rows, kTile);
  }
  return count;
}

int64_t rows_bytes(const rp_attention *s) {
  return rounded(all_query_rows(s) * s->H * static_cast<int64_t>(sizeof(RowNumbers)));
}

dim3 grid_of(int64_t x, int64_t y) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

template <class Storage>
rp_status run_rows(const Backward &c) {
  const int64_t blocks = int64_t{c.query_tiles.count} * c.call.H;
  if (blocks == 0) return RP_OK;
  CUDA_TRY(
      launch(rows_kernel<Storage>, {grid_of(blocks, 1), dim3(kThreads), 0, context().stream}, c));
  return RP_OK;
}

/* dq, dk and dv. */
template <class S>
rp_status run_passes(const Backward &c) {
  cudaStream_t const stream = context().stream;
  const int64_t heads = c.call.H;
  const int widest = c.call.D > c.call.Dv ? c.call.D : c.call.Dv;
  const int64_t query_blocks = c.query_tiles.count * heads, key_blocks = c.key_tiles.count * heads;
  if (query_blocks > 0) {
    CUDA_TRY(launch(queries_kernel<S>,
                    {grid_of(query_blocks, rpi_divide_up(c.call.D, kColumns)), dim3(kThreads),
                     sizeof(TileMemory<S>), stream},
                    c));
  }
  if (key_blocks > 0) {
    CUDA_TRY(launch(keys_kernel<S>,
                    {grid_of(key_blocks, rpi_divide_up(widest, kColumns)), dim3(kThreads),
                     sizeof(TileMemory<S>), stream},
                    c));
  }
  return RP_OK;
}

/* Products with short tables that are looked up. */
template <class S>
rp_status run_meetings(const Backward &c) {
  for (int x = 0; x < c.call.lookup_count; x++) {
    const bool keys = c.call.lookups[x].kind == KIND_QUERY;
    const int64_t blocks = int64_t{keys ? c.key_tiles.count : c.query_tiles.count} * c.call.H;
    if (!c.met[x] || blocks == 0) continue;
    CUDA_TRY(launch(meet_kernel<S>,
                    {grid_of(blocks, 1), dim3(kThreads), sizeof(TileMemory<S>), context().stream},
                    c, x));
  }
  return RP_OK;
}

template <class S>
rp_status run_tables(const Backward &c, const Sums &sums) {
  const int64_t blocks = int64_t{c.call.H} * sums.blocks;
  if (!sums.wanted || blocks == 0 || c.query_tiles.count == 0) return RP_OK;
  CUDA_TRY(launch(tables_kernel<S>,
                  {grid_of(blocks, 1), dim3(kThreads), sizeof(TileMemory<S>), context().stream}, c,
                  sums));
  return add_sums(sums, c.call.H, c.scale);
}

int64_t sums_bytes(const rp_attention *s) {
  const Sums sums = sums_of(s, tile_count(s, false), nullptr);
  return rounded(sums_numbers(s, sums) * static_cast<int64_t>(sizeof(float)));
}

/* Where the products with short tables lie in the workspace, in the order of Call.lookups; c NULL:
 * how many bytes they are. */
int64_t place_meetings(const rp_attention *s, unsigned char *memory, Backward *c) {
  const Sums sums = sums_of(s, 1, nullptr);
  int64_t used = 0;
  for (int i = 0; i < sums.count; i++) {
    const Summed &term = sums.terms[i];
    if (term.lookup < 0 || term.kind == KIND_BIAS || term.rows > kMeeting) continue;
    if (c) c->met[term.lookup] = reinterpret_cast<float *>(memory + used);
    const int64_t rows = term.kind == KIND_QUERY ? all_key_rows(s) : all_query_rows(s);
    used += rounded(rows * s->H * term.rows * 4);
  }
  return used;
}

/* Everything but the rows' numbers, which are there. */
template <class S>
rp_status run_general(const rp_attention *s, Backward c, const rp_attention_gradients *g,
                      unsigned char *workspace) {
  Sums sums = sums_of(s, c.query_tiles.count, g);
  sums.lines = reinterpret_cast<float *>(workspace);
  place_meetings(s, workspace + sums_bytes(s), &c);
  c.key_rows = all_key_rows(s);
  RPI_TRY(run_meetings<S>(c));
  RPI_TRY(run_passes<S>(c));
  return run_tables<S>(c, sums);
}

template <class Operand, class Storage>
rp_status run(const rp_attention *s, Backward c, const rp_attention_gradients *g,
              unsigned char *workspace) {
  const bool on_bands = band_serves(s);
  if (!on_bands || band_walks(s)) {
    c.tile = on_bands ? band_tile(s) : kTile;
    RPI_TRY(make_tiles(s, false, c.tile, &c.query_tiles));
    RPI_TRY(make_tiles(s, true, c.tile, &c.key_tiles, on_bands && band_in_turns(s)));
    RPI_TRY(run_rows<Storage>(c));
  }
  if (on_bands) return band_backward(s, c, g, workspace);
  return run_general<TileShape<Operand, Storage>>(s, c, g, workspace);
}

}  // namespace

rp_status backward_workspace(const rp_attention *s, int64_t *bytes) {
  *bytes = rows_bytes(s) + shared_keys_bytes(s) +
           (band_serves(s) ? band_bytes(s) : sums_bytes(s) + place_meetings(s, nullptr, nullptr));
  return RP_OK;
}

rp_status attention_backward(const rpi_attention_backward_args *args) {
  const rp_attention *const s = args->shape;
  const rp_attention_gradients *const g = args->gradients;
  const rp_placement placement = placement_of(s);
  const OnStream on(placement.stream);
  RPI_TRY(on.status());
  int64_t needed = 0;
  RPI_TRY(backward_workspace(s, &needed));
  if (args->workspace_bytes < needed) {
    return fail(RP_ERROR_MEMORY, "attention: workspace_bytes=%lld, must be at least %lld",
                static_cast<long long>(args->workspace_bytes), static_cast<long long>(needed));
  }
  Backward c = {};
  RPI_TRY(read_call(s, args->q, args->k, args->v, &c.call));
  c.out = args->out;
  c.dout = args->dout;
  c.dq = g->q;
  c.dk = g->k;
  c.dv = g->v;
  unsigned char *const behind_rows = static_cast<unsigned char *>(args->workspace) + rows_bytes(s);
  own_gradients(s, behind_rows, &c);
  c.lse = args->lse;
  const int64_t element = placement.element == RP_BF16 ? 2 : 4;
  c.aligned = s->D % 8 == 0 && s->Dv % 8 == 0 && rows_aligned(c.call.q, s->D, element) &&
              rows_aligned(c.call.k, s->D, element) && rows_aligned(c.call.v, s->Dv, element) &&
              rows_aligned(c.dout, s->Dv, element);
  c.gradients_aligned = rows_aligned(c.dq, s->D, element) && rows_aligned(c.dk, s->D, element) &&
                        rows_aligned(c.dv, s->Dv, element);
  c.scale = static_cast<float>(s->scale == 0 ? 1 / sqrt(static_cast<double>(s->D)) : s->scale);
  c.rows = static_cast<RowNumbers *>(args->workspace);
  unsigned char *const behind = behind_rows + shared_keys_bytes(s);
  if (placement.element == RP_BF16) RPI_TRY((run<bf16, bf16>(s, c, g, behind)));
  else if (placement.precision == RP_BF16) RPI_TRY((run<bf16, float>(s, c, g, behind)));
  else RPI_TRY((run<float, float>(s, c, g, behind)));
  return add_shared_keys(s, c, g);
}

}  // namespace rpc
