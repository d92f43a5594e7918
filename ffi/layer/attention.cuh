// Attention of one layer: units of history through the ring, the last blocks of each row by row, their merge with
// output norm and gate, and the keys and values that go to the cache.
//
// Queries, keys and values travel as permuted records, t (of 4) holding columns 16t .. 16t + 15 two a register, as 32
// bytes of a cache row give them. A sum over keys is 17 floats of t: channels 16t .. 16t + 15, then the denominator, in
// 6 words. Where a key stands in an MMA follows from its position alone (16 a block), and blocks are added by plain
// adds, so a row's bits do not depend on which of its blocks are history and which are tail.
#pragma once

#include "layer/attention_units.h"
#include "layer/rows.cuh"
#include "layer/stream.cuh"

namespace musejax::layer {

inline constexpr int kHeadColumns = 64;
inline constexpr int kRowBytes = 2 * kHeadColumns;
inline constexpr int kRecordWords = 4 * RecordWords(kHeadColumns);
inline constexpr int kSumWords = 6;                            // of t
inline constexpr int kMergeBatch = 12;                        // words a merging lane has on their way
inline constexpr int kUnseen = 0x7FFFFFFF;                     // the first position seen by a row of padding
inline constexpr int kValuesAt = kStageBytes / 2 / 128 * 128;  // in a stage, keys first
static_assert(kStageBlocks * kBlockKeys * kRowBytes <= kValuesAt, "a stage holds the keys and values of its blocks");
static_assert(kTailBlocks == 3 && kRecordWords == 12, "as Frames says");

// ---- permuted records --------------------------------------------------------------------------------------------

// Publishes a row that lies two columns a lane: lane i is register i % 8 of t = i / 8.
template <Scope kScope>
__device__ __forceinline__ void PublishPermuted(Word* record, uint32_t columns, uint32_t tag) {
  const int lane = threadIdx.x % 32, t = lane / 3 % 4, first = lane % 3 * 3;
  uint32_t r[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) r[i] = __shfl_sync(kAllLanes, columns, t * 8 + (first + i) % 8);
  if (lane < kRecordWords) Publish<kScope>(record + lane, r[0], r[1], r[2], tag);
}

// Registers of t = lane % 4 of a bf16 row of 64 columns in plain order.
__device__ __forceinline__ void LoadPermuted(const void* row, uint32_t (&r)[8]) {
  const uint4* from = static_cast<const uint4*>(row) + threadIdx.x % 4 * 2;
  const uint4 a = from[0], b = from[1];
  r[0] = a.x, r[1] = a.y, r[2] = a.z, r[3] = a.w, r[4] = b.x, r[5] = b.y, r[6] = b.z, r[7] = b.w;
}

// ---- the pass ----------------------------------------------------------------------------------------------------

// Positions that the cache holds.
template <typename S>
__device__ __forceinline__ int Stored(const Context<S>& c) {
  return c.moved ? c.length : c.length - c.accepted;
}
template <typename S>
__device__ __forceinline__ History HistoryOf(const Context<S>& c) {
  return HistoryOf(c.length, Stored(c), c.arrays().window, c.pass().max_units);
}

// In lane r, the path of row r from its root: bit a is set if row a is on it, so the node at depth d is the d-th bit.
template <typename S>
__device__ __forceinline__ uint32_t PathOfLane(const Context<S>& c) {
  int ancestor = c.lane() < c.pass().rows ? c.pass().parents[c.lane()] : -1;
  if (ancestor >= c.lane()) ancestor = -1;
  uint32_t path = 1u << c.lane();
#pragma unroll
  for (int reach = 1; reach < kRows; reach *= 2) {  // path holds `reach` nodes, ancestor is the next
    const int from = ancestor < 0 ? c.lane() : ancestor;
    const uint32_t further = __shfl_sync(kAllLanes, path, from);
    const int next = __shfl_sync(kAllLanes, ancestor, from);
    if (ancestor >= 0) path |= further, ancestor = next;
  }
  return path;
}
__device__ __forceinline__ int NodeAt(uint32_t path, int depth) {
  for (; depth > 0; --depth) path &= path - 1;
  return (__ffs(path) - 1) & (kRows - 1);
}
template <typename S>
__device__ __forceinline__ int PositionOf(const Context<S>& c, uint32_t path) {
  return c.length + __popc(path) - 1;
}

// ---- one block of keys -------------------------------------------------------------------------------------------

// Of rows g and g + 8 of an MMA, channels 16t + 2j and the next: value[j][0, 1] and value[j][2, 3]; and denominators.
struct BlockSums {
  float value[8][4] = {}, weight[2] = {};

  __device__ __forceinline__ void Add(const BlockSums& more) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) value[j][e] = value[j][e] + more.value[j][e];
    weight[0] = weight[0] + more.weight[0], weight[1] = weight[1] + more.weight[1];
  }
};

// The exponential is the GPU's own, a tenth of the instructions of math.h's: it is rounded to bf16 at once, and bits
// are promised within a platform only.
inline constexpr float kLog2E = 1.44269504f;

// Adds exp(score) values and exp(score) of one block. q: rows g, g + 8; k, v: keys g, g + 8, values of keys that no row
// sees zero; sees(half, key): whether row g + 8 half sees key `key` of the block.
template <typename Sees>
__device__ __forceinline__ void AttendBlock(const uint32_t (&q)[2][8], const uint32_t (&k)[2][8],
                                            const uint32_t (&v)[2][8], float scale, const Sees& sees, BlockSums& sums) {
  constexpr uint32_t kOnes = 0x3F803F80;
  const int t = threadIdx.x % 4;
  uint32_t p[4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    float score[4] = {};
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      ptx::MmaM16N8K16Bf16(score, {q[0][j], q[1][j], q[0][j + 1], q[1][j + 1]}, k[n][j], k[n][j + 1]);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      score[e] = sees(e / 2, 8 * n + 2 * t + e % 2) ? ptx::Ex2Approx(score[e] * scale * kLog2E) : 0.0f;
    p[2 * n] = ptx::CvtRnBf16x2(score[0], score[1]), p[2 * n + 1] = ptx::CvtRnBf16x2(score[2], score[3]);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float d[4] = {};
    ptx::MmaM16N8K16Bf16(d, p, ptx::Movmatrix(v[0][j]), ptx::Movmatrix(v[1][j]));
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.value[j][e] = sums.value[j][e] + d[e];
  }
  float d[4] = {};
  ptx::MmaM16N8K16Bf16(d, p, kOnes, kOnes);
  sums.weight[0] = sums.weight[0] + d[0], sums.weight[1] = sums.weight[1] + d[2];
}

// The lane's sums of row g + 8 half to the words of that row: [t][6].
template <int kHalf>
__device__ __forceinline__ void PublishSums(Word* row, const BlockSums& sums, uint32_t tag) {
  const auto word = [&](int i) {
    const float x = i < 16 ? sums.value[i / 2 % 8][2 * kHalf + i % 2] : i == 16 ? sums.weight[kHalf] : 0.0f;
    return __float_as_uint(x);
  };
  Word* to = row + threadIdx.x % 4 * kSumWords;
#pragma unroll
  for (int i = 0; i < kSumWords; ++i) Publish<Scope::kGpu>(to + i, word(3 * i), word(3 * i + 1), word(3 * i + 2), tag);
}

template <typename S>
__device__ __forceinline__ Word* UnitSums(const Context<S>& c, int unit, int head, int row) {
  return reinterpret_cast<Word*>(c.Frame(Frames<S>::units)) +
         ((int64_t(unit) * S::kHeadsHere + head) * kRows + row) * 4 * kSumWords;
}
template <typename S>
__device__ __forceinline__ Word* TailSums(const Context<S>& c, int head, int row, int block) {
  return reinterpret_cast<Word*>(c.Frame(Frames<S>::tail)) +
         ((head * kRows + row) * kTailBlocks + block) * 4 * kSumWords;
}

// ---- history -----------------------------------------------------------------------------------------------------

// Few units are spread: an SM takes a unit for one query head, each MMA warp every eighth block, and the blocks' sums
// are added in their order. Many are not, so that keys are read once for all query heads of a key head: an SM takes a
// unit, each of its MMA warps one head.
template <typename S>
__device__ __forceinline__ bool IsSpread(const Context<S>& c, const History& history) {
  return history.group_units == 0 && history.units * S::kHeadsHere <= 2 * c.blocks;
}

// Calls item(unit, head) for what this SM has to do, in the order of the ring: a query head here if spread, else a key
// head.
template <typename S, typename Item>
__device__ __forceinline__ void ForItems(const Context<S>& c, const History& history, const Item& item) {
  const int heads = IsSpread(c, history) ? S::kHeadsHere : S::kKvHere;
#pragma unroll 1
  for (int i = c.block; i < history.units * heads; i += c.blocks) item(i / heads, i % heads);
}

// Warp 0: keys and values of this SM's items. A stage: up to 128 positions of keys, then of values.
template <typename S>
__device__ __forceinline__ void StreamHistory(Context<S>& c, Producer& producer) {
  const History history = HistoryOf(c);
  const LayerArrays& arrays = c.arrays();
  const int heads_of_key = IsSpread(c, history) ? S::kGroup : 1;
  ForItems(c, history, [&](int unit, int head) {
    ForStages(history.BlocksOf(unit), [&](Blocks blocks) {
      const int begin = blocks.begin * kBlockKeys, end = blocks.end * kBlockKeys;
      producer.PushParts(c.waiter, 2 * (end - begin) * kRowBytes, [&](const auto& copy) {
        for (int p = begin, n; p < end; p += n) {  // slots are a ring
          const int slot = p % arrays.slots, at = (p - begin) * kRowBytes;
          n = Min(end - p, arrays.slots - slot);
          const int64_t from = (int64_t(head / heads_of_key) * arrays.slots + slot) * kHeadColumns;
          copy(at, arrays.keys + from, n * kRowBytes);
          copy(kValuesAt + at, arrays.values + from, n * kRowBytes);
        }
      });
    });
  });
}

// What the MMA warps have in common for all items: the first positions that rows g and g + 8 see, and that any row
// sees.
struct Seen {
  int first[2], first_key;
};

// Rows g and g + 8 of a head's queries.
template <typename S>
__device__ __forceinline__ void ReceiveQueries(Context<S>& c, int head, uint32_t (&q)[2][8]) {
  Word w[6];
  const Word* record = RecordAt<kHeadColumns>(c.Frame(Frames<S>::q), head * kRows + c.lane() / 4) + c.lane() % 4 * 3;
  Receive<Scope::kGpu>(c.waiter, c.epoch, [&](int i) { return record + i / 3 * 8 * kRecordWords + i % 3; }, w);
#pragma unroll
  for (int i = 0; i < 16; ++i) q[i / 8][i % 8] = Register(w[i / 8 * 3 + i % 8 / 3], i % 8 % 3);
}

// One block of a stage that begins at block `begin`, for the 16 rows of a head.
__device__ __forceinline__ void AttendStaged(const uint8_t* stage, int begin, int block, const uint32_t (&q)[2][8],
                                             float scale, const Seen& seen, BlockSums& sums) {
  const int g = threadIdx.x % 32 / 4, position = block * kBlockKeys;
  uint32_t k[2][8], v[2][8];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const uint8_t* row = stage + ((block - begin) * kBlockKeys + 8 * n + g) * kRowBytes;
    LoadPermuted(row, k[n]), LoadPermuted(row + kValuesAt, v[n]);
    if (position + 8 * n + g < seen.first_key)
#pragma unroll
      for (uint32_t& x : v[n]) x = 0;
  }
  AttendBlock(q, k, v, scale, [&](int half, int key) { return position + key >= seen.first[half]; }, sums);
}

// Sums of a block as AttendChunk keeps them in a stage: [row][t] of kSumWords words, three floats each.
inline constexpr int kSumFloats = 3 * kSumWords, kBlockFloats = kRows * 4 * kSumFloats;
static_assert(kStageBlocks == kMmaWarps && kStageBlocks * kBlockFloats * 4 <= kStageBytes, "sums of a stage fit in it");

__device__ __forceinline__ void StoreBlock(float* block, const BlockSums& sums) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float2* to = reinterpret_cast<float2*>(block + ((g + 8 * half) * 4 + t) * kSumFloats);
#pragma unroll
    for (int j = 0; j < 8; ++j) to[j] = {sums.value[j][2 * half], sums.value[j][2 * half + 1]};
    to[8] = {sums.weight[half], 0.0f};
  }
}

// A unit of one chunk for the 16 rows of one head. Stage by stage each MMA warp takes one block; its keys read, the
// stage takes the blocks' sums, which all threads add, a word or two each.
template <typename S>
__device__ __forceinline__ void AttendChunk(Context<S>& c, Consumer& ring, Blocks blocks, int unit, int head,
                                            const Seen& seen) {
  constexpr int kEach = (kBlockFloats / 3 + 32 * kMmaWarps - 1) / (32 * kMmaWarps);
  const int warp = c.warp - kFirstMmaWarp, thread = int(threadIdx.x) - 32 * kFirstMmaWarp;
  uint32_t q[2][8];
  ReceiveQueries(c, head, q);
  float total[kEach][3] = {};
  ForStages(blocks, [&](Blocks part) {
    const int first = part.begin / kStageBlocks * kStageBlocks, mine = first + warp;
    const bool here = mine >= part.begin && mine < part.end;
    uint8_t* stage = ring.Wait(c.waiter);
    float* sums_of_blocks = reinterpret_cast<float*>(stage);
    BlockSums sums;
    if (here) AttendStaged(stage, part.begin, mine, q, c.pass().model.attention_scale, seen, sums);
    ptx::BarSync(4, 32 * kMmaWarps);
    if (here) StoreBlock(sums_of_blocks + warp * kBlockFloats, sums);
    ptx::BarSync(4, 32 * kMmaWarps);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int word = thread + i * 32 * kMmaWarps;
      if (word >= kBlockFloats / 3) continue;
#pragma unroll 1
      for (int block = part.begin; block < part.end; ++block)
#pragma unroll
        for (int j = 0; j < 3; ++j)
          total[i][j] = total[i][j] + sums_of_blocks[(block - first) * kBlockFloats + 3 * word + j];
    }
    ptx::FenceProxyAsync();  // the next copy into the stage comes after these accesses
    ring.Release();
  });
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int word = thread + i * 32 * kMmaWarps;
    if (word < kBlockFloats / 3)
      Publish<Scope::kGpu>(UnitSums(c, unit, head, 0) + word, __float_as_uint(total[i][0]),
                           __float_as_uint(total[i][1]), __float_as_uint(total[i][2]), c.epoch);
  }
}

// A unit for the 16 rows of one head, by one warp.
template <typename S>
__device__ __forceinline__ void AttendUnit(Context<S>& c, Consumer& ring, Blocks blocks, int unit, int head,
                                           const Seen& seen) {
  uint32_t q[2][8];
  ReceiveQueries(c, head, q);
  BlockSums chunk, total;
  ForStages(blocks, [&](Blocks part) {
    const uint8_t* stage = ring.Wait(c.waiter);
#pragma unroll 1
    for (int block = part.begin; block < part.end; ++block)
      AttendStaged(stage, part.begin, block, q, c.pass().model.attention_scale, seen, chunk);
    ptx::FenceProxyAsync();
    ring.Release();
    if (part.end % kChunkBlocks == 0 || part.end == blocks.end) total.Add(chunk), chunk = BlockSums();
  });
  const int g = c.lane() / 4;
  PublishSums<0>(UnitSums(c, unit, head, g), total, c.epoch);
  PublishSums<1>(UnitSums(c, unit, head, g + 8), total, c.epoch);
}

// MMA warps: this SM's items.
template <typename S>
__device__ __forceinline__ void AttendHistory(Context<S>& c, Consumer& ring) {
  const History history = HistoryOf(c);
  const uint32_t path = PathOfLane(c);
  const int first = c.lane() < c.valid ? FirstSeen(PositionOf(c, path), c.arrays().window) : kUnseen;
  const Seen seen = {{__shfl_sync(kAllLanes, first, c.lane() / 4), __shfl_sync(kAllLanes, first, c.lane() / 4 + 8)},
                     FirstSeen(c.length, c.arrays().window)};
  const bool spread = IsSpread(c, history);
  const int warp = c.warp - kFirstMmaWarp;
  ForItems(c, history, [&](int unit, int head) {
    const Blocks blocks = history.BlocksOf(unit);
    if (spread)
      AttendChunk(c, ring, blocks, unit, head, seen);
    else if (warp < S::kGroup)
      AttendUnit(c, ring, blocks, unit, head * S::kGroup + warp, seen);
    else
      ForStages(blocks, [&](Blocks) { ring.Wait(c.waiter), ring.Release(); });
  });
}

// ---- tail --------------------------------------------------------------------------------------------------------

// Where a lane finds one key of a row's tail: at an offset of the cache or of the rows in flight, at a row of this
// pass, or, unseen, nowhere.
struct TailKey {
  enum { kNowhere, kCache, kFlight, kPass } place = kNowhere;
  int64_t offset = 0;
  int row = 0;
};

template <typename S>
__device__ __forceinline__ TailKey FindTailKey(const Context<S>& c, int key_head, int row, uint32_t path, int p) {
  const LayerArrays& arrays = c.arrays();
  const int position = PositionOf(c, path), stored = Stored(c);
  TailKey key;
  key.row = row;
  if (p > position || p < FirstSeen(position, arrays.window)) return key;
  if (p < stored) {
    key.place = TailKey::kCache;
    key.offset = (int64_t(key_head) * arrays.slots + p % arrays.slots) * kHeadColumns;
  } else if (p < c.length) {
    key.place = TailKey::kFlight;
    key.offset = (key_head * kRows + (c.pass().path[p - stored] & (kRows - 1))) * kHeadColumns;
  } else {
    key.place = TailKey::kPass;
    key.row = NodeAt(path, p - c.length);
  }
  return key;
}

// One tail block of one row for the query heads of one key head: head g is row g of the MMA.
template <typename S>
__device__ void AttendTailBlock(Context<S>& c, int key_head, int row, uint32_t path, int first_block, int block) {
  const LayerArrays& arrays = c.arrays();
  const int g = c.lane() / 4, t = c.lane() % 4, head = key_head * S::kGroup + g % S::kGroup;
  const int begin = (first_block + block) * kBlockKeys;
  uint32_t q[2][8] = {}, k[2][8] = {}, v[2][8] = {};
  TailKey key[2];
  const Word* from[5] = {RecordAt<kHeadColumns>(c.Frame(Frames<S>::q), head * kRows + row) + 3 * t};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    key[n] = FindTailKey(c, key_head, row, path, begin + 8 * n + g);
    if (key[n].place == TailKey::kCache)
      LoadPermuted(arrays.keys + key[n].offset, k[n]), LoadPermuted(arrays.values + key[n].offset, v[n]);
    if (key[n].place == TailKey::kFlight)
      LoadPermuted(arrays.flight_keys + key[n].offset, k[n]), LoadPermuted(arrays.flight_values + key[n].offset, v[n]);
    const int record = key_head * kRows + key[n].row;
    from[1 + n] = RecordAt<kHeadColumns>(c.Frame(Frames<S>::k), record) + 3 * t;
    from[3 + n] = RecordAt<kHeadColumns>(c.Frame(Frames<S>::v), record) + 3 * t;
  }
  Word w[15];
  Receive<Scope::kGpu>(c.waiter, c.epoch, [&](int i) { return from[i / 3] + i % 3; }, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (g < S::kGroup) q[0][i] = Register(w[i / 3], i % 3);
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (key[n].place == TailKey::kPass)
        k[n][i] = Register(w[3 + 3 * n + i / 3], i % 3), v[n][i] = Register(w[9 + 3 * n + i / 3], i % 3);
  }

  const int last = PositionOf(c, path), first = FirstSeen(last, arrays.window);
  BlockSums sums;
  AttendBlock(
      q, k, v, c.pass().model.attention_scale, [&](int, int i) { return begin + i >= first && begin + i <= last; },
      sums);
  if (g < S::kGroup) PublishSums<0>(TailSums(c, head, row, block), sums, c.epoch);
}

// Row warps, first those that do not multiply: the blocks that hold positions which the cache lacks, one task each.
template <typename S>
__device__ __noinline__ void AttendTail(Context<S>&) {
  Context<S>& c = Anew<S>();
  const History history = HistoryOf(c);
  const uint32_t path_of_lane = PathOfLane(c);
  c.ForTasks(
      kTailBlocks * S::kKvHere * kRows,
      [&](int i) {
        const int row = i % kRows, key_head = i / kRows % S::kKvHere, block = i / kRows / S::kKvHere;
        const uint32_t path = __shfl_sync(kAllLanes, path_of_lane, row);
        if (row < c.valid && block < history.TailsTo(PositionOf(c, path)))
          AttendTailBlock(c, key_head, row, path, history.blocks.end, block);
      },
      1);
}

// ---- merge -------------------------------------------------------------------------------------------------------

// The total of 24 lanes (t, word), three of its 17 floats each: units, then tail blocks. And the row's gate, which comes
// along with them.
template <typename S>
__device__ __forceinline__ LevelSums<3> TotalOfItems(Context<S>& c, const History& history, int tails, int head,
                                                     int row, uint32_t& gate) {
  const int mine = Min(c.lane(), 4 * kSumWords - 1), items = history.units + tails;
  constexpr int kUnitWords = int(Frames<S>::unit_bytes / 16);
  const Word* units = UnitSums(c, 0, head, row) + mine;
  const int tail = int(TailSums(c, head, row, 0) - UnitSums(c, 0, head, row)) - history.units * 4 * kSumWords;
  const auto at = [&](int i) { return units + (i < history.units ? i * kUnitWords : tail + i * 4 * kSumWords); };
  const uint64_t* gates = reinterpret_cast<const uint64_t*>(c.Frame(Frames<S>::gate)) + (head * kRows + row) * 32;
  LevelSums<3> sums;
  for (int begin = 0; begin < items; begin += kMergeBatch) {
    const int end = history.EndOf(Min(begin + c.lane(), items - 1));  // of item `lane` of the batch
    const uint32_t chunks = __ballot_sync(kAllLanes, EndsChunk(end)), groups = __ballot_sync(kAllLanes, EndsGroup(end));
    Word w[kMergeBatch];
    float columns[1];
    ReceiveBoth<false>(
        c.waiter, c.epoch, [&](int i) { return at(Min(begin + i, items - 1)); }, w,
        [&](int) { return gates + c.lane(); }, columns);
    gate = __float_as_uint(columns[0]);
#pragma unroll
    for (int i = 0; i < kMergeBatch; ++i) {
      const float item[3] = {__uint_as_float(Register(w[i], 0)), __uint_as_float(Register(w[i], 1)),
                             __uint_as_float(Register(w[i], 2))};
      if (begin + i < items) sums.Add(item, chunks >> i & 1, groups >> i & 1);
    }
  }
  sums.End();
  return sums;
}

// Numerators over denominator, rounded, two columns a lane.
__device__ __forceinline__ Two WeightedMean(const float (&total)[3]) {
  const int lane = threadIdx.x % 32, words = lane / 8 * kSumWords, i = lane % 8 * 2;
  const auto float_of_t = [&](int f) {
    const float x = __shfl_sync(kAllLanes, total[0], words + f / 3);
    const float y = __shfl_sync(kAllLanes, total[1], words + f / 3);
    const float z = __shfl_sync(kAllLanes, total[2], words + f / 3);
    return f % 3 == 0 ? x : f % 3 == 1 ? y : z;
  };
  const float a = float_of_t(i), b = float_of_t(i + 1), weight = float_of_t(16);
  return Rounded({a / weight, b / weight});
}

// o of one row and head, two columns a lane: output norm and gate.
template <typename S>
__device__ __forceinline__ uint32_t MergeRow(Context<S>& c, const History& history, uint32_t path, int head, int row) {
  uint32_t gate = 0;
  const LevelSums<3> sums = TotalOfItems(c, history, history.TailsTo(PositionOf(c, path)), head, row, gate);
  const Two open = {Sigmoid(Unpack(gate).a), Sigmoid(Unpack(gate).b)};
  const Two x = WeightedMean(sums.total);
  const float scale = Rstd(LeafSquares<kHeadColumns>(x), kHeadColumns, c.pass().model.rms_eps);
  return PackBf16(x.a * scale * open.a, x.b * scale * open.b);
}

// Row warps: o of every row and query head here, to all ranks; padding rows are zero.
template <typename S>
__device__ __noinline__ void MergeAttention(Context<S>&) {
  Context<S>& c = Anew<S>();
  constexpr int kHeadsSlice = S::kHeads / int(kSlices);
  const History history = HistoryOf(c);
  const uint32_t path_of_lane = PathOfLane(c);
  c.ForTasks(S::kHeadsHere * kRows, [&](int i) {
    const int row = i % kRows, head = i / kRows;
    const uint32_t path = __shfl_sync(kAllLanes, path_of_lane, row);
    const uint32_t o = row < c.valid ? MergeRow(c, history, path, head, row) : 0;
    const Word word = RecordWord<kHeadColumns>(o, c.epoch);
    ForRanks(c, head / kHeadsSlice, [&](uint8_t* frames, int slice) {
      const int record = (slice * kHeadsSlice + head % kHeadsSlice) * kRows + row;
      PublishRecord<kHeadColumns>(RecordAt<kHeadColumns>(frames + Frames<S>::o, record), word);
    });
  });
}

// ---- keys and values ---------------------------------------------------------------------------------------------

// Keys, or values, of one head: accepted rows from flight to the cache, then this pass's rows into flight.
template <typename S>
__device__ void StoreHead(Context<S>& c, const Word* records, uint16_t* cache, uint16_t* flight) {
  constexpr int kPieces = kRowBytes / 16, kEach = kRows * kPieces / 32, kWords = kRows * kRecordWords / 32;
  const int slots = c.arrays().slots;
  uint4 kept[kEach] = {};
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = (c.lane() + 32 * j) / kPieces;
    if (i < c.accepted)
      kept[j] =
          reinterpret_cast<const uint4*>(flight + (c.pass().path[i] & (kRows - 1)) * kHeadColumns)[c.lane() % kPieces];
  }
  Word w[kWords];
  Receive<Scope::kGpu>(c.waiter, c.epoch, [&](int j) { return records + c.lane() + 32 * j; }, w);
  // All lanes have read their pieces.
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = (c.lane() + 32 * j) / kPieces, slot = (c.length - c.accepted + i) % slots;
    if (i < c.accepted && i + slots >= c.accepted)  // else a later row has the slot
      reinterpret_cast<uint4*>(cache + int64_t(slot) * kHeadColumns)[c.lane() % kPieces] = kept[j];
  }
#pragma unroll
  for (int j = 0; j < kWords; ++j) {
    const int word = c.lane() + 32 * j, row = word / kRecordWords, t = word % kRecordWords / 3, first = word % 3 * 3;
    if (row >= c.valid) continue;
    uint32_t* to = reinterpret_cast<uint32_t*>(flight + row * kHeadColumns) + t * 8 + first;
    to[0] = Register(w[j], 0), to[1] = Register(w[j], 1);
    if (first < 6) to[2] = Register(w[j], 2);
  }
}

// When nobody reads the layer's cache and flight any more. By warp 3 alone, which has nothing else to do while the
// experts are combined.
template <typename S>
__device__ __noinline__ void StoreKeys(Context<S>&) {
  Context<S>& c = Anew<S>();
  if (c.moved || c.warp != 3) return;
  const LayerArrays& arrays = c.arrays();
#pragma unroll 1
  for (int i = c.block; i < 2 * S::kKvHere; i += c.blocks) {
    const bool keys = i % 2 == 0;
    const int64_t head = i / 2;
    StoreHead(c, RecordAt<kHeadColumns>(c.Frame(keys ? Frames<S>::k : Frames<S>::v), head * kRows),
              (keys ? arrays.keys : arrays.values) + head * arrays.slots * kHeadColumns,
              (keys ? arrays.flight_keys : arrays.flight_values) + head * kRows * kHeadColumns);
  }
}

// Row warps, when a launch starts at attention: q and gate as an earlier launch left them, k and v from flight.
template <typename S>
__device__ __noinline__ void PublishHeads(Context<S>&) {
  Context<S>& c = Anew<S>();
  const LayerArrays& arrays = c.arrays();
  const auto columns = [&](const uint16_t* rows, int64_t row) {
    return reinterpret_cast<const uint32_t*>(rows + row * kHeadColumns)[c.lane()];
  };
  c.ForTasks((S::kHeadsHere + S::kKvHere) * kRows, [&](int i) {
    const int row = i % kRows, head = i / kRows, key_head = head - S::kHeadsHere;
    const auto publish = [&](int64_t frame, int64_t record, uint32_t x) {
      PublishPermuted<Scope::kGpu>(RecordAt<kHeadColumns>(c.Frame(frame), record), x, c.epoch);
    };
    if (key_head < 0) {
      const bool there = row < c.pass().rows;
      const int64_t from = int64_t(head) * c.pass().rows + row;
      publish(Frames<S>::q, i, there ? columns(c.pass().q, from) : 0);
      uint64_t* gate = reinterpret_cast<uint64_t*>(c.Frame(Frames<S>::gate)) + i * 32 + c.lane();
      PublishFloat<Scope::kGpu>(gate, __uint_as_float(there ? columns(c.pass().gate, from) : 0), c.epoch);
    } else {
      const int record = key_head * kRows + row;
      publish(Frames<S>::k, record, row < c.valid ? columns(arrays.flight_keys, record) : 0);
      publish(Frames<S>::v, record, row < c.valid ? columns(arrays.flight_values, record) : 0);
    }
  });
}

}  // namespace musejax::layer
