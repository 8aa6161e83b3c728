/* SPDX-License-Identifier: Apache-2.0
 *
 * 01_attention.c: relation-aware attention from C, forward and backward.
 *
 *   cc 01_attention.c $(pkg-config --cflags --libs relpos) -lm -o attention && ./attention
 *
 * One head, eight queries and keys, clip distance 2. All keys are zero, so content
 * says nothing and the key table alone decides who looks where: its row for "one to
 * the left" is large. The values are the identity, so the output *is* the attention
 * map. Then one step along the gradient of the table, checked against a difference.
 */
#include <math.h>
#include <relpos/relpos.h>
#include <stdio.h>
#include <stdlib.h>

/* Calls the function; on failure says where and why, and ends the program. */
#define CHECK(call)                                                                                \
  do {                                                                                             \
    const rp_status status = (call);                                                               \
    if (status != RP_OK) {                                                                         \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, rp_status_name(status),               \
              rp_last_error());                                                                    \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

enum { N = 8, D = 4, K = 2, T = 2 * K + 1 };

static float q[N * D], keys[N * D], values[N * N], table[T * D], out[N * N], lse[N];
static float dq[N * D], dk[N * D], dv[N * N], dtable[T * D];

static rp_rows rows(const float *data, int width) {
  return (rp_rows){.data = data, .row_stride = width};
}
static rp_rows_out rows_out(float *data, int width) {
  return (rp_rows_out){.data = data, .row_stride = width};
}

/* The loss is linear in the map: this is its gradient. */
static float wish(int i, int j) { return (float)(i - j); }

static double loss(void) {
  double sum = 0;
  for (int i = 0; i < N; i++) {
    for (int j = 0; j < N; j++) sum += (double)(out[i * N + j] * wish(i, j));
  }
  return sum;
}

int main(void) {
  for (int i = 0; i < N * D; i++) q[i] = 1;
  for (int i = 0; i < N; i++) values[i * N + i] = 1;
  for (int c = 0; c < D; c++) table[(K - 1) * D + c] = 1.5f; /* row K + d belongs to j - i = d */

  /* What differs from the defaults: shapes, the causal mask, one relation term. */
  rp_attention a = rp_attention_default();
  a.B = a.H = 1;
  a.N = a.M = N;
  a.D = D;
  a.Dv = N;
  a.causal = 1;
  a.key[0] = (rp_relation){.table = table, .row_stride = D, .left = K, .right = K};

  /* The library allocates nothing: it says how much it needs. */
  int64_t forward_bytes, backward_bytes;
  CHECK(rp_attention_workspace(&a, &forward_bytes, &backward_bytes));
  const int64_t most = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
  void *const workspace = aligned_alloc(64, (size_t)(most + 63) / 64 * 64);
  if (workspace == NULL) return 1;

  CHECK(rp_attention_forward(&a, rows(q, D), rows(keys, D), rows(values, N), rows_out(out, N), lse,
                             workspace, most));
  printf("the attention map: every query looks one to the left\n");
  double worst = 0;
  for (int i = 0; i < N; i++) {
    double sum = 0;
    for (int j = 0; j < N; j++) {
      printf(" %4.2f", (double)out[i * N + j]);
      sum += (double)out[i * N + j];
    }
    printf("   row sum %.6f\n", sum);
    worst = fmax(worst, fabs(sum - 1));
  }

  float dout[N * N];
  for (int i = 0; i < N; i++) {
    for (int j = 0; j < N; j++) dout[i * N + j] = wish(i, j);
  }
  const rp_attention_gradients gradients = {.q = rows_out(dq, D),
                                            .k = rows_out(dk, D),
                                            .v = rows_out(dv, N),
                                            .key = {dtable}}; /* added to: zeros here */
  CHECK(rp_attention_backward(&a, rows(q, D), rows(keys, D), rows(values, N), rows(out, N), lse,
                              rows(dout, N), &gradients, workspace, most));

  /* Both ways along the gradient: half the difference is the slope times the step. */
  const float step = 0.05f;
  double expected = 0, side[2];
  for (int i = 0; i < T * D; i++) expected += (double)(step * dtable[i] * dtable[i]);
  for (int back = 0; back < 2; back++) {
    float moved[T * D];
    for (int i = 0; i < T * D; i++) moved[i] = table[i] + (back ? -step : step) * dtable[i];
    a.key[0].table = moved;
    CHECK(rp_attention_forward(&a, rows(q, D), rows(keys, D), rows(values, N), rows_out(out, N),
                               NULL, workspace, most));
    side[back] = loss();
  }
  const double difference = (side[0] - side[1]) / 2;
  printf("a step along the table's gradient: the loss changes by %.6f, the gradient says %.6f\n",
         difference, expected);
  free(workspace);

  const int good = worst < 1e-5 && fabs(difference - expected) < 1e-2 * expected;
  printf("%s\n", good ? "all as it should be" : "WRONG");
  return good ? 0 : 1;
}
