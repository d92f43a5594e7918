// Who gets the finished values of a rank's slices.
#pragma once

#include <vector>

#include "common/layout.h"

namespace musejax::comm {

// One entry a rank, itself included.
struct Exchange {
  int count;
  uint8_t* frames[kSlices];
  int first_slice[kSlices];  // where this rank's slices lie in that rank's frames
};

// What a rank of `slices` slices sends: to the other ranks, whose frames are given in their order, its own slices; to
// itself, besides, what ranks that are not here would send, its own slices again.
inline Exchange ExchangeOf(const std::vector<uint8_t*>& frames, int rank, int64_t slices) {
  Exchange e{};
  e.count = int(kSlices / slices);
  for (int r = 0; r < e.count; ++r) {
    const bool other = r != rank && r < int(frames.size());
    e.frames[r] = frames[other ? r : rank], e.first_slice[r] = int((other ? rank : r) * slices);
  }
  return e;
}

}  // namespace musejax::comm
