/* SPDX-License-Identifier: Apache-2.0
 *
 * api_device.c: the public functions of device.h: which devices there are, and their memory. They
 * check and call inward.
 */
#include "relpos/device.h"

#include <string.h>

#include "base/error.h"
#include "isa/device_list.h"
#include "isa/devices.h"

int rp_device_count(void) { return rpi_device_count(); }

/* The struct only ever grows at its end; see rp_build_info_get. */
rp_status rp_device_get(int index, rp_device *device) {
  const size_t first_version = offsetof(rp_device, problem) + sizeof(const char *);
  RPI_CHECK(device != NULL, RP_ERROR_ARGUMENT, "rp_device_get: device is NULL");
  const size_t size = device->struct_size;
  RPI_CHECK(size >= first_version && size <= RPI_MOST_STRUCT, RP_ERROR_ARGUMENT,
            "rp_device_get: device.struct_size=%zu, must be %zu: set it to sizeof(rp_device)", size,
            sizeof(rp_device));
  const int count = rpi_device_count();
  RPI_CHECK(index >= 0 && index < count, RP_ERROR_ARGUMENT,
            "rp_device_get: index is %d, expected 0 to %d", index, count - 1);
  rp_device known = rpi_device_at(index);
  known.struct_size = size;
  memset(device, 0, size);
  memcpy(device, &known, size < sizeof known ? size : sizeof known);
  return RP_OK;
}

rp_status rp_device_allocate(const char *device, int64_t bytes, void **memory) {
  const rp_ops *ops;
  RPI_CHECK(memory != NULL, RP_ERROR_ARGUMENT, "rp_device_allocate: memory is NULL");
  *memory = NULL;
  RPI_CHECK(bytes >= 0, RP_ERROR_ARGUMENT, "rp_device_allocate: bytes is %lld, expected 0 or more",
            (rpi_wide)bytes);
  RPI_TRY(rpi_device_ops(device, &ops));
  RPI_TRY_MEMORY(ops->allocate(bytes, memory),
                 "rp_device_allocate: %s has no %lld bytes of memory left",
                 device != NULL ? device : "cpu", (rpi_wide)bytes);
  return RP_OK;
}

rp_status rp_device_free(const char *device, void *memory) {
  const rp_ops *ops = NULL;
  const rp_status status = rpi_device_ops(device, &ops);
  if (ops == NULL) return status; /* memory is given back whatever is wrong with the threads */
  ops->release(memory);
  return RP_OK;
}

static rp_status check_move(const char *function, const void *to, const void *from, int64_t bytes) {
  RPI_CHECK(bytes >= 0, RP_ERROR_ARGUMENT, "%s: bytes is %lld, expected 0 or more", function,
            (rpi_wide)bytes);
  RPI_CHECK(bytes == 0 || (to != NULL && from != NULL), RP_ERROR_ARGUMENT, "%s: %s is NULL",
            function, to == NULL ? "to" : "from");
  return RP_OK;
}

rp_status rp_device_write(const char *device, void *to, const void *from, int64_t bytes) {
  const rp_ops *ops;
  RPI_TRY(check_move("rp_device_write", to, from, bytes));
  RPI_TRY(rpi_device_ops(device, &ops));
  RPI_TRY(ops->write(to, from, bytes));
  return rpi_device_wait(device);
}

rp_status rp_device_read(const char *device, void *to, const void *from, int64_t bytes) {
  const rp_ops *ops;
  RPI_TRY(check_move("rp_device_read", to, from, bytes));
  RPI_TRY(rpi_device_ops(device, &ops));
  return ops->read(to, from, bytes);
}
