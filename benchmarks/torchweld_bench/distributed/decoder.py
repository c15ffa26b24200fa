"""A decoder like GPT-2 or Llama, with torch's modules or torchweld's.

Query, key and value are one matrix whose columns are grouped by the heads of key (their queries,
the key, the value), and the gated linear layer is interleaved: so tensor parallelism cuts both into
ordinary `Shard(0)`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import torchweld
from plan import Sizes
from torchweld.distributed import NormColwise, Rowwise
from torchweld.nn import GatedLinear, LayerNormLinear, RMSNormLinear

_THETA = 500000.0
_STD = 0.02


class _Gate(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.left = nn.Linear(hidden, ffn, bias=False)
        self.right = nn.Linear(hidden, ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.left(x)) * self.right(x)

    def fused(self) -> GatedLinear:
        pairs = torch.stack([self.left.weight, self.right.weight], 1).flatten(0, 1).detach()
        rows, hidden = pairs.shape
        gated = GatedLinear(
            hidden, rows // 2, bias=False, gate="swiglu", interleaved=True, device="meta"
        )
        gated.weight = nn.Parameter(pairs)
        return gated


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class _Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, dim, bias = sizes.hidden, sizes.head_dim, sizes.biases
        # `queries` is the number of query heads per KV head
        self.dim, self.queries = dim, sizes.heads // sizes.kv_heads
        norm = nn.RMSNorm if sizes.gated else nn.LayerNorm
        columns = dim * (sizes.heads + 2 * sizes.kv_heads)
        self.attend_in = nn.Sequential(
            norm(hidden, eps=1e-5), nn.Linear(hidden, columns, bias=bias)
        )
        self.attend_out = nn.Linear(dim * sizes.heads, hidden, bias=bias)
        up = [nn.Linear(hidden, sizes.ffn, bias=bias), nn.GELU("tanh")]
        up = [_Gate(hidden, sizes.ffn)] if sizes.gated else up
        self.mlp_in = nn.Sequential(norm(hidden, eps=1e-5), *up)
        self.mlp_out = nn.Linear(sizes.ffn, hidden, bias=bias)
        self.is_fused = False

    def fuse(self) -> None:
        self.is_fused = True
        if isinstance(self.mlp_in[1], _Gate):
            self.attend_in = RMSNormLinear.from_torch(self.attend_in)
            self.mlp_in[1] = self.mlp_in[1].fused()
        else:
            self.attend_in = LayerNormLinear.from_torch(self.attend_in)
            self.mlp_in = LayerNormLinear.from_torch(self.mlp_in)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        x = x + self.attend_out(self.attend(self.attend_in(x), cos, sin))
        return x + self.mlp_out(self.mlp_in(x))

    def attend(self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        groups = qkv.unflatten(-1, (-1, self.queries + 2, self.dim))
        query, key, value = groups.split([self.queries, 1, 1], -2)
        if cos is not None:
            query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        query, key, value = (t.flatten(2, 3).transpose(1, 2) for t in (query, key, value))
        if self.is_fused:
            out = torchweld.attention(query, key, value, causal=True)
        else:
            grouped = self.queries > 1
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=grouped
            )
        return out.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """The model: its mean loss from token ids and labels, both `(batch, seqlen)`.

    Args:
        sizes: of its layers, its tables tied; gated: as Llama, otherwise as GPT-2.
        recompute: whether activations are recomputed, block by block.
    """

    def __init__(self, sizes: Sizes, recompute: bool = False) -> None:
        super().__init__()
        self.sizes, self.recompute = sizes, recompute
        self.embed = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.positions, sizes.hidden) if sizes.positions else None
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        norm = nn.RMSNorm if sizes.gated else nn.LayerNorm
        self.norm = norm(sizes.hidden, eps=1e-5)
        self.head = nn.Linear(sizes.hidden, sizes.vocab, bias=False)
        self.head.weight = self.embed.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=_STD)

    def fuse(self) -> Decoder:
        """Switches to torchweld's modules in place, with the same parameters."""
        for block in self.blocks:
            block.fuse()
        return self

    def shard_columns(self, mesh: DeviceMesh) -> Decoder:
        """Applies tensor parallelism in place, with sequence parallelism between the matmuls."""
        sequence = Shard(1)
        columns = ColwiseParallel(input_layouts=sequence)
        fused = self.blocks[0].is_fused
        rows = (Rowwise if fused else RowwiseParallel)(output_layouts=sequence)
        table = RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence)
        plan = {
            "embed": table,
            "blocks.*.attend_out": rows,
            "blocks.*.mlp_out": rows,
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=sequence, use_local_output=False),
        }
        if self.positions is not None:
            plan["positions"] = table
        fused_columns = NormColwise(input_layouts=sequence)
        if fused:
            plan["blocks.*.attend_in"] = fused_columns
        else:
            plan["blocks.*.attend_in.0"] = SequenceParallel()
            plan["blocks.*.attend_in.1"] = columns
        if fused and not self.sizes.gated:
            plan["blocks.*.mlp_in"] = fused_columns
        else:
            plan["blocks.*.mlp_in.0"] = SequenceParallel()
            plan["blocks.*.mlp_in.1"] = fused_columns if fused else columns
        if self.sizes.gated and not fused:
            plan["blocks.*.mlp_in.1"] = PrepareModuleInput(
                input_layouts=sequence, desired_input_layouts=Replicate()
            )
            plan["blocks.*.mlp_in.1.left"] = plan["blocks.*.mlp_in.1.right"] = ColwiseParallel()
        # All processes have drawn the same parameters, so none needs to send them.
        parallelize_module(self, mesh, plan, src_data_rank=None)
        self.head.weight = self.embed.weight
        return self

    def compile_blocks(self) -> Decoder:
        """Compiles the blocks in place; all share one code. On a CPU only tracing is used."""
        backend = "inductor" if self.embed.weight.is_cuda else "aot_eager"
        for block in self.blocks:
            block.compile(backend=backend)
        return self

    def shard_parameters(self, mesh: DeviceMesh, dtype: torch.dtype) -> Decoder:
        """Applies FSDP2 to blocks and model in place; computes in dtype, reduces in float32."""
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in self.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(self, mesh=mesh, mp_policy=policy)

    def rotation(self, seqlen: int, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin of Llama's positions, `(seqlen, 1, 1, head_dim / 2)`."""
        if self.positions is not None:
            return None, None
        half = torch.arange(0, self.sizes.head_dim, 2, device=like.device) / self.sizes.head_dim
        angles = torch.arange(seqlen, device=like.device)[:, None] * _THETA**-half
        return tuple(t.to(like.dtype)[:, None, None] for t in (angles.cos(), angles.sin()))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device)[None])
        cos, sin = self.rotation(ids.shape[1], x)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), labels.flatten())
