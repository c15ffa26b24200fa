// Computes rotary position embedding on CUDA. One launch rotates both q and k.
//
// A thread processes one position and kHeads heads. In each head, it has two 16-byte chunks that
// together hold whole pairs of values. The thread reads cos and sin for its chunks only once. It
// loads the chunks of all its heads before it rotates any chunk. The threads of a position are
// consecutive. Therefore the first of these threads loads the position's row of cos and sin from
// L2, and the other threads find this row in L1. Additional threads copy the values of a head
// behind its first rotary_dim values.
#include "core/index.h"
#include "core/launch.h"
#include "device/access.cuh"
#include "device/dispatch.cuh"
#include "ops/rotary/rotary.h"

namespace torchweld {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 4;

// The assignment of threads to the values of a position. A lane is a thread's index within a head.
struct RotaryThreads {
  int rotating_lanes;  // the number of threads per head that rotate values
  // The number of all threads per head: those that rotate values and those that copy values.
  int lanes;
  // The distance between the two chunks of a thread that copies values, in elements.
  int copied_step;
  int64_t groups[2];  // number of groups of kHeads heads in q and in k

  RotaryThreads(const RotaryParams& p, int elems) {
    rotating_lanes = p.rotary_dim / (2 * elems);
    const int copied = static_cast<int>(divide_up((p.head_dim - p.rotary_dim) / elems, 2));
    lanes = rotating_lanes + copied;
    copied_step = copied * elems;
    for (int i = 0; i < 2; ++i) groups[i] = divide_up(p.tensors[i].nheads, kHeads);
  }

  TW_HOST_DEVICE int64_t per_position() const { return (groups[0] + groups[1]) * lanes; }
};

// Loads kElems values of a table as fp32.
template <int kElems, typename Table>
__device__ __forceinline__ void load_table(float (&r_to)[kElems], const Table* g_from) {
  if constexpr (kElems == 1) {
    r_to[0] = to_float(*g_from);
  } else {
    constexpr int kStep = kVectorBytes / sizeof(Table);
#pragma unroll
    for (int i = 0; i < kElems; i += kStep) to_floats<Table>(r_to + i, load_words(g_from + i));
  }
}

// Computes x * cos + rotate(x) * sin for a thread's two chunks.
template <int kElems>
struct Rotation {
  float cos[2][kElems], sin[2][kElems];
  // True if each chunk holds both values of its pairs. Otherwise, each pair has one value in each
  // chunk.
  bool pairs_in_chunk;

  // Changes the rotation to its transpose. To do so, exchanges the two sines of each pair and
  // negates both sines.
  __device__ __forceinline__ void transpose() {
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      if (pairs_in_chunk) {
        if (i % 2 == 0) {
          exchange(sin[0][i], sin[0][i + (kElems > 1)]);
          exchange(sin[1][i], sin[1][i + (kElems > 1)]);
        }
      } else {
        exchange(sin[0][i], sin[1][i]);
      }
    }
  }

  __device__ __forceinline__ void operator()(float (&r_x)[2][kElems]) const {
    if (pairs_in_chunk) {
#pragma unroll
      for (int i = 0; i + 1 < kElems; i += 2) {
        rotate(r_x[0][i], r_x[0][i + 1], cos[0][i], cos[0][i + 1], sin[0][i], sin[0][i + 1]);
        rotate(r_x[1][i], r_x[1][i + 1], cos[1][i], cos[1][i + 1], sin[1][i], sin[1][i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        rotate(r_x[0][i], r_x[1][i], cos[0][i], cos[1][i], sin[0][i], sin[1][i]);
      }
    }
  }

 private:
  static __device__ __forceinline__ void exchange(float& a, float& b) {
    const float old = a;
    a = -b;
    b = -old;
  }
  static __device__ __forceinline__ void rotate(float& a, float& b, float cos_a, float cos_b,
                                                float sin_a, float sin_b) {
    const float old = a;
    a = old * cos_a - b * sin_a;
    b = b * cos_b + old * sin_b;
  }
};

template <typename T, typename Table, int kElems>
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(const __grid_constant__ RotaryParams p, const RotaryThreads threads,
                  int64_t first_block) {
  const int64_t index = (first_block + blockIdx.x) * kThreads + threadIdx.x;
  const int64_t position = index / threads.per_position();
  if (position >= p.batch * p.seqlen) return;
  const auto rest = static_cast<uint32_t>(index - position * threads.per_position());
  uint32_t group = rest / threads.lanes;
  const auto lane = static_cast<int>(rest - group * threads.lanes);
  const int64_t b = position / p.seqlen, s = position - b * p.seqlen;

  const bool is_key = group >= threads.groups[0];
  if (is_key) group -= static_cast<uint32_t>(threads.groups[0]);
  const RotaryTensor& tensor = p.tensors[is_key];
  const bool rotates = lane < threads.rotating_lanes;
  const bool pairs_in_chunk = p.interleaved && kElems > 1;
  int first, second;
  if (!rotates) {
    first = p.rotary_dim + (lane - threads.rotating_lanes) * kElems;
    second = first + threads.copied_step;
  } else if (p.interleaved && kElems == 1) {
    first = 2 * lane;
    second = first + 1;
  } else {
    first = lane * kElems;
    second = first + p.rotary_dim / 2;
  }
  const bool has_second = second < p.head_dim;

  const auto head = static_cast<int64_t>(group) * kHeads;
  const auto nheads = static_cast<int>(min(tensor.nheads - head, static_cast<int64_t>(kHeads)));
  const T* g_from = static_cast<const T*>(tensor.from) + b * tensor.from_strides[0] +
                    head * tensor.from_strides[1] + s * tensor.from_strides[2];
  T* g_to = static_cast<T*>(tensor.to) + b * tensor.to_strides[0] + head * tensor.to_strides[1] +
            s * tensor.to_strides[2];
  AccessOf<kElems> r_access[kHeads][2];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    r_access[i][0] = load_access_if<T, kElems>(g_from + first, i < nheads);
    r_access[i][1] = load_access_if<T, kElems>(g_from + second, i < nheads && has_second);
    g_from += tensor.from_strides[1];
  }
  if (rotates) {
    Rotation<kElems> rotation;
    rotation.pairs_in_chunk = pairs_in_chunk;
    const Table* g_cos =
        static_cast<const Table*>(p.cos.data) + b * p.cos.strides[0] + s * p.cos.strides[1];
    const Table* g_sin =
        static_cast<const Table*>(p.sin.data) + b * p.sin.strides[0] + s * p.sin.strides[1];
    load_table(rotation.cos[0], g_cos + first);
    load_table(rotation.cos[1], g_cos + second);
    load_table(rotation.sin[0], g_sin + first);
    load_table(rotation.sin[1], g_sin + second);
    if (p.transposed) rotation.transpose();
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      float r_x[2][kElems];
      access_floats<T>(r_x[0], r_access[i][0]);
      access_floats<T>(r_x[1], r_access[i][1]);
      rotation(r_x);
      store_access_if(g_to + first, r_x[0], i < nheads);
      store_access_if(g_to + second, r_x[1], i < nheads);
      g_to += tensor.to_strides[1];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      store_bits_if(g_to + first, r_access[i][0], i < nheads);
      store_bits_if(g_to + second, r_access[i][1], i < nheads && has_second);
      g_to += tensor.to_strides[1];
    }
  }
}

// Returns true if all chunks of `elems` values start on 16-byte boundaries and the two chunks of a
// thread hold whole pairs.
template <typename T, typename Table>
bool chunks_aligned(const RotaryParams& p, int elems) {
  bool aligned = p.rotary_dim % (2 * elems) == 0 && p.head_dim % elems == 0;
  for (const RotaryTensor& t : p.tensors) {
    for (int d = 0; t.nheads > 0 && d < 3; ++d) {
      aligned = aligned && rows_aligned(t.from, t.from_strides[d] * sizeof(T)) &&
                rows_aligned(t.to, t.to_strides[d] * sizeof(T));
    }
  }
  for (const RotaryTable& table : {p.cos, p.sin}) {
    for (const int64_t stride : table.strides) {
      aligned = aligned && rows_aligned(table.data, stride * sizeof(Table));
    }
  }
  return aligned;
}

template <typename T, typename Table, int kElems>
void launch_chunks(const RotaryParams& p, cudaStream_t stream) {
  const RotaryThreads threads(p, kElems);
  const int64_t blocks = divide_up(p.batch * p.seqlen * threads.per_position(), kThreads);
  for_each_grid_of(blocks, [&](int64_t first, int64_t count) {
    launch_kernel(rotary_kernel<T, Table, kElems>, Grid(count, kThreads), stream, p, threads,
                  first);
  });
  check_launch(p.transposed ? "rotary_backward" : "rotary");
}

template <typename T, typename Table>
void launch_tables(const RotaryParams& p, cudaStream_t stream) {
  constexpr int kElems = kVectorBytes / sizeof(T);
  chunks_aligned<T, Table>(p, kElems) ? launch_chunks<T, Table, kElems>(p, stream)
                                      : launch_chunks<T, Table, 1>(p, stream);
}

}  // namespace

void launch_rotary(const RotaryParams& params, cudaStream_t stream) {
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    params.table_dtype == DType::kFloat32 ? launch_tables<T, float>(params, stream)
                                          : launch_tables<T, T>(params, stream);
  });
}

}  // namespace torchweld
