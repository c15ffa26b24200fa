"""Lays out the wheels in a folder as a kernel for Hugging Face's `kernels`: `make hub`.

    python tools/hub.py dist

dist/hub/build/ has a variant of each wheel, torch211-cu130-x86_64-linux: the layers of
tools/hub_kernel and the wheel's library. `kernels.get_local_kernel(Path("dist/hub"))` loads the
variant of its torch, and `kernels upload` takes the same folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

LAYERS = Path(__file__).resolve().parent / "hub_kernel"
WHEEL = re.compile(
    r"torchweld-.+\+torch(\d+)\.(\d+)\.(cu\d+|cpu)-py3-none-\w+?linux_2_\d+_(\w+)\.whl"
)


def lay_out(wheel: Path, build: Path) -> Path:
    """Writes the variant of a wheel into a folder. Returns the variant's folder."""
    major, minor, backend, machine = WHEEL.fullmatch(wheel.name).groups()
    variant = build / f"torch{major}{minor}-{backend}-{machine}-linux"
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(LAYERS, variant, ignore=shutil.ignore_patterns("__pycache__"))
    with zipfile.ZipFile(wheel) as archive:
        for name in ("torchweld/_ops.abi3.so", "torchweld/ops/stock.py"):
            (variant / Path(name).name).write_bytes(archive.read(name))
        facts = json.loads(archive.read("torchweld/_build.json"))
    digest = hashlib.sha256()
    for path in sorted(variant.iterdir()):
        digest.update(path.read_bytes())
    kind = {"type": "cpu"}
    if backend != "cpu":
        kind = {"type": "cuda", "archs": re.split(r"[ ;,]+", facts["arch_list"])}
    metadata = {
        # The name of the module in Python, which must be unique to the build.
        "id": f"_torchweld_{backend}_{digest.hexdigest()[:12]}",
        "name": "torchweld",
        "version": 1,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": kind,
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def main(argv: list[str]) -> int:
    folder = Path(argv[0] if argv else "dist")
    wheels = [path for path in sorted(folder.glob("torchweld-*.whl")) if WHEEL.fullmatch(path.name)]
    if not wheels:
        print(f"hub: {folder} has no wheel of torchweld; use make wheel", file=sys.stderr)
        return 1
    made = [lay_out(wheel, folder / "hub" / "build") for wheel in wheels]
    print(f"hub: {folder / 'hub'} ({', '.join(path.name for path in made)})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
