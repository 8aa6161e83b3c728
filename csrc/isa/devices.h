/* SPDX-License-Identifier: Apache-2.0
 *
 * devices.h: tables of operations by the name of a device, and the door to the library that holds
 * those of GPUs.
 */
#ifndef RPI_DEVICES_H
#define RPI_DEVICES_H

#include <stdbool.h>

#include "isa/dispatch.h" /* the table of the CPU */

#ifdef __cplusplus
extern "C" {
#endif

/* The table of "cpu" (or NULL), "cuda" or "cuda:N", and for this thread the device on which its
 * entries work: every public call that computes on a device begins with this. Fails with
 * RP_ERROR_ARGUMENT for another name, with RP_ERROR_DEVICE where there is no such device. */
rp_status rpi_device_ops(const char *device, const rp_ops **ops);

/* Everything that the device has been asked to do is done. */
rp_status rpi_device_wait(const char *device);

/* Do two names, both of devices, mean one? "cuda" is "cuda:0". */
bool rpi_device_same(const char *one, const char *other);

/* ---- the door: librelpos_cuda.so exports rpc_open and nothing else ----------- */

typedef struct rpc_host {
  rp_status (*fail)(rp_status status, const char *format, ...)
      __attribute__((format(printf, 2, 3))); /* keeps the sentence */
} rpc_host;

enum { RPI_MOST_GPUS = 64 }; /* others are not counted */

/* Of the table, and of what its entries take: a library of another day is to be told apart. */
#define RPC_OPS_BYTES (sizeof(rp_ops) + sizeof(rp_attention))

/* Version and size are compared before anything behind them is read. */
typedef struct rpc_door {
  const char *version;            /* RP_VERSION */
  size_t ops_bytes;               /* RPC_OPS_BYTES */
  const rp_ops *ops;              /* of all devices: entries work on the one selected */
  rp_status (*count)(int *count); /* GPUs; RP_ERROR_DEVICE with the reason where there are none */
  rp_status (*describe)(int index, char *title, int64_t title_bytes, int64_t *memory,
                        int64_t *memory_free);
  rp_status (*select)(int index);    /* for this thread; the first time it is made ready */
  rp_status (*wait)(void);           /* for all that the selected device was asked to do */
  void (*use)(const rpc_host *host); /* whose sentences this thread's failures are from here on:
                                        a process may have several copies of libcore */
} rpc_door;

typedef const rpc_door *(*rpc_open_fn)(const rpc_host *host);

/* The door of the library, which is opened at the first call, for this thread; RP_ERROR_DEVICE and
 * why not. */
rp_status rpi_device_door(const rpc_door **opened);

#ifdef __cplusplus
}
#endif

#endif
