// Single-channel 2-D convolution (correlation) with a result of x's size:
//   z[b, i, j] = sum_pq weight[p, q] * x[b, i + p, j + q]
//   x, z (batch, H, W), weight (KH, KW), any sizes
// Gradients:  dx[b, i, j] = sum_pq weight[p, q] * dz[b, i - p, j - q]
//             dweight[p, q] = sum_bij dz[b, i, j] * x[b, i + p, j + q]
//
// In these formulas, x is 0 behind the bottom and the right edge of the image, and dz is 0 before
// the top and the left edge. The products with these zeros count, so an inf or NaN weight gives
// NaN. F.conv2d of a padded x does the same. The sums are accumulated in fp32 (fp64 for fp64) and
// rounded once.
#include <ATen/ops/empty.h>

#include <array>
#include <tuple>

#include "core/dispatch.h"
#include "puzzles/conv2d/cpu.h"

#ifdef TORCHWELD_CUDA
#include "core/cuda_inputs.h"
#include "puzzles/conv2d/conv2d.h"
#endif

namespace torchweld::conv2d_op {
namespace {

void check_conv2d(const char* op, const Tensor& x, const Tensor& weight) {
  check_floating(op, "x", x);
  check_dim(op, "x", x, 3, "(batch, H, W)");
  check_like(op, "weight", weight, "x", x);
  check_dim(op, "weight", weight, 2, "(KH, KW)");
}

Tensor conv2d_meta(const Tensor& x, const Tensor& weight) {
  check_conv2d("conv2d", x, weight);
  return at::empty_symint(x.sym_sizes(), x.options());
}
TW_OP(conv2d);

Grads2 conv2d_backward_meta(const Tensor& dz, const Tensor& x, const Tensor& weight,
                            std::array<bool, 2> output_mask) {
  const char* op = "conv2d_backward";
  check_conv2d(op, x, weight);
  check_like(op, "dz", dz, "x", x);
  check_shape(op, "dz", dz, x.sym_sizes(), "x's shape");
  const auto grad = [&](bool wanted, const Tensor& t) {
    return wanted ? at::empty_symint(t.sym_sizes(), t.options()) : at::empty({0}, t.options());
  };
  return {grad(output_mask[0], x), grad(output_mask[1], weight)};
}
TW_OP(conv2d_backward);

// Returns whether there is something to compute. If x or weight is empty but the result is not, the
// function fills the result with zeros and returns false.
bool has_products(Tensor& result, const Tensor& x, const Tensor& weight) {
  if (result.numel() == 0) return false;
  if (x.numel() > 0 && weight.numel() > 0) return true;
  result.zero_();
  return false;
}

Tensor conv2d_cpu(const Tensor& x, const Tensor& weight) {
  Tensor z = conv2d_meta(x, weight);
  if (has_products(z, x, weight)) conv2d_into(z, x.contiguous(), weight.contiguous(), false);
  return z;
}

Grads2 conv2d_backward_cpu(const Tensor& dz, const Tensor& x, const Tensor& weight,
                           std::array<bool, 2> output_mask) {
  auto [dx, dweight] = conv2d_backward_meta(dz, x, weight, output_mask);
  if (has_products(dx, dz, weight)) conv2d_into(dx, dz.contiguous(), weight.contiguous(), true);
  if (has_products(dweight, x, weight)) {
    conv2d_dweight_into(dweight, dz.contiguous(), x.contiguous());
  }
  return {dx, dweight};
}

#ifdef TORCHWELD_CUDA
// A tensor as a batch of images with stride 1 along the last dim. The constructor copies a tensor
// that has another stride there. The batch stride or row stride of a dim with only one element is
// not used, so the constructor sets it to 0. A stride of 0 counts as aligned.
struct Images {
  Tensor tensor;
  int64_t batch_stride, row_stride;

  explicit Images(const Tensor& t)
      : tensor(t.size(2) == 1 || t.stride(2) == 1 ? t : t.contiguous()),
        batch_stride(t.size(0) == 1 ? 0 : tensor.stride(0)),
        row_stride(t.size(1) == 1 ? 0 : tensor.stride(1)) {}
};

void convolve_cuda(Tensor& z, const Tensor& x, const Tensor& weight, bool flipped) {
  const Images in(x);
  const Tensor taps = weight.contiguous();
  launch_conv2d({in.tensor.const_data_ptr(), taps.const_data_ptr(), z.mutable_data_ptr(), x.size(0),
                 x.size(1), x.size(2), weight.size(0), weight.size(1), in.batch_stride,
                 in.row_stride, flipped, dtype_of(x)},
                current_stream());
}

void dweight_cuda(Tensor& dweight, const Tensor& dz, const Tensor& x) {
  const Images in_dz(dz), in_x(x);
  const Conv2dWeightSplit split =
      split_conv2d_dweight(x.size(0), x.size(1), x.size(2), dweight.size(0), dweight.size(1));
  Tensor partials = at::empty({split.partials()}, x.options().dtype(at::kFloat));
  launch_conv2d_dweight({in_dz.tensor.const_data_ptr(), in_x.tensor.const_data_ptr(),
                         dweight.mutable_data_ptr(), mutable_data<float>(partials), x.size(0),
                         x.size(1), x.size(2), dweight.size(0), dweight.size(1), in_dz.batch_stride,
                         in_dz.row_stride, in_x.batch_stride, in_x.row_stride, split, dtype_of(x)},
                        current_stream());
}

Tensor conv2d_cuda(const Tensor& x, const Tensor& weight) {
  Tensor z = conv2d_meta(x, weight);
  const OnDevice on(x.device());
  if (has_products(z, x, weight)) convolve_cuda(z, x, weight, /*flipped=*/false);
  return z;
}

Grads2 conv2d_backward_cuda(const Tensor& dz, const Tensor& x, const Tensor& weight,
                            std::array<bool, 2> output_mask) {
  auto [dx, dweight] = conv2d_backward_meta(dz, x, weight, output_mask);
  const OnDevice on(x.device());
  if (has_products(dx, dz, weight)) convolve_cuda(dx, dz, weight, /*flipped=*/true);
  if (has_products(dweight, x, weight)) dweight_cuda(dweight, dz, x);
  return {dx, dweight};
}
#endif

using Conv2dFunction = FunctionOfTwo<conv2d_call, conv2d_backward_call>;

TORCH_LIBRARY_FRAGMENT(torchweld, m) {
  define_op(m, "conv2d(Tensor x, Tensor weight) -> Tensor", TW_KERNELS(conv2d),
            recorded_by<Conv2dFunction>(call_conv2d));
  define_op(m,
            "conv2d_backward(Tensor dz, Tensor x, Tensor weight, *, bool[2] output_mask) -> "
            "(Tensor dx, Tensor dweight)",
            TW_KERNELS(conv2d_backward), no_gradient_function());
  define_autocast(m, call_conv2d);
}

}  // namespace
}  // namespace torchweld::conv2d_op
