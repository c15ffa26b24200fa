"""Defines the fused forward of each kind of layer, and the table of model families."""
