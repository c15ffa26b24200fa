"""`python -m torchweld`: the `torchweld` command, after the package has been imported."""

import sys

from torchweld_cli import main

sys.exit(main())
