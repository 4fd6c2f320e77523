#include "team.h"

#include <chrono>
#include <exception>

#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__unix__)
#include <pthread.h>
#endif

namespace pagewire {
namespace {

using Clock = std::chrono::steady_clock;

// For so long a thread looks for the next call, or the end of this one, before it sleeps: longer
// than what lies between the products of a layer, shorter than what lies between steps.
constexpr auto kPatience = std::chrono::microseconds(100);
constexpr int kLooksPerClock = 64;

inline void relax() {
#if defined(__SSE2__)
  _mm_pause();
#endif
}

// Waits until `value` is not `old` any more.
template <typename T>
void await_change(const std::atomic<T>& value, T old) {
  const auto end = Clock::now() + kPatience;
  do {
    for (int i = 0; i < kLooksPerClock; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
  } while (Clock::now() < end);
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team& Team::instance() {
  // Never destroyed: its threads may look at it for as long as the process lives. A forked process
  // has none of them, and gets a team of its own.
  static Team* team = [] {
#if defined(__unix__)
    pthread_atfork(nullptr, nullptr, [] { team = new Team; });
#endif
    return new Team;
  }();
  return *team;
}

bool Team::share(int count, Call call, const void* context) {
  if (busy_.test_and_set(std::memory_order_acquire)) return false;
  const bool ready = gather(count - 1);
  if (ready) call_all(count - 1, call, context);
  busy_.clear(std::memory_order_release);
  return ready;
}

bool Team::gather(int helpers) {
  try {
    for (; num_helpers_ < helpers; ++num_helpers_) {
      if (num_helpers_ == kMostHelpers) return false;
      std::thread(&Team::help, this, num_helpers_).detach();
    }
    return true;
  } catch (const std::exception&) {
    return false;  // no more threads are to be had
  }
}

void Team::call_all(int helpers, Call call, const void* context) {
  call_ = call;
  context_ = context;
  unfinished_.store(helpers, std::memory_order_relaxed);
  for (int i = 0; i < helpers; ++i) {
    helpers_[i].calls.fetch_add(1, std::memory_order_release);
    helpers_[i].calls.notify_one();
  }
  call(context, 0);
  for (int32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) {
    await_change(unfinished_, left);
  }
}

void Team::help(int index) {
  std::atomic<uint32_t>& calls = helpers_[index].calls;
  for (uint32_t answered = 0;; ++answered) {
    await_change(calls, answered);
    call_(context_, index + 1);
    if (unfinished_.fetch_sub(1, std::memory_order_release) == 1) unfinished_.notify_one();
  }
}

}  // namespace pagewire
