"""The operators: one file an op, with its function and, if it has one, its module."""
