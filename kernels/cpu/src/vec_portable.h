// Sixteen floats at a time in the compiler's own vectors, for whatever machine it compiles for.

#pragma once

#include <cmath>
#include <cstring>

#include "model.h"

namespace headrace::KERNELS_OF {

using F16 = float __attribute__((vector_size(64)));
using I16 = int32_t __attribute__((vector_size(64)));
using U16 = uint32_t __attribute__((vector_size(64)));
using H16 = uint16_t __attribute__((vector_size(32)));

template <class To, class From>
inline To as(const From* p) {
  To x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline F16 zero() { return F16{}; }
inline F16 set1(float x) { return F16{} + x; }
inline F16 load(const float* p) { return as<F16>(p); }
inline void store(float* p, F16 x) { std::memcpy(p, &x, sizeof x); }
inline F16 load(const bf16* p) {
  return (F16)(__builtin_convertvector(as<H16>(p), U16) << 16);
}
inline void store(bf16* p, F16 x) {
  const U16 bits = (U16)x;
  const U16 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  // A NaN must not be rounded to infinity.
  const U16 kept = (U16)(x == x);
  const H16 narrow = __builtin_convertvector((rounded & kept) | (0x7FC0 & ~kept), H16);
  std::memcpy(p, &narrow, sizeof narrow);
}
template <class T>
inline F16 load_first(const T* p, int n) {
  T padded[16] = {};
  std::memcpy(padded, p, n * sizeof(T));
  return load(padded);
}
template <class T>
inline void store_first(T* p, F16 x, int n) {
  T padded[16];
  store(padded, x);
  std::memcpy(p, padded, n * sizeof(T));
}
inline F16 add(F16 a, F16 b) { return a + b; }
inline F16 sub(F16 a, F16 b) { return a - b; }
inline F16 mul(F16 a, F16 b) { return a * b; }
inline F16 div(F16 a, F16 b) { return a / b; }
inline F16 fma(F16 a, F16 b, F16 c) { return a * b + c; }
// Of a number and a NaN, the second argument: max(x, NaN) is NaN, max(NaN, x) is x.
inline F16 max(F16 a, F16 b) { return a > b ? a : b; }
inline F16 min(F16 a, F16 b) { return a < b ? a : b; }
inline float sum(F16 x) {
  float total = 0;
  for (int i = 0; i < 16; ++i) total += x[i];
  return total;
}
inline float largest(F16 x) {
  float most = x[0];
  for (int i = 1; i < 16; ++i) most = x[i] > most ? x[i] : most;
  return most;
}
inline F16 absolute(F16 x) { return (F16)((U16)x & 0x7FFFFFFF); }
inline F16 nearest(F16 x) {
  // Adding 1.5 x 2^23 leaves no room for digits behind the point.
  const F16 shift = set1(12582912.0f);
  const F16 whole = (x + shift) - shift;
  return absolute(x) < 4194304.0f ? whole : x;
}
// x times 2 to the power of n, which is a whole number.
inline F16 times_power(F16 x, F16 n) {
  // In two factors, so that neither leaves the range of normal numbers.
  const F16 bound = max(set1(-250.0f), min(set1(250.0f), n));
  const I16 whole = __builtin_convertvector(bound == bound ? bound : F16{}, I16);
  const I16 half = whole >> 1;
  return x * (F16)((half + 127) << 23) * (F16)((whole - half + 127) << 23);
}
inline bool has_nan(F16 x) {
  for (int i = 0; i < 16; ++i)
    if (x[i] != x[i]) return true;
  return false;
}
inline bool any_above(F16 x, F16 y) {
  for (int i = 0; i < 16; ++i)
    if (x[i] > y[i]) return true;
  return false;
}
// x = m 2^n with m in [0.75, 1.5), for positive normal numbers.
inline void split(F16 x, F16& m, F16& n) {
  const I16 exponent = ((I16)x - 0x3F400000) >> 23;
  m = (F16)((I16)x - (exponent << 23));
  n = __builtin_convertvector(exponent, F16);
}
// Where lane + from <= last: a; elsewhere: b.
inline F16 choose_upto(int from, int last, F16 a, F16 b) {
  for (int i = 0; i < 16; ++i) a[i] = i + from <= last ? a[i] : b[i];
  return a;
}
// The whole numbers in x, which lie in -127 .. 127, plus 128.
inline void store_shifted_bytes(uint8_t* p, F16 x) {
  for (int i = 0; i < 16; ++i) p[i] = (uint8_t)((int)x[i] + 128);
}

// Sixteen random words in 31 bits, as floats: the hash of gumbel_noise for tokens first .. first + 15.
inline F16 hashed(uint32_t first, uint32_t key_a, uint32_t key_b) {
  const U16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  U16 x = (lane + first) * 0x9E3779B1u + key_a;
  x ^= x >> 16;
  x = (x * 0x7FEB352Du) ^ key_b;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return __builtin_convertvector((I16)(x & 0x7FFFFFFFu), F16);
}

// Products of a group of inputs, added up in each of sixteen outputs.
template <class Weight>
struct Dot;

template <>
struct Dot<float> {
  using Input = float;
  using Sums = F16;
  using Vec = F16;
  static constexpr int kGroup = 1;
  static Sums none() { return F16{}; }
  static Vec load(const float* p) { return as<F16>(p); }
  static Vec broadcast(const float* p) { return set1(*p); }
  static Sums dot(Sums sums, Vec a, Vec w) { return a * w + sums; }
};

template <>
struct Dot<bf16> {
  using Input = bf16;
  using Sums = F16;
  using Vec = U16;
  static constexpr int kGroup = 2;
  static Sums none() { return F16{}; }
  static Vec load(const bf16* p) { return as<U16>(p); }
  static Vec broadcast(const bf16* p) { return U16{} + as<uint32_t>(p); }
  static Sums dot(Sums sums, Vec a, Vec w) {
    const F16 low = (F16)(a << 16) * (F16)(w << 16);
    return sums + ((F16)(a & 0xFFFF0000u) * (F16)(w & 0xFFFF0000u) + low);
  }
};

template <>
struct Dot<int8_t> {
  using Input = uint8_t;
  using Sums = I16;
  using Vec = I16;
  static constexpr int kGroup = 4;
  static Sums none() { return I16{}; }
  static Vec load(const int8_t* p) { return as<I16>(p); }
  static Vec broadcast(const uint8_t* p) { return I16{} + as<int32_t>(p); }
  static Sums dot(Sums sums, Vec a, Vec w) {
    sums += (a & 255) * ((w << 24) >> 24);
    sums += ((a >> 8) & 255) * ((w << 16) >> 24);
    sums += ((a >> 16) & 255) * ((w << 8) >> 24);
    return sums + ((a >> 24) & 255) * (w >> 24);
  }
  static Sums negative(const int32_t* p) { return -as<I16>(p); }
  static F16 floats(Sums sums) { return __builtin_convertvector(sums, F16); }
};

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Sums that fit into the registers beside what they are made of.
constexpr int kMaxTileRows = 4;

}  // namespace headrace::KERNELS_OF
