/* SPDX-License-Identifier: Apache-2.0
 *
 * api_attention.c: the checks of the public attention functions, then one call
 * inward. Nothing below this file checks a user's argument again.
 */
#include <math.h>
#include <stdbool.h>

#include "base/memory.h"
#include "isa/dispatch.h"

/* Sizes and positions stay below this, so that sums of a few of them are safe. */
#define LIMIT ((int64_t)1 << 40)

typedef long long wide; /* for printf */

static rp_status check_size(const char *name, int64_t value, int64_t least) {
  RPI_CHECK(value >= least && value <= LIMIT, RP_ERROR_SHAPE,
            "attention: %s=%lld, must be from %lld to 2^40", name, (wide)value, (wide)least);
  return RP_OK;
}

static rp_status check_lengths(const char *name, const int64_t *lengths, int64_t B, int64_t most,
                               const char *most_name) {
  for (int64_t b = 0; lengths && b < B; b++) {
    RPI_CHECK(lengths[b] >= 0 && lengths[b] <= most, RP_ERROR_SHAPE,
              "attention: %s[%lld]=%lld, must be from 0 to %s=%lld", name, (wide)b,
              (wide)lengths[b], most_name, (wide)most);
  }
  return RP_OK;
}

static rp_status check_offsets(const char *name, const int64_t *offsets, int64_t B) {
  if (!offsets) return RP_OK;
  RPI_CHECK(offsets[0] == 0, RP_ERROR_SHAPE, "attention: %s[0]=%lld, must be 0", name,
            (wide)offsets[0]);
  for (int64_t b = 0; b < B; b++) {
    RPI_CHECK(offsets[b + 1] >= offsets[b] && offsets[b + 1] <= LIMIT, RP_ERROR_SHAPE,
              "attention: %s[%lld]=%lld after %lld, must not fall and not exceed 2^40", name,
              (wide)(b + 1), (wide)offsets[b + 1], (wide)offsets[b]);
  }
  return RP_OK;
}

static rp_status check_relation(const char *name, const rp_relation *r, int64_t width, int64_t H) {
  if (!r->table) return RP_OK;
  RPI_CHECK(r->left >= 0 && r->left <= LIMIT && r->right >= 0 && r->right <= LIMIT,
            RP_ERROR_ARGUMENT, "attention: %s.left=%lld and right=%lld must be from 0 to 2^40",
            name, (wide)r->left, (wide)r->right);
  RPI_CHECK(r->beyond == RP_BEYOND_CLIP || r->beyond == RP_BEYOND_NONE, RP_ERROR_ARGUMENT,
            "attention: %s.beyond=%d, must be RP_BEYOND_CLIP (0) or RP_BEYOND_NONE (1)", name,
            r->beyond);
  RPI_CHECK(r->row_stride >= width && r->row_stride <= LIMIT, RP_ERROR_SHAPE,
            "attention: %s.row_stride=%lld, must be at least the row's width %lld", name,
            (wide)r->row_stride, (wide)width);
  const int64_t T = r->left + r->right + 1;
  int64_t table = 0, all = 0;
  RPI_CHECK(rpi_multiply(T, r->row_stride, &table) && table <= INT64_MAX / 16, RP_ERROR_SHAPE,
            "attention: %s: %lld rows of %lld numbers overflow", name, (wide)T,
            (wide)r->row_stride);
  RPI_CHECK(r->head_stride == 0 || (r->head_stride >= table - r->row_stride + width &&
                                    rpi_multiply(r->head_stride, H, &all) && all <= INT64_MAX / 16),
            RP_ERROR_SHAPE,
            "attention: %s.head_stride=%lld, must be 0 (shared) or at least the table's %lld "
            "numbers",
            name, (wide)r->head_stride, (wide)(table - r->row_stride + width));
  return RP_OK;
}

/* Everything that the shape alone decides. */
static rp_status check_shape(const rp_attention *a) {
  RPI_CHECK(a, RP_ERROR_ARGUMENT, "attention: a is NULL");
  RPI_CHECK(a->struct_size == sizeof *a, RP_ERROR_ARGUMENT,
            "attention: struct_size=%zu, must be %zu: start from rp_attention_default()",
            a->struct_size, sizeof *a);
  RPI_TRY(check_size("B", a->B, 0));
  RPI_TRY(check_size("H", a->H, 0));
  int64_t pairs = 0;
  RPI_CHECK(rpi_multiply(a->B, a->H, &pairs) && pairs <= LIMIT, RP_ERROR_SHAPE,
            "attention: B=%lld times H=%lld, must not exceed 2^40", (wide)a->B, (wide)a->H);
  RPI_TRY(check_size("N", a->N, 0));
  RPI_TRY(check_size("M", a->M, 0));
  RPI_TRY(check_size("D", a->D, 1));
  RPI_TRY(check_size("Dv", a->Dv, 1));
  RPI_CHECK(isfinite(a->scale), RP_ERROR_ARGUMENT,
            "attention: scale=%g, must be finite (0: 1/sqrt(D))", a->scale);
  RPI_CHECK(!(a->offsets && a->lengths), RP_ERROR_ARGUMENT,
            "attention: both lengths and offsets are given; packed queries have offsets alone");
  const bool packed_keys = a->key_offsets || a->offsets;
  RPI_CHECK(!(packed_keys && a->key_lengths), RP_ERROR_ARGUMENT,
            "attention: key_lengths is given with packed keys; those have offsets alone");
  RPI_TRY(check_offsets("offsets", a->offsets, a->B));
  RPI_TRY(check_offsets("key_offsets", a->key_offsets, a->B));
  RPI_TRY(check_lengths("lengths", a->lengths, a->B, a->N, "N"));
  RPI_TRY(check_lengths("key_lengths", a->key_lengths, a->B, a->M, "M"));
  if (!packed_keys && !a->key_lengths)
    RPI_TRY(check_lengths("lengths", a->lengths, a->B, a->M, "M"));
  for (int64_t b = 0; a->query_start && b < a->B; b++) {
    RPI_CHECK(a->query_start[b] >= -LIMIT && a->query_start[b] <= LIMIT, RP_ERROR_ARGUMENT,
              "attention: query_start[%lld]=%lld, must be within 2^40 of 0", (wide)b,
              (wide)a->query_start[b]);
  }
  RPI_TRY(check_relation("key", &a->key, a->D, a->H));
  return check_relation("value", &a->value, a->Dv, a->H);
}

/* One axis of an array. */
typedef struct axis {
  int64_t count, stride;
} axis;

/* The strides of an array are not negative and its last element can be addressed;
 * those of an output also keep its rows apart: taken from the smallest stride up,
 * each step must clear what lies below it. */
static rp_status check_rows(const char *name, const real *data, axis batch, axis head, axis row,
                            int64_t width, bool written) {
  if (batch.count == 0 || head.count == 0 || row.count == 0) return RP_OK;
  RPI_CHECK(data, RP_ERROR_ARGUMENT, "attention: %s is NULL", name);
  axis axes[3] = {batch, head, row};
  for (int i = 1; i < 3; i++) { /* by stride, smallest first */
    for (int j = i; j > 0 && axes[j].stride < axes[j - 1].stride; j--) {
      const axis swapped = axes[j];
      axes[j] = axes[j - 1];
      axes[j - 1] = swapped;
    }
  }
  int64_t extent = width;
  for (int i = 0; i < 3; i++) {
    if (axes[i].count == 1) continue;
    RPI_CHECK(axes[i].stride >= 0, RP_ERROR_SHAPE,
              "attention: %s has a stride of %lld; strides must not be negative", name,
              (wide)axes[i].stride);
    RPI_CHECK(!written || axes[i].stride >= extent, RP_ERROR_SHAPE,
              "attention: %s has a stride of %lld inside rows that span %lld numbers; rows that "
              "are written must not overlap",
              name, (wide)axes[i].stride, (wide)extent);
    int64_t reach = 0;
    RPI_CHECK(rpi_multiply(axes[i].stride, axes[i].count - 1, &reach) &&
                  rpi_add(reach, extent, &extent) && extent <= INT64_MAX / 16,
              RP_ERROR_SHAPE, "attention: %s: its size overflows", name);
  }
  return RP_OK;
}

static rp_status check_input(const rp_attention *a, const char *name, const rp_rows *x,
                             const int64_t *offsets, int64_t rows, int64_t width) {
  const axis batch = {offsets ? 1 : a->B, offsets ? 0 : x->batch_stride};
  const axis row = {offsets ? offsets[a->B] : rows, x->row_stride};
  return check_rows(name, x->data, batch, (axis){a->H, x->head_stride}, row, width, false);
}

static rp_status check_output(const rp_attention *a, const char *name, const rp_rows_out *x,
                              const int64_t *offsets, int64_t rows, int64_t width) {
  const axis batch = {offsets ? 1 : a->B, offsets ? 0 : x->batch_stride};
  const axis row = {offsets ? offsets[a->B] : rows, x->row_stride};
  return check_rows(name, x->data, batch, (axis){a->H, x->head_stride}, row, width, true);
}

static rp_status check_inputs(const rp_attention *a, const rp_rows *q, const rp_rows *k,
                              const rp_rows *v) {
  const int64_t *const key_offsets = a->key_offsets ? a->key_offsets : a->offsets;
  RPI_TRY(check_input(a, "q", q, a->offsets, a->N, a->D));
  RPI_TRY(check_input(a, "k", k, key_offsets, a->M, a->D));
  return check_input(a, "v", v, key_offsets, a->M, a->Dv);
}

static rp_status check_workspace(const void *workspace, int64_t given, int64_t needed) {
  RPI_CHECK(given >= needed, RP_ERROR_MEMORY,
            "attention: workspace_bytes=%lld, must be at least %lld (rp_attention_workspace; it "
            "grows with rp_set_threads)",
            (wide)given, (wide)needed);
  RPI_CHECK(needed == 0 || workspace, RP_ERROR_ARGUMENT, "attention: workspace is NULL");
  RPI_CHECK((uintptr_t)workspace % RPI_ALIGN == 0, RP_ERROR_ARGUMENT,
            "attention: workspace=%p, must be aligned to %d bytes", workspace, RPI_ALIGN);
  return RP_OK;
}

rp_attention rp_attention_default(void) {
  return (rp_attention){.struct_size = sizeof(rp_attention)};
}

/* Checked already. A call without a head or a sequence has nothing to do. */
static rp_status workspace_of(const rp_attention *a, int64_t *forward_bytes,
                              int64_t *backward_bytes) {
  const rp_ops *ops = NULL;
  RPI_TRY(rpi_ops_get(&ops));
  if (a->B == 0 || a->H == 0) {
    if (forward_bytes) *forward_bytes = 0;
    if (backward_bytes) *backward_bytes = 0;
    return RP_OK;
  }
  return ops->attention_workspace(a, forward_bytes, backward_bytes);
}

rp_status rp_attention_workspace(const rp_attention *a, int64_t *forward_bytes,
                                 int64_t *backward_bytes) {
  RPI_TRY(check_shape(a));
  return workspace_of(a, forward_bytes, backward_bytes);
}

rp_status rp_attention_forward(const rp_attention *a, rp_rows q, rp_rows k, rp_rows v,
                               rp_rows_out out, rp_real *lse, void *workspace,
                               int64_t workspace_bytes) {
  RPI_TRY(check_shape(a));
  RPI_TRY(check_inputs(a, &q, &k, &v));
  RPI_TRY(check_output(a, "out", &out, a->offsets, a->N, a->Dv));
  int64_t needed = 0;
  RPI_TRY(workspace_of(a, &needed, NULL));
  RPI_TRY(check_workspace(workspace, workspace_bytes, needed));
  if (a->B == 0 || a->H == 0) return RP_OK;
  const rp_ops *ops = NULL;
  RPI_TRY(rpi_ops_get(&ops));
  const rpi_attention_args args = {.shape = a,
                                   .q = q,
                                   .k = k,
                                   .v = v,
                                   .out = out,
                                   .lse = lse,
                                   .workspace = workspace,
                                   .workspace_bytes = workspace_bytes};
  return ops->attention_forward(&args);
}

rp_status rp_attention_backward(const rp_attention *a, rp_rows q, rp_rows k, rp_rows v, rp_rows out,
                                const rp_real *lse, rp_rows dout,
                                const rp_attention_gradients *gradients, void *workspace,
                                int64_t workspace_bytes) {
  RPI_TRY(check_shape(a));
  RPI_TRY(check_inputs(a, &q, &k, &v));
  RPI_TRY(check_input(a, "out", &out, a->offsets, a->N, a->Dv));
  RPI_TRY(check_input(a, "dout", &dout, a->offsets, a->N, a->Dv));
  RPI_CHECK(gradients, RP_ERROR_ARGUMENT, "attention: gradients is NULL");
  const int64_t *const key_offsets = a->key_offsets ? a->key_offsets : a->offsets;
  RPI_TRY(check_output(a, "gradients.q", &gradients->q, a->offsets, a->N, a->D));
  RPI_TRY(check_output(a, "gradients.k", &gradients->k, key_offsets, a->M, a->D));
  RPI_TRY(check_output(a, "gradients.v", &gradients->v, key_offsets, a->M, a->Dv));
  int64_t needed = 0;
  RPI_TRY(workspace_of(a, NULL, &needed));
  RPI_TRY(check_workspace(workspace, workspace_bytes, needed));
  if (a->B == 0 || a->H == 0) return RP_OK;
  RPI_CHECK(lse || (a->offsets ? a->offsets[a->B] : a->N) == 0, RP_ERROR_ARGUMENT,
            "attention: lse is NULL; backward needs the one that forward wrote");
  const rp_ops *ops = NULL;
  RPI_TRY(rpi_ops_get(&ops));
  const rpi_attention_backward_args args = {.shape = a,
                                            .q = q,
                                            .k = k,
                                            .v = v,
                                            .out = out,
                                            .dout = dout,
                                            .lse = lse,
                                            .workspace = workspace,
                                            .workspace_bytes = workspace_bytes,
                                            .gradients = gradients};
  return ops->attention_backward(&args);
}

rp_status rp_shaw_attention(int64_t B, int64_t H, int64_t N, int64_t D, int64_t k, int causal,
                            const rp_real *q, const rp_real *keys, const rp_real *values,
                            const rp_real *key_table, const rp_real *value_table, rp_real *out) {
  rp_attention a = rp_attention_default();
  a.B = B;
  a.H = H;
  a.N = a.M = N;
  a.D = a.Dv = D;
  a.causal = causal;
  a.key = (rp_relation){.table = key_table, .row_stride = D, .left = k, .right = k};
  a.value = (rp_relation){.table = value_table, .row_stride = D, .left = k, .right = k};
  RPI_CHECK(k >= 0, RP_ERROR_ARGUMENT, "attention: k=%lld, must not be negative", (wide)k);
  RPI_TRY(check_shape(&a));
  int64_t head_stride = 0, batch_stride = 0;
  RPI_CHECK(rpi_multiply(N, D, &head_stride) && rpi_multiply(head_stride, H, &batch_stride),
            RP_ERROR_SHAPE, "attention: B=%lld, H=%lld, N=%lld, D=%lld overflow", (wide)B, (wide)H,
            (wide)N, (wide)D);
  int64_t bytes = 0;
  RPI_TRY(rp_attention_workspace(&a, &bytes, NULL));
  void *const workspace = rpi_allocate((size_t)bytes);
  RPI_CHECK(workspace, RP_ERROR_MEMORY, "attention: no memory for a workspace of %lld bytes",
            (wide)bytes);
  const rp_status status = rp_attention_forward(
      &a, (rp_rows){q, batch_stride, head_stride, D}, (rp_rows){keys, batch_stride, head_stride, D},
      (rp_rows){values, batch_stride, head_stride, D},
      (rp_rows_out){out, batch_stride, head_stride, D}, NULL, workspace, bytes);
  rpi_release(workspace);
  return status;
}
