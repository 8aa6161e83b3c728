/* SPDX-License-Identifier: Apache-2.0
 *
 * test_rotate.c: rotary positions and sinusoids (ops/rotate.c, api_rotate.c).
 *
 * Every table this machine can run turns rows in every layout, and each number is held
 * against the formula in long double: sine, cosine, two products and a sum are five
 * roundings. Rows beyond a length and margins are NaN before; what may not be written is
 * compared bit by bit. Sinusoids have known values.
 */
#include <fenv.h>
#include <float.h>
#include <stdlib.h>

#include "base/memory.h"
#include "layer.h"

/* ---- rows ------------------------------------------------------------------------- */

enum { HEADS_FIRST, ROWS_FIRST, PACKED };
enum { FROM_ZERO, STARTS, POSITIONS, SHARED_POSITIONS };
enum { MOST_B = 5, MOST_PAIRS = 80 };

typedef struct shape {
  int64_t B, H, N, D, pairs;
  int layout, where;
  bool ragged;
  double fastest;
} shape;

static const shape shapes[] = {
    {1, 1, 1, 2, 1, HEADS_FIRST, FROM_ZERO, false, 1},
    {2, 3, 70, 64, 32, HEADS_FIRST, FROM_ZERO, true, 1},
    {2, 3, 33, 64, 32, ROWS_FIRST, STARTS, true, 1},
    {5, 2, 31, 40, 13, PACKED, STARTS, false, 1},
    {3, 2, 40, 37, 18, PACKED, POSITIONS, false, 1},
    {3, 1, 32, 170, 80, ROWS_FIRST, POSITIONS, true, 1},
    {2, 4, 20, 7, 0, HEADS_FIRST, FROM_ZERO, true, 1},
    {2, 1, 65, 6, 2, HEADS_FIRST, SHARED_POSITIONS, false, 1},
    {1, 2, 50, 80, 40, ROWS_FIRST, STARTS, false, 700}, /* angles beyond 10^7 */
    {0, 2, 5, 8, 4, HEADS_FIRST, FROM_ZERO, false, 1},
    {2, 0, 5, 8, 4, HEADS_FIRST, FROM_ZERO, false, 1},
    {2, 2, 0, 8, 4, HEADS_FIRST, FROM_ZERO, false, 1},
    {4, 2, 0, 8, 4, PACKED, FROM_ZERO, false, 1},
};

/* One shape with its lists and arrays; x and out lie alike. */
typedef struct rows {
  rp_rotation r;
  int64_t lengths[MOST_B], offsets[MOST_B + 1], start[MOST_B];
  double frequencies[MOST_PAIRS];
  int32_t *positions;
  int64_t size, batch_stride, head_stride, row_stride;
  real *x, *out;
} rows;

static int64_t rows_of(const rows *t, const shape *s, int64_t b) {
  if (s->layout == PACKED) return t->offsets[b + 1] - t->offsets[b];
  return s->ragged ? t->lengths[b] : s->N;
}

static real *row_at(const rows *t, const shape *s, real *data, int64_t b, int64_t h, int64_t i) {
  const int64_t line = s->layout == PACKED ? t->offsets[b] + i : i;
  return data + (s->layout == PACKED ? 0 : b * t->batch_stride) + h * t->head_stride +
         line * t->row_stride;
}

static double position_of(const rows *t, const shape *s, int64_t b, int64_t i) {
  if (s->where == SHARED_POSITIONS) return t->positions[i];
  if (s->where == POSITIONS)
    return t->positions[s->layout == PACKED ? t->offsets[b] + i : b * s->N + i];
  return (double)(i + (s->where == STARTS ? t->start[b] : 0));
}

/* Rows have a gap of three numbers behind them; everything out of use is NaN. */
static rows make(const shape *s) {
  rows t = {.r = rp_rotation_default()};
  const int64_t width = s->D + 3;
  const bool heads_first = s->layout == HEADS_FIRST;
  t.head_stride = heads_first ? s->N * width : width;
  t.row_stride = heads_first ? width : s->H * width;
  t.batch_stride = s->H * s->N * width;
  t.size = s->B * t.batch_stride + 1;
  t.x = malloc((size_t)t.size * sizeof(real));
  t.out = malloc((size_t)t.size * sizeof(real));
  t.positions = malloc((size_t)(s->B * s->N + 1) * sizeof(int32_t));
  if (t.x == NULL || t.out == NULL || t.positions == NULL) abort();
  for (int64_t i = 0; i < t.size; i++) t.x[i] = t.out[i] = (real)NAN;
  for (int64_t b = 0; b < s->B; b++) {
    t.lengths[b] = b == 0 ? s->N : s->N * 2 / 3 - b;
    t.offsets[b + 1] = b == 1 ? t.offsets[b] : (b + 1) * s->N; /* one sequence is empty */
    t.start[b] = 7 * b * b * b - 20 + 100000 * b;
  }
  for (int64_t i = 0; i < s->B * s->N; i++) t.positions[i] = (int32_t)(i * i * 37 % 5000 - 2000);
  t.r.B = s->B;
  t.r.H = s->H;
  t.r.N = s->layout == PACKED ? 0 : s->N;
  t.r.D = s->D;
  t.r.pairs = s->pairs;
  for (int64_t c = 0; c < s->pairs; c++) {
    t.frequencies[c] = s->fastest * pow(10000, -(double)c / (double)s->pairs);
  }
  for (int64_t b = 0; b < s->B; b++) {
    for (int64_t h = 0; h < s->H; h++) {
      for (int64_t i = 0; i < rows_of(&t, s, b); i++) {
        for (int64_t c = 0; c < s->D; c++) row_at(&t, s, t.x, b, h, i)[c] = number();
      }
    }
  }
  return t;
}

static void point(rows *t, const shape *s) {
  if (s->layout == PACKED) t->r.offsets = t->offsets;
  else if (s->ragged) t->r.lengths = t->lengths;
  if (s->where == STARTS) t->r.start = t->start;
  if (s->where == POSITIONS || s->where == SHARED_POSITIONS) t->r.positions = t->positions;
  t->r.position_stride = s->where == POSITIONS ? s->N : 0;
  t->r.frequencies = t->frequencies;
}

static void release(rows *t) {
  free(t->x);
  free(t->out);
  free(t->positions);
}

static bool same_bits(const real *a, const real *b, int64_t count) {
  return memcmp(a, b, (size_t)count * sizeof(real)) == 0;
}

/* How far one row is from the formula, in roundings; infinite where what stays changed. */
static double row_error(const rows *t, const real *x, const real *out, double position) {
  const int64_t pairs = t->r.pairs, step = t->r.interleaved ? 2 : 1;
  const int64_t apart = t->r.interleaved ? 1 : pairs;
  double most = 0;
  for (int64_t c = 0; c < pairs; c++) {
    const double angle = position * t->frequencies[c];
    const long double cosine = cosl(angle), sine = (t->r.inverse ? -1 : 1) * sinl(angle);
    const real *const in = x + step * c, *const got = out + step * c;
    const long double first = in[0] * cosine - in[apart] * sine;
    const long double second = in[0] * sine + in[apart] * cosine;
    const double size = (double)(fabsl(in[0] * cosine) + fabsl(in[apart] * sine) +
                                 fabsl(in[0] * sine) + fabsl(in[apart] * cosine)) +
                        1e-3;
    most = fmax(most, (double)fabsl(got[0] - first) / size);
    most = fmax(most, (double)fabsl(got[apart] - second) / size);
  }
  const bool rest = same_bits(x + 2 * pairs, out + 2 * pairs, t->r.D - 2 * pairs);
  return rest ? most / UNIT : INFINITY;
}

static rp_rows from_of(const rows *t) {
  return (rp_rows){t->x, t->batch_stride, t->head_stride, t->row_stride};
}
static rp_rows_out to_of(const rows *t, real *data) {
  return (rp_rows_out){data, t->batch_stride, t->head_stride, t->row_stride};
}

/* Numbers, zeros behind the lengths, and nothing else written. */
static void check_result(const rows *t, const shape *s) {
  real *const expected = malloc((size_t)t->size * sizeof(real));
  if (expected == NULL) abort();
  for (int64_t i = 0; i < t->size; i++) expected[i] = (real)NAN;
  double most = 0;
  for (int64_t b = 0; b < s->B; b++) {
    for (int64_t h = 0; h < s->H; h++) {
      for (int64_t i = 0; i < rows_of(t, s, b); i++) {
        const real *const out = row_at(t, s, t->out, b, h, i);
        most = fmax(most, row_error(t, row_at(t, s, t->x, b, h, i), out, position_of(t, s, b, i)));
        memcpy(row_at(t, s, expected, b, h, i), out, (size_t)s->D * sizeof(real));
      }
      for (int64_t i = rows_of(t, s, b); s->layout != PACKED && i < s->N; i++) {
        for (int64_t c = 0; c < s->D; c++) row_at(t, s, expected, b, h, i)[c] = 0;
      }
    }
  }
  CHECK(most <= 5);
  CHECK(same_bits(expected, t->out, t->size));
  free(expected);
}

static void test_shape(const rp_ops *ops, const shape *s, bool interleaved, bool inverse) {
  rows t = make(s);
  point(&t, s);
  t.r.interleaved = interleaved;
  t.r.inverse = inverse;
  real *const in_place = malloc((size_t)t.size * sizeof(real));
  if (in_place == NULL) abort();
  memcpy(in_place, t.x, (size_t)t.size * sizeof(real));
  CHECK_INT(ops->rotate(&t.r, from_of(&t), to_of(&t, t.out)), RP_OK);
  check_result(&t, s);

  /* The same bits in place and with other threads; there rows beyond a length stay NaN. */
  rp_rows from = from_of(&t);
  from.data = in_place;
  CHECK_INT(rp_set_threads(3), RP_OK);
  CHECK_INT(ops->rotate(&t.r, from, to_of(&t, in_place)), RP_OK);
  CHECK_INT(rp_set_threads(0), RP_OK);
  bool same = true;
  for (int64_t b = 0; b < s->B; b++) {
    for (int64_t h = 0; h < s->H; h++) {
      for (int64_t i = 0; i < rows_of(&t, s, b); i++) {
        same &= same_bits(row_at(&t, s, in_place, b, h, i), row_at(&t, s, t.out, b, h, i), s->D);
      }
      for (int64_t i = rows_of(&t, s, b); s->layout != PACKED && i < s->N; i++) {
        same &= isnan(row_at(&t, s, in_place, b, h, i)[0]);
      }
    }
  }
  CHECK(same);
  free(in_place);
  release(&t);
}

static void test_rows(const rp_ops *ops) {
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
    for (int way = 0; way < 4; way++) test_shape(ops, &shapes[i], way & 1, way >> 1);
  }
}

/* Enough rows that several threads take part: any number of them gives the same bits. */
static void test_threads(const rp_ops *ops) {
  const shape s = {3, 8, 200, 64, 32, ROWS_FIRST, STARTS, true, 1};
  rows t = make(&s);
  point(&t, &s);
  real *const first = malloc((size_t)t.size * sizeof(real));
  if (first == NULL) abort();
  memcpy(first, t.out, (size_t)t.size * sizeof(real));
  for (int threads = 1; threads <= 8; threads *= 2) {
    CHECK_INT(rp_set_threads(threads), RP_OK);
    CHECK_INT(ops->rotate(&t.r, from_of(&t), to_of(&t, threads == 1 ? first : t.out)), RP_OK);
    CHECK(threads == 1 || same_bits(first, t.out, t.size));
  }
  CHECK_INT(rp_set_threads(0), RP_OK);
  free(first);
  release(&t);
}

/* ---- sinusoids ---------------------------------------------------------------------- */

#ifdef RP_REAL_IS_DOUBLE
#define NEAR 1e-14
#else
#define NEAR 6e-8
#endif

static void test_sinusoids(void) {
  double w[3];
  CHECK_INT(rp_frequencies(3, 10000, RP_FREQUENCIES_OPEN, w), RP_OK);
  CHECK_NEAR(w[0], 1, 0);
  CHECK_NEAR(w[1], 0.046415888336127788924, 1e-16);
  CHECK_NEAR(w[2], 0.0021544346900318837217, 1e-17);
  real table[2][7];
  CHECK_INT(rp_sinusoid((int64_t)1 << 60, 0, 0, 0, NULL, NULL), RP_OK); /* at once */
  CHECK_INT(rp_sinusoid(2, 7, 4, 1, w, table[0]), RP_OK);
  const double at_5[6] = {-0.9589242746631385, 0.28366218546322625,  0.23000171166476743,
                          0.9731902242785205,  0.010771965118034832, 0.9999419807006283};
  for (int c = 0; c < 6; c++) CHECK_NEAR(table[1][c], at_5[c], NEAR);
  CHECK(table[0][6] == 0 && table[1][6] == 0);
  real halves[2][6];
  CHECK_INT(rp_sinusoid(2, 6, 4, 0, w, halves[0]), RP_OK);
  for (int c = 0; c < 3; c++) {
    CHECK(halves[1][c] == table[1][2 * c] && halves[1][3 + c] == table[1][2 * c + 1]);
  }
  CHECK_INT(rp_frequencies(3, 10000, RP_FREQUENCIES_CLOSED, w), RP_OK);
  CHECK_NEAR(w[1], 0.01, 1e-17);
  CHECK_NEAR(w[2], 1e-4, 1e-19);
  CHECK_INT(rp_frequencies(1, 10000, RP_FREQUENCIES_CLOSED, w), RP_OK);
  CHECK_NEAR(w[0], 1, 0);
}

/* ---- what the public functions refuse ---------------------------------------------- */

static real data[2 * 3 * 5 * 8], result[2 * 3 * 5 * 8];
static double frequencies[4] = {1, 0.1, 0.01, 0.001};

typedef struct call {
  rp_rotation r;
  rp_rows x;
  rp_rows_out out;
} call;

static call valid(void) {
  call c = {rp_rotation_default(), {data, 120, 40, 8}, {result, 120, 40, 8}};
  c.r.B = 2;
  c.r.H = 3;
  c.r.N = 5;
  c.r.D = 8;
  c.r.pairs = 4;
  c.r.frequencies = frequencies;
  return c;
}

#define REFUSED(status, sentence, ...)                                                             \
  do {                                                                                             \
    call c = valid();                                                                              \
    __VA_ARGS__;                                                                                   \
    CHECK_INT(rp_rotate(&c.r, c.x, c.out), (status));                                              \
    CHECK_TEXT(rp_last_error(), (sentence));                                                       \
  } while (0)

static void test_refused(void) {
  const int64_t lengths[2] = {5, 6}, offsets[3] = {0, 4, 3}, late[3] = {1, 2, 3};
  const int64_t start[2] = {0, (INT64_C(1) << 40) + 1};
  const int32_t positions[10] = {0};
  const double nan_frequencies[4] = {1, NAN, 1, 1};
  const call good = valid();
  CHECK_INT(rp_rotate(&good.r, good.x, good.out), RP_OK);
  CHECK_INT(rp_rotate(NULL, good.x, good.out), RP_ERROR_ARGUMENT);
  REFUSED(RP_ERROR_ARGUMENT, "struct_size=0", c.r.struct_size = 0);
  REFUSED(RP_ERROR_SHAPE, "rotate: B=-1", c.r.B = -1);
  REFUSED(RP_ERROR_SHAPE, "rotate: H=-1", c.r.H = -1);
  REFUSED(RP_ERROR_SHAPE, "rotate: N=-1", c.r.N = -1);
  REFUSED(RP_ERROR_SHAPE, "rotate: D=0", c.r.D = 0);
  REFUSED(RP_ERROR_SHAPE, "pairs=5, must be from 0 to 4", c.r.pairs = 5);
  REFUSED(RP_ERROR_ARGUMENT, "frequencies is NULL", c.r.frequencies = NULL);
  REFUSED(RP_ERROR_ARGUMENT, "frequencies[1]=nan", c.r.frequencies = nan_frequencies);
  REFUSED(RP_ERROR_SHAPE, "lengths[1]=6", c.r.lengths = lengths);
  REFUSED(RP_ERROR_SHAPE, "offsets[2]=3 after 4", c.r.offsets = offsets);
  REFUSED(RP_ERROR_SHAPE, "offsets[0]=1", c.r.offsets = late);
  REFUSED(RP_ERROR_ARGUMENT, "both lengths", c.r.lengths = lengths; c.r.offsets = offsets);
  REFUSED(RP_ERROR_ARGUMENT, "start[1]=", c.r.start = start);
  REFUSED(RP_ERROR_ARGUMENT, "both positions", c.r.start = lengths; c.r.positions = positions);
  REFUSED(RP_ERROR_SHAPE, "position_stride=4", c.r.positions = positions; c.r.position_stride = 4);
  REFUSED(RP_ERROR_ARGUMENT, "rotate: x is NULL", c.x.data = NULL);
  REFUSED(RP_ERROR_ARGUMENT, "rotate: out is NULL", c.out.data = NULL);
  REFUSED(RP_ERROR_SHAPE, "x has a stride of -1", c.x.row_stride = -1);
  REFUSED(RP_ERROR_SHAPE, "out has a stride of 7", c.out.row_stride = 7);
  REFUSED(RP_ERROR_SHAPE, "strides differ", c.x = (rp_rows){result, 120, 8, 24});
  REFUSED(RP_ERROR_ARGUMENT, "rotate: out shares memory with x; give it an array of its own",
          c.x.data = c.out.data + 1);

  double w[1];
  real table[4];
  CHECK_INT(rp_frequencies(-1, 10000, 0, w), RP_ERROR_SHAPE);
  CHECK_INT(rp_frequencies(1, 0, 0, w), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_frequencies(1, NAN, 0, w), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_frequencies(1, 10000, 2, w), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "rule=2");
  CHECK_INT(rp_frequencies(1, 10000, 0, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_frequencies(1, 10000, 0, w), RP_OK);
  CHECK_INT(rp_sinusoid(-1, 2, 0, 0, w, table), RP_ERROR_SHAPE);
  CHECK_INT(rp_sinusoid(INT64_C(1) << 40, INT64_C(1) << 40, 0, 0, w, table), RP_ERROR_SHAPE);
  CHECK_INT(rp_sinusoid(2, 2, INT64_MAX, 0, w, table), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_sinusoid(2, 2, 0, 0, NULL, table), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "sinusoid: frequencies is NULL");
  const double none = (double)INFINITY;
  CHECK_INT(rp_sinusoid(2, 2, 0, 0, &none, table), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "sinusoid: frequencies[0]=inf, must be within 1e+290");
  CHECK_INT(rp_sinusoid(2, 2, 0, 0, w, NULL), RP_ERROR_ARGUMENT);
  CHECK_INT(rp_sinusoid(2, 2, 0, 0, w, (rp_real *)w), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "sinusoid: table shares memory with frequencies");
  CHECK_INT(rp_sinusoid(2, 2, 0, 0, w, table), RP_OK);
  CHECK_INT(rp_sinusoid(4, 1, 0, 0, NULL, table), RP_OK);
}

/* The caller's rounding changes no frequency and no sinusoid. */
static void test_rounding(void) {
  enum { PAIRS = 12, ROWS = 50, NUMBERS = 2 * PAIRS * ROWS };
  static const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_TOWARDZERO};
  static double angles[3][PAIRS];
  static real tables[3][NUMBERS];
  for (int i = 0; i < 3; i++) {
    fesetround(modes[i]);
    const rp_status made = rp_frequencies(PAIRS, 10000, 0, angles[i]);
    const rp_status filled = rp_sinusoid(ROWS, 2 * PAIRS, 0, 0, angles[i], tables[i]);
    const int mode = fegetround();
    fesetround(FE_TONEAREST);
    CHECK_INT(made, RP_OK);
    CHECK_INT(filled, RP_OK);
    CHECK_INT(mode, modes[i]);
    CHECK(memcmp(angles[i], angles[0], sizeof angles[0]) == 0);
    CHECK(same_bits(tables[i], tables[0], NUMBERS));
  }
}

int main(void) {
  for (int i = 0; table_at(i) != NULL; i++) {
    test_rows(table_at(i));
    test_threads(table_at(i));
  }
  test_sinusoids();
  test_refused();
  test_rounding();
  return check_report();
}
