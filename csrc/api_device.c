/* SPDX-License-Identifier: Apache-2.0
 *
 * api_device.c: the public functions of device.h: which devices there are, and their memory.
 *
 * Names, titles and problems are kept for as long as libcore lives: they are found once, under
 * pthread_once. How much memory is free is asked again at every call; of a GPU that was well and
 * no longer answers, the first reason is kept.
 */
#define _DEFAULT_SOURCE /* _SC_PHYS_PAGES */

#include "relpos/device.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "isa/devices.h"

enum { MOST_GPUS = 64 };

typedef struct gpu {
  char name[24], title[256], problem[512];
  int64_t memory;
  bool usable;
} gpu;

/* Written by look() under pthread_once, only read after it. Where there are no GPUs one line says
 * why. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static gpu gpus[MOST_GPUS];
static char cpu_problem[512];
static int lines;

static pthread_mutex_t loss = PTHREAD_MUTEX_INITIALIZER; /* of keep_loss alone */

static void keep_problem(gpu *g) { snprintf(g->problem, sizeof g->problem, "%s", rp_last_error()); }

/* The problem of a GPU that was usable, written once: others may be reading it. */
static const char *keep_loss(gpu *g) {
  pthread_mutex_lock(&loss);
  if (g->problem[0] == '\0') keep_problem(g);
  pthread_mutex_unlock(&loss);
  return g->problem;
}

static void look(void) {
  const rp_ops *ops;
  if (rpi_ops_get(&ops) != RP_OK) snprintf(cpu_problem, sizeof cpu_problem, "%s", rp_last_error());
  int count = 0;
  const rpc_door *door = NULL;
  if (rpi_device_door(&door) != RP_OK || door->count(&count) != RP_OK) {
    strcpy(gpus[0].name, "cuda");
    keep_problem(&gpus[0]);
    lines = 1;
    return;
  }
  lines = count < MOST_GPUS ? count : MOST_GPUS;
  for (int i = 0; i < lines; i++) {
    gpu *const g = &gpus[i];
    int64_t memory_free;
    snprintf(g->name, sizeof g->name, "cuda:%d", i);
    g->usable = door->describe(i, g->title, sizeof g->title, &g->memory, &memory_free) == RP_OK;
    if (!g->usable) keep_problem(g);
  }
}

int rp_device_count(void) {
  pthread_once(&once, look);
  return 1 + lines;
}

/* 0 where the system does not say. */
static int64_t pages(int which) {
  const long count = sysconf(which), bytes = sysconf(_SC_PAGESIZE);
  return count > 0 && bytes > 0 ? (int64_t)count * bytes : 0;
}

static rp_device describe_cpu(void) {
  const rp_ops *ops;
  const bool usable = rpi_ops_get(&ops) == RP_OK;
  rp_device cpu = {.name = "cpu", .title = usable ? ops->name : "none"};
  if (!usable) cpu.problem = cpu_problem;
  cpu.memory = pages(_SC_PHYS_PAGES);
  cpu.memory_free = pages(_SC_AVPHYS_PAGES);
  return cpu;
}

static rp_device describe_gpu(int index) {
  gpu *const g = &gpus[index];
  rp_device device = {.name = g->name, .title = g->title, .memory = g->memory};
  if (!g->usable) {
    device.problem = g->problem;
    return device;
  }
  char title[sizeof g->title];
  int64_t memory;
  const rpc_door *door = NULL;
  if (rpi_device_door(&door) != RP_OK ||
      door->describe(index, title, sizeof title, &memory, &device.memory_free) != RP_OK) {
    device.problem = keep_loss(g);
  }
  return device;
}

/* The struct only ever grows at its end; see rp_build_info_get. */
rp_status rp_device_get(int index, rp_device *device) {
  const size_t first_version = offsetof(rp_device, problem) + sizeof(const char *);
  RPI_CHECK(device != NULL, RP_ERROR_ARGUMENT, "rp_device_get: device is NULL");
  const size_t size = device->struct_size;
  RPI_CHECK(size >= first_version, RP_ERROR_ARGUMENT,
            "rp_device_get: device.struct_size is %zu, expected sizeof(rp_device) = %zu", size,
            sizeof(rp_device));
  const int count = rp_device_count();
  RPI_CHECK(index >= 0 && index < count, RP_ERROR_ARGUMENT,
            "rp_device_get: index is %d, expected 0 to %d", index, count - 1);
  rp_device known = index == 0 ? describe_cpu() : describe_gpu(index - 1);
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
            (long long)bytes);
  RPI_TRY(rpi_device_ops(device, &ops));
  const rp_status status = ops->allocate(bytes, memory);
  if (status != RP_ERROR_MEMORY) return status;
  return rpi_fail(status, "rp_device_allocate: %s has no %lld bytes of memory left",
                  device != NULL ? device : "cpu", (long long)bytes);
}

rp_status rp_device_free(const char *device, void *memory) {
  const rp_ops *ops;
  RPI_TRY(rpi_device_ops(device, &ops));
  ops->release(memory);
  return RP_OK;
}

static rp_status check_move(const char *function, const void *to, const void *from, int64_t bytes) {
  RPI_CHECK(bytes >= 0, RP_ERROR_ARGUMENT, "%s: bytes is %lld, expected 0 or more", function,
            (long long)bytes);
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
