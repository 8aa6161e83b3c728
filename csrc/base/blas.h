/* SPDX-License-Identifier: Apache-2.0
 *
 * blas.h: a narrow door to somebody else's matrix product.
 *
 * libcore does not link BLAS. The library is looked for once, at first use:
 *
 *   as built for the wheel   libscipy_openblas.so beside the file this code lies
 *                            in, in ../lib from there, or where the loader looks
 *   RPI_BLAS_LIBRARY         (make BLAS=...) that file, symbols after RPI_BLAS_PREFIX
 *   RPI_BLAS_BUILTIN         (make BLAS=builtin) never
 *
 * Nothing found, or nothing that can be loaded, is no error: ops/gemm.c has its own
 * product, and says where it prefers that one. RELPOS_BLAS in the environment overrides
 * it at run time: builtin forgoes the library, openblas takes it for every product but
 * those of few rows and those in bf16.
 *
 * The library is told to use one thread: our tasks call it from several threads
 * at once. So that it starts no others, OPENBLAS_NUM_THREADS is 1 while it is loaded, in a
 * copy of the environment: getenv may be called meanwhile; a setenv in that moment may be
 * lost, or leave it at 1. The wheel's copy of the library is private to us, NumPy's is
 * another file; a library named at make time may be shared with the host, which then finds it
 * at one thread as well.
 *
 * RELPOS_ISA pins the kernels of OpenBLAS too, since they decide the last bits. That
 * takes OPENBLAS_CORETYPE in the same copy, if RELPOS_ISA is set and the user has not set it.
 */
#ifndef RPI_BLAS_H
#define RPI_BLAS_H

#include <stdbool.h>
#include <stdint.h>

#include "relpos/relpos.h"

enum { RPI_BLAS_ROW_MAJOR = 101, RPI_BLAS_PLAIN = 111, RPI_BLAS_TRANSPOSED = 112 };

/* More callers at once would make OpenBLAS, built for this many threads, complain
 * on stderr and grow its tables. */
#define RPI_BLAS_CALLERS 64

/* cblas_sgemm, or cblas_dgemm where rp_real is double. */
typedef void (*rpi_blas_gemm_fn)(int order, int transpose_a, int transpose_b, int rows, int columns,
                                 int inner, rp_real alpha, const rp_real *a, int a_stride,
                                 const rp_real *b, int b_stride, rp_real beta, rp_real *c,
                                 int c_stride);

/* NULL: there is none. Thread-safe; the same answer for the life of the process. */
rpi_blas_gemm_fn rpi_blas_gemm(void);

/* Whether the library is to be used even where our own product is faster: RELPOS_BLAS=openblas,
 * or a library named at make time. */
bool rpi_blas_insisted(void);

/* What was found, used or not: "OpenBLAS 0.3.34 SkylakeX", "builtin", "builtin
 * (libscipy_openblas.so not found)", or "cannot be loaded". */
const char *rpi_blas_description(void);

#endif
