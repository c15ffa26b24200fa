// y = x @ W^T + bias for a repacked 4-bit weight W and at most 16 rows of 16-bit x: the time is
// that of reading the weight once.
//
// A block owns some neighbouring tiles of 16 rows of W and all of K, of which each warp has its own
// steps. A warp stages its columns of x once, then streams its steps of tile after tile straight
// from memory into registers, `depth` of them ahead; the warps meet once in a few tiles, to add
// their sums in a fixed order. A step is of one group, so that its scale multiplies the sums.
//
// Rounding: codes less zeros are exact, sums are fp32 and nothing else is rounded before y.
#pragma once

#include "core/choices.h"
#include "core/launch.h"
#include "ops/int4_linear/int4_fragments.cuh"
#include "ops/int4_linear/int4_linear.h"

namespace torchweld {

// Codes become 16-bit numbers in one fma: as the lowest bits of a number they are subnormal, or in
// the first normal binade, which has the same spacing. The power of two that lifts them does not
// fit into one factor; kInt4Lift makes good for the rest when all is added up.
template <typename U>
inline constexpr bool kIsHalf = std::is_same_v<U, __half>;
template <typename U>
inline constexpr uint32_t kInt4Lift0 = kIsHalf<U> ? 0x78007800u : 0x7f007f00u;  // 2^15, 2^127
template <typename U>
inline constexpr uint32_t kInt4Lift4 = kIsHalf<U> ? 0x68006800u : 0x7d007d00u;  // a 16th of it
template <typename U>
inline constexpr float kInt4Lift = kIsHalf<U> ? 512.f : 64.f;

template <typename U>
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (kIsHalf<U>) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

// The negative zeros of a lane's two rows, twice, in units of a lifted code.
template <typename U>
struct Int4LiftedZeros {
  uint32_t low, high;

  // `shift` is 4 bits a row.
  __device__ __forceinline__ Int4LiftedZeros(uint2 zeros, int shift)
      : low(lifted(zeros.x >> shift)), high(lifted(zeros.y >> shift)) {}

 private:
  static __device__ __forceinline__ uint32_t lifted(uint32_t zeros) {
    return fma_pair<U>((zeros & 15) * 0x10001, kInt4Lift0<U> | 0x80008000u, 0);
  }
};

template <typename U>
__device__ __forceinline__ void int4_unpack_lifted(uint32_t (&r)[4], uint32_t word,
                                                   const Int4LiftedZeros<U>& zeros) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t codes = word >> (4 * i);
    r[i] = fma_pair<U>(codes & 0x000f000f, kInt4Lift0<U>, zeros.low);
    r[i + 1] = fma_pair<U>(codes & 0x00f000f0, kInt4Lift4<U>, zeros.high);
  }
}

// Sixteen bytes that nobody reads again.
__device__ __forceinline__ uint4 stream_words(const void* g_from) {
  uint4 words;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(g_from));
  return words;
}

// A warp's step of a tile in registers.
template <int kChunks>
struct Int4Item {
  uint4 words[kChunks];
  uint32_t scale;  // of rows g and g + 8
  uint2 zeros;
};

// A warp's loads: its steps of a tile, tile after tile.
// NOTE: bases are opaque, so that an address is one multiply-add of a small index; the compiler
// would compute them anew in every step.
template <int kChunks>
class Int4Stream {
  static constexpr uint32_t kStepBytes = kChunks * kInt4ChunkWords * 4;

 public:
  __device__ __forceinline__ Int4Stream(const Int4Weight& weight, const Int4DecodePlan& plan,
                                        int64_t tile, int begin, int end, int lane)
      : g_words_(reinterpret_cast<const char*>(weight.packed) + tile * plan.steps * kStepBytes +
                 lane * 16),
        step_at_(begin),
        step_gap_(plan.steps - (end - begin)),
        groups_(plan.groups),
        begin_(begin),
        end_(end),
        step_(begin) {
    const int64_t group = tile * plan.groups;
    g_scale_ = static_cast<const char*>(weight.scale) + group * 32 + lane / 4 * 4;
    g_zero_ = reinterpret_cast<const char*>(weight.zero) + group * 8;
    asm volatile("" : "+l"(g_words_), "+l"(g_scale_), "+l"(g_zero_));
  }

  __device__ __forceinline__ void load(Int4Item<kChunks>& item, const FastDivisor& group_steps) {
    const char* g_from = g_words_ + uint64_t{step_at_} * kStepBytes;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) item.words[i] = stream_words(g_from + i * 512);
    const uint32_t group = first_group_ + group_steps.divide(step_);
    item.scale = __ldg(reinterpret_cast<const uint32_t*>(g_scale_ + uint64_t{group} * 32));
    item.zeros = __ldg(reinterpret_cast<const uint2*>(g_zero_ + uint64_t{group} * 8));
    ++step_at_;
    if (++step_ == end_) {
      step_ = begin_;
      step_at_ += step_gap_;
      first_group_ += groups_;
    }
  }

 private:
  const char *g_words_, *g_scale_, *g_zero_;
  uint32_t step_at_, step_gap_, first_group_ = 0;  // from the block's first tile on
  int groups_, begin_, end_, step_;
};

// A warp's columns of x to shared memory, row after row.
__device__ __forceinline__ void int4_stage_x(uint32_t s_warp, int s_row_bytes, const char* g_x,
                                             int64_t g_row_bytes, int tokens, int bytes, int lane) {
#pragma unroll 1
  for (int at = lane * 16; at < bytes; at += 512) {
    const char* g_from = g_x + at;
    uint32_t s_to = s_warp + at;
#pragma unroll 4
    for (int token = 0; token < tokens; ++token) {
      copy_async_16(s_to, g_from, 16);
      s_to += s_row_bytes;
      g_from += g_row_bytes;
    }
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncwarp();
}

template <typename T, int kTile>
struct Int4DecodeMath {
  static constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  static constexpr int kGroups = kT.tokens / 8, kStep = kT.chunks, kChains = kT.chains;
  using Sums = float[kGroups][4];

  // Where a lane's rows of x lie, for ldmatrix: 8 tokens by 32 columns at a time. Tokens that do
  // not exist are the last one again; nobody stores their sums.
  static __device__ __forceinline__ void find_x(uint32_t (&s_x)[kGroups], uint32_t s_warp,
                                                int row_bytes, int tokens, int lane) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      s_x[i] = s_warp + min(lane % 8 + 8 * i, tokens - 1) * row_bytes + lane / 8 * 16;
      asm volatile("" : "+r"(s_x[i]));  // NOTE: else it is computed anew in every step
    }
  }

  // acc += scale * (codes - zeros) @ x^T, lifted. `at` is the step's place in a row of x, bytes.
  template <bool kSpecial>
  static __device__ __forceinline__ void add(Sums& acc, const Int4Item<kStep>& item,
                                             const uint32_t (&s_x)[kGroups], int at, int shift) {
    Int4RowScales<T> scales(reinterpret_cast<const Vec<T, 2>&>(item.scale));
    const Int4LiftedZeros<T> zeros(item.zeros, shift);
    Sums sums[kChains] = {};
#pragma unroll
    for (int i = 0; i < 2 * kStep; ++i) {
      const uint4& words = item.words[i / 2];
      uint32_t b[kGroups][4];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) load_matrix_4(b[g], s_x[g] + at + i * 64);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int slice = i % 2 * 2 + half;
        const uint32_t word = slice == 0   ? words.x
                              : slice == 1 ? words.y
                              : slice == 2 ? words.z
                                           : words.w;
        uint32_t a[4];
        int4_unpack_lifted<T>(a, word, zeros);
        if constexpr (kSpecial) scales.scale_codes(a);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          mma_16816<T>(sums[half % kChains][g], a, b[g][2 * half], b[g][2 * half + 1]);
        }
      }
    }
    if constexpr (kSpecial) scales.keep_finite();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = sums[0][g][i];
        if constexpr (kChains == 2) sum += sums[1][g][i];
        acc[g][i] = fmaf(i < 2 ? scales.low : scales.high, sum, acc[g][i]);
      }
    }
  }
};

// Where a sum stands in a slot of [pair of tokens][token][row].
__device__ __forceinline__ int int4_slot_place(int token, int row) {
  return token / 2 * Int4DecodeTile::kPairFloats + token % 2 * kInt4TileRows + row;
}

template <typename T, int kTile>
__device__ __forceinline__ void int4_decode_finish(const GemmParams& p, const float* s_slots,
                                                   int64_t first_row, int tiles) {
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  for (int i = threadIdx.x; i < tiles * kT.tokens * kInt4TileRows; i += kT.threads()) {
    const int in = i % kInt4TileRows, token = i / kInt4TileRows % kT.tokens;
    const int tile = i / (kInt4TileRows * kT.tokens);
    const int64_t row = first_row + tile * kInt4TileRows + in;
    if (token >= p.m || row >= p.n) continue;
    const float* s_from = s_slots + tile * kT.warps * kT.slot_floats() + int4_slot_place(token, in);
    float sum = 0.f;
#pragma unroll
    for (int warp = 0; warp < kT.warps; ++warp) sum += s_from[warp * kT.slot_floats()];
    sum *= kInt4Lift<T>;
    if (p.epilogue.bias != nullptr) sum += to_float(static_cast<const T*>(p.epilogue.bias)[row]);
    static_cast<T*>(p.y)[token * p.y_row_stride + row] = from_float<T>(sum);
  }
}

template <typename T, int kTile>
__global__ void __launch_bounds__(kInt4DecodeTiles[kTile].threads(), 1)
    int4_decode_kernel(const __grid_constant__ Int4LinearParams p,
                       const __grid_constant__ Int4DecodePlan plan) {
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  constexpr int kDepth = kT.depth, kMeet = kT.meet;
  constexpr int kSlots = kT.warps * kT.slot_floats();  // of a tile of rows
  constexpr int kXStep = kT.chunks * kInt4ChunkK * sizeof(T);
  using Math = Int4DecodeMath<T, kTile>;
  using Stream = Int4Stream<kT.chunks>;
  extern __shared__ __align__(128) char s_memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x;
  const int own = plan.steps / kT.warps, more = plan.steps % kT.warps;
  const int begin = warp * own + min(warp, more), end = begin + own + (warp < more);
  const int steps = end - begin;
  int tiles = plan.base_tiles + (block < plan.more_tiles);
  int64_t tile = int64_t{block} * plan.base_tiles + min(block, plan.more_tiles);

  // Loads walk in rounds of kDepth items, so that an item keeps its registers; the tiles up to a
  // meeting begin with a round.
  Stream stream(p.weight, plan, tile, begin, end, lane);
  Int4Item<kT.chunks> items[kDepth];
  int left = min(tiles, kMeet) * steps;  // up to this meeting, to load
  int tiles_left = tiles - kMeet;        // behind it
#pragma unroll
  for (int i = 0; i < kDepth; ++i) {
    if (i < left) stream.load(items[i], plan.group_steps);
  }
  left -= kDepth;

  const int tokens = static_cast<int>(p.gemm.m);
  uint32_t s_x[Math::kGroups];
  {
    const uint32_t s_warp = shared_address(s_memory) + warp * tokens * plan.x_row_bytes;
    const char* g_x = static_cast<const char*>(p.gemm.a.data) + int64_t{begin} * kXStep;
    int4_stage_x(s_warp, plan.x_row_bytes, g_x, p.gemm.a.row_stride * sizeof(T), tokens,
                 steps * kXStep, lane);
    Math::find_x(s_x, s_warp, plan.x_row_bytes, tokens, lane);
  }

  int shift = lane & 28;
  asm volatile("" : "+r"(shift));  // NOTE: else it is computed anew in every step
  float* s_slots = reinterpret_cast<float*>(s_memory + plan.x_bytes);
  float* s_own = s_slots + warp * kT.slot_floats() + int4_slot_place(lane % 4 * 2, lane / 4);
  int other_half = kMeet * kSlots;
  const int row_end = steps * kXStep;  // of the warp's columns in a row of x
#pragma unroll 1
  for (; tiles > 0; tiles -= kMeet, tile += kMeet) {
    const int meeting = min(tiles, kMeet);
    int count = meeting * steps, at = 0;
    float* s_to = s_own;
    float check = 0.f;
    typename Math::Sums acc = {};
    // Leaves a tile's sums in its slot.
    const auto leave = [&] {
#pragma unroll
      for (int g = 0; g < Math::kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s_to[int4_slot_place(g * 8 + i % 2, i / 2 * 8)] = acc[g][i];
          check = fmaf(acc[g][i], 0.f, check);
          acc[g][i] = 0.f;
        }
      }
      s_to += kSlots;
    };
    if (count == 0) {
#pragma unroll 1
      for (int i = 0; i < meeting; ++i) leave();
    }
#pragma unroll 1
    for (; count > 0; count -= kDepth) {
      if (left <= 0 && tiles_left > 0) {
        left = min(tiles_left, kMeet) * steps;
        tiles_left -= kMeet;
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (i < count) {
          Math::template add<false>(acc, items[i], s_x, at, shift);
          at += kXStep;
          if (at == row_end) {
            leave();
            at = 0;
          }
        }
        if (i < left) stream.load(items[i], plan.group_steps);
      }
      left -= kDepth;
    }
    // NOTE: a scale that is inf or NaN leaves sums that are not finite. Then the warp does these
    // tiles again, with such scales on the codes instead (see Int4RowScales).
    if (__any_sync(~0u, check != check)) {
      s_to = s_own;
      Stream again(p.weight, plan, tile, begin, end, lane);
#pragma unroll 1
      for (int i = meeting * steps; i > 0; --i) {
        Int4Item<kT.chunks> item;
        again.load(item, plan.group_steps);
        Math::template add<true>(acc, item, s_x, at, shift);
        at += kXStep;
        if (at == row_end) {
          leave();
          at = 0;
        }
      }
    }
    __syncthreads();
    int4_decode_finish<T, kTile>(p.gemm, s_slots, tile * kInt4TileRows, meeting);
    // The other half of the slots: nobody writes this one before all have passed the next barrier.
    s_slots += other_half;
    s_own += other_half;
    other_half = -other_half;
  }
}

template <typename T, int kTile>
void launch_int4_decode_kernel(const Int4LinearParams& p, cudaStream_t stream) {
  constexpr Int4DecodeTile kT = kInt4DecodeTiles[kTile];
  const auto kernel = int4_decode_kernel<T, kTile>;
  const Int4DecodePlan plan(kT, p.gemm.m, p.weight.shape, p.sms);
  allow_shared_memory(kernel, plan.shared_bytes);
  note_kernel(kernel, kT.threads(), plan.shared_bytes);
  kernel<<<plan.blocks, kT.threads(), plan.shared_bytes, stream>>>(p, plan);
}

// The tile that the host has chosen.
template <typename T, int kTile = 0>
void launch_int4_decode_of(const Int4LinearParams& p, cudaStream_t stream) {
  if constexpr (kTile < kInt4DecodeTileCount) {
    if (p.choice.tile != kInt4TileCount + kTile) {
      return launch_int4_decode_of<T, kTile + 1>(p, stream);
    }
    launch_int4_decode_kernel<T, kTile>(p, stream);
  }
}

}  // namespace torchweld
