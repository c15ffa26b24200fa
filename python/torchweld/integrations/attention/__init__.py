"""``attn_implementation="torchweld"`` of transformers: one mask a pass, one attention a layer."""
