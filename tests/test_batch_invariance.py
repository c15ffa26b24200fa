"""The batch-invariant mode: a row has the same bits whatever rows stand beside it.

No reference is needed: an op is compared with itself, over other batches, chunks, paddings and
caches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweld
from choices_helpers import DEVICES, MATHS, chosen
from numerics import assert_same_bits
from samples import BF16, F16, F32, F64
from tensors import randn
from torchweld._library import introspection, ops
from torchweld.tuning.observe import observe

# The sizes of a row, and how many rows a batch has: the first choose small tiles, the last split K.
SIZES = {"cpu": ((96, 64, 300), (512, 256, 70)), "cuda": ((512, 384, 2100), (4096, 1024, 700))}
FEW = (1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 65)


class Rows(NamedTuple):
    """The rows of a call, and what all rows share."""

    x: Tensor  # (M, K)
    y: Tensor  # (M, K)
    target: Tensor  # (M,)
    weight: Tensor  # (N, K)
    square: Tensor  # (K, K)
    bias: Tensor  # (N,)
    scale: Tensor  # (K,)
    shift: Tensor  # (K,)

    def some(self, first: int, count: int) -> Rows:
        of = slice(first, first + count)
        return self._replace(x=self.x[of], y=self.y[of], target=self.target[of])


def made(device: str, dtype: torch.dtype, k: int, n: int, m: int) -> Rows:
    torch.manual_seed(0)

    def rand(*shape: int, scale: float = 1.0) -> Tensor:
        return randn(device, dtype, *shape, scale=scale)

    return Rows(
        rand(m, k),
        rand(m, k),
        torch.randint(n, (m,), device=device),
        rand(n, k, scale=k**-0.5),
        rand(k, k, scale=k**-0.5),
        rand(n),
        rand(k) + 1,
        rand(k),
    )


def experts_of(r: Rows) -> Tensor:
    count, (n, k) = 4, r.weight.shape
    inner = n // 2 // count
    up = r.weight[: 2 * inner * count].view(count, 2 * inner, k)
    down = r.square.view(-1)[: count * k * inner].view(count, k, inner)
    index = torch.stack([r.target % count, (r.target + 1 + r.target % 3) % count], 1)
    weight = torch.softmax(r.x[:, :2].float(), 1)
    return torchweld.experts(r.x, up, down, index, weight)


def int4_of(r: Rows) -> Tensor:
    n, k = r.weight.shape
    codes = (r.weight * 4 * k**0.5 + 8).clamp(0, 15).to(torch.uint8)
    scale = torch.full((n, k // 32), 0.25 * k**-0.5, dtype=r.x.dtype, device=r.x.device)
    zero = torchweld.int4_pack(torch.full_like(codes[:, : k // 32], 8))
    return torchweld.int4_linear(r.x, torchweld.int4_pack(codes), scale, zero, r.bias)


OPS: dict[str, Callable[[Rows], Tensor | tuple[Tensor, ...]]] = {
    "linear": lambda r: torchweld.linear(r.x, r.weight, r.bias, activation="gelu_tanh"),
    "layer_norm": lambda r: torchweld.layer_norm(r.x, r.scale, r.shift),
    "rms_norm": lambda r: torchweld.rms_norm(r.x, r.scale),
    "add_layer_norm": lambda r: torchweld.add_layer_norm(r.x, r.y, r.scale, r.shift),
    "add_rms_norm": lambda r: torchweld.add_rms_norm(r.x, r.y, r.scale),
    "rms_norm_gated": lambda r: torchweld.rms_norm_gated(r.x, r.y, r.scale),
    "layer_norm_linear": lambda r: torchweld.layer_norm_linear(
        r.x, r.weight, r.bias, r.scale, r.shift, activation="gelu_tanh"
    ),
    "rms_norm_linear": lambda r: torchweld.rms_norm_linear(r.x, r.weight, r.bias, r.scale),
    "layer_norm_linears": lambda r: torchweld.layer_norm_linears(
        r.x, [r.weight, r.weight[:8]], [r.bias, r.bias[:8]], r.scale, r.shift
    ),
    "rms_norm_linears": lambda r: torchweld.rms_norm_linears(
        r.x, [r.weight, r.weight[:8]], norm_weight=r.scale
    ),
    "folded_layer_norm_linear": lambda r: torchweld.folded_layer_norm_linear(
        r.x, *torchweld.fold_layer_norm(r.weight, r.bias, r.scale, r.shift)
    ),
    "gated_linear": lambda r: torchweld.gated_linear(r.x, r.weight, r.bias, gate="swiglu"),
    "gated_linear_pair": lambda r: torchweld.gated_linear_pair(
        r.x, r.weight, r.square[: len(r.weight)], gate="swiglu"
    ),
    "gated_mlp": lambda r: torchweld.gated_mlp(
        r.x, r.weight, r.square[: len(r.weight)], r.square[:, : len(r.weight)], gate="swiglu"
    ),
    "gated_activation": lambda r: torchweld.gated_activation(r.x, r.y, gate="swiglu"),
    "experts": experts_of,
    "int4_linear": int4_of,
    "bmm": lambda r: torchweld.bmm(r.x[None], r.square[None])[0],
    "softmax": lambda r: torchweld.softmax(r.x),
    "row_sum": lambda r: torchweld.row_sum(r.x),
    "cross_entropy": lambda r: torchweld.cross_entropy(
        F.pad(r.x, (0, 64)), r.target, reduction="none"
    ),
    "linear_cross_entropy": lambda r: torchweld.linear_cross_entropy(
        r.x, r.weight, r.target, reduction="none"
    ),
    "linear_token_logprobs": lambda r: torchweld.linear_token_logprobs(
        r.x, r.weight, r.target, entropy=True
    ),
    # torch's own, in the mode
    "F.linear": lambda r: F.linear(r.x, r.weight, r.bias),
    "mm": lambda r: r.x @ r.square,
    "addmm": lambda r: torch.addmm(r.bias, r.x, r.weight.t()),
    "addmm of rows": lambda r: torch.addmm(r.y, r.x, r.square, beta=0.5, alpha=2),
    "addmm_": lambda r: r.y.clone().addmm_(r.x, r.square),
    "baddbmm": lambda r: torch.baddbmm(r.y[None], r.x[None], r.square[None])[0],
    "mm out": lambda r: torch.mm(r.x, r.square, out=torch.empty_like(r.x)),
    "mv": lambda r: r.x @ r.scale,
    "mean": lambda r: r.x.float().pow(2).mean(-1, keepdim=True),
    "log_softmax": lambda r: r.x.log_softmax(-1),
}
NO_GRADIENT = ("int4_linear", "linear_token_logprobs", "mm out")


def results(op: str, rows: Rows, douts: list[Tensor] | None = None) -> list[Tensor]:
    """The results, and the gradient of x under the gradients of the first of them."""
    if op not in NO_GRADIENT:
        rows = rows._replace(x=rows.x.detach().requires_grad_())
    out = OPS[op](rows)
    outs = [out] if isinstance(out, Tensor) else list(out)
    if op in NO_GRADIENT or douts is None:
        return [t.detach() for t in outs]
    (dx,) = torch.autograd.grad(outs[0], rows.x, douts[0])
    return [*(t.detach() for t in outs), dx]


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_depend_on_the_others(op, dtype, size, device):
    k, n, m = SIZES[device][size]
    rows = made(device, dtype, k, n, m)
    with torchweld.batch_invariant():
        outs = OPS[op](rows)
        dout = torch.randn_like(outs if isinstance(outs, Tensor) else outs[0])
        whole = results(op, rows, [dout])
        for count in FEW:
            first = (m - count) * 2 // 3
            few = results(op, rows.some(first, count), [dout[first : first + count]])
            for mine, all_rows in zip(few, whole, strict=True):
                assert_same_bits(mine, all_rows[first : first + count], f"{count} rows of {op}")


@pytest.mark.parametrize("n", [7, 20, 37])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_the_last_elements_of_a_batch_are_as_the_others(dtype, n, device):
    """Vectors end within a row: torch computes the rest of a tensor by other code."""
    torch.manual_seed(0)
    x, weight = randn(device, dtype, 13, 24), randn(device, dtype, 2 * n, 24)
    down = randn(device, dtype, 24, n)
    offsets = torch.tensor([2**31 - 1], device=device)
    calls = {
        f"linear {name}": lambda x, name=name: ops.linear(x, weight[:n], None, activation=name)
        for name in ("relu", "gelu", "gelu_tanh", "silu", "relu_squared")
    }
    for gate in ("sigmoid_tanh", "geglu", "geglu_tanh", "swiglu", "reglu"):
        halves = weight[:n], weight[n:]
        calls |= {
            f"gated_linear {gate}": lambda x, g=gate: ops.gated_linear(x, weight, gate=g),
            f"gated_linear_pair {gate}": lambda x, g=gate, h=halves: ops.gated_linear_pair(
                x, *h, gate=g
            ),
            f"gated_mlp {gate}": lambda x, g=gate, h=halves: ops.gated_mlp(x, *h, down, gate=g),
            f"grouped {gate}": lambda x, g=gate: ops.grouped_gated_linear(
                x, weight[None], offsets, gate=g
            ),
        }
    for name, run in calls.items():
        with torchweld.batch_invariant():
            leaf = x.clone().requires_grad_()
            whole = run(leaf)
            dout = torch.randn_like(whole)
            (dx,) = torch.autograd.grad(whole, leaf, dout)
            for first, last in ((0, 1), (3, 8), (12, 13), (1, 13)):
                leaf = x[first:last].clone().requires_grad_()
                part = run(leaf)
                (dpart,) = torch.autograd.grad(part, leaf, dout[first:last])
                assert_same_bits((part, dpart), (whole[first:last], dx[first:last]), name)


class Heads(NamedTuple):
    q: Tensor  # (B, H, S, D)
    k: Tensor
    v: Tensor


def heads(device: str, dtype: torch.dtype, batch: int, s: int, d: int, kv: int = 2) -> Heads:
    torch.manual_seed(1)
    return Heads(*(randn(device, dtype, batch, n, s, d) for n in (4, kv, kv)))


MASKS = {"causal": {}, "window": {"window": 50}, "softcap": {"softcap": 5.0}}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_decoding_has_the_bits_of_the_prefill(dtype, d, mask, device):
    """Steps, chunks, another batch, left and right padding, and a cache that is longer."""
    s = 333
    t = heads(device, dtype, 3, s, d)
    options = {"causal": True, **MASKS[mask]}
    with torchweld.batch_invariant():
        whole = torchweld.attention(*t, **options)
        for first, last in ((0, 1), (40, 41), (200, 204), (300, 333), (100, 228), (332, 333)):
            part = torchweld.attention(
                t.q[:, :, first:last], t.k[:, :, :last], t.v[:, :, :last], **options
            )
            assert_same_bits(part, whole[:, :, first:last], f"rows {first} to {last}")
            cache = [F.pad(x[:, :, :last], (0, 0, 0, 40)) for x in t[1:]]
            end = torch.full((3,), last, dtype=torch.int32, device=device)
            part = torchweld.attention(t.q[:, :, first:last], *cache, key_end=end, **options)
            assert_same_bits(part, whole[:, :, first:last], f"rows {first} to {last} of a cache")
        one = torchweld.attention(*(x[1:2] for x in t), **options)
        assert_same_bits(one, whole[1:2], "another batch")
        for pad in (1, 17, 100):
            padded = [F.pad(x, (0, 0, pad, 0)) for x in t]
            left = torch.full((3,), pad, dtype=torch.int32, device=device)
            out = torchweld.attention(*padded, leftpad=left, **options)
            assert_same_bits(out[:, :, pad:], whole, f"padded by {pad}")
            cache = [F.pad(x, (0, 0, 0, 40)) for x in padded[1:]]
            end = left * 0 + pad + s
            for rows in (s + pad, 1):  # a prefill and a step over a static cache
                out = torchweld.attention(
                    padded[0][:, :, -rows:],
                    *cache,
                    key_start=left[:, None].expand(-1, rows),
                    key_end=end,
                    **options,
                )
                count = min(rows, s)
                assert_same_bits(out[:, :, -count:], whole[:, :, -count:], f"{rows} rows, {pad}")


LENGTHS = (5, 130, 1, 64, 207, 3)


@pytest.mark.parametrize("mask", [*MASKS, "not causal"])
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_document_has_the_same_bits_in_every_packing(dtype, d, mask, device):
    """Each document alone, and two packings of all, with padding between and behind them."""
    torch.manual_seed(2)
    options = {"causal": mask != "not causal", **MASKS.get(mask, {})}
    documents = [
        Heads(*(randn(device, dtype, 1, n, length, d) for n in (4, 2, 2))) for length in LENGTHS
    ]
    padding = Heads(*(torch.full_like(x[:, :, :1].expand(-1, -1, 9, -1), 7) for x in documents[0]))
    packings = ((0, 1, 2, None, 3, 4, 5), (5, 2, 4, 0, 3, 1, None))
    packed, starts, ends, places = [], [], [], []
    for order in packings:
        end = 0
        parts = [padding if i is None else documents[i] for i in order]
        for i, part in zip(order, parts, strict=True):
            length = part.q.shape[2]
            seen = (0, 0) if i is None else (end, end + length)
            starts += [seen[0] if i is not None else 10**6] * length
            ends += [seen[1]] * length
            places.append((i, slice(end, end + length)))
            end += length
        packed.append([torch.cat(some, 2) for some in zip(*parts, strict=True)])
    rows = {
        name: torch.tensor(x, dtype=torch.int32, device=device).view(2, -1)
        for name, x in (("key_start", starts), ("key_end", ends))
    }
    if options["causal"]:
        del rows["key_end"]
    with torchweld.batch_invariant():
        alone = [ops.attention_forward(*t, **options) for t in documents]
        together = ops.attention_forward(
            *(torch.cat(some) for some in zip(*packed, strict=True)), **rows, **options
        )
    for number, (i, place) in enumerate(places):
        if i is not None:
            sequence = number // len(packings[0])
            found = [x[sequence : sequence + 1, :, place] for x in together]
            assert_same_bits(found, list(alone[i]), f"document {i} in packing {sequence}")


@pytest.mark.parametrize("causal", [True, False])
def test_documents_of_padded_sequences_have_their_values(causal, device):
    """Padding in front of two sequences, in the mode and outside of it."""
    t = heads(device, F32, 2, 150, 64)
    pads = torch.tensor([0, 23], dtype=torch.int32, device=device)
    starts = (torch.arange(150, device=device) // 40 * 40 * causal).int().repeat(2, 1)
    options = {"leftpad": pads, "key_start": starts, "causal": causal}
    outside = ops.attention_forward(*t, **options)
    with torchweld.batch_invariant():
        inside = ops.attention_forward(*t, **options)
    for found, expected in zip(inside, outside, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_packed_sequences_of_any_length_have_their_bits(dtype, device):
    """varlen_attention, with fewer query rows than keys."""
    torch.manual_seed(3)
    lengths = ((3, 70), (128, 128), (1, 300), (40, 41))
    documents = [
        [randn(device, dtype, n, heads, 64) for n, heads in ((rows, 4), (keys, 2), (keys, 2))]
        for rows, keys in lengths
    ]
    ends = torch.tensor([(0, 0), *lengths], device=device).cumsum(0).int()
    packed = [torch.cat(some) for some in zip(*documents, strict=True)]
    with torchweld.batch_invariant():
        whole = torchweld.varlen_attention(*packed, ends[:, 0], ends[:, 1], causal=True)
        for document, first, last in zip(documents, ends[:-1, 0], ends[1:, 0], strict=True):
            t = [x.transpose(0, 1)[None] for x in document]
            alone = torchweld.attention(*t, causal=True)[0].transpose(0, 1)
            assert_same_bits(whole[first:last], alone, f"rows {first} to {last}")


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_sequence_s_gradients_do_not_depend_on_the_others(dtype, device):
    t = heads(device, dtype, 5, 200, 64)
    dout = torch.randn_like(t.q)

    def gradients(part: slice) -> tuple[Tensor, ...]:
        leaves = [x[part].detach().requires_grad_() for x in t]
        out = torchweld.attention(*leaves, causal=True)
        return torch.autograd.grad(out, leaves, dout[part])

    with torchweld.batch_invariant():
        whole = gradients(slice(None))
        for part in (slice(0, 1), slice(3, 5)):
            assert_same_bits(gradients(part), [g[part] for g in whole])


def test_every_thread_of_the_cpu_is_in_the_mode():
    """The backward of few rows computes the scores in the way of its forward, on each thread."""
    t = heads("cpu", F32, 4, 300, 64)
    q = t.q[:, :, -4:]
    dout, found, before = torch.randn(q.shape), [], torch.get_num_threads()
    try:
        for threads in (1, 8):
            torch.set_num_threads(threads)
            leaves = [x.detach().requires_grad_() for x in (q, t.k, t.v)]
            with torchweld.batch_invariant():
                out = torchweld.attention(*leaves, causal=True)
            found.append(torch.autograd.grad(out, leaves, dout))
    finally:
        torch.set_num_threads(before)
    assert_same_bits(found[1], found[0])


def test_keys_before_the_first_that_is_seen_are_not_read(device):
    """The tiles of the mode start before the window. NaN keys there must not reach a result."""
    t = heads(device, BF16, 1, 200, 64)
    for x in (t.k, t.v):
        x[:, :, :100] = torch.nan
    with torchweld.batch_invariant():
        out = torchweld.attention(t.q[:, :, 150:], t.k, t.v, causal=True, window=40)
    assert out.isfinite().all()


def test_out_is_refused_as_torch_refuses_it(device):
    x = randn(device, F32, 4, 4)
    calls = {
        "mm": lambda x, out: torch.mm(x, x, out=out),
        "addmm": lambda x, out: torch.addmm(x, x, x, out=out),
        "bmm": lambda x, out: torch.bmm(x[None], x[None], out=out[None]),
    }
    for name, call in calls.items():
        with torchweld.batch_invariant():
            with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
                call(x, torch.empty(4, 4, dtype=BF16, device=device))
            with pytest.raises(RuntimeError, match="automatic differentiation"):
                call(x.clone().requires_grad_(), torch.empty_like(x))
            with torch.no_grad():
                call(x.clone().requires_grad_(), out := torch.empty_like(x))
        assert not out.isnan().any(), name


def test_the_mode_is_a_thread_s_and_ends_with_its_context(device):
    x = randn(device, F32, 8, 64)

    @torchweld.batch_invariant()
    def inside() -> bool:
        return torchweld.is_batch_invariant()

    seen = []
    assert not torchweld.is_batch_invariant() and inside()
    with torchweld.batch_invariant():
        thread = threading.Thread(target=lambda: seen.append(torchweld.is_batch_invariant()))
        thread.start()
        thread.join()
        with torchweld.batch_invariant(False):
            assert not torchweld.is_batch_invariant()
        assert torchweld.is_batch_invariant()
    with pytest.raises(ZeroDivisionError), torchweld.batch_invariant():
        raise ZeroDivisionError
    assert seen == [False] and not torchweld.is_batch_invariant()
    assert not ops._set_batch_invariant(True) and ops._is_batch_invariant()
    assert ops._set_batch_invariant(False) and not ops._is_batch_invariant()
    assert_same_bits(torchweld.softmax(x), torchweld.softmax(x))


def test_the_backward_keeps_the_mode_of_its_forward(device):
    """Autograd's threads run it, after the context has ended."""
    k, n, m = SIZES[device][1]
    rows = made(device, F32, k, n, m)
    dout = randn(device, F32, m, n)

    def gradient(part: slice) -> Tensor:
        x = rows.x[part].detach().requires_grad_()
        with torchweld.batch_invariant():
            y = torchweld.linear(x, rows.weight)
        return torch.autograd.grad(y, x, dout[part])[0]

    assert_same_bits(gradient(slice(0, 3)), gradient(slice(None))[:3])
    assert not torchweld.is_batch_invariant()


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_values_stay_those_of_torch(dtype, device):
    """The mode changes the last bits alone, of torch's own functions too."""
    if dtype == F64 and device == "cuda":
        pytest.skip("float64 runs on the CPU alone")
    k, n, m = SIZES["cpu"][0]
    rows = made(device, dtype, k, n, m)
    of_torch = ("F.linear", "mm", "addmm", "addmm of rows", "addmm_", "baddbmm", "mm out", "mv")
    for op in (*of_torch, "mean", "linear", "bmm"):
        expected = OPS[op](rows)
        with torchweld.batch_invariant():
            got = OPS[op](rows)
        assert got.dtype == expected.dtype and got.shape == expected.shape
        rounding = torch.finfo(expected.dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=16 * rounding)
    with torchweld.batch_invariant():  # what the mode has no kernel for stays torch's
        whole = torch.ones(2, 3, dtype=torch.int32, device=device)
        if device == "cpu":
            assert (whole @ whole.t()).eq(3).all()
        assert rows.x.mean(0).shape == (k,) and rows.x.mean((0, 1)).dim() == 0
        assert torch.addmm(rows.bias[:1], rows.x, rows.weight.t(), beta=2).shape == (m, n)


def test_autocast_and_compile_see_the_mode(device):
    rows = made(device, F32, 64, 32, 40)
    layer = nn.Linear(64, 32, device=device)
    with torch.autocast(device, dtype=BF16), torchweld.batch_invariant():
        whole = layer(rows.x)
        assert whole.dtype == BF16
        assert_same_bits(layer(rows.x[:3]), whole[:3])
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torchweld.batch_invariant():
        assert_same_bits(compiled(rows.x), layer(rows.x))


def each_configuration(call: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The results of a call under every configuration of its first choice that the mode allows."""
    _, (record, *_) = observe(call)
    family, numbers = record["family"], list(record["problem"])
    results = {}
    for candidate in introspection().candidates(family, numbers):
        if candidate["refusal"]:
            continue
        ops._force_choice(family, numbers, candidate["choice"])
        try:
            results[candidate["choice"]] = call()
        finally:
            ops._force_choice(family, numbers, "")
    return results


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU has one configuration")
@pytest.mark.parametrize("m, n, k", [(8, 512, 4096), (64, 384, 520), (300, 520, 1032)])
@pytest.mark.parametrize("math", ["float16", "bfloat16", "float32", "tf32"])
def test_every_matmul_of_the_mode_has_the_same_bits(math, m, n, k, monkeypatch):
    """A new tile joins them, or is refused in the mode."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", math == "tf32")
    dtype = F32 if math == "tf32" else getattr(torch, math)
    torch.manual_seed(0)
    x, weight, bias = (randn("cuda", dtype, *size) for size in ((m, k), (n, k), (n,)))
    with torchweld.batch_invariant():
        found = each_configuration(
            lambda: torchweld.linear(x, weight, bias, activation="gelu_tanh")
        )
        transposed = each_configuration(lambda: torchweld.linear(x, weight.t().contiguous().t()))
        plain = torchweld.linear(x, weight)
    first = next(iter(found.values()))
    for name, result in found.items():
        assert_same_bits(result, first, name)
    for name, result in transposed.items():
        assert_same_bits(result, plain, f"transposed {name}")
    assert len(found) > 5 or dtype == F32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU has one configuration")
@pytest.mark.parametrize("m, n, k", [(1, 320, 1024), (16, 4096, 512), (70, 200, 4096)])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_every_int4_of_the_mode_has_the_same_bits(dtype, m, n, k):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.rand(n, k // 128, device="cuda").to(dtype)
    zeros = torch.randint(0, 16, (n, k // 128), dtype=torch.uint8, device="cuda")
    packed = (torchweld.int4_pack(codes), scales, torchweld.int4_pack(zeros))
    weight = torchweld.int4_repack(*packed)
    x, bias = randn("cuda", dtype, m, k), randn("cuda", dtype, n)
    with torchweld.batch_invariant():
        found = each_configuration(
            lambda: torchweld.int4_linear_repacked(x, *weight, bias, out_features=n)
        )
    assert len(found) >= 4  # dense, and three tiles of mma.sync
    for name, result in found.items():
        assert_same_bits(result, found["dense"], name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU has one configuration")
@pytest.mark.parametrize("d", [64, 96, 128, 256, 512])
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 4.0}], ids=str)
def test_every_attention_of_the_mode_has_the_same_bits(d, options):
    t = heads("cuda", BF16, 2, 333, d)
    with torchweld.batch_invariant():
        found = each_configuration(lambda: torchweld.attention(*t, causal=True, **options))
    first = next(iter(found.values()))
    for name, result in found.items():
        assert_same_bits(result, first, name)


DECODE_DIMS = [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (64, 128)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU has one configuration")
@pytest.mark.parametrize("dims", DECODE_DIMS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mask", ["causal", "window", "sink", "leftpad", "key_start", "key_end"])
def test_every_decode_of_the_mode_has_the_same_bits(mask, rows, dims):
    """The scores of some heads are large, so that the maxima of their rows rise in many steps."""
    torch.manual_seed(3)
    batch, nheads, heads_kv, keys = 3, 8, 2, 1111
    q = randn("cuda", BF16, batch, nheads, rows, dims[0])
    q[:, ::2] *= 12
    k, v = (randn("cuda", BF16, batch, heads_kv, keys, d) for d in dims)
    per_sequence = torch.tensor([0, 170, 700], dtype=torch.int32, device="cuda")
    options = {
        "causal": {},
        "window": {"window": 300},
        "sink": {"sink": torch.randn(nheads, device="cuda")},
        "leftpad": {"leftpad": per_sequence},
        "key_start": {"key_start": per_sequence[:, None].expand(-1, rows)},
        "key_end": {"key_end": keys - per_sequence, "window": 500},
    }[mask]
    for dtype in (BF16, F16):
        t = [x.to(dtype) for x in (q, k, v)]
        with torchweld.batch_invariant():
            found = each_configuration(
                lambda t=t: ops.attention_forward(*t, causal=True, **options)
            )
        chains = [name for name in found if name.startswith("chain")]
        wide = torch.cuda.get_device_capability() == (9, 0)
        assert len(chains) == (wide and (rows == 1 or mask != "key_start"))
        first = next(iter(found.values()))
        for name, result in found.items():
            assert_same_bits(list(result), list(first), name)


@pytest.mark.parametrize("device_facts", DEVICES, ids=range(len(DEVICES)))
def test_the_choice_adds_up_alike_for_every_number_of_rows(device_facts):
    """Host code alone, for invented GPUs."""
    for math in MATHS.values():
        for n, k in ((64, 96), (4096, 4096), (300, 1000)):
            engines = set()
            for m in (1, 7, 16, 17, 64, 200, 1000, 70000):
                fields = dict(m=m, n=n, k=k, math=math, invariant=1)
                choice = chosen("matmul", device_facts, **fields)["choice"]
                assert "/" not in choice and "stream-K" not in choice, choice
                engines.add(choice.split()[0])
            exact = math in (MATHS["tf32"], MATHS["float32"])
            assert len(engines) == 1 or not exact, engines
    keys = set()
    for rows in (1, 5, 64, 500, 8000):
        fields = dict(seqlen_q=rows, seqlen_k=8192, head_dim=128, head_dim_v=128, invariant=1)
        choice = chosen("attention", device_facts, **fields)["choice"]
        assert not choice.startswith("decode")
        keys.add(choice.split("x")[1])  # a chain has the steps of the tiles
    assert len(keys) == 1, keys
    for m in (1, 64, 300, 5000):
        choice = chosen("int4", device_facts, m=m, invariant=1)["choice"]
        one_chain = ("dense", "large_m 128x128", "large_m 128x256", "small_m 256x128")
        assert choice in one_chain, choice
