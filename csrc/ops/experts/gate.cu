// The gates of a layer of experts. A warp processes one row in accesses of 16 bytes.
#include "device/activation.cuh"
#include "ops/experts/rows.cuh"

namespace torchweld {
namespace {

// f(x) and its derivative.
template <ExpertActivation kActivation, bool kExact>
__device__ __forceinline__ ValueAndSlope activate_expert(float x, float slope) {
  switch (kActivation) {
    case ExpertActivation::kSilu: {
      const Sigmoids<kExact> s(slope * x);
      return {x * s.of_x, s.of_x * (1.f + slope * x * s.complement)};
    }
    case ExpertActivation::kGelu:
      return gelu_and_slope<kExact>(x);
    case ExpertActivation::kGeluTanh:
      return gelu_tanh_and_slope<kExact>(x);
    case ExpertActivation::kRelu:
      return {relu(x), x <= 0.f ? 0.f : 1.f};
    default:
      return {relu(x) * relu(x), 2.f * relu(x)};
  }
}

// The halves of z in columns [c, c + kElems) of act.
template <typename T, int kElems>
struct GateInputs {
  float g[kElems], u[kElems];

  __device__ __forceinline__ GateInputs(const T* g_z, int64_t c, int64_t n,
                                        const ExpertGate& gate) {
    if (gate.gated && gate.interleaved) {
      const auto low = load_vec<T, kElems>(g_z + 2 * c),
                 high = load_vec<T, kElems>(g_z + 2 * c + kElems);
#pragma unroll
      for (int i = 0; i < kElems; ++i) {
        const int at = 2 * i;
        g[i] = to_float(at < kElems ? low.values[at % kElems] : high.values[at % kElems]);
        u[i] = to_float(at + 1 < kElems ? low.values[(at + 1) % kElems]
                                        : high.values[(at + 1) % kElems]);
      }
      return;
    }
    const auto left = load_vec<T, kElems>(g_z + c);
#pragma unroll
    for (int i = 0; i < kElems; ++i) g[i] = to_float(left.values[i]);
    if (!gate.gated) return;
    const auto right = load_vec<T, kElems>(g_z + n + c);
#pragma unroll
    for (int i = 0; i < kElems; ++i) u[i] = to_float(right.values[i]);
  }

  // Stores g and u at the place from which they were loaded.
  __device__ __forceinline__ void store(T* g_z, int64_t c, int64_t n,
                                        const ExpertGate& gate) const {
    Vec<T, kElems> left, right;
    const bool pairs = gate.gated && gate.interleaved;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const float* from = i % 2 ? u : g;
      left.values[i] = from_float<T>(pairs ? from[i / 2] : g[i]);
      right.values[i] =
          from_float<T>(pairs ? (kElems == 1 ? u[0] : from[(kElems + i) / 2 % kElems]) : u[i]);
    }
    store_vec(g_z + (pairs ? 2 * c : c), left);
    if (gate.gated) store_vec(g_z + (pairs ? 2 * c + kElems : n + c), right);
  }
};

// The value of act, and its derivatives with respect to g and u.
template <ExpertActivation kActivation, bool kExact>
struct GateResult {
  float act, of_g, of_u;
  __device__ __forceinline__ GateResult(float g, float u, const ExpertGate& gate) {
    const auto limit = static_cast<float>(gate.limit), shift = static_cast<float>(gate.shift);
    const bool g_free = !(g > limit), u_free = !(fabsf(u) > limit);
    const ValueAndSlope f =
        activate_expert<kActivation, kExact>(g_free ? g : limit, static_cast<float>(gate.slope));
    const float factor = gate.gated ? (u_free ? u : copysignf(limit, u)) + shift : 1.f;
    act = f.value * factor;
    of_g = g_free ? f.slope * factor : 0.f;
    of_u = u_free ? f.value : 0.f;
  }
};

template <typename T, int kElems, ExpertActivation kActivation>
__global__ void __launch_bounds__(kThreads)
    gate_kernel(const RouteRows act, const RouteRows z, const ExpertGate gate,
                const __grid_constant__ ExpertRoutes r) {
  constexpr bool kExact = sizeof(T) == 4;
  const int64_t row = warp_index();
  griddep_launch_dependents();
  griddep_wait();
  if (row >= row_count(r)) return;
  const T* g_z = static_cast<const T*>(z.data) + row * z.stride;
  T* g_act = static_cast<T*>(act.data) + row * act.stride;
  for (int64_t c = threadIdx.x % 32 * kElems; c < act.n; c += 32 * kElems) {
    const GateInputs<T, kElems> in(g_z, c, act.n, gate);
    Vec<T, kElems> to;
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const float u = gate.gated ? in.u[i] : 0.f;
      to.values[i] = from_float<T>(GateResult<kActivation, kExact>(in.g[i], u, gate).act);
    }
    store_vec(g_act + c, to);
  }
  clear_padding(g_act, act);
}

template <typename T, int kElems, ExpertActivation kActivation>
__global__ void __launch_bounds__(kThreads)
    gate_backward_kernel(const __grid_constant__ ExpertGateBackward p,
                         const __grid_constant__ ExpertRoutes r) {
  constexpr bool kExact = sizeof(T) == 4;
  const int64_t row = warp_index(), n = p.z.n / (p.gate.gated ? 2 : 1);
  const int lane = threadIdx.x % 32;
  griddep_launch_dependents();
  griddep_wait();
  if (row >= row_count(r)) return;
  const int64_t route = r.order[row];
  const float weight = weight_of(p.weight, p.weight_fp32, route, T());
  const T* g_z = static_cast<const T*>(p.z.data) + row * p.z.stride;
  const T* g_dact = static_cast<const T*>(p.dact.data) + row * p.dact.stride;
  T* g_dz = static_cast<T*>(p.dz.data) + row * p.dz.stride;
  T* g_act = static_cast<T*>(p.act.data) + row * p.act.stride;
  float dweight = 0.f;
  for (int64_t c = lane * kElems; c < n; c += 32 * kElems) {
    GateInputs<T, kElems> in(g_z, c, n, p.gate);
    Vec<T, kElems> dact = {}, to;
    if (p.dact.data != nullptr) dact = load_vec<T, kElems>(g_dact + c);
#pragma unroll
    for (int i = 0; i < kElems; ++i) {
      const float u = p.gate.gated ? in.u[i] : 0.f, d = to_float(dact.values[i]);
      const GateResult<kActivation, kExact> result(in.g[i], u, p.gate);
      dweight = fmaf(d, result.act, dweight);
      to.values[i] = from_float<T>(weight * result.act);
      in.g[i] = weight * d * result.of_g;
      in.u[i] = weight * d * result.of_u;
    }
    if (p.dz.data != nullptr) in.store(g_dz, c, n, p.gate);
    if (p.act.data != nullptr) store_vec(g_act + c, to);
  }
  if (p.dz.data != nullptr) clear_padding(g_dz, p.dz);
  if (p.act.data != nullptr) clear_padding(g_act, p.act);
  if (p.dweight == nullptr) return;
  if (p.down_bias != nullptr) {
    const T* g_dy = static_cast<const T*>(p.dy.data) + row * p.dy.stride;
    const T* g_bias = static_cast<const T*>(p.down_bias) + expert_of(r, route) * p.dy.n;
    for (int64_t c = lane; c < p.dy.n; c += 32) {
      dweight = fmaf(to_float(g_dy[c]), to_float(g_bias[c]), dweight);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) dweight += __shfl_xor_sync(~0u, dweight, step);
  if (lane == 0) store_weight<T>(p.dweight, p.weight_fp32, route, dweight);
}

// A thread adds up the parts of one row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_weight_gradients_kernel(void* g_dweight, bool weight_fp32, const float* g_parts, int count,
                                const __grid_constant__ ExpertRoutes r) {
  griddep_launch_dependents();
  griddep_wait();
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= row_count(r)) return;
  float sum = 0.f;
  for (int part = 0; part < count; ++part) sum += g_parts[part * (r.tokens * r.k) + row];
  store_weight<T>(g_dweight, weight_fp32, r.order[row], sum);
}

template <typename Body>
void with_activation(ExpertActivation activation, const Body& body) {
  dispatch_index<5>(static_cast<int>(activation), [&](auto index) {
    body(std::integral_constant<ExpertActivation, static_cast<ExpertActivation>(index.value)>());
  });
}

}  // namespace

void launch_expert_gate(const RouteRows& act, const RouteRows& z, const ExpertGate& gate,
                        const ExpertRoutes& r, DType dtype, cudaStream_t stream) {
  dispatch_access(dtype, act.n, {accessed(act), accessed(z)}, [&](auto element, auto elems) {
    using T = decltype(element);
    with_activation(gate.activation, [&](auto activation) {
      launch_kernel(gate_kernel<T, elems.value, activation.value>,
                    overlapping(blocks_of(r.count()), kThreads), stream, act, z, gate, r);
    });
  });
  check_launch("experts");
}

void launch_expert_gate_backward(const ExpertGateBackward& p, const ExpertRoutes& r, DType dtype,
                                 cudaStream_t stream) {
  const int64_t n = p.z.n / (p.gate.gated ? 2 : 1);
  dispatch_access(dtype, n, {accessed(p.z), accessed(p.dact), accessed(p.dz), accessed(p.act)},
                  [&](auto element, auto elems) {
                    using T = decltype(element);
                    with_activation(p.gate.activation, [&](auto activation) {
                      launch_kernel(gate_backward_kernel<T, elems.value, activation.value>,
                                    overlapping(blocks_of(r.count()), kThreads), stream, p, r);
                    });
                  });
  check_launch("experts");
}

void launch_sum_weight_gradients(void* dweight, bool weight_fp32, const float* parts, int count,
                                 const ExpertRoutes& r, DType dtype, cudaStream_t stream) {
  dispatch_dtype(dtype, [&](auto element) {
    launch_kernel(sum_weight_gradients_kernel<decltype(element)>,
                  overlapping(divide_up(r.count(), kThreads), kThreads), stream, dweight,
                  weight_fp32, parts, count, r);
  });
  check_launch("experts");
}

}  // namespace torchweld
