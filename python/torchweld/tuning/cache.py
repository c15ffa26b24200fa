"""The choices that tune remembers: a JSON file in the user's cache directory.

An entry is valid for one op's kernel, GPU, dtype, shape class and version of torchweld. Each entry
is checked against the tables of this build before it is used, and by the library again in every
call.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torchweld._library as library

_FORMAT = 2  # in format 2, choices are stored by name
_MOST_BYTES = 4 << 20
_MOST_ENTRIES = 4096
_KEY = ("op", "gpu", "dtype", "family", "shape_class", "version")
_TEXTS = ("op", "gpu", "dtype", "family", "version")

Entry = dict[str, Any]


def version() -> str:
    from torchweld import __version__

    return __version__


def enabled() -> bool:
    """Whether remembered choices are used; TORCHWELD_TUNE=0 turns them off."""
    return os.environ.get("TORCHWELD_TUNE", "1").lower() not in ("0", "false", "off", "no")


def path() -> Path:
    """Returns $XDG_CACHE_HOME/torchweld/tune.json, or ~/.cache/torchweld/tune.json."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification says to ignore a relative path.
    folder = home if os.path.isabs(home) else os.path.expanduser("~/.cache")
    return Path(folder) / "torchweld" / "tune.json"


def entry(
    op: str, gpu: str, dtype: str, family: str, numbers: list[int], choice: str, us: float
) -> Entry:
    """Makes the file's entry for a choice; `numbers` encode its problem."""
    import torchweld._C as _C

    fields = _C.families()[family]
    return {
        "op": op,
        "gpu": gpu,
        "dtype": dtype,
        "version": version(),
        "family": family,
        "shape_class": dict(zip(fields, _C.shape_class(family, numbers), strict=True)),
        "problem": dict(zip(fields, numbers, strict=True)),
        "choice": choice,
        "columns": _C.candidate(family, numbers, choice)["columns"],
        "us": round(us, 3),
    }


def _is_number(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**62


def _is_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def flaw(found: Any) -> str:
    """Returns why the tables of this build do not accept an entry, "" if they do."""
    import torchweld._C as _C

    if not isinstance(found, dict) or any(not isinstance(found.get(k), str) for k in _TEXTS):
        return "it lacks a part of its key"
    if not all(_is_numbers(found.get(k)) for k in ("shape_class", "problem", "columns")):
        return "its sizes are no numbers"
    if not isinstance(found.get("choice"), str):
        return "its choice has no name"
    family = found["family"]
    fields = _C.families().get(family)
    if fields is None:
        return "there is no such family of kernels"
    if list(found["problem"]) != fields:
        return "its problem has other sizes than the kernels"
    numbers = list(found["problem"].values())
    try:
        candidate = _C.candidate(family, numbers, found["choice"])
        shape_class = _C.shape_class(family, numbers)
    except ValueError as error:
        return str(error)
    if found["shape_class"] != dict(zip(fields, shape_class, strict=True)):
        return "its shape class is another one's"
    if candidate["refusal"]:
        return candidate["refusal"]
    return "" if candidate["columns"] == found["columns"] else "its tile has changed"


def _parse(text: bytes) -> list[Any]:
    """Parses a file into entries; ValueError if it is damaged."""
    try:
        whole = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    entries = whole.get("entries") if isinstance(whole, dict) else None
    if not isinstance(entries, list) or whole.get("format") != _FORMAT:
        raise ValueError(f"it is no list of entries of format {_FORMAT}")
    if len(entries) > _MOST_ENTRIES:
        raise ValueError(f"it has more than {_MOST_ENTRIES} entries")
    return entries


def read() -> list[Any]:
    """Reads the entries of the file, unchecked; [] if there is no file.

    Raises:
        ValueError: the file is damaged.
        OSError: it can't be read.
    """
    try:
        handle = os.open(path(), os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return []
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("it is no regular file")
        if facts.st_size > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        return _parse(file.read(_MOST_BYTES + 1))


def _warn(text: str) -> None:
    warnings.warn(f"torchweld.tune: {text}", RuntimeWarning, stacklevel=3)


def _apply(found: Entry) -> None:
    library.ops._remember_choice(
        found["gpu"], found["family"], list(found["problem"].values()), found["choice"]
    )


def _load() -> None:
    try:
        entries = read()
        if not entries:
            return
        import torchweld._C  # noqa: F401  without its tables no entry can be checked
    except ImportError:
        return
    except (OSError, ValueError) as error:
        _warn(f"{path()} is ignored, because {error}; delete it and tune again")
        return
    flaws = []
    for found in entries:
        if isinstance(found, dict) and found.get("version") != version():
            continue
        wrong = flaw(found)
        if wrong:
            flaws.append(wrong)
            continue
        try:
            _apply(found)
        except RuntimeError as error:
            flaws.append(str(error).splitlines()[0])
    if flaws:
        _warn(
            f"{len(flaws)} of the {len(entries)} choices in {path()} are ignored, the first "
            f"because {flaws[0]}; tune again or delete the file"
        )


def load() -> None:
    """Passes the remembered choices to the library; called when torchweld is imported.

    No GPU is touched: entries are kept by the GPU's name. A damaged file, or entries that do not
    fit the tables of this build, are left out with one warning.
    """
    if not enabled() or not library.is_available() or not library.build_facts().get("cuda"):
        return
    try:
        _load()
    except Exception as error:  # importing torchweld must not fail because of its cache
        _warn(f"{path()} could not be read ({type(error).__name__}: {error})")


def _key(found: Entry) -> str:
    return json.dumps([found[name] for name in _KEY])


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process write at a time, if the system has locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(folder / "tune.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(entries: list[Entry]) -> None:
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _locked(target.parent):
        try:
            kept = {_key(e): e for e in read() if isinstance(e, dict) and set(_KEY) <= set(e)}
        except ValueError:
            kept = {}
        for new in entries:
            kept.pop(_key(new), None)  # the newest entries come last
            kept[_key(new)] = new
        text = json.dumps(
            {"format": _FORMAT, "entries": list(kept.values())[-_MOST_ENTRIES:]}, indent=1
        )
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix="tune.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text + "\n")
            os.replace(scratch, target)
        except BaseException:
            os.unlink(scratch)
            raise


def remember(entries: list[Entry]) -> str:
    """Uses the choices from now on, and writes them to the file.

    Returns:
        A sentence that reports the result.
    """
    if not enabled():
        return "nothing was remembered: TORCHWELD_TUNE switches it off"
    if not entries:
        return "nothing was remembered: no configuration was right"
    for found in entries:
        _apply(found)
    try:
        _write(entries)
    except OSError as error:
        _warn(f"{path()} could not be written ({error}); the choice holds in this process alone")
        return "the fastest is remembered in this process"
    return f"the fastest is remembered in {path()}"
