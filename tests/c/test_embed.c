/* SPDX-License-Identifier: Apache-2.0
 *
 * test_embed.c: embeddings, with and without positions and dropout, and the sums of their
 * gradients, against sums in long double.
 */
#include "layer.h"

enum { IDS = 11 };

typedef struct layer {
  rpi_embed_backward_args args; /* forward is in it */
  array table, positions, out, dout, dtable, dpositions;
  int32_t *ids;
  packing p;
} layer;

static void run(const rp_ops *ops, void *context) {
  const layer *const l = context;
  CHECK_INT(ops->embed(&l->args.forward), RP_OK);
  CHECK_INT(ops->embed_backward(&l->args), RP_OK);
}

static double value(const rp_ops *ops, void *context) {
  const layer *const l = context;
  ops->embed(&l->args.forward);
  return weighted_sum(&l->out, &l->dout);
}

static void layer_create(layer *l, layer_shape s, double rate, bool positions) {
  packing_fill(&l->p, s.rows, rate);
  int64_t longest = 0;
  for (int64_t row = 0; row < s.rows; row++) {
    const int64_t place = place_of(&l->p.dropout, row);
    if (place >= longest) longest = place + 1;
  }
  l->ids = malloc((size_t)(s.rows + 1) * sizeof(int32_t));
  if (l->ids == NULL) abort();
  for (int64_t row = 0; row < s.rows; row++) l->ids[row] = (int32_t)(draw() % IDS);
  l->table = array_random("table", IDS * s.columns, 1);
  l->positions = array_random("positions", longest * s.columns, 1);
  l->out = array_of("out", s.rows * s.columns, (real)NAN);
  l->dout = array_random("dout", s.rows * s.columns, 1);
  l->dtable = array_random("dtable", IDS * s.columns, 1); /* what is there is added to */
  l->dpositions = array_random("dpositions", longest * s.columns, 1);
  const rpi_embed_args forward = {.rows = s.rows,
                                  .columns = s.columns,
                                  .ids = l->ids,
                                  .table = l->table.data,
                                  .scale = (real)2.5,
                                  .positions = positions ? l->positions.data : NULL,
                                  .dropout = l->p.dropout,
                                  .out = l->out.data};
  l->args = (rpi_embed_backward_args){forward, l->dout.data, l->dtable.data,
                                      positions ? l->dpositions.data : NULL};
}

static void layer_free(layer *l) {
  array_free(&l->table);
  array_free(&l->positions);
  array_free(&l->out);
  array_free(&l->dout);
  array_free(&l->dtable);
  array_free(&l->dpositions);
  free(l->ids);
}

/* Three roundings: of the scaled table, of the sum, of the scaled result. */
static bool is_forward_right(const rp_ops *ops, const layer *l) {
  const rpi_embed_args *const e = &l->args.forward;
  bool right = true;
  for (int64_t i = 0; i < l->out.count; i++) {
    const int64_t row = i / e->columns, column = i % e->columns;
    const long double scaled = (long double)e->scale * e->table[e->ids[row] * e->columns + column];
    long double sum = scaled;
    if (e->positions != NULL) {
      sum += e->positions[place_of(&e->dropout, row) * e->columns + column];
    }
    const long double factor = keep_factor(&e->dropout, row, column);
    const long double allowed = 1.01L * UNIT * factor * (fabsl(scaled) + 2 * fabsl(sum));
    right = right && is_close(ops, "out", i, l->out.data[i], factor * sum, allowed);
  }
  return right;
}

/* `terms` additions, each rounding a partial sum that is at most the sum of sizes, and two
 * products. */
static bool is_sum_right(const rp_ops *ops, const array *before, const array *after,
                         const long double *sums, const long double *sizes, int64_t terms) {
  bool right = true;
  for (int64_t i = 0; i < after->count; i++) {
    const long double start = before->data[i];
    const long double allowed = 1.01L * UNIT * (long double)(terms + 3) * (sizes[i] + fabsl(start));
    right = right && is_close(ops, after->name, i, after->data[i], start + sums[i], allowed);
  }
  return right;
}

static void test_shape(const rp_ops *ops, layer_shape s, double rate, bool positions) {
  layer l;
  layer_create(&l, s, rate, positions);
  array dtable = array_copy(&l.dtable), dpositions = array_copy(&l.dpositions);
  CHECK(has_same_bits(ops, run, &l, (array[]){l.out, l.dtable, l.dpositions}, 3));
  CHECK(is_forward_right(ops, &l));
  const size_t most = (size_t)(l.dtable.count + l.dpositions.count + 1);
  long double *const sums = calloc(2 * most, sizeof(long double)), *const sizes = sums + most;
  if (sums == NULL) abort();
  for (int64_t i = 0; i < l.out.count; i++) {
    const int64_t row = i / s.columns, column = i % s.columns;
    const long double d = (long double)keep_factor(&l.p.dropout, row, column) * l.dout.data[i];
    const int64_t of_table = l.ids[row] * s.columns + column;
    sums[of_table] += (long double)l.args.forward.scale * d;
    sizes[of_table] += fabsl((long double)l.args.forward.scale * d);
    if (!positions) continue;
    const int64_t of_place = place_of(&l.p.dropout, row) * s.columns + column;
    sums[l.dtable.count + of_place] += d;
    sizes[l.dtable.count + of_place] += fabsl(d);
  }
  CHECK(is_sum_right(ops, &dtable, &l.dtable, sums, sizes, s.rows));
  CHECK(is_sum_right(ops, &dpositions, &l.dpositions, sums + l.dtable.count, sizes + l.dtable.count,
                     s.rows));
  free(sums);
  array_free(&dtable);
  array_free(&dpositions);
  layer_free(&l);
}

static void test_derivatives(const rp_ops *ops) {
  layer l;
  layer_create(&l, (layer_shape){19, 21}, 0.25, true);
  memset(l.dtable.data, 0, (size_t)l.dtable.count * sizeof(real));
  memset(l.dpositions.data, 0, (size_t)l.dpositions.count * sizeof(real));
  run(ops, &l);
  check_derivative(ops, "dtable", value, &l, l.table.data, l.dtable.data, l.table.count);
  check_derivative(ops, "dpositions", value, &l, l.positions.data, l.dpositions.data,
                   l.positions.count);
  layer_free(&l);
}

/* Places of one's own, as decoding has them, and one id and one place many times: long sums. */
static void test_places(const rp_ops *ops) {
  enum { ROWS = 150, COLUMNS = 20 };
  layer l;
  layer_create(&l, (layer_shape){ROWS, COLUMNS}, 0, true);
  int64_t places[ROWS];
  for (int64_t row = 0; row < ROWS; row++) places[row] = draw() % 9;
  array positions = array_random("positions", 9 * COLUMNS, 1);
  l.args.forward.positions = positions.data;
  l.args.forward.places = places;
  CHECK_INT(ops->embed(&l.args.forward), RP_OK);
  bool right = true;
  for (int64_t i = 0; i < l.out.count; i++) {
    const int64_t row = i / COLUMNS, column = i % COLUMNS;
    const long double from = l.table.data[l.ids[row] * COLUMNS + column];
    const long double scaled = (long double)l.args.forward.scale * from;
    const long double sum = scaled + positions.data[places[row] * COLUMNS + column];
    const long double allowed = 1.01L * UNIT * (fabsl(scaled) + fabsl(sum));
    right = right && is_close(ops, "out", i, l.out.data[i], sum, allowed);
  }
  CHECK(right);
  array_free(&positions);
  layer_free(&l);
}

/* The same id in many rows, beside others of a few: sums that run on and on. */
static void test_frequent(const rp_ops *ops) {
  layer l;
  layer_create(&l, (layer_shape){300, 13}, 0.1, false);
  for (int64_t row = 0; row < 300; row++) l.ids[row] = row % 7 == 3 ? (int32_t)(row % IDS) : 4;
  array before = array_copy(&l.dtable);
  CHECK(has_same_bits(ops, run, &l, (array[]){l.dtable}, 1));
  long double sums[IDS * 13] = {0}, sizes[IDS * 13] = {0};
  for (int64_t i = 0; i < l.out.count; i++) {
    const int64_t row = i / 13, column = i % 13, at = l.ids[row] * 13 + column;
    const long double d = (long double)keep_factor(&l.p.dropout, row, column) * l.dout.data[i];
    sums[at] += (long double)l.args.forward.scale * d;
    sizes[at] += fabsl((long double)l.args.forward.scale * d);
  }
  CHECK(is_sum_right(ops, &before, &l.dtable, sums, sizes, 300));
  array_free(&before);
  layer_free(&l);
}

/* A device notes that what it gives is not finite. */
static void test_note(const rp_ops *ops) {
  layer l;
  const layer_shape s = {7, 12};
  layer_create(&l, s, 0, true);
  int32_t note = 0;
  l.args.forward.note = (rpi_note){&note, 9, 8};
  CHECK_INT(ops->embed(&l.args.forward), RP_OK);
  CHECK_INT(note, 0);
  l.table.data[l.ids[6] * 12 + 11] = (real)NAN;
  CHECK_INT(ops->embed(&l.args.forward), RP_OK);
  CHECK_INT(note, 8);
  layer_free(&l);
}

int main(void) {
  for (int t = 0; table_at(t) != NULL; t++) {
    for (int i = 0; i < layer_shape_count(); i++) {
      for (int r = 0; r < LAYER_RATES; r++) {
        test_shape(table_at(t), layer_shapes[i], layer_rates[r], (i + r) % 2 == 0);
      }
    }
    if (is_device_run()) test_note(table_at(t));
    test_places(table_at(t));
    test_frequent(table_at(t));
    test_derivatives(table_at(t));
  }
  return check_report();
}
