// The jobs of the three sweeps of scalar_attention. A job defines the owned elements, the streamed
// elements and the sums of a sweep.
#pragma once

#include "puzzles/scalar_attention/sweep.cuh"

namespace torchweld {

// A row that a thread owns: its query and its exponent.
struct RowOwner {
  float q;
  RowExponent row;
};

struct RowJob {
  const ScalarAttentionArgs& args;
  KeyRange keys;

  __device__ __forceinline__ explicit RowJob(const ScalarAttentionArgs& a)
      : args(a), keys(*a.g_keys) {}

  __device__ __forceinline__ bool fast_owner(const RowOwner& owner) const {
    return spans_little(owner.q, keys);
  }
  __device__ __forceinline__ bool fast_stream(int64_t) const { return true; }
  template <bool kFast>
  static __device__ __forceinline__ void prepare(RowOwner& owner, KeyRange keys) {
    owner.row = row_exponent<kFast>(owner.q, keys);
  }
  __device__ __forceinline__ float factor(const RowOwner& owner, bool fast) const {
    return fast ? row_factor<true>(owner.q, keys) : row_factor<false>(owner.q, keys);
  }
};

struct KeyValue {
  float k, v;
};

// The sums of the forward: (sum_j e, sum_j e v).
template <int kTile>
struct ForwardJob : RowJob, SweepShape<kForwardSweep, kTile> {
  static constexpr int kSums = 2;
  using Owner = RowOwner;
  using Stream = KeyValue;
  using RowJob::RowJob;

  __device__ __forceinline__ Owner owner(int64_t i) const { return {args.g_q[i], {}}; }
  template <bool kFast>
  __device__ __forceinline__ Stream stream(int64_t j) const {
    return {args.g_k[j], args.g_v[j] * args.v_scale};
  }
  static __device__ __forceinline__ RowExponent row(const Owner& owner, const Stream&) {
    return owner.row;
  }
  static __device__ __forceinline__ float key(const Owner&, const Stream& stream) {
    return stream.k;
  }
  static __device__ __forceinline__ void add(float (&r_sum)[kSums], float e, const Owner&,
                                             const Stream& stream) {
    r_sum[0] += e;
    r_sum[1] = fmaf(e, stream.v, r_sum[1]);
  }
};

// The sum for the gradient of q: sum_j e (v - mean) k.
template <int kTile>
struct QueryJob : RowJob, SweepShape<kQuerySweep, kTile> {
  static constexpr int kSums = 1;
  struct Owner : RowOwner {
    float mean;
  };
  using Stream = KeyValue;
  using RowJob::RowJob;

  __device__ __forceinline__ Owner owner(int64_t i) const {
    return {{args.g_q[i], {}}, args.g_mean[i]};
  }
  template <bool kFast>
  __device__ __forceinline__ Stream stream(int64_t j) const {
    return {args.g_k[j], args.g_v[j]};
  }
  static __device__ __forceinline__ RowExponent row(const Owner& owner, const Stream&) {
    return owner.row;
  }
  static __device__ __forceinline__ float key(const Owner&, const Stream& stream) {
    return stream.k;
  }
  static __device__ __forceinline__ void add(float (&r_sum)[kSums], float e, const Owner& owner,
                                             const Stream& stream) {
    r_sum[0] = fmaf(e * (stream.v - owner.mean), stream.k, r_sum[0]);
  }
};

// The sums for the gradients of k and v: (sum_i p dz q (v - mean), sum_i p dz). The member dz of
// Stream is dz * row_factor / sum, so that e times this member is p dz.
template <int kTile>
struct KeyJob : SweepShape<kKeySweep, kTile> {
  static constexpr int kSums = 2;
  using Owner = KeyValue;
  struct alignas(16) Stream {
    RowExponent row;
    float dz, dz_q;
    float mean;
  };

  const ScalarAttentionArgs& args;
  KeyRange keys;

  __device__ __forceinline__ explicit KeyJob(const ScalarAttentionArgs& a)
      : args(a), keys(*a.g_keys) {}

  __device__ __forceinline__ Owner owner(int64_t j) const { return {args.g_k[j], args.g_v[j]}; }
  __device__ __forceinline__ bool fast_owner(const Owner&) const { return true; }
  __device__ __forceinline__ bool fast_stream(int64_t i) const {
    return spans_little(args.g_q[i], keys);
  }
  template <bool kFast>
  __device__ __forceinline__ Stream stream(int64_t i) const {
    const float q = args.g_q[i];
    const float dz = args.g_dz[i] * (row_factor<kFast>(q, keys) / args.g_sum[i]);
    return {row_exponent<kFast>(q, keys), dz, dz * q, args.g_mean[i]};
  }
  template <bool kFast>
  static __device__ __forceinline__ void prepare(Owner&, KeyRange) {}
  static __device__ __forceinline__ RowExponent row(const Owner&, const Stream& stream) {
    return stream.row;
  }
  static __device__ __forceinline__ float key(const Owner& owner, const Stream&) { return owner.k; }
  static __device__ __forceinline__ void add(float (&r_sum)[kSums], float e, const Owner& owner,
                                             const Stream& stream) {
    r_sum[0] = fmaf(e * (owner.v - stream.mean), stream.dz_q, r_sum[0]);
    r_sum[1] = fmaf(e, stream.dz, r_sum[1]);
  }
  __device__ __forceinline__ float factor(const Owner&, bool) const { return 1.f; }
};

}  // namespace torchweld
