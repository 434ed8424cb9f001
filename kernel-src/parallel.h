// How the drivers use the caller's pool: ranges of work that the threads take one after another, and scratch memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <thread>

#include "kernels.h"

namespace layout_kernels {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Looks at a counter, some tens of microseconds, before a waiting thread offers its core to others.
constexpr int kSpins = 1 << 13;

// Calls body(task) for each task in [0, tasks). Threads take tasks as they finish, so a thread whose core is busy
// elsewhere does less; what a task computes does not depend on who runs it.
template <class Body>
void for_each_task(const Pool& pool, int64_t tasks, const Body& body) {
  int64_t workers = tasks < pool.threads ? tasks : pool.threads;
  if (workers <= 1) {
    for (int64_t t = 0; t < tasks; ++t) body(t);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t tasks;
    const Body* body;
  } shared;
  shared.tasks = tasks;
  shared.body = &body;
  pool.run(
      workers,
      [](int64_t, int64_t, void* context) {
        Shared& s = *static_cast<Shared*>(context);
        for (int64_t t = s.next++; t < s.tasks; t = s.next++) (*s.body)(t);
      },
      &shared);
}

// The tasks of one body, then those of another that needs all of the first, without leaving the pool in between: two
// short products of one row are some per cent faster for it. A thread waits for tasks only that another one is
// running.
template <class First, class Second>
void for_each_task_in_turn(const Pool& pool, int64_t tasks, const First& first, int64_t next_tasks,
                           const Second& second) {
  int64_t most = tasks > next_tasks ? tasks : next_tasks;
  int64_t workers = most < pool.threads ? most : pool.threads;
  if (workers <= 1) {
    for (int64_t t = 0; t < tasks; ++t) first(t);
    for (int64_t t = 0; t < next_tasks; ++t) second(t);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0}, next_second{0};
    std::atomic<bool> failed{false};
    int64_t tasks, next_tasks;
    const First* first;
    const Second* second;
  } shared;
  shared.tasks = tasks, shared.next_tasks = next_tasks;
  shared.first = &first, shared.second = &second;
  pool.run(
      workers,
      [](int64_t, int64_t, void* context) {
        Shared& s = *static_cast<Shared*>(context);
        for (int64_t t = s.next++; t < s.tasks; t = s.next++) {
          try {
            (*s.first)(t);
          } catch (...) {
            s.failed = true;  // or the others would wait for this task
            throw;
          }
          s.done.fetch_add(1, std::memory_order_release);
        }
        for (int spins = 0; s.done.load(std::memory_order_acquire) < s.tasks;) {
          if (s.failed) return;
          if (spins < kSpins) {
            ++spins;
          } else {
            std::this_thread::yield();
          }
        }
        for (int64_t t = s.next_second++; t < s.next_tasks; t = s.next_second++) (*s.second)(t);
      },
      &shared);
}

// Memory of one thread that is kept for the next call up to a limit, so that short calls do not pay for fresh pages.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  void* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, round_up(bytes, 64));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }
  void trim(int64_t keep) {
    if (size_ <= keep) return;
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace layout_kernels
