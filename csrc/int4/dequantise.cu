// Dequantises the repacked weight for the matmul engine. All gradients and all products with the
// engine kDense use this kernel. A thread writes one unit, which is eight values. Eight consecutive
// threads write one chunk of a row, so a warp writes whole cache lines of four rows.
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "int4/params.h"

namespace torchweld {
namespace {

constexpr int kDequantiseThreads = 256;

template <typename T>
__global__ __launch_bounds__(kDequantiseThreads) void int4_dequantise_kernel(
    const Int4DequantiseParams p) {
  const Int4Shape& shape = p.weight.shape;
  const int64_t index = int64_t{blockIdx.x} * kDequantiseThreads + threadIdx.x;
  const int64_t chunk_index = index / kInt4ChunkWords, chunks = shape.chunks();
  const int unit_in = static_cast<int>(index % kInt4ChunkUnits);
  const int row_in = static_cast<int>(index / kInt4ChunkUnits % kInt4TileRows);
  const int64_t tile = chunk_index / chunks;
  const int64_t row = tile * kInt4TileRows + row_in;
  const int64_t unit = chunk_index % chunks * kInt4ChunkUnits + unit_in;
  if (row >= shape.n || unit >= shape.units()) return;

  const int64_t group = tile * shape.groups + unit / shape.group_units();
  const float scale = to_float(
      static_cast<const T*>(p.weight.scale)[group * kInt4TileRows + int4_scale_place(row_in)]);
  const uint32_t zeros = p.weight.zero[group * 2 + row_in / kInt4Unit];
  const int zero = static_cast<int>(int4_code(zeros, row_in % kInt4Unit));
  const uint32_t word =
      int4_portable_word(p.weight.packed + chunk_index * kInt4ChunkWords, row_in, unit_in);
  constexpr int kElems = kVectorBytes / sizeof(T);
  T* g_to = static_cast<T*>(p.dense) + row * shape.k + unit * kInt4Unit;
#pragma unroll
  for (int first = 0; first < kInt4Unit; first += kElems) {
    Vec<T, kElems> values;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const int code = static_cast<int>(int4_code(word, first + i));
      values.values[i] = from_float<T>(static_cast<float>(code - zero) * scale);
    }
    store_vec(g_to + first, values);
  }
}

}  // namespace

void launch_int4_dequantise(const Int4DequantiseParams& p, cudaStream_t stream) {
  const int64_t threads = p.weight.shape.packed_words();
  if (threads == 0) return;
  const int64_t blocks = (threads + kDequantiseThreads - 1) / kDequantiseThreads;
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    launch_kernel(int4_dequantise_kernel<T>, {blocks, kDequantiseThreads}, stream, p);
  });
  check_launch("int4_linear");
}

}  // namespace torchweld
