"""torchweld.nn: every module against the torch code that it replaces."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

import numerics
import torchweld
from numerics import assert_same_bits
from samples import need_kernel
from torchweld.nn import (
    CausalSelfAttention,
    FoldedLayerNormLinear,
    GatedLinear,
    LayerNormLinear,
    RMSNormLinear,
)
from torchweld.ops.linear import ReLUSquared

F32 = torch.float32


@dataclass(frozen=True)
class Case:
    """One configuration of a module, the torch module it is made from, and how to call it."""

    name: str
    op: str
    make_torch: Callable[[], nn.Module]
    convert: Callable[[nn.Module], nn.Module]
    shape: tuple[int, ...]
    # torch's parameter name -> ours, where they differ; None: nothing to train
    names: dict[str, str] | None = field(default_factory=dict)
    mentions: tuple[str, ...] = ()
    transposed: bool = False  # Conv1D weights are (in, out)

    def pair(self, device: str, dtype: torch.dtype = F32) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        plain = self.make_torch()
        for p in plain.parameters():  # torch's defaults of 0 and 1 hide swapped parameters
            nn.init.normal_(p, mean=0.3, std=0.4)
        plain = plain.to(device, dtype)
        return plain, self.convert(plain)

    def x(self, device: str, dtype: torch.dtype = F32) -> Tensor:
        torch.manual_seed(1)
        return torch.randn(self.shape).to(device, dtype)


@contextlib.contextmanager
def refuses(match: str):
    """Expects a ValueError of one sentence."""
    with pytest.raises(ValueError, match=match) as error:
        yield
    text = str(error.value)
    assert "\n" not in text and ", but got " in text and not text.endswith(".")


ACTIVATIONS: dict[str, Callable[[], nn.Module] | None] = {
    "none": None,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "relu_squared": ReLUSquared,
}


def sequential(norm: Callable[[], nn.Module], activation: str, bias: bool = True):
    def make() -> nn.Module:
        last = ACTIVATIONS[activation]
        return nn.Sequential(norm(), nn.Linear(6, 5, bias=bias), *([last()] if last else []))

    return make


class PlainGated(nn.Module):
    def __init__(self, gate: str, interleaved: bool, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8, bias=bias)
        self.gate, self.interleaved = gate, interleaved

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        left, right = (z[..., 0::2], z[..., 1::2]) if self.interleaved else z.chunk(2, -1)
        return {
            "sigmoid_tanh": lambda: left.sigmoid() * right.tanh(),
            "geglu": lambda: left * nn.functional.gelu(right),
            "geglu_tanh": lambda: left * nn.functional.gelu(right, approximate="tanh"),
            "swiglu": lambda: nn.functional.silu(left) * right,
            "reglu": lambda: left * right.relu(),
        }[self.gate]()


class PlainAttention(nn.Module):
    """GPT-2's attention block, in the words of its paper."""

    def __init__(self, heads: int, out_proj: bool = True) -> None:
        super().__init__()
        self.c_attn, self.heads = nn.Linear(12, 36), heads
        self.c_proj = nn.Linear(12, 12) if out_proj else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q, k, v = self.c_attn(x).split(e, -1)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.mT * (e // self.heads) ** -0.5
        future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.c_proj((p @ v).transpose(1, 2).reshape(b, s, e))


def attention_from(plain: PlainAttention, kernel: str) -> nn.Module:
    module = CausalSelfAttention(
        12,
        plain.heads,
        out_proj=not isinstance(plain.c_proj, nn.Identity),
        kernel=kernel,
        device=plain.c_attn.weight.device,
        dtype=plain.c_attn.weight.dtype,
    )
    module.load_state_dict(plain.state_dict())
    return module


LN_NAMES = {"0.weight": "ln_weight", "0.bias": "ln_bias", "1.weight": "weight", "1.bias": "bias"}
RMS_NAMES = {"0.weight": "norm_weight", "1.weight": "weight", "1.bias": "bias"}

CASES: list[Case] = [
    Case(
        "softmax", "softmax", lambda: nn.Softmax(-1), torchweld.nn.Softmax.from_torch, (3, 5), None
    ),
    *(
        Case(
            f"softmax dim {dim}",
            "softmax",
            lambda dim=dim: nn.Softmax(dim),
            torchweld.nn.Softmax.from_torch,
            (3, 4, 5),
            None,
            (f"dim={dim}",),
        )
        for dim in (0, 1, 2, -2, -3)
    ),
    *(
        Case(
            f"{op} alone {options}",
            op,
            lambda norm=norm, options=options: norm(6, **options),
            ours.from_torch,
            (2, 3, 6),
            {} if options.get("elementwise_affine", True) else None,
            ("6, eps=", f"elementwise_affine={options.get('elementwise_affine', True)}"),
        )
        for op, norm, ours, every in (
            (
                "layer_norm",
                nn.LayerNorm,
                torchweld.nn.LayerNorm,
                ({}, {"eps": 1e-3, "bias": False}, {"elementwise_affine": False}),
            ),
            (
                "rms_norm",
                nn.RMSNorm,
                torchweld.nn.RMSNorm,
                ({}, {"eps": 1e-3}, {"elementwise_affine": False}),
            ),
        )
        for options in every
    ),
    *(
        Case(
            f"{title} {activation}",
            op,
            sequential(lambda norm=norm: norm(6, eps=1e-3), activation),
            ours.from_torch,
            (2, 3, 6),
            names,
            ("in_features=6", "out_features=5", "eps=0.001", repr(activation)),
        )
        for title, op, norm, ours, names in (
            ("layer norm", "layer_norm_linear", nn.LayerNorm, LayerNormLinear, LN_NAMES),
            ("rms norm", "rms_norm_linear", nn.RMSNorm, RMSNormLinear, RMS_NAMES),
        )
        for activation in ACTIVATIONS
    ),
    *(
        Case(
            f"layer norm with {norm} and linear {'with' if bias else 'without'} bias",
            "layer_norm_linear",
            sequential(lambda options=options: nn.LayerNorm(6, **options), "silu", bias=bias),
            LayerNormLinear.from_torch,
            (4, 6),
            LN_NAMES,
            (f"bias={bias}", *mentions),
        )
        for norm, options, mentions in (
            ("all", {}, ("ln_affine=True", "ln_bias=True")),
            ("weight", {"bias": False}, ("ln_affine=True", "ln_bias=False")),
            ("nothing", {"elementwise_affine": False}, ("ln_affine=False",)),
        )
        for bias in (True, False)
    ),
    Case(
        "rms norm without parameters",
        "rms_norm_linear",
        sequential(lambda: nn.RMSNorm(6, eps=1e-3, elementwise_affine=False), "silu"),
        RMSNormLinear.from_torch,
        (4, 6),
        RMS_NAMES,
        ("norm_affine=False",),
    ),
    Case(
        "rms norm with torch's default eps",
        "rms_norm_linear",
        sequential(lambda: nn.RMSNorm(6), "none", bias=False),
        RMSNormLinear.from_torch,
        (4, 6),
        RMS_NAMES,
    ),
    *(
        Case(
            f"gated {gate} {'interleaved' if interleaved else 'halves'}",
            "gated_linear",
            lambda gate=gate, interleaved=interleaved: PlainGated(gate, interleaved),
            lambda plain: GatedLinear.from_torch(plain.linear, plain.gate, plain.interleaved),
            (2, 3, 6),
            {"linear.weight": "weight", "linear.bias": "bias"},
            ("in_features=6", "out_features=4", repr(gate), f"interleaved={interleaved}"),
        )
        for gate in ("sigmoid_tanh", "geglu", "geglu_tanh", "swiglu", "reglu")
        for interleaved in (False, True)
    ),
    Case(
        "gated without bias",
        "gated_linear",
        lambda: PlainGated("geglu", False, bias=False),
        lambda plain: GatedLinear.from_torch(plain.linear),
        (6,),
        {"linear.weight": "weight"},
        ("bias=False",),
    ),
    *(
        Case(
            f"attention {kernel} {heads} heads",
            kernel,
            lambda heads=heads: PlainAttention(heads),
            lambda plain, kernel=kernel: attention_from(plain, kernel),
            (2, 7, 12),
            {},
            ("embed_dim=12", f"num_heads={heads}", repr(kernel)),
        )
        for kernel in ("causal_softmax", "softmax_matmul", "attention")
        for heads in (1, 3)
    ),
    Case(
        "attention single head without output projection",
        "attention",
        lambda: PlainAttention(1, out_proj=False),
        lambda plain: attention_from(plain, "attention"),
        (2, 7, 12),
        {},
    ),
]
PARAMS = [pytest.param(c, id=c.name.replace(" ", "_")) for c in CASES]
TRAINED = [p for p in PARAMS if p.values[0].names is not None]


@pytest.mark.parametrize("case", PARAMS)
def test_equal_results(case, device):
    plain, ours = case.pair(device)
    x = case.x(device)
    torch.testing.assert_close(ours(x), plain(x), rtol=2e-6, atol=2e-6)
    assert ours(x).shape == plain(x).shape


@pytest.mark.parametrize("case", PARAMS)
def test_half_precision(case, device):
    """The error against float64 is within the numerics rule of that of the torch code."""
    for dtype in (torch.bfloat16, torch.float16):
        plain, ours = case.pair(device, dtype)
        x = case.x(device, dtype)
        wide = copy.deepcopy(plain).double()(x.double())
        worst = (ours(x).double() - wide).abs().max().item()
        eager = (plain(x).double() - wide).abs().max().item()
        assert worst <= 2 * eager + numerics.eager_floor(wide, dtype)


@pytest.mark.parametrize("case", TRAINED)
def test_training_step(case, device):
    """Gradients of every parameter and of x, then one optimizer step: equal to torch's.

    The test uses float64 if the device has it, so that a difference is not a rounding error.
    """
    dtype, close = (torch.float64, 1e-11) if device == "cpu" else (F32, 1e-5)
    plain, ours = case.pair(device, dtype)
    ours = copy.deepcopy(ours)  # from_torch may share the parameters
    renamed = {(case.names or {}).get(n, n): p for n, p in plain.named_parameters()}
    parameters = dict(ours.named_parameters())
    assert set(parameters) == set(renamed)
    xs = []
    for module in (plain, ours):
        x = case.x(device, dtype).requires_grad_()
        module(x).square().mean().backward()
        xs.append(x.grad)
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9).step()
    pairs = [(xs[1], xs[0])]
    for name, p in parameters.items():
        pairs += [(p.grad, renamed[name].grad), (p.detach(), renamed[name].detach())]
    for got, ref in pairs:
        torch.testing.assert_close(got, ref, rtol=0, atol=close * max(ref.abs().max().item(), 1.0))


@pytest.mark.parametrize("case", TRAINED)
def test_state_dict(case):
    """Torch's names with torch's layouts; loading it back changes nothing."""
    plain, ours = case.pair("cpu")
    theirs = {(case.names or {}).get(n, n): t for n, t in plain.state_dict().items()}
    state = ours.state_dict()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in theirs.items()}
    for name, t in state.items():
        assert_same_bits(t, theirs[name], name)
    x = case.x("cpu")
    expected = ours(x)
    fresh = copy.deepcopy(ours)
    for p in fresh.parameters():
        nn.init.zeros_(p)
    fresh.load_state_dict(state, strict=True)
    assert_same_bits(fresh(x), expected)
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    fresh.load_state_dict(torch.load(saved, weights_only=True))


# CausalSelfAttention has its torch form in transformers: test_attention_to_and_from_transformers.
BACK = [p for p in PARAMS if not p.values[0].name.startswith("attention")]


@pytest.mark.parametrize("case", BACK)
def test_to_torch_and_back(case):
    _, ours = case.pair("cpu")
    x = case.x("cpu")
    back = ours.to_torch()
    assert not any(type(m).__module__.startswith("torchweld.nn") for m in back.modules())
    torch.testing.assert_close(back(x), ours(x), rtol=2e-6, atol=2e-6)
    again = type(ours).from_torch(back)
    assert_same_bits(again(x), ours(x))
    assert set(again.state_dict()) == set(ours.state_dict())


@pytest.mark.parametrize("case", PARAMS)
def test_scripts_and_saves(case, device, tmp_path):
    _, ours = case.pair(device)
    x = case.x(device)
    scripted = torch.jit.script(ours)
    assert_same_bits(scripted(x), ours(x))
    torch.jit.save(scripted, str(tmp_path / "module.pt"))
    loaded = torch.jit.load(str(tmp_path / "module.pt"))
    assert_same_bits(loaded(x), ours(x))
    assert set(loaded.state_dict()) == set(ours.state_dict())
    leaves = []
    for module in (ours, loaded):
        leaf = x.clone().requires_grad_()
        module(leaf).sum().backward()
        leaves.append(leaf.grad)
    assert_same_bits(leaves[1], leaves[0])


@pytest.mark.parametrize("case", PARAMS)
def test_compiles_in_one_graph(case, device):
    _, ours = case.pair(device)
    x = case.x(device)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), ours(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", PARAMS)
def test_copies_and_repr(case):
    _, ours = case.pair("cpu")
    x = case.x("cpu")
    copied = copy.deepcopy(ours)
    assert_same_bits(copied(x), ours(x))
    places = {p.data_ptr() for p in ours.parameters()}
    assert not places & {p.data_ptr() for p in copied.parameters()}
    text = repr(ours)
    assert text.startswith(type(ours).__name__ + "(")
    for part in case.mentions:
        assert part in text, f"{part!r} is not in {text!r}"
    assert {p.dtype for p in copied.double().parameters()} <= {torch.float64}
    torch.testing.assert_close(copied(x.double()).float(), ours(x), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", BACK)
def test_repr_builds_the_module_again(case):
    _, ours = case.pair("cpu")
    again = eval(repr(ours), vars(torchweld.nn))
    again.load_state_dict(ours.state_dict(), strict=True)
    assert repr(again) == repr(ours)
    x = case.x("cpu")
    assert_same_bits(again(x), ours(x))


@pytest.mark.parametrize("case", [p for p in BACK if p.values[0].op.endswith("norm_linear")])
def test_to_torch_says_what_it_has(case):
    """elementwise_affine and bias of torch's modules follow the parameters."""
    plain, ours = case.pair("cpu")
    if plain[0].eps is None:
        plain[0].eps = ours.eps
    for back, first in zip(ours.to_torch(), plain, strict=False):
        assert repr(back) == repr(first)


@pytest.mark.parametrize("case", BACK)
def test_the_training_mode_is_kept(case):
    plain, _ = case.pair("cpu")
    for training in (True, False):
        ours = case.convert(plain.train(training))
        assert ours.training is training
        assert ours.to_torch().training is training


# Features of single modules


def test_attention_with_left_padding(device):
    """A padded sequence has the results of the sequence alone, in all three fusions."""
    for op in ("attention", "softmax_matmul", "linear"):
        need_kernel(op, device)
    results = []
    for kernel in ("causal_softmax", "softmax_matmul", "attention"):
        torch.manual_seed(0)
        module = CausalSelfAttention(12, 3, kernel=kernel).to(device)
        tokens = torch.randn(1, 4, 12, device=device)
        padded = torch.cat([torch.full((1, 3, 12), 1e4, device=device), tokens], 1)
        batch = torch.cat([padded, torch.randn(1, 7, 12, device=device)])
        leftpad = torch.tensor([3, 0], dtype=torch.int32, device=device)
        out = module(batch, leftpad)
        torch.testing.assert_close(out[:1, 3:], module(tokens), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[1:], module(batch[1:]), rtol=1e-5, atol=1e-5)
        bias = module.c_proj.bias.expand(3, -1)
        torch.testing.assert_close(out[0, :3], bias, rtol=0, atol=0)  # padding attends to nothing
        results.append(out)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)


def test_attention_to_and_from_transformers():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = CausalSelfAttention(12, 3)
    x = torch.randn(2, 7, 12)
    theirs = ours.to_torch().eval()
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, 7, 7).masked_fill(future, torch.finfo(F32).min)
    torch.testing.assert_close(theirs(x, attention_mask=mask)[0], ours(x), rtol=1e-5, atol=1e-6)
    assert {n.split(".")[0] for n in theirs.state_dict()} >= {"c_attn", "c_proj"}
    for kernel in ("causal_softmax", "softmax_matmul", "attention"):
        back = CausalSelfAttention.from_torch(theirs, kernel=kernel)
        torch.testing.assert_close(back(x), ours(x), rtol=1e-5, atol=1e-6)


# (module of transformers.models, class) of RMSNorms that torch's own is not
RMS_NORMS = [
    ("llama.modeling_llama", "LlamaRMSNorm"),
    ("mistral.modeling_mistral", "MistralRMSNorm"),
    ("qwen3.modeling_qwen3", "Qwen3RMSNorm"),
    ("olmo2.modeling_olmo2", "Olmo2RMSNorm"),
    ("gpt_oss.modeling_gpt_oss", "GptOssRMSNorm"),
    ("t5.modeling_t5", "T5LayerNorm"),
]


def hugging_face(home: str, name: str) -> type[nn.Module]:
    pytest.importorskip("transformers")
    return getattr(importlib.import_module(f"transformers.models.{home}"), name)


@pytest.mark.parametrize(("home", "name"), RMS_NORMS)
def test_rms_norm_of_hugging_face(home, name, device):
    need_kernel("rms_norm_linear", device)
    norm = hugging_face(home, name)(6, eps=1e-3)
    plain = nn.Sequential(norm, nn.Linear(6, 5, bias=False), nn.SiLU()).to(device)
    nn.init.normal_(norm.weight, mean=0.3, std=0.4)
    ours = RMSNormLinear.from_torch(plain)
    assert ours.norm_weight is norm.weight and ours.eps == 1e-3
    x = torch.randn(2, 3, 6, device=device) * 0.03  # eps counts
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.to_torch()(x), plain(x), rtol=1e-5, atol=1e-5)


def test_rms_norm_of_hugging_face_on_meta():
    """The probe runs a copy of the norm, whose own parameters may be on any device, or on meta."""
    with torch.device("meta"):
        norm = hugging_face(*RMS_NORMS[0])(6)
        ours = RMSNormLinear.from_torch(nn.Sequential(norm, nn.Linear(6, 5)))
    assert ours.norm_weight is norm.weight and ours.norm_weight.device.type == "meta"


@pytest.mark.parametrize(
    ("home", "name", "why"),
    [
        ("gemma.modeling_gemma", "GemmaRMSNorm", "scale by weight, but got GemmaRMSNorm, which"),
        ("gemma3.modeling_gemma3", "Gemma3RMSNorm", "1 \\+ weight"),
        ("qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNormGated", "module must be"),
    ],
)
def test_an_rms_norm_of_another_formula_is_refused(home, name, why):
    norm = hugging_face(home, name)(6)
    with refuses(why):
        RMSNormLinear.from_torch(nn.Sequential(norm, nn.Linear(6, 5)))


def test_gated_from_two_linears():
    torch.manual_seed(0)
    gate_proj, up_proj = nn.Linear(6, 4), nn.Linear(6, 4)
    x = torch.randn(3, 6)
    module = GatedLinear.from_linears(gate_proj, up_proj, gate="swiglu")
    expected = nn.functional.silu(gate_proj(x)) * up_proj(x)
    torch.testing.assert_close(module(x), expected, rtol=2e-6, atol=2e-6)
    with refuses("right must"):
        GatedLinear.from_linears(gate_proj, nn.Linear(6, 5))
    with refuses("right must"):
        GatedLinear.from_linears(gate_proj, nn.Linear(6, 4, bias=False))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fold_is_frozen_and_equal(activation):
    torch.manual_seed(0)
    module = LayerNormLinear(6, 5, activation=activation)
    for p in module.parameters():
        nn.init.normal_(p, mean=0.3, std=0.4)
    folded = module.fold()
    assert isinstance(folded, FoldedLayerNormLinear)
    assert not list(folded.parameters()) and not folded.training
    x = torch.randn(3, 6)
    torch.testing.assert_close(folded(x), module(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(folded.to_torch()(x), folded(x), rtol=1e-5, atol=1e-5)
    # A gradient flows to x, and a later change of the module does not reach the fold.
    leaf = x.clone().requires_grad_()
    folded(leaf).sum().backward()
    copied = x.clone().requires_grad_()
    module(copied).sum().backward()
    torch.testing.assert_close(leaf.grad, copied.grad, rtol=1e-4, atol=1e-5)
    before = folded(x)
    with torch.no_grad():
        module.weight.zero_()
    assert_same_bits(folded(x), before)
    scripted = torch.jit.script(folded)
    saved = io.BytesIO()
    torch.jit.save(scripted, saved)
    saved.seek(0)
    assert_same_bits(torch.jit.load(saved)(x), before)
    assert_same_bits(copy.deepcopy(folded)(x), before)
    assert repr(activation) in repr(folded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fold_survives_a_cast(dtype):
    """The sums stay float32 and belong to the cast weight, not to the old one."""
    torch.manual_seed(0)
    folded = LayerNormLinear(64, 5).fold().to(dtype)
    wide = torch.float64 if dtype == torch.float64 else F32
    assert folded.folded_weight.dtype == dtype
    assert folded.weight_sum.dtype == folded.folded_bias.dtype == wide
    exact = folded.folded_weight.double().sum(1)
    torch.testing.assert_close(folded.weight_sum.double(), exact, rtol=1e-6, atol=1e-6)
    assert folded((torch.randn(3, 64) + 100).to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("assign", [True, False])
def test_fold_sums_the_weight_that_it_loads(dtype, assign):
    """Loading rounds the weight, as a cast does; assignment does not."""
    torch.manual_seed(0)
    state = LayerNormLinear(64, 5).fold().state_dict()
    folded = LayerNormLinear(64, 5).fold().to(dtype)
    folded.load_state_dict(state, assign=assign)
    assert folded.folded_weight.dtype == (F32 if assign else dtype)
    exact = folded.folded_weight.double().sum(1)
    torch.testing.assert_close(folded.weight_sum.double(), exact, rtol=1e-6, atol=1e-6)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "heads": (lambda: CausalSelfAttention(12, 5), "num_heads must"),
    "no heads": (lambda: CausalSelfAttention(12, 0), "num_heads must"),
    "kernel": (lambda: CausalSelfAttention(12, 3, kernel="flash"), "kernel must"),
    "one sequence": (
        lambda: CausalSelfAttention(12, 3)(torch.randn(4, 12)),
        r"x must be .* but got 2 dims; use x.unsqueeze\(0\)",
    ),
    "multi-head attention": (
        lambda: CausalSelfAttention.from_torch(nn.MultiheadAttention(12, 3)),
        "module must be .*; copy in_proj_weight to c_attn.weight",
    ),
    "module as activation": (
        lambda: LayerNormLinear(6, 5, activation=nn.GELU()),
        "activation must be .*; use its name",
    ),
    "gated from two": (
        lambda: GatedLinear.from_torch(nn.Linear(6, 8), nn.Linear(6, 8)),
        "gate must be .*; use GatedLinear.from_linears",
    ),
    "ln activation": (lambda: LayerNormLinear(6, 5, activation="tanh"), "activation must"),
    "rms activation": (lambda: RMSNormLinear(6, 5, activation="GELU"), "activation must"),
    "gate": (lambda: GatedLinear(6, 5, gate="glu"), "gate must"),
    "softmax of no dim": (lambda: torchweld.nn.Softmax(None), "dim must"),
    "softmax from no dim": (lambda: torchweld.nn.Softmax.from_torch(nn.Softmax(None)), "dim must"),
    "ln from linear": (
        lambda: LayerNormLinear.from_torch(nn.Sequential(nn.Linear(6, 5))),
        "module must",
    ),
    "ln of two dims": (
        lambda: LayerNormLinear.from_torch(nn.Sequential(nn.LayerNorm((3, 6)), nn.Linear(6, 5))),
        "module must",
    ),
    "ln from an unknown activation": (
        lambda: LayerNormLinear.from_torch(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.Tanh())
        ),
        "must",
    ),
    "rms of another width": (
        lambda: RMSNormLinear.from_torch(nn.Sequential(nn.RMSNorm(5), nn.Linear(6, 5))),
        "module must",
    ),
    "rms from layer norm": (
        lambda: RMSNormLinear.from_torch(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5))),
        "module must",
    ),
    "gated from odd": (lambda: GatedLinear.from_torch(nn.Linear(6, 5)), "module must"),
    "gated from a norm": (lambda: GatedLinear.from_torch(nn.LayerNorm(6)), "module must"),
}


class LoRALinear(nn.Linear):
    """A subclass of nn.Linear with two small matrices beside the large one, as in loralib."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__(k, n)
        self.a, self.b = nn.Parameter(torch.randn(2, k)), nn.Parameter(torch.randn(n, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.t() @ self.b.t()


class QuickGELU(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return x * (1.702 * x).sigmoid()


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LayerNorm1P(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (6,), self.weight + 1, self.bias)


class RMSNorm1P(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (6,), self.weight + 1, self.eps)


class ClippedRMSNorm(nn.Module):
    """Like LlamaRMSNorm for small values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(6)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.clamp(-9, 9), (6,), self.weight, 1e-6)


class ShiftedRMSNorm(ClippedRMSNorm):
    """Computes the same as LlamaRMSNorm until its second parameter is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (6,), self.weight, 1e-6) + self.bias


class NoisyRMSNorm(ClippedRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x, (6,), self.weight, 1e-6)
        return y + torch.randn_like(y) if self.training else y


class ScaledSoftmax(nn.Softmax):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / 2)


def with_forward(module: nn.Module) -> nn.Module:
    """As accelerate does it."""
    module.forward = lambda x, forward=module.forward: 2 * forward(x)
    return module


def pruned(module: nn.Module, name: str = "weight") -> nn.Module:
    return nn.utils.prune.l1_unstructured(module, name, 0.5)


def hooked(module: nn.Module, kind: str) -> nn.Module:
    hook = {
        "forward_pre": lambda module, args: (2 * args[0],),
        "forward": lambda module, args, out: 2 * out,
        "full_backward_pre": lambda module, grads: (2 * grads[0],),
        "full_backward": lambda module, grads, _: (2 * grads[0],),
    }[kind]
    getattr(module, f"register_{kind}_hook")(hook)
    return module


parametrizations = nn.utils.parametrizations
HOOKED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "forward pre-hook": (lambda m: hooked(m, "forward_pre"), "forward pre-hook"),
    "forward hook": (lambda m: hooked(m, "forward"), "forward hook"),
    "backward pre-hook": (lambda m: hooked(m, "full_backward_pre"), "backward pre-hook"),
    "backward hook": (lambda m: hooked(m, "full_backward"), "backward hook"),
    "forward on the instance": (with_forward, "a forward of its own on the instance"),
}
PARAMETRISED: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "weight_norm": (parametrizations.weight_norm, "parametrisation of weight (_WeightNorm)"),
    "spectral_norm": (parametrizations.spectral_norm, "parametrisation of weight (_SpectralNorm)"),
    "orthogonal": (parametrizations.orthogonal, "parametrisation of weight (_Orthogonal)"),
    "old weight_norm": (nn.utils.weight_norm, "a forward pre-hook (WeightNorm)"),
    "old spectral_norm": (nn.utils.spectral_norm, "a forward pre-hook (SpectralNorm)"),
    "prune": (pruned, "a forward pre-hook (L1Unstructured)"),
}
OTHER_LINEARS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: LoRALinear(6, 8), "LoRALinear, a subclass of nn.Linear;"),
    **{
        name: (lambda change=change: change(nn.Linear(6, 8)), text)
        for name, (change, text) in (HOOKED | PARAMETRISED).items()
    },
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", OTHER_LINEARS)
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: LayerNormLinear.from_torch(nn.Sequential(nn.LayerNorm(6), m)),
        lambda m: RMSNormLinear.from_torch(nn.Sequential(nn.RMSNorm(6), m)),
        lambda m: FoldedLayerNormLinear.from_torch(nn.Sequential(nn.LayerNorm(6), m)),
        GatedLinear.from_torch,
        lambda m: GatedLinear.from_torch(gated_reference(m)),
        lambda m: GatedLinear.from_linears(m, nn.Linear(6, 8)),
        lambda m: GatedLinear.from_linears(nn.Linear(6, 8), m),
    ],
    ids=["layer_norm", "rms_norm", "folded", "gated", "gated_reference", "left", "right"],
)
def test_another_linear_layer_is_refused(convert, name):
    """A conversion would lose its forward, its hooks or its parametrisation."""
    make, text = OTHER_LINEARS[name]
    with refuses(re.escape(text)):
        convert(make())


def gated_reference(linear: nn.Module) -> nn.Module:
    stock = GatedLinear(6, 4).to_torch()
    stock.linear = linear
    return stock


def parts(
    norm: nn.Module, last: nn.Module | None = None, kind: type[nn.Sequential] = nn.Sequential
) -> nn.Sequential:
    return kind(norm, nn.Linear(6, 8), last or nn.GELU())


OTHER_PARTS: dict[str, tuple[str, Callable[[], nn.Module], str]] = {
    "layer norm": ("LayerNormLinear", lambda: parts(LayerNorm1P(6)), "LayerNorm1P, a subclass"),
    "hooked layer norm": (
        "LayerNormLinear",
        lambda: parts(hooked(nn.LayerNorm(6), "forward")),
        "module[0] must be nn.LayerNorm, but got nn.LayerNorm with a forward hook",
    ),
    "rms norm": ("RMSNormLinear", lambda: parts(RMSNorm1P(6, 1e-6)), "RMSNorm1P, a subclass"),
    "hooked rms norm": (
        "RMSNormLinear",
        lambda: parts(hooked(nn.RMSNorm(6), "forward_pre")),
        "nn.RMSNorm with a forward pre-hook",
    ),
    "clipped rms norm": ("RMSNormLinear", lambda: parts(ClippedRMSNorm()), "module must be"),
    "rms norm with a bias": ("RMSNormLinear", lambda: parts(ShiftedRMSNorm()), "module must be"),
    "rms norm with noise": ("RMSNormLinear", lambda: parts(NoisyRMSNorm()), "module must be"),
    "activation": (
        "LayerNormLinear",
        lambda: parts(nn.LayerNorm(6), QuickGELU()),
        "the activation must be nn.ReLU, nn.GELU, nn.SiLU or nn.Identity, but got "
        f"{__name__}.QuickGELU, a subclass of nn.GELU",
    ),
    "hooked activation": (
        "RMSNormLinear",
        lambda: parts(nn.RMSNorm(6), hooked(nn.ReLU(), "forward")),
        "nn.ReLU with a forward hook",
    ),
    **{
        f"{what} of {kind}": (kind, lambda norm=norm, change=change: change(norm), text)
        for kind, norm in (("LayerNormLinear", nn.LayerNorm), ("RMSNormLinear", nn.RMSNorm))
        for what, change, text in (
            ("sequential", lambda norm: parts(norm(6), kind=Doubled), "Doubled, a subclass of nn."),
            (
                "hooked sequential",
                lambda norm: hooked(parts(norm(6)), "forward"),
                "nn.Sequential with a forward hook",
            ),
        )
    },
    "softmax": ("Softmax", lambda: ScaledSoftmax(-1), "ScaledSoftmax, a subclass of nn.Softmax"),
    "hooked softmax": (
        "Softmax",
        lambda: hooked(nn.Softmax(-1), "forward"),
        "nn.Softmax with a forward hook",
    ),
    "hooked gated": (
        "GatedLinear",
        lambda: hooked(gated_reference(nn.Linear(6, 8)), "forward"),
        "GatedLinearReference with a forward hook",
    ),
}


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_another_part_is_refused(name):
    kind, make, text = OTHER_PARTS[name]
    with refuses(re.escape(text)):
        getattr(torchweld.nn, kind).from_torch(make())


def test_a_layer_norm_of_hugging_face_that_adds_1_is_refused():
    norm = hugging_face("nemotron.modeling_nemotron", "NemotronLayerNorm1P")(6)
    text = (
        r"module\[0\] must be nn.LayerNorm, but got transformers.*NemotronLayerNorm1P, a subclass"
    )
    with refuses(text):
        LayerNormLinear.from_torch(nn.Sequential(norm, nn.Linear(6, 5)))


@pytest.mark.parametrize("what", ["hook", "weight_norm"])
def test_a_changed_rms_norm_of_hugging_face_is_refused(what):
    norm = hugging_face(*RMS_NORMS[0])(6)
    if what == "hook":
        hooked(norm, "forward")
    else:
        nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    with pytest.raises(
        ValueError, match="module.0. must be an RMSNorm, but got .*LlamaRMSNorm wit"
    ):
        RMSNormLinear.from_torch(nn.Sequential(norm, nn.Linear(6, 5)))


WITH_WEIGHT = ("LayerNormLinear", "RMSNormLinear", "GatedLinear")


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("change", PARAMETRISED)
@pytest.mark.parametrize("name", WITH_WEIGHT)
def test_a_parametrised_module_says_what_it_cannot(name, change):
    """forward reads the weight in force; functions that need the parameter itself are refused."""
    module = getattr(torchweld.nn, name)(6, 5)
    stock = module.to_torch()
    module = PARAMETRISED[change][0](module)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    with refuses(f"{name}.to_torch: module must be .*{re.escape(PARAMETRISED[change][1])}"):
        module.to_torch()
    with refuses(f"^{name}.reset_parameters: weight must be a pa"):
        module.reset_parameters()
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    x = torch.randn(3, 6)
    y = module.eval()(x)
    with torch.no_grad():
        linear = stock.linear if name == "GatedLinear" else stock[1]
        linear.weight.copy_(module.weight)
    torch.testing.assert_close(y, stock(x), rtol=2e-6, atol=2e-6)


def test_fold_takes_the_weight_that_a_parametrisation_makes():
    torch.manual_seed(0)
    module = parametrizations.weight_norm(LayerNormLinear(6, 5))
    with torch.no_grad():
        module.parametrizations.weight.original0.mul_(3)
    x = torch.randn(3, 6)
    torch.testing.assert_close(module.fold()(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_fold_refuses_a_weight_that_is_made_in_the_next_call():
    """The old weight_norm computes the weight in a pre-hook, so it belongs to the last call."""
    module = nn.utils.weight_norm(LayerNormLinear(6, 5))
    with refuses("a forward pre-hook .WeightNorm."):
        module.fold()


class DoubledOurs:
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("how", ["subclass", "hook"])
@pytest.mark.parametrize("case", BACK)
def test_to_torch_of_a_changed_module_is_refused(case, how):
    _, ours = case.pair("cpu")
    name = type(ours).__name__
    if how == "hook":
        hooked(ours, "forward")
    else:
        ours.__class__ = type("Doubled", (DoubledOurs, type(ours)), {})
    with refuses(f"{name}.to_torch: module must be {name}, but"):
        ours.to_torch()
    if name in WITH_WEIGHT:
        ours.reset_parameters()  # which a subclass has as well


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("std", [1.0, 0.02])
def test_rms_norm_with_torchs_default_eps(dtype, affine, std):
    """torch takes the epsilon of the dtype that it computes in: float32's in 16 bits."""
    torch.manual_seed(0)
    stock = nn.Sequential(nn.RMSNorm(16, elementwise_affine=affine), nn.Linear(16, 8)).to(dtype)
    ours = RMSNormLinear.from_torch(stock)
    assert ours.eps == torch.finfo(F32 if dtype.itemsize == 2 else dtype).eps
    assert ours.to_torch()[0].eps == ours.eps
    x = (torch.randn(64, 16, dtype=torch.float64) * std).to(dtype)
    close = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours(x), stock(x), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_from_torch_under_another_default_dtype(dtype, where):
    """Scripts that build a model in 16 bits set it."""
    norm_of = hugging_face(*RMS_NORMS[0])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(where):
            for norm, kind in (
                (norm_of(16), RMSNormLinear),
                (nn.RMSNorm(16), RMSNormLinear),
                (nn.LayerNorm(16), LayerNormLinear),
            ):
                stock = nn.Sequential(norm, nn.Linear(16, 8), nn.SiLU())
                ours = kind.from_torch(stock)
                assert ours.weight is stock[1].weight and ours.weight.dtype == dtype
                if where == "cpu":
                    x = torch.randn(3, 16)
                    close = max(8 * torch.finfo(dtype).eps, 1e-5)  # Llama's statistics are float32
                    torch.testing.assert_close(ours(x), stock(x), rtol=close, atol=close)
            with refuses("1 . weight"):
                gemma = hugging_face("gemma.modeling_gemma", "GemmaRMSNorm")(16)
                kind = RMSNormLinear
                kind.from_torch(nn.Sequential(gemma, nn.Linear(16, 8)))
            gated = GatedLinear.from_linears(nn.Linear(16, 8), nn.Linear(16, 8))
            assert gated.weight.dtype == dtype
    finally:
        torch.set_default_dtype(before)


def linear(dtype: torch.dtype = F32, device: str = "cpu", grad: bool = True) -> nn.Linear:
    return nn.Linear(6, 4, device=device, dtype=dtype).requires_grad_(grad)


def test_gated_from_frozen_linears_is_frozen():
    for grad in (True, False):
        module = GatedLinear.from_linears(linear(grad=grad), linear(grad=grad))
        assert [p.requires_grad for p in module.parameters()] == [grad, grad]
    left, right = linear(), linear()
    left.bias.requires_grad_(False)
    right.bias.requires_grad_(False)
    module = GatedLinear.from_linears(left, right)
    assert module.weight.requires_grad and not module.bias.requires_grad


@pytest.mark.parametrize(
    ("right", "text"),
    [
        (lambda: linear(torch.bfloat16), "right.weight must have the dtype of left.weight, torch"),
        (lambda: linear(device="meta"), "right.weight must have the device of left.weight, cpu, b"),
        (
            lambda: linear(grad=False),
            "right.weight.requires_grad must be True like left's, but got",
        ),
        (lambda: nn.Sequential(linear()), "right must be nn.Linear, but got Sequential"),
    ],
)
def test_gated_from_linears_that_differ_is_refused(right, text):
    with refuses(text):
        GatedLinear.from_linears(linear(), right())


def test_the_frozen_form_gives_a_frozen_stock_module():
    stock = LayerNormLinear(6, 5).fold().to_torch()
    assert list(stock.parameters()) and not any(p.requires_grad for p in stock.parameters())


# The children of CausalSelfAttention are called


class LoRA(nn.Module):
    """Around a layer, as peft's."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def changed_attention(name: str, child: str) -> tuple[nn.Module, nn.Module]:
    """Ours and the plain one, with one child of both changed in the same way."""
    torch.manual_seed(0)
    plain = PlainAttention(3)
    ours = attention_from(plain, "attention")
    for module in (plain, ours):
        torch.manual_seed(1)
        layer = getattr(module, child)
        if name == "lora":
            layer = LoRA(layer)
        elif name == "another order of the result":
            layer = nn.Sequential(layer, Transposed())
        else:
            layer = (HOOKED | PARAMETRISED)[name][0](layer)
        setattr(module, child, layer)
    return plain, ours


class Transposed(nn.Module):
    """A parametrisation that changes the strides alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 2).contiguous().transpose(0, 2)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("child", ["c_attn", "c_proj"])
@pytest.mark.parametrize("name", ["lora", "another order of the result", *HOOKED, *PARAMETRISED])
def test_a_changed_child_of_attention_is_called(name, child):
    """The result and the gradients of x and of all trained parameters equal the plain block's."""
    plain, ours = changed_attention(name, child)
    results = []
    for module in (plain, ours):
        x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
    for got, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["lora", "forward pre-hook", "weight_norm"])
def test_attention_with_a_changed_child_compiles_in_one_graph(name):
    plain, ours = changed_attention(name, "c_attn")
    x = torch.randn(2, 7, 12)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-5, atol=1e-5)


def test_attention_with_a_changed_child_scripts():
    """And the module as it was made is scripted with the op."""
    plain, ours = changed_attention("lora", "c_attn")
    x = torch.randn(2, 7, 12)
    scripted = torch.jit.script(ours)
    torch.testing.assert_close(scripted(x), plain(x), rtol=1e-5, atol=1e-5)
    assert "torchweld::linear" not in str(scripted.inlined_graph)
    unchanged = torch.jit.script(attention_from(PlainAttention(3), "attention"))
    assert "torchweld::linear" in str(unchanged.inlined_graph)


def test_attention_of_many_parameter_sets():
    """vmap over functional_call: ensembles."""
    modules = [CausalSelfAttention(12, 3) for _ in range(3)]
    x = torch.randn(2, 7, 12)
    stacked = torch.func.stack_module_state(modules)

    def call(parameters, buffers):
        return torch.func.functional_call(modules[0], (parameters, buffers), (x,))

    got = torch.vmap(call)(*stacked)
    expected = torch.stack([module(x) for module in modules])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_attention_with_projections_of_4_bits(device):
    for op in ("attention", "int4_linear"):
        need_kernel(op, device)
    torch.manual_seed(0)
    module = CausalSelfAttention(16, 2).to(device)
    rounded = copy.deepcopy(module)
    for name in ("c_attn", "c_proj"):
        layer = torchweld.nn.Int4Linear.from_linear(getattr(module, name), 8)
        setattr(module, name, layer)
        setattr(rounded, name, layer.to_torch())
    x = torch.randn(2, 7, 16, device=device)
    torch.testing.assert_close(module(x), rounded(x), rtol=1e-5, atol=1e-5)
    assert_same_bits(torch.jit.script(module)(x), module(x))


def test_hooks_on_all_modules_see_the_children_of_attention():
    module, seen = CausalSelfAttention(12, 3), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        module(torch.randn(2, 7, 12))
    finally:
        handle.remove()
    assert seen == [module.c_attn, module.c_proj, module]


class DoublingWeight(Tensor):
    """A weight that overrides F.linear, as a quantised tensor does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            plain = [a.as_subclass(Tensor) if isinstance(a, cls) else a for a in args]
            return 2 * func(*plain, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def test_a_weight_with_a_linear_of_its_own_is_asked():
    plain = PlainAttention(3)
    ours = attention_from(plain, "attention")
    for module in (plain, ours):
        weight = module.c_attn.weight.detach().as_subclass(DoublingWeight)
        module.c_attn.weight = nn.Parameter(weight, requires_grad=False)
        assert type(module.c_attn.weight) is DoublingWeight
    x = torch.randn(2, 7, 12)
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-5)


# CausalSelfAttention and the options of transformers' GPT2Attention


def gpt2_attention(layer_idx: int = 1, cross: bool = False, **options: Any) -> nn.Module:
    kind = hugging_face("gpt2.modeling_gpt2", "GPT2Attention")
    config = importlib.import_module("transformers").GPT2Config(
        n_embd=16, n_head=4, **{"attn_pdrop": 0.0, "resid_pdrop": 0.0, **options}
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    module = kind(config, is_cross_attention=cross, layer_idx=layer_idx).eval()
    nn.init.normal_(module.c_attn.weight, std=0.5)
    return module


SCALINGS: dict[str, dict[str, bool]] = {
    "none of it": {},
    "by layer": {"scale_attn_by_inverse_layer_idx": True},
    "without": {"scale_attn_weights": False},
    "by layer alone": {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    "upcast": {"reorder_and_upcast_attn": True},
    "upcast by layer": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
}


@pytest.mark.parametrize("kernel", ["causal_softmax", "softmax_matmul", "attention"])
@pytest.mark.parametrize("name", SCALINGS)
def test_attention_scales_as_transformers_does(name, kernel):
    theirs = gpt2_attention(layer_idx=2, **SCALINGS[name])
    if "upcast" in name and kernel != "attention":
        with refuses('kernel must be "attention" of a module wi'):
            CausalSelfAttention.from_torch(theirs, kernel=kernel)
        return
    ours = CausalSelfAttention.from_torch(theirs, kernel=kernel)
    x = torch.randn(2, 7, 16)
    mask = torch.full((1, 1, 7, 7), torch.finfo(F32).min).triu(1)
    expected = theirs(x, attention_mask=mask)[0]
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)
    assert_same_bits(torch.jit.script(ours)(x), ours(x))
    back = ours.to_torch()
    torch.testing.assert_close(back(x)[0], expected, rtol=1e-5, atol=1e-5)  # still causal
    again = CausalSelfAttention.from_torch(back, kernel=kernel)
    assert_same_bits(again(x), ours(x))
    assert again.scale == ours.scale and ("scale=" in repr(ours)) == (ours.scale != 0.5)


def changed(module: nn.Module, name: str, value: Any) -> nn.Module:
    setattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], value)
    return module


class OtherAttention:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)[0] * 2


def subclass(module: nn.Module) -> nn.Module:
    module.__class__ = type("OtherAttention", (OtherAttention, type(module)), {})
    return module


def with_function(module: nn.Module, name: str) -> nn.Module:
    module.config._attn_implementation_internal = name
    return module


OTHER_ATTENTION: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention dropout": (
        lambda: gpt2_attention(attn_pdrop=0.1),
        "module.attn_dropout.p must be 0, since CausalSelfAttention has no dropout, but got 0.1",
    ),
    "dropout of the result": (
        lambda: gpt2_attention(resid_pdrop=0.1),
        "module.resid_dropout.p must be 0",
    ),
    "cross-attention": (lambda: gpt2_attention(cross=True), "must be self-attention, but got cro"),
    "both ways": (
        lambda: changed(gpt2_attention(), "is_causal", False),
        "module.is_causal must be True, but got False",
    ),
    "function": (
        lambda: with_function(gpt2_attention(), "with_alibi"),
        "attention function must be one of eager, sdpa, ",
    ),
    "subclass": (lambda: subclass(gpt2_attention()), "OtherAttention, a subclass of transformers"),
    "hook": (lambda: hooked(gpt2_attention(), "forward"), "GPT2Attention with a forward hook"),
    "lora": (
        lambda: changed(gpt2_attention(), "c_attn", LoRALinear(16, 48)),
        "module.c_attn must be transformers' Conv1D, but got LoRALinear(",
    ),
    "hooked projection": (
        lambda: changed(gpt2_attention(), "c_proj", hooked(gpt2_attention().c_proj, "forward_pre")),
        "Conv1D with a forward pre-hook",
    ),
    "weight_norm": (
        lambda: changed(
            gpt2_attention(), "c_attn", parametrizations.weight_norm(gpt2_attention().c_attn)
        ),
        "Conv1D with a parametrisation of weight (_WeightNorm)",
    ),
    "another dropout": (
        lambda: changed(gpt2_attention(), "attn_dropout", nn.AlphaDropout(0.0)),
        "module.attn_dropout must be nn.Dropout, but got AlphaDropout(p=0.0",
    ),
    "dtypes": (
        lambda: changed(gpt2_attention(), "c_proj", gpt2_attention().c_proj.double()),
        "c_proj.weight must have the dtype of c_attn.weight, torch.float32, but got torch.float64",
    ),
    "devices": (
        lambda: changed(gpt2_attention(), "c_proj", gpt2_attention().c_proj.to("meta")),
        "c_proj.weight must have the device of c_attn.weight, cpu, but got meta",
    ),
    "pruned heads": (
        lambda: changed(gpt2_attention(), "c_attn.weight", nn.Parameter(torch.zeros(16, 36))),
        "module.c_attn.weight must be (16, 48), but got (16, 36)",
    ),
}


@pytest.mark.parametrize("name", OTHER_ATTENTION)
def test_another_attention_of_transformers_is_refused(name):
    make, text = OTHER_ATTENTION[name]
    with refuses(re.escape(text)):
        CausalSelfAttention.from_torch(make())


def test_frozen_projections_of_attention_stay_frozen():
    theirs = gpt2_attention()
    theirs.c_attn.requires_grad_(False)
    theirs.c_proj.bias.requires_grad_(False)
    ours = CausalSelfAttention.from_torch(theirs)
    for module in (ours, ours.to_torch()):
        assert [n for n, p in module.named_parameters() if p.requires_grad] == ["c_proj.weight"]
    for training in (True, False):
        ours = CausalSelfAttention.from_torch(theirs.train(training))
        assert ours.training is training and ours.to_torch().training is training


@pytest.mark.parametrize("name", ["lora", "forward hook", "weight_norm", "prune", "subclass"])
@pytest.mark.parametrize("child", ["c_attn", "c_proj"])
def test_attention_with_a_changed_child_has_no_torch_form(name, child):
    pytest.importorskip("transformers")
    if name == "subclass":
        ours = changed(CausalSelfAttention(12, 3), child, LoRALinear(12, 12))
    else:
        ours = changed_attention(name, child)[1]
    with refuses(f"to_torch: {child} must be nn.Linear, but got"):
        ours.to_torch()


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    build, text = BAD[name]
    with refuses(text):
        build()


def test_every_module_is_tested():
    listed = set(torchweld.nn.__all__)
    tested = {type(c.pair("cpu")[1]).__name__ for c in CASES} | {"FoldedLayerNormLinear"}
    # These have pages of their own: Int4Linear is not equal to a Linear, and losses take a target.
    elsewhere = {"Attention", "CrossEntropyLoss", "Int4Linear", "LinearCrossEntropy"}
    assert listed == tested | elsewhere


LEFT_PADDED = [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]


def test_leftpad_from_mask(device):
    mask = torch.tensor(LEFT_PADDED, device=device)
    expected = torch.tensor([2, 0, 4, 3], dtype=torch.int32, device=device)
    for dtype in (torch.int64, torch.bool, torch.int32, torch.uint8):
        for check in (True, False):
            got = torchweld.leftpad_from_mask(mask.to(dtype), check=check)
            assert_same_bits(got, expected)
    empty = torchweld.leftpad_from_mask(mask[:0])
    assert empty.shape == (0,) and empty.dtype == torch.int32
    assert torchweld.leftpad_from_mask(mask[:, :0]).tolist() == [0, 0, 0, 0]
    for bad in (mask[0], mask[None]):
        with refuses("attention_mask must be"):
            torchweld.leftpad_from_mask(bad)


@pytest.mark.parametrize(
    ("row", "what"), [([1, 1, 1, 0], "right padding"), ([1, 0, 1, 1], "hole"), ([0, 1, 0, 0], "")]
)
def test_leftpad_from_another_mask_is_refused(device, row, what):
    mask = torch.tensor([*LEFT_PADDED, row], device=device)
    with refuses("zeros before its ones, but got .* in row 4; pad on the"):
        torchweld.leftpad_from_mask(mask)
    with refuses("in rows 0, 1, 2, 3, 4, ...;"):
        torchweld.leftpad_from_mask(mask[4:].expand(7, -1))
    # The context of a GPU is whole.
    assert torchweld.leftpad_from_mask(mask[:4]).tolist() == [2, 0, 4, 3]


@pytest.mark.parametrize("how", ["unchecked", "compiled", "CUDA graph"])
def test_where_nothing_is_read_another_mask_is_all_padding(device, how):
    mask = torch.tensor([*LEFT_PADDED, [1, 1, 1, 0], [1, 0, 1, 1]], device=device)
    if how == "unchecked":
        got = torchweld.leftpad_from_mask(mask, check=False)
    elif how == "compiled":
        made = torch.compile(torchweld.leftpad_from_mask, fullgraph=True, backend="aot_eager")
        got = made(mask)
    elif device == "cpu":
        return
    else:
        torchweld.leftpad_from_mask(mask, check=False)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = torchweld.leftpad_from_mask(mask)
        graph.replay()
    assert got.dtype == torch.int32 and got.tolist() == [2, 0, 4, 3, 4, 4]
    # Such a sequence gives zeros and has no gradient, even with NaN.
    need_kernel("attention", device)
    q = torch.randn(6, 2, 4, 8, device=device, requires_grad=True)
    out = torch.ops.torchweld.attention(q, q, q, got, causal=True)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert not out[4:].any() and not grad[4:].any() and out[:2].any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", WITH_WEIGHT)
def test_reset_parameters_draws_what_a_new_module_has(name, bias):
    """The parameters are also initialised after `to_empty`, which leaves them undefined."""
    kind = getattr(torchweld.nn, name)
    torch.manual_seed(3)
    new = kind(6, 5, bias=bias)
    module = kind(6, 5, bias=bias, device="meta").to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(3)
    module.reset_parameters()
    assert list(module.state_dict()) == list(new.state_dict())
    for parameter, fresh in zip(module.parameters(), new.parameters(), strict=True):
        assert_same_bits(parameter, fresh)
        assert parameter.requires_grad
    scripted = torch.jit.script(module)
    x = torch.randn(2, 6)
    assert_same_bits(scripted(x), module(x))
