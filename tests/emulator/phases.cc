// The phases of a layer as launches of their own, on the emulator, for tests: one C function for all of them.
#include "layer/phases.cuh"

#include <cstdio>
#include <string>
#include <vector>

#include "model.h"

namespace {

using namespace musejax;
using namespace musejax::layer;

template <typename S>
std::string Run(PhaseParams params, int blocks, uint32_t seed, uint32_t budget) {
  ErrorBlock error{};
  uint32_t abort = 0;
  EmulatedWorkspace& w = workspaces[{S::kSlicesHere, S::kTopK, blocks, params.max_units}];
  w.frames.resize(2 * Frames<S>::Bytes(params.max_units) + 16);
  w.epochs.resize(blocks);
  params.frames = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(w.frames.data()) + 15) & ~uintptr_t(15));
  params.epochs = w.epochs.data(), params.abort = &abort, params.budget = &budget, params.error = &error;
  params.exchange.count = 1, params.exchange.frames[0] = params.frames;
  emulator::Launch(1, blocks, kThreads, sizeof(Shared<S>), {seed, false}, [&] { RunPhase<S>(params); });
  if (!error.set) return "";
  workspaces.clear();
  return "block " + std::to_string(error.block) + " warp " + std::to_string(error.warp) + " phase " +
         std::to_string(error.phase) + " wanted " + std::to_string(error.wanted) + " saw " + std::to_string(error.seen);
}

}  // namespace

// What a phase is given; musejax's tests mirror it with ctypes. Null where a phase has no such array.
struct EmulatedPhase {
  const int32_t *parents, *state, *path;
  const uint8_t *dense, *experts;
  const float *small, *cos_sin;
  uint16_t *keys, *values, *flight_keys, *flight_values;
  float* stream;
  uint16_t *q, *gate;
  int32_t* ids;
  const uint16_t* in;
  uint16_t* out;
  const float *scores, *weights;
  float *scores_out, *weights_out;
  const int32_t *chosen, *begin;
  int64_t phase, rows, slots, window, nvfp4, experts_here, groups, max_units;
};

// integers, floats: see ModelOf. schedule: [blocks][5][2]. Returns 0; 1 with a wait that did not end described in
// `text`; 2 for sizes that were not compiled.
extern "C" int EmulatePhase(const int64_t* integers, const float* floats, const EmulatedPhase* given, int slices,
                            int blocks, const int32_t* schedule, uint32_t seed, double budget_ms, char* text,
                            int text_size) {
  const EmulatedPhase& g = *given;
  PhaseParams p{};
  p.model = ModelOf(integers, floats);
  p.count_layers = 1, p.first = PhaseLaunch(g.phase) == PhaseLaunch::kAttnIn, p.rows = int(g.rows);
  p.parents = g.parents, p.state = g.state, p.path = g.path;
  p.stream = g.stream, p.q = g.q, p.gate = g.gate, p.ids = g.ids;
  p.schedule = schedule, p.max_units = int(g.max_units);
  p.phase = PhaseLaunch(g.phase), p.in = g.in, p.out = g.out, p.scores = g.scores, p.weights = g.weights;
  p.scores_out = g.scores_out, p.weights_out = g.weights_out, p.chosen = g.chosen, p.begin = g.begin;
  p.experts = int(g.experts_here), p.groups = int(g.groups);
  LayerArrays& l = p.layers[0];
  l.dense = g.dense, l.experts = g.experts, l.small = g.small, l.cos_sin = g.cos_sin;
  l.keys = g.keys, l.values = g.values, l.flight_keys = g.flight_keys, l.flight_values = g.flight_values;
  l.slots = int(g.slots), l.window = int(g.window), l.nvfp4 = g.nvfp4 != 0;
  const uint32_t budget = uint32_t(budget_ms * 1e6 / 1024);
  std::string error;
  if (p.model.top_k == 4 && slices == 8)
    error = Run<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 8>>(p, blocks, seed, budget);
  else if (p.model.top_k == 4 && slices == 1)
    error = Run<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 1>>(p, blocks, seed, budget);
  else if (p.model.top_k == 2 && slices == 8)
    error = Run<Sizes<128, 16, 8, 64, 128, 128, 16, 2, 8>>(p, blocks, seed, budget);
  else
    return 2;
  snprintf(text, size_t(text_size), "%s", error.c_str());
  return !error.empty();
}
