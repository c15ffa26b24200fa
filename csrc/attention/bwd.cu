// The launcher of attention's backward, and the kernels that prepare the statistics of the query
// rows. The kernels for the gradients are in attention/sm90/bwd_kernel.cuh,
// attention/sm90/bwd_2cta_kernel.cuh and attention/sync/bwd_tiles.cuh. The kernels for large head
// dims are in attention/general/bwd.cu.
#include <climits>
#include <cmath>
#include <stdexcept>

#include "attention/bwd_key_tiles.cuh"
#include "attention/sm90/bwd.h"
#include "attention/sync/bwd_parts.cuh"
#include "core/device.h"
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

// The number of query heads that share a kv head.
int64_t group_of(const AttentionSizes& sizes) {
  return sizes.nheads_kv > 0 ? sizes.nheads / sizes.nheads_kv : 0;
}

// The number of keys of a work tile, or 0 if the kernels have no work tiles.
int keys_of_tile(const AttentionChoice& choice) {
  if (choice.engine == AttentionEngine::kSm90) {
    const AttentionBackwardSm90Tile& tile = kAttentionBackwardSm90Tiles[choice.tile];
    return tile.keys * tile.blocks;
  }
  return choice.engine == AttentionEngine::kSync ? kAttentionBackwardTiles[choice.tile].keys : 0;
}
// The number of key tiles of a sequence for which a general mask needs a KeyTileMask.
int64_t num_key_tiles(const AttentionBackwardParams& params) {
  const int keys = keys_of_tile(params.choice);
  return keys > 0 && params.mask.is_general() ? divide_up(params.sizes.seqlen_k, keys) : 0;
}

// The division of a launch into blocks, and the layout of the scratch memory. The fields `lse` to
// `parts` are offsets of arrays, in floats. Only general masks use `groups`, `live` and
// `key_tiles`.
struct Scratch {
  int64_t wave = 0;  // number of blocks or clusters that run at once on Hopper, else 0
  int64_t group_parts = 1;
  int64_t rows;
  int64_t all_rows;  // batch * nheads * rows
  int64_t lse, delta, dq, tickets, groups, live, key_tiles, parts, bytes;

  explicit Scratch(const AttentionBackwardParams& params) {
    const AttentionSizes& sizes = params.sizes;
    const AttentionChoice& choice = params.choice;
    const int64_t kv_heads = sizes.batch * sizes.nheads_kv;
    if (choice.engine == AttentionEngine::kSm90) {
      wave = device_facts().sms / kAttentionBackwardSm90Tiles[choice.tile].blocks;
      group_parts = attention_backward_group_parts(kv_heads, group_of(sizes), sizes.seqlen_q,
                                                   sizes.seqlen_k, wave, params.mask.causal);
    }
    const int64_t pad = attention_backward_row_pad(choice);
    const int64_t columns =
        attention_backward_scratch_columns(choice, sizes.head_dim, sizes.head_dim_v);
    rows = (sizes.seqlen_q + pad - 1) / pad * pad;
    all_rows = sizes.batch * sizes.nheads * rows;
    const bool has_stat_slice = choice.engine == AttentionEngine::kSm90 &&
                                kAttentionBackwardSm90Tiles[choice.tile].has_stat_slice(
                                    params.mask.is_general(), params.mask.softcap > 0.f);
    constexpr int64_t kStatSliceFloats = AttentionBackwardSm90Tile::kStatSliceBytes / 4;
    lse = has_stat_slice ? kStatSliceFloats * all_rows : 0;
    delta = lse + all_rows;
    dq = delta + all_rows;
    tickets = dq + all_rows * columns;
    groups = tickets + counter_bytes() / 4;
    const int64_t mask_rows = params.mask.is_general() ? sizes.batch * rows : 0;
    constexpr int64_t kGroupFloats = sizeof(BlockMask) / 4, kRangeFloats = sizeof(KeyRange32) / 4;
    live = groups + mask_rows / kAttentionBackwardRowPad * kGroupFloats;
    key_tiles = live + mask_rows * kRangeFloats;
    constexpr int64_t kKeyTileFloats = sizeof(KeyTileMask) / 4;
    parts = key_tiles + sizes.batch * num_key_tiles(params) * kKeyTileFloats;
    const int64_t keys = attention_backward_part_tiles(sizes.seqlen_k) * 64;
    bytes = (parts + (group_parts > 1 ? 2 * kv_heads * group_parts * keys * columns : 0)) * 4;
  }
  // The number of bytes of the ticket counters and of the dQ semaphores behind them.
  int64_t counter_bytes() const {
    return kBackwardTickets * 4 + all_rows / kAttentionBackwardRowsPerCounter * 4;
  }
};

bool rows_aligned(const AttentionTensor& tensor, int64_t elem_size) {
  const int64_t strides = tensor.batch_stride | tensor.head_stride | tensor.row_stride;
  return reinterpret_cast<uintptr_t>(tensor.data) % kVectorBytes == 0 &&
         strides * elem_size % kVectorBytes == 0;
}

BackwardArgs make_args(const AttentionBackwardParams& params, const Scratch& scratch) {
  const AttentionSizes& sizes = params.sizes;
  const bool base_2 = params.dtype != DType::kFloat32;
  const int64_t elem_size = base_2 ? 2 : 4;
  float* const g_scratch = static_cast<float*>(params.scratch);
  BackwardArgs args = {};
  args.params = params;
  args.rows = scratch.rows;
  // The number of query heads in the largest part of a group.
  const int64_t heads = divide_up(group_of(sizes), scratch.group_parts);
  const int64_t dims = sizes.head_dim + sizes.head_dim_v;
  const AttentionBackwardLoad load = {
      sizes.batch * sizes.nheads_kv * scratch.group_parts, heads, sizes.seqlen_k,
      attention_backward_scratch_columns(params.choice, sizes.head_dim, sizes.head_dim_v),
      // The first term is the bytes of Q, dO and the fp32 sums of dQ. The second term is the bytes
      // of K and V.
      heads * sizes.seqlen_q * (dims * elem_size + sizes.head_dim * 4) +
          sizes.seqlen_k * dims * elem_size,
      args.params.mask.is_uneven() || params.mask.key_start};
  // The blocks of a wave take different times only under a plain causal mask. With a window or
  // packed documents, all blocks take about the same time.
  const bool triangle = params.mask.causal && params.mask.window == 0 && !params.mask.key_start &&
                        !params.mask.has_row_ends;
  const AttentionBackwardOrder order = attention_backward_order(load, triangle ? scratch.wave : 0);
  args.group_parts = static_cast<unsigned>(scratch.group_parts);
  args.parts_at_once = static_cast<unsigned>(order.at_once);
  args.wave = static_cast<unsigned>(order.wave);
  args.rounds_dq =
      params.choice.engine == AttentionEngine::kSm90 &&
      attention_backward_rounds_dq(kAttentionBackwardSm90Tiles[params.choice.tile], load, order);
  args.lse_factor = base_2 ? kLog2e : 1.f;
  // NOTE: the stat slice holds lse / score_factor, so the factor must not be 0. A score times
  // kMinFactor is practically 0.
  constexpr float kMinFactor = 1e-30f;
  args.score_factor = base_2 ? params.scale * kLog2e : params.scale;
  if (std::fabs(args.score_factor) < kMinFactor) {
    args.score_factor = std::copysign(kMinFactor, args.score_factor);
  }
  args.shift = params.dtype == DType::kFloat16 ? kProbabilityShift<__half> : 0;
  args.g_lse = g_scratch + scratch.lse;
  args.g_stat_slice = static_cast<uint4*>(params.scratch);
  args.g_delta = g_scratch + scratch.delta;
  args.g_dq = g_scratch + scratch.dq;
  args.g_parts = reinterpret_cast<float4*>(g_scratch + scratch.parts);
  args.g_tickets = reinterpret_cast<unsigned*>(g_scratch + scratch.tickets);
  args.g_dq_semaphore = reinterpret_cast<int*>(args.g_tickets + kBackwardTickets);
  return args;
}

MaskedBackwardArgs make_masked_args(const AttentionBackwardParams& params, const Scratch& scratch) {
  MaskedBackwardArgs args = {};
  static_cast<BackwardArgs&>(args) = make_args(params, scratch);
  if (params.mask.softcap > 0.f) {
    args.cap = params.scale / params.mask.softcap;
    args.score_factor = args.lse_factor;
  }
  float* const g_scratch = static_cast<float*>(params.scratch);
  args.g_groups = reinterpret_cast<BlockMask*>(g_scratch + scratch.groups);
  args.g_live = reinterpret_cast<KeyRange32*>(g_scratch + scratch.live);
  args.g_key_tiles = reinterpret_cast<KeyTileMask*>(g_scratch + scratch.key_tiles);
  args.key_tiles = static_cast<int>(num_key_tiles(params));
  args.key_tile_keys = keys_of_tile(params.choice);
  return args;
}

template <typename T, typename Args>
void launch_rows(const Args& args, cudaStream_t stream) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t rows = sizes.batch * sizes.nheads * args.rows;
  if (rows == 0) return;
  const int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  const bool vector =
      rows_aligned(args.params.out, sizeof(T)) && rows_aligned(args.params.dout, sizeof(T));
  launch_kernel(attention_backward_rows_kernel<T, Args>, {blocks, kRowThreads}, stream, args,
                vector);
}

void launch_dlse(const BackwardArgs& args, const float* dlse, cudaStream_t stream) {
  const AttentionSizes& sizes = args.params.sizes;
  const int64_t rows = sizes.batch * sizes.nheads * sizes.seqlen_q;
  if (!dlse || rows == 0) return;
  const int64_t blocks = (rows + kRowThreads - 1) / kRowThreads;
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
      if constexpr (!kIsCapped<Args> || kTile.has_capped_kernel()) {
        launch_ranges(args, stream);
        launch_attention_backward_sm90_preprocess<T, index.value>(args, stream);
        launch_sink(args, params, stream);
        if (!has_keys(params.sizes)) return;
        if constexpr (kTile.is_2cta()) {
          launch_attention_backward_2cta_tile<T, index.value>(args, stream);
        } else {
          launch_attention_backward_sm90_tile<T, index.value>(args, stream);
        }
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
  clear_memory(args.g_tickets, Scratch(params).counter_bytes(), stream);
  dispatch_index<kNumAttentionBackwardTiles>(choice.tile, [&](auto index) {
    // The tile does not fit T if the sizes of their elements differ.
    if constexpr (elem_size(kAttentionBackwardTiles[index.value].math) == sizeof(T)) {
      launch_attention_backward_tile<T, index.value>(args, stream);
    }
  });
}

}  // namespace

int64_t attention_backward_scratch_bytes(const AttentionBackwardParams& params) {
  return Scratch(params).bytes;
}

void launch_attention_backward(const AttentionBackwardParams& params, cudaStream_t stream) {
  const AttentionSizes& sizes = params.sizes;
  if (sizes.seqlen_q > kBackwardMaxSize || sizes.seqlen_k > kBackwardMaxSize ||
      sizes.batch * sizes.nheads > kBackwardMaxSize) {
    throw std::runtime_error(
        "torchweld::attention_backward: seqlen_q, seqlen_k and batch * nheads must be below "
        "2^31 - 1024; use shorter sequences or fewer of them");
  }
  const Scratch scratch(params);
  dispatch_dtype(params.dtype, [&](auto element) {
    using T = decltype(element);
    const bool sm90 = params.choice.engine == AttentionEngine::kSm90;
    if (!params.mask.is_general()) {
      const BackwardArgs args = make_args(params, scratch);
      sm90 ? launch_sm90<T>(args, params, stream) : launch<T>(args, params, stream);
      return;
    }
    const MaskedBackwardArgs args = make_masked_args(params, scratch);
    if (!sm90) {
      launch<T>(args, params, stream);
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
