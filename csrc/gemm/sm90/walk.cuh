// Which tiles, and which of their steps of K, a worker of the grid takes. A worker is a cluster.
#pragma once

#include "core/fast_divide.h"
#include "gemm/sm90/tiles.h"

namespace torchweld {

// How the tiles are dealt: those below `whole` in rounds, each to one worker; the steps of the rest
// in one row, of which every worker takes an equal stretch (stream-K).
struct StreamKSchedule {
  uint32_t tiles, whole, workers;
  FastDivisor steps;       // of a tile
  uint32_t share, longer;  // of the row; the first `longer` workers take a step more
  uint32_t split_cluster;  // workers that are a cluster, which has a tile

  StreamKSchedule(uint32_t tiles, int64_t steps, const Sm90Stream& stream)
      : tiles(tiles),
        whole(uint32_t(tiles - stream.tiles)),
        workers(uint32_t(stream.workers)),
        steps(steps),
        share(uint32_t(stream.tiles * steps / stream.workers)),
        longer(uint32_t(stream.tiles * steps % stream.workers)),
        split_cluster(uint32_t(stream.split_cluster)) {}
};

// What a worker does, one piece after the other: its whole tiles, while all workers are at the same
// steps of K and share what they load in the L2; then its stretch of the row, from the last piece
// to the first. So a tile that several workers share is finished by the last of them. It waits only
// for blocks with smaller numbers, which start no later and have handed their parts on without
// waiting. Joined workers have a tile each cluster, and wait for each other.
template <int kCluster, bool kJoins>
class Sm90TileScheduler {
 public:
  uint32_t tile;
  int first, steps;  // of K, in steps

  explicit __device__ __forceinline__ Sm90TileScheduler(const StreamKSchedule& deal)
      : deal_(deal), end_(begin(deal, worker() + 1)), next_(worker()) {}

  // NOTE: computed anew at every use; registers are scarce.
  static __device__ __forceinline__ uint32_t worker() { return blockIdx.x / kCluster; }

  // The first step of a worker's stretch.
  static __device__ __forceinline__ uint32_t begin(const StreamKSchedule& deal, uint32_t worker) {
    if (kJoins && deal.split_cluster > 1) {
      const uint32_t tile = worker / deal.split_cluster, steps = deal.steps.divisor();
      return tile * steps + (worker - tile * deal.split_cluster) * steps / deal.split_cluster;
    }
    return worker * deal.share + min(worker, deal.longer);
  }

  // Goes to the next piece; false where there is none.
  __device__ __forceinline__ bool next() {
    const uint32_t tile_steps = deal_.steps.divisor();
    if (next_ < deal_.whole) {
      tile = next_;
      first = 0;
      steps = int(tile_steps);
      next_ += deal_.workers;
      return true;
    }
    const uint32_t stretch = begin(deal_, worker());
    if (end_ <= stretch) return false;
    const uint32_t at = deal_.steps.divide(end_ - 1), start = at * tile_steps;
    const uint32_t from = max(start, stretch);
    tile = deal_.whole + at;
    first = int(from - start);
    steps = int(end_ - from);
    end_ = from;
    return true;
  }

  // Whether the piece has the tile's last steps, and so its results.
  __device__ __forceinline__ bool ends() const {
    return first + steps == int(deal_.steps.divisor());
  }
  __device__ __forceinline__ bool begins() const { return first == 0; }

  // Of a piece that ends its tile and doesn't begin it: calls body with each worker that has
  // another piece of it, from the last to the first.
  template <typename Body>
  __device__ __forceinline__ void for_each_helper(const Body& body) const {
    const uint32_t start = (tile - deal_.whole) * deal_.steps.divisor();
    uint32_t helper = worker();
    do {
      body(--helper);
    } while (begin(deal_, helper) > start);
  }

 private:
  const StreamKSchedule& deal_;
  uint32_t end_, next_;
};

}  // namespace torchweld
