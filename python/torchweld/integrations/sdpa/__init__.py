"""Runs torchweld's kernels under ``F.scaled_dot_product_attention`` and ``varlen_attn``."""
