"""softmax and causal_softmax on a GPU: `torchweld bench rows`."""

import sys

from torchweld.bench import main

if __name__ == "__main__":
    sys.exit(main(["rows", *sys.argv[1:]]))
