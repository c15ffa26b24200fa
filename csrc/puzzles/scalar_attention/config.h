// Chooses how the sweeps of scalar_attention divide the pairs (i, j) among blocks and threads. This
// is pure host code that is tested without a GPU.
#pragma once

#include <cstdint>

namespace torchweld {

// A sweep computes e, the exponential of the score, for all pairs of a row i and a key j. Each
// thread owns some elements of one side (rows or keys) and streams all elements of the other side.
// Exponentials limit the speed of a sweep. Therefore a thread computes the exponentials of some of
// its owned elements with a polynomial. This balances the load of the FMA pipe and of the
// exponential unit.
enum ScalarAttentionSweep {
  // e is the exponential of the score of row i and key j.
  kForwardSweep,  // a thread owns rows i; sums over j: e, e * v
  kQuerySweep,    // a thread owns rows i; sum over j: e * (v - mean) * k
  kKeySweep,      // a thread owns keys j; sums over i: e * dz, e * dz * q * (v - mean)
  kNumScalarAttentionSweeps
};

// A tile of a sweep.
// NOTE: this struct has no default member initialisers, because nvcc 13.0 would apply them only to
// the first row of an array.
struct ScalarAttentionTile {
  int owners;      // number of owned elements per thread
  int polynomial;  // number of owned elements per thread whose exponentials use the polynomial
  int chunk;       // number of streamed elements that share an accumulator
  int cost;        // the time per pair (i, j), relative to the other tiles of the sweep
};

inline constexpr int kNumScalarAttentionTiles = 2;
inline constexpr ScalarAttentionTile kScalarAttentionTiles[kNumScalarAttentionSweeps]
                                                          [kNumScalarAttentionTiles] = {
                                                              {{8, 2, 64, 80}, {2, 0, 8, 120}},
                                                              {{8, 1, 64, 90}, {2, 0, 8, 120}},
                                                              {{8, 1, 64, 90}, {2, 0, 8, 130}}};

inline constexpr int kScalarAttentionThreads = 128;
inline constexpr int kScalarAttentionStage = 512;  // the number of streamed elements per stage
inline constexpr int kScalarAttentionMaxSplits = 64;

// Returns the power of two that scales the values v. The exponentials e are below 2. With scaled
// values, the sum of n products e v overflows only if a value is infinite.
constexpr float scalar_attention_value_scale(int64_t n) {
  float scale = 0.5f;
  for (int64_t reach = 1; reach < n; reach *= 2) scale *= 0.5f;
  return scale;
}

struct ScalarAttentionChoice {
  int tile;
  int splits;         // number of splits of the streamed side; each block has one split
  int64_t per_split;  // number of streamed elements of a split
};

// Returns the tile and the number of splits with the lowest estimated time on a GPU with `sms` SMs.
constexpr ScalarAttentionChoice choose_scalar_attention(ScalarAttentionSweep sweep, int64_t n,
                                                        int sms) {
  // The number of blocks per SM that keeps the exponential unit busy. With fewer blocks, the unit
  // is idle at times.
  constexpr int64_t kBusyBlocks = 4;
  constexpr int64_t kMin = 32;  // minimum number of streamed elements per split
  // The time of the launch and of the reduction, in units of the time per streamed element.
  constexpr int64_t kOverhead = 48;
  ScalarAttentionChoice best = {0, 1, n};
  double best_cost = -1.0;
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
      if (best_cost < 0 || cost < best_cost) {
        best_cost = cost;
        best = {tile, static_cast<int>(splits), per_split};
      }
    }
  }
  return best;
}

}  // namespace torchweld
