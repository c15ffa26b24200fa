"""Attention and decoder layers that the table of families lacks, recognised and compared.

An attention layer is one of ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` that calls
transformers' attention interface. Its replica calls a function that records the arguments. A
decoder layer has norms that are known, and one of them gets the sum of the layer's input and a
result. The other children of its replica are stubs.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchweld.integrations import recorder
from torchweld.integrations.fusion.layers import arguments
from torchweld.integrations.fusion.layers.decoder import (
    Attention,
    FusedAttention,
    FusedLayer,
    FusedNorm,
    Layer,
    LayerInput,
    computed,
)
from torchweld.integrations.fusion.layers.families import Fusion, register
from torchweld.integrations.fusion.layers.fused_module import stock_class, stock_forward

from . import compare
from .norms_mlps import Recognised, choose, fused_replica, known

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_RECORDER = "torchweld_recorder"
_NOT_GIVEN = ("dropout", "scaling", "marker")  # by options; every attention layer passes them


class Options(NamedTuple):
    """The arguments of an attention function that Llama's layer does not pass.

    Attributes:
        sources: For each keyword the attribute that it comes from: of the layer, or of its config
            after "config."; None for the value None.
    """

    sources: tuple[tuple[str, str | None], ...]

    def __call__(self, layer: nn.Module) -> dict[str, Any]:
        return {name: _value(layer, source) for name, source in self.sources}


def _value(layer: nn.Module, source: str | None) -> Any:
    if source is None:
        return None
    owner = layer.config if source.startswith("config.") else layer
    return getattr(owner, source.removeprefix("config."), None)


def find(module: nn.Module) -> Fusion | None:
    """The fused parent and the row for a module by its structure, or None if no row has it."""
    if _is_attention(module):
        return choose(module, _attention_rows, RecognisedAttention)
    if not _has_children_of_layer(module):
        return None
    found = register(stock_class(module))
    if found is None and (rows := _layer_rows(module)):
        found = choose(module, lambda _: rows, RecognisedLayer)
    return found if found and {*found[1]} <= module._modules.keys() else None


def _is_attention(module: nn.Module) -> bool:
    return _has_children_of_attention(module) and difference(module) is None


def difference(module: nn.Module) -> str | None:
    """How a module with the parts of an attention layer differs from one in its arguments."""
    if not _has_children_of_attention(module):
        return None
    return arguments.difference(stock_class(module), FusedAttention.knows, exact=True)


def _has_children_of_attention(module: nn.Module) -> bool:
    children = set(module._modules)
    norms = children & set(_HEAD_NORMS)
    if children != {*_PROJECTIONS, "o_proj", *norms} or len(norms) not in (0, 2):
        return False
    source = sys.modules.get(stock_class(module).__module__)
    return (
        not module._parameters
        and not module._buffers
        and all(hasattr(module, name) for name in ("head_dim", "scaling", "config", "layer_idx"))
        and all(
            isinstance(getattr(child, "out_features", None), int)
            for name, child in module.named_children()
            if name.endswith("_proj")
        )
        and hasattr(source, "apply_rotary_pos_emb")
        and hasattr(source, "eager_attention_forward")
    )


def _attention_rows(module: nn.Module) -> list[Attention]:
    options = Options(())
    try:
        with compare.isolated(torch.device("cpu")):
            random = compare.Random(torch.device("cpu"), torch.float32)
            replica = _attention_replica(module, random, stock_class(module))
            _, (calls, _) = _run_attention(replica, type(replica).forward, random)
        options = Options(tuple(_sources(module, calls[0])))
    except Exception:  # the comparison says why
        pass
    head_norms = ("head", "row") if "q_norm" in module._modules else (None,)
    return [
        Attention(False, head_norm, interleaved, options)
        for interleaved in (False, True)
        for head_norm in head_norms
    ]


def _sources(module: nn.Module, given: dict[str, Any]) -> list[tuple[str, str | None]]:
    found: list[tuple[str, str | None]] = []
    for name, value in given.items():
        if name in _NOT_GIVEN:
            continue
        places = [name] if hasattr(module, name) else []
        places += [f"config.{name}"] if hasattr(module.config, name) else []
        places += [each for each in vars(module) if value is not None and not each.startswith("_")]
        same = [place for place in places if _equal(_value(module, place), value)]
        if value is not None and not same:
            raise ValueError(f"its attention function is given {name}, which no attribute has")
        found.append((name, same[0] if same else None))
    return found


def _equal(a: Any, b: Any) -> bool:
    simple = (bool, int, float, str, type(None))
    return type(a) is type(b) and isinstance(a, simple) and a == b


def _attention_replica(
    module: nn.Module, random: compare.Random, cls: type[nn.Module] | None = None
) -> nn.Module:
    replica = fused_replica(module) if cls is None else compare.bare_replica(module, cls)
    for name, child in module._modules.items():
        if name in _HEAD_NORMS:
            made = compare.bare_replica(child, stock_class(child))
            for key, parameter in child._parameters.items():
                made.register_parameter(key, nn.Parameter(random(*parameter.shape)))
        elif name == "o_proj":
            made = random.linear(child.in_features, compare.WIDTH, like=child)
        else:
            made = random.linear(compare.WIDTH, child.out_features, like=child)
        replica.add_module(name, made)
    if "attention_dropout" in vars(module):
        replica.attention_dropout = 0.25
    replica.config = copy.copy(module.config)
    replica.config._attn_implementation_internal = _RECORDER
    return replica.to(random.device, random.dtype)


def _record(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The attention function of compare."""
    return layer.recorder(layer, *args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(_RECORDER, _record)


class _Cache:
    """A fake cache that changes keys and values.

    A layer that calls it before the rotary embedding gives another result than one that calls it
    after.
    """

    def __init__(self, facts: list[Any]) -> None:
        self.facts = facts

    def update(self, key: Tensor, value: Tensor, index: int, *rest: Any, **more: Any) -> Any:
        markers = {name: given.get("marker") for name, given in more.items()}
        self.facts.append(("cache", index, rest, markers))
        return key * 1.25, value - 0.5


def _run_attention(
    module: nn.Module, forward: compare.Forward, random: compare.Random
) -> tuple[list[Tensor], Any]:
    calls: list[dict[str, Any]] = []
    facts: list[Any] = []
    tensors: list[Tensor] = []
    x = random.inputs()
    mask = random(1, 1, 3, 3)

    def record(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: Any, **more: Any) -> Any:
        calls.append(more)
        facts.append((layer is module, given is mask, sorted(more.items(), key=str)))
        tensors.extend((q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return (q + k / 2 + 2 * v).transpose(1, 2).contiguous(), None

    tables = random(4, 3, _rotary_dim(module)), random(4, 3, _rotary_dim(module))
    module.recorder = record
    name = arguments.of(stock_class(module)).cache
    for cache in (None, _Cache(facts)):
        y, weights = forward(
            module,
            hidden_states=x,
            position_embeddings=tables,
            attention_mask=mask,
            **{name: cache},
            marker=7,
        )
        facts.append(weights)
        tensors.extend(compare.with_gradients(module, y, x, random))
    return tensors, (calls, facts)


def _rotary_dim(module: nn.Module) -> int:
    rope = getattr(module.config, "rope_parameters", None) or {}
    factor = getattr(module.config, "partial_rotary_factor", None) or rope.get(
        "partial_rotary_factor", 1.0
    )
    return int(module.head_dim * factor)


def _has_children_of_layer(module: nn.Module) -> bool:
    """Whether a module has two norms that are known and two modules with layers of their own."""
    children = [child for child in module._modules.values() if child is not None]
    blocks = [child for child in children if child._modules]
    return (
        not module._parameters
        and len(blocks) > 1
        and len([child for child in children if _is_norm(child)]) > 1
    )


def _is_norm(module: nn.Module) -> bool:
    found = known(module)
    return found is not None and issubclass(found[0], FusedNorm)


def _layer_rows(module: nn.Module) -> list[Layer]:
    """The row of a layer: the norm that a replica calls first, and the one that gets a sum."""
    random = compare.Random(torch.device("cpu"), torch.float32)
    try:
        with compare.isolated(random.device), recorder.recording() as calls:
            replica = _layer_replica(module, random, stock_class(module))
            _run_stubs(replica, stock_forward, LayerInput(random.inputs(), False))
    except Exception:  # it has the children of a layer and is none
        return []
    names = {child: name for name, child in replica._modules.items()}
    sums = [names[key[0]] for key in calls if isinstance(key, tuple)]
    first = [names[key] for key in calls if key in names]
    return [Layer(first[0], sums[0])] if first and sums else []


class _Stub(nn.Module):
    """Takes the place of a child. Its result is a tensor, or a tuple that begins with one."""

    def __init__(self, factor: float, choices: Sequence[int]) -> None:
        super().__init__()
        self.factor, self.choices, self.results = factor, choices, 1

    def forward(self, *args: Any, **given: Any) -> Any:
        values = map(computed, (*args, *given.values()))
        x = next(filter(torch.is_tensor, values), None)
        y = (self.factor * x).sin()
        return y if self.results == 1 else (y, *[None] * (self.results - 1))


def _layer_replica(
    module: nn.Module, random: compare.Random, cls: type[nn.Module] | None = None
) -> nn.Module:
    replica = fused_replica(module) if cls is None else compare.bare_replica(module, cls)
    for i, (name, child) in enumerate(module._modules.items()):
        made = child
        if child is not None and _is_norm(child):
            made = fused_replica(child)
            made.weight = nn.Parameter(random(compare.WIDTH))
        elif child is not None:
            made = _Stub(1 + i / 8, (2, 3, 1) if child._modules else (1,))
        replica.add_module(name, made)
    for name, buffer in module._buffers.items():
        replica.register_buffer(name, buffer.to(random.device, random.dtype))
    return replica


def _run_stubs(module: nn.Module, forward: compare.Forward, x: Any) -> tuple[Any, list[int]]:
    """The result of a layer, and how many results of each stub its forward takes."""
    stubs = [child for child in module.children() if isinstance(child, _Stub)]
    given = dict.fromkeys(arguments.of(stock_class(module)).names[1:], 1.0)
    refused: Exception | None = None
    for results in itertools.product(*(stub.choices for stub in stubs)):
        for stub, count in zip(stubs, results, strict=True):
            stub.results = count
        try:
            return forward(module, x, **given), [*results]
        except (AttributeError, TypeError, ValueError) as error:
            refused = refused or error
    raise refused


def _run_layer(
    module: nn.Module, forward: compare.Forward, random: compare.Random
) -> tuple[list[Tensor], Any]:
    x = random.inputs()
    y, results = _run_stubs(module, forward, x)
    y, *rest = y if isinstance(y, tuple) else (y,)
    return compare.with_gradients(module, y, x, random), [results, rest]


class RecognisedAttention(Recognised, FusedAttention):
    """An attention layer of another class."""

    comparison = compare.Kind("an attention layer", _attention_replica, _run_attention)


class RecognisedLayer(Recognised, FusedLayer):
    """A decoder layer of another class."""

    comparison = compare.Kind("a decoder layer", _layer_replica, _run_layer)
