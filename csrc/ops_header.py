"""Writes torchweld/ops.h, the C++ functions of the ops, from the schemas of a built library.

setup.py runs it at the end of a build, and puts the header into torchweld/include.

    python csrc/ops_header.py LIBRARY HEADER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

# For each type of a schema: the C++ type of an argument.
ARGUMENTS = {
    "Tensor": "const at::Tensor&",
    "Optional[Tensor]": "const std::optional<at::Tensor>&",
    "List[Tensor]": "at::TensorList",
    "Optional[List[Tensor]]": "std::optional<at::TensorList>",
    "int": "int64_t",
    "Optional[int]": "std::optional<int64_t>",
    "float": "double",
    "Optional[float]": "std::optional<double>",
    "bool": "bool",
    "str": "c10::string_view",
}
RESULTS = {"Tensor": "at::Tensor", "List[Tensor]": "std::vector<at::Tensor>"}
HEAD = """\
// The ops of torchweld as C++ functions, made from their schemas. The Python function of the same
// name documents an op. Every op is differentiable by torch's autograd.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <tuple>
#include <vector>

namespace torchweld {

template <typename Function>
auto op_of_library(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}
"""
FUNCTION = """
// {schema}
inline {result} {name}({parameters}) {{
  static const auto op = op_of_library<decltype({name})>("torchweld::{name}");
  return op.call({arguments});
}}
"""


def literal(value: object) -> str:
    """The default value of an argument in C++."""
    if value is None:
        return "std::nullopt"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def function(schema: torch.FunctionSchema) -> str:
    """The C++ function of an op."""
    parameters: list[str] = []
    may_default = True  # in C++, only the last arguments may have defaults
    for argument in reversed(schema.arguments):
        may_default = may_default and argument.has_default_value()
        default = f" = {literal(argument.default_value)}" if may_default else ""
        parameters.insert(0, f"{ARGUMENTS[str(argument.type)]} {argument.name}{default}")
    results = [RESULTS[str(result.type)] for result in schema.returns]
    name = schema.name.partition("::")[2]
    return FUNCTION.format(
        schema=str(schema).partition("::")[2],
        result=results[0] if len(results) == 1 else f"std::tuple<{', '.join(results)}>",
        name=name,
        parameters=", ".join(parameters),
        arguments=", ".join(argument.name for argument in schema.arguments),
    )


def header(library: str) -> str:
    """The text of the header. Ops that only gradients and tools call have no function."""
    torch.ops.load_library(library)
    found = {s.name: s for s in torch._C._jit_get_all_schemas() if s.name.startswith("torchweld::")}
    internal = ("_forward", "_backward")
    public = [
        found[name]
        for name in sorted(found)
        if not name.startswith("torchweld::_") and not name.endswith(internal)
    ]
    return HEAD + "".join(map(function, public)) + "\n}  // namespace torchweld\n"


if __name__ == "__main__":
    library, target = sys.argv[1:]
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(header(library))
