/* SPDX-License-Identifier: Apache-2.0
 *
 * threads.h: the pool of threads and the one way into it.
 *
 * rpi_parallel_for runs fn(context, task, worker) for every task in [0, tasks).
 * Who does a task is left to chance; what a task does depends on its number
 * alone, and worker (in [0, workers)) only names scratch memory. So the results
 * cannot depend on the number of threads.
 *
 * workers is the most that may take part: the number that the caller sized its
 * scratch memory for, which another thread's rp_set_threads must not outgrow.
 *
 * Workers run with denormals flushed to zero and rounding to nearest; the caller
 * takes part in the work under the same mode and gets its floating-point state
 * back. A call from inside a task, or while another thread uses the pool, runs
 * every task on the calling thread as worker 0: every call has scratch memory of
 * its own. The pool is made at first use, re-made in a forked child and resized
 * when the number of threads has changed; when a thread cannot be created the
 * work is done by fewer. Idle workers spin for some tens of microseconds and then
 * sleep.
 */
#ifndef RPI_THREADS_H
#define RPI_THREADS_H

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <fenv.h>
#endif

#include <stdbool.h>

#include "base/error.h"

#define RPI_MAX_THREADS 1024

typedef void (*rpi_task)(void *context, int64_t task, int worker);

/* Returns when every task is done; tasks and workers below 1 are allowed (no task,
 * one worker). What the tasks wrote is visible to the caller. */
void rpi_parallel_for(int64_t tasks, int workers, rpi_task fn, void *context);

/* The floating-point state of a thread: rounding to nearest, no traps, flush: denormals are zero
 * where the machine can; and then again what it was before. */
#if defined(__x86_64__) || defined(__aarch64__)
typedef struct rpi_float_state {
  uint64_t control, status;
} rpi_float_state;
#else
typedef fenv_t rpi_float_state;
#endif

rpi_float_state rpi_float_enter(bool flush);
void rpi_float_leave(rpi_float_state before);

/* Nobody cancels the thread from here on, and then again as before: a thread that ends in between
 * leaves locks, files and memory behind. */
int rpi_cancel_enter(void);
void rpi_cancel_leave(int before);

/* What rp_set_threads and rp_get_threads do, once the argument is checked: 0 is
 * the default, and the pool follows at its next use. */
void rpi_threads_set(int threads);
int rpi_threads_get(void);

/* RP_ERROR_ARGUMENT, again at every call, where the default is to come from RELPOS_NUM_THREADS and
 * that is no number from 1 to 1024. rpi_threads_get does without it then. */
rp_status rpi_threads_check(void);

#endif
