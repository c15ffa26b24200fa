"""Sphinx's configuration: `make docs`. generate.py writes the pages made from code."""

from __future__ import annotations

import contextlib
import re
import sys
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]

import generate  # noqa: E402

import torchweld  # noqa: E402

generate.write()

project = "torchweld"
author = "the torchweld developers"
copyright = f"2026, {author}"
release = version = torchweld.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "_generated/*.part.md", "*.part.md"]
html_theme = "furo"
html_title = f"torchweld {release}"
myst_heading_anchors = 3

# Docstrings write code as Markdown does, in single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False  # nn.Module's docstrings do not describe these modules
PROJECTS = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "transformers": "https://huggingface.co/docs/transformers/main/en/",
}


def inventories() -> dict[str, tuple[str, str]]:
    """For intersphinx: {project: (its pages, its inventory)}.

    An inventory is fetched once. Without a network a project is left out, for intersphinx would
    warn, and its names are no links.
    """
    found = {}
    for project, url in PROJECTS.items():
        path = generate.OUT / f"{project}.inv"
        with contextlib.suppress(OSError):
            if not path.is_file():
                with urllib.request.urlopen(f"{url}objects.inv", timeout=5) as answer:
                    data = answer.read()
                if data.startswith(b"# Sphinx inventory"):
                    path.write_bytes(data)
        if path.is_file():
            found[project] = (url, str(path))
    return found


intersphinx_mapping = inventories()
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def plain(app, what, name, obj, options, lines: list[str]) -> None:
    """`Limits: ...` with indented lines below it becomes a paragraph of its own.

    An argument whose text is just `K.` must not become a list that begins with K.
    """
    inside = False
    for i, line in enumerate(lines):
        found = re.match(r"(Limits|Source):\s*(.*)", line)
        inside = bool(found) or (inside and (line.startswith("    ") or not line))
        if found:
            text = found[2][:1].upper() + found[2][1:]
            lines[i] = f"**{found[1]}.** {text}".rstrip()
        elif inside:
            lines[i] = line.strip()
        else:
            lines[i] = re.sub(r"^(\s+\w+: )([A-Z])\.$", r"\1`\2`.", line)


def results(app, name: str, source: list[str]) -> None:
    """Links to the results, which readers of the sources follow, lead to the page made of them."""
    source[0] = source[0].replace("../benchmarks/results/README.md", "_generated/benchmarks.md")


def setup(app) -> None:
    app.connect("source-read", results)
    # Run before napoleon, which reads `Limits:` and the lines below it as a section.
    app.connect("autodoc-process-docstring", plain, priority=400)
