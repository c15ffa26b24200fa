// The forward of attention on tensor cores in exact fp32. Blocks have the same work and the same
// order as in attention/sync/fwd.cuh.
//
// Keys and values arrive in fp32 during the matmuls of the previous step. They are then split into
// bf16 terms. With two stages, the keys and values of a step are split together. With one stage,
// the keys are split first, and the values are split later into the same buffer. Two blocks fit on
// an SM, so that one block multiplies while the other block splits.
#pragma once

#include "attention/block.cuh"
#include "attention/sync/warp_fp32.cuh"
#include "device/dispatch.cuh"

namespace torchweld {

template <int kTile, bool kMasked>
struct AttentionSplitConfig : AttentionVariant<kMasked> {
  using T = float;
  static constexpr AttentionTile kShape = kAttentionTiles[kTile];
  static constexpr int kThreads = kShape.threads();
  static constexpr int kDim = kShape.dim;
  static constexpr int kRows = kShape.rows;
  static constexpr int kKeys = kShape.keys;
  static constexpr int kStages = kShape.stages;
  static constexpr int kWarpRows = kRows / kShape.warps;
  static constexpr int kTiles = kWarpRows / 16;
  using Block = AttentionBlockOf<kMasked, kRows, kWarpRows>;
  using Layout = AttentionLayout<T, kDim>;
  using QueryTile = SplitTile<kRows, kDim>;
  using KeyTile = SplitTile<kKeys, kDim>;
  using RawTile = SharedTile<T, kKeys, kDim>;
  using Matmul = WarpMatmulSplit<QueryTile, KeyTile, kTiles>;
  static_assert(kWarpRows % 16 == 0 && kKeys % 16 == 0 && (kStages == 1 || kStages == 2));
};

// The results and sums of earlier key tiles, in local memory. Separate sums reduce the rounding
// error. For example, 8192 keys are 256 tiles of 32 keys. If all these tiles are added to one
// register, its value is rounded 256 times. If groups of 8 tiles are added up first, a value is
// rounded only 8 + 32 times.
//
// NOTE: the code accesses local memory by address. Otherwise the compiler would keep these values
// in registers and spill values that every tile needs.
template <int kTiles, int kCols>
class EarlierTiles {
 public:
  static constexpr int kTilesAtOnce = 8;

  // Multiplies l_scale by `factor`, the factors by which a new tile of keys rescales r_out.
  __device__ __forceinline__ void rescale(const float (&factor)[kTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float scale[2];
      load(l_scale + 2 * tile, scale);
      scale[0] *= factor[tile][0];
      scale[1] *= factor[tile][1];
      store(l_scale + 2 * tile, scale);
    }
  }

  // Adds r_out and the sums of the rows to the values in local memory, and sets r_out and the sums
  // to 0.
  __device__ __forceinline__ void add(float (&r_out)[kTiles][kCols][4],
                                      OnlineRow (&rows)[kTiles][2], bool is_empty) {
    if (!is_empty) add_to(r_out, rows);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float sums[2] = {rows[tile][0].sum, rows[tile][1].sum}, ones[2] = {1.f, 1.f};
      store(l_sum + 2 * tile, sums);
      store(l_scale + 2 * tile, ones);
      rows[tile][0].sum = rows[tile][1].sum = 0.f;
#pragma unroll
      for (int n = 0; n < kCols; ++n) {
        float (&x)[4] = r_out[tile][n];
        store(l_out + (tile * kCols + n) * 4, {x[0], x[1]});
        store(l_out + (tile * kCols + n) * 4 + 2, {x[2], x[3]});
        x[0] = x[1] = x[2] = x[3] = 0.f;
      }
    }
  }

  // Adds the results and sums in local memory to r_out and to the sums of the rows.
  __device__ __forceinline__ void add_to(float (&r_out)[kTiles][kCols][4],
                                         OnlineRow (&rows)[kTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float scale[2], sums[2];
      load(l_scale + 2 * tile, scale);
      load(l_sum + 2 * tile, sums);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[tile][half].sum = fmaf(sums[half], scale[half], rows[tile][half].sum);
#pragma unroll
        for (int n = 0; n < kCols; ++n) {
          float x[2];
          load(l_out + (tile * kCols + n) * 4 + 2 * half, x);
          float (&out)[4] = r_out[tile][n];
          out[2 * half] = fmaf(x[0], scale[half], out[2 * half]);
          out[2 * half + 1] = fmaf(x[1], scale[half], out[2 * half + 1]);
        }
      }
    }
  }

 private:
  alignas(8) float l_out[kTiles * kCols * 4];
  alignas(8) float l_sum[kTiles * 2];
  alignas(8) float l_scale[kTiles * 2];  // the factors that rescale l_out to the current maxima

  static __device__ __forceinline__ void load(const float* l_from, float (&to)[2]) {
    asm volatile("ld.local.v2.f32 {%0, %1}, [%2];"
                 : "=f"(to[0]), "=f"(to[1])
                 : "l"(__cvta_generic_to_local(l_from))
                 : "memory");
  }
  static __device__ __forceinline__ void store(float* l_to, const float (&from)[2]) {
    asm volatile("st.local.v2.f32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_local(l_to)),
                 "f"(from[0]), "f"(from[1])
                 : "memory");
  }
};

template <typename Config>
struct AttentionSplitShared {
  typename Config::QueryTile query;
  // The bf16 terms of the keys or values that the current matmul reads.
  typename Config::KeyTile terms[Config::kStages];
  // The fp32 keys or values that are being loaded.
  typename Config::RawTile arriving[Config::kStages];
  typename Config::Block block;
};

template <typename Config>
__global__ __launch_bounds__(
    Config::kThreads,
    Config::kShape.blocks_per_sm) void attention_split_kernel(const AttentionParams params,
                                                              const AttentionSchedule schedule,
                                                              const typename Config::Scale scale) {
  using T = typename Config::T;
  using Matmul = typename Config::Matmul;
  constexpr int kKeys = Config::kKeys, kTiles = Config::kTiles, kThreads = Config::kThreads;
  constexpr int kStages = Config::kStages;
  extern __shared__ __align__(1024) char s_bytes[];
  auto& s = *reinterpret_cast<AttentionSplitShared<Config>*>(s_bytes);

  if constexpr (Config::kMasked) {
    s.block.init(params, schedule);
    if (s.block.rows == 0) return;
  } else {
    if (threadIdx.x == 0) s.block = AttentionBlock::make<Config::kRows>(params, schedule);
    __syncthreads();
  }
  const AttentionBlock block = s.block;
  const int keys = block.keys;

  const int64_t kv_head = block.head / (params.sizes.nheads / params.sizes.nheads_kv);
  const int head_dim = static_cast<int>(params.sizes.head_dim);
  using Loader = AttentionLoader<typename Config::Layout, kKeys, kThreads>;
  Loader keys_loader(matrix_of<T>(params.key, block.batch, kv_head, block.pad),
                     params.key.row_stride, head_dim);
  Loader values_loader(matrix_of<T>(params.value, block.batch, kv_head, block.pad),
                       params.value.row_stride, static_cast<int>(params.sizes.head_dim_v));
  auto& s_arriving_values = s.arriving[kStages - 1];
  const auto load_keys = [&](int keys_left) {
    keys_loader.load(fresh_thread(), shared_address(s.arriving[0].s_data), keys_left);
  };
  const auto load_values = [&](int keys_left) {
    values_loader.load(fresh_thread(), shared_address(s_arriving_values.s_data), keys_left);
  };

  // Load Q and multiply it by the sign of the scale. The absolute value of the scale is part of the
  // exponent.
  bool non_finite_query = false;
  if (keys > 0) {
    load_keys(keys);
    if (kStages == 2) load_values(keys);
    copy_async_commit();
    non_finite_query = split_rows<kThreads>(
        s.query, matrix_of<T>(params.query, block.batch, block.head, block.first_row),
        params.query.row_stride, 0, block.rows, head_dim, scale.sign);
  }
  // Waits until no warp needs the previous terms. Then splits the tiles that have arrived and
  // starts the next loads. Returns true if a tile or the query rows have an inf or NaN. With one
  // stage, keys and values arrive in one buffer, so the function clears keys that lie in a gap as
  // well as values. Cleared keys do no harm, because the mask hides their scores.
  const auto split_arrived = [&](int key, const auto& load_next) {
    copy_async_wait<0>();
    if constexpr (Config::kMasked) {
      Loader::clear_gaps(fresh_thread(), s_arriving_values.s_data, FirstKeys{s.block.unseen}, key);
      Loader::clear_gaps(fresh_thread(), s_arriving_values.s_data, s.block.gaps, key);
    }
    __syncthreads();
    bool handles_non_finite = non_finite_query;
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      handles_non_finite |= split_tile<kThreads>(s.terms[stage], s.arriving[stage]);
    }
    load_next();
    copy_async_commit();
    return __syncthreads_or(handles_non_finite) != 0;
  };

  typename Matmul::Out r_out = {};
  OnlineRow rows[kTiles][2];
  start(rows);
  using Earlier = EarlierTiles<kTiles, Config::kDim / 8>;
  constexpr int kKeysAtOnce = Earlier::kTilesAtOnce * kKeys;
  Earlier earlier;  // has no sums during the first kKeysAtOnce keys
  for (int key = 0; key < keys; key += kKeys) {
    if (key > 0 && key % kKeysAtOnce == 0) earlier.add(r_out, rows, key == kKeysAtOnce);
    const int warp_row = fresh_thread() / 32 * Config::kWarpRows;
    [[maybe_unused]] const int first_row = s.block.first_row + warp_row;
    const int keys_left = keys - key, next_left = keys_left - kKeys;
    typename Matmul::Scores r_s = {};
    bool handles_non_finite = split_arrived(key, [&] {
      if (kStages == 2 && next_left > 0) load_keys(next_left);
      if (kStages == 1 || next_left > 0) load_values(kStages == 1 ? keys_left : next_left);
    });
    Matmul::scores(r_s, s.query, s.terms[0], warp_row, head_dim, handles_non_finite);
    if constexpr (Config::kMasked) {
      mask_scores<Config>(r_s, scale, s.block, warp_row, key);
    } else if (key + kKeys > s.block.end_of(first_row)) {
      hide_columns(r_s, first_row + s.block.shift - key, s.block.all_keys - key);
    }
    float factor[kTiles][2];
    online_softmax</*kFtz=*/false>(r_s, rows, factor, scale.c);
    rescale(r_out, factor);
    if (key >= kKeysAtOnce) earlier.rescale(factor);
    if constexpr (kStages == 1) {
      handles_non_finite = split_arrived(key, [&] {
        if (next_left > 0) load_keys(next_left);
      });
    }
    Matmul::attend(r_out, r_s, s.terms[kStages - 1], handles_non_finite);
  }

  if (keys > kKeysAtOnce) earlier.add_to(r_out, rows);

  // Store the results through the shared memory of the query rows.
  __syncthreads();
  const int warp_row = threadIdx.x / 32 * Config::kWarpRows;
  char* s_rows = reinterpret_cast<char*>(s.query.s_data) + warp_row * Config::Layout::kRowBytes;
  store_block<Config>(params, scale, s.block, s_rows, rows, r_out);
}

template <bool kMasked>
void launch_attention_split_tiles(int tile, const AttentionParams& params, cudaStream_t stream) {
  dispatch_index<kNumAttentionTiles>(tile, [&](auto index) {
    if constexpr (kAttentionTiles[index.value].math == AttentionMath::kFloat32) {
      using Config = AttentionSplitConfig<index.value, kMasked>;
      launch_attention_blocks<Config, sizeof(AttentionSplitShared<Config>)>(
          attention_split_kernel<Config>, params, stream);
    }
  });
}

}  // namespace torchweld
