#include "comm/peers.h"

#include <cuda_runtime.h>

#include <set>
#include <stdexcept>
#include <string>

#include "comm/current_device.h"

namespace musejax::comm {

void RequirePeers(const std::string& operation, const std::vector<int>& devices, int64_t most) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess)
    throw std::runtime_error(operation + ": cudaGetDeviceCount failed: " + cudaGetErrorString(error));
  const std::set<int> different(devices.begin(), devices.end());
  if (devices.size() < 2 || int64_t(devices.size()) > most || different.size() != devices.size() ||
      *different.begin() < 0 || *different.rbegin() >= count)
    throw std::invalid_argument(operation + ": expected 2 to " + std::to_string(most) + " different GPUs of the " +
                                std::to_string(count) + " here (argument devices)");
}

void AllowPeers(const std::vector<int>& devices) {
  const CurrentDevice before;
  for (const int from : devices) {
    for (const int to : devices) {
      if (from == to) continue;
      const std::string pair = "from GPU " + std::to_string(from) + " to GPU " + std::to_string(to);
      int can = 0;
      cudaError_t error = cudaDeviceCanAccessPeer(&can, from, to);
      if (error == cudaSuccess && !can)
        throw std::runtime_error("peers: expected GPUs that write each other's memory (NVLink, or P2P over PCIe), got "
                                 "no peer access " + pair + ": use one device, or implementation reference");
      if (error == cudaSuccess) error = cudaSetDevice(from);
      if (error == cudaSuccess) error = cudaDeviceEnablePeerAccess(to, 0);
      if (error == cudaErrorPeerAccessAlreadyEnabled) {  // by XLA
        cudaGetLastError();
        error = cudaSuccess;
      }
      if (error != cudaSuccess)
        throw std::runtime_error("peers: access " + pair + " failed: " + cudaGetErrorString(error));
    }
  }
}

}  // namespace musejax::comm
