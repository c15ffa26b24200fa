"""Bad calls, as tables: each is a good call with one thing wrong, and the argument to be named.

The tables are made from a description of every argument: what fixes its dtype, its rank and its
sizes. `cases(op)` lists them; test_<op>.py runs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import samples

NOT_FLOATING = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool, torch.complex32, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip
OTHER_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.float16, torch.float64)
LEFTPAD_DTYPES = (torch.int64, torch.int16, torch.uint8, torch.bool, torch.float32)
NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
NOT_A_NAME = ("", "None", "tanh", "GELU", "gelu ", "relu6", "swish", "gelu\0")


@dataclass(frozen=True)
class Arg:
    """One tensor argument of a good call.

    `anchor`: the others are compared with it. `rank`: "fixed", "min" (the sample already has the
    fewest dims) or "" (free). `sized`: dims whose size another argument fixes. `blame`: the
    arguments that the error may name instead if two disagree and neither is the anchor.
    """

    name: str
    anchor: bool = False
    rank: str = "fixed"
    sized: Sequence[int] = ()
    blame: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    sample: str
    args: Sequence[Arg]
    scalars: dict[str, Sequence[Any]] = field(default_factory=dict)
    drop: Sequence[str] = ()  # tensors that must be given
    extra: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    op: str
    name: str
    expected: tuple[str, ...]
    change: Callable[[dict[str, Any]], None]

    def good_call(self, device: str) -> dict[str, Any]:
        """The good call by name of argument."""
        args, kwargs = samples.sample(self.op, SPECS[self.op].sample).make(device)
        names = [a.name for a in samples.call(self.op).default._schema.arguments]
        return dict(zip(names, args, strict=False)) | kwargs

    def refused(self, device: str, recorded: bool) -> str:
        """Make the bad call; returns the text of the refusal."""
        given = self.good_call(device)
        samples.call(self.op)(**given)
        self.change(given)
        if recorded:
            for i, name in enumerate(list(given)):
                value = given[name]
                wanted = i in samples.DIFFERENTIABLE[self.op] and isinstance(value, Tensor)
                if wanted and (value.is_floating_point() or value.is_complex()):
                    given[name] = value.requires_grad_()
        with pytest.raises(RuntimeError) as error:
            samples.call(self.op)(**given)
        return str(error.value)

    def check(self, device: str, recorded: bool = False) -> None:
        text = self.refused(device, recorded)
        names = "|".join(map(re.escape, self.expected))
        pattern = rf"torchweld::{self.op}: ({names}) must be [^\n]+, but got [^\n]+"
        assert re.fullmatch(pattern, text), f"{self.name}: {text!r} does not name {self.expected}"


def replace(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Any]], None]:
    def change(given: dict[str, Any]) -> None:
        given[name] = make(given[name])

    return change


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda given: given.__setitem__(name, value)


def zeros(t: Tensor, shape: Sequence[int] | None = None, dtype=None, device=None) -> Tensor:
    return torch.zeros(
        t.shape if shape is None else shape, dtype=dtype or t.dtype, device=device or t.device
    )


def resized(dim: int, by: int) -> Callable[[Tensor], Tensor]:
    def make(t: Tensor) -> Tensor:
        shape = list(t.shape)
        shape[dim] += by
        return zeros(t, shape)

    return make


def tensor_cases(arg: Arg) -> dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], None]]]:
    """The errors that one tensor of any op can have."""
    made: dict[str, Callable[[dict[str, Any]], None]] = {}
    if arg.name == "leftpad":
        for dtype in LEFTPAD_DTYPES:
            made[f"{dtype}"] = replace("leftpad", lambda t, d=dtype: t.to(d))
        made["longer"] = replace("leftpad", resized(0, 1))
        made["shorter"] = replace("leftpad", resized(0, -1))
        made["rank 0"] = replace("leftpad", lambda t: zeros(t, ()))
        made["rank 2"] = replace("leftpad", lambda t: zeros(t, (*t.shape, 1)))
        made["meta"] = replace("leftpad", lambda t: t.to("meta"))
        return {f"leftpad {k}": (("leftpad",), v) for k, v in made.items()}
    for dtype in NOT_FLOATING if arg.anchor else OTHER_DTYPES:
        made[f"{dtype}"] = replace(arg.name, lambda t, d=dtype: zeros(t, dtype=d))
    if arg.anchor:
        made["empty int64"] = replace(
            arg.name, lambda t: zeros(t, (0, *t.shape[1:]), dtype=torch.int64)
        )
    else:
        made["meta"] = replace(arg.name, lambda t: zeros(t, device="meta"))
    if arg.rank:
        made["rank 0"] = replace(arg.name, lambda t: zeros(t, ()))
    if arg.rank == "fixed":
        made["one dim less"] = replace(arg.name, lambda t: zeros(t, t.shape[1:]))
        made["one dim more"] = replace(arg.name, lambda t: zeros(t, (1, *t.shape)))
    for dim in arg.sized:
        made[f"dim {dim} larger"] = replace(arg.name, resized(dim, 1))
        made[f"dim {dim} smaller"] = replace(arg.name, resized(dim, -1))
    names = (arg.name, *arg.blame)
    return {f"{arg.name} {k}": (names, v) for k, v in made.items()}


def cases(op: str) -> list[Case]:
    spec = SPECS[op]
    found = [
        Case(op, name, expected, change)
        for arg in spec.args
        for name, (expected, change) in tensor_cases(arg).items()
    ]
    for name, values in spec.scalars.items():
        found += [Case(op, f"{name} {v!r}", (name,), put(name, v)) for v in values]
    found += [Case(op, f"{name} missing", (name,), put(name, None)) for name in spec.drop]
    found += [Case(op, name, (e,), change) for name, (e, change) in spec.extra.items()]
    return found


LEFTPAD = Arg("leftpad")
SCALE = {"scale": NOT_FINITE}
ACTIVATION = {"activation": NOT_A_NAME}
EPS = {"eps": (*NOT_FINITE, -1e-5)}
SCORES = Arg("scores", anchor=True)
RANK_4 = (0, 1, 2, 3)

softmax_matmul = [SCORES, Arg("value", sized=(0, 1, 2)), LEFTPAD]
saved = [Arg("out", sized=RANK_4), Arg("lse", sized=(0, 1, 2))]
scalar_attention = [Arg("q", anchor=True), Arg("k", sized=(0,)), Arg("v", sized=(0,))]
attention = [
    Arg("query", anchor=True),
    Arg("key", sized=(0, 3)),
    Arg("value", sized=(0, 1, 2)),
    LEFTPAD,
]
X, WEIGHT, BIAS = (
    Arg("x", anchor=True, rank="min"),
    Arg("weight", sized=(1,)),
    Arg("bias", sized=(0,)),
)
DY, PREACT = Arg("dy", rank="", sized=(0, 1)), Arg("preact", rank="", sized=(0, 1))
LN = [Arg("ln_weight", sized=(0,)), Arg("ln_bias", sized=(0,))]
RMS = [Arg("norm_weight", sized=(0,))]
STATS = [Arg("mean", rank="", sized=(0,)), Arg("rstd", rank="", sized=(0,))]
SCALE_OF_NORM, SUM = Arg("weight", sized=(0,)), Arg("sum", anchor=True, rank="min")
RESIDUAL, GATE_OF_NORM, DY_OF_NORM, DNORMED, DSUM = (
    Arg(name, rank="", sized=(0, 1)) for name in ("residual", "gate", "dy", "dnormed", "dsum")
)
OFFSET = {"weight_offset": NOT_FINITE}
FOLDED = [
    X,
    Arg("folded_weight", sized=(1,)),
    Arg("weight_sum", sized=(0,)),
    Arg("folded_bias", sized=(0,)),
]
GATE = {"gate": ("", "glu", "GEGLU", "geglu ", "swish", "sigmoid", "tanh_sigmoid", "none")}
heads = {
    "key heads do not divide": (
        "key",
        lambda given: given.update(
            key=given["key"][:, :1].repeat(1, 3, 1, 1),
            value=given["value"][:, :1].repeat(1, 3, 1, 1),
        ),
    ),
    "more key heads than query heads": (
        "key",
        lambda given: given.update(
            key=given["key"].repeat(1, 4, 1, 1), value=given["value"].repeat(1, 4, 1, 1)
        ),
    ),
}


Z = Arg("z", rank="", sized=(0, 1))


def with_grad(name: str):
    return (name, replace(name, lambda t: t.clone().requires_grad_()))


def zeroed(name: str, *changes: Any, **named: Any):
    """The argument as zeros of another shape, dtype or device."""
    return (name, replace(name, lambda t: zeros(t, *changes, **named)))


def both(op: str, *spec: Any, **more: Any) -> dict[str, Spec]:
    """An op and its _forward, which has the same arguments."""
    return dict.fromkeys((op, op + "_forward"), Spec(*spec, **more))


BMM = [Arg("a", anchor=True), Arg("b", sized=(0, 1))]

PAIR = [Arg("left", sized=(0, 1), blame=("right", "left_bias", "dy")), Arg("right", sized=(0, 1))]
GATED = [Arg("left", anchor=True, rank="min", blame=("right",)), Arg("right", sized=(0, 1))]
PAIR_OF_MLP = [Arg("left", sized=(0, 1), blame=("right", "down")), PAIR[1]]
DOWN = Arg("down", sized=(0, 1), blame=("down_bias", "dy"))
DOWN_BIAS = Arg("down_bias", sized=(0,))
EXPERTS = [
    Arg("x", anchor=True, sized=(0, 1), blame=("index", "gate_up")),
    Arg("gate_up", sized=(0, 1, 2), blame=("down",)),
    Arg("down", sized=(0, 1, 2)),
    Arg("weight", sized=(0, 1)),
]
EXPERT_BIASES = [Arg("gate_up_bias", sized=(0, 1)), Arg("down_bias", sized=(0, 1))]
EXPERT_GATE = {
    "gate": (*NOT_A_NAME, "GEGLU", "geglu ", "geglu", "relu"),
    "limit": (*NOT_FINITE, 0.0, -1.0),
    "alpha": NOT_FINITE,
}
GROUPS = [Arg("x", anchor=True, sized=(1,), blame=("weight",)), Arg("weight", sized=(2,))]
PAIR_BIASES = [Arg("left_bias", sized=(0,)), Arg("right_bias", sized=(0,))]

COS_SIN = [Arg("cos", rank="", sized=(0, 1, 2)), Arg("sin", sized=(0, 1, 2))]
TABLES = {
    f"cos {name}": zeroed("cos", shape)
    for name, shape in {
        "rank 0": (),
        "rank 1": (4,),
        "rank 4": (3, 1, 4, 4),
        "beyond head_dim": (4, 6),
        "of no value": (4, 0),
    }.items()
}

VECTORS = [Arg("x", anchor=True), Arg("y")]
SCALED_ROWS = [Arg("x", anchor=True), Arg("y", sized=(0,))]
DZ = Arg("dz", sized=(0, 1))

IMAGES = [Arg("x", anchor=True), Arg("weight")]

ZERO = Arg("zero", sized=(0, 1))
INT4_WEIGHT = [Arg("qweight", sized=(0, 1), blame=("scale", "dy")), Arg("scale", sized=(0,)), ZERO]
CODES = Arg("qweight", sized=(0, 1), blame=("scale",))
INT4_GROUPS = {
    "three groups of 16": ("scale", replace("scale", resized(1, 1))),
    "no group": ("scale", replace("scale", resized(1, -2))),
    "groups of 4": ("scale", replace("scale", resized(1, 2))),
}
INT4_REPACKED = [
    Arg("packed", sized=(0, 1, 2)),
    Arg("packed_scale", sized=(0, 1, 2), blame=("packed_zero",)),
    Arg("packed_zero", sized=(0, 1, 2)),
]
NOT_BYTES = (torch.int64, torch.bool, torch.complex64, torch.float16, torch.float32, torch.float64)

RANK_0 = {
    f"x rank 0 {dtype}": zeroed("x", (), dtype=dtype)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64)
}

SPECS: dict[str, Spec] = {
    "softmax": Spec(
        "matrix",
        [Arg("x", anchor=True, rank="min")],
        extra={
            **RANK_0,
            "x meta int64": zeroed("x", dtype=torch.int64, device="meta"),
            "x meta rank 0": zeroed("x", (), device="meta"),
            "x complex of one": zeroed("x", (1,), torch.complex64),
        },
    ),
    "softmax_backward": Spec(
        "matrix",
        [
            Arg("dy", anchor=True, rank="min", sized=(0, 1), blame=("y",)),
            Arg("y", rank="min", sized=(0, 1), blame=("dy",)),
        ],
    ),
    "causal_softmax": Spec(
        "padded",
        [Arg("scores", anchor=True, rank="min"), LEFTPAD],
        SCALE,
        extra={
            "scores rank 1": zeroed("scores", (3,)),
            "scores of another batch": ("leftpad", replace("scores", lambda t: t[:2])),
        },
    ),
    "causal_softmax_backward": Spec(
        "padded",
        [
            Arg("dy", anchor=True, rank="min", sized=(0, 1, 2, 3), blame=("y",)),
            Arg("y", rank="min", sized=(0, 1, 2, 3), blame=("dy",)),
            LEFTPAD,
        ],
        SCALE,
    ),
    **both("scalar_attention", "plain", scalar_attention),
    "scalar_attention_backward": Spec(
        "plain",
        [Arg("dz", sized=(0,)), *scalar_attention, Arg("mean", sized=(0,)), Arg("sum", sized=(0,))],
    ),
    **both("softmax_matmul", "padded", softmax_matmul, SCALE),
    "softmax_matmul_backward": Spec(
        "padded", [Arg("dout", sized=RANK_4), *softmax_matmul, *saved], SCALE
    ),
    **both("attention", "causal_padded", attention, SCALE, extra=heads),
    "attention_with_lse": Spec("causal_padded", attention, SCALE, extra=heads),
    "attention_backward": Spec(
        "causal_padded", [Arg("dout", sized=RANK_4), *attention, *saved], SCALE, extra=heads
    ),
    **both("linear", "relu", [X, WEIGHT, BIAS], ACTIVATION),
    "linear_backward": Spec("silu", [DY, X, WEIGHT, PREACT], ACTIVATION, drop=("preact",)),
    **both("layer_norm_linear", "relu", [X, WEIGHT, BIAS, *LN], ACTIVATION | EPS),
    "layer_norm_linear_backward": Spec(
        "relu", [DY, X, WEIGHT, *LN, *STATS, PREACT], ACTIVATION, drop=("preact",)
    ),
    **both("rms_norm_linear", "relu", [X, WEIGHT, BIAS, *RMS], ACTIVATION | EPS | OFFSET),
    "rms_norm_linear_backward": Spec(
        "relu", [DY, X, WEIGHT, *RMS, STATS[1], PREACT], ACTIVATION | OFFSET, drop=("preact",)
    ),
    **both("rms_norm_gated", "plain", [X, GATE_OF_NORM, SCALE_OF_NORM], EPS),
    "rms_norm_gated_backward": Spec(
        "plain", [DY_OF_NORM, X, GATE_OF_NORM, SCALE_OF_NORM, STATS[1]]
    ),
    **both("rms_norm", "plain", [X, SCALE_OF_NORM], EPS | OFFSET),
    "rms_norm_backward": Spec("plain", [DY_OF_NORM, X, SCALE_OF_NORM, STATS[1]], OFFSET),
    **both("layer_norm", "plain", [X, SCALE_OF_NORM, BIAS], EPS),
    "layer_norm_backward": Spec("plain", [DY_OF_NORM, X, SCALE_OF_NORM, *STATS]),
    **both("add_rms_norm", "plain", [X, RESIDUAL, SCALE_OF_NORM], EPS | OFFSET),
    "add_rms_norm_backward": Spec("plain", [DNORMED, SUM, SCALE_OF_NORM, STATS[1], DSUM], OFFSET),
    **both("add_layer_norm", "plain", [X, RESIDUAL, SCALE_OF_NORM, BIAS], EPS),
    "add_layer_norm_backward": Spec("plain", [DNORMED, SUM, SCALE_OF_NORM, *STATS, DSUM]),
    "fold_layer_norm": Spec("full", [Arg("weight", anchor=True), BIAS, *LN]),
    "folded_layer_norm_linear": Spec(
        "relu",
        FOLDED,
        ACTIVATION | EPS,
        extra={
            f"{name} requires grad": with_grad(name)
            for name in ("folded_weight", "weight_sum", "folded_bias")
        },
    ),
    "folded_layer_norm_linear_backward": Spec("relu", [DY, *FOLDED], ACTIVATION | EPS),
    **both(
        "gated_linear",
        "sigmoid_tanh",
        [X, WEIGHT, BIAS],
        GATE,
        extra={"odd weight": ("weight", replace("weight", lambda t: t[:3]))},
    ),
    "bmm": Spec("plain", BMM),
    "int4_linear": Spec(
        "plain",
        [X, *INT4_WEIGHT, BIAS],
        extra={
            **INT4_GROUPS,
            "K of 12": zeroed("x", (3, 12)),
            "scale requires grad": with_grad("scale"),
            "bias requires grad": with_grad("bias"),
        },
    ),
    "int4_linear_backward": Spec(
        "plain", [Arg("dy", anchor=True, rank="min", sized=(1,)), *INT4_WEIGHT], extra=INT4_GROUPS
    ),
    "int4_repack": Spec(
        "plain", [CODES, Arg("scale", anchor=True, sized=(0,)), ZERO], extra=INT4_GROUPS
    ),
    "int4_linear_repacked": Spec(
        "plain",
        [X, *INT4_REPACKED, BIAS],
        {"out_features": (-1, -16)},
        extra={
            "more rows than packed": ("packed", put("out_features", 17)),
            "packed_scale requires grad": with_grad("packed_scale"),
            "bias requires grad": with_grad("bias"),
        },
    ),
    "int4_linear_repacked_backward": Spec(
        "plain",
        [Arg("dy", anchor=True, rank="min"), *INT4_REPACKED],
        {"in_features": (-1, -64)},
        extra={
            "more columns than packed": ("packed", put("in_features", 72)),
            "columns of no group": ("packed_scale", put("in_features", 24)),
        },
    ),
    "int4_pack": Spec(
        "plain",
        [],
        extra={
            f"codes {dtype}": zeroed("codes", dtype=dtype)
            for dtype in (*NOT_BYTES, torch.int8, torch.int32, torch.bfloat16)
        }
        | {"codes rank 0": zeroed("codes", ())},
    ),
    "int4_unpack": Spec(
        "plain",
        [],
        extra={
            f"packed {dtype}": zeroed("packed", dtype=dtype)
            for dtype in (*NOT_BYTES, torch.uint8, torch.uint32, torch.int16)
        }
        | {f"cols {c}": ("packed", put("cols", c)) for c in (-1, 0, 8, 17, 2**31)}
        | {"packed rank 0": zeroed("packed", ())},
    ),
    **{
        "causal_conv1d" + end: Spec(
            "state",
            [
                *[Arg("dy", sized=(0, 1, 2))] * bool(end),
                Arg("x", anchor=True),
                Arg("weight", sized=(0, 1), blame=("initial_state",)),
                Arg("bias", sized=(0,)),
                Arg("initial_state", sized=(0, 1, 2)),
            ],
            {"activation": (*NOT_A_NAME, "relu", "gelu")},
        )
        for end in ("", "_backward")
    },
    "rotary": Spec(
        "batch",
        [Arg("q", anchor=True), Arg("k", sized=(0, 2, 3)), *COS_SIN],
        extra=TABLES | {f"{name} requires grad": with_grad(name) for name in ("cos", "sin")},
    ),
    "rotary_backward": Spec(
        "batch",
        [Arg("dq_out", anchor=True), Arg("dk_out", sized=(0, 2, 3)), *COS_SIN],
        extra=TABLES,
    ),
    "row_sum": Spec(
        "matrix",
        [Arg("x", anchor=True, rank="min")],
        extra={
            **RANK_0,
            "x meta rank 0": zeroed("x", (), device="meta"),
            "x meta int64": zeroed("x", (2, 2), torch.int64, "meta"),
        },
    ),
    "add_scalar": Spec("matrix", [Arg("x", anchor=True, rank="")]),
    "outer_add": Spec("plain", VECTORS),
    "outer_add_backward": Spec("plain", [Arg("dz", anchor=True)]),
    "outer_mul_relu": Spec("plain", VECTORS),
    "outer_mul_relu_backward": Spec("plain", [DZ, *VECTORS]),
    "mul_relu": Spec("plain", SCALED_ROWS),
    "mul_relu_backward": Spec("plain", [DZ, *SCALED_ROWS]),
    "conv2d": Spec("plain", IMAGES),
    "conv2d_backward": Spec("plain", [Arg("dz", sized=(0, 1, 2)), *IMAGES]),
    "bmm_backward": Spec("plain", [Arg("dy", sized=(0, 1, 2)), *BMM]),
    "gated_activation": Spec("plain", GATED, GATE),
    "gated_activation_backward": Spec("plain", [Arg("dy", sized=(0, 1)), *GATED], GATE),
    **both("gated_linear_pair", "plain", [X, *PAIR, *PAIR_BIASES], GATE),
    "gated_linear_pair_backward": Spec("plain", [DY, X, *PAIR, Z], GATE),
    **both("gated_mlp", "plain", [X, *PAIR_OF_MLP, DOWN, *PAIR_BIASES, DOWN_BIAS], GATE),
    "gated_mlp_backward": Spec("plain", [DY, X, *PAIR_OF_MLP, DOWN, Z], GATE),
    **both("experts", "bias", [*EXPERTS, *EXPERT_BIASES], EXPERT_GATE),
    "experts_backward": Spec(
        "bias",
        [Arg("dy", sized=(0, 1)), *EXPERTS, Arg("z", sized=(0, 1)), EXPERT_BIASES[1]],
        EXPERT_GATE,
    ),
    **both("grouped_linear", "bias", [*GROUPS, Arg("bias", sized=(0, 1))], ACTIVATION),
    **both("grouped_gated_linear", "bias", [*GROUPS, Arg("bias", sized=(0, 1))], GATE),
    "grouped_linear_backward": Spec(
        "bias", [Arg("dy", sized=(0, 1)), *GROUPS, Arg("preact", sized=(0, 1))], ACTIVATION
    ),
    "grouped_gated_linear_backward": Spec(
        "bias", [Arg("dy", sized=(0, 1)), *GROUPS, Arg("z", sized=(0, 1))], GATE
    ),
    "gated_linear_backward": Spec(
        "sigmoid_tanh",
        [DY, X, WEIGHT, Z],
        GATE,
        extra={
            "odd weight": (
                "weight",
                lambda given: given.update(weight=given["weight"][:3], z=given["z"][:, :3]),
            )
        },
    ),
}
