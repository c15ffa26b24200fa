// The end of a block of attention's decode kernel: the sums of its warps become those of the block,
// and these, or those of all splits, become results.
#pragma once

#include "attention/decode/work.cuh"
#include "device/access.cuh"

namespace torchweld {

// What sums against `max` are multiplied with to be sums against `to`.
__device__ __forceinline__ float decode_factor(float max, float to, float c) {
  return max == -INFINITY ? 0.f : exp2_approx((max - to) * c);
}

// lse of a row, and what its sums are multiplied with to be results: below 0 where it sees nothing.
__device__ __forceinline__ float finish_decoded(const AttentionParams& p, const DecodeWork& work,
                                                const ScoreScale& scale, int row, MaxSum sums) {
  const bool live = !p.mask.row_keys(work.row(row).at, work.pad).empty();
  if (p.lse != nullptr) {
    p.lse[work.first_out_row(p.sizes) + row] = live ? scale.lse(sums.max, sums.sum) : -INFINITY;
  }
  return live ? 1.f / sums.sum : -1.f;
}

// The same under a general mask, a sink among the sums.
__device__ __forceinline__ float finish_decoded(const AttentionParams& p, const DecodeWork& work,
                                                const CappedScale& scale, int row, MaxSum sums) {
  const DecodeWork::Row of = work.row(row);
  const MaskParams mask = p.mask;
  const float sink = mask.sink ? mask.sink[of.head] : -INFINITY;
  const bool live = !mask.row_keys(of.at, mask.sequence(work.batch)).empty();
  const FinishedRow finished = finish_row(scale, sums.max, sums.sum, sink);
  if (p.lse != nullptr) {
    p.lse[work.first_out_row(p.sizes) + row] = live ? finished.lse : sink;
  }
  return live ? finished.factor : -1.f;
}

// What a block keeps in shared memory where the rings were.
template <int kRows, int kDim, int kWarps>
struct DecodeSumsShared {
  float out[kWarps][kRows][kDim + 8];  // so that a fragment's rows lie in different banks
  float splits[AttentionDecodeTile::kMaxSplits][kRows];  // factors
};

// To be called by all threads, in the order of the functions.
template <typename Config>
struct DecodeSums {
  using T = typename Config::T;
  static constexpr int kRows = Config::kRows, kDim = Config::kDim, kWarps = Config::kWarps;

  const AttentionParams& p;
  const typename Config::Scale& scale;
  const DecodeWork& work;
  typename Config::Shared& s;

  // The sums of the warps, one beside the other, and what they are multiplied with.
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
        if (lane % 4 == 0) s.of_warps[warp][row] = {rows[tile][half].max, sum};
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
      for (int w = 0; w < kWarps; ++w) max = fmaxf(max, s.of_warps[w][row].max);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const MaxSum part = s.of_warps[w][row];
        const float factor = decode_factor(part.max, max, scale.c);
        sum += part.max == -INFINITY ? part.sum : part.sum * factor;
        s.of_warps[w][row].max = factor;
      }
      s.of_block[row] = {max, sum};
      if (splits() == 1) s.factor[row] = finish_decoded(p, work, scale, row, {max, sum});
    }
    __syncthreads();
  }

  // The results where there is one split.
  __device__ __forceinline__ void store() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < quads(); i += Config::kThreads) store_quad(i, block_quad(i));
  }

  // The block's sums, for the last split of its group.
  __device__ __forceinline__ void send() const {
    for (int i = threadIdx.x; i < quads(); i += Config::kThreads) {
      *reinterpret_cast<float4*>(part(work.split) + 4 * i) = block_quad(i);
    }
    if (const int row = threadIdx.x; row < work.rows) {
      part_sums(work.split)[row] = s.of_block[row];
    }
    __syncthreads();
    if (threadIdx.x == 0) work.plan.flags.raise(first_part() + work.split);
  }

  // By the last split: the results of all.
  // NOTE: blocks start in the order of their indices, so those that it waits for have started.
  // NOTE: the first parts are on their way before it is known what they are multiplied with.
  __device__ __forceinline__ void receive() const {
    for (int i = threadIdx.x; i < others(); i += Config::kThreads) {
      work.plan.flags.wait(first_part() + i);
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
          if (first + j < others()) add(sum, batch[j], s.sums.splits[first + j][row]);
        }
      }
      add(sum, block_quad(i), s.sums.splits[others()][row]);
      store_quad(i, sum);
    }
  }

 private:
  static constexpr int kBatch = 16;  // parts that are loaded at a time
  static constexpr int kPart = kRows * kDim;

  __device__ __forceinline__ int splits() const {
    return static_cast<int>(work.plan.splits.divisor());
  }
  __device__ __forceinline__ int others() const { return splits() - 1; }
  // Four neighbouring values of a row at a time.
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
          s.of_warps[w][row].max);
    }
    return sum;
  }

  // The packed rows follow one another in `out`.
  __device__ __forceinline__ void store_quad(int i, const float4& x) const {
    const int row = i * 4 / kDim, column = i * 4 % kDim;
    const int columns = static_cast<int>(p.sizes.head_dim_v);
    const float factor = s.factor[row];
    const bool live = !(factor < 0.f);
    float r[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (float& value : r) value = live ? value * factor : 0.f;
    T* const g_to = static_cast<T*>(p.out) + (work.first_out_row(p.sizes) + row) * columns + column;
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

  // Parts of the group's other splits: first all values, then the maxima and sums of the rows.
  __device__ __forceinline__ int64_t first_part() const { return work.group * others(); }
  __device__ __forceinline__ float* part(int split) const {
    return p.parts + first_part() * (kPart + 2 * kRows) + split * kPart;
  }
  __device__ __forceinline__ MaxSum* part_sums(int split) const {
    return reinterpret_cast<MaxSum*>(part(others())) + split * kRows;
  }

  __device__ __forceinline__ void load(float4 (&batch)[kBatch], int i, int first) const {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      batch[j] = load_sent_if(part(first + j) + 4 * i, i < quads() && first + j < others());
    }
  }

  // Of the parts: a warp has a row, a lane every 32nd split.
  __device__ __forceinline__ void find_factors() const {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    for (int row = warp; row < work.rows; row += kWarps) {
      constexpr int kEach = AttentionDecodeTile::kMaxSplits / kWarp;
      MaxSum parts[kEach];
      float max = -INFINITY, sum = 0.f;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int i = j * kWarp + lane;
        parts[j] = {-INFINITY, 0.f};
        if (i < others()) {
          const float2 sent = __ldcg(reinterpret_cast<const float2*>(part_sums(i) + row));
          parts[j] = {sent.x, sent.y};
        }
        if (i == others()) parts[j] = s.of_block[row];
        max = fmaxf(max, parts[j].max);
      }
      max = warp_max(max);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int i = j * kWarp + lane;
        const float factor = decode_factor(parts[j].max, max, scale.c);
        sum += parts[j].max == -INFINITY ? parts[j].sum : parts[j].sum * factor;
        if (i < splits()) s.sums.splits[i][row] = factor;
      }
      sum = warp_sum(sum);
      if (lane == 0) s.factor[row] = finish_decoded(p, work, scale, row, {max, sum});
    }
  }
};

}  // namespace torchweld
