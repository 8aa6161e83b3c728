/* SPDX-License-Identifier: Apache-2.0
 *
 * twin_table.c: the table "amx" with the twin of the tiles in plain C (ops/tiles.h), which runs on
 * any machine: the compiler puts vectors of 64 bytes together from those that it has. No product of
 * attention is too small for it.
 *
 * The Makefile builds tests of attention with this one table: test_attention_tiles and
 * test_attention_terms_tiles.
 */
#pragma GCC diagnostic ignored "-Wpsabi" /* nothing with such vectors is called from without */
#ifdef __clang__ /* 2^x of 16 lanes is no vector without their instructions: slow here, no more */
#pragma clang diagnostic ignored "-Wpass-failed"
#endif
#define RPI_VECTOR_BYTES 64
#define RPI_VECTORS 4
#define RPI_TILES
#define RPI_TILES_TWIN
#define RPI_TILED_LEAST(number) 1

#include "ops/ops.h"

extern const rp_ops twin_table, table_beside_twin;
int64_t twin_products(void);
#define RPI_OPS table_beside_twin
#define RPI_OPS_NAME "portable"
#define rpi_ops_amx twin_table
#include "isa/table.h"

int64_t twin_products(void) { return __atomic_load_n(&tile_products, __ATOMIC_RELAXED); }
