// attention's forward for few query rows, such as a step of generation: what it costs is to read
// the keys and values once.
//
// The query heads that share a kv head are packed, with their rows, into one tile of rows. The keys
// of a sequence, from the first that is not padding on, are cut into equal splits, so that every SM
// has a block, and each split among the warps of its block. A warp walks its keys by itself, with a
// ring of its own that is filled asynchronously: no warp waits for another one. At the end the
// warps' sums are added through shared memory. Those of splits go through global memory: the last
// block of a group to arrive adds them, in the order of the splits, so that every run gives the
// same bits.
// Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
#pragma once

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/sm90/dependent_launch.cuh"
#include "ops/attention/attention_block.cuh"
#include "ops/attention/attention_warp16.cuh"

namespace torchweld {

struct DecodeWork;
struct MaskedDecodeWork;
template <typename Config>
struct AttentionDecodeShared;
template <typename Config>
struct MaskedDecodeShared;

template <typename T_, int kTile, bool kMasked>
struct AttentionDecodeConfig : AttentionVariant<kMasked> {
  using T = T_;
  static constexpr AttentionDecodeTile kShape = kAttentionDecodeTiles[kTile];
  static constexpr int kDim = kShape.dim, kRows = AttentionDecodeTile::kRows, kKeys = kShape.keys;
  static constexpr int kStages = kShape.stages, kWarps = kShape.warps;
  static constexpr int kThreads = kShape.threads(), kTiles = kRows / 16;
  // What registers and shared memory are cut for.
  static constexpr int kBlocksPerSm = kShape.tile_bytes() > 110 * 1024 ? 1 : 2;
  using Layout = AttentionLayout<T, kDim>;
  using Matmul = WarpMatmul16<T, kDim, kTiles, kKeys>;
  using Work = std::conditional_t<kMasked, MaskedDecodeWork, DecodeWork>;
  using Shared = std::conditional_t<kMasked, MaskedDecodeShared<AttentionDecodeConfig>,
                                    AttentionDecodeShared<AttentionDecodeConfig>>;
};

template <typename Config>
struct AttentionDecodeShared {
  static constexpr int kDim = Config::kDim, kRows = Config::kRows, kWarps = Config::kWarps;
  using T = typename Config::T;
  T query[kRows * kDim];
  union {
    T keys[kWarps][Config::kStages][2][Config::kKeys * kDim];  // keys, then values
    float out[kWarps][kRows][kDim + 8];  // so that a fragment's rows lie in different banks
  };
  MaxSum sums[kWarps][kRows];  // a warp's factor takes the place of its maximum
  float max[kRows];            // of all warps
  bool last;
};

template <typename Config>
struct MaskedDecodeShared : AttentionDecodeShared<Config> {
  float factor[Config::kRows];  // of a finished row's sums, below 0 where it sees nothing
};

// What one block works on.
struct DecodeWork {
  int64_t group;  // of a batch, a kv head and a tile of rows
  int64_t batch, kv_head;
  int split;
  int first_row, rows;   // among the packed rows of the kv head
  int pad, keys, shift;  // keys [pad, pad + keys) exist; row i sees min(i + shift, keys) of them

  // Without its keys.
  __device__ __forceinline__ explicit DecodeWork(const AttentionParams& p) {
    constexpr int kTileRows = AttentionDecodeTile::kRows;
    const AttentionSizes& s = p.sizes;
    const unsigned nheads_kv = s.nheads_kv, splits = p.choice.splits;  // divisions of 32 bits
    const unsigned packed = unsigned(s.nheads) / nheads_kv * unsigned(s.seqlen_q);
    const unsigned row_tiles = (packed + kTileRows - 1) / kTileRows;
    const unsigned tile = blockIdx.x % row_tiles, rest = blockIdx.x / row_tiles;
    const unsigned head = rest / splits, sequence = head / nheads_kv;
    split = int(rest % splits);
    group = int64_t{head} * row_tiles + tile;
    batch = sequence;
    kv_head = head - sequence * nheads_kv;
    first_row = int(tile) * kTileRows;
    rows = min(kTileRows, int(packed) - first_row);
  }
  __device__ __forceinline__ void find_keys(const AttentionParams& p) {
    constexpr int kNoLimit = 1 << 30;
    const AttentionSizes& s = p.sizes;
    pad = p.leftpad != nullptr ? int(p.rule().clamp_pad(p.leftpad[batch])) : 0;
    keys = int(s.seqlen_k) - pad;
    shift = p.causal ? keys - int(s.seqlen_q) + 1 : kNoLimit;
  }
};

// The same under an AttentionMask: keys [pad, pad + keys) are those that any row of the block sees.
// A warp has the rows' ranges, lane by lane, counted from `pad`.
struct MaskedDecodeWork : DecodeWork {
  int begin, end;             // of this lane's row; kSeesNothing and 0 where it sees nothing
  int last_begin, first_end;  // between them every row that sees something sees every key

  using DecodeWork::DecodeWork;
  __device__ __forceinline__ void find_keys(const MaskedAttentionParams& p) {
    const int row = threadIdx.x % kWarp;
    LiveRange live = {0, 0};
    if (row < rows) live = p.rule().live((first_row + row) % p.sizes.seqlen_q, p.sequence(batch));
    const bool sees = !live.empty();
    const int last = __reduce_max_sync(~0u, sees ? static_cast<int>(live.end) : 0);
    const int first = __reduce_min_sync(~0u, sees ? static_cast<int>(live.begin) : kSeesNothing);
    pad = last > 0 ? first : 0;
    keys = last - pad;
    begin = sees ? static_cast<int>(live.begin) - pad : kSeesNothing;
    end = sees ? static_cast<int>(live.end) - pad : 0;
    last_begin = __reduce_max_sync(~0u, sees ? begin : 0);
    first_end = __reduce_min_sync(~0u, sees ? end : INT_MAX);
  }
};

// Hides from every row the keys that it doesn't see, of those from `key` on.
template <int kTiles, int kCols>
__device__ __forceinline__ void hide_keys(float (&r_s)[kTiles][kCols][4], int key,
                                          const int (&ends)[kTiles][2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = r_s[tile][j][2 * half + i];
          score = key + j * 8 + 2 * t + i < ends[tile][half] ? score : -INFINITY;
        }
      }
    }
  }
}

template <int kTiles, int kCols>
__device__ __forceinline__ void hide_keys(float (&r_s)[kTiles][kCols][4], int key,
                                          const int (&begins)[kTiles][2],
                                          const int (&ends)[kTiles][2]) {
  const int first = key + threadIdx.x % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int begin = begins[tile][half], end = ends[tile][half];
#pragma unroll
      for (int j = 0; j < kCols; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = r_s[tile][j][2 * half + i];
          const int at = first + j * 8 + i;
          score = at >= begin && at < end ? score : -INFINITY;
        }
      }
    }
  }
}

// What sums against `max` are multiplied with to be sums against `to`.
__device__ __forceinline__ float decode_factor(float max, float to, float c) {
  return max == -INFINITY ? 0.f : exp2_approx((max - to) * c);
}

template <typename Config>
__device__ __forceinline__ void load_decode_query(const AttentionParams& p, const DecodeWork& work,
                                                  float sign, typename Config::T* s_query) {
  using T = typename Config::T;
  using Layout = typename Config::Layout;
  const AttentionSizes& sizes = p.sizes;
  const int64_t first_head = work.kv_head * (sizes.nheads / sizes.nheads_kv);
  for (int i = threadIdx.x; i < Config::kRows * Layout::kChunks; i += Config::kThreads) {
    const int row = i / Layout::kChunks, chunk = i % Layout::kChunks;
    Vec<T, Layout::kElems> values = {};
    if (row < work.rows && chunk * Layout::kElems < sizes.head_dim) {
      const int64_t packed = work.first_row + row;
      const int64_t head = first_head + packed / sizes.seqlen_q, at = packed % sizes.seqlen_q;
      values = load_vec<T, Layout::kElems>(matrix_of<T>(p.query, work.batch, head, at) +
                                           chunk * Layout::kElems);
      if (sign != 1.f) {
#pragma unroll
        for (T& x : values.values) x = from_float<T>(to_float(x) * sign);
      }
    }
    store_vec(reinterpret_cast<T*>(reinterpret_cast<char*>(s_query) + Layout::offset(row, chunk)),
              values);
  }
}

// The block's rows, finished: `sum(row)` and `value(row, column)` are those of all keys.
template <typename Config, typename Sum, typename Value>
__device__ __forceinline__ void store_decoded(const AttentionParams& p, const DecodeWork& work,
                                              const ScoreScale& scale, const Sum& sum,
                                              const Value& value) {
  using T = typename Config::T;
  const AttentionSizes& sizes = p.sizes;
  const int columns = int(sizes.head_dim_v);
  const MaskRule rule = p.rule();
  // Packed rows follow one another in `out`.
  const int64_t first =
      (work.batch * sizes.nheads + work.kv_head * (sizes.nheads / sizes.nheads_kv)) *
          sizes.seqlen_q +
      work.first_row;
  T* g_out = static_cast<T*>(p.out) + first * columns;
  const auto live = [&](int row) {
    return !rule.live((work.first_row + row) % sizes.seqlen_q, work.pad).empty();
  };
  if (p.lse != nullptr && int(threadIdx.x) < work.rows) {
    const int row = threadIdx.x;
    const MaxSum of_row = sum(row);
    p.lse[first + row] = live(row) ? scale.lse(of_row.max, of_row.sum) : -INFINITY;
  }
  for (int i = threadIdx.x; i < work.rows * columns; i += Config::kThreads) {
    const int row = i / columns;
    g_out[i] =
        from_float<T>(live(row) ? value(row, i - row * columns) * (1.f / sum(row).sum) : 0.f);
  }
}

// The same under an AttentionMask, a sink among the sums. By all threads.
template <typename Config, typename Sum, typename Value>
__device__ __forceinline__ void store_decoded(const MaskedAttentionParams& p,
                                              const DecodeWork& work, const CappedScale& scale,
                                              float (&s_factor)[Config::kRows], const Sum& sum,
                                              const Value& value) {
  using T = typename Config::T;
  const AttentionSizes& sizes = p.sizes;
  const int columns = int(sizes.head_dim_v);
  const int64_t first_head = work.kv_head * (sizes.nheads / sizes.nheads_kv);
  const int64_t first = (work.batch * sizes.nheads + first_head) * sizes.seqlen_q + work.first_row;
  T* g_out = static_cast<T*>(p.out) + first * columns;
  if (int(threadIdx.x) < work.rows) {
    const int row = threadIdx.x, packed = work.first_row + row;
    const float sink = p.mask.sink ? p.mask.sink[first_head + packed / sizes.seqlen_q] : -INFINITY;
    const bool live = !p.rule().live(packed % sizes.seqlen_q, p.sequence(work.batch)).empty();
    const MaxSum of_row = sum(row);
    const FinishedRow finished = finish_row(scale, of_row.max, of_row.sum, sink);
    s_factor[row] = live ? finished.factor : -1.f;
    if (p.lse != nullptr) p.lse[first + row] = live ? finished.lse : sink;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < work.rows * columns; i += Config::kThreads) {
    const int row = i / columns;
    const float factor = s_factor[row];
    g_out[i] = from_float<T>(factor < 0.f ? 0.f : value(row, i - row * columns) * factor);
  }
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kBlocksPerSm) void attention_decode_kernel(
    const __grid_constant__ typename Config::Params p, const typename Config::Scale scale) {
  using T = typename Config::T;
  using Layout = typename Config::Layout;
  using Matmul = typename Config::Matmul;
  constexpr int kKeys = Config::kKeys, kTiles = Config::kTiles, kStages = Config::kStages;
  constexpr int kRows = Config::kRows, kWarps = Config::kWarps, kDim = Config::kDim;
  extern __shared__ __align__(1024) char s_bytes[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_bytes);
  typename Config::Work work(p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int seqlen_q = int(p.sizes.seqlen_q), splits = p.choice.splits;

  // The warp's share of the keys, in whole tiles.
  const int shares = splits * kWarps, share = work.split * kWarps + warp;
  const auto share_begin = [&](int tiles, int of) {
    return static_cast<int>(static_cast<int64_t>(tiles) * of / shares) * kKeys;
  };
  let_next_kernel_begin();
  wait_for_kernels_before();
  work.find_keys(p);
  const int tiles = (max(work.keys, 0) + kKeys - 1) / kKeys;
  const int begin = share_begin(tiles, share);
  const int end = min(share_begin(tiles, share + 1), work.keys);
  using Loader = AttentionLoader<Layout, kKeys, 32>;
  Loader load_key(matrix_of<T>(p.key, work.batch, work.kv_head, work.pad + begin), p.key.row_stride,
                  int(p.sizes.head_dim), lane);
  Loader load_value(matrix_of<T>(p.value, work.batch, work.kv_head, work.pad + begin),
                    p.value.row_stride, int(p.sizes.head_dim_v), lane);
  const auto load = [&](int key, int stage) {
    if (key < end) {
      load_key.load(lane, shared_address(s.keys[warp][stage][0]), end - key);
      load_value.load(lane, shared_address(s.keys[warp][stage][1]), end - key);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load(begin + i * kKeys, i);
  load_decode_query<Config>(p, work, scale.sign, s.query);
  __syncthreads();

  int ends[kTiles][2], all_see = work.keys;
  [[maybe_unused]] int begins[kTiles][2];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Config::kMasked) {
        begins[tile][half] = __shfl_sync(~0u, work.begin, tile * 16 + half * 8 + lane / 4);
        ends[tile][half] = __shfl_sync(~0u, work.end, tile * 16 + half * 8 + lane / 4);
      } else {
        const int row = (work.first_row + tile * 16 + half * 8 + lane / 4) % seqlen_q;
        ends[tile][half] = min(row + work.shift, work.keys);
      }
    }
  }
  if constexpr (Config::kMasked) {
    all_see = work.first_end;
  } else {
    if (p.causal) all_see = work.shift;  // of the first row
  }

  const Matmul matmul(lane, 0);
  typename Matmul::Out r_out = {};
  OnlineRow rows[kTiles][2];
  start(rows);
  int stage = 0;
  for (int key = begin; key < end; key += kKeys) {
    copy_async_wait<kStages - 2>();
    __syncwarp();
    load(key + (kStages - 1) * kKeys, stage == 0 ? kStages - 1 : stage - 1);
    typename Matmul::Scores r_s = {};
    matmul.scores(r_s, reinterpret_cast<const char*>(s.query),
                  reinterpret_cast<const char*>(s.keys[warp][stage][0]), kDim);
    if constexpr (Config::kMasked) {
      if (scale.softcap > 0.f) cap_scores</*kExact=*/false>(r_s, scale.softcap, scale.cap);
      if (key + kKeys > all_see || key < work.last_begin) hide_keys(r_s, key, begins, ends);
    } else {
      if (key + kKeys > all_see) hide_keys(r_s, key, ends);
    }
    float factor[kTiles][2];
    online_softmax<Matmul::kFtz>(r_s, rows, factor, scale.c);
    rescale(r_out, factor);
    matmul.attend(r_out, r_s, reinterpret_cast<const char*>(s.keys[warp][stage][1]), kDim);
    if (++stage == kStages) stage = 0;
  }
  copy_async_wait<0>();
  __syncthreads();  // the rings are free

  // The sums of the warps, one beside the other.
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile * 16 + half * 8 + lane / 4;
      const float sum = quad_sum(rows[tile][half].sum);
      if (lane % 4 == 0) s.sums[warp][row] = {rows[tile][half].max, sum};
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<float2*>(&s.out[warp][row][n * 8 + lane % 4 * 2]) =
            make_float2(r_out[tile][n][2 * half], r_out[tile][n][2 * half + 1]);
      }
    }
  }
  __syncthreads();

  // Their factors, and the block's own sums.
  if (int(threadIdx.x) < kRows) {
    const int row = threadIdx.x;
    float max = -INFINITY, sum = 0.f;
    for (int w = 0; w < kWarps; ++w) max = fmaxf(max, s.sums[w][row].max);
    for (int w = 0; w < kWarps; ++w) {
      const MaxSum part = s.sums[w][row];
      const float factor = decode_factor(part.max, max, scale.c);
      sum += part.max == -INFINITY ? part.sum : part.sum * factor;
      s.sums[w][row].max = factor;
    }
    s.sums[0][row].sum = sum;
    s.max[row] = max;
  }
  __syncthreads();
  const auto block_sum = [&](int row) { return MaxSum{s.max[row], s.sums[0][row].sum}; };
  const auto block_value = [&](int row, int column) {
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += s.sums[w][row].max * s.out[w][row][column];
    return value;
  };
  const auto store = [&](const auto& sum, const auto& value) {
    if constexpr (Config::kMasked) {
      store_decoded<Config>(p, work, scale, s.factor, sum, value);
    } else {
      store_decoded<Config>(p, work, scale, sum, value);
    }
  };
  if (splits == 1) {
    store(block_sum, block_value);
    return;
  }

  // To the others of the group, or from them.
  constexpr int kPart = kRows * kDim;
  float* g_parts = p.parts + work.group * splits * (kPart + 2 * kRows);
  MaxSum* g_sums = reinterpret_cast<MaxSum*>(g_parts + int64_t{splits} * kPart);
  for (int i = threadIdx.x; i < work.rows * kDim; i += Config::kThreads) {
    g_parts[work.split * kPart + i] = block_value(i / kDim, i % kDim);
  }
  if (int(threadIdx.x) < work.rows)
    g_sums[work.split * kRows + threadIdx.x] = block_sum(threadIdx.x);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    s.last = atomicAdd(&p.counters[work.group], 1u) + 1 == unsigned(splits);
    if (s.last) p.counters[work.group] = 0;  // as the next call wants it
  }
  __syncthreads();
  if (!s.last) return;
  __threadfence();
  // Factors of the parts: a warp has a row, a lane every 32nd split.
  using Factors = float[AttentionDecodeTile::kMostSplits][kRows];
  static_assert(sizeof(Factors) <= sizeof(s.out[0]) * (kWarps - 1));
  Factors& s_factors = reinterpret_cast<Factors&>(s.out);
  for (int row = warp; row < work.rows; row += kWarps) {
    constexpr int kEach = AttentionDecodeTile::kMostSplits / 32;
    float2 parts[kEach];  // maxima and sums
    float max = -INFINITY, sum = 0.f;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = j * 32 + lane;
      parts[j] = make_float2(-INFINITY, 0.f);
      if (i < splits) parts[j] = __ldcg(reinterpret_cast<const float2*>(g_sums + i * kRows + row));
      max = fmaxf(max, parts[j].x);
    }
    max = warp_max(max);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = j * 32 + lane;
      const float factor = decode_factor(parts[j].x, max, scale.c);
      sum += parts[j].x == -INFINITY ? parts[j].y : parts[j].y * factor;
      if (i < splits) s_factors[i][row] = factor;
    }
    sum = warp_sum(sum);
    if (lane == 0) s.sums[0][row] = {max, sum};
  }
  __syncthreads();
  auto& s_result = s.out[kWarps - 1];
  for (int i = threadIdx.x * 4; i < work.rows * kDim; i += Config::kThreads * 4) {
    const int row = i / kDim;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 16
    for (int part = 0; part < splits; ++part) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(g_parts + part * kPart + i));
      const float factor = s_factors[part][row];
      sum.x = fmaf(v.x, factor, sum.x);
      sum.y = fmaf(v.y, factor, sum.y);
      sum.z = fmaf(v.z, factor, sum.z);
      sum.w = fmaf(v.w, factor, sum.w);
    }
    *reinterpret_cast<float4*>(&s_result[row][i % kDim]) = sum;
  }
  __syncthreads();
  store([&](int row) { return s.sums[0][row]; },
        [&](int row, int column) { return s_result[row][column]; });
}

template <typename T, bool kMasked>
void launch_attention_decode_of(const typename AttentionVariant<kMasked>::Params& p,
                                cudaStream_t stream) {
  dispatch_index<kNumAttentionDecodeTiles>(p.choice.tile, [&](auto index) {
    using Config = AttentionDecodeConfig<T, index.value, kMasked>;
    using Shared = typename Config::Shared;
    static_assert(sizeof(Shared) <= Config::kShape.tile_bytes() + kAttentionDecodeExtraBytes);
    const int64_t blocks =
        attention_decode_groups(attention_problem(p.sizes, p.dtype, p.tf32, p.causal, p.leftpad)) *
        p.choice.splits;
    Grid grid(blocks, Config::kThreads, int(sizeof(Shared)));
    grid.overlaps = device_facts().clusters;
    launch_kernel(attention_decode_kernel<Config>, grid, stream, p, Config::scale(p));
  });
}

}  // namespace torchweld
