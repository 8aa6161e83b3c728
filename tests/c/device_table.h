/* SPDX-License-Identifier: Apache-2.0
 *
 * device_table.h: the table of a device, for tests that keep their arrays on the host. Every call
 * copies what the entry reads and writes to the device, in exactly as much memory as it needs,
 * calls the entry there, and copies all of it back:
 *
 *   host     [ x ]   [ gain ]      out = x         one array on the host, whatever it is called,
 *              |         |                         is one array on the device
 *   device   [ x ]   [ gain ]
 *
 * RELPOS_TEST_DEVICE     the device, "cuda"; without it tests run the tables of this processor
 * RELPOS_TEST_SHIFT=1    arrays start four bytes behind a border of 16: no wide load fits
 *
 * At the end it prints a hash of all results: two runs that did the same have the same.
 */
#ifndef DEVICE_TABLE_H
#define DEVICE_TABLE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "isa/devices.h"
#include "ops/linear.h"

enum { THERE_MOST = 256 };

/* One array, on both sides. */
typedef struct there_array {
  void *host, *memory;
  char *device;
  int64_t bytes;
} there_array;

static struct {
  const rp_ops *ops;
  int64_t shift;
  there_array list[THERE_MOST];
  int count;
  uint64_t bits;
} there;

static inline void there_check(rp_status status) {
  if (status == RP_OK) return;
  fprintf(stderr, "the device: %s\n", rp_last_error());
  abort();
}

static inline void there_hash(const void *from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i++) {
    there.bits = (there.bits ^ ((const unsigned char *)from)[i]) * UINT64_C(1099511628211);
  }
}

/* Where `host` lies on the device for this call. Arrays that begin in one that is there already lie
 * within it; NULL stays NULL. */
static inline void *there_at(const void *host, int64_t bytes) {
  if (host == NULL) return NULL;
  for (int i = 0; i < there.count; i++) {
    const there_array *const m = &there.list[i];
    const int64_t at = (const char *)host - (const char *)m->host;
    if (at == 0 && bytes <= m->bytes) return m->device;
    if (at > 0 && at + bytes <= m->bytes) return m->device + at;
  }
  if (there.count == THERE_MOST) abort();
  there_array *const m = &there.list[there.count++];
  m->bytes = bytes > 0 ? bytes : 0;
  memcpy(&m->host, &host, sizeof host);
  there_check(there.ops->allocate(m->bytes + there.shift, &m->memory));
  m->device = (char *)m->memory + there.shift;
  there_check(there.ops->write(m->device, host, m->bytes));
  return m->device;
}

/* What is no array of `real` lies on its own border, whatever the shift. */
static inline void *there_whole(const void *host, int64_t bytes) {
  const int64_t shift = there.shift;
  there.shift = 0;
  void *const at = there_at(host, bytes);
  there.shift = shift;
  return at;
}

/* The end of a call: everything comes back. What has not changed is not written: it may be constant
 * on the host. */
static inline rp_status there_end(rp_status status) {
  for (int i = 0; i < there.count; i++) {
    const there_array *const m = &there.list[i];
    void *const now = malloc((size_t)m->bytes + 1);
    if (now == NULL) abort();
    there_check(there.ops->read(now, m->device, m->bytes));
    there_hash(now, m->bytes);
    if (memcmp(now, m->host, (size_t)m->bytes) != 0) memcpy(m->host, now, (size_t)m->bytes);
    free(now);
    there.ops->release(m->memory);
  }
  there.count = 0;
  return status;
}

static inline real *there_numbers(const real *host, int64_t count) {
  return there_at(host, count * (int64_t)sizeof(real));
}

/* `rows` rows of `columns` numbers, `stride` apart. */
static inline real *there_rows(const real *host, int64_t rows, int64_t stride, int64_t columns) {
  return there_numbers(host, rows > 0 && columns > 0 ? (rows - 1) * stride + columns : 0);
}

/* The same of what an `element` says, which for bf16 is half as long. */
static inline real *there_elements(const real *host, int element, int64_t rows, int64_t stride,
                                   int64_t columns) {
  const int64_t count = rows > 0 && columns > 0 ? (rows - 1) * stride + columns : 0;
  return there_at(host, count * (element == RP_BF16 ? 2 : (int64_t)sizeof(real)));
}

/* ---- entries that have matrices -------------------------------------------------- */

enum { THERE_WEIGHTS = 64 };

static inline rp_status there_round_weights(const rpi_rounding *list, int64_t count) {
  rpi_rounding there_list[THERE_WEIGHTS];
  if (count > THERE_WEIGHTS) abort();
  for (int64_t i = 0; i < count; i++) {
    rpi_rounding *const r = &there_list[i];
    *r = list[i];
    r->weight = there_numbers(r->weight, r->out * r->in);
    r->bias = there_numbers(r->bias, r->out);
    r->to = there_whole(r->to, rpi_linear_kept(r->out, r->in));
  }
  return there_end(there.ops->round_weights(there_list, count));
}

static inline rp_status there_gemm(const rpi_gemm_args *args) {
  rpi_gemm_args g = *args;
  const int64_t in = g.inner, rows = g.rows, columns = g.columns;
  g.a = there_rows(g.a, g.transpose_a ? in : rows, g.a_stride, g.transpose_a ? rows : in);
  g.b = there_rows(g.b, g.transpose_b ? columns : in, g.b_stride, g.transpose_b ? in : columns);
  g.c = there_elements(g.c, g.c_element, rows, g.c_stride, columns);
  g.bias = there_numbers(g.bias, columns);
  g.kept = there_whole(g.kept, rpi_linear_kept(rows, in));
  g.rounded = there_whole(g.rounded, rpi_linear_kept(columns, in));
  return there_end(there.ops->gemm(&g));
}

static inline rp_status there_linear_backward(const rpi_linear_backward_args *args) {
  rpi_linear_backward_args a = *args;
  rpi_linear *const l = &a.forward;
  l->x = there_rows(l->x, l->rows, l->x_stride, l->in);
  l->weight = there_numbers(l->weight, l->in * l->out);
  l->bias = there_numbers(l->bias, l->out);
  l->kept = there_whole(l->kept, rpi_linear_kept(l->rows, l->in));
  l->rounded = there_whole(l->rounded, rpi_linear_kept(l->out, l->in));
  /* cuBLAS may read bf16 to the end of a row's stride, of the last one too. */
  a.dy = a.dy_element == RP_BF16 ? there_at(a.dy, l->rows * a.dy_stride * 2)
                                 : there_rows(a.dy, l->rows, a.dy_stride, l->out);
  a.dweight = there_numbers(a.dweight, l->in * l->out);
  a.dbias = there_numbers(a.dbias, l->out);
  a.dx = there_elements(a.dx, a.dx_element, l->rows, l->in, l->in);
  return there_end(there.ops->linear_backward(&a));
}

/* A table has as many rows as its map can name. */
static inline int64_t there_longest(const rpi_embed_args *e) {
  int64_t most = 0;
  for (int64_t b = 0; b < e->dropout.sentences && !e->places; b++) {
    const int64_t length = e->dropout.offsets[b + 1] - e->dropout.offsets[b];
    most = length > most ? length : most;
  }
  for (int64_t r = 0; r < e->rows && e->places; r++) {
    most = e->places[r] + 1 > most ? e->places[r] + 1 : most;
  }
  return most;
}

static inline int64_t there_ids(const rpi_embed_args *e) {
  int64_t most = 0;
  for (int64_t r = 0; r < e->rows; r++) most = e->ids[r] + 1 > most ? e->ids[r] + 1 : most;
  return most;
}

static inline rp_status there_embed(const rpi_embed_args *args) {
  rpi_embed_args e = *args;
  e.table = there_numbers(e.table, there_ids(args) * e.columns);
  e.positions = there_numbers(e.positions, there_longest(args) * e.columns);
  e.out = there_numbers(e.out, e.rows * e.columns);
  e.note.at = there_whole(e.note.at, sizeof *e.note.at);
  return there_end(there.ops->embed(&e));
}

static inline rp_status there_embed_backward(const rpi_embed_backward_args *args) {
  rpi_embed_backward_args b = *args;
  const int64_t columns = b.forward.columns;
  b.dout = there_numbers(b.dout, b.forward.rows * columns);
  b.dtable = there_numbers(b.dtable, there_ids(&args->forward) * columns);
  b.dpositions = there_numbers(b.dpositions, there_longest(&args->forward) * columns);
  b.forward.table = b.forward.positions = b.forward.out = NULL;
  return there_end(there.ops->embed_backward(&b));
}

static inline rp_status there_norm(const rpi_norm_args *args) {
  rpi_norm_args a = *args;
  a.x = there_numbers(a.x, a.rows * a.columns);
  a.base.x = there_numbers(a.base.x, a.rows * a.columns);
  a.base.stats = there_numbers(a.base.stats, 2 * a.rows);
  a.base.gain = there_numbers(a.base.gain, a.columns);
  a.base.shift = there_numbers(a.base.shift, a.columns);
  a.gain = there_numbers(a.gain, a.columns);
  a.shift = there_numbers(a.shift, a.columns);
  a.y = there_numbers(a.y, a.rows * a.columns);
  a.stats = there_numbers(a.stats, 2 * a.rows);
  a.rounded.memory = there_whole(a.rounded.memory, rpi_linear_kept(a.rows, a.columns));
  a.note.at = there_whole(a.note.at, sizeof *a.note.at);
  return there_end(there.ops->norm(&a));
}

static inline rp_status there_norm_backward(const rpi_norm_backward_args *args, int64_t *bytes) {
  if (bytes != NULL) return there.ops->norm_backward(args, bytes);
  rpi_norm_backward_args a = *args;
  const int64_t count = a.rows * a.columns;
  a.x = there_numbers(a.x, count);
  a.gain = there_numbers(a.gain, a.columns);
  a.stats = there_numbers(a.stats, 2 * a.rows);
  a.dy = there_numbers(a.dy, count);
  a.dstream = there_numbers(a.dstream, count);
  a.dx = there_numbers(a.dx, count);
  a.df = there_elements(a.df, a.df_element, a.rows, a.columns, a.columns);
  a.dbias = there_numbers(a.dbias, a.columns);
  a.dgain = there_numbers(a.dgain, a.columns);
  a.dshift = there_numbers(a.dshift, a.columns);
  a.workspace = there_at(a.workspace, a.workspace_bytes);
  return there_end(there.ops->norm_backward(&a, NULL));
}

static inline rp_status there_activation(const rpi_activation_args *args) {
  rpi_activation_args a = *args;
  const int64_t count = a.rows * a.columns;
  a.h = there_numbers(a.h, a.kind == RP_SWIGLU ? 2 * count : count);
  a.a = there_numbers(a.a, count);
  a.rounded.memory = there_whole(a.rounded.memory, rpi_linear_kept(a.rows, a.columns));
  return there_end(there.ops->activation(&a));
}

static inline rp_status there_activation_backward(const rpi_activation_backward_args *args) {
  rpi_activation_backward_args a = *args;
  const int64_t count = a.rows * a.columns, wide = a.kind == RP_SWIGLU ? 2 * count : count;
  a.h =
      a.kind == RP_RELU ? NULL : there_numbers(a.h, wide); /* what it must not read is not there */
  a.a = a.kind == RP_RELU && !a.rounded.memory ? there_numbers(a.a, count) : NULL;
  a.rounded.memory = there_whole(a.rounded.memory, rpi_linear_kept(a.rows, a.columns));
  a.da = there_elements(a.da, a.element, 1, 0, count);
  a.dh = there_elements(a.dh, a.element, 1, 0, wide);
  a.dbias = there_numbers(a.dbias, a.kind == RP_SWIGLU ? 2 * a.columns : a.columns);
  return there_end(there.ops->activation_backward(&a));
}

static inline rp_status there_column_sums(const rpi_column_sums_args *args) {
  rpi_column_sums_args a = *args;
  a.x = there_rows(a.x, a.rows, a.x_stride, a.columns);
  a.sum = there_numbers(a.sum, a.columns);
  return there_end(there.ops->column_sums(&a));
}

static inline rp_status there_square_sum(const real *x, int64_t count, double *workspace,
                                         double *sum) {
  const int64_t blocks = rpi_square_blocks(count);
  const real *const at = there_numbers(x, count);
  double *const room = there_whole(workspace, blocks * (int64_t)sizeof(double));
  return there_end(there.ops->square_sum(at, count, room, there_whole(sum, sizeof *sum)));
}

static inline rp_status there_decide(const rpi_decide_args *args) {
  rpi_decide_args a = *args;
  a.ledger = there_whole(a.ledger, sizeof *a.ledger);
  return there_end(there.ops->decide(&a));
}

static inline rp_status there_blame(const rpi_blame_args *args) {
  rpi_blame_args a = *args;
  const int64_t last = 2 * (a.count - 1);
  const int64_t numbers = a.count > 0 ? a.places[last] + a.places[last + 1] : 0;
  a.outcome = there_whole(a.outcome, sizeof *a.outcome);
  a.gradients = there_numbers(a.gradients, numbers);
  a.workspace = there_whole(a.workspace, rpi_square_blocks(numbers) * (int64_t)sizeof(double));
  return there_end(there.ops->blame(&a));
}

static inline rp_status there_adam(const rpi_adam_args *args) {
  rpi_adam_args a = *args;
  a.weights = there_numbers(a.weights, a.count);
  a.gradient = there_numbers(a.gradient, a.count);
  a.moment1 = there_numbers(a.moment1, a.count);
  a.moment2 = there_numbers(a.moment2, a.count);
  a.average = there_numbers(a.average, a.count);
  a.outcome = there_whole(a.outcome, sizeof *a.outcome);
  return there_end(there.ops->adam(&a));
}

static inline rp_status there_zero(real *x, int64_t count) {
  return there_end(there.ops->zero(there_numbers(x, count), count));
}

/* ---- entries that have classes --------------------------------------------------- */

static inline rp_status there_cross_entropy(const rpi_cross_entropy_args *args) {
  rpi_cross_entropy_args a = *args;
  if (a.rounded)
    there_whole(a.logits, ((a.rows - 1) * a.stride + a.classes) * (int64_t)sizeof(real));
  a.logits = there_rows(a.logits, a.rows, a.stride, a.classes);
  a.loss = there_numbers(a.loss, a.rows);
  a.nll = there_numbers(a.nll, a.rows);
  a.hit = there_at(a.hit, a.rows);
  return there_end(there.ops->cross_entropy(&a));
}

static inline rp_status there_losses(const rpi_losses_args *args) {
  rpi_losses_args a = *args;
  a.loss = there_numbers(a.loss, a.rows);
  a.nll = there_numbers(a.nll, a.rows);
  a.hit = there_at(a.hit, a.rows);
  a.note = there_whole(a.note, sizeof *a.note);
  a.own = there_whole(a.own, sizeof *a.own);
  a.total = there_whole(a.total, sizeof *a.total);
  return there_end(there.ops->losses(&a));
}

static inline rp_status there_choose(const rpi_choose_args *args) {
  rpi_choose_args a = *args;
  a.logits = there_rows(a.logits, a.rows, a.stride, a.classes);
  const rp_status status = there.ops->choose(&a);
  there_hash(a.tokens, a.rows * a.most * (int64_t)sizeof *a.tokens);
  there_hash(a.log_probabilities, a.rows * a.most * (int64_t)sizeof(double));
  if (a.left != NULL) there_hash(a.left, a.rows * (int64_t)sizeof(double));
  return there_end(status);
}

static inline rp_status there_mix(const rpi_mix_args *args) {
  rpi_mix_args a = *args;
  a.logits = there_rows(a.logits, a.rows, a.stride, a.classes);
  a.mean = there_rows(a.mean, a.rows, a.mean_stride, a.classes);
  return there_end(there.ops->mix(&a));
}

/* ---- attention of single queries, and rotation ----------------------------------- */

static inline void there_relation(rp_relation *r, int64_t heads, int64_t width) {
  const int64_t rows = r->buckets != NULL ? r->rows : r->left + 1 + r->right;
  const int64_t last = (rows - 1) * r->row_stride + (heads - 1) * r->head_stride;
  r->table = there_numbers(r->table, last + width);
}

/* All numbers from the first to the last that one of the pointers begins, as one array; `before`
 * and `after` say how much of it lies around them. NULL where there are no pointers. */
static inline real *there_range(const real *first, const real *last, int64_t before,
                                int64_t after) {
  if (first == NULL) return NULL;
  return there_numbers(first + before, last - first + after - before);
}

static inline rp_status there_attend_rows(const rpi_attend_rows_args *args) {
  rpi_attend_rows_args a = *args;
  rp_attention shape = *a.shape;
  const int64_t width = shape.H * shape.D;
  for (int t = 0; t < RP_TERMS; t++) {
    there_relation(&shape.key[t], shape.H, shape.D);
    there_relation(&shape.query[t], shape.H, shape.D);
    there_relation(&shape.bias[t], shape.H, 1);
    there_relation(&shape.value[t], shape.H, shape.D);
  }
  shape.position_bias =
      there_rows(shape.position_bias, shape.H, shape.position_bias_stride, shape.D);
  a.shape = &shape;
  a.q = there_rows(a.q, a.rows, a.q_stride, width);
  a.out = there_rows(a.out, a.rows, a.out_stride, width);
  const real *first = NULL, *last = NULL;
  int64_t total = 0;
  for (int64_t r = 0; r < a.rows; r++) {
    for (int64_t j = 0; j < a.counts[r]; j++) {
      const real *const key = a.keys[r][j];
      first = first == NULL || key < first ? key : first;
      last = last == NULL || key > last ? key : last;
    }
    total += a.counts[r];
  }
  const real *const log = there_range(first, last, a.shift, a.shift + a.to_value + width);
  const real **const places = malloc((size_t)(total + 1) * sizeof *places);
  const real *const **const lists = malloc((size_t)(a.rows + 1) * sizeof *lists);
  real **const mean = malloc((size_t)(a.rows + 1) * sizeof *mean);
  if (places == NULL || lists == NULL || mean == NULL) abort();
  int64_t at = 0;
  for (int64_t r = 0; r < a.rows; r++) {
    lists[r] = (const real *const *)places + at;
    for (int64_t j = 0; j < a.counts[r]; j++) {
      places[at++] = log + (a.keys[r][j] - first) - a.shift;
    }
    if (a.mean != NULL) mean[r] = there_numbers(a.mean[r], a.counts[r]);
  }
  a.keys = lists;
  if (a.mean != NULL) a.mean = mean;
  const rp_status status = there_end(there.ops->attend_rows(&a));
  free(places);
  free(lists);
  free(mean);
  return status;
}

static inline rp_status there_scatter(const rpi_scatter_args *args) {
  rpi_scatter_args a = *args;
  const real *first = NULL, *last = NULL;
  for (int64_t r = 0; r < a.rows; r++) {
    first = first == NULL || a.to[r] < first ? a.to[r] : first;
    last = last == NULL || a.to[r] > last ? a.to[r] : last;
  }
  real *const log = there_range(first, last, a.shift, a.shift + a.columns);
  real **const to = malloc((size_t)(a.rows + 1) * sizeof *to);
  if (to == NULL) abort();
  for (int64_t r = 0; r < a.rows; r++) to[r] = log + (a.to[r] - first) - a.shift;
  a.to = to;
  a.x = there_rows(a.x, a.rows, a.x_stride, a.columns);
  const rp_status status = there_end(there.ops->scatter(&a));
  free(to);
  return status;
}

static inline rp_status there_rotate(const rp_rotation *r, rp_rows x, rp_rows_out out) {
  const int64_t rows = r->offsets != NULL ? r->offsets[r->B] : r->N;
  const int64_t batches = r->offsets != NULL ? 1 : r->B;
  const bool any = rows > 0 && batches > 0 && r->H > 0;
  const int64_t last_x = (batches - 1) * x.batch_stride + (r->H - 1) * x.head_stride;
  const int64_t last_out = (batches - 1) * out.batch_stride + (r->H - 1) * out.head_stride;
  const int64_t count = any ? last_x + (rows - 1) * x.row_stride + r->D : 0;
  const int64_t out_count = any ? last_out + (rows - 1) * out.row_stride + r->D : 0;
  x.data = there_numbers(x.data, count);
  out.data = there_numbers(out.data, out_count);
  return there_end(there.ops->rotate(r, x, out));
}

/* ---- the table ------------------------------------------------------------------- */

static inline void there_report(void) { printf("bits %016llx\n", (unsigned long long)there.bits); }

static const rp_ops there_table = {
    .name = "device",
    .round_weights = there_round_weights,
    .gemm = there_gemm,
    .linear_backward = there_linear_backward,
    .rotate = there_rotate,
    .attend_rows = there_attend_rows,
    .choose = there_choose,
    .mix = there_mix,
    .scatter = there_scatter,
    .embed = there_embed,
    .embed_backward = there_embed_backward,
    .norm = there_norm,
    .norm_backward = there_norm_backward,
    .activation = there_activation,
    .activation_backward = there_activation_backward,
    .cross_entropy = there_cross_entropy,
    .losses = there_losses,
    .column_sums = there_column_sums,
    .square_sum = there_square_sum,
    .decide = there_decide,
    .blame = there_blame,
    .adam = there_adam,
    .zero = there_zero,
};

/* The table of RELPOS_TEST_DEVICE. Attention has tests of its own. */
static inline const rp_ops *device_table(void) {
  if (there.ops != NULL) return &there_table;
  there_check(rpi_device_ops(getenv("RELPOS_TEST_DEVICE"), &there.ops));
  there.shift = getenv("RELPOS_TEST_SHIFT") != NULL ? (int64_t)sizeof(real) : 0;
  there.bits = UINT64_C(14695981039346656037);
  atexit(there_report);
  return &there_table;
}

#endif
