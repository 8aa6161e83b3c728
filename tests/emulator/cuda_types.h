/* SPDX-License-Identifier: Apache-2.0
 *
 * cuda_types.h: the words, vectors, bf16 and arithmetic of CUDA that C++ lacks.
 */
#ifndef EMU_CUDA_TYPES_H
#define EMU_CUDA_TYPES_H

#include <cmath>
#include <cstdint>
#include <cstring>

/* __noinline__ is not here: libstdc++ uses the word. */
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static /* one copy for the process: blocks run one at a time */

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

/* Aligned as CUDA's: to their own size, at most 16 bytes. */
#define EMU_VECTORS(T, N)                                                                          \
  struct alignas(2 * sizeof(T)) N##2 { T x, y; };                                                  \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) N##4 { T x, y, z, w; };                  \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }                                             \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(float, float)
EMU_VECTORS(double, double)
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned, uint)
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(long long, longlong)
#undef EMU_VECTORS

/* ---- bf16, rounded to nearest, ties to even --------------------------------- */

struct alignas(2) __nv_bfloat16 {
  uint16_t __x;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    __x = nan ? uint16_t{0x7fff} : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t u = static_cast<uint32_t>(__x) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 b) { return b; }
inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.__x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
  __nv_bfloat16 b;
  b.__x = u;
  return b;
}

/* ---- arithmetic that libm lacks --------------------------------------------- */

namespace emu {
template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace emu

inline unsigned __float_as_uint(float x) { return emu::bits<unsigned>(x); }
inline int __float_as_int(float x) { return emu::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emu::bits<float>(x); }
inline float __int_as_float(int x) { return emu::bits<float>(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x != 0 ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
template <class T>
inline T __ldg(const T *p) {
  return *p;
}

#define EMU_MIN_MAX(T)                                                                             \
  inline T max(T a, T b) { return a > b ? a : b; }                                                 \
  inline T min(T a, T b) { return a < b ? a : b; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }

#endif
