/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_run.h: a shape through every table that this machine can run, forward and
 * backward, against attention_oracle.h.
 *
 *   - Whatever no kernel may read is NaN: margins of arrays, gaps between rows, rows
 *     beyond a length, the workspace, the outputs of activations.
 *   - Whatever no kernel may write is checked to be untouched, bit by bit. The workspace
 *     is exactly as large as the table says.
 *   - 1, 2, 3 and 8 threads give the same bits; in a small run 8 and 1, in a tiny one 8 alone.
 *   - The same again, by 8 and 1, with operands rounded to bf16. Both factors of every product are
 *     then off by its unit at most, and so are results by twice their size in it.
 *   - Where products are instructions of bf16, their twin gives the same bits.
 */
#ifndef ATTENTION_RUN_H
#define ATTENTION_RUN_H

#include "attention_oracle.h"

static array position_bias_create(const shape *s, bool output) {
  const int64_t rows = s->position_bias ? s->H : 0, wide_row = s->D + s->gap;
  array x = array_create(rows * wide_row, output, output ? CANARY : (real)NAN);
  x.head = wide_row;
  for (int64_t h = 0; h < rows; h++) fill_number_row(&x, h * wide_row, s->D);
  return x;
}

static attention_case case_create(const shape *given) {
  attention_case c = {.s = *given};
  const shape *const s = &c.s;
  for (int64_t b = 0; b < s->B; b++) {
    const bool ragged = s->lengths == RAGGED;
    c.lengths[b] = ragged ? s->N * (s->B - b) / s->B - (b == 3 ? s->N / 4 : 0) : s->N;
    c.key_lengths[b] = ragged ? s->M * (b + 1) / (s->B + 1) : s->M;
    c.starts[b] = s->start + b;
    c.ordinals[b] = s->ordinals ? 77u * (uint32_t)(5 - b) : DROPOUT_FIRST + (uint32_t)b;
    c.offsets[b + 1] = c.offsets[b] + c.lengths[b];
    c.key_offsets[b + 1] = c.key_offsets[b] + c.key_lengths[b];
  }
  const int64_t queries = c.offsets[s->B], keys = c.key_offsets[s->B];
  c.terms = (double)(s->B * s->H * s->N + s->M + s->D + s->Dv);
  c.q = rows_create(s, s->N, queries, s->D, false);
  c.k = rows_create(s, s->M, keys, s->D, false);
  c.v = rows_create(s, s->M, keys, s->Dv, false);
  c.dout = rows_create(s, s->N, queries, s->Dv, false);
  fill_rows(&c, &c.q, false, s->D, 2);
  fill_rows(&c, &c.k, true, s->D, 2);
  fill_rows(&c, &c.v, true, s->Dv, 1);
  fill_rows(&c, &c.dout, false, s->Dv, 1);
  for (int t = 0; t < TERMS; t++) {
    c.table[t] = table_create(s, t, false);
    make_map(&c, t);
  }
  if (s->tied) {
    array_free(&c.table[VALUE * RP_TERMS]);
    c.table[VALUE * RP_TERMS] = c.table[0];
  }
  if (s->mask) make_mask(&c);
  c.position_bias = position_bias_create(s, false);
  c.out = rows_create(s, s->N, queries, s->Dv, true);
  shape lse = *s; /* [B, H, N], or [H, tokens] */
  lse.gap = 0;
  if (s->layout == ROWS_FIRST) lse.layout = HEADS_FIRST;
  c.lse = rows_create(&lse, s->N, queries, 1, true);
  if (s->layout == PACKED) {
    c.lse.head = queries;
    c.lse.row = 1;
  }
  c.dq = rows_create(s, s->N, queries, s->D, true);
  c.dk = rows_create(s, s->M, keys, s->D, true);
  c.dv = rows_create(s, s->M, keys, s->Dv, true);
  shape untied = *s;
  if (s->tied) untied.value.table = ABSENT;
  for (int t = 0; t < TERMS; t++) c.dtable[t] = table_create(&untied, t, true);
  c.dposition_bias = position_bias_create(s, true);
  if (s->huge != HUGE_NOWHERE) make_huge(&c);
  expect_all(&c);
  return c;
}

static void case_free(attention_case *c) {
  array *const inputs[] = {&c->q, &c->k, &c->v, &c->dout, &c->position_bias};
  for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++) array_free(inputs[i]);
  if (c->s.tied) c->table[VALUE * RP_TERMS] = (array){0};
  for (int t = 0; t < TERMS; t++) {
    array_free(&c->table[t]);
    map_free(&c->map[t]);
  }
  for (int i = 0; i < OUTPUTS; i++) array_free(output_of(c, i));
  free(c->mask);
}

/* ---- running it --------------------------------------------------------------- */

static rp_rows rows_of(const array *x) { return (rp_rows){x->data, x->batch, x->head, x->row}; }
static rp_rows_out rows_out(const array *x) {
  return (rp_rows_out){x->data, x->batch, x->head, x->row};
}

static rp_relation relation_of(const attention_case *c, int t) {
  const term *const own = term_of(&c->s, t);
  const map_data *const m = &c->map[t];
  const bool packed = c->s.layout == PACKED;
  if (own->table == ABSENT) return (rp_relation){.table = NULL};
  return (rp_relation){.table = c->table[t].data,
                       .head_stride = c->table[t].head,
                       .row_stride = c->table[t].row,
                       .rows = table_rows(own),
                       .map = own->map,
                       .left = own->left,
                       .right = own->right,
                       .beyond = own->beyond,
                       .buckets = m->buckets,
                       .query_positions = m->query_positions,
                       .key_positions = m->key_positions,
                       .query_position_stride = c->s.N,
                       .key_position_stride = c->s.M,
                       .labels = m->labels,
                       .label_bytes = own->bytes,
                       .label_batch_stride = m->label_batch,
                       .label_head_stride = m->label_head,
                       .label_row_stride = c->s.M,
                       .label_starts = packed ? m->label_starts : NULL,
                       .edge_starts = m->edge_starts,
                       .edge_keys = m->edge_keys,
                       .edge_labels = m->edge_labels};
}

static rp_attention describe(const attention_case *c) {
  static rp_placement rounded;
  rp_attention a = rp_attention_default();
  if (c->rounded) {
    rounded = rp_placement_default();
    rounded.precision = RP_BF16;
    a.placement = &rounded;
  }
  a.B = c->s.B;
  a.H = c->s.H;
  a.N = c->s.N;
  a.M = c->s.M;
  a.D = c->s.D;
  a.Dv = c->s.Dv;
  if (c->s.layout == PACKED) {
    a.offsets = c->offsets;
    a.key_offsets = c->key_offsets;
  } else if (c->s.lengths == RAGGED) {
    a.lengths = c->lengths;
    a.key_lengths = c->key_lengths;
  }
  if (c->s.start != START_DEFAULT) a.query_start = c->starts;
  a.causal = c->s.causal;
  a.scale = c->s.scale;
  rp_relation *const relations[] = {a.key, a.query, a.bias, a.value};
  for (int t = 0; t < TERMS; t++) relations[t / RP_TERMS][t % RP_TERMS] = relation_of(c, t);
  if (c->s.position_bias) a.position_bias = c->position_bias.data;
  a.position_bias_stride = c->position_bias.head;
  if (c->s.window) {
    a.window_left = c->s.window_left;
    a.window_right = c->s.window_right;
  }
  a.mask = (rp_mask){.data = c->mask,
                     .batch_stride = c->mask_batch,
                     .head_stride = c->mask_head,
                     .row_stride = c->s.M,
                     .starts = c->s.layout == PACKED ? c->mask_starts : NULL};
  a.softcap = c->s.softcap;
  a.dropout = c->s.dropout;
  memcpy(a.dropout_key, dropout_key, sizeof a.dropout_key);
  a.dropout_site = DROPOUT_SITE;
  a.dropout_first = DROPOUT_FIRST;
  if (c->s.ordinals) a.dropout_ordinals = c->ordinals;
  return a;
}

/* Exactly `bytes`, all NaN, and a margin behind. */
typedef struct workspace {
  unsigned char *memory;
  int64_t bytes;
} workspace;

static workspace workspace_create(int64_t bytes) {
  void *memory = NULL;
  if (posix_memalign(&memory, RPI_ALIGN, (size_t)bytes + BEHIND) != 0) abort();
  memset(memory, 0xFF, (size_t)bytes + BEHIND);
  return (workspace){memory, bytes};
}

static bool workspace_free(workspace *w) {
  bool untouched = true;
  for (int i = 0; i < BEHIND; i++) untouched = untouched && w->memory[w->bytes + i] == 0xFF;
  free(w->memory);
  return untouched;
}

static bool run(const rp_ops *ops, attention_case *c, bool with_tables) {
  const rp_attention a = describe(c);
  int64_t forward = -1, backward = -1;
  if (!CHECK_INT(ops->attention_workspace(&a, rp_get_threads(), &forward, &backward), RP_OK))
    return false;
  workspace w = workspace_create(forward);
  const rpi_attention_args args = {.shape = &a,
                                   .q = rows_of(&c->q),
                                   .k = rows_of(&c->k),
                                   .v = rows_of(&c->v),
                                   .out = rows_out(&c->out),
                                   .lse = c->lse.data,
                                   .workers = rp_get_threads(),
                                   .workspace = w.memory,
                                   .workspace_bytes = w.bytes};
  bool fine = CHECK_INT(ops->attention_forward(&args), RP_OK);
  fine = CHECK(workspace_free(&w)) && fine;
  w = workspace_create(backward);
  rp_attention_gradients gradients = {
      .q = rows_out(&c->dq), .k = rows_out(&c->dk), .v = rows_out(&c->dv)};
  rp_real **const to[] = {gradients.key, gradients.query, gradients.bias, gradients.value};
  for (int t = 0; with_tables && t < TERMS; t++) {
    array *const table = c->s.tied && t == VALUE * RP_TERMS ? &c->dtable[0] : &c->dtable[t];
    to[t / RP_TERMS][t % RP_TERMS] = term_of(&c->s, t)->table != ABSENT ? table->data : NULL;
  }
  if (with_tables && c->s.position_bias) gradients.position_bias = c->dposition_bias.data;
  const rpi_attention_backward_args back = {.shape = &a,
                                            .q = args.q,
                                            .k = args.k,
                                            .v = args.v,
                                            .out = rows_of(&c->out),
                                            .dout = rows_of(&c->dout),
                                            .lse = c->lse.data,
                                            .workers = rp_get_threads(),
                                            .workspace = w.memory,
                                            .workspace_bytes = w.bytes,
                                            .gradients = &gradients};
  fine = CHECK_INT(ops->attention_backward(&back), RP_OK) && fine;
  return CHECK(workspace_free(&w)) && fine;
}

static void say(const rp_ops *ops, const attention_case *c, const char *what, int output) {
  const shape *const s = &c->s;
  printf(
      "\n  %s: %s: %s; B=%d H=%d N=%d M=%d D=%d Dv=%d causal=%d layout=%d lengths=%d start=%d "
      "gap=%d rounded=%d tied=%d scale=%g position_bias=%d window=%d {%d, %d} mask=%d softcap=%g dropout=%g ordinals=%d",
      ops->name, output_names[output], what, (int)s->B, (int)s->H, (int)s->N, (int)s->M, (int)s->D,
      (int)s->Dv, s->causal, s->layout, s->lengths, (int)s->start, (int)s->gap, c->rounded, s->tied,
      s->scale, s->position_bias, s->window, (int)s->window_left, (int)s->window_right, s->mask,
      s->softcap, s->dropout, s->ordinals);
  for (int t = 0; t < TERMS; t++) {
    const term *const own = term_of(s, t);
    if (own->table == ABSENT) continue;
    printf(
        "\n    %s table=%d map=%d left=%d right=%d beyond=%d rows=%d buckets=%d positions=%d far=%d "
        "bytes=%d by_sequence=%d by_head=%d",
        output_names[ACTIVATIONS + t], own->table, own->map, (int)own->left, (int)own->right,
        own->beyond, (int)own->rows, own->buckets, own->positions, own->far, own->bytes,
        own->by_sequence, own->by_head);
  }
}

static void compare(const rp_ops *ops, const attention_case *c, const array *x, int output) {
  double worst = 0;
  int64_t place = -1;
  for (int64_t i = 0; i < x->all; i++) {
    const wide got = x->memory[i];
    if (got == x->expected[i]) continue;
    const double error = (double)size_of(got - x->expected[i]);
    const double unit = 2 * sqrt(c->terms) * UNIT + (c->rounded ? 2 * BF16_UNIT : 0);
    const double bound = x->size[i] > 0 ? unit * (double)x->size[i] + TINY : 0;
    const double share = error <= bound ? error / bound : INFINITY; /* a NaN is beyond */
    const double measured = isfinite(error) && bound > 0 ? error / bound : share;
    if (measured > worst) {
      worst = measured;
      place = i;
    }
  }
  if (CHECK(worst <= 1)) return;
  char what[160];
  snprintf(what, sizeof what, "at %lld is %.9g, expected %.9g: %.3g of the allowed error",
           (long long)(place - BEFORE), (double)x->memory[place], (double)x->expected[place],
           worst);
  say(ops, c, what, output);
}

/* What stands in the outputs before a run: canaries, and of tables what they hold. */
static void *bits_of(const array *x) {
  void *const copy = memory_of(x->all, sizeof(real));
  memcpy(copy, x->memory, (size_t)x->all * sizeof(real));
  return copy;
}

static void test_shape_in(const shape *s, bool rounded) {
  static const int threads[] = {8, 1, 2, 3};
  const int runs = is_tiny_run() ? 1 : is_small_run() || rounded ? 2 : 4;
  attention_case c = case_create(s);
  c.rounded = rounded;
  void *before[OUTPUTS], *first[OUTPUTS];
  for (int i = 0; i < OUTPUTS; i++) before[i] = bits_of(output_of(&c, i));
  for (int t = 0; table_at(t) != NULL; t++) {
    const rp_ops *const ops = table_at(t);
    const int twins = rounded && has_twin(ops) ? 1 : 0;
    for (int n = 0; n <= runs + twins; n++) { /* one without gradients of tables, and the twin's */
      const bool with_tables = n != runs, by_twin = n > runs;
      const char *const other = by_twin       ? "the twin has other bits"
                                : with_tables ? "the number of threads changes bits"
                                              : "not wanted";
      for (int i = 0; i < OUTPUTS; i++) {
        array *const x = output_of(&c, i);
        memcpy(x->memory, before[i], (size_t)x->all * sizeof(real));
      }
      CHECK_INT(rp_set_threads(threads[n % runs]), RP_OK);
      rpi_cpu_hide(by_twin ? RPI_CPU_BF16 : 0);
      if (!run(ops, &c, with_tables)) say(ops, &c, "failed", 0);
      rpi_cpu_hide(0);
      for (int i = 0; i < OUTPUTS; i++) {
        const array *const x = output_of(&c, i);
        const size_t bytes = (size_t)x->all * sizeof(real);
        if (n == 0) first[i] = bits_of(x);
        if (n == 0 || (!with_tables && i < ACTIVATIONS)) {
          compare(ops, &c, x, i);
        } else if (!CHECK(memcmp(x->memory, with_tables ? first[i] : before[i], bytes) == 0)) {
          say(ops, &c, other, i);
        }
      }
    }
    for (int i = 0; i < OUTPUTS; i++) free(first[i]);
  }
  for (int i = 0; i < OUTPUTS; i++) free(before[i]);
  case_free(&c);
}

static void test_shape(const shape *s) {
  const uint32_t drawn = state;
  test_shape_in(s, false);
  if (sizeof(real) > 4 || is_device_run()) return;
  if (s->huge != HUGE_NOWHERE) return; /* in bf16 that is infinite */
  const uint32_t then = state;
  state = drawn; /* the same numbers */
  test_shape_in(s, true);
  state = then;
}

#endif
