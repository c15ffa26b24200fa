"""The two libraries: their contents, how they load, and the package without them."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import setuptools
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweld
import torchweld._library as library
from commands import build_cpp_programs, captured, python
from torchweld.info import ops_of_library

PACKAGE = Path(torchweld.__file__).parent
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def instantiations(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "csrc")
    return importlib.import_module("instantiations")


def ops_library() -> Path:
    return next(PACKAGE.glob("_ops*.so"))


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return python("-c", textwrap.dedent(code), **env)


def run_setup(folder: Path) -> str:
    """The error of setup.py with the modules of a folder before the installed ones."""
    done = python("setup.py", "--version", cwd=ROOT, PYTHONPATH=str(folder))
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


INSTALL = [
    'pip install torch==2.11.0 numpy "setuptools>=77" wheel ninja',
    "pip install --no-build-isolation .",
]


def test_setup_asks_for_a_python_that_it_supports(tmp_path):
    old = "import sys; sys.version, sys.version_info = '3.9.21 (main)', (3, 9, 21, 'final', 0)\n"
    (tmp_path / "sitecustomize.py").write_text(old)
    assert run_setup(tmp_path) == "torchweld: Python must be 3.10 or later, but got 3.9.21\n"


@pytest.mark.parametrize("version", ["2.5.1+cu124", "2.10.0"])
def test_setup_asks_for_a_torch_that_it_supports(tmp_path, version):
    (tmp_path / "torch" / "utils").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (tmp_path / "torch" / "utils" / "cpp_extension.py").touch()
    assert run_setup(tmp_path) == (
        f"torchweld: torch must be 2.11 or later, but got {version}; use {' && '.join(INSTALL)}\n"
    )


@pytest.mark.parametrize("version", ["65.5.0", "69.5.1.post20240407", "76.1.0"])
def test_setup_asks_for_a_setuptools_that_reads_pyproject(tmp_path, version):
    (tmp_path / "setuptools" / "command").mkdir(parents=True)
    (tmp_path / "setuptools" / "command" / "build_py.py").write_text("build_py = None\n")
    fake = f'__version__ = "{version}"\ndef setup(**_): raise AssertionError\n'
    (tmp_path / "setuptools" / "__init__.py").write_text(fake)
    assert run_setup(tmp_path) == (
        f"torchweld: setuptools must be 77 or later, but got {version}; "
        'use pip install "setuptools>=77"\n'
    )


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_setup_says_why_torch_can_not_be_imported(tmp_path, error):
    reason = "libcudnn.so.9: cannot open shared object file"
    (tmp_path / "torch.py").write_text(f'raise {error}("{reason}")\n')
    assert run_setup(tmp_path) == (
        f"torchweld: torch is installed, but importing it fails ({reason}); mend torch first, "
        "torchweld is built against it\n"
    )


def test_setup_says_that_torch_is_missing(tmp_path):
    missing = 'raise ModuleNotFoundError("No module named \'torch\'", name="torch")\n'
    (tmp_path / "torch.py").write_text(missing)
    assert run_setup(tmp_path) == (
        "torchweld: torch must be installed before torchweld is built, and pip must use it: "
        + " && ".join(INSTALL)
        + "\n"
    )


def test_every_install_line_asks_for_that_setuptools():
    assert "\n".join(INSTALL) in (ROOT / "README.md").read_text()
    assert "\nsetuptools>=77\n" in (ROOT / "requirements" / "build.txt").read_text()
    assert 'requires = ["setuptools>=77"' in (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def setup_py(monkeypatch):
    """The names of setup.py."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["setup.py", "--version"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path("setup.py")


@pytest.fixture
def build(setup_py, monkeypatch):
    """Runs setup.py's build without torch's part, which compiles."""
    command = setup_py["BuildExt"]
    monkeypatch.setattr(command.__bases__[0], "run", lambda self: None)
    return command(setuptools.Distribution()).run


@pytest.mark.parametrize("compiler", ["no-such-g++", "no-such-g++ -m64", ""])
def test_setup_asks_for_a_compiler_first(monkeypatch, build, compiler):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(SystemExit) as error:
        build()
    assert str(error.value) == (
        f"torchweld: a C++ compiler must be installed, but {compiler!r} was not found; on Debian "
        "use apt install g++, or set CXX"
    )


@pytest.mark.parametrize("given", ["", "3"])
def test_empty_max_jobs_is_none_given(monkeypatch, capsys, build, given):
    monkeypatch.setenv("MAX_JOBS", given)
    monkeypatch.setenv("CXX", sys.executable)  # nothing is compiled
    build()
    (jobs,) = re.findall(r", (\w*) jobs", capsys.readouterr().err)
    assert int(jobs) >= 1 and jobs == (given or jobs) == os.environ["MAX_JOBS"]


def test_a_build_prints_the_source_and_not_its_command(setup_py, tmp_path, capfd, monkeypatch):
    if shutil.which("ninja") is None:
        pytest.skip("ninja was not found")
    spaced = tmp_path / "a b.cu"
    spaced.touch()
    sources = {"echo a warning": f"{ROOT}/csrc/module.cpp", "true": spaced, "false": spaced}
    text = ""
    for command, source in sources.items():
        name, escaped = command.split()[0], str(source).replace(" ", "$ ")
        text += f"rule {name}\n  command = {command} && : nvcc -c $in -o $out -std=c++20\n"
        text += f"build {name}.o: {name} {escaped}\n"
    (tmp_path / "build.ninja").write_text(text)
    monkeypatch.setenv("TORCHWELD_PROGRESS", str(tmp_path / "progress"))
    with setup_py["short_status"]():
        done = subprocess.run(["ninja", "-v", "-j1"], cwd=tmp_path, stdout=1, stderr=2)
    print("stdout is back", flush=True)
    lines = capfd.readouterr().out.splitlines()
    statuses = ["[1/3] csrc/module.cpp", f"[2/3] {os.path.relpath(spaced, ROOT)}"]
    assert done.returncode
    assert lines[:3] == [f"{statuses[0]} 0 s", "a warning", f"{statuses[1]} 0 s"]
    assert f"false && : nvcc -c '{spaced}' -o false.o -std=c++20" in lines, "it failed"
    assert lines[-1] == "stdout is back"
    assert (tmp_path / "progress").read_text().splitlines()[:2] == statuses


def test_ops_library_has_no_python_symbols():
    symbols = captured("nm", "-D", ops_library(), check=True).stdout
    assert "c10" in symbols  # nm did read it
    python = [s for s in symbols.split() if re.match(r"_?Py[A-Z_]|PyInit", s)]
    assert python == []


def test_ops_library_does_not_need_libpython():
    needed = captured("ldd", ops_library(), check=True).stdout
    assert "libc10.so" in needed
    assert "libpython" not in needed and "libtorch_python" not in needed


def test_introspection_module_needs_no_torch():
    needed = captured("ldd", next(PACKAGE.glob("_C*.so")), check=True).stdout
    assert "libtorch" not in needed and "libc10" not in needed


def copy_of_package(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(PACKAGE, folder / "torchweld", ignore=ignore))


USE = """
import torch
import torchweld
print(torchweld.__file__)
print(torchweld.is_available())
print(torchweld.unavailable_reason())
str(torchweld.info())
for use in (lambda: torchweld.softmax(torch.ones(2)), lambda: torchweld.nn.Softmax()):
    try:
        use()
    except RuntimeError as error:
        print("raised:", error)
"""


@pytest.mark.parametrize("damage", ["missing", "garbage", "other torch"])
def test_import_survives_a_library_that_cannot_load(tmp_path, damage):
    package = copy_of_package(tmp_path)
    for path in package.glob("_ops*.so"):
        path.unlink()
        if damage != "missing":
            path.write_bytes(b"not a library")
    facts = json.loads((package / "_build.json").read_text())
    facts["torch"] = "2.9.1+cu128" if damage == "other torch" else facts["torch"]
    (package / "_build.json").write_text(json.dumps(facts))
    done = run_python(USE, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(str(tmp_path))
    assert lines[1] == "False"
    reason = lines[2]
    # No source folder is known from here.
    command = f"{sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall"
    assert reason.endswith(f"with: in torchweld's source folder, {command} .")
    if damage == "missing":
        assert done.stderr == ""
    else:
        assert torch.__version__ in reason and facts["torch"] in reason
        assert f"UserWarning: {reason}" in done.stderr  # at import
    if damage == "garbage":
        assert "file too short" in reason or "invalid ELF header" in reason  # the linker's words
    assert lines[3:] == [f"raised: {reason}"] * 2


def test_import_survives_a_library_of_another_version(tmp_path):
    package = copy_of_package(tmp_path)
    # The library loads and registers nothing.
    shutil.copy(next(package.glob("_C*.so")), next(package.glob("_ops*.so")))
    script = tmp_path / "users.py"
    script.write_text(USE)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    _, available, reason, *raised = done.stdout.splitlines()
    assert available == "False" and raised == [f"raised: {reason}"] * 2
    assert reason.startswith(
        "torchweld's operator library is of another version than its Python code and lacks "
        "_key_ranges, add_layer_norm, add_rms_norm, ...; rebuild it with: "
    )
    assert f"{script}:3: UserWarning: {reason}" in done.stderr  # at the user's line


def test_the_library_must_have_the_op_of_every_function():
    public = set(ops_of_library()) & set(torchweld.__all__)
    assert public and public <= library.called_ops()


def test_the_command_that_mends_names_the_source_folder(monkeypatch, tmp_path):
    command = f"{sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall"
    assert library._reinstall_command() == f"{command} -e {PACKAGE.parent.parent}"
    installed = tmp_path / "torchweld"
    source = tmp_path / "my source"
    info = tmp_path / "torchweld-0.1.0.dist-info"
    for folder in (installed, source, info):
        folder.mkdir(parents=True)
    (info / "METADATA").write_text("Name: torchweld\nVersion: 0.1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": source.as_uri(), "dir_info": {}}))
    monkeypatch.setattr(library, "_HERE", installed)
    monkeypatch.syspath_prepend(tmp_path)
    assert library._reinstall_command() == f"in torchweld's source folder, {command} ."
    (source / "setup.py").touch()
    assert library._reinstall_command() == f"{command} '{source}'"


def test_suite_against_another_torch_runs_in_a_copy(tmp_path):
    listed = ["git", "ls-files", "--error-unmatch", "setup.py"]
    if subprocess.run(listed, cwd=ROOT, capture_output=True).returncode:
        pytest.skip("this is no git checkout")

    def make(*words):
        command = ["make", "test-torch", *words, f"TORCH_COPY={tmp_path}/copy"]
        # A make that this suite runs under hands on its own TORCH.
        env = {k: v for k, v in os.environ.items() if k != "TORCH" and not k.startswith("MAKE")}
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)

    done = make()
    assert done.returncode and "test-torch needs a version" in done.stderr
    (tmp_path / "copy" / "tests").mkdir(parents=True)
    (tmp_path / "copy" / "tests" / "test_of_another_day.py").touch()
    done = make("TORCH=9.8.7", "PYTHON=/no/such/python")
    assert "found none at /no/such/python" in done.stderr
    copy = tmp_path / "copy"
    assert not (copy / "tests" / "test_of_another_day.py").exists()
    assert (copy / "tests" / "test_build.py").exists() and (copy / "setup.py").exists()
    pins = (copy / "requirements" / "constraints.txt").read_text().splitlines()
    assert "torch==9.8.7" in pins
    assert not [pin for pin in pins if re.match("triton==|torch==(?!9.8.7)", pin)]
    assert "torch==9.8.7" not in (ROOT / "requirements" / "constraints.txt").read_text()


def test_ops_work_without_introspection(tmp_path):
    package = copy_of_package(tmp_path)
    for path in package.glob("_C*.so"):
        path.unlink()
    done = run_python(
        """
        import torch, torchweld
        assert torchweld.is_available() and not torchweld.info().introspection
        print(torchweld.softmax(torch.zeros(4)).tolist())
        x = torch.empty(4, 4, device="meta")
        print(torchweld.explain("softmax", x).kernel)
        try:
            torchweld.explain("linear_backward", x, x, x)  # two products with sizes of their own
        except RuntimeError as error:
            print(error)
        """,
        PYTHONPATH=str(tmp_path),
    )
    lines = done.stdout.strip().splitlines()
    assert lines[0] == "[0.25, 0.25, 0.25, 0.25]", done.stderr
    if library.build_facts()["cuda"] is not None:
        assert lines[1] == "rows in registers (one read)"
        assert len(lines) == 3 and "torchweld._C" in lines[2] and "reinstall" in lines[2]


def test_import_leaves_cuda_uninitialised():
    done = run_python("import torch, torchweld; print(torch.cuda.is_initialized())")
    assert done.stdout.strip() == "False", done.stderr


def test_info_names_every_op_of_the_library():
    info = torchweld.info()
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("torchweld::") and not name.startswith("torchweld::_")
    }
    assert set(info.ops) == registered
    assert info.to_dict()["torch"] == torch.__version__
    assert all("CPU" in where for where in info.ops.values())
    built_with_cuda = library.build_facts()["cuda"] is not None
    assert ("CUDA" in info.ops["softmax"]) == built_with_cuda
    assert "softmax" in str(info)


def test_explain_where_there_is_no_cuda_kernel(monkeypatch):
    module = importlib.import_module("torchweld.explain")  # the function has its name
    monkeypatch.setattr(module, "has_cuda_kernel", lambda op: False)
    for where, kernel in {"meta": "CPU", "cuda": "none"}.items():
        with FakeTensorMode():
            x = torch.empty(2, 3, device=where)
        explanation = torchweld.explain("linear", x, x)
        assert explanation.kernel == kernel and explanation.gpu == ""
        assert "on a GPU the call raises NotImplementedError" in explanation.why
        assert explanation.why.endswith(" threads") == (where == "meta")


def test_cpp_programs_run_a_scripted_module_and_train(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torchweld.nn.LayerNormLinear(16, 32, activation="gelu_tanh")
            self.attention = torchweld.nn.CausalSelfAttention(32, 4)
            self.gate = torchweld.nn.GatedLinear(32, 8, gate="swiglu")
            self.softmax = torchweld.nn.Softmax()
            self.register_buffer("example", torch.randn(2, 5, 16))
            self.register_buffer("expected", torch.empty(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.softmax(self.gate(self.attention(self.up(x))))

    torch.manual_seed(0)
    net = Net().eval().requires_grad_(False)
    net.expected = net(net.example)
    torch.jit.script(net).save(str(tmp_path / "net.pt"))
    build = build_cpp_programs(tmp_path, "run_scripted", "train")
    # How a matmul is cut into sums depends on the number of threads, and so do its last bits.
    threads = str(torch.get_num_threads())
    done = captured(build / "run_scripted", tmp_path / "net.pt", OMP_NUM_THREADS=threads)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same bits as Python, one step trained\n"
    done = captured(build / "train", check=True)
    losses = [float(loss) for loss in done.stdout.split()]
    assert len(losses) == 20 and losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_the_cpp_functions_are_those_of_the_library(tmp_path):
    header = PACKAGE / "include" / "torchweld" / "ops.h"
    made = tmp_path / "ops.h"
    code = ROOT / "csrc" / "ops_header.py"
    subprocess.run([sys.executable, code, ops_library(), made], check=True)
    assert made.read_text() == header.read_text()
    names = set(re.findall(r"^inline \S.* (\w+)\(", header.read_text(), re.M))
    python = {name for name in torchweld.__all__ if name in ops_of_library()}
    assert python <= names and not [name for name in names if name.endswith("_backward")]


def test_cmake_says_where_torch_must_be(tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("cmake was not found")
    command = ["cmake", "-S", ROOT / "tests" / "cpp", "-B", tmp_path, "-DTORCH_ROOT=/missing"]
    command.append(f"-Dtorchweld_DIR={PACKAGE / 'cmake'}")
    done = captured(*command)
    assert done.returncode != 0
    assert "ATen.h is not there; set TORCH_ROOT" in " ".join(done.stderr.split())


def age(paths: list[Path]) -> None:
    for path in paths:
        os.utime(path, (1, 1))


def untouched(paths: list[Path]) -> list[bool]:
    return [path.stat().st_mtime == 1 for path in paths]


def test_instantiations_are_written_only_where_they_changed(instantiations, tmp_path):
    mine = tmp_path / "mine.cu"
    mine.write_text("// not generated\n")
    paths = instantiations.write(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*paths, mine])
    age(paths)
    assert instantiations.write(tmp_path) == paths
    assert all(untouched(paths))
    before = paths[0].read_text()
    paths[0].write_text(before + "// edited\n")
    stale = tmp_path / "gemm_of_another_day.cu"
    stale.write_text(before)
    instantiations.write(tmp_path)
    assert paths[0].read_text() == before and all(untouched(paths[1:]))
    assert not stale.exists() and mine.exists()


def test_instantiations_name_what_is_there(instantiations):
    texts = instantiations.texts()
    handwritten = {path.stem for path in (ROOT / "csrc").rglob("*.c*")}
    assert not handwritten & {Path(name).stem for name in texts}
    assert not {Path(name).stem for name in texts} & set(instantiations.CUDA_GROUPS)
    spelled_otherwise = {"fp32", "f32", "fp16", "f16", "half", "bf16"}
    assert not spelled_otherwise & {part for name in texts for part in Path(name).stem.split("_")}
    for family in instantiations.TABLE:
        template = re.search(r"(\w+)<[^>]*>\(", family.line)[1]
        assert re.search(rf"\b{template}\(", (ROOT / "csrc" / family.header).read_text())


def test_instantiations_are_rows_of_files(instantiations):
    each, family = instantiations.each, instantiations.Family
    rows = each(dtype=("float16", "tf32"), size=("Large",), tile=(0, 1))
    table = [family("f_${dtype}_$size", "f.cuh", "template void f<$T, $kDtype, $tile>();", rows)]
    texts = instantiations.texts(table)
    assert list(texts) == ["f_float16_large.cu", "f_tf32_large.cu"]
    code = texts["f_tf32_large.cu"].splitlines()
    assert '#include "f.cuh"' in code
    assert [line for line in code if line.startswith("template")] == [
        "template void f<float, kTf32, 0>();",
        "template void f<float, kTf32, 1>();",
    ]
    with pytest.raises(KeyError, match="typo"):
        instantiations.texts([table[0]._replace(line="$typo")])
    with pytest.raises(ValueError, match="two families .* f_float16_large.cu"):
        instantiations.texts([table[0], table[0]._replace(header="g.cuh")])


def test_groups_hold_every_source_once(instantiations, tmp_path):
    sources = [f"ops/op{i}/op{i}.cpp" for i in range(7)]
    paths = instantiations.write_groups(tmp_path, sources, 3)
    held = [re.findall(r'#include "(.+)"', path.read_text()) for path in paths]
    assert [len(group) for group in held] == [3, 3, 1]
    assert sum(held, []) == sources
    # Deleting a source deletes its group.
    instantiations.write_groups(tmp_path, sources[:6], 3)
    assert [path.exists() for path in paths] == [True, True, False]


def test_every_cuda_source_is_compiled_once(instantiations, tmp_path):
    csrc = ROOT / "csrc"
    listed = sorted(path.relative_to(csrc).as_posix() for path in csrc.rglob("*.cu"))
    alone = instantiations.alone(listed)
    assert alone and all(len(group) > 1 for group in instantiations.CUDA_GROUPS.values())
    assert sorted([*alone, *sum(instantiations.CUDA_GROUPS.values(), ())]) == listed
    (path,) = (path for path in instantiations.write(tmp_path) if path.stem == "losses")
    assert '#include "losses/kernels.cu"' in path.read_text()


USES_NEW_GLIBC = """
#include <dlfcn.h>
#include <cmath>
#include <memory>
#include <shared_mutex>
std::shared_mutex mutex;
extern "C" double run(double x) {
  auto first = std::make_shared<double>(x), second = first;
  std::shared_lock<std::shared_mutex> lock(mutex);
  Dl_info library;
  return dladdr((void*)&run, &library) ? std::exp(*first) + std::log(*second) : -1;
}
"""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux",
    reason="the versions of glibc's functions are known for two processors",
)
def test_a_library_of_a_wheel_loads_on_an_older_glibc(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "csrc")
    old_glibc = importlib.import_module("old_glibc")
    source, library = tmp_path / "source.cpp", tmp_path / "library.so"
    source.write_text(USES_NEW_GLIBC)
    links = old_glibc.write(tmp_path / "with a space", "c++")
    command = ["c++", "-std=c++17", "-O2", "-fPIC", "-shared", source, "-o", library]
    subprocess.run([*command, *links], check=True)
    versions = re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())
    assert versions and max(map(int, versions)) <= 28
    function = ctypes.CDLL(library).run
    function.restype, function.argtypes = ctypes.c_double, [ctypes.c_double]
    assert function(2.0) == pytest.approx(math.exp(2) + math.log(2), rel=1e-15)


def test_every_op_has_a_namespace():
    # The .cpp files are compiled in groups, where two helpers of one name would clash.
    csrc = ROOT / "csrc"
    sources = [*csrc.glob("ops/*/*.cpp"), *csrc.glob("puzzles/*/*.cpp")]
    assert len(sources) > 15
    for path in sources:
        spaces = re.findall(r"^namespace ([\w:]+) {", path.read_text(), re.M)
        owners = {path.stem, path.parent.name}  # a file, or an op of several files
        assert len(spaces) == 1 and spaces[0] in {f"torchweld::{each}_op" for each in owners}, path
