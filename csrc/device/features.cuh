// Which instruction families the target architecture has. Every file that uses these macros must
// include this one, because `#if` treats an undefined macro as 0 without a warning.
#pragma once

// Thread block clusters and TMA: sm_90 and later.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TW_HAS_CLUSTERS 1
#else
#define TW_HAS_CLUSTERS 0
#endif

// wgmma and setmaxnreg: sm_90a only, not the architectures after it.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TW_HAS_WGMMA 1
#else
#define TW_HAS_WGMMA 0
#endif
