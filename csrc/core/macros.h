// Function specifiers for code that runs on the host and on the device.
#pragma once

#ifdef __CUDACC__
#define TW_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TW_HOST_DEVICE inline
#endif
