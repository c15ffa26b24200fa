// Macros for the groups of instructions that the target architecture supports. Every file that uses
// these macros must include this file, because `#if` treats an undefined macro as 0 without a
// warning.
#pragma once

// Whether thread block clusters and TMA are supported: sm_90 and later.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TW_HAS_CLUSTERS 1
#else
#define TW_HAS_CLUSTERS 0
#endif

// Whether wgmma and setmaxnreg are supported: only sm_90a, not later architectures.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TW_HAS_WGMMA 1
#else
#define TW_HAS_WGMMA 0
#endif
