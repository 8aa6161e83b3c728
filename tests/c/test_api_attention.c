/* SPDX-License-Identifier: Apache-2.0
 *
 * test_api_attention.c: api_attention.c. Every check has a call that fails it, with its
 * status and a sentence that names the argument; empty calls succeed; and where memory
 * runs out, nothing leaks. Terms and masks are test_api_relation.c's; what the numbers
 * must be is test_attention.c's.
 */
#include "call.h"

#include <fenv.h>
#include <stdlib.h>

/* ---- the shape ---------------------------------------------------------------- */

static void test_valid(void) {
  const call c = valid();
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
}

/* The caller's rounding changes no result, and a NaN of his raises nothing that he may trap on. */
static void test_float_state(void) {
  static const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_TOWARDZERO};
  static rp_real tables[3][H * T * D];
  call c = valid();
  c.a.scale = 0.7;
  for (int i = 0; i < B * H * N * DV; i++) dout_data[i] = (rp_real)(i % 4) - 1;
  for (int i = 0; i < 3; i++) {
    c.g.key[0] = tables[i];
    fesetround(modes[i]);
    const rp_status forth = forward(&c), back = backward(&c);
    const int mode = fegetround();
    fesetround(FE_TONEAREST);
    CHECK_INT(forth, RP_OK);
    CHECK_INT(back, RP_OK);
    CHECK_INT(mode, modes[i]);
    CHECK(memcmp(tables[i], tables[0], sizeof tables[0]) == 0);
  }
  c.a.scale = 0;
  feclearexcept(FE_ALL_EXCEPT);
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(fetestexcept(FE_ALL_EXCEPT), 0);
  c.a.scale = NAN;
  const rp_status status = forward(&c);
  CHECK_INT(fetestexcept(FE_ALL_EXCEPT), 0);
  CHECK_INT(status, RP_ERROR_ARGUMENT);
}

static void test_default(void) {
  const rp_attention a = rp_attention_default();
  rp_attention expected;
  memset(&expected, 0, sizeof expected);
  expected.struct_size = sizeof expected;
  expected.window_left = expected.window_right = -1;
  CHECK(memcmp(&a, &expected, sizeof a) == 0);
}

/* A caller of an older header has a shorter struct: whatever lies behind it is not read. */
static void test_older_structs(void) {
  const size_t first = offsetof(rp_attention, window_left);
  for (size_t size = first; size <= sizeof(rp_attention); size += 8) {
    rp_attention a = valid().a;
    a.struct_size = size;
    memset((char *)&a + size, 0xA5, sizeof a - size);
    taken(&a);
  }
  REFUSED(RP_ERROR_ARGUMENT, "attention: struct_size=", a.struct_size = first - 8);
  REFUSED(RP_ERROR_ARGUMENT, "attention: struct_size=", a.struct_size = first + 4);
}

static void test_struct(void) {
  CHECK_INT(rp_attention_workspace(NULL, NULL, NULL), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "attention: a is NULL");
  call c = valid();
  CHECK_INT(rp_attention_forward(NULL, c.q, c.k, c.v, c.out, c.lse, c.workspace, most_bytes),
            RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "attention: a is NULL");
  CHECK_INT(rp_attention_backward(NULL, c.q, c.k, c.v, c.out_in, c.lse, c.dout, &c.g, c.workspace,
                                  most_bytes),
            RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "attention: a is NULL");
  REFUSED(RP_ERROR_ARGUMENT, "struct_size=0", a.struct_size = 0);
  REFUSED(RP_ERROR_ARGUMENT, "rp_attention_default()", a.struct_size++);
  REFUSED(RP_ERROR_ARGUMENT, "no newer than the library", a.struct_size += 8);
}

static void test_sizes(void) {
  REFUSED(RP_ERROR_SHAPE, "attention: B=-1", a.B = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: H=-1", a.H = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: key_heads=-1", a.key_heads = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: key_heads=4, must be 0 or divide H=6", a.H = 6,
          a.key_heads = 4);
  REFUSED(RP_ERROR_SHAPE, "attention: key_heads=6, must be 0 or divide H=3", a.H = 3,
          a.key_heads = 6);
  REFUSED(RP_ERROR_SHAPE, "attention: key_heads=3, must be 0 or divide H=0", a.H = 0,
          a.key_heads = 3);
  REFUSED(RP_ERROR_SHAPE, "attention: N=-1", a.N = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: M=-1", a.M = -1);
  REFUSED(RP_ERROR_SHAPE, "attention: D=0", a.D = 0);
  REFUSED(RP_ERROR_SHAPE, "attention: Dv=0", a.Dv = 0);
  REFUSED(RP_ERROR_SHAPE, "attention: B=", a.B = BEYOND);
  REFUSED(RP_ERROR_SHAPE, "attention: H=", a.H = BEYOND);
  REFUSED(RP_ERROR_SHAPE, "attention: N=", a.N = BEYOND);
  REFUSED(RP_ERROR_SHAPE, "attention: M=", a.M = BEYOND);
  REFUSED(RP_ERROR_SHAPE, "attention: D=", a.D = BEYOND);
  REFUSED(RP_ERROR_SHAPE, "attention: Dv=1099511627777, must be from 1 to 2^40", a.Dv = BEYOND);
  REFUSED(RP_ERROR_ARGUMENT, "attention: scale=", a.scale = INFINITY);
  REFUSED(RP_ERROR_ARGUMENT, "attention: scale=", a.scale = NAN);
  REFUSED(RP_ERROR_ARGUMENT, "must be 0 or a normal number", a.scale = -1e-310);
}

static void test_lengths(void) {
  const int64_t long_queries[B] = {0, N + 1}, negative[B] = {-1, 0}, good[B] = {N, 0};
  const int64_t long_keys[B] = {M + 1, 0}, good_keys[B] = {0, M}, between[B] = {6, 6};
  const int64_t packed[B + 1] = {0, 1, N};
  REFUSED(RP_ERROR_SHAPE, "attention: lengths[1]=6, must be from 0 to N=5",
          a.lengths = long_queries);
  REFUSED(RP_ERROR_SHAPE, "attention: lengths[0]=-1", a.lengths = negative);
  REFUSED(RP_ERROR_SHAPE, "attention: key_lengths[0]=8, must be from 0 to M=7",
          a.key_lengths = long_keys);
  REFUSED(RP_ERROR_SHAPE, "attention: key_lengths[0]=-1", a.key_lengths = negative);
  REFUSED(RP_ERROR_SHAPE, "attention: lengths[0]=6, must be from 0 to M=5", /* of the keys too */
          a.lengths = between, a.N = 7, a.M = 5);
  REFUSED(RP_ERROR_ARGUMENT, "both lengths and offsets", a.lengths = good, a.offsets = packed);
  REFUSED(RP_ERROR_ARGUMENT, "attention: key_lengths is given with packed keys",
          a.key_lengths = good_keys, a.offsets = packed);
  REFUSED(RP_ERROR_ARGUMENT, "attention: key_lengths is given with packed keys",
          a.key_lengths = good_keys, a.key_offsets = packed);
  call c = valid();
  c.a.lengths = good;
  c.a.key_lengths = good_keys;
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
}

static void test_offsets(void) {
  const int64_t late[B + 1] = {1, 2, 3}, falling[B + 1] = {0, 3, 2}, far[B + 1] = {0, 1, BEYOND};
  REFUSED(RP_ERROR_SHAPE, "attention: offsets[0]=1, must be 0", a.offsets = late);
  REFUSED(RP_ERROR_SHAPE, "attention: offsets[2]=2 after 3", a.offsets = falling);
  REFUSED(RP_ERROR_SHAPE, "attention: offsets[2]=", a.offsets = far);
  REFUSED(RP_ERROR_SHAPE, "attention: key_offsets[0]=1, must be 0", a.key_offsets = late);
  REFUSED(RP_ERROR_SHAPE, "attention: key_offsets[2]=2 after 3", a.key_offsets = falling);
  REFUSED(RP_ERROR_SHAPE, "attention: key_offsets[2]=", a.key_offsets = far);
}

static void test_starts(void) {
  const int64_t before[B] = {0, -BEYOND}, behind[B] = {BEYOND, 0};
  REFUSED(RP_ERROR_ARGUMENT, "attention: query_start[1]=-", a.query_start = before);
  REFUSED(RP_ERROR_ARGUMENT, "attention: query_start[0]=", a.query_start = behind);
}

static void test_numbers(void) {
  REFUSED(RP_ERROR_ARGUMENT, "attention: softcap=-1", a.softcap = -1);
  REFUSED(RP_ERROR_ARGUMENT, "attention: softcap=inf", a.softcap = INFINITY);
  REFUSED(RP_ERROR_ARGUMENT, "attention: softcap=", a.softcap = NAN);
  REFUSED(RP_ERROR_ARGUMENT, "attention: window_left=-2", a.window_left = -2);
  REFUSED(RP_ERROR_ARGUMENT, "attention: window_right=-2", a.window_right = -2);
  REFUSED(RP_ERROR_ARGUMENT, "attention: window_left=1099511627777", a.window_left = BEYOND);
  REFUSED(RP_ERROR_ARGUMENT, "attention: window_right=", a.window_right = BEYOND);
  REFUSED(RP_ERROR_ARGUMENT, "attention: dropout=-0.1", a.dropout = -0.1);
  REFUSED(RP_ERROR_ARGUMENT, "attention: dropout=1, must be from 0 to below 1", a.dropout = 1);
  REFUSED(RP_ERROR_ARGUMENT, "attention: dropout=", a.dropout = NAN);
  TAKEN(a.softcap = 30);
  TAKEN(a.window_left = 0, a.window_right = 0);
  TAKEN(a.window_left = BEYOND - 1);
  TAKEN(a.window_right = BEYOND - 1);
  TAKEN(a.dropout = 0.9999, a.dropout_key[1] = UINT32_MAX, a.dropout_first = UINT32_MAX);
}

static const rp_real *of_sequence(const rp_real *data, int64_t b, int64_t rows_and_width) {
  return data + b * H * rows_and_width;
}

/* A batch with a list of ordinals is its sequences one by one, each counted from its own. */
static void test_ordinals(void) {
  static const uint32_t ordinals[B] = {UINT32_MAX, 3};
  static rp_real out[B * H * N * DV], dq[B * H * N * D], dk[B * H * M * D], dv[B * H * M * DV];
  call c = valid();
  c.a.dropout = 0.5;
  c.a.dropout_first = 99; /* without effect */
  c.a.dropout_ordinals = ordinals;
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
  memcpy(out, out_data, sizeof out);
  memcpy(dq, dq_data, sizeof dq);
  memcpy(dk, dk_data, sizeof dk);
  memcpy(dv, dv_data, sizeof dv);
  CHECK(memcmp(of_sequence(out, 0, N * DV), of_sequence(out, 1, N * DV), sizeof out / B) != 0);
  c.a.B = 1;
  c.a.dropout_ordinals = NULL;
  for (int64_t b = 0; b < B; b++) {
    c.a.dropout_first = ordinals[b];
    c.q.data = of_sequence(q_data, b, N * D);
    c.k.data = of_sequence(k_data, b, M * D);
    c.v.data = of_sequence(v_data, b, M * DV);
    c.dout.data = of_sequence(dout_data, b, N * DV);
    CHECK_INT(forward(&c), RP_OK);
    CHECK_INT(backward(&c), RP_OK);
    CHECK(memcmp(out_data, of_sequence(out, b, N * DV), sizeof out / B) == 0);
    CHECK(memcmp(dq_data, of_sequence(dq, b, N * D), sizeof dq / B) == 0);
    CHECK(memcmp(dk_data, of_sequence(dk, b, M * D), sizeof dk / B) == 0);
    CHECK(memcmp(dv_data, of_sequence(dv, b, M * DV), sizeof dv / B) == 0);
  }
}

static void test_position_bias(void) {
  static rp_real bias[H * D];
  REFUSED(RP_ERROR_SHAPE, "attention: position_bias_stride=3, must be at least the row's width D=4",
          a.position_bias = bias, a.position_bias_stride = D - 1);
  REFUSED(RP_ERROR_SHAPE, "attention: position_bias_stride=", a.position_bias = bias,
          a.position_bias_stride = BEYOND);
  REFUSED(RP_ERROR_SHAPE, "attention: position_bias: its size overflows", a.position_bias = bias,
          a.B = 0, a.H = a.position_bias_stride = BEYOND - 1);
  TAKEN(a.position_bias = bias, a.position_bias_stride = D);
  TAKEN(a.position_bias = bias, a.H = 1);
  TAKEN(a.position_bias = NULL, a.position_bias_stride = -1);
}

/* ---- arrays -------------------------------------------------------------------- */

static void test_missing_arrays(void) {
  BOTH_REFUSED(RP_ERROR_ARGUMENT, "attention: q is NULL", c.q.data = NULL);
  BOTH_REFUSED(RP_ERROR_ARGUMENT, "attention: k is NULL", c.k.data = NULL);
  BOTH_REFUSED(RP_ERROR_ARGUMENT, "attention: v is NULL", c.v.data = NULL);
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: out is NULL", c.out.data = NULL);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: out is NULL", c.out_in.data = NULL);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: dout is NULL", c.dout.data = NULL);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: lse is NULL", c.lse = NULL);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.q is NULL", c.g.q.data = NULL);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.k is NULL", c.g.k.data = NULL);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.v is NULL", c.g.v.data = NULL);
  const call c = valid();
  CHECK_INT(rp_attention_backward(&c.a, c.q, c.k, c.v, c.out_in, c.lse, c.dout, NULL, c.workspace,
                                  most_bytes),
            RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "attention: gradients is NULL");
  call without = valid(); /* forward's is optional */
  without.lse = NULL;
  CHECK_INT(forward(&without), RP_OK);
}

static void test_input_strides(void) {
  BOTH_REFUSED(RP_ERROR_SHAPE, "attention: q has a stride of -1", c.q.batch_stride = -1);
  BOTH_REFUSED(RP_ERROR_SHAPE, "attention: k has a stride of -1", c.k.head_stride = -1);
  BOTH_REFUSED(RP_ERROR_SHAPE, "attention: v has a stride of -1", c.v.row_stride = -1);
  BACKWARD_REFUSED(RP_ERROR_SHAPE, "attention: out has a stride of -1", c.out_in.row_stride = -1);
  BACKWARD_REFUSED(RP_ERROR_SHAPE, "attention: dout has a stride of -1", c.dout.row_stride = -1);
  BOTH_REFUSED(RP_ERROR_SHAPE, "attention: q: its size overflows", c.q.batch_stride = HUGE_STRIDE);
  BOTH_REFUSED(RP_ERROR_SHAPE, "attention: k: its size overflows", c.k.head_stride = HUGE_STRIDE);
  BOTH_REFUSED(RP_ERROR_SHAPE, "attention: v: its size overflows", c.v.row_stride = HUGE_STRIDE);
  BACKWARD_REFUSED(RP_ERROR_SHAPE, "attention: dout: its size overflows",
                   c.dout.row_stride = INT64_MAX / 4);
  /* Inputs may be shared: one row for every key, one array for every head. */
  call c = valid();
  c.k.row_stride = c.v.head_stride = c.q.batch_stride = 0;
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
}

static void test_output_strides(void) {
  FORWARD_REFUSED(RP_ERROR_SHAPE, "attention: out has a stride of 5", c.out.row_stride = DV - 1);
  FORWARD_REFUSED(RP_ERROR_SHAPE, "attention: out has a stride of 0", c.out.head_stride = 0);
  FORWARD_REFUSED(RP_ERROR_SHAPE, "must not overlap", c.out.batch_stride -= DV);
  FORWARD_REFUSED(RP_ERROR_SHAPE, "attention: out has a stride of -6", c.out.row_stride = -DV);
  FORWARD_REFUSED(RP_ERROR_SHAPE, "attention: out: its size overflows",
                  c.out.batch_stride = HUGE_STRIDE);
  BACKWARD_REFUSED(RP_ERROR_SHAPE, "attention: gradients.q has a stride", c.g.q.row_stride--);
  BACKWARD_REFUSED(RP_ERROR_SHAPE, "attention: gradients.k has a stride", c.g.k.head_stride--);
  BACKWARD_REFUSED(RP_ERROR_SHAPE, "attention: gradients.v has a stride", c.g.v.batch_stride--);
  BACKWARD_REFUSED(RP_ERROR_SHAPE, "attention: gradients.v: its size",
                   c.g.v.batch_stride = HUGE_STRIDE);
  /* A stride that is never taken may be anything. */
  call c = valid();
  c.a.B = 1;
  c.q.batch_stride = c.k.batch_stride = c.v.batch_stride = c.out.batch_stride = -1;
  CHECK_INT(forward(&c), RP_OK);
  c.q.batch_stride = c.out.batch_stride = INT64_MAX;
  CHECK_INT(forward(&c), RP_OK);
}

/* What is written has numbers of its own; columns of one packed array have. */
static void test_overlap(void) {
  static rp_real table[H * T * D];
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: out shares memory with q; give it an array of its",
                  c.a.Dv = D, c.out = rows_out(q_data, N, D));
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: out shares memory with k",
                  c.k.data = out_data + B * H * N * DV - 1);
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: out shares memory with v",
                  c.v.data = out_data + B * H * N * DV - 1);
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: lse shares memory with v", c.lse = v_data);
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: lse shares memory with out", c.lse = out_data);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.q shares memory with dout",
                   c.dout.data = dq_data);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.q shares memory with lse",
                   c.lse = dq_data);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.k shares memory with gradients.q",
                   c.g.q.data = dk_data);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.v shares memory with out",
                   c.out_in.data = dv_data + 1);
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: out shares memory with key[0].table",
                  c.a.key[0].table = out_data);
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: lse shares memory with value[0].table",
                  c.a.value[0].table = c.lse);
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: out shares memory with position_bias",
                  c.a.position_bias = out_data, c.a.position_bias_stride = D);
  FORWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: workspace shares memory with q",
                  c.q.data = c.workspace);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: workspace shares memory with gradients.value[0]",
                   c.g.value[0] = c.workspace);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.q shares memory with key[0].table",
                   c.a.key[0].table = dq_data);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.key[0] shares memory with k",
                   c.g.key[0] = k_data);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.key[0] shares memory with key[0].table",
                   c.a.key[0].table = c.g.key[0] = table);
  BACKWARD_REFUSED(RP_ERROR_ARGUMENT, "attention: gradients.key[0] shares memory with gradients.v",
                   c.g.key[0] = dv_data);
  call tied = valid(); /* gradients of tables add up: any may be one */
  tied.g.key[0] = tied.g.value[0] = table;
  CHECK_INT(backward(&tied), RP_OK);
  /* [B, N, 7, H, D]: q, k, v, out and the gradients of the first three side by side. */
  enum { WIDE = 7 * H * D };
  static rp_real packed[B * N * WIDE];
  call c = valid();
  c.a.M = N;
  c.a.Dv = D;
  c.a.value[0].table = NULL;
  c.q = c.k = c.v = (rp_rows){packed, N * WIDE, D, WIDE};
  c.out = c.g.q = c.g.k = c.g.v = (rp_rows_out){packed, N * WIDE, D, WIDE};
  c.k.data += H * D;
  c.v.data += 2 * H * D;
  c.out.data += 3 * H * D;
  c.g.q.data += 4 * H * D;
  c.g.k.data += 5 * H * D;
  c.g.v.data += 6 * H * D;
  c.out_in = (rp_rows){c.out.data, N * WIDE, D, WIDE};
  c.dout = rows(dout_data, N, D);
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
  c.out.data--; /* a column of v */
  CHECK_INT(forward(&c), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "attention: out shares memory with v");
  c.g.k.data++;
  CHECK_INT(backward(&c), RP_ERROR_ARGUMENT);
  CHECK_TEXT(rp_last_error(), "attention: gradients.v shares memory with gradients.k");
}

static unsigned random_below(unsigned end) {
  static unsigned state = 1;
  state = state * 1664525U + 1013904223U;
  return (state >> 16) % end;
}

/* Marks the numbers of an array; returns whether one has another mark. */
static bool marked(unsigned char *marks, int64_t at, const int64_t *strides, int64_t count,
                   int64_t width, unsigned char mark) {
  bool met = false;
  for (int64_t i = 0; i < B * H * count * width; i++) {
    const int64_t row = i / width % count, pair = i / width / count;
    unsigned char *const number =
        &marks[at + pair / H * strides[0] + pair % H * strides[1] + row * strides[2] + i % width];
    met = met || (*number != 0 && *number != mark);
    *number = mark;
  }
  return met;
}

/* Arrays of any strides in one block: refused where they share a number, and nowhere else. */
static void test_overlap_of_any_strides(void) {
  enum { BLOCK = 1500, CASES = 4000 };
  static rp_real block[BLOCK];
  static unsigned char marks[BLOCK];
  int cases = 0, refusals = 0;
  for (int number = 0; number < CASES; number++) {
    const int64_t grain = 1 + random_below(3);
    const int64_t row = DV + grain * random_below(10), packed_row = H * row + random_below(9);
    int64_t of_out[3] = {N * packed_row + random_below(9), row, packed_row};
    if (number % 2 == 0) { /* [B, H, N, Dv] */
      of_out[2] = row;
      of_out[1] = N * row + random_below(9);
      of_out[0] = H * of_out[1] + random_below(9);
    }
    int64_t of_v[3] = {of_out[0], of_out[1], of_out[2]}; /* alike, or others */
    for (int i = 0; number % 3 > 0 && i < 3; i++) of_v[i] = grain * random_below(45);
    const int64_t out_spans = (B - 1) * of_out[0] + (H - 1) * of_out[1] + (N - 1) * of_out[2] + DV;
    const int64_t v_spans = (B - 1) * of_v[0] + (H - 1) * of_v[1] + (M - 1) * of_v[2] + DV;
    if (out_spans >= BLOCK || v_spans >= BLOCK) continue;
    const int64_t out_at = random_below((unsigned)(BLOCK - out_spans));
    const int64_t v_at = random_below((unsigned)(BLOCK - v_spans));
    memset(marks, 0, sizeof marks);
    marked(marks, out_at, of_out, N, DV, 1);
    const bool met = marked(marks, v_at, of_v, M, DV, 2);
    memset(block, 0, sizeof block);
    call c = valid();
    c.out = (rp_rows_out){block + out_at, of_out[0], of_out[1], of_out[2]};
    c.v = (rp_rows){block + v_at, of_v[0], of_v[1], of_v[2]};
    if (!CHECK_INT(forward(&c), met ? RP_ERROR_ARGUMENT : RP_OK)) printf(": case %d\n", number);
    cases++;
    refusals += met;
  }
  CHECK(refusals > cases / 4 && refusals < cases * 3 / 4);
}

static void test_workspace(void) {
  FORWARD_REFUSED(RP_ERROR_MEMORY,
                  "attention: workspace_bytes=", c.workspace_bytes = forward_bytes - 1);
  BACKWARD_REFUSED(RP_ERROR_MEMORY,
                   "attention: workspace_bytes=", c.workspace_bytes = backward_bytes - 1);
  BOTH_REFUSED(RP_ERROR_MEMORY, "attention: workspace_bytes=0", c.workspace_bytes = 0);
  BOTH_REFUSED(RP_ERROR_MEMORY, "attention: workspace_bytes=-1", c.workspace_bytes = -1);
  BOTH_REFUSED(RP_ERROR_ARGUMENT, "attention: workspace is NULL", c.workspace = NULL);
  BOTH_REFUSED(RP_ERROR_ARGUMENT, "aligned to 64 bytes", c.workspace = (char *)workspace + 32);
  call c = valid();
  c.workspace_bytes = forward_bytes;
  CHECK_INT(forward(&c), RP_OK);
  c.workspace_bytes = backward_bytes;
  CHECK_INT(backward(&c), RP_OK);
  CHECK_INT(rp_attention_workspace(&c.a, NULL, NULL), RP_OK);
  /* Sizes whose workspace cannot be counted. */
  rp_attention a = valid().a;
  a.D = a.Dv = BEYOND - 1;
  a.N = a.M = 100000;
  a.key[0].table = a.value[0].table = NULL;
  CHECK_INT(rp_set_threads(1024), RP_OK);
  int64_t f = -7, b = -7;
  CHECK_INT(rp_attention_workspace(&a, &f, NULL), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "attention: the workspace's size overflows");
  CHECK_INT(rp_attention_workspace(&a, NULL, &b), RP_ERROR_SHAPE);
  CHECK(f == -7 && b == -7);
  CHECK_INT(rp_set_threads(2), RP_OK);
  /* The same of backward's lists alone: numbers of a mask, names of a table's rows. */
  static const uint8_t mask = 1;
  static const int8_t label = 0;
  a = rp_attention_default();
  a.B = a.M = a.D = a.Dv = 1;
  a.H = BEYOND - 1;
  a.N = INT64_C(1) << 24; /* times H: 2^64 */
  a.mask.data = &mask;
  CHECK_INT(rp_attention_workspace(&a, &f, &b), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "attention: the workspace's size overflows");
  a.N = 1;
  a.mask.data = NULL;
  a.key[0] = (rp_relation){.table = q_data, .row_stride = 1, .rows = INT64_C(1) << 30};
  a.key[0].map = RP_MAP_LABEL;
  a.key[0].labels = &label;
  a.key[0].label_bytes = 1;
  CHECK_INT(rp_attention_workspace(&a, &f, &b), RP_ERROR_SHAPE);
  CHECK_TEXT(rp_last_error(), "attention: the workspace's size overflows");
  CHECK(f == -7 && b == -7); /* both or neither is told */
}

/* ---- empty calls ----------------------------------------------------------------- */

/* What an empty call must not touch is NULL. */
static void test_empty(void) {
  call c = valid();
  for (int which = 0; which < 2; which++) { /* no sequence; no head */
    c = valid();
    *(which == 0 ? &c.a.B : &c.a.H) = 0;
    int64_t f = -1, b = -1;
    CHECK_INT(rp_attention_workspace(&c.a, &f, &b), RP_OK);
    CHECK(f == 0 && b == 0);
    c.q = c.k = c.v = c.out_in = c.dout = (rp_rows){0};
    c.out = c.g.q = c.g.k = c.g.v = (rp_rows_out){0};
    c.lse = NULL;
    c.workspace = NULL;
    c.workspace_bytes = 0;
    CHECK_INT(forward(&c), RP_OK);
    CHECK_INT(backward(&c), RP_OK);
  }
  c = valid(); /* no queries: keys take no gradient */
  c.a.N = 0;
  c.q.data = c.out_in.data = c.dout.data = NULL;
  c.out.data = c.g.q.data = c.lse = NULL;
  for (int i = 0; i < B * H * M * D; i++) dk_data[i] = 3;
  for (int i = 0; i < B * H * M * DV; i++) dv_data[i] = 3;
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
  bool zero = true;
  for (int i = 0; i < B * H * M * D; i++) zero = zero && dk_data[i] == 0;
  for (int i = 0; i < B * H * M * DV; i++) zero = zero && dv_data[i] == 0;
  CHECK(zero);
  c = valid(); /* no keys: zeros, -inf, no gradient */
  c.a.M = 0;
  c.k.data = c.v.data = NULL;
  c.g.k.data = c.g.v.data = NULL;
  for (int i = 0; i < B * H * N * DV; i++) out_data[i] = 3;
  for (int i = 0; i < B * H * N * D; i++) dq_data[i] = 3;
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
  for (int i = 0; i < B * H * N * DV; i++) zero = zero && out_data[i] == 0;
  for (int i = 0; i < B * H * N * D; i++) zero = zero && dq_data[i] == 0;
  for (int i = 0; i < B * H * N; i++) zero = zero && lse_data[i] == (rp_real)-INFINITY;
  CHECK(zero);
  c = valid(); /* neither, padded and packed */
  c.a.N = c.a.M = 0;
  const int64_t none[B + 1] = {0};
  for (int packed = 0; packed < 2; packed++) {
    c.a.offsets = packed ? none : NULL;
    CHECK_INT(forward(&c), RP_OK);
    CHECK_INT(backward(&c), RP_OK);
  }
}

/* ---- the simple call --------------------------------------------------------------- */

static rp_status shaw(int64_t b, int64_t h, int64_t n, int64_t d, int64_t k) {
  return rp_shaw_attention(b, h, n, d, k, 0, q_data, q_data, q_data, key_table, value_table,
                           out_data);
}

static void test_shaw(void) {
  CHECK_INT(shaw(B, H, N, D, 1), RP_OK);
  CHECK_INT(shaw(0, H, N, D, 1), RP_OK);
  CHECK_INT(shaw(B, 0, N, D, 1), RP_OK);
  CHECK_INT(shaw(B, H, 0, D, 1), RP_OK);
  CHECK_INT(rp_shaw_attention(B, H, N, D, 0, 1, q_data, q_data, q_data, NULL, NULL, out_data),
            RP_OK);
  static const struct {
    int64_t b, h, n, d, k;
    rp_status status;
    const char *sentence;
  } bad[] = {
      {-1, H, N, D, 1, RP_ERROR_SHAPE, "B=-1"},
      {B, -1, N, D, 1, RP_ERROR_SHAPE, "H=-1"},
      {B, H, -1, D, 1, RP_ERROR_SHAPE, "N=-1"},
      {B, H, N, 0, 1, RP_ERROR_SHAPE, "D=0"},
      {B, H, N, D, -1, RP_ERROR_ARGUMENT, "k=-1"},
      {B, H, N, D, BEYOND, RP_ERROR_ARGUMENT, "k=1099511627777, must be from 0 to 2^40"},
      {1, BEYOND - 1, BEYOND - 1, BEYOND - 1, 0, RP_ERROR_SHAPE, "overflow"},
      {BEYOND - 1, 1, BEYOND - 1, 1, 0, RP_ERROR_SHAPE, "overflow"}, /* at once */
  };
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    CHECK_INT(shaw(bad[i].b, bad[i].h, bad[i].n, bad[i].d, bad[i].k), bad[i].status);
    CHECK_TEXT(rp_last_error(), bad[i].sentence);
  }
  for (int missing = 0; missing < 4; missing++) {
    static const char *const names[] = {"q is NULL", "keys is NULL", "values is NULL",
                                        "out is NULL"};
    CHECK_INT(rp_shaw_attention(B, H, N, D, 1, 0, missing == 0 ? NULL : q_data,
                                missing == 1 ? NULL : q_data, missing == 2 ? NULL : q_data,
                                key_table, value_table, missing == 3 ? NULL : out_data),
              RP_ERROR_ARGUMENT);
    CHECK_TEXT(rp_last_error(), names[missing]);
  }
  static const char *const shared[] = {"out shares memory with q;", "out shares memory with keys;",
                                       "out shares memory with values;"};
  static rp_real own[B * H * N * D];
  for (int i = 0; i < 3; i++) {
    CHECK_INT(rp_shaw_attention(B, H, N, D, 1, 0, i == 0 ? own : q_data, i == 1 ? own : q_data,
                                i == 2 ? own : q_data, key_table, value_table, own),
              RP_ERROR_ARGUMENT);
    CHECK_TEXT(rp_last_error(), shared[i]);
  }
}

/* ---- memory runs out ---------------------------------------------------------------- */

typedef struct ledger {
  int64_t calls, fail_at, held;
} ledger;

static void *allocate(void *context, size_t bytes) {
  ledger *const l = context;
  if (l->calls++ == l->fail_at) return NULL;
  const size_t rounded = (bytes / RPI_ALIGN + 1) * RPI_ALIGN;
  void *const memory = aligned_alloc(RPI_ALIGN, rounded);
  l->held += memory != NULL;
  return memory;
}

static void release(void *context, void *memory) {
  ledger *const l = context;
  l->held -= memory != NULL;
  free(memory);
}

/* Every allocation of a call fails in turn, until one call meets no failure; what may be
 * refused must come back, and the call after that must succeed. */
static void test_memory(void) {
  for (int64_t fail_at = 0;; fail_at++) {
    ledger l = {.fail_at = fail_at};
    const rpi_allocator allocator = {allocate, release, &l};
    rpi_set_allocator(&allocator);
    const rp_status status = shaw(B, H, N, D, 1);
    const bool failed = l.calls > fail_at;
    CHECK_INT(status, failed ? RP_ERROR_MEMORY : RP_OK);
    if (failed) CHECK_TEXT(rp_last_error(), "attention: no memory for a workspace of");
    CHECK_INT(l.held, 0);
    rpi_set_allocator(NULL);
    if (!failed) {
      CHECK_INT(fail_at, l.calls);
      CHECK(l.calls >= 1);
      break;
    }
    if (!CHECK(fail_at < 100)) break;
  }
  CHECK_INT(shaw(B, H, N, D, 1), RP_OK);
}

/* The calls with a workspace allocate nothing. */
static void test_no_memory_needed(void) {
  ledger l = {.fail_at = 0};
  const rpi_allocator allocator = {allocate, release, &l};
  rpi_set_allocator(&allocator);
  const call c = valid();
  CHECK_INT(forward(&c), RP_OK);
  CHECK_INT(backward(&c), RP_OK);
  CHECK_INT(shaw(B, H, N, D, -1), RP_ERROR_ARGUMENT); /* nor does a refusal */
  CHECK_INT(l.calls, 0);
  rpi_set_allocator(NULL);
}

int main(void) {
  const int code = call_begin();
  if (code != 0) return code;
  test_valid();
  test_float_state();
  test_default();
  test_older_structs();
  test_struct();
  test_sizes();
  test_lengths();
  test_offsets();
  test_starts();
  test_numbers();
  test_ordinals();
  test_position_bias();
  test_missing_arrays();
  test_input_strides();
  test_output_strides();
  test_overlap();
  test_overlap_of_any_strides();
  test_workspace();
  test_empty();
  test_shaw();
  test_memory();
  test_no_memory_needed();
  return call_end();
}
