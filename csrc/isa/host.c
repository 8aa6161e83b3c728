/* SPDX-License-Identifier: Apache-2.0
 *
 * host.c: the verdict on a step. Its few numbers are those of every instruction set, and those that
 * rp_learning_rate tells.
 */
#include "isa/host.h"

#include "ops/verdict.h"

rp_status rpi_host_decide(const rpi_decide_args *args) {
  rpi_decide(args);
  return RP_OK;
}
