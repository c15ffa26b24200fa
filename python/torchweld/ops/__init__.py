"""The operators: their functions and, where they have one, their modules."""
