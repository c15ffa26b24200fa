"""The parts of a sharding rule: the arguments of a call, and rows that name the results and
arguments that are not replicated along one mesh dim. A tensor of a list is named like "weights[0]".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Rule = Callable[["Call"], list[Row]]

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
        # torch lists the specs of positional arguments first, then those of keyword arguments in
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
        """The names of the tensors of a list."""
        return [each for each in self.specs if each.startswith(name + "[")]

    def shape(self, name: str) -> Sequence[int]:
        return self.specs[name].shape

    def leaves_out(self, result: str) -> bool:
        """Whether the result is (0,), because it was not asked for."""
        if result == "preact":
            return self.values["activation"] in ("none", "relu")
        if result in (*OF_NORM, "dsink") and not self.has(result.removeprefix("d")):
            return True
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
    """The names that rows use for an op's results. `weights` is the length of a list of weights."""
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
