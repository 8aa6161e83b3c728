/* SPDX-License-Identifier: Apache-2.0
 *
 * test_file.c: base/file.c, with every call of taking and of replacing failing in
 * turn, coming up short, or being interrupted. After each: no memory held, no
 * descriptor open, no temporary file left, the old content whole or the new one in
 * its place.
 */
#define _POSIX_C_SOURCE 200809L

#include "base/file.h"

#include <limits.h>
#include <pthread.h>
#include <sys/stat.h>

#include "check.h"
#include "faults.h"

static char *pattern(size_t bytes) {
  char *content = malloc(bytes + 1);
  for (size_t i = 0; i < bytes; i++) content[i] = (char)(i * 31 % 251);
  return content;
}

/* ---- tests ----------------------------------------------------------------- */

static rp_status replace(const char *to, const void *content, int64_t bytes) {
  return rpi_file_replace(to, &(rpi_file_part){content, bytes}, 1);
}

/* All of it, and its end. */
static rp_status take_whole(char *to, int64_t bytes) {
  rpi_file file;
  RPI_TRY(rpi_file_open(path, &file));
  rp_status status = rpi_file_take(&file, to, bytes);
  if (status == RP_OK) status = rpi_file_expect_end(&file);
  rpi_file_close(&file);
  return status;
}

static void check_read(const char *content, size_t bytes) {
  char *const got = malloc(bytes + 1);
  CHECK_INT(take_whole(got, (int64_t)bytes), RP_OK);
  CHECK(memcmp(got, content, bytes) == 0);
  CHECK_INT(faults.opened, 0);
  CHECK_INT(memory.held, 0);
  free(got);
}

static void test_round_trip(void) {
  static const size_t sizes[] = {0, 1, 65535, 65536, 65537, 131072, 500000};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    char *content = pattern(sizes[i]);
    reset();
    CHECK_INT(replace(path, content, (int64_t)sizes[i]), RP_OK);
    CHECK(file_is(content, sizes[i]));
    CHECK_INT(count_entries(), 1);
    CHECK_INT(faults.opened, 0);
    check_read(content, sizes[i]);
    free(content);
  }
}

static void test_short_and_interrupted(void) {
  char *content = pattern(100000);
  for (int interrupt = 0; interrupt < 2; interrupt++) {
    reset();
    faults.largest = 7777;
    faults.interrupt = interrupt != 0;
    CHECK_INT(replace(path, content, 100000), RP_OK);
    CHECK(file_is(content, 100000));
    CHECK_INT(count_entries(), 1);
    CHECK_INT(faults.opened, 0);
    check_read(content, 100000);
  }
  free(content);
}

/* mode, open, three writes, sync, close, rename, then open, sync and close of the folder */
enum { FOLDER_CLOSE = 11 };

/* One replacement with the n-th call failing. False: there is no n-th call. */
static bool replace_with_fault(int n, int error, const char *old, const char *content) {
  reset();
  faults.fail_at = n;
  faults.error = error;
  faults.largest = 40;
  if (old != NULL) put(old, strlen(old));
  else unlink(path);
  const rp_status status = replace(path, content, (int64_t)strlen(content));
  CHECK_INT(faults.opened, 0);
  CHECK_INT(memory.held, 0);
  const bool beyond = faults.last == NULL;
  if (beyond || n == FOLDER_CLOSE) { /* closing the folder again can lose nothing */
    CHECK_INT(status, RP_OK);
    CHECK(file_is(content, strlen(content)));
    return !beyond;
  }
  CHECK_INT(status, RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), strerror(error));
  const bool replaced = strstr(rp_last_error(), "sync the folder") != NULL;
  if (replaced) CHECK(file_is(content, strlen(content)));
  else if (old != NULL) CHECK(file_is(old, strlen(old)));
  else CHECK(access(path, F_OK) != 0);
  CHECK_INT(count_entries(), replaced || old != NULL ? 1 : 0);
  return true;
}

static void test_every_call_of_replace_fails(void) {
  static const char content[] =
      "new content, written in three parts, because it is "
      "longer than twice what a write is allowed to move";
  static const int errors[] = {EIO, ENOSPC};
  for (size_t e = 0; e < 2; e++) {
    for (int existing = 0; existing < 2; existing++) {
      int n = 1;
      while (n < 100 && replace_with_fault(n, errors[e], existing ? "old" : NULL, content)) n++;
      CHECK_INT(n, FOLDER_CLOSE + 1);
    }
  }
}

static void test_write_without_progress(void) {
  reset();
  put("old", 3);
  faults.no_progress = true;
  CHECK_INT(replace(path, "new", 3), RP_ERROR_FILE);
  CHECK(file_is("old", 3));
  CHECK_INT(count_entries(), 1);
}

/* The temporary file's is no longer. */
static void test_the_longest_name(void) {
  char longest[NAME_MAX + 1] = "", whole[PATH_MAX];
  memset(longest, 'x', NAME_MAX);
  snprintf(whole, sizeof whole, "%s", path);
  char *const slash = strrchr(whole, '/');
  snprintf(slash == NULL ? whole : slash + 1, sizeof whole - NAME_MAX, "%s", longest);
  reset();
  CHECK_INT(replace(whole, "new", 3), RP_OK);
  CHECK_INT(remove(whole), 0);
}

/* Some file systems cannot sync a folder and say EINVAL. */
static void test_folder_that_cannot_be_synced(void) {
  reset();
  faults.error = EINVAL;
  faults.fail_at = 8; /* after mode, open, write, sync, close, rename, open of the folder */
  CHECK_INT(replace(path, "new", 3), RP_OK);
  CHECK_TEXT(faults.last, "sync");
  CHECK(file_is("new", 3));
}

/* Writes nothing, and keeps the path that was opened last. */
static char opened[PATH_MAX];

static int noting_open(void *context, const char *name, int flags, int mode) {
  (void)context, (void)flags, (void)mode;
  snprintf(opened, sizeof opened, "%s", name);
  return 0;
}
static int64_t noting_write(void *context, int descriptor, const void *buffer, int64_t bytes) {
  (void)context, (void)descriptor, (void)buffer;
  return bytes;
}
static int noting_descriptor(void *context, int descriptor) {
  (void)context, (void)descriptor;
  return 0;
}
static int noting_rename(void *context, const char *from, const char *to) {
  (void)context, (void)from, (void)to;
  return 0;
}
static int64_t noting_mode(void *context, const char *name) {
  (void)context, (void)name;
  errno = ENOENT;
  return -1;
}

/* What is synced is the folder that has the name. */
static void test_which_folder_is_synced(void) {
  static const char *const pairs[][2] = {{"/new", "/"}, {"new", "."}, {"a/b/new", "a/b"}};
  const rpi_io noting = {.open = noting_open,
                         .write = noting_write,
                         .sync = noting_descriptor,
                         .close = noting_descriptor,
                         .rename = noting_rename,
                         .mode = noting_mode};
  rpi_set_io(&noting);
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
    CHECK_INT(replace(pairs[i][0], "new", 3), RP_OK);
    CHECK(strcmp(opened, pairs[i][1]) == 0);
  }
  rpi_set_io(&faulty_io);
}

static void test_no_memory(void) {
  char *content = pattern(300000);
  reset();
  CHECK_INT(replace(path, content, 300000), RP_OK);
  reset();
  memory.fail_at = 1;
  CHECK_INT(replace(path, "new", 3), RP_ERROR_MEMORY);
  CHECK_INT(faults.calls, 1); /* mode */
  CHECK(file_is(content, 300000));
  free(content);
}

/* The parts one after the other are the whole; an empty one is nothing. */
static void test_replace_in_parts(void) {
  char *content = pattern(200000);
  const rpi_file_part parts[] = {
      {content, 8}, {content + 8, 0}, {NULL, 0}, {content + 8, 70000}, {content + 70008, 129992}};
  reset();
  faults.largest = 7777;
  CHECK_INT(rpi_file_replace(path, parts, 5), RP_OK);
  CHECK(file_is(content, 200000));
  CHECK_INT(rpi_file_replace(path, parts, 0), RP_OK);
  CHECK(file_is("", 0));
  int n = 1;
  for (; n < 100; n++) {
    reset();
    put("old", 3);
    faults.fail_at = n;
    faults.error = ENOSPC;
    const rp_status status = rpi_file_replace(path, parts, 5);
    CHECK_INT(faults.opened, 0);
    CHECK_INT(memory.held, 0);
    CHECK_INT(count_entries(), 1);
    if (faults.last == NULL) break;
    if (status != RP_OK && strstr(rp_last_error(), "sync the folder") == NULL) {
      CHECK(file_is("old", 3));
    } else {
      CHECK(file_is(content, 200000));
    }
  }
  CHECK_INT(n, 12); /* mode, open, three writes, sync, close, rename, and three for the folder */
  free(content);
}

/* Ten bytes as four and six, then the end: the file as it is, one byte shorter, one longer. */
static void test_take(void) {
  static const char content[] = "0123456789a";
  for (size_t bytes = 0; bytes <= 11; bytes++) {
    put(content, bytes);
    reset();
    faults.largest = 3;
    char got[10] = "";
    rpi_file file;
    if (!CHECK_INT(rpi_file_open(path, &file), RP_OK)) return;
    rp_status status = rpi_file_take(&file, got, 4);
    if (status == RP_OK) status = rpi_file_take(&file, got + 4, 6);
    if (status == RP_OK) {
      CHECK(memcmp(got, content, 10) == 0);
      CHECK_INT(file.position, 10);
      status = rpi_file_expect_end(&file);
    }
    rpi_file_close(&file);
    CHECK_INT(faults.opened, 0);
    CHECK_INT(status, bytes == 10 ? RP_OK : RP_ERROR_FILE);
    if (bytes == 0)
      CHECK_TEXT(rp_last_error(), "it ends after 0 bytes, where 4 more were expected");
    if (bytes == 9)
      CHECK_TEXT(rp_last_error(), "it ends after 9 bytes, where 1 more were expected");
    if (bytes == 11) CHECK_TEXT(rp_last_error(), "it goes on after the 10 bytes expected");
    if (status != RP_OK) CHECK_TEXT(rp_last_error(), path);
  }
}

static void test_every_call_of_take_fails(void) {
  put("0123456789", 10);
  for (int n = 1; n <= 5; n++) { /* open, two reads and that of the end, close */
    reset();
    faults.fail_at = n;
    faults.error = EIO;
    faults.largest = 6;
    char got[10];
    const rp_status status = take_whole(got, 10);
    CHECK_INT(faults.opened, 0);
    CHECK_INT(memory.held, 0);
    if (n == 5) { /* nothing can be lost by closing */
      CHECK_TEXT(faults.last, "close");
      CHECK_INT(status, RP_OK);
    } else {
      CHECK_INT(status, RP_ERROR_FILE);
      CHECK_TEXT(rp_last_error(), strerror(EIO));
      CHECK_TEXT(rp_last_error(), path);
    }
  }
}

/* The pages are the file's until they are written, and outlive its replacement. */
static void test_map(void) {
  rpi_file file;
  rpi_mapping mapping = {.memory = NULL};
  reset();
  put("some content", 12);
  if (!CHECK_INT(rpi_file_open(path, &file), RP_OK)) return;
  if (!CHECK_INT(rpi_file_map(&file, &mapping), RP_OK)) return;
  rpi_file_close(&file);
  CHECK_INT(mapping.bytes, 12);
  CHECK(memcmp(mapping.memory, "some content", 12) == 0);
  *(char *)mapping.memory = 'h';
  CHECK(file_is("some content", 12));
  CHECK_INT(replace(path, "other", 5), RP_OK);
  CHECK(memcmp(mapping.memory, "home content", 12) == 0);
  rpi_file_unmap(&mapping);
  CHECK(mapping.memory == NULL && faults.mapped == 0);
  rpi_file_unmap(&mapping);
  CHECK_INT(faults.mapped, 0);

  put("", 0); /* no pages */
  if (!CHECK_INT(rpi_file_open(path, &file), RP_OK)) return;
  CHECK_INT(rpi_file_map(&file, &mapping), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "cannot map");
  faults.fail_at = faults.calls + 1;
  faults.error = ENODEV;
  CHECK_INT(rpi_file_map(&file, &mapping), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), strerror(ENODEV));
  CHECK(mapping.memory == NULL);
  rpi_file_close(&file);
}

static void test_paths(void) {
  reset();
  char got;
  rpi_file file;
  CHECK_INT(rpi_file_open("/no/such/file", &file), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "cannot open '/no/such/file': No such file");
  if (!CHECK_INT(rpi_file_open(folder, &file), RP_OK)) return;
  CHECK_INT(rpi_file_take(&file, &got, 1), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "directory");
  rpi_file_close(&file);
  CHECK_INT(replace("/no/such/file", "x", 1), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), "/no/such/file");
  CHECK_INT(replace(folder, "x", 1), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), strerror(EISDIR));
  CHECK_INT(replace("", "x", 1), RP_ERROR_FILE);
  CHECK_INT(count_entries(), 1);

  char before[512];
  if (!CHECK(getcwd(before, sizeof before) != NULL) || !CHECK_INT(chdir(folder), 0)) return;
  CHECK_INT(replace("file", "relative", 8), RP_OK); /* the folder is "." */
  CHECK(file_is("relative", 8));
  CHECK_INT(chdir(before), 0);
}

/* A FIFO stays, and a link to it is replaced by the file. */
static void test_no_regular_file(void) {
  char pipe[256];
  struct stat about;
  reset();
  snprintf(pipe, sizeof pipe, "%s.pipe", path);
  CHECK_INT(mkfifo(pipe, 0600), 0);
  CHECK_INT(replace(pipe, "x", 1), RP_ERROR_FILE);
  CHECK_TEXT(rp_last_error(), ".pipe': it is no regular file");
  unlink(path);
  CHECK_INT(symlink(pipe, path), 0);
  CHECK_INT(replace(path, "x", 1), RP_OK);
  CHECK(lstat(path, &about) == 0 && S_ISREG(about.st_mode));
  CHECK(lstat(pipe, &about) == 0 && S_ISFIFO(about.st_mode));
  CHECK_INT(count_entries(), 2);
  unlink(pipe);
}

/* What a crash left behind under our own process number is stepped over. */
static void test_stale_temporary(void) {
  reset();
  char stale[256];
  snprintf(stale, sizeof stale, "%s.%ld.0.tmp", path, (long)getpid());
  const int descriptor = open(stale, O_WRONLY | O_CREAT, 0600);
  CHECK(descriptor >= 0);
  close(descriptor);
  CHECK_INT(replace(path, "new", 3), RP_OK);
  CHECK(file_is("new", 3));
  CHECK_INT(count_entries(), 2);
  unlink(stale);
}

static void *replace_often(void *content) {
  intptr_t failures = 0;
  for (int i = 0; i < 50; i++) failures += replace(path, content, 5000) != RP_OK;
  return (void *)failures;
}

/* With the system's calls: the faulty ones count in one thread. */
static void test_two_writers(void) {
  rpi_set_io(NULL);
  rpi_set_allocator(NULL);
  char a[5000], b[5000];
  memset(a, 'a', sizeof a);
  memset(b, 'b', sizeof b);
  pthread_t thread;
  if (!CHECK_INT(pthread_create(&thread, NULL, replace_often, a), 0)) return;
  void *theirs = NULL;
  const void *ours = replace_often(b);
  pthread_join(thread, &theirs);
  CHECK(ours == NULL && theirs == NULL);
  CHECK(file_is(a, sizeof a) || file_is(b, sizeof b));
  CHECK_INT(count_entries(), 1);
}

int main(void) {
  if (!CHECK(make_folder())) return check_report();
  rpi_set_io(&faulty_io);
  rpi_set_allocator(&faulty_allocator);
  test_round_trip();
  test_short_and_interrupted();
  test_every_call_of_replace_fails();
  test_write_without_progress();
  test_the_longest_name();
  test_folder_that_cannot_be_synced();
  test_which_folder_is_synced();
  test_no_memory();
  test_replace_in_parts();
  test_take();
  test_every_call_of_take_fails();
  test_map();
  test_paths();
  test_no_regular_file();
  test_stale_temporary();
  test_two_writers();
  CHECK(remove_folder());
  return check_report();
}
