// Which instruction families the architecture being compiled for has. Each file that asks includes
// this one: an undefined macro in `#if` counts as 0 without a warning.
#pragma once

// Thread block clusters and TMA: sm_90 and later.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TW_HAS_CLUSTERS 1
#else
#define TW_HAS_CLUSTERS 0
#endif

// wgmma and setmaxnreg: sm_90a alone, no later chip.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TW_HAS_WGMMA 1
#else
#define TW_HAS_WGMMA 0
#endif
