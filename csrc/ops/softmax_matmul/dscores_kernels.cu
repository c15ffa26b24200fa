// dscores = scale * p * (dout @ value^T - rowsum(dout * out)), 0 where a row does not see the key:
//   p = exp(scale * scores - lse), dscores (seqlen_q, seqlen_k); dout, out (seqlen_q, head_dim_v)
// With softcap, the slope of the cap is one more factor of dscores. dsink is a sum over rows. The
// term of a row is:
//   -exp(sink - lse) * rowsum(dout * out)
//
// A block processes 128 query rows of a head, and a warp processes 16 of these rows. The block
// loops over the tiles of keys that its rows see. In each tile it loops over head_dim_v in chunks
// of 128 bytes. cp.async fills a ring of tiles. If all chunks of dout fit in shared memory, dout
// stays there. The gradients overwrite the scores in shared memory. The block then stores them to
// dscores, 128 bytes per row. It does not read tiles of keys that none of its rows sees.
// Source: Dao, "FlashAttention-2", 2023, algorithm 2.
#include "ops/softmax_matmul/parts.cuh"

namespace torchweld {
namespace {

template <typename T_, bool kTf32_, bool kMasked_>
struct DscoresConfig {
  using T = T_;
  static constexpr bool kMasked = kMasked_;
  static constexpr bool kTf32 = kTf32_;
  static constexpr int kThreads = 256;
  static constexpr int kBlockM = kThreads / kWarp * 16;
  static constexpr int kBlockN = 128 / sizeof(T);  // number of keys in a tile: 128 bytes per row
  static constexpr int kChunk = 128 / sizeof(T);   // number of columns of value and dout in a chunk
  static constexpr int kSteps = kChunk * sizeof(T) / kStepBytes;
  static constexpr int kPitch = kBlockN + kPitchPadBytes / sizeof(T);
  static constexpr int kStages = 2;
  // The largest unroll factor without register spills.
  static constexpr int kUnroll = sizeof(T) == 4 ? 1 : kMasked ? 2 : kSteps;

  struct Shared {
    alignas(16) T s_scores[kStages][kBlockM][kPitch];
    alignas(16) T s_value[kStages][kBlockN][kPitch];
    alignas(16) T s_dout[kStages][kBlockM][kPitch];  // more stages if all chunks of dout fit
  };
  static constexpr int64_t kChunkBytes = sizeof(T) * kBlockM * kPitch;
  // The maximum number of chunks of dout that fit in the shared memory of every GPU from sm_80 on.
  static constexpr int64_t kResident =
      kStages + (99 * 1024 - int64_t(sizeof(Shared))) / kChunkBytes;
  static_assert(kResident >= kStages);
};

// Sets columns [begin, end) of the block's rows to 0.
template <typename Config>
__device__ __forceinline__ void clear_columns(typename Config::T* g_rows, int rows,
                                              int64_t row_stride, int64_t begin, int64_t end,
                                              bool aligned) {
  using T = typename Config::T;
  constexpr int kElems = kVectorBytes / sizeof(T);
  const int lane = threadIdx.x % kWarp;
  for (int row = threadIdx.x / kWarp; row < rows; row += Config::kThreads / kWarp) {
    T* g_row = g_rows + row * row_stride;
    if (aligned) {
      for (int64_t column = begin + lane * kElems; column < end; column += kWarp * kElems) {
        store_vec(g_row + column, Vec<T, kElems>{});
      }
    } else {
      for (int64_t column = begin + lane; column < end; column += kWarp) {
        g_row[column] = from_float<T>(0.f);
      }
    }
  }
}

// Stores a warp's 16 rows of a tile. Only the first `rows` rows and the first `columns` columns are
// stored.
template <typename Config>
__device__ __forceinline__ void store_rows(typename Config::T* g_rows,
                                           const typename Config::T* s_rows, int rows, int columns,
                                           int64_t row_stride, bool aligned) {
  using T = typename Config::T;
  constexpr int kElems = kVectorBytes / sizeof(T);
  constexpr int kRowChunks = Config::kBlockN / kElems;
  const int lane = threadIdx.x % kWarp;
  if (aligned) {
    const int column = lane % kRowChunks * kElems;
#pragma unroll
    for (int first = 0; first < 16; first += kWarp / kRowChunks) {
      const int row = first + lane / kRowChunks;
      if (row < rows && column < columns) {
        store_vec(g_rows + row * row_stride + column,
                  load_vec<T, kElems>(s_rows + row * Config::kPitch + column));
      }
    }
    return;
  }
#pragma unroll 1
  for (int row = 0; row < rows && row < 16; ++row) {
    for (int column = lane; column < columns; column += kWarp) {
      g_rows[row * row_stride + column] = s_rows[row * Config::kPitch + column];
    }
  }
}

// The statistics of a thread's two rows: rows lane / 4 and lane / 4 + 8 of the warp's 16 rows.
struct RowPair {
  float lse[2];
  float delta[2];       // sum(dout * out)
  int64_t live_end[2];  // the end of the range of keys that a row sees
  // Whether a row sees only one key.
  // NOTE: the gradient of such a row is exactly 0, because dp = delta. But dp and delta are rounded
  // differently, so such a row needs a special case.
  bool single[2];
};

template <typename T, typename LiveOf>
__device__ __forceinline__ RowPair load_row_pair(const SoftmaxMatmulBackwardParams& params,
                                                 const HeadIndex& head, int64_t warp_row,
                                                 const LiveOf& live_of) {
  const MaskParams mask = params.problem.mask;
  const T* g_out = head.of<T>(params.out);
  const T* g_dout = head.of<T>(params.dout);
  const int lane = threadIdx.x % kWarp;
  RowPair pair = {};
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const int64_t row = warp_row + i;
    // A row that sees no key is not read.
    const KeyRange live = row < mask.seqlen_q ? live_of(row) : KeyRange{0, 0};
    if (live.empty()) continue;
    float delta = 0.f;
    for (int64_t column = lane; column < params.problem.head_dim_v; column += kWarp) {
      delta = fmaf(to_float(g_dout[row * params.dout.row_stride + column]),
                   to_float(g_out[row * params.out.row_stride + column]), delta);
    }
    delta = warp_sum(delta);
    const float lse = params.lse[head.flat * mask.seqlen_q + row];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      if (i == lane / 4 + 8 * which) {
        pair.lse[which] = lse;
        pair.delta[which] = delta;
        pair.live_end[which] = live.end;
        pair.single[which] = live.end - live.begin == 1;
      }
    }
  }
  return pair;
}

template <typename Config>
__global__ __launch_bounds__(Config::kThreads,
                             2) void dscores_kernel(const SoftmaxMatmulBackwardParams params,
                                                    int64_t first_block) {
  using T = typename Config::T;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kChunk = Config::kChunk;
  constexpr int kPitch = Config::kPitch, kStages = Config::kStages;
  extern __shared__ __align__(16) unsigned char s_memory[];
  auto& s = *reinterpret_cast<typename Config::Shared*>(s_memory);

  // Find the rows and the keys that this block processes.
  const SoftmaxMatmulProblem& problem = params.problem;
  const MaskParams mask = problem.mask;
  const int64_t row_blocks = divide_up(mask.seqlen_q, kBlockM);
  const int64_t block = first_block + blockIdx.x;
  const int64_t first_row = (row_blocks - 1 - block % row_blocks) * kBlockM;
  const HeadIndex head(problem, block / row_blocks);
  const int rows = clamp_int(mask.seqlen_q - first_row, 0, kBlockM);
  // If the mask has only `causal` and leftpad, the last row sees every key that any other row sees.
  const TileMask seen = [&] {
    if constexpr (Config::kMasked) {
      return TileMask::general(mask, mask.sequence(head.batch), first_row);
    } else {
      const KeyRange last = mask.row_keys(first_row + rows - 1, head.pad);
      return TileMask{last.empty() ? KeyRange{0, 0} : last, {}, {}};
    }
  }();
  const int64_t tile_begin = seen.any.begin / kBlockN, tile_end = divide_up(seen.any.end, kBlockN);

  const bool aligned_out = mask.seqlen_k * int64_t(sizeof(T)) % kVectorBytes == 0;
  T* g_dscores =
      static_cast<T*>(params.dscores) + (head.flat * mask.seqlen_q + first_row) * mask.seqlen_k;
  clear_columns<Config>(g_dscores, rows, mask.seqlen_k, 0, tile_begin * kBlockN, aligned_out);
  clear_columns<Config>(g_dscores, rows, mask.seqlen_k, tile_end * kBlockN, mask.seqlen_k,
                        aligned_out);
  if (tile_end == 0) return;

  const T* g_scores = head.of<T>(params.scores) + first_row * params.scores.row_stride;
  const T* g_dout = head.of<T>(params.dout) + first_row * params.dout.row_stride;
  const T* g_value = head.of<T>(params.value);
  const int64_t chunks = divide_up(problem.head_dim_v, kChunk);
  const bool resident = chunks <= Config::kResident;
  const auto dout_buffer = [&](int64_t chunk, int stage) {
    return &s.s_dout[0][0][0] + (resident ? chunk : stage) * (kBlockM * kPitch);
  };
  const auto load = [&](int64_t tile, int64_t chunk, int stage) {
    const int64_t key = tile * kBlockN, column = chunk * kChunk;
    const int keys_end = clamp_int(mask.seqlen_k - key, 0, kBlockN);
    const int columns = clamp_int(problem.head_dim_v - column, 0, kChunk);
    if (chunk == 0) {
      load_tile<kBlockM, kBlockN, kPitch, Config::kThreads>(
          &s.s_scores[tile % kStages][0][0], g_scores + key, params.scores.row_stride, 0, rows,
          keys_end, params.scores.aligned);
    }
    load_tile<kBlockN, kChunk, kPitch, Config::kThreads>(
        &s.s_value[stage][0][0], g_value + key * params.value.row_stride + column,
        params.value.row_stride,
        clamp_int((Config::kMasked ? seen.any.begin : head.pad) - key, 0, kBlockN),
        Config::kMasked ? clamp_int(seen.any.end - key, 0, kBlockN) : keys_end, columns,
        params.value.aligned);
    if (!resident || tile == tile_begin) {
      load_tile<kBlockM, kChunk, kPitch, Config::kThreads>(dout_buffer(chunk, stage),
                                                           g_dout + column, params.dout.row_stride,
                                                           0, rows, columns, params.dout.aligned);
    }
  };

  load(tile_begin, 0, 0);
  copy_async_commit();
  const int warp_row = threadIdx.x / kWarp * 16;
  const auto live_of = [&](int64_t i) {
    if constexpr (Config::kMasked) {
      return mask.row_keys(i, mask.sequence(head.batch));
    } else {
      return mask.row_keys(i, head.pad);
    }
  };
  RowPair row = load_row_pair<T>(params, head, first_row + warp_row, live_of);
  // NOTE: the key ranges are in shared memory, because the kernel has no registers for them. Only
  // the warp of a row reads the row's range.
  __shared__ int64_t s_begin[kBlockM], s_end[kBlockM];
  if constexpr (Config::kMasked) {
    const int thread_row = warp_row + threadIdx.x % kWarp / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s_begin[thread_row + 8 * i] = seen.rows[i].begin;
      s_end[thread_row + 8 * i] = seen.rows[i].end;
      if (!mask.sink) continue;
      // With a sink, the gradient of a row with only one key is not 0, so the special case does not
      // apply.
      row.single[i] = false;
      if (params.sink_terms && seen.rows[i].end > 0 && threadIdx.x % 4 == 0) {
        params.sink_terms[head.flat * mask.seqlen_q + first_row + thread_row + 8 * i] =
            -expf(mask.sink[head.head] - row.lse[i]) * row.delta[i];
      }
    }
  }
  const Logits<T> logits(problem.scale, Config::kMasked ? mask.softcap : 0.f);
  float dp[kBlockN / 8][4];
  int stage = 0;
  for (int64_t tile = tile_begin, chunk = 0; tile < tile_end;) {
    const bool last_chunk = chunk + 1 == chunks;
    const int64_t next_tile = last_chunk ? tile + 1 : tile;
    const int64_t next_chunk = last_chunk ? 0 : chunk + 1;
    copy_async_wait<0>();
    __syncthreads();
    if (next_tile < tile_end) load(next_tile, next_chunk, stage ^ 1);
    copy_async_commit();

    // dp += dout @ value^T
    if (chunk == 0) {
#pragma unroll
      for (int n = 0; n < kBlockN / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dp[n][i] = 0.f;
      }
    }
    const T* s_dout = dout_buffer(chunk, stage) + warp_row * kPitch;
#pragma unroll Config::kUnroll
    for (int step = 0; step < Config::kSteps; ++step) {
      const int column = step * (kStepBytes / int(sizeof(T)));
      uint32_t words[4];
      load_left(words, s_dout + column, kPitch);
      multiply_transposed<T, Config::kTf32, kBlockN, kPitch>(
          dp, LeftOperand<T, Config::kTf32>(words), &s.s_value[stage][0][0] + column);
    }

    if (last_chunk) {
      // Overwrite the scores with their gradients, then store them.
      const int64_t key = tile * kBlockN;
      T* s_rows = &s.s_scores[tile % kStages][warp_row][0];
      const float unbias = exp2f(-kProbabilityBias<T>);
      const int quad_row = threadIdx.x % kWarp / 4, quad_column = threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int64_t row_begin = head.pad, row_end = row.live_end[i];
        if constexpr (Config::kMasked) {
          row_begin = s_begin[warp_row + quad_row + 8 * i];
          row_end = s_end[warp_row + quad_row + 8 * i];
        }
        const int begin = clamp_int(row_begin - key, 0, kBlockN);
        const int end = clamp_int(row_end - key, 0, kBlockN);
        T* s_row = s_rows + (quad_row + 8 * i) * kPitch + quad_column;
#pragma unroll
        for (int n = 0; n < kBlockN / 8; ++n) {
          auto pair = load_vec<T, 2>(s_row + n * 8);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int column = n * 8 + quad_column + half;
            const float score = to_float(pair.values[half]);
            float2 z = {fmaf(score, problem.scale, -row.lse[i]), 1.f};
            if constexpr (Config::kMasked) z = logits(score, row.lse[i]);
            const float p = biased_exp<T>(z.x) * unbias;
            const float d = dp[n][2 * i + half];
            float ds = p * (d - (row.single[i] ? d : row.delta[i])) * problem.scale;
            if constexpr (Config::kMasked) ds *= z.y;
            pair.values[half] = from_float<T>(column >= begin && column < end ? ds : 0.f);
          }
          store_vec(s_row + n * 8, pair);
        }
      }
      __syncwarp();
      store_rows<Config>(g_dscores + warp_row * mask.seqlen_k + key, s_rows, rows - warp_row,
                         clamp_int(mask.seqlen_k - key, 0, kBlockN), mask.seqlen_k, aligned_out);
    }
    tile = next_tile;
    chunk = next_chunk;
    stage ^= 1;
  }
}

template <typename Config>
void launch_dscores(const SoftmaxMatmulBackwardParams& params, cudaStream_t stream) {
  const SoftmaxMatmulProblem& problem = params.problem;
  const int64_t blocks =
      divide_up(problem.mask.seqlen_q, Config::kBlockM) * problem.batch * problem.nheads;
  const int64_t chunks = divide_up(problem.head_dim_v, Config::kChunk);
  const int64_t more = chunks <= Config::kResident ? chunks - Config::kStages : 0;
  launch_blocks(dscores_kernel<Config>, blocks, Config::kThreads,
                sizeof(typename Config::Shared) + (more > 0 ? more * Config::kChunkBytes : 0),
                stream, params);
}

}  // namespace

void launch_softmax_matmul_dscores(const SoftmaxMatmulBackwardParams& params, cudaStream_t stream) {
  dispatch_math(params.problem, [&](auto element, auto tf32) {
    using T = decltype(element);
    if (params.problem.mask.is_general()) {
      launch_dscores<DscoresConfig<T, tf32.value, true>>(params, stream);
    } else {
      launch_dscores<DscoresConfig<T, tf32.value, false>>(params, stream);
    }
  });
  check_launch("softmax_matmul_backward");
}

}  // namespace torchweld
