/* SPDX-License-Identifier: Apache-2.0
 *
 * file.h: the one place where the core touches files.
 *
 * A seam like the allocator's: a test swaps the functions to let the n-th read,
 * write or sync fail, or come up short. Writing is crash-safe by construction:
 * a temporary name beside the target, written, synced, closed, renamed over the
 * target, and the folder synced. Until the rename the old file is untouched.
 *
 * The functions of the seam behave as the system's: a negative result, or not 0
 * from those that give no number, is a failure with its reason in errno.
 */
#ifndef RPI_FILE_H
#define RPI_FILE_H

#include "base/error.h"

typedef struct rpi_io {
  int (*open)(void *context, const char *path, int flags, int mode);
  int64_t (*read)(void *context, int descriptor, void *buffer, int64_t bytes);
  int64_t (*write)(void *context, int descriptor, const void *buffer, int64_t bytes);
  int (*sync)(void *context, int descriptor);
  int (*close)(void *context, int descriptor);
  int (*rename)(void *context, const char *from, const char *to);
  int (*remove)(void *context, const char *path);
  /* The mode of what path names, be it a link. */
  int64_t (*mode)(void *context, const char *path);
  /* All of a file, whose length goes to *bytes, as pages that may be written without the file
   * seeing it; NULL: failed. */
  void *(*map)(void *context, int descriptor, int64_t *bytes);
  int (*unmap)(void *context, void *memory, int64_t bytes);
  void *context;
} rpi_io;

/* As rpi_set_allocator: NULL restores the system's calls, and the struct must live
 * until then. */
void rpi_set_io(const rpi_io *io);

/* A file read in parts, from its start on. */
typedef struct rpi_file {
  const char *path; /* the caller's, who keeps it */
  int descriptor;
  int64_t position; /* bytes taken */
} rpi_file;

/* What was opened must be closed; after a failure nothing is open. */
rp_status rpi_file_open(const char *path, rpi_file *file);
void rpi_file_close(rpi_file *file);

/* The next bytes, exactly so many: a file that ends before is RP_ERROR_FILE. */
rp_status rpi_file_take(rpi_file *file, void *buffer, int64_t bytes);

/* RP_ERROR_FILE where there are bytes left. */
rp_status rpi_file_expect_end(rpi_file *file);

/* A whole file as pages of memory, read when they are first looked at. They may be written, which
 * the file does not see, and outlive its being closed or replaced; but a file that another process
 * writes into, or cuts short, changes or breaks them. */
typedef struct rpi_mapping {
  void *memory; /* NULL: none */
  int64_t bytes;
} rpi_mapping;

/* Whatever has been taken from the file. */
rp_status rpi_file_map(const rpi_file *file, rpi_mapping *mapping);
void rpi_file_unmap(rpi_mapping *mapping); /* takes one that is none */

/* A piece of what is written. */
typedef struct rpi_file_part {
  const void *content;
  int64_t bytes;
} rpi_file_part;

/* Replaces the file at path by the parts, one after the other, or leaves it as it was and removes
 * the temporary file. One exception: when nothing but the last step, syncing the folder, fails, the
 * new content is in place but may not survive a loss of power, and RP_ERROR_FILE says so. The new
 * file has the mode 0666 less the umask. What is there must be a regular file or a link, which is
 * replaced itself. */
rp_status rpi_file_replace(const char *path, const rpi_file_part *parts, int64_t count);

#endif
