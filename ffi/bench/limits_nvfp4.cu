// The stream of an NVFP4 expert GEMM: tiles of 16 rows x 4,096 columns go through the ring, eight MMA warps own 512
// columns each, dequantise and multiply by 8 tokens, three warps add the eight partial sums of each output in order.
// MMA warps meet no block barrier. From HBM and from L2 (the consumers' own limit).
//
// Scales, codes and tokens are such that every sum is exact in f32 in any order, so outputs are compared bit by bit
// with a computation on the host from the definition of the layout.
#include <cmath>
#include <cstring>

#include "bench/measure.h"
#include "bench/nvfp4.cuh"
#include "bench/random.cuh"
#include "bench/stream.cuh"

namespace musejax::bench {
namespace {

constexpr int kK = 4'096, kColumnTiles = kK / 64, kTokens = 8;
constexpr int kMmaWarps = kRanges, kSumWarps = 3;
constexpr int kThreads = 32 * (1 + kSumWarps + kMmaWarps);
constexpr int kTilesAWarp = kColumnTiles / kMmaWarps;
constexpr int kFragments = kTilesAWarp * 4 * 2;  // registers of a lane that hold its warp's tokens
constexpr int kUnitTiles = 2;                    // row tiles between two hand-overs to the sum warps
constexpr int kUnitOutputs = kUnitTiles * kTile * kTokens;
constexpr int kRepeats = 15;
static_assert(Nvfp4TileBytes(kK) == kStageBytes && Nvfp4Range(kK) == kK / kMmaWarps, "a stage is a tile");

struct StreamNvfp4Args {
  const uint8_t* tiles;  // [blocks][block_bytes]
  uint64_t block_bytes;
  uint32_t units, wrap;  // that a block reads; tiles after which it begins again
  const uint4* tokens;   // [warp][kFragments / 4][lane]: second operands of the MMAs in order
  float* out;            // [blocks][units][tile][lane][4]: MMA results
  Failure* failure;
};

struct Shared {
  float partials[2][kMmaWarps][kUnitOutputs];
  uint64_t full[kStages], empty[kStages], partials_full[2], partials_empty[2];
};

__device__ void Load(const StreamNvfp4Args& a, uint8_t* ring, Shared& s) {
  const uint8_t* src = a.tiles + blockIdx.x * a.block_bytes;
  Cursor at;
  uint32_t tile = 0;
  for (uint32_t i = 0; i < a.units * kUnitTiles; ++i, at.Advance()) {
    if (!ptx::MbarrierWaitParity(&s.empty[at.stage], at.parity ^ 1))
      return Report(a.failure, Wait::kStageEmpty, i, at.stage);
    ptx::MbarrierArriveExpectTx(&s.full[at.stage], kStageBytes);
    ptx::CpAsyncBulk(ring + at.stage * kStageBytes, src + static_cast<uint64_t>(tile) * kStageBytes, kStageBytes,
                     &s.full[at.stage]);
    if (++tile == a.wrap) tile = 0;
  }
}

// One row tile times the warp's 512 columns of the tokens. Two chains of sums, since an MMA waits for the one before.
__device__ __forceinline__ float4 MultiplyTile(const uint8_t* tile, const uint32_t (&b)[kFragments], int warp,
                                               int lane) {
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (int t = 0; t < kTilesAWarp; ++t) {
    const int column_tile = warp * kTilesAWarp + t;
    const uint4 codes = *reinterpret_cast<const uint4*>(tile + column_tile * 512 + lane * 16);
    const uint2 scales = *reinterpret_cast<const uint2*>(tile + kColumnTiles * 512 + column_tile * 64 + lane / 4 * 8);
    const uint32_t upper01 = UnpackScales01(scales.x), lower01 = UnpackScales01(scales.y);
    const uint32_t upper23 = UnpackScales23(scales.x), lower23 = UnpackScales23(scales.y);
    MmaNvfp4<0>(even, codes.x, upper01, lower01, b[8 * t], b[8 * t + 1]);
    MmaNvfp4<1>(odd, codes.y, upper01, lower01, b[8 * t + 2], b[8 * t + 3]);
    MmaNvfp4<0>(even, codes.z, upper23, lower23, b[8 * t + 4], b[8 * t + 5]);
    MmaNvfp4<1>(odd, codes.w, upper23, lower23, b[8 * t + 6], b[8 * t + 7]);
  }
  return {even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]};
}

__device__ void Multiply(const StreamNvfp4Args& a, const uint8_t* ring, Shared& s, int warp, int lane) {
  uint32_t b[kFragments];
#pragma unroll
  for (int i = 0; i < kFragments / 4; ++i) {
    const uint4 v = a.tokens[(warp * (kFragments / 4) + i) * 32 + lane];
    b[4 * i] = v.x, b[4 * i + 1] = v.y, b[4 * i + 2] = v.z, b[4 * i + 3] = v.w;
  }
  Cursor at, partials;
  for (uint32_t unit = 0; unit < a.units; ++unit, partials.Advance(2)) {
    if (!WarpWait(&s.partials_empty[partials.stage], partials.parity ^ 1, a.failure, Wait::kPartialsEmpty, unit))
      return;
#pragma unroll 1
    for (int r = 0; r < kUnitTiles; ++r, at.Advance()) {
      if (!WarpWait(&s.full[at.stage], at.parity, a.failure, Wait::kStageFull, unit)) return;
      const float4 sums = MultiplyTile(ring + at.stage * kStageBytes, b, warp, lane);
      __syncwarp();
      if (lane == 0) ptx::MbarrierArrive(&s.empty[at.stage]);
      reinterpret_cast<float4*>(s.partials[partials.stage][warp])[r * 32 + lane] = sums;
    }
    __syncwarp();
    if (lane == 0) ptx::MbarrierArrive(&s.partials_full[partials.stage]);
  }
}

__device__ void Sum(const StreamNvfp4Args& a, Shared& s, int thread) {
  Cursor at;
  for (uint32_t unit = 0; unit < a.units; ++unit, at.Advance(2)) {
    if (!WarpWait(&s.partials_full[at.stage], at.parity, a.failure, Wait::kPartialsFull, unit)) return;
    float* out = a.out + (static_cast<uint64_t>(blockIdx.x) * a.units + unit) * kUnitOutputs;
    for (int i = thread; i < kUnitOutputs; i += 32 * kSumWarps) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kMmaWarps; ++w) sum += s.partials[at.stage][w][i];
      out[i] = sum;
    }
    __syncwarp();
    if (thread % 32 == 0) ptx::MbarrierArrive(&s.partials_empty[at.stage]);
  }
}

__global__ void __launch_bounds__(kThreads, 1) StreamNvfp4Kernel(const __grid_constant__ StreamNvfp4Args a) {
  extern __shared__ __align__(128) uint8_t ring[];
  __shared__ Shared s;
  InitBarriers(s.full, kStages, 1);
  InitBarriers(s.empty, kStages, kMmaWarps);
  InitBarriers(s.partials_full, 2, kMmaWarps);
  InitBarriers(s.partials_empty, 2, kSumWarps);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp > kSumWarps)
    Multiply(a, ring, s, warp - kSumWarps - 1, lane);
  else if (warp > 0)
    Sum(a, s, threadIdx.x - 32);
  else if (lane == 0)
    Load(a, ring, s);
}

struct FillTilesArgs {
  uint32_t* words;
  size_t count;
};

// Any word is a code word. Scale fields get exponents 0 and 1.
__global__ void FillTilesKernel(FillTilesArgs a) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.count; i += step) {
    uint32_t word = Random(2, i);
    if (i % (kStageBytes / 4) >= kColumnTiles * 512 / 4) {
      uint32_t field[4];
      for (int j = 0; j < 4; ++j) field[j] = (kScaleBias + (word >> 8 * j & 1)) << 3 | (word >> (8 * j + 1) & 7);
      word = 0;
      for (int j = 0; j < 2; ++j)
        word |= ((field[j] & 15) << 4 | field[j] >> 4 << 8 | (field[j + 2] & 15) << 12 | field[j + 2] >> 4) << 16 * j;
    }
    a.words[i] = word;
  }
}

// ---- the host's side, from the text of common/layout.h ----

uint32_t WordAt(const std::vector<uint8_t>& tile, int offset) {
  uint32_t word;
  std::memcpy(&word, &tile[offset], 4);
  return word;
}

// The value at a row and column of a tile.
double Weight(const std::vector<uint8_t>& tile, int row, int column) {
  constexpr double kE2M1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const int column_tile = column / 64, step = column % 64 / 16;
  const int lane = row % 8 * 4 + column % 8 / 2, reg = row / 8 + 2 * (column % 16 / 8);
  const uint32_t w = WordAt(tile, column_tile * 512 + lane * 16 + step * 4);
  const uint32_t x = reg == 0 ? w : reg == 1 ? w ^ w << 6 : reg == 2 ? w ^ (w >> 4 | w << 28) : w << 2 ^ w >> 6;
  const uint32_t half = x >> 16 * (column % 2) & 0xFFFF;
  const double code = (half >> 15 ? -1 : 1) * kE2M1[half >> 6 & 7];
  const uint32_t scales = WordAt(tile, kColumnTiles * 512 + column_tile * 64 + row % 8 * 8 + row / 8 * 4);
  const uint32_t s = scales >> 16 * (step % 2) & 0xFFFF;
  const uint32_t field = step < 2 ? (s >> 4 & 0xFF) : (s >> 12 | (s & 15) << 4);
  return code * std::ldexp(1 + (field & 7) / 8.0, static_cast<int>(field >> 3) - static_cast<int>(kScaleBias));
}

int Token(int token, int column) { return static_cast<int>(Random(3, token * kK + column) % 7) - 3; }

uint32_t Bf16(int value) {
  const float f = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits >> 16;
}

// Second operands of the MMAs: column g of step s of a warp's column tile t.
std::vector<uint4> TokenFragments() {
  std::vector<uint32_t> words(kMmaWarps * kFragments * 32);
  for (int warp = 0; warp < kMmaWarps; ++warp)
    for (int i = 0; i < kFragments; ++i)
      for (int lane = 0; lane < 32; ++lane) {
        const int column = warp * (kK / kMmaWarps) + i / 2 * 16 + lane % 4 * 2 + i % 2 * 8;
        words[((warp * (kFragments / 4) + i / 4) * 32 + lane) * 4 + i % 4] =
            Bf16(Token(lane / 4, column)) | Bf16(Token(lane / 4, column + 1)) << 16;
      }
  std::vector<uint4> out(words.size() / 4);
  std::memcpy(out.data(), words.data(), words.size() * 4);
  return out;
}

// Outputs of one tile that differ from `got` [lane][4] in their bits.
uint64_t WrongOutputs(const std::vector<uint8_t>& tile, const float* got) {
  std::vector<double> weights(kK);
  uint64_t wrong = 0;
  for (int row = 0; row < kTile; ++row) {
    for (int k = 0; k < kK; ++k) weights[k] = Weight(tile, row, k);
    for (int token = 0; token < kTokens; ++token) {
      double sum = 0;  // exact: multiples of 1/16 below 2^20
      for (int k = 0; k < kK; ++k) sum += weights[k] * Token(token, k);
      const float wanted = static_cast<float>(std::ldexp(sum, kNvfp4Exponent));
      wrong += std::memcmp(&wanted, &got[(row % 8 * 4 + token / 2) * 4 + row / 8 * 2 + token % 2], 4) != 0;
    }
  }
  return wrong;
}

}  // namespace

void MeasureNvfp4(Bench& bench) {
  constexpr uint32_t kUnits = 120, kShortUnits = 12, kL2Tiles = 6;
  const uint64_t block_bytes = static_cast<uint64_t>(kUnits) * kUnitTiles * kStageBytes;
  const DeviceArray<uint8_t> tiles(bench.sms() * block_bytes);
  const DeviceArray<float> out(static_cast<size_t>(bench.sms()) * kUnits * kUnitOutputs);
  const std::vector<uint4> fragments = TokenFragments();
  const DeviceArray<uint4> tokens(fragments.size());
  tokens.Put(fragments);
  Launch(FillTilesKernel, {bench.sms() * 2, 1024}, bench.stream(),
         {reinterpret_cast<uint32_t*>(tiles.data()), tiles.size() / 4});
  AllowShared(StreamNvfp4Kernel, kRingBytes);
  const StreamNvfp4Args all{tiles.data(), block_bytes, kUnits, ~0u, tokens.data(), out.data(), bench.failure()};
  const auto stream = [&](const StreamNvfp4Args& a) {
    Launch(StreamNvfp4Kernel, {bench.sms(), kThreads, kRingBytes}, bench.stream(), a);
  };
  const auto megabytes = [&](const StreamNvfp4Args& a) {
    return 1e-6 * bench.sms() * a.units * kUnitTiles * kStageBytes;
  };

  stream(all);
  bench.Finish();
  uint64_t wrong = 0, checked = 0, seen = 0;
  for (const int block : {0, bench.sms() / 2, bench.sms() - 1})
    for (const uint32_t tile : {0u, 1u, kUnits, kUnits * kUnitTiles - 1}) {
      std::vector<uint8_t> bytes =
          tiles.Get(block * block_bytes + static_cast<uint64_t>(tile) * kStageBytes, kStageBytes);
      const std::vector<float> got =
          out.Get((static_cast<size_t>(block) * kUnits * kUnitTiles + tile) * kTile * kTokens, kTile * kTokens);
      wrong += WrongOutputs(bytes, got.data());
      checked += got.size();
      bytes[512 * (tile % kColumnTiles)] ^= 0x40;  // one bit of a code
      seen += WrongOutputs(bytes, got.data());
    }
  bench.AddCount("nvfp4.check", "NVFP4 outputs unlike the host's", wrong, checked, seen, "bit by bit");

  bench.Add("nvfp4.long", Format("NVFP4 stream times 8 tokens, %.2f GB", megabytes(all) * 1e-3), "TB/s",
            Rates(bench.Time(2, kRepeats, [&](int) { stream(all); }), megabytes(all)), "4.0");
  StreamNvfp4Args some = all;  // each repeat reads another window, so that L2 has nothing of it
  some.units = kShortUnits;
  const auto us = bench.Time(2, 2 * kUnits / kShortUnits, [&](int i) {
    StreamNvfp4Args window = some;
    window.tiles += static_cast<uint64_t>(i % (kUnits / kShortUnits)) * kShortUnits * kUnitTiles * kStageBytes;
    stream(window);
  });
  bench.Add("nvfp4.short", Format("the same, %.0f MB, cold launch", megabytes(some)), "TB/s",
            Rates(us, megabytes(some)), "2.8");
  StreamNvfp4Args resident = all;
  resident.wrap = kL2Tiles;
  bench.Add("nvfp4.l2", Format("the same from L2, %.0f MB", 1e-6 * bench.sms() * kL2Tiles * kStageBytes), "TB/s",
            Rates(bench.Time(2, kRepeats, [&](int) { stream(resident); }), megabytes(resident)), "4.89",
            "the consumers' own limit");
}

}  // namespace musejax::bench
