// Sixteen floats at a time with AVX-512 (F, BW, DQ, VL, BF16, VNNI).

#pragma once

#include <immintrin.h>

#include "model.h"

namespace headrace::KERNELS_OF {

using F16 = __m512;

inline F16 zero() { return _mm512_setzero_ps(); }
inline F16 set1(float x) { return _mm512_set1_ps(x); }
inline F16 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x); }
inline F16 load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store(bf16* p, F16 x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
}
inline __mmask16 first(int n) { return (__mmask16)((1u << n) - 1); }
inline F16 load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store_first(float* p, F16 x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline F16 load_first(const bf16* p, int n) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store_first(bf16* p, F16 x, int n) {
  _mm256_mask_storeu_epi16(p, first(n), (__m256i)_mm512_cvtneps_pbh(x));
}
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
// Of a number and a NaN, the second argument: max(x, NaN) is NaN, max(NaN, x) is x.
inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
inline F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
inline float sum(F16 x) { return _mm512_reduce_add_ps(x); }
inline float largest(F16 x) { return _mm512_reduce_max_ps(x); }
inline F16 absolute(F16 x) { return _mm512_abs_ps(x); }
inline F16 nearest(F16 x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x times 2 to the power of n, which is a whole number.
inline F16 times_power(F16 x, F16 n) { return _mm512_scalef_ps(x, n); }
inline bool has_nan(F16 x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
inline bool any_above(F16 x, F16 y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ) != 0; }
// x = m 2^n with m in [0.75, 1.5), for positive normal numbers.
inline void split(F16 x, F16& m, F16& n) {
  m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_zero);
  n = _mm512_getexp_ps(div(x, m));
}
// Where lane + from <= last: a; elsewhere: b.
inline F16 choose_upto(int from, int last, F16 a, F16 b) {
  const int n = last - from + 1;
  return _mm512_mask_blend_ps(n >= 16 ? 0xFFFF : n <= 0 ? 0 : first(n), b, a);
}
// The whole numbers in x, which lie in -127 .. 127, plus 128.
inline void store_shifted_bytes(uint8_t* p, F16 x) {
  const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(128));
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(whole));
}

// Sixteen random words in 31 bits, as floats: the hash of gumbel_noise for tokens first .. first + 15.
inline F16 hashed(uint32_t first, uint32_t key_a, uint32_t key_b) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i x = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x9E3779B1));
  x = _mm512_add_epi32(x, _mm512_set1_epi32(key_a));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x7FEB352D));
  x = _mm512_xor_si512(x, _mm512_set1_epi32(key_b));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(0x846CA68B));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  return _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(0x7FFFFFFF)));
}

// Products of a group of inputs, added up in each of sixteen outputs.
template <class Weight>
struct Dot;

template <>
struct Dot<float> {
  using Input = float;
  using Sums = __m512;
  using Vec = __m512;
  static constexpr int kGroup = 1;
  static Sums none() { return _mm512_setzero_ps(); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Sums dot(Sums sums, Vec a, Vec w) {
    asm("vfmadd231ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(w));
    return sums;
  }
};

template <>
struct Dot<bf16> {
  using Input = bf16;
  using Sums = __m512;
  using Vec = __m512i;
  static constexpr int kGroup = 2;
  static Sums none() { return _mm512_setzero_ps(); }
  static Vec load(const bf16* p) { return _mm512_loadu_si512(p); }
  static Vec broadcast(const bf16* p) { return _mm512_set1_epi32(*(const int32_t*)p); }
  // Written out, because GCC 12 copies the sums back and forth around the intrinsic.
  static Sums dot(Sums sums, Vec a, Vec w) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(w));
    return sums;
  }
};

template <>
struct Dot<int8_t> {
  using Input = uint8_t;
  using Sums = __m512i;
  using Vec = __m512i;
  static constexpr int kGroup = 4;
  static Sums none() { return _mm512_setzero_si512(); }
  static Vec load(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Vec broadcast(const uint8_t* p) { return _mm512_set1_epi32(*(const int32_t*)p); }
  static Sums dot(Sums sums, Vec a, Vec w) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(w));
    return sums;
  }
  static Sums negative(const int32_t* p) {
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(p));
  }
  static F16 floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }
};

inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

// Sums that fit into the registers beside what they are made of.
constexpr int kMaxTileRows = 12;

}  // namespace headrace::KERNELS_OF
