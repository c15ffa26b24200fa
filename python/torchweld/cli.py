"""The `torchweld` command."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from torchweld._start import interruptible

_MOST_SIZE = 2**62 - 1  # twice as much overflows int64, in which torch counts
# What writing to stdout meets: a full disk, a reader that has gone, a closed file.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_LINEAR = ("M", "K", "N")
_ATTENTION = ("batch", "nheads", "seqlen_q", "seqlen_k", "head_dim")
# What the numbers of --shape mean; other ops take the shape of their tensors as it is.
_SHAPES = {
    "linear": _LINEAR,
    "linear_backward": _LINEAR,
    "layer_norm_linear": _LINEAR,
    "rms_norm_linear": _LINEAR,
    "fold_layer_norm": ("N", "K"),
    "folded_layer_norm_linear": _LINEAR,
    "gated_linear": _LINEAR,
    "int4_linear": _LINEAR,
    "bmm": ("batch", "M", "K", "N"),
    "outer_add": ("rows", "cols"),
    "outer_mul_relu": ("rows", "cols"),
    "mul_relu": ("rows", "cols"),
    "scalar_attention": ("n",),
    "softmax_matmul": ("batch", "nheads", "seqlen_q", "seqlen_k", "head_dim_v"),
    "attention": _ATTENTION,
    "attention_backward": _ATTENTION,
    "conv2d": ("batch", "H", "W", "KH", "KW"),
}
_ROWS = (
    "softmax",
    "softmax_backward",
    "causal_softmax",
    "causal_softmax_backward",
    "row_sum",
    "add_scalar",
)


class Parser(argparse.ArgumentParser):
    """argparse with one sentence, and no usage block, for a bad flag."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise argparse.ArgumentTypeError(f"must be sizes such as 1024,768,3072, but got {text!r}")
    if any(size > _MOST_SIZE for size in shape):
        raise argparse.ArgumentTypeError(f"must be sizes below 2**62, but got {text!r}")
    return shape


def sizes_by_op() -> str:
    """What the numbers of --shape mean, op by op."""
    named: dict[str, list[str]] = {}
    for op, names in _SHAPES.items():
        named.setdefault(",".join(names), []).append(op)
    lines = [f"  {shape:<43} {', '.join(ops)}" for shape, ops in named.items()]
    lines.append(f"  {'the shape of x or scores':<43} {', '.join(_ROWS)}")
    return "sizes by op:\n" + "\n".join(lines)


def add_sizes(command: argparse.ArgumentParser, required: bool = True) -> None:
    """--shape and --dtype, which say what tensors an op is given."""
    command.add_argument(
        "--shape",
        type=_shape,
        required=required,
        metavar="SIZES",
        help="sizes with commas, see below",
    )
    command.add_argument("--dtype", choices=_DTYPES, default="float32", help="default: float32")


def _parser() -> Parser:
    from torchweld import __version__
    from torchweld.demo import options
    from torchweld.distributed import planning
    from torchweld.puzzles import main as puzzles
    from torchweld.tuning import main as tuning

    parser = Parser(prog="torchweld", description="Fused transformer kernels for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torchweld {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    info = commands.add_parser("info", help="what is installed, and which op runs where")
    info.add_argument("--json", action="store_true", help="as JSON")

    def add_call(name: str, help: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=help,
            epilog=sizes_by_op(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("op", metavar="OP", help=f"an op, for example {example}")
        add_sizes(command)
        return command

    explain = add_call("explain", "which kernel a call takes, and why", "softmax")
    explain.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="default: cuda; none is needed"
    )
    explain.add_argument("--json", action="store_true", help="as JSON")

    tune = add_call("tune", "every configuration of a call timed, as a table", "gated_linear")
    tuning.add_arguments(tune)

    commands.add_parser("bench", help="time a family of ops, or one call of an op, against peers")

    demo = commands.add_parser(
        "demo", help="train a GPT-2 on real text, with torchweld's ops and without"
    )
    options.add_arguments(demo)

    plan = commands.add_parser(
        "plan", help="how to divide GPUs over a model's training: memory, bytes moved, a prediction"
    )
    planning.add_arguments(plan)

    puzzle = commands.add_parser("puzzles", help="the twelve Triton puzzles, solved by the ops")
    puzzles.add_arguments(puzzle)
    return parser


def _print(value: Any, as_json: bool) -> None:
    print(json.dumps(value.to_dict(), indent=2) if as_json else value)


def tensors(
    op: str, shape: tuple[int, ...], dtype: Any, device: str, group: int | None = None
) -> tuple[Any, ...]:
    """The op's tensors for sizes that were typed; nothing is allocated.

    Raises:
        ValueError: The op takes other sizes, or is not known here.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if op in _SHAPES:
        names = _SHAPES[op]
        if len(shape) != len(names):
            raise ValueError(
                f"--shape of {op} must be {','.join(names)}, but got {len(shape)} sizes"
            )
    elif op in _ROWS:
        if len(shape) < (2 if op.startswith("causal") else 1):
            raise ValueError(f"--shape of {op} must be seqlen_q,seqlen_k, but got 1 size")
    else:
        known = ", ".join(sorted([*_SHAPES, *_ROWS]))
        raise ValueError(f"OP must be one of {known}, but got {op!r}")

    def make(*sizes: int, dtype: Any = dtype) -> Any:
        if device == "cuda":
            return torch.empty(sizes, dtype=dtype, device="meta")
        with FakeTensorMode():
            return torch.empty(sizes, dtype=dtype)

    if op in _ROWS:
        return (make(*shape), make(*shape)) if op.endswith("backward") else (make(*shape),)
    if op == "softmax_matmul":
        batch, heads, rows, keys, width = shape
        return make(batch, heads, rows, keys), make(batch, heads, keys, width)
    if op.startswith("attention"):
        batch, heads, rows, keys, width = shape
        query, key = make(batch, heads, rows, width), make(batch, heads, keys, width)
        if op == "attention":
            return query, key, key
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return query, query, key, key, query, make(batch, heads, rows, dtype=wide)
    if op == "conv2d":
        return make(*shape[:3]), make(*shape[3:])
    if op == "bmm":
        batch, m, k, n = shape
        return make(batch, m, k), make(batch, k, n)
    if op == "fold_layer_norm":
        return (make(*shape),)
    if op == "scalar_attention":
        return make(*shape), make(*shape), make(*shape)
    if op in ("outer_add", "outer_mul_relu", "mul_relu"):
        rows, cols = shape
        return make(*shape) if op == "mul_relu" else make(cols), make(rows)
    m, k, n = shape
    if op == "int4_linear":
        group = (128 if k % 128 == 0 else max(k, 1)) if group is None else group
        if group < 8 or group % 8 or k % group:
            raise ValueError(
                f"the group must be a multiple of 8 that divides K = {k}, but got {group}"
            )
        groups = k // group
        zero = make(n, -(-groups // 8), dtype=torch.int32)
        return make(m, k), make(n, k // 8, dtype=torch.int32), make(n, groups), zero
    if op == "linear_backward":
        return make(m, n), make(m, k), make(n, k)
    if op == "gated_linear":
        return make(m, k), make(2 * n, k)
    if op == "folded_layer_norm_linear":
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return make(m, k), make(n, k), make(n, dtype=wide)
    return make(m, k), make(n, k)


def _info(args: argparse.Namespace) -> int:
    import torchweld

    _print(torchweld.info(), args.json)
    return 0


def _explain(args: argparse.Namespace) -> int:
    import torch

    import torchweld

    try:
        shapes = tensors(args.op, args.shape, getattr(torch, args.dtype), args.device)
    except (ValueError, RuntimeError) as error:
        return _fail("explain", str(error).splitlines()[0], 2)
    try:
        others = (1.5,) if args.op == "add_scalar" else ()
        explanation = torchweld.explain(args.op, *shapes, *others)
    except (ValueError, RuntimeError, ImportError) as error:
        return _fail("explain", str(error), 1)
    _print(explanation, args.json)
    return 0


def _tune(args: argparse.Namespace) -> int:
    import torch

    from torchweld._library import unavailable_reason
    from torchweld.tuning.main import keywords, run

    if reason := unavailable_reason():
        return _fail("tune", reason, 1)
    try:
        shapes = tensors(args.op, args.shape, getattr(torch, args.dtype), "cuda", args.group)
        kwargs = keywords(args)
    except (ValueError, RuntimeError) as error:
        return _fail("tune", str(error).splitlines()[0], 2)
    try:
        return run(args, shapes, kwargs)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        return _fail("tune", (str(error).splitlines() or [type(error).__name__])[0], 1)


def _bench(argv: Sequence[str]) -> int:
    try:
        from torchweld.bench import main as bench
    except ImportError as error:
        return _fail("bench", f"the benchmarks can't be loaded: {error}", 1)
    return bench(list(argv)) or 0


def _demo(args: argparse.Namespace) -> int:
    from torchweld.demo.main import run

    return run(args)


def _plan(args: argparse.Namespace) -> int:
    from torchweld.distributed.planning import plan

    try:
        print(plan(args))
    except ValueError as error:
        return _fail("plan", str(error), 2)
    return 0


def _puzzles(args: argparse.Namespace) -> int:
    from torchweld.puzzles.main import run

    return run(args)


def _fail(command: str, sentence: str, code: int) -> int:
    print(f"torchweld {command}: {sentence}", file=sys.stderr)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; `sys.argv` by default.

    Returns:
        Exit status: 0, 1 for a failure, 2 for bad arguments, 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if getattr(sys.stdout, "errors", None) == "strict":
        # What the terminal's encoding lacks is printed as ?, and ends no command.
        sys.stdout.reconfigure(errors="replace")
    try:
        interruptible()
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # An error of a file has its name; commands say those themselves.
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        _drop_output()
        if error.errno == errno.EPIPE:  # `torchweld info | head -1`
            return 1
        print(f"torchweld: the output can't be written: {error.strerror}", file=sys.stderr)
        return 1


def _run(argv: list[str]) -> int:
    if argv[:1] == ["bench"]:  # it has its own flags, and its own --help
        return _bench(argv[1:])
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    run = {
        "info": _info,
        "explain": _explain,
        "tune": _tune,
        "demo": _demo,
        "plan": _plan,
        "puzzles": _puzzles,
    }
    return run[args.command](args)


def _drop_output() -> None:
    """What stdout still holds must not fail the end of the process again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
