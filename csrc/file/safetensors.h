/* SPDX-License-Identifier: Apache-2.0
 *
 * safetensors.h: named arrays in a file, in the safetensors format.
 *
 *   8 bytes   length of the header, little-endian
 *   header    JSON: {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets"}}
 *   data      the arrays, end to end; the writer has them begin at a multiple of RPI_ALIGN
 *
 * Arrays are F32 here, F64 in libcore_f64.
 */
#ifndef RPI_SAFETENSORS_H
#define RPI_SAFETENSORS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "base/file.h"
#include "relpos/relpos.h"

#define RPI_NAME 96 /* bytes of a tensor's name, with its zero */

enum { RPI_MOST_PAIRS = 1024 }; /* of metadata in one file */

typedef struct rpi_tensor {
  const char *name;
  int dimensions; /* 0 to 3 */
  int64_t shape[3];
  rp_real *data; /* read by the writer, written by the reader */
  int64_t place; /* for mapping: the number it begins at, in memory that has all of them */
} rpi_tensor;

typedef struct rpi_text_pair {
  const char *key, *value;
} rpi_text_pair;

/* Replaces the file at path, or leaves it as it was. No copy of the arrays is made. The order is
 * that given. Texts must be UTF-8, keys and names differ: else RP_ERROR_ARGUMENT. */
rp_status rpi_safetensors_write(const char *path, const rpi_text_pair *metadata, int64_t pairs,
                                const rpi_tensor *tensors, int64_t count);

/* By which the header of a file is known again: another file may have its path at the next call. */
typedef struct rpi_header_mark {
  uint64_t bytes, hash; /* 0, 0: of none so far, the first that is read is the one */
  bool changed;         /* another header was met, and that was refused */
} rpi_header_mark;

/* Reads exactly these tensors, whose names differ: RP_ERROR_FILE names the first that is missing,
 * unknown, of another shape or type, or a header that is not one, or not that of the mark (NULL:
 * any is). Nothing is written to them on failure: the data wait in memory of their own until all of
 * them are there. in_place: they do not, for tensors that nobody has yet. */
rp_status rpi_safetensors_read(const char *path, const rpi_tensor *tensors, int64_t count,
                               bool in_place, rpi_header_mark *mark);

/* Are these tensors what the file has, all of them, with their data? Fails as rpi_safetensors_read
 * does, and allocates no more than the header and some bytes a tensor. */
rp_status rpi_safetensors_check(const char *path, const rpi_tensor *tensors, int64_t count,
                                rpi_header_mark *mark);

/* As rpi_safetensors_read, but without a copy: *data is then the place 0 of these tensors in the
 * mapped file, and theirs is not looked at. NULL, with RP_OK and no mapping, where the file has
 * them in other places, does not begin its data at a multiple of RPI_ALIGN, or cannot be mapped. */
rp_status rpi_safetensors_map(const char *path, const rpi_tensor *tensors, int64_t count,
                              rpi_header_mark *mark, rpi_mapping *mapping, rp_real **data);

/* Calls each(context, key, value) for the metadata of a file whose whole header can be read; a
 * failure of it ends the calls. The texts live until it returns. */
rp_status rpi_safetensors_metadata(const char *path,
                                   rp_status (*each)(void *context, const char *key,
                                                     const char *value),
                                   void *context, rpi_header_mark *mark);

#endif
