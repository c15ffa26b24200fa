"""The layers of torchweld that Hugging Face's `kernels` puts into models."""

from pathlib import Path

import torch

# The ops have torchweld's own namespace. To register them twice aborts the process, so this kernel
# and an installed torchweld use the library that was loaded first.
if not torch._C._dispatch_has_kernel("torchweld::gated_mlp"):
    torch.ops.load_library(str(Path(__file__).with_name("_ops.abi3.so")))

from . import layers  # noqa: E402

__all__ = ["layers"]
