// `musejax bench limits`: what the GPU at hand can do at most and at best, measured by small kernels. Plain C++; the
// kernels are in limits_*.cu, one file a subject.
#pragma once

#include <string>
#include <vector>

namespace musejax::bench {

struct LimitRow {
  enum class Status { kOk, kFailed, kSkipped };  // failed: a check or a wait; skipped: cannot be measured here

  std::string name;                      // group.what, such as "hbm.steady"
  std::string what;                      // the same for people
  std::string unit;                      // "TB/s", "us", "GHz", or "wrong" for a count of wrong results
  double figure = 0, low = 0, high = 0;  // median, least and greatest of the repeats; 0 if not measured
  int repeats = 0;
  std::string design;  // the figure that the design counts on, as text; empty: none
  std::string note;    // sizes, checks, or why the row is not ok
  Status status = Status::kOk;
};

// Measures the named groups, in this order: hbm, l2, nvfp4, barrier, gather, tear, mma, fence, cluster, launch, peer.
// A group that fails adds one failed row, named like the group, instead of its missing ones. Takes seconds, up to 6 GB
// of the device's memory, and the whole device: figures are wrong if anything else runs there.
//
// Throws std::invalid_argument for an unknown group or device, std::runtime_error if there is no GPU.
std::vector<LimitRow> MeasureLimits(int device, const std::vector<std::string>& groups);

}  // namespace musejax::bench
