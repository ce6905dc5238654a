#include "team.h"

#include <sched.h>

namespace headrace {

namespace {

// About 30 microseconds of spinning before a member sleeps, and a few before it yields its core.
constexpr int kSpinsBeforeSleep = 2000;
constexpr int kSpinsBeforeYield = 4000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Team::Team(int size) : size_(size < 1 ? 1 : size) {
  for (int id = 1; id < size_; ++id) threads_.emplace_back([this, id] { member(id); });
}

Team::~Team() {
  {
    std::lock_guard<std::mutex> lock(asleep_);
    is_over_ = true;
    num_jobs_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(Worker&)>& job) {
  std::lock_guard<std::mutex> one(one_job_);
  job_ = &job;
  if (size_ > 1) {
    {
      std::lock_guard<std::mutex> lock(asleep_);
      num_jobs_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  Worker first(*this, 0);
  job(first);
  meet();
}

void Team::member(int id) {
  unsigned seen = 0;
  for (;;) {
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
      if (num_jobs_.load(std::memory_order_acquire) != seen) break;
      pause();
    }
    {
      std::unique_lock<std::mutex> lock(asleep_);
      wake_.wait(lock, [&] { return num_jobs_.load(std::memory_order_acquire) != seen; });
      ++seen;
      if (is_over_) return;
    }
    Worker worker(*this, id);
    (*job_)(worker);
    meet();
  }
}

void Team::meet() {
  if (size_ == 1) {
    next_piece_.store(0, std::memory_order_relaxed);
    return;
  }
  const unsigned meeting = num_meetings_.load(std::memory_order_relaxed);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    // The last to arrive prepares the next stage and opens the door.
    num_arrived_.store(0, std::memory_order_relaxed);
    next_piece_.store(0, std::memory_order_relaxed);
    num_meetings_.store(meeting + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; num_meetings_.load(std::memory_order_acquire) == meeting; ++spins) {
    pause();
    if (spins > kSpinsBeforeYield) sched_yield();
  }
}

}  // namespace headrace
