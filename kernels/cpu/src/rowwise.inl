// What is done to single numbers and to single rows. Rows of the decoder's own buffers are padded
// to a multiple of 32 numbers, and what is beyond their length is zero.

namespace headrace::KERNELS_OF {

// e^x within 2e-7 of its value, relative; 0 below -104, infinite above 89, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, and a Taylor polynomial of e^r (degree 6 errs 1.3e-7 there).
inline F16 exp(F16 x) {
  // The order of arguments keeps a NaN.
  x = max(set1(-104.0f), min(set1(89.0f), x));
  const F16 n = nearest(mul(x, set1(1.44269504088896341f)));
  F16 r = fma(n, set1(-0.693145751953125f), x);
  r = fma(n, set1(-1.42860682030941723e-6f), r);
  F16 p = set1(1.0f / 720);
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return times_power(p, n);
}

// 1 - 2 / (e^2x + 1): the infinities and zeros of exp give 1 and -1.
inline F16 tanh(F16 x) {
  const F16 e = exp(add(x, x));
  return sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
}

inline F16 silu(F16 x) {
  return div(x, add(set1(1.0f), exp(sub(zero(), x))));
}

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
inline F16 gelu(F16 x) {
  const F16 inner = mul(set1(0.797884560802865356f), fma(mul(mul(x, x), x), set1(0.044715f), x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

inline F16 squeezed(F16 x, float cap) {
  return mul(set1(cap), tanh(div(x, set1(cap))));
}

// Two vectors of a row of `size` numbers, as far as they lie in it.
inline void put_first(float* row, int64_t place, int64_t size, F16 low, F16 high) {
  if (place + 32 <= size) {
    store(row + place, low);
    store(row + place + 16, high);
    return;
  }
  if (place < size) store_first(row + place, low, (int)std::min<int64_t>(16, size - place));
  place += 16;
  if (place < size) store_first(row + place, high, (int)std::min<int64_t>(16, size - place));
}

inline int padded(int n) { return (n + kPanel - 1) / kPanel * kPanel; }

// 1 / sqrt(mean(x^2) + eps) of a padded row.
inline float inverse_rms(const float* x, int size, float eps) {
  F16 squares = zero();
  for (int i = 0; i < padded(size); i += 16) {
    const F16 v = load(x + i);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / size + eps);
}

// y = x / rms(x) * weight for a padded row; the weight is padded too.
template <class T>
inline void rms_norm(const float* x, const float* weight, T* y, int size, float eps) {
  const F16 scale = set1(inverse_rms(x, size, eps));
  for (int i = 0; i < padded(size); i += 16)
    store(y + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// x = q scale with whole q in -127 .. 127, kept as q + 128; 64 numbers share a scale, which is NaN
// if one of them is, or is infinite.
template <class T>
inline void quantise(const T* x, uint8_t* q, float* scales, int size) {
  for (int first = 0; first < padded(size); first += kScaled, ++scales) {
    const int end = std::min(first + kScaled, padded(size));
    F16 most = zero(), nil = zero();
    for (int i = first; i < end; i += 16) {
      const F16 v = load(x + i);
      most = max(most, absolute(v));
      nil = add(nil, sub(v, v));
    }
    const float bound = largest(most);
    const bool is_number = sum(nil) == 0;
    const F16 inverse = set1(bound > 0 ? 127.0f / bound : 0.0f);
    for (int i = first; i < end; i += 16)
      store_shifted_bytes(q + i, is_number ? nearest(mul(load(x + i), inverse)) : zero());
    *scales = is_number ? bound / 127 : NAN;
  }
}

}  // namespace headrace::KERNELS_OF
