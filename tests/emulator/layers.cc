// The layer kernel on the emulator, for tests: one C function that takes what the FFI call takes.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "layer/layer.cuh"
#include "model.h"

namespace {

using namespace musejax;
using namespace musejax::layer;

uint32_t spin_budget = 0;  // in 1,024 ns
int only_rank = -1;        // if not negative, the other ranks of a launch do not run
bool keep = false;         // workspaces, as they are after an error
bool given_up = false;     // whether somebody has given up before a launch

// Weights of a launch.
struct Weights {
  const uint8_t* data;
  int64_t bytes;
};
std::vector<Weights> all_weights;

// What is prefetched must be weights.
void OnPrefetch(const void* global, uint32_t bytes) {
  for (const Weights& w : all_weights) {
    const int64_t at = static_cast<const uint8_t*>(global) - w.data;
    if (at >= 0 && at + bytes <= w.bytes) return;
  }
  assert(false);
}

template <typename S>
std::string Run(std::vector<PassParams> ranks, int blocks, emulator::Order order) {
  ErrorBlock error{};
  std::vector<uint32_t> abort(ranks.size(), given_up);
  static uint32_t budget;
  budget = spin_budget;
  for (size_t r = 0; r < ranks.size(); ++r) {
    PassParams& pass = ranks[r];
    EmulatedWorkspace& w = workspaces[{S::kSlicesHere, S::kTopK, blocks, int(r), pass.max_units}];
    w.frames.resize(2 * Frames<S>::Bytes(pass.max_units) + 16);
    w.epochs.resize(blocks);
    pass.frames = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(w.frames.data()) + 15) & ~uintptr_t(15));
    pass.epochs = w.epochs.data(), pass.abort = &abort[r], pass.budget = &budget, pass.error = &error;
    pass.rank = int(r);
  }
  for (size_t r = 0; r < ranks.size(); ++r) {
    Exchange& e = ranks[r].exchange;
    e.count = S::kRanks;
    const bool looped = int(ranks.size()) != S::kRanks;
    for (int i = 0; i < e.count; ++i) {
      e.frames[i] = ranks[looped ? r : i].frames;
      e.first_slice[i] = (looped ? i : int(r)) * S::kSlicesHere;
    }
  }
  ptx::on_prefetch = OnPrefetch;
  emulator::Launch(int(ranks.size()), blocks, kThreads, sizeof(Shared<S>), order, [&] {
    const int rank = emulator::current->block->grid;
    if (only_rank < 0 || rank == only_rank) Layers<S>(ranks[rank]);
  });
  ptx::on_prefetch = nullptr;  // other libraries of this process share it
  if (!error.set) return "";
  if (!keep) workspaces.clear();
  return "rank " + std::to_string(error.rank) + " block " + std::to_string(error.block) + " warp " +
         std::to_string(error.warp) + " layer " + std::to_string(error.layer) + " phase " +
         std::to_string(error.phase) + " wanted " + std::to_string(error.wanted) + " saw " + std::to_string(error.seen);
}

}  // namespace

// What the call is given for one rank; musejax's tests mirror it with ctypes.
struct EmulatedRank {
  float* stream;
  uint16_t *q, *gate;
  int32_t *ids, *state;
  const void* const*
      pointers;  // of each layer: dense, experts, small, cos_sin, keys, values, flight_keys, flight_values, tap
};

// From now on only this rank runs in a launch of several; -1: all.
extern "C" void EmulateOnlyRank(int rank) { only_rank = rank; }

// From now on an error leaves the workspaces as they are, instead of new ones.
extern "C" void EmulateKeepWorkspaces(bool on) { keep = on; }

// From now on launches find that somebody has given up before them, on every rank.
extern "C" void EmulateGivenUp(bool on) { given_up = on; }

// Epochs of a rank from its next launch on, in all workspaces there are; until an error is reported. Returns how many.
extern "C" int EmulateShiftEpochs(int rank, uint32_t by) {
  int shifted = 0;
  for (auto& [key, w] : workspaces)
    if (key[3] == rank) {
      for (uint32_t& epoch : w.epochs) epoch += by;
      ++shifted;
    }
  return shifted;
}

// From now on copies count as come when they are asked for.
extern "C" void EmulateEarlyCounts(bool on) { ptx::counts_early = on; }

// integers, floats: see ModelOf. numbers: of each layer slots, window, nvfp4. schedule: [blocks][5][2], of every rank.
// Returns 0; 1 with a wait that did not end described in `text`; 2 for sizes that were not compiled.
extern "C" int EmulateLayers(const int64_t* integers, const float* floats, int layers, int first, int last, int rows,
                             const int32_t* parents, const int32_t* path, int num_ranks, const EmulatedRank* given,
                             const int64_t* numbers, int slices, int blocks,
                             const int32_t* schedule, uint32_t seed, bool rough, int64_t max_units, double budget_ms, char* text,
                             int text_size) {
  const Model m = ModelOf(integers, floats);
  spin_budget = uint32_t(budget_ms * 1e6 / 1024);
  std::vector<PassParams> ranks(num_ranks);
  all_weights.clear();
  for (int r = 0; r < num_ranks; ++r) {
    PassParams& pass = ranks[r];
    pass.model = m, pass.count_layers = layers, pass.first = first, pass.last = last, pass.rows = rows;
    pass.parents = parents, pass.path = path, pass.stream = given[r].stream;
    pass.state = given[r].state, pass.mark = given[r].state + 2;
    pass.q = given[r].q, pass.gate = given[r].gate, pass.ids = given[r].ids;
    pass.schedule = schedule, pass.max_units = int(max_units);
    for (int i = 0; i < layers; ++i) {
      const auto at = [&](int j) { return const_cast<void*>(given[r].pointers[9 * i + j]); };
      LayerArrays& l = pass.layers[i];
      l.dense = static_cast<uint8_t*>(at(0)), l.experts = static_cast<uint8_t*>(at(1));
      l.small = static_cast<float*>(at(2)), l.cos_sin = static_cast<float*>(at(3));
      l.keys = static_cast<uint16_t*>(at(4)), l.values = static_cast<uint16_t*>(at(5));
      l.flight_keys = static_cast<uint16_t*>(at(6)), l.flight_values = static_cast<uint16_t*>(at(7));
      l.tap = static_cast<float*>(at(8));
      l.slots = int(numbers[3 * i]), l.window = int(numbers[3 * i + 1]), l.nvfp4 = numbers[3 * i + 2] != 0;
      all_weights.push_back({l.dense, slices * DenseLayout(m.shape).bytes});
      all_weights.push_back({l.experts, slices * m.shape.experts * ExpertLayout(m.shape, l.nvfp4).bytes});
      all_weights.push_back({static_cast<const uint8_t*>(at(2)), 4 * SmallLayout(m.shape, l.nvfp4).count});
    }
  }
  std::string error;
  if (m.shape.moe_hidden == 1024 && m.top_k == 4 && slices == 8)
    error = Run<Sizes<128, 32, 8, 64, 1024, 1024, 16, 4, 8>>(ranks, blocks, {seed, rough});
  else if (m.top_k == 4 && slices == 8)
    error = Run<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 8>>(ranks, blocks, {seed, rough});
  else if (m.top_k == 4 && slices == 4)
    error = Run<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 4>>(ranks, blocks, {seed, rough});
  else if (m.top_k == 4 && slices == 2)
    error = Run<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 2>>(ranks, blocks, {seed, rough});
  else if (m.top_k == 4 && slices == 1)
    error = Run<Sizes<128, 16, 8, 64, 128, 128, 16, 4, 1>>(ranks, blocks, {seed, rough});
  else if (m.top_k == 2 && slices == 8)
    error = Run<Sizes<128, 16, 8, 64, 128, 128, 16, 2, 8>>(ranks, blocks, {seed, rough});
  else
    return 2;
  snprintf(text, size_t(text_size), "%s", error.c_str());
  return !error.empty();
}
