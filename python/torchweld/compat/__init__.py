"""Functions with the names, layouts and defaults of other attention libraries, on torchweld's ops.

`torchweld.compat.flash_attn` and `torchweld.compat.xformers` work without those libraries. `import
torchweld` imports neither module.
"""

from torchweld._lazy_import import lazy

__getattr__, __dir__ = lazy(__name__, {"flash_attn": "flash_attn", "xformers": "xformers"})
