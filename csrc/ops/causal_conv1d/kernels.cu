// Computes causal_conv1d and its gradients.
//
//   z[t] = bias + sum over j of w[j] * x[t - j],  y[t] = act(z[t]),  w[j] = weight[width - 1 - j]
//   dz[t] = dy[t] * act'(z[t]),  dx[t] = sum over j of w[j] * dz[t + j]
//   dweight[width - 1 - j] = sum over t of dz[t] * x[t - j],  dbias = sum over t of dz[t]
//
// A thread processes a chunk of positions of one sequence, for 4 channels (or one, if rows are
// not aligned), and keeps the last values of x in registers. cp.async prefetches the next positions
// into a ring of stages in shared memory; a thread reads only what it has copied itself, so the
// ring needs no barrier. In backward a thread computes z again, adds dz into the sums for the last
// positions of dx, and continues behind its chunk, so that no sum needs another thread. The sums
// over t stay in registers; a block adds up those of its chunks, and another kernel adds up the
// sums of the blocks in a fixed order.
//
// NOTE: without the ring, each warp waits for its own loads. On an H200, a forward of (4, 8192,
// 4096) in bf16 needs 1.07 of the time of a copy; with the next 8 positions in registers instead,
// the same loop needs 1.31.
#include "core/device.h"
#include "core/index.h"
#include "core/launch.h"
#include "device/activation.cuh"
#include "device/dispatch.cuh"
#include "device/mma_sync.cuh"
#include "ops/causal_conv1d/causal_conv1d.h"
#include "pointwise/column_pass.cuh"

namespace torchweld {
namespace {

constexpr int kMaxWidth = 4;
constexpr int kConvStages = 8;  // of the ring
constexpr int kMinSteps = 16;   // positions of a chunk
// dweight and dbias are sums over the blocks of a column, which must stay few.
constexpr int64_t kMaxGroups = 256;

// The warps of a block, each with a chunk of its own, and the most positions of a chunk.
struct ConvTile {
  int warps, max_steps;
};
constexpr ConvTile kForwardTile = {8, 64}, kBackwardTile = {4, 128};

// The channels of a thread. The compensated sums of fp32 need more registers.
constexpr int kForwardElems = 4;
constexpr int backward_elems(size_t elem_size) { return elem_size == 4 ? 2 : 4; }

// The chunks of a call.
struct ConvPlan {
  int64_t steps;            // positions of a chunk
  int64_t sequence_chunks;  // chunks of a sequence
  int64_t chunks;           // of all sequences
  int64_t column_blocks;
  int64_t groups;  // of the chunks of a block
};

// What a thread of a block works on.
struct ConvPlace {
  int64_t group, chunk, channel, b, begin;
  int count;  // positions

  __device__ __forceinline__ ConvPlace(const CausalConvParams& p, const ConvPlan& plan, int elems) {
    group = blockIdx.x / plan.column_blocks;
    chunk = group * blockDim.y + threadIdx.y;
    channel = (blockIdx.x % plan.column_blocks * kWarp + threadIdx.x) * elems;
    b = chunk / plan.sequence_chunks;
    begin = chunk % plan.sequence_chunks * plan.steps;
    count = static_cast<int>(min(plan.steps, p.seqlen - begin));
  }
  __device__ __forceinline__ bool exists(const CausalConvParams& p, const ConvPlan& plan) const {
    return chunk < plan.chunks && channel < p.channels;
  }
};

// The thread's channels at position 0 of its sequence.
template <typename T>
__device__ __forceinline__ const T* rows(const ConvRows<const void*>& m, const ConvPlace& at) {
  return static_cast<const T*>(m.base) + at.b * m.batch_stride + at.channel;
}

// The weights of a thread's channels, and the values of x that a position sees. A kWidth of 0
// stands for any width and for documents.
template <typename T, int kElems, int kWidth>
struct ConvWindow {
  static constexpr int kTaps = kWidth > 0 ? kWidth : kMaxWidth;
  int width;
  const int32_t* g_start;  // of the next position
  int64_t position;        // the next position
  float w[kTaps][kElems], bias[kElems];
  float x[kTaps][kElems];  // x[j] is the value at position t - j

  __device__ __forceinline__ ConvWindow(const CausalConvParams& p, const ConvPlace& at)
      : width(kWidth > 0 ? kWidth : p.width),
        g_start(p.key_start == nullptr ? nullptr : p.key_start + at.b * p.seqlen + at.begin),
        position(at.begin) {
    const T* g_weight = static_cast<const T*>(p.weight);
    const T* g_bias = static_cast<const T*>(p.bias);
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      const int64_t c = at.channel + e;
      bias[e] = g_bias != nullptr ? to_float(g_bias[c]) : 0.f;
      if constexpr (kWidth == 4) {
        const auto weights = load_vec<T, 4>(g_weight + c * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j][e] = to_float(weights.values[3 - j]);
      } else {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          w[j][e] = j < width ? to_float(g_weight[c * width + width - 1 - j]) : 0.f;
        }
      }
    }
    // The values in front of the chunk: x[j] is at begin - 1 - j, and the first advance moves it.
#pragma unroll
    for (int j = 0; j < kTaps - 1; ++j) {
      const int64_t t = at.begin - 1 - j;
      Vec<T, kElems> values = {};
      if (t >= 0) {
        values = load_vec<T, kElems>(rows<T>(p.x, at) + t * p.x.row_stride);
      } else if (p.state.base != nullptr && t > -width) {
        const T* g_state = static_cast<const T*>(p.state.base) + at.b * p.state.batch_stride +
                           (t + width - 1) * p.state.position_stride;
#pragma unroll
        for (int e = 0; e < kElems; ++e) {
          values.values[e] = g_state[(at.channel + e) * p.state.channel_stride];
        }
      }
#pragma unroll
      for (int e = 0; e < kElems; ++e) x[j][e] = to_float(values.values[e]);
    }
  }

  // The number of positions that the next position sees, itself among them.
  __device__ __forceinline__ int next_taps() {
    if constexpr (kWidth > 0) return kWidth;
    if (g_start == nullptr) return width;
    const int64_t seen = position++ - *g_start++ + 1;
    return static_cast<int>(max(min(seen, int64_t{width}), int64_t{0}));
  }
  static __device__ __forceinline__ bool sees(int taps, int j) { return kWidth > 0 || j < taps; }

  __device__ __forceinline__ void advance(const Vec<T, kElems>& next) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
#pragma unroll
      for (int j = kTaps - 1; j > 0; --j) x[j][e] = x[j - 1][e];
      x[0][e] = to_float(next.values[e]);
    }
  }

  __device__ __forceinline__ void products(float (&z)[kElems], int taps) const {
#pragma unroll
    for (int e = 0; e < kElems; ++e) z[e] = bias[e];
#pragma unroll
    for (int j = kTaps - 1; j >= 0; --j) {
      if (!sees(taps, j)) continue;
#pragma unroll
      for (int e = 0; e < kElems; ++e) z[e] = fmaf(w[j][e], x[j][e], z[e]);
    }
  }
};

// A thread's part of a ring of stages in shared memory, which holds the next rows of kInputs
// matrices. Single channels are loaded at their use.
template <typename T, int kElems, int kInputs, int kThreads>
struct ConvRing {
  using Values = Vec<T, kElems>;
  static constexpr bool kPrefetches = kElems > 1;
  static constexpr int kBytes =
      kPrefetches ? kConvStages * kInputs * kThreads * int(sizeof(Values)) : 0;
  Values* s_first;           // the first slot of the thread
  const T* g_next[kInputs];  // the next row to fetch
  int64_t row_stride[kInputs];
  int left;  // rows to fetch

  __device__ __forceinline__ Values* slot(int stage, int input) const {
    return s_first + (stage * kInputs + input) * kThreads;
  }
  __device__ __forceinline__ void fetch(int stage) {
    if (left-- > 0) {
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        const uint32_t s_to = shared_address(slot(stage, i));
        if constexpr (sizeof(Values) == 16) {
          copy_async_16(s_to, g_next[i], 16);
        } else {
          copy_async_8(s_to, g_next[i], 8);
        }
        g_next[i] += row_stride[i];
      }
    }
    copy_async_commit();
  }
  __device__ __forceinline__ void fill() {
    if constexpr (kPrefetches) {
#pragma unroll
      for (int stage = 0; stage < kConvStages - 1; ++stage) fetch(stage);
    }
  }
  // Returns the next row, or any values behind the last one.
  __device__ __forceinline__ void read(Values (&to)[kInputs], int stage) {
    if constexpr (kPrefetches) {
      copy_async_wait<kConvStages - 2>();
#pragma unroll
      for (int i = 0; i < kInputs; ++i) to[i] = *slot(stage, i);
      fetch((stage + kConvStages - 1) % kConvStages);
    } else {
      if (left-- <= 0) return;
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        to[i] = load_vec<T, kElems>(g_next[i]);
        g_next[i] += row_stride[i];
      }
    }
  }
};

template <typename T, int kElems>
using ForwardRing = ConvRing<T, kElems, 1, kForwardTile.warps * kWarp>;
template <typename T, int kElems>
using BackwardRing = ConvRing<T, kElems, 2, kBackwardTile.warps * kWarp>;

template <typename T, int kElems, int kWidth>
__global__ void __launch_bounds__(kForwardTile.warps* kWarp, kWidth > 0 ? 3 : 2)
    causal_conv_kernel(const __grid_constant__ CausalConvParams p, T* __restrict__ g_y,
                       const ConvPlan plan) {
  using Ring = ForwardRing<T, kElems>;
  extern __shared__ uint4 s_ring[];
  const ConvPlace at(p, plan, kElems);
  if (!at.exists(p, plan)) return;
  Ring ring = {reinterpret_cast<typename Ring::Values*>(s_ring) + threadIdx.y * kWarp + threadIdx.x,
               {rows<T>(p.x, at) + at.begin * p.x.row_stride},
               {p.x.row_stride},
               at.count};
  ring.fill();
  ConvWindow<T, kElems, kWidth> window(p, at);
  g_y += (at.b * p.seqlen + at.begin) * p.channels + at.channel;
  for (int first = 0; first < at.count; first += kConvStages) {
#pragma unroll
    for (int i = 0; i < kConvStages; ++i) {
      if (first + i >= at.count) break;
      Vec<T, kElems> row[1];
      ring.read(row, i);
      window.advance(row[0]);
      float z[kElems];
      window.products(z, window.next_taps());
      Vec<T, kElems> y;
#pragma unroll
      for (int e = 0; e < kElems; ++e) {
        y.values[e] = from_float<T>(p.silu ? silu<sizeof(T) == 4>(z[e]) : z[e]);
      }
      store_vec(g_y, y);
      g_y += p.channels;
    }
  }
}

template <typename T, int kElems, int kWidth>
__global__ void __launch_bounds__(kBackwardTile.warps* kWarp, kWidth > 0 ? 4 : 3)
    causal_conv_backward_kernel(const __grid_constant__ CausalConvBackwardParams p,
                                const ConvPlan plan) {
  using Window = ConvWindow<T, kElems, kWidth>;
  using Ring = BackwardRing<T, kElems>;
  constexpr int kTaps = Window::kTaps, kSums = kTaps + 1, kWarps = kBackwardTile.warps;
  extern __shared__ uint4 s_ring[];
  const CausalConvParams& in = p.in;
  const ConvPlace at(in, plan, kElems);
  ColumnSumOf<T> sums[kSums][kElems] = {};  // of dweight, the last of dbias
  if (at.exists(in, plan)) {
    const int existing = static_cast<int>(min(in.seqlen - at.begin, int64_t{at.count} + kTaps - 1));
    Ring ring = {
        reinterpret_cast<typename Ring::Values*>(s_ring) + threadIdx.y * kWarp + threadIdx.x,
        {rows<T>(p.dy, at) + at.begin * p.dy.row_stride,
         rows<T>(in.x, at) + at.begin * in.x.row_stride},
        {p.dy.row_stride, in.x.row_stride},
        existing};
    ring.fill();
    Window window(in, at);
    // The results for position t - kTaps + 1.
    T* g_dx = static_cast<T*>(p.dx) + (at.b * in.seqlen + at.begin - (kTaps - 1)) * in.channels +
              at.channel;
    float dx[kTaps][kElems] = {};  // dx[j] is the sum for position t - j
    for (int first = 0; first < at.count + kTaps - 1; first += kConvStages) {
#pragma unroll
      for (int i = 0; i < kConvStages; ++i) {
        const int t = first + i, done = t - (kTaps - 1);
        if (done >= at.count) break;
        const bool counts = t < at.count;
        Vec<T, kElems> row[2];
        ring.read(row, i);
#pragma unroll
        for (int e = 0; e < kElems; ++e) {
#pragma unroll
          for (int j = kTaps - 1; j > 0; --j) dx[j][e] = dx[j - 1][e];
          dx[0][e] = 0.f;
        }
        if (t < existing) {
          window.advance(row[1]);
          const int taps = window.next_taps();
          float dz[kElems];
#pragma unroll
          for (int e = 0; e < kElems; ++e) dz[e] = to_float(row[0].values[e]);
          if (in.silu) {
            float z[kElems];
            window.products(z, taps);
#pragma unroll
            for (int e = 0; e < kElems; ++e) dz[e] *= silu_and_slope<sizeof(T) == 4>(z[e]).slope;
          }
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (!window.sees(taps, j)) continue;
#pragma unroll
            for (int e = 0; e < kElems; ++e) dx[j][e] = fmaf(window.w[j][e], dz[e], dx[j][e]);
            if (!counts) continue;
#pragma unroll
            for (int e = 0; e < kElems; ++e) sums[j][e] += dz[e] * window.x[j][e];
          }
#pragma unroll
          for (int e = 0; e < kElems; ++e) {
            if (counts) sums[kTaps][e] += dz[e];
          }
        }
        if (done >= 0) {
          Vec<T, kElems> out;
#pragma unroll
          for (int e = 0; e < kElems; ++e) out.values[e] = from_float<T>(dx[kTaps - 1][e]);
          if (p.dx != nullptr) store_vec(g_dx, out);
        } else if (p.dstate.base != nullptr && at.begin == 0 && done > -in.width) {
          T* g_dstate = static_cast<T*>(p.dstate.base) + at.b * p.dstate.batch_stride +
                        (done + in.width - 1) * p.dstate.position_stride;
#pragma unroll
          for (int e = 0; e < kElems; ++e) {
            g_dstate[(at.channel + e) * p.dstate.channel_stride] = from_float<T>(dx[kTaps - 1][e]);
          }
        }
        g_dx += in.channels;
      }
    }
  }
  if (p.partials == nullptr) return;

  __shared__ float s_sums[kWarps][kSums][kWarp * kElems];
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      s_sums[threadIdx.y][s][threadIdx.x * kElems + e] = sums[s][e].value();
    }
  }
  __syncthreads();
  // First (groups, channels, width) of dweight, then (groups, channels) of dbias.
  float* g_weights = p.partials + at.group * in.channels * in.width;
  float* g_biases = p.partials + plan.groups * in.channels * in.width + at.group * in.channels;
  const int64_t first_channel = at.channel - threadIdx.x * kElems;
  for (int i = threadIdx.y * kWarp + threadIdx.x; i < kSums * kWarp * kElems; i += kWarps * kWarp) {
    const int s = i / (kWarp * kElems), e = i % (kWarp * kElems);
    const int64_t c = first_channel + e;
    if (c >= in.channels || (s < kTaps && s >= in.width)) continue;
    float sum = 0.f;
#pragma unroll
    for (int row = 0; row < kWarps; ++row) sum += s_sums[row][s][e];
    if (s == kTaps) {
      g_biases[c] = sum;
    } else {
      g_weights[c * in.width + in.width - 1 - s] = sum;
    }
  }
}

// Splits the sequences so that every SM has enough threads.
ConvPlan plan_conv(const CausalConvParams& p, const ConvTile& tile, int elems, int64_t max_steps) {
  constexpr int64_t kThreadsPerSm = 1024;
  ConvPlan plan;
  plan.column_blocks = divide_up(p.channels, kWarp * elems);
  const int64_t positions = p.batch * p.seqlen;
  const int64_t filling =
      positions * plan.column_blocks * kWarp / (kThreadsPerSm * device_facts().sms);
  plan.steps = std::clamp<int64_t>(filling, kMinSteps, max_steps) / 8 * 8;
  plan.sequence_chunks = divide_up(p.seqlen, plan.steps);
  plan.chunks = p.batch * plan.sequence_chunks;
  plan.groups = divide_up(plan.chunks, tile.warps);
  return plan;
}

ConvPlan plan_conv_backward(const CausalConvParams& p, int elems) {
  const int64_t few = divide_up(p.batch * p.seqlen, kMaxGroups * kBackwardTile.warps);
  return plan_conv(p, kBackwardTile, elems,
                   std::max<int64_t>(kBackwardTile.max_steps, divide_up(few, int64_t{8}) * 8));
}

// Calls body(elems, width) with the channels of a thread, kElems or 1, and with the width if the
// kernels for this width alone can run.
template <typename T, int kElems, typename Body>
void dispatch_conv(const CausalConvParams& p, std::initializer_list<ConvRows<const void*>> matrices,
                   const Body& body) {
  constexpr int64_t kBytes = kElems * sizeof(T);
  bool vector = p.channels % kElems == 0 && rows_aligned(p.weight);
  for (const auto& m : matrices) {
    vector = vector && reinterpret_cast<uintptr_t>(m.base) % kBytes == 0 &&
             m.batch_stride * sizeof(T) % kBytes == 0 && m.row_stride * sizeof(T) % kBytes == 0;
  }
  const std::integral_constant<int, kElems> elems;
  const std::integral_constant<int, 0> any;
  if (!vector) return body(std::integral_constant<int, 1>(), any);
  if (p.key_start != nullptr) return body(elems, any);
  dispatch_index<kMaxWidth - 1>(
      p.width - 2, [&](auto i) { body(elems, std::integral_constant<int, i.value + 2>()); });
}

Grid grid_of(const ConvPlan& plan, const ConvTile& tile, int shared_bytes) {
  return {plan.groups * plan.column_blocks, dim3(kWarp, tile.warps), shared_bytes};
}

}  // namespace

int64_t causal_conv_partials(const CausalConvParams& p) {
  // Threads of fewer channels have other chunks.
  const int64_t groups =
      std::max(plan_conv_backward(p, 1).groups,
               plan_conv_backward(p, backward_elems(p.dtype == DType::kFloat32 ? 4 : 2)).groups);
  return groups * p.channels * (p.width + 1);
}

void launch_causal_conv(const CausalConvParams& p, void* y, cudaStream_t stream) {
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_conv<T, kForwardElems>(p, {p.x}, [&](auto elems, auto width) {
      const ConvPlan plan = plan_conv(p, kForwardTile, elems, kForwardTile.max_steps);
      launch_kernel(causal_conv_kernel<T, elems.value, width.value>,
                    grid_of(plan, kForwardTile, ForwardRing<T, elems.value>::kBytes), stream, p,
                    static_cast<T*>(y), plan);
    });
  });
  check_launch("causal_conv1d");
}

void launch_causal_conv_backward(const CausalConvBackwardParams& p, cudaStream_t stream) {
  const CausalConvParams& in = p.in;
  const auto add = [&](auto element, const float* g_partials, int64_t groups, int64_t n, void* to) {
    if (to == nullptr) return;
    launch_add_partials<decltype(element)>(g_partials, groups, 1, n, {{to, nullptr}, 1}, stream);
  };
  dispatch_dtype(in.dtype, [&](auto element) {
    using T = decltype(element);
    dispatch_conv<T, backward_elems(sizeof(T))>(in, {in.x, p.dy}, [&](auto elems, auto width) {
      const ConvPlan plan = plan_conv_backward(in, elems);
      launch_kernel(causal_conv_backward_kernel<T, elems.value, width.value>,
                    grid_of(plan, kBackwardTile, BackwardRing<T, elems.value>::kBytes), stream, p,
                    plan);
      const int64_t taps = in.channels * in.width;
      add(element, p.partials, plan.groups, taps, p.dweight);
      add(element, p.partials + plan.groups * taps, plan.groups, in.channels, p.dbias);
    });
  });
  check_launch("causal_conv1d_backward");
}

}  // namespace torchweld
