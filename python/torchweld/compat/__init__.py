"""Functions with the names, layouts and defaults of other libraries, on torchweld's ops.

The modules `flash_attn`, `xformers` and `causal_conv1d` work without those libraries. `import
torchweld` imports none of them; `import torchweld.compat.causal_conv1d` loads the last one.
"""

from torchweld._lazy_import import lazy

__getattr__, __dir__ = lazy(__name__, {"flash_attn": "flash_attn", "xformers": "xformers"})
