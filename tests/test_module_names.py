"""Fused modules and other tools: state_dicts of the modules they replace, initialisers, LoRA."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from numerics import assert_equal, assert_same_bits
from torchweld.nn import GatedLinear, LayerNormLinear, RMSNormLinear
from torchweld.ops.gated_linear import GATES


class Pair(nn.Module):
    """A norm and a linear layer under names of a user's choice."""

    def __init__(self, norm, linear, names):
        super().__init__()
        self.add_module(names[0], norm)
        self.add_module(names[1], linear)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, x):
        for module in self.children():
            x = module(x)
        return x


NORMS = {
    "LayerNorm": (LayerNormLinear, lambda: nn.LayerNorm(16), {"eps": 1e-5}),
    "LayerNorm without parameters": (
        LayerNormLinear,
        lambda: nn.LayerNorm(16, elementwise_affine=False),
        {"eps": 1e-5, "ln_affine": False},
    ),
    "LayerNorm without bias": (
        LayerNormLinear,
        lambda: nn.LayerNorm(16, bias=False),
        {"eps": 1e-5, "ln_bias": False},
    ),
    "RMSNorm": (RMSNormLinear, lambda: nn.RMSNorm(16, 1e-6), {"eps": 1e-6}),
}


@pytest.mark.parametrize("names", [("ln", "fc"), ("0", "1"), ("norm", "proj")], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_and_a_linear_layer_load(kind, bias, names):
    """Strictly, in a place of a model and alone, copied and assigned, scripted too."""
    cls, norm, options = NORMS[kind]
    stock = nn.ModuleDict({"mlp": Pair(norm(), nn.Linear(16, 8, bias), names)})
    x = torch.randn(3, 16)
    expected = stock["mlp"](x)
    for assign in (False, True):
        ours = nn.ModuleDict({"mlp": cls(16, 8, bias, **options)})
        state = stock.state_dict()
        ours.load_state_dict(state, assign=assign)
        assert state.keys() == stock.state_dict().keys()
        torch.testing.assert_close(ours["mlp"](x), expected, rtol=1e-5, atol=1e-5)
    alone = cls(16, 8, bias, **options)
    alone.load_state_dict(stock["mlp"].state_dict())
    scripted = torch.jit.script(cls(16, 8, bias, **options))
    scripted.load_state_dict(stock["mlp"].state_dict())
    again = copy.deepcopy(alone)
    again.load_state_dict(ours["mlp"].state_dict())
    for module in (alone, scripted, again):
        assert_same_bits(module(x), ours["mlp"](x))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.update({"other.weight": torch.ones(16)}), "Unexpected key"),
        (lambda s: s.update({"fc.scale": torch.ones(16)}), "Unexpected key"),
        (lambda s: s.pop("ln.weight"), 'Unexpected key.*"ln.bias"'),
        (lambda s: s.pop("fc.bias"), 'Missing key.*"bias"'),
        (lambda s: s.update({"fc.weight": torch.ones(16, 8)}), "size mismatch for weight"),
    ],
)
def test_other_keys_are_reported(change, text):
    state = Pair(nn.LayerNorm(16), nn.Linear(16, 8), ("ln", "fc")).state_dict()
    change(state)
    module = LayerNormLinear(16, 8)
    with pytest.raises(RuntimeError, match=f"(?s){text}"):
        module.load_state_dict(state)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_the_layers_of_a_gated_mlp_load(gate, interleaved):
    left, right = nn.Linear(16, 8), nn.Linear(16, 8)
    x = torch.randn(3, 16)
    expected = GATES[gate](left(x), right(x))
    names = [("left", "right")]
    if gate == "swiglu":  # silu(gate_proj(x)) * up_proj(x)
        names.append(("gate_proj", "up_proj"))
    elif gate != "sigmoid_tanh":  # left * gelu(right)
        names.append(("up_proj", "gate_proj"))
    for both in names:
        ours = GatedLinear(16, 8, gate=gate, interleaved=interleaved)
        ours.load_state_dict(
            nn.ModuleDict(dict(zip(both, (left, right), strict=True))).state_dict()
        )
        torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)
    other = GatedLinear(16, 8, gate=gate, interleaved=interleaved)
    other.load_state_dict({f"fc.{name}": t for name, t in ours.state_dict().items()})
    assert_same_bits(other(x), ours(x))


def test_branches_with_other_names_are_reported():
    """Which of them the activation belongs to is unknown."""
    state = nn.ModuleDict({"w1": nn.Linear(16, 8), "w3": nn.Linear(16, 8)}).state_dict()
    with pytest.raises(RuntimeError, match='Unexpected key.*"w1.weight"'):
        GatedLinear(16, 8, gate="swiglu").load_state_dict(state)
    state = nn.ModuleDict({"gate_proj": nn.Linear(16, 8), "up_proj": nn.Linear(16, 8)}).state_dict()
    with pytest.raises(RuntimeError, match='Unexpected key.*"gate_proj.weight"'):
        GatedLinear(16, 8, gate="sigmoid_tanh").load_state_dict(state)


def test_initialisers_reach_the_torch_forms():
    """The recipe of docs/training.md: to_torch shares the parameters."""

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2.0)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.constant_(module.weight, 3.0)

    model = nn.Sequential(LayerNormLinear(16, 8), RMSNormLinear(8, 8), GatedLinear(8, 4))
    for module in model.modules():
        if hasattr(module, "to_torch"):
            module.to_torch().apply(init)
    assert_equal(model[0].ln_weight.detach(), torch.full((16,), 3.0))
    for module in model:
        assert (module.weight == 2).all() and (module.bias == 0).all()


def test_lora_on_the_torch_forms():
    """The recipe of docs/training.md: "all-linear" finds the layers of the torch forms."""
    peft = pytest.importorskip("peft")
    model = nn.Sequential(LayerNormLinear(16, 8), nn.ReLU(), GatedLinear(8, 4))
    x = torch.randn(3, 16)
    expected = model(x)
    for path, module in list(model.named_modules()):
        if hasattr(module, "to_torch"):
            model.set_submodule(path, module.to_torch())
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    config = peft.LoraConfig(target_modules="all-linear", r=2)
    adapted = peft.get_peft_model(model, config)
    assert adapted.peft_config["default"].target_modules == {"0.1", "2.linear"}
    torch.testing.assert_close(adapted(x), expected, rtol=1e-5, atol=1e-5)
