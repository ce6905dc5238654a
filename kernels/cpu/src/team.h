// A fixed team of threads that goes through a step together.
//
// A step is hundreds of short stages. Starting threads, or even waking them, costs more than many
// a stage, so a step is one job: all members run the same function, take pieces of each stage from
// one counter, and meet at a barrier before the next. A member that loses its core for a while
// holds up only the piece in its hands; the others take the rest.
//
// Between jobs members spin for some microseconds, because the next step usually follows at once,
// and then sleep, because other processes need the cores.

#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

class Team;

// One member's view of the job that it takes part in.
class Worker {
 public:
  Worker(Team& team, int id) : team_(team), id_(id) {}
  int id() const { return id_; }
  int team_size() const;
  // Calls work(i) for pieces 0 .. count - 1, shared between the members; all are done on return.
  template <class Work>
  void share(int count, Work&& work);
  // Waits until all members are here.
  void meet();

 private:
  Team& team_;
  int id_;
};

class Team {
 public:
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // Runs job(worker) on every member, the caller being the first; one job at a time.
  void run(const std::function<void(Worker&)>& job);

 private:
  friend class Worker;
  void member(int id);
  void meet();

  const int size_;
  std::mutex one_job_;
  const std::function<void(Worker&)>* job_ = nullptr;
  std::vector<std::thread> threads_;
  std::mutex asleep_;
  std::condition_variable wake_;
  alignas(64) std::atomic<unsigned> num_jobs_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<unsigned> num_meetings_{0};
  alignas(64) std::atomic<int> next_piece_{0};
  bool is_over_ = false;
};

inline int Worker::team_size() const { return team_.size(); }
inline void Worker::meet() { team_.meet(); }

template <class Work>
void Worker::share(int count, Work&& work) {
  for (;;) {
    const int piece = team_.next_piece_.fetch_add(1, std::memory_order_relaxed);
    if (piece >= count) break;
    work(piece);
  }
  team_.meet();
}

}  // namespace headrace
