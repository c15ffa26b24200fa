"""`make plan`: memory, bytes moved and the share of communication of a layout, as a model.

Nothing is measured here. The cost of a step follows from the sizes of the model and four numbers of
the machine, which have default values:

    compute        (6 x parameters + attention) x tokens, 8 for 6 where activations are recomputed
    FSDP2          the parameters are gathered twice in bfloat16, the gradients reduce-scattered
                   once in float32, for each pass; it overlaps with the compute
    tensor         four all-reduces of the tokens' hidden states a layer
    context        keys and values are gathered, their gradients reduce-scattered
    a collective   (n - 1) / n of the bytes through each GPU's link, twice that for an all-reduce,
                   and n - 1 latencies; between hosts, the members in one share their networks

Source: Rajbhandari et al., "ZeRO", 2020; Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torchweld_cli import Parser, guarded


@dataclass(frozen=True)
class Sizes:
    """A decoder's sizes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    positions: int = 0  # the number of learned position embeddings
    biases: bool = False

    @property
    def layer_parameters(self) -> int:
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden * (2 * wide + 2 * narrow + (3 if self.gated else 2) * self.ffn)
        biases = wide + 2 * narrow + 2 * self.hidden + self.ffn if self.biases else 0
        return matrices + biases + (4 if self.biases else 2) * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.vocab * (1 if self.tied else 2) + self.positions
        last = (2 if self.biases else 1) * self.hidden
        return self.layers * self.layer_parameters + tables * self.hidden + last


MODELS = {
    "gpt2": Sizes(12, 768, 12, 12, 64, 3072, False, 50257, True, 1024, True),
    "gpt2-xl": Sizes(48, 1600, 25, 25, 64, 6400, False, 50257, True, 1024, True),
    "llama-3.1-8b": Sizes(32, 4096, 32, 8, 128, 14336, True, 128256, False),
    "llama-3.1-70b": Sizes(80, 8192, 64, 8, 128, 28672, True, 128256, False),
    "llama-3.1-405b": Sizes(126, 16384, 128, 8, 128, 53248, True, 128256, False),
}


def read_sizes(name: str) -> Sizes:
    """The sizes of a model, by a name in MODELS or from a config.json like GPT-2's or Llama's.

    Raises:
        ValueError: there is neither, or the config is of another kind.
    """
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(
            f"--model must be one of {', '.join(MODELS)} or a config.json, but got {name!r}"
        ) from None
    kind = config.get("model_type")
    if kind == "gpt2":
        hidden, heads = config["n_embd"], config["n_head"]
        ffn = config.get("n_inner") or 4 * hidden
        positions = config["n_positions"]
        return Sizes(
            config["n_layer"],
            *(hidden, heads, heads, hidden // heads),
            *(ffn, False, config["vocab_size"], True, positions, True),
        )
    if kind not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ValueError(
            f"--model must be a gpt2, llama, mistral, qwen2 or qwen3, but got {kind!r}"
        )
    heads = config["num_attention_heads"]
    return Sizes(
        config["num_hidden_layers"],
        config["hidden_size"],
        heads,
        config.get("num_key_value_heads") or heads,
        config.get("head_dim") or config["hidden_size"] // heads,
        config["intermediate_size"],
        True,
        config["vocab_size"],
        bool(config.get("tie_word_embeddings", False)),
    )


@dataclass(frozen=True)
class Machine:
    """The speed of a GPU; bandwidths are bytes per second out of each GPU, one way."""

    memory: float = 80e9
    flops: float = 400e12  # FLOP/s that the bfloat16 matmuls of a whole training step reach
    link: float = 450e9  # bytes per second per GPU within a host
    network: float = 50e9  # bytes per second per GPU between hosts
    latency: float = 10e-6
    host: int = 8


@dataclass
class Layout:
    """A division of the GPUs, and its cost on each of them."""

    fsdp: int
    cp: int
    tp: int
    memory: dict[str, float]  # bytes of GPU memory by purpose
    moved: dict[str, float]  # bytes communicated per step, by kind of parallelism
    seconds: dict[str, float]  # seconds of the computation, and of each kind of communication
    tokens: float  # tokens per second per GPU

    @property
    def total(self) -> float:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        """Seconds of a step: FSDP2 overlaps with compute, the other communication does not."""
        times = self.seconds
        return max(times["compute"], times["fsdp"]) + times["tp"] + times["cp"]

    @property
    def share(self) -> float:
        return 1 - self.seconds["compute"] / self.step

    @property
    def share_without_overlap(self) -> float:
        return 1 - self.seconds["compute"] / sum(self.seconds.values())


def layout(
    sizes: Sizes,
    machine: Machine,
    fsdp: int,
    cp: int,
    tp: int,
    seqlen: int,
    batch: int,
    recompute: bool,
    micro_batch: int = 1,
) -> Layout:
    """Computes the cost of one layout.

    Args:
        sizes: the model's.
        machine: the GPU's.
        fsdp: processes with batches of their own.
        cp: processes that share a sequence's tokens.
        tp: processes that share the weights' work.
        seqlen: tokens of a sequence.
        batch: sequences of a step, all processes together.
        recompute: activations are recomputed, layer by layer.
        micro_batch: sequences of one pass through the model, in each process.

    Returns:
        Memory, bytes and seconds of one GPU.
    """
    shards, passes = fsdp * cp, batch / fsdp / micro_batch
    tokens = micro_batch * seqlen / cp  # tokens of this process that are processed at a time
    layer, whole = sizes.layer_parameters / tp, sizes.parameters / tp
    queries = sizes.heads * sizes.head_dim / tp
    keys = sizes.kv_heads * sizes.head_dim / tp
    # The fused ops save, per layer in bfloat16: x twice, q, k, v, out and the MLP's columns.
    columns = 2 * sizes.hidden + 2 * queries + 2 * keys
    columns += (3 if sizes.gated else 2) * sizes.ffn / tp
    kept = sizes.hidden * sizes.layers + columns if recompute else columns * sizes.layers
    memory = {
        "parameters": 4 * whole / shards,
        "gradients": 4 * whole / shards,
        "optimizer": 8 * whole / shards,
        # FSDP2 gathers the parameters of the current layer and of the next one, and keeps those
        # outside of layers gathered.
        "gathered": 2 * (2 * layer + whole - sizes.layers * layer) if shards > 1 else 0.0,
        "activations": 2 * tokens * kept,
        "gathered keys": 2 * 2 * cp * tokens * keys if cp > 1 else 0.0,
        "logits": 6 * tokens * sizes.vocab,  # logits in bfloat16, and in float32 for the loss
    }

    def sent(n: int, size: float) -> float:
        return (n - 1) / n * size

    # the number of passes over a layer: forward once or twice, and backward once
    passes_over_layer = 3 if recompute else 2
    hidden = 2 * tokens * sizes.hidden
    moved = {
        "fsdp": passes * sent(shards, whole * (2 * 2 + 4)),
        "tp": passes * sizes.layers * passes_over_layer * 2 * 2 * sent(tp, hidden),
        "cp": passes * sizes.layers * passes_over_layer * sent(cp, 2 * 2 * cp * tokens * keys),
    }
    calls = {"fsdp": 3, "tp": 2 * passes_over_layer, "cp": 2 * passes_over_layer}
    # Ranks are numbered by tensor, then context parallelism, then FSDP; `host` ranks share a host.
    ring = {"tp": tp, "cp": cp, "fsdp": shards}
    seconds = {}
    for name, size in moved.items():
        apart = 1 if name == "tp" else tp
        within = ring[name] * apart <= machine.host
        # the number of a group's members on one host; each has its own network link
        members = max(1, machine.host // apart)
        speed = machine.link if within else min(machine.link, members * machine.network)
        waits = passes * sizes.layers * calls[name] * (ring[name] - 1) * machine.latency
        seconds[name] = size / speed + waits
    attention = 2 * 6 * sizes.layers * queries * (seqlen / 2)  # a causal mask halves the FLOPs
    flops = (6 * whole + attention) * tokens * passes * (8 / 6 if recompute else 1)
    seconds = {"compute": flops / machine.flops, **seconds}
    found = Layout(fsdp, cp, tp, memory, moved, seconds, 0.0)
    found.tokens = batch * seqlen / found.step / (fsdp * cp * tp)
    return found


def layouts(
    sizes: Sizes,
    machine: Machine,
    gpus: int,
    seqlen: int,
    batch: int,
    recompute: bool,
    micro_batch: int = 1,
) -> list[Layout]:
    """All layouts that divide the GPUs evenly: those that fit in memory first, then by speed."""
    found = []
    for fsdp, cp, tp in _divisions(gpus):
        heads = sizes.kv_heads % tp == 0 and sizes.ffn % tp == 0
        whole = seqlen % (2 * cp) == 0 and batch % (fsdp * micro_batch) == 0
        if heads and tp <= machine.host and whole:
            step = (seqlen, batch, recompute, micro_batch)
            found.append(layout(sizes, machine, fsdp, cp, tp, *step))
    return sorted(found, key=lambda each: (each.total > machine.memory, -each.tokens))


def _divisions(gpus: int) -> Iterator[tuple[int, int, int]]:
    for tp in (n for n in range(1, gpus + 1) if gpus % n == 0):
        for cp in (n for n in range(1, gpus // tp + 1) if gpus // tp % n == 0):
            yield gpus // tp // cp, cp, tp


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the planner's flags."""
    defaults = Machine()
    names = ", ".join(MODELS)
    parser.add_argument("--model", required=True, help=f"{names}, or a config.json")
    parser.add_argument("--gpus", type=_count, required=True, help="how many, all hosts together")
    parser.add_argument("--seqlen", type=_count, default=8192, help="default: 8192")
    parser.add_argument("--batch", type=_count, help="sequences of a step; default: one pass a GPU")
    parser.add_argument(
        "--micro-batch", type=_count, default=1, help="sequences of a pass; default: 1"
    )
    for name in ("tp", "cp"):
        parser.add_argument(f"--{name}", type=_count, help="this many; all are tried by default")
    parser.add_argument("--no-recompute", action="store_true", help="activations are kept")
    for name, unit, value in (
        ("memory", "GB of a GPU", defaults.memory / 1e9),
        ("tflops", "bfloat16, reached in training", defaults.flops / 1e12),
        ("link", "GB/s of a GPU within a host, one way", defaults.link / 1e9),
        ("network", "GB/s of a GPU between hosts, one way", defaults.network / 1e9),
        ("latency", "microseconds of a step of a collective", defaults.latency * 1e6),
    ):
        parser.add_argument(f"--{name}", type=_number, help=f"{unit}; assumed: {value:g}")
    parser.add_argument("--per-host", type=_count, default=defaults.host, help="GPUs; default: 8")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {text!r}")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, but got {text!r}")
    return value


def plan(args: argparse.Namespace) -> str:
    """Answers a command line with text or JSON.

    Raises:
        ValueError: the model is not known, or no layout fits the sizes.
    """
    sizes = read_sizes(args.model)
    units = {"memory": 1e9, "tflops": 1e12, "link": 1e9, "network": 1e9, "latency": 1e-6}
    given = {name: getattr(args, name) for name in units}
    values = {
        "flops" if name == "tflops" else name: value * units[name]
        for name, value in given.items()
        if value is not None
    }
    machine = Machine(host=args.per_host, **values)
    batch = args.batch or args.gpus * args.micro_batch
    step = (args.seqlen, batch, not args.no_recompute, args.micro_batch)
    found = layouts(sizes, machine, args.gpus, *step)
    found = [x for x in found if args.tp in (None, x.tp) and args.cp in (None, x.cp)]
    if not found:
        raise ValueError(
            f"no layout of {args.gpus} GPUs divides {sizes.kv_heads} key heads, {args.seqlen} "
            f"tokens in pairs of chunks and {batch} sequences in passes of {args.micro_batch}; "
            "change --batch, --micro-batch or --seqlen"
        )
    if args.json:
        rows = [
            {**asdict(x), "step": x.step, "share": x.share, "fits": x.total <= machine.memory}
            for x in found
        ]
        return json.dumps({"machine": asdict(machine), "layouts": rows}, indent=2)
    return _text(args, sizes, machine, batch, found, [n for n, v in given.items() if v is None])


def _text(
    args: argparse.Namespace,
    sizes: Sizes,
    machine: Machine,
    batch: int,
    found: list[Layout],
    assumed: list[str],
) -> str:
    best = found[0]
    recompute = "kept" if args.no_recompute else "recomputed"
    lines = [
        f"{args.model}: {sizes.parameters / 1e9:.3f} billion parameters, {args.gpus} GPUs, "
        f"{batch} sequences of {args.seqlen} tokens, activations {recompute}",
        "",
        "  fsdp    cp    tp   GB a GPU   tokens/s/GPU   communication (without overlap)",
    ]
    for x in found[:8]:
        fits = "" if x.total <= machine.memory else "   does not fit"
        lines.append(
            f"{x.fsdp:6}{x.cp:6}{x.tp:6}{x.total / 1e9:11.1f}{x.tokens:15.0f}"
            f"{x.share:13.0%} ({x.share_without_overlap:.0%}){fits}"
        )
    lines += ["", f"fsdp {best.fsdp}, cp {best.cp}, tp {best.tp}, each GPU:"]
    lines += [f"  {size / 1e9:9.2f} GB  {name}" for name, size in best.memory.items() if size]
    for name, seconds in best.seconds.items():
        moved = best.moved.get(name)
        if moved is None or moved:
            sent = "" if moved is None else f", {moved / 1e9:.2f} GB sent"
            lines.append(f"  {seconds:9.3f} s a step  {name}{sent}")
    lines += [
        "",
        "A model, not a measurement: parameters, gradients and Adam in float32, bfloat16 compute; "
        "FSDP2 overlaps, tp and cp do not.",
    ]
    if assumed:
        names = ", ".join("--" + name for name in assumed)
        lines.append(f"Assumed, measure and give your own: {names}.")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan; returns 0, or 2 for bad arguments."""
    return guarded("plan", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="plan",
        description="How to divide GPUs over a model's training: memory, traffic, predicted time.",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        print(plan(args))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
