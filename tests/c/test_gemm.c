/* SPDX-License-Identifier: Apache-2.0
 *
 * The matrix product, in every table this machine can run, with the BLAS that is
 * found and (in a child process) with our own product; operands in f32, and rounded to bf16.
 *
 * Small products are compared with sums in extended precision. Each result may be
 * off by what the plain loop may: with u the unit roundoff and n additions,
 *
 *   |c - exact| <= gamma_n sum |a||b|,   gamma_n = n u / (1 - n u)     (Higham, 3.1)
 *
 * which holds for any order of the additions, and so needs no second guess. For large
 * ones, C x = A (B x) for a random x of signs: O(n^2) instead of O(n^3), and a wrong
 * element of C cannot hide but with probability 1/2, for two such x 1/4.
 *
 * With RELPOS_TEST_SMALL set (make asan, tsan, neon) shapes are fewer and smaller, but
 * the same code computes them: several blocks of C and panels of B, dots and sums in C cut
 * into tasks, every transpose, every number of rows, products that wake the pool.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/blas.h"
#include "base/scratch.h"
#include "check.h"
#include "products.h"
#include "tables.h"

/* Of product_create: in double nothing is rounded to bf16. */
enum { FLAGS = RPI_REAL_BYTES == 4 ? 32 : 16 };

/* The error of whole rows, as a share of what is allowed: C x against A (B x), x of signs. The
 * numbers are uniform in
 * (-1, 1): a sum of k products has a deviation of sqrt(k) / 3, rounding it one of
 * u / sqrt(3) of that at most, and `inner` such roundings, added like independent
 * numbers, one of u inner / sqrt(54). Over the columns they add up in the same way;
 * six deviations are allowed. */
static double worst_projection(const product *p) {
  const rpi_gemm_args *const g = &p->args;
  const double allowed = 6 * UNIT * (double)(g->inner + 2) / sqrt(54) * sqrt((double)g->columns);
  double worst = 0, *const x = calloc((size_t)g->columns, sizeof(double));
  long double *const bx = calloc((size_t)g->inner, sizeof(long double));
  if (x == NULL || bx == NULL) abort();
  for (int64_t j = 0; j < g->columns; j++) x[j] = (draw() & 64) != 0 ? 1 : -1;
  for (int64_t j = 0; j < g->columns; j++) {
    for (int64_t k = 0; k < g->inner; k++) bx[k] += element_b(g, k, j) * (long double)x[j];
  }
  for (int64_t row = 0; row < g->rows; row++) {
    long double got = 0, expected = 0;
    for (int64_t j = 0; j < g->columns; j++) {
      const int64_t at = row * g->c_stride + j;
      got += g->c[at] * (long double)x[j];
      if (g->accumulate) expected += p->before[g->c_stride + at] * (long double)x[j];
      if (g->bias != NULL) expected += g->bias[j] * (long double)x[j];
    }
    for (int64_t k = 0; k < g->inner; k++) expected += element_a(g, row, k) * bx[k];
    worst = fmax(worst, (double)fabsl(got - expected) / allowed);
    if (isnan(got)) worst = INFINITY;
  }
  free(x);
  free(bx);
  return worst;
}

static void report(const rp_ops *ops, const product *p, const char *what, double worst) {
  const rpi_gemm_args *const g = &p->args;
  printf("\n  %s %s %lld x %lld x %lld, A%s B%s%s%s: %s, %g of the allowed error", ops->name,
         rpi_blas_description(), (long long)g->rows, (long long)g->columns, (long long)g->inner,
         g->transpose_a ? "'" : "", g->transpose_b ? "'" : "", g->accumulate ? ", accumulate" : "",
         g->bias != NULL ? ", bias" : "", what, worst);
}

/* A small run takes the first SMALL_SIZES. */
static const int64_t sizes[] = {0, 1, 6, 7, 33, 65, 2, 5, 31, 32, 63, 64, 127, 211};
enum { SMALL_SIZES = 6, SIZES = sizeof sizes / sizeof sizes[0] };

static void one(const rp_ops *ops, int64_t rows, int64_t columns, int64_t inner, int flags,
                int64_t extra) {
  product p = product_create(rows, columns, inner, flags, extra);
  CHECK_INT(ops->gemm(&p.args), RP_OK);
  const double worst = worst_element(&p, 0);
  if (!CHECK(worst <= 1)) report(ops, &p, "element", worst);
  if (!CHECK(canaries_alive(&p))) report(ops, &p, "wrote beyond C", worst);
  product_free(&p);
}

/* Every pair of sizes meets every transpose; the third size, the other flags and the
 * strides are drawn. */
static void test_small(const rp_ops *ops) {
  const int count = is_small_run() ? SMALL_SIZES : SIZES;
  for (int i = 0; i < count; i++) {
    for (int j = 0; j < count; j++) {
      for (int transposes = 0; transposes < 4; transposes++) {
        const int flags = transposes + 4 * (int)(draw() % (FLAGS / 4));
        const int64_t third = sizes[draw() % (uint32_t)count];
        const int64_t extra = draw() % 3 == 0 ? draw() % 20 : 0;
        switch (draw() % 3) {
          case 0: one(ops, sizes[i], sizes[j], third, flags, extra); break;
          case 1: one(ops, sizes[i], third, sizes[j], flags, extra); break;
          default: one(ops, third, sizes[i], sizes[j], flags, extra); break;
        }
      }
    }
  }
  /* Every strip of tile.h, whole and ragged: with A and B transposed no row is too few. */
  for (int64_t rows = 1; rows <= 6; rows++) {
    for (int64_t columns = 4; columns <= 64; columns += 4) {
      one(ops, rows, columns, 19, 3, 1);
      one(ops, rows, columns - 1, 19, 7, 0);
    }
  }
  /* Every number of rows around what few rows are; a long inner. */
  for (int flags = 0; flags < FLAGS; flags++) {
    for (int64_t rows = 1; rows <= 40; rows++) {
      if (!is_small_run() || rows % 5 == flags % 5) one(ops, rows, 17, 35, flags, 1);
    }
    one(ops, 3, 2, 1031, flags, 0);
    one(ops, 37, 3, 1031, flags, 0);
  }
}

/* Shapes of several blocks, by the way they are computed: blocks of C; dots; streams; sums in C,
 * whose columns come in spans; blocks that are few but deep. */
static const int64_t large[][3] = {
    {547, 1033, 521}, {31, 2053, 769}, {5, 2053, 769}, {16, 9001, 11}, {1031, 67, 1283}};
static const int64_t large_small[][3] = {
    {113, 149, 261}, {31, 149, 512}, {5, 149, 512}, {16, 9001, 5}};
enum {
  LARGE = sizeof large / sizeof large[0],
  LARGE_SMALL = sizeof large_small / sizeof large_small[0]
};

static void test_large(const rp_ops *ops) {
  for (int i = 0; i < (is_small_run() ? LARGE_SMALL : LARGE); i++) {
    const int64_t *const shape = is_small_run() ? large_small[i] : large[i];
    for (int flags = 0; flags < FLAGS; flags++) {
      product p = product_create(shape[0], shape[1], shape[2], flags, 3);
      CHECK_INT(ops->gemm(&p.args), RP_OK);
      for (int repeat = 0; repeat < 2; repeat++) {
        const double worst = worst_projection(&p);
        if (!CHECK(worst <= 1)) report(ops, &p, "projection", worst);
      }
      CHECK(canaries_alive(&p));
      product_free(&p);
    }
  }
}

/* The number of threads changes no bit. */
static void test_threads(const rp_ops *ops) {
  static const int64_t shapes[][3] = {
      {547, 613, 521}, {32, 1033, 769}, {7, 1033, 769}, {5, 1033, 769}};
  static const int64_t small[][3] = {{113, 149, 67}, {32, 293, 131}, {7, 293, 131}, {5, 293, 131}};
  static const int threads[] = {1, 2, 3, 8, 3};
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
    const int64_t *const shape = is_small_run() ? small[i] : shapes[i];
    for (int flags = 0; flags < FLAGS; flags++) {
      product p = product_create(shape[0], shape[1], shape[2], flags, 0);
      const size_t bytes = (size_t)p.c_size * sizeof(real);
      real *const first = malloc(bytes);
      if (first == NULL) abort();
      for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
        memcpy(p.c, p.before, bytes);
        CHECK_INT(rp_set_threads(threads[t]), RP_OK);
        CHECK_INT(ops->gemm(&p.args), RP_OK);
        if (t == 0) memcpy(first, p.c, bytes);
        else if (!CHECK(memcmp(first, p.c, bytes) == 0)) report(ops, &p, "bits differ", 0);
      }
      free(first);
      product_free(&p);
    }
  }
  rp_set_threads(0);
}

/* Nor does scratch memory that others have taken. */
static void test_without_scratch(const rp_ops *ops) {
  static const int64_t shapes[][3] = {{70, 75, 300}, {41, 130, 35}};
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
    for (int flags = 0; flags < FLAGS; flags++) {
      product p = product_create(shapes[i][0], shapes[i][1], shapes[i][2], flags, 1);
      real *const first = product_result(&p, ops->gemm);
      void *taken[RPI_SCRATCH_PIECES];
      for (int n = 0; n < RPI_SCRATCH_PIECES; n++) taken[n] = rpi_scratch_take();
      CHECK(taken[RPI_SCRATCH_PIECES - 1] != NULL && rpi_scratch_take() == NULL);
      CHECK_INT(ops->gemm(&p.args), RP_OK);
      for (int n = 0; n < RPI_SCRATCH_PIECES; n++) rpi_scratch_give(taken[n]);
      if (!CHECK(product_is(&p, first))) report(ops, &p, "without scratch, other bits", 0);
      free(first);
      product_free(&p);
    }
  }
}

/* A product with infinity and NaN in A: the rows that hold them, and no others. NaN is the last of
 * an odd inner. */
static void test_not_finite(const rp_ops *ops) {
  for (int64_t rows = 5; rows <= 50; rows += 45) {
    for (int flags = 0; flags < FLAGS; flags += flags % 4 == 3 ? 13 : 1) { /* transposes */
      product p = product_create(rows, 70, 21, flags, 0);
      rpi_gemm_args *const g = &p.args;
      p.a[g->transpose_a ? 3 * g->a_stride + 1 : g->a_stride + 3] = (real)INFINITY;
      p.a[g->transpose_a ? 20 * g->a_stride + 4 : 4 * g->a_stride + 20] = (real)NAN;
      CHECK_INT(ops->gemm(g), RP_OK);
      bool right = true;
      for (int64_t row = 0; row < rows; row++) {
        for (int64_t j = 0; j < 70; j++) {
          const real c = g->c[row * g->c_stride + j];
          right = right && (row == 1 ? isinf(c) != 0 : row == 4 ? isnan(c) != 0 : isfinite(c) != 0);
        }
      }
      if (!CHECK(right)) report(ops, &p, "not finite", 0);
      product_free(&p);
    }
  }
}

static int test_all(void) {
  for (int i = 0; table_at(i) != NULL; i++) {
    const rp_ops *const ops = table_at(i);
    test_small(ops);
    test_large(ops);
    test_threads(ops);
    if (!is_device_run()) test_without_scratch(ops);
    test_not_finite(ops);
  }
  printf("%s: ", rpi_blas_description());
  const int failed = check_report();
  fflush(stdout);
  return failed;
}

int main(void) {
  if (is_device_run()) return test_all();
  const pid_t child = fork(); /* before the choice, which is made once per process */
  if (child == 0) {
    setenv("RELPOS_BLAS", "builtin", 1);
    _exit(test_all());
  }
  int ended = 1;
  if (child < 0 || waitpid(child, &ended, 0) != child || ended != 0) {
    printf("our own product failed\n");
    return 1;
  }
  /* Without a BLAS this process would only repeat what the child has done. */
  setenv("RELPOS_BLAS", "openblas", 1);
  if (strncmp(rpi_blas_description(), "builtin", 7) == 0) return 0;
  return test_all();
}
