"""Runs attention layers that copy their heads, such as Whisper's, on the heads where they are."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.integrations import recorder
from torchweld.integrations.attention.fallback import NAME
from torchweld.integrations.fusion.probes import Probes

from .arguments import parsed
from .fused_module import (
    FusedModule,
    Replacement,
    below,
    call_arguments,
    stock_class,
    stock_forward,
)
from .stock_modules import implementation


class FusedHeads(FusedModule):
    """An attention layer whose stock forward runs without copies of query, key and value.

    The stock forward makes each of ``x.view(...).transpose(1, 2)`` contiguous. The op reads and
    writes such views in place, so neither the forward nor the backward copies them, or the result.
    """

    kind = op = "attention"

    @staticmethod
    def replacement(path: str, module: nn.Module, row: None) -> Replacement:
        return Replacement(below(path, "heads"), (module, "heads"), (module,))

    @staticmethod
    def label(module: nn.Module, row: None) -> str:
        return "attention (heads without copies)"

    @staticmethod
    def probe(module: nn.Module, row: None, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal("attention", weight, module.head_dim)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = None if torch.compiler.is_compiling() else call_arguments(self, args, kwargs)
        runs = given is not None and implementation(self.config) == NAME
        if recorder.calls is not None and given is not None:
            instead = None if runs else f"the stock forward runs: the attention is not {NAME}'s"
            recorder.record((self, "heads"), instead)
        if not runs:
            return stock_forward(self, *args, **kwargs)
        return _without_copies(stock_class(self).forward)(self, **given)


class _Views(ast.NodeTransformer):
    """Replaces ``x.transpose(1, 2).contiguous()`` by ``x.transpose(1, 2)``.

    The name of the attention becomes a constant: a read of a configuration runs Python code.
    """

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        copies = isinstance(node.func, ast.Attribute) and node.func.attr == "contiguous"
        if copies and ast.unparse(node.func.value).endswith(".transpose(1, 2)"):
            return node.func.value
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        is_name = ast.unparse(node) == "self.config._attn_implementation"
        return ast.Constant(NAME) if is_name else node


@functools.cache
def _without_copies(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward, without decorators, that does not make transposed tensors contiguous.

    The result is for calls of torchweld's attention. A forward without source, or one that reads
    variables of another function, is returned as it is.
    """
    inner, tree = inspect.unwrap(forward), parsed(forward)
    if tree is None or inner.__closure__ is not None:
        return forward
    tree = _Views().visit(tree)
    tree.body[0].decorator_list = []
    made: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), inspect.getsourcefile(inner) or "", "exec")
    exec(code, inner.__globals__, made)
    return made[inner.__name__]
