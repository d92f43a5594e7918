// Two properties of mma.m16n8k16 with bf16 operands and f32 sums that the layer kernel builds on: a column's bits do
// not depend on the other columns, and subnormal operands are kept.
#include <cmath>
#include <cstring>

#include "bench/measure.h"
#include "bench/random.cuh"
#include "common/ptx.cuh"

namespace musejax::bench {
namespace {

constexpr int kWarps = 8;
constexpr uint32_t kFull = ~0u;

// ---- columns ----

struct ColumnCounts {
  unsigned long long tried, wrong, seen;
};

struct ColumnsArgs {
  uint32_t trials;  // of a warp
  ColumnCounts* counts;
};

// Operands of two MMAs in a row, as one lane holds them, and the sums they start from.
struct Operands {
  uint32_t a[2][4], b[2][2];
  float c[4];
};

struct Sums {
  float d[4];
};

__device__ Sums Multiply(const Operands& x) {
  Sums out{{x.c[0], x.c[1], x.c[2], x.c[3]}};
  for (int i = 0; i < 2; ++i) ptx::MmaM16N8K16Bf16(out.d, x.a[i], x.b[i][0], x.b[i][1]);
  return out;
}

// Two finite bf16 with exponents of `span` sizes around 1.
__device__ uint32_t RandomPair(uint32_t bits, uint32_t span) {
  uint32_t out = bits & 0x807F807Fu;
  for (int h = 0; h < 2; ++h) out |= (127 - span / 2 + (bits >> (16 * h + 7) & 0xFF) % span) << (16 * h + 7);
  return out;
}

__device__ Operands RandomOperands(uint64_t trial, int lane) {
  constexpr uint32_t spans[] = {1, 16, 100};
  const uint32_t span = spans[trial % 3];
  Operands x;
  for (int i = 0; i < 8; ++i) x.a[i / 4][i % 4] = RandomPair(Random(5, (trial * 16 + i) * 32 + lane), span);
  for (int i = 0; i < 4; ++i) x.b[i / 2][i % 2] = RandomPair(Random(5, (trial * 16 + 8 + i) * 32 + lane), span);
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = Random(5, (trial * 16 + 12 + i) * 32 + lane);
    x.c[i] = __uint_as_float((RandomPair(bits, span) & 0xFFFF0000u) | (bits & 0xFFFFu));
  }
  return x;
}

// The column of which a lane's register i (b: of any register, lane / 4) of the sums is.
__device__ int ColumnOf(int lane, int i) { return lane % 4 * 2 + i % 2; }

// Sums with column (m (c - s)) mod 8 of x in column c; m is odd, so this is a permutation.
__device__ Sums PermuteSums(const float (&x)[4], int m, int s, int lane) {
  Sums out;
  for (int i = 0; i < 4; ++i) {
    const int from = m * (ColumnOf(lane, i) - s) & 7, source = lane / 4 * 4 + from / 2;
    const float even = __shfl_sync(kFull, x[i & 2], source), odd = __shfl_sync(kFull, x[i | 1], source);
    out.d[i] = from % 2 ? odd : even;
  }
  return out;
}

__device__ uint32_t Junk(int kind, uint32_t bits) {
  constexpr uint32_t fixed[] = {0x7FC07FC0u, 0x7F80FF80u, 0x7F7F0001u};  // NaN, infinities, greatest and least
  return kind < 3 ? fixed[kind] : bits;
}

__device__ bool Unlike(float x, float y) { return __float_as_uint(x) != __float_as_uint(y); }

__global__ void __launch_bounds__(32 * kWarps) ColumnsKernel(ColumnsArgs a) {
  const int lane = threadIdx.x % 32;
  const uint64_t warp = static_cast<uint64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  uint32_t tried = 0, wrong = 0, seen = 0;
  for (uint32_t t = 0; t < a.trials; ++t) {
    const uint64_t trial = warp * a.trials + t;
    const Operands x = RandomOperands(trial, lane);
    const Sums alone = Multiply(x);

    const uint32_t r = Random(6, trial);
    const int m = 2 * (r & 3) + 1, s = r >> 2 & 7;
    Operands y = x;
    for (int i = 0; i < 4; ++i) {
      const int from = (m * (lane / 4 - s) & 7) * 4 + lane % 4;
      y.b[i / 2][i % 2] = __shfl_sync(kFull, x.b[i / 2][i % 2], from);
    }
    const Sums start = PermuteSums(x.c, m, s, lane), wanted = PermuteSums(alone.d, m, s, lane);
    for (int i = 0; i < 4; ++i) y.c[i] = start.d[i];
    const Sums permuted = Multiply(y);
    for (int i = 0; i < 4; ++i) ++tried, wrong += Unlike(permuted.d[i], wanted.d[i]);

    for (int column = 0; column < 8; ++column) {
      for (int kind = 0; kind < 4; ++kind) {
        Operands z = x;
        for (int i = 0; i < 4; ++i) {
          const uint32_t junk = Junk(kind, Random(7, (trial * 64 + column * 8 + i) * 32 + lane));
          if (lane / 4 != column) z.b[i / 2][i % 2] = junk;
          if (ColumnOf(lane, i) != column) z.c[i] = __uint_as_float(junk);
        }
        const Sums among = Multiply(z);
        for (int i = 0; i < 4; ++i)
          if (ColumnOf(lane, i) == column) ++tried, wrong += Unlike(among.d[i], alone.d[i]);
      }
      Operands z = x;  // the deliberate fault: the last bit of four values of the column itself
      if (lane / 4 == column) z.b[0][0] ^= 1;
      const Sums other = Multiply(z);
      for (int i = 0; i < 4; ++i)
        if (ColumnOf(lane, i) == column) seen += Unlike(other.d[i], alone.d[i]);
    }
  }
  tried = __reduce_add_sync(kFull, tried), wrong = __reduce_add_sync(kFull, wrong);
  seen = __reduce_add_sync(kFull, seen);
  if (lane == 0) {
    atomicAdd(&a.counts->tried, static_cast<unsigned long long>(tried));
    atomicAdd(&a.counts->wrong, static_cast<unsigned long long>(wrong));
    atomicAdd(&a.counts->seen, static_cast<unsigned long long>(seen));
  }
}

// ---- subnormal numbers ----

struct SubnormalArgs {
  const uint4* a;  // [trials][lane]
  const uint2* b;  // [trials][lane]
  float4* d;       // [trials][lane]
};

__global__ void SubnormalKernel(SubnormalArgs args) {
  const size_t i = static_cast<size_t>(blockIdx.x) * 32 + threadIdx.x;
  const uint4 words = args.a[i];
  const uint32_t a[4] = {words.x, words.y, words.z, words.w};
  float d[4] = {};
  ptx::MmaM16N8K16Bf16(d, a, args.b[i].x, args.b[i].y);
  args.d[i] = {d[0], d[1], d[2], d[3]};
}

// One trial on the host: codes times 2^-126, times whole numbers times 2^exponent.
struct SubnormalTrial {
  int code[16][16], token[16][8], exponent;  // code: sign and three bits of E2M1

  SubnormalTrial(uint32_t number, int exponent) : exponent(exponent) {
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < 16; ++row) code[row][k] = Random(8, number * 512ull + row * 16 + k) & 15;
      for (int n = 0; n < 8; ++n) token[k][n] = static_cast<int>(Random(9, number * 512ull + k * 8 + n) % 7) - 3;
    }
  }

  uint32_t A(int lane, int reg) const {
    uint32_t word = 0;
    for (int h = 0; h < 2; ++h) {
      const int c = code[lane / 4 + reg % 2 * 8][lane % 4 * 2 + reg / 2 * 8 + h];
      word |= static_cast<uint32_t>(c >> 3 << 15 | (c & 7) << 6) << 16 * h;
    }
    return word;
  }
  uint32_t B(int lane, int reg) const {
    uint32_t word = 0;
    for (int h = 0; h < 2; ++h) {
      const float value = std::ldexp(static_cast<float>(token[lane % 4 * 2 + reg * 8 + h][lane / 4]), exponent);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      word |= bits >> 16 << 16 * h;
    }
    return word;
  }
  // Exact: a multiple of 2^(exponent - 127) with few bits. `flush`: as if subnormal codes were 0.
  float Sum(int lane, int reg, bool flush) const {
    constexpr double kE2M1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int c = code[lane / 4 + reg / 2 * 8][k];
      const double value = flush && (c & 7) == 1 ? 0 : kE2M1[c & 7];
      sum += (c & 8 ? -value : value) * token[k][lane % 4 * 2 + reg % 2];
    }
    return static_cast<float>(std::ldexp(sum + 0.0, exponent - 126));
  }
};

struct SubnormalCounts {
  uint64_t tried = 0, wrong = 0, flushed = 0;
};

// Sums unlike the host's for every exponent of [first, last].
SubnormalCounts CountSubnormal(Bench& bench, int first, int last) {
  constexpr int kTrials = 64;
  std::vector<SubnormalTrial> trials;
  for (int e = first; e <= last; ++e)
    for (int i = 0; i < kTrials; ++i) trials.emplace_back(static_cast<uint32_t>(trials.size()), e);
  std::vector<uint4> a;
  std::vector<uint2> b;
  for (const SubnormalTrial& t : trials)
    for (int lane = 0; lane < 32; ++lane) {
      a.push_back({t.A(lane, 0), t.A(lane, 1), t.A(lane, 2), t.A(lane, 3)});
      b.push_back({t.B(lane, 0), t.B(lane, 1)});
    }
  const DeviceArray<uint4> a_device(a.size());
  const DeviceArray<uint2> b_device(b.size());
  const DeviceArray<float4> d_device(a.size());
  a_device.Put(a);
  b_device.Put(b);
  Launch(SubnormalKernel, {static_cast<int>(trials.size()), 32}, bench.stream(),
         {a_device.data(), b_device.data(), d_device.data()});
  bench.Finish();
  const std::vector<float4> d = d_device.Get();
  SubnormalCounts out;
  for (size_t i = 0; i < d.size(); ++i) {
    const float got[] = {d[i].x, d[i].y, d[i].z, d[i].w};
    for (int reg = 0; reg < 4; ++reg) {
      const SubnormalTrial& t = trials[i / 32];
      const float wanted = t.Sum(static_cast<int>(i % 32), reg, false);
      const float flushed = t.Sum(static_cast<int>(i % 32), reg, true);
      ++out.tried;
      out.wrong += std::memcmp(&wanted, &got[reg], 4) != 0;
      out.flushed += std::memcmp(&flushed, &got[reg], 4) != 0;
    }
  }
  return out;
}

}  // namespace

void MeasureMma(Bench& bench) {
  const DeviceArray<ColumnCounts> counts(1);
  Launch(ColumnsKernel, {bench.sms(), 32 * kWarps}, bench.stream(), {256, counts.data()});
  bench.Finish();
  const ColumnCounts c = counts.Get()[0];
  bench.AddCount("mma.columns", "sums that depend on other columns", c.wrong, c.tried, c.seen,
                 "columns permuted, or NaN, infinite, extreme, random");

  const SubnormalCounts normal = CountSubnormal(bench, 1, 120), tiny = CountSubnormal(bench, -22, 0);
  bench.AddCount("mma.subnormal", "sums of subnormal bf16 unlike the host's", normal.wrong, normal.tried,
                 normal.flushed, "codes x 2^-126 times whole numbers x 2^1 to 2^120");
  const double wrong = static_cast<double>(tiny.wrong);
  bench.Add("mma.tiny_sums", "the same, sums that may be subnormal f32", "wrong", {wrong, wrong, wrong, 1}, "",
            Format("of %.3g, times 2^-22 to 1; nothing relies on it", static_cast<double>(tiny.tried)));
}

}  // namespace musejax::bench
