"""Lays out an index of the wheels in a folder: `make index`.

    python tools/index.py dist

dist/index.html links all wheels, for TORCHWELD_INDEX. dist/torch2.11.cu130/ is a simple index (PEP
503) for pip's --index-url or --extra-index-url, with the wheels of one torch and CUDA. An index of
all of them would let pip replace the installed torch by a newer one.
"""

from __future__ import annotations

import hashlib
import html
import re
import sys
from pathlib import Path
from urllib.parse import quote


def page(links: dict[str, str]) -> str:
    """A page of links, from text to address."""
    lines = [
        f'<a href="{html.escape(url)}">{html.escape(text)}</a><br>' for text, url in links.items()
    ]
    return "\n".join(["<!DOCTYPE html>", "<title>torchweld</title>", *lines, ""])


def lay_out(folder: Path) -> list[Path]:
    """Writes the pages into a folder of wheels. Returns the simple indexes.

    Raises:
        ValueError: the folder has no wheel of torchweld.
    """
    by_torch: dict[str, dict[str, str]] = {}
    for wheel in sorted(folder.glob("torchweld-*.whl")):
        if found := re.search(r"\+(torch[\d.]+\.(?:cu\d+|cpu))-", wheel.name):
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            by_torch.setdefault(found[1], {})[wheel.name] = f"{quote(wheel.name)}#sha256={digest}"
    if not by_torch:
        raise ValueError(f"{folder} has no wheel of torchweld; use make wheel")
    made = []
    for torch, links in by_torch.items():
        simple = folder / torch
        (simple / "torchweld").mkdir(parents=True, exist_ok=True)
        (simple / "index.html").write_text(page({"torchweld": "torchweld/"}))
        files = {name: f"../../{url}" for name, url in links.items()}
        (simple / "torchweld" / "index.html").write_text(page(files))
        made.append(simple)
    every = {name: url for links in by_torch.values() for name, url in links.items()}
    (folder / "index.html").write_text(page(every))
    return made


def main(argv: list[str]) -> int:
    folder = Path(argv[0] if argv else "dist")
    try:
        made = lay_out(folder)
    except ValueError as error:
        print(f"index: {error}", file=sys.stderr)
        return 1
    print(f"index: {folder / 'index.html'} (TORCHWELD_INDEX), {', '.join(map(str, made))} (pip)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
