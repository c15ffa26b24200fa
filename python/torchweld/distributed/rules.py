"""Sharding rules of the ops for torch.distributed.tensor: which placements of the arguments give
which placements of the results, so that each process calls the op on its own shards.

A rule lists rows. A row names the results and arguments that are not replicated along one mesh
dim; "all replicated" is always there and not listed. torch combines the rows of all mesh dims,
takes the cheapest combination, and redistributes arguments that are placed otherwise.

torch does not redistribute keyword arguments, nor strided shards. Only combinations that take them
as they are placed are offered; without one the call is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from torchweld.distributed.conv1d_rules import CONV1D_RULES
from torchweld.distributed.linears_rules import LINEARS_RULES
from torchweld.distributed.loss_rules import LOSS_RULES
from torchweld.distributed.norm_rules import NORM_RULES
from torchweld.distributed.pair_rules import PAIR_RULES
from torchweld.distributed.rotary_rules import ROTARY_RULES
from torchweld.distributed.rows import (
    OF_NORM,
    Call,
    Row,
    Rule,
    all_of,
    partial,
    returns_list,
    shard,
)
from torchweld.info import public_op

# Names of arguments and results that have the leading dims of x.
_ROWS = ("x", "dy", "dx", "result", "y", "preact", "z", "mean", "rstd")
# Names of parameter gradients; a shard of the rows has a partial sum of each.
_PARAMETERS = ("dweight", "dbias", "dln_weight", "dln_bias", "dnorm_weight")
# Names of tensors of shape (batch, nheads or nheads_kv, ...).
_HEADS = ("query", "key", "value", "scores", "out", "lse", "y", "result")
_KEYS = ("key", "value")


def _with_gradients(names: Sequence[str], placement: Any) -> Row:
    """A row with one placement for the named tensors and their gradients."""
    return all_of([*names, *("d" + name for name in names)], placement)


def _leading(call: Call) -> list[Row]:
    """Rows that shard batch or sequence dims of x."""
    dims = len(call.shape("x" if call.has("x") else "dy")) - 1
    shared = all_of(_PARAMETERS, partial())
    return [{**shared, **all_of(_ROWS, shard(d))} for d in range(dims)]


def _columns(call: Call, weights: Sequence[str], cut: Any = None) -> Row:
    """A row that shards the columns of the result; dx and the norm's gradients are partial sums.

    `cut(dim)` gives the placement of tensors that hold both halves of a gate.
    """
    last = len(call.shape("x" if call.has("x") else "dy")) - 1
    cut = cut or shard
    return {
        **all_of((*weights, "dweight", "dbias"), cut(0)),
        **all_of(("dy", "result", "y"), shard(last)),
        **all_of(("preact", "z"), cut(last)),
        **all_of(("dx", *OF_NORM), partial()),
    }


def _linear(call: Call) -> list[Row]:
    rows = [*_leading(call), _columns(call, ("weight", "bias"))]
    if call.values["activation"] == "none":
        # A row that shards the columns of x. The bias is Partial, so that the sum over the
        # processes contains the bias once.
        last = shard(len(call.shape("x")) - 1)
        sums = all_of(("result", "y", "bias"), partial())
        weights = all_of(("weight", "dweight"), shard(1))
        rows.append({**sums, **weights, **all_of(("x", "dx"), last)})
    return rows


def _norm_linear(call: Call) -> list[Row]:
    return [*_leading(call), _columns(call, ("weight", "bias"))]


def _gated_linear(call: Call) -> list[Row]:
    # Unless the weight is interleaved, its first half belongs to one branch and its second half to
    # the other. A process needs the same columns of both halves, which Shard(0) does not give it.
    from torch.distributed.tensor.placement_types import _StridedShard

    cut = None if call.values["interleaved"] else lambda dim: _StridedShard(dim, split_factor=2)
    return [*_leading(call), _columns(call, ("weight", "bias"), cut)]


def _folded(call: Call) -> list[Row]:
    return [*_leading(call), _columns(call, ("folded_weight", "weight_sum", "folded_bias"))]


def _fold(call: Call) -> list[Row]:
    columns = all_of(("weight", "bias", "folded_weight", "weight_sum", "folded_bias"), shard(0))
    inputs = all_of(("weight", "folded_weight"), shard(1))
    inputs |= all_of(("ln_weight", "ln_bias"), shard(0))
    return [columns, {**inputs, **all_of(("bias", "weight_sum", "folded_bias"), partial())}]


def _int4(call: Call) -> list[Row]:
    return [*_leading(call), _columns(call, ("qweight", "scale", "zero", "bias"))]


def _every_leading(call: Call) -> list[Row]:
    """Rows of ops whose tensors all have the same leading dims."""
    name = next(iter(call.specs))
    return [
        all_of((*call.specs, *call.results), shard(d)) for d in range(len(call.shape(name)) - 1)
    ]


def _batch(call: Call) -> Row:
    batch = _with_gradients(_HEADS, shard(0))
    return {**batch, **all_of(("leftpad", "key_start", "key_end"), shard(0)), "dsink": partial()}


def _attention(call: Call) -> list[Row]:
    if call.has("dropout_seed"):
        return []  # which probabilities are dropped depends on their places in the whole tensor
    heads = {**_with_gradients(_HEADS, shard(1)), **all_of(("sink", "dsink"), shard(0))}
    rows = [_batch(call), heads]
    values = call.values
    row_ends = call.has("key_end") and len(call.shape("key_end")) == 2
    if row_ends or not (values["causal"] or values["window"] or call.has("leftpad")):
        # No mask of the call depends on the index of a query row, so query rows can be sharded.
        queries = _with_gradients([n for n in _HEADS if n not in _KEYS], shard(2))
        queries |= {**all_of(("dkey", "dvalue", "dsink"), partial()), "key_start": shard(1)}
        rows.append({**queries, "key_end": shard(1)} if row_ends else queries)
    return rows


def _causal_softmax(call: Call) -> list[Row]:
    dims = len(call.shape("scores" if call.has("scores") else "y"))
    rows = [_batch(call)] if dims > 2 else []
    for d in range(1, dims - 2):
        heads = _with_gradients(_HEADS, shard(d))
        if not call.has("sink"):
            rows.append(heads)
        elif dims == 4:  # scores with more than 4 dims have several batch dims that share a sink
            rows.append({**heads, **all_of(("sink", "dsink"), shard(0))})
    return rows


def _row_sum(call: Call) -> list[Row]:
    columns = {"x": shard(len(call.shape("x")) - 1), "result": partial()}
    return [*_leading(call), columns, all_of(("x", "result"), partial())]


def _add_scalar(call: Call) -> list[Row]:
    return [all_of(("x", "result"), shard(d)) for d in range(len(call.shape("x")))]


def _bmm(call: Call) -> list[Row]:
    batch: Row = all_of(("dy", "result"), shard(0))
    for name in ("a", "b"):
        one = call.shape(name)[0] == 1
        batch |= {"d" + name: partial()} if one else _with_gradients((name,), shard(0))
    rows = {**all_of(("a", "da", "dy", "result"), shard(1)), "db": partial()}
    columns = {**all_of(("b", "db", "dy", "result"), shard(2)), "da": partial()}
    inner = {**_with_gradients(("a",), shard(2)), **_with_gradients(("b",), shard(1))}
    return [batch, rows, columns, {**inner, "result": partial()}]


def _outer(call: Call) -> list[Row]:
    rows = {**_with_gradients(("y",), shard(0)), **all_of(("dz", "result"), shard(0))}
    columns = {**_with_gradients(("x",), shard(0)), **all_of(("dz", "result"), shard(1))}
    return [{**rows, "dx": partial()}, {**columns, "dy": partial()}]


def _mul_relu(call: Call) -> list[Row]:
    rows = all_of(("x", "y", "dx", "dy", "dz", "result"), shard(0))
    columns = all_of(("x", "dx", "dz", "result"), shard(1))
    return [rows, {**columns, "dy": partial()}]


def _conv2d(call: Call) -> list[Row]:
    return [{**all_of(("x", "dx", "dz", "result"), shard(0)), "dweight": partial()}]


def _replicated(call: Call) -> list[Row]:
    return []


# The rule of an op is also the rule of <op>_forward and of <op>_backward without one of its own.
_RULES: dict[str, Rule] = {
    **LINEARS_RULES,
    **CONV1D_RULES,
    **LOSS_RULES,
    **NORM_RULES,
    **PAIR_RULES,
    **ROTARY_RULES,
    "linear": _linear,
    "layer_norm_linear": _norm_linear,
    "rms_norm_linear": _norm_linear,
    "gated_linear": _gated_linear,
    "scalar_attention": _replicated,  # q, k and v have the same length n
    "attention": _attention,
    "attention_with_lse": _attention,
    "softmax_matmul": _attention,
    "causal_softmax": _causal_softmax,
    "folded_layer_norm_linear": _folded,
    "fold_layer_norm": _fold,
    "int4_linear": _int4,
    # A row of the repacked layout belongs to several output columns, so it can't be sharded by
    # columns. Shard the weight first and repack the shards.
    "int4_linear_repacked": _leading,
    "int4_repack": _replicated,
    "int4_pack": _every_leading,
    "int4_unpack": _every_leading,
    "softmax": _every_leading,
    "row_sum": _row_sum,
    "add_scalar": _add_scalar,
    "bmm": _bmm,
    "outer_add": _outer,
    "outer_mul_relu": _outer,
    "mul_relu": _mul_relu,
    "conv2d": _conv2d,
}


def rule_of(op: str) -> Rule | None:
    """Returns the rule of an op, or None if the op takes no DTensors."""
    return _RULES.get(op, _RULES.get(public_op(op)))


def _divided(call: Call) -> tuple[str, int, int] | None:
    """An argument, a dim of it and the size that the shards of that dim must divide."""
    if call.has("key") and call.shape("key")[1] != call.shape("query")[1]:
        return (
            "key",
            1,
            call.shape("key")[1],
        )  # a shard must contain all query heads of its key heads
    if call.has("down") and call.has("gate_up"):
        dim = 1 if call.values["transposed"] else 2
        return "down", dim, call.shape("down")[dim]  # a shard must have whole pairs of z's halves
    if "interleaved" in call.values and call.has("weight"):
        return (
            "weight",
            0,
            call.shape("weight")[0] // 2,
        )  # a shard must not split an interleaved pair of rows
    return None


def _placed(placements: Sequence[Any]) -> str:
    text = ", ".join(map(str, placements))
    return f"({text},)" if len(placements) == 1 else f"({text})"


def _strategy(rule: Rule) -> Callable[[Any], Any]:
    """Converts a rule to torch's op strategy: combinations of rows for the placements of a call."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._op_schema import OpStrategy
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy
    from torch.distributed.tensor.placement_types import _StridedShard

    def strategy(schema: Any) -> Any:
        call = Call(schema)
        mesh = schema.get_mesh_from_args()
        rows = [{}, *rule(call)]
        names = list(call.specs)
        left_out = {name for name in call.results if call.leaves_out(name)}

        def placement(row: Row, name: str, result: bool) -> Any:
            return Replicate() if result and name in left_out else row.get(name, Replicate())

        lists = [
            [
                *(placement(row, name, True) for name in call.results),
                *(placement(row, name, False) for name in names),
            ]
            for row in rows
        ]
        every = expand_to_full_mesh_op_strategy(
            mesh, schema, lists, input_index=len(call.results)
        ).strategies
        if returns_list(schema.op) and len(call.results) == 1:
            for each in every:  # torch has no tuple of one result
                each.output_specs = (each.output_specs,)
        divided = _divided(call)

        def fits(each: Any) -> bool:
            wanted = dict(zip(names, each.input_specs, strict=True))
            for name, spec in wanted.items():
                pairs = zip(spec.placements, call.specs[name].placements, strict=True)
                # torch can't redistribute a tensor to a strided shard from another placement.
                if any(a != b and isinstance(a, _StridedShard) for a, b in pairs):
                    return False
            if divided is None:
                return True
            name, dim, size = divided
            shards = zip(wanted[name].placements, mesh.shape, strict=True)
            return size % prod(n for p, n in shards if getattr(p, "dim", None) == dim) == 0

        every = [each for each in every if fits(each)]
        for i, name in enumerate(names):
            now = call.specs[name].placements
            strided = any(isinstance(p, _StridedShard) for p in now)
            if name in call.keywords or strided:
                offered = {each.input_specs[i].placements for each in every}
                every = [each for each in every if each.input_specs[i].placements == now]
                if not every:
                    move = f"use {name}.redistribute(placements=...)"
                    fix = "shard the whole tensor anew" if strided else move
                    listed = " or ".join(sorted(map(_placed, offered)))
                    raise RuntimeError(
                        f"{call.name}: {name} must be placed {listed} beside the other arguments, "
                        f"but got {_placed(now)}; {fix}"
                    )
        return OpStrategy(every)

    return strategy


def install(ops: Sequence[str]) -> None:
    """Registers the rules of the ops with DTensor, if torch was built with torch.distributed."""
    if not torch.distributed.is_available():
        return
    # These names of torch are private. If torch moves them, importing torchweld must still work.
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

        try:
            from torch.distributed.tensor._ops.utils import register_op_strategy
        except ImportError:
            from torch.distributed.tensor._ops.registration import register_op_strategy
        strategies = {name: _strategy(rule_of(name)) for name in filter(rule_of, ops)}
    except ImportError as error:
        warnings.warn(
            f"torchweld's ops take no DTensors under torch {torch.__version__}: {error}",
            stacklevel=2,
        )
        return
    for name, strategy in strategies.items():
        op = getattr(torch.ops.torchweld, name).default
        keywords = [a.name for a in op._schema.arguments if a.kwarg_only]
        # torch caches placements by the arguments listed here. All arguments are listed, including
        # those that are None. Otherwise a call with ln_weight could get the placements of a call
        # with bias.
        info = RuntimeSchemaInfo(
            static_argnum=0, static_kwargkey=keywords, needs_pytree=returns_list(op)
        )
        register_op_strategy(op, schema_info=info)(strategy)
