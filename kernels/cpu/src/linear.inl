// y = x W^T + b for any number of rows, with weights packed in panels of 32 outputs.
//
//   panels [outputs / 32][inputs / group][32][group]      group: 1 float32, 2 bfloat16, 4 int8
//
// A tile of up to 12 rows by 32 outputs is added up in registers over all inputs, in the order of
// the inputs whatever the size of the tile: a row's outputs do not depend on its company, to the
// last bit. Bytes moved: the weights once (per 240 rows), inputs and outputs once.
//
// In int8 the inputs have a scale for every 64 of them: one outlier takes digits from its
// neighbours only. So sums are whole numbers over 64 inputs, and floats from there on.
//
// What is done with a finished tile is given as `finish(row, panel, first 16, second 16)`.

namespace headrace::KERNELS_OF {

// Rows that go through all panels together: their inputs stay in the second cache.
constexpr int kRowBlock = 240;

struct Inputs {
  const void* data = nullptr;     // [rows, stride] of Dot<Weight>::Input
  int64_t stride = 0;             // in elements; what is beyond num_inputs is zero
  const float* scales = nullptr;  // int8: [rows, scale_stride], one per 64 inputs
  int64_t scale_stride = 0;
};

// Rows of a tile of one panel. int8 keeps two kinds of sums.
template <class Weight>
constexpr int kMaxRows = std::is_same_v<Weight, int8_t> ? kMaxTileRows / 2 : kMaxTileRows;

template <class Weight, int kRows, int kPanels, class Finish>
void tile(const Linear& linear, const Inputs& inputs, int row, int panel, const char* next,
          const Finish& finish) {
  using D = Dot<Weight>;
  constexpr int kVecs = 2 * kPanels;
  const int num_groups = (linear.num_inputs + D::kGroup - 1) / D::kGroup;
  const int64_t panel_size = (int64_t)num_groups * kPanel * D::kGroup;
  const Weight* weights = (const Weight*)linear.weights + panel * panel_size;
  const typename D::Input* a = (const typename D::Input*)inputs.data + row * inputs.stride;
  typename D::Sums sums[kRows * kVecs];
  // Adds the products of inputs' groups `from` .. `to` - 1 to the sums.
  const auto add_up = [&](int from, int to) HEADRACE_INLINE {
    for (int g = from; g < to; ++g) {
      typename D::Vec w[kVecs];
      unroll<kVecs>([&](auto v) HEADRACE_INLINE {
        w[v] = D::load(weights + (v / 2) * panel_size + (int64_t)(2 * g + v % 2) * 16 * D::kGroup);
      });
      if (next != nullptr) {
        prefetch(next + (int64_t)g * 128);
        prefetch(next + (int64_t)g * 128 + 64);
      }
      unroll<kRows>([&](auto r) HEADRACE_INLINE {
        const typename D::Vec x = D::broadcast(a + r * inputs.stride + g * D::kGroup);
        unroll<kVecs>([&](auto v) HEADRACE_INLINE {
          sums[r * kVecs + v] = D::dot(sums[r * kVecs + v], x, w[v]);
        });
      });
    }
  };
  F16 floats[kRows * kVecs];
  if constexpr (std::is_same_v<Weight, int8_t>) {
    unroll<kRows * kVecs>([&](auto i) HEADRACE_INLINE { floats[i] = zero(); });
    constexpr int kTogether = kScaled / D::kGroup;
    const int num_scales = (num_groups + kTogether - 1) / kTogether;
    for (int k = 0; k < num_scales; ++k) {
      // What the shift of the inputs by 128 adds is taken off beforehand.
      unroll<kVecs>([&](auto v) HEADRACE_INLINE {
        const int64_t entry = ((int64_t)(panel + v / 2) * num_scales + k) * kPanel + v % 2 * 16;
        const typename D::Sums start = D::negative(linear.zero_sums + entry);
        unroll<kRows>([&](auto r) HEADRACE_INLINE { sums[r * kVecs + v] = start; });
      });
      add_up(k * kTogether, std::min(num_groups, (k + 1) * kTogether));
      unroll<kRows>([&](auto r) HEADRACE_INLINE {
        const F16 scale = set1(inputs.scales[(row + r) * inputs.scale_stride + k]);
        unroll<kVecs>([&](auto v) HEADRACE_INLINE {
          floats[r * kVecs + v] = fma(D::floats(sums[r * kVecs + v]), scale, floats[r * kVecs + v]);
        });
      });
    }
    unroll<kPanels>([&](auto p) HEADRACE_INLINE {
      const float* scales = linear.scales + (panel + p) * kPanel;
      const F16 low = load(scales), high = load(scales + 16);
      unroll<kRows>([&](auto r) HEADRACE_INLINE {
        floats[r * kVecs + 2 * p] = mul(floats[r * kVecs + 2 * p], low);
        floats[r * kVecs + 2 * p + 1] = mul(floats[r * kVecs + 2 * p + 1], high);
      });
    });
  } else {
    unroll<kRows * kVecs>([&](auto i) HEADRACE_INLINE { sums[i] = D::none(); });
    add_up(0, num_groups);
    unroll<kRows * kVecs>([&](auto i) HEADRACE_INLINE { floats[i] = sums[i]; });
  }
  unroll<kRows>([&](auto r) HEADRACE_INLINE {
    unroll<kPanels>([&](auto p) HEADRACE_INLINE {
      const int output = (panel + p) * kPanel;
      F16 low = floats[r * kVecs + 2 * p], high = floats[r * kVecs + 2 * p + 1];
      if (linear.bias != nullptr) {
        low = add(low, load(linear.bias + output));
        high = add(high, load(linear.bias + output + 16));
      }
      finish(row + r, panel + p, low, high);
    });
  });
}

template <class Weight, int kPanels, class Finish>
void tile_of(int num_rows, const Linear& linear, const Inputs& inputs, int row, int panel,
             const char* next, const Finish& finish) {
  switch (num_rows) {
#define HEADRACE_ROWS(n)                                                                  \
  case n:                                                                                 \
    if constexpr (n * kPanels <= kMaxRows<Weight>)                                        \
      return tile<Weight, n, kPanels>(linear, inputs, row, panel, next, finish);          \
    break;
    HEADRACE_ROWS(1)
    HEADRACE_ROWS(2)
    HEADRACE_ROWS(3)
    HEADRACE_ROWS(4)
    HEADRACE_ROWS(5)
    HEADRACE_ROWS(6)
    HEADRACE_ROWS(7)
    HEADRACE_ROWS(8)
    HEADRACE_ROWS(9)
    HEADRACE_ROWS(10)
    HEADRACE_ROWS(11)
    HEADRACE_ROWS(12)
#undef HEADRACE_ROWS
  }
}

// Few rows: the weights' way from memory is what takes time. Several panels at once keep enough
// sums going to hide how long one takes, and each member reads a run of its own.
template <class Weight, class Finish>
void linear_few(Worker& worker, const Linear& linear, const Inputs& inputs, int num_rows,
                const Finish& finish) {
  const int num_pieces = worker.team_size();
  worker.share(num_pieces, [&](int piece) {
    int panel = (int64_t)linear.num_panels * piece / num_pieces;
    const int end = (int64_t)linear.num_panels * (piece + 1) / num_pieces;
    if (num_rows * 4 <= kMaxRows<Weight>)
      for (; panel + 4 <= end; panel += 4)
        tile_of<Weight, 4>(num_rows, linear, inputs, 0, panel, nullptr, finish);
    if (num_rows * 2 <= kMaxRows<Weight>)
      for (; panel + 2 <= end; panel += 2)
        tile_of<Weight, 2>(num_rows, linear, inputs, 0, panel, nullptr, finish);
    for (; panel < end; ++panel)
      tile_of<Weight, 1>(num_rows, linear, inputs, 0, panel, nullptr, finish);
  });
}

template <class Weight, class Finish>
void linear_many(Worker& worker, const Linear& linear, const Inputs& inputs, int num_rows,
                 const Finish& finish) {
  using D = Dot<Weight>;
  const int num_groups = (linear.num_inputs + D::kGroup - 1) / D::kGroup;
  const int64_t panel_bytes = (int64_t)num_groups * kPanel * D::kGroup * sizeof(Weight);
  const int num_blocks = (num_rows + kRowBlock - 1) / kRowBlock;
  worker.share(num_blocks * linear.num_panels, [&](int piece) {
    const int block = piece / linear.num_panels, panel = piece % linear.num_panels;
    const int begin = (int64_t)num_rows * block / num_blocks;
    const int end = (int64_t)num_rows * (block + 1) / num_blocks;
    const int num_tiles = (end - begin + kMaxRows<Weight> - 1) / kMaxRows<Weight>;
    const int after = panel + worker.team_size();
    const char* next = after < linear.num_panels
                           ? (const char*)linear.weights + after * panel_bytes
                           : nullptr;
    for (int t = 0; t < num_tiles; ++t) {
      const int row = begin + (end - begin) * t / num_tiles;
      const int stop = begin + (end - begin) * (t + 1) / num_tiles;
      tile_of<Weight, 1>(stop - row, linear, inputs, row, panel, t == 0 ? next : nullptr, finish);
    }
  });
}

template <class Finish>
void linear_rows(Worker& worker, const Linear& linear, const Inputs& inputs, int num_rows,
                 const Finish& finish) {
  const auto run = [&](auto weight) {
    using Weight = decltype(weight);
    if (num_rows * 2 <= kMaxRows<Weight>)
      linear_few<Weight>(worker, linear, inputs, num_rows, finish);
    else
      linear_many<Weight>(worker, linear, inputs, num_rows, finish);
  };
  switch (linear.type) {
    case WeightType::kFloat32:
      return run(float{});
    case WeightType::kBfloat16:
      return run(bf16{});
    case WeightType::kInt8:
      return run(int8_t{});
  }
}

}  // namespace headrace::KERNELS_OF
