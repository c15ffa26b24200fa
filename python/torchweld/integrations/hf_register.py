"""Makes ``attn_implementation="torchweld"`` known as soon as transformers is there.

transformers takes seconds to import, so torchweld doesn't. Its ``modeling_utils`` holds the table
of attention functions, and no model is built before that is loaded.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from types import ModuleType

from torchweld._on_import import when_imported

OLDEST = (5, 4)  # of transformers; pyproject.toml says it too


def check_version(asker: str) -> None:
    """Raises where transformers is missing or too old for what is here.

    Raises:
        ImportError: It is.
    """
    needs = f"{asker} needs transformers {'.'.join(map(str, OLDEST))} or newer"
    fix = "install it with `pip install -U transformers`"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"{needs}, but there is none; {fix}") from error
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(f"{needs}, but got {version}; {fix}")


def _register(modeling_utils: ModuleType) -> None:
    # Whoever imports transformers may not want torchweld's attention: nothing here may raise.
    try:
        from .hf_attention import register_attention

        register_attention()
    except Exception as error:
        warnings.warn(
            f'torchweld: attn_implementation="torchweld" is not there, because {error}',
            stacklevel=2,
        )


def install() -> None:
    """Registers now, or when transformers' ``modeling_utils`` has been imported."""
    when_imported("transformers.modeling_utils", _register)
