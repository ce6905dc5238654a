// All kernels of one instruction set: included by one file per set, which names it first.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels.h"
#include "unroll.h"

#define HEADRACE_INLINE __attribute__((always_inline))

#define HEADRACE_TEXT(x) #x
#define HEADRACE_STRING(x) HEADRACE_TEXT(x)

#include "rowwise.inl"
#include "linear.inl"
#include "attention.inl"
#include "sample.inl"
#include "decoder.inl"

namespace headrace::KERNELS_OF {

namespace {

Decoder* new_decoder(const Model& model) {
  if (model.type == Type::kFloat32) return new DecoderOf<float>(model);
  return new DecoderOf<bf16>(model);
}

template <class T>
void attention_of(Team& team, const Model& model, const Step& step, const Cache& cache,
                  const float* qkv, void* out) {
  DecoderOf<T> decoder(model);
  decoder.prepare(team.size(), step);
  const int width = model.num_heads * model.head_dim;
  team.run([&](Worker& worker) {
    for (int block = 0; block < decoder.num_blocks(); ++block)
      decoder.turn_and_attend(worker, 0, block, cache, qkv,
                              width + 2 * model.num_kv_heads * model.head_dim);
  });
  for (int token = 0; token < step.num_tokens; ++token)
    std::memcpy((T*)out + (int64_t)token * width, decoder.attended(token), width * sizeof(T));
}

void attention(Team& team, const Model& model, const Step& step, const Cache& cache,
               const float* qkv, void* out) {
  if (model.type == Type::kFloat32) return attention_of<float>(team, model, step, cache, qkv, out);
  attention_of<bf16>(team, model, step, cache, qkv, out);
}

template <class T>
void linear_of(Team& team, const Linear& linear, const T* x, int num_rows, float* y) {
  const int64_t stride = (linear.num_inputs + 63) / 64 * 64, size = linear.num_outputs;
  std::vector<T> rows(num_rows * stride);
  std::vector<uint8_t> bytes(num_rows * stride);
  std::vector<float> scales(num_rows * stride / kScaled);
  const Inputs inputs = linear.type == WeightType::kInt8
                            ? Inputs{bytes.data(), stride, scales.data(), stride / kScaled}
                            : Inputs{rows.data(), stride};
  team.run([&](Worker& worker) {
    worker.share(num_rows, [&](int row) {
      std::copy_n(x + (int64_t)row * linear.num_inputs, linear.num_inputs, &rows[row * stride]);
      if (linear.type == WeightType::kInt8)
        quantise(&rows[row * stride], &bytes[row * stride], &scales[row * stride / kScaled],
                 linear.num_inputs);
    });
    linear_rows(worker, linear, inputs, num_rows, [&](int row, int panel, F16 low, F16 high) {
      if (linear.is_gated)
        put_first(y + row * size, panel * kPanel / 2,
                  std::min<int64_t>(size, (panel + 1) * kPanel / 2), mul(silu(low), high), zero());
      else
        put_first(y + row * size, panel * kPanel, size, low, high);
    });
  });
}

void linear(Team& team, Type type, const Linear& linear, const void* x, int num_rows, float* y) {
  if (type == Type::kFloat32) return linear_of(team, linear, (const float*)x, num_rows, y);
  linear_of(team, linear, (const bf16*)x, num_rows, y);
}

template <class T>
void wipe_slots(const Cache& cache, int num_layers, int num_heads, int head_dim,
                const int64_t* slots, int num_slots) {
  for (int layer = 0; layer < num_layers; ++layer)
    for (int head = 0; head < num_heads; ++head) {
      T* heads = (T*)cache.data + layer * cache.layer_stride + head * cache.head_stride;
      for (int s = 0; s < num_slots; ++s) {
        T* block = heads + slots[s] / cache.block_size * cache.block_size * head_dim;
        const int token = (int)(slots[s] % cache.block_size);
        for (int i = 0; i < head_dim; ++i)
          block[head < num_heads / 2 ? key_place<T>(cache, head_dim, token, i)
                                     : value_place<T>(cache, head_dim, token, i)] = T{};
      }
    }
}

void wipe(Type type, const Cache& cache, int num_layers, int num_heads, int head_dim,
          const int64_t* slots, int num_slots) {
  if (type == Type::kFloat32)
    wipe_slots<float>(cache, num_layers, num_heads, head_dim, slots, num_slots);
  else
    wipe_slots<bf16>(cache, num_layers, num_heads, head_dim, slots, num_slots);
}

}  // namespace

const Kernels kKernels{HEADRACE_STRING(KERNELS_OF), new_decoder, linear, attention, sample_rows, wipe};

}  // namespace headrace::KERNELS_OF
