/* SPDX-License-Identifier: Apache-2.0
 *
 * x86-64 with AVX2 and FMA (Haswell and later): 6 x 2 of 16 registers hold sums.
 */
#if defined(__x86_64__)

#define RPI_VECTOR_BYTES 32
#define RPI_VECTORS 2
#define RPI_OPS rpi_ops_avx2
#define RPI_OPS_NAME "avx2"
#include "isa/table.h"

#else

typedef int rpi_no_avx2; /* an empty file is no C */

#endif
