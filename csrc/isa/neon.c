/* SPDX-License-Identifier: Apache-2.0
 *
 * AArch64: 6 x 4 of 32 registers hold sums.
 */
#if defined(__aarch64__)

#define RPI_VECTOR_BYTES 16
#define RPI_VECTORS 4
#define RPI_OPS rpi_ops_neon
#define RPI_OPS_NAME "neon"
#include "isa/table.h"

#else

typedef int rpi_no_neon; /* an empty file is no C */

#endif
