/* SPDX-License-Identifier: Apache-2.0
 *
 * file.c: reading files in parts, mapping them, and replacing a file so that a crash at any
 * moment leaves either the old content or the new.
 *
 *   mode - open temporary (must not exist) - write - sync - close - rename - sync folder
 *          `----------- a failure here removes the temporary -----------'
 *
 * Every call goes through the seam. A call that a signal interrupts is repeated;
 * a read or write that comes up short is continued. Two writers of one path, in
 * one process or several, have different temporary files: the later rename wins.
 */
#define _POSIX_C_SOURCE 200809L

#include "base/file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/memory.h"

/* Above 2 GiB some systems refuse, others come up short. */
#define LARGEST_TRANSFER ((int64_t)1 << 30)

enum { TEMPORARY_NAMES = 10000, SUFFIX_BYTES = 48, LONGEST_NAME = 255 };

/* ---- the system's calls ---------------------------------------------------- */

/* A FIFO that nobody writes to is empty: open would wait for a writer, and go on waiting after
 * every signal. Reads wait as ever. */
static int system_open(void *context, const char *path, int flags, int mode) {
  (void)context;
  if ((flags & O_ACCMODE) != O_RDONLY) return open(path, flags, mode);
  const int descriptor = open(path, flags | O_NONBLOCK, mode);
  if (descriptor >= 0) (void)fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) & ~O_NONBLOCK);
  return descriptor;
}

static int64_t system_read(void *context, int descriptor, void *buffer, int64_t bytes) {
  (void)context;
  return read(descriptor, buffer, (size_t)bytes);
}

static int64_t system_write(void *context, int descriptor, const void *buffer, int64_t bytes) {
  (void)context;
  return write(descriptor, buffer, (size_t)bytes);
}

static int system_sync(void *context, int descriptor) {
  (void)context;
  return fsync(descriptor);
}

static int system_close(void *context, int descriptor) {
  (void)context;
  return close(descriptor);
}

static int system_rename(void *context, const char *from, const char *to) {
  (void)context;
  return rename(from, to);
}

static int system_remove(void *context, const char *path) {
  (void)context;
  return unlink(path);
}

static int64_t system_mode(void *context, const char *path) {
  (void)context;
  struct stat about;
  return lstat(path, &about) == 0 ? (int64_t)about.st_mode : -1;
}

static void *system_map(void *context, int descriptor, int64_t *bytes) {
  (void)context;
  struct stat about;
  if (fstat(descriptor, &about) != 0) return NULL;
  void *const memory =
      mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, descriptor, 0);
  if (memory == MAP_FAILED) return NULL;
  *bytes = about.st_size;
  return memory;
}

static int system_unmap(void *context, void *memory, int64_t bytes) {
  (void)context;
  return munmap(memory, (size_t)bytes);
}

static const rpi_io system_io = {system_open,  system_read,   system_write,  system_sync,
                                 system_close, system_rename, system_remove, system_mode,
                                 system_map,   system_unmap,  NULL};
static const rpi_io *io = &system_io;

void rpi_set_io(const rpi_io *replacement) { io = replacement != NULL ? replacement : &system_io; }

/* ---- calls that a signal may interrupt ------------------------------------- */

static int io_open(const char *path, int flags) {
  int descriptor;
  do {
    descriptor = io->open(io->context, path, flags | O_CLOEXEC, 0666);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

static int io_sync(int descriptor) {
  int result;
  do {
    result = io->sync(io->context, descriptor);
  } while (result != 0 && errno == EINTR);
  return result;
}

/* Not repeated: after EINTR the descriptor is gone, and its number may already
 * be another thread's. */
static int io_close(int descriptor) {
  const int result = io->close(io->context, descriptor);
  return result != 0 && errno == EINTR ? 0 : result;
}

/* Reads until the buffer is full or the file ends. Bytes read; -1 and errno. */
static int64_t read_fully(int descriptor, char *buffer, int64_t bytes) {
  int64_t done = 0;
  while (done < bytes) {
    const int64_t rest = bytes - done;
    const int64_t part = io->read(io->context, descriptor, buffer + done,
                                  rest < LARGEST_TRANSFER ? rest : LARGEST_TRANSFER);
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) return -1;
    if (part == 0) break;
    done += part;
  }
  return done;
}

static int write_fully(int descriptor, const char *content, int64_t bytes) {
  int64_t done = 0;
  while (done < bytes) {
    const int64_t rest = bytes - done;
    const int64_t part = io->write(io->context, descriptor, content + done,
                                   rest < LARGEST_TRANSFER ? rest : LARGEST_TRANSFER);
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) return -1;
    if (part == 0) { /* would go on for ever */
      errno = EIO;
      return -1;
    }
    done += part;
  }
  return 0;
}

static rp_status fail_file(const char *verb, const char *path, int error) {
  char reason[128];
  if (strerror_r(error, reason, sizeof reason) != 0) {
    snprintf(reason, sizeof reason, "error %d", error);
  }
  return rpi_fail(RP_ERROR_FILE, "cannot %s '%s': %s", verb, path, reason);
}

/* ---- reading --------------------------------------------------------------- */

rp_status rpi_file_open(const char *path, rpi_file *file) {
  assert(path != NULL && file != NULL);
  const int descriptor = io_open(path, O_RDONLY);
  if (descriptor < 0) return fail_file("open", path, errno);
  *file = (rpi_file){.path = path, .descriptor = descriptor, .position = 0};
  return RP_OK;
}

void rpi_file_close(rpi_file *file) { io_close(file->descriptor); }

rp_status rpi_file_take(rpi_file *file, void *buffer, int64_t bytes) {
  assert(bytes >= 0 && (buffer != NULL || bytes == 0));
  const int64_t part = read_fully(file->descriptor, buffer, bytes);
  if (part < 0) return fail_file("read", file->path, errno);
  file->position += part;
  RPI_CHECK(part == bytes, RP_ERROR_FILE,
            "cannot read '%s': it ends after %lld bytes, where %lld more were expected", file->path,
            (long long)file->position, (long long)(bytes - part));
  return RP_OK;
}

rp_status rpi_file_expect_end(rpi_file *file) {
  char more;
  const int64_t part = read_fully(file->descriptor, &more, 1);
  if (part < 0) return fail_file("read", file->path, errno);
  RPI_CHECK(part == 0, RP_ERROR_FILE, "cannot read '%s': it goes on after the %lld bytes expected",
            file->path, (long long)file->position);
  return RP_OK;
}

/* ---- mapping --------------------------------------------------------------- */

rp_status rpi_file_map(const rpi_file *file, rpi_mapping *mapping) {
  int64_t bytes = 0;
  void *const memory = io->map(io->context, file->descriptor, &bytes);
  if (memory == NULL) return fail_file("map", file->path, errno);
  *mapping = (rpi_mapping){.memory = memory, .bytes = bytes};
  return RP_OK;
}

void rpi_file_unmap(rpi_mapping *mapping) {
  if (mapping->memory != NULL) (void)io->unmap(io->context, mapping->memory, mapping->bytes);
  *mapping = (rpi_mapping){.memory = NULL};
}

/* ---- writing --------------------------------------------------------------- */

/* A rename would put a file in the place of a device or a FIFO, too. */
static rp_status check_replaceable(const char *path) {
  const int64_t mode = io->mode(io->context, path);
  if (mode < 0) return errno == ENOENT ? RP_OK : fail_file("replace", path, errno);
  if (S_ISDIR((mode_t)mode)) return fail_file("replace", path, EISDIR);
  RPI_CHECK(S_ISREG((mode_t)mode) || S_ISLNK((mode_t)mode), RP_ERROR_FILE,
            "cannot replace '%s': it is no regular file", path);
  return RP_OK;
}

/* Creates a file that did not exist, beside path. Its name goes to `name`: that of path, as much of
 * it as leaves room for more. */
static int open_temporary(const char *path, char *name, size_t name_bytes) {
  const char *const slash = strrchr(path, '/');
  const int folder = slash == NULL ? 0 : (int)(slash + 1 - path);
  int descriptor = -1;
  for (int i = 0; i < TEMPORARY_NAMES; i++) {
    snprintf(name, name_bytes, "%.*s%.*s.%ld.%d.tmp", folder, path, LONGEST_NAME - SUFFIX_BYTES,
             path + folder, (long)getpid(), i);
    descriptor = io_open(name, O_WRONLY | O_CREAT | O_EXCL);
    if (descriptor >= 0 || errno != EEXIST) break;
  }
  return descriptor;
}

static rp_status write_temporary(int descriptor, const char *path, const rpi_file_part *parts,
                                 int64_t count) {
  int error = 0;
  for (int64_t i = 0; i < count && error == 0; i++) {
    if (write_fully(descriptor, parts[i].content, parts[i].bytes) != 0) error = errno;
  }
  if (error == 0 && io_sync(descriptor) != 0) error = errno;
  if (io_close(descriptor) != 0 && error == 0) error = errno;
  return error == 0 ? RP_OK : fail_file("write", path, error);
}

/* Makes the rename itself survive a loss of power. `folder` has room for path. */
static rp_status sync_folder(const char *path, char *folder) {
  strcpy(folder, path);
  char *slash = strrchr(folder, '/');
  if (slash == NULL) strcpy(folder, ".");
  else slash[slash == folder ? 1 : 0] = '\0';
  const int descriptor = io_open(folder, O_RDONLY | O_DIRECTORY);
  if (descriptor < 0) return fail_file("sync the folder", folder, errno);
  int error = 0;
  /* EINVAL: this file system has no such thing as syncing a folder. */
  if (io_sync(descriptor) != 0 && errno != EINVAL) error = errno;
  io_close(descriptor);
  return error == 0 ? RP_OK : fail_file("sync the folder", folder, error);
}

rp_status rpi_file_replace(const char *path, const rpi_file_part *parts, int64_t count) {
  assert(path != NULL && count >= 0 && (parts != NULL || count == 0));
  RPI_TRY(check_replaceable(path));
  const size_t name_bytes = strlen(path) + SUFFIX_BYTES;
  char *name = rpi_allocate(name_bytes);
  RPI_CHECK(name != NULL, RP_ERROR_MEMORY, "no memory to write '%s'", path);
  rp_status status;
  const int descriptor = open_temporary(path, name, name_bytes);
  if (descriptor < 0) {
    status = fail_file("create a file beside", path, errno);
  } else {
    status = write_temporary(descriptor, path, parts, count);
    if (status == RP_OK && io->rename(io->context, name, path) != 0) {
      status = fail_file("replace", path, errno);
    }
    if (status != RP_OK) io->remove(io->context, name);
    else status = sync_folder(path, name);
  }
  rpi_release(name);
  return status;
}
