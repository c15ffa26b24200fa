"""Runs compute-sanitizer over sample calls of every op: memcheck, racecheck, initcheck, synccheck.
And runs the calls between canaries, because memcheck does not see the stores of TMA.

    python benchmarks/sanitize.py [--tools memcheck,racecheck] [--ops attention,linear]

Exits 1 if a tool reports anything. The calls are the samples of tests/samples.py in every dtype,
calls of odd sizes, and 16-bit attention over several tiles. Racecheck runs the samples alone,
because it reports TMA pipelines as races. Between canaries, every call runs in every configuration
that supports it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck", "canaries")


def odd_calls() -> dict[str, list]:
    """Builders of calls whose rows have odd sizes, so that a store of 16 bytes is too long."""
    import samples as S

    layers = [((1,), 9, 512), ((1,), 1001, 256), ((3,), 7, 72), ((17,), 100, 1024)]
    heads = [(1, 1, 1, 1, 65, 64, 33), (1, 3, 1, 17, 130, 40, 72), (1, 2, 2, 129, 257, 128, 121)]
    mask = (True, True, True)
    both = (True, True)
    return {
        "linear": [S.layer_call(*sizes, activation="gelu") for sizes in layers],
        "linear_forward": [S.layer_call(*sizes, activation="gelu") for sizes in layers],
        "linear_backward": [
            S.layer_backward_call("linear", S.layer_call(*sizes, activation="gelu"), mask)
            for sizes in layers
        ],
        "rms_norm_linear": [S.layer_call(*sizes, True) for sizes in layers],
        "layer_norm_linear_forward": [S.layer_call(*sizes, True, True) for sizes in layers],
        "gated_linear_forward": [
            S.layer_call(lead, 2 * n, k, gate="geglu", interleaved=interleaved)
            for lead, n, k in layers
            for interleaved in both
        ],
        "gated_linear_backward": [
            S.gated_backward_call(*sizes, mask, gate="geglu", interleaved=False) for sizes in layers
        ],
        "gated_linear_pair_forward": [S.pair_call(*sizes, gate="swiglu") for sizes in layers],
        "gated_linear_pair_backward": [
            S.pair_call(*sizes, mask=(True,) * 5, gate="swiglu") for sizes in layers
        ],
        "bmm": [
            S.bmm_call((3, 3), m, n, k) for m, n, k in ((1, 9, 72), (17, 33, 129), (65, 7, 256))
        ],
        "int4_linear": [S.int4_call((m,), n, 256, 2) for m in (1, 3, 17, 129) for n in (9, 1001)],
        "attention_forward": [S.attention_call(*sizes) for sizes in heads],
        "attention_backward": [
            S.with_saved(S.attention_call(*sizes), 3, S.R.attention_forward) for sizes in heads
        ],
        "softmax_matmul": [S.softmax_matmul_call(1, 3, 17, 130, n) for n in (1, 33, 121)],
        "softmax": [S.softmax_call(1, n) for n in (1, 1001, 40003)],
        "causal_softmax": [S.causal_call((1, 1, n, n)) for n in (1, 129, 1001)],
        "rms_norm_forward": [S.norm_call("rms_norm", (3,), n, True) for n in (1, 1001)],
        "add_layer_norm": [S.norm_call("add_layer_norm", (3,), n, True, True) for n in (1, 1001)],
        "cross_entropy_forward": [S.logits_call((3,), n, reduction="none") for n in (1, 40003)],
        "linear_cross_entropy": [S.loss_call((3,), 1001, 64), S.loss_call((1,), 257, 72)],
        "linear_token_logprobs": [S.loss_call((3,), 1001, 64, entropy=True)],
    }


def sample_calls(only: list[str], small: bool) -> list[tuple]:
    """The sample and dtype of each call; with `small`, only the samples of tests/samples.py."""
    sys.path.insert(0, str(ROOT / "tests"))
    import reference as R
    import samples as S

    # (batch, heads, kv heads, rows, keys, head dims). In the second to fourth shape a kv head has
    # several query heads.
    shapes = (
        S.attention_call(2, 2, 2, 150, 300, 64, 64, pads=(0, 70), causal=True),
        S.attention_call(1, 8, 2, 300, 300, 128, 128, causal=True),
        S.attention_call(1, 2, 1, 200, 200, 128, 128),
        S.attention_call(1, 2, 1, 130, 140, 192, 128, causal=True),
        S.attention_call(1, 1, 1, 140, 130, 256, 256, softcap=20.0),
        S.attention_call(2, 2, 1, 150, 300, 64, 64, bias=(1, 2, 150), causal=True),
        S.attention_call(1, 2, 2, 200, 203, 128, 128, bias=(1, 2, 1)),
        S.attention_call(2, 2, 1, 150, 300, 64, 64, alibi=True),
        S.attention_call(1, 2, 2, 200, 203, 128, 128, alibi=True, causal=True),
    )
    large = {
        "attention": shapes,
        "attention_backward": [S.with_saved(shape, 3, R.attention_forward) for shape in shapes],
    }
    odd, calls = odd_calls(), []
    for op, samples in S.SAMPLES.items():
        if only and op not in only:
            continue
        calls += [(sample, dtype) for sample in samples for dtype in S.dtypes("cuda")]
        if small:
            continue
        calls += [
            (S.Sample(op, f"odd_{i}", build), dtype)
            for i, build in enumerate(odd.get(op, ()))
            for dtype in S.dtypes("cuda")
        ]
        for i, build in enumerate(large.get(op, ())):
            calls += [(S.Sample(op, f"large_{i}", build), dtype) for dtype in (S.BF16, S.F16)]
    return calls


def run_calls(only: list[str], small: bool) -> None:
    """Runs every sample call on the GPU, under compute-sanitizer."""
    calls = sample_calls(only, small)
    import torch

    from samples import call

    for sample, dtype in calls:
        args, kwargs = sample.make("cuda", dtype)
        call(sample.op)(*args, **kwargs)
    torch.cuda.synchronize()
    print(f"{len(calls)} calls")


def run_between_canaries(only: list[str]) -> int:
    """Runs every call in each of its configurations; returns how many damaged a canary."""
    import ctypes
    import tempfile

    calls = sample_calls(only, small=False)
    import torch
    from torch.cuda.memory import CUDAPluggableAllocator, change_current_allocator

    with tempfile.TemporaryDirectory() as folder:
        library = str(Path(folder) / "canaries.so")
        source = str(Path(__file__).with_name("canaries.cpp"))
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        subprocess.run([nvcc, "-shared", "-Xcompiler", "-fPIC", source, "-o", library], check=True)
        change_current_allocator(CUDAPluggableAllocator(library, "canary_alloc", "canary_free"))
        damaged = ctypes.CDLL(library).canaries_damaged
    from samples import call
    from torchweld import _C
    from torchweld.explain import _dry_run

    ops, ran, faults = torch.ops.torchweld, 0, 0
    for sample, dtype in calls:
        args, kwargs = sample.make("cuda", dtype)
        records = _dry_run(sample.op, args, kwargs, 0)
        # The default configurations, then each launch's other legal ones, one at a time.
        forced = [("", [], "")] + [
            (r["family"], list(r["problem"]), c["choice"])
            for r in records
            if r["family"]
            for c in _C.candidates(r["family"], list(r["problem"]))
            if not c["refusal"] and c["choice"] != r["choice"]
        ]
        for family, problem, choice in forced:
            if family:
                ops._force_choice(family, problem, choice)
            call(sample.op)(*args, **kwargs)
            if family:
                ops._force_choice(family, problem, "")
            ran += 1
            if damaged():
                faults += 1
                print(f"at {sample.id} {dtype} {choice}: a store outside of a tensor")
    print(f"{ran} calls, {faults} stored outside of a tensor")
    return faults


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: all five")
    parser.add_argument("--ops", default="", help="default: every op")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--canaries", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    only = [op for op in args.ops.split(",") if op]
    if args.calls:
        run_calls(only, args.small)
        return 0
    if args.canaries:
        return 9 if run_between_canaries(only) else 0
    if shutil.which("compute-sanitizer") is None:
        print("sanitize: compute-sanitizer was not found; it comes with CUDA", file=sys.stderr)
        return 2
    # Every tensor gets its own allocation, so that an access outside of it is found.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    reports = 0
    for tool in args.tools.split(","):
        start = time.monotonic()
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
        flag = "--calls"
        if tool == "canaries":
            command, flag = [sys.executable], "--canaries"
        # racecheck gets no large calls: it misses that a stage is released after the warp's reads.
        small = ["--small"] if tool == "racecheck" else []
        done = subprocess.run(
            [*command, __file__, flag, "--ops", args.ops, *small],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = done.stdout.strip().splitlines()
        if done.returncode or any("SUMMARY" in line and " 0 " not in line for line in lines):
            reports += 1
            reports = [line for line in lines if "at " in line and "Host Frame" not in line]
            print("\n".join(list(dict.fromkeys(reports))[:30]))
        seconds = time.monotonic() - start
        print(f"{tool}: {lines[-1] if lines else 'no output'} ({seconds:.0f} s)", flush=True)
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
