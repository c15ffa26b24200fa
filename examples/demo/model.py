"""The two models of the demo: equal weights, one of them fused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from demo.kinds import KINDS, TITLES, Kind
from demo.options import Options, UsageError
from demo.text import END, Text, Tokens, checkpoint_tokenizer, encode, train_tokenizer

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")


@dataclass
class Pair:
    """A stock model, a fused one of equal weights, and the report of `torchweld.fuse`."""

    stock: nn.Module
    fused: nn.Module
    report: Any
    config: Any
    kind: Kind

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.stock.parameters())


def read_config(options: Options) -> Any | None:
    """The configuration of `--checkpoint`, or None without one. Settles `options.model` and
    `options.context`.

    Raises:
        UsageError: The directory has no checkpoint of a known model, or `--context` is beyond its
            positions.
    """
    folder = options.checkpoint
    if folder is None:
        return None
    if not folder.is_dir():
        raise UsageError(f"--checkpoint {folder} is not a directory")
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        found = values.get("model_type") if isinstance(values, dict) else None
    except FileNotFoundError:
        raise UsageError(f"--checkpoint {folder} is no checkpoint: it has no config.json") from None
    except (OSError, ValueError):
        raise UsageError(f"--checkpoint {folder} has a config.json that is no JSON") from None
    types = {kind.config.model_type: name for name, kind in KINDS.items()}
    if found not in types:
        raise UsageError(
            f"--checkpoint {folder} must hold one of {TITLES}, but its model_type is {found!r}"
        )
    options.model = types[found]
    kind = KINDS[options.model]
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise UsageError(f"--checkpoint {folder} has no weights ({', '.join(_WEIGHTS)})")
    try:
        config = kind.config.from_dict({**values, **kind.no_dropout})
    except Exception as error:
        raise UsageError(f"--checkpoint {folder} has a bad config.json: {_first(error)}") from None
    positions = config.max_position_embeddings
    if options.context > positions:
        if options.context_given:
            raise UsageError(
                f"--context must be at most {positions}, the checkpoint's positions, "
                f"but got {options.context}"
            )
        options.context = positions
    return config


def make_tokens(options: Options, text: Text, config: Any | None) -> Tokens:
    """The tokenizer (the checkpoint's own, else one trained on the text) and the text's tokens.

    Raises:
        UsageError: The text is shorter than the context, or tokenizer and checkpoint don't fit.
    """
    tokenizer = None if config is None else checkpoint_tokenizer(options.checkpoint)
    if tokenizer is not None:
        origin = "checkpoint"
        if tokenizer.get_vocab_size() > config.vocab_size:
            raise UsageError(
                f"--checkpoint {options.checkpoint} has a tokenizer of "
                f"{tokenizer.get_vocab_size()} tokens, but a model of {config.vocab_size}"
            )
    else:
        vocab = options.vocab if config is None else min(options.vocab, config.vocab_size)
        tokenizer, origin = train_tokenizer(text, vocab)
    # Read twice as many tokens as the steps need, so that few windows overlap.
    need = max(200_000, 2 * options.steps * options.batch * (options.context + 1))
    end_id = tokenizer.token_to_id(END)
    if end_id is None:
        end_id = config.eos_token_id if isinstance(config.eos_token_id, int) else 0
    ids = encode(text, tokenizer, end_id, need, options.seed)
    if ids.numel() < options.context + 1:
        raise UsageError(
            f"the text must have more than --context = {options.context} tokens, "
            f"but {text.source} has {ids.numel() - 1}"
        )
    return Tokens(tokenizer, ids, end_id, tokenizer.get_vocab_size(), origin)


def make_pair(options: Options, tokens: Tokens, config: Any | None) -> Pair:
    """Builds both models from the seed (or the checkpoint) and fuses one.

    Raises:
        UsageError: The checkpoint's weights can't be read or don't fit its configuration.
    """
    import torchweld

    if config is None:
        config = _config(options, tokens)
    stock, fused = _build(options, config), _build(options, config)
    sample = tokens.ids[: min(options.context, 64)].unsqueeze(0).to(options.device)
    report = torchweld.fuse(fused, sample=sample, loss=True)
    return Pair(stock, fused, report, config, KINDS[options.model])


def _config(options: Options, tokens: Tokens) -> Any:
    """The configuration of random weights of the sizes that were asked for."""
    kind = KINDS[options.model]
    return kind.config(
        vocab_size=tokens.vocab,
        max_position_embeddings=options.context,
        hidden_size=options.dim,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        bos_token_id=tokens.end_id,
        eos_token_id=tokens.end_id,
        pad_token_id=tokens.end_id,
        tie_word_embeddings=True,
        **kind.sizes(options.dim, options.heads),
        **kind.no_dropout,
    )


def _build(options: Options, config: Any) -> nn.Module:
    import copy

    torch.manual_seed(options.seed)
    config = copy.deepcopy(config)
    if options.checkpoint is None:
        model = KINDS[options.model].model._from_config(config, attn_implementation="sdpa")
    else:
        model = _load(KINDS[options.model], options.checkpoint, config)
    return model.to(options.device, torch.float32).train()


def _load(kind: Kind, folder: Path, config: Any) -> nn.Module:
    try:
        model, found = kind.model.from_pretrained(
            str(folder),
            config=config,
            local_files_only=True,
            output_loading_info=True,
            attn_implementation="sdpa",
            dtype=torch.float32,
        )
    except Exception as error:  # damaged files raise a dozen types
        raise UsageError(f"--checkpoint {folder} can't be loaded: {_first(error)}") from None
    wrong = sorted(found["missing_keys"]) + sorted(str(k) for k in found.get("mismatched_keys", ()))
    if wrong:
        raise UsageError(
            f"--checkpoint {folder} lacks {len(wrong)} weights of its model, first {wrong[0]}"
        )
    return model


def _first(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
