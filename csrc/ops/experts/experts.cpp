// experts computes a layer of experts (mixture of experts) for tokens that a router has assigned:
//   y[t] = the sum over j of weight[t, j] * (act @ down[e].T + down_bias[e]), with e = index[t, j],
//   act = gate(x[t] @ gate_up[e].T + gate_up_bias[e])
//   x (T, H), gate_up (E, 2I, H), down (E, H, I), index and weight (T, k), gate_up_bias (E, 2I),
//   down_bias (E, H), y (T, H)
// The sum over j is in fp32, in the order of j. An id of at least E or below 0 adds nothing. If
// `transposed`, gate_up is (E, H, 2I) and down is (E, I, H).
//
// The gates act on the halves g and u of z = x[t] @ gate_up[e].T + gate_up_bias[e]: g has the first
// I columns, or the even ones if `interleaved`.
//   swiglu: silu(g) * u       geglu, geglu_tanh: gelu(g) * u       reglu: relu(g) * u
// Without a gate, gate_up is (E, I, H) and act = f(z) with f one of relu, relu_squared, silu, gelu,
// gelu_tanh. With `limit`, g is at most limit and u is between -limit and limit. With `alpha`, act
// is g * sigmoid(alpha * g) * (u + 1).
//
// The routes (t, j) are sorted by expert, and every product is one grouped product over all experts
// (gemm/). experts_forward also returns z (T * k, 2I) in this order; rows that belong to no expert
// are not set. The backward sorts the routes again. With dact = dy[t] @ down[e],
//   dweight[t, j] = sum(dact * act) + sum(dy[t] * down_bias[e]),
//   dz = weight[t, j] * dact * gate', ddown[e] = sum of dy[t]^T (weight[t, j] * act),
//   dgate_up[e] = sum of dz^T x[t], dx[t] = the sum over j of dz @ gate_up[e].
// Neither act nor the result of the second product is kept.
#include "ops/experts/experts.h"

#include <limits>

#include "core/dispatch.h"
#include "layers/donation.h"
#include "ops/experts/experts_cpu.h"

#ifdef TORCHWELD_CUDA
#include "layers/gate_backward_matmul.h"
#include "ops/experts/experts_cuda.h"
#endif

namespace torchweld::experts_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 6>;
using Number = std::optional<double>;

ExpertGate parse_gate(const char* op, std::string_view name, const Number& limit,
                      const Number& alpha, bool interleaved) {
  struct Named {
    std::string_view name;
    ExpertActivation activation;
    bool gated;
  };
  static constexpr Named kGates[] = {
      {"swiglu", ExpertActivation::kSilu, true},
      {"geglu", ExpertActivation::kGelu, true},
      {"geglu_tanh", ExpertActivation::kGeluTanh, true},
      {"reglu", ExpertActivation::kRelu, true},
      {"relu", ExpertActivation::kRelu, false},
      {"relu_squared", ExpertActivation::kReluSquared, false},
      {"silu", ExpertActivation::kSilu, false},
      {"gelu", ExpertActivation::kGelu, false},
      {"gelu_tanh", ExpertActivation::kGeluTanh, false},
  };
  for (const Named& known : kGates) {
    if (name != known.name) continue;
    TW_CHECK(known.gated || (!limit && !interleaved), op,
             "gate must be one with two halves for limit or interleaved, but got '", name, "'");
    TW_CHECK(!limit || (std::isfinite(*limit) && *limit > 0), op,
             "limit must be finite and positive, but got ", *limit);
    TW_CHECK(!alpha || name == "swiglu", op, "gate must be swiglu for alpha, but got '", name, "'");
    if (alpha) check_finite(op, "alpha", *alpha);
    return {known.activation,    known.gated,
            interleaved,         limit.value_or(std::numeric_limits<double>::infinity()),
            alpha.value_or(1.0), alpha ? 1.0 : 0.0};
  }
  TW_CHECK(false, op,
           "gate must be one of swiglu, geglu, geglu_tanh, reglu, relu, relu_squared, silu, gelu, "
           "gelu_tanh, but got '",
           name, "'");
}

// The arguments that say what the weights mean.
struct Form {
  ExpertGate gate;
  bool transposed;

  // Returns a weight as (E, N, K).
  Tensor of(const Tensor& weight) const { return transposed ? weight.transpose(1, 2) : weight; }
};

Form check_weights(const char* op, const Tensor& x, const Tensor& gate_up, const Tensor& down,
                   const Tensor& index, const Tensor& weight, c10::string_view gate,
                   const Number& limit, const Number& alpha, bool interleaved, bool transposed) {
  const Form form = {parse_gate(op, gate, limit, alpha, interleaved), transposed};
  check_floating(op, "x", x);
  check_dim(op, "x", x, 2, "(T, H)");
  const bool gated = form.gate.gated;
  const char* up_layout =
      gated ? (transposed ? "(E, H, 2I)" : "(E, 2I, H)") : (transposed ? "(E, H, I)" : "(E, I, H)");
  check_like(op, "gate_up", gate_up, "x", x);
  check_dim(op, "gate_up", gate_up, 3, up_layout);
  const auto h = x.sym_size(1), e = gate_up.sym_size(0),
             width = gate_up.sym_size(transposed ? 2 : 1);
  TW_CHECK(gate_up.sym_size(transposed ? 1 : 2) == h && (!gated || width % 2 == 0), op,
           "gate_up must be ", up_layout, " with H = ", h, ", but got ", describe(gate_up),
           transposed ? "" : "; weights of shape (E, H, 2I) need transposed=True");
  const auto n = gated ? width / 2 : width;
  check_like(op, "down", down, "x", x);
  if (transposed) {
    check_shape(op, "down", down, {e, n, h}, "(E, I, H)");
  } else {
    check_shape(op, "down", down, {e, h, n}, "(E, H, I)");
  }
  check_device(op, "index", index, "x", x);
  TW_CHECK(index.scalar_type() == at::kLong || index.scalar_type() == at::kInt, op,
           "index must be int64 or int32, but got ", describe(index), "; use index.long()");
  TW_CHECK(index.dim() == 2 && index.sym_size(0) == x.sym_size(0), op,
           "index must be (T, k) with T = ", x.sym_size(0), ", but got ", describe(index));
  check_device(op, "weight", weight, "x", x);
  TW_CHECK(weight.scalar_type() == x.scalar_type() || weight.scalar_type() == acc_dtype(x), op,
           "weight must be ", dtype_name(x.scalar_type()), " like x, or ", dtype_name(acc_dtype(x)),
           ", but got ", describe(weight), "; use weight.to(x.dtype)");
  check_shape(op, "weight", weight, index.sym_sizes(), "(T, k)");
  return form;
}

void check_bias(const char* op, const char* name, const OptionalTensor& bias, const c10::SymInt& e,
                const c10::SymInt& n, const char* layout, const Tensor& x) {
  if (!is_given(bias)) return;
  check_like(op, name, *bias, "x", x);
  check_shape(op, name, *bias, {e, n}, layout);
}

Form experts_checks(const char* op, const Tensor& x, const Tensor& gate_up, const Tensor& down,
                    const Tensor& index, const Tensor& weight, const OptionalTensor& gate_up_bias,
                    const OptionalTensor& down_bias, c10::string_view gate, Number limit,
                    Number alpha, bool interleaved, bool transposed) {
  const Form form = check_weights(op, x, gate_up, down, index, weight, gate, limit, alpha,
                                  interleaved, transposed);
  const auto e = gate_up.sym_size(0);
  TW_CHECK(!x.is_cuda() || e <= kMaxExperts, op, "gate_up must have at most ", kMaxExperts,
           " experts on a GPU, but got ", e);
  check_bias(op, "gate_up_bias", gate_up_bias, e, gate_up.sym_size(transposed ? 2 : 1), "(E, 2I)",
             x);
  check_bias(op, "down_bias", down_bias, e, x.sym_size(1), "(E, H)", x);
  return form;
}

Tensor experts_meta(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index,
                    const Tensor& weight, const OptionalTensor& gate_up_bias,
                    const OptionalTensor& down_bias, c10::string_view gate, Number limit,
                    Number alpha, bool interleaved, bool transposed) {
  experts_checks("experts", x, gate_up, down, index, weight, gate_up_bias, down_bias, gate, limit,
                 alpha, interleaved, transposed);
  return empty_result(x, x.sym_sizes());
}
TW_OP(experts);

std::vector<c10::SymInt> z_sizes(const Tensor& gate_up, const Tensor& index, bool transposed) {
  return {index.sym_size(0) * index.sym_size(1), gate_up.sym_size(transposed ? 2 : 1)};
}

Forward experts_forward_meta(const Tensor& x, const Tensor& gate_up, const Tensor& down,
                             const Tensor& index, const Tensor& weight,
                             const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                             c10::string_view gate, Number limit, Number alpha, bool interleaved,
                             bool transposed) {
  experts_checks("experts_forward", x, gate_up, down, index, weight, gate_up_bias, down_bias, gate,
                 limit, alpha, interleaved, transposed);
  return {empty_result(x, x.sym_sizes()), empty_result(x, z_sizes(gate_up, index, transposed))};
}
TW_OP(experts_forward);

Grads experts_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& gate_up,
                            const Tensor& down, const Tensor& index, const Tensor& weight,
                            const Tensor& z, const OptionalTensor& down_bias, c10::string_view gate,
                            Number limit, Number alpha, bool interleaved, bool transposed,
                            Wanted output_mask) {
  const char* op = "experts_backward";
  experts_checks(op, x, gate_up, down, index, weight, std::nullopt, down_bias, gate, limit, alpha,
                 interleaved, transposed);
  check_like(op, "dy", dy, "x", x);
  check_shape(op, "dy", dy, x.sym_sizes(), "(T, H)");
  check_like(op, "z", z, "x", x);
  check_shape(op, "z", z, z_sizes(gate_up, index, transposed), "(T * k, 2I)");
  const auto bias_grad = [&](const c10::SymInt& n, bool wanted) {
    return wanted ? at::empty_symint({gate_up.sym_size(0), n}, x.options())
                  : at::empty({0}, x.options());
  };
  return {empty_input_grad(x, output_mask[0]),
          empty_weight_grad(gate_up, output_mask[1]),
          empty_weight_grad(down, output_mask[2]),
          empty_input_grad(weight, output_mask[3]),
          bias_grad(gate_up.sym_size(transposed ? 2 : 1), output_mask[4]),
          bias_grad(x.sym_size(1), output_mask[5])};
}
TW_OP(experts_backward);

// Whether the caller requests a gradient that depends on dz.
bool wants_dz(const Wanted& wanted) { return wanted[0] || wanted[1] || wanted[4]; }

Forward forward_cpu(const char* op, const Tensor& x, const Tensor& gate_up, const Tensor& down,
                    const Tensor& index, const Tensor& weight, const OptionalTensor& gate_up_bias,
                    const OptionalTensor& down_bias, c10::string_view gate, Number limit,
                    Number alpha, bool interleaved, bool transposed) {
  const Form form = experts_checks(op, x, gate_up, down, index, weight, gate_up_bias, down_bias,
                                   gate, limit, alpha, interleaved, transposed);
  const Tensor up = form.of(gate_up), second = form.of(down);
  const CpuRoutes routes(index, up.size(0));
  const Tensor y = at::empty(x.sizes(), x.options()),
               z = at::empty({index.numel(), up.size(1)}, x.options()),
               results = at::empty({routes.rows(), x.size(1)}, x.options());
  linear_of_groups(z, x.index_select(0, routes.tokens), up, gate_up_bias, routes);
  const Tensor act = gate_cpu(z.narrow(0, 0, routes.rows()), second.size(2), form.gate);
  linear_of_groups(results, act, second, down_bias, routes);
  sum_routes_cpu(y, results, weight, routes, index.size(1));
  return {y, z};
}

Tensor experts_cpu(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index,
                   const Tensor& weight, const OptionalTensor& gate_up_bias,
                   const OptionalTensor& down_bias, c10::string_view gate, Number limit,
                   Number alpha, bool interleaved, bool transposed) {
  return std::get<0>(forward_cpu("experts", x, gate_up, down, index, weight, gate_up_bias,
                                 down_bias, gate, limit, alpha, interleaved, transposed));
}

Forward experts_forward_cpu(const Tensor& x, const Tensor& gate_up, const Tensor& down,
                            const Tensor& index, const Tensor& weight,
                            const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                            c10::string_view gate, Number limit, Number alpha, bool interleaved,
                            bool transposed) {
  return forward_cpu("experts_forward", x, gate_up, down, index, weight, gate_up_bias, down_bias,
                     gate, limit, alpha, interleaved, transposed);
}

Grads experts_backward_cpu(const Tensor& dy, const Tensor& x, const Tensor& gate_up,
                           const Tensor& down, const Tensor& index, const Tensor& weight,
                           const Tensor& z, const OptionalTensor& down_bias, c10::string_view gate,
                           Number limit, Number alpha, bool interleaved, bool transposed,
                           Wanted output_mask) {
  auto [dx, dgate_up, ddown, dweight, dup_bias, ddown_bias] =
      experts_backward_meta(dy, x, gate_up, down, index, weight, z, down_bias, gate, limit, alpha,
                            interleaved, transposed, output_mask);
  const Form form = {parse_gate("experts_backward", gate, limit, alpha, interleaved), transposed};
  const Tensor up = form.of(gate_up), second = form.of(down);
  const CpuRoutes routes(index, up.size(0));
  const int64_t rows = routes.rows(), n = second.size(2);
  const Tensor in_z = z.narrow(0, 0, rows).contiguous(), in_dy = dy.index_select(0, routes.tokens),
               weights = weights_of_rows(weight, routes);
  const bool needs_dz = wants_dz(output_mask), needs_dact = needs_dz || output_mask[3];
  const auto empty_rows = [&](int64_t columns) { return at::empty({rows, columns}, x.options()); };
  Tensor dact;
  if (needs_dact) matmul_of_groups(dact = empty_rows(n), in_dy, second, routes);
  const Tensor dz = needs_dz ? empty_rows(up.size(1)) : Tensor(), act = empty_rows(n),
               dweights = at::empty({rows}, weights.options());
  if (needs_dact || output_mask[2]) {
    gate_backward_cpu(dz, act, dweights, in_z, dact, weights, form.gate);
  }
  if (output_mask[0]) {
    const Tensor dx_rows = empty_rows(x.size(1));
    matmul_of_groups(dx_rows, dz, up, routes);
    sum_routes_cpu(dx, dx_rows, {}, routes, index.size(1));
  }
  if (output_mask[1]) {
    weight_grad_of_groups(form.of(dgate_up), dz, x.index_select(0, routes.tokens), routes);
  }
  if (output_mask[2]) weight_grad_of_groups(form.of(ddown), in_dy, act, routes);
  if (output_mask[3]) {
    if (is_given(down_bias)) {
      routes.for_each([&](int64_t e, int64_t begin, int64_t count) {
        const auto acc = dweights.scalar_type();
        dweights.narrow(0, begin, count)
            .add_(at::mm(in_dy.narrow(0, begin, count).to(acc),
                         down_bias->select(0, e).to(acc).unsqueeze(1))
                      .squeeze(1));
      });
    }
    dweight.zero_();
    dweight.view({-1}).index_put_({routes.order}, dweights.to(dweight.scalar_type()));
  }
  if (output_mask[4]) sum_of_groups(dup_bias, dz, routes);
  if (output_mask[5]) sum_of_groups(ddown_bias, in_dy, routes, weights);
  return {dx, dgate_up, ddown, dweight, dup_bias, ddown_bias};
}

#ifdef TORCHWELD_CUDA
// Whether a call has nothing to multiply, so that every result is zero.
bool is_empty(const Tensor& x, const Tensor& gate_up, const Tensor& index) {
  return index.numel() == 0 || gate_up.size(0) == 0 || x.size(1) == 0;
}

// Whether the epilogue of the first product gates its results.
bool fuses_gate(const ExpertGate& gate, int64_t n, const Tensor& x) {
  const bool is_swiglu = gate.activation == ExpertActivation::kSilu && gate.gated &&
                         gate.shift == 0 && std::isinf(gate.limit);
  return is_swiglu && n % (16 / x.element_size()) == 0;
}

// Computes y, and z if it is defined.
void experts_into(const char* op, const Tensor& y, Tensor z, const Tensor& x, const Tensor& gate_up,
                  const Tensor& down, const Tensor& index, const Tensor& weight,
                  const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                  const ExpertGate& gate) {
  if (is_empty(x, gate_up, index)) {
    y.zero_();
    return;
  }
  const OnDevice on(x.device());
  const CudaRoutes routes(op, index, gate_up.size(0));
  const Tensor rows = gather_tokens(x, routes);
  MatmulGroups groups = routes.groups();
  const int64_t n = down.size(2);
  const Tensor act = empty_route_rows(routes, n, x);
  {
    const CallScope part("act");
    if (fuses_gate(gate, n, x)) {
      grouped_matmul_into(
          act, padded(rows), Matrix::halves(gate_up, gate.interleaved), groups, Grouped::kRows,
          {gate_up_bias, Activation::kNone, /*gated=*/true, Gate::kSwiglu, gate.interleaved, z});
    } else {
      if (!z.defined()) z = empty_route_rows(routes, gate.width(n), x);
      grouped_matmul_into(z, padded(rows), gate_up, groups, Grouped::kRows, {gate_up_bias});
      if (n > 0) {
        launch_expert_gate(route_rows(act), route_rows(z), gate, routes, dtype_of(x),
                           current_stream());
      }
    }
  }
  const CallScope part("y");
  // The products of the second matmul overwrite the gathered tokens.
  grouped_matmul_into(rows, padded(act), down, groups, Grouped::kRows, {down_bias});
  sum_routes(y, rows, weight.contiguous(), routes);
}

Tensor experts_cuda(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& index,
                    const Tensor& weight, const OptionalTensor& gate_up_bias,
                    const OptionalTensor& down_bias, c10::string_view gate, Number limit,
                    Number alpha, bool interleaved, bool transposed) {
  const char* op = "experts";
  const Form form = experts_checks(op, x, gate_up, down, index, weight, gate_up_bias, down_bias,
                                   gate, limit, alpha, interleaved, transposed);
  const Tensor y = at::empty(x.sizes(), x.options());
  experts_into(op, y, {}, x, form.of(gate_up), form.of(down), index, weight, gate_up_bias,
               down_bias, form.gate);
  return y;
}

Forward experts_forward_cuda(const Tensor& x, const Tensor& gate_up, const Tensor& down,
                             const Tensor& index, const Tensor& weight,
                             const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                             c10::string_view gate, Number limit, Number alpha, bool interleaved,
                             bool transposed) {
  const char* op = "experts_forward";
  auto [y, z] = experts_forward_meta(x, gate_up, down, index, weight, gate_up_bias, down_bias, gate,
                                     limit, alpha, interleaved, transposed);
  const Form form = {parse_gate(op, gate, limit, alpha, interleaved), transposed};
  experts_into(op, y, z, x, form.of(gate_up), form.of(down), index, weight, gate_up_bias, down_bias,
               form.gate);
  return {y, z};
}

// Computes dz if a gradient depends on it, act times the weights of the routes if the gradient of
// down is requested, and the gradient of the weights if it is requested. `second` is (E, H, I), and
// in_dy (routes, H) are the gathered rows of dy.
std::tuple<Tensor, Tensor> gate_backward_cuda(const Tensor& z, const Tensor& in_dy,
                                              const Tensor& dweight, const Tensor& second,
                                              const Tensor& weight, const OptionalTensor& down_bias,
                                              const ExpertGate& gate, const CudaRoutes& routes,
                                              MatmulGroups& groups, const Wanted& wanted) {
  const ExpertRoutes& r = routes;
  const int64_t n = second.size(2);
  const bool needs_dz = wants_dz(wanted), needs_dact = needs_dz || wanted[3], needs_act = wanted[2];
  const bool weight_fp32 = weight.scalar_type() == at::kFloat;
  const bool adds_bias = wanted[3] && is_given(down_bias);
  Tensor act = needs_act ? empty_route_rows(routes, n, z) : Tensor();
  if (needs_dz && !adds_bias && !gate.interleaved && fuses_gate(gate, n, z)) {
    const int64_t parts = wanted[3] ? weight_gradient_parts(n) : 0;
    const Tensor sums = at::empty({parts, routes.count()}, z.options().dtype(at::kFloat));
    const RouteWeights weights = {r.order, const_data<void>(weight), weight_fp32,
                                  data_if_wanted<float>(sums)};
    const Tensor dz = gate_backward_matmul(act, z, in_dy, second, Gate::kSwiglu, &groups, weights);
    if (dz.defined()) {
      if (wanted[3]) {
        launch_sum_weight_gradients(mutable_data<void>(dweight), weight_fp32, weights.dweight_parts,
                                    static_cast<int>(parts), r, dtype_of(z), current_stream());
      }
      return {dz, act};
    }
  }
  Tensor dact = act;
  if (needs_dact && !needs_act) dact = empty_route_rows(routes, n, z);
  if (needs_dact) {
    const CallScope part("dact");
    grouped_matmul_into(dact, padded(in_dy), second.transpose(1, 2), groups, Grouped::kRows);
  }
  const Tensor dz = needs_dz ? matrix_over(z) : Tensor();
  if (!dact.defined() || n + in_dy.size(1) == 0) return {dz, act};
  ExpertGateBackward p{};
  p.z = route_rows(z);
  if (needs_dact) p.dact = route_rows(dact);
  p.dz = route_rows(dz);
  if (needs_act) p.act = route_rows(act);
  p.dweight = data_if_wanted(dweight);
  p.weight = const_data<void>(weight);
  p.weight_fp32 = weight_fp32;
  const Vector bias(is_given(down_bias) ? OptionalTensor(down_bias->contiguous()) : down_bias);
  p.dy = route_rows(in_dy);
  p.down_bias = bias.data();
  p.gate = gate;
  launch_expert_gate_backward(p, r, dtype_of(z), current_stream());
  return {dz, act};
}

Grads experts_backward_cuda(const Tensor& dy, const Tensor& x, const Tensor& gate_up,
                            const Tensor& down, const Tensor& index, const Tensor& weight,
                            const Tensor& z, const OptionalTensor& down_bias, c10::string_view gate,
                            Number limit, Number alpha, bool interleaved, bool transposed,
                            Wanted output_mask) {
  const char* op = "experts_backward";
  auto [dx, dgate_up, ddown, dweight, dup_bias, ddown_bias] =
      experts_backward_meta(dy, x, gate_up, down, index, weight, z, down_bias, gate, limit, alpha,
                            interleaved, transposed, output_mask);
  const Grads grads = {dx, dgate_up, ddown, dweight, dup_bias, ddown_bias};
  const Form form = {parse_gate(op, gate, limit, alpha, interleaved), transposed};
  if (is_empty(x, gate_up, index)) {
    std::apply([](const auto&... grad) { (grad.zero_(), ...); }, grads);
    return grads;
  }
  const OnDevice on(x.device());
  const Tensor up = form.of(gate_up), second = form.of(down), factors = weight.contiguous();
  const CudaRoutes routes(op, index, up.size(0));
  MatmulGroups groups = routes.groups();
  const Tensor in_z = z.contiguous(), in_dy = gather_tokens(dy, routes);
  if (output_mask[3]) dweight.zero_();
  const auto [dz, act] = gate_backward_cuda(in_z, in_dy, dweight, second, factors, down_bias,
                                            form.gate, routes, groups, output_mask);
  if (output_mask[2]) {
    const CallScope part("ddown");
    grouped_matmul_into(form.of(ddown), padded(in_dy).t(), padded(act).t(), groups, Grouped::kK);
  }
  if (output_mask[5]) sum_of_experts(ddown_bias, in_dy, factors, routes);
  if (output_mask[4]) sum_of_experts(dup_bias, dz, {}, routes);
  if (output_mask[0]) {
    const CallScope part("dx");
    // The products overwrite the gathered dy.
    grouped_matmul_into(in_dy, padded(dz), up.transpose(1, 2), groups, Grouped::kRows);
    sum_routes(dx, in_dy, {}, routes);
  }
  if (output_mask[1]) {
    const CallScope part("dgate_up");
    grouped_matmul_into(form.of(dgate_up), padded(dz).t(), padded(gather_tokens(x, routes)).t(),
                        groups, Grouped::kK);
  }
  return grads;
}
#endif

struct ExpertsFunction : torch::autograd::Function<ExpertsFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& gate_up,
                               const Tensor& down, const Tensor& index, const Tensor& weight,
                               const OptionalTensor& gate_up_bias, const OptionalTensor& down_bias,
                               c10::string_view gate, Number limit, Number alpha, bool interleaved,
                               bool transposed) {
    auto [y, z] =
        call_experts_forward.below(x, gate_up, down, index, weight, gate_up_bias, down_bias, gate,
                                   limit, alpha, interleaved, transposed);
    ctx->save_for_backward({x, gate_up, down, index, weight, z, or_undefined(down_bias)});
    Donation::prepare(ctx);
    ctx->saved_data["gate"] = gate;
    ctx->saved_data["limit"] = limit;
    ctx->saved_data["alpha"] = alpha;
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["transposed"] = transposed;
    ctx->saved_data["gate_up_bias"] = is_given(gate_up_bias);
    ctx->saved_data["down_bias"] = is_given(down_bias);
    return outputs_of(ctx, {y, z});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list all(12);
    if (!grads[0].defined()) return all;
    const auto saved = ctx->get_saved_variables();
    AskedGradients asked(ctx);
    const bool x = asked.next(), gate_up = asked.next(), down = asked.next();
    asked.next();  // index
    const Wanted wanted = {x,
                           gate_up,
                           down,
                           asked.next(),
                           asked.next(ctx->saved_data["gate_up_bias"].toBool()),
                           asked.next(ctx->saved_data["down_bias"].toBool())};
    const Donation z(ctx, saved[5], grads[0]);
    const auto number = [&](const char* name) { return ctx->saved_data[name].to<Number>(); };
    auto [dx, dgate_up, ddown, dweight, dup_bias, ddown_bias] = call_experts_backward(
        grads[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], optional(saved[6]),
        ctx->saved_data["gate"].toStringRef(), number("limit"), number("alpha"),
        ctx->saved_data["interleaved"].toBool(), ctx->saved_data["transposed"].toBool(), wanted);
    all[0] = if_wanted(wanted[0], dx);
    all[1] = if_wanted(wanted[1], dgate_up);
    all[2] = if_wanted(wanted[2], ddown);
    all[4] = if_wanted(wanted[3], dweight);
    all[5] = if_wanted(wanted[4], dup_bias);
    all[6] = if_wanted(wanted[5], ddown_bias);
    return all;
  }
};

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string
      name = "experts",
      gates =
          "*, str gate=\"swiglu\", float? limit=None, float? alpha=None, bool interleaved=False, "
          "bool transposed=False";
  const std::string inputs =
      "(Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weight, "
      "Tensor? gate_up_bias=None, Tensor? down_bias=None, " +
      gates + ") -> ";
  define_op(m, name + inputs + "Tensor", TW_KERNELS(experts),
            recorded_by<ExpertsFunction>(call_experts, experts_checks));
  define_op(m, name + "_forward" + inputs + "(Tensor y, Tensor z)", TW_KERNELS(experts_forward),
            recorded_by<ExpertsFunction>(call_experts_forward, experts_checks));
  define_op(m,
            name +
                "_backward(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor index, "
                "Tensor weight, Tensor z, Tensor? down_bias=None, " +
                gates +
                ", bool[6] output_mask) -> (Tensor dx, Tensor dgate_up, Tensor ddown, "
                "Tensor dweight, Tensor dgate_up_bias, Tensor ddown_bias)",
            TW_KERNELS(experts_backward), no_gradient_function());
  define_autocast(m, call_experts);
  define_autocast(m, call_experts_forward);
}

}  // namespace
}  // namespace torchweld::experts_op
