// Helpers for the CUDA ops with one matmul. They compute the norm of the rows of x, and the
// gradients of the norm, the activation and the matmul. This is host code for CUDA builds only.
#pragma once

#include <limits>

#include "core/choices.h"
#include "core/cuda_inputs.h"
#include "core/linear_common.h"
#include "layers/activation.h"
#include "layers/donation.h"
#include "layers/matmul.h"
#include "layers/norms.h"
#include "norm/norm.h"
#include "pointwise/column_split.h"
#include "pointwise/pointwise.h"

namespace torchweld {

// Allocates a scratch matrix (rows, n). Its rows start on 16-byte boundaries, so that the matmul
// need not copy it.
inline Tensor empty_matrix(int64_t rows, int64_t n, const Tensor& like) {
  const int64_t chunk = 16 / like.element_size();
  return at::empty({rows, (n + chunk - 1) / chunk * chunk}, like.options()).narrow(1, 0, n);
}

// Returns a scratch matrix with the shape of x. The rows of the matrix start on 16-byte boundaries.
// The matrix uses the memory of dx if dx is requested and the rows of dx start on such boundaries.
inline Tensor matrix_under(const Tensor& dx, const Tensor& x) {
  const bool reuses_dx = dx.numel() > 0 && x.size(-1) * x.element_size() % 16 == 0;
  return reuses_dx ? as_matrix(dx) : empty_matrix(count_rows(x), x.size(-1), x);
}

// Returns a scratch matrix for dz. It uses the memory of the pre-activation (..., N) if the
// pre-activation is donated and its rows start on 16-byte boundaries.
inline Tensor matrix_over(const Tensor& preact) {
  const bool reuses_preact = Donation::gives(preact) && preact.is_contiguous() &&
                             preact.size(-1) * preact.element_size() % 16 == 0;
  return reuses_preact ? as_matrix(preact)
                       : empty_matrix(count_rows(preact), preact.size(-1), preact);
}

// Returns the norm that has these vectors (layers/norms.h): LayerNorm has two, and RMSNorm has one.
template <size_t kCount>
RowNorm row_norm(const NormVectors<kCount>& vectors, double weight_offset) {
  RowNorm norm = {/*centred=*/kCount == 2, vectors[0]};
  norm.scale_offset = weight_offset;
  if constexpr (kCount == 2) norm.shift = vectors[1];
  return norm;
}

template <size_t kCount>
RowStatistics statistics_of(const NormStatistics<kCount>& statistics) {
  if constexpr (kCount == 2)
    return {statistics[0], statistics[1]};
  else
    return {std::nullopt, statistics[0]};
}

inline Tensor empty_floats(int64_t count, const Tensor& like) {
  return at::empty({count}, like.options().dtype(at::kFloat));
}

// Returns the address of a result. Returns nullptr if the result is not requested, which means that
// the tensor is undefined or has size (0,).
template <typename T = void>
T* data_if_wanted(const Tensor& t) {
  return t.defined() && t.numel() > 0 ? mutable_data<T>(t) : nullptr;
}

// Returns the dtype of the norm's vectors. Without a scale, the shift has the dtype of x.
inline DType vector_dtype_of(const RowNorm& norm, const Tensor& x) {
  return dtype_of(is_given(norm.scale) ? *norm.scale : x);
}

// Normalises the rows of x. If a residual is given, stores x + residual in `sum` (contiguous),
// rounded to the dtype of x, and normalises the rows of `sum` instead. If `saved` has statistics,
// uses them; otherwise computes the statistics and stores them in `out`. If y (rows, K) is defined,
// y receives the normalised rows.
inline void run_norm(const RowNorm& norm, const Tensor& x, double eps, const RowStatistics& out,
                     const RowStatistics& saved, const Tensor& y,
                     const OptionalTensor& residual = std::nullopt, const Tensor& sum = {}) {
  if (x.numel() == 0) {
    // The mean of an empty row is NaN, as in torch.
    for (const OptionalTensor& t : {out.mean, out.rstd}) {
      if (is_given(t)) t->fill_(std::numeric_limits<double>::quiet_NaN());
    }
    return;
  }
  const Rows in(x);
  const Vector scale(norm.scale), shift(norm.shift), mean(saved.mean), rstd(saved.rstd);
  const Rows added(residual.value_or(x));
  NormParams p{};
  p.x = in.tensor.const_data_ptr();
  if (is_given(residual)) {
    p.residual = const_data<void>(added.tensor);
    p.residual_row_stride = added.row_stride;
    p.sum = sum.mutable_data_ptr();
  }
  p.scale = scale.data();
  p.shift = shift.data();
  p.saved_mean = mean.data<float>();
  p.saved_rstd = rstd.data<float>();
  p.mean = data_if_wanted<float>(out.mean.value_or(Tensor()));
  p.rstd = data_if_wanted<float>(out.rstd.value_or(Tensor()));
  p.rows = in.rows;
  p.n = in.n;
  p.x_row_stride = in.row_stride;
  if (y.defined()) {
    p.y = y.mutable_data_ptr();
    p.y_row_stride = y.stride(0);
  }
  p.eps = static_cast<float>(eps);
  p.scale_offset = static_cast<float>(norm.scale_offset);
  p.centred = norm.centred;
  p.dtype = dtype_of(x);
  p.vector_dtype = vector_dtype_of(norm, x);
  launch_norm(p, current_stream());
}

// Returns the normalised rows (rows, K) in the dtype of x. If `out` has tensors, they receive the
// statistics.
inline Tensor norm_rows(const RowNorm& norm, const Tensor& x, double eps,
                        const RowStatistics& out = {}) {
  const Tensor y = empty_matrix(count_rows(x), x.size(-1), x);
  run_norm(norm, x, eps, out, {}, y);
  return y;
}

// Computes y (rows, N) = epilogue(norm(x) @ weight.T). The function launches a single kernel if the
// matmul supports the norm.
inline void norm_matmul_into(const Matrix& y, const RowNorm& norm, const Tensor& x, double eps,
                             const Tensor& weight, const MatmulEpilogue& epilogue,
                             const RowStatistics& out = {}) {
  const Matrix rows = rows_of(x);
  if (matmul_supports_norm(rows, weight)) {
    const MatmulNorm in_front = {norm, eps, out};
    matmul_into(y, rows, weight, epilogue, &in_front);
    return;
  }
  matmul_into(y, norm_rows(norm, x, eps, out), weight, epilogue);
}

inline void row_statistics(const RowNorm& norm, const Tensor& x, double eps,
                           const RowStatistics& out) {
  run_norm(norm, x, eps, out, {}, {});
}

// Computes the gradients of a norm with respect to x, scale and shift. dy (rows, K) is the gradient
// with respect to the normalised rows. dy and dx may share memory. If dsum is given, it is added to
// dx. A gradient that is passed as a tensor of size (0,) is not computed.
inline void norm_backward_into(const Tensor& dx, const Tensor& dscale, const Tensor& dshift,
                               const RowNorm& norm, const Tensor& dy, const Tensor& x,
                               const RowStatistics& saved,
                               const OptionalTensor& dsum = std::nullopt) {
  if (x.numel() == 0) {
    dscale.zero_();
    dshift.zero_();
    return;
  }
  const Rows in_dy(dy), in_x(x), in_dsum(dsum.value_or(dy));
  const Vector scale(norm.scale), mean(saved.mean), rstd(saved.rstd);
  NormBackwardParams p{};
  p.dy = in_dy.tensor.const_data_ptr();
  p.x = in_x.tensor.const_data_ptr();
  if (is_given(dsum)) p.dsum = const_data<void>(in_dsum.tensor);
  p.scale = scale.data();
  p.mean = mean.data<float>();
  p.rstd = rstd.data<float>();
  p.dx = data_if_wanted(dx);
  p.dscale = data_if_wanted(dscale);
  p.dshift = data_if_wanted(dshift);
  p.rows = in_x.rows;
  p.n = in_x.n;
  p.dy_row_stride = in_dy.row_stride;
  p.x_row_stride = in_x.row_stride;
  p.dsum_row_stride = in_dsum.row_stride;
  p.dx_row_stride = in_x.n;
  p.scale_offset = static_cast<float>(norm.scale_offset);
  p.dtype = dtype_of(x);
  p.vector_dtype = vector_dtype_of(norm, x);
  const int64_t floats = plan_norm_backward(p).partials;
  const Tensor partials = empty_floats(floats, x);
  p.partials = data_if_wanted<float>(partials);
  if (p.dx != nullptr || floats > 0) launch_norm_backward(p, current_stream());
}

// Returns dz (rows, N) = dy * activation'(z). `preact` is y for relu, and z for other activations.
// If `preact` is donated, dz overwrites `preact`. dbias receives the sum of dz over the rows,
// unless dbias has size (0,).
inline Tensor activation_backward_into(const Tensor& dbias, const Tensor& dy,
                                       const OptionalTensor& preact, Activation activation) {
  const bool writes = needs_preact(activation);
  const Rows in_dy(dy);
  const Tensor dz = writes ? matrix_over(*preact) : as_matrix(in_dy.tensor);
  if (dy.numel() == 0) {
    dbias.zero_();
    return dz;
  }
  const bool sums = dbias.numel() > 0;
  if (!writes && !sums) return dz;
  const Rows in_z(writes ? *preact : dy);
  const Tensor partials = sums ? empty_floats(column_partials(in_dy.rows, in_dy.n), dy) : Tensor();
  launch_activation_backward(
      {in_dy.tensor.const_data_ptr(), writes ? in_z.tensor.const_data_ptr() : nullptr,
       writes ? dz.mutable_data_ptr() : nullptr, data_if_wanted(dbias),
       data_if_wanted<float>(partials), in_dy.rows, in_dy.n, in_dy.row_stride, in_z.row_stride,
       dz.stride(0), activation, dtype_of(dy)},
      current_stream());
  return dz;
}

// Whether the matmul of the weight gradient should also compute the bias gradient. This is so if
// the weight gradient is requested and there is no activation: dz is then dy, so no other kernel
// needs to read dy.
inline bool bias_beside_weight(bool wants_weight, Activation activation) {
  return wants_weight && activation == Activation::kNone;
}

// Computes dweight = dz^T @ rows. Computes dbias too, unless dbias has size (0,). `name` is the
// result's name in reports of the call.
inline void weight_backward_into(const Tensor& dweight, const Tensor& dbias, const Tensor& dz,
                                 const Matrix& rows, const char* name = "dweight") {
  const CallScope part(name);
  MatmulEpilogue epilogue;
  if (dbias.numel() > 0) epilogue.dbias = dbias;
  const bool sums = matmul_into(dweight, Matrix(dz).t(), rows.t(), epilogue);
  if (!sums) activation_backward_into(dbias, dz, std::nullopt, Activation::kNone);
}

// Computes the gradients of z = x @ weight.T with respect to x (..., K) and weight. dz (rows, N) is
// the gradient with respect to z. Computes dbias too, unless dbias has size (0,).
inline void matmul_backward_into(const Tensor& dx, const Tensor& dweight, const Tensor& dbias,
                                 bool wants_x, bool wants_weight, const Tensor& dz, const Tensor& x,
                                 const Tensor& weight) {
  if (wants_x) {
    const CallScope part("dx");
    matmul_into(rows_of(dx), dz, Matrix(weight).t());
  }
  if (wants_weight) weight_backward_into(dweight, dbias, dz, rows_of(x));
}

// Computes the gradients of z_i = norm(x) @ weight_i.T with respect to x, the weights, scale and
// shift. dz_i (rows, N_i) is the gradient with respect to z_i. dweights is empty if the weight
// gradients are not requested, and dbiases is empty if this function shall not compute the bias
// gradients. Any other gradient that is passed as a tensor of size (0,) is not computed. The
// gradient of the normalised rows overwrites the normalised rows.
inline void norm_matmuls_backward_into(const Tensor& dx, at::TensorList dweights,
                                       at::TensorList dbiases, const Tensor& dscale,
                                       const Tensor& dshift, bool wants_x, const RowNorm& norm,
                                       at::TensorList dzs, const Tensor& x, at::TensorList weights,
                                       const RowStatistics& saved) {
  const bool wants_rows = wants_x || dscale.numel() > 0 || dshift.numel() > 0;
  const Tensor rows = wants_rows || !dweights.empty() ? matrix_under(dx, x) : Tensor();
  if (!dweights.empty()) run_norm(norm, x, /*eps=*/0, {}, saved, rows);
  const Tensor nothing = empty_vector_grad(x, 0, /*wanted=*/false);
  for (size_t i = 0; i < dzs.size(); ++i) {
    const Tensor& dbias = dbiases.empty() ? nothing : dbiases[i];
    if (!dweights.empty()) {
      weight_backward_into(dweights[i], dbias, dzs[i], rows);
    } else {
      activation_backward_into(dbias, dzs[i], std::nullopt, Activation::kNone);
    }
  }
  if (!wants_rows) return;
  const CallScope part("dx");
  matmul_sum_into(rows, dzs, weights);
  norm_backward_into(dx, dscale, dshift, norm, rows, x, saved);
}

}  // namespace torchweld
