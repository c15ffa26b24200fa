// wgmma, the matmul instruction of a warpgroup. The product has 64 rows, N columns and fp32
// accumulators. Operand B is in shared memory. Operand A is in shared memory or in registers. Warp
// w of the warpgroup (0 to 3) holds rows 16 w to 16 w + 15 of the accumulators, in the fragment
// layout of mma.sync (device/mma_sync.cuh).
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "device/features.cuh"
#include "device/sm90/descriptor.h"
#include "device/vec.cuh"

namespace torchweld {

#if TW_HAS_WGMMA
// Orders this thread's earlier register accesses before its later wgmmas.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the committed wgmma groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that the accumulators change at this point. Therefore the compiler does not
// move later reads of the accumulators to an earlier point.
template <int kSums>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Tells the compiler that the values of the accumulators are no longer needed, because the next
// wgmma overwrites them (scale_d = 0). Without this call, the values of the last loop iteration
// would occupy registers until that wgmma.
template <int kSums>
__device__ __forceinline__ void discard_accumulators(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "=f"(d[i]));
}

// Computes d = (scale_d ? d : 0) + a @ b^T, where d has 64 rows and N columns, K is 16, and
// elements have 16 bits. In multiply<kA, kB>(d, a, b, scale_d), a and b are descriptors of operands
// in shared memory. In multiply<kB>(d, a, b, scale_d), a is in registers. kA is 1 if a is MN-major,
// and kB is 1 if b is MN-major. Otherwise they are 0.
template <typename T, int N>
struct Wgmma;

#define TW_D4 "%0, %1, %2, %3"
#define TW_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TW_D32 \
  TW_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TW_D40 TW_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TW_D48 \
  TW_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TW_D64 \
  TW_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TW_D80 \
  TW_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define TW_D96 \
  TW_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TW_D112                                                                              \
  TW_D96                                                                                     \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
  "%111"
#define TW_D128                                                                            \
  TW_D112                                                                                  \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127"
#define TW_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TW_SUMS8(i) TW_SUMS4(i), TW_SUMS4(i + 4)
#define TW_SUMS16(i) TW_SUMS4(i), TW_SUMS4(i + 4), TW_SUMS4(i + 8), TW_SUMS4(i + 12)
#define TW_SUMS32(i) TW_SUMS16(i), TW_SUMS16(i + 16)
#define TW_SUMS40(i) TW_SUMS32(i), TW_SUMS8(i + 32)
#define TW_SUMS48(i) TW_SUMS32(i), TW_SUMS16(i + 32)
#define TW_SUMS64(i) TW_SUMS32(i), TW_SUMS32(i + 32)
#define TW_SUMS80(i) TW_SUMS64(i), TW_SUMS16(i + 64)
#define TW_SUMS96(i) TW_SUMS64(i), TW_SUMS32(i + 64)
#define TW_SUMS128(i) TW_SUMS64(i), TW_SUMS64(i + 64)
// NAME is the instruction without its operands. A to G are the numbers of the asm operands that
// follow the accumulators.
#define TW_WGMMA_REGISTERS(NAME, SUMS, A, B, C, D, E, F, G)                                      \
  template <int kB>                                                                              \
  static __device__ __forceinline__ void multiply(float (&d)[SUMS], const uint32_t (&a)[4],      \
                                                  uint64_t b, int scale_d) {                     \
    asm volatile("{\n.reg .pred scale_d;\nsetp.ne.b32 scale_d, " F ", 0;\n" NAME " {" TW_D##SUMS \
                 "}, {" A ", " B ", " C ", " D "}, " E ", scale_d, 1, 1, " G ";\n}"              \
                 : TW_SUMS##SUMS(0)                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(kB)     \
                 : "memory");                                                                    \
  }
#define TW_WGMMA_SHARED(NAME, SUMS, A, B, C, D, E, F, G)                                         \
  template <int kA, int kB>                                                                      \
  static __device__ __forceinline__ void multiply(float (&d)[SUMS], uint64_t a, uint64_t b,      \
                                                  int scale_d) {                                 \
    asm volatile("{\n.reg .pred scale_d;\nsetp.ne.b32 scale_d, " C ", 0;\n" NAME " {" TW_D##SUMS \
                 "}, " A ", " B ", scale_d, 1, 1, " D ", " E ";\n}"                              \
                 : TW_SUMS##SUMS(0)                                                              \
                 : "l"(a), "l"(b), "r"(scale_d), "n"(kA), "n"(kB)                                \
                 : "memory");                                                                    \
  }
#define TW_WGMMA(T, TYPE, N, SUMS, ...)                                                       \
  template <>                                                                                 \
  struct Wgmma<T, N> {                                                                        \
    TW_WGMMA_REGISTERS("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE, SUMS, \
                       __VA_ARGS__)                                                           \
    TW_WGMMA_SHARED("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE, SUMS,    \
                    __VA_ARGS__)                                                              \
  };
#define TW_WGMMA_16_BITS(N, SUMS, ...)                  \
  TW_WGMMA(__nv_bfloat16, "bf16", N, SUMS, __VA_ARGS__) \
  TW_WGMMA(__half, "f16", N, SUMS, __VA_ARGS__)
TW_WGMMA_16_BITS(8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
TW_WGMMA_16_BITS(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
TW_WGMMA_16_BITS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
TW_WGMMA_16_BITS(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
TW_WGMMA_16_BITS(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
TW_WGMMA_16_BITS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
TW_WGMMA_16_BITS(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
TW_WGMMA_16_BITS(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
TW_WGMMA_16_BITS(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#undef TW_WGMMA_16_BITS

// The TF32 wgmma has K = 8. It needs K-major operands, so kA and kB must be 0. It ignores the low
// 13 bits of each fp32 value.
#define TW_WGMMA_TF32(N, SUMS, A, B, C)                                                         \
  template <>                                                                                   \
  struct Wgmma<float, N> {                                                                      \
    template <int kA, int kB>                                                                   \
    static __device__ __forceinline__ void multiply(float (&d)[SUMS], uint64_t a, uint64_t b,   \
                                                    int scale_d) {                              \
      static_assert(kA == 0 && kB == 0);                                                        \
      asm volatile("{\n.reg .pred scale_d;\nsetp.ne.b32 scale_d, " C                            \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" TW_D##SUMS \
                   "}, " A ", " B ", scale_d, 1, 1;\n}"                                         \
                   : TW_SUMS##SUMS(0)                                                           \
                   : "l"(a), "l"(b), "r"(scale_d)                                               \
                   : "memory");                                                                 \
    }                                                                                           \
  };
TW_WGMMA_TF32(128, 64, "%64", "%65", "%66")
TW_WGMMA_TF32(256, 128, "%128", "%129", "%130")
#undef TW_WGMMA_TF32
#undef TW_WGMMA
#undef TW_WGMMA_SHARED
#undef TW_WGMMA_REGISTERS
#undef TW_SUMS128
#undef TW_SUMS96
#undef TW_SUMS80
#undef TW_SUMS64
#undef TW_SUMS48
#undef TW_SUMS40
#undef TW_SUMS32
#undef TW_SUMS16
#undef TW_SUMS8
#undef TW_SUMS4
#undef TW_D128
#undef TW_D112
#undef TW_D96
#undef TW_D80
#undef TW_D64
#undef TW_D48
#undef TW_D40
#undef TW_D32
#undef TW_D16
#undef TW_D4
#endif

}  // namespace torchweld
