// The routing and the gates of a layer of experts, and the launchers of their kernels. This header
// does not use torch.
//
// A route is a pair of a token t and one of its k experts; its number is t * k + j. The routes are
// sorted by expert. A row is a route's place in the sorted order. Routes without an expert (an id
// that is negative or at least `experts`) have no row.
#pragma once

#include <cstdint>

#ifdef TORCHWELD_CUDA
#include <cuda_runtime_api.h>
#endif

#include "core/dtype.h"

namespace torchweld {

enum class ExpertActivation : int8_t { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };

// act = f(g) * (u + shift), where g and u are the halves of a row of z, and g <= limit and
// -limit <= u <= limit by clamping. Without a gate, act = f(g), where g is the whole row. f(g) is
// g * sigmoid(slope * g) for kSilu.
struct ExpertGate {
  ExpertActivation activation;
  bool gated, interleaved;  // interleaved: whether g and u alternate in a row of z
  double limit;             // infinity if there is no limit
  double slope, shift;

  int64_t width(int64_t n) const { return gated ? 2 * n : n; }
};

struct ExpertRoutes {
  int64_t tokens;
  int k, experts;
  const void* index;  // shape (tokens, k)
  bool index_is_int64;
  int* ends;   // output (experts,): the end of the rows of each expert
  int* order;  // output (tokens * k,): the route of each row
  int* rows;   // output (tokens * k,): the row of each route, or -1

  int64_t count() const { return tokens * k; }
};

constexpr int kMaxExperts = 8192;  // on a GPU

#ifdef TORCHWELD_CUDA
constexpr int kRouteChunk = 2048;  // the number of routes that a block sorts

// Sorts the routes by expert. Routes of one expert keep their order. `counts` is scratch memory for
// one int per expert and chunk of kRouteChunk routes.
void launch_expert_routes(const ExpertRoutes& routes, int* counts, cudaStream_t stream);

// A matrix (rows, n) with one row per route, in the order of the rows. The values from column n to
// `stride` are zeros in memory that a kernel of this file has written.
struct RouteRows {
  void* data;
  int64_t n, stride;
};

// Writes the row of x of every route. The rows of x are x_stride elements apart.
void launch_gather_tokens(const RouteRows& to, const void* x, int64_t x_stride,
                          const ExpertRoutes& routes, DType dtype, cudaStream_t stream);

// Computes y[t] = the sum of weight[t, j] * from[row of (t, j)] over j, in order, in fp32. A weight
// of nullptr stands for ones. y is contiguous.
void launch_sum_routes(void* y, const RouteRows& from, const void* weight, bool weight_fp32,
                       const ExpertRoutes& routes, DType dtype, cudaStream_t stream);

// Computes act from z.
void launch_expert_gate(const RouteRows& act, const RouteRows& z, const ExpertGate& gate,
                        const ExpertRoutes& routes, DType dtype, cudaStream_t stream);

struct ExpertGateBackward {
  RouteRows z;
  RouteRows dact;  // the gradient of act, without the route's weight; data is nullptr if not needed
  RouteRows dz;    // output, or nullptr; may be z
  RouteRows act;   // output: the route's weight times act, or nullptr; may be dact
  void* dweight;   // output (tokens, k), or nullptr; routes without a row keep their value
  const void* weight;
  bool weight_fp32;
  // If there is a bias behind the second product: the gathered dy and the bias (experts, dy.n).
  RouteRows dy;
  const void* down_bias;
  ExpertGate gate;
};
void launch_expert_gate_backward(const ExpertGateBackward& p, const ExpertRoutes& routes,
                                 DType dtype, cudaStream_t stream);

// Computes the gradient of each route's weight: the sum of its row's parts (parts, routes). Routes
// without a row keep their value.
void launch_sum_weight_gradients(void* dweight, bool weight_fp32, const float* parts, int count,
                                 const ExpertRoutes& routes, DType dtype, cudaStream_t stream);

// Computes to[e] = the sum of the rows of expert e, each times its route's weight. A weight of
// nullptr stands for ones: then `routes` needs only the number of experts and the ends of their
// rows. `rows` is the number of rows of `from`, and `to` is (experts, n) and contiguous. `parts` is
// scratch memory of expert_sum_parts() * n floats.
int64_t expert_sum_parts(int64_t rows, int64_t experts);
void launch_sum_of_experts(void* to, const RouteRows& from, int64_t rows, float* parts,
                           const void* weight, bool weight_fp32, const ExpertRoutes& routes,
                           DType dtype, cudaStream_t stream);

// Sets the rows behind those of the last expert to zero. `count` is the number of rows of `to`.
void launch_clear_rows_behind(const RouteRows& to, int64_t count, const ExpertRoutes& routes,
                              DType dtype, cudaStream_t stream);
#endif

}  // namespace torchweld
