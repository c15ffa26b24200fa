"""The `torchweld` command: info, explain, tune.

Importing this module imports neither torch nor the package: `torchweld --help` answers at once, and
Ctrl-C during the import of torch ends the command without a traceback.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

_MAX_SIZE = 2**62 - 1  # twice this size overflows torch's int64
# The errors of writing to stdout: the disk is full, the reader of the pipe is gone, or the file is
# closed.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE, errno.EBADF)
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_MKN, _QUERY, _KEY = "M,K,N", "batch,nheads,seqlen_q,head_dim", "batch,nheads,seqlen_k,head_dim"
_ATTENTION = "batch,nheads,seqlen_q,seqlen_k,head_dim"
# For each op: the names of the numbers in --shape, and the sizes of its tensors. "..." are any
# number of dims, [] is a list. After a colon: a dtype, "wide" for that of sums.
_CALLS = {
    **dict.fromkeys(
        ("softmax", "row_sum", "add_scalar", "rms_norm", "layer_norm"), ("...,n", "...,n")
    ),
    **dict.fromkeys(
        (
            "softmax_backward",
            "gated_activation",
            "add_rms_norm",
            "add_layer_norm",
            "rms_norm_gated",
        ),
        ("...,n", "...,n ...,n"),
    ),
    "causal_softmax": ("...,seqlen_q,seqlen_k", "...,seqlen_q,seqlen_k"),
    "causal_softmax_backward": (
        "...,seqlen_q,seqlen_k",
        "...,seqlen_q,seqlen_k ...,seqlen_q,seqlen_k",
    ),
    "cross_entropy": ("...,N", "...,N ...:int64"),
    **dict.fromkeys(("linear", "layer_norm_linear", "rms_norm_linear"), (_MKN, "M,K N,K")),
    **dict.fromkeys(("layer_norm_linears", "rms_norm_linears"), (_MKN, "M,K [N,K] []")),
    "linear_backward": (_MKN, "M,N M,K N,K"),
    "folded_layer_norm_linear": (_MKN, "M,K N,K N:wide"),
    "gated_linear": (_MKN, "M,K N+N,K"),
    "gated_linear_pair": (_MKN, "M,K N,K N,K"),
    "gated_mlp": (_MKN, "M,K N,K N,K K,N"),
    "experts": ("T,H,I,E,k", "T,H E,I+I,H E,H,I T,k:int64 T,k"),
    "grouped_linear": ("R,K,N,E", "R,K E,N,K E:int64"),
    "grouped_gated_linear": ("R,K,N,E", "R,K E,N+N,K E:int64"),
    "int4_linear": (_MKN, "M,K N,words:int32 N,groups N,words_of_zeros:int32"),
    **dict.fromkeys(("linear_cross_entropy", "linear_token_logprobs"), (_MKN, "M,K N,K M:int64")),
    "fold_layer_norm": ("N,K", "N,K"),
    "bmm": ("batch,M,K,N", "batch,M,K batch,K,N"),
    **dict.fromkeys(("outer_add", "outer_mul_relu"), ("rows,cols", "cols rows")),
    "mul_relu": ("rows,cols", "rows,cols rows"),
    "scalar_attention": ("n", "n n n"),
    "softmax_matmul": (
        "batch,nheads,seqlen_q,seqlen_k,head_dim_v",
        "batch,nheads,seqlen_q,seqlen_k batch,nheads,seqlen_k,head_dim_v",
    ),
    **dict.fromkeys(("attention", "attention_with_lse"), (_ATTENTION, f"{_QUERY} {_KEY} {_KEY}")),
    "attention_backward": (
        _ATTENTION,
        f"{_QUERY} {_QUERY} {_KEY} {_KEY} {_QUERY} batch,nheads,seqlen_q:wide",
    ),
    "rotary": (
        "batch,nheads,seqlen,head_dim",
        "batch,nheads,seqlen,head_dim " * 2 + "seqlen,head_dim " * 2,
    ),
    "causal_conv1d": (
        "batch,channels,seqlen",
        "batch,channels,seqlen channels,4 channels",
    ),
    "conv2d": ("batch,H,W,KH,KW", "batch,H,W KH,KW"),
}


class Parser(argparse.ArgumentParser):
    """argparse with one sentence, and no usage block, for a bad flag."""

    def error(self, message: str) -> NoReturn:
        lists = message.startswith(("the following arguments", "unrecognized arguments"))
        self.exit(2, f"{self.prog}: {message}{'; --help lists them' if lists else ''}\n")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = (-1,)
    if any(size < 0 for size in shape):
        raise argparse.ArgumentTypeError(f"must be sizes such as 1024,768,3072, but got {text!r}")
    if any(size > _MAX_SIZE for size in shape):
        raise argparse.ArgumentTypeError(f"must be sizes below 2**62, but got {text!r}")
    return shape


def sizes_by_op() -> str:
    """Returns the help text for --shape: the meaning of its numbers for each op."""
    named: dict[str, list[str]] = {}
    for op, (names, _) in _CALLS.items():
        named.setdefault(names, []).append(op)
    lines = [f"  {names:<43} {', '.join(ops)}" for names, ops in named.items()]
    return "sizes by op:\n" + "\n".join(lines)


def add_sizes(command: argparse.ArgumentParser) -> None:
    """--shape and --dtype, which say what tensors an op is given."""
    command.add_argument(
        "--shape", type=_shape, metavar="SIZES", help="sizes with commas, see below"
    )
    command.add_argument("--dtype", choices=_DTYPES, default="float32", help="default: float32")


def _rounds(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, but got {text!r}")
    return int(text)


def _add_tune_flags(tune: argparse.ArgumentParser) -> None:
    add = tune.add_argument
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    add("--gate", help="of gated_linear, for example sigmoid_tanh")
    add("--activation", help="of the linear ops, for example gelu_tanh")
    add("--interleaved", action="store_true", default=None, help="of gated_linear")
    add("--causal", action="store_true", default=None, help="of attention")
    add("--group", type=int, help="of int4_linear; default: 128, or K")
    add("--rounds", type=_rounds, default=15, help="timed calls of each; default: 15")
    add("--remember", action="store_true", help="use the fastest from now on, in every process")
    add("--save", type=Path, metavar="FILE.json", help="write the table as JSON")
    add("--plot", type=Path, metavar="FILE.png", help="draw the table")
    add("--json", action="store_true", help="print the table as JSON")


def _version() -> str:
    """The package's version, read from its source because importing it imports torch."""
    source = Path(find_spec("torchweld").origin).read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+?)"', source, re.M)[1]


def _parser() -> Parser:
    parser = Parser(prog="torchweld", description="Fused transformer kernels for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torchweld {_version()}")
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
        "--device", choices=("cpu", "cuda"), default="cuda", help="default: cuda; no GPU is needed"
    )
    explain.add_argument("--json", action="store_true", help="as JSON")

    tune = add_call("tune", "time every configuration of a call", "gated_linear")
    _add_tune_flags(tune)
    return parser


def _print(value: Any, as_json: bool) -> None:
    print(json.dumps(value.to_dict(), indent=2) if as_json else value)


def tensors(
    op: str, shape: tuple[int, ...] | None, dtype: Any, device: str, group: int | None = None
) -> tuple[Any, ...]:
    """The op's tensors for sizes that were typed; nothing is allocated.

    Raises:
        ValueError: The op takes other sizes, or is not known here.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from torchweld._refusals import unknown_op

    if op not in _CALLS:
        raise ValueError(unknown_op("OP", op, sorted(_CALLS)))
    expected, call = _CALLS[op]
    names = expected.removeprefix("...,").split(",")
    shape = shape or ()
    leading = shape[: -len(names)] if expected.startswith("...") else ()
    if len(shape) != len(leading) + len(names):
        raise ValueError(f"--shape of {op} must be {expected}, but got {len(shape)} sizes")
    sizes = dict(zip(names, shape[len(leading) :], strict=True))
    if op == "int4_linear":
        sizes |= _int4_sizes(sizes["K"], group)

    def make(text: str) -> Any:
        if text.startswith("["):  # three layers, as those of query, key and value
            return [make(text[1:-1]) for _ in range(3)] if text != "[]" else []
        dims, _, kind = text.partition(":")
        dtypes = {"": dtype, "wide": torch.promote_types(dtype, torch.float32)}
        whole: list[int] = []
        for dim in dims.split(","):
            if dim.isdigit():
                whole.append(int(dim))
                continue
            whole += leading if dim == "..." else [sum(sizes[name] for name in dim.split("+"))]
        kwargs = {"dtype": dtypes[kind] if kind in dtypes else getattr(torch, kind)}
        if device == "cuda":
            return torch.empty(whole, device="meta", **kwargs)
        with FakeTensorMode():
            return torch.empty(whole, **kwargs)

    return tuple(map(make, call.split()))


def _int4_sizes(k: int, group: int | None) -> dict[str, int]:
    """The sizes of a 4-bit weight's tensors beside N."""
    group = (128 if k % 128 == 0 else max(k, 1)) if group is None else group
    if group < 8 or group % 8 or k % group:
        raise ValueError(f"the group must be a multiple of 8 that divides K = {k}, but got {group}")
    groups = k // group
    return {"words": k // 8, "groups": groups, "words_of_zeros": -(-groups // 8)}


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
    return guarded("torchweld", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    return {"info": _info, "explain": _explain, "tune": _tune}[args.command](args)


def guarded(program: str, command: Callable[[], int]) -> int:
    """Runs a command and returns its exit status.

    The status is 130 after Ctrl-C, and 1 with one sentence where stdout can't be written.
    """
    if getattr(sys.stdout, "errors", None) == "strict":
        # Characters that the terminal's encoding lacks are printed as ? instead of failing.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # An error with a file name does not come from stdout. The commands report such errors
        # themselves.
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            raise
        _drop_output()
        # the reader of the pipe is gone, as in `torchweld info | head -1`
        if error.errno == errno.EPIPE:
            return 1
        print(f"{program}: the output can't be written: {error.strerror}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Keeps the rest of stdout's buffer from failing again when the process ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
