// Inline PTX of the whole project, one function per instruction and named like it, and the two things every kernel
// builds from them: 16-byte words that carry a tag, and spins with a wall-clock budget.
//
// Baseline sm_90 only: nothing here needs an architecture-specific ("a") target. Device code. Pointers are generic
// addresses of the space their comment names; pointers to shared memory are converted here. Functions with an effect on
// memory are volatile and clobber it, so the compiler keeps their order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace musejax::ptx {

#define MUSEJAX_PTX __device__ __forceinline__

enum class Scope { kGpu, kSys };

// The 32-bit shared-window address of a pointer to shared memory.
MUSEJAX_PTX uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// ---- mbarriers, in shared memory of this block ----

// Starts a barrier whose phases complete after `count` arrivals and all expected bytes. Then FenceMbarrierInit.
MUSEJAX_PTX void MbarrierInit(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(bar)), "r"(count) : "memory");
}

// Makes inits visible to the async proxy and the cluster; the block still needs a barrier before others use them.
MUSEJAX_PTX void FenceMbarrierInit() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival (release) of this thread.
MUSEJAX_PTX void MbarrierArrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(bar)) : "memory");
}

// One arrival of each thread whose `blocked` is 0, not before `value` is there: a load that it comes from has ended. (A
// number has at most 32 bits set, which the compiler does not know.)
MUSEJAX_PTX void MbarrierArriveAfter(uint64_t* bar, uint32_t value, uint32_t blocked) {
  asm volatile(
      "{\n.reg .pred p, q;\n.reg .u32 n;\npopc.b32 n, %1;\nsetp.eq.u32 q, %2, 0;\nsetp.le.and.u32 p, n, 32, q;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(SharedAddress(bar)),
      "r"(value), "r"(blocked)
      : "memory");
}

// One arrival that also makes the current phase wait for `bytes` of bulk copies.
MUSEJAX_PTX void MbarrierArriveExpectTx(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(bar)), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity is complete (acquire); the hardware may suspend the thread for a while before it
// says no. A new barrier is in phase 0: waiting for parity 1 returns at once.
MUSEJAX_PTX bool MbarrierTryWaitParity(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(SharedAddress(bar)), "r"(parity)
               : "memory");
  return done != 0;
}

// ---- bulk copies ----

// A 64-bit cache policy: lines read with it leave L2 first.
MUSEJAX_PTX uint64_t CreatePolicyEvictFirst() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Copies `bytes` from global to shared memory, both 16-byte aligned and sized; `bar` counts them when they are there.
MUSEJAX_PTX void CpAsyncBulk(void* shared, const void* global, uint32_t bytes, uint64_t* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(shared)),
               "l"(global), "r"(bytes), "r"(SharedAddress(bar))
               : "memory");
}

// The same with a cache policy.
MUSEJAX_PTX void CpAsyncBulk(void* shared, const void* global, uint32_t bytes, uint64_t* bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(bar)), "l"(policy)
      : "memory");
}

// Starts to bring `bytes` of global memory into L2, both 16-byte aligned and sized; nothing tells when they are there.
MUSEJAX_PTX void CpAsyncBulkPrefetchL2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Copies 16 bytes from global to shared memory, past L1; those of this thread since the last commit are a group.
MUSEJAX_PTX void CpAsync16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(shared)), "l"(global) : "memory");
}
MUSEJAX_PTX void CpAsyncCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's groups, the newest, are not there yet.
template <int kPending>
MUSEJAX_PTX void CpAsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before its later bulk copies.
MUSEJAX_PTX void FenceProxyAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- arithmetic ----

// d[16 x 8] += a[16 x 16] b[16 x 8], bf16 operands, f32 sums. With g = lane / 4 and t = lane % 4 a lane holds
//   a[r]: row g + 8 (r % 2), columns 2t + 8 (r / 2) and the next       (low half first)
//   b0, b1: column g, rows 2t and the next; 2t + 8 and the next
//   d[r]: row g + 8 (r / 2), column 2t + r % 2
MUSEJAX_PTX void MmaM16N8K16Bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Transposes an 8 x 8 matrix of bf16: lane 4i + j gives columns 2j and 2j + 1 of row i and gets those of the transpose.
MUSEJAX_PTX uint32_t Movmatrix(uint32_t a) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(a));
  return out;
}

// Two floats as bf16, `low` in the low half, rounded to nearest even.
MUSEJAX_PTX uint32_t CvtRnBf16x2(float low, float high) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// (a & b) | c, which the compiler makes two instructions of if b and c are constants.
MUSEJAX_PTX uint32_t AndOr(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// 2^x with an error of at most 2 units in the last place; the same bits on every GPU of a kind.
MUSEJAX_PTX float Ex2Approx(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// Both bf16 of `a` times the bf16 in half `kHalf` (0: low) of `b`, rounded to nearest even; subnormal numbers are kept.
template <int kHalf>
MUSEJAX_PTX uint32_t MulBf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
  if constexpr (kHalf == 0)
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {l, l};\nmul.bf16x2 %0, %1, s;\n}"
        : "=r"(out)
        : "r"(a), "r"(b));
  else
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {h, h};\nmul.bf16x2 %0, %1, s;\n}"
        : "=r"(out)
        : "r"(a), "r"(b));
  return out;
}

// ---- global memory, relaxed: never a stale L1 line, no order with other addresses ----

// 16 bytes that are written and read as one access, in global memory. The top 16 bits of `hi` may be a tag. ptxas
// narrows a load to the part of the word that is used (to 4 bytes if that is the tag alone), still one access.
struct alignas(16) Word {
  uint64_t lo, hi;
};

template <Scope kScope>
MUSEJAX_PTX uint32_t LdRelaxed(const uint32_t* global) {
  uint32_t out;
  if constexpr (kScope == Scope::kGpu)
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(out) : "l"(global) : "memory");
  else
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(out) : "l"(global) : "memory");
  return out;
}

template <Scope kScope>
MUSEJAX_PTX uint64_t LdRelaxed(const uint64_t* global) {
  uint64_t out;
  if constexpr (kScope == Scope::kGpu)
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(out) : "l"(global) : "memory");
  else
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(out) : "l"(global) : "memory");
  return out;
}

template <Scope kScope>
MUSEJAX_PTX Word LdRelaxed(const Word* global) {
  Word out;
  if constexpr (kScope == Scope::kGpu)
    asm volatile("{\n.reg .b128 w;\nld.relaxed.gpu.global.b128 w, [%2];\nmov.b128 {%0, %1}, w;\n}"
                 : "=l"(out.lo), "=l"(out.hi)
                 : "l"(global)
                 : "memory");
  else
    asm volatile("{\n.reg .b128 w;\nld.relaxed.sys.global.b128 w, [%2];\nmov.b128 {%0, %1}, w;\n}"
                 : "=l"(out.lo), "=l"(out.hi)
                 : "l"(global)
                 : "memory");
  return out;
}

template <Scope kScope>
MUSEJAX_PTX void StRelaxed(uint32_t* global, uint32_t value) {
  if constexpr (kScope == Scope::kGpu)
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
  else
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

template <Scope kScope>
MUSEJAX_PTX void StRelaxed(uint64_t* global, uint64_t value) {
  if constexpr (kScope == Scope::kGpu)
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
  else
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(global), "l"(value) : "memory");
}

template <Scope kScope>
MUSEJAX_PTX void StRelaxed(Word* global, Word value) {
  if constexpr (kScope == Scope::kGpu)
    asm volatile("{\n.reg .b128 w;\nmov.b128 w, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], w;\n}" ::"l"(global),
                 "l"(value.lo), "l"(value.hi)
                 : "memory");
  else
    asm volatile("{\n.reg .b128 w;\nmov.b128 w, {%1, %2};\nst.relaxed.sys.global.b128 [%0], w;\n}" ::"l"(global),
                 "l"(value.lo), "l"(value.hi)
                 : "memory");
}

// ---- global memory, ordered ----

// Later accesses of this thread come after it; pairs with RedAddRelease.
template <Scope kScope>
MUSEJAX_PTX uint32_t LdAcquire(const uint32_t* global) {
  uint32_t out;
  if constexpr (kScope == Scope::kGpu)
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(out) : "l"(global) : "memory");
  else
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(out) : "l"(global) : "memory");
  return out;
}

// Adds without an answer, after all earlier accesses of this thread and those it has seen (a block barrier counts).
template <Scope kScope>
MUSEJAX_PTX void RedAddRelease(uint32_t* global, uint32_t value) {
  if constexpr (kScope == Scope::kGpu)
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
  else
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(global), "r"(value) : "memory");
}

// ---- blocks, clusters, launches ----

// Barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads, whole warps.
MUSEJAX_PTX void BarSync(uint32_t id, uint32_t threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same; whether any of the threads said yes.
MUSEJAX_PTX bool BarRedOr(uint32_t id, uint32_t threads, bool yes) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %3, 0;\nbarrier.cta.red.or.pred q, %1, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(yes))
      : "memory");
  return any != 0;
}

// Arrives (release) at the cluster's barrier; every thread of the cluster arrives, then waits.
MUSEJAX_PTX void BarrierClusterArrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
MUSEJAX_PTX void BarrierClusterWait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Programmatic dependent launch: the next grid may start; wait until the grid before has ended and its writes are here.
MUSEJAX_PTX void GridDependencyLaunch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
MUSEJAX_PTX void GridDependencyWait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The block's dynamic shared memory.
MUSEJAX_PTX uint8_t* DynamicShared() {
  extern __shared__ __align__(128) uint8_t musejax_dynamic_shared[];
  return musejax_dynamic_shared;
}

// ---- special registers ------------------------------------------------------------------------------------------------

// Nanoseconds, the same clock on all SMs; it advances in steps of 32 ns or more.
MUSEJAX_PTX uint64_t GlobalTimer() {
  uint64_t out;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(out)::"memory");
  return out;
}

// threadIdx.x, read anew at each use instead of kept in a register or on the stack.
MUSEJAX_PTX uint32_t ThreadOfBlock() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
  return thread;
}

// Suspends the thread for 0 to twice this time, at most 1 ms.
MUSEJAX_PTX void NanoSleep(uint32_t ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// ---- tagged words ----

// 14 bytes of payload (all of `lo`, the lower 48 bits of `hi`) and a tag, so that data is its own flag.
MUSEJAX_PTX Word Tagged(uint64_t lo, uint64_t hi, uint16_t tag) {
  return {lo, (hi & 0x0000FFFFFFFFFFFFull) | static_cast<uint64_t>(tag) << 48};
}
MUSEJAX_PTX uint16_t TagOf(Word word) { return static_cast<uint16_t>(word.hi >> 48); }

// ---- bounded spins ----

inline constexpr uint64_t kSpinBudgetNs = 2'000'000'000;

// Calls ready() until it says yes; false if that takes longer than the budget. The clock is read once in 64 calls, so
// the budget is exceeded by that many, and a spin that is over soon never reads it.
template <typename Ready>
MUSEJAX_PTX bool SpinUntil(Ready ready, uint64_t budget_ns = kSpinBudgetNs) {
  uint64_t start = 0;
  for (uint32_t calls = 0; !ready();) {
    if (++calls % 64 != 0) continue;
    const uint64_t now = GlobalTimer();
    if (start == 0) start = now;
    if (now - start > budget_ns) return false;
  }
  return true;
}

// Waits for a phase of an mbarrier; false if that takes longer than the budget.
MUSEJAX_PTX bool MbarrierWaitParity(uint64_t* bar, uint32_t parity, uint64_t budget_ns = kSpinBudgetNs) {
  return SpinUntil([=] { return MbarrierTryWaitParity(bar, parity); }, budget_ns);
}

#undef MUSEJAX_PTX

}  // namespace musejax::ptx
