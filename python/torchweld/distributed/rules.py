"""Sharding rules of the ops for torch.distributed.tensor: which placements of the arguments give
which placements of the results, so that each process calls the op on its own shards.

A rule names the dims of the op's tensors by letters, as einsum does. A row of placements shards the
tensors that have one letter along one mesh dim: the others are replicated, and the gradients among
them are sums over the shards. "All replicated" is always a row. torch combines the rows of all mesh
dims, takes the cheapest combination, and redistributes arguments that are placed otherwise.

torch does not redistribute keyword arguments, nor strided shards. Only combinations that take them
as they are placed are offered; without one the call is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from torchweld.info import public_op

Row = dict[str, Any]  # the placements of arguments and results that are not replicated

# Names of the gradients of a norm's parameters.
OF_NORM = ("dln_weight", "dln_bias", "dnorm_weight")


class Call:
    """The arguments of a call by name: specs of tensors, values of the others."""

    def __init__(self, schema: Any) -> None:
        from torch.distributed.tensor._op_schema import OpStrategy, TupleStrategy

        arguments = schema.op._schema.arguments
        given = dict(zip((a.name for a in arguments), schema.args_schema, strict=False))
        given.update(schema.kwargs_schema)
        defaults = {a.name: a.default_value for a in arguments}
        # torch's order, which the specs must have: positional arguments, then keyword arguments in
        # the order of the call.
        tensors: dict[str, OpStrategy] = {}
        for name, value in given.items():
            if isinstance(value, OpStrategy):
                tensors[name] = value
            elif isinstance(value, TupleStrategy):
                tensors |= {f"{name}[{i}]": child for i, child in enumerate(value.children)}
        self.specs = {name: value.strategies[0].output_spec for name, value in tensors.items()}
        self.keywords = [name for name in schema.kwargs_schema if name in self.specs]
        self.values = {**defaults, **given}
        self.results = results_of(schema.op, len(self.listed("weights")))
        self.name = schema.op._schema.name

    def has(self, name: str) -> bool:
        return name in self.specs

    def listed(self, name: str) -> list[str]:
        """Returns the names of a list's tensors."""
        return [each for each in self.specs if each.startswith(name + "[")]

    def shape(self, name: str) -> Sequence[int]:
        return self.specs[name].shape

    def leaves_out(self, result: str) -> bool:
        """Whether the result is (0,), because it was not requested."""
        if result == "preact":
            return self.values["activation"] in ("none", "relu")
        if result in (*OF_NORM, "dsink") and not self.has(result.removeprefix("d")):
            return True
        if result == "dbias" and "bias_requires_grad" in self.values:
            return not (self.has("bias") and self.values["bias_requires_grad"])
        if result == "dweight" and "weight" in self.values and not self.has("weight"):
            return True
        if result in ("entropy", "row_entropy"):
            return not self.values["entropy"]
        if result == "mean" and "mean" in self.values:
            return not self.values["mean"]
        if result in ("y", "factor") and self.values.get("keep") == "nothing":
            return True
        mask = self.values.get("output_mask")
        if mask is None or not result.startswith("d"):
            return False
        names = (name.partition("[")[0] for name in self.results if name.startswith("d"))
        return not mask[list(dict.fromkeys(names)).index(result.partition("[")[0])]


def results_of(op: Any, weights: int = 0) -> list[str]:
    """Lists the names that rows use for an op's results; `weights` is the number of weights."""
    name, returns = op._schema.name, op._schema.returns
    unnamed = "dx" if name.endswith("_backward") else "result"
    if not returns_list(op):
        return [r.name or unnamed for r in returns]

    def each(name: str) -> list[str]:
        return [f"{name}[{i}]" for i in range(weights)]

    centred = "layer_norm" in name
    if name.endswith("_backward"):
        vectors = ["dln_weight", "dln_bias"] if centred else ["dnorm_weight"]
        return ["dx", *each("dweights"), *each("dbiases"), *vectors]
    statistics = ["mean", "rstd"] if centred else ["rstd"]
    return [*each("ys"), *(statistics if name.endswith("_forward") else [])]


def returns_list(op: Any) -> bool:
    """Whether an op returns a list of tensors."""
    return [str(r.type) for r in op._schema.returns] == ["List[Tensor]"]


class Dims(NamedTuple):
    """The dims of an op's tensors, and those that may be sharded."""

    # "x *k, weight nk" gives arguments and results a letter per dim. `*` stands for all leading
    # dims, a capital for a dim with both halves of a gate. The gradient dx has the letters of x.
    tensors: str
    sharded: str  # words, each a Row: "hg" shards every dim h or g; `*` is a Row per leading dim
    # For a word of `sharded`: the tensors that, without a dim of its letters, become Partial: sums
    # over the shards. By default the gradients.
    sums: dict[str, str] = {}

    def rows(self, call: Call) -> Iterator[Row]:
        letters: dict[str, str] = {}
        for text in self.tensors.split(", "):
            *names, dims = text.split()
            letters |= dict.fromkeys(names, dims)
        letters = {"d" + name: dims for name, dims in letters.items()} | letters
        known = ((letters.get(name, ""), len(call.shape(name))) for name in call.specs)
        leading = next((n - len(dims) + 1 for dims, n in known if "*" in dims), 0)
        for word in self.sharded.split():
            for dim in range(leading) if word == "*" else (leading - 1,):
                yield self._row(call, letters, word, dim)

    def _row(self, call: Call, letters: dict[str, str], word: str, leading_dim: int) -> Row:
        """Makes the row of a word of `sharded`.

        `leading_dim` is the dim that `*` stands for; for other words, the last leading dim.
        """
        from torch.distributed.tensor import Partial, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        gradients = " ".join(name for name in call.results if name.startswith("d"))
        sums = self.sums.get(word, gradients).split()
        row: Row = {}
        for name in (*call.specs, *call.results):
            dims = letters.get(name.partition("[")[0], "")
            place = next((i for i, each in enumerate(dims) if each.lower() in word), None)
            if place is not None:
                dim = place + (leading_dim if "*" in dims else 0)
                halves = dims[place].isupper() and not call.values.get("interleaved")
                row[name] = _StridedShard(dim, split_factor=2) if halves else Shard(dim)
            elif name in sums:
                row[name] = Partial()
        return row


_NORM = "ln_weight ln_bias norm_weight k, mean rstd *"
_LINEAR = f"x *k, weight nk, bias n, y result preact *n, {_NORM}"
_TOKENS = "target logprob entropy row_entropy lse max log_sum mean factor"


def _linear(call: Call) -> Dims:
    if call.values["activation"] != "none":
        return Dims(_LINEAR, "* n")
    # The bias is Partial beside sharded columns of x, so that the sum over the processes contains
    # the bias once.
    return Dims(_LINEAR, "* n k", {"k": "result y bias"})


def _gated_mlp(call: Call) -> Dims:
    # With sharded hidden columns (n) each process computes a term of the result: no down_bias then.
    return Dims(
        "x *k, left right nk, left_bias right_bias n, down pn, y result *p, z *N",
        "*" if call.has("down_bias") else "* n",
        {"n": "dx y result"},
    )


def _experts(call: Call) -> Dims | None:
    """Shards the hidden columns n of all experts.

    Tokens can't be sharded: z has the order of the experts of all tokens, which is not that of one
    shard after the other.
    """
    if call.has("down_bias"):
        return None  # each process would add it to its term of the result
    n = "N" if "glu" in call.values["gate"] else "n"
    gate_up, down = (f"ek{n}", "enk") if call.values["transposed"] else (f"e{n}k", "ekn")
    tensors = f"gate_up {gate_up}, gate_up_bias e{n}, z t{n}, down {down}"
    return Dims(tensors, "n", {"n": "dx dweight y result"})


def _attention(call: Call) -> Dims | None:
    if call.has("dropout_seed"):
        return None  # a probability's index in the whole tensor decides whether it is dropped
    if call.has("bias"):
        return None  # a dimension of the bias may be broadcast
    row_ends = call.has("key_end") and len(call.shape("key_end")) == 2
    # If no score of the call depends on the index of a query row, query rows can be sharded.
    uneven = call.values["causal"] or call.values["window"] or call.has("leftpad")
    uneven = uneven or call.has("alibi_slopes")
    return Dims(
        "query out lse scores y result bhq, key value bh, sink alibi_slopes h, "
        f"leftpad b, key_start bq, key_end {'bq' if row_ends else 'b'}",
        "b h q" if row_ends or not uneven else "b h",
    )


def _causal_softmax(call: Call) -> Dims:
    dims = len(call.shape("scores" if call.has("scores") else "y"))
    middle = "hijklmno"[: max(dims - 3, 0)]
    # With a sink, scores of more than 4 dims shard only dim 0: several batch dims share a sink.
    rows = middle if dims == 4 or not call.has("sink") else ""
    tensors = f"scores y result b{middle}, sink {'h' if dims == 4 else '.'}"
    return Dims(f"{tensors}, leftpad key_start key_end b", " ".join(["b" * (dims > 2), *rows]))


def _bmm(call: Call) -> Dims:
    a, b = ("." if call.shape(name)[0] == 1 else "b" for name in "ab")
    return Dims(f"a {a}mk, b {b}kn, y result bmn", "b m n k", {"k": "result"})


def _rotary(call: Call) -> Dims:
    *lead, _, _ = call.shape("cos")
    tables = "".join("b" if size > 1 else "." for size in lead)
    tensors = f"q q_out bhs, k k_out bgs, cos sin {tables}s"
    return Dims(tensors, "b s hg h g", {"h": "", "g": ""})


def _loss(call: Call) -> Dims | None:
    reduction = call.values.get("reduction", "none")
    if reduction == "mean":
        return None  # the mean divides by the number of all rows
    # With a shift, a row's target is the next row's token, so sequences (s) can't be sharded.
    rows = "s" if call.values.get("shift", 0) else ""
    loss = "result loss" if reduction == "none" else ""
    return Dims(
        f"x y logits *{rows}k, {_TOKENS} {loss} *{rows}",
        "*",
        {} if reduction == "none" else {"*": "result loss dweight dbias"},
    )


def _loss_gradients(call: Call) -> Dims:
    """Shards the product of gradients and a scalar."""
    if call.has("unit_dlogits"):
        return Dims("unit_dlogits dlogits *", "*")
    sums = [
        f"unit_{name} {name}"
        for name in ("dweight", "dbias")
        if tuple(call.shape("unit_" + name)) != (0,)  # size (0,): the gradient was not requested
    ]
    return Dims("unit_dx dx *k", "*", {"*": " ".join(sums)})


_OUTER = Dims("x c, y r, z result rc", "r c")
# The rule of an op is also the rule of <op>_forward and of <op>_backward without one of its own.
_RULES: dict[str, Dims | Callable[[Call], Dims | None]] = {
    "linear": _linear,
    **dict.fromkeys(("layer_norm_linear", "rms_norm_linear"), Dims(_LINEAR, "* n")),
    **dict.fromkeys(
        ("layer_norm_linears", "rms_norm_linears"),
        Dims(f"x *k, weights nk, biases n, ys *n, {_NORM}", "* n"),
    ),
    # N: each process gets the same columns of both branches of the gate.
    "gated_linear": Dims("x *k, weight Nk, bias N, y result *n, z *N", "* n"),
    "gated_linear_pair": Dims(
        "x *k, left right nk, left_bias right_bias n, y result *n, z *N", "* n"
    ),
    "gated_activation": Dims("left right y result *", "*"),
    "gated_mlp": _gated_mlp,
    "experts": _experts,
    # Rows (r) can't be sharded: the offsets of the groups count the rows of all processes.
    "grouped_linear": Dims("x rk, weight enk, bias en, y result preact rn", "n"),
    "grouped_gated_linear": Dims("x rk, weight eNk, bias eN, y result rn, z rN", "n"),
    "folded_layer_norm_linear": Dims(
        "x *k, folded_weight nk, weight_sum folded_bias n, y result *n", "* n"
    ),
    "fold_layer_norm": Dims(
        "weight folded_weight nk, bias weight_sum folded_bias n, ln_weight ln_bias k",
        "n k",
        {"k": "bias weight_sum folded_bias"},
    ),
    "int4_linear": Dims("x *k, qweight scale zero bias n, y result *n", "* n"),
    # A row of the repacked layout belongs to several output columns, so it can't be sharded by
    # columns. Shard the weight first and repack the shards.
    "int4_linear_repacked": Dims("x *k, y result *n", "*"),
    **dict.fromkeys(("int4_pack", "int4_unpack"), Dims("codes packed result *n", "*")),
    # Replicated only: int4_repack mixes rows of codes; scalar_attention's q, k, v have one length.
    **dict.fromkeys(("int4_repack", "scalar_attention"), lambda call: None),
    **dict.fromkeys(
        ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_gated"),
        Dims("x residual gate y result normed sum *k, mean rstd *", "*"),
    ),
    **dict.fromkeys(("attention", "attention_with_lse", "softmax_matmul"), _attention),
    "causal_softmax": _causal_softmax,
    "softmax": Dims("x y result *n", "*"),
    "causal_conv1d": Dims("x y result initial_state bc, weight bias c, key_start b", "b c"),
    "conv2d": Dims("x z result b", "b"),
    "row_sum": Dims("x *n, result *", "* n -", {"n": "result", "-": "x result"}),
    "add_scalar": Dims("x result *", "*"),
    "bmm": _bmm,
    **dict.fromkeys(("outer_add", "outer_mul_relu"), _OUTER),
    "mul_relu": Dims("x z result rc, y r", "r c"),
    "rotary": _rotary,
    **dict.fromkeys(
        (
            *("cross_entropy", "cross_entropy_gradients", "linear_cross_entropy"),
            *("linear_cross_entropy_exponentials", "linear_cross_entropy_gradients"),
            "linear_token_logprobs",
        ),
        _loss,
    ),
    **dict.fromkeys(
        ("cross_entropy_gradients_backward", "linear_cross_entropy_gradients_backward"),
        _loss_gradients,
    ),
}


def rule_of(op: str) -> Callable[[Call], list[Row]] | None:
    """Returns the rule of an op, which lists the rows of a call, or None if the op has none."""
    found = _RULES.get(op, _RULES.get(public_op(op)))
    if found is None:
        return None

    def rule(call: Call) -> list[Row]:
        dims = found if isinstance(found, Dims) else found(call)
        return [] if dims is None else list(dims.rows(call))

    return rule


def _divided(call: Call) -> tuple[str, int, int] | None:
    """Returns an argument, its dim and the size that the dim's shards must divide, or None."""
    if call.has("key") and call.shape("key")[1] != call.shape("query")[1]:
        return "key", 1, call.shape("key")[1]  # a shard needs all query heads of its key heads
    if call.has("down") and call.has("gate_up"):
        # A column of down belongs to a left and a right column of z, and a shard must have both.
        dim = 1 if call.values["transposed"] else 2
        return "down", dim, call.shape("down")[dim]
    if "interleaved" in call.values and call.has("weight"):
        # The op is gated_linear, interleaved or not. An output column has a left and a right row
        # of the weight, and a shard must have both.
        return "weight", 0, call.shape("weight")[0] // 2
    return None


def _placed(placements: Sequence[Any]) -> str:
    text = ", ".join(map(str, placements))
    return f"({text},)" if len(placements) == 1 else f"({text})"


def _strategy(rule: Callable[[Call], list[Row]]) -> Callable[[Any], Any]:
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
            for each in every:  # torch makes no tuple for a list of one result
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
