"""Build torchweld against the torch that is installed.

Two libraries come out: `torchweld/_ops`, the operators (no Python symbols, so that C++ programs can
load it), and `torchweld/_C`, the pybind11 module for introspection. The ops' C++ functions are
written into `torchweld/include`. csrc/ is globbed: adding an op
needs no edit here.

Two kinds of files are written into build/generated and compiled from there. The instantiations that
csrc/instantiations.py lists; and groups that include several files each, because a .cpp needs 4 s
for torch's headers, and files of a group share the templates that they instantiate. In two groups
the .cpp need 105 s of processor time.

The built package requires the minor release of torch that it was built with. With
TORCHWELD_WHEEL=1, which `make wheel` sets, the version names it too, 0.1.0+torch2.11.cu130, and one
wheel serves all Pythons: it has a `_C` for every Python of TORCHWELD_PYTHONS (paths, separated as
in PATH), and Pythons without one lack only explain and tune.

Environment: TORCH_CUDA_ARCH_LIST, MAX_JOBS, CUDA_HOME, FORCE_CUDA=1 (CUDA or fail),
TORCHWELD_CPU_ONLY=1 (no CUDA even if nvcc is found), TORCHWELD_LINEINFO=1 (line numbers for
profilers), TORCHWELD_PROGRESS (a file that gets a line for each compiled source).
"""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  (pip reads requires-python after this)
    sys.exit(f"torchweld: Python must be 3.10 or later, but got {sys.version.split()[0]}")

import setuptools
from setuptools import setup
from setuptools.command.build_py import build_py

# The first setuptools that reads pyproject.toml's `license`. Python 3.10 and 3.11 come with 65, and
# under --no-build-isolation pip does not check build-system.requires.
SETUPTOOLS = 77
TORCH = "2.11"
INSTALL = (
    f'pip install torch==2.11.0 numpy "setuptools>={SETUPTOOLS}" wheel ninja && '
    "pip install --no-build-isolation ."
)
if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
    sys.exit(
        f"torchweld: setuptools must be {SETUPTOOLS} or later, but got {setuptools.__version__}; "
        f'use pip install "setuptools>={SETUPTOOLS}"'
    )
try:
    import torch
    from torch.utils import cpp_extension
except (ImportError, OSError) as error:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        sys.exit(
            "torchweld: torch must be installed before torchweld is built, and pip must use it: "
            + INSTALL
        )
    sys.exit(
        f"torchweld: torch is installed, but importing it fails ({error}); mend torch first, "
        "torchweld is built against it"
    )
if [int(number) for number in torch.__version__.split(".")[:2]] < [*map(int, TORCH.split("."))]:
    sys.exit(
        f"torchweld: torch must be {TORCH} or later, but got {torch.__version__}; use {INSTALL}"
    )

from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402  (older ones lack it)

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("python") / "torchweld"
OPS = "torchweld._ops"
INTROSPECTION = "torchweld._C"
GENERATED = Path("build") / "generated"
sys.path.insert(0, str(ROOT / "csrc"))
import instantiations  # noqa: E402
import old_glibc  # noqa: E402

# wgmma needs the 90a target; sm_80 code and its PTX run on every other GPU since the A100.
DEFAULT_ARCH_FLAGS = [
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_80,code=[sm_80,compute_80]",
]


def say(text):
    # pip hides a build's stdout unless it fails; `pip install -v` shows these lines.
    print(f"torchweld: {text}", file=sys.stderr, flush=True)


def relay(lines, out, progress):
    """Copies the output of a build. ninja's status lines get the source instead of its command."""
    start = time.monotonic()
    for line in lines:
        if found := re.match(r"(\[\d+/\d+\]) .* -c (.+?) -o ", line):
            status = f"{found[1]} {os.path.relpath(shlex.split(found[2])[0], ROOT)}"
            print(status, file=progress, flush=True)
            line = f"{status} {time.monotonic() - start:.0f} s\n"
        out.write(line)
        out.flush()


@contextmanager
def short_status():
    """Passes file descriptor 1, which torch gives to ninja, through relay while the block runs."""
    progress = os.environ.get("TORCHWELD_PROGRESS") or os.devnull
    read, write = os.pipe()
    stdout = os.dup(1)
    with open(read, errors="replace") as lines, open(stdout, "w") as out, open(progress, "a") as to:
        relaying = threading.Thread(target=relay, args=(lines, out, to))
        sys.stdout.flush()
        os.dup2(write, 1)
        os.close(write)
        relaying.start()
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(stdout, 1)  # closes the pipe, so relay ends
            relaying.join()


def env_flag(name):
    return os.environ.get(name, "0").lower() not in ("", "0", "false", "off", "no")


def nvcc_version():
    """The (major, minor) of CUDA_HOME's nvcc, or None."""
    if cpp_extension.CUDA_HOME is None:
        return None
    nvcc = Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc"
    try:
        text = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def why_no_cuda():
    """One clause with the reason why the build leaves CUDA out, or None if it builds CUDA."""
    if env_flag("TORCHWELD_CPU_ONLY"):
        return "TORCHWELD_CPU_ONLY is set"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    version = nvcc_version()
    if version is None:
        return f"nvcc was not found (CUDA_HOME is {cpp_extension.CUDA_HOME})"
    if version[0] != int(torch.version.cuda.split(".")[0]):
        return f"nvcc {version[0]}.{version[1]} does not match torch's CUDA {torch.version.cuda}"
    return None


def free_memory_gib():
    try:
        meminfo = Path("/proc/meminfo").read_text()
        return int(re.search(r"MemAvailable:\s+(\d+) kB", meminfo)[1]) / 2**20
    except (OSError, TypeError):
        return 4.0


def arch_flags():
    return [] if os.environ.get("TORCH_CUDA_ARCH_LIST") else DEFAULT_ARCH_FLAGS


def git_commit():
    try:
        done = subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--abbrev=40", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


NO_CUDA = why_no_cuda()
if NO_CUDA and env_flag("FORCE_CUDA"):
    sys.exit(f"torchweld: FORCE_CUDA is set but CUDA can't be built: {NO_CUDA}")
WITH_CUDA = NO_CUDA is None
FOR_WHEEL = env_flag("TORCHWELD_WHEEL")
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / PACKAGE / "__init__.py").read_text(), re.M)[1]


def version():
    if not FOR_WHEEL:
        return VERSION
    # The version of torch's CUDA, not nvcc's: pip installs torch's libraries beside the wheel.
    cuda = "cu" + torch.version.cuda.replace(".", "") if WITH_CUDA else "cpu"
    return f"{VERSION}+torch{torch_minor()}.{cuda}"


def torch_minor():
    return ".".join(torch.__version__.split(".")[:2])


def requirements():
    # Sources build against any torch; a library runs with the minor release it was built for.
    return [f"torch>={TORCH}" if "sdist" in sys.argv else f"torch=={torch_minor()}.*"]


class BuildPy(build_py):
    """Writes torchweld/_build.json: the torch, CUDA and architectures of the build.

    It is a file and not a symbol because it must be readable when the library does not load.
    """

    def run(self):
        facts = {
            "torchweld": VERSION,
            "torch": torch.__version__,
            "cuda": ".".join(map(str, nvcc_version())) if WITH_CUDA else None,
            "no_cuda_because": NO_CUDA,
            "arch_list": os.environ.get("TORCH_CUDA_ARCH_LIST") or "9.0a 8.0+PTX",
            "python": sys.version.split()[0],
            "commit": git_commit(),
            "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if not WITH_CUDA:
            facts["arch_list"] = None
        (ROOT / PACKAGE / "_build.json").write_text(json.dumps(facts, indent=1) + "\n")
        super().run()


class BdistWheel(bdist_wheel):
    """A wheel for all Pythons, named after the oldest glibc that loads its libraries."""

    def get_tag(self):
        tag = super().get_tag()
        if not FOR_WHEEL:
            return tag
        symbols = re.compile(rb"GLIBC_2\.(\d+)")
        libraries = [path.read_bytes() for path in Path(self.bdist_dir).rglob("*.so")]
        # At least 28, because torch's own wheels need glibc 2.28.
        newest = max(28, *(int(minor) for text in libraries for minor in symbols.findall(text)))
        return "py3", "none", tag[2].replace("linux", f"manylinux_2_{newest}", 1)


class BuildExt(cpp_extension.BuildExtension):
    """torch's build, with a kept object folder per torch so that a second build is incremental."""

    def run(self):
        compiler = cpp_extension.get_cxx_compiler()
        if shutil.which((shlex.split(compiler) or [""])[0]) is None:
            sys.exit(
                f"torchweld: a C++ compiler must be installed, but {compiler!r} was not found; on "
                "Debian use apt install g++, or set CXX"
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        # A group of .cpp takes 2 GiB to compile.
        jobs = max(1, min(cores, int(free_memory_gib() / 2)))
        os.environ["MAX_JOBS"] = os.environ.get("MAX_JOBS") or str(jobs)
        if FOR_WHEEL:
            links = old_glibc.write(ROOT / GENERATED / "glibc", compiler)
            for extension in self.extensions:
                extension.extra_link_args = [*extension.extra_link_args, *links]
        what = "with CUDA" if WITH_CUDA else f"for CPU only ({NO_CUDA})"
        say(f"building {what} against torch {torch.__version__}, {os.environ['MAX_JOBS']} jobs")
        start = time.monotonic()
        super().run()
        for python in filter(None, os.environ.get("TORCHWELD_PYTHONS", "").split(os.pathsep)):
            self.build_introspection(python)
        if self.extensions:
            library = Path(self.get_ext_fullpath(OPS))
            header = library.parent / "include" / "torchweld" / "ops.h"
            code = ROOT / "csrc" / "ops_header.py"
            subprocess.run([sys.executable, code, library, header], check=True)
        say(f"built in {time.monotonic() - start:.0f} s")

    def build_introspection(self, python):
        """Builds torchweld/_C for another Python, which needs only its headers."""
        code = (
            "import sysconfig; print(sysconfig.get_path('include'), "
            "sysconfig.get_config_var('EXT_SUFFIX'), sep='\\n')"
        )
        found = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
        include, suffix = found.stdout.split("\n")[:2]
        made = Path(self.build_lib) / "torchweld" / f"_C{suffix}"
        if made.exists():
            return
        (extension,) = (e for e in self.extensions if e.name == INTROSPECTION)
        folders = [include, *extension.include_dirs]
        subprocess.run(
            shlex.split(cpp_extension.get_cxx_compiler())
            + ["-std=c++17", "-shared", "-fPIC", *(f"-I{folder}" for folder in folders)]
            + [*extension.extra_compile_args["cxx"], *extension.extra_link_args]
            + [*extension.sources, "-o", str(made)],
            cwd=ROOT,
            check=True,
        )

    def build_extension(self, ext):
        flavour = f"torch{torch.__version__}-py{sys.version_info[0]}{sys.version_info[1]}"
        self.build_temp = str(ROOT / "build" / (flavour + ("" if WITH_CUDA else "-cpu")) / ext.name)
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        if ext.name == OPS:
            # Change a copy, because an sdist must list the sources, not the generated files.
            ext = copy.copy(ext)
            ext.sources = generated_sources(ext.sources)
        with short_status():
            super().build_extension(ext)


def sources(*patterns):
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in ROOT.glob(pattern))


def generated_sources(listed):
    """The files to compile for the listed sources: groups, instantiations and the other .cu."""
    cpp, cuda = (
        [Path(s).relative_to("csrc").as_posix() for s in listed if s.endswith(suffix)]
        for suffix in (".cpp", ".cu")
    )
    groups = 2 if int(os.environ["MAX_JOBS"]) < 4 else 4
    compiled = instantiations.write_groups(GENERATED / "groups", cpp, -(-len(cpp) // groups))
    if WITH_CUDA:
        compiled += instantiations.write(GENERATED / "instantiations")
    return [str(path) for path in compiled] + [f"csrc/{s}" for s in instantiations.alone(cuda)]


def extensions():
    cxx = ["-O3", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden"]
    cxx.append("-DAT_PER_OPERATOR_HEADERS")  # torch's headers include only the ops that they use
    # Flags of torch's own build. With trapping math GCC vectorises no loop over exp, whose clamps
    # might raise an exception.
    cxx += ["-fno-trapping-math", "-fno-math-errno"]
    nvcc = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fvisibility=hidden"]
    if env_flag("TORCHWELD_LINEINFO"):  # for profilers; the compressed library doubles in size
        nvcc.append("-lineinfo")
    if WITH_CUDA and nvcc_version() >= (12, 8):
        nvcc.append("-Xfatbin=-compress-all")
        if FOR_WHEEL:
            # This mode takes two seconds a file. Without it the library is a fifth larger, and
            # kernels load as fast.
            nvcc.append("--compress-mode=size")
    # Some compilers link libstdc++ statically. Its symbols must then stay inside the library.
    # Otherwise the streams of this library and of torch share tables, and error messages crash.
    link = ["-Wl,--exclude-libs,libstdc++.a"] if sys.platform == "linux" else []
    if FOR_WHEEL:
        link.append("-s")  # the symbol table is a tenth of the library
    include = [str(ROOT / "csrc")]
    # Groups include the .cpp files, so these are dependencies too; an sdist holds all of them.
    depends = sources(*(f"csrc/**/*.{suffix}" for suffix in ("h", "cuh", "cpp", "cu", "py")))
    if WITH_CUDA:
        ops = cpp_extension.CUDAExtension(
            OPS,
            sources("csrc/*/*.cpp", "csrc/ops/*/*.cpp", "csrc/puzzles/*/*.cpp", "csrc/**/*.cu"),
            include_dirs=include,
            depends=depends,
            define_macros=[("TORCHWELD_CUDA", None)],
            extra_compile_args={"cxx": cxx, "nvcc": nvcc + arch_flags()},
            extra_link_args=link,
            py_limited_api=True,
        )
    else:
        ops = cpp_extension.CppExtension(
            OPS,
            sources("csrc/*/*.cpp", "csrc/ops/*/*.cpp", "csrc/puzzles/*/*.cpp"),
            include_dirs=include,
            depends=depends,
            extra_compile_args={"cxx": cxx},
            extra_link_args=link,
            py_limited_api=True,
        )
    introspection = cpp_extension.CppExtension(
        INTROSPECTION,
        ["csrc/module.cpp"],
        include_dirs=include,
        depends=depends,
        extra_compile_args={"cxx": [*cxx, "-O1"]},  # compiles alone at the end of a build
        extra_link_args=link,
    )
    # pybind11's headers come with torch, but the module itself must not need libtorch to load.
    introspection.libraries = []
    return [ops, introspection]


setup(
    version=version(),
    install_requires=requirements(),
    ext_modules=extensions(),
    cmdclass={"bdist_wheel": BdistWheel, "build_ext": BuildExt, "build_py": BuildPy},
    package_data={
        "torchweld": ["py.typed", "_build.json", "cmake/*.cmake", "include/torchweld/*.h"]
    },
)
