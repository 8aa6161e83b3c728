/* SPDX-License-Identifier: Apache-2.0
 *
 * device.h: where arrays lie and what computes: this processor, or a GPU.
 *
 * Devices are named "cpu" and "cuda:0", "cuda:1", ...; "cuda" is "cuda:0". What computes on GPUs is
 * a library of its own, librelpos_cuda.so, which is looked for beside libcore when a device is
 * first asked for (or where RELPOS_CUDA_LIBRARY says); without it, or without a GPU, every call
 * that names one fails with RP_ERROR_DEVICE and says why.
 *
 * A model lies on the device that its rp_limits name (model.h); batches and results stay on the
 * host. For single operations the caller says where arrays lie by an rp_placement.
 */
#ifndef RELPOS_DEVICE_H
#define RELPOS_DEVICE_H

#include "relpos/relpos.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Types of numbers. */
enum { RP_F32 = 0, RP_BF16 = 1 };

/* Where the arrays of one attention call lie: those of rp_rows, tables, position_bias, lse, all
 * gradients and the workspace. The rest of rp_attention (lengths, offsets, labels, masks, ...) and
 * rows of maps are on the host. Start from rp_placement_default(). */
typedef struct rp_placement {
  size_t struct_size;
  const char *device; /* NULL: "cpu" */
  void *stream;  /* of a GPU: the CUDA stream to work on; NULL: the default stream. Calls return
                    before the work is done */
  int element;   /* of q, k, v, out and their gradients; RP_BF16 on GPUs alone. Tables, lse and
                    all other gradients are RP_F32 always */
  int precision; /* of products: RP_F32, or RP_BF16: operands rounded to it, sums in f32. Must
                    be RP_BF16 where element is */
} rp_placement;

static inline rp_placement rp_placement_default(void) {
  rp_placement placement;
  memset(&placement, 0, sizeof placement);
  placement.struct_size = sizeof placement;
  return placement;
}

/* One device. */
typedef struct rp_device {
  size_t struct_size;  /* to be set by the caller */
  const char *name;    /* "cpu", "cuda:0", ... */
  const char *title;   /* "NVIDIA H100 80GB HBM3"; of the CPU the instruction set: "avx512" */
  int64_t memory;      /* bytes; 0: unknown */
  int64_t memory_free; /* bytes, now; 0: unknown, as of a GPU that this process does not use */
  const char *problem; /* NULL: it can be used; else a sentence that says why not */
} rp_device;

/* Devices, usable or not: 0 is the CPU; a machine without GPU has one more line that says why.
 * RP_ERROR_ARGUMENT where there is no such index. Strings live as long as libcore. */
RP_API int rp_device_count(void);
RP_API rp_status rp_device_get(int index, rp_device *device);

/* Memory of a device, aligned to 64; *memory is NULL where it fails. Freeing takes NULL. */
RP_API rp_status rp_device_allocate(const char *device, int64_t bytes, void **memory);
RP_API rp_status rp_device_free(const char *device, void *memory);

/* To and from the host; they wait until the bytes are there. */
RP_API rp_status rp_device_write(const char *device, void *to, const void *from, int64_t bytes);
RP_API rp_status rp_device_read(const char *device, void *to, const void *from, int64_t bytes);

#ifdef __cplusplus
}
#endif

#endif /* RELPOS_DEVICE_H */
