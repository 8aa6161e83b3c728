/* SPDX-License-Identifier: Apache-2.0
 *
 * host.h: entries of the table that all processors share, compiled once: what they give must not
 * depend on the instruction set.
 */
#ifndef RPI_HOST_H
#define RPI_HOST_H

#include "ops/ops.h"

rp_status rpi_host_decide(const rpi_decide_args *args);

#endif
