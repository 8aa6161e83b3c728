/* SPDX-License-Identifier: Apache-2.0
 *
 * test_attention_plan.c: the walk over backward's items (ops/attention_plan.h), slots and the tasks
 * of their reduction (ops/table_sums.h). Idle items are stepped over without a look at each: those
 * that are stepped over have nothing to do, the slots are those of a walk that looks at each, and
 * of long sequences with a window the steps grow with the length, not with its square.
 */
#include "check.h"
#include "ops/real.h"

/* vectors are not what is tested */
#define RPI_LANES (16 / RPI_REAL_BYTES)
#define RPI_VECTORS 2
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-variable"
#include "ops/table_sums.h"

static uint32_t state = 1;

static int64_t draw(int64_t count) {
  state = state * 1664525u + 1013904223u;
  return (state >> 8) % count;
}

static bool has_nothing_to_do(const rp_attention *s, const pair *p) {
  const rpi_sequence seq = sequence_of(s, p->b);
  const sight sees = sight_of(s);
  const rectangle r = rectangle_of(s, &seq, p);
  const reach met = reach_of(&seq, &sees, r.query, r.rows, r.key, r.keys);
  return met.farthest < met.nearest && !first_for_queries(p, key_chunks(s, &seq).count) &&
         !first_for_keys(p, query_chunks(s, &seq).count);
}

static bool same_pair(const pair *a, const pair *b) {
  return a->b == b->b && a->query_chunk == b->query_chunk && a->key_chunk == b->key_chunk;
}

/* The share and the slots of a phase, one item after the other; returns the slots. */
static int64_t list_singly(const slot_list *list, int64_t phase, pair *begins, int64_t *items) {
  const rp_attention *const s = list->shape;
  int64_t total = 0, count = 0, cost = 0;
  for (pair p = pair_from(s, phase, 0, 0); p.b < s->B; p = pair_after(s, phase, &p, 1)) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const rectangle r = rectangle_of(s, &seq, &p);
    total += pair_cost(&r);
  }
  const int64_t per_head = rpi_divide_up(list->few, s->H);
  const int64_t share = rpi_max(rpi_divide_up(total, per_head), RPI_SLOT_PAIRS);
  for (pair p = pair_from(s, phase, 0, 0); p.b < s->B; p = pair_after(s, phase, &p, 1)) {
    const rpi_sequence seq = sequence_of(s, p.b);
    const rectangle r = rectangle_of(s, &seq, &p);
    if (count == 0 || cost + pair_cost(&r) > share) {
      begins[count] = p;
      items[count++] = 0;
      cost = 0;
    }
    items[count - 1]++;
    cost += pair_cost(&r);
  }
  return count;
}

enum { MOST = 512 };
static slot slots[MOST];
static pair begins[MOST];
static int64_t items[MOST];

/* Returns how many items were stepped over. */
static int64_t test_walk(const rp_attention *s) {
  const bounds n = bounds_of(s, true, false);
  rpi_arena counting = rpi_arena_counting();
  const slot_list list = slots_carve(&counting, s, &n);
  int64_t idle = 0, walked = 0, all = 0;
  bool right = true, same = true;
  for (int64_t phase = 0; phase < phase_count(s); phase++) {
    for (pair p = pair_from(s, phase, 0, 0); p.b < s->B;) {
      const int64_t skipped = idle_items(s, phase, &p);
      idle += skipped;
      for (int64_t i = 0; i < skipped; i++, p = pair_after(s, phase, &p, 1)) {
        right &= has_nothing_to_do(s, &p);
      }
      if (skipped == 0) p = pair_after(s, phase, &p, 1);
    }
    const int64_t count = list_slots(&list, phase, NULL);
    if (!CHECK(count <= MOST)) return idle;
    list_slots(&list, phase, slots);
    same &= list_singly(&list, phase, begins, items) == count;
    for (int64_t i = 0; i < count; i++) {
      same &= same_pair(&slots[i].begin, &begins[i]) && slots[i].items == items[i];
      walked += items[i];
    }
  }
  for (int64_t b = 0; b < s->B; b++) {
    const rpi_sequence seq = sequence_of(s, b);
    all += query_chunks(s, &seq).count * key_chunks(s, &seq).count;
  }
  CHECK_INT(walked, all);
  CHECK(right);
  CHECK(same);
  return idle;
}

static rp_attention shape_of(int64_t B, int64_t H, int64_t N, int64_t M) {
  rp_attention s = rp_attention_default();
  s.B = B;
  s.H = H;
  s.N = N;
  s.M = M;
  s.D = s.Dv = 8;
  return s;
}

static void test_walks(void) {
  static const int64_t windows[] = {-1, 0, 3, 600, 5000}, rows[] = {1, 700, 2000, 7000, 20000};
  int64_t idle = 0;
  for (int i = 0; i < 2500; i++) {
    rp_attention s = shape_of(1 + draw(3), 1 + draw(9), rows[draw(5)], rows[draw(5)]);
    int64_t starts[3], lengths[3], key_lengths[3];
    for (int64_t b = 0; b < s.B; b++) {
      starts[b] = draw(20000) - 10000;
      lengths[b] = draw(s.N + 1);
      key_lengths[b] = draw(s.M + 1);
    }
    if (draw(2)) s.query_start = starts;
    if (draw(2)) s.lengths = lengths, s.key_lengths = key_lengths;
    s.window_left = windows[draw(5)];
    s.window_right = windows[draw(5)];
    s.causal = draw(3) == 0;
    idle += test_walk(&s);
  }
  CHECK(idle > 1000);
}

/* Of 2^20 queries and keys with a window: 1,024 chunks of queries and 2,048 of keys, 2,097,152
 * items. */
static void test_long(void) {
  rp_attention s = shape_of(1, 1, (int64_t)1 << 20, (int64_t)1 << 20);
  s.window_left = s.window_right = 16;
  int64_t steps = 0;
  for (int64_t phase = 1; phase < phase_count(&s); phase++) {
    for (pair p = pair_from(&s, phase, 0, 0); p.b < s.B; steps++) {
      p = pair_after(&s, phase, &p, rpi_max(idle_items(&s, phase, &p), 1));
    }
  }
  CHECK_INT(phase_count(&s), 2048);
  CHECK(steps < 10 * 2048);
}

/* Does each slot of a phase have tasks for all of its rows, and are there few? */
static void test_reduction(int64_t rows, bool causal, int64_t phase, int64_t most_tasks) {
  rp_attention s = shape_of(1, 2, rows, rows);
  static real table[1], gradient[1];
  s.key[0] = (rp_relation){.table = table, .row_stride = 8, .left = rows - 1, .right = rows - 1};
  s.key[1] = (rp_relation){.table = table, .row_stride = 8, .left = 5, .right = 5};
  s.window_left = s.window_right = 16;
  s.causal = causal;
  const bounds n = bounds_of(&s, true, false);
  rpi_arena counting = rpi_arena_counting();
  slot_list list = slots_carve(&counting, &s, &n);
  list.slots = slots;
  list.per_head = list_slots(&list, phase, slots);
  for (int place = 0; place < 2; place++) {
    const band_part p = part_of(&s.key[place], 0);
    reduction r = {.list = &list,
                   .relation = &s.key[place],
                   .rows = rpi_table_rows(&s.key[place]),
                   .rows_per_task = RPI_REDUCE,
                   .sums = SUM_OF_KEYS,
                   .gradient = gradient};
    choose_tasks(&r);
    CHECK(r.tasks_per_table <= most_tasks);
    const int64_t end = (r.first_task + r.tasks_per_table - 1) * RPI_REDUCE;
    bool found = true;
    int64_t columns = 0;
    for (int64_t i = 0; i < list.per_head; i++) {
      const table_sums *const sums = &slots[i].sums[SUM_OF_KEYS];
      for (int64_t d = sums->first; d <= sums->last; d++, columns++) {
        const int64_t row = part_row(&p, d);
        found &= row < RPI_REDUCE || (row >= r.first_task * RPI_REDUCE && row < end);
      }
    }
    CHECK(found);
    CHECK(columns > 0);
    CHECK(end < r.rows + RPI_REDUCE + 1);
  }
}

int main(void) {
  test_walks();
  test_long();
  test_reduction((int64_t)1 << 20, false, 700, 100);
  test_reduction((int64_t)1 << 20, true, 700, 100);
  test_reduction(3000, false, 0, 100);
  return check_report();
}
