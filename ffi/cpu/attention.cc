// Attention of one pass: every row over its history and its ancestors, then the per-head output norm and the gate.
#include "common/math.h"
#include "cpu/phases.h"

namespace musejax {
namespace {

// What row `row` sees through head h: history in the cache, its ancestors (itself included) in flight.
Keys KeysOf(const LayerKeys& kv, int64_t h, int64_t c, const Rows& rows, int row) {
  Keys see{};
  see.keys = kv.keys + h * kv.slots * c, see.values = kv.values + h * kv.slots * c;
  see.slots = kv.slots, see.length = rows.length, see.position = rows.position(row);
  see.first = kv.window && see.position >= kv.window ? see.position - kv.window + 1 : 0;
  for (int r = row; r >= 0; r = rows.parent[r]) {
    see.tail_keys[rows.depth[r]] = kv.flight_keys + (h * kMaxRows + r) * c;
    see.tail_values[rows.depth[r]] = kv.flight_values + (h * kMaxRows + r) * c;
  }
  return see;
}

}  // namespace

void Attention(const Model& m, const LayerKeys& kv, const Rows& rows, const bf16* q, const bf16* gate, bf16* o) {
  const int64_t c = m.shape.head_dim, group = m.shape.heads / m.shape.kv_heads;
  const int count = rows.count;
  const Kernels& kernels = ActiveKernels();
  const int64_t seen = std::min<int64_t>(rows.length + count, kv.window ? kv.window : rows.length + count);
  ParallelFor(kv.heads * count, kv.heads * count * (seen + 16) * c * group, [&](int64_t task) {
    const int64_t h = task / count;
    const int row = int(task % count);
    const auto at = [&](int64_t g) { return ((h * group + g) * count + row) * c; };
    if (row >= rows.valid) {
      for (int64_t g = 0; g < group; ++g) std::fill_n(o + at(g), c, bf16(0));
      return;
    }
    float* query = Scratch<float, 5>(2 * group * c);
    float* out = query + group * c;
    for (int64_t g = 0; g < group; ++g)
      for (int64_t i = 0; i < c; ++i) query[g * c + i] = FromBf16(q[at(g) + i]);
    kernels.attend(query, int(group), int(c), m.attention_scale, KeysOf(kv, h, c, rows, row), out);
    for (int64_t g = 0; g < group; ++g) {
      float* x = out + g * c;
      RmsNorm(x, c, 1, m.rms_eps, x);
      for (int64_t i = 0; i < c; ++i) o[at(g) + i] = ToBf16(x[i] * Sigmoid(FromBf16(gate[at(g) + i])));
    }
  });
}

}  // namespace musejax
