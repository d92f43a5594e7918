#include "cpu/thread_pool.h"

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace musejax {
namespace {

constexpr int64_t kLeastCost = 64 * 1024;
constexpr int kSpins = 4000;  // about 20 us: phases follow each other closely

inline void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

int Cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return std::max(1u, std::thread::hardware_concurrency());
}

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { Work(); });
  }
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      ++epoch_;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  int threads() const { return int(workers_.size()) + 1; }

  void Run(int64_t n, const std::function<void(int64_t)>& task) {
    {
      std::lock_guard lock(mutex_);
      task_ = &task, count_ = n, open_ = true;
      next_.store(0, std::memory_order_relaxed);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    Drain(n, task);
    {
      std::lock_guard lock(mutex_);
      open_ = false;  // who still sleeps is not waited for
    }
    while (inside_.load(std::memory_order_acquire) != 0) Pause();
  }

 private:
  void Drain(int64_t n, const std::function<void(int64_t)>& task) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < n;) task(i);
  }
  void Work() {
    IeeeArithmetic ieee;
    for (uint64_t seen = 0;;) {
      for (int i = 0; i < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++i) Pause();
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return epoch_.load(std::memory_order_relaxed) != seen; });
      seen = epoch_.load(std::memory_order_relaxed);
      if (stop_) return;
      if (!open_) continue;
      inside_.fetch_add(1, std::memory_order_relaxed);
      const int64_t n = count_;
      const std::function<void(int64_t)>& task = *task_;
      lock.unlock();
      Drain(n, task);
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};
  bool stop_ = false, open_ = false;
  const std::function<void(int64_t)>* task_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<int> inside_{0};
};

std::mutex pool_mutex;  // held while a caller uses the pool
std::unique_ptr<Pool>& ThePool() {
  static auto* pool = new std::unique_ptr<Pool>;  // never destroyed: threads must not outlive what they use at exit
  return *pool;
}
std::atomic<int> wanted{0};

Pool& PoolOf() {  // pool_mutex is held
  std::unique_ptr<Pool>& pool = ThePool();
  const int threads = Threads();
  if (!pool || pool->threads() != threads) pool = std::make_unique<Pool>(threads);
  return *pool;
}

}  // namespace

void ParallelFor(int64_t n, int64_t cost, const std::function<void(int64_t)>& task) {
  std::unique_lock lock(pool_mutex, std::defer_lock);
  if (n > 1 && cost >= kLeastCost && Threads() > 1 && lock.try_lock()) return PoolOf().Run(n, task);
  for (int64_t i = 0; i < n; ++i) task(i);
}

void SetThreads(int n) { wanted.store(n > 0 ? n : 0); }
int Threads() {
  static const int cores = Cores();
  const int n = wanted.load();
  return n ? n : cores;
}

#if defined(__x86_64__)
IeeeArithmetic::IeeeArithmetic() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0xE040u); }  // FTZ, DAZ, rounding: off
IeeeArithmetic::~IeeeArithmetic() { _mm_setcsr(saved_); }
#else
IeeeArithmetic::IeeeArithmetic() : saved_(0) {}
IeeeArithmetic::~IeeeArithmetic() = default;
#endif

}  // namespace musejax
