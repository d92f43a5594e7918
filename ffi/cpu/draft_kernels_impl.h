// Bodies of the kernels of draft_kernels.h for one instruction set; see simd.h for how three sets share this text.
#include <cmath>
#include <limits>

#include "common/layout.h"
#include "cpu/draft_kernels.h"
#include "cpu/reduce.h"

namespace musejax::MUSEJAX_ISA {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// The larger lane by lane, b where one is NaN.
inline F16 Larger(F16 a, F16 b) {
#if defined(__AVX512F__)
  return {_mm512_max_ps(a.v, b.v)};
#else
  for (int i = 0; i < 16; ++i) b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return b;
#endif
}
// A vector with several uses, in a register: compilers load it anew for each of them, and loads are what is short.
inline F16 Kept(F16 a) {
#if defined(__AVX512F__)
  asm("" : "+v"(a.v));
#endif
  return a;
}
inline F16 Negative(F16 a) { return Sub(Zero(), a); }

// Tanh of common/math.h; the sign of a zero may differ. Parts that do not hold are selected to 0 and added.
inline F16 Tanh(F16 x) {
  const auto c = [](float value) { return Set(F16{}, value); };
  const F16 minus = Negative(x), a = Larger(x, minus), z = Mul(x, x);
  F16 p = c(-929569.0f / 638512875.0f);
  p = Fma(p, z, c(21844.0f / 6081075.0f));
  p = Fma(p, z, c(-1382.0f / 155925.0f));
  p = Fma(p, z, c(62.0f / 2835.0f));
  p = Fma(p, z, c(-17.0f / 315.0f));
  p = Fma(p, z, c(2.0f / 15.0f));
  p = Fma(p, z, c(-1.0f / 3.0f));
  constexpr float kAboveMinusHalf = -0.49999997f;  // the float after -0.5: -a < it where a >= 0.5
  const F16 near = ZeroBelow(Negative(a), kAboveMinusHalf, Fma(Mul(p, z), x, x));
  const F16 far = Sub(c(1.0f), Div(c(2.0f), Add(Exp(Mul(c(2.0f), a)), c(1.0f))));
  return Add(near, Sub(ZeroBelow(x, 0.5f, far), ZeroBelow(minus, 0.5f, far)));
}

// x[i] lane j -> x[j] lane i.
inline void Transpose(F16* x) {
#if defined(__AVX512F__)
  __m512 t[16];
  for (int i = 0; i < 16; i += 4) {  // 4 x 4 inside lanes of four
    const __m512 a = _mm512_unpacklo_ps(x[i].v, x[i + 1].v), b = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
    const __m512 c = _mm512_unpacklo_ps(x[i + 2].v, x[i + 3].v), d = _mm512_unpackhi_ps(x[i + 2].v, x[i + 3].v);
    t[i] = _mm512_shuffle_ps(a, c, 0x44), t[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44), t[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
  }
  for (int i = 0; i < 4; ++i) {  // then the lanes
    const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xDD);
    const __m512 c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88),
                 d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xDD);
    x[i].v = _mm512_shuffle_f32x4(a, c, 0x88), x[i + 8].v = _mm512_shuffle_f32x4(a, c, 0xDD);
    x[i + 4].v = _mm512_shuffle_f32x4(b, d, 0x88), x[i + 12].v = _mm512_shuffle_f32x4(b, d, 0xDD);
  }
#else
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      const float other = x[i].v[j];
      x[i].v[j] = x[j].v[i], x[j].v[i] = other;
    }
#endif
}

void Columns(const float* rows, int n, int64_t k, float* columns) {
  for (int64_t i = 0; i < k; i += 16) {
    F16 x[16];
    for (int row = 0; row < 16; ++row) x[row] = row < n ? Load(rows + row * k + i) : Zero();
    Transpose(x);
    for (int j = 0; j < 16; ++j) Store(columns + (i + j) * 16, x[j]);
  }
}

// Sums of kPair rows of a tile over one range, as Bf16TileOf and ReduceTile (kernels_impl.h) make them: the lanes t and
// half of a row are vectors here. w: tiles unpacked, [tile][row % 8][even, odd column][4 t + row / 8 + 2 half].
constexpr int kPair = 2;
inline void SumRange(const float* w, int64_t tiles, const float* x, F16* out) {
  F16 acc[kPair][2][4];
  for (auto& row : acc)
    for (auto& half : row)
      for (F16& a : half) a = Zero();
  for (int64_t i = 0; i < tiles; ++i, w += 256, x += 256)
    for (int half = 0; half < 2; ++half)
      for (int t = 0; t < 4; ++t) {
        const int column = 2 * t + 8 * half;
        const F16 even = Kept(Load(x + 16 * column)), odd = Kept(Load(x + 16 * column + 16));
        for (int row = 0; row < kPair; ++row) {
          const float* of = w + 4 * t + row + 2 * half;
          acc[row][half][t] = Fma(Set(F16{}, of[16]), odd, Fma(Set(F16{}, of[0]), even, acc[row][half][t]));
        }
      }
  for (int row = 0; row < kPair; ++row) {
    F16 half[2];
    for (int i = 0; i < 2; ++i) {
      const F16* a = acc[row][i];
      half[i] = Add(Add(a[0], a[2]), Add(a[1], a[3]));
    }
    out[row] = Add(half[0], half[1]);
  }
}

void Bf16Tile(const uint8_t* w, int64_t chunk_stride, int64_t k, const float* columns, float* out) {
  constexpr int64_t kMaxTiles = kChunk / kRanges / 16;
  const int64_t tiles = Range(k) / 16;
  F16 total[16];
  for (F16& t : total) t = Zero();
  for (int64_t c = 0; c < k / Chunk(k); ++c, w += chunk_stride) {
    F16 chunk[16];
    for (F16& s : chunk) s = Zero();
    const uint8_t* tile = w;
    for (int64_t range = 0; range < kRanges; ++range, columns += tiles * 256) {
      alignas(64) float wide[kMaxTiles * 256];
      for (int64_t i = 0; i < 8 * tiles; ++i, tile += 64) {
        F16 even, odd;
        __builtin_prefetch(tile + kTile * Chunk(k) * 2);  // the next tile: a page of its own, as a rule
        LoadPairs(tile, &even, &odd);
        Store(wide + 32 * i, even), Store(wide + 32 * i + 16, odd);
      }
      for (int g = 0; g < 8; ++g) {
        F16 sums[kPair];  // of rows g and g + 8
        SumRange(wide + 32 * g, tiles, columns, sums);
        chunk[g] = Add(chunk[g], sums[0]), chunk[g + 8] = Add(chunk[g + 8], sums[1]);
      }
    }
    for (int row = 0; row < 16; ++row) total[row] = Add(total[row], chunk[row]);
  }
  Transpose(total);
  for (int row = 0; row < 16; ++row) Store(out + 16 * row, total[row]);
}

void Norm(const float* x, const float* gamma, int64_t width, int64_t slices, float eps, bool rounded, float* y) {
  const int64_t slice = width / slices;
  float total = 0.0f, sum = 0.0f, leaf = 0.0f, trees[16];  // of all slices, of a slice, of a leaf; of 16 columns each
  for (int64_t i = 0; i < width; i += 16) {
    const int64_t at = i / 16 % 16;
    if (at == 0) {
      F16 squares[16];
      for (int j = 0; j < 16; ++j) {
        const F16 v = i + 16 * j < width ? Load(x + i + 16 * j) : Zero();
        squares[j] = Mul(v, v);
      }
      Store(trees, ReduceLanes(squares));
    }
    leaf += trees[at];
    const int64_t next = (i + 16) % slice;
    if (next == 0 || next % kLeaf == 0) sum += leaf, leaf = 0.0f;
    if (next == 0) total += sum, sum = 0.0f;
  }
  const F16 scale = Set(F16{}, 1.0f / sqrtf(total / float(width) + eps));
  for (int64_t i = 0; i < width; i += 16) {
    const F16 v = Mul(Mul(Load(x + i), scale), Load(gamma + i));
    Store(y + i, rounded ? RoundBf16(v) : v);
  }
}

void Rotate(float* x, int c, const float* cos_sin) {
  const int half = c / 2;
  const auto turn = [](F16 a, F16 b, F16 cosine, F16 sine, float* low, float* high) {
    Store(low, RoundBf16(Sub(Mul(a, cosine), Mul(b, sine))));
    Store(high, RoundBf16(Add(Mul(b, cosine), Mul(a, sine))));
  };
  for (int i = 0; i + 16 <= half; i += 16)
    turn(Load(x + i), Load(x + half + i), Load(cos_sin + i), Load(cos_sin + half + i), x + i, x + half + i);
  if (half < 16) {
    float a[16] = {}, b[16] = {}, cosine[16] = {}, sine[16] = {};
    memcpy(a, x, 4 * half), memcpy(b, x + half, 4 * half);
    memcpy(cosine, cos_sin, 4 * half), memcpy(sine, cos_sin + half, 4 * half);
    turn(Load(a), Load(b), Load(cosine), Load(sine), a, b);
    memcpy(x, a, 4 * half), memcpy(x + half, b, 4 * half);
  }
}

void TwoTaps(const float* base, int64_t stride, const float* delta, const float* x, const float* before, int64_t n,
             float* y) {
  for (int64_t i = 0; i < n; i += 16) {
    const F16 own = Mul(Add(Load(base + i), Load(delta + i)), Load(x + i));
    const F16 prior = Mul(Add(Load(base + stride + i), Load(delta + n + i)), before ? Load(before + i) : Zero());
    Store(y + i, RoundBf16(Add(own, prior)));
  }
}

int64_t NextAbove(const float* x, int64_t from, int64_t n, float bound) {
#if defined(__AVX512F__)
  for (; from + 16 <= n; from += 16) {
    const __mmask16 above = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + from), _mm512_set1_ps(bound), _CMP_GT_OQ);
    if (above) return from + __builtin_ctz(above);
  }
#endif
  while (from < n && !(x[from] > bound)) ++from;
  return from;
}

// Scores of N queries against a block of keys [channel] lane position: by fmaf over ascending channels, from +0.
template <int C, int N>
void Scores(const DraftQuery* queries, const F16* keys, float scale, F16* out) {
  F16 sum[N];
  for (F16& s : sum) s = Zero();
  for (int k = 0; k < C; ++k)
    for (int n = 0; n < N; ++n) sum[n] = Fma(Set(F16{}, queries[n].q[k]), keys[k], sum[n]);
  for (int n = 0; n < N; ++n) out[n] = Mul(sum[n], Set(F16{}, scale));
}

// Adds a block of values, weighted by p[n][position], to the sums of N queries.
template <int C, int N>
void AddValues(const float (*p)[kKeyBlock], const float (*values)[C], Weighted<C>* sums) {
  Weighted<C> block[N];
  for (Weighted<C>& sum : block) sum.Clear();
  for (int j = 0; j < kKeyBlock; ++j) {
    for (int k = 0; k < C / 16; ++k) {
      const F16 value = Kept(Load(values[j] + 16 * k));
      for (int n = 0; n < N; ++n) block[n].value[k] = Fma(Set(F16{}, p[n][j]), value, block[n].value[k]);
    }
    for (int n = 0; n < N; ++n) block[n].weight += p[n][j];
  }
  for (int n = 0; n < N; ++n) sums[n] += block[n];
}

template <int C>
void AttendOf(const DraftQuery* queries, int n, float scale, const DraftSeen& see, float* scores) {
  int64_t first = queries[0].first, last = queries[0].last;
  for (int i = 1; i < n; ++i) {
    first = queries[i].first < first ? queries[i].first : first;
    last = queries[i].last > last ? queries[i].last : last;
  }
  const int64_t begin = first / kKeyBlock * kKeyBlock, width = (last / kKeyBlock + 1) * kKeyBlock - begin;
  // Row j of a block, of positions that no query sees zeros.
  const auto row = [&](int64_t p, const uint16_t* ring, const uint16_t* own) {
    static constexpr uint16_t kZeros[C] = {};
    if (p < first || p > last) return kZeros;
    return p < see.length ? ring + p % see.slots * C : own + (p - see.length) * C;
  };

  F16 most[kMaxQueries];
  for (F16& m : most) m = Set(F16{}, kNone);
  for (int64_t block = begin; block < begin + width; block += kKeyBlock) {
    F16 keys[C];  // [channel] lane position
    for (int j = 0; j < kKeyBlock; ++j) {
      const uint16_t* key = row(block + j, see.keys, see.block_keys);
      for (int k = 0; k < C; k += 16) keys[k + j] = LoadBf16(key + k);
    }
    for (int k = 0; k < C; k += 16) Transpose(keys + k);
    for (int from = 0; from < n; from += 8) {
      F16 score[8];
      const int some = n - from < 8 ? n - from : 8;
      if (some == 8)
        Scores<C, 8>(queries + from, keys, scale, score);
      else
        for (int i = 0; i < some; ++i) Scores<C, 1>(queries + from + i, keys, scale, score + i);
      for (int i = from; i < from + some; ++i) {
        float* s = scores + i * width + block - begin;
        Store(s, score[i - from]);
        if (block < queries[i].first || block + kKeyBlock - 1 > queries[i].last) {
          for (int j = 0; j < kKeyBlock; ++j)
            if (block + j < queries[i].first || block + j > queries[i].last) s[j] = kNone;
          score[i - from] = Load(s);
        }
        most[i] = Larger(score[i - from], most[i]);
      }
    }
  }
  float largest[kMaxQueries];
  for (int i = 0; i < n; ++i) {
    float lanes[16];
    Store(lanes, most[i]);
    largest[i] = lanes[0];
    for (float x : lanes) largest[i] = x > largest[i] ? x : largest[i];
  }

  Weighted<C> total[kMaxQueries], group[kMaxQueries], chunk[kMaxQueries];
  for (int i = 0; i < n; ++i) total[i].Clear(), group[i].Clear(), chunk[i].Clear();
  for (int64_t block = begin; block < begin + width; block += kKeyBlock) {
    float values[kKeyBlock][C];
    for (int j = 0; j < kKeyBlock; ++j) {
      const uint16_t* value = row(block + j, see.values, see.block_values);
      for (int k = 0; k < C; k += 16) Store(values[j] + k, LoadBf16(value + k));
    }
    float p[kMaxQueries][kKeyBlock];
    for (int i = 0; i < n; ++i) Store(p[i], Exp(Sub(Load(scores + i * width + block - begin), Set(F16{}, largest[i]))));
    for (int i = 0; i < n; i += 2)
      i + 1 < n ? AddValues<C, 2>(p + i, values, chunk + i) : AddValues<C, 1>(p + i, values, chunk + i);
    const int64_t next = block + kKeyBlock;
    const bool end = next == begin + width;
    if (end || next % kKeyChunk == 0)
      for (int i = 0; i < n; ++i) group[i] += chunk[i], chunk[i].Clear();
    if (end || next % kKeyGroup == 0)
      for (int i = 0; i < n; ++i) total[i] += group[i], group[i].Clear();
  }
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < C / 16; ++k)
      Store(queries[i].out + 16 * k, RoundBf16(Div(total[i].value[k], Set(F16{}, total[i].weight))));
}

void Attend(const DraftQuery* queries, int n, int c, float scale, const DraftSeen& see, float* scores) {
  switch (c) {
    case 16:
      return AttendOf<16>(queries, n, scale, see, scores);
    case 32:
      return AttendOf<32>(queries, n, scale, see, scores);
    case 64:
      return AttendOf<64>(queries, n, scale, see, scores);
    case 128:
      return AttendOf<128>(queries, n, scale, see, scores);
  }
}

void Softcap(float* x, int64_t n, float multiplier, float cap) {
  const F16 by = Set(F16{}, multiplier), limit = Set(F16{}, cap);
  for (int64_t i = 0; i < n; i += 16) {
    const F16 u = Mul(Load(x + i), by);
    Store(x + i, cap == 0.0f ? u : Mul(limit, Tanh(Div(u, limit))));
  }
}

void ExpBelow(const float* x, int64_t n, float largest, float* out) {
  const F16 top = Set(F16{}, largest);
  for (int64_t i = 0; i < n; i += 16) Store(out + i, Exp(Sub(Load(x + i), top)));
}

void PairScores(const uint16_t* before, const float* gate, const uint16_t* const* after, int count, int64_t rank,
                const float* unary, float* out) {
  F16 acc[16];
  for (F16& a : acc) a = Zero();
  for (int64_t r = 0; r < rank; r += 16) {
    const F16 gated = Mul(LoadBf16(before + r), Load(gate + r));
    for (int c = 0; c < count; ++c) acc[c] = Fma(gated, LoadBf16(after[c] + r), acc[c]);
  }
  float sums[16];
  Store(sums, ReduceLanes(acc));
  for (int c = 0; c < count; ++c) out[c] = unary[c] + sums[c];
}

}  // namespace

extern const DraftKernels kDraftKernels;
const DraftKernels kDraftKernels = {Columns, Bf16Tile, Norm,     Rotate,    TwoTaps,
                                    Attend,  Softcap,  ExpBelow, NextAbove, PairScores};

}  // namespace musejax::MUSEJAX_ISA
