// A layer of experts on the CPU. The rows of an expert are adjacent (experts.h), so every product
// is a matmul of a slice.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "layers/linear_cpu.h"
#include "ops/experts/experts.h"

namespace torchweld::experts_op {

// The sorted routes of a call.
struct CpuRoutes {
  Tensor order;                 // int64 (rows,): the route of each row
  Tensor tokens;                // int64 (rows,): the token of each row
  std::vector<int64_t> ends;    // (experts,)
  std::vector<int64_t> row_of;  // (T * k,): the row of each route, or -1

  CpuRoutes(const Tensor& index, int64_t experts) : ends(experts), row_of(index.numel(), -1) {
    const Tensor ids = index.to(at::kLong).contiguous();
    const int64_t* id = ids.const_data_ptr<int64_t>();
    const int64_t routes = ids.numel(), k = index.size(1);
    const auto exists = [&](int64_t i) { return id[i] >= 0 && id[i] < experts; };
    for (int64_t i = 0; i < routes; ++i) {
      if (exists(i)) ++ends[id[i]];
    }
    std::vector<int64_t> next(experts);
    int64_t rows = 0;
    for (int64_t e = 0; e < experts; ++e) {
      next[e] = rows;
      ends[e] = rows += ends[e];
    }
    order = at::empty({rows}, ids.options());
    tokens = at::empty({rows}, ids.options());
    for (int64_t i = 0; i < routes; ++i) {
      if (!exists(i)) continue;
      const int64_t row = next[id[i]]++;
      row_of[i] = row;
      order.mutable_data_ptr<int64_t>()[row] = i;
      tokens.mutable_data_ptr<int64_t>()[row] = i / k;
    }
  }

  int64_t rows() const { return order.numel(); }
  int64_t begin(int64_t e) const { return e == 0 ? 0 : ends[e - 1]; }

  // Calls body(e, begin, count) for every expert that has rows.
  template <typename Body>
  void for_each_expert(const Body& body) const {
    for (int64_t e = 0; e < static_cast<int64_t>(ends.size()); ++e) {
      if (const int64_t count = ends[e] - begin(e); count > 0) body(e, begin(e), count);
    }
  }
};

// Calls body(row) for rows of n values on all threads.
template <typename Body>
void for_each_row(int64_t rows, int64_t n, const Body& body) {
  constexpr int64_t kTaskCells = 16384;
  const int64_t at_once = std::max<int64_t>(1, kTaskCells / std::max<int64_t>(1, n));
  parallel_tasks(divide_up(rows, at_once), [&](int64_t task) {
    for (int64_t row = task * at_once; row < std::min(rows, (task + 1) * at_once); ++row) body(row);
  });
}

// f(x) and its derivative.
template <typename A>
std::pair<A, A> activate_expert(ExpertActivation activation, A x, A slope) {
  switch (activation) {
    case ExpertActivation::kSilu: {
      const A s = 1 / (1 + std::exp(-slope * x));
      return {x * s, s * (1 + slope * x * (1 - s))};
    }
    case ExpertActivation::kGelu: {
      const A cdf = A(0.5) * (1 + std::erf(x * A(0.70710678118654752440)));
      return {x * cdf, cdf + x * std::exp(A(-0.5) * x * x) * A(0.39894228040143267794)};
    }
    case ExpertActivation::kGeluTanh: {
      const A kBeta = A(0.79788456080286535588), kCubic = A(0.044715);
      const A t = std::tanh(kBeta * (x + kCubic * x * x * x));
      return {A(0.5) * x * (1 + t),
              A(0.5) * (1 + t) + A(0.5) * x * (1 - t * t) * kBeta * (1 + 3 * kCubic * x * x)};
    }
    case ExpertActivation::kRelu:
      return {x < 0 ? 0 : x, x <= 0 ? 0 : 1};
    default: {
      const A positive = x < 0 ? 0 : x;
      return {positive * positive, 2 * positive};
    }
  }
}

// The value of act, and its derivatives with respect to g and u.
template <typename A>
struct CpuGateResult {
  A act, of_g, of_u;
  CpuGateResult(A g, A u, const ExpertGate& gate) {
    const A limit = A(gate.limit);
    const bool g_free = !(g > limit), u_free = !(std::abs(u) > limit);
    const auto [value, slope] =
        activate_expert<A>(gate.activation, g_free ? g : limit, A(gate.slope));
    const A factor = gate.gated ? (u_free ? u : std::copysign(limit, u)) + A(gate.shift) : A(1);
    act = value * factor;
    of_g = g_free ? slope * factor : A(0);
    of_u = u_free ? value : A(0);
  }
};

// The columns of g and u of value c in a row of z.
struct GateColumns {
  int64_t g, u;
  GateColumns(const ExpertGate& gate, int64_t n, int64_t c)
      : g(gate.gated && gate.interleaved ? 2 * c : c),
        u(!gate.gated        ? c
          : gate.interleaved ? 2 * c + 1
                             : n + c) {}
};

// Returns act (rows, n) of z (rows, width).
inline Tensor gate_cpu(const Tensor& z, int64_t n, const ExpertGate& gate) {
  const Tensor act = at::empty({z.size(0), n}, z.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, z.scalar_type(), "experts", [&] {
    using A = at::opmath_type<scalar_t>;
    const scalar_t* from = z.const_data_ptr<scalar_t>();
    scalar_t* to = act.mutable_data_ptr<scalar_t>();
    for_each_row(z.size(0), n, [&](int64_t row) {
      for (int64_t c = 0; c < n; ++c) {
        const GateColumns at{gate, n, c};
        const scalar_t* values = from + row * z.size(1);
        const A g = values[at.g], u = values[at.u];
        to[row * n + c] = static_cast<scalar_t>(CpuGateResult<A>(g, u, gate).act);
      }
    });
  });
  return act;
}

// The weight of every row in the accumulation dtype.
inline Tensor weights_of_rows(const Tensor& weight, const CpuRoutes& routes) {
  return weight.reshape({-1}).index_select(0, routes.order).to(acc_dtype(weight));
}

// Computes dz (rows, width), the weighted act, and the weights' gradients (rows,). dact (rows, n)
// is the gradient of act without the weight; if it is undefined, only act is computed. dact becomes
// act.
inline void gate_backward_cpu(const Tensor& dz, const Tensor& act, const Tensor& dweights,
                              const Tensor& z, const Tensor& dact, const Tensor& weights,
                              const ExpertGate& gate) {
  const int64_t n = act.size(1), width = z.size(1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, z.scalar_type(), "experts", [&] {
    using A = at::opmath_type<scalar_t>;
    const scalar_t* g_z = z.const_data_ptr<scalar_t>();
    const scalar_t* g_dact = dact.defined() ? dact.const_data_ptr<scalar_t>() : nullptr;
    const A* g_weights = weights.const_data_ptr<A>();
    scalar_t* to_dz = dz.defined() ? dz.mutable_data_ptr<scalar_t>() : nullptr;
    scalar_t* to_act = act.mutable_data_ptr<scalar_t>();
    A* to_dweights = dweights.mutable_data_ptr<A>();
    for_each_row(z.size(0), n, [&](int64_t row) {
      const A weight = g_weights[row];
      A dweight = 0;
      for (int64_t c = 0; c < n; ++c) {
        const GateColumns at{gate, n, c};
        const scalar_t* values = g_z + row * width;
        const A g = values[at.g], u = values[at.u], d = g_dact ? A(g_dact[row * n + c]) : A(0);
        const CpuGateResult<A> result(g, u, gate);
        dweight += d * result.act;
        to_act[row * n + c] = static_cast<scalar_t>(weight * result.act);
        if (to_dz == nullptr) continue;
        to_dz[row * width + at.g] = static_cast<scalar_t>(weight * d * result.of_g);
        if (gate.gated) to_dz[row * width + at.u] = static_cast<scalar_t>(weight * d * result.of_u);
      }
      to_dweights[row] = dweight;
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
          for (int64_t c = 0; c < count; ++c) sums[c] += factor * A(values[c]);
        }
        for (int64_t c = 0; c < count; ++c) {
          to[t * n + first + c] = static_cast<scalar_t>(sums[c]);
        }
      }
    });
  });
}

// Computes to[e] = the sum of the rows of expert e, each times its weight if weights are given.
inline void sum_of_experts_cpu(const Tensor& to, const Tensor& from, const CpuRoutes& routes,
                               const Tensor& weights = {}) {
  to.zero_();
  routes.for_each_expert([&](int64_t e, int64_t begin, int64_t count) {
    Tensor rows = from.narrow(0, begin, count);
    if (weights.defined()) {
      rows = rows.to(weights.scalar_type()).mul(weights.narrow(0, begin, count).unsqueeze(1));
    }
    const Tensor sum = at::empty({to.size(1)}, rows.options());
    sum_into(sum, rows, 0);
    to.select(0, e).copy_(sum);
  });
}

}  // namespace torchweld::experts_op
