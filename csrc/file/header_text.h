/* SPDX-License-Identifier: Apache-2.0
 *
 * header_text.h: the texts and numbers in the header of a safetensors file: strict JSON, as far as
 * headers need it.
 */
#ifndef RPI_HEADER_TEXT_H
#define RPI_HEADER_TEXT_H

#include <stdbool.h>

#include "base/error.h"

/* Where the reading of a header stands. Its bytes may come from anywhere; texts are decoded in
 * them, so they are written to. */
typedef struct rpi_header {
  const char *path; /* for messages */
  char *begin, *at, *end;
} rpi_header;

bool rpi_is_utf8(const char *text);

/* RP_ERROR_FILE: no safetensors file, for its header should have what was expected here. */
rp_status rpi_header_fail(const rpi_header *r, const char *expected);

void rpi_header_skip_space(rpi_header *r);

/* Steps over the sign if it is there, with the space before it. */
bool rpi_header_passes(rpi_header *r, char sign);
rp_status rpi_header_expect(rpi_header *r, char sign, const char *what);

/* A text in quotes, decoded; it lives as long as the header's bytes. */
rp_status rpi_header_text(rpi_header *r, const char **text);

/* [1, 2]: at most `most` whole numbers from 0 on. */
rp_status rpi_header_counts(rpi_header *r, int64_t *counts, int most, int *found);

#endif
