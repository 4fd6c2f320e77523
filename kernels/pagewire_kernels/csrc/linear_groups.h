// What linears share whose inputs are rounded to 16 bits and whose depth goes in groups of numbers
// that one instruction multiplies and adds: pairs (linear_pairs.h) or tiles (linear_*_tiles.cpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "linear.h"
#include "team.h"

namespace pagewire {
namespace {

constexpr int64_t kParallelInputs = 1 << 14;  // fewer are rounded by one thread
// Elements more than needed between rows, which would meet in the same sets of the cache if they
// lay a power of two apart; and room for whole vectors.
constexpr int64_t kSpread = 32;

// Begins on a cache line: to load tiles from between lines takes half as long again.
template <typename T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <typename U>
  LineAllocator(const LineAllocator<U>&) {}

  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kLine));
  }
  void deallocate(T* memory, size_t) { ::operator delete(memory, kLine); }
  bool operator==(const LineAllocator&) const = default;
};

template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

// The depth of a weight in units, cut into stretches of which each has one sum and one scale:
// near-equal ones, since each costs something.
struct Stretches {
  int64_t depth = 0, units = 0, count = 0, length = 0;

  Stretches() = default;
  Stretches(int64_t depth, int64_t unit, int64_t most_units)
      : depth(depth),
        units((depth + unit - 1) / unit),
        count((units + most_units - 1) / most_units),
        length((units + count - 1) / std::max<int64_t>(1, count)) {}
};

// For each kTokensAtOnce tokens: prepare(part) makes room, round(token, input) is called for each
// token, and work(part, pieces, thread) once on each thread.
template <typename Prepare, typename Round, typename Work>
void multiply_parts(const Linear& linear, int64_t num_threads, int64_t panels_together,
                    const Prepare& prepare, const Round& round, const Work& work) {
  for (int64_t first = 0; first < linear.num_tokens; first += kTokensAtOnce) {
    Linear part = linear;
    part.num_tokens = std::min(kTokensAtOnce, linear.num_tokens - first);
    part.input += first * part.input_stride;
    part.output += first * part.output_stride;
    prepare(part);
    const bool small = part.num_tokens * part.depth < kParallelInputs;
    split_evenly(part.num_tokens, small ? 1 : num_threads,
                 [&](int64_t token) { round(token, part.input + token * part.input_stride); });
    Pieces pieces(part, num_threads, panels_together);
    Team::instance().run(pieces.threads(), [&](int thread) { work(part, pieces, thread); });
  }
}

}  // namespace
}  // namespace pagewire
