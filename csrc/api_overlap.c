/* SPDX-License-Identifier: Apache-2.0
 *
 * api_overlap.c: what a call writes has memory of its own. Rows of several arrays may lie between
 * one another, as columns of one packed array do: what counts are the numbers.
 */
#include "api_attention.h"
#include "base/integers.h"

/* Is there a sum of `from` and, for each axis, 0 to count - 1 strides that is above low and below
 * high? Strides fall from axis to axis, so that few counts of one leave the rest within reach. */
static bool reaches(const axis *axes, int count, int64_t from, int64_t low, int64_t high) {
  if (count == 0) return from > low && from < high;
  int64_t rest = 0;
  for (int i = 1; i < count; i++) rest += (axes[i].count - 1) * axes[i].stride;
  const int64_t stride = axes->stride;
  const int64_t first = from > low - rest ? 0 : (low - rest - from) / stride + 1;
  const int64_t last = from < high ? rpi_min(axes->count - 1, (high - from - 1) / stride) : -1;
  for (int64_t i = first; i <= last; i++) {
    if (reaches(axes + 1, count - 1, from + i * stride, low, high)) return true;
  }
  return false;
}

/* Adds an axis to those of falling strides; two of one stride are one. Returns how many. */
static int insert(axis *axes, int count, axis added) {
  int at = 0;
  while (at < count && axes[at].stride > added.stride) at++;
  if (at < count && axes[at].stride == added.stride) {
    axes[at].count += added.count - 1;
    return count;
  }
  for (int i = count; i > at; i--) axes[i] = axes[i - 1];
  axes[at] = added;
  return count + 1;
}

static bool is_empty(const rpi_array *x) {
  return !x->data || x->width == 0 || x->axes[0].count == 0 || x->axes[1].count == 0 ||
         x->axes[2].count == 0;
}

/* Rows of x and y overlap where y's begins less than its width before x's, or less than x's width
 * behind it. All in bytes. */
static bool overlap(const rpi_array *x, const rpi_array *y) {
  if (is_empty(x) || is_empty(y)) return false;
  axis axes[6];
  int count = 0;
  int64_t from = (int64_t)((uintptr_t)y->data - (uintptr_t)x->data);
  for (int i = 0; i < 6; i++) {
    const rpi_array *const of = i < 3 ? x : y;
    const axis own = of->axes[i % 3];
    if (own.count == 1 || own.stride == 0) continue; /* one never taken may be anything */
    const int64_t bytes = own.stride * of->element;
    if (of == x) from -= (own.count - 1) * bytes; /* counted from x's last row */
    count = insert(axes, count, (axis){own.count, bytes});
  }
  return reaches(axes, count, from, -y->width * y->element, x->width * x->element);
}

rp_status rpi_check_apart(const char *call, const rpi_array *arrays, int inputs, int count) {
  for (int i = inputs; i < count; i++) {
    for (int j = 0; j < i; j++) {
      if (arrays[i].added_to && arrays[j].added_to) continue;
      RPI_CHECK(!overlap(&arrays[j], &arrays[i]), RP_ERROR_ARGUMENT,
                "%s: %s shares memory with %s; give it an array of its own", call, arrays[i].name,
                arrays[j].name);
    }
  }
  return RP_OK;
}
