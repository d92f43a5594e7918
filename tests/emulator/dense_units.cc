// Units of the kernel's dense GEMMs, for tests.
#include <algorithm>

#include "layer/dense.cuh"

namespace {

using namespace musejax::layer;

template <typename S>
bool Put(int hidden, int top_k, int slices, int32_t* out) {
  if (hidden != S::kHidden || top_k != S::kTopK || slices != S::kSlicesHere) return false;
  std::copy(kDenseUnits<S>.begin(), kDenseUnits<S>.end(), out);
  return true;
}

}  // namespace

// Of one rank, in the order of enum Dense -> out [5]. False for sizes that are not listed here.
extern "C" bool DenseUnits(int hidden, int top_k, int slices, int32_t* out) {
  return Put<Sizes<128, 16, 8, 64, 128, 128, 16, 2, 8>>(hidden, top_k, slices, out) ||
         Put<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 1>>(hidden, top_k, slices, out) ||
         Put<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 2>>(hidden, top_k, slices, out) ||
         Put<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 4>>(hidden, top_k, slices, out) ||
         Put<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 8>>(hidden, top_k, slices, out) ||
         Put<Sizes<8192, 128, 16, 64, 4096, 4096, 256, 8, 1>>(hidden, top_k, slices, out) ||
         Put<Sizes<8192, 128, 16, 64, 4096, 4096, 256, 8, 2>>(hidden, top_k, slices, out) ||
         Put<Sizes<8192, 128, 16, 64, 4096, 4096, 256, 8, 4>>(hidden, top_k, slices, out) ||
         Put<Sizes<8192, 128, 16, 64, 4096, 4096, 256, 8, 8>>(hidden, top_k, slices, out);
}
