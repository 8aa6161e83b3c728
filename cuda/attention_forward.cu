/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_forward.cu: relation-aware flash attention, forward.
 *
 * A block takes a tile of queries of one sequence and head, a warp 16 or 32 of them, and walks the
 * keys they may see in tiles: scores, maximum, weights, weighted values, as flash attention does.
 * What relations add:
 *
 *   bands     related[i][c] = (q_i + position_bias) . wK[c] is computed once for a block,
 *             where the band has few columns. A tile of keys wholly before or behind it adds one
 *             number a row; across it products begin with the cell of their distance and, where
 *             values have relations too, scores put themselves in its place: a cell inside the band
 *             belongs to one key. At the end the cells become weights, those behind the band are a
 *             sum that was kept in registers, those before it what is left of the sum of all, and
 *             out += weights . wV is one small product.
 *             A long band is met tile by tile: the same for the diagonals of a tile (general).
 *
 *             Of sequences that are one tile see forward_single.h.
 *
 *   bias      a number for every diagonal of a tile, beside its keys and values
 *
 *   lookups   (general) of a short table queries meet all rows at once, and weights are summed by
 *             row; rows of a longer one are taken pair by pair
 *
 * Every sum has one order: the same bits every time.
 */
#include "forward_single.h"

namespace rpc {
namespace {

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    forward_kernel(const __grid_constant__ Forward forward) {
  const Tiles &tiles = forward.tiles;
  Deal deal = deal_of(tiles, forward.call.H, forward.blocks);
  if constexpr (S::kSingle) {
    SingleForward<S> block(forward, deal.head);
    while (deal.tile() < tiles.count) {
      const Tile tile = tiles.list[deal.tile()];
      deal.next(forward.blocks);
      block.run(tile, deal.tile() < tiles.count ? tiles.list + deal.tile() : nullptr);
    }
  } else {
    ForwardBlock<S> block(forward, deal.head);
    block.run(tiles.list[deal.own]);
  }
}

/* Of a head: a block for every tile, or those that the GPU has at once where they go on. */
template <class S>
int32_t blocks_of(const Forward &f) {
  if (!S::kSingle) return f.tiles.count;
  const int64_t fit = (context().shared_bytes + 1024) / (f.shared_bytes + 1024);
  const int64_t all = context().multiprocessors * (fit < S::kBlocks ? fit : S::kBlocks);
  const int64_t heads = all / f.call.H;
  return static_cast<int32_t>(heads < 1 ? 1 : heads < f.tiles.count ? heads : f.tiles.count);
}

template <class S>
rp_status launch_shape(Forward *f, const rp_attention *shape) {
  const bool fits = lay_out<S>(f, context().shared_bytes / (S::kTall ? S::kBlocks : 1));
  if constexpr (S::kTall || S::kShort) {
    if (f->tiled || !fits) {
      return launch_shape<Shape<Operand<S>, typename S::Storage, S::kWidth, false>>(f, shape);
    }
  } else if constexpr (!S::kGeneral) {
    if (f->tiled || !fits) { /* a band for which there is no room */
      constexpr int kWidth = S::kWidth < 64 ? 64 : S::kWidth;
      return launch_shape<Shape<Operand<S>, typename S::Storage, kWidth, true>>(f, shape);
    }
  }
  if (!fits) {
    return fail(RP_ERROR_DEVICE,
                "attention: D=%d, Dv=%d with these terms needs %lld bytes of shared memory, more "
                "than this GPU has",
                f->call.D, f->call.Dv, static_cast<long long>(f->shared_bytes));
  }
  RPI_TRY(make_tiles(shape, false, S::kQueries, &f->tiles));
  if (f->tiles.count == 0 || shape->H == 0) return RP_OK;
  f->blocks = blocks_of<S>(*f);
  const int64_t blocks = f->blocks * shape->H;
  const Launch grid = {dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads),
                       static_cast<size_t>(f->shared_bytes), context().stream};
  CUDA_TRY(launch(forward_kernel<S>, grid, *f));
  return RP_OK;
}

/* Does a call need more than plain attention, short bands and dropout? */
bool is_general(const Forward &f) {
  const Call &call = f.call;
  return call.lookup_count > 0 || call.query.count > 0 || call.softcap != 0 || call.mask ||
         (f.banded && int64_t{f.high} - f.low + 1 > kShortBand);
}

/* Single where a block can have all of a sequence; short where that halves the pairs of tiles; tall
 * where sequences are long enough for 128 queries, and many enough to fill the GPU with them. */
Size size_of(const Forward &f, const rp_attention *shape) {
  int64_t tiles = 0, tall = 0, pairs = 0, longest = 0;
  for (int64_t b = 0; b < shape->B; b++) {
    const Sequence seq = sequence_of(shape, b);
    const int64_t queries = seq.query_rows, keys = seq.keys;
    tiles += (queries + 63) / 64;
    tall += (queries + 127) / 128;
    pairs += (queries + 31) / 32 * ((keys + 31) / 32);
    longest = rpi_max(longest, rpi_max(queries, keys));
  }
  const bool held = !f.banded || int64_t{f.high} - f.low < kSingleBand;
  if (longest <= 32 && held && !f.call.position_bias) return SIZE_SINGLE;
  if (longest <= 64 && pairs <= 2 * tiles) return SIZE_SHORT;
  const bool fills = tall * shape->H >= 2 * context().multiprocessors;
  return fills && 16 * tall <= 9 * tiles ? SIZE_TALL : SIZE_TILE;
}

template <class Operand, class Storage>
rp_status launch_width(Forward *f, const rp_attention *shape, bool general) {
  const int64_t width = rpi_max(shape->D, shape->Dv);
  if constexpr (sizeof(Operand) == 2) {
    if (!general && width <= 32) {
      return launch_shape<Shape<Operand, Storage, 32, false>>(f, shape);
    }
    if (!general && width <= 64) {
      const Size size = f->aligned ? size_of(*f, shape) : SIZE_TILE;
      if (size == SIZE_TALL) {
        return launch_shape<Shape<Operand, Storage, 64, false, SIZE_TALL>>(f, shape);
      }
      if (size == SIZE_SINGLE) {
        return launch_shape<Shape<Operand, Storage, 64, false, SIZE_SINGLE>>(f, shape);
      }
      if (size == SIZE_SHORT) {
        return launch_shape<Shape<Operand, Storage, 64, false, SIZE_SHORT>>(f, shape);
      }
      return launch_shape<Shape<Operand, Storage, 64, false>>(f, shape);
    }
    if (!general && width <= 128) {
      return launch_shape<Shape<Operand, Storage, 128, false>>(f, shape);
    }
  }
  if (width <= 64) return launch_shape<Shape<Operand, Storage, 64, true>>(f, shape);
  if (width <= 128) return launch_shape<Shape<Operand, Storage, 128, true>>(f, shape);
  return launch_shape<Shape<Operand, Storage, 256, true>>(f, shape);
}

template <class Storage>
void find_aligned(const rpi_attention_args *args, Forward *f) {
  const rp_attention *const s = args->shape;
  const int64_t element = static_cast<int64_t>(sizeof(Storage));
  const int64_t step = 8; /* columns are read eight at a time, whatever they are stored as */
  f->aligned = s->D % step == 0 && s->Dv % step == 0 && rows_aligned(args->q, s->D, element) &&
               rows_aligned(args->k, s->D, element) && rows_aligned(args->v, s->Dv, element);
  f->out_aligned = rows_aligned(args->out, s->Dv, element);
}

}  // namespace

rp_status attention_workspace(const rp_attention *shape, int, int64_t *forward_bytes,
                              int64_t *backward_bytes) {
  RPI_TRY(check_sizes(shape));
  if (forward_bytes) *forward_bytes = 0;
  return backward_bytes ? backward_workspace(shape, backward_bytes) : RP_OK;
}

rp_status attention_forward(const rpi_attention_args *args) {
  const rp_attention *const shape = args->shape;
  const rp_placement placement = placement_of(shape);
  const OnStream on(placement.stream);
  RPI_TRY(on.status());
  Forward f = {};
  RPI_TRY(read_call(shape, args->q, args->k, args->v, &f.call));
  f.out = args->out;
  f.ones = args->ones;
  f.lse = args->lse;
  read_band(&f);
  const bool general = is_general(f);
  if (placement.element == RP_BF16) {
    find_aligned<bf16>(args, &f);
    return launch_width<bf16, bf16>(&f, shape, general);
  }
  find_aligned<float>(args, &f);
  if (placement.precision == RP_BF16) return launch_width<bf16, float>(&f, shape, general);
  return launch_width<float, float>(&f, shape, general);
}

}  // namespace rpc
