/* SPDX-License-Identifier: Apache-2.0
 *
 * error.h: the sentence behind a failed status, kept per thread.
 *
 * Nothing in the core prints, exits or aborts. A function that fails returns a
 * status, and has written one sentence: the argument, what came, what is allowed.
 */
#ifndef RPI_ERROR_H
#define RPI_ERROR_H

#include "relpos/relpos.h"

/* Room for a sentence: one that names a file is whole. */
enum { RPI_SENTENCE = 4096 + 512 };

/* What %lld prints of an int64_t. */
typedef long long rpi_wide;

/* The most that a later header's struct_size may be: one that was never set is mostly more. */
enum { RPI_MOST_STRUCT = 4096 };

/* Keeps the sentence for this thread and returns the status. */
rp_status rpi_fail(rp_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Text from outside, to be part of a sentence: in quotes, at most its first 48 bytes (then ...),
 * and what is not printable ASCII as '?'. Gives `quoted`, in which it writes. */
enum { RPI_QUOTE = 56 };
const char *rpi_quote(const char *text, char quoted[RPI_QUOTE]);

/* Fails the calling function unless the condition holds. */
#define RPI_CHECK(condition, status, ...)                                                          \
  do {                                                                                             \
    if (!(condition)) return rpi_fail((status), __VA_ARGS__);                                      \
  } while (0)

/* Fails the calling function unless its caller has set a struct up; name: what comes before its
 * field; how: what sets it up. */
#define RPI_CHECK_SET_UP(name, x, how)                                                             \
  RPI_CHECK((x)->struct_size == sizeof *(x), RP_ERROR_ARGUMENT,                                    \
            "%sstruct_size=%zu, must be %zu: %s", (name), (x)->struct_size, sizeof *(x), (how))

/* Hands a failure up, but says a lack of memory in a sentence of its own. */
#define RPI_TRY_MEMORY(expression, ...)                                                            \
  do {                                                                                             \
    const rp_status rpi_try_status = (expression);                                                 \
    RPI_CHECK(rpi_try_status != RP_ERROR_MEMORY, RP_ERROR_MEMORY, __VA_ARGS__);                    \
    if (rpi_try_status != RP_OK) return rpi_try_status;                                            \
  } while (0)

/* Hands a failure of the called function up. */
#define RPI_TRY(expression)                                                                        \
  do {                                                                                             \
    const rp_status rpi_try_status = (expression);                                                 \
    if (rpi_try_status != RP_OK) return rpi_try_status;                                            \
  } while (0)

#endif
