// The Python module: tensors in, tensors out, plain pointers inside.

#include <ATen/Parallel.h>
#include <torch/extension.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>

#include "kernels.h"

namespace headrace {
namespace {

namespace py = pybind11;
using at::Tensor;

#define HEADRACE_CHECK(condition, ...) TORCH_CHECK_VALUE(condition, __VA_ARGS__)

// The tables that this machine can run, the fastest first.
std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
#ifdef HEADRACE_HAS_WIDE
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bf16") &&
                          __builtin_cpu_supports("avx512vnni");
  if (has_avx512) usable.push_back(&avx512::kKernels);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    usable.push_back(&avx2::kKernels);
#endif
  usable.push_back(&portable::kKernels);
  return usable;
}

const Kernels& kernels_named(const std::string& name) {
  for (const Kernels* kernels : usable_kernels())
    if (name.empty() || name == kernels->name) return *kernels;
  throw py::value_error("This machine cannot run the kernels named " + name + ".");
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : usable_kernels()) names.emplace_back(kernels->name);
  return names;
}

// One team per size that torch was ever set to; teams at rest cost nothing.
Team& team() {
  static std::mutex one;
  static std::map<int, std::unique_ptr<Team>> teams;
  const std::lock_guard<std::mutex> lock(one);
  const int size = at::get_num_threads();
  auto& found = teams[size];
  if (found == nullptr) found = std::make_unique<Team>(size);
  return *found;
}

Type type_of(const Tensor& tensor) {
  if (tensor.scalar_type() == at::kFloat) return Type::kFloat32;
  HEADRACE_CHECK(tensor.scalar_type() == at::kBFloat16, "Expected float32 or bfloat16, not ",
                 tensor.scalar_type(), ".");
  return Type::kBfloat16;
}

template <class T>
const T* numbers(const Tensor& tensor, int64_t size, const char* name) {
  HEADRACE_CHECK(tensor.is_contiguous() && tensor.device().is_cpu() && tensor.numel() == size,
                 name, " must be ", size, " numbers in a row on the CPU, not ", tensor.sizes());
  return (const T*)tensor.const_data_ptr();
}

const int64_t* int64s(const Tensor& tensor, int64_t size, const char* name) {
  HEADRACE_CHECK(tensor.scalar_type() == at::kLong, name, " must be int64.");
  return numbers<int64_t>(tensor, size, name);
}

// A piece of memory in large pages, zeroed by the system as it is touched. What is walked through
// again and again then needs few entries of the processor's page table, and its prefetchers go on
// where a small page would end.
class LargePages {
 public:
  explicit LargePages(size_t size) {
    constexpr size_t kLarge = 2 << 20;
#if defined(__linux__)
    size_ = size + kLarge;
    memory_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    begin = (char*)(((uintptr_t)memory_ + kLarge - 1) / kLarge * kLarge);
    madvise(begin, size, MADV_HUGEPAGE);
#else
    memory_ = std::calloc(1, size + 64);
    if (memory_ == nullptr) throw std::bad_alloc();
    begin = (char*)(((uintptr_t)memory_ + 63) / 64 * 64);
#endif
  }
  LargePages(const LargePages&) = delete;
  LargePages& operator=(const LargePages&) = delete;
  ~LargePages() {
#if defined(__linux__)
    munmap(memory_, size_);
#else
    std::free(memory_);
#endif
  }

  char* begin = nullptr;

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

int64_t bytes_of(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  int64_t bytes = (int64_t)at::elementSize(dtype);
  for (const int64_t size : sizes) bytes *= size;
  return bytes;
}

// Zeros that have pages of their own.
Tensor large_zeros(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  const auto pages = std::make_shared<LargePages>(bytes_of(sizes, dtype));
  return at::from_blob(pages->begin, sizes, [pages](void*) {}, at::dtype(dtype));
}

Tensor large_zeros_like(const std::vector<int64_t>& sizes, const Tensor& like) {
  return large_zeros(sizes, like.scalar_type());
}

// Zeros beside those of the calls before: weights of one layer are smaller than a large page.
Tensor neighbouring_zeros(const std::vector<int64_t>& sizes, at::ScalarType dtype) {
  constexpr int64_t kShared = 64 << 20;
  static std::mutex one;
  static std::weak_ptr<LargePages> latest;
  static int64_t taken = 0;
  const int64_t bytes = (bytes_of(sizes, dtype) + 63) / 64 * 64;
  if (bytes > kShared / 4) return large_zeros(sizes, dtype);
  const std::lock_guard<std::mutex> lock(one);
  auto pages = latest.lock();
  if (pages == nullptr || taken + bytes > kShared) {
    pages = std::make_shared<LargePages>(kShared);
    latest = pages;
    taken = 0;
  }
  char* const begin = pages->begin + taken;
  taken += bytes;
  return at::from_blob(begin, sizes, [pages](void*) {}, at::dtype(dtype));
}

WeightType weight_type_named(const std::string& name) {
  if (name == "float32") return WeightType::kFloat32;
  if (name == "bfloat16") return WeightType::kBfloat16;
  HEADRACE_CHECK(name == "int8", "Weights can be float32, bfloat16 or int8, not ", name, ".");
  return WeightType::kInt8;
}

// A projection's weights in panels; owns them. See linear.inl for the layout.
class PackedLinear {
 public:
  PackedLinear(const Tensor& weight, const std::optional<Tensor>& bias, const std::string& type,
               bool is_gated) {
    HEADRACE_CHECK(weight.dim() == 2, "A weight is [outputs, inputs], not ", weight.sizes(), ".");
    HEADRACE_CHECK(!is_gated || weight.size(0) % 2 == 0, "Gate and up must be of one size.");
    const int outputs = (int)weight.size(0), inputs = (int)weight.size(1);
    linear.type = weight_type_named(type);
    linear.is_gated = is_gated;
    linear.num_outputs = is_gated ? outputs / 2 : outputs;
    linear.num_inputs = inputs;
    const int per_panel = is_gated ? kPanel / 2 : kPanel;
    linear.num_panels = (linear.num_outputs + per_panel - 1) / per_panel;
    const int group = linear.type == WeightType::kInt8       ? 4
                      : linear.type == WeightType::kBfloat16 ? 2
                                                             : 1;
    const int64_t num_groups = (inputs + group - 1) / group;
    const auto dtype = linear.type == WeightType::kInt8       ? at::kChar
                       : linear.type == WeightType::kBfloat16 ? at::kBFloat16
                                                              : at::kFloat;
    weights_ = neighbouring_zeros({linear.num_panels, num_groups, kPanel, group}, dtype);
    linear.weights = weights_.const_data_ptr();
    if (linear.type == WeightType::kInt8) {
      scales_ = at::zeros({linear.num_panels * kPanel});
      zero_sums_ = at::zeros({linear.num_panels, (inputs + kScaled - 1) / kScaled, kPanel},
                             at::dtype(at::kInt));
      linear.scales = scales_.const_data_ptr<float>();
      linear.zero_sums = zero_sums_.const_data_ptr<int32_t>();
    }
    if (bias.has_value()) {
      bias_ = at::zeros({linear.num_panels * kPanel});
      linear.bias = bias_.const_data_ptr<float>();
    }
    const Tensor rows = weight.contiguous();
    const Tensor floats = bias.has_value() ? bias->to(at::kFloat).contiguous() : Tensor();
    // Not by torch's threads: they would wait for more, spinning, on cores that others need.
    team().run([&](Worker& worker) {
      worker.share(linear.num_panels, [&](int panel) { pack(rows, floats, panel, group); });
    });
  }

  Linear linear;

 private:
  // The output that stands at a place of a panel, or -1.
  int64_t output_at(int64_t panel, int place) const {
    if (!linear.is_gated) {
      const int64_t output = panel * kPanel + place;
      return output < linear.num_outputs ? output : -1;
    }
    const int64_t output = panel * (kPanel / 2) + place % (kPanel / 2);
    if (output >= linear.num_outputs) return -1;
    return place < kPanel / 2 ? output : output + linear.num_outputs;
  }

  void pack(const Tensor& weight, const Tensor& bias, int64_t panel, int group) {
    const int inputs = linear.num_inputs;
    const int64_t num_groups = (inputs + group - 1) / group;
    for (int place = 0; place < kPanel; ++place) {
      const int64_t output = output_at(panel, place);
      if (output < 0) continue;
      const int64_t entry = panel * kPanel + place;
      if (linear.bias != nullptr)
        bias_.data_ptr<float>()[entry] = bias.const_data_ptr<float>()[output];
      std::vector<float> x(inputs);
      if (type_of(weight) == Type::kFloat32)
        std::copy_n((const float*)weight.const_data_ptr() + output * inputs, inputs, x.begin());
      else
        std::copy_n((const at::BFloat16*)weight.const_data_ptr() + output * inputs, inputs,
                    x.begin());
      const auto at_input = [&](int k) {
        return ((panel * num_groups + k / group) * kPanel + place) * group + k % group;
      };
      if (linear.type == WeightType::kFloat32) {
        float* w = weights_.data_ptr<float>();
        for (int k = 0; k < inputs; ++k) w[at_input(k)] = x[k];
      } else if (linear.type == WeightType::kBfloat16) {
        at::BFloat16* w = weights_.data_ptr<at::BFloat16>();
        for (int k = 0; k < inputs; ++k) w[at_input(k)] = x[k];
      } else {
        float most = 0;
        for (int k = 0; k < inputs; ++k) most = std::max(most, std::abs(x[k]));
        const float inverse = most > 0 ? 127 / most : 0;
        int8_t* w = weights_.data_ptr<int8_t>();
        const int64_t num_scales = (inputs + kScaled - 1) / kScaled;
        int32_t* sums = zero_sums_.data_ptr<int32_t>() + panel * num_scales * kPanel + place;
        for (int k = 0; k < inputs; ++k) {
          const int q = (int)std::nearbyint(x[k] * inverse);
          w[at_input(k)] = (int8_t)q;
          sums[k / kScaled * kPanel] += 128 * q;
        }
        scales_.data_ptr<float>()[entry] = most / 127;
      }
    }
  }

  Tensor weights_, scales_, zero_sums_, bias_;
};

// A step's rows as tensors; see Step.
struct StepTensors {
  Tensor token_ids, positions, slots, starts, offsets, block_tables;

  Step step() const {
    Step step;
    step.num_tokens = (int)token_ids.numel();
    step.num_rows = (int)starts.numel();
    step.token_ids = int64s(token_ids, step.num_tokens, "token_ids");
    step.positions = int64s(positions, step.num_tokens, "positions");
    step.slots = int64s(slots, step.num_tokens, "slots");
    step.starts = int64s(starts, step.num_rows, "starts");
    step.offsets = int64s(offsets, step.num_rows + 1, "offsets");
    HEADRACE_CHECK(block_tables.dim() == 2 && block_tables.scalar_type() == at::kInt &&
                       block_tables.stride(1) == 1 && block_tables.size(0) == step.num_rows,
                   "block_tables must be int32 [rows, blocks].");
    step.block_tables = block_tables.const_data_ptr<int32_t>();
    step.table_stride = block_tables.stride(0);
    return step;
  }
};

Cache cache_of(const Tensor& caches, int block_size) {
  HEADRACE_CHECK(caches.dim() == 4 && caches.is_contiguous(),
                 "A cache is [layers, 2 x kv_heads, slots, head_dim].");
  return {caches.data_ptr(), caches.stride(0), caches.stride(1), block_size};
}

class PyDecoder {
 public:
  PyDecoder(const py::dict& shape, const Tensor& embedding, const Tensor& final_norm,
            const std::vector<std::pair<Tensor, Tensor>>& ropes, const py::list& layers,
            const std::string& instruction_set)
      : kernels_(kernels_named(instruction_set)) {
    model_.type = type_of(embedding);
    model_.hidden_size = shape["hidden_size"].cast<int>();
    model_.intermediate_size = shape["intermediate_size"].cast<int>();
    model_.num_heads = shape["num_heads"].cast<int>();
    model_.num_kv_heads = shape["num_kv_heads"].cast<int>();
    model_.head_dim = shape["head_dim"].cast<int>();
    model_.eps = shape["eps"].cast<float>();
    model_.embedding_scale = shape["embedding_scale"].cast<float>();
    model_.logit_soft_cap = shape["logit_soft_cap"].cast<float>();
    model_.activation =
        shape["activation"].cast<std::string>() == "silu" ? Activation::kSilu : Activation::kGelu;
    HEADRACE_CHECK(model_.head_dim % 2 == 0 && model_.head_dim <= 1024,
                   "head_dim must be even and at most 1024, not ", model_.head_dim, ".");
    model_.embedding = keep(embedding).const_data_ptr();
    model_.final_norm = norm(final_norm, model_.hidden_size);
    for (const auto& [cos, sin] : ropes)
      model_.ropes.push_back({keep(cos.to(at::kFloat).contiguous()).const_data_ptr<float>(),
                              keep(sin.to(at::kFloat).contiguous()).const_data_ptr<float>()});
    for (const auto& item : layers) model_.layers.push_back(layer(item.cast<py::dict>()));
    decoder_.reset(kernels_.new_decoder(model_));
  }

  void begin(const StepTensors& rows, const Tensor& caches, int block_size) {
    const Step step = taken(rows, caches, block_size);
    const py::gil_scoped_release unlocked;
    decoder_->prepare(team().size(), step);
    team().run([&](Worker& worker) { decoder_->begin(worker); });
  }

  // This rank's part of what half a layer adds, [tokens, hidden_size] float32.
  Tensor half(int index) {
    const py::gil_scoped_release unlocked;
    team().run([&](Worker& worker) { run_half(worker, index); });
    const Floats part = decoder_->part();
    return at::from_blob(part.data, {num_tokens_, model_.hidden_size}, {part.stride, 1}).clone();
  }

  void add(int index, const Tensor& sum) {
    const Floats part = decoder_->part();
    at::from_blob(part.data, {num_tokens_, model_.hidden_size}, {part.stride, 1}).copy_(sum);
    const py::gil_scoped_release unlocked;
    team().run([&](Worker& worker) { decoder_->add_part(worker, index); });
  }

  std::pair<Tensor, Tensor> end() {
    auto found = outcome();
    const py::gil_scoped_release unlocked;
    team().run([&](Worker& worker) { end(worker, found); });
    return found;
  }

  // All of a step.
  std::pair<Tensor, Tensor> run(const StepTensors& rows, const Tensor& caches, int block_size) {
    const Step step = taken(rows, caches, block_size);
    auto found = outcome();
    const py::gil_scoped_release unlocked;
    decoder_->prepare(team().size(), step);
    team().run([&](Worker& worker) {
      decoder_->begin(worker);
      for (int layer = 0; layer < (int)model_.layers.size(); ++layer)
        for (int block = 0; block < decoder_->num_blocks(); ++block) {
          decoder_->attention(worker, layer, block, cache_, false);
          decoder_->mlp(worker, layer, block, false);
        }
      end(worker, found);
    });
    return found;
  }

  // Scores [rows, vocabulary] float32 of some rows of hidden states; they last until the next call.
  Tensor logits(const PackedLinear& head, const Tensor& hidden, const Tensor& rows) {
    const int64_t num_rows = rows.numel(), size = head.linear.num_outputs;
    HEADRACE_CHECK(type_of(hidden) == model_.type, "Hidden states must be of the model's type.");
    numbers<char>(hidden, hidden.size(0) * model_.hidden_size, "hidden");
    const int64_t* chosen = int64s(rows, num_rows, "rows");
    for (int64_t row = 0; row < num_rows; ++row)
      HEADRACE_CHECK(chosen[row] >= 0 && chosen[row] < hidden.size(0), "There is no row ",
                     chosen[row], " of hidden states.");
    if (!logits_.defined() || logits_.size(0) < num_rows || logits_.size(1) != size)
      logits_ = large_zeros({num_rows, size}, at::kFloat);
    Tensor found = logits_.narrow(0, 0, num_rows);
    const py::gil_scoped_release unlocked;
    decoder_->prepare_logits((int)num_rows);
    team().run([&](Worker& worker) {
      decoder_->logits(worker, head.linear, hidden.const_data_ptr(), chosen, (int)num_rows,
                       found.data_ptr<float>());
    });
    return found;
  }

  // Attention of the only layer, for tests: [tokens, heads x head_dim].
  Tensor attention(const Tensor& qkv, const StepTensors& rows, const Tensor& caches,
                   int block_size) {
    const Step step = rows.step();
    const int width = model_.num_heads * model_.head_dim;
    const int64_t all = width + 2 * model_.num_kv_heads * model_.head_dim;
    const Tensor out = at::empty({step.num_tokens, width}, caches.options());
    kernels_.attention(team(), model_, step, cache_of(caches, block_size),
                       numbers<float>(qkv, step.num_tokens * all, "qkv"), out.data_ptr());
    return out;
  }

 private:
  const Tensor& keep(const Tensor& tensor) { return kept_.emplace_back(tensor); }

  const float* norm(const Tensor& weight, int64_t size) {
    const Tensor padded = at::zeros({(size + 63) / 64 * 64});
    padded.narrow(0, 0, size).copy_(weight.flatten());
    return keep(padded).const_data_ptr<float>();
  }

  Layer layer(const py::dict& told) {
    const auto norm_if = [&](const char* name, int64_t size) -> const float* {
      const auto weight = told[name].cast<std::optional<Tensor>>();
      return weight.has_value() ? norm(*weight, size) : nullptr;
    };
    const auto linear = [&](const char* name) {
      const auto packed = told[name].cast<std::shared_ptr<PackedLinear>>();
      linears_.push_back(packed);
      return packed->linear;
    };
    Layer layer;
    layer.input_norm = norm_if("input_norm", model_.hidden_size);
    layer.qkv = linear("qkv");
    layer.query_norm = norm_if("query_norm", model_.head_dim);
    layer.key_norm = norm_if("key_norm", model_.head_dim);
    layer.attention_out = linear("attention_out");
    layer.attention_out_norm = norm_if("attention_out_norm", model_.hidden_size);
    layer.mlp_norm = norm_if("mlp_norm", model_.hidden_size);
    layer.gate_up = linear("gate_up");
    layer.down = linear("down");
    layer.mlp_out_norm = norm_if("mlp_out_norm", model_.hidden_size);
    layer.scale = told["scale"].cast<float>();
    layer.window = told["window"].cast<int>();
    layer.soft_cap = told["soft_cap"].cast<float>();
    layer.rope = told["rope"].cast<int>();
    return layer;
  }

  // The step, whose tensors are kept until the next.
  Step taken(const StepTensors& rows, const Tensor& caches, int block_size) {
    rows_ = rows;
    caches_ = caches;
    cache_ = cache_of(caches, block_size);
    num_tokens_ = rows_.token_ids.numel();
    return rows_.step();
  }

  void run_half(Worker& worker, int half) {
    for (int block = 0; block < decoder_->num_blocks(); ++block)
      if (half % 2 == 0)
        decoder_->attention(worker, half / 2, block, cache_, true);
      else
        decoder_->mlp(worker, half / 2, block, true);
  }

  std::pair<Tensor, Tensor> outcome() const {
    const auto dtype = model_.type == Type::kFloat32 ? at::kFloat : at::kBFloat16;
    return {at::empty({num_tokens_, model_.hidden_size}, at::dtype(dtype)),
            at::empty({num_tokens_}, at::dtype(at::kBool))};
  }

  void end(Worker& worker, std::pair<Tensor, Tensor>& found) {
    decoder_->end(worker, found.first.data_ptr(), (uint8_t*)found.second.data_ptr());
  }

  const Kernels& kernels_;
  Model model_;
  std::vector<Tensor> kept_;
  std::vector<std::shared_ptr<PackedLinear>> linears_;
  std::unique_ptr<Decoder> decoder_;
  StepTensors rows_;
  Tensor caches_, logits_;
  Cache cache_;
  int64_t num_tokens_ = 0;
};

Tensor linear(const PackedLinear& packed, const Tensor& x, const std::string& instruction_set) {
  const Linear& linear = packed.linear;
  const int64_t num_rows = x.size(0);
  const void* rows = numbers<char>(x, num_rows * linear.num_inputs, "x");
  const Tensor y = at::empty({num_rows, linear.num_outputs});
  kernels_named(instruction_set)
      .linear(team(), type_of(x), linear, rows, (int)num_rows, y.data_ptr<float>());
  return y;
}

// The fields of kernels.reference.sample.RowSettings, in their order.
Tensor sample(const Tensor& scores, const std::vector<Tensor>& settings,
              const std::string& instruction_set) {
  const int64_t num_rows = scores.size(0), size = scores.size(1);
  HEADRACE_CHECK(scores.scalar_type() == at::kFloat, "Scores must be float32.");
  HEADRACE_CHECK(settings.size() == 7, "There are seven settings, not ", settings.size(), ".");
  const Choices choices{numbers<float>(settings[0], num_rows, "temperature"),
                        int64s(settings[1], num_rows, "top_k"),
                        numbers<float>(settings[2], num_rows, "top_p"),
                        numbers<float>(settings[3], num_rows, "min_p"),
                        int64s(settings[4], num_rows, "seed"),
                        int64s(settings[5], num_rows, "choice"),
                        int64s(settings[6], num_rows, "position")};
  const float* rows = numbers<float>(scores, num_rows * size, "scores");
  const Tensor token_ids = at::empty({num_rows}, at::dtype(at::kLong));
  const Kernels& kernels = kernels_named(instruction_set);
  const py::gil_scoped_release unlocked;
  team().run([&](Worker& worker) {
    kernels.sample(worker, rows, (int)num_rows, size, choices, token_ids.data_ptr<int64_t>());
  });
  return token_ids;
}

void wipe(const Tensor& caches, int block_size, const Tensor& slots) {
  const Cache cache = cache_of(caches, block_size);
  kernels_named("").wipe(type_of(caches), cache, (int)caches.size(0), (int)caches.size(1),
                         (int)caches.size(3), int64s(slots, slots.numel(), "slots"),
                         (int)slots.numel());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("instruction_sets", &instruction_sets);
  m.def("linear", &linear, py::arg("packed"), py::arg("x"), py::arg("instruction_set") = "");
  m.def("sample", &sample, py::arg("scores"), py::arg("settings"),
        py::arg("instruction_set") = "");
  m.def("wipe", &wipe, py::arg("caches"), py::arg("block_size"), py::arg("slots"));
  m.def("large_zeros", &large_zeros_like, py::arg("sizes"), py::arg("like"));
  py::class_<PackedLinear, std::shared_ptr<PackedLinear>>(m, "PackedLinear")
      .def(py::init<const Tensor&, const std::optional<Tensor>&, const std::string&, bool>(),
           py::arg("weight"), py::arg("bias"), py::arg("weight_type"), py::arg("is_gated") = false);
  py::class_<StepTensors>(m, "Step")
      .def(py::init<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(), py::arg("token_ids"),
           py::arg("positions"), py::arg("slots"), py::arg("starts"), py::arg("offsets"),
           py::arg("block_tables"));
  py::class_<PyDecoder>(m, "Decoder")
      .def(py::init<const py::dict&, const Tensor&, const Tensor&,
                    const std::vector<std::pair<Tensor, Tensor>>&, const py::list&,
                    const std::string&>(),
           py::arg("shape"), py::arg("embedding"), py::arg("final_norm"), py::arg("ropes"),
           py::arg("layers"), py::arg("instruction_set") = "")
      .def("run", &PyDecoder::run, py::arg("step"), py::arg("caches"), py::arg("block_size"))
      .def("begin", &PyDecoder::begin, py::arg("step"), py::arg("caches"), py::arg("block_size"))
      .def("half", &PyDecoder::half, py::arg("index"))
      .def("add", &PyDecoder::add, py::arg("index"), py::arg("total"))
      .def("end", py::overload_cast<>(&PyDecoder::end))
      .def("logits", &PyDecoder::logits, py::arg("head"), py::arg("hidden"), py::arg("rows"))
      .def("attention", &PyDecoder::attention, py::arg("qkv"), py::arg("step"), py::arg("caches"),
           py::arg("block_size"));
}

}  // namespace headrace
