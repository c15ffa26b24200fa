"""Times a family of ops, or one call, against peers: `make bench ARGS="rows"`."""

import sys

from torchweld_bench import main

if __name__ == "__main__":
    sys.exit(main())
