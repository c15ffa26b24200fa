"""Recognises attention and decoder layers that the table of families lacks, and compares them.

An attention layer calls transformers' attention interface and a rotary function of its Python
module, of query, key or both, and tables. The decoder layer around it has known norms: one
normalises the attention's input, or the sum of the layer's input and a result. In a replica of a
decoder layer the children but the norms are stubs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import deprecation

from torchweld.integrations import recorder
from torchweld.integrations.attention.models import asks_for_attention
from torchweld.integrations.fusion.layers import arguments
from torchweld.integrations.fusion.layers.decoder import (
    FusedLayer,
    FusedRotary,
    Layer,
    Rotary,
    attention_of,
    projection_layers,
    rotation,
)
from torchweld.integrations.fusion.layers.deferred import (
    Deferred,
    LayerInput,
    Normed,
    computed,
)
from torchweld.integrations.fusion.layers.fused_module import (
    ROW,
    Fusion,
    register,
    stock_class,
    stock_forward,
)
from torchweld.integrations.fusion.layers.layer_norm import FusedLayerNorm, is_faster
from torchweld.integrations.fusion.layers.linears import Operands
from torchweld.integrations.fusion.layers.norm import FusedNorm

from . import compare
from .norms import Recognised, choose, fused_replica, known, norm_replica

_ROTARY = re.compile(r"apply_\w*rotary")
_WHOLE, _COMPLEX = "q k cos sin", "xq xk freqs_cis"
_SINGLE = "x cos sin unsqueeze_dim"
# For a rotary function the key of its tables, whether pairs are neighbours, whether results gather
# them, and whether narrow tables rotate the first values.
_OPTIONS = [
    (*options, partial)
    for partial in (True, False)
    for options in (
        ("whole", False, False),
        ("whole", True, False),
        ("first half", True, False),
        ("half as wide", False, False),
        ("half as wide, neighbours", True, False),
        ("first half twice", False, True),
    )
]
# The options of each form. If none of them computes the same as a function, the reason against the
# last ones is reported.
_OPTIONS_OF = {
    _WHOLE: [(*each, _WHOLE, rows_first) for rows_first in (False, True) for each in _OPTIONS]
    + [(*_OPTIONS[-1], _WHOLE)],
    _SINGLE: [(*each, _SINGLE) for each in _OPTIONS],
    _COMPLEX: [
        ("half as wide, neighbours", True, False, False, _COMPLEX, rows_first)
        for rows_first in (False, True)
    ],
}


def find(module: nn.Module) -> Fusion | None:
    """Guesses an attention or decoder layer's fused class and settings, None for other modules."""
    if _rotary_functions(stock_class(module)):
        return choose(module, _rotary_rows, RecognisedRotary)
    if not _has_children_of_layer(module):
        return None
    found = register(stock_class(module))
    if found is None and (rows := _layer_rows(module)):
        found = choose(module, lambda _: rows, RecognisedLayer)
    if found is None or not issubclass(found[0], RecognisedLayer):
        return None
    return found if {*found[1].names()} <= module._modules.keys() else None


def difference(module: nn.Module) -> str | None:
    """Returns why fuse knows none of the rotary functions beside an attention layer, or None."""
    stock = stock_class(module)
    names = [name for name in vars(sys.modules[stock.__module__]) if _ROTARY.match(name)]
    if not names or "Attention" not in stock.__name__ or not asks_for_attention(stock):
        return None
    return f"{stock.__name__} calls no {' or '.join(names)} of a form that fuse knows"


@functools.cache
def _rotary_functions(stock: type[nn.Module]) -> tuple[str, ...]:
    """Returns the names of the rotary functions of known form that an attention layer calls."""
    if not asks_for_attention(stock) or not inspect.isfunction(inspect.unwrap(stock.forward)):
        return ()
    forward = stock.forward
    while hasattr(forward, "__wrapped__"):
        if forward.__globals__["__name__"] != deprecation.__name__:
            return ()  # the decorator may change more than the names of arguments
        forward = forward.__wrapped__
    called = filter(_ROTARY.match, forward.__code__.co_names)
    return tuple(name for name in called if _form_of(forward.__globals__.get(name)))


def _form_of(function: Any) -> str:
    """Returns the form of a rotary function, or "" if it is unknown."""
    if not inspect.isfunction(function):
        return ""
    names = " ".join(inspect.signature(function).parameters)
    if names in (_SINGLE, _COMPLEX):
        return names
    return _WHOLE if f"{names} ".startswith(f"{_WHOLE} ") else ""


def _casts(function: Callable) -> bool:
    """Whether a function of q and k in 16 bits and tables in float32 returns 16 bits."""
    x, table = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 8)
    try:
        return {y.dtype for y in function(x, x, table, table)} == {x.dtype}
    except Exception:  # the comparison says why
        return False


def _rotary_rows(module: nn.Module) -> list[tuple[Rotary, ...]]:
    """Returns settings of the functions that compute the same as the op, else the last tried."""
    stock = stock_class(module)
    rows: dict[str, Rotary] = {}
    for name in _rotary_functions(stock):
        function = inspect.unwrap(stock.forward).__globals__[name]
        form = _form_of(function)
        casts = form == _COMPLEX or form == _WHOLE and _casts(function)
        for options in _OPTIONS_OF[form]:
            row = Rotary(name, *options, casts=casts)
            register(stock, (RecognisedRotary, (row,)))
            if name not in rows and not compare.strict_difference(
                module, RecognisedRotary.comparison, (row,)
            ):
                rows[name] = row
    return [tuple(rows.values()) or (row,)]


def _run_rotary(
    module: nn.Module, forward: compare.Forward, random: compare.Random
) -> tuple[list[Tensor], Any]:
    inner, dim = inspect.unwrap(stock_class(module).forward), compare.WIDTH
    tensors: list[Tensor] = []
    with recorder.recording() as calls:
        for row in getattr(module, ROW):
            stock = inner.__globals__[row.name]
            rotate = stock if forward is stock_forward else rotation(inner, row)
            for width in (dim, dim // 2) if row.partial else (dim,):
                q = random.inputs().unsqueeze(1).repeat(1, 2, 1, 1)
                k = random.inputs().unsqueeze(1)
                wide = width // 2 if row.tables.startswith("half as wide") else width
                tables = random(4, 3, wide), random(4, 3, wide)
                if row.casts:
                    tables = [table.float() for table in tables]
                given = (x.transpose(1, 2) if row.rows_first else x for x in (q, k))
                if row.form == _COMPLEX:
                    found = rotate(*given, torch.complex(*tables))
                elif row.form == _SINGLE:
                    rows_first = rotate(k.transpose(1, 2), *tables, unsqueeze_dim=2)
                    found = [rotate(q, *tables), rows_first.transpose(1, 2)]
                else:
                    found = rotate(*given, *tables)
                if row.rows_first:
                    found = [x.transpose(1, 2) for x in found]
                tensors += [*found, *torch.autograd.grad(found, (q, k), [q.cos(), k.cos()])]
    if any(filter(None, itertools.chain(*calls.values()))):
        raise RuntimeError("its tables are others")
    return tensors, None


def _has_children_of_layer(module: nn.Module) -> bool:
    """Whether a module has two norms that run ops, a child with children, and no matrices."""
    children = [child for child in module._modules.values() if child is not None]
    return (
        all(p is None or p.dim() == 1 for p in module._parameters.values())
        and any(child._modules for child in children)
        and len([child for child in children if _is_norm(child)]) > 1
    )


def _is_norm(module: nn.Module) -> bool:
    found = known(module)
    if found is None or not issubclass(found[0], FusedNorm):
        return False
    weight = module._parameters.get("weight")
    faster = weight is not None and is_faster(weight)
    return faster or not issubclass(found[0], FusedLayerNorm)


def _layer_rows(module: nn.Module) -> list[Layer]:
    """Returns a layer's settings in a list: its norms of the input and of sums; [] without any."""
    # With every sum deferred, a layer whose last sum goes to a child that is no norm fails. The
    # second call defers only the first sum.
    return _layer_rows_of(module, sums=len(module._modules)) or _layer_rows_of(module, sums=1)


def _layer_rows_of(module: nn.Module, sums: int) -> list[Layer]:
    """Returns a layer's settings in a list, with up to ``sums`` sums left to its norms; or []."""
    random = compare.Random(torch.device("cpu"), torch.float32)
    try:
        with compare.isolated(random.device), recorder.recording() as calls:
            replica = _layer_replica(module, random, stock_class(module))
            norms = {
                child: tuple(child.op_parameters(child, None).values())
                for child in replica.children()
                if isinstance(child, FusedNorm)
            }
            projections = dict.fromkeys(norms, Operands([], []))
            x = LayerInput(random.inputs(), norms, projections, sums)
            _run_stubs(replica, stock_forward, x)
    except Exception:  # it has the children of a layer and is none
        return []
    names = {child: name for name, child in replica._modules.items()}
    before = [names[key[0]] for key in calls if isinstance(key, tuple)]
    given = Counter(norm for child in replica.children() for norm in getattr(child, "given", ()))
    first = [names[norm] for norm, count in given.items() if count == 1]
    attn = attention_of(module)
    if not before and (attn is None or not projection_layers(attn, None)):
        return []
    row = Layer(next(iter(first), None), next(iter(before), None), tuple(before[1:]))
    return [row] if any(row) else []


class _Stub(nn.Module):
    """Replaces a child. Returns a tensor, or a tuple that begins with one."""

    def __init__(self, factor: float, choices: Sequence[int]) -> None:
        super().__init__()
        self.factor, self.choices, self.results = factor, choices, 1
        self.given: list[nn.Module] = []  # the norms of the layer's input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        self.given += [value.source for value in values if isinstance(value, Normed)]
        values = [computed(value) if isinstance(value, Normed) else value for value in values]
        if any(isinstance(value, Deferred) for value in values):
            # A child's autograd.Function would not see that a deferred value needs a gradient.
            raise RuntimeError("a child that is no norm gets the layer's input or its sum")
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
            made = norm_replica(child, random)
        elif child is not None:
            made = _Stub(1 + i / 8, (2, 3, 1) if child._modules else (1,))
        replica.add_module(name, made)
    for name, parameter in module._parameters.items():
        value = None if parameter is None else nn.Parameter(random(compare.WIDTH))
        replica.register_parameter(name, value)
    for name, buffer in module._buffers.items():
        replica.register_buffer(name, buffer.to(random.device, random.dtype))
    return replica


def _run_stubs(module: nn.Module, forward: compare.Forward, x: Any) -> tuple[Any, list[int]]:
    """Returns the result of a layer, and how many results of each stub its forward takes."""
    stubs = [child for child in module.children() if isinstance(child, _Stub)]
    given = dict.fromkeys(arguments.of(stock_class(module)).names[1:], 1.0)
    refused: Exception | None = None
    for results in itertools.product(*(stub.choices for stub in stubs)):
        for stub, count in zip(stubs, results, strict=True):
            stub.results, stub.given = count, []
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


class RecognisedRotary(Recognised, FusedRotary):
    """An attention layer of a class in no table. The comparison covers its rotary functions."""

    comparison = compare.Kind(
        "a rotary embedding", lambda module, random: fused_replica(module), _run_rotary
    )


class RecognisedLayer(Recognised, FusedLayer):
    """A decoder layer of a class in no table."""

    comparison = compare.Kind("a decoder layer", _layer_replica, _run_layer)
