"""What the families share: names of dtypes, errors against a reference, and what may be lost."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def largest_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return (out.double() - reference).abs().max().item()


def two_roundings(dtype: torch.dtype, largest: float) -> float:
    """Two roundings of the largest result, and fp32 sums."""
    return largest * (2 * torch.finfo(dtype).eps + 1e-6)


def padded_conv2d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """torchweld.conv2d in torch's ops."""
    kh, kw = weight.shape
    return F.conv2d(F.pad(x, (0, kw - 1, 0, kh - 1))[:, None], weight[None, None])[:, 0]


def judged(
    out: torch.Tensor,
    eager: torch.Tensor,
    reference: torch.Tensor,
    allowed: float | None = None,
) -> dict[str, float]:
    """The errors of a row; None allows two roundings."""
    if allowed is None:
        allowed = two_roundings(out.dtype, reference.abs().max().item())
    error, eager_error = largest_error(out, reference), largest_error(eager, reference)
    return {"error": error, "eager_error": eager_error, "allowed_error": allowed}
