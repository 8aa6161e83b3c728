/* SPDX-License-Identifier: Apache-2.0
 *
 * ptx.h: PTX instructions as functions, each with its twin for the emulator (tests/emulator/
 * twins.cpp). Pointers and arrays go in: addresses of shared memory as numbers stay in here.
 */
#ifndef RPC_PTX_H
#define RPC_PTX_H

#include "gpu.h"

#ifdef __CUDACC__
#define PTX_SITE
#else
#define PTX_SITE , EMU_SITE
#endif

namespace rpc {

#ifdef __CUDACC__
__device__ inline uint32_t smem_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
#endif

/* d[16][8] += a[16][16] b[16][8]. With g = lane / 4, t = 2 (lane % 4), h the half of a register:
 *
 *   a[r] half h = A[g + 8 (r & 1)][t + 8 (r >> 1) + h]
 *   b[r] half h = B[t + 8 r + h][g]
 *   d[r]        = D[g + 8 (r >> 1)][t + (r & 1)]                                              */
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4],
                                const uint32_t (&b)[2] PTX_SITE) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emu::mma_m16n8k16(d, a, b, {"mma", file, line});
#endif
}

/* Four 8 x 8 matrices; lane i names row i % 8 of matrix i / 8, 16 bytes that are aligned to 16.
 * r[q] half h of lane i = M_q[i / 4][2 (i % 4) + h]; of _trans that of M_q transposed. */
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const bf16 *row PTX_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address(row))
               : "memory");
#else
  emu::ldmatrix(r, 4, false, row, {"ldmatrix", file, line});
#endif
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const bf16 *row PTX_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address(row))
               : "memory");
#else
  emu::ldmatrix(r, 4, true, row, {"ldmatrix", file, line});
#endif
}

/* Two of them; lanes 0 to 15 name the rows, those of the others are not read. */
__device__ inline void ldmatrix_x2(uint32_t (&r)[2], const bf16 *row PTX_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_address(row))
               : "memory");
#else
  emu::ldmatrix(r, 2, false, row, {"ldmatrix", file, line});
#endif
}
__device__ inline void ldmatrix_x2_trans(uint32_t (&r)[2], const bf16 *row PTX_SITE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_address(row))
               : "memory");
#else
  emu::ldmatrix(r, 2, true, row, {"ldmatrix", file, line});
#endif
}

/* 16 bytes from global to shared memory, or 16 zero bytes where not valid (`from` is then not
 * read). They are there after a cp_async_wait that covers their group, for the thread that asked;
 * for the others after a barrier behind it. */
__device__ inline void cp_async16(void *to, const void *from, bool valid PTX_SITE) {
#ifdef __CUDACC__
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(to)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
#else
  emu::cp_async(to, from, 16, valid, {"cp.async", file, line});
#endif
}
__device__ inline void cp_async_commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emu::cp_async_commit();
#endif
}

/* Waits until at most `pending` groups are in flight. */
template <int pending>
__device__ inline void cp_async_wait() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
  emu::cp_async_wait(pending);
#endif
}

/* The second-level cache is to have the 128 bytes of global memory that p lies in. */
__device__ inline void prefetch_line(const void *p) {
#ifdef __CUDACC__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
  (void)p;
#endif
}

/* Two numbers rounded to bf16, `low` in the lower half. */
__device__ inline uint32_t pack_bf16(float low, float high) {
#ifdef __CUDACC__
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return static_cast<uint32_t>(bf16(low).__x) | static_cast<uint32_t>(bf16(high).__x) << 16;
#endif
}

/* 2^x, to 2 units in the last place; results below the least normal number are 0. */
__device__ inline float exp2_approx(float x) {
#ifdef __CUDACC__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  const float result = std::exp2(x);
  return result < 0x1p-126f ? 0.0f : result;
#endif
}

/* ---- between blocks ------------------------------------------------------------ */

/* A block's own number, by one of its threads: those with lower ones have begun. */
__device__ inline int32_t draw_number(int32_t *numbers) {
#ifdef __CUDACC__
  return atomicAdd(numbers, 1);
#else
  return emu::draw_number(numbers);
#endif
}

/* Four numbers of global memory, aligned to 16 bytes, that blocks of one launch share: x takes
 * their place, or is added to them where they lie, in the order in which blocks come by turns
 * (below). Subnormals count as 0 in such a sum. */
__device__ inline void put_four(float *to, const float (&x)[4]) {
#ifdef __CUDACC__
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
#else
  emu::shared_four(to, x, false);
#endif
}
__device__ inline void add_four(float *to, const float (&x)[4]) {
#ifndef __CUDACC__
  emu::shared_four(to, x, true);
#elif __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; i++) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + i), "f"(x[i]) : "memory");
  }
#endif
}
__device__ inline void get_four(float (&x)[4], const float *from) {
#ifdef __CUDACC__
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "l"(from)
               : "memory");
#else
  emu::get_four(x, from);
#endif
}

/* The number at `turn`, to be asked for long before it is wanted. */
__device__ inline int32_t look_at_turn(const int32_t *turn) {
#ifdef __CUDACC__
  int32_t now;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  return now;
#else
  return emu::look_at_turn(turn);
#endif
}

/* Waits until the number at `turn`, which was `now`, is `own`. Sums that others have added before
 * they put it there lie in the second-level cache then, where those that are added now come behind
 * them: that a GPU sends no addition off before it knows how the loop ends is its hardware's doing,
 * PTX's memory model promises it of a fence alone. To read the sums takes read_after_turn too. */
__device__ inline void await_turn(const int32_t *turn, int32_t own, int32_t now) {
#ifdef __CUDACC__
  while (now != own) now = look_at_turn(turn);
#else
  emu::await_turn(turn, own, now);
#endif
}
__device__ inline void read_after_turn() {
#ifdef __CUDACC__
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

/* Puts the number of the next one there, behind all that the thread has written or knows of. */
__device__ inline void pass_turn(int32_t *turn, int32_t next) {
#ifdef __CUDACC__
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(turn), "r"(next) : "memory");
#else
  emu::pass_turn(turn, next);
#endif
}

}  // namespace rpc

#endif
