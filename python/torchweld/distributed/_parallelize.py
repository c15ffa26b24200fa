"""``parallelize``: tensor parallelism of the transformers models that ``fuse`` knows, and groups of
parameters for their optimizers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchweld.nn import Int4Linear

from . import packed
from .int4_linears import unsupported_reason
from .linears import ColumnLinear, GatheredLinear, RowLinear, ShardedLinears


class _SummedGradients(ParallelStyle):
    """Sums the gradients of replicated parameters that each process uses on its heads (q_norm)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def summed(grad: Tensor) -> Tensor:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
            return grad

        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(summed)
        return module


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.trigger_wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _PlainResult(ParallelStyle):
    """Applies a style of torch and makes the module's result a plain tensor.

    NOTE: the results of torch's styles wait for their collective when an op first uses them. Until
    then they are of a subclass of Tensor, which fused layers do not take.
    """

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def wait(module: nn.Module, args: Any, y: Tensor) -> Tensor:
            return _Waited.apply(y) if isinstance(y, AsyncCollectiveTensor) else y

        self.style.src_data_rank = self.src_data_rank
        module = self.style._apply(module, device_mesh)
        module.register_forward_hook(wait)
        return module


def _gathered() -> ParallelStyle:
    style = _PlainResult(ColwiseParallel(output_layouts=Replicate()))
    return ShardedLinears(GatheredLinear, 0, style)


def _split() -> ParallelStyle:
    return _PlainResult(RowwiseParallel(input_layouts=Replicate()))


# The styles by their names in a tp_plan of transformers or in _plan.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": lambda: ShardedLinears(ColumnLinear, 0, ColwiseParallel()),
    "rowwise": lambda: ShardedLinears(RowLinear, 1, RowwiseParallel()),
    "colwise_gather_output": _gathered,
    "colwise_rep": _gathered,
    **dict.fromkeys(("rowwise_split_input", "rowwise_rep", "embedding_rowwise"), _split),
    "replicated_with_grad_allreduce": _SummedGradients,
    **packed.STYLES,
}
# transformers' styles for a packed layer, which gathers its result, and for the layer behind it.
_GATHERED = (("colwise_gather_output", "rowwise_split_input"), ("colwise_rep", "rowwise_rep"))
# Names of layers whose columns are attention heads.
_HEAD_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")


def parallelize(model: nn.Module, mesh: DeviceMesh, *, src_data_rank: int | None = 0) -> nn.Module:
    """Shards a Hugging Face model in place over the processes of a mesh: tensor parallelism.

    GPT-2 is sharded by its heads and the columns of its MLP, as in Megatron. Other models follow
    transformers' plan for them (`model.tp_plan`), except in layers that pack several weights: each
    process has the same columns of both halves of a `gate_up_proj`, and attends with its own heads
    of a `qkv_proj`. The call may be before or after :func:`torchweld.fuse`; fused layers stay
    fused. Sharded parameters become DTensors of the same names; the others stay as they are. Every
    process gives the model the same batch and gets the whole result.

    Args:
        model: A model of transformers, on the mesh's device.
        mesh: One dim: `init_device_mesh(device, (n,))`, or `mesh["tp"]` of a larger one.
        src_data_rank: The process whose parameters are sharded; None if all have the same, which
            takes no communication.

    Returns:
        The model.

    Raises:
        ImportError: transformers is not installed.
        TypeError: The model is not one of transformers, or mesh is no DeviceMesh.
        ValueError: The mesh has more dims, or does not divide the heads or the layers' sizes; the
            model has no plan, or one with an unknown style; parameters that are sharded already.
            The model is unchanged then.

    Limits: dropout drops the same values in all processes only if they have the same seed. A
        GPT-2's `c_attn` and a packed `gate_up_proj` are placed `_StridedShard`, which
        :func:`full_tensor` gathers and torch's checkpoints refuse. The results of a `qkv_proj` are
        gathered. The model has DTensors and plain parameters; torch's `clip_grad_norm_` does not
        take both in one call. An `Int4Linear` is sharded by whole groups into plain tensors, and a
        state_dict has this process's part.

    Source: Shoeybi et al., "Megatron-LM", 2019.

    Example::

        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=100))
        torchweld.distributed.parallelize(model, mesh)
        model(torch.randint(0, 100, (2, 16))).logits.sum().backward()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize: model must be an nn.Module, but got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"parallelize: mesh must be a DeviceMesh, but got {type(mesh).__name__}; use "
            "torch.distributed.device_mesh.init_device_mesh"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize: mesh must have one dim, but got {mesh.ndim}; use one of its dims, as "
            'mesh["tp"]'
        )
    try:
        from torchweld.integrations.fusion import attention_switch

        from . import gpt2
    except ImportError as error:
        raise ImportError(
            "torchweld.distributed.parallelize needs transformers; "
            "install it with `pip install transformers`"
        ) from error
    roots = attention_switch.roots(model)
    if not roots:
        raise TypeError(
            "parallelize: model must be or contain a model of transformers, but got "
            f"{type(model).__name__}; other models can use parallelize_module with NormColwise"
        )
    bases = [m for m in model.modules() if isinstance(m, gpt2.GPT2Model)]
    plans = [] if bases else [(root, _plan(root, mesh.size())) for _, root in roots]
    reasons = [gpt2.refusal(base, mesh.size()) for base in bases]
    reasons += [_refusal(root, plan, mesh.size()) for root, plan in plans]
    for reason in reasons:
        if reason is not None:
            raise ValueError(f"parallelize: {reason}")
    for base in bases:
        gpt2.shard(base, mesh, src_data_rank)
    for root, plan in plans:
        tied = _tied(root)
        styles = {path: _STYLES[style]() for path, style in plan.items() if _matching(root, path)}
        local_heads = [path.rpartition(".")[0] for path in plan if plan[path] == packed.HEADS]
        parallelize_module(root, mesh, styles, src_data_rank=src_data_rank)
        for path in local_heads:
            packed.set_heads((attn for _, attn in _matching(root, path)), mesh.size())
        for (first, name), *aliases in tied:
            for module, other in aliases:
                module.register_parameter(other, first._parameters[name])
    return model


def _plan(root: nn.Module, size: int) -> dict[str, str]:
    """Returns a model's plan, with styles of STYLES for packed layers that can be sharded."""
    plan = dict(getattr(root, "tp_plan", None) or {})
    for pattern in list(plan):
        path, _, name = pattern.rpartition(".")
        style, behind = packed.LAYERS.get(name, ("", ""))
        behind = f"{path}.{behind}"
        if (plan[pattern], plan.get(behind)) not in _GATHERED or not style:
            continue
        if all(packed.can_shard(module, name, size) for _, module in _matching(root, path)):
            plan[pattern], plan[behind] = style, "rowwise"
    return plan


def _matching(root: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Lists the modules that a plan's pattern matches; `*` stands for any number."""
    return [(path, module) for path, module in root.named_modules() if _matches(pattern, path)]


def _matches(pattern: str, path: str) -> bool:
    """Whether a plan's pattern matches a path, name by name as in parallelize_module."""
    parts, names = pattern.split("."), path.split(".")
    return len(parts) == len(names) and all(map(fnmatch, names, parts))


def _refusal(root: nn.Module, plan: dict[str, str], size: int) -> str | None:
    """Returns why parallelize refuses a plan, as the end of a sentence, or None."""
    name = type(root).__name__
    if not plan:
        return f"model must have a plan of transformers (tp_plan), but {name} has none"
    config = root.config.get_text_config(decoder=True)
    for pattern, style in plan.items():
        if style not in _STYLES:
            known = ", ".join(_STYLES)
            return f"{name}'s plan must have the styles {known}, but got {style} for {pattern}"
        named = (path for path, _ in root.named_parameters())
        if any(_matches(pattern, path) for path in named):
            return f"{name}'s plan must name modules, but got the parameter {pattern}"
        last = pattern.rpartition(".")[2]
        if last in _HEAD_PROJECTIONS and style == "colwise":
            for heads in ("num_attention_heads", "num_key_value_heads"):
                count = getattr(config, heads, None)
                if count is not None and count % size:
                    return (
                        f"{heads} must be a multiple of the mesh's {size} processes, but got "
                        f"{count}"
                    )
        for path, module in _matching(root, pattern):
            for parameter in module.parameters(recurse=False):
                if type(parameter.data) is not Tensor:
                    kind = type(parameter.data).__name__
                    return (
                        f"{path}'s parameters must be plain, but got {kind} (sharded or quantised)"
                    )
            if isinstance(module, Int4Linear):
                reason = unsupported_reason(module, style, size)
                if reason is not None:
                    return f"{path} {reason}"
            # Only these two styles need a size that the number of processes divides. A style that
            # gathers the result accepts any size.
            sizes = {"colwise": "out_features", "rowwise": "in_features"}
            width = getattr(module, sizes.get(style, ""), 0)
            if width % size:
                return (
                    f"{path}.{sizes[style]} must be a multiple of the mesh's {size} processes, but "
                    f"got {width}"
                )
    tied = {id(module): path for path, module in root.named_modules()}
    sharded = {id(m) for pattern in plan for _, m in _matching(root, pattern)}
    for places in _tied(root):
        if len({id(module) in sharded for module, _ in places}) > 1:
            names = " and ".join(f"{tied[id(module)]}.{key}" for module, key in places)
            return f"{names} are one parameter, and {name}'s plan must shard both or neither"
    return None


def _tied(root: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Lists the modules and names of each parameter that several modules share."""
    places = defaultdict(list)
    for module in root.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places[id(parameter)].append((module, key))
    return [each for each in places.values() if len(each) > 1]


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Groups the model's parameters for an optimizer: plain ones apart from DTensors.

    On a GPU torch's optimizers update the parameters of a group together, and refuse a group with
    plain tensors beside DTensors, or with DTensors of several meshes. A model has both after
    tensor parallelism.

    Args:
        model: A model, sharded or not.

    Returns:
        A group of the plain parameters and one for the DTensors of each mesh, without empty groups,
        in the order of `model.parameters()`.

    Example::

        mlp = nn.Sequential(torchweld.nn.LayerNormLinear(32, 128), nn.Linear(128, 32))
        parallelize_module(mlp, mesh, {"0": torchweld.distributed.NormColwise()})
        groups = torchweld.distributed.parameter_groups(mlp)
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
    """
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        tensor = parameter.data
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": group} for group in groups.values()]
