// The decoder layers of one pass on one device: the boundary of the megakernel.
#pragma once

#include "cpu/phases.h"

namespace musejax {

// What one layer brings to a pass.
struct Layer {
  LayerWeights weights;
  LayerKeys kv;
  const float* cos_sin;  // [rows][2][c/2], or null in layers without rotation
  bool tap;              // whether the stream after it is wanted
};

// Runs layers[0] .. layers[n-1] of a pass in which the rows of `stream` [count][hidden] are at the input of layers[0].
//   first: starts with the QKV of layers[0]; otherwise q and gate hold it already.
//   last: ends after the residual of layers[n-1]; otherwise with the QKV of layers[n-1], left in q, gate and flight.
// ids [n][count][top_k]: experts chosen in each layer that ran whole. Calls that split the layers give the same bits.
// taps [..][count][hidden]: the stream after each layer whose `tap` is set, in layer order.
void RunLayers(const Model&, const Layer* layers, int n, bool first, bool last, const Rows&, const Accepted&,
               float* stream, bf16* q, bf16* gate, int32_t* ids, float* taps);

}  // namespace musejax
