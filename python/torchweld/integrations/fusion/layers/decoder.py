"""Runs modules of Llama-like decoders on torchweld's ops: projections, rotary, add + norm.

Each class here has the forward of one module, and :mod:`.families` makes a subclass of it and of
the transformers class that it replaces. A module reads its parameters where they are. In every call
it checks that they are plain tensors of one dtype and that no hook or other layer (LoRA, quantised)
must be called; otherwise the stock forward runs.

Norms, rotary embeddings and additions run stock while torch.compile traces: the compiler fuses them
with their neighbours, which an op of torchweld's would prevent.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.attention.fallback import NAME
from torchweld.integrations.attention.forward import attention_forward
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.stock import plain_tensors, untouched

from .arguments import parsed
from .deferred import LayerInput, Normed, computed
from .fused_module import (
    ROW,
    STOCK,
    FusedModule,
    Replacement,
    below,
    call_arguments,
    instance_refusal,
    register,
    stock_class,
    stock_forward,
)
from .layer_norm import FusedLayerNorm
from .linears import Operands, operands
from .norm import FusedNorm, Parameters
from .rms_norm import FusedRMSNorm
from .stock_modules import hooked, implementation


class Attention(NamedTuple):
    """Describes a family's attention, in fields of :class:`.Family`."""

    packed: bool
    head_norm: str | None
    interleaved: bool
    options: Callable[[Any], dict[str, Any]]


class Layer(NamedTuple):
    """Names the norms of a decoder layer."""

    # The norm of the layer's input; None if several modules get the result.
    before_attention: str | None = "input_layernorm"
    # The norm of the first residual sum (the input plus a result), or None, and the norms of later
    # sums (the sum before plus a result). A call without cross-attention gives the first sum to one
    # of the later norms.
    before_mlp: str | None = "post_attention_layernorm"
    later: tuple[str, ...] = ()

    def names(self) -> tuple[str, ...]:
        """Returns the names of all norms."""
        return *filter(None, self[:2]), *self.later


class Rotary(NamedTuple):
    """Describes how a rotary function of a model computes."""

    name: str  # the function's name in the attention layer's module
    tables: str  # the key in ``TABLES`` that converts the function's tables to the op's
    interleaved: bool  # whether a pair is two neighbours
    gathered: bool  # whether results hold the first values of all pairs, then the second
    partial: bool  # whether tables narrower than the heads rotate the first values of each head
    form: str = "q k cos sin"  # or "x cos sin unsqueeze_dim", or "xq xk freqs_cis" (complex)
    # Whether q and k are (batch, rows, heads, head_dim), or all four tensors without the batch.
    rows_first: bool = False
    casts: bool = False  # whether results have the dtype of q and k even if tables are float32


def _neighbours(table: Tensor) -> Tensor:
    """Repeats each value of a table's first half, for interleaved pairs ``(.., rotary_dim)``."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)


TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda table: table,
    "first half": _neighbours,
    "first half twice": lambda table: table[..., : table.shape[-1] // 2].repeat(1, 1, 2),
    "half as wide": lambda table: torch.cat((table, table), -1),
    "half as wide, neighbours": lambda table: table.repeat_interleave(2, -1),
}


class FusedRotary(FusedModule):
    """An attention layer whose stock forward calls :func:`torchweld.rotary` as its functions.

    ``hidden_states`` may be a deferred norm, :class:`Normed`.
    """

    kind = op = "rotary"
    running: ClassVar[nn.Module | None] = None  # the layer whose calls are recorded

    @staticmethod
    def replacement(path: str, module: nn.Module, row: Any) -> Replacement:
        return Replacement(below(path, "rotary"), (module, "rotary"), (module,))

    @staticmethod
    def refusal(module: nn.Module, row: Any) -> str | None:
        if not getattr(module, "use_rope", True):
            return "the layer has no rotary embedding"
        return instance_refusal(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = None if torch.compiler.is_compiling() else call_arguments(self, args, kwargs)
        if given is None:
            return stock_forward(self, *args, **kwargs)
        forward = _with_rotary(stock_class(self).forward, getattr(self, ROW))
        if recorder.calls is None:
            return forward(self, **given)
        FusedRotary.running = self
        try:
            return forward(self, **given)
        finally:
            FusedRotary.running = None


@functools.cache
def _with_rotary(forward: Callable, rows: tuple[Rotary, ...]) -> Callable:
    """Returns a copy of a forward, without decorators, whose rotary functions run the op."""
    inner = inspect.unwrap(forward)
    names = {**inner.__globals__, **{row.name: rotation(inner, row) for row in rows}}
    own = types.FunctionType(
        inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__
    )
    own.__kwdefaults__ = inner.__kwdefaults__
    return own


def rotation(forward: Callable, row: Rotary) -> Callable:
    """Returns a rotary function that runs the op, or the stock function if the op can't."""
    stock = forward.__globals__[row.name]

    def runs(serves: bool) -> bool:
        if recorder.calls is not None:
            instead = f"the stock {row.name} runs: it is called with other shapes or dtypes"
            recorder.record((FusedRotary.running, "rotary"), None if serves else instead)
        return serves

    def heads_first(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Swaps the dims of rows and heads if the stock function has rows first; also back."""
        swaps = row.rows_first
        return tuple(x.transpose(1, 2) if swaps and x.dim() == 4 else x for x in tensors)

    def rotated(q: Tensor, k: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        if row.gathered:
            q, k = (x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in (q, k))
        return ops.rotary(q, k, *map(TABLES[row.tables], tables), interleaved=row.interleaved)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = row.rows_first and q.dim() == 3
        given = [x[None] for x in (q, k, cos, sin)] if packed else [q, k, cos, sin]
        given[:2] = heads_first(given[:2])
        if not runs(not args and not kwargs and _rotates(row, *given)):
            return stock(q, k, cos, sin, *args, **kwargs)
        found = heads_first(rotated(*given))
        return tuple(x[0] for x in found) if packed else found

    def rotate_single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        rows_first = unsqueeze_dim == 2
        q = x.transpose(1, 2) if rows_first and x.dim() == 4 else x
        none = q[:, :0]
        if not runs(unsqueeze_dim in (1, 2) and _rotates(row, q, none, cos, sin)):
            return stock(x, cos, sin, unsqueeze_dim=unsqueeze_dim)
        q, _ = rotated(q, none, cos, sin)
        return q.transpose(1, 2) if rows_first else q

    def rotate_complex(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        q, k = heads_first((xq, xk))
        serves = freqs_cis.is_complex() and freqs_cis.device == q.device
        if not runs(serves and _rotates(row, q, k, freqs_cis.real, freqs_cis.imag)):
            return stock(xq, xk, freqs_cis)
        return heads_first(rotated(q, k, freqs_cis.real, freqs_cis.imag))

    forms = {"x cos sin unsqueeze_dim": rotate_single, "xq xk freqs_cis": rotate_complex}
    return forms.get(row.form, rotate)


def _rotates(row: Rotary, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    # With tables of another dtype, the stock function's result may have that dtype.
    alike = (q, k) if row.casts else (q, k, cos, sin)
    if not plain_tensors(*alike) or not _are_tables((cos, sin), q):
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    width = cos.shape[-1] * (2 if row.tables.startswith("half as wide") else 1)
    fits = width == q.shape[-1] or row.partial and width < q.shape[-1]
    rows = cos.shape[1] == q.shape[2] == k.shape[2] and cos.shape[0] in (1, q.shape[0])
    return fits and rows and q.shape[-1] == k.shape[-1]


class FusedAttention(FusedRotary):
    """An attention layer whose rotary embedding is :func:`torchweld.rotary`.

    If ``hidden_states`` is a deferred norm (:class:`Normed`), one op computes the norm and the
    projections, such as :func:`torchweld.rms_norm_linears`.
    """

    needs = knows = ("hidden_states", "position_embeddings", "attention_mask", "cache")

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        given = None if torch.compiler.is_compiling() else call_arguments(self, args, kwargs)
        tables = instead = None
        if given is not None:
            row, signature = self._torchweld_row, self._torchweld_arguments
            tables = given.pop("position_embeddings", None)
            if tables is None:  # the stock forward may allow a call without tables, or not
                instead = "no rotary table is given"
            elif row.head_norm and _has_hooked_head_norm(self._modules):
                instead = "q_norm or k_norm has hooks, which would see the heads in another dim"
        if instead is not None and recorder.calls is not None:
            recorder.record((self, "rotary"), f"the stock forward runs: {instead}")
        if given is None or instead is not None:
            return stock_forward(self, *args, **kwargs)
        hidden_states, attention_mask = given["hidden_states"], given.pop("attention_mask", None)
        del given["hidden_states"]
        cache = given.pop(signature.cache, None)
        query, key, value = _projections(self, row, hidden_states)
        # NOTE: getattr takes a microsecond if a module lacks the attribute, so search its __dict__.
        own = self.__dict__
        if "use_rope" not in own or own["use_rope"]:
            if plain_tensors(query, key) and _are_tables(tables, query):
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
        # (batch, rows, nheads, head_dim)
        return self._modules["o_proj"](out.reshape(*out.shape[:2], -1)), weights


def _has_hooked_head_norm(modules: dict[str, nn.Module | None]) -> bool:
    return not untouched(modules["q_norm"], modules["k_norm"]) or _has_any_global_hook()


def _stock_module(attn: nn.Module) -> Any:
    """Returns the Python module of transformers that defines an attention layer's class."""
    return sys.modules[getattr(attn, STOCK).__module__]


_ATTENTION = ("self_attn", "attention", "attn")


def attention_of(layer: nn.Module) -> nn.Module | None:
    """Returns the self-attention of a decoder layer, or None."""
    modules = layer._modules
    for name in _ATTENTION:
        if name in modules:
            return modules[name]
    return None


def projection_layers(attn: nn.Module, row: Any) -> dict[str, nn.Module]:
    """Returns the layers that project an attention layer's input, by name."""
    if type(row) is Attention:
        names = ("qkv_proj",) if row.packed else ("q_proj", "k_proj", "v_proj")
    else:
        names = [
            name
            for name, wanted in _projecting(stock_class(attn).forward)
            if not wanted or all(each.holds(attn) for each in wanted)
        ]
    modules = attn._modules
    return {name: modules[name] for name in names if name in modules and modules[name] is not None}


class _Condition(NamedTuple):
    """A condition on an attribute of a module: None or not, or true or false."""

    name: str
    none: bool
    value: bool

    def holds(self, attn: nn.Module) -> bool:
        found = getattr(attn, self.name)
        return (found is None if self.none else bool(found)) is self.value


_FLAG = re.compile(r"self\.(\w+)( is( not)? None)?")
# The statement that chooses the input of keys: another sequence's rows or the layer's input.
_ALIAS = re.compile(r"(\w+) = \w+ if (?:is_cross_attention|\w+ is not None) else (\w+)")


@functools.cache
def _projecting(forward: Callable) -> list[tuple[str, tuple[_Condition, ...]]]:
    """Returns the names of the layers that every call of a forward applies to its input.

    Each name has the conditions on attributes under which that is so. Cross-attention is left out.
    """
    tree = parsed(forward)
    if tree is None:
        return []
    function = tree.body[0]
    names = [each.arg for each in getattr(function, "args", ast.arguments(args=[])).args[1:2]]
    return _projecting_of(function.body, names)


def _projecting_of(
    body: list[ast.stmt], inputs: list[str], wanted: tuple[_Condition, ...] = ()
) -> list[tuple[str, tuple[_Condition, ...]]]:
    found: list[tuple[str, tuple[_Condition, ...]]] = []
    for statement in body:
        if not inputs:
            break
        # NOTE: a layer that only some calls need would get a gradient of zeros in place of None, so
        # other branches are left out. q_lora_rank is of the config: no call changes the branch.
        test = ast.unparse(statement.test) if hasattr(statement, "test") else "q_lora_rank"
        if "q_lora_rank" in test:
            called = rf"self\.(\w+)\((?:{'|'.join(inputs)})\)"
            found += [(name, wanted) for name in re.findall(called, ast.unparse(statement))]
        elif isinstance(statement, ast.If) and test.startswith("is_cross_attention"):
            found += _projecting_of(statement.orelse, inputs, wanted)
        elif isinstance(statement, ast.If) and (flag := _FLAG.fullmatch(test)):
            for value, branch in ((True, statement.body), (False, statement.orelse)):
                condition = _Condition(flag[1], bool(flag[2]), value != bool(flag[3]))
                found += _projecting_of(branch, inputs, (*wanted, condition))
        names = (n for n in ast.walk(statement) if isinstance(n, ast.Name))
        stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        alias = _ALIAS.fullmatch(ast.unparse(statement))
        if alias is not None and alias[2] in inputs:
            inputs = [*inputs, alias[1]]
        else:
            inputs = [name for name in inputs if name not in stored]
    return found


def _projections(
    attn: nn.Module, row: Attention, x: Tensor | Normed
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key and value ``(batch, nheads, seqlen, head_dim)`` after their norms."""
    if type(x) is Normed and x.norm is not None:
        projected, x = x.linears(), x.x
    else:
        x = computed(x)
        projected = [layer(x) for layer in projection_layers(attn, row).values()]
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


def _are_tables(tables: Iterable[Tensor], query: Tensor) -> bool:
    dtypes = (query.dtype, torch.float32)
    for table in tables:
        if type(table) is not Tensor or table.dtype not in dtypes or table.requires_grad:
            return False
    return True


class FusedLayer(FusedModule):
    """A decoder layer that adds its attention's result and normalises the sum in one op.

    Another op computes the norm of the layer's input and the projections of its attention. The
    stock forward runs on a :class:`LayerInput`, which leaves the sum and the norm to these ops.
    """

    kind = "norm"

    @staticmethod
    def replacement(path: str, module: nn.Module, row: Layer) -> Replacement:
        name = row.before_mlp or row.before_attention
        norm = module._modules[name]
        key = (norm, "add") if row.before_mlp else norm
        return Replacement(below(path, name), key, (module, norm))

    @staticmethod
    def label(module: nn.Module, row: Layer) -> str:
        if row.before_mlp is None:
            return _op(module, row)
        return f"add_{_op(module, row)} (residual -> {row.before_mlp})"

    @staticmethod
    def probe(module: nn.Module, row: Layer, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal(f"add_{_op(module, row)}", weight)

    @staticmethod
    def refusal(module: nn.Module, row: Layer) -> str | None:
        if hooked(module._modules[row.before_mlp or row.before_attention]):
            return "it has hooks, which would see other values"
        return instance_refusal(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        row: Layer | None = getattr(self, ROW, None)
        if row is None or torch.compiler.is_compiling() or _has_any_global_hook():
            return stock_forward(self, *args, **kwargs)
        name = self._torchweld_arguments.names[0]
        x = args[0] if args else kwargs.get(name)
        norms = _norms_of(self, row, x)
        if not norms:
            return stock_forward(self, *args, **kwargs)
        (first, *_), projections = norms, None
        if first is self._modules.get(row.before_attention):
            projections = _projections_of(attention_of(self), x)
        given = {} if projections is None else {first: projections}
        x = LayerInput(x, norms, given, 1 + len(row.later))
        if args:
            args = (x, *args[1:])
        else:
            kwargs[name] = x
        out = stock_forward(self, *args, **kwargs)
        if type(out) is Tensor:
            return out
        return tuple(map(computed, out)) if isinstance(out, tuple) else computed(out)


def _op(layer: nn.Module, row: Layer) -> str:
    """Returns the op of a layer's norm."""
    norm = layer._modules[row.before_mlp or row.before_attention]
    in_table = FusedLayerNorm if isinstance(norm, nn.LayerNorm) else FusedRMSNorm
    parent, _ = register(stock_class(norm)) or (in_table, None)
    return parent.op


def _norms_of(layer: nn.Module, row: Layer, x: Any) -> dict[nn.Module, Parameters]:
    """Returns the norms of a layer that can run an op on its input x, with their parameters."""
    found: dict[nn.Module, Parameters] = {}
    modules = layer._modules
    norms = [modules[name] for name in (*row[:2], *row.later) if name in modules]
    if type(x) is not Tensor or None in norms or not untouched(*norms):
        return found
    for norm in norms:
        tensors = norm.operands(x) if isinstance(norm, FusedNorm) else None
        if tensors is not None and tensors[0] is x:
            found[norm] = tensors[1:]
    return found


def _projections_of(attn: nn.Module | None, x: Tensor) -> Operands | None:
    """Returns the projections that one op can compute with the norm of x, or None."""
    # transformers' recorders don't count: they see only the attention's results.
    if attn is None or hooked(attn, calls_recorders=True):
        return None
    # NOTE: a module that lacks an attribute takes the host two microseconds to say so.
    layers = projection_layers(attn, getattr(type(attn), ROW, None))
    found = operands([*layers.values()], x) if layers else None
    sharded = found is not None and found.mesh is not None
    return None if sharded and not isinstance(attn, FusedAttention) else found
