/* SPDX-License-Identifier: Apache-2.0
 *
 * dispatch.h: the choice of an operation table, made once per process.
 */
#ifndef RPI_DISPATCH_H
#define RPI_DISPATCH_H

#include "ops/ops.h"

extern const rp_ops rpi_ops_portable, rpi_ops_avx2, rpi_ops_avx512, rpi_ops_amx, rpi_ops_neon;

/* The best table this machine can run, or the one RELPOS_ISA names. An unknown
 * or unavailable name is RP_ERROR_ARGUMENT, again at every call; so are an unknown RELPOS_BLAS
 * (base/blas.h) and a RELPOS_NUM_THREADS that is no number of threads (base/threads.h), but then
 * *ops is set. */
rp_status rpi_ops_get(const rp_ops **ops);

/* What multiplies bf16 in the table of rpi_ops_get: "AVX512-BF16", "AMX", or "none": plain code. */
const char *rpi_ops_bf16(void);

/* Names of the tables that can run here, best last, separated by spaces. */
const char *rpi_ops_available(void);

#endif
