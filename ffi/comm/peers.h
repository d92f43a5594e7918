// Which GPUs of this process may write each other's memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace musejax::comm {

// Throws std::invalid_argument, "operation: expected ...", unless these are 2 to `most` different GPUs of this process.
void RequirePeers(const std::string& operation, const std::vector<int>& devices, int64_t most);

// From now on kernels of each device read and write memory of all others that cudaMalloc made.
// Throws std::runtime_error, naming the pair, where two devices have no peer access (NVLink, or PCIe with P2P).
void AllowPeers(const std::vector<int>& devices);

}  // namespace musejax::comm
