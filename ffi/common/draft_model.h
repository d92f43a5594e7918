// Sizes and constants of a DFlash drafter, for every kernel.
#pragma once

#include "common/draft_layout.h"

namespace musejax {

// Decoded from the attribute `model`.
struct DraftModel {
  DraftShape shape;
  int64_t vocab, window, candidates;
  float eps, attention_scale, output_multiplier, softcap, embedding_scale;  // softcap 0: none
};

}  // namespace musejax
