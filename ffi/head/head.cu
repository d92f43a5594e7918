// raw = x W^T of the LM head for 1 to 16 rows, with x = r(rms(r(S)) g), at the speed of memory.
//
// A persistent grid, one block an SM, each with consecutive 16-row tiles of the weights of all slices here. A warp
// takes a tile through all of K: its ranges of K arrive by bulk copies in stages of its own, its sums never leave
// registers. The rows of x lie in shared memory one chunk of K at a time, made from the residual stream by warps of
// their own while the others multiply the chunk before. Blocks share nothing, so there is no scratch but one float a
// row.
//
// Order of sums: a range from +0 by MMA in ascending K; 8 ranges of a chunk ascending from +0; chunks ascending from
// +0. Weights are the MMA's 16 x 16 operand, rows of x its 8 columns, which do not see each other: a row's bits depend
// neither on the other rows nor on how many there are.
#include "common/math.h"
#include "common/ptx.cuh"
#include "head/head.h"
#include "head/sums.cuh"

namespace musejax::head {
namespace {

constexpr int kTileWarps = 12, kRowWarps = 4, kThreads = 32 * (kTileWarps + kRowWarps), kNormThreads = 1024;
constexpr int kStages = 3;                                      // of a warp: 2 on their way, 8 KB, while 1 is used
constexpr int kStageBytes = int(kChunk / kRanges * kTile * 2);  // one range of one tile
constexpr int kStepBytes = int(kTile * kTile * 2);              // 16 columns of a tile, one MMA
constexpr int kSteps = int(kChunk / kTile);                     // of a chunk
constexpr int kFragment = 32 * 2;                               // words of 16 columns of 8 rows of x, one MMA

// kGroups: groups of 8 rows of x, 1 or 2.
template <int kGroups>
struct Shared {
  alignas(128) uint8_t ring[kTileWarps][kStages][kStageBytes];
  alignas(16) uint32_t x[2][kSteps * kFragment * kGroups];  // [chunk % 2][step][lane][group][word]
  uint64_t arrived[kTileWarps][kStages];
  uint64_t x_full[2], x_empty[2];
};
static_assert(sizeof(Shared<2>) <= 227 * 1024, "shared memory of a block");

struct Gemm {
  const float *stream, *scales;
  const bf16* final_norm;
  const uint8_t* lm_head;
  float* raw;
  int64_t k, n, slice_bytes;
  int count, tiles, all_tiles;  // rows of x; tiles of a slice, of all slices here

  __device__ int chunks() const { return int(k / Chunk(k)); }
  __device__ int range_bytes() const { return int(Range(k) * kTile * 2); }
  __device__ int64_t tile_bytes() const { return Chunk(k) * kTile * 2; }  // in one chunk
};

// The tiles of this block are first .. last - 1; warp w takes first + w in turn 0, and 12 later in each next turn.
struct Share {
  int first, last;
  __device__ explicit Share(int all)
      : first(int(int64_t(all) * blockIdx.x / gridDim.x)), last(int(int64_t(all) * (blockIdx.x + 1) / gridDim.x)) {}
  __device__ int turns() const { return (last - first + kTileWarps - 1) / kTileWarps; }
};

// Of a whole warp. Warps of one block wait for each other and for copies, never for another block: a wait that does not
// end is a bug.
__device__ __forceinline__ void Wait(uint64_t* bar, uint32_t parity) {
  if (!ptx::MbarrierWaitParity(bar, parity)) __trap();
  __syncwarp();
}

// A warp's weights in the order in which it uses them: ranges of a chunk, chunks of a tile, its tiles. One lane.
struct Fetcher {
  const Gemm& g;
  uint8_t (*stages)[kStageBytes];
  uint64_t* arrived;
  uint64_t policy;
  int tile, last;
  int chunk = 0, range = 0, stage = 0;

  __device__ void Next() {
    if (tile >= last) return;
    const int64_t in_slice = (int64_t(chunk) * g.tiles + tile % g.tiles) * g.tile_bytes() + range * g.range_bytes();
    ptx::MbarrierArriveExpectTx(&arrived[stage], g.range_bytes());
    ptx::CpAsyncBulk(stages[stage], g.lm_head + tile / g.tiles * g.slice_bytes + in_slice, g.range_bytes(),
                     &arrived[stage], policy);
    if (++stage == kStages) stage = 0;
    if (++range < kRanges) return;
    range = 0;
    if (++chunk < g.chunks()) return;
    chunk = 0, tile += kTileWarps;
  }
};

template <int kGroups>
using Sums = float[kGroups][4];  // as MmaM16N8K16Bf16 holds them

template <int kGroups>
__device__ __forceinline__ void Clear(Sums<kGroups>& sums) {
  for (auto& group : sums)
    for (float& v : group) v = 0.0f;
}

template <int kGroups>
__device__ __forceinline__ void Add(Sums<kGroups>& sums, const Sums<kGroups>& more) {
  for (int i = 0; i < kGroups; ++i)
    for (int r = 0; r < 4; ++r) sums[i][r] = sums[i][r] + more[i][r];
}

// `steps` MMAs from one stage and the range's part of x.
template <int kGroups>
__device__ __forceinline__ void MultiplyRange(const uint8_t* stage, const uint32_t* x, int steps, Sums<kGroups>& sums) {
  const int lane = threadIdx.x % 32;
  Clear<kGroups>(sums);
#pragma unroll 4
  for (int i = 0; i < steps; ++i) {
    const uint4 w = *reinterpret_cast<const uint4*>(stage + i * kStepBytes + lane * 16);
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
    const uint32_t* b = x + (i * 32 + lane) * 2 * kGroups;
    if constexpr (kGroups == 2) {
      const uint4 v = *reinterpret_cast<const uint4*>(b);
      ptx::MmaM16N8K16Bf16(sums[0], a, v.x, v.y);
      ptx::MmaM16N8K16Bf16(sums[1], a, v.z, v.w);
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(b);
      ptx::MmaM16N8K16Bf16(sums[0], a, v.x, v.y);
    }
  }
}

template <int kGroups>
__device__ __forceinline__ void StoreTile(const Gemm& g, int tile, const Sums<kGroups>& sums) {
  const int lane = threadIdx.x % 32, slice = tile / g.tiles;
  for (int i = 0; i < kGroups; ++i)
    for (int r = 0; r < 4; ++r) {
      const int row = 8 * i + lane % 4 * 2 + r % 2;
      const int64_t column = int64_t(tile % g.tiles) * kTile + lane / 4 + r / 2 * 8;
      if (row < g.count && column < g.n) g.raw[(int64_t(slice) * g.count + row) * g.n + column] = sums[i][r];
    }
}

// A warp that multiplies.
template <int kGroups>
__device__ void RunTiles(const Gemm& g, Shared<kGroups>& shared, int warp, Share share) {
  const int lane = threadIdx.x % 32, steps = int(Range(g.k) / kTile), chunks = g.chunks(), turns = share.turns();
  Fetcher fetcher{g,         shared.ring[warp], shared.arrived[warp], ptx::CreatePolicyEvictFirst(), share.first + warp,
                  share.last};
  if (lane == 0)
    for (int i = 0; i < kStages; ++i) fetcher.Next();
  int stage = 0, use = 0;  // use: of the buffers of x
  uint32_t phase = 0;      // of the stages
  for (int turn = 0; turn < turns; ++turn) {
    const int tile = share.first + warp + turn * kTileWarps;
    Sums<kGroups> total;
    Clear<kGroups>(total);
    for (int c = 0; c < chunks; ++c, ++use) {
      Wait(&shared.x_full[use % 2], use / 2 % 2);
      if (tile < share.last) {
        Sums<kGroups> chunk;
        Clear<kGroups>(chunk);
        for (int range = 0; range < kRanges; ++range) {
          Wait(&shared.arrived[warp][stage], phase);
          Sums<kGroups> sums;
          MultiplyRange<kGroups>(shared.ring[warp][stage], &shared.x[use % 2][range * steps * kFragment * kGroups],
                                 steps, sums);
          Add<kGroups>(chunk, sums);
          __syncwarp();
          if (lane == 0) {
            ptx::FenceProxyAsync();  // the stage has been read: it may be written
            fetcher.Next();
          }
          if (++stage == kStages) stage = 0, phase ^= 1;
        }
        Add<kGroups>(total, chunk);
      }
      __syncwarp();
      if (lane == 0) ptx::MbarrierArrive(&shared.x_empty[use % 2]);
    }
    if (tile < share.last) StoreTile<kGroups>(g, tile, total);
  }
}

// Four columns of a row: r(r(S) / rms g), as two words.
__device__ __forceinline__ uint2 NormedColumns(float4 s, float scale, uint2 gain) {
  const float x[4] = {s.x, s.y, s.z, s.w};
  const uint32_t gains[2] = {gain.x, gain.y};
  uint32_t word[2];
  for (int i = 0; i < 2; ++i) {
    const float low = RoundBf16(x[2 * i]) * scale, high = RoundBf16(x[2 * i + 1]) * scale;
    word[i] = uint32_t(ToBf16(low * FromBf16(uint16_t(gains[i])))) |
              uint32_t(ToBf16(high * FromBf16(uint16_t(gains[i] >> 16)))) << 16;
  }
  return {word[0], word[1]};
}

// A warp that makes x: a lane has 4 columns of row lane / 4 of a group, columns 4 (lane % 4) of a step. Rows that are
// not there are zeros.
template <int kGroups>
__device__ void RunRows(const Gemm& g, Shared<kGroups>& shared, int warp, int turns) {
  constexpr int kBatch = 8;  // loads on their way
  const int lane = threadIdx.x % 32, chunks = g.chunks(), units = int(Chunk(g.k) / kTile) * kGroups;
  const int quarter = lane % 4, word = quarter / 2, t = quarter % 2 * 2;
  const int group = warp % kGroups, row = lane / 4 + 8 * group;  // of all of a warp's units
  const float scale = row < g.count ? g.scales[row] : 0.0f;
  for (int use = 0; use < turns * chunks; ++use) {
    const int64_t chunk = use % chunks * Chunk(g.k);
    Wait(&shared.x_empty[use % 2], use / 2 % 2 ^ 1);
    for (int unit = warp; unit < units; unit += kRowWarps * kBatch) {
      float4 s[kBatch];
      uint2 gain[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = unit + i * kRowWarps;
        const int64_t column = chunk + at / kGroups * kTile + 4 * quarter;
        const bool there = at < units && row < g.count;
        s[i] = there ? *reinterpret_cast<const float4*>(g.stream + row * g.k + column) : float4{};
        gain[i] = there ? *reinterpret_cast<const uint2*>(g.final_norm + column) : uint2{};
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = unit + i * kRowWarps;
        if (at >= units) break;
        const uint2 normed = NormedColumns(s[i], scale, gain[i]);
        uint32_t* out = &shared.x[use % 2][((at / kGroups * 32 + lane / 4 * 4 + t) * kGroups + group) * 2 + word];
        out[0] = normed.x;
        out[2 * kGroups] = normed.y;
      }
    }
    __syncwarp();
    if (lane == 0) ptx::MbarrierArrive(&shared.x_full[use % 2]);
  }
}

template <int kGroups>
__global__ void __launch_bounds__(kThreads, 1) HeadKernel(const __grid_constant__ Gemm g) {
  extern __shared__ __align__(128) uint8_t memory[];
  static_assert(kRowWarps % kGroups == 0, "RunRows: a warp makes rows of one group");
  Shared<kGroups>& shared = *reinterpret_cast<Shared<kGroups>*>(memory);
  if (threadIdx.x == 0) {
    for (auto& warp : shared.arrived)
      for (uint64_t& bar : warp) ptx::MbarrierInit(&bar, 1);
    for (uint64_t& bar : shared.x_full) ptx::MbarrierInit(&bar, kRowWarps);
    for (uint64_t& bar : shared.x_empty) ptx::MbarrierInit(&bar, kTileWarps);
    ptx::FenceMbarrierInit();
  }
  __syncthreads();
  const int warp = int(threadIdx.x) / 32;
  const Share share(g.all_tiles);
  if (warp < kTileWarps)
    RunTiles<kGroups>(g, shared, warp, share);
  else
    RunRows<kGroups>(g, shared, warp - kTileWarps, share.turns());
}

__global__ void __launch_bounds__(kNormThreads) NormKernel(const Model m, const float* stream, float* scales) {
  __shared__ LeafSums shared;
  const float* x = stream + blockIdx.x * m.shape.hidden;
  const float sum = BlockSumOfSquares(shared, m.shape.hidden, [&](int64_t i) { return RoundBf16(x[i]); });
  if (threadIdx.x == 0) scales[blockIdx.x] = ReciprocalRms(sum, m.shape.hidden, m.rms_eps);
}

// One block an SM, but no more blocks than tiles.
cudaError_t GridOf(int tiles, int* blocks) {
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  *blocks = tiles < sms ? tiles : sms;
  return error;
}

template <int kGroups>
cudaError_t LaunchGemm(cudaStream_t stream, const Gemm& g) {
  int blocks = 0;
  if (const cudaError_t error = GridOf(g.all_tiles, &blocks); error != cudaSuccess) return error;
  constexpr int kBytes = int(sizeof(Shared<kGroups>));
  const cudaError_t error =
      cudaFuncSetAttribute(HeadKernel<kGroups>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  HeadKernel<kGroups><<<blocks, kThreads, kBytes, stream>>>(g);
  return cudaGetLastError();
}

}  // namespace

cudaError_t Head(cudaStream_t stream, const Model& m, const float* rows, const bf16* final_norm, const uint8_t* lm_head,
                 int64_t slices, int64_t count, float* scales, float* raw) {
  if (slices * count == 0) return cudaSuccess;
  NormKernel<<<unsigned(count), kNormThreads, 0, stream>>>(m, rows, scales);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  Gemm g{};
  g.stream = rows, g.scales = scales, g.final_norm = final_norm, g.lm_head = lm_head, g.raw = raw;
  g.k = m.shape.hidden, g.n = m.vocab / kSlices, g.slice_bytes = HeadBytes(m.vocab, m.shape.hidden);
  g.count = int(count), g.tiles = int(Padded(g.n, kTile) / kTile), g.all_tiles = int(slices) * g.tiles;
  if (g.all_tiles == 0) return cudaSuccess;
  return count <= 8 ? LaunchGemm<1>(stream, g) : LaunchGemm<2>(stream, g);
}

}  // namespace musejax::head
