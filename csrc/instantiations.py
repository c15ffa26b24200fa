"""The files of the build: explicit instantiations as one table, and files that include others.

setup.py writes these files into build/generated, and benchmarks/kernel_check.py does so too.

Kernels that compile slowly are templates in a .cuh. Their instantiations are spread over files,
which compile in parallel. A file is named after its contents; dtypes are float32, tf32 (fp32 data,
TF32 products), float16 and bfloat16. The passes over its headers cost a file 1 to 2 s of processor
time, so a file holds as many instantiations as compile in about 15 s.

A new kernel is a new `Family`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import NamedTuple

TYPES = {"float32": "float", "tf32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
ENUMERATORS = {
    "float32": "kFloat32",
    "tf32": "kTf32",
    "float16": "kFloat16",
    "bfloat16": "kBFloat16",
}
SIXTEEN_BIT = ("float16", "bfloat16")
# Attention has kernels for causal and leftpad alone, and others for every mask.
VARIANTS = (
    {"masked": "", "Masked": "", "is_masked": "false"},
    {"masked": "masked_", "Masked": "Masked", "is_masked": "true"},
)
# For some tiles, attention's backward on Hopper has kernels of its own for a soft cap, dropout, a
# bias and ALiBi.
CAPPED = ({"masked": "capped_", "Masked": "Capped", "is_masked": "true"},)
DROPPED = ({"masked": "dropped_", "Masked": "Dropped", "is_masked": "true"},)
BIASED = ({"masked": "biased_", "Masked": "Biased", "is_masked": "true"},)
ALIBI = ({"masked": "alibi_", "Masked": "Alibi", "is_masked": "true"},)
MARK = "// Generated from csrc.\n"


class Family(NamedTuple):
    """The instantiations of one template. Every row is a line; rows of one file name share it.

    Placeholders of `file` and `line` are a row's values, those of its variant among them. A row
    with a $dtype has its C++ type as $T and the enumerator of that name as $kDtype too. File names
    are in lower case.
    """

    file: str
    header: str
    line: str
    rows: list[dict[str, object]]


def each(**values) -> list[dict[str, object]]:
    """A row for every combination of the values."""
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


TABLE = [
    Family(
        "norm_forward_$contents",
        "norm/forward.cuh",
        "template void launch_norm_of<$T>(const NormParams&, cudaStream_t);",
        each(contents=("float16",), dtype=("float16",))
        + each(contents=("other",), dtype=("float32", "bfloat16")),
    ),
    Family(
        "norm_backward_rows_$dtype",
        "norm/backward_rows.cuh",
        "template void launch_norm_backward_rows_of<$T>("
        "const NormBackwardParams&, const NormBackwardPlan&, cudaStream_t);",
        each(dtype=("float32", *SIXTEEN_BIT)),
    ),
    Family(
        "gemm_sync_$contents",
        "gemm/sync/kernel.cuh",
        "template void launch_sync_size<GemmMath::$kDtype, SyncSize::k$size>("
        "const GemmParams&, cudaStream_t);",
        each(contents=("float16_small",), dtype=("float16",), size=("Small",))
        + each(contents=("bfloat16_small",), dtype=("bfloat16",), size=("Small",))
        + each(contents=("float16",), dtype=("float16",), size=("Large", "Medium"))
        + each(contents=("bfloat16",), dtype=("bfloat16",), size=("Large", "Medium"))
        + each(contents=("tf32_large",), dtype=("tf32",), size=("Large",))
        + each(contents=("tf32_medium",), dtype=("tf32",), size=("Medium",))
        + each(contents=("tf32_small",), dtype=("tf32",), size=("Small",))
        + each(contents=("float32_medium",), dtype=("float32",), size=("Medium",))
        + each(contents=("float32_small",), dtype=("float32",), size=("Small",)),
    ),
    Family(
        "gemm_sm90_$contents",
        "gemm/sm90/kernel.cuh",
        "template void sm90::launch_tile<GemmMath::$kDtype, sm90::$tile>("
        "const sm90::KernelParams&, cudaStream_t);",
        each(
            contents=("pingpong_float16",),
            dtype=("float16",),
            tile=("kPingPong128x128Cluster2", "kPingPong128x128"),
        )
        + each(
            contents=("pingpong_bfloat16",),
            dtype=("bfloat16",),
            tile=("kPingPong128x128Cluster2", "kPingPong128x128"),
        )
        + each(
            contents=("cooperative",),
            dtype=SIXTEEN_BIT,
            tile=("kCooperative128x256Cluster2", "kCooperative128x96"),
        )
        + each(
            contents=("cooperative_128x192",),
            dtype=SIXTEEN_BIT,
            tile=("kCooperative128x192Cluster2",),
        )
        + each(
            contents=("cooperative_128x320",),
            dtype=SIXTEEN_BIT,
            tile=("kCooperative128x320Cluster2",),
        )
        + each(contents=("pingpong_64x64",), dtype=SIXTEEN_BIT, tile=("kPingPong64x64",))
        + each(contents=("swap_ab",), dtype=SIXTEEN_BIT, tile=("kSwapAb128x32", "kSwapAb128x64"))
        + each(
            contents=("float32",),
            dtype=("tf32",),
            tile=("kPingPong128x128Cluster2", "kPingPong128x128"),
        )
        + each(
            # NOTE: a file of its own; in one with the others this kernel gets other registers.
            contents=("tf32_cooperative",),
            dtype=("tf32",),
            tile=("kCooperative128x256Cluster2",),
        )
        + each(contents=("float32",), dtype=("float32",), tile=("kBf16x3Cooperative128x128",)),
    ),
    Family(
        "gemm_grouped_$contents",
        "gemm/sm90/grouped.cuh",
        "template void sm90::launch_grouped_tile<GemmMath::$kDtype, sm90::$tile>("
        "const sm90::KernelParams&, cudaStream_t);",
        each(
            contents=("pingpong",),
            dtype=SIXTEEN_BIT,
            tile=("kPingPong128x128Cluster2",),
        )
        + each(
            contents=("cooperative",),
            dtype=SIXTEEN_BIT,
            tile=("kCooperative128x256Cluster2", "kPingPong64x64"),
        )
        + each(contents=("swap_ab",), dtype=SIXTEEN_BIT, tile=("kSwapAb128x32", "kSwapAb128x64")),
    ),
    Family(
        "gemm_rows_$dtype",
        "gemm/rows/kernel.cuh",
        "template void launch_rows_tiles<GemmMath::$kDtype>(const GemmParams&, cudaStream_t);",
        each(dtype=SIXTEEN_BIT),
    ),
    Family(
        "attention_forward",
        "attention/sync/fwd.cuh",
        "template void launch_attention_tiles<$T, AttentionMath::$math, $is_masked>("
        "int, const AttentionParams&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT, math=("k16Bit",))
        + each(variant=VARIANTS, dtype=("tf32",), math=("kTf32",)),
    ),
    Family(
        "attention_forward_$dtype",
        "attention/sync/fwd_fp32.cuh",
        "template void launch_attention_split_tiles<$is_masked>("
        "int, const AttentionParams&, cudaStream_t);",
        each(variant=VARIANTS, dtype=("float32",)),
    ),
    Family(
        "attention_decode_$dtype",
        "attention/decode/kernel.cuh",
        "template void launch_attention_decode<$T, $is_masked>("
        "const AttentionParams&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT),
    ),
    Family(
        "attention_chain_$dtype",
        "attention/decode/chain.cuh",
        "template void launch_attention_chain<$T>(const AttentionParams&, cudaStream_t);",
        each(dtype=SIXTEEN_BIT),
    ),
    Family(
        "attention_wide_forward",
        "attention/wide/fwd.cuh",
        "template void launch_attention_wide<$T, $is_masked>("
        "const AttentionParams&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT),
    ),
    Family(
        "attention_wide_backward",
        "attention/wide/bwd.cuh",
        "template void launch_attention_backward_wide<$T>("
        "const MaskedBackwardArgs&, cudaStream_t);",
        each(dtype=SIXTEEN_BIT),
    ),
    # `tile` is an index into kAttentionSm90Tiles; `dims` names its head dims in the file name.
    Family(
        "attention_sm90_$dims",
        "attention/sm90/fwd_kernel.cuh",
        "template void launch_attention_sm90_tile<$T, $tile, $is_masked>("
        "const AttentionParams&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT, dims=("to_64_192_rows",), tile=(0,))
        + each(variant=VARIANTS, dtype=SIXTEEN_BIT, dims=("to_64",), tile=(1, 2))
        + each(variant=VARIANTS, dtype=SIXTEEN_BIT, dims=("to_96",), tile=(3,))
        + each(variant=VARIANTS, dtype=SIXTEEN_BIT, dims=("to_128",), tile=(4, 5))
        + each(variant=VARIANTS, dtype=SIXTEEN_BIT, dims=("to_256",), tile=(6, 7))
        + each(variant=VARIANTS, dtype=SIXTEEN_BIT, dims=("unequal",), tile=(8, 9)),
    ),
    # `tile` counts in kAttentionBackwardSm90Tiles.
    Family(
        "attention_backward_sm90_$dtype",
        "attention/sm90/bwd_kernel.cuh",
        "template void launch_attention_backward_sm90_tile<$T, $tile>("
        "const ${Masked}BackwardArgs&, cudaStream_t);\n"
        "template void launch_attention_backward_sm90_preprocess<$T, $tile>("
        "const ${Masked}BackwardArgs&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT, tile=(0, 3, 4))
        + each(variant=(*CAPPED, *DROPPED, *BIASED, *ALIBI), dtype=SIXTEEN_BIT, tile=(0, 3)),
    ),
    Family(
        "attention_backward_sm90_to_96",
        "attention/sm90/bwd_kernel.cuh",
        "template void launch_attention_backward_sm90_tile<$T, $tile>("
        "const ${Masked}BackwardArgs&, cudaStream_t);\n"
        "template void launch_attention_backward_sm90_preprocess<$T, $tile>("
        "const ${Masked}BackwardArgs&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT, tile=(1, 2)),
    ),
    Family(
        "attention_backward_2cta",
        "attention/sm90/bwd_kernel.cuh",
        "template void launch_attention_backward_sm90_tile<$T, $tile>("
        "const ${Masked}BackwardArgs&, cudaStream_t);\n"
        "template void launch_attention_backward_sm90_preprocess<$T, $tile>("
        "const ${Masked}BackwardArgs&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT, tile=(5,)),
    ),
    # `tile` is an index into kAttentionBackwardTiles; file names give the tiles' largest head dim.
    # NOTE: these masked kernels have their own file: beside plain ones a few instructions change.
    Family(
        "${masked}attention_backward_${dtype}_to_256",
        "attention/sync/bwd_tiles.cuh",
        "template void launch_attention_backward_tile<$T, $tile>("
        "const ${Masked}BackwardArgs&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT, tile=(4, 5, 6)),
    ),
    Family(
        "attention_backward_${dtype}_to_$dims",
        "attention/sync/bwd_tiles.cuh",
        "template void launch_attention_backward_tile<$T, $tile>("
        "const ${Masked}BackwardArgs&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT, dims=(128,), tile=(0, 1, 2, 3))
        + each(variant=VARIANTS, dtype=("tf32",), dims=(128,), tile=(7, 8, 9))
        + each(variant=VARIANTS, dtype=("float32",), dims=(128,), tile=(10, 11, 12, 13))
        + each(variant=VARIANTS, dtype=("float32",), dims=(256,), tile=(14,)),
    ),
    Family(
        "${kind}_softmax_$dtype",
        "ops/causal_softmax/launch.cuh",
        "template void launch_causal_softmax_of<$T>("
        "const SoftmaxParams&, const ScoresMask<MaskKind::k$mask>&, const ZeroCounter&,"
        " cudaStream_t);",
        each(kind=("causal",), mask=("Causal", "Range"), dtype=("float32", *SIXTEEN_BIT))
        + each(kind=("capped",), mask=("Capped",), dtype=("float32", *SIXTEEN_BIT)),
    ),
    Family(
        "causal_softmax_backward_$dtype",
        "ops/causal_softmax/launch.cuh",
        "template void launch_causal_softmax_backward_of<$T>("
        "const SoftmaxBackwardParams&, const ScoresMask<MaskKind::k$mask>&, const ZeroCounter&,"
        " cudaStream_t);",
        each(mask=("Causal", "Range"), dtype=("float32", *SIXTEEN_BIT)),
    ),
    Family(
        "capped_softmax_$dtype",
        "ops/causal_softmax/launch.cuh",
        "template void launch_capped_softmax_backward_of<$T>("
        "const SoftmaxBackwardParams&, const ScoresMask<MaskKind::kCapped>&,"
        " const CappedBackward&, cudaStream_t);",
        each(dtype=("float32", *SIXTEEN_BIT)),
    ),
    Family(
        "partial_sums",
        "pointwise/add_partials.cuh",
        "template void launch_add_partials<$T>(const float*, int64_t, int, int64_t,"
        " const ColumnSums&, cudaStream_t);",
        each(dtype=("float32", *SIXTEEN_BIT)),
    ),
    Family(
        "conv2d_cells",
        "puzzles/conv2d/cells.cuh",
        "void launch_conv2d_cells_$dtype(int tile, const Conv2dParams& params, cudaStream_t stream)"
        " { launch_conv2d_cells_of<$T>(tile, params, stream); }",
        each(dtype=SIXTEEN_BIT),
    ),
    Family(
        "int4_sync",
        "int4/sync/kernel.cuh",
        "template void launch_int4_linear_of<$T>(const Int4LinearParams&, cudaStream_t);",
        each(dtype=("float32", *SIXTEEN_BIT)),
    ),
    Family(
        "int4_small_m",
        "int4/small_m/kernel.cuh",
        "template void launch_int4_small_m_of<$T>(const Int4LinearParams&, cudaStream_t);",
        each(dtype=SIXTEEN_BIT),
    ),
    Family(
        "int4_large_m",
        "int4/large_m/kernel.cuh",
        "template void launch_int4_large_m_of<$T>(const Int4LinearParams&, cudaStream_t);",
        each(dtype=SIXTEEN_BIT),
    ),
    Family(
        "softmax_matmul_sm90",
        "ops/softmax_matmul/sm90.cuh",
        "template void launch_softmax_matmul_sm90<$T, $is_masked>("
        "const SoftmaxMatmulParams&, cudaStream_t);",
        each(variant=VARIANTS, dtype=SIXTEEN_BIT),
    ),
]

# .cu files that are compiled together, because each takes little more time than its headers. The
# names in their anonymous namespaces must differ within a group.
CUDA_GROUPS = {
    "attention_general": (
        "attention/fwd.cu",
        "attention/bwd.cu",
        "attention/general/fwd.cu",
        "attention/general/bwd.cu",
    ),
    "gemm": (
        "gemm/gemm_kernels.cu",
        "gemm/sm90/launch.cu",
        "gemm/sm90/operands.cu",
        "device/facts.cu",
        "device/tensor_map.cu",
    ),
    "rows": (
        "pointwise/activation_backward.cu",
        "pointwise/gate_backward.cu",
        "norm/forward.cu",
        "norm/backward.cu",
        "norm/vectors_backward.cu",
        "ops/rotary/kernels.cu",
        "ops/folded_layer_norm_linear/fold_kernels.cu",
    ),
    # NOTE: gate_backward.cu is not in "gemm", where it would instantiate every kernel that
    # gemm/sm90/launch.cu calls.
    "losses": (
        "losses/kernels.cu",
        "losses/sm90/exponentials.cu",
        "gemm/sm90/gate_backward.cu",
    ),
    "int4": (
        "int4/launch.cu",
        "int4/dequantise.cu",
        "int4/decode/launch.cu",
        "ops/int4_pack/kernels.cu",
    ),
    "scores": (
        "ops/causal_softmax/kernels.cu",
        "ops/softmax_matmul/dscores_kernels.cu",
        "ops/softmax_matmul/dvalue_kernels.cu",
        "ops/key_ranges/kernels.cu",
    ),
    "puzzles": (
        "pointwise/matrix_kernels.cu",
        "puzzles/row_sum/kernels.cu",
        "puzzles/scalar_attention/kernels.cu",
    ),
    "conv2d": (
        "puzzles/conv2d/kernels.cu",
        "puzzles/conv2d/general_kernels.cu",
        "puzzles/conv2d/direct_kernels.cu",
        "puzzles/conv2d/small_kernels.cu",
        "puzzles/conv2d/dweight_kernels.cu",
    ),
}


def texts(table: list[Family] = TABLE) -> dict[str, str]:
    """The files of the table: names and contents."""
    lines: dict[str, list[str]] = {}
    headers: dict[str, str] = {}
    for family in table:
        for row in family.rows:
            values = dict(row)
            values.update(values.pop("variant", {}))
            if "dtype" in row:
                values.update(T=TYPES[row["dtype"]], kDtype=ENUMERATORS[row["dtype"]])
            name = Template(family.file).substitute(values).lower() + ".cu"
            if headers.setdefault(name, family.header) != family.header:
                raise ValueError(f"two families of csrc/instantiations.py write {name}")
            lines.setdefault(name, []).append(Template(family.line).substitute(values))
    return {
        name: f'{MARK}#include "{headers[name]}"\n\nnamespace torchweld {{\n\n'
        + "\n".join(of_file)
        + "\n\n}  // namespace torchweld\n"
        for name, of_file in lines.items()
    }


def write_files(folder: Path, files: dict[str, str]) -> list[Path]:
    """Makes these the only generated files of the folder; returns their paths.

    A file that is as it should be is left untouched, so that nothing is compiled twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = {path.name: path.read_text() for path in folder.glob("*.c*")}
    for name, text in there.items():
        if name not in files and text.startswith(MARK):
            (folder / name).unlink()
    for name, text in files.items():
        if there.get(name) != text:
            (folder / name).write_text(text)
    return [folder / name for name in sorted(files)]


def including(sources: Iterable[str]) -> str:
    """The text of a file that includes these, which are paths relative to csrc."""
    return MARK + "".join(f'#include "{source}"\n' for source in sources)


def write(folder: Path) -> list[Path]:
    """Writes the files of TABLE and of CUDA_GROUPS into a folder; returns their paths."""
    groups = {f"{name}.cu": including(sources) for name, sources in CUDA_GROUPS.items()}
    return write_files(folder, texts() | groups)


def alone(sources: list[str]) -> list[str]:
    """The .cu files of csrc, relative to it, that belong to no group of CUDA_GROUPS."""
    grouped = set(itertools.chain.from_iterable(CUDA_GROUPS.values()))
    return [source for source in sources if source not in grouped]


def write_groups(folder: Path, sources: list[str], size: int) -> list[Path]:
    """Writes files that include `size` of the sources each, which are paths relative to csrc."""
    groups = [sources[i : i + size] for i in range(0, len(sources), size)]
    return write_files(folder, {f"group_{i}.cpp": including(g) for i, g in enumerate(groups)})
