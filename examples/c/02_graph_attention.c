/* SPDX-License-Identifier: Apache-2.0
 *
 * 02_graph_attention.c: attention over a labelled, directed graph, and learning with it.
 *
 *   cc 02_graph_attention.c $(pkg-config --cflags --libs relpos) -lm -o graph && ./graph
 *
 * The graph is a family. Between two people there is a label, the row of a relation
 * table, or none:
 *
 *              Ada                label[i][j]: what j is to i
 *             /   \               0 parent, 1 child, 2 sibling, -1 nothing
 *          Ben     Cleo
 *         /   \       \           label[Dan][Ben] = 0, label[Ben][Dan] = 1
 *       Dan    Eve     Finn
 *
 * Everybody shall look at their parent. The queries are all alike and the keys are zero:
 * only the key table, one vector for each relation, can tell people apart, and it starts
 * from zeros. The values are the identity, so the output's first columns are the attention
 * map; the value table adds a one for each relation, so its last columns say how much
 * came over which relation. Twenty steps of gradient descent do the rest.
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

enum { NONE = -1, PARENT, CHILD, SIBLING, RELATIONS };
enum { N = 6, D = 4, WIDTH = N + RELATIONS, STEPS = 20 };

static const char *const names[N] = {"Ada", "Ben", "Cleo", "Dan", "Eve", "Finn"};
static const int parent[N] = {NONE, 0, 0, 1, 1, 2};

static int8_t label[N][N];
static float q[N][D], keys[N][D], values[N][WIDTH], out[N][WIDTH], lse[N];
static float key_table[RELATIONS][D], value_table[RELATIONS][WIDTH];
static float dq[N][D], dk[N][D], dv[N][WIDTH], dout[N][WIDTH];
static float dkey_table[RELATIONS][D], dvalue_table[RELATIONS][WIDTH];

static int8_t relation(int i, int j) {
  if (parent[i] == j) return PARENT;
  if (parent[j] == i) return CHILD;
  return i != j && parent[i] != NONE && parent[i] == parent[j] ? SIBLING : NONE;
}

static rp_rows rows(float (*data)[D]) { return (rp_rows){.data = data[0], .row_stride = D}; }
static rp_rows wide(float (*data)[WIDTH]) {
  return (rp_rows){.data = data[0], .row_stride = WIDTH};
}
static rp_rows_out rows_out(float (*data)[D]) {
  return (rp_rows_out){.data = data[0], .row_stride = D};
}
static rp_rows_out wide_out(float (*data)[WIDTH]) {
  return (rp_rows_out){.data = data[0], .row_stride = WIDTH};
}

/* What the parents do not get. dout is its gradient: -1 at each parent. */
static double loss(void) {
  double sum = 0;
  for (int i = 0; i < N; i++) {
    if (parent[i] != NONE) sum += 1 - (double)out[i][parent[i]];
  }
  return sum;
}

static void print_map(void) {
  printf("          ");
  for (int j = 0; j < N; j++) printf("%6s", names[j]);
  printf("  parent child sibling\n");
  for (int i = 0; i < N; i++) {
    printf("  %-8s", names[i]);
    for (int c = 0; c < WIDTH; c++) printf("%s%6.2f", c == N ? "  " : "", (double)out[i][c]);
    printf("\n");
  }
}

int main(void) {
  for (int i = 0; i < N; i++) {
    for (int j = 0; j < N; j++) label[i][j] = relation(i, j);
    for (int c = 0; c < D; c++) q[i][c] = 1;
    values[i][i] = 1;
    if (parent[i] != NONE) dout[i][parent[i]] = -1;
  }
  for (int r = 0; r < RELATIONS; r++) value_table[r][N + r] = 1;

  /* Two terms over one matrix of labels, shared by all sequences and heads (strides 0). */
  const rp_relation graph = {.map = RP_MAP_LABEL,
                             .rows = RELATIONS,
                             .labels = label,
                             .label_bytes = 1,
                             .label_row_stride = N};
  rp_attention a = rp_attention_default();
  a.B = a.H = 1;
  a.N = a.M = N;
  a.D = D;
  a.Dv = WIDTH;
  a.key[0] = a.value[0] = graph;
  a.key[0].table = key_table[0];
  a.key[0].row_stride = D;
  a.value[0].table = value_table[0];
  a.value[0].row_stride = WIDTH;

  int64_t forward_bytes, backward_bytes;
  CHECK(rp_attention_workspace(&a, &forward_bytes, &backward_bytes));
  const int64_t most = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
  void *const workspace = aligned_alloc(64, (size_t)(most + 63) / 64 * 64);
  if (workspace == NULL) return 1;

  const float rate = 1;
  const rp_attention_gradients gradients = {.q = rows_out(dq),
                                            .k = rows_out(dk),
                                            .v = wide_out(dv),
                                            .key = {dkey_table[0]},
                                            .value = {dvalue_table[0]}};
  double before = 0, promised = 0, kept = 0;
  for (int step = 0; step <= STEPS; step++) {
    CHECK(rp_attention_forward(&a, rows(q), rows(keys), wide(values), wide_out(out), lse, workspace,
                               most));
    if (step == 1) kept = before - loss();
    before = loss();
    if (step % STEPS == 0) {
      printf("after %d steps, the loss is %.3f; who looks at whom, and over which relation:\n",
             step, before);
      print_map();
    }
    if (step == STEPS) break;
    memset(dkey_table, 0, sizeof dkey_table); /* gradients of tables are added to */
    memset(dvalue_table, 0, sizeof dvalue_table);
    CHECK(rp_attention_backward(&a, rows(q), rows(keys), wide(values), wide(out), lse, wide(dout),
                                &gradients, workspace, most));
    /* The first step is a small one, to compare it with what the gradient promises. */
    const float size = step == 0 ? 0.01f : rate;
    for (int r = 0; r < RELATIONS; r++) {
      for (int c = 0; c < D; c++) {
        if (step == 0) promised += (double)(size * dkey_table[r][c] * dkey_table[r][c]);
        key_table[r][c] -= size * dkey_table[r][c];
      }
    }
  }
  free(workspace);
  printf("the first step lowered the loss by %.6f, the gradient says %.6f\n", kept, promised);

  /* Rows sum to one; what came over a relation is what went to such people; the parents
   * get nearly all, and the value table's gradient says so: row PARENT, minus each share. */
  int good = fabs(kept - promised) < 0.02 * promised && before < 0.1;
  double shares = 0;
  for (int i = 0; i < N; i++) {
    double sum = 0, by_relation[RELATIONS] = {0};
    for (int j = 0; j < N; j++) {
      sum += (double)out[i][j];
      if (label[i][j] != NONE) by_relation[label[i][j]] += (double)out[i][j];
    }
    good = good && fabs(sum - 1) < 1e-5;
    for (int r = 0; r < RELATIONS; r++) {
      good = good && fabs(by_relation[r] - (double)out[i][N + r]) < 1e-5;
    }
  }
  for (int c = 0; c < N; c++) shares -= (double)dvalue_table[PARENT][c];
  good = good && shares > N - 1 - 0.3 && shares < N - 1;
  printf("%s\n", good ? "all as it should be" : "WRONG");
  return good ? 0 : 1;
}
