"""The build backend: setuptools', which first looks for a wheel that is built already.

TORCHWELD_INDEX names a folder of wheels, or the address of a page with links to them (`make index`
makes both). If it has the wheel of this version, the installed torch and its CUDA, `pip install`
takes that wheel, in seconds and without a compiler. Otherwise it builds from the sources and says
why. `pip install -v` shows these lines.

NOTE: pip puts this folder on sys.path, so it holds nothing else; tools/wheel.py would hide wheel.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import sysconfig
import urllib.parse
import urllib.request
import zipfile
from importlib.metadata import distributions
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
)

ROOT = Path(__file__).resolve().parent.parent.parent
_SECONDS = 60


def _say(text: str) -> None:
    print(f"torchweld: {text}", file=sys.stderr, flush=True)


def _tag_of_torch() -> str | None:
    """The installed torch as wheels name it, torch2.11.cu130, or None if torch is not installed.

    pip builds in an environment of its own, without torch, so this reads the files of the
    environment that pip installs into.
    """
    paths = sysconfig.get_paths()
    for found in distributions(name="torch", path=[*sys.path, paths["purelib"], paths["platlib"]]):
        text = Path(found.locate_file("torch/version.py")).read_text()
        cuda = re.search(r"^cuda\b.*= ['\"]([\d.]+)", text, re.M)
        minor = ".".join(found.version.split(".")[:2])
        return f"torch{minor}." + ("cu" + cuda[1].replace(".", "") if cuda else "cpu")
    return None


def _runs_here(name: str) -> bool:
    """Whether a wheel is for this machine's glibc and processor."""
    found = re.search(r"-py3-none-manylinux_2_(\d+)_(\w+)\.whl$", name)
    libc, version = platform.libc_ver()
    if not found or libc != "glibc" or found[2] != platform.machine():
        return False
    return [2, int(found[1])] <= [int(number) for number in version.split(".")[:2]]


def _links(index: str) -> dict[str, str]:
    """The wheels of an index: their names, with their paths or addresses."""
    if Path(index).is_dir():
        return {path.name: str(path) for path in Path(index).rglob("*.whl")}
    with urllib.request.urlopen(index, timeout=_SECONDS) as page:
        text, base = page.read().decode(), page.url
    found = re.findall(r'href="([^"]+\.whl(?:#[^"]*)?)"', text)
    addresses = [urllib.parse.urljoin(base, link) for link in found]
    paths = [urllib.parse.unquote(urllib.parse.urlsplit(address).path) for address in addresses]
    return {path.rpartition("/")[2]: link for path, link in zip(paths, addresses, strict=True)}


def _fetch(source: str, to: Path) -> None:
    """Copies a wheel, and checks its hash if the link has one.

    Raises:
        OSError: the wheel can't be read, or is another file than the link says.
    """
    if Path(source).is_file():
        shutil.copy(source, to)
        return
    address, _, digest = source.partition("#sha256=")
    with urllib.request.urlopen(address, timeout=_SECONDS) as wheel, to.open("wb") as file:
        shutil.copyfileobj(wheel, file)
    if digest and hashlib.sha256(to.read_bytes()).hexdigest() != digest:
        raise OSError(f"its SHA-256 is not {digest}")


def _find() -> tuple[str, str] | str:
    """The name and the source of the built wheel, or the reason why torchweld must be built."""
    index = os.environ.get("TORCHWELD_INDEX")
    if not index:
        return "TORCHWELD_INDEX names no index of wheels"
    package = (ROOT / "python" / "torchweld" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(.+)"', package, re.M)[1]
    torch = _tag_of_torch()
    if torch is None:
        return "torch is not installed here"
    start = f"torchweld-{version}+{torch}-"
    try:
        for name, source in _links(index).items():
            if name.startswith(start) and _runs_here(name):
                return name, source
    except (OSError, ValueError) as error:  # ValueError: neither a folder nor an address
        return f"{index} can't be read ({error})"
    return f"{index} has no {start}... for this machine"


def _wheel(folder: Path) -> Path | None:
    """Returns the built wheel, copied into a folder, or None if torchweld must be built."""
    found = _find()
    if isinstance(found, tuple):
        name, source = found
        try:
            _fetch(source, folder / name)
        except OSError as error:
            found = f"{name} can't be taken ({error})"
        else:
            _say(f"taking {name} from {os.environ['TORCHWELD_INDEX']}")
            return folder / name
    _say(f"building from the sources, because {found}")
    return None


def get_requires_for_build_wheel(config_settings=None):
    """Returns the packages that build_wheel needs: none for a wheel that is built already.

    Only isolated builds ask. setup.py stops them here, because pip hides torch from them.
    """
    if isinstance(found := _find(), tuple):
        return []
    _say(f"building from the sources, because {found}")
    return build_meta.get_requires_for_build_wheel(config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Returns the name of a wheel in a folder: the built one, or a new one."""
    if wheel := _wheel(Path(wheel_directory)):
        return wheel.name
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Returns the name of a folder with the metadata of the wheel that build_wheel gives."""
    if wheel := _wheel(Path(metadata_directory)):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".dist-info/" in name]
            archive.extractall(metadata_directory, names)
        wheel.unlink()
        return names[0].partition("/")[0]
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)
