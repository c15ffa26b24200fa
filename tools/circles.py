"""Fails where modules of torchweld import each other in a circle; `make lint` runs it.

Imports inside of functions count. Those under TYPE_CHECKING count in a package alone, which imports
its names when they are used. `__version__` does not count: the package has it before it imports
anything.

    python tools/circles.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "python"


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")


def imports(node: ast.AST, package: str, lazy: bool) -> Iterator[str]:
    """The imports below a node, as `module.name`; `module.*` is the module itself.

    ``lazy`` counts imports under TYPE_CHECKING.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING" and not lazy:
            continue
        if isinstance(child, ast.Import):
            yield from (f"{alias.name}.*" for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            home = resolve_name("." * child.level + (child.module or ""), package)
            names = (alias.name for alias in child.names)
            yield from (f"{home}.{name}" for name in names if not name.startswith("__"))
        else:
            yield from imports(child, package, lazy)


def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    paths = {name_of(path): path for path in sorted((SOURCES / "torchweld").rglob("*.py"))}
    found = {}
    for name, path in paths.items():
        is_package = path.name == "__init__.py"
        package = name if is_package else name.rpartition(".")[0]
        wanted = imports(ast.parse(path.read_text()), package, lazy=is_package)
        # `from package import name` imports the module package.name or, if there is none, package.
        homes = {each if each in paths else each.rpartition(".")[0] for each in wanted}
        found[name] = (homes & paths.keys()) - {name}
    return found


def main() -> int:
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        print("circle of imports: " + " <- ".join(error.args[1]))
        return 1
    print("circles: none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
