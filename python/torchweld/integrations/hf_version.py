"""Which transformers the integrations need."""

from __future__ import annotations

import importlib.metadata

OLDEST = (5, 4)  # of transformers; pyproject.toml says it too


def check_version(asker: str) -> None:
    """Raises where transformers is missing or too old.

    Args:
        asker: The name of what needs it, for the message.

    Raises:
        ImportError: transformers is missing or too old.
    """
    needs = f"{asker} needs transformers {'.'.join(map(str, OLDEST))} or newer"
    fix = "install it with `pip install -U transformers`"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{needs}, but there is none; {fix}") from error
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(f"{needs}, but got {version}; {fix}")
