"""Dropout of attention: which probabilities, exact cases, gradients, random numbers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import reference as R
import torchweld
from attention_engines import (
    attention_bounds,
    check,
    each_configuration,
    inputs,
    mask_data,
    on_hopper,
)
from choices_helpers import DEVICES, legal_engines
from numerics import assert_equal, assert_same_bits
from running import GRADIENTS
from samples import BF16, F16, F32, F64, call, dtypes
from tensors import randn
from test_attention_backward_sm90 import dout_of, each
from test_mask_numbers import best, compare, qkv

attention = torch.ops.torchweld.attention
attention_with_lse = torch.ops.torchweld.attention_with_lse
SEED = 7 << 40 | 5


def seeded(device: str, p: float, seed: int = SEED) -> dict:
    return {"dropout_p": p, "dropout_seed": torch.tensor([seed], device=device)}


def factors(device: str, shape: tuple[int, ...], given: dict, dtype=F32, **mask) -> Tensor:
    """The factors of all probabilities: with equal scores, and the identity as the values.

    Each call has 64 columns of the identity, a head dim that tiles have.
    """
    batch, nheads, seqlen_q, seqlen_k = shape
    query = torch.zeros(batch, nheads, seqlen_q, 8, dtype=dtype, device=device)
    key = torch.zeros(batch, nheads, seqlen_k, 8, dtype=dtype, device=device)
    values = torch.eye(seqlen_k, dtype=dtype, device=device).expand(batch, nheads, -1, -1)
    columns = [attention(query, key, v, **given, **mask) for v in values.split(64, -1)]
    return torch.cat(columns, -1).cpu().double() * seqlen_k


# Philox 4x32 with 7 and with 10 rounds: known answers of its authors' own code (Random123).
@pytest.mark.parametrize(
    ("word", "rounds", "expected"),
    [
        (0, 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (0, 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (2**32 - 1, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_the_reference_is_philox(word, rounds, expected):
    counter = [torch.tensor(word)] * 4
    words = R.philox(counter, (word, word), rounds)
    assert " ".join(f"{int(w):08x}" for w in words) == expected


@pytest.mark.parametrize("p", [2**-16, 0.1, 0.5, 1 - 2**-16])
@pytest.mark.parametrize("shape", [(2, 3, 1, 37), (1, 2, 9, 64), (2, 1, 70, 129)], ids=str)
@pytest.mark.parametrize("seed", [SEED, -3, 2**63 - 1])
def test_the_bits_of_a_place_are_philox(device, shape, p, seed):
    given = seeded(device, p, seed)
    expected = R.dropout_factors(shape, p, given["dropout_seed"])
    torch.testing.assert_close(factors(device, shape, given, best(device)), expected)


def test_a_place_has_its_factor_in_every_dtype_and_engine(device):
    """Few rows run other code than many, and hidden keys change no place."""
    given = seeded(device, 0.3)
    many = R.dropout_factors((2, 2, 80, 200), 0.3, given["dropout_seed"])
    for dtype in dtypes(device):
        kept = factors(device, (2, 2, 80, 200), given, dtype) > 0
        assert_equal(kept, many > 0)
        few = factors(device, (2, 2, 3, 200), given, dtype) > 0
        assert_equal(few, many[:, :, :3] > 0)
    start = torch.full((2, 80), 13, dtype=torch.int32, device=device)
    hidden = factors(device, (2, 2, 80, 200), given, key_start=start, causal=True)
    seen = R.visible(2, 80, 200, None, True, key_start=start)[:, None]
    assert_equal(hidden > 0, (many > 0) & seen)


def test_the_share_that_is_dropped_and_its_independence(device):
    """Chi-squared of the kept ones by row, key, head, and of pairs of neighbours in every dim."""
    p, shape = 0.25, (4, 8, 64, 256)
    kept = (factors(device, shape, seeded(device, p)) > 0).double()
    n = kept.numel()
    assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    for dims in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        counts, each = kept.sum(dims), n // kept.sum(dims).numel()
        chi2 = float((counts - each * (1 - p)).square().sum() / (each * p * (1 - p)))
        assert abs(chi2 - len(counts)) < 6 * math.sqrt(2 * len(counts)), dims
    for dim, size in enumerate(shape):
        for step in (1, 2, 8):
            if step < size:
                both = kept.narrow(dim, step, size - step) * kept.narrow(dim, 0, size - step)
                share, expected = both.mean(), (1 - p) ** 2
                assert abs(share - expected) < 5 * math.sqrt(3 * expected / both.numel()), (
                    dim,
                    step,
                )
    other = factors(device, shape, seeded(device, p, SEED + 1)) > 0
    same = float((other == (kept > 0)).double().mean())
    assert abs(same - (p**2 + (1 - p) ** 2)) < 5 / math.sqrt(n)


def test_zero_is_no_dropout(device):
    for dtype in dtypes(device):
        q, k, v = qkv(dtype, sq=20, sk=70, d=8, dv=8, device=device)
        plain = attention_with_lse(q, k, v, causal=True)
        for p in (0.0, 2**-18):
            assert_same_bits(attention_with_lse(q, k, v, causal=True, **seeded(device, p)), plain)


@pytest.mark.parametrize("sq", [3, 20])
def test_one_drops_everything(device, sq):
    q, k, v = (t.requires_grad_() for t in qkv(best(device), sq=sq, sk=30, device=device))
    out, lse = attention_with_lse(q, k, v, **seeded(device, 1.0))
    assert_equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, attention_with_lse(q, k, v)[1])
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert_equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("sq", [3, 40])
@pytest.mark.parametrize(
    "numbers",
    [{}, {"causal": True}, {"window": 9, "causal": True}, {"softcap": 2.0}, {"sink": 4}],
    ids=str,
)
def test_results_and_gradients(device, sq, numbers):
    for dtype in dtypes(device):
        q, k, v = qkv(dtype, b=2, h=4, hkv=2, sq=sq, sk=75, d=6, dv=9, device=device)
        given = dict(numbers)
        if "sink" in given:
            given["sink"] = randn(device, dtype, 4)
        compare("attention", [q, k, v], None, {**given, **seeded(device, 0.2)})


def test_gradcheck_with_lse():
    q, k, v = (t.requires_grad_() for t in qkv(F64, h=2, hkv=1, sq=3, sk=11))
    given = seeded("cpu", 0.4)
    torch.autograd.gradcheck(lambda *t: attention_with_lse(*t, causal=True, **given), (q, k, v))


def test_the_seed_comes_from_torchs_generator(device):
    q, k, v = qkv(F32, sq=20, sk=20, device=device)
    ends = torch.tensor([0, 20], device=device)
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    for run in (
        lambda: torchweld.attention(q, k, v, dropout_p=0.5),
        lambda: torchweld.attention_with_lse(q, k, v, dropout_p=0.5)[0],
        lambda: torchweld.varlen_attention(*packed, ends, ends, causal=True, dropout_p=0.5),
    ):
        torch.manual_seed(3)
        first, second = run(), run()
        torch.manual_seed(3)
        assert_same_bits(run(), first)
        assert not second.equal(first)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    torchweld.attention(q, k, v)
    after = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert_equal(after, state)  # no dropout draws nothing


def test_a_checkpoint_drops_the_same_again(device):
    q, k, v = (t.requires_grad_() for t in qkv(F32, sq=20, sk=20, device=device))

    def run(q, k, v):
        return torchweld.attention(q, k, v, causal=True, dropout_p=0.5).sin()

    grads = []
    for recomputes in (False, True):
        torch.manual_seed(3)
        out = checkpoint(run, q, k, v, use_reentrant=False) if recomputes else run(q, k, v)
        grads.append(torch.autograd.grad(out.sum(), (q, k, v)))
    assert_same_bits(*grads)


def test_compiled_exported_and_scripted(device):
    q, k, v = qkv(F32, sq=20, sk=20, device=device)
    given = seeded(device, 0.5)

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor) -> Tensor:
            return torch.ops.torchweld.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)

    layer, seed = Layer(), given["dropout_seed"]
    expected = attention(q, k, v, **given)
    exported = torch.export.export(layer, (q, k, v, seed)).module()
    for run in (torch.jit.script(layer), exported, torch.compile(layer, backend="aot_eager")):
        assert_same_bits(run(q, k, v, seed), expected)
    drawing = torch.compile(torchweld.attention, backend="aot_eager", fullgraph=True)
    torch.manual_seed(3)
    first = drawing(q, k, v, dropout_p=0.5)
    assert not drawing(q, k, v, dropout_p=0.5).equal(first)
    torch.library.opcheck(attention.default, (q, k, v), given)


@pytest.mark.parametrize("device_facts", DEVICES, ids=str)
@pytest.mark.parametrize("family", ["attention", "attention_backward"])
def test_which_kernels_drop(family, device_facts):
    """Hopper's in 16 bits for head dims up to 128 without a soft cap; else the general kernels."""
    hopper = device_facts["wgmma"] and device_facts["tma"]
    for head_dim, math_of, seqlen_q in itertools.product(
        (32, 64, 128, 192, 256), range(3), (1, 512)
    ):
        fields = dict(head_dim=head_dim, head_dim_v=head_dim, math=math_of, seqlen_q=seqlen_q)
        for bits in itertools.product((0, 1), repeat=3):
            fields.update(zip(("invariant", "causal", "softcap"), bits, strict=True))
            legal, chosen = legal_engines(family, device_facts, dropout=1, **fields)
            fast = hopper and math_of == 0 and head_dim <= 128 and not fields["softcap"]
            engine = "sm90" if fast else "general"
            assert legal <= {engine, "general"} and chosen == engine, fields


HOPPER_MASKS = [
    {}, {"causal": True}, {"window": 70, "causal": True}, {"key_end": True},
    {"key_start": True, "causal": True}, {"sink": True, "dlse": True}, {"leftpad": True},
]  # fmt: skip


@on_hopper
@pytest.mark.parametrize("numbers", HOPPER_MASKS, ids=str)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((3, 4, 2, 300, 300, 64, 64), F16),
        ((3, 2, 1, 130, 450, 128, 72), BF16),
        ((3, 2, 2, 65, 777, 40, 40), BF16),
        ((3, 8, 1, 200, 203, 128, 128), F16),
    ],
    ids=str,
)
def test_every_configuration_on_hopper(sizes, dtype, numbers):
    q, k, v = inputs(dtype, *sizes)
    batch, nheads, _, rows, keys = sizes[:5]
    data = mask_data(batch, nheads, rows, keys)
    given = {name: data.get(name, value) for name, value in numbers.items()}
    given.update(seeded("cuda", 0.2))
    pads, forward = given.pop("leftpad", None), {**given}
    forward.pop("dlse", None)
    bounds, names = attention_bounds(q, k, v, pads, **forward), []
    for name in each_configuration("", q, k, v, pads, **forward):
        check(name, torch.ops.torchweld.attention_forward(q, k, v, pads, **forward), bounds)
        names.append(name.split()[0])
    assert set(names) == {"sm90", "general"}
    dout = dout_of(q, v)
    bounds, names = GRADIENTS["attention"](dout, q, k, v, pads, **given), []
    for name, grads in each("", dout, q, k, v, pads, **given):
        check(name, grads, bounds)
        names.append(name.split()[0])
    assert set(names) == {"sm90", "general"}


def test_vmap_drops_the_same_in_every_entry():
    q = randn("cpu", F32, 3, 1, 2, 5, 4)
    given = seeded("cpu", 0.5)
    out = torch.func.vmap(lambda t: attention(t, t, t, **given))(q)
    assert_equal(out, torch.stack([attention(t, t, t, **given) for t in q]))


def test_the_batch_invariant_mode_drops_the_same(device):
    given = seeded(device, 0.3)
    with torchweld.batch_invariant():
        for sq in (1, 3, 20):
            kept = factors(device, (2, 2, sq, 70), given) > 0
            assert_equal(kept, R.dropout_factors((2, 2, sq, 70), 0.3, given["dropout_seed"]) > 0)


def test_the_mean_over_many_seeds_is_the_result_without_dropout(device):
    q, k, v = qkv(BF16, b=1, h=1, hkv=1, sq=4, sk=16, d=8, dv=8, device=device)
    runs = [attention(q, k, v, **seeded(device, 0.5, s)).double() for s in range(400)]
    mean, plain = torch.stack(runs).mean(0), attention(q, k, v).double()
    spread = torch.stack(runs).std(0) / math.sqrt(len(runs))
    assert ((mean - plain).abs() < 5 * spread + 0.01).all()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"dropout_p": -0.1}, "dropout_p must be between 0 and 1, but got -0.1"),
        ({"dropout_p": 1.5}, "dropout_p must be between 0 and 1, but got 1.5"),
        ({"dropout_p": math.nan}, "dropout_p must be between 0 and 1, but got nan"),
        (
            {"dropout_p": 0.5},
            "dropout_seed must be given with dropout_p, but got None; use "
            r"torch.randint\(2\*\*63 - 1, \(1,\), device=query.device\)",
        ),
        (
            {"dropout_p": 0.5, "dropout_seed": torch.zeros(1)},
            "dropout_seed must be int64, but got float32",
        ),
        (
            {"dropout_p": 0.5, "dropout_seed": torch.zeros(2, dtype=torch.int64)},
            r"dropout_seed must be \(1,\)",
        ),
        (
            {"dropout_p": 0.5, "dropout_seed": torch.zeros(1, dtype=torch.int64, device="meta")},
            "dropout_seed must be on cpu like query",
        ),
    ],
)
def test_refusals(given, sentence):
    q, k, v = qkv(F32)
    for op in ("attention", "attention_with_lse", "attention_forward"):
        with pytest.raises(RuntimeError, match=f"torchweld::{op}: {sentence}"):
            call(op)(q, k, v, **given)
