/* SPDX-License-Identifier: Apache-2.0
 *
 * api_rotate.c: the checks of rotary positions and of projected sinusoids, then one call inward;
 * frequencies and tables of sinusoids.
 *
 * The latter two are computed here: they are made once, in double, by the C library, alike for
 * every instruction set and device.
 */
#include <math.h>

#include "api_attention.h"
#include "base/memory.h"
#include "base/threads.h"
#include "isa/dispatch.h"
#include "model/waves.h"

static rp_status check_range(const char *name, int64_t value, int64_t least, int64_t most) {
  RPI_CHECK(value >= least && value <= most, RP_ERROR_SHAPE,
            "rotate: %s=%lld, must be from %lld to %lld", name, (rpi_wide)value, (rpi_wide)least,
            (rpi_wide)most);
  return RP_OK;
}

/* Times any position still a float. */
#define HIGHEST_FREQUENCY 1e290

static rp_status check_frequencies(const char *call, int64_t pairs, const double *frequencies) {
  RPI_CHECK(frequencies || pairs == 0, RP_ERROR_ARGUMENT, "%s: frequencies is NULL", call);
  for (int64_t c = 0; c < pairs; c++) {
    RPI_CHECK(fabs(frequencies[c]) <= HIGHEST_FREQUENCY, RP_ERROR_ARGUMENT,
              "%s: frequencies[%lld]=%g, must be within %g", call, (rpi_wide)c, frequencies[c],
              HIGHEST_FREQUENCY);
  }
  return RP_OK;
}

/* Which rows belong to which sequence, and where they stand. */
static rp_status check_places(const rp_rotation *r) {
  RPI_CHECK(!(r->offsets && r->lengths), RP_ERROR_ARGUMENT,
            "rotate: both lengths and offsets are given; packed rows have offsets alone");
  RPI_TRY(rpi_check_offsets("rotate", "offsets", r->offsets, r->B));
  RPI_TRY(rpi_check_lengths("rotate", "lengths", r->lengths, r->B, r->N, "N"));
  RPI_TRY(rpi_check_starts("rotate", "start", r->start, r->B));
  RPI_CHECK(!(r->positions && r->start), RP_ERROR_ARGUMENT,
            "rotate: both positions and start are given; positions are the rows' own");
  RPI_CHECK(!r->positions || r->offsets || r->position_stride == 0 ||
                (r->position_stride >= r->N && r->position_stride <= RPI_LIMIT),
            RP_ERROR_SHAPE, "rotate: position_stride=%lld, must be 0 or at least N=%lld",
            (rpi_wide)r->position_stride, (rpi_wide)r->N);
  return RP_OK;
}

static rp_status check_rotation(const rp_rotation *r) {
  RPI_CHECK(r, RP_ERROR_ARGUMENT, "rotate: r is NULL");
  RPI_CHECK_SET_UP("rotate: ", r, "start from rp_rotation_default()");
  RPI_TRY(check_range("B", r->B, 0, RPI_LIMIT));
  RPI_TRY(check_range("H", r->H, 0, RPI_LIMIT));
  RPI_TRY(check_range("N", r->N, 0, RPI_LIMIT));
  RPI_TRY(check_range("D", r->D, 1, RPI_LIMIT));
  RPI_TRY(check_places(r));
  RPI_TRY(check_range("pairs", r->pairs, 0, r->D / 2));
  return check_frequencies("rotate", r->pairs, r->frequencies);
}

static rp_status rotate(const rp_rotation *r, rp_rows x, rp_rows_out out) {
  RPI_TRY(check_rotation(r));
  const int64_t rows = r->offsets ? r->offsets[r->B] : r->N;
  const int64_t batches = r->offsets ? 1 : r->B;
  rpi_array arrays[2] = {{.name = "x",
                          .data = x.data,
                          .axes = {{batches, r->offsets ? 0 : x.batch_stride},
                                   {r->H, x.head_stride},
                                   {rows, x.row_stride}}},
                         {.name = "out",
                          .data = out.data,
                          .axes = {{batches, r->offsets ? 0 : out.batch_stride},
                                   {r->H, out.head_stride},
                                   {rows, out.row_stride}}}};
  for (int i = 0; i < 2; i++) {
    arrays[i].width = r->D;
    arrays[i].element = rpi_placed_bytes(r->placement);
    RPI_TRY(rpi_check_rows("rotate", &arrays[i], i > 0));
  }
  if (r->B == 0 || r->H == 0 || rows == 0) return RP_OK;
  RPI_CHECK(x.data != out.data || ((batches == 1 || x.batch_stride == out.batch_stride) &&
                                   (r->H == 1 || x.head_stride == out.head_stride) &&
                                   (rows == 1 || x.row_stride == out.row_stride)),
            RP_ERROR_SHAPE, "rotate: out is x, but their strides differ");
  if (x.data != out.data) RPI_TRY(rpi_check_apart("rotate", arrays, 1, 2));
  const rp_ops *ops = NULL;
  RPI_TRY(rpi_placement_ops("rotate", r->placement, &ops));
  return ops->rotate(r, x, out);
}

rp_status rp_rotate(const rp_rotation *r, rp_rows x, rp_rows_out out) {
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rotate(r, x, out);
  rpi_float_leave(caller);
  return status;
}

static rp_status make_frequencies(int64_t pairs, double base, int rule, double *frequencies) {
  RPI_CHECK(pairs >= 0 && pairs <= RPI_LIMIT, RP_ERROR_SHAPE,
            "frequencies: pairs=%lld, must be from 0 to 2^40", (rpi_wide)pairs);
  RPI_CHECK(base > 0 && isfinite(base), RP_ERROR_ARGUMENT,
            "frequencies: base=%g, must be finite and above 0", base);
  RPI_CHECK(rule == RP_FREQUENCIES_OPEN || rule == RP_FREQUENCIES_CLOSED, RP_ERROR_ARGUMENT,
            "frequencies: rule=%d, must be RP_FREQUENCIES_OPEN (0) or RP_FREQUENCIES_CLOSED (1)",
            rule);
  RPI_CHECK(frequencies || pairs == 0, RP_ERROR_ARGUMENT, "frequencies: frequencies is NULL");
  const int64_t last = rule == RP_FREQUENCIES_CLOSED && pairs > 1 ? pairs - 1 : pairs;
  RPI_CHECK(pairs == 0 || pow(base, -(double)(pairs - 1) / (double)last) <= HIGHEST_FREQUENCY,
            RP_ERROR_ARGUMENT, "frequencies: base=%g, so small that the last of %lld is beyond %g",
            base, (rpi_wide)pairs, HIGHEST_FREQUENCY);
  for (int64_t c = 0; c < pairs; c++) frequencies[c] = pow(base, -(double)c / (double)last);
  return RP_OK;
}

rp_status rp_frequencies(int64_t pairs, double base, int rule, double *frequencies) {
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = make_frequencies(pairs, base, rule, frequencies);
  rpi_float_leave(caller);
  return status;
}

static rp_status make_sinusoid(int64_t rows, int64_t width, int64_t first, int interleaved,
                               const double *frequencies, rp_real *table) {
  int64_t count = 0;
  RPI_CHECK(rpi_multiply(rows, width, &count) && count <= INT64_MAX / 16, RP_ERROR_SHAPE,
            "sinusoid: rows=%lld and width=%lld must not be negative, nor their product overflow",
            (rpi_wide)rows, (rpi_wide)width);
  RPI_CHECK(first >= -RPI_LIMIT && first <= RPI_LIMIT, RP_ERROR_ARGUMENT,
            "sinusoid: first=%lld, must be within 2^40 of 0", (rpi_wide)first);
  RPI_CHECK(table || count == 0, RP_ERROR_ARGUMENT, "sinusoid: table is NULL");
  if (count == 0) return RP_OK; /* however many rows of no width */
  const int64_t pairs = width / 2;
  RPI_TRY(check_frequencies("sinusoid", pairs, frequencies));
  const rpi_array arrays[] = {{.name = "frequencies",
                               .data = frequencies,
                               .axes = {{1, 0}, {1, 0}, {1, 0}},
                               .width = pairs,
                               .element = (int64_t)sizeof *frequencies},
                              rpi_dense("table", table, count)};
  RPI_TRY(rpi_check_apart("sinusoid", arrays, 1, 2));
  for (int64_t row = 0; row < rows; row++, table += width) {
    for (int64_t c = 0; c < pairs; c++) {
      const double angle = (double)(first + row) * frequencies[c];
      table[interleaved ? 2 * c : c] = (rp_real)sin(angle);
      table[interleaved ? 2 * c + 1 : pairs + c] = (rp_real)cos(angle);
    }
    if (width % 2 != 0) table[width - 1] = 0;
  }
  return RP_OK;
}

rp_status rp_sinusoid(int64_t rows, int64_t width, int64_t first, int interleaved,
                      const double *frequencies, rp_real *table) {
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = make_sinusoid(rows, width, first, interleaved, frequencies, table);
  rpi_float_leave(caller);
  return status;
}

static void close_waves(rpi_waves *w) {
  rpi_release(w->some);
  rpi_release(w->made);
  rpi_release(w->angles);
}

/* What rp_wave_table and rp_wave_gradient share: the sizes, and a job without memory so far. */
static rp_status check_waves(int64_t H, int64_t D, int64_t width, int64_t left, int64_t right,
                             const rp_real *waves, rpi_waves *w) {
  const struct {
    const char *name;
    int64_t value;
  } sizes[] = {{"H", H}, {"D", D}, {"width", width}, {"left", left}, {"right", right}};
  for (int i = 0; i < 5; i++) {
    RPI_CHECK(sizes[i].value >= 0 && sizes[i].value <= RPI_LIMIT, RP_ERROR_SHAPE,
              "wave table: %s=%lld, must be from 0 to 2^40", sizes[i].name,
              (rpi_wide)sizes[i].value);
  }
  int64_t columns = 0, numbers = 0, table = 0, all = 0, given = 0;
  const bool fits = rpi_multiply(H, D, &columns) && rpi_multiply(columns, width, &numbers) &&
                    rpi_multiply(D, left + 1 + right, &table) &&
                    rpi_multiply(columns, left + 1 + right, &all) &&
                    (!waves || rpi_multiply(rpi_max(left, right) + 1, width, &given)) &&
                    numbers <= INT64_MAX / 16 && all <= INT64_MAX / 16 && given <= INT64_MAX / 16 &&
                    columns <= INT64_MAX / 16 / (2 * RPI_WAVE_ROWS);
  RPI_CHECK(fits, RP_ERROR_SHAPE,
            "wave table: the sizes of H=%lld, D=%lld, width=%lld and %lld distances overflow",
            (rpi_wide)H, (rpi_wide)D, (rpi_wide)width, (rpi_wide)(left + 1 + right));
  *w = (rpi_waves){.left = left,
                   .right = right,
                   .heads = H,
                   .head_width = D,
                   .width = width,
                   .waves = waves,
                   .head_stride = table,
                   .row_stride = D};
  return RP_OK;
}

static rpi_array array_of_waves(const rpi_waves *w) {
  return rpi_dense("waves", w->waves, (rpi_max(w->left, w->right) + 1) * w->width);
}

static rpi_array array_of_table(const rpi_waves *w, const char *name, const rp_real *table) {
  return rpi_dense(name, table, w->heads * w->head_stride);
}

static rpi_array array_of_weight(const rpi_waves *w, const char *name, const rp_real *weight) {
  return rpi_dense(name, weight, w->heads * w->head_width * w->width);
}

static rp_status open_waves(rpi_waves *w) {
  const int64_t some = rpi_waves_scratch(w->heads, w->head_width, w->left, w->right);
  const int64_t made = RPI_WAVE_ROWS * w->width, angles = rpi_waves_angles(w->width);
  w->some = rpi_allocate((size_t)some * sizeof *w->some);
  if (!w->waves) w->made = rpi_allocate((size_t)made * sizeof *w->made);
  if (!w->waves) w->angles = rpi_allocate((size_t)angles * sizeof *w->angles);
  if (w->some && (w->waves || (w->made && w->angles))) return RP_OK;
  close_waves(w);
  return rpi_fail(RP_ERROR_MEMORY, "wave table: no memory for %lld numbers",
                  (rpi_wide)(some + (w->waves ? 0 : made + angles)));
}

rp_status rp_wave_table(int64_t H, int64_t D, int64_t width, int64_t left, int64_t right,
                        const rp_real *waves, const rp_real *weight, rp_real *table) {
  const rp_ops *ops = NULL;
  rpi_waves w;
  RPI_CHECK(weight || H == 0 || D == 0 || width == 0, RP_ERROR_ARGUMENT,
            "wave table: weight is NULL");
  RPI_CHECK(table || H == 0 || D == 0, RP_ERROR_ARGUMENT, "wave table: table is NULL");
  RPI_TRY(rpi_ops_get(&ops));
  RPI_TRY(check_waves(H, D, width, left, right, waves, &w));
  const rpi_array arrays[] = {array_of_waves(&w), array_of_weight(&w, "weight", weight),
                              array_of_table(&w, "table", table)};
  RPI_TRY(rpi_check_apart("wave table", arrays, 2, 3));
  RPI_TRY(open_waves(&w));
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rpi_waves_forward(ops, &w, weight, table);
  rpi_float_leave(caller);
  close_waves(&w);
  return status;
}

rp_status rp_wave_gradient(int64_t H, int64_t D, int64_t width, int64_t left, int64_t right,
                           const rp_real *waves, const rp_real *dtable, rp_real *dweight) {
  const rp_ops *ops = NULL;
  rpi_waves w;
  RPI_CHECK(dtable || H == 0 || D == 0, RP_ERROR_ARGUMENT, "wave table: dtable is NULL");
  RPI_CHECK(dweight || H == 0 || D == 0 || width == 0, RP_ERROR_ARGUMENT,
            "wave table: dweight is NULL");
  RPI_TRY(rpi_ops_get(&ops));
  RPI_TRY(check_waves(H, D, width, left, right, waves, &w));
  const rpi_array arrays[] = {array_of_waves(&w), array_of_table(&w, "dtable", dtable),
                              array_of_weight(&w, "dweight", dweight)};
  RPI_TRY(rpi_check_apart("wave table", arrays, 2, 3));
  RPI_TRY(open_waves(&w));
  const rpi_float_state caller = rpi_float_enter(false);
  const rp_status status = rpi_waves_backward(ops, &w, dtable, dweight);
  rpi_float_leave(caller);
  close_waves(&w);
  return status;
}
