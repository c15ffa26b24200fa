// Groups of rows and the sorted routes of a layer of experts, as tensors on the GPU. This is host
// code for CUDA builds only.
#pragma once

#include "layers/norm_linear.h"
#include "ops/experts/experts.h"

namespace torchweld {

// The sorted routes of a call, in the memory of the GPU.
class CudaRoutes {
 public:
  CudaRoutes(const char* op, const Tensor& index, int64_t experts) : index_(index.contiguous()) {
    constexpr int64_t kMaxRoutes = (int64_t{1} << 31) - kRouteChunk;
    const int64_t count = index.numel();
    TW_CHECK(count <= kMaxRoutes, op, "index must have at most ", kMaxRoutes,
             " elements on a GPU, but got ", describe(index));
    const int64_t counts = divide_up(count, kRouteChunk) * experts;
    memory_ = at::empty({experts + 2 * count + counts}, index.options().dtype(at::kInt));
    int* at = mutable_data<int>(memory_);
    routes_ = {index.size(0),
               static_cast<int>(index.size(1)),
               static_cast<int>(experts),
               const_data<void>(index_),
               index.scalar_type() == at::kLong,
               at,
               at + experts,
               at + experts + count};
    launch_expert_routes(routes_, at + experts + 2 * count, current_stream());
  }

  operator const ExpertRoutes&() const { return routes_; }
  // The experts as groups of products.
  MatmulGroups groups() const { return {memory_.narrow(0, 0, routes_.experts)}; }
  int64_t count() const { return routes_.count(); }

 private:
  Tensor index_, memory_;
  ExpertRoutes routes_;
};

inline RouteRows route_rows(const Tensor& t) {
  return t.defined() ? RouteRows{mutable_data<void>(t), t.size(1), t.stride(0)} : RouteRows{};
}

// Allocates a matrix (routes, n) whose rows start on 16-byte boundaries.
inline Tensor empty_route_rows(const ExpertRoutes& routes, int64_t n, const Tensor& like) {
  return empty_matrix(routes.count(), n, like);
}

// A matrix that a kernel of ops/experts has padded with zeros.
inline Matrix padded(const Tensor& rows) {
  Matrix matrix(rows);
  matrix.zero_padded = true;
  return matrix;
}

inline Tensor gather_tokens(const Tensor& x, const CudaRoutes& routes) {
  const Rows in(x);
  const Tensor to = empty_route_rows(routes, in.n, x);
  if (in.n > 0) {
    launch_gather_tokens(route_rows(to), const_data<void>(in.tensor), in.row_stride, routes,
                         dtype_of(x), current_stream());
  }
  return to;
}

inline void sum_routes(const Tensor& y, const Tensor& from, const Tensor& weight,
                       const CudaRoutes& routes) {
  launch_sum_routes(mutable_data<void>(y), route_rows(from),
                    weight.defined() ? const_data<void>(weight) : nullptr,
                    weight.defined() && weight.scalar_type() == at::kFloat, routes, dtype_of(y),
                    current_stream());
}

inline void sum_of_experts(const Tensor& to, const Tensor& from, const Tensor& weight,
                           const ExpertRoutes& routes) {
  if (to.numel() == 0) return;
  const int64_t rows = from.size(0);
  const Tensor parts = empty_floats(expert_sum_parts(rows, routes.experts) * from.size(1), from);
  launch_sum_of_experts(mutable_data<void>(to), route_rows(from), rows, mutable_data<float>(parts),
                        weight.defined() ? const_data<void>(weight) : nullptr,
                        weight.defined() && weight.scalar_type() == at::kFloat, routes,
                        dtype_of(from), current_stream());
}

}  // namespace torchweld
