"""explain for each op: its parts, its tile, and the rejected candidates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchweld
import torchweld._library as library
from choices_helpers import H200, dry_records, meta, named, nothing_is_left_behind, ops  # noqa: F401
from samples import BF16, F16, F32

if library.build_facts().get("cuda") is None:
    pytest.skip("a CPU-only build explains no CUDA kernel", allow_module_level=True)


@pytest.fixture(autouse=True)
def an_h100_is_assumed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_call_of_several_parts():
    x, weight = meta(512, 768), meta(3072, 768)
    backward = torchweld.explain("linear_backward", meta(512, 3072), x, weight)
    assert set(backward.tile) == {"dx", "dweight"}
    assert "(m 512, n 768, k 3072, " in backward.tile["dx"]
    assert "(m 3072, n 768, k 512, " in backward.tile["dweight"]
    assert all(tile.startswith("sm90 ") for tile in backward.tile.values())
    assert "sms" not in str(backward)
    lines = str(backward).splitlines()
    assert any("dx=sm90 " in line and ", dweight=sm90 " in line for line in lines)


def test_only_the_gradients_that_are_wanted_have_a_part():
    args, mask = [meta(512, 3072), meta(512, 768), meta(3072, 768)], [False, True, False]
    (record,) = dry_records("linear_backward", *args, output_mask=mask)
    assert record["part"] == "dweight" and sizes(record) == (3072, 768, 512)
    explanation = torchweld.explain("linear_backward", *args, output_mask=mask)
    assert explanation.tile["name"] == record["choice"]


def sizes(record: dict) -> tuple[int, ...]:
    fields = named("matmul", record["problem"])
    return fields["m"], fields["n"], fields["k"]


def test_products():
    x, weight = meta(512, 768), meta(3072, 768)
    forward = torchweld.explain("linear", x, weight)
    assert forward.kernel.startswith("matmul")
    (record,) = dry_records("linear", x, weight)
    assert sizes(record) == (512, 3072, 768) and forward.tile["name"] == record["choice"]
    (record,) = dry_records("gated_linear", x, weight)
    assert sizes(record) == (512, 1536, 768)
    fields = named("matmul", record["problem"])
    assert fields["gated"] == fields["pointwise"] == 1
    assert torchweld.explain("gated_linear", x, weight).tile["name"] == record["choice"]
    (pair,) = dry_records("gated_linear_pair", x, *weight.chunk(2))
    assert (pair["problem"], pair["choice"]) == (record["problem"], record["choice"])


def test_attention():
    query = meta(1, 2, 8, 64)
    assert torchweld.explain("attention", query, query, query).tile["head_dim"] == 64
    wide = meta(1, 2, 8, 300)
    assert torchweld.explain("attention", wide, wide, wide).kernel == "general"


def test_convolutions():
    def explained(dtype, *sizes):
        *shape, kernel = sizes
        return torchweld.explain(
            "conv2d", meta(*shape, dtype=dtype), meta(kernel, kernel, dtype=dtype)
        )

    for size, rows in ((1, 32), (3, 32), (4, 32), (5, 32), (7, 64), (8, 64)):
        cells = explained(BF16, 9, 33, 64, size)
        assert cells.kernel == "cells, on tensor cores"
        largest = next(c for c in (3, 5, 7, 9) if size <= c)
        name = f"cells {largest}x{largest}"
        assert cells.tile == {"name": name, "tile_rows": rows, "ahead": 2}
    assert explained(BF16, 9, 8, 8, 3).kernel == "cells, on tensor cores"
    assert explained(BF16, 9, 64, 64, 11).kernel == "general"
    assert explained(F32, 9, 8, 8, 7).kernel == "direct, in registers"
    assert explained(F32, 9, 16, 16, 7).kernel == "direct, in registers"
    assert explained(F32, 9, 16, 16, 6).kernel == "general"


def int4_args(m: int, n: int = 4096, k: int = 4096, groups: int = 32, dtype=BF16) -> list[Tensor]:
    words = [meta(n, k // 8, dtype=torch.int32), meta(n, groups // 8, dtype=torch.int32)]
    return [meta(m, k, dtype=dtype), words[0], meta(n, groups, dtype=dtype), words[1]]


def test_4_bit_products():
    for m, kernel in ((4, "4-bit decoding"), (32, "4-bit tiles (wgmma)"), (64, "4-bit tiles (wg")):
        explanation = torchweld.explain("int4_linear", *int4_args(m))
        assert explanation.kernel.startswith(kernel), explanation
        assert explanation.tile["tokens"] >= m and explanation.tile["tile_bytes"] > 0
        # The cluster adds the k-ranges, so there is no second kernel.
        (record,) = dry_records("int4_linear_repacked", *repacked(m), out_features=4096)
        assert len(record["kernels"]) == 1
    explanation = torchweld.explain("int4_linear", *int4_args(64, dtype=F32))
    assert explanation.kernel == "4-bit tiles (mma.sync)"


def repacked(m: int, n: int = 4096, k: int = 4096, groups: int = 32) -> list[Tensor]:
    return [meta(m, k), *ops.int4_repack(*int4_args(m, n, k, groups)[1:])]


def test_4_bit_products_that_are_dequantised_have_two_parts():
    x, *weight = int4_args(200, dtype=F32)
    explanation = torchweld.explain("int4_linear", x, *weight)
    assert explanation.kernel == (
        "weight dequantised, then the matmul engine; matmul engine (mma.sync)"
    )
    assert [tile.split()[0] for tile in explanation.tile.values()] == ["dense", "sync"]


# Rejected candidates


def test_a_refused_engine_is_named_with_its_reason():
    rejected = dict(torchweld.explain("int4_linear", *int4_args(64, dtype=F32)).rejected)
    assert set(rejected) == {"decode", "small_m", "large_m", "dense"}
    for engine in ("decode", "small_m", "large_m"):
        assert rejected[engine] == "the tile is for 16-bit x and groups of a multiple of 64"
    assert "slower" in rejected["dense"]
    rejected = dict(torchweld.explain("int4_linear", *int4_args(17)).rejected)
    assert rejected["decode"] == "the tile has fewer tokens" and "slower" in rejected["sync"]
    image, kernel = meta(9, 16, 16, dtype=F32), meta(6, 6, dtype=F32)
    rejected = dict(torchweld.explain("conv2d", image, kernel).rejected)
    assert rejected["direct"] == "float32 and square kernels of 3, 4, 5 or 7"
    assert rejected["cells"] == "16 bits and kernels of 3 x 3 at most"  # the first tile's reason
    assert "general" not in rejected


# Rows


def explain_row(n, dtype, offset=0, op="softmax", rows=4):
    x = meta(rows * n + offset, dtype=dtype)[offset:].view(rows, n)
    return torchweld.explain(op, *([x, x] if op.endswith("backward") else [x]))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "op", ["softmax", "softmax_backward", "causal_softmax", "causal_softmax_backward"]
)
def test_a_row_has_a_tile_that_holds_it(dtype, op):
    for n in (1, 7, 64, 128, 129, 1000, 1024, 4096, 5000, 8192, 16384, 32768, 40000, 300000):
        chosen = explain_row(n, dtype, op=op)
        if chosen.kernel.startswith("streaming"):
            continue
        assert chosen.tile["capacity"] >= n
        assert all(reason for _, reason in chosen.rejected)
    assert explain_row(1024, dtype, op=op).kernel.startswith("rows in registers")
    assert explain_row(65536, dtype, op=op).kernel.startswith("rows in shared memory")
    assert explain_row(10**7, dtype, op=op).kernel.startswith("streaming")


def test_the_numbers_of_a_mask_choose_the_rows_kernel():
    def explain(n, op="causal_softmax", **numbers):
        x = meta(2, 4, 64, n)
        inputs = [x, x] if op.endswith("backward") else [x]
        return torchweld.explain(op, *inputs, **numbers)

    backward, sink = "causal_softmax_backward", meta(4)
    for numbers in ({}, {"window": 64}, {"key_end": meta(2, dtype=torch.int32)}):
        for op in ("causal_softmax", backward):
            assert explain(4096, op, **numbers).kernel.startswith("rows in registers")
            assert explain(65536, op, **numbers).kernel.startswith("rows in shared memory")
    for numbers in ({"softcap": 2.0}, {"sink": sink, "window": 64}):
        assert explain(4096, **numbers).kernel.startswith("rows in registers")
        long = explain(65536, **numbers)
        assert long.kernel.startswith("streaming")
        assert dict(long.rejected)["ring 2"] == "softcap and sinks are not supported"
        gradient = explain(4096, backward, **numbers, scores=meta(2, 4, 64, 4096))
        assert gradient.kernel.startswith("streaming") and "reads the scores" in str(gradient)


def test_explain_sees_where_rows_start():

    def kernel(*args, **kwargs):
        return explain_row(*args, **kwargs).kernel

    # The result of a shifted tensor is as aligned as any; odd rows start anywhere.
    assert explain_row(1024, BF16).tile["capacity"] == 1024
    assert explain_row(1024, BF16, offset=1).tile["capacity"] == 1024
    # Less than an access beside the whole ones.
    assert explain_row(1023, BF16).tile["capacity"] == 1024 + 7
    assert "holds 519 elements" in str(explain_row(1023, BF16))
    # Odd rows are in phase with the result; rows of a shifted tensor are not.
    assert kernel(65537, BF16).startswith("rows in shared memory")
    assert kernel(65537, BF16, offset=1).startswith("streaming")


def test_strides_and_offsets_are_kept():
    wide = meta(64, 1030)[:, 3:1027]
    (record,) = dry_records("softmax", wide)
    assert named("softmax", record["problem"])["in_phase"] == 0
    x, weight = meta(64, 128), meta(256, 64).t()
    (record,) = dry_records("linear", x[:, :64], weight[:64].t())
    fields = named("matmul", record["problem"])
    assert (fields["a_k_major"], fields["b_k_major"]) == (1, 1)
    (record,) = dry_records("bmm", meta(2, 8, 16), meta(2, 24, 16).transpose(1, 2))
    assert named("matmul", record["problem"])["b_k_major"] == 1
    (record,) = dry_records("bmm", meta(2, 8, 16), meta(2, 16, 24))
    assert named("matmul", record["problem"])["b_k_major"] == 0


def test_a_kernel_has_the_threads_of_its_tile():
    """Threads and shared memory of a kernel follow from its tile and stages."""
    for dtype, k in ((BF16, 4096), (F16, 700), (F32, 512)):
        for m, n in ((16, 4096), (4096, 4096), (300, 300), (100, 10)):
            x, weight = meta(m, k, dtype=dtype), meta(n, k, dtype=dtype)
            (record,) = dry_records("linear", x, weight)
            sm90 = record["choice"].startswith("sm90")
            # The engine on wgmma writes fp32 operands anew in a kernel before its own.
            written = sm90 and dtype == F32
            tile, (_, shared_bytes, threads, *_) = record["columns"], record["kernels"][written]
            assert threads == 32 * tile["warps"]
            itemsize = 2 if written else dtype.itemsize
            stage = (tile["block_m"] + tile["block_n"]) * tile["block_k"] * itemsize
            few = record["choice"].startswith("rows")  # each warp has its own stages
            # Beside its stages, the wgmma engine keeps boxes of results, bias and barriers, and the
            # small-M engine the statistics of a norm.
            more = shared_bytes - tile["stages"] * stage * (tile["warps"] if few else 1)
            assert (0 < more < 40_000) if sm90 or few else more == 0
            # Another kernel adds the partials of splits, but not those of stream-K.
            assert len(record["kernels"]) == (2 if tile["splits"] > 1 or written else 1)


class Allocated(TorchDispatchMode):
    """Remembers how many floats each new tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.floats: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty.memory_format and made.dtype == F32:
            self.floats.append(made.numel())
        return made


@pytest.mark.parametrize("gated", [False, True])
def test_sums_of_splits_have_a_workspace_that_holds_them(gated):
    """In float32, rows filled up to vectors."""
    splits = set()
    for m, n, k in ((40, 4095, 4096), (4096, 4096, 4096), (1, 9, 10_000), (300, 1000, 700)):
        x, weight = meta(m, k), meta(2 * n if gated else n, k)
        with Allocated() as seen:
            (record,) = dry_records("gated_linear" if gated else "linear", x, weight)
        parts, width = record["columns"]["splits"], -(-n // 8) * 8 * (2 if gated else 1)
        if record["choice"].endswith("stream-K"):
            # Each block has the sums of a tile.
            tile = record["columns"]
            blocks, rest = divmod(seen.floats.pop(), tile["block_m"] * tile["block_n"])
            assert rest == 0 and 1 <= blocks <= H200["sms"] and seen.floats == []
        else:
            assert seen.floats == ([parts * m * width] if parts > 1 else [])
        splits.add(parts != 1)
    assert True in splits
