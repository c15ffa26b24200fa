"""The operators: one module an op, with its function and, where there is one, its module."""
