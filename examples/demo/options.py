"""The flags of `make demo`, their defaults and their refusals."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo.kinds import KINDS, TITLES

if TYPE_CHECKING:
    import torch

CPU_DEFAULTS = {
    "steps": 150,
    "layers": 4,
    "dim": 256,
    "heads": 4,
    "context": 128,
    "batch": 8,
    "vocab": 4096,
    "dtype": "float32",
}
# The sizes of GPT-2 124M.
GPU_DEFAULTS = {
    "steps": 100,
    "layers": 12,
    "dim": 768,
    "heads": 12,
    "context": 1024,
    "batch": 8,
    "vocab": 50257,
    "dtype": "bfloat16",
}
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
_MODEL = "gpt2"
# Below this the four prompts of different lengths and a completion do not fit.
MIN_CONTEXT = 16
# 256 bytes and the end-of-text token.
MIN_VOCAB = 257


class UsageError(Exception):
    """A request that cannot be fulfilled; the text is one sentence for the user."""


@dataclass
class Options:
    """The demo's flags with every default filled in."""

    model: str
    steps: int
    layers: int
    dim: int
    heads: int
    context: int
    batch: int
    vocab: int
    device: torch.device
    dtype: str
    compile: bool
    seed: int
    out: Path
    text: list[Path]
    checkpoint: Path | None
    steps_given: bool
    context_given: bool

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON-able data."""
        values = asdict(self)
        for name in ("steps_given", "context_given"):
            del values[name]
        values["device"] = str(self.device)
        values["out"] = str(self.out)
        values["text"] = [str(path) for path in self.text]
        values["checkpoint"] = None if self.checkpoint is None else str(self.checkpoint)
        return values


def _at_least(low: int, high: int = 2**31 - 1):
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {low} to {high}, but got {text!r}"
            )
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the demo's flags to a parser."""
    cpu, gpu = CPU_DEFAULTS, GPU_DEFAULTS
    parser.add_argument("--model", choices=list(KINDS), help=f"{TITLES} (default: {_MODEL})")

    def size(flag: str, low: int, what: str) -> None:
        name = flag.removeprefix("--")
        text = f"{what} (default: {cpu[name]} on a CPU, {gpu[name]} on a GPU)"
        parser.add_argument(flag, type=_at_least(low), metavar="N", help=text)

    size("--steps", 1, "training steps")
    size("--layers", 1, "transformer blocks")
    size("--dim", 1, "width of the model")
    size("--heads", 1, "attention heads; divides --dim")
    size("--context", MIN_CONTEXT, "tokens in a sequence")
    size("--batch", 1, "sequences in a batch")
    size("--vocab", MIN_VOCAB, "size of the tokenizer that is trained on the text")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU where there is one)")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="float32, or bfloat16 = autocast over float32 weights "
        "(default: float32 on a CPU, bfloat16 on a GPU)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="train both models through torch.compile"
    )
    parser.add_argument(
        "--seed", type=_at_least(0, 2**63 - 1), default=0, metavar="N", help="default: 0"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="where demo.json and demo.png go (default: demo-out)",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="UTF-8 text to train on (default: the sources of Python's standard library)",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help=f"a local Hugging Face directory ({TITLES}) to start from, instead of random weights",
    )


def resolve(args: argparse.Namespace) -> Options:
    """Fills in the defaults of the device and refuses flags that can't work.

    Raises:
        UsageError: The flags contradict each other or the machine.
    """
    device = parse_device(args.device)
    defaults = CPU_DEFAULTS if device.type == "cpu" else GPU_DEFAULTS
    values = {
        name: defaults[name] if getattr(args, name) is None else getattr(args, name)
        for name in defaults
    }
    values["dtype"] = DTYPES[values["dtype"]]
    if args.checkpoint is not None:
        for name in ("model", "layers", "dim", "heads"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name} can't be given with --checkpoint, which fixes the model"
                )
    elif values["dim"] % values["heads"]:
        raise UsageError(
            f"--dim must be a multiple of --heads, but got --dim {values['dim']} "
            f"and --heads {values['heads']}"
        )
    elif KINDS[args.model or _MODEL].rotary and values["dim"] // values["heads"] % 2:
        raise UsageError(
            f"--dim must be an even multiple of --heads with --model {args.model}, which rotates "
            f"pairs, but got --dim {values['dim']} and --heads {values['heads']}"
        )
    if args.compile and cpp_compiler() is None:
        raise UsageError("--compile needs a C++ compiler, but none was found")
    check_writable(args.out)
    return Options(
        **values,
        model=args.model or _MODEL,
        device=device,
        compile=args.compile,
        seed=args.seed,
        out=args.out,
        text=args.text,
        checkpoint=args.checkpoint,
        steps_given=args.steps is not None,
        context_given=args.context is not None,
    )


def parse_device(text: str | None) -> torch.device:
    """The device that --device names; by default a GPU if there is one.

    Raises:
        UsageError: There is no such device.
    """
    import torch

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, but got {text!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise UsageError(f"--device {text} needs a GPU, but torch finds none; use --device cpu")
        if (device.index or 0) >= count:
            raise UsageError(f"--device {text} is not there; torch finds {count} GPUs, from cuda:0")
    return device


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would use, or None."""
    given = os.environ.get("CXX", "").split()
    candidates = given[:1] or ["g++", "clang++", "c++"]
    return next((name for name in candidates if shutil.which(name)), None)


def check_writable(out: Path) -> None:
    """Refuses an output directory that can't be written, and leaves no trace of the test."""
    try:
        if out.exists() and not out.is_dir():
            raise UsageError(f"--out must be a directory, but {out} is a file")
        parent = out
        while not parent.exists():
            parent = parent.parent
        # A real file and not os.access, which is wrong for root and on read-only mounts.
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(f"--out {out} can't be written: {reason}") from None
