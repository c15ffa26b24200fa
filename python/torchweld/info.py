"""torchweld.info(): versions, the build, and the devices of each op."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

import torchweld._library as library


@dataclass
class Info:
    """The result of `torchweld.info()`; `str()` is the text that the command line prints.

    Attributes:
        torchweld: the version of torchweld.
        torch: the version of torch that runs.
        python: the version of Python.
        platform: operating system and processor.
        available: whether the operators can be called.
        unavailable_reason: why not, None if they can.
        built: the build of the library: torch, CUDA, architectures, commit; {} if unknown.
        binary_archs: the architectures of the GPU code in the library.
        gpus: the GPUs of this machine.
        introspection: whether `torchweld._C` is there, which `tune` needs on a GPU, and `explain`
            for calls with several tiles.
        batch_invariant: whether the mode `torchweld.batch_invariant` is on in this thread.
        ops: the devices that have a kernel, by op.

    Example::

        info = torchweld.info()
        print(info.torchweld, info.torch, info.built)
        info.to_dict()
    """

    torchweld: str
    torch: str
    python: str
    platform: str
    available: bool
    unavailable_reason: str | None
    built: dict[str, Any]
    binary_archs: list[str]
    gpus: list[str]
    introspection: bool
    batch_invariant: bool = False
    ops: dict[str, list[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        built = self.built or {"torch": "unknown"}
        lines = [
            f"torchweld {self.torchweld}   torch {self.torch}   Python {self.python}   "
            f"{self.platform}",
            f"available      {'yes' if self.available else 'no: ' + str(self.unavailable_reason)}",
            f"built for      torch {built.get('torch')}, "
            + (
                f"CUDA {built['cuda']}"
                if built.get("cuda")
                else f"CPU only ({built.get('no_cuda_because', 'unknown')})"
            ),
            f"GPU code       {', '.join(self.binary_archs) or 'none'}",
            f"GPUs           {', '.join(self.gpus) or 'none'}",
            f"introspection  {'yes' if self.introspection else 'no (torchweld._C is missing)'}",
            f"batch invariant  {'yes' if self.batch_invariant else 'no'}",
        ]
        if self.ops:
            note = "" if built.get("cuda") else " (each on GPUs too in a build with CUDA)"
            lines.append(f"ops{note}")
            width = max(len(name) for name in self.ops)
            lines += [f"  {name:<{width}}  {', '.join(where)}" for name, where in self.ops.items()]
        return "\n".join(lines)


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append(f"{torch.cuda.get_device_name(index)} (sm_{major}{minor})")
    return found


def recorded_archs(facts: dict[str, Any]) -> list[str]:
    """Lists the GPU code that was built, "9.0a" or "8.0+PTX", as the build recorded it."""
    return str(facts.get("arch_list") or "").replace(";", " ").split()


def _binary_archs(facts: dict[str, Any]) -> list[str]:
    """Lists the library's GPU code by cuobjdump, or without that tool as the build recorded."""
    recorded = recorded_archs(facts)
    tool = shutil.which("cuobjdump")
    files = sorted(Path(library.__file__).parent.glob("_ops*.so"))
    if tool is None or not files or not facts.get("cuda"):
        return recorded
    done = subprocess.run(
        [tool, "--list-elf", "--list-ptx", str(files[0])], capture_output=True, text=True
    )
    archs = set()
    for line in done.stdout.splitlines():
        parts = line.rsplit(".", 2)
        if len(parts) == 3 and parts[2] in ("cubin", "ptx"):
            archs.add(parts[1] if parts[2] == "cubin" else f"{parts[1]} (PTX)")
    return sorted(archs) or recorded


@cache  # torch lists the ops of all libraries, in 5 ms
def ops_of_library() -> tuple[str, ...]:
    """Returns the names of all public ops that the library has registered."""
    names = torch._C._dispatch_get_all_op_names() if library.is_available() else []
    mine = (n.split("::")[1].split(".")[0] for n in names if n.startswith("torchweld::"))
    # names with a leading underscore are private ops
    return tuple(sorted({name for name in mine if not name.startswith("_")}))


def public_op(op: str) -> str:
    """Removes a helper op's suffix: "linear" for linear_forward and linear_backward."""
    return op.removesuffix("_forward").removesuffix("_backward")


def has_cuda_kernel(op: str) -> bool:
    """Whether this build has a CUDA kernel of the op."""
    # An op without a CUDA kernel registers a boxed function for CUDA, which raises an error.
    # Kernels are unboxed functions.
    table = torch._C._dispatch_dump(f"torchweld::{op}").splitlines()
    return any(line.startswith("CUDA:") and "unboxed" in line for line in table)


def info() -> Info:
    """Collects versions, GPUs, architectures in the binary, and the devices of each op.

    Works without a GPU and with a library that does not load.

    Returns:
        An `Info`; print it, or take `.to_dict()`.

    Example::

        print(torchweld.info())
    """
    facts = library.build_facts()
    try:
        import torchweld._C  # noqa: F401

        introspection = True
    except ImportError:
        introspection = False
    from torchweld import __version__

    return Info(
        torchweld=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        available=library.is_available(),
        unavailable_reason=library.unavailable_reason(),
        built=facts,
        binary_archs=_binary_archs(facts),
        gpus=_gpus(),
        introspection=introspection,
        batch_invariant=library.is_available() and library.ops._is_batch_invariant(),
        ops={op: ["CPU", "CUDA"] if has_cuda_kernel(op) else ["CPU"] for op in ops_of_library()},
    )
