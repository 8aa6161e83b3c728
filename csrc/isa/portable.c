/* SPDX-License-Identifier: Apache-2.0
 *
 * Any machine: vectors of 16 bytes, which every compiler target has or imitates.
 */
#define RPI_VECTOR_BYTES 16
#define RPI_VECTORS 2
#define RPI_OPS rpi_ops_portable
#define RPI_OPS_NAME "portable"
#include "isa/table.h"
