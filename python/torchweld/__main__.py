"""`python -m torchweld`: the same as the `torchweld` command."""

import sys

from torchweld.cli import main

sys.exit(main())
