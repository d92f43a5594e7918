// Attention of a block: every row over the context and the block alike, in both directions, within the window.
//
// A unit is one query head and one piece of 64 absolute positions: scores by fmaf over ascending channels, the piece's
// own maximum, float32 probabilities, values added in ascending order. Pieces are then merged in ascending order. So a
// head's bits depend on nothing but its keys.
#pragma once

#include "draft/rows.cuh"

namespace musejax::draft {

// Positions that a row of the block sees: first .. last. They lie in the ring below `length`, in the block from there on.
struct Seen {
  int length, held, end, window;
  __device__ Seen(const Context& c, int length)
      : length(length),
        held(length > c.p.slots ? length - c.p.slots : 0),
        end(length + c.p.rows),
        window(int(c.p.model.window < (1 << 29) ? c.p.model.window : 1 << 29)) {}
  __device__ int First(int row) const { return Max(held, length + row - window + 1); }
  __device__ int Last(int row) const { return Min(end, length + row + window) - 1; }
  __device__ int FirstPiece() const { return First(0) / kPiece; }
  __device__ int Pieces() const { return (end - 1) / kPiece + 1 - FirstPiece(); }
};

inline constexpr int kMaxHead = 128;

struct AttentionShared {
  uint32_t keys[kPiece][kMaxHead / 2 + 1];  // rows of odd length: lanes with a key each meet no bank twice
  alignas(16) uint16_t values[kPiece][kMaxHead];
  alignas(16) float q[kRows][kMaxHead];
  float p[kRows][kPiece];  // scores, then probabilities
};
static_assert(sizeof(AttentionShared) <= sizeof(Shared::any), "it lies where GEMMs keep their input");

// Keys and values of a piece, zeros at positions that no row sees; and the queries of a head.
__device__ inline void LoadPiece(const Context& c, const LayerArrays& layer, const Seen& see, int head, int piece,
                                 AttentionShared& to) {
  const DraftShape& s = c.p.model.shape;
  const int width = int(s.head_dim), words = width / 2, kv = head / int(s.heads / s.kv_heads);
  for (int i = threadIdx.x; i < kPiece * words; i += kThreads) {
    const int j = i / words, word = i % words, position = piece * kPiece + j;
    uint32_t key = 0, value = 0;
    if (position >= see.held && position < see.end) {
      const bool own = position >= see.length;
      const int64_t at = own ? int64_t(kv) * kRows + position - see.length
                             : int64_t(kv) * c.p.slots + position % c.p.slots;
      const uint16_t* keys = own ? c.Frame<const uint16_t>(c.p.at.k) : layer.keys;
      const uint16_t* values = own ? c.Frame<const uint16_t>(c.p.at.v) : layer.values;
      key = reinterpret_cast<const uint32_t*>(keys + at * width)[word];
      value = reinterpret_cast<const uint32_t*>(values + at * width)[word];
    }
    to.keys[j][word] = key;
    reinterpret_cast<uint32_t*>(to.values[j])[word] = value;
  }
  for (int i = threadIdx.x; i < c.p.rows * width; i += kThreads)
    to.q[i / width][i % width] =
        FromBf16(c.Frame<const uint16_t>(c.p.at.q)[(int64_t(head) * kRows + i / width) * width + i % width]);
  __syncthreads();
}

// p = scores, -inf where a row does not see a position.
__device__ inline void Score(const Context& c, const Seen& see, int piece, AttentionShared& s) {
  constexpr int kEach = kRows * kPiece / kThreads;  // rows of a thread
  const int j = int(threadIdx.x) % kPiece, first = int(threadIdx.x) / kPiece * kEach, position = piece * kPiece + j;
  float sum[kEach] = {};
  for (int i = 0; i < int(c.p.model.shape.head_dim); i += 2) {
    const Two key = Unpack(s.keys[j][i / 2]);
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const float2 q = *reinterpret_cast<const float2*>(&s.q[first + r][i]);
      sum[r] = fmaf(q.y, key.b, fmaf(q.x, key.a, sum[r]));
    }
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int row = first + r;
    const bool seen = row < c.p.rows && position >= see.First(row) && position <= see.Last(row);
    s.p[row][j] = seen ? sum[r] * c.p.model.attention_scale : -INFINITY;
  }
  __syncthreads();
}

// p = exp(p - the row's largest); a warp has a row.
__device__ inline void Weigh(const Context& c, int64_t unit, AttentionShared& s) {
  float* p = s.p[c.warp];
  float most = fmaxf(p[c.lane], p[c.lane + 32]);
  for (int x = 16; x; x /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, x));
  float sum = 0.0f;
  for (int i = c.lane; i < kPiece; i += 32) {
    p[i] = most == -INFINITY ? 0.0f : Exp(p[i] - most);
    sum += p[i];
  }
  for (int x = 16; x; x /= 2) sum += __shfl_xor_sync(kAllLanes, sum, x);
  if (c.lane == 0) {
    c.Frame<float>(c.p.at.part_most)[unit * kRows + c.warp] = most;
    c.Frame<float>(c.p.at.part_sum)[unit * kRows + c.warp] = sum;
  }
  __syncthreads();
}

// part = p values; a thread has a channel and every few rows.
__device__ inline void AddValues(const Context& c, int64_t unit, const AttentionShared& s) {
  const int width = int(c.p.model.shape.head_dim), channel = int(threadIdx.x) % width;
  const int step = kThreads / width;
  for (int row = int(threadIdx.x) / width; row < c.p.rows; row += step) {
    float sum = 0.0f;
#pragma unroll 16
    for (int j = 0; j < kPiece; ++j) sum = fmaf(s.p[row][j], FromBf16(s.values[j][channel]), sum);
    c.Frame<float>(c.p.at.part)[(unit * kRows + row) * width + channel] = sum;
  }
  __syncthreads();
}

// By all threads; needs a block barrier before it.
__device__ __noinline__ void Attend(const Context& c, const LayerArrays& layer, const Seen& see) {
  AttentionShared& s = *reinterpret_cast<AttentionShared*>(c.shared.any);
  const int heads = c.p.slices * int(c.p.model.shape.heads_slice()), pieces = see.Pieces();
  for (int unit = blockIdx.x; unit < heads * pieces; unit += gridDim.x) {
    const int head = unit / pieces, piece = see.FirstPiece() + unit % pieces;
    LoadPiece(c, layer, see, head, piece, s);
    Score(c, see, piece, s);
    Weigh(c, unit, s);
    AddValues(c, unit, s);
  }
}

// o = r(sum of parts / sum of weights), to all ranks.
__device__ __noinline__ void MergePieces(const Context& c, const Seen& see) {
  const DraftShape& s = c.p.model.shape;
  const int heads = int(s.heads_slice()), width = int(s.head_dim), pieces = see.Pieces();
  c.ForTasks(c.p.slices * heads * c.p.rows, [&](int i) {
    const int row = i % c.p.rows, head = i / c.p.rows;
    const auto at = [&](int piece) { return (int64_t(head) * pieces + piece) * kRows + row; };
    const float *most = c.Frame<const float>(c.p.at.part_most), *sums = c.Frame<const float>(c.p.at.part_sum);
    const float* parts = c.Frame<const float>(c.p.at.part);
    float largest = -INFINITY;
    for (int piece = c.lane; piece < pieces; piece += 32) largest = fmaxf(largest, most[at(piece)]);
    for (int x = 16; x; x /= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, x));
    float sum = 0.0f;
    Two low{0.0f, 0.0f}, high{0.0f, 0.0f};
    for (int piece = 0; piece < pieces; ++piece) {
      const float weight = Exp(most[at(piece)] - largest);
      const float* part = parts + at(piece) * width + 2 * c.lane;
      sum += weight * sums[at(piece)];
      if (Has(c, width)) low = {low.a + weight * part[0], low.b + weight * part[1]};
      if (width > 64) high = {high.a + weight * part[64], high.b + weight * part[65]};
    }
    const HeadRow o{{low.a / sum, low.b / sum}, {high.a / sum, high.b / sum}};
    c.ForRanks(head / heads, [&](uint8_t* frames, int to) {
      const int64_t number = int64_t(to) * heads + head % heads;
      StoreHead(c, reinterpret_cast<uint16_t*>(frames + c.p.at.o) + (number * kRows + row) * width, o);
    });
  });
}

}  // namespace musejax::draft
