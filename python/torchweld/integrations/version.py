"""Says which transformers releases the integrations need and have been tested with."""

from __future__ import annotations

import importlib.metadata
import warnings

# The oldest and the newest minor release of transformers that the tests have run with;
# pyproject.toml and requirements/demo.txt say them too.
OLDEST, NEWEST = (5, 4), (5, 24)

_warned = False


def release(version: str | None = None) -> tuple[int, ...]:
    """Returns the minor release ``(5, 24)`` of "5.24.0", by default of the installed transformers.

    Raises:
        importlib.metadata.PackageNotFoundError: transformers is missing.
    """
    version = version or importlib.metadata.version("transformers")
    return tuple(int(part) for part in version.split(".")[:2])


def check_version(caller: str) -> None:
    """Warns once if transformers is newer than tested. The message names the caller.

    Raises:
        ImportError: transformers is missing or too old.
    """
    global _warned
    needs = f"{caller} needs transformers {_text(OLDEST)} or newer"
    fix = "install it with `pip install -U transformers`"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{needs}, but there is none; {fix}") from error
    if release(version) < OLDEST:
        raise ImportError(f"{needs}, but got {version}; {fix}")
    if release(version) > NEWEST and not _warned:
        _warned = True
        warnings.warn(
            f"torchweld has been tested with transformers {_text(OLDEST)} to {_text(NEWEST)}, but "
            f"got {version}; check the report of torchweld.fuse, or "
            f'`pip install "transformers<{_text((NEWEST[0], NEWEST[1] + 1))}"`',
            stacklevel=3,
        )


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
