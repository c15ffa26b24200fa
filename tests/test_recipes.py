"""examples/recipes: fused steps equal stock ones, under several trainers and in loops."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parent.parent / "examples" / "recipes"
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
