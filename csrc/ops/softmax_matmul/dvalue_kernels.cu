// dvalue = p^T @ dout:
//   p = exp(scale * scores - lse) (seqlen_q, seqlen_k) where a row sees the key, 0 elsewhere;
//   dout (seqlen_q, head_dim_v), dvalue (seqlen_k, head_dim_v) of a head
//
// A block computes dvalue for 128 keys of a head and up to 128 columns of value. A warp has 16 of
// the keys. The block loops over the query rows that see any of its keys, 32 rows at a time.
// cp.async fills a ring of tiles. The left operand of the matmul is the transposed probabilities.
// The kernel computes them in registers and rounds them to the dtype, as in the forward. Under a
// general mask, the loop may include rows that see none of the keys. The block does not read such
// rows.
// Source: Dao, "FlashAttention-2", 2023, algorithm 2.
#include "ops/softmax_matmul/parts.cuh"

namespace torchweld {
namespace {

template <typename T_, bool kTf32_, int kBlockD_, bool kMasked_>
struct DvalueConfig {
  using T = T_;
  static constexpr bool kMasked = kMasked_;
  static constexpr bool kTf32 = kTf32_;
  static constexpr int kThreads = 256;
  static constexpr int kBlockN = kThreads / kWarp * 16;
  static constexpr int kBlockM = 32;
  static constexpr int kBlockD = kBlockD_;
  static constexpr int kStages = sizeof(T) == 2 ? 3 : 2;
  static constexpr int kStepRows = kStepBytes / sizeof(T);
  static constexpr int kScorePitch = kBlockN + kPitchPadElems;
  static constexpr int kDoutPitch = kBlockD + kPitchPadElems;
  static constexpr bool kExact = sizeof(T) == 4 && !kTf32;
  static constexpr int kMinBlocks = kExact ? 1 : 2;  // number of blocks per SM, without spills

  struct Shared {
    alignas(16) T s_scores[kStages][kBlockM][kScorePitch];
    alignas(16) T s_dout[kStages][kBlockM][kDoutPitch];
    alignas(16) float s_lse[kStages][kBlockM];
  };
  static_assert(sizeof(Shared) <= 99 * 1024, "the shared memory of every GPU from sm_80 on");
};

// Loads the scores of one step (kStepRows rows, 16 keys) from a tile and transposes them. s_step is
// the address of the step's first row in the tile.
template <typename T, int kPitch>
__device__ __forceinline__ void load_left_transposed(uint32_t (&words)[4], const T* s_step) {
  const int lane = threadIdx.x % kWarp;
  if constexpr (sizeof(T) == 2) {
    load_matrix_4_transposed(
        words, shared_address(s_step + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8));
  } else {
    // ldmatrix can't transpose 32-bit elements.
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      words[r] = __float_as_uint(s_step[step_column<T>(r, 0) * kPitch + lane / 4 + 8 * (r % 2)]);
    }
  }
}

// Returns biased_exp(z), for z <= 0.
// NOTE: for bf16, the function computes 2^32 * exp(z) and multiplies it by 2^-32, so that subnormal
// results are kept. The exponential instruction can return subnormal results directly, but the
// masked kernel would spill with that version of the instruction.
template <typename T>
__device__ __forceinline__ float lean_exp(float z) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return exp2_approx_ftz(fmaf(z, kLog2e, 32.f)) * 0x1p-32f;
  } else {
    return biased_exp<T>(z);
  }
}

// The query rows [begin, end).
struct RowRange {
  int64_t begin, end;
};

// Returns the range from the first to the last row that sees one of the keys of `keys`. Returns
// {0, 0} if no row sees one of them. All threads of a block call this function.
template <int kThreads, typename LiveOf>
__device__ __forceinline__ RowRange rows_that_see(int64_t seqlen_q, const KeyRange& keys,
                                                  const LiveOf& live_of) {
  __shared__ long long s_begin, s_end;
  if (threadIdx.x == 0) s_begin = seqlen_q, s_end = 0;
  __syncthreads();
  int64_t begin = seqlen_q, end = 0;
  for (int64_t row = threadIdx.x; row < seqlen_q; row += kThreads) {
    const KeyRange live = live_of(row);
    if (max(live.begin, keys.begin) >= min(live.end, keys.end)) continue;
    begin = min(begin, row);
    end = row + 1;
  }
  if (end > 0) {
    atomicMin(&s_begin, begin);
    atomicMax(&s_end, end);
  }
  __syncthreads();
  return s_end > 0 ? RowRange{s_begin, s_end} : RowRange{0, 0};
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinBlocks) void dvalue_kernel(
    const SoftmaxMatmulBackwardParams params, int64_t first_block) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockD = Config::kBlockD;
  constexpr int kStages = Config::kStages;
  extern __shared__ __align__(16) unsigned char s_memory[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_memory);

  // Find the keys, the columns and the rows that this block processes.
  const SoftmaxMatmulProblem& problem = params.problem;
  const MaskParams& mask = problem.mask;
  const int64_t key_blocks = divide_up(mask.seqlen_k, kBlockN);
  const int64_t column_blocks = divide_up(problem.head_dim_v, kBlockD);
  const int64_t block = first_block + blockIdx.x;
  const int64_t first_column = block % column_blocks * kBlockD;
  const int64_t first_key = block / column_blocks % key_blocks * kBlockN;
  const HeadIndex head(problem, block / column_blocks / key_blocks);
  const int keys = clamp_int(mask.seqlen_k - first_key, 0, kBlockN);
  const int columns = clamp_int(problem.head_dim_v - first_column, 0, kBlockD);
  const auto live_of = [&](int64_t row) {
    if constexpr (Config::kMasked) {
      // NOTE: softmax_matmul refuses a key_end per row, so has_row_ends can be false at compile
      // time. Without this copy of the mask, the kernel would spill.
      MaskParams plain = mask;
      plain.has_row_ends = false;
      const SequenceMask sequence = plain.sequence(head.batch);
      return plain.row_keys(row, sequence);
    } else {
      return mask.row_keys(row, head.pad);
    }
  };
  int tile_begin, tile_end, seeing = 0;
  if constexpr (Config::kMasked) {
    const RowRange rows = rows_that_see<Config::kThreads>(
        mask.seqlen_q, KeyRange{first_key, first_key + keys}, live_of);
    tile_begin = static_cast<int>(rows.begin / kBlockM);
    tile_end = static_cast<int>(divide_up(rows.end, kBlockM));
  } else {
    const int64_t first_live_key = first_key < head.pad ? head.pad : first_key;
    const int64_t first_row = mask.first_row_seeing(first_live_key, head.pad);
    tile_begin = static_cast<int>(first_row / kBlockM);
    tile_end = first_key + keys <= head.pad ? tile_begin
                                            : static_cast<int>(divide_up(mask.seqlen_q, kBlockM));
    // `seeing` is the first row that sees any key, counted from the start of tile `tile_begin`.
    seeing = clamp_int(mask.first_row_seeing(head.pad, head.pad) - int64_t{kBlockM} * tile_begin, 0,
                       kBlockM);
  }
  const int64_t origin = int64_t{kBlockM} * tile_begin;

  const T* g_scores = head.of<T>(params.scores) + first_key;
  const T* g_dout = head.of<T>(params.dout) + first_column;
  const auto load_lse = [&](int64_t row, int rows, int stage) {
    if (threadIdx.x < kBlockM) {
      const bool reads = static_cast<int>(threadIdx.x) < rows;
      copy_async_4(shared_address(&s.s_lse[stage][threadIdx.x]),
                   reads ? params.lse + head.flat * mask.seqlen_q + row + threadIdx.x : params.lse,
                   reads ? 4 : 0);
    }
  };
  // The range of keys that each row of a tile sees, in one word. The low half of the word is the
  // begin, counted from the block's first key. The high half is the number of keys.
  __shared__ int s_live[Config::kMasked ? kStages : 1][kBlockM];
  const auto load = [&](int tile, int stage) {
    const int64_t row = int64_t{kBlockM} * tile;
    const int rows = clamp_int(mask.seqlen_q - row, 0, kBlockM);
    if constexpr (Config::kMasked) {
      static_assert(kBlockM == kWarp, "a lane per row");
      const int lane = threadIdx.x % kWarp;
      const KeyRange live = lane < rows ? live_of(row + lane) : KeyRange{0, 0};
      const int begin = clamp_int(live.begin - first_key, 0, kBlockN);
      const int end = clamp_int(live.end - first_key, 0, kBlockN);
      if (threadIdx.x < kWarp) s_live[stage][lane] = begin < end ? begin | (end - begin) << 16 : 0;
      const unsigned seeing_rows = __ballot_sync(~0u, begin < end);
      const auto reads_row = [=](int i) { return (seeing_rows >> i & 1) != 0; };
      load_tile_of<kBlockM, kBlockN, Config::kScorePitch, Config::kThreads>(
          &s.s_scores[stage][0][0], g_scores + row * params.scores.row_stride,
          params.scores.row_stride, reads_row, keys, params.scores.aligned);
      load_tile_of<kBlockM, kBlockD, Config::kDoutPitch, Config::kThreads>(
          &s.s_dout[stage][0][0], g_dout + row * params.dout.row_stride, params.dout.row_stride,
          reads_row, columns, params.dout.aligned);
      load_lse(row, rows, stage);
      return;
    }
    load_tile<kBlockM, kBlockN, Config::kScorePitch, Config::kThreads>(
        &s.s_scores[stage][0][0], g_scores + row * params.scores.row_stride,
        params.scores.row_stride, 0, rows, keys, params.scores.aligned);
    // Do not read dout of rows that see no key.
    load_tile<kBlockM, kBlockD, Config::kDoutPitch, Config::kThreads>(
        &s.s_dout[stage][0][0], g_dout + row * params.dout.row_stride, params.dout.row_stride,
        tile == tile_begin ? seeing : 0, rows, columns, params.dout.aligned);
    load_lse(row, rows, stage);
  };

  // begin[i] is the first row that sees key lane / 4 + 8 * i of the warp's 16 keys.
  const int warp_key = threadIdx.x / kWarp * 16, thread_key = warp_key + threadIdx.x % kWarp / 4;
  const int64_t key = first_key + warp_key + threadIdx.x % kWarp / 4;
  int begin[2];  // index in the current tile; undefined if the key is padding
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    begin[i] = clamp_int(mask.first_row_seeing(key + 8 * i, head.pad) - origin, 0, 2 * kBlockN);
  }
  const Logits<T> logits(problem.scale, Config::kMasked ? mask.softcap : 0.f);
  float acc[kBlockD / 8][4] = {};

#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (tile_begin + stage < tile_end) load(tile_begin + stage, stage);
    copy_async_commit();
  }
  int stage = 0;
  for (int tile = tile_begin; tile < tile_end; ++tile) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    const int ahead = tile + kStages - 1;
    if (ahead < tile_end) load(ahead, stage == 0 ? kStages - 1 : stage - 1);
    copy_async_commit();

    // NOTE: rows behind the last row need no mask. Their dout is 0, and their probabilities are
    // finite, because their scores and lse are 0.
#pragma unroll 1
    for (int first = 0; first < kBlockM; first += Config::kStepRows) {
      uint32_t words[4];
      load_left_transposed<T, Config::kScorePitch>(words, &s.s_scores[stage][first][warp_key]);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float p[kPerWord<T>];
        unpack_word<T>(p, words[r]);
#pragma unroll
        for (int half = 0; half < kPerWord<T>; ++half) {
          const int row = first + step_column<T>(r, half);
          const float lse = s.s_lse[stage][row];
          if constexpr (Config::kMasked) {
            const unsigned live = s_live[stage][row];
            const unsigned key_offset = thread_key + 8 * (r % 2) - (live & 0xffff);
            const float z = logits(p[half], lse).x;
            p[half] = key_offset < live >> 16 ? lean_exp<T>(z) : 0.f;
          } else {
            const float z = fmaf(p[half], problem.scale, -lse);
            p[half] = row >= begin[r % 2] ? biased_exp<T>(z) : 0.f;
          }
        }
        words[r] = pack_word<T>(p);
      }
      multiply_rows<T, Config::kTf32, kBlockD, Config::kDoutPitch>(
          acc, LeftOperand<T, Config::kTf32>(words), &s.s_dout[stage][first][0]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) begin[i] = max(begin[i] - kBlockM, 0);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  // Store the sums. The gradient of keys that are padding is 0.
  const float factor = exp2f(-kProbabilityBias<T>);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (key + 8 * i >= mask.seqlen_k) continue;
    const bool live = Config::kMasked || key + 8 * i >= head.pad;
    T* g_dvalue = static_cast<T*>(params.dvalue) +
                  (head.flat * mask.seqlen_k + key + 8 * i) * problem.head_dim_v + first_column;
#pragma unroll
    for (int n = 0; n < kBlockD / 8; ++n) {
      store_pair(g_dvalue, n * 8 + threadIdx.x % 4 * 2, columns, problem.head_dim_v % 2 == 0,
                 live ? acc[n][2 * i] * factor : 0.f, live ? acc[n][2 * i + 1] * factor : 0.f);
    }
  }
}

template <typename Config>
void launch_dvalue(const SoftmaxMatmulBackwardParams& params, cudaStream_t stream) {
  const SoftmaxMatmulProblem& problem = params.problem;
  const int64_t blocks = divide_up(problem.mask.seqlen_k, Config::kBlockN) *
                         divide_up(problem.head_dim_v, Config::kBlockD) * problem.batch *
                         problem.nheads;
  launch_blocks(dvalue_kernel<Config>, blocks, Config::kThreads, sizeof(typename Config::Shared),
                stream, params);
}

}  // namespace

void launch_softmax_matmul_dvalue(const SoftmaxMatmulBackwardParams& params, cudaStream_t stream) {
  dispatch_columns(params.problem, [&](auto element, auto tf32, auto columns) {
    using T = decltype(element);
    if (params.problem.mask.is_general()) {
      launch_dvalue<DvalueConfig<T, tf32.value, columns.value, true>>(params, stream);
    } else {
      launch_dvalue<DvalueConfig<T, tf32.value, columns.value, false>>(params, stream);
    }
  });
  check_launch("softmax_matmul_backward");
}

}  // namespace torchweld
