// What the cases of harness.cu run on: memory and launches of the GPU, or of the emulator (tests/emulator) if
// MUSEJAX_EMULATOR is defined; and a random NANO model with the state of a pass.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "layer/layer.cuh"

namespace harness {

using namespace musejax;
using namespace musejax::layer;

using Bytes = std::vector<uint8_t>;

// NANO, of a rank of this many slices.
template <int kSlicesHere>
using Nano = Sizes<128, 16, 8, 64, 128, 128, 16, 4, kSlicesHere>;
inline constexpr Shape kShape = Nano<8>::kShape;
inline constexpr int kTopK = Nano<8>::kTopK;

// The block that takes no part in a launch; none by default.
struct Silent {
  int rank = -1, block = -1;
};

// The layer kernel with all ranks in one grid, one row of blocks each: where launches are made one after the other, as
// by tools that watch them, ranks in grids of their own would wait for each other in vain.
template <typename S>
__global__ void __launch_bounds__(kThreads, 1) Together(const PassParams* ranks, Silent silent) {
#if defined(MUSEJAX_EMULATOR)
  const int rank = emulator::current->block->grid;
#else
  const int rank = int(blockIdx.y);
#endif
  if (rank == silent.rank && int(blockIdx.x) == silent.block) return;
  RunLayers<S>(ranks[rank]);
}

[[noreturn]] inline void Fail(const std::string& text) {
  printf("%s\n", text.c_str());
  fflush(stdout);
  _Exit(1);
}

// ---- memory and launches ----

#if defined(MUSEJAX_EMULATOR)

inline void Copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
inline void Zero(void* at, size_t bytes) { memset(at, 0, bytes); }
inline constexpr double kReportSeconds = 1e9;  // its clock is not that of the world
inline void* Allocate(size_t bytes) { return aligned_alloc(256, Padded(bytes, 256)); }
inline void Free(void* at) { free(at); }
inline ErrorBlock* Errors() {
  static ErrorBlock block;
  return &block;
}
inline int Multiprocessors() { return 16; }
template <typename S>
int BlocksAtOnce() {
  return Multiprocessors();
}
// Ranks in one grid or each in a grid of its own: the same here.
template <typename S>
void LaunchTogether(const PassParams* ranks, int blocks, Silent silent) {
  emulator::Launch(S::kRanks, blocks, kThreads, sizeof(Shared<S>), {1, false}, [&] { Together<S>(ranks, silent); });
}
template <typename S>
void LaunchApart(const PassParams* ranks, int blocks) {
  LaunchTogether<S>(ranks, blocks, {});
}
inline void AwaitLaunches() {}

#else

inline constexpr double kReportSeconds = 5;  // within which a wait that cannot end is reported

inline void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) Fail(std::string("harness: ") + what + " failed: " + cudaGetErrorString(error));
}
inline void AwaitLaunches() { Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

// Both come before launches on any stream.
inline void Copy(void* to, const void* from, size_t bytes) {
  Check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  AwaitLaunches();
}
inline void Zero(void* at, size_t bytes) {
  Check(cudaMemset(at, 0, bytes), "cudaMemset");
  AwaitLaunches();
}
inline void* Allocate(size_t bytes) {
  void* at = nullptr;
  Check(cudaMalloc(&at, bytes), "cudaMalloc");
  return at;
}
inline void Free(void* at) { Check(cudaFree(at), "cudaFree"); }
inline ErrorBlock* Errors() {
  static ErrorBlock* const block = [] {
    void* at = nullptr;
    Check(cudaHostAlloc(&at, sizeof(ErrorBlock), cudaHostAllocMapped), "cudaHostAlloc");
    return new (at) ErrorBlock{};
  }();
  return block;
}
inline int Multiprocessors() {
  int count = 0;
  Check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
  return count;
}

template <typename Kernel>
int BlocksOf(Kernel* kernel, size_t shared) {
  int of_each = 0;
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)), "cudaFuncSetAttribute");
  Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, kernel, kThreads, shared),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return of_each * Multiprocessors();
}
// How many blocks of the kernel run at once, whichever way it is launched; makes both ways ready.
template <typename S>
int BlocksAtOnce() {
  return Min(BlocksOf(Layers<S>, sizeof(Shared<S>)), BlocksOf(Together<S>, sizeof(Shared<S>)));
}

// ranks: in device memory.
template <typename S>
void LaunchTogether(const PassParams* ranks, int blocks, Silent silent) {
  void* arguments[] = {&ranks, &silent};
  Check(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(Together<S>), dim3(blocks, S::kRanks), dim3(kThreads),
                                    arguments, sizeof(Shared<S>), nullptr),
        "cudaLaunchCooperativeKernel");
}
// ranks: in host memory; each on a stream of its own.
template <typename S>
void LaunchApart(const PassParams* ranks, int blocks) {
  static const std::vector<cudaStream_t> streams = [] {
    std::vector<cudaStream_t> made(kSlices);
    for (cudaStream_t& s : made) Check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "cudaStreamCreate");
    return made;
  }();
  for (int r = 0; r < S::kRanks; ++r) {
    PassParams rank = ranks[r];
    void* arguments[] = {&rank};
    Check(cudaLaunchKernel(reinterpret_cast<const void*>(Layers<S>), dim3(blocks), dim3(kThreads), arguments,
                           sizeof(Shared<S>), streams[r]),
          "cudaLaunchKernel");
  }
}

#endif

// An array that launches see.
template <typename T>
class Array {
 public:
  explicit Array(size_t count) : count_(count), data_(static_cast<T*>(Allocate(count * sizeof(T)))) { Clear(); }
  explicit Array(const std::vector<T>& from) : Array(from.size()) { Set(from); }
  Array(Array&& other) noexcept : count_(other.count_), data_(other.data_) { other.data_ = nullptr; }
  ~Array() {
    if (data_) Free(data_);
  }
  T* data() const { return data_; }
  void Clear() { Zero(data_, count_ * sizeof(T)); }
  void Set(const std::vector<T>& from) { Copy(data_, from.data(), count_ * sizeof(T)); }
  std::vector<T> Get() const {
    std::vector<T> out(count_);
    Copy(out.data(), data_, count_ * sizeof(T));
    return out;
  }

 private:
  size_t count_;
  T* data_;
};

// ---- the model ----

struct Random {
  std::mt19937_64 bits{20261130};
  std::normal_distribution<float> normal;

  template <typename T>
  void Floats(T* to, size_t count, float scale) {
    for (size_t i = 0; i < count; ++i) {
      const float x = scale * normal(bits);
      if constexpr (sizeof(T) == 4) {
        to[i] = x;
      } else {  // bf16, cut off
        uint32_t u;
        memcpy(&u, &x, 4);
        to[i] = uint16_t(u >> 16);
      }
    }
  }
  void Bf16(uint8_t* to, size_t bytes, float scale) { Floats(reinterpret_cast<uint16_t*>(to), bytes / 2, scale); }

  // Row tiles of an NVFP4 weight: any codes, and for each scale word E5M3 fields of 2^-1 to 2^2 (common/layout.h).
  void Nvfp4(uint8_t* to, int64_t bytes, int64_t k) {
    for (int64_t i = 0; i < bytes; ++i) {
      const uint64_t draw = bits();
      const uint32_t low = 72 + draw % 32, high = 72 + draw / 32 % 32;
      if (i % Nvfp4TileBytes(k) < k / 64 * 512)
        to[i] = uint8_t(draw);
      else if (i % 2 == 0)
        to[i] = uint8_t(low << 4 | high >> 4), to[i + 1] = uint8_t(high << 4 | low >> 4);
    }
  }
};

// What layers differ in.
struct Kind {
  bool nvfp4, rotary;
  int window, slots;  // window 0: all positions
};

// One layer's weights, all slices.
struct Weights {
  Kind kind;
  Array<uint8_t> dense, experts;
  Array<float> small;
};

inline Bytes RandomDense(Random& random) {
  const DenseLayout at(kShape);
  Bytes out(kSlices * at.bytes);
  for (int64_t s = 0; s < kSlices; ++s) {
    uint8_t* slice = out.data() + s * at.bytes;
    random.Bf16(slice, at.out, 1 / sqrtf(float(kShape.hidden)));
    random.Bf16(slice + at.out, at.pooler - at.out, 1 / sqrtf(float(kShape.q_width())));
    random.Bf16(slice + at.pooler, at.router - at.pooler, 1 / sqrtf(float(kShape.hidden)));
    random.Floats(reinterpret_cast<float*>(slice + at.router), (at.unpooler - at.router) / 4,
                  2 / sqrtf(float(kShape.hidden)));
    random.Bf16(slice + at.unpooler, at.bytes - at.unpooler, 1 / sqrtf(float(kShape.moe_hidden)));
  }
  return out;
}

inline Bytes RandomExperts(Random& random, bool nvfp4) {
  const ExpertLayout at(kShape, nvfp4);
  Bytes out(kSlices * kShape.experts * at.bytes);
  for (uint8_t* expert = out.data(); expert < out.data() + out.size(); expert += at.bytes) {
    if (nvfp4) {
      random.Nvfp4(expert, Nvfp4Bytes(2 * kShape.inner_slice(), kShape.moe_hidden), kShape.moe_hidden);
      random.Nvfp4(expert + at.down, Nvfp4Bytes(kShape.moe_slice(), kShape.moe_inner), kShape.moe_inner);
    } else {
      random.Bf16(expert, at.down, 1 / sqrtf(float(kShape.moe_hidden)));
      random.Bf16(expert + at.down, at.bytes - at.down, 1 / sqrtf(float(kShape.moe_inner)));
    }
  }
  return out;
}

inline std::vector<float> RandomSmall(Random& random, bool nvfp4) {
  const SmallLayout at(kShape, nvfp4);
  std::vector<float> out(at.count);
  random.Floats(out.data(), size_t(at.router_bias), 0.1f);  // gains, and gates of the residual
  for (const int64_t gate : {at.attention_residual_gate, at.ffn_residual_gate})
    for (int64_t i = 0; i < kShape.hidden; ++i) out[gate + i] = 2 * out[gate + i] - 0.3f;
  random.Floats(out.data() + at.router_bias, size_t(kShape.experts), 0.05f);
  for (int64_t i = at.gate_up_global; i < at.count; ++i) {
    const bool global = i < at.gate_up_input_scale, up = i < at.down_input_scale;
    out[i] = global ? 1.0f / 64 : (up ? 4.0f : 2.0f) / 2688 * (0.5f + float(i % 8) / 16);
  }
  return out;
}

inline Model NanoModel(Activations activations) {
  Model m{};
  m.shape = kShape, m.top_k = kTopK, m.vocab = 2048, m.combine_groups = 8, m.activations = activations;
  m.rms_eps = 1e-5f, m.post_eps = 1e-8f, m.route_eps = 1e-15f, m.attention_scale = 5.4730065f / 8;
  m.output_multiplier = sqrtf(2.0f), m.softcap = 20, m.gate_temperature = 0.3f, m.gate_floor = 1e-3f;
  m.routed_scale = 1;
  return m;
}

// ---- the state of a pass ----

// An array that a pass changes, in a rank's state.
struct Part {
  std::string name;
  size_t at, bytes;
  int element;    // bytes of one; 0: not compared, for it depends on how layers are cut into launches
  bool is_split;  // by slices; else every rank has all of it
};

struct StateLayout {
  enum { kStream, kQ, kGate, kIds, kOfLayers };  // parts, then of each layer:
  enum { kTap, kKeys, kValues, kFlightKeys, kFlightValues, kEach };
  std::vector<Part> parts;
  size_t bytes = 0;

  StateLayout(const std::vector<Kind>& layers, int slices) {
    const size_t row = kShape.head_dim * 2, kv = kShape.kv_slice() * slices, stream = kMaxRows * kShape.hidden * 4;
    const size_t heads = kShape.heads_slice() * slices * kMaxRows * row, flight = kv * kMaxRows * row;
    Add("stream", stream, 4, false);
    Add("q", heads, 0, true), Add("gate", heads, 0, true);
    Add("ids", layers.size() * kMaxRows * kTopK * 4, 4, false);
    for (size_t i = 0; i < layers.size(); ++i) {
      const std::string of = " of layer " + std::to_string(i);
      Add("stream after" + of.substr(3), stream, 4, false);
      Add("keys" + of, kv * layers[i].slots * row, 2, true), Add("values" + of, kv * layers[i].slots * row, 2, true);
      Add("new keys" + of, flight, 2, true), Add("new values" + of, flight, 2, true);
    }
  }
  void Add(const std::string& name, size_t size, int element, bool is_split) {
    parts.push_back({name, bytes, size, element, is_split});
    bytes += Padded(size, 256);
  }
  const Part& OfLayer(int layer, int part) const { return parts[kOfLayers + layer * kEach + part]; }
};

// Where rank `rank` of those that have `mine` finds its part of `whole`.
inline size_t PlaceIn(const Part& whole, const Part& mine, int rank) {
  return whole.at + (mine.is_split ? rank * mine.bytes : 0);
}

// "" or the first difference between one rank's state and that of the whole model.
inline std::string Difference(const StateLayout& whole_at, const Bytes& whole, const StateLayout& at, const Bytes& mine,
                              int rank) {
  for (size_t i = 0; i < at.parts.size(); ++i) {
    const Part& part = at.parts[i];
    const uint8_t *want = whole.data() + PlaceIn(whole_at.parts[i], part, rank), *got = mine.data() + part.at;
    if (part.element == 0 || memcmp(want, got, part.bytes) == 0) continue;
    for (size_t j = 0;; j += part.element) {
      if (memcmp(want + j, got + j, part.element) == 0) continue;
      uint32_t a = 0, b = 0;
      memcpy(&a, want + j, part.element), memcpy(&b, got + j, part.element);
      char text[200];
      snprintf(text, sizeof(text), "first difference at index %zu: 0x%0*x != 0x%0*x (%s, rank %d)", j / part.element,
               2 * part.element, a, 2 * part.element, b, part.name.c_str(), rank);
      return text;
    }
  }
  return "";
}

}  // namespace harness
