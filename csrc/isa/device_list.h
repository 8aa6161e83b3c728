/* SPDX-License-Identifier: Apache-2.0
 *
 * device_list.h: the devices by number: the CPU is 0, GPUs follow, or one line that says why there
 * are none.
 */
#ifndef RPI_DEVICE_LIST_H
#define RPI_DEVICE_LIST_H

#include "relpos/device.h"

int rpi_device_count(void);

/* Of a number below the count; struct_size is left 0. */
rp_device rpi_device_at(int index);

#endif
