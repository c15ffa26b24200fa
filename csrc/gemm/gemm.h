// The interface of the matmul engine: y = epilogue(a @ b^T), batched. This header does not use
// torch.
//
// The shapes are a (M, K), b (N, K) and y (M, N). One of the two strides of each matrix is 1. b may
// be a pair: two matrices with the same strides. In a gated product the two matrices of the pair
// are the left and the right half of b, and each half is (N, K). Otherwise the two matrices are
// concatenated along K.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/activation_kind.h"
#include "core/dtype.h"
#include "core/macros.h"
#include "gemm/config.h"

namespace torchweld {

// NOTE: the data pointer, the batch stride, the half stride and the stride of the non-contiguous
// dim must be multiples of 16 bytes. In memory, the contiguous dim must be padded to a multiple of
// 16 bytes. If the contiguous dim is K, the padding must hold zeros. layers/matmul.cpp copies
// operands that don't meet these conditions.
struct GemmOperand {
  const void* data;
  int64_t row_stride;    // distance between rows (M or N), in elements
  int64_t k_stride;      // distance between columns (K), in elements
  int64_t batch_stride;  // distance between batches, in elements; 0 if all batches read one matrix
  int64_t half_stride = 0;  // distance between a pair's two matrices, in elements; may be < 0
  // For a pair that is concatenated along K, k_half is the number of columns of each of the two
  // matrices. This number is a multiple of the k-block. For every other operand, k_half is 0. The
  // kernels support such a pair only as operand b, and only if b is MN-major and a is K-major.
  int64_t k_half = 0;

  // For a pair concatenated along K: column k of the concatenation lies at offset k * k_stride if
  // k < k_half, and at offset k * k_stride + half_jump() otherwise.
  TW_HOST_DEVICE int64_t half_jump() const { return half_stride - k_half * k_stride; }
};

// The operands of a product whose K dim is the concatenation of up to kMaxKSegments segments.
// Segment i adds a[i] @ b[i]^T to the product; a[i] is (M, k[i]), b[i] is (N, k[i]), and k[i] is a
// multiple of the k-block. Only Hopper's 16-bit kernels support segments, and only if a is K-major
// and b is MN-major.
inline constexpr int kMaxKSegments = 3;
struct GemmSegments {
  int count;
  GemmOperand a[kMaxKSegments], b[kMaxKSegments];
  int64_t k[kMaxKSegments];
};

struct GemmEpilogue {
  const void* bias = nullptr;  // shape (N,), or (2N,) if gated
  bool bias_fp32 = false;  // whether the bias is fp32; otherwise it has the dtype of the operands
  Activation activation = Activation::kNone;
  bool gated = false;
  Gate gate = Gate::kSigmoidTanh;
  bool interleaved = false;  // if gated: whether left and right alternate in `bias`, `preact`
  // If `preact` is not null, the epilogue also stores z = a @ b^T + bias at this address. z is
  // (M, N), or (M, 2N) if gated. In memory, each row of z directly follows the previous row. z has
  // the batch stride of y.
  void* preact = nullptr;
};

// A norm (norm/norm.h) that is applied to the rows of a before the product. Only the engine for few
// rows supports a norm. The kernel multiplies the normalised values by scale + scale_offset. If
// `scale` is nullptr, scale_offset must be 0. `scale` and `shift` have the dtype of the operands.
// The size of a row of a, which has K elements, must be a multiple of 16 bytes.
struct GemmNorm {
  bool given = false, centred = false;
  float eps = 0, scale_offset = 0;
  const void* scale = nullptr;  // shape (K,), on a 16-byte boundary; nullptr for a scale of 1
  const void* shift = nullptr;  // shape (K,), on a 16-byte boundary; nullptr for a shift of 0
  float* mean = nullptr;        // outputs of shape (M,): mean and rstd; nullptr if not needed
  float* rstd = nullptr;
};

// A group's tile of rows in a grouped product (Grouped::kRows): the rows of y from first_row on.
// The group ends before end_row. `group` is -1 if there is no such tile.
struct alignas(16) GroupTile {
  int group, first_row, end_row, unused;
};

// The groups of a grouped product. Group g has the rows, or the columns along K, from ends[g - 1]
// (0 for the first group) to ends[g] - 1. The ends ascend, and the last one is at most the number
// of rows. They lie in the memory of the GPU, so the host never waits for them.
struct GemmGroups {
  Grouped dim = Grouped::kNone;
  int count = 0;
  const int* ends = nullptr;  // shape (count,)
  // If `dim` is kRows: memory for max_group_tiles() tiles. Unless it has the tiles of an earlier
  // product with as many rows per tile, launch_gemm fills it.
  GroupTile* tiles = nullptr;
  bool has_tiles = false;
};

struct GemmParams {
  int64_t m, n, k, batch;  // n is the number of columns of y; if gated, b has 2n rows
  GemmOperand a, b;
  void* y;
  int64_t y_row_stride, y_batch_stride;  // the elements of a row of y are contiguous
  DType dtype;
  bool tf32;  // whether fp32 operands may be rounded to TF32
  GemmNorm norm;
  GemmEpilogue epilogue;
  GemmChoice choice;
  float* workspace;  // memory for split-K or stream-K partials; nullptr if there are none
  uint64_t* flags;   // one flag per stream-K partial; nullptr if there are no such partials
  // Memory for copies of operands; gemm_written_bytes() returns its size in bytes. The pointer is
  // nullptr if this size is 0.
  void* written;
  // Output (P, M): P fp32 partial sums of each row of a, where P is the result of
  // choice.dbias_partials(). The pointer is nullptr if the caller does not request the sums.
  float* dbias_partials;
  // If not null, K is the concatenation of these segments, and `a` and `b` above are the operands
  // of the first segment. The GemmSegments struct lies in host memory.
  const GemmSegments* segments = nullptr;
  // If there are groups of rows: m is the number of rows of all groups and of the rows behind them,
  // b has a batch of one matrix per group, the bias has the shape (groups, N), and a, y and `batch`
  // have no batch. If K has groups: k is the number of columns of all groups and y has a batch of
  // one matrix per group.
  GemmGroups groups = {};
};

// The largest number of GroupTiles of a grouped product, for tiles of tile_rows rows.
constexpr int64_t max_group_tiles(int64_t rows, int64_t groups, int64_t tile_rows) {
  return rows / tile_rows + (groups < rows ? groups : rows);
}
// The number of rows of y of a GroupTile for the chosen tile.
int64_t group_tile_rows(const GemmChoice& choice);

// Fills groups.tiles for tiles of tile_rows rows, unless it has them.
void launch_group_tiles(const GemmParams& params, int64_t tile_rows, cudaStream_t stream);

// Returns the number of bytes of scratch memory that the chosen engine needs for copies of operands
// in another format. Returns 0 if the engine reads all operands in place.
int64_t gemm_written_bytes(const GemmParams& params);

// Throws std::runtime_error if the launch fails. All sizes must be at least 1.
void launch_gemm(const GemmParams& params, cudaStream_t stream);

// Adds up the split-K partials in the workspace: y = epilogue(sum of the partials).
void launch_gemm_sum(const GemmParams& params, cudaStream_t stream);

}  // namespace torchweld
