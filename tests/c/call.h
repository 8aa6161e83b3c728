/* SPDX-License-Identifier: Apache-2.0
 *
 * call.h: one valid call of attention, for tests that spoil one thing of it.
 *
 *   int main(void) {
 *     const int code = call_begin();
 *     if (code != 0) return code;
 *     REFUSED(RP_ERROR_SHAPE, "attention: B=-1", a.B = -1);
 *     return call_end();
 *   }
 */
#ifndef CALL_H
#define CALL_H

#include "base/memory.h"
#include "check.h"

enum { B = 2, H = 3, N = 5, M = 7, D = 4, DV = 6, LEFT = 2, RIGHT = 1, T = LEFT + 1 + RIGHT };
#define BEYOND ((INT64_C(1) << 40) + 1) /* sizes end at 2^40 */
#define HUGE_STRIDE (INT64_C(1) << 62)

typedef struct call {
  rp_attention a;
  rp_rows q, k, v, out_in, dout;
  rp_rows_out out;
  rp_attention_gradients g;
  rp_real *lse;
  void *workspace;
  int64_t workspace_bytes;
} call;

static rp_real q_data[B * H * N * D], k_data[B * H * M * D], v_data[B * H * M * DV];
static rp_real out_data[B * H * N * DV], dout_data[B * H * N * DV], lse_data[B * H * N];
static rp_real dq_data[B * H * N * D], dk_data[B * H * M * D], dv_data[B * H * M * DV];
static rp_real key_table[H * T * D], value_table[H * T * DV];
static void *workspace;
static int64_t forward_bytes, backward_bytes, most_bytes;

static inline rp_rows rows(const rp_real *data, int64_t count, int64_t width) {
  return (rp_rows){data, H * count * width, count * width, width};
}
static inline rp_rows_out rows_out(rp_real *data, int64_t count, int64_t width) {
  return (rp_rows_out){data, H * count * width, count * width, width};
}

static inline call valid(void) {
  call c = {.a = rp_attention_default(),
            .q = rows(q_data, N, D),
            .k = rows(k_data, M, D),
            .v = rows(v_data, M, DV),
            .out = rows_out(out_data, N, DV),
            .out_in = rows(out_data, N, DV),
            .dout = rows(dout_data, N, DV),
            .g = {.q = rows_out(dq_data, N, D),
                  .k = rows_out(dk_data, M, D),
                  .v = rows_out(dv_data, M, DV)},
            .lse = lse_data,
            .workspace = workspace,
            .workspace_bytes = most_bytes};
  c.a.B = B;
  c.a.H = H;
  c.a.N = N;
  c.a.M = M;
  c.a.D = D;
  c.a.Dv = DV;
  c.a.key[0] = (rp_relation){
      .table = key_table, .head_stride = T * D, .row_stride = D, .left = LEFT, .right = RIGHT};
  c.a.value[0] = (rp_relation){.table = value_table,
                               .row_stride = DV,
                               .rows = T,
                               .left = LEFT,
                               .right = RIGHT,
                               .beyond = RP_BEYOND_NONE};
  return c;
}

static inline rp_status forward(const call *c) {
  return rp_attention_forward(&c->a, c->q, c->k, c->v, c->out, c->lse, c->workspace,
                              c->workspace_bytes);
}

static inline rp_status backward(const call *c) {
  return rp_attention_backward(&c->a, c->q, c->k, c->v, c->out_in, c->lse, c->dout, &c->g,
                               c->workspace, c->workspace_bytes);
}

/* A shape that every function must refuse. */
static inline void refused(const rp_attention *a, rp_status status, const char *sentence) {
  call c = valid();
  c.a = *a;
  int64_t f = -7, b = -7;
  CHECK_INT(rp_attention_workspace(a, &f, &b), status);
  CHECK_TEXT(rp_last_error(), sentence);
  CHECK(f == -7 && b == -7);
  CHECK_INT(forward(&c), status);
  CHECK_TEXT(rp_last_error(), sentence);
  CHECK_INT(backward(&c), status);
  CHECK_TEXT(rp_last_error(), sentence);
}

/* A shape that every function must take, with a workspace of the size they ask for. */
static inline void taken(const rp_attention *a) {
  call c = valid();
  c.a = *a;
  int64_t f = -1, b = -1;
  if (!CHECK_INT(rp_attention_workspace(a, &f, &b), RP_OK)) {
    printf(": %s", rp_last_error());
    return;
  }
  void *const memory = rpi_allocate((size_t)(f > b ? f : b));
  if (!CHECK(memory != NULL)) return;
  c.workspace = memory;
  c.workspace_bytes = f;
  if (!CHECK_INT(forward(&c), RP_OK)) printf(": %s", rp_last_error());
  c.workspace_bytes = b;
  if (!CHECK_INT(backward(&c), RP_OK)) printf(": %s", rp_last_error());
  rpi_release(memory);
}

/* Spoils fields of a valid shape; changes them to something else that is valid. */
#define REFUSED(status, sentence, ...)                                                             \
  do {                                                                                             \
    rp_attention a = valid().a;                                                                    \
    __VA_ARGS__;                                                                                   \
    refused(&a, (status), (sentence));                                                             \
  } while (0)
#define TAKEN(...)                                                                                 \
  do {                                                                                             \
    rp_attention a = valid().a;                                                                    \
    __VA_ARGS__;                                                                                   \
    taken(&a);                                                                                     \
  } while (0)

/* Spoils a valid call of one pass. */
#define PASS_REFUSED(pass, status, sentence, ...)                                                  \
  do {                                                                                             \
    call c = valid();                                                                              \
    __VA_ARGS__;                                                                                   \
    CHECK_INT(pass(&c), (status));                                                                 \
    CHECK_TEXT(rp_last_error(), (sentence));                                                       \
  } while (0)
#define FORWARD_REFUSED(status, sentence, ...) PASS_REFUSED(forward, status, sentence, __VA_ARGS__)
#define BACKWARD_REFUSED(status, sentence, ...)                                                    \
  PASS_REFUSED(backward, status, sentence, __VA_ARGS__)
#define BOTH_REFUSED(status, sentence, ...)                                                        \
  FORWARD_REFUSED(status, sentence, __VA_ARGS__);                                                  \
  BACKWARD_REFUSED(status, sentence, __VA_ARGS__)

/* Numbers, and a workspace that is large enough with two threads. Not 0: the exit code. */
static inline int call_begin(void) {
  for (int i = 0; i < B * H * N * D; i++) q_data[i] = (rp_real)(i % 5) - 2;
  for (int i = 0; i < B * H * M * D; i++) k_data[i] = (rp_real)(i % 7) / 3;
  for (int i = 0; i < B * H * M * DV; i++) v_data[i] = (rp_real)(i % 3);
  CHECK_INT(rp_set_threads(2), RP_OK);
  const call c = valid();
  const rp_status status = rp_attention_workspace(&c.a, &forward_bytes, &backward_bytes);
  if (status != RP_OK && strstr(rp_last_error(), "cannot run on this machine") != NULL) {
    printf("%s\n", rp_last_error()); /* asked for by RELPOS_ISA: nothing to test */
    return 77;
  }
  if (!CHECK_INT(status, RP_OK)) return 1;
  most_bytes = 64 << 20; /* for whatever a test makes of the call */
  workspace = rpi_allocate((size_t)most_bytes);
  return CHECK(workspace != NULL) ? 0 : 1;
}

static inline int call_end(void) {
  rpi_release(workspace);
  rp_set_threads(0);
  return check_report();
}

#endif
