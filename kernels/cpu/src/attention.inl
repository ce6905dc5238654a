// Attention of one step over a KV cache that lies in blocks, and storing into it.
//
// A block of one head is block_size x head_dim numbers. Where block_size is a multiple of 16, they
// lie as products want them, in runs of 16 tokens:
//
//   keys    [head_dim / group][16 tokens][group]       group: 1 float32, 2 bfloat16
//   values  [16 tokens / group][head_dim][group]
//
// so that sixteen scores, or sixteen dimensions of the result, come out of plain products, without
// sums across a register. Other block sizes lie as [tokens][head_dim] and are rearranged on the way.
//
// The context is taken in tiles of 64 keys, whose places are multiples of 64, with a running
// maximum m, sum l and result (online softmax); the tiles of each 512 keys by themselves, and then
// these parts one after another. All of that depends on positions alone. So a row's result does not
// depend, to the last bit, on what is computed beside it, on how its prompt was cut into chunks, or
// on whether parts were computed by several threads (split-KV).
//
// Places beyond a row's context are masked, not skipped: they must hold finite numbers.

namespace headrace::KERNELS_OF {

constexpr int kTileKeys = 64;
constexpr int kPartKeys = 512;
constexpr int kMaxHeadDim = 1024;
constexpr int kRun = 16;          // tokens that lie together
constexpr int kMaxTileQueries = kMaxTileRows / 2;
constexpr int kBlockQueries = 48;  // rows that share one way through the context
// Below every score, and finite, so that differences are numbers.
constexpr float kNoScore = -1e30f;

template <class T>
constexpr int kGroupOf = Dot<T>::kGroup;

inline bool is_in_runs(const Cache& cache) { return cache.block_size % kRun == 0; }

// Where a number of a key or value lies in its block.
template <class T>
inline int64_t key_place(const Cache& cache, int head_dim, int token, int dim) {
  constexpr int kGroup = kGroupOf<T>;
  if (!is_in_runs(cache)) return (int64_t)token * head_dim + dim;
  return (int64_t)(token / kRun) * kRun * head_dim + (int64_t)(dim / kGroup) * kRun * kGroup +
         (token % kRun) * kGroup + dim % kGroup;
}

template <class T>
inline int64_t value_place(const Cache& cache, int head_dim, int token, int dim) {
  constexpr int kGroup = kGroupOf<T>;
  if (!is_in_runs(cache)) return (int64_t)token * head_dim + dim;
  return (int64_t)(token / kGroup) * head_dim * kGroup + (int64_t)dim * kGroup + token % kGroup;
}

// One head of a token: normalised if the model does so, then turned. y may be x.
//   [a, b] -> [a cos - b sin, b cos + a sin]
inline void turn(const float* x, float* y, const float* norm, float eps, const float* cos,
                 const float* sin, int head_dim) {
  const int half = head_dim / 2;
  float scale = 1;
  if (norm != nullptr) {
    float squares = 0;
    for (int i = 0; i < head_dim; ++i) squares += x[i] * x[i];
    scale = 1.0f / std::sqrt(squares / head_dim + eps);
  }
  for (int i = 0; i < half; i += 16) {
    const int n = std::min(16, half - i);
    F16 a = n == 16 ? load(x + i) : load_first(x + i, n);
    F16 b = n == 16 ? load(x + half + i) : load_first(x + half + i, n);
    if (norm != nullptr) {
      a = mul(mul(a, set1(scale)), load_first(norm + i, n));
      b = mul(mul(b, set1(scale)), load_first(norm + half + i, n));
    }
    F16 turned_a = a, turned_b = b;
    if (cos != nullptr) {
      const F16 c = load_first(cos + i, n), s = load_first(sin + i, n);
      turned_a = sub(mul(a, c), mul(b, s));
      turned_b = fma(b, c, mul(a, s));
    }
    if (n == 16) {
      store(y + i, turned_a);
      store(y + half + i, turned_b);
    } else {
      store_first(y + i, turned_a, n);
      store_first(y + half + i, turned_b, n);
    }
  }
}

// Numbers in a row, rounded to T.
template <class T>
inline void round_row(const float* x, T* y, int count) {
  int i = 0;
  for (; i + 16 <= count; i += 16) store(y + i, load(x + i));
  if (i < count) store_first(y + i, load_first(x + i, count - i), count - i);
}

// What attention needs of a layer and of the step.
struct Heads {
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  float eps = 0;

  int group() const { return num_heads / num_kv_heads; }
  // Rows that share one way through the context: all heads of a group, of some tokens.
  int block_queries() const { return std::max(kBlockQueries, group()); }
};

// One token: turn its heads, put queries into `queries` and keys and values into their slot.
// `qkv` is [num_heads + 2 x num_kv_heads, head_dim].
template <class T>
void rope_store(const Heads& heads, const Layer& layer, const Rope* rope, const float* qkv,
                int64_t position, int64_t slot, T* queries, T* cache_of_layer, const Cache& cache) {
  const int dim = heads.head_dim;
  float turned[kMaxHeadDim];
  T rounded[kMaxHeadDim];
  const float* cos = rope == nullptr ? nullptr : rope->cos + position * (dim / 2);
  const float* sin = rope == nullptr ? nullptr : rope->sin + position * (dim / 2);
  for (int h = 0; h < heads.num_heads; ++h) {
    turn(qkv + h * dim, turned, layer.query_norm, heads.eps, cos, sin, dim);
    round_row(turned, queries + h * dim, dim);
  }
  const int64_t block = slot / cache.block_size;
  const int token = (int)(slot % cache.block_size);
  T* keys = cache_of_layer + block * cache.block_size * dim;
  T* values = keys + heads.num_kv_heads * cache.head_stride;
  for (int h = 0; h < heads.num_kv_heads; ++h) {
    turn(qkv + (heads.num_heads + h) * dim, turned, layer.key_norm, heads.eps, cos, sin, dim);
    round_row(turned, rounded, dim);
    T* to = keys + h * cache.head_stride;
    for (int i = 0; i < dim; ++i) to[key_place<T>(cache, dim, token, i)] = rounded[i];
    round_row(qkv + (heads.num_heads + heads.num_kv_heads + h) * dim, rounded, dim);
    to = values + h * cache.head_stride;
    for (int i = 0; i < dim; ++i) to[value_place<T>(cache, dim, token, i)] = rounded[i];
  }
}

// Some queries of one KV head: m and l of each, and their results [queries, head_dim].
struct Softmax {
  float* m;
  float* l;
  float* out;

  void clear(int num_queries, int head_dim) {
    std::fill(m, m + num_queries, kNoScore);
    std::fill(l, l + num_queries, 0.0f);
    std::fill(out, out + (int64_t)num_queries * head_dim, 0.0f);
  }

  // This, followed by another part of the context.
  void append(const Softmax& part, int num_queries, int head_dim) {
    for (int q = 0; q < num_queries; ++q) {
      const float most = m[q] > part.m[q] ? m[q] : part.m[q];
      float* a = out + (int64_t)q * head_dim;
      const float* b = part.out + (int64_t)q * head_dim;
      float factors[16] = {m[q] - most, part.m[q] - most};
      store(factors, exp(load(factors)));
      l[q] = l[q] * factors[0] + part.l[q] * factors[1];
      const F16 x = set1(factors[0]), y = set1(factors[1]);
      int i = 0;
      for (; i + 16 <= head_dim; i += 16)
        store(a + i, fma(load(a + i), x, mul(load(b + i), y)));
      if (i < head_dim) {
        const int rest = head_dim - i;
        store_first(a + i, fma(load_first(a + i, rest), x, mul(load_first(b + i, rest), y)), rest);
      }
      m[q] = most;
    }
  }
};

// 64 keys and values of one head, as pointers to their four runs of 16 tokens.
template <class T>
struct Tile {
  const T* keys[kTileKeys / kRun];
  const T* values[kTileKeys / kRun];
};

// Room for what a member computes on.
template <class T>
struct Scratch {
  std::vector<T> runs;
  std::vector<float> numbers;

  void reserve(const Heads& heads) {
    runs.assign((size_t)2 * kTileKeys * (heads.head_dim + 1), T{});
    // Two states of a block of queries, and the scores of a tile of them.
    numbers.resize((size_t)2 * heads.block_queries() * (heads.head_dim + 2) +
                   kMaxTileQueries * kTileKeys + 16);
  }
};

template <class T>
inline void find_tile(const Cache& cache, const T* keys, const T* values, const int32_t* table,
                      int first_key, int num_keys, int head_dim, T* runs, Tile<T>& tile) {
  constexpr int kGroup = kGroupOf<T>;
  const int64_t block_numbers = (int64_t)cache.block_size * head_dim;
  const int num_runs = (num_keys + kRun - 1) / kRun;
  if (is_in_runs(cache)) {
    for (int r = 0; r < kTileKeys / kRun; ++r) {
      // A run beyond the context is masked: any finite numbers do.
      const int key = first_key + std::min(r, num_runs - 1) * kRun;
      const int64_t place = table[key / cache.block_size] * block_numbers +
                            (int64_t)(key % cache.block_size) * head_dim;
      tile.keys[r] = keys + place;
      tile.values[r] = values + place;
    }
    return;
  }
  T* value_runs = runs + (size_t)kTileKeys * head_dim;
  for (int t = 0; t < kTileKeys; ++t) {
    const int key = first_key + std::min(t, num_keys - 1);
    const int64_t place = table[key / cache.block_size] * block_numbers +
                          (int64_t)(key % cache.block_size) * head_dim;
    T* to_keys = runs + (size_t)(t / kRun) * kRun * head_dim;
    T* to_values = value_runs + (size_t)(t / kRun) * kRun * head_dim;
    for (int i = 0; i < head_dim; ++i) {
      to_keys[(i / kGroup) * kRun * kGroup + (t % kRun) * kGroup + i % kGroup] = keys[place + i];
      to_values[(size_t)(t % kRun / kGroup) * head_dim * kGroup + i * kGroup + t % kGroup] =
          values[place + i];
    }
  }
  for (int r = 0; r < kTileKeys / kRun; ++r) {
    tile.keys[r] = runs + (size_t)r * kRun * head_dim;
    tile.values[r] = value_runs + (size_t)r * kRun * head_dim;
  }
}

// scores[q][key] = queries[q] . keys[key]: 16 keys a vector, summed over dimensions in their order.
template <class T, int kQueries>
inline void score(const T* const* queries, const Tile<T>& tile, int head_dim, float* scores) {
  using D = Dot<T>;
  constexpr int kVecs = kTileKeys / kRun;
  typename D::Sums sums[kQueries * kVecs];
  unroll<kQueries * kVecs>([&](auto i) HEADRACE_INLINE { sums[i] = D::none(); });
  for (int d = 0; d < head_dim; d += D::kGroup) {
    typename D::Vec keys[kVecs];
    unroll<kVecs>([&](auto v) HEADRACE_INLINE {
      keys[v] = D::load(tile.keys[v] + (int64_t)d * kRun);
    });
    unroll<kQueries>([&](auto q) HEADRACE_INLINE {
      const typename D::Vec x = D::broadcast(queries[q] + d);
      unroll<kVecs>([&](auto v) HEADRACE_INLINE {
        sums[q * kVecs + v] = D::dot(sums[q * kVecs + v], x, keys[v]);
      });
    });
  }
  unroll<kQueries * kVecs>([&](auto i) HEADRACE_INLINE { store(scores + i * kRun, sums[i]); });
}

// out[q][dim] += weights[q] . values[dim] for 16 x kVecs dimensions.
template <class T, int kQueries, int kVecs>
inline void weigh(const T* weights, const Tile<T>& tile, int num_keys, int head_dim, int dim,
                  float* out) {
  using D = Dot<T>;
  typename D::Sums sums[kQueries * kVecs];
  const auto place = [&](auto i) HEADRACE_INLINE {
    return out + (int64_t)(i / kVecs) * head_dim + dim + i % kVecs * 16;
  };
  unroll<kQueries * kVecs>([&](auto i) HEADRACE_INLINE { sums[i] = load(place(i)); });
  for (int t = 0; t < num_keys; t += D::kGroup) {
    const T* row = tile.values[t / kRun] + (int64_t)(t % kRun) * head_dim + dim * D::kGroup;
    typename D::Vec values[kVecs];
    unroll<kVecs>([&](auto v) HEADRACE_INLINE { values[v] = D::load(row + v * 16 * D::kGroup); });
    unroll<kQueries>([&](auto q) HEADRACE_INLINE {
      const typename D::Vec x = D::broadcast(weights + q * kTileKeys + t);
      unroll<kVecs>([&](auto v) HEADRACE_INLINE {
        sums[q * kVecs + v] = D::dot(sums[q * kVecs + v], x, values[v]);
      });
    });
  }
  unroll<kQueries * kVecs>([&](auto i) HEADRACE_INLINE { store(place(i), sums[i]); });
}

// The last dimensions where head_dim is no multiple of 16; one query at a time.
template <class T>
inline void weigh_rest(const T* weights, const Tile<T>& tile, int num_keys, int head_dim, int dim,
                       float* out) {
  constexpr int kGroup = kGroupOf<T>;
  for (int i = dim; i < head_dim; ++i) {
    float total = out[i];
    for (int t = 0; t < num_keys; ++t) {
      const T* value = tile.values[t / kRun] + (int64_t)(t % kRun / kGroup) * kGroup * head_dim;
      float pair[2] = {0, 0};
      if constexpr (std::is_same_v<T, float>) {
        pair[0] = weights[t];
        pair[1] = value[i];
      } else {
        const uint32_t w = (uint32_t)weights[t] << 16;
        const uint32_t x = (uint32_t)value[i * kGroup + t % kGroup] << 16;
        std::memcpy(&pair[0], &w, 4);
        std::memcpy(&pair[1], &x, 4);
      }
      total += pair[0] * pair[1];
    }
    out[i] = total;
  }
}

// What one query may see of a tile: keys first .. last, counted from the tile's own first.
struct Sight {
  int first;
  int last;
};

// Up to six queries look at one tile. num_keys: those of the tile that any row of the step sees.
template <class T, int kQueries>
void look(const Layer& layer, const T* const* queries, const Sight* sights, const Tile<T>& tile,
          int num_keys, int head_dim, float* scores, Softmax state) {
  constexpr int kVecs = kTileKeys / kRun;
  score<T, kQueries>(queries, tile, head_dim, scores);
  T weights[kQueries * kTileKeys];
  for (int q = 0; q < kQueries; ++q) {
    F16 x[kVecs];
    const F16 hidden = set1(-INFINITY);
    F16 most = set1(kNoScore);
    const Sight sight = sights[q];
    for (int v = 0; v < kVecs; ++v) {
      x[v] = mul(load(scores + q * kTileKeys + v * kRun), set1(layer.scale));
      if (layer.soft_cap != 0) x[v] = squeezed(x[v], layer.soft_cap);
      if (sight.last < kTileKeys - 1) x[v] = choose_upto(v * kRun, sight.last, x[v], hidden);
      if (sight.first > 0) x[v] = choose_upto(v * kRun, sight.first - 1, hidden, x[v]);
      most = max(most, x[v]);
    }
    const float before = state.m[q];
    const float m = std::max(before, largest(most));
    F16 total = zero();
    for (int v = 0; v < kVecs; ++v) {
      const F16 weight = exp(sub(x[v], set1(m)));
      total = add(total, weight);
      store(weights + q * kTileKeys + v * kRun, weight);
    }
    if (m != before) {
      float factor[16] = {before - m};
      store(factor, exp(load(factor)));
      state.l[q] *= factor[0];
      float* out = state.out + (int64_t)q * head_dim;
      const F16 f = set1(factor[0]);
      int i = 0;
      for (; i + 16 <= head_dim; i += 16) store(out + i, mul(load(out + i), f));
      for (; i < head_dim; ++i) out[i] *= factor[0];
      state.m[q] = m;
    }
    state.l[q] += sum(total);
  }
  int dim = 0;
  for (; dim + 64 <= head_dim; dim += 64)
    weigh<T, kQueries, 4>(weights, tile, num_keys, head_dim, dim, state.out);
  for (; dim + 16 <= head_dim; dim += 16)
    weigh<T, kQueries, 1>(weights, tile, num_keys, head_dim, dim, state.out);
  if (dim < head_dim)
    for (int q = 0; q < kQueries; ++q)
      weigh_rest(weights + q * kTileKeys, tile, num_keys, head_dim, dim,
                 state.out + (int64_t)q * head_dim);
}

template <class T>
void look_of(int num_queries, const Layer& layer, const T* const* queries, const Sight* sights,
             const Tile<T>& tile, int num_keys, int head_dim, float* scores, Softmax state) {
  switch (num_queries) {
#define HEADRACE_QUERIES(n)                                                                  \
  case n:                                                                                    \
    if constexpr (n <= kMaxTileQueries)                                                      \
      return look<T, n>(layer, queries, sights, tile, num_keys, head_dim, scores, state);    \
    break;
    HEADRACE_QUERIES(1)
    HEADRACE_QUERIES(2)
    HEADRACE_QUERIES(3)
    HEADRACE_QUERIES(4)
    HEADRACE_QUERIES(5)
    HEADRACE_QUERIES(6)
#undef HEADRACE_QUERIES
  }
}

// Some tokens of one row that share one way through the context of one KV head. Parts of it, or
// all, may be computed by one member.
struct Job {
  int row;
  int kv_head;
  int first_token;  // of the row's tokens
  int num_tokens;
  int first_part;
  int num_parts;
  int64_t partial;  // where a lone part is kept until all are there, or -1
};

template <class T>
struct AttentionCall {
  Heads heads;
  const Layer& layer;
  const Step& step;
  const Cache& cache;
  const T* keys;     // of the layer
  const T* values;   // of the layer
  const T* queries;  // [tokens, stride]
  T* out;            // [tokens, stride]
  int64_t stride;
};

template <class T>
inline Softmax state_at(float* numbers, int num_queries, int head_dim) {
  return {numbers, numbers + num_queries, numbers + 2 * num_queries};
}

// The first key that a job looks at in a part, where its tile begins.
template <class T>
inline int64_t first_key_of(const AttentionCall<T>& call, const Job& job, int part) {
  const int64_t position = call.step.starts[job.row] + job.first_token;
  const int window = call.layer.window;
  const int64_t seen_from = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  return std::max<int64_t>((int64_t)part * kPartKeys, seen_from / kTileKeys * kTileKeys);
}

// Calls for a tile that is looked at next. A context lies in short runs, block by block, and is
// read once per token: left to itself, the processor would wait at the beginning of each.
template <class T>
inline void fetch_tile(const AttentionCall<T>& call, const Job& job, int64_t first_key) {
  const int64_t last = call.step.starts[job.row] + job.first_token + job.num_tokens - 1;
  const int32_t* table = call.step.block_tables + job.row * call.step.table_stride;
  const int64_t end = std::min<int64_t>(first_key + kTileKeys, last + 1);
  const int dim = call.heads.head_dim;
  const int step = std::min(kRun, call.cache.block_size);
  const int64_t bytes = (int64_t)step * dim * sizeof(T);
  for (int64_t key = first_key; key < end; key += step) {
    const int64_t place = (int64_t)table[key / call.cache.block_size] * call.cache.block_size * dim +
                          key % call.cache.block_size * dim + job.kv_head * call.cache.head_stride;
    for (const T* numbers : {call.keys + place, call.values + place})
      for (int64_t line = 0; line < bytes; line += 64) prefetch((const char*)numbers + line);
  }
}

// One part (512 keys) of a job, into `state`; `next` is what this member is likely to do then.
template <class T>
void attend_part(const AttentionCall<T>& call, const Job& job, int part, Scratch<T>& scratch,
                 Softmax state, const Job* next) {
  const Heads& heads = call.heads;
  const int dim = heads.head_dim, group = heads.group();
  const int num_queries = job.num_tokens * group;
  const int64_t offset = call.step.offsets[job.row] + job.first_token;
  const int64_t position = call.step.starts[job.row] + job.first_token;
  const int64_t last = position + job.num_tokens - 1;
  const int window = call.layer.window;
  state.clear(num_queries, dim);
  float* scores = scratch.numbers.data() + (size_t)2 * heads.block_queries() * (dim + 2);
  const T* keys = call.keys + job.kv_head * call.cache.head_stride;
  const T* values = call.values + job.kv_head * call.cache.head_stride;
  const int64_t end = std::min<int64_t>((int64_t)(part + 1) * kPartKeys, last + 1);
  for (int64_t first_key = first_key_of(call, job, part); first_key < end; first_key += kTileKeys) {
    if (first_key + kTileKeys <= last)
      fetch_tile(call, job, first_key + kTileKeys);
    else if (next != nullptr)
      fetch_tile(call, *next, first_key_of(call, *next, next->first_part));
    const int num_keys = (int)std::min<int64_t>(kTileKeys, last + 1 - first_key);
    Tile<T> tile;
    find_tile(call.cache, keys, values, call.step.block_tables + job.row * call.step.table_stride,
              (int)first_key, num_keys, dim, scratch.runs.data(), tile);
    for (int begin = 0; begin < num_queries; begin += kMaxTileQueries) {
      const int count = std::min(kMaxTileQueries, num_queries - begin);
      const T* queries[kMaxTileQueries];
      Sight sights[kMaxTileQueries];
      bool sees = false;
      for (int q = 0; q < count; ++q) {
        const int token = (begin + q) / group, head = job.kv_head * group + (begin + q) % group;
        queries[q] = call.queries + (offset + token) * call.stride + head * dim;
        const int64_t own = position + token - first_key;
        sights[q].last = (int)std::min<int64_t>(own, kTileKeys - 1);
        sights[q].first = window > 0 ? (int)std::max<int64_t>(0, own - window + 1) : 0;
        sees = sees || (sights[q].last >= 0 && sights[q].first < kTileKeys);
      }
      if (!sees) continue;
      look_of<T>(count, call.layer, queries, sights, tile, num_keys, dim, scores,
                 {state.m + begin, state.l + begin, state.out + (int64_t)begin * dim});
    }
  }
}

// What the parts came to, divided by the sums, where the tokens' outputs are.
template <class T>
void put_out(const AttentionCall<T>& call, const Job& job, const Softmax& state) {
  const int dim = call.heads.head_dim, group = call.heads.group();
  const int64_t offset = call.step.offsets[job.row] + job.first_token;
  for (int q = 0; q < job.num_tokens * group; ++q) {
    T* out = call.out + (offset + q / group) * call.stride + (job.kv_head * group + q % group) * dim;
    const float* numbers = state.out + (int64_t)q * dim;
    const F16 inverse = set1(1.0f / state.l[q]);
    int i = 0;
    for (; i + 16 <= dim; i += 16) store(out + i, mul(load(numbers + i), inverse));
    if (i < dim) store_first(out + i, mul(load_first(numbers + i, dim - i), inverse), dim - i);
  }
}

// How the attention of some of a step's tokens is cut into jobs: the same for all layers of one window.
struct AttentionPlan {
  std::vector<Job> jobs;
  // Whose parts were computed by several members: `row` and so on, num_parts of them.
  std::vector<Job> merges;
  int64_t num_partials = 0;  // numbers
};

inline AttentionPlan plan_attention(const Heads& heads, const Step& step, int window,
                                    const Span& tokens_of) {
  AttentionPlan plan;
  const int group = heads.group();
  const int block = std::max(1, kBlockQueries / group);
  // Long ones first: who comes last should have little to do.
  for (int row = step.num_rows - 1; row >= 0; --row) {
    const int count = (int)(step.offsets[row + 1] - step.offsets[row]);
    const int begin = std::max<int>(0, tokens_of.begin - (int)step.offsets[row]);
    const int end = std::min<int>(count, tokens_of.end - (int)step.offsets[row]);
    if (begin >= end) continue;
    for (int first = begin + (end - begin - 1) / block * block; first >= begin; first -= block) {
      const int tokens = std::min(block, end - first);
      const int64_t position = step.starts[row] + first;
      const int64_t seen_from = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
      const int first_part = (int)(seen_from / kPartKeys);
      const int num_parts = (int)((position + tokens - 1) / kPartKeys) - first_part + 1;
      for (int h = 0; h < heads.num_kv_heads; ++h) {
        Job job{row, h, first, tokens, first_part, num_parts, -1};
        // A lone token of a long context: nothing else could keep the team busy.
        if (count > 1 || num_parts == 1) {
          plan.jobs.push_back(job);
          continue;
        }
        Job merge = job;
        merge.partial = plan.num_partials;
        for (int p = 0; p < num_parts; ++p) {
          plan.jobs.push_back({row, h, first, tokens, first_part + p, 1, plan.num_partials});
          plan.num_partials += (int64_t)tokens * group * (heads.head_dim + 2);
        }
        plan.merges.push_back(merge);
      }
    }
  }
  return plan;
}

template <class T>
void attend(Worker& worker, const AttentionCall<T>& call, const AttentionPlan& plan,
            std::vector<Scratch<T>>& scratches, float* partials) {
  const int dim = call.heads.head_dim, group = call.heads.group();
  Scratch<T>& scratch = scratches[worker.id()];
  const auto states = [&](int num_queries) {
    float* numbers = scratch.numbers.data();
    return std::pair(state_at<T>(numbers, num_queries, dim),
                     state_at<T>(numbers + (size_t)call.heads.block_queries() * (dim + 2), num_queries, dim));
  };
  worker.share((int)plan.jobs.size(), [&](int i) {
    const Job& job = plan.jobs[i];
    const int num_queries = job.num_tokens * group;
    const size_t after = i + worker.team_size();
    const Job* next = after < plan.jobs.size() ? &plan.jobs[after] : nullptr;
    if (job.partial >= 0)
      return attend_part(call, job, job.first_part, scratch,
                         state_at<T>(partials + job.partial, num_queries, dim), next);
    auto [whole, part] = states(num_queries);
    attend_part(call, job, job.first_part, scratch, whole, job.num_parts == 1 ? next : nullptr);
    for (int p = 1; p < job.num_parts; ++p) {
      attend_part(call, job, job.first_part + p, scratch, part,
                  p + 1 == job.num_parts ? next : nullptr);
      whole.append(part, num_queries, dim);
    }
    put_out(call, job, whole);
  });
  if (plan.merges.empty()) return;
  worker.share((int)plan.merges.size(), [&](int i) {
    const Job& job = plan.merges[i];
    const int num_queries = job.num_tokens * group;
    const int64_t size = (int64_t)num_queries * (dim + 2);
    const Softmax whole = state_at<T>(partials + job.partial, num_queries, dim);
    for (int p = 1; p < job.num_parts; ++p)
      Softmax(whole).append(state_at<T>(partials + job.partial + p * size, num_queries, dim),
                            num_queries, dim);
    put_out(call, job, whole);
  });
}

}  // namespace headrace::KERNELS_OF
