"""``fuse``: which layers of a model run torchweld's ops, planned, measured and reported."""
