// Threads of our own for the phases: XLA's pool may be busy with the very program that waits for us. The calling thread
// works too, so a pool of one has no threads. Tasks write disjoint results, so bits do not depend on the thread count.
#pragma once

#include <cstdint>
#include <functional>

namespace musejax {

// Runs task(0) .. task(n - 1), in any order, and returns when all are done. Runs them in the calling thread alone when
// `cost` (bytes read by all tasks together) is too small to share, or when another caller has the threads.
void ParallelFor(int64_t n, int64_t cost, const std::function<void(int64_t)>& task);

// Threads used from the next call on, the calling one included; 0: one per core this process may use.
void SetThreads(int n);
int Threads();

// Denormals count on the bitwise path, and XLA calls handlers with them flushed: IEEE rules while this lives.
class IeeeArithmetic {
 public:
  IeeeArithmetic();
  ~IeeeArithmetic();

 private:
  unsigned saved_;
};

}  // namespace musejax
