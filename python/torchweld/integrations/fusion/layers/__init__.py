"""The fused forward of each kind of layer, and the table of families that have them."""
