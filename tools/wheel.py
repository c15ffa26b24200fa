"""Makes a wheel for all Pythons and one torch, and checks it: `make wheel`.

    python tools/wheel.py                               this Python's torch
    python tools/wheel.py --python python3.11 --torch 2.13.0   in a new environment
    python tools/wheel.py --all-pythons                 checked in every Python

The wheel has torchweld/_C, which explain and tune need, for every Python from 3.10 on that is found
on PATH or under pyenv. It is built from an unpacked sdist, so that a file missing from the sdist
fails here. It is written to dist/ and then installed from an index into an empty environment, where
tools/smoke.py, the README's example and, with the packages that they need, examples/recipes must
run. Everything else is in build/wheel/, which keeps the objects, so a second build is short.
"""

from __future__ import annotations

import argparse
import email
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import kernel_check  # noqa: E402

MAX_WHEEL_BYTES = 30 * 10**6
MAX_GLIBC = 28  # RHEL 8
PIP = ("-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check")
FACTS = "import sys, torch; print('%d.%d' % sys.version_info[:2], torch.__version__.split('+')[0])"
HEADERS = "import sys, sysconfig; print(sys.version_info[1], sysconfig.get_path('include'))"


def say(text: str) -> None:
    print(f"wheel: {text}", flush=True)


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    """Runs a command, its stderr shown. Returns its stdout.

    Raises:
        SystemExit: the command failed.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        sys.exit(f"wheel: {' '.join(map(str, command))} failed\n{done.stdout}")
    return done.stdout.strip()


def environment(folder: Path, python: str) -> Path:
    """The Python of a fresh environment."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def pythons() -> list[str]:
    """The Pythons that torchweld supports on this machine, one of each minor release."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for minor in range(10, 20):
        names = [f"python3.{minor}", *sorted(pyenv.glob(f"3.{minor}.*/bin/python3"))]
        for path in filter(None, map(shutil.which, map(str, names))):
            done = subprocess.run([path, "-c", HEADERS], capture_output=True, text=True)
            version, _, include = done.stdout.strip().partition(" ")
            if version == str(minor) and (Path(include) / "Python.h").exists():
                found.setdefault(minor, path)
    return list(found.values())


def constraints(folder: Path, torch: str) -> Path:
    """The pinned versions, with another torch if it is not the pinned one."""
    text = (ROOT / "requirements" / "constraints.txt").read_text()
    if f"torch=={torch}\n" not in text:
        # These pins follow torch's.
        depends = "torch|torchvision|triton|cuda-[a-z]*|sympy|networkx|setuptools"
        text = re.sub(rf"^({depends})==.*\n", "", text, flags=re.M)
        text += f"torch=={torch}\n"
    path = folder / "constraints.txt"
    path.write_text(text)
    return path


def builder(args: argparse.Namespace) -> str:
    """The Python that builds: this one, or one in an environment with the requested versions."""
    if not args.python and not args.torch:
        return sys.executable
    python = args.python or sys.executable
    torch = (
        args.torch
        or re.search(
            r"^torch==(\S+)", (ROOT / "requirements" / "constraints.txt").read_text(), re.M
        )[1]
    )
    version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    folder = ROOT / "build" / "wheel" / f"python{version}-torch{torch}"
    folder.mkdir(parents=True, exist_ok=True)
    say(f"installing torch {torch} for Python {version}")
    made = environment(folder / "builder", python)
    build = ROOT / "requirements" / "build.txt"
    run(made, *PIP, "install", "-r", build, "-c", constraints(folder, torch))
    return str(made)


def unpacked_sdist(python: str, folder: Path) -> Path:
    """The sources of a new sdist, in a folder that keeps the objects of the last build."""
    packed = folder / "sdist"
    shutil.rmtree(packed, ignore_errors=True)
    packed.mkdir(parents=True)
    base = ("-q", "egg_info", "--egg-base", packed)
    run(python, "setup.py", *base, "sdist", "--dist-dir", packed)
    (archive,) = packed.glob("*.tar.gz")
    source = folder / archive.name.removesuffix(".tar.gz")
    if source.is_dir():
        stale = [path for path in source.iterdir() if path.name != "build"]
        for path in [*stale, *source.glob("build/lib*")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with tarfile.open(archive) as tar:
        # this filter keeps the file times that ninja compares
        tar.extractall(folder, filter="data")
    return source


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def check_metadata(wheel: Path, torch: str) -> None:
    """Raises SystemExit if version, requirement, contents or size are wrong for a wheel."""
    minor = ".".join(torch.split(".")[:2])
    found = metadata(wheel)
    version, needs = found["Version"], found.get_all("Requires-Dist")
    if not re.search(rf"\+torch{re.escape(minor)}\.(cu\d+|cpu)$", version):
        sys.exit(f"wheel: the version must end in +torch{minor}.cu... or .cpu, but is {version}")
    if f"torch=={minor}.*" not in needs:
        sys.exit(f"wheel: it must require torch=={minor}.*, but requires {', '.join(needs)}")
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" not in name}
        libraries = [i for i in archive.infolist() if i.filename.endswith("/_ops.abi3.so")]
    found = re.search(r"-py3-none-manylinux_2_(\d+)_\w+\.whl$", wheel.name)
    if not found or int(found[1]) > MAX_GLIBC:
        sys.exit(f"wheel: it must be for all Pythons and glibc 2.{MAX_GLIBC}, but is {wheel.name}")
    if top - {"torchweld", "torchweld_cli.py"}:
        sys.exit(f"wheel: it must hold torchweld and torchweld_cli.py, but has {', '.join(top)}")
    for library in libraries:
        if fault := kernel_check.library_fault(library.filename, library.file_size):
            sys.exit(f"wheel: {fault}")
    size = wheel.stat().st_size
    if size > MAX_WHEEL_BYTES:
        sys.exit(f"wheel: it must have at most {MAX_WHEEL_BYTES} bytes, but has {size}")
    say(f"{wheel.relative_to(ROOT)}: {size / 1e6:.1f} MB, requires torch=={minor}.*")


def check_introspection(wheel: Path, folder: Path) -> None:
    """Loads torchweld/_C in each Python; it needs no torch."""
    place = folder / "introspection"
    shutil.rmtree(place, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if re.fullmatch(r"torchweld/_C\..*\.so", n)]
        archive.extractall(place, names)
    checked = []
    for python in pythons():
        version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        run(python, "-c", "import _C; assert _C.families()", cwd=place / "torchweld")
        checked.append(version)
    if len(checked) != len(names):
        sys.exit(f"wheel: it must have _C for Python {', '.join(checked)}, but has {names}")
    say(f"explain and tune work with Python {', '.join(checked)}")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def check_installed(wheel: Path, python: str, torch: str, folder: Path) -> None:
    """Installs the wheel from its index into an empty environment of a Python.

    tools/smoke.py, the README's example and the recipes run there. Nothing of the sources is in
    sight.
    """
    # Only scripts of tools/ have it on their path: elsewhere wheel.py would hide package wheel.
    import index

    say(f"installing it into an empty environment of {python}")
    empty = environment(folder / "empty", python)
    pinned = constraints(folder, torch)
    run(empty, *PIP, "install", f"torch=={torch}", "transformers", "-c", pinned)
    index.lay_out(wheel.parent)
    version = metadata(wheel)["Version"]
    start = time.monotonic()
    with served(wheel.parent) as address:
        simple = f"{address}/{version.partition('+')[2]}/"
        options = ("--no-deps", "--no-cache-dir", "--index-url", simple)
        run(empty, *PIP, "install", *options, f"torchweld=={version}")
    place = folder / "place"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    shutil.copy(ROOT / "tools" / "smoke.py", place)
    env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    print(run(empty, "smoke.py", cwd=place, **env))
    say(f"from pip install to the end of tools/smoke.py: {time.monotonic() - start:.0f} s")
    example = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
    (place / "example.py").write_text(example)
    run(empty, "example.py", cwd=place, **env)
    installed = run(empty, "-c", "import torchweld; print(torchweld.__file__)", cwd=place)
    if not Path(installed).is_relative_to(folder / "empty"):
        sys.exit(f"wheel: the example ran with {installed}, not with the wheel")
    say("the README's example runs")
    run(empty, *PIP, "install", "-r", ROOT / "requirements" / "recipes.txt", "-c", pinned)
    shutil.copytree(ROOT / "examples" / "recipes", place / "recipes")
    for recipe in sorted({*place.glob("recipes/*.py")} - {place / "recipes" / "tiny.py"}):
        run(empty, recipe, cwd=place, **env)
    shutil.rmtree(folder / "empty")  # torch's libraries need gigabytes on disk
    say("the recipes run")


def build(python: str, torch: str, folder: Path) -> Path:
    """Builds a wheel from an sdist. Returns its path in dist/."""
    source = unpacked_sdist(python, folder)
    say(f"building for torch {torch} (5 to 15 minutes the first time)")
    made = folder / "made"
    shutil.rmtree(made, ignore_errors=True)
    flags = ("--no-build-isolation", "--no-deps", "--wheel-dir", made)
    # ninja is in the folder of Python
    tools = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    env = {
        "TORCHWELD_WHEEL": "1",
        "TORCHWELD_PYTHONS": os.pathsep.join(pythons()),
        "PYTHONPATH": "",
        "PATH": tools,
    }
    run(python, *PIP, "wheel", *flags, source, **env)
    (wheel,) = made.glob("*.whl")
    kept = ROOT / "dist" / wheel.name
    kept.parent.mkdir(exist_ok=True)
    shutil.copy(wheel, kept)
    return kept


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="default: the Python that runs this")
    parser.add_argument("--torch", help="a version; default: the one installed")
    parser.add_argument("--wheel", type=Path, help="check this wheel of dist/ and build none")
    parser.add_argument(
        "--all-pythons",
        action="store_true",
        help="check it in every Python from 3.10 on; each downloads a torch (up to 3 GB)",
    )
    args = parser.parse_args(argv)
    python = builder(args)
    version, torch = run(python, "-c", FACTS).split()
    folder = ROOT / "build" / "wheel" / f"python{version}-torch{torch}"
    kept = args.wheel.resolve() if args.wheel else build(python, torch, folder)
    check_metadata(kept, torch)
    check_introspection(kept, folder)
    for each in pythons() if args.all_pythons else [python]:
        check_installed(kept, each, torch, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
