// Threads that share a piece of work. A step of a small model is some hundred short products with a
// wait for all threads after each: here that costs about a microsecond, where OpenMP's regions,
// whose threads may sleep as soon as a process has more of them than CPUs, took up to fifty.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace pagewire {

// The helpers of one caller at a time. They outlive their calls, and sleep when none comes.
class Team {
 public:
  static Team& instance();

  // Calls work(index) for each index in [0, count), each on a thread of its own, and returns when
  // all are done. `work` must not throw. One by one where another caller has the helpers.
  template <typename Work>
  void run(int count, const Work& work) {
    const auto call = [](const void* context, int index) {
      (*static_cast<const Work*>(context))(index);
    };
    if (count > 1 && share(count, call, &work)) return;
    for (int i = 0; i < count; ++i) work(i);
  }

 private:
  using Call = void (*)(const void* context, int index);
  static constexpr int kMostHelpers = 1023;

  struct alignas(64) Helper {
    std::atomic<uint32_t> calls{0};
  };

  bool share(int count, Call call, const void* context);
  bool gather(int helpers);
  void call_all(int helpers, Call call, const void* context);
  void help(int index);

  std::atomic_flag busy_;
  Helper helpers_[kMostHelpers];
  int num_helpers_ = 0;
  Call call_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<int32_t> unfinished_{0};
};

// Calls work(i) for each i in [0, count); threads take the next one when they are done.
template <typename Work>
void share_out(int64_t count, int64_t num_threads, const Work& work) {
  std::atomic<int64_t> next{0};
  const int threads = static_cast<int>(count < num_threads ? count : num_threads);
  Team::instance().run(threads, [&](int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
  });
}

// The same where all take equally long: a stretch for each thread.
template <typename Work>
void split_evenly(int64_t count, int64_t num_threads, const Work& work) {
  const int64_t threads = count < num_threads ? count : num_threads;
  Team::instance().run(static_cast<int>(threads), [&](int index) {
    for (int64_t i = count * index / threads; i < count * (index + 1) / threads; ++i) work(i);
  });
}

}  // namespace pagewire
