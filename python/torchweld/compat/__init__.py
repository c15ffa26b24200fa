"""Functions with the names, layouts and defaults of other attention libraries, on torchweld's ops.

`torchweld.compat.flash_attn` and `torchweld.compat.xformers` need neither library. `import
torchweld` imports neither module.
"""
