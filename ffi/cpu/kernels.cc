// Fragments, and which instruction set runs.
#include "cpu/kernels.h"

#include <atomic>

namespace musejax {

namespace scalar {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#endif

namespace {

const Kernels* Find(std::string_view name) {
  const bool any = name.empty();
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("fma");
  const bool has512 = fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has2 = fma && __builtin_cpu_supports("avx2");
  if (has512 && (any || name == avx512::kKernels.name)) return &avx512::kKernels;
  if (has2 && (any || name == avx2::kKernels.name)) return &avx2::kKernels;
#endif
  if (any || name == scalar::kKernels.name) return &scalar::kKernels;
  return nullptr;
}

std::atomic<const Kernels*> active{nullptr};

}  // namespace

const Kernels& ActiveKernels() {
  const Kernels* found = active.load(std::memory_order_acquire);
  if (!found) active.store(found = Find(""), std::memory_order_release);
  return *found;
}

bool SelectKernels(std::string_view name) {
  const Kernels* found = Find(name);
  if (found) active.store(found, std::memory_order_release);
  return found != nullptr;
}

void MakeDenseFragment(const float* x, int64_t k, float* fragment) {
  for (int64_t first = 0; first < k; first += 16, fragment += 32)
    for (int t = 0; t < 4; ++t)
      for (int r = 0; r < 4; ++r)
        for (int odd = 0; odd < 2; ++odd) fragment[16 * odd + 4 * t + r] = x[first + 2 * t + r / 2 * 8 + odd];
}

void MakeNvfp4Fragment(const float* x, int64_t k, float* fragment) {
  for (int64_t first = 0; first < k; first += 64, fragment += 64)
    for (int i = 0; i < 4; ++i)
      for (int t = 0; t < 4; ++t)
        for (int step = 0; step < 4; ++step)
          fragment[16 * i + 4 * t + step] = x[first + 16 * step + 2 * t + i / 2 * 8 + i % 2];
}

}  // namespace musejax
