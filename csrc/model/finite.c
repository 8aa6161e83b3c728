/* SPDX-License-Identifier: Apache-2.0
 *
 * finite.c: where the first number that is not finite arose, as a code and as a name.
 */
#include <math.h>
#include <stdio.h>

#include "model/model.h"

/* Codes fall from here in the order of a pass; 1 is what comes last, the output projection. */
#define FIRST ((int32_t)1 << 22)
#define OUTPUT 1

static int32_t code_of(int stack, int64_t s, bool norm) {
  return FIRST - (int32_t)((int64_t)stack << 20 | s << 1 | (norm ? 1 : 0));
}

rpi_note rpi_note_of(const rpi_run *run, int64_t s) {
  rp_model *const m = run->model;
  const bool asked = run->labels && !run->again && !m->ops->host;
  return (rpi_note){.at = asked ? &m->ledger->note : NULL,
                    .in = code_of(run->stack, s, false),
                    .out = code_of(run->stack, s, true)};
}

rp_status rpi_hunt(const rpi_run *run, const real *x, int64_t s, bool norm) {
  const rp_model *const m = run->model;
  if (!run->hunt || *run->hunt != 0) return RP_OK;
  const int64_t count = run->side[run->stack].rows * m->config.width;
  double sum = 0; /* memory of the table is the host's */
  RPI_TRY(m->ops->square_sum(x, count, m->scratch.squares, &sum));
  if (!isfinite(sum)) *run->hunt = code_of(run->stack, s, norm);
  return RP_OK;
}

/* Forward once more, with a look at every stream as it is made: streams may share memory, so that
 * looking at what is left would not tell. */
rp_status rpi_find_bad(const rpi_run *run, int64_t *code) {
  const rp_model *const m = run->model;
  rpi_run hunting = *run;
  *code = 0;
  hunting.hunt = code;
  if (m->stack[RPI_ENCODER].parts != 0) RPI_TRY(rpi_stack_forward(&hunting, RPI_ENCODER));
  if (m->stack[RPI_DECODER].parts != 0) RPI_TRY(rpi_stack_forward(&hunting, RPI_DECODER));
  if (*code == 0) *code = OUTPUT;
  return RP_OK;
}

/* A stream bears the name of the sublayer that wrote it, a norm that of its own. */
void rpi_bad_name(const rp_model *m, int64_t code, char *name) {
  static const char *const stacks[] = {"encoder", "decoder"};
  static const char *const parts[] = {"attention", "cross", "feed_forward"};
  name[0] = '\0';
  if (code == OUTPUT) snprintf(name, RPI_BAD_NAME, "output");
  if (code <= OUTPUT) return;
  const int64_t at = FIRST - code;
  const int stack = (int)(at >> 20), each = m->stack[stack].parts;
  const int64_t s = (at & (((int64_t)1 << 20) - 1)) >> 1;
  const bool norm = (at & 1) != 0, before = m->config.norm == RP_NORM_PRE;
  const int64_t own = norm && before ? s : s - 1; /* sublayer */
  if (own < 0) {
    snprintf(name, RPI_BAD_NAME, "%s.embedding", stacks[stack]);
  } else if (own == rpi_stack_of(&m->config, stack)->layers * each) {
    snprintf(name, RPI_BAD_NAME, "%s.norm", stacks[stack]);
  } else {
    snprintf(name, RPI_BAD_NAME, "%s.%lld.%s%s", stacks[stack], (rpi_wide)(own / each),
             parts[rpi_part_of(each, own)], norm ? ".norm" : "");
  }
}
