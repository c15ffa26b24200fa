"""How Int4Linear chooses scales and zeros: the squared error of each method, and its limits."""

from __future__ import annotations

import pytest
import torch

from numerics import assert_equal
from torchweld.nn import Int4Linear
from torchweld.ops.int4_weight import METHODS, round_weight

SEARCHES = [name for name, search in METHODS.items() if search is not None]
WEIGHTS = {
    "normal": torch.distributions.Normal(0.0, 1.0),
    "laplace": torch.distributions.Laplace(0.0, 1.0),
    "heavy tails": torch.distributions.StudentT(3.0),
}


def squared_errors(weight, group, method):
    """The squared error of each group, from the codes."""
    rounded = round_weight(weight, group, method)
    levels = rounded.codes.double().unflatten(1, (-1, group)) - rounded.zero.double()[..., None]
    values = rounded.scale.double()[..., None] * levels
    return (values - weight.double().unflatten(1, (-1, group))).square().sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("method", SEARCHES)
def test_a_search_loses_less_than_the_extremes(method, kind, dtype):
    """In no group more. In groups of 128 the best 16 levels keep 0.89 of the error, or more."""
    torch.manual_seed(0)
    weight = WEIGHTS[kind].sample((32, 1024)).to(dtype)
    for group, limit in ((128, {"mse": 0.93, "hqq": 0.95}), (1024, {"mse": 0.75, "hqq": 0.84})):
        before, after = (squared_errors(weight, group, name) for name in ("rtn", method))
        assert (after <= before * (1 + 1e-5)).all()
        assert after.sum() <= limit[method] * before.sum()


def test_mse_comes_near_the_best_levels():
    """Against every zero and 200 scales of each."""
    torch.manual_seed(0)
    weight = torch.randn(8, 256)
    groups = weight.double().unflatten(1, (-1, 64))
    span = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    best = torch.full(groups.shape[:2], torch.inf, dtype=torch.float64)
    for zero in range(16):
        for ratio in torch.linspace(0.3, 1.2, 200).tolist():
            scale = span * (ratio / 15)
            levels = (groups / scale).round().clamp(-zero, 15 - zero)
            best = torch.minimum(best, (scale * levels - groups).square().sum(-1))
    assert (squared_errors(weight, 64, "mse").sum() / best.sum()).item() < 1.02


@pytest.mark.parametrize("method", SEARCHES)
def test_a_search_is_exact_where_levels_are(method):
    linear = torch.nn.Linear(64, 4, bias=False)
    with torch.no_grad():
        codes = torch.randint(0, 16, (4, 64))
        codes[:, :2] = torch.tensor([0, 15])
        linear.weight.copy_((codes - 7) * 0.5)
        linear.weight[3] = 0
    module = Int4Linear.from_linear(linear, 64, method)
    assert_equal(module.dequantise(), linear.weight.detach())
    assert module.quantisation_error == 0


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30, torch.finfo(torch.float32).max])
@pytest.mark.parametrize("method", SEARCHES)
def test_a_search_at_any_size(method, size):
    torch.manual_seed(0)
    weight = torch.randn(16, 128)
    weight /= weight.abs().max()
    plain = round_weight(weight, 32, method).quantisation_error
    found = round_weight(weight * size, 32, method)
    assert found.scale.isfinite().all()
    assert found.quantisation_error == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_blocks_of_rows_change_nothing(method, monkeypatch):
    """A weight of one block and of several; an empty one."""
    torch.manual_seed(0)
    weight = torch.randn(9, 64)
    whole = round_weight(weight, 32, method)
    monkeypatch.setattr("torchweld.ops.int4_weight._BLOCK", {"cpu": 128})
    parts = round_weight(weight, 32, method)
    assert_equal(parts[:3], whole[:3])
    assert parts.quantisation_error == pytest.approx(whole.quantisation_error)
    assert parts.largest_error == whole.largest_error
    assert round_weight(weight[:0], 32, method)[0].shape == (0, 64)


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="method must be one of .*\"hqq\", but got 'awq'"):
        Int4Linear.from_linear(torch.nn.Linear(64, 8), 64, "awq")


# Codes of other libraries


def test_from_codes_is_exact():
    codes = torch.randint(0, 16, (5, 48), dtype=torch.uint8)
    scale, zero = torch.rand(5, 2).half(), torch.randint(0, 16, (5, 2), dtype=torch.uint8)
    bias = torch.randn(5).half()
    module = Int4Linear.from_codes(codes, scale, zero, bias)
    levels = codes.float().unflatten(1, (2, 24)) - zero.float()[..., None]
    assert_equal(module.dequantise(), (scale.float()[..., None] * levels).half().flatten(1))
    assert_equal(module.dequantize(), module.dequantise())
    assert_equal(module.bias, bias)
    assert module.bias.data_ptr() != bias.data_ptr() and not module.training


U8 = torch.uint8
WRONG_CODES = {
    "dtype": ({"codes": torch.zeros(4, 16, dtype=torch.int32)}, "codes must be uint8 with 2 dims"),
    "a code": ({"codes": torch.full((4, 16), 16, dtype=U8)}, "codes must have values of 0 to 15"),
    "a zero": ({"zero": torch.full((4, 2), 17, dtype=U8)}, "zero must have values of 0 to 15"),
    "scale": ({"scale": torch.ones(4, 1)}, "codes, scale and zero must be"),
    "bias": ({"bias": torch.ones(3)}, r"bias must be \(4,\), but got \(3,\)"),
    "group": (
        {"codes": torch.zeros(4, 20, dtype=U8)},
        "group_size must be a multiple of 8 that divides in_features = 20, but got 10",
    ),
    "mixed": ({"bias": torch.ones(4).half()}, "bias must have the dtype of scale"),
}


@pytest.mark.parametrize("name", WRONG_CODES)
def test_from_codes_refuses(name):
    change, text = WRONG_CODES[name]
    given = {
        "codes": torch.zeros(4, 16, dtype=U8),
        "scale": torch.ones(4, 2),
        "zero": torch.zeros(4, 2, dtype=U8),
    }
    with pytest.raises(ValueError, match=text):
        Int4Linear.from_codes(**{**given, **change})
