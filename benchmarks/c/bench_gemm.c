/* SPDX-License-Identifier: Apache-2.0
 *
 * bench_gemm.c: times the matrix product of one operation table. bench_gemm.py
 * compiles and runs it; it reads products from standard input, a line each:
 *
 *   rows columns inner transpose_a transpose_b copies
 *
 * and answers the median and the least seconds of the calls that fit a tenth of a second. With
 * copies > 1 the calls go round as many copies of B, so that B comes from memory, as
 * the weights of a model do when it decodes. The line "bandwidth" answers the
 * bytes a second at which all threads read 512 MiB.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/blas.h"
#include "base/threads.h"
#include "isa/dispatch.h"

enum { CALLS = 4000, SLICES = 512 };
#define SLICE ((int64_t)1 << 18) /* floats: 1 MiB */

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static real *numbers(int64_t count) {
  real *const all = aligned_alloc(64, (size_t)(count * (int64_t)sizeof(real) + 63) / 64 * 64);
  if (all == NULL) exit(1);
  uint32_t state = 1;
  for (int64_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    all[i] = (real)(int32_t)state / (real)2147483648.0;
  }
  return all;
}

static void time_product(const rp_ops *ops, rpi_gemm_args g, int64_t copies) {
  static double seconds[CALLS];
  const int64_t b_size = g.columns * g.inner;
  real *const a = numbers(g.rows * g.inner), *const b = numbers(copies * b_size);
  real *const c = numbers(g.rows * g.columns);
  g.a = a;
  g.c = c;
  const double begin = now();
  int calls = -2; /* two to warm up */
  for (; calls < 5 || (calls < CALLS && now() - begin < 0.1); calls++) {
    g.b = b + (calls + 2) % copies * b_size;
    const double from = now();
    ops->gemm(&g);
    if (calls >= 0) seconds[calls] = now() - from;
  }
  free(a);
  free(b);
  free(c);
  qsort(seconds, (size_t)calls, sizeof seconds[0], ascending);
  printf("%.4g %.4g\n", seconds[calls / 2], seconds[0]);
}

typedef struct reading {
  const float *from;
  float sum[SLICES];
} reading;

static void read_slice(void *context, int64_t task, int worker) {
  (void)worker;
  reading *const r = context;
  const float *const from = r->from + task * SLICE;
  float sum[64] = {0};
  for (int64_t i = 0; i < SLICE; i += 64) {
    for (int j = 0; j < 64; j++) sum[j] += from[i + j];
  }
  for (int j = 0; j < 64; j++) r->sum[task] += sum[j];
}

static double bandwidth(void) {
  static reading r;
  float *const all = calloc(SLICES * SLICE, sizeof(float));
  if (all == NULL) exit(1);
  memset(all, 1, SLICES * SLICE * sizeof(float));
  r.from = all;
  double best = 1e9;
  for (int i = 0; i < 7; i++) {
    const double from = now();
    rpi_parallel_for(SLICES, rp_get_threads(), read_slice, &r);
    if (now() - from < best) best = now() - from;
  }
  free(all);
  return (double)(SLICES * SLICE * 4) / best;
}

int main(void) {
  const rp_ops *ops;
  if (rpi_ops_get(&ops) != RP_OK) {
    fprintf(stderr, "%s\n", rp_last_error());
    return 1;
  }
  printf("%s, %s, %d threads\n", ops->name, rpi_blas_description(), rp_get_threads());
  fflush(stdout);
  char line[256];
  while (fgets(line, sizeof line, stdin) != NULL) {
    long long rows, columns, inner, copies;
    int transpose_a, transpose_b;
    if (strcmp(line, "bandwidth\n") == 0) {
      printf("%.4g\n", bandwidth());
    } else if (sscanf(line, "%lld %lld %lld %d %d %lld", &rows, &columns, &inner, &transpose_a,
                      &transpose_b, &copies) == 6) {
      const rpi_gemm_args g = {.rows = rows,
                               .columns = columns,
                               .inner = inner,
                               .a_stride = transpose_a ? rows : inner,
                               .b_stride = transpose_b ? inner : columns,
                               .c_stride = columns,
                               .transpose_a = transpose_a != 0,
                               .transpose_b = transpose_b != 0};
      time_product(ops, g, copies);
    } else {
      fprintf(stderr, "not understood: %s", line);
      return 1;
    }
    fflush(stdout);
  }
  return 0;
}
