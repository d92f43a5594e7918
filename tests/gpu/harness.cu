// Runs the layer kernel at NANO's sizes without JAX, for the checks that need no second implementation: the same bits
// however a pass is cut into launches, ranks and blocks, and waits that end when something is missing.
//
//   harness [options] [case ...]    prints "case ...: ok" or "case ...: FAILED first difference at index i: a != b"
//
//   cut      one layer a launch, and two, are the whole stack in one; for one rank of 8 slices and for 8 ranks
//   ranks    8 ranks of a slice, 8 grids that run at once on one GPU, are one rank of 8 slices
//   blocks   the number of blocks changes nothing
//   repeat   launches from one state, 1,000 of one rank and 200 of 8
//   silent   a block that returns at once,
//   epoch    a block whose tags are those of the layer before,
//   units    a schedule without one unit of the pooler: each ends in a report within 5 s, and the next pass is right
//
//   --small                a layer of each form of expert, few blocks and repeats
//   --activations MODE     bf16 (default), nvfp4_static or nvfp4_per_token: what NVFP4 weights multiply
//   --budget-factor X      X times the 2 s that a wait may take
//   --one-grid             8 ranks in one grid, for tools that make launches wait for each other
//   --wrong-weight         one bit of a weight differs from the run that others are compared with: these fail
//   --watchdog S           ends the program, as failed, after S seconds (default 300)
// Exit status: 0 if all is ok, 1 if not, 3 by the watchdog.
#include <algorithm>
#include <chrono>
#include <thread>

#include "harness.cuh"

namespace harness {

struct Options {
  std::vector<std::string> cases;
  Activations activations = Activations::kBf16;
  double budget_factor = 1, watchdog = 300;
  bool small = false, one_grid = false, wrong_weight = false;
};

bool failed = false;

void Say(const std::string& name, const std::string& problem) {
  printf("%s: %s%s\n", name.c_str(), problem.empty() ? "ok" : "FAILED ", problem.c_str());
  fflush(stdout);
  failed |= !problem.empty();
}

std::string RanksText(int ranks) { return std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks"); }

// A model and one pass of 15 rows of 16 behind 5 accepted ones, the same for however many ranks.
struct Setup {
  static constexpr int kLength = 602, kValid = 15, kAccepted = 5;

  Options options;
  std::vector<Kind> kinds;
  std::vector<Weights> layers;
  StateLayout at;
  Bytes first;      // the state before the pass
  Bytes reference;  // and after it, in one launch of one rank
  Array<float> cos_sin{size_t(kMaxRows * kShape.head_dim)};
  Array<int32_t> parents{size_t(kMaxRows)}, state{size_t(3)}, path{size_t(kMaxRows)};

  static std::vector<Kind> Kinds(bool small) {
    const Kind window_bf16{false, true, 64, 64}, full_nvfp4{true, false, 0, 700};
    if (small) return {window_bf16, full_nvfp4};
    return {window_bf16, full_nvfp4, {true, true, 64, 64}, {false, false, 0, 700}};
  }

  explicit Setup(const Options& o) : options(o), kinds(Kinds(o.small)), at(kinds, int(kSlices)), first(at.bytes) {
    Random random;
    for (const Kind& kind : kinds)
      layers.push_back({kind, Array<uint8_t>(RandomDense(random)), Array<uint8_t>(RandomExperts(random, kind.nvfp4)),
                        Array<float>(RandomSmall(random, kind.nvfp4))});
    for (const Part& part : at.parts) {
      uint8_t* to = first.data() + part.at;
      if (part.element == 2) random.Bf16(to, part.bytes, 1.0f);
    }
    random.Floats(reinterpret_cast<float*>(first.data()), kMaxRows * kShape.hidden, 1.0f);
    const std::vector<int32_t> tree = {-1, 0, 0, 1, 1, 2, 3, 3, 6, 8, 9, 4, 10, -1, 13, 14};
    parents.Set(tree);
    state.Set({kLength, kValid, kAccepted});
    path.Set({0, 1, 3, 6, 8, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15});
    cos_sin.Set(Angles(tree));
  }

  static std::vector<float> Angles(const std::vector<int32_t>& tree) {
    const int half = int(kShape.head_dim) / 2;
    std::vector<float> out(kMaxRows * kShape.head_dim);
    for (int row = 0; row < kMaxRows; ++row) {
      int position = kLength;
      for (int at = row; tree[at] >= 0; at = tree[at]) ++position;
      for (int i = 0; i < half; ++i) {
        const double angle = position * pow(5e5, -2.0 * i / double(kShape.head_dim));
        out[2 * half * row + i] = float(cos(angle)), out[2 * half * row + half + i] = float(sin(angle));
      }
    }
    return out;
  }
};

// One rank of 8 slices, or 8 of one: their state, and what the kernel needs beside it.
template <typename S>
class Ranks {
 public:
  static constexpr int kFaulty = S::kRanks / 2;  // the rank that faults are put into

  Ranks(const Setup& setup, int blocks)
      : setup_(setup),
        blocks_(blocks),
        at_(setup.kinds, S::kSlicesHere),
        error_(Errors()),
        budget_(std::vector<uint32_t>{uint32_t(double(ptx::kSpinBudgetNs) / 1024 * setup.options.budget_factor)}),
        schedule_(Schedule(blocks)),
        params_(S::kRanks) {
    if (BlocksAtOnce<S>() < S::kRanks * blocks)
      Fail("harness: expected a GPU that runs " + std::to_string(S::kRanks) + " grids of " + std::to_string(blocks) +
           " blocks at once, got one that runs " + std::to_string(BlocksAtOnce<S>()) + " blocks");
    error_->set = 0;
    for (const Kind& kind : setup.kinds) max_units_ = std::max(max_units_, MaxUnits(kind.slots));
    for (int r = 0; r < S::kRanks; ++r) {
      Bytes first(at_.bytes);
      for (size_t i = 0; i < at_.parts.size(); ++i) {
        const Part& part = at_.parts[i];
        memcpy(first.data() + part.at, setup.first.data() + PlaceIn(setup.at.parts[i], part, r), part.bytes);
      }
      first_.emplace_back(first), state_.emplace_back(at_.bytes);
      frames_.emplace_back(size_t(2 * Frames<S>::Bytes(max_units_))), epochs_.emplace_back(blocks + 1);
    }
  }

  // The pass from its first state, so many layers a launch, with one block silent or none. Returns the seconds of its
  // launches.
  double Pass(int layers = kMaxLayers, Silent silent = {}) {
    for (int r = 0; r < S::kRanks; ++r) Copy(state_[r].data(), first_[r].data(), at_.bytes);
    double seconds = 0;
    for (int begin = 0; begin < int(setup_.kinds.size()) && !error_->set; begin += layers) {
      std::vector<PassParams> ranks;
      for (int r = 0; r < S::kRanks; ++r) ranks.push_back(Params(r, begin, begin + layers));
      params_.Set(ranks);
      const auto start = std::chrono::steady_clock::now();
      if (silent.block >= 0 || (S::kRanks > 1 && setup_.options.one_grid))
        LaunchTogether<S>(params_.data(), blocks_, silent);
      else
        LaunchApart<S>(ranks.data(), blocks_);
      AwaitLaunches();
      seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    return seconds;
  }

  // "" or what is wrong with the state after a pass.
  std::string Compare(const Bytes& whole) const {
    if (error_->set) return "a wait did not end: " + Place();
    std::string text;
    for (int r = 0; r < S::kRanks && text.empty(); ++r) text = Difference(setup_.at, whole, at_, state_[r].Get(), r);
    return text;
  }
  Bytes State(int rank) const { return state_[rank].Get(); }

  const ErrorBlock& error() const { return *error_; }
  std::string Place() const {
    char text[200];
    snprintf(text, sizeof(text), "rank %d, SM %d, warp %d, layer %d, phase %d, wanted %u, saw %u", error_->rank,
             error_->block, error_->warp, error_->layer, error_->phase, error_->wanted, error_->seen);
    return text;
  }
  // Whether a report is one, from a thread that there is.
  bool Plausible(Silent silent) const {
    const ErrorBlock& e = *error_;
    const auto within = [](int x, int count) { return x >= 0 && x < count; };
    return e.set == 2 && within(e.rank, S::kRanks) && within(e.block, blocks_) && within(e.warp, kWarps) &&
           within(e.layer, int(setup_.kinds.size())) && within(e.phase, kStream + 1) && e.wanted != e.seen &&
           !(e.rank == silent.rank && e.block == silent.block);
  }

  void Reset() {
    for (int r = 0; r < S::kRanks; ++r) frames_[r].Clear(), epochs_[r].Clear();
    error_->set = 0;
  }

  // ---- faults ----

  Silent Victim() const { return {kFaulty, blocks_ / 2}; }
  // One block of the faulty rank believes that the layer before is at hand.
  void AgeEpoch() {
    std::vector<uint32_t> epochs = epochs_[kFaulty].Get();
    epochs[blocks_ / 2] -= 1;
    epochs_[kFaulty].Set(epochs);
  }
  // All ranks share the schedule; it loses the last unit of the pooler, or has all again.
  void LoseUnit(bool lose) {
    std::vector<int32_t> spans = Schedule(blocks_);
    const int units = kDenseUnits<S>[int(Dense::kPooler)];
    for (int b = 0; b < blocks_; ++b) {
      int32_t* span = &spans[2 * (b * kDenseGemms + int(Dense::kPooler))];
      if (lose && span[1] == units && span[0] < units) span[1] = units - 1;
    }
    schedule_.Set(spans);
  }

 private:
  static std::vector<int32_t> Schedule(int blocks) {
    std::vector<int32_t> spans;
    for (int b = 0; b < blocks; ++b)
      for (const int units : kDenseUnits<S>)
        spans.push_back(units * b / blocks), spans.push_back(units * (b + 1) / blocks);
    return spans;
  }

  // Of a launch that runs layers begin .. end - 1 whole, and the heads of the next.
  PassParams Params(int rank, int begin, int end) const {
    const int count = int(setup_.kinds.size()), slices = S::kSlicesHere;
    const auto part = [&](const Part& p) { return static_cast<void*>(state_[rank].data() + p.at); };
    PassParams p{};
    p.model = NanoModel(setup_.options.activations), p.first = begin == 0, p.last = end >= count;
    p.count_layers = std::min(end + 1, count) - begin, p.rows = int(kMaxRows);
    p.parents = setup_.parents.data(), p.state = setup_.state.data(), p.path = setup_.path.data();
    p.stream = static_cast<float*>(part(at_.parts[StateLayout::kStream]));
    p.q = static_cast<uint16_t*>(part(at_.parts[StateLayout::kQ]));
    p.gate = static_cast<uint16_t*>(part(at_.parts[StateLayout::kGate]));
    p.ids = static_cast<int32_t*>(part(at_.parts[StateLayout::kIds])) + begin * kMaxRows * kTopK;
    p.schedule = schedule_.data(), p.frames = frames_[rank].data(), p.max_units = max_units_, p.rank = rank;
    p.epochs = epochs_[rank].data(), p.abort = p.epochs + blocks_, p.budget = budget_.data(), p.error = error_;
    p.exchange.count = S::kRanks;
    for (int r = 0; r < S::kRanks; ++r) p.exchange.frames[r] = frames_[r].data(), p.exchange.first_slice[r] = rank;
    for (int i = 0; i < p.count_layers; ++i) {
      const int layer = begin + i;
      const Weights& w = setup_.layers[layer];
      const auto of_layer = [&](int what) { return static_cast<uint16_t*>(part(at_.OfLayer(layer, what))); };
      const int64_t expert_bytes = kShape.experts * ExpertLayout(kShape, w.kind.nvfp4).bytes;
      LayerArrays& l = p.layers[i];
      l.dense = w.dense.data() + rank * slices * DenseLayout(kShape).bytes;
      l.experts = w.experts.data() + rank * slices * expert_bytes, l.small = w.small.data();
      l.cos_sin = w.kind.rotary ? setup_.cos_sin.data() : nullptr;
      l.keys = of_layer(StateLayout::kKeys), l.values = of_layer(StateLayout::kValues);
      l.flight_keys = of_layer(StateLayout::kFlightKeys), l.flight_values = of_layer(StateLayout::kFlightValues);
      l.slots = w.kind.slots, l.window = w.kind.window, l.nvfp4 = w.kind.nvfp4;
      l.tap = reinterpret_cast<float*>(of_layer(StateLayout::kTap));
    }
    return p;
  }

  const Setup& setup_;
  const int blocks_;
  const StateLayout at_;
  ErrorBlock* const error_;
  Array<uint32_t> budget_;
  Array<int32_t> schedule_;
  Array<PassParams> params_;
  int max_units_ = 0;
  std::vector<Array<uint8_t>> first_, state_, frames_;
  std::vector<Array<uint32_t>> epochs_;  // [blocks], then the flag by which blocks give up together
};

using One = Nano<8>;
using Eight = Nano<1>;

int BlocksOfOne(const Setup& s) { return s.options.small ? 6 : Multiprocessors(); }
int BlocksOfEight(const Setup& s) { return s.options.small ? 2 : Multiprocessors() / 8; }

// ---- cases ----

// The whole stack in one launch of one rank, which the cases are compared with: it must be worth comparing.
void MakeReference(Setup& setup) {
  Ranks<One> ranks(setup, BlocksOfOne(setup));
  ranks.Pass();
  if (ranks.error().set) Fail("reference: FAILED a wait did not end: " + ranks.Place());
  setup.reference = ranks.State(0);
  std::string problem;
  const float* stream = reinterpret_cast<const float*>(setup.reference.data());
  const float* before = reinterpret_cast<const float*>(setup.first.data());
  for (int i = 0; i < Setup::kValid * kShape.hidden && problem.empty(); ++i)
    if (!std::isfinite(stream[i]) || stream[i] == before[i])
      problem = "expected another finite number at index " + std::to_string(i) + " of the stream, got " +
                std::to_string(stream[i]);
  const int32_t* ids = reinterpret_cast<const int32_t*>(setup.reference.data() + setup.at.parts[StateLayout::kIds].at);
  std::vector<bool> chosen(kShape.experts + 1);
  for (size_t i = 0; i < setup.kinds.size() * kMaxRows * kTopK; ++i) {
    const bool valid = int(i / kTopK % kMaxRows) < Setup::kValid;
    if (ids[i] < 0 || (valid ? ids[i] >= kShape.experts : ids[i] != kShape.experts))
      problem = "expected an expert at index " + std::to_string(i) + " of ids, got " + std::to_string(ids[i]);
    else
      chosen[ids[i]] = true;
  }
  if (problem.empty() && std::count(chosen.begin(), chosen.end(), true) < 8) problem = "expected 8 experts in use";
  Say("reference", problem);
}

template <typename S>
void Cut(const Setup& setup, int blocks) {
  Ranks<S> ranks(setup, blocks);
  for (int each = 1; each <= std::min(2, int(setup.kinds.size()) - 1); ++each) {
    ranks.Pass(each);
    Say("cut, " + RanksText(S::kRanks) + ", " + std::to_string(each) + " of " + std::to_string(setup.kinds.size()) +
            " layers a launch",
        ranks.Compare(setup.reference));
  }
}

template <typename S>
void Whole(const Setup& setup, int blocks, const std::string& name) {
  Ranks<S> ranks(setup, blocks);
  ranks.Pass();
  Say(name, ranks.Compare(setup.reference));
}

void Blocks(const Setup& setup) {
  for (const int blocks : {3, 16, 57, 128, 132}) {
    if (blocks > (setup.options.small ? 16 : Multiprocessors())) continue;
    Whole<One>(setup, blocks, "blocks, " + std::to_string(blocks));
  }
}

template <typename S>
void Repeat(const Setup& setup, int blocks, int times) {
  Ranks<S> ranks(setup, blocks);
  std::string problem;
  for (int i = 0; i < times && problem.empty(); ++i) {
    ranks.Pass();
    problem = ranks.Compare(setup.reference);
    if (!problem.empty()) problem += " in launch " + std::to_string(i);
  }
  Say("repeat, " + RanksText(S::kRanks) + ", " + std::to_string(times) + " launches", problem);
}

// A pass after a good one, broken; then one after a reset.
template <typename S>
void Fault(const Setup& setup, int blocks, const std::string& fault) {
  const double limit = kReportSeconds * std::max(1.0, setup.options.budget_factor);
  Ranks<S> ranks(setup, blocks);
  ranks.Pass();
  std::string problem = ranks.Compare(setup.reference);
  const Silent silent = fault == "silent" ? ranks.Victim() : Silent{};
  if (fault == "epoch") ranks.AgeEpoch();
  if (fault == "units") ranks.LoseUnit(true);
  const double seconds = ranks.Pass(kMaxLayers, silent);
  char text[400];
  snprintf(text, sizeof(text), "%.2f s, error %u: %s", seconds, ranks.error().set, ranks.Place().c_str());
  if (problem.empty() && !(ranks.Plausible(silent) && seconds < limit))
    problem = std::string("expected a report within ") + std::to_string(int(limit)) + " s, got " + text;
  ranks.Reset();
  if (fault == "units") ranks.LoseUnit(false);
  ranks.Pass();
  if (problem.empty()) problem = ranks.Compare(setup.reference);
  Say(fault + ", " + RanksText(S::kRanks) + " (" + text + ")", problem);
}

// The bit of a bf16 that doubles or halves it, in a weight of the pooler of the last slice and layer.
void SpoilWeight(Setup& setup) {
  Array<uint8_t>& dense = setup.layers.back().dense;
  Bytes bytes = dense.Get();
  bytes[7 * DenseLayout(kShape).bytes + DenseLayout(kShape).pooler + 1000] ^= 0x80;
  dense.Set(bytes);
}

int Main(const Options& options) {
  Setup setup(options);
  MakeReference(setup);
  if (options.wrong_weight) SpoilWeight(setup);
  const int one = BlocksOfOne(setup), eight = BlocksOfEight(setup);
  for (const std::string& name : options.cases) {
    if (name == "cut") Cut<One>(setup, one), Cut<Eight>(setup, eight);
    if (name == "ranks") Whole<Eight>(setup, eight, "ranks, 8 of " + std::to_string(eight) + " blocks");
    if (name == "blocks") Blocks(setup);
    if (name == "repeat") Repeat<One>(setup, one, options.small ? 3 : 1000);
    if (name == "repeat") Repeat<Eight>(setup, eight, options.small ? 3 : 200);
    if (name == "silent" || name == "epoch" || name == "units")
      Fault<One>(setup, one, name), Fault<Eight>(setup, eight, name);
  }
  return failed ? 1 : 0;
}

Options Parse(int count, char** words) {
  const std::vector<std::string> cases = {"cut", "ranks", "blocks", "repeat", "silent", "epoch", "units"};
  const std::vector<std::string> modes = {"bf16", "nvfp4_static", "nvfp4_per_token"};
  Options o;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i], value = i + 1 < count ? words[i + 1] : "";
    const auto number = [&](double most) {
      const double x = atof(value.c_str());
      if (!(x > 0 && x <= most)) Fail("harness: expected a number above 0 after " + word + ", got '" + value + "'");
      return ++i, x;
    };
    if (word == "--small") {
      o.small = true;
    } else if (word == "--one-grid") {
      o.one_grid = true;
    } else if (word == "--wrong-weight") {
      o.wrong_weight = true;
    } else if (word == "--budget-factor") {
      o.budget_factor = number(1000);
    } else if (word == "--watchdog") {
      o.watchdog = number(1e6);
    } else if (word == "--activations") {
      const auto at = std::find(modes.begin(), modes.end(), value);
      if (at == modes.end())
        Fail("harness: expected bf16, nvfp4_static or nvfp4_per_token after " + word + ", got '" + value + "'");
      o.activations = Activations(at - modes.begin()), ++i;
    } else if (std::find(cases.begin(), cases.end(), word) != cases.end()) {
      o.cases.push_back(word);
    } else {
      Fail("harness: expected an option or a case (see the head of harness.cu), got '" + word + "'");
    }
  }
  if (o.cases.empty()) o.cases = cases;
  return o;
}

}  // namespace harness

int main(int count, char** words) {
  // Before CUDA starts: a hardware queue for each stream, and no kernel that is loaded while another one waits.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  const harness::Options options = harness::Parse(count, words);
  std::thread([seconds = options.watchdog] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    printf("harness: FAILED expected to end within %.0f s (--watchdog)\n", seconds);
    fflush(stdout);
    _Exit(3);
  }).detach();
  const int status = harness::Main(options);
  fflush(stdout);
  _Exit(status);
}
