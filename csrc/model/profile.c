/* SPDX-License-Identifier: Apache-2.0
 *
 * profile.c: lines of a profile, found by a search: there are some hundreds of them.
 */
#define _POSIX_C_SOURCE 200809L

#include "model/profile.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/memory.h"

rp_status rpi_profile_start(rpi_profile *profile, const rp_ops *ops, int64_t most) {
  rpi_profile_entry *const entries = rpi_allocate((size_t)most * sizeof *entries);
  RPI_CHECK(entries, RP_ERROR_MEMORY, "profile: no memory for %lld lines", (rpi_wide)most);
  rpi_profile_free(profile);
  *profile =
      (rpi_profile){.on = true, .ops = ops->host ? NULL : ops, .entries = entries, .most = most};
  return RP_OK;
}

void rpi_profile_stop(rpi_profile *profile) { profile->on = false; }

void rpi_profile_free(rpi_profile *profile) {
  rpi_release(profile->entries);
  *profile = (rpi_profile){.entries = NULL};
}

double rpi_profile_now(const rpi_profile *profile) {
  if (!profile->on) return 0;
  if (profile->ops) (void)profile->ops->read(NULL, NULL, 0); /* a failure comes to light again */
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static rpi_profile_entry *entry_of(rpi_profile *profile, int stack, int64_t layer,
                                   const char *operation, bool backward) {
  for (int64_t i = 0; i < profile->count; i++) {
    rpi_profile_entry *const e = &profile->entries[i];
    if (e->stack == stack && e->layer == layer && e->backward == backward &&
        strcmp(e->operation, operation) == 0) {
      return e;
    }
  }
  if (profile->count == profile->most) return NULL;
  rpi_profile_entry *const e = &profile->entries[profile->count++];
  *e = (rpi_profile_entry){
      .stack = stack, .layer = layer, .operation = operation, .backward = backward};
  static const char *const stacks[] = {"encoder.", "decoder."};
  char number[24] = "";
  if (layer >= 0) snprintf(number, sizeof number, "%lld.", (rpi_wide)layer);
  snprintf(e->name, sizeof e->name, "%s%s%s", stack >= 0 ? stacks[stack] : "", number, operation);
  return e;
}

void rpi_profile_add(rpi_profile *profile, int stack, int64_t layer, const char *operation,
                     bool backward, double began, double operations, double bytes) {
  if (!profile->on) return;
  rpi_profile_entry *const e = entry_of(profile, stack, layer, operation, backward);
  if (!e) return;
  e->calls++;
  e->seconds += rpi_profile_now(profile) - began;
  e->operations += operations;
  e->bytes += bytes;
}
