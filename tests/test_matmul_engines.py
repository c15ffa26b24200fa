"""Every engine and tile of the matmul, over sizes, layouts and epilogues, on a GPU."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch

from choices_helpers import _C, dry_records, nothing_is_left_behind, ops  # noqa: F401
from cuda_graphs import cuda_graph
from numerics import assert_equal, assert_same_bits
from reference import ACTIVATIONS
from samples import BF16, F16, F32, check_op

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="engines run on a GPU")

# M, N, K: below a tile, a tile, between tiles, several of them, more than a GPU does at a time;
# N with rows on 16 bytes and not.
SIZES = [
    (1, 8, 8), (3, 40, 24), (16, 200, 520), (9, 33, 72), (64, 96, 64), (65, 33, 72),
    (128, 128, 512), (130, 264, 200),
    (257, 250, 1000), (384, 512, 448), (1000, 520, 136), (300, 1000, 4104),
    (2050, 1160, 328),
]  # fmt: skip


SPLITS = ("", "2", "5")  # of all that a product may have; beside them stream-K


def configurations(op: str, *args, **kwargs) -> list[tuple[list[int], str]]:
    """(problem, name) of every engine and tile that a call's one product may have."""
    records = [r for r in dry_records(op, *args, device=0, **kwargs) if r["family"] == "matmul"]
    found = []
    for numbers in {tuple(r["problem"]) for r in records}:
        for c in _C.candidates("matmul", list(numbers)):
            if not c["refusal"] and c["choice"].partition(" /")[2] in SPLITS:
                found.append((list(numbers), c["choice"]))
    return found


def each_configuration(op: str, *args, **kwargs):
    """Yields the name of each with it in force."""
    for numbers, name in configurations(op, *args, **kwargs):
        ops._force_choice("matmul", numbers, name)
        try:
            yield name
        finally:
            ops._force_choice("matmul", numbers, "")


def grid(dtype, *shape):
    """Small integers: every sum is exact in any order."""
    return torch.randint(-4, 5, shape).to(dtype).cuda()


def laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    """Rows adjacent, columns adjacent, or rows with a gap of NaN between them."""
    if layout == "transposed":
        return t.t().contiguous().t()
    if layout == "gaps":
        wide = torch.full((t.shape[0] + 1, t.shape[1] + 16), math.nan, dtype=t.dtype, device="cuda")
        view = wide[:-1, 8:-8]
        view.copy_(t)
        return view
    return t


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_exact_in_every_configuration(size, dtype):
    m, n, k = size
    x, weight, bias = grid(dtype, m, k), grid(dtype, n, k), grid(dtype, n)
    product = (x.double() @ weight.double().t()).to(dtype)
    shifted = (x.double() @ weight.double().t() + bias.double()).relu().to(dtype)
    engines = set()
    for layouts in itertools.product(("rows", "transposed", "gaps"), repeat=2):
        a, b = laid_out(x, layouts[0]), laid_out(weight, layouts[1])
        for name in each_configuration("linear", a, b):
            assert_equal(ops.linear(a, b), product)
            engines.add(name.split()[0])
        for _ in each_configuration("linear", a, b, bias, activation="relu"):
            assert_equal(ops.linear(a, b, bias, activation="relu"), shifted)
    if torch.cuda.get_device_capability() == (9, 0):
        few = m <= 16 and dtype != F32
        assert engines == {"sync", "sm90"} | ({"rows"} if few else set())


@pytest.mark.parametrize("dtype", [F16, BF16, F32, "tf32"], ids=str)
@pytest.mark.parametrize("m", [1, 2, 3, 17])
def test_stores_stay_inside_of_a_result_in_a_larger_buffer(m, dtype, monkeypatch):
    """Rows whose bytes are not a multiple of 16, between bytes of others."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", dtype == "tf32")
    dtype = F32 if dtype == "tf32" else dtype
    for n, k in ((1, 512), (7, 72), (9, 512), (100, 4096), (1001, 256)):
        x, weight, bias = grid(dtype, m, k), grid(dtype, n, k), grid(dtype, n)
        z = (x.double() @ weight.double().t() + bias.double()).to(dtype)
        buffers = [torch.full((m * n + 128,), 777.0, dtype=dtype, device="cuda") for _ in range(2)]
        y, preact = (buffer[64:-64].view(m, n) for buffer in buffers)
        args = (x, weight, bias, y, preact)
        for name in each_configuration("_linear_part", *args, activation="relu"):
            for buffer in buffers:
                buffer.fill_(777.0)
            ops._linear_part(*args, activation="relu")
            assert_equal(y, z.relu())
            assert_equal(preact, z)
            for buffer in buffers:
                outside = torch.cat([buffer[:64], buffer[-64:]])
                assert (outside == 777.0).all(), (name, n, k)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_tiles_that_a_cluster_has_together_are_exact(dtype):
    """Few and many tiles, whose k-ranges have different lengths."""
    for m, n, k in ((64, 4096, 1600), (40, 2560, 2048), (64, 768, 3072), (17, 130, 4096)):
        x, weight, bias = grid(dtype, m, k), grid(dtype, n, k), grid(dtype, n)
        z = (x.double() @ weight.double().t() + bias.double()).to(dtype)
        for layout in ("rows", "transposed"):
            b = laid_out(weight, layout)
            for name in each_configuration("linear", x, b, bias):
                if "swap_ab" in name:
                    assert_equal(ops.linear(x, b, bias), z)
            for name in each_configuration("gated_linear_forward", x, b, bias, gate="reglu"):
                if "swap_ab" in name:
                    assert_equal(ops.gated_linear_forward(x, b, bias, gate="reglu")[1], z)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bias_gradients_beside_the_weights_are_exact(size, dtype):
    m, n, k = size
    dy, x, weight = grid(dtype, m, n), grid(dtype, m, k), grid(dtype, n, k)
    dweight = (dy.double().t() @ x.double()).to(dtype)
    dbias = dy.double().sum(0).to(dtype)
    for layout in ("rows", "gaps", "transposed"):
        args = laid_out(dy, layout), laid_out(x, layout), weight
        for name in each_configuration("linear_backward", *args, output_mask=[False, True, True]):
            _, weights, bias = ops.linear_backward(*args, output_mask=[False, True, True])
            assert_equal(weights, dweight)
            assert torch.equal(bias, dbias), name


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tf32_products_are_exact_in_every_configuration(size, monkeypatch):
    """TF32 holds these integers exactly."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    m, n, k = size
    x, weight, bias = grid(F32, m, k), grid(F32, n, k), grid(F32, n)
    expected = (x.double() @ weight.double().t() + bias.double()).float()
    for layouts in itertools.product(("rows", "transposed", "gaps"), repeat=2):
        a, b = laid_out(x, layouts[0]), laid_out(weight, layouts[1])
        for _ in each_configuration("linear", a, b, bias):
            assert_equal(ops.linear(a, b, bias), expected)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18])
@pytest.mark.parametrize("positive", [False, True], ids=["any sign", "positive"])
def test_float32_is_as_accurate_as_torch(positive, scale):
    """Sums of positive values would drift if a tensor core cut them off."""
    x, weight = torch.randn(512, 4096, device="cuda"), torch.randn(640, 4096, device="cuda")
    if positive:
        x, weight = x.abs(), weight.abs()
    weight *= scale
    exact = x.double() @ weight.double().t()
    allowed = 2 * (torch.nn.functional.linear(x, weight).double() - exact).abs().max()
    for name in each_configuration("linear", x, weight):
        assert (ops.linear(x, weight).double() - exact).abs().max() <= allowed, name


def test_float32_near_its_largest_value():
    """The largest float32 rounds to inf in bf16."""
    large = torch.finfo(F32).max
    x = torch.tensor([large, -large, 3.4e38, 1.0], device="cuda")[:, None] * torch.ones(
        1, 64, device="cuda"
    )
    weight = torch.eye(64, device="cuda")
    for _ in each_configuration("linear", x, weight):
        assert_equal(ops.linear(x, weight), x)


def test_tf32_rounds_as_torch_does(monkeypatch):
    """Cut off operands would make twice the error, and every product too small."""
    x, weight = torch.randn(512, 1024, device="cuda"), torch.randn(640, 1024, device="cuda") / 32
    exact = x.double() @ weight.double().t()
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    allowed = 2 * (torch.nn.functional.linear(x, weight).double() - exact).abs().max()
    for layout in ("rows", "transposed"):
        w = laid_out(weight, layout)
        for name in each_configuration("linear", x, w):
            assert (ops.linear(x, w).double() - exact).abs().max() <= allowed, name


def test_tf32_of_inf_and_nan(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    x = torch.randn(5, 64, device="cuda")
    x[:, 3] = torch.tensor([1.0, math.inf, -math.inf, math.nan, 1e38])
    weight = torch.ones(64, 64, device="cuda")
    expected = torch.nn.functional.linear(x, weight)
    for name in each_configuration("linear", x, weight):
        found = ops.linear(x, weight)
        assert torch.equal(found.isnan(), expected.isnan()), name
        assert torch.equal(found[1:3], expected[1:3]) and found[4].isfinite().all(), name


@pytest.mark.parametrize("k_major", [True, False])
def test_tf32_of_nan_stays_nan(k_major, monkeypatch):
    """As instructions make it: all of its bits set, only the first, or others that TF32 drops."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    x = torch.ones(8, 64, device="cuda")
    bits = [0x7FFFFFFF, 0x7FC00000, 0x7FC00001, 0x7FC01000, -1]
    x.view(torch.int32)[:5, 3] = torch.tensor(bits, dtype=torch.int32)
    x = x if k_major else x.t().contiguous().t()
    weight = torch.ones(64, 64, device="cuda")
    for name in each_configuration("linear", x, weight):
        found = ops.linear(x, weight).isnan()
        assert found[:5].all() and not found[5:].any(), name


@pytest.mark.parametrize("tf32", [False, True], ids=["float32", "tf32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_their_preact(activation, tf32, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    for dtype in [F32] if tf32 else [F16, BF16, F32]:
        for m, n, k in ((130, 264, 200), (257, 250, 136), (13, 250, 136)):
            x, weight, bias = (torch.randn(*s).to(dtype).cuda() for s in ((m, k), (n, k), (n,)))
            weight *= k**-0.5
            kwargs = {"activation": activation}
            for _ in each_configuration("linear", x, weight, bias, **kwargs):
                if not tf32:
                    check_op("linear", [x, weight, bias], kwargs, backward=False)
                y = ops.linear(x, weight, bias, **kwargs)
                out, preact = ops.linear_forward(x, weight, bias, **kwargs)
                assert_same_bits(out, y)
                if activation not in ("none", "relu"):
                    z = ops.linear(x, weight, bias)
                    torch.testing.assert_close(preact, z, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("gate", ["sigmoid_tanh", "geglu", "geglu_tanh", "swiglu", "reglu"])
def test_gates_and_their_preact(gate, interleaved):
    for dtype in (F16, BF16, F32):
        for m, n, k in (
            (130, 264, 200),
            (65, 33, 72),
            (257, 128, 64),
            (40, 500, 136),
            (11, 264, 200),
        ):
            shapes = ((m, k), (2 * n, k), (2 * n,))
            x, weight, bias = (torch.randn(*s).to(dtype).cuda() for s in shapes)
            weight *= k**-0.5
            kwargs = {"gate": gate, "interleaved": interleaved}
            for layout in ("rows", "transposed", "gaps"):
                w = laid_out(weight, layout)
                for _ in each_configuration("gated_linear", x, w, bias, **kwargs):
                    # Few rows leave eager's largest error to luck.
                    check_op("gated_linear", [x, w, bias], kwargs, backward=False, eager=m > 16)
                    y = ops.gated_linear(x, w, bias, **kwargs)
                    out, z = ops.gated_linear_forward(x, w, bias, **kwargs)
                    assert_same_bits(out, y)
                    expected = x.double() @ w.double().t() + bias.double()
                    torch.testing.assert_close(z.double(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("order", ["apart", "reversed", "one"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_pairs_of_weights_are_exact_in_every_configuration(dtype, order):
    """Branches and gradients; K of dx is in halves, of whole k-blocks and not."""
    for m, n, k in ((5, 128, 72), (130, 192, 200), (64, 520, 128), (300, 320, 264), (9, 64, 1032)):
        x, dy = grid(dtype, m, k), grid(dtype, m, n)
        both = grid(dtype, 2, n, k)
        first, second = {"apart": (0, 1), "reversed": (1, 0), "one": (0, 0)}[order]
        for layout in ("rows", "transposed", "gaps"):
            left, right = both[first], both[second]
            if order == "apart":
                left, right = laid_out(left, layout), laid_out(right, layout)
            elif layout == "transposed":
                left, right = (both.mT.contiguous().mT[i] for i in (first, second))
            z = torch.cat([x.double() @ w.double().t() for w in (left, right)], 1).to(dtype)
            for _ in each_configuration("gated_linear_pair_forward", x, left, right, gate="reglu"):
                out, got = ops.gated_linear_pair_forward(x, left, right, gate="reglu")
                assert_equal(got, z)
                assert_same_bits(ops.gated_linear_pair(x, left, right, gate="reglu"), out)
            # With z = (1, 1) and reglu both branches of the gradient are dy.
            args, kept = (dy, x, left, right, torch.ones_like(z)), {"output_mask": [True] * 5}
            dx = (dy.double() @ (left.double() + right.double())).to(dtype)
            dweight = (dy.double().t() @ x.double()).to(dtype)
            op = "gated_linear_pair_backward"
            for _ in each_configuration(op, *args, gate="reglu", **kept):
                grads = ops.gated_linear_pair_backward(*args, gate="reglu", **kept)
                for got, ref in zip(grads, (dx, dweight, dweight), strict=False):
                    assert_equal(got, ref)


@pytest.mark.parametrize("layout", ["rows", "transposed", "gaps"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_sums_of_products_are_exact_in_every_configuration(dtype, layout):
    """K of dx consists of several matrices, of whole k-blocks and not."""
    for m, sizes, k in (
        (130, (128, 64, 64), 200),
        (64, (64, 192), 128),
        (300, (256, 128, 320), 264),
        (9, (64, 64, 128), 1032),
        (257, (64, 64, 64, 64), 520),
        (1000, (72, 64, 40), 136),
    ):
        x, dys = grid(dtype, m, k), [laid_out(grid(dtype, m, n), layout) for n in sizes]
        weights = [laid_out(grid(dtype, n, k), layout) for n in sizes]
        # With mean(g * xhat) = 0 the norm's gradient is dy @ weight * rstd.
        x[:, k // 2 :], x[:, : k // 2] = 0, 1
        for weight in weights:
            weight[:, : k // 2] = 0
        rstd = torch.ones(m, device="cuda")
        rows = sum(dy.double() @ weight.double() for dy, weight in zip(dys, weights, strict=True))
        args = (dys, x, weights, None, rstd, [True, False, False, False])
        engines = set()
        for name in each_configuration("rms_norm_linears_backward", *args):
            (dx, *_) = ops.rms_norm_linears_backward(*args)
            assert_equal(dx, rows.to(dtype))
            engines.add(name.split()[0])
        if torch.cuda.get_device_capability() == (9, 0):
            assert {"sync", "sm90"} <= engines


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("op", ["layer_norm_linear", "rms_norm_linear", "folded_layer_norm_linear"])
def test_a_norm_in_front(op, dtype):
    """The norm runs in the matmul kernel and does not read beyond K."""
    for m, n, k in ((1, 40, 8), (16, 264, 768), (9, 72, 200), (4, 24, 1032), (5, 33, 1536)):
        x, weight = torch.randn(m, k).to(dtype).cuda() + 3, torch.randn(n, k).to(dtype).cuda()
        weight *= k**-0.5
        scale, shift = (torch.randn(k + 1).to(dtype).cuda()[1:] for _ in range(2))  # off 16 bytes
        if op == "folded_layer_norm_linear":
            args = [x, *ops.fold_layer_norm(weight, None, scale, shift)]
        else:
            args = [x, weight, None, scale] + ([shift] if op == "layer_norm_linear" else [])
        for layout in ("rows", "transposed"):
            args[1] = laid_out(args[1], layout)
            for name in each_configuration(op, *args, activation="gelu_tanh"):
                assert name.startswith("rows ")
                (record,) = dry_records(op, *args, device=0, activation="gelu_tanh")
                assert len(record["kernels"]) == 1
                check_op(op, args, {"activation": "gelu_tanh"}, backward=False)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("k", [72, 200, 768])
def test_a_norm_in_front_is_that_of_its_own_kernel(dtype, k):
    """Compares rows, which an identity weight exposes, and statistics, also those of a row without
    variance, for which zeros beyond K would give wrong values.
    """
    x = torch.randn(16, k).to(dtype).cuda() * 3 + 5
    x[3] = 1000
    rest, eye = torch.zeros_like(x[:1]), torch.eye(k, dtype=dtype, device="cuda")
    scale, shift = (torch.randn(k).to(dtype).cuda() for _ in range(2))
    for vectors in ((), (scale, shift)):
        args = (eye, None, *vectors)
        alone = ops.layer_norm_linear_forward(torch.cat([x, rest]), *args)  # 17 rows
        for name in each_configuration("layer_norm_linear_forward", x, *args):
            assert name.startswith("rows ")
            y, _, mean, rstd = ops.layer_norm_linear_forward(x, *args)
            torch.testing.assert_close(y, alone[0][:16], rtol=2**-7, atol=2**-7)
            torch.testing.assert_close(mean, alone[2][:16])
            torch.testing.assert_close(rstd, alone[3][:16], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("shared", ["none", "a", "b"])
def test_batches_are_exact_in_every_configuration(dtype, shared):
    for batch, m, n, k in ((3, 130, 72, 40), (5, 64, 64, 128), (2, 257, 129, 72)):
        a = grid(dtype, 1 if shared == "a" else batch, m, k)
        b = grid(dtype, 1 if shared == "b" else batch, k, n)
        expected = (a.double() @ b.double()).to(dtype)
        for flip_a, flip_b in itertools.product((False, True), repeat=2):
            left = a.mT.contiguous().mT if flip_a else a
            right = b.mT.contiguous().mT if flip_b else b
            for _ in each_configuration("bmm", left, right):
                assert_equal(ops.bmm(left, right), expected)


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_results_have_the_same_bits_in_every_run(dtype):
    weight, bias = (torch.randn(*s).to(dtype).cuda() for s in ((904, 1032), (904,)))
    for m in (16, 700):
        x = torch.randn(m, 1032).to(dtype).cuda()
        for _ in each_configuration("linear", x, weight, bias, activation="gelu_tanh"):
            first = ops.linear(x, weight, bias, activation="gelu_tanh")
            for _ in range(5):
                assert_same_bits(ops.linear(x, weight, bias, activation="gelu_tanh"), first)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_special_values_reach_their_row_alone(value, dtype):
    x, weight = (torch.randn(*s).to(dtype).cuda() for s in ((300, 1200), (264, 1200)))
    x[137, 1005] = value
    weight[5, 1005] = 0
    expected = (x.double() @ weight.double().t()).to(dtype)
    for _ in each_configuration("linear", x, weight):
        out = ops.linear(x, weight)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.isinf(), expected.isinf())


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_graph_of_every_configuration_replays(dtype):
    x, weight = (torch.randn(*s).to(dtype).cuda() for s in ((260, 512), (520, 512)))
    for _ in each_configuration("linear", x, weight):
        expected = ops.linear(x, weight)
        graph, out = cuda_graph(lambda: ops.linear(x, weight))
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_a_captured_stream_k_may_be_replayed():
    """The flags that announce partials are reset after a run."""
    x, weight = grid(BF16, 300, 4096), grid(BF16, 500, 4096)
    product = (x.double() @ weight.double().t()).to(BF16)
    streamed = 0
    for name in each_configuration("linear", x, weight):
        if not name.endswith("stream-K"):
            continue
        streamed += 1
        graph, y = cuda_graph(lambda: ops.linear(x, weight))
        for _ in range(3):
            y.zero_()
            graph.replay()
            assert_equal(y, product)
    if torch.cuda.get_device_capability() == (9, 0):
        assert streamed > 0


def test_the_first_call_of_a_thread():
    """The result's memory comes from torch's cache, so nothing has made a context current."""
    x, weight = torch.randn(2, 512, 512, device="cuda").to(BF16)
    expected = torch.ops.torchweld.linear(x, weight)
    freed = torch.empty_like(expected)
    torch.cuda.synchronize()
    del freed
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(torch.ops.torchweld.linear(x, weight)))
    thread.start()
    thread.join()
    assert_equal(results[0], expected, "linear in a new thread")
