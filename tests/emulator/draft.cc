// The kernels of a drafter on the emulator, for tests: C functions that take what the FFI calls take.
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "draft/draft.cuh"
#include "draft/tree.cuh"

// How a launch runs; musejax's tests mirror it with ctypes.
struct EmulatedHow {
  int32_t ranks, slices, layers, rows, slots, blocks;
  uint32_t seed;
  int32_t rough;
  double budget_ms;
};

namespace {

using namespace musejax;
using namespace musejax::draft;

// What ranks keep from launch to launch.
struct Kept {
  std::vector<uint8_t> frames;
  std::vector<comm::Passed> passed;
};
std::map<std::vector<int64_t>, std::vector<Kept>> kept;
int only_rank = -1;  // if not negative, the other ranks of a launch do not run

DraftModel ModelOf(const int64_t* n, const float* f) {
  return {{n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7]}, n[8], n[9], n[10], f[0], f[1], f[2], f[3], f[4]};
}

// Fills what all launches are given and runs them, as many ranks at once as there are params.
template <typename Params>
std::string Run(std::vector<Params>& ranks, const EmulatedHow& how, void (*kernel)(const Params&)) {
  comm::ErrorBlock error{};
  uint32_t abort = 0, budget = uint32_t(how.budget_ms * 1e6 / 1024);
  const DraftModel& m = ranks[0].model;
  const DraftShape& s = m.shape;
  std::vector<Kept>& all = kept[{s.hidden, s.heads, s.head_dim, s.inner, s.conv_groups, s.rank, m.vocab, how.slices,
                                 how.slots, how.blocks, int64_t(ranks.size())}];
  all.resize(ranks.size());
  std::vector<uint8_t*> frames;
  const Frames at(m, how.slices, how.slots);
  for (Kept& k : all) {
    k.frames.resize(at.bytes + 256), k.passed.resize(how.blocks);
    frames.push_back(reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(k.frames.data()) + 255) & ~uintptr_t(255)));
  }
  for (int r = 0; r < int(ranks.size()); ++r) {
    Params& p = ranks[r];
    p.at = at, p.exchange = comm::ExchangeOf(frames, r, how.slices), p.rank = r, p.ranks = int(ranks.size());
    p.slices = how.slices, p.layers = how.layers, p.rows = how.rows, p.slots = how.slots;
    p.passed = all[r].passed.data(), p.abort = &abort, p.budget = &budget, p.error = &error;
  }
  emulator::Launch(int(ranks.size()), how.blocks, kThreads, sizeof(Shared), {how.seed, how.rough != 0}, [&] {
    const int rank = emulator::current->block->grid;
    if (only_rank < 0 || rank == only_rank) kernel(ranks[rank]);
  });
  if (!error.set) return "";
  kept.clear();
  return "rank " + std::to_string(error.rank) + " block " + std::to_string(error.block) + " layer " +
         std::to_string(error.layer) + " phase " + std::to_string(error.phase) + " wanted " +
         std::to_string(error.wanted) + " saw " + std::to_string(error.seen);
}

template <typename T>
T* Take(const void* const*& pointers) {
  return static_cast<T*>(const_cast<void*>(*pointers++));
}

void TakeLayers(const void* const*& pointers, int layers, Launch& p) {
  for (int i = 0; i < layers; ++i) {
    LayerArrays& l = p.layer[i];
    l.dense = Take<const uint8_t>(pointers), l.small = Take<const float>(pointers);
    l.keys = Take<uint16_t>(pointers), l.values = Take<uint16_t>(pointers);
  }
}

int Report(const std::string& error, char* text, int size) {
  snprintf(text, size_t(size), "%s", error.c_str());
  return !error.empty();
}

}  // namespace

// From now on only this rank runs in a launch of several; -1: all.
extern "C" void EmulateOnlyRank(int rank) { only_rank = rank; }

// integers, floats: members of DraftAttribute. pointers, rank by rank: embedded, cos_sin, anchor, length, norm, lm_head,
// selector, predecessor, successor, tokens, scores, coverage, stream (or null: where the stream after the last layer
// goes, [8][16][hidden/8]), then of each layer dense, small, keys, values. Returns 1 with a wait that did not end
// described in `text`.
extern "C" int EmulateDraft(const int64_t* integers, const float* floats, const EmulatedHow* how, int num_tokens,
                            const void* const* pointers, char* text, int size) {
  std::vector<DraftParams> ranks(how->ranks);
  std::vector<uint16_t*> streams;
  for (DraftParams& p : ranks) {
    p.model = ModelOf(integers, floats), p.num_tokens = num_tokens;
    p.embedded = Take<const uint16_t>(pointers), p.cos_sin = Take<const float>(pointers);
    p.anchor = Take<const int32_t>(pointers), p.length = Take<const int32_t>(pointers);
    p.norm = Take<const float>(pointers), p.lm_head = Take<const uint8_t>(pointers);
    p.selector = Take<const uint8_t>(pointers), p.predecessor = Take<const uint16_t>(pointers);
    p.successor = Take<const uint16_t>(pointers), p.tokens = Take<int32_t>(pointers);
    p.scores = Take<float>(pointers), p.coverage = Take<float>(pointers);
    streams.push_back(Take<uint16_t>(pointers));
    TakeLayers(pointers, how->layers, p);
  }
  const std::string error = Run(ranks, *how, RunDraft);
  for (int r = 0; r < how->ranks && error.empty(); ++r)
    if (streams[r])
      memcpy(streams[r], ranks[r].exchange.frames[r] + ranks[r].at.x, 2 * kRows * ranks[r].model.shape.hidden);
  return Report(error, text, size);
}

// The same; pointers, rank by rank: taps, cos_sin, start, count, fc, hidden_norm, then of each layer as above.
extern "C" int EmulateCommit(const int64_t* integers, const float* floats, const EmulatedHow* how,
                             const void* const* pointers, char* text, int size) {
  std::vector<CommitParams> ranks(how->ranks);
  for (CommitParams& p : ranks) {
    p.model = ModelOf(integers, floats);
    p.taps = Take<const float>(pointers), p.cos_sin = Take<const float>(pointers);
    p.start = Take<const int32_t>(pointers), p.count = Take<const int32_t>(pointers);
    p.fc = Take<const uint8_t>(pointers), p.hidden_norm = Take<const float>(pointers);
    TakeLayers(pointers, how->layers, p);
  }
  return Report(Run(ranks, *how, RunCommit), text, size);
}

// As the target musejax_draft_tree. sizes: positions, candidates, nodes, width, spine.
extern "C" void EmulateTree(const int32_t* sizes, float tau, const int32_t* anchor, const int32_t* tokens,
                            const float* scores, const float* coverage, int32_t* out, float* cum) {
  const int n = sizes[2];
  const TreeParams p{anchor, tokens, scores, coverage, sizes[0], sizes[1], n,  sizes[3],
                     sizes[4], tau,  out,    out + n,  out + 2 * n, out + 3 * n, cum};
  Node nodes[kMaxNodes];
  std::vector<float> open(kMaxNodes * 32);
  emulator::Launch(1, 1, 32, 16, {1, false}, [&] { RunTree(p, nodes, open.data()); });
}
