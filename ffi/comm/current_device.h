// The CUDA device of this thread, as it was again at the end of the scope.
#pragma once

#include <cuda_runtime.h>

namespace musejax::comm {

class CurrentDevice {
 public:
  CurrentDevice() { cudaGetDevice(&device_); }
  ~CurrentDevice() { cudaSetDevice(device_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int device_ = 0;
};

}  // namespace musejax::comm
