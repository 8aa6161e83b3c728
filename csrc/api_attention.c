/* SPDX-License-Identifier: Apache-2.0
 *
 * api_attention.c: the checks of the public attention functions, then one call
 * inward. Nothing below the api files checks a user's argument again. Terms and
 * masks are checked by api_relation.c.
 */
#include "api_attention.h"

#include <float.h>
#include <math.h>
#include <stdalign.h>

#include "base/memory.h"
#include "base/threads.h"
#include "isa/devices.h"
#include "ops/shown.h"

/* ---- the shape ---------------------------------------------------------------- */

/* rp_attention only grows at its end. A caller compiled with an older header has a
 * shorter one: what it does not know takes its default. The first version ended
 * before the window. */
static rp_status read_attention(const rp_attention *given, rp_attention *a) {
  const size_t first_version = offsetof(rp_attention, window_left);
  RPI_CHECK(given, RP_ERROR_ARGUMENT, "attention: a is NULL");
  const size_t size = given->struct_size;
  RPI_CHECK(size >= first_version && size <= sizeof *a && size % alignof(rp_attention) == 0,
            RP_ERROR_ARGUMENT,
            "attention: struct_size=%zu, must be from %zu to %zu: start from "
            "rp_attention_default(), with a relpos.h that is no newer than the library",
            size, first_version, sizeof *a);
  *a = rp_attention_default();
  memcpy(a, given, size);
  a->struct_size = sizeof *a;
  return RP_OK;
}

static rp_status check_size(const char *name, int64_t value, int64_t least) {
  RPI_CHECK(value >= least && value <= RPI_LIMIT, RP_ERROR_SHAPE,
            "attention: %s=%lld, must be from %lld to 2^40", name, (rpi_wide)value,
            (rpi_wide)least);
  return RP_OK;
}

rp_status rpi_check_offsets(const char *call, const char *name, const int64_t *offsets,
                            int64_t count) {
  if (!offsets) return RP_OK;
  RPI_CHECK(offsets[0] == 0, RP_ERROR_SHAPE, "%s: %s[0]=%lld, must be 0", call, name,
            (rpi_wide)offsets[0]);
  for (int64_t i = 0; i < count; i++) {
    RPI_CHECK(offsets[i + 1] >= offsets[i] && offsets[i + 1] <= RPI_LIMIT, RP_ERROR_SHAPE,
              "%s: %s[%lld]=%lld after %lld, must not fall and not exceed 2^40", call, name,
              (rpi_wide)(i + 1), (rpi_wide)offsets[i + 1], (rpi_wide)offsets[i]);
  }
  return RP_OK;
}

rp_status rpi_check_lengths(const char *call, const char *name, const int64_t *lengths,
                            int64_t count, int64_t most, const char *most_name) {
  for (int64_t b = 0; lengths && b < count; b++) {
    RPI_CHECK(lengths[b] >= 0 && lengths[b] <= most, RP_ERROR_SHAPE,
              "%s: %s[%lld]=%lld, must be from 0 to %s=%lld", call, name, (rpi_wide)b,
              (rpi_wide)lengths[b], most_name, (rpi_wide)most);
  }
  return RP_OK;
}

rp_status rpi_check_starts(const char *call, const char *name, const int64_t *starts,
                           int64_t count) {
  for (int64_t b = 0; starts && b < count; b++) {
    RPI_CHECK(starts[b] >= -RPI_LIMIT && starts[b] <= RPI_LIMIT, RP_ERROR_ARGUMENT,
              "%s: %s[%lld]=%lld, must be within 2^40 of 0", call, name, (rpi_wide)b,
              (rpi_wide)starts[b]);
  }
  return RP_OK;
}

static rp_status check_sizes(rp_attention *a) {
  RPI_TRY(check_size("B", a->B, 0));
  RPI_TRY(check_size("H", a->H, 0));
  int64_t pairs = 0;
  RPI_CHECK(rpi_multiply(a->B, a->H, &pairs) && pairs <= RPI_LIMIT, RP_ERROR_SHAPE,
            "attention: B=%lld times H=%lld, must not exceed 2^40", (rpi_wide)a->B, (rpi_wide)a->H);
  RPI_TRY(check_size("key_heads", a->key_heads, 0));
  if (a->key_heads == 0) a->key_heads = a->H;
  RPI_CHECK(a->key_heads == a->H || (a->H > 0 && a->H % a->key_heads == 0), RP_ERROR_SHAPE,
            "attention: key_heads=%lld, must be 0 or divide H=%lld", (rpi_wide)a->key_heads,
            (rpi_wide)a->H);
  RPI_TRY(check_size("N", a->N, 0));
  RPI_TRY(check_size("M", a->M, 0));
  RPI_TRY(check_size("D", a->D, 1));
  return check_size("Dv", a->Dv, 1);
}

/* Which rows belong to which sequence, and where they stand. */
static rp_status check_sequences(const rp_attention *a) {
  RPI_CHECK(!(a->offsets && a->lengths), RP_ERROR_ARGUMENT,
            "attention: both lengths and offsets are given; packed queries have offsets alone");
  const bool packed_keys = a->key_offsets || a->offsets;
  RPI_CHECK(!(packed_keys && a->key_lengths), RP_ERROR_ARGUMENT,
            "attention: key_lengths is given with packed keys; those have offsets alone");
  RPI_TRY(rpi_check_offsets("attention", "offsets", a->offsets, a->B));
  RPI_TRY(rpi_check_offsets("attention", "key_offsets", a->key_offsets, a->B));
  RPI_TRY(rpi_check_lengths("attention", "lengths", a->lengths, a->B, a->N, "N"));
  RPI_TRY(rpi_check_lengths("attention", "key_lengths", a->key_lengths, a->B, a->M, "M"));
  if (!packed_keys && !a->key_lengths)
    RPI_TRY(rpi_check_lengths("attention", "lengths", a->lengths, a->B, a->M, "M"));
  return rpi_check_starts("attention", "query_start", a->query_start, a->B);
}

static rp_status check_window(const char *name, int64_t value) {
  RPI_CHECK(value >= -1 && value <= RPI_LIMIT, RP_ERROR_ARGUMENT,
            "attention: %s=%lld, must be from 0 to 2^40, or -1 for no bound", name,
            (rpi_wide)value);
  return RP_OK;
}

static rp_status check_numbers(const rp_attention *a) {
  RPI_CHECK(fabs(a->scale) <= 1e30, RP_ERROR_ARGUMENT,
            "attention: scale=%g, must be within 1e30 of 0 (0: 1/sqrt(D))", a->scale);
  RPI_CHECK(!(fabs(a->scale) < DBL_MIN) || fpclassify(a->scale) == FP_ZERO, RP_ERROR_ARGUMENT,
            "attention: scale=%g, must be 0 or a normal number", a->scale);
  RPI_CHECK(a->softcap == 0 || (a->softcap >= 1e-30 && a->softcap <= 1e30), RP_ERROR_ARGUMENT,
            "attention: softcap=%g, must be 0 (none) or from 1e-30 to 1e30", a->softcap);
  RPI_TRY(check_window("window_left", a->window_left));
  RPI_TRY(check_window("window_right", a->window_right));
  RPI_CHECK(a->dropout >= 0 && a->dropout < 1, RP_ERROR_ARGUMENT,
            "attention: dropout=%g, must be from 0 to below 1", a->dropout);
  RPI_CHECK(!a->position_bias || a->H < 2 ||
                (a->position_bias_stride >= a->D && a->position_bias_stride <= RPI_LIMIT),
            RP_ERROR_SHAPE,
            "attention: position_bias_stride=%lld, must be at least the row's width D=%lld",
            (rpi_wide)a->position_bias_stride, (rpi_wide)a->D);
  const rpi_array bias = {
      .name = "position_bias",
      .data = a->position_bias,
      .axes = {{1, 0}, {a->position_bias ? a->H : 0, a->position_bias_stride}, {1, 0}},
      .width = a->D};
  return rpi_check_rows("attention", &bias, false);
}

/* Everything that the shape alone decides, of a copy that has all fields. */
static rp_status check_shape(const rp_attention *given, rp_attention *a) {
  RPI_TRY(read_attention(given, a));
  RPI_TRY(check_sizes(a));
  const rpi_float_state caller = rpi_float_enter(false); /* who may trap on a NaN */
  const rp_status numbers = check_numbers(a);
  rpi_float_leave(caller);
  RPI_TRY(numbers);
  RPI_TRY(check_sequences(a));
  return rpi_check_terms(a);
}

/* What computes where the arrays lie. Tables of devices see to the CUDA stream and the types. */
rp_status rpi_placement_ops(const char *call, const rp_placement *placement, const rp_ops **ops) {
  if (!placement) return rpi_ops_get(ops);
  RPI_CHECK(placement->struct_size == sizeof *placement, RP_ERROR_ARGUMENT,
            "%s: placement.struct_size=%zu, must be %zu: start from rp_placement_default()", call,
            placement->struct_size, sizeof *placement);
  const int element = placement->element, precision = placement->precision;
  RPI_CHECK(element == RP_F32 || element == RP_BF16, RP_ERROR_ARGUMENT,
            "%s: placement.element=%d, must be RP_F32 or RP_BF16", call, element);
  RPI_CHECK(precision == RP_BF16 || (precision == RP_F32 && element == RP_F32), RP_ERROR_ARGUMENT,
            "%s: placement.precision=%d, must be %s", call, precision,
            element == RP_BF16 ? "RP_BF16, as placement.element is" : "RP_F32 or RP_BF16");
  RPI_TRY(rpi_device_ops(placement->device, ops));
  RPI_CHECK(!(*ops)->host || element == RP_F32, RP_ERROR_ARGUMENT,
            "%s: placement.element=RP_BF16, but arrays on a CPU are RP_F32", call);
  RPI_CHECK(precision == RP_F32 || RPI_REAL_BYTES == 4, RP_ERROR_ARGUMENT,
            "%s: placement.precision=RP_BF16, but this library computes in double alone", call);
  return RP_OK;
}

/* ---- arrays --------------------------------------------------------------------- */

/* Taken from the smallest stride up, each step of an array that is written must clear
 * what lies below it. */
rp_status rpi_check_rows(const char *call, const rpi_array *x, bool written) {
  axis axes[3] = {x->axes[0], x->axes[1], x->axes[2]};
  if (axes[0].count == 0 || axes[1].count == 0 || axes[2].count == 0) return RP_OK;
  RPI_CHECK(x->data, RP_ERROR_ARGUMENT, "%s: %s is NULL", call, x->name);
  for (int i = 1; i < 3; i++) { /* by stride, smallest first */
    for (int j = i; j > 0 && axes[j].stride < axes[j - 1].stride; j--) {
      const axis swapped = axes[j];
      axes[j] = axes[j - 1];
      axes[j - 1] = swapped;
    }
  }
  int64_t extent = x->width;
  for (int i = 0; i < 3; i++) {
    if (axes[i].count == 1) continue;
    RPI_CHECK(axes[i].stride >= 0, RP_ERROR_SHAPE,
              "%s: %s has a stride of %lld; strides must not be negative", call, x->name,
              (rpi_wide)axes[i].stride);
    RPI_CHECK(!written || axes[i].stride >= extent, RP_ERROR_SHAPE,
              "%s: %s has a stride of %lld inside rows that span %lld numbers; rows that "
              "are written must not overlap",
              call, x->name, (rpi_wide)axes[i].stride, (rpi_wide)extent);
    int64_t reach = 0;
    RPI_CHECK(rpi_multiply(axes[i].stride, axes[i].count - 1, &reach) &&
                  rpi_add(reach, extent, &extent) && extent <= INT64_MAX / 16,
              RP_ERROR_SHAPE, "%s: %s: its size overflows", call, x->name);
  }
  return RP_OK;
}

typedef enum side { QUERIES, KEYS } side;

static rpi_array array_of(const rp_attention *a, const char *name, rp_rows x, side of,
                          int64_t width) {
  const int64_t *const offsets = of == KEYS && a->key_offsets ? a->key_offsets : a->offsets;
  const int64_t rows = offsets ? offsets[a->B] : of == KEYS ? a->M : a->N;
  return (rpi_array){.name = name,
                     .data = x.data,
                     .axes = {{offsets ? 1 : a->B, offsets ? 0 : x.batch_stride},
                              {of == KEYS ? a->key_heads : a->H, x.head_stride},
                              {rows, x.row_stride}},
                     .width = width,
                     .element = rpi_placed_bytes(a->placement)};
}

static rp_status check_array(const rp_attention *a, const char *name, rp_rows x, side of,
                             int64_t width, bool written) {
  const rpi_array array = array_of(a, name, x, of, width);
  return rpi_check_rows("attention", &array, written);
}

static rp_status check_input(const rp_attention *a, const char *name, rp_rows x, side of,
                             int64_t width) {
  return check_array(a, name, x, of, width, false);
}

static rp_rows read_again(rp_rows_out x) {
  return (rp_rows){x.data, x.batch_stride, x.head_stride, x.row_stride};
}

static rp_status check_output(const rp_attention *a, const char *name, rp_rows_out x, side of,
                              int64_t width) {
  return check_array(a, name, read_again(x), of, width, true);
}

static rp_status check_inputs(const rp_attention *a, rp_rows q, rp_rows k, rp_rows v) {
  RPI_TRY(check_input(a, "q", q, QUERIES, a->D));
  RPI_TRY(check_input(a, "k", k, KEYS, a->D));
  return check_input(a, "v", v, KEYS, a->Dv);
}

static rpi_array array_of_lse(const rp_attention *a, const rp_real *lse) {
  return rpi_dense("lse", lse, a->H * (a->offsets ? a->offsets[a->B] : a->B * a->N));
}

/* g: backward's gradients, whose inputs forward's results are; NULL: forward, without a dout. */
static rp_status check_apart(const rp_attention *a, rp_rows q, rp_rows k, rp_rows v, rp_rows out,
                             const rp_real *lse, rp_rows dout, const rp_attention_gradients *g,
                             const void *workspace, int64_t bytes) {
  rpi_array arrays[2 * RPI_TABLES + 10];
  int count = rpi_tables(a, NULL, arrays);
  arrays[count++] = array_of(a, "q", q, QUERIES, a->D);
  arrays[count++] = array_of(a, "k", k, KEYS, a->D);
  arrays[count++] = array_of(a, "v", v, KEYS, a->Dv);
  int inputs = count;
  arrays[count++] = array_of(a, "out", out, QUERIES, a->Dv);
  arrays[count++] = array_of_lse(a, lse);
  if (g) {
    arrays[count++] = array_of(a, "dout", dout, QUERIES, a->Dv);
    inputs = count;
    arrays[count++] = array_of(a, "gradients.q", read_again(g->q), QUERIES, a->D);
    arrays[count++] = array_of(a, "gradients.k", read_again(g->k), KEYS, a->D);
    arrays[count++] = array_of(a, "gradients.v", read_again(g->v), KEYS, a->Dv);
    count += rpi_tables(a, g, arrays + count);
  }
  arrays[count++] = (rpi_array){"workspace", workspace, {{1, 0}, {1, 0}, {1, 0}}, bytes, 1, false};
  return rpi_check_apart("attention", arrays, inputs, count);
}

static rp_status check_workspace(const void *workspace, int64_t given, int64_t needed) {
  RPI_CHECK(given >= needed, RP_ERROR_MEMORY,
            "attention: workspace_bytes=%lld, must be at least %lld (rp_attention_workspace; it "
            "grows with rp_set_threads)",
            (rpi_wide)given, (rpi_wide)needed);
  RPI_CHECK(needed == 0 || workspace, RP_ERROR_ARGUMENT, "attention: workspace is NULL");
  RPI_CHECK((uintptr_t)workspace % RPI_ALIGN == 0, RP_ERROR_ARGUMENT,
            "attention: workspace=%p, must be aligned to %d bytes", workspace, RPI_ALIGN);
  return RP_OK;
}

/* ---- the calls --------------------------------------------------------------------- */

/* Checked already. A call without a head or a sequence has nothing to do. */
static rp_status workspace_of(const rp_attention *a, int workers, int64_t *forward_bytes,
                              int64_t *backward_bytes) {
  const rp_ops *ops = NULL;
  RPI_TRY(rpi_placement_ops("attention", a->placement, &ops));
  if (a->B == 0 || a->H == 0) {
    if (forward_bytes) *forward_bytes = 0;
    if (backward_bytes) *backward_bytes = 0;
    return RP_OK;
  }
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = ops->attention_workspace(a, workers, forward_bytes, backward_bytes);
  rpi_float_leave(caller);
  return status;
}

rp_status rp_attention_workspace(const rp_attention *given, int64_t *forward_bytes,
                                 int64_t *backward_bytes) {
  rp_attention a;
  RPI_TRY(check_shape(given, &a));
  return workspace_of(&a, rp_get_threads(), forward_bytes, backward_bytes);
}

rp_status rp_attention_forward(const rp_attention *given, rp_rows q, rp_rows k, rp_rows v,
                               rp_rows_out out, rp_real *lse, void *workspace,
                               int64_t workspace_bytes) {
  rp_attention a;
  RPI_TRY(check_shape(given, &a));
  RPI_TRY(check_inputs(&a, q, k, v));
  RPI_TRY(check_output(&a, "out", out, QUERIES, a.Dv));
  int64_t needed = 0;
  const int workers = rp_get_threads(); /* asked once: another thread may change it */
  RPI_TRY(workspace_of(&a, workers, &needed, NULL));
  RPI_TRY(check_workspace(workspace, workspace_bytes, needed));
  if (a.B == 0 || a.H == 0) return RP_OK;
  RPI_TRY(check_apart(&a, q, k, v, read_again(out), lse, (rp_rows){NULL, 0, 0, 0}, NULL, workspace,
                      needed));
  RPI_TRY(rpi_check_labels(&a));
  const rp_ops *ops = NULL;
  RPI_TRY(rpi_placement_ops("attention", a.placement, &ops));
  const rpi_attention_args args = {.shape = &a,
                                   .q = q,
                                   .k = k,
                                   .v = v,
                                   .out = out,
                                   .lse = lse,
                                   .workspace = workspace,
                                   .workers = workers,
                                   .workspace_bytes = workspace_bytes};
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = ops->attention_forward(&args);
  rpi_float_leave(caller);
  return status;
}

/* The same, but for terms that are not there: those have no gradient. */
static rp_attention_gradients gradients_of_terms(const rp_attention *a,
                                                 const rp_attention_gradients *gradients) {
  rp_attention_gradients g = *gradients;
  for (int t = 0; t < RP_TERMS; t++) {
    if (!a->key[t].table) g.key[t] = NULL;
    if (!a->query[t].table) g.query[t] = NULL;
    if (!a->bias[t].table) g.bias[t] = NULL;
    if (!a->value[t].table) g.value[t] = NULL;
  }
  if (!a->position_bias) g.position_bias = NULL;
  return g;
}

rp_status rp_attention_backward(const rp_attention *given, rp_rows q, rp_rows k, rp_rows v,
                                rp_rows out, const rp_real *lse, rp_rows dout,
                                const rp_attention_gradients *gradients, void *workspace,
                                int64_t workspace_bytes) {
  rp_attention a;
  RPI_TRY(check_shape(given, &a));
  RPI_TRY(check_inputs(&a, q, k, v));
  RPI_TRY(check_input(&a, "out", out, QUERIES, a.Dv));
  RPI_TRY(check_input(&a, "dout", dout, QUERIES, a.Dv));
  RPI_CHECK(gradients, RP_ERROR_ARGUMENT, "attention: gradients is NULL");
  RPI_TRY(check_output(&a, "gradients.q", gradients->q, QUERIES, a.D));
  RPI_TRY(check_output(&a, "gradients.k", gradients->k, KEYS, a.D));
  RPI_TRY(check_output(&a, "gradients.v", gradients->v, KEYS, a.Dv));
  int64_t needed = 0;
  const int workers = rp_get_threads();
  RPI_TRY(workspace_of(&a, workers, NULL, &needed));
  RPI_TRY(check_workspace(workspace, workspace_bytes, needed));
  if (a.B == 0 || a.H == 0) return RP_OK;
  RPI_CHECK(lse || (a.offsets ? a.offsets[a.B] : a.N) == 0, RP_ERROR_ARGUMENT,
            "attention: lse is NULL; backward needs the one that forward wrote");
  RPI_TRY(check_apart(&a, q, k, v, out, lse, dout, gradients, workspace, needed));
  RPI_TRY(rpi_check_labels(&a));
  const rp_ops *ops = NULL;
  RPI_TRY(rpi_placement_ops("attention", a.placement, &ops));
  const rp_attention_gradients wanted = gradients_of_terms(&a, gradients);
  const rpi_attention_backward_args args = {.shape = &a,
                                            .q = q,
                                            .k = k,
                                            .v = v,
                                            .out = out,
                                            .dout = dout,
                                            .lse = lse,
                                            .workspace = workspace,
                                            .workers = workers,
                                            .workspace_bytes = workspace_bytes,
                                            .gradients = &wanted};
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = ops->attention_backward(&args);
  rpi_float_leave(caller);
  return status;
}

bool rpi_is_show(int what) {
  const int kind = what / 10 * 10;
  const bool part = kind == RP_SHOW_KEY || kind == RP_SHOW_QUERY || kind == RP_SHOW_BIAS;
  return part ? what - kind < RP_TERMS : what >= 0 && what <= RP_SHOW_CONTENT;
}

/* Everything of a map but the arrays. */
static rp_status check_map(const rp_attention *a, int what, int64_t b, int64_t head, int64_t row,
                           int64_t rows, int64_t to_stride) {
  RPI_CHECK(rpi_is_show(what), RP_ERROR_ARGUMENT, "attention: what=%d, must be " RPI_SHOWS, what);
  RPI_CHECK(a->B > 0 && a->H > 0, RP_ERROR_SHAPE,
            "attention: B=%lld and H=%lld, must be at least 1 for a map", (rpi_wide)a->B,
            (rpi_wide)a->H);
  RPI_CHECK(b >= 0 && b < a->B, RP_ERROR_ARGUMENT, "attention: b=%lld, must be from 0 to %lld",
            (rpi_wide)b, (rpi_wide)a->B - 1);
  RPI_CHECK(head >= 0 && head < a->H, RP_ERROR_ARGUMENT,
            "attention: head=%lld, must be from 0 to %lld", (rpi_wide)head, (rpi_wide)a->H - 1);
  const int64_t queries = rpi_queries_of(a, b), keys = rpi_keys_of(a, b);
  RPI_CHECK(row >= 0 && rows >= 0 && row <= queries && rows <= queries - row, RP_ERROR_SHAPE,
            "attention: rows=%lld from row=%lld, but sequence %lld has %lld queries",
            (rpi_wide)rows, (rpi_wide)row, (rpi_wide)b, (rpi_wide)queries);
  RPI_CHECK(to_stride >= keys && to_stride <= RPI_LIMIT, RP_ERROR_SHAPE,
            "attention: to_stride=%lld, must be at least the sequence's %lld keys",
            (rpi_wide)to_stride, (rpi_wide)keys);
  return RP_OK;
}

static rp_status check_map_array(const rp_attention *a, rp_rows q, rp_rows k, int64_t keys,
                                 int64_t rows, const rp_real *to, int64_t to_stride) {
  const rp_attention read = rpi_shown_of(a, RP_SHOW_SCORES);
  rpi_array arrays[RPI_TABLES + 3];
  int count = rpi_tables(&read, NULL, arrays);
  arrays[count++] = array_of(a, "q", q, QUERIES, a->D);
  arrays[count++] = array_of(a, "k", k, KEYS, a->D);
  arrays[count] = rpi_dense("to", to, keys);
  arrays[count].axes[2] = (axis){keys == 0 ? 0 : rows, to_stride};
  RPI_TRY(rpi_check_rows("attention", &arrays[count], true));
  return rpi_check_apart("attention", arrays, count, count + 1);
}

static rp_status map(const rp_attention *a, rp_rows q, rp_rows k, int what, int64_t b, int64_t head,
                     int64_t row, int64_t rows, rp_real *to, int64_t to_stride) {
  const rp_ops *ops = NULL;
  RPI_TRY(rpi_placement_ops("attention", a->placement, &ops));
  rpi_attention_map_args args = {.shape = a,
                                 .q = q,
                                 .k = k,
                                 .what = what,
                                 .b = b,
                                 .head = head,
                                 .row = row,
                                 .rows = rows,
                                 .to = to,
                                 .to_stride = to_stride,
                                 .workers = rp_get_threads()};
  RPI_TRY(ops->attention_map(&args, &args.workspace_bytes));
  RPI_TRY_MEMORY(ops->allocate(args.workspace_bytes, &args.workspace),
                 "attention: no memory for a workspace of %lld bytes",
                 (rpi_wide)args.workspace_bytes);
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = ops->attention_map(&args, NULL);
  rpi_float_leave(caller);
  ops->release(args.workspace);
  return status;
}

rp_status rp_attention_map(const rp_attention *given, rp_rows q, rp_rows k, int what, int64_t b,
                           int64_t head, int64_t row, int64_t rows, rp_real *to,
                           int64_t to_stride) {
  rp_attention a;
  RPI_TRY(check_shape(given, &a));
  RPI_TRY(check_input(&a, "q", q, QUERIES, a.D));
  RPI_TRY(check_input(&a, "k", k, KEYS, a.D));
  RPI_TRY(check_map(&a, what, b, head, row, rows, to_stride));
  RPI_TRY(check_map_array(&a, q, k, rpi_keys_of(&a, b), rows, to, to_stride));
  RPI_TRY(rpi_check_labels(&a));
  return map(&a, q, k, what, b, head, row, rows, to, to_stride);
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
  a.key[0] = (rp_relation){.table = key_table, .row_stride = D, .left = k, .right = k};
  a.value[0] = (rp_relation){.table = value_table, .row_stride = D, .left = k, .right = k};
  RPI_CHECK(k >= 0 && k <= RPI_LIMIT, RP_ERROR_ARGUMENT,
            "attention: k=%lld, must be from 0 to 2^40", (rpi_wide)k);
  int64_t bytes = 0, head_stride = 0, batch_stride = 0, all = 0;
  RPI_CHECK(rpi_multiply(N, D, &head_stride) && rpi_multiply(head_stride, H, &batch_stride) &&
                rpi_multiply(batch_stride, B, &all) && all <= INT64_MAX / 16,
            RP_ERROR_SHAPE,
            "attention: B=%lld, H=%lld, N=%lld and D=%lld must not be negative, nor their product "
            "overflow",
            (rpi_wide)B, (rpi_wide)H, (rpi_wide)N, (rpi_wide)D);
  RPI_CHECK(keys || all == 0, RP_ERROR_ARGUMENT, "attention: keys is NULL");
  RPI_CHECK(values || all == 0, RP_ERROR_ARGUMENT, "attention: values is NULL");
  RPI_TRY(rp_attention_workspace(&a, &bytes, NULL));
  const int64_t table = (2 * k + 1) * D;
  const rpi_array arrays[] = {rpi_dense("q", q, all),
                              rpi_dense("keys", keys, all),
                              rpi_dense("values", values, all),
                              rpi_dense("key_table", key_table, table),
                              rpi_dense("value_table", value_table, table),
                              rpi_dense("out", out, all)};
  RPI_TRY(rpi_check_apart("attention", arrays, 5, 6)); /* by the names they have here */
  rp_status status = RP_ERROR_MEMORY;
  /* another thread may call rp_set_threads between the question and the call: ask again */
  for (int attempt = 0; status == RP_ERROR_MEMORY && attempt < 100; attempt++) {
    int64_t now = 0;
    RPI_TRY(rp_attention_workspace(&a, &now, NULL));
    bytes = rpi_max(now, bytes);
    void *const workspace = rpi_allocate((size_t)bytes);
    RPI_CHECK(workspace, RP_ERROR_MEMORY, "attention: no memory for a workspace of %lld bytes",
              (rpi_wide)bytes);
    status = rp_attention_forward(&a, (rp_rows){q, batch_stride, head_stride, D},
                                  (rp_rows){keys, batch_stride, head_stride, D},
                                  (rp_rows){values, batch_stride, head_stride, D},
                                  (rp_rows_out){out, batch_stride, head_stride, D}, NULL, workspace,
                                  bytes);
    rpi_release(workspace);
  }
  return status;
}
