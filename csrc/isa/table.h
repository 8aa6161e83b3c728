/* SPDX-License-Identifier: Apache-2.0
 *
 * table.h: every operation compiled for one instruction set, and the table of them.
 *
 * Included once by each file here, after it has named its vectors (RPI_VECTOR_BYTES,
 * RPI_VECTORS) and its table. All operations are static, so the linker cannot put one
 * instruction set's helper into another's code.
 */
#include "base/blas.h"
#include "base/memory.h"
#include "isa/dispatch.h"
#include "isa/host.h"

#define RPI_LANES (RPI_VECTOR_BYTES / RPI_REAL_BYTES)

/* in this order: each builds on those before it */
#include "ops/attention_forward.c"

#include "ops/attention_maps.c"

#include "ops/attention_backward.c"

#include "ops/attention_calls.c"

#include "ops/attend_rows.c"
#include "ops/gemm.c"
#ifdef RPI_TILES
#include "ops/gemm_tiles.c"
#endif
#include "ops/rotate.c"

#include "ops/residual.c"
#include "ops/sums.c"

#include "ops/activation.c"
#include "ops/adam.c"
#include "ops/cross_entropy.c"

#include "ops/choose.c"

#include "ops/embed.c"
#include "ops/norm.c"

#include "ops/linear.c"

#define RPI_TABLE(its_name, by)                                                                    \
  {                                                                                                \
      .name = its_name,                                                                            \
      .host = true,                                                                                \
      .allocate = rpi_host_allocate,                                                               \
      .release = rpi_release,                                                                      \
      .write = rpi_host_copy,                                                                      \
      .read = rpi_host_copy,                                                                       \
      .copy = rpi_host_copy,                                                                       \
      .post = rpi_host_post,                                                                       \
      .collect = rpi_host_collect,                                                                 \
      .arrived = rpi_host_arrived,                                                                 \
      .discard = rpi_release,                                                                      \
      .round_weights = round_weights,                                                              \
      .gemm = gemm##by,                                                                            \
      .linear_backward = linear_backward##by,                                                      \
      .attention_workspace = attention_workspace##by,                                              \
      .attention_forward = attention_forward##by,                                                  \
      .attention_backward = attention_backward##by,                                                \
      .attention_map = attention_map,                                                              \
      .rotate = rotate,                                                                            \
      .attend_rows = attend_rows,                                                                  \
      .choose = choose,                                                                            \
      .mix = mix,                                                                                  \
      .scatter = scatter,                                                                          \
      .embed = embed,                                                                              \
      .embed_backward = embed_backward,                                                            \
      .norm = norm,                                                                                \
      .norm_backward = norm_backward,                                                              \
      .activation = activation,                                                                    \
      .activation_backward = activation_backward,                                                  \
      .cross_entropy = cross_entropy,                                                              \
      .losses = losses,                                                                            \
      .column_sums = column_sums,                                                                  \
      .square_sum = square_sum,                                                                    \
      .decide = rpi_host_decide,                                                                   \
      .blame = blame,                                                                              \
      .adam = adam,                                                                                \
      .zero = zero,                                                                                \
  }

const rp_ops RPI_OPS = RPI_TABLE(RPI_OPS_NAME, );

#ifdef RPI_TILES
const rp_ops rpi_ops_amx = RPI_TABLE("amx", _tiles);
#endif
