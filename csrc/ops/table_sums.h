/* SPDX-License-Identifier: Apache-2.0
 *
 * table_sums.h: the gradients of relation tables, summed in a fixed order.
 *
 * Every item of a phase adds to the same few table rows. A slot is a run of items of
 * one head whose borders depend on shapes alone; one task does a slot, into memory of
 * its own, and after each phase the slots are added up in order:
 *
 *   slot   item item item | item item item | item item ...      tasks, any order
 *             sums 0           sums 1          sums 2           [columns + 1][width]
 *   table gradient += sums 0, then sums 1, then sums 2          tasks own table rows
 *
 * The last line of the sums is for table row 0, which has no column of its own where
 * it is subtracted from the others (band.h).
 */
#ifndef RPI_TABLE_SUMS_H
#define RPI_TABLE_SUMS_H

#include "ops/attention.h"

#define RPI_SLOTS 64             /* slots aimed at in a phase: enough for as many threads */
#define RPI_SLOT_PAIRS (1 << 14) /* ... unless they had fewer (query, key) pairs than this */
#define RPI_REDUCE 16            /* table rows that one task of the reduction owns */

/* Sums of one term, for the distances first to last; none where first > last. */
typedef struct table_sums {
  int64_t first, last;
  real *lines; /* [columns + 1][width, padded]; NULL: the gradient is not wanted */
} table_sums;

static int64_t columns_of(const table_sums *t) { return rpi_max(t->last - t->first + 1, 0); }

typedef struct slot {
  int64_t head;
  pair begin; /* items from here on, in the order of pair_from */
  int64_t items;
  table_sums key, value;
} slot;

/* The slots of the phase at hand, of all heads, and memory for those of any phase. */
typedef struct slot_list {
  const rp_attention *shape;
  const bounds *n;
  int64_t nearest;
  int64_t phase, per_head; /* slots of head h follow those of head h - 1 */
  slot *slots;
  int64_t key_lines, value_lines; /* of one slot's memory */
  real *key_memory, *value_memory;
} slot_list;

static table_sums widened(table_sums sums, const term *t, const reach *r) {
  const window w = window_of(t, r->nearest, r->farthest);
  if (w.columns == 0) return sums;
  const bool none = sums.first > sums.last;
  const int64_t last = w.first + w.columns - 1;
  sums.first = none ? w.first : rpi_min(sums.first, w.first);
  sums.last = none ? last : rpi_max(sums.last, last);
  return sums;
}

static int64_t pair_cost(const rectangle *r) {
  return rpi_max(r->rows, 0) * rpi_max(r->keys, 0) + 1;
}

static pair pair_after(const rp_attention *s, int64_t phase, const pair *p) {
  return pair_from(s, phase, p->b, p->query_chunk + 1);
}

/* The most work that a slot of this phase takes on. */
static int64_t slot_share(const rp_attention *s, int64_t phase) {
  int64_t total = 0;
  for (pair p = pair_from(s, phase, 0, 0); p.b < s->B; p = pair_after(s, phase, &p)) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const rectangle r = rectangle_of(s, &seq, &p);
    total += pair_cost(&r);
  }
  const int64_t per_head = (RPI_SLOTS + s->H - 1) / s->H;
  return rpi_max((total + per_head - 1) / per_head, RPI_SLOT_PAIRS);
}

/* Lists the slots of a phase for one head (slots == NULL: counts them). A slot ends
 * where it has its share, or where its sums would span more columns than one item can
 * reach: the memory of a slot is bounded by the chunks, not by the table. */
static int64_t list_slots(const slot_list *list, int64_t phase, slot *slots) {
  const rp_attention *const s = list->shape;
  const term key = term_of(&s->key, 0, s->D, list->nearest);
  const term value = term_of(&s->value, 0, s->Dv, list->nearest);
  const int64_t share = slot_share(s, phase), most = list->n->queries + list->n->keys;
  const slot empty = {.key.first = 1, .value.first = 1};
  int64_t count = 0, cost = 0;
  slot current = empty;
  for (pair p = pair_from(s, phase, 0, 0); p.b < s->B; p = pair_after(s, phase, &p)) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const rectangle r = rectangle_of(s, &seq, &p);
    const reach reached = reach_of(&seq, s->causal, r.query, r.rows, r.key, r.keys);
    slot wider = current;
    wider.key = widened(wider.key, &key, &reached);
    wider.value = widened(wider.value, &value, &reached);
    if (count == 0 || cost + pair_cost(&r) > share || columns_of(&wider.key) > most ||
        columns_of(&wider.value) > most) {
      count++;
      cost = 0;
      wider = empty;
      wider.begin = p;
      wider.key = widened(wider.key, &key, &reached);
      wider.value = widened(wider.value, &value, &reached);
    }
    wider.items++;
    cost += pair_cost(&r);
    current = wider;
    if (slots) slots[count - 1] = current;
  }
  return count;
}

static slot_list slots_carve(rpi_arena *arena, const rp_attention *s, const bounds *n,
                             int64_t nearest) {
  slot_list list = {.shape = s, .n = n, .nearest = nearest};
  const int64_t phases = phase_count(s);
  int64_t most = 0;
  for (int64_t phase = 0; phase < phases; phase++) {
    most = rpi_max(most, list_slots(&list, phase, NULL));
  }
  const int64_t slots = most * s->H, real_bytes = sizeof(real);
  list.key_lines = widest_window(&s->key, n->queries, n->keys) + 1;
  list.value_lines = widest_window(&s->value, n->queries, n->keys) + 1;
  list.slots = rpi_arena_take(arena, slots, sizeof *list.slots);
  list.key_memory = rpi_arena_take(arena, slots * list.key_lines, n->width * real_bytes);
  list.value_memory = rpi_arena_take(arena, slots * list.value_lines, n->value_width * real_bytes);
  return list;
}

static void slots_open(slot_list *list, int64_t phase, const rp_attention_gradients *g) {
  const rp_attention *const s = list->shape;
  list->phase = phase;
  list->per_head = list_slots(list, phase, list->slots);
  for (int64_t i = 0; i < list->per_head * s->H; i++) {
    slot *const at = list->slots + i;
    *at = list->slots[i % list->per_head];
    at->head = i / list->per_head;
    at->key.lines = s->key.table && g->key_table
                        ? list->key_memory + i * list->key_lines * list->n->width
                        : NULL;
    at->value.lines = s->value.table && g->value_table
                          ? list->value_memory + i * list->value_lines * list->n->value_width
                          : NULL;
  }
}

static void sums_clear(const table_sums *t, int64_t width) {
  if (t->lines) memset(t->lines, 0, (size_t)((columns_of(t) + 1) * width) * sizeof(real));
}

/* The reduction of one term. */
typedef struct reduction {
  const slot_list *list;
  term t; /* of head 0: maps are the same for all heads */
  bool value;
  int64_t head_stride, tasks_per_table, padded;
  real factor;
  real *gradient;
} reduction;

static void add_line(real *to, const real *from, int64_t width, real factor) {
  for (int64_t c = 0; c < width; c++) to[c] += factor * from[c];
}

/* Part 0 of a table is row 0 of a shifted term, part i the i-th RPI_REDUCE rows. */
static void reduce_task(void *context, int64_t task, int worker) {
  (void)worker;
  const reduction *const r = context;
  const int64_t table = task / r->tasks_per_table, part = task % r->tasks_per_table;
  const int64_t begin = (part - 1) * RPI_REDUCE, end = begin + RPI_REDUCE;
  const int64_t slots = r->list->per_head * (r->head_stride ? 1 : r->list->shape->H);
  const slot *const from = r->list->slots + table * r->list->per_head;
  real *const gradient = r->gradient + table * r->head_stride;
  for (int64_t i = 0; i < slots; i++) {
    const table_sums *const t = r->value ? &from[i].value : &from[i].key;
    const int64_t row0 = t->first + r->t.left, rows = columns_of(t);
    if (part > 0) {
      for (int64_t row = rpi_max(begin, row0); row < rpi_min(end, row0 + rows); row++) {
        add_line(gradient + row * r->t.stride, t->lines + (row - row0) * r->padded, r->t.width,
                 r->factor);
      }
    } else if (r->t.shifted) {
      add_line(gradient, t->lines + rows * r->padded, r->t.width, r->factor);
    }
  }
}

static void reduce_term(const slot_list *list, bool value, real *gradient, int workers) {
  const rp_attention *const s = list->shape;
  const rp_relation *const relation = value ? &s->value : &s->key;
  if (!relation->table || !gradient) return;
  const int64_t T = relation->left + relation->right + 1;
  reduction r = {.list = list,
                 .t = term_of(relation, 0, value ? s->Dv : s->D, list->nearest),
                 .value = value,
                 .head_stride = relation->head_stride,
                 .tasks_per_table = 1 + (T + RPI_REDUCE - 1) / RPI_REDUCE,
                 .padded = value ? list->n->value_width : list->n->width,
                 .factor = value ? (real)1 : scale_of(s),
                 .gradient = gradient};
  rpi_parallel_for(r.tasks_per_table * (r.head_stride ? s->H : 1), workers, reduce_task, &r);
}

/* One term after the other: tied tables share their gradient. */
static void slots_reduce(const slot_list *list, const rp_attention_gradients *g, int workers) {
  reduce_term(list, false, g->key_table, workers);
  reduce_term(list, true, g->value_table, workers);
}

#endif
