// Memory that runs out is told to the caller: an exception may leave neither a parallel region nor
// a function that C calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

namespace pagewire {

// Whether memory ran out for any thread of a region.
class OutOfMemory {
 public:
  template <typename Work>
  void watch(Work work) {
    try {
      work();
    } catch (const std::bad_alloc&) {
      happened_ = true;
    }
  }
  // After the region.
  void rethrow() const {
    if (happened_) throw std::bad_alloc();
  }

 private:
  std::atomic<bool> happened_{false};
};

// What a function tells C: 0, or 1 where memory ran out.
template <typename Work>
int32_t status_of(Work work) noexcept {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

inline void check(int32_t status) {
  if (status != 0) throw std::bad_alloc();
}

}  // namespace pagewire
