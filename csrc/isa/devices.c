/* SPDX-License-Identifier: Apache-2.0
 *
 * devices.c: the library of the GPUs, found and opened once.
 *
 * It lies beside libcore, or where RELPOS_CUDA_LIBRARY says, and is never closed. What went wrong
 * is kept, because every call that names a GPU says it again.
 */
#define _GNU_SOURCE

#include "isa/devices.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/folder.h"
#include "base/threads.h"

#define LIBRARY "librelpos_cuda.so"

/* Written by open_library() under pthread_once, only read after it. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static const rpc_door *door; /* NULL: see problem */
static char problem[RPI_SENTENCE];

static const rpc_host host = {.fail = rpi_fail};

/* Writes `problem`, cut to fit. */
static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(problem, sizeof problem, format, arguments);
  va_end(arguments);
}

/* The path of the library; false where libcore does not know its own. */
static bool find_path(char *path, size_t bytes) {
  const char *const given = getenv("RELPOS_CUDA_LIBRARY");
  if (given != NULL && given[0] != '\0') {
    return (size_t)snprintf(path, bytes, "%s", given) < bytes;
  }
  const char *const folder = rpi_own_folder();
  return folder[0] != '\0' && (size_t)snprintf(path, bytes, "%s" LIBRARY, folder) < bytes;
}

/* What lacks a library of CUDA is helped by a package, and what lacks ours by a build. */
static void say_why(const char *path) {
  const char *const text = dlerror();
  const char *const why = text != NULL ? text : "unknown reason";
  if (strstr(why, "libcublas") != NULL || strstr(why, "libcudart") != NULL) {
    say("CUDA's libraries cannot be loaded (%s); `pip install 'relpos[cuda]'` brings them", why);
  } else if (access(path, F_OK) != 0) {
    say("relpos was built without CUDA, which takes nvcc and cuBLAS (docs/cuda.md): there is no %s",
        path);
  } else {
    say("%s cannot be loaded: %s", path, why);
  }
}

static void open_library(void) {
  char path[4096];
  if (!find_path(path, sizeof path)) {
    say("the folder of libcore, where %s would be, is unknown", LIBRARY);
    return;
  }
  void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    say_why(path);
    return;
  }
  /* ISO C has no cast from dlsym's object pointer to a function; POSIX has both of one size. */
  void *const found = dlsym(library, "rpc_open");
  rpc_open_fn open_door;
  memcpy(&open_door, &found, sizeof open_door);
  const rpc_door *const opened = found != NULL ? open_door(&host) : NULL;
  if (opened == NULL) {
    say("%s is no library of relpos: it has no rpc_open", path);
  } else if (strcmp(opened->version, RP_VERSION) != 0 || opened->ops_bytes != RPC_OPS_BYTES) {
    say("%s is of relpos %s with a table of %zu bytes, expected %s with %zu", path, opened->version,
        opened->ops_bytes, RP_VERSION, RPC_OPS_BYTES);
  } else {
    door = opened;
  }
}

rp_status rpi_device_door(const rpc_door **opened) {
#ifdef RP_REAL_IS_DOUBLE
  return rpi_fail(RP_ERROR_DEVICE, "libcore_f64 computes on the CPU alone");
#endif
  pthread_once(&once, open_library);
  RPI_CHECK(door != NULL, RP_ERROR_DEVICE, "%s", problem);
  door->use(&host);
  *opened = door;
  return RP_OK;
}

/* The N of "cuda:N", 0 of "cuda"; -1 of others. */
static int index_of(const char *device) {
  if (strcmp(device, "cuda") == 0) return 0;
  if (strncmp(device, "cuda:", 5) != 0) return -1;
  const char *const digits = device + 5;
  const size_t length = strspn(digits, "0123456789");
  const bool padded = digits[0] == '0' && length > 1; /* "cuda:00" would be another name of one */
  return length >= 1 && length <= 4 && digits[length] == '\0' && !padded ? atoi(digits) : -1;
}

/* Selects a GPU for this thread. */
static rp_status select_gpu(const char *device) {
  char quoted[RPI_QUOTE], why[RPI_SENTENCE - 128];
  const int index = index_of(device);
  RPI_CHECK(index >= 0, RP_ERROR_ARGUMENT, "device is %s, expected cpu, cuda or cuda:N",
            rpi_quote(device, quoted));
  const rpc_door *gpus = NULL;
  int count = 0;
  if (rpi_device_door(&gpus) != RP_OK || gpus->count(&count) != RP_OK) {
    snprintf(why, sizeof why, "%s", rp_last_error());
    return rpi_fail(RP_ERROR_DEVICE, "device %s: %s", rpi_quote(device, quoted), why);
  }
  RPI_CHECK(index < count, RP_ERROR_DEVICE, "device %s: there %s %d GPU%s, cuda:0%s",
            rpi_quote(device, quoted), count == 1 ? "is" : "are", count, count == 1 ? "" : "s",
            count == 1 ? "" : " and on");
  const rp_status status = gpus->select(index);
  if (status == RP_OK) return RP_OK;
  snprintf(why, sizeof why, "%s", rp_last_error());
  return rpi_fail(status, "device %s: %s", rpi_quote(device, quoted), why);
}

static bool is_cpu(const char *device) { return device == NULL || strcmp(device, "cpu") == 0; }

bool rpi_device_same(const char *one, const char *other) {
  return is_cpu(one) || is_cpu(other) ? is_cpu(one) == is_cpu(other)
                                      : index_of(one) == index_of(other);
}

rp_status rpi_device_ops(const char *device, const rp_ops **ops) {
  if (is_cpu(device)) return rpi_ops_get(ops);
  RPI_TRY(select_gpu(device));
  *ops = door->ops;
  return rpi_threads_check(); /* the host has a share in the work */
}

rp_status rpi_device_wait(const char *device) {
  if (is_cpu(device)) return RP_OK;
  RPI_TRY(select_gpu(device));
  return door->wait();
}
