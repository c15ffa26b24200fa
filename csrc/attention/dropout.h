// The dropout of attention's probabilities, for host and device code.
//
// A probability is dropped if its 16 random bits are below threshold = p * 2^16. The others are
// multiplied by 1 / (1 - p), after the softmax's sum. The bits depend on the seed and on the place
// of the probability (head, query row, key) alone. Therefore the forward, the backward and all
// kernels drop the same probabilities. One call of Philox 4x32 gives the bits of a unit of eight
// probabilities. In the accumulators of a product Q K^T on tensor cores, one thread holds a unit.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/macros.h"

namespace torchweld {

// The random bits of a unit: of the query rows r and r + 8, and of the keys k, k + 1, k + 8 and
// k + 9. A square of kSquare rows and keys has 8 x 4 units: r % 16 is below 8, and k % 16 is even
// and below 8.
struct DropoutBits {
  static constexpr int kSquare = 16;
  // NOTE: with 7 rounds, Philox 4x32 still passes all tests of BigCrush.
  static constexpr int kRounds = 7;

  // Word 2 * i + j has the bits of row r + 8 * i: of key k + 8 * j in the low half, and of key
  // k + 8 * j + 1 in the high half.
  uint32_t words[4];

  // `head` counts the heads of all sequences.
  TW_HOST_DEVICE DropoutBits(uint64_t seed, uint32_t head, uint32_t row_unit, uint32_t key_unit)
      : words{key_unit, row_unit, head, 0} {
    auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int i = 0; i < kRounds; ++i) {
      const uint64_t first = uint64_t{0xD2511F53} * words[0];
      const uint64_t second = uint64_t{0xCD9E8D57} * words[2];
      words[0] = static_cast<uint32_t>(second >> 32) ^ words[1] ^ key0;
      words[1] = static_cast<uint32_t>(second);
      words[2] = static_cast<uint32_t>(first >> 32) ^ words[3] ^ key1;
      words[3] = static_cast<uint32_t>(first);
      key0 += 0x9E3779B9, key1 += 0xBB67AE85;
    }
  }

  // The numbers of the units that a row and a key belong to.
  static TW_HOST_DEVICE uint32_t row_unit(uint32_t row) { return row / kSquare * 8 + row % 8; }
  static TW_HOST_DEVICE uint32_t key_unit(uint32_t key) { return key / kSquare * 4 + key % 8 / 2; }

  // The bits of a row and a key of the unit.
  TW_HOST_DEVICE uint32_t at(uint32_t row, uint32_t key) const {
    // NOTE: on a GPU, an array with a variable index would be in local memory.
    const uint32_t first = key & 8 ? words[1] : words[0];
    const uint32_t second = key & 8 ? words[3] : words[2];
    return (row & 8 ? second : first) >> key % 2 * 16 & 0xFFFF;
  }
};

struct AttentionDropout {
  static constexpr uint32_t kAll = 1 << 16;  // the threshold that drops every probability

  const int64_t* seed;  // (1,) on the device, or null if no probability is dropped
  uint32_t threshold;   // 1 to kAll
  double factor;        // of the probabilities that are kept

  // The dropout with probability p, or none if p rounds to 0.
  static AttentionDropout make(const int64_t* seed, double p) {
    const auto threshold = static_cast<uint32_t>(std::lround(p * kAll));
    if (threshold == 0) return {};
    return {seed, threshold, threshold == kAll ? 0 : double{kAll} / (kAll - threshold)};
  }

  TW_HOST_DEVICE bool given() const { return seed != nullptr; }
  TW_HOST_DEVICE bool keeps(uint32_t bits) const { return bits >= threshold; }

#ifdef __CUDACC__
  // Returns 0 or the factor for one probability.
  __device__ __forceinline__ float factor_of(int64_t head, int64_t row, int64_t key) const {
    const auto r = static_cast<uint32_t>(row), k = static_cast<uint32_t>(key);
    const DropoutBits bits(static_cast<uint64_t>(*seed), static_cast<uint32_t>(head),
                           DropoutBits::row_unit(r), DropoutBits::key_unit(k));
    return keeps(bits.at(r, k)) ? static_cast<float>(factor) : 0.f;
  }
#endif
};

}  // namespace torchweld
