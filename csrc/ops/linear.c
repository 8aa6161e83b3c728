/* SPDX-License-Identifier: Apache-2.0
 *
 * linear.c: the way back of a linear layer, and weights in bf16 for its way there.
 */
#include <assert.h>

#include "base/threads.h"
#include "ops/gemm_words.h"
#include "ops/linear.h"

/* ---- weights as words ---------------------------------------------------- */

#if RPI_REAL_BYTES == 4

#define ROUNDED_ROWS 64 /* of a task */

static void round_task(void *context, int64_t task, int worker) {
  (void)worker;
  const rpi_rounding *const r = context;
  const int64_t row = task * ROUNDED_ROWS, stride = rpi_operand_stride(r->in, false) / 2;
  const gemm_words_fn by = gemm_words[rpi_bf16_native() ? RPI_NATIVE : RPI_TWIN][GEMM_WORD_ROWS];
  by(r->weight + row * r->in, r->in, rpi_min(ROUNDED_ROWS, r->out - row), r->in,
     (real *)r->to + row * stride, stride);
}

/* Biases stay where they are: a host adds them in float32. */
static rp_status round_weights(const rpi_rounding *list, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    rpi_rounding r = list[i];
    const int64_t tasks = r.to != NULL ? rpi_divide_up(r.out, ROUNDED_ROWS) : 0;
    rpi_parallel_for(tasks, rpi_threads_get(), round_task, &r);
  }
  return RP_OK;
}

#else

static rp_status round_weights(const rpi_rounding *list, int64_t count) {
  (void)list, (void)count;
  assert(!"double is never rounded");
  return RP_OK;
}

#endif

/* ---- the way back -------------------------------------------------------- */

static rp_status linear_backward_by(const rpi_linear_backward_args *args,
                                    rp_status (*product)(const rpi_gemm_args *args)) {
  assert(args->dy_element == RP_F32 && args->dx_element == RP_F32);
  assert(!args->forward.kept && !args->forward.rounded);
  const rpi_linear *const l = &args->forward;
  const rpi_gemm_args to_weight =
      rpi_linear_to_weight(l, args->dy, args->dy_stride, args->dweight, args->precision);
  RPI_TRY(product(&to_weight));
  if (args->dbias) {
    const rpi_column_sums_args sums = {.rows = l->rows,
                                       .columns = l->out,
                                       .x = args->dy,
                                       .x_stride = args->dy_stride,
                                       .sum = args->dbias};
    RPI_TRY(column_sums(&sums));
  }
  if (!args->dx) return RP_OK;
  const rpi_gemm_args to_input = rpi_linear_to_input(l, args->dy, args->dy_stride, args->dx, RP_F32,
                                                     args->add, args->precision);
  return product(&to_input);
}

static rp_status linear_backward(const rpi_linear_backward_args *args) {
  return linear_backward_by(args, gemm);
}

#ifdef RPI_TILES
static rp_status linear_backward_tiles(const rpi_linear_backward_args *args) {
  return linear_backward_by(args, gemm_tiles);
}
#endif
