// Runs the Hopper kernels of the loss engine that stores exponentials (losses/exponentials.h).
#ifdef TORCHWELD_CUDA

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "core/cuda_inputs.h"
#include "core/index.h"
#include "gemm/config.h"
#include "layers/matmul.h"
#include "losses/exponentials.h"
#include "losses/sm90/exponentials.h"
#include "losses/sm90/rows.h"
#include "losses/wide_product.h"

namespace torchweld {
namespace {

constexpr int64_t kChunkElems = 8;  // the number of bf16 elements in 16 bytes
constexpr double kLog2e = 1.4426950408889634;

// Chooses the tile of the matmul. In a ping-pong tile, one warpgroup computes exponentials while
// the other warpgroup runs wgmmas. A ping-pong tile is faster than a cooperative tile only if k is
// small. If k is large, the exponentials are a small part of the time anyway.
sm90::TileIndex exponentials_tile(int64_t k) {
  constexpr int64_t kShortSum = 1024;
  return k <= kShortSum ? sm90::kPingPong128x128Cluster2 : sm90::kCooperative128x256Cluster2;
}

// Returns a tensor as a matrix (rows, columns). All rows of the matrix start on 16-byte boundaries,
// so that the kernels can load 16 bytes at once. The function copies a tensor that has rows with
// another alignment.
Tensor chunked_rows(const Tensor& t) {
  const Rows rows(t);
  const auto address = reinterpret_cast<uintptr_t>(const_data<void>(rows.tensor));
  if (rows.row_stride % kChunkElems == 0 && address % 16 == 0) {
    return rows.tensor.as_strided({rows.rows, rows.n}, {rows.row_stride, 1});
  }
  return as_matrix(t).clone(at::MemoryFormat::Contiguous);
}

float* optional_data(const Tensor& t) { return t.defined() ? mutable_data<float>(t) : nullptr; }

// The operands of a loss, and workspace vectors with one element per row.
struct Operands {
  Tensor x, weight, vectors, mean_weight, mean_bias;
  Vector bias;
  ExponentialRows rows;
  float *row_reference, *row_sum, *row_moment;

  // `with_mean` is true if the call needs the mean of each row's logits. A backward does not.
  Operands(const LossInputs& in, bool with_mean)
      : x(chunked_rows(in.x)), weight(chunked_rows(in.weight)), bias(in.bias) {
    const int64_t m = x.size(0);
    vectors = at::empty({6, m}, x.options().dtype(at::kFloat));
    if (with_mean) {
      mean_weight = weight.mean(0, /*keepdim=*/false, at::kFloat);
      if (is_given(in.bias)) mean_bias = in.bias->mean(at::kFloat);
    }
    float* v = mutable_data<float>(vectors);
    row_reference = v + 2 * m;
    row_sum = v + 3 * m;
    row_moment = v + 4 * m;
    rows = {m,
            weight.size(0),
            weight.size(1),
            const_data<void>(x),
            x.stride(0),
            const_data<void>(weight),
            weight.stride(0),
            bias.data(),
            const_data<int64_t>(in.targets),
            in.options.ignore_index.value_or(std::numeric_limits<int64_t>::min()),
            static_cast<float>(in.options.temperature),
            static_cast<float>(in.options.softcap.value_or(0)),
            static_cast<float>(in.options.z_loss),
            static_cast<float>(in.options.label_smoothing),
            optional_data(mean_weight),
            optional_data(mean_bias),
            v,
            v + m,
            v + 5 * m};
  }

  // For columns [column, column + columns) of the logits, computes y = 2^(l - reference) and the
  // sums of y over the columns of each tile. If y is nullptr, the kernel computes only the sums.
  void launch(const float* reference, int64_t column, int64_t columns, void* y,
              int64_t y_row_stride, const TileSums& sums) const {
    constexpr int64_t kElemBytes = 2;
    GemmParams p{};
    p.m = rows.rows;
    p.n = columns;
    p.k = rows.k;
    p.batch = 1;
    p.a = {rows.x, rows.x_row_stride, 1, 0};
    const auto from = [&](const void* base, int64_t elements) {
      return static_cast<const char*>(base) + elements * kElemBytes;
    };
    p.b = {from(rows.weight, column * rows.weight_row_stride), rows.weight_row_stride, 1, 0};
    p.y = y;
    p.y_row_stride = y_row_stride;
    p.dtype = DType::kBFloat16;
    if (rows.bias != nullptr) p.epilogue.bias = from(rows.bias, column);
    p.choice = {GemmEngine::kSm90, exponentials_tile(rows.k), 1, rows.k};
    launch_exponentials_matmul(
        p,
        {reference, const_cast<float*>(sums.reference), const_cast<float*>(sums.sum),
         const_cast<float*>(sums.moment), static_cast<float>(kLog2e / rows.temperature),
         rows.softcap, rows.softcap > 0 ? 1 / rows.softcap : 0},
        current_stream());
  }
};

int tile_columns(int64_t k) { return sm90::kTiles[exponentials_tile(k)].block_n; }

// A workspace for the sums of y. It has one sum for each row and each of the `tiles` column tiles.
struct SumsBuffer {
  Tensor tensor;
  TileSums sums;

  SumsBuffer(const Operands& in, int64_t tiles, bool moments) {
    const int64_t plane = tiles * in.rows.rows;
    tensor = at::empty({moments ? 3 : 2, plane}, in.vectors.options());
    float* data = mutable_data<float>(tensor);
    sums = {
        data, data + plane, moments ? data + 2 * plane : nullptr, tiles, tile_columns(in.rows.k),
        true, true};
  }
};

// Computes to = factor * dloss * from, with one factor and one dloss per row. If `row_offset`
// (rows,) is defined, also adds row_offset[i] * offset[j] to element (i, j). `offset` is
// (columns,). `from` is bf16 or fp32, and `to` is bf16.
void scale_rows(const Tensor& from, const Tensor& to, const Tensor& factor, const Tensor& dloss,
                const Tensor& row_offset = {}, const Tensor& offset = {}) {
  if (to.numel() == 0) return;
  launch_scale_rows({from.size(0), from.size(1), const_data<void>(from), from.stride(0),
                     from.scalar_type() == at::kFloat, mutable_data<void>(to), to.stride(0),
                     const_data<float>(factor), const_data<float>(dloss), dloss.stride(0),
                     optional_data(row_offset), optional_data(offset)},
                    current_stream());
}

// Returns the first `columns` columns of y as a matmul operand. In memory, zeros follow these
// columns in each row, so the matmul needs no padded copy.
Matrix exponentials_of(const Tensor& y, int64_t columns) {
  Matrix matrix(y.narrow(1, 0, columns));
  matrix.zero_padded = true;
  return matrix;
}

// Computes to = vector @ matrix. `matrix` is (rows, columns). `vector` is (rows,) in fp32.
void vector_product_into(const Tensor& to, const Tensor& vector, const Matrix& matrix,
                         const MatmulEpilogue& epilogue = {}) {
  const Tensor row = vector.to(to.scalar_type()).view({1, vector.size(0)});
  matmul_into(Matrix(to.view({1, to.size(0)})), Matrix(row), matrix.t(), epilogue);
}

// Returns factor * dloss, one scale per row. An ignored row has factor 0 and scale 0.
// NOTE: if all rows are ignored, dloss of a mean is infinite.
Tensor row_scales(const Tensor& factor, const Tensor& dloss) {
  return (factor * dloss).masked_fill_(factor.eq(0), 0);
}

// The term of the gradient that is the same for all logits of a row.
struct UniformTerm {
  Tensor each;  // (rows,): -uniform * dloss, 0 for an ignored row; undefined if there is no term

  UniformTerm(double uniform, const Tensor& factor, const Tensor& dloss) {
    if (uniform != 0) each = (dloss * -uniform).masked_fill_(factor.eq(0), 0);
  }
  // Also adds the term of upstream.dmean, the gradient with respect to mean(z) of each row. A row
  // has n values of z.
  UniformTerm(const LossInputs& in, const Tensor& factor, const LossUpstream& upstream)
      : UniformTerm(uniform_gradient(in.options, in.weight.size(0)), factor, upstream.dloss) {
    if (!upstream.dmean.defined()) return;
    const double n = static_cast<double>(in.weight.size(0));
    const Tensor of_mean =
        upstream.dmean.div(n * in.options.temperature).masked_fill_(factor.eq(0), 0);
    each = each.defined() ? each + of_mean : of_mean;
  }

  // Returns the sum of the rows of weight, a vector (K,). each[i] * sum is the term of row i of dx.
  Tensor sum_of_rows(const Tensor& weight) const {
    if (!each.defined()) return {};
    return weight.sum(0, /*keepdim=*/false, at::kFloat);
  }
  // Returns the vector (K,) that is added to all rows of dweight: the sum of each[i] * x[i] over
  // the rows i. `scaled` is factor * dloss * x.
  // NOTE: the sum reads scaled / (factor * dloss) instead of x, because x may hold NaN in ignored
  // rows, where `scaled` is 0.
  OptionalTensor row_of_dweight(const Tensor& scaled, const Tensor& factor,
                                const Tensor& dloss) const {
    if (!each.defined()) return std::nullopt;
    const Tensor scale = row_scales(factor, dloss);
    const Tensor row = at::empty({scaled.size(1)}, scaled.options());
    vector_product_into(row, (each / scale).masked_fill_(scale.eq(0), 0), Matrix(scaled));
    return row;
  }
  OptionalTensor offset_of_dbias(const Tensor& dbias) const {
    if (!each.defined()) return std::nullopt;
    return each.sum().to(dbias.scalar_type()).expand(dbias.sizes()).contiguous();
  }
};

// Computes the gradient of the bias for the columns of y. This gradient is the sum of
// factor * dloss * y over the rows, plus the uniform term.
void dbias_into(const Tensor& dbias, const Matrix& y, const Tensor& factor, const Tensor& dloss,
                const UniformTerm& uniform) {
  vector_product_into(dbias, row_scales(factor, dloss), y, {uniform.offset_of_dbias(dbias)});
}

}  // namespace

void exponentials_forward_sm90(const LossInputs& in, const LossRows& results,
                               const Exponentials* kept) {
  const OnDevice on(in.x.device());
  if (in.targets.numel() == 0) return;
  Operands operands(in, in.options.needs_mean());
  const int64_t m = operands.rows.rows, n = operands.rows.n;
  const int columns = tile_columns(operands.rows.k);
  if (kept != nullptr && kept->y.size(1) > n) {
    kept->y.narrow(1, n, kept->y.size(1) - n).zero_();
  }
  const ExponentialResults out = {mutable_data<float>(results.loss),
                                  mutable_data<float>(results.lse),
                                  optional_data(results.entropy),
                                  operands.row_reference,
                                  operands.row_sum,
                                  operands.row_moment,
                                  kept != nullptr ? mutable_data<void>(kept->y) : nullptr,
                                  kept != nullptr ? kept->y.stride(0) : 0,
                                  0,
                                  kept != nullptr ? mutable_data<float>(kept->factor) : nullptr};
  if (results.mean.defined()) operands.rows.mean_logit = mutable_data<float>(results.mean);
  launch_target_logits(operands.rows, current_stream());
  // If y is not stored, the loop below processes only some tiles at a time, so that the sums of
  // these tiles fit in 16 MiB of workspace. The sums of the next tiles overwrite them.
  constexpr int64_t kSumsBytes = 16 << 20;
  const bool moments = results.entropy.defined();
  const int64_t tiles = divide_up(n, columns), bytes = (moments ? 3 : 2) * m * sizeof(float);
  const int64_t at_once =
      kept != nullptr ? tiles : std::clamp<int64_t>(kSumsBytes / bytes, 1, tiles);
  SumsBuffer buffer(operands, at_once, moments);
  for (int64_t first = 0; first < tiles; first += at_once) {
    buffer.sums.tiles = std::min(at_once, tiles - first);
    buffer.sums.first = first == 0;
    buffer.sums.last = first + buffer.sums.tiles == tiles;
    const int64_t column = first * columns;
    operands.launch(operands.rows.reference, column,
                    std::min(n - column, buffer.sums.tiles * columns), out.y, out.y_row_stride,
                    buffer.sums);
    launch_exponential_rows(operands.rows, buffer.sums, out, current_stream());
  }
  if (in.kind == LossKind::kLogprob) results.loss.neg_();
}

void exponentials_backward_sm90(const Exponentials& kept, const Tensor& dloss, const Tensor& x,
                                const Tensor& weight, double uniform, const LossGradients& grads) {
  const OnDevice on(x.device());
  const int64_t n = weight.size(0);
  const Matrix y = exponentials_of(kept.y, n);
  const UniformTerm term(uniform, kept.factor, dloss);
  if (grads.wanted[0] && grads.dx.numel() > 0) {
    const Tensor dx = grads.dx.view({y.rows, x.size(-1)});
    matmul_into(dx, y, Matrix(weight).t());
    scale_rows(dx, dx, kept.factor, dloss, term.each, term.sum_of_rows(weight));
  }
  if (grads.wanted[1]) {
    const Tensor rows = chunked_rows(x);
    const Tensor scaled = at::empty(rows.sizes(), rows.options());
    scale_rows(rows, scaled, kept.factor, dloss);
    matmul_into(grads.dweight, y.t(), Matrix(scaled).t(),
                {term.row_of_dweight(scaled, kept.factor, dloss)});
  }
  if (grads.wanted[2]) dbias_into(grads.dbias, y, kept.factor, dloss, term);
}

// The factors of the gradient with respect to a row's logits. p are the row's probabilities. If
// dlse or dmean is defined, the gradient without the uniform term is total * (p - share) at the
// target and total * p elsewhere. If neither is defined, total is dloss, and share is undefined.
struct RowFactors {
  Tensor total;  // (rows,); the factor of p
  Tensor share;  // (rows,); 1 if undefined

  RowFactors(const LossUpstream& up, const Tensor& lse, double z_loss) : total(up.dloss) {
    const Tensor& dloss = up.dloss;
    if (!up.dlse.defined() && !up.dmean.defined()) return;
    total = dloss * (lse * (2 * z_loss) + 1);
    if (up.dlse.defined()) total = total + up.dlse;
    // NOTE: the other terms of the gradient are computed as multiples of total. A total of 0 would
    // make these terms 0 too. Therefore others * 2^-24 replaces a total of 0. This value is less
    // than the rounding error of y.
    const Tensor others = up.dmean.defined() ? dloss - up.dmean : dloss;
    total = at::where(total.eq(0), others * 0x1p-24, total);
    share = at::where(total.eq(0), at::zeros({}, total.options()), dloss / total);
  }
};

void exponentials_recompute_sm90(const LossInputs& in, const Tensor& lse,
                                 const LossUpstream& upstream, const LossGradients& grads) {
  Operands operands(in, /*with_mean=*/false);
  const RowFactors factors(upstream, lse, in.options.z_loss);
  const Tensor& dloss = factors.total;
  if (factors.share.defined()) operands.rows.z_loss = 0;  // total already has the term of z_loss
  const int64_t m = operands.rows.rows, n = operands.rows.n, k = operands.rows.k;
  const int columns = tile_columns(k);
  // kBytes limits the memory of three tensors together: y for a block of columns, dx in fp32, and
  // the rows of x times their factors. If dx is requested, the rows of x times their factors use
  // the memory of the result dx, which is written last.
  constexpr int64_t kBytes = 280 << 20, kMinTiles = 8;
  const int64_t others = m * k * (grads.wanted[0] ? 4 : 2);
  const int64_t max_tiles = std::max((kBytes - others) / (m * columns * 2), kMinTiles);
  // All blocks of columns have about the same number of columns.
  const int64_t all_tiles = divide_up(n, columns);
  const int64_t tiles = divide_up(all_tiles, divide_up(all_tiles, max_tiles));
  const Tensor y = at::empty({m, tiles * columns}, operands.x.options());
  const SumsBuffer buffer(operands, tiles, false);
  const Tensor factor = at::empty({m}, operands.vectors.options());
  ExponentialResults out = {nullptr,
                            const_cast<float*>(const_data<float>(lse)),
                            nullptr,
                            operands.row_reference,
                            operands.row_sum,
                            operands.row_moment,
                            mutable_data<void>(y),
                            y.stride(0),
                            0,
                            mutable_data<float>(factor),
                            factors.share.defined() ? const_data<float>(factors.share) : nullptr};
  launch_target_logits(operands.rows, current_stream());
  launch_gradient_factors(operands.rows, out, current_stream());
  Tensor dx, scaled;
  if (grads.wanted[0]) dx = at::empty({m, k}, operands.vectors.options());
  if (grads.wanted[1]) {
    scaled = grads.wanted[0] ? grads.dx.view({m, k}) : at::empty({m, k}, operands.x.options());
    scale_rows(operands.x, scaled, factor, dloss);
  }
  const UniformTerm term(in, factor, upstream);
  OptionalTensor dweight_row;
  if (grads.wanted[1]) dweight_row = term.row_of_dweight(scaled, factor, dloss);
  for (int64_t first = 0; first < n; first += tiles * columns) {
    const int64_t count = std::min(n - first, tiles * columns);
    if (count % kChunkElems != 0) {
      y.narrow(1, count, kChunkElems - count % kChunkElems).zero_();
    }
    operands.launch(operands.row_reference, first, count, out.y, out.y_row_stride, buffer.sums);
    ExponentialRows rows = operands.rows;
    rows.n = count;
    out.first_column = first;
    launch_gradient_targets(rows, out, current_stream());
    const Matrix exponentials = exponentials_of(y, count);
    if (grads.wanted[0]) {
      const Tensor words = operands.weight.narrow(0, first, count);
      // NOTE: K of this product is the number of columns of y. If K is not a multiple of 16 bytes,
      // cuBLAS may choose a much slower kernel. Therefore a second product adds the last columns.
      const int64_t whole = count / kChunkElems * kChunkElems;
      bool add = first > 0;
      if (whole > 0) {
        wide_product_into(dx, y.narrow(1, 0, whole), words.narrow(0, 0, whole), add);
        add = true;
      }
      if (whole < count) {
        const Tensor last = at::zeros({kChunkElems, k}, words.options());
        last.narrow(0, 0, count - whole).copy_(words.narrow(0, whole, count - whole));
        wide_product_into(dx, y.narrow(1, whole, kChunkElems), last, add);
      }
    }
    if (grads.wanted[1]) {
      matmul_into(grads.dweight.narrow(0, first, count), exponentials.t(), Matrix(scaled).t(),
                  {dweight_row});
    }
    if (grads.wanted[2]) {
      dbias_into(grads.dbias.narrow(0, first, count), exponentials, factor, dloss, term);
    }
  }
  if (grads.wanted[0]) {
    scale_rows(dx, grads.dx.view({m, k}), factor, dloss, term.each,
               term.sum_of_rows(operands.weight));
  }
}

}  // namespace torchweld

#endif
