// Functions with which torchweld._C reports the grids of kernels that belong to no kernel family.
#pragma once

#include <pybind11/pybind11.h>

#include "pointwise/matrix_pass.h"
#include "puzzles/scalar_attention/config.h"

namespace torchweld {

namespace py = pybind11;

inline py::list scalar_attention_sweeps(int64_t n, bool backward, int sms) {
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

// Returns the plan for matrices with a given alignment: row 0 starts `shift` elements behind a
// 16-byte boundary.
inline py::dict matrix_pass_plan(int64_t rows, int64_t n, int elem_size, int reads,
                                 bool column_values, bool column_sums, int shift,
                                 int64_t row_stride, int sms) {
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
  d["batch"] = plan.groups * matrix_tile(reads, column_sums).rows;
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

}  // namespace torchweld
