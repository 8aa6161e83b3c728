/* SPDX-License-Identifier: Apache-2.0
 *
 * profile.h: what each operation of each layer takes.
 *
 * A line is added up for every (stack, layer, operation, pass) that is met. Lines are allocated
 * when the profile is switched on, so that a step allocates nothing; switched off, a profile costs
 * one comparison an operation.
 */
#ifndef RPI_PROFILE_H
#define RPI_PROFILE_H

#include <stdbool.h>

#include "base/error.h"
#include "ops/ops.h"

typedef struct rpi_profile_entry {
  int stack;     /* -1: of no stack */
  int64_t layer; /* -1: of none */
  const char *operation;
  bool backward;
  int64_t calls;
  double seconds, operations, bytes;
  char name[64];
} rpi_profile_entry;

typedef struct rpi_profile {
  bool on;
  const rp_ops *ops;          /* of a device, that is waited for; NULL: of the host */
  rpi_profile_entry *entries; /* [most], or NULL */
  int64_t count, most;
} rpi_profile;

/* Begins anew with room for `most` lines. */
rp_status rpi_profile_start(rpi_profile *profile, const rp_ops *ops, int64_t most);
/* Adds no more; the lines stay. */
void rpi_profile_stop(rpi_profile *profile);
void rpi_profile_free(rpi_profile *profile);

/* Seconds of a clock that only rises, after all that was asked for is done; 0 where the profile is
 * off. */
double rpi_profile_now(const rpi_profile *profile);

/* Adds one call that began at `began`. `operation` lives as long as the program. */
void rpi_profile_add(rpi_profile *profile, int stack, int64_t layer, const char *operation,
                     bool backward, double began, double operations, double bytes);

#endif
