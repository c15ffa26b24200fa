// Products of a warpgroup: 64 rows from registers, columns from shared memory, fp32 sums. Warp w of
// the four has rows 16 w to 16 w + 15, in the fragments of mma.sync (see device/mma_sync.cuh).
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once

#include "device/vec.cuh"

// NOTE: these instructions are for sm_90a alone; code for other chips of any age lacks them.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TW_HAS_WARPGROUPS 1
#else
#define TW_HAS_WARPGROUPS 0
#endif

namespace torchweld {

#if TW_HAS_WARPGROUPS
// What is written to registers and by this thread before is seen by the products after it.
__device__ __forceinline__ void warpgroup_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the committed groups are still at work.
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Columns of 64 16-bit values, 128 bytes each, 16-byte piece c of column r at c ^ (r % 8). The
// address of the first is a multiple of 1024; 16 values further are 32 bytes.
__device__ __forceinline__ uint64_t product_columns(uint32_t s_from) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightColumns = 1024 >> 4;
  return kSwizzle128 | kEightColumns << 32 | 1ull << 16 | (s_from & 0x3ffff) >> 4;
}

// d += a @ b^T for 64 rows, N columns and 16 values each.
template <typename T, int N>
struct WarpgroupProduct;

#define TW_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define TW_D32 \
  TW_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TW_D48 \
  TW_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define TW_D64 \
  TW_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TW_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TW_SUMS16(i) TW_SUMS4(i), TW_SUMS4(i + 4), TW_SUMS4(i + 8), TW_SUMS4(i + 12)
#define TW_SUMS32(i) TW_SUMS16(i), TW_SUMS16(i + 16)
#define TW_SUMS64(i) TW_SUMS32(i), TW_SUMS32(i + 32)
// A and B are the operands behind the sums.
#define TW_PRODUCT(T, TYPE, N, SUMS, A, B)                                                         \
  template <>                                                                                      \
  struct WarpgroupProduct<T, N> {                                                                  \
    static __device__ __forceinline__ void add(float (&d)[SUMS], const uint32_t (&a)[4],           \
                                               uint64_t b) {                                       \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TW_D##SUMS \
                   "}, {" A "}, " B ", 1, 1, 1, 0;"                                                \
                   : TW_SUMS##SUMS(0)                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                            \
                   : "memory");                                                                    \
    }                                                                                              \
  };
TW_PRODUCT(__nv_bfloat16, "bf16", 32, 16, "%16, %17, %18, %19", "%20")
TW_PRODUCT(__nv_bfloat16, "bf16", 64, 32, "%32, %33, %34, %35", "%36")
TW_PRODUCT(__nv_bfloat16, "bf16", 128, 64, "%64, %65, %66, %67", "%68")
TW_PRODUCT(__half, "f16", 32, 16, "%16, %17, %18, %19", "%20")
TW_PRODUCT(__half, "f16", 64, 32, "%32, %33, %34, %35", "%36")
TW_PRODUCT(__half, "f16", 128, 64, "%64, %65, %66, %67", "%68")
#undef TW_PRODUCT
#undef TW_SUMS64
#undef TW_SUMS32
#undef TW_SUMS16
#undef TW_SUMS4
#undef TW_D64
#undef TW_D48
#undef TW_D32
#undef TW_D16
#endif

}  // namespace torchweld
