// A drafter's attention: q, k, v of a block, and every row over context and block alike, in both directions.
#include "common/math.h"
#include "cpu/draft.h"

namespace musejax {

void DraftTurn(const DraftModel& m, const float* x, const float* gamma, const float* cos_sin, float* out) {
  const int64_t c = m.shape.head_dim;
  const DraftKernels& kernels = ActiveDraftKernels();
  kernels.norm(x, gamma, c, 1, m.eps, false, out);
  kernels.rotate(out, int(c), cos_sin);
}

void DraftAttention(const DraftModel& m, const DraftWeights& w, const DraftKeys& kv, const bf16* stream,
                    const float* delta, const float* cos_sin, int64_t length, int count, bf16* o) {
  const DraftShape& s = m.shape;
  const DraftDenseLayout at(s);
  const DraftSmallLayout small(s);
  const int64_t c = s.head_dim, width = s.qkv_rows(), heads = s.heads_slice(), groups = s.kv_slice();
  const int64_t group = heads / groups, queries = count * group;  // of one key/value head
  float* columns = Aligned<20>(s.hidden * kMaxRows);
  DraftInput(m, w, Sublayer::kAttention, stream, delta, count, columns);
  float* qkv = Scratch<float, 22>(w.slices * count * width);  // [slices][rows][q | k | v]
  DraftGemm(w.dense + at.qkv, at.bytes, w.slices, width, 0, width, s.hidden, columns, count,
            DraftRows(qkv, count, width));

  float* q = Scratch<float, 25>(kv.heads * queries * c);     // [kv heads][rows][group][c]
  bf16* keys = Scratch<bf16, 26>(2 * kv.heads * count * c);  // [kv heads][rows][c], then values
  bf16* values = keys + kv.heads * count * c;
  ParallelFor(w.slices * count, w.slices * count * width * 16, [&](int64_t task) {
    const int64_t slice = task / count, row = task % count;
    const float *x = qkv + task * width, *angles = cos_sin + row * c;
    for (int64_t h = 0; h < heads; ++h, x += c)
      DraftTurn(m, x, w.small + small.q_norm, angles,
                q + (((slice * groups + h / group) * count + row) * group + h % group) * c);
    for (int64_t h = 0; h < groups; ++h, x += c) {
      float key[kMaxHeadDim];
      DraftTurn(m, x, w.small + small.k_norm, angles, key);
      for (int64_t i = 0; i < c; ++i) keys[((slice * groups + h) * count + row) * c + i] = ToBf16(key[i]);
    }
    for (int64_t h = 0; h < groups; ++h, x += c)
      for (int64_t i = 0; i < c; ++i) values[((slice * groups + h) * count + row) * c + i] = ToBf16(x[i]);
  });

  // A row sees the positions at distances below the window, as far as the ring and the block have them.
  const int64_t held = std::max<int64_t>(0, length - kv.slots), end = length + count;
  const auto first_of = [&](int64_t row) { return std::max(held, length + row - m.window + 1); };
  const auto last_of = [&](int64_t row) { return std::min(end, length + row + m.window) - 1; };
  const int64_t batches = (queries + kMaxQueries - 1) / kMaxQueries;
  const DraftKernels& kernels = ActiveDraftKernels();
  ParallelFor(kv.heads * batches, kv.heads * queries * (end - held) * c * 4, [&](int64_t task) {
    const int64_t h = task / batches, from = task % batches * kMaxQueries;
    const int n = int(std::min<int64_t>(kMaxQueries, queries - from));
    DraftSeen see;
    see.keys = kv.keys + h * kv.slots * c, see.values = kv.values + h * kv.slots * c;
    see.block_keys = keys + h * count * c, see.block_values = values + h * count * c;
    see.slots = kv.slots, see.length = length;
    float* out = Scratch<float, 27>(kMaxQueries * c);
    DraftQuery batch[kMaxQueries];
    for (int i = 0; i < n; ++i) {
      const int64_t row = (from + i) / group;
      batch[i] = {q + (h * queries + from + i) * c, first_of(row), last_of(row), out + i * c};
    }
    float* scores = Scratch<float, 28>(DraftScores(batch[0].first, batch[n - 1].last));
    kernels.attend(batch, n, int(c), m.attention_scale, see, scores);
    for (int i = 0; i < n; ++i) {
      const int64_t row = (from + i) / group, head = h * group + (from + i) % group;
      for (int64_t j = 0; j < c; ++j) o[(head * count + row) * c + j] = ToBf16(out[i * c + j]);
    }
  });
}

}  // namespace musejax
