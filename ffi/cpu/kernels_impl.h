// Bodies of the kernels of kernels.h for one instruction set; see simd.h for how three sets share this text. The inner
// order of a range of K is this file's: lanes as they lie in a weight tile, each adding its products in ascending order
// by fmaf, then lanes i and i + 8, i + 4, i + 2 (and i + 1) of one row.
#include "common/layout.h"
#include "cpu/kernels.h"
#include "cpu/reduce.h"

namespace musejax::MUSEJAX_ISA {
namespace {

// Lane 4 k + 0, 1, 2, 3 of the reduced vector holds rows k, k + 8, k + 4, k + 12.
constexpr int32_t kRows8[16] = {0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15};

// acc[g]: lane 4 t + register. -> lane = tile row.
inline F16 ReduceTile(const F16* acc) {
  F16 half[2];
  for (int i = 0; i < 2; ++i) half[i] = Pair4(Pair8(acc[4 * i], acc[4 * i + 1]), Pair8(acc[4 * i + 2], acc[4 * i + 3]));
  return Permute(Pair2(half[0], half[1]), kRows8);
}

template <int N>
void Bf16TileOf(const uint8_t* w, int64_t chunk_stride, int64_t k, const float* const* x, float* out) {
  const int64_t tiles = Range(k) / 16;
  F16 total[N];
  for (F16& t : total) t = Zero();
  int64_t column = 0;
  for (int64_t c = 0; c < k / Chunk(k); ++c, w += chunk_stride) {
    const uint8_t* tile = w;
    F16 chunk[N];
    for (F16& s : chunk) s = Zero();
    for (int64_t range = 0; range < kRanges; ++range) {
      F16 acc[N][8];
      for (auto& row : acc)
        for (F16& a : row) a = Zero();
      for (int64_t i = 0; i < tiles; ++i, tile += 512, column += 16) {
        F16 even[N], odd[N];
        for (int n = 0; n < N; ++n) even[n] = Load(x[n] + 2 * column), odd[n] = Load(x[n] + 2 * column + 16);
        for (int g = 0; g < 8; ++g) {
          F16 low, high;
          LoadPairs(tile + 64 * g, &low, &high);
          for (int n = 0; n < N; ++n) acc[n][g] = Fma(high, odd[n], Fma(low, even[n], acc[n][g]));
        }
      }
      for (int n = 0; n < N; ++n) chunk[n] = Add(chunk[n], ReduceTile(acc[n]));
    }
    for (int n = 0; n < N; ++n) total[n] = Add(total[n], chunk[n]);
  }
  for (int n = 0; n < N; ++n) Store(out + 16 * n, total[n]);
}

void Bf16Tile(const uint8_t* w, int64_t chunk_stride, int64_t k, const float* const* x, int n, float* out) {
  int i = 0;
  for (; i + 2 <= n; i += 2) Bf16TileOf<2>(w, chunk_stride, k, x + i, out + 16 * i);
  if (i < n) Bf16TileOf<1>(w, chunk_stride, k, x + i, out + 16 * i);
}

// E5M3 fields of 16 scale words -> E4M3 values: word i at scale + i % 4 * 16 + i / 4 * 4, four steps each.
inline void UnpackScales(const uint8_t* p, float* scale) {
  constexpr uint32_t kBase = uint32_t(127 - kScaleBias) << 23;
#if defined(__AVX512F__)
  const __m512i w = _mm512_loadu_si512(p), byte = _mm512_set1_epi32(0xFF << 20), base = _mm512_set1_epi32(int(kBase));
  const __m512i swapped =
      _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(w, 8), _mm512_set1_epi32(0x00FF00FF)),
                      _mm512_and_si512(_mm512_slli_epi32(w, 8), _mm512_set1_epi32(int(0xFF00FF00u))));
  const auto value = [&](__m512i v) { return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_and_si512(v, byte), base)); };
  const __m512 s0 = value(_mm512_slli_epi32(w, 16)), s1 = value(w);
  const __m512 s2 = value(_mm512_slli_epi32(swapped, 16)), s3 = value(swapped);
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(s0, s1)), b = _mm512_castps_pd(_mm512_unpackhi_ps(s0, s1));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(s2, s3)), d = _mm512_castps_pd(_mm512_unpackhi_ps(s2, s3));
  _mm512_storeu_ps(scale, _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)));
  _mm512_storeu_ps(scale + 16, _mm512_castpd_ps(_mm512_unpackhi_pd(a, c)));
  _mm512_storeu_ps(scale + 32, _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)));
  _mm512_storeu_ps(scale + 48, _mm512_castpd_ps(_mm512_unpackhi_pd(b, d)));
#else
  for (int i = 0; i < 16; ++i) {
    uint32_t w;
    memcpy(&w, p + 4 * i, 4);
    const uint32_t swapped = (w >> 8 & 0x00FF00FF) | (w << 8 & 0xFF00FF00u);
    const uint32_t at20[4] = {w << 16, w, swapped << 16, swapped};
    for (int j = 0; j < 4; ++j) scale[i % 4 * 16 + i / 4 * 4 + j] = Bits((at20[j] & 0x0FF00000u) + kBase);
  }
#endif
}

template <int N>
void Nvfp4TileOf(const uint8_t* w, int64_t k, const float* const* x, float* out) {
  const int64_t tiles = Nvfp4Range(k) / 64;  // of one range
  const uint8_t* scales = w + k / 64 * 512;
  F16 total[N];
  for (F16& t : total) t = Zero();
  for (int64_t first = 0; first < k / 64; first += tiles) {
    F16 sum[N][16];
    float scales_of[kMaxRangeTiles][64];
    for (int64_t i = 0; i < tiles; ++i) UnpackScales(scales + (first + i) * 64, scales_of[i]);
    for (int g = 0; g < 8; ++g) {
      F16 acc[N][2];
      for (auto& a : acc) a[0] = a[1] = Zero();
      for (int64_t kt = first; kt < first + tiles; ++kt) {
        const float* scale = scales_of[kt - first];
        F16 v[8];
        UnpackCodes(w + kt * 512 + g * 64, v);
        const F16 low = Repeat4(scale + 2 * g % 4 * 16 + 2 * g / 4 * 4);
        const F16 high = Repeat4(scale + (2 * g + 1) % 4 * 16 + (2 * g + 1) / 4 * 4);
        for (int i = 0; i < 8; ++i) v[i] = Mul(v[i], i & 2 ? high : low);
        for (int n = 0; n < N; ++n) {
          const float* f = x[n] + kt * 64;
          for (int i = 0; i < 4; ++i) {
            const F16 factor = Load(f + 16 * i);
            const int r = i / 2 * 4 + i % 2;
            acc[n][0] = Fma(v[r], factor, acc[n][0]);
            acc[n][1] = Fma(v[r + 2], factor, acc[n][1]);
          }
        }
      }
      for (int n = 0; n < N; ++n) sum[n][g] = acc[n][0], sum[n][g + 8] = acc[n][1];
    }
    for (int n = 0; n < N; ++n) total[n] = Add(total[n], ReduceLanes(sum[n]));
  }
  for (int n = 0; n < N; ++n) Store(out + 16 * n, total[n]);
}

// Up to 8 rows at a time: unpacking costs more than the products of one row.
void Nvfp4Tile(const uint8_t* w, int64_t k, const float* const* x, int n, float* out) {
  switch (n) {
    case 1:
      return Nvfp4TileOf<1>(w, k, x, out);
    case 2:
      return Nvfp4TileOf<2>(w, k, x, out);
    case 3:
      return Nvfp4TileOf<3>(w, k, x, out);
    case 4:
      return Nvfp4TileOf<4>(w, k, x, out);
    case 5:
      return Nvfp4TileOf<5>(w, k, x, out);
    case 6:
      return Nvfp4TileOf<6>(w, k, x, out);
    case 7:
      return Nvfp4TileOf<7>(w, k, x, out);
    case 8:
      return Nvfp4TileOf<8>(w, k, x, out);
  }
  if (n > 8) Nvfp4TileOf<8>(w, k, x, out), Nvfp4Tile(w, k, x + 8, n - 8, out + 8 * 16);
}

void Router(const float* w, int64_t rows, int64_t k, const float* x, float* out) {
  const int64_t length = Range(k), ranges = k / length;
  for (int64_t first = 0; first < rows; first += 16) {
    const int count = int(rows - first < 16 ? rows - first : 16);
    F16 total = Zero(), chunk = Zero();
    for (int64_t range = 0; range < ranges; ++range) {
      F16 acc[16];
      for (int r = 0; r < 16; ++r) {
        acc[r] = Zero();
        if (r >= count) continue;
        const float* row = w + (range * rows + first + r) * length;
        for (int64_t i = 0; i < length; i += 16) acc[r] = Fma(Load(row + i), Load(x + range * length + i), acc[r]);
      }
      chunk = Add(chunk, ReduceLanes(acc));
      if (range % kRanges == kRanges - 1) total = Add(total, chunk), chunk = Zero();
    }
    float sums[16];
    Store(sums, total);
    memcpy(out + first, sums, 4 * count);
  }
}

template <int C>
void AttendOf(const float* q, int heads, float scale, const Keys& see, float* out) {
  constexpr int kMaxHeads = 16;
  const auto first_of = [](int64_t p, int64_t unit) { return p / unit * unit; };
  for (int h0 = 0; h0 < heads; h0 += kMaxHeads) {
    const int count = heads - h0 < kMaxHeads ? heads - h0 : kMaxHeads;
    Weighted<C> total[kMaxHeads], group[kMaxHeads], chunk[kMaxHeads];
    for (int h = 0; h < count; ++h) total[h].Clear(), group[h].Clear(), chunk[h].Clear();
    for (int64_t block = first_of(see.first, kKeyBlock); block <= see.position; block += kKeyBlock) {
      float keys[kKeyBlock][C], values[kKeyBlock][C];
      bool visible[kKeyBlock];
      for (int j = 0; j < kKeyBlock; ++j) {
        const int64_t p = block + j;
        visible[j] = p >= see.first && p <= see.position;
        if (!visible[j]) {
          memset(keys[j], 0, sizeof keys[j]), memset(values[j], 0, sizeof values[j]);
          continue;
        }
        const bool stored = p < see.length;
        const uint16_t* key = stored ? see.keys + p % see.slots * C : see.tail_keys[p - see.length];
        const uint16_t* value = stored ? see.values + p % see.slots * C : see.tail_values[p - see.length];
        for (int i = 0; i < C; i += 16)
          Store(keys[j] + i, LoadBf16(key + i)), Store(values[j] + i, LoadBf16(value + i));
      }
      for (int h = 0; h < count; ++h) {
        const float* query = q + (h0 + h) * C;
        F16 score[kKeyBlock];
        for (int j = 0; j < kKeyBlock; ++j) {
          score[j] = Zero();
          for (int i = 0; i < C; i += 16) score[j] = Fma(Load(query + i), Load(keys[j] + i), score[j]);
        }
        float p[kKeyBlock];
        Store(p, RoundBf16(Exp(Mul(ReduceLanes(score), Set(F16{}, scale)))));
        Weighted<C> sum;
        sum.Clear();
        for (int j = 0; j < kKeyBlock; ++j) {
          const float weight = visible[j] ? p[j] : 0.0f;
          for (int i = 0; i < C / 16; ++i)
            sum.value[i] = Fma(Set(F16{}, weight), Load(values[j] + 16 * i), sum.value[i]);
          sum.weight += weight;
        }
        chunk[h] += sum;
      }
      const int64_t next = block + kKeyBlock;
      const bool end = next > see.position;
      if (end || next % kKeyChunk == 0)
        for (int h = 0; h < count; ++h) group[h] += chunk[h], chunk[h].Clear();
      if (end || next % kKeyGroup == 0)
        for (int h = 0; h < count; ++h) total[h] += group[h], group[h].Clear();
    }
    for (int h = 0; h < count; ++h)
      for (int i = 0; i < C / 16; ++i)
        Store(out + (h0 + h) * C + 16 * i, RoundBf16(Div(total[h].value[i], Set(F16{}, total[h].weight))));
  }
}

void Attend(const float* q, int heads, int c, float scale, const Keys& see, float* out) {
  switch (c) {
    case 16:
      return AttendOf<16>(q, heads, scale, see, out);
    case 32:
      return AttendOf<32>(q, heads, scale, see, out);
    case 64:
      return AttendOf<64>(q, heads, scale, see, out);
    case 128:
      return AttendOf<128>(q, heads, scale, see, out);
  }
}

void Swiglu(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) Store(out + i, Mul(Silu(Load(gate + i)), Load(up + i)));
}

}  // namespace

#define MUSEJAX_TEXT_(x) #x
#define MUSEJAX_TEXT(x) MUSEJAX_TEXT_(x)
extern const Kernels kKernels;
const Kernels kKernels = {MUSEJAX_TEXT(MUSEJAX_ISA), Bf16Tile, Nvfp4Tile, Router, Attend, Swiglu};

}  // namespace musejax::MUSEJAX_ISA
