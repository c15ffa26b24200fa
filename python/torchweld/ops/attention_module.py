"""The self-attention block of a Llama as a module."""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor, nn

from torchweld._library import require
from torchweld.distributed import _active
from torchweld.ops.attention import drawn_seed
from torchweld.ops.norms import RMSNorm
from torchweld.ops.stock import refuse_mixed, refuse_other, text_of

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_EPS = 1e-6
# The classes of transformers that Attention stands in for, and their modules.
_STOCK = {
    "LlamaAttention": "transformers.models.llama.modeling_llama",
    "Qwen3Attention": "transformers.models.qwen3.modeling_qwen3",
}


class Attention(nn.Module):
    """Computes self-attention with grouped heads, rotary embedding, window, dropout and a cache.

    The module replaces transformers' `LlamaAttention` and, with qk_norm, `Qwen3Attention`; the
    parameter names are the same. The projections are called as modules: each may have LoRA or
    hooks, or be an `Int4Linear`.

    Args:
        embed_dim: width of the input and output.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads; divides num_heads. None for num_heads.
        head_dim: None for `embed_dim // num_heads`.
        bias: whether all projections have a bias.
        causal: whether a token sees only its own position and those before it.
        rotary: base of the rotary embedding, such as 10000.0; None for no rotary embedding.
        window: at least 1: a token sees the `window` keys that end at its own position, without
            causal also the `window - 1` keys behind it; None for all.
        qk_norm: whether queries and keys get an RMSNorm with weights over the head dim (eps 1e-6)
            before the rotary embedding.
        dropout: share of the attention probabilities that are dropped in training mode, 0 to 1.

    Raises:
        ValueError: numbers of heads that do not divide, an odd head_dim with rotary, or a dropout
            that is out of range.

    Example::

        attention = torchweld.nn.Attention(64, num_heads=4, num_kv_heads=2, rotary=10000.0)
        assert attention(torch.randn(2, 16, 64)).shape == (2, 16, 64)
        with torch.no_grad():  # two tokens of a prompt, then one more
            cache = attention.new_cache(1, 32)
            for length, x in ((2, torch.randn(1, 2, 64)), (3, torch.randn(1, 1, 64))):
                y = attention(x, key_end=torch.tensor([length], dtype=torch.int32), cache=cache)
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        rotary: float | None = None,
        window: int | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"Attention: num_kv_heads must divide num_heads = {num_heads}, "
                f"but got {num_kv_heads}"
            )
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"Attention: num_heads must divide embed_dim = {embed_dim}, but got {num_heads}; "
                "or give head_dim"
            )
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if rotary is not None and self.head_dim % 2:
            raise ValueError(
                f"Attention: head_dim must be even with rotary, but got {self.head_dim}"
            )
        if not 0 <= dropout <= 1:
            raise ValueError(f"Attention: dropout must be between 0 and 1, but got {dropout}")
        self.causal, self.rotary, self.window = causal, rotary, window
        self.qk_norm, self.dropout = qk_norm, dropout
        options = {"bias": bias, "device": device, "dtype": dtype}
        kv_dim = num_kv_heads * self.head_dim
        self.q_proj: nn.Module = nn.Linear(embed_dim, num_heads * self.head_dim, **options)
        self.k_proj: nn.Module = nn.Linear(embed_dim, kv_dim, **options)
        self.v_proj: nn.Module = nn.Linear(embed_dim, kv_dim, **options)
        self.o_proj: nn.Module = nn.Linear(num_heads * self.head_dim, embed_dim, **options)
        norm = partial(RMSNorm, self.head_dim, _EPS, device=device, dtype=dtype)
        self.q_norm: nn.Module = norm() if qk_norm else nn.Identity()
        self.k_norm: nn.Module = norm() if qk_norm else nn.Identity()
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device: torch.device | str | None) -> Tensor | None:
        """Returns each pair's rotary angle at position 1, float32 `(head_dim / 2,)`, or None."""
        if self.rotary is None:
            return None
        steps = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        return 1.0 / self.rotary ** (steps / self.head_dim)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        if self.inv_freq is not None:  # 16 bits would be wrong by whole turns at late positions
            self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    def reset_parameters(self) -> None:
        for name in _PROJECTIONS:
            getattr(self, name).reset_parameters()
        if self.qk_norm:
            self.q_norm.reset_parameters()
            self.k_norm.reset_parameters()

    @classmethod
    def from_torch(cls, module: nn.Module) -> Attention:
        """Returns a copy of transformers' `LlamaAttention` or `Qwen3Attention`.

        Frozen parameters stay frozen.

        Raises:
            ValueError: another module; one of a subclass, or with hooks or a parametrisation; a
                rotary embedding that scales positions; another scale; mixed dtypes or devices.
        """
        owner = "Attention.from_torch"
        classes = [getattr(sys.modules.get(path), name, None) for name, path in _STOCK.items()]
        known = tuple(kind for kind in classes if kind is not None)
        expected = "transformers' " + " or ".join(_STOCK)
        if not known:
            raise ValueError(f"{owner}: module must be {expected}, but got {text_of(module)}")
        refuse_other(owner, "module", expected, module, *known)
        for name in _PROJECTIONS:
            refuse_other(owner, f"module.{name}", "nn.Linear", getattr(module, name), nn.Linear)
        config = module.config
        rope = config.rope_parameters
        if rope.get("rope_type") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"{owner}: the rotary embedding must be of type default, but got {rope}"
            )
        if module.scaling != module.head_dim**-0.5:
            raise ValueError(
                f"{owner}: module.scaling must be head_dim ** -0.5, but got {module.scaling}"
            )
        refuse_mixed(owner, dict(module.named_parameters()))
        weight, norm = module.q_proj.weight, getattr(module, "q_norm", None)
        new = cls(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim=module.head_dim,
            bias=module.q_proj.bias is not None,
            rotary=float(rope["rope_theta"]),
            window=getattr(module, "sliding_window", None),
            qk_norm=norm is not None,
            dropout=module.attention_dropout,
            device=weight.device,
            dtype=weight.dtype,
        )
        if norm is not None:
            new.q_norm.eps, new.k_norm.eps = norm.variance_epsilon, module.k_norm.variance_epsilon
        _copy(module, new)
        return new.train(module.training)

    def to_torch(self) -> nn.Module:
        """Returns a `LlamaAttention`, or with qk_norm a `Qwen3Attention`, with the same weights.

        That module runs SDPA; callers pass `position_embeddings`, as transformers' models do.

        Raises:
            ImportError: transformers is not installed.
            ValueError: not causal, without rotary, or a window without qk_norm, which transformers'
                classes lack; the module or a projection is of a subclass, or has hooks or a
                parametrisation; mixed dtypes or devices.
        """
        owner, kind = "Attention.to_torch", "Qwen3" if self.qk_norm else "Llama"
        try:
            import transformers
            from transformers.models.llama.modeling_llama import LlamaAttention
            from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
        except ImportError as error:
            raise ImportError(f"{owner} needs transformers: pip install torchweld[hf]") from error
        refuse_other(owner, "module", "Attention", self, Attention)
        for name in _PROJECTIONS:
            refuse_other(owner, name, "nn.Linear", getattr(self, name), nn.Linear)
        if not self.causal or self.rotary is None or (self.window and not self.qk_norm):
            raise ValueError(
                f"{owner}: the module must be causal with rotary, and without window unless it has "
                f"qk_norm, but got {text_of(self.extra_repr())}"
            )
        refuse_mixed(owner, dict(self.named_parameters()))
        options = (
            {}
            if not self.qk_norm
            else {
                "rms_norm_eps": self.q_norm.eps,
                "sliding_window": self.window,
                "use_sliding_window": self.window is not None,
                "layer_types": ["sliding_attention" if self.window else "full_attention"],
            }
        )
        config = getattr(transformers, kind + "Config")(
            hidden_size=self.embed_dim,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_hidden_layers=1,
            attention_bias=self.q_proj.bias is not None,
            attention_dropout=self.dropout,
            rope_parameters={"rope_type": "default", "rope_theta": self.rotary},
            **options,
        )
        config._attn_implementation = "sdpa"
        weight = self.q_proj.weight
        with torch.device(weight.device):
            new = (Qwen3Attention if self.qk_norm else LlamaAttention)(config, 0).to(weight.dtype)
        _copy(self, new)
        return new.train(self.training)

    def new_cache(self, batch: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Returns zeros for keys and values: `(batch, num_kv_heads, capacity, head_dim)` each.

        They have the dtype and device of `k_proj.weight`.
        """
        weight = self.k_proj.weight  # an Int4Linear's has only dtype and device
        like = {"dtype": weight.dtype, "device": weight.device}
        shape = (batch, self.num_kv_heads, capacity, self.head_dim)
        return torch.zeros(shape, **like), torch.zeros(shape, **like)

    def forward(
        self,
        x: Tensor,
        leftpad: Tensor | None = None,
        key_start: Tensor | None = None,
        key_end: Tensor | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Maps x `(batch, seqlen, embed_dim)` to the same shape.

        Args:
            x: all tokens; with a cache only the new ones.
            leftpad: int32 `(batch,)`, as in `torchweld.attention`.
            key_start: int32 `(batch, seqlen)`, as in `torchweld.attention`: packed documents.
            key_end: int32 `(batch,)`: the lengths of a batch padded on the right; with a cache, the
                number of tokens in the cache after this call.
            cache: keys and values from `new_cache`; the call writes those of x to positions
                `key_end - seqlen` to `key_end - 1`, in place. Without `torch.no_grad()` the
                cache then holds autograd's graph.

        Raises:
            ValueError: x is not of three dims; a cache without key_end; a call inside of
                `torchweld.distributed.context_parallel`.
            RuntimeError: positions outside the cache (a device assertion on CUDA).
        """
        if x.dim() != 3:
            raise ValueError(
                f"Attention: x must be (batch, seqlen, embed_dim), but got {x.dim()} dims; use "
                "x.unsqueeze(0) for one sequence"
            )
        if not torch.jit.is_scripting():
            _refuse_context_parallel()
        batch, seqlen, _ = x.shape
        places = torch.arange(seqlen, device=x.device)[None]
        if cache is not None:
            if key_end is None:
                raise ValueError("Attention: key_end must be given with a cache, but got None")
            places = key_end[:, None] - seqlen + places
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        inv_freq = self.inv_freq
        if inv_freq is not None:
            angles = places[..., None].float() * inv_freq
            angles = torch.cat((angles, angles), dim=-1)
            q, k = torch.ops.torchweld.rotary(q, k, angles.cos(), angles.sin())
        if cache is not None:
            index = places[:, None, :, None].long().expand(k.shape)
            k, v = cache[0].scatter_(2, index, k), cache[1].scatter_(2, index, v)
        p = self.dropout if self.training else 0.0
        out = torch.ops.torchweld.attention(
            q, k, v, leftpad, causal=self.causal, key_start=key_start, key_end=key_end,
            window=self.window, dropout_p=p, dropout_seed=drawn_seed(x, p, None),
        )  # fmt: skip
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        more = {
            "bias": getattr(self.q_proj, "bias", None) is not None or None,
            "causal": None if self.causal else False,
            "rotary": self.rotary,
            "window": self.window,
            "qk_norm": self.qk_norm or None,
            "dropout": self.dropout or None,
        }
        given = "".join(f", {name}={value}" for name, value in more.items() if value is not None)
        return f"embed_dim={self.embed_dim}, {heads}, head_dim={self.head_dim}{given}"


@torch.jit.ignore
def _refuse_context_parallel() -> None:
    _active.refuse_torchs_own("Attention")
    if _active.current is not None:
        raise ValueError(
            "Attention: it must be outside of context_parallel, but got a call inside; use "
            "CausalSelfAttention, or torchweld.distributed.context_parallel_attention"
        )


def _copy(source: nn.Module, target: nn.Module) -> None:
    """Copies all parameters; frozen ones stay frozen."""
    target.load_state_dict(source.state_dict())
    for theirs, ours in zip(source.parameters(), target.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
