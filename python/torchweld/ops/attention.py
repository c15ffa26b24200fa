"""Attention, and the self-attention block of a GPT-2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import readable_errors
from torchweld.distributed import _active
from torchweld.ops.gpt2_attention import (
    PROJECTIONS,
    copy_projections,
    projection_tensors,
    refuse_attention,
    scale_of,
)
from torchweld.ops.key_start import check_key_start
from torchweld.ops.stock import is_plain, refuse_mixed, refuse_other

_KERNELS = ("causal_softmax", "softmax_matmul", "attention")


def drawn_seed(query: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor | None:
    """Returns dropout_seed; if dropout needs one and it is None, one of torch's generator."""
    if dropout_seed is not None or dropout_p <= 0:
        return dropout_seed
    return torch.randint(1 << 62, (1,), device=query.device)


@readable_errors
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    leftpad: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Computes `scaled_dot_product_attention`; the score matrix is never stored.

    leftpad, key_start, key_end and window replace a dense mask. Query heads
    `[h * group, (h + 1) * group)` share key and value head h (grouped-query attention). The table
    has the keys that each query row sees, 1 for a visible key::

        seqlen_q = 2, seqlen_k = 5, causal:      leftpad = 2, causal:
            1 1 1 1 0                                0 0 1 1 0
            1 1 1 1 1                                0 0 1 1 1

        causal, window = 2:                      causal, key_end = 4, key_start = [[0, 2]]:
            0 0 1 1 0                                1 1 1 0 0
            0 0 0 1 1                                0 0 1 1 0

    Row i has position `i + seqlen_k - seqlen_q` among the keys. With one key_end per sequence its
    position is `i + max(key_end[b], min(seqlen_q, seqlen_k)) - seqlen_q`: the last keys of a cache
    are those of the queries; a key_end below both lengths means padding on the right. With one
    key_end per row, row i has position `key_end[b, i] - 1`.

    Args:
        query: `(batch, nheads, seqlen_q, head_dim)`, float32, float16 or bfloat16 (float64 on CPU).
        key: `(batch, nheads_kv, seqlen_k, head_dim)`, dtype of `query`; nheads_kv divides nheads.
        value: `(batch, nheads_kv, seqlen_k, head_dim_v)`, dtype of `query`; head_dim_v is free.
        leftpad: int32 `(batch,)` on the same device: the number of padding positions at the start
            of each sequence. Padding keys are never read; a query row at a padding position is 0.
        causal: whether row i sees keys only up to its own position (bottom-right aligned; SDPA's
            `is_causal` is top-left aligned, which differs if the lengths differ).
        scale: finite factor on the scores; `head_dim ** -0.5` when None.
        key_start: int32 `(batch, seqlen_q)` on the same device: row i sees no key before
            `key_start[b, i]`, as in packed documents (`key_start_from_position_ids`,
            `key_start_from_documents`), nor before leftpad. Without causal all rows of a
            sequence must have the same value, unless key_end has one value per row.
        key_end: int32 `(batch,)` on the same device: how many keys each sequence has, in a batch
            padded on the right or a cache with free slots behind its tokens; later keys are never
            read. Or int32 `(batch, seqlen_q)`: row i sees the keys before `key_end[b, i]`, with or
            without causal, and a window ends there; on CUDA, keys that no row sees must be finite
            if they lie between the keys of two rows.
        window: at least 1: row i sees the `window` keys that end at its own position, without
            causal also the `window - 1` keys behind it; None for all.
        softcap: above 0: scores become `softcap * tanh(score / softcap)` before the mask; None for
            no cap.
        sink: `(nheads,)`, dtype of query or float32: a logit per head that is in the softmax sum
            but has no value; None for none.
        dropout_p: 0 to 1, in steps of 2**-16: this share of the probabilities becomes 0, the others
            are divided by `1 - dropout_p`, as in SDPA.
        dropout_seed: int64 `(1,)` on the same device; None draws one from torch's generator. The
            seed and the index (batch, head, row, key) of a probability decide whether it is
            dropped, the same on every device.
        bias: `(1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k)`, dtype of `query`: added to the
            scaled scores before the mask, broadcast over dimensions of size 1; None for none. It
            may be -inf, as in a dense mask: a row with only such scores is NaN, as in softmax. At
            keys that the other masks hide it is not used. It can't be given with softcap.
        alibi_slopes: `(nheads,)`, float32 or dtype of `query`: ALiBi, which subtracts
            `alibi_slopes[h] * |position of row i - j|` from the scaled scores, as flash-attn; None
            for none. A slope below 0 counts as 0. It has no gradient, and can't be given with
            bias, softcap, dropout or a key_end per row.

    Returns:
        `(batch, nheads, seqlen_q, head_dim_v)`, dtype of `query`. A row that sees no key is 0 and
        has gradient 0. The memory order is that of `query`: if `query` is a view of `(batch,
        seqlen_q, nheads, head_dim)`, `out.transpose(1, 2)` is contiguous, otherwise `out` is. By
        the same rule, the gradients have the memory orders of `query`, `key` and `value`.

    Raises:
        RuntimeError: a wrong shape, dtype or device, or a number that is out of range; key_start
            differs from row to row without causal and without key_end per row, which is a device
            assertion on CUDA. No other values of tensors are checked: a value out of range counts
            as the nearest one in range.

    Limits: differentiable once. On CUDA, dropout, bias and ALiBi run a kernel that is slower than
        SDPA's, except in 16 bits on Hopper, with head dims up to 128 and without softcap. The
        gradient of the bias needs memory for `(batch, nheads, seqlen_q, seqlen_k)` elements. With
        softcap, bfloat16 values beyond 1e27 may give inf on Hopper.

    Source: Dao, "FlashAttention-2", 2023; Press et al., "Train Short, Test Long", 2022 (ALiBi).

    Example::

        q = torch.randn(2, 8, 16, 64)
        k, v = torch.randn(2, 2, 16, 64), torch.randn(2, 2, 16, 64)  # two heads of keys for eight
        out = torchweld.attention(q, k, v, causal=True, window=4)
        padding = torch.tensor([0, 3], dtype=torch.int32)  # 3 positions of the second sequence
        out = torchweld.attention(q, k, v, padding, causal=True)
        out = torchweld.attention(q, k, v, causal=True, dropout_p=0.1)
        out = torchweld.attention(q, k, v, bias=torch.randn(1, 8, 16, 16))
        slopes = 2.0 ** -torch.arange(1, 9)
        out = torchweld.attention(q, k, v, causal=True, alibi_slopes=slopes)
    """
    check_key_start("attention", key_start, causal, key_end)
    return ops.attention(
        query,
        key,
        value,
        leftpad,
        causal=causal,
        scale=scale,
        key_start=key_start,
        key_end=key_end,
        window=window,
        softcap=softcap,
        sink=sink,
        dropout_p=dropout_p,
        dropout_seed=drawn_seed(query, dropout_p, dropout_seed),
        bias=bias,
        alibi_slopes=alibi_slopes,
    )


@readable_errors
def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    leftpad: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `attention` and the log-sum-exp of each row's scores; both have gradients.

    With lse, results of parts of the keys can be combined, as in ring attention: for `out, lse` of
    two parts the whole is `(out1 * exp(lse1) + out2 * exp(lse2)) / (exp(lse1) + exp(lse2))`.

    Args: those of `attention`.

    Returns:
        The result of `attention`, and lse `(batch, nheads, seqlen_q)`, float32 (float64 for
        float64): `log(sum(exp(score)))`, with the sink in the sum. A row that sees no key has an
        lse of -inf, or the sink if there is one.

    Raises:
        RuntimeError: as `attention`.

    Example::

        q, k, v = (torch.randn(1, 4, 8, 32) for _ in range(3))
        out, lse = torchweld.attention_with_lse(q, k, v, causal=True)
        assert out.shape == (1, 4, 8, 32) and lse.shape == (1, 4, 8)
    """
    check_key_start("attention_with_lse", key_start, causal, key_end)
    return ops.attention_with_lse(
        query,
        key,
        value,
        leftpad,
        causal=causal,
        scale=scale,
        key_start=key_start,
        key_end=key_end,
        window=window,
        softcap=softcap,
        sink=sink,
        dropout_p=dropout_p,
        dropout_seed=drawn_seed(query, dropout_p, dropout_seed),
        bias=bias,
        alibi_slopes=alibi_slopes,
    )


class CausalSelfAttention(nn.Module):
    """Computes GPT-2's attention block: qkv projection, causal attention, output projection.

    The module replaces `transformers.models.gpt2.modeling_gpt2.GPT2Attention`. The projections
    `c_attn` (rows: query, key, value) and `c_proj` are `nn.Linear`, with weights `(out, in)`.
    Either may have hooks or a parametrisation, or be replaced by a layer with LoRA or by
    `Int4Linear`.

    Args:
        embed_dim: width of the input and output.
        num_heads: number of heads; divides embed_dim.
        bias: whether both projections have a bias.
        out_proj: whether there is an output projection; if not, `c_proj` is `nn.Identity`.
        kernel: how much is fused: "causal_softmax" (scores in memory, softmax op, matmul),
            "softmax_matmul" (both in one op) or "attention". All compute the same function.
        scale: factor on the scores; None for head_dim^-0.5.

    Raises:
        ValueError: num_heads does not divide embed_dim, or another kernel.

    Example::

        attention = torchweld.nn.CausalSelfAttention(64, num_heads=4)
        x, leftpad = torch.randn(2, 16, 64), torch.tensor([0, 5], dtype=torch.int32)
        assert attention(x, leftpad).shape == (2, 16, 64)
    """

    __constants__ = ["embed_dim", "num_heads", "head_dim", "kernel", "scale", "_plain_qkv"]
    __jit_unused_properties__ = ["_plain_qkv"]  # scripting reads this property once, as a constant

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        out_proj: bool = True,
        kernel: str = "attention",
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"CausalSelfAttention: num_heads must divide embed_dim = {embed_dim}, "
                f"but got {num_heads}"
            )
        if kernel not in _KERNELS:
            raise ValueError(
                f"CausalSelfAttention: kernel must be one of {', '.join(_KERNELS)}, "
                f"but got {kernel!r}"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.kernel = kernel
        self.scale = float(self.head_dim**-0.5 if scale is None else scale)
        self.c_attn: nn.Module = nn.Linear(
            embed_dim, 3 * embed_dim, bias=bias, device=device, dtype=dtype
        )
        self.c_proj: nn.Module = (
            nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
            if out_proj
            else nn.Identity()
        )

    @classmethod
    def from_torch(cls, module: nn.Module, *, kernel: str = "attention") -> CausalSelfAttention:
        """Returns a copy of a transformers `GPT2Attention` (its `Conv1D` weights transposed).

        The scaling of its scores is kept, and frozen parameters stay frozen.

        Args:
            module: self-attention with dropout probabilities of 0.
            kernel: as in the class; it must be "attention", which keeps the scores in float32, for
                a module with `reorder_and_upcast_attn`.

        Raises:
            ValueError: another module; one of a subclass, or with hooks or a parametrisation;
                cross-attention, dropout, attention that is not causal, or an attention function
                that is none of transformers' own; mixed dtypes or devices.
        """
        owner = "CausalSelfAttention.from_torch"
        refuse_attention(owner, module, kernel)
        weight = module.c_attn.weight
        new = cls(
            weight.shape[0],
            module.num_heads,
            kernel=kernel,
            scale=scale_of(module),
            device=weight.device,
            dtype=weight.dtype,
        )
        copy_projections(module, new)
        return new.train(module.training)

    def to_torch(self) -> nn.Module:
        """Returns a transformers `GPT2Attention` with the same weights and without dropout.

        That module runs SDPA, causal if no mask is given; frozen parameters stay frozen.

        Raises:
            ImportError: transformers is not installed.
            ValueError: no biases or no output projection; the module or a projection is of a
                subclass, or has hooks or a parametrisation; mixed dtypes or devices.
        """
        try:
            from transformers import GPT2Config
            from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
        except ImportError as error:
            raise ImportError(
                "CausalSelfAttention.to_torch needs transformers: pip install torchweld[hf]"
            ) from error
        owner = "CausalSelfAttention.to_torch"
        refuse_other(owner, "module", "CausalSelfAttention", self, CausalSelfAttention)
        if isinstance(self.c_proj, nn.Identity) or getattr(self.c_attn, "bias", self) is None:
            raise ValueError(
                f"{owner}: GPT2Attention has biases and an output projection, but this module was "
                "built without"
            )
        for name in PROJECTIONS:
            refuse_other(owner, name, "nn.Linear", getattr(self, name), nn.Linear)
        refuse_mixed(owner, projection_tensors(self))
        config = GPT2Config(
            n_embd=self.embed_dim, n_head=self.num_heads, attn_pdrop=0.0, resid_pdrop=0.0
        )
        config._attn_implementation = "sdpa"
        weight = self.c_attn.weight
        with torch.device(weight.device):
            new = GPT2Attention(config, layer_idx=0).to(weight.dtype)
        new.scaling = self.scale
        copy_projections(self, new)
        return new.train(self.training)

    @property
    def _plain_qkv(self) -> bool:
        """Whether c_attn is a plain linear layer without hooks.

        NOTE: TorchScript reads it once, when the module is scripted, and compiles that branch only.
        """
        layer = self.c_attn
        if not is_plain(layer, nn.Linear):
            return False
        # A tensor subclass, such as a quantised weight, may replace F.linear: call c_attn then.
        kind = type(layer.weight)
        return kind is Tensor or kind.__torch_function__ is nn.Parameter.__torch_function__

    def _follows(self) -> bool:
        """Whether the call is inside of context_parallel."""
        _active.refuse_torchs_own("CausalSelfAttention")
        if _active.current is not None and self.kernel != "attention":
            raise ValueError(
                'CausalSelfAttention: kernel must be "attention" inside of context_parallel, but '
                f"got {self.kernel!r}"
            )
        return _active.current is not None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, leftpad: Tensor | None) -> Tensor:
        scale = self.scale
        if self.kernel == "attention":
            return torch.ops.torchweld.attention(q, k, v, leftpad, causal=True, scale=scale)
        scores = torch.matmul(q, k.transpose(-2, -1))
        if self.kernel == "softmax_matmul":
            return torch.ops.torchweld.softmax_matmul(scores, v, leftpad, causal=True, scale=scale)
        return torch.ops.torchweld.causal_softmax(scores, leftpad, scale=scale).matmul(v)

    def forward(self, x: Tensor, leftpad: Tensor | None = None) -> Tensor:
        """Maps `(batch, seqlen, embed_dim)` to the same shape; leftpad is int32 `(batch,)`.

        leftpad is as in `torchweld.attention`. Inside of `torchweld.distributed.context_parallel`,
        x has this process's tokens.

        Raises:
            ValueError: x is not of three dims; inside of context_parallel, another kernel than
                "attention".
        """
        if x.dim() != 3:
            raise ValueError(
                "CausalSelfAttention: x must be (batch, seqlen, embed_dim), but got "
                f"{x.dim()} dims; use x.unsqueeze(0) for one sequence"
            )
        batch, seqlen, _ = x.shape
        if self._plain_qkv:
            qkv = torch.ops.torchweld.linear(x, self.c_attn.weight, self.c_attn.bias)
        else:
            qkv = self.c_attn(x)
        q, k, v = (
            qkv.reshape(batch, seqlen, 3, self.num_heads, self.head_dim)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        if torch.jit.is_scripting():  # scripting does not compile the code below
            out = self._attend(q, k, v, leftpad)
        elif self._follows():
            out = _active.current.attention(q, k, v, leftpad, causal=True, scale=self.scale)
        else:
            out = self._attend(q, k, v, leftpad)
        return self.c_proj(out.transpose(1, 2).reshape(batch, seqlen, self.embed_dim))

    def extra_repr(self) -> str:
        own = "" if self.scale == self.head_dim**-0.5 else f", scale={self.scale:g}"
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, kernel={self.kernel!r}{own}"
        )
