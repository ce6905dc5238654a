// The model and one step of it, as plain pointers: what the kernels of every instruction set see.
//
// Nothing here owns memory (module.cpp does) and nothing here depends on torch, so that files
// compiled for a wide instruction set hold no code that another machine could be given by chance.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace headrace {

using bf16 = uint16_t;

// What activations and the KV cache are kept in.
enum class Type { kFloat32, kBfloat16 };
// What a projection's weights are kept in.
enum class WeightType { kFloat32, kBfloat16, kInt8 };
enum class Activation { kSilu, kGelu };

// Weights are packed in panels of 32 outputs. See pack() in linear.inl.
constexpr int kPanel = 32;
// Inputs that share a scale where they are kept in int8.
constexpr int kScaled = 64;

// y = x W^T + b: W is [outputs, inputs], packed as [panels][groups of inputs][32][group].
// A gated one has the outputs of two projections, 16 of the first and then 16 of the second in
// each panel. int8: w = q x scales[output], and zero_sums [panels][inputs / 64][32] are 128 x the
// sum of q over 64 inputs.
struct Linear {
  WeightType type = WeightType::kFloat32;
  int num_outputs = 0;  // after gating
  int num_inputs = 0;
  int num_panels = 0;
  bool is_gated = false;
  const void* weights = nullptr;
  const float* bias = nullptr;  // [panels x 32], packed like the outputs
  const float* scales = nullptr;
  const int32_t* zero_sums = nullptr;
};

// cos and sin of every position's angles: [positions, head_dim / 2] each.
struct Rope {
  const float* cos = nullptr;
  const float* sin = nullptr;
};

// A norm that a model does not have is null.
struct Layer {
  const float* input_norm = nullptr;
  Linear qkv;
  const float* query_norm = nullptr;
  const float* key_norm = nullptr;
  Linear attention_out;
  const float* attention_out_norm = nullptr;
  const float* mlp_norm = nullptr;
  Linear gate_up;
  Linear down;
  const float* mlp_out_norm = nullptr;
  float scale = 1;     // of attention scores
  int window = 0;      // 0: all that came before
  float soft_cap = 0;  // 0: none
  int rope = -1;       // -1: none
};

struct Model {
  Type type = Type::kFloat32;
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  float eps = 0;
  float embedding_scale = 1;
  float logit_soft_cap = 0;
  Activation activation = Activation::kSilu;
  const void* embedding = nullptr;  // [vocabulary, hidden_size] in `type`
  const float* final_norm = nullptr;
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
};

// The rows of one step: row r is tokens offsets[r] .. offsets[r + 1] - 1, the first of which stands
// at position starts[r] of its sequence.
struct Step {
  int num_tokens = 0;
  int num_rows = 0;
  const int64_t* token_ids = nullptr;
  const int64_t* positions = nullptr;
  const int64_t* slots = nullptr;
  const int64_t* starts = nullptr;
  const int64_t* offsets = nullptr;
  const int32_t* block_tables = nullptr;
  int64_t table_stride = 0;
};

// Tokens begin .. end - 1 of a step.
struct Span {
  int begin;
  int end;
  int size() const { return end - begin; }
};

// The KV cache of all layers: [layers, 2 x kv_heads, blocks, block_size x head_dim].
// What lies inside a block is told in attention.inl.
struct Cache {
  void* data = nullptr;
  int64_t layer_stride = 0;  // in elements
  int64_t head_stride = 0;
  int block_size = 0;
};

}  // namespace headrace
