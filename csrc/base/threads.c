/* SPDX-License-Identifier: Apache-2.0
 *
 * threads.c: the pool of threads.
 *
 * Everything turns on one 64-bit word, `gate`:
 *
 *     63        32 31     28 27        17   16   15        0
 *     generation             most workers   open  inside
 *
 * A job is described in plain fields, then the gate opens with a new generation.
 * A worker enters by compare-and-swap, inside + 1, and only while the gate is open
 * and its number is below the limit; so whoever is inside sees one job, whole.
 * Tasks are cut into a share for each worker, claimed from the share's counter: its own
 * first, which from one job to the next is the same rows of an array, in the cache of the
 * same core (1 to 5 % of a training step, 1 to 3 % of attention); then what is left of
 * others'. The caller, out of tasks, closes the gate and waits until nobody is inside. A
 * worker that wakes too late finds it closed: nobody waits for a sleeper (a wake-up costs
 * 50 us, calls come every 300).
 *
 * Fields belong to the caller that holds `busy`; nested and concurrent callers find
 * it taken and compute on their own thread. Workers look at them only from inside.
 *
 * Idle workers spin for SPIN_NANOSECONDS, then sleep on a condition variable; with
 * more threads than cores they sleep at once, because a spinning thread would keep
 * from its core the very thread it waits for. Sleeping is announced (sleepers,
 * caller_sleeps) before the condition is looked at again, and the other side changes
 * the condition before it looks at the announcement, all sequentially consistent: so
 * one of the two always sees the other, and the fast path takes no lock.
 */
#define _GNU_SOURCE

#include "base/threads.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <fenv.h>
#endif

/* As long as the sleep and wake-up that it may save: never twice the best choice. */
#define SPIN_NANOSECONDS 50000

/* More workers share: who is out of tasks looks at all of them. */
#define SHARES 16

#define INSIDE_MASK UINT64_C(0xFFFF)
#define OPEN (UINT64_C(1) << 16)
#define LIMIT_SHIFT 17
#define LIMIT_MASK UINT64_C(0x7FF)
#define GENERATION_SHIFT 32

_Static_assert(RPI_MAX_THREADS <= LIMIT_MASK, "the limit has 11 bits");

static struct {
  _Alignas(64) _Atomic uint64_t gate;
  struct {
    _Alignas(64) _Atomic int64_t next; /* the first task not yet claimed */
    int64_t end;                       /* the holder of busy's, like those below */
  } share[SHARES];
  _Alignas(64) atomic_int sleepers; /* workers asleep, or about to be */
  atomic_bool caller_sleeps;
  atomic_bool busy;
  atomic_int leave_from; /* workers from this number on are to end */
  atomic_bool spin;      /* as many cores as threads */

  pthread_mutex_t lock; /* of the two conditions, held for moments only */
  pthread_cond_t work;  /* a new generation */
  pthread_cond_t done;  /* nobody inside */

  /* The holder of busy's. */
  int shares; /* in use */
  rpi_task fn;
  void *context;
  int size;  /* threads that exist, the caller included; 0: no pool yet */
  int asked; /* the number that size was made for; fewer may have been had */
  uint32_t first_seen[RPI_MAX_THREADS]; /* generation at a worker's creation */
  pthread_t worker[RPI_MAX_THREADS];    /* from 1 on */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .work = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

/* Set by rp_set_threads; 0: the default. */
static atomic_int wanted;

/* Written once, under their pthread_once. */
static pthread_once_t default_once = PTHREAD_ONCE_INIT;
static int default_threads;
static char refused[32]; /* RELPOS_NUM_THREADS, cut to fit, where it is no number of threads */
static int cores;
static pthread_once_t atfork_once = PTHREAD_ONCE_INIT;

/* This thread runs a task. */
static _Thread_local bool in_task;

/* ---- the floating-point state ---------------------------------------------- */

/* Restoring puts everything back, the sticky exception flags too. */
#if defined(__x86_64__)

/* We compute by SSE, but the C library reads and writes decimals as the x87's control says. */
rpi_float_state rpi_float_enter(bool flush) {
  static const uint16_t nearest = 0x037F; /* no traps, all digits */
  uint16_t x87;
  __asm__ volatile("fnstcw %0" : "=m"(x87));
  const rpi_float_state saved = {_mm_getcsr(), x87};
  if (x87 != nearest) __asm__ volatile("fldcw %0" : : "m"(nearest));
  _mm_setcsr(0x1F80 | (flush ? 0x8000 | 0x0040 : 0)); /* all masked; FTZ, DAZ */
  return saved;
}

void rpi_float_leave(rpi_float_state saved) {
  const uint16_t x87 = (uint16_t)saved.status;
  uint16_t now;
  __asm__ volatile("fnstcw %0" : "=m"(now));
  if (x87 != now) __asm__ volatile("fldcw %0" : : "m"(x87));
  _mm_setcsr((unsigned)saved.control);
}

#elif defined(__aarch64__)

rpi_float_state rpi_float_enter(bool flush) {
  rpi_float_state saved;
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved.control));
  __asm__ volatile("mrs %0, fpsr" : "=r"(saved.status));
  __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)flush << 24)); /* FZ */
  return saved;
}

void rpi_float_leave(rpi_float_state saved) {
  __asm__ volatile("msr fpcr, %0" : : "r"(saved.control));
  __asm__ volatile("msr fpsr, %0" : : "r"(saved.status));
}

#else

rpi_float_state rpi_float_enter(bool flush) {
  rpi_float_state saved;
  (void)flush;
  feholdexcept(&saved);
  fesetround(FE_TONEAREST);
  return saved;
}

void rpi_float_leave(rpi_float_state saved) { fesetenv(&saved); }

#endif

/* ---- how many -------------------------------------------------------------- */

static int count_cores(void) {
#if defined(__linux__)
  /* A fixed set ends at 1024 processors; on larger machines the call fails. */
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online < 1 ? 1 : online > RPI_MAX_THREADS ? RPI_MAX_THREADS : (int)online;
}

/* RELPOS_NUM_THREADS, 0 where it is not set or empty. */
static int own_number(void) {
  const char *const text = getenv("RELPOS_NUM_THREADS");
  if (text == NULL || *text == '\0') return 0;
  char *end;
  const long number = strtol(text, &end, 10);
  if (*end == '\0' && number >= 1 && number <= RPI_MAX_THREADS) return (int)number;
  snprintf(refused, sizeof refused, "%s", text);
  return 0;
}

/* OMP_NUM_THREADS is for others too, who take more than a number: the one that it starts with ("4"
 * and "4,2" are 4), 0 where there is none. */
static int common_number(void) {
  const char *const text = getenv("OMP_NUM_THREADS");
  if (text == NULL) return 0;
  char *end;
  const long number = strtol(text, &end, 10);
  if (end == text || number < 1) return 0;
  return number > RPI_MAX_THREADS ? RPI_MAX_THREADS : (int)number;
}

static void find_default(void) {
  cores = count_cores();
  default_threads = own_number();
  if (default_threads == 0) default_threads = common_number();
  if (default_threads == 0) default_threads = cores;
}

void rpi_threads_set(int threads) { atomic_store(&wanted, threads); }

int rpi_threads_get(void) {
  pthread_once(&default_once, find_default);
  const int threads = atomic_load(&wanted);
  return threads != 0 ? threads : default_threads;
}

rp_status rpi_threads_check(void) {
  char quoted[RPI_QUOTE];
  pthread_once(&default_once, find_default);
  RPI_CHECK(refused[0] == '\0' || atomic_load(&wanted) != 0, RP_ERROR_ARGUMENT,
            "RELPOS_NUM_THREADS: expected a number of threads from 1 to %d, got %s",
            RPI_MAX_THREADS, rpi_quote(refused, quoted));
  return RP_OK;
}

/* ---- waiting --------------------------------------------------------------- */

static void pause_briefly(void) {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static uint32_t generation_of(uint64_t gate) { return (uint32_t)(gate >> GENERATION_SHIFT); }

static bool is_new_generation(uint64_t gate, uint32_t seen) { return generation_of(gate) != seen; }

static bool is_empty(uint64_t gate, uint32_t unused) {
  (void)unused;
  return (gate & INSIDE_MASK) == 0;
}

/* Whether the condition came true within the time for spinning. */
static bool spin_until(bool (*condition)(uint64_t gate, uint32_t seen), uint32_t seen) {
  if (condition(atomic_load(&pool.gate), seen)) return true;
  if (!atomic_load_explicit(&pool.spin, memory_order_relaxed)) return false;
  const int64_t end = now() + SPIN_NANOSECONDS;
  do {
    for (int i = 0; i < 16; i++) { /* a look at the clock costs as much as a few pauses */
      pause_briefly();
      if (condition(atomic_load(&pool.gate), seen)) return true;
    }
  } while (now() < end);
  return false;
}

static void wait_for_work(uint32_t seen) {
  if (spin_until(is_new_generation, seen)) return;
  pthread_mutex_lock(&pool.lock);
  atomic_fetch_add(&pool.sleepers, 1);
  while (!is_new_generation(atomic_load(&pool.gate), seen)) {
    pthread_cond_wait(&pool.work, &pool.lock);
  }
  atomic_fetch_sub(&pool.sleepers, 1);
  pthread_mutex_unlock(&pool.lock);
}

static void wait_until_empty(void) {
  if (spin_until(is_empty, 0)) return;
  pthread_mutex_lock(&pool.lock);
  atomic_store(&pool.caller_sleeps, true);
  while (!is_empty(atomic_load(&pool.gate), 0)) pthread_cond_wait(&pool.done, &pool.lock);
  atomic_store(&pool.caller_sleeps, false);
  pthread_mutex_unlock(&pool.lock);
}

/* A new generation: all workers look at the gate again. */
static void publish(int limit, bool open) {
  const uint64_t generation = generation_of(atomic_load(&pool.gate)) + UINT64_C(1);
  atomic_store(&pool.gate,
               generation << GENERATION_SHIFT | (uint64_t)limit << LIMIT_SHIFT | (open ? OPEN : 0));
  if (atomic_load(&pool.sleepers) == 0) return;
  pthread_mutex_lock(&pool.lock);
  pthread_cond_broadcast(&pool.work);
  pthread_mutex_unlock(&pool.lock);
}

/* ---- workers --------------------------------------------------------------- */

static void run_share(int share, int worker) {
  _Atomic int64_t *const next = &pool.share[share].next;
  const int64_t end = pool.share[share].end;
  /* a look first: an addition takes the counter's line from whom it belongs to */
  while (atomic_load_explicit(next, memory_order_relaxed) < end) {
    const int64_t task = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
    if (task < end) pool.fn(pool.context, task, worker);
  }
}

static void run_tasks(int worker) {
  for (int i = 0; i < pool.shares; i++) run_share((worker + i) % pool.shares, worker);
}

/* To be published by the gate. */
static void share_out(int64_t tasks, int workers) {
  pool.shares = workers < SHARES ? workers : SHARES;
  const int64_t each = tasks / pool.shares, more = tasks % pool.shares;
  int64_t begin = 0;
  for (int i = 0; i < pool.shares; i++) {
    atomic_store_explicit(&pool.share[i].next, begin, memory_order_relaxed);
    begin += each + (i < more);
    pool.share[i].end = begin;
  }
}

/* False where the gate is closed or this worker is one too many. The generation
 * that was looked at goes to *seen. */
static bool enter(int worker, uint32_t *seen) {
  uint64_t gate = atomic_load(&pool.gate);
  for (;;) {
    *seen = generation_of(gate);
    const int limit = (int)(gate >> LIMIT_SHIFT & LIMIT_MASK);
    if ((gate & OPEN) == 0 || worker >= limit) return false;
    if (atomic_compare_exchange_weak(&pool.gate, &gate, gate + 1)) return true;
  }
}

static void leave(void) {
  const uint64_t gate = atomic_fetch_sub(&pool.gate, 1) - 1;
  if ((gate & OPEN) != 0 || !is_empty(gate, 0) || !atomic_load(&pool.caller_sleeps)) return;
  pthread_mutex_lock(&pool.lock);
  pthread_cond_signal(&pool.done);
  pthread_mutex_unlock(&pool.lock);
}

static void *work(void *argument) {
  const int worker = (int)(intptr_t)argument;
  uint32_t seen = pool.first_seen[worker];
  in_task = true;
  rpi_float_enter(true);
  for (;;) {
    wait_for_work(seen);
    if (enter(worker, &seen)) {
      run_tasks(worker);
      leave();
    } else if (worker >= atomic_load(&pool.leave_from)) {
      return NULL; /* asked behind the gate: what it said last came with this number */
    }
  }
}

/* ---- making the pool ------------------------------------------------------- */

/* Fork copies the thread that called it and no other. The lock is held across it,
 * so that the child's copy of the conditions is not torn; there they still count
 * waiters that do not exist, hence made anew. */
static void before_fork(void) { pthread_mutex_lock(&pool.lock); }

static void after_fork_in_parent(void) { pthread_mutex_unlock(&pool.lock); }

static void after_fork_in_child(void) {
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.work, NULL);
  pthread_cond_init(&pool.done, NULL);
  atomic_store(&pool.gate, 0);
  atomic_store(&pool.sleepers, 0);
  atomic_store(&pool.caller_sleeps, false);
  atomic_store(&pool.busy, false);
  pool.size = 0;
  pool.asked = 0;
}

static void register_atfork(void) {
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

static void end_workers(int from) {
  atomic_store(&pool.leave_from, from);
  publish(0, false);
  for (int i = from; i < pool.size; i++) pthread_join(pool.worker[i], NULL);
}

/* Signals are for the program's own threads: a handler of Python's must not run on ours. But those
 * that a thread's own fault raises are for it: blocked, they end the process past its handlers. */
static bool start_worker(int worker) {
  static const int own[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
  sigset_t all, saved;
  sigfillset(&all);
  for (size_t i = 0; i < sizeof own / sizeof own[0]; i++) sigdelset(&all, own[i]);
  pool.first_seen[worker] = generation_of(atomic_load(&pool.gate));
  if (pthread_sigmask(SIG_SETMASK, &all, &saved) != 0) return false;
  const int error = pthread_create(&pool.worker[worker], NULL, work, (void *)(intptr_t)worker);
  pthread_sigmask(SIG_SETMASK, &saved, NULL);
  return error == 0;
}

/* A refused thread is not asked for again until the number changes: asking at
 * every call would cost more than the thread brings. */
static void resize(int threads) {
  pthread_once(&atfork_once, register_atfork);
  if (pool.size == 0) pool.size = 1;
  if (threads < pool.size) {
    end_workers(threads);
    pool.size = threads;
  }
  atomic_store(&pool.leave_from, RPI_MAX_THREADS);
  atomic_store(&pool.spin, threads <= cores);
  while (pool.size < threads && start_worker(pool.size)) pool.size++;
  pool.asked = threads;
}

/* ---- the way in ------------------------------------------------------------ */

static void run_inline(int64_t tasks, rpi_task fn, void *context) {
  const bool nested = in_task;
  in_task = true;
  const rpi_float_state saved = rpi_float_enter(true);
  for (int64_t task = 0; task < tasks; task++) fn(context, task, 0);
  rpi_float_leave(saved);
  in_task = nested;
}

static void run_in_pool(int64_t tasks, int workers, rpi_task fn, void *context) {
  share_out(tasks, workers);
  pool.fn = fn;
  pool.context = context;
  in_task = true;
  publish(workers, true);
  const rpi_float_state saved = rpi_float_enter(true);
  run_tasks(0);
  rpi_float_leave(saved);
  in_task = false;
  atomic_fetch_and(&pool.gate, ~OPEN);
  wait_until_empty();
}

int rpi_cancel_enter(void) {
  int before;
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
  return before;
}

void rpi_cancel_leave(int before) { pthread_setcancelstate(before, &before); }

void rpi_parallel_for(int64_t tasks, int workers, rpi_task fn, void *context) {
  if (workers > tasks) workers = (int)tasks;
  if (workers <= 1 || in_task || rpi_threads_get() == 1 || atomic_exchange(&pool.busy, true)) {
    run_inline(tasks, fn, context);
    return;
  }
  /* cancelled while it waits for others, a thread would keep the lock, and busy, for ever */
  const int cancel = rpi_cancel_enter();
  const int threads = rpi_threads_get();
  if (pool.asked != threads) resize(threads);
  if (workers > pool.size) workers = pool.size;
  if (workers > 1) run_in_pool(tasks, workers, fn, context);
  else run_inline(tasks, fn, context);
  atomic_store(&pool.busy, false);
  rpi_cancel_leave(cancel);
}
