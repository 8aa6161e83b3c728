/* SPDX-License-Identifier: Apache-2.0
 *
 * scratch.h: memory lent to a task while it runs.
 *
 * For what is too large for the stack of a thread (musl: 128 KiB) and too small a
 * matter for a workspace of the caller's. It is part of the library's zeroed data, so
 * it cannot fail to be allocated and costs memory only once it has been written to.
 * What a piece holds is left from its last use.
 *
 * A task that gets none, because every piece is lent, does its work without: more
 * slowly, but with the same result. In a forked child the pieces that other threads
 * held at that moment stay lent.
 */
#ifndef RPI_SCRATCH_H
#define RPI_SCRATCH_H

#define RPI_SCRATCH_BYTES (960 * 1024)
#define RPI_SCRATCH_PIECES 64

/* Aligned to a page of 4096 bytes. NULL: all are lent. */
void *rpi_scratch_take(void);

/* Takes what rpi_scratch_take returned and was not NULL. */
void rpi_scratch_give(void *piece);

#endif
