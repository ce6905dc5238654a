// What each instruction set has to offer. One table per set; module.cpp chooses by machine.

#pragma once

#include <cstdint>

#include "model.h"
#include "team.h"

namespace headrace {

struct Floats {
  float* data;
  int64_t stride;
};

// One step of a model, half layer by half layer; see decoder.inl. All members of a team call each
// function together, with equal arguments.
class Decoder {
 public:
  virtual ~Decoder() = default;
  // Makes room for a step, and plans it; one caller, before all members begin.
  virtual void prepare(int team_size, const Step&) = 0;
  virtual void begin(Worker&) = 0;
  // A step's tokens go through a layer block by block, in their order.
  virtual int num_blocks() = 0;
  virtual void attention(Worker&, int layer, int block, const Cache&, bool is_part) = 0;
  virtual void mlp(Worker&, int layer, int block, bool is_part) = 0;
  // This rank's part of the last half's sum: [tokens, stride].
  virtual Floats part() = 0;
  // Adds `part`, which holds the sum over all ranks by now, to the residual stream.
  virtual void add_part(Worker&, int half) = 0;
  // The last hidden states [tokens, hidden_size] in the model's type, and which are finite.
  virtual void end(Worker&, void* hidden, uint8_t* is_finite) = 0;
  // Makes room for `logits`; one caller.
  virtual void prepare_logits(int num_rows) = 0;
  // Scores [num_rows, vocabulary] of some rows of hidden states as `end` gives them.
  virtual void logits(Worker&, const Linear& head, const void* hidden, const int64_t* rows,
                      int num_rows, float* logits) = 0;
};

// How the rows of sample() choose; one entry per row.
struct Choices {
  const float* temperatures;  // 0: the likeliest
  const int64_t* top_k;       // 0: all
  const float* top_p;         // 1: all
  const float* min_p;
  // The name of the row's noise.
  const int64_t* seeds;
  const int64_t* numbers;  // of the choice, in its request
  const int64_t* positions;
};

struct Kernels {
  const char* name;
  Decoder* (*new_decoder)(const Model&);
  // y = x W^T + b for x [rows, inputs] in `type`; y [rows, outputs] float32. Where W is gated, SiLU.
  void (*linear)(Team&, Type type, const Linear&, const void* x, int num_rows, float* y);
  // Turns and stores the heads in qkv [tokens, (heads + 2 x kv_heads) x head_dim] as `layer` says,
  // and attends; out [tokens, heads x head_dim] in the model's type.
  void (*attention)(Team&, const Model&, const Step&, const Cache&, const float* qkv, void* out);
  // The rows' tokens, of scores [rows, size]; -1 where they are not finite.
  void (*sample)(Worker&, const float* scores, int num_rows, int64_t size, const Choices&,
                 int64_t* token_ids);
  // Zeroes what some slots hold in all layers.
  void (*wipe)(Type, const Cache&, int num_layers, int num_heads, int head_dim,
               const int64_t* slots, int num_slots);
};

// The last two only where the compiler can build them: see HEADRACE_HAS_WIDE.
namespace portable {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}

}  // namespace headrace

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HEADRACE_HAS_WIDE 1
#endif
