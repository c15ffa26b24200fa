"""Parts of Llama-like decoders on torchweld's ops: norms, projections, MLP, rotary, add + norm.

Each class here has the forward of one part, and :mod:`.families` joins it with the class of
transformers that it replaces. A part reads its parameters where they are. It asks in every call
whether they are plain tensors of one dtype and whether a hook or another layer (LoRA, quantised)
wants to be called instead; then the stock forward runs.

Norms, rotary embeddings and additions run stock while torch.compile traces: the compiler joins them
with their neighbours, and an op of its own would stand between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchweld._library import ops
from torchweld.ops.stock import is_plain

from . import measure
from .modules import activation_name, hooked, implementation
from .part import ROW, STOCK, Part, Place, below, is_fused, stock_forward
from .probes import Probes

# For each activation: the gate that applies it, and whether the gate applies it to the left branch.
_GATES = {
    "silu": ("swiglu", True),
    "gelu": ("geglu", False),
    "gelu_tanh": ("geglu_tanh", False),
    "relu": ("reglu", False),
}


class Norm(NamedTuple):
    """The attributes of a family's RMSNorm."""

    eps: str
    weight_offset: float


class MLP(NamedTuple):
    """The attributes of a family's gated MLP."""

    packed: bool
    activation: str


class Attention(NamedTuple):
    """The attributes of a family's attention."""

    packed: bool
    head_norm: str | None
    interleaved: bool
    options: Callable[[Any], dict[str, Any]]


class Layer(NamedTuple):
    """The modules that a decoder layer calls around its attention and its MLP."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str | None = None
    multiplier: str | None = None


def _plain(*tensors: Tensor | None) -> bool:
    """Whether tensors are floating point, of one dtype and of no subclass (DTensor, quantised)."""
    given = [tensor for tensor in tensors if tensor is not None]
    return (
        all(type(tensor) in (Tensor, nn.Parameter) for tensor in given)
        and given[0].is_floating_point()
        and len({tensor.dtype for tensor in given}) == 1
    )


def _parameter_refusal(tensors: dict[str, Tensor | None]) -> str | None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        plain = type(tensor) is nn.Parameter and type(tensor.data) is Tensor
        if not plain or not tensor.is_floating_point():
            kind = type(tensor.data if type(tensor) is nn.Parameter else tensor).__name__
            return f"{name} is {kind} of {tensor.dtype}, not a plain floating-point parameter"
        if tensor.device.type == "meta":
            return f"{name} is on the meta device"
    if len({tensor.dtype for tensor in given.values()}) > 1:
        listed = ", ".join(f"{name} {str(tensor.dtype)[6:]}" for name, tensor in given.items())
        return f"mixed dtypes: {listed}"
    return None


def _instance_refusal(module: nn.Module) -> str | None:
    if hasattr(module, "_hf_hook"):
        return "it has accelerate's hooks, which move its parameters"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return None


class FusedNorm(Part):
    """An RMSNorm as :func:`torchweld.rms_norm`."""

    kind = "norm"

    @staticmethod
    def label(module: nn.Module, row: Norm) -> str:
        return "rms_norm"

    @staticmethod
    def probe(module: nn.Module, row: Norm, weight: Tensor, probes: Probes) -> str | None:
        return probes.rms_norm(weight) or probes.rms_norm_linears(weight)

    @staticmethod
    def refusal(module: nn.Module, row: Norm) -> str | None:
        if module.weight.dtype == torch.float64:
            return "it is float64, of which the stock norm computes in float32"
        return _instance_refusal(module) or _parameter_refusal({"weight": module.weight})

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _runs_norm(self, hidden_states):
            return stock_forward(self, hidden_states)
        if measure.seen is not None:
            measure.note(self)
        return ops.rms_norm(hidden_states, self.weight, **_options(self))


def _options(norm: nn.Module) -> dict[str, float]:
    """Returns the options that a fused norm passes to its op."""
    row: Norm = getattr(norm, ROW)
    return {"eps": getattr(norm, row.eps), "weight_offset": row.weight_offset}


def _runs_norm(norm: nn.Module, x: Tensor) -> bool:
    # The stock norms compute in fp32 even if x is float64, and the op computes in float64. The
    # results would differ visibly.
    serves = is_fused(norm) and x.dtype != torch.float64 and _plain(x, norm.weight)
    return serves and not torch.compiler.is_compiling()


class FusedMLP(Part):
    """A gated MLP as :func:`torchweld.gated_mlp`.

    Where ``down_proj`` must be called itself, for example with LoRA, its two products and gate are
    :func:`torchweld.gated_linear_pair`. Where one layer has both weights they are
    :func:`torchweld.gated_linear`.
    """

    kind = "mlp"

    @staticmethod
    def label(module: nn.Module, row: MLP) -> str:
        if row.packed:
            return f"gated_linear (gate_up_proj -> {row.activation})"
        if fuses_down(module):
            return f"gated_mlp (gate_proj, up_proj -> {row.activation} -> down_proj)"
        return f"gated_linear_pair (gate_proj, up_proj -> {row.activation})"

    @staticmethod
    def probe(module: nn.Module, row: MLP, weight: Tensor, probes: Probes) -> str | None:
        gate, _ = gate_of(module, row)
        return probes.gated_linear(weight, gate, row.packed)

    @staticmethod
    def refusal(module: nn.Module, row: MLP) -> str | None:
        if gate_of(module, row) is None:
            act = type(getattr(module, row.activation)).__name__
            return f"no fused form of the activation {act}"
        tensors = {}
        for name, layer in _gate_layers(module, row).items():
            if type(layer) is not nn.Linear:
                kind = type(layer).__name__
                return f"{name} is {kind}, not torch's Linear (LoRA, quantised or replaced)"
            reason = _instance_refusal(layer)
            if reason is not None:
                return f"{name}: {reason}"
            if hooked(layer):
                return f"{name} has hooks, which would see other values"
            tensors |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
        return _instance_refusal(module) or _parameter_refusal(tensors)

    def forward(self, hidden_states: Tensor) -> Tensor:
        row = getattr(self, ROW, None)
        if row is None or not _runs_mlp(self, row, hidden_states):
            return stock_forward(self, hidden_states)
        if measure.seen is not None:
            measure.note(self)
        gate, act_left = gate_of(self, row)
        if row.packed:
            layer = self.gate_up_proj
            hidden = ops.gated_linear(hidden_states, layer.weight, layer.bias, gate=gate)
            return self.down_proj(hidden)
        left, right = self.gate_proj, self.up_proj
        if not act_left:
            left, right = right, left
        if fuses_down(self):
            down = self.down_proj
            weights = (left.weight, right.weight, down.weight)
            return ops.gated_mlp(
                hidden_states, *weights, left.bias, right.bias, down.bias, gate=gate
            )
        hidden = ops.gated_linear_pair(
            hidden_states, left.weight, right.weight, left.bias, right.bias, gate=gate
        )
        return self.down_proj(hidden)


def fuses_down(mlp: nn.Module) -> bool:
    """Whether an MLP's down_proj is plain enough to be computed in the op of its gate."""
    down = mlp.down_proj
    if not is_plain(down, nn.Linear):
        return False
    return _plain(mlp.gate_proj.weight, down.weight, down.bias)


def gate_of(mlp: nn.Module, row: MLP) -> tuple[str, bool] | None:
    """The gate of an MLP: its name, and whether gate_proj is its left argument."""
    found = _GATES.get(activation_name(mlp._modules.get(row.activation)))
    # In a packed layer the left branch is gate_proj.
    return None if found is None or (row.packed and not found[1]) else found


def _gate_layers(mlp: nn.Module, row: MLP) -> dict[str, nn.Module]:
    names = ("gate_up_proj",) if row.packed else ("gate_proj", "up_proj")
    return {name: getattr(mlp, name) for name in names}


def _runs_mlp(mlp: nn.Module, row: MLP, x: Tensor) -> bool:
    if gate_of(mlp, row) is None or hooked(mlp._modules[row.activation]):
        return False
    layers = _gate_layers(mlp, row).values()
    if not all(is_plain(layer, nn.Linear) for layer in layers):
        return False
    weights = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    cast = torch.is_autocast_enabled(x.device.type)
    return _plain(*weights) and (cast or _plain(x, weights[0]))


class FusedAttention(Part):
    """An attention layer whose rotary embedding is :func:`torchweld.rotary`.

    ``input_norm``, which a :class:`FusedLayer` hands over, normalises ``hidden_states`` in the op
    that projects it, :func:`torchweld.rms_norm_linears`.
    """

    kind = "rotary"

    @staticmethod
    def place(path: str, module: nn.Module, row: Attention) -> Place:
        return Place(below(path, "rotary"), (module, "rotary"), (module,))

    @staticmethod
    def label(module: nn.Module, row: Attention) -> str:
        return "rotary"

    @staticmethod
    def probe(module: nn.Module, row: Attention, weight: Tensor, probes: Probes) -> str | None:
        return probes.rotary(weight)

    @staticmethod
    def refusal(module: nn.Module, row: Attention) -> str | None:
        if not getattr(module, "use_rope", True):
            return "the layer has no rotary embedding"
        return _instance_refusal(module)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        input_norm: nn.Module | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        row = getattr(self, ROW, None)
        if row is None or torch.compiler.is_compiling():
            return stock_forward(
                self,
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        stock = sys.modules[getattr(self, STOCK).__module__]
        query, key, value = _projections(self, row, hidden_states, input_norm)
        if getattr(self, "use_rope", True):
            tables = position_embeddings
            if _plain(query, key) and all(_is_table(table, query) for table in tables):
                if row.interleaved:
                    tables = [_neighbours(table) for table in tables]
                query, key = ops.rotary(query, key, *tables, interleaved=row.interleaved)
                if measure.seen is not None:
                    measure.note((self, "rotary"))
            else:
                query, key = stock.apply_rotary_pos_emb(query, key, *tables)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(
            implementation(self.config), stock.eager_attention_forward
        )
        out, weights = function(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **row.options(self),
            **kwargs,
        )
        out = out.reshape(*hidden_states.shape[:-1], -1).contiguous()
        return self.o_proj(out), weights


def projection_layers(attn: nn.Module, row: Attention) -> dict[str, nn.Module]:
    """The layers that make query, key and value, by name."""
    names = ("qkv_proj",) if row.packed else ("q_proj", "k_proj", "v_proj")
    return {name: getattr(attn, name) for name in names}


def _projections(
    attn: nn.Module, row: Attention, x: Tensor, norm: nn.Module | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value ``(batch, nheads, seqlen, head_dim)``, normalised where they are."""
    layers = projection_layers(attn, row).values()
    if norm is None:
        projected = [layer(x) for layer in layers]
    else:
        if measure.seen is not None:
            measure.note(norm)
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        biases = [] if biases[0] is None else biases
        projected = ops.rms_norm_linears(x, weights, biases, norm.weight, **_options(norm))
    if row.packed:
        heads, heads_k = attn.config.num_attention_heads, attn.num_key_value_heads
        sizes = [count * attn.head_dim for count in (heads, heads_k, heads_k)]
        projected = projected[0].split(sizes, -1)
    query, key, value = projected
    if row.head_norm == "row":
        query, key = attn.q_norm(query), attn.k_norm(key)
    shape = (*x.shape[:-1], -1, attn.head_dim)
    query, key, value = query.view(shape), key.view(shape), value.view(shape)
    if row.head_norm == "head":
        query, key = attn.q_norm(query), attn.k_norm(key)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _is_table(table: Tensor, query: Tensor) -> bool:
    dtypes = (query.dtype, torch.float32)
    return type(table) is Tensor and table.dtype in dtypes and not table.requires_grad


def _neighbours(table: Tensor) -> Tensor:
    """A table of interleaved pairs ``(.., rotary_dim)`` from one whose first half has each once."""
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)


class FusedLayer(Part):
    """A decoder layer that adds its attention's result and normalises the sum in one op."""

    kind = "norm"

    @staticmethod
    def place(path: str, module: nn.Module, row: Layer) -> Place:
        norm = getattr(module, row.before_mlp)
        return Place(below(path, row.before_mlp), (norm, "add"), (module, norm))

    @staticmethod
    def label(module: nn.Module, row: Layer) -> str:
        return f"add_rms_norm (residual + self_attn -> {row.before_mlp})"

    @staticmethod
    def probe(module: nn.Module, row: Layer, weight: Tensor, probes: Probes) -> str | None:
        return probes.add_rms_norm(weight)

    @staticmethod
    def refusal(module: nn.Module, row: Layer) -> str | None:
        norm = getattr(module, row.before_mlp)
        if hooked(norm):
            return "it has hooks, which would see other values"
        reason = FusedNorm.refusal(norm, None)
        return reason or _instance_refusal(module)

    # NOTE: the families order the arguments after hidden_states differently, and their models pass
    # these arguments by name.
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        row = getattr(self, ROW, None)
        norm = None if row is None else self._modules.get(row.before_mlp)
        if norm is None or args or hooked(norm) or not _runs_norm(norm, hidden_states):
            return stock_forward(self, hidden_states, *args, **kwargs)
        x, before = hidden_states, self._modules[row.before_attention]
        if _projects_with(self.self_attn, before, x):
            h, _ = self.self_attn(hidden_states=x, input_norm=before, **kwargs)
        else:
            h, _ = self.self_attn(hidden_states=before(x), **kwargs)
        h = _after(self, row.after_attention, row.multiplier, h)
        if not _plain(h, x):
            x = x + h
            h = norm(x)
        else:
            if measure.seen is not None:
                measure.note((norm, "add"))
            h, x = ops.add_rms_norm(h, x, norm.weight, **_options(norm))
        return x + _after(self, row.after_mlp, row.multiplier, self.mlp(h))


def _projects_with(attn: nn.Module, norm: nn.Module, x: Tensor) -> bool:
    """Whether an attention layer can normalise its input in the op of its projections."""
    # Recorders of transformers see the attention's results alone.
    if not isinstance(attn, FusedAttention) or hooked(attn, calls_recorders=True) or hooked(norm):
        return False
    if not _runs_norm(norm, x):
        return False
    layers = projection_layers(attn, getattr(attn, ROW)).values()
    if not all(is_plain(layer, nn.Linear) for layer in layers):
        return False
    if len({layer.bias is None for layer in layers}) > 1:
        return False
    parameters = [tensor for layer in layers for tensor in (layer.weight, layer.bias)]
    cast = torch.is_autocast_enabled(x.device.type)
    return _plain(*parameters) and (cast or _plain(x, parameters[0]))


def _after(layer: nn.Module, name: str | None, multiplier: str | None, h: Tensor) -> Tensor:
    """Applies the norm or dropout and the factor that a layer has for a result before adding it."""
    if name is not None:
        h = layer._modules[name](h)
    return h if multiplier is None else h * getattr(layer, multiplier)
