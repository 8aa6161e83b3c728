/* SPDX-License-Identifier: Apache-2.0
 *
 * table_sums.h: the gradients of relation tables, summed in a fixed order.
 *
 * Every item of a phase adds to the same few table rows. A slot is a run of items of
 * one head whose borders depend on shapes and positions alone; one task does a slot, into
 * memory of its own, and after each phase the slots are added up in order:
 *
 *   slot   item item item | item item item | item item ...      tasks, any order
 *             sums 0           sums 1          sums 2           [columns + 1][width]
 *   table gradient += sums 0, then sums 1, then sums 2          tasks own table rows
 *
 * The lines of a band's sums are its distances, after a line 0 for all before the first: the
 * reduction finds each distance's row. Those of a looked-up term are table rows: all, between
 * explicit positions those that the slot's items can meet, and of long tables of labels and edges
 * those that they met, in the order of their first pair.
 */
#ifndef RPI_TABLE_SUMS_H
#define RPI_TABLE_SUMS_H

#include "base/threads.h"
#include "ops/attention.h"
#include "ops/pairs.h"

#define RPI_SLOTS 64               /* slots aimed at a time: enough for as many threads */
#define RPI_SLOT_NUMBERS (1 << 22) /* ... or would hold more than this together */
#define RPI_SLOT_MOST (1 << 23)    /* ... where they are very long: fewer than four for no more */
#define RPI_SLOT_PAIRS (1 << 14)   /* ... unless they had fewer (query, key) pairs than this */
#define RPI_LISTED_PAIRS 64        /* lines are listed of tables with more than a row for so many */
#define RPI_LISTED_EDGES 16        /* ... pairs of a head that may meet them, or edges */
#define RPI_REDUCE 16              /* table rows that one task of the reduction owns */
#define RPI_REDUCE_BUCKETS 128     /* ... where it looks for them among all distances */

static int64_t columns_of(const table_sums *t) { return rpi_max(t->last - t->first + 1, 0); }

/* What is summed: the bands by kind, then the looked-up terms as pair_terms lists them. */
enum { SUM_OF_KEYS, SUM_OF_VALUES, SUM_OF_QUERIES, BAND_SUMS };
#define RPI_SUMMED (BAND_SUMS + RPI_LOOKUPS)

typedef struct slot {
  int64_t head;
  pair begin; /* items from here on, in the order of pair_from */
  int64_t items;
  table_sums sums[RPI_SUMMED];
} slot;

/* The slots of the phase at hand, and memory for those of any phase: of all heads or, of those that
 * share keys, of one at a time. */
typedef struct slot_list {
  const rp_attention *shape;
  const bounds *n;
  pair_terms pairs; /* of head 0 */
  term band[BAND_SUMS];
  int64_t few, heads;      /* slots aimed at a time; heads that have some */
  int64_t phase, per_head; /* slots of a head follow those of the one before */
  slot *slots;
  int64_t most[RPI_SUMMED], width[RPI_SUMMED]; /* of one slot's memory: lines, padded width */
  int64_t listed[RPI_SUMMED]; /* 1 + rows that line_of names; 0: lines lie as rows do */
  real *lines[RPI_SUMMED], *numbers[RPI_SUMMED];
  int32_t *line_of[RPI_SUMMED];
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

/* Does an item meet only some rows of a looked-up table, those that its positions span? */
static bool met_by_positions(const lookup *x) {
  return x->way == LOOKUP_MET && x->relation->map == RP_MAP_BAND && !x->relation->buckets;
}

/* Have sums only the lines of rows that were met? That pays where most may not be: to look every
 * pair's line up costs a tenth more where all are. */
static bool lists_rows(const rp_attention *s, const lookup *x) {
  if (x->way == LOOKUP_WHOLE || met_by_positions(x)) return false;
  if (x->way == LOOKUP_EACH) return edge_count(s, x->relation) < RPI_LISTED_EDGES * x->rows;
  int64_t pairs = 0; /* of which any number may have a label */
  for (int64_t b = 0; b < s->B; b++) {
    const rpi_sequence seq = sequence_of(s, b);
    pairs += seq.queries * seq.keys;
  }
  return pairs < RPI_LISTED_PAIRS * x->rows;
}

/* Rows of a looked-up table that an item can meet, as first and last of its sums. */
static table_sums met_by(const rp_attention *s, const lookup *x, const rpi_sequence *seq, int64_t b,
                         const rectangle *r) {
  if (!met_by_positions(x)) {
    return (table_sums){.first = 0, .last = x->rows - 1};
  }
  const places at = places_of(x->relation, s, seq, b, r->query, r->key);
  const spread d = spread_of(x->relation, &at, r->rows, r->keys);
  if (d.first > d.last) return (table_sums){.first = 1};
  return (table_sums){.first = d.first + x->relation->left, .last = d.last + x->relation->left};
}

/* Both together. */
static table_sums joined(table_sums a, table_sums b) {
  if (a.first > a.last) return b;
  if (b.first > b.last) return a;
  return (table_sums){.first = rpi_min(a.first, b.first), .last = rpi_max(a.last, b.last)};
}

/* The most rows of a looked-up table that any item meets. */
static int64_t most_met(const rp_attention *s, const lookup *x) {
  int64_t most = 0;
  for (int64_t b = 0; b < s->B; b++) {
    const rpi_sequence seq = sequence_of(s, b);
    const int64_t queries = query_chunks(s, &seq).count, keys = key_chunks(s, &seq).count;
    for (int64_t i = 0; i < queries * keys; i++) {
      const pair p = {b, i / keys, i % keys};
      const rectangle r = rectangle_of(s, &seq, &p);
      const table_sums sums = met_by(s, x, &seq, b, &r);
      most = rpi_max(most, columns_of(&sums));
      if (most == x->rows) return most;
    }
  }
  return most;
}

static int64_t pair_cost(const rectangle *r) {
  return rpi_max(r->rows, 0) * rpi_max(r->keys, 0) + 1;
}

/* Items from this one on that are alike: idle ones cost the same, and widen sums that another of
 * them began by nothing. Not where the rows that an item can meet are a matter of positions: there
 * each is one by itself. */
static int64_t alike(const slot_list *list, int64_t phase, const pair *p) {
  for (int i = 0; i < list->pairs.count; i++) {
    if (met_by_positions(&list->pairs.list[i])) return 1;
  }
  return rpi_max(idle_items(list->shape, phase, p), 1);
}

/* The most work that a slot of this phase takes on. */
static int64_t slot_share(const slot_list *list, int64_t phase) {
  const rp_attention *const s = list->shape;
  int64_t total = 0;
  for (pair p = pair_from(s, phase, 0, 0); p.b < s->B;) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const rectangle r = rectangle_of(s, &seq, &p);
    const int64_t items = alike(list, phase, &p);
    total += items * pair_cost(&r);
    p = pair_after(s, phase, &p, items);
  }
  const int64_t per_head = rpi_divide_up(list->few, list->heads);
  return rpi_max(rpi_divide_up(total, per_head), RPI_SLOT_PAIRS / heads_sharing(s));
}

/* Widens the sums of a slot to what one item more can meet. */
static void widen_all(const slot_list *list, slot *wider, const rpi_sequence *seq, const pair *p,
                      const rectangle *r, const reach *reached) {
  for (int i = 0; i < BAND_SUMS; i++) {
    wider->sums[i] = widened(wider->sums[i], &list->band[i], reached);
  }
  for (int i = 0; i < list->pairs.count; i++) {
    table_sums *const sums = &wider->sums[BAND_SUMS + i];
    *sums = joined(*sums, met_by(list->shape, &list->pairs.list[i], seq, p->b, r));
  }
}

/* Lists the slots of a phase for one head (slots == NULL: counts them). A slot ends
 * where it has its share, or where its sums would span more columns than there is memory for. */
static int64_t list_slots(const slot_list *list, int64_t phase, slot *slots) {
  const rp_attention *const s = list->shape;
  const sight sees = sight_of(s);
  const int64_t share = slot_share(list, phase);
  slot empty = {.head = 0};
  for (int i = 0; i < RPI_SUMMED; i++) empty.sums[i].first = 1;
  int64_t count = 0, cost = 0;
  slot current = empty;
  for (pair p = pair_from(s, phase, 0, 0); p.b < s->B;) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const rectangle r = rectangle_of(s, &seq, &p);
    const reach reached = reach_of(&seq, &sees, r.query, r.rows, r.key, r.keys);
    slot wider = current;
    bool too_wide = false;
    widen_all(list, &wider, &seq, &p, &r, &reached);
    for (int i = 0; i < BAND_SUMS + list->pairs.count; i++) {
      if (list->most[i] == 0 || list->listed[i] > 0) continue;
      too_wide |= columns_of(&wider.sums[i]) >= list->most[i];
    }
    const int64_t each = pair_cost(&r);
    if (count == 0 || cost + each > share || too_wide) {
      count++;
      cost = 0;
      wider = empty;
      wider.begin = p;
      widen_all(list, &wider, &seq, &p, &r, &reached);
    }
    /* this one, and of those like it as many as the slot has a share for */
    const int64_t fit = rpi_max((share - cost) / each, 1);
    const int64_t items = fit == 1 ? 1 : rpi_min(alike(list, phase, &p), fit);
    wider.items += items;
    cost += items * each;
    current = wider;
    if (slots) slots[count - 1] = current;
    p = pair_after(s, phase, &p, items);
  }
  return count;
}

/* Lines that a slot keeps of a looked-up table: what any item meets, and of many items as many
 * as of a band; of few edges no more than there are. */
static int64_t most_kept(const rp_attention *s, const lookup *x, const bounds *n) {
  if (x->way == LOOKUP_EACH) return rpi_min(x->rows, edge_count(s, x->relation));
  return rpi_min(x->rows, rpi_max(most_met(s, x), n->queries + n->keys));
}

static slot_list slots_carve(rpi_arena *arena, const rp_attention *s, const bounds *n) {
  slot_list list = {.shape = s, .n = n, .pairs = pair_terms_of(s, 0, 0)};
  list.heads = s->H / heads_sharing(s);
  list.band[SUM_OF_KEYS] = key_term(s, 0);
  list.band[SUM_OF_VALUES] = value_term(s, 0);
  list.band[SUM_OF_QUERIES] = query_term(s, 0);
  int64_t numbers = 0; /* of one slot */
  for (int i = 0; i < RPI_SUMMED; i++) {
    const lookup *const x = i < BAND_SUMS ? NULL : &list.pairs.list[i - BAND_SUMS];
    if (x && i - BAND_SUMS >= list.pairs.count) break;
    const term *const t = x ? NULL : &list.band[i];
    if (t && !t->present) continue;
    list.most[i] = 1 + (x ? most_kept(s, x, n) : widest_window(t, n->queries, n->keys));
    const bool vectors = x ? x->kind != PAIR_BIAS : t->vector_count > 0;
    list.width[i] = !vectors ? 0 : rpi_round_up(x ? x->width : t->width, RPI_LANES);
    list.listed[i] = x && lists_rows(s, x) ? 1 + x->rows : 0;
    numbers += list.most[i] * (list.width[i] + 1) + list.listed[i];
  }
  /* few slots where one takes much memory: their number is a matter of shapes too */
  const int64_t aimed = rpi_min(RPI_SLOTS, RPI_SLOT_NUMBERS / rpi_max(numbers, 1));
  const int64_t least = rpi_min(4, RPI_SLOT_MOST / rpi_max(numbers, 1));
  list.few = rpi_max(rpi_max(aimed, least), 1);
  const int64_t phases = phase_count(s);
  int64_t most = 0;
  for (int64_t phase = 0; phase < phases; phase++) {
    most = rpi_max(most, list_slots(&list, phase, NULL));
  }
  const int64_t real_bytes = sizeof(real);
  int64_t slots = 0;
  if (!rpi_multiply(most, list.heads, &slots)) arena->failed = true;
  list.slots = rpi_arena_take(arena, slots, sizeof *list.slots);
  for (int i = 0; i < RPI_SUMMED; i++) {
    if (!list.most[i]) continue;
    int64_t lines = 0, named = 0;
    if (!rpi_multiply(slots, list.most[i], &lines) ||
        !rpi_multiply(slots, list.listed[i], &named)) {
      arena->failed = true;
    }
    list.lines[i] = rpi_arena_take(arena, lines, list.width[i] * real_bytes);
    list.numbers[i] = rpi_arena_take(arena, lines, real_bytes);
    list.line_of[i] = rpi_arena_take(arena, named, sizeof *list.line_of[i]);
  }
  return list;
}

/* Does the caller want gradients of terms whose sums these are? */
static bool wants_lines(const slot_list *list, int i, const rp_attention_gradients *g) {
  const lookup *const x = i < BAND_SUMS ? NULL : &list->pairs.list[i - BAND_SUMS];
  if (!list->width[i]) return false;
  bool wanted = false;
  for (int place = 0; place < RP_TERMS; place++) {
    if (x && x->place != place) continue;
    const int kind = x                    ? x->kind
                     : i == SUM_OF_KEYS   ? PAIR_KEY
                     : i == SUM_OF_VALUES ? PAIR_VALUE
                                          : PAIR_QUERY;
    wanted |= (kind == PAIR_KEY     ? g->key[place]
               : kind == PAIR_VALUE ? g->value[place]
                                    : g->query[place]) != NULL;
  }
  return wanted;
}

static bool wants_numbers(const slot_list *list, int i, const rp_attention_gradients *g) {
  const lookup *const x = i < BAND_SUMS ? NULL : &list->pairs.list[i - BAND_SUMS];
  if (x && x->kind == PAIR_BIAS) return g->bias[x->place] != NULL;
  if (i != SUM_OF_KEYS && !(x && x->kind == PAIR_KEY)) return false;
  bool wanted =
      list->shape->position_bias && list->width[i] && (g->position_bias || wants_lines(list, i, g));
  for (int place = 0; i == SUM_OF_KEYS && place < RP_TERMS; place++) {
    const rp_relation *const r = &list->shape->bias[place];
    wanted |= r->table && !is_looked_up(r) && g->bias[place];
  }
  return wanted;
}

/* The slots of a phase: of heads that share keys, of the first. */
static void slots_open(slot_list *list, int64_t phase, const rp_attention_gradients *g) {
  const int64_t sharers = heads_sharing(list->shape);
  list->phase = phase;
  list->per_head = list_slots(list, phase, list->slots);
  for (int64_t i = 0; i < list->per_head * list->heads; i++) {
    slot *const at = list->slots + i;
    *at = list->slots[i % list->per_head];
    at->head = i / list->per_head * sharers;
    for (int x = 0; x < RPI_SUMMED; x++) {
      if (!list->most[x]) continue;
      at->sums[x].lines =
          wants_lines(list, x, g) ? list->lines[x] + i * list->most[x] * list->width[x] : NULL;
      at->sums[x].numbers = wants_numbers(list, x, g) ? list->numbers[x] + i * list->most[x] : NULL;
      const bool listed = list->listed[x] && (at->sums[x].lines || at->sums[x].numbers);
      at->sums[x].line_of = listed ? list->line_of[x] + i * list->listed[x] : NULL;
    }
  }
}

/* The same of the next ones of the heads that share keys, when the sums are added up. */
static void slots_next(slot_list *list) {
  for (int64_t i = 0; i < list->per_head * list->heads; i++) list->slots[i].head++;
}

static void sums_clear(const table_sums *t, int64_t width) {
  const size_t lines = (size_t)columns_of(t) + 1;
  if (t->line_of) {
    memset(t->line_of, 0, lines * sizeof *t->line_of);
    return;
  }
  if (t->lines) memset(t->lines, 0, lines * (size_t)width * sizeof(real));
  if (t->numbers) memset(t->numbers, 0, lines * sizeof(real));
}

/* The reduction of one term's sums into its table's gradient. */
typedef struct reduction {
  const slot_list *list;
  const rp_relation *relation;
  int sums; /* SUM_OF_..., or of a looked-up term */
  bool looked_up, number, with_bias;
  int64_t width, rows, tables, tasks_per_table, rows_per_task;
  int64_t first_task; /* task 1 of a table has these rows; task 0 the first rows of all */
  real factor;
  real *gradient;
} reduction;

static void add_line(real *restrict to, const real *restrict from, int64_t width, real factor) {
  for (int64_t c = 0; c < width; c++) to[c] += factor * from[c];
}

/* Adds line `from` of a slot's sums to a table row. */
static void reduce_line(const reduction *r, const slot *from, int64_t line, real *to) {
  const table_sums *const t = &from->sums[r->sums];
  const rp_attention *const s = r->list->shape;
  if (r->number) {
    *to += t->numbers[line];
    return;
  }
  add_line(to, t->lines + line * r->list->width[r->sums], r->width, r->factor);
  if (r->with_bias) { /* queries met the table with position_bias added */
    add_line(to, s->position_bias + from->head * s->position_bias_stride, r->width,
             r->factor * t->numbers[line]);
  }
}

/* The tasks of a table: the first rows, where the head is, and those that slots of this phase have
 * something for. Of a long table that is little, and phases are many then. */
static void choose_tasks(reduction *r) {
  const slot_list *const list = r->list;
  const int64_t blocks = rpi_divide_up(r->rows, r->rows_per_task);
  r->first_task = 1;
  r->tasks_per_table = blocks;
  if (!r->looked_up && r->relation->buckets) return; /* any row then */
  table_sums met = {.first = 1};
  for (int64_t i = 0; i < list->per_head; i++) met = joined(met, list->slots[i].sums[r->sums]);
  if (met.first > met.last) {
    r->tasks_per_table = rpi_min(blocks, 1);
    return;
  }
  const int64_t to_row = r->looked_up ? 0 : r->relation->left;
  const int64_t first = rpi_max(met.first + to_row, 0) / r->rows_per_task;
  const int64_t last = rpi_min(met.last + to_row, r->rows - 1) / r->rows_per_task;
  r->first_task = rpi_max(rpi_min(first, blocks - 1), 1);
  r->tasks_per_table = rpi_max(last - r->first_task + 1, 0) + 1;
}

/* Asks for the lines of some rows: in the order of their first pair the processor does not foresee
 * the next one, and waiting for each took longer than to add it up. */
RPI_INLINE void expect_lines(const table_sums *t, int64_t first, int64_t last, int64_t width) {
  for (int64_t row = first; t->line_of && row <= last; row++) {
    const int64_t line = line_of_row(t, row);
    if (t->lines && line >= 0) rpi_prefetch_row(t->lines, line * width, width);
  }
}

/* Asks for the lines of some distances of the next slot, which the processor does not foresee
 * either: adding up took twice as long. */
RPI_INLINE void expect_band(const table_sums *t, int64_t first, int64_t last, int64_t width) {
  rpi_prefetch_row(t->lines, (first - t->first + 1) * width, (last - first + 1) * width);
}

/* One part of one table: some of its rows, over all slots in order. */
static void reduce_task(void *context, int64_t task, int worker) {
  (void)worker;
  const reduction *const r = context;
  const int64_t table = task / r->tasks_per_table;
  const int64_t part = task % r->tasks_per_table;
  const int64_t begin = (part ? part - 1 + r->first_task : 0) * r->rows_per_task;
  const int64_t end = rpi_min(begin + r->rows_per_task, r->rows);
  const int64_t slots = r->list->per_head * (r->relation->head_stride ? 1 : r->list->heads);
  const slot *const from = r->list->slots + table * r->list->per_head;
  real *const gradient = r->gradient + from->head * r->relation->head_stride;
  const int64_t stride = r->relation->row_stride;
  const band_part p = part_of(r->relation, 0);
  for (int64_t i = 0; i < slots; i++) {
    const table_sums *const t = &from[i].sums[r->sums];
    if (r->looked_up) {
      const int64_t first = rpi_max(begin, t->first), last = rpi_min(end - 1, t->last);
      if (!r->number) expect_lines(t, first, last, r->list->width[r->sums]);
      for (int64_t row = first; row <= last; row++) {
        const int64_t line = line_of_row(t, row);
        if (line >= 0) reduce_line(r, from + i, line, gradient + row * stride);
      }
      continue;
    }
    /* without buckets distance and row go together; the ends may hold several distances */
    int64_t first = t->first, last = t->last;
    if (!p.buckets && begin > 0) first = rpi_max(first, begin - p.left);
    if (!p.buckets && end < r->rows) last = rpi_min(last, end - 1 - p.left);
    if (i + 1 < slots && !r->number && !p.buckets) {
      expect_band(&from[i + 1].sums[r->sums], first, last, r->list->width[r->sums]);
    }
    for (int64_t d = first; d <= last; d++) {
      const int64_t row = part_row(&p, d);
      if (row < begin || row >= end) continue;
      reduce_line(r, from + i, d - t->first + 1, gradient + row * stride);
    }
    const int64_t head = p.clip ? part_row(&p, -p.left) : -1;
    if (head >= begin && head < end) {
      reduce_line(r, from + i, 0, gradient + head * stride);
    }
  }
}

static void reduce_term(const slot_list *list, const rp_relation *relation, int kind, int place,
                        real *gradient, int workers) {
  const rp_attention *const s = list->shape;
  if (!relation->table || !gradient) return;
  reduction r = {.list = list,
                 .relation = relation,
                 .looked_up = is_looked_up(relation),
                 .number = kind == PAIR_BIAS,
                 .with_bias = kind == PAIR_KEY && s->position_bias,
                 .width = kind == PAIR_VALUE ? s->Dv : s->D,
                 .rows = rpi_table_rows(relation),
                 .tables = relation->head_stride ? list->heads : 1,
                 .factor = kind == PAIR_VALUE ? (real)1 : scale_of(s),
                 .gradient = gradient};
  r.sums = kind == PAIR_VALUE ? SUM_OF_VALUES : kind == PAIR_QUERY ? SUM_OF_QUERIES : SUM_OF_KEYS;
  for (int i = 0; r.looked_up && i < list->pairs.count; i++) {
    const lookup *const x = &list->pairs.list[i];
    if (x->kind == kind && x->place == place) r.sums = BAND_SUMS + i;
  }
  r.rows_per_task = relation->buckets && !r.looked_up ? RPI_REDUCE_BUCKETS : RPI_REDUCE;
  choose_tasks(&r);
  rpi_parallel_for(r.tasks_per_table * r.tables, workers, reduce_task, &r);
}

/* position_bias meets the vector of every distance as often as ds says. */
static void reduce_position_bias(void *context, int64_t task, int worker) {
  (void)worker;
  const slot_list *const list = ((const reduction *)context)->list;
  const rp_attention *const s = list->shape;
  const int64_t first = task * list->per_head, head = list->slots[first].head;
  real *const to = ((const reduction *)context)->gradient + head * s->position_bias_stride;
  const real scale = scale_of(s);
  const term t = key_term(s, head);
  const pair_terms pairs = pair_terms_of(s, head, 0);
  for (int64_t i = first; i < first + list->per_head; i++) {
    const table_sums *const sums = list->slots[i].sums;
    const table_sums *const band = &sums[SUM_OF_KEYS];
    for (int64_t line = 0; t.vector_count && line <= columns_of(band); line++) {
      const int64_t d = line == 0 ? t.first - 1 : band->first + line - 1;
      for (int x = 0; x < t.vector_count; x++) {
        const int64_t row = part_row(&t.vectors[x], d);
        if (row < 0) continue;
        add_line(to, t.vectors[x].table + row * t.vectors[x].stride, s->D,
                 scale * band->numbers[line]);
      }
    }
    for (int x = 0; x < pairs.count; x++) {
      if (pairs.list[x].kind != PAIR_KEY) continue;
      const table_sums *const met = &sums[BAND_SUMS + x];
      for (int64_t row = met->first; row <= met->last; row++) {
        const int64_t line = line_of_row(met, row);
        if (line < 0) continue;
        add_line(to, pairs.list[x].table + row * pairs.list[x].relation->row_stride, s->D,
                 scale * met->numbers[line]);
      }
    }
  }
}

/* One term after the other: tied tables share their gradient. */
static void slots_reduce(const slot_list *list, const rp_attention_gradients *g, int workers) {
  const rp_attention *const s = list->shape;
  for (int i = 0; i < RP_TERMS; i++) {
    reduce_term(list, &s->key[i], PAIR_KEY, i, g->key[i], workers);
    reduce_term(list, &s->query[i], PAIR_QUERY, i, g->query[i], workers);
    reduce_term(list, &s->bias[i], PAIR_BIAS, i, g->bias[i], workers);
    reduce_term(list, &s->value[i], PAIR_VALUE, i, g->value[i], workers);
  }
  if (s->position_bias && g->position_bias) {
    reduction r = {.list = list, .gradient = g->position_bias};
    rpi_parallel_for(list->heads, workers, reduce_position_bias, &r);
  }
}

#endif
