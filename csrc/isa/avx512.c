/* SPDX-License-Identifier: Apache-2.0
 *
 * x86-64 with AVX-512 F, VL, BW, DQ, CD: 6 x 4 of 32 registers hold sums. And the table "amx":
 * the same but for products of matrices, of layers and of long attention, which tiles compute
 * (ops/tiles.h).
 */
#include "base/cpu.h"

#if defined(__x86_64__)

#define RPI_VECTOR_BYTES 64
#define RPI_VECTORS 4
#define RPI_OPS rpi_ops_avx512
#define RPI_OPS_NAME "avx512"
#ifdef RPI_HAS_AMX
#define RPI_TILES
#endif
#include "isa/table.h"

#else

typedef int rpi_no_avx512; /* an empty file is no C */

#endif
