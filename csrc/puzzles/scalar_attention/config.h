// How the sweeps of scalar_attention cut the (i, j) plane. Pure host code: tested without a GPU.
#pragma once

#include <cstdint>

namespace torchweld {

// A sweep goes over all pairs (i, j): each thread owns some of one side and meets every element of
// the other. Its exponentials are what it costs, so some owners of a thread take theirs from a
// polynomial, which keeps the multiply-add pipe as busy as the exponential unit.
enum ScalarAttentionSweep {
  kForwardSweep,  // owns rows i: sum_j e, sum_j e v
  kQuerySweep,    // owns rows i: sum_j e (v - mean) k
  kKeySweep,      // owns keys j: sum_i e dz, sum_i e dz q (v - mean)
  kNumScalarAttentionSweeps
};

// NOTE: no default member initialisers, nvcc 13.0 would run them for the first row only.
struct ScalarAttentionTile {
  int owners;      // of a thread
  int polynomial;  // how many of them compute their exponentials without the exponential unit
  int apart;       // streamed elements whose sums are added before they join the others
  int cost;        // of a pair, relative to the other tiles of the sweep
};

inline constexpr int kNumScalarAttentionTiles = 2;
inline constexpr ScalarAttentionTile kScalarAttentionTiles[kNumScalarAttentionSweeps]
                                                          [kNumScalarAttentionTiles] = {
                                                              {{8, 2, 64, 80}, {2, 0, 8, 120}},
                                                              {{8, 1, 64, 90}, {2, 0, 8, 120}},
                                                              {{8, 1, 64, 90}, {2, 0, 8, 130}}};

inline constexpr int kScalarAttentionThreads = 128;
inline constexpr int kScalarAttentionStage = 512;  // streamed elements that lie in shared memory
inline constexpr int kScalarAttentionMaxSplits = 64;

// The values are summed this much smaller, a power of two, so that no sum of n products with
// exponentials below 2 overflows where the values do not.
constexpr float scalar_attention_value_scale(int64_t n) {
  float scale = 0.5f;
  for (int64_t reach = 1; reach < n; reach *= 2) scale *= 0.5f;
  return scale;
}

struct ScalarAttentionChoice {
  int tile;
  int splits;         // parts of the streamed side, each a block of its own, split_cluster in order
  int64_t per_split;  // streamed elements of a part
};

// The tile and the split that are estimated to end first on `sms` multiprocessors.
constexpr ScalarAttentionChoice choose_scalar_attention(ScalarAttentionSweep sweep, int64_t n,
                                                        int sms) {
  constexpr int64_t kBusyBlocks = 4;  // of an SM: fewer leave its exponential unit waiting
  constexpr int64_t kMin = 32;        // streamed elements that are worth a block
  constexpr int64_t kOverhead = 48;   // start, sums through memory, in streamed elements
  ScalarAttentionChoice best = {0, 1, n};
  double least = -1.0;
  for (int tile = 0; tile < kNumScalarAttentionTiles; ++tile) {
    const ScalarAttentionTile& shape = kScalarAttentionTiles[sweep][tile];
    const int64_t owners = static_cast<int64_t>(shape.owners) * kScalarAttentionThreads;
    const int64_t blocks = (n + owners - 1) / owners;
    for (int64_t wanted = 1; wanted <= kScalarAttentionMaxSplits; ++wanted) {
      int64_t per_split = (n + wanted - 1) / wanted;
      if (per_split < kMin) per_split = kMin;
      const int64_t splits = (n + per_split - 1) / per_split;
      if (splits != wanted && wanted > 1) continue;
      const int64_t rounds = (blocks * splits + (sms > 0 ? sms : 1) - 1) / (sms > 0 ? sms : 1);
      const double idle =
          rounds < kBusyBlocks ? static_cast<double>(kBusyBlocks) / static_cast<double>(rounds) : 1;
      const double cost = static_cast<double>(rounds) * static_cast<double>(owners) *
                          static_cast<double>(per_split + kOverhead) * idle * shape.cost;
      if (least < 0 || cost < least) {
        least = cost;
        best = {tile, static_cast<int>(splits), per_split};
      }
    }
  }
  return best;
}

}  // namespace torchweld
