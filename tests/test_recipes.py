"""examples/recipes and examples/torchweld.ipynb: fused training steps equal stock ones."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RECIPES = EXAMPLES / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py") if path.stem != "tiny")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs(name, monkeypatch):
    path = RECIPES / f"{name}.py"
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.delitem(sys.modules, "tiny", raising=False)
    for package in re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.M):
        if package != "tiny":
            pytest.importorskip(package)
    runpy.run_path(str(path), run_name="__main__")


def test_the_notebook_runs_and_stores_no_outputs():
    pytest.importorskip("transformers")
    cells = json.loads((EXAMPLES / "torchweld.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    names: dict[str, Any] = {}
    for cell in code:
        exec("".join(cell["source"]), names)
