// The launcher of the kernels on wgmma and TMA. It builds the tensor maps of the operands and
// results.
#include "gemm/sm90/launch.h"

#include <algorithm>
#include <climits>
#include <iterator>

#include "core/launch.h"
#include "device/dispatch.cuh"
#include "gemm/sm90/tiles.h"

namespace torchweld::sm90 {
namespace {

// Returns a stride that TMA accepts. The stride of a dimension with one element has no effect, so
// 16 replaces it.
int64_t harmless(int64_t size, int64_t stride) { return size == 1 ? 16 : stride; }

struct Maps {
  const GemmParams& p;
  const Tile& tile;
  GemmMath math;
  int64_t result_batch;

  int block_k() const { return k_block_size(math); }  // the number of elements along K in a k-block

  // Returns the tensor box of an operand. The operand consists of `halves` matrices at distance
  // o.half_stride; each matrix has `rows` rows (M or N) and `k` columns.
  TensorBox operand(const GemmOperand& o, int64_t rows, int halves, int box_rows, int64_t k) const {
    const bool k_major = o.k_stride == 1;
    const int64_t batch = o.batch_stride == 0 ? 1 : std::max<int64_t>(p.batch, p.groups.count);
    TensorBox box = {o.data, elem_bytes(math)};
    box.bfloat16 = math != GemmMath::kFloat16;
    box.tf32 = math == GemmMath::kTf32;
    int64_t half_stride = o.half_stride;
    if (half_stride < 0) {
      box.data = static_cast<const char*>(o.data) + half_stride * box.elem_size;
      half_stride = -half_stride;
    }
    const int64_t sizes[] = {k_major ? k : rows, k_major ? rows : k, halves, batch};
    const int64_t strides[] = {1, k_major ? o.row_stride : o.k_stride, half_stride, o.batch_stride};
    const int boxes[] = {block_k(), k_major ? box_rows : block_k(), 1, 1};
    for (int i = 0; i < 4; ++i) {
      box.sizes[i] = sizes[i];
      box.strides[i] = i == 0 ? 1 : harmless(sizes[i], strides[i]);
      box.box[i] = boxes[i];
    }
    return box;
  }

  // Returns the tensor box of a result. The result consists of `halves` matrices side by side; each
  // matrix has `columns` columns.
  TensorBox result(void* data, int64_t columns, int64_t row_stride, int halves,
                   int64_t batch_stride) const {
    const int elem = gemm_elem_size(math), box_columns = tile.box_columns(elem);
    TensorBox box = {data, elem};
    box.bfloat16 = math == GemmMath::kBFloat16;
    box.swizzle = box_columns * elem;
    const int64_t sizes[] = {columns, p.m, halves, result_batch};
    const int64_t strides[] = {1, row_stride, columns, batch_stride};
    const int boxes[] = {box_columns, 16, 1, 1};
    for (int i = 0; i < 4; ++i) {
      box.sizes[i] = sizes[i];
      box.strides[i] = i == 0 ? 1 : harmless(sizes[i], strides[i]);
      box.box[i] = boxes[i];
    }
    return box;
  }
};

// Makes the tensor map of a result. Returns false if TMA can't store the result; the kernel then
// stores it element by element.
// NOTE: TMA writes zeros up to the end of the last 16 bytes of a row. These bytes may belong to
// other results, so the bytes of a row must be a multiple of 16.
bool map_result(TensorMap& map, const TensorBox& box) {
  if (box.sizes[0] * box.elem_size % 16 != 0 || tensor_box_refusal(box)) return false;
  map = make_tensor_map("matmul", box);
  return true;
}

}  // namespace

KernelParams kernel_params(const GemmParams& p, cudaStream_t cuda_stream) {
  const Tile& tile = kTiles[p.choice.tile];
  const GemmEpilogue& e = p.epilogue;
  const int halves = e.gated ? 2 : 1;
  const GemmMath math = gemm_math(p.dtype, p.tf32);
  // If K has groups, y has a batch of one matrix per group.
  const int64_t batch = p.groups.dim == Grouped::kK ? p.groups.count : p.batch;
  const Maps maps = {p, tile, math, batch};
  // In a swap_ab tile, b is operand A of wgmma.
  const bool swap_ab = tile.swap_ab();
  const bool grouped_rows = p.groups.dim == Grouped::kRows;
  // In a product with groups of rows, the CTAs of a cluster compute different columns.
  const int cluster_m = grouped_rows ? 1 : tile.cluster, cluster_n = tile.cluster / cluster_m;
  const int64_t group_tiles = max_group_tiles(p.m, p.groups.count, tile.group_rows());
  const int64_t tiles_m = grouped_rows && !swap_ab ? group_tiles : tile.tiles_m(p.m, halves * p.n),
                tiles_n = grouped_rows && swap_ab
                              ? group_tiles
                              : divide_up(tile.tiles_n(p.m, halves * p.n), cluster_n),
                tiles = tiles_m * tiles_n * batch;
  // The number of rows of y that a cluster computes at a time. In a swap_ab tile, it is the number
  // of columns of y.
  const int block_m = tile.block_m / (swap_ab ? halves : 1) * cluster_m;
  const int64_t band = std::min(tiles_m, std::max<int64_t>(1, kBandRows / block_m));
  const int64_t k_blocks = divide_up(p.k, maps.block_k());
  const StreamKPlan stream =
      plan_stream_k(tile, tiles, k_blocks, device_facts(), p.choice.splits == kStreamK);
  const bool writes_a = writes_operand(math, p.a.k_stride == 1),
             writes_b = writes_operand(math, p.b.k_stride == 1);
  const bool k_halves = p.b.k_half > 0 && !writes_b;
  KernelParams params = {{},
                         {},
                         {},
                         {},
                         false,
                         false,
                         (swap_ab ? p.b : p.a).batch_stride != 0,
                         (swap_ab ? p.a : p.b).batch_stride != 0,
                         p.b.half_stride < 0 && !writes_b,
                         k_halves ? static_cast<int>(p.b.k_half) : INT_MAX,
                         GemmSchedule(tiles_m, tiles_n, 1, batch, band),
                         StreamKSchedule(uint32_t(tiles), k_blocks, stream),
                         {},
                         p};
  if (stream.tiles > 0) {
    params.partials = {p.workspace, {p.flags, next_launch_number()}};
  }
  const bool pairs = e.gated && e.interleaved;
  const int parts = swap_ab ? halves : std::max(halves, cluster_m);
  const int box_a = swap_ab ? tile.block_n : tile.block_m / cluster_n;
  const int box_b = (swap_ab ? tile.block_m : tile.block_n) / parts;
  const int terms = bf16x3_terms(math);
  const WrittenOperands w =
      writes_a || writes_b ? write_operands(p, cuda_stream) : WrittenOperands{};
  const GemmSegments* segments = p.segments;
  const int64_t k = segments != nullptr ? segments->k[0] : p.k;
  const TensorBox of_a =
      writes_a ? maps.operand(w.a, p.m, terms, box_a, k) : maps.operand(p.a, p.m, 1, box_a, k);
  const TensorBox of_b =
      writes_b ? maps.operand(w.b, p.n, terms * halves, box_b, k)
               : maps.operand(p.b, p.n, k_halves ? 2 : halves, box_b, k_halves ? p.b.k_half : k);
  params.a = make_tensor_map("matmul", swap_ab ? of_b : of_a);
  params.b = make_tensor_map("matmul", swap_ab ? of_a : of_b);
  std::fill(std::begin(params.more_k), std::end(params.more_k), INT_MAX);
  int64_t first_k = k;
  for (int i = 1; segments != nullptr && i < segments->count; ++i) {
    const int64_t columns = segments->k[i];
    const TensorBox a = maps.operand(segments->a[i], p.m, 1, box_a, columns);
    const TensorBox b = maps.operand(segments->b[i], p.n, 1, box_b, columns);
    params.more_a[i - 1] = make_tensor_map("matmul", swap_ab ? b : a);
    params.more_b[i - 1] = make_tensor_map("matmul", swap_ab ? a : b);
    params.more_k[i - 1] = static_cast<int>(first_k);
    first_k += columns;
  }
  if (!swap_ab) {
    params.stores_y = p.y != nullptr && map_result(params.y, maps.result(p.y, p.n, p.y_row_stride,
                                                                         1, p.y_batch_stride));
    if (e.preact != nullptr) {
      // The number of matrices side by side in the pre-activation. Interleaved halves form one
      // matrix.
      const int apart = pairs ? 1 : halves;
      const TensorBox box =
          maps.result(e.preact, halves / apart * p.n, halves * p.n, apart, p.y_batch_stride);
      params.stores_preact = map_result(params.preact, box);
    }
  }
  return params;
}

void launch_gemm_tile(const GemmParams& p, cudaStream_t cuda_stream) {
  constexpr int kMaths = static_cast<int>(GemmMath::kFloat32) + 1;
  const int math = static_cast<int>(gemm_math(p.dtype, p.tf32));
  const KernelParams params = kernel_params(p, cuda_stream);
  dispatch_index<kTileCount>(p.choice.tile, [&](auto tile) {
    dispatch_index<kMaths>(math, [&](auto index) {
      constexpr auto kMath = static_cast<GemmMath>(index.value);
      if (p.groups.dim != Grouped::kNone) {
        if constexpr (kTiles[tile.value].supports_groups(kMath)) {
          launch_grouped_tile<kMath, tile.value>(params, cuda_stream);
        }
      } else if constexpr (kTiles[tile.value].supports_dtype(kMath)) {
        launch_tile<kMath, tile.value>(params, cuda_stream);
      }
    });
  });
}

}  // namespace torchweld::sm90
