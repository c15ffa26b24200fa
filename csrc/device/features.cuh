// Macros that say which groups of instructions the target architecture supports. Every file that
// uses these macros must include this file, because `#if` treats an undefined macro as 0 without a
// warning.
#pragma once

// Whether the target supports thread block clusters and TMA. sm_90 and later architectures do.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TW_HAS_CLUSTERS 1
#else
#define TW_HAS_CLUSTERS 0
#endif

// Whether the target supports wgmma and setmaxnreg. Only sm_90a does; later architectures do not.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TW_HAS_WGMMA 1
#else
#define TW_HAS_WGMMA 0
#endif
