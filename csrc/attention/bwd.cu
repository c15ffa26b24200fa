// The launcher of attention's backward, and the kernels that prepare the statistics of the query
// rows. The kernels for the gradients are in attention/sm90/bwd_kernel.cuh,
// attention/wide/bwd.cuh and attention/sync/bwd_tiles.cuh. The kernels for any head dim are in
// attention/general/bwd.cu.
#include <climits>
#include <stdexcept>

#include "attention/bwd_key_tiles.cuh"
#include "attention/bwd_scratch.cuh"
#include "attention/sm90/bwd.h"
#include "attention/sync/bwd_parts.cuh"
#include "core/launch.h"
#include "device/dispatch.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"

namespace torchweld {
namespace {

constexpr int kLanesPerRow = 8;
constexpr int kRowThreads = 256;
constexpr int kRowsPerBlock = kRowThreads / kLanesPerRow;

// Writes the range of keys that each query row sees, and the BlockMask of each group of rows. The
// grid has one block per group, and a block has one thread per row.
__global__ __launch_bounds__(kAttentionBackwardRowPad) void attention_backward_ranges_kernel(
    const __grid_constant__ MaskedBackwardArgs args) {
  __shared__ BlockMask s_group;
  __shared__ unsigned s_live[kAttentionBackwardRowPad / kWarp];
  const int64_t groups = args.rows / kAttentionBackwardRowPad;
  const int64_t sequence = blockIdx.x / groups;
  const int64_t row = blockIdx.x % groups * kAttentionBackwardRowPad + threadIdx.x;
  KeyRange live = {0, 0};
  if (row < args.params.sizes.seqlen_q) {
    live = args.params.mask.row_keys(row, args.params.mask.sequence(sequence));
  }
  const bool sees = !live.empty();
  const int begin = static_cast<int>(live.begin), end = static_cast<int>(live.end);
  args.g_live[sequence * args.rows + row] = sees ? KeyRange32{begin, end} : KeyRange32{0, 0};
  const unsigned bits = __ballot_sync(~0u, sees);
  if (threadIdx.x % kWarp == 0) s_live[threadIdx.x / kWarp] = bits;
  if (threadIdx.x == 0) s_group = {INT_MAX, 0, 0, INT_MAX, 0};
  __syncthreads();
  if (sees) {
    atomicMin(&s_group.begin, begin);
    atomicMax(&s_group.end, end);
    atomicMax(&s_group.last_begin, begin);
    atomicMin(&s_group.first_end, end);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    BlockMask group = s_group;
    group.live = s_live[0] | static_cast<uint64_t>(s_live[1]) << 32;
    if (group.live != ~uint64_t{0}) group.last_begin = INT_MAX, group.first_end = 0;
    args.g_groups[blockIdx.x] = group;
  }
}

// Returns this lane's part of the dot product of two rows with n elements each. If `vector` is
// true, the lane loads 16 bytes at a time.
template <typename T>
__device__ __forceinline__ float dot_of_lane(const T* g_x, const T* g_y, int64_t n, bool vector) {
  constexpr int kElems = kVectorBytes / sizeof(T);
  const int lane = threadIdx.x % kLanesPerRow;
  float sum = 0.f;
  const int64_t whole = vector ? n / kElems * kElems : 0;
  for (int64_t i = lane * kElems; i < whole; i += kLanesPerRow * kElems) {
    const auto x = load_vec<T, kElems>(g_x + i), y = load_vec<T, kElems>(g_y + i);
#pragma unroll
    for (int j = 0; j < kElems; ++j) sum = fmaf(to_float(x.values[j]), to_float(y.values[j]), sum);
  }
  for (int64_t i = whole + lane; i < n; i += kLanesPerRow) {
    sum = fmaf(to_float(g_x[i]), to_float(g_y[i]), sum);
  }
  return sum;
}

// Writes lse and delta of every row to the scratch memory, with eight lanes per row. If a row sees
// no key, the kernel writes dQ = 0 and lse = 0 for the row and does not read the row's inputs.
// Under a general mask, the kernel also fills g_key_tiles.
template <typename T, typename Args>
__global__ __launch_bounds__(kRowThreads) void attention_backward_rows_kernel(
    const __grid_constant__ Args args, bool vector) {
  if constexpr (kIsMasked<Args>) fill_key_tiles<kRowThreads>(args);
  const AttentionBackwardParams& p = args.params;
  const int64_t row_of_all =
      static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanesPerRow;
  const int64_t head_of_all = row_of_all / args.rows;
  const int row = static_cast<int>(row_of_all % args.rows);
  const int64_t sequence = head_of_all / p.sizes.nheads, head = head_of_all % p.sizes.nheads;
  if (sequence >= p.sizes.batch) return;
  const int first_row = [&] {
    if constexpr (kIsMasked<Args>) {
      const KeyRange32 live = args.live_of(static_cast<int>(sequence), row);
      return live.begin < live.end ? 0 : INT_MAX;
    } else {
      return SequenceSpan(args, sequence).first_row;
    }
  }();
  const int lane = threadIdx.x % kLanesPerRow;
  const int64_t row_in_tensors = head_of_all * p.sizes.seqlen_q + row;
  const bool live = row >= first_row && row < p.sizes.seqlen_q;
  float lse = 0.f, delta = 0.f;
  if (live) {
    delta = dot_of_lane(head_of<T>(p.out, sequence, head) + row * p.out.row_stride,
                        head_of<T>(p.dout, sequence, head) + row * p.dout.row_stride,
                        p.sizes.head_dim_v, vector);
    lse = -p.lse[row_in_tensors] * args.lse_factor;
  } else if (row < p.sizes.seqlen_q) {
    T* g_dq = p.dquery.row<T>(sequence, head, row);
    for (int64_t i = lane; i < p.sizes.head_dim; i += kLanesPerRow) g_dq[i] = from_float<T>(0.f);
  }
  // args.rows is a multiple of four, so the early return above is taken by all lanes of a warp or
  // by no lane.
#pragma unroll
  for (int step = kLanesPerRow / 2; step > 0; step /= 2) {
    delta += __shfl_xor_sync(~0u, delta, step);
  }
  if (lane == 0) {
    args.g_lse[row_of_all] = lse + args.shift;
    args.g_delta[row_of_all] = delta * exp2f(-args.shift);
  }
}

// Subtracts dlse, the gradient of lse, from delta. Because d lse / d score = p, dS is
// p * (dP - delta) + p * dlse = p * (dP - (delta - dlse)).
__global__ __launch_bounds__(kRowThreads) void attention_backward_dlse_kernel(
    const __grid_constant__ BackwardArgs args, const float* g_dlse) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i >= sizes.batch * sizes.nheads * sizes.seqlen_q) return;
  const int64_t head = i / sizes.seqlen_q, row = i % sizes.seqlen_q;
  args.g_delta[head * args.rows + row] -= g_dlse[i] * exp2f(-args.shift);
}

// dsink of a head is a sum over all sequences. A block computes the term of one sequence and one
// head. The term is -sum(exp(sink - lse) * delta) over the query rows that see a key, plus the sum
// of dlse over the other rows. The lse of these other rows is the sink.
__global__ __launch_bounds__(kRowThreads) void attention_backward_sink_kernel(
    const __grid_constant__ MaskedBackwardArgs args, const float* g_dlse, float* g_dsink) {
  __shared__ BlockExchange<kRowThreads> s_exchange;
  const AttentionBackwardParams& p = args.params;
  const int64_t head_of_all = blockIdx.x, sequence = head_of_all / p.sizes.nheads;
  const float sink = args.params.mask.sink[head_of_all % p.sizes.nheads],
              unshift = exp2f(args.shift);
  float sum = 0.f;
  for (int64_t row = threadIdx.x; row < p.sizes.seqlen_q; row += kRowThreads) {
    const KeyRange32 live = args.g_live[sequence * args.rows + row];
    const int64_t i = head_of_all * p.sizes.seqlen_q + row;
    if (live.begin < live.end) {
      sum -= expf(sink - p.lse[i]) * (args.g_delta[head_of_all * args.rows + row] * unshift);
    } else if (g_dlse) {
      sum += g_dlse[i];
    }
  }
  sum = s_exchange.sum_warps(warp_sum(sum));
  if (threadIdx.x == 0) g_dsink[head_of_all] = sum;
}

bool rows_aligned(const AttentionTensor& tensor, int64_t elem_size) {
  const int64_t strides = tensor.batch_stride | tensor.head_stride | tensor.row_stride;
  return reinterpret_cast<uintptr_t>(tensor.data) % kVectorBytes == 0 &&
         strides * elem_size % kVectorBytes == 0;
}

template <typename T, typename Args>
void launch_rows(const Args& args, cudaStream_t stream) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t rows = sizes.batch * sizes.nheads * args.rows;
  if (rows == 0) return;
  const int64_t blocks = divide_up(rows, kRowsPerBlock);
  const bool vector =
      rows_aligned(args.params.out, sizeof(T)) && rows_aligned(args.params.dout, sizeof(T));
  launch_kernel(attention_backward_rows_kernel<T, Args>, {blocks, kRowThreads}, stream, args,
                vector);
}

void launch_dlse(const BackwardArgs& args, const float* dlse, cudaStream_t stream) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t rows = sizes.batch * sizes.nheads * sizes.seqlen_q;
  if (!dlse || rows == 0) return;
  const int64_t blocks = divide_up(rows, kRowThreads);
  launch_kernel(attention_backward_dlse_kernel, {blocks, kRowThreads}, stream, args, dlse);
}

// Only a general mask needs the kernels of launch_ranges and launch_sink. launch_ranges is called
// before the kernel for the rows' statistics, and launch_sink after it.
void launch_ranges(const BackwardArgs&, cudaStream_t) {}
void launch_ranges(const MaskedBackwardArgs& args, cudaStream_t stream) {
  const int64_t groups = args.params.sizes.batch * args.rows / kAttentionBackwardRowPad;
  if (groups == 0) return;
  launch_kernel(attention_backward_ranges_kernel, {groups, kAttentionBackwardRowPad}, stream, args);
}
void launch_sink(const BackwardArgs&, const AttentionBackwardParams&, cudaStream_t) {}
void launch_sink(const MaskedBackwardArgs& args, const AttentionBackwardParams& params,
                 cudaStream_t stream) {
  const int64_t heads = params.sizes.batch * params.sizes.nheads;
  if (!params.mask.sink || heads == 0) return;
  launch_kernel(attention_backward_sink_kernel, {heads, kRowThreads}, stream, args, params.dlse,
                params.dsink);
}

bool has_keys(const AttentionSizes& sizes) {
  return sizes.batch * sizes.nheads_kv * sizes.seqlen_k > 0;
}

template <typename T, typename Args>
void launch_sm90(const Args& args, const AttentionBackwardParams& params, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    dispatch_index<kNumAttentionBackwardSm90Tiles>(params.choice.tile, [&](auto index) {
      constexpr AttentionBackwardSm90Tile kTile = kAttentionBackwardSm90Tiles[index.value];
      if constexpr ((!kIsCapped<Args> || kTile.has_capped_kernel()) &&
                    (!(kIsDropped<Args> || kIsAlibi<Args>) || kTile.supports_extras())) {
        launch_ranges(args, stream);
        launch_attention_backward_sm90_preprocess<T, index.value>(args, stream);
        launch_sink(args, params, stream);
        if (!has_keys(params.sizes)) return;
        launch_attention_backward_sm90_tile<T, index.value>(args, stream);
      }
    });
  }
}

// Launches the kernels of the other engines.
template <typename T, typename Args>
void launch(const Args& args, const AttentionBackwardParams& params, cudaStream_t stream) {
  const AttentionChoice& choice = params.choice;
  launch_ranges(args, stream);
  launch_rows<T>(args, stream);
  launch_dlse(args, params.dlse, stream);
  launch_sink(args, params, stream);
  if (!has_keys(params.sizes)) return;
  if (choice.engine == AttentionEngine::kGeneral) {
    launch_attention_backward_general<T>(args, stream);
    return;
  }
  if constexpr (sizeof(T) == 2 && kIsMasked<Args>) {
    if (choice.engine == AttentionEngine::kWide) {
      launch_attention_backward_wide<T>(args, stream);
      return;
    }
  }
  clear_memory(args.g_tickets, BackwardScratch(params).counter_bytes(), stream);
  dispatch_index<kNumAttentionBackwardTiles>(choice.tile, [&](auto index) {
    // The tile does not fit T if the sizes of their elements differ.
    if constexpr (elem_size(kAttentionBackwardTiles[index.value].math) == sizeof(T)) {
      launch_attention_backward_tile<T, index.value>(args, stream);
    }
  });
}

}  // namespace

int64_t attention_backward_scratch_bytes(const AttentionBackwardParams& params) {
  return BackwardScratch(params).bytes;
}

void launch_attention_backward(const AttentionBackwardParams& params, cudaStream_t stream) {
  const AttentionSizes& sizes = params.sizes;
  if (sizes.seqlen_q > kBackwardMaxSize || sizes.seqlen_k > kBackwardMaxSize ||
      sizes.batch * sizes.nheads > kBackwardMaxSize) {
    throw std::runtime_error(
        "torchweld::attention_backward: seqlen_q, seqlen_k and batch * nheads must be below "
        "2^31 - 1024; use shorter sequences or fewer of them");
  }
  const BackwardScratch scratch(params);
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    const bool sm90 = params.choice.engine == AttentionEngine::kSm90;
    if (!backward_needs_mask(params)) {
      const BackwardArgs args = make_backward_args(params, scratch);
      sm90 ? launch_sm90<T>(args, params, stream) : launch<T>(args, params, stream);
      return;
    }
    const MaskedBackwardArgs args = make_masked_backward_args(params, scratch);
    if (!sm90) {
      launch<T>(args, params, stream);
    } else if (params.mask.bias.given()) {
      launch_sm90<T>(BiasedBackwardArgs(args), params, stream);
    } else if (params.mask.dropout.given()) {
      launch_sm90<T>(DroppedBackwardArgs(args), params, stream);
    } else if (params.mask.alibi) {
      launch_sm90<T>(AlibiBackwardArgs{args}, params, stream);
    } else if (params.mask.softcap > 0.f &&
               kAttentionBackwardSm90Tiles[params.choice.tile].has_capped_kernel()) {
      launch_sm90<T>(CappedBackwardArgs{args}, params, stream);
    } else {
      launch_sm90<T>(args, params, stream);
    }
  });
  check_launch("attention_backward");
}

}  // namespace torchweld
