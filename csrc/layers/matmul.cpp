// Operands that cp.async can't read in whole 16-byte pieces are copied first: odd K, odd strides,
// misaligned bases. To read them in place would need a variable source size, which costs ten
// instructions a piece in every product.
#include "layers/matmul.h"

#ifdef TORCHWELD_CUDA

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>

#include "core/choices.h"
#include "core/counters.h"
#include "core/cuda_inputs.h"
#include "core/launch.h"
#include "gemm/family.h"
#include "gemm/gemm.h"
#include "pointwise/pointwise.h"

namespace torchweld {
namespace {

// Elements of a 16-byte piece, in which the kernels read.
int64_t piece_of(const Tensor& t) { return 16 / t.element_size(); }

// t (batch, rows, K) with strides that the kernels take, or a copy with K adjacent and filled up
// with zeros to whole pieces.
struct Operand {
  Tensor tensor;
  bool k_major = true;

  Operand(const Tensor& t, int64_t halves, bool interleaved) : tensor(t) {
    const int64_t rows = t.size(1), k = t.size(2), piece = piece_of(t);
    const bool base = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 &&
                      (t.size(0) == 1 || t.stride(0) % piece == 0);
    if (base && k % piece == 0 && t.stride(2) == 1 && (rows == 1 || t.stride(1) % piece == 0)) {
      return;
    }
    // Eight rows that are read together belong to one half of a gated product.
    const bool whole = halves == 1 ? rows % piece == 0 : !interleaved && rows / 2 % 8 == 0;
    if (base && whole && t.stride(1) == 1 && (k == 1 || t.stride(2) % piece == 0)) {
      k_major = false;
      return;
    }
    const int64_t width = (k + piece - 1) / piece * piece;
    tensor = at::empty({t.size(0), rows, width}, t.options());
    tensor.narrow(2, 0, k).copy_(t);
    if (width > k) tensor.narrow(2, k, width - k).zero_();
  }

  GemmOperand params(int64_t batch) const {
    // A dim of size 1 may have any stride; the kernels see a harmless one.
    const int64_t row_stride = k_major ? (tensor.size(1) == 1 ? 0 : tensor.stride(1)) : 1;
    const int64_t k_stride = k_major ? 1 : (tensor.size(2) == 1 ? 0 : tensor.stride(2));
    const bool shared = batch == 1 || tensor.size(0) == 1;
    return {tensor.const_data_ptr(), row_stride, k_stride, shared ? 0 : tensor.stride(0)};
  }
};

// A vector that starts on a 16-byte boundary.
OptionalTensor aligned_vector(const OptionalTensor& t) {
  if (!is_given(t)) return std::nullopt;
  const Tensor dense = t->contiguous();
  const bool aligned = reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0;
  return aligned ? dense : dense.clone();
}

bool batched_matmul_into(const Tensor& y, const Tensor& a, const Tensor& b,
                         const MatmulEpilogue& epilogue, const MatmulNorm* norm = nullptr) {
  if (y.numel() == 0) return false;
  const int64_t batch = y.size(0), m = y.size(1), n = y.size(2);
  if (n > 1 && y.stride(2) != 1) {
    // The transposed product writes the same memory; only a plain one can be turned.
    const Tensor turned = y.transpose(1, 2);
    const bool plain = !is_given(epilogue.bias) && epilogue.activation == Activation::kNone &&
                       !epilogue.gated && !epilogue.preact.defined() && norm == nullptr;
    if (plain && (m == 1 || turned.stride(2) == 1)) {
      batched_matmul_into(turned, b, a, {});
      return false;
    }
    const Tensor dense = at::empty(y.sizes(), y.options());
    const bool sums = batched_matmul_into(dense, a, b, epilogue, norm);
    y.copy_(dense);
    return sums;
  }
  const Operand in_a(a, 1, false), in_b(b, epilogue.gated ? 2 : 1, epilogue.interleaved);
  const Vector bias(epilogue.bias);
  GemmParams p{};
  p.m = m;
  p.n = n;
  p.k = a.size(2);
  p.batch = batch;
  p.a = in_a.params(batch);
  p.b = in_b.params(batch);
  p.y = y.mutable_data_ptr();
  p.y_row_stride = y.stride(1);
  p.y_batch_stride = y.stride(0);
  p.dtype = dtype_of(y);
  p.tf32 = matmul_may_use_tf32(y);
  p.epilogue.bias = bias.data();
  p.epilogue.bias_fp32 = is_given(epilogue.bias) && epilogue.bias->scalar_type() == at::kFloat;
  p.epilogue.activation = epilogue.activation;
  p.epilogue.gated = epilogue.gated;
  p.epilogue.gate = epilogue.gate;
  p.epilogue.interleaved = epilogue.interleaved;
  p.epilogue.preact = epilogue.preact.defined() ? mutable_data<void>(epilogue.preact) : nullptr;
  OptionalTensor scale, shift;
  if (norm != nullptr) {
    scale = aligned_vector(norm->norm.scale);
    shift = aligned_vector(norm->norm.shift);
    const auto out = [](const OptionalTensor& t) {
      return is_given(t) ? mutable_data<float>(*t) : nullptr;
    };
    p.norm.given = true;
    p.norm.centred = norm->norm.centred;
    p.norm.eps = static_cast<float>(norm->eps);
    p.norm.scale = is_given(scale) ? const_data<void>(*scale) : nullptr;
    p.norm.shift = is_given(shift) ? const_data<void>(*shift) : nullptr;
    p.norm.mean = out(norm->out.mean);
    p.norm.rstd = out(norm->out.rstd);
  }
  const GemmProblem problem{m,
                            n,
                            p.k,
                            batch,
                            epilogue.gated,
                            epilogue.gated || epilogue.activation != Activation::kNone,
                            gemm_math(p.dtype, p.tf32),
                            p.a.k_stride == 1,
                            p.b.k_stride == 1,
                            norm != nullptr,
                            device_facts()};
  p.choice = pick<GemmFamily>(problem);
  TORCH_CHECK(p.choice.splits >= 0, "torchweld: no tile of the matmul engine takes a product of ",
              m, " x ", n, " x ", p.k, " in a batch of ", batch, "; cut it into smaller ones");
  Tensor workspace, flags, written, row_parts;
  if (const int64_t floats = p.choice.workspace_floats(problem); floats > 0) {
    workspace = p.choice.splits == kStreamK ? kept_floats(floats, y)
                                            : at::empty({floats}, y.options().dtype(at::kFloat));
    p.workspace = mutable_data<float>(workspace);
  }
  if (const int64_t count = p.choice.flags(problem); count > 0) {
    flags = block_flags(count, y);
    p.flags = mutable_data<uint64_t>(flags);
  }
  if (const int64_t bytes = gemm_written_bytes(p); bytes > 0) {
    written = at::empty({bytes}, y.options().dtype(at::kByte));
    p.written = written.mutable_data_ptr();
  }
  const int64_t parts = epilogue.row_sums.defined() ? p.choice.row_parts(problem) : 0;
  if (parts > 0) {
    row_parts = at::empty({parts, m}, y.options().dtype(at::kFloat));
    p.row_parts = mutable_data<float>(row_parts);
  }
  launch_gemm(p, current_stream());
  if (parts == 0) return false;
  launch_partial_sums({p.row_parts, epilogue.row_sums.mutable_data_ptr(), parts, m, p.dtype},
                      current_stream());
  return true;
}

}  // namespace

bool matmul_may_use_tf32(const Tensor& t) {
  return t.scalar_type() == at::kFloat &&
         at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
             at::Float32Precision::TF32;
}

bool matmul_takes_norm(const Tensor& a, const Tensor& b) {
  if (a.stride(1) != 1 || b.size(0) == 0) return false;
  GemmProblem problem{};
  problem.m = a.size(0);
  problem.n = b.size(0);
  problem.k = a.size(1);
  problem.batch = 1;
  problem.math = gemm_math(dtype_of(a), /*tf32=*/false);
  problem.a_k_major = problem.b_k_major = problem.normed = true;
  problem.device = device_facts();
  return std::any_of(std::begin(kRowsTiles), std::end(kRowsTiles),
                     [&](const RowsTile& tile) { return !rows_refusal(problem, tile, 1); });
}

bool matmul_into(const Tensor& y, const Tensor& a, const Tensor& b, const MatmulEpilogue& epilogue,
                 const MatmulNorm* norm) {
  if (y.dim() == 3) return batched_matmul_into(y, a, b, epilogue, norm);
  return batched_matmul_into(y.unsqueeze(0), a.unsqueeze(0), b.unsqueeze(0), epilogue, norm);
}

}  // namespace torchweld

#endif
