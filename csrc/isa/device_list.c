/* SPDX-License-Identifier: Apache-2.0
 *
 * device_list.c: which devices there are, found once.
 *
 * Names, titles and problems are kept for as long as libcore lives: they are found under
 * pthread_once. How much memory is free is asked again at every call; of a GPU that was well and
 * no longer answers, the first reason is kept.
 */
#define _DEFAULT_SOURCE /* _SC_PHYS_PAGES */

#include "isa/device_list.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "isa/devices.h"

typedef struct gpu {
  char name[24], title[256], problem[512];
  int64_t memory;
  bool usable;
} gpu;

/* Written by look() under pthread_once, only read after it. Where there are no GPUs one line says
 * why. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static gpu gpus[RPI_MOST_GPUS];
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
  const rp_ops *ops = NULL; /* stays so where there is none; threads are no matter of a device */
  if (rpi_ops_get(&ops) != RP_OK && ops == NULL) {
    snprintf(cpu_problem, sizeof cpu_problem, "%s", rp_last_error());
  }
  int count = 0;
  const rpc_door *door = NULL;
  if (rpi_device_door(&door) != RP_OK || door->count(&count) != RP_OK) {
    strcpy(gpus[0].name, "cuda");
    keep_problem(&gpus[0]);
    lines = 1;
    return;
  }
  lines = count < RPI_MOST_GPUS ? count : RPI_MOST_GPUS;
  for (int i = 0; i < lines; i++) {
    gpu *const g = &gpus[i];
    int64_t memory_free;
    snprintf(g->name, sizeof g->name, "cuda:%d", i);
    g->usable = door->describe(i, g->title, sizeof g->title, &g->memory, &memory_free) == RP_OK;
    if (!g->usable) keep_problem(g);
  }
}

int rpi_device_count(void) {
  pthread_once(&once, look);
  return 1 + lines;
}

/* 0 where the system does not say. */
static int64_t pages(int which) {
  const long count = sysconf(which), bytes = sysconf(_SC_PAGESIZE);
  return count > 0 && bytes > 0 ? (int64_t)count * bytes : 0;
}

static rp_device describe_cpu(void) {
  const rp_ops *ops = NULL;
  const bool usable = rpi_ops_get(&ops) == RP_OK || ops != NULL;
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

rp_device rpi_device_at(int index) {
  pthread_once(&once, look);
  return index == 0 ? describe_cpu() : describe_gpu(index - 1);
}
