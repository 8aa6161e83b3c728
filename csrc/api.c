/* SPDX-License-Identifier: Apache-2.0
 *
 * api.c: the public functions about the library itself: names of statuses, the
 * number of threads, build information. Attention's are in api_attention.c.
 *
 * They check their arguments and call inward; they hold no state.
 */
#include <string.h>

#include "base/blas.h"
#include "base/error.h"
#include "base/threads.h"
#include "isa/dispatch.h"

/* The build that knows its flags says so on the command line. */
#ifndef RPI_BUILD_FLAGS
#define RPI_BUILD_FLAGS "unknown"
#endif

#if defined(__clang__)
#define COMPILER __VERSION__ /* starts with its name */
#elif defined(__GNUC__)
#define COMPILER "gcc " __VERSION__
#else
#define COMPILER "unknown"
#endif

const char *rp_status_name(rp_status status) {
  switch (status) {
    case RP_OK: return "RP_OK";
    case RP_ERROR_ARGUMENT: return "RP_ERROR_ARGUMENT";
    case RP_ERROR_SHAPE: return "RP_ERROR_SHAPE";
    case RP_ERROR_MEMORY: return "RP_ERROR_MEMORY";
    case RP_ERROR_FILE: return "RP_ERROR_FILE";
    case RP_ERROR_ORDER: return "RP_ERROR_ORDER";
    case RP_ERROR_DEVICE: return "RP_ERROR_DEVICE";
  }
  return "unknown status";
}

rp_status rp_set_threads(int threads) {
  RPI_CHECK(threads >= 0 && threads <= RPI_MAX_THREADS, RP_ERROR_ARGUMENT,
            "rp_set_threads: threads is %d, expected 1 to %d, or 0 for the default", threads,
            RPI_MAX_THREADS);
  rpi_threads_set(threads);
  return RP_OK;
}

int rp_get_threads(void) { return rpi_threads_get(); }

const char *rp_version(void) { return RP_VERSION; }

/* The struct only ever grows at its end. A caller compiled against another version
 * gets the fields that both know; those that only the caller knows become zero. */
rp_status rp_build_info_get(rp_build_info *info) {
  const size_t first_version = offsetof(rp_build_info, threads) + sizeof(int);
  RPI_CHECK(info != NULL, RP_ERROR_ARGUMENT, "rp_build_info_get: info is NULL");
  const size_t size = info->struct_size;
  RPI_CHECK(size >= first_version && size <= RPI_MOST_STRUCT, RP_ERROR_ARGUMENT,
            "rp_build_info_get: info.struct_size=%zu, must be %zu: set it to sizeof(rp_build_info)",
            size, sizeof(rp_build_info));
  const rp_ops *ops = NULL;
  (void)rpi_ops_get(&ops);
  const rp_build_info known = {
      .struct_size = size,
      .version = RP_VERSION,
      .compiler = COMPILER,
      .flags = RPI_BUILD_FLAGS,
      /* A bad RELPOS_ISA is not this function's failure: bug reports need it most. */
      .isa = ops ? ops->name : "none",
      .isa_available = rpi_ops_available(),
      .blas = rpi_blas_description(),
      .real_bytes = (int)sizeof(rp_real),
      .threads = rpi_threads_get(),
      .bf16 = rpi_ops_bf16(),
  };
  const size_t common = size < sizeof known ? size : sizeof known;
  memset(info, 0, size);
  memcpy(info, &known, common);
  return RP_OK;
}
