/* SPDX-License-Identifier: Apache-2.0
 *
 * test_bf16.c: numbers rounded to bf16 (ops/bf16.h), in every table this machine can run; and of
 * those that have instructions for it their twin in plain C, bit for bit. That products are right
 * is test_gemm.c's matter, and attention's are attention_run.h's.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>

#include "base/threads.h"
#include "check.h"
#include "products.h"
#include "tables.h"

static real of_bits(uint32_t bits) {
  real x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static uint32_t bits_of(real x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* Every number of bf16, and what lies behind it: nothing, the least there is, half of what is
 * between two of them and its neighbours, the most. */
static const uint32_t behind[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
enum { BEHIND = sizeof behind / sizeof behind[0], EVERY = BEHIND << 16 };

static uint32_t pattern(int64_t i) { return (uint32_t)(i / BEHIND) << 16 | behind[i % BEHIND]; }

/* Of a small run, which meets each thing behind, and every edge of an exponent. */
enum { FEW_STEP = 17 };

/* The nearest number of bf16, by comparing. */
static bool is_rounded(uint32_t from, real got) {
  const real x = of_bits(from);
  if (isnan(x)) return isnan(got);
  if (fabsf(x) < FLT_MIN) return got == 0;
  const uint32_t down = from & 0xFFFF0000u, up = down + 0x10000u;
  const uint32_t rest = from & 0xFFFFu, odd = down >> 16 & 1u;
  return bits_of(got) == (rest > 0x8000u || (rest == 0x8000u && odd) ? up : down);
}

typedef rp_status (*product_fn)(const rpi_gemm_args *args);

/* Each of them times one, at some place of INNER beside zeros: as rows of A or columns of B,
 * `lines` of the other operand; stored along inner or across it. */
enum { INNER = 40, COUNT = 4099, MOST_LINES = 50 };

static void round_all(const char *name, product_fn by, bool is_a, bool across, int64_t lines) {
  static real all[COUNT * INNER], ones[MOST_LINES * INNER], c[COUNT * MOST_LINES];
  int64_t wrong = 0;
  const int64_t step = is_small_run() ? FEW_STEP : 1, few = EVERY / step;
  for (int64_t i = 0; i < lines * INNER; i++) ones[i] = 1;
  for (int64_t first = 0; first < few; first += COUNT) {
    const int64_t count = rpi_min(COUNT, few - first);
    memset(all, 0, sizeof all);
    for (int64_t i = 0; i < count; i++) {
      const int64_t k = (first + i) % INNER;
      all[across ? k * count + i : i * INNER + k] = of_bits(pattern((first + i) * step));
    }
    const int64_t stride = across ? count : INNER;
    const rpi_gemm_args g = {.rows = is_a ? count : lines,
                             .columns = is_a ? lines : count,
                             .inner = INNER,
                             .a = is_a ? all : ones,
                             .a_stride = is_a ? stride : INNER,
                             .b = is_a ? ones : all,
                             .b_stride = is_a ? lines : stride,
                             .c = c,
                             .c_stride = is_a ? lines : count,
                             .transpose_a = is_a && across,
                             .transpose_b = !is_a && !across,
                             .precision = RP_BF16};
    CHECK_INT(by(&g), RP_OK);
    for (int64_t i = 0; i < count; i++) {
      const uint32_t from = pattern((first + i) * step);
      for (int64_t j = 0; j < lines; j++) {
        wrong += !is_rounded(from, is_a ? c[i * lines + j] : c[j * count + i]);
      }
    }
  }
  if (!CHECK_INT(wrong, 0)) {
    printf("\n  %s: %s %s inner, %lld of the other", name, is_a ? "A" : "B",
           across ? "across" : "along", (long long)lines);
  }
}

static void test_rounding(const char *name, product_fn by) {
  round_all(name, by, true, false, MOST_LINES);
  round_all(name, by, true, true, MOST_LINES);
  round_all(name, by, false, false, MOST_LINES);
  round_all(name, by, false, true, MOST_LINES);
  static const int64_t few[] = {1, 2, 5, 6, 7}; /* rows that meet B as it is read */
  for (size_t i = 0; i < sizeof few / sizeof few[0]; i++) round_all(name, by, false, false, few[i]);
}

/* A weight that is there as words gives the bits of one that is rounded as it is read, and the list
 * may have others in it that are not wanted. What is written is the weight's alone: its memory ends
 * there. */
static void test_stored(const rp_ops *ops) {
  static const int64_t shapes[][2] = {{1, 1}, {33, 7}, {64, 64}, {129, 100}, {70, 1030}};
  static const int64_t rows[] = {1, 4, 6, 32, 33, 47};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
    const int64_t out = shapes[s][0], in = shapes[s][1];
    real *const weight = numbers(out * in);
    void *const to = malloc((size_t)(out * rpi_operand_stride(in, false) * 2));
    if (to == NULL) abort();
    const rpi_rounding list[] = {{out, in, weight, NULL, NULL}, {out, in, weight, NULL, to}};
    CHECK_INT(ops->round_weights(list, 2), RP_OK);
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
      for (int flags = 16 + 2; flags < 32; flags += 4) { /* columns, inner; added, a bias */
        product p = product_create(rows[r], out, in, flags, 0);
        p.args.b = weight;
        p.args.b_stride = in;
        real *const first = product_result(&p, ops->gemm);
        p.args.rounded = to;
        CHECK_INT(ops->gemm(&p.args), RP_OK);
        if (!CHECK(product_is(&p, first))) {
          printf("\n  %s: %lld x %lld x %lld", ops->name, (long long)rows[r], (long long)out,
                 (long long)in);
        }
        free(first);
        product_free(&p);
      }
    }
    free(to);
    free(weight);
  }
}

/* Sums too large and too small for float among them, and products that are not finite. A sum of 0
 * has either sign: with fewer optimisations, as under sanitizers, the twin may add a product after
 * it was rounded, and one that is too small is 0 by then. */
static void test_same_bits(const rp_ops *ops) {
  static const int64_t shapes[][3] = {{1, 40, 100},   {4, 33, 64},    {7, 70, 131},
                                      {32, 50, 1000}, {33, 17, 35},   {70, 65, 130},
                                      {6, 64, 1},     {300, 70, 600}, {13, 600, 257}};
  for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
    for (int flags = 16; flags < 32; flags++) {
      for (int scale = 0; scale < 3; scale++) {
        product p = product_create(shapes[s][0], shapes[s][1], shapes[s][2], flags, 3);
        rpi_gemm_args *const g = &p.args;
        const int64_t rows = g->transpose_a ? g->inner : g->rows;
        for (int64_t i = 0; scale > 0 && i < rows * g->a_stride; i++) {
          p.a[i] = ldexpf(p.a[i], scale == 1 ? 127 : (int)(draw() % 250) - 125);
        }
        real *const first = product_result(&p, ops->gemm);
        rpi_cpu_hide(RPI_CPU_BF16);
        CHECK_INT(ops->gemm(g), RP_OK);
        rpi_cpu_hide(0);
        int64_t wrong = 0;
        for (int64_t i = 0; i < p.c_size; i++) {
          const bool same = bits_of(first[i]) == bits_of(p.c[i]) || (first[i] == 0 && p.c[i] == 0);
          wrong += !same && !(isnan(first[i]) && isnan(p.c[i]));
        }
        if (!CHECK_INT(wrong, 0)) {
          printf("\n  %s: %lld x %lld x %lld, flags %d, scale %d", ops->name, (long long)g->rows,
                 (long long)g->columns, (long long)g->inner, flags, scale);
        }
        free(first);
        product_free(&p);
      }
    }
  }
}

/* A table's own ways, and where they are instructions their twin's. */
static void test_table(const rp_ops *ops) {
  test_rounding(ops->name, ops->gemm);
  test_stored(ops);
  if (!has_twin(ops)) return;
  test_same_bits(ops);
  rpi_cpu_hide(RPI_CPU_BF16);
  test_rounding("the twin", ops->gemm);
  test_stored(ops);
  rpi_cpu_hide(0);
}

int main(void) {
  setenv("RELPOS_BLAS", "builtin", 1);
  const rpi_float_state caller = rpi_float_enter(false); /* denormal numbers are zeros, as ever */
  for (int i = 0; table_at(i) != NULL; i++) test_table(table_at(i));
  rpi_float_leave(caller);
  printf("%s: ",
         (rpi_cpu_features() & RPI_CPU_BF16) != 0 ? "instructions and their twin" : "the twin");
  return check_report();
}
