// grouped_linear and grouped_gated_linear compute a linear layer of its own for each group of rows:
//   z[r] = x[r] @ weight[e].T + bias[e]  for each row r of group e
//   grouped_linear:        y = activation(z)         weight (E, N, K),  bias (E, N)
//   grouped_gated_linear:  y = gate(left, right)     weight (E, 2N, K), bias (E, 2N)
//   x (R, K), offsets (E,), y (R, N)
// Group e has the rows from offsets[e - 1] (0 for the first group) to offsets[e] - 1. The offsets
// are clamped to 0..R, and one that is below an earlier one counts as the earlier one. Rows behind
// the last group are zeros in y, in z and in dx. `left` and `right` are the halves of z as in
// gated_linear.
//
// The forward ops also return what the backward needs: z, or for grouped_linear what
// linear_forward returns.
#include <ATen/ops/clamp.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/zeros.h>

#include "core/dispatch.h"
#include "layers/gate.h"
#include "ops/experts/experts_cpu.h"

#ifdef TORCHWELD_CUDA
#include "ops/experts/experts_cuda.h"
#endif

namespace torchweld::grouped_linear_op {
namespace {

using Forward = std::tuple<Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor, Tensor>;
using Wanted = std::array<bool, 3>;

// What follows a product: an activation, or a gate of the two halves of z.
struct Epilogue {
  bool gated;
  Activation activation = Activation::kNone;
  Gate gate = Gate::kSwiglu;
  bool interleaved = false;

  bool saves_z() const { return gated || saves_preact(activation); }
};

Epilogue activates(const char* op, c10::string_view activation) {
  return {/*gated=*/false, parse_activation(op, activation)};
}

Epilogue gates(const char* op, c10::string_view gate, bool interleaved) {
  return {/*gated=*/true, Activation::kNone, parse_gate(op, gate), interleaved};
}

// Checks the arguments. Returns the shape of y.
std::vector<c10::SymInt> check(const char* op, const Tensor& x, const Tensor& weight,
                               const Tensor& offsets, const OptionalTensor& bias,
                               const Epilogue& epilogue) {
  check_floating(op, "x", x);
  check_dim(op, "x", x, 2, "(R, K)");
  const char* layout = epilogue.gated ? "(E, 2N, K)" : "(E, N, K)";
  check_like(op, "weight", weight, "x", x);
  check_dim(op, "weight", weight, 3, layout);
  const auto k = x.sym_size(1), e = weight.sym_size(0), width = weight.sym_size(1);
  TW_CHECK(weight.sym_size(2) == k && (!epilogue.gated || width % 2 == 0), op, "weight must be ",
           layout, " with K = ", k, ", but got ", describe(weight),
           weight.sym_size(1) == k ? "; use weight.mT" : "");
  check_device(op, "offsets", offsets, "x", x);
  TW_CHECK(offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong, op,
           "offsets must be int32 or int64, but got ", describe(offsets), "; use offsets.int()");
  check_shape(op, "offsets", offsets, {e}, "(E,)");
  TW_CHECK(!x.is_cuda() || e <= kMaxExperts, op, "weight must have at most ", kMaxExperts,
           " groups on a GPU, but got ", e);
  if (is_given(bias)) {
    check_like(op, "bias", *bias, "x", x);
    check_shape(op, "bias", *bias, {e, width}, epilogue.gated ? "(E, 2N)" : "(E, N)");
  }
  return {x.sym_size(0), epilogue.gated ? width / 2 : width};
}

Tensor allocate(const char* op, const Tensor& x, const Tensor& weight, const Tensor& offsets,
                const OptionalTensor& bias, const Epilogue& epilogue) {
  return empty_result(x, check(op, x, weight, offsets, bias, epilogue));
}

Forward allocate_both(const char* op, const Tensor& x, const Tensor& weight, const Tensor& offsets,
                      const OptionalTensor& bias, const Epilogue& epilogue) {
  const auto sizes = check(op, x, weight, offsets, bias, epilogue);
  return {empty_result(x, sizes), epilogue.saves_z()
                                      ? empty_result(x, {sizes[0], weight.sym_size(1)})
                                      : at::empty({0}, x.options())};
}

Grads allocate_grads(const char* op, const Tensor& dy, const Tensor& x, const Tensor& weight,
                     const Tensor& offsets, const OptionalTensor& saved, const Epilogue& epilogue,
                     const Wanted& wanted) {
  const auto sizes = check(op, x, weight, offsets, std::nullopt, epilogue);
  check_like(op, "dy", dy, "x", x);
  check_shape(op, "dy", dy, sizes, "(R, N)");
  if (epilogue.gated) {
    check_like(op, "z", *saved, "x", x);
    check_shape(op, "z", *saved, {sizes[0], weight.sym_size(1)}, "(R, 2N)");
  } else {
    check_preact(op, saved, epilogue.activation, sizes, x);
  }
  return {empty_input_grad(x, wanted[0]), empty_weight_grad(weight, wanted[1]),
          wanted[2] ? at::empty_symint({weight.sym_size(0), weight.sym_size(1)}, x.options())
                    : at::empty({0}, x.options())};
}

CpuGroups groups_of(const Tensor& offsets, int64_t rows) {
  const Tensor ends = offsets.to(at::kLong).contiguous();
  const int64_t* end = ends.const_data_ptr<int64_t>();
  CpuGroups groups;
  for (int64_t e = 0; e < ends.numel(); ++e) {
    groups.ends.push_back(std::clamp(end[e], groups.rows(), rows));
  }
  return groups;
}

// Sets the rows behind those of the groups to zero.
void clear_rows_behind(const Tensor& t, const CpuGroups& groups) {
  t.narrow(0, groups.rows(), t.size(0) - groups.rows()).zero_();
}

// Computes y, and z if it has memory.
void forward_cpu(const Tensor& y, const Tensor& z, const Tensor& x, const Tensor& weight,
                 const Tensor& offsets, const OptionalTensor& bias, const Epilogue& epilogue) {
  const CpuGroups groups = groups_of(offsets, x.size(0));
  const Tensor products = epilogue.saves_z() && z.defined() ? z
                          : epilogue.gated ? at::empty({x.size(0), weight.size(1)}, x.options())
                                           : y;
  linear_of_groups(products, x, weight, bias, groups);
  clear_rows_behind(products, groups);  // every activation and every gate of zeros is zero
  if (epilogue.gated) {
    y.copy_(apply_gate(Halves(products, epilogue.interleaved), epilogue.gate));
  } else {
    Tensor result = y;
    activate_into(result, products, epilogue.activation);
  }
}

void backward_cpu(const Grads& grads, const Tensor& dy, const Tensor& x, const Tensor& weight,
                  const Tensor& offsets, const OptionalTensor& saved, const Epilogue& epilogue,
                  const Wanted& wanted) {
  const auto& [dx, dweight, dbias] = grads;
  const CpuGroups groups = groups_of(offsets, x.size(0));
  Tensor dz;
  if (epilogue.gated) {
    const Tensor z = saved->contiguous();
    const Halves halves = gate_backward(dy, Halves(z, epilogue.interleaved), epilogue.gate);
    dz = Donation::over(z);
    const Halves to(dz, epilogue.interleaved);
    to.left.copy_(halves.left);
    to.right.copy_(halves.right);
  } else {
    dz = activation_backward(dy, saved, epilogue.activation);
  }
  if (wanted[0]) {
    matmul_of_groups(dx, dz, weight, groups);
    clear_rows_behind(dx, groups);
  }
  if (wanted[1]) weight_grad_of_groups(dweight, dz, x, groups);
  if (wanted[2]) sum_of_groups(dbias, dz, groups);
}

#ifdef TORCHWELD_CUDA
// The groups of a call, in the memory of the GPU.
struct CudaGroups {
  Tensor ends;  // int32 (E,)
  ExpertRoutes routes{};
  MatmulGroups groups;

  CudaGroups(const Tensor& offsets, int64_t rows)
      : ends(std::get<0>(at::cummax(offsets.clamp(0, rows).to(at::kInt), 0))), groups{ends} {
    routes.experts = static_cast<int>(ends.numel());
    routes.ends = mutable_data<int>(ends);
  }

  void clear_rows_behind(const Tensor& t) const {
    if (t.numel() == 0) return;
    launch_clear_rows_behind(route_rows(t), t.size(0), routes, dtype_of(t), current_stream());
  }
};

// Returns t, or a copy whose rows start on 16-byte boundaries and have zeros up to the next one.
Matrix aligned_rows(const Tensor& t) {
  const int64_t chunk = 16 / t.element_size(), n = t.size(1);
  const bool aligned = t.stride(1) == 1 && t.stride(0) % chunk == 0 && n % chunk == 0 &&
                       reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 &&
                       t.stride(0) >= n;
  if (aligned) return t;
  const Tensor copy = at::zeros({t.size(0), divide_up(n, chunk) * chunk}, t.options());
  copy.narrow(1, 0, n).copy_(t);
  return padded(copy.narrow(1, 0, n));
}

// Computes y, and z if it has memory.
void forward_cuda(const Tensor& y, const Tensor& z, const Tensor& x, const Tensor& weight,
                  const Tensor& offsets, const OptionalTensor& bias, const Epilogue& epilogue) {
  if (x.size(0) == 0) return;
  if (weight.size(0) == 0) {
    y.zero_();
    if (z.defined()) z.zero_();
    return;
  }
  if (y.numel() == 0) return;
  const OnDevice on(x.device());
  CudaGroups of(offsets, x.size(0));
  const bool saves = epilogue.saves_z() && z.defined();
  const OptionalTensor biases = is_given(bias) ? OptionalTensor(bias->contiguous()) : bias;
  grouped_matmul_into(
      y, aligned_rows(x),
      epilogue.gated ? Matrix::halves(weight, epilogue.interleaved) : Matrix(weight), of.groups,
      Grouped::kRows,
      {biases, epilogue.activation, epilogue.gated, epilogue.gate, epilogue.interleaved,
       saves ? z : Tensor()});
  of.clear_rows_behind(y);
  if (saves) of.clear_rows_behind(z);
}

void backward_cuda(const Grads& grads, const Tensor& dy, const Tensor& x, const Tensor& weight,
                   const Tensor& offsets, const OptionalTensor& saved, const Epilogue& epilogue,
                   const Wanted& wanted) {
  const auto& [dx, dweight, dbias] = grads;
  if (x.size(0) == 0 || weight.size(0) == 0 || weight.size(1) == 0) {
    for (const Tensor& grad : {dx, dweight, dbias}) grad.zero_();
    return;
  }
  const OnDevice on(x.device());
  CudaGroups of(offsets, x.size(0));
  const Tensor nothing = at::empty({0}, x.options());
  const Tensor dz =
      epilogue.gated
          ? gate_backward_into(nothing, nothing, dy, *saved, epilogue.gate, epilogue.interleaved)
          : activation_backward_into(nothing, dy, saved, epilogue.activation);
  const Matrix rows = aligned_rows(dz);
  if (wanted[0]) {
    const CallScope part("dx");
    grouped_matmul_into(dx, rows, weight.transpose(1, 2), of.groups, Grouped::kRows);
    of.clear_rows_behind(dx);
  }
  if (wanted[1]) {
    const CallScope part("dweight");
    grouped_matmul_into(dweight, rows.t(), aligned_rows(x).t(), of.groups, Grouped::kK);
  }
  if (wanted[2]) sum_of_experts(dbias, rows.tensor, {}, of.routes);
}
#endif

template <bool kCuda>
void forward_into(const Tensor& y, const Tensor& z, const Tensor& x, const Tensor& weight,
                  const Tensor& offsets, const OptionalTensor& bias, const Epilogue& epilogue) {
#ifdef TORCHWELD_CUDA
  if constexpr (kCuda) return forward_cuda(y, z, x, weight, offsets, bias, epilogue);
#endif
  forward_cpu(y, z, x, weight, offsets, bias, epilogue);
}

template <bool kCuda>
void backward_into(const Grads& grads, const Tensor& dy, const Tensor& x, const Tensor& weight,
                   const Tensor& offsets, const OptionalTensor& saved, const Epilogue& epilogue,
                   const Wanted& wanted) {
#ifdef TORCHWELD_CUDA
  if constexpr (kCuda) return backward_cuda(grads, dy, x, weight, offsets, saved, epilogue, wanted);
#endif
  backward_cpu(grads, dy, x, weight, offsets, saved, epilogue, wanted);
}

// The kernels of both ops.
Tensor grouped_linear_meta(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                           const OptionalTensor& bias, c10::string_view activation) {
  const char* op = "grouped_linear";
  return allocate(op, x, weight, offsets, bias, activates(op, activation));
}
TW_OP(grouped_linear);

template <bool kCuda>
Tensor grouped_linear_run(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                          const OptionalTensor& bias, c10::string_view activation) {
  const Tensor y = grouped_linear_meta(x, weight, offsets, bias, activation);
  forward_into<kCuda>(y, {}, x, weight, offsets, bias, activates("grouped_linear", activation));
  return y;
}

Forward grouped_linear_forward_meta(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                                    const OptionalTensor& bias, c10::string_view activation) {
  const char* op = "grouped_linear_forward";
  return allocate_both(op, x, weight, offsets, bias, activates(op, activation));
}
TW_OP(grouped_linear_forward);

template <bool kCuda>
Forward grouped_linear_forward_run(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                                   const OptionalTensor& bias, c10::string_view activation) {
  auto [y, z] = grouped_linear_forward_meta(x, weight, offsets, bias, activation);
  forward_into<kCuda>(y, z, x, weight, offsets, bias,
                      activates("grouped_linear_forward", activation));
  return {y, z};
}

Grads grouped_linear_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                   const Tensor& offsets, const OptionalTensor& preact,
                                   c10::string_view activation, Wanted output_mask) {
  const char* op = "grouped_linear_backward";
  return allocate_grads(op, dy, x, weight, offsets, preact, activates(op, activation), output_mask);
}
TW_OP(grouped_linear_backward);

template <bool kCuda>
Grads grouped_linear_backward_run(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                  const Tensor& offsets, const OptionalTensor& preact,
                                  c10::string_view activation, Wanted output_mask) {
  const Grads grads =
      grouped_linear_backward_meta(dy, x, weight, offsets, preact, activation, output_mask);
  backward_into<kCuda>(grads, dy, x, weight, offsets, preact,
                       activates("grouped_linear_backward", activation), output_mask);
  return grads;
}

Tensor grouped_gated_linear_meta(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                                 const OptionalTensor& bias, c10::string_view gate,
                                 bool interleaved) {
  const char* op = "grouped_gated_linear";
  return allocate(op, x, weight, offsets, bias, gates(op, gate, interleaved));
}
TW_OP(grouped_gated_linear);

template <bool kCuda>
Tensor grouped_gated_linear_run(const Tensor& x, const Tensor& weight, const Tensor& offsets,
                                const OptionalTensor& bias, c10::string_view gate,
                                bool interleaved) {
  const Tensor y = grouped_gated_linear_meta(x, weight, offsets, bias, gate, interleaved);
  forward_into<kCuda>(y, {}, x, weight, offsets, bias,
                      gates("grouped_gated_linear", gate, interleaved));
  return y;
}

Forward grouped_gated_linear_forward_meta(const Tensor& x, const Tensor& weight,
                                          const Tensor& offsets, const OptionalTensor& bias,
                                          c10::string_view gate, bool interleaved) {
  const char* op = "grouped_gated_linear_forward";
  return allocate_both(op, x, weight, offsets, bias, gates(op, gate, interleaved));
}
TW_OP(grouped_gated_linear_forward);

template <bool kCuda>
Forward grouped_gated_linear_forward_run(const Tensor& x, const Tensor& weight,
                                         const Tensor& offsets, const OptionalTensor& bias,
                                         c10::string_view gate, bool interleaved) {
  auto [y, z] = grouped_gated_linear_forward_meta(x, weight, offsets, bias, gate, interleaved);
  forward_into<kCuda>(y, z, x, weight, offsets, bias,
                      gates("grouped_gated_linear_forward", gate, interleaved));
  return {y, z};
}

Grads grouped_gated_linear_backward_meta(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                         const Tensor& offsets, const Tensor& z,
                                         c10::string_view gate, bool interleaved,
                                         Wanted output_mask) {
  const char* op = "grouped_gated_linear_backward";
  return allocate_grads(op, dy, x, weight, offsets, z, gates(op, gate, interleaved), output_mask);
}
TW_OP(grouped_gated_linear_backward);

template <bool kCuda>
Grads grouped_gated_linear_backward_run(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                        const Tensor& offsets, const Tensor& z,
                                        c10::string_view gate, bool interleaved,
                                        Wanted output_mask) {
  const Grads grads =
      grouped_gated_linear_backward_meta(dy, x, weight, offsets, z, gate, interleaved, output_mask);
  backward_into<kCuda>(grads, dy, x, weight, offsets, z,
                       gates("grouped_gated_linear_backward", gate, interleaved), output_mask);
  return grads;
}

struct GroupedLinearFunction : torch::autograd::Function<GroupedLinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const Tensor& offsets, const OptionalTensor& bias,
                               c10::string_view activation) {
    auto [y, preact] = call_grouped_linear_forward.below(x, weight, offsets, bias, activation);
    const Activation act = activates("grouped_linear", activation).activation;
    const Tensor saved = saves_preact(act) ? preact : needs_preact(act) ? y : Tensor();
    ctx->save_for_backward({x, weight, offsets, saved});
    Donation::prepare(ctx);
    ctx->saved_data["activation"] = activation;
    ctx->saved_data["bias"] = is_given(bias);
    return outputs_of(ctx, {y, preact});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(5);
    const auto saved = ctx->get_saved_variables();
    AskedGradients asked(ctx);
    const bool x = asked.next(), weight = asked.next();
    asked.next();  // offsets
    const Wanted wanted = {x, weight, asked.next(ctx->saved_data["bias"].toBool())};
    const Donation preact(ctx, saved[3], grads[0]);
    auto [dx, dweight, dbias] =
        call_grouped_linear_backward(grads[0], saved[0], saved[1], saved[2], optional(saved[3]),
                                     ctx->saved_data["activation"].toStringRef(), wanted);
    return {if_wanted(wanted[0], dx), if_wanted(wanted[1], dweight), Tensor(),
            if_wanted(wanted[2], dbias), Tensor()};
  }
};

struct GroupedGatedLinearFunction : torch::autograd::Function<GroupedGatedLinearFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const Tensor& offsets, const OptionalTensor& bias,
                               c10::string_view gate, bool interleaved) {
    auto [y, z] =
        call_grouped_gated_linear_forward.below(x, weight, offsets, bias, gate, interleaved);
    ctx->save_for_backward({x, weight, offsets, z});
    Donation::prepare(ctx);
    ctx->saved_data["gate"] = gate;
    ctx->saved_data["interleaved"] = interleaved;
    ctx->saved_data["bias"] = is_given(bias);
    return outputs_of(ctx, {y, z});
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(6);
    const auto saved = ctx->get_saved_variables();
    AskedGradients asked(ctx);
    const bool x = asked.next(), weight = asked.next();
    asked.next();  // offsets
    const Wanted wanted = {x, weight, asked.next(ctx->saved_data["bias"].toBool())};
    const Donation z(ctx, saved[3], grads[0]);
    auto [dx, dweight, dbias] = call_grouped_gated_linear_backward(
        grads[0], saved[0], saved[1], saved[2], saved[3], ctx->saved_data["gate"].toStringRef(),
        ctx->saved_data["interleaved"].toBool(), wanted);
    return {if_wanted(wanted[0], dx),
            if_wanted(wanted[1], dweight),
            Tensor(),
            if_wanted(wanted[2], dbias),
            Tensor(),
            Tensor()};
  }
};

// The kernels of an op, whose function op##_run has one parameter: whether it runs on a GPU.
#define TW_GROUPED(op)                                                  \
  Kernels {                                                             \
    torch::CppFunction(op##_meta), torch::CppFunction(op##_run<false>), \
        TW_CUDA_KERNEL(op##_run<true>)                                  \
  }

void linear_checks(const char* op, const Tensor& x, const Tensor& weight, const Tensor& offsets,
                   const OptionalTensor& bias, c10::string_view activation) {
  check(op, x, weight, offsets, bias, activates(op, activation));
}

void gated_checks(const char* op, const Tensor& x, const Tensor& weight, const Tensor& offsets,
                  const OptionalTensor& bias, c10::string_view gate, bool interleaved) {
  check(op, x, weight, offsets, bias, gates(op, gate, interleaved));
}

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  const std::string inputs = "(Tensor x, Tensor weight, Tensor offsets, Tensor? bias=None, *, ",
                    activation = "str activation=\"none\"",
                    gate = "str gate=\"swiglu\", bool interleaved=False",
                    grads = ", bool[3] output_mask) -> (Tensor dx, Tensor dweight, Tensor dbias)";
  define_op(m, "grouped_linear" + inputs + activation + ") -> Tensor", TW_GROUPED(grouped_linear),
            recorded_by<GroupedLinearFunction>(call_grouped_linear, linear_checks));
  define_op(m, "grouped_linear_forward" + inputs + activation + ") -> (Tensor y, Tensor preact)",
            TW_GROUPED(grouped_linear_forward),
            recorded_by<GroupedLinearFunction>(call_grouped_linear_forward));
  define_op(m,
            "grouped_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor offsets, "
            "Tensor? preact=None, *, " +
                activation + grads,
            TW_GROUPED(grouped_linear_backward), no_gradient_function());
  define_op(m, "grouped_gated_linear" + inputs + gate + ") -> Tensor",
            TW_GROUPED(grouped_gated_linear),
            recorded_by<GroupedGatedLinearFunction>(call_grouped_gated_linear, gated_checks));
  define_op(m, "grouped_gated_linear_forward" + inputs + gate + ") -> (Tensor y, Tensor z)",
            TW_GROUPED(grouped_gated_linear_forward),
            recorded_by<GroupedGatedLinearFunction>(call_grouped_gated_linear_forward));
  define_op(m,
            "grouped_gated_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor offsets, "
            "Tensor z, *, " +
                gate + grads,
            TW_GROUPED(grouped_gated_linear_backward), no_gradient_function());
  define_autocast(m, call_grouped_linear);
  define_autocast(m, call_grouped_linear_forward);
  define_autocast(m, call_grouped_gated_linear);
  define_autocast(m, call_grouped_gated_linear_forward);
}

}  // namespace
}  // namespace torchweld::grouped_linear_op
