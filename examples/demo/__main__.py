"""`python examples/demo`."""

import sys
from pathlib import Path

# Python puts this folder on sys.path; its modules are imported as the package `demo` instead.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from demo.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
