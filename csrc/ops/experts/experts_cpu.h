// Groups of rows and layers of experts on the CPU. The rows of a group are adjacent, so every
// product is a matmul of a slice.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "core/simd_cpu.h"
#include "layers/linear_cpu.h"
#include "layers/swiglu_cpu.h"
#include "ops/experts/experts.h"

namespace torchweld {

// The rows of a group are adjacent. The ends ascend; group e has the rows from ends[e - 1] (0 for
// the first group) to ends[e] - 1.
struct CpuGroups {
  std::vector<int64_t> ends;

  int64_t rows() const { return ends.empty() ? 0 : ends.back(); }
  int64_t begin(int64_t e) const { return e == 0 ? 0 : ends[e - 1]; }

  // Calls body(e, begin, count) for every group that has rows.
  template <typename Body>
  void for_each(const Body& body) const {
    for (int64_t e = 0; e < static_cast<int64_t>(ends.size()); ++e) {
      if (const int64_t count = ends[e] - begin(e); count > 0) body(e, begin(e), count);
    }
  }
};

// Calls compute(result) with a view. compute() may assign another tensor to it, which is copied to
// the view.
template <typename Compute>
void compute_into(const Tensor& place, const Compute& compute) {
  Tensor result = place;
  compute(result);
  if (!result.is_same(place)) place.copy_(result);
}

// Computes to[r] = a[r] @ weight[e].T + bias[e] for each row r of group e. weight is (E, N, K).
inline void linear_of_groups(const Tensor& to, const Tensor& a, const Tensor& weight,
                             const OptionalTensor& bias, const CpuGroups& groups) {
  groups.for_each([&](int64_t e, int64_t begin, int64_t count) {
    compute_into(to.narrow(0, begin, count), [&](Tensor& result) {
      linear_into(result, a.narrow(0, begin, count), weight.select(0, e),
                  is_given(bias) ? OptionalTensor(bias->select(0, e)) : std::nullopt);
    });
  });
}

// Computes to[r] = a[r] @ b[e] for each row r of group e. b is (E, K, N).
inline void matmul_of_groups(const Tensor& to, const Tensor& a, const Tensor& b,
                             const CpuGroups& groups) {
  groups.for_each([&](int64_t e, int64_t begin, int64_t count) {
    compute_into(to.narrow(0, begin, count), [&](Tensor& result) {
      matmul_into_cpu(result, a.narrow(0, begin, count), b.select(0, e));
    });
  });
}

// Computes to[e] = a^T @ b, with the rows of group e. `to` is (E, M, N), a (rows, M), b (rows, N).
inline void weight_grad_of_groups(const Tensor& to, const Tensor& a, const Tensor& b,
                                  const CpuGroups& groups) {
  to.zero_();
  groups.for_each([&](int64_t e, int64_t begin, int64_t count) {
    compute_into(to.select(0, e), [&](Tensor& result) {
      matmul_into_cpu(result, a.narrow(0, begin, count).t(), b.narrow(0, begin, count));
    });
  });
}

// Computes to[e] = the sum of the rows of group e, each times its weight if weights are given.
inline void sum_of_groups(const Tensor& to, const Tensor& from, const CpuGroups& groups,
                          const Tensor& weights = {}) {
  to.zero_();
  groups.for_each([&](int64_t e, int64_t begin, int64_t count) {
    Tensor rows = from.narrow(0, begin, count);
    if (weights.defined()) {
      rows = rows.to(weights.scalar_type()).mul(weights.narrow(0, begin, count).unsqueeze(1));
    }
    const Tensor sum = at::empty({to.size(1)}, rows.options());
    sum_into(sum, rows, 0);
    to.select(0, e).copy_(sum);
  });
}

// The sorted routes of a call. The experts are groups of rows.
struct CpuRoutes : CpuGroups {
  Tensor order;                 // int64 (rows,): the route of each row
  Tensor tokens;                // int64 (rows,): the token of each row
  std::vector<int64_t> row_of;  // (T * k,): the row of each route, or -1

  CpuRoutes(const Tensor& index, int64_t experts) : row_of(index.numel(), -1) {
    const Tensor ids = index.to(at::kLong).contiguous();
    const int64_t* id = ids.const_data_ptr<int64_t>();
    const int64_t routes = ids.numel(), k = index.size(1);
    const auto exists = [&](int64_t i) { return id[i] >= 0 && id[i] < experts; };
    ends.resize(experts);
    for (int64_t i = 0; i < routes; ++i) {
      if (exists(i)) ++ends[id[i]];
    }
    std::vector<int64_t> next(experts);
    int64_t count = 0;
    for (int64_t e = 0; e < experts; ++e) {
      next[e] = count;
      ends[e] = count += ends[e];
    }
    order = at::empty({count}, ids.options());
    tokens = at::empty({count}, ids.options());
    for (int64_t i = 0; i < routes; ++i) {
      if (!exists(i)) continue;
      const int64_t row = next[id[i]]++;
      row_of[i] = row;
      order.mutable_data_ptr<int64_t>()[row] = i;
      tokens.mutable_data_ptr<int64_t>()[row] = i / k;
    }
  }
};

// f(x) and its derivative.
template <ExpertActivation kActivation, typename A>
inline std::pair<A, A> activate_expert(A x, A slope) {
  if constexpr (kActivation == ExpertActivation::kSilu) {
    const A s = 1 / (1 + exp_in_vectors(-slope * x));
    return {x * s, s * (1 + slope * x * (1 - s))};
  } else if constexpr (kActivation == ExpertActivation::kGelu) {
    const A cdf = A(0.5) * (1 + std::erf(x * A(0.70710678118654752440)));
    return {x * cdf, cdf + x * exp_in_vectors(A(-0.5) * x * x) * A(0.39894228040143267794)};
  } else if constexpr (kActivation == ExpertActivation::kGeluTanh) {
    // tanh(u) = 2 s - 1 with s = 1 / (1 + exp(-2 u)). If exp(-2 u) < 1, exp(-2 u) * s is 1 - s with
    // all its digits.
    constexpr A kTwice = A(1.59576912160573071176), kCubic = A(0.044715);
    const A e = exp_in_vectors(-kTwice * (x + kCubic * x * x * x)), s = 1 / (1 + e);
    const A rest = e < 1 ? e * s : 1 - s;
    return {x * s, s + x * s * rest * kTwice * (1 + 3 * kCubic * x * x)};
  } else {
    const A positive = x < 0 ? A(0) : x;
    if constexpr (kActivation == ExpertActivation::kReluSquared) {
      return {positive * positive, 2 * positive};
    }
    return {positive, x <= 0 ? A(0) : A(1)};
  }
}

// The value of act, and its derivatives with respect to g and u.
template <ExpertActivation kActivation, typename A>
struct CpuGateResult {
  A act, of_g, of_u;
  CpuGateResult(A g, A u, const ExpertGate& gate) {
    const A limit = A(gate.limit);
    const bool g_free = !(g > limit), u_free = !(std::abs(u) > limit);
    const auto [value, slope] =
        activate_expert<kActivation>(g_free ? g : limit, static_cast<A>(gate.slope));
    const A clamped = u_free ? u : u < 0 ? -limit : limit;
    const A factor = gate.gated ? clamped + A(gate.shift) : A(1);
    act = value * factor;
    of_g = g_free ? slope * factor : A(0);
    of_u = u_free ? value : A(0);
  }
};

// Calls body(activation, step, u_offset): the activation, the distance between two values of g in a
// row of z, and the distance from g to u. The first two are compile-time constants.
template <typename Body>
void with_gate(const ExpertGate& gate, int64_t n, const Body& body) {
  const auto with_activation = [&](auto step, int64_t u_offset) {
    const auto with = [&](auto kind) { body(kind, step, u_offset); };
    switch (gate.activation) {
      case ExpertActivation::kSilu:
        return with(std::integral_constant<ExpertActivation, ExpertActivation::kSilu>());
      case ExpertActivation::kGelu:
        return with(std::integral_constant<ExpertActivation, ExpertActivation::kGelu>());
      case ExpertActivation::kGeluTanh:
        return with(std::integral_constant<ExpertActivation, ExpertActivation::kGeluTanh>());
      case ExpertActivation::kRelu:
        return with(std::integral_constant<ExpertActivation, ExpertActivation::kRelu>());
      case ExpertActivation::kReluSquared:
        return with(std::integral_constant<ExpertActivation, ExpertActivation::kReluSquared>());
    }
  };
  if (gate.gated && gate.interleaved) {
    with_activation(std::integral_constant<int, 2>(), 1);
  } else {
    with_activation(std::integral_constant<int, 1>(), gate.gated ? n : 0);
  }
}

// Returns act (rows, n) of z (rows, width).
inline Tensor gate_cpu(const Tensor& z, int64_t n, const ExpertGate& gate) {
  const Tensor act = at::empty({z.size(0), n}, z.options());
  const int64_t width = z.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, z.scalar_type(), "experts", [&] {
    using A = at::opmath_type<scalar_t>;
    const scalar_t* const from = z.const_data_ptr<scalar_t>();
    scalar_t* const to = act.mutable_data_ptr<scalar_t>();
    with_gate(gate, n, [&](auto kind, auto step, int64_t u_offset) {
      for_each_row(z.size(0), n, [&](int64_t row) {
        const scalar_t* __restrict__ g = from + row * width;
        scalar_t* __restrict__ out = to + row * n;
        for (int64_t c = 0; c < n; ++c) {
          const A left = static_cast<A>(g[c * step]),
                  right = static_cast<A>(g[c * step + u_offset]);
          out[c] = round_to<scalar_t>(CpuGateResult<kind.value, A>(left, right, gate).act);
        }
      });
    });
  });
  return act;
}

// The weight of every row in the accumulation dtype.
inline Tensor weights_of_rows(const Tensor& weight, const CpuRoutes& routes) {
  return weight.reshape({-1}).index_select(0, routes.order).to(acc_dtype(weight));
}

// Computes dz (rows, width), the weighted act, and the weights' gradients (rows,). dact (rows, n)
// is the gradient of act without the weight; if it is undefined, only act is computed.
inline void gate_backward_cpu(const Tensor& dz, const Tensor& act, const Tensor& dweights,
                              const Tensor& z, const Tensor& dact, const Tensor& weights,
                              const ExpertGate& gate) {
  const int64_t n = act.size(1), width = z.size(1);
  const Tensor no_gradient = dact.defined() ? dact : at::zeros_like(act);
  const Tensor unused = dz.defined() ? dz : at::empty_like(z);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, z.scalar_type(), "experts", [&] {
    using A = at::opmath_type<scalar_t>;
    const scalar_t* const from_z = z.const_data_ptr<scalar_t>();
    const scalar_t* const from_dact = no_gradient.const_data_ptr<scalar_t>();
    const A* const factors = weights.const_data_ptr<A>();
    scalar_t* const to_dz = unused.mutable_data_ptr<scalar_t>();
    scalar_t* const to_act = act.mutable_data_ptr<scalar_t>();
    A* const to_dweights = dweights.mutable_data_ptr<A>();
    with_gate(gate, n, [&](auto kind, auto step, int64_t u_offset) {
      for_each_row(z.size(0), n, [&](int64_t row) {
        constexpr int64_t kBlock = 256;
        const scalar_t* __restrict__ g = from_z + row * width;
        const scalar_t* __restrict__ grad = from_dact + row * n;
        scalar_t* __restrict__ dg = to_dz + row * width;
        scalar_t* __restrict__ out = to_act + row * n;
        const A weight = factors[row];
        A dweight = 0;
        for (int64_t first = 0; first < n; first += kBlock) {
          const int64_t count = std::min(kBlock, n - first);
          A values[kBlock], of_g[kBlock], of_u[kBlock];
          for (int64_t i = 0; i < count; ++i) {
            const int64_t c = first + i;
            const A left = static_cast<A>(g[c * step]),
                    right = static_cast<A>(g[c * step + u_offset]);
            const CpuGateResult<kind.value, A> result(left, right, gate);
            const A d = weight * static_cast<A>(grad[c]);
            values[i] = result.act;
            of_g[i] = d * result.of_g;
            of_u[i] = d * result.of_u;
          }
          for (int64_t i = 0; i < count; ++i) {
            out[first + i] = round_to<scalar_t>(weight * values[i]);
            dg[(first + i) * step] = round_to<scalar_t>(of_g[i]);
          }
          if (gate.gated) {
            for (int64_t i = 0; i < count; ++i) {
              dg[(first + i) * step + u_offset] = round_to<scalar_t>(of_u[i]);
            }
          }
          dweight += dot<A>(grad + first, values, count);
        }
        to_dweights[row] = dweight;
      });
    });
  });
}

// Computes y[t] = the sum of weight[t, j] * from[row of (t, j)] over j, in order. A weight that is
// undefined stands for ones.
inline void sum_routes_cpu(const Tensor& y, const Tensor& from, const Tensor& weight,
                           const CpuRoutes& routes, int64_t k) {
  const int64_t n = from.size(1);
  const Tensor weights = weight.defined() ? weight.to(acc_dtype(y)).contiguous() : Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "experts", [&] {
    using A = at::opmath_type<scalar_t>;
    const scalar_t* rows = from.const_data_ptr<scalar_t>();
    const A* factors = weights.defined() ? weights.const_data_ptr<A>() : nullptr;
    scalar_t* to = y.mutable_data_ptr<scalar_t>();
    for_each_row(y.size(0), n * k, [&](int64_t t) {
      constexpr int64_t kBlock = 256;
      A sums[kBlock];
      for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        std::fill_n(sums, count, A(0));
        for (int64_t j = 0; j < k; ++j) {
          const int64_t row = routes.row_of[t * k + j];
          if (row < 0) continue;
          const A factor = factors ? factors[t * k + j] : A(1);
          const scalar_t* values = rows + row * n + first;
          for (int64_t c = 0; c < count; ++c) sums[c] += factor * static_cast<A>(values[c]);
        }
        for (int64_t c = 0; c < count; ++c) {
          to[t * n + first + c] = round_to<scalar_t>(sums[c]);
        }
      }
    });
  });
}

}  // namespace torchweld
