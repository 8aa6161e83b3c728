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
 * Products are sums in f32 here, whatever precision is asked for. Bands of keys and values that are
 * short, and biases, go another and faster way (attention_backward_band.cu).
 *
 *   backward_tile.h     (1) to (3): p~ and ds of a tile
 *   backward_tables.h   (6), what a tile adds
 */
#include "backward_tables.h"

namespace rpc {
namespace {

/* ---- rows of numbers ------------------------------------------------------------------ */

template <class E>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Backward c) {
  const Call &call = c.call;
  const Tile tile = c.query_tiles[blockIdx.x / static_cast<unsigned>(call.H)];
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(call.H));
  const Sequence seq = call.sequences[tile.sequence];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kTile; row += kThreads / 32) {
    const int i = tile.row + row;
    if (i >= seq.queries) return; /* the whole warp */
    const E *const z = row_of<E>(c.out, seq.query_batch, head, seq.query_row + i);
    const E *const dz = row_of<E>(c.dout, seq.query_batch, head, seq.query_row + i);
    float sum = 0;
    for (int column = lane; column < call.Dv; column += 32) {
      sum += static_cast<float>(z[column]) * static_cast<float>(dz[column]);
    }
    sum = sum_of_lanes(sum);
    const int64_t at = lse_of(call, seq, head) + i;
    if (lane == 0) {
      const float lse = c.lse[at];
      c.rows[at].lse = lse == -INFINITY
                           ? INFINITY
                           : static_cast<float>(static_cast<double>(lse) * 1.4426950408889634074);
      c.rows[at].delta = sum;
    }
  }
}

/* Products of 64 rows with the vectors of a short table that is looked up: what pairs then find
 * there. A thread has several of them. */
template <class E>
__global__ void __launch_bounds__(kThreads)
    meet_kernel(const __grid_constant__ Backward c, int lookup) {
  const Call &call = c.call;
  const Lookup &x = call.lookups[lookup];
  const bool keys = x.kind == KIND_QUERY, values = x.kind == KIND_VALUE;
  const Tile *const tiles = keys ? c.key_tiles : c.query_tiles;
  const Tile tile = tiles[blockIdx.x / static_cast<unsigned>(call.H)];
  const int head = static_cast<int>(blockIdx.x % static_cast<unsigned>(call.H));
  const Sequence seq = call.sequences[tile.sequence];
  const float *const u = x.kind == KIND_KEY ? position_bias_of(call, head) : nullptr;
  const int count = smaller(kTile, (keys ? seq.keys : seq.queries) - tile.row);
  for (int at = static_cast<int>(threadIdx.x); at < count * x.rows; at += kThreads) {
    const int row = tile.row + at / x.rows, relation = at % x.rows;
    const E *const from =
        keys ? row_of<E>(call.k, seq.key_batch, head, seq.key_row + row)
             : row_of<E>(values ? c.dout : call.q, seq.query_batch, head, seq.query_row + row);
    const int64_t to = keys ? key_number(c, seq, head, row) : lse_of(call, seq, head) + row;
    c.met[lookup][to * x.rows + relation] =
        dot_table(from, u, table_row(x.part, head, relation), values ? call.Dv : call.D);
  }
}

/* ---- (4) -------------------------------------------------------------------------------- */

/* The thread's columns of a gradient, from `first` on in steps of kSide. */
__device__ inline int own_columns(int first, int width) {
  return first < width ? smaller((width - first + kSide - 1) / kSide, kOwnColumns) : 0;
}

/* sums[a] += weight[a] * line, for the thread's columns. */
template <class T>
__device__ inline void add_line(float (&sums)[kOwnColumns], float weight, const T *line,
                                int columns) {
#pragma unroll
  for (int c = 0; c < kOwnColumns; c++) {
    if (c < columns) sums[c] += weight * static_cast<float>(line[c * kSide]);
  }
}

/* What a tile's terms add to a gradient: of queries (key terms), or of keys (query terms). */
__device__ void add_terms(const Call &call, const Where &w, const TileMemory &s, Kind kind,
                          int column, int columns, float (&sums)[kOwn][kOwnColumns]) {
  const bool queries = kind == KIND_KEY;
  const Band &band = queries ? call.key : call.query;
  const int count = queries ? w.keys : w.rows; /* that each row meets */
  const Meets meets = tile_meets(band, w);
  const int end = end_of(band, meets);
  for (int a = 0; a < kOwn; a++) {
    const int own = thread_row() + kSide * a;
    float sum = 0;
    for (int other = 0; other < count; other++) {
      const int i = queries ? own : other, j = queries ? other : own;
      const float ds = s.slopes[i][j];
      if (ds == 0) continue;
      sum += ds;
      for (int p = 0; meets == MEETS_BAND && p < band.count; p++) {
        const int row = part_row(band.parts[p], w.distance + j - i);
        if (row < 0) continue;
        add_line(sums[a], ds, table_row(band.parts[p], w.head, row) + column, columns);
      }
      for (int x = 0; call.score_lookups && x < call.lookup_count; x++) {
        const Lookup &term = call.lookups[x];
        if (term.kind != kind) continue;
        each_relation(term, w, w.i + i, w.j + j, [&](int row) {
          add_line(sums[a], ds, table_row(term.part, w.head, row) + column, columns);
        });
      }
    }
    for (int p = 0; meets != MEETS_BAND && p < band.count; p++) {
      const int row = part_row(band.parts[p], end);
      if (row >= 0) {
        add_line(sums[a], sum, table_row(band.parts[p], w.head, row) + column, columns);
      }
    }
  }
}

/* A gradient's rows of a tile: factor * sums, zeros for padding. */
template <class E>
__device__ void put_rows(const rp_rows_out &to, int64_t batch, int head, int64_t first, int in_use,
                         int there, int column, int columns, float factor,
                         const float (&sums)[kOwn][kOwnColumns]) {
  for (int a = 0; a < kOwn; a++) {
    const int row = thread_row() + kSide * a;
    if (row >= there) continue;
    E *const line = row_of<E>(to, batch, head, first + row) + column;
#pragma unroll
    for (int c = 0; c < kOwnColumns; c++) {
      if (c < columns) line[c * kSide] = static_cast<E>(row < in_use ? factor * sums[a][c] : 0.0f);
    }
  }
}

template <class E>
__global__ void __launch_bounds__(kThreads) queries_kernel(const __grid_constant__ Backward c) {
  TileMemory &s = *reinterpret_cast<TileMemory *>(dynamic_smem());
  const Call &call = c.call;
  const Tile tile = c.query_tiles[blockIdx.x / static_cast<unsigned>(call.H)];
  Where w =
      place(call, tile.sequence, static_cast<int>(blockIdx.x % static_cast<unsigned>(call.H)));
  const int column = static_cast<int>(blockIdx.y) * kColumns + thread_column();
  const int columns = own_columns(column, call.D);
  const Stretch seen = keys_seen(w.seq, tile.row);
  float sums[kOwn][kOwnColumns] = {};
  for (int j = seen.first; j <= seen.last; j += kTile) {
    at_tile(&w, tile.row, j);
    weigh_tile<E>(c, w, s);
    const Operand<E> k = key_rows<E>(call.k, w);
    for (int key = 0; key < w.keys; key++) {
      const E *const line = k.rows + key * k.stride + column;
#pragma unroll
      for (int a = 0; a < kOwn; a++) {
        add_line(sums[a], s.slopes[thread_row() + kSide * a][key], line, columns);
      }
    }
    add_terms(call, w, s, KIND_KEY, column, columns, sums);
  }
  at_tile(&w, tile.row, 0);
  put_rows<E>(c.dq, w.seq.query_batch, w.head, w.seq.query_row + tile.row, w.rows,
              smaller(kTile, w.seq.query_rows - tile.row), column, columns, c.scale, sums);
}

/* ---- (5) --------------------------------------------------------------------------------- */

template <class E>
__global__ void __launch_bounds__(kThreads) keys_kernel(const __grid_constant__ Backward c) {
  TileMemory &s = *reinterpret_cast<TileMemory *>(dynamic_smem());
  const Call &call = c.call;
  const Tile tile = c.key_tiles[blockIdx.x / static_cast<unsigned>(call.H)];
  Where w =
      place(call, tile.sequence, static_cast<int>(blockIdx.x % static_cast<unsigned>(call.H)));
  const int column = static_cast<int>(blockIdx.y) * kColumns + thread_column();
  const int columns = own_columns(column, call.D), value_columns = own_columns(column, call.Dv);
  const Stretch seen = queries_that_see(w.seq, tile.row);
  float dk[kOwn][kOwnColumns] = {}, dv[kOwn][kOwnColumns] = {};
  for (int i = seen.first; i <= seen.last; i += kTile) {
    at_tile(&w, i, tile.row);
    weigh_tile<E>(c, w, s);
    const Operand<E> q = query_rows<E>(call.q, w), dz = query_rows<E>(c.dout, w);
    for (int query = 0; query < w.rows; query++) {
      const E *const q_line = q.rows + query * q.stride + column;
      const E *const dz_line = dz.rows + query * dz.stride + column;
#pragma unroll
      for (int a = 0; a < kOwn; a++) {
        const int key = thread_row() + kSide * a;
        add_line(dk[a], s.slopes[query][key], q_line, columns);
        add_line(dv[a], s.weights[query][key], dz_line, value_columns);
      }
    }
    add_terms(call, w, s, KIND_QUERY, column, columns, dk);
  }
  at_tile(&w, 0, tile.row);
  const int there = smaller(kTile, w.seq.key_rows - tile.row);
  const int64_t row = w.seq.key_row + tile.row;
  put_rows<E>(c.dk, w.seq.key_batch, w.head, row, w.keys, there, column, columns, c.scale, dk);
  put_rows<E>(c.dv, w.seq.key_batch, w.head, row, w.keys, there, column, value_columns, 1.0f, dv);
}

/* ---- (6) --------------------------------------------------------------------------------- */

template <class E>
__global__ void __launch_bounds__(kThreads)
    tables_kernel(const __grid_constant__ Backward c, const __grid_constant__ Sums sums) {
  TileMemory &s = *reinterpret_cast<TileMemory *>(dynamic_smem());
  const Call &call = c.call;
  const int head = static_cast<int>(blockIdx.x) / sums.blocks;
  const int64_t block = static_cast<int>(blockIdx.x) % sums.blocks;
  float *const lines = sums.lines + int64_t{blockIdx.x} * sums.numbers;
  for (int64_t at = threadIdx.x; at < sums.numbers; at += kThreads) lines[at] = 0;
  const int64_t first = block * c.query_tile_count / sums.blocks;
  const int64_t end = (block + 1) * c.query_tile_count / sums.blocks;
  for (int64_t at = first; at < end; at++) {
    const Tile tile = c.query_tiles[at];
    Where w = place(call, tile.sequence, head);
    const Stretch seen = keys_seen(w.seq, tile.row);
    for (int j = seen.first; j <= seen.last; j += kTile) {
      at_tile(&w, tile.row, j);
      weigh_tile<E>(c, w, s); /* waits for the zeros too */
      for (int x = 0; x < sums.count; x++) {
        const Summed &term = sums.terms[x];
        if (!term.gradient) continue;
        if (term.lookup >= 0) {
          sum_lookup<E>(c, w, s, term, call.lookups[term.lookup], lines);
        } else {
          const Band &band = band_of(call, term.kind);
          sum_band<E>(c, w, s, term, band.parts[term.part], band, lines);
        }
      }
      if (sums.bias_gradient) sum_bias(call, w, s, lines + sums.bias_offset);
    }
  }
}

/* ---- the whole ----------------------------------------------------------------------------- */

constexpr int kMeeting = 128; /* rows of the longest table whose products are kept */

int64_t rounded(int64_t bytes) { return (bytes + 255) / 256 * 256; }

int64_t tile_count(const rp_attention *s, bool keys) {
  int64_t count = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const Sequence seq = sequence_of(s, b);
    count += ((keys ? seq.key_rows : seq.query_rows) + kTile - 1) / kTile;
  }
  return count;
}

int64_t rows_bytes(const rp_attention *s) {
  const int64_t queries = s->offsets ? s->offsets[s->B] : s->B * s->N;
  return rounded(queries * s->H * static_cast<int64_t>(sizeof(RowNumbers)));
}

dim3 grid_of(int64_t x, int64_t y) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

template <class E>
rp_status run_rows(const Backward &c) {
  const int64_t blocks = int64_t{c.query_tile_count} * c.call.H;
  if (blocks == 0) return RP_OK;
  CUDA_TRY(launch(rows_kernel<E>, {grid_of(blocks, 1), dim3(kThreads), 0, context().stream}, c));
  return RP_OK;
}

/* dq, dk and dv. */
template <class E>
rp_status run_passes(const Backward &c) {
  cudaStream_t const stream = context().stream;
  const int64_t heads = c.call.H;
  const int widest = c.call.D > c.call.Dv ? c.call.D : c.call.Dv;
  const int64_t query_blocks = c.query_tile_count * heads, key_blocks = c.key_tile_count * heads;
  if (query_blocks > 0) {
    CUDA_TRY(launch(queries_kernel<E>,
                    {grid_of(query_blocks, (c.call.D + kColumns - 1) / kColumns), dim3(kThreads),
                     sizeof(TileMemory), stream},
                    c));
  }
  if (key_blocks > 0) {
    CUDA_TRY(launch(keys_kernel<E>,
                    {grid_of(key_blocks, (widest + kColumns - 1) / kColumns), dim3(kThreads),
                     sizeof(TileMemory), stream},
                    c));
  }
  return RP_OK;
}

/* Products with short tables that are looked up. */
template <class E>
rp_status run_meetings(const Backward &c) {
  for (int x = 0; x < c.call.lookup_count; x++) {
    const bool keys = c.call.lookups[x].kind == KIND_QUERY;
    const int64_t blocks = int64_t{keys ? c.key_tile_count : c.query_tile_count} * c.call.H;
    if (!c.met[x] || blocks == 0) continue;
    CUDA_TRY(
        launch(meet_kernel<E>, {grid_of(blocks, 1), dim3(kThreads), 0, context().stream}, c, x));
  }
  return RP_OK;
}

template <class E>
rp_status run_tables(const Backward &c, const Sums &sums) {
  const int64_t blocks = int64_t{c.call.H} * sums.blocks;
  if (!sums.wanted || blocks == 0 || c.query_tile_count == 0) return RP_OK;
  CUDA_TRY(launch(tables_kernel<E>,
                  {grid_of(blocks, 1), dim3(kThreads), sizeof(TileMemory), context().stream}, c,
                  sums));
  return add_sums(sums, c.call.H, c.scale);
}

int64_t sums_bytes(const rp_attention *s) {
  const Sums sums = sums_of(s, tile_count(s, false), nullptr);
  return rounded(sums_numbers(s, sums) * static_cast<int64_t>(sizeof(float)));
}

int64_t keys_of(const rp_attention *s) {
  const int64_t *const offsets = s->key_offsets ? s->key_offsets : s->offsets;
  return offsets ? offsets[s->B] : s->B * s->M;
}

/* Where the products with short tables lie in the workspace, in the order of Call.lookups; c NULL:
 * how many bytes they are. */
int64_t place_meetings(const rp_attention *s, unsigned char *memory, Backward *c) {
  const int64_t queries = s->offsets ? s->offsets[s->B] : s->B * s->N;
  const Sums sums = sums_of(s, 1, nullptr);
  int64_t used = 0;
  for (int i = 0; i < sums.count; i++) {
    const Summed &term = sums.terms[i];
    if (term.lookup < 0 || term.kind == KIND_BIAS || term.rows > kMeeting) continue;
    if (c) c->met[term.lookup] = reinterpret_cast<float *>(memory + used);
    used += rounded((term.kind == KIND_QUERY ? keys_of(s) : queries) * s->H * term.rows * 4);
  }
  return used;
}

template <class E>
rp_status run(const rp_attention *s, Backward c, const rp_attention_gradients *g,
              unsigned char *workspace) {
  RPI_TRY(run_rows<E>(c));
  if (band_serves(s)) return band_backward(s, c, g, workspace);
  Sums sums = sums_of(s, c.query_tile_count, g);
  sums.lines = reinterpret_cast<float *>(workspace);
  place_meetings(s, workspace + sums_bytes(s), &c);
  c.key_rows = keys_of(s);
  RPI_TRY(run_meetings<E>(c));
  RPI_TRY(run_passes<E>(c));
  return run_tables<E>(c, sums);
}

}  // namespace

rp_status backward_workspace(const rp_attention *s, int64_t *bytes) {
  *bytes = rows_bytes(s) +
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
  int64_t query_tiles = 0, key_tiles = 0;
  RPI_TRY(make_tiles(s, false, kTile, &c.query_tiles, &query_tiles));
  RPI_TRY(make_tiles(s, true, kTile, &c.key_tiles, &key_tiles));
  c.query_tile_count = static_cast<int32_t>(query_tiles);
  c.key_tile_count = static_cast<int32_t>(key_tiles);
  c.out = args->out;
  c.dout = args->dout;
  c.dq = g->q;
  c.dk = g->k;
  c.dv = g->v;
  c.lse = args->lse;
  c.scale = static_cast<float>(s->scale == 0 ? 1 / sqrt(static_cast<double>(s->D)) : s->scale);
  c.rows = static_cast<RowNumbers *>(args->workspace);
  unsigned char *const behind = static_cast<unsigned char *>(args->workspace) + rows_bytes(s);
  return placement.element == RP_BF16 ? run<bf16>(s, c, g, behind) : run<float>(s, c, g, behind);
}

}  // namespace rpc
