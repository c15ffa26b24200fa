"""Error sentences of the ops' Python functions for a call that never reaches an op.

Python rejects an unknown keyword, and torch's dispatcher a list instead of a tensor, with their own
messages. This module replaces them by the ops' sentence: torchweld::<op>: <argument> must be
<expected>, but got <got>; <fix>.
"""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from torch import SymBool, SymFloat, SymInt, Tensor, nn, strided

# TorchScript resolves the names of a decorated function in the decorator's module, so that module
# needs `ops`.
from torchweld._library import ops  # noqa: F401

_Function = TypeVar("_Function", bound=Callable[..., Any])

_KINDS: dict[type, tuple[str, tuple[type, ...]]] = {
    Tensor: ("a Tensor", (Tensor,)),
    str: ("a str", (str,)),
    bool: ("a bool", (bool, SymBool)),
    int: ("an int", (int, SymInt)),
    float: ("a float", (float, int, SymFloat, SymInt)),
}

_LAST_DIM = "leave it out, the last dim is meant; for another one use x.movedim(dim, -1)"
_MASK = (
    "masks are numbers: use leftpad=torchweld.leftpad_from_mask(attention_mask), or key_start=, "
    "key_end=, window="
)
_BIAS = "torchweld.attention adds bias= to the scores"
_NUMBERS = ("leftpad", "key_start", "key_end")
_CLASS_WEIGHTS = "use reduction='none' and multiply by class_weights[target]"
_PAIR = "use torchweld.gated_linear_pair for two weights"
# For each argument name of other libraries: torchweld's argument, and the advice for the error
# message.
_FIXES: dict[str, list[tuple[str, str]]] = {
    "is_causal": [("causal", "use causal=, which is aligned at the bottom right")],
    **dict.fromkeys(
        ("attn_mask", "attention_mask", "key_padding_mask", "mask"), [("leftpad", _MASK)]
    ),
    "attn_bias": [("bias", "use bias="), ("cu_seqlens_q", _BIAS)],
    "alibi_slopes": [("cu_seqlens_q", "torchweld.attention has alibi_slopes=")],
    **{
        name: [(argument, text) for argument in ("query", "cu_seqlens_q")]
        for name, text in (
            ("block_table", "attention reads no paged cache, pass contiguous keys and values"),
            ("deterministic", "leave it out, gradients are always deterministic"),
        )
    },
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), [("scale", "use scale=")]),
    "window_size": [
        ("window", "use window=left + 1, or torchweld.compat.flash_attn for other right sizes")
    ],
    "sliding_window": [("window", "use window=")],
    "dropout": [("dropout_p", "use dropout_p=")],
    **dict.fromkeys(
        ("logits_soft_cap", "logit_cap", "logit_softcapping"), [("softcap", "use softcap=")]
    ),
    "linear_weight": [("weight", "use weight=")],
    **dict.fromkeys(("input", "hidden_states"), [("x", "use x="), ("logits", "use logits=")]),
    "labels": [("target", "use target=")],
    "options": [("keep", "use keep=")],
    **dict.fromkeys(("class_weights", "ce_weight", "weight"), [("target", _CLASS_WEIGHTS)]),
    "activation": [("gate", 'use gate=, as "swiglu" = silu(left) * right')],
    "linear_bias": [("bias", "use bias=")],
    **dict.fromkeys(("lse_square_scale", "z_loss_multiplier"), [("z_loss", "use z_loss=")]),
    **dict.fromkeys(("sinks", "s_aux"), [("sink", "use sink=")]),
    **dict.fromkeys(("cache_seqlens", "seqused_k"), [("key_end", "use key_end=")]),
    **{f"max_{t}": [(f"max_seqlen_{t}", f"use max_seqlen_{t}=")] for t in "qk"},
    **{f"cu_seq_{t}": [(f"cu_seqlens_{t}", f"use cu_seqlens_{t}=")] for t in "qk"},
    **{f"cu_seq_lens_{t}": [(f"cu_seqlens_{t}", f"use cu_seqlens_{t}=")] for t in "qk"},
    **dict.fromkeys(
        ("return_attn_probs", "return_softmax_lse", "return_aux"),
        [("return_lse", "use return_lse="), ("query", "use torchweld.attention_with_lse")],
    ),
    "enable_gqa": [("query", "leave it out, key may have fewer heads than query")],
    **dict.fromkeys(("dim", "axis"), [("x", _LAST_DIM)]),
    "keepdim": [("x", "leave it out and use .unsqueeze(-1) on the result")],
    "dtype": [("x", "use x.to(dtype)"), ("query", "use query.to(dtype)")],
    "approximate": [
        ("activation", 'use activation="gelu_tanh"'),
        ("gate", 'use gate="geglu_tanh"'),
    ],
    **dict.fromkeys(("left", "right", "w1", "w2"), [("interleaved", _PAIR)]),
    "unsqueeze_dim": [("cos", "leave it out, the heads are dim 1 of q and k")],
    "normalized_shape": [("weight", "leave it out, it is weight's last size")],
}
# Arguments of other libraries that are accepted if they ask for nothing: None, or a dropout of 0.
_IDLE = (
    "attn_mask", "attention_mask", "dropout_p", "dropout", "alibi_slopes", "attn_bias",
    "block_table", "weight",
)  # fmt: skip
# For names of activations in torch and transformers, the ops' names. In _GATES, for each op's name,
# the gate that applies the activation.
_ACTIVATIONS = {
    "linear": "none",
    "identity": "none",
    "gelu_python": "gelu",
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"),
        "gelu_tanh",
    ),
    "swish": "silu",
    "relu2": "relu_squared",
}
_GATES = {
    "gelu": "'geglu' = left * gelu(right)",
    "gelu_tanh": "'geglu_tanh' = left * gelu_tanh(right)",
    "silu": "'swiglu' = silu(left) * right",
    "relu": "'reglu' = left * relu(right)",
}


def name_fix(argument: str, name: Any) -> str:
    """Returns an error's end for an unknown activation or gate: the name to use, or ""."""
    if isinstance(name, nn.Linear):
        return "; use GatedLinear.from_linears for two layers"
    if callable(name):
        return "; use its name"
    name = str(name).lower()
    name = _ACTIVATIONS.get(name, name)
    if argument == "gate":
        return f"; use {_GATES[name]}" if name in _GATES else ""
    return f"; use {name!r}" if name in _ACTIVATIONS.values() else ""


def unknown_op(argument: str, op: Any, known: Sequence[str]) -> str:
    """Returns the error for an unknown op, with the nearest name or all names."""
    name = describe(op).rpartition("::")[2].strip("'")
    # varlen_attention is no op but a function that calls the op attention.
    if near := get_close_matches(name.removeprefix("varlen_"), known, 1):
        return f"{argument} must be the name of an op, but got {describe(op)}; use {near[0]!r}"
    return f"{argument} must be one of {', '.join(known)}, but got {describe(op)}"


def readable_errors(function: _Function) -> _Function:
    """Decorates an op's Python function: bad arguments raise TypeError with a readable text."""

    names = list(inspect.signature(function).parameters)
    idle = [name for name in _IDLE if _fixes(name, names)]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in idle:
            if name in kwargs and (
                kwargs[name] is None or name.startswith("dropout") and kwargs[name] == 0
            ):
                del kwargs[name]
        try:
            return function(*args, **kwargs)
        except (TypeError, RuntimeError) as error:
            # Messages that begin with "torchweld" are readable already: they come from the op's own
            # checks or say that the library is missing. Messages of torch's dispatcher are
            # replaced.
            op = f"torchweld::{function.__name__}"
            theirs = (f"{op}() ", "torchweld.")
            if str(error).startswith("torchweld") and not str(error).startswith(theirs):
                fix = _fix(str(error).removeprefix(f"{op}: "), function, args, kwargs)
                if not fix:
                    raise
                raise type(error)(f"{error}{fix}") from None
            sentence = _sentence(function, args, kwargs)
            if sentence is None:
                raise
            raise TypeError(f"{op}: {sentence}") from None

    return call  # type: ignore[return-value]


def readable_constructor(module: type) -> None:
    """Makes a module's constructor refuse unknown keywords in the words of the ops."""
    init: Callable[..., None] = module.__init__  # type: ignore[misc]
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def construct(self: object, *args: Any, **kwargs: Any) -> None:
        if unknown := _unknown(names, kwargs):
            raise TypeError(f"torchweld.nn.{module.__name__}: {unknown}")
        init(self, *args, **kwargs)

    module.__init__ = construct  # type: ignore[misc]


def _fixes(name: str, names: list[str]) -> list[str]:
    """Lists the advice for another library's argument in a function with these arguments."""
    return [text for ours, text in _FIXES.get(name, []) if ours in names and name not in names]


def _fix(
    text: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Returns an end for an op's error if the call looks like another library's."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    argument, op = text.partition(" must be ")[0], function.__name__
    if argument in ("activation", "gate"):
        return name_fix(argument, given[argument])
    bias = given.get("bias")
    if op == "gated_linear" and bias is not None and bias.dim() == 2:
        return f"; {_PAIR}"
    if op == "cross_entropy" and argument == "target":
        batch, *_ = sizes = given["logits"].shape
        if len(sizes) > 2 and given["target"].shape == (batch, *sizes[2:]):
            return "; the classes are the last dim, use logits.movedim(1, -1)"
    return ""


def _unknown(names: list[str], kwargs: dict[str, Any]) -> str | None:
    """Returns the error for a keyword that is no argument, or None."""
    for name in kwargs:
        if name not in names:
            fixes = _fixes(name, names)
            fixes += [f"use {ours}=" for ours in get_close_matches(name, names, 1)]
            return f"arguments must be {', '.join(names)}, but got {name}" + "".join(
                f"; {fix}" for fix in fixes[:1]
            )
    return None


def _sentence(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Returns the error in the names and kinds of the arguments, or None."""
    signature = inspect.signature(function)
    names = list(signature.parameters)
    if unknown := _unknown(names, kwargs):
        return unknown
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    most = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(args) > most:
        fix = "; use " + "=, ".join(names[most:]) + "=" if most < len(names) else ""
        fix = f"; {_LAST_DIM}" if names == ["x"] else fix
        return f"arguments must be {', '.join(names)}, but got {len(args)} without a name{fix}"
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # Python's own message names the missing or repeated argument
        return None
    hints = typing.get_type_hints(function)
    for name, value in given.items():
        if typing.get_origin(hints[name]) is list:
            listed = isinstance(value, (list, tuple))
            if not listed or not all(isinstance(each, Tensor) for each in value):
                return f"{name} must be a list of Tensors, but got {describe(value)}"
            continue
        hint = str if typing.get_origin(hints[name]) is typing.Literal else hints[name]
        allowed = typing.get_args(hint) or (hint,)
        if value is None and type(None) in allowed:
            continue
        text, classes = _KINDS[allowed[0]]
        if not isinstance(value, classes):
            return f"{name} must be {text}, but got {describe(value)}{_kind_fix(name, value, text)}"
    return _mixed(given) or _not_dense(given)


def _not_dense(given: dict[str, Any]) -> str | None:
    """Returns the error for a sparse, nested or quantised Tensor, or None."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            continue
        if value.is_nested:
            kind, fix = "nested", f"torch.nested.to_padded_tensor({name}, 0)"
        elif value.is_quantized:
            kind, fix = "quantised", f"{name}.dequantize()"
        elif value.layout is not strided:
            kind, fix = str(value.layout).rpartition(".")[2].removeprefix("_"), f"{name}.to_dense()"
        else:
            continue
        return f"{name} must be a dense Tensor, but got a {kind} one; use {fix}"
    return None


def _mixed(given: dict[str, Any]) -> str | None:
    """Returns the error for a call that mixes Tensors and DTensors, or None."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None:
        return None
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    sharded = [n for n, value in tensors.items() if isinstance(value, distributed.DTensor)]
    for name in tensors:
        if sharded and name not in sharded:
            return (
                f"{name} must be a DTensor like {sharded[0]}, but got a Tensor; use "
                f"distribute_tensor({name}, {sharded[0]}.device_mesh, placements)"
            )
    return None


def describe(value: Any) -> str:
    """Returns a value's text for an error: a short value, or the name of a function or a type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return getattr(value, "__name__", type(value).__name__)


def _kind_fix(name: str, value: Any, expected: str) -> str:
    if expected == "a Tensor" and (isinstance(value, (list, tuple)) or hasattr(value, "__array__")):
        dtype = ", dtype=torch.int32" if name in _NUMBERS else ""
        return f"; use torch.as_tensor({name}{dtype})"
    if expected == "a str" and callable(value):
        return "; use its name"
    if isinstance(value, Tensor):
        return f"; use {name}.item()"
    return ""
