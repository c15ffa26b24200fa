// out = softmax(scale * scores) @ value:
//   scores (seqlen_q, seqlen_k), value (seqlen_k, head_dim_v), out (seqlen_q, head_dim_v) of a head
//
// A block has 128 query rows of a head and up to 128 columns of value. A warp has 16 of the rows.
// The block loops over the tiles of keys that its rows see. Under a general mask, the loop runs
// from the first to the last key that any row of the block sees. cp.async fills a ring of tiles.
// ldmatrix loads scores into the registers of the left operand. The warp replaces each score there
// by its exponential relative to the running maximum, and rounds it. The tensor cores multiply the
// exponentials by value. At the end, the kernel divides once by the sum of exponentials. The blocks
// of different columns of value all read the scores, so the scores are read once per 128 columns of
// value.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al.,
// "FlashAttention", 2022, algorithm 1 without its first product.
#include "ops/softmax_matmul/block_gaps.cuh"
#include "ops/softmax_matmul/parts.cuh"

namespace torchweld {
namespace {

template <typename T_, bool kTf32_, int kBlockD_, bool kMasked_>
struct ForwardConfig {
  using T = T_;
  static constexpr bool kMasked = kMasked_;
  static constexpr bool kCapsLate = kMasked && sizeof(T_) == 2;  // scores are capped in registers
  static constexpr bool kTf32 = kTf32_;
  static constexpr int kThreads = 256;
  static constexpr bool kExact = sizeof(T) == 4 && !kTf32;
  static constexpr int kMinBlocks = kExact ? 1 : 2;  // number of blocks per SM, without spills
  static constexpr int kUnroll = kExact || kBlockD_ > 64 ? 1 : 2;
  static constexpr int kBlockM = kThreads / kWarp * 16;
  static constexpr int kBlockN = 128 / sizeof(T);  // number of keys in a tile: 128 bytes per row
  static constexpr int kBlockD = kBlockD_;
  static constexpr int kStages = kBlockD == 64 ? 3 : 2;
  static constexpr int kSteps = kBlockN * sizeof(T) / kStepBytes;
  static constexpr int kScorePitch = kBlockN + kPitchPadBytes / sizeof(T);
  static constexpr int kValuePitch = kBlockD + kPitchPadElems;

  struct Shared {
    alignas(16) T s_scores[kStages][kBlockM][kScorePitch];
    alignas(16) T s_value[kStages][kBlockN][kValuePitch];
  };
  static_assert(sizeof(Shared) <= 99 * 1024, "the shared memory of every GPU from sm_80 on");
};

// Converts x = sign * score into a probability: exp((x - max) * |scale|), times 2^kProbabilityBias.
// If the scale is 0, scores are still multiplied by 0, so that an infinite score gives NaN, as in
// torch.
template <typename T>
struct ScoreExponent {
  static constexpr bool kPowerOf2 = sizeof(T) == 2;  // 2^x needs one instruction, unlike e^x
  float sign;
  float c;
  __device__ __forceinline__ explicit ScoreExponent(float scale)
      : sign(scale > 0.f ? 1.f : (scale < 0.f ? -1.f : 0.f)),
        c((scale == 0.f ? 1.f : fabsf(scale)) * (kPowerOf2 ? kLog2e : 1.f)) {}
  // NOTE: x - max is computed before the multiplication. For the largest score, x - max is exactly
  // 0, so the probability of the largest score is exactly 1. With x * c - max * c instead, a
  // rounding could make the exponent differ from 0. For 16-bit types, subnormal probabilities
  // become 0. This is harmless, because the row also has a probability of 1.
  __device__ __forceinline__ float operator()(float x, float max) const {
    if constexpr (kPowerOf2) return exp2_approx_ftz(fmaf(x - max, c, kProbabilityBias<T>));
    return expf((x - max) * c);
  }
  // Returns the factor that rescales a sum of exponentials from the maximum `max` to the maximum
  // `larger`.
  __device__ __forceinline__ float rescale(float max, float larger) const {
    const float exponent = (max - finite_max(larger)) * c;
    return kPowerOf2 ? exp2_approx(exponent) : expf(exponent);
  }
};

// ScoreExponent with a soft cap.
template <typename T>
struct CappedScoreExponent : ScoreExponent<T> {
  CappedScale scale;
  __device__ __forceinline__ CappedScoreExponent(float scale, float softcap)
      : ScoreExponent<T>(scale), scale(scale, softcap) {
    this->c = this->scale.size * (ScoreExponent<T>::kPowerOf2 ? kLog2e : 1.f);
    if (kInPlace && softcap > 0.f) this->sign = 1.f;
  }

  // fp32 scores are capped once, in shared memory, which holds the capped scores exactly. 16-bit
  // scores are capped twice, in registers: once for the maximum and once for the exponentials.
  static constexpr bool kInPlace = sizeof(T) == 4;
  template <int kColumns, int kPitch>
  __device__ __forceinline__ void cap_in_place(T* s_rows) const {
    static_assert(kColumns == kWarp);
    if (scale.softcap == 0.f) return;
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      T& x = s_rows[row * kPitch + threadIdx.x % kWarp];
      x = capped(scale.sign * x);
    }
    __syncwarp();
  }
  // Applies the soft cap to x = sign * score. The cap maps -inf to -1. Therefore callers set hidden
  // scores to -inf after the cap, not before.
  __device__ __forceinline__ float capped(float x) const {
    return scale.softcap > 0.f ? tanh_of<sizeof(T) == 4>(x * scale.cap) : x;
  }
};

template <typename Config>
using ExponentOf = std::conditional_t<Config::kMasked, CappedScoreExponent<typename Config::T>,
                                      ScoreExponent<typename Config::T>>;

// A warp's 16 rows of a tile of scores. A loaded value is sign * score if the row sees the key,
// else -inf.
template <typename Config>
struct ScoreTile {
  using T = typename Config::T;
  const T* s_rows;
  float sign;
  bool hides;            // false if all rows see all keys and sign is 1
  int begin[2], end[2];  // row lane / 4 + 8 * i sees the keys [begin[i], end[i])

  __device__ __forceinline__ bool sees(int key, int row) const {
    return key >= begin[row] && key < end[row];
  }

  // NOTE: scores are loaded twice from shared memory: for the maximum and for the exponentials. If
  // the scores stayed in registers instead, there would be no registers for a second block per SM.
  __device__ __forceinline__ void load(uint32_t (&words)[4], int step) const {
    const int column = step * (kStepBytes / int(sizeof(T)));
    load_left(words, s_rows + column, Config::kScorePitch);
    if (!hides) return;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float x[kPerWord<T>];
      unpack_word<T>(x, words[r]);
#pragma unroll
      for (int half = 0; half < kPerWord<T>; ++half) {
        const int key = column + step_column<T>(r, half);
        x[half] = sees(key, r % 2) ? sign * x[half] : -INFINITY;
      }
      words[r] = pack_word<T>(x);  // this rounding is exact
    }
  }
};

// The state of the online softmax of a warp's 16 rows. A thread holds rows lane / 4 and lane / 4 +
// 8.
template <typename Config>
struct RunningSoftmax {
  using T = typename Config::T;
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};  // sums of exponentials over the columns that this thread holds
  float acc[Config::kBlockD / 8][4] = {};

  // Updates the running maxima with the scores of the tile and rescales the sums.
  __device__ __forceinline__ void raise(const ScoreTile<Config>& scores,
                                        const ExponentOf<Config>& exponent) {
    uint32_t highest[4];
    scores.load(highest, 0);
#pragma unroll
    for (int step = 1; step < Config::kSteps; ++step) {
      uint32_t words[4];
      scores.load(words, step);
#pragma unroll
      for (int r = 0; r < 4; ++r) highest[r] = max_of_words<T>(highest[r], words[r]);
    }
    bool raised = false;
    float factor[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float x[kPerWord<T>];
      unpack_word<T>(x, max_of_words<T>(highest[row], highest[row + 2]));
      float largest = fmaxf(x[0], x[kPerWord<T> - 1]);
      if constexpr (Config::kCapsLate) largest = exponent.capped(largest);
      largest = fmaxf(max[row], largest);
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      raised |= largest != max[row];
      factor[row] = exponent.rescale(max[row], largest);
      if (largest == max[row]) factor[row] = 1.f;
      max[row] = largest;
    }
    if (!__any_sync(~0u, raised)) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) sum[row] *= factor[row];
#pragma unroll
    for (int n = 0; n < Config::kBlockD / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] *= factor[i / 2];
    }
  }

  // Computes acc += p @ value for one tile.
  __device__ __forceinline__ void add(const ScoreTile<Config>& scores,
                                      const ExponentOf<Config>& exponent, const T* s_value) {
    const float shift[2] = {finite_max(max[0]), finite_max(max[1])};
#pragma unroll Config::kUnroll
    for (int step = 0; step < Config::kSteps; ++step) {
      uint32_t words[4];
      scores.load(words, step);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float p[kPerWord<T>];
        unpack_word<T>(p, words[r]);
#pragma unroll
        for (int half = 0; half < kPerWord<T>; ++half) {
          if constexpr (Config::kCapsLate) {
            if (exponent.scale.softcap > 0.f) {
              const int key = step * (kStepBytes / int(sizeof(T))) + step_column<T>(r, half);
              const bool seen = !scores.hides || scores.sees(key, r % 2);
              p[half] = seen ? exponent.capped(p[half]) : -INFINITY;
            }
          }
          p[half] = exponent(p[half], shift[r % 2]);
          sum[r % 2] += p[half];
        }
        words[r] = pack_word<T>(p);
      }
      multiply_rows<T, Config::kTf32, Config::kBlockD, Config::kValuePitch>(
          acc, LeftOperand<T, Config::kTf32>(words),
          s_value + step * (kStepBytes / int(sizeof(T))) * Config::kValuePitch);
    }
  }
};

template <typename Config>
__global__ __launch_bounds__(Config::kThreads, Config::kMinBlocks) void softmax_matmul_kernel(
    const SoftmaxMatmulParams params, int64_t first_block) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockD = Config::kBlockD;
  extern __shared__ __align__(16) unsigned char s_memory[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_memory);

  // Find the rows, the columns and the keys that this block processes. The blocks with the longest
  // rows of a head come first, because the rows of a head take different times under `causal`.
  const SoftmaxMatmulProblem& problem = params.problem;
  const MaskParams mask = problem.mask;
  const int64_t row_blocks = divide_up(mask.seqlen_q, kBlockM);
  const int64_t column_blocks =
      problem.head_dim_v == 0 ? 1 : divide_up(problem.head_dim_v, kBlockD);
  const int64_t block = first_block + blockIdx.x;
  const int64_t first_column = block % column_blocks * kBlockD;
  const int64_t first_row = (row_blocks - 1 - block / column_blocks % row_blocks) * kBlockM;
  const HeadIndex head(problem, block / column_blocks / row_blocks);
  const int rows = clamp_int(mask.seqlen_q - first_row, 0, kBlockM);
  const int columns = clamp_int(problem.head_dim_v - first_column, 0, kBlockD);
  const auto seen = [&] {
    if constexpr (Config::kMasked) {
      return TileMask::general(mask, mask.sequence(head.batch), first_row);
    } else {
      return TileMask::causal(mask, head.pad, first_row, rows);
    }
  }();
  const int64_t tile_begin = seen.any.begin / kBlockN, tile_end = divide_up(seen.any.end, kBlockN);
  // A gap is a range of keys that no row of the block sees, with seen keys before and after it.
  // `position` is the position of the block's first row.
  [[maybe_unused]] const bool may_have_gaps = Config::kMasked && mask.causal && mask.key_start;
  [[maybe_unused]] int64_t position = 0;
  [[maybe_unused]] __shared__ BlockGaps<Config> s_gaps;
  if (may_have_gaps) {
    position = mask.position(first_row, mask.sequence(head.batch).end);
    s_gaps.find(seen, position);
  }

  const T* g_scores = head.of<T>(params.scores) + first_row * params.scores.row_stride;
  const T* g_value = head.of<T>(params.value) + first_column;
  const auto load = [&](int64_t tile, int stage) {
    const int64_t key = tile * kBlockN;
    const int keys_end = clamp_int(mask.seqlen_k - key, 0, kBlockN);
    load_tile<kBlockM, kBlockN, Config::kScorePitch, Config::kThreads>(
        &s.s_scores[stage][0][0], g_scores + key, params.scores.row_stride, 0, rows, keys_end,
        params.scores.aligned);
    load_tile<kBlockN, kBlockD, Config::kValuePitch, Config::kThreads>(
        &s.s_value[stage][0][0], g_value + key * params.value.row_stride, params.value.row_stride,
        clamp_int((Config::kMasked ? seen.any.begin : head.pad) - key, 0, kBlockN),
        Config::kMasked ? clamp_int(seen.any.end - key, 0, kBlockN) : keys_end, columns,
        params.value.aligned);
  };

  const int warp_row = threadIdx.x / kWarp * 16;
  const int64_t row = first_row + warp_row + threadIdx.x % kWarp / 4;
  const auto exponent = [&] {
    if constexpr (Config::kMasked) {
      return CappedScoreExponent<T>(problem.scale, mask.softcap);
    } else {
      return ScoreExponent<T>(problem.scale);
    }
  }();
  RunningSoftmax<Config> softmax;

#pragma unroll
  for (int stage = 0; stage < Config::kStages - 1; ++stage) {
    if (tile_begin + stage < tile_end) load(tile_begin + stage, stage);
    copy_async_commit();
  }
  int stage = 0;
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    copy_async_wait<Config::kStages - 2>();
    __syncthreads();
    const int64_t ahead = tile + Config::kStages - 1;
    if (ahead < tile_end) load(ahead, stage == 0 ? Config::kStages - 1 : stage - 1);
    copy_async_commit();

    const int64_t key = tile * kBlockN;
    if (may_have_gaps) s_gaps.clear(&s.s_value[stage][0][0], key, position);
    const bool hides = key < seen.all.begin || key + kBlockN > seen.all.end || exponent.sign != 1.f;
    if constexpr (Config::kMasked && !Config::kCapsLate) {
      exponent.template cap_in_place<kBlockN, Config::kScorePitch>(&s.s_scores[stage][warp_row][0]);
    }
    const ScoreTile<Config> scores = {&s.s_scores[stage][warp_row][0],
                                      exponent.sign,
                                      hides,
                                      {clamp_int(seen.rows[0].begin - key, 0, kBlockN),
                                       clamp_int(seen.rows[1].begin - key, 0, kBlockN)},
                                      {clamp_int(seen.rows[0].end - key, 0, kBlockN),
                                       clamp_int(seen.rows[1].end - key, 0, kBlockN)}};
    softmax.raise(scores, exponent);
    softmax.add(scores, exponent, &s.s_value[stage][0][0]);
    stage = stage + 1 == Config::kStages ? 0 : stage + 1;
  }

  // Divide by the sums and store.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = softmax.sum[i];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (row + 8 * i >= mask.seqlen_q) continue;
    const int64_t flat_row = head.flat * mask.seqlen_q + row + 8 * i;
    const bool empty = seen.rows[i].empty();
    float factor = 1.f / sum;
    if constexpr (Config::kMasked) {
      const float unbias = exp2f(-kProbabilityBias<T>);
      const float sink = mask.sink ? mask.sink[head.head] : -INFINITY;
      const FinishedRow finished = finish_row(exponent.scale, softmax.max[i], sum * unbias, sink);
      factor = finished.factor * unbias;
      if (params.lse && first_column == 0 && threadIdx.x % 4 == 0) {
        params.lse[flat_row] = empty ? sink : finished.lse;
      }
    } else if (params.lse && first_column == 0 && threadIdx.x % 4 == 0) {
      // If a row sees only scores of -inf, its results are NaN here and in the backward, as in
      // torch.
      const float total = sum * exp2f(-kProbabilityBias<T>);
      const float lse = fmaf(softmax.max[i], fabsf(problem.scale), logf(total));
      params.lse[flat_row] = empty ? -INFINITY : (total == 0.f ? NAN : lse);
    }
    T* g_out = static_cast<T*>(params.out) + flat_row * problem.head_dim_v + first_column;
#pragma unroll
    for (int n = 0; n < kBlockD / 8; ++n) {
      const int column = n * 8 + threadIdx.x % 4 * 2;
      store_pair(g_out, column, columns, problem.head_dim_v % 2 == 0,
                 empty ? 0.f : softmax.acc[n][2 * i] * factor,
                 empty ? 0.f : softmax.acc[n][2 * i + 1] * factor);
    }
  }
}

template <typename Config>
void launch_forward(const SoftmaxMatmulParams& params, cudaStream_t stream) {
  const SoftmaxMatmulProblem& problem = params.problem;
  const int64_t column_blocks =
      problem.head_dim_v == 0 ? 1 : divide_up(problem.head_dim_v, Config::kBlockD);
  const int64_t blocks = divide_up(problem.mask.seqlen_q, Config::kBlockM) * column_blocks *
                         problem.batch * problem.nheads;
  launch_blocks(softmax_matmul_kernel<Config>, blocks, Config::kThreads,
                sizeof(typename Config::Shared), stream, params);
}

template <bool kMasked>
void launch_sm90(const SoftmaxMatmulParams& params, cudaStream_t stream) {
  params.problem.dtype == DType::kFloat16
      ? launch_softmax_matmul_sm90<__half, kMasked>(params, stream)
      : launch_softmax_matmul_sm90<__nv_bfloat16, kMasked>(params, stream);
}

}  // namespace

void launch_softmax_matmul(const SoftmaxMatmulParams& params, cudaStream_t stream) {
  const MaskParams mask = params.problem.mask;
  if (params.counters != nullptr) {
    mask.is_general() || mask.leftpad ? launch_sm90<true>(params, stream)
                                      : launch_sm90<false>(params, stream);
    return check_launch("softmax_matmul");
  }
  dispatch_columns(params.problem, [&](auto element, auto tf32, auto columns) {
    using T = decltype(element);
    if (mask.is_general()) {
      launch_forward<ForwardConfig<T, tf32.value, columns.value, true>>(params, stream);
    } else {
      launch_forward<ForwardConfig<T, tf32.value, columns.value, false>>(params, stream);
    }
  });
  check_launch("softmax_matmul");
}

}  // namespace torchweld
