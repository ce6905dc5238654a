// Loops over registers.

#pragma once

#include <type_traits>
#include <utility>

namespace headrace {

// Calls work(0) .. work(kCount - 1) with numbers that are known when compiling, so that an array
// indexed by them can live in registers; a loop is unrolled too late for that.
template <int kCount, class Work>
__attribute__((always_inline)) inline void unroll(Work&& work) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (work(std::integral_constant<int, kIndex>{}), ...);
  }
  (std::make_integer_sequence<int, kCount>{});
}

}  // namespace headrace
