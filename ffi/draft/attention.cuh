// Attention of a block: every row over the context and the block alike, in both directions, within the window.
//
// A unit is one key/value head and one piece of 32 absolute positions; two warps have a query head of it, all 16 rows
// at once, and half of its channels each: scores by MMAs, the piece's own maximum a row, float32 probabilities, each as
// the sum of two bf16 numbers for the product with the values. Pieces are then merged in ascending order. So a head's
// bits depend on nothing but its keys.
#pragma once

#include "draft/rows.cuh"

namespace musejax::draft {

// Positions that a row of the block sees: first .. last; in the ring below `length`, in the block from there on.
struct Seen {
  int length, held, end, window;
  __device__ Seen(const Context& c, int length)
      : length(length),
        held(Max(0, length - c.p.slots)),
        end(length + c.p.rows),
        window(int(c.p.model.window < (1 << 29) ? c.p.model.window : 1 << 29)) {}
  __device__ int First(int row) const { return Max(held, length + row - window + 1); }
  __device__ int Last(int row) const { return Min(end, length + row + window) - 1; }
  __device__ int FirstPiece() const { return First(0) / kPiece; }
  __device__ int Pieces() const { return (end - 1) / kPiece + 1 - FirstPiece(); }
};

inline constexpr int kMaxHead = 128;
inline constexpr int kKeyTiles = kPiece / 8, kValueSteps = kPiece / 16;  // MMAs along a piece

// Lengths of rows are such that the lanes of an operand's load meet no bank twice.
struct AttentionShared {
  uint32_t keys[kPiece][kMaxHead / 2 + 4];       // [position][two channels]
  uint32_t values[kPiece / 2][kMaxHead + 8];     // [two positions][channel]
};
static_assert(sizeof(AttentionShared) <= sizeof(Shared::any), "it lies where GEMMs keep their input");

// Words of two channels of keys and values at a position, zeros where no row sees it.
struct KeyWords {
  const uint32_t *ring_keys, *ring_values, *own_keys, *own_values;  // of a head
  __device__ KeyWords(const Context& c, const LayerArrays& layer, int head) {
    const int64_t width = c.p.model.shape.head_dim, ring = int64_t(head) * c.p.slots * width,
                  own = int64_t(head) * kRows * width;
    const auto words = [](const uint16_t* x) { return reinterpret_cast<const uint32_t*>(x); };
    ring_keys = words(layer.keys + ring), ring_values = words(layer.values + ring);
    own_keys = words(c.Frame<const uint16_t>(c.p.at.k) + own);
    own_values = words(c.Frame<const uint16_t>(c.p.at.v) + own);
  }
  __device__ __forceinline__ uint32_t At(bool value, const Context& c, const Seen& see, int position, int word,
                                         int words) const {
    if (position < see.held || position >= see.end) return 0;
    if (position >= see.length) return (value ? own_values : own_keys)[(position - see.length) * words + word];
    return (value ? ring_values : ring_keys)[int64_t(position % c.p.slots) * words + word];
  }
};

// A piece of a head. By all threads; ends with a block barrier.
__device__ __forceinline__ void LoadPiece(const Context& c, const LayerArrays& layer, const Seen& see, int head,
                                          int piece, AttentionShared& to) {
  const int words = int(c.p.model.shape.head_dim) / 2, word = int(threadIdx.x) % words;
  const KeyWords from(c, layer, head);
#pragma unroll 2
  for (int two = int(threadIdx.x) / words; two < kPiece / 2; two += kThreads / words) {
    const int position = piece * kPiece + 2 * two;
    const uint32_t a = from.At(true, c, see, position, word, words);
    const uint32_t b = from.At(true, c, see, position + 1, word, words);
    to.keys[2 * two][word] = from.At(false, c, see, position, word, words);
    to.keys[2 * two + 1][word] = from.At(false, c, see, position + 1, word, words);
    to.values[two][2 * word] = __byte_perm(a, b, 0x5410);
    to.values[two][2 * word + 1] = __byte_perm(a, b, 0x7632);
  }
  __syncthreads();
}

// A query head as the first operand of MMAs.
__device__ __forceinline__ void LoadQueries(const Context& c, int head, uint32_t (&q)[kMaxHead / 16][4]) {
  const int g = Lane() / 4, t = Lane() % 4, words = int(c.p.model.shape.head_dim) / 2;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(c.Frame<const uint16_t>(c.p.at.q)) +
                         (int64_t(head) * kRows + g) * words + t;
#pragma unroll
  for (int step = 0; step < kMaxHead / 16; ++step)
#pragma unroll
    for (int r = 0; r < 4; ++r)
      q[step][r] = 8 * step < words ? from[r % 2 * 8 * words + 8 * step + r / 2 * 4] : 0;
}

// Scores of a query head, and the probabilities made of them, as MMAs leave them: p[tile][i] is of row lane / 4 +
// 8 (i / 2) and position 8 tile + 2 (lane % 4) + i % 2.
struct Scores {
  float p[kKeyTiles][4];
  float most[2], sum[2];  // of rows lane / 4 and 8 more

  __device__ __forceinline__ void Multiply(const Context& c, const uint32_t (&q)[kMaxHead / 16][4],
                                           const AttentionShared& s) {
    const int g = Lane() / 4, t = Lane() % 4, steps = int(c.p.model.shape.head_dim) / 16;
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[tile][i] = 0.0f;
#pragma unroll
    for (int step = 0; step < kMaxHead / 16; ++step) {
      if (step >= steps) break;
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
        const uint32_t* key = &s.keys[tile * 8 + g][step * 8 + t];
        ptx::MmaM16N8K16Bf16(p[tile], q[step], key[0], key[4]);
      }
    }
  }
  __device__ __forceinline__ void Weigh(const Context& c, const Seen& see, int piece) {
    const int g = Lane() / 4, t = Lane() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = g + 8 * half, first = see.First(row), last = row < c.p.rows ? see.Last(row) : -1;
      float largest = -INFINITY, total = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kKeyTiles; ++i) {
        float& x = p[i / 2][2 * half + i % 2];
        const int position = piece * kPiece + i / 2 * 8 + 2 * t + i % 2;
        x = position >= first && position <= last ? x * c.p.model.attention_scale : -INFINITY;
        largest = fmaxf(largest, x);
      }
      for (int x = 1; x <= 2; x *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, x));
#pragma unroll
      for (int i = 0; i < 2 * kKeyTiles; ++i) {
        float& x = p[i / 2][2 * half + i % 2];
        x = largest == -INFINITY ? 0.0f : Exp(x - largest);
        total += x;
      }
      for (int x = 1; x <= 2; x *= 2) total += __shfl_xor_sync(kAllLanes, total, x);
      most[half] = largest, sum[half] = total;
    }
  }
};

// part = p values, of half `half` of the channels, 8 at a time.
__device__ __forceinline__ void AddValues(const Context& c, const Scores& scores, const AttentionShared& s, int half,
                                          float* part) {
  const int g = Lane() / 4, t = Lane() % 4, width = int(c.p.model.shape.head_dim);
  uint32_t high[kValueSteps][4], low[kValueSteps][4];
#pragma unroll
  for (int step = 0; step < kValueSteps; ++step)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float* p = &scores.p[2 * step + r / 2][r % 2 * 2];
      high[step][r] = PackBf16(p[0], p[1]);
      const Two taken = Unpack(high[step][r]);
      low[step][r] = PackBf16(p[0] - taken.a, p[1] - taken.b);
    }
#pragma unroll 2
  for (int channel = half * width / 2; channel < (half + 1) * width / 2; channel += 8) {
    float o[4] = {};
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const uint32_t a = s.values[step * 8 + t][channel + g], b = s.values[step * 8 + t + 4][channel + g];
      ptx::MmaM16N8K16Bf16(o, high[step], a, b);
      ptx::MmaM16N8K16Bf16(o, low[step], a, b);
    }
    *reinterpret_cast<float2*>(part + g * width + channel + 2 * t) = {o[0], o[1]};
    *reinterpret_cast<float2*>(part + (g + 8) * width + channel + 2 * t) = {o[2], o[3]};
  }
}

// By all threads; needs a block barrier before it.
__device__ __noinline__ void Attend(int layer_number, int length) {
  const Context& c = TheContext();
  const LayerArrays layer = c.p.layer[layer_number];
  const Seen see(c, length);
  AttentionShared& s = *reinterpret_cast<AttentionShared*>(OfBlock().any);
  const DraftShape& shape = c.p.model.shape;
  const int heads = c.p.slices * int(shape.kv_slice()), group = int(shape.heads / shape.kv_heads);
  const int pieces = see.Pieces();
  for (int unit = blockIdx.x; unit < heads * pieces; unit += gridDim.x) {
    const int kv = unit / pieces, n = unit % pieces, piece = see.FirstPiece() + n;
    const int half = Warp() % 2, last = (kv + 1) * group;
    LoadPiece(c, layer, see, kv, piece, s);
#pragma unroll 1
    for (int head = kv * group + Warp() / 2; head < last; head += kWarps / 2) {
      const int64_t at = (int64_t(head) * pieces + n) * kRows;
      uint32_t q[kMaxHead / 16][4];
      LoadQueries(c, head, q);
      Scores scores;
      scores.Multiply(c, q, s);
      scores.Weigh(c, see, piece);
      AddValues(c, scores, s, half, c.Frame<float>(c.p.at.part) + at * shape.head_dim);
      if (Lane() % 4 == 0 && half == 0)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          c.Frame<float>(c.p.at.part_most)[at + Lane() / 4 + 8 * i] = scores.most[i];
          c.Frame<float>(c.p.at.part_sum)[at + Lane() / 4 + 8 * i] = scores.sum[i];
        }
    }
    __syncthreads();
  }
}

// o = r(sum of parts / sum of weights), to all ranks; a warp has 64 channels of a row.
__device__ __noinline__ void MergePieces(int length) {
  constexpr int kAtOnce = 16;  // parts that are asked for at a time
  const Context& c = TheContext();
  const Seen see(c, length);
  const DraftShape& s = c.p.model.shape;
  const int heads = int(s.heads_slice()), width = int(s.head_dim), pieces = see.Pieces(), spans = CeilDiv(width, 64);
  c.ForTasks(c.p.slices * heads * spans * c.p.rows, [&](int i) {
    const int row = i % c.p.rows, span = i / c.p.rows % spans, head = i / c.p.rows / spans;
    const int64_t first = int64_t(head) * pieces * kRows + row;
    const float* most = c.Frame<const float>(c.p.at.part_most) + first;
    const float* sums = c.Frame<const float>(c.p.at.part_sum) + first;
    const float* parts = c.Frame<const float>(c.p.at.part) + first * width + 64 * span + 2 * Lane();
    const bool there = Has(width - 64 * span);
    float largest = -INFINITY, sum = 0.0f;
    for (int n = Lane(); n < pieces; n += 32) largest = fmaxf(largest, most[n * kRows]);
    for (int x = 16; x; x /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, x));
    Two total{0.0f, 0.0f};
    for (int begin = 0; begin < pieces; begin += kAtOnce) {
      const int mine = begin + Lane() % kAtOnce;
      float weight_of = 0.0f, part_of = 0.0f;
      float2 part[kAtOnce] = {};
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
        if (begin + n < pieces && there)
          part[n] = *reinterpret_cast<const float2*>(parts + int64_t(begin + n) * kRows * width);
      if (mine < pieces) weight_of = Exp(most[mine * kRows] - largest), part_of = weight_of * sums[mine * kRows];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        const float weight = __shfl_sync(kAllLanes, weight_of, n);
        sum += __shfl_sync(kAllLanes, part_of, n);
        total = {total.a + weight * part[n].x, total.b + weight * part[n].y};
      }
    }
    const uint32_t o = PackBf16(total.a / sum, total.b / sum);
    c.ForRanks(head / heads, [&](uint8_t* frames, int to) {
      const int64_t number = int64_t(to) * heads + head % heads;
      uint16_t* at = reinterpret_cast<uint16_t*>(frames + c.p.at.o) + (number * kRows + row) * width + 64 * span;
      if (there) reinterpret_cast<uint32_t*>(at)[Lane()] = o;
    });
  });
}

}  // namespace musejax::draft
