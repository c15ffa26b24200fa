"""Trains a small GPT-2 or Llama on several processes, and checks the loss against one process.

    torchrun --nproc-per-node 2 examples/train_parallel.py --tp 2
    torchrun --nproc-per-node 4 examples/train_parallel.py --model llama --fsdp 2 --cp 2
    torchrun --nproc-per-node 8 examples/train_parallel.py --fsdp 2 --cp 2 --tp 2

Uses NCCL on GPUs and gloo on the CPU. Process 0 also trains the stock model of transformers on
whole batches; the losses of every step must be equal. Needs `pip install torchweld[hf]`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import torchweld
from demo.text import END, encode, read_text, train_tokenizer
from torchweld.distributed import context_parallel, parallelize, parameter_groups, shard_sequence

TOLERANCE = 1e-3  # of the loss, which many steps of float32 in another order drift apart by


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("gpt2", "llama"), default="gpt2")
    parser.add_argument("--tp", type=int, default=1, help="processes that share the weights' work")
    parser.add_argument(
        "--cp", type=int, default=1, help="processes that share a sequence's tokens"
    )
    parser.add_argument("--fsdp", type=int, help="processes with batches of their own; the rest")
    parser.add_argument("--method", choices=("all_gather", "ulysses", "ring"), default="all_gather")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files; Python's library")
    for name, default, text in (
        ("steps", 10, "training steps"),
        ("batch", 8, "sequences in a step, of all processes together"),
        ("context", 128, "tokens in a sequence"),
        ("layers", 2, "transformer blocks"),
        ("width", 128, "width of the model"),
        ("heads", 8, "attention heads"),
        ("vocab", 1024, "size of the tokenizer that is trained on the text"),
        ("seed", 0, "of the weights and the batches"),
        ("lr", 1e-3, "learning rate of AdamW"),
    ):
        text += "; default: %(default)s"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--no-check", action="store_true", help="leave the stock model out")
    return parser.parse_args(argv)


def refusal(args: argparse.Namespace, size: int) -> str | None:
    """One sentence with the first error in the sizes, or None."""
    if args.fsdp is None:
        args.fsdp = max(1, size // max(1, args.tp * args.cp))
    if args.fsdp * args.cp * args.tp != size:
        return (
            f"--fsdp x --cp x --tp must be the {size} processes, but got {args.fsdp} x {args.cp} x "
            f"{args.tp}"
        )
    if args.batch % args.fsdp:
        return f"--batch must be a multiple of --fsdp {args.fsdp}, but got {args.batch}"
    if args.cp > 1 and args.context % (2 * args.cp):
        return f"--context must be a multiple of 2 x --cp {args.cp}, but got {args.context}"
    return None


def make_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(args.seed)  # the same weights in every process
    sizes = {"vocab_size": args.vocab, "bos_token_id": 0, "eos_token_id": 0}
    if args.model == "gpt2":
        counts = {"n_embd": args.width, "n_layer": args.layers, "n_head": args.heads}
        no_dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        return GPT2LMHeadModel(
            GPT2Config(n_positions=args.context, **sizes, **counts, **no_dropout)
        )
    config = LlamaConfig(
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=max(1, args.heads // 2),
        max_position_embeddings=args.context,
        **sizes,
    )
    return LlamaForCausalLM(config)


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields windows of text and their next tokens, `(batch, context)`, equal in all processes."""
    text = read_text(args.text)
    tokenizer, _ = train_tokenizer(text, args.vocab)
    need = args.steps * args.batch * (args.context + 1)
    ids = encode(text, tokenizer, tokenizer.token_to_id(END), need, args.seed)
    draw = torch.Generator().manual_seed(args.seed)
    for _ in range(args.steps):
        starts = torch.randint(len(ids) - args.context, (args.batch,), generator=draw)
        windows = torch.stack([ids[i : i + args.context + 1] for i in starts])
        yield windows[:, :-1], windows[:, 1:]


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Fuses, shards with tensor parallel, then with FSDP2 over all processes with other tokens."""
    torchweld.fuse(model, check=False)
    if mesh["tp"].size() > 1:
        parallelize(model, mesh["tp"])
    if mesh["fsdp"].size() * mesh["cp"].size() > 1:
        others = mesh["fsdp", "cp"]._flatten("others")
        for block in getattr(model.base_model, "h", None) or model.base_model.layers:
            fully_shard(block, mesh=others)
        fully_shard(model, mesh=others)


def part_of(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """Selects this process's sequences and tokens of a batch."""
    t = t.chunk(mesh["fsdp"].size())[mesh["fsdp"].get_local_rank()]
    return shard_sequence(t, mesh["cp"]) if mesh["cp"].size() > 1 else t


def train(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> list[float]:
    """Trains the sharded model; returns the loss of each step over the whole batch."""
    model = make_model(args).to(device).train()
    shard(model, mesh)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=args.lr)
    positions = torch.arange(args.context).expand(args.batch, -1)
    others = mesh["fsdp"].size() * mesh["cp"].size()
    losses = []
    for ids, labels in batches(args):
        inputs = {"input_ids": ids, "position_ids": positions}
        inputs = {name: part_of(t, mesh).to(device) for name, t in inputs.items()}
        logits = forward(args, model, inputs, mesh)
        targets = part_of(labels, mesh).to(device).flatten()
        # FSDP2 averages gradients over processes, but the loss is a mean over all tokens.
        part = F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
        loss = part / labels.numel()
        (loss * others).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        for name in ("fsdp", "cp"):
            dist.all_reduce(total, group=mesh[name].get_group())
        losses.append(total.item())
    return losses


def forward(
    args: argparse.Namespace, model: nn.Module, inputs: dict[str, Tensor], mesh: DeviceMesh
) -> Tensor:
    if mesh["cp"].size() == 1:
        return model(**inputs, use_cache=False).logits
    with context_parallel(mesh["cp"], method=args.method):
        return model(**inputs, use_cache=False).logits


def train_alone(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Trains the stock model on whole batches in one process; returns the loss of each step."""
    model = make_model(args).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for ids, labels in batches(args):
        logits = model(input_ids=ids.to(device), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 where the losses differ, 2 for bad sizes and without torchrun."""
    args = arguments(argv)
    if not dist.is_initialized() and "RANK" not in os.environ:
        fix = "torchrun --nproc-per-node 2 examples/train_parallel.py --tp 2"
        print(f"train_parallel: torchrun must start it; use {fix}", file=sys.stderr)
        return 2
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else "cpu"
    device = torch.device(device)
    started = not dist.is_initialized()
    if on_gpu:
        torch.cuda.set_device(device)
    if started:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    status = run(args, device)
    if started:
        dist.barrier()  # a process that leaves early breaks the others' connections
        dist.destroy_process_group()
    return status


def run(args: argparse.Namespace, device: torch.device) -> int:
    first = dist.get_rank() == 0
    sentence = refusal(args, dist.get_world_size())
    if sentence is not None:
        if first:
            print(f"train_parallel: {sentence}", file=sys.stderr)
        return 2
    names = ("fsdp", "cp", "tp")
    mesh = init_device_mesh(device.type, (args.fsdp, args.cp, args.tp), mesh_dim_names=names)
    begin = time.perf_counter()
    losses = train(args, mesh, device)
    seconds = time.perf_counter() - begin
    if not first:
        return check([], losses, args)
    tokens = args.steps * args.batch * args.context
    print(
        f"{args.model}: --fsdp {args.fsdp} --cp {args.cp} --tp {args.tp} on {device.type}, "
        f"{tokens} tokens in {seconds:.1f} s"
    )
    return check([] if args.no_check else train_alone(args, device), losses, args)


def check(wanted: list[float], losses: list[float], args: argparse.Namespace) -> int:
    """Process 0 prints and compares the losses; all processes return its result."""
    status = [0]
    if wanted:
        print("step    loss    one process    difference")
        for step, (a, b) in enumerate(zip(losses, wanted, strict=True), 1):
            print(f"{step:4}  {a:.6f}    {b:.6f}      {a - b:+.1e}")
            status[0] |= int(not abs(a - b) <= TOLERANCE)
        print("the same loss" if status[0] == 0 else f"the losses differ by more than {TOLERANCE}")
    dist.broadcast_object_list(status, 0)
    return status[0]


if __name__ == "__main__":
    exit_status = main()
    sys.stdout.flush()
    os._exit(exit_status)  # NOTE: gloo's threads abort one normal exit in ten (torch 2.11)
