/* SPDX-License-Identifier: Apache-2.0
 *
 * faults.h: calls of the file seam and of the allocator that go through to the system, count, and
 * fail where a test wants them to; and a folder with the one file that a test writes.
 *
 *   rpi_set_io(&faulty_io);
 *   rpi_set_allocator(&faulty_allocator);
 *   for (int n = 1; ...; n++) {
 *     reset();
 *     faults.fail_at = n;                the n-th call of any kind fails ...
 *     faults.error = EIO;                ... with this in errno
 *     ... faults.last == NULL afterwards: there is no n-th call
 *   }
 *
 * The file that includes it defines _POSIX_C_SOURCE.
 */
#ifndef FAULTS_H
#define FAULTS_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/memory.h"
#include "check.h"

/* ---- counting and failing ------------------------------------------------ */

static struct {
  int calls, fail_at, error; /* the call of this number fails with this; 0: none */
  int opened;                /* descriptors now open */
  int mapped;                /* files now mapped */
  int64_t largest;           /* bytes that one read or write moves; 0: all */
  bool interrupt;            /* every other call fails with EINTR first */
  bool no_progress;          /* writes give 0 */
  bool odd;
  const char *last; /* name of the call that failed */
} faults;

static bool fails(const char *name) {
  if (faults.interrupt && (faults.odd = !faults.odd)) {
    errno = EINTR;
    return true;
  }
  if (++faults.calls != faults.fail_at) return false;
  faults.last = name;
  errno = faults.error;
  return true;
}

static int64_t shortened(int64_t bytes) {
  return faults.largest != 0 && bytes > faults.largest ? faults.largest : bytes;
}

static int faulty_open(void *context, const char *path, int flags, int mode) {
  (void)context;
  /* nor is opened what programs that are started meanwhile would have */
  if (fails("open") || (flags & O_CLOEXEC) == 0) return -1;
  const int descriptor = open(path, flags, mode);
  if (descriptor >= 0) faults.opened++;
  return descriptor;
}

static int64_t faulty_read(void *context, int descriptor, void *buffer, int64_t bytes) {
  (void)context;
  if (fails("read")) return -1;
  return read(descriptor, buffer, (size_t)shortened(bytes));
}

static int64_t faulty_write(void *context, int descriptor, const void *buffer, int64_t bytes) {
  (void)context;
  if (fails("write")) return -1;
  if (faults.no_progress) return 0;
  return write(descriptor, buffer, (size_t)shortened(bytes));
}

static int faulty_sync(void *context, int descriptor) {
  (void)context;
  return fails("sync") ? -1 : fsync(descriptor);
}

/* As the system's: whatever close says, the descriptor is gone. */
static int faulty_close(void *context, int descriptor) {
  (void)context;
  const bool failed = fails("close");
  const int error = errno;
  faults.opened--;
  close(descriptor);
  errno = error;
  return failed ? -1 : 0;
}

static int faulty_rename(void *context, const char *from, const char *to) {
  (void)context;
  if (faults.interrupt) return rename(from, to); /* never interrupted */
  return fails("rename") ? -1 : rename(from, to);
}

static int faulty_remove(void *context, const char *path) {
  (void)context;
  if (faults.interrupt) return unlink(path);
  return fails("remove") ? -1 : unlink(path);
}

static int64_t faulty_mode(void *context, const char *path) {
  struct stat about;
  (void)context;
  if (!faults.interrupt && fails("mode")) return -1; /* never interrupted */
  return lstat(path, &about) == 0 ? (int64_t)about.st_mode : -1;
}

static void *faulty_map(void *context, int descriptor, int64_t *bytes) {
  struct stat about;
  (void)context;
  if (faults.interrupt) errno = 0; /* never interrupted */
  else if (fails("map")) return NULL;
  if (fstat(descriptor, &about) != 0) return NULL;
  void *const memory =
      mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor, 0);
  if (memory == MAP_FAILED) return NULL;
  faults.mapped++;
  *bytes = about.st_size;
  return memory;
}

static int faulty_unmap(void *context, void *memory, int64_t bytes) {
  (void)context;
  faults.mapped--;
  return munmap(memory, (size_t)bytes);
}

static const rpi_io faulty_io = {faulty_open,  faulty_read,   faulty_write,  faulty_sync,
                                 faulty_close, faulty_rename, faulty_remove, faulty_mode,
                                 faulty_map,   faulty_unmap,  NULL};

static struct {
  int calls, fail_at, held;
  size_t most; /* bytes that one call asked for */
} memory;

static void *faulty_allocate(void *context, size_t bytes) {
  (void)context;
  void *block = NULL;
  if (++memory.calls == memory.fail_at) return NULL;
  if (bytes > memory.most) memory.most = bytes;
  /* exactly so many bytes, for ASan to see the one beyond */
  if (posix_memalign(&block, RPI_ALIGN, bytes != 0 ? bytes : 1) != 0) return NULL;
  memory.held++;
  return block;
}

static void faulty_release(void *context, void *block) {
  (void)context;
  memory.held -= block != NULL;
  free(block);
}

static const rpi_allocator faulty_allocator = {faulty_allocate, faulty_release, NULL};

/* Faults set by the caller hold until reset() is called without them. */
static inline void reset(void) {
  memset(&faults, 0, sizeof faults);
  memset(&memory, 0, sizeof memory);
}

/* ---- a folder of our own ------------------------------------------------- */

static char folder[64] = "/tmp/relpos-test-XXXXXX";
static char path[128];

static inline int count_entries(void) {
  DIR *directory = opendir(folder);
  int count = 0;
  if (directory == NULL) return -1;
  while (readdir(directory) != NULL) count++;
  closedir(directory);
  return count - 2;
}

static inline void put(const char *content, size_t bytes) {
  FILE *file = fopen(path, "wb");
  if (!CHECK(file != NULL)) return;
  CHECK(fwrite(content, 1, bytes, file) == bytes);
  fclose(file);
}

static inline bool file_is(const char *content, size_t bytes) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) return false;
  char *buffer = malloc(bytes + 1);
  const bool same = buffer != NULL && fread(buffer, 1, bytes + 1, file) == bytes &&
                    memcmp(buffer, content, bytes) == 0;
  free(buffer);
  fclose(file);
  return same;
}

/* All of the file at path, which the caller frees; NULL: a check has failed. */
static inline char *content_of(size_t *bytes) {
  FILE *const file = fopen(path, "rb");
  if (!CHECK(file != NULL && fseek(file, 0, SEEK_END) == 0)) return NULL;
  *bytes = (size_t)ftell(file);
  rewind(file);
  char *const content = malloc(*bytes + 1);
  CHECK(content != NULL && fread(content, 1, *bytes, file) == *bytes);
  fclose(file);
  return content;
}

static inline bool make_folder(void) {
  if (mkdtemp(folder) == NULL) return false;
  snprintf(path, sizeof path, "%s/file", folder);
  return true;
}

/* False where something but the file was left in it. */
static inline bool remove_folder(void) {
  unlink(path);
  return rmdir(folder) == 0;
}

#endif
