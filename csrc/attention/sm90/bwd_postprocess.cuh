// The kernels of attention's backward on Hopper that run after the products. One kernel computes dQ
// from its fp32 sums, if the dQ store warps have not done so. If the query heads of a KV head are
// divided into parts, another kernel adds the partial dK and dV of the parts.
#pragma once

#include "attention/sm90/bwd_preprocess.cuh"
#include "device/features.cuh"
#include "device/sm90/stmatrix.cuh"

namespace torchweld {

// Computes dQ of a query tile from the fp32 sums of dQ^T: scales the sums, transposes them through
// shared memory and rounds them. The grid has one CTA per query tile.
template <typename Config>
__global__ void __launch_bounds__(kSm90RowThreads)
    attention_backward_sm90_dq_kernel(const __grid_constant__ typename Config::Args args) {
#if TW_HAS_CLUSTERS
  using T = typename Config::T;
  constexpr int kRows = Config::kRows, kDim = Config::kDim, kFloats = Config::kDqFloats;
  // NOTE: each row has 16 more bytes, so that the 8 rows of an stmatrix lie in different banks.
  constexpr int kPitch = kDim * 2 + 16;
  __shared__ alignas(16) char s_tile[kRows * kPitch];
  griddep_launch_dependents();
  griddep_wait();
  const AttentionSizes& sizes = args.params.sizes;
  const int tiles = static_cast<int>(args.rows) / kRows,
            seqlen_q = static_cast<int>(sizes.seqlen_q);
  const int tile = blockIdx.x % tiles, head = blockIdx.x / tiles, first_row = tile * kRows;
  const BackwardLiveRows<typename Config::Args> live(args, head / static_cast<int>(sizes.nheads));
  if (live.template any_of<kRows>(first_row)) {
    const float scale = args.params.scale;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int first = 0; first < Config::kDqSlices; first += 2) {
      const int slice = first + threadIdx.x / 128;
      if (Config::kDqSlices % 2 == 1 && slice == Config::kDqSlices) break;
      const int warp_column = (kDim == 64 ? 0 : slice * 64) + warp * 16;
      if (warp_column >= static_cast<int>(sizes.head_dim)) continue;
      const float4* g_acc =
          reinterpret_cast<const float4*>(args.g_dq) +
          (int64_t{blockIdx.x} * Config::kDqSlices + slice) * (kFloats / 4 * 128) +
          threadIdx.x % 128;
      float4 r[kFloats / 4];
#pragma unroll
      for (int i = 0; i < kFloats / 4; ++i) r[i] = g_acc[i * 128];
      const int column = warp_column + lane / 8 % 2 * 8;
      const int row = (kDim == 64 ? slice * Config::kDqRows : 0) + lane % 8;
      const uint32_t s_lane = shared_address(s_tile) + row * kPitch + column * 2;
#pragma unroll
      for (int i = 0; i < kFloats / 4; i += 2) {
        const uint32_t words[4] = {pack_pair<T>(r[i].x * scale, r[i].y * scale),
                                   pack_pair<T>(r[i].z * scale, r[i].w * scale),
                                   pack_pair<T>(r[i + 1].x * scale, r[i + 1].y * scale),
                                   pack_pair<T>(r[i + 1].z * scale, r[i + 1].w * scale)};
        store_matrix_4_transposed(s_lane + (lane < 16 ? i : i + 1) * 8 * kPitch, words);
      }
    }
  }
  __syncthreads();
  constexpr int kChunks = kDim / 8;
  const int dim = static_cast<int>(sizes.head_dim);
  const int nheads = static_cast<int>(sizes.nheads);
  const AttentionOutput& dquery = args.params.dquery;
  T* const g_dq = dquery.row<T>(head / nheads, head % nheads, first_row);
  for (int i = threadIdx.x; i < kRows * kChunks; i += kSm90RowThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first_row + row >= seqlen_q) break;
    if (chunk * 8 >= dim) continue;
    uint4 words = make_uint4(0, 0, 0, 0);
    if (live.sees(first_row + row)) {
      words = *reinterpret_cast<const uint4*>(s_tile + row * kPitch + chunk * 16);
    }
    *reinterpret_cast<uint4*>(g_dq + row * dquery.row_stride + chunk * 8) = words;
  }
#endif
}

// Computes dK or dV of 64 keys and 64 columns: adds the partial gradients of a KV head's parts in a
// fixed order. The grid has one CTA per combination of a KV head, a 64-key tile, 64 columns and a
// gradient (dK or dV).
template <typename T>
__global__ void __launch_bounds__(kSm90RowThreads)
    attention_backward_sm90_reduce_dkv_kernel(const __grid_constant__ BackwardArgs args,
                                              int columns) {
  constexpr int kChunks = 4;  // number of chunks of 8 columns per thread
  const AttentionSizes& sizes = args.params.sizes;
  const int tiles = static_cast<int>(attention_backward_part_tiles(sizes.seqlen_k));
  const int partials = static_cast<int>(args.group_parts), boxes = columns / 64,
            seqlen_k = static_cast<int>(sizes.seqlen_k);
  const bool is_dv = blockIdx.x % 2 == 1;
  const int box = blockIdx.x / 2 % boxes, tile = blockIdx.x / (2 * boxes) % tiles,
            head = blockIdx.x / (2 * boxes) / tiles;
  const int dim = static_cast<int>(is_dv ? sizes.head_dim_v : sizes.head_dim);
  if (box * 64 >= dim) return;  // the gradient does not have these columns
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int first_chunk = box * 8 + threadIdx.x / 128 * kChunks;
  float4 sums[kChunks] = {};
  for (int partial = 0; partial < partials; ++partial) {
    const float4* g_partial = args.part_sums(head * partials + partial, tile, is_dv, columns) +
                              first_chunk * 128 + thread;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const float4 x = g_partial[i * 128];
      sums[i] = make_float4(sums[i].x + x.x, sums[i].y + x.y, sums[i].z + x.z, sums[i].w + x.w);
    }
  }
  const int key = tile * 64 + thread / 32 * 16 + lane / 4;
  const int nheads_kv = static_cast<int>(sizes.nheads_kv);
  const AttentionOutput dkv = is_dv ? args.params.dvalue : args.params.dkey;
  T* const g_dkv = dkv.row<T>(head / nheads_kv, head % nheads_kv, 0);
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int column = (first_chunk + i) * 8 + lane % 4 * 2;
    if (column >= dim) break;
    const auto store = [&](int key, float x, float y) {
      if (key >= seqlen_k) return;
      *reinterpret_cast<uint32_t*>(g_dkv + key * dkv.row_stride + column) = pack_pair<T>(x, y);
    };
    store(key, sums[i].x, sums[i].y);
    store(key + 8, sums[i].z, sums[i].w);
  }
}

template <typename Config>
void launch_attention_backward_sm90_postprocess(const typename Config::Args& args,
                                                cudaStream_t stream) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t tiles = sizes.batch * sizes.nheads * (args.rows / Config::kRows);
  if (!args.rounds_dq) {
    Grid grid(tiles, kSm90RowThreads);
    grid.overlaps = true;
    launch_kernel(attention_backward_sm90_dq_kernel<Config>, grid, stream, args);
  }
  if (args.group_parts == 1) return;
  constexpr int kBoxes = Config::kDim / 64;
  const int64_t key_tiles = attention_backward_part_tiles(sizes.seqlen_k);
  launch_kernel(attention_backward_sm90_reduce_dkv_kernel<typename Config::T>,
                {sizes.batch * sizes.nheads_kv * key_tiles * kBoxes * 2, kSm90RowThreads}, stream,
                static_cast<const BackwardArgs&>(args), Config::kDim);
}

}  // namespace torchweld
