// The epilogue of attention's decode kernel. A block adds up the sums of its warps. If there is one
// split, the block stores the results. Otherwise the blocks of all splits but the last one store
// partial results, and the block of the last split reduces the partial results of all splits.
#pragma once

#include "attention/decode/work.cuh"
#include "device/access.cuh"

namespace torchweld {

// Returns the factor that rescales a sum of exponentials from maximum `max` to maximum `to`.
__device__ __forceinline__ float decode_factor(float max, float to, float c) {
  return max == -INFINITY ? 0.f : exp2_approx((max - to) * c);
}

// Stores the lse of a row. Returns the factor that normalises the sums of the row, or a negative
// number if the row sees no key.
__device__ __forceinline__ float finish_decoded(const AttentionParams& p, const DecodeWork& work,
                                                const ScoreScale& scale, int row, MaxSum sums) {
  const bool live = !p.mask.row_keys(work.row(row).index, work.pad).empty();
  if (p.lse != nullptr) {
    p.lse[work.first_lse_row(p.sizes) + row] = live ? scale.lse(sums.max, sums.sum) : -INFINITY;
  }
  return live ? 1.f / sums.sum : -1.f;
}

// The version of finish_decoded for a general mask. It also adds the sink to the sum of the row.
__device__ __forceinline__ float finish_decoded(const AttentionParams& p, const DecodeWork& work,
                                                const CappedScale& scale, int row, MaxSum sums) {
  const DecodeWork::Row query_row = work.row(row);
  const MaskParams mask = p.mask;
  const float sink = mask.sink ? mask.sink[query_row.head] : -INFINITY;
  const bool live = !mask.row_keys(query_row.index, mask.sequence(work.batch)).empty();
  const FinishedRow finished = finish_row(scale, sums.max, sums.sum, sink);
  if (p.lse != nullptr) {
    p.lse[work.first_lse_row(p.sizes) + row] = live ? finished.lse : sink;
  }
  return live ? finished.factor : -1.f;
}

// The shared memory for the sums. It overlaps the rings of keys and values.
template <int kRows, int kDim, int kWarps>
struct DecodeSumsShared {
  // NOTE: a row has 8 floats of padding, so that the rows of a fragment lie in different banks.
  float out[kWarps][kRows][kDim + 8];
  float split_factors[AttentionDecodeTile::kMaxSplits][kRows];
};

// All threads of a block first call gather(). They then call store(), store_partial() or
// reduce_partials().
template <typename Config>
struct DecodeSums {
  using T = typename Config::T;
  static constexpr int kRows = Config::kRows, kDim = Config::kDim, kWarps = Config::kWarps;

  const AttentionParams& p;
  const typename Config::Scale& scale;
  const DecodeWork& work;
  typename Config::Shared& s;

  // Stores the sums of the warps in shared memory. Computes the factors that rescale these sums to
  // a common maximum.
  template <int kTiles>
  __device__ __forceinline__ void gather(const OnlineRow (&rows)[kTiles][2],
                                         const float (&r_out)[kTiles][kDim / 8][4]) const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile * 16 + half * 8 + lane / 4;
        const float sum = quad_sum(rows[tile][half].sum);
        if (row >= work.rows) continue;
        if (lane % 4 == 0) s.warp_sums[warp][row] = {rows[tile][half].max, sum};
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          *reinterpret_cast<float2*>(&s.sums.out[warp][row][n * 8 + lane % 4 * 2]) =
              make_float2(r_out[tile][n][2 * half], r_out[tile][n][2 * half + 1]);
        }
      }
    }
    __syncthreads();
    if (const int row = threadIdx.x; row < work.rows) {
      float max = -INFINITY, sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) max = fmaxf(max, s.warp_sums[w][row].max);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const MaxSum warp = s.warp_sums[w][row];
        const float factor = decode_factor(warp.max, max, scale.c);
        sum += warp.max == -INFINITY ? warp.sum : warp.sum * factor;
        s.warp_sums[w][row].max = factor;
      }
      s.block_sums[row] = {max, sum};
      if (splits() == 1) s.factor[row] = finish_decoded(p, work, scale, row, {max, sum});
    }
    __syncthreads();
  }

  // Stores the results of the block. The keys must have one split.
  __device__ __forceinline__ void store() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < quads(); i += Config::kThreads) store_quad(i, block_quad(i));
  }

  // Stores the sums of the block in the workspace. The block of the group's last split reads the
  // sums there.
  __device__ __forceinline__ void store_partial() const {
    for (int i = threadIdx.x; i < quads(); i += Config::kThreads) {
      *reinterpret_cast<float4*>(partial(work.split) + 4 * i) = block_quad(i);
    }
    if (const int row = threadIdx.x; row < work.rows) {
      partial_max_sums(work.split)[row] = s.block_sums[row];
    }
    __syncthreads();
    if (threadIdx.x == 0) work.plan.flags.raise(first_partial() + work.split);
  }

  // Adds the partial sums of all splits of the group and stores the results. The block of the
  // group's last split calls this function.
  // NOTE: blocks start in the order of their indices. Therefore the blocks of the other splits have
  // started before this block waits for them.
  // NOTE: the first partial sums are loaded while find_factors() runs.
  __device__ __forceinline__ void reduce_partials() const {
    for (int i = threadIdx.x; i < others(); i += Config::kThreads) {
      work.plan.flags.wait(first_partial() + i);
    }
    __syncthreads();
    float4 batch[kBatch];
    load(batch, threadIdx.x, 0);
    find_factors();
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < quads(); i += Config::kThreads) {
      const int row = i * 4 / kDim;
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
      for (int first = 0; first < others(); first += kBatch) {
        if (first > 0 || i >= Config::kThreads) load(batch, i, first);
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (first + j < others()) add(sum, batch[j], s.sums.split_factors[first + j][row]);
        }
      }
      add(sum, block_quad(i), s.sums.split_factors[others()][row]);
      store_quad(i, sum);
    }
  }

 private:
  static constexpr int kBatch = 16;  // the number of splits that are loaded at a time
  static constexpr int kPartialFloats = kRows * kDim;

  __device__ __forceinline__ int splits() const {
    return static_cast<int>(work.plan.splits.divisor());
  }
  __device__ __forceinline__ int others() const { return splits() - 1; }
  // The number of quads in all rows of the tile. A quad is four contiguous values of a row.
  __device__ __forceinline__ int quads() const { return work.rows * kDim / 4; }

  static __device__ __forceinline__ void add(float4& to, const float4& x, float factor) {
    to.x = fmaf(x.x, factor, to.x);
    to.y = fmaf(x.y, factor, to.y);
    to.z = fmaf(x.z, factor, to.z);
    to.w = fmaf(x.w, factor, to.w);
  }

  __device__ __forceinline__ float4 block_quad(int i) const {
    const int row = i * 4 / kDim, column = i * 4 % kDim;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      add(sum, *reinterpret_cast<const float4*>(&s.sums.out[w][row][column]),
          s.warp_sums[w][row].max);
    }
    return sum;
  }

  // Stores quad i, that is, four values of a row.
  __device__ __forceinline__ void store_quad(int i, const float4& x) const {
    const int row = i * 4 / kDim, column = i * 4 % kDim;
    const int columns = static_cast<int>(p.sizes.head_dim_v);
    const float factor = s.factor[row];
    const bool live = !(factor < 0.f);
    float r[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (float& value : r) value = live ? value * factor : 0.f;
    const DecodeWork::Row query_row = work.row(row);
    T* const g_to = p.out.row<T>(work.batch, query_row.head, query_row.index) + column;
    if (columns % 4 == 0) {
      if (column < columns) {
        *reinterpret_cast<uint2*>(g_to) =
            make_uint2(pack_pair<T>(r[0], r[1]), pack_pair<T>(r[2], r[3]));
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (column + j < columns) g_to[j] = from_float<T>(r[j]);
      }
    }
  }

  // These functions return addresses of partial results. In a group, all splits except the last one
  // have partial results. The memory of a group first holds the accumulators of these splits, then
  // the maxima and sums of their rows.
  __device__ __forceinline__ int64_t first_partial() const { return work.group * others(); }
  __device__ __forceinline__ float* partial(int split) const {
    return p.partials + first_partial() * (kPartialFloats + 2 * kRows) + split * kPartialFloats;
  }
  __device__ __forceinline__ MaxSum* partial_max_sums(int split) const {
    return reinterpret_cast<MaxSum*>(partial(others())) + split * kRows;
  }

  __device__ __forceinline__ void load(float4 (&batch)[kBatch], int i, int first) const {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      batch[j] = load_sent_if(partial(first + j) + 4 * i, i < quads() && first + j < others());
    }
  }

  // Computes the factors that rescale the sums of the splits. A warp handles one row at a time, and
  // a lane handles every 32nd split.
  __device__ __forceinline__ void find_factors() const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    for (int row = warp; row < work.rows; row += kWarps) {
      constexpr int kEach = AttentionDecodeTile::kMaxSplits / kWarp;
      MaxSum partials[kEach];
      float max = -INFINITY, sum = 0.f;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int i = j * kWarp + lane;
        partials[j] = {-INFINITY, 0.f};
        if (i < others()) {
          const float2 sent = __ldcg(reinterpret_cast<const float2*>(partial_max_sums(i) + row));
          partials[j] = {sent.x, sent.y};
        }
        if (i == others()) partials[j] = s.block_sums[row];
        max = fmaxf(max, partials[j].max);
      }
      max = warp_max(max);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int i = j * kWarp + lane;
        const float factor = decode_factor(partials[j].max, max, scale.c);
        sum += partials[j].max == -INFINITY ? partials[j].sum : partials[j].sum * factor;
        if (i < splits()) s.sums.split_factors[i][row] = factor;
      }
      sum = warp_sum(sum);
      if (lane == 0) s.factor[row] = finish_decoded(p, work, scale, row, {max, sum});
    }
  }
};

}  // namespace torchweld
