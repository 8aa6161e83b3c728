/* SPDX-License-Identifier: Apache-2.0
 *
 * real.h: the scalar type of the core. float in libcore; double in libcore_f64,
 * which exists so that finite differences check the real code.
 */
#ifndef RPI_REAL_H
#define RPI_REAL_H

#include "relpos/relpos.h"

typedef rp_real real;

#ifdef RP_REAL_IS_DOUBLE
#define RPI_REAL_BYTES 8
#else
#define RPI_REAL_BYTES 4
#endif

/* double, whatever `real` is: who wants them as real says so */
#define RPI_LOG2_E 1.44269504088896340736 /* log2(e) */
#define RPI_LN2 0.69314718055994530942    /* log(2) */

#endif
