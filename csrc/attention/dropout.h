// The dropout of attention's probabilities, for host and device code.
//
// A probability is dropped if its 16 random bits are below threshold = p * 2^16. The others are
// multiplied by 1 / (1 - p), after the softmax's sum. The bits depend on the seed and on the place
// of the probability (head, query row, key) alone. Therefore the forward, the backward and all
// kernels drop the same probabilities. One call of Philox 4x32 gives the bits of eight consecutive
// keys of a row.
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/macros.h"

namespace torchweld {

// The random bits of kKeys consecutive keys of a query row.
struct DropoutBits {
  static constexpr int kKeys = 8;
  // NOTE: with 7 rounds, Philox 4x32 still passes all tests of BigCrush.
  static constexpr int kRounds = 7;

  uint32_t words[4];

  // `head` counts the heads of all sequences. `group` is the number of the first key over kKeys.
  TW_HOST_DEVICE DropoutBits(uint64_t seed, uint32_t head, uint32_t row, uint32_t group)
      : words{group, row, head, 0} {
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

  // The bits of the key with this index in the group.
  TW_HOST_DEVICE uint32_t operator[](int index) const {
    // NOTE: on a GPU, an array with a variable index would be in local memory.
    const uint32_t first = index < 2 ? words[0] : words[1];
    const uint32_t second = index < 6 ? words[2] : words[3];
    return (index < 4 ? first : second) >> index % 2 * 16 & 0xFFFF;
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
    const DropoutBits bits(static_cast<uint64_t>(*seed), static_cast<uint32_t>(head),
                           static_cast<uint32_t>(row),
                           static_cast<uint32_t>(key / DropoutBits::kKeys));
    const int index = static_cast<int>(key % DropoutBits::kKeys);
    return keeps(bits[index]) ? static_cast<float>(factor) : 0.f;
  }
#endif
};

}  // namespace torchweld
