// Computes rotary position embedding on the CPU. Each task rotates all heads of some positions. For
// each position, it loads and converts the rows of cos and sin only once.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/index.h"
#include "core/parallel.h"
#include "core/simd_cpu.h"

namespace torchweld::rotary_op {

// A tensor to rotate, and the memory of its result. from_strides and to_strides are the strides of
// the batch, head and position dims, in elements. The stride of the last dimension is 1.
template <typename T>
struct RotaryOperand {
  const T* from = nullptr;
  T* to = nullptr;
  int64_t nheads = 0;
  int64_t from_strides[3] = {};
  int64_t to_strides[3] = {};
};

template <typename Table>
struct RotaryTableRows {
  const Table* data = nullptr;
  int64_t strides[2] = {};

  const Table* row(int64_t b, int64_t s) const { return data + b * strides[0] + s * strides[1]; }
};

template <typename T, typename Table>
struct RotaryOperands {
  RotaryOperand<T> tensors[2];
  RotaryTableRows<Table> cos, sin;
  int64_t batch, seqlen, head_dim, rotary_dim;
  bool interleaved, transposed;
};

// Computes to = from * cos + rotate(from) * sin for one head. A is the dtype of the computation.
template <typename T, typename A>
void rotate_head_cpu(T* __restrict__ to, const T* __restrict__ from, const A* __restrict__ cos,
                     const A* __restrict__ sin, int64_t rotary_dim, bool interleaved) {
  const int64_t half = rotary_dim / 2;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const A a = static_cast<A>(from[2 * i]), b = static_cast<A>(from[2 * i + 1]);
      to[2 * i] = round_to<T>(a * cos[2 * i] - b * sin[2 * i]);
      to[2 * i + 1] = round_to<T>(b * cos[2 * i + 1] + a * sin[2 * i + 1]);
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const A a = static_cast<A>(from[i]), b = static_cast<A>(from[half + i]);
    to[i] = round_to<T>(a * cos[i] - b * sin[i]);
    to[half + i] = round_to<T>(b * cos[half + i] + a * sin[half + i]);
  }
}

// Loads the cos and sin of one position. For the transposed rotation, the function exchanges the
// two sines of each pair and negates both sines.
template <typename A, typename Table>
void load_tables_cpu(A* __restrict__ cos, A* __restrict__ sin, const Table* from_cos,
                     const Table* from_sin, int64_t rotary_dim, bool interleaved, bool transposed) {
  for (int64_t i = 0; i < rotary_dim; ++i) cos[i] = static_cast<A>(from_cos[i]);
  if (!transposed) {
    for (int64_t i = 0; i < rotary_dim; ++i) sin[i] = static_cast<A>(from_sin[i]);
    return;
  }
  const int64_t half = rotary_dim / 2, step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    sin[step * i] = -static_cast<A>(from_sin[step * i + other]);
    sin[step * i + other] = -static_cast<A>(from_sin[step * i]);
  }
}

template <typename T, typename Table>
void rotate_positions_cpu(const RotaryOperands<T, Table>& o) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr int64_t kElemsPerTask = 1 << 14;
  const int64_t per_position = (o.tensors[0].nheads + o.tensors[1].nheads) * o.head_dim;
  const int64_t positions = o.batch * o.seqlen;
  const int64_t block = std::max<int64_t>(kElemsPerTask / per_position, 1);
  parallel_tasks(divide_up(positions, block), [&](int64_t task) {
    std::vector<A> tables(2 * o.rotary_dim);
    A *const cos = tables.data(), *const sin = cos + o.rotary_dim;
    with_vectors([&] {
      for (int64_t i = task * block; i < std::min(positions, (task + 1) * block); ++i) {
        const int64_t b = i / o.seqlen, s = i % o.seqlen;
        load_tables_cpu(cos, sin, o.cos.row(b, s), o.sin.row(b, s), o.rotary_dim, o.interleaved,
                        o.transposed);
        for (const RotaryOperand<T>& t : o.tensors) {
          const T* from = t.from + b * t.from_strides[0] + s * t.from_strides[2];
          T* to = t.to + b * t.to_strides[0] + s * t.to_strides[2];
          for (int64_t h = 0; h < t.nheads; ++h) {
            rotate_head_cpu(to, from, cos, sin, o.rotary_dim, o.interleaved);
            std::copy(from + o.rotary_dim, from + o.head_dim, to + o.rotary_dim);
            from += t.from_strides[1];
            to += t.to_strides[1];
          }
        }
      }
    });
  });
}

}  // namespace torchweld::rotary_op
