"""torch.func over the ops: grad, vjp, jacrev and vmap, and their nestings.

torch refuses C++ autograd functions under these transforms, so each op gets a kernel for the key
that they dispatch to. It is a Python `autograd.Function` made from the schemas: `<op>_forward`
(`<op>` if it does not exist) gives the result and the tensors of the gradient, and the arguments of
`<op>_backward` are found by name among inputs and results. Calls outside of torch.func never come
here.

If an op takes leading dims, vmap moves the batch to the front; if the op has a batch, vmap folds
its own into that; else it calls the op once for each entry, as for per-sample weight gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import custom_function_call_vmap_helper
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from torchweld._flops import LAYERS, LISTS
from torchweld.info import public_op

_WITH_LSE = "_with_lse"  # the suffix of attention's variant that also returns lse
# For each op: arguments whose gradient equals the gradient of another argument.
_SAME_GRADIENT = {"add_rms_norm": {"residual": "x"}, "add_layer_norm": {"residual": "x"}}
# Ops that autocast does not cast to its dtype. It casts their tensors to the widest dtype of the
# arguments in _LEADING, which must have one dtype.
_KEEPS_DTYPE = (
    "gated_activation", "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm",
    "rms_norm_gated",
)  # fmt: skip
_FRONT_KEY = "FuncTorchDynamicLayerFrontMode"
# The attribute of torch.ops.torchweld that keeps the registered kernels alive.
_KEPT = "_kernels_of_functorch"
# For each op and its <op>_forward: the arguments that can take vmap's batch as a leading dim. If
# another argument has a batch, vmap folds the batch (_BATCHED) or calls the op for each entry.
_LEADING = {
    "softmax": ("x",),
    "softmax_backward": ("dy", "y"),
    "causal_softmax": ("scores",),
    "causal_softmax_backward": ("dy", "y", "scores"),
    "row_sum": ("x",),
    "add_scalar": ("x",),
    "gated_activation": ("left", "right"),
    "gated_activation_backward": ("dy", "left", "right"),
    **dict.fromkeys((*LAYERS, "int4_linear", "int4_linear_repacked"), ("x",)),
    "linear_token_logprobs": ("x", "target"),
    **dict.fromkeys(("rms_norm", "layer_norm"), ("x",)),
    **dict.fromkeys(("add_rms_norm", "add_layer_norm"), ("x", "residual")),
    "rms_norm_gated": ("x", "gate"),
}
# Arguments with an entry per sequence or head of the op's own batch, or (dropout_seed) whose effect
# depends on positions in that batch. With them vmap can't add its batch as a leading dim.
_OF_HEADS = ("sink", "alibi_slopes")
_OF_OWN_BATCH = ("leftpad", "key_start", "key_end", *_OF_HEADS, "dropout_seed", "bias")
# Ops whose tensors, except those of heads and dropout_seed, begin with the batch. vmap folds its
# batch into that of a call without these.
_BATCHED = ("attention", "attention" + _WITH_LSE, "softmax_matmul", "bmm")
# Arguments that autocast does not cast, because they are added to fp32 sums.
_WIDE = ("weight_sum", "folded_bias")
# For each op without a backward op: the function that computes dx from dy and the shape of x.
_GRADIENTS: dict[str, Callable[[Tensor, torch.Size], Tensor]] = {
    "row_sum": lambda dy, shape: dy.unsqueeze(-1).expand(shape),
    "add_scalar": lambda dy, shape: dy,
}


def _op(name: str) -> Any:
    return getattr(torch.ops.torchweld, name).default


def _exists(name: str) -> bool:
    return hasattr(torch.ops.torchweld, name)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _left_out(t: Tensor) -> bool:
    """Whether a result was not requested."""
    return t.shape == (0,)


def _vmap(
    op: str,
    names: Sequence[str],
    call: Callable[..., Any],
    size: int,
    dims: Sequence,
    args: Sequence,
) -> tuple[Any, Any]:
    """Runs a call with a batch at `dims` of its arguments; returns results and batch dims."""
    given = dict(zip(names, args, strict=False))
    at = dict(zip(names, dims, strict=False))
    batched = {name for name in names if any(d is not None for d in _tuple(at.get(name)))}

    def entry(name: str, i: int) -> Any:
        value, dim = given[name], at.get(name)
        if isinstance(value, (tuple, list)):
            return [v if d is None else v.select(d, i) for v, d in zip(value, dim, strict=True)]
        return front(name)[i] if name in batched else value

    def front(name: str) -> Any:
        value = given[name]
        if not isinstance(value, Tensor):
            return value
        if at[name] is None:
            return value.expand(size, *value.shape)
        return value.movedim(at[name], 0)

    leading = _LEADING.get(op.removesuffix("_forward"), ())
    tensors = {name for name, value in given.items() if _is(value)}

    def folds() -> bool:
        if public_op(op) not in _BATCHED or tensors & {*_OF_HEADS, "dropout_seed"}:
            return False
        return len({front(name).shape[1] for name in tensors}) == 1

    if size and batched <= set(leading) and not tensors & set(_OF_OWN_BATCH):
        out = call(*[front(n) if n in leading else given[n] for n in given])
        outs = _tuple(out)
    elif size and folds():
        folded = [t.flatten(0, 1) if _is(t) else t for t in map(front, given)]
        out = call(*folded)
        outs = tuple(t if _left_out(t) else t.unflatten(0, (size, -1)) for t in _tuple(out))
    elif size:
        entries = [_tuple(call(*[entry(n, i) for n in given])) for i in range(size)]
        outs = tuple(
            e[0] if _left_out(e[0]) else torch.stack(e) for e in zip(*entries, strict=True)
        )
        out = outs if len(outs) > 1 else outs[0]
    else:
        raise RuntimeError(f"torchweld::{op}: the batch of vmap must be at least 1, but got 0")
    where = tuple(None if _left_out(t) else 0 for t in outs)
    return (outs, where) if isinstance(out, tuple) else (outs[0], where[0])


def _backward_op(op: str) -> Any:
    """Returns the backward op of a public op, or None if it has none."""
    name = op.removesuffix(_WITH_LSE) + "_backward"
    return _op(name) if _exists(name) else None


def _second_gradient(op: str) -> str | None:
    """Returns the argument of the backward op for the gradient of the second result, or None."""
    backward_op, returns = _backward_op(op), _op(op)._schema.returns
    if backward_op is None or len(returns) < 2:
        return None
    name = "d" + returns[1].name
    return name if name in [a.name for a in backward_op._schema.arguments] else None


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _function(op: str) -> type[torch.autograd.Function]:
    """Makes the op a Function of its arguments in the schema's order, for torch.func."""
    forward_op = _op(op + "_forward" if _exists(op + "_forward") else op)
    schema = forward_op._schema
    names = [a.name for a in schema.arguments]
    positional = sum(not a.kwarg_only for a in schema.arguments)
    results = [r.name or "y" for r in schema.returns]
    second = _second_gradient(op)
    backward_op = _backward_op(op)
    arguments = backward_op._schema.arguments if backward_op else []
    required = [a.name for a in arguments if str(a.type) == "Tensor"]

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            keywords = dict(zip(names[positional:], args[positional:], strict=True))
            return forward_op(*args[:positional], **keywords)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = _tuple(output)
            kept = outputs[1:]
            if second is not None and not _left_out(outputs[1]):
                kept = outputs[2:]
            ctx.mark_non_differentiable(*kept)
            ctx.set_materialize_grads(False)
            ctx.tensors = [n for n, v in zip(names, inputs, strict=True) if _is(v)] + results
            ctx.constants = {n: v for n, v in zip(names, inputs, strict=True) if not _is(v)}
            ctx.shape = inputs[0].shape
            if backward_op is None:
                return
            ctx.save_for_backward(*[v for v in inputs if _is(v)], *outputs)

        @staticmethod
        def backward(ctx: Any, dy: Tensor | None, *more: Any) -> tuple[Any, ...]:
            dsecond = more[0] if second is not None else None
            if dy is None and dsecond is None:
                return (None,) * len(names)
            if backward_op is None:
                return (_GRADIENTS[op](dy, ctx.shape), *[None] * (len(names) - 1))
            wanted = dict(zip(names, ctx.needs_input_grad, strict=True))
            values = dict(zip(reversed(ctx.tensors), reversed(ctx.saved_tensors), strict=True))
            values.update(ctx.constants)
            if second is not None:
                values[second] = dsecond
                if dsecond is None and second in required:
                    values[second] = torch.zeros_like(values[results[1]])
            if dy is None:
                dy = torch.zeros_like(values[results[0]])
            return _backward(op, names, backward_op, dy, values, wanted)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise NotImplementedError(
                f"torchweld::{op}: the derivative must be reverse-mode, but got forward-mode (jvp, "
                "jacfwd, hessian); use torch.func.vjp or jacrev"
            )

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
            return _vmap(op, names, Function.apply, info.batch_size, in_dims, args)

    Function.__name__ = Function.__qualname__ = op
    return Function


def _backward(
    op: str,
    names: Sequence[str],
    backward_op: Any,
    dy: Tensor,
    values: dict[str, Any],
    wanted: dict[str, bool],
) -> tuple[Any, ...]:
    """Computes the gradients, one for each argument of the op."""
    arguments = backward_op._schema.arguments[1:]
    returns = [r.name.removeprefix("d") or names[0] for r in backward_op._schema.returns]
    same = _SAME_GRADIENT.get(op, {})
    for name in names:
        if wanted[name] and same.get(name, name) not in returns:
            raise RuntimeError(
                f"torchweld::{op}: {name} must not require a gradient, but got one that does; use "
                f"{name}.detach()"
            )
    if values.get("activation") in ("none", "relu"):  # relu's gradient needs only y, none's nothing
        values["preact"] = values["y"] if values["activation"] == "relu" else None
    values["output_mask"] = [
        wanted[name] or any(wanted[n] for n, like in same.items() if like == name)
        for name in returns
    ]
    values["bias_requires_grad"] = wanted.get("bias", False)
    if "x" in values:
        values["in_features"] = values["x"].shape[-1]
    positional = [values[a.name] for a in arguments if not a.kwarg_only]
    keywords = {a.name: values.get(a.name) for a in arguments if a.kwarg_only}
    grads = dict(zip(returns, _tuple(backward_op(dy, *positional, **keywords)), strict=True))
    return tuple(grads[same.get(name, name)] if wanted[name] else None for name in names)


def _front(op: str) -> Callable[..., Any]:
    """Makes the kernel for torch.func: the op's results, cast as autocast would."""
    function = _function(op)
    schema = _op(op)._schema
    # <op>_forward lacks the arguments that only choose the tensors that <op> saves for its
    # backward.
    forward = _op(op + "_forward" if _exists(op + "_forward") else op)
    names = [a.name for a in forward._schema.arguments]
    casts = {
        kind: torch._C._dispatch_has_kernel_for_dispatch_key(f"torchweld::{op}", f"Autocast{key}")
        for kind, key in (("cpu", "CPU"), ("cuda", "CUDA"))
    }

    second = _second_gradient(op)

    def result(outputs: Any) -> Any:
        return _tuple(outputs)[0] if second is None else outputs[: len(schema.returns)]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = _all_values(schema, args, kwargs)
        values = [v for v, a in zip(given, schema.arguments, strict=True) if a.name in names]
        interpreter = retrieve_current_functorch_interpreter()
        if interpreter.key() == TransformType.Functionalize:  # the op mutates no argument
            from torch._subclasses.functional_tensor import FunctorchFunctionalizeAPI

            api = FunctorchFunctionalizeAPI(interpreter)
            with api.redispatch_to_next():
                out = _op(op)(*api.unwrap_tensors(args), **api.unwrap_tensors(kwargs))
            return api.wrap_tensors(out)
        kind = values[0].device.type
        if not (casts.get(kind) and torch.is_autocast_enabled(kind)):
            return result(function.apply(*values))
        dtype = torch.get_autocast_dtype(kind)
        if op in _KEEPS_DTYPE:
            kept = [values[names.index(name)].dtype for name in _LEADING[op]]
            dtype = functools.reduce(torch.promote_types, kept)
        for i, name in enumerate(names):
            v = values[i]
            if _is(v) and v.is_floating_point() and name not in _WIDE:
                values[i] = v if v.dtype == torch.float64 else v.to(dtype)
        with torch.autocast(kind, enabled=False):
            return result(function.apply(*values))

    return call


def _front_of_list(op: str) -> Callable[..., list[Tensor]]:
    """Makes the kernel for torch.func of an op with a list of weights."""

    def call(
        x: Tensor, weights: list[Tensor], biases: Any = None, *vectors: Any, **options: Any
    ) -> list[Tensor]:
        return [
            _op(LISTS[op])(x, weight, bias, *vectors, **options)
            for weight, bias in zip(weights, biases or [None] * len(weights), strict=True)
        ]

    return call


def _vmap_kernel(op: str) -> Callable[..., Any]:
    """Makes the kernel for vmap, as register_vmap of torch takes no keyword-only tensors."""
    schema = _op(op)._schema
    names = [a.name for a in schema.arguments]
    positional = sum(not a.kwarg_only for a in schema.arguments)

    def call(*values: Any) -> Any:
        keywords = dict(zip(names[positional:], values[positional:], strict=True))
        return _op(op)(*values[:positional], **keywords)

    def rule(info: Any, in_dims: tuple[Any, ...], *values: Any) -> tuple[Any, Any]:
        return _vmap(op, names, call, info.batch_size, in_dims, values)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        interpreter = retrieve_current_functorch_interpreter()
        values = _all_values(schema, args, kwargs)
        return custom_function_call_vmap_helper(interpreter, rule, call, *values)

    return kernel


def _all_values(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Lists the values of all arguments in the schema's order, with defaults."""
    rest = schema.arguments[len(args) :]
    return [*args, *[kwargs.get(a.name, a.default_value) for a in rest]]


def install(ops: Sequence[str]) -> None:
    """Registers the kernels of the ops, replacing those of an earlier import in this process."""
    namespace = torch.ops.torchweld
    earlier = vars(namespace).get(_KEPT)
    if earlier is not None:
        earlier._destroy()
    library = torch.library.Library("torchweld", "IMPL")
    for op in ops:
        if op in LISTS:
            library.impl(op, _front_of_list(op), _FRONT_KEY)
        elif op.endswith(("_forward", "_backward")):
            library.impl(op, _vmap_kernel(op), "FuncTorchBatched", with_keyset=True)
        elif _backward_op(op) or op in _GRADIENTS:
            library.impl(op, _front(op), _FRONT_KEY)
    # The kernels are registered while `library` exists. torch allows one kernel per op and dispatch
    # key, so a second import of torchweld must find this library instead of registering again.
    setattr(namespace, _KEPT, library)
