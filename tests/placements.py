"""Calls of every op with DTensors, run in the processes of a mesh.

A case runs in all processes of the mesh (meshes.py) and raises if an answer differs from that
of one process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import samples as S
import torchweld
from meshes import DEVICE, MESHES, TOLERANCE, WIDE
from samples import DIFFERENTIABLE, OPS_OF_LISTS, Builder, Call, Calls, Maker, as_tuple, call
from torchweld.distributed import full_tensor, rules
from torchweld.distributed.rules import Call as RuleCall
from torchweld.distributed.rules import results_of


def masked(build: Builder, *names: str, **more: Any) -> Builder:
    """The call with tensors of the mask by name: key_start, key_end, sink, bias, alibi_slopes,
    or row_ends, the key_end of each row.
    """

    def make(m: Maker) -> Call:
        args, kwargs = build(m)
        batch, heads, rows = args[0].shape[:3]
        keys = args[1].shape[2] if len(args) > 1 and args[1].dim() == 4 else args[0].shape[-1]
        i = torch.arange(rows)
        tensors = {
            "key_start": torch.stack([i // 3, i // 2, 0 * i, i // 4])[torch.arange(batch) % 4],
            "key_end": keys - torch.arange(batch) % 3,
            "row_ends": keys - (i + torch.arange(batch)[:, None]) % 3,
            "sink": m.randn(heads),
            "bias": m.randn(1, heads, rows, keys),
            "alibi_slopes": m.randn(heads),
        }
        tensors = {
            n: t if t.is_floating_point() else t.to(m.device, torch.int32)
            for n, t in tensors.items()
        }
        given = {"key_end" if n == "row_ends" else n: tensors[n] for n in names}
        return args, {**kwargs, **given, **more}

    return make


def with_dlse(build: Builder) -> Builder:
    def make(m: Maker) -> Call:
        args, kwargs = build(m)
        return args, {**kwargs, "dlse": m.randn(*args[5].shape)}

    return make


def linears_call(op: str, end: str, lead, sizes, k: int, biased: bool) -> Builder:
    """A call of rms_norm_linears or layer_norm_linears, or of their forward or backward op."""

    def make(m: Maker) -> Call:
        x, weights = m.randn(*lead, k), [m.randn(n, k) for n in sizes]
        biases = [m.randn(n) for n in sizes] if biased else []
        vectors = [m.randn(k) for _ in range(1 + (op == "layer_norm_linears"))]
        if end != "_backward":
            return [x, weights, biases, *vectors], {}
        ys = call(op + "_forward")(x, weights, biases, *vectors)
        dys, statistics = [m.randn(*y.shape) for y in ys[: len(sizes)]], ys[len(sizes) :]
        mask = [True, True, biased, *[True] * len(vectors)]
        return [dys, x, weights, *vectors, *statistics, mask], {}

    return make


def after(op: str, build: Builder, inputs: int) -> Builder:
    """The arguments of the backward call of a forward call: dout, inputs, out and lse, leftpad."""

    def make(m: Maker) -> Call:
        args, kwargs = build(m)
        saved = call(op + "_forward")(*args, **kwargs)
        return [m.randn(*saved[0].shape), *args[:inputs], *saved, *args[inputs:]], kwargs

    return make


def after_causal(build: Builder) -> Builder:
    def make(m: Maker) -> Call:
        args, kwargs = build(m)
        y = call("causal_softmax")(*args, **kwargs)
        if "softcap" in kwargs or "sink" in kwargs:
            kwargs = {**kwargs, "scores": args[0]}
        return [m.randn(*y.shape), y, *args[1:]], kwargs

    return make


WOVEN = {"interleaved": True}


def _builds() -> Calls:
    builds = Calls()
    add, add_both = builds.add, builds.add_both
    lead, uneven = (4, 4), (3, 5)
    for kind, norms in (("linear", 0), ("layer_norm_linear", 2), ("rms_norm_linear", 1)):
        full = [True] * norms
        forward = {
            "plain": S.layer_call(lead, 8, 8, *full),
            "gelu": S.layer_call(uneven, 7, 5, *full, activation="gelu"),
            "relu": S.layer_call((4,), 4, 8, *full, activation="relu"),
            "bare": S.layer_call(lead, 8, 4, *[False] * norms, bias=False),
            "last": S.layer_call(lead, 4, 4, *[False, True][-norms:][:norms], bias=False),
        }
        if not norms:
            del forward["last"]
        add_both(kind, **forward)
        for i, (name, build) in enumerate(forward.items()):
            mask = [True] * 3 + full if i != 3 else [True, False, False] + [False] * norms
            add(kind + "_backward", **{name: S.layer_backward_call(kind, build, mask)})

    for gate, interleaved in (("geglu", False), ("swiglu", True)):
        kwargs = {"gate": gate, "interleaved": interleaved}
        for sizes, n, k in ((lead, 8, 8), (uneven, 3, 5)):
            forward = S.layer_call(sizes, 2 * n, k, **kwargs)
            backward = S.gated_backward_call(sizes, n, k, [True] * 3, **kwargs)
            add_both("gated_linear", **{f"{gate}_{n}": forward})
            add("gated_linear_backward", **{f"{gate}_{n}": backward})

    geglu = {"gate": "geglu"}
    gates = {"plain": ((*lead, 8), {}), "uneven": ((*uneven, 5), geglu)}
    builds.add_masked(S.gate_call, S.every_gradient(2, gates), "gated_activation", "")
    pairs = {"plain": ((lead, 8, 8), {}), "bare": ((uneven, 4, 5, (False, True)), geglu)}
    builds.add_masked(S.pair_call, S.every_gradient(5, pairs), "gated_linear_pair", "", "_forward")
    bare = (uneven, 4, 5, 3, (False, True, False))
    mlps = {"plain": ((lead, 8, 8, 6), {}), "bare": (bare, geglu)}
    builds.add_masked(S.mlp_call, S.every_gradient(7, mlps), "gated_mlp", "", "_forward")
    experts = {
        "plain": ((4, 8, 4, 3, 2), {}),
        "bias": ((4, 4, 8, 2, 1), {"biases": True, "alpha": 1.7, "limit": 1.5}),
        "interleaved": ((5, 4, 8, 2, 2), {"interleaved": True, "transposed": True}),
        "bare": ((3, 4, 8, 2, 2), {"gate": "relu_squared"}),
    }
    builds.add_masked(S.experts_call, S.every_gradient(6, experts), "experts", "", "_forward")
    sizes = (5, 4, 3, (2, 2, 4))
    for op, options in (
        ("grouped_linear", {"plain": {"activation": "gelu"}, "bare": {"activation": "none"}}),
        ("grouped_gated_linear", {"halves": {"gate": "swiglu"}, "pairs": geglu | WOVEN}),
    ):
        cases = S.every_gradient(3, {name: (sizes, more) for name, more in options.items()})
        builds.add_masked(S.grouped_call, cases, op, "", "_forward")
    for op in ("rms_norm_linears", "layer_norm_linears"):
        for name, sizes, biased in (("plain", (lead, (8, 4, 4), 8), True),
                                    ("one", (uneven, (5,), 4), False)):  # fmt: skip
            for end in ("", "_forward", "_backward"):
                add(op + end, **{name: linears_call(op, end, *sizes, biased)})
    for name, sizes in (("plain", (lead, 8)), ("bare", ((4,), 4, False))):
        op = "rms_norm_gated"
        add_both(op, **{name: S.gated_norm_call(*sizes, gate_first=name == "bare")})
        add(op + "_backward", **{name: S.gated_norm_call(*sizes, mask=[True] * 3)})
    for op in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"):
        full = [True] * (1 + op.endswith("layer_norm"))
        norms = {
            "plain": (S.norm_call(op, lead, 8, *full), [True, *full]),
            "uneven": (S.norm_call(op, uneven, 5, *full), [True, *full]),
            "bare": (S.norm_call(op, (4,), 4), [True, *[False] * len(full)]),
        }
        builds.add_three(op, norms, partial(S.norm_backward_call, op))

    every = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.1, "temperature": 0.7}
    losses = {
        "none": S.loss_call(lead, 8, 5, reduction="none", ignored=2),
        "sum": S.loss_call(uneven, 7, 4, bias=False, reduction="sum", **every),
        "mean": S.loss_call(lead, 8, 4, ignored=3),
        "shift": S.loss_call((4, 5), 6, 4, reduction="none", shift=1, ignored=2),
    }
    name = "linear_cross_entropy"
    add_both(name, **losses)
    backward = {n: S.cross_entropy_backward_call(c, [True] * 3) for n, c in losses.items()}
    add(name + "_backward", **backward)
    others = S.cross_entropy_backward_call(losses["none"], [True] * 3, ["dlse", "dmean"])
    add(name + "_backward", others=others)
    for n in ("sum", "mean"):
        add(name + "_gradients_forward", **{n: S.without(losses[n], output_mask=[True] * 3)})
    for n, mask in (("plain", [True] * 3), ("x", [True, False, False])):
        add(name + "_gradients_backward", **{n: S.scaled_gradients_call(lead, 8, 4, mask)})
    kept = {n: S.without(c, "softcap") for n, c in losses.items()}
    add(name + "_exponentials_forward", **kept, mean_of_z=S.without(kept["none"], mean=True))
    mean_alone = S.without(losses["shift"], keep="nothing", mean=True)
    add(name + "_exponentials_forward", mean_alone=mean_alone)
    backward = {n: S.exponentials_backward_call(c, [True] * 3) for n, c in losses.items()}
    add(name + "_exponentials_backward", **backward)
    logits = {
        "none": S.logits_call(lead, 8, reduction="none", ignored=2),
        "sum": S.logits_call(uneven, 7, reduction="sum", **every),
        "mean": S.logits_call(lead, 8, ignored=3),
        "shift": S.logits_call((4, 5), 6, reduction="none", shift=1, ignored=2),
    }
    name = "cross_entropy"
    add_both(name, **logits)
    add(name + "_backward", **{n: S.logits_backward_call(c) for n, c in logits.items()})
    add(name + "_gradients_forward", **{n: logits[n] for n in ("sum", "mean")})
    add(name + "_gradients_backward", plain=S.scaled_logits_call(*lead, 8))
    logprobs = {
        "plain": S.loss_call(lead, 8, 5),
        "entropy": S.loss_call(
            uneven, 7, 4, bias=False, entropy=True, temperature=0.7, softcap=2.0
        ),
    }
    name = "linear_token_logprobs"
    add_both(name, **logprobs)
    backward = {n: S.logprobs_backward_call(c, [True] * 3) for n, c in logprobs.items()}
    add(name + "_backward", **backward)

    calls = {
        "plain": S.attention_call(4, 4, 4, 4, 4, 4, 2),
        "padded": S.attention_call(4, 8, 4, 5, 5, 2, 3, pads=(0, 2, 5, 1), causal=True, scale=0.3),
        "grouped": S.attention_call(3, 6, 3, 3, 5, 2, 2, causal=True, window=2),
        "dropout": S.attention_call(4, 4, 4, 4, 4, 4, 2, dropout_p=0.5),
    }
    calls |= {
        "documents": masked(calls["plain"], "key_start", "sink"),
        "right_padded": masked(calls["plain"], "key_end", softcap=1.5),
        "bias": masked(calls["plain"], "sink", "bias"),
        "alibi": masked(calls["plain"], "alibi_slopes"),
        "row_ends": masked(calls["padded"], "row_ends", window=3),
        "all": masked(
            S.attention_call(4, 8, 4, 5, 6, 2, 3, causal=True),
            *("key_start", "key_end", "sink"),
            window=4,
            softcap=2.0,
        ),
    }
    for end in ("", "_forward", "_with_lse"):
        add("attention" + end, **calls)
    backward = {name: after("attention", build, 3) for name, build in calls.items()}
    add("attention_backward", **backward, dlse=with_dlse(backward["documents"]))

    calls = {
        "plain": S.softmax_matmul_call(4, 4, 4, 4, 2),
        "padded": S.softmax_matmul_call(4, 4, 5, 5, 2, pads=(0, 2, 5, 1), causal=True, scale=0.3),
    }
    calls["all"] = masked(
        S.softmax_matmul_call(4, 3, 5, 6, 3), "key_start", "key_end", "sink", window=4, softcap=2.0
    )
    add_both("softmax_matmul", **calls)
    backward = {name: after("softmax_matmul", build, 2) for name, build in calls.items()}
    add("softmax_matmul_backward", **backward)

    calls = {
        "matrix": S.causal_call((4, 4)),
        "padded": S.causal_call((4, 4, 5, 5), (0, 2, 5, 1), scale=0.3),
        "rank5": S.causal_call((4, 2, 4, 3, 5), (0, 2, 3, 1)),
        "three": S.causal_call((3, 4, 4)),
        "all": masked(
            S.causal_call((4, 4, 4, 6)), "key_start", "key_end", "sink", window=4, softcap=2.0
        ),
    }
    add("causal_softmax", **calls)
    add("causal_softmax_backward", **{n: after_causal(b) for n, b in calls.items()})

    for op, backward in (("", False), ("_backward", True)):
        for name, sizes, activation in (("plain", lead, "none"), ("gelu", uneven, "gelu")):
            build = S.folded_call(sizes, 8, 5, backward=backward, activation=activation)
            add("folded_layer_norm_linear" + op, **{name: build})
        build = S.folded_call(lead, 4, 4, bias=False, backward=backward)
        add("folded_layer_norm_linear" + op, bare=build)
    add("fold_layer_norm", full=S.fold_call(8, 4, True, True, True))
    add("fold_layer_norm", bare=S.fold_call(5, 3, False, True, False))

    for op, build in S.INT4_CALLS:
        add(op, plain=build(lead, 8, 16, 2), bare=build(uneven, 5, 8, 1, False))
    add("int4_pack", plain=S.int4_codes_call(4, 4, 16))
    add("int4_unpack", plain=S.int4_unpack_call(4, 4, 16))

    shape = (4, 5, 8)
    rotaries = {
        "plain": (4, 4, 4, 4, 6, 4),
        "batch": (4, 8, 3, 5, 4, 4, 4),
        "one": (3, 4, 2, 4, 6, 6, 1),
    }
    for n, sizes in rotaries.items():
        add("rotary", **{n: S.rotary_call(*sizes)})
        add("rotary_backward", **{n: S.rotary_call(*sizes, mask=[True, n != "one"])})

    for n, sizes in {"plain": (4, 8, 4, 4, "bias", "state"), "bare": (4, 4, 5, 2)}.items():
        mask = [True, True, *[n == "plain"] * 2]
        add("causal_conv1d", **{n: S.conv1d_call(*sizes)})
        add("causal_conv1d_backward", **{n: S.conv1d_call(*sizes, mask=mask)})

    add("softmax", plain=S.softmax_call(*shape))
    add("softmax_backward", plain=S.softmax_backward_call(*shape))
    add("row_sum", plain=S.softmax_call(*shape))
    add("add_scalar", plain=S.add_scalar_call(0.75, *shape))
    for name, batches in (("plain", (4, 4)), ("one_a", (1, 4)), ("one_b", (4, 1))):
        add("bmm", **{name: S.bmm_call(batches, 4, 5, 6)})
        add("bmm_backward", **{name: S.bmm_call(batches, 4, 5, 6, [True, name != "one_b"])})
    outer, scaled = S.outer_call(5, 4), S.mul_relu_call(4, 5)
    add("outer_add", plain=outer)
    add("outer_add_backward", plain=S.with_dz(outer, 5, 4, inputs=0))
    add("outer_mul_relu", plain=outer)
    add("outer_mul_relu_backward", plain=S.with_dz(outer, 5, 4))
    add("mul_relu", plain=scaled)
    add("mul_relu_backward", plain=S.with_dz(scaled, 4, 5))
    add("conv2d", plain=S.conv2d_call((4, 5, 4), (3, 2)))
    add("conv2d_backward", plain=S.conv2d_call((4, 5, 4), (3, 2), [True, True]))
    add_both("scalar_attention", plain=S.scalar_attention_call(7))
    add("scalar_attention_backward", plain=S.scalar_attention_backward_call(7, [True, False, True]))
    return builds


BUILDS = _builds()


def place(full: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    """A DTensor of the tensor, which all processes have."""
    part, others = full.clone(), list(placements)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            coordinate, size = mesh.get_coordinate()[dim], mesh.shape[dim]
            share = 2 * (coordinate + 1) / (size * (size + 1))
            part = part * (share if full.is_floating_point() else coordinate == 0)
            others[dim] = Replicate()
    local = distribute_tensor(part, mesh, others, src_data_rank=None).to_local()
    stride, shape = full.stride(), full.shape
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def same(ours: DTensor, want: Tensor, label: str) -> None:
    assert ours.shape == want.shape, f"{label}: {ours.shape}, not {want.shape}"
    close = TOLERANCE[torch.float32 if want.dtype == torch.float32 else torch.float64]["atol"]
    tolerance = {"rtol": close, "atol": close, "equal_nan": True}
    try:
        whole = full_tensor(ours)
    except ValueError as error:  # torch 2.15 cannot tell some placements apart
        assert torch.__version__ >= "2.15" and "beside _StridedShard" in str(error)
        return
    torch.testing.assert_close(whole, want, **tolerance, msg=lambda m: label + m)


Placed = dict[str, tuple[Any, ...]]


class Sharded:
    """A call on one process, and the same with its tensors placed on a mesh."""

    def __init__(
        self, op: str, build: Builder, mesh: DeviceMesh, dtype: torch.dtype = WIDE
    ) -> None:
        self.op, self.mesh = op, mesh
        self.args, self.kwargs = build(Maker(DEVICE, dtype, 0))
        arguments = call(op).default._schema.arguments
        self.names = [a.name for a, _ in zip(arguments, self.args, strict=False)]
        self.tensors = {}
        for name, t in (*zip(self.names, self.args, strict=True), *self.kwargs.items()):
            if isinstance(t, Tensor):
                self.tensors[name] = t
            elif isinstance(t, list) and t and isinstance(t[0], Tensor):
                self.tensors |= {f"{name}[{i}]": each for i, each in enumerate(t)}
        weights = sum(name.startswith("weights[") for name in self.tensors)
        self.results = results_of(call(op).default, weights)

    def __call__(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        def value(name: str, own: Any) -> Any:
            if isinstance(own, list):
                return [given.get(f"{name}[{i}]", each) for i, each in enumerate(own)]
            return given.get(name, own)

        args = [value(n, a) for n, a in zip(self.names, self.args, strict=True)]
        kwargs = {n: given.get(n, a) for n, a in self.kwargs.items()}
        return as_tuple(call(self.op)(*args, **kwargs))

    @cached_property
    def whole(self) -> tuple[Tensor, ...]:
        """The results of one process."""
        with torch.no_grad():
            return self({})

    def place(self, placed: Placed) -> dict[str, DTensor]:
        everywhere = (Replicate(),) * self.mesh.ndim
        return {n: place(t, self.mesh, placed.get(n, everywhere)) for n, t in self.tensors.items()}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the op's rule for this call."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
        from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy

        def described(t: Any) -> Any:
            if isinstance(t, list) and t and isinstance(t[0], Tensor):
                return TupleStrategy([described(each) for each in t])
            if not isinstance(t, Tensor):
                return t
            meta = TensorMeta(t.shape, t.stride(), t.dtype)
            everywhere = (Replicate(),) * self.mesh.ndim
            return OpStrategy([OpSpec(DTensorSpec(self.mesh, everywhere, meta))])

        args = tuple(map(described, self.args))
        kwargs = {n: described(v) for n, v in self.kwargs.items()}
        schema = OpSchema(call(self.op).default, args, kwargs)
        return [{}, *rules.rule_of(self.op)(RuleCall(schema))]

    def shardable(self, placed: Placed) -> bool:
        for name, placements in placed.items():
            shards = [1] * self.tensors[name].dim()
            for p, n in zip(placements, self.mesh.shape, strict=True):
                if not isinstance(p, (Replicate, Partial)):
                    shards[p.dim] *= n
            if any(s > n for s, n in zip(shards, self.tensors[name].shape, strict=True)):
                return False
        return True

    def combined(self) -> Iterator[tuple[Placed, Placed]]:
        """Arguments and results of every combination of rows."""
        for rows in product(self.rows(), repeat=self.mesh.ndim):
            arguments, results = (
                {n: tuple(row.get(n, Replicate()) for row in rows) for n in names}
                for names in (self.tensors, self.results)
            )
            if self.shardable(arguments):
                yield arguments, results

    def check(self, placed: Placed) -> tuple[DTensor, ...]:
        with torch.no_grad():
            ours = self(self.place(placed))
        for name, a, b in zip(self.results, ours, self.whole, strict=True):
            same(a, b, f"{name} of {placed}: ")
        return ours


def every_row(op: str, build: Builder, mesh: DeviceMesh) -> None:
    """Each combination of rows: equal to one process, and S.without a collective."""
    sharded = Sharded(op, build, mesh)
    everywhere = (Replicate(),) * mesh.ndim
    for placed, results in sharded.combined():
        if not divides(sharded, placed):
            checked_or_refused(sharded, placed)
            continue
        given = sharded.place(placed)
        with CommDebugMode() as comms, torch.no_grad():
            ours = sharded(given)
        assert not comms.get_total_counts(), f"{placed} needs {comms.get_comm_counts()}"
        for name, a, b in zip(sharded.results, ours, sharded.whole, strict=True):
            same(a, b, f"{name} of {placed}: ")
            asked = results[name] if b.shape != (0,) else everywhere
            assert a.placements == asked, f"{name} of {placed}: {a.placements}"


def divides(sharded: Sharded, placed: Placed) -> bool:
    """False where a group of heads or a pair of gates would be cut."""
    name, dim, size = {
        "attention": ("key", 1, 1),
        "gated_linear": ("weight", 0, 2),
    }.get(base(sharded.op), ("", 0, 0))
    if not name:
        return True
    size = sharded.tensors[name].shape[dim] // size
    for p, n in zip(placed[name], sharded.mesh.shape, strict=True):
        if not isinstance(p, (Replicate, Partial)) and p.dim == dim:
            if size % n:
                return False
            size //= n
    return True


def base(op: str) -> str:
    for end in ("_forward", "_backward", "_with_lse"):
        op = op.removesuffix(end)
    return op


def options(t: Tensor) -> list[Any]:
    parts = [Partial()] if t.is_floating_point() else []
    return [Replicate(), *(Shard(d) for d in range(t.dim())), *parts]


def checked_or_refused(sharded: Sharded, placed: Placed) -> None:
    """Any placements: the answer of one process, or a sentence about what torch can't move."""
    fixed = [n for n, ps in placed.items() if any(type(p) is _StridedShard for p in ps)]
    try:
        sharded.check(placed)
    except RuntimeError as error:
        sentences = [f"torchweld::{sharded.op}: {n} must be " for n in (*fixed, *sharded.kwargs)]
        assert str(error).startswith(tuple(sentences)), f"{placed}: {error}"


def any_placement(op: str, build: Builder, mesh: DeviceMesh) -> None:
    """Each argument alone in each placement, and some of all arguments at random."""
    sharded = Sharded(op, build, mesh)
    everywhere = (Replicate(),) * (mesh.ndim - 1)
    for name, t in sharded.tensors.items():
        for placement in options(t):
            placed = {name: (placement, *everywhere)}
            if sharded.shardable(placed):
                checked_or_refused(sharded, placed)
    draw = random.Random(0)
    for _ in range(2):
        placed = {
            name: tuple(draw.choice(options(t)) for _ in mesh.shape)
            for name, t in sharded.tensors.items()
        }
        if sharded.shardable(placed):
            checked_or_refused(sharded, placed)


def gradients(op: str, build: Builder, mesh: DeviceMesh) -> None:
    """Result and gradients through autograd of each combination of rows."""
    sharded = Sharded(op, build, mesh)
    wanted = [sharded.names[i] for i in DIFFERENTIABLE.get(op, ()) if i < len(sharded.names)]
    wanted = [n for n in wanted if n in sharded.tensors]
    wanted += [n for n in ("sink", "bias") if n in sharded.kwargs]
    wanted = list(sharded.tensors) if op in OPS_OF_LISTS else wanted
    leaves = {n: sharded.tensors[n].clone().requires_grad_() for n in wanted}
    ys = [y for y in sharded(leaves) if y.requires_grad]
    dys = [torch.randn_like(y) for y in ys]
    want = torch.autograd.grad(ys, list(leaves.values()), dys)
    for placed, _ in sharded.combined():
        if not divides(sharded, placed):
            continue
        given = sharded.place(placed)
        mine = [given[n].requires_grad_() for n in wanted]
        ours = [y for y in sharded(given) if y.requires_grad]
        douts = []
        for y, dy in zip(ours, dys, strict=True):
            whole = [Replicate() if isinstance(p, Partial) else p for p in y.placements]
            douts.append(place(dy, mesh, tuple(whole)))
        for name, a, b in zip(wanted, torch.autograd.grad(ours, mine, douts), want, strict=True):
            same(a, b, f"d{name} of {placed}: ")


def placed(mesh: DeviceMesh, t: Tensor, *placements: Any) -> DTensor:
    """On the mesh's last dim as said, replicated on the others."""
    return place(t, mesh, ((Replicate(),) * (mesh.ndim - 1) + placements))


def promised_placements(mesh: DeviceMesh) -> None:
    """The placements that tensor-parallel code relies on, derived S.without the rules."""
    m = Maker(DEVICE, WIDE, 0)
    ops, r, last = torch.ops.torchweld, Replicate(), mesh.ndim - 1
    x, weight, bias, scale = m.randn(4, 4, 8), m.randn(8, 8), m.randn(8), m.randn(8)

    def leaf(t: Tensor, placement: Any) -> DTensor:
        return placed(mesh, t, placement).requires_grad_()

    def on_last(*tensors: DTensor) -> list[Any]:
        return [t.placements[last] for t in tensors]

    leaves = leaf(x, r), leaf(weight, Shard(0)), leaf(bias, Shard(0)), leaf(scale, r)
    y = ops.layer_norm_linear(*leaves, activation="silu")
    grads = torch.autograd.grad(y, leaves, placed(mesh, m.randn(4, 4, 8), Shard(2)))
    assert on_last(y, *grads) == [Shard(2), Partial(), Shard(0), Shard(0), Partial()]

    leaves = leaf(x, Shard(1)), leaf(weight, r), leaf(bias, r), leaf(scale, r)
    y = ops.rms_norm_linear(*leaves)
    grads = torch.autograd.grad(y, leaves, placed(mesh, m.randn(4, 4, 8), Shard(1)))
    assert on_last(y, *grads) == [Shard(1), Shard(1), Partial(), Partial(), Partial()]

    leaves = leaf(x, Shard(2)), leaf(weight, Shard(1)), leaf(bias, r)
    y = ops.linear(*leaves)
    grads = torch.autograd.grad(y, leaves, placed(mesh, m.randn(4, 4, 8), r))
    assert on_last(y, *grads) == [Partial(), Shard(2), Shard(1), r]

    heads, sink = m.randn(2, 4, 4, 8), m.randn(4)
    leftpad = placed(mesh, m.pads(0, 2), r)
    leaves = [leaf(heads, Shard(1)) for _ in range(3)] + [leaf(sink, Shard(0))]
    y = ops.attention(*leaves[:3], leftpad, sink=leaves[3])
    grads = torch.autograd.grad(y, leaves, placed(mesh, heads, Shard(1)))
    assert on_last(y, *grads) == [Shard(1)] * 4 + [Shard(0)]

    weight = m.randn(16, 8)
    plain = ops.gated_linear(placed(mesh, x, r), placed(mesh, weight, Shard(0)))
    pairs = ops.gated_linear(placed(mesh, x, r), placed(mesh, weight, Shard(0)), interleaved=True)
    assert on_last(plain, pairs) == [r, Shard(2)]
    same(plain, ops.gated_linear(x, weight), "gated_linear: ")


def keys_of_the_cache(mesh: DeviceMesh) -> None:
    """Calls that differ in one argument that is no tensor, or in which are left out."""
    m = Maker(DEVICE, WIDE, 0)
    x, weight, vector = m.randn(4, 8), m.randn(8, 8), m.randn(8)
    q, sink, ends = m.randn(4, 2, 4, 8), m.randn(2), m.pads(1, 2, 3, 4)
    s, codes = m.randn(4, 2, 4, 4), torch.ones(4, 2, dtype=torch.int32, device=DEVICE)
    differing: list[tuple[str, list[tuple[list[Any], dict[str, Any]]]]] = [
        ("linear", [([x, weight], {"activation": a}) for a in ("none", "gelu", "relu", "silu")]),
        ("layer_norm_linear", [([x, weight], {"eps": e}) for e in (1e-5, 0.1, 1.0)]),
        ("rms_norm_linear", [([x, weight], {"eps": e}) for e in (1e-5, 0.1, 1.0)]),
        ("layer_norm_linear", [([x, weight, *v], {}) for v in absent(vector, 3)]),
        ("gated_linear", [([x, weight], {"gate": g}) for g in ("geglu", "swiglu", "reglu")]),
        ("gated_linear", [([x, weight], {"interleaved": i}) for i in (False, True)]),
        ("attention", [([q, q, q], {"causal": c}) for c in (False, True)]),
        ("attention", [([q, q, q], {"window": w}) for w in (None, 1, 2)]),
        ("attention", [([q, q, q], {"scale": c}) for c in (None, 0.5, 2.0)]),
        ("attention", [([q, q, q], {"softcap": c}) for c in (None, 0.5, 2.0)]),
        ("attention", [([q, q, q], {"sink": t}) for t in (None, sink)]),
        ("attention", [([q, q, q], {"bias": t}) for t in (None, s[:1], s[1:2])]),
        ("attention", [([q, q, q, ends], {}), ([q, q, q], {"key_end": ends}), ([q, q, q], {})]),
        ("softmax_matmul", [([s, q], {"scale": c}) for c in (1.0, 0.5)]),
        ("causal_softmax", [([s], {"scale": c}) for c in (1.0, 0.5)]),
        ("add_scalar", [([x, value], {}) for value in (0.5, 2.0)]),
        ("int4_unpack", [([codes, cols], {}) for cols in (15, 16)]),
    ]
    for op, calls in differing:
        # A None among tensors is left as it is.
        for _ in range(2):
            for args, kwargs in calls:
                one, many = Sharded(op, lambda m, c=(args, kwargs): c, mesh), {}
                for name, t in one.tensors.items():
                    first = Shard(0) if t.shape[0] == 4 else Replicate()
                    many[name] = (Replicate(),) * (mesh.ndim - 1) + (first,)
                one.check(many)

    # Calls whose placements are supported for one value and not for the other.
    suiting: list[tuple[str, Call, dict[str, Any], dict[str, list[Any]]]] = [
        ("gated_linear", ([x, weight], {}), {"weight": Shard(0)}, {"interleaved": [True, False]}),
        (
            "linear",
            ([x, weight], {}),
            {"x": Shard(1), "weight": Shard(1)},
            {"activation": ["none", "gelu"]},
        ),
        (
            "attention",
            ([q, q, q], {}),
            {"query": Shard(2)},
            {"causal": [False, True], "window": [None, 2]},
        ),
    ]
    for op, (args, kwargs), where, changes in suiting:
        for _, (name, values) in product(range(2), changes.items()):
            for value in values:
                call_ = args, {**kwargs, name: value}
                one = Sharded(op, lambda m, c=call_: c, mesh)
                one.check({n: (Replicate(),) * (mesh.ndim - 1) + (p,) for n, p in where.items()})


def absent(t: Tensor, count: int) -> Iterator[list[Tensor | None]]:
    return (list(v) for v in product((None, t), repeat=count))


def experts_of_each_process(mesh: DeviceMesh) -> None:
    """Whole experts in each process, not always as many: no weight is gathered, and no token where
    another dim of the mesh shards them.
    """
    r, first = Replicate(), Shard(0)
    everywhere = (r,) * (mesh.ndim - 1)
    for experts, tokens, biases in product((4, 5), (r, first), (False, True)):
        m = Maker(DEVICE, WIDE, 0)
        args, _ = S.experts_call(6, 4, 8, experts, 2, biases=biases)(m)
        args[3][0, 0], args[3][1, 1] = -1, experts  # sentinels of the caller
        whole = [t.requires_grad_() if t.is_floating_point() else t for t in args]
        wanted = [i for i, t in enumerate(whole) if t.requires_grad]
        y = torchweld.experts(*whole)
        dy = m.randn(*y.shape)
        want = torch.autograd.grad(y, [whole[i] for i in wanted], dy)
        of_tokens = (tokens, *everywhere)
        shards = [
            place(t.detach(), mesh, of_tokens if i in (0, 3, 4) else (*everywhere, first))
            for i, t in enumerate(whole)
        ]
        for i in wanted:
            shards[i].requires_grad_()
        rows = (tokens, r)[-mesh.ndim :]
        with CommDebugMode() as comms:
            ours = torchweld.experts(*shards)
            leaves, dout = [shards[i] for i in wanted], place(dy, mesh, rows)
            grads = torch.autograd.grad(ours, leaves, dout)
        # x, index and weight are gathered, and two gradients scattered.
        gathers = tokens is first and mesh.ndim == 1
        assert comms.get_total_counts() == 5 * gathers, comms.get_comm_counts()
        assert ours.placements == (*rows[:-1], Partial())
        same(ours, y, "experts: ")
        for i, a, b in zip(wanted, grads, want, strict=True):
            same(a, b, f"gradient {i} of experts: ")


def compiled(mesh: DeviceMesh) -> None:
    """fullgraph, result and gradients."""
    m = Maker(DEVICE, WIDE, 0)
    r, ops = Replicate(), torch.ops.torchweld

    def layer(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        y = ops.layer_norm_linear(x, weight, bias, scale, activation="gelu")
        return ops.linear(y, out)

    def heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, causal=True, scale=0.3)

    def gate(x: Tensor, weight: Tensor) -> Tensor:
        return ops.gated_linear(x, weight, gate="swiglu", interleaved=True)

    shapes = [(4, 8), (8, 8), (8,), (8,), (8, 8)]
    column = [r, Shard(0), Shard(0), r, Shard(1)]
    grouped = [(2, 8, 4, 4), (2, 4, 4, 4), (2, 4, 4, 4)]
    for function, sizes, placements in (
        (layer, shapes, column),
        (heads, grouped, [Shard(1)] * 3),
        (gate, [(4, 8), (16, 8)], [r, Shard(0)]),
    ):
        whole = [m.randn(*size).requires_grad_() for size in sizes]
        shards = [placed(mesh, t.detach(), p) for t, p in zip(whole, placements, strict=True)]
        for t in shards:
            t.requires_grad_()
        quick = torch.compile(function, fullgraph=True, backend="aot_eager")
        y, ours = function(*whole), quick(*shards)
        same(ours, y, f"{function.__name__}: ")
        dy = m.randn(*y.shape)
        want = torch.autograd.grad(y, whole, dy)
        whole_ours = ours.redistribute(placements=[r] * mesh.ndim)
        for a, b in zip(
            torch.autograd.grad(whole_ours, shards, placed(mesh, dy, r)), want, strict=True
        ):
            same(a, b, f"d{function.__name__}: ")


def refusals(mesh: DeviceMesh) -> None:
    m = Maker(DEVICE, WIDE, 0)
    q, leftpad = placed(mesh, m.randn(2, 4, 4, 8), Shard(1)), m.pads(0, 0)
    sink = placed(mesh, m.randn(4), Partial())
    for function, error, sentence in (
        (
            lambda: torchweld.attention(q, q, q, leftpad),
            TypeError,
            "torchweld::attention: leftpad must be a DTensor like query, but got a Tensor; use "
            "distribute_tensor(leftpad, query.device_mesh, placements)",
        ),
        (
            lambda: torchweld.attention(q, q, q, sink=sink),
            RuntimeError,
            "torchweld::attention: sink must be placed ",
        ),
    ):
        try:
            function()
        except error as caught:
            assert str(caught).startswith(sentence), caught
        else:
            raise AssertionError(f"no error: {sentence}")


def single_precision(mesh: DeviceMesh) -> None:
    for op in ("layer_norm_linear", "attention", "gated_linear", "softmax"):
        sharded = Sharded(op, next(iter(BUILDS[op].values())), mesh, torch.float32)
        for arguments, _ in sharded.combined():
            sharded.check(arguments)


SPECIAL = (
    promised_placements, keys_of_the_cache, experts_of_each_process, compiled, refusals,
    single_precision,
)  # fmt: skip
Case = Callable[[DeviceMesh], None]


def cases(mesh: str) -> dict[str, Case]:
    """All on a mesh of 2. On 2 x 2, which has the square of combinations, one call of each op."""
    found: dict[str, Case] = {case.__name__: case for case in SPECIAL}
    if len(MESHES[mesh]) > 1:
        del found["compiled"]
    for op, builds in BUILDS.items():
        helper = op.endswith(("_forward", "_backward"))  # run by autograd too
        differentiable = op in DIFFERENTIABLE or (op in OPS_OF_LISTS and not helper)
        with_gradients = differentiable and not op.endswith("_forward")
        for name, build in builds.items():
            kinds: list[Any] = [gradients] if with_gradients else [every_row]
            if len(MESHES[mesh]) == 1:
                kinds = [every_row, *kinds[: int(with_gradients)], any_placement]
            elif helper or name not in ("full", "all", next(iter(builds))):
                continue
            elif name == "all":
                kinds.append(any_placement)
            for kind in kinds:
                few = helper and name not in ("all", "dlse", next(iter(builds)))
                if kind is not any_placement or not (few or op.endswith("_forward")):
                    found[f"{kind.__name__}-{op}-{name}"] = partial(kind, op, build)
    return found
