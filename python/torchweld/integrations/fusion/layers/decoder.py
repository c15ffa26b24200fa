"""Modules of Llama-like decoders on torchweld's ops: norms, projections, rotary, add + norm.

Each class here has the forward of one module, and :mod:`.families` joins it with the class of
transformers that it replaces. A module reads its parameters where they are. It asks in every call
whether they are plain tensors of one dtype and whether a hook or another layer (LoRA, quantised)
wants to be called instead; then the stock forward runs.

Norms, rotary embeddings and additions run stock while torch.compile traces: the compiler joins them
with their neighbours, and an op of its own would stand between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_map
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.attention.fallback import NAME
from torchweld.integrations.attention.forward import attention_forward
from torchweld.integrations.fusion.probes import Probes

from .fused_module import (
    ARGUMENTS,
    ROW,
    STOCK,
    FusedModule,
    Replacement,
    below,
    call_arguments,
    instance_refusal,
    is_fused,
    plain_tensors,
    stock_forward,
)
from .linears import copied, operands
from .stock_modules import hooked, implementation


class Norm(NamedTuple):
    """The attributes of a family's RMSNorm."""

    eps: str
    weight_offset: float


class Attention(NamedTuple):
    """The attributes of a family's attention."""

    packed: bool
    head_norm: str | None
    interleaved: bool
    options: Callable[[Any], dict[str, Any]]


class Layer(NamedTuple):
    """The norms of a decoder layer: of its input, and of the first sum of input and result."""

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"


class Deferred:
    """A tensor of a stock forward that an op computes together with another.

    Any other use than by this op computes it first.
    """

    __slots__ = ()

    def tensor(self) -> Tensor:
        """The value."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.add and not kwargs:  # x + self
            return args[1] + args[0]
        args, kwargs = tree_map(computed, (args, kwargs or {}))
        return func(*args, **kwargs)


def _operator(name: str) -> Callable:
    return lambda self, *args: getattr(self.tensor(), name)(*map(computed, args))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "neg", "getitem"):
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))


def computed(value: Any) -> Any:
    """The tensor of a deferred value; other values as they are."""
    return value.tensor() if isinstance(value, Deferred) else value


class LayerInput(Deferred):
    """The input of a decoder layer: a norm computes its sum with a result, and an attention layer
    its norm if ``projects`` is true.
    """

    __slots__ = ("projects", "x")

    def __init__(self, x: Tensor, projects: bool) -> None:
        self.x, self.projects = x, projects

    def tensor(self) -> Tensor:
        return self.x

    def __add__(self, h: Any) -> Any:
        same = plain_tensors(self.x, h) and h.shape == self.x.shape
        return Sum(h, self.x) if same else self.x + computed(h)

    __radd__ = __add__


class Sum(Deferred):
    """``h + x``, which :func:`torchweld.add_rms_norm` computes."""

    __slots__ = ("h", "x")

    def __init__(self, h: Tensor, x: Tensor) -> None:
        self.h, self.x = h, x

    def tensor(self) -> Tensor:
        if self.h is not None:
            self.h, self.x = None, self.x + self.h
        return self.x


class Normed(Deferred):
    """``norm(x)``, which :func:`torchweld.rms_norm_linears` computes."""

    __slots__ = ("norm", "x")

    def __init__(self, norm: nn.Module, x: Tensor) -> None:
        self.norm, self.x = norm, x

    def tensor(self) -> Tensor:
        if self.norm is not None:
            self.norm, self.x = None, self.norm(self.x)
        return self.x


class FusedNorm(FusedModule):
    """An RMSNorm as :func:`torchweld.rms_norm`."""

    kind = "norm"

    @staticmethod
    def label(module: nn.Module, row: Norm) -> str:
        return "rms_norm"

    @staticmethod
    def probe(module: nn.Module, row: Norm, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal("rms_norm", weight) or probes.refusal("rms_norm_linears", weight)

    @staticmethod
    def refusal(module: nn.Module, row: Norm) -> str | None:
        if module.weight.dtype == torch.float64:
            return "it is float64, of which the stock norm computes in float32"
        return instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: Norm) -> dict[str, Tensor | None]:
        return {"weight": module.weight}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs:
            return stock_forward(self, *args, **kwargs)
        (x,) = args
        if type(x) is Sum and x.h is not None and _runs_norm(self, x.x):
            if recorder.calls is not None:
                recorder.record((self, "add"))
            h, x.h = x.h, None
            h, x.x = ops.add_rms_norm(h, x.x, self.weight, **_options(self))
            return h
        if type(x) is LayerInput and x.projects:
            return Normed(self, x.x)
        x = computed(x)
        if not _runs_norm(self, x):
            return stock_forward(self, x)
        if recorder.calls is not None:
            recorder.record(self)
        return ops.rms_norm(x, self.weight, **_options(self))


def _options(norm: nn.Module) -> dict[str, float]:
    """Returns the options that a fused norm passes to its op."""
    row: Norm = getattr(norm, ROW)
    return {"eps": getattr(norm, row.eps), "weight_offset": row.weight_offset}


def _runs_norm(norm: nn.Module, x: Any) -> bool:
    # The stock norms compute in fp32 even if x is float64, and the op computes in float64. The
    # results would differ visibly.
    serves = is_fused(norm) and isinstance(x, Tensor) and plain_tensors(x, norm.weight)
    return serves and x.dtype != torch.float64 and not torch.compiler.is_compiling()


class FusedAttention(FusedModule):
    """An attention layer whose rotary embedding is :func:`torchweld.rotary`.

    Where ``hidden_states`` is :class:`Normed`, the op that projects it normalises it,
    :func:`torchweld.rms_norm_linears`.
    """

    kind = "rotary"
    needs = knows = ("hidden_states", "position_embeddings", "attention_mask", "cache")

    @staticmethod
    def replacement(path: str, module: nn.Module, row: Attention) -> Replacement:
        return Replacement(below(path, "rotary"), (module, "rotary"), (module,))

    @staticmethod
    def label(module: nn.Module, row: Attention) -> str:
        return "rotary"

    @staticmethod
    def probe(module: nn.Module, row: Attention, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal("rotary", weight)

    @staticmethod
    def refusal(module: nn.Module, row: Attention) -> str | None:
        if not getattr(module, "use_rope", True):
            return "the layer has no rotary embedding"
        return instance_refusal(module)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = None if torch.compiler.is_compiling() else call_arguments(self, args, kwargs)
        if given is not None and given.get("position_embeddings") is None:
            given = None  # whether the stock forward allows that is not known
            if recorder.calls is not None:
                instead = "the stock forward runs: no rotary table is given"
                recorder.record((self, "rotary"), instead)
        if given is None:
            return stock_forward(self, *args, **kwargs)
        row, signature = getattr(self, ROW), getattr(self, ARGUMENTS)
        hidden_states, tables = given.pop("hidden_states"), given.pop("position_embeddings")
        attention_mask = given.pop("attention_mask", None)
        cache = given.pop(signature.cache, None)
        norm = None
        if isinstance(hidden_states, Normed):
            norm, hidden_states = hidden_states.norm, hidden_states.x
        query, key, value = _projections(self, row, hidden_states, norm)
        # NOTE: getattr with a default takes a microsecond where a module has no such attribute.
        if vars(self).get("use_rope", True):
            cos, sin = tables
            if plain_tensors(query, key) and _is_table(cos, query) and _is_table(sin, query):
                if row.interleaved:
                    tables = [_neighbours(table) for table in tables]
                query, key = ops.rotary(query, key, *tables, interleaved=row.interleaved)
                if recorder.calls is not None:
                    recorder.record((self, "rotary"))
            else:
                query, key = _stock_module(self).apply_rotary_pos_emb(query, key, *tables)
        if cache is not None:
            key, value = signature.update(cache, key, value, self.layer_idx, given)
        name, function = implementation(self.config), attention_forward
        if name != NAME:
            eager = _stock_module(self).eager_attention_forward
            function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        out, weights = function(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **row.options(self),
            **given,
        )
        out = out.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.o_proj(out), weights


def _stock_module(attn: nn.Module) -> Any:
    """The module of transformers that has the functions of an attention layer."""
    return sys.modules[getattr(attn, STOCK).__module__]


def projection_layers(attn: nn.Module, row: Attention) -> dict[str, nn.Module]:
    """The layers that make query, key and value, by name."""
    names = ("qkv_proj",) if row.packed else ("q_proj", "k_proj", "v_proj")
    return {name: attn._modules[name] for name in names}


def _projections(
    attn: nn.Module, row: Attention, x: Tensor, norm: nn.Module | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value ``(batch, nheads, seqlen, head_dim)``, normalised where they are."""
    layers = list(projection_layers(attn, row).values())
    found = None
    if norm is not None and _runs_norm(norm, x):
        found = operands(layers, x)
    if found is None or len({bias is None for bias in found.biases}) > 1:
        x = x if norm is None else norm(x)
        projected = [layer(x) for layer in layers]
    else:
        if recorder.calls is not None:
            recorder.record(norm)
        biases = [] if found.biases[0] is None else found.biases
        rows, scale = copied(found.mesh, x, norm.weight)
        projected = ops.rms_norm_linears(rows, found.weights, biases, scale, **_options(norm))
    if row.packed:
        heads, heads_k = attn.config.num_attention_heads, attn.num_key_value_heads
        sizes = [count * attn.head_dim for count in (heads, heads_k, heads_k)]
        projected = projected[0].split(sizes, -1)
    query, key, value = projected
    if row.head_norm == "row":
        query, key = attn.q_norm(query), attn.k_norm(key)
    batch, rows, _ = x.shape
    # With one row the heads need no transpose: a step of generation waits for the host.
    shape = (batch, rows, -1, attn.head_dim) if rows > 1 else (batch, -1, 1, attn.head_dim)
    query, key, value = query.view(shape), key.view(shape), value.view(shape)
    if row.head_norm == "head":
        query, key = attn.q_norm(query), attn.k_norm(key)
    if rows == 1:
        return query, key, value
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _is_table(table: Tensor, query: Tensor) -> bool:
    dtypes = (query.dtype, torch.float32)
    return type(table) is Tensor and table.dtype in dtypes and not table.requires_grad


def _neighbours(table: Tensor) -> Tensor:
    """A table of interleaved pairs ``(.., rotary_dim)`` from one whose first half has each once."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)


class FusedLayer(FusedModule):
    """A decoder layer that adds its attention's result and normalises the sum in one op.

    The stock forward runs, on an input that defers its sum and its norm.
    """

    kind = "norm"

    @staticmethod
    def replacement(path: str, module: nn.Module, row: Layer) -> Replacement:
        norm = getattr(module, row.before_mlp)
        return Replacement(below(path, row.before_mlp), (norm, "add"), (module, norm))

    @staticmethod
    def label(module: nn.Module, row: Layer) -> str:
        return f"add_rms_norm (residual -> {row.before_mlp})"

    @staticmethod
    def probe(module: nn.Module, row: Layer, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal("add_rms_norm", weight)

    @staticmethod
    def refusal(module: nn.Module, row: Layer) -> str | None:
        norm = getattr(module, row.before_mlp)
        if hooked(norm):
            return "it has hooks, which would see other values"
        reason = FusedNorm.refusal(norm, None)
        return reason or instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: Layer) -> dict[str, Tensor | None]:
        return {"weight": getattr(module, row.before_mlp).weight}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get(getattr(self, ARGUMENTS).names[0])
        if torch.compiler.is_compiling() or _has_any_global_hook() or not _defers(self, x):
            return stock_forward(self, *args, **kwargs)
        attn = self._modules.get("self_attn")
        # Recorders of transformers see the attention's results alone.
        projects = isinstance(attn, FusedAttention) and not hooked(attn, calls_recorders=True)
        x = LayerInput(x, projects)
        if args:
            args = (x, *args[1:])
        else:
            kwargs[getattr(self, ARGUMENTS).names[0]] = x
        out = stock_forward(self, *args, **kwargs)
        return tuple(map(computed, out)) if isinstance(out, tuple) else computed(out)


def _defers(layer: nn.Module, x: Any) -> bool:
    """Whether the norms of a layer take its input x deferred."""
    row = getattr(layer, ROW, None)
    norms = [] if row is None else [layer._modules.get(name) for name in row]
    known = norms and all(norm is not None and not hooked(norm) for norm in norms)
    return known and type(x) is Tensor and _runs_norm(norms[-1], x)
