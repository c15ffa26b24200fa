// torchweld._C: introspection only. It includes the rooms' torch-free config headers, links no
// libtorch, and its absence never breaks an op.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "gemm/gemm_config.h"
#include "module_families.h"
#include "ops/attention/attention_backward_config.h"
#include "ops/attention/attention_config.h"
#include "ops/int4_linear/int4_linear_config.h"
#include "ops/scalar_attention/scalar_attention_config.h"
#include "ops/softmax/softmax_config.h"
#include "pointwise/matrix_pass.h"

namespace py = pybind11;

namespace torchweld {
namespace {

py::list softmax_tiles(int elem_size, bool backward, bool aligned, bool masked) {
  py::list tiles;
  for (const SoftmaxTile& tile : kSoftmaxTiles) {
    py::dict d;
    d["threads"] = tile.threads;
    d["loads"] = tile.loads;
    d["capacity"] = tile.capacity(elem_size, aligned);
    d["suits"] = tile.suits(elem_size, backward, masked);
    tiles.append(d);
  }
  return tiles;
}

py::list softmax_rings(int elem_size, bool backward, bool aligned) {
  py::list rings;
  for (const SoftmaxRing& ring : kSoftmaxRings) {
    py::dict d;
    d["blocks_per_row"] = ring.cluster;
    d["threads"] = ring.block_threads();
    d["groups"] = ring.kGroups;
    d["piece_bytes"] = ring.piece_bytes(backward);
    d["pieces"] = ring.slots();
    d["shared_bytes"] = ring.shared_bytes();
    d["read_once_to"] = ring.read_once_to(elem_size, backward, aligned);
    d["capacity"] = ring.capacity(elem_size, backward, aligned);
    d["preferred_to"] = ring.preferred_to(elem_size, backward);
    d["suits"] = ring.serves(backward);
    rings.append(d);
  }
  return rings;
}

py::tuple choose_softmax_kernel(int64_t n, int elem_size, bool aligned, bool backward, bool tiled,
                                bool clusters, bool in_phase, int shared_limit, bool masked,
                                bool clusters_of_16) {
  const SoftmaxChoice choice = choose_softmax({n, elem_size, aligned, backward, tiled, clusters,
                                               in_phase, shared_limit, masked, clusters_of_16});
  constexpr const char* kNames[] = {"tile", "ring", "stream"};
  return py::make_tuple(kNames[static_cast<int>(choice.kernel)], choice.index);
}

GemmMath gemm_math(const std::string& name) {
  if (name == "float16") return GemmMath::kFloat16;
  if (name == "bfloat16") return GemmMath::kBFloat16;
  if (name == "tf32") return GemmMath::kTf32;
  if (name == "float32") return GemmMath::kFloat32;
  throw py::value_error("math must be one of float16, bfloat16, tf32, float32, but got " + name);
}

py::list gemm_tiles(const std::string& math) {
  py::list tiles;
  for (const GemmTile& tile : kGemmTiles) {
    py::dict d;
    d["block_m"] = tile.block_m;
    d["block_n"] = tile.block_n;
    d["warps"] = py::make_tuple(tile.warps_m, tile.warps_n);
    d["stages"] = tile.stages;
    d["threads"] = tile.threads();
    d["shared_bytes"] = tile.shared_bytes();
    d["blocks_per_sm"] = tile.blocks_per_sm;
    d["suits"] = tile.suits(gemm_math(math));
    tiles.append(d);
  }
  return tiles;
}

py::dict choose_gemm_tile(int64_t m, int64_t n, int64_t k, int64_t batch, bool gated,
                          bool pointwise, const std::string& math, int sms, int shared_limit) {
  const GemmProblem problem{m, n, k, batch, gated, pointwise, gemm_math(math), sms, shared_limit};
  const GemmChoice choice = choose_gemm(problem);
  py::dict d;
  d["tile"] = choice.tile;
  d["splits"] = choice.splits;
  d["k_split"] = choice.k_split;
  d["workspace_floats"] = choice.workspace_floats(problem);
  return d;
}

AttentionMath attention_math(const std::string& name) {
  const GemmMath math = gemm_math(name);
  if (math == GemmMath::kFloat32) return AttentionMath::kFloat32;
  return math == GemmMath::kTf32 ? AttentionMath::kTf32 : AttentionMath::k16Bit;
}

py::dict attention_tile(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim, int64_t head_dim_v,
                        const std::string& math) {
  py::dict d;
  const int index =
      choose_attention_tile({seqlen_q, seqlen_k, head_dim, head_dim_v, attention_math(math)});
  if (index < 0) return d;
  const AttentionTile& tile = kAttentionTiles[index];
  d["rows"] = tile.rows;
  d["keys"] = tile.keys;
  d["head_dim"] = tile.dim;
  d["stages"] = tile.stages;
  d["threads"] = tile.threads();
  d["shared_bytes"] = tile.tile_bytes();
  return d;
}

py::dict attention_backward_tile(int64_t head_dim, int64_t head_dim_v, const std::string& math,
                                 int shared_limit) {
  py::dict d;
  const int index =
      choose_attention_backward_tile({head_dim, head_dim_v, attention_math(math), shared_limit});
  if (index < 0) return d;
  const AttentionBackwardTile& tile = kAttentionBackwardTiles[index];
  d["keys"] = tile.keys;
  d["rows"] = tile.rows;
  d["head_dim"] = tile.head_dim;
  d["threads"] = tile.threads();
  d["shared_bytes"] = tile.shared_bytes();
  return d;
}

py::dict int4_tile(int rows, int tokens, int chunks, int stages, int threads) {
  py::dict d;
  d["rows"] = rows;
  d["tokens"] = tokens;
  d["chunks"] = chunks;
  d["stages"] = stages;
  d["threads"] = threads;
  return d;
}

py::list int4_tiles(int elem_size) {
  py::list tiles;
  for (const Int4Tile& tile : kInt4Tiles) {
    py::dict d = int4_tile(tile.rows, tile.tokens, tile.chunks, tile.stages, tile.threads());
    d["shared_bytes"] = tile.shared_bytes(elem_size);
    d["suits"] = tile.suits(elem_size, /*whole_chunks=*/true);
    d["suits_any_group"] = tile.suits(elem_size, /*whole_chunks=*/false);
    tiles.append(d);
  }
  return tiles;
}

py::list int4_decode_tiles(int64_t m, int64_t n, int64_t k, int64_t groups, int sms) {
  py::list tiles;
  for (const Int4DecodeTile& tile : kInt4DecodeTiles) {
    // Whatever the GPU has, so that a refusal is about the sizes.
    const Int4Problem problem{m, {n, k, groups}, 2, sms, Int4DecodePlan::kTooMuch - 1, true};
    const char* refusal = int4_decode_refusal(problem, tile);
    py::dict d = int4_tile(kInt4TileRows, tile.tokens, tile.chunks, 2, tile.kThreads);
    d["refusal"] = refusal == nullptr ? "" : refusal;
    if (refusal == nullptr) {
      const Int4DecodePlan plan(tile, m, problem.shape, sms);
      d["blocks"] = plan.owners * tile.parts;
      d["owners"] = plan.owners;
      d["base_tiles"] = plan.base_tiles;
      d["more_tiles"] = plan.more_tiles;
      d["shared_bytes"] = plan.shared_bytes;
    }
    tiles.append(d);
  }
  return tiles;
}

py::list int4_wide_tiles() {
  py::list tiles;
  const auto add = [&](const auto& tile) {
    py::dict d = int4_tile(tile.rows, tile.tokens, tile.chunks, tile.stages, tile.threads());
    d["shared_bytes"] = tile.shared_bytes();
    tiles.append(d);
  };
  for (const Int4WideTile& tile : kInt4WideTiles) add(tile);
  for (const Int4DeepTile& tile : kInt4DeepTiles) add(tile);
  return tiles;
}

py::dict choose_int4_tile(int64_t m, int64_t n, int64_t k, int64_t groups, int elem_size, int sms,
                          int shared_limit, bool clusters, bool warpgroups) {
  const Int4Choice choice =
      choose_int4({m, {n, k, groups}, elem_size, sms, shared_limit, clusters, warpgroups});
  py::dict d;
  d["tile"] = choice.tile;
  d["parts"] = choice.parts;
  d["part_chunks"] = choice.part_chunks;
  d["cluster"] = choice.cluster;
  return d;
}

py::list scalar_attention_sweeps(int64_t n, bool backward, int sms) {
  py::list sweeps;
  const auto add = [&](const char* name, ScalarAttentionSweep sweep) {
    const ScalarAttentionChoice choice = choose_scalar_attention(sweep, n, sms);
    const ScalarAttentionTile& tile = kScalarAttentionTiles[sweep][choice.tile];
    py::dict d;
    d["sweep"] = name;
    d["threads"] = kScalarAttentionThreads;
    d["owners"] = tile.owners;
    d["polynomial"] = tile.polynomial;
    d["splits"] = choice.splits;
    d["per_split"] = choice.per_split;
    sweeps.append(d);
  };
  if (!backward) add("forward", kForwardSweep);
  if (backward) add("queries", kQuerySweep);
  if (backward) add("keys", kKeySweep);
  return sweeps;
}

// Every matrix lies in the same way: row 0 starts `shift` elements behind a boundary.
py::dict matrix_pass_plan(int64_t rows, int64_t n, int elem_size, int reads, bool column_values,
                          bool column_sums, int shift, int64_t row_stride, int sms) {
  alignas(16) static char memory[32];
  MatrixPassParams params = {};
  void* const base = memory + shift * elem_size;
  for (int i = 0; i < reads; ++i) params.in[i] = base, params.in_row_stride[i] = row_stride;
  if (!column_sums) params.out = base;
  if (column_values) params.x = base;
  if (column_sums) params.column_sums = base;
  if (column_sums || reads == 2) params.row_sums = base;
  params.sms = sms;
  params.rows = rows;
  params.n = n;
  params.dtype = elem_size == 4 ? DType::kFloat32 : DType::kBFloat16;
  const MatrixPlan plan = plan_matrix_pass(params);
  py::dict d;
  d["vector"] = plan.vector;
  d["peeled"] = plan.peeled;
  d["elems"] = plan.elems;
  d["lanes"] = plan.lanes;
  d["groups"] = plan.groups;
  d["whole_rows"] = plan.whole_rows;
  d["loads"] = plan.whole_rows ? kMatrixRowTile.loads : 1;  // of a thread along a row at a time
  d["batch"] =
      plan.whole_rows ? 1 : plan.groups * matrix_tile(reads, column_sums).rows_of(plan.vector);
  d["phases"] = plan.phases;
  d["tiles"] = plan.tiles;
  d["rows_per_chunk"] = plan.rows_per_chunk;
  d["chunks"] = plan.chunks;
  d["blocks"] = plan.blocks();
  d["row_parts"] = plan.row_parts();
  d["column_parts"] = plan.column_parts();
  d["scratch"] = plan.scratch();
  py::list heads;
  for (int64_t row = 0; row < rows && row < 64; ++row) heads.append(plan.head(row));
  d["heads"] = heads;
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What torchweld's kernels would choose; see torchweld.explain.";
  m.attr("softmax_stream_threads") = kSoftmaxStreamThreads;
  m.def("softmax_tiles", &softmax_tiles, py::arg("elem_size"), py::arg("backward"),
        py::arg("aligned"), py::arg("masked") = false,
        "The tiles of the row softmax kernels, in the order of preference.");
  m.def("softmax_rings", &softmax_rings, py::arg("elem_size"), py::arg("backward"),
        py::arg("aligned"), "The rings of the kernels for long rows, in the order of preference.");
  m.def("choose_softmax", &choose_softmax_kernel, py::arg("n"), py::arg("elem_size"),
        py::arg("aligned"), py::arg("backward"), py::arg("tiled"), py::arg("clusters"),
        py::arg("in_phase"), py::arg("shared_limit"), py::arg("masked") = false,
        py::arg("clusters_of_16") = true,
        "(\"tile\", index into softmax_tiles), (\"ring\", index into softmax_rings) or "
        "(\"stream\", -1).");
  m.def("gemm_tiles", &gemm_tiles, py::arg("math"),
        "The tiles of the matmul kernels; `suits` says which serve float16, bfloat16, tf32 or "
        "float32.");
  m.def("choose_gemm", &choose_gemm_tile, py::arg("m"), py::arg("n"), py::arg("k"),
        py::arg("batch"), py::arg("gated"), py::arg("pointwise"), py::arg("math"), py::arg("sms"),
        py::arg("shared_limit"),
        "What a product (batch, m, k) x (n, k) takes: `tile` is an index into gemm_tiles. "
        "pointwise: a gate or an activation follows.");
  m.def("attention_tile", &attention_tile, py::arg("seqlen_q"), py::arg("seqlen_k"),
        py::arg("head_dim"), py::arg("head_dim_v"), py::arg("math"),
        "attention's tile in float16, bfloat16, tf32 or float32, {} for the general kernel.");
  m.def("int4_tiles", &int4_tiles, py::arg("elem_size"),
        "The tiles of products with a 4-bit weight.");
  m.def("int4_decode_tiles", &int4_decode_tiles, py::arg("m"), py::arg("n"), py::arg("k"),
        py::arg("groups"), py::arg("sms"),
        "The tiles of products with a 4-bit weight and few rows of 16-bit x, and how each divides "
        "the product, or why it can't.");
  m.def("int4_wide_tiles", &int4_wide_tiles,
        "The tiles of products with a 4-bit weight and more rows of 16-bit x on Hopper.");
  m.def(
      "choose_int4", &choose_int4_tile, py::arg("m"), py::arg("n"), py::arg("k"), py::arg("groups"),
      py::arg("elem_size"), py::arg("sms"), py::arg("shared_limit"), py::arg("clusters"),
      py::arg("warpgroups") = false,
      "What x (m, k) and a 4-bit weight (n, k) take: `tile` is an index into int4_tiles, then "
      "into int4_decode_tiles, then into int4_wide_tiles, or -1 where the weight is dequantised.");
  m.def("scalar_attention_sweeps", &scalar_attention_sweeps, py::arg("n"), py::arg("backward"),
        py::arg("sms"), "The sweeps of scalar_attention or its gradient over n x n pairs.");
  m.def("attention_backward_tile", &attention_backward_tile, py::arg("head_dim"),
        py::arg("head_dim_v"), py::arg("math"), py::arg("shared_limit"),
        "The tile of attention's gradient, {} for the general kernels.");
  m.def(
      "matrix_pass_plan", &matrix_pass_plan, py::arg("rows"), py::arg("n"), py::arg("elem_size"),
      py::arg("reads"), py::arg("column_values"), py::arg("column_sums"), py::arg("shift"),
      py::arg("row_stride"), py::arg("sms"),
      "How a pass over a (rows, n) matrix is cut into blocks; `heads` are the elements before the "
      "first access of the first 64 rows.");
  m.def("families", &families,
        "The kinds of kernels that tune knows, each with the names of its problem's numbers.");
  m.def("candidates", &candidates, py::arg("family"), py::arg("problem"),
        "Every configuration, with why the problem can't take it.");
  m.def("candidate", &candidate, py::arg("family"), py::arg("problem"), py::arg("choice"),
        "One configuration by its numbers.");
  m.def("shape_class", &shape_class, py::arg("family"), py::arg("problem"),
        "The problem that stands for all that share a remembered choice.");
}

}  // namespace torchweld
