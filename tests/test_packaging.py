"""The distributed files: the sdist, the wheel, and the project's metadata files."""

from __future__ import annotations

import email
import importlib.util
import json
import platform
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

import torchweld
from commands import python

ROOT = Path(__file__).resolve().parent.parent
MINOR = ".".join(torch.__version__.split(".")[:2])


def setup_py(*arguments: str | Path, **env: str) -> None:
    done = python("setup.py", "-q", *arguments, cwd=ROOT, **env)
    assert done.returncode == 0, done.stderr


def files_below(*folders: str) -> set[str]:
    """The sources below some folders: what git would keep."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    kept = {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}
    built = (".so", ".pyc", "_build.json", "include/torchweld/ops.h")
    return {name for name in kept if not name.endswith(built)}


def test_sdist_holds_what_the_build_and_the_suite_need(tmp_path):
    setup_py("egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"torchweld-{torchweld.__version__}.tar.gz"
    with tarfile.open(archive) as tar:
        held = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
        about = email.message_from_binary_file(
            tar.extractfile(f"torchweld-{torchweld.__version__}/PKG-INFO")
        )
    needed = files_below(
        "csrc", "python", "tests", "benchmarks", "examples", "requirements", "tools"
    )
    needed = {name for name in needed if ".egg-info/" not in name}
    needed |= {"setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "Makefile"}
    assert len(needed) > 300
    assert sorted(needed - held) == []
    assert [name for name in held if name.endswith((".so", ".o", "_build.json"))] == []
    # The sources are for any torch that is new enough.
    assert any(re.fullmatch(r"torch>=[\d.]+", r) for r in about.get_all("Requires-Dist"))


def test_installed_python_is_the_library_and_its_command(tmp_path):
    """Benchmarks, demo, puzzles and planner are tools of a checkout."""
    setup_py("egg_info", "--egg-base", tmp_path)
    top = (tmp_path / "torchweld.egg-info" / "top_level.txt").read_text().split()
    assert sorted(top) == ["torchweld", "torchweld_cli"]
    sources = (tmp_path / "torchweld.egg-info" / "SOURCES.txt").read_text().split()
    installed = [name for name in sources if name.startswith("python/") and name.endswith(".py")]
    python = {name for name in files_below("python") if name.endswith(".py")}
    assert set(installed) == python
    folders = {part for name in python for part in Path(name).parent.parts}
    assert folders & {"bench", "demo", "puzzles"} == set()


@pytest.mark.parametrize("local", ["0", "1"])
def test_what_is_built_requires_the_torch_it_was_built_for(tmp_path, local):
    setup_py("egg_info", "--egg-base", tmp_path, TORCHWELD_WHEEL=local)
    about = email.message_from_string((tmp_path / "torchweld.egg-info/PKG-INFO").read_text())
    assert f"torch=={MINOR}.*" in about.get_all("Requires-Dist")
    suffix = rf"\+torch{re.escape(MINOR)}\.(cu\d+|cpu)" if local == "1" else ""
    assert re.fullmatch(re.escape(torchweld.__version__) + suffix, about["Version"])


def tool(name: str) -> ModuleType:
    path = ROOT / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{path.stem}_tool", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheel_tool():
    return tool("wheel")


def wheel_of(folder: Path, version: str, needs: str) -> Path:
    path = folder / f"torchweld-{version}-py3-none-manylinux_2_17_{platform.machine()}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"torchweld-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.4\nName: torchweld\nVersion: {version}\nRequires-Dist: {needs}\n",
        )
        archive.writestr(f"torchweld-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return path


def test_a_wheel_with_more_than_the_library_is_refused(wheel_tool, tmp_path, monkeypatch):
    monkeypatch.setattr(wheel_tool, "ROOT", tmp_path)
    wheel = wheel_of(tmp_path, "0.1.0+torch2.11.cpu", "torch==2.11.*")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("torchweld/__init__.py", "")
        archive.writestr("torchweld_cli.py", "")
    wheel_tool.check_metadata(wheel, "2.11.0")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("puzzles/__init__.py", "")
    with pytest.raises(SystemExit, match="must hold torchweld and torchweld_cli.py, but has "):
        wheel_tool.check_metadata(wheel, "2.11.0")


@pytest.mark.parametrize(
    ("version", "needs", "most", "refused"),
    [
        ("0.1.0+torch2.11.cu130", "torch==2.11.*", 10**6, None),
        ("0.1.0+torch2.11.cpu", "torch==2.11.*", 10**6, None),
        ("0.1.0", "torch==2.11.*", 10**6, r"must end in \+torch2.11.cu... or .cpu, but is 0.1.0"),
        ("0.1.0+torch2.12.cu130", "torch==2.11.*", 10**6, "must end in"),
        ("0.1.0+torch2.11.cu130", "torch>=2.11", 10**6, "must require torch==2.11"),
        ("0.1.0+torch2.11.cu130", "torch==2.11.*", 10, "must have at most 10 bytes"),
    ],
)
def test_a_wheel_that_says_something_else_is_refused(
    wheel_tool, tmp_path, monkeypatch, version, needs, most, refused
):
    monkeypatch.setattr(wheel_tool, "MAX_WHEEL_BYTES", most)
    monkeypatch.setattr(wheel_tool, "ROOT", tmp_path)
    wheel = wheel_of(tmp_path, version, needs)
    if refused is None:
        wheel_tool.check_metadata(wheel, "2.11.0")
        return
    with pytest.raises(SystemExit, match=refused):
        wheel_tool.check_metadata(wheel, "2.11.0")


@pytest.mark.parametrize(("size", "refused"), [(10, False), (11, True)])
def test_a_wheel_with_too_large_a_library_is_refused(
    wheel_tool, tmp_path, monkeypatch, size, refused
):
    """The size that counts is that on disk, which the wheel's own compression does not lower."""
    monkeypatch.setattr(wheel_tool, "ROOT", tmp_path)
    monkeypatch.setattr(wheel_tool.kernel_check, "MAX_LIBRARY_BYTES", 10)
    wheel = wheel_of(tmp_path, "0.1.0+torch2.11.cu130", "torch==2.11.*")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("torchweld/_ops.abi3.so", bytes(size))
    if not refused:
        wheel_tool.check_metadata(wheel, "2.11.0")
        return
    with pytest.raises(SystemExit, match="_ops.abi3.so must have at most 10 bytes, but has 11"):
        wheel_tool.check_metadata(wheel, "2.11.0")


@pytest.mark.parametrize(
    ("arch_list", "refused"), [("9.0a 8.0+PTX", True), ("12.0", False), (None, False)]
)
def test_kernel_check_finds_too_large_a_library(
    wheel_tool, tmp_path, monkeypatch, arch_list, refused
):
    monkeypatch.setattr(wheel_tool.kernel_check, "MAX_LIBRARY_BYTES", 10)
    monkeypatch.setattr(wheel_tool.kernel_check, "stripped_size", lambda path: path.stat().st_size)
    assert wheel_tool.kernel_check.built_library_fault(tmp_path) is None, "there is no library"
    (tmp_path / "_build.json").write_text(json.dumps({"arch_list": arch_list}))
    (tmp_path / "_ops.abi3.so").write_bytes(bytes(11))
    fault = wheel_tool.kernel_check.built_library_fault(tmp_path)
    assert fault == ("_ops.abi3.so must have at most 10 bytes, but has 11" if refused else None)


@pytest.mark.parametrize(
    ("options", "checked"),
    [([], [sys.executable]), (["--all-pythons"], ["python3.10", "python3.11"])],
)
def test_a_wheel_is_checked_in_the_pythons_that_were_asked_for(
    wheel_tool, tmp_path, monkeypatch, options, checked
):
    pythons = []
    for name in ("check_metadata", "check_introspection"):
        monkeypatch.setattr(wheel_tool, name, lambda *_: None)
    monkeypatch.setattr(wheel_tool, "pythons", lambda: ["python3.10", "python3.11"])
    monkeypatch.setattr(wheel_tool, "check_installed", lambda *args: pythons.append(args[1]))
    wheel = wheel_of(tmp_path, "0.1.0+torch2.11.cpu", "torch==2.11.*")
    assert wheel_tool.main(["--wheel", str(wheel), *options]) == 0
    assert pythons == checked


def test_constraints_of_a_wheel_have_the_torch_that_was_asked_for(wheel_tool, tmp_path):
    pinned = (ROOT / "requirements" / "constraints.txt").read_text()
    torch_pin = re.search(r"^torch==(.+)$", pinned, re.M)[1]
    assert wheel_tool.constraints(tmp_path, torch_pin).read_text() == pinned
    other = wheel_tool.constraints(tmp_path, "9.9.0").read_text()
    assert re.findall(r"^torch==.+$", other, re.M) == ["torch==9.9.0"]
    assert not re.search(r"^(triton|cuda-toolkit)==", other, re.M) and "transformers==" in other


def test_citation_has_the_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.+)$", text, re.M)[1] == torchweld.__version__


def test_issue_templates_are_forms():
    yaml = pytest.importorskip("yaml")  # comes with transformers
    templates = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    forms = [yaml.safe_load(p.read_text()) for p in templates if p.name != "config.yml"]
    assert len(forms) == 4
    for form in forms:
        assert form["name"] and form["description"]
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids))
        assert any(part.get("validations", {}).get("required") for part in form["body"])
        assert all(part["attributes"]["label"] for part in form["body"])


backend = tool("backend/torchweld_backend")
CUDA = "cu" + torch.version.cuda.replace(".", "") if torch.version.cuda else "cpu"
OURS = f"{torchweld.__version__}+torch{MINOR}.{CUDA}"


@pytest.fixture
def wheels(tmp_path):
    """A folder with an index of two wheels: for this torch, and for another one."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for version, needs in ((OURS, f"torch=={MINOR}.*"), ("9.9+torch9.9.cu999", "torch==9.9.*")):
        wheel_of(folder, version, needs)
    tool("index").lay_out(folder)
    return folder


@pytest.fixture
def address(wheels, wheel_tool):
    """The address of a server of that folder."""
    with wheel_tool.served(wheels) as root:
        yield f"{root}/"


@pytest.mark.skipif(sys.platform != "linux", reason="wheels are for Linux")
@pytest.mark.parametrize("from_server", [False, True])
def test_an_installation_takes_the_wheel_of_its_torch(
    wheels, tmp_path, monkeypatch, capsys, request, from_server
):
    index = request.getfixturevalue("address") if from_server else str(wheels)
    monkeypatch.setenv("TORCHWELD_INDEX", index)
    assert backend.get_requires_for_build_wheel() == []
    name = backend.prepare_metadata_for_build_wheel(str(tmp_path))
    assert f"Version: {OURS}\n" in (tmp_path / name / "METADATA").read_text()
    wheel = backend.build_wheel(str(tmp_path))
    assert wheel.startswith(f"torchweld-{OURS}-py3-none-")
    assert (tmp_path / wheel).read_bytes() == (wheels / wheel).read_bytes()
    assert capsys.readouterr().err.endswith(f"torchweld: taking {wheel} from {index}\n")


def without_index(wheels, monkeypatch):
    monkeypatch.delenv("TORCHWELD_INDEX", raising=False)


def without_wheel(wheels, monkeypatch):
    next(wheels.glob(f"torchweld-{OURS}-*")).unlink()


def with_a_newer_glibc(wheels, monkeypatch):
    (wheel,) = wheels.glob(f"torchweld-{OURS}-*")
    wheel.rename(wheel.with_name(wheel.name.replace("2_17", "2_99")))


def without_torch(wheels, monkeypatch):
    monkeypatch.setattr(backend, "distributions", lambda **_: [])


def with_a_missing_folder(wheels, monkeypatch):
    monkeypatch.setenv("TORCHWELD_INDEX", "missing")


def with_a_dead_address(wheels, monkeypatch):
    monkeypatch.setenv("TORCHWELD_INDEX", "http://127.0.0.1:9/")


@pytest.mark.skipif(sys.platform != "linux", reason="wheels are for Linux")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_index, "TORCHWELD_INDEX names no index of wheels"),
        (without_wheel, rf"\S+ has no torchweld-{re.escape(OURS)}-\.\.\. for this machine"),
        (with_a_newer_glibc, r"\S+ has no torchweld-\S+-\.\.\. for this machine"),
        (without_torch, "torch is not installed here"),
        (with_a_missing_folder, r"missing can't be read \(unknown url type: 'missing'\)"),
        (with_a_dead_address, r"http://127.0.0.1:9/ can't be read \(.*refused.*\)"),
    ],
)
def test_without_a_wheel_an_installation_says_why_it_builds(
    wheels, tmp_path, monkeypatch, capsys, change, reason
):
    monkeypatch.setenv("TORCHWELD_INDEX", str(wheels))
    built = []
    monkeypatch.setattr(backend.build_meta, "build_wheel", lambda *a: built.append(a) or "new")
    monkeypatch.setattr(backend.build_meta, "get_requires_for_build_wheel", lambda *a: ["wheel"])
    change(wheels, monkeypatch)
    assert backend.get_requires_for_build_wheel() == ["wheel"]
    assert backend.build_wheel(str(tmp_path)) == "new" and len(built) == 1
    said = capsys.readouterr().err
    line = f"torchweld: building from the sources, because {reason}\n"
    assert re.fullmatch(line * 2, said), said


@pytest.mark.skipif(sys.platform != "linux", reason="wheels are for Linux")
def test_a_wheel_with_another_hash_is_not_taken(wheels, address, tmp_path, monkeypatch, capsys):
    (wheel,) = wheels.glob(f"torchweld-{OURS}-*")
    wheel.write_bytes(wheel.read_bytes() + b"more")
    monkeypatch.setenv("TORCHWELD_INDEX", address)
    monkeypatch.setattr(backend.build_meta, "build_wheel", lambda *a: "new")
    assert backend.build_wheel(str(tmp_path)) == "new"
    assert "its SHA-256 is not " in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="wheels are for Linux")
def test_pip_downloads_from_the_index_of_a_torch(address, tmp_path):
    index = f"{address}torch{MINOR}.{CUDA}/"
    options = ["--no-deps", "--disable-pip-version-check", "--no-cache-dir", "--dest", tmp_path]
    done = python("-m", "pip", "download", "torchweld", "--index-url", index, *options)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"torchweld-{OURS}-")


def test_an_index_of_no_wheels_is_refused(tmp_path, capsys):
    assert tool("index").main([str(tmp_path)]) == 1
    assert "has no wheel of torchweld; use make wheel" in capsys.readouterr().err


def test_workflows_run_commands_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    commands = set(re.findall(r"\bmake ([a-z-]+)(?= PYTHON|\n)", text))
    assert commands and commands <= set(re.findall(r"^([a-z-]+):", makefile, re.M))
    files = set(re.findall(r"(?:run: |python3 )(\S+/\S+)", text))
    assert files and all((ROOT / name).is_file() for name in files)
    (torches,) = re.findall(r"torch: \[(.+)\]", text)
    assert re.search(r"^TORCHES \?= (.+)$", makefile, re.M)[1].split() == torches.split(", ")
