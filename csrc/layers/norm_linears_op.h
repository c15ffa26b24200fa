// Defines an op and its gradient. The op normalises the rows of x once and multiplies the
// normalised rows by several weights:
//   y_i = norm(x) @ weight_i.T + bias_i
//   x (..., K), weight_i (N_i, K), bias_i (N_i,), y_i (..., N_i)
//
// <op>_forward returns all y_i and then the statistics of the rows (layers/norm_linear_op.h).
// <op>_backward returns dx, all dweight_i, all dbias_i and the gradients of the norm's vectors.
// Both return one flat list, because DTensor supports no op that returns a list and other results.
//
// The backward computes the normalised rows again. The gradient of the normalised rows is the sum
// of dy_i @ weight_i over all i. This sum is computed as one product of the concatenated dy_i and
// the concatenated weight_i, so no further pass adds gradients.
#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <string>

#include "layers/norm_linear_op.h"

namespace torchweld {

// `Norm` has the members that layers/norm_linear_op.h lists. The index packs are the ones of
// NormLinear.
template <typename Norm, typename = std::make_index_sequence<Norm::kVectors.size()>,
          typename = std::make_index_sequence<Norm::kStatistics.size()>,
          typename = std::make_index_sequence<Norm::kHasOffset>>
struct NormLinears;

template <typename Norm, size_t... v, size_t... s, size_t... o>
struct NormLinears<Norm, std::index_sequence<v...>, std::index_sequence<s...>,
                   std::index_sequence<o...>> {
  using Vectors = NormVectors<sizeof...(v)>;
  using Statistics = NormStatistics<sizeof...(s)>;
  using Tensors = std::vector<Tensor>;
  // Whether the gradients of x, the weights, the biases and the vectors are requested.
  using Mask = std::array<bool, 3 + sizeof...(v)>;

  // The gradients that <op>_backward returns for `count` weights. The order is: the gradient of x,
  // the gradients of the weights, of the biases, and of the norm's vectors.
  struct Grads {
    Tensors all;
    size_t count;

    const Tensor& x() const { return all[0]; }
    at::TensorList weights() const { return at::TensorList(all).slice(1, count); }
    at::TensorList biases() const { return at::TensorList(all).slice(1 + count, count); }
    const Tensor& vector(size_t i) const { return all[1 + 2 * count + i]; }
  };

  // Returns weight_offset, or 0 if the op has none.
  static double offset_of(Repeat<double, o>... weight_offset) {
    return (weight_offset + ... + 0.0);
  }

  static std::string name_of(const char* list, size_t i) {
    return std::string(list) + "[" + std::to_string(i) + "]";
  }

  // Checks everything but the biases and eps.
  static void check_tensors(const char* op, const Tensor& x, at::TensorList weights,
                            const Vectors& vectors, double weight_offset) {
    TW_CHECK(!weights.empty(), op, "weights must hold at least one weight (N, K), but got none");
    for (size_t i = 0; i < weights.size(); ++i) {
      check_linear(op, x, name_of("weights", i).c_str(), weights[i], std::nullopt);
    }
    (check_vector(op, Norm::kVectors[v], vectors[v], x.sym_size(-1), "(K,)", x), ...);
    check_weight_offset(op, Norm::kVectors[0], vectors[0], weight_offset);
  }

  static void check(const char* op, const Tensor& x, at::TensorList weights, at::TensorList biases,
                    Repeat<const OptionalTensor&, v>... vectors, double eps,
                    Repeat<double, o>... weight_offset) {
    check_tensors(op, x, weights, {vectors...}, offset_of(weight_offset...));
    TW_CHECK(biases.empty() || biases.size() == weights.size(), op,
             "biases must be empty or hold one bias for each weight, but got ", biases.size(),
             " for ", weights.size(), " weights");
    for (size_t i = 0; i < biases.size(); ++i) {
      check_vector(op, name_of("biases", i).c_str(), biases[i], weights[i].sym_size(0), "(N,)", x);
    }
    check_eps(op, eps);
  }

  static Tensors op_meta(const Tensor& x, at::TensorList weights, OptionalList biases,
                         Repeat<const OptionalTensor&, v>... vectors, double eps,
                         Repeat<double, o>... weight_offset) {
    check(Norm::kOp, x, weights, plain(biases), vectors..., eps, weight_offset...);
    return empty_results(x, weights);
  }

  static Tensors forward_meta(const Tensor& x, at::TensorList weights, OptionalList biases,
                              Repeat<const OptionalTensor&, v>... vectors, double eps,
                              Repeat<double, o>... weight_offset) {
    check(Norm::kForward, x, weights, plain(biases), vectors..., eps, weight_offset...);
    Tensors results = empty_results(x, weights);
    for (size_t i = 0; i < sizeof...(s); ++i) {
      results.push_back(at::empty_symint(without_last(x), x.options().dtype(acc_dtype(x))));
    }
    return results;
  }

  static Tensors backward_meta(at::TensorList dys, const Tensor& x, at::TensorList weights,
                               Repeat<const OptionalTensor&, v>... vectors,
                               Repeat<const Tensor&, s>... statistics, Mask output_mask,
                               Repeat<double, o>... weight_offset) {
    const char* op = Norm::kBackward;
    check_tensors(op, x, weights, {vectors...}, offset_of(weight_offset...));
    TW_CHECK(dys.size() == weights.size(), op, "dys must hold one gradient for each weight, but ",
             "got ", dys.size(), " for ", weights.size(), " weights");
    for (size_t i = 0; i < dys.size(); ++i) {
      const std::string name = name_of("dys", i);
      check_like(op, name.c_str(), dys[i], "x", x);
      check_shape(op, name.c_str(), dys[i], with_last(x, weights[i].sym_size(0)), "(..., N)");
    }
    (check_statistic(op, Norm::kStatistics[s], statistics, x), ...);
    Tensors grads = {empty_input_grad(x, output_mask[0])};
    for (const Tensor& weight : weights) {
      grads.push_back(empty_weight_grad(weight, output_mask[1]));
    }
    for (const Tensor& weight : weights) {
      grads.push_back(empty_vector_grad(weight, weight.sym_size(0), output_mask[2]));
    }
    (grads.push_back(empty_vector_grad(x, x.sym_size(-1), output_mask[3 + v] && is_given(vectors))),
     ...);
    return grads;
  }

  static Tensors op_cpu(const Tensor& x, at::TensorList weights, OptionalList biases,
                        Repeat<const OptionalTensor&, v>... vectors, double eps,
                        Repeat<double, o>... weight_offset) {
    Tensors ys = op_meta(x, weights, biases, vectors..., eps, weight_offset...);
    linears_into(ys, Norm::normalise(x, {vectors...}, eps, offset_of(weight_offset...)).first,
                 weights, plain(biases));
    return ys;
  }

  static Tensors forward_cpu(const Tensor& x, at::TensorList weights, OptionalList biases,
                             Repeat<const OptionalTensor&, v>... vectors, double eps,
                             Repeat<double, o>... weight_offset) {
    Tensors results = forward_meta(x, weights, biases, vectors..., eps, weight_offset...);
    const auto [normalised, statistics] =
        Norm::normalise(x, {vectors...}, eps, offset_of(weight_offset...));
    for (size_t i = 0; i < sizeof...(s); ++i) results[weights.size() + i].copy_(statistics[i]);
    linears_into(results, normalised, weights, plain(biases));
    return results;
  }

  static Tensors backward_cpu(at::TensorList dys, const Tensor& x, at::TensorList weights,
                              Repeat<const OptionalTensor&, v>... vectors,
                              Repeat<const Tensor&, s>... statistics, Mask output_mask,
                              Repeat<double, o>... weight_offset) {
    Tensors all =
        backward_meta(dys, x, weights, vectors..., statistics..., output_mask, weight_offset...);
    const size_t count = weights.size();
    const double offset = offset_of(weight_offset...);
    const Tensors dzs = matrices_of(dys);
    if (output_mask[1]) {
      const Tensor normalised =
          as_matrix(Norm::normalise_again(x, {vectors...}, {statistics...}, offset));
      for (size_t i = 0; i < count; ++i) matmul_into_cpu(all[1 + i], dzs[i].t(), normalised);
    }
    for (size_t i = 0; output_mask[2] && i < count; ++i) sum_into(all[1 + count + i], dzs[i], 0);
    const bool wants_rows = output_mask[0] || (output_mask[3 + v] || ...);
    const Grads grads = {all, count};
    if (wants_rows && x.numel() == 0) {
      (grads.vector(v).zero_(), ...);
    } else if (wants_rows) {
      Tensor dnormalised = at::empty({count_rows(x), x.size(-1)}, x.options());
      if (count == 1) {
        matmul_into_cpu(dnormalised, dzs[0], weights[0]);
      } else {
        matmul_into_cpu(dnormalised, at::cat(dzs, 1), at::cat(weights, 0));
      }
      Norm::backward({grads.x(), grads.vector(v)...}, dnormalised.view(x.sizes()), x, {vectors...},
                     {statistics...}, offset);
    }
    return all;
  }

#ifdef TORCHWELD_CUDA
  // Computes y_i for each weight. `out` receives the statistics of the rows if it has tensors.
  static void forward_into(at::TensorList ys, const Tensor& x, at::TensorList weights,
                           at::TensorList biases, const RowNorm& norm, double eps,
                           const RowStatistics& out = {}) {
    const OnDevice on(x.device());
    const Matrix rows = rows_of(x);
    const auto epilogue = [&](size_t i) {
      return MatmulEpilogue{biases.empty() ? std::nullopt : OptionalTensor(biases[i])};
    };
    // If x has only few rows, each matmul normalises them itself.
    const bool in_matmul = std::all_of(weights.begin(), weights.end(), [&](const Tensor& weight) {
      return matmul_supports_norm(rows, weight);
    });
    const Tensor normalised = in_matmul ? Tensor() : norm_rows(norm, x, eps, out);
    for (size_t i = 0; i < weights.size(); ++i) {
      if (in_matmul) {
        norm_matmul_into(rows_of(ys[i]), norm, x, eps, weights[i], epilogue(i),
                         i == 0 ? out : RowStatistics());
      } else {
        matmul_into(rows_of(ys[i]), normalised, weights[i], epilogue(i));
      }
    }
  }

  static Tensors op_cuda(const Tensor& x, at::TensorList weights, OptionalList biases,
                         Repeat<const OptionalTensor&, v>... vectors, double eps,
                         Repeat<double, o>... weight_offset) {
    Tensors ys = op_meta(x, weights, biases, vectors..., eps, weight_offset...);
    forward_into(ys, x, weights, plain(biases),
                 row_norm(Vectors{vectors...}, offset_of(weight_offset...)), eps);
    return ys;
  }

  static Tensors forward_cuda(const Tensor& x, at::TensorList weights, OptionalList biases,
                              Repeat<const OptionalTensor&, v>... vectors, double eps,
                              Repeat<double, o>... weight_offset) {
    Tensors results = forward_meta(x, weights, biases, vectors..., eps, weight_offset...);
    forward_into(results, x, weights, plain(biases),
                 row_norm(Vectors{vectors...}, offset_of(weight_offset...)), eps,
                 statistics_of(Statistics{results[weights.size() + s]...}));
    return results;
  }

  static Tensors backward_cuda(at::TensorList dys, const Tensor& x, at::TensorList weights,
                               Repeat<const OptionalTensor&, v>... vectors,
                               Repeat<const Tensor&, s>... statistics, Mask output_mask,
                               Repeat<double, o>... weight_offset) {
    const Grads grads = {
        backward_meta(dys, x, weights, vectors..., statistics..., output_mask, weight_offset...),
        weights.size()};
    const OnDevice on(x.device());
    const Tensor nothing = empty_vector_grad(x, 0, /*wanted=*/false);
    const std::array<Tensor, 3> dvectors = {grads.vector(v)..., nothing};
    norm_matmuls_backward_into(
        grads.x(), output_mask[1] ? grads.weights() : at::TensorList(),
        output_mask[2] ? grads.biases() : at::TensorList(), dvectors[0], dvectors[1],
        output_mask[0], row_norm(Vectors{vectors...}, offset_of(weight_offset...)),
        matrices_of(dys), x, weights, statistics_of(Statistics{statistics...}));
    return grads.all;
  }
#endif

  using Call = NamedOpCall<decltype(op_meta), &Norm::kOp>;
  using ForwardCall = NamedOpCall<decltype(forward_meta), &Norm::kForward>;
  using BackwardCall = NamedOpCall<decltype(backward_meta), &Norm::kBackward>;

  struct Function : torch::autograd::Function<Function> {
    static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights,
                                 at::TensorList biases, Repeat<const OptionalTensor&, v>... vectors,
                                 double eps, Repeat<double, o>... weight_offset) {
      Tensors results = ForwardCall().below(x, weights, biases, vectors..., eps, weight_offset...);
      variable_list saved = {x, or_undefined(vectors)..., results[weights.size() + s]...};
      saved.insert(saved.end(), weights.begin(), weights.end());
      results.resize(weights.size());
      ctx->save_for_backward(std::move(saved));
      ctx->set_materialize_grads(false);
      ctx->saved_data["biases"] = static_cast<int64_t>(biases.size());
      ((ctx->saved_data["weight_offset"] = weight_offset), ...);
      return results;
    }

    static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
      constexpr size_t kFirstWeight = 1 + sizeof...(v) + sizeof...(s);
      const size_t count = grads.size(), biases = ctx->saved_data["biases"].toInt();
      // The gradients of all inputs of `forward`. Autograd expects an entry for eps and
      // weight_offset too.
      variable_list inputs(2 + count + biases + sizeof...(v) + sizeof...(o));
      const auto given = std::find_if(grads.begin(), grads.end(),
                                      [](const Tensor& grad) { return grad.defined(); });
      if (given == grads.end()) return inputs;
      const auto saved = ctx->get_saved_variables();
      const Tensor &x = saved[0], *vectors = &saved[1], *statistics = vectors + sizeof...(v);
      const at::TensorList weights(&saved[kFirstWeight], count);
      Tensors dys = grads;
      for (size_t i = 0; i < count; ++i) {
        if (!dys[i].defined()) {
          dys[i] = at::zeros_symint(with_last(x, weights[i].sym_size(0)), given->options());
        }
      }
      AskedGradients asked(ctx);
      const Mask wanted = {asked.next(), asked.any_of_next(count), asked.any_of_next(biases),
                           asked.next(vectors[v].defined())...};
      const Grads results = {
          BackwardCall()(dys, x, weights, optional(vectors[v])..., statistics[s]..., wanted,
                         Repeat<at::IValue, o>(ctx->saved_data["weight_offset"]).toDouble()...),
          count};
      inputs[0] = if_wanted(wanted[0], results.x());
      for (size_t i = 0; i < count; ++i) {
        inputs[1 + i] = if_wanted(wanted[1], results.weights()[i]);
        if (wanted[2]) inputs[1 + count + i] = results.biases()[i];
      }
      ((inputs[1 + count + biases + v] = if_wanted(wanted[3 + v], results.vector(v))), ...);
      return inputs;
    }
  };

  // Registers the ops <op>, <op>_forward and <op>_backward, and the autocast kernel of <op>.
  static void define(torch::Library& m, const char* op, const char* forward, const char* backward) {
    define_op(m, op, TW_KERNELS(op), recorded_by<Function>(Call(), check));
    define_op(m, forward, TW_KERNELS(forward), no_gradient_function());
    define_op(m, backward, TW_KERNELS(backward), no_gradient_function());
    define_autocast(m, Call());
    m.impl(BackwardCall::kName,
           torch::dispatch(c10::DispatchKey::Batched,
                           torch::CppFunction::makeFromBoxedFunction<&for_each_of_batch>()));
  }

 private:
  static Tensors empty_results(const Tensor& x, at::TensorList weights) {
    Tensors ys;
    for (const Tensor& weight : weights) {
      ys.push_back(empty_result(x, with_last(x, weight.sym_size(0))));
    }
    return ys;
  }

  static Tensors matrices_of(at::TensorList tensors) {
    Tensors matrices;
    for (const Tensor& t : tensors) matrices.push_back(as_matrix(t));
    return matrices;
  }

  static void linears_into(Tensors& ys, const Tensor& normalised, at::TensorList weights,
                           at::TensorList biases) {
    for (size_t i = 0; i < weights.size(); ++i) {
      if (ys[i].numel() == 0) continue;
      linear_into(ys[i], normalised, weights[i],
                  biases.empty() ? std::nullopt : OptionalTensor(biases[i]));
    }
  }
};

}  // namespace torchweld
