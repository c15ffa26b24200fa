"""Writes the parts of the documentation that are made from code, into docs/_generated.

ops.part.md       where each op runs, in which dtype, with which gradients; the ops are asked
versions.part.md  the versions of Python, torch and CUDA, and the GPUs
api_*.md          every public name, from its docstring
models.part.md    measured training steps of models
plan.part.md      what benchmarks/plan.py predicts up to 1,024 GPUs
kernel_*.part.md  measured cases for the pages of docs/kernels
commands.md       the help of the command line and of the tools of a checkout
benchmarks.md     benchmarks/results/README.md, its links set to this folder

Two tables take minutes. They are kept in docs/, and `python docs/generate.py` makes them anew:

parts.part.md     the parts of transformers' causal language models that fuse replaces
attention.part.md calls of transformers' models that do not run the attention op, found by running
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import torchweld
import torchweld_cli
from torchweld._library import build_facts

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path += [str(ROOT / folder) for folder in ("benchmarks", "examples")]

import demo.main  # noqa: E402
import plan  # noqa: E402
import puzzles.main  # noqa: E402
import torchweld_bench  # noqa: E402

OUT = DOCS / "_generated"
PARTS = DOCS / "parts.part.md"
ATTENTION = DOCS / "attention.part.md"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DEVICES = {"cpu": "CPU", "cuda": "CUDA"}
RESULTS = ROOT / "benchmarks" / "results"


def _of_tests(module: str) -> ModuleType:
    """A module of tests/."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    return importlib.import_module(module)


def _samples() -> ModuleType:
    """tests/samples.py, which has a call of every op."""
    return _of_tests("samples")


def served_dtypes(op: str, device: str) -> list[torch.dtype]:
    """The dtypes that an op accepts, found by calling it with its first sample.

    For "cuda", `torchweld.explain` answers without a GPU. A build without CUDA can't tell: with
    CUDA every op has kernels for the dtypes of the CPU but float64.
    """
    samples = _samples()
    if device == "cuda" and not build_facts().get("cuda"):
        return [dtype for dtype in served_dtypes(op, "cpu") if dtype != torch.float64]
    served = []
    for dtype in DTYPES:
        args, kwargs = samples.SAMPLES[op][0].make("cpu", dtype)
        try:
            if device == "cpu":
                samples.call(op)(*args, **kwargs)
            else:
                meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
                if torchweld.explain(op, *meta, **kwargs).kernel == "none":
                    continue
        except RuntimeError:
            continue
        served.append(dtype)
    return served


def _takes_floats(op: str) -> bool:
    args, _ = _samples().SAMPLES[op][0].make("cpu", torch.float32)
    return any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args)


def gradients(op: str) -> str:
    """The names of the arguments that get a gradient."""
    arguments = getattr(torch.ops.torchweld, op).default._schema.arguments
    places = _samples().DIFFERENTIABLE.get(op, ())
    return ", ".join(f"`{arguments[place].name}`" for place in places) or "none"


def ops_table() -> str:
    """Every public op: where it runs in which dtype, and its gradients."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    lines = [f"| op | {' | '.join(names)} | gradients to |", "| --- " * (len(names) + 2) + "|"]
    for op in sorted(_samples().PUBLIC):
        served = {device: served_dtypes(op, device) for device in DEVICES}
        cells = [", ".join(DEVICES[d] for d in DEVICES if t in served[d]) or "-" for t in DTYPES]
        if not _takes_floats(op):
            cells = ["integers only"] + ["-"] * (len(cells) - 1)
        lines.append(f"| `{op}` | {' | '.join(cells)} | {gradients(op)} |")
    built = build_facts()
    note = f"Made from a build for torch {built.get('torch')} with CUDA {built.get('cuda')}."
    if not built.get("cuda"):
        note = "CUDA stands for builds with CUDA; this page was made by one for the CPU alone."
    return "\n".join([*lines, "", note, ""])


def versions_table() -> str:
    """The versions that torchweld is built for and tested with, from the build files."""
    project = (ROOT / "pyproject.toml").read_text()
    setup = (ROOT / "setup.py").read_text()
    pins = (ROOT / "requirements" / "constraints.txt").read_text()
    python = re.search(r'^requires-python = ">=(.+)"', project, re.M)[1]
    least = re.search(r'^TORCH = "(.+)"', setup, re.M)[1]
    tested = re.search(r"^torch==(\S+)", pins, re.M)[1]
    archs = sorted(set(re.findall(r"sm_\d+a?", setup[setup.index("DEFAULT_ARCH_FLAGS") :])))
    reports = (json.loads(path.read_text()) for path in RESULTS.glob("nvidia-*/*.json"))
    measured = ", ".join(sorted({report["device"] for report in reports}))
    rows = {
        "Python": f"{python} or later",
        "torch": f"{least} or later to build; the suite runs with {tested}",
        "a built library": "runs with the minor release of torch that it was built for",
        "CUDA": "`nvcc` of the major release that torch was built with; none for the CPU alone",
        "GPU code in a default build": f"{', '.join(archs)}, and PTX of sm_80 for later chips",
        "GPUs measured": measured,
        "operating system": "Linux, x86-64",
    }
    table = [f"| {name} | {text} |" for name, text in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *table, ""])


def families_table() -> str:
    """The decoder families that `fuse` knows, and the ops of their parts."""
    from torchweld.integrations.fusion.layers.families import FAMILIES

    rows = [
        "| family | norms | MLP | attention | layer | loss |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for family in FAMILIES.values():
        offset = ", 1 + weight" if family.weight_offset else ""
        heads = {"head": ", norms of each head", "row": ", norms of q and k", None: ""}
        cells = [
            f"`{family.prefix}ForCausalLM`",
            f"`rms_norm`{offset}" + (", `rms_norm_linears`" if family.layer else ""),
            "`gated_linear`" if family.packed else "`gated_mlp`",
            f"`rotary`{heads[family.head_norm]}, `attention`",
            "`add_rms_norm`" if family.layer else "stock",
            "`linear_cross_entropy`",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _attention_row(name: str) -> str:
    paths = _of_tests("attention_paths")
    cells = []
    for way in paths.WAYS:
        if way == "packed" and paths.encodes(name):
            cells.append("-")
            continue
        calls = paths.attention_calls(name, way)
        cells.append(f"{calls.total() - calls['the op']} of {calls.total()}")
    return f"| `{name}` | {' | '.join(cells)} |"


def attention_table() -> str:
    """How many attention calls of a model of two layers leave the op."""
    paths = _of_tests("attention_paths")
    rows = [f"| family | {' | '.join(paths.WAYS)} |", "| --- " * (1 + len(paths.WAYS)) + "|"]
    # Each family takes seconds; a fork would lack the threads of torch.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        rows += pool.map(_attention_row, paths.FAMILIES)
    return "\n".join(rows) + "\n"


def parts_table(models: Iterable[tuple[str, str]] = ()) -> str:
    """The parts that `fuse` replaces in each model and why others stay stock; every causal language
    model by default."""
    parts = _of_tests("fused_parts")
    found = parts.fused_parts(models)
    counts = ", ".join(
        f"{sum(bool(each.ops[part]) for each in found.values())} {part}" for part in parts.PARTS
    )
    lines = [
        f"Models of transformers {importlib.metadata.version('transformers')}: {len(found)}. "
        f"Those that run a part as an op: {counts}.",
        "",
        f"| model type | {' | '.join(parts.PARTS)} | stock, and why |",
        "| --- " * (2 + len(parts.PARTS)) + "|",
    ]
    for kind, each in sorted(found.items()):
        cells = ["op" if each.ops[part] else "" for part in parts.PARTS]
        why = "; ".join(each.stock).replace("|", "\\|")
        lines.append(f"| `{kind}` | {' | '.join(cells)} | {why} |")
    return "\n".join([*lines, ""])


def plan_table() -> str:
    """The fastest layout that fits, by model and number of GPUs."""
    rows = ["| model | GPUs | FSDP2, context, tensor | GB a GPU | communication, without overlap |"]
    rows.append("| --- " * 5 + "|")
    for model in ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"):
        for gpus in (8, 64, 256, 1024):
            sizes, machine = plan.MODELS[model], plan.Machine()
            best = plan.layouts(sizes, machine, gpus, 8192, gpus, True)[0]
            cells = "does not fit | - | -"
            if best.total <= machine.memory:
                share = f"{best.share:.0%}, {best.share_without_overlap:.0%}"
                dims = f"{best.fsdp}, {best.cp}, {best.tp}"
                cells = f"{dims} | {best.total / 1e9:.0f} | {share}"
            rows.append(f"| {model} | {gpus} | {cells} |")
    return "\n".join([*rows, ""])


# For each page of docs/kernels: the family of results and a pattern of whole cases.
KERNELS = {
    "gemm_sm90": ("matmul", r"(linear( dx| dweight)?|bmm|gated_linear) \(.*(16|32|tf32|swiglu)"),
    "experts": ("experts", r"experts \(.*"),
    "attention_forward": ("attention", r"attention \(.*"),
    "attention_backward": ("attention", r"attention_backward \(.*float16.*"),
    "softmax": ("rows", r"softmax(_backward)? \([^)]*\) \w+"),
    "int4": ("int4", r"int4 \([^)]*\) \w+"),
}


def kernel_table(page: str) -> str:
    """The measured cases of a page of docs/kernels, a column pair for each GPU."""
    family, pattern = KERNELS[page]
    paths = sorted(RESULTS.glob(f"nvidia-*/{family}.json"))
    reports = [json.loads(path.read_text()) for path in paths]
    reports = [report for report in reports if report.get("gpus", 1) == 1]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for report in reports:
        for row in report["rows"]:
            if not re.fullmatch(pattern, row["case"]):
                continue
            ratio = "wrong" if row["ratio"] is None else f"{row['ratio']:.2f}"
            key = row["case"].removesuffix(f" over {row['against']}"), row["against"]
            cells.setdefault(key, {})[report["device"]] = f"{row['ours_us']:.1f} | {ratio}"
    devices = [report["device"] for report in reports]
    head = "".join(f" {device}, us | ratio |" for device in devices)
    lines = [f"| case | against |{head}", "| --- | --- |" + " --- | --- |" * len(devices)]
    for (case, against), found in cells.items():
        numbers = " | ".join(found.get(device, " | ") for device in devices)
        lines.append(f"| {case} | {against} | {numbers} |")
    return "\n".join([*lines, ""])


def models_table() -> str:
    """The measured training steps of models: ratios of time and of peak memory to each peer."""
    peers = {"stock": "stock sdpa", "compiled blocks": "compiled blocks", "Liger": "liger"}
    head = [*(f"over {name}" for name in peers), *(f"memory over {name}" for name in peers)]
    lines = [f"| step | GPU | ms | {' | '.join(head)} |", "| --- " * (3 + len(head)) + "|"]
    for path in sorted(RESULTS.glob("nvidia-*/models.json")):
        report = json.loads(path.read_text())
        found = {row["case"]: row for row in report["rows"]}
        for case, row in found.items():
            memory = found.get(f"{case} peak memory, MiB")
            if memory is None:
                continue
            ratios = [
                f"{each['ours_us'] / each['peers_us'][peer]:.2f}"
                if peer in each["peers_us"]
                else ""
                for each in (row, memory)
                for peer in peers.values()
            ]
            cells = [case, report["device"], f"{row['ours_us'] / 1e3:.0f}", *ratios]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def commands() -> str:
    """The help of `torchweld`, command by command, and of the tools of a checkout."""
    os.environ["COLUMNS"] = "90"  # the width that argparse writes for
    calls = {
        f"torchweld {command}".strip(): (torchweld_cli.main, command.split())
        for command in ("", "info", "explain", "tune")
    }
    for tool in (torchweld_bench, demo.main, puzzles.main, plan):
        name = tool.__name__.removesuffix(".main").removeprefix("torchweld_")
        calls[f"make {name} ARGS=..."] = (tool.main, [])
    texts = []
    for name, (main, command) in calls.items():
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main([*command, "--help"])
        texts.append(f"## {name}\n\n```text\n{out.getvalue().rstrip()}\n```\n")
    return "\n".join(texts)


class Page(NamedTuple):
    """A page of the reference.

    Attributes:
        title: The title.
        first: The sentence below it.
        prefix: The prefix of the names.
        groups: The names, by heading: the most used come first.
        begin: The first lines of the examples, after `IMPORTS`.
    """

    title: str
    first: str
    prefix: str
    groups: dict[str, str]
    begin: str = ""


IMPORTS = """\
import torch
import torch.nn.functional as F
from torch import nn

import torchweld
"""
PAGES = {
    "ops": Page(
        "Ops",
        "Each is also `torch.ops.torchweld.<name>`, with the same arguments.",
        "torchweld.",
        {
            "Attention": "attention attention_with_lse varlen_attention softmax_matmul "
            "causal_softmax",
            "Masks of attention": "leftpad_from_mask key_start_from_position_ids "
            "key_start_from_documents key_start_from_cu_seqlens",
            "Rotary embedding": "rotary",
            "Convolution": "causal_conv1d",
            "Norms": "rms_norm add_rms_norm rms_norm_gated layer_norm add_layer_norm",
            "Linear layers": "linear gated_mlp experts gated_linear gated_linear_pair "
            "grouped_linear grouped_gated_linear gated_activation bmm",
            "Norms with linear layers": "rms_norm_linear rms_norm_linears layer_norm_linear "
            "layer_norm_linears fold_layer_norm folded_layer_norm_linear",
            "Losses": "linear_cross_entropy cross_entropy linear_token_logprobs",
            "4-bit weights": "int4_linear int4_linear_repacked int4_repack int4_pack int4_unpack",
            "Softmax and the ops of the puzzles": "softmax row_sum add_scalar mul_relu outer_add "
            "outer_mul_relu scalar_attention conv2d",
        },
    ),
    "nn": Page(
        "Modules",
        "`torchweld.nn`: each replaces the torch code that it names.",
        "torchweld.nn.",
        {
            "": "Attention CausalSelfAttention RMSNorm LayerNorm GatedLinear RMSNormLinear "
            "LayerNormLinear FoldedLayerNormLinear LinearCrossEntropy CrossEntropyLoss Int4Linear "
            "Softmax"
        },
    ),
    "distributed": Page(
        "Distributed",
        "What torchweld adds to torch.distributed.",
        "torchweld.distributed.",
        {
            "Tensor parallel": "parallelize NormColwise Rowwise parameter_groups full_tensor",
            "Loss of a sharded vocabulary": "VocabParallel vocab_parallel_linear_cross_entropy",
            "Context parallel": "context_parallel shard_sequence gather_sequence "
            "context_parallel_attention",
            "FSDP2": "codes_as_parameters",
        },
        """\
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
""",
    ),
    "integrations": Page(
        "Hugging Face and SDPA",
        "`torchweld.fuse` and `torchweld.unfuse` are these functions under a shorter name.",
        "torchweld.integrations.",
        {
            "Models": "fuse FuseReport unfuse register_attention register_experts",
            "SDPA": "use_in_sdpa",
            "4-bit models": "TorchweldInt4Config register_quantizer register_lora",
        },
        """\
from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
mixture = OlmoeForCausalLM(OlmoeConfig(vocab_size=100, num_experts=8, **sizes))
tokens = torch.randint(0, 100, (2, 16))
""",
    ),
    "compat": Page(
        "flash-attn, xformers, causal_conv1d",
        "Functions with the names, layouts and defaults of other libraries.",
        "torchweld.compat.",
        {
            "flash-attn": "flash_attn.flash_attn_func flash_attn.flash_attn_varlen_func "
            "flash_attn.flash_attn_with_kvcache flash_attn.flash_attn_qkvpacked_func "
            "flash_attn.flash_attn_kvpacked_func flash_attn.flash_attn_varlen_qkvpacked_func "
            "flash_attn.flash_attn_varlen_kvpacked_func",
            "xformers": "xformers.memory_efficient_attention",
            "causal_conv1d": "causal_conv1d.causal_conv1d_fn causal_conv1d.causal_conv1d_update",
        },
        "from torchweld.compat import causal_conv1d, flash_attn, xformers\n",
    ),
    "tools": Page(
        "Tools",
        "Functions that explain, tune and quantise, and help in tests.",
        "torchweld.",
        {
            "Which kernel runs": "explain Explanation tune TuneResult",
            "Equal bits in every batch": "batch_invariant is_batch_invariant",
            "4-bit models": "quantize_ Int4 QuantizeReport dequantize_ load_quantized",
            "The installation": "info Info is_available unavailable_reason",
            "Tests": "testing.mad",
        },
    ),
}


def api() -> dict[str, list[str]]:
    """The full name of every public object, by page, in the order of the page."""
    return {
        name: [page.prefix + each for names in page.groups.values() for each in names.split()]
        for name, page in PAGES.items()
    }


def public(name: str) -> Any:
    """The object of a full name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _directive(name: str) -> str:
    kind = "autoclass" if inspect.isclass(public(name)) else "autofunction"
    return f".. {kind}:: {name}"


def api_page(name: str) -> str:
    page = PAGES[name]
    imports = IMPORTS + page.begin
    text = f"# {page.title}\n\n{page.first} The examples begin with\n\n```python\n{imports}```\n"
    for heading, names in page.groups.items():
        body = "\n\n".join(_directive(page.prefix + each) for each in names.split())
        text += f"\n## {heading}\n" * bool(heading) + f"\n```{{eval-rst}}\n{body}\n```\n"
    return text


def benchmarks() -> str:
    """The page of results, its pictures found from here."""
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]+\]\()", r"\1../../benchmarks/results/", text)
    first = "# Benchmarks\n\nEvery case that was measured."
    text, places = re.subn(r"# Results\n\nMade by .*?\n\n", f"{first} ", text, count=1)
    if not places:
        raise ValueError("benchmarks/results/README.md must begin with its title and its maker")
    return text


def write() -> None:
    """Writes the files that changed, so that sphinx reads only those again."""
    OUT.mkdir(exist_ok=True)
    files = {
        "ops.part.md": ops_table(),
        "versions.part.md": versions_table(),
        "plan.part.md": plan_table(),
        "families.part.md": families_table(),
        "models.part.md": models_table(),
        **{f"kernel_{page}.part.md": kernel_table(page) for page in KERNELS},
        "commands.md": "# Command line\n\n" + commands(),
        "benchmarks.md": benchmarks(),
        **{f"api_{page}.md": api_page(page) for page in PAGES},
    }
    for name, text in files.items():
        path = OUT / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    PARTS.write_text(parts_table(), encoding="utf-8")
    ATTENTION.write_text(attention_table(), encoding="utf-8")
