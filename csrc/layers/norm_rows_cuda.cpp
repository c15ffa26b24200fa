// Implements the interface of norm/rows.h on CUDA, by the kernels of layers/norm_linear.h.
#ifdef TORCHWELD_CUDA

#include "norm/rows.h"

#include "layers/norm_linear.h"

namespace torchweld {
namespace {

OptionalTensor if_defined(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : std::nullopt;
}

}  // namespace

void norm_forward_cuda(const NormInputs& in, const NormResults& out) {
  const OnDevice on(in.x.device());
  const RowNorm norm = {in.centred, in.weight, in.bias, in.weight_offset};
  run_norm(norm, in.x, in.eps, {if_defined(out.mean), if_defined(out.rstd)}, {}, as_matrix(out.y),
           in.residual, out.sum);
}

void norm_backward_cuda(const NormUpstream& in, const NormGradients& out) {
  const OnDevice on(in.x.device());
  const RowNorm norm = {in.centred, in.weight, std::nullopt, in.weight_offset};
  norm_backward_into(out.dx, out.dweight, out.dbias, norm, in.dy, in.x,
                     {if_defined(in.mean), in.rstd}, in.dsum);
}

}  // namespace torchweld

#endif
