// Chooses a token per row of scores. Rows are independent; see kernels/reference/sample.py.
//
//   t = (score - best) / temperature
//   keep the likeliest by top_k, then top_p, then min_p, equals of the last one included
//   the largest of t + noise(key, token), the first of equals
//
// Bytes moved: the scores once for a greedy row, three times for a drawn one.

namespace headrace::KERNELS_OF {

// ln x of positive normal numbers, within 1e-7 of its value (absolute near 1, relative elsewhere).
// x = m 2^n, and ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = (m - 1) / (m + 1), |s| <= 0.2.
inline F16 log(F16 x) {
  F16 m, n;
  split(x, m, n);
  const F16 s = div(sub(m, set1(1.0f)), add(m, set1(1.0f)));
  const F16 z = mul(s, s);
  F16 p = set1(2.0f / 11);
  p = fma(p, z, set1(2.0f / 9));
  p = fma(p, z, set1(2.0f / 7));
  p = fma(p, z, set1(2.0f / 5));
  p = fma(p, z, set1(2.0f / 3));
  p = fma(p, z, set1(2.0f));
  return fma(n, set1(0.693147180559945f), mul(p, s));
}

inline uint32_t mixed(uint32_t word) {
  word = (word ^ word >> 16) * 0x7FEB352Du;
  word = (word ^ word >> 15) * 0x846CA68Bu;
  return word ^ word >> 16;
}

// The two words that name a draw; see kernels/reference/gumbel_noise.py.
inline std::pair<uint32_t, uint32_t> noise_key(int64_t seed, int64_t choice, int64_t position) {
  constexpr uint32_t kStride = 0x9E3779B1u;
  uint32_t a = (uint32_t)seed, b = (uint32_t)(seed >> 32);
  for (const uint32_t word : {(uint32_t)choice, (uint32_t)position, 0x52u, 0x1Du}) {
    a = mixed(a + word * kStride);
    b = mixed((b ^ a) + kStride);
  }
  return {a, b};
}

// The noise of tokens first .. first + 15: -ln E, E = -ln(1 - u), u = (hash + 1/2) / 2^31.
inline F16 noise(uint32_t first, uint32_t key_a, uint32_t key_b) {
  F16 u = mul(add(hashed(first, key_a, key_b), set1(0.5f)), set1(0x1p-31f));
  u = min(u, set1(1 - 0x1p-24f));
  // ln(1 - u) loses the digits of a small u; what 1 - u was rounded by is made good by the factor.
  const F16 rest = sub(set1(1.0f), u);
  const F16 taken = sub(set1(1.0f), rest);
  const F16 is_small = sub(set1(0x1p-25f), u);  // above zero: rest is 1, and E is u
  F16 e = mul(log(rest), div(u, max(taken, set1(0x1p-24f))));
  e = sub(zero(), e);
  if (any_above(is_small, zero())) {
    float a[16], b[16], c[16];
    store(a, e);
    store(b, u);
    store(c, is_small);
    for (int i = 0; i < 16; ++i) a[i] = c[i] >= 0 ? b[i] : a[i];
    e = load(a);
  }
  return sub(zero(), log(e));
}

// Sixteen scores, -inf behind the end.
inline F16 scores_at(const float* scores, int64_t i, int64_t size) {
  if (i + 16 <= size) return load(scores + i);
  float padded[16];
  for (int j = 0; j < 16; ++j) padded[j] = i + j < size ? scores[i + j] : -INFINITY;
  return load(padded);
}

inline int64_t find_first(const float* scores, int64_t size, float value) {
  const F16 below = set1(value);
  int64_t i = 0;
  for (; i + 16 <= size && !any_above(load(scores + i), below); i += 16) {
    float x[16];
    store(x, sub(load(scores + i), below));
    for (int j = 0; j < 16; ++j)
      if (x[j] == 0) return i + j;
  }
  for (; i < size; ++i)
    if (scores[i] == value) return i;
  return 0;
}

// The largest score, or NaN if there is any.
inline float best_score(const float* scores, int64_t size) {
  F16 most = set1(-INFINITY);
  bool is_broken = false;
  for (int64_t i = 0; i < size; i += 16) {
    const F16 x = scores_at(scores, i, size);
    is_broken = is_broken || has_nan(x);
    most = max(most, x);
  }
  return is_broken ? NAN : largest(most);
}

// The smallest weight that is kept of weights e^t, whose largest is 1 and whose sum is `total`.
inline float least_weight(const std::vector<float>& weights, double total, int64_t top_k,
                          float top_p, float min_p) {
  const int64_t size = (int64_t)weights.size();
  const bool has_top_k = top_k < size;
  if (!has_top_k && top_p >= 1) return min_p;
  // Weights by powers of two, in quarters: how many there are, and how much, above each level.
  constexpr int kLevels = 512;
  std::array<int64_t, kLevels> counts{};
  std::array<double, kLevels> masses{};
  const auto level = [](float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return std::min(kLevels - 1, std::max(0, (int)((0x3F800000u - bits) >> 21)));
  };
  for (const float weight : weights) {
    const int own = level(weight);
    counts[own] += 1;
    masses[own] += weight;
  }
  // The first level that holds all that may be kept. With a top_k, equals of its last one too.
  int64_t count = 0;
  double mass = 0;
  int last = 0;
  for (; last < kLevels - 1; ++last) {
    count += counts[last];
    mass += masses[last];
    if (has_top_k ? count >= top_k : mass >= top_p * total) break;
  }
  std::vector<float> likely;
  for (const float weight : weights)
    if (level(weight) <= last) likely.push_back(weight);
  std::sort(likely.begin(), likely.end(), std::greater<>());
  int64_t kept = (int64_t)likely.size();
  if (has_top_k) {
    const float kth = likely[std::min<int64_t>(top_k, kept) - 1];
    kept = std::upper_bound(likely.begin(), likely.end(), kth, std::greater<>()) - likely.begin();
    total = 0;
    for (int64_t i = 0; i < kept; ++i) total += likely[i];
  }
  float least = likely[kept - 1];
  if (top_p < 1) {
    // In float32, as top_p itself is: 0.4 of (0.4, 0.3 ...) keeps one.
    float before = 0;
    for (int64_t i = 0; i < kept && before < top_p; ++i) {
      least = likely[i];
      before += (float)(likely[i] / total);
    }
    // A top_p of 0 keeps the likeliest.
    if (top_p <= 0) least = likely[0];
  }
  return std::max(least, min_p);
}

inline int64_t draw(const float* scores, int64_t size, float best, int row, const Choices& choices,
                    std::vector<float>& weights) {
  const F16 top = set1(best), temperature = set1(choices.temperatures[row]);
  const auto tempered = [&](int64_t i) {
    return div(sub(scores_at(scores, i, size), top), temperature);
  };
  float least = 0;
  const int64_t top_k = choices.top_k[row] > 0 ? choices.top_k[row] : size;
  const bool is_cut = top_k < size || choices.top_p[row] < 1;
  if (is_cut || choices.min_p[row] > 0) {
    weights.resize((size + 15) / 16 * 16);
    double total = 0;
    for (int64_t i = 0; i < size; i += 16) {
      const F16 weight = exp(tempered(i));
      total += sum(weight);
      store(weights.data() + i, weight);
    }
    weights.resize(size);
    least = least_weight(weights, total, top_k, choices.top_p[row], choices.min_p[row]);
  }
  const auto [a, b] = noise_key(choices.seeds[row], choices.numbers[row], choices.positions[row]);
  const F16 bound = set1(least);
  float largest_sum = -INFINITY;
  int64_t token = 0;
  for (int64_t i = 0; i < size; i += 16) {
    const F16 t = tempered(i);
    const F16 sums = add(t, noise((uint32_t)i, a, b));
    if (!any_above(sums, set1(largest_sum))) continue;
    float sum_of[16], weight_of[16];
    store(sum_of, sums);
    store(weight_of, sub(exp(t), bound));
    for (int j = 0; j < 16 && i + j < size; ++j)
      if (sum_of[j] > largest_sum && (least == 0 || weight_of[j] >= 0)) {
        largest_sum = sum_of[j];
        token = i + j;
      }
  }
  return token;
}

inline void sample_rows(Worker& worker, const float* scores, int num_rows, int64_t size,
                        const Choices& choices, int64_t* token_ids) {
  std::vector<float> weights;
  worker.share(num_rows, [&](int row) {
    const float* own = scores + row * size;
    const float best = best_score(own, size);
    if (!std::isfinite(best))
      token_ids[row] = -1;
    else if (choices.temperatures[row] == 0)
      token_ids[row] = find_first(own, size, best);
    else
      token_ids[row] = draw(own, size, best, row, choices, weights);
  });
}

}  // namespace headrace::KERNELS_OF
