"""Files to link with, so that a library that is built on a new glibc loads on glibc 2.28.

glibc 2.29 has new versions of exp, log and pow, and 2.34 moved the functions of libpthread and
libdl into libc under a new version. All of them keep the old versions too. A stub is a library of
the same name with the old versions alone: the linker binds a function, with its version, to the
first library that has it. libstdc++'s headers read a variable of glibc 2.32, which is defined here.
"""

from __future__ import annotations

import platform
import shlex
import subprocess
from pathlib import Path

# The version of every function that glibc had when it was ported to a processor.
FIRST_VERSIONS = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}
FUNCTIONS = {
    "libm.so.6": ("exp", "log", "pow"),
    "libdl.so.2": ("dladdr", "dlclose", "dlerror", "dlopen", "dlsym"),
    "libpthread.so.0": (
        "pthread_create",
        "pthread_join",
        "pthread_key_create",
        "pthread_once",
        "pthread_rwlock_rdlock",
        "pthread_rwlock_unlock",
        "pthread_rwlock_wrlock",
    ),
}
VARIABLES = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'


def write(folder: Path, compiler: str) -> list[str]:
    """Compiles the files into a folder; returns their paths, or none for another processor."""
    version = FIRST_VERSIONS.get(platform.machine())
    if version is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    command = [*shlex.split(compiler), "-x", "c", "-fPIC", "-fno-builtin", "-w"]
    source, variables = folder / "stub.c", folder / "variables.o"
    source.write_text(VARIABLES)
    subprocess.run([*command, "-c", str(source), "-o", str(variables)], check=True)
    written = [str(variables)]
    for library, functions in FUNCTIONS.items():
        versions = folder / "versions"
        versions.write_text(f"{version} {{ {'; '.join(functions)}; }};\n")
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions))
        link = ["-shared", "-nostdlib", f"-Wl,-soname,{library},--version-script,{versions}"]
        subprocess.run([*command, *link, str(source), "-o", str(folder / library)], check=True)
        written.append(str(folder / library))
    return written
