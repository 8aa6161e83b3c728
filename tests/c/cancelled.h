/* SPDX-License-Identifier: Apache-2.0
 *
 * cancelled.h: a thread that is to be cancelled while it calls the library.
 */
#ifndef CANCELLED_H
#define CANCELLED_H

#include <pthread.h>

#include "check.h"

/* Runs it, and waits: it must have been cancelled in the end. */
static inline void check_ends_cancelled(void *(*run)(void *), void *argument) {
  pthread_t caller;
  void *ended = NULL;
  CHECK_INT(pthread_create(&caller, NULL, run, argument), 0);
  CHECK_INT(pthread_join(caller, &ended), 0);
  CHECK(ended == PTHREAD_CANCELED);
}

#endif
