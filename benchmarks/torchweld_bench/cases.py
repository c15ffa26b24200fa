"""A case of a family: how its tensors are drawn, its calls timed and checked, its rows made.

A family times "ours" and its peers in one run, computes the errors of some of the results, and
compares ours with each peer. Targets are no part of a family: `bench.py` adds them to the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchweld.tuning.timer import Timing, interleaved
from torchweld.tuning.work import two_roundings
from torchweld_bench.common import in_turn, largest_error, largest_magnitude
from torchweld_bench.results import Row, make_row

CHECKED_ROWS = 64
Call = Callable[[], Any]
Function = Callable[..., Any]
Errors = dict[str, float]


def drawn(
    *shape: int, dtype: torch.dtype = torch.bfloat16, std: float = 1.0, device: str = "cuda"
) -> Tensor:
    """Draws normal numbers."""
    return torch.randn(*shape, device=device).mul_(std).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def gradients(function: Function, operands: Sequence[Tensor], dy: Any = None) -> Call:
    """Runs forward and backward of a function; dy=None is for a scalar."""
    return lambda: torch.autograd.grad(function(*operands), operands, dy)


def backward(function: Function, operands: Sequence[Tensor], dy: Any) -> Call:
    """Returns the backward alone of a function, whose forward runs once."""
    given = leaves(*operands)
    return partial(torch.autograd.grad, function(*given), given, dy, retain_graph=True)


def captured(calls: dict[str, Call], but: Iterable[str] = ()) -> dict[str, Call]:
    """Captures the calls as CUDA graphs, except some that can't be captured."""
    return {name: f if name in but else in_turn([f], 1) for name, f in calls.items()}


def timed(calls: dict[str, Call], rounds: int = 21, device: str = "cuda") -> dict[str, Timing]:
    return interleaved(calls, device=device, rounds=rounds)


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def drawn_like(result: Any) -> list[Tensor]:
    """Draws a result's gradients; a scalar loss gets 1."""
    return [torch.randn_like(t) if t.dim() else torch.ones_like(t) for t in _tensors(result)]


def rotated(calls: dict[str, list[Call]], times: int, rounds: int) -> dict[str, Timing]:
    """Returns the time of one call of a CUDA graph with `times` calls in rotation."""
    found = timed({name: in_turn(each, times) for name, each in calls.items()}, rounds)
    return {n: Timing(t.us / times, t.low / times, t.high / times) for n, t in found.items()}


def exactly(value: float) -> Timing:
    """Makes a computed limit."""
    return Timing(value, value, value)


def _largest(values: Iterable[float]) -> float:
    """Returns the largest value, NaN if there is one."""
    return max(values, key=lambda value: (math.isnan(value), value))


def judged(
    ours: Any, eager: Any, exact: Any, times: float = 0.0, plus: float | None = None
) -> Errors:
    """Returns the largest errors of ours and of eager torch, and the allowed error.

    Args:
        ours, eager, exact: a result or several; exact in fp64.
        times: the allowed error is eager's error times this.
        plus: the error allowed beyond that; None for two roundings of the largest exact result.
    """
    ours, eager, exact = map(_tensors, (ours, eager, exact))
    if plus is None:
        plus = two_roundings(ours[0].dtype, _largest(map(largest_magnitude, exact)))
    eager_error = _largest(map(largest_error, eager, exact))
    allowed = times * eager_error + plus
    error = _largest(map(largest_error, ours, exact))
    return {"error": error, "eager_error": eager_error, "allowed_error": allowed}


def judged_loss(ours: float, eager: float, allowed: float) -> Errors:
    """Returns the relative difference of two losses."""
    return {"error": abs(ours / eager - 1), "eager_error": 0.0, "allowed_error": allowed}


def checked(
    ours: Any, eager: Function, few: Sequence[Any], times: float = 0.0, plus: float | None = None
) -> Errors:
    """Returns the errors as `judged` does, with eager's result computed from the tensors in few."""
    floats = [isinstance(t, Tensor) and t.is_floating_point() for t in few]
    wide = [t.double() if f else t for t, f in zip(few, floats, strict=True)]
    return judged(ours, eager(*few), eager(*wide), times, plus)


def judged_dx(
    ours: Function | Tensor,
    eager: Function,
    operands: Sequence[Tensor],
    dy: Tensor | None = None,
    cut: Sequence[int] = (0,),
    times: float = 3.0,
    plus: float = 0.0,
) -> Errors:
    """Returns the errors of the first operand's gradient, for some rows.

    Args:
        ours: a function, or the gradient.
        dy: the gradient of the result; None for ones.
        cut: the operands that have rows.
    """

    def dx(function: Function, dtype: torch.dtype) -> Tensor:
        few = [t[:CHECKED_ROWS] if i in cut else t for i, t in enumerate(operands)]
        few = [t.detach().to(dtype) if t.is_floating_point() else t for t in few]
        few[0].requires_grad_()
        out = function(*few)
        out = out if isinstance(out, Tensor) else torch.cat(out, -1)
        if dy is None:
            return torch.autograd.grad(out.sum(), few[0])[0]
        return torch.autograd.grad(out, few[0], dy[:CHECKED_ROWS].to(dtype))[0]

    dtype = operands[0].dtype
    ours = ours if isinstance(ours, Tensor) else dx(ours, dtype)
    return judged(ours, dx(eager, dtype), dx(eager, torch.float64), times, plus)


def compared(
    case: str,
    times: dict[str, Timing],
    errors: Errors,
    against: str | None = None,
    over: Iterable[str] = (),
    end: str = "",
    target: float | None = None,
) -> Iterator[Row]:
    """Makes the rows of a measurement: `case` against a peer, "`case` over" others that ran.

    Args:
        target: the first row's target, if it is computed.
    """
    peers = {} if against is None else {f"{case}{end}": against}
    peers |= {f"{case} over {peer}{end}": peer for peer in over if peer in times}
    for name, peer in peers.items():
        yield make_row(name, times, against=peer, target=target, **errors)
        target = None


def measured(
    case: str,
    calls: dict[str, Call],
    errors: Errors,
    against: str | None = None,
    over: Iterable[str] = (),
    rounds: int = 21,
    **options: Any,
) -> Iterator[Row]:
    """Makes the rows of calls that are timed once each: "ours" and the peers."""
    return compared(case, timed(calls, rounds), errors, against, over, **options)


def trained(
    case: str,
    functions: dict[str, Function],
    operands: list[Tensor],
    errors: Errors,
    *,
    others: dict[str, list[Tensor]] | None = None,
    forward: Iterable[str] = (),
    backward: Iterable[str] = (),
) -> Iterator[Row]:
    """Makes rows of "ours" over every peer as CUDA graphs: forward, then with backward.

    Args:
        functions: "ours" and the peers.
        operands: their arguments.
        others: for some peers, other arguments.
        forward, backward: the functions that are timed so.
    """
    for kind, names in (("forward", forward), ("forward and backward", backward)):
        calls = {}
        for name in names:
            given = (others or {}).get(name, operands)
            values = [t.detach() for t in given]
            calls[name] = partial(functions[name], *values)
            if kind != "forward":
                calls[name] = gradients(functions[name], given, drawn_like(calls[name]()))
        if calls:
            times = timed(captured(calls), rounds=7)
            yield from compared(f"{case}, {kind}", times, errors, over=list(calls)[1:])
