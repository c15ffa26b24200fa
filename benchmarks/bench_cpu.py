"""The CPU kernels against eager torch: `torchweld bench cpu`."""

import sys

from torchweld.bench import main

if __name__ == "__main__":
    sys.exit(main(["cpu", *sys.argv[1:]]))
