// A whole decoder, stage after stage, by one team.
//
// The residual stream x is float32; what projections read is in the model's type, or in int8 with
// a scale per 64 inputs. A layer is two halves, each of which ends in a sum into x:
//
//   attention   x += norm?( W_out attend( turn( W_qkv norm(x) )))
//   MLP         x += norm?( W_down ( activation(gate) up ))   gate, up = W_gate_up norm(x)
//
// One rank of several stops after each half with its part of that sum in `part`; the ranks add
// their parts up, and `add_part` goes on from there.

namespace headrace::KERNELS_OF {

// Tokens that go through a layer together: what they are made of on the way stays in the second
// cache, and the layer's weights in the third until the next come. A token's attention needs only
// tokens of its own block and of those before.
constexpr int kStageTokens = 144;

template <class T>
class DecoderOf : public Decoder {
 public:
  explicit DecoderOf(const Model& model) : model_(model) {
    heads_ = {model.num_heads, model.num_kv_heads, model.head_dim, model.eps};
  }

  void prepare(int team_size, const Step& step) override {
    step_ = step;
    reserve(step.num_tokens);
    while ((int)scratches_.size() < team_size) scratches_.emplace_back().reserve(heads_);
    blocks_.clear();
    const int num_blocks = (step.num_tokens + kStageTokens - 1) / kStageTokens;
    for (int b = 0; b < num_blocks; ++b)
      blocks_.push_back({(int)((int64_t)step.num_tokens * b / num_blocks),
                         (int)((int64_t)step.num_tokens * (b + 1) / num_blocks)});
    plans_.clear();
    int64_t num_partials = 0;
    for (const Layer& layer : model_.layers) {
      if (plans_.find(layer.window) != plans_.end()) continue;
      for (const Span& tokens : blocks_) {
        plans_[layer.window].push_back(plan_attention(heads_, step, layer.window, tokens));
        num_partials = std::max(num_partials, plans_[layer.window].back().num_partials);
      }
    }
    if ((int64_t)partials_.size() < num_partials) partials_.resize(num_partials);
  }

  int num_blocks() override { return (int)blocks_.size(); }

  void begin(Worker& worker) override {
    in_rows(worker, all(), [&](int token) {
      const T* embedding = (const T*)model_.embedding + step_.token_ids[token] * model_.hidden_size;
      float* x = x_.at(token);
      const F16 scale = set1(model_.embedding_scale);
      int i = 0;
      for (; i + 16 <= model_.hidden_size; i += 16) store(x + i, mul(load(embedding + i), scale));
      const int rest = model_.hidden_size - i;
      if (rest > 0) store_first(x + i, mul(load_first(embedding + i, rest), scale), rest);
      // A NaN that an earlier step's row left here would be this row's.
      std::fill(x + model_.hidden_size, x + x_.stride, 0.0f);
    });
  }

  void attention(Worker& worker, int index, int block, const Cache& cache,
                 bool is_part) override {
    const Layer& layer = model_.layers[index];
    const Span tokens = blocks_[block];
    normed(worker, tokens, layer.input_norm, layer.qkv);
    to_floats(worker, tokens, layer.qkv, normed_, qkv_);
    turn_and_attend(worker, index, block, cache, qkv_.at(0), qkv_.stride);
    quantised(worker, tokens, attended_, model_.num_heads * model_.head_dim, layer.attention_out);
    finish_half(worker, tokens, layer.attention_out, attended_, layer.attention_out_norm, is_part);
  }

  // From qkv [tokens, stride] to `attended_`.
  void turn_and_attend(Worker& worker, int index, int block, const Cache& cache, const float* qkv,
                       int64_t stride) {
    const Layer& layer = model_.layers[index];
    T* keys = (T*)cache.data + index * cache.layer_stride;
    const Rope* rope = layer.rope < 0 ? nullptr : &model_.ropes[layer.rope];
    in_rows(worker, blocks_[block], [&](int token) {
      rope_store<T>(heads_, layer, rope, qkv + token * stride, step_.positions[token], step_.slots[token],
                    queries_.at(token), keys, cache);
    });
    const AttentionCall<T> call{heads_,
                                layer,
                                step_,
                                cache,
                                keys,
                                keys + model_.num_kv_heads * cache.head_stride,
                                queries_.at(0),
                                attended_.at(0),
                                queries_.stride};
    attend(worker, call, plans_.at(layer.window)[block], scratches_, partials_.data());
  }

  const T* attended(int token) { return attended_.at(token); }

  void mlp(Worker& worker, int index, int block, bool is_part) override {
    const Layer& layer = model_.layers[index];
    const Span tokens = blocks_[block];
    normed(worker, tokens, layer.mlp_norm, layer.gate_up);
    const Inputs inputs = inputs_of(layer.gate_up, normed_, tokens.begin);
    const auto put = [&](auto activate) {
      linear_rows(worker, layer.gate_up, inputs, tokens.size(),
                  [&, activate](int row, int panel, F16 gate, F16 up) {
                    store(inner_.at(tokens.begin + row) + panel * (kPanel / 2), mul(activate(gate), up));
                  });
    };
    if (model_.activation == Activation::kSilu)
      put([](F16 x) { return silu(x); });
    else
      put([](F16 x) { return gelu(x); });
    quantised(worker, tokens, inner_, model_.intermediate_size, layer.down);
    finish_half(worker, tokens, layer.down, inner_, layer.mlp_out_norm, is_part);
  }

  Floats part() override { return {part_.at(0), part_.stride}; }

  void add_part(Worker& worker, int half) override {
    const Layer& layer = model_.layers[half / 2];
    add_part(worker, all(), half % 2 == 0 ? layer.attention_out_norm : layer.mlp_out_norm);
  }

  void end(Worker& worker, void* hidden, uint8_t* is_finite) override {
    in_rows(worker, all(), [&](int token) {
      T* y = normed_.at(token);
      rms_norm(x_.at(token), model_.final_norm, y, model_.hidden_size, model_.eps);
      std::memcpy((T*)hidden + (int64_t)token * model_.hidden_size, y,
                  model_.hidden_size * sizeof(T));
      F16 nil = zero();
      for (int i = 0; i < padded(model_.hidden_size); i += 16) {
        const F16 v = load(y + i);
        nil = add(nil, sub(v, v));
      }
      is_finite[token] = sum(nil) == 0;
    });
  }

  void prepare_logits(int num_rows) override { reserve(num_rows); }

  void logits(Worker& worker, const Linear& head, const void* hidden, const int64_t* rows,
              int num_rows, float* logits) override {
    worker.share(num_rows, [&](int row) {
      const T* x = (const T*)hidden + rows[row] * model_.hidden_size;
      T* y = normed_.at(row);
      std::memcpy(y, x, model_.hidden_size * sizeof(T));
      std::fill(y + model_.hidden_size, y + normed_.stride, T{});
      if (head.type == WeightType::kInt8)
        quantise(normed_.at(row), bytes_.at(row), scales_.at(row), model_.hidden_size);
    });
    const float cap = model_.logit_soft_cap;
    const int64_t size = head.num_outputs;
    linear_rows(worker, head, inputs_of(head, normed_, 0), num_rows,
                [&](int row, int panel, F16 low, F16 high) {
                  if (cap != 0) {
                    low = squeezed(low, cap);
                    high = squeezed(high, cap);
                  }
                  put_first(logits + row * size, panel * kPanel, size, low, high);
                });
  }

 private:
  // Rows of numbers, padded with zeros that stay zero.
  template <class Number>
  struct Rows {
    std::vector<Number> numbers;
    int64_t stride = 0;
    Number* at(int64_t row) { return numbers.data() + row * stride; }
    void reserve(int num_rows, int width) {
      // Whatever reads a row goes on to a multiple of 64 numbers.
      stride = (width + 63) / 64 * 64;
      const size_t size = (size_t)num_rows * stride;
      if (numbers.size() < size) numbers.resize(size);
    }
  };

  void reserve(int num_tokens) {
    const int attended = model_.num_heads * model_.head_dim;
    x_.reserve(num_tokens, model_.hidden_size);
    normed_.reserve(num_tokens, model_.hidden_size);
    qkv_.reserve(num_tokens, attended + 2 * model_.num_kv_heads * model_.head_dim);
    queries_.reserve(num_tokens, attended);
    attended_.reserve(num_tokens, attended);
    inner_.reserve(num_tokens, model_.intermediate_size);
    part_.reserve(num_tokens, model_.hidden_size);
    const int widest = std::max({attended, model_.intermediate_size, model_.hidden_size});
    bytes_.reserve(num_tokens, widest);
    scales_.reserve(num_tokens, (widest + kScaled - 1) / kScaled);
  }

  Span all() const { return {0, step_.num_tokens}; }

  // Tokens in turn; a few at a time, so that members do not wait for the counter.
  template <class Work>
  void in_rows(Worker& worker, const Span& tokens, Work&& work) {
    constexpr int kTogether = 4;
    worker.share((tokens.size() + kTogether - 1) / kTogether, [&](int piece) {
      const int begin = tokens.begin + piece * kTogether;
      for (int token = begin; token < std::min(tokens.end, begin + kTogether); ++token) work(token);
    });
  }

  Inputs inputs_of(const Linear& linear, Rows<T>& rows, int first) {
    if (linear.type == WeightType::kInt8)
      return {bytes_.at(first), bytes_.stride, scales_.at(first), scales_.stride};
    return {rows.at(first), rows.stride};
  }

  // What `reader` reads.
  void normed(Worker& worker, const Span& tokens, const float* weight, const Linear& reader) {
    in_rows(worker, tokens, [&](int token) {
      T* y = normed_.at(token);
      rms_norm(x_.at(token), weight, y, model_.hidden_size, model_.eps);
      if (reader.type == WeightType::kInt8)
        quantise(y, bytes_.at(token), scales_.at(token), model_.hidden_size);
    });
  }

  void quantised(Worker& worker, const Span& tokens, Rows<T>& rows, int width,
                 const Linear& reader) {
    if (reader.type != WeightType::kInt8) return;
    in_rows(worker, tokens, [&](int token) {
      quantise(rows.at(token), bytes_.at(token), scales_.at(token), width);
    });
  }

  void to_floats(Worker& worker, const Span& tokens, const Linear& linear, Rows<T>& inputs,
                 Rows<float>& rows) {
    linear_rows(worker, linear, inputs_of(linear, inputs, tokens.begin), tokens.size(),
                [&](int row, int panel, F16 low, F16 high) {
                  float* y = rows.at(tokens.begin + row) + panel * kPanel;
                  store(y, low);
                  store(y + 16, high);
                });
  }

  void finish_half(Worker& worker, const Span& tokens, const Linear& linear, Rows<T>& inputs,
                   const float* norm, bool is_part) {
    if (is_part || norm != nullptr) {
      to_floats(worker, tokens, linear, inputs, part_);
      if (!is_part) add_part(worker, tokens, norm);
      return;
    }
    linear_rows(worker, linear, inputs_of(linear, inputs, tokens.begin), tokens.size(),
                [&](int row, int panel, F16 low, F16 high) {
                  float* x = x_.at(tokens.begin + row) + panel * kPanel;
                  store(x, add(load(x), low));
                  store(x + 16, add(load(x + 16), high));
                });
  }

  void add_part(Worker& worker, const Span& tokens, const float* norm) {
    in_rows(worker, tokens, [&](int token) {
      float* x = x_.at(token);
      const float* part = part_.at(token);
      const int size = model_.hidden_size;
      const F16 scale = set1(norm == nullptr ? 1.0f : inverse_rms(part, size, model_.eps));
      for (int i = 0; i < padded(size); i += 16) {
        F16 y = load(part + i);
        if (norm != nullptr) y = mul(mul(y, scale), load(norm + i));
        store(x + i, add(load(x + i), y));
      }
    });
  }

  const Model& model_;
  Heads heads_;
  Step step_;
  // Tokens that go through a layer together, and their attention by window and block.
  std::vector<Span> blocks_;
  std::map<int, std::vector<AttentionPlan>> plans_;
  std::vector<Scratch<T>> scratches_;
  std::vector<float> partials_;
  Rows<float> x_, qkv_, part_, scales_;
  Rows<T> normed_, queries_, attended_, inner_;
  Rows<uint8_t> bytes_;
};

}  // namespace headrace::KERNELS_OF
