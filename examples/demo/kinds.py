"""The models of the demo: the values of ``--model``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

EXPERTS, PER_TOKEN = 8, 2  # of a mixture


class Kind(NamedTuple):
    """A value of ``--model``.

    Attributes:
        title: Its name in texts.
        prefix: The prefix of its classes in transformers.
        no_dropout: Options without dropout, which would draw different numbers in each model and
            hide the difference between them.
        mixture: Whether its layers have experts.
    """

    title: str
    prefix: str
    no_dropout: dict[str, float]
    mixture: bool = False

    @property
    def rotary(self) -> bool:
        return self.prefix != "GPT2"

    @property
    def config(self) -> type:
        import transformers

        return getattr(transformers, f"{self.prefix}Config")

    @property
    def model(self) -> type[nn.Module]:
        import transformers

        ending = "ForCausalLM" if self.rotary else "LMHeadModel"
        return getattr(transformers, f"{self.prefix}{ending}")

    def sizes(self, dim: int, heads: int) -> dict[str, Any]:
        """The options of its configuration that the flags don't give."""
        if not self.rotary:
            return {}
        sizes = {"num_key_value_heads": key_heads(heads), "intermediate_size": self.width(dim)}
        experts = {"num_experts": EXPERTS, "num_experts_per_tok": PER_TOKEN}
        return sizes | experts if self.mixture else sizes

    def width(self, dim: int) -> int:
        """The width of a gated MLP, whose three weights hold about as much as GPT-2's two, or of an
        expert: those of a token hold as much together.
        """
        width = -(-8 * dim // 96) * 32
        return width // PER_TOKEN if self.mixture else width


def key_heads(heads: int) -> int:
    """Heads of keys and values in a Llama of so many heads."""
    return heads // 2 if heads % 2 == 0 else heads


KINDS = {
    "gpt2": Kind("GPT-2", "GPT2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "llama": Kind("Llama", "Llama", {"attention_dropout": 0.0}),
    "moe": Kind("OLMoE", "Olmoe", {"attention_dropout": 0.0}, mixture=True),
}
TITLES = ", ".join(kind.title for kind in KINDS.values())
