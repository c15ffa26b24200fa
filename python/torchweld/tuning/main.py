"""`torchweld tune OP --shape ... --dtype ...`: prints the table of a call's configurations."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_FLAGS = ("gate", "activation", "interleaved", "causal")


def keywords(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the op's keyword arguments among the flags.

    Raises:
        ValueError: the op has no such argument.
    """
    from torchweld._library import ops

    schema = getattr(ops, args.op).default._schema
    known = {a.name for a in schema.arguments}
    given = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    for name in given:
        if name not in known:
            raise ValueError(f"--{name} must go with an op that has it, but got {args.op}")
    if "output_mask" in known:
        given["output_mask"] = [True] * len(schema.returns)
    return given


def filled(shapes: tuple[Any, ...], op: str, device: str) -> list[Any]:
    """Makes tensors of these shapes, whose values give results near 1."""
    import torch
    from torch.utils._pytree import tree_map

    from torchweld.explain import tensors_of

    def values(t: Tensor) -> Tensor:
        if t.dtype == torch.int64:  # targets
            return torch.zeros(t.shape, dtype=t.dtype, device=device)
        if not t.is_floating_point():
            return torch.randint(-(2**31), 2**31, t.shape, device=device).to(t.dtype)
        return torch.randn(t.shape, device=device).to(t.dtype)

    made = tree_map(values, list(shapes))
    ops = torch.ops.torchweld
    if op == "int4_linear":
        made[2] = made[2].abs() * 0.1 * max(made[0].shape[-1], 1) ** -0.5
    elif "linear" in op or op == "gated_mlp":
        for weight in tensors_of(made[2 if op.endswith("backward") else 1 :]):
            if weight.dim() == 2:
                weight *= max(weight.shape[-1], 1) ** -0.5
        if op.startswith("folded"):
            made[2] = made[1].float().sum(1).to(made[2].dtype)
    if op == "softmax_backward":
        made[1] = ops.softmax(made[1])
    if op == "causal_softmax_backward":
        made[1] = ops.causal_softmax(made[1])
    return made


def run(args: argparse.Namespace, shapes: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Prints the table; returns the exit status.

    Raises:
        OSError, ValueError, RuntimeError, ImportError: with the reason in one sentence.
    """
    import torch
    from torch.utils._pytree import tree_map

    from torchweld.tuning import tune

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must be cpu where there is no CUDA GPU, but got cuda")
    if device == "cpu":  # on the CPU nothing is timed, so the values don't matter
        made = tree_map(lambda t: torch.empty_like(t, device="cpu"), list(shapes))
    else:
        made = filled(shapes, args.op, device)
    if args.op == "attention_backward" and device == "cuda":
        dout, query, key, value = made[:4]
        out, lse = torch.ops.torchweld.attention_forward(query, key, value, **kwargs)
        made = [dout, query, key, value, out, lse]
    if args.op == "add_scalar":
        kwargs = {**kwargs, "value": 1.5}
    result = tune(args.op, *made, remember=args.remember, rounds=args.rounds, **kwargs)
    print(json.dumps(result.to_dict(), indent=1) if args.json else result)
    for path, write in ((args.save, result.save), (args.plot, result.plot)):
        if path is not None and result.rows:
            write(path)
            print(f"written: {path}", file=sys.stderr)
    return 130 if result.interrupted else 0
