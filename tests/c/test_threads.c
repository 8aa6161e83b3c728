/* SPDX-License-Identifier: Apache-2.0
 *
 * test_threads.c: base/threads.c. Every task once, whatever the number of threads;
 * nested and concurrent calls; fork; threads that cannot be had; floating-point
 * state. Run it under the thread sanitizer too: most of what can be wrong here
 * shows only there.
 *
 * Tasks do not check (check.h counts in one thread): they note what they saw.
 */
#define _GNU_SOURCE

#include "base/threads.h"

#include <dlfcn.h>
#include <errno.h>
#include <fenv.h>
#include <float.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cancelled.h"
#include "check.h"

/* The thread sanitizer ends a forked child that starts threads, unless told. */
__attribute__((visibility("default"))) const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "die_after_fork=0"; }

enum { MOST_TASKS = 10000 };

static void sleep_microseconds(long microseconds) {
  const struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
  nanosleep(&time, NULL);
}

/* ---- pthread_create, that can be made to refuse ---------------------------- */

typedef int create_fn(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

static atomic_int creations_allowed = 1 << 20, creations_asked;

/* Overrides the C library's (or the sanitizer's), which it finds behind itself. */
int pthread_create(pthread_t *restrict thread, const pthread_attr_t *restrict attributes,
                   void *(*start)(void *), void *restrict argument) {
  void *const found = dlsym(RTLD_NEXT, "pthread_create");
  create_fn *create;
  memcpy(&create, &found, sizeof create);
  atomic_fetch_add(&creations_asked, 1);
  if (atomic_fetch_sub(&creations_allowed, 1) <= 0) return EAGAIN;
  return create(thread, attributes, start, argument);
}

/* ---- a job that notes everything ------------------------------------------- */

typedef struct notes {
  int done[MOST_TASKS]; /* plain: a task done twice at once is a race to be found */
  int workers;
  atomic_int in_use[RPI_MAX_THREADS]; /* tasks now running as this worker */
  atomic_int faults;                  /* worker out of range, or used twice at once */
  atomic_uint seen;                   /* bit w: worker w did a task (w < 32) */
} notes;

static void note(void *context, int64_t task, int worker) {
  notes *n = context;
  n->done[task]++;
  if (worker < 0 || worker >= n->workers) {
    atomic_fetch_add(&n->faults, 1);
    return;
  }
  if (atomic_fetch_add(&n->in_use[worker], 1) != 0) atomic_fetch_add(&n->faults, 1);
  if (worker < 32) atomic_fetch_or(&n->seen, 1u << worker);
  atomic_fetch_sub(&n->in_use[worker], 1);
}

/* Runs a job and says whether every task was done once and the workers were sound. */
static bool noted_job_is_right(notes *n, int64_t tasks, int workers) {
  memset(n, 0, sizeof *n);
  n->workers = workers > 1 ? workers : 1;
  rpi_parallel_for(tasks, workers, note, n);
  bool right = atomic_load(&n->faults) == 0;
  for (int64_t i = 0; i < MOST_TASKS; i++) right = right && n->done[i] == (i < tasks);
  return right;
}

static bool job_is_right(int64_t tasks, int workers) {
  notes *n = malloc(sizeof *n);
  const bool right = n != NULL && noted_job_is_right(n, tasks, workers);
  free(n);
  return right;
}

static void test_every_task_once(void) {
  static const int64_t tasks[] = {0, 1, 2, 3, 7, 8, 9, 64, 1000, MOST_TASKS};
  for (int threads = 1; threads <= 8; threads++) {
    rpi_threads_set(threads);
    for (size_t i = 0; i < sizeof tasks / sizeof tasks[0]; i++) {
      if (!CHECK(job_is_right(tasks[i], threads))) {
        printf(" (%d threads, %d tasks)", threads, (int)tasks[i]);
      }
    }
  }
}

/* workers bounds who takes part; more of them than threads is fine. */
static void test_workers_are_bounded(void) {
  rpi_threads_set(8);
  for (int workers = -1; workers <= 12; workers++) CHECK(job_is_right(200, workers));
  rpi_threads_set(2);
  CHECK(job_is_right(200, RPI_MAX_THREADS));
  CHECK(job_is_right(200, INT32_MAX));
  rpi_threads_set(1);
  CHECK(job_is_right(200, 8));
}

static void test_resizing(void) {
  static const int sizes[] = {1, 8, 2, 5, 1, 3, 8, 0, 4};
  for (int round = 0; round < 3; round++) {
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
      rpi_threads_set(sizes[i]);
      CHECK(job_is_right(50, rpi_threads_get()));
    }
  }
}

static void count_one(void *done, int64_t task, int worker) {
  (void)task, (void)worker;
  atomic_fetch_add((atomic_int *)done, 1);
}

/* A worker that is told to end while it looks for work just done by others must not take the one
 * for the other: it was waited for for ever (with ASan, in one of some 30,000 turns). */
static void test_resizing_often(void) {
  enum { TURNS = 4000 };
  atomic_int done = 0;
  alarm(240);
  for (int turn = 0; turn < TURNS; turn++) {
    rpi_threads_set(turn % 2 == 0 ? 8 : 3);
    rpi_parallel_for(8, 8, count_one, &done);
    rpi_parallel_for(8, 8, count_one, &done);
  }
  alarm(0);
  CHECK_INT(done, 2 * 8 * TURNS);
}

/* Calls that follow each other at once (workers spinning), and with pauses long
 * enough for the workers to fall asleep, or to be about to. */
static void test_many_calls(void) {
  for (int threads = 2; threads <= 4; threads += 2) {
    rpi_threads_set(threads);
    bool right = true;
    for (int i = 0; i < 200; i++) {
      right = right && job_is_right(1 + i % 7, threads);
      if (i % 10 == 0) sleep_microseconds(20 + i % 100);
    }
    CHECK(right);
  }
}

/* ---- more than one worker does take part ----------------------------------- */

static void wait_for_company(void *context, int64_t task, int worker) {
  (void)task;
  (void)worker;
  atomic_int *arrived = context;
  atomic_fetch_add(arrived, 1);
  for (int i = 0; i < 5000 && atomic_load(arrived) < 4; i++) sleep_microseconds(1000);
}

static void test_work_is_shared(void) {
  rpi_threads_set(4);
  atomic_int arrived = 0;
  const time_t before = time(NULL);
  rpi_parallel_for(4, 4, wait_for_company, &arrived);
  CHECK_INT(arrived, 4);
  CHECK(time(NULL) - before < 5); /* each waited for three others, who came */
}

/* ---- a caller that waits for its workers ----------------------------------- */

static void worker_sleeps(void *context, int64_t task, int worker) {
  (void)task;
  sleep_microseconds(worker == 0 ? 100 : 3000); /* longer than the caller spins */
  atomic_fetch_add((atomic_int *)context, 1);
}

static void test_caller_sleeps_until_done(void) {
  rpi_threads_set(4);
  for (int i = 0; i < 20; i++) {
    atomic_int done = 0;
    rpi_parallel_for(8, 4, worker_sleeps, &done);
    CHECK_INT(done, 8);
  }
}

/* It is to be cancelled when it calls, and waits there for others: that is no place to end at. */
static void *call_cancelled(void *done) {
  pthread_cancel(pthread_self());
  rpi_parallel_for(40, 4, worker_sleeps, done);
  atomic_fetch_add((atomic_int *)done, 1000);
  pthread_testcancel();
  return NULL;
}

static void test_cancelled_caller(void) {
  rpi_threads_set(4);
  for (int threads = 4; threads >= 3; threads--) { /* and while it ends a worker */
    rpi_threads_set(threads);
    atomic_int done = 0;
    check_ends_cancelled(call_cancelled, &done);
    if (!CHECK_INT(done, 1040)) exit(1); /* whoever calls next would wait for ever */
  }
}

/* Handlers of the program's run on its own threads, but what a worker's fault raises reaches it. */
static void look_at_signals(void *context, int64_t task, int worker) {
  static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
  static const int others[] = {SIGINT, SIGTERM, SIGALRM, SIGCHLD, SIGUSR1};
  (void)task;
  sleep_microseconds(1000);
  if (worker == 0) return;
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, NULL, &blocked);
  bool right = true;
  for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) {
    right = right && sigismember(&blocked, own[i]) == 0;
  }
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
    right = right && sigismember(&blocked, others[i]) == 1;
  }
  atomic_fetch_add((atomic_int *)context, right ? 1 : 1000);
}

static void test_signals_of_workers(void) {
  rpi_threads_set(4);
  atomic_int looked = 0;
  rpi_parallel_for(40, 4, look_at_signals, &looked);
  CHECK(looked >= 1 && looked < 1000);
}

/* ---- nested and concurrent ------------------------------------------------- */

typedef struct nest {
  atomic_int wrong, inner_tasks;
} nest;

typedef struct inner {
  nest *nest;
  pthread_t thread;
} inner;

static void inner_task(void *context, int64_t task, int worker) {
  (void)task;
  const inner *in = context;
  if (worker != 0 || !pthread_equal(in->thread, pthread_self())) {
    atomic_fetch_add(&in->nest->wrong, 1);
  }
  atomic_fetch_add(&in->nest->inner_tasks, 1);
  sleep_microseconds(300); /* others, if there were any, would take tasks */
}

static void outer_task(void *context, int64_t task, int worker) {
  (void)task;
  (void)worker;
  inner in = {context, pthread_self()};
  rpi_parallel_for(10, 4, inner_task, &in);
}

static void test_nested(void) {
  rpi_threads_set(4);
  static const int64_t tasks[] = {1, 20}; /* a single task is inside a task as well */
  for (size_t i = 0; i < 2; i++) {
    nest n = {0, 0};
    rpi_parallel_for(tasks[i], 4, outer_task, &n);
    CHECK_INT(n.wrong, 0);
    CHECK_INT(n.inner_tasks, 10 * tasks[i]);
  }
  CHECK(job_is_right(100, 4)); /* the pool is free again */
}

static void *call_often(void *failures) {
  for (int i = 0; i < 40; i++) {
    if (!job_is_right(1 + i * 5, 4)) atomic_fetch_add((atomic_int *)failures, 1);
    if (i % 8 == 0) rpi_threads_set(1 + i / 8);
  }
  return NULL;
}

static void test_eight_callers_at_once(void) {
  atomic_int failures = 0;
  pthread_t threads[8];
  for (int i = 0; i < 8; i++) {
    CHECK_INT(pthread_create(&threads[i], NULL, call_often, &failures), 0);
  }
  for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
  CHECK_INT(failures, 0);
}

/* ---- fork ------------------------------------------------------------------ */

/* The child's verdict, or -1 if it does not end within half a minute. */
static int run_child(bool (*child_is_right)(void)) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) _exit(child_is_right() ? 0 : 1);
  for (int i = 0; child > 0 && i < 3000; i++) {
    int status;
    if (waitpid(child, &status, WNOHANG) == child) return status;
    sleep_microseconds(10000);
  }
  if (child > 0) {
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
  }
  return -1;
}

/* Without malloc: a sanitizer's allocator may be locked for ever in a child forked
 * while another thread was inside it (gcc 12's address sanitizer is). */
static bool computes_with_four(void) {
  static notes n;
  atomic_int arrived = 0;
  rpi_parallel_for(4, 4, wait_for_company, &arrived); /* needs four real threads */
  return noted_job_is_right(&n, 1000, 4) && arrived == 4;
}

static bool forks_again(void) { return computes_with_four() && run_child(computes_with_four) == 0; }

static atomic_bool probe_over, probe_ended;

static void *wait_for_probe(void *context) {
  while (!atomic_load(&probe_over)) sleep_microseconds(1000);
  atomic_store(&probe_ended, true);
  return context;
}

static bool starts_a_thread(void) {
  pthread_t thread;
  close(STDOUT_FILENO); /* an emulator's last words */
  close(STDERR_FILENO);
  if (pthread_create(&thread, NULL, wait_for_probe, NULL) != 0) return false;
  atomic_store(&probe_over, true);
  while (!atomic_load(&probe_ended)) sleep_microseconds(1000);
  return true;
}

/* Whether the child of a process with threads may start one, with nothing of ours at
 * work: so before there is a pool. QEMU 7.2, emulating user programs, aborts the child. */
static bool fork_allows_threads(void) {
  pthread_t thread;
  if (!CHECK_INT(pthread_create(&thread, NULL, wait_for_probe, NULL), 0)) return false;
  pthread_detach(thread); /* else TSan takes it for alive in the child as well */
  const bool allowed = run_child(starts_a_thread) == 0;
  atomic_store(&probe_over, true);
  return allowed;
}

static void test_fork_while_idle(void) {
  rpi_threads_set(4);
  CHECK(job_is_right(100, 4));
  CHECK_INT(run_child(forks_again), 0); /* the workers may still spin */
  sleep_microseconds(5000);
  CHECK_INT(run_child(forks_again), 0); /* they sleep */
  CHECK(job_is_right(100, 4));          /* and the parent's pool goes on */
}

static atomic_bool stop_calling;

static void *call_until_stopped(void *failures) {
  static notes n;
  while (!atomic_load(&stop_calling)) {
    if (!noted_job_is_right(&n, 20, 4)) atomic_fetch_add((atomic_int *)failures, 1);
  }
  return NULL;
}

/* Another thread is in the middle of a job: in the child it does not exist, and
 * the pool is found as if never used. */
static void test_fork_while_busy(void) {
  rpi_threads_set(4);
  atomic_int failures = 0;
  atomic_store(&stop_calling, false);
  pthread_t thread;
  if (!CHECK_INT(pthread_create(&thread, NULL, call_until_stopped, &failures), 0)) return;
  for (int i = 0; i < 10; i++) CHECK_INT(run_child(computes_with_four), 0);
  atomic_store(&stop_calling, true);
  pthread_join(thread, NULL);
  CHECK_INT(failures, 0);
}

/* ---- threads that cannot be had -------------------------------------------- */

static void test_refused_threads(void) {
  rpi_threads_set(2);
  CHECK(job_is_right(100, 2));
  for (int allowed = 0; allowed < 4; allowed++) {
    rpi_threads_set(2); /* one worker: it exists already */
    CHECK(job_is_right(100, 2));
    atomic_store(&creations_allowed, allowed);
    rpi_threads_set(8);
    CHECK(job_is_right(1000, 8));
    const int asked = atomic_load(&creations_asked);
    CHECK(job_is_right(1000, 8));
    CHECK_INT(creations_asked, asked); /* not at every call */
    CHECK_INT(rpi_threads_get(), 8);
  }
  atomic_store(&creations_allowed, 1 << 20);
  rpi_threads_set(4);
  atomic_int arrived = 0;
  rpi_parallel_for(4, 4, wait_for_company, &arrived);
  CHECK_INT(arrived, 4);
}

static bool computes_alone(void) {
  atomic_store(&creations_allowed, 0);
  return job_is_right(1000, 8);
}

/* ---- floating-point state -------------------------------------------------- */

static volatile float smallest_normal = FLT_MIN, half = 0.5f, one = 1.0f, tiny = 0x1p-30f;

/* By what sums do: fegetround() on x86 asks the old unit that computes no floats. */
static bool rounds_up(void) {
  const volatile float sum = one + tiny;
  return sum > 1.0f;
}

/* Denormals as they come in, and as they would come out. */
static bool denormals_are_zero(void) {
  const volatile float denormal_result = smallest_normal * half;
  volatile float denormal = FLT_MIN / 2;
  const volatile float scaled = denormal * 0x1p40f;
  return denormal_result == 0.0f && scaled == 0.0f;
}

static void note_float_state(void *context, int64_t task, int worker) {
  (void)task;
  (void)worker;
  atomic_int *wrong = context;
#if defined(__x86_64__) || defined(__aarch64__)
  if (!denormals_are_zero()) atomic_fetch_add(wrong, 1);
#endif
  if (rounds_up()) atomic_fetch_add(wrong, 1); /* and raises the inexact flag */
  sleep_microseconds(200);                     /* so that others take tasks too */
}

static void test_float_state(void) {
  rpi_threads_set(4);
  for (int workers = 1; workers <= 4; workers += 3) { /* inline, and in the pool */
    atomic_int wrong = 0;
    CHECK_INT(fesetround(FE_UPWARD), 0);
    feclearexcept(FE_ALL_EXCEPT);
    rpi_parallel_for(16, workers, note_float_state, &wrong);
    const int exceptions = fetestexcept(FE_ALL_EXCEPT);
    const bool restored = rounds_up() && fegetround() == FE_UPWARD;
    fesetround(FE_TONEAREST);
    CHECK_INT(wrong, 0);
    CHECK(restored);
    CHECK_INT(exceptions, 0);
    CHECK(!denormals_are_zero());
  }
}

/* A nested call leaves the outer task's state as it was. */
static void nested_float_state(void *context, int64_t task, int worker) {
  rpi_parallel_for(2, 4, note_float_state, context);
  note_float_state(context, task, worker);
}

static void test_nested_float_state(void) {
  rpi_threads_set(4);
  atomic_int wrong = 0;
  rpi_parallel_for(8, 4, nested_float_state, &wrong);
  CHECK_INT(wrong, 0);
  CHECK(!denormals_are_zero());
}

/* ---- the default number ---------------------------------------------------- */

static int default_with(const char *relpos, const char *omp, int cores) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    if (relpos != NULL) setenv("RELPOS_NUM_THREADS", relpos, 1);
    else unsetenv("RELPOS_NUM_THREADS");
    if (omp != NULL) setenv("OMP_NUM_THREADS", omp, 1);
    else unsetenv("OMP_NUM_THREADS");
    if (cores > 0) {
      cpu_set_t all, few;
      sched_getaffinity(0, sizeof all, &all);
      CPU_ZERO(&few);
      for (size_t i = 0; i < CPU_SETSIZE && CPU_COUNT(&few) < cores; i++) {
        if (CPU_ISSET(i, &all)) CPU_SET(i, &few);
      }
      sched_setaffinity(0, sizeof few, &few);
    }
    const int threads = rpi_threads_get();
    _exit(threads <= 200 ? threads : 201);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

/* Before this process has settled its own default. */
static void test_default_number(void) {
  CHECK_INT(default_with("3", "5", 0), 3);
  CHECK_INT(default_with(NULL, "5", 0), 5);
  CHECK_INT(default_with("", "5,2,1", 0), 5);
  CHECK_INT(default_with("zero", " 7", 0), 7);     /* and a refusal: test_refused_number */
  CHECK_INT(default_with(NULL, "100000", 0), 201); /* 1024 */
  CHECK_INT(default_with("1024", NULL, 0), 201);
  CHECK_INT(default_with(NULL, NULL, 1), 1);
  CHECK_INT(default_with("0", "-4", 1), 1);
  cpu_set_t all;
  CHECK_INT(sched_getaffinity(0, sizeof all, &all), 0);
  if (CPU_COUNT(&all) <= 200) CHECK_INT(default_with(NULL, NULL, 0), CPU_COUNT(&all));
}

/* In a child, whose default is not settled. */
static void check_number(const char *text, bool refused) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    setenv("RELPOS_NUM_THREADS", text, 1);
    for (int i = 0; i < 2; i++) {
      CHECK_INT(rpi_threads_check(), refused ? RP_ERROR_ARGUMENT : RP_OK);
      if (refused) CHECK_TEXT(rp_last_error(), "RELPOS_NUM_THREADS: expected a number of threads");
      if (refused) CHECK_TEXT(rp_last_error(), "from 1 to 1024, got '");
      if (refused) CHECK_TEXT(rp_last_error(), text);
    }
    CHECK(rpi_threads_get() >= 1);
    rpi_threads_set(2); /* whoever says how many needs no default */
    CHECK_INT(rpi_threads_check(), RP_OK);
    rpi_threads_set(0);
    CHECK_INT(rpi_threads_check(), refused ? RP_ERROR_ARGUMENT : RP_OK);
    fflush(stdout);
    _exit(check_failed != 0);
  }
  int status = 1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  if (!CHECK_INT(status, 0)) printf(" (RELPOS_NUM_THREADS=%s)", text);
}

static void test_refused_number(void) {
  static const char *const refused[] = {"abc",
                                        "0",
                                        "-1",
                                        "1e9",
                                        "1025",
                                        "1000000000",
                                        "4,2",
                                        "3 ",
                                        "2x",
                                        " ",
                                        "99999999999999999999"};
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) check_number(refused[i], true);
  check_number("", false);
  check_number("1", false);
  check_number("1024", false);
}

int main(void) {
  const bool fork_works = fork_allows_threads();
  test_default_number();
  test_refused_number();
  CHECK_INT(run_child(computes_alone), 0); /* before there is any thread to keep */
  test_every_task_once();
  test_workers_are_bounded();
  test_resizing();
  test_resizing_often();
  test_many_calls();
  test_work_is_shared();
  test_caller_sleeps_until_done();
  test_cancelled_caller();
  test_signals_of_workers();
  test_nested();
  test_eight_callers_at_once();
  if (fork_works) {
    test_fork_while_idle();
    test_fork_while_busy();
  } else {
    printf("(not tested, the emulator cannot: fork with threads) ");
  }
  test_refused_threads();
  test_float_state();
  test_nested_float_state();
  return check_report();
}
