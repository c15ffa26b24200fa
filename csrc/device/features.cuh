// The instruction families of the architecture being compiled for. Every file that uses the macros
// must include this one, because an undefined macro in `#if` silently counts as 0.
#pragma once

// Thread block clusters and TMA: sm_90 and later.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TW_HAS_CLUSTERS 1
#else
#define TW_HAS_CLUSTERS 0
#endif

// wgmma and setmaxnreg: only sm_90a, no later chip.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TW_HAS_WGMMA 1
#else
#define TW_HAS_WGMMA 0
#endif
